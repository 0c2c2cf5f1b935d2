"""Statistics of scopes as tables that outlive the batch they were made of: fitted once per step, read per micro-batch.

A scope is a set of units (tokens, steps, rows) with equal ids. Ids are names: those of prompt groups, domains or
difficulty buckets mean the same in every micro-batch, so a table fitted on the whole optimiser step, over all ranks,
gives the same numbers for any way of cutting the step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed

from .. import ops
from ..arguments import examines
from ..batch import PackedBatch, as_batch
from ..checks import check, check_device, check_ids, check_shape, check_units, keeps_doubles
from ..distributed import spanning
from ..segments import GroupStatistics, statistics
from ..specs import OrderRule, Provenance
from .scopes import quantiles
from .signals import preset, read

LEAST_DIFFERENCE = 1e-10  # of numbers beside their size; those that are closer may differ by the rounding of their sums


class ScopeStatistics(NamedTuple):
    """The result of :func:`fit_scopes`: ``[K]`` in the order of scopes: one entry without ids; one for each of
    ``scopes``; else one per unit, and one more of the id 0, which may have no members.

    It pickles, and loads with ``weights_only=True``.
    """

    ids: torch.Tensor  # [K] int64, ascending; units of one scope have equal entries
    members: torch.Tensor  # [K] float64: units with a finite value
    mean: torch.Tensor  # [K] float64
    squares: torch.Tensor  # [K] float64: sum of (x - mean)^2
    least: torch.Tensor  # [K] float64
    greatest: torch.Tensor  # [K] float64

    @examines
    def at(self, ids: torch.Tensor | None = None) -> GroupStatistics:
        """The statistics of the scopes with these ids ``[U]``, or of the only scope, ``[1]``. A scope outside the table
        has no members, and zeros: also one that only other ranks have units of, unless it is 0 or one of ``scopes``.

        >>> table = fit_scopes(torch.tensor([1.0, 3.0, 8.0]), torch.tensor([5, 5, 2]))
        >>> table.at(torch.tensor([2, 5, 9])).mean
        tensor([8., 2., 0.], dtype=torch.float64)
        """
        numbers = self._asdict()
        check_units(ids=numbers.pop("ids"), **numbers)
        check(self.ids.numel() > 0, "state: expected the table that fit_scopes returned, got one without entries")
        if ids is None:
            count = self.ids.numel()
            check(
                count == 1, "state: expected the table of one scope, from fit_scopes without ids, got {} entries", count
            )
            ids = torch.zeros_like(self.ids)
        check_ids("ids", ids)
        check_device("ids", ids, self.ids.device, "the statistics")
        place = torch.searchsorted(self.ids, ids.to(torch.int64).contiguous())
        place = place.clamp(max=self.ids.numel() - 1)
        seen = self.ids[place] == ids
        members, mean, squares, least, greatest = (torch.where(seen, each[place].double(), 0.0) for each in self[1:])
        return GroupStatistics(members, members, mean, squares, least, greatest)

    def to(self, device: torch.device | str) -> ScopeStatistics:
        return ScopeStatistics(*(each.to(device) for each in self))


class PivotState(NamedTuple):
    """The result of :func:`fit_pivot`, each ``[1]`` float64; NaN where there was no entropy."""

    least: torch.Tensor
    pivot: torch.Tensor
    greatest: torch.Tensor
    deviation: torch.Tensor  # of log-entropies around the pivot's

    def to(self, device: torch.device | str) -> PivotState:
        return PivotState(*(each.to(device) for each in self))


torch.serialization.add_safe_globals([ScopeStatistics, PivotState])


def checked_pivot(state: PivotState, entropy: torch.Tensor) -> PivotState:
    """The state in float64, on the device of the entropies that it is used with."""
    check_units(**state._asdict())
    check_shape("least", state.least, (1,), "[1] (as fit_pivot returned it)")
    check_device("state.least", state.least, entropy.device, "entropy; use state.to(entropy.device)")
    return PivotState(*(each.detach().double() for each in state))


@examines
def fit_scopes(
    values: torch.Tensor,
    ids: torch.Tensor | None = None,
    *,
    scopes: int | None = None,
    mask: torch.Tensor | None = None,
    process_group: torch.distributed.ProcessGroup | None = None,
    backend: str | None = None,
) -> ScopeStatistics:
    """Count, mean, squares, least and greatest of the units of each scope.

    Args:
        values: ``[U]`` floating point, of tokens, steps or rows; a unit without a finite value is no member.
        ids: ``[U]`` int32 or int64, the scope of each unit; a negative id means none. None: one scope.
        scopes: the number C of scopes that ids name, 0 to C - 1, of which some may be empty: the table has an entry for
            each of these and no other, and a unit of another id is no member. Default: those of the units.
        mask: ``[U]`` bool, the members. Default: every unit.
        process_group: scopes span these ranks; every rank makes the call, also one without units. Without ``scopes``
            the table of a rank has the scopes of its own units and the id 0; with them it is that of all ranks.

    >>> fit_scopes(torch.tensor([1.0, 3.0])).at().mean
    tensor([2.], dtype=torch.float64)
    >>> fit_scopes(torch.tensor([1.0, 3.0]), torch.tensor([2, 0]), scopes=3).members
    tensor([1., 0., 1.], dtype=torch.float64)
    """
    check_units(values=values, ids=ids, mask=mask)
    check(scopes is None or scopes >= 1, "scopes: expected a count of at least 1, got {}", scopes)
    named = scopes is None or ids is not None
    check(named, "scopes: it is the number of scopes that ids name, but there are no ids; leave it out")
    # One more unit for each of the scopes, which is no member, gives them an entry on a rank without such units.
    own = torch.arange(1 if scopes is None else scopes, device=values.device)
    padded = torch.nn.functional.pad
    known = padded(values.detach(), (0, len(own)), value=torch.nan)
    ids, mask = None if ids is None else torch.cat((ids, own)), None if mask is None else padded(mask, (0, len(own)))
    groups = spanning(process_group, statistics, known, ids, mask=mask, backend=backend)
    fields = (groups.members, groups.mean, groups.squares, groups.least, groups.greatest)
    if ids is None or scopes is not None:
        return ScopeStatistics(own, *(each[-len(own) :].clone() for each in fields))
    names, order = ids.to(torch.int64).sort(stable=True)
    return ScopeStatistics(names, *(each[order] for each in fields))


@preset(Provenance.VERIFIED, per_token=False)
def fit_pivot(
    entropy: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    quantile: str | float = "0.8",
    *,
    process_group: torch.distributed.ProcessGroup | None = None,
    backend: str | None = None,
) -> PivotState:
    """Least, ``quantile`` (the nearest order statistic) and greatest of a step's entropies, for :func:`hapo`.

    Args:
        entropy: ``[T]`` in nats, clamped at 1e-8, because their logarithms are compared.
        process_group: the step spans these ranks.

    >>> state = fit_pivot(torch.tensor([0.1, 0.5, 2.0]), PackedBatch.from_lengths([3]), "0.5")
    >>> [round(number.item(), 4) for number in state]
    [0.1, 0.5, 2.0, 1.2264]
    """
    batch = as_batch(batch)
    signal = read(batch, entropy=entropy)
    clamped = torch.where(signal.usable, signal.values, torch.nan).clamp(min=1e-8).to(entropy.dtype)
    of_call = quantiles(
        clamped, batch, quantile, scope="call", rule=OrderRule.NEAREST, process_group=process_group, backend=backend
    )
    pivot = of_call.double()
    # Ratios to the pivot: kernels round logarithms to float32, which keeps little of the differences of near ones.
    logs = fit_scopes((clamped.double() / pivot).log(), process_group=process_group, backend=backend).at()
    ends = fit_scopes(clamped, process_group=process_group, backend=backend).at()
    around = logs.squares / logs.members + logs.mean.square()
    around = torch.where(ends.least < ends.greatest, around, 0.0)  # the pivot of float64 entropies is rounded
    none = logs.members == 0
    least, greatest = (torch.where(none, torch.nan, each) for each in (ends.least, ends.greatest))
    return PivotState(least, pivot, greatest, torch.where(none, torch.nan, around.sqrt()))


def means_of_segments(
    values: torch.Tensor, ids: torch.Tensor, count: int, members: torch.Tensor, backend: str | None
) -> torch.Tensor:
    """The mean over the members of each of ``count`` segments of this rank, ``[count]`` float64; NaN without members.

    Segments are places in the batch, which mean nothing on another rank, so their statistics never span ranks.
    """
    padded = torch.nn.functional.pad
    values = values if keeps_doubles(backend) else values.float()
    known = padded(values, (0, count)).contiguous()
    ids = torch.cat((ids, torch.arange(count, device=ids.device)))  # one more unit per segment, which is no member
    table = ops.group_statistics(known, ids, None, padded(members, (0, count)), backend)[:, values.numel() :]
    return torch.where(table[0] > 0, table[2], torch.nan)
