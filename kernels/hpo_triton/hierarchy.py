"""The policy loss under gates on several levels, any depth in two sweeps over the tokens:

    check_pieces, sum_pieces    three launches: the log-ratios of all segments (pieces.py)
    _gate_pieces                what the levels above a piece tell its tokens, by channel and sign of the advantage
    _sweep_pieces               every token of a piece once: loss, gradient and metrics, and what flows into aggregates
    _add_flows                  with a level that hands gradient through its aggregate: to segments
    _return_flows               and back to tokens, with the sums of all programs; else _finalise alone

What flows is added in double within a slot, in the order of its tokens, and above it in integers: fixed point below the
largest exponent that arrives at a segment. So its bits depend on the segment only. Where nothing saturates every term
is 0 and no gradient is touched: the on-policy promise.

The definition is hpo_core/reference/gates.py; csrc/cpu/hierarchy.cpp is the same in the same order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..metrics import SLOTS as METRICS
from ..specs import (
    Aggregate,
    Head,
    KLEstimator,
    KLGradient,
    LevelKind,
    LevelSpec,
    PolicyLossInputs,
    PolicyLossSpec,
    Routing,
    TokenGate,
    Unit,
)
from .launch import kernel, launch, programs_for
from .levels import FIXED_POINT
from .math import SATURATION, clamp, exp
from .pieces import (
    EXPONENT,
    FIELDS,
    FIXED,
    FLOW,
    VALID,
    Pieces,
    add_to_segments,
    check_pieces,
    raise_segments,
    segment_of,
    slots_of_pieces,
    sum_pieces,
)
from .segments import SLOT_TOKENS, SLOTS, load
from .sums import (
    COLUMNS,
    LANES,
    LARGEST,
    TOTAL,
    add_tokens,
    bad_rows,
    count_tokens,
    finalise,
    no_sums,
    policy_term,
    store_sums,
    total,
    with_penalty,
)
from .tokens import Reading, bits, load_tokens, read_tokens, reading_of

__all__ = ["policy_loss"]

GATED = 64  # pieces of one program
FLOWS = 512  # slots of one program
MOST_LEVELS = 4

CLIP = tl.constexpr(int(LevelKind.CLIP))
ROLLBACK = tl.constexpr(int(LevelKind.ROLLBACK))
TANH = tl.constexpr(int(LevelKind.TANH))
THROUGH = tl.constexpr(int(Routing.THROUGH))
SELF = tl.constexpr(int(Routing.SELF))

# What a piece tells its tokens, by kind: 2 channel + (the advantage is negative). A side is 1 below, 2 above or 3.
KINDS = tl.constexpr(4)
TOLD = tl.constexpr(5)
Z, MEAN, SLOPE, OWN, SIDE = (tl.constexpr(field) for field in range(5))

LARGEST_DOUBLE = tl.constexpr(torch.finfo(torch.float64).max)
LARGEST_FLOW = tl.constexpr(1e300)
EXPONENT_BIAS = tl.constexpr(1023)  # of a double


class Shape(NamedTuple):
    """What of a hierarchy specialises kernels, beside the reading of tokens and which optional tensors exist."""

    gates: tuple[int, ...]  # by level, finest first
    routings: tuple[int, ...]
    means: tuple[bool, ...]  # or sums
    channels: int
    drop: bool  # the token gate; else it clips
    score_head: bool
    carries: bool  # gradient flows through some aggregate
    kl: int
    kl_gradient: int


# ------------------------------------------------------------------------------------------------------------- levels


class Residual(NamedTuple):
    value: tl.tensor
    slope: tl.tensor
    side: tl.tensor  # int32: 1 below its bounds, 2 above


@triton.jit
def _gate_residual(u, size, low, high, slope, GATE: tl.constexpr):
    """A level's gate on the residual of a segment with ``size`` tokens, all in double."""
    one = tl.full(u.shape, 1.0, tl.float64)
    zero = tl.zeros(u.shape, tl.float64)
    below, above = u < u, u < u
    value, derivative = u, one
    if GATE == CLIP:
        below, above = u < low, u > high
        value = tl.where(above, high, tl.where(below, low, u))
        derivative = tl.where(below | above, zero, one)
    elif GATE == ROLLBACK:
        towards = tl.where(u < 0.0, -one, one)
        beyond = tl.abs(u) > high
        down = tl.where(slope < 0.0, size, one * slope)
        at_once = down > LARGEST_DOUBLE
        down = tl.where(at_once, one, down)
        back = tl.where(at_once, -one, (down + 1.0) * high - down * tl.abs(u))
        rolled = tl.where(back > 0.0, towards * back, zero)
        rolled_slope = tl.where(back > 0.0, -down, zero)
        flat = down == 0.0  # a clip: no zone to roll back in
        value = tl.where(beyond, tl.where(flat, towards * high, rolled), u)
        derivative = tl.where(beyond, tl.where(flat, zero, rolled_slope), one)
        below, above = beyond & (u < 0.0), beyond & (u > 0.0)
    elif GATE == TANH:
        decay = tl.exp(-2.0 * tl.abs(u / high))
        size_of_bend = (1.0 - decay) / (1.0 + decay)
        value = tl.where(u < 0.0, -high, high) * size_of_bend
        derivative = 1.0 - size_of_bend * size_of_bend
    return Residual(value, derivative, below.to(tl.int32) + 2 * above.to(tl.int32))


