"""Rows of a packed batch: loads and stores, the row of a token, counts of valid tokens, and scans along rows; and
statistics of groups of units.

Tokens are divided in two ways. A *tile* is TILE consecutive tokens of the pack, whatever rows they are in: each token
is in exactly one tile, and loads are aligned. A *slot* is a part of one row: sums over a slot do not depend on other
rows.

Offsets are data. Whatever their values, a row found here is a row of the batch and its range lies inside [0, tokens].
If they are not in order, rows may be left out; at least one row is then broken, and reported.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .groups import (
    AT_ONCE,
    RUNS,
    SCANNED,
    TILE_UNITS,
    Given,
    all_members,
    center_of,
    few_blocks,
    load_all_members,
    run_of,
    squares_of,
    sum_group,
)
from .launch import INTERPRETED, REGISTERS, kernel, launch

__all__ = [
    "SLOTS",
    "SLOT_TOKENS",
    "TILE",
    "Range",
    "Slots",
    "group_statistics",
    "load",
    "number_of_slots",
    "recurrence",
    "row_counts",
    "row_of_token",
    "row_range",
    "rows_of_few",
    "slot_count",
    "slot_owner",
    "slot_tokens",
    "store",
    "tokens_of_slots",
]

TILE = 1024
SLOT_TOKENS = 64
SLOTS = 16  # slots of one program
ROWS = 1024  # rows of one program
# Rows of one program that scans, and units of each that it scans at once; the interpreter scans units one by one.
SCANNED_ROWS, CHUNK = (1, 16) if INTERPRETED else (4, 256)

# ------------------------------------------------------------------------------------------------------------- tokens


@triton.jit
def _address(pointer, token, ALIGNED: tl.constexpr):
    address = pointer + token
    if ALIGNED:  # four tokens that start at a multiple of four are 16 aligned bytes, or 4 of a mask
        size: tl.constexpr = 4 if pointer.dtype.element_ty == tl.int1 else 16
        address = tl.multiple_of(address, [1, size] if len(token.shape) == 2 else size)
    return address


@triton.jit
def _quarters(x):
    """[K, N] -> four [K, N / 4]: every fourth element, starting at the first, second, third and fourth."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 4, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _load_one_by_one(pointer, token, tokens):
    """Scalar loads that give each thread four neighbours, the layout of a wide load for the computation after it."""
    first, second, third, fourth = _quarters(token)
    even = tl.join(
        tl.load(pointer + first, mask=first < tokens, other=0), tl.load(pointer + third, mask=third < tokens, other=0)
    )
    odd = tl.join(
        tl.load(pointer + second, mask=second < tokens, other=0),
        tl.load(pointer + fourth, mask=fourth < tokens, other=0),
    )
    return tl.reshape(tl.join(even, odd), token.shape)


@triton.jit
def load(pointer, token, tokens, whole, ALIGNED: tl.constexpr, EVICTION: tl.constexpr = ""):
    """The elements ``token``, 0 beyond the end of the pack; ``whole``: all are inside the pack."""
    if len(token.shape) == 2 and not ALIGNED:
        return _load_one_by_one(pointer, token, tokens)
    address = _address(pointer, token, ALIGNED)
    # A mask that cuts at an arbitrary T would split every 128-bit load into four; only the last tile needs one.
    return (
        tl.load(address, eviction_policy=EVICTION)
        if whole
        else tl.load(address, mask=token < tokens, other=0, eviction_policy=EVICTION)
    )


@triton.jit
def store(pointer, token, value, tokens, whole, ALIGNED: tl.constexpr, EVICTION: tl.constexpr = ""):
    address = _address(pointer, token, ALIGNED)
    if whole:
        tl.store(address, value, eviction_policy=EVICTION)
    else:
        tl.store(address, value, mask=token < tokens, eviction_policy=EVICTION)


# --------------------------------------------------------------------------------------------------------------- rows


class Range(NamedTuple):
    """Half-open token ranges of rows; a broken row is empty and marked."""

    begin: tl.tensor
    end: tl.tensor
    bad: tl.tensor


@triton.jit
def _range(begins, ends, row, rows, tokens):
    exists = row < rows
    begin = tl.load(begins + row, mask=exists, other=0)
    end = tl.load(ends + row, mask=exists, other=0)
    bad = (begin < 0) | (end < begin) | (end > tokens)
    return Range(tl.where(bad, 0, begin), tl.where(bad, 0, end), bad)


