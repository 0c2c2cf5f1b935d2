"""Counts of rows, statistics of groups, and scans along rows."""

from __future__ import annotations

import torch

from ..backends import resolve
from ..checks import check, check_dtype
from ..specs import Denominator
from .library import check_offsets, check_operand, numbers_of, operator


def _check_counted(mask: torch.Tensor | None, cu_seqlens: torch.Tensor, total_tokens: int, *_: object) -> None:
    check(total_tokens >= 0, "total_tokens: expected a count >= 0, got {}", total_tokens)
    check_offsets("cu_seqlens", cu_seqlens, ("cu_seqlens", cu_seqlens))
    check_operand("mask", mask, (total_tokens,), (torch.bool,), ("cu_seqlens", cu_seqlens), "total_tokens")


@operator(
    "row_counts(Tensor? mask, Tensor cu_seqlens, SymInt total_tokens, str backend) -> Tensor",
    lambda mask, cu_seqlens, *_: cu_seqlens.new_empty(cu_seqlens.shape[0] - 1),
    _check_counted,
)
def row_counts(
    mask: torch.Tensor | None, cu_seqlens: torch.Tensor, total_tokens: int, backend: str | None
) -> torch.Tensor:
    """Valid tokens of each row ``[S]`` int64."""
    result: torch.Tensor = resolve("segments", cu_seqlens, backend).row_counts(mask, cu_seqlens, total_tokens)
    return result


@operator(
    "row_weights(Tensor? mask, Tensor cu_seqlens, SymInt total_tokens, int denominator, float factor, str backend) "
    "-> Tensor",
    lambda mask, cu_seqlens, *_: cu_seqlens.new_empty(cu_seqlens.shape[0] - 1, dtype=torch.float32),
    _check_counted,
)
def row_weights(
    mask: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    total_tokens: int,
    denominator: Denominator,
    factor: float,
    backend: str | None,
) -> torch.Tensor:
    """``factor`` divided by the tokens or rows that count, ``[S]`` float32: row counts and weights in one call."""
    run = resolve("segments", cu_seqlens, backend).row_weights
    result: torch.Tensor = run(mask, cu_seqlens, total_tokens, denominator, factor)
    return result


@operator(
    "row_spans(Tensor mask, Tensor cu_seqlens, SymInt total_tokens, str backend) -> Tensor",
    lambda mask, cu_seqlens, *_: cu_seqlens.new_empty(2 * cu_seqlens.shape[0]),
    _check_counted,
)
def row_spans(mask: torch.Tensor, cu_seqlens: torch.Tensor, total_tokens: int, backend: str | None) -> torch.Tensor:
    """The first offset, each row's first valid token and the one after its last, and the last offset: ``[2 S + 2]``."""
    result: torch.Tensor = resolve("segments", cu_seqlens, backend).row_spans(mask, cu_seqlens, total_tokens)
    return result


def _check_statistics(
    values: torch.Tensor,
    ids: torch.Tensor | None,
    weights: torch.Tensor | None,
    mask: torch.Tensor | None,
    backend: str,
) -> None:
    check(values.dim() == 1, "values: expected shape [U] (one per unit), got {}", list(values.shape))
    check_dtype("values", values, numbers_of(backend), "use values.float()")
    check_operand("ids", ids, values.shape, (torch.int64,), ("values", values))
    check_operand("weights", weights, values.shape, numbers_of(backend), ("values", values))
    check_operand("mask", mask, values.shape, (torch.bool,), ("values", values))


@operator(
    "group_statistics(Tensor values, Tensor? ids, Tensor? weights, Tensor? mask, str backend) -> Tensor",
    lambda values, *_: values.new_empty((6, values.shape[0]), dtype=torch.float64),
    _check_statistics,
)
def group_statistics(
    values: torch.Tensor,
    ids: torch.Tensor | None,
    weights: torch.Tensor | None,
    mask: torch.Tensor | None,
    backend: str | None,
) -> torch.Tensor:
    """Statistics of the group of every unit ``[6, U]`` float64: count, weight, mean, squares, least, greatest."""
    result: torch.Tensor = resolve("segments", values, backend).group_statistics(values, ids, weights, mask)
    return result


def _check_scanned(values: torch.Tensor, gains: torch.Tensor, cu_seqlens: torch.Tensor, _: str) -> None:
    check(values.dim() == 1, "values: expected shape [U] (one per unit), got {}", list(values.shape))
    check_dtype("values", values, (torch.float64,), "use values.double()")
    check_operand("gains", gains, values.shape, (torch.float64,), ("values", values))
    check_offsets("cu_seqlens", cu_seqlens, ("values", values))


@operator(
    "recurrence(Tensor values, Tensor gains, Tensor cu_seqlens, str backend) -> Tensor",
    lambda values, *_: torch.empty_like(values),
    _check_scanned,
)
def recurrence(
    values: torch.Tensor, gains: torch.Tensor, cu_seqlens: torch.Tensor, backend: str | None
) -> torch.Tensor:
    """``y_i = x_i + g_i y_{i+1}`` from the end of every row to its start, ``[U]`` float64."""
    result: torch.Tensor = resolve("segments", values, backend).recurrence(values, gains, cu_seqlens)
    return result
