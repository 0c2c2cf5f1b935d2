"""ART (openpipe-art): its loss with any gate of tokens, steps or trajectories, in a backend that trains in-process.

    backend = LocalBackend(in_process=True)
    use(backend, "gspo(eps_low=3e-4, eps_high=4e-4)")

ART has no argument for a loss: its trainers call the name ``loss_fn`` of their module, which is replaced. Shapes: ``B``
packed rows, ``L`` tokens each; the completion of one ``group_ids`` is a trajectory, as in ART's own sequence level.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from ..checks import check
from ..gates import RatioGate
from .micro_batch import fractions, packed_rows, token_loss, warn_of_flags
from .replaced import after_import
from .served import served_gate

__all__ = ["loss_fn", "use"]

_SILENCED = (
    *("epsilon", "epsilon_high", "ppo", "importance_sampling_level", "mask_prob_ratio", "kimi_k2_tau"),
    *("kl_penalty_coef", "truncated_importance_sampling", "max_negative_advantage_importance_sampling_weight"),
)


def use(backend: Any, gate: RatioGate | str) -> None:
    """Let this process train with the gate; ``backend``: its ``LocalBackend(in_process=True)``, or ART's
    ``TinkerBackend`` alike. A later call replaces the gate, of every backend of the process."""
    named = served_gate(gate, "ART", one_policy="ART passes its loss one old policy")
    check(getattr(backend, "_in_process", False), "backend: expected in_process=True, got {}", type(backend).__name__)
    for name in ("art.unsloth.train", "art.tinker.service"):
        after_import(name, lambda module: setattr(module, "loss_fn", functools.partial(loss_fn, gate=named)))


def loss_fn(
    inputs: Any, new_logprobs: torch.Tensor, ref_logprobs: torch.Tensor | None, entropies: torch.Tensor | None,
    experimental_config: dict[str, Any], reduction: str = "mean", *, gate: RatioGate,
) -> Any:  # fmt: skip
    """The function that ART calls with ``[B, L]`` log-probabilities; returns its ``Loss``. It refuses settings without
    effect."""
    silenced = [name for name in _SILENCED if experimental_config.get(name) not in (None, False, 0.0, "token")]
    check(not silenced, "{}: no effect beside the gate {!r}; leave it out", ", ".join(silenced), gate.name)
    packed, ours = inputs.align_inputs(), importlib.import_module("art.loss")
    mask, ids = packed.assistant_mask.bool(), packed.group_ids
    old = torch.where(packed.old_logprobs.isfinite(), packed.old_logprobs, new_logprobs.detach())  # as ART has it
    begins = torch.nn.functional.pad(ids[:, 1:] != ids[:, :-1], (1, 0), value=True)
    starts = torch.nn.functional.pad(begins.flatten().nonzero()[:, 0], (0, 1), value=mask.numel())
    batch = packed_rows(starts, mask.flatten(), gate)
    logp, old, advantages, weights = (
        each.flatten().float() for each in (new_logprobs, old, packed.advantages, packed.weights)
    )
    out = token_loss(logp, old, advantages, batch, gate, logp.new_ones(batch.rows), token_weight=weights)
    warn_of_flags(fractions(out.metrics, gate))
    count, aligned = packed.denominator(mask.float(), reduction), packed.aligned_entropies(entropies)
    entropy = None if aligned is None else torch.where(mask, aligned * packed.weights, 0.0).sum() / count
    correlation = ours.compute_probs_corr(torch.where(mask, packed.old_logprobs, torch.nan), new_logprobs)
    losses = {"policy_loss": out.loss / count, "policy_loss_sum": out.loss, "entropy": entropy}
    return ours.Loss(reduction=reduction, probs_corr=correlation, **losses)
