"""Elementary functions: the operations of csrc/include/hpo/math.h in the same order, every fused multiply-add
written out."""

from __future__ import annotations

import sys

import torch
import triton
import triton.language as tl

LARGEST_FLOAT, LARGEST_DOUBLE = tl.constexpr(torch.finfo(torch.float32).max), tl.constexpr(sys.float_info.max)
# Every exponentiated log-ratio saturates here, so that |w A| <= 1e12 times e^60 stays finite in float.
SATURATION = tl.constexpr(60.0)
SCORE_SATURATION = tl.constexpr(2e37)
# Ratio statistics (not the loss) saturate earlier: their squares are summed in float.
STATISTIC_SATURATION = tl.constexpr(40.0)


@triton.jit
def clamp(x, low, high):
    return tl.where(x < low, low, tl.where(x > high, high, x))


@triton.jit
def scored(loss):
    """The loss of a token, clamped: some heads multiply by the log-probability, which may be the lowest float."""
    return clamp(loss, -SCORE_SATURATION, SCORE_SATURATION)


@triton.jit
def is_finite(x):
    return tl.abs(x) < float("inf")


@triton.jit
def exp(x):
    """e^x for |x| <= 87, within 1 ulp. exp(0) is exactly 1: the on-policy promise depends on it.

    The hardware's ex2 would take x log2(e) rounded to float: at x = 60 the rounding alone is an error of 2^-18.
    """
    shifted = tl.fma(x, 1.44269504, 12582912.0)  # adding 1.5 * 2^23 rounds to an integer
    k = shifted - 12582912.0
    r = tl.fma(k, -0.693359375, x)  # ln 2 in two parts: r = x - k ln 2
    r = tl.fma(k, 2.12194440e-4, r)
    p = tl.fma(r, 1.3814327850e-3, 8.3688531769e-3)  # minimax polynomial of (e^r - 1 - r) / r^2 on |r| <= ln 2 / 2
    p = tl.fma(p, r, 4.1668401138e-2)
    p = tl.fma(p, r, 1.6666519507e-1)
    p = tl.fma(p, r, 4.9999993372e-1)
    value = tl.fma(tl.fma(p, r, 1.0), r, 1.0)
    # The low bits of `shifted` are the integer k; the shift drops the higher bits.
    return value * ((shifted.to(tl.int32, bitcast=True) << 23) + 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def log_parts(x):
    """The mantissa, between sqrt(1/2) and sqrt(2), and the exponent of a normal x > 0 = mantissa 2^exponent."""
    bits = x.to(tl.int32, bitcast=True)
    mantissa = ((bits & 0x007FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)  # in [1, 2)
    large = mantissa > 1.41421356
    exponent = ((bits >> 23) - 127 + large.to(tl.int32)).to(tl.float32)
    return tl.where(large, mantissa * 0.5, mantissa), exponent


@triton.jit
def log_tail(f):
    """(log(1 + f) - f + f^2 / 2) / f^3 of such a mantissa 1 + f."""
    p = tl.fma(f, 7.0376836292e-2, -1.1514610310e-1)  # minimax polynomial
    p = tl.fma(p, f, 1.1676998740e-1)
    p = tl.fma(p, f, -1.2420140846e-1)
    p = tl.fma(p, f, 1.4249322787e-1)
    p = tl.fma(p, f, -1.6668057665e-1)
    p = tl.fma(p, f, 2.0000714765e-1)
    p = tl.fma(p, f, -2.4999993993e-1)
    return tl.fma(p, f, 3.3333331174e-1)


@triton.jit
def log(x):
    """Natural logarithm of a normal x > 0, within 2 ulp; log(1) is exactly 0."""
    mantissa, k = log_parts(x)
    f = mantissa - 1.0
    square = f * f
    value = tl.fma(log_tail(f) * f, square, k * -2.12194440e-4)
    value = tl.fma(square, -0.5, value)
    return tl.fma(k, 0.693359375, f + value)


@triton.jit
def k3_slope(s, e):
    """1 - e^-s, the derivative of k3, without cancellation at small s; ``e`` is exp(-s)."""
    p = tl.fma(s, -1.9841270e-4, 1.3888889e-3)  # Taylor of (e^-s - 1 + s) / s^2 on |s| <= 0.25, to the last bit
    p = tl.fma(p, s, -8.3333333e-3)
    p = tl.fma(p, s, 4.1666667e-2)
    p = tl.fma(p, s, -1.6666667e-1)
    p = tl.fma(p, s, 0.5)
    return tl.where(tl.abs(s) < 0.25, tl.fma(-p * s, s, s), 1.0 - e)


@triton.jit
def k3(s):
    """e^-s - 1 + s, the k3 estimator, without cancellation at small s."""
    p = tl.fma(s, 2.4801587e-5, -1.9841270e-4)  # Taylor of (e^-s - 1 + s) / s^2 on |s| <= 0.5
    p = tl.fma(p, s, 1.3888889e-3)
    p = tl.fma(p, s, -8.3333333e-3)
    p = tl.fma(p, s, 4.1666667e-2)
    p = tl.fma(p, s, -1.6666667e-1)
    p = tl.fma(p, s, 0.5)
    direct = (exp(-clamp(s, -SATURATION, SATURATION)) - 1.0) + s
    return tl.where(tl.abs(s) < 0.5, p * (s * s), direct)
