"""The inputs that a gate needs beside the batch, inside a trainer: computed there, or refused when the trainer is
built."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from ..advantages.terms import accepted_keywords, missing_keywords
from ..checks import check, require_type
from ..gates import GateInputs, RatioGate

MakesInputs = Callable[..., GateInputs]


def check_needs(
    gate: RatioGate,
    gate_inputs: MakesInputs | None,
    available: Collection[str],
    sampler: str,
    selected: Collection[str] = (),
) -> None:
    """Check that the trainer can give the gate every input without which it is another method.

    Args:
        gate_inputs: a function of :mod:`hpo_core.gates`, a partial of one, or one of the user's, or None.
        available: the keywords with which the trainer calls it.
        sampler: why there are no log-probabilities of the sampler, and what to do; empty where there are some.
        selected: needs that a selection may bring, which the loss checks.

    Raises:
        ValueError, TypeError: naming the missing input.
    """
    check(
        not gate.needs_rollout or not sampler,
        "gate: {!r} corrects by the sampler's log-probabilities, and does nothing without them; {}",
        gate.name,
        sampler,
    )
    for name, call in gate.required.items():
        check(
            gate_inputs is not None or name in selected,
            "gate: {!r} needs {}, as from {}; pass gate_inputs=, a function that returns GateInputs, called with those "
            "of {} that it takes",
            gate.name,
            name,
            call,
            ", ".join(available),
        )
    if gate_inputs is None:
        return
    check_keywords("gate_inputs", gate_inputs, available)


def check_keywords(name: str, function: Callable[..., Any], available: Collection[str]) -> Mapping[str, Any]:
    """The parameters of a function, after a check that it needs none but the available ones."""
    require_type(callable(function), "{}: expected a function, got {}", name, type(function))
    parameters = inspect.signature(function).parameters
    missing = missing_keywords(parameters.values(), available)
    check(
        not missing,
        "{}: expected a function of {}, got one that needs {} too; fix it with functools.partial, or wrap it",
        name,
        ", ".join(available),
        ", ".join(missing),
    )
    return parameters


def made_inputs(gate_inputs: MakesInputs, shape: torch.Size, advantages: torch.Tensor, **tensors: Any) -> GateInputs:
    """The inputs that the function makes of a padded micro-batch, in the shape of its tensors ``[B, L]``.

    Args:
        advantages: ``[B]`` or ``[B, L]``.
        tensors: the other arguments, by name; those ``[B, L]`` are handed over as ``[T]``.
    """
    given = {name: each.reshape(-1) if isinstance(each, torch.Tensor) else each for name, each in tensors.items()}
    level = "token" if advantages.dim() == 2 else "row"
    taken = accepted_keywords(gate_inputs, advantages=advantages.reshape(-1), advantage_level=level, **given)
    inputs = gate_inputs(**taken)
    require_type(isinstance(inputs, GateInputs), "gate_inputs: expected it to return GateInputs, got {}", type(inputs))

    return inputs.on_tokens(lambda values: values.reshape(shape), level == "token")
