"""miles, which came from slime: any gate of tokens, steps or trajectories as its custom loss.

    HPO_GATE="gspo(eps_low=3e-4, eps_high=4e-4)"  ...  --loss-type custom_loss
        --custom-loss-function-path hpo_core.integrations.miles.loss

Log-probabilities, entropies, the penalty on the KL to the reference and truncated importance sampling come from miles,
as in :mod:`hpo_core.integrations.slime`. Without ``HPO_GATE`` the gate is the one that the arguments describe.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from ..checks import check
from .slime import reduced_loss

__all__ = ["loss"]


def loss(
    args: Any, batch: dict[str, Any], logits: torch.Tensor, sum_of_sample_mean: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss that miles calls: a sum over samples of their means, or over tokens with ``--calculate-per-token-loss``.

    Raises:
        ValueError: a call that :func:`hpo_core.integrations.slime.loss` refuses; a batch without ``rollout_mask_sums``.
    """
    miles = importlib.import_module("miles.backends.training_utils.loss_hub.losses")
    fields = {name: value for name, value in batch.items() if value is not None}
    check(
        "rollout_mask_sums" in fields,
        "batch: expected 'rollout_mask_sums', the tokens of each sample's rollout, as miles counts them; got {}",
        ", ".join(sorted(fields)),
    )
    lengths = fields.get("max_seq_lens")
    entropy_counts = args.entropy_coef != 0

    def scores(logits: torch.Tensor, *, with_entropy: bool, **keywords: Any) -> tuple[None, dict[str, Any]]:
        computes_entropy = entropy_counts or args.observe_training_entropy
        outputs = miles.get_log_probs_and_entropy(
            logits,
            with_entropy=computes_entropy,
            entropy_requires_grad=entropy_counts,
            max_seq_lens=lengths,
            **keywords,
        )
        return None, {"entropy": [torch.zeros_like(each) for each in outputs["log_probs"]], **outputs}

    def correction(path: str | None) -> Callable[..., Any]:
        function = miles.vanilla_tis_function if path is None else miles.load_function(path)
        return functools.partial(function, parallel_state=miles.get_parallel_state(), max_seq_lens=lengths)

    def reducer(total: Any, responses: Any, masks: Any, sums: Any, per_token: bool) -> Callable[..., torch.Tensor]:
        mean: Callable[..., torch.Tensor] = miles.get_sum_of_sample_mean(
            total, responses, masks, per_token, args.qkv_format, lengths, denominators=sums
        )
        return mean

    theirs = SimpleNamespace(
        get_log_probs_and_entropy=scores, get_rollout_top_p_logprob_kwargs=lambda *_: {},
        vanilla_tis_function=lambda **keywords: correction(None)(**keywords), load_function=correction,
        get_sum_of_sample_mean=reducer, compute_approx_kl=miles.compute_approx_kl,
    )  # fmt: skip
    return reduced_loss(theirs, "miles", args, fields, logits, sum_of_sample_mean)
