"""Sums over the members of groups: for groups found by a scan of all units, for groups that are runs of a sorted order,
and for all members as one group.

Sums are float64 and relative to the first member of the group, the pivot: identical values cancel exactly, and an
offset common to the group costs no digits. The arithmetic follows csrc/include/hpo/advantages.h.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .launch import INTERPRETED, kernel, launch
from .math import is_finite

SCANNED = 8192  # the most units that every program reads in full
UNITS = 16  # units of one program that scans
OTHERS = 64  # units that it reads together
TILE_UNITS = tl.constexpr(1024)  # units of one tile in the sums over all members
# Sorted positions of one program, which handles the groups that begin there.
RUNS = tl.constexpr(128 if INTERPRETED else 8)
AT_ONCE = tl.constexpr(64)  # units of a run that a program reads together

PIVOT, MEMBERS, WEIGHT, SUM, SQUARES, LEAST, GREATEST = (tl.constexpr(field) for field in range(7))
FIELDS = tl.constexpr(7)


class Grouping(NamedTuple):
    """The tensors of one grouping."""

    x: torch.Tensor  # the values; a tuple in Triton already has an attribute `values`
    ids: torch.Tensor | None
    weights: torch.Tensor | None
    mask: torch.Tensor | None


class Units(NamedTuple):
    value: tl.tensor  # float64; 0 if it is not finite
    id: tl.tensor
    weight: tl.tensor  # float64; 0 if the unit is no member
    grouped: tl.tensor  # the unit has a group and a finite value
    counted: tl.tensor  # it is also in the mask
    member: tl.tensor  # it also has a weight


class Group(NamedTuple):
    """Statistics of the members of a group, all float64."""

    pivot: tl.tensor
    members: tl.tensor
    weight: tl.tensor  # the sum of the weights w
    sum: tl.tensor  # the sum of w (x - pivot)
    squares: tl.tensor  # the sum of w (x - pivot)^2
    least: tl.tensor  # only with EXTREMES
    greatest: tl.tensor  # only with EXTREMES


# -------------------------------------------------------------------------------------------------------------- units


@triton.jit
def load_units(grouping, unit, exists):
    value = tl.load(grouping.x + unit, mask=exists, other=0.0)
    grouped = exists & is_finite(value)
    id = unit * 0
    if grouping.ids is not None:
        id = tl.load(grouping.ids + unit, mask=exists, other=-1)
        grouped &= id >= 0
    counted = grouped
    if grouping.mask is not None:
        counted &= tl.load(grouping.mask + unit, mask=exists, other=False)
    member = counted
    weight = tl.full(value.shape, 1.0, tl.float32)
    if grouping.weights is not None:
        weight = tl.load(grouping.weights + unit, mask=exists, other=0.0)
        member &= (weight > 0.0) & is_finite(weight)
    return Units(
        value=tl.where(grouped, value, 0.0).to(tl.float64),
        id=id,
        weight=tl.where(member, weight, 0.0).to(tl.float64),
        grouped=grouped,
        counted=counted,
        member=member,
    )


# ------------------------------------------------------------------------------------------------------------- groups
# The members of a group are among the ``length`` positions from ``begin``, both [K, 1] or [1, 1]. ``order`` gives the
# unit at each position; None: the position itself. With ``id`` [K, 1] only units with this id are members; None: all.


@triton.jit
def _load_members(grouping, order, position, here, id):
    """Units [.., WIDTH], and whether they are members of each group [K, WIDTH]."""
    unit = position
    if order is not None:
        unit = tl.load(order + position, mask=here, other=0)
    units = load_units(grouping, unit, here)
    member = units.member
    if id is not None:
        member &= units.id == id
    return units, member


@triton.jit
def _pivot(grouping, order, begin, length, id, WIDTH: tl.constexpr):
    ROWS: tl.constexpr = begin.shape[0] if id is None else id.shape[0]
    end = begin + length
    lane = tl.arange(0, WIDTH)[None, :]
    first = tl.broadcast_to(end, [ROWS, WIDTH])
    for start in range(0, tl.max(length), WIDTH):
        position = begin + start + lane
        _, member = _load_members(grouping, order, position, position < end, id)
        first = tl.minimum(first, tl.where(member, position, end))
    first = tl.min(first, axis=1, keep_dims=True)
    unit = first if order is None else tl.load(order + first, mask=first < end, other=0)
    return tl.load(grouping.x + unit, mask=first < end, other=0.0).to(tl.float64)


@triton.jit
def sum_group(grouping, order, begin, length, id, WIDTH: tl.constexpr, EXTREMES: tl.constexpr):
    """The sums of each group ``[ROWS, 1]``. A lane adds every WIDTH-th unit."""
    ROWS: tl.constexpr = begin.shape[0] if id is None else id.shape[0]
    pivot = _pivot(grouping, order, begin, length, id, WIDTH)
    end = begin + length
    lane = tl.arange(0, WIDTH)[None, :]
    members = tl.zeros([ROWS, WIDTH], tl.int32)
    weight = tl.zeros([ROWS, WIDTH], tl.float64)
    sum = tl.zeros([ROWS, WIDTH], tl.float64)
    squares = tl.zeros([ROWS, WIDTH], tl.float64)
    least = tl.full([ROWS, WIDTH], float("inf"), tl.float64)
    greatest = tl.full([ROWS, WIDTH], float("-inf"), tl.float64)
    for start in range(0, tl.max(length), WIDTH):
        position = begin + start + lane
        units, member = _load_members(grouping, order, position, position < end, id)
        offset = tl.where(member, units.value - pivot, 0.0)
        weighted = units.weight * offset
        members += member.to(tl.int32)
        if grouping.weights is not None:
            weight += tl.where(member, units.weight, 0.0)
        sum += weighted
        squares += weighted * offset
        if EXTREMES:
            least = tl.minimum(least, tl.where(member, units.value, float("inf")))
            greatest = tl.maximum(greatest, tl.where(member, units.value, float("-inf")))
    count = tl.sum(members, axis=1, keep_dims=True).to(tl.float64)
    total_weight = count
    if grouping.weights is not None:
        total_weight = tl.sum(weight, axis=1, keep_dims=True)
    return Group(
        pivot=pivot,
        members=count,
        weight=total_weight,
        sum=tl.sum(sum, axis=1, keep_dims=True),
        squares=tl.sum(squares, axis=1, keep_dims=True),
        least=tl.min(least, axis=1, keep_dims=True),
        greatest=tl.max(greatest, axis=1, keep_dims=True),
    )


@triton.jit
def center_of(group):
    """The mean minus the pivot; 0 without members."""
    return group.sum / tl.where(group.members > 0.0, group.weight, 1.0)


@triton.jit
def squares_of(group):
    """The sum of w (x - mean)^2."""
    return tl.maximum(group.squares - group.sum * center_of(group), 0.0)


@triton.jit
def sum_absolute(grouping, order, begin, length, id, group, WIDTH: tl.constexpr):
    """The sum of w |x - mean| over the members of ``group``."""
    ROWS: tl.constexpr = begin.shape[0] if id is None else id.shape[0]
    center = center_of(group)
    end = begin + length
    lane = tl.arange(0, WIDTH)[None, :]
    absolute = tl.zeros([ROWS, WIDTH], tl.float64)
    for start in range(0, tl.max(length), WIDTH):
        position = begin + start + lane
        units, member = _load_members(grouping, order, position, position < end, id)
        absolute += tl.where(member, units.weight * tl.abs((units.value - group.pivot) - center), 0.0)
    return tl.sum(absolute, axis=1, keep_dims=True)


@triton.jit
def run_of(sorted_ids, units):
    """The positions of this program ``[RUNS, 1]``, and the length of the run of equal ids that begins there, or 0."""
    begin = tl.program_id(0).to(tl.int64) * RUNS + tl.arange(0, RUNS)[:, None]
    id = tl.load(sorted_ids + begin, mask=begin < units, other=-1)
    previous = tl.load(sorted_ids + begin - 1, mask=(begin < units) & (begin > 0), other=0)
    continues = (begin < units) & ((begin == 0) | (id != previous))
    length = tl.zeros([RUNS, 1], tl.int64)
    searching = tl.max(continues.to(tl.int32))
    while searching > 0:
        position = begin + length + tl.arange(0, AT_ONCE)[None, :]
        here = continues & (position < units)
        here &= tl.load(sorted_ids + position, mask=here, other=-1) == id
        equal = tl.sum(here.to(tl.int64), axis=1, keep_dims=True)
        continues &= equal == AT_ONCE
        length += equal
        searching = tl.max(continues.to(tl.int32))
    return begin, length


# -------------------------------------------------------------------------------------------- all members as one group


@kernel
def _sum_tiles(
    sums,  # [tiles, FIELDS] float64
    values,
    ids,
    weights,
    mask,
    units: tl.int64,
    EXTREMES: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    begin = tl.zeros([1, 1], tl.int64) + program * TILE_UNITS
    length = tl.minimum(units - begin, TILE_UNITS)
    group = sum_group(Grouping(values, ids, weights, mask), None, begin, length, None, TILE_UNITS, EXTREMES)
    at = sums + program * FIELDS + tl.zeros([1, 1], tl.int32)
    for field in tl.static_range(FIELDS):
        tl.store(at + field, group[field])


@kernel
def _merge_tiles(
    sums,
    totals,  # [groupings, FIELDS] float64
    tiles: tl.int64,
):
    """The sum over all tiles of a grouping, relative to the pivot of the first tile with a member."""
    grouping = tl.program_id(0).to(tl.int64)
    sums += grouping * tiles * FIELDS
    lane = tl.arange(0, TILE_UNITS)[None, :].to(tl.int64)
    first = tl.zeros([1, TILE_UNITS], tl.int64) + tiles
    for start in range(0, tiles, TILE_UNITS):
        tile = start + lane
        members = tl.load(sums + tile * FIELDS + MEMBERS, mask=tile < tiles, other=0.0)
        first = tl.minimum(first, tl.where(members > 0.0, tile, tiles))
    first = tl.min(first, axis=1, keep_dims=True)
    pivot = tl.load(sums + first * FIELDS + PIVOT, mask=first < tiles, other=0.0)

    members = tl.zeros([1, TILE_UNITS], tl.float64)
    weight = tl.zeros([1, TILE_UNITS], tl.float64)
    sum = tl.zeros([1, TILE_UNITS], tl.float64)
    squares = tl.zeros([1, TILE_UNITS], tl.float64)
    least = tl.full([1, TILE_UNITS], float("inf"), tl.float64)
    greatest = tl.full([1, TILE_UNITS], float("-inf"), tl.float64)
    for start in range(0, tiles, TILE_UNITS):
        tile = start + lane
        exists = tile < tiles
        at = sums + tile * FIELDS
        tile_members = tl.load(at + MEMBERS, mask=exists, other=0.0)
        tile_weight = tl.load(at + WEIGHT, mask=exists, other=0.0)
        tile_sum = tl.load(at + SUM, mask=exists, other=0.0)
        shift = tl.where(tile_members > 0.0, tl.load(at + PIVOT, mask=exists, other=0.0) - pivot, 0.0)
        members += tile_members
        weight += tile_weight
        sum += tile_sum + tile_weight * shift
        squares += tl.load(at + SQUARES, mask=exists, other=0.0) + shift * (2.0 * tile_sum + tile_weight * shift)
        least = tl.minimum(least, tl.load(at + LEAST, mask=exists, other=float("inf")))
        greatest = tl.maximum(greatest, tl.load(at + GREATEST, mask=exists, other=float("-inf")))
    at = totals + grouping * FIELDS + tl.zeros([1, 1], tl.int32)
    tl.store(at + PIVOT, pivot)
    tl.store(at + MEMBERS, tl.sum(members, axis=1, keep_dims=True))
    tl.store(at + WEIGHT, tl.sum(weight, axis=1, keep_dims=True))
    tl.store(at + SUM, tl.sum(sum, axis=1, keep_dims=True))
    tl.store(at + SQUARES, tl.sum(squares, axis=1, keep_dims=True))
    tl.store(at + LEAST, tl.min(least, axis=1, keep_dims=True))
    tl.store(at + GREATEST, tl.max(greatest, axis=1, keep_dims=True))


@triton.jit
def load_all_members(totals):
    """The sums over all members, ``[1, 1]``."""
    at = totals + tl.zeros([1, 1], tl.int32)
    return Group(
        tl.load(at + PIVOT), tl.load(at + MEMBERS), tl.load(at + WEIGHT), tl.load(at + SUM), tl.load(at + SQUARES),
        tl.load(at + LEAST), tl.load(at + GREATEST),
    )  # fmt: skip


@kernel
def _sum_absolute_tiles(
    values,
    weights,
    mask,
    totals,
    absolute,  # [tiles] float64
    units: tl.int64,
):
    program = tl.program_id(0).to(tl.int64)
    begin = tl.zeros([1, 1], tl.int64) + program * TILE_UNITS
    length = tl.minimum(units - begin, TILE_UNITS)
    grouping = Grouping(values, None, weights, mask)
    total = sum_absolute(grouping, None, begin, length, None, load_all_members(totals), TILE_UNITS)
    tl.store(absolute + program + tl.zeros([1, 1], tl.int32), total)


@triton.jit
def add_absolute(absolute, tiles):
    """The sum over all tiles, ``[1, 1]``."""
    total = tl.zeros([1, TILE_UNITS], tl.float64)
    for start in range(0, tiles, TILE_UNITS):
        tile = start + tl.arange(0, TILE_UNITS)[None, :]
        total += tl.load(absolute + tile, mask=tile < tiles, other=0.0)
    return tl.sum(total, axis=1, keep_dims=True)


# --------------------------------------------------------------------------------------------------------------- host


def few_blocks(units: int) -> tuple[int, int]:
    """The number of units of a program that scans, and the number that it reads together."""
    if INTERPRETED:  # redundant work costs less there than another program
        units = triton.next_power_of_2(units)
        return min(max(UNITS, units), 16 * UNITS), min(max(OTHERS, units), 16 * OTHERS)
    return UNITS, OTHERS


def all_members(groupings: Sequence[Grouping], extremes: bool = False) -> torch.Tensor:
    """The sums over all members, whatever their groups, ``[groupings, FIELDS]`` float64: a launch for each, and one."""
    units, count, device = groupings[0].x.numel(), len(groupings), groupings[0].x.device
    tiles = triton.cdiv(units, TILE_UNITS.value)
    sums = torch.empty((count, tiles, FIELDS.value), dtype=torch.float64, device=device)
    totals = torch.empty((count, FIELDS.value), dtype=torch.float64, device=device)
    for of_grouping, grouping in zip(sums, groupings, strict=True):
        launch(_sum_tiles, tiles, of_grouping, *grouping, units, EXTREMES=extremes)
    launch(_merge_tiles, count, sums, totals, tiles)
    return totals


def sum_absolute_tiles(grouping: Grouping, totals: torch.Tensor) -> torch.Tensor:
    """The sums of w |x - mean| over all members, by tile ``[tiles]`` float64."""
    units = grouping.x.numel()
    tiles = triton.cdiv(units, TILE_UNITS.value)
    absolute = torch.empty(tiles, dtype=torch.float64, device=grouping.x.device)
    launch(_sum_absolute_tiles, tiles, grouping.x, grouping.weights, grouping.mask, totals, absolute, units)
    return absolute
