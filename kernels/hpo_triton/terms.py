"""The term of a token whose gate asks for more than a clip and A e^z (TermSpec): the heads, the pre-gate, slopes and
weights beyond the bounds, the penalty on the token's own log-ratio.

The definition is hpo_core/reference/terms.py; the arithmetic is that of csrc/include/hpo/terms.h in the same order.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ..specs import Head, Penalty, PolicyLossSpec, TermSpec
from .math import SATURATION, clamp, exp, k3, k3_slope, log, scored

LINEAR = tl.constexpr(int(Head.LINEAR))
SCORE = tl.constexpr(int(Head.SCORE))
LOG = tl.constexpr(int(Head.LOG))
MIRROR = tl.constexpr(int(Head.MIRROR))
SIGMOID = tl.constexpr(int(Head.SIGMOID))
SIMPLE = tl.constexpr(int(Head.SIMPLE))
TARGET = tl.constexpr(int(Head.TARGET))
NEGATIVE_AWARE = tl.constexpr(int(Head.NEGATIVE_AWARE))
FLIPPED = tl.constexpr(int(Head.FLIPPED))
CENSORED = tl.constexpr(int(Head.CENSORED))

K1 = tl.constexpr(int(Penalty.K1))
K2 = tl.constexpr(int(Penalty.K2))
ABSOLUTE = tl.constexpr(int(Penalty.ABSOLUTE))

SQUARE_SATURATION = tl.constexpr(25.0)  # of z, for heads that multiply the ratio by another large number, or by itself
IMPLIED_SATURATION = tl.constexpr(68719476736.0)  # of the ratio in the implied policy of a negative-aware head
SUM_SATURATION = tl.constexpr(2147483648.0)  # of z, for the head that has no ratio: the limit of sums in fixed point
EXPONENT_SATURATION = tl.constexpr(7.5)  # of x, where its exponentials are added up: e^7.5 < 2048
DEVIATION_SATURATION = tl.constexpr(2048.0)  # leaves room for 2^20 tokens, see fixed_point.py

Pair = tuple[float, float]  # for advantages >= 0 and < 0


class Term(NamedTuple):
    """The choices that specialise kernels, beside which of the numbers exist."""

    head: int
    penalty: int


class OutsideBounds(NamedTuple):
    """Outside the bounds of the token gate."""

    slope_low: Pair
    slope_high: Pair
    weight_low: Pair
    weight_high: Pair


class Numbers(NamedTuple):
    head: Pair
    beyond: OutsideBounds | tuple[()]  # Triton 3.6 takes no None inside a tuple
    penalty: float


class Bounds(NamedTuple):
    low: Pair
    high: Pair


class Pre(NamedTuple):
    """The log-ratio behind the pre-gate."""

    bounds: Bounds | tuple[()]  # it is clipped; empty: the deviation of the ratio from 1 takes its place


@triton.jit
def by_sign(negative, pair):
    return tl.where(negative, pair[1], pair[0])


class Deviation(NamedTuple):
    size: tl.tensor
    sign: tl.tensor


@triton.jit
def _deviation_of(x, ratio):
    """The deviation of the ratio e^x from 1, and its sign, that of x."""
    sign = tl.where(x > 0.0, 1.0, tl.where(x < 0.0, -1.0, 0.0))
    return Deviation(sign * (tl.minimum(ratio, 1.0 + DEVIATION_SATURATION) - 1.0), sign)


@triton.jit
def entering(x, negative, pre):
    """The function of log-ratios that is aggregated."""
    value = x
    if pre is not None:
        if len(pre.bounds) == 0:
            value = _deviation_of(x, exp(x)).size
        else:
            value = clamp(x, by_sign(negative, pre.bounds.low), by_sign(negative, pre.bounds.high))
    return value


@triton.jit
def through_pre(flow, x, negative, pre):
    """The gradient of the token's log-ratio from that of ``entering``."""
    value = flow
    if pre is not None:
        if len(pre.bounds) == 0:
            ratio = exp(x)
            value = _deviation_of(x, ratio).sign * ratio * flow
        else:
            value = tl.where(entering(x, negative, pre) == x, flow, 0.0)
    return value


@triton.jit
def _exponent(x, SPLIT: tl.constexpr):
    """The log-ratio as it enters its channel: the channel of falling log-ratios takes it with its sign turned."""
    saturated = clamp(x, -EXPONENT_SATURATION, EXPONENT_SATURATION)
    return tl.abs(saturated) if SPLIT else saturated


