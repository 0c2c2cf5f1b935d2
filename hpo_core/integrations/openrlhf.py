"""OpenRLHF: its ``PolicyLoss`` with any gate of tokens, steps or trajectories.

    HPO_GATE="gspo(eps_low=3e-4, eps_high=4e-4)" python -m hpo_core.integrations.openrlhf ARGUMENTS

takes the arguments of ``openrlhf.cli.train_ppo_ray``. OpenRLHF has no registry of losses: its actor, in a Ray worker,
builds the class that ``openrlhf.trainer.ray.ppo_actor`` names ``PolicyLoss``. The launcher replaces that name in each
worker process, through Ray's own ``worker_process_setup_hook``.
Shapes: ``B`` rows of a micro-batch, ``L`` tokens each.
"""

from __future__ import annotations

import importlib
import math
from typing import Any

import torch

from .. import aggregation
from ..arguments import check_choice
from ..batch import PackedBatch
from ..checks import check
from ..gates import RatioGate
from .micro_batch import fractions, padded_rows, sequence_clip, token_clip, token_loss, warn_of_flags
from .named import environment_gate, named_gate
from .replaced import run_under_ray
from .served import check_environment_gate, check_gate, check_unread

__all__ = ["HPOPolicyLoss", "install", "launch"]

# OpenRLHF's own values; a flag that holds them counts as not set.
_UNSET = {"clip_eps_low": 0.2, "clip_eps_high": 0.2, "dual_clip": None, "policy_loss_type": "ppo"}

_HOOK = "hpo_core.integrations.openrlhf.install"


