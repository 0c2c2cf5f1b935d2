"""Estimators of tokens whose rewards a model gives beside the outcome."""

from __future__ import annotations

import torch

from ..arguments import check_finite
from ..batch import PackedBatch, as_batch, row_counts, row_sums, spread_rows, valid_tokens
from ..checks import check_rows, check_tokens
from ..segments import scan, statistics
from ..specs import Provenance
from .flat import rloo
from .returns import finished_tokens
from .terms import estimator


@estimator(Provenance.VERIFIED, level="token")
def prime(
    token_rewards: torch.Tensor,
    rewards: torch.Tensor,
    group_ids: torch.Tensor | None,
    batch: PackedBatch | torch.Tensor,
    *,
    process_weight: float = 5.0,
    outcome_weight: float = 5.0,
    whitened: bool = True,
    backend: str | None = None,
) -> torch.Tensor:
    """PRIME: returns of process rewards and outcomes, each less a leave-one-out baseline of the prompt, whitened over
    tokens (arXiv 2502.01456, as verl's recipe has it). Returns ``[T]`` float32.

    ``G_t = process_weight n / (n - 1) sum over t' >= t of (p_t' - m) + outcome_weight rloo(r)``: p the process reward
    of a token, m the mean over the prompt's n responses of their tokens' mean; then
    ``(G - mean) / sqrt(var + 1e-8)``, ddof 1.

    Args:
        token_rewards: p ``[T]``; PRIME's are ``beta (logp - ref_logp)`` of a reward model that is trained on outcomes
            in each step. Those at masked tokens do not count. One that is NaN or infinite takes its row out of the
            process baseline: tokens behind it keep their returns, against the other rows' mean, it and the tokens
            before it get 0.
        rewards: r ``[S]``, outcomes. A row without one, or without a prompt, or alone in it, gets nothing of them.
        process_weight, outcome_weight: 5 and 5, the recipe's.
        whitened: False leaves the returns as they are, for ``over_ranks(whiten)`` where other ranks have tokens, too.

    Traps: m is subtracted at every token, so that a long response of average tokens has a return of 0 at its start.

    >>> batch = PackedBatch.from_lengths([2, 1])
    >>> prime(torch.tensor([0.5, 0.0, 0.0]), torch.tensor([1.0, 0.0]), None, batch, whitened=False)
    tensor([ 7.5000,  3.7500, -6.2500])
    """
    batch = as_batch(batch)
    check_rows(batch, rewards=rewards, group_ids=group_ids)
    check_tokens(batch, token_rewards=token_rewards)
    check_finite(process_weight=process_weight, outcome_weight=outcome_weight)
    valid = valid_tokens(batch)
    given = torch.where(valid, token_rewards, 0.0).double()
    ones = torch.ones_like(given)
    mean = row_sums(given, batch, backend) / row_counts(batch)  # of a row without tokens 0 / 0: in no baseline
    # Kernels round to float32: differences from the least mean keep digits that the means would lose at every token.
    least = statistics(mean, group_ids, backend=backend).least
    group = statistics(mean - least, group_ids, backend=backend)
    compared = group.members > 1
    gain = torch.where(compared, process_weight * group.members / (group.members - 1).clamp(min=1), 0.0)
    centred = torch.where(valid, given - spread_rows(least + group.mean, batch, 0.0), 0.0)
    outcome = outcome_weight * rloo(rewards, group_ids, backend=backend).double()
    exact = spread_rows(gain, batch, 0.0) * scan(centred, ones, batch.cu_seqlens, backend)
    exact = torch.where(valid, exact + spread_rows(outcome, batch, 0.0), 0.0)
    return finished_tokens(exact, token_rewards, batch, valid, whitened, backend)
