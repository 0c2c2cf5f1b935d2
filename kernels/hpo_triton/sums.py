"""The work that all gates share: the policy term, the reference penalty, and the sums of a sweep, from which the loss
and its metrics are made."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..metrics import SLOTS
from ..specs import KLEstimator, KLGradient
from .launch import kernel, launch
from .math import LARGEST_FLOAT, SATURATION, STATISTIC_SATURATION, clamp, exp, is_finite, k3, k3_slope, scored
from .rows import row_range

LANES = tl.constexpr(256)  # a lane adds the tokens of one thread, TILE / LANES at a time in float, then in double
METRICS = tl.constexpr(len(SLOTS))
COLUMNS = tl.constexpr(32)  # of one program's sums: metrics 0 to 23, log_ratio_min, log_ratio_max, nothing

NO_KL = tl.constexpr(int(KLEstimator.NONE))
K1 = tl.constexpr(int(KLEstimator.K1))
K2 = tl.constexpr(int(KLEstimator.K2))
K3 = tl.constexpr(int(KLEstimator.K3))
VALUE = tl.constexpr(int(KLGradient.VALUE))
STRAIGHT_THROUGH = tl.constexpr(int(KLGradient.STRAIGHT_THROUGH))

ROWS, LOSS, LOG_RATIO_MIN, LOG_RATIO_MAX = (
    tl.constexpr(list(SLOTS).index(name)) for name in ("rows", "loss", "log_ratio_min", "log_ratio_max")
)
PROGRAMS, ROWS_AT_ONCE = tl.constexpr(64), tl.constexpr(4096)  # the numbers of them that `total` reads together

# ------------------------------------------------------------------------------------------------------------- terms


class Policy(NamedTuple):
    """The policy term of a block of tokens."""

    value: tl.tensor  # -a ratio: its derivative in z
    loss: tl.tensor  # its share of the loss, float64
    loss_t: tl.tensor  # the same without the row's weight


@triton.jit
def policy_term(t, ratio, SCORE_HEAD: tl.constexpr):
    """At ratio 1 the value is -a to the bit: the on-policy promise. The loss goes on in double: four tokens at
    saturation no longer fit a float."""
    value = tl.where(t.selected, -(t.a * ratio), 0.0)
    if SCORE_HEAD:
        logp = tl.where(t.x_finite, t.logp, 0.0)
        loss = scored(value * logp).to(tl.float64)
        loss_t = scored(-(t.unweighted * ratio) * logp).to(tl.float64)
    else:
        loss = value.to(tl.float64)
        loss_t = -(t.unweighted.to(tl.float64) * ratio.to(tl.float64))
    return Policy(value, loss, loss_t)


@triton.jit
def _penalty(t, ESTIMATOR: tl.constexpr, GRADIENT: tl.constexpr):
    """k(s) and its derivative in logp. A log-ratio that was infinite carries none."""
    s = t.s
    decay = exp(-s)
    if ESTIMATOR == K1:
        k = s
        slope = tl.full(s.shape, 1.0, tl.float32)
    elif ESTIMATOR == K2:
        k = 0.5 * s * s
        slope = s
    else:
        k = k3(s)
        slope = k3_slope(s, decay)
    if GRADIENT == VALUE:
        derivative = tl.where(t.s_finite, slope, 0.0)
    elif GRADIENT == STRAIGHT_THROUGH:
        derivative = tl.where(t.s_finite, s, 0.0)
    else:  # r k(s), with the gradient through r as well
        r = exp(t.x)
        if ESTIMATOR == K3:  # r e^-s is one exponential so that it saturates as one; r (k3 + k3') = r s
            rise = r - exp(clamp(t.x - s, -SATURATION, SATURATION))
            k = tl.fma(s, r, -rise)
            both = r * s
        else:
            rise = r * slope
            k = r * k
            both = k + rise
        derivative = tl.where(t.x_finite, tl.where(t.s_finite, both, k), tl.where(t.s_finite, rise, 0.0))
    return k, derivative


@triton.jit
def with_penalty(t, kl_weight, loss_t, derivative, kl_beta, KL: tl.constexpr, KL_GRADIENT: tl.constexpr):
    """The reference penalty of every valid token, selected or not: its share of the loss, loss_t and the derivative
    with it. ``kl_weight``: loaded, or None."""
    penalty = tl.zeros_like(loss_t)
    if KL != NO_KL:
        k, k_derivative = _penalty(t, KL, KL_GRADIENT)
        strength, pays, of_token = t.weight * kl_beta, t.valid, kl_beta * k
        if kl_weight is not None:
            factor = tl.where(t.valid & is_finite(kl_weight), kl_weight, 0.0)
            pays = factor != 0.0
            strength = clamp(strength * factor, -LARGEST_FLOAT, LARGEST_FLOAT)
            of_token = tl.where(pays, factor * of_token, 0.0)
        penalty = tl.where(pays, strength.to(tl.float64) * k.to(tl.float64), 0.0)
        loss_t += of_token.to(tl.float64)
        derivative = clamp(derivative + strength * k_derivative, -LARGEST_FLOAT, LARGEST_FLOAT)
    return penalty, loss_t, derivative


# -------------------------------------------------------------------------------------------------------------- sums


class Counts(NamedTuple):
    """Counts of one program, by lane ``[LANES]``, as int32: half as wide as double and as exact, as no lane meets 2^31
    tokens."""

    valid: tl.tensor
    selected: tl.tensor
    high_positive: tl.tensor  # of those, beyond that bound with an advantage of that sign
    low_positive: tl.tensor
    low_negative: tl.tensor
    high_negative: tl.tensor
    nan: tl.tensor
    infinite: tl.tensor
    bad: tl.tensor
    smallest: tl.tensor  # float32, of x
    largest: tl.tensor


class Sums(NamedTuple):
    """Sums of one program, float64 by lane ``[LANES]``."""

    loss: tl.tensor
    penalty: tl.tensor
    x: tl.tensor
    x_square: tl.tensor
    deviation: tl.tensor
    deviation_square: tl.tensor
    s: tl.tensor
    s_square: tl.tensor
    s_k3: tl.tensor
    entropy: tl.tensor
    entropy_tokens: tl.tensor  # int32


@triton.jit
def _by_lane(x):
    """A block of tokens by lane. The tokens of a lane are those of one thread, so its sum needs no other thread."""
    return tl.reshape(x, [LANES, x.numel // LANES])


@triton.jit
def _sum_by_lane(x):
    return tl.sum(_by_lane(x), axis=1).to(tl.float64)


@triton.jit
def _count_by_lane(condition):
    return tl.sum(_by_lane(condition.to(tl.int32)), axis=1)


@triton.jit
def no_sums():
    zero, none = tl.zeros([LANES], tl.float64), tl.zeros([LANES], tl.int32)
    infinity = tl.full([LANES], float("inf"), tl.float32)
    counts = Counts(none, none, none, none, none, none, none, none, none, infinity, -infinity)
    return counts, Sums(zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, none)


@triton.jit
def count_tokens(counts, t, below, above):
    """``below`` and ``above``: whether the token is beyond a bound of its gate. Call this as soon as they are known:
    until they are counted, the masks occupy registers of every token."""
    positive = t.negative == False  # noqa: E712 (`not` is for scalars)
    return Counts(
        valid=counts.valid + _count_by_lane(t.valid),
        selected=counts.selected + _count_by_lane(t.selected),
        high_positive=counts.high_positive + _count_by_lane(t.selected & above & positive),
        low_positive=counts.low_positive + _count_by_lane(t.selected & below & positive),
        low_negative=counts.low_negative + _count_by_lane(t.selected & below & t.negative),
        high_negative=counts.high_negative + _count_by_lane(t.selected & above & t.negative),
        nan=counts.nan + _count_by_lane(t.nan),
        infinite=counts.infinite + _count_by_lane(t.infinite),
        bad=counts.bad + _count_by_lane(t.bad),
        smallest=tl.minimum(counts.smallest, tl.min(_by_lane(tl.where(t.valid, t.x, float("inf"))), axis=1)),
        largest=tl.maximum(counts.largest, tl.max(_by_lane(tl.where(t.valid, t.x, float("-inf"))), axis=1)),
    )


@triton.jit
def add_tokens(sums, t, loss, penalty, entropy, REFERENCE: tl.constexpr):
    """``entropy``: loaded, or None. Where a token is not valid x and s are 0, and so are the terms that they give."""
    deviation = exp(clamp(t.x, -STATISTIC_SATURATION, STATISTIC_SATURATION)) - 1.0
    s, s_square, s_k3 = sums.s, sums.s_square, sums.s_k3
    if REFERENCE:
        s += _sum_by_lane(t.s)
        s_square += _sum_by_lane(t.s * t.s)
        s_k3 += _sum_by_lane(k3(t.s))
    entropies, entropy_tokens = sums.entropy, sums.entropy_tokens
    if entropy is not None:
        counted = t.valid & is_finite(entropy)
        entropies += _sum_by_lane(tl.where(counted, entropy, 0.0))
        entropy_tokens += _count_by_lane(counted)
    return Sums(
        loss=sums.loss + _sum_by_lane(loss + penalty),
        penalty=sums.penalty + _sum_by_lane(penalty),
        x=sums.x + _sum_by_lane(t.x),
        x_square=sums.x_square + _sum_by_lane(t.x * t.x),
        deviation=sums.deviation + _sum_by_lane(deviation),
        deviation_square=sums.deviation_square + _sum_by_lane(deviation * deviation),
        s=s,
        s_square=s_square,
        s_k3=s_k3,
        entropy=entropies,
        entropy_tokens=entropy_tokens,
    )


@triton.jit
def bad_rows(cu_seqlens, tokens, rows):
    """Broken rows [LANES], of every program's share of them."""
    program = tl.program_id(0).to(tl.int64)
    bad = tl.zeros([LANES], tl.float64)
    for first_row in range(program * LANES, rows, tl.num_programs(0).to(tl.int64) * LANES):
        row = first_row + tl.arange(0, LANES)
        bad += row_range(cu_seqlens, row, rows, tokens).bad.to(tl.float64)
    return bad


