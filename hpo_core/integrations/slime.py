"""slime: any gate of tokens, steps or trajectories as its custom loss.

    HPO_GATE="gspo(eps_low=3e-4, eps_high=4e-4)"  ...  --loss-type custom_loss
        --custom-loss-function-path hpo_core.integrations.slime.loss

Log-probabilities and entropies come from slime, whose vocabulary may be spread over ranks; so do the penalty on the KL
to the reference, the entropy bonus and truncated importance sampling. Without ``HPO_GATE`` the gate is the one that the
arguments describe. Responses of a micro-batch are packed, ``T`` tokens in all.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import gates
from ..checks import check
from ..gates import RatioGate
from ..metrics import FLAGS
from .micro_batch import clipped_tokens, lower_epsilon, packed_rows, sequence_clip, token_clip, token_loss
from .served import check_gate, environment_gate_beside

__all__ = ["loss"]

# slime's own values; an argument that holds them counts as not set.
_UNSET = {"eps_clip": 0.2, "eps_clip_high": 0.2, "eps_clip_c": None}


def loss(
    args: Any, batch: dict[str, Any], logits: torch.Tensor, sum_of_sample_mean: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The function that slime calls: a sum over samples of their means, or over tokens with
    ``--calculate-per-token-loss``. slime divides it by the samples or tokens of the step, over ranks and micro-batches.
    ``--custom-tis-function-path`` is called on ones: its result is the factor on each token.

    Raises:
        ValueError: a gate that needs an input that slime does not give its loss; a reducer of the user's; context
            parallelism, with which a rank has parts of the responses.
    """
    theirs = importlib.import_module("slime.backends.megatron_utils.loss")
    return reduced_loss(theirs, "slime", args, batch, logits, sum_of_sample_mean)


