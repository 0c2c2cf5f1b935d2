"""Units without a reward, a group, a parent or a trajectory in the estimators of advantages."""

import functools
import itertools
import math

import pytest
import torch
from by_hand import close, on

from hpo_core import advantages
from hpo_core.advantages import reconstructed

A, R = advantages, reconstructed


def test_hbpo_takes_exactly_nothing_from_a_budget_that_all_keep(backend):
    t, b = on(backend)
    budgets = t(512.0, 512, 1024, 2560)
    out = A.hbpo(budgets - 100, budgets > 0, budgets, t(0, 0, 1, 2), **b)
    assert out.tolist() == [0.0] * 4


def test_treepo_a_node_without_whole_leaves_is_none(backend):
    """A leaf that ends above the deepest prefix is in the means of its prefixes, but below no node."""
    t, b = on(backend)
    rewards, root, deepest = t(1.0, 0.0, 1.0, 0.0), t(0, 0, 0, 0), t(0, 0, 1, -1)
    apart = A.treepo_segments(rewards, [root, root, t(0, 0, 0, 1), deepest], **b)
    assert torch.equal(apart, A.treepo_segments(rewards, [root, root, t(0, 0, 0, -1), deepest], **b))
    assert apart[:, :3].any() and not apart[:, 3].any()


@pytest.mark.parametrize("estimator", [A.gigpo, A.hgpo, functools.partial(A.hgpo, base_group=True)])
def test_a_step_of_no_trajectory_is_in_no_anchor_group(backend, estimator):
    t, b = on(backend)
    prompt, anchors = t(0, 0, 0, 0), t(7, 7, 7, 7)
    out = estimator(t(1.0, 0, 1, 5), prompt, t(0, 1, 2, -1), anchors, **b)
    assert out.tolist() == [*estimator(t(1.0, 0, 1), prompt[:3], t(0, 1, 2), anchors[:3], **b).tolist(), 0.0]


def test_a_unit_without_its_own_or_its_groups_reward_has_no_part_of_the_other(backend):
    t, b = on(backend)
    rewards, of_group, whole = t(1.0, 0, 3), t(0.5, 0.5, 0.9), t(0, 0, 0)
    estimators, companies = (A.sgrpo, A.sgrpo_hierarchical_sum), (t(0, 1, 2), t(0, 1, 1))
    for estimator, groups, scaled in itertools.product(estimators, companies, (False, True)):
        estimator = functools.partial(estimator, scaled=scaled, **b)
        alone = estimator(rewards[:2], of_group[:2], whole[:2], groups[:2]).tolist()
        lacking = t(math.nan, math.nan, math.nan)
        for own, common in ((lacking, of_group), (rewards, lacking)):
            own, common = (torch.cat((given[:2], last[2:])) for given, last in ((rewards, own), (of_group, common)))
            assert estimator(own, common, whole, groups).tolist() == [*alone, 0.0]
    out = A.sgrpo(rewards, of_group, whole, t(0, 1, -1), **b)  # the third is a rollout of the supergroup
    close(out, [0.5 * (1 - 1.5), 0.5 * (0 - 2), 0.5 * (3 - 0.5)])


@pytest.mark.parametrize("extreme", [0, 2**62, 2**63 - 1])
def test_the_largest_id_is_an_id_of_a_blueprint(backend, extreme):
    t, b = on(backend)
    r, macro = t(1.0, 0, 1, 0, 7), t(True, True, False, False, False)
    out = R.himac(r, t(0, 0, 0, 0, 0), macro, t(0, 3, extreme, extreme, -1), **b)
    assert out.tolist() == [*R.himac(r[:2], t(0, 0), macro[:2], t(0, 0), **b).tolist() * 2, 0.0]


@pytest.mark.parametrize("beyond", [4, 5, 2**40, 2**63 - 1])
def test_a_parent_beyond_the_nodes_or_the_node_itself_is_an_error_that_the_loss_counts(backend, beyond):
    """Not the last node: it is in no statistic, and what it would be compared with is as if it were not there."""
    t, b = on(backend)
    rewards, group = t(0.2, 0.6, 0.8, 0.4, 0.9), t(0, 0, 0, 0, 0)
    out = A.mars2(rewards, t(-1, -1, 0, 0, beyond), group, **b)
    assert torch.equal(out[:4], A.mars2(rewards[:4], t(-1, -1, 0, 0), group[:4], **b)) and out[4].isnan()
    assert A.mars2(rewards, t(-1, -1, 0, 0, beyond), t(0, 0, 0, 0, -1), **b)[4] == 0