class HPOPolicyLoss(torch.nn.Module):
    """The loss in place of ``openrlhf.models.PolicyLoss``: the same constructor, the same call.

    ``HPO_GATE``, or :attr:`gate` set on the class, is the gate; without either it is the one that the flags describe.
    The flags ``loss_agg_mode`` and ``is_correction_*`` keep their meaning beside any gate.

    Raises:
        ValueError: a flag that the gate would silence; a gate that needs an input that OpenRLHF does not give.
    """

    gate: RatioGate | str | None = None

    def __init__(
        self,
        clip_eps_low: float = 0.2,
        clip_eps_high: float = 0.2,
        dual_clip: float | None = None,
        token_level_loss: bool = True,
        policy_loss_type: str = "ppo",
        is_correction_level: str = "off",
        is_correction_mode: str = "mask",
        is_correction_gating: str = "ratio",
        is_correction_threshold: Any = (0.5, 5.0),
    ) -> None:
        super().__init__()
        flags = {
            "clip_eps_low": clip_eps_low, "clip_eps_high": clip_eps_high, "dual_clip": dual_clip,
            "policy_loss_type": policy_loss_type,
        }  # fmt: skip
        gate = named_gate(self.gate) if self.gate is not None else environment_gate()
        self.per_token = token_level_loss
        self.anchors_sampler = False
        self.correction: tuple[str, str, str, float, float] | None = None
        if gate is not None:
            check_unread(gate, "OpenRLHF", flags, _UNSET, " or take HPO_GATE away")
        elif policy_loss_type == "gspo":
            gate = sequence_clip(clip_eps_low, clip_eps_high, dual_clip)
            self.per_token, self.anchors_sampler = False, is_correction_level != "off"
        else:
            check_choice("policy_loss_type", policy_loss_type, ("ppo", "gspo"))
            gate = token_clip(clip_eps_low, clip_eps_high, dual_clip)
        check_gate(gate, "OpenRLHF")
        _check_correction(is_correction_level, is_correction_mode, is_correction_gating, is_correction_threshold)
        check(
            not gate.needs_rollout,
            "gate: {!r} corrects by the sampler's log-probabilities, which OpenRLHF asks for under "
            "--algo.advantage.is_correction_level alone; set that beside a gate without a correction of its own",
            gate.name,
        )
        if is_correction_level != "off" and not self.anchors_sampler:
            low, high = is_correction_threshold
            self.correction = (is_correction_level, is_correction_mode, is_correction_gating, low, high)
        self.used = gate

    def forward(
        self,
        log_probs: torch.Tensor,
        old_log_probs: torch.Tensor,
        advantages: torch.Tensor,
        action_mask: torch.Tensor | None = None,
        rollout_log_probs: torch.Tensor | None = None,
        dp_size: int = 1,
        batch_num_tokens: float | None = None,
        global_batch_size: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """The function that OpenRLHF calls: all ``[B, L]``. Loss, clip fraction, KL, and with ``is_correction_*`` the
        KL to the sampler and the fraction that the correction drops."""
        gate = self.used
        mask = torch.ones_like(log_probs, dtype=torch.bool) if action_mask is None else action_mask != 0
        batch = padded_rows(mask, gate)
        weights = _weights(self.per_token, batch, batch_num_tokens, global_batch_size, dp_size)
        token_weight = sampler_kl = dropped = None
        if self.correction is not None or self.anchors_sampler:
            check(
                rollout_log_probs is not None,
                "rollout_log_probs: is_correction_* needs the sampler's log-probabilities, got none",
            )
        if self.correction is not None:
            assert rollout_log_probs is not None
            token_weight, sampler_kl, dropped = _corrected(self.correction, old_log_probs, rollout_log_probs, mask)
        anchor = old_log_probs
        if self.anchors_sampler:
            assert rollout_log_probs is not None
            anchor = rollout_log_probs
        out = token_loss(
            log_probs, anchor, advantages, batch, gate, weights, rollout_logp=rollout_log_probs,
            token_weight=token_weight,
        )  # fmt: skip
        reported = fractions(out.metrics, gate)
        warn_of_flags(reported)
        clipped, kl = torch.tensor([reported["clipped"], reported["kl"]], device=log_probs.device).unbind()
        if self.anchors_sampler:  # the name in OpenRLHF's log is the KL to the old policy
            kl = torch.where(mask, old_log_probs - log_probs.detach(), 0.0).sum() / mask.sum().clamp(min=1)
        return out.loss, clipped, kl, sampler_kl, dropped


def _check_correction(level: str, mode: str, gating: str, threshold: Any) -> None:
    """The checks of OpenRLHF's own constructor."""
    kinds = {"level": ("off", "token", "seq"), "mode": ("mask", "clip"), "gating": ("ratio", "binary_kl", "tv")}
    for (name, known), value in zip(kinds.items(), (level, mode, gating), strict=True):
        check_choice(f"is_correction_{name}", value, known)
    check(
        mode == "mask" or (level != "seq" and gating == "ratio"),
        "is_correction_mode: 'clip' is of the ratios of tokens, got is_correction_level={} and is_correction_gating={}",
        level,
        gating,
    )
    check(
        level == "off" or gating == "ratio" or threshold[0] <= 0,
        "is_correction_threshold: {!r} has an upper bound alone; give HIGH, got {}",
        gating,
        threshold,
    )


def _weights(
    per_token: bool, batch: PackedBatch, tokens: float | None, rows: float | None, ranks: float
) -> torch.Tensor:
    """OpenRLHF's counts are those of the step over its accumulation steps, and DeepSpeed averages over ranks."""
    if per_token:
        return aggregation.token_mean(batch, total=tokens, ranks=1 if tokens is None else ranks)
    return aggregation.seq_mean_token_mean(batch, total=rows, ranks=1 if rows is None else ranks)


def _corrected(
    correction: tuple[str, str, str, float, float], old: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The factor on each token that ``is_correction_*`` asks for, the KL to the sampler and the dropped fraction."""
    level, mode, gating, low, high = correction
    difference = torch.where(mask, old - rollout, 0.0).detach().float()
    tokens = mask.sum(-1, keepdim=True)
    if gating == "ratio":
        statistic = difference
    else:
        sampled, trained = (torch.where(mask, x, 0.0).float().exp().clamp(1e-6, 1 - 1e-6) for x in (rollout, old))
        if gating == "tv":
            statistic = (sampled - trained).abs()
        else:
            kept, others = sampled.log() - trained.log(), torch.log1p(-sampled) - torch.log1p(-trained)
            statistic = sampled * kept + (1 - sampled) * others
    if level == "seq":
        statistic = torch.where(mask, statistic, 0.0).sum(-1, keepdim=True) / tokens.clamp(min=1)
    if gating == "ratio":
        statistic = statistic.exp()
    else:
        low = -math.inf  # OpenRLHF writes 0, below which rounding takes divergences near 0
    outside = ~((statistic >= low) & (statistic <= high))  # NaN is outside
    factor = statistic.clamp(low, high) if mode == "clip" else torch.where(outside, 0.0, difference.exp())
    total = mask.sum().clamp(min=1)
    counted = tokens > 0 if level == "seq" else mask
    dropped = (outside & counted).sum() / counted.sum().clamp(min=1)
    return factor, -difference.sum() / total, dropped


def install() -> None:
    """Replaces the name in this process; Ray calls it in each of its workers."""
    models = importlib.import_module("openrlhf.models")
    actor = importlib.import_module("openrlhf.trainer.ray.ppo_actor")
    setattr(models, "PolicyLoss", HPOPolicyLoss)  # noqa: B010
    setattr(actor, "PolicyLoss", HPOPolicyLoss)  # noqa: B010


def launch() -> None:
    """OpenRLHF's own command line, whose Ray workers have the hook.

    Raises:
        ValueError: a gate that OpenRLHF cannot serve. The workers refuse one for which flags are missing, at the start
            of their first update.
    """
    check_environment_gate("OpenRLHF")
    run_under_ray("openrlhf.cli.train_ppo_ray", _HOOK)


if __name__ == "__main__":
    launch()
