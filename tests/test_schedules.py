"""Methods that depend on the course of training, on budgets and on draws: worked numbers, and loops over
dictionaries."""

import functools
import itertools
import math
from types import SimpleNamespace

import paper_formulas as paper
import pytest
import torch
from catalogue import Example

import hpo_core as hpo
from hpo_core import advantages, gates, testing
from hpo_core.advantages import reconstructed

LENGTHS = (5, 0, 9, 1, 16, 33, 3)


def on(backend):
    def tensor(*numbers):
        return torch.tensor(numbers, device=testing.device_of(backend))

    return tensor, {"backend": backend}


def close(got, wanted):
    assert got.tolist() == pytest.approx(wanted, abs=2e-6)


# ------------------------------------------------------------------------------------------------------ worked numbers


def test_unidoc_rl_by_hand(backend):
    """Rewards .85, .35, .15 and 0: mean .3375, deviation .370529. The last form closes everything."""
    t, b = on(backend)
    channels = [t(1.0, 0, 1, 1), t(0.5, 1, 0, 1), t(1.0, 1, 0, 1), t(0.0, 0.5, 1, 1), t(1.0, 1, 0.5, 0)]
    wanted = [1.383153, 0.033736, -0.506032, -0.910857]
    close(advantages.unidoc_rl(*channels, None, **b), wanted)
    for channel in channels:
        channel[3], kept = math.nan, channel[3].clone()
        lacking = advantages.unidoc_rl(*channels, None, **b)
        channel[3] = kept
        close(lacking, [1.109397, -0.277349, -0.832048, 0.0])  # .85, .35 and .15, whose mean is .45


def test_icpo_by_hand(backend):
    """1, 0 and 1.75 where the fourth is rejected; with a 0 where it is not."""
    t, b = on(backend)
    run = functools.partial(advantages.icpo, t(1.0, 0, 1, 0), None, t(False, False, True, True), **b)
    close(run(progress=0.25), [0.094916, -1.044073, 0.949157, 0.0])
    close(run(progress=0.25, rejected=False), [0.367275, -0.808007, 1.248739, -0.808007])
    close(run(progress=1.0), [*advantages.grpo(t(1.0, 0, 1), None, **b).tolist(), 0.0])
    close(run(progress=0.0, bonus=0.5), run(progress=0.5).tolist())
    own = advantages.icpo(t(1.0, 0, 1, 0), None, t(*[False] * 4), progress=0.0, **b)
    assert torch.equal(own, advantages.grpo(t(1.0, 0, 1, 0), None, **b))


def test_craft_gui_by_hand(backend):
    """Rewards 1, 2 and -1, of mean 2/3 and deviation 1.527525; then 1 and 1.5."""
    t, b = on(backend)
    got = reconstructed.craft_gui(t(1.0, 1, 0), t(0.0, 2, -2), None, judge_weight=0.5, **b)
    close(got, [0.218218, 0.872871, -1.091089])
    lacking = reconstructed.craft_gui(t(1.0, 1, math.nan), t(0.0, 1, 1), None, judge_weight=0.5, **b)
    close(lacking, [-0.707105, 0.707105, 0.0])


def test_datarus_by_hand(backend):
    """At a third of the way the structure counts three quarters: .75, .875 and .25."""
    t, b = on(backend)
    run = functools.partial(reconstructed.datarus, t(1.0, 1, 0), t(0.0, 0.5, 1), None, **b)
    close(run(progress=0.0), [0.577349, 0.577349, -1.154699])
    close(run(progress=1 / 3), [0.377963, 0.755927, -1.133891])
    close(run(progress=1.0), [-0.999998, 0.0, 0.999998])
    lacking = reconstructed.datarus(t(1.0, 1, math.nan), t(0.0, 0.5, 1), None, progress=1.0, **b)
    assert lacking[2] == 0 and lacking[:2].all()