@triton.jit
def _join(a, b):
    return tl.join(a.to(tl.float64), b.to(tl.float64))


@triton.jit
def _store_eight(to, a, b, c, d, e, f, g, h):
    """The sums of eight [LANES], in this order: one reduction serves all of them."""
    even = tl.join(_join(a, e), _join(c, g))
    odd = tl.join(_join(b, f), _join(d, h))
    tl.store(to + tl.arange(0, 8), tl.reshape(tl.sum(tl.join(even, odd), axis=0), [8]))


@triton.jit
def store_sums(to, counts, sums, bad_offsets):
    """``to``: [programs, COLUMNS] float64; ``bad_offsets``: [LANES] of this program. The slots of ``rows`` and of the
    extrema stay 0: these are not sums."""
    zero = tl.zeros([LANES], tl.float64)
    of_program = to + tl.program_id(0).to(tl.int64) * COLUMNS
    _store_eight(
        of_program, counts.valid, counts.selected, zero, sums.loss, sums.x, sums.x_square, sums.deviation,
        sums.deviation_square,
    )  # fmt: skip
    _store_eight(
        of_program + 8, zero, zero, counts.high_positive, counts.low_positive, counts.low_negative,
        counts.high_negative, sums.s, sums.s_square,
    )  # fmt: skip
    _store_eight(
        of_program + 16, sums.s_k3, sums.penalty, sums.entropy, sums.entropy_tokens, counts.nan, counts.infinite,
        bad_offsets, counts.bad,
    )  # fmt: skip
    tl.store(of_program + 24, tl.min(counts.smallest).to(tl.float64))
    tl.store(of_program + 25, tl.max(counts.largest).to(tl.float64))