@triton.jit
def row_range(cu_seqlens, row, rows, tokens):
    return _range(cu_seqlens, cu_seqlens + 1, row, rows, tokens)


@triton.jit
def _last_row(cu_seqlens, rows, tokens, keys, SLOT: tl.constexpr, WIDTH: tl.constexpr):
    """For each of a few keys ``[K]`` the last row that begins at or before it, 0 if there is none.

    A row begins at its offset or, with SLOT > 0, at its first slot. WIDTH rows are probed together, so a million rows
    cost two or three dependent reads where a binary search has twenty.
    """
    low = tl.zeros_like(keys)
    span = rows
    while span > 1:
        step = tl.cdiv(span, WIDTH)
        row = low[:, None] + tl.arange(0, WIDTH)[None, :] * step
        begin = tl.load(cu_seqlens + row, mask=row < rows, other=0)
        if SLOT > 0:
            begin = row + tl.minimum(tl.maximum(begin, 0), tokens) // SLOT
        hits = tl.sum(((begin <= keys[:, None]) & (row < rows)).to(tl.int32), axis=1)
        low += tl.maximum(hits - 1, 0) * step
        span = step
    return low


@triton.jit
def rows_of_few(cu_seqlens, rows, tokens, token):
    """The row of each of a few tokens ``[K]``, in no order. A token outside the range of that row has no row."""
    return _last_row(cu_seqlens, rows, tokens, token, 0, 64)


