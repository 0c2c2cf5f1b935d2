"""Estimators over one flat grouping: rewards of a prompt's samples against each other."""

from __future__ import annotations

import math

import torch

from .. import segments
from ..arguments import check_choice, check_compat, check_finite
from ..checks import check, check_units
from ..specs import Center, EpsMode, GroupTerm, Provenance, Scale
from .terms import (
    Term,
    about_group,
    as_advantages,
    check_eps,
    combine,
    estimator,
    grouped,
    keeps_singletons,
    known,
    members_of,
    scorable,
    total,
)

_EPS_MODES = {"add": EpsMode.ADD, "sqrt": EpsMode.SQRT, "floor": EpsMode.FLOOR}


@estimator(Provenance.VERIFIED, tables=True)
def grpo(
    rewards: torch.Tensor,
    group_ids: torch.Tensor | None,
    *,
    mask: torch.Tensor | None = None,
    apply_mask: torch.Tensor | None = None,
    ddof: int = 1,
    eps: float = 1e-6,
    eps_mode: str = "add",
    singleton: str = "zero",
    backend: str | None = None,
) -> torch.Tensor:
    """GRPO: ``A = (r - mean_g) / (std_g + eps)`` (arXiv 2402.03300). Returns ``[S]`` float32.

    Args:
        ddof: 1 (torch.std; verl, TRL, OpenRLHF) or 0 (numpy.std). The paper does not say.
        eps: 1e-6 as in verl; TRL uses 1e-4, OpenRLHF 1e-9.
        eps_mode: ``"add"`` sigma + eps, ``"sqrt"`` sqrt(sigma^2 + eps), ``"floor"`` max(sigma, eps).

    The other arguments are described in :mod:`hpo_core.advantages`.

    Traps: frameworks differ in ddof, eps and singletons; verl's loop returns the raw reward for a group of one.

    >>> grpo(torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([3, 3, 3, 3]), ddof=0, eps=0.0)
    tensor([ 1., -1., -1.,  1.])
    """
    check_choice("eps_mode", eps_mode, _EPS_MODES)
    rule = GroupTerm(Center.MEAN, Scale.GROUP, ddof, eps, _EPS_MODES[eps_mode], keeps_singletons(singleton))
    return _normalise(rewards, group_ids, mask, apply_mask, rule, backend)


def grpo_of_exact(
    exact: torch.Tensor,
    rewards: torch.Tensor,
    group_ids: torch.Tensor | None,
    *,
    ddof: int = 1,
    eps: float,
    mask: torch.Tensor | None = None,
    backend: str | None,
) -> torch.Tensor:
    """:func:`grpo` of values ``exact``, computed in float64 from these rewards: members keep their differences."""
    worth = about_group(exact, rewards, group_ids, mask=mask, backend=backend)
    return grpo(worth, group_ids, ddof=ddof, eps=eps, mask=mask, backend=backend)


@estimator(Provenance.VERIFIED, tables=True)
def dr_grpo(
    rewards: torch.Tensor,
    group_ids: torch.Tensor | None,
    *,
    mask: torch.Tensor | None = None,
    apply_mask: torch.Tensor | None = None,
    singleton: str = "zero",
    backend: str | None = None,
) -> torch.Tensor:
    """Dr.GRPO: ``A = r - mean_g``, no scale (arXiv 2503.20783). Returns ``[S]`` float32.

    The paper also divides the loss by a constant length: use ``aggregation.fixed_length``.

    >>> dr_grpo(torch.tensor([2.0, 4.0, 6.0]), torch.tensor([1, 1, 1]))
    tensor([-2.,  0.,  2.])
    """
    rule = GroupTerm(Center.MEAN, Scale.NONE, eps=0.0, keep_singletons=keeps_singletons(singleton))
    return _normalise(rewards, group_ids, mask, apply_mask, rule, backend)


