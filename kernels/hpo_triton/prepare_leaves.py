"""Everything about leaves that a sweep over their tokens reads, in steps of one kernel:

    CHECK, REPAIR     leaves that are good or empty, in order (leaves.py)
    SUM               the log-ratios of all segments, unless they are balanced; zeros where no sweep comes
    SUM + k           at a balanced level k: the aggregates of finer segments (gated_levels.py)
    GATE              with a level: the gates of all levels above a leaf (gated_levels.py)

A call in stages has an Exchange before GATE, which is a launch of its own there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..specs import Aggregate, Exchange, LevelKind, LevelSpec, PolicyLossInputs, PolicyLossSpec, Unit
from .gated_levels import GATED_FIELDS, KINDS, LOG_MEAN_EXP, Shape, add_children, gate_leaves, of_levels
from .launch import kernel, launch_steps, wait_for_programs
from .leaves import (
    CHECK,
    FIXED,
    LEAVES,
    REPAIR,
    SUM,
    VALID,
    Leaves,
    add_to_segments,
    check_leaves,
    copy_leaves,
    find_leaves,
    repair_leaves,
    segment_of,
)
from .levels import to_fixed
from .segments import SLOT_TOKENS, SLOTS
from .terms import Pre, entering, mean_exp_part
from .tokens import Reading, load_tokens, read_tokens

__all__ = ["Prepared", "prepare_leaves"]

GATED = 64  # leaves of one block
MOST_LEVELS = 4
GATE = tl.constexpr(SUM.value + MOST_LEVELS)
BALANCED = tl.constexpr(int(Aggregate.BALANCED))


@triton.jit
def _sum_block(
    inputs, begin, end, row, ancestors, owner, segments, grad, token_loss, seen, pre, block, blocks, tokens, rows,
    leaves, READING: tl.constexpr, AGGREGATES: tl.constexpr, DEPTH: tl.constexpr, SPLIT: tl.constexpr,
    SLOT: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    token = block * SLOTS * SLOT + tl.arange(0, SLOTS * SLOT)
    if grad is not None:
        tl.store(grad + token, tl.zeros([SLOTS * SLOT], tl.float32), mask=token < tokens)
    if token_loss is not None:
        tl.store(token_loss + token, tl.zeros([SLOTS * SLOT], tl.float32), mask=token < tokens)
    for first in range(block * SLOTS * SLOT, rows, blocks * SLOTS * SLOT):
        each = first + tl.arange(0, SLOTS * SLOT)
        tl.store(seen + each, tl.zeros([SLOTS * SLOT], tl.uint8), mask=each < rows)

    slots = find_leaves(begin, end, owner, block, leaves, tokens, SLOT, SLOTS)
    whole = tl.max(slots.token) < tokens
    loaded = load_tokens(inputs, slots.token, tokens, whole, READING)
    of_row = tl.load(row + slots.row, mask=slots.row < leaves, other=0)
    t = read_tokens(inputs, loaded, of_row, rows, slots.inside, READING)
    x = entering(t.x, t.negative, pre)
    if DEPTH > 0 and AGGREGATES[0] == LOG_MEAN_EXP:
        x = mean_exp_part(x, SPLIT)
    rising = tl.maximum(x, 0.0) if SPLIT else x
    valid = tl.sum(t.valid.to(tl.int64), axis=1, keep_dims=True)
    rose = tl.sum(to_fixed(rising), axis=1, keep_dims=True)
    fell = tl.sum(to_fixed(rising - x), axis=1, keep_dims=True)
    some = valid > 0
    for k in tl.static_range(DEPTH):
        if AGGREGATES[k] != BALANCED:
            segment = segment_of(ancestors, k, slots.row, leaves, some)
            add_to_segments(segments, segment, valid, VALID, some)
            add_to_segments(segments, segment, rose, FIXED, some)
            if SPLIT:
                add_to_segments(segments, segment, fell, FIXED + 1, some)


@kernel
def _prepare_leaves(
    logp,
    old_logp,
    advantages,
    weights,
    cu_seqlens,
    mask,
    ref_logp,
    leaf_begin,  # of the caller, with the next two
    leaf_end,
    leaf_row,
    begin,  # written here, with the next two
    end,
    row,
    ancestors,
    owner,  # [slots], written here
    segments,  # 0, as state is
    state,
    gated_levels,  # [P, GATED_FIELDS, KINDS] float32, or None
    steps,  # [P, DEPTH, KINDS] float64, or None: the slope of a level less that of the finer one
    grad,  # set to 0, as are the next two: tokens outside of all leaves keep that
    token_loss,
    seen,
    pre,
    tokens: tl.int64,
    rows: tl.int64,
    leaves: tl.int64,
    slots: tl.int64,
    # by level: bounds by kind, and the slope
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
    LEAVES: tl.constexpr,
    SLOT: tl.constexpr,
    SLOTS: tl.constexpr,
    GATED: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
):  # fmt: skip
    inputs = PolicyLossInputs(logp, old_logp, advantages, weights, cu_seqlens, mask, ref_logp)
    given = (leaf_begin, leaf_end, leaf_row, ancestors, cu_seqlens)
    lows = (
        (low_00, low_01, low_02, low_03), (low_10, low_11, low_12, low_13),
        (low_20, low_21, low_22, low_23), (low_30, low_31, low_32, low_33),
    )  # fmt: skip
    highs = (
        (high_00, high_01, high_02, high_03), (high_10, high_11, high_12, high_13),
        (high_20, high_21, high_22, high_23), (high_30, high_31, high_32, high_33),
    )  # fmt: skip
    slopes = (slope_0, slope_1, slope_2, slope_3)
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0).to(tl.int64)
    for STEP in tl.static_range(FIRST, LAST + 1):
        if STEP == CHECK:
            check_leaves(given, begin, end, row, state, leaves, rows, tokens, DEPTH, LEAVES)
        elif STEP == REPAIR:
            repair_leaves(given, begin, end, row, state, leaves, rows, tokens, DEPTH, LEAVES, FIRST, LAST)
        elif STEP == SUM:
            blocks = slots // SLOTS
            for block in range(program, blocks, programs):
                _sum_block(
                    inputs, begin, end, row, ancestors, owner, segments, grad, token_loss, seen, pre, block, blocks,
                    tokens, rows, leaves, READING, SHAPE.aggregates, DEPTH, SHAPE.channels == 2, SLOT, SLOTS,
                )  # fmt: skip
        elif STEP == GATE:
            if STEP > FIRST:
                wait_for_programs(state + STEP, programs)
            for block in range(program, tl.cdiv(leaves, GATED), programs):
                gate_leaves(
                    begin, end, ancestors, segments, gated_levels, steps, block, leaves, lows, highs, slopes, SHAPE,
                    DEPTH, GATED,
                )  # fmt: skip
        elif STEP - SUM < DEPTH:  # noqa: SIM102 (the levels of SHAPE end there)
            if SHAPE.aggregates[STEP - SUM] == BALANCED:
                if STEP > FIRST:
                    wait_for_programs(state + STEP, programs)
                for block in range(program, tl.cdiv(leaves, GATED), programs):
                    add_children(
                        ancestors, segments, block, leaves, STEP - SUM, SHAPE.aggregates[STEP - SUM - 1],
                        SHAPE.channels, GATED,
                    )  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- host


class Prepared(NamedTuple):
    leaves: Leaves
    gated_levels: torch.Tensor | None  # None without levels
    steps: torch.Tensor | None  # where aggregates carry gradient


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
    leaves = copy_leaves(inputs)
    (depth, count), slots, device = leaves.ancestors.shape, leaves.owner.numel(), inputs.logp.device
    gated_levels = steps = None
    if depth > 0:
        gated_levels = torch.empty((count, GATED_FIELDS.value, KINDS.value), dtype=torch.float32, device=device)
    if depth > 0 and shape.carries:
        steps = torch.empty((count, depth, KINDS.value), dtype=torch.float64, device=device)
    spare = [LevelSpec(Unit.TRAJECTORY, LevelKind.IDENTITY)] * (MOST_LEVELS - depth)
    numbers = [number for level in (*spec.levels, *spare) for number in (*level.low, *level.high, level.slope)]

    gated, registers = triton.cdiv(count, GATED), 64 if depth <= 2 else 80
    summed = {CHECK.value: triton.cdiv(count, LEAVES), REPAIR.value: 1, SUM.value: slots // SLOTS}
    balanced = [level for level in range(depth) if shape.aggregates[level] == Aggregate.BALANCED]
    summed |= {SUM.value + level: gated for level in balanced}
    stages = [summed, {GATE.value: gated}] if depth > 0 else [summed]
    if exchange is None:
        stages = [{step: blocks for stage in stages for step, blocks in stage.items()}]
    for stage in stages:
        launch_steps(
            _prepare_leaves, stage, registers, inputs.logp, inputs.old_logp, inputs.advantages, inputs.weights,
            inputs.cu_seqlens, inputs.mask, inputs.ref_logp, inputs.leaf_begin, inputs.leaf_end, inputs.leaf_row,
            leaves.begin, leaves.end, leaves.row, leaves.ancestors, leaves.owner, leaves.segments, leaves.state,
            gated_levels, steps, grad, token_loss, seen, pre, inputs.logp.numel(), inputs.weights.numel(), count,
            slots, *numbers, READING=reading, SHAPE=of_levels(shape), DEPTH=depth, LEAVES=LEAVES, SLOT=SLOT_TOKENS,
            SLOTS=SLOTS, GATED=GATED,
        )  # fmt: skip
        if exchange is not None and SUM.value in stage:
            exchange.sums(leaves.fields(VALID, 3))
    return Prepared(leaves, gated_levels, steps)
