"""Entropy windows: windowed aggregates that never cross a row, and exact order statistics."""

from __future__ import annotations

import math

import torch

from ..specs import Boundary, Invalid, OrderRule, WindowAggregate
from .segments import row_of_token


def window_score(
    values: torch.Tensor,
    mask: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    first: int,
    last: int,
    boundary: Boundary,
    invalid: Invalid,
    aggregate: WindowAggregate = WindowAggregate.MEAN,
) -> torch.Tensor:
    """Aggregate of ``values`` over ``{t + first, ..., t + last}`` cut by the row of t, ``[T]``.

    -inf where the window is undefined or t is not valid (such a score is below every threshold); NaN where the value of
    a valid t is itself not finite. Values that are not finite count as invalid inside the windows of their neighbours.
    """
    if boundary is Boundary.CARRY:
        score = window_score(values, mask, cu_seqlens, first, last, Boundary.FULL, invalid, aggregate)
        return _carried(score, values.detach(), mask, cu_seqlens)
    values = values.detach()
    row = row_of_token(cu_seqlens, values.numel())
    inside = row >= 0 if mask is None else mask & (row >= 0)
    usable = inside & torch.isfinite(values)
    width = last - first + 1
    score = torch.full_like(values, -math.inf)
    offsets, rows, is_usable = cu_seqlens.tolist(), row.tolist(), usable.tolist()
    for t in inside.nonzero().flatten().tolist():
        if not is_usable[t]:
            score[t] = math.nan
            continue
        begin, end = offsets[rows[t]], offsets[rows[t] + 1]
        low, high = max(t + first, begin), min(t + last, end - 1)
        reaches_out = high - low + 1 < width
        window = slice(low, max(low, high + 1))  # a negative end would count from the last token
        chosen = values[window][usable[window]]
        if (boundary is Boundary.FULL and reaches_out) or chosen.numel() == 0:
            continue
        if invalid is Invalid.BREAK and chosen.numel() < high - low + 1:
            continue
        if aggregate is WindowAggregate.MAX:
            score[t] = chosen.max()
        elif aggregate is WindowAggregate.MIN:
            score[t] = chosen.min()
        else:
            terms = width if boundary is Boundary.ZERO else chosen.numel()
            score[t] = chosen.sum() / (terms if aggregate is WindowAggregate.MEAN else 1)
    return score


def _carried(
    score: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, cu_seqlens: torch.Tensor
) -> torch.Tensor:
    """The scores with those of valid tokens that are undefined replaced by the mean of the row's defined ones, or by
    the row's first value if none is defined."""
    row = row_of_token(cu_seqlens, values.numel())
    usable = torch.isfinite(values) if mask is None else mask & torch.isfinite(values)
    carried = score.clone()
    for each in row[row >= 0].unique().tolist():  # type: ignore[no-untyped-call]
        own = usable & (row == each)
        defined = score[own & torch.isfinite(score)]
        if own.any():
            value = defined.double().mean() if defined.numel() else values[own][0]
            carried[own & (score == -math.inf)] = value.to(score.dtype)
    return carried


def order_statistic(
    values: torch.Tensor,
    numerator: int,
    denominator: int,
    rule: OrderRule,
    mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x_(i)`` of the n finite scores in ascending order, ``i = rule(numerator (n - 1) / denominator)`` in exact
    integers. With ``cu_seqlens``, ``values`` belong to tokens, each its own score; without, they are scores.

    Returns the threshold ``[1]`` (NaN if n = 0) and ``[2]`` int64: n, and the number of NaN scores.
    """
    score = _scores(values, mask, cu_seqlens)
    population = score[torch.isfinite(score)].sort().values
    n = population.numel()
    counts = torch.tensor([n, int(score.isnan().sum())], device=score.device)
    if n == 0:
        return score.new_full((1,), math.nan), counts
    return population[rule.index(numerator, denominator, n)].reshape(1) + 0.0, counts  # + 0.0: -0 becomes +0


def select(
    values: torch.Tensor,
    threshold: torch.Tensor,
    strict: bool,
    mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """``score >= threshold`` (``strict``: ``>``), bool ``[T]``, for the scores of :func:`order_statistic`."""
    score = _scores(values, mask, cu_seqlens)
    return score > threshold if strict else score >= threshold


def select_top(
    values: torch.Tensor,
    numerator: int,
    denominator: int,
    rule: OrderRule,
    strict: bool,
    mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`order_statistic`, and the selection of :func:`select` with its threshold."""
    threshold, counts = order_statistic(values, numerator, denominator, rule, mask, cu_seqlens)
    return threshold, counts, select(values, threshold, strict, mask, cu_seqlens)


def _scores(values: torch.Tensor, mask: torch.Tensor | None, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """``values``, or :func:`window_score` of windows of one token, which have no boundary."""
    if cu_seqlens is None:
        return values
    return window_score(values, mask, cu_seqlens, 0, 0, Boundary.FULL, Invalid.SKIP)
