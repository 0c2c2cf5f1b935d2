"""Log-ratios in fixed point with 32 binary digits: their sums are integers and have no order. 60 * 2^32 leaves room for
2^25 tokens."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["FIXED_POINT", "to_fixed"]

FIXED_POINT = tl.constexpr(4294967296.0)
SHIFTER = tl.constexpr(6755399441055744.0)  # adding 1.5 * 2^52 rounds a double to an integer
SHIFTER_BITS = tl.constexpr(0x4338000000000000)


@triton.jit
def to_fixed(x):
    return (x.to(tl.float64) * FIXED_POINT + SHIFTER).to(tl.int64, bitcast=True) - SHIFTER_BITS
