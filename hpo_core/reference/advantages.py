"""Group normalisation: terms, each centred and scaled by the statistics of a grouping, put together per unit."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..specs import Center, EpsMode, GroupInputs, GroupNormalisation, GroupTerm, Part, Presence, Scale, Share

__all__ = ["group_normalise"]


def group_normalise(inputs: GroupInputs, spec: GroupNormalisation) -> torch.Tensor:
    r"""``A_u = sum_m k_m(u) a_m(u)`` for every unit u, ``[U]`` in the dtype of the values; see :class:`~..specs.Share`.

    Statistics of a term run over its members: units with ``mask``, ``id >= 0``, a weight above 0 and a finite value. A
    unit receives a term if ``apply_mask`` (default: ``mask``), its id is >= 0 and its value finite; other units get 0.
    """
    total = torch.zeros_like(inputs.values[0])
    shares = torch.zeros_like(total)
    for index, term in enumerate(spec.terms):
        amount, share = _term(inputs, index, term, spec.share)
        weighed = term.coefficient * share
        total = total + torch.where(share > 0, weighed * amount, 0.0)
        shares = shares + weighed
    if spec.share is Share.SUM:
        return total
    return torch.where(shares > spec.share_least, total / (shares + spec.share_eps), 0.0)


def _term(inputs: GroupInputs, index: int, term: GroupTerm, share: Share) -> tuple[torch.Tensor, torch.Tensor]:
    """What one term says of every unit ``[U]``, and its share ``[U]``: 0 where it says nothing."""
    values, ids, given_weights = inputs.values[index].detach(), inputs.ids[index], inputs.weights[index]
    weights = torch.ones_like(values) if given_weights is None else given_weights.to(values.dtype)
    keys = torch.zeros(values.shape, dtype=torch.int64, device=values.device) if ids is None else ids
    grouped = torch.isfinite(values) & (keys >= 0)
    counted = grouped if inputs.mask is None else grouped & inputs.mask
    member = counted & (weights > 0) & torch.isfinite(weights)
    receives = counted if inputs.apply_mask is None else grouped & inputs.apply_mask

    batch = _deviation(_table(values[member], weights[member]), term.ddof)
    amount, shares = torch.zeros_like(values), torch.zeros_like(values)
    for key in keys[receives].unique().tolist():  # type: ignore[no-untyped-call]
        members, receivers = member & (keys == key), receives & (keys == key)
        table = _table(values[members], weights[members])
        if table.members == 0:
            continue
        own = torch.where(member, weights, 0.0)[receivers]
        amount[receivers] = _amount(values[receivers], own, table, batch, term)
        shares[receivers] = _share(amount[receivers], table, term, share)
    return amount, shares


class _Table(NamedTuple):
    """Of the members of a group, relative to its first one, the pivot K: x - mean = (x - K) - (mean - K), so that
    identical values cancel exactly."""

    members: int
    weight: torch.Tensor  # W
    pivot: torch.Tensor
    center: torch.Tensor  # mean - K
    squares: torch.Tensor  # sum of w (x - mean)^2
    absolute: torch.Tensor  # sum of w |x - mean|


def _table(values: torch.Tensor, weights: torch.Tensor) -> _Table:
    zero = values.new_zeros(())
    if values.numel() == 0:
        return _Table(0, zero, zero, zero, zero, zero)
    weight, pivot = weights.sum(), values[0]
    center = (weights * (values - pivot)).sum() / weight
    deviations = (values - pivot) - center
    squares, absolute = (weights * deviations.square()).sum(), (weights * deviations.abs()).sum()
    return _Table(values.numel(), weight, pivot, center, squares, absolute)


def _deviation(table: _Table, ddof: int) -> torch.Tensor:
    """Standard deviation with ``ddof``; 0 where there are too few members."""
    if table.members == 0 or table.weight <= ddof:
        return torch.zeros_like(table.weight)
    return (table.squares / (table.weight - ddof)).sqrt()


def _amount(x: torch.Tensor, own: torch.Tensor, table: _Table, batch: torch.Tensor, term: GroupTerm) -> torch.Tensor:
    """``own``: the weights of the units themselves in the table, 0 where they are no members."""
    if term.part is Part.MEAN:
        return torch.zeros_like(x) + (table.pivot + table.center)
    if table.members == 1 and not term.keep_singletons:
        return torch.zeros_like(x)
    if table.members == 1:
        one = torch.ones_like(batch)
        scale = _guarded(batch if term.scale is Scale.BATCH else one, one, term)
        return torch.where(scale > 0, x / scale, 0.0)
    centred = (x - table.pivot) - table.center
    if term.center is Center.LEAVE_ONE_OUT:  # a unit that is not a member has all members as its "others"
        others = table.weight - own
        centred = centred * torch.where(others > 0, table.weight / others, 1.0)
    scale = {
        Scale.NONE: torch.ones_like(batch),
        Scale.GROUP: _deviation(table, term.ddof),
        Scale.BATCH: batch,
        Scale.ABSOLUTE: table.absolute / table.weight,
        Scale.MEAN: table.pivot + table.center,
        Scale.ROOT_MEAN: (table.pivot + table.center).clamp(min=0).sqrt(),
    }[term.scale]
    scale = _guarded(scale, table.weight, term)
    return torch.where((centred == 0) | (scale <= 0), 0.0, centred / scale)


def _guarded(scale: torch.Tensor, weight: torch.Tensor, term: GroupTerm) -> torch.Tensor:
    if term.scale is Scale.NONE:
        return scale
    return {
        EpsMode.ADD: scale + term.eps,
        EpsMode.SQRT: (scale.square() + term.eps).sqrt(),
        EpsMode.FLOOR: scale.clamp(min=term.eps),
        EpsMode.ADD_SHARE: scale + term.eps / weight,
    }[term.eps_mode]


def _share(amount: torch.Tensor, table: _Table, term: GroupTerm, share: Share) -> torch.Tensor:
    """Before the coefficient; 0 where the term is not present."""
    if share is Share.SUM:
        return torch.ones_like(amount)
    silent = term.part is Part.NORMALISED and table.members == 1 and not term.keep_singletons
    if silent or (term.presence is Presence.SPREAD and table.squares == 0):
        return torch.zeros_like(amount)
    size = {
        Share.EQUAL: torch.ones_like(table.weight),
        Share.COUNT: torch.full_like(table.weight, table.members),
        Share.DEVIATION: _deviation(table, term.ddof),
    }[share]
    return torch.where(amount == 0, 0.0, size) if term.presence is Presence.NONZERO else size.expand(amount.shape)
