"""prime-rl: any gate of tokens, steps or trajectories as its custom loss, from its toml.

    trainer.loss.type = "custom"
    trainer.loss.import_path = "hpo_core.integrations.prime_rl.loss"
    trainer.loss.kwargs = { gate = "gspo(eps_low=3e-4, eps_high=4e-4)", kl_tau = 1e-3 }

prime-rl calls it once for each sequence, on tensors ``[T]``, and divides the sum of its results by the tokens of
the step over all ranks. The anchor of ratios is the sampler, as in prime-rl's own losses: it has no other old policy.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from ..gates import RatioGate
from ..metrics import FLAGS
from .micro_batch import clipped_tokens, padded_rows, token_loss
from .served import served_gate

__all__ = ["loss"]


def loss(inputs: Any, gate: str = "dppo_tv(0.2, 0.2, inf)", kl_tau: float = 0.0, adv_tau: float = 1.0) -> Any:
    """The function that prime-rl calls with its ``LossInputs``; returns its ``LossOutputs``.

    Args:
        gate: a text as in ``HPO_GATE``. Default: prime-rl's own, DPPO by total variation.
        kl_tau: of prime-rl's penalty on every token, ``kl_tau (logp - inference_logp)^2``; its own default is 1e-3.
        adv_tau: a factor on the advantages, as in prime-rl.

    Raises:
        ValueError: a gate that needs an input that prime-rl does not give its loss.
    """
    resolved = _gate(gate)
    logp, old, mask = inputs.trainer_logprobs, inputs.inference_logprobs, inputs.loss_mask
    weight = inputs.loss_weights
    out = token_loss(
        logp[None], old[None], adv_tau * inputs.advantages[None].float(), padded_rows(mask[None], resolved), resolved,
        torch.ones(1, device=logp.device), rollout_logp=old[None],
        token_weight=None if weight is None else weight[None].float(),
    )  # fmt: skip
    total = out.loss
    if kl_tau:
        gap = logp - old
        squared = torch.where(mask & ~gap.isnan(), gap, 0.0).float().square()  # as the loss leaves them out
        total = total + kl_tau * (squared if weight is None else torch.where(mask, weight, 0.0) * squared).sum()
    tokens = out.metrics["tokens"].clamp(min=1)
    clipped = clipped_tokens(out.metrics, resolved)
    metrics = {
        "hpo/clipped": clipped / tokens,
        "hpo/log_ratio": out.metrics["log_ratio_sum"] / tokens,
        **{f"hpo/{name}": out.metrics[name] for name in FLAGS},
    }
    kind = importlib.import_module("prime_rl.trainer.rl.loss").LossOutputs
    return kind(loss=total, metrics={name: value.float() for name, value in metrics.items()})


@functools.cache
def _gate(text: str) -> RatioGate:
    return served_gate(text, "prime-rl", one_policy="prime-rl's old policy is the sampler")