@estimator(Provenance.VERIFIED, tables=True)
def asymre(
    rewards: torch.Tensor,
    group_ids: torch.Tensor | None,
    *,
    shift: float = -0.1,
    mask: torch.Tensor | None = None,
    apply_mask: torch.Tensor | None = None,
    singleton: str = "zero",
    backend: str | None = None,
) -> torch.Tensor:
    """AsymRE: ``A = r - (mean_g + shift)``, with a baseline below the mean for rollouts of an older policy (arXiv
    2506.20520), beside the gate ``reinforce()``, without a ratio. Returns ``[S]`` float32.

    Args:
        shift: in units of the reward, -.1 in Trinity-RFT. Below 0 successes weigh more than failures, for which the
            paper proves that the policy improves however old its rollouts are; above 0 it may collapse.

    Traps: a group of equal rewards gets ``-shift``, not 0, and so a gradient towards all that it did. Trinity-RFT keeps
    the reward of a group of one (``singleton="raw"``).

    >>> asymre(torch.tensor([1.0, 0.0, 0.0, 1.0]), None)
    tensor([ 0.6000, -0.4000, -0.4000,  0.6000])
    """
    check_finite(shift=shift)
    centred = dr_grpo(rewards, group_ids, mask=mask, apply_mask=apply_mask, singleton=singleton, backend=backend)
    compared = segments.statistics(rewards, group_ids, mask=mask, backend=backend).members > 1
    receives = scorable(rewards, mask if apply_mask is None else apply_mask) & compared
    return torch.where(receives, centred - shift, centred)


@estimator(Provenance.VERIFIED, tables=True)
def rloo(
    rewards: torch.Tensor,
    group_ids: torch.Tensor | None,
    *,
    mask: torch.Tensor | None = None,
    apply_mask: torch.Tensor | None = None,
    singleton: str = "zero",
    backend: str | None = None,
) -> torch.Tensor:
    """RLOO: ``A = r - mean of the others = n / (n - 1) (r - mean_g)`` (arXiv 2402.14740). Returns ``[S]`` float32.

    Traps: for a group of one verl's loop keeps the raw reward (``singleton="raw"``), its vectorised form gives 0.

    >>> rloo(torch.tensor([2.0, 4.0, 6.0]), torch.tensor([1, 1, 1]))
    tensor([-3.,  0.,  3.])
    """
    rule = GroupTerm(Center.LEAVE_ONE_OUT, Scale.NONE, eps=0.0, keep_singletons=keeps_singletons(singleton))
    return _normalise(rewards, group_ids, mask, apply_mask, rule, backend)


@estimator(Provenance.VERIFIED, tables=True)
def grpo_leave_one_out(
    rewards: torch.Tensor,
    group_ids: torch.Tensor | None,
    *,
    mask: torch.Tensor | None = None,
    apply_mask: torch.Tensor | None = None,
    eps: float = 1e-6,
    singleton: str = "zero",
    backend: str | None = None,
) -> torch.Tensor:
    """GRPO with the mean and the deviation of the others: ``A = (r - mean_o) / (std_o + eps)``, ddof 1, NeMo-RL's
    default. Returns ``[S]`` float32.

    Where the others are all equal, or one alone, there is no scale: ``A = r - mean_o``, that of :func:`rloo`.

    Args:
        eps: 1e-6 as in NeMo-RL.

    Traps: advantages do not sum to 0 in a group. The only success among n binary rewards gets 1, the only failure -1,
    however large n is. NeMo-RL's variance is a difference of two means in float32: of others that nearly agree far from
    0 it is noise, or negative, which leaves out the scale.

    >>> grpo_leave_one_out(torch.tensor([1.0, 0.0, 0.0, 1.0]), None)
    tensor([ 1.1547, -1.1547, -1.1547,  1.1547])
    >>> grpo_leave_one_out(torch.tensor([1.0, 0.0, 0.0, 0.0]), None)
    tensor([ 1.0000, -0.5773, -0.5773, -0.5773])
    """
    check_eps(eps)
    centred = rloo(rewards, group_ids, mask=mask, apply_mask=apply_mask, singleton=singleton, backend=backend)
    group = segments.statistics(rewards, group_ids, mask=mask, backend=backend)
    member, exact, n = members_of(rewards, group, mask), rewards.double(), group.members
    own = n / (n - 1).clamp(min=1) * (exact - group.mean).square()
    squares = torch.where(member, (group.squares - own).clamp(min=0), group.squares)
    # The difference keeps half of the squares or more, unless the unit is alone at an end of its group. There it may
    # lose every digit, and the squares of the other members replace it.
    for end in (group.least, group.greatest):
        rest = segments.statistics(rewards, group_ids, mask=member & (exact != end), backend=backend)
        squares = torch.where(member & (exact == end) & (rest.members == n - 1), rest.squares, squares)
    scale = group._replace(weight=n - member.double(), squares=squares).deviation(1)
    return as_advantages(centred / torch.where(scale > 0, scale + eps, 1.0), rewards, backend)


