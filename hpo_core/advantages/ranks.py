"""Estimators that see rewards by rank or as right and wrong."""

from __future__ import annotations

import math

import torch

from ..checks import check, check_units
from ..segments import Chains, chains, scan, statistics
from ..specs import Provenance
from .flat import grpo
from .selection import ordered
from .terms import about_group, among, as_advantages, check_eps, estimator, members_of, scorable


@estimator(Provenance.VERIFIED)
def g2rpo(
    rewards: torch.Tensor,
    group_ids: torch.Tensor | None,
    *,
    mask: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """G2RPO: rewards become the normal quantiles of their ranks, ``Phi^-1((k - 1/2) / n)``, ties their mean (arXiv
    2604.08539). Returns ``[S]`` float32.

    The advantages of a group sum to 0 and are at most ``Phi^-1(1 - 1 / 2n)``; an increasing map of the rewards does not
    change them.

    >>> g2rpo(torch.tensor([0.3, 0.1, 0.3, 0.9, 0.5]), None)
    tensor([-0.2622, -1.2816, -0.2622,  1.2816,  0.5244])
    """
    check_units(rewards=rewards, group_ids=group_ids, mask=mask)
    groups, rank, size = ordered(rewards, group_ids, mask)
    quantile = torch.special.ndtri(((rank.double() + 0.5) / size.clamp(min=1)).clamp(0, 1))
    tie = statistics(torch.where(groups.chain >= 0, quantile, 0.0), _ties(groups, rewards), backend=backend)
    mean = torch.where(tie.members < size, tie.mean, 0.0)  # not the rounding of a sum of all, which is 0
    return as_advantages(groups.unsorted(mean), rewards, backend)


@estimator(Provenance.VERIFIED)
def unlikeliness(
    rewards: torch.Tensor,
    group_ids: torch.Tensor | None,
    likelihoods: torch.Tensor,
    *,
    penalty: float = 0.25,
    eps: float = 1e-6,
    singleton: str = "zero",
    mask: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Unlikeliness reward: GRPO of ``r (1 - penalty k / n)``, k the number of responses of the group that are less
    likely, so that rare right answers gain most (arXiv 2506.02355, official code). Returns ``[S]`` float32.

    Args:
        rewards: ``[S]``, 0 for wrong responses and above 0 for right ones.
        likelihoods: ``[S]``, in the authors' code the mean of ``old_logp`` over the response's tokens; a unit without a
            finite one enters no statistic and gets 0. Of equal ones each has the mean of their ranks.
        penalty: .25 as in the authors' recipe; 0 is :func:`grpo`.
        singleton: of a group of one; ``"raw"`` keeps its reward, as the authors' code does.

    Traps: a group whose responses are all right is no longer flat: its likely ones get advantages below 0. A reward
    below 0 would shrink where the response is likely.

    >>> unlikeliness(torch.tensor([1.0, 1.0, 0.0, 0.0]), None, torch.tensor([-0.2, -0.9, -0.5, -0.1]))
    tensor([ 0.7472,  0.9772, -0.8622, -0.8622])
    """
    check_units(rewards=rewards, group_ids=group_ids, likelihoods=likelihoods, mask=mask)
    check(0 <= penalty <= 1, "penalty: expected a share of the reward in [0, 1], got {}", penalty)
    groups, rank, size = ordered(likelihoods, group_ids, scorable(rewards, mask))
    less_likely = statistics(rank.double(), _ties(groups, likelihoods), backend=backend).mean
    share = groups.unsorted(less_likely / size.clamp(min=1))
    worth = rewards.double() * (1 - penalty * share)
    ranked = scorable(likelihoods, mask)
    worth = about_group(worth, rewards, group_ids, mask=ranked, backend=backend)
    return grpo(worth, group_ids, eps=eps, singleton=singleton, mask=ranked, backend=backend)


@estimator(Provenance.VERIFIED)
def arena(
    ranks: torch.Tensor,
    group_ids: torch.Tensor | None,
    *,
    eps: float = 1e-6,
    mask: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """ArenaRL: GRPO of ``1 - rank / (n - 1)``, the ranks of a tournament (arXiv 2601.06487, official code). Returns
    ``[S]`` float32.

    Args:
        ranks: ``[S]`` floating point, 0 the best of its group. Of ties each has the mean of their ranks in the authors'
            Swiss tournament, the best of them in their round robin and against their anchor.

    Traps: the last two tournaments take the worst rank in place of n - 1, which changes only the weight of eps.

    >>> arena(torch.tensor([0.0, 1.0, 2.0, 3.0]), None)
    tensor([ 1.1619,  0.3873, -0.3873, -1.1619])
    """
    check_units(ranks=ranks, group_ids=group_ids, mask=mask)
    group = statistics(ranks, group_ids, mask=mask, backend=backend)
    # Relative to the mean: an offset common to the ranks costs no digits of float32.
    worth = as_advantages((group.mean - ranks.double()) / (group.members - 1).clamp(min=1), ranks, backend)
    return grpo(worth, group_ids, mask=mask, eps=eps, backend=backend)


@estimator(Provenance.VERIFIED)
def pass_at_k(
    is_correct: torch.Tensor,
    group_ids: torch.Tensor | None,
    k: int,
    *,
    eps: float = 1e-6,
    mask: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Pass@k training: the advantage of a response when any k of the n in its group are rewarded together (arXiv
    2508.10751). Returns ``[S]`` float32.

    With c of n correct: ``rho = 1 - C(n - c, k) / C(n, k)``, ``sigma = sqrt(rho (1 - rho))``, correct ones get
    ``(1 - rho) / (sigma + eps)``, the others ``(1 - rho - C(n - c - 1, k - 1) / C(n - 1, k - 1)) / (sigma + eps)``. k =
    1 is GRPO with ddof 0. The advantages of a group sum to 0; where k responses always or never hold a correct one, and
    where n < k, they are 0.

    Args:
        is_correct: ``[S]`` bool.

    >>> pass_at_k(torch.arange(8) < 2, None, 4)
    tensor([ 0.5222,  0.5222, -0.1741, -0.1741, -0.1741, -0.1741, -0.1741, -0.1741])
    """
    check_units(is_correct=is_correct, group_ids=group_ids, mask=mask)
    check(k >= 1, "k: expected a count of at least 1, got {}", k)
    check_eps(eps)
    group = statistics(is_correct.float(), group_ids, mask=mask, backend=backend)
    n = group.members
    wrong = n - (group.mean * n).round()

    def choose(of: torch.Tensor, some: int) -> torch.Tensor:  # log C(of, some)
        of = of.clamp(min=some)
        return torch.lgamma(of + 1) - torch.lgamma(of - some + 1) - math.lgamma(some + 1)

    # Chances that k of n, and k - 1 of the n - 1 others, are all wrong.
    none = torch.where(wrong >= k, torch.exp(choose(wrong, k) - choose(n, k)), 0.0)
    others = torch.where(wrong - 1 >= k - 1, torch.exp(choose(wrong - 1, k - 1) - choose(n - 1, k - 1)), 0.0)
    scale = (none * (1 - none)).clamp(min=0).sqrt() + eps
    advantages = torch.where(is_correct, none, none - others) / scale
    defined = (n >= k) & (wrong < n) & (wrong >= k)
    defined = defined if mask is None else defined & mask
    return torch.where(defined, advantages, 0.0).float()


@estimator(Provenance.VERIFIED, tables=True)
def grpo_passk(
    rewards: torch.Tensor,
    group_ids: torch.Tensor | None,
    *,
    scaled: bool = True,
    eps: float = 1e-6,
    mask: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """GRPO for pass@k: the best response of a group learns from its lead over the second best, the others do not (arXiv
    2503.19595, verl's ``grpo_passk``). Returns ``[S]`` float32.

    ``A = (r_1 - r_2) / (std_g + eps)``, ddof 1, for the best, 0 for all others: the sum of a group is not 0.

    Args:
        scaled: False leaves out the standard deviation.

    Traps: where several responses share the best reward none has a lead; most groups of binary rewards are such. A
    group of one gets 0; verl raises.

    >>> grpo_passk(torch.tensor([0.2, 0.9, 0.5]), None)
    tensor([0.0000, 1.1390, 0.0000])
    """
    check_units(rewards=rewards, group_ids=group_ids, mask=mask)
    check_eps(eps)
    group = statistics(rewards, group_ids, mask=mask, backend=backend)
    exact, member = rewards.double(), scorable(rewards, mask)
    others = statistics(rewards, group_ids, mask=member & (exact < group.greatest), backend=backend)
    leads = member & (exact == group.greatest) & (others.members > 0) & (group.members - others.members == 1)
    scale = group.deviation(1) + eps if scaled else torch.ones_like(exact)
    return as_advantages(torch.where(leads, (exact - others.greatest) / scale, 0.0), rewards, backend)


@estimator(Provenance.VERIFIED)
def pkpo(
    rewards: torch.Tensor,
    group_ids: torch.Tensor | None,
    k: int,
    *,
    mask: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """PKPO: the contribution of a response to the best of k, ``max r_I - max r_J`` on average over the sets I of k
    responses of the prompt, J being I without it; 0 for the sets without it (arXiv 2505.15201, ``s^(loo-1)``). Returns
    ``[S]`` float32.

    Of n rewards in ascending order ``A_i = A_{i-1} + (r_i - r_{i-1}) C(i, k - 1) / C(n, k)``, i from 0: the k - 1 worst
    get 0, none is negative. The sum is an unbiased estimate of how far the best of k leads the second; at k = n it is
    :func:`grpo_passk` without its deviation. Where n < k, 0.

    Traps: the gradient of the best of k is the *sum* over the n responses: pass as ``weights``
    ``n * aggregation.seq_mean_token_sum(batch)``.

    >>> pkpo(torch.tensor([0.0, 1.0, 0.5, 0.0]), None, 2)
    tensor([0.0000, 0.4167, 0.1667, 0.0000])
    """
    check_units(rewards=rewards, group_ids=group_ids, mask=mask)
    check(k >= 2, "k: expected a count of at least 2, got {}; the best of one is dr_grpo or rloo", k)
    groups, rank, size = ordered(rewards, group_ids, mask)
    counts = (groups.chain >= 0) & (rank >= k - 1)
    value = groups.sorted(torch.where(scorable(rewards, mask), rewards, 0.0)).double()
    lead = torch.zeros_like(value)
    lead[1:] = value[1:] - value[:-1]
    # C(i, k - 1) / C(n, k) = k i! (n - k)! / ((i - k + 1)! n!)
    i, n = torch.where(counts, rank, k - 1).double(), torch.where(counts, size, k).double()
    chance = torch.lgamma(i + 1) - torch.lgamma(i - k + 2) + torch.lgamma(n - k + 1) - torch.lgamma(n + 1)
    steps = torch.where(counts, k * chance.exp() * lead, 0.0)
    total = scan(steps, torch.ones_like(steps), groups.cu_seqlens, backend, forward=True)
    return as_advantages(groups.unsorted(torch.where(counts, total, 0.0)), rewards, backend)


@estimator(Provenance.PAPER)
def qae(
    rewards: torch.Tensor,
    group_ids: torch.Tensor | None,
    *,
    quantile: float = 0.4,
    eps: float = 1e-6,
    mask: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """QAE: GRPO about a quantile, ``(r - Q) / (std + eps)``, ddof 0, Q the least reward that at least the share
    ``quantile`` of the group does not exceed (arXiv 2509.22611). Returns ``[S]`` float32.

    Of rewards of 0 and 1, p of them 1, Q is 0 where ``p <= 1 - quantile``: hard prompts teach by their successes alone,
    easy ones by their mistakes alone, ``1 / sqrt(p (1 - p))`` each. The sum of a group is not 0.

    Args:
        quantile: .4 in the paper. More of it takes more prompts for easy.

    Traps: a port interpolates the quantile, which lies between 0 and 1 in many groups then.

    >>> qae(torch.tensor([1.0, 0.0, 0.0, 0.0]), None), qae(torch.tensor([1.0, 1.0, 1.0, 0.0]), None)
    (tensor([2.3094, 0.0000, 0.0000, 0.0000]), tensor([ 0.0000,  0.0000,  0.0000, -2.3094]))
    """
    check_units(rewards=rewards, group_ids=group_ids, mask=mask)
    check(0 <= quantile <= 1, "quantile: expected a share in [0, 1], got {}", quantile)
    check_eps(eps)
    groups, _, size = ordered(rewards, group_ids, mask)
    rank = (quantile * size.double() - 1e-9).ceil().clamp(min=1).to(torch.int64) - 1  # 0.4 of 5 is 2
    known = torch.where(scorable(rewards, mask), rewards, 0.0)
    group = statistics(rewards, group_ids, mask=mask, backend=backend)
    spread = group.deviation(0)
    exact = (known.double() - _of_rank(groups, known, rank).double()) / (spread + eps)
    taught = members_of(rewards, group, mask) & (spread > 0)
    return as_advantages(torch.where(taught, exact, 0.0), rewards, backend)


@estimator(Provenance.VERIFIED)
def mc_grpo(
    rewards: torch.Tensor,
    group_ids: torch.Tensor | None,
    *,
    eps: float = 1e-3,
    rescaled: bool = False,
    mask: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """MC-GRPO: ``A = (r - median) / (median |r - median| + eps)``, of an even number the lower median (arXiv
    2601.22582). Returns ``[S]`` float32.

    The authors sample one rollout more than they train on and leave one that is the median out of the loss:
    :func:`mc_grpo_samples` says which.

    Args:
        rescaled: True multiplies by n over the number of units whose advantage is not 0. The authors' trainer for GSM8K
            has this factor; the paper and their trainer for MATH do not.

    Traps: where more than half of the rewards are equal the denominator is eps alone: a binary reward gives 1000.

    >>> mc_grpo(torch.tensor([1.0, 2.0, 4.0]), None)
    tensor([-0.9990,  0.0000,  1.9980])
    """
    check_units(rewards=rewards, group_ids=group_ids, mask=mask)
    check_eps(eps)
    ids = torch.zeros_like(rewards, dtype=torch.int64) if group_ids is None else group_ids
    member = scorable(rewards, mask) & (ids >= 0)
    exact = torch.where(member, rewards, 0.0).double()
    centred = torch.where(member, exact - _lower_median(exact, ids, member), 0.0)
    scale = _lower_median(centred.abs(), ids, member) + eps
    advantages = torch.where((centred == 0) | (scale == 0), 0.0, centred / scale)
    if rescaled:
        share = statistics((advantages != 0).float(), ids, mask=member, backend=backend).mean
        advantages = torch.where(advantages == 0, 0.0, advantages / share)
    return as_advantages(advantages, rewards, backend)


@estimator(Provenance.VERIFIED, level="selection")
def mc_grpo_samples(
    rewards: torch.Tensor, group_ids: torch.Tensor | None, *, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """MC-GRPO: all rollouts of a group but one whose reward is the median, which has nothing to teach (arXiv
    2601.22582). Returns ``[S]`` bool.

    Leave the others out of the loss, not of :func:`mc_grpo`, whose statistics are those of all. Of equal rewards the
    one that stands at the median's rank in their order here is left out.

    >>> mc_grpo_samples(torch.tensor([1.0, 0.0, 0.0]), None)
    tensor([ True,  True, False])
    """
    check_units(rewards=rewards, group_ids=group_ids, mask=mask)
    groups, rank, size = ordered(rewards, group_ids, mask)
    return groups.unsorted((rank != (size - 1) // 2) & (groups.chain >= 0))


def _lower_median(values: torch.Tensor, ids: torch.Tensor, member: torch.Tensor) -> torch.Tensor:
    """The lower median of each unit's group ``[S]``."""
    groups = chains(torch.where(member, ids, -1), values)
    return _of_rank(groups, values, (groups.ranks()[1] - 1).clamp(min=0) // 2)


def _of_rank(groups: Chains, values: torch.Tensor, rank: torch.Tensor) -> torch.Tensor:
    """The value ``[S]`` at a rank of the chain of each unit; the ranks ``[S]`` are in the order of places."""
    begin = torch.arange(values.numel(), device=values.device) - groups.ranks()[0]
    place = (begin + rank).clamp(max=max(values.numel() - 1, 0))
    return groups.unsorted(groups.sorted(values)[place])


def _ties(groups: Chains, values: torch.Tensor) -> torch.Tensor:
    """An id for each place of ordered groups: equal values of a group share one; -1 outside of all."""
    chain, value = groups.chain, groups.sorted(values)
    begins = torch.ones_like(chain, dtype=torch.bool)
    begins[1:] = (chain[1:] != chain[:-1]) | (value[1:] != value[:-1])
    return among(begins.cumsum(0), chain >= 0)
