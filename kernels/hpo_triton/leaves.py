"""Leaves: the ranges of tokens that tile the finest level of a hierarchy, and the sums of the segments above them.

Leaves are data, as offsets are. A good one lies in its row, begins at or behind the end of every good one before it,
and has an existing ancestor at every level; what is not good is made empty and counted. From there on leaves are to
slots what rows are: a short leaf has one, a long one many.

Segments add up in integers, by atomics whose order does not matter.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..specs import Aggregate, PolicyLossInputs
from .fixed_point import to_fixed
from .launch import kernel, launch
from .segments import SLOT_TOKENS, SLOTS, number_of_slots, row_range, slot_owner, tokens_of_slots
from .terms import Pre, entering, mean_exp_part
from .tokens import Reading, load_tokens, read_tokens

__all__ = [
    "EXPONENT",
    "FIELDS",
    "FIXED",
    "FLOW",
    "VALID",
    "Leaves",
    "add_to_segments",
    "check_leaves",
    "raise_segments",
    "segment_of",
    "slots_of_leaves",
    "sum_leaves",
]

LEAVES = 1024  # of one program

BALANCED = tl.constexpr(int(Aggregate.BALANCED))
LOG_MEAN_EXP = tl.constexpr(int(Aggregate.LOG_MEAN_EXP))

# The sums of a segment, int64: valid tokens; by channel, log-ratios in fixed point, the gradient in the aggregate, and
# the largest exponent of its terms.
FIELDS = tl.constexpr(8)
VALID, FIXED, FLOW, EXPONENT = (tl.constexpr(field) for field in (0, 1, 3, 5))


class Leaves(NamedTuple):
    """Leaves that are good or empty, in order."""

    begin: torch.Tensor  # [P]
    end: torch.Tensor  # [P]
    row: torch.Tensor  # [P]
    ancestors: torch.Tensor  # [DEPTH, P], anything where a leaf is empty
    owner: torch.Tensor  # [slots] the leaf of a slot, if it has one; from `sum_leaves` on
    broken: torch.Tensor  # [1] how many are not good
    segments: torch.Tensor  # [DEPTH, P, FIELDS]


# ------------------------------------------------------------------------------------------------------- good and bad


class Leaf(NamedTuple):
    begin: tl.tensor
    end: tl.tensor
    row: tl.tensor  # 0 where it does not exist
    good: tl.tensor  # by itself, whatever the others are


@triton.jit
def _inspect(
    leaf_begin, leaf_end, leaf_row, ancestors, cu_seqlens, leaf, leaves, rows, tokens, DEPTH: tl.constexpr
):  # fmt: skip
    exists = leaf < leaves
    begin = tl.load(leaf_begin + leaf, mask=exists, other=0)
    end = tl.load(leaf_end + leaf, mask=exists, other=0)
    row = tl.load(leaf_row + leaf, mask=exists, other=0)
    known = exists & (row >= 0) & (row < rows)
    range = row_range(cu_seqlens, tl.where(known, row, rows), rows, tokens)
    good = known & (range.bad == False) & (begin >= range.begin)  # noqa: E712 (`not` is for scalars)
    good &= (end >= begin) & (end <= range.end)
    for k in tl.static_range(DEPTH):
        ancestor = tl.load(ancestors + k * leaves + leaf, mask=exists, other=0)
        good &= (ancestor >= 0) & (ancestor < leaves)
    return Leaf(begin, end, tl.where(known, row, 0), good)


@kernel
def _check_leaves(
    leaf_begin,
    leaf_end,
    leaf_row,
    ancestors,
    cu_seqlens,
    begin,
    end,
    row,
    segments,  # set to 0
    disorder,  # [programs] int32: some leaf is not good, or not behind the one before it
    leaves: tl.int64,
    rows: tl.int64,
    tokens: tl.int64,
    DEPTH: tl.constexpr,
    LEAVES: tl.constexpr,
):
    """Copies all leaves as if they were good, and marks where one is not."""
    program = tl.program_id(0).to(tl.int64)
    leaf = program * LEAVES + tl.arange(0, LEAVES)
    exists = leaf < leaves
    read = _inspect(leaf_begin, leaf_end, leaf_row, ancestors, cu_seqlens, leaf, leaves, rows, tokens, DEPTH)
    before = tl.load(leaf_end + leaf - 1, mask=exists & (leaf > 0), other=0)
    tl.store(begin + leaf, read.begin, mask=exists)
    tl.store(end + leaf, read.end, mask=exists)
    tl.store(row + leaf, read.row, mask=exists)
    in_order = read.good & (read.begin >= before)
    tl.store(disorder + program, tl.max((exists & (in_order == False)).to(tl.int32)))  # noqa: E712
    for chunk in range(DEPTH * FIELDS):
        at = (program * DEPTH * FIELDS + chunk) * LEAVES + tl.arange(0, LEAVES)
        tl.store(segments + at, tl.zeros([LEAVES], tl.int64), mask=at < leaves * DEPTH * FIELDS)


@kernel
def _repair_leaves(
    leaf_begin,
    leaf_end,
    leaf_row,
    ancestors,
    cu_seqlens,
    begin,
    end,
    row,
    disorder,
    broken,
    leaves: tl.int64,
    rows: tl.int64,
    tokens: tl.int64,
    programs: tl.int64,
    DEPTH: tl.constexpr,
    LEAVES: tl.constexpr,
):
    """One leaf after the other, from the first block in disorder on: there is none in a sound batch."""
    block = programs
    for done in range(0, programs, LEAVES):
        index = done + tl.arange(0, LEAVES)
        wrong = tl.load(disorder + index, mask=index < programs, other=0) != 0
        block = tl.minimum(block, tl.min(tl.where(wrong, index, programs)))
    first = tl.minimum(block * LEAVES, leaves)
    covered = tl.load(end + first - 1, mask=first > 0, other=0)  # by the good leaves before
    bad = first * 0
    for leaf in range(first, leaves):
        read = _inspect(leaf_begin, leaf_end, leaf_row, ancestors, cu_seqlens, leaf, leaves, rows, tokens, DEPTH)
        good = read.good & (read.begin >= covered)
        tl.store(begin + leaf, tl.where(good, read.begin, covered))
        covered = tl.where(good, read.end, covered)
        tl.store(end + leaf, covered)
        tl.store(row + leaf, tl.where(good, read.row, 0))
        bad += tl.where(good, 0, 1)
    tl.store(broken, bad)


# ----------------------------------------------------------------------------------------------------- slots, segments


@triton.jit
def slots_of_leaves(begin, end, row, owner, slot, leaves, tokens, SLOT: tl.constexpr, ALIGN: tl.constexpr):
    """What the slots ``[K]`` hold, and of each ``[K, 1]`` the leaf, its row and whether it has any token."""
    leaf = tl.load(owner + slot)
    slots = tokens_of_slots(begin, end, leaf, leaves, tokens, slot, SLOT, ALIGN)
    held = tl.max(slots.inside.to(tl.int32), axis=1, keep_dims=True) > 0
    return slots, slots.row, tl.load(row + slots.row, mask=held, other=0), held


@triton.jit
def segment_of(ancestors, k, leaf, leaves, some):
    """The segment of each leaf at level k, as an index of [DEPTH, P]; read where ``some`` token of it exists."""
    return k * leaves + tl.load(ancestors + k * leaves + leaf, mask=some, other=0)


@triton.jit
def _one_segment(segment, some):
    """The least segment of a block where ``some``, and whether it is the only one."""
    least = tl.min(tl.where(some, segment, 9223372036854775807))
    return least, least == tl.max(tl.where(some, segment, -1))


@triton.jit
def add_to_segments(segments, segment, value, FIELD: tl.constexpr, some):
    """Terms of a block for one segment are added first: coarse levels have few segments."""
    least, only = _one_segment(segment, some)
    if only:
        tl.atomic_add(segments + least * FIELDS + FIELD, tl.sum(tl.where(some, value, 0)), sem="relaxed")
    else:
        tl.atomic_add(segments + segment * FIELDS + FIELD, value, mask=some, sem="relaxed")


@triton.jit
def raise_segments(segments, segment, value, FIELD: tl.constexpr, some):
    least, only = _one_segment(segment, some)
    if only:
        tl.atomic_max(segments + least * FIELDS + FIELD, tl.max(tl.where(some, value, 0)), sem="relaxed")
    else:
        tl.atomic_max(segments + segment * FIELDS + FIELD, value, mask=some, sem="relaxed")


@kernel
def _sum_leaves(
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
    owner,  # [slots], written here
    segments,
    grad,  # set to 0, as are the next two: tokens outside of all leaves keep that
    token_loss,
    seen,
    pre,
    tokens: tl.int64,
    rows: tl.int64,
    leaves: tl.int64,
    READING: tl.constexpr,
    AGGREGATES: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLIT: tl.constexpr,
    SLOT: tl.constexpr,
    SLOTS: tl.constexpr,
):
    inputs = PolicyLossInputs(logp, old_logp, advantages, weights, cu_seqlens, mask, ref_logp)
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0).to(tl.int64)
    token = program * SLOTS * SLOT + tl.arange(0, SLOTS * SLOT)
    if grad is not None:
        tl.store(grad + token, tl.zeros([SLOTS * SLOT], tl.float32), mask=token < tokens)
    if token_loss is not None:
        tl.store(token_loss + token, tl.zeros([SLOTS * SLOT], tl.float32), mask=token < tokens)
    for first in range(program * SLOTS * SLOT, rows, programs * SLOTS * SLOT):
        each = first + tl.arange(0, SLOTS * SLOT)
        tl.store(seen + each, tl.zeros([SLOTS * SLOT], tl.uint8), mask=each < rows)

    slot = program * SLOTS + tl.arange(0, SLOTS)
    found = slot_owner(begin, leaves, tokens, slot, SLOT)
    tl.store(owner + slot, found)
    slots = tokens_of_slots(begin, end, found, leaves, tokens, slot, SLOT, 4)
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


# --------------------------------------------------------------------------------------------------------------- host


def with_tables(inputs: PolicyLossInputs, depth: int) -> PolicyLossInputs:
    """The same inputs, with tables of leaves and ancestors where rows are leaves and leaves are segments."""
    leaf = torch.arange(inputs.leaves, device=inputs.logp.device)
    if inputs.leaf_begin is None:
        begin, end = inputs.cu_seqlens[:-1].clone(), inputs.cu_seqlens[1:].clone()
        inputs = inputs._replace(leaf_begin=begin, leaf_end=end, leaf_row=leaf)
    if inputs.ancestors is None:
        inputs = inputs._replace(ancestors=leaf.repeat(depth, 1))
    return inputs


def check_leaves(inputs: PolicyLossInputs, depth: int) -> Leaves:
    inputs = with_tables(inputs, depth)
    assert inputs.ancestors is not None
    tokens, rows, device = inputs.logp.numel(), inputs.weights.numel(), inputs.logp.device
    depth, leaves = inputs.ancestors.shape
    programs = triton.cdiv(leaves, LEAVES)
    given = (inputs.leaf_begin, inputs.leaf_end, inputs.leaf_row, inputs.ancestors, inputs.cu_seqlens)
    begin, end, row = torch.empty((3, leaves), dtype=torch.int64, device=device)
    slots = triton.cdiv(number_of_slots(leaves, tokens), SLOTS) * SLOTS
    owner = torch.empty(slots, dtype=torch.int64, device=device)
    segments = torch.empty((depth, leaves, FIELDS.value), dtype=torch.int64, device=device)
    disorder = torch.empty(programs, dtype=torch.int32, device=device)
    broken = torch.empty(1, dtype=torch.int64, device=device)
    launch(
        _check_leaves, programs, *given, begin, end, row, segments, disorder, leaves, rows, tokens,
        DEPTH=depth, LEAVES=LEAVES,
    )  # fmt: skip
    launch(
        _repair_leaves, 1, *given, begin, end, row, disorder, broken, leaves, rows, tokens, programs,
        DEPTH=depth, LEAVES=LEAVES,
    )  # fmt: skip
    return Leaves(begin, end, row, inputs.ancestors, owner, broken, segments)


def sum_leaves(
    inputs: PolicyLossInputs,
    leaves: Leaves,
    reading: Reading,
    aggregates: tuple[int, ...],
    split: bool,
    pre: Pre | None,
    grad: torch.Tensor | None,
    token_loss: torch.Tensor | None,
    seen: torch.Tensor,
) -> None:
    """Valid tokens and log-ratios of all segments, unless they are balanced; zeros for what the sweep may not reach."""
    depth, count = leaves.ancestors.shape
    launch(
        _sum_leaves, leaves.owner.numel() // SLOTS, inputs.logp, inputs.old_logp, inputs.advantages, inputs.weights,
        inputs.cu_seqlens, inputs.mask, inputs.ref_logp, leaves.begin, leaves.end, leaves.row, leaves.ancestors,
        leaves.owner, leaves.segments, grad, token_loss, seen, pre, inputs.logp.numel(), inputs.weights.numel(),
        count, READING=reading, AGGREGATES=aggregates, DEPTH=depth, SPLIT=split, SLOT=SLOT_TOKENS, SLOTS=SLOTS,
    )  # fmt: skip
