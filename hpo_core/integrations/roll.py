"""ROLL: any gate of tokens, steps or trajectories, by the worker that its yaml names.

    actor_train: {worker_cls: hpo_core.integrations.roll.HPOActorWorker}

for RLVR and agents alike, with ``HPO_GATE="gspo(eps_low=3e-4, eps_high=4e-4)"`` in ``actor_train.system_envs``; without
it the gate is the one that the yaml describes. Shapes: ``B`` rows of a micro-batch, ``L`` tokens each.
"""

from __future__ import annotations

from typing import Any

import torch

try:
    from roll.pipeline.rlvr.actor_worker import ActorWorker  # type: ignore[import-not-found,unused-ignore]
    from roll.utils.train_infer_corrections import compute_train_infer_correction  # type: ignore[import-not-found,unused-ignore]
except ImportError as error:
    raise ImportError("hpo_core.integrations.roll needs ROLL 0.3 from github.com/alibaba/ROLL") from error

from .. import kl
from ..batch import PackedBatch
from ..checks import check
from ..gates import RatioGate
from ..metrics import FLAGS
from ..specs import Unit
from .micro_batch import fractions, padded_rows, sequence_clip, token_clip, token_loss, weights_of
from .served import check_gate, environment_gate_beside

__all__ = ["HPOActorWorker"]

# ROLL's own values; a field that holds them counts as not set.
_UNSET = {
    "pg_clip": 0.2, "use_pg_clip_range": False, "importance_sampling": "token", "ratio_type": "token",
    "dual_clip_loss": False,
}  # fmt: skip


