"""Rows of logits: the log-probability and entropy of a row, and the gradient of its logits, by one program.

The definition is hpo_core/reference/logprobs.py; csrc/include/hpo/logprobs.h derives the arithmetic.

A row is read once for the sums. Of two elements a lane keeps the greater and adds e^(...) of the smaller to its sum, so
that the greatest of the row is in no sum. The sums are relative to the *origin*, the greatest summed element: the
elements that count lie near it, where a product rounded to float is exact enough for an exponential, however far above
the greatest element lies.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from .launch import INTERPRETED
from .math import log
from .rows import EVICT_NORMALLY, load, store

# A step covers CHUNKS chunks of a row, each with 8 elements per thread: two 128-bit loads of float32, one of 16-bit
# numbers. 4 warps hold a step in 96 registers on sm_90 (at most 128 elsewhere), so that 16 to 20 warps share a
# multiprocessor and some compute while others wait for memory. Finding the greatest element of a step takes about 30
# instructions per thread and one barrier, shared by 32 elements. More chunks would cost registers; more warps would
# make the barrier dearer and leave fewer rows in flight. Steps reach at most 2 % beyond a vocabulary of 32,000.
NUM_WARPS = 4
LANES = tl.constexpr(1024)
CHUNKS = tl.constexpr(2 if INTERPRETED else 4)
BLOCK = tl.constexpr(2048)  # elements of a step of the backward, which needs no barrier

LEAST_FLOAT = tl.constexpr(-3.4028234663852886e38)
MOST_INVERSE = tl.constexpr(2.0**126)  # of a temperature that is a normal number
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
NEGLIGIBLE = tl.constexpr(-200.0)  # 2^-200 is 0 in float


class Exponent(NamedTuple):
    """e^(delta / temperature) = 2^(delta c)."""

    inverse: tl.tensor  # 1 / temperature, float64
    high: tl.tensor  # c in two parts
    low: tl.tensor
    least: tl.tensor  # the least delta that counts: below it e^(...) < 2^-125 is taken as 0, as it is for -inf


class Row(NamedTuple):
    pointer: tl.tensor
    columns: tl.tensor
    floor: tl.tensor  # or None
    exponent: Exponent


class Sums(NamedTuple):
    """Sums over the elements that the lanes do not keep, with e = 2^y <= 1 and y relative to the origin."""

    origin: tl.tensor
    others: tl.tensor  # [LANES] sums of e
    spread: tl.tensor  # [LANES] sums of -y e
    squares: tl.tensor  # [LANES] sums of e^2


class Result(NamedTuple):
    """The results of a row; the last four are its statistics."""

    logp: tl.tensor
    entropy: tl.tensor
    top: tl.tensor
    others: tl.tensor
    distance: tl.tensor
    squares: tl.tensor


@triton.jit
def exponent_of(temperatures, temperature, row):
    number = tl.full([], temperature, tl.float64)  # a cast in the interpreter goes by float32
    if temperatures is not None:
        number = tl.load(temperatures + row).to(tl.float64)
    inverse = 1.0 / number
    c = inverse * LOG2_E
    high = c.to(tl.float32)
    low = (c - high.to(tl.float64)).to(tl.float32)
    least = tl.maximum(-125.0 / c, LEAST_FLOAT).to(tl.float32)
    return Exponent(inverse, high, low, least)


@triton.jit
def _exp2_of(exponent, delta):
    """2^(delta c) for least <= delta <= 0, and any number for a smaller delta. Only delta is rounded."""
    shifted = tl.fma(delta, exponent.high, 12582912.0)  # adding 1.5 * 2^23 rounds to an integer
    r = tl.fma(delta, exponent.high, -(shifted - 12582912.0))
    r = tl.fma(delta, exponent.low, r)
    # The integer sits in the low bits of `shifted`; the shift drops the bits above it.
    bits = tl.exp2(r).to(tl.int32, bitcast=True) + (shifted.to(tl.int32, bitcast=True) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _exp_of(exponent, delta):
    return tl.where(delta < exponent.least, 0.0, _exp2_of(exponent, delta))


@triton.jit
def _log1p(x):
    """log(1 + x) of an x >= 0."""
    u = 1.0 + x
    return log(u) + (x - (u - 1.0)) / u  # the second term restores the digits that 1 + x rounds off


# ------------------------------------------------------------------------------------------------------------- rows


@triton.jit
def is_defined(target, vocabulary, exponent):
    """Whether a row has a target and a temperature, a normal number of float32 above 0."""
    return (target >= 0) & (target < vocabulary) & (exponent.inverse > 0.0) & (exponent.inverse <= MOST_INVERSE)


@triton.jit
def address_of_row(pointer, row, inner, outer_stride, inner_stride):
    return pointer + (row // inner) * outer_stride + (row % inner) * inner_stride


@triton.jit
def _is_below(x, floor):
    """Whether x is below the floor. A NaN x never is; every other x is below a NaN floor."""
    return ((x >= floor) == False) & (x == x)  # noqa: E712 (`not` is for scalars)


@triton.jit
def _load(row, column, WHOLE: tl.constexpr, ALIGNED: tl.constexpr, EVICTION: tl.constexpr = EVICT_NORMALLY):
    """Elements of a row, -inf below its floor and beyond its end. WHOLE: no column lies beyond the end."""
    x = load(row.pointer, column, row.columns, WHOLE, ALIGNED, EVICTION).to(tl.float32)
    if not WHOLE:
        x = tl.where(column < row.columns, x, float("-inf"))
    if row.floor is not None:
        x = tl.where(_is_below(x, row.floor), float("-inf"), x)
    return x


@triton.jit
def load_target(row, column):
    """The target's logit, -inf where it lies in another part of the vocabulary or outside the support, and whether it
    has a gradient."""
    here = (column >= 0) & (column < row.columns)
    logit = tl.load(row.pointer + column, mask=here, other=float("-inf")).to(tl.float32)
    outside = logit < LEAST_FLOAT  # a comparison with -inf itself takes more registers
    if row.floor is not None:
        outside = outside | _is_below(logit, row.floor)
        logit = tl.where(outside, float("-inf"), logit)
    return logit, here & (outside == False)  # noqa: E712


# ---------------------------------------------------------------------------------------------------------- forward


@triton.jit
def _moved(sums, origin, exponent):
    factor = _exp_of(exponent, sums.origin - origin)
    by = tl.where(factor > 0.0, (origin - sums.origin) * exponent.high, 0.0)
    spread = factor * (sums.spread + by * sums.others)
    return Sums(origin, factor * sums.others, spread, factor * factor * sums.squares)


@triton.jit
def _added(sums, x, exponent, KEPT: tl.constexpr):
    """``x`` is at most the origin."""
    y = (x - sums.origin) * exponent.high
    y = tl.maximum(y, NEGLIGIBLE, propagate_nan=tl.PropagateNan.ALL)  # -inf times 0 is NaN
    e = tl.exp2(y)
    spread = tl.fma(-y, e, sums.spread) if KEPT > 2 else sums.spread
    squares = tl.fma(e, e, sums.squares) if KEPT > 3 else sums.squares
    return Sums(sums.origin, sums.others + e, spread, squares)


@triton.jit
def _step(
    kept, sums, row, start,
    KEPT: tl.constexpr, WHOLE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    losers = ()
    greatest = kept
    for chunk in tl.static_range(CHUNKS):
        x = _load(row, tl.arange(0, LANES) + (start + chunk * LANES), WHOLE, ALIGNED)
        loser = tl.minimum(kept, x, propagate_nan=tl.PropagateNan.ALL)  # NaN loses, so that it reaches the sums
        kept = tl.maximum(kept, x)
        greatest = loser if chunk == 0 else tl.maximum(greatest, loser)
        losers = losers + (loser,)  # noqa: RUF005 (Triton knows no star)
    origin = tl.max(greatest)
    if origin > sums.origin:
        sums = _moved(sums, origin, row.exponent)
    for chunk in tl.static_range(CHUNKS):
        sums = _added(sums, losers[chunk], row.exponent, KEPT)
    return kept, sums


@triton.jit
def _total(lanes):
    """The sum over the lanes in float64, each lane rounded to a multiple of 2^-32: below 2^21 no addition rounds, so
    that the order of the lanes, which the compiler chooses, does not show in the bits."""
    return tl.sum((lanes.to(tl.float64) + 1572864.0) - 1572864.0)


@triton.jit
def _finished(kept, sums, row, logit, is_whole, KEPT: tl.constexpr):
    top = tl.max(kept)
    rest = tl.where(tl.arange(0, LANES) == tl.argmax(kept, 0), float("-inf"), kept)
    origin = tl.max(rest)
    if origin > sums.origin:
        sums = _moved(sums, origin, row.exponent)
    sums = _added(sums, rest, row.exponent, KEPT)

    # A row whose logits are all -inf, or that has +inf or NaN, has no distribution. A part of a row may be all -inf.
    sum_ = _total(sums.others)
    result = everything(float("nan"))
    if (top < float("inf")) & (sum_ == sum_):
        if top > float("-inf"):
            below = top.to(tl.float64) - sums.origin.to(tl.float64)
            delta = sums.origin - top
            factor = _exp_of(row.exponent, delta).to(tl.float64)
            # The rounding error of `delta` would be in every term.
            factor = tl.where(factor > 0.0, factor * (1.0 - (below + delta.to(tl.float64)) * row.exponent.inverse), 0.0)
            others = factor * sum_
            total = 1.0 + others
            normaliser = _log1p(others.to(tl.float32)).to(tl.float64)
            logp = (logit.to(tl.float64) - top.to(tl.float64)) * row.exponent.inverse - normaliser
            distance = total  # placeholders: statistics that KEPT leaves out are not stored
            squares = total
            if KEPT > 2:
                spread = below * row.exponent.inverse * others + factor * LN_2 * _total(sums.spread)
                distance = tl.where(factor > 0.0, spread, 0.0) / total
            if KEPT > 3:
                squares = (1.0 + factor * factor * _total(sums.squares)) / (total * total)
            result = Result(
                logp.to(tl.float32), (normaliser + distance).to(tl.float32), top,
                others.to(tl.float32), distance.to(tl.float32), squares.to(tl.float32),
            )  # fmt: skip
        elif is_whole == False:  # noqa: E712
            zero = tl.zeros([], tl.float32)
            result = Result(top, zero, top, zero, zero, zero)
    return result


@triton.jit
def everything(number):
    number = tl.cast(number, tl.float32)
    return Result(number, number, number, number, number, number)


@triton.jit
def row_result(
    row, logit, is_whole,
    KEPT: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """``logit``: the target's."""
    kept = tl.full([LANES], float("-inf"), tl.float32)
    nothing = tl.zeros([LANES], tl.float32)
    sums = Sums(tl.full([], LEAST_FLOAT, tl.float32), nothing, nothing, nothing)
    whole = row.columns // (LANES * CHUNKS) * (LANES * CHUNKS)
    for start in range(0, whole, LANES * CHUNKS):
        kept, sums = _step(kept, sums, row, start, KEPT, True, ALIGNED)
    if whole < row.columns:
        kept, sums = _step(kept, sums, row, whole, KEPT, False, ALIGNED)
    return _finished(kept, sums, row, logit, is_whole, KEPT)


