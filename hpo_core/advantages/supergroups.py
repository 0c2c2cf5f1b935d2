"""SGRPO: groups of samples inside supergroups, whose rewards and advantages are put together in three ways."""

from __future__ import annotations

import torch

from ..checks import check, check_units
from ..segments import chains, dense_ids, statistics
from ..specs import Center, GroupTerm, Provenance, Scale
from .returns import once
from .terms import Term, about_group, among, as_advantages, check_eps, combine, estimator, scale_of, scorable


@estimator(Provenance.VERIFIED)
def sgrpo(
    rewards: torch.Tensor,
    group_rewards: torch.Tensor,
    supergroup_ids: torch.Tensor,
    group_ids: torch.Tensor,
    *,
    group_weight: float = 0.5,
    scaled: bool = False,
    credits: torch.Tensor | None = None,
    temperature: float = 1.0,
    eps: float = 1e-4,
    mask: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """SGRPO: ``A = (1 - w) A_rollout + w A_group``, rollouts against those of the whole supergroup, groups against its
    groups, each leaving itself out (official code). Returns ``[S]`` float32.

    Args:
        group_rewards: ``[S]``, the reward of each unit's group: equal for its members.
        supergroup_ids: ``[S]`` integers, the supergroup within which groups are compared; negative: none.
        group_weight: w; 0 is RLOO over the supergroup.
        scaled: divide each part by its standard deviation (ddof 1) plus eps.
        credits: ``[S]`` floating point, the contribution of each rollout to its group's reward. With z its normalised
            value in the group (ddof 1, eps 1e-4), A_group goes to rollouts by ``n softmax(z / temperature)`` where it
            is positive and by ``n softmax(-z / temperature)`` where it is negative; the mean over the group stays.
            None: all alike.

    The authors' other combinations: :func:`sgrpo_reward_sum`, :func:`sgrpo_hierarchical_sum`. Their thresholds on a
    group's mean rewards, below which its reward is 0, belong to ``group_rewards``.

    A unit that lacks either reward has none: it is in no statistic and gets 0. A rollout of a supergroup, but of no
    group, has no group part.

    >>> r, of_group = torch.tensor([1.0, 0.0, 0.5, 0.5]), torch.tensor([0.8, 0.8, 0.2, 0.2])
    >>> sgrpo(r, of_group, torch.zeros(4, dtype=torch.int64), torch.tensor([0, 0, 1, 1]))
    tensor([ 0.6333, -0.0333, -0.3000, -0.3000])
    """
    check_units(
        rewards=rewards, group_rewards=group_rewards, supergroup_ids=supergroup_ids, group_ids=group_ids,
        credits=credits, mask=mask,
    )  # fmt: skip
    _check_weight(group_weight)
    scored = scorable(rewards, mask) & torch.isfinite(group_rewards)
    group = dense_ids(supergroup_ids, group_ids)
    of_groups = _of_groups(
        group_rewards, supergroup_ids, group, scored, GroupTerm(scale=scale_of(scaled), eps=eps), backend
    )
    if credits is not None:
        check(temperature > 0, "temperature: expected a number above 0, got {}", temperature)
        standing = combine([Term(credits, group, GroupTerm(eps=1e-4))], mask=scored, backend=backend).double()
        gain, loss = (_softmax(way * standing / temperature, group, scored, backend) for way in (1, -1))
        of_groups = of_groups * torch.where(of_groups > 0, gain, loss)
    own = GroupTerm(center=Center.LEAVE_ONE_OUT, scale=scale_of(scaled), eps=eps, coefficient=1 - group_weight)
    of_rollouts = combine([Term(rewards, supergroup_ids, own)], mask=scored, backend=backend)
    return as_advantages(of_rollouts + group_weight * of_groups, rewards, backend)


@estimator(Provenance.VERIFIED, tables=True)
def sgrpo_reward_sum(
    rewards: torch.Tensor,
    group_rewards: torch.Tensor,
    supergroup_ids: torch.Tensor,
    *,
    group_weight: float = 0.5,
    scaled: bool = False,
    eps: float = 1e-4,
    mask: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """SGRPO, sum of rewards: ``(1 - w) r + w R_group`` against that of all other rollouts of the supergroup (official
    code). Returns ``[S]`` float32.

    Args:
        group_rewards: ``[S]``, the reward of each unit's group: equal for its members.
        supergroup_ids: ``[S]`` integers, the supergroup within which groups are compared; negative: none.
        group_weight: w.
        scaled: divide by the standard deviation of that sum over the supergroup (ddof 1) plus eps.

    >>> r, of_group = torch.tensor([1.0, 0.0, 0.5, 0.5]), torch.tensor([0.8, 0.8, 0.2, 0.2])
    >>> sgrpo_reward_sum(r, of_group, torch.zeros(4, dtype=torch.int64))
    tensor([ 0.5333, -0.1333, -0.2000, -0.2000])
    """
    check_units(rewards=rewards, group_rewards=group_rewards, supergroup_ids=supergroup_ids, mask=mask)
    _check_weight(group_weight)
    together = (1 - group_weight) * rewards.double() + group_weight * group_rewards.double()
    rule = GroupTerm(center=Center.LEAVE_ONE_OUT, scale=scale_of(scaled), eps=eps)
    together = about_group(together, rewards, supergroup_ids, mask=mask, backend=backend)
    return combine([Term(together, supergroup_ids, rule)], mask=mask, backend=backend)


@estimator(Provenance.VERIFIED)
def sgrpo_hierarchical_sum(
    rewards: torch.Tensor,
    group_rewards: torch.Tensor,
    supergroup_ids: torch.Tensor,
    group_ids: torch.Tensor,
    *,
    group_weight: float = 0.5,
    scaled: bool = False,
    eps: float = 1e-4,
    mask: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """SGRPO, hierarchical sum: ``A = (1 - w) A_rollout + w A_group``, rollouts against the others of their *group*,
    groups against the others of the supergroup (official code). Returns ``[S]`` float32.

    Args:
        group_rewards: ``[S]``, the reward of each unit's group: equal for its members.
        supergroup_ids: ``[S]`` integers, the supergroup within which groups are compared; negative: none.
        group_weight: w.
        scaled: divide by the standard deviation of ``(1 - w) r + w R_group`` over the supergroup (ddof 1) plus eps.

    >>> r, of_group = torch.tensor([1.0, 0.0, 0.5, 0.5]), torch.tensor([0.8, 0.8, 0.2, 0.2])
    >>> sgrpo_hierarchical_sum(r, of_group, torch.zeros(4, dtype=torch.int64), torch.tensor([0, 0, 1, 1]))
    tensor([ 0.8000, -0.2000, -0.3000, -0.3000])
    """
    check_units(
        rewards=rewards, group_rewards=group_rewards, supergroup_ids=supergroup_ids, group_ids=group_ids, mask=mask
    )
    check_eps(eps)
    _check_weight(group_weight)
    scored = scorable(rewards, mask) & torch.isfinite(group_rewards)
    group = dense_ids(supergroup_ids, group_ids)
    own = GroupTerm(center=Center.LEAVE_ONE_OUT, scale=Scale.NONE)
    of_rollouts = combine([Term(rewards, group, own)], mask=scored, backend=backend)
    of_groups = _of_groups(group_rewards, supergroup_ids, group, scored, GroupTerm(scale=Scale.NONE), backend)
    advantages = (1 - group_weight) * of_rollouts.double() + group_weight * of_groups
    if scaled:
        together = (1 - group_weight) * rewards.double() + group_weight * group_rewards.double()
        supergroup = among(supergroup_ids, group >= 0)
        together = about_group(together, rewards, supergroup, mask=scored, backend=backend)
        scale = statistics(together, supergroup, mask=scored, backend=backend).deviation(1) + eps
        advantages = torch.where((advantages == 0) | (scale == 0), 0.0, advantages / scale)
    return as_advantages(advantages, rewards, backend)


def _check_weight(group_weight: float) -> None:
    check(0 <= group_weight <= 1, "group_weight: expected a number in [0, 1], got {}", group_weight)


def _of_groups(
    group_rewards: torch.Tensor,
    supergroup_ids: torch.Tensor,
    group: torch.Tensor,
    scored: torch.Tensor,
    rule: GroupTerm,
    backend: str | None,
) -> torch.Tensor:
    """Rewards of groups against those of the supergroup's other groups, each of which counts once."""
    supergroup = among(supergroup_ids, group >= 0)
    first = once(chains(among(group, scored)))
    centred = combine([Term(group_rewards, supergroup, rule, first)], mask=scored, backend=backend)
    number = statistics(group_rewards, supergroup, weights=first, mask=scored, backend=backend).members
    return torch.where(number > 1, number / (number - 1).clamp(min=1), 0.0) * centred  # for all copies of a group


def _softmax(logits: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor, backend: str | None) -> torch.Tensor:
    """``n softmax`` over the members of each group: 1 on average."""
    odds = torch.exp(logits - statistics(logits, ids, mask=mask, backend=backend).greatest)
    mean = statistics(odds, ids, mask=mask, backend=backend).mean
    return torch.where(mean > 0, odds / mean, 1.0)
