"""Draw the pictures of speed that the manual shows, from the tables of its pages: where a step's time goes, the CPU
kernels against the memory's speed, and the model of the GPU kernels.

    python bench/speed_pictures.py --output docs/pictures

takes seconds and measures nothing. Each picture carries a digest of the numbers that it shows, by which a test sees
that a page has changed and its picture has not.
"""

from __future__ import annotations

import argparse
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import pyplot
from matplotlib.lines import Line2D

from hpo_core.plot.canvas import BLUE, GREEN, ORANGE, PURPLE, RED, SKY

pyplot.switch_backend("agg")

DOCS = Path(__file__).parents[1] / "docs"

GREY = "#999999"


# ----------------------------------------------------------------------------------------------------- tables of pages


def rows_of(page: str, heading: str) -> list[list[str]]:
    """The cells below the one table of a page whose first line has this text."""
    lines = (DOCS / page).read_text().splitlines()
    (first,) = [at for at, line in enumerate(lines) if line.startswith("|") and heading in line]
    found = []
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip().strip("|").split("|")])
    return found


def number(cell: str) -> float:
    """The first number of a cell, without its unit."""
    return float(re.search(r"[\d.,]+", cell)[0].rstrip(",.").replace(",", ""))  # type: ignore[index]


# ---------------------------------------------------------------------------------------- where the time of a step goes


def parts_of_a_step() -> tuple[tuple[str, str], list[tuple[str, float, float]]]:
    """Names of the two trainers, and seconds of each part in either."""
    kinds, parts = ("GRPOTrainer", "HPOTrainer"), []
    for name, one, other, _ in rows_of("trl_measured.md", "| | GRPOTrainer | HPOTrainer | ratio |"):
        if name == "whole":
            return kinds, parts
        parts.append((name, number(one), number(other)))
    raise ValueError("docs/trl_measured.md: expected a table of parts with a row named 'whole'")


def draw_step() -> Any:
    """Two bars of parts; parts too small to see are one part."""
    kinds, parts = parts_of_a_step()
    seen = [part for part in parts if max(part[1:]) > 0.1]
    small = [part for part in parts if max(part[1:]) <= 0.1]
    seen.append(("all else", sum(part[1] for part in small), sum(part[2] for part in small)))
    figure, axis = pyplot.subplots(figsize=(6.2, 3.1), layout="constrained")
    colours = (SKY, BLUE, GREEN, ORANGE, GREY)
    for at in (0, 1):
        begin = 0.0
        for (name, *seconds), colour in zip(seen, colours, strict=True):
            width = seconds[at]
            axis.barh(at, width, 0.62, begin, color=colour, edgecolor="white", label=name if at == 0 else None)
            if width > 1.4:
                text = "white" if colour == BLUE else "black"
                axis.text(begin + width / 2, at, f"{width:.1f}", ha="center", va="center", fontsize=9.5, color=text)
            begin += width
        axis.text(begin + 0.3, at, f"{begin:.1f} s", va="center", fontweight="bold", fontsize=11)
    axis.set_yticks((0, 1), kinds, fontsize=11)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.12 * sum(part[1] for part in parts))
    axis.set_xlabel(
        "seconds of processor time: a rollout's scores\nand two optimiser steps, sampling left out", fontsize=10.5
    )
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=10.5)
    return figure


# --------------------------------------------------------------------------------------- CPU kernels against the memory


class Case(NamedTuple):
    """One operation, and how many floors it takes: ours, with autograd if it has any, and its peers'."""

    name: str
    ours: float
    with_autograd: float | None
    peers: dict[str, float]


# The kernels of each kind that the picture shows, of those on the page, with their short names in it.
LOSSES = {
    "ppo_clip, 512 rows of 2,048": "ppo_clip",
    "dapo, 512 rows of 2,048": "dapo",
    "gspo, 512 rows of 2,048": "gspo",
    "cispo, 512 rows of 2,048": "cispo",
    "fiberpo, 1,048,576 tokens in 512 ragged rows, masked": "fiberpo, masked",
    "ppo_clip + k3, 512 rows of 2,048": "ppo_clip + k3",
    "ppo_clip + top 20% by entropy, 512 rows of 2,048": "ppo_clip + top 20 %",
    "ppo_clip, 50,000 rows of 21": "ppo_clip, rows of 21",
    "gspo, 50,000 rows of 21": "gspo, rows of 21",
}
OTHERS = {
    "threshold and mask of the top 20% of 10,000,000": "top 20 % of 10^7",
    "means over 4, 1,000 rows of 1,000": "windows of 4",
    "grpo, 100,000 rewards in 12,500 groups, dense ids": "grpo, 10^5 rewards",
    "counts, 512 rows of 2,048": "counts of rows",
}