@triton.jit
def row_of_token(cu_seqlens, rows, tokens, start, TILE: tl.constexpr):
    """The row of each token ``start + [0, TILE)``. A token outside the range of that row has no row."""
    borders = _last_row(cu_seqlens, rows, tokens, start + tl.arange(0, 2) * (TILE - 1), 0, TILE // 2)
    first, last = tl.min(borders), tl.max(borders)
    low = tl.zeros([TILE], tl.int64) + first
    high = tl.zeros([TILE], tl.int64) + last
    token = start + tl.arange(0, TILE)
    span = last - first  # often 0: the tile is inside one row
    while span > 0:
        middle = (low + high + 1) // 2
        below = tl.load(cu_seqlens + middle) <= token
        low, high = tl.where(below, middle, low), tl.where(below, high, middle - 1)
        span = span // 2
    return low


# -------------------------------------------------------------------------------------------------------------- slots
# Row s owns the slots from s + floor(cu_seqlens[s] / SLOT) to the first slot of row s + 1: these are enough for its
# tokens, slots have the order of rows, and the number of all slots depends on S and T alone.


class Slots(NamedTuple):
    """The tokens of K slots."""

    row: tl.tensor  # [K, 1]
    token: tl.tensor  # [K, SLOT]
    inside: tl.tensor  # [K, SLOT]: the token is one of the row's


def number_of_slots(rows: int, tokens: int) -> int:
    return rows + tokens // SLOT_TOKENS + 1


@triton.jit
def slot_count(range, SLOT: tl.constexpr, ALIGN: tl.constexpr):
    """The number of slots that hold a row."""
    return tl.where(range.end > range.begin, tl.cdiv(range.end - range.begin // ALIGN * ALIGN, SLOT), 0)


@triton.jit
def slot_owner(begins, rows, tokens, slot, SLOT: tl.constexpr):
    """The row of each slot ``[K]``, if it has one."""
    return _last_row(begins, rows, tokens, slot, SLOT, 64)


@triton.jit
def tokens_of_slots(begins, ends, row, rows, tokens, slot, SLOT: tl.constexpr, ALIGN: tl.constexpr):
    """The tokens of the slots ``[K]`` of the rows ``[begins, ends)``, which do not overlap.

    With ALIGN = 4 each slot begins at a multiple of four tokens, so the first slot of a row may begin before the row.
    With ALIGN = 1 a token's position in its slot depends only on its position in the row.
    """
    range = _range(begins, ends, row, rows, tokens)
    index = slot - (row + range.begin // SLOT)
    held = (index >= 0) & (index < slot_count(range, SLOT, ALIGN))  # the others are spare
    start = tl.where(held, range.begin // ALIGN * ALIGN + index * SLOT, 0)
    token = start[:, None] + tl.arange(0, SLOT)[None, :]
    inside = (token >= range.begin[:, None]) & (token < range.end[:, None]) & held[:, None]
    return Slots(row[:, None], token, inside)


@triton.jit
def slot_tokens(cu_seqlens, rows, tokens, slot, SLOT: tl.constexpr, ALIGN: tl.constexpr):
    row = slot_owner(cu_seqlens, rows, tokens, slot, SLOT)
    return tokens_of_slots(cu_seqlens, cu_seqlens + 1, row, rows, tokens, slot, SLOT, ALIGN)


# --------------------------------------------------------------------------------------------------------- row_counts


@kernel
def _begin_counts(
    cu_seqlens,  # [S + 1] int64
    counts,  # [S] int64
    broken,  # [programs] int32: whether this program has a broken row
    tokens: tl.int64,
    rows: tl.int64,
    ROWS: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    row = program * ROWS + tl.arange(0, ROWS)
    tl.store(counts + row, tl.zeros([ROWS], tl.int64), mask=row < rows)
    tl.store(broken + program, tl.max(row_range(cu_seqlens, row, rows, tokens).bad.to(tl.int32)))


@triton.jit
def _owners(cu_seqlens, rows, tokens, token):
    """The row of each token, -1 for none, for offsets in any order; the last of rows that overlap."""
    owner = tl.zeros_like(token) - 1
    for row in range(rows):
        range_ = row_range(cu_seqlens, row, rows, tokens)
        owner = tl.where((token >= range_.begin) & (token < range_.end), row, owner)
    return owner


@kernel
def _count_rows(
    cu_seqlens,
    mask,  # [T] or None
    broken,
    counts,
    tokens: tl.int64,
    rows: tl.int64,
    leaves: tl.int64,
    SLOT: tl.constexpr,
    SLOTS: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    any_broken = tl.zeros([SLOT], tl.int32)
    for first in range(0, leaves, SLOT):
        leaf = first + tl.arange(0, SLOT)
        any_broken |= tl.load(broken + leaf, mask=leaf < leaves, other=0)
    # Sums of integers do not depend on the order of these additions.
    if tl.max(any_broken) > 0:
        token = program * SLOTS * SLOT + tl.arange(0, SLOTS * SLOT)
        owner = _owners(cu_seqlens, rows, tokens, token)
        valid = owner >= 0
        if mask is not None:
            valid &= tl.load(mask + token, mask=valid, other=False)
        tl.atomic_add(counts + owner, tl.full([SLOTS * SLOT], 1, tl.int64), mask=valid, sem="relaxed")
    else:
        slots = slot_tokens(cu_seqlens, rows, tokens, program * SLOTS + tl.arange(0, SLOTS), SLOT, 1)
        inside = slots.inside
        if mask is not None:
            inside &= tl.load(mask + slots.token, mask=inside, other=False)
        count = tl.sum(inside.to(tl.int64), axis=1)[:, None]
        tl.atomic_add(counts + slots.row, count, mask=count > 0, sem="relaxed")


def row_counts(mask: torch.Tensor | None, cu_seqlens: torch.Tensor, total_tokens: int) -> torch.Tensor:
    """Valid tokens of each row ``[S]`` int64."""
    rows, device = cu_seqlens.numel() - 1, cu_seqlens.device
    leaves = triton.cdiv(rows, ROWS)
    counts = torch.empty(rows, dtype=torch.int64, device=device)
    broken = torch.empty(leaves, dtype=torch.int32, device=device)
    programs = triton.cdiv(number_of_slots(rows, total_tokens), SLOTS)
    launch(_begin_counts, leaves, cu_seqlens, counts, broken, total_tokens, rows, ROWS=ROWS)
    launch(
        _count_rows, programs, cu_seqlens, mask, broken, counts, total_tokens, rows, leaves,
        SLOT=SLOT_TOKENS, SLOTS=SLOTS,
    )  # fmt: skip
    return counts


# --------------------------------------------------------------------------------------------------- group_statistics


@triton.jit
def _put_statistics(statistics, group, unit, units, exists):
    has_members = group.members > 0.0
    numbers = (
        group.members, group.weight, group.pivot + center_of(group), squares_of(group), group.least, group.greatest,
    )  # fmt: skip
    for k in tl.static_range(6):
        number = tl.where(has_members, numbers[k], 0.0) + tl.zeros(unit.shape, tl.float64)
        tl.store(statistics + k * units + unit, number, mask=exists)


@kernel
def _statistics_of_few(
    statistics,  # [6, U] float64
    values,
    ids,
    weights,
    mask,
    units: tl.int64,
    UNITS: tl.constexpr,
    OTHERS: tl.constexpr,
):
    unit = tl.program_id(0) * UNITS + tl.arange(0, UNITS)[:, None]
    begin = tl.zeros([1, 1], tl.int32)
    id = tl.load(ids + unit, mask=unit < units, other=-1)
    given = Given(values, ids, weights, mask)
    group = sum_group(given, None, begin, begin + tl.cast(units, tl.int32), id, OTHERS, True)
    _put_statistics(statistics, group, unit, units, unit < units)


@kernel
def _statistics_of_runs(
    statistics,
    values,
    ids,
    weights,
    mask,
    sorted_ids,
    order,
    units: tl.int64,
    RUNS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    begin, length = run_of(sorted_ids, units, RUNS, WIDTH)
    group = sum_group(Given(values, ids, weights, mask), order, begin, length, None, WIDTH, True)
    for start in range(0, tl.max(length), WIDTH):
        position = begin + start + tl.arange(0, WIDTH)[None, :]
        here = position < begin + length
        _put_statistics(statistics, group, tl.load(order + position, mask=here, other=0), units, here)


@kernel
def _statistics_of_all_members(
    statistics,
    totals,
    units: tl.int64,
    TILE: tl.constexpr,
):
    unit = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)[None, :]
    _put_statistics(statistics, load_all_members(totals), unit, units, unit < units)


def group_statistics(
    values: torch.Tensor, ids: torch.Tensor | None, weights: torch.Tensor | None, mask: torch.Tensor | None
) -> torch.Tensor:
    """Statistics of the group of every unit ``[6, U]`` float64: count, weight, mean, squares, least, greatest."""
    units, given = values.numel(), Given(values, ids, weights, mask)
    statistics = torch.empty((6, units), dtype=torch.float64, device=values.device)
    if ids is None:
        totals = all_members([given], extremes=True)
        programs = triton.cdiv(units, TILE_UNITS)
        launch(_statistics_of_all_members, programs, statistics, totals, units, TILE=TILE_UNITS)
    elif units <= SCANNED:
        block, others = few_blocks(units)
        launch(
            _statistics_of_few, triton.cdiv(units, block), statistics, *given, units, UNITS=block, OTHERS=others,
            maxnreg=REGISTERS,
        )  # fmt: skip
    else:
        launch(
            _statistics_of_runs, triton.cdiv(units, RUNS), statistics, *given, *torch.sort(ids, stable=True), units,
            RUNS=RUNS, WIDTH=AT_ONCE, maxnreg=REGISTERS,
        )  # fmt: skip
    return statistics


# --------------------------------------------------------------------------------------------------------- recurrence


@triton.jit
def _compose(gain, value, next_gain, next_value):
    """The map y -> gain y + value followed by the next map."""
    return next_gain * gain, next_gain * value + next_value


@kernel
def _scan_rows(
    values,
    gains,
    cu_seqlens,
    scanned,
    units: tl.int64,
    rows: tl.int64,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Chunks start at the end of a row, so that results depend on the row alone."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    range_ = row_range(cu_seqlens, row, rows, units)
    length = range_.end - range_.begin
    lane = tl.arange(0, CHUNK)[None, :]
    following = tl.zeros([ROWS, 1], tl.float64)
    for start in range(0, tl.max(length), CHUNK):
        unit = range_.end - 1 - start - lane
        here = unit >= range_.begin
        value = tl.load(values + unit, mask=here, other=0.0).to(tl.float64)
        gain = tl.load(gains + unit, mask=here, other=0.0).to(tl.float64)
        value = tl.where(lane == 0, gain * following + value, value)
        _, value = tl.associative_scan((gain, value), 1, _compose)
        tl.store(scanned + unit, value.to(tl.float32) + 0.0, mask=here)  # never -0
        following = tl.sum(tl.where(lane == CHUNK - 1, value, 0.0), axis=1, keep_dims=True)


def recurrence(values: torch.Tensor, gains: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """``y_i = x_i + g_i y_{i+1}`` from the end of every row to its start, ``[U]``; 0 outside all rows."""
    rows, scanned = cu_seqlens.numel() - 1, torch.zeros_like(values)
    launch(
        _scan_rows, triton.cdiv(rows, SCANNED_ROWS), values, gains, cu_seqlens, scanned, values.numel(), rows,
        ROWS=SCANNED_ROWS, CHUNK=CHUNK,
    )  # fmt: skip
    return scanned
