"""The terms of the covariance of advantage and log-probability, and a draw among tokens by their terms.

The definition is hpo_core/reference/covariance.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..specs import TokenDraw
from .launch import REGISTERS, aligned, kernel, launch, programs_for
from .math import LARGEST_FLOAT, clamp, is_finite
from .rows import TILE, any_broken, load, owners, places_of_tile, store

PROGRAMS = tl.constexpr(512)  # at least those of a sweep
SUMS = tl.constexpr(4)  # of a program: members, log-probabilities, advantages, and 1 if any row is broken


class Members(NamedTuple):
    """A tile of tokens, whose numbers are 0 unless they are members."""

    logp: tl.tensor
    advantage: tl.tensor
    valid: tl.tensor


@triton.jit
def _members(logp, advantages, cu_seqlens, mask, start, tokens, rows, broken, ALIGNED: tl.constexpr):
    token, whole = start + tl.arange(0, TILE), start + TILE <= tokens
    if cu_seqlens is None:
        place, valid = token, token < tokens
    elif broken:
        place = owners(cu_seqlens, rows, tokens, token)
        valid = place >= 0
    else:
        place, _, valid = places_of_tile(cu_seqlens, rows, tokens, start)
    if mask is not None:
        valid &= load(mask, token, tokens, whole, ALIGNED)
    x = load(logp, token, tokens, whole, ALIGNED)
    advantage = tl.load(advantages + place, mask=valid, other=0.0)
    valid &= is_finite(x) & is_finite(advantage)
    return Members(tl.where(valid, x, 0.0), tl.where(valid, advantage, 0.0), valid)


@kernel
def _sum_members(
    logp,
    advantages,
    cu_seqlens,  # or None: advantages are those of tokens
    mask,  # or None
    sums,  # [SUMS, PROGRAMS] float64
    tokens: tl.int64,
    rows: tl.int64,
    ALIGNED: tl.constexpr,
):
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    broken = any_broken(cu_seqlens, rows, tokens)
    count = tl.zeros([TILE], tl.int32)
    of_logp = tl.zeros([TILE], tl.float64)
    of_advantages = tl.zeros([TILE], tl.float64)
    for start in range(program * TILE, tokens, programs * TILE):
        tile_members = _members(logp, advantages, cu_seqlens, mask, start, tokens, rows, broken, ALIGNED)
        count += tile_members.valid.to(tl.int32)
        of_logp += tile_members.logp.to(tl.float64)
        of_advantages += tile_members.advantage.to(tl.float64)
    tl.store(sums + program, tl.sum(count).to(tl.float64))
    tl.store(sums + PROGRAMS + program, tl.sum(of_logp))
    tl.store(sums + 2 * PROGRAMS + program, tl.sum(of_advantages))
    tl.store(sums + 3 * PROGRAMS + program, broken.to(tl.float64))


@triton.jit
def _draw_of_place(token, factor, offset):
    """A pseudo-random number of the place of a token, no two of which are equal before they are rounded."""
    z = (token.to(tl.uint32) * factor.to(tl.uint32)) ^ offset.to(tl.uint32)
    z = (z ^ (z >> 16)) * 569420461
    z = (z ^ (z >> 15)) * 3545902487
    return (z ^ (z >> 15)).to(tl.int32, bitcast=True).to(tl.float32)


@kernel
def _write_keys(
    logp,
    advantages,
    cu_seqlens,
    mask,
    old_logp,  # or None: keys are terms
    sums,
    keys,
    members,
    tokens: tl.int64,
    rows: tl.int64,
    low: tl.float64,
    high: tl.float64,
    least: tl.float64,
    most: tl.float64,
    factor: tl.int64,
    offset: tl.int64,
    ALIGNED: tl.constexpr,
):
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    each = tl.arange(0, PROGRAMS)
    n = tl.sum(tl.load(sums + each, mask=each < programs, other=0.0))
    divisor = tl.maximum(n, 1.0)
    mean_logp = tl.sum(tl.load(sums + PROGRAMS + each, mask=each < programs, other=0.0)) / divisor
    mean_advantage = tl.sum(tl.load(sums + 2 * PROGRAMS + each, mask=each < programs, other=0.0)) / divisor
    broken = tl.load(sums + 3 * PROGRAMS) > 0.0
    if program == 0:
        tl.store(members, n.to(tl.int64))
    for start in range(program * TILE, tokens, programs * TILE):
        whole = start + TILE <= tokens
        token = start + tl.arange(0, TILE)
        tile_members = _members(logp, advantages, cu_seqlens, mask, start, tokens, rows, broken, ALIGNED)
        term = (tile_members.advantage.to(tl.float64) - mean_advantage) * (tile_members.logp.to(tl.float64) - mean_logp)
        if old_logp is None:
            has_key = tile_members.valid
            key = clamp(term, -LARGEST_FLOAT, LARGEST_FLOAT).to(tl.float32)
        else:  # PPO leaves the ratio as it is, and the term is between the bounds
            log_ratio = tile_members.logp.to(tl.float64) - load(old_logp, token, tokens, whole, ALIGNED).to(tl.float64)
            passes = tl.where(tile_members.advantage < 0.0, log_ratio >= least, log_ratio == log_ratio)
            passes &= (tile_members.advantage <= 0.0) | (log_ratio <= most)
            has_key = tile_members.valid & passes & (term > low) & (term < high)
            key = _draw_of_place(token, factor, offset)
        store(keys, token, tl.where(has_key, key, float("-inf")), tokens, whole, ALIGNED)


def covariance(
    logp: torch.Tensor,
    advantages: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    mask: torch.Tensor | None,
    draw: TokenDraw,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(A_t - mean A) (logp_t - mean logp)`` of the members, or numbers of those that may be drawn, ``[T]``, and how
    many members there are, ``[1]``."""
    old_logp, bounds, factor, offset = draw
    tokens, rows = logp.numel(), 0 if cu_seqlens is None else cu_seqlens.numel() - 1
    keys = torch.empty_like(logp)
    members = torch.empty(1, dtype=torch.int64, device=logp.device)
    sums = torch.empty((SUMS.value, PROGRAMS.value), dtype=torch.float64, device=logp.device)
    inputs, programs = (logp, advantages, cu_seqlens, mask), programs_for(tokens, TILE.value)
    is_aligned = aligned(logp, mask, old_logp)
    launch(_sum_members, programs, *inputs, sums, tokens, rows, ALIGNED=is_aligned)
    launch(
        _write_keys, programs, *inputs, old_logp, sums, keys, members, tokens, rows, *bounds, factor, offset,
        ALIGNED=is_aligned, maxnreg=REGISTERS,
    )  # fmt: skip
    return keys, members
