"""Mergeable states of rows of logits over parts of the vocabulary.

A state is four numbers per row, whatever the size of the part. Ranks that hold shards of a vocabulary, and loops over
chunks of a projection, compute the state of their part and exchange states only. The gradient of a part needs the state
of the whole vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from .arguments import examines
from .backends import is_reference
from .checks import check, check_device, check_dtype, check_shape, examined, require_type
from .logprobs import TokenLogprobs, check_operands
from .ops import is_traced
from .ops.logprob_states import LogprobState, finished, folded, mapped
from .ops.logprob_states import part as part_of
from .ops.logprobs import backward, check_columns
from .reference import logprob_states as reference
from .specs import LogitRows
from .support import check_ids_of_tokens, checked_temperature

__all__ = ["LogprobState", "finish", "merge", "part", "part_gradient"]


@examines
def part(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float | torch.Tensor = 1.0,
    ignore_index: int = -100,
    *,
    first: int,
    vocabulary: int,
    entropy: bool = True,
    backend: str | None = None,
) -> LogprobState:
    """The state of the columns ``first`` to ``first + columns - 1`` of a vocabulary.

    Args:
        logits: ``[..., columns]``, as :func:`~hpo_core.token_logprobs` takes them; no gradient goes through a state.
        targets: ``[...]`` ids in the whole vocabulary.
        temperature, ignore_index, backend: as in :func:`~hpo_core.token_logprobs`.
        first, vocabulary: the id of the first column, and the size of the whole vocabulary.
        entropy: whether an entropy will be needed; without it the state has no ``distance``.

    Returns:
        :class:`LogprobState` of float32 ``[...]`` (the reference: float64).

    >>> part(torch.tensor([[0.0, 1.0]]), torch.tensor([3]), first=2, vocabulary=9, entropy=False)
    LogprobState(top=tensor([1.]), others=tensor([0.3679]), distance=None, target_logit=tensor([1.]))
    """
    rows = _checked_rows(logits.detach(), targets, temperature, ignore_index, first, vocabulary, backend)
    if not is_reference(logits, backend):
        return part_of(rows, 3 if entropy else 2, backend)
    top, others, distance, target_logit = reference.part(rows)
    return LogprobState(top, others, distance if entropy else None, target_logit)


def merge(states: Sequence[LogprobState], temperature: float | torch.Tensor = 1.0) -> LogprobState:
    """The state of several parts together: ``s = s_1 + sum c_i (1 + s_i)`` and
    ``w = w_1 + sum c_i (w_i + delta_i (1 + s_i))`` over the other parts i.

    Part 1 has the greatest logit m; ``delta_i = (m - m_i) / temperature`` and ``c_i = e^-delta_i``.

    Parts are added up in their order in float64, and the result is rounded once: the same order gives the same bits
    on every rank. Each part of a vocabulary occurs once; there may be any number of parts, and a merged state can be
    merged again. The result has the shape and dtype of the first state. Which rows are ignored is unknown here: each
    temperature is above 0.

    >>> logits, targets = torch.tensor([[2.0, 1.0, 0.0, -1.0]]), torch.tensor([1])
    >>> parts = [part(logits[:, at : at + 2], targets, first=at, vocabulary=4) for at in (0, 2)]
    >>> merge(parts)
    LogprobState(top=tensor([2.]), others=tensor([0.5530]), distance=tensor([0.5073]), target_logit=tensor([1.]))
    """
    is_sequence = isinstance(states, list | tuple) and not isinstance(states, LogprobState) and len(states) > 0
    got = f"an empty {type(states).__name__}" if type(states) in (list, tuple) else type(states)
    require_type(is_sequence, "states: expected a list of at least one LogprobState, got {}", got)
    states = [_checked_state(f"states[{at}]", state) for at, state in enumerate(states)]
    top = states[0].top
    for at, state in enumerate(states):
        check_shape(f"states[{at}]", state.top, top.shape, "[...] (that of the first)")
        check_device(f"states[{at}]", state.top, top.device, "the first")
        check(
            (state.distance is None) == (states[0].distance is None),
            "states[{}]: expected a distance in every state or in none; make all with the same entropy=",
            at,
        )
    inverse = 1.0 / checked_temperature(temperature, torch.zeros_like(top, dtype=torch.int64), -1, exact=True)
    merged = folded(states, inverse)
    return mapped(merged, lambda tensor: tensor.to(top.dtype))


@examines
def finish(
    state: LogprobState, targets: torch.Tensor, temperature: float | torch.Tensor = 1.0, ignore_index: int = -100
) -> TokenLogprobs:
    """Log-probabilities and entropies from the state of a whole vocabulary, in float32 and without a gradient.

    ``logp = (x_y - m) / temperature - log1p(s)`` and ``H = log1p(s) + w / (1 + s)``, the results of
    :func:`~hpo_core.token_logprobs`.

    >>> state = part(torch.tensor([[2.0, 1.0, 0.0, -1.0]]), torch.tensor([1]), first=0, vocabulary=4)
    >>> finish(state, torch.tensor([1]))
    TokenLogprobs(logp=tensor([-1.4402]), entropy=tensor([0.9475]))
    """
    check_ids_of_tokens(targets)
    state = _checked_state("state", state)
    check_shape("state", state.top, targets.shape, "[...] (that of targets)")
    check_device("state", state.top, targets.device, "targets")
    inverse = 1.0 / checked_temperature(temperature, targets, ignore_index, exact=True)
    return TokenLogprobs(*finished(state, inverse, targets == ignore_index)[:2])


@examines
def part_gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    state: LogprobState,
    logp_gradient: torch.Tensor | None,
    entropy_gradient: torch.Tensor | None = None,
    temperature: float | torch.Tensor = 1.0,
    ignore_index: int = -100,
    *,
    first: int,
    vocabulary: int,
    backend: str | None = None,
) -> torch.Tensor:
    """The gradient of a part's logits, in their dtype, from the gradients of the results of the whole vocabulary.

    ``(a 1[j = y] - p_j (a + b (log p_j + H))) / temperature`` for the gradients a and b ``[...]`` float32 of logp and
    entropy; a gradient of None is 0.

    Args:
        state: the state of the whole vocabulary, from :func:`merge`; an ``entropy_gradient`` needs its ``distance``.
        logits, targets, temperature, ignore_index, first, vocabulary, backend: as in :func:`part`.

    >>> logits, targets = torch.tensor([[2.0, 1.0, 0.0, -1.0]]), torch.tensor([1])
    >>> state = merge([part(logits[:, at : at + 2], targets, first=at, vocabulary=4) for at in (0, 2)])
    >>> part_gradient(logits[:, 2:], targets, state, torch.tensor([1.0]), first=2, vocabulary=4)
    tensor([[-0.0871, -0.0321]])
    """
    rows = _checked_rows(logits, targets, temperature, ignore_index, first, vocabulary, backend)
    state = _checked_state("state", state)
    check_shape("state", state.top, targets.shape, "[...] (that of targets)")
    check_device("state", state.top, logits.device, "logits")
    for name, tensor in (("logp_gradient", logp_gradient), ("entropy_gradient", entropy_gradient)):
        if tensor is not None:
            check_dtype(name, tensor, (torch.float32, torch.float64), f"use {name}.float()")
            check_shape(name, tensor, targets.shape, "[...] (that of targets)")
            check_device(name, tensor, logits.device, "logits")
    check(
        entropy_gradient is None or state.distance is not None,
        "state: expected a distance for an entropy_gradient, got None; make its parts with entropy=True",
    )
    # The gradient of a row of -inf alone is NaN, as its results are.
    state = state._replace(top=state.top.masked_fill(state.top == -math.inf, math.nan))
    statistics = torch.stack([each.flatten() for each in state[:3] if each is not None])
    if is_reference(logits, backend):
        return reference.part_gradient(rows, statistics, logp_gradient, entropy_gradient).to(logits.dtype)
    of_logp, of_entropy = (each if each is None else each.float() for each in (logp_gradient, entropy_gradient))
    if is_traced(logits):
        given = *rows, backend or "", statistics.float(), of_logp, of_entropy
        grad: torch.Tensor = torch.ops.hpo_core.token_logprobs_backward(*given)
        return grad
    return backward(rows, backend or "", statistics.float(), of_logp, of_entropy)


def _checked_rows(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float | torch.Tensor,
    ignore_index: int,
    first: int,
    vocabulary: int,
    backend: str | None,
) -> LogitRows:
    exact = is_reference(logits, backend)
    check_operands(logits, targets, exact)
    check_columns(first, logits.shape[-1], vocabulary)
    temperature = checked_temperature(temperature, targets, ignore_index, exact)
    each, number = (temperature, 1.0) if isinstance(temperature, torch.Tensor) else (None, temperature)
    return LogitRows(
        logits, targets.to(torch.int64).contiguous(), None if each is None else each.contiguous(), number,
        ignore_index, None, first, vocabulary,
    )  # fmt: skip


def _checked_state(name: str, state: LogprobState) -> LogprobState:
    require_type(isinstance(state, LogprobState), "{}: expected a LogprobState, got {}", name, type(state))
    fields: dict[str, Any] = {}
    for field, tensor in state._asdict().items():
        whole = f"{name}.{field}"
        if tensor is None and field == "distance":
            continue
        fields[field] = examined(whole, tensor)
        check_dtype(whole, fields[field], (torch.float32, torch.float64), f"use {whole}.float()")
        check_shape(whole, fields[field], fields["top"].shape, "[...] (that of top)")
        check_device(whole, fields[field], fields["top"].device, "top")
    return state._replace(**fields)
