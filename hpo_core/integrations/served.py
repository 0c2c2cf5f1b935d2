"""The gates that a trainer can serve, and the settings that a gate would silence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .. import gates
from ..checks import check, require_type
from ..gates import RatioGate
from ..specs import Head, Penalty, Unit
from .named import VARIABLE, environment_gate, named_gate

# Objectives with a term that does not grow with the advantage.
_NOT_PROPORTIONAL = (Head.LOG, Head.MIRROR)


def check_gate(gate: RatioGate, trainer: str, *, groups: bool = False, one_policy: str = "") -> None:
    """Check that a trainer which hands over rows, and no more, can serve the gate.

    Args:
        trainer: its name, for the message.
        groups: whether the rows carry the ids of their prompts.
        one_policy: why the sampler is no policy beside the old one, if it is none.

    Raises:
        ValueError: a gate with a level of groups or domains that the micro-batch does not know, or with inputs of its
            own, or that corrects the sampler where there is no other policy.
    """
    for unit in sorted(gate.units):
        check(
            unit in (Unit.STEP, Unit.TRAJECTORY) or (groups and unit is Unit.GROUP),
            "gate: {!r} works on the level of {}s, and {} passes its loss {}; take a gate of tokens, steps or "
            "trajectories, or call hpo_core.policy_loss in a loop of your own",
            gate.name,
            unit.name.lower(),
            trainer,
            "prompts but no domains" if groups else "no prompts",
        )
    check(
        not gate.required,
        "gate: {!r} needs {}, for which {} has no place; call hpo_core.policy_loss in a loop of your own",
        gate.name,
        " and ".join(f"{name}, as from {call}" for name, call in gate.required.items()),
        trainer,
    )
    check(
        not one_policy or not gate.needs_rollout,
        "gate: {!r} corrects the difference between sampler and old policy, and {}; take the gate that it corrects",
        gate.name,
        one_policy,
    )


def check_proportional(gate: RatioGate, scaled: str) -> None:
    """Check that the objective grows with the advantage, where a trainer multiplies factors of its own into
    advantages. ``scaled``: which, for the message."""
    check(
        (gate.head not in _NOT_PROPORTIONAL or gate.head_numbers == (0.0, 0.0)) and gate.penalty is Penalty.NONE,
        "gate: {!r} has a term that does not grow with the advantage, and {}, which that term would lack; call "
        "hpo_core.policy_loss in a loop of your own",
        gate.name,
        scaled,
    )


def served_gate(gate: RatioGate | str, trainer: str, **served: Any) -> RatioGate:
    """The gate that a text names, or the gate itself, after :func:`check_gate`."""
    resolved = named_gate(gate)
    check_gate(resolved, trainer, **served)
    return resolved


def check_environment_gate(trainer: str, **served: Any) -> None:
    """:func:`check_gate` of the gate of ``HPO_GATE``, if there is one, before processes that would refuse it start."""
    gate = environment_gate()
    if gate is not None:
        check_gate(gate, trainer, **served)


def check_registered(gate: Any, config: str) -> None:
    """Check that a registry gets a gate, or a function of the trainer's ``config``, which no gate's constructor is."""
    is_constructor = any(gate is getattr(gates, each) for each in gates.__all__)
    require_type(
        isinstance(gate, RatioGate) or (callable(gate) and not is_constructor),
        "gate: expected a RatioGate, or a function of {} that returns one, got {}",
        config,
        gate,
    )


def check_unread(
    gate: RatioGate, trainer: str, given: Mapping[str, Any], unset: Mapping[str, Any], fix: str = ""
) -> None:
    """Check that every setting of the trainer has its own value ``unset``, because the gate would silence others."""
    for name, value in given.items():
        check(
            value == unset[name],
            "{}: the gate {!r} does not read it; got {}, leave it at {}'s {}{}",
            name,
            gate.name,
            value,
            trainer,
            unset[name],
            fix,
        )


def environment_gate_beside(trainer: str, given: Mapping[str, Any], unset: Mapping[str, Any]) -> RatioGate | None:
    """:func:`environment_gate`; beside a gate, settings of the trainer that it would silence are refused."""
    gate = environment_gate()
    if gate is not None:
        check_unread(gate, trainer, given, unset, f" or take {VARIABLE} away")
    return gate


def check_sampler(gate: RatioGate, rollout_logp: torch.Tensor | None, setting: str) -> None:
    """Check that a gate which corrects by the sampler's log-probabilities gets them. ``setting``: the setting
    that gives them."""
    check(
        rollout_logp is not None or not gate.needs_rollout,
        "gate: {!r} corrects by the sampler's log-probabilities, and the batch has none; set {}",
        gate.name,
        setting,
    )
