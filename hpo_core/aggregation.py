"""The per-row loss weights: every denominator lives here.

``loss = sum_t m_t w[s(t)] loss_t``: each function returns the ``[S]`` float32 weights ``w`` of one aggregation mode,
made once per optimiser step from global counts. That makes the loss and its gradient independent of how the step is cut
into micro-batches and spread over ranks.

Common arguments:
    total: the count of the whole optimiser step (int or 0-dim tensor) instead of this batch's own: tokens, rows or
    groups.
    process_group: sum this batch's own count over these ranks (one all-reduce); not together with ``total``.
    gradient_reduction: ``"sum"`` if the engine adds gradients over ranks (or there is one rank), ``"mean"`` if it
        averages them (DDP, FSDP): multiplies the weights by the world size of ``process_group``, or of the default
        group.
    selected: bool ``[T]``: count only these tokens (the denominators of a window's own tokens).
"""

from __future__ import annotations

import torch
import torch.distributed

from . import ops
from .batch import PackedBatch, renumber
from .checks import check, check_device, check_dtype, check_shape, check_type, examines

__all__ = ["fixed_length", "prompt_mean", "seq_mean_token_mean", "seq_mean_token_sum", "token_mean"]

Total = int | torch.Tensor | None
Group = torch.distributed.ProcessGroup | None


