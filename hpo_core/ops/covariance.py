"""The terms of the covariance of advantages and log-probabilities, by which tokens are selected or drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..backends import resolve
from ..checks import check, check_dtype, check_shape
from ..specs import TokenDraw
from .library import check_offsets, check_operand, numbers_of, operator


def _check_covariance(*arguments: Any) -> None:
    logp, advantages, cu_seqlens, mask, old_logp, bounds, factor, offset, backend = arguments
    like = ("logp", logp)
    check(logp.dim() == 1, "logp: expected shape [T] (one per token), got {}", list(logp.shape))
    check_dtype("logp", logp, numbers_of(backend), "use logp.float()")
    check(advantages.dim() == 1, "advantages: expected shape [S] (one per row), got {}", list(advantages.shape))
    check_operand("advantages", advantages, logp.shape if cu_seqlens is None else advantages.shape, (logp.dtype,), like)
    check_offsets("cu_seqlens", cu_seqlens, like)
    if cu_seqlens is not None:
        check_shape("cu_seqlens", cu_seqlens, (advantages.shape[0] + 1,), "[S + 1] (advantages are [S])")
    check_operand("mask", mask, logp.shape, (torch.bool,), like)
    check_operand("old_logp", old_logp, logp.shape, (logp.dtype,), like)
    check(len(bounds) == 4, "bounds: expected four numbers (of terms and of log-ratios), got {}", len(bounds))
    for name, number in (("factor", factor), ("offset", offset)):
        check(0 <= number < 2**32, "{}: expected a number in [0, 2^32), got {}", name, number)


@operator(
    "covariance(Tensor logp, Tensor advantages, Tensor? cu_seqlens, Tensor? mask, Tensor? old_logp, float[] bounds, "
    "SymInt factor, SymInt offset, str backend) -> (Tensor keys, Tensor members)",
    lambda logp, *_: (torch.empty_like(logp), logp.new_empty(1, dtype=torch.int64)),
    _check_covariance,
)
def covariance(
    logp: torch.Tensor,
    advantages: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    mask: torch.Tensor | None,
    old_logp: torch.Tensor | None,
    bounds: Sequence[float],
    factor: int,
    offset: int,
    backend: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(A_t - mean A) (logp_t - mean logp)`` of the n members, ``[T]``, and n ``[1]`` int64. Members are the unmasked
    tokens where both are finite; others get -inf.

    ``advantages``: those of rows ``[S]``, and a token in no row is no member; without ``cu_seqlens`` those of tokens
    ``[T]``. The four after the mask are those of a :class:`~hpo_core.specs.TokenDraw`: with ``old_logp`` the tokens
    that may be drawn get pseudo-random numbers, all others -inf.
    """
    draw = TokenDraw(old_logp, tuple(bounds), factor, offset)
    result: tuple[torch.Tensor, torch.Tensor]
    result = resolve("covariance", logp, backend).covariance(logp, advantages, cu_seqlens, mask, draw)
    return result
