"""Draw the learning curves that the manual shows, from the numbers that the runs left.

    python bench/learning_curves.py && python bench/entropy_curves.py --steps 200
    python examples/demo_agent.py --control --output bench/results
    python bench/curve_pictures.py --output docs/pictures

A line is the mean over seeds of the mean over the last ten rollouts; the band around it is the standard error over
seeds, and the pale line below it the mean over seeds of each rollout, not smoothed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot

from hpo_core.plot.canvas import BLUE, GREEN, ORANGE, PURPLE, RED, SKY

pyplot.switch_backend("agg")

ROOT = Path(__file__).parents[1]
COLOURS = (BLUE, RED, GREEN, ORANGE, PURPLE, SKY)  # a control is black and dashed
SMOOTHED = 10

Curves = dict[str, list[list[float]]]  # for each kind of run the curves of its seeds


def smoothed(curve: Sequence[float]) -> list[float]:
    """Means over the last ten, over fewer at the start."""
    return [statistics.fmean(curve[max(0, at + 1 - SMOOTHED) : at + 1]) for at in range(len(curve))]


def over_seeds(curves: list[list[float]]) -> tuple[list[float], list[float]]:
    """Mean and standard error at each point."""
    points = list(zip(*curves, strict=True))
    spread = [statistics.stdev(point) / math.sqrt(len(point)) if len(point) > 1 else 0.0 for point in points]
    return [statistics.fmean(point) for point in points], spread


def trainers(folder: Path) -> Curves:
    seeds = json.loads((folder / "learning_curves.json").read_text()).values()
    names = {"GRPOTrainer": "GRPOTrainer", "HPOTrainer": "HPOTrainer", "GRPO nudged": "GRPOTrainer, nudged (control)"}
    return {shown: [runs[kind] for runs in seeds] for kind, shown in names.items()}


def entropies(folder: Path) -> Curves:
    seeds = json.loads((folder / "entropy_curves.json").read_text()).values()
    names = {
        "none": "none", "forking_tokens": 'forking_tokens("0.2")', "epo": "epo", "adaptive": "adaptive bonus",
        "ares": "ares(4)", "random": "random fifth (control)",
    }  # fmt: skip
    return {shown: [runs[kind]["rewards"] for runs in seeds] for kind, shown in names.items()}


def agents(folder: Path) -> Curves:
    runs = json.loads((folder / "agent.json").read_text())["runs"]
    names = {"gigpo": "gigpo", "hgpo": "hgpo", "grpo": "grpo", "grpo_discounted": "grpo, discounted (control)"}
    return {shown: [run["success"] for run in runs if run["estimator"] == kind] for kind, shown in names.items()}


def draw_curves(axis: Any, curves: Curves, xlabel: str, ylabel: str, title: str) -> None:
    colours = iter(COLOURS)
    for name, of_seeds in curves.items():
        control = name.endswith("(control)")
        colour, style = ("black", "--") if control else (next(colours), "-")
        mean, error = over_seeds([smoothed(curve) for curve in of_seeds])
        at = range(1, len(mean) + 1)
        if len(curves) < 5:  # more would hide each other
            axis.plot(at, over_seeds(of_seeds)[0], color=colour, alpha=0.22, lw=0.7)
        low, high = ([value + side * spread for value, spread in zip(mean, error, strict=True)] for side in (-1, 1))
        axis.fill_between(at, low, high, color=colour, alpha=0.08, lw=0)
        axis.plot(at, mean, style, color=colour, lw=1.7, label=name)
    axis.set(ylim=(0, 1), xlim=(0, len(mean)), xlabel=xlabel, ylabel=ylabel)
    axis.set_title(title, fontsize=11, loc="left")
    axis.spines[["top", "right"]].set_visible(False)
    place = (
        {"loc": "lower right"}
        if len(curves) < 5
        else {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16), "ncols": 2}
    )
    axis.legend(frameon=False, fontsize=9.5, **place)


def draw_learning(folder: Path) -> Any:
    figure, axes = pyplot.subplots(2, 1, figsize=(6.2, 8.0), layout="constrained")
    draw_curves(
        axes[0], trainers(folder), "rollout (four optimiser steps each)", "mean reward", "two trainers, one loss"
    )
    draw_curves(axes[1], entropies(folder), "rollout (four optimiser steps each)", "", "entropy methods")
    return figure


def draw_agent(folder: Path) -> Any:
    figure, axis = pyplot.subplots(figsize=(6.2, 4.2), layout="constrained")
    label = "update (8 layouts, 16 rollouts each)"
    draw_curves(axis, agents(folder), label, "success of the sampled rollouts", "credit for turns")
    return figure


PICTURES = {"learning_curves.png": draw_learning, "agent_curves.png": draw_agent}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=ROOT / "bench/results", help="folder of the runs' numbers")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/pictures", help="folder (default: docs/pictures)")
    options = parser.parse_args(argv)
    options.output.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        figure = draw(options.results)
        figure.savefig(options.output / name, dpi=100, metadata={"Software": None}, pil_kwargs={"optimize": True})
        pyplot.close(figure)
        print(f"written: {options.output / name}")


if __name__ == "__main__":
    main()
