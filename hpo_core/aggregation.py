"""The per-row loss weights: every denominator lives here.

``loss = sum_t m_t w[s(t)] loss_t``: each function returns the ``[S]`` float32 weights ``w`` of one aggregation mode,
computed once per optimiser step from global counts. The loss and its gradient then do not depend on how the step is cut
into micro-batches and spread over ranks. docs/distributed.md has a recipe for each engine.

All but ``token_mean`` take each piece of a response that is cut over ranks for a row, since rows with equal
``trajectory_ids`` may as well be turns. docs/levels_over_ranks.md makes the weights of pieces.

Common arguments:
    batch: a :class:`~hpo_core.PackedBatch`, or the ``[B, L]`` mask of a padded one.
    total: the count of the whole optimiser step (number or 0-dim tensor) instead of this batch's own: tokens, rows or
        groups. A part from :meth:`PackedBatch.micro_batches` needs it; slices of the weights of the whole do not.
    process_group: sum this batch's own count over these ranks (one all-reduce); not together with ``total``.
    gradient_reduction: ``"mean"`` if the engine averages gradients over ranks (DDP, FSDP, DeepSpeed): multiplies the
        weights by the world size of ``process_group``, or of the default group; ``"sum"`` if it adds them. With more
        than one rank it has no default: a wrong guess is off by the number of ranks.
    ranks: instead of ``gradient_reduction``: the number of ranks over which the engine averages gradients (1: it adds
        them), for trainers that have counts and ranks as numbers. It takes this batch for the whole step where there is
        neither ``total`` nor ``process_group``.
    selected: bool ``[T]``: count only these tokens (the denominators of a window's own tokens). A gate with a level of
        steps masks tokens outside every step: beside it ``batch.step_of_token() >= 0`` counts those inside, as the
        default weights of a loss do.
"""

from __future__ import annotations

import math
from numbers import Real

import torch
import torch.distributed
from torch.distributed import ProcessGroup

from .arguments import as_float, check_choice, examines
from .batch import PackedBatch, alone_without, as_batch, check_whole, renumber, row_counts, row_weights
from .checks import check, check_device, check_dtype, check_shape_of_tokens, require_type
from .distributed import check_is_step, is_distributed, sum_in_order, world_size
from .specs import Denominator

__all__ = ["fixed_length", "prompt_mean", "seq_mean_token_mean", "seq_mean_token_sum", "token_mean", "vl_norm"]

_NUMBERS = (Real, torch.SymInt, torch.SymFloat)

Total = float | torch.Tensor | None  # trainers divide counts by their accumulation steps


def default(batch: PackedBatch, of_steps: bool) -> torch.Tensor:
    """``token_mean(batch)``, the weights of a loss without ``weights=``, if the batch is the optimiser step.

    ``of_steps``: tokens outside every step are masked, so they are not counted.

    Raises:
        ValueError: the batch is known to be less: a part of a larger batch, or the share of one of several ranks.
    """
    in_steps = ", selected=batch.step_of_token() >= 0" if of_steps else ""
    check_is_step(
        "weights",
        "count",
        batch,
        f"weights[part.rows] of weights = aggregation.token_mean(batch{in_steps})",
        f"weights=aggregation.token_mean(batch{in_steps}, process_group=torch.distributed.group.WORLD, "
        "gradient_reduction='mean') ('sum' if the engine adds gradients)",
    )
    return batch.once(_token_mean_in_steps if of_steps else token_mean)


def _token_mean_in_steps(batch: PackedBatch) -> torch.Tensor:
    return token_mean(batch, selected=batch.once(PackedBatch.step_of_token) >= 0)


