"""The gradient that flows through aggregates: from slots to segments, and from the segments above a leaf to its tokens,
in the steps of one kernel, of which the first also adds up the sums of the sweep's programs.

Flows are added in double within a slot, in the order of its tokens, and above it in integers: fixed point below the
largest exponent that arrives at a segment. So their bits depend on the segment only. Where all gates have the slope 1
every term is 0 and no gradient is touched: the on-policy promise of tokens with a gradient of their own. A token gate
that drops its tokens has the slope 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..specs import Exchange, PolicyLossInputs, Routing
from .fixed_point import FIXED_POINT, from_fixed_below, to_fixed_below
from .gated_levels import LOG_MEAN_EXP, Shape, of_levels
from .launch import REGISTERS, kernel, launch_steps, wait_for_programs
from .leaves import EXPONENT, FIELDS, FIXED, FLOW, VALID, Leaves, add_to_segments, segment_of, slots_of_leaves
from .math import LARGEST_FLOAT, clamp
from .rows import SLOTS
from .sums import total
from .terms import Pre, mean_exp_slope, through_pre
from .tokens import Reading, given_to, load_tokens, read_tokens

FLOWS = tl.constexpr(512)  # slots of one block that adds
ADD, RETURN = tl.constexpr(0), tl.constexpr(1)
THROUGH = tl.constexpr(int(Routing.THROUGH))


@triton.jit
def add_flows(
    flows, tables, block, leaves, slots, ROUTINGS: tl.constexpr, DEPTH: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Adds the flows of a block of slots to the segments of their leaves."""
    slot = block * FLOWS + tl.arange(0, FLOWS).to(tl.int64)
    exists = slot < slots
    leaf = tl.load(tables.owner + slot, mask=exists, other=0)
    for k in tl.static_range(DEPTH):
        if ROUTINGS[k] == THROUGH:
            for channel in tl.static_range(CHANNELS):
                flow = tl.load(flows + (slot * DEPTH + k) * 2 + channel, mask=exists, other=0.0)
                some = flow != 0.0
                segment = segment_of(tables.ancestors, k, leaf, leaves, some)
                largest = tl.load(tables.segments + segment * FIELDS + EXPONENT + channel, mask=some, other=0)
                add_to_segments(tables.segments, segment, to_fixed_below(flow, largest), FLOW + channel, some)


@triton.jit
def _aggregate_grad(tables, leaf, leaves, held, channel, SHAPE: tl.constexpr, DEPTH: tl.constexpr):
    """``[K, 1]``: the gradient that every token of a leaf receives through the aggregates above it."""
    ancestors, segments = tables.ancestors, tables.segments
    aggregate_grad = tl.zeros(leaf.shape, tl.float64)
    for k in tl.static_range(DEPTH):
        if SHAPE.routings[k] == THROUGH:
            at = segments + segment_of(ancestors, k, leaf, leaves, held) * FIELDS
            largest = tl.load(at + EXPONENT + channel, mask=held, other=0)
            fixed = tl.load(at + FLOW + channel, mask=held, other=0)
            flow = from_fixed_below(fixed, largest)
            for level in tl.static_range(DEPTH):
                if SHAPE.divisors[k][level]:
                    at = segments + segment_of(ancestors, level, leaf, leaves, held) * FIELDS
                    size = tl.maximum(tl.load(at + VALID, mask=held, other=0), 1).to(tl.float64)
                    if SHAPE.aggregates[level] == LOG_MEAN_EXP:
                        size += tl.load(at + FIXED + channel, mask=held, other=0).to(tl.float64) / FIXED_POINT
                    flow = flow / size
            aggregate_grad += flow
    return aggregate_grad.to(tl.float32)