# ---------------------------------------------------------------------------------------------------------- gradient


class Gradient(NamedTuple):
    """The gradient of every logit but the target's is e^(delta / temperature) (constant + slope delta)."""

    constant: tl.tensor
    slope: tl.tensor
    target: tl.tensor


@triton.jit
def gradient_of(exponent, top, others, distance, logit, a, b):
    """The gradient of logits. For p = e^(delta / temperature) / (1 + s) and the mean distance R, log p + H is
    delta / temperature + R."""
    others = others.to(tl.float64)
    distance = distance.to(tl.float64)
    p = 1.0 / (1.0 + others)
    delta = logit.to(tl.float64) - top.to(tl.float64)
    own = _exp_of(exponent, logit - top).to(tl.float64) * p
    # 1 - p of the target. Where the target is the greatest logit, the share of the others: 1 - p would lose digits.
    rest = tl.where(delta == 0.0, others * p, 1.0 - own)
    along = tl.where(own == 0.0, 0.0, own * (delta * exponent.inverse + distance))
    slope = (-b * exponent.inverse * exponent.inverse * p).to(tl.float32)
    return Gradient(
        (-(a + b * distance) * exponent.inverse * p).to(tl.float32),
        tl.minimum(tl.maximum(slope, LEAST_FLOAT), -LEAST_FLOAT),  # infinity times a delta of 0 would be NaN
        ((a * rest - b * along) * exponent.inverse).to(tl.float32),
    )


