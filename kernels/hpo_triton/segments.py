"""Counts of valid tokens of rows, weights made of them, and their spans; statistics of groups; scans along rows.

The definitions are hpo_core/reference/segments.py.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..specs import Denominator
from .groups import (
    AT_ONCE,
    RUNS,
    SCANNED,
    TILE_UNITS,
    Grouping,
    all_members,
    center_of,
    few_blocks,
    load_all_members,
    run_of,
    squares_of,
    sum_group,
)
from .launch import INTERPRETED, REGISTERS, counter, kernel, launch, programs_for
from .math import LARGEST_DOUBLE, clamp
from .rows import ROWS, any_broken, owners, row_range

COUNTED_ROWS, COUNTED_TOKENS = tl.constexpr(4), tl.constexpr(256)  # of each, that a program counts at once
MASKED_TOKENS = tl.constexpr(512)  # tokens of a row whose mask a program reads at once
TOKENS, ROWS_AND_TOKENS = tl.constexpr(int(Denominator.TOKENS)), tl.constexpr(int(Denominator.ROWS_AND_TOKENS))
# Rows of one program that scans, and units of each that it scans at once; the interpreter scans units one by one.
SCANNED_ROWS = tl.constexpr(1 if INTERPRETED else 4)
CHUNK = tl.constexpr(16 if INTERPRETED else 256)

# --------------------------------------------------------------------------------------------------------- row_counts


@kernel
def _count_rows(
    cu_seqlens,  # [S + 1] int64
    mask,  # [T] or None
    counts,  # [S] int64
    weights,  # [S] float32, or None: counts alone
    arrived,  # the number of programs that are done, 0 before and after
    factor: tl.float64,
    tokens: tl.int64,
    rows: tl.int64,
    DENOMINATOR: tl.constexpr,
):
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    broken = any_broken(cu_seqlens, rows, tokens)
    for first in range(program * COUNTED_ROWS, rows, programs * COUNTED_ROWS):
        row = first + tl.arange(0, COUNTED_ROWS)[:, None]
        range_ = row_range(cu_seqlens, row, rows, tokens)
        count = tl.zeros([COUNTED_ROWS, COUNTED_TOKENS], tl.int32)
        for start in range(0, tl.max(range_.end - range_.begin), COUNTED_TOKENS):
            token = range_.begin + start + tl.arange(0, COUNTED_TOKENS)[None, :]
            valid = token < range_.end
            if broken:
                valid &= owners(cu_seqlens, rows, tokens, token) == row
            if mask is not None:
                valid &= tl.load(mask + token, mask=valid, other=False)
            count += valid.to(tl.int32)
        tl.store(counts + row, tl.sum(count.to(tl.int64), axis=1)[:, None], mask=row < rows)
    if weights is not None:
        tl.debug_barrier()  # the release below is of one thread, for the writes of all threads of the program
        if tl.atomic_add(arrived, 1, sem="acq_rel") == programs - 1:
            tl.debug_barrier()
            tl.store(arrived, 0)
            _weigh_rows(counts, weights, factor, rows, DENOMINATOR)


@triton.jit
def _weigh_rows(counts, weights, factor, rows, DENOMINATOR: tl.constexpr):
    total = tl.zeros([ROWS], tl.int64)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)
        count = tl.load(counts + row, mask=row < rows, other=0)
        total += count if DENOMINATOR == TOKENS else (count > 0).to(tl.int64)
    total = tl.sum(total)
    scale = tl.where(total > 0, factor / tl.maximum(total, 1).to(tl.float64), 0.0).to(tl.float32)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)
        weight = tl.zeros([ROWS], tl.float32) + scale
        if DENOMINATOR == ROWS_AND_TOKENS:
            count = tl.load(counts + row, mask=row < rows, other=0)
            weight = tl.where(count > 0, tl.div_rn(weight, tl.maximum(count, 1).to(tl.float32)), 0.0)
        tl.store(weights + row, weight, mask=row < rows)


def row_counts(mask: torch.Tensor | None, cu_seqlens: torch.Tensor, total_tokens: int) -> torch.Tensor:
    """Valid tokens of each row ``[S]`` int64."""
    rows = cu_seqlens.numel() - 1
    counts = cu_seqlens.new_empty(rows)
    _launch_counts(cu_seqlens, mask, counts, None, None, 0.0, total_tokens, rows, DENOMINATOR=0)
    return counts


def row_weights(
    mask: torch.Tensor | None, cu_seqlens: torch.Tensor, total_tokens: int, denominator: int, factor: float
) -> torch.Tensor:
    """``factor`` divided by the Denominator ``[S]`` float32: the program that is done last has all counts."""
    rows = cu_seqlens.numel() - 1
    counts, weights = cu_seqlens.new_empty(rows), cu_seqlens.new_empty(rows, dtype=torch.float32)
    _launch_counts(
        cu_seqlens, mask, counts, weights, counter(cu_seqlens.device), factor, total_tokens, rows,
        DENOMINATOR=int(denominator),
    )  # fmt: skip
    return weights


def _launch_counts(*arguments: Any, DENOMINATOR: int) -> None:
    *_, rows = arguments
    programs = programs_for(rows, COUNTED_ROWS.value)
    launch(_count_rows, programs, *arguments, DENOMINATOR=DENOMINATOR, maxnreg=REGISTERS)


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
def _store_statistics(statistics, group, unit, units, exists):
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
    grouping = Grouping(values, ids, weights, mask)
    group = sum_group(grouping, None, begin, begin + tl.cast(units, tl.int32), id, OTHERS, True)
    _store_statistics(statistics, group, unit, units, unit < units)


@kernel
def _statistics_of_runs(statistics, values, ids, weights, mask, sorted_ids, order, units: tl.int64):
    begin, length = run_of(sorted_ids, units)
    group = sum_group(Grouping(values, ids, weights, mask), order, begin, length, None, AT_ONCE, True)
    for start in range(0, tl.max(length), AT_ONCE):
        position = begin + start + tl.arange(0, AT_ONCE)[None, :]
        here = position < begin + length
        _store_statistics(statistics, group, tl.load(order + position, mask=here, other=0), units, here)


@kernel
def _statistics_of_all_members(statistics, totals, units: tl.int64):
    unit = tl.program_id(0).to(tl.int64) * TILE_UNITS + tl.arange(0, TILE_UNITS)[None, :]
    _store_statistics(statistics, load_all_members(totals), unit, units, unit < units)


def group_statistics(
    values: torch.Tensor, ids: torch.Tensor | None, weights: torch.Tensor | None, mask: torch.Tensor | None
) -> torch.Tensor:
    """Statistics of the group of every unit ``[6, U]`` float64: count, weight, mean, squares, least, greatest."""
    units, grouping = values.numel(), Grouping(values, ids, weights, mask)
    statistics = torch.empty((6, units), dtype=torch.float64, device=values.device)
    if ids is None:
        totals = all_members([grouping], extremes=True)
        programs = triton.cdiv(units, TILE_UNITS.value)
        launch(_statistics_of_all_members, programs, statistics, totals, units)
    elif units <= SCANNED:
        block, others = few_blocks(units)
        launch(
            _statistics_of_few, triton.cdiv(units, block), statistics, *grouping, units, UNITS=block, OTHERS=others,
            maxnreg=REGISTERS,
        )  # fmt: skip
    else:
        launch(
            _statistics_of_runs, triton.cdiv(units, RUNS.value), statistics, *grouping, *torch.sort(ids, stable=True),
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
