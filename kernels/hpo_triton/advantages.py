"""Group normalisation: one centred, scaled value per unit, from the statistics of its group.

Up to SCANNED units every program looks at all of them: one launch, no sorting, and the cost does not show. Beyond,
units are sorted by group and each group is read as one run. Statistics of everybody, for one group of all or for the
scale of the batch, come from tiles, in a launch of their own.

The definition is hpo_core/reference/advantages.py; the arithmetic of one group is that of
csrc/include/hpo/advantages.h.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..specs import Center, EpsMode, GroupNormalisation, Scale
from .launch import INTERPRETED, kernel, launch
from .math import is_finite

__all__ = ["group_normalise"]

SCANNED = 8192
UNITS = 16  # of one program that scans
OTHERS = 64  # units it looks at together
TILE = 1024  # units whose sums are one piece of everybody's
RUNS = 128 if INTERPRETED else 8  # sorted units of one program; those that begin a group do the work of it
AT_ONCE = 128  # units of a run, or sums of tiles, that a program looks at together

NONE = tl.constexpr(int(Scale.NONE))
BATCH = tl.constexpr(int(Scale.BATCH))
ADD = tl.constexpr(int(EpsMode.ADD))
SQRT = tl.constexpr(int(EpsMode.SQRT))
LEAVE_ONE_OUT = tl.constexpr(int(Center.LEAVE_ONE_OUT))


class Units(NamedTuple):
    value: tl.tensor  # 0 where it is not finite
    id: tl.tensor
    member: tl.tensor  # enters the statistics
    receives: tl.tensor  # gets an advantage


class Sums(NamedTuple):
    """Of the members of a group, relative to its first one: identical values cancel exactly, and an offset common to
    the group costs no digits. All float64."""

    pivot: tl.tensor
    n: tl.tensor
    sum: tl.tensor  # of x - pivot
    squares: tl.tensor  # of (x - pivot)^2


class Rule(NamedTuple):
    """What may specialise a kernel."""

    center: int
    scale: int
    eps_mode: int


@triton.jit
def _load_units(values, ids, mask, apply_mask, unit, exists):
    value = tl.load(values + unit, mask=exists, other=0.0)
    grouped = exists & is_finite(value)
    id = unit * 0
    if ids is not None:
        id = tl.load(ids + unit, mask=exists, other=-1)
        grouped &= id >= 0
    member = grouped
    if mask is not None:
        member &= tl.load(mask + unit, mask=exists, other=False)
    receives = member
    if apply_mask is not None:
        receives = grouped & tl.load(apply_mask + unit, mask=exists, other=False)
    return Units(tl.where(grouped, value, 0.0), id, member, receives)


@triton.jit
def _deviation(sums, ddof):
    """Standard deviation; 0 where there are too few members."""
    squares = sums.squares - sums.sum * (sums.sum / tl.maximum(sums.n, 1.0))
    variance = squares / tl.maximum(sums.n - ddof, 1.0)
    return tl.where((sums.n > ddof) & (squares > 0.0), tl.sqrt(tl.maximum(variance, 0.0)), 0.0)


@triton.jit
def _advantage(value, member, sums, batch_deviation, ddof, eps, keep_singletons, RULE: tl.constexpr):
    single = sums.n == 1.0
    deviation = batch_deviation if RULE.scale == BATCH else tl.where(single, 1.0, _deviation(sums, ddof))
    if RULE.scale == NONE:
        scale = deviation * 0.0 + 1.0
    elif RULE.eps_mode == ADD:
        scale = deviation + eps
    elif RULE.eps_mode == SQRT:
        scale = tl.sqrt(deviation * deviation + eps)
    else:
        scale = tl.maximum(deviation, eps)
    x = value.to(tl.float64)
    centred = (x - sums.pivot) - sums.sum / tl.maximum(sums.n, 1.0)
    if RULE.center == LEAVE_ONE_OUT:  # a unit that is not a member has all members as its "others"
        centred = tl.where(member, centred * (sums.n / tl.maximum(sums.n - 1.0, 1.0)), centred)
    centred = tl.where(single, tl.where(keep_singletons != 0, x, 0.0), centred)
    defined = (sums.n > 0.0) & (centred != 0.0) & (scale > 0.0)
    return tl.where(defined, centred / tl.where(defined, scale, 1.0), 0.0).to(tl.float32)


# -------------------------------------------------------------------------------------------------------- everybody


@triton.jit
def _add_up(pivot, n, sum, squares):
    """Of each row."""
    return Sums(
        pivot,
        tl.sum(n, axis=1).to(tl.float64)[:, None],
        tl.sum(sum, axis=1)[:, None],
        tl.sum(squares, axis=1)[:, None],
    )


@kernel
def _sum_tiles(
    values,
    ids,
    mask,
    sums,  # [tiles, 4] float64
    units: tl.int64,
    TILE: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    unit = tile * TILE + tl.arange(0, TILE)
    u = _load_units(values, ids, mask, None, unit, unit < units)
    first = tl.min(tl.where(u.member, unit, units))
    pivot = tl.load(values + first, mask=first < units, other=0.0).to(tl.float64)
    offset = tl.where(u.member, u.value.to(tl.float64) - pivot, 0.0)
    tl.store(sums + 4 * tile, pivot)
    tl.store(sums + 4 * tile + 1, tl.sum(u.member.to(tl.int32)).to(tl.float64))
    tl.store(sums + 4 * tile + 2, tl.sum(offset))
    tl.store(sums + 4 * tile + 3, tl.sum(offset * offset))


@triton.jit
def _merge_tiles(sums, tiles, WIDTH: tl.constexpr):
    """The sums of all tiles, moved to the pivot of the first tile that has a member."""
    lane = tl.arange(0, WIDTH)[None, :].to(tl.int64)
    first = tl.zeros([1, WIDTH], tl.int64) + tiles
    for start in range(0, tiles, WIDTH):
        tile = start + lane
        n = tl.load(sums + 4 * tile + 1, mask=tile < tiles, other=0.0)
        first = tl.minimum(first, tl.where(n > 0.0, tile, tiles))
    first = tl.min(first, axis=1)[:, None]
    pivot = tl.load(sums + 4 * first, mask=first < tiles, other=0.0)
    n = tl.zeros([1, WIDTH], tl.float64)
    sum = tl.zeros([1, WIDTH], tl.float64)
    squares = tl.zeros([1, WIDTH], tl.float64)
    for start in range(0, tiles, WIDTH):
        tile = start + lane
        exists = tile < tiles
        tile_n = tl.load(sums + 4 * tile + 1, mask=exists, other=0.0)
        tile_sum = tl.load(sums + 4 * tile + 2, mask=exists, other=0.0)
        shift = tl.load(sums + 4 * tile, mask=exists, other=0.0) - pivot
        shift = tl.where(tile_n > 0.0, shift, 0.0)
        n += tile_n
        sum += tile_sum + tile_n * shift
        squares += tl.load(sums + 4 * tile + 3, mask=exists, other=0.0) + shift * (2.0 * tile_sum + tile_n * shift)
    return _add_up(pivot, n, sum, squares)


@kernel
def _normalise_one_group(
    values,
    mask,
    apply_mask,
    sums,
    advantages,
    units: tl.int64,
    tiles: tl.int64,
    ddof: tl.float64,
    eps: tl.float64,
    keep_singletons: tl.int64,
    RULE: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    group = _merge_tiles(sums, tiles, WIDTH)
    unit = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)[None, :]
    u = _load_units(values, None, mask, apply_mask, unit, unit < units)
    advantage = _advantage(u.value, u.member, group, _deviation(group, ddof), ddof, eps, keep_singletons, RULE)
    tl.store(advantages + unit, tl.where(u.receives, advantage, 0.0), mask=unit < units)


# ------------------------------------------------------------------------------------------------------- few units


@kernel
def _normalise_few(
    values,
    ids,
    mask,
    apply_mask,
    sums,  # of all tiles; None: not needed
    advantages,
    units: tl.int64,
    tiles: tl.int64,
    ddof: tl.float64,
    eps: tl.float64,
    keep_singletons: tl.int64,
    RULE: tl.constexpr,
    UNITS: tl.constexpr,
    OTHERS: tl.constexpr,
):
    unit = tl.program_id(0) * UNITS + tl.arange(0, UNITS)[:, None]  # [UNITS, 1]; few units: 32 bits are enough
    mine = _load_units(values, ids, mask, apply_mask, unit, unit < units)
    lane = tl.arange(0, OTHERS)[None, :]  # [1, OTHERS]; a lane adds every OTHERS-th unit

    nobody = tl.cast(units, tl.int32)
    first = tl.zeros([UNITS, OTHERS], tl.int32) + nobody
    for start in range(0, nobody, OTHERS):
        other = start + lane
        theirs = _load_units(values, ids, mask, None, other, other < nobody)
        first = tl.minimum(first, tl.where(theirs.member & (theirs.id == mine.id), other, nobody))
    first = tl.min(first, axis=1)[:, None]
    pivot = tl.load(values + first, mask=first < nobody, other=0.0).to(tl.float64)

    n = tl.zeros([UNITS, OTHERS], tl.int32)
    sum = tl.zeros([UNITS, OTHERS], tl.float64)
    squares = tl.zeros([UNITS, OTHERS], tl.float64)
    for start in range(0, nobody, OTHERS):
        other = start + lane
        theirs = _load_units(values, ids, mask, None, other, other < nobody)
        same = theirs.member & (theirs.id == mine.id)
        offset = tl.where(same, theirs.value.to(tl.float64) - pivot, 0.0)
        n += same.to(tl.int32)
        sum += offset
        squares += offset * offset
    group = _add_up(pivot, n, sum, squares)
    batch_deviation = pivot * 0.0
    if sums is not None:
        batch_deviation += _deviation(_merge_tiles(sums, tiles, OTHERS), ddof)
    advantage = _advantage(mine.value, mine.member, group, batch_deviation, ddof, eps, keep_singletons, RULE)
    tl.store(advantages + unit, tl.where(mine.receives, advantage, 0.0), mask=unit < units)


# ----------------------------------------------------------------------------------------------- many units, sorted


@kernel
def _normalise_runs(
    values,
    ids,
    mask,
    apply_mask,
    sorted_ids,
    order,  # unit at each sorted position, groups in one piece and their units in index order
    sums,  # of all tiles; None: not needed
    advantages,
    units: tl.int64,
    tiles: tl.int64,
    ddof: tl.float64,
    eps: tl.float64,
    keep_singletons: tl.int64,
    RULE: tl.constexpr,
    RUNS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    begin = tl.program_id(0).to(tl.int64) * RUNS + tl.arange(0, RUNS)[:, None]  # [RUNS, 1]
    exists = begin < units
    id = tl.load(sorted_ids + begin, mask=exists, other=-1)
    previous = tl.load(sorted_ids + begin - 1, mask=exists & (begin > 0), other=0)
    begins = exists & ((begin == 0) | (id != previous))

    lane = tl.arange(0, WIDTH)[None, :]
    length = tl.zeros([RUNS, 1], tl.int64)
    first = tl.zeros([RUNS, WIDTH], tl.int64) + units  # sorted position of the first member
    searching = tl.max(begins.to(tl.int32))
    while searching > 0:
        position = begin + length + lane
        here = begins & (position < units)
        here &= tl.load(sorted_ids + position, mask=here, other=-1) == id
        u = _load_units(values, ids, mask, None, tl.load(order + position, mask=here, other=0), here)
        first = tl.minimum(first, tl.where(u.member, position, units))
        found = tl.sum(here.to(tl.int64), axis=1)[:, None]
        begins &= found == WIDTH
        length += found
        searching = tl.max(begins.to(tl.int32))
    first = tl.min(first, axis=1)[:, None]
    unit = tl.load(order + first, mask=first < units, other=0)
    pivot = tl.load(values + unit, mask=first < units, other=0.0).to(tl.float64)

    n = tl.zeros([RUNS, WIDTH], tl.int32)
    sum = tl.zeros([RUNS, WIDTH], tl.float64)
    squares = tl.zeros([RUNS, WIDTH], tl.float64)
    longest = tl.max(length)
    for start in range(0, longest, WIDTH):
        here = start + lane < length
        u = _load_units(values, ids, mask, None, tl.load(order + begin + start + lane, mask=here, other=0), here)
        offset = tl.where(u.member, u.value.to(tl.float64) - pivot, 0.0)
        n += u.member.to(tl.int32)
        sum += offset
        squares += offset * offset
    group = _add_up(pivot, n, sum, squares)
    batch_deviation = group.pivot * 0.0
    if sums is not None:
        batch_deviation += _deviation(_merge_tiles(sums, tiles, WIDTH), ddof)

    for start in range(0, longest, WIDTH):
        here = start + lane < length
        receiver = tl.load(order + begin + start + lane, mask=here, other=0)
        its = _load_units(values, ids, mask, apply_mask, receiver, here)
        advantage = _advantage(its.value, its.member, group, batch_deviation, ddof, eps, keep_singletons, RULE)
        tl.store(advantages + receiver, tl.where(its.receives, advantage, 0.0), mask=here)


# -------------------------------------------------------------------------------------------------------------- host


def group_normalise(
    values: torch.Tensor,
    ids: torch.Tensor | None,
    mask: torch.Tensor | None,
    apply_mask: torch.Tensor | None,
    spec: GroupNormalisation,
) -> torch.Tensor:
    """``A_u = lambda (x_u - mean_g) / scale_g`` for every unit u of group g, ``[U]``."""
    units = values.numel()
    advantages = torch.empty_like(values)
    rule = Rule(int(spec.center), int(spec.scale), int(spec.eps_mode))
    numbers = (float(spec.ddof), spec.eps, int(spec.keep_singletons))
    tiles, sums = triton.cdiv(units, TILE), None
    if ids is None or spec.scale is Scale.BATCH:
        sums = torch.empty((tiles, 4), dtype=torch.float64, device=values.device)
        launch(_sum_tiles, tiles, values, ids, mask, sums, units, TILE=TILE)
    if ids is None:
        launch(
            _normalise_one_group, tiles, values, mask, apply_mask, sums, advantages, units, tiles, *numbers,
            RULE=rule, TILE=TILE, WIDTH=AT_ONCE,
        )  # fmt: skip
    elif units <= SCANNED:
        block, others = UNITS, OTHERS
        if INTERPRETED:  # what a program computes twice costs less there than another program
            block, others = (min(max(size, triton.next_power_of_2(units)), 16 * size) for size in (UNITS, OTHERS))
        launch(
            _normalise_few, triton.cdiv(units, block), values, ids, mask, apply_mask, sums, advantages, units, tiles,
            *numbers, RULE=rule, UNITS=block, OTHERS=others,
        )  # fmt: skip
    else:
        sorted_ids, order = torch.sort(ids, stable=True)
        launch(
            _normalise_runs, triton.cdiv(units, RUNS), values, ids, mask, apply_mask, sorted_ids, order, sums,
            advantages, units, tiles, *numbers, RULE=rule, RUNS=RUNS, WIDTH=AT_ONCE,
        )  # fmt: skip
    return advantages