def test_v05_samples_by_hand(backend):
    """Four right answers: the gains are .0445, .0296, .0054, .0018 and 0 of priors -1, 0, .4, .45 and .5."""
    t, b = on(backend)
    rewards, groups = t(*[1.0] * 20), t(*[k // 4 for k in range(20)])
    prior = t(-1.0, 0, 0.4, 0.45, 0.5).repeat_interleave(4)
    more = reconstructed.v05_samples(rewards, groups, prior, **b)
    assert more[::4].tolist() == [True, True, True, False, False] and torch.equal(more, more[::4].repeat_interleave(4))
    assert reconstructed.v05_samples(rewards, groups, prior, cost=0.001, **b)[::4].tolist() == [True] * 4 + [False]
    assert reconstructed.v05_samples(rewards, groups, prior, cost=0.03, **b)[::4].tolist() == [True] + [False] * 4
    for count, most, cost, wanted in (
        (15, 16, 1 / 256, True), (16, 99, 1 / 256, False), (16, 16, 0.0, False), (16, 99, 0.0, True),
    ):  # fmt: skip
        ones = t(*[1.0] * count)
        got = reconstructed.v05_samples(ones, None, -ones, most=most, cost=cost, **b)
        assert got.tolist() == [wanted] * count, (count, most, cost)


@pytest.mark.parametrize("seed", range(40))
def test_v05_samples_is_the_error_it_saves(seed, backend):
    t, b = on(backend)
    draw = torch.Generator().manual_seed(seed)
    count = int(torch.randint(1, 40, (), generator=draw))
    rewards = torch.randint(0, 2, (count,), generator=draw) * 2.0 - 1
    ids, keep = torch.randint(-1, 4, (count,), generator=draw), torch.rand(count, generator=draw) < 0.8
    prior = torch.rand(5, generator=draw)[ids] * 2 - 1
    rewards[torch.rand(count, generator=draw) < 0.1] = math.nan
    groups, wanted = {}, [False] * count
    for place in range(count):
        if keep[place] and ids[place] >= 0 and not math.isnan(rewards[place]):
            groups.setdefault(int(ids[place]), []).append(place)
    for places in groups.values():
        k, value = len(places), float(prior[places[0]])
        excess = max((sum(float(rewards[place]) for place in places) / k - value) ** 2 - 1 / k, 0.0)

        def error(rollouts, excess=excess):
            weight = excess / (excess + 1 / rollouts)
            return weight**2 / rollouts + (1 - weight) ** 2 * excess

        for place in places:
            wanted[place] = k < 8 and error(k) - error(k + 1) > 0.01
    got = reconstructed.v05_samples(*(each.to(t(0).device) for each in (rewards, ids, prior)), cost=0.01, most=8,
                                    mask=keep.to(t(0).device), **b)  # fmt: skip
    assert got.tolist() == wanted


# --------------------------------------------------------------------------------------------------------------- draws


def rollouts(seed):
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, 9, (40,), generator=draw)
    rewards = torch.randint(0, 2, (40,), generator=draw).float()
    rewards[torch.rand(40, generator=draw) < 0.1] = math.nan
    return rewards, ids, ids % 3 == 0, torch.rand(40, generator=draw) < 0.9


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("external", [0, 1, 3, 99])
def test_swarm_samples_takes_whole_groups(external, flat):
    for seed in range(60):
        rewards, ids, local, keep = rollouts(seed)
        run = functools.partial(advantages.swarm_samples, seed=seed, external=external, flat=flat)
        got = run(rewards, ids, local, mask=keep)
        usable, shared = {}, {}
        for place in range(40):
            if keep[place] and ids[place] >= 0 and not rewards[place].isnan():
                (usable if local[place] else shared).setdefault(int(ids[place]), []).append(place)
        allowed = {key: own for key, own in shared.items() if flat or len(set(rewards[own].tolist())) > 1}
        found = {int(ids[place]) for place in range(40) if got[place] and not local[place]}
        assert len(found) == min(external, len(allowed)) and found <= allowed.keys()
        wanted = [place for own in usable.values() for place in own] + [p for key in found for p in allowed[key]]
        assert sorted(wanted) == got.nonzero().flatten().tolist()
        order = torch.randperm(40, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(run(rewards[order], ids[order], local[order], mask=keep[order]), got[order])


def test_swarm_samples_draws_every_group_alike():
    rewards, ids = torch.tensor([1.0, 0] * 6), torch.arange(12) // 2
    counts = sum(
        advantages.swarm_samples(rewards, ids, ids < 0, seed=seed, external=2)[::2].int() for seed in range(3000)
    )
    assert (counts - 1000).abs().max() < 5 * math.sqrt(3000 * 2 / 9)


def test_the_text_loss_of_ink_grpo_is_drawn():
    draw = functools.partial(gates.ink_grpo_coefficient, coefficient=0.25, probability=0.3)
    drawn = [draw(step, seed=1) for step in range(6000)]
    assert set(drawn) == {0.0, 0.25}
    assert abs(drawn.count(0.25) - 1800) < 4 * math.sqrt(6000 * 0.21)
    assert drawn == [draw(step, seed=1) for step in range(6000)] != [draw(step, seed=2) for step in range(6000)]
    pairs = sum(one == other for one, other in itertools.pairwise(drawn))
    assert abs(pairs - 0.58 * 5999) < 5 * math.sqrt(6000 * 0.25)  # steps are independent
    assert {draw(step, probability=1.0) for step in range(99)} == {0.25}
    assert {draw(step, probability=0.0) for step in range(99)} == {0.0}


# ------------------------------------------------------------------------------------------------- experts in the loss


def test_icpo_in_the_loss(backend):
    """PPO with the dual clip on the rows of the policy, ``-A p / (p + .1)`` on others; the mean is over all tokens."""
    example = Example(1, LENGTHS, spread=0.3, several=False)
    steered = torch.tensor([False, True, True, False, True, False, True])
    row, logp = example.row(), example.logp.clone().requires_grad_()
    weights = hpo.aggregation.token_mean(example.batch)
    run = functools.partial(hpo.policy_loss, backend=backend)
    own = run(
        logp, example.old_logp, example.advantages, example.batch, gates.ppo_clip(ratio_dual=3.0),
        weights=weights * ~steered,
    )  # fmt: skip
    others = run(
        logp, None, example.advantages, example.batch, gates.reinforce(), weights=weights * steered,
        token_weight=gates.icpo_weight(logp),
    )  # fmt: skip
    (own.loss + others.loss).backward()
    leaf, valid = example.logp.double().requires_grad_(), example.covered(gates.reinforce())
    A = example.advantages.double()[row]
    s = SimpleNamespace(l=leaf, old=example.old_logp.double(), A=A)
    p = leaf.exp()
    terms = torch.where(steered[row], A * p / (p + 0.1), paper.ppo_clip(s, dual=3.0))
    (grad,) = torch.autograd.grad(-terms[valid].mean(), leaf)
    torch.testing.assert_close(logp.grad.double(), grad, rtol=2e-6, atol=1e-9)


def test_the_weight_of_a_steered_token():
    logp = torch.tensor([math.log(0.1), 0.0, 1e-6, -torch.inf, math.log(0.4), math.nan])
    weight = gates.icpo_weight(logp.requires_grad_())
    wanted = torch.tensor([0.25, 0.1 / 1.21, 0.1 / 1.21, 0.0, 0.16])
    torch.testing.assert_close(weight[:5], wanted, rtol=2e-6, atol=0)
    assert weight[5].isnan() and not weight.requires_grad
    assert gates.icpo_weight(logp, 0.4)[4].item() == pytest.approx(0.25)


def test_ink_grpo_in_the_loss(backend):
    """A tenth of the mean negative log-probability of the texts' tokens, beside the rollouts."""
    texts = hpo.PackedBatch.from_lengths([2, 5])
    logp = (-torch.rand(7, generator=torch.Generator().manual_seed(0))).requires_grad_()
    weights = 0.1 * hpo.aggregation.token_mean(texts)
    out = hpo.policy_loss(logp, None, torch.ones(2), texts, gates.reinforce(), weights=weights, backend=backend)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(-0.1 * logp.mean().item(), rel=1e-6)
    torch.testing.assert_close(logp.grad, torch.full((7,), -0.1 / 7))
