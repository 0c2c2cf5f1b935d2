"""Estimators over one flat grouping that add a belief to the rewards: a distribution, further rewards, a value."""

from __future__ import annotations

import torch

from .. import segments
from ..arguments import check_finite, check_limit
from ..checks import check, check_units
from ..specs import GroupTerm, Provenance, Scale
from .terms import Term, as_advantages, check_eps, combine, estimator, keeps_singletons, known, members_of, total


@estimator(Provenance.VERIFIED, tables=True)
def bnpo(
    rewards: torch.Tensor,
    group_ids: torch.Tensor | None,
    *,
    most: float = 1e6,
    mask: torch.Tensor | None = None,
    singleton: str = "zero",
    backend: str | None = None,
) -> torch.Tensor:
    """BNPO: ``A = w_g (r - p_g)`` for rewards in [0, 1], w_g one over the density of a Beta distribution at the group's
    mean p_g (arXiv 2506.02864). Returns ``[S]`` float32.

    With mean m and variance v (n - 1) of p_g over the groups: ``a = (m (1 - m) / v - 1) m``, ``b`` with 1 - m, alpha =
    ``max(1 + a / 3, 1)``, beta likewise, ``w_g = clamp(1 / Beta(alpha, beta)(p_g), 0, most)``. A single group takes v =
    1. alpha = beta = 1 gives Dr.GRPO, 3/2 a multiple of GRPO without eps.

    Traps: groups are coupled through m and v; groups of equal rewards get 0 although their weight is ``most``. A group
    of one counts as p = 0; with ``singleton="raw"`` it keeps ``w r``, as in the authors' code, which is ``most`` times
    its reward where alpha is above 1. Assumed: where the means of several groups are the same v is 1, too, as for one
    group. Means are the same if v is at most 1e-12: those of equal decimals in float32 are up to 1e-7 apart.

    >>> r = torch.tensor([1.0, 0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 0])
    >>> bnpo(r, torch.arange(12) // 4)[:4]
    tensor([ 0.6802, -0.2267, -0.2267, -0.2267])
    """
    check_units(rewards=rewards, group_ids=group_ids, mask=mask)
    check(most > 0, "most: expected a number > 0, got {}", most)
    check_limit("most", most)
    group = segments.statistics(rewards, group_ids, mask=mask, backend=backend)
    means, once = group.mean, 1 / group.members
    member = members_of(rewards, group, mask)
    once = torch.where(member, once, 0.0)
    groups = total(once)
    # The authors' code has p = 0 for a group of one.
    means = torch.where(group.members > 1, means, 0.0)
    center = total(once * means) / groups
    spread = total(once * (means - center).square()) / (groups - 1)
    # With a smaller spread the weights would follow the rounding of rewards, and logarithms of gamma functions cancel.
    spread = torch.where((groups > 1.5) & (spread > 1e-12), spread, 1.0)
    room = center * (1 - center) / spread - 1
    alpha, beta = (torch.clamp(1 + room * part / 3, min=1) for part in (center, 1 - center))
    log_norm = torch.lgamma(alpha) + torch.lgamma(beta) - torch.lgamma(alpha + beta)
    density = torch.xlogy(alpha - 1, means) + torch.xlogy(beta - 1, 1 - means)
    weights = torch.exp(log_norm - density).clamp(0, most)
    rule = GroupTerm(scale=Scale.NONE, keep_singletons=keeps_singletons(singleton))
    centred = combine([Term(rewards, group_ids, rule)], mask=mask, backend=backend)
    return as_advantages(torch.where(centred == 0, 0.0, weights * centred), rewards, backend)


@estimator(Provenance.VERIFIED, tables=True)
def ngrpo(
    rewards: torch.Tensor,
    group_ids: torch.Tensor | None,
    *,
    best: float = 1.0,
    virtual: int = 1,
    ddof: int = 1,
    eps: float = 1e-6,
    mask: torch.Tensor | None = None,
    singleton: str | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """NGRPO: GRPO whose statistics contain ``virtual`` further rewards ``best`` (arXiv 2509.18851). Returns ``[S]``
    float32.

    A group that got everything wrong gets a negative advantage instead of none: n binary rewards of 0 give
    ``-1 / sqrt(n + 1)``; all right gives 0. ``virtual=0`` is GRPO.

    Args:
        singleton: None compares a group of one with the virtual rewards, as the formula has it; ``"raw"`` keeps its
            reward, as the authors' code does; ``"zero"`` gives 0.

    >>> ngrpo(torch.zeros(4), None)
    tensor([-0.4472, -0.4472, -0.4472, -0.4472])
    """
    check_units(rewards=rewards, group_ids=group_ids, mask=mask)
    check(virtual >= 0, "virtual: expected a count >= 0, got {}", virtual)
    check_finite(best=best)
    check_eps(eps)
    check(ddof in (0, 1), "ddof: expected 0 or 1, got {}", ddof)
    group = segments.statistics(rewards, group_ids, mask=mask, backend=backend)
    gap = torch.full_like(rewards, best) - group.mean  # a reward of exactly best has none, in whatever precision
    number = group.members + virtual
    shift = gap * virtual / number
    squares = group.squares + gap.square() * group.members * virtual / number
    deviation = (squares / (number - ddof).clamp(min=1)).sqrt()
    member = members_of(rewards, group, mask)
    centred = torch.where(member, (rewards.double() - group.mean) - shift, 0.0)
    advantages = torch.where(centred == 0, 0.0, centred / (deviation + eps))
    if singleton is not None:
        kept = (1.0 if keeps_singletons(singleton) else 0.0) * rewards.double() / (1 + eps)
        alone = members_of(rewards, group, mask) & (group.members == 1)
        advantages = torch.where(alone, kept, advantages)
    return as_advantages(advantages, rewards, backend)


@estimator(Provenance.PAPER, tables=True)
def v05(
    rewards: torch.Tensor,
    group_ids: torch.Tensor | None,
    prior: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """V_0.5: ``A = r - (w mean_g + (1 - w) V)``, the group's mean shrunk towards a value model's prior (arXiv
    2603.10848). Returns ``[S]`` float32.

    For rewards of -1 and 1 over k rollouts: ``D = max(0, (mean_g - V)^2 - 1 / k)``, ``w = D / (D + 1 / k)``. A prior
    that the rollouts do not contradict is the baseline; many rollouts or a strong conflict give Dr.GRPO.

    Args:
        prior: ``[S]`` in [-1, 1], V of each unit's prompt; NaN or infinite: the unit gets 0.

    Traps: identical rewards do not give 0, because the baseline is not their mean.

    >>> v05(torch.tensor([1.0, -1.0, -1.0, 1.0]), None, torch.full((4,), -0.9))
    tensor([ 1.2778, -0.7222, -0.7222,  1.2778])
    """
    check_units(rewards=rewards, group_ids=group_ids, prior=prior, mask=mask)
    group = segments.statistics(rewards, group_ids, mask=mask, backend=backend)
    variance = 1 / group.members
    conflict = ((group.mean - prior.double()).square() - variance).clamp(min=0)
    shrink = conflict / (conflict + variance)
    baseline = shrink * group.mean + (1 - shrink) * prior.double()
    member = members_of(rewards, group, mask)
    return as_advantages(torch.where(member, known(rewards.double() - baseline), 0.0), rewards, backend)
