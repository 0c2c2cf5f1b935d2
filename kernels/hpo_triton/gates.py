"""The policy loss: hierarchical ratio gating, selection, weights and the reference penalty, with its gradient.

    gate_levels    with a trajectory level: its gate, two launches (levels.py)
    _sweep         every token once: loss, gradient and metrics
    _finalise      the sums of all programs, added in their order

The definition is hpo_core/reference/gates.py; the arithmetic of one token is that of csrc/include/hpo/gates.h.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..checks import check
from ..metrics import SLOTS as METRICS
from ..specs import Head, KLEstimator, KLGradient, PolicyLossInputs, PolicyLossSpec, Routing, TokenGate
from .launch import aligned, kernel, launch, programs_for
from .levels import Levels, gate_levels
from .math import SATURATION, STATISTIC_SATURATION, clamp, exp, is_finite, k3, k3_slope
from .segments import TILE, load, row_of_token, row_range, store
from .tokens import Reading, load_tokens, read_tokens

__all__ = ["policy_loss"]

LANES = 256  # a lane adds the tokens of one thread, TILE / LANES at a time in float, then in double
COLUMNS = tl.constexpr(32)  # of one program's sums: metrics 0 to 23, log_ratio_min, log_ratio_max, nothing

DROP = tl.constexpr(int(TokenGate.DROP))
THROUGH = tl.constexpr(int(Routing.THROUGH))
SELF = tl.constexpr(int(Routing.SELF))
NO_KL = tl.constexpr(int(KLEstimator.NONE))
K1 = tl.constexpr(int(KLEstimator.K1))
K2 = tl.constexpr(int(KLEstimator.K2))
K3 = tl.constexpr(int(KLEstimator.K3))
VALUE = tl.constexpr(int(KLGradient.VALUE))
STRAIGHT_THROUGH = tl.constexpr(int(KLGradient.STRAIGHT_THROUGH))

ROWS, LOSS, LOG_RATIO_MIN, LOG_RATIO_MAX = (
    tl.constexpr(list(METRICS).index(name)) for name in ("rows", "loss", "log_ratio_min", "log_ratio_max")
)
LARGEST = tl.constexpr(torch.finfo(torch.float32).max)


class Gate(NamedTuple):
    """What specialises the sweep, beside the reading of tokens and which of the optional tensors exist."""

    token: int  # DROP, or CLIP: the identity is a clip without bounds
    has_level: bool
    routing: int
    score_head: bool
    kl: int
    kl_gradient: int


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
        derivative = tl.where(t.s_flows, slope, 0.0)
    elif GRADIENT == STRAIGHT_THROUGH:
        derivative = tl.where(t.s_flows, s, 0.0)
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
        derivative = tl.where(t.flows, tl.where(t.s_flows, both, k), tl.where(t.s_flows, rise, 0.0))
    return k, derivative


# -------------------------------------------------------------------------------------------------------------- sums


@triton.jit
def _lanes(x, LANES: tl.constexpr):
    """[TILE] -> [LANES]: adds the few tokens of one thread, without a word to the other threads."""
    return tl.sum(tl.reshape(x, [LANES, x.shape[0] // LANES]), axis=1).to(tl.float64)


@triton.jit
def _count(condition, LANES: tl.constexpr):
    return _lanes(condition.to(tl.float32), LANES)


@triton.jit
def _stack(a, b, c, d, e, f, g, h):
    """Eight [LANES] -> [LANES, 2, 2, 2] in this order: one reduction then serves all of them."""
    even = tl.join(tl.join(a, e), tl.join(c, g))
    odd = tl.join(tl.join(b, f), tl.join(d, h))
    return tl.join(even, odd)


@kernel
def _sweep(
    logp,
    old_logp,
    advantages,
    weights,
    cu_seqlens,
    mask,
    ref_logp,
    entropy,
    score,
    threshold,
    token_mask,
    token_weight,
    low,
    high,
    row_trajectory,
    level_ratio,  # Levels, or None
    level_side,
    level_slope,
    seen,  # [S] uint8, 0: becomes 1 for rows with a valid token
    sums,  # [programs, COLUMNS] float64
    grad,
    token_loss,
    tokens: tl.int64,
    rows: tl.int64,
    low_positive: tl.float32,
    low_negative: tl.float32,
    high_positive: tl.float32,
    high_negative: tl.float32,
    low_driven: tl.int64,  # bit 0 for advantages >= 0, bit 1 for < 0: `low` replaces the bound
    high_driven: tl.int64,
    kl_beta: tl.float32,
    READING: tl.constexpr,
    GATE: tl.constexpr,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
):
    inputs = PolicyLossInputs(
        logp, old_logp, advantages, weights, cu_seqlens, mask, ref_logp, entropy, score, threshold, token_mask,
        token_weight,
    )  # fmt: skip
    ALIGNED: tl.constexpr = READING.aligned
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0).to(tl.int64)
    zero = tl.zeros([LANES], tl.float64)
    first_8 = _stack(zero, zero, zero, zero, zero, zero, zero, zero)  # metrics 0 to 7
    next_8 = first_8
    last_8 = first_8
    smallest = tl.full([TILE], float("inf"), tl.float32)
    largest = tl.full([TILE], float("-inf"), tl.float32)

    for tile in range(program, tl.cdiv(tokens, TILE), programs):
        start = tile * TILE
        whole = start + TILE <= tokens
        token = start + tl.arange(0, TILE)
        loaded = load_tokens(inputs, token, tokens, whole, READING)
        row = row_of_token(cu_seqlens, rows, tokens, start, TILE)
        range_ = row_range(cu_seqlens, row, rows, tokens)
        inside = (token >= range_.begin) & (token < range_.end)
        t = read_tokens(inputs, loaded, row, rows, inside, READING)
        tl.store(seen + row, tl.full([TILE], 1, tl.uint8), mask=t.valid)
        sign = t.negative.to(tl.int64)

        # The gate: the ratio that counts, and on which side of its bounds the token's own or its trajectory's was.
        if GATE.has_level:
            trajectory = row
            if row_trajectory is not None:
                trajectory = clamp(tl.load(row_trajectory + row, mask=inside, other=0), 0, rows - 1)
            ratio = tl.load(level_ratio + 2 * trajectory + sign, mask=inside, other=1.0)
            side = tl.load(level_side + 2 * trajectory + sign, mask=inside, other=0)
            below = side < 0
            above = side > 0
        elif GATE.token == DROP:
            ratio = tl.full([TILE], 1.0, tl.float32)
            below = token < 0
            above = below
        else:
            ratio = exp(t.x)
            lowest = tl.where(t.negative, low_negative, low_positive)
            highest = tl.where(t.negative, high_negative, high_positive)
            if low is not None:
                driven = t.valid & (((low_driven >> sign) & 1) == 1)
                lowest = tl.where(driven, load(low, token, tokens, whole, ALIGNED), lowest)
            if high is not None:
                driven = t.valid & (((high_driven >> sign) & 1) == 1)
                highest = tl.where(driven, load(high, token, tokens, whole, ALIGNED), highest)
            below = ratio < lowest
            above = ratio > highest
            ratio = tl.where(above, highest, tl.where(below, lowest, ratio))

        # The policy term. At ratio 1 the value is -a to the bit: the on-policy promise. The loss goes on in double:
        # four tokens at saturation no longer fit a float.
        value = tl.where(t.selected, -(t.a * ratio), 0.0)
        loss = value.to(tl.float64)
        loss_t = -(t.unweighted.to(tl.float64) * ratio.to(tl.float64))
        if GATE.score_head:
            score_t = tl.where(t.flows, t.logp, 0.0).to(tl.float64)
            loss *= score_t
            loss_t *= score_t
            derivative = value
        elif GATE.has_level and GATE.routing == THROUGH:
            derivative = value
            if level_slope is not None:
                derivative = tl.load(level_slope + trajectory, mask=inside, other=0.0)
        elif (GATE.routing == SELF) if GATE.has_level else (GATE.token != DROP):
            derivative = tl.where(below | above, 0.0, value)
        else:
            derivative = tl.zeros([TILE], tl.float32)
        derivative = tl.where(t.flows, derivative, 0.0)

        # The reference penalty, of every valid token, selected or not.
        penalty = tl.zeros([TILE], tl.float64)
        if GATE.kl != NO_KL:
            k, k_derivative = _penalty(t, GATE.kl, GATE.kl_gradient)
            strength = t.weight * kl_beta
            penalty = tl.where(t.valid, strength.to(tl.float64) * k.to(tl.float64), 0.0)
            loss_t += (kl_beta * k).to(tl.float64)
            derivative = clamp(derivative + strength * k_derivative, -LARGEST, LARGEST)

        if grad is not None:
            store(grad, token, tl.where(t.valid, derivative, 0.0), tokens, whole, ALIGNED)
        if token_loss is not None:
            bounded = clamp(loss_t, -LARGEST, LARGEST).to(tl.float32)
            store(token_loss, token, tl.where(t.valid, bounded, 0.0), tokens, whole, ALIGNED)

        # Sums. Where a token is not valid x and s are 0, and with them all that is made of them.
        smallest = tl.minimum(smallest, tl.where(t.valid, t.x, float("inf")))
        largest = tl.maximum(largest, tl.where(t.valid, t.x, float("-inf")))
        deviation = exp(clamp(t.x, -STATISTIC_SATURATION, STATISTIC_SATURATION)) - 1.0
        first_8 += _stack(
            _count(t.valid, LANES),
            _count(t.selected, LANES),
            zero,  # rows, from `seen`
            _lanes(loss + penalty, LANES),
            _lanes(t.x, LANES),
            _lanes(t.x * t.x, LANES),
            _lanes(deviation, LANES),
            _lanes(deviation * deviation, LANES),
        )
        s, s_square, s_k3 = zero, zero, zero
        if ref_logp is not None:
            s, s_square, s_k3 = _lanes(t.s, LANES), _lanes(t.s * t.s, LANES), _lanes(k3(t.s), LANES)
        next_8 += _stack(
            zero,  # log_ratio_min
            zero,  # log_ratio_max
            _count(t.selected & above & (sign == 0), LANES),
            _count(t.selected & below & (sign == 0), LANES),
            _count(t.selected & below & (sign == 1), LANES),
            _count(t.selected & above & (sign == 1), LANES),
            s,
            s_square,
        )
        entropies, entropy_tokens = zero, zero
        if entropy is not None:
            h = load(entropy, token, tokens, whole, ALIGNED)
            counted = t.valid & is_finite(h)
            entropies, entropy_tokens = _lanes(tl.where(counted, h, 0.0), LANES), _count(counted, LANES)
        last_8 += _stack(
            s_k3,
            _lanes(penalty, LANES),
            entropies,
            entropy_tokens,
            _count(t.nan, LANES),
            _count(t.infinite, LANES),
            zero,  # bad_offsets, below
            _count(t.bad, LANES),
        )

    # Every program looks at its share of the rows.
    bad_offsets = zero
    for first_row in range(program * LANES, rows, programs * LANES):
        row = first_row + tl.arange(0, LANES)
        bad_offsets += row_range(cu_seqlens, row, rows, tokens).bad.to(tl.float64)
        if row_trajectory is not None:
            trajectory = tl.load(row_trajectory + row, mask=row < rows, other=0)
            bad_offsets += ((trajectory < 0) | (trajectory >= rows)).to(tl.float64)
    last_8 += _stack(zero, zero, zero, zero, zero, zero, bad_offsets, zero)

    column = sums + program * COLUMNS + tl.arange(0, 8)
    tl.store(column, tl.reshape(tl.sum(first_8, axis=0), [8]))
    tl.store(column + 8, tl.reshape(tl.sum(next_8, axis=0), [8]))
    tl.store(column + 16, tl.reshape(tl.sum(last_8, axis=0), [8]))
    tl.store(sums + program * COLUMNS + 24, tl.min(smallest).to(tl.float64))
    tl.store(sums + program * COLUMNS + 25, tl.max(largest).to(tl.float64))


@kernel
def _finalise(
    sums,
    seen,
    loss,
    metrics,
    programs: tl.int64,
    rows: tl.int64,
    METRICS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    ROWS_AT_ONCE: tl.constexpr,
):
    column = tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros([PROGRAMS, COLUMNS], tl.float64)
    smallest = tl.full([PROGRAMS, 1], float("inf"), tl.float64)
    largest = tl.full([PROGRAMS, 1], float("-inf"), tl.float64)
    for first in range(0, programs, PROGRAMS):
        program = first + tl.arange(0, PROGRAMS)[:, None]
        exists = program < programs
        total += tl.load(sums + program * COLUMNS + column, mask=exists & (column < METRICS), other=0.0)
        smallest = tl.minimum(smallest, tl.load(sums + program * COLUMNS + 24, mask=exists, other=float("inf")))
        largest = tl.maximum(largest, tl.load(sums + program * COLUMNS + 25, mask=exists, other=float("-inf")))
    seen_rows = tl.zeros([ROWS_AT_ONCE], tl.int32)
    for first in range(0, rows, ROWS_AT_ONCE):
        row = first + tl.arange(0, ROWS_AT_ONCE)
        seen_rows += tl.load(seen + row, mask=row < rows, other=0).to(tl.int32)

    metric = tl.arange(0, COLUMNS)
    value = tl.sum(total, axis=0)
    value = tl.where(metric == LOSS, clamp(value, -LARGEST, LARGEST), value)
    value = tl.where(metric == ROWS, tl.sum(seen_rows).to(tl.float64), value)
    value = tl.where(metric == LOG_RATIO_MIN, tl.min(smallest), value)
    value = tl.where(metric == LOG_RATIO_MAX, tl.max(largest), value)
    tl.store(metrics + metric, value, mask=metric < METRICS)
    tl.store(loss, tl.sum(tl.where(metric == LOSS, value, 0.0)).to(tl.float32))


# --------------------------------------------------------------------------------------------------------------- host


def policy_loss(
    inputs: PolicyLossInputs, spec: PolicyLossSpec, want_grad: bool, want_tokens: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Loss (0-dim float32), metrics (float64), dL/dlogp ``[T]`` and loss_t ``[T]`` where wanted."""
    check(
        not spec.levels,
        "backend: gates on several levels run on 'cpu' and 'reference' so far, not on 'triton'; move the tensors there",
    )
    logp, device = inputs.logp, inputs.logp.device
    tokens, rows, programs = logp.numel(), inputs.weights.numel(), programs_for(logp.numel(), TILE)
    loss = torch.empty((), dtype=torch.float32, device=device)
    metrics = torch.empty(len(METRICS), dtype=torch.float64, device=device)
    sums = torch.empty((programs, COLUMNS.value), dtype=torch.float64, device=device)
    grad = torch.empty_like(logp) if want_grad else None
    token_loss = torch.empty_like(logp) if want_tokens else None

    # What has no influence is not part of the specialisation either.
    if spec.token is not TokenGate.CLIP:
        inputs = inputs._replace(low=None, high=None)
        spec = spec._replace(token_low=NO_LOW, token_high=NO_HIGH)
    if not spec.has_level:
        inputs = inputs._replace(row_trajectory=None)
    reading = Reading(
        strict=spec.strict and inputs.score is not None,
        advantage_per_token=inputs.advantage_per_token,
        aligned=aligned(*_of_tokens(inputs)),
    )
    gate = Gate(
        token=int(TokenGate.DROP if spec.token is TokenGate.DROP else TokenGate.CLIP),
        has_level=spec.has_level,
        routing=int(spec.routing if spec.has_level else Routing.THROUGH),
        score_head=spec.head is Head.SCORE,
        kl=int(spec.kl if inputs.ref_logp is not None else KLEstimator.NONE),
        kl_gradient=int(spec.kl_gradient if inputs.ref_logp is not None else KLGradient.VALUE),
    )

    levels = Levels(None, None, None)
    if spec.has_level:
        want_slope = want_grad and spec.routing is Routing.THROUGH and spec.head is Head.LINEAR
        levels, seen = gate_levels(inputs, spec, reading, want_slope)
    else:
        seen = torch.zeros(rows, dtype=torch.uint8, device=device)
    launch(
        _sweep, programs, logp, inputs.old_logp, inputs.advantages, inputs.weights, inputs.cu_seqlens, inputs.mask,
        inputs.ref_logp, inputs.entropy, inputs.score, inputs.threshold, inputs.token_mask, inputs.token_weight,
        inputs.low, inputs.high, inputs.row_trajectory, *levels, seen, sums, grad, token_loss, tokens, rows,
        *spec.token_low, *spec.token_high, _bits(spec.low_driven), _bits(spec.high_driven), spec.kl_beta,
        READING=reading, GATE=gate, TILE=TILE, LANES=LANES,
    )  # fmt: skip
    launch(
        _finalise, 1, sums, seen, loss, metrics, programs, rows, METRICS=len(METRICS), PROGRAMS=64, ROWS_AT_ONCE=4096
    )
    return loss, metrics, grad, token_loss


NO_LOW, NO_HIGH = (0.0, 0.0), (math.inf, math.inf)


def _of_tokens(inputs: PolicyLossInputs) -> tuple[torch.Tensor | None, ...]:
    return (
        inputs.logp, inputs.old_logp, inputs.ref_logp, inputs.entropy, inputs.score, inputs.token_weight, inputs.low,
        inputs.high, inputs.mask, inputs.token_mask, inputs.advantages if inputs.advantage_per_token else None,
    )  # fmt: skip


def _bits(pair: tuple[bool, bool]) -> int:
    return pair[0] + 2 * pair[1]
