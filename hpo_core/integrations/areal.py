"""AReaL: the loss of its PPO actor with any gate of tokens, steps or trajectories, on its packed tensors as they are.

    from hpo_core.integrations.areal import HPOTrainer      # instead of areal.PPOTrainer

and ``HPO_GATE="gspo(eps_low=3e-4, eps_high=4e-4)"`` in the environment of the process that builds the trainer; without
it the gate is the one that the configuration describes. AReaL has no registry of losses: its actor looks
``grpo_loss_fn`` up in its own module at each update. The actors here are AReaL's with that name replaced in the process
that trains.

Shapes: ``T`` tokens of a micro-batch packed by ``cu_seqlens``, or padded ``[B, L]``. Place t belongs to token t + 1.
"""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

import torch

from .. import aggregation, gates
from ..arguments import check_choice
from ..batch import PackedBatch
from ..checks import check
from ..gates import RatioGate
from .micro_batch import fractions, packed_rows, padded_rows, sequence_clip, token_clip, token_loss
from .named import VARIABLE
from .replaced import replaced
from .served import check_environment_gate, check_gate, environment_gate_beside

__all__ = ["ACTORS", "grpo_loss_fn", "install"]

# The actors that stand here under their name with HPO in front, and where AReaL has them. Workers import them by path.
ACTORS = {
    "FSDPPPOActor": "areal.engine",
    "MegatronPPOActor": "areal.engine",
    "ArchonPPOActor": "areal.experimental.engine.archon_engine",
}

# AReaL's own values; a field that holds them counts as not set.
_UNSET = {
    "eps_clip": 0.2, "eps_clip_higher": None, "c_clip": None, "importance_sampling_level": "token",
    "use_sapo_loss": False,
}  # fmt: skip


