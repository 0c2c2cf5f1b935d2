"""The steps of padded completions: what the policy wrote between two answers of tools."""

from __future__ import annotations

import torch

__all__ = ["turns"]


def turns(mask: torch.Tensor) -> torch.Tensor:
    """``[N, 2]`` int64: the runs of valid tokens in each row of a bool ``[B, L]``, as half-open ranges of its tokens.

    For ``PackedBatch.from_padded(mask, steps=turns(mask))``. Synchronises: how many there are decides a shape.

    >>> turns(torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0]]).bool()).tolist()
    [[0, 2], [3, 4], [4, 5]]
    """
    before, behind = torch.nn.functional.pad(mask, (1, -1)), torch.nn.functional.pad(mask, (-1, 1))
    begin, end = (mask & ~before).flatten().nonzero(), (mask & ~behind).flatten().nonzero() + 1
    return torch.cat((begin, end), dim=1)
