"""The terms of the covariance of advantages and log-probabilities, by which tokens are selected or drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..backends import resolve
from ..checks import check, check_dtype
from ..specs import TokenDraw
from .library import check_operand, numbers_of, operator


def _check_covariance(*arguments: Any) -> None:
    logp, advantages, unit_of_token, mask, old_logp, bounds, factor, offset, backend = arguments
    like = ("logp", logp)
    check(logp.dim() == 1, "logp: expected shape [T] (one per token), got {}", list(logp.shape))
    check_dtype("logp", logp, numbers_of(backend), "use logp.float()")
    check(advantages.dim() == 1, "advantages: expected shape [U] (one per unit), got {}", list(advantages.shape))
    units = logp.shape if unit_of_token is None else advantages.shape
    check_operand("advantages", advantages, units, (logp.dtype,), like)
    check_operand("unit_of_token", unit_of_token, logp.shape, (torch.int32,), like)
    check_operand("mask", mask, logp.shape, (torch.bool,), like)
    check_operand("old_logp", old_logp, logp.shape, (logp.dtype,), like)
    check(len(bounds) == 4, "bounds: expected four numbers (of terms and of log-ratios), got {}", len(bounds))
    for name, number in (("factor", factor), ("offset", offset)):
        check(0 <= number < 2**32, "{}: expected a number in [0, 2^32), got {}", name, number)


@operator(
    "covariance(Tensor logp, Tensor advantages, Tensor? unit_of_token, Tensor? mask, Tensor? old_logp, float[] bounds, "
    "SymInt factor, SymInt offset, str backend) -> (Tensor keys, Tensor members)",
    lambda logp, *_: (torch.empty_like(logp), logp.new_empty(1, dtype=torch.int64)),
    _check_covariance,
)
def covariance(
    logp: torch.Tensor,
    advantages: torch.Tensor,
    unit_of_token: torch.Tensor | None,
    mask: torch.Tensor | None,
    old_logp: torch.Tensor | None,
    bounds: Sequence[float],
    factor: int,
    offset: int,
    backend: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(A_t - mean A) (logp_t - mean logp)`` of the n members, ``[T]``, and n ``[1]`` int64. Members are the unmasked
    tokens with a unit where both are finite; others get -inf.

    ``advantages``: ``[U]``, of units; ``unit_of_token``: ``[T]`` int32, numbers outside ``[0, U)`` mean none, None:
    each token is a unit. The four after the mask are those of a :class:`~hpo_core.specs.TokenDraw`: with ``old_logp``
    the tokens that may be drawn get pseudo-random numbers, all others -inf.
    """
    draw = TokenDraw(old_logp, tuple(bounds), factor, offset)
    result: tuple[torch.Tensor, torch.Tensor]
    result = resolve("covariance", logp, backend).covariance(logp, advantages, unit_of_token, mask, draw)
    return result
