"""The settings of HPOTrainer, and the tensors that it reads of a batch of TRL's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..advantages.terms import check_estimator, level_of, name_of
from ..checks import check, require_type
from ..entropy import EntropyWindow
from ..gates import Channel, RatioGate
from ..kl import KLPenalty
from ..segments import ids_of
from ..specs import Unit
from .entropy_methods import SELECTED, MakesPenalty, MakesSelection
from .needs import MakesInputs
from .turns import Step

# The arguments that a function of gate inputs may take, and why an engine's correction may have nothing to correct.
AVAILABLE = ("logp", "old_logp", "entropy", "advantages", "advantage_level", "batch", "process_group", "seed")
NO_SAMPLER = (
    "here the model itself samples, so there is nothing to correct; set use_vllm=True, or let rollout_func return "
    "logprobs"
)

# Keys of a batch that the loss reads, or computes with. The others, such as images and their positions, more with every
# release of TRL, are for the scoring.
OF_THE_LOSS = frozenset(
    (
        *("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "advantages"),
        *("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps", "importance_sampling_ratio"),
        *("num_items_in_batch", "group_ids", "domain_ids", "token_mask", *SELECTED),
    )
)


# Levels whose segments have rows of several completions, and of several processes.
SPANNING = {Unit.GROUP, Unit.DOMAIN}


class Settings(NamedTuple):
    """The settings of the mixin: one attribute of the trainer, so that no name of TRL's is shadowed."""

    gate: RatioGate
    kl: KLPenalty | None
    advantage: Callable[..., torch.Tensor] | None
    steps: Callable[..., list[list[Step]]] | None
    domain: str | None
    window: EntropyWindow | None
    entropy: MakesSelection | None
    entropy_penalty: MakesPenalty | None
    gate_inputs: MakesInputs | None
    backend: str | None
    processes: int


def check_pillars(
    gate: RatioGate | None,
    advantage: Callable[..., torch.Tensor] | None,
    steps: Callable[..., list[list[Step]]] | None,
    window: EntropyWindow | None,
) -> None:
    """Raise for an argument of another kind, and for an estimator that TRL's batch cannot serve."""
    require_type(isinstance(gate, RatioGate | None), "gate: expected a RatioGate such as gates.dapo(), got {!r}", gate)
    require_type(
        advantage is None or callable(advantage),
        "advantage: expected an estimator such as advantages.rloo, got {!r}",
        advantage,
    )
    level, wanted = "row" if advantage is None else level_of(advantage), "row" if steps is None else "step"
    check(
        level == wanted,
        "advantage: expected an estimator of {}s, got {}, of {}s{}",
        wanted,
        name_of(advantage) if callable(advantage) else "the default",
        level,
        "; steps= says what the turns of completions are"
        if "step" in (wanted, level)
        else "; call it in your own loop",
    )
    if advantage is not None:
        ids = ("trajectory_ids", "anchor_ids") if level == "step" else ("weights",)
        check_estimator("advantage", advantage, ("group_ids", *ids), "TRL")
    require_type(isinstance(window, EntropyWindow | None), "window: expected an EntropyWindow, got {}", window)


def check_levels(gate: RatioGate, domain: str | None, micro_batches: int) -> None:
    """Raise for a level of domains without a column that names them, for the reverse, and for segments of several
    completions where TRL deals these out to several ``micro_batches``."""
    check(
        (Unit.DOMAIN in gate.units) == (domain is not None),
        "domain: the gate {!r} has a level of domains; name the dataset's column that tells them apart"
        if domain is None
        else "domain: no level of the gate {!r} is one of domains; drop it",
        gate.name,
    )
    check(
        micro_batches == 1 or not SPANNING & gate.units,
        "steps_per_generation: expected 1, got {} (gradient_accumulation_steps, if it is not set); the gate {!r} "
        "compares completions, and TRL shuffles a rollout into so many micro-batches, which have pieces of its groups; "
        "set steps_per_generation=1, and per_device_train_batch_size to the completions of a rollout on one process",
        micro_batches,
        gate.name,
    )


def domain_ids_of(column: str, inputs: list[dict[str, Any]], device: torch.device) -> torch.Tensor:
    """``[B]``, the same on all processes."""
    check(
        all(column in example for example in inputs),
        "domain: expected a column of the dataset, got {!r}; it has {}",
        column,
        ", ".join(sorted(inputs[0])) if inputs else "none",
    )
    names = [example[column] for example in inputs]
    require_type(
        all(isinstance(name, int | str) for name in names), "domain: expected integers or strings, got {}", names[:1]
    )
    return ids_of(names, device)


def outcomes_of(scores: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The reward of each completion ``[P B]`` from ``scores`` ``[P B, functions]``; NaN, which is in no statistic, for
    one without any."""
    rewards = (scores * weights.to(scores.device)).nansum(1)
    return torch.where(scores.isnan().all(1), torch.nan, rewards)


def mask_of(inputs: dict[str, Any]) -> torch.Tensor:
    """Tokens of the loss, bool ``[B, L]``: completions without padding and without the tokens that tools wrote."""
    mask: torch.Tensor = inputs["completion_mask"] != 0
    return mask & (inputs["tool_mask"] != 0) if "tool_mask" in inputs else mask


def advantages_of(inputs: dict[str, Any]) -> torch.Tensor:
    """``[B, L]``, or ``[B]`` where each completion has one."""
    advantages: torch.Tensor = inputs["advantages"]
    return advantages.squeeze(1) if advantages.dim() == 2 and advantages.shape[1] == 1 else advantages


def log_ratio_of(logps: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
    """``[B, L]``, 0 on-policy."""
    old = inputs.get("old_per_token_logps")
    return torch.zeros_like(logps) if old is None else logps - old


def sampler_of(gate: RatioGate, logps: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor | None:
    """The sampler's log-probabilities ``[B, L]``, for a gate that reads them. A token that vLLM could not score has NaN
    and takes that of the policy that corrections compare the sampler with (the current one if any of them does): its
    ratio is 1 there, as in TRL."""
    sampler, old = inputs.get("sampling_per_token_logps"), inputs.get("old_per_token_logps")
    if sampler is None or not gate.reads_rollout:
        return None
    current = any(each.channel is Channel.TOTAL for each in gate.corrections)
    return torch.where(sampler.isnan(), logps.detach() if old is None or current else old, sampler)
