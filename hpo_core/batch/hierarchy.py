"""The segments of a batch at every level, as kernels take them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from .. import ops
from ..checks import check
from ..specs import Denominator, Unit

if TYPE_CHECKING:
    from .packed import PackedBatch


class Hierarchy(NamedTuple):
    """P leaves: the steps if a level is finer than rows, else the rows."""

    begin: torch.Tensor  # [P] int64
    end: torch.Tensor  # [P] int64
    row: torch.Tensor  # [P] int64, the row of each leaf
    ancestors: torch.Tensor  # [levels, P] int64 in [0, P): the first leaf of the segment of each leaf at every level


class LeafTables(NamedTuple):
    """A Hierarchy as kernels take it."""

    begin: torch.Tensor | None = None  # None, and so are the next two: rows are the leaves
    end: torch.Tensor | None = None
    row: torch.Tensor | None = None
    ancestors: torch.Tensor | None = None  # None: every leaf is a segment at every level


ROWS_AS_LEAVES = LeafTables()


def hierarchy_of(batch: PackedBatch, units: tuple[Unit, ...]) -> Hierarchy:
    """The leaves of a batch and their segments at the levels ``units``; steps are leaves if they are a level."""
    # Kernels check leaves and read them again later; copies cannot be refilled in between.
    if Unit.STEP in units and batch.rows > 0:  # without rows every step is empty
        begin, end = (offsets.clone() for offsets in batch.step_ranges())
        row = row_at(batch, begin).clamp(max=batch.rows - 1)
    else:
        begin, end = batch.cu_seqlens[:-1].clone(), batch.cu_seqlens[1:].clone()
        row = torch.arange(batch.rows, device=batch.device)
    trajectory = torch.arange(batch.rows, device=batch.device) if batch.trajectories is None else batch.trajectories[0]
    segments = {Unit.TRAJECTORY: trajectory}
    if Unit.GROUP in units:
        segments[Unit.GROUP] = _named(batch, Unit.GROUP, trajectory)
    if Unit.DOMAIN in units:
        group = trajectory if batch.group_ids is None else first_of_each(_named(batch, Unit.GROUP, trajectory))
        segments[Unit.DOMAIN] = _named(batch, Unit.DOMAIN, group)
    leaf = torch.arange(begin.numel(), device=batch.device)
    step = first_ranges(batch) if Unit.STEP in units and batch.rows > 0 else leaf
    ancestors = [step if unit is Unit.STEP else first_of_each(segments[unit][row]) for unit in units]
    return Hierarchy(begin, end, row, torch.stack(ancestors) if units else leaf.new_empty((0, leaf.numel())))


def _named(batch: PackedBatch, unit: Unit, finer: torch.Tensor) -> torch.Tensor:
    """``[S]``: the ids; a negative one means none, and the next finer segment ``[S]`` is then one by itself."""
    ids, name = batch.ids(unit), unit.name.lower()
    check(
        ids is not None,
        "{0}_ids: the gate has a level or correction of {0}s, and the batch has none; pass {0}_ids [S] to PackedBatch",
        name,
    )
    assert ids is not None
    return alone_without(ids, finer)


def first_of_each(ids: torch.Tensor) -> torch.Tensor:
    """The index of the first occurrence of every id."""
    numbers, ranks, order = renumber(ids)
    return order[torch.searchsorted(ranks, numbers)]


def trajectories_of(batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    assert batch.trajectory_ids is not None
    row_trajectory, ranks, order = renumber(batch.trajectory_ids)
    start = torch.searchsorted(ranks, torch.arange(batch.rows + 1, device=batch.device))
    return row_trajectory, start, order


def renumber(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids as 0, 1, ... in the order of their values. Their number stays on the device: no synchronisation.

    Returns the new ids, the new ids in ascending order, and the stable order that sorts them, each ``[S]``.
    """
    ordered, order = torch.sort(ids, stable=True)
    ranks = (ordered.diff(prepend=ordered[:1]) != 0).cumsum(0)
    return torch.empty_like(ranks).scatter_(0, order, ranks), ranks, order


def alone_without(ids: torch.Tensor, finer: torch.Tensor | None = None) -> torch.Tensor:
    """The ids ``[S]``, in which a negative one means none: each place without an id gets a negative number of its own,
    or all places of one ``finer`` segment get the same, because that segment is then one by itself."""
    own = torch.arange(ids.numel(), device=ids.device) if finer is None else finer
    return torch.where(ids < 0, -1 - own, ids)


