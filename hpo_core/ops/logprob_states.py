"""The state of a row of logits over a part of the vocabulary, and the merging of states on one device or over ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed

from ..checks import check, refuse_tangent
from ..specs import LogitRows
from .logprobs import IN_PLACE, logprobs_node, readable, save, token_logprobs


class LogprobState(NamedTuple):
    """The state of rows of logits over a part of the vocabulary; each field has the shape ``[...]`` of the targets.

    A part whose logits are all -inf has the state ``(-inf, 0, 0, -inf)``, the neutral element of merging. The state of
    an ignored row is unspecified; rows with NaN, +inf or a target outside the vocabulary hold NaN.

    It pickles, and loads with ``weights_only=True``.
    """

    top: torch.Tensor  # the greatest logit
    others: torch.Tensor  # the sum of e^((x - top) / temperature) over all but that one
    distance: torch.Tensor | None  # the mean of (top - x) / temperature under the softmax of the part; None: no entropy
    target_logit: torch.Tensor  # the target's logit; -inf where the target is in another part

    def to(self, device: torch.device | str) -> LogprobState:
        return mapped(self, lambda each: each.to(device))


torch.serialization.add_safe_globals([LogprobState])


def part(rows: LogitRows, kept: int, backend: str | None) -> LogprobState:
    """The state of a part in float32; no distance where ``kept`` is 2. Not for the reference backend."""
    logits, targets = rows.logits, rows.targets
    columns = logits.shape[-1]
    if columns == 0:
        nothing = torch.full_like(targets, -torch.inf, dtype=torch.float32)
        zeros = torch.zeros_like(nothing)
        return LogprobState(nothing, zeros, zeros if kept > 2 else None, nothing)
    _, _, statistics = token_logprobs(rows, kept, backend)
    top, others, *distance = statistics.view(kept, *targets.shape)
    column = targets - rows.first
    has_target = (column >= 0) & (column < columns) & (targets != rows.ignore_index)
    logit = logits.gather(-1, column.clamp(0, columns - 1)[..., None]).squeeze(-1).float()
    if rows.floors is not None:
        has_target &= ~(logit < rows.floors)
    return LogprobState(top, others, distance[0] if distance else None, torch.where(has_target, logit, -torch.inf))


def mapped(state: LogprobState, function: Callable[[torch.Tensor], torch.Tensor]) -> LogprobState:
    """The function of each tensor of the state."""
    fields: Any = (None if each is None else function(each) for each in state)
    return LogprobState(*fields)


def inverse_of(temperature: float, temperatures: torch.Tensor | None) -> float | torch.Tensor:
    """1 / temperature in double precision."""
    return 1.0 / temperature if temperatures is None else 1.0 / temperatures.double()


def folded(states: Iterable[LogprobState], inverse: float | torch.Tensor) -> LogprobState:
    """The state of all parts together in float64, added up in their order."""
    fields: Any = (None if each[0] is None else torch.stack(each).double() for each in zip(*states, strict=True))
    table = LogprobState(*fields)
    return merged(mapped(table, lambda each: each[0]), mapped(table, lambda each: each[1:]), inverse)


def merged(state: LogprobState, parts: LogprobState, inverse: float | torch.Tensor) -> LogprobState:
    """The state and the parts that lie along the first dimension of ``parts``, in float64. Each row is added up in
    the order of the parts, whatever the number of rows."""
    fields: Any = (
        None if one is None or many is None else torch.cat([one[None], many.double()])
        for one, many in zip(state, parts, strict=True)
    )
    top, others, distance, target_logit = fields
    greatest, where = top.max(0)
    is_greatest = torch.arange(len(top), device=top.device).view(-1, *[1] * where.dim()) == where
    is_nothing = top == -torch.inf
    delta = torch.where(is_nothing | is_greatest, 0.0, (greatest - top) * inverse)  # NaN where one of them is
    mass = torch.where(is_nothing, 0.0, torch.exp(-delta) * (1 + others))
    # The greatest logit of all is the one that is not among the others.
    all_others = _added(torch.where(is_greatest, others, mass))
    if distance is not None:
        distance = _added(torch.where(is_nothing, 0.0, mass * (distance + delta))) / (1 + all_others)
    return LogprobState(greatest, all_others, distance, target_logit.amax(0))


def _added(terms: torch.Tensor) -> torch.Tensor:
    return functools.reduce(torch.add, terms.unbind())


def finished(
    state: LogprobState, inverse: float | torch.Tensor, ignored: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """logp and entropy from the state of the whole vocabulary, and the statistics ``[kept, T]`` of the backward."""
    top, others, distance, logit = mapped(state, torch.Tensor.double)
    is_defined = torch.isfinite(top) & ~others.isnan()

    def result(values: torch.Tensor) -> torch.Tensor:
        return torch.where(ignored, 0.0, torch.where(is_defined, values, torch.nan)).float()

    normaliser = torch.log1p(others)
    logp = result((logit - top) * inverse - normaliser)
    entropy = None if distance is None else result(normaliser + distance)
    return logp, entropy, torch.stack([result(each).flatten() for each in (top, others, distance) if each is not None])


# ---------------------------------------------------------------------------------------------------------- over ranks


def shared(state: LogprobState, columns: int, group: Any, sizes: Sequence[int]) -> list[LogprobState]:
    """The states of all ranks in their order, from one all-gather, which also carries each rank's number of columns.

    Raises:
        ValueError: on every rank, if the numbers of columns differ from ``sizes``. On a GPU, where reading them would
            synchronise, the states become NaN instead.
    """
    given = [each for each in state if each is not None]
    own = torch.cat([*(each.flatten() for each in given), given[0].new_full((1,), columns)])
    all_ranks = own.new_empty(len(sizes), own.numel())
    torch.distributed.all_gather(list(all_ranks), own, group=group)
    tables = all_ranks[:, :-1].reshape(len(sizes), len(given), *state.top.shape)
    if own.is_cpu:
        columns_by_rank = [int(size) for size in all_ranks[:, -1].tolist()]
        check(
            columns_by_rank == list(sizes) and sum(columns_by_rank) > 0,
            "vocabulary_sizes: expected the columns of every rank, {}, at least one, got {}; pass the sizes of all "
            "ranks in their order (without them all shards have one size)",
            columns_by_rank,
            list(sizes),
        )
    else:
        # A tensor of the sizes would be a copy from the host, for which it waits; a number is an argument of a kernel.
        agrees = torch.stack([given == size for given, size in zip(all_ranks[:, -1], sizes, strict=True)])
        tables = torch.where(agrees.all(), tables, torch.nan)
    fields = [name for name, each in state._asdict().items() if each is not None]
    return [state._replace(**dict(zip(fields, table, strict=True))) for table in tables]


def over_ranks(
    rows: LogitRows, kept: int, backend: str | None, group: Any, sizes: Sequence[int], in_place: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """:func:`~hpo_core.ops.token_logprobs` of columns that the ranks share; the results are the same on all ranks."""
    refuse_tangent("token_logprobs", rows.logits)
    if in_place and torch._C._are_functorch_transforms_active():
        check(not (rows.logits.requires_grad and torch.is_grad_enabled()), IN_PLACE, "a transform of torch.func")
    results: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]
    results = _apply_over_ranks(*readable(rows), backend or "", kept, in_place, group, sizes)
    return results


def _forward_over_ranks(*arguments: Any) -> Any:
    *given, backend, kept, _, group, sizes = arguments
    rows = LogitRows(*given)
    inverse = inverse_of(rows.temperature, rows.temperatures)
    states = shared(part(rows, kept, backend or None), rows.logits.shape[-1], group, sizes)
    return finished(folded(states, inverse), inverse, rows.targets == rows.ignore_index)


def _save_own(ctx: Any, inputs: Any, output: Any) -> None:
    """Keep this rank's logits and the statistics of whole rows, so that the backward communicates nothing."""
    save(ctx, inputs[:-2], output)


_apply_over_ranks = logprobs_node(_forward_over_ranks, _save_own)
