"""The definition of the state of rows of logits over a part of the vocabulary, and of the gradient of a part."""

from __future__ import annotations

import torch

from ..specs import LogitRows


def part(rows: LogitRows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``m``, ``s``, ``w / (1 + s)`` and the target's logit ``[...]`` in float64, for the greatest logit m.

    ``d_j = (x_j - m) / temperature``, s is the sum of ``e^d`` over all other logits, and w the sum of ``-d e^d``.

    >>> import torch
    >>> rows = LogitRows(torch.tensor([[0.0, 1.0]]), torch.tensor([3]), None, 1.0, -100, None, 2, 9)
    >>> part(rows)[0], part(rows)[3]
    (tensor([1.], dtype=torch.float64), tensor([1.], dtype=torch.float64))
    """
    x, column = _read(rows), torch.arange(rows.logits.shape[-1], device=rows.logits.device)
    top = x.argmax(-1, keepdim=True)
    m = x.gather(-1, top)
    is_nothing = m == -torch.inf
    d = torch.where((column == top) | is_nothing, 0.0, x - m) / _temperature(rows)
    e = torch.where((column == top) | is_nothing, 0.0, torch.exp(d))
    others = e.sum(-1)
    distance = (torch.where(torch.isinf(d), 0.0, -d) * e).sum(-1) / (1 + others)
    is_target = column == (rows.targets - rows.first)[..., None]
    logit = torch.where(is_target, x, -torch.inf).amax(-1)
    is_known = (rows.targets >= 0) & (rows.targets < rows.vocabulary)

    def result(values: torch.Tensor) -> torch.Tensor:
        values = torch.where(is_known & (m.squeeze(-1) < torch.inf), values, torch.nan)
        return torch.where(rows.targets == rows.ignore_index, 0.0, values)

    return result(m.squeeze(-1)), result(others), result(distance), logit


def part_gradient(
    rows: LogitRows, statistics: torch.Tensor, logp_gradient: torch.Tensor | None, entropy_gradient: torch.Tensor | None
) -> torch.Tensor:
    """``(a 1[j = y] - p_j (a + b (log p_j + H))) / temperature`` for the gradients a of logp and b of the entropy:
    ``log p + H = d + w / (1 + s)``; ``statistics``: m, s and ``w / (1 + s)`` of the whole rows. In float64."""
    m, s, *distance = (each.double().view(*rows.targets.shape, 1) for each in statistics)
    zeros = torch.zeros_like(m)
    a, b = (zeros if each is None else each.double()[..., None] for each in (logp_gradient, entropy_gradient))
    d = (_read(rows) - m) / _temperature(rows)
    p = torch.exp(d) / (1 + s)
    column = torch.arange(rows.first, rows.first + rows.logits.shape[-1], device=rows.logits.device)
    pull = torch.where(p > 0, p * (a + b * (torch.where(p > 0, d, 0.0) + (distance[0] if distance else zeros))), 0.0)
    pull = torch.where(p.isnan(), torch.nan, pull)
    gradient = (torch.where((column == rows.targets[..., None]) & (d > -torch.inf), a, 0.0) - pull) / _temperature(rows)
    is_counted = (rows.targets != rows.ignore_index)[..., None] & ((a != 0) | (b != 0) | m.isnan())
    return torch.where(is_counted, gradient, 0.0)


def _read(rows: LogitRows) -> torch.Tensor:
    return torch.where((rows.targets == rows.ignore_index)[..., None], 0.0, rows.logits.double())


def _temperature(rows: LogitRows) -> float | torch.Tensor:
    return rows.temperature if rows.temperatures is None else rows.temperatures.double()[..., None]