class HPOActorWorker(ActorWorker):  # type: ignore[misc]
    """ROLL's worker of the actor with the loss of hpo_core. Masks, weights of samples and the correction of the sampler
    stay ROLL's."""

    def loss_func(self, data: Any, output_tensor: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        """The function that ROLL's strategy calls with a DataProto of a micro-batch and the logits: tensors ``[B, L]``,
        of which the log-probabilities have ``L - 1`` columns.

        Raises:
            ValueError: a gate that needs an input that ROLL does not give its loss; a field that the gate of
                ``HPO_GATE`` would silence.
        """
        config, rows = self.pipeline_config, data.batch
        gate = _gate(config)
        tokens, samples = data.meta_info["batch_num_tokens"], data.meta_info["global_valid_samples"]
        responses = rows["response_mask"][:, 1:] != 0
        logp = self.strategy.op_compute_log_probs(
            logits=output_tensor, input_ids=rows["input_ids"], attention_mask=rows["response_mask"]
        )
        old = self.get_old_log_probs_with_cache(data, logp)
        token_weight, kept, correction_metrics = self._correction(data, old, responses)
        # RLVR drops whole samples by a mask of its own, which it counts; agents have one, too, but train without it
        of_rlvr = "final_response_mask" in tokens
        mask_name = "final_response_mask" if of_rlvr else "response_mask"
        mask = (rows["final_response_mask"] != 0 if of_rlvr else responses) & kept
        sample_weights = None
        if getattr(config, "difficulty_loss_weight", False) or getattr(config, "length_loss_weight", False):
            sample_weights = self.compute_sample_weights(data, responses & kept)[:, None].expand_as(logp)
            token_weight = sample_weights if token_weight is None else token_weight * sample_weights
        batch = padded_rows(mask, gate)
        weights = weights_of(config.loss_agg_mode, batch, tokens[mask_name], samples[mask_name])
        has_kl = config.use_kl_loss and config.kl_loss_coef != 0
        out = token_loss(
            logp, old, rows["advantages"], batch, gate, weights,
            kl=kl.k3(config.kl_loss_coef) if has_kl else None, ref_logp=rows["ref_log_probs"] if has_kl else None,
            clamp_k3=True,
            token_weight=None if token_weight is None else token_weight.float(),
        )  # fmt: skip
        total = getattr(config, "rl_loss_coef", 1.0) * out.loss
        if config.entropy_loss_coef > 0:
            entropy = self.strategy.op_compute_entropy(logits=output_tensor, attention_mask=rows["response_mask"])
            entropy_mask = responses if of_rlvr else mask
            counts = (tokens["response_mask"], samples["response_mask"])
            shares = weights_of(config.loss_agg_mode, PackedBatch.from_padded(entropy_mask), *counts)
            bonus = (shares[:, None] * torch.where(entropy_mask, entropy, 0.0)).sum()
            total = total - config.entropy_loss_coef * bonus
        # ROLL averages a name over micro-batches and ranks unless it ends in @sum: parts over the counts of the step
        reported = fractions(out.metrics, gate)
        share = reported.pop("tokens") / float(tokens[mask_name])
        policy = float(out.metrics["loss"] - out.metrics["penalty"])
        logs_kl = has_kl and gate.penalty_coefficient == 0  # the gate's own penalty is not apart from it
        metrics = {
            "weighted_pg_loss" if sample_weights is not None else "pg_loss": policy,
            **({"kl_loss": (float(out.loss.detach()) - policy) / config.kl_loss_coef} if logs_kl else {}),
            "total_loss": float(total.detach()),
            "clipfrac": share * reported.pop("clipped"),  # by the sign of the advantage, as ROLL's of this name
            "policykl": -share * reported.pop("kl"),
            "hpo_dual_clipped": share * reported.pop("dual_clipped"),
            **{f"hpo_{name}": reported[name] for name in FLAGS},
        }
        return total, {**{f"actor/{name}@sum": value for name, value in metrics.items()}, **correction_metrics}

    def _correction(
        self, data: Any, old: torch.Tensor, responses: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor, dict[str, float]]:
        """The weights, if any, and the mask of ROLL's ``train_infer_correction``, ``[B, L - 1]``, and ROLL's metrics
        of it. Where ROLL computes old log-probabilities anew, it has corrected weights and masks before."""
        config, rows = self.pipeline_config, data.batch
        if config.enable_old_logprobs_recompute:
            weight, kept, metrics = rows["train_infer_is_weight"], torch.ones_like(responses), {}
        else:
            sampler = rows.get("infer_logprobs", old)
            weight, kept, metrics = compute_train_infer_correction(
                cfg=config.train_infer_correction,
                response_mask=responses.long(),
                old_log_probs=old,
                infer_log_probs=sampler if len(sampler) else old,
                global_valid_samples=data.meta_info["global_valid_samples"]["response_mask"],
                global_valid_tokens=data.meta_info["batch_num_tokens"]["response_mask"],
            )
        return weight if config.train_infer_correction.is_weight.enabled else None, kept != 0, metrics


def _gate(config: Any) -> RatioGate:
    """The gate of ``HPO_GATE``, or the gate that the yaml describes."""
    variant = getattr(getattr(config, "actor_train", None), "pg_variant", None)
    check(
        variant in (None, "ppo"),
        "actor_train.pg_variant: expected 'ppo' or none, got {!r}, which ROLL's ActorPGWorker reads and this worker "
        "does not; leave it out, and name a gate in HPO_GATE, such as cispo()",
        variant,
    )
    settings = {name: getattr(config, name, value) for name, value in _UNSET.items()}
    gate = environment_gate_beside("ROLL", settings, _UNSET)
    if gate is None:
        return _described(config)
    check_gate(gate, "ROLL", one_policy="ROLL keeps the sampler's log-probabilities to its own correction")
    return gate


def _described(config: Any) -> RatioGate:
    """The gate of the yaml: PPO's clip of tokens, of RLVR's sequences or of agents' segments. ROLL's dual clip is at
    ``1 + 2 pg_clip``."""
    bounds = (config.pg_clip_low, config.pg_clip_high) if config.use_pg_clip_range else (config.pg_clip,) * 2
    dual = 1 + 2 * config.pg_clip if config.dual_clip_loss else None
    if getattr(config, "importance_sampling", "token") == "seq":
        return sequence_clip(*bounds, dual)
    if getattr(config, "ratio_type", "token") == "segment":
        return sequence_clip(*bounds, dual, unit=Unit.STEP)
    return token_clip(*bounds, dual)
