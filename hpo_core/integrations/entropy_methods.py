"""Entropy methods inside a trainer: a selection, made once per rollout, that travels with the rows into micro-batches;
and a penalty on each micro-batch.

``B`` completions of ``L`` tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..advantages.terms import accepted_keywords
from ..batch import PackedBatch, mark_torn
from ..checks import check, require_type
from ..entropy import Selection, archer, ares_penalty_weights
from .needs import check_keywords

MakesSelection = Callable[..., Selection]
MakesPenalty = Callable[..., torch.Tensor]

# The keywords that an entropy method may take.
AVAILABLE = ("entropy", "logp", "advantages", "advantage_level", "batch", "process_group", "seed", "backend")
# The keywords that a penalty may take.
PENALISED = ("entropy", "batch", "weights", "seed")
_LAST = ("kl_weight", "advantage_factor", "advantage_addend")
# The keys of a trainer's batch under which the fields of a selection lie, each [B, L]; the mask is the trainer's own.
SELECTED = tuple(f"selection_{name}" for name in ("weight", "low", "high", *_LAST))


def check_entropy(entropy: MakesSelection, processes: int, window: str = "", penalty: str = "") -> None:
    """Check that the trainer can call the method, and that its state is fitted over all processes.

    Args:
        window: the argument that takes an EntropyWindow; empty where this one does.
        penalty: the fix where the loss has no KL penalty, which some methods weigh by tokens; empty where it has one.

    Raises:
        TypeError, ValueError: naming the missing part, and the fix.
    """
    expected = "a function" if window else "an EntropyWindow or a function"
    fix = f"; an EntropyWindow goes to {window}=" if window else ""
    require_type(
        callable(entropy), "entropy: expected {} that returns a Selection, got {}{}", expected, type(entropy), fix
    )
    inner = getattr(entropy, "func", entropy)
    kind = inspect.unwrap(inner).__annotations__["return"] if hasattr(inner, "provenance") else "Selection"
    require_type(
        kind == "Selection",
        "entropy: expected a function that returns a Selection, got {}, which returns {}; call it in a function that "
        "puts its result into a Selection",
        getattr(inner, "__name__", "one"),
        kind,
    )
    parameters = check_keywords("entropy", entropy, AVAILABLE)
    check(
        not penalty or inner not in (archer, ares_penalty_weights),
        "entropy: {} weighs the KL penalty of each token, and this loss has none; {}",
        getattr(inner, "__name__", "it"),
        penalty,
    )
    check(
        processes == 1 or "state" not in parameters or "process_group" in parameters,
        "entropy: {} fits its state on one process, and here are {}; wrap it in a function of entropy, batch and "
        "process_group that fits over all of them, such as hapo(entropy, batch, state=fit_pivot(entropy, batch, "
        "process_group=process_group))",
        getattr(entropy, "__name__", "it"),
        processes,
    )


def penalty_of(penalty: MakesPenalty, **given: Any) -> torch.Tensor:
    """The loss term of a micro-batch, 0-dim."""
    value = penalty(**accepted_keywords(penalty, **given))
    is_scalar = isinstance(value, torch.Tensor) and value.dim() == 0
    require_type(is_scalar, "entropy_penalty: expected it to return a scalar tensor, got {!r}", value)
    return value


def selection_tensors(
    method: MakesSelection,
    mask: torch.Tensor,
    advantages: torch.Tensor,
    group_ids: torch.Tensor | None,
    groups_span_ranks: bool,
    **given: Any,
) -> dict[str, torch.Tensor]:
    """The selection of a rollout, by key of the trainer's batch, ``[B, L]`` each.

    Args:
        mask: ``[B, L]`` bool.
        advantages: ``[B]`` or ``[B, L]``.
        groups_span_ranks: on any rank, so that a method that compares groups by itself is refused on all.
        given: the other arguments, by name; tensors ``[B, L]`` are passed as ``[T]``.
    """
    batch = PackedBatch.from_padded(mask, group_ids=group_ids)
    if groups_span_ranks:
        mark_torn(batch, "ranks")
    level = "token" if advantages.dim() == 2 else "row"
    flat = {name: each.reshape(-1) if isinstance(each, torch.Tensor) else each for name, each in given.items()}
    flat |= {"advantages": advantages.reshape(-1), "advantage_level": level, "batch": batch}
    selection = method(**accepted_keywords(method, **flat))
    require_type(
        isinstance(selection, Selection), "entropy: expected it to return a Selection, got {}", type(selection)
    )
    selection = selection.as_mask()
    low, high = (None, None) if selection.bounds is None else selection.bounds
    rest = (getattr(selection, name) for name in _LAST)
    fields = dict(zip(("token_mask", *SELECTED), (selection.mask, selection.weight, low, high, *rest), strict=True))
    return {name: each.reshape(mask.shape) for name, each in fields.items() if each is not None}


def selection_of(inputs: Mapping[str, Any]) -> Selection | None:
    """The selection of a micro-batch's rows, without its mask; None where there is none."""
    weight, low, high, kl_weight, factor, addend = given = [inputs.get(name) for name in SELECTED]
    if all(each is None for each in given):
        return None
    return Selection(None, weight, None if low is None and high is None else (low, high), kl_weight, factor, addend)
