"""ROLL: any gate of tokens, steps or trajectories, by the worker that its yaml names.

    actor_train: {worker_cls: hpo_core.integrations.roll.HPOActorWorker}

with ``HPO_GATE="gspo(eps_low=3e-4, eps_high=4e-4)"`` in ``actor_train.system_envs``; without it the gate is PPO's clip
as the yaml describes it. Shapes: ``B`` rows of a micro-batch, ``L`` tokens each.
"""

from __future__ import annotations

from typing import Any

import torch

try:
    from roll.pipeline.base_worker import ActorWorker  # type: ignore[import-not-found,unused-ignore]
except ImportError as error:
    raise ImportError("hpo_core.integrations.roll needs ROLL 0.3 from github.com/alibaba/ROLL") from error

from .. import gates, kl
from ..checks import check
from ..gates import RatioGate
from .micro_batch import check_gate, check_unread, fractions, padded_rows, token_loss, weights_of
from .named import told_gate

__all__ = ["HPOActorWorker"]

# ROLL's own values; a field that holds them counts as not set. Its examples set dual_clip_loss, whatever the loss.
_UNSET = {"pg_clip": 0.2, "use_pg_clip_range": False}


class HPOActorWorker(ActorWorker):  # type: ignore[misc]
    """ROLL's worker of the actor with the loss of hpo_core."""

    def loss_func(self, data: Any, output_tensor: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        """What ROLL's strategy calls with a DataProto of a micro-batch and the logits: tensors ``[B, L]``, of which the
        log-probabilities have ``L - 1`` columns.

        Raises:
            ValueError: a gate that needs what ROLL does not tell its loss; a bound that the gate of ``HPO_GATE`` would
                silence.
        """
        config, rows = self.pipeline_config, data.batch
        told = told_gate()
        gate = _described(config) if told is None else told
        if told is not None:
            check_unread(
                told, "ROLL", {name: getattr(config, name) for name in _UNSET}, _UNSET, " or take HPO_GATE away"
            )
        check_gate(gate, "ROLL")
        check(not gate.needs_rollout, "gate: {!r} corrects the sampler, whose log-probabilities ROLL keeps to its own "
              "correction; take the gate that it corrects", gate.name)  # fmt: skip
        mask = rows["response_mask"][:, 1:] != 0
        logp = self.strategy.op_compute_log_probs(
            logits=output_tensor, input_ids=rows["input_ids"], attention_mask=rows["response_mask"]
        )
        old = self.get_old_log_probs_with_cache(data, logp)
        batch = padded_rows(mask, gate)
        tokens = data.meta_info["batch_num_tokens"]["response_mask"]
        samples = data.meta_info["global_valid_samples"]["response_mask"]
        weights = weights_of(config.loss_agg_mode, batch, tokens, samples, mask.shape[-1])
        out = token_loss(
            logp, old, rows["advantages"], batch, gate, weights,
            kl=kl.k3(config.kl_loss_coef) if config.use_kl_loss else None,
            ref_logp=rows["ref_log_probs"] if config.use_kl_loss else None, clamp_k3=True,
        )  # fmt: skip
        total = out.loss
        if config.entropy_loss_coef > 0:
            entropy = self.strategy.op_compute_entropy(logits=output_tensor, attention_mask=rows["response_mask"])
            bonus = (weights[:, None] * torch.where(mask, entropy, 0.0)).sum()
            total = total - config.entropy_loss_coef * bonus
        seen = fractions(out.metrics, gate)
        names = {"clipped": "actor/ppo_ratio_clipfrac", "kl": "actor/policykl"}
        told_metrics = {names.get(name, f"actor/hpo_{name}"): value for name, value in seen.items() if name != "tokens"}
        return total, {"actor/pg_loss": float(out.loss.detach()), **told_metrics}


def _described(config: Any) -> RatioGate:
    """PPO's clip of the yaml; ROLL's dual clip is at ``1 + 2 pg_clip``."""
    bounds = (config.pg_clip_low, config.pg_clip_high) if config.use_pg_clip_range else (config.pg_clip,) * 2
    return gates.ppo_clip(*bounds, ratio_dual=1 + 2 * config.pg_clip if config.dual_clip_loss else None)