@pytest.mark.parametrize(("reward", "group"), [(math.nan, 0), (math.inf, 0), (7.0, -1)])
def test_a_parent_without_a_reward_or_a_prompt_is_none(backend, reward, group):
    t, b = on(backend)
    out = A.mars2(t(reward, 0.6, 0.8, 0.4), t(-1, -1, 0, 0), t(group, 0, 0, 0), **b)
    b_of_siblings = [0.6, 0.4, 0.8]  # the second is alone, the others have each other
    shaped = t(*(r + 0.3 * (r - b) for r, b in zip((0.6, 0.8, 0.4), b_of_siblings, strict=True)))
    close(out, [0.0, *A.grpo(shaped, None, eps=1e-9, **b).tolist()])


@pytest.mark.parametrize(
    "lacking", [(0, "nan"), (0, "inf"), (1, "nan"), (2, -1), (3, -1)], ids=["action", "inf", "outcome", "group", "own"]
)
def test_hrpo_a_step_without_a_reward_a_prompt_or_a_trajectory_has_no_part_of_the_other(backend, lacking):
    t, b = on(backend)
    given = [t(0.5, 0, 0.25), t(1.0, 0, 0.5), t(0, 0, 0), t(0, 1, 2)]
    column, nothing = lacking
    given[column][2] = float(nothing)
    alone = R.hrpo(*(each[:2] for each in given), **b)
    assert R.hrpo(*given, **b).tolist() == [*alone.tolist(), 0.0] and alone.any()


@pytest.mark.parametrize("compat", ["paper", "code"])
@pytest.mark.parametrize("nothing", [math.nan, math.inf])
def test_hbpo_a_response_without_a_length_or_a_budget_has_no_reward(backend, compat, nothing):
    t, b = on(backend)
    for column in (0, 2):
        given = [t(400.0, 900, 1000, 1500), t(True, True, True, False), t(512.0, 512, 1024, 1024), t(0, 0, 0, 0)]
        given[column][3] = nothing
        alone = A.hbpo(*(each[:3] for each in given), compat=compat, **b)
        assert A.hbpo(*given, compat=compat, **b).tolist() == [*alone.tolist(), 0.0] and alone.any()


@pytest.mark.parametrize("lacking", [(0, "nan"), (1, -1), (2, -1)], ids=["outcome", "group", "own"])
@pytest.mark.parametrize("estimator", [R.salt, R.graph_grpo])
def test_an_edge_is_worth_what_trajectories_with_an_outcome_say(backend, estimator, lacking):
    t, b = on(backend)
    given = [t(1.0, 0, 0.5, 1), t(0, 0, 0, 0), t(0, 1, 2, 3), t(4, 5, 4, 4)]
    column, nothing = lacking
    given[column][3] = float(nothing)
    alone = estimator(*(each[:3] for each in given), **b)
    assert estimator(*given, **b).tolist() == [*alone.tolist(), 0.0] and alone.any()
    given[column][3], given[3][3] = given[column][2] + (column == 2), -1  # a trajectory, whose step is no edge
    assert estimator(*given, **b)[3] == 0 and estimator(*given, **b)[:3].any()


@pytest.mark.parametrize("unknown", [math.nan, math.inf])
def test_a_response_without_a_length_enters_no_statistic_of_lengths(backend, unknown):
    """adora: a group without a longest right response is all wrong, one without wrong lengths is all right."""
    t, b = on(backend)
    rewards = t(1.0, 0, 0, 0)
    kept, damped = A.grpo(rewards, None, **b), 0.1 * A.grpo(rewards, None, **b)
    for lengths, expected in (
        ((unknown, 1.0, 2.0, 3.0), damped),
        ((9.0, 1.0, 2.0, unknown), kept),
        ((9.0, *[unknown] * 3), kept),
    ):
        assert torch.equal(A.adora(rewards, None, t(*lengths), rewards > 0, **b), expected)
    assert torch.equal(A.adora(rewards, None, t(unknown, 1.0, 2, 3), rewards > 0, without_success=True, **b), kept)
    for none in (unknown, -unknown, -5.0, 0.0):
        lengths = t(none, 1.0, 2.0, 1.0)
        assert A.opo(rewards, None, lengths, **b).tolist() == [1.0, 0, 0, 0]