@triton.jit
def _by_kind(kind, values):
    first, second, third, fourth = values
    return tl.where(kind == 0, first, tl.where(kind == 1, second, tl.where(kind == 2, third, fourth)))


@triton.jit
def _aggregate(segments, segment, channel, exists, MEAN_OF: tl.constexpr):
    """Of the log-ratios of each segment, and its size."""
    at = segments + segment * FIELDS
    size = tl.maximum(tl.load(at + VALID, mask=exists, other=0), 1).to(tl.float64)
    sum = tl.load(at + FIXED + channel, mask=exists, other=0).to(tl.float64) / FIXED_POINT
    return (sum / size if MEAN_OF else sum), size


@kernel
def _gate_pieces(
    begin,
    end,
    ancestors,
    segments,
    told,  # [P, TOLD, KINDS] float32
    steps,  # [P, DEPTH, KINDS] float64: the slope of a level less that of the finer one
    pieces: tl.int64,
    # by level: bounds by kind, and the slope
    low_00: tl.float64, low_01: tl.float64, low_02: tl.float64, low_03: tl.float64,
    high_00: tl.float64, high_01: tl.float64, high_02: tl.float64, high_03: tl.float64, slope_0: tl.float64,
    low_10: tl.float64, low_11: tl.float64, low_12: tl.float64, low_13: tl.float64,
    high_10: tl.float64, high_11: tl.float64, high_12: tl.float64, high_13: tl.float64, slope_1: tl.float64,
    low_20: tl.float64, low_21: tl.float64, low_22: tl.float64, low_23: tl.float64,
    high_20: tl.float64, high_21: tl.float64, high_22: tl.float64, high_23: tl.float64, slope_2: tl.float64,
    low_30: tl.float64, low_31: tl.float64, low_32: tl.float64, low_33: tl.float64,
    high_30: tl.float64, high_31: tl.float64, high_32: tl.float64, high_33: tl.float64, slope_3: tl.float64,
    SHAPE: tl.constexpr,
    DEPTH: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    lows = (
        (low_00, low_01, low_02, low_03), (low_10, low_11, low_12, low_13),
        (low_20, low_21, low_22, low_23), (low_30, low_31, low_32, low_33),
    )  # fmt: skip
    highs = (
        (high_00, high_01, high_02, high_03), (high_10, high_11, high_12, high_13),
        (high_20, high_21, high_22, high_23), (high_30, high_31, high_32, high_33),
    )  # fmt: skip
    slopes = (slope_0, slope_1, slope_2, slope_3)
    piece = tl.program_id(0).to(tl.int64) * PIECES + tl.arange(0, PIECES)[:, None]
    exists = piece < pieces
    first, last = tl.load(begin + piece, mask=exists, other=0), tl.load(end + piece, mask=exists, other=0)
    exists &= first < last  # what is not good is empty
    kind = tl.arange(0, 2 * SHAPE.channels)[None, :]
    channel = kind // 2
    exists = tl.broadcast_to(exists, [PIECES, 2 * SHAPE.channels])

    z = tl.zeros([PIECES, 2 * SHAPE.channels], tl.float64)
    finer_slope = z
    own = z.to(tl.float32)
    side = z.to(tl.int32)
    here, size = _aggregate(segments, segment_of(ancestors, 0, piece, pieces, exists), channel, exists, SHAPE.means[0])
    at = told + piece * TOLD * KINDS + kind
    tl.store(at + MEAN * KINDS, here.to(tl.float32), mask=exists)
    for k in tl.static_range(DEPTH):
        u, size_here = here, size
        if k + 1 < DEPTH:
            parent = segment_of(ancestors, k + 1, piece, pieces, exists)
            here, size = _aggregate(segments, parent, channel, exists, SHAPE.means[k + 1])
            u -= here
        gated = _gate_residual(
            u, size_here, _by_kind(kind, lows[k]), _by_kind(kind, highs[k]), slopes[k], SHAPE.gates[k]
        )
        z += gated.value
        side |= gated.side
        step = gated.slope - finer_slope  # at the finest level the token subtracts its own slope
        finer_slope = gated.slope
        if SHAPE.routings[k] == SELF:
            own += step.to(tl.float32)
        if k == 0:
            tl.store(at + SLOPE * KINDS, gated.slope.to(tl.float32), mask=exists)
        if steps is not None:
            tl.store(steps + (piece * DEPTH + k) * KINDS + kind, step, mask=exists)
    falls = channel == 1  # what is below there is above in the log-ratio
    side = tl.where(falls, side // 2 + side % 2 * 2, side)
    tl.store(at + Z * KINDS, tl.where(falls, -z, z).to(tl.float32), mask=exists)
    tl.store(at + OWN * KINDS, own, mask=exists)
    tl.store(at + SIDE * KINDS, side.to(tl.float32), mask=exists)


# ------------------------------------------------------------------------------------------------------------- tokens


@triton.jit
def _told(told, piece, held, negative, FIELD: tl.constexpr, CHANNEL: tl.constexpr):
    at = told + (piece * TOLD + FIELD) * KINDS + 2 * CHANNEL
    positive = tl.load(at, mask=held, other=0.0)
    return tl.where(negative, tl.load(at + 1, mask=held, other=0.0), positive)


@triton.jit
def _bound(bound, of_positive, of_negative, driven, t, token, tokens, whole, ALIGNED: tl.constexpr):
    """In log space, and rounded once, as the bounds of all tokens are."""
    value = tl.where(t.negative, of_negative, of_positive)
    if bound is not None:
        own = t.valid & (((driven >> t.negative.to(tl.int64)) & 1) == 1)
        ratio = tl.where(own, load(bound, token, tokens, whole, ALIGNED), 1.0)
        value = tl.where(own, tl.log(ratio.to(tl.float64)).to(tl.float32), value)
    return value


class Gated(NamedTuple):
    """The gate on the residuals of a block of tokens in one channel."""

    value: tl.tensor
    inside: tl.tensor  # float: the derivative
    below: tl.tensor
    above: tl.tensor


@triton.jit
def _gate_tokens(u, low, high, DROP: tl.constexpr):
    value = tl.zeros_like(u)
    inside, below, above = value, value != value, value != value
    if not DROP:
        below, above = u < low, u > high
        value = tl.where(above, high, tl.where(below, low, u))
        inside = (value == u).to(tl.float32)
    return Gated(value, inside, below, above)


@triton.jit
def _flow(value, slope, inside):
    """``[K, 1]``: what flows past the gates of tokens. A sum of exact zeros where nothing saturates."""
    return tl.sum(value * (slope - inside).to(tl.float64), axis=1, keep_dims=True)


@kernel
def _sweep_pieces(
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
    begin,
    end,
    row,
    ancestors,
    owner,
    broken,
    segments,
    told,
    steps,
    flows,  # [slots, DEPTH, 2] float64, by channel; written here
    seen,  # [S] uint8, 0: becomes 1 for rows with a valid token
    sums,  # [programs, COLUMNS] float64
    grad,
    token_loss,
    tokens: tl.int64,
    rows: tl.int64,
    pieces: tl.int64,
    blocks: tl.int64,
    low_positive: tl.float32,
    low_negative: tl.float32,
    high_positive: tl.float32,
    high_negative: tl.float32,
    low_driven: tl.int64,  # bit 0 for advantages >= 0, bit 1 for < 0: `low` replaces the bound
    high_driven: tl.int64,
    kl_beta: tl.float32,
    READING: tl.constexpr,
    SHAPE: tl.constexpr,
    DEPTH: tl.constexpr,
    SLOT: tl.constexpr,
    SLOTS: tl.constexpr,
    ALIGN: tl.constexpr,
    LANES: tl.constexpr,
):
    inputs = PolicyLossInputs(
        logp, old_logp, advantages, weights, cu_seqlens, mask, ref_logp, entropy, score, threshold, token_mask,
        token_weight,
    )  # fmt: skip
    ALIGNED: tl.constexpr = READING.aligned
    SPLIT: tl.constexpr = SHAPE.channels == 2
    program = tl.program_id(0).to(tl.int64)
    counts, total = no_sums(LANES)
    for block in range(program, blocks, tl.num_programs(0).to(tl.int64)):
        slot = block * SLOTS + tl.arange(0, SLOTS)
        slots, piece, of_row, held = slots_of_pieces(begin, end, row, owner, slot, pieces, tokens, SLOT, ALIGN)
        token = slots.token
        whole = tl.max(token) < tokens
        loaded = load_tokens(inputs, token, tokens, whole, READING)
        t = read_tokens(inputs, loaded, of_row, rows, slots.inside, READING)
        some = tl.max(t.valid.to(tl.int32), axis=1, keep_dims=True) > 0
        tl.store(seen + of_row, tl.full([SLOTS, 1], 1, tl.uint8), mask=some)

        # The residual of the token, and with a split that of the other channel.
        negative = t.negative
        lowest = _bound(low, low_positive, low_negative, low_driven, t, token, tokens, whole, ALIGNED)
        highest = _bound(high, high_positive, high_negative, high_driven, t, token, tokens, whole, ALIGNED)
        falls = t.x < 0.0  # +0 and -0 rise: one channel has the whole derivative at 0
        up = tl.where(falls, 0.0, t.x) if SPLIT else t.x
        mean = tl.load(told + (piece * TOLD + MEAN) * KINDS, mask=held, other=0.0)
        rising = _gate_tokens(up - mean, lowest, highest, SHAPE.drop)
        z = _told(told, piece, held, negative, Z, 0)
        slope = _told(told, piece, held, negative, SLOPE, 0)
        own = _told(told, piece, held, negative, OWN, 0)
        side = _told(told, piece, held, negative, SIDE, 0).to(tl.int32)
        inside, below, above = rising.inside, rising.below, rising.above
        falling, falling_slope = rising, slope
        if SPLIT:
            mean = tl.load(told + (piece * TOLD + MEAN) * KINDS + 2, mask=held, other=0.0)
            falling = _gate_tokens((up - t.x) - mean, lowest, highest, SHAPE.drop)
            z += _told(told, piece, held, negative, Z, 1)
            falling_slope = _told(told, piece, held, negative, SLOPE, 1)
            own = tl.where(falls, _told(told, piece, held, negative, OWN, 1), own)
            side |= _told(told, piece, held, negative, SIDE, 1).to(tl.int32)
            inside = tl.where(falls, falling.inside, inside)
            below |= falling.above
            above |= falling.below
        z += rising.value
        if SPLIT:
            z -= falling.value
        below |= side % 2 == 1
        above |= side // 2 == 1
        counts = count_tokens(counts, t, below, above, LANES)

        policy = policy_term(t, exp(clamp(z, -SATURATION, SATURATION)), SHAPE.score_head)
        derivative = policy.value
        if SHAPE.score_head == False:  # noqa: E712 (a constexpr)
            # Where the finest level takes the place of the token, its own slope does not count.
            derivative = derivative * (own if SHAPE.routings[0] == SELF else inside + own)
        derivative = tl.where(t.flows, derivative, 0.0)
        penalty, loss_t, derivative = with_penalty(t, policy.loss_t, derivative, kl_beta, SHAPE.kl, SHAPE.kl_gradient)
        if grad is not None:
            tl.store(grad + token, tl.where(t.valid, derivative, 0.0), mask=slots.inside)
        if token_loss is not None:
            bounded = clamp(loss_t, -LARGEST, LARGEST).to(tl.float32)
            tl.store(token_loss + token, tl.where(t.valid, bounded, 0.0), mask=slots.inside)
        h = None if entropy is None else load(entropy, token, tokens, whole, ALIGNED)
        total = add_tokens(total, t, policy.loss, penalty, h, LANES, ref_logp is not None)

        # What every slot sends up, by level and channel.
        if SHAPE.carries:
            value = clamp(policy.value, -LARGEST, LARGEST).to(tl.float64)
            of_positive = tl.sum(tl.where(negative, 0.0, value), axis=1, keep_dims=True)
            of_negative = tl.sum(tl.where(negative, value, 0.0), axis=1, keep_dims=True)
            for k in tl.static_range(DEPTH):
                if SHAPE.routings[k] == THROUGH:
                    segment = segment_of(ancestors, k, piece, pieces, held)
                    for channel in tl.static_range(SHAPE.channels):
                        if k > 0 or SHAPE.drop:
                            step = steps + (piece * DEPTH + k) * KINDS + 2 * channel
                            flow = tl.load(step, mask=held, other=0.0) * of_positive
                            flow += tl.load(step + 1, mask=held, other=0.0) * of_negative
                            flow = clamp(flow, -LARGEST_FLOW, LARGEST_FLOW)
                        elif channel == 0:
                            flow = _flow(value, slope, rising.inside)
                        else:
                            flow = _flow(value, falling_slope, falling.inside)
                        tl.store(flows + (slot[:, None] * DEPTH + k) * 2 + channel, flow)
                        exponent = (flow.to(tl.int64, bitcast=True) >> 52) & 2047
                        raise_segments(segments, segment, exponent, EXPONENT + channel, held & (flow != 0.0))

    bad_offsets = bad_rows(cu_seqlens, tokens, rows, LANES)
    first = (tl.arange(0, LANES) + program) == 0
    bad_offsets += tl.where(first, tl.load(broken).to(tl.float64), 0.0)
    store_sums(sums, counts, total, bad_offsets, LANES)


# -------------------------------------------------------------------------------------------------------------- flows


@triton.jit
def _scale_exponent(largest, digits):
    """The biased exponent of the power of two that takes what is below 2^(largest + 1) to below 2^digits."""
    return clamp(digits - largest + (2 * EXPONENT_BIAS - 1), 1, 2 * EXPONENT_BIAS)


@triton.jit
def _power(biased):
    return (biased << 52).to(tl.float64, bitcast=True)


@kernel
def _add_flows(
    flows,
    owner,
    ancestors,
    segments,
    pieces: tl.int64,
    slots: tl.int64,
    digits: tl.int64,
    SHAPE: tl.constexpr,
    DEPTH: tl.constexpr,
    FLOWS: tl.constexpr,
):
    slot = tl.program_id(0).to(tl.int64) * FLOWS + tl.arange(0, FLOWS)
    exists = slot < slots
    piece = tl.load(owner + slot, mask=exists, other=0)
    for k in tl.static_range(DEPTH):
        if SHAPE.routings[k] == THROUGH:
            for channel in tl.static_range(SHAPE.channels):
                flow = tl.load(flows + (slot * DEPTH + k) * 2 + channel, mask=exists, other=0.0)
                some = flow != 0.0
                segment = segment_of(ancestors, k, piece, pieces, some)
                largest = tl.load(segments + segment * FIELDS + EXPONENT + channel, mask=some, other=0)
                fixed = (flow * _power(_scale_exponent(largest, digits))).to(tl.int64)
                add_to_segments(segments, segment, fixed, FLOW + channel, some)


@triton.jit
def _arriving(segments, ancestors, piece, pieces, held, digits, channel, SHAPE: tl.constexpr, DEPTH: tl.constexpr):
    """``[K, 1]``: the gradient that every token of a piece receives through the aggregates above it."""
    arriving = tl.zeros(piece.shape, tl.float64)
    for k in tl.static_range(DEPTH):
        if SHAPE.routings[k] == THROUGH:
            at = segments + segment_of(ancestors, k, piece, pieces, held) * FIELDS
            largest = tl.load(at + EXPONENT + channel, mask=held, other=0)
            fixed = tl.load(at + FLOW + channel, mask=held, other=0)
            sum = fixed.to(tl.float64) * _power(-_scale_exponent(largest, digits) + 2 * EXPONENT_BIAS)
            if SHAPE.means[k]:
                sum = sum / tl.maximum(tl.load(at + VALID, mask=held, other=0), 1).to(tl.float64)
            arriving += sum
    return clamp(arriving, -LARGEST, LARGEST).to(tl.float32)


@kernel
def _return_flows(
    logp,
    old_logp,
    advantages,
    weights,
    cu_seqlens,
    mask,
    ref_logp,
    begin,
    end,
    row,
    ancestors,
    owner,
    segments,
    seen,
    sums,
    grad,
    loss,
    metrics,
    tokens: tl.int64,
    rows: tl.int64,
    pieces: tl.int64,
    programs: tl.int64,  # of the sweep
    digits: tl.int64,
    READING: tl.constexpr,
    SHAPE: tl.constexpr,
    DEPTH: tl.constexpr,
    SLOT: tl.constexpr,
    SLOTS: tl.constexpr,
    METRICS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    ROWS_AT_ONCE: tl.constexpr,
):
    inputs = PolicyLossInputs(logp, old_logp, advantages, weights, cu_seqlens, mask, ref_logp)
    program = tl.program_id(0).to(tl.int64)
    if program == 0:
        total(sums, seen, loss, metrics, programs, rows, METRICS, PROGRAMS, ROWS_AT_ONCE)
    slot = program * SLOTS + tl.arange(0, SLOTS)
    slots, piece, of_row, held = slots_of_pieces(begin, end, row, owner, slot, pieces, tokens, SLOT, 4)
    rising = _arriving(segments, ancestors, piece, pieces, held, digits, 0, SHAPE, DEPTH)
    falling = rising
    if SHAPE.channels == 2:
        falling = _arriving(segments, ancestors, piece, pieces, held, digits, 1, SHAPE, DEPTH)
    if tl.max(tl.abs(rising)) + tl.max(tl.abs(falling)) > 0.0:  # else what is written stands, to the bit
        token = slots.token
        loaded = load_tokens(inputs, token, tokens, tl.max(token) < tokens, READING)
        t = read_tokens(inputs, loaded, of_row, rows, slots.inside, READING)
        arriving = tl.where(t.x < 0.0, falling, rising)
        receives = t.valid & t.flows & (arriving != 0.0)
        received = tl.load(grad + token, mask=receives, other=0.0) + arriving
        tl.store(grad + token, clamp(received, -LARGEST, LARGEST), mask=receives)


# --------------------------------------------------------------------------------------------------------------- host


def policy_loss(
    inputs: PolicyLossInputs, spec: PolicyLossSpec, want_grad: bool, want_tokens: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """As gates.policy_loss, which calls this where ``spec.levels`` is not empty."""
    logp, device = inputs.logp, inputs.logp.device
    loss = torch.empty((), dtype=torch.float32, device=device)
    metrics = torch.empty(len(METRICS), dtype=torch.float64, device=device)
    seen = torch.empty(inputs.weights.numel(), dtype=torch.uint8, device=device)
    grad = torch.empty_like(logp) if want_grad else None
    token_loss = torch.empty_like(logp) if want_tokens else None
    # What has no influence is not part of the specialisation either.
    if spec.token is not TokenGate.CLIP:
        inputs = inputs._replace(low=None, high=None)
    shape, reading = _shape_of(inputs, spec, want_grad), reading_of(inputs, spec)

    pieces = check_pieces(inputs)
    sum_pieces(inputs, pieces, reading, spec.split, grad, token_loss, seen)
    sums, flows = _sweep(inputs, spec, pieces, shape, reading, grad, token_loss, seen)
    if flows is None:
        finalise(sums, seen, loss, metrics, inputs.weights.numel())
    else:
        _return(inputs, pieces, shape, reading, flows, sums, seen, grad, loss, metrics)
    return loss, metrics, grad, token_loss


def _shape_of(inputs: PolicyLossInputs, spec: PolicyLossSpec, want_grad: bool) -> Shape:
    linear = spec.head is Head.LINEAR
    return Shape(
        gates=tuple(int(level.gate) for level in spec.levels),
        routings=tuple(int(level.routing) for level in spec.levels),
        means=tuple(level.aggregate is Aggregate.MEAN for level in spec.levels),
        channels=2 if spec.split else 1,
        drop=spec.token is TokenGate.DROP,
        score_head=not linear,
        carries=linear and want_grad and any(level.routing is Routing.THROUGH for level in spec.levels),
        kl=int(spec.kl if inputs.ref_logp is not None else KLEstimator.NONE),
        kl_gradient=int(spec.kl_gradient if inputs.ref_logp is not None else KLGradient.VALUE),
    )


def _sweep(
    inputs: PolicyLossInputs,
    spec: PolicyLossSpec,
    pieces: Pieces,
    shape: Shape,
    reading: Reading,
    grad: torch.Tensor | None,
    token_loss: torch.Tensor | None,
    seen: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The sums of all programs, and what every slot sends up where that is wanted."""
    (depth, count), slots, device = pieces.ancestors.shape, pieces.owner.numel(), inputs.logp.device
    told = torch.empty((count, TOLD.value, KINDS.value), dtype=torch.float32, device=device)
    steps = torch.empty((count, depth, KINDS.value), dtype=torch.float64, device=device) if shape.carries else None
    flows = torch.empty((slots, depth, 2), dtype=torch.float64, device=device) if shape.carries else None
    spare = [LevelSpec(Unit.TRAJECTORY, LevelKind.IDENTITY)] * (MOST_LEVELS - depth)
    numbers = [number for level in (*spec.levels, *spare) for number in (*level.low, *level.high, level.slope)]
    launch(
        _gate_pieces, triton.cdiv(count, GATED), pieces.begin, pieces.end, pieces.ancestors, pieces.segments, told,
        steps, count, *numbers, SHAPE=shape, DEPTH=depth, PIECES=GATED,
    )  # fmt: skip

    # Sums of floats have an order to keep: where some flow, a token's place in a slot is its place in the piece.
    align = 1 if shape.carries else 4
    programs = programs_for(slots, SLOTS)
    sums = torch.empty((programs, COLUMNS.value), dtype=torch.float64, device=device)
    clips = spec.token is TokenGate.CLIP
    launch(
        _sweep_pieces, programs, inputs.logp, inputs.old_logp, inputs.advantages, inputs.weights, inputs.cu_seqlens,
        inputs.mask, inputs.ref_logp, inputs.entropy, inputs.score, inputs.threshold, inputs.token_mask,
        inputs.token_weight, inputs.low, inputs.high, pieces.begin, pieces.end, pieces.row, pieces.ancestors,
        pieces.owner, pieces.broken, pieces.segments, told, steps, flows, seen, sums, grad, token_loss,
        inputs.logp.numel(), inputs.weights.numel(), count, slots // SLOTS,
        *(spec.token_log_low if clips else NO_LOW), *(spec.token_log_high if clips else NO_HIGH),
        bits(spec.low_driven), bits(spec.high_driven), spec.kl_beta,
        READING=reading._replace(aligned=reading.aligned and align > 1), SHAPE=shape, DEPTH=depth, SLOT=SLOT_TOKENS,
        SLOTS=SLOTS, ALIGN=align, LANES=LANES,
    )  # fmt: skip
    return sums, flows


def _return(
    inputs: PolicyLossInputs,
    pieces: Pieces,
    shape: Shape,
    reading: Reading,
    flows: torch.Tensor,
    sums: torch.Tensor,
    seen: torch.Tensor,
    grad: torch.Tensor | None,
    loss: torch.Tensor,
    metrics: torch.Tensor,
) -> None:
    (depth, count), slots = pieces.ancestors.shape, pieces.owner.numel()
    digits = 62 - slots.bit_length()  # a sum of as many as there are slots is below 2^62
    launch(
        _add_flows, triton.cdiv(slots, FLOWS), flows, pieces.owner, pieces.ancestors, pieces.segments, count, slots,
        digits, SHAPE=shape, DEPTH=depth, FLOWS=FLOWS,
    )  # fmt: skip
    launch(
        _return_flows, slots // SLOTS, inputs.logp, inputs.old_logp, inputs.advantages, inputs.weights,
        inputs.cu_seqlens, inputs.mask, inputs.ref_logp, pieces.begin, pieces.end, pieces.row, pieces.ancestors,
        pieces.owner, pieces.segments, seen, sums, grad, loss, metrics, inputs.logp.numel(), inputs.weights.numel(),
        count, sums.shape[0], digits, READING=reading, SHAPE=shape, DEPTH=depth, SLOT=SLOT_TOKENS, SLOTS=SLOTS, **TOTAL,
    )  # fmt: skip


NO_LOW, NO_HIGH = (float("-inf"),) * 2, (float("inf"),) * 2