@triton.jit
def _step_back(
    row, to, start, top, gradient,
    WHOLE: tl.constexpr, ALIGNED: tl.constexpr, EVICTION: tl.constexpr,
):  # fmt: skip
    column = start + tl.arange(0, BLOCK)
    delta = _load(row, column, WHOLE, ALIGNED, EVICTION) - top
    value = _exp2_of(row.exponent, delta) * tl.fma(delta, gradient.slope, gradient.constant)
    value = tl.where(delta < row.exponent.least, 0.0, value)  # it is NaN for a delta of -inf
    store(to, column, value.to(to.dtype.element_ty), row.columns, WHOLE, ALIGNED, EVICTION)


@triton.jit
def write_gradient(
    row, to, top, gradient, target, has_gradient,
    ALIGNED: tl.constexpr, EVICTION: tl.constexpr = EVICT_NORMALLY,
):  # fmt: skip
    """``target``: the column of the target, whose logit was read before, with a barrier between: the gradient may take
    the place of the logits."""
    whole = row.columns // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        _step_back(row, to, start, top, gradient, True, ALIGNED, EVICTION)
    if whole < row.columns:
        _step_back(row, to, whole, top, gradient, False, ALIGNED, EVICTION)
    tl.debug_barrier()
    tl.store(to + target, gradient.target.to(to.dtype.element_ty), mask=has_gradient)


@triton.jit
def fill_gradient(to, columns, number, ALIGNED: tl.constexpr, EVICTION: tl.constexpr = EVICT_NORMALLY):
    value = tl.full([BLOCK], number, to.dtype.element_ty)
    column = tl.arange(0, BLOCK)
    whole = columns // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        store(to, start + column, value, columns, True, ALIGNED, EVICTION)
    if whole < columns:
        store(to, whole + column, value, columns, False, ALIGNED, EVICTION)