@examines
def token_mean(
    batch: PackedBatch,
    *,
    total: Total = None,
    process_group: Group = None,
    gradient_reduction: str = "sum",
    selected: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mean over tokens, ``w_s = 1 / N`` (DAPO, arXiv 2503.14476). ``total``: N, the valid tokens of the optimiser step.

    >>> token_mean(PackedBatch.from_lengths([3, 1]))
    tensor([0.2500, 0.2500])
    """
    counts = _counts(batch, selected)
    scale = _scale(counts.sum(), total, process_group, gradient_reduction)
    return scale.repeat(batch.rows)


@examines
def seq_mean_token_mean(
    batch: PackedBatch,
    *,
    total: Total = None,
    process_group: Group = None,
    gradient_reduction: str = "sum",
    selected: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mean over rows of the mean over their tokens, ``w_s = 1 / (S n_s)`` (GRPO, arXiv 2402.03300).

    ``total``: S. Default: the rows with at least one valid token, as verl counts; TRL counts all rows: pass
    ``total=batch.rows``.

    >>> seq_mean_token_mean(PackedBatch.from_lengths([4, 1]))
    tensor([0.1250, 0.5000])
    """
    counts = _counts(batch, selected)
    scale = _scale((counts > 0).sum(), total, process_group, gradient_reduction)
    return _over(scale, counts)


@examines
def seq_mean_token_sum(
    batch: PackedBatch,
    *,
    total: Total = None,
    process_group: Group = None,
    gradient_reduction: str = "sum",
    selected: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mean over rows of the sum over their tokens, ``w_s = 1 / S`` (LUSPO, arXiv 2602.05261). ``total``: S, as above.

    >>> seq_mean_token_sum(PackedBatch.from_lengths([4, 1]))
    tensor([0.5000, 0.5000])
    """
    counts = _counts(batch, selected)
    scale = _scale((counts > 0).sum(), total, process_group, gradient_reduction)
    return scale.repeat(batch.rows)


@examines
def fixed_length(
    batch: PackedBatch,
    length: float,
    *,
    total: Total = None,
    process_group: Group = None,
    gradient_reduction: str = "sum",
) -> torch.Tensor:
    """Sum over tokens divided by a constant, ``w_s = 1 / (S length)`` (Dr.GRPO, arXiv 2503.20783).

    ``length``: the constant, usually the longest completion allowed. ``total``: S. Default: all rows of the batch,
    empty ones too.

    >>> fixed_length(PackedBatch.from_lengths([4, 1]), 10)
    tensor([0.0500, 0.0500])
    """
    check(length > 0, "length: expected a constant > 0, got {}", length)
    rows = batch.row_counts.new_full((), batch.rows)
    scale = _scale(rows, total, process_group, gradient_reduction) / length
    return scale.repeat(batch.rows)


@examines
def prompt_mean(
    batch: PackedBatch,
    *,
    total: Total = None,
    process_group: Group = None,
    gradient_reduction: str = "sum",
    selected: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mean over prompt groups of the mean over all their tokens, ``w_s = 1 / (G sum of n over the group)`` (ScaleRL).

    Needs ``batch.group_ids``. ``total``: G. Default: the groups with at least one valid token. The rows of a group must
    be in one batch; with groups cut over micro-batches compute the weights once for the whole step and slice them.

    >>> batch = PackedBatch.from_lengths([3, 1, 2], group_ids=torch.tensor([5, 5, 9]))
    >>> prompt_mean(batch)
    tensor([0.1250, 0.1250, 0.2500])
    """
    check(batch.group_ids is not None, "group_ids: prompt_mean needs them; pass group_ids to PackedBatch")
    assert batch.group_ids is not None
    counts = _counts(batch, selected)
    group, _, _ = renumber(batch.group_ids)
    tokens = torch.zeros_like(counts).scatter_add_(0, group, counts)  # integers: no order to depend on
    scale = _scale((tokens > 0).sum(), total, process_group, gradient_reduction)
    return _over(scale, tokens[group])


def _counts(batch: PackedBatch, selected: torch.Tensor | None) -> torch.Tensor:
    """Tokens that count, per row ``[S]``."""
    if selected is None:
        return batch.row_counts
    shape = batch.padded_shape or (batch.total_tokens,)
    check_dtype("selected", selected, (torch.bool,), "pass a bool mask")
    check_shape("selected", selected, shape, "[T] (or the padded [B, L])")
    check_device("selected", selected, batch.device, "the batch")
    chosen = selected.reshape(-1) if batch.mask is None else selected.reshape(-1) & batch.mask
    return ops.row_counts(chosen.contiguous(), batch.cu_seqlens, batch.total_tokens, None)


def _scale(own: torch.Tensor, total: Total, group: Group, gradient_reduction: str) -> torch.Tensor:
    """``1 / count`` as a 0-dim float32 tensor; 0 where the count is 0, so that an empty step has loss 0."""
    check(
        gradient_reduction in ("sum", "mean"),
        "gradient_reduction: expected 'sum' or 'mean', got {!r}",
        gradient_reduction,
    )
    check(total is None or group is None, "total: give the global count, or process_group to sum it over, not both")
    if group is not None:
        own = own.clone()
        torch.distributed.all_reduce(own, group=group)
    if isinstance(total, torch.Tensor):
        check(total.dim() == 0, "total: expected a number or a 0-dim tensor, got shape {}", list(total.shape))
        check(
            total.is_cpu or total.device == own.device,
            "total: expected device cpu or {} (that of the batch), got {}",
            own.device,
            total.device,
        )
        check_type(not total.is_complex() and total.dtype != torch.bool, "total: expected a count, got {}", total.dtype)
    elif total is not None:
        check_type(isinstance(total, (int, float, torch.SymInt)), "total: expected a count, got {!r}", total)
    if total is not None:  # a number is filled in: a copy from the host would synchronise
        own = total.to(own.device) if isinstance(total, torch.Tensor) else own.new_full((), total, dtype=torch.float64)
    count = own.to(torch.float64)  # so that counts beyond 2^24 tokens stay exact until the one division
    factor = 1.0
    if gradient_reduction == "mean":
        check(
            torch.distributed.is_available() and torch.distributed.is_initialized(),
            "gradient_reduction: 'mean' needs torch.distributed to be initialised; on one process use 'sum'",
        )
        factor = float(torch.distributed.get_world_size(group))
    return torch.where(count > 0, factor / count, torch.zeros_like(count)).to(torch.float32)


def _over(scale: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    return torch.where(counts > 0, scale / counts.clamp(min=1), torch.zeros_like(scale))