@triton.jit
def mean_exp_part(x, SPLIT: tl.constexpr):
    """e^x - 1, added up over segments for a log mean exp; with the sign that separates the channels of a split."""
    up = _exponent(x, SPLIT)
    part = -k3_slope(-up, exp(up))
    return tl.where(x < 0.0, -part, part) if SPLIT else part


@triton.jit
def mean_exp_slope(x, SPLIT: tl.constexpr):
    """Its derivative in the log-ratio."""
    return exp(_exponent(x, SPLIT))


@triton.jit
def with_slopes(inside, below, above, negative, numbers):
    """The derivative of the token gate, which is ``inside`` within its bounds."""
    if numbers is not None and len(numbers.beyond) > 0:
        of_low = by_sign(negative, numbers.beyond.slope_low)
        inside = tl.where(above, by_sign(negative, numbers.beyond.slope_high), tl.where(below, of_low, inside))
    return inside


# -------------------------------------------------------------------------------------------------------------- heads


class HeadTerm(NamedTuple):
    loss: tl.tensor
    slope: tl.tensor  # d loss / d z
    direct: tl.tensor  # d loss / d logp, past z


@triton.jit
def _head_term(negative, number, z, x, a, kept, logp, target, HEAD: tl.constexpr):
    """``a``: weight * advantage * token weight, and ``kept``: weight * token weight, both 0 where the token is not
    selected. On-policy, z = 0, slope + direct is -a to the bit under every head that promises it: hence the divisions
    that round."""
    zero = tl.zeros_like(z)
    ratio = exp(x if HEAD == CENSORED else z)
    linear = -(a * ratio)
    size = tl.where(negative, -a, a)  # weight * |advantage|
    loss, slope, direct = linear, linear, zero
    if HEAD == SCORE:
        loss, slope, direct = scored(linear * logp), zero, linear
    elif HEAD == LOG:
        loss = scored(tl.fma(0.5 * kept * number, z * z, -(a * logp)))
        slope, direct = kept * number * z, -a
    elif HEAD == MIRROR:
        pull = kept * number
        loss = tl.fma(pull, tl.fma(z, ratio, 1.0 - ratio), linear)
        slope = ratio * tl.fma(pull, z, -a)
    elif HEAD == SIGMOID:
        t = clamp(number * (ratio - 1.0), -87.0, 87.0)
        e = tl.where(tl.abs(t) < 87.0, exp(-tl.abs(t)), 0.0)  # 0 for a huge ratio
        both = 1.0 + e
        loss = -(a * tl.div_rn(zero + 4.0, number) * tl.div_rn(tl.where(t < 0.0, e, 1.0), both))
        slope = linear * tl.div_rn(4.0 * e, both * both)
    elif HEAD == SIMPLE:
        step = ratio - 1.0
        pull = tl.div_rn(size, number)
        loss = tl.fma(0.5 * pull, step * step, linear)
        slope = -(ratio * tl.fma(-pull, step, a))
    elif HEAD == TARGET:
        gap = ratio - target
        loss = size * tl.abs(gap)
        slope = size * tl.where(gap > 0.0, 1.0, tl.where(gap < 0.0, -1.0, 0.0)) * ratio
    elif HEAD == NEGATIVE_AWARE:
        left = 1.0 - target
        weighed = target * tl.minimum(ratio, IMPLIED_SATURATION)
        implied = tl.where(negative, tl.div_rn(1.0 - weighed, left), ratio)
        bounded = tl.where(implied < number, number, implied)
        rise = tl.where(negative, -tl.div_rn(weighed, left), ratio)
        loss = -(size * log(bounded))
        slope = -(size * tl.div_rn(rise, bounded))
    elif HEAD == FLIPPED:
        factor = exp(tl.where(negative, z, -z))
        beyond = factor > number
        value, fixed = -(a * factor), -(a * number)
        loss = tl.where(beyond, scored(fixed * logp), value)
        slope, direct = tl.where(beyond, 0.0, value), tl.where(beyond, fixed, 0.0)
    elif HEAD == CENSORED:
        deviation = _deviation_of(x, ratio)
        left = deviation.size + z
        some = left >= 0.0  # a rest of 0 adds nothing to the loss, but has a derivative
        loss = -(a * (1.0 + deviation.sign * tl.where(some, left, 0.0)))
        slope, direct = tl.where(some, -(a * deviation.sign), 0.0), tl.where(some, linear, 0.0)
    else:
        tl.static_assert(HEAD == LINEAR, "a head without a term")
    return HeadTerm(loss, slope, direct)