def first_ranges(batch: PackedBatch) -> torch.Tensor:
    """The first range with the step id of each range, ``[N]`` int64; one without a name or tokens is its own."""
    if batch.step_ids is None:
        return torch.arange(batch.num_steps or 0, device=batch.device)
    begin, end = batch.step_ranges()
    return first_of_each(alone_without(torch.where(begin < end, batch.step_ids, -1)))


def row_at(batch: PackedBatch, token: torch.Tensor) -> torch.Tensor:
    """The row of each of these tokens, int64; the number of rows for one behind the last. Empty rows hold no token."""
    return torch.searchsorted(batch.cu_seqlens[1:].contiguous(), token, right=True)


def rows_of_tokens(batch: PackedBatch) -> torch.Tensor:
    """:func:`row_at` of every token ``[T]``, int32, with which a gather takes half the time. A search for each token
    would take forty times as long."""
    tokens = batch.total_tokens
    # Offsets of a batch that nothing has validated may descend, and repetitions have to add up to T.
    ends = batch.cu_seqlens[1:].clamp(0, tokens).cummax(0).values
    lengths = ends.diff(prepend=ends.new_zeros(1), append=ends.new_full((1,), tokens))
    return torch.repeat_interleave(lengths, output_size=tokens).to(torch.int32)


def valid_tokens(batch: PackedBatch) -> torch.Tensor:
    inside = batch.once(rows_of_tokens) < batch.rows
    return inside if batch.mask is None else inside & batch.mask.reshape(-1)


def row_counts(batch: PackedBatch, chosen: torch.Tensor | None = None) -> torch.Tensor:
    """The valid tokens of each row, ``[S]`` int64; with a mask ``[T]`` the chosen ones among them."""
    return ops.row_counts(_counted(batch, chosen), batch.cu_seqlens, batch.total_tokens, None)


def row_weights(
    batch: PackedBatch, denominator: Denominator, factor: float, chosen: torch.Tensor | None = None
) -> torch.Tensor:
    """``factor`` divided by these counts or their sum, ``[S]`` float32, in one kernel."""
    mask = _counted(batch, chosen)
    return ops.row_weights(mask, batch.cu_seqlens, batch.total_tokens, denominator, factor, None)


def _counted(batch: PackedBatch, chosen: torch.Tensor | None) -> torch.Tensor | None:
    if chosen is None:
        return batch.mask
    return (chosen if batch.mask is None else chosen & batch.mask).contiguous()


def row_sums(values: torch.Tensor, batch: PackedBatch, backend: str | None = None) -> torch.Tensor:
    """The sum of values ``[T]`` over all tokens of each row, ``[S]`` float64, in a fixed order; of no tokens 0."""
    values = values.double()
    rest = ops.recurrence(values, torch.ones_like(values), batch.cu_seqlens, backend)  # from a token to the row's end
    first = torch.nn.functional.pad(rest, (0, 1))[batch.cu_seqlens[:-1].clamp(0, values.numel())]
    return torch.where(batch.cu_seqlens.diff() > 0, first, 0.0)


def spread_rows(values: torch.Tensor, batch: PackedBatch, nowhere: float) -> torch.Tensor:
    """Values of rows ``[S]`` at their tokens ``[T]``, ``nowhere`` outside all rows."""
    return torch.cat((values, values.new_full((1,), nowhere))).index_select(0, batch.once(rows_of_tokens))


def place_in_row(tokens: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """How many of these tokens, ``[T]`` bool, come before each token in its row; no number of use outside all rows."""
    before = torch.nn.functional.pad(tokens.cumsum(0), (1, 0))
    first = before[batch.cu_seqlens[:-1].clamp(0, tokens.numel())]
    return before[:-1] - spread_rows(first, batch, 0)


def of_row(values: torch.Tensor, row: torch.Tensor, nowhere: float) -> torch.Tensor:
    """Values of rows ``[S]`` at tokens ``[T]`` or steps ``[N]`` of these rows, ``nowhere`` at those of the row -1."""
    # The row -1 is the last place: a batch may have no rows at all.
    return torch.cat((values, values.new_full((1,), nowhere)))[row]