@triton.jit
def _return_flows(
    inputs, tables, grad, pre, block, tokens, rows, leaves,
    READING: tl.constexpr, SHAPE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Adds the gradient that comes through aggregates to ``grad``, at the tokens of a block of slots."""
    slot = block * SLOTS + tl.arange(0, SLOTS).to(tl.int64)
    slots, leaf, of_row, held = slots_of_leaves(tables, slot, leaves, tokens, 4)
    rising = _aggregate_grad(tables, leaf, leaves, held, 0, SHAPE, DEPTH)
    falling = rising
    if SHAPE.channels == 2:
        falling = _aggregate_grad(tables, leaf, leaves, held, 1, SHAPE, DEPTH)
    if tl.max(tl.abs(rising)) + tl.max(tl.abs(falling)) > 0.0:  # else the written gradient stands, to the bit
        token = slots.token
        loaded = load_tokens(inputs, token, tokens, tl.max(token) < tokens, READING)
        t = read_tokens(inputs, loaded, loaded.token_weight, of_row, rows, slots.inside, READING)
        flow = through_pre(tl.where(t.x < 0.0, falling, rising), t.x, t.negative, pre)
        if SHAPE.aggregates[0] == LOG_MEAN_EXP:
            flow *= mean_exp_slope(t.x, SHAPE.channels == 2)
        receives = t.valid & t.x_finite & (flow != 0.0)
        received = tl.load(grad + token, mask=receives, other=0.0) + flow
        tl.store(grad + token, clamp(received, -LARGEST_FLOAT, LARGEST_FLOAT), mask=receives)


@kernel
def _deliver_gradient(
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
    state,
    flows,
    seen,
    sums,
    grad,
    loss,
    metrics,
    pre,
    tokens: tl.int64,
    rows: tl.int64,
    leaves: tl.int64,
    slots: tl.int64,
    summed: tl.int64,  # programs of the sweep
    READING: tl.constexpr,
    SHAPE: tl.constexpr,
    DEPTH: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
):
    inputs = PolicyLossInputs(logp, old_logp, advantages, weights, cu_seqlens, mask, ref_logp)
    tables = Leaves(begin, end, row, ancestors, owner, segments, state)
    ROUTINGS: tl.constexpr = SHAPE.routings
    CHANNELS: tl.constexpr = SHAPE.channels
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0).to(tl.int64)
    for STEP in tl.static_range(FIRST, LAST + 1):
        if STEP == ADD:
            for block in range(program, tl.cdiv(slots, FLOWS), programs):
                add_flows(flows, tables, block, leaves, slots, ROUTINGS, DEPTH, CHANNELS)
            if program == programs - 1:  # the last program has the fewest blocks
                total(sums, seen, loss, metrics, summed, rows)
        else:
            if STEP > FIRST:
                wait_for_programs(state, programs)
            if FIRST == LAST:  # each program has one block; a loop would hold more in registers
                _return_flows(inputs, tables, grad, pre, program, tokens, rows, leaves, READING, SHAPE, DEPTH)
            else:
                for block in range(program, slots // SLOTS, programs):
                    _return_flows(inputs, tables, grad, pre, block, tokens, rows, leaves, READING, SHAPE, DEPTH)


# --------------------------------------------------------------------------------------------------------------- host


def deliver_gradient(
    inputs: PolicyLossInputs,
    leaves: Leaves,
    shape: Shape,
    reading: Reading,
    pre: Pre | None,
    flows: torch.Tensor,
    sums: torch.Tensor,
    seen: torch.Tensor,
    grad: torch.Tensor,
    loss: torch.Tensor,
    metrics: torch.Tensor,
    exchange: Exchange | None,
) -> None:
    """Adds the gradient through aggregates to ``grad``, and makes ``loss`` and ``metrics`` of the ``sums`` of the
    sweep's programs and the rows that they have ``seen``. ``flows``: ``[slots, depth, 2]``, by channel."""
    (depth, count, _), slots = leaves.segments.shape, leaves.owner.numel()
    blocks = {ADD.value: triton.cdiv(slots, FLOWS.value), RETURN.value: slots // SLOTS.value}
    # On more levels one launch of both would take more registers than two programs of a multiprocessor have.
    together = exchange is None and depth <= 2
    stages = [blocks] if together else [{step: number} for step, number in blocks.items()]
    if exchange is not None:
        exchange.largest(leaves.fields(EXPONENT, 2))
    for stage in stages:
        if exchange is not None and RETURN.value in stage:
            exchange.aggregate_grad(leaves.fields(FLOW, 2))
        launch_steps(
            _deliver_gradient, stage, REGISTERS, *given_to(_deliver_gradient, inputs), *leaves, flows, seen, sums, grad,
            loss, metrics, pre, inputs.logp.numel(), inputs.weights.numel(), count, slots, sums.shape[0],
            READING=reading, SHAPE=of_levels(shape), DEPTH=depth,
        )  # fmt: skip
