"""Numbers in fixed point, whose sums are integers and have no order. Log-ratios have 32 binary digits: 60 * 2^32 leaves
room for 2^25 tokens. Gradients have 37 below the largest exponent among the terms of a sum."""

from __future__ import annotations

import triton
import triton.language as tl

from .math import clamp

FIXED_POINT = tl.constexpr(4294967296.0)
SHIFTER = tl.constexpr(6755399441055744.0)  # adding 1.5 * 2^52 rounds a double to an integer
SHIFTER_BITS = tl.constexpr(0x4338000000000000)

EXPONENT_BIAS = tl.constexpr(1023)  # of a double
# The sum of 2^25 terms is below 2^62. These are the terms of all processes, because processes add up their sums.
DIGITS = tl.constexpr(37)


@triton.jit
def to_fixed(x):
    return (x.to(tl.float64) * FIXED_POINT + SHIFTER).to(tl.int64, bitcast=True) - SHIFTER_BITS


@triton.jit
def exponent_of(x):
    """The biased exponent of a double."""
    return (x.to(tl.int64, bitcast=True) >> 52) & 2047


@triton.jit
def _scale_exponent(largest):
    """The biased exponent of the power of two that takes numbers below 2^(largest + 1) to below 2^DIGITS."""
    return clamp(-largest + (DIGITS + 2 * EXPONENT_BIAS - 1), 1, 2 * EXPONENT_BIAS)


@triton.jit
def _power(biased):
    return (biased << 52).to(tl.float64, bitcast=True)


@triton.jit
def to_fixed_below(x, largest):
    return (x * _power(_scale_exponent(largest))).to(tl.int64)


@triton.jit
def from_fixed_below(fixed, largest):
    return fixed.to(tl.float64) * _power(-_scale_exponent(largest) + 2 * EXPONENT_BIAS)
