"""Corrections: masks and weights on tokens from log-ratios that are constants of the differentiation.

    check_leaves       two launches (leaves.py)
    _reduce_leaves     the token weight, or 1, for every token; what the segments of leaves add up
    _correct           the factors of the tokens of all leaves

The definition is hpo_core/reference/corrections.py; the arithmetic of one token is that of
csrc/include/hpo/corrections.h. Segments add up in integers: their bits do not depend on what lies beside them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..specs import Action, CorrectionSpec, PolicyLossInputs, PolicyLossSpec, Reduction, SegmentReduce, Statistic
from .launch import kernel, launch
from .leaves import (
    EXPONENT,
    FIELDS,
    FIXED,
    VALID,
    add_to_segments,
    check_leaves,
    raise_segments,
    segment_of,
    slots_of_leaves,
)
from .levels import FIXED_POINT, to_fixed
from .math import SATURATION, clamp, exp, k3, k3_slope, log
from .segments import SLOT_TOKENS, SLOTS, slot_owner, tokens_of_slots
from .terms import by_sign
from .tokens import load_tokens, reading_of

__all__ = ["correction"]

LOG_RATIO = tl.constexpr(int(Statistic.LOG_RATIO))
K2 = tl.constexpr(int(Statistic.K2))
K3 = tl.constexpr(int(Statistic.K3))
BINARY_KL = tl.constexpr(int(Statistic.BINARY_KL))
MEAN = tl.constexpr(int(Reduction.MEAN))
MIN = tl.constexpr(int(Reduction.MIN))
MASK = tl.constexpr(int(Action.MASK))
CLAMP = tl.constexpr(int(Action.CLAMP))

EXPONENT_BOUND = tl.constexpr(20.0)
GUARD = tl.constexpr(1e-8)  # keeps the logarithm of a binary KL finite

# The extremum of a segment is the largest key there, above that of a segment without any token, which is 0.
EXTREMUM = EXPONENT
KEYS = tl.constexpr(2**32)

# A K3 may be e^20, of which sums in fixed point would hold few: whole multiples of this are counted apart.
COARSE = tl.constexpr(2048.0)
MULTIPLES = tl.constexpr(FIXED.value + 1)


class Rule(NamedTuple):
    """What specialises kernels."""

    statistic: int
    reduction: int
    extremum: bool  # the reduction is one; else it adds
    action: int
    strict: bool


class Bounds(NamedTuple):
    """Of the statistic, for advantages >= 0 and < 0."""

    low: tuple[float, float]
    high: tuple[float, float]


# ------------------------------------------------------------------------------------------------------------- tokens


@triton.jit
def _bounded_logp(logp):
    """For exp: rounding may lift a log-probability above 0, and below e^-87 nothing is left of a probability."""
    return clamp(logp, -87.0, 0.0)


@triton.jit
def _log_shortfall(f, x):
    """f - log(1 + f) without cancellation; ``x`` is 1 + f with all its digits, where f may have lost them."""
    s = tl.div_rn(f, 2.0 + f)  # log(1 + f) = 2 artanh s, and f - 2 s = f s
    square = s * s
    p = tl.fma(square, 6.6666667e-2, 7.6923077e-2)  # Taylor of (artanh s - s) / s^3 on |s| <= 1 / 3
    p = tl.fma(p, square, 9.0909091e-2)
    p = tl.fma(p, square, 1.1111111e-1)
    p = tl.fma(p, square, 1.4285714e-1)
    p = tl.fma(p, square, 0.2)
    p = tl.fma(p, square, 3.3333333e-1)
    return tl.where((f > -0.5) & (f < 1.0), s * tl.fma(-2.0 * square, p, f), f - log(x))


@triton.jit
def _probability_difference(first, second):
    """p - q of p = e^first and q = e^second. As both go to 1, no difference of exponentials leaves digits."""
    step = _bounded_logp(first) - _bounded_logp(second)
    size = tl.abs(step)
    fall = exp(_bounded_logp(tl.where(step < 0.0, second, first))) * k3_slope(size, exp(-size))
    return tl.where(step < 0.0, -fall, fall)


@triton.jit
def _signed_binary_kl(first, second, u):
    """The KL divergence of (q, 1 - q) from (p, 1 - p) with the sign of p - q, by terms that do not cancel."""
    bounded_first = _bounded_logp(first)
    bounded_second = _bounded_logp(second)
    step = bounded_first - bounded_second
    q = exp(bounded_second)
    d = _probability_difference(first, second)
    other_p = k3_slope(-bounded_first, exp(bounded_first))
    other_q = k3_slope(-bounded_second, q)
    guarded = other_q + GUARD
    of_token = tl.where(tl.abs(step) < 0.5, q * (k3(-step) + (step - u)), d - q * u)
    share = tl.div_rn(d, guarded)
    of_others = other_q * _log_shortfall(-share, tl.div_rn(other_p + GUARD, guarded))
    kl = of_token + of_others - GUARD * share
    return tl.where(d > 0.0, kl, tl.where(d < 0.0, -kl, 0.0))


@triton.jit
def _statistic_of(first, second, STATISTIC: tl.constexpr):
    """NaN where a token has none. What saturates is the log-ratio."""
    difference = first - second
    u = clamp(difference, -SATURATION, SATURATION)
    if STATISTIC == LOG_RATIO:
        value = u
    elif STATISTIC == K2:
        value = 0.5 * u * u
    elif STATISTIC == K3:
        value = k3(-clamp(u, -EXPONENT_BOUND, EXPONENT_BOUND))
    elif STATISTIC == BINARY_KL:
        value = _signed_binary_kl(first, second, u)
    else:
        value = _probability_difference(first, second)
    return tl.where(difference == difference, value, difference)


@triton.jit
def _factor_of(v, low, high, RULE: tl.constexpr):
    if RULE.action == CLAMP:
        return exp(clamp(clamp(v, low, high), -EXPONENT_BOUND, EXPONENT_BOUND))
    inside = (low < v) & (v < high) if RULE.strict else (low <= v) & (v <= high)
    kept = 1.0 if RULE.action == MASK else exp(clamp(v, -EXPONENT_BOUND, EXPONENT_BOUND))
    return tl.where(inside, kept, 0.0)


# ----------------------------------------------------------------------------------------------------------- segments


@triton.jit
def _key_of(v, REDUCTION: tl.constexpr):
    """An integer above 0 that is the larger, the larger v is, or the smaller where the minimum is sought."""
    bits = v.to(tl.int32, bitcast=True)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    return (-ordered if REDUCTION == MIN else ordered) + KEYS


@triton.jit
def _from_key(key, REDUCTION: tl.constexpr):
    ordered = (-key + KEYS if REDUCTION == MIN else key - KEYS).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _of_segment(segments, segment, held, RULE: tl.constexpr):
    at = segments + segment * FIELDS
    if RULE.extremum:
        return _from_key(tl.load(at + EXTREMUM, mask=held, other=0), RULE.reduction)
    sum = tl.load(at + FIXED, mask=held, other=0).to(tl.float64) / FIXED_POINT
    if RULE.statistic == K3:
        sum += tl.load(at + MULTIPLES, mask=held, other=0).to(tl.float64) * COARSE
    if RULE.reduction == MEAN:
        sum = sum / tl.maximum(tl.load(at + VALID, mask=held, other=0), 1).to(tl.float64)
    return sum.to(tl.float32)


@kernel
def _reduce_leaves(
    logp,
    old_logp,
    mask,
    token_weight,
    begin,
    end,
    ancestors,
    owner,  # [slots], written here
    segments,
    factor,  # set to the token weight, or 1
    tokens: tl.int64,
    leaves: tl.int64,
    READING: tl.constexpr,
    RULE: tl.constexpr,
    DEPTH: tl.constexpr,
    SLOT: tl.constexpr,
    SLOTS: tl.constexpr,
):
    inputs = PolicyLossInputs(logp, old_logp, None, None, None, mask)
    program = tl.program_id(0).to(tl.int64)
    token = program * SLOTS * SLOT + tl.arange(0, SLOTS * SLOT)
    untouched = tl.full([SLOTS * SLOT], 1.0, tl.float32)
    if token_weight is not None:
        untouched = tl.load(token_weight + token, mask=token < tokens)
    tl.store(factor + token, untouched, mask=token < tokens)
    slot = program * SLOTS + tl.arange(0, SLOTS)
    found = slot_owner(begin, leaves, tokens, slot, SLOT)
    tl.store(owner + slot, found)
    if DEPTH > 0:
        slots = tokens_of_slots(begin, end, found, leaves, tokens, slot, SLOT, 4)
        loaded = load_tokens(inputs, slots.token, tokens, tl.max(slots.token) < tokens, READING)
        v = _statistic_of(loaded.logp, loaded.old_logp, RULE.statistic)
        valid = slots.inside & (v == v)
        if mask is not None:
            valid &= loaded.mask
        count = tl.sum(valid.to(tl.int64), axis=1, keep_dims=True)
        segment = segment_of(ancestors, 0, slots.row, leaves, count > 0)
        if RULE.extremum:
            keys = tl.where(valid, _key_of(v, RULE.reduction), 0)
            raise_segments(segments, segment, tl.max(keys, axis=1, keep_dims=True), EXTREMUM, count > 0)
        else:
            v = tl.where(valid, v, 0.0)
            if RULE.statistic == K3:
                multiples = (v * (1.0 / COARSE)).to(tl.int32)
                v -= multiples.to(tl.float32) * COARSE
                coarse = tl.sum(multiples.to(tl.int64), axis=1, keep_dims=True)
                add_to_segments(segments, segment, coarse, MULTIPLES, coarse > 0)
            fixed = tl.sum(to_fixed(v), axis=1, keep_dims=True)
            add_to_segments(segments, segment, fixed, FIXED, count > 0)
            add_to_segments(segments, segment, count, VALID, count > 0)


@kernel
def _correct(
    logp,
    old_logp,
    advantages,
    mask,
    token_weight,
    begin,
    end,
    row,
    ancestors,
    owner,
    segments,
    factor,
    bounds,
    tokens: tl.int64,
    rows: tl.int64,
    leaves: tl.int64,
    READING: tl.constexpr,
    RULE: tl.constexpr,
    DEPTH: tl.constexpr,
    SLOT: tl.constexpr,
    SLOTS: tl.constexpr,
):
    inputs = PolicyLossInputs(logp, old_logp, advantages, None, None, mask, token_weight=token_weight)
    slot = tl.program_id(0).to(tl.int64) * SLOTS + tl.arange(0, SLOTS)
    slots, leaf, of_row, held = slots_of_leaves(begin, end, row, owner, slot, leaves, tokens, SLOT, 4)
    loaded = load_tokens(inputs, slots.token, tokens, tl.max(slots.token) < tokens, READING)
    if READING.advantage_per_token:
        negative = loaded.advantage < 0.0
    else:
        negative = tl.load(advantages + of_row, mask=held & (of_row < rows), other=0.0) < 0.0
    own = _statistic_of(loaded.logp, loaded.old_logp, RULE.statistic)
    v = own
    if DEPTH > 0:
        v = _of_segment(segments, segment_of(ancestors, 0, leaf, leaves, held), held, RULE)
    value = _factor_of(v, by_sign(negative, bounds.low), by_sign(negative, bounds.high), RULE)
    value = tl.where(own == own, value, own)
    if token_weight is not None:
        value = value * loaded.token_weight
    given = slots.inside if mask is None else slots.inside & loaded.mask
    tl.store(factor + slots.token, value, mask=given)


# --------------------------------------------------------------------------------------------------------------- host


def correction(inputs: PolicyLossInputs, spec: CorrectionSpec, reduce: SegmentReduce | None = None) -> torch.Tensor:
    """The factor ``[T]`` of ``logp - old_logp``, times ``token_weight``; ``reduce``: for ``spec.of_segments``."""
    leaves, reading = check_leaves(inputs), reading_of(inputs, PolicyLossSpec())
    (depth, count), programs = leaves.ancestors.shape, leaves.owner.numel() // SLOTS
    tokens, rows, factor = inputs.logp.numel(), inputs.cu_seqlens.numel() - 1, torch.empty_like(inputs.logp)
    rule = Rule(int(spec.statistic), int(spec.reduction), spec.is_extremum, int(spec.action), spec.strict)
    structure = {"READING": reading, "RULE": rule, "DEPTH": depth, "SLOT": SLOT_TOKENS, "SLOTS": SLOTS}
    launch(
        _reduce_leaves, programs, inputs.logp, inputs.old_logp, inputs.mask, inputs.token_weight, leaves.begin,
        leaves.end, leaves.ancestors, leaves.owner, leaves.segments, factor, tokens, count, **structure,
    )  # fmt: skip
    if reduce is not None:
        reduce(leaves.segments[0, :, : EXTREMUM.value + 1], spec.is_extremum)
    launch(
        _correct, programs, inputs.logp, inputs.old_logp, inputs.advantages, inputs.mask, inputs.token_weight,
        leaves.begin, leaves.end, leaves.row, leaves.ancestors, leaves.owner, leaves.segments, factor,
        Bounds(spec.low, spec.high), tokens, rows, count, **structure,
    )  # fmt: skip
    return factor
