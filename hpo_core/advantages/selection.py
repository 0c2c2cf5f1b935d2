"""Selections of rollouts to train on: ``[S]`` bool; of each group exactly k, or all where it has no more, or whole
groups.

Pass the result as ``mask`` of an estimator, or leave the others out of the batch (``PackedBatch.select``). Of equal
units the first are the lowest, so that the choice depends on nothing else.
"""

from __future__ import annotations

import torch

from ..checks import check, check_units
from ..gates.draws import draws_of
from ..segments import Chains, chains, statistics
from ..specs import Provenance
from .terms import estimator, scorable

_ROUNDING = 1e-12  # of the variance of numbers in [0, 1]


def ordered(
    values: torch.Tensor, group_ids: torch.Tensor | None, mask: torch.Tensor | None
) -> tuple[Chains, torch.Tensor, torch.Tensor]:
    """Units with finite values in ascending order of each group; the rank of each place, and the size of its group."""
    ids = torch.zeros_like(values, dtype=torch.int64) if group_ids is None else group_ids.to(torch.int64)
    member = scorable(values, mask)
    groups = chains(torch.where(member, ids, -1), torch.where(member, values, 0.0))
    return groups, *groups.ranks()


@estimator(Provenance.VERIFIED, level="selection")
def d3s_samples(
    advantages: torch.Tensor, group_ids: torch.Tensor | None, k: int, *, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """D3S: the k units of each group whose advantages vary most (arXiv 2509.22115), as in PODS (arXiv 2504.13818).
    Returns ``[S]`` bool.

    Such a set is some of the lowest and some of the highest; of several with the same variance the one with the fewest
    low ones is taken. The code of PODS compares variances in float32, so that rounding chooses among those.

    Args:
        advantages: ``[S]``; rewards choose the same units, because the variance is taken inside a group.

    >>> d3s_samples(torch.tensor([0.0, 1.0, 5.0, 9.0]), None, 2)
    tensor([ True, False, False,  True])
    """
    check_units(advantages=advantages, group_ids=group_ids, mask=mask)
    check(k >= 1, "k: expected a count of at least 1, got {}", k)
    k = min(k, max(advantages.numel(), 1))  # no group is larger
    groups, rank, size = ordered(advantages, group_ids, mask)
    value = groups.sorted(torch.where(torch.isfinite(advantages), advantages, 0.0)).double()
    begin = torch.arange(value.numel(), device=value.device) - rank
    end = begin + size

    def at(place: torch.Tensor) -> torch.Tensor:
        return value[place.clamp(0, max(value.numel() - 1, 0))]

    least, greatest = at(begin), at(end - 1)
    value = torch.where(greatest > least, (value - least) / (greatest - least), 0.0)
    first, second, best = torch.zeros_like(value), torch.zeros_like(value), torch.full_like(value, -1.0)
    lowest = torch.zeros_like(rank)
    for place in range(k):
        first, second = first + at(end - 1 - place), second + at(end - 1 - place).square()
    for low in range(k + 1):
        variance = second / k - (first / k).square()
        better = variance > best + _ROUNDING
        best, lowest = torch.where(better, variance, best), torch.where(better, low, lowest)
        joins, leaves = at(begin + low), at(end - k + low)  # one more low unit for the least of the high ones
        first, second = first + joins - leaves, second + joins.square() - leaves.square()
    chosen = (rank < lowest) | (rank >= size - (k - lowest)) | (size <= k)
    return groups.unsorted(chosen & (groups.chain >= 0))


@estimator(Provenance.VERIFIED, level="selection")
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

    Traps: the authors draw a batch from the best and the worst of each prompt with replacement; verl's form draws as
    many rows as the batch has anew, by weights of the batch's rewards.

    >>> pf_ppo(torch.tensor([0.1, 0.9, 0.5]), None)
    tensor([ True,  True, False])
    """
    check_units(rewards=rewards, group_ids=group_ids, mask=mask)
    check(best >= 0 and worst >= 0, "best, worst: expected counts >= 0, got {} and {}", best, worst)
    groups, rank, size = ordered(rewards, group_ids, mask)
    chosen = (rank < worst) | (rank >= size - best)
    return groups.unsorted(chosen & (groups.chain >= 0))


@estimator(Provenance.PAPER, level="selection")
def swarm_samples(
    rewards: torch.Tensor,
    group_ids: torch.Tensor | None,
    is_local: torch.Tensor,
    *,
    seed: int,
    external: int = 2,
    flat: bool = True,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Swarm sampling (SAPO of Gensyn; the gate ``sapo`` is another method): a node's own groups, and a few of those
    that other nodes shared (arXiv 2509.08721). Returns ``[S]`` bool.

    Of the groups that are not local ``external`` are drawn, uniformly and without repetition. All local groups stay.
    The advantages are GRPO's, as in :func:`~hpo_core.advantages.grpo` with this ``mask``; the released trainer has an
    eps of 1e-8.

    Args:
        is_local: ``[S]`` bool, whether the node's own policy wrote the rollout; the same for a whole group: a question
            that two nodes answered is two groups.
        seed: give every round its own. A group is drawn by its id, wherever its units stand.
        external: 2, as in the released recipe.
        flat: False: only groups whose rewards differ may be drawn, because others give no advantage. The paper leaves
            the choice to each node; the released data manager looks at no rewards.

    Traps: the tokens of another model are trained on as if this policy had written them: take their log-probabilities
    under this policy as ``old_logp``. Rewards are this node's.

    >>> rewards, groups = torch.tensor([1.0, 0, 1, 1, 0, 1]), torch.tensor([0, 0, 7, 7, 9, 9])
    >>> swarm_samples(rewards, groups, groups == 0, seed=1, external=1, flat=False)
    tensor([ True,  True, False, False,  True,  True])
    """
    check_units(rewards=rewards, group_ids=group_ids, is_local=is_local, mask=mask)
    check(external >= 0, "external: expected a count of groups, got {}", external)
    ids = torch.zeros_like(rewards, dtype=torch.int64) if group_ids is None else group_ids.to(torch.int64)
    member = scorable(rewards, mask) & (ids >= 0)
    group = statistics(rewards, ids, mask=member)
    shared = member & ~is_local & (flat | (group.least < group.greatest))
    key = torch.where(shared, draws_of(ids, seed), torch.iinfo(torch.int64).max)
    ordered_keys, order = key.sort(stable=True)
    another = torch.zeros_like(ordered_keys)
    another[1:] = (ordered_keys[1:] != ordered_keys[:-1]).to(torch.int64)
    drawn = torch.empty_like(shared)
    drawn[order] = another.cumsum(0) < external
    return (member & is_local) | (shared & drawn)
