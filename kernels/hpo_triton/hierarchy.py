"""The policy loss under gates on several levels, any depth in two sweeps over the tokens, and under gates with a term
of their own (terms.py), on any number of levels, none included:

    _prepare_leaves      the log-ratios of all segments, and the gates of all levels above a leaf for its tokens
    _sweep_leaves        every token of a leaf once: loss, gradient and metrics, and the gradients in aggregates
    _deliver_gradient    where gradient flows through some aggregate: to segments and back to tokens, with the sums of
                         all programs; else _finalise alone

A gate on one level that drops the token's own residual has no third kernel: the gradient that arrives at a token is a
sum of coefficients times a slope, and both are known before the sweep: the gate is settled.

The first and the third are in steps, of one launch where programs can wait for each other (launch.py). An Exchange
changes the sums of segments, between the steps that add and those that read; these are launches of their own.

The definition is hpo_core/reference/hierarchy.py; csrc/cpu/hierarchy.cpp is the same in the same order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..specs import Aggregate, Exchange, Head, LevelSpec, PolicyLossInputs, PolicyLossSpec, Routing, TokenGate
from .correction_rules import rule_bounds_of, weight_of_tokens
from .fixed_point import exponent_of
from .flows import THROUGH, deliver_gradient
from .gated_levels import KINDS, Shape
from .hierarchy_tokens import differentiate_tokens, gate_tokens, token_bound
from .launch import REGISTERS, kernel, launch, programs_for
from .leaves import BROKEN, EXPONENT, Leaves, raise_segments, segment_of, slots_of_leaves
from .math import LARGEST_FLOAT, clamp
from .prepare_leaves import prepare_leaves
from .rows import SLOTS, load
from .sums import COLUMNS, LANES, add_tokens, bad_rows, count_tokens, finalise, no_sums, store_sums
from .terms import numbers_of, pre_of, term_of
from .tokens import bits, given_to, load_tokens, read_tokens, reading_of


@triton.jit
def _flow(value, slope, inside):
    """``[K, 1]``: the gradient past the gates of tokens. A sum of exact zeros where nothing saturates."""
    return tl.sum(value * (slope - inside).to(tl.float64), axis=1, keep_dims=True)


@triton.jit
def _store_flows(
    value, t, gated, tables, slope_differences, flows, slot, leaf, leaves, held,
    SHAPE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """The gradient of every slot in aggregates, by level and channel. ``value``: d loss / d z of the tokens."""
    CHANNELS: tl.constexpr = SHAPE.channels  # before Triton 3.9 no field is the limit of a static_range
    value = clamp(value, -LARGEST_FLOAT, LARGEST_FLOAT).to(tl.float64)
    of_positive = tl.sum(tl.where(t.negative, 0.0, value), axis=1, keep_dims=True)
    of_negative = tl.sum(tl.where(t.negative, value, 0.0), axis=1, keep_dims=True)
    for k in tl.static_range(DEPTH):
        if SHAPE.routings[k] == THROUGH:
            segment = segment_of(tables.ancestors, k, leaf, leaves, held)
            for channel in tl.static_range(CHANNELS):
                if k > 0 or SHAPE.drop:
                    at = slope_differences + (leaf * DEPTH + k) * KINDS + 2 * channel
                    flow = tl.load(at, mask=held, other=0.0) * of_positive
                    flow += tl.load(at + 1, mask=held, other=0.0) * of_negative
                elif channel == 0:
                    flow = _flow(value, gated.slope, gated.rising_inside)
                else:
                    flow = _flow(value, gated.falling_slope, gated.falling_inside)
                tl.store(flows + (slot[:, None] * DEPTH + k) * 2 + channel, flow)
                some = held & (flow != 0.0)
                raise_segments(tables.segments, segment, exponent_of(flow), EXPONENT + channel, some)


# Without a bound the assembler keeps a log mean exp within 128 registers, and spills on sm_120.
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
    segments,
    state,
    gated_levels,
    slope_differences,
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
    low_driven: tl.int64,  # see has_own_bound
    high_driven: tl.int64,
    kl_beta: tl.float32,
    READING: tl.constexpr,
    SHAPE: tl.constexpr,
    DEPTH: tl.constexpr,
    ALIGN: tl.constexpr,
):
    inputs = PolicyLossInputs(
        logp, old_logp, advantages, weights, cu_seqlens, mask, ref_logp, entropy, score, threshold, token_mask,
        token_weight, low, high, target=target, penalty_mask=penalty_mask, kl_weight=kl_weight,
        correction_first=correction_first, correction_second=correction_second,
    )  # fmt: skip
    tables = Leaves(begin, end, row, ancestors, owner, segments, state)
    ALIGNED: tl.constexpr = READING.aligned
    program = tl.program_id(0).to(tl.int64)
    counts, total = no_sums()
    for block in range(program, blocks, tl.num_programs(0).to(tl.int64)):
        slot = block * SLOTS + tl.arange(0, SLOTS)
        slots, leaf, of_row, held = slots_of_leaves(tables, slot, leaves, tokens, ALIGN)
        token = slots.token
        whole = tl.max(token) < tokens
        loaded = load_tokens(inputs, token, tokens, whole, READING)
        weight = weight_of_tokens(loaded, inputs, rule_bounds, of_row, rows, token, tokens, whole, READING)
        t = read_tokens(inputs, loaded, weight, of_row, rows, slots.inside, READING)
        some = tl.max(t.valid.to(tl.int32), axis=1, keep_dims=True) > 0
        tl.store(seen + of_row, tl.full([SLOTS, 1], 1, tl.uint8), mask=some)

        lowest = token_bound(low, loaded.low, low_positive, low_negative, low_driven, t)
        highest = token_bound(high, loaded.high, high_positive, high_negative, high_driven, t)
        gated = gate_tokens(t, lowest, highest, gated_levels, leaf, held, pre, numbers, SHAPE)
        counts = count_tokens(counts, t, gated.below, gated.above)

        own_weight = None if token_weight is None and READING.rule is None else weight
        policy, penalty, loss_t, derivative = differentiate_tokens(
            t, gated, own_weight, inputs, token, tokens, whole, kl_beta, pre, numbers, SHAPE, ALIGNED
        )
        if grad is not None:
            tl.store(grad + token, tl.where(t.valid, derivative, 0.0), mask=slots.inside)
        if token_loss is not None:
            bounded = clamp(loss_t, -LARGEST_FLOAT, LARGEST_FLOAT).to(tl.float32)
            tl.store(token_loss + token, tl.where(t.valid, bounded, 0.0), mask=slots.inside)
        h = None if entropy is None else load(entropy, token, tokens, whole, ALIGNED)
        total = add_tokens(total, t, policy.loss, penalty, h, ref_logp is not None)

        if SHAPE.carries:
            _store_flows(
                policy.value, t, gated, tables, slope_differences, flows, slot, leaf, leaves, held, SHAPE, DEPTH
            )

    bad_offsets = bad_rows(cu_seqlens, tokens, rows)
    first = (tl.arange(0, LANES) + program) == 0
    bad_offsets += tl.where(first, tl.load(state + BROKEN).to(tl.float64), 0.0)
    store_sums(sums, counts, total, bad_offsets)


# --------------------------------------------------------------------------------------------------------------- host


def policy_loss(
    inputs: PolicyLossInputs,
    spec: PolicyLossSpec,
    loss: torch.Tensor,
    metrics: torch.Tensor,
    grad: torch.Tensor | None,
    token_loss: torch.Tensor | None,
    exchange: Exchange | None,
) -> None:
    """Writes the results of gates.policy_loss, which calls this where ``spec.is_hierarchical``."""
    tokens, rows, device = inputs.logp.numel(), inputs.weights.numel(), inputs.logp.device
    seen = torch.empty(rows, dtype=torch.uint8, device=device)
    shape, reading, pre = shape_of(spec, grad is not None), reading_of(inputs, spec), pre_of(spec)
    leaves, gated_levels, slope_differences = prepare_leaves(
        inputs, spec, shape, reading, pre, grad, token_loss, seen, exchange
    )
    (depth, count, _), slots = leaves.segments.shape, leaves.owner.numel()
    flows = torch.empty((slots, depth, 2), dtype=torch.float64, device=device) if shape.carries else None
    # Sums of floats have an order to keep: where some flow, a token's place in a slot is its place in the leaf.
    align = 1 if shape.carries else 4
    bound = {"maxnreg": REGISTERS} if shape.settled else {"maxnreg": UNBOUND_REGISTERS} if spec.mean_exp else {}
    programs = programs_for(slots, SLOTS.value)
    sums = torch.empty((programs, COLUMNS.value), dtype=torch.float64, device=device)
    launch(
        _sweep_leaves, programs, *given_to(_sweep_leaves, inputs), rule_bounds_of(spec.correction), pre,
        numbers_of(spec.term), *leaves, gated_levels, slope_differences, flows, seen, sums, grad, token_loss, tokens,
        rows, count, slots // SLOTS.value, *spec.token_log_low, *spec.token_log_high, bits(spec.low_driven),
        bits(spec.high_driven), spec.kl_beta, READING=reading._replace(aligned=reading.aligned and align > 1),
        SHAPE=shape, DEPTH=depth, ALIGN=align, **bound,
    )  # fmt: skip
    if flows is None:
        finalise(sums, seen, loss, metrics, rows)
    else:
        assert grad is not None  # else nothing flows
        deliver_gradient(inputs, leaves, shape, reading, pre, flows, sums, seen, grad, loss, metrics, exchange)


def shape_of(spec: PolicyLossSpec, want_grad: bool) -> Shape:
    carries = want_grad and spec.has_aggregate_grad
    settled, drop = carries and _is_settled(spec), spec.token is TokenGate.DROP
    routings = tuple(int(level.routing) for level in spec.levels)
    return Shape(
        gates=tuple(int(level.gate) for level in spec.levels),
        routings=routings,
        aggregates=tuple(int(level.aggregate) for level in spec.levels),
        divisors=tuple(_divisors(spec.levels, level) for level in range(len(spec.levels))),
        channels=2 if spec.split else 1,
        takes_place=routings[:1] == (Routing.SELF,),
        drop=drop,
        score_head=spec.head is Head.SCORE,
        term=term_of(spec),
        carries=carries and not settled,
        as_ratio=bool(spec.levels) and drop and not spec.split and spec.term is None,
        settled=settled,
        kl=int(spec.kl),
        kl_gradient=int(spec.kl_gradient),
    )


def _is_settled(spec: PolicyLossSpec) -> bool:
    """Whether the gradient of a token depends on nothing but its segment."""
    is_linear = spec.term is None and not spec.split and spec.head is Head.LINEAR
    aggregates = [level.aggregate for level in spec.levels]
    return is_linear and spec.token is TokenGate.DROP and aggregates in ([Aggregate.MEAN], [Aggregate.SUM])


def _divisors(levels: tuple[LevelSpec, ...], level: int) -> tuple[bool, ...]:
    """A balanced level passes its gradient to the finer one, a sum divides nothing."""
    divides = [False] * len(levels)
    divides[level] = levels[level].aggregate is not Aggregate.SUM
    while levels[level].aggregate is Aggregate.BALANCED:
        level -= 1
        divides[level] = levels[level].aggregate is not Aggregate.SUM
    return tuple(divides)