def grpo_loss_fn(
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    input_data: dict[str, Any],
    eps_clip: float,
    eps_clip_higher: float | None,
    c_clip: float | None,
    rejection_sampling: Any = None,
    m2_threshold: float | None = None,
    importance_sampling_level: str = "token",
    current_version: int | None = None,
    prox_logp_method: str = "recompute",
    use_sapo_loss: bool = False,
    sapo_tau_pos: float = 1.0,
    sapo_tau_neg: float = 1.05,
    use_decoupled_loss: bool = False,
    vocab_min_logits: torch.Tensor | None = None,
    vocab_max_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """The function that AReaL's actor calls: the mean over the valid tokens of a micro-batch, which its engine weighs
    by their number. ``rejection_sampling``, ``m2_threshold`` and the proximal policy stay AReaL's, and so do its
    logs of these and of versions.

    Raises:
        ValueError: a field that the gate of ``HPO_GATE`` would silence; a gate that needs an input that AReaL does not
            give its loss; a teacher.
    """
    actor = importlib.import_module("areal.trainer.ppo.actor")
    fields = {
        "eps_clip": eps_clip, "eps_clip_higher": eps_clip_higher, "c_clip": c_clip,
        "importance_sampling_level": importance_sampling_level, "use_sapo_loss": use_sapo_loss,
    }  # fmt: skip
    check(
        input_data.get("teacher_logp") is None, "teacher_logp: no distillation beside hpo_core's loss; drop the teacher"
    )
    behaviour, mask, cu = input_data["logprobs"], input_data["loss_mask"].bool(), input_data.get("cu_seqlens")
    generated = mask
    proximal = actor._resolve_proximal_logp(
        prox_logp_gt=input_data.get("prox_logp"), prox_logp_method=prox_logp_method, old_logp=behaviour,
        logprobs=logprobs.detach(), versions=input_data.get("versions"), current_version=current_version,
    )  # fmt: skip
    if m2_threshold is not None:
        mask = actor._apply_m2po_masking(behaviour, proximal, mask, m2_threshold)
    override = environment_gate_beside("AReaL", fields, _UNSET)
    gate = _described(fields, sapo_tau_pos, sapo_tau_neg, use_decoupled_loss) if override is None else override
    # without the decoupled loss AReaL gives prox_logp and logprobs the same values
    coupled = "" if use_decoupled_loss else "with actor.use_decoupled_loss=false there is one old policy"
    check_gate(gate, "AReaL", one_policy=coupled)
    check(
        rejection_sampling is None or not gate.corrects_sampler,
        "actor.rejection_sampling: it and the gate {!r} correct the same difference; set it to null",
        gate.name,
    )
    token_weight, kept, trusted = None, mask, mask
    if rejection_sampling is not None and not use_sapo_loss:
        functional = importlib.import_module("areal.utils.functional.functional")
        rejection = functional.apply_rejection_sampling(
            proximal_logprobs=proximal, old_logprobs=behaviour, loss_mask=mask, cu_seqlens=cu, config=rejection_sampling
        )
        token_weight, kept = rejection.behave_imp_weight.float(), rejection.loss_mask.bool()
        trusted = kept & (token_weight > 0)
        actor.stats_tracker.denominator(unclipped_behave_tokens=trusted)
        actor.stats_tracker.stat(
            behave_imp_weight=token_weight, behave_approx_kl=torch.where(trusted, proximal - behaviour, 0.0).float(),
            denominator="unclipped_behave_tokens",
        )  # fmt: skip
        actor.stats_tracker.scalar(rs_filtered_fraction=rejection.filtered_fraction)
    rows = padded_rows if cu is None else functools.partial(packed_rows, cu)
    batch = rows(kept, gate, generated=generated)
    advantages, level = input_data["advantages"].float(), "token"
    if override is None and importance_sampling_level == "sequence":
        advantages, level = _row_means(advantages, kept, batch), "row"
    # AReaL's engine weighs micro-batches by their tokens before a rejection
    weights = aggregation.token_mean(batch, total=mask.sum(), ranks=1)
    anchor = behaviour if use_sapo_loss else proximal
    out = token_loss(
        logprobs, anchor, advantages, batch, gate, weights, rollout_logp=behaviour, token_weight=token_weight,
        advantage_level=level,
    )  # fmt: skip
    _log(actor, out, gate, logprobs.detach(), anchor, behaviour, entropy, mask, input_data)
    if vocab_min_logits is not None and vocab_max_logits is not None:
        actor.stats_tracker.stat(
            vocab_min_logits=vocab_min_logits, vocab_max_logits=vocab_max_logits, denominator="n_tokens"
        )
    versions = input_data.get("versions")
    actor._log_proximal_approximation_stats(
        prox_logp_method=prox_logp_method, prox_logp_gt=input_data.get("prox_logp"), old_logp=behaviour,
        logprobs=logprobs.detach(), versions=versions, current_version=current_version, compute_logp_mask=trusted,
    )  # fmt: skip
    if versions is not None and current_version is not None:
        actor._log_version_staleness_stats(
            versions=versions, current_version=current_version, version_metrics_mask=trusted
        )
    return out.loss


def _described(fields: dict[str, Any], positive: float, negative: float, decoupled: bool) -> RatioGate:
    """The gate that AReaL's configuration describes."""
    level, low, high = fields["importance_sampling_level"], fields["eps_clip"], fields["eps_clip_higher"]
    high = low if high is None else high
    check_choice("importance_sampling_level", level, ("token", "sequence"))
    if fields["use_sapo_loss"]:
        check(not decoupled, "use_decoupled_loss: SAPO has no proximal policy; set it to false")
        check(level == "token", "importance_sampling_level: hpo_core's SAPO is one of tokens; got {!r}", level)
        return gates.sapo(positive, negative)
    if level == "sequence":
        return sequence_clip(low, high, fields["c_clip"])
    return token_clip(low, high, fields["c_clip"])


def _row_means(advantages: torch.Tensor, mask: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """``[S]``: the advantage that AReaL's GSPO gives a sequence, the mean of its token advantages."""
    if advantages.dim() == 2:
        sums = torch.where(mask, advantages, 0.0).sum(1)
    else:
        # This adds in the order of tokens; index_add_ on a GPU would add in that of its atomics.
        kept = torch.where(mask, advantages, 0.0)
        sums = torch.segment_reduce(kept, "sum", offsets=batch.cu_seqlens, unsafe=True)
    return sums / batch.row_counts.clamp(min=1)


def _log(
    actor: Any,
    out: Any,
    gate: RatioGate,
    logp: torch.Tensor,
    anchor: torch.Tensor,
    behaviour: torch.Tensor,
    entropy: torch.Tensor,
    mask: torch.Tensor,
    input_data: dict[str, Any],
) -> None:
    """Logs numbers of tokens under AReaL's own names; AReaL averages them over the valid tokens of all ranks."""
    tracker = actor.stats_tracker
    tracker.denominator(n_tokens=actor.infer_token_denominator(input_data, mask), n_valid_tokens=mask)
    difference = torch.where(mask, logp - anchor, 0.0).float()
    tracker.stat(
        importance_weight=torch.where(mask, difference.exp(), 0.0),
        approx_kl=difference,
        new_logp=torch.where(mask, logp, 0.0).float(),
        old_logp=torch.where(mask, behaviour, 0.0).float(),
        entropy=torch.where(mask, entropy.detach(), 0.0).float(),
        denominator="n_valid_tokens",
    )
    logged = fractions(out.metrics, gate)
    tracker.scalar(**{f"hpo_{name}": value for name, value in logged.items() if name not in ("tokens", "kl")})


def install() -> None:
    """Replaces the name that AReaL's actor looks up, in this process."""
    actor: Any = importlib.import_module("areal.trainer.ppo.actor")
    actor.grpo_loss_fn = grpo_loss_fn


def __getattr__(name: str) -> Any:
    """The actors and the trainer, made at their first use: AReaL's engines import packages that only a cluster has."""
    if name == "HPOTrainer":
        attribute = _trainer()
    elif name.startswith("HPO") and name.removeprefix("HPO") in ACTORS:
        attribute = _actor(name.removeprefix("HPO"))
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = attribute
    return attribute


def _actor(name: str) -> Any:
    base = getattr(importlib.import_module(ACTORS[name]), name)

    def build(self: Any, *args: Any, **keywords: Any) -> None:
        install()
        super(actor, self).__init__(*args, **keywords)

    namespace = {"__init__": build, "__module__": __name__, "__doc__": f"AReaL's {name} with the loss of hpo_core."}
    actor: Any = type(f"HPO{name}", (base,), namespace)
    return actor


def _trainer() -> Any:
    base = importlib.import_module("areal").PPOTrainer

    def create(self: Any, actor_config: Any, alloc: Any) -> Any:
        """AReaL takes the actor's class from its own modules; workers find the gate in their environment."""
        engines = {"fsdp": "FSDPPPOActor", "megatron": "MegatronPPOActor", "archon": "ArchonPPOActor"}
        check_choice("backend", alloc.backend, engines)
        check_environment_gate("AReaL")
        if os.environ.get(VARIABLE):
            for spec in actor_config.scheduling_spec:
                spec.env_vars[VARIABLE] = os.environ[VARIABLE]
        name = engines[alloc.backend]
        module = importlib.import_module(ACTORS[name])
        actor = globals().get(f"HPO{name}") or __getattr__(f"HPO{name}")
        with replaced(module, **{name: actor}):
            return super(trainer, self)._create_train_engine(actor_config, alloc)

    trainer: Any = type("HPOTrainer", (base,), {"_create_train_engine": create, "__module__": __name__})
    return trainer
