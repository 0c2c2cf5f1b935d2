"""Estimators of which only an abstract or a partial account is public: the assumptions stand in each docstring.

Not here: the graphs of GraphGPO and RewardFlow, which are built on the host.
"""

from __future__ import annotations

import torch

from ..arguments import check_finite
from ..checks import check, check_units
from ..segments import chains, dense_ids, statistics
from ..specs import GroupTerm, Part, Provenance
from .flat import grpo, grpo_of_exact
from .hierarchical import thor
from .returns import once
from .schedules import craft_gui, datarus, v05_samples
from .selection import ordered
from .terms import Term, about_group, among, as_advantages, check_eps, combine, estimator, grouped, scorable

__all__ = [
    "a2fm_apo",
    "chrpo",
    "craft_gui",
    "datarus",
    "dynamic_contrastive",
    "graph_grpo",
    "hc_grpo",
    "hi_agent",
    "hi_grpo",
    "himac",
    "hrpo",
    "ib_tpo",
    "salt",
    "v05_samples",
]


@estimator(Provenance.RECONSTRUCTED, tables=True)
def himac(
    rewards: torch.Tensor,
    group_ids: torch.Tensor,
    is_macro: torch.Tensor,
    blueprint_ids: torch.Tensor,
    *,
    eps: float = 1e-6,
    backend: str | None = None,
) -> torch.Tensor:
    """HiMAC: blueprints of a query compared with each other, and executions of one blueprint (arXiv 2603.00977).
    Returns ``[S]`` float32.

    Assumed: GRPO's ddof 1 and eps in both phases. The advantage of a macro unit belongs to planner tokens only, that of
    a micro unit to action tokens: say so with ``token_mask``.

    Args:
        rewards: ``[S]``; of a macro unit that of one greedy execution of its blueprint.
        is_macro: ``[S]`` bool.
        blueprint_ids: ``[S]``, the blueprint that a micro unit executes, negative: none (its advantage is 0); of macro
            units not read.

    >>> r, macro = torch.tensor([1.0, 0.0, 0.5, 0.0]), torch.ones(4, dtype=torch.bool)
    >>> himac(r, torch.zeros(4, dtype=torch.int64), macro, torch.arange(4))
    tensor([ 1.3056, -0.7833,  0.2611, -0.7833])
    """
    check_units(rewards=rewards, group_ids=group_ids, is_macro=is_macro, blueprint_ids=blueprint_ids)
    return thor(rewards, group_ids, ~is_macro, blueprint_ids, eps=eps, backend=backend)


@estimator(Provenance.RECONSTRUCTED, tables=True)
def hi_agent(
    format_rewards: torch.Tensor,
    execution_rewards: torch.Tensor,
    future_values: torch.Tensor,
    group_ids: torch.Tensor | None,
    *,
    weights: tuple[float, float, float] = (1.0, 1.0, 1.0),
    eps: float = 1e-6,
    backend: str | None = None,
) -> torch.Tensor:
    """Hi-Agent's foresight advantage: sub-goals proposed in one state compared by their form, by their execution by
    the low-level model, and by the value of their future (arXiv 2510.14388). Returns ``[S]`` float32.

    Assumed: GRPO, ddof 1 and eps, of ``w_1 format + w_2 execution + w_3 future``, and weights of 1: the paper names the
    three parts. A sub-goal that lacks one is in no statistic and gets 0.

    Args:
        format_rewards, execution_rewards, future_values: ``[S]``, of each proposed sub-goal.
        group_ids: ``[S]``, the state it is proposed in.

    >>> given = (torch.tensor([1.0, 1.0]), torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.25]))
    >>> hi_agent(*given, None)
    tensor([ 0.7071, -0.7071])
    """
    parts = (format_rewards, execution_rewards, future_values)
    check_units(
        format_rewards=format_rewards, execution_rewards=execution_rewards, future_values=future_values,
        group_ids=group_ids,
    )  # fmt: skip
    check(len(weights) == 3, "weights: expected 3 numbers (format, execution, future), got {}", len(weights))
    check_finite(**{f"weights[{at}]": weight for at, weight in enumerate(weights)})
    exact = sum((w * part.double() for w, part in zip(weights, parts, strict=True)), start=0 * parts[0].double())
    return grpo_of_exact(exact, format_rewards, group_ids, eps=eps, backend=backend)


