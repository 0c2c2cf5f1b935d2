"""The policy loss under gates on several levels, any depth in two sweeps over the tokens, and under gates with a term
of their own (terms.py), on any number of levels, none included:

    check_leaves, sum_leaves    three launches: the log-ratios of all segments (leaves.py)
    add_children                a launch for each balanced level: the aggregates of finer ones (gated_levels.py)
    gate_leaves                 with a level: what the levels above a leaf tell its tokens (gated_levels.py)
    _sweep_leaves               every token of a leaf once: loss, gradient and metrics, and what flows into aggregates
    _add_flows                  where gradient flows through some aggregate: to segments
    _return_flows               and back to tokens, with the sums of all programs; else _finalise alone

What flows is added in double within a slot, in the order of its tokens, and above it in integers: fixed point below the
largest exponent that arrives at a segment. So its bits depend on the segment only. Where nothing saturates every term
is 0 and no gradient is touched: the on-policy promise.

An Exchange changes what segments have added up, between the launches that add and those that read.

The definition is hpo_core/reference/gates.py; csrc/cpu/hierarchy.cpp is the same in the same order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..metrics import SLOTS as METRICS
from ..specs import (
    Aggregate,
    Exchange,
    Head,
    KLEstimator,
    KLGradient,
    LevelSpec,
    Penalty,
    PolicyLossInputs,
    PolicyLossSpec,
    Routing,
    TokenGate,
)
from .correction_rules import rule_bounds_of, with_correction
from .fixed_point import FIXED_POINT
from .gated_levels import KINDS, LOG_MEAN_EXP, Shape, add_children, gate_leaves
from .hierarchy_tokens import gate_tokens, gated_derivative, gated_term, token_bound
from .launch import kernel, launch, programs_for
from .leaves import (
    EXPONENT,
    FIELDS,
    FIXED,
    FLOW,
    VALID,
    Leaves,
    add_to_segments,
    check_leaves,
    raise_segments,
    segment_of,
    slots_of_leaves,
    sum_leaves,
)
from .math import clamp
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
    store_sums,
    total,
    with_penalty,
)
from .terms import (
    Pre,
    mean_exp_slope,
    numbers_of,
    pre_of,
    term_of,
    through_pre,
    with_own_penalty,
)
from .tokens import Reading, bits, load_tokens, read_tokens, reading_of

__all__ = ["bounds_of", "policy_loss", "shape_of"]

FLOWS = 512  # slots of one program

NO_OWN_PENALTY = tl.constexpr(int(Penalty.NONE))
THROUGH = tl.constexpr(int(Routing.THROUGH))

LARGEST_FLOW = tl.constexpr(1e300)
EXPONENT_BIAS = tl.constexpr(1023)  # of a double
# Of what flows, in fixed point: the sum of 2^25 slots, of all processes, is below 2^62. Not the number of this process'
# own slots: they add to each other's.
DIGITS = tl.constexpr(37)


@triton.jit
def _flow(value, slope, inside):
    """``[K, 1]``: the gradient past the gates of tokens. A sum of exact zeros where nothing saturates."""
    return tl.sum(value * (slope - inside).to(tl.float64), axis=1, keep_dims=True)


# Of itself the assembler keeps a log mean exp within 128 registers, and spills for it on sm_120.
UNBOUND_REGISTERS = 168


@kernel
def _sweep_leaves(
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
    target,
    penalty_mask,
    kl_weight,
    correction_first,
    correction_second,
    rule_bounds,
    pre,
    numbers,  # of the term
    begin,
    end,
    row,
    ancestors,
    owner,
    broken,
    segments,
    gated_levels,
    steps,
    flows,  # [slots, DEPTH, 2] float64, by channel; written here
    seen,  # [S] uint8, 0: becomes 1 for rows with a valid token
    sums,  # [programs, COLUMNS] float64
    grad,
    token_loss,
    tokens: tl.int64,
    rows: tl.int64,
    leaves: tl.int64,
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
        token_weight, low, high, target=target,
    )  # fmt: skip
    ALIGNED: tl.constexpr = READING.aligned
    program = tl.program_id(0).to(tl.int64)
    counts, total = no_sums(LANES)
    for block in range(program, blocks, tl.num_programs(0).to(tl.int64)):
        slot = block * SLOTS + tl.arange(0, SLOTS)
        slots, leaf, of_row, held = slots_of_leaves(begin, end, row, owner, slot, leaves, tokens, SLOT, ALIGN)
        token = slots.token
        whole = tl.max(token) < tokens
        loaded = load_tokens(inputs, token, tokens, whole, READING)
        loaded = with_correction(
            loaded, inputs, correction_first, correction_second, rule_bounds, of_row, rows, token, tokens, whole,
            READING,
        )  # fmt: skip
        t = read_tokens(inputs, loaded, of_row, rows, slots.inside, READING)
        some = tl.max(t.valid.to(tl.int32), axis=1, keep_dims=True) > 0
        tl.store(seen + of_row, tl.full([SLOTS, 1], 1, tl.uint8), mask=some)

        negative = t.negative
        own_low = None if low is None else loaded.low
        own_high = None if high is None else loaded.high
        lowest = token_bound(own_low, low_positive, low_negative, low_driven, t)
        highest = token_bound(own_high, high_positive, high_negative, high_driven, t)
        gated = gate_tokens(t, lowest, highest, gated_levels, leaf, held, pre, numbers, SHAPE)
        counts = count_tokens(counts, t, gated.below, gated.above, LANES)

        given_weight = None if token_weight is None and READING.rule is None else loaded.token_weight
        policy = gated_term(t, gated, given_weight, numbers, SHAPE)
        derivative = gated_derivative(t, gated, policy, pre, SHAPE)
        c = None if kl_weight is None else load(kl_weight, token, tokens, whole, ALIGNED)
        penalty, loss_t, derivative = with_penalty(
            t, c, policy.loss_t, derivative, kl_beta, SHAPE.kl, SHAPE.kl_gradient
        )
        if SHAPE.term is not None and SHAPE.term.penalty != NO_OWN_PENALTY:
            pays = t.valid
            if penalty_mask is not None:
                pays &= load(penalty_mask, token, tokens, whole, ALIGNED)
            penalty, loss_t, derivative = with_own_penalty(
                t, pays, penalty, loss_t, derivative, numbers.penalty, SHAPE.term.penalty
            )
        if grad is not None:
            tl.store(grad + token, tl.where(t.valid, derivative, 0.0), mask=slots.inside)
        if token_loss is not None:
            bounded = clamp(loss_t, -LARGEST, LARGEST).to(tl.float32)
            tl.store(token_loss + token, tl.where(t.valid, bounded, 0.0), mask=slots.inside)
        h = None if entropy is None else load(entropy, token, tokens, whole, ALIGNED)
        total = add_tokens(total, t, policy.loss, penalty, h, LANES, ref_logp is not None)

        # The gradient of every slot in aggregates, by level and channel.
        if SHAPE.carries:
            value = clamp(policy.value, -LARGEST, LARGEST).to(tl.float64)
            of_positive = tl.sum(tl.where(negative, 0.0, value), axis=1, keep_dims=True)
            of_negative = tl.sum(tl.where(negative, value, 0.0), axis=1, keep_dims=True)
            for k in tl.static_range(DEPTH):
                if SHAPE.routings[k] == THROUGH:
                    segment = segment_of(ancestors, k, leaf, leaves, held)
                    for channel in tl.static_range(SHAPE.channels):
                        if k > 0 or SHAPE.drop:
                            step = steps + (leaf * DEPTH + k) * KINDS + 2 * channel
                            flow = tl.load(step, mask=held, other=0.0) * of_positive
                            flow += tl.load(step + 1, mask=held, other=0.0) * of_negative
                            flow = clamp(flow, -LARGEST_FLOW, LARGEST_FLOW)
                        elif channel == 0:
                            flow = _flow(value, gated.slope, gated.rising_inside)
                        else:
                            flow = _flow(value, gated.falling_slope, gated.falling_inside)
                        tl.store(flows + (slot[:, None] * DEPTH + k) * 2 + channel, flow)
                        exponent = (flow.to(tl.int64, bitcast=True) >> 52) & 2047
                        raise_segments(segments, segment, exponent, EXPONENT + channel, held & (flow != 0.0))

    bad_offsets = bad_rows(cu_seqlens, tokens, rows, LANES)
    first = (tl.arange(0, LANES) + program) == 0
    bad_offsets += tl.where(first, tl.load(broken).to(tl.float64), 0.0)
    store_sums(sums, counts, total, bad_offsets, LANES)


# -------------------------------------------------------------------------------------------------------------- flows


@triton.jit
def _scale_exponent(largest):
    """The biased exponent of the power of two that takes what is below 2^(largest + 1) to below 2^DIGITS."""
    return clamp(-largest + (DIGITS + 2 * EXPONENT_BIAS - 1), 1, 2 * EXPONENT_BIAS)


@triton.jit
def _power(biased):
    return (biased << 52).to(tl.float64, bitcast=True)


@kernel
def _add_flows(
    flows,
    owner,
    ancestors,
    segments,
    leaves: tl.int64,
    slots: tl.int64,
    SHAPE: tl.constexpr,
    DEPTH: tl.constexpr,
    FLOWS: tl.constexpr,
):
    slot = tl.program_id(0).to(tl.int64) * FLOWS + tl.arange(0, FLOWS)
    exists = slot < slots
    leaf = tl.load(owner + slot, mask=exists, other=0)
    for k in tl.static_range(DEPTH):
        if SHAPE.routings[k] == THROUGH:
            for channel in tl.static_range(SHAPE.channels):
                flow = tl.load(flows + (slot * DEPTH + k) * 2 + channel, mask=exists, other=0.0)
                some = flow != 0.0
                segment = segment_of(ancestors, k, leaf, leaves, some)
                largest = tl.load(segments + segment * FIELDS + EXPONENT + channel, mask=some, other=0)
                fixed = (flow * _power(_scale_exponent(largest))).to(tl.int64)
                add_to_segments(segments, segment, fixed, FLOW + channel, some)


@triton.jit
def _aggregate_grad(segments, ancestors, leaf, leaves, held, channel, SHAPE: tl.constexpr, DEPTH: tl.constexpr):
    """``[K, 1]``: the gradient that every token of a leaf receives through the aggregates above it."""
    aggregate_grad = tl.zeros(leaf.shape, tl.float64)
    for k in tl.static_range(DEPTH):
        if SHAPE.routings[k] == THROUGH:
            at = segments + segment_of(ancestors, k, leaf, leaves, held) * FIELDS
            largest = tl.load(at + EXPONENT + channel, mask=held, other=0)
            fixed = tl.load(at + FLOW + channel, mask=held, other=0)
            sum = fixed.to(tl.float64) * _power(-_scale_exponent(largest) + 2 * EXPONENT_BIAS)
            for level in tl.static_range(DEPTH):
                if SHAPE.divisors[k][level]:
                    at = segments + segment_of(ancestors, level, leaf, leaves, held) * FIELDS
                    size = tl.maximum(tl.load(at + VALID, mask=held, other=0), 1).to(tl.float64)
                    if SHAPE.aggregates[level] == LOG_MEAN_EXP:
                        size += tl.load(at + FIXED + channel, mask=held, other=0).to(tl.float64) / FIXED_POINT
                    sum = sum / size
            aggregate_grad += sum
    return clamp(aggregate_grad, -LARGEST, LARGEST).to(tl.float32)


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
    pre,
    tokens: tl.int64,
    rows: tl.int64,
    leaves: tl.int64,
    programs: tl.int64,  # of the sweep
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
    slots, leaf, of_row, held = slots_of_leaves(begin, end, row, owner, slot, leaves, tokens, SLOT, 4)
    rising = _aggregate_grad(segments, ancestors, leaf, leaves, held, 0, SHAPE, DEPTH)
    falling = rising
    if SHAPE.channels == 2:
        falling = _aggregate_grad(segments, ancestors, leaf, leaves, held, 1, SHAPE, DEPTH)
    if tl.max(tl.abs(rising)) + tl.max(tl.abs(falling)) > 0.0:  # else the written gradient stands, to the bit
        token = slots.token
        loaded = load_tokens(inputs, token, tokens, tl.max(token) < tokens, READING)
        t = read_tokens(inputs, loaded, of_row, rows, slots.inside, READING)
        flow = through_pre(tl.where(t.x < 0.0, falling, rising), t.x, t.negative, pre)
        if SHAPE.aggregates[0] == LOG_MEAN_EXP:
            flow *= mean_exp_slope(t.x, SHAPE.channels == 2)
        receives = t.valid & t.flows & (flow != 0.0)
        received = tl.load(grad + token, mask=receives, other=0.0) + flow
        tl.store(grad + token, clamp(received, -LARGEST, LARGEST), mask=receives)


# --------------------------------------------------------------------------------------------------------------- host


def policy_loss(
    inputs: PolicyLossInputs, spec: PolicyLossSpec, want_grad: bool, want_tokens: bool, exchange: Exchange | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """As gates.policy_loss, which calls this where ``spec.is_hierarchical``."""
    logp, device = inputs.logp, inputs.logp.device
    loss = torch.empty((), dtype=torch.float32, device=device)
    metrics = torch.empty(len(METRICS), dtype=torch.float64, device=device)
    seen = torch.empty(inputs.weights.numel(), dtype=torch.uint8, device=device)
    grad = torch.empty_like(logp) if want_grad else None
    token_loss = torch.empty_like(logp) if want_tokens else None
    # A choice without influence is no part of the specialisation.
    if spec.token is not TokenGate.CLIP:
        inputs = inputs._replace(low=None, high=None)
    shape, reading, pre = shape_of(inputs, spec, want_grad), reading_of(inputs, spec), pre_of(spec)

    leaves = check_leaves(inputs, len(spec.levels))
    sum_leaves(inputs, leaves, reading, shape.aggregates, spec.split, pre, grad, token_loss, seen)
    add_children(leaves, shape)
    if exchange is not None:
        exchange.sums(_fields(leaves, VALID, 3))
    sums, flows = _sweep(inputs, spec, leaves, shape, reading, pre, grad, token_loss, seen)
    if flows is None:
        finalise(sums, seen, loss, metrics, inputs.weights.numel())
        return loss, metrics, grad, token_loss
    if exchange is not None:
        exchange.largest(_fields(leaves, EXPONENT, 2))
    _add(flows, leaves, shape)
    if exchange is not None:
        exchange.aggregate_grad(_fields(leaves, FLOW, 2))
    _return(inputs, leaves, shape, reading, pre, sums, seen, grad, loss, metrics)
    return loss, metrics, grad, token_loss


def _fields(leaves: Leaves, first: tl.constexpr, count: int) -> torch.Tensor:
    return leaves.segments[..., first.value : first.value + count]


def shape_of(inputs: PolicyLossInputs, spec: PolicyLossSpec, want_grad: bool) -> Shape:
    routings = tuple(int(level.routing) for level in spec.levels)
    return Shape(
        gates=tuple(int(level.gate) for level in spec.levels),
        routings=routings,
        aggregates=tuple(int(level.aggregate) for level in spec.levels),
        divisors=tuple(_divisors(spec.levels, level) for level in range(len(spec.levels))),
        channels=2 if spec.split else 1,
        takes_place=routings[:1] == (Routing.SELF,),
        drop=spec.token is TokenGate.DROP,
        score_head=spec.head is Head.SCORE,
        term=term_of(spec),
        carries=want_grad and spec.has_aggregate_grad,
        kl=int(spec.kl if inputs.ref_logp is not None else KLEstimator.NONE),
        kl_gradient=int(spec.kl_gradient if inputs.ref_logp is not None else KLGradient.VALUE),
    )


def bounds_of(spec: PolicyLossSpec) -> tuple[float, ...]:
    """Of the token gate, for advantages >= 0 and < 0: low, low, high, high."""
    clips = spec.token is TokenGate.CLIP
    return *(spec.token_log_low if clips else NO_LOW), *(spec.token_log_high if clips else NO_HIGH)


def _divisors(levels: tuple[LevelSpec, ...], level: int) -> tuple[bool, ...]:
    """A balanced level passes its gradient to the finer one, a sum divides nothing."""
    divides = [False] * len(levels)
    divides[level] = levels[level].aggregate is not Aggregate.SUM
    while levels[level].aggregate is Aggregate.BALANCED:
        level -= 1
        divides[level] = levels[level].aggregate is not Aggregate.SUM
    return tuple(divides)


def _sweep(
    inputs: PolicyLossInputs,
    spec: PolicyLossSpec,
    leaves: Leaves,
    shape: Shape,
    reading: Reading,
    pre: Pre | None,
    grad: torch.Tensor | None,
    token_loss: torch.Tensor | None,
    seen: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The sums of all programs, and the gradients of slots in aggregates where they are wanted."""
    (depth, count), slots, device = leaves.ancestors.shape, leaves.owner.numel(), inputs.logp.device
    gated_levels, steps = gate_leaves(spec, leaves, shape)
    flows = torch.empty((slots, depth, 2), dtype=torch.float64, device=device) if shape.carries else None

    # Sums of floats have an order to keep: where some flow, a token's place in a slot is its place in the leaf.
    align = 1 if shape.carries else 4
    programs = programs_for(slots, SLOTS)
    sums = torch.empty((programs, COLUMNS.value), dtype=torch.float64, device=device)
    launch(
        _sweep_leaves, programs, inputs.logp, inputs.old_logp, inputs.advantages, inputs.weights, inputs.cu_seqlens,
        inputs.mask, inputs.ref_logp, inputs.entropy, inputs.score, inputs.threshold, inputs.token_mask,
        inputs.token_weight, inputs.low, inputs.high, inputs.target, inputs.penalty_mask, inputs.kl_weight,
        inputs.correction_first, inputs.correction_second, rule_bounds_of(spec.correction), pre,
        numbers_of(spec.term),
        leaves.begin, leaves.end, leaves.row, leaves.ancestors, leaves.owner, leaves.broken, leaves.segments,
        gated_levels, steps, flows, seen, sums, grad, token_loss, inputs.logp.numel(), inputs.weights.numel(), count,
        slots // SLOTS,
        *bounds_of(spec), bits(spec.low_driven), bits(spec.high_driven), spec.kl_beta,
        READING=reading._replace(aligned=reading.aligned and align > 1), SHAPE=shape, DEPTH=depth, SLOT=SLOT_TOKENS,
        SLOTS=SLOTS, ALIGN=align, LANES=LANES, **({"maxnreg": UNBOUND_REGISTERS} if spec.mean_exp else {}),
    )  # fmt: skip
    return sums, flows


