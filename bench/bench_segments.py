"""Valid tokens per row, which every per-sequence denominator needs."""

from __future__ import annotations

import torch
from harness import Case, Contestant, Plan, Tensors, small_test

from hpo_core import ops
from hpo_core.reference import segments as reference


def case(*, rows: int, length: int, full: bool, backend: str | None) -> Case:
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(rows, length, generator=generator) < 0.9
    flat, offsets = mask.flatten(), torch.arange(rows + 1) * length
    row = torch.arange(rows).repeat_interleave(length)
    words = flat.view(torch.float32)

    def ours() -> Tensors:
        return {"counts": ops.row_counts(flat, offsets, flat.numel(), backend)}

    def scatter() -> Tensors:
        return {"counts": torch.zeros(rows, dtype=torch.int64).index_add(0, row, flat.long())}

    others = [
        Contestant("sum of [B, L]", lambda: {"counts": mask.sum(-1)}, tolerance=0),
        Contestant("index_add over the pack", scatter, tolerance=0),
    ]
    return Case(
        op="row_counts",
        name=f"counts, {rows:,} rows of {length:,}",
        unit="token",
        units=rows * length,
        bytes_per_unit=1,
        flops_per_unit=1,
        ours=[Contestant("hpo_core", ours, tolerance=0)],
        peers=others,
        floor=words.sum,
        truth=None if full else lambda: {"counts": reference.row_counts(flat, offsets, flat.numel())},
    )


def plans(quick: bool) -> list[Plan]:
    small = {"rows": 7, "length": 20}
    cases = [Plan("counts 512 x 2048", case, {"rows": 512, "length": 2048}, small)]
    if not quick:
        cases.append(Plan("counts 100000 x 12", case, {"rows": 100_000, "length": 12}, small))
    return cases


test_row_counts = small_test(plans(quick=False))
