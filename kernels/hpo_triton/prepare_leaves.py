"""Everything about leaves that a sweep over their tokens reads, in steps of one kernel:

    CHECK, REPAIR     leaves that are good or empty, in order (leaves.py)
    SUM               the log-ratios of all segments, unless they are balanced; zeros where no sweep comes
    SUM + k           at a balanced level k: the aggregates of finer segments (gated_levels.py)
    SUM + 1           where the gradient is settled: the coefficients of all segments, whose exponents SUM has found
    GATE              with a level: the gates of all levels above a leaf (gated_levels.py)

A call in stages has an Exchange between the steps that add and those that read, which are launches of their own there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..specs import Aggregate, Exchange, LevelKind, LevelSpec, PolicyLossInputs, PolicyLossSpec, Unit
from .correction_rules import rule_bounds_of, weight_of_tokens
from .fixed_point import exponent_of, to_fixed
from .flows import FLOWS, add_flows
from .gated_levels import GATED, GATED_FIELDS, KINDS, LOG_MEAN_EXP, Shape, add_children, gate_leaves, of_levels
from .launch import REGISTERS, kernel, launch_steps, wait_for_programs
from .leaves import (
    CHECK,
    EXPONENT,
    FIXED,
    FLOW,
    LEAVES,
    REPAIR,
    SUM,
    VALID,
    CallerLeaves,
    Leaves,
    add_to_segments,
    check_leaves,
    copy_leaves,
    find_leaves,
    raise_segments,
    repair_leaves,
    segment_of,
)
from .rows import SLOT, SLOTS
from .terms import Pre, entering, mean_exp_part
from .tokens import Reading, given_to, load_tokens, read_tokens

MOST_LEVELS = 4
COEFFICIENTS = tl.constexpr(SUM.value + 1)
GATE = tl.constexpr(SUM.value + MOST_LEVELS)
BALANCED = tl.constexpr(int(Aggregate.BALANCED))


@triton.jit
def _sum_block(
    inputs, rule_bounds, tables, coefficients, grad, token_loss, seen, pre, block, blocks, tokens, rows, leaves,
    READING: tl.constexpr, AGGREGATES: tl.constexpr, DEPTH: tl.constexpr, SPLIT: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    token = block * SLOTS * SLOT + tl.arange(0, SLOTS * SLOT)
    if grad is not None:
        tl.store(grad + token, tl.zeros([SLOTS * SLOT], tl.float32), mask=token < tokens)
    if token_loss is not None:
        tl.store(token_loss + token, tl.zeros([SLOTS * SLOT], tl.float32), mask=token < tokens)
    for first in range(block * SLOTS * SLOT, rows, blocks * SLOTS * SLOT):
        each = first + tl.arange(0, SLOTS * SLOT)
        tl.store(seen + each, tl.zeros([SLOTS * SLOT], tl.uint8), mask=each < rows)

    slots = find_leaves(tables, block, leaves, tokens, ALIGN)
    whole = tl.max(slots.token) < tokens
    loaded = load_tokens(inputs, slots.token, tokens, whole, READING)
    of_row = tl.load(tables.row + slots.row, mask=slots.row < leaves, other=0)
    weight = loaded.token_weight
    if coefficients is not None:
        weight = weight_of_tokens(loaded, inputs, rule_bounds, of_row, rows, slots.token, tokens, whole, READING)
    t = read_tokens(inputs, loaded, weight, of_row, rows, slots.inside, READING)
    x = entering(t.x, t.negative, pre)
    if DEPTH > 0 and AGGREGATES[0] == LOG_MEAN_EXP:
        x = mean_exp_part(x, SPLIT)
    rising = tl.maximum(x, 0.0) if SPLIT else x
    valid = tl.sum(t.valid.to(tl.int64), axis=1, keep_dims=True)
    rose = tl.sum(to_fixed(rising), axis=1, keep_dims=True)
    fell = tl.sum(to_fixed(rising - x), axis=1, keep_dims=True)
    some = valid > 0
    ancestors, segments = tables.ancestors, tables.segments
    for k in tl.static_range(DEPTH):
        if AGGREGATES[k] != BALANCED:
            segment = segment_of(ancestors, k, slots.row, leaves, some)
            add_to_segments(segments, segment, valid, VALID, some)
            add_to_segments(segments, segment, rose, FIXED, some)
            if SPLIT:
                add_to_segments(segments, segment, fell, FIXED + 1, some)
    if coefficients is not None:
        segment = segment_of(ancestors, 0, slots.row, leaves, some)
        slot = block * SLOTS + tl.arange(0, SLOTS).to(tl.int64)[:, None]
        a = t.a.to(tl.float64)
        for sign in tl.static_range(2):
            sum = tl.sum(tl.where(t.negative == (sign == 1), a, 0.0), axis=1, keep_dims=True)
            tl.store(coefficients + 2 * slot + sign, sum)
            raise_segments(segments, segment, exponent_of(sum), EXPONENT + sign, sum != 0.0)


@kernel
def _prepare_leaves(
    logp,
    old_logp,
    advantages,
    weights,
    cu_seqlens,
    mask,
    ref_logp,
    score,  # with the next six: None, but where the gradient is settled
    threshold,
    token_mask,
    token_weight,
    correction_first,
    correction_second,
    rule_bounds,
    leaf_begin,  # of the caller, with the next two; None: the rows
    leaf_end,
    leaf_row,
    begin,  # written here, with the next two
    end,
    row,
    ancestors,
    owner,  # [slots], written here
    segments,  # 0, as state is
    state,
    coefficients,  # [slots, 2] float64, by the sign of the advantage, where the gradient is settled
    gated_levels,  # [P, GATED_FIELDS, KINDS] float32, or None
    slope_differences,  # [P, DEPTH, KINDS] float64, or None: the slope of a level less that of the finer one
    grad,  # set to 0, as are the next two: tokens outside of all leaves keep the 0
    token_loss,
    seen,
    pre,
    tokens: tl.int64,
    rows: tl.int64,
    leaves: tl.int64,
    slots: tl.int64,
    # by level: bounds by kind, and the slope; a tuple of them would hold float32
    low_00: tl.float64, low_01: tl.float64, low_02: tl.float64, low_03: tl.float64,
    high_00: tl.float64, high_01: tl.float64, high_02: tl.float64, high_03: tl.float64, slope_0: tl.float64,
    low_10: tl.float64, low_11: tl.float64, low_12: tl.float64, low_13: tl.float64,
    high_10: tl.float64, high_11: tl.float64, high_12: tl.float64, high_13: tl.float64, slope_1: tl.float64,
    low_20: tl.float64, low_21: tl.float64, low_22: tl.float64, low_23: tl.float64,
    high_20: tl.float64, high_21: tl.float64, high_22: tl.float64, high_23: tl.float64, slope_2: tl.float64,
    low_30: tl.float64, low_31: tl.float64, low_32: tl.float64, low_33: tl.float64,
    high_30: tl.float64, high_31: tl.float64, high_32: tl.float64, high_33: tl.float64, slope_3: tl.float64,
    READING: tl.constexpr,
    SHAPE: tl.constexpr,
    DEPTH: tl.constexpr,
    ALIGN: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
):  # fmt: skip
    inputs = PolicyLossInputs(
        logp, old_logp, advantages, weights, cu_seqlens, mask, ref_logp, None, score, threshold, token_mask,
        token_weight, correction_first=correction_first, correction_second=correction_second,
    )  # fmt: skip
    tables = Leaves(begin, end, row, ancestors, owner, segments, state)
    caller_leaves = CallerLeaves(leaf_begin, leaf_end, leaf_row, ancestors, cu_seqlens)
    lows = (
        (low_00, low_01, low_02, low_03), (low_10, low_11, low_12, low_13),
        (low_20, low_21, low_22, low_23), (low_30, low_31, low_32, low_33),
    )  # fmt: skip
    highs = (
        (high_00, high_01, high_02, high_03), (high_10, high_11, high_12, high_13),
        (high_20, high_21, high_22, high_23), (high_30, high_31, high_32, high_33),
    )  # fmt: skip
    slopes = (slope_0, slope_1, slope_2, slope_3)
    AGGREGATES: tl.constexpr = SHAPE.aggregates
    ROUTINGS: tl.constexpr = SHAPE.routings
    SPLIT: tl.constexpr = SHAPE.channels == 2
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0).to(tl.int64)
    for STEP in tl.static_range(FIRST, LAST + 1):
        if STEP == CHECK:
            check_leaves(caller_leaves, tables, leaves, rows, tokens, DEPTH)
        elif STEP == REPAIR:
            repair_leaves(caller_leaves, tables, leaves, rows, tokens, DEPTH, FIRST, LAST)
        elif STEP == SUM:
            blocks = slots // SLOTS
            for block in range(program, blocks, programs):
                _sum_block(
                    inputs, rule_bounds, tables, coefficients, grad, token_loss, seen, pre, block, blocks, tokens,
                    rows, leaves, READING, AGGREGATES, DEPTH, SPLIT, ALIGN,
                )  # fmt: skip
        elif STEP == GATE:
            if STEP > FIRST:
                wait_for_programs(state + STEP, programs)
            for block in range(program, tl.cdiv(leaves, GATED), programs):
                gate_leaves(tables, gated_levels, slope_differences, block, leaves, lows, highs, slopes, SHAPE, DEPTH)
        elif SHAPE.settled:
            if STEP == COEFFICIENTS:
                if STEP > FIRST:
                    wait_for_programs(state + STEP, programs)
                for block in range(program, tl.cdiv(slots, FLOWS), programs):
                    add_flows(coefficients, tables, block, leaves, slots, ROUTINGS, DEPTH, 2)
        elif STEP - SUM < DEPTH:  # noqa: SIM102 (the levels of SHAPE end there)
            if SHAPE.aggregates[STEP - SUM] == BALANCED:
                if STEP > FIRST:
                    wait_for_programs(state + STEP, programs)
                for block in range(program, tl.cdiv(leaves, GATED), programs):
                    add_children(tables, block, leaves, STEP - SUM, SHAPE.aggregates[STEP - SUM - 1], SHAPE.channels)


# --------------------------------------------------------------------------------------------------------------- host


# The inputs that the coefficients of a settled gradient read, and no other stage.
OF_COEFFICIENTS = ("score", "threshold", "token_mask", "token_weight", "correction_first", "correction_second")


class Prepared(NamedTuple):
    leaves: Leaves
    gated_levels: torch.Tensor | None  # None without levels
    slope_differences: torch.Tensor | None  # where aggregates carry gradient


def prepare_leaves(
    inputs: PolicyLossInputs,
    spec: PolicyLossSpec,
    shape: Shape,
    reading: Reading,
    pre: Pre | None,
    grad: torch.Tensor | None,
    token_loss: torch.Tensor | None,
    seen: torch.Tensor,
    exchange: Exchange | None,
) -> Prepared:
    leaves = copy_leaves(inputs, len(spec.levels))
    (depth, count, _), slots, device = leaves.segments.shape, leaves.owner.numel(), inputs.logp.device
    gated_levels = slope_differences = None
    if depth > 0:
        gated_levels = torch.empty((count, GATED_FIELDS.value, KINDS.value), dtype=torch.float32, device=device)
    if depth > 0 and shape.carries:
        slope_differences = torch.empty((count, depth, KINDS.value), dtype=torch.float64, device=device)
    spare = [LevelSpec(Unit.TRAJECTORY, LevelKind.IDENTITY)] * (MOST_LEVELS - depth)
    numbers = [number for level in (*spec.levels, *spare) for number in (*level.low, *level.high, level.slope)]

    gated, registers = triton.cdiv(count, GATED.value), 64 if depth <= 2 else 80  # with fewer the assembler spills
    summed = {CHECK.value: triton.cdiv(count, LEAVES.value), REPAIR.value: 1, SUM.value: slots // SLOTS.value}
    balanced = [level for level in range(depth) if shape.aggregates[level] == Aggregate.BALANCED]
    summed |= {SUM.value + level: gated for level in balanced}
    parts = [{GATE.value: gated}] if depth > 0 else []
    # Only sums of floats that differ within a leaf have an order to keep: there, a token's place in a slot is its place
    # in the leaf.
    align, coefficients, rule_bounds = 4, None, None
    if not shape.settled:
        inputs = inputs._replace(**dict.fromkeys(OF_COEFFICIENTS))
    else:
        coefficients = torch.empty((slots, 2), dtype=torch.float64, device=device)
        parts.insert(0, {COEFFICIENTS.value: triton.cdiv(slots, FLOWS.value)})
        rule_bounds = rule_bounds_of(spec.correction)
        registers = REGISTERS if any(getattr(inputs, name) is not None for name in OF_COEFFICIENTS) else 64
        if inputs.advantage_per_token or inputs.token_weight is not None or spec.correction is not None:
            align, reading = 1, reading._replace(aligned=False)
    stages = [summed, *parts]
    if exchange is None:
        stages = [{step: blocks for stage in stages for step, blocks in stage.items()}]
    for stage in stages:
        launch_steps(
            _prepare_leaves, stage, registers, *given_to(_prepare_leaves, inputs), rule_bounds, inputs.leaf_begin,
            inputs.leaf_end, inputs.leaf_row, *leaves, coefficients, gated_levels, slope_differences, grad, token_loss,
            seen, pre, inputs.logp.numel(), inputs.weights.numel(), count, slots, *numbers, READING=reading,
            SHAPE=of_levels(shape), DEPTH=depth, ALIGN=align,
        )  # fmt: skip
        if exchange is not None and SUM.value in stage:
            exchange.sums(leaves.fields(VALID, 3))
            if shape.settled:
                exchange.largest(leaves.fields(EXPONENT, 2))
        if exchange is not None and COEFFICIENTS.value in stage and shape.settled:
            exchange.aggregate_grad(leaves.fields(FLOW, 2))
    return Prepared(leaves, gated_levels, slope_differences)
