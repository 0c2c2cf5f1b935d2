"""RLinf: any gate of tokens, steps or trajectories in its registry of losses, from its yaml.

    RLINF_EXT_MODULE=hpo_core.integrations.rlinf HPO_GATE="gspo(eps_low=3e-4, eps_high=4e-4)" ray start ...

and ``algorithm.loss_type: hpo_actor``, or ``hpo_actor_critic`` with RLinf's own loss of the critic. RLinf calls
:func:`register` in each of its workers. It hands ``RLINF_EXT_MODULE`` on by itself, but not ``HPO_GATE``, which is why
the loss refuses to run without it. Shapes: ``B`` rows of a micro-batch, ``L`` tokens each. In embodied tasks a row is
the actions of one chunk, ``[B]``, ``[B, chunks]`` or ``[B, chunks, actions]``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from ..checks import check
from ..metrics import FLAGS
from .micro_batch import clipped_tokens, padded_rows, token_loss, weights_of
from .named import VARIABLE
from .served import check_gate, check_proportional, environment_gate_beside

__all__ = ["actor", "actor_critic", "register"]

# The values of RLinf's examples; a field that holds them counts as not set.
_UNSET = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}


def actor(
    *,
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float | None = None,
    loss_mask: torch.Tensor | None = None,
    loss_agg_func: Callable[..., torch.Tensor] | None = None,
    max_episode_steps: int | None = None,
    loss_mask_sum: torch.Tensor | None = None,
    critic_warmup: bool = False,
    clip_log_ratio_min: float | None = None,
    clip_log_ratio_max: float | None = None,
    proximal_logprobs: torch.Tensor | None = None,
    task_type: str = "reasoning",
    **_: Any,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss that RLinf calls: a mean of the micro-batch by its ``loss_agg_func``, or over the steps of an episode.

    Raises:
        ValueError: no ``HPO_GATE``; a field that the gate silences; a gate that needs inputs that RLinf does not give.
    """
    given = {"clip_ratio_low": clip_ratio_low, "clip_ratio_high": clip_ratio_high, "clip_ratio_c": clip_ratio_c}
    gate = environment_gate_beside("RLinf", {name: value for name, value in given.items() if value is not None}, _UNSET)
    check(gate is not None, "{}: expected a gate, such as 'dapo()', got none; export it before ray start", VARIABLE)
    assert gate is not None
    check_gate(gate, "RLinf", one_policy="RLinf passes its loss one old policy")
    check_proportional(gate, "RLinf multiplies importance_sampling_fix and loss_scales into advantages")
    check(
        task_type != "embodied" or not gate.units,
        "gate: {!r} has a level above tokens, and rows of embodied tasks are chunks of actions; take a gate of tokens",
        gate.name,
    )
    for name, bound in {"clip_log_ratio_min": clip_log_ratio_min, "clip_log_ratio_max": clip_log_ratio_max}.items():
        check(bound is None, "{}: the gate {!r} does not read it; expected None, got {}", name, gate.name, bound)
    check(
        proximal_logprobs is None,
        "proximal_logprobs: expected None, because hpo_actor has one old policy; take RLinf's decoupled_actor_critic",
    )
    rows, shape = len(logprobs), logprobs.shape
    mask = torch.ones_like(logprobs, dtype=torch.bool) if loss_mask is None else loss_mask != 0
    counted = mask.sum()  # a mask of chunks counts each once, and not its actions
    logp, old, given_advantages, valid = (
        each.expand(shape).reshape(rows, -1) for each in (logprobs, old_logprobs, advantages, mask)
    )
    batch, token_weight = padded_rows(valid, gate), None
    if max_episode_steps is not None and loss_mask_sum is not None and loss_mask is not None:
        token_weight = (max_episode_steps / loss_mask_sum.expand(shape).float()).reshape(rows, -1)
        weights = logp.new_full((rows,), 1 / logp.numel())
    else:
        weights = weights_of(_mode(loss_agg_func), batch, counted)
    out = token_loss(logp, old, given_advantages, batch, gate, weights, token_weight=token_weight)
    loss = torch.zeros_like(out.loss) if critic_warmup else out.loss
    tokens = out.metrics["tokens"].clamp(min=1)
    ratio = torch.where(valid, (logp.detach() - old).float().exp(), 0.0)
    return loss, {
        "actor/policy_loss": loss.detach().clone(),  # RLinf scales the loss in place
        "actor/ratio": ratio.sum() / tokens.float(),
        "actor/approx_kl": (-out.metrics["log_ratio_sum"] / tokens).float(),
        "actor/clip_fraction": (clipped_tokens(out.metrics, gate) / tokens).float(),
        **{f"actor/hpo_{name}": out.metrics[name].float() for name in FLAGS},
    }


def actor_critic(**keywords: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """:func:`actor` and RLinf's own loss of the critic."""
    loss, logged = actor(**keywords)
    critic, logged_by_critic = importlib.import_module("rlinf.algorithms.losses").compute_ppo_critic_loss(**keywords)
    return loss + critic, {**logged, **logged_by_critic}


def _mode(function: Callable[..., torch.Tensor] | None) -> str:
    """The name of RLinf's ``loss_agg_func``; embodied tasks pass none and take the mean over tokens."""
    theirs = importlib.import_module("rlinf.utils.utils")
    modes = {
        None: "token-mean", theirs.masked_mean: "token-mean", theirs.seq_mean_token_sum: "seq-mean-token-sum",
        theirs.seq_mean_token_mean: "seq-mean-token-mean",
    }  # fmt: skip
    check(function in modes, "loss_agg_func: expected one of RLinf's three, got {}", function)
    return modes[function]


def register() -> None:
    """Adds the losses to RLinf's registry, in this process."""
    registry = importlib.import_module("rlinf.algorithms.registry")
    for loss in (actor, actor_critic):
        registry.register_policy_loss(f"hpo_{loss.__name__}")(loss)
