"""GEPO: sequence ratios whose denominator is the sampler's expectation over all responses to the prompt."""

from __future__ import annotations

import torch

from .. import ops
from ..batch import PackedBatch, alone_without, as_batch, renumber, row_counts, row_sums, spread_rows, valid_tokens
from ..checks import check, check_precise, check_tokens
from ..distributed import whole_groups
from ..specs import GroupStatistics
from .inputs import of_logps


@of_logps
def gepo_old_logp(old_logp: torch.Tensor, batch: PackedBatch | torch.Tensor) -> torch.Tensor:
    """``old_logp`` ``[T]`` for GEPO, group expectation policy optimisation: at each token ``log E``, E the sampler's
    expected probability of a response to the prompt (arXiv 2508.17850).

    ``E = sum q^2 / sum q`` over the responses of the prompt, q the geometric mean of a response's token probabilities.
    Under ``gspo(0.2, 0.2)`` and ``aggregation.seq_mean_token_mean`` the ratio of a response is then ``p / E`` in place
    of ``p / q``: no denominator is as small as that of the least likely response, however old the sampler is.

    Args:
        old_logp: ``[T]``, of the sampler. A token whose number is not finite is in no mean and keeps it, so that the
            loss leaves it out and counts it.
        batch: with ``group_ids``, whole prompts; a trajectory in none is one by itself, as under ``gspo()``.

    Epsilons are .2 in the authors' code, those of its trainer.

    Traps: the ratio is not 1 before the first update, so that ``first_order`` promises nothing here: a likely response
    is clipped at once if its advantage is above 0. Log-ratios in the metrics are those to E. The authors' code takes
    all responses of a device for one prompt.

    >>> batch = PackedBatch.from_lengths([2, 1], group_ids=torch.tensor([0, 0]))
    >>> gepo_old_logp(torch.tensor([0.8, 0.2, 0.1]).log(), batch).exp()
    tensor([0.3400, 0.3400, 0.3400])
    """
    batch = as_batch(batch)
    check_precise("old_logp", old_logp)
    check_tokens(batch, old_logp=old_logp)
    groups = whole_groups(batch, spans=False)
    check(groups is not None, "batch: GEPO compares a prompt's responses; pass group_ids [S] to PackedBatch")
    assert groups is not None
    valid, given = valid_tokens(batch), old_logp.detach()
    counted = valid & given.isfinite()
    tokens = row_counts(batch, counted)
    row = torch.arange(batch.rows, device=batch.device)
    trajectory = row if batch.trajectories is None else batch.trajectories[0]
    row_mean = row_sums(torch.where(counted, given, 0.0), batch) / tokens  # without tokens 0 / 0: in no mean
    own = _statistics(row_mean, trajectory, tokens)
    mean = torch.where(own.members > 0, own.mean, torch.nan)
    group = renumber(alone_without(groups, trajectory))[0]
    once = 1 / _statistics(torch.zeros_like(mean), trajectory, None).members
    greatest = _statistics(mean, group, None).greatest
    lead = (mean - greatest).exp()
    expected = greatest + (_statistics(lead.square(), group, once).mean / _statistics(lead, group, once).mean).log()
    return torch.where(counted, spread_rows(expected, batch, 0.0).to(given.dtype), torch.where(valid, given, 0.0))


def _statistics(values: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor | None) -> GroupStatistics:
    given = None if weights is None else weights.float()
    return GroupStatistics(*ops.group_statistics(values.float(), ids, given, None, None))
