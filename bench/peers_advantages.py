"""Group-normalised advantages as others compute them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

Run = Callable[[], torch.Tensor]

EPS = 1e-6


def scatter(rewards: torch.Tensor, ids: torch.Tensor, groups: int) -> torch.Tensor:
    """A clean implementation for ids that count 0, 1, ...: two passes of sums per group."""
    count = torch.zeros(groups).index_add(0, ids, torch.ones_like(rewards))
    mean = torch.zeros(groups).index_add(0, ids, rewards) / count
    centred = rewards - mean[ids]
    variance = torch.zeros(groups).index_add(0, ids, centred.square()) / (count - 1)
    return centred / (variance.sqrt()[ids] + EPS)


def scatter_any_ids(rewards: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The same for any ids, which have to be sorted out first."""
    values, dense = ids.unique(return_inverse=True)
    return scatter(rewards, dense, values.numel())


def verl_vectorised(rewards: torch.Tensor, ids: np.ndarray) -> Run:
    from verl.trainer.ppo.core_algos import compute_grpo_vectorized_outcome_advantage

    return _verl(compute_grpo_vectorized_outcome_advantage, rewards, ids)


def verl_loop(rewards: torch.Tensor, ids: np.ndarray) -> Run:
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    return _verl(compute_grpo_outcome_advantage, rewards, ids)


def _verl(estimator: Callable[..., tuple[torch.Tensor, torch.Tensor]], rewards: torch.Tensor, ids: np.ndarray) -> Run:
    """With responses of one token, so that only the statistics are timed."""
    scores, mask = rewards[:, None], torch.ones(rewards.numel(), 1)
    return lambda: estimator(scores, mask, ids, epsilon=EPS)[0][:, 0]
