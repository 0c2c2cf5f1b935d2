"""Levels that reach beyond a call: segments that lie on several ranks, and aggregates from elsewhere.

Levels whose segments are named by ids (``step_ids``, ``trajectory_ids``, ``group_ids``, ``domain_ids``) span the ranks
of a process group: rows with equal ids form one segment, wherever they lie. Steps and rows without ids lie on one rank.
A rank knows a few integers of each segment, so adding those of all ranks has no order, and every rank sees the
same bits: one all-reduce for the sums of log-ratios, and two more for the gradient where a level hands any through its
aggregate.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch.distributed import ProcessGroup

from .arguments import check_group
from .batch import Hierarchy, PackedBatch
from .checks import check, check_device, examined, require_type
from .distributed import gather, place_of_own
from .reference.terms import EXPONENT_SATURATION
from .specs import Aggregate, LevelSpec, PolicyLossSpec, Routing, SegmentReduce, Unit

_FIXED_POINT = 2.0**32  # of Exchange.sums
_LARGEST = 2.0**62  # of an integer there


def has_ids(batch: PackedBatch, units: Collection[Unit]) -> bool:
    """Whether segments of some of these units have names, by which ranks know those that they share."""
    return any(batch.ids(unit) is not None for unit in units)


def exchange_of(
    batch: PackedBatch,
    spec: PolicyLossSpec,
    gate: str,
    units_of_gate: Collection[Unit],
    process_group: ProcessGroup | None,
    aggregates: Mapping[str, torch.Tensor] | None,
) -> SegmentExchange:
    """The exchange of one call; ``gate`` is a name for errors.

    Raises:
        ValueError, TypeError: nothing spans ranks, or aggregates that do not fit the levels of ``spec``.
    """
    asked, reason = "report", "'levels' is made of sums over the tokens of segments"
    if process_group is not None or aggregates is not None:
        asked = "aggregates" if process_group is None else "process_group"
        reason = "no process knows which of them others hold, too"
    for level in spec.levels:
        check(
            level.aggregate is not Aggregate.BALANCED,
            "{}: the level {!r} of the gate {!r} counts segments, and {}; take another aggregate than "
            "Aggregate.BALANCED",
            asked,
            level.unit.name.lower(),
            gate,
            reason,
        )
    units = tuple(level.unit for level in spec.levels)
    span = None
    if process_group is not None:
        check_group("process_group", process_group)
        if not has_ids(batch, units_of_gate):
            check(
                Unit.TRAJECTORY in units_of_gate,
                "process_group: no level and no correction of the gate {!r} spans ranks; drop it",
                gate,
            )
            raise ValueError(
                f"process_group: no level of the gate {gate!r} has ids, and without them a trajectory lies on one "
                f"rank; pass trajectory_ids= to PackedBatch, or drop it"
            )
        if has_ids(batch, units):
            span = _span_of(batch, units, process_group)
    given = [] if aggregates is None else _check_aggregates(batch, spec, gate, aggregates)
    return SegmentExchange(batch, span, given)


def reduce_over_ranks(batch: PackedBatch, unit: Unit, process_group: ProcessGroup) -> SegmentReduce | None:
    """The sums over all ranks of the segments of a correction over ``unit``; None where they lie on one."""
    if batch.ids(unit) is None:
        return None
    span = _span_of(batch, (unit,), process_group)

    def reduce(table: torch.Tensor, extremum: bool) -> None:
        span.reduce(table[None], torch.distributed.ReduceOp.MAX if extremum else torch.distributed.ReduceOp.SUM)

    return reduce


# ------------------------------------------------------------------------------------------------ over ranks


class _Span(NamedTuple):
    """The M segments of a rank of which other ranks have rows, too."""

    level: torch.Tensor  # [M] int64
    segment: torch.Tensor  # [M] int64 in [0, P)
    slot: torch.Tensor  # [M] int64 in [0, slots): the same on every rank that has the segment
    ranks: torch.Tensor  # [M] int64: how many have it
    slots: int
    group: ProcessGroup

    def reduce(self, table: torch.Tensor, op: Any = torch.distributed.ReduceOp.SUM) -> None:
        """Reduce each of these segments in ``[levels, P, n]`` over all ranks, in place."""
        if self.slots == 0:  # as every rank knows
            return
        nothing = 0 if op == torch.distributed.ReduceOp.SUM else _least(table.dtype)
        of_all = table.new_full((self.slots, table.shape[-1]), nothing)
        of_all[self.slot] = table[self.level, self.segment]
        torch.distributed.all_reduce(of_all, op, group=self.group)
        table[self.level, self.segment] = of_all[self.slot]


def _least(dtype: torch.dtype) -> float:
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def _span_of(batch: PackedBatch, units: tuple[Unit, ...], group: ProcessGroup) -> _Span:
    span = batch.once(_make_span, units, group, static=True)
    if span.slot.is_cuda:  # calls on any stream share these tensors, whose memory is free when no stream reads it
        for tensor in (span.level, span.segment, span.slot, span.ranks):
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return span


def _make_span(batch: PackedBatch, units: tuple[Unit, ...], group: ProcessGroup) -> _Span:
    """Gathers the names of all segments of all ranks: synchronises. Every rank raises alike."""
    own = _named_segments(batch, units)
    names = gather(own[:, 1:].contiguous(), group)
    every = torch.cat(names)
    _check_nested(torch.unique(every, dim=0), units)
    _, name, ranks = torch.unique(every[:, :3], dim=0, return_inverse=True, return_counts=True)
    shared = ranks > 1  # a rank names each of its segments once
    name = name[place_of_own(names, group)]
    kept = shared[name]
    slot = (shared.cumsum(0) - 1)[name]
    return _Span(own[kept, 1], own[kept, 0], slot[kept], ranks[name[kept]], int(shared.sum()), group)


def _named_segments(batch: PackedBatch, units: tuple[Unit, ...]) -> torch.Tensor:
    """``[n, 6]``: the segment on this rank, its level, the unit whose id names it, the id, and the same two of the next
    coarser segment, -1 where that has no name."""
    hierarchy = batch.hierarchy(units)
    nameless = torch.full_like(hierarchy.row, -1)
    coarser, tables = (nameless, nameless), [hierarchy.ancestors.new_empty(0, 6)]
    for level, unit in reversed([*enumerate(units)]):
        ids = _ids_of_leaves(batch, unit, hierarchy)
        if ids is None:
            coarser = (nameless, nameless)
            continue
        by = torch.full_like(ids, unit)
        for finer in (Unit.GROUP, Unit.TRAJECTORY):  # a finer segment in none is one by itself, on all its ranks
            of_finer = _ids_of_leaves(batch, finer, hierarchy)
            if finer < unit and of_finer is not None:
                ids, by = torch.where(ids < 0, of_finer, ids), by.masked_fill(ids < 0, finer)
        named = (ids >= 0) | (by == Unit.TRAJECTORY)  # a negative trajectory id is a name
        named &= hierarchy.end > hierarchy.begin  # a leaf without tokens adds nothing, and its ids may be any
        columns = (hierarchy.ancestors[level], torch.full_like(ids, level), by, ids, *coarser)
        tables.append(torch.stack(columns, 1)[named])
        coarser = (torch.where(named, by, -1), torch.where(named, ids, -1))
    names: torch.Tensor = torch.unique(torch.cat(tables), dim=0)
    return names


def _check_nested(names: torch.Tensor, units: tuple[Unit, ...]) -> None:
    """Check that no segment lies in two coarser ones. ``names``: distinct and in order, those of all ranks."""
    torn = (names[1:, :3] == names[:-1, :3]).all(1).nonzero()
    if torn.numel() == 0:
        return
    both = names[torn[0] + torch.arange(2, device=names.device)].tolist()
    level, by, name = both[0][:3]
    finer, coarser = Unit(by).name.lower(), units[level + 1].name.lower()
    one, other = (coarse if named_by == units[level + 1] else "none" for *_, named_by, coarse in both)
    raise ValueError(
        f"{coarser}_ids: expected one {coarser} for all of {finer} {name} on all ranks, got {one} and {other}; levels "
        f"nest, and equal ids of two ranks are one {finer}: mend the ids"
    )


def _ids_of_leaves(batch: PackedBatch, unit: Unit, hierarchy: Hierarchy) -> torch.Tensor | None:
    """``[P]``: the id that names the segment of each leaf."""
    ids = batch.ids(unit)
    if ids is None or unit is not Unit.STEP:
        return None if ids is None else ids[hierarchy.row]
    return ids[: hierarchy.row.numel()]  # none in a batch without rows, whose steps are no leaves


class _Reduced(torch.autograd.Function):
    """A sum over ranks, whose derivative is one, too: every rank's loss reads the sums of all ranks."""

    @staticmethod
    def forward(ctx: Any, table: torch.Tensor, span: _Span) -> torch.Tensor:
        ctx.span = span
        table = table.clone()
        span.reduce(table)
        return table

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _Reduced.apply(gradients[0], ctx.span), None  # type: ignore[no-untyped-call]