def _add(flows: torch.Tensor, leaves: Leaves, shape: Shape) -> None:
    (depth, count), slots = leaves.ancestors.shape, leaves.owner.numel()
    launch(
        _add_flows, triton.cdiv(slots, FLOWS), flows, leaves.owner, leaves.ancestors, leaves.segments, count, slots,
        SHAPE=shape, DEPTH=depth, FLOWS=FLOWS,
    )  # fmt: skip


def _return(
    inputs: PolicyLossInputs,
    leaves: Leaves,
    shape: Shape,
    reading: Reading,
    pre: Pre | None,
    sums: torch.Tensor,
    seen: torch.Tensor,
    grad: torch.Tensor | None,
    loss: torch.Tensor,
    metrics: torch.Tensor,
) -> None:
    (depth, count), slots = leaves.ancestors.shape, leaves.owner.numel()
    launch(
        _return_flows, slots // SLOTS, inputs.logp, inputs.old_logp, inputs.advantages, inputs.weights,
        inputs.cu_seqlens, inputs.mask, inputs.ref_logp, leaves.begin, leaves.end, leaves.row, leaves.ancestors,
        leaves.owner, leaves.segments, seen, sums, grad, loss, metrics, pre, inputs.logp.numel(),
        inputs.weights.numel(), count, sums.shape[0], READING=reading, SHAPE=shape, DEPTH=depth,
        SLOT=SLOT_TOKENS, SLOTS=SLOTS, **TOTAL,
    )  # fmt: skip


NO_LOW, NO_HIGH = (float("-inf"),) * 2, (float("inf"),) * 2
