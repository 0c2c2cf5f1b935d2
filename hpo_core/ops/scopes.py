"""Order statistics of scopes, which are lists of segments, and selections of the k largest values of each."""

from __future__ import annotations

from typing import Any

import torch

from ..backends import resolve
from ..checks import check, check_dtype
from ..specs import OrderRule, Scopes
from .library import check_fraction, check_offsets, check_operand, numbers_of, operator

_TOKENS_OF_SEGMENT = 4096


def segments_of_call(cu_seqlens: torch.Tensor, tokens: int) -> torch.Tensor:
    """Offsets ``[N + 1]`` of segments of one length, which hold the tokens of all rows in their order.

    They are for a scope of all tokens, whose segments blocks and threads share. With rows as segments short rows would
    be visited one by one, and all would wait for the thread that has a long row.
    """
    begin = torch.arange(0, tokens + _TOKENS_OF_SEGMENT, _TOKENS_OF_SEGMENT, device=cu_seqlens.device)
    return begin.clamp(cu_seqlens[0], cu_seqlens[-1])


def _check_scopes(
    values: torch.Tensor,
    segments: torch.Tensor,
    scope_of_segment: torch.Tensor | None,
    scopes: int,
    mask: torch.Tensor | None,
    backend: str,
) -> None:
    check(values.dim() == 1, "values: expected shape [T] (one per token), got {}", list(values.shape))
    check_dtype("values", values, numbers_of(backend), "use values.float()")
    check_offsets("segments", segments, ("values", values))
    of_segments = (segments.shape[0] - 1,)
    check_operand("scope_of_segment", scope_of_segment, of_segments, (torch.int64,), ("values", values), "segments")
    check_operand("mask", mask, values.shape, (torch.bool,), ("values", values))
    if scope_of_segment is not None:
        check(scopes >= 0, "scopes: expected a count of at least 0, got {}", scopes)
    else:
        reason = "one per segment, as scope_of_segment is None"
        check(scopes == of_segments[0], f"scopes: expected {{}} ({reason}), got {{}}", of_segments[0], scopes)


def _check_values(values: torch.Tensor) -> None:
    check(
        values.numel() < 2**31,
        "values: expected fewer than 2^31 tokens, because kernels count the equal values of a scope in 32 bits, got "
        "{}; make several calls",
        values.numel(),
    )


def _listed(
    segments: torch.Tensor, scope_of_segment: torch.Tensor | None, scopes: int, uid: torch.Tensor | None
) -> Scopes:
    """The segments of each scope in the order of their uids. Sorts are stable: equal uids keep their order."""
    if scope_of_segment is None:
        return Scopes(segments)
    scope, order = scope_of_segment, None
    if uid is not None:
        order = torch.sort(uid, stable=True).indices
        scope = scope[order]
    scope, by_scope = torch.sort(scope, stable=True)
    begin = torch.searchsorted(scope, torch.arange(scopes + 1, device=scope.device))
    return Scopes(segments, by_scope if order is None else order[by_scope], begin)


def _check_quantiles(*arguments: Any) -> None:
    values, segments, scope_of_segment, scopes, numerator, denominator, rule, mask, backend = arguments
    check_fraction(numerator, denominator)
    check(
        rule != OrderRule.LINEAR or denominator <= 2**31,
        "denominator: expected at most 2^31 for an interpolation, got {}",
        denominator,
    )
    _check_scopes(values, segments, scope_of_segment, scopes, mask, backend)


def _quantiles_fake(values: torch.Tensor, _: Any, __: Any, scopes: int, *___: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return values.new_empty(scopes), values.new_empty((scopes, 2), dtype=torch.int64)


@operator(
    "order_statistics(Tensor values, Tensor segments, Tensor? scope_of_segment, SymInt scopes, int numerator, "
    "int denominator, int rule, Tensor? mask, str backend) -> (Tensor thresholds, Tensor counts)",
    _quantiles_fake,
    _check_quantiles,
)
def order_statistics(
    values: torch.Tensor,
    segments: torch.Tensor,
    scope_of_segment: torch.Tensor | None,
    scopes: int,
    numerator: int,
    denominator: int,
    rule: OrderRule,
    mask: torch.Tensor | None,
    backend: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The order statistic of the finite values of each scope, or for ``LINEAR`` the interpolation between two of them.

    ``segments``: offsets ``[N + 1]``; ``scope_of_segment``: ``[N]`` numbers in ``[0, scopes)``, others mean none. None:
    each segment is a scope. Returns the thresholds ``[C]`` and ``[C, 2]``: the numbers of finite values and of errors,
    which are NaN and +inf.
    """
    _check_values(values)
    run = resolve("scopes", values, backend).order_statistics
    listed = _listed(segments, scope_of_segment, scopes, None)
    is_linear = rule is OrderRule.LINEAR
    low, counts = run(values, listed, numerator, denominator, OrderRule.FLOOR if is_linear else rule, mask)
    if not is_linear:
        return low, counts
    high, _ = run(values, listed, numerator, denominator, OrderRule.CEIL, mask)
    return interpolated(low, high, counts[:, 0], numerator, denominator), counts


def interpolated(
    low: torch.Tensor, high: torch.Tensor, population: torch.Tensor, numerator: int, denominator: int
) -> torch.Tensor:
    """The value at the position ``numerator (n - 1) / denominator`` between its floor ``low`` and its ceiling ``high``;
    each ``[C]``. The position is exact, the value is computed in float64."""
    remainder = (numerator * (population - 1).clamp(min=0)) % denominator
    share = remainder.double() / denominator
    return (low.double() + (high.double() - low.double()) * share).to(low.dtype)


def _check_exact(*arguments: Any) -> None:
    values, segments, scope_of_segment, k, uid_of_segment, mask, backend = arguments
    check(k.dim() == 1, "k: expected shape [C] (one per scope), got {}", list(k.shape))
    check_operand("k", k, k.shape, (torch.int64,), ("values", values))
    _check_scopes(values, segments, scope_of_segment, k.shape[0], mask, backend)
    of_segments = (segments.shape[0] - 1,)
    check_operand("uid_of_segment", uid_of_segment, of_segments, (torch.int64,), ("values", values), "segments")


@operator(
    "select_exact(Tensor values, Tensor segments, Tensor? scope_of_segment, Tensor k, Tensor? uid_of_segment, "
    "Tensor? mask, str backend) -> Tensor",
    lambda values, *_: torch.empty_like(values, dtype=torch.bool),
    _check_exact,
)
def select_exact(
    values: torch.Tensor,
    segments: torch.Tensor,
    scope_of_segment: torch.Tensor | None,
    k: torch.Tensor,
    uid_of_segment: torch.Tensor | None,
    mask: torch.Tensor | None,
    backend: str | None,
) -> torch.Tensor:
    """The ``k[c]`` largest finite values of scope c, or all of them where there are fewer, bool ``[T]``; of equal
    values those with the smallest (uid of the segment, segment, position).

    ``segments``, ``scope_of_segment``: see :func:`order_statistics`; ``k``: ``[C]``; ``uid_of_segment``: ``[N]``,
    default: the order of the segments.
    """
    _check_values(values)
    listed = _listed(segments, scope_of_segment, k.shape[0], uid_of_segment)
    result: torch.Tensor = resolve("scopes", values, backend).select_exact(values, listed, k, mask)
    return result
