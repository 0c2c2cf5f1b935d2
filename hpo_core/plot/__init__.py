"""Pictures of gates, trajectories, batches and entropy windows, of your own tensors. They need matplotlib.

Each function draws one idea with the numbers of the definition in float64, and returns the Axes or Figure, on which
matplotlib's own functions go on: ``axes.set_title(...)``, ``axes.figure.savefig("gate.png")``. Tensors may lie on any
device and carry a graph; drawing copies the shown numbers to the host. ``import hpo_core`` imports nothing of this.
"""

from .batches import batch_layout
from .curves import gate_curve
from .entropies import entropy_window
from .trajectories import trajectory

__all__ = ["batch_layout", "entropy_window", "gate_curve", "trajectory"]
