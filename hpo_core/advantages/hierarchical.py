"""Estimators over nested groupings: steps in trajectories, trajectories in prompts, and groupings between these."""

from __future__ import annotations

import math

import torch

from ..arguments import check_compat, check_finite
from ..checks import check, check_units
from ..segments import chains, dense_ids
from ..specs import GroupTerm, Part, Presence, Provenance, Share
from .flat import grpo
from .returns import episode_returns, once, returns_along
from .terms import Term, about_group, among, as_advantages, combine, estimator, keeps_singletons, scale_of, scorable


@estimator(Provenance.VERIFIED, level="step", tables=True)
def gigpo(
    step_rewards: torch.Tensor,
    group_ids: torch.Tensor,
    trajectory_ids: torch.Tensor,
    anchor_ids: torch.Tensor,
    *,
    gamma: float = 0.95,
    step_weight: float = 1.0,
    scaled: bool = True,
    eps: float = 1e-6,
    compat: str = "paper",
    positions: torch.Tensor | None = None,
    singleton: str = "zero",
    backend: str | None = None,
) -> torch.Tensor:
    """GiGPO: ``A = A_episode + w A_step`` (arXiv 2505.10978). Returns ``[N]`` float32.

    A_episode compares the trajectory's summed reward with those of its prompt's trajectories, A_step the discounted
    return of a step with those of steps from the same observation; each ``(x - mean) / (std + eps)``, ddof 1.

    Args:
        gamma, step_weight: .95 and 1 in the paper.
        scaled: False leaves out the standard deviations ("mean_norm").
        compat: ``"paper"`` counts a trajectory once in the statistics of episodes, ``"code"`` once per step, so that
            long ones weigh more (verl-agent's default).
        singleton: of a prompt with one trajectory, or in the code's form with one step; ``"raw"`` keeps its reward, as
            verl-agent's loops do.

    The other arguments, all ``[N]``, are described in :mod:`hpo_core.advantages`; ``batch.ids_of_steps()`` makes the
    ids of prompts and trajectories.

    A step whose observation is unique has A_step 0: with all observations distinct this is GRPO, as with w = 0. Of
    texts that only nearly recur :func:`hpo_core.segments.similar_ids_of` makes the anchors, as verl-agent's
    ``enable_similarity`` does.

    >>> rewards = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0])
    >>> prompt, trajectory = torch.zeros(5, dtype=torch.int64), torch.tensor([0, 0, 0, 1, 1])
    >>> gigpo(rewards, prompt, trajectory, torch.tensor([7, 8, 9, 7, 9]), scaled=False)
    tensor([ 0.9512,  0.5000,  1.0000, -0.9512, -1.0000])
    """
    check_units(step_rewards=step_rewards, group_ids=group_ids, trajectory_ids=trajectory_ids, anchor_ids=anchor_ids)
    check_finite(step_weight=step_weight)
    steps = chains(dense_ids(group_ids, trajectory_ids), positions)
    episodes = episode_returns(step_rewards, steps, backend=backend)
    returns = steps.unsorted(returns_along(step_rewards, steps, gamma, backend=backend))
    of_episode = GroupTerm(scale=scale_of(scaled), eps=eps, keep_singletons=keeps_singletons(singleton))
    of_step = GroupTerm(scale=scale_of(scaled), eps=eps, coefficient=step_weight)
    weights = None if check_compat(compat) else once(steps)
    prompt = among(group_ids, trajectory_ids >= 0)
    observed = dense_ids(prompt, anchor_ids)
    episodes = about_group(episodes, step_rewards, prompt, weights=weights, backend=backend)
    returns = about_group(returns, step_rewards, observed, backend=backend)
    terms = [Term(episodes, prompt, of_episode, weights), Term(returns, observed, of_step)]
    return combine(terms, backend=backend)