# --------------------------------------------------------------------------------------- aggregates from elsewhere


class _Given(NamedTuple):
    """Aggregates that replace those of a level."""

    level: int
    is_mean: bool
    values: torch.Tensor  # [P, 2] float64, by channel: of the numbers that segments add up; NaN: none is given

    def put(self, table: torch.Tensor, one: float) -> None:
        """Writes the sums of these aggregates into ``[levels, P, 3]``, as multiples of ``1 / one``."""
        size, own = table[self.level, :, :1].detach(), table[self.level, :, 1:]
        sums = self.values * one * (size.clamp(min=1) if self.is_mean else 1)
        sums = sums.nan_to_num().clamp(-_LARGEST, _LARGEST)
        sums = sums.to(table.dtype) if table.is_floating_point() else sums.round().to(table.dtype)
        table[self.level, :, 1:] = torch.where(self.values.isnan(), own, sums)


def _check_aggregates(
    batch: PackedBatch, spec: PolicyLossSpec, gate: str, aggregates: Mapping[str, torch.Tensor]
) -> list[_Given]:
    require_type(
        isinstance(aggregates, Mapping),
        "aggregates: expected a dict from the name of a level to a tensor, got {}",
        type(aggregates),
    )
    levels = {level.unit.name.lower(): index for index, level in enumerate(spec.levels)}
    given = []
    for name, values in aggregates.items():
        known = ", ".join(map(repr, levels)) or "none"
        check(name in levels, "aggregates: the gate {!r} has no level {!r}; its levels: {}", gate, name, known)
        index = levels[name]
        level = spec.levels[index]
        ids = batch.ids(level.unit)
        check(ids is not None, "aggregates: {!r} needs {}_ids in the batch", name, name)
        check(
            level.routing is Routing.STOPPED,
            "aggregates: the level {!r} of the gate {!r} carries gradient to its tokens, which another aggregate does "
            "not; build it with routing=Routing.STOPPED",
            name,
            gate,
        )
        values = examined(f"aggregates[{name!r}]", values, "of log-ratios")
        require_type(
            values.is_floating_point(), "aggregates[{!r}]: expected a tensor of log-ratios, got {}", name, values.dtype
        )
        fits = values.dim() == 2 and values.shape[0] == 2 if spec.split else values.dim() == 1
        shape = "[2, G], of positive and negative log-ratios (the gate has a split)" if spec.split else "[G]"
        check(fits, "aggregates[{!r}]: expected shape {}, got {}", name, shape, list(values.shape))
        check_device(f"aggregates[{name!r}]", values, batch.device, "the batch")
        check(not values.requires_grad, "aggregates[{!r}]: they are constants; pass them detached", name)
        units = tuple(level.unit for level in spec.levels)
        of_segment = batch.once(_ids_of_segments, units, index)
        given.append(_given(index, level, values, of_segment))
    return given


