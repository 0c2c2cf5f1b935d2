"""Which rollouts of a group to train on: ``[S]`` bool, exactly k of each group, or all where it has no more.

Pass the result as ``mask`` of an estimator, or leave the others out of the batch (``PackedBatch.select``). Ties go to
units that stand first, so that the choice depends on nothing else.
"""

from __future__ import annotations

import torch

from ..checks import check, check_units
from ..segments import Chains, chains
from ..specs import Provenance
from .terms import estimator, scorable

__all__ = ["d3s_samples", "ordered", "pf_ppo"]

_ROUNDING = 1e-12  # of the variance of numbers in [0, 1]


def ordered(
    values: torch.Tensor, group_ids: torch.Tensor | None, mask: torch.Tensor | None
) -> tuple[Chains, torch.Tensor, torch.Tensor]:
    """Units with finite values in ascending order of each group; the rank of each place, and the size of its group."""
    ids = torch.zeros_like(values, dtype=torch.int64) if group_ids is None else group_ids.to(torch.int64)
    member = scorable(values, mask)
    groups = chains(torch.where(member, ids, -1), torch.where(member, values, 0.0))
    return groups, *groups.ranks()


@estimator(Provenance.PAPER, level="selection")
def d3s_samples(
    advantages: torch.Tensor,
    group_ids: torch.Tensor | None,
    k: int,
    *,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """D3S: the k units of each group whose advantages vary most (arXiv 2509.22115). Returns ``[S]`` bool.

    Such a set is some of the lowest and some of the highest; of several with the same variance the one with the fewest
    low ones is taken.

    Args:
        advantages: ``[S]``; rewards choose the same units, for the variance is taken inside a group.

    >>> d3s_samples(torch.tensor([0.0, 1.0, 5.0, 9.0]), None, 2)
    tensor([ True, False, False,  True])
    """
    check_units(advantages=advantages, group_ids=group_ids, mask=mask)
    check(k >= 1, "k: expected a count of at least 1, got {}", k)
    groups, rank, size = ordered(advantages, group_ids, mask)
    value = groups.sorted(torch.where(torch.isfinite(advantages), advantages, 0.0)).double()
    begin = torch.arange(value.numel(), device=value.device) - rank
    last = max(value.numel() - 1, 0)
    least, greatest = value[begin.clamp(max=last)], value[(begin + size - 1).clamp(0, last)]
    # Sums go through all groups: the offset and the scale of one cost no other digits.
    value = torch.where(greatest > least, (value - least) / (greatest - least), 0.0)
    sums = [torch.cat([value.new_zeros(1), power.cumsum(0)]) for power in (value, value.square())]
    best = torch.full_like(value, -1.0)
    lowest = torch.zeros_like(rank)
    for low in range(k + 1):
        left, right = begin + torch.clamp(size, max=low), begin + (size - (k - low)).clamp(min=0)
        first, second = (total[left] - total[begin] + total[begin + size] - total[right] for total in sums)
        variance = second / k - (first / k).square()
        better = variance > best + _ROUNDING
        best, lowest = torch.where(better, variance, best), torch.where(better, low, lowest)
    chosen = (rank < lowest) | (rank >= size - (k - lowest)) | (size <= k)
    return groups.unsorted(chosen & (groups.chain >= 0))


@estimator(Provenance.PAPER, level="selection")
def pf_ppo(
    rewards: torch.Tensor,
    group_ids: torch.Tensor | None,
    *,
    best: int = 1,
    worst: int = 1,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """PF-PPO: the responses with the best and the worst rewards, which a reward model judges most reliably (arXiv
    2409.06957). Returns ``[S]`` bool.

    Args:
        best, worst: how many of each; (k, 0) is best of n.

    >>> pf_ppo(torch.tensor([0.1, 0.9, 0.5]), None)
    tensor([ True,  True, False])
    """
    check_units(rewards=rewards, group_ids=group_ids, mask=mask)
    check(best >= 0 and worst >= 0, "best, worst: expected counts >= 0, got {} and {}", best, worst)
    groups, rank, size = ordered(rewards, group_ids, mask)
    chosen = (rank < worst) | (rank >= size - best)
    return groups.unsorted(chosen & (groups.chain >= 0))
