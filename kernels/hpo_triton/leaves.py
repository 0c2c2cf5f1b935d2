"""Leaves: the ranges of tokens that tile the finest level of a hierarchy, and the sums of the segments above them.

Leaves are data, as offsets are. A good one lies in its row, begins at or behind the end of every good one before it,
and has an existing ancestor at every level; other leaves are made empty and counted. From there on leaves have
slots as rows have them: a short leaf has one, a long one many.

Segments add up in integers, by atomics whose order does not matter.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..specs import PolicyLossInputs
from .launch import wait_for_programs
from .rows import SLOTS, number_of_slots, row_range, slot_owner, tokens_of_slots

LEAVES = tl.constexpr(256)  # of one block

# The first steps of every kernel on leaves.
CHECK, REPAIR, SUM = (tl.constexpr(step) for step in range(3))

# The sums of a segment, int64: valid tokens; by channel, log-ratios in fixed point, the gradient in the aggregate, and
# the largest exponent of its terms.
FIELDS = tl.constexpr(8)
VALID, FIXED, FLOW, EXPONENT = (tl.constexpr(field) for field in (0, 1, 3, 5))


# Counters that programs share, int64, 0 at first. Place STEP counts the programs that have reached the barrier before
# that step, place 0 those at the barrier of the flows (flows.py), place REPAIRED those at the barrier after a repair.
# Two more count the blocks from the first block with a leaf in disorder on, and the leaves that are not good.
STATE = tl.constexpr(16)
REPAIRED, DISORDER, BROKEN = (tl.constexpr(place) for place in (13, 14, 15))


class Leaves(NamedTuple):
    """Leaves that are good or empty, in order. The kernels have the fields as parameters, in this order, and pass them
    on as ``tables``."""

    begin: torch.Tensor  # [P]
    end: torch.Tensor  # [P]
    row: torch.Tensor  # [P]
    ancestors: torch.Tensor | None  # [DEPTH, P], anything where a leaf is empty; None: each is a segment
    owner: torch.Tensor  # [slots] the leaf of a slot, if it has one; from SUM on
    segments: torch.Tensor  # [DEPTH, P, FIELDS]
    state: torch.Tensor  # [STATE]

    def fields(self, first: tl.constexpr, count: int) -> torch.Tensor:
        return self.segments[..., first.value : first.value + count]


# ------------------------------------------------------------------------------------------------------- good and bad


class CallerLeaves(NamedTuple):
    """The leaves of a call, which may be bad."""

    begin: tl.tensor  # [P], as the next two; None: the leaves are the rows
    end: tl.tensor
    row: tl.tensor
    ancestors: tl.tensor  # [DEPTH, P]; None: each leaf is a segment
    cu_seqlens: tl.tensor  # [S + 1]


class Leaf(NamedTuple):
    begin: tl.tensor
    end: tl.tensor
    row: tl.tensor  # 0 where it does not exist
    good: tl.tensor  # by itself, whatever the others are


@triton.jit
def _ends_of(caller_leaves):
    return caller_leaves.cu_seqlens + 1 if caller_leaves.end is None else caller_leaves.end


@triton.jit
def _inspect(caller_leaves, leaf, leaves, rows, tokens, DEPTH: tl.constexpr):
    ancestors, cu_seqlens = caller_leaves.ancestors, caller_leaves.cu_seqlens
    exists = leaf < leaves
    begins = cu_seqlens if caller_leaves.begin is None else caller_leaves.begin
    begin = tl.load(begins + leaf, mask=exists, other=0)
    end = tl.load(_ends_of(caller_leaves) + leaf, mask=exists, other=0)
    row = leaf if caller_leaves.row is None else tl.load(caller_leaves.row + leaf, mask=exists, other=0)
    known = exists & (row >= 0) & (row < rows)
    range = row_range(cu_seqlens, tl.where(known, row, rows), rows, tokens)
    good = known & (range.bad == False) & (begin >= range.begin)  # noqa: E712 (`not` is for scalars)
    good &= (end >= begin) & (end <= range.end)
    if ancestors is not None:
        for k in tl.static_range(DEPTH):
            ancestor = tl.load(ancestors + k * leaves + leaf, mask=exists, other=0)
            good &= (ancestor >= 0) & (ancestor < leaves)
    return Leaf(begin, end, tl.where(known, row, 0), good)


@triton.jit
def _check_block(caller_leaves, tables, block, blocks, leaves, rows, tokens, DEPTH: tl.constexpr):
    """Copies leaves as if they were good, and marks the block if one is not good, or not behind the one before it."""
    leaf = block * LEAVES + tl.arange(0, LEAVES).to(tl.int64)
    exists = leaf < leaves
    read = _inspect(caller_leaves, leaf, leaves, rows, tokens, DEPTH)
    before = tl.load(_ends_of(caller_leaves) + leaf - 1, mask=exists & (leaf > 0), other=0)
    tl.store(tables.begin + leaf, read.begin, mask=exists)
    tl.store(tables.end + leaf, read.end, mask=exists)
    tl.store(tables.row + leaf, read.row, mask=exists)
    wrong = exists & ((read.good & (read.begin >= before)) == False)  # noqa: E712
    if tl.max(wrong.to(tl.int32)) > 0:
        tl.atomic_max(tables.state + DISORDER, blocks - block, sem="relaxed")


@triton.jit
def _repair(caller_leaves, tables, disorder, blocks, leaves, rows, tokens, DEPTH: tl.constexpr):
    """One leaf after the other, from the first block in disorder on: there is none in a sound batch."""
    first = (blocks - disorder) * LEAVES
    covered = tl.load(tables.end + first - 1, mask=first > 0, other=0)  # by the good leaves before
    bad = first * 0
    for leaf in range(first, leaves):
        read = _inspect(caller_leaves, leaf, leaves, rows, tokens, DEPTH)
        good = read.good & (read.begin >= covered)
        tl.store(tables.begin + leaf, tl.where(good, read.begin, covered))
        covered = tl.where(good, read.end, covered)
        tl.store(tables.end + leaf, covered)
        tl.store(tables.row + leaf, tl.where(good, read.row, 0))
        if caller_leaves.row is not None:  # else it is a row, which counts as one
            bad += tl.where(good, 0, 1)
    tl.store(tables.state + BROKEN, bad)


@triton.jit
def check_leaves(caller_leaves, tables, leaves, rows, tokens, DEPTH: tl.constexpr):
    """The step CHECK, from the CallerLeaves to the ``tables``, which are Leaves."""
    blocks = tl.cdiv(leaves, LEAVES)
    for block in range(tl.program_id(0).to(tl.int64), blocks, tl.num_programs(0).to(tl.int64)):
        _check_block(caller_leaves, tables, block, blocks, leaves, rows, tokens, DEPTH)


@triton.jit
def repair_leaves(
    caller_leaves, tables, leaves, rows, tokens, DEPTH: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """The step REPAIR, which has a barrier behind it only where there is something to repair."""
    programs = tl.num_programs(0).to(tl.int64)
    if FIRST < REPAIR:
        wait_for_programs(tables.state + REPAIR, programs)
    disorder = tl.load(tables.state + DISORDER)
    if disorder > 0:
        if tl.program_id(0) == 0:
            _repair(caller_leaves, tables, disorder, tl.cdiv(leaves, LEAVES), leaves, rows, tokens, DEPTH)
        if LAST > REPAIR:
            wait_for_programs(tables.state + REPAIRED, programs)


# ----------------------------------------------------------------------------------------------------- slots, segments


@triton.jit
def slots_of_leaves(tables, slot, leaves, tokens, ALIGN: tl.constexpr):
    """The tokens of the slots ``[K]``, and of each ``[K, 1]`` the leaf, its row and whether it has any token."""
    leaf = tl.load(tables.owner + slot)
    slots = tokens_of_slots(tables.begin, tables.end, leaf, leaves, tokens, slot, ALIGN)
    held = tl.max(slots.inside.to(tl.int32), axis=1, keep_dims=True) > 0
    return slots, slots.row, tl.load(tables.row + slots.row, mask=held, other=0), held


@triton.jit
def segment_of(ancestors, k, leaf, leaves, some):
    """The segment of each leaf at level k, as an index of [DEPTH, P]; read where ``some`` token of it exists."""
    return k * leaves + (leaf if ancestors is None else tl.load(ancestors + k * leaves + leaf, mask=some, other=0))


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


@triton.jit
def find_leaves(tables, block, leaves, tokens, ALIGN: tl.constexpr):
    """The tokens of a block of slots, whose leaves are written to ``tables.owner``."""
    slot = block * SLOTS + tl.arange(0, SLOTS).to(tl.int64)
    owner = slot_owner(tables.begin, leaves, tokens, slot)
    tl.store(tables.owner + slot, owner)
    return tokens_of_slots(tables.begin, tables.end, owner, leaves, tokens, slot, ALIGN)


# --------------------------------------------------------------------------------------------------------------- host


def copy_leaves(inputs: PolicyLossInputs, depth: int) -> Leaves:
    """Leaves before CHECK, REPAIR and SUM have found anything; segments and state are 0."""
    tokens, leaves, device = inputs.logp.numel(), inputs.leaves, inputs.logp.device
    begin, end, row = torch.empty((3, leaves), dtype=torch.int64, device=device)
    slots = triton.cdiv(number_of_slots(leaves, tokens), SLOTS.value) * SLOTS.value
    owner = torch.empty(slots, dtype=torch.int64, device=device)
    fields = depth * leaves * FIELDS.value
    table = torch.zeros(fields + STATE.value, dtype=torch.int64, device=device)
    segments = table[:fields].view(depth, leaves, FIELDS.value)
    return Leaves(begin, end, row, inputs.ancestors, owner, segments, table[fields:])
