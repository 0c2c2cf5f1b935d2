"""TRL's own metrics of a loss, with TRL's own definitions. Shapes: ``B`` completions of ``L`` tokens."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..gates import Clip, Gamma, RatioGate
from ..specs import Head

__all__ = ["clip_bounds", "clip_metrics", "clipped_rows", "gamma_weights"]


def clip_bounds(gate: RatioGate) -> tuple[float, float] | None:
    """Log-ratio bounds whose crossing is counted: the lower for ``A < 0``, the upper for ``A > 0``. None: no clip."""
    clip = gate.token if not gate.levels else gate.level and gate.level.gate
    if not isinstance(clip, Clip):
        return None
    return math.log(clip.low[1]) if clip.low[1] > 0 else -math.inf, math.log(clip.high[0])


def clipped_rows(
    bounds: tuple[float, float],
    sequence_level: bool,
    log_ratio: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    counts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Clipped below, clipped above, and of how many, each ``[B]``; a sequence's ratio under one advantage is one."""
    if sequence_level:
        log_ratio = (torch.where(mask, log_ratio, 0.0).sum(1) / counts.clamp(min=1)).unsqueeze(1)
    low, high = log_ratio < bounds[0], log_ratio > bounds[1]
    if advantages.dim() == 2:
        low, high = low & mask & (advantages < 0), high & mask & (advantages > 0)
        return low.sum(1), high.sum(1), counts
    if sequence_level:
        low, high, counts = low.squeeze(1), high.squeeze(1), torch.ones_like(counts)
    else:
        low, high = (low & mask).sum(1), (high & mask).sum(1)
    return low * (advantages < 0), high * (advantages > 0), counts


def gamma_weights(gamma: Gamma, log_ratio: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The sum of VESPO's weights and their number ``[2]``: one per row, or per token where advantages differ."""
    log_w = torch.where(mask, log_ratio, 0.0).clamp(-20, 20).sum(1, keepdim=True).clamp(math.log(1e-8), 20).double()
    advantages = advantages if advantages.dim() == 2 else advantages[:, None]
    k, lam = (torch.where(advantages < 0, pair[1], pair[0]) for pair in (gamma.k, gamma.lam))
    phi = torch.exp(lam + k * log_w - lam * torch.exp(log_w))
    counted = mask if phi.shape == mask.shape else torch.ones_like(phi, dtype=torch.bool)
    return torch.stack([torch.where(counted, phi, 0.0).sum(), counted.sum().double()])


def clip_metrics(low: Any, high: Any, count: Any, head: Head) -> dict[str, float]:
    """TRL's keys from the counts of all rows (arrays on the host)."""
    rows, everything = count > 0, max(count.sum(), 1.0)
    low_mean, high_mean = float(low.sum() / everything), float(high.sum() / everything)
    if head is Head.SCORE:
        return {"cispo_clip_ratio": high_mean}
    return {
        "clip_ratio/low_mean": low_mean,
        "clip_ratio/low_min": float((low[rows] / count[rows]).min()) if rows.any() else math.nan,
        "clip_ratio/high_mean": high_mean,
        "clip_ratio/high_max": float((high[rows] / count[rows]).max()) if rows.any() else math.nan,
        "clip_ratio/region_mean": low_mean + high_mean,  # advantages of opposite sign: never both
    }
