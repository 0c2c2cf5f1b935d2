"""verl-agent, a fork of verl from before its registries: any gate of tokens, steps or trajectories in its actor.

    HPO_GATE="gspo(eps_low=3e-4, eps_high=4e-4)"  python -m verl.trainer.main_ppo ...
        +ray_init.runtime_env.worker_process_setup_hook=hpo_core.integrations.verl_agent.install

Ray calls :func:`install` in each worker process, where it replaces ``compute_policy_loss`` of
``verl.workers.actor.dp_actor``; Ray's workers on this machine inherit ``HPO_GATE``, others take
``+ray_init.runtime_env.env_vars.HPO_GATE=...``. Without it the gate is PPO's clip as the configuration has it.
Shapes: ``B`` rows of a micro-batch, ``L`` tokens each.
"""

from __future__ import annotations

import importlib

import torch

from ..checks import check
from .micro_batch import fractions, padded_rows, token_clip, token_loss, warn_of_flags, weights_of
from .served import check_environment_gate, check_gate, environment_gate_beside

__all__ = ["compute_policy_loss", "install"]

# verl-agent's own values; a field that holds them counts as not set.
_UNSET = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}


def compute_policy_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    cliprange: float | None = None,
    cliprange_low: float | None = None,
    cliprange_high: float | None = None,
    clip_ratio_c: float = 3.0,
    loss_agg_mode: str = "token-mean",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The function that verl-agent's actor calls: all ``[B, L]``. Loss, clip fraction, KL and dual clip fraction; means
    of the micro-batch, which the actor divides by their number.

    Raises:
        ValueError: a bound that the gate of ``HPO_GATE`` would silence; a gate that needs an input that verl-agent
            does not give.
    """
    bounds = (cliprange, cliprange_low, cliprange_high, clip_ratio_c)
    given = {name: bound for name, bound in zip(_UNSET, bounds, strict=True) if bound is not None}
    gate = environment_gate_beside("verl-agent", given, _UNSET)
    if gate is None:
        low, high = (cliprange if bound is None else bound for bound in (cliprange_low, cliprange_high))
        check(low is not None and high is not None, "cliprange: expected a bound, got None")
        assert low is not None and high is not None
        gate = token_clip(low, high, clip_ratio_c)
    check_gate(gate, "verl-agent", one_policy="verl-agent passes its loss no log-probabilities of the sampler")
    batch = padded_rows(response_mask, gate)
    out = token_loss(log_prob, old_log_prob, advantages, batch, gate, weights_of(loss_agg_mode, batch))
    reported = fractions(out.metrics, gate)
    warn_of_flags(reported)
    clipped, kl, dual = torch.tensor(
        [reported[name] for name in ("clipped", "kl", "dual_clipped")], device="cpu"
    ).unbind()
    return out.loss, clipped, kl, dual


def install() -> None:
    """Replaces the loss in this process; for ``policy_loss.loss_mode=vanilla``, which is verl-agent's default."""
    check_environment_gate("verl-agent", one_policy="verl-agent passes its loss no log-probabilities of the sampler")
    actor = importlib.import_module("verl.workers.actor.dp_actor")
    setattr(actor, "compute_policy_loss", compute_policy_loss)  # noqa: B010
