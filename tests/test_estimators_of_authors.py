"""The numbers of the authors' code, run at the commits that docs/advantages_evidence.md names."""

import math

import naive_estimators as naive
import pytest
import torch
from by_hand import close, on
from estimators import Given

from hpo_core import PackedBatch, advantages, aggregation, gates, policy_loss, testing
from hpo_core.advantages import reconstructed

A, R = advantages, reconstructed


def test_dcpo_is_the_authors_over_two_steps(backend):
    t, b = on(backend)
    start = A.GroupHistory.start(1, testing.device_of(backend))
    first, history = A.dcpo(t(1.0, 0, 0, 1), t(0, 0, 0, 0), start, **b)
    close(first, [0.866025, -0.866025, -0.866025, 0.866025])
    second, history = A.dcpo(t(1.0, 0, 0, 0), t(0, 0, 0, 0), history, **b)
    close(second, [1.313735, -0.588241, -0.588241, -0.588241])
    close(torch.cat(history), [2, 0.375, 0.554339**2], 2e-6)
    # A group of one: nothing in the first step, then the share 1 / 2 of (1 - 0.75) / sqrt(0.3125).
    close(A.dcpo(t(1.0), t(0), start, **b).advantages, [0])
    history = A.dcpo(t(1.0, 0), t(0, 0), start, **b).history
    close(A.dcpo(t(1.0), t(0), history, **b).advantages, [0.223607])
    for dtype, own in ((torch.float32, b), (torch.float64, {"backend": "reference"})):
        flat, history = torch.full((3,), 0.3, dtype=dtype, device=start.mean.device), start
        for _ in range(12):
            got, history = A.dcpo(flat, t(0, 0, 0), history, **own)
            assert not got.any() and not history.variance.any()