class General(NamedTuple):
    """The policy term of a block of tokens under any head."""

    value: tl.tensor  # d loss / d z
    direct: tl.tensor  # d loss / d logp, past z
    loss: tl.tensor  # float64
    loss_t: tl.tensor  # the same without the row's weight


@triton.jit
def general_term(t, token_weight, z, below, above, numbers, HEAD: tl.constexpr):
    """``token_weight``: loaded, or None; ``below`` and ``above``: the token is beyond a bound of its gate."""
    of_mirror: tl.constexpr = SQUARE_SATURATION if HEAD == MIRROR else SATURATION
    of_ratio: tl.constexpr = SQUARE_SATURATION if HEAD == SIMPLE else of_mirror
    of_others: tl.constexpr = SUM_SATURATION if HEAD == LOG else of_ratio
    most: tl.constexpr = 2 * DEVIATION_SATURATION if HEAD == CENSORED else of_others  # above it nothing is left
    z = clamp(z, -most, most)
    number = by_sign(t.negative, numbers.head)
    logp = tl.where(t.x_finite, t.logp, 0.0)
    a, kept, a_t, kept_t = t.a, t.weight, t.unweighted, tl.full(z.shape, 1.0, tl.float32)
    if token_weight is not None:
        kept, kept_t = kept * token_weight, token_weight
    if len(numbers.beyond) > 0:
        of_low = by_sign(t.negative, numbers.beyond.weight_low)
        factor = tl.where(above, by_sign(t.negative, numbers.beyond.weight_high), tl.where(below, of_low, 1.0))
        a, kept, a_t, kept_t = a * factor, kept * factor, a_t * factor, kept_t * factor
    weighted = _head_term(t.negative, number, z, t.x, a, kept, logp, t.target, HEAD)
    plain = _head_term(t.negative, number, z, t.x, a_t, kept_t, logp, t.target, HEAD)
    return General(
        value=tl.where(t.selected, weighted.slope, 0.0),
        direct=tl.where(t.selected, weighted.direct, 0.0),
        loss=tl.where(t.selected, weighted.loss, 0.0).to(tl.float64),
        loss_t=tl.where(t.selected, plain.loss, 0.0).to(tl.float64),
    )


# ------------------------------------------------------------------------------------------------------------ penalty


@triton.jit
def with_own_penalty(t, pays, penalty, loss_t, derivative, strength, PENALTY: tl.constexpr):
    """The penalties so far, loss_t and the derivative with the penalty on x of the tokens that pay it."""
    x = t.x
    if PENALTY == K1:
        value, slope = -x, tl.full(x.shape, -1.0, tl.float32)
    elif PENALTY == K2:
        value, slope = 0.5 * x * x, x
    elif PENALTY == ABSOLUTE:
        value, slope = tl.abs(x), tl.where(x > 0.0, 1.0, tl.where(x < 0.0, -1.0, 0.0))
    else:  # e^x - 1 - x
        value, slope = k3(-x), -k3_slope(-x, exp(x))
    value = tl.where(pays, strength * value, 0.0)
    penalty += t.weight.to(tl.float64) * value.to(tl.float64)
    derivative += tl.where(pays & t.x_finite, t.weight * (strength * slope), 0.0)
    return penalty, loss_t + value.to(tl.float64), derivative


# --------------------------------------------------------------------------------------------------------------- host

PLAIN = TermSpec()


def term_of(spec: PolicyLossSpec) -> Term | None:
    return None if spec.term is None else Term(int(spec.head), int(spec.term.penalty))


def numbers_of(term: TermSpec | None) -> Numbers | None:
    if term is None:
        return None
    beyond = OutsideBounds(term.slope_low, term.slope_high, term.weight_low, term.weight_high)
    changes = beyond != OutsideBounds(PLAIN.slope_low, PLAIN.slope_high, PLAIN.weight_low, PLAIN.weight_high)
    return Numbers(term.head_numbers, beyond if changes else (), term.penalty_coefficient)


def pre_of(spec: PolicyLossSpec) -> Pre | None:
    if spec.head is Head.CENSORED:
        return Pre(())
    term = spec.term
    if term is None or (term.pre_low, term.pre_high) == (PLAIN.pre_low, PLAIN.pre_high):
        return None
    return Pre(Bounds(term.pre_low, term.pre_high))