@estimator(Provenance.VERIFIED, tables=True)
def lite_ppo(
    rewards: torch.Tensor,
    group_ids: torch.Tensor | None,
    *,
    mask: torch.Tensor | None = None,
    apply_mask: torch.Tensor | None = None,
    ddof: int = 1,
    eps: float = 1e-6,
    about_groups: bool = False,
    singleton: str = "zero",
    backend: str | None = None,
) -> torch.Tensor:
    """Lite PPO: ``A = (r - mean_g) / (std_batch + eps)`` (arXiv 2508.08221, "Tricks or Traps"). Returns ``[S]``
    float32.

    The batch's standard deviation is that of the *raw* rewards, not of the centred ones. A single group gives GRPO.

    Args:
        about_groups: True takes deviations from the means of the groups, ``sqrt(sum (r - mean_g)^2 / (N - ddof))``:
            AReaL's mean of the group and std of the batch, with eps 1e-5. This deviation is the smaller of the two, and
            a group of one has none, so ``singleton`` stays ``"zero"``.

    >>> r, ids = torch.tensor([1.0, 0.0, 2.0, 6.0]), torch.tensor([0, 0, 1, 1])
    >>> lite_ppo(r, ids, eps=0.0)
    tensor([ 0.1901, -0.1901, -0.7605,  0.7605])
    >>> lite_ppo(r, ids, eps=0.0, about_groups=True)
    tensor([ 0.2970, -0.2970, -1.1882,  1.1882])
    """
    rule = GroupTerm(Center.MEAN, Scale.BATCH, ddof, eps, EpsMode.ADD, keeps_singletons(singleton))
    if about_groups:
        check_units(rewards=rewards, group_ids=group_ids, mask=mask, apply_mask=apply_mask)
        alone = "singleton: expected 'zero' with about_groups=True, as a group of one has no deviation, got {!r}"
        check(not rule.keep_singletons, alone, singleton)
        scored = grouped(torch.isfinite(rewards), group_ids)
        centred = dr_grpo(rewards, group_ids, mask=mask, apply_mask=scored, backend=backend)
        rewards = torch.where(scored, centred, torch.nan)  # units without a deviation enter no statistic
    return _normalise(rewards, group_ids, mask, apply_mask, rule, backend)


@estimator(Provenance.VERIFIED, tables=True)
def opo(
    rewards: torch.Tensor,
    group_ids: torch.Tensor | None,
    lengths: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    apply_mask: torch.Tensor | None = None,
    singleton: str = "zero",
    backend: str | None = None,
) -> torch.Tensor:
    """OPO: ``A = r - sum_g L r / sum_g L``, the optimal baseline weighs rewards by length (arXiv 2505.23585). Returns
    ``[S]`` float32.

    Args:
        lengths: ``[S]`` floating point, tokens of each response; a unit is in the baseline if they are finite and > 0.

    Traps: ``sum_g L A`` is 0, ``sum_g A`` is not. For a group of one verl keeps the raw reward (``singleton="raw"``).

    >>> opo(torch.tensor([2.0, 4.0, 6.0]), None, torch.tensor([5.0, 1.0, 2.0]))
    tensor([-1.2500,  0.7500,  2.7500])
    """
    check_units(rewards=rewards, group_ids=group_ids, lengths=lengths, mask=mask, apply_mask=apply_mask)
    rule = GroupTerm(scale=Scale.NONE, keep_singletons=keeps_singletons(singleton))
    return combine([Term(rewards, group_ids, rule, lengths)], mask=mask, apply_mask=apply_mask, backend=backend)


