"""ARES' high-entropy windows under each of its thresholds (arXiv 2510.08457; repository shawn0728/ARES).

The paper has three: a quantile of token entropies averaged over the responses of the prompt (algorithm 1) or of the
mini-batch (main text), and one quantile of all tokens (appendix H: ``forking_tokens("0.05")`` and a vocabulary). The
code takes the median of quantiles of *next* windows, a moving average of it, and trigger words. :func:`.ares` is the
batch quantile of the windows themselves.
"""

from __future__ import annotations

from fractions import Fraction

import torch
import torch.distributed

from ..arguments import check_finite
from ..batch import PackedBatch, as_batch, row_counts, spread_rows, valid_tokens
from ..checks import check, check_precise, check_scalar, check_tokens
from ..distributed import gather, whole_groups
from ..specs import OrderRule, Provenance
from .aggregates import Window, window_aggregate
from .rewards import at_difficulty, check_difficulty, check_three
from .scopes import quantiles
from .selection import Selection
from .signals import preset, read
from .statistics import ScopeStatistics, fit_scopes


@preset(Provenance.PAPER)
def ares_windows(
    entropy: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    *,
    width: int = 4,
    quantile: str | Fraction | float = "0.95",
    of_windows: bool = False,
    process_group: torch.distributed.ProcessGroup | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """The tokens whose forward window has a mean at or above the group's threshold: the mean over the responses of the
    prompt of the quantile of each. ``[T]`` bool (arXiv 2510.08457, algorithm 1).

    Args:
        entropy: ``[T]`` in nats, of the old policy.
        batch: with group ids; without them the mini-batch is one group, as in the main text.
        width: 4; 4 to 8 are best in the paper. Full windows only.
        quantile: 0.95, interpolated, because it is averaged.
        of_windows: True: the quantile of window means, the compared signal, instead of token entropies. With the
            latter, as printed, hardly a window passes.
        process_group: groups, or the mini-batch, span these ranks, whose numbers of rows are read: the call
            synchronises.

    >>> entropy = torch.tensor([0.1, 0.2, 1.5, 1.3, 0.1, 0.2])
    >>> ares_windows(entropy, PackedBatch.from_lengths([6]), width=2, of_windows=True)
    tensor([False, False,  True, False, False, False])
    """
    batch = as_batch(batch)
    check_precise("entropy", entropy)
    check_tokens(batch, entropy=entropy)
    means = window_aggregate(entropy, batch, Window.forward(width), backend=backend)
    measured = means if of_windows else entropy
    of_rows = quantiles(measured, batch, quantile, scope="row", rule=OrderRule.LINEAR, backend=backend)
    groups = whole_groups(batch, process_group, spans=False)
    ids = torch.zeros_like(batch.cu_seqlens[1:]) if groups is None else groups.to(torch.int64)
    threshold = _fitted_in_order(of_rows, ids, process_group, backend).at(ids)
    of_group = torch.where(threshold.members > 0, threshold.mean.to(means.dtype), torch.inf)
    return means >= spread_rows(of_group, batch, torch.inf)


def _fitted_in_order(
    values: torch.Tensor, ids: torch.Tensor, group: torch.distributed.ProcessGroup | None, backend: str | None
) -> ScopeStatistics:
    """Statistics of the values of all rows, of all ranks, in ascending order: the mean is a threshold, and no packing
    and no sharding may change its last bit."""
    if group is not None:
        values, ids = (torch.cat(gather(each, group)) for each in (values, ids))
    order = values.sort(stable=True).indices
    order = order[ids[order].sort(stable=True).indices]
    return fit_scopes(values[order], ids[order], backend=backend)


@preset(Provenance.VERIFIED)
def ares_threshold(
    entropy: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    state: torch.Tensor | None = None,
    *,
    width: int = 4,
    quantile: str | Fraction | float = "0.95",
    memory: float = 0.99,
    process_group: torch.distributed.ProcessGroup | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """The threshold of ARES' code, 0-dim: a moving average of the median over responses of the quantile of their next
    windows' means, the state of the next call.

    Args:
        entropy: ``[T]``; in the code of the ten likeliest tokens, for the windows that it counts with a bucket of the
            others.
        state: the result of the last call. Default: this is the first batch, whose median is the threshold.
        width: 4, of ``{t + 1, ..., t + width}``; a token without a full window takes the mean of its row's.
        memory: 0.99 of the last state.
        process_group: the median is over the responses of these ranks, whose numbers are read: the call synchronises.

    A batch without a response leaves the state, or is NaN.

    >>> entropy = torch.tensor([0.1, 0.2, 1.5, 1.3, 0.1, 0.2])
    >>> ares_threshold(entropy, PackedBatch.from_lengths([6]), torch.tensor(0.5), width=2, quantile="0.5")
    tensor(0.5027)
    """
    batch = as_batch(batch)
    check(0 <= memory <= 1, "memory: expected a number in [0, 1], got {}", memory)
    check_precise("entropy", entropy)
    check_tokens(batch, entropy=entropy)
    carried = window_aggregate(entropy, batch, Window.forward_exclusive(width, boundary="carry"), backend=backend)
    of_rows = quantiles(carried, batch, quantile, scope="row", rule=OrderRule.LINEAR, backend=backend)
    if process_group is not None:
        of_rows = torch.cat(gather(of_rows, process_group))
    rows = of_rows[None]  # as tokens of one row
    median = quantiles(rows, torch.isfinite(rows), "0.5", rule=OrderRule.LINEAR, backend=backend).reshape(())
    if state is None:
        return median
    check_scalar("state", state, entropy.device, "entropy")
    state = state.detach().to(median.dtype)
    moved = torch.where(state.isnan(), median, memory * state + (1 - memory) * median)
    return torch.where(median.isnan(), state, moved)


@preset(Provenance.VERIFIED)
def ares_next_windows(
    entropy: torch.Tensor,
    mask: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    threshold: torch.Tensor,
    *,
    width: int = 4,
    backend: str | None = None,
) -> torch.Tensor:
    """The tokens that ARES' code counts, ``[T]`` bool: trigger words whose *next* ``width`` tokens have a mean entropy
    at or above the threshold.

    Args:
        mask: ``[T]`` bool, tokens at which the likeliest token is a trigger word.
        threshold: 0-dim, from :func:`ares_threshold`; -1 before the first, where every trigger with a full window
            counts.

    >>> entropy = torch.tensor([0.1, 0.2, 1.5, 1.3, 0.1, 0.2])
    >>> given = entropy, torch.ones(6, dtype=torch.bool), PackedBatch.from_lengths([6])
    >>> ares_next_windows(*given, torch.tensor(0.8), width=2)
    tensor([ True,  True, False, False, False, False])
    """
    batch = as_batch(batch)
    check_tokens(batch, mask=mask)
    read(batch, entropy=entropy)
    check_scalar("threshold", threshold, entropy.device, "entropy")
    means = window_aggregate(entropy, batch, Window.forward_exclusive(width), backend=backend)
    return mask & torch.isfinite(means) & (means >= threshold.detach())


@preset(Provenance.VERIFIED, per_token=False)
def count_of_rows(mask: torch.Tensor, batch: PackedBatch | torch.Tensor) -> torch.Tensor:
    """The selected valid tokens of each row, ``[S]`` int64, by a ``mask`` ``[T]`` bool: ARES' ``N_HE``.

    >>> count_of_rows(torch.tensor([True, False, True]), PackedBatch.from_lengths([2, 1]))
    tensor([1, 1])
    """
    batch = as_batch(batch)
    check_tokens(batch, mask=mask)
    return row_counts(batch, mask)


@preset(Provenance.PAPER)
def ares_penalty_weights(
    mask: torch.Tensor,
    difficulty: torch.Tensor,
    beta: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    *,
    relief: float,
) -> Selection:
    """ARES' dynamic penalty ``beta_d rho_t``, rho below 1 inside high-entropy windows (arXiv 2510.08457). Returns a
    :class:`Selection` with a factor on ``kl=hpo_core.kl.k3(1.0)``.

    Args:
        mask: ``[T]`` bool, the windows' tokens: ``cover(ares_windows(...), batch, Window.forward(4))``.
        difficulty: ``[S]`` int64 from :func:`ares_difficulty`; a row without one pays nothing.
        beta: ``[3]``, the coefficient of each difficulty, from a controller.
        relief: rho inside windows; the paper gives no number. Its code never applies it.

    >>> given = torch.tensor([True, False]), torch.tensor([2]), torch.tensor([0.1, 0.2, 0.4])
    >>> ares_penalty_weights(*given, PackedBatch.from_lengths([2]), relief=0.5).kl_weight
    tensor([0.2000, 0.4000])
    """
    batch = as_batch(batch)
    check_tokens(batch, mask=mask)
    check_difficulty(difficulty, batch.cu_seqlens[1:])
    check_three("beta", beta, batch.cu_seqlens)
    check_finite(relief=relief)
    of_rows = at_difficulty(beta, difficulty, 0.0).to(beta.dtype)
    of_token = spread_rows(of_rows, batch, 0.0)
    weight = torch.where(mask, relief * of_token, of_token)
    return Selection(kl_weight=torch.where(valid_tokens(batch), weight, 0.0))
