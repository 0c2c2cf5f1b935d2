"""Random packed batches: lengths, masks, steps and ids."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..arguments import examines
from ..batch import PackedBatch
from ..reference.segments import row_of_token


@dataclass(frozen=True)
class Layout:
    """The rows of a generated example; ``seed`` determines everything else."""

    lengths: tuple[int, ...]
    tail: int = 0  # tokens beyond the last row
    masked: str = "some"  # "none", "some", "row" (one whole row as well), "all"
    shared: bool = False  # some trajectories have several rows, not always adjacent ones
    seed: int = 0

    @property
    def tokens(self) -> int:
        return sum(self.lengths) + self.tail

    def generator(self, purpose: int) -> torch.Generator:
        """A separate stream of random numbers for each purpose."""
        return torch.Generator("cpu").manual_seed(1009 * self.seed + purpose)

    def batch(self) -> PackedBatch:
        draw, rows = self.generator(0), len(self.lengths)
        ends = torch.tensor((0, *self.lengths), dtype=torch.int64, device="cpu").cumsum(0)
        mask = torch.rand(self.tokens, generator=draw, dtype=torch.float32, device="cpu") > (
            1.0 if self.masked == "all" else 0.3
        )
        if self.masked == "row" and rows:
            mask[ends[rows // 2] : ends[rows // 2 + 1]] = False
        steps = _steps(ends, draw)
        trajectories = _ids(rows, rows - 2, draw) if self.shared else None
        groups = _ids(rows, rows // 2, draw)
        if trajectories is not None:
            groups = _nested(groups, trajectories)
        return PackedBatch(
            ends,
            None if self.masked == "none" else mask,
            total_tokens=self.tokens,
            steps=steps,
            trajectory_ids=trajectories,
            group_ids=groups,
            domain_ids=_nested(_ids(rows, rows // 4, draw), groups),
        )


def _ids(count: int, kinds: int, draw: torch.Generator) -> torch.Tensor:
    return wide_ids(torch.randint(0, max(kinds, 1), (count,), generator=draw, device="cpu"))


def wide_ids(numbers: torch.Tensor) -> torch.Tensor:
    """Ids that are alike in 32 bits, or but for the last of 41: narrower integers and floats mix them up."""
    return numbers // 2 * 2**40 + numbers % 2


def _nested(ids: torch.Tensor, finer: torch.Tensor) -> torch.Tensor:
    """The ids of the first row of each finer segment, at all its rows."""
    _, segment = torch.unique(finer, return_inverse=True)
    rows = torch.arange(ids.numel(), device=ids.device)
    return ids[torch.zeros_like(rows).scatter_reduce(0, segment, rows, "amin", include_self=False)[segment]]


def _steps(ends: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """Ranges ``[N, 2]`` of at most three tokens, with gaps between them."""
    ranges = []
    for begin, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        while begin < end:
            width = int(torch.randint(1, 4, (), generator=draw, device="cpu"))
            ranges.append((begin, min(begin + width, end)))
            begin += width + int(torch.randint(0, 2, (), generator=draw, device="cpu"))
    return torch.tensor(ranges, dtype=torch.int64, device="cpu").reshape(-1, 2)


def below(draw: torch.Generator, limit: int) -> int:
    """A number from 0 to ``limit - 1``."""
    return int(torch.randint(0, limit, (), generator=draw, device="cpu"))


@examines
def random_layout(seed: int = 0, rows: int = 6, longest: int = 9) -> Layout:
    """A layout of at most ``rows`` rows; the first, the middle and the last are often empty or of one token."""
    draw = torch.Generator("cpu").manual_seed(seed)

    lengths = [below(draw, longest + 1) for _ in range(below(draw, rows + 1))]
    if lengths:
        for slot in (0, len(lengths) // 2, len(lengths) - 1):
            lengths[slot] = (lengths[slot], lengths[slot], 0, 1)[below(draw, 4)]
    masked = ("none", "none", "some", "some", "some", "row", "row", "all")[below(draw, 8)]
    return Layout(tuple(lengths), below(draw, 4), masked, bool(below(draw, 2)), seed)


@examines
def random_batch(seed: int = 0, rows: int = 6, longest: int = 9) -> PackedBatch:
    """A ragged PackedBatch: empty, one-token and masked rows, tail tokens, steps, groups, trajectories of several rows.

    >>> random_batch(1).rows <= 6
    True
    """
    return random_layout(seed, rows, longest).batch()


def row_of_tokens(batch: PackedBatch) -> torch.Tensor:
    return row_of_token(batch.cu_seqlens.cpu(), batch.total_tokens).to(batch.device)


def valid_tokens(batch: PackedBatch) -> torch.Tensor:
    inside = row_of_tokens(batch) >= 0
    return inside if batch.mask is None else inside & batch.mask
