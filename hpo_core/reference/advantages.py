"""Group normalisation: terms, each centred and scaled by the statistics of a grouping, combined per unit."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..specs import (
    Center,
    EpsMode,
    GroupInputs,
    GroupNormalisation,
    GroupStatistics,
    GroupTerm,
    Part,
    Presence,
    Scale,
    Share,
)
from .segments import group_statistics

# A function of values and ids, with weights= and mask=: see group_statistics.
Statistics = Callable[..., GroupStatistics]


def _statistics(
    values: torch.Tensor, ids: torch.Tensor | None, *, weights: torch.Tensor | None, mask: torch.Tensor
) -> GroupStatistics:
    return GroupStatistics(*group_statistics(values, ids, weights, mask))


def group_normalise(
    inputs: GroupInputs, spec: GroupNormalisation, statistics: Statistics = _statistics
) -> torch.Tensor:
    r"""``A_u = sum_m k_m(u) a_m(u)`` for every unit u, ``[U]`` in the dtype of the values; see :class:`~..specs.Share`.

    Statistics of a term run over its members: units with ``mask``, ``id >= 0``, a weight above 0 and a finite value. A
    unit receives a term if ``apply_mask`` (default: ``mask``), its id is >= 0 and its value finite; other units get 0.
    ``statistics``: another function for the same numbers, such as one over the units of all ranks.
    """
    total = torch.zeros_like(inputs.values[0], dtype=torch.float64)
    shares = torch.zeros_like(total)
    for index, term in enumerate(spec.terms):
        amount, share = _term(inputs, index, term, spec.share, statistics)
        weighed = term.coefficient * share
        total = total + torch.where(share > 0, weighed * amount, 0.0)
        shares = shares + weighed
    if spec.share is not Share.SUM:
        total = torch.where(shares > spec.share_least, total / (shares + spec.share_eps), 0.0)
    return total.to(inputs.values[0].dtype)


def _term(
    inputs: GroupInputs, index: int, term: GroupTerm, share: Share, statistics: Statistics
) -> tuple[torch.Tensor, torch.Tensor]:
    """The value of one term for every unit ``[U]``, and its share ``[U]``, which is 0 where the term is absent."""
    values, ids, weights = inputs.values[index].detach(), inputs.ids[index], inputs.weights[index]
    grouped = torch.isfinite(values) if ids is None else torch.isfinite(values) & (ids >= 0)
    counted = grouped if inputs.mask is None else grouped & inputs.mask
    receives = counted if inputs.apply_mask is None else grouped & inputs.apply_mask
    table = statistics(values, ids, weights=weights, mask=counted)

    # Relative to a member, identical values have no deviation, not even by rounding.
    centred = (values - table.least) - (table.mean - table.least)
    scale = torch.ones_like(centred)
    if term.scale is Scale.GROUP:
        scale = table.deviation(term.ddof)
    elif term.scale is Scale.BATCH:
        scale = statistics(values, None, weights=weights, mask=counted).deviation(term.ddof)
    elif term.scale is Scale.ABSOLUTE:
        scale = statistics(centred.abs(), ids, weights=weights, mask=counted).mean
    elif term.scale is Scale.MEAN:
        scale = table.mean
    elif term.scale is Scale.ROOT_MEAN:
        scale = table.mean.clamp(min=0).sqrt()
    if term.center is Center.LEAVE_ONE_OUT:  # a unit that is not a member has all members as its "others"
        own = torch.ones_like(centred) if weights is None else weights.double()
        others = table.weight - torch.where(counted & torch.isfinite(own) & (own > 0), own, 0.0)
        centred = centred * torch.where(others > 0, table.weight / others, 1.0)
    amount = _amount(values.double(), centred, scale, table, term)
    receives = receives & (table.members > 0)
    return torch.where(receives, amount, 0.0), torch.where(receives, _share(amount, table, term, share), 0.0)


def _amount(
    x: torch.Tensor, centred: torch.Tensor, scale: torch.Tensor, table: GroupStatistics, term: GroupTerm
) -> torch.Tensor:
    if term.part is Part.MEAN:
        return table.mean
    guarded = _guarded(scale, table.weight, term)
    undefined = guarded <= 0
    if term.scale in (Scale.MEAN, Scale.ROOT_MEAN):
        undefined = undefined | (scale <= 0)
    normalised = torch.where((centred == 0) | undefined, 0.0, centred / guarded)
    alone = torch.zeros_like(x)
    if term.keep_singletons:
        one = torch.ones_like(x)
        guarded = _guarded(scale if term.scale is Scale.BATCH else one, one, term)
        alone = torch.where(guarded > 0, x / guarded, 0.0)
    return torch.where(table.members == 1, alone, normalised)


def _guarded(scale: torch.Tensor, weight: torch.Tensor, term: GroupTerm) -> torch.Tensor:
    if term.scale is Scale.NONE:
        return scale
    return {
        EpsMode.ADD: scale + term.eps,
        EpsMode.SQRT: (scale.square() + term.eps).sqrt(),
        EpsMode.FLOOR: scale.clamp(min=term.eps),
        EpsMode.ADD_SHARE: scale + term.eps / weight,
    }[term.eps_mode]


def _share(amount: torch.Tensor, table: GroupStatistics, term: GroupTerm, share: Share) -> torch.Tensor:
    """The share before the coefficient; 0 where the term is absent."""
    if share is Share.SUM:
        return torch.ones_like(amount)
    size = {
        Share.EQUAL: torch.ones_like(amount),
        Share.COUNT: table.members,
        Share.DEVIATION: table.deviation(term.ddof),
    }[share]
    absent = torch.zeros_like(amount, dtype=torch.bool)
    if term.part is Part.NORMALISED and not term.keep_singletons:
        absent = table.members == 1
    if term.presence is Presence.SPREAD:
        absent = absent | (table.squares == 0)
    if term.presence is Presence.NONZERO:
        absent = absent | (amount == 0)
    return torch.where(absent, 0.0, size)
