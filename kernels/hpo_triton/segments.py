"""Counts of valid tokens of rows and their spans, statistics of groups of units, and scans along rows."""

from __future__ import annotations

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
from .math import LARGEST_DOUBLE, clamp
from .rows import SLOT, SLOTS, number_of_slots, owners, row_range, slot_tokens

ROWS = tl.constexpr(1024)  # rows of one program
MASKED_TOKENS = tl.constexpr(512)  # tokens of a row whose mask a program reads at once
# Rows of one program that scans, and units of each that it scans at once; the interpreter scans units one by one.
SCANNED_ROWS = tl.constexpr(1 if INTERPRETED else 4)
CHUNK = tl.constexpr(16 if INTERPRETED else 256)

# --------------------------------------------------------------------------------------------------------- row_counts


@kernel
def _begin_counts(
    cu_seqlens,  # [S + 1] int64
    counts,  # [S] int64
    broken,  # [programs] int32: whether this program has a broken row
    tokens: tl.int64,
    rows: tl.int64,
):
    program = tl.program_id(0).to(tl.int64)
    row = program * ROWS + tl.arange(0, ROWS)
    tl.store(counts + row, tl.zeros([ROWS], tl.int64), mask=row < rows)
    tl.store(broken + program, tl.max(row_range(cu_seqlens, row, rows, tokens).bad.to(tl.int32)))


@kernel
def _count_rows(
    cu_seqlens,
    mask,  # [T] or None
    broken,
    counts,
    tokens: tl.int64,
    rows: tl.int64,
    leaves: tl.int64,
):
    program = tl.program_id(0).to(tl.int64)
    any_broken = tl.zeros([SLOT], tl.int32)
    for first in range(0, leaves, SLOT):
        leaf = first + tl.arange(0, SLOT)
        any_broken |= tl.load(broken + leaf, mask=leaf < leaves, other=0)
    # Sums of integers do not depend on the order of these additions.
    if tl.max(any_broken) > 0:
        token = program * SLOTS * SLOT + tl.arange(0, SLOTS * SLOT)
        owner = owners(cu_seqlens, rows, tokens, token)
        valid = owner >= 0
        if mask is not None:
            valid &= tl.load(mask + token, mask=valid, other=False)
        tl.atomic_add(counts + owner, tl.full([SLOTS * SLOT], 1, tl.int64), mask=valid, sem="relaxed")
    else:
        slots = slot_tokens(cu_seqlens, rows, tokens, program * SLOTS + tl.arange(0, SLOTS))
        inside = slots.inside
        if mask is not None:
            inside &= tl.load(mask + slots.token, mask=inside, other=False)
        count = tl.sum(inside.to(tl.int64), axis=1)[:, None]
        tl.atomic_add(counts + slots.row, count, mask=count > 0, sem="relaxed")


def row_counts(mask: torch.Tensor | None, cu_seqlens: torch.Tensor, total_tokens: int) -> torch.Tensor:
    """Valid tokens of each row ``[S]`` int64."""
    rows, device = cu_seqlens.numel() - 1, cu_seqlens.device
    leaves = triton.cdiv(rows, ROWS.value)
    counts = torch.empty(rows, dtype=torch.int64, device=device)
    broken = torch.empty(leaves, dtype=torch.int32, device=device)
    programs = triton.cdiv(number_of_slots(rows, total_tokens), SLOTS.value)
    launch(_begin_counts, leaves, cu_seqlens, counts, broken, total_tokens, rows)
    launch(
        _count_rows, programs, cu_seqlens, mask, broken, counts, total_tokens, rows, leaves,
    )  # fmt: skip
    return counts


# ---------------------------------------------------------------------------------------------------------- row_spans


@kernel
def _find_spans(
    cu_seqlens,  # [S + 1] int64
    mask,  # [T]
    spans,  # [2 S + 2] int64
    tokens: tl.int64,
    rows: tl.int64,
):
    row = tl.program_id(0).to(tl.int64)  # behind the last row: the program of both ends
    if row < rows:
        range_ = row_range(cu_seqlens, row, rows, tokens)
        begin, end = range_.end, range_.begin
        tile = range_.begin
        while tile < begin:  # up to the first valid token
            token = tile + tl.arange(0, MASKED_TOKENS)
            valid = tl.load(mask + token, mask=token < range_.end, other=False)
            begin = tl.min(tl.where(valid, token, begin))
            tile += MASKED_TOKENS
        tile = range_.end - MASKED_TOKENS
        while tile + MASKED_TOKENS > tl.maximum(end, begin):  # down to the last, if there is one
            token = tile + tl.arange(0, MASKED_TOKENS)
            valid = tl.load(mask + token, mask=token >= begin, other=False)
            end = tl.maximum(end, tl.max(tl.where(valid, token + 1, 0)))
            tile -= MASKED_TOKENS
        is_empty = begin == range_.end
        begin, end = tl.where(is_empty, range_.begin, begin), tl.where(is_empty, range_.begin, end)
        tl.store(spans + 2 * row + 1, tl.where(range_.bad, tokens + 1, begin))
        tl.store(spans + 2 * row + 2, tl.where(range_.bad, -1, end))
    else:
        tl.store(spans, tl.load(cu_seqlens))
        tl.store(spans + 2 * rows + 1, tl.load(cu_seqlens + rows))


