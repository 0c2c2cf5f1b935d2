"""Prints the tables of docs/logprobs_speed.md, docs/linear_logprobs.md and docs/benchmarks_presets.md from results.

python bench/run.py --only logprobs && python bench/tables.py bench/results/results.json
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

from bench_presets import SHORT
from gpu_tables import table
from report import digits

TABLES = {
    "token_logprobs": ("eager", "torch.compile", "TRL", "verl", "verl, entropy in chunks"),
    "linear_token_logprobs": (
        "eager", "TRL's chunked function", "verl's fused function", "Liger's fused linear function",
        "F.linear_cross_entropy, no entropy",
    ),
}  # fmt: skip


def of_op(rows: list[dict[str, Any]], peers: tuple[str, ...]) -> str:
    """Milliseconds and floors of hpo_core, how many times slower its peers are, and bytes a logit that each holds."""
    heads = ("", "load", "ms", "floors", *(f"{peer}: times slower" for peer in peers), "bytes a logit, in this order")
    lines = []
    for case, group in itertools.groupby(rows, key=lambda row: row["case"]):
        found = {row["contestant"]: row for row in group}
        ours, held = found["hpo_core"], [found[name] for name in ("hpo_core", *peers) if name in found]
        lines.append(
            (
                case.partition(", ")[2], f"{ours['load']:.0f}", digits(ours["milliseconds"]), digits(ours["to_floor"]),
                *(f"{digits(found[peer]['slower_than_hpo_core'])}x" if peer in found else "" for peer in peers),
                ", ".join(f"{row['extra_bytes_per_unit']:.1f}" for row in held),
            )
        )  # fmt: skip
    return table(heads, lines)


def presets(rows: list[dict[str, Any]]) -> str:
    """Milliseconds of hpo_core with autograd and without, and how many times slower eager PyTorch and verl are."""
    rows = [row for row in rows if SHORT not in row["case"]]
    lines = []
    for case, group in itertools.groupby(sorted(rows, key=lambda row: str(row["case"])), key=lambda row: row["case"]):
        found = {row["contestant"]: row for row in group}
        ours = (digits(found[name]["milliseconds"]) for name in ("hpo_core", "hpo_core, no autograd"))
        peers = (
            f"{digits(found[name]['slower_than_hpo_core'])}x" if name in found else "" for name in ("eager", "verl")
        )
        lines.append((case.rsplit(", ", 1)[0], *ours, *peers))  # without its size
    return table(("preset", "ms", "ms without autograd", "eager", "verl"), lines)


def short_rows(rows: list[dict[str, Any]]) -> str:
    """Milliseconds of hpo_core without autograd and floors, of short rows that come from memory."""
    ours = [row for row in rows if SHORT in row["case"] and row["contestant"] == "hpo_core, no autograd"]
    return table(
        ("preset", "ms", "floors", "goal"),
        [
            (row["case"].partition(",")[0], digits(row["milliseconds"]), digits(row["to_floor"]), row["goal"])
            for row in sorted(ours, key=lambda row: float(row["to_floor"]))
        ],
    )


if __name__ == "__main__":
    every = [row for path in sys.argv[1:] for row in json.loads(Path(path).read_text())["rows"]]
    for op, peers in TABLES.items():
        if rows := [row for row in every if row["op"] == op]:
            print(f"{of_op(rows, peers)}\n")
    if rows := [row for row in every if row["op"] == "preset"]:
        print(f"{presets(rows)}\n\n{short_rows(rows)}")
