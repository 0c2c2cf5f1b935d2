"""``values *= factor``, in place and in one launch.

A plain ``backward()`` sends the factor 1: then each program reads it and nothing else, so that a gradient that the
forward has computed costs no pass over memory in the backward.
"""

from __future__ import annotations

import torch
import triton.language as tl

from .launch import INTERPRETED, kernel, launch, programs_for
from .rows import load, store

BLOCK = tl.constexpr(1 << 16 if INTERPRETED else 2048)


@kernel
def _scale(values, factor, count: tl.int64, ALIGNED: tl.constexpr):
    by = tl.load(factor)
    if by != 1.0:
        first = tl.program_id(0).to(tl.int64) * BLOCK
        for start in range(first, count, tl.num_programs(0).to(tl.int64) * BLOCK):
            at = start + tl.arange(0, BLOCK)
            whole = start + BLOCK <= count
            value = load(values, at, count, whole, ALIGNED)
            store(values, at, (value.to(tl.float32) * by).to(value.dtype), count, whole, ALIGNED)


def scale(values: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Contiguous ``values`` of a float type, times a float32 number on their device."""
    count = values.numel()
    is_aligned = values.data_ptr() % 16 == 0  # to aligned() 8 bytes of 16-bit numbers would do
    launch(_scale, programs_for(count, BLOCK.value), values, factor, count, ALIGNED=is_aligned)
    return values