@estimator(Provenance.RECONSTRUCTED, tables=True)
def a2fm_apo(
    accuracy: torch.Tensor,
    is_instant: torch.Tensor,
    group_ids: torch.Tensor | None,
    *,
    easy: float = 0.75,
    alpha: float = 2.0,
    eps: float = 1e-6,
    mask: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """A2FM's adaptive policy optimisation: where answering at once is mostly right, reasoning and tools are worth less
    (arXiv 2510.12838). Returns ``[S]`` float32.

    With p the accuracy of the prompt's rollouts in instant mode the reward of a rollout in another mode is
    ``accuracy (1 - p^alpha)`` if ``p >= easy``; all other rewards are the accuracy. Then GRPO, ddof 1.

    Assumed: ``easy``, and that the factor multiplies the accuracy; the factor and its alpha of 2 are those of a summary
    of the paper, whose reward for form is the caller's. A prompt without a rollout in instant mode is hard.

    Args:
        accuracy: ``[S]`` in [0, 1].
        is_instant: ``[S]`` bool, whether a rollout answers without reasoning or tools.

    >>> instant = torch.tensor([True, True, False, False])
    >>> a2fm_apo(torch.tensor([1.0, 1.0, 1.0, 0.0]), instant, None)
    tensor([ 0.8660,  0.8660, -0.8660, -0.8660])
    """
    check_units(accuracy=accuracy, is_instant=is_instant, group_ids=group_ids, mask=mask)
    check(alpha > 0, "alpha: expected a number > 0, got {}", alpha)
    scored = scorable(accuracy, mask)
    instant = statistics(accuracy, group_ids, mask=scored & is_instant, backend=backend)
    # A mean is rounded in the order of its units: one that equals the bound is above it in any order.
    spared = is_instant | (instant.members == 0) | (instant.mean < easy - 1e-12)
    exact = torch.where(spared, accuracy.double(), accuracy.double() * (1 - instant.mean.clamp(min=0) ** alpha))
    return grpo_of_exact(exact, accuracy, group_ids, eps=eps, mask=mask, backend=backend)


@estimator(Provenance.RECONSTRUCTED)
def hi_grpo(
    stage_rewards: torch.Tensor,
    group_ids: torch.Tensor | None,
    *,
    carry: float = 1.0,
    eps: float = 1e-6,
    backend: str | None = None,
) -> torch.Tensor:
    """Hi-GRPO (3DGen-R1): the plan and the detail of a sample, each normalised in its group on its own (arXiv
    2512.10949). Returns ``[2, S]`` float32: for the tokens of the first stage, and of the second.

    The reward of the plan is ``R_plan + carry R_detail``. Assumed: GRPO's ddof 1 and eps, and ``carry`` = 1.

    Args:
        stage_rewards: ``[2, S]``, the rewards of plan and detail, each the mean over its reward models.

    >>> hi_grpo(torch.tensor([[1.0, 0.0], [0.0, 0.0]]), None, carry=0.0)
    tensor([[ 0.7071, -0.7071],
            [ 0.0000,  0.0000]])
    """
    check(
        stage_rewards.dim() == 2 and len(stage_rewards) == 2,
        "stage_rewards: expected shape [2, S] (plan and detail), got {}",
        list(stage_rewards.shape),
    )
    check_finite(carry=carry)
    plan, detail = stage_rewards
    check_units(stage_rewards=plan, group_ids=group_ids)
    plan_and_detail = about_group(plan.double() + carry * detail.double(), stage_rewards, group_ids, backend=backend)
    return torch.stack([grpo(reward, group_ids, eps=eps, backend=backend) for reward in (plan_and_detail, detail)])


@estimator(Provenance.RECONSTRUCTED)
def chrpo(
    rewards: torch.Tensor,
    control_rewards: torch.Tensor,
    group_ids: torch.Tensor | None,
    *,
    eps: float = 1e-6,
    backend: str | None = None,
) -> torch.Tensor:
    """CHRPO (Extra-CoT): the main reward for all tokens of a response, a second one for its control token (arXiv
    2602.08324). Returns ``[2, S]`` float32: the advantage of all tokens, and that of the control token besides.

    Args:
        control_rewards: ``[S]``, of the control token.

    Assumed: both normalised as in GRPO and added; the paper's coefficients are not public.

    >>> chrpo(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]), None)
    tensor([[ 0.7071, -0.7071],
            [-0.7071,  0.7071]])
    """
    check_units(rewards=rewards, control_rewards=control_rewards, group_ids=group_ids)
    return torch.stack([grpo(each, group_ids, eps=eps, backend=backend) for each in (rewards, control_rewards)])


@estimator(Provenance.RECONSTRUCTED, level="step")
def hrpo(
    action_rewards: torch.Tensor,
    outcomes: torch.Tensor,
    group_ids: torch.Tensor,
    trajectory_ids: torch.Tensor,
    *,
    action_weight: float = 1.0,
    eps: float = 1e-6,
    backend: str | None = None,
) -> torch.Tensor:
    """HRPO (MasHost): the system's advantage in its group plus the reward of each construction step (arXiv 2506.08507).
    Returns ``[N]`` float32.

    Assumed: ``A = z_group(R) + action_weight r_action`` with GRPO's ddof 1 and eps, and weight 1: the paper names
    the parts.

    Args:
        action_rewards: ``[N]``.
        outcomes: ``[N]``, the reward of the system that each step built. A step that lacks either reward is in no
            statistic and gets 0, as does one of no prompt or trajectory (a negative id).

    >>> hrpo(torch.tensor([0.5, 0.0]), torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), torch.tensor([0, 1]))
    tensor([ 1.2071, -0.7071])
    """
    check_units(action_rewards=action_rewards, outcomes=outcomes, group_ids=group_ids, trajectory_ids=trajectory_ids)
    check_finite(action_weight=action_weight)
    scored = scorable(outcomes, torch.isfinite(action_rewards))
    trajectories = dense_ids(group_ids, trajectory_ids)
    scored = grouped(scored, trajectories)
    of_trajectories = once(chains(among(trajectories, scored)))
    of_system = combine([Term(outcomes, group_ids, GroupTerm(eps=eps), of_trajectories)], mask=scored, backend=backend)
    return as_advantages(torch.where(scored, of_system + action_weight * action_rewards, 0.0), action_rewards, backend)


@estimator(Provenance.RECONSTRUCTED, level="step", tables=True)
def salt(
    outcomes: torch.Tensor,
    group_ids: torch.Tensor,
    trajectory_ids: torch.Tensor,
    edge_ids: torch.Tensor,
    *,
    eps: float = 1e-6,
    backend: str | None = None,
) -> torch.Tensor:
    """SALT: a step that several trajectories of a prompt take gets the mean of their advantages (arXiv 2510.20022).
    Returns ``[N]`` float32.

    Where good and bad outcomes share a step they cancel; a step of one trajectory keeps its advantage. Assumed: GRPO's
    advantages, and that a trajectory which takes an edge twice counts twice.

    Args:
        outcomes: ``[N]``, the reward of each step's trajectory; NaN or infinite: its step is in no mean and gets 0, as
            does one of no prompt, trajectory or edge (a negative id).
        edge_ids: ``[N]``, equal for equivalent steps.

    >>> ids = torch.zeros(3, dtype=torch.int64)
    >>> salt(torch.tensor([1.0, 1.0, 0.0]), ids, torch.tensor([0, 0, 1]), torch.tensor([5, 6, 5]))
    tensor([0.0000, 0.7071, 0.0000])
    """
    check_units(outcomes=outcomes, group_ids=group_ids, trajectory_ids=trajectory_ids, edge_ids=edge_ids)
    trajectories = dense_ids(group_ids, trajectory_ids)
    scored = grouped(torch.isfinite(outcomes), trajectories)
    of_trajectories = once(chains(among(trajectories, scored)))
    own = combine([Term(outcomes, group_ids, GroupTerm(eps=eps), of_trajectories)], mask=scored, backend=backend)
    edges = dense_ids(group_ids, edge_ids)
    return combine([Term(own, edges, GroupTerm(part=Part.MEAN))], mask=scored, backend=backend)


@estimator(Provenance.RECONSTRUCTED)
def graph_grpo(
    rewards: torch.Tensor,
    group_ids: torch.Tensor,
    graph_ids: torch.Tensor,
    edge_ids: torch.Tensor,
    *,
    eps: float = 1e-6,
    backend: str | None = None,
) -> torch.Tensor:
    """Graph-GRPO: an edge is worth the mean reward of the sampled graphs that have it, against all graphs of the query
    (arXiv 2603.02701). Returns ``[P]`` float32, one per pair of a graph and an edge of it.

    ``A(e) = (mean over graphs with e - mean over graphs) / (std over graphs + eps)``. Assumed: that normaliser, ddof 1.

    Args:
        rewards: ``[P]``, of the pair's graph; NaN or infinite: the pair is in no mean and gets 0.
        graph_ids, edge_ids: ``[P]``; a pair of no query or graph (a negative id) is in no mean and gets 0, one of no
            edge gets 0.

    >>> q = torch.zeros(3, dtype=torch.int64)
    >>> graph_grpo(torch.tensor([1.0, 1.0, 0.0]), q, torch.tensor([0, 0, 1]), torch.tensor([4, 5, 4]))
    tensor([0.0000, 0.7071, 0.0000])
    """
    check_units(rewards=rewards, group_ids=group_ids, graph_ids=graph_ids, edge_ids=edge_ids)
    check_eps(eps)
    scored = grouped(torch.isfinite(rewards), graph_ids)
    of_graphs = once(chains(among(dense_ids(group_ids, graph_ids), scored)))
    graphs = statistics(rewards, group_ids, weights=of_graphs, mask=scored, backend=backend)
    edges = statistics(rewards, dense_ids(group_ids, edge_ids), mask=scored, backend=backend)
    spread = graphs.deviation(1)
    exact = torch.where(spread > 0, (edges.mean - graphs.mean) / (spread + eps), 0.0)
    return as_advantages(torch.where(scored & (edges.members > 0), exact, 0.0), rewards, backend)


@estimator(Provenance.RECONSTRUCTED)
def hc_grpo(
    success: torch.Tensor,
    costs: torch.Tensor,
    group_ids: torch.Tensor | None,
    *,
    eps: float = 1e-6,
    backend: str | None = None,
) -> torch.Tensor:
    """HC-GRPO (ESearch-R1): GRPO of ``success - sum of costs`` of several kinds (arXiv 2512.18571). Returns ``[S]``
    float32.

    Assumed: GRPO's ddof 1 and eps; costs come weighed. Another HC-GRPO (hint completion, Table-R1) changes the
    sampling, not the advantage.

    Args:
        costs: ``[C, S]``.

    >>> hc_grpo(torch.tensor([1.0, 1.0]), torch.tensor([[0.5, 0.0]]), None)
    tensor([-0.7071,  0.7071])
    """
    check(costs.dim() == 2, "costs: expected shape [C, S] (one row per kind), got {}", list(costs.shape))
    for cost in costs:
        check_units(success=success, group_ids=group_ids, costs=cost)
    return grpo_of_exact(success.double() - costs.double().sum(dim=0), success, group_ids, eps=eps, backend=backend)


@estimator(Provenance.RECONSTRUCTED, level="step")
def ib_tpo(
    values: torch.Tensor,
    parent_values: torch.Tensor,
    answer_values: torch.Tensor,
    root_values: torch.Tensor,
    deviations: torch.Tensor,
    reference: torch.Tensor,
    *,
    beta: float = 5.0,
    weight: float = 0.1,
    backend: str | None = None,
) -> torch.Tensor:
    """IB-TPO: ``A = (p(a|s) - p(a|q)) / sigma + weight (p(s) / p(parent) - (1 + 1 / beta)) pi_ref(s)``, of a tree's
    nodes (arXiv 2605.28109). Returns ``[N]`` float32.

    Assumed: sigma, of which the paper says "of the rewards", is given; a part is 0 where its sigma or p(parent) is 0. A
    node of which anything is NaN or infinite gets 0.

    Args:
        values, parent_values: ``[N]``, estimated chances of each node and of its parent.
        answer_values, root_values: ``[N]``, chances of the right answer from the node and from the question.
        deviations: ``[N]`` sigma.
        reference: ``[N]``, the reference policy's probability of the step.

    >>> ib_tpo(*(torch.tensor([x]) for x in (0.5, 0.25, 0.6, 0.5, 0.5, 0.3)))
    tensor([0.2240])
    """
    check(beta > 0, "beta: expected a number > 0, got {}", beta)
    check_finite(weight=weight)
    given = (values, parent_values, answer_values, root_values, deviations, reference)
    check_units(
        values=values, parent_values=parent_values, answer_values=answer_values, root_values=root_values,
        deviations=deviations, reference=reference,
    )  # fmt: skip
    own, parent, answer, root, deviation, chance = (each.double() for each in given)
    gain = torch.where(deviation > 0, (answer - root) / deviation, 0.0)
    bottleneck = torch.where(parent > 0, (own / parent - (1 + 1 / beta)) * chance, 0.0)
    lacking = torch.stack(given).isfinite().logical_not().any(0)
    return as_advantages(torch.where(lacking, 0.0, gain + weight * bottleneck), values, backend)


@estimator(Provenance.RECONSTRUCTED)
def dynamic_contrastive(
    rewards: torch.Tensor,
    group_ids: torch.Tensor | None,
    lengths: torch.Tensor,
    *,
    best: int,
    worst: int,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Dynamic contrastive selection (ChatShopBuddy): trajectories by reward, of equal rewards the short ones as good
    examples and the long ones as bad (arXiv 2603.06065). Returns ``[S]`` bool.

    Assumed: that order; the paper says that reward and reasoning length decide, not how.

    Args:
        lengths: ``[S]`` floating point, of the reasoning.

    >>> r, n = torch.tensor([1.0, 1.0, 0.0, 0.0]), torch.tensor([9.0, 5.0, 9.0, 5.0])
    >>> dynamic_contrastive(r, None, n, best=1, worst=1)
    tensor([False,  True,  True, False])
    """
    check_units(rewards=rewards, group_ids=group_ids, lengths=lengths, mask=mask)
    check(best >= 0 and worst >= 0, "best, worst: expected counts >= 0, got {} and {}", best, worst)
    scored = scorable(lengths, mask)
    # Long before short, then by reward: stable sorts keep the first where the second ties.
    order = torch.sort(torch.where(scored, lengths, 0.0), descending=True, stable=True).indices
    ids = None if group_ids is None else group_ids[order]
    groups, rank, size = ordered(rewards[order], ids, scored[order])
    chosen = groups.unsorted(((rank < worst) | (rank >= size - best)) & (groups.chain >= 0))
    selection = torch.empty_like(chosen)
    selection[order] = chosen
    return selection
