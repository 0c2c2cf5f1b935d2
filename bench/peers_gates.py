"""The policy loss as others compute it, forward and backward: eager, torch.compile, and the trainers' own functions.

Padded peers work on ``[B, L]`` tensors; every token of the timed batches is valid, so padding costs them nothing.
Liger's Triton kernels are absent: they need a GPU, and the interpreter would not be a fair contestant.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from harness import Tensors
from peers_entropy import accelerator_of_one_process, rank

Run = Callable[[], Tensors]


class Objective(NamedTuple):
    """The loss that is computed, in terms that all contestants share."""

    gate: str  # the name of the constructor in hpo_core.gates
    low: float = 0.0  # epsilons; for cispo the cap is 1 + high
    high: float = 0.0
    beta: float = 0.0  # of the k3 penalty
    keep: float = 1.0  # the share of tokens, those with the highest entropy, whose policy term counts

    @property
    def of_sequences(self) -> bool:
        return self.gate in ("gspo", "gspo_token")


class Padded(NamedTuple):
    """B rows of L tokens."""

    logp: torch.Tensor  # [B, L], as are the next four
    old_logp: torch.Tensor
    ref_logp: torch.Tensor
    entropy: torch.Tensor
    mask: torch.Tensor
    advantages: torch.Tensor  # [B]
    weights: torch.Tensor  # [B], hpo_core's weights of the aggregation


class Packed(NamedTuple):
    """Rows of any length, end to end."""

    logp: torch.Tensor  # [T]
    old_logp: torch.Tensor  # [T]
    row: torch.Tensor  # [T] int64, the row of each token
    lengths: torch.Tensor  # [S]
    advantages: torch.Tensor  # [S]
    weights: torch.Tensor  # [S]


def differentiated(logp: torch.Tensor, loss_of: Callable[[torch.Tensor], torch.Tensor]) -> Run:
    """Loss and dL/dlogp, from the call of the loss to the gradient: the timed part of every contestant. The leaf is
    there before, as the log-probabilities of a model are."""
    leaf = logp.detach().requires_grad_()

    def run() -> Tensors:
        loss = loss_of(leaf)
        loss.backward()
        grad, leaf.grad = leaf.grad, None
        assert grad is not None
        return {"loss": loss, "grad": grad}

    return run


class _Ready(torch.autograd.Function):
    """The cost in Python of any loss with a gradient of its own: a node, and one product on the way back."""

    @staticmethod
    def forward(ctx: Any, logp: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(grad)
        return logp.new_empty(())

    @staticmethod
    def backward(ctx: Any, incoming: torch.Tensor) -> Any:
        return incoming * ctx.saved_tensors[0], None


def autograd_alone(batch: Padded) -> Run:
    grad = torch.zeros_like(batch.logp)
    return differentiated(batch.logp, lambda leaf: _Ready.apply(leaf, grad))


# --------------------------------------------------------------------------------------------------- eager and compiled


def policy_term(
    objective: Objective, ratio: torch.Tensor, advantages: torch.Tensor, logp: torch.Tensor
) -> torch.Tensor:
    if objective.gate == "reinforce":
        return -advantages * logp
    if objective.gate == "cispo":
        return -ratio.clamp(max=1 + objective.high).detach() * advantages * logp
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - objective.low, 1 + objective.high) * advantages)


@torch.no_grad()
def logged(
    objective: Objective, log_ratio: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """The numbers that trainers log with the loss: sums of x, x^2 and r - 1, and the tokens beyond either bound."""
    ratio = log_ratio.exp()
    above = (ratio > 1 + objective.high) & (advantages >= 0)
    below = (ratio < 1 - objective.low) & (advantages < 0)
    values = [log_ratio, log_ratio.square(), ratio - 1, above, below]
    return torch.stack([(value if mask is None else value * mask).sum() for value in values])


def padded_formula(objective: Objective) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """A clean implementation on ``[B, L]``, with few temporaries; ``advantages`` are ``[B, 1]`` or ``[B, L]``."""

    def formula(
        logp: torch.Tensor, batch: Padded, advantages: torch.Tensor, threshold: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        log_ratio = logp - batch.old_logp
        gated = log_ratio
        if objective.of_sequences:
            gated = (log_ratio * batch.mask).sum(-1, keepdim=True) / batch.mask.sum(-1, keepdim=True)
        if objective.gate == "gspo_token":
            gated = gated.detach() + (logp - logp.detach())
        loss = policy_term(objective, gated.exp(), advantages, logp)
        if threshold is not None:
            loss = loss * (batch.entropy >= threshold)
        if objective.beta:
            s = logp - batch.ref_logp
            loss = loss + objective.beta * (torch.exp(-s) - 1 + s)
        total = (batch.weights * (loss * batch.mask).sum(-1)).sum()
        return total, logged(objective, log_ratio, advantages, batch.mask)

    return formula


def fiberpo_log_ratio(objective: Objective, log_ratio: torch.Tensor, batch: Packed) -> torch.Tensor:
    """Two channels: the mean of each row within its budget, rolled back beyond, and the clipped rest of each token."""
    rises = log_ratio >= 0
    gated = torch.zeros_like(log_ratio)
    for sign, part in ((1, torch.where(rises, log_ratio, 0.0)), (-1, torch.where(rises, 0.0, -log_ratio))):
        mean = torch.zeros_like(batch.weights).index_add(0, batch.row, part) / batch.lengths
        back = (batch.lengths + 1) * objective.high - batch.lengths * mean
        base = torch.where(mean <= objective.high, mean, back.clamp(min=0))
        residual = (part - mean[batch.row]).clamp(-objective.low, objective.low)
        gated = gated + sign * (base[batch.row] + residual)
    return gated


def packed_formula(objective: Objective) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The same on a pack: numbers of a row are gathered by ``row``, or, for sequence ratios, added up by it."""

    def formula(logp: torch.Tensor, batch: Packed) -> tuple[torch.Tensor, torch.Tensor]:
        log_ratio = logp - batch.old_logp
        advantages = batch.advantages[batch.row]
        sums = logged(objective, log_ratio, advantages, None)
        if objective.of_sequences:
            mean = torch.zeros_like(batch.weights).index_add(0, batch.row, log_ratio) / batch.lengths
            loss = policy_term(objective, mean.exp(), batch.advantages, logp)
            return (batch.weights * batch.lengths * loss).sum(), sums
        if objective.gate == "fiberpo":
            loss = -fiberpo_log_ratio(objective, log_ratio, batch).exp() * advantages
        else:
            loss = policy_term(objective, log_ratio.exp(), advantages, logp)
        return (batch.weights[batch.row] * loss).sum(), sums

    return formula


