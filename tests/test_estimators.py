"""Every estimator against loops over dictionaries, the numbers that it refuses, and what the families promise."""

import functools
import importlib
import inspect
import math
import re
from pathlib import Path

import naive_estimators as naive
import naive_hierarchies as hierarchies
import pytest
import torch
from breadth import at_length, is_interpreted, number  # noqa: F401 (the first is a fixture)
from by_hand import close, on
from estimators import CASES, COMPOSED, PATHS, Given, several
from valid_calls import calls, tensors_of

import hpo_core as hpo
from hpo_core import advantages, gates
from hpo_core.advantages import Provenance, reconstructed
from hpo_core.testing.budget import UNIT

A, R = advantages, reconstructed
LOOPS = {**vars(naive), **vars(hierarchies)}


def batches_of(backend, name):
    """Twelve are one with each kind of rewards, of masks and of ids; four one with each kind of rewards."""
    most, interpreted = 24 if is_interpreted(backend) else 300, 4 if name in PATHS else 1
    every, emulated = (4, 1) if name in COMPOSED else (12, 12)
    return number(backend, at_length=most, machine_code=every, emulated=emulated, interpreted=interpreted)


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("name", CASES)
def test_every_estimator_is_its_loop(native_backends, name):
    """The reference in float64, but for the logarithms of pass_at_k's binomials; kernels in float32."""
    backends = {backend: batches_of(backend, name) for backend in ("reference", *native_backends)}
    for seed in range(max(backends.values())):
        units = naive.draw(seed)
        expected = torch.tensor(LOOPS[name](units))
        for backend in (backend for backend, batches in backends.items() if seed < batches):
            got = CASES[name](Given(units, backend)).cpu().double()
            assert got.shape == expected.shape, backend
            near = 32 * UNIT if backend != "reference" else 1e-7 if name == "pass_at_k" else 2e-9
            limit = near * max(1.0, float(expected.abs().max()))
            assert float((got - expected).abs().max()) <= limit, (backend, seed, got, expected)


def which_exist(argument):
    return tuple(map(which_exist, argument)) if isinstance(argument, tuple) else argument is not None


def test_paths_start_every_kernel_with_every_structure(native_backends, monkeypatch):
    """Nothing else specialises a kernel: constants of its compilation, and which optional tensors exist."""
    if "triton" not in native_backends:
        pytest.skip("needs Triton")
    launch, started = importlib.import_module("hpo_core._triton.launch").launch, {name: set() for name in CASES}
    for name, case in CASES.items():

        def watched(kernel, programs, *arguments, into=started[name], **structure):
            into.add((kernel.fn.__name__, which_exist(arguments), *structure.items()))
            launch(kernel, programs, *arguments, **structure)

        for module in ("advantages", "groups", "segments"):
            monkeypatch.setattr(importlib.import_module(f"hpo_core._triton.{module}"), "launch", watched)
        case(Given(naive.draw(1), "triton"))
    assert set().union(*(started[name] for name in PATHS)) == set().union(*started.values())