def losses() -> list[Case]:
    """Cells of peers are times the call with autograd; floors, times the call without."""
    found: dict[str, Case] = {}
    table = rows_of(
        "benchmarks_losses.md", "| policy loss, forward and backward | ms | ms without autograd | x floor | eager"
    )
    for name, whole, bare, floors, *others in table:
        if name in LOSSES:
            floor = number(bare) / number(floors)
            kinds = ("eager PyTorch", "torch.compile", "verl", "TRL", "Liger")
            peers = {
                kind: number(cell) * number(whole) / floor for kind, cell in zip(kinds, others, strict=True) if cell
            }
            found[name] = Case(LOSSES[name], number(floors), number(whole) / floor, peers)
    return [found[name] for name in LOSSES]


# The kind of a peer by its first words on the page of other operators; the rest is another way in PyTorch.
KINDS = {"eager": "eager PyTorch", "compile": "torch.compile", "verl": "verl", "trl": "TRL"}


def other_operators() -> list[Case]:
    found: dict[str, Case] = {}
    for name, _, floors, others in rows_of("benchmarks_ops.md", "| other ops | ms | x floor |"):
        if name not in OTHERS:
            continue
        peers: dict[str, float] = {}
        for peer, times in re.findall(r"(?:^|, )(\w.*?) ([\d.]+)x", others):
            kind = KINDS.get(peer.split(",")[0].strip(), "other PyTorch")
            peers[kind] = min(peers.get(kind, float("inf")), float(times) * number(floors))
        found[name] = Case(OTHERS[name], number(floors), None, peers)
    return [found[name] for name in OTHERS]


def logprobs() -> list[Case]:
    found = []
    kinds = ("eager PyTorch", "torch.compile", "TRL", "verl", "verl, entropy in chunks")
    for name, _, floors, *others in rows_of("logprobs_speed.md", "| | ms | floors | eager PyTorch"):
        peers = {kind: number(cell) * number(floors) for kind, cell in zip(kinds, others, strict=False) if cell}
        peers.pop("verl, entropy in chunks")
        ways = {"forward": "logits: forward", "both": "logits: both"}
        if name in ways:
            found.append(Case(ways[name], number(floors), None, peers))
    return found


def every_case() -> list[Case]:
    return [*losses(), *other_operators(), *logprobs()]


def draw_floors() -> Any:
    """A line for each operation, a dot for each contestant."""
    cases = every_case()
    marks = {
        "eager PyTorch": ("s", ORANGE), "torch.compile": ("D", PURPLE), "verl": ("^", RED), "TRL": ("v", GREEN),
        "Liger": ("P", SKY), "other PyTorch": ("X", GREY),
    }  # fmt: skip
    figure, axis = pyplot.subplots(figsize=(6.2, 6.6), layout="constrained")
    for at, case in enumerate(cases):
        most = max([*case.peers.values(), case.ours])
        axis.plot([min(1.0, case.ours), most], [at, at], color="#dddddd", lw=1, zorder=0)
        if case.with_autograd is not None:
            axis.plot(case.with_autograd, at, "o", mfc="white", mec=BLUE, ms=8, mew=1.6)
        axis.plot(case.ours, at, "o", color=BLUE, ms=8)
        for kind, floors in case.peers.items():
            mark, colour = marks[kind]
            axis.plot(floors, at, mark, color=colour, ms=6.5, mec="white", mew=0.5)
    axis.axvline(1, color="black", lw=1)
    axis.set(xscale="log", xlabel="floors: 1 is the time of streaming the same bytes")
    axis.set_yticks(range(len(cases)), [case.name for case in cases], fontsize=10.5)
    axis.invert_yaxis()
    axis.set_xticks([1, 10, 100, 1000], ["1", "10", "100", "1,000"])
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0)
    handles = [dot(BLUE, BLUE, "o", "hpo_core"), dot(BLUE, "white", "o", "hpo_core with autograd")]
    handles += [dot(colour, colour, mark, kind) for kind, (mark, colour) in marks.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=3, frameon=False, fontsize=10.5)
    return figure