@estimator(Provenance.VERIFIED, level="step", tables=True)
def hgpo(
    step_rewards: torch.Tensor,
    group_ids: torch.Tensor,
    trajectory_ids: torch.Tensor,
    anchor_ids: torch.Tensor,
    *,
    gamma: float = 0.95,
    history: int = 2,
    alpha: float = 1.0,
    scaled: bool = True,
    base_group: bool = False,
    drop_zeros: bool = True,
    eps: float = 1e-6,
    share_eps: float = 1e-6,
    compat: str = "paper",
    positions: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """HGPO: steps compared with those of the same last 1, 2, ... ``history + 1`` observations (arXiv 2602.22817).
    Returns ``[N]`` float32.

    ``A = sum_k w_k A_k``, A_k the normalised discounted return (ddof 0) in the group of steps whose last k + 1
    observations are equal, ``w_k = l_k^alpha / (sum_j l_j^alpha + share_eps)`` over the levels with at least two steps.

    Args:
        history: K, 2 or 4 in the paper.
        scaled: False leaves out the standard deviations (WebShop).
        base_group: adds GiGPO's episode advantage, each step counted, as one more level of l = 1. A prompt of one step
            has none and gets 0, where the code keeps its reward.
        drop_zeros: a level in which a step's advantage is exactly 0 does not count, as in the paper and its code; an
            element that happens to equal its group's mean is dropped, too, which makes this discontinuous.
        compat: l_k = k + 1 in the ``"paper"``, k + 2 in the ``"code"``.

    >>> rewards, anchors = torch.tensor([0.0, 1.0, 0.0, 0.0]), torch.tensor([7, 8, 7, 8])
    >>> hgpo(rewards, torch.zeros(4, dtype=torch.int64), torch.tensor([0, 0, 1, 1]), anchors, history=1)
    tensor([ 1.0000,  1.0000, -1.0000, -1.0000])
    """
    check_units(step_rewards=step_rewards, group_ids=group_ids, trajectory_ids=trajectory_ids, anchor_ids=anchor_ids)
    check(0 <= history <= 6, "history: expected 0 to 6 earlier observations, got {}", history)
    offset = 2 if check_compat(compat) else 1
    is_number = alpha * math.log(history + offset) < 700  # e^709 is the largest double
    check(is_number, "alpha: expected a power whose weight {}^alpha is a number, got {}", history + offset, alpha)
    check_finite(alpha=alpha)
    steps = chains(dense_ids(group_ids, trajectory_ids), positions)
    returns = steps.unsorted(returns_along(step_rewards, steps, gamma, backend=backend))
    presence = Presence.NONZERO if drop_zeros else Presence.ALWAYS
    anchors = steps.sorted(anchor_ids.to(torch.int64))
    prompt = among(group_ids, trajectory_ids >= 0)
    observed = dense_ids(prompt, anchor_ids)
    returns = about_group(returns, step_rewards, observed, backend=backend)
    level = steps.sorted(observed)
    terms = []
    for k in range(history + 1):
        if k > 0:  # the observation k steps before, where the trajectory has one
            earlier = torch.full_like(anchors, -1)
            same = steps.chain[k:] == steps.chain[:-k]
            earlier[k:] = torch.where(same & (steps.chain[k:] >= 0), anchors[:-k], -1)
            level = dense_ids(level, earlier)
        rule = GroupTerm(
            scale=scale_of(scaled), ddof=0, eps=eps, presence=presence, coefficient=math.pow(k + offset, alpha)
        )
        terms.append(Term(returns, steps.unsorted(level), rule))
    if base_group:
        rule = GroupTerm(scale=scale_of(scaled), eps=eps, presence=presence)
        episodes = episode_returns(step_rewards, steps, backend=backend)
        terms.append(Term(about_group(episodes, step_rewards, prompt, backend=backend), prompt, rule))
    return combine(terms, share=Share.EQUAL, share_eps=share_eps, backend=backend)


@estimator(Provenance.VERIFIED, tables=True)
def dr_mas(
    rewards: torch.Tensor,
    group_ids: torch.Tensor,
    agent_ids: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: str = "zero",
    backend: str | None = None,
) -> torch.Tensor:
    """Dr.MAS: GRPO with statistics per prompt *and agent* (arXiv 2602.08847). Returns ``[S]`` float32.

    Scale and offset of one agent's rewards change nothing for the others; with one agent this is GRPO. For GiGPO with
    agents pass ``segments.dense_ids(group_ids, agent_ids)`` as its group_ids; :func:`~hpo_core.advantages.dr_grpo` with
    such ids is prime-rl's ``hierarchical_grpo``, where the attempts at one proposed problem are a group.

    Args:
        agent_ids: ``[S]`` which agent produced each unit.

    >>> dr_mas(torch.tensor([1.0, 0.0, 9.0, 5.0]), torch.zeros(4, dtype=torch.int64), torch.tensor([0, 0, 1, 1]))
    tensor([ 0.7071, -0.7071,  0.7071, -0.7071])
    """
    check_units(rewards=rewards, group_ids=group_ids, agent_ids=agent_ids, mask=mask)
    ids = dense_ids(group_ids, agent_ids)
    return grpo(rewards, ids, mask=mask, ddof=ddof, eps=eps, singleton=singleton, backend=backend)


@estimator(Provenance.VERIFIED, tables=True)
def peco(
    rewards: torch.Tensor,
    group_ids: torch.Tensor | None,
    is_planner: torch.Tensor,
    *,
    ddof: int = 1,
    eps: float = 1e-6,
    backend: str | None = None,
) -> torch.Tensor:
    """PECO (CoDA): GRPO whose statistics are those of planners, for planners and executors (official code). Returns
    ``[S]`` float32.

    The number of executor rows changes nothing. A prompt with one planner gives 0.

    Traps: where all planners of a prompt have the same reward, an executor with another one gets their difference
    divided by eps.

    Args:
        is_planner: ``[S]`` bool.

    >>> peco(torch.tensor([1.0, 0.0, 1.0, 1.0]), None, torch.tensor([True, True, False, False]))
    tensor([ 0.7071, -0.7071,  0.7071,  0.7071])
    """
    check_units(rewards=rewards, group_ids=group_ids, is_planner=is_planner)
    all_units = torch.ones_like(is_planner)
    return grpo(rewards, group_ids, mask=is_planner, apply_mask=all_units, ddof=ddof, eps=eps, backend=backend)


@estimator(Provenance.VERIFIED, tables=True)
def flow_grpo(
    rewards: torch.Tensor,
    group_ids: torch.Tensor | None,
    turns: torch.Tensor,
    *,
    eps: float = 1e-6,
    backend: str | None = None,
) -> torch.Tensor:
    """Flow-GRPO (AgentFlow): GRPO over turns, each of which has the outcome of its trajectory (arXiv 2510.05592).
    Returns ``[I]`` float32, the advantage of every turn of trajectory i.

    Mean and deviation weigh a trajectory by its turns. With T turns each this is GRPO times
    ``sqrt((n T - 1) / (T (n - 1)))``. A prompt of one trajectory gets 0; of one turn the authors' trainer keeps its
    reward.

    Args:
        rewards: ``[I]``, one per trajectory.
        turns: ``[I]`` floating point, the turns of each trajectory.

    >>> flow_grpo(torch.tensor([1.0, 0.0]), None, torch.tensor([3.0, 1.0]))
    tensor([ 0.5000, -1.5000])
    """
    check_units(rewards=rewards, group_ids=group_ids, turns=turns)
    return combine([Term(rewards, group_ids, GroupTerm(eps=eps), turns)], backend=backend)


@estimator(Provenance.PAPER, tables=True)
def m_grpo(
    rewards: torch.Tensor,
    group_ids: torch.Tensor | None,
    multiplicity: torch.Tensor | None = None,
    *,
    mask: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """M-GRPO: ``A = (r - mean) / std``, ddof 0 and no eps, of main trajectories or of the sub-trajectories of all
    rollouts of a query (arXiv 2511.13288). Returns ``[S]`` float32.

    Call it once for main trajectories and once for sub-trajectories; each belongs to a model of its own.

    Args:
        multiplicity: ``[S]`` floating point, how often the alignment takes each sub-trajectory: rollouts are brought to
            a common number d of them by copying and dropping at random. ``d / d_k``, the mean multiplicity in a rollout
            with d_k of them, makes it deterministic. The loss weighs them the same way. None: once each.

    Traps: the authors' release (AQ-MedAI/MrlX 0d04788) leaves advantages to slime's ``grpo`` with ddof 1 and eps 1e-6,
    that is :func:`grpo`, and aligns nothing: sub-trajectories come from a queue.

    >>> m_grpo(torch.tensor([1.0, 0.1]), None)
    tensor([ 1., -1.])
    """
    check_units(rewards=rewards, group_ids=group_ids, multiplicity=multiplicity, mask=mask)
    return combine([Term(rewards, group_ids, GroupTerm(ddof=0, eps=0.0), multiplicity)], mask=mask, backend=backend)


@estimator(Provenance.VERIFIED, tables=True)
def hbpo(
    lengths: torch.Tensor,
    is_correct: torch.Tensor,
    budgets: torch.Tensor,
    group_ids: torch.Tensor,
    *,
    longest: float = 4096.0,
    beta: float = 4.0,
    alpha: float = 1 / 4096,
    eps: float = 1e-6,
    compat: str = "paper",
    backend: str | None = None,
) -> torch.Tensor:
    """HBPO: rewards by length budget, compared inside a budget and between budgets (arXiv 2507.15844). Returns ``[S]``
    float32.

    ``f1(n, b) = beta cos(pi n / 2 L) - alpha |n - b|``, ``f2(b) = beta cos(pi b / 2 L)``; the reward R of a correct
    response is f1 beyond its budget (n up to L) and f2 within, else 0.
    ``A = (R - mean_q) / (std_q + eps) + (mean_{q,b} - f2(b))``, ddof 1.

    Args:
        lengths: n ``[S]`` floating point.
        budgets: b ``[S]`` floating point. A response without a finite length and budget has no reward: it is in no
            statistic and gets 0, whether or not it is correct.
        is_correct: ``[S]`` bool.
        longest, beta, alpha: L, and the constants of the paper.
        compat: the ``"code"`` takes R = min(f1, f2), adds the part inside a budget twice, and has pi = 3.1416.

    >>> b, n = torch.tensor([512.0, 512, 1024, 1024]), torch.tensor([400.0, 900, 1000, 1500])
    >>> hbpo(n, torch.tensor([True, True, True, False]), b, torch.zeros(4, dtype=torch.int64))
    tensor([ 0.4573,  0.3227, -1.3843, -3.3450])
    """
    check_units(lengths=lengths, is_correct=is_correct, budgets=budgets, group_ids=group_ids)
    as_code = check_compat(compat)
    check(0 < longest < math.inf, "longest: expected a finite number above 0, got {}", longest)
    check_finite(beta=beta, alpha=alpha)
    n, b, quarter = lengths.double(), budgets.double(), (3.1416 if as_code else math.pi) / (2 * longest)
    beyond, within = beta * torch.cos(quarter * n) - alpha * (n - b).abs(), beta * torch.cos(quarter * b)
    reward = torch.minimum(beyond, within) if as_code else torch.where(n <= b, within, beyond)
    scored = scorable(lengths, torch.isfinite(budgets))
    longest_rewarded = longest if as_code else b.clamp(min=longest)  # within a budget above L is f2, too
    reward = torch.where(is_correct & (n <= longest_rewarded), reward, 0.0)
    # The gap of each unit, not the difference of two means: where no unit has a gap it is exactly 0.
    rewards, gaps = (
        as_advantages(torch.where(scored, each, torch.nan), lengths, backend) for each in (reward, reward - within)
    )
    # Budgets are compared as the bits they are.
    subgroup = dense_ids(group_ids, budgets.float().contiguous().view(torch.int32))
    inside_weight = 2.0 if as_code else 1.0
    terms = [
        Term(rewards, group_ids, GroupTerm(eps=eps)),
        Term(gaps, subgroup, GroupTerm(part=Part.MEAN, coefficient=inside_weight)),
    ]
    return combine(terms, backend=backend)


@estimator(Provenance.PAPER, tables=True)
def stratified(
    rewards: torch.Tensor,
    group_ids: torch.Tensor,
    stratum_ids: torch.Tensor,
    *,
    alpha: float = 1.0,
    ddof: int = 1,
    eps: float = 1e-6,
    mask: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Stratified GRPO: ``A = alpha A_stratum + (1 - alpha) A_group``, both GRPO's (arXiv 2510.06214). Returns ``[S]``
    float32.

    Args:
        stratum_ids: ``[S]``, equal for the units of a stratum inside a prompt: say, the number of searches.
        alpha: 0 is GRPO, 1 (no default of the paper is confirmed) compares inside strata alone. A stratum of one unit
            adds 0.

    >>> r, strata = torch.tensor([1.0, 0, 0, 1, 1, 0]), torch.tensor([0, 0, 0, 1, 1, 1])
    >>> stratified(r, torch.zeros(6, dtype=torch.int64), strata)
    tensor([ 1.1547, -0.5773, -0.5773,  0.5773,  0.5773, -1.1547])
    """
    check_units(rewards=rewards, group_ids=group_ids, stratum_ids=stratum_ids, mask=mask)
    check_finite(alpha=alpha)
    inside = GroupTerm(ddof=ddof, eps=eps, coefficient=alpha)
    between = GroupTerm(ddof=ddof, eps=eps, coefficient=1 - alpha)
    terms = [Term(rewards, dense_ids(group_ids, stratum_ids), inside), Term(rewards, group_ids, between)]
    return combine(terms, mask=mask, backend=backend)


@estimator(Provenance.VERIFIED, tables=True)
def thor(
    rewards: torch.Tensor,
    group_ids: torch.Tensor,
    is_step: torch.Tensor,
    prefix_ids: torch.Tensor,
    *,
    step_weight: float = 1.0,
    eps: float = 1e-6,
    backend: str | None = None,
) -> torch.Tensor:
    """THOR: trajectories of a problem compared by their answers, and continuations of one prefix by whether their code
    runs (arXiv 2509.13761 and its code). Returns ``[S]`` float32.

    GRPO's, inside the problem and inside the prefix. In the authors' trainer both are rows of one batch, of which a
    prefix and outputs of tools are masked: ``token_mean`` counts the other tokens.

    Args:
        rewards: ``[S]``, of a trajectory its answer's, of a continuation 1 where its code runs.
        is_step: ``[S]`` bool, whether a unit is a continuation that was sampled again from a step that had failed.
        prefix_ids: ``[S]``, the prefix of each continuation; negative: none (its advantage is 0). Those of
            trajectories are not read.
        step_weight: of continuations; the code has 1.

    Traps: the authors clip as ``gates.ppo_clip(0.2, 0.28, 3.0)`` does and add 0.01 times the mean negative logp
    of the tokens with ``A > 0``.

    >>> r, step = torch.tensor([1.0, 0, 1, 0]), torch.tensor([False, False, True, True])
    >>> thor(r, torch.zeros(4, dtype=torch.int64), step, torch.arange(4) // 2, step_weight=0.5)
    tensor([ 0.7071, -0.7071,  0.3536, -0.3536])
    """
    check_units(rewards=rewards, group_ids=group_ids, is_step=is_step, prefix_ids=prefix_ids)
    check_finite(step_weight=step_weight)
    prefix = torch.where(is_step, prefix_ids, 0)
    level = dense_ids(group_ids, is_step.to(torch.int64), prefix)
    advantages = grpo(rewards, level, eps=eps, backend=backend)
    return torch.where(is_step, step_weight * advantages, advantages)
