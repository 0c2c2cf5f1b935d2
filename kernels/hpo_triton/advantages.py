"""Group normalisation: terms, each centred and scaled by the statistics of a grouping, combined per unit.

Up to SCANNED units take one launch: every program reads all units, without a sort, at no visible cost. More units are
processed term by term: they are sorted by group, once for each grouping, and each group is read as one run. For all
members as one group, also for the scale of the batch, sums of tiles are computed first.

The definition is hpo_core/reference/advantages.py; the arithmetic of one group follows csrc/include/hpo/advantages.h.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..specs import (
    MOST_TERMS,
    Center,
    EpsMode,
    GroupInputs,
    GroupNormalisation,
    GroupTerm,
    Part,
    Presence,
    Scale,
    Share,
)
from .groups import (
    AT_ONCE,
    RUNS,
    SCANNED,
    TILE_UNITS,
    Grouping,
    add_absolute,
    all_members,
    center_of,
    few_blocks,
    load_all_members,
    load_units,
    run_of,
    squares_of,
    sum_absolute,
    sum_absolute_tiles,
    sum_group,
)
from .launch import REGISTERS, kernel, launch
from .math import LARGEST_DOUBLE

LEAVE_ONE_OUT = tl.constexpr(int(Center.LEAVE_ONE_OUT))
NONE, GROUP, BATCH, ABSOLUTE, OF_MEAN = (
    tl.constexpr(int(scale)) for scale in (Scale.NONE, Scale.GROUP, Scale.BATCH, Scale.ABSOLUTE, Scale.MEAN)
)
ADD, SQRT, FLOOR = (tl.constexpr(int(mode)) for mode in (EpsMode.ADD, EpsMode.SQRT, EpsMode.FLOOR))
MEAN = tl.constexpr(int(Part.MEAN))
SPREAD, NONZERO = tl.constexpr(int(Presence.SPREAD)), tl.constexpr(int(Presence.NONZERO))
SUM, COUNT, DEVIATION = (tl.constexpr(int(share)) for share in (Share.SUM, Share.COUNT, Share.DEVIATION))


class Rule(NamedTuple):
    """The choices of a term that specialise a kernel."""

    center: int
    scale: int
    eps_mode: int
    part: int
    presence: int


class Rules(NamedTuple):
    """Before Triton 3.9 a kernel that gets a tuple of rules would not know the names of their fields."""

    of_terms: tuple[Rule, ...]


class Numbers(NamedTuple):
    ddof: tl.tensor
    eps: tl.tensor
    coefficient: tl.tensor
    keeps: tl.tensor  # 1: a group of one keeps its raw value


class Map(NamedTuple):
    """The map of a group for its units: ((x - pivot) - center) * slope + offset. With leave-one-out the first factor is
    also multiplied by weight / (weight - own weight)."""

    pivot: tl.tensor
    center: tl.tensor
    slope: tl.tensor
    offset: tl.tensor
    weight: tl.tensor  # 0: no leave-one-out
    share: tl.tensor  # 0: the term is absent for the group


class Shares(NamedTuple):
    """Sums over the terms of a unit so far."""

    total: tl.tensor
    shares: tl.tensor


@triton.jit
def _deviation(group, ddof):
    """Standard deviation; 0 with too few members."""
    defined = (group.members > 0.0) & (group.weight > ddof)
    return tl.sqrt(tl.where(defined, squares_of(group) / tl.where(defined, group.weight - ddof, 1.0), 0.0))


@triton.jit
def _slope(group, absolute, batch, single, numbers, RULE: tl.constexpr):
    """The factor of a deviation from the centre."""
    one = tl.full(group.weight.shape, 1.0, tl.float64)
    defined = one > 0.0
    weight = tl.where(single | (group.members == 0.0), one, group.weight)
    scale = one
    if RULE.scale == BATCH:
        scale = one * _deviation(batch, numbers.ddof)
    elif RULE.scale == GROUP:
        scale = tl.where(single, one, _deviation(group, numbers.ddof))
    elif RULE.scale == ABSOLUTE:
        scale = tl.where(single, one, absolute / weight)
    elif RULE.scale != NONE:
        mean = group.pivot + center_of(group)
        defined = single | (mean > 0.0)
        scale = tl.where(single, one, mean if RULE.scale == OF_MEAN else tl.sqrt(tl.maximum(mean, 0.0)))
    if RULE.scale != NONE:
        if RULE.eps_mode == ADD:
            scale += numbers.eps
        elif RULE.eps_mode == SQRT:
            scale = tl.sqrt(scale * scale + numbers.eps)
        elif RULE.eps_mode == FLOOR:
            scale = tl.maximum(scale, numbers.eps)
        else:
            scale += numbers.eps / weight
    # The factor is finite, so that 0 times it is 0.
    return tl.where(defined & (scale > 0.0), tl.minimum(one / tl.where(scale > 0.0, scale, one), LARGEST_DOUBLE), 0.0)


@triton.jit
def _share_of(group, silent, numbers, RULE: tl.constexpr, SHARE: tl.constexpr):
    size = tl.full(group.members.shape, 1.0, tl.float64)
    if SHARE == COUNT:
        size = group.members
    elif SHARE == DEVIATION:
        size = _deviation(group, numbers.ddof)
    if RULE.presence == SPREAD:
        silent |= group.squares == 0.0
    return tl.where(silent, 0.0, size)


@triton.jit
def _sums(grouping, order, begin, length, id, RULE: tl.constexpr, WIDTH: tl.constexpr):
    """The sums of groups, and their sum of w |x - mean| for Scale.ABSOLUTE."""
    group = sum_group(grouping, order, begin, length, id, WIDTH, False)
    absolute = group.sum
    if RULE.scale == ABSOLUTE:
        absolute = sum_absolute(grouping, order, begin, length, id, group, WIDTH)
    return group, absolute


@triton.jit
def _map_of(group, absolute, batch, numbers, RULE: tl.constexpr, SHARE: tl.constexpr):
    """``absolute``: the sum of w |x - mean|, ``batch``: the sums of all members, read only if the scale needs them."""
    zero = tl.zeros(group.weight.shape, tl.float64)
    single = group.members == 1.0
    silent = group.members == 0.0
    if RULE.part == MEAN:
        pivot, center, slope, weight = zero, zero, zero, zero
        offset = tl.where(silent, 0.0, group.pivot + center_of(group))
    else:
        silent |= group.members + numbers.keeps == 1.0
        slope = tl.where(silent, 0.0, _slope(group, absolute, batch, single, numbers, RULE))
        pivot = tl.where(single, 0.0, group.pivot)
        center = tl.where(single, 0.0, center_of(group))
        weight = tl.where(single, 0.0, group.weight) if RULE.center == LEAVE_ONE_OUT else zero
        offset = zero
    return Map(pivot, center, slope, offset, weight, _share_of(group, silent, numbers, RULE, SHARE))


@triton.jit
def _add_term(so_far, map, units, receives, numbers, RULE: tl.constexpr, SHARE: tl.constexpr):
    centred = (units.value - map.pivot) - map.center
    if RULE.center == LEAVE_ONE_OUT:  # for a unit that is not a member, the others are all members
        others = map.weight - units.weight  # rounding may make it 0
        centred *= tl.where(others > 0.0, map.weight / tl.where(others > 0.0, others, 1.0), 1.0)
    amount = centred * map.slope + map.offset
    size = tl.where(receives, map.share, 0.0) if SHARE != SUM else tl.where(receives, 1.0, 0.0).to(tl.float64)
    if SHARE != SUM and RULE.presence == NONZERO:
        size = tl.where(amount == 0.0, 0.0, size)
    weighed = numbers.coefficient * size
    return Shares(so_far.total + tl.where(size > 0.0, weighed * amount, 0.0), so_far.shares + weighed)


@triton.jit
def _no_terms(unit):
    zero = tl.zeros(unit.shape, tl.float64)
    return Shares(zero, zero)


@triton.jit
def _advantage(of_terms, share_eps, share_least, SHARE: tl.constexpr):
    total = of_terms.total
    if SHARE != SUM:
        present = of_terms.shares > share_least
        total = tl.where(present, total / tl.where(present, of_terms.shares + share_eps, 1.0), 0.0)
    return total.to(tl.float32) + 0.0  # never -0, also not for a total too small for a float


@triton.jit
def _receives(units, apply_mask, unit, exists):
    return units.counted if apply_mask is None else units.grouped & tl.load(apply_mask + unit, mask=exists, other=False)


# ---------------------------------------------------------------------------------------------------------- few units


@triton.jit
def _normalise_term(
    so_far, grouping, units, receives, begin, length, numbers, RULES: tl.constexpr, TERM: tl.constexpr,
    SHARE: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    RULE: tl.constexpr = RULES.of_terms[TERM]
    id = None if grouping.ids is None else units.id
    group, absolute = _sums(grouping, None, begin, length, id, RULE, TILE_UNITS if id is None else OTHERS)
    batch = group
    if RULE.scale == BATCH and id is not None:
        batch = sum_group(grouping, None, begin, length, None, TILE_UNITS, False)
    map = _map_of(group, absolute, batch, numbers, RULE, SHARE)
    return _add_term(so_far, map, units, receives, numbers, RULE, SHARE)


@kernel
def _normalise_few(
    advantages,
    values_0, values_1, values_2, values_3, values_4, values_5, values_6, values_7,  # by term, as ids and weights
    ids_0, ids_1, ids_2, ids_3, ids_4, ids_5, ids_6, ids_7,
    weights_0, weights_1, weights_2, weights_3, weights_4, weights_5, weights_6, weights_7,
    mask,
    apply_mask,
    units: tl.int64,
    share_eps: tl.float64,
    share_least: tl.float64,
    eps_0: tl.float64, eps_1: tl.float64, eps_2: tl.float64, eps_3: tl.float64,
    eps_4: tl.float64, eps_5: tl.float64, eps_6: tl.float64, eps_7: tl.float64,
    coefficient_0: tl.float64, coefficient_1: tl.float64, coefficient_2: tl.float64, coefficient_3: tl.float64,
    coefficient_4: tl.float64, coefficient_5: tl.float64, coefficient_6: tl.float64, coefficient_7: tl.float64,
    ddofs: tl.int64,  # a bit for each term, as in keeps
    keeps: tl.int64,
    RULES: tl.constexpr,
    SHARE: tl.constexpr,
    TERMS: tl.constexpr,
    UNITS: tl.constexpr,
    OTHERS: tl.constexpr,
):  # fmt: skip
    values = (values_0, values_1, values_2, values_3, values_4, values_5, values_6, values_7)
    ids = (ids_0, ids_1, ids_2, ids_3, ids_4, ids_5, ids_6, ids_7)
    weights = (weights_0, weights_1, weights_2, weights_3, weights_4, weights_5, weights_6, weights_7)
    eps = (eps_0, eps_1, eps_2, eps_3, eps_4, eps_5, eps_6, eps_7)
    coefficients = (
        coefficient_0, coefficient_1, coefficient_2, coefficient_3, coefficient_4, coefficient_5, coefficient_6,
        coefficient_7,
    )  # fmt: skip
    unit = tl.program_id(0) * UNITS + tl.arange(0, UNITS)[:, None]  # [UNITS, 1]; few units: 32 bits are enough
    exists = unit < units
    begin = tl.zeros([1, 1], tl.int32)
    length = begin + tl.cast(units, tl.int32)
    so_far = _no_terms(unit)
    for k in tl.static_range(TERMS):
        grouping = Grouping(values[k], ids[k], weights[k], mask)
        loaded = load_units(grouping, unit, exists)
        numbers = Numbers(
            tl.cast((ddofs >> k) & 1, tl.float64), eps[k], coefficients[k], tl.cast((keeps >> k) & 1, tl.float64)
        )
        receives = _receives(loaded, apply_mask, unit, exists)
        if tl.max(receives.to(tl.int32)) > 0:  # also a border: without it the compiler finishes all terms together
            so_far = _normalise_term(
                so_far, grouping, loaded, receives, begin, length, numbers, RULES, k, SHARE, OTHERS
            )
    tl.store(advantages + unit, _advantage(so_far, share_eps, share_least, SHARE), mask=exists)


# ---------------------------------------------------------------------------------------------- many units, by term


@triton.jit
def _apply_term(
    advantages, before, after, unit, exists, map, grouping, apply_mask, units, share_eps, share_least, numbers,
    RULE: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """Adds a term to the earlier terms of its receivers; after the last term, stores their advantages."""
    loaded = load_units(grouping, unit, exists)
    so_far = _no_terms(unit)
    if before is not None:
        so_far = Shares(
            tl.load(before + unit, mask=exists, other=0.0), tl.load(before + units + unit, mask=exists, other=0.0)
        )
    receives = _receives(loaded, apply_mask, unit, exists)
    so_far = _add_term(so_far, map, loaded, receives, numbers, RULE, SHARE)
    if after is not None:
        tl.store(after + unit, so_far.total, mask=exists)
        tl.store(after + units + unit, so_far.shares, mask=exists)
    else:
        tl.store(advantages + unit, _advantage(so_far, share_eps, share_least, SHARE), mask=exists)


@kernel
def _normalise_all_members(
    advantages,
    before,  # [2, U] float64, totals and shares of the earlier terms; None: this is the first term
    after,  # totals and shares with this term; None: this is the last term
    values,
    weights,
    mask,
    apply_mask,
    totals,
    absolute,  # [tiles]; None: not needed
    units: tl.int64,
    tiles: tl.int64,
    share_eps: tl.float64,
    share_least: tl.float64,
    ddof: tl.float64,
    eps: tl.float64,
    coefficient: tl.float64,
    keeps: tl.float64,
    RULE: tl.constexpr,
    SHARE: tl.constexpr,
):
    numbers = Numbers(ddof, eps, coefficient, keeps)
    group = load_all_members(totals)
    sum = group.sum
    if absolute is not None:
        sum = add_absolute(absolute, tiles)
    map = _map_of(group, sum, group, numbers, RULE, SHARE)
    unit = tl.program_id(0).to(tl.int64) * TILE_UNITS + tl.arange(0, TILE_UNITS)[None, :]
    grouping = Grouping(values, None, weights, mask)
    _apply_term(
        advantages, before, after, unit, unit < units, map, grouping, apply_mask, units, share_eps, share_least,
        numbers, RULE, SHARE,
    )  # fmt: skip


@kernel
def _normalise_runs(
    advantages,
    before,
    after,
    values,
    ids,
    weights,
    mask,
    apply_mask,
    sorted_ids,
    order,  # unit at each sorted position: groups are contiguous, their units in index order
    totals,  # sums of all members; None: not needed
    units: tl.int64,
    share_eps: tl.float64,
    share_least: tl.float64,
    ddof: tl.float64,
    eps: tl.float64,
    coefficient: tl.float64,
    keeps: tl.float64,
    RULE: tl.constexpr,
    SHARE: tl.constexpr,
):
    numbers = Numbers(ddof, eps, coefficient, keeps)
    grouping = Grouping(values, ids, weights, mask)
    begin, length = run_of(sorted_ids, units)
    group, absolute = _sums(grouping, order, begin, length, None, RULE, AT_ONCE)
    batch = group
    if totals is not None:
        batch = load_all_members(totals)
    map = _map_of(group, absolute, batch, numbers, RULE, SHARE)
    for start in range(0, tl.max(length), AT_ONCE):
        position = begin + start + tl.arange(0, AT_ONCE)[None, :]
        here = position < begin + length
        unit = tl.load(order + position, mask=here, other=0)
        _apply_term(
            advantages, before, after, unit, here, map, grouping, apply_mask, units, share_eps, share_least, numbers,
            RULE, SHARE,
        )  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- host


def group_normalise(inputs: GroupInputs, spec: GroupNormalisation) -> torch.Tensor:
    """``A_u = sum_m k_m(u) a_m(u)`` for every unit u, ``[U]`` float32; see :class:`~hpo_core.specs.Share`."""
    advantages = torch.empty_like(inputs.values[0])
    if advantages.numel() <= SCANNED:
        _normalise_at_once(inputs, spec, advantages)
    else:
        _normalise_by_term(inputs, spec, advantages)
    return advantages


def _normalise_at_once(inputs: GroupInputs, spec: GroupNormalisation, advantages: torch.Tensor) -> None:
    units, terms = advantages.numel(), spec.terms
    none, unused = [None] * (MOST_TERMS - len(terms)), [0.0] * (MOST_TERMS - len(terms))
    block, others = few_blocks(units)
    launch(
        _normalise_few, triton.cdiv(units, block), advantages, *inputs.values, *none, *inputs.ids, *none,
        *inputs.weights, *none, inputs.mask, inputs.apply_mask, units, spec.share_eps, spec.share_least,
        *(term.eps for term in terms), *unused, *(term.coefficient for term in terms), *unused,
        sum(term.ddof << k for k, term in enumerate(terms)),
        sum(int(term.keep_singletons) << k for k, term in enumerate(terms)),
        RULES=Rules(tuple(_rule(term) for term in terms)), SHARE=int(spec.share), TERMS=len(terms), UNITS=block,
        OTHERS=others, maxnreg=REGISTERS,
    )  # fmt: skip


def _normalise_by_term(inputs: GroupInputs, spec: GroupNormalisation, advantages: torch.Tensor) -> None:
    units, is_sum = advantages.numel(), len(spec.terms) > 1
    so_far = torch.empty((2, units), dtype=torch.float64, device=advantages.device) if is_sum else None
    groupings = [Grouping(*tensors, inputs.mask) for tensors in zip(*inputs[:3], strict=True)]
    wanted = [k for k, term in enumerate(spec.terms) if groupings[k].ids is None or term.scale is Scale.BATCH]
    totals = dict(zip(wanted, all_members([groupings[k] for k in wanted]), strict=True)) if wanted else {}
    sorted_by: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # terms share groupings
    for k, (grouping, term) in enumerate(zip(groupings, spec.terms, strict=True)):
        before, after = None if k == 0 else so_far, None if k + 1 == len(spec.terms) else so_far
        numbers = (
            spec.share_eps, spec.share_least, float(term.ddof), term.eps, term.coefficient, float(term.keep_singletons),
        )  # fmt: skip
        if grouping.ids is None:
            absolute = sum_absolute_tiles(grouping, totals[k]) if term.scale is Scale.ABSOLUTE else None
            tiles = triton.cdiv(units, TILE_UNITS.value)
            launch(
                _normalise_all_members, tiles, advantages, before, after, grouping.x, grouping.weights, grouping.mask,
                inputs.apply_mask, totals[k], absolute, units, tiles, *numbers, RULE=_rule(term),
                SHARE=int(spec.share), maxnreg=REGISTERS,
            )  # fmt: skip
            continue
        if id(grouping.ids) not in sorted_by:
            sorted_by[id(grouping.ids)] = torch.sort(grouping.ids, stable=True)
        launch(
            _normalise_runs, triton.cdiv(units, RUNS.value), advantages, before, after, *grouping, inputs.apply_mask,
            *sorted_by[id(grouping.ids)], totals.get(k), units, *numbers, RULE=_rule(term), SHARE=int(spec.share),
            maxnreg=REGISTERS,
        )  # fmt: skip


def _rule(term: GroupTerm) -> Rule:
    return Rule(int(term.center), int(term.scale), int(term.eps_mode), int(term.part), int(term.presence))