def far_from_0():
    """Rewards of 10,000 and more in steps of 1/16; the trajectories of a prompt have equally many steps."""
    random, unit = torch.Generator().manual_seed(3), torch.arange(24)
    reward, number = (torch.randint(0, 32, (24,), generator=random).double() / 16 for _ in range(2))
    flag = torch.rand(24, generator=random) < 0.6
    ids = (unit // 4 % 3, unit % 2, 1.0 + unit, number / 3, flag, unit // 4, unit % 4)
    return naive.Units(*(each.numpy() for each in (reward + 1e4, unit // 12, unit >= 0, *ids)))


def rows_of_four(g):
    return hpo.PackedBatch.from_lengths([4] * 6).to(g.reward.device)


def outcomes_and_penalties(g):
    """The reward of the last token of each four, and a small one at the others."""
    return torch.where(torch.arange(24, device=g.reward.device) % 4 == 3, g.reward, -g.number / 64)


# The estimators that put rewards, returns or values together before they compare them.
FAR_FROM_0 = {
    **{name: CASES[name] for name in ("sgrpo_reward_sum", "sgrpo_hierarchical_sum", "mars2", "hila", "gigpo")},
    **{name: CASES[name] for name in ("hgpo_code", "craft_gui", "datarus", "hc_grpo", "hi_grpo", "step_gae")},
    "spo_single_stream": CASES["spo_single_stream"],
    "hi_agent": lambda g: R.hi_agent(g.number, g.reward, g.number, g.group, backend=g.backend),
    "icpo": lambda g: A.icpo(g.reward, g.group, g.flag, progress=0.3, backend=g.backend),
    "tool_star": lambda g: A.tool_star(g.reward, g.reward > 0, g.flag, g.group, backend=g.backend),
    "unidoc_rl": lambda g: A.unidoc_rl(g.reward, *[g.number] * 3, 1 + 0 * g.reward, g.group, backend=g.backend),
    "vpo": lambda g: A.vpo(g.reward.view(6, 2, 2), None, g.number[:6].view(3, 2), backend=g.backend),
    "gdpo": lambda g: A.gdpo(several(g), torch.arange(24), [0.3, 0.7], singleton="raw", backend=g.backend),
    "hiper": lambda g: torch.stack(A.hiper(
        g.reward - 1e4, g.trajectory, g.flag, g.reward.roll(3), g.reward.roll(5), switch_values=g.reward,
        backend=g.backend,
    )),
    "critic": lambda g: A.step_gae(g.reward - 1e4, g.reward.roll(3), g.trajectory, gamma=0.99, backend=g.backend),
    "token_gae": lambda g: A.token_gae(
        g.reward - 1e4, g.reward.roll(3), rows_of_four(g), gamma=0.99, backend=g.backend,
    ),
    "reinforce_pp": lambda g: A.reinforce_pp(outcomes_and_penalties(g), rows_of_four(g), backend=g.backend),
    "otb": lambda g: A.otb(
        outcomes_and_penalties(g), None, rows_of_four(g), g.reward / 1e5, g.reward / 1e5, backend=g.backend,
    ),
}  # fmt: skip


def test_an_offset_of_rewards_costs_no_digits(native_backends):
    """Rewards that are put together, and their returns, keep what tells members of a group apart."""
    units = far_from_0()
    for name, case in FAR_FROM_0.items():
        expected, got = (case(Given(units, backend)).cpu().double() for backend in ("reference", native_backends[0]))
        assert float((got - expected).abs().max()) <= 32 * UNIT * max(1.0, float(expected.abs().max())), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_advantages_are_float32_whatever_rewards_are(native_backends, dtype):
    for name, case in CASES.items():
        given = Given(naive.draw(1), native_backends[0])
        for field in ("reward", "number", "length"):
            setattr(given, field, getattr(given, field).to(dtype))
        given.steps = (given.reward, *given.steps[1:])
        assert case(given).dtype == torch.float32, name


# The numbers of the authors' code, run at the commits that docs/advantages_evidence.md names.


@pytest.mark.parametrize("discount", [-0.1, 1.5, math.nan, math.inf])
def test_a_discount_is_a_number_between_0_and_1(discount):
    ones, ids = torch.ones(2), torch.zeros(2, dtype=torch.int64)
    batch = hpo.PackedBatch.from_lengths([2])
    for name, call in (
        ("gamma", functools.partial(A.discounted_returns, ones, ids)),
        ("gamma", functools.partial(A.gigpo, ones, ids, ids, ids)),
        ("gamma", functools.partial(A.hgpo, ones, ids, ids, ids)),
        ("lam", functools.partial(A.step_gae, ones, ones, ids)),
        ("high_lam", functools.partial(A.hiper, ones, ids, ones > 0, ones, ones)),
        ("low_lam", functools.partial(A.hiper, ones, ids, ones > 0, ones, ones)),
        ("gamma", functools.partial(A.reinforce_pp, ones, batch)),
        ("lam", functools.partial(A.t_ppo, ones, ones, batch, ones[:1] > 0)),
        ("lam", functools.partial(A.token_gae, ones, ones, batch)),
        ("gamma", functools.partial(A.vapo, ones, ones, batch)),
    ):
        expected = "a number, got nan" if math.isnan(discount) else rf"a number in \[0, 1\], got {discount}"
        with pytest.raises(ValueError, match=f"^{name}: expected {expected}"):
            call(**{name: discount})


@pytest.mark.parametrize("eps", [-1e-6, math.nan, math.inf])
def test_eps_is_finite_and_not_negative(eps):
    rewards, ids = torch.tensor([1.0, 0.0]), torch.zeros(2, dtype=torch.int64)
    for estimator in (
        functools.partial(A.grpo, rewards, None), functools.partial(A.ngrpo, rewards, None),
        functools.partial(A.mc_grpo, rewards, None), functools.partial(A.pass_at_k, rewards > 0, None, 1),
        functools.partial(R.graph_grpo, rewards, ids, ids, ids), functools.partial(A.whiten, rewards),
        functools.partial(A.grpo_leave_one_out, rewards, None),
    ):  # fmt: skip
        expected = "a number, got nan" if math.isnan(eps) else f"a finite number >= 0, got {eps}"
        with pytest.raises(ValueError, match=f"^eps: expected {expected}"):
            estimator(eps=eps)
    assert A.mc_grpo(torch.tensor([1.0, 1, 0]), None, eps=0.0).tolist() == [0, 0, 0]


def test_ddof_reaches_the_advantages_of_every_estimator_that_takes_one():
    found = [call for call in calls() if call.name.startswith("hpo_core.advantages") and "ddof" in call.names()]
    for call in found:
        one, other = (tensors_of(call.run({**call.arguments, "ddof": ddof})) for ddof in (0, 1))
        assert not all(map(torch.equal, one, other)), call.name
    assert len(found) > 10


def test_eps_reaches_the_advantages_of_every_estimator_that_takes_one():
    several = {"rewards": torch.tensor([0.0, 1, 5, 2, 0, 7, 1, 3]), "graph_ids": torch.arange(8)}
    found = [call for call in calls() if call.name.startswith("hpo_core.advantages") and "eps" in call.names()]
    for call in found:
        options = {"scaled": True} if "scaled" in call.names() else {}
        if call.name.endswith(("spo_single_stream", "graph_grpo")):  # those of equal rewards and values are 0
            options = {name: value for name, value in several.items() if name in call.arguments}
        one, other = (tensors_of(call.run({**call.arguments, **options, "eps": eps})) for eps in (0.0625, 0.5))
        assert not all(map(torch.equal, one, other)), call.name
    assert len(found) > 30


def test_real_by_hand(backend):
    """e^z is 1/2 and 1 among the right, 1 and 4 among the wrong; one label or no drift teaches nothing."""
    t, b = on(backend)
    right, ids = t(True, True, False, False, True, True, False, True), t(5, 5, 5, 5, 7, 7, 5, -1)
    drift = t(math.log(2), 0.0, 0.0, math.log(4), 1.0, -1.0, math.nan, 0.0)
    expected = [4 * 0.2, 4 * 0.4, -4 / 6, -4 * 4 / 6, 0, 0, 0, 0]
    close(A.real(right, ids, drift, temperature=1.0, **b), expected)
    close(A.real(right[:4], None, drift[:4] * 1e4, temperature=1.0, **b), [0, 2, 0, -4])
    close(A.real(right[:4], None, drift[:4], temperature=1.0, mask=t(True, False, True, False), **b), [2 / 3, 0, -1, 0])


def test_numbers_and_sizes_that_say_nothing_are_refused_by_name():
    rewards = torch.tensor([1.0, 0.0])
    tracker = A.BetaTracker.start(rewards, 1)
    update = functools.partial(tracker.updated, rewards, torch.tensor([0, 1]), rewards)
    ids = [torch.zeros(2).long()] * 2
    for call, message in (
        (lambda: A.ngrpo(rewards, None, best=math.inf), r"best: expected a finite number that float32 .*, got inf"),
        (lambda: A.treepo(rewards, []), r"prefix_ids: expected 1 to 8 depths, got 0"),
        (lambda: A.treepo(rewards, [torch.zeros(2).long()] * 9), r"prefix_ids: expected 1 to 8 depths, got 9"),
        (lambda: A.rose(rewards, []), r"prefix_ids: expected at least one depth, got none"),
        (lambda: A.gdpo(torch.zeros(9, 2), None), r"^rewards: expected at most 8 rewards, got 9"),
        (lambda: A.vpo(torch.zeros(2, 0, 1), None, torch.ones(1, 1)), r"rewards: expected sets of at least one cand"),
        (lambda: A.vpo(torch.zeros(2, 1, 1), None, torch.ones(0, 1)), r"directions: .*at least one"),
        (lambda: A.hgpo(rewards, *[torch.zeros(2).long()] * 3, alpha=800.0), r"alpha: .* weight 3\^alpha .* got 800"),
        (lambda: update(half_life=0.0), r"half_life: expected a number above 0, got 0"),
        (lambda: update(least_memory=-0.5), r"least_memory: expected a number in \[0, 1\], got -0.5"),
        (lambda: update(most_memory=1.5), r"most_memory: expected a number in \[0, 1\], got 1.5"),
        (lambda: update(most_memory=0.5), r"least_memory: expected at most 0.5 \(most_memory\), got 0.875"),
        (lambda: A.sgrpo(rewards, rewards, *ids, group_weight=50), r"^group_weight: expected .*, got 50"),
        (lambda: A.sgrpo_reward_sum(rewards, rewards, ids[0], group_weight=-1), r"^group_weight: expected .*, got -1"),
        (lambda: A.sgrpo_hierarchical_sum(rewards, rewards, *ids, group_weight=2), r"^group_weight: .*, got 2"),
        (lambda: A.hbpo(rewards, rewards > 0, rewards, ids[0], longest=0.0), r"^longest: .* above 0, got 0.0"),
        (lambda: A.hbpo(rewards, rewards > 0, rewards, ids[0], beta=math.inf), r"^beta: expected a finite .* inf"),
        (
            lambda: A.icpo(rewards, None, rewards > 0, progress=0, bonus=math.inf),
            r"^bonus: .* finite number .*, got inf",
        ),
        (lambda: A.pkpo(rewards, None, 1), r"^k: expected a count of at least 2, got 1; the best of one is dr_grpo"),
        (lambda: A.qae(rewards, None, quantile=40), r"^quantile: expected a share in \[0, 1\], got 40"),
        (lambda: A.hila(rewards, rewards > 0, rewards > 1, None, defer_cost=math.inf), r"^defer_cost: .* got inf"),
        (lambda: A.tool_star(rewards, rewards > 0, rewards > 0, None, bonus=math.inf), r"^bonus: .* got inf"),
        (lambda: A.unidoc_rl(*[rewards] * 5, None, answer_weight=math.inf), r"^answer_weight: .* got inf"),
        (lambda: A.mars2(rewards, ids[0] - 1, ids[0], shaping=math.inf), r"^shaping: .* got inf"),
        (lambda: A.adora(rewards, None, rewards, rewards > 0, damping=math.inf), r"^damping: .* got inf"),
        (lambda: A.copo(rewards, None, ids[0], rewards > 0, rewards, variants=0), r"^variants: .* at least 1, got 0"),
        (lambda: A.copo(rewards, None, ids[0], rewards > 0, rewards, sharpness=-1), r"^sharpness: .* >= 0, got -1"),
        (lambda: A.grpo_lead(rewards, None, steepness=math.inf), r"^steepness: expected a finite .*, got inf"),
        (lambda: A.rae(rewards, ids[0], rewards, decay=1.5), r"^decay: expected a number in \[0, 1\], got 1.5"),
        (lambda: A.vapo(rewards, rewards, hpo.PackedBatch.from_lengths([2]), alpha=0), r"^alpha: .* above 0, got 0"),
        (lambda: A.real(rewards > 0, None, rewards, temperature=0), r"^temperature: .* > 0, got 0"),
        (lambda: R.hi_agent(*[rewards] * 3, None, weights=(1.0, math.inf, 1.0)), r"^weights\[1\]: .* got inf"),
        (lambda: R.hi_grpo(torch.stack([rewards] * 2), None, carry=math.inf), r"^carry: .* got inf"),
        (lambda: A.thor(rewards, ids[0], rewards > 0, ids[0], step_weight=math.inf), r"^step_weight: .* got inf"),
        (lambda: A.treepo_segments(rewards, ids, decay=math.inf), r"^decay: .* power 2 float32 holds, got inf"),
        (lambda: A.treepo_segments(rewards, ids, decay=-1e20), r"^decay: .* power 2 float32 holds, got -1e\+20"),
        (lambda: A.hiper_rewards(rewards, ids[0], rewards > 0, keep_penalty=-math.inf), r"^keep_penalty: .* got -inf"),
        (lambda: A.hiper_rewards(rewards, ids[0], rewards > 0, change_penalty=1e39), r"^change_penalty: .* got 1e\+39"),
        (lambda: A.aspo_shaping(*[rewards, None, rewards, rewards], rewards > 0, slope=-math.inf), r"^slope: .* -inf"),
        (lambda: A.hgpo(rewards, *ids, ids[0], alpha=-math.inf), r"^alpha: expected a finite number .*, got -inf"),
        (lambda: A.dvao(torch.zeros(2, 2), None, (1.0, math.inf)), r"^weights\[1\]: expected a finite .*, got inf"),
        (lambda: A.gdpo(torch.zeros(2, 2), None, (1e39, 1.0)), r"^weights\[0\]: expected a finite .*, got 1e\+39"),
        (lambda: A.negative_sample(rewards > 0, positive_weight=-1), r"^positive_weight: .* >= 0, got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def functions(module):
    return {name: each for name in module.__all__ if hasattr(each := getattr(module, name), "provenance")}


def test_every_estimator_says_where_it_comes_from():
    for module, allowed in (
        (advantages, {Provenance.VERIFIED, Provenance.PAPER}),
        (reconstructed, {Provenance.RECONSTRUCTED}),
    ):
        assert len(functions(module)) > 7
        for name, function in functions(module).items():
            assert function.provenance in allowed, name
            assert function.level in ("row", "step", "token", "selection"), name
            assert (">>> " in inspect.getdoc(function) and "Returns" in inspect.getdoc(function)) or name == "hiper", (
                name
            )


# The arguments that one call of a drawn batch lacks: histories of prompts, places of other rollouts, sets of rewards.
ELSEWHERE = {"archer_td", "dcpo", "de_grpo", "dynamic_contrastive", "ib_tpo", "negative_sample"}
ELSEWHERE |= {"poise", "positive_sample", "rae", "vpo"}


def test_every_estimator_of_rows_and_steps_has_a_case():
    made = {**functions(advantages), **functions(reconstructed)}
    of_units = {name for name, function in made.items() if function.level in ("row", "step")}
    tried = {name for case in CASES.values() for name in case.__code__.co_names}
    assert of_units - tried == ELSEWHERE, "a new one has a loop in naive_estimators.py and a call in estimators.py"


def test_the_pages_say_the_same_and_what_was_run():
    docs = Path(__file__).parents[1] / "docs"
    rows, tokens, rest = ((docs / f"advantages{name}.md").read_text() for name in ("", "_tokens", "_evidence"))
    said = {}
    for cells in (line.strip("| ").split(" | ") for line in (rows + tokens).splitlines() if line.startswith("| `")):
        said |= dict.fromkeys(re.findall(r"`(\w+)`", cells[0]), cells[-1])
    ran = set(re.findall(r"`(\w+)", rest.partition("\n\nDefects found")[0]))
    for name, function in functions(advantages).items():
        if function.level != "selection":
            assert said.pop(name, None) == function.provenance.name.lower(), f"{name} in the table of its page"
        assert (function.provenance is Provenance.VERIFIED) == (name in ran), f"{name} in advantages_evidence.md"
    assert not said


def test_a_name_belongs_to_one_family():
    """A published name is a gate, an estimator or a window, never two of them."""
    found = [*functions(advantages), *functions(reconstructed)]
    found += [name for name in gates.__all__ if callable(getattr(gates, name)) and name.islower()]
    found += [name for name in hpo.entropy.__all__ if callable(getattr(hpo.entropy, name)) and name.islower()]
    assert len(found) == len(set(found)), sorted(name for name in found if found.count(name) > 1)
    assert {"spo", "aspo"} <= set(found) and {"spo_single_stream", "aspo_shaping"} <= set(found)