def row_spans(mask: torch.Tensor, cu_seqlens: torch.Tensor, total_tokens: int) -> torch.Tensor:
    """The first offset, the span of each row's valid tokens, and the last offset, ``[2 S + 2]`` int64."""
    rows = cu_seqlens.numel() - 1
    spans = cu_seqlens.new_empty(2 * rows + 2)
    launch(_find_spans, rows + 1, cu_seqlens, mask, spans, total_tokens, rows)
    return spans


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
def _statistics_of_runs(statistics, values, ids, weights, mask, sorted_ids, order, units: tl.int64):
    begin, length = run_of(sorted_ids, units)
    group = sum_group(Given(values, ids, weights, mask), order, begin, length, None, AT_ONCE, True)
    for start in range(0, tl.max(length), AT_ONCE):
        position = begin + start + tl.arange(0, AT_ONCE)[None, :]
        here = position < begin + length
        _put_statistics(statistics, group, tl.load(order + position, mask=here, other=0), units, here)


@kernel
def _statistics_of_all_members(statistics, totals, units: tl.int64):
    unit = tl.program_id(0).to(tl.int64) * TILE_UNITS + tl.arange(0, TILE_UNITS)[None, :]
    _put_statistics(statistics, load_all_members(totals), unit, units, unit < units)


def group_statistics(
    values: torch.Tensor, ids: torch.Tensor | None, weights: torch.Tensor | None, mask: torch.Tensor | None
) -> torch.Tensor:
    """Statistics of the group of every unit ``[6, U]`` float64: count, weight, mean, squares, least, greatest."""
    units, given = values.numel(), Given(values, ids, weights, mask)
    statistics = torch.empty((6, units), dtype=torch.float64, device=values.device)
    if ids is None:
        totals = all_members([given], extremes=True)
        programs = triton.cdiv(units, TILE_UNITS.value)
        launch(_statistics_of_all_members, programs, statistics, totals, units)
    elif units <= SCANNED:
        block, others = few_blocks(units)
        launch(
            _statistics_of_few, triton.cdiv(units, block), statistics, *given, units, UNITS=block, OTHERS=others,
            maxnreg=REGISTERS,
        )  # fmt: skip
    else:
        launch(
            _statistics_of_runs, triton.cdiv(units, RUNS.value), statistics, *given, *torch.sort(ids, stable=True),
            units, maxnreg=REGISTERS,
        )  # fmt: skip
    return statistics


# --------------------------------------------------------------------------------------------------------- recurrence


@triton.jit
def _compose(gain, value, next_gain, next_value):
    """The map y -> gain y + value followed by the next map."""
    composed = clamp(next_gain * gain, -LARGEST_DOUBLE, LARGEST_DOUBLE)  # 0 times it stays 0
    return composed, next_gain * value + next_value


@kernel
def _scan_rows(values, gains, cu_seqlens, scanned, units: tl.int64, rows: tl.int64):
    """Chunks start at the end of a row, so that results depend on the row alone."""
    row = tl.program_id(0).to(tl.int64) * SCANNED_ROWS + tl.arange(0, SCANNED_ROWS)[:, None]
    range_ = row_range(cu_seqlens, row, rows, units)
    length = range_.end - range_.begin
    lane = tl.arange(0, CHUNK)[None, :]
    following = tl.zeros([SCANNED_ROWS, 1], tl.float64)
    for start in range(0, tl.max(length), CHUNK):
        unit = range_.end - 1 - start - lane
        here = unit >= range_.begin
        value = tl.load(values + unit, mask=here, other=0.0)
        gain = tl.load(gains + unit, mask=here, other=0.0)
        value = tl.where(lane == 0, gain * following + value, value)
        _, value = tl.associative_scan((gain, value), 1, _compose)
        tl.store(scanned + unit, value + 0.0, mask=here)  # never -0
        following = tl.sum(tl.where(lane == CHUNK - 1, value, 0.0), axis=1, keep_dims=True)


def recurrence(values: torch.Tensor, gains: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """``y_i = x_i + g_i y_{i+1}`` from the end of every row to its start, ``[U]``; 0 outside all rows."""
    rows, scanned = cu_seqlens.numel() - 1, torch.zeros_like(values)
    launch(
        _scan_rows, triton.cdiv(rows, SCANNED_ROWS.value), values, gains, cu_seqlens, scanned, values.numel(), rows,
    )  # fmt: skip
    return scanned
