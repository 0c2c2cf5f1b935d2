"""Group-normalised advantages as others compute them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

Run = Callable[[], torch.Tensor]

EPS = 1e-6


def scatter(rewards: torch.Tensor, ids: torch.Tensor, groups: int) -> torch.Tensor:
    """A clean implementation for ids that count 0, 1, ...: two passes of sums per group."""
    zeros = rewards.new_zeros(groups)
    count = zeros.index_add(0, ids, torch.ones_like(rewards))
    mean = zeros.index_add(0, ids, rewards) / count
    centred = rewards - mean[ids]
    variance = zeros.index_add(0, ids, centred.square()) / (count - 1)
    return centred / (variance.sqrt()[ids] + EPS)


def scatter_any_ids(rewards: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The same for any ids, which have to be sorted out first."""
    values, dense = ids.unique(return_inverse=True)
    return scatter(rewards, dense, values.numel())


def gigpo_scatter(
    rewards: torch.Tensor, prompts: torch.Tensor, trajectories: torch.Tensor, anchors: torch.Tensor
) -> torch.Tensor:
    """GiGPO by sums per group, for steps that stand in the order of trajectories of one length."""
    per_trajectory = rewards.view(int(trajectories.max()) + 1, -1)
    returns = torch.zeros_like(per_trajectory)
    following = torch.zeros_like(per_trajectory[:, 0])
    for step in reversed(range(per_trajectory.shape[1])):
        following = per_trajectory[:, step] + 0.95 * following
        returns[:, step] = following
    of_episode = normalised(per_trajectory.sum(1), prompts.view(per_trajectory.shape)[:, 0])
    _, together = (prompts * (int(anchors.max()) + 1) + anchors).unique(return_inverse=True)
    return of_episode[trajectories] + normalised(returns.view(-1), together)


def normalised(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    groups = int(ids.max()) + 1
    zeros = torch.zeros(groups, dtype=values.dtype)
    count = zeros.index_add(0, ids, torch.ones_like(values))
    centred = values - (zeros.index_add(0, ids, values) / count)[ids]
    deviation = (zeros.index_add(0, ids, centred.square()) / (count - 1).clamp(min=1)).sqrt()
    return torch.where(count[ids] > 1, centred / (deviation[ids] + EPS), 0.0)


def gigpo_loop(
    rewards: torch.Tensor, prompts: torch.Tensor, trajectories: torch.Tensor, anchors: torch.Tensor
) -> torch.Tensor:
    """The same as trainers have it: dictionaries of lists of scalars."""
    steps: dict[int, list[int]] = {}
    for place, trajectory in enumerate(trajectories.tolist()):
        steps.setdefault(trajectory, []).append(place)
    episode, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    for places in steps.values():
        following = torch.zeros(())
        for place in reversed(places):
            following = rewards[place] + 0.95 * following
            returns[place] = following
        episode[places] = rewards[places].sum()
    out = torch.zeros_like(rewards)
    once = [places[0] for places in steps.values()]
    for values, keys, members in (
        (episode, [(p,) for p in prompts.tolist()], once),
        (returns, list(zip(prompts.tolist(), anchors.tolist(), strict=True)), range(len(rewards))),
    ):
        groups: dict[tuple[int, ...], list[int]] = {}
        for place in members:
            groups.setdefault(keys[place], []).append(place)
        for place, key in enumerate(keys):
            own = values[groups[key]]
            if len(own) > 1:
                out[place] += (values[place] - own.mean()) / (own.std() + EPS)
    return out


def verl_vectorised(rewards: torch.Tensor, ids: np.ndarray) -> Run:
    from verl.trainer.ppo.core_algos import compute_grpo_vectorized_outcome_advantage

    return _verl(compute_grpo_vectorized_outcome_advantage, rewards, ids)


def verl_loop(rewards: torch.Tensor, ids: np.ndarray) -> Run:
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    return _verl(compute_grpo_outcome_advantage, rewards, ids)


def _verl(estimator: Callable[..., tuple[torch.Tensor, torch.Tensor]], rewards: torch.Tensor, ids: np.ndarray) -> Run:
    """verl's estimator on responses of one token, so that only the statistics are timed."""
    scores, mask = rewards[:, None], torch.ones(rewards.numel(), 1)
    return lambda: estimator(scores, mask, ids, epsilon=EPS)[0][:, 0]
