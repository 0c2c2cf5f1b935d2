"""Draw the pictures of docs/gating_explained.md and docs/gates.md by hpo_core.plot: curves of gates, one answer's way
through a gate on two levels, and a packed batch with its levels.

    python examples/gate_pictures.py --output docs/pictures

takes a second and needs no model.
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path
from typing import Any

import torch
from matplotlib import pyplot
from PIL import Image

import hpo_core as hpo
from hpo_core import gates, plot
from hpo_core.gates import Level, LogClip, RatioGate

pyplot.switch_backend("agg")

CURVES = (
    ("ppo_clip(): flat beyond its bounds", gates.ppo_clip()),
    ("dapo(): more room upwards", gates.dapo()),
    ("cispo(1.28): a constant gradient beyond its cap", gates.cispo(1.28)),
    ("sapo(): fades out slowly", gates.sapo()),
    ("spo(): pulls back what went too far", gates.spo()),
    ("ce_gppo(): some gradient beyond its bounds", gates.ce_gppo()),
)


def draw_gates() -> Any:
    """One panel for each gate, on the same axes."""
    figure, axes = pyplot.subplots(3, 2, figsize=(7.6, 7.8), sharex=True, sharey=True, layout="constrained")
    for panel, (title, gate) in zip(axes.flat, CURVES, strict=True):
        plot.gate_curve(gate, ratios=(0.3, 3.0), axes=panel)
        panel.set_title(title, fontsize=10, loc="left")
        panel.set(xlabel="", ylabel="", ylim=(-3.1, 3.1))
        panel.get_legend().remove()
    figure.supxlabel("ratio of the token, e^(logp - old_logp)", fontsize=10)
    figure.supylabel("d objective / d logp", fontsize=10)
    lines = axes.flat[0].lines[:2]
    figure.legend(lines, ["advantage 1", "advantage -1"], loc="outside upper center", ncols=2, frameon=False)
    return figure


# The gates by the ratios at which they bend. Gates that read more than the batch are left out.
EVERY = {
    (0.3, 3.0): (
        *(gates.reinforce(), gates.ppo_clip(), gates.ppo_clip(ratio_dual=2.0), gates.dapo(), gates.triplet_clip()),
        *(gates.ce_gppo(), gates.cispo(1.5), gates.aspo(), gates.sapo(), gates.spo(), gates.dro(), gates.kimi()),
        *(gates.opmd(), gates.ppo_penalty(), gates.dppo_tv(), gates.dppo_kl(), gates.gmpo(), gates.topr()),
        *(gates.vespo(), gates.a_lol(), gates.rec(), gates.fiberpo(slope=1.0)),
    ),
    (0.9985, 1.0015): (gates.gspo(), gates.gspo_token(), gates.step_gspo()),
    (0.993, 1.007): (gates.luspo(),),
}


def draw_every_gate() -> Any:
    """A small panel for each gate, for the page that lists them."""
    drawn = [(ratios, gate) for ratios, found in EVERY.items() for gate in found]
    rows = -(-len(drawn) // 4)
    figure, axes = pyplot.subplots(rows, 4, figsize=(7.2, 1.4 * rows), layout="constrained")
    for panel in axes.flat[len(drawn) :]:
        panel.set_visible(False)
    for panel, (ratios, gate) in zip(axes.flat[: len(drawn)], drawn, strict=True):
        plot.gate_curve(gate, ratios=ratios, points=161, axes=panel)
        dual = gate.name == "ppo_clip" and gate.token.high[1] < 10
        panel.set_title(f"{gate.name}, dual" if dual else gate.name, fontsize=8, loc="left")
        panel.set(xlabel="", ylabel="")
        bottom, top = panel.get_ylim()
        panel.set_ylim(max(bottom, -3.2), min(top, 3.2))
        panel.tick_params(labelsize=6.5)
        panel.ticklabel_format(useOffset=False)
        panel.locator_params(nbins=4)
        panel.get_legend().remove()
    figure.supxlabel("ratio, e^(logp - old_logp)", fontsize=9)
    figure.supylabel("d objective / d logp", fontsize=9)
    lines = axes.flat[0].lines[:2]
    figure.legend(lines, ["advantage 1", "advantage -1"], loc="outside upper center", ncols=2, frameon=False)
    return figure


def draw_trajectory() -> Any:
    """The worked example of the page."""
    answer = Level(LogClip(low=(-0.1, -0.1), high=(0.1, 0.1)))
    gate = RatioGate("budgets", LogClip(low=(-0.2, -0.2), high=(0.2, 0.2)), levels=(answer,))
    x = torch.tensor([0.30, 0.10, -0.10, 0.50])
    old_logp = torch.full((4,), -1.0)
    batch = hpo.PackedBatch.from_lengths([4])
    words = ["The", "root", "is", "3"]
    return plot.trajectory(old_logp + x, old_logp, torch.tensor([1.0]), batch, gate, labels=words)


def draw_batch() -> Any:
    """Two prompts with two agents' trajectories each, one of which goes on in a second row."""
    steps = [[0, 3], [4, 8], [8, 13], [13, 15], [16, 17], [17, 23], [24, 27], [28, 30]]
    mask = torch.ones(30, dtype=torch.bool)
    mask[[3, 15, 23, 27]] = False  # a tool's words
    batch = hpo.PackedBatch.from_lengths(
        [8, 5, 4, 6, 7],
        steps=torch.tensor(steps),
        trajectory_ids=torch.tensor([0, 0, 1, 2, 3]),
        group_ids=torch.tensor([0, 0, 0, 1, 1]),
        domain_ids=torch.tensor([0, 0, 0, 0, 0]),
    ).replace(mask=mask)
    return plot.batch_layout(batch).figure


PICTURES = {
    "gates.png": draw_gates,
    "every_gate.png": draw_every_gate,
    "trajectory.png": draw_trajectory,
    "batch.png": draw_batch,
}


def save(figure: Any, path: Path) -> None:
    """With a palette of 64 colours a picture of lines is a third as large."""
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=100)
    Image.open(drawn).convert("RGB").quantize(64).save(path, optimize=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--output", type=Path, default=Path("docs/pictures"), help="folder (default: docs/pictures)")
    options = parser.parse_args(argv)
    options.output.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        figure = draw()
        save(figure, options.output / name)
        pyplot.close(figure)
        print(f"written: {options.output / name}")


if __name__ == "__main__":
    main()
