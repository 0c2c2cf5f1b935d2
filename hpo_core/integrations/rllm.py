"""rLLM: estimators of hpo_core in its registry. Its losses are verl's, which :mod:`hpo_core.integrations.verl` serves.

    import hpo_core.integrations.rllm
    trainer = AgentTrainer(..., traj_group_adv_estimator_map={"solver": "hpo_rloo"})

``traj_group_adv_estimator_map`` names an estimator for each role; ``rllm.algorithm.adv_estimator`` is an enumeration
that takes none from outside. Importing this module registers those of ``ESTIMATORS`` under ``hpo_`` and their name, in
this process: with rLLM's verl backend the trainer is another one, so the module that defines the workflow imports this
one. Groups may be of any size. ``norm_adv_by_std_in_grpo=False`` is refused by estimators that divide by a deviation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

try:
    from rllm.trainer.algorithms.advantage import register_rllm_adv_estimator  # type: ignore[import-not-found,unused-ignore]
except ImportError as error:
    raise ImportError("hpo_core.integrations.rllm needs rLLM from github.com/rllm-org/rllm") from error

from .. import advantages
from ..advantages.terms import accepted_keywords, check_estimator, is_multi_reward, level_of
from ..checks import check, require_type
from . import prompt_advantages

__all__ = ["ESTIMATORS", "register_advantage"]

# Estimators of trajectories that need no more than rLLM gives: rewards, groups and lengths.
ESTIMATORS = tuple(name for name in prompt_advantages.ESTIMATORS if level_of(getattr(advantages, name)) == "row")


def register_advantage(name: str, estimator: Callable[..., torch.Tensor]) -> None:
    """Make an estimator of trajectories one of rLLM's, in this process.

    It is called on the rewards of all trajectories of a role ``[S]``, with those of ``group_ids`` and ``lengths`` (the
    tokens of a trajectory's responses) that it takes; fix the rest with ``functools.partial``.

    Raises:
        ValueError: an estimator that needs an argument that rLLM does not give.
    """
    require_type(callable(estimator), "estimator: expected one of hpo_core.advantages, got {!r}", estimator)
    level = level_of(estimator)
    check(
        level == "row" and not is_multi_reward(estimator),
        "estimator: expected one of trajectories and a single reward, got one of {}s; let steps carry their own "
        "advantages with use_precomputed_advantage",
        level,
    )
    check_estimator("estimator", estimator, ("group_ids", "lengths"), "rLLM")
    register_rllm_adv_estimator(name)(functools.partial(_advantage, estimator))


def _advantage(
    estimator: Callable[..., torch.Tensor],
    /,
    rewards: Sequence[np.ndarray],
    algorithm_config: Any = None,
    traj_groups: Sequence[Any] | None = None,
    **_: Any,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The function that rLLM calls: one array of rewards for each group, and as many arrays of advantages and
    returns."""
    if not len(rewards):
        return [], []
    sizes = [len(group) for group in rewards]
    scaled = getattr(algorithm_config, "norm_adv_by_std_in_grpo", True)
    settings = prompt_advantages.settings_of(estimator, 1.0, scaled, "norm_adv_by_std_in_grpo")
    flat = torch.from_numpy(np.concatenate(rewards).astype(np.float32))
    groups = torch.repeat_interleave(torch.arange(len(sizes), device="cpu"), torch.tensor(sizes, device="cpu"))
    available: dict[str, torch.Tensor] = {"group_ids": groups}
    if traj_groups is not None:
        lengths = [
            float(sum(len(step.response_ids) for step in trajectory.steps))
            for group in traj_groups
            for trajectory in group.trajectories
        ]
        available["lengths"] = torch.tensor(lengths, dtype=torch.float32, device="cpu")
    values = estimator(flat, **accepted_keywords(estimator, flat, **available), **settings).numpy()
    parts = np.split(values, np.cumsum(sizes)[:-1])
    return parts, parts


for _name in ESTIMATORS:
    register_advantage(f"hpo_{_name}", getattr(advantages, _name))
