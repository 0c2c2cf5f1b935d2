"""Estimators over several rewards of one unit, ``[C, S]``, or over a reward that several signals make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ..arguments import check_finite
from ..checks import check, check_device, check_floating, check_units
from ..segments import statistics
from ..specs import GroupTerm, Provenance, Share
from .flat import grpo_of_exact
from .terms import Term, about_group, check_channels, combine, estimator, grouped, keeps_singletons, members_of
from .whitening import whiten


@estimator(Provenance.PAPER, multi_reward=True, tables=True)
def dvao(
    rewards: torch.Tensor,
    group_ids: torch.Tensor | None,
    weights: Sequence[float] | None = None,
    *,
    eps: float = 1e-6,
    mask: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """DVAO: ``A = sum_k v_k (r_k - mean_k) / (std_k + eps)``, ``v_k = b_k std_k / sum_l b_l std_l`` (arXiv 2605.25604).
    Returns ``[S]`` float32.

    A reward that does not vary in its group drops out. With one reward this is GRPO with ddof 0; in general GRPO of
    ``sum b r`` times ``std(sum b r) / sum b std <= 1``.

    Args:
        rewards: ``[C, S]``, up to 8 rewards.
        weights: b, C numbers >= 0. Default: 1 each.

    >>> dvao(torch.tensor([[1.0, 0.0, 1.0], [0.2, 0.4, 0.9]]), None)
    tensor([ 0.0435, -1.0011,  0.9576])
    """
    channels = check_channels(rewards, weights, group_ids=group_ids, mask=mask)
    valid = torch.isfinite(rewards).all(0)
    mask = valid if mask is None else valid & mask
    rule = GroupTerm(ddof=0, eps=eps)
    terms = [Term(x, group_ids, replace(rule, coefficient=b)) for x, b in zip(rewards, channels, strict=True)]
    return combine(terms, mask=mask, share=Share.DEVIATION, share_least=eps, backend=backend)


@estimator(Provenance.VERIFIED, multi_reward=True, tables=True)
def gdpo(
    rewards: torch.Tensor,
    group_ids: torch.Tensor | None,
    weights: Sequence[float] | None = None,
    *,
    lengths: torch.Tensor | None = None,
    eps: float | None = None,
    mask: torch.Tensor | None = None,
    singleton: str | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """GDPO: each reward normalised in its group, their weighted sum normalised over the batch (arXiv 2601.05242).
    Returns ``[S]`` float32.

    ``S = sum_c w_c (r_c - mean_c) / (std_c + eps)``, ``A = (S - mean_B) / (std_B + eps)``, ddof 1. Tells apart
    combinations of rewards that GRPO of their sum makes equal; invariant to scale and offset of each reward in each
    group.

    Args:
        rewards: ``[C, S]``, up to 8 rewards.
        weights: w, C numbers. Default: 1 each.
        lengths: ``[S]`` floating point. With it the batch is normalised over *tokens*, as verl and the authors' code
            do: ``(S - mean) / sqrt(var + 1e-8)``, units weighing as many as they have. Without it over samples, as in
            TRL.
        eps: 1e-4 without lengths (TRL), 1e-6 with them (verl) by default.
        singleton: the value of a group of one before the batch is normalised: 0 without lengths (``"zero"``), the
            weighted sum of its rewards with them, as in verl (``"raw"``), by default.

    A unit that one reward does not score has nothing from that reward; a unit that no reward scores is in no statistic.

    Traps: three frameworks, three second stages; NeMo-RL leaves the sample itself out of each mean, which is not here.
    With ``lengths``, or with ``singleton="raw"``, the second stage moves a group of equal rewards off 0.

    >>> x = torch.tensor([[1.0, 0, 1, 0, 0, 1], [1, 1, 0, 0, 1, 1]])
    >>> gdpo(x, torch.tensor([0, 0, 0, 1, 1, 1]))
    tensor([ 0.9128, -0.4564, -0.4564, -1.3692,  0.0000,  1.3692])
    """
    channels = check_channels(rewards, weights, group_ids=group_ids, lengths=lengths, mask=mask)
    eps = (1e-4 if lengths is None else 1e-6) if eps is None else eps
    singleton = ("zero" if lengths is None else "raw") if singleton is None else singleton
    rule = GroupTerm(eps=eps)
    terms = [Term(x, group_ids, replace(rule, coefficient=w)) for x, w in zip(rewards, channels, strict=True)]
    together = combine(terms, mask=mask, backend=backend)
    scored = torch.isfinite(rewards).any(0)
    compared = grouped(scored if mask is None else scored & mask, group_ids)
    if keeps_singletons(singleton):
        exact = together.double()
        for x, w in zip(rewards, channels, strict=True):
            group = statistics(x, group_ids, mask=mask, backend=backend)
            alone = members_of(x, group, mask) & (group.members == 1)
            exact = exact + torch.where(alone, w * x.double() / (1 + eps), 0.0)
        together = about_group(exact, rewards, None, mask=compared, backend=backend)
    return whiten(together, lengths, mask=compared, eps=eps if lengths is None else 1e-8, backend=backend)


@estimator(Provenance.PAPER)
def vpo(
    rewards: torch.Tensor,
    group_ids: torch.Tensor | None,
    directions: torch.Tensor,
    *,
    ddof: int = 1,
    eps: float = 1e-6,
    mask: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """VPO: GRPO of sets of candidates, a set being worth ``mean_w max_j w . r(y_j)`` (arXiv 2605.22817). Returns
    ``[S]`` float32, the advantage of all candidates of set s.

    Raising any reward of a candidate never lowers its set's worth; a candidate that another beats in every reward
    changes nothing.

    Args:
        rewards: ``[S, M, C]``, C rewards of the M candidates of each set; a candidate with NaN is none.
        directions: ``[W, C]``, draws of w from a Dirichlet distribution, the same for all sets of a group.

    >>> sets = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[0.6, 0.6], [0.5, 0.5]]])
    >>> vpo(sets, None, torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]]))
    tensor([ 0.7071, -0.7071])
    """
    for name, given in (("rewards", rewards), ("directions", directions)):
        check_floating(name, given)
    check_device("directions", directions, rewards.device, "rewards")
    check(rewards.dim() == 3, "rewards: expected shape [S, M, C] (sets of candidates), got {}", list(rewards.shape))
    check(rewards.shape[1] > 0, "rewards: expected sets of at least one candidate, got {}", list(rewards.shape))
    check(
        directions.dim() == 2 and directions.shape[1] == rewards.shape[2] and len(directions) > 0,
        "directions: expected shape [W, {}] (at least one, of one weight per reward), got {}",
        rewards.shape[2],
        list(directions.shape),
    )
    check_units(rewards=rewards[:, 0].sum(-1), group_ids=group_ids, mask=mask)
    seen = rewards.isfinite().all(dim=-1, keepdim=True)
    along = torch.where(seen, rewards, 0.0).double() @ directions.double().T  # [S, M, W]
    worth = torch.where(seen, along, -torch.inf).amax(dim=1).mean(dim=-1)
    return grpo_of_exact(worth, rewards, group_ids, ddof=ddof, eps=eps, mask=mask, backend=backend)


@estimator(Provenance.VERIFIED, tables=True)
def hila(
    success: torch.Tensor,
    is_deferred: torch.Tensor,
    is_created: torch.Tensor,
    group_ids: torch.Tensor | None,
    *,
    defer_cost: float = 0.3,
    create_cost: float = 0.1,
    ddof: int = 0,
    eps: float = 1e-6,
    mask: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """HILA's inner loop: GRPO, ddof 0, of success minus the cost of the action (arXiv 2603.07972). Returns ``[S]``
    float32.

    The outer loop, which learns from the expert's answers, is supervised and has no advantage.

    Args:
        success: ``[S]``, 1 for a right answer.
        is_deferred, is_created: ``[S]`` bool, whether the action asks the expert, or writes a new answer; an action
            that does neither takes over another agent's answer and costs nothing.
        group_ids: ``[S]``, the candidate actions of one agent in one round of one problem.
        defer_cost, create_cost: the costs of these two actions.

    >>> hila(torch.tensor([1.0, 1.0]), torch.tensor([True, False]), torch.tensor([False, True]), None)
    tensor([-1.0000,  1.0000])
    """
    check_units(success=success, is_deferred=is_deferred, is_created=is_created, group_ids=group_ids, mask=mask)
    check_finite(defer_cost=defer_cost, create_cost=create_cost)
    cost = defer_cost * is_deferred.double() + create_cost * (is_created & ~is_deferred).double()
    return grpo_of_exact(success.double() - cost, success, group_ids, ddof=ddof, eps=eps, mask=mask, backend=backend)


@estimator(Provenance.VERIFIED, tables=True)
def unidoc_rl(
    answer: torch.Tensor,
    search: torch.Tensor,
    selection: torch.Tensor,
    perception: torch.Tensor,
    form: torch.Tensor,
    group_ids: torch.Tensor | None,
    *,
    answer_weight: float = 0.6,
    step_weight: float = 0.1,
    ddof: int = 1,
    eps: float = 1e-6,
    mask: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """UniDoc-RL: GRPO of a reward whose levels open one another: form, then the steps, then the answer (arXiv
    2604.14967; its code). Returns ``[S]`` float32.

    ``r = .1 (search + selection + perception + form)`` where the form is above 0, else 0; plus ``.6 answer`` where the
    form is above a half.

    Args:
        answer: ``[S]``, the judge's, of the answer.
        search: ``[S]``, the normalised discounted cumulative gain of the pages found.
        selection: ``[S]``, the part of the selections that took a right page.
        perception: ``[S]``, of the regions cut out, the F1 of those that overlap with the evidence by a half.
        form: ``[S]``, 1 for all tags, 1/2 for all but the answer's, else 0.
        answer_weight, step_weight: 0.6 and 0.1, the code's.

    A unit that lacks one of the five is in no statistic and gets 0, even where the form closes the missing level.

    >>> ones, form = torch.ones(3), torch.tensor([1.0, 0.5, 0.0])
    >>> unidoc_rl(ones, ones, ones, ones, form, None)
    tensor([ 1.0839, -0.1971, -0.8868])
    """
    check_units(answer=answer, search=search, selection=selection, perception=perception, form=form)
    check_units(answer=answer, group_ids=group_ids, mask=mask)
    check_finite(answer_weight=answer_weight, step_weight=step_weight)
    exact = form.double()
    steps = step_weight * (search.double() + selection.double() + perception.double() + exact)
    earned = answer_weight * answer.double()
    worth = torch.where(exact > 0.5, steps + earned, torch.where(exact > 0, steps, 0.0))
    worth = torch.where(torch.isfinite(steps + earned), worth, torch.nan)
    return grpo_of_exact(worth, answer, group_ids, ddof=ddof, eps=eps, mask=mask, backend=backend)


@estimator(Provenance.VERIFIED, tables=True)
def tool_star(
    accuracy: torch.Tensor,
    is_formatted: torch.Tensor,
    is_multi_tool: torch.Tensor,
    group_ids: torch.Tensor | None,
    *,
    bonus: float = 0.1,
    ddof: int = 1,
    eps: float = 1e-6,
    mask: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Tool-Star: GRPO of a reward whose levels open one another: form, then accuracy, then the use of all tools (arXiv
    2505.16410). Returns ``[S]`` float32.

    -1 for an answer in no valid form; else its accuracy, plus ``bonus`` where that is above 0 and the response uses
    search and code both.

    Args:
        accuracy: ``[S]``, F1 of the answer in the authors' code.
        is_formatted, is_multi_tool: ``[S]`` bool.

    >>> right, tools = torch.tensor([1.0, 1.0, 0.0]), torch.tensor([True, False, True])
    >>> tool_star(right, torch.tensor([True, True, False]), tools, None)
    tensor([ 0.6190,  0.5346, -1.1537])
    """
    check_units(
        accuracy=accuracy, is_formatted=is_formatted, is_multi_tool=is_multi_tool, group_ids=group_ids, mask=mask
    )
    check_finite(bonus=bonus)
    exact = accuracy.double()
    earned = torch.where(is_multi_tool & (exact > 0), exact + bonus, exact)
    worth = torch.where(is_formatted | ~torch.isfinite(exact), earned, -1.0)
    return grpo_of_exact(worth, accuracy, group_ids, ddof=ddof, eps=eps, mask=mask, backend=backend)