@estimator(Provenance.VERIFIED, tables=True)
def maxrl(
    rewards: torch.Tensor,
    group_ids: torch.Tensor | None,
    *,
    eps: float = 1e-6,
    least_mean: float | None = None,
    root: bool = False,
    mask: torch.Tensor | None = None,
    apply_mask: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """MaxRL: ``A = (r - mean_g) / (mean_g + eps)`` for rewards >= 0 (arXiv 2602.02710). Returns ``[S]`` float32.

    Binary rewards with success rate p: ``(1 - p) / p`` and -1. A group whose mean is not above 0, such as one without a
    success, gets 0.

    Args:
        least_mean: divide by ``n max(mean_g, least_mean)`` instead, n the group's size: the authors' clipped form, with
            .125.
        root: divide by ``sqrt(mean_g) + eps``, the authors' one-sided form.

    Traps: the authors' code takes 0 for the mean of a group of one and so gives ``r / eps``, a million; here it gets 0.

    >>> maxrl(torch.tensor([1.0, 0.0, 0.0, 0.0]), None)
    tensor([ 3.0000, -1.0000, -1.0000, -1.0000])
    >>> maxrl(torch.tensor([1.0, 0.0, 0.0, 0.0]), None, least_mean=0.125)
    tensor([ 0.7500, -0.2500, -0.2500, -0.2500])
    """
    check(least_mean is None or not root, "least_mean: the one-sided form (root=True) knows none; drop one of them")
    scale = Scale.ROOT_MEAN if root else Scale.MEAN
    in_range = least_mean is None or 0 <= least_mean < math.inf
    check(in_range, "least_mean: expected a finite number >= 0 or None, got {}", least_mean)
    guard = (eps, EpsMode.ADD) if least_mean is None else (least_mean, EpsMode.FLOOR)
    rule = GroupTerm(scale=scale, eps=guard[0], eps_mode=guard[1])
    advantages = _normalise(rewards, group_ids, mask, apply_mask, rule, backend)
    if least_mean is None:
        return advantages
    size = segments.statistics(rewards, group_ids, mask=mask, backend=backend).members
    return as_advantages(advantages / size.clamp(min=1), rewards, backend)


@estimator(Provenance.VERIFIED, tables=True)
def dgpo(
    rewards: torch.Tensor,
    group_ids: torch.Tensor | None,
    *,
    accuracy: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    temperature: float = 2.0,
    eps: float = 1e-4,
    mask: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """DGPO (MathForge): ``A = lambda_g n (r - mean_g) / (sum_g |r - mean_g| + eps)`` (arXiv 2601.20614). Returns
    ``[S]`` float32.

    The mean absolute deviation makes ``sum_g |A|`` the size of the group whatever its difficulty. With ``accuracy``
    hard groups weigh more: ``lambda_g = B softmax(-acc_g / temperature)`` over the B groups whose rewards differ, 1 for
    others; the mean of lambda over those B groups is 1.

    Args:
        accuracy: ``[S]`` the main reward, whose group mean is the accuracy; a group that gets none right although its
            rewards differ counts as accurate, so that other rewards do not make it the hardest. NaN: in no accuracy.
            None: lambda is 1.
        lengths: ``[S]`` floating point, tokens of each response. With them advantages are multiplied by the tokens of
            all units over those of groups whose rewards differ, as the authors do: the loss's mean over all tokens
            becomes one over tokens that teach something. None: not.

    Traps: the scale is the *mean* absolute deviation, not a standard deviation; eps stands beside the sum. Another
    factor of the authors, the number of processes times this one's part of all tokens, undoes the loss's mean over
    tokens of one rank: ``aggregation`` with ``process_group=`` needs none.

    >>> dgpo(torch.tensor([1.0, 0.0, 0.0, 0.0]), None)
    tensor([ 1.9999, -0.6666, -0.6666, -0.6666])
    >>> dgpo(torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1]), lengths=torch.ones(4), eps=0.0)
    tensor([ 2., -2.,  0.,  0.])
    """
    check_units(rewards=rewards, group_ids=group_ids, accuracy=accuracy, lengths=lengths, mask=mask)
    rule = GroupTerm(scale=Scale.ABSOLUTE, eps=eps, eps_mode=EpsMode.ADD_SHARE)
    advantages = combine([Term(rewards, group_ids, rule)], mask=mask, backend=backend)
    if accuracy is None and lengths is None:
        return advantages
    check(temperature > 0, "temperature: expected a number above 0, got {}", temperature)
    group = segments.statistics(rewards, group_ids, mask=mask, backend=backend)
    member = members_of(rewards, group, mask)
    differs = member & (group.least < group.greatest)
    weighed = advantages.double()
    if lengths is not None:
        tokens = torch.where(member, known(lengths.double()), 0.0)
        taught = total(torch.where(differs, tokens, 0.0))
        weighed = weighed * torch.where(taught > 0, total(tokens) / taught, 1.0)
    if accuracy is not None:
        right = segments.statistics(accuracy, group_ids, mask=scorable(rewards, mask), backend=backend).mean
        # Once per group: each of its n members stands for 1 / n of it.
        share = torch.where(differs, 1 / group.members.clamp(min=1), 0.0)
        # The form in which kernels compare it: then no group is harder than the hardest, however large accuracies are.
        ease = about_group(torch.where(right == 0, 1.0, right), rewards, None, mask=differs, backend=backend).double()
        hardest = segments.statistics(ease, None, mask=differs, backend=backend).least  # of the batch, on whatever rank
        hardness = torch.exp((hardest - ease) / temperature)
        weighed = weighed * (total(share) / total(torch.where(differs, share * hardness, 0.0)) * hardness)
    return as_advantages(torch.where(differs, weighed, advantages), rewards, backend)


@estimator(Provenance.VERIFIED)
def gpg(
    rewards: torch.Tensor,
    group_ids: torch.Tensor | None,
    *,
    compat: str = "paper",
    mask: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """GPG: ``A = alpha (r - mean_g)``, alpha = B / (B - M) over B units, M of them in groups of equal rewards (arXiv
    2504.02546). Returns ``[S]`` float32.

    Args:
        compat: ``"paper"``; or ``"code"``, as in verl: alpha = B / (units whose raw reward is not 0), groups of one
            keep their raw reward.

    >>> gpg(torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1]))
    tensor([ 1., -1.,  0.,  0.])
    """
    check_units(rewards=rewards, group_ids=group_ids, mask=mask)
    as_code = check_compat(compat)
    rule = GroupTerm(scale=Scale.NONE, keep_singletons=as_code)
    centred = combine([Term(rewards, group_ids, rule)], mask=mask, backend=backend)
    group = segments.statistics(rewards, group_ids, mask=mask, backend=backend)
    member = members_of(rewards, group, mask)
    informative = rewards != 0 if as_code else group.least < group.greatest
    alpha = member.sum().double() / (member & informative).sum().clamp(min=1)
    return as_advantages(centred * alpha, rewards, backend)


def _normalise(
    rewards: torch.Tensor,
    group_ids: torch.Tensor | None,
    mask: torch.Tensor | None,
    apply_mask: torch.Tensor | None,
    rule: GroupTerm,
    backend: str | None,
) -> torch.Tensor:
    check_units(rewards=rewards, group_ids=group_ids, mask=mask, apply_mask=apply_mask)
    return combine([Term(rewards, group_ids, rule)], mask=mask, apply_mask=apply_mask, backend=backend)