# ----------------------------------------------------------------------------------------- the model of the GPU kernels

# An H100, as docs/logprobs_speed.md models it: 132 multiprocessors at 1.7 GHz, each of which issues 65 to 80 % of four
# instructions a cycle, for 32 tokens at once; 3.0 TB/s from memory.
ISSUED = tuple(132 * 1.7e9 * 4 * share * 32 for share in (0.65, 0.80))
BYTES_A_SECOND = 3.0e12
TOKENS = 1 << 20
TOKENS_OF_A_LOOP = 4  # of an iteration with 128-bit loads of float32


class Preset(NamedTuple):
    """Microseconds of 2^20 tokens: issue at either share, and memory, of each kernel with a loop over tokens."""

    name: str
    kernels: list[tuple[str, tuple[float, float], float]]


def gpu_presets() -> list[Preset]:
    """A row of the table of launches each, with the loops of its kernels."""
    loops = {row[0].strip("`"): row for row in rows_of("gpu.md", "| loop | code | way | for one |")}
    found = []
    for presets, cuda, *_ in rows_of("gpu.md", "| presets | CUDA | CUDA, few tokens | Triton |"):
        names = re.findall(r"`([^`]+)`", presets)
        kernels = []
        for kernel, times in re.findall(r"`([^`]+)`(?: x (\d+))?", cuda):
            rows = [loops[name] for name in (kernel, f"{kernel}, writing") if name in loops]
            if not rows:  # prepare, which reads no tokens
                continue
            count = int(times or 1)
            moved = 16 * sum(number(row[8]) + number(row[9]) for row in rows) / TOKENS_OF_A_LOOP
            issue = [1e6 * count * TOKENS * sum(number(row[3]) for row in rows) / share for share in ISSUED]
            kernels.append((kernel, (issue[1], issue[0]), 1e6 * count * TOKENS * moved / BYTES_A_SECOND))
        shown = [name for name in names if "," not in name][:2] or names[:1]
        found.append(Preset(", ".join(shown) + (" ..." if len(names) > len(shown) else ""), kernels))
    return found


def draw_gpu() -> Any:
    """Two bars for each kind of preset: the longer one decides."""
    presets = gpu_presets()
    figure, axis = pyplot.subplots(figsize=(6.2, 5.6), layout="constrained")
    for at, preset in enumerate(presets):
        low, high = (sum(issue[side] for _, issue, _ in preset.kernels) for side in (0, 1))
        memory = sum(moved for *_, moved in preset.kernels)
        axis.barh(at - 0.19, low, 0.36, color=ORANGE, label=None if at else "issue, 80 % of slots")
        axis.barh(
            at - 0.19, high - low, 0.36, low, color=ORANGE, alpha=0.4, label=None if at else "issue, 65 % of slots"
        )
        axis.barh(at + 0.19, memory, 0.36, color=BLUE, label=None if at else "memory, 3.0 TB/s")
    axis.set_yticks(range(len(presets)), [preset.name for preset in presets], fontsize=10.5)
    axis.invert_yaxis()
    axis.set_xlabel("modelled microseconds on an H100: loss and gradient\nof 2^20 tokens", fontsize=10.5)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=3, frameon=False, fontsize=9.5)
    return figure


# ---------------------------------------------------------------------------------------------------------------- files


def dot(edge: str, face: str, mark: str, label: str) -> Any:
    return Line2D([], [], color=edge, markerfacecolor=face, marker=mark, ls="", label=label)


# How each is drawn, and the numbers that it shows.
PICTURES = {
    "step_time.png": (draw_step, parts_of_a_step),
    "cpu_floors.png": (draw_floors, every_case),
    "gpu_model.png": (draw_gpu, gpu_presets),
}


def digest(numbers: Any) -> str:
    return hashlib.sha256(repr(numbers).encode()).hexdigest()[:16]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=DOCS / "pictures", help="folder (default: docs/pictures)")
    options = parser.parse_args(argv)
    options.output.mkdir(parents=True, exist_ok=True)
    for name, (draw, numbers) in PICTURES.items():
        figure, facts = draw(), {"Software": None, "Comment": digest(numbers())}
        figure.savefig(options.output / name, dpi=100, metadata=facts, pil_kwargs={"optimize": True})
        pyplot.close(figure)
        print(f"written: {options.output / name}")


if __name__ == "__main__":
    main()
