"""Reconstructed methods that follow a course of training: progress, curriculum, and a budget of rollouts."""

from __future__ import annotations

import math

import torch

from ..arguments import check_finite
from ..checks import check, check_units
from ..segments import statistics
from ..specs import Provenance
from .flat import grpo_of_exact
from .terms import estimator, members_of


@estimator(Provenance.RECONSTRUCTED, tables=True)
def craft_gui(
    rule_rewards: torch.Tensor,
    judged_rewards: torch.Tensor,
    group_ids: torch.Tensor | None,
    *,
    judge_weight: float,
    ddof: int = 1,
    eps: float = 1e-6,
    mask: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """CRAFT-GUI: GRPO of a rule-based reward of the action plus a model's reward of the answer (arXiv 2508.11360).
    Returns ``[S]`` float32.

    ``r = rules + judge_weight judged``.

    Assumed: this sum, of which the abstract says only that it combines the two. The curriculum is an order of the data,
    from short trajectories to long ones, and no part of the advantage. A unit that lacks one of the two is in no
    statistic and gets 0.

    Args:
        rule_rewards: ``[S]``, of form, kind of action and place of a click, as one number.
        judged_rewards: ``[S]``, the model's.
        judge_weight: without a default, because no public account gives one.

    >>> rules, judged = torch.tensor([1.0, 1.0, 0.0]), torch.tensor([0.0, 1.0, 1.0])
    >>> craft_gui(rules, judged, None, judge_weight=0.5)
    tensor([ 0.0000,  1.0000, -1.0000])
    """
    check_units(rule_rewards=rule_rewards, judged_rewards=judged_rewards, group_ids=group_ids, mask=mask)
    check_finite(judge_weight=judge_weight)
    worth = rule_rewards.double() + judge_weight * judged_rewards.double()
    return grpo_of_exact(worth, rule_rewards, group_ids, ddof=ddof, eps=eps, mask=mask, backend=backend)


@estimator(Provenance.RECONSTRUCTED, tables=True)
def datarus(
    structure_rewards: torch.Tensor,
    model_rewards: torch.Tensor,
    group_ids: torch.Tensor | None,
    *,
    progress: float,
    ddof: int = 1,
    eps: float = 1e-6,
    mask: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Datarus: GRPO of a reward that moves from the structure of a response to the score of a hierarchical reward
    model (arXiv 2508.13382). Returns ``[S]`` float32.

    ``r = c structure + (1 - c) model``, ``c = (1 + cos(pi progress)) / 2``.

    Assumed: that form of the cosine curriculum, from structure alone to the model alone; the paper's abstract says that
    a cosine shifts the emphasis from the one to the other. A unit that lacks one of the two is in no statistic and gets
    0, whatever the progress.

    Args:
        structure_rewards: ``[S]``, of the tags.
        model_rewards: ``[S]``, the reward model's of steps and of the whole, as one number.
        progress: the updates done over those planned, in [0, 1].

    >>> tags, model = torch.tensor([1.0, 1.0, 0.0]), torch.tensor([0.0, 1.0, 1.0])
    >>> datarus(tags, model, None, progress=0.5)
    tensor([-0.5773,  1.1547, -0.5773])
    """
    check_units(structure_rewards=structure_rewards, model_rewards=model_rewards, group_ids=group_ids, mask=mask)
    check(0 <= progress <= 1, "progress: expected a number in [0, 1], got {}", progress)
    share = 0.5 + 0.5 * math.cos(math.pi * progress)
    worth = share * structure_rewards.double() + (1 - share) * model_rewards.double()
    return grpo_of_exact(worth, model_rewards, group_ids, ddof=ddof, eps=eps, mask=mask, backend=backend)


@estimator(Provenance.RECONSTRUCTED, level="selection")
def v05_samples(
    rewards: torch.Tensor,
    group_ids: torch.Tensor | None,
    prior: torch.Tensor,
    *,
    cost: float = 1 / 256,
    most: int = 16,
    mask: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """V_0.5's budget: whether the prompt of each unit should get one more rollout before its baseline,
    :func:`hpo_core.advantages.v05`, is taken (arXiv 2603.10848). Returns ``[S]`` bool, the same for all units of a
    prompt with a reward.

    One step ahead, for rewards of -1 and 1 over k rollouts: the baseline's error is ``e(k) = D / (k D + 1)``,
    ``D = max(0, (mean_g - V)^2 - 1 / k)`` the conflict with the prior, and a rollout is worth it while
    ``e(k) - e(k + 1) > cost`` and ``k < most``. A prior that the rollouts do not contradict needs none.

    Assumed: D stays as it is in the step ahead, and e is the error at the best weight of the prior. The paper's rule
    was read in a review, which gives ``e(k) + cost k`` as the risk, a cost of .0039 and 4 to 16 rollouts: where the
    prior is contradicted as strongly as can be, 1 / 256, which is .0039, stops at 16 by itself.

    Args:
        rewards: ``[S]``, of the rollouts so far, of which a prompt starts with 4.
        prior: ``[S]`` in [-1, 1], V of each unit's prompt; NaN: no more rollouts.
        cost: of a rollout, in units of squared error.
        most: rollouts of a prompt.

    >>> right, prior = torch.ones(4), torch.tensor([0.8, 0.8, 0.8, 0.8])
    >>> v05_samples(right, None, prior).any(), v05_samples(right, None, -prior).all()
    (tensor(False), tensor(True))
    """
    check_units(rewards=rewards, group_ids=group_ids, prior=prior, mask=mask)
    check(cost >= 0, "cost: expected a number >= 0, got {}", cost)
    check(most >= 1, "most: expected a count of at least 1, got {}", most)
    group = statistics(rewards, group_ids, mask=mask, backend=backend)
    count = group.members.double()
    conflict = ((group.mean - prior.double()).square() - 1 / count).clamp(min=0)
    gain = conflict / (count * conflict + 1) - conflict / ((count + 1) * conflict + 1)
    return (gain > cost) & (count < most) & members_of(rewards, group, mask)