def threshold_of(objective: Objective, batch: Padded) -> torch.Tensor | None:
    """The entropy that the wanted share of tokens reaches."""
    if objective.keep == 1:
        return None
    entropy = batch.entropy[batch.mask]
    return entropy.kthvalue(rank(entropy.numel(), objective.keep)).values


def eager(objective: Objective, batch: Padded) -> Run:
    return _padded(padded_formula(objective), objective, batch, batch.advantages[:, None])


def compiled(objective: Objective, batch: Padded, *, expanded: bool) -> Run:
    """Compiled for exactly this size. ``expanded``: advantages as ``[B, L]``, which trainers hand to their losses."""
    advantages = batch.advantages[:, None]
    if expanded:
        advantages = advantages.expand(batch.logp.shape).contiguous()
    return _padded(torch.compile(padded_formula(objective), dynamic=False), objective, batch, advantages)


def _padded(formula: Callable[..., Any], objective: Objective, batch: Padded, advantages: torch.Tensor) -> Run:
    return differentiated(batch.logp, lambda leaf: formula(leaf, batch, advantages, threshold_of(objective, batch))[0])


def eager_packed(objective: Objective, batch: Packed) -> Run:
    formula = packed_formula(objective)
    return differentiated(batch.logp, lambda leaf: formula(leaf, batch)[0])


def compiled_packed(objective: Objective, batch: Packed) -> Run:
    formula = torch.compile(packed_formula(objective), dynamic=False)
    return differentiated(batch.logp, lambda leaf: formula(leaf, batch)[0])


# -------------------------------------------------------------------------------------------------- trainers' functions