@examines
def token_mean(
    batch: PackedBatch | torch.Tensor,
    *,
    total: Total = None,
    process_group: ProcessGroup | None = None,
    gradient_reduction: str | None = None,
    ranks: float | None = None,
    selected: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mean over tokens, ``w_s = 1 / N`` (DAPO, arXiv 2503.14476). ``total``: N, the valid tokens of the optimiser step.

    >>> token_mean(PackedBatch.from_lengths([3, 1]))
    tensor([0.2500, 0.2500])
    """
    batch = as_batch(batch)
    return _of_counts(Denominator.TOKENS, batch, selected, total, process_group, gradient_reduction, ranks)


@examines
def seq_mean_token_mean(
    batch: PackedBatch | torch.Tensor,
    *,
    total: Total = None,
    process_group: ProcessGroup | None = None,
    gradient_reduction: str | None = None,
    ranks: float | None = None,
    selected: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mean over rows of the mean over their tokens, ``w_s = 1 / (S n_s)`` (GRPO, arXiv 2402.03300).

    ``total``: S. Default: the rows with at least one valid token, as verl counts; TRL counts all rows: pass
    ``total=batch.rows``.

    >>> seq_mean_token_mean(PackedBatch.from_lengths([4, 1]))
    tensor([0.1250, 0.5000])
    """
    batch = as_batch(batch)
    return _of_counts(Denominator.ROWS_AND_TOKENS, batch, selected, total, process_group, gradient_reduction, ranks)


@examines
def seq_mean_token_sum(
    batch: PackedBatch | torch.Tensor,
    *,
    total: Total = None,
    process_group: ProcessGroup | None = None,
    gradient_reduction: str | None = None,
    ranks: float | None = None,
    selected: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mean over rows of the sum over their tokens, ``w_s = 1 / S`` (LUSPO, arXiv 2602.05261).

    ``total``: S, as in :func:`seq_mean_token_mean`.

    >>> seq_mean_token_sum(PackedBatch.from_lengths([4, 1]))
    tensor([0.5000, 0.5000])
    """
    batch = as_batch(batch)
    return _of_counts(Denominator.ROWS, batch, selected, total, process_group, gradient_reduction, ranks)


@examines
def fixed_length(
    batch: PackedBatch | torch.Tensor,
    length: float,
    *,
    total: Total = None,
    process_group: ProcessGroup | None = None,
    gradient_reduction: str | None = None,
    ranks: float | None = None,
) -> torch.Tensor:
    """Sum over tokens divided by a constant, ``w_s = 1 / (S length)`` (Dr.GRPO, arXiv 2503.20783).

    ``length``: the constant, usually the longest completion allowed. ``total``: S. Default: all rows of the batch,
    empty ones too.

    >>> fixed_length(PackedBatch.from_lengths([4, 1]), 10)
    tensor([0.0500, 0.0500])
    """
    batch = as_batch(batch)
    _check_length(length)
    rows = batch.cu_seqlens.new_full((), batch.rows)
    scale = _scale(batch, rows, total, process_group, gradient_reduction, ranks) / length
    return scale.repeat(batch.rows)


@examines
def vl_norm(
    batch: PackedBatch | torch.Tensor,
    length: float,
    alpha: float = 1.0,
    *,
    total: Total = None,
    process_group: ProcessGroup | None = None,
    gradient_reduction: str | None = None,
    ranks: float | None = None,
) -> torch.Tensor:
    """Sum over tokens divided by a constant, where a long row counts less than a short one:
    ``w_s = n_s^-alpha / (length sum_j n_j^-alpha)`` (VL Norm, at first named Delta L normalisation, arXiv 2509.07558;
    its code).

    The weights of a step add up to ``1 / length``, as those of :func:`fixed_length` do, which is ``alpha=0`` where no
    row is empty. If the variance of a row's gradient is proportional to its length, 1 gives that of the sum its least
    value; a smaller ``alpha`` learns more from long rows.

    Args:
        length: the constant, usually the longest completion allowed; the authors' code has the padded length.
        alpha: 1, the authors' for CountDown; they take 0.75 for mathematics.
        total: the sum of ``n^-alpha`` over the rows of the optimiser step that have a valid token.

    >>> vl_norm(PackedBatch.from_lengths([4, 1]), 10)
    tensor([0.0200, 0.0800])
    """
    batch = as_batch(batch)
    _check_length(length)
    check(0 <= alpha < math.inf, "alpha: expected an exponent >= 0, got {}", alpha)
    counts = _counts(batch, None)
    shares = torch.where(counts > 0, counts.clamp(min=1).double() ** -alpha, 0.0)
    scale = _scale(batch, sum_in_order(shares), total, process_group, gradient_reduction, ranks)
    return (shares * scale / length).float()


@examines
def prompt_mean(
    batch: PackedBatch | torch.Tensor,
    *,
    total: Total = None,
    process_group: ProcessGroup | None = None,
    gradient_reduction: str | None = None,
    ranks: float | None = None,
    selected: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mean over prompt groups of the mean over all their tokens, ``w_s = 1 / (G sum of n over the group)`` (ScaleRL,
    arXiv 2510.13786).

    Needs ``batch.group_ids``; a row with a negative id is a group by itself. ``total``: G. Default: the groups with at
    least one valid token. The rows of a group must be in one batch; with groups cut over micro-batches compute the
    weights once for the whole step and slice them.

    >>> batch = PackedBatch.from_lengths([3, 1, 2], group_ids=torch.tensor([5, 5, 9]))
    >>> prompt_mean(batch)
    tensor([0.1250, 0.1250, 0.2500])
    """
    batch = as_batch(batch)
    check(batch.group_ids is not None, "group_ids: prompt_mean needs them; pass group_ids to PackedBatch")
    check_whole(batch, "group", "prompt_mean", "take weights[part.rows] of the weights of the whole batch")
    assert batch.group_ids is not None
    counts = _counts(batch, _checked_selected(batch, selected))
    group, _, _ = renumber(alone_without(batch.group_ids))
    tokens = torch.zeros_like(counts).scatter_add_(0, group, counts)  # integer sums do not depend on the order
    scale = _scale(batch, (tokens > 0).sum(), total, process_group, gradient_reduction, ranks)
    return _divided_by(scale, tokens[group])


def _check_length(length: float) -> None:
    check(0 < length < math.inf, "length: expected a constant > 0, got {}", length)


def _checked_selected(batch: PackedBatch, selected: torch.Tensor | None) -> torch.Tensor | None:
    """The tokens that count among the valid ones, ``[T]``; None: all."""
    if selected is None:
        return None
    check_dtype("selected", selected, (torch.bool,), "pass a bool mask")
    check_shape_of_tokens("selected", selected, batch)
    check_device("selected", selected, batch.device, "the batch")
    return selected.reshape(-1)


def _counts(batch: PackedBatch, counted: torch.Tensor | None) -> torch.Tensor:
    """The number of tokens that count, per row ``[S]``."""
    return batch.once(row_counts) if counted is None else row_counts(batch, counted)


def _of_counts(
    denominator: Denominator,
    batch: PackedBatch,
    selected: torch.Tensor | None,
    total: Total,
    process_group: ProcessGroup | None,
    gradient_reduction: str | None,
    ranks: float | None,
) -> torch.Tensor:
    """The weights that need the counts of rows alone: one kernel, unless the step has tokens in other batches, too."""
    counted = _checked_selected(batch, selected)
    if total is None and process_group is None:
        return row_weights(batch, denominator, _factor(batch, total, process_group, gradient_reduction, ranks), counted)
    counts = _counts(batch, counted)
    own = counts if denominator is Denominator.TOKENS else counts > 0
    scale = _scale(batch, own.sum(), total, process_group, gradient_reduction, ranks)
    return _divided_by(scale, counts) if denominator is Denominator.ROWS_AND_TOKENS else scale.repeat(batch.rows)


def _factor(
    batch: PackedBatch,
    total: Total,
    process_group: ProcessGroup | None,
    gradient_reduction: str | None,
    ranks: float | None,
) -> float:
    """The factor of all weights, after checks that a count is that of the whole step."""
    check(
        total is None or process_group is None,
        "total: give the global count, or process_group to sum it over, not both",
    )
    check(
        total is not None or not batch.is_part,
        "total: this batch is a part of a larger one, whose counts it does not know; take weights[part.rows] of the "
        "weights of the whole, or pass total=",
    )
    return _ranks_averaged(total is not None or process_group is not None, process_group, gradient_reduction, ranks)


def _scale(
    batch: PackedBatch,
    own: torch.Tensor,
    total: Total,
    process_group: ProcessGroup | None,
    gradient_reduction: str | None,
    ranks: float | None,
) -> torch.Tensor:
    """``1 / count`` as a 0-dim float32 tensor; 0 where the count is 0, so that an empty step has loss 0."""
    factor = _factor(batch, total, process_group, gradient_reduction, ranks)
    count = _count_of_step(own, total, process_group)
    count = count.to(torch.float64)  # which keeps counts beyond 2^24 tokens exact until the one division
    # A tensor is not read on the host: the root of an invalid count (NaN or below 0) makes the loss NaN, the root
    # of 0 is 0.
    scale = torch.where(count > 0, factor / count, count.sqrt())
    return scale.to(torch.float32)


def _count_of_step(own: torch.Tensor, total: Total, process_group: ProcessGroup | None) -> torch.Tensor:
    """The count of the optimiser step, 0-dim: ``total``, or this batch's ``own``, summed over the group if there is
    one."""
    if total is None:
        if process_group is not None:
            own = own.clone()
            torch.distributed.all_reduce(own, group=process_group)
        return own
    if isinstance(total, torch.Tensor):
        check(total.dim() == 0, "total: expected a number or a 0-dim tensor, got shape {}", list(total.shape))
        check(
            total.is_cpu or total.device == own.device,
            "total: expected device cpu or {} (that of the batch), got {}",
            own.device,
            total.device,
        )
        require_type(
            not total.is_complex() and total.dtype != torch.bool, "total: expected a count, got {}", total.dtype
        )
        return total.to(own.device)
    is_number = isinstance(total, _NUMBERS) and not isinstance(total, bool)
    require_type(is_number, "total: expected a number or a 0-dim tensor, got {!r}", total)
    number = as_float("total", total) if isinstance(total, Real) else total
    check(0 <= number < math.inf, "total: expected a count >= 0, got {}", number)
    return own.new_full((), number, dtype=torch.float64)  # a copy from the host would synchronise


def _ranks_averaged(
    is_global: bool, process_group: ProcessGroup | None, gradient_reduction: str | None, ranks: float | None
) -> float:
    """The number of ranks over which gradients are averaged, a factor of the weights. ``is_global``: the count is the
    count of the step, not of this batch."""
    if ranks is not None:
        check(gradient_reduction is None, "ranks: give it, or gradient_reduction, not both")
        check(0 < ranks < math.inf, "ranks: expected a number of ranks > 0, got {}", ranks)
        return float(ranks)
    if gradient_reduction is not None:
        check_choice("gradient_reduction", gradient_reduction, ("sum", "mean"))
    check(
        gradient_reduction != "mean" or is_distributed(),
        "gradient_reduction: 'mean' needs torch.distributed to be initialised; on one process use 'sum'",
    )
    world = world_size(process_group)
    check(
        world == 1 or (is_global and gradient_reduction is not None),
        "gradient_reduction: {} ranks are initialised: pass process_group= (or total=) to count the tokens of all, and "
        "gradient_reduction='mean' if the engine averages gradients (DDP, FSDP, DeepSpeed), 'sum' if it adds them; "
        "ranks=1 if this batch is the whole step",
        world,
    )
    return float(world) if gradient_reduction == "mean" else 1.0


def _divided_by(scale: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    return torch.where(counts > 0, scale / counts.clamp(min=1), torch.zeros_like(scale))