@triton.jit
def total(sums, seen, loss, metrics, programs, rows):
    """The sums of all programs, added in their order."""
    column = tl.arange(0, COLUMNS)[None, :]
    totals = tl.zeros([PROGRAMS, COLUMNS], tl.float64)
    smallest = tl.full([PROGRAMS, 1], float("inf"), tl.float64)
    largest = tl.full([PROGRAMS, 1], float("-inf"), tl.float64)
    for first in range(0, programs, PROGRAMS):
        program = first + tl.arange(0, PROGRAMS)[:, None]
        exists = program < programs
        totals += tl.load(sums + program * COLUMNS + column, mask=exists & (column < METRICS), other=0.0)
        smallest = tl.minimum(smallest, tl.load(sums + program * COLUMNS + 24, mask=exists, other=float("inf")))
        largest = tl.maximum(largest, tl.load(sums + program * COLUMNS + 25, mask=exists, other=float("-inf")))
    seen_rows = tl.zeros([ROWS_AT_ONCE], tl.int32)
    for first in range(0, rows, ROWS_AT_ONCE):
        row = first + tl.arange(0, ROWS_AT_ONCE)
        seen_rows += tl.load(seen + row, mask=row < rows, other=0).to(tl.int32)

    metric = tl.arange(0, COLUMNS)
    value = tl.sum(totals, axis=0)
    value = tl.where(metric == LOSS, clamp(value, -LARGEST_FLOAT, LARGEST_FLOAT), value)
    value = tl.where(metric == ROWS, tl.sum(seen_rows).to(tl.float64), value)
    value = tl.where(metric == LOG_RATIO_MIN, tl.min(smallest), value)
    value = tl.where(metric == LOG_RATIO_MAX, tl.max(largest), value)
    tl.store(metrics + metric, value, mask=metric < METRICS)
    tl.store(loss, tl.sum(tl.where(metric == LOSS, value, 0.0)).to(tl.float32))


@kernel
def _finalise(sums, seen, loss, metrics, programs: tl.int64, rows: tl.int64):
    total(sums, seen, loss, metrics, programs, rows)


def finalise(sums: torch.Tensor, seen: torch.Tensor, loss: torch.Tensor, metrics: torch.Tensor, rows: int) -> None:
    launch(_finalise, 1, sums, seen, loss, metrics, sums.shape[0], rows)
