"""Window scores, order statistics and selections by threshold."""

from __future__ import annotations

from typing import Any

import torch

from ..backends import resolve
from ..checks import check, check_dtype
from ..specs import INDEX_RULES, Boundary, Invalid, OrderRule, WindowAggregate
from .library import check_fraction, check_offsets, check_operand, numbers_of, operator


def _check_scores(
    values: torch.Tensor, mask: torch.Tensor | None, cu_seqlens: torch.Tensor | None, backend: str
) -> None:
    check(values.dim() == 1, "values: expected shape [T] (one per token), got {}", list(values.shape))
    check_dtype("values", values, numbers_of(backend), "use values.float()")
    check_operand("mask", mask, values.shape, (torch.bool,), ("values", values))
    check_offsets("cu_seqlens", cu_seqlens, ("values", values))


def _check_window(*arguments: Any) -> None:
    values, mask, cu_seqlens, first, last, boundary, _, aggregate, backend = arguments
    check(first <= last, "first: expected first <= last, got {} and {}", first, last)
    check(
        boundary != Boundary.ZERO or aggregate in (WindowAggregate.MEAN, WindowAggregate.SUM),
        "boundary: expected one without zeros outside for an extremum, got {}",
        boundary,
    )
    _check_scores(values, mask, cu_seqlens, backend)


@operator(
    "window_score(Tensor values, Tensor? mask, Tensor cu_seqlens, int first, int last, int boundary, int invalid, "
    "int aggregate, str backend) -> Tensor",
    lambda values, *_: torch.empty_like(values),
    _check_window,
)
def window_score(
    values: torch.Tensor,
    mask: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    first: int,
    last: int,
    boundary: Boundary,
    invalid: Invalid,
    aggregate: WindowAggregate,
    backend: str | None,
) -> torch.Tensor:
    window = (first, last, boundary, invalid, aggregate)
    result: torch.Tensor = resolve("entropy", values, backend).window_score(values, mask, cu_seqlens, *window)
    return result


def _check_quantile(*arguments: Any) -> None:
    values, numerator, denominator, rule, mask, cu_seqlens, backend = arguments
    check_fraction(numerator, denominator)
    check(rule in INDEX_RULES, "rule: expected one of an index (LINEAR is of order_statistics), got {}", rule)
    _check_scores(values, mask, cu_seqlens, backend)


def _order_statistic_fake(values: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return values.new_empty(1), values.new_empty(2, dtype=torch.int64)


@operator(
    "order_statistic(Tensor values, int numerator, int denominator, int rule, Tensor? mask, "
    "Tensor? cu_seqlens, str backend) -> (Tensor threshold, Tensor counts)",
    _order_statistic_fake,
    _check_quantile,
)
def order_statistic(
    values: torch.Tensor,
    numerator: int,
    denominator: int,
    rule: OrderRule,
    mask: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    backend: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The order statistic of scores, or with ``cu_seqlens`` of the values of tokens, each its own score."""
    result: tuple[torch.Tensor, torch.Tensor]
    run = resolve("entropy", values, backend).order_statistic
    result = run(values, numerator, denominator, rule, mask, cu_seqlens)
    return result


def _select_fake(values: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(values, dtype=torch.bool)


def _check_selected(*arguments: Any) -> None:
    values, threshold, _, mask, cu_seqlens, backend = arguments
    _check_scores(values, mask, cu_seqlens, backend)
    check_operand("threshold", threshold, (1,), (values.dtype,), ("values", values))


@operator(
    "select(Tensor values, Tensor threshold, bool strict, Tensor? mask, Tensor? cu_seqlens, str backend) -> Tensor",
    _select_fake,
    _check_selected,
)
def select(
    values: torch.Tensor,
    threshold: torch.Tensor,
    strict: bool,
    mask: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    backend: str | None,
) -> torch.Tensor:
    """Whether each score of :func:`order_statistic` is at or above the threshold ``[1]``; ``strict``: above it."""
    result: torch.Tensor = resolve("entropy", values, backend).select(values, threshold, strict, mask, cu_seqlens)
    return result


def _check_top(*arguments: Any) -> None:
    *quantile, _, mask, cu_seqlens, backend = arguments
    _check_quantile(*quantile, mask, cu_seqlens, backend)


@operator(
    "select_top(Tensor values, int numerator, int denominator, int rule, bool strict, Tensor? mask, "
    "Tensor? cu_seqlens, str backend) -> (Tensor threshold, Tensor counts, Tensor selected)",
    lambda values, *_: (*_order_statistic_fake(values), _select_fake(values)),
    _check_top,
)
def select_top(
    values: torch.Tensor,
    numerator: int,
    denominator: int,
    rule: OrderRule,
    strict: bool,
    mask: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    backend: str | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`order_statistic`, and the selection of :func:`select` with its threshold."""
    result: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    run = resolve("entropy", values, backend).select_top
    result = run(values, numerator, denominator, rule, strict, mask, cu_seqlens)
    return result
