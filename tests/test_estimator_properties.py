"""The promises of the algebra of estimators, where test_advantages.py does not show them already.

P and a number name a promise: P1 order and names of units, P2 sums of groups, P4 bounds, P5 scale, P6 sign, P7
reductions to another estimator, P8 closed forms, P9 strata, P11 masks, P12 equal rewards, P14 roles, P15 whitening,
P16 negative controls.
"""

import functools
import math

import naive_estimators as naive
import numpy as np
import pytest
import torch
from breadth import at_length, number  # noqa: F401 (the first is a fixture)
from catalogue import bits
from estimators import CASES, COMPOSED, PATHS, Given
from torch.utils._pytree import tree_leaves
from valid_calls import calls

from hpo_core import PackedBatch, advantages, segments, testing
from hpo_core.advantages import reconstructed
from hpo_core.testing.budget import UNIT

A, R = advantages, reconstructed
PLACES_COUNT = {"mars2"}
IDS = ("group", "other", "third", "trajectory", "anchor")


def seeds(backend, name=PATHS[0], most=24):
    """Seeds of drawn batches; in the interpreter none for an estimator that starts no kernel in a way of its own."""
    interpreted, (every, emulated) = 1 if name in PATHS else 0, (3, 1) if name in COMPOSED else (max(4, most // 4), 2)
    return range(1, 1 + number(backend, at_length=most, machine_code=every, emulated=emulated, interpreted=interpreted))


def drawn(backends, *which):
    """Pairs of a backend and a seed."""
    return [(backend, seed) for backend in backends for seed in seeds(backend, *which)]


def near(got, expected, size=1.0, where=None):
    error = (got.cpu().double() - expected.cpu().double()).abs().max()
    assert float(error) <= 32 * UNIT * max(1.0, size), (where, got, expected)


def shuffled(units, seed):
    """Units in another order; steps of a trajectory keep theirs."""
    random = np.random.default_rng(seed)
    order = random.permutation(len(units.reward))
    for own in naive.groups_of(naive.ids(units.trajectory)).values():
        where = np.flatnonzero(np.isin(order, own))
        order[where] = np.sort(order[where])
    return naive.Units(*(field[order] for field in units)), order


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("name", [name for name in CASES if name not in PLACES_COUNT])
def test_p1_order_does_not_matter(native_backends, name):
    for backend, seed in drawn(native_backends, name):
        units = naive.draw(seed)
        plain = CASES[name](Given(units, backend))
        moved, order = shuffled(units, seed)
        near(CASES[name](Given(moved, backend)), plain[..., order], float(plain.abs().max()), backend)


def test_p1_an_accuracy_at_the_bound_is_easy_in_any_order(backend):
    """A fifth is no binary number, and a mean is rounded in the order of its units."""
    device = testing.device_of(backend)
    accuracy, is_instant = torch.tensor([1.0, 0, 0, 0, 0, 1, 0], device=device), torch.arange(7, device=device) < 5
    found = []
    for first in range(7):
        order = torch.arange(7, device=device).roll(first)
        found.append(R.a2fm_apo(accuracy[order], is_instant[order], None, easy=0.2, backend=backend).roll(-first))
    assert all(torch.allclose(each, found[0]) for each in found)


ZERO_SUM = ("grpo", "dr_grpo", "rloo", "dgpo", "gpg", "maxrl", "g2rpo", "pass_at_k", "dvao")


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("name", ZERO_SUM)
def test_p2_groups_sum_to_zero(native_backends, name):
    for backend, seed in drawn(native_backends, name):
        units = naive.draw(seed)
        out = CASES[name](Given(units, backend)).cpu().double()
        for places in naive.groups_of(naive.ids(units.group), units.mask).values():
            assert abs(float(out[places].sum())) <= 32 * UNIT * max(1.0, float(out.abs().sum())), backend


@pytest.mark.usefixtures("at_length")
def test_p2_opo_weighs_the_sum_by_length(backend):
    for seed in seeds(backend):
        units = naive.draw(seed)
        out = CASES["opo"](Given(units, backend)).cpu().double().numpy()
        for places in naive.groups_of(naive.ids(units.group), units.mask).values():
            assert abs((units.length * out)[places].sum()) <= 1e-4


@pytest.mark.usefixtures("at_length")
def test_p4_bounds(backend):
    for seed in seeds(backend):
        units = naive.draw(seed)
        given = Given(units, backend)
        size = segments.statistics(given.reward, given.group, mask=given.mask, backend=backend).members.cpu()
        size = size.clamp(min=1)
        for name, bound in (
            ("dgpo_plain", size / 2),
            ("g2rpo", torch.special.ndtri(1 - 1 / (2 * size))),
            ("m_grpo", (size - 1).sqrt() * 3 + 10),  # weights up to 8 copies: sqrt(8 n)
        ):
            call = CASES.get(name, lambda g: A.dgpo(g.reward, g.group, **g.rest))
            out = call(given).cpu().double().abs()
            assert bool((out <= bound * (1 + 1e-5) + 1e-6).all()), name


@pytest.mark.usefixtures("at_length")
def test_p5_ranks_see_order_alone(backend):
    """Any increasing map of the rewards changes no bit of an estimator of ranks."""
    for seed in seeds(backend):
        units = naive.draw(seed)
        bent = units._replace(reward=np.arctan(units.reward * 3).astype(np.float32).astype(float))
        assert torch.equal(CASES["g2rpo"](Given(units, backend)), CASES["g2rpo"](Given(bent, backend)))


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("name", ["gdpo", "dvao"])
def test_p5_each_reward_has_its_own_scale(backend, name):
    for seed in seeds(backend):
        units = naive.draw(seed)._replace(number=np.round(naive.draw(seed).number * 16))
        g, h = Given(units, backend), Given(units._replace(number=units.number * 4), backend)
        estimate, weight = getattr(A, name), 1.0 if name == "gdpo" else 4.0  # weights of rewards scale in DVAO
        rest = {"eps": 1e-6, **g.rest}
        # Weights that let no two rewards cancel: what is left of them would be eps, made large by the second stage.
        one = estimate(torch.stack([g.reward, g.number]), g.group, [1.0, 2 * weight], **rest)
        two = estimate(torch.stack([h.reward, h.number]), h.group, [1.0, 2.0], **rest)
        near(one, two, 1e3)  # but for eps


@pytest.mark.usefixtures("at_length")
def test_p6_odd_symmetry(backend):
    for seed in seeds(backend):
        units = naive.draw(seed)
        given, opposite = Given(units, backend), Given(units._replace(reward=-units.reward), backend)
        for name in ("g2rpo", "opo", "m_grpo", "stratified", "treepo", "gigpo"):
            near(CASES[name](opposite), -CASES[name](given), 10)
    # Estimators that see more in rewards than their differences are not odd.
    given = Given(naive.draw(1), backend)
    assert not torch.allclose(A.maxrl(1 - given.reward, given.group), -A.maxrl(given.reward, given.group))


@pytest.mark.usefixtures("at_length")
def test_p7_reductions(backend):
    for seed in seeds(backend):
        g = Given(naive.draw(seed), backend)
        plain = A.grpo(g.reward, g.group, **g.rest)
        same = torch.zeros_like(g.other)
        near(A.dr_mas(g.reward, g.group, same, **g.rest), plain)
        near(A.ngrpo(g.reward, g.group, virtual=0, **g.rest), plain)
        near(A.stratified(g.reward, g.group, g.other, alpha=0.0, **g.rest), plain)
        near(A.stratified(g.reward, g.group, same, alpha=1.0, **g.rest), plain)
        biased = A.grpo(g.reward, g.group, ddof=0, **g.rest)
        near(A.dvao(g.reward[None], g.group, **g.rest), biased)
        near(
            A.m_grpo(g.reward, g.group, torch.ones_like(g.length), **g.rest),
            A.grpo(g.reward, g.group, ddof=0, eps=0.0, **g.rest),
        )
        binary = g.flag.to(g.reward.dtype)
        near(A.pass_at_k(g.flag, g.group, 1, **g.rest), A.grpo(binary, g.group, ddof=0, **g.rest), 4)
        zeros = torch.zeros_like(g.reward)
        near(
            A.sgrpo(g.reward, zeros, g.group, g.other, group_weight=0.0, **g.rest), A.rloo(g.reward, g.group, **g.rest)
        )
        near(
            A.treepo(g.reward, [g.group], backend=backend),
            A.dr_grpo(g.reward, g.group, singleton="raw", backend=backend),
        )
        # One step per trajectory: an episode is its step.
        alone = torch.where(g.group >= 0, torch.arange(len(g.group), device=g.group.device), -1)
        whole = A.grpo(g.reward, g.group, backend=backend)
        steps = functools.partial(A.gigpo, g.reward, g.group, alone, backend=backend)
        near(steps(same), 2 * whole, 4)
        near(steps(same, step_weight=0.0), whole)
        near(steps(alone.clamp(min=0)), whole)  # every observation is one of its own
        unweighted = A.hgpo(g.reward, g.group, alone, same, history=0, backend=backend)
        near(unweighted, A.grpo(g.reward, g.group, ddof=0, backend=backend), 40)  # but for the eps of its weight


def test_p7_turns_of_equal_number(backend):
    """AgentFlow with T turns each is GRPO times sqrt((n T - 1) / (T (n - 1)))."""
    t = functools.partial(torch.tensor, device=testing.device_of(backend))
    rewards, turns = t([1.0, 0, 0, 1, 0.5]), 3
    factor = math.sqrt((5 * turns - 1) / (turns * 4))
    flow = A.flow_grpo(rewards, None, torch.full_like(rewards, turns), eps=0.0, backend=backend)
    near(flow, factor * A.grpo(rewards, None, eps=0.0, backend=backend), 2)


def test_p7_all_subgroups_of_a_group(backend):
    """Groups that overlap are pairs of a unit and a group: the mean over all subsets of 3 is 2/3 of RLOO (MS-GRPO)."""
    device = testing.device_of(backend)
    rewards = torch.tensor([1.0, 0, 0.25, 1, 0.5, -2], device=device)
    subsets = torch.combinations(torch.arange(6), 3).to(device)  # [G, 3]
    units, groups = subsets.flatten(), torch.arange(len(subsets), device=device).repeat_interleave(3)
    of_pairs = A.dr_grpo(rewards[units], groups, backend=backend)
    means = segments.statistics(of_pairs, units, backend=backend).mean
    near(means, 2 / 3 * A.rloo(rewards, None, backend=backend)[units], 3)


def test_p8_binary_closed_forms(backend):
    t = functools.partial(torch.tensor, device=testing.device_of(backend))
    for n, c in ((4, 1), (8, 3), (16, 15)):
        p = c / n
        rewards = t([1.0] * c + [0.0] * (n - c))
        up, down = math.sqrt((1 - p) / p), -math.sqrt(p / (1 - p))
        for out, expected in (
            (A.grpo(rewards, None, ddof=0, eps=0.0, backend=backend), (up, down)),
            (A.dgpo(rewards, None, eps=0.0, backend=backend), (1 / (2 * p), -1 / (2 * (1 - p)))),
            (A.maxrl(rewards, None, eps=0.0, backend=backend), ((1 - p) / p, -1.0)),
        ):
            near(out[[0, -1]], t(expected), 8)


@pytest.mark.usefixtures("at_length")
def test_p9_a_group_is_its_strata(backend):
    """The difference between strata is that of means, and for second moments that of these."""
    for seed in seeds(backend):
        g = Given(naive.draw(seed), backend)
        strata = segments.dense_ids(g.group, g.other)
        whole, inside = (A.dr_grpo(g.reward, ids, **g.rest) for ids in (g.group, strata))
        of_group, of_stratum = (
            segments.statistics(g.reward, ids, mask=g.mask, backend=backend) for ids in (g.group, strata)
        )
        between = torch.where(g.mask & (g.group >= 0), of_stratum.mean - of_group.mean, 0.0)
        near(whole, inside + between, 4)
        # Once per stratum: each of its members stands for its part.
        part = (of_stratum.squares / of_stratum.members.clamp(min=1) + between.square()).cpu().numpy()
        for places in naive.groups_of(naive.ids(g.units.group), g.units.mask).values():
            assert part[places].sum() == pytest.approx(float(of_group.squares[places[0]]), abs=1e-9, rel=1e-9)


MASKED = (
    *("grpo", "asymre", "a_star", "grpo_leave_one_out", "lite_ppo_groups", "opo", "maxrl", "dgpo", "gpg", "bnpo"),
    *("grpo_lead", "ngrpo", "v05", "dvao", "gdpo", "gdpo_tokens", "m_grpo"),
    *("stratified", "g2rpo", "arena", "pkpo", "qae", "mc_grpo", "dr_mas", "reinforce_pp_baseline", "spo_single_stream"),
)


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("name", MASKED)
def test_p11_masking_is_removal(native_backends, name):
    """Masked units may hold any number: NaN there changes no bit elsewhere."""
    for backend, seed in drawn(native_backends, name):
        units = naive.draw(seed)
        keep = np.random.default_rng(seed).random(len(units.reward)) < 0.7
        poisoned = units._replace(
            mask=units.mask & keep,
            reward=np.where(keep, units.reward, np.nan),
            number=np.where(keep, units.number, np.nan),
        )
        whole = CASES[name](Given(poisoned, backend))
        if name == "arena":  # its ranks count within the group that is left
            whole = CASES[name](Given(poisoned._replace(length=units.length), backend))
        assert not whole[~torch.tensor(poisoned.mask)].any() and bool(torch.isfinite(whole).all()), backend
        left = naive.Units(*(field[keep] for field in units))
        near(whole[torch.tensor(keep)], CASES[name](Given(left, backend)), 10, backend)


# The estimators whose scores are lengths, whose scores are only bools, that read no group, that take a reward to the
# steps before it, and that read trajectories.
OF_LENGTHS = {"arena", "hbpo", "hbpo_code"}
OF_BOOLS = {"pass_at_k"}
WITHOUT_GROUPS = {"spo_single_stream", "gae", "step_gae", "hiper"}
CHAINED = {"gigpo", "gigpo_code", "hgpo", "hgpo_code", "gae", "step_gae", "hiper"}
OF_TRAJECTORIES = {*CHAINED, "hrpo", "salt", "graph_grpo"}


def some(units, lacking, name, random):
    """Units to do without, such that the others are what they are without them ``[U]`` bool: one, or about a third."""
    n = len(units.reward)
    chosen = np.arange(n) == random.integers(n) if random.random() < 0.5 else random.random(n) < 0.3
    if name in CHAINED and lacking is unscored:
        return np.isin(units.trajectory, units.trajectory[chosen]) & (units.trajectory >= 0)
    if name in PLACES_COUNT:  # the last of its group has no children
        return chosen & [group not in units.group[at + 1 :] for at, group in enumerate(units.group)]
    return chosen


def unscored(units, absent, name):
    """A reward is NaN or infinite; of a trajectory the last, which every return of it contains but those of hiper's
    sub-goals."""
    if name in CHAINED - {"hiper"}:
        absent = absent & [own not in units.trajectory[at + 1 :] for at, own in enumerate(units.trajectory)]
    scores = ("reward", "number", "length") if name in OF_LENGTHS else ("reward", "number")
    nothing = np.resize([np.nan, -np.inf, np.inf], len(absent))
    return units._replace(**{score: np.where(absent, nothing, getattr(units, score)) for score in scores})


def outside(units, absent, name):
    return units._replace(group=np.where(absent, -3, units.group))


def stray(units, absent, name):
    return units._replace(trajectory=np.where(absent, -(2**63), units.trajectory))


# A total over the batch: the last bits of the reference, which keeps float64, follow the places of the units.
WITH_TOTALS = ("bnpo", "dgpo")
CONCERNED = {unscored: set(CASES) - OF_BOOLS, outside: set(CASES) - WITHOUT_GROUPS, stray: OF_TRAJECTORIES}


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize(
    ("lacking", "name"), [(lacking, name) for lacking, names in CONCERNED.items() for name in CASES if name in names]
)
def test_a_unit_without_a_score_or_an_id_is_as_if_it_were_not_there(native_backends, lacking, name):
    """It gets 0 and changes nothing elsewhere, in a second stage over the batch neither."""
    for backend, seed in drawn(("reference", *native_backends), name, 8):
        units, random = naive.draw(seed), np.random.default_rng(seed)
        absent = some(units, lacking, name, random)
        whole = CASES[name](Given(lacking(units, absent, name), backend))
        assert not whole[..., torch.tensor(absent)].any() and bool(torch.isfinite(whole).all()), (backend, seed, whole)
        left = CASES[name](Given(naive.Units(*(field[~absent] for field in units)), backend))
        of_others = whole[..., torch.tensor(~absent)]
        if backend == "reference" and name in WITH_TOTALS:
            torch.testing.assert_close(of_others, left, rtol=1e-14, atol=0)
        else:
            assert torch.equal(of_others, left), (backend, seed)


def renamed(ids, random):
    """Other ids in another order, the largest among them; what is none stays none."""
    names = {int(old): int(random.integers(2**63)) for old in np.unique(ids)}
    names[int(random.choice(ids))] = 2**63 - 1
    return np.array([names[int(old)] if old >= 0 else -int(random.integers(1, 2**63)) for old in ids])


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("name", CASES)
def test_p1_names_of_groups_change_no_bit(native_backends, name):
    for backend, seed in drawn(("reference", *native_backends), name, 8):
        units, random = naive.draw(seed), np.random.default_rng(seed)
        other = {each: renamed(getattr(units, each), random) for each in IDS}
        given = Given(units._replace(**other), backend)
        given.units = units  # rewards that the cases make of ids stay what they are
        assert torch.equal(CASES[name](given), CASES[name](Given(units, backend))), (backend, seed)


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("name", ["gigpo", "hgpo", "hrpo", "salt"])
def test_p1_trajectories_may_be_numbered_inside_their_prompt(native_backends, name):
    for backend, seed in drawn(("reference", *native_backends), name, 8):
        units = naive.draw(seed)
        numbers = np.where(units.group < 0, -1, units.trajectory - units.group.clip(0) * 5)
        given = Given(units._replace(trajectory=numbers), backend)
        given.units = units  # rewards that the cases make of ids stay what they are
        assert torch.equal(CASES[name](given), CASES[name](Given(units, backend))), (backend, seed)


@pytest.mark.parametrize("constant", [0.1, -7.3, 1e6 + 0.5])
def test_p12_identical_rewards_are_exactly_zero(backend, constant):
    n = 24
    t = functools.partial(torch.tensor, device=testing.device_of(backend))
    r, ids = torch.full((n,), constant, device=testing.device_of(backend)), t([i % 3 for i in range(n)])
    other, lengths = t([i % 2 for i in range(n)]), t([1.0 + i % 5 for i in range(n)])
    alone = t(list(range(n)))
    b = {"backend": backend}
    for out in (
        A.opo(r, ids, lengths, **b), A.maxrl(r, ids, **b), A.dgpo(r, ids, **b), A.gpg(r, ids, **b),
        A.m_grpo(r, ids, lengths, **b), A.dvao(torch.stack([r, r]), ids, **b), A.gdpo(torch.stack([r, r]), ids, **b),
        A.stratified(r, ids, other, alpha=0.3, **b), A.treepo(r, [ids, other], **b), A.g2rpo(r, ids, **b),
        A.mc_grpo(r, ids, **b), A.peco(r, ids, other > 0, **b), A.flow_grpo(r, ids, lengths, **b),
        A.dr_mas(r, ids, other, **b), A.gigpo(r, ids, alone, other, **b), A.hgpo(r, ids, alone, other, **b),
        A.reinforce_pp_baseline(r, ids, lengths, **b), A.rose(r, [ids, other], **b),
        A.g2rpo(r[:7], None, backend="reference"),  # whose sum of seven quantiles is not 0
    ):  # fmt: skip
        assert not out.any()


@pytest.mark.usefixtures("at_length")
def test_p14_roles_do_not_touch_each_other(backend):
    """Changing the rewards of one role's units leaves those of the other bit for bit."""
    for seed in seeds(backend):
        units = naive.draw(seed)
        macro = torch.tensor(units.flag)
        changed = units._replace(reward=np.where(units.flag, units.reward, units.reward * 2 + 1))
        before, after = (CASES["himac"](Given(each, backend)) for each in (units, changed))
        assert torch.equal(before[macro], after[macro])
        low = units._replace(number=units.number * 3)
        assert torch.equal(CASES["chrpo"](Given(units, backend))[0], CASES["chrpo"](Given(low, backend))[0])


def test_p15_whitening_tokens_is_whitening_units_by_length(backend):
    batch = PackedBatch.from_lengths([3, 1, 4, 2])
    device = testing.device_of(backend)
    rewards, lengths = torch.tensor([1.0, 0.0, 2.0, 5.0], device=device), torch.tensor([3.0, 1, 4, 2], device=device)
    of_units = A.whiten(rewards, lengths, backend=backend)
    row = batch.row_of_token().to(device)
    of_tokens = A.whiten(rewards[row], torch.ones(10, device=device), backend=backend)
    near(of_tokens, of_units[row], 2)
    wide = A.whiten(rewards, lengths, eps=5.0, backend=backend)  # under the root of the tokens' variance
    of_each = rewards[row].double()
    near(wide, (rewards - of_each.mean()) / (of_each.var() + 5).sqrt(), 2)
    assert abs(float(of_tokens.double().sum())) < 1e-5
    assert float(of_tokens.double().var()) == pytest.approx(1, abs=1e-6)


def test_p16_dropping_zeros_is_a_jump():
    """A negative control: HGPO's rule makes an advantage jump where a step meets its group's mean."""
    prompt, own, anchors = torch.zeros(6, dtype=torch.int64), torch.arange(6) // 2, torch.tensor([0, 1, 0, 1, 2, 1])

    def jump(**options):
        found = []
        for reward in (0.5, 0.501):  # the mean of what else starts from there is .5
            rewards = torch.tensor([0.0, reward, 0.0, 0.0, 0.0, 1.0])
            found.append(A.hgpo(rewards, prompt, own, anchors, history=1, scaled=False, **options)[1].item())
        return abs(found[0] - found[1])

    assert jump() > 0.05 and jump(drop_zeros=False) < 0.01


def test_p16_kalman_style_order_dependence_would_fail_p1():
    """A negative control: an estimator that looks at the order of its units is told apart by P1."""

    def ordered(rewards):
        running = torch.zeros(())
        for reward in rewards:
            running = running + 0.5 * (reward - running)
        return rewards - running

    rewards = torch.tensor([1.0, 0.0, 1.0])
    assert not torch.allclose(ordered(rewards)[[1, 0, 2]], ordered(rewards[[1, 0, 2]]))
    assert torch.allclose(A.grpo(rewards, None)[[1, 0, 2]], A.grpo(rewards[[1, 0, 2]], None))


# ------------------------------------------------------------------------------------------------ what inputs may be


def changed(value, change):
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return change(value)
    return type(value)(changed(each, change) for each in value) if type(value) in (list, tuple) else value


def results(call, change):
    """Floating-point tensors that a call returns, with its floating-point arguments changed."""
    found = call.run({name: changed(value, change) for name, value in call.arguments.items()})
    found = found if isinstance(found, tuple) else (found,)
    return [each for each in found if isinstance(each, torch.Tensor) and each.is_floating_point()]


OF_ADVANTAGES = [
    call
    for call in calls()
    if call.name.startswith("hpo_core.advantages.")
    or (call.name.startswith("hpo_core.entropy.") and getattr(call.function, "level", None))
]


@pytest.mark.parametrize("call", OF_ADVANTAGES, ids=lambda call: call.name.removeprefix("hpo_core."))
def test_inputs_are_constants_in_the_precision_of_kernels(call):
    """Numbers of float64 count as float32 holds them; 16 bits are the numbers they hold, beside a formula's own in
    float32. No gradient flows to an input."""
    plain = results(call, torch.Tensor.float)
    assert bits(*plain) == bits(*results(call, lambda values: values.double() * (1 + 1e-12)))
    if not any(name.endswith("logp") for name in call.arguments):  # these are refused in 16
        assert bits(*plain) == bits(*results(call, torch.Tensor.bfloat16))
    assert not any(each.requires_grad for each in results(call, lambda values: values.float().clone().requires_grad_()))


KEPT = (
    "BetaTracker", "GroupHistory", "WindowState", "ScopeStatistics", "PivotState", "AresPenalty", "AresTargets",
    "Selection", "GateInputs",
)  # fmt: skip


@pytest.mark.parametrize("kind", KEPT)
def test_what_is_kept_has_no_graph(kind):
    """States and inputs of a loss would keep the activations of their step alive, or those of all steps."""
    makers = [call for call in calls() if kind in getattr(call.function, "__annotations__", {}).get("return", "")]
    assert makers
    for call in makers:
        leaves = {name: changed(value, lambda x: x.clone().requires_grad_()) for name, value in call.arguments.items()}
        made = tree_leaves(call.run(leaves))
        assert not any(isinstance(each, torch.Tensor) and each.requires_grad for each in made), call.name


def test_the_best_of_rewards_in_float64_leads():
    """0.9 is no float32: equal to the extremum of its group it is in one precision only."""
    rewards = torch.tensor([0.2, 0.9, 0.5], dtype=torch.float64)
    assert A.grpo_passk(rewards, None).tolist() == A.grpo_passk(rewards.float(), None).tolist() != [0.0] * 3
    equal = torch.full((4,), 0.1, dtype=torch.float64)
    assert A.ngrpo(equal, None, virtual=0, eps=0.0).tolist() == [0.0] * 4
    assert A.ngrpo(equal, None, best=0.1, eps=0.0).tolist() == [0.0] * 4


def test_stratified_hands_its_options_to_both_terms():
    rewards, ids = torch.tensor([1.0, 0, 0, 1, 1, 0]), torch.zeros(6, dtype=torch.int64)
    strata = torch.tensor([0, 0, 0, 1, 1, 1])
    for options in ({"ddof": 0}, {"eps": 0.5}):
        for alpha, groups in ((0.0, ids), (1.0, strata)):
            found = A.stratified(rewards, ids, strata, alpha=alpha, **options)
            torch.testing.assert_close(found, A.grpo(rewards, groups, **options))


def test_a_unit_outside_the_statistics_is_as_if_absent():
    """The first group has equal rewards without its third unit."""
    rewards, ids = torch.tensor([1.0, 1, 0, 1, 0, 0]), torch.tensor([0, 0, 0, 1, 1, 1])
    mask, lengths = torch.arange(6) != 2, torch.tensor([3.0, 2, 7, 1, 5, 4])
    for estimator, options in ((A.gpg, {}), (A.dgpo, {"accuracy": rewards}), (A.dgpo, {"lengths": lengths})):
        found = estimator(rewards, ids, mask=mask, **options)[mask]
        without = {name: each[mask] for name, each in options.items()}
        torch.testing.assert_close(found, estimator(rewards[mask], ids[mask], **without))


def test_opo_gives_others_no_advantage():
    rewards, lengths, mask = torch.tensor([1.0, 0, 1]), torch.tensor([1.0, 2, 3]), torch.tensor([True, False, True])
    found = A.opo(rewards, None, lengths, apply_mask=mask)
    assert torch.equal(found, torch.where(mask, A.opo(rewards, None, lengths), 0.0)) and found[0] != 0


def test_a_leaf_below_no_node_is_not_whitened_with_the_others():
    root, leaf = torch.zeros(4, dtype=torch.int64), torch.tensor([0, 0, 1, -1])
    rewards, lengths = torch.tensor([1.0, 0, 1, 1]), torch.tensor([[3.0, 2, 7, 9], [1, 5, 4, 9]])
    without = lengths * torch.tensor([1.0, 1, 1, 0])
    found, expected = (A.treepo_segments(rewards, [root, leaf], each) for each in (lengths, without))
    torch.testing.assert_close(found, expected)
    assert not found[:, 3].any()
