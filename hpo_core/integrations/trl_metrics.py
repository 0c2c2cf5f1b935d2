"""The metrics of a loss that a trainer of TRL logs: TRL's own with TRL's own definitions, and ours.

Shapes: ``B`` completions of ``L`` tokens, ``P`` processes.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..batch import PackedBatch
from ..gates import Clip, Gamma, RatioGate
from ..level_metrics import LevelMetrics
from ..losses import PolicyLoss
from ..metrics import FLAGS, Metrics
from ..prepared import Report
from ..specs import Head
from .trl_inputs import advantages_of, log_ratio_of, mask_of

Bounds = tuple[torch.Tensor | None, torch.Tensor | None]  # low and high ratios [B, L]

# The metrics under "hpo_core/", those under "hpo_core/step/" and so on for each level, and those under
# "hpo_core/correction_0/" and so on.
_REPORTED = ("clip_fraction", "selected_fraction", "ratio_max", "effective_sample_size", *FLAGS)
_OF_LEVELS = ("segments", "ratio_mean", "kl_old_k3", "effective_sample_size")
_OF_CORRECTIONS = ("selected_fraction", "ratio_mean", "kl_old_k3", "effective_sample_size")


def reported(gate: RatioGate) -> Report:
    """The reports of a loss beside its metrics: levels, but for the one mean that has kernels of its own, and
    corrections."""
    asked = {"levels": len(gate.levels) > 0 and gate.level is None, "corrections": bool(gate.corrections)}
    return tuple(name for name, wanted in asked.items() if wanted)  # type: ignore[misc]


def observed_parts(
    out: PolicyLoss,
    gate: RatioGate,
    logps: torch.Tensor,
    batch: PackedBatch,
    inputs: dict[str, Any],
    bounds_of_tokens: Bounds | None,
) -> dict[str, torch.Tensor]:
    """The tensors that processes have to gather, flat, by name; the first is float64.

    ``bounds_of_tokens``: those of the call, in place of the gate's.
    """
    parts = {"vector": out.metrics.vector}
    if out.levels is not None:
        parts["levels"] = out.levels.table.flatten()
    parts |= {f"correction_{at}": each.vector for at, each in enumerate(out.corrections)}
    log_ratio, mask, advantages = log_ratio_of(logps, inputs), mask_of(inputs), advantages_of(inputs)
    bounds = _clip_bounds(gate, bounds_of_tokens or (None, None))
    if bounds is not None:
        clipped = _clipped_rows(bounds, gate.level is not None, log_ratio, advantages, mask, batch.row_counts)
        parts |= dict(zip(("low", "high", "count"), clipped, strict=True))
    weight = gate.levels[0].gate if gate.levels else None
    if isinstance(weight, Gamma):
        parts["phi"] = _gamma_weights(weight, log_ratio, advantages, mask)
    return parts


def penalty_sum(logps: torch.Tensor, inputs: dict[str, Any], corrected: bool) -> torch.Tensor:
    """The sum of K3 ``[1]``, times the ratio if TRL's ``use_bias_correction_kl`` has it ``corrected``."""
    s = logps - inputs["ref_per_token_logps"]
    k = torch.exp(-s) - 1 + s
    k = k * torch.exp(log_ratio_of(logps, inputs)) if corrected else k
    return torch.where(mask_of(inputs), k, 0.0).sum().reshape(1)


def logged_metrics(seen: dict[str, torch.Tensor], out: PolicyLoss, gate: RatioGate) -> dict[str, float]:
    """The values to log, by key, from the parts of all processes ``[P, size]`` on the host."""

    def total(name: str) -> dict[str, float]:
        return sum((Metrics(vector) for vector in seen[name][1:]), Metrics(seen[name][0])).compute()

    ours = total("vector")
    entropy = ours["entropy"] if ours["tokens"] else 0.0  # as TRL logs the mean of nothing
    logged = {"entropy": entropy, **{f"hpo_core/{name}": ours[name] for name in _REPORTED}}
    if out.levels is not None:
        shape, rest = out.levels.table.shape, (out.levels.units, out.levels.split)
        levels = sum(LevelMetrics(table.view(shape), *rest) for table in seen["levels"])
        assert isinstance(levels, LevelMetrics)
        for unit, values in levels.compute().items():
            logged |= {f"hpo_core/{unit}/{name}": values[name] for name in _OF_LEVELS}
            logged[f"hpo_core/{unit}/clip_fraction"] = _beyond(values)
    for at in range(len(out.corrections)):
        values = total(f"correction_{at}")
        logged |= {f"hpo_core/correction_{at}/{name}": values[name] for name in _OF_CORRECTIONS}
    if "low" in seen:
        logged |= _clip_metrics(seen["low"].numpy(), seen["high"].numpy(), seen["count"].numpy(), gate.head)
    if "phi" in seen:
        total_weight, counted = seen["phi"].sum(0).tolist()
        logged["vespo/phi_seq_mean"] = total_weight / max(counted, 1.0)
    if "kl" in seen:
        logged["kl"] = float(seen["kl"].sum()) / max(ours["tokens"], 1.0)
    if "aux_loss" in seen:
        logged["aux_loss"] = float(seen["aux_loss"].mean())
    return logged


def _beyond(values: dict[str, float]) -> float:
    """The part of the residuals that the level's gate does not pass on, over advantages of both signs and channels."""
    inside = whole = 0.0
    for sign in ("positive", "negative"):
        of_channels = [each for name, each in values.items() if name.startswith(f"segment_fraction_pass_{sign}")]
        if number := values[f"segments_{sign}"]:
            whole, inside = whole + number, inside + number * sum(of_channels) / len(of_channels)
    return 1 - inside / whole if whole else math.nan


def _clip_bounds(gate: RatioGate, of_tokens: Bounds) -> tuple[float | torch.Tensor, float | torch.Tensor] | None:
    """Log-ratio bounds whose crossing is counted: the lower for ``A < 0``, the upper for ``A > 0``. None: no clip."""
    clip = gate.token if not gate.levels else gate.level and gate.level.gate
    if not isinstance(clip, Clip):
        return None
    (low, high), spec = of_tokens, gate.spec()
    of_gate = math.log(clip.low[1]) if clip.low[1] > 0 else -math.inf, math.log(clip.high[0])
    return (
        of_gate[0] if low is None or not spec.low_driven[1] else low.log(),
        of_gate[1] if high is None or not spec.high_driven[0] else high.log(),
    )


def _clipped_rows(
    bounds: tuple[float | torch.Tensor, float | torch.Tensor],
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


def _gamma_weights(gamma: Gamma, log_ratio: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The sum of VESPO's weights and their number ``[2]``: one per row, or per token where advantages differ."""
    log_w = torch.where(mask, log_ratio, 0.0).clamp(-20, 20).sum(1, keepdim=True).clamp(math.log(1e-8), 20).double()
    advantages = advantages if advantages.dim() == 2 else advantages[:, None]
    k, lam = (torch.where(advantages < 0, pair[1], pair[0]) for pair in (gamma.k, gamma.lam))
    phi = torch.exp(lam + k * log_w - lam * torch.exp(log_w))
    counted = mask if phi.shape == mask.shape else torch.ones_like(phi, dtype=torch.bool)
    return torch.stack([torch.where(counted, phi, 0.0).sum(), counted.sum().double()])


def _clip_metrics(low: Any, high: Any, count: Any, head: Head) -> dict[str, float]:
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
