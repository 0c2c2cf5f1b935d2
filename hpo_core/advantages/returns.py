"""Returns and temporal differences along trajectories, of which estimators of steps are made."""

from __future__ import annotations

import torch

from ..arguments import constants, examines
from ..batch import PackedBatch
from ..checks import check, check_units
from ..segments import Chains, chains, scan
from .terms import about_group, as_advantages, known
from .whitening import whiten


@examines
@constants
def discounted_returns(
    rewards: torch.Tensor,
    trajectory_ids: torch.Tensor,
    gamma: float = 1.0,
    *,
    positions: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """``R_t = r_t + gamma R_{t+1}`` along each trajectory. Returns ``[N]``.

    Args:
        rewards: ``[N]``, one per step; a NaN makes the returns of its step and of those before it NaN.
        trajectory_ids: ``[N]`` integers in any order; a step with a negative id gets 0.
        positions: ``[N]``, the order of steps in a trajectory. Default: that in which they stand here.

    >>> discounted_returns(torch.tensor([0.0, 3.0, 1.0]), torch.tensor([0, 1, 0]), 0.5)
    tensor([0.5000, 3.0000, 1.0000])
    """
    check_units(rewards=rewards, trajectory_ids=trajectory_ids)
    steps = chains(trajectory_ids, positions)
    return as_advantages(steps.unsorted(returns_along(rewards, steps, gamma, backend=backend)), rewards, backend)


def check_discounts(**given: float) -> None:
    for name, number in given.items():
        check(0 <= number <= 1, "{}: expected a number in [0, 1], got {}", name, number)


def returns_along(rewards: torch.Tensor, steps: Chains, gamma: float, *, backend: str | None = None) -> torch.Tensor:
    """The discounted returns ``[N]`` float64 at places of the chains."""
    check_discounts(gamma=gamma)
    along = steps.sorted(rewards).double()
    return scan(along, torch.full_like(along, gamma), steps.cu_seqlens, backend)


def episode_returns(rewards: torch.Tensor, steps: Chains, *, backend: str | None = None) -> torch.Tensor:
    """The sum of the rewards of each step's trajectory, ``[N]`` float64; 0 for a step in none."""
    sums = returns_along(rewards, steps, 1.0, backend=backend)
    return steps.unsorted(torch.where(steps.chain >= 0, steps.first(sums), 0.0))


def generalised_advantages(
    rewards: torch.Tensor,
    values: torch.Tensor,
    steps: Chains,
    gamma: float,
    lam: float | torch.Tensor,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """GAE: ``d_t = r_t + gamma V_{t+1} - V_t``, ``A_t = d_t + gamma lambda A_{t+1}``; V is 0 behind a trajectory.
    lambda is one number or ``[N]`` at places of the chains. Returns ``[N]`` float64."""
    along, value = steps.sorted(rewards).double(), steps.sorted(values).double()
    difference = along + gamma * steps.following(value) - value
    gains = torch.ones_like(difference) * (gamma * lam)
    return steps.unsorted(scan(difference, gains, steps.cu_seqlens, backend))


def once(steps: Chains) -> torch.Tensor:
    """Weights ``[U]`` that count every chain once: 1 for its first unit."""
    return steps.unsorted(steps.begins().float())


def finished_tokens(
    exact: torch.Tensor,
    token_rewards: torch.Tensor,
    batch: PackedBatch,
    valid: torch.Tensor,
    whitened: bool,
    backend: str | None,
) -> torch.Tensor:
    """The values that were computed in float64, whitened over valid tokens where asked; an offset of all costs no
    digits."""
    if not whitened:
        return as_advantages(known(exact), token_rewards, backend)
    check(
        not batch.is_part,
        "batch: this batch comes from micro_batches, and would be whitened over its own tokens alone; take the entries "
        "of the part among the advantages of the whole batch, or pass whitened=False",
    )
    advantages = about_group(exact, token_rewards, None, mask=valid, backend=backend)
    return whiten(advantages, torch.ones_like(advantages), mask=valid, backend=backend)