def verl_loss(
    name: str,
    batch: Any,
    mode: str,
    fields: Mapping[str, float],
    policy_loss: Mapping[str, float] = MappingProxyType({}),
    **given: torch.Tensor,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A loss of verl's registry on ``[B, L]``, with these fields of its ActorConfig and of that's policy_loss."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig, PolicyLossConfig

    settings = PolicyLossConfig(loss_mode=name, **policy_loss)
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=settings, **fields)
    loss_fn, mask = get_policy_loss_fn(name), batch.mask.long()
    advantages = batch.advantages[:, None].expand(batch.logp.shape).contiguous()
    return lambda leaf: loss_fn(batch.old_logp, leaf, advantages, mask, mode, config, **given)[0]


def verl(objective: Objective, batch: Padded) -> Run:
    from verl.trainer.ppo.core_algos import agg_loss, kl_penalty

    names = {"reinforce": "gpg", "ppo_clip": "vanilla", "dapo": "vanilla", "cispo": "cispo", "gspo_token": "gspo"}
    low = 1.0 if objective.gate == "cispo" else objective.low  # its lower bound is 1 - low; there is none here
    mode = "seq-mean-token-mean" if objective.of_sequences else "token-mean"
    fields = {"clip_ratio_low": low, "clip_ratio_high": objective.high}
    policy_loss, mask = verl_loss(names.get(objective.gate, objective.gate), batch, mode, fields), batch.mask.long()

    def loss_of(leaf: torch.Tensor) -> torch.Tensor:
        loss = policy_loss(leaf)
        if objective.beta:
            penalty = kl_penalty(leaf, batch.ref_logp, "low_var_kl")
            loss = loss + objective.beta * agg_loss(penalty, mask, mode)
        return loss

    return differentiated(batch.logp, loss_of)


def trl(objective: Objective, batch: Padded) -> Run:
    """GRPOTrainer's own loss with its logging; the model's forward is replaced by log-probabilities that are ready."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    mask = batch.mask.long()
    trainer = SimpleNamespace(
        accelerator=accelerator_of_one_process(),
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        loss_type={"cispo": "cispo", "gspo": "grpo", "gspo_token": "grpo"}.get(objective.gate, "bnpo"),
        importance_sampling_level="sequence" if objective.of_sequences else "token",
        epsilon_low=objective.low,
        epsilon_high=1 + objective.high if objective.gate == "cispo" else objective.high,
        beta=objective.beta,
        top_entropy_quantile=objective.keep,
        off_policy_mask_threshold=None,
        use_vllm=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
    )
    trainer.get_high_entropy_mask = lambda *arguments: GRPOTrainer.get_high_entropy_mask(trainer, *arguments)
    inputs = {
        "prompt_ids": mask[:, :0],
        "prompt_mask": mask[:, :0],
        "completion_ids": mask[:, :1],  # only its length is asked for, by the forward that is replaced
        "completion_mask": mask,
        "advantages": batch.advantages,
        "old_per_token_logps": batch.old_logp,
        "ref_per_token_logps": batch.ref_logp,
        "num_items_in_batch": mask.sum(),
    }

    def loss_of(leaf: torch.Tensor) -> torch.Tensor:
        trainer._get_per_token_logps_and_entropies = lambda *_, **__: (leaf, batch.entropy, None)
        loss: torch.Tensor = GRPOTrainer._compute_loss(trainer, None, inputs)
        return loss

    return differentiated(batch.logp, loss_of)


def liger(objective: Objective, batch: Padded) -> Run:
    """The loss behind the matrix product of Liger's fused linear GRPO: TRL's formula with hardly any logging."""
    from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOFunction

    mask = batch.mask.long()

    def loss_of(leaf: torch.Tensor) -> torch.Tensor:
        loss, _ = LigerFusedLinearGRPOFunction.ppo_loss_fn(
            leaf,
            mask,
            batch.advantages,
            mask,
            ref_per_token_logps=batch.ref_logp,
            old_per_token_logps=batch.old_logp,
            epsilon_low=objective.low,
            epsilon_high=1 + objective.high if objective.gate == "cispo" else objective.high,
            beta=objective.beta,
            loss_type={"cispo": "cispo", "gspo": "grpo", "gspo_token": "grpo"}.get(objective.gate, "bnpo"),
            importance_sampling_level="sequence" if objective.of_sequences else "token",
        )
        return loss

    return differentiated(batch.logp, loss_of)