def test_mc_grpo_is_the_trainer_for_math_and_rescaled_that_for_gsm8k(backend):
    t, b = on(backend)
    r, ids = t(1.0, 0, 0, 0.5, 0.25, 1.0), t(0, 0, 0, 1, 1, 1)
    close(A.mc_grpo(r, ids, **b), [1000, 0, 0, 0, -0.25 / 0.251, 0.5 / 0.251])
    close(A.mc_grpo(r, ids, rescaled=True, **b), [3000, 0, 0, 0, -0.25 / 0.251 * 1.5, 0.5 / 0.251 * 1.5])
    masked = A.mc_grpo(t(1.0, 2, 4, 9, 9), None, rescaled=True, mask=t(1, 1, 1, 0, 0) > 0, **b)
    close(masked, [-1.5 / 1.001, 0, 3 / 1.001, 0, 0])  # two of three, not two of five
    kept = A.mc_grpo_samples(r, ids)
    assert kept.tolist() == [True, True, False, False, True, True]
    for seed in range(40):
        units = naive.draw(seed)
        g = Given(units, backend)
        kept = A.mc_grpo_samples(g.reward, g.group, mask=g.mask).cpu().numpy()
        assert not kept[~units.mask | (units.group < 0)].any()
        for places in naive.groups_of(naive.ids(units.group), units.mask).values():
            (dropped,) = [place for place in places if not kept[place]]
            assert units.reward[dropped] == sorted(units.reward[places])[(len(places) - 1) // 2]


def test_dgpo_with_lengths_spares_the_loss_tokens_that_teach_nothing(backend):
    t, b = on(backend)
    r, ids, lengths = t(1.0, 0, 1, 1), t(0, 0, 1, 1), t(3.0, 1, 5, 3)
    close(A.dgpo(r, ids, lengths=t(2.0, 2, 2, 2), **b), [1.9998, -1.9998, 0, 0])
    close(A.dgpo(r, ids, lengths=lengths, **b), [2.9997, -2.9997, 0, 0])
    of_hard = A.dgpo(r, ids, accuracy=r, **b)
    close(A.dgpo(r, ids, accuracy=r, lengths=lengths, **b), (3 * of_hard).tolist())
    assert not A.dgpo(t(1.0, 1), None, lengths=t(1.0, 2), **b).any()  # no group differs
    lacking = A.dgpo(t(1.0, 0, 1, 1, math.nan), t(0, 0, 1, 1, 1), lengths=t(3.0, 1, 5, 3, 9), **b)
    close(lacking, [2.9997, -2.9997, 0, 0, 0])
    without_tokens = A.dgpo(t(1.0, 0, 0.5, 1, 1), t(0, 0, 0, 1, 1), lengths=t(0.0, 0, 0, 3, 5), eps=0.0, **b)
    close(without_tokens, [1.5, -1.5, 0, 0, 0])


def test_maxrl_clipped_is_divided_by_the_group_s_size(backend):
    t, b = on(backend)
    close(A.maxrl(t(1.0, 0, 0, 0), None, least_mean=0.125, **b), [0.75, -0.25, -0.25, -0.25])
    close(A.maxrl(t(1.0, *[0.0] * 15), None, least_mean=0.125, **b), [0.46875, *[-0.03125] * 15])


def test_groups_of_one_keep_their_reward_where_the_authors_do(backend):
    t, b = on(backend)
    r, ids = t(1.0, 0, 0, 0, 1, 1, 1, 0, 0.5), t(0, 0, 0, 0, 1, 1, 1, 1, 2)
    ours, kept = A.bnpo(r, ids, **b), A.bnpo(r, ids, singleton="raw", **b)
    assert ours[8] == 0 and torch.equal(ours[:8], kept[:8])
    close(kept, [0.708690, *[-0.236230] * 3, *[0.251828] * 3, -0.755484, 500000], 2e-6)
    close(A.bnpo(t(0.5), None, singleton="raw", **b), [0.5])
    close(A.ngrpo(t(0.5, 1, 0), t(0, 1, 1), singleton="raw", **b)[:1], [0.5])
    assert A.ngrpo(t(0.5), None, singleton="zero", **b).tolist() == [0]
    close(A.ngrpo(t(0.0), None, **b), [-math.sqrt(0.5)])
    close(A.adora(t(0.5), None, t(3.0), t(False), singleton="raw", **b), [0.05])
    close(A.dr_mas(t(0.5, 1, 0), t(0, 0, 0), t(0, 1, 1), singleton="raw", **b), [0.5, 0.707106, -0.707106])
    close(A.grpo(t(3.0), None, singleton="raw", eps=0.5, **b), [2])  # over a deviation of 1, and eps
    close(A.grpo(t(3.0), None, singleton="raw", eps=2.0, eps_mode="floor", **b), [1.5])
    close(A.lite_ppo(t(3.0, 1, 2), t(0, 1, 1), singleton="raw", eps=0.5, **b)[:1], [2])  # over the batch's and eps
    with pytest.raises(ValueError, match=r"^singleton: expected one of zero, raw, got 'kept'"):
        A.ngrpo(r, ids, singleton="kept")


def test_adora_leaves_overlong_mistakes_out_and_knows_the_rule_of_vision_models(backend):
    t, b = on(backend)
    r, n = t(2.0, 0, 0), t(100.0, 60, 4060)
    for cutoff in (4054, 4060):  # one of this length was cut off, too
        close(A.adora(r, None, n, r > 1, cutoff=cutoff, **b), [1.154699, -0.577350, -0.577350])
    close(A.adora(r, None, n, r > 1, **b), [0.115470, -0.057735, -0.057735])
    ids, lengths = t(0, 0, 1, 1, 2, 2, 3, 3), t(5.0, 9, 5, 9, 5, 9, 9, 5)
    right, scores = t(1, 0, 0, 0, 1, 1, 1, 0) > 0, t(1.0, 0, 0.25, 0, 1, 0.75, 1, 0)
    plain = A.grpo(scores, ids, **b)
    vision = A.adora(scores, ids, lengths, right, cutoff=4094, without_success=True, without_mistake=False, **b)
    close(vision / plain, [0.1, 0.1, 1, 1, 0.1, 0.1, 1, 1])
    close(A.adora(scores, ids, lengths, right, **b) / plain, [0.1, 0.1, 0.1, 0.1, 1, 1, 1, 1])


def test_mars2_knows_trees_and_shapes_in_place(backend):
    t, b = on(backend)
    tree = (t(0.2, 0.6, 0.8, 0.4), t(-1, -1, 0, 0), t(0, 0, 0, 0))
    close(A.mars2(*tree, compat="code", **b), [-1.184759, 0.467193, 1.107324, -0.389757])
    # Two trees: a root and its two children, and a chain of three; their roots are no siblings.
    rewards, parents, ids = t(0.2, 0.8, 0.4, 0.6, 1, 0), t(-1, 0, 0, -1, 3, 4), t(*[0] * 6)
    trees = t(0, 0, 0, 1, 1, 1)
    shaped = t(0.2, 0.95, 0.37, 0.6, 1.12, -0.336)
    close(
        A.mars2(rewards, parents, ids, tree_ids=trees, compat="code", **b), A.grpo(shaped, ids, eps=1e-9, **b).tolist()
    )
    one = A.mars2(rewards, parents, ids, **b)
    assert not torch.equal(one, A.mars2(rewards, parents, ids, tree_ids=trees, **b))
    chain = t(*range(-1, 39))  # 40 nodes below one another
    values = [float(i * 7 % 5) for i in range(40)]
    for at in range(1, 40):
        values[at] += 0.3 * (values[at] - values[at - 1])
    deep = A.mars2(t(*[float(i * 7 % 5) for i in range(40)]), chain, t(*[0] * 40), compat="code", **b)
    close(deep, A.grpo(t(*values), None, eps=1e-9, **b).tolist(), 4e-6)


def test_a_parent_in_another_prompt_counts_with_its_own_reward(backend):
    t, b = on(backend)
    tree, ids = (t(5.0, 6.0, 8.0, 7.0), t(-1, 0, 1, 2)), t(0, 1, 1, 1)
    for compat, shaped in (("paper", t(5.0, 6.3, 8.6, 6.7)), ("code", t(5.0, 6.3, 8.51, 6.547))):
        close(A.mars2(*tree, ids, compat=compat, **b), A.grpo(shaped, ids, eps=1e-9, **b).tolist())


def test_archer_takes_the_smaller_of_both_values(backend):
    t, b = on(backend)
    given = t(1.0, 1), t(0.5, 2), t(0.25, 0.5)
    assert A.archer_td(*given, **b).tolist() == [0.25, 0.5]
    assert A.archer_td(*given, second_values=t(0.5, 0.25), **b).tolist() == [0.25, 0.75]
    assert A.archer_td(*given, second_values=t(0.5, math.nan), **b).tolist() == [0.25, 0]


def test_areal_scales_by_the_deviation_about_groups(backend):
    t, b = on(backend)
    r, ids = t(1.0, 0, 2, 6), t(0, 0, 1, 1)
    close(A.lite_ppo(r, ids, eps=1e-5, about_groups=True, **b), [0.297042, -0.297042, -1.188170, 1.188170], 2e-6)
    r, ids = t(0.0, 0, 1, 1, 2, 4), t(0, 0, 1, 1, 2, 2)
    close(A.lite_ppo(r, ids, eps=1e-5, about_groups=True, **b), [0, 0, 0, 0, -1.581114, 1.581114])
    masked = A.lite_ppo(
        t(1.0, 0, 2, 6, 9), t(0, 0, 1, 1, 1), eps=0.0, about_groups=True, mask=t(1, 1, 1, 1, 0) > 0, **b
    )
    close(masked, [0.297044, -0.297044, -1.188177, 1.188177, 0], 2e-6)


def test_hiper_behind_a_truncated_episode_stand_the_values_before_it(backend):
    t, b = on(backend)
    given = (
        t(0.0, 0.1, 0, 1), t(0, 0, 0, 0), t(True, False, True, False), t(0.3, 0.4, 0.5, 0.7), t(0.35, 9.0, 0.55, 9.0),
    )  # fmt: skip
    out = A.hiper(*given, is_truncated=t(1, 1, 1, 1) > 0, normalised=False, **b)
    close(out.low, [0.280806, 0.222500, 0.165 + 0.9025 * 0.965, 1 + 0.95 * 0.7 - 0.7])
    second = 0.95 + 0.9025 * 0.55 - 0.55
    close(out.high, [0.095 + 0.9025 * 0.55 - 0.35 + 0.9025 * 0.95 * second, 0, second, 0])
    ended = A.hiper(*given, is_truncated=t(1, 1, 1, 0) > 0, normalised=False, **b)  # only the last turn counts
    assert torch.equal(ended.low, A.hiper(*given, normalised=False, **b).low)


def test_hiper_rewards_are_the_authors(backend):
    """Their compute_hae_advantage with keep_penalty_mode "normalized" and "fixed"."""
    t, b = on(backend)
    given = t(1.0, 0, 0, 0, 5, 7), t(0, 0, 0, 0, 1, -1), t(True, False, True, False, False, False)
    close(A.hiper_rewards(*given, **b), [1, -0.075, 0, -0.075, 5, 7])
    changed = t(1, 1, 1, 0, 1, 1) > 0
    close(A.hiper_rewards(*given, is_changed=changed, spread=False, **b), [1, -0.6, 0, -0.3, 4.7, 7])


def test_passk_nobody_leads_a_tie_or_an_empty_field(backend):
    t, b = on(backend)
    close(A.grpo_passk(t(0.2, 0.9, 0.5), None, **b), [0, 1.138986, 0])
    close(A.grpo_passk(t(0.2, 0.9, 0.5), None, scaled=False, **b), [0, 0.4, 0])
    r, ids = t(1.0, 1, 0, 3, 2, math.nan, -5, -6), t(0, 0, 0, 1, 2, 2, -1, -1)
    assert not A.grpo_passk(r, ids, **b).any()


@pytest.mark.parametrize("nothing", [math.nan, math.inf])
def test_hiper_a_reward_that_is_none_says_nothing_of_sub_goals_before_it(backend, nothing):
    """Their turns are worth what V_high of the next sub-goal says."""
    t, b = on(backend)
    given = [
        t(0.0, 0.1, 0, 1), t(0, 0, 0, 0), t(True, False, True, False), t(0.3, 0.4, 0.5, 0.7), t(0.35, 9.0, 0.55, 9.0),
    ]  # fmt: skip
    options = {"switch_values": t(0.1, 0.2, 0.3, 0.4), "normalised": False, **b}
    known = A.hiper(*given, **options)
    given[0][3] = nothing
    out = A.hiper(*given, **options)
    for stream in ("low", "switch"):
        assert getattr(out, stream).tolist() == [*getattr(known, stream)[:2].tolist(), 0, 0]
    assert not out.high.any()  # the first sub-goal's contains that of the second


@pytest.mark.parametrize("options", [{}, {"root": True}, {"least_mean": 0.125}], ids=str)
def test_maxrl_of_a_mean_that_is_not_above_0_is_0(backend, options):
    t, b = on(backend)
    rewards, ids = t(-1.0, -2, -3, -1, 1, -1e-7, -3e-7, 2, 1), t(0, 0, 0, 1, 1, 2, 2, 3, 3)
    for own in (b, {"backend": "reference"}):
        out = A.maxrl(rewards, ids, **options, **own)
        assert not out[:7].any() and out[7] > 0 > out[8]


def test_unlikeliness_is_the_authors_and_ties_share_their_ranks(backend):
    """Their _compute_advantages with rank_penalty=0.25."""
    t, b = on(backend)
    r, ids, likelihoods = t(1.0, 1, 0, 0, 1, 1, 1), t(0, 0, 0, 0, 1, 1, 2), t(-0.2, -0.9, -0.5, -0.1, -0.3, -0.7, -0.4)
    found = [0.747240, 0.977160, -0.862200, -0.862200, -0.707099, 0.707099]
    close(A.unlikeliness(r, ids, likelihoods, **b), [*found, 0])
    close(A.unlikeliness(r, ids, likelihoods, singleton="raw", **b), [*found, 0.999999])
    tied = A.unlikeliness(r[:5], None, t(-0.2, -0.2, -0.2, math.nan, -math.inf), eps=0.0, penalty=0.75, **b)
    unscored = A.unlikeliness(t(1.0, 1, 0, math.nan), None, t(-0.2, -0.9, -0.5, -9.0), **b)
    close(unscored, [*A.unlikeliness(r[:3], None, likelihoods[:3], **b).tolist(), 0])  # it is less likely than nobody
    close(tied, [0.577350, 0.577350, -1.154701, 0, 0])  # both right ones are worth 3 / 4: k is 1 of n = 3


def test_grpo_lead_is_the_authors(backend):
    """Their compute_grpo_outcome_advantage, and their weight at a quarter, a half and nine tenths of right answers."""
    t, b = on(backend)
    r, ids = t(1.0, -1, -1, -1, 1.05, 0.95, -1, 0.5), t(0, 0, 0, 0, 1, 1, 1, 2)
    found = [2.238955, -0.475, -0.475, -0.475, 0.723476, 0.622526, -1.711054, 0.241722]
    close(A.grpo_lead(r, ids, singleton="raw", **b), found)
    close(A.grpo_lead(r, ids, **b), [*found[:7], 0])
    for right, of, weight in ((1, 4, 1.492638), (2, 4, 1.416556), (9, 10, 0.600668)):
        rewards = t(*[1.0] * right, *[0.0] * (of - right))
        close(A.grpo_lead(rewards, None, **b)[:1], [weight * A.grpo(rewards, None, **b)[0].item()])
    # Their get_reweight_rewards, as the docstring has it.
    right, lengths = t(True, True, False, True), t(4100.0, 5000, 6000, 7000)
    of_lengths = torch.where(right, (-0.05 * A.grpo(lengths, None, mask=right, **b)).exp(), -1.0)
    close(of_lengths, [1.043590, 1.012428, -1, 0.946468])
    # A judge of its own, and an answer without a reward: two of three are right.
    judged = A.grpo_lead(t(3.0, 2, math.nan, 0), None, is_correct=t(True, False, True, True), eps=0.0, **b)
    close(judged, [1.018436, 0.254609, 0, -1.618311])


def test_copo_is_the_authors(backend):
    """Their compute_copo_outcome_advantage: two sets of four, a step without variants, a set of another size."""
    t, b = on(backend)
    r, ids = t(1.0, 0, 0, 0, 0, -0.25, 9, 9, 0.5, 1, 0), t(0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1)
    variants, confidences = (
        t(5, 5, 5, 5, 7, 7, 7, 7, -1, 8, 8),
        t(0.2, 0.4, 0.6, 0.8, 0.9, 0.1, 0.5, 0.5, 0.7, 0.3, 0.6),
    )
    original = t(*[True, False, False, False, False, True, False, False, True, True, False])
    found = [0.262460, 0.511203, 0.995687, 1.939334, -2.265250, -0.306568, -0.833339, -0.833339, 0.132453]
    close(A.copo(r, ids, variants, original, confidences, singleton="raw", **b), [*found, 0.999999, 0.999999])
    close(A.copo(r, ids, variants, original, confidences, **b), [*found, 0, 0])
    # Rewards of variants are not read; a set that lacks a confidence is one of three, a step without a reward is none.
    r[2], confidences[3] = math.nan, math.nan
    plain = A.grpo(r[original], ids[original], **b).tolist()
    close(A.copo(r, ids, variants, original, confidences, **b)[:5], [plain[0]] * 3 + [0, found[4]])
    r[5] = math.nan
    close(A.copo(r, ids, variants, original, confidences, **b)[:9], [0.707105] * 3 + [0] * 5 + [-0.707105], 2e-6)
    # Confidences are clamped, and those that agree weigh alike.
    clamped = A.copo(r[:4], None, variants[:4], original[:4], t(-2.0, 0, 1, 3), singleton="raw", eps=0.0, **b)
    close(clamped, [2 / (1 + math.exp(2))] * 2 + [2 / (1 + math.exp(-2))] * 2)
    for nearly in (0.5, 0.5000005):
        given = t(0.5, nearly, 0.5, 0.5), {"singleton": "raw", "eps": 0.0, "sharpness": 9.0}
        close(A.copo(r[:4], None, variants[:4], original[:4], given[0], **given[1], **b), [1, 1, 1, 1], 1e-12)
    # All of the credit goes to the likeliest; sets of two prompts are two, whatever their numbers.
    given = t(0.1, 0.3, 0.2, 0.9), {"singleton": "raw", "eps": 0.0, "sharpness": 700.0}
    close(A.copo(r[:4], None, variants[:4], original[:4], given[0], **given[1], **b), [0, 0, 0, 4])
    each = 0.5 / (math.sqrt(0.5) + 1e-6)
    own = t(2.0, 0, 1, 0, 2, 0, 1, 0), t(0, 0, 0, 0, 1, 1, 1, 1), t(*[True, False] * 4), t(*[0.2, 0.8] * 4)
    for sets in (t(0, 0, 1, 1, 0, 0, 1, 1), t(0, 0, 1, 1, 2, 2, 3, 3)):
        shared = A.copo(own[0], own[1], sets, own[2], own[3], variants=2, **b)
        close(shared[4:], shared[:4].tolist())
        close(shared[:2], [each * 2 / (1 + math.exp(2)), each * 2 / (1 + math.exp(-2))])


def test_treerl_is_the_authors(backend):
    """Their tree with use_state_value_reward and use_weighted_value, at nodes whose local advantage is not 0."""
    t, b = on(backend)
    r, prefixes = t(1.0, 0, 0.5, 0, 0.25), [t(0, 0, 0, 0, 0), t(4, 4, 7, 7, 7)]
    lead, third = 0.15, 0.1  # V - V_root of both inner nodes: .5 and .25 of .35
    close(
        A.treerl(r, prefixes, **b),
        [
            [2 * lead / math.sqrt(2)] * 2 + [-2 * third / math.sqrt(3)] * 3,
            [0.65 + 0.5, -0.35 - 0.5, 0.15 + 0.25, -0.35 - 0.25, -0.1],
        ],
    )
    r, prefixes = t(1.0, 0, 1, 0.5, 0, 0.25), [t(0, 0, 0, 0, 0, 0), t(0, 0, 1, 2, 2, 2)]
    out = A.treerl(r, prefixes, compat="code", **b)
    close(out[0], [0.070711, 0.070711, 1.3, -0.288675, -0.288675, -0.288675])
    # Below the third leaf's node nothing branches: the authors take 1.3 again, from a local advantage of 0.
    close(out[1], [1.264645, -1.135355, 0.65, 0.244338, -0.955662, -0.355662])


def test_tpo_is_the_authors_and_0_at_the_target(backend):
    """Three times the negative gradient of their cross-entropy, by the log-probabilities of the responses."""
    t, b = on(backend)
    r, now, old = t(1.0, 0, 0.5), t(-2.5, -2, -3), t(-3.0, -2, -4)
    close(A.tpo(r, None, now, old, **b), [1.312575, -0.995105, -0.317469])
    close(A.tpo(r, None, now, old, temperature=0.5, **b), [1.930057, -1.461660, -0.468398])
    reached = old + t(1.0, -1, 0) * math.sqrt(1.5) - 7  # a constant of the prompt changes no softmax
    assert A.tpo(r, None, reached, old, **b).abs().max() < 1e-6
    assert not A.tpo(t(0.5, 0.5, 0.5), None, old, old, **b).any()
    lost = A.tpo(t(1.0, 0, 1, 0), t(0, 0, 0, 1), t(-1.0, -1, math.nan, -1), t(-1.0, -1, -1, -1), **b)
    close(lost, [math.tanh(1), -math.tanh(1), 0, 0])
    lost = A.tpo(t(1.0, 0, 1, 0), None, t(-1.0, -1, -1, -1), t(-1.0, -1, math.nan, -math.inf), **b)
    close(lost, [math.tanh(1), -math.tanh(1), 0, 0])
    far = A.tpo(t(1.0, 0), None, t(-9000.0, -100), t(-9000.0, -100), **b)
    assert far.tolist() == [0, 0]  # q and p are 1 of the second response, whatever its reward


@pytest.mark.parametrize("length", [40.0, 5000.0, 2e6])
def test_tpo_of_long_responses_of_which_one_is_likely(backend, length):
    """Beside it all probabilities are small, and so are all advantages, however far from 0 the sums are."""
    t, b = on(backend)
    rewards, old = [0.25, 1.0, 0.0], [-length, -length - 14, -length - 20]
    tilt = [(r - 1.25 / 3) / math.sqrt(sum((x - 1.25 / 3) ** 2 for x in (0.25, 1.0, 0.0)) / 3) for r in rewards]
    before = [math.exp(logp + length + more) for logp, more in zip(old, tilt, strict=True)]
    now = [math.exp(logp + length) for logp in old]
    expected = [3 * (x / sum(before) - y / sum(now)) for x, y in zip(before, now, strict=True)]
    largest = max(map(abs, expected))
    got = A.tpo(t(*rewards), None, t(*old), t(*old), **b)
    close(got / largest, [each / largest for each in expected], 5e-6)


def test_tpo_has_the_gradient_of_the_cross_entropy():
    batch, ids = PackedBatch.from_lengths([2, 3, 1, 2]), torch.tensor([0, 0, 1, 1])
    logp = torch.linspace(-2, -0.1, 8, dtype=torch.float64).requires_grad_()
    old, r = torch.tensor([-2.0, -3, -1, -1], dtype=torch.float64), torch.tensor([1.0, 0, 0, 1], dtype=torch.float64)
    rows = torch.stack([part.sum() for part in logp.split([2, 3, 1, 2])])
    target = (old.view(2, 2) + torch.tensor([[1.0, -1.0], [-1.0, 1.0]])).softmax(1)
    (-(target * rows.view(2, 2).log_softmax(1)).sum(1).mean()).backward()
    expected, logp.grad = logp.grad, None
    given = {"advantages": A.tpo(r, ids, rows, old, backend="reference"), "backend": "reference"}
    weights = aggregation.seq_mean_token_sum(batch)
    policy_loss(logp, None, batch=batch, gate=gates.reinforce(), weights=weights, **given).loss.backward()
    torch.testing.assert_close(logp.grad, expected)
