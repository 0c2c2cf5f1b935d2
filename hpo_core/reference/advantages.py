"""Group normalisation: one centred, scaled value per unit, from the statistics of its group."""

from __future__ import annotations

import torch

from ..specs import Center, EpsMode, GroupNormalisation, Scale

__all__ = ["group_normalise"]


def group_normalise(
    values: torch.Tensor,
    ids: torch.Tensor | None,
    mask: torch.Tensor | None,
    apply_mask: torch.Tensor | None,
    spec: GroupNormalisation,
) -> torch.Tensor:
    r"""``A_u = lambda (x_u - mean_g) / scale_g`` for every unit u of group g, ``[U]`` in the dtype of ``values``.

    Statistics run over members: units with ``mask``, ``id >= 0`` and a finite value. A unit receives an advantage if
    ``apply_mask`` (default: it is a member), its id is >= 0 and its value finite; every other unit gets 0.
    """
    values = values.detach()
    grouped = torch.isfinite(values) if ids is None else torch.isfinite(values) & (ids >= 0)
    member = grouped if mask is None else grouped & mask
    receives = member if apply_mask is None else grouped & apply_mask
    keys = torch.zeros(values.shape, dtype=torch.int64, device=values.device) if ids is None else ids

    batch_scale = _deviation(values[member], spec.ddof) if member.any() else values.new_zeros(())
    out = torch.zeros_like(values)
    for key in keys[receives].unique().tolist():  # type: ignore[no-untyped-call]
        in_group = keys == key
        members, receivers = values[member & in_group], in_group & receives
        out[receivers] = _group(values[receivers], member[receivers], members, batch_scale, spec)
    return out


def _group(
    x: torch.Tensor, is_member: torch.Tensor, members: torch.Tensor, batch_scale: torch.Tensor, spec: GroupNormalisation
) -> torch.Tensor:
    n = members.numel()
    if n == 0 or (n == 1 and not spec.keep_singletons):
        return torch.zeros_like(x)
    if n == 1:  # raw: centre 0, group scale 1
        scale = _guard(batch_scale if spec.scale is Scale.BATCH else torch.ones_like(batch_scale), spec)
        return torch.where(scale == 0, torch.zeros_like(x), x / scale)
    # Relative to a member: x - mean = (x - K) - (mean - K), so that identical values cancel exactly.
    pivot = members[0]
    centred = (x - pivot) - (members - pivot).mean()
    if spec.center is Center.LEAVE_ONE_OUT:  # a unit that is not a member has all members as its "others"
        centred = torch.where(is_member, centred * (n / (n - 1)), centred)
    scale = _guard(batch_scale if spec.scale is Scale.BATCH else _deviation(members, spec.ddof), spec)
    return torch.where((centred == 0) | (scale == 0), torch.zeros_like(centred), centred / scale)


def _deviation(members: torch.Tensor, ddof: int) -> torch.Tensor:
    """Standard deviation with ``ddof``; 0 where there are too few members."""
    n = members.numel()
    if n <= ddof:
        return members.new_zeros(())
    deviation = (members - members[0]) - (members - members[0]).mean()
    return (deviation.square().sum() / (n - ddof)).sqrt()


def _guard(scale: torch.Tensor, spec: GroupNormalisation) -> torch.Tensor:
    if spec.scale is Scale.NONE:
        return torch.ones_like(scale)
    if spec.eps_mode is EpsMode.ADD:
        return scale + spec.eps
    if spec.eps_mode is EpsMode.SQRT:
        return (scale.square() + spec.eps).sqrt()
    return scale.clamp(min=spec.eps)