def _given(index: int, level: LevelSpec, values: torch.Tensor, of_segment: torch.Tensor) -> _Given:
    entries = values.shape[-1]
    if level.aggregate is Aggregate.LOG_MEAN_EXP:
        values = values.double().clamp(-EXPONENT_SATURATION, EXPONENT_SATURATION).expm1()
    by_channel = torch.nn.functional.pad(values.double().expand(2, entries), (0, 1), value=torch.nan)
    entry = torch.where((of_segment >= 0) & (of_segment < entries), of_segment, entries)
    return _Given(index, level.aggregate is not Aggregate.SUM, by_channel[:, entry].T)


def _ids_of_segments(batch: PackedBatch, units: tuple[Unit, ...], level: int) -> torch.Tensor:
    """``[P]``: the id of each segment of a level, -1 where there is none."""
    hierarchy = batch.hierarchy(units)
    ids = _ids_of_leaves(batch, units[level], hierarchy)
    assert ids is not None
    return torch.full_like(hierarchy.row, -1).scatter_(0, hierarchy.ancestors[level], ids)


# ------------------------------------------------------------------------------------------------------- of one call


class SegmentExchange:
    """A :class:`~hpo_core.specs.Exchange`: it adds the sums of other ranks, then puts given aggregates in their place.

    ``batch`` is that of the call; ``seen`` is the resulting table of sums, and the number of which they are multiples.
    """

    seen: tuple[torch.Tensor, float]

    def __init__(self, batch: PackedBatch, span: _Span | None, given: list[_Given]) -> None:
        self.batch = batch
        self._span = span
        self._given = given

    def total(self, table: torch.Tensor) -> torch.Tensor:
        """A new table ``[levels, P, n]``: the sum, for each segment, over the ranks that share it."""
        table = table.clone()
        if self._span is not None:
            self._span.reduce(table)
        return table

    def shares(self, like: torch.Tensor) -> torch.Tensor:
        """The part of each segment that is this rank's, ``[levels, P]`` as ``like``: 1 over the ranks that have it."""
        shares = torch.ones_like(like)
        if self._span is not None:
            shares[self._span.level, self._span.segment] = 1 / self._span.ranks.to(like.dtype)
        return shares

    def sums(self, table: torch.Tensor) -> None:
        if self._span is not None:
            self._span.reduce(table)
        for each in self._given:
            each.put(table, _FIXED_POINT)
        self.seen = table, 1 / _FIXED_POINT

    def largest(self, table: torch.Tensor) -> None:
        if self._span is not None:
            self._span.reduce(table, torch.distributed.ReduceOp.MAX)

    def aggregate_grad(self, table: torch.Tensor) -> None:
        if self._span is not None:
            self._span.reduce(table)

    def differentiable_sums(self, table: torch.Tensor) -> torch.Tensor:
        if self._span is not None:
            table = _Reduced.apply(table, self._span)  # type: ignore[no-untyped-call]
        if self._given:
            table = table.clone()
        for each in self._given:
            each.put(table, 1.0)
        self.seen = table.detach(), 1.0
        return table