def reduced_loss(
    theirs: Any, trainer: str, args: Any, batch: dict[str, Any], logits: torch.Tensor,
    sum_of_sample_mean: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:  # fmt: skip
    """:func:`loss` with the functions ``theirs`` of slime's module, or of another trainer that came from it."""
    gate = _gate(args, trainer)
    corrects = _corrects(args, gate, batch)
    _, outputs = theirs.get_log_probs_and_entropy(
        logits, args=args, unconcat_tokens=batch["unconcat_tokens"], total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"], with_entropy=True,
        **theirs.get_rollout_top_p_logprob_kwargs(args, batch),
    )  # fmt: skip
    parts = outputs["log_probs"]
    old_parts = batch["rollout_log_probs"] if args.use_rollout_logprobs else batch.get("log_probs")
    logp, valid = torch.cat(parts).float(), torch.cat(batch["loss_masks"]) != 0
    old = torch.cat(old_parts).float() if old_parts else logp.detach()
    lengths = torch.tensor([0, *(len(part) for part in parts)], device=logits.device)
    rows = packed_rows(lengths.cumsum(0), torch.cat(batch["loss_masks"]), gate)
    weights = _weights(args, batch, logits.device)

    token_weight, kept, logged = None, None, {}
    if corrects:
        token_weight, kept_parts, metrics = _correction(theirs, args, batch, logp, parts)
        kept = torch.cat(kept_parts) != 0
        logged = {name: sum_of_sample_mean(value) for name, value in metrics.items()}
        # in slime, too, all that follows is summed over the tokens that the correction keeps
        sum_of_sample_mean = theirs.get_sum_of_sample_mean(
            batch["total_lengths"], batch["response_lengths"], kept_parts, batch["rollout_mask_sums"],
            args.calculate_per_token_loss,
        )  # fmt: skip
    sampler = torch.cat(batch["rollout_log_probs"]) if batch.get("rollout_log_probs") else None
    if sampler is not None:
        gap = (logp.detach() if args.use_rollout_logprobs else old) - sampler
        logged["train_rollout_logprob_abs_diff"] = sum_of_sample_mean(torch.where(valid, gap.abs(), 0.0))
    out = token_loss(
        logp, old, torch.cat(batch["advantages"]), rows, gate, weights, rollout_logp=sampler, token_mask=kept,
        token_weight=token_weight,
    )  # fmt: skip
    entropy = sum_of_sample_mean(torch.cat(outputs["entropy"]))
    total = out.loss - args.entropy_coef * entropy
    if args.use_kl_loss:
        penalty = sum_of_sample_mean(_penalty(theirs, args, batch, logp, old, valid))
        logged["kl_loss"] = penalty.detach()
        total = total + args.kl_loss_coef * penalty
    if logp.numel() == 0:  # the backward pass of a rank without tokens must reach its parameters, too
        total = total + 0 * logits.sum()
    # slime divides logged numbers as it divides the loss. The kernel counts clipped tokens in all, not of each sample:
    # without --calculate-per-token-loss their fraction is one of tokens, too, and not the mean of samples' fractions.
    share = (weights * rows.row_counts).sum() / out.metrics["tokens"].clamp(min=1)
    clipped = clipped_tokens(out.metrics, gate)
    return total, {
        "loss": total.detach(),
        "pg_loss": out.loss.detach(),
        "entropy_loss": entropy.detach(),
        "pg_clipfrac": (clipped * share).float(),
        "ppo_kl": sum_of_sample_mean(torch.where(valid & ~(old - logp).isnan(), old - logp.detach(), 0.0)),
        # every micro-batch has the same names, because slime adds up logged numbers by their places
        **{f"hpo/{name}": out.metrics[name].float() for name in FLAGS},
        **logged,
    }


def _gate(args: Any, trainer: str) -> RatioGate:
    """The gate of the environment or of the arguments, where the loss has all that they ask for."""
    ranks = getattr(args, "context_parallel_size", 1)
    check(ranks == 1, "context_parallel_size: hpo_core's loss takes whole responses, expected 1, got {}", ranks)
    check(not args.use_opsm, "use_opsm: no sequence mask beside hpo_core's loss; leave it out")
    reducer = getattr(args, "custom_pg_loss_reducer_function_path", None)
    check(
        reducer is None,
        "custom_pg_loss_reducer_function_path: hpo_core weighs whole responses, expected None, got {!r}; leave it out",
        reducer,
    )
    override = environment_gate_beside(trainer, {name: getattr(args, name) for name in _UNSET}, _UNSET)
    gate = _described(args) if override is None else override
    check(
        override is None or args.advantage_estimator not in ("gspo", "cispo"),
        "advantage_estimator: {!r} has grpo's advantages and a loss that the gate {!r} replaces; set it to grpo",
        args.advantage_estimator,
        gate.name,
    )
    anchored = "with --use-rollout-logprobs there is one old policy" if args.use_rollout_logprobs else ""
    check_gate(gate, trainer, one_policy=anchored)
    return gate


def _corrects(args: Any, gate: RatioGate, batch: dict[str, Any]) -> bool:
    """Whether slime corrects the sampler, under either of its flags."""
    flag = "use_tis" if args.use_tis else "get_mismatch_metrics"
    corrects = bool(getattr(args, flag, False))
    check(
        not (gate.corrects_sampler and corrects),
        "{}: it and the gate {!r} correct the same difference; leave it out",
        flag,
        gate.name,
    )
    check(
        not gate.needs_rollout or "rollout_log_probs" in batch,
        "gate: {!r} corrects by the sampler's log-probabilities, and the batch has none",
        gate.name,
    )
    check(
        not corrects or "rollout_log_probs" in batch,
        "{}: it corrects by the sampler's log-probabilities, and the batch has none; leave it out",
        flag,
    )
    return corrects


def _weights(args: Any, batch: dict[str, Any], device: torch.device) -> torch.Tensor:
    """The weight of each sample ``[S]``."""
    if args.calculate_per_token_loss:
        return torch.ones(len(batch["loss_masks"]), device=device)
    # the tokens of the whole trajectory of a sample, which may be several samples
    sums = [torch.as_tensor(each, device=device).float() for each in batch["rollout_mask_sums"]]
    return 1.0 / torch.stack(sums).clamp(min=1)


def _correction(
    theirs: Any, args: Any, batch: dict[str, Any], logp: torch.Tensor, parts: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
    """By slime's correction of the sampler the factor of each token and the masks that it keeps; its metrics."""
    path = getattr(args, "custom_tis_function_path", None)
    correct = theirs.vanilla_tis_function if path is None else theirs.load_function(path)
    token_weight, kept_parts, metrics = correct(
        args=args, pg_loss=torch.ones_like(logp), loss_masks=batch["loss_masks"],
        rollout_log_probs=batch["rollout_log_probs"],
        train_log_probs=batch.get("log_probs") or [part.detach() for part in parts],
        total_lengths=batch["total_lengths"], response_lengths=batch["response_lengths"],
    )  # fmt: skip
    return token_weight.float(), kept_parts, metrics


def _penalty(
    theirs: Any, args: Any, batch: dict[str, Any], logp: torch.Tensor, old: torch.Tensor, valid: torch.Tensor
) -> torch.Tensor:
    """slime's penalty of each token on the reference policy; 0, with gradient 0, where a log-ratio is no number."""
    ref = torch.cat(batch["ref_log_probs"])
    pays = valid & ~(logp - ref).isnan() & ~(logp - old).isnan()
    paid, ref, anchor = (torch.where(pays, each, 0.0) for each in (logp, ref, old))
    ratio = torch.exp(paid - anchor) if args.use_unbiased_kl else None
    penalty: torch.Tensor = theirs.compute_approx_kl(paid, ref, kl_loss_type=args.kl_loss_type, importance_ratio=ratio)
    return penalty


def _described(args: Any) -> RatioGate:
    """The gate of slime's arguments."""
    low, high, dual = args.eps_clip, args.eps_clip_high, args.eps_clip_c
    if args.advantage_estimator == "gspo":
        return sequence_clip(low, high, dual)
    if args.advantage_estimator == "cispo":
        return gates.cispo(ratio_cap=1 + high, ratio_low=1 - lower_epsilon(low))
    return token_clip(low, high, dual)
