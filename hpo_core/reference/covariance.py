"""The terms of the covariance of advantage and log-probability, and a draw among the tokens with terms in a band."""

from __future__ import annotations

import math

import torch

from ..specs import TokenDraw
from .segments import row_of_token


def covariance(
    logp: torch.Tensor,
    advantages: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    mask: torch.Tensor | None,
    draw: TokenDraw,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(A_t - mean A) (logp_t - mean logp)`` of the n members, ``[T]``, at most the largest number of the dtype, and n
    ``[1]`` int64. Members are the unmasked tokens where both are finite; others get -inf. Advantages are those of rows
    ``[S]``, and a token in no row is no member; without ``cu_seqlens`` they are those of tokens.

    With a ``draw`` the tokens that may be drawn get the pseudo-random numbers of their places, rounded to float32, and
    all others -inf. These are members whose terms are between ``bounds[0]`` and ``bounds[1]``, and whose log-ratios are
    at least ``bounds[2]`` where ``A < 0`` and at most ``bounds[3]`` where ``A > 0``.
    """
    old_logp, (low, high, least, most), factor, offset = draw
    logp, advantages = logp.detach(), advantages.detach()
    places = torch.arange(logp.numel(), device=logp.device)
    unit = places if cu_seqlens is None else row_of_token(cu_seqlens, logp.numel())
    member = unit >= 0 if mask is None else (unit >= 0) & mask
    at = places[member]
    at = at[logp[at].isfinite() & advantages[unit[at]].isfinite()]
    x, a = logp[at].double(), advantages[unit[at]].double()
    terms = (a - a.mean()) * (x - x.mean())
    keys, members = torch.full_like(logp, -math.inf), at.new_full((1,), at.numel())
    if old_logp is None:
        largest = torch.finfo(logp.dtype).max
        keys[at] = terms.clamp(-largest, largest).to(logp.dtype)
        return keys, members
    log_ratio = x - old_logp[at].double()
    passes = torch.where(a < 0, log_ratio >= least, torch.where(a > 0, log_ratio <= most, ~log_ratio.isnan()))
    drawn = at[passes & (terms > low) & (terms < high)]
    keys[drawn] = draws_of_places(drawn, factor, offset).float().to(logp.dtype)
    return keys, members


def draws_of_places(places: torch.Tensor, factor: int, offset: int) -> torch.Tensor:
    """A pseudo-random number of 32 bits for each place, int64 both; no two places have the same."""
    bits = 2**32 - 1
    z = places * factor & bits ^ offset
    for shift, odd in ((16, 569420461), (15, 3545902487)):
        z = (z ^ z >> shift) * odd & bits
    z = z ^ z >> 15
    return z - (z >> 31 << 32)
