"""Estimators whose baseline comes from outside the group."""

from __future__ import annotations

import math

import torch

from ..checks import check, check_places, check_units
from ..segments import statistics
from ..specs import Provenance
from .terms import as_advantages, estimator, known, members_of, scorable


@estimator(Provenance.VERIFIED, tables=True)
def a_star(
    rewards: torch.Tensor,
    group_ids: torch.Tensor | None,
    *,
    beta: float = 0.5,
    mask: torch.Tensor | None = None,
    apply_mask: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """A*-PO: ``A = r - beta log mean_g exp(r / beta)``, the best value that a KL of weight beta to the sampler allows
    (arXiv 2505.20686). Returns ``[S]`` float32.

    The paper samples its value once, from the reference policy: with rewards of both in one call, ``mask`` are the
    rollouts of the reference, ``apply_mask`` those to train on. Its loss is the regression of ``a_star`` on
    ``s = sum (logp - ref_logp)`` times ``beta_2``: the gate ``reinforce()``, these advantages minus ``beta_2 s``, the
    weights ``2 beta_2 seq_mean_token_sum``.

    Args:
        beta: .5 in TRL; towards 0 the value is the best reward, towards infinity the mean.

    Traps: TRL also drops prompts of which no rollout of the reference succeeds: there a success would get a whole
    reward. A group without units in ``mask`` gets 0.

    >>> a_star(torch.tensor([1.0, 0.0, 0.0, 1.0]), None)
    tensor([ 0.2831, -0.7169, -0.7169,  0.2831])
    """
    check_units(rewards=rewards, group_ids=group_ids, mask=mask, apply_mask=apply_mask)
    check(0 < beta < math.inf, "beta: expected a finite number above 0, got {}", beta)
    group = statistics(rewards, group_ids, mask=mask, backend=backend)
    lead = rewards.double() - group.greatest  # at most 0 for members, so no exponential of theirs overflows
    # exp less 1 and its inverse: with a large beta the mean of the exponentials rounds to 1
    scored = scorable(rewards, mask)  # the exponential of a reward of -inf is a number
    mean = statistics((lead / beta).expm1(), group_ids, mask=scored, backend=backend).mean
    receives = members_of(rewards, group, mask if apply_mask is None else apply_mask)
    exact = lead - beta * torch.where(receives, mean, 0.0).log1p()
    return as_advantages(torch.where(receives, exact, 0.0), rewards, backend)


@estimator(Provenance.PAPER)
def poise(
    rewards: torch.Tensor,
    predictions: torch.Tensor,
    sources: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """POISE: ``A_i = r_i - V_j``, the reward that a probe predicts from *another* rollout j of the prompt (arXiv
    2605.07579). Returns ``[S]`` float32.

    A prediction from the rollout's own features would bias the gradient, so a unit that is its own source gets NaN,
    which the loss leaves out and counts, as does one whose source is no unit. Without a reward or a prediction a unit
    gets 0.

    Args:
        predictions: ``[S]``, the reward that the probe predicts from each rollout's features.
        sources: ``[S]`` int64, the place of the rollout whose prediction each unit takes.

    >>> poise(torch.tensor([1.0, 0.0]), torch.tensor([0.25, 0.75]), torch.tensor([1, 0]))
    tensor([ 0.2500, -0.2500])
    """
    check_units(rewards=rewards, predictions=predictions, mask=mask)
    check_places("sources", sources, rewards)
    own = torch.arange(rewards.numel(), device=rewards.device)
    wrong = (sources == own) | (sources < 0) | (sources >= rewards.numel())
    chosen = predictions[torch.where(wrong, own, sources)].double()
    lead = torch.where(wrong, torch.nan, known(rewards.double() - chosen))
    return as_advantages(torch.where(scorable(rewards, mask), lead, 0.0), rewards, backend)
