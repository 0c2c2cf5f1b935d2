"""Corrections: masks and weights on tokens from log-ratios that are constants of the differentiation.

    CHECK, REPAIR    leaves that are good or empty, in order (leaves.py)
    SUM              the token weight, or 1, for every token; the sums of the segments of leaves
    CORRECT          the factors of the tokens of all leaves

These are steps of one launch, where programs can wait for each other (launch.py). The sums of other processes
come before CORRECT, which is a launch of its own there.

The definition is hpo_core/reference/corrections.py; the arithmetic of one token is that of
csrc/include/hpo/correction_rules.h. Segments add up in integers: their bits do not depend on the segments beside them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..specs import CorrectionSpec, PolicyLossInputs, PolicyLossSpec, Reduction, SegmentReduce, Statistic
from .correction_rules import K3, factor_of, rule_bounds_of, statistic_of
from .fixed_point import FIXED_POINT, to_fixed
from .launch import kernel, launch_steps, wait_for_programs
from .leaves import (
    CHECK,
    EXPONENT,
    FIELDS,
    FIXED,
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
    slots_of_leaves,
)
from .rows import SLOT, SLOTS
from .terms import by_sign
from .tokens import Rule, advantage_of, load_tokens, reading_of

CORRECT = tl.constexpr(SUM.value + 1)
MEAN = tl.constexpr(int(Reduction.MEAN))
MIN = tl.constexpr(int(Reduction.MIN))

# The extremum of a segment is the largest key of its tokens. Keys are above 0, the key of a segment without tokens.
EXTREMUM = EXPONENT
KEYS = tl.constexpr(2**32)

# A K3 may be e^20, and sums in fixed point hold few such numbers: whole multiples of COARSE are counted apart.
COARSE = tl.constexpr(2048.0)
MULTIPLES = tl.constexpr(FIXED.value + 1)


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
def _statistic_of_segment(segments, segment, exists, RULE: tl.constexpr):
    at = segments + segment * FIELDS
    if RULE.extremum:
        return _from_key(tl.load(at + EXTREMUM, mask=exists, other=0), RULE.reduction)
    sum = tl.load(at + FIXED, mask=exists, other=0).to(tl.float64) / FIXED_POINT
    if RULE.statistic == K3:
        sum += tl.load(at + MULTIPLES, mask=exists, other=0).to(tl.float64) * COARSE
    if RULE.reduction == MEAN:
        sum = sum / tl.maximum(tl.load(at + VALID, mask=exists, other=0), 1).to(tl.float64)
    return sum.to(tl.float32)


@triton.jit
def _counted(valid, loss, token, tokens):
    """The valid tokens whose log-ratios are no NaN. ``loss``: logp, old_logp and ref_logp, or None."""
    logp, old_logp, ref_logp = loss
    if logp is not None:
        own = tl.load(logp + token, mask=token < tokens, other=0.0)
        x = own - tl.load(old_logp + token, mask=token < tokens, other=0.0)
        valid &= x == x
        if ref_logp is not None:
            s = own - tl.load(ref_logp + token, mask=token < tokens, other=0.0)
            valid &= s == s
    return valid


@triton.jit
def _reduce_block(
    inputs, loss, token_weight, tables, factor, block, tokens, leaves, READING: tl.constexpr, RULE: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    token = block * SLOTS * SLOT + tl.arange(0, SLOTS * SLOT)
    neutral = tl.full([SLOTS * SLOT], 1.0, tl.float32)
    if token_weight is not None:
        neutral = tl.load(token_weight + token, mask=token < tokens)
    tl.store(factor + token, neutral, mask=token < tokens)
    slots = find_leaves(tables, block, leaves, tokens, 4)
    if DEPTH > 0:
        loaded = load_tokens(inputs, slots.token, tokens, tl.max(slots.token) < tokens, READING)
        v = statistic_of(loaded.logp, loaded.old_logp, RULE.statistic)
        valid = slots.inside & (v == v)
        if inputs.mask is not None:
            valid &= loaded.mask
        valid = _counted(valid, loss, slots.token, tokens)
        count = tl.sum(valid.to(tl.int64), axis=1, keep_dims=True)
        segments = tables.segments
        segment = segment_of(tables.ancestors, 0, slots.row, leaves, count > 0)
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


@triton.jit
def _correct_block(
    inputs, loss, tables, factor, bounds, block, tokens, rows, leaves, READING: tl.constexpr, RULE: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    slot = block * SLOTS + tl.arange(0, SLOTS).to(tl.int64)
    slots, leaf, of_row, exists = slots_of_leaves(tables, slot, leaves, tokens, 4)
    loaded = load_tokens(inputs, slots.token, tokens, tl.max(slots.token) < tokens, READING)
    negative = advantage_of(inputs, loaded, of_row, exists & (of_row < rows), READING) < 0.0
    statistic = statistic_of(loaded.logp, loaded.old_logp, RULE.statistic)
    v = statistic
    if DEPTH > 0:
        v = _statistic_of_segment(tables.segments, segment_of(tables.ancestors, 0, leaf, leaves, exists), exists, RULE)
    value = factor_of(v, by_sign(negative, bounds.low), by_sign(negative, bounds.high), RULE.action, RULE.strict)
    value = tl.where(statistic == statistic, value, statistic)
    if inputs.token_weight is not None:
        value = value * loaded.token_weight
    valid = slots.inside if inputs.mask is None else slots.inside & loaded.mask
    valid = _counted(valid, loss, slots.token, tokens)
    tl.store(factor + slots.token, value, mask=valid)


@kernel
def _correct_tokens(
    logp,
    old_logp,
    advantages,
    loss_logp,  # or None, with the next two
    loss_old_logp,
    ref_logp,
    cu_seqlens,
    mask,
    token_weight,
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
    factor,
    bounds,
    tokens: tl.int64,
    rows: tl.int64,
    leaves: tl.int64,
    slots: tl.int64,
    READING: tl.constexpr,
    RULE: tl.constexpr,
    DEPTH: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
):
    inputs = PolicyLossInputs(logp, old_logp, advantages, None, None, mask)
    weighted = PolicyLossInputs(logp, old_logp, advantages, None, None, mask, token_weight=token_weight)
    loss = (loss_logp, loss_old_logp, ref_logp)
    tables = Leaves(begin, end, row, ancestors, owner, segments, state)
    caller_leaves = CallerLeaves(leaf_begin, leaf_end, leaf_row, ancestors, cu_seqlens)
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0).to(tl.int64)
    for STEP in tl.static_range(FIRST, LAST + 1):
        if STEP == CHECK:
            check_leaves(caller_leaves, tables, leaves, rows, tokens, DEPTH)
        elif STEP == REPAIR:
            repair_leaves(caller_leaves, tables, leaves, rows, tokens, DEPTH, FIRST, LAST)
        elif STEP == SUM:
            for block in range(program, slots // SLOTS, programs):
                _reduce_block(inputs, loss, token_weight, tables, factor, block, tokens, leaves, READING, RULE, DEPTH)
        else:
            if STEP > FIRST:
                wait_for_programs(state + STEP, programs)
            for block in range(program, slots // SLOTS, programs):
                _correct_block(
                    weighted, loss, tables, factor, bounds, block, tokens, rows, leaves, READING, RULE, DEPTH,
                )  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- host


def correction(inputs: PolicyLossInputs, spec: CorrectionSpec, reduce: SegmentReduce | None = None) -> torch.Tensor:
    """The factor ``[T]`` of ``logp - old_logp``, times ``token_weight``; ``reduce``: for ``spec.of_segments``."""
    loss: tuple[torch.Tensor | None, ...] = (None, None, None)
    if inputs.correction_second is not None:
        first, second = inputs.correction_first, inputs.correction_second
        loss = (inputs.logp, inputs.old_logp, inputs.ref_logp)
        inputs = inputs._replace(logp=inputs.logp if first is None else first, old_logp=second, ref_logp=None)
    leaves, reading = copy_leaves(inputs, int(spec.of_segments)), reading_of(inputs, PolicyLossSpec())
    (depth, count, _), slots = leaves.segments.shape, leaves.owner.numel()
    tokens, rows, factor = inputs.logp.numel(), inputs.cu_seqlens.numel() - 1, torch.empty_like(inputs.logp)
    rule = Rule(int(spec.statistic), int(spec.reduction), spec.is_extremum, int(spec.action), spec.strict)
    blocks, registers = slots // SLOTS.value, 128 if spec.statistic is Statistic.BINARY_KL else 80
    reduction_steps = {CHECK.value: triton.cdiv(count, LEAVES.value), REPAIR.value: 1, SUM.value: blocks}
    correction_steps = {CORRECT.value: blocks}
    stages = [reduction_steps | correction_steps] if reduce is None else [reduction_steps, correction_steps]
    for stage in stages:
        launch_steps(
            _correct_tokens, stage, registers, inputs.logp, inputs.old_logp, inputs.advantages, *loss,
            inputs.cu_seqlens, inputs.mask, inputs.token_weight, inputs.leaf_begin, inputs.leaf_end, inputs.leaf_row,
            *leaves, factor, rule_bounds_of(spec), tokens, rows, count, slots, READING=reading, RULE=rule, DEPTH=depth,
        )  # fmt: skip
        if reduce is not None and SUM.value in stage:
            reduce(leaves.segments[0, :, : EXTREMUM.value + 1], spec.is_extremum)
    return factor
