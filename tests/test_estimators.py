"""Every estimator against loops over dictionaries, its worked numbers, and what the families promise."""

import functools
import importlib
import inspect
import itertools
import math
import re
from fractions import Fraction
from pathlib import Path

import naive_estimators as naive
import naive_hierarchies as hierarchies
import pytest
import torch
from breadth import at_length, is_interpreted, number  # noqa: F401 (the first is a fixture)
from estimators import CASES, COMPOSED, PATHS, Given, several
from valid_calls import calls, tensors_of

import hpo_core as hpo
from hpo_core import advantages, gates, testing
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


# What puts rewards, returns or values together before it compares them.
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
        g.reward - 1e4, g.reward.roll(3), hpo.PackedBatch.from_lengths([4] * 6).to(g.reward.device), gamma=0.99,
        backend=g.backend,
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


# ---------------------------------------------------------------------------------------------------- worked numbers


def close(got, expected, tolerance=1.5e-6):
    got, expected = got.cpu().double(), torch.tensor(expected, dtype=torch.float64)
    assert got.shape == expected.shape
    assert bool(((got - expected).abs() <= tolerance * expected.abs().clamp(min=1)).all()), (got, expected)


def on(backend):
    device = testing.device_of(backend)
    return lambda *values: torch.tensor(values, device=device), {"backend": backend}


def test_w1_flat(backend):
    t, b = on(backend)
    r, ids = t(1.0, 0, 0, 1, 2, 4, 6), t(0, 0, 0, 0, 1, 1, 1)
    lengths = t(3.0, 1, 2, 4, 5, 1, 2)
    close(A.grpo(r, ids, **b), [0.866024, -0.866024, -0.866024, 0.866024, -1, 0, 1])
    close(A.grpo(r, ids, ddof=0, eps=0.0, **b), [1, -1, -1, 1, -1.224745, 0, 1.224745])
    close(A.dr_grpo(r, ids, **b), [0.5, -0.5, -0.5, 0.5, -2, 0, 2])
    close(A.rloo(r, ids, **b), [2 / 3, -2 / 3, -2 / 3, 2 / 3, -3, 0, 3])
    close(A.lite_ppo(r, ids, **b), [0.223607, -0.223607, -0.223607, 0.223607, -0.894427, 0, 0.894427])
    close(
        A.reinforce_pp_baseline(r, ids, lengths, **b),
        [0.547228, -0.210472, -0.210472, 0.547228, -1.347022, 0.168378, 1.683777],
    )
    close(A.opo(r, ids, lengths, **b), [0.3, -0.7, -0.7, 0.3, -1.25, 0.75, 2.75])


def test_w2_gigpo(backend):
    t, b = on(backend)
    given = (t(0.0, 0, 1, 0, 0, 0, 1), t(*[0] * 7), t(0, 0, 0, 1, 1, 2, 2), t(0, 1, 2, 0, 3, 0, 1))
    close(A.discounted_returns(given[0], given[2], 0.95, **b), [0.9025, 0.95, 1, 0, 0, 0.95, 1])
    for options, expected in (
        ({}, [1.109762, -0.129738, 0.577349, -2.308260, -1.154699, 1.198498, 1.284436]),
        ({"compat": "code"}, [1.117952, -0.121548, 0.585539, -2.617408, -1.463847, 1.206687, 1.292626]),
        ({"scaled": False}, [0.618333, 0.308333, 0.333333, -1.284167, -0.666667, 0.665833, 0.358333]),
        ({"scaled": False, "compat": "code"}, [0.570714, 0.260714, 0.285714, -1.331786, -0.714286, 0.618214, 0.310714]),
    ):
        close(A.gigpo(*given, **options, **b), expected, 4e-6)
    alone = (t(0.0, 2, 3), t(0, 0, 1), t(0, 0, 1), t(1, 2, 1))
    for compat, kept in (("paper", [2, 2, 3]), ("code", [0, 0, 3])):  # the code counts steps, not trajectories
        close(A.gigpo(*alone, compat=compat, singleton="raw", scaled=False, **b), kept)


def test_w3_hgpo(backend):
    t, b = on(backend)
    rewards = t(0.0, 0, 1, 0, 0, 0, 0, 0, 1, 0, 0, 1)
    given = (rewards, t(*[0] * 12), t(*[i // 3 for i in range(12)]), t(0, 1, 2, 0, 1, 2, 0, 3, 2, 0, 3, 2))
    first = {"code": [0.577349, -1.732046, 0.577349, 0.577349], "paper": [0.577348, -1.732045, 0.577348, 0.577348]}
    last = {
        (0, "code", True): [0.577349, -1.732046, 0.577349, 0.577349],
        (1, "code", True): [0.830938, -1.292817, 0.577349, 0.577349],
        (1, "paper", True): [0.859115, -1.244014, 0.577348, 0.577348],
        (1, "paper", False): [0.859115, -1.244014, 0.192450, 0.192450],
        (2, "code", True): [0.906076, -1.162675, 0.577349, 0.577349],
        (2, "paper", True): [0.929556, -1.122006, 0.577348, 0.577348],
        (2, "paper", False): [0.929556, -1.122006, 0.096225, 0.096225],
    }
    for (history, compat, drop), expected in last.items():
        out = A.hgpo(*given, history=history, compat=compat, drop_zeros=drop, **b)
        close(out[2::3], expected, 2e-6)
        close(out[0::3], first[compat], 2e-6)
    anchors = t(0, 1, 2, 0, 3, 0, 1)
    out = A.hgpo(t(0.0, 0, 1, 0, 0, 0, 1), t(*[0] * 7), t(0, 0, 0, 1, 1, 2, 2), anchors, history=0, compat="code", **b)
    close(out, [0.652069, -0.999960, 0, -1.412817, 0, 0.760748, 0.999960], 4e-6)


def test_w4_himac(backend):
    t, b = on(backend)
    zeros = t(0, 0, 0, 0)
    close(R.himac(t(1.0, 0, 0.5, 0), zeros, zeros == 0, zeros, **b), [1.305580, -0.783348, 0.261116, -0.783348])
    close(R.himac(t(1.0, 0, 1, 1), zeros, zeros == 1, zeros, **b), [0.499999, -1.499997, 0.499999, 0.499999], 4e-6)


def test_w5_hiper(backend):
    t, b = on(backend)
    given = (
        t(0.0, 0.1, 0, 1), t(0, 0, 0, 0), t(True, False, True, False), t(0.3, 0.4, 0.5, 0.7), t(0.35, 9.0, 0.55, 9.0),
    )  # fmt: skip
    out = A.hiper(*given, normalised=False, **b)
    close(out.low, [0.280806, 0.222500, 0.435750, 0.300000])
    close(out.high, [0.584325, 0, 0.4, 0])
    out = A.hiper(*given, **b)
    close(out.low, [-0.370605, -1.116813, 1.612379, -0.124961], 4e-6)
    close(out.high, [1, 0, -1, 0], 2e-6)
    assert out.switch is None
    close(A.hiper(*given, high_lam=1.0, normalised=False, **b).high[:1], [0.602375])  # the return minus V


def test_w6_m_grpo(backend):
    t, b = on(backend)
    close(A.m_grpo(t(1.0, 0.1), None, **b), [1, -1])
    r, c = t(0.9, 0.5, 0.4, 0.1, 0.4, 0.2), t(2.0, 2, 1, 1, 1, 1)
    close(A.m_grpo(r, None, c, **b), [1.520560, 0.046078, -0.322543, -1.428405, -0.322543, -1.059784])
    close(A.m_grpo(r, None, **b), [1.899853, 0.327561, -0.065512, -1.244731, -0.065512, -0.851658])


def test_w7_hbpo(backend):
    t, b = on(backend)
    given = (
        t(400.0, 900, 1000, 1500, 2000, 3000), t(True, True, True, False, True, True),
        t(512.0, 512, 1024, 1024, 2560, 2560), t(0, 0, 0, 0, 0, 0),
    )  # fmt: skip
    close(A.hbpo(*given, **b), [0.784188, 0.621063, -1.083011, -3.458572, -0.531045, -0.979430])
    rewards = t(3.923141, 3.669378, 3.695518, 0, 2.222281, 1.524755)
    inside = A.hbpo(*given, **b) - A.grpo(rewards, given[3], **b)
    close(inside, [-0.126881, -0.126881, -1.847759, -1.847759, -0.348763, -0.348763], 3e-6)
    # A budget above L: R is f2(8192) = -4 within, f2(512) beside it, and 0 beyond both.
    beyond = t(5000.0, 100, 9000), t(True, True, True), t(8192.0, 512, 8192), t(0, 0, 0)
    inter = A.grpo(t(-4.0, 3.923141, 0), beyond[3], **b)
    close(A.hbpo(*beyond, **b), (inter + t(2.0, 0, 2)).tolist(), 3e-6)


def test_w8_w9_several(backend):
    t, b = on(backend)
    close(A.dvao(t([1.0, 0, 1], [0.2, 0.4, 0.9]), None, **b), [0.043528, -1.001134, 0.957606])
    x, ids = t([1.0, 0, 1, 0, 0, 1], [1.0, 1, 0, 0, 1, 1]), t(0, 0, 0, 1, 1, 1)
    close(A.gdpo(x, ids, **b), [0.912799, -0.456399, -0.456399, -1.369198, 0, 1.369198])
    close(A.grpo(x.sum(0), ids, eps=1e-4, **b), [1.154501, -0.577250, -0.577250, -0.999900, 0, 0.999900])
    x, ids = t([1.0, 0, 1, 0.7], [1.0, 1, 0, 0.2]), t(0, 0, 0, 1)  # a group of one: 0, or 0.7 + 0.2
    zero, raw = [1.414214, -0.707107, -0.707107, 0], [0.997221, -0.860622, -0.860622, 0.724024]
    for singleton, expected in ((None, raw), ("raw", raw), ("zero", zero)):
        close(A.gdpo(x, ids, lengths=t(1.0, 1, 1, 1), singleton=singleton, **b), expected, 2e-6)


def test_w10_g2rpo(backend):
    t, b = on(backend)
    close(A.g2rpo(t(0.3, 0.1, 0.3, 0.9, 0.5), None, **b), [-0.262200, -1.281552, -0.262200, 1.281552, 0.524401])
    close(A.g2rpo(t(0.0, 0, 0, 0, 1), None, **b), [-0.32] * 4 + [1.28], 5e-3)
    close(A.g2rpo(t(0.81, 0.81, 0.82, 0.82, 0.83), None, **b), [-0.9, -0.9, 0.26, 0.26, 1.28], 5e-3)


def test_w11_dgpo(backend):
    t, b = on(backend)
    r, ids = t(1.0, 0, 0, 0, 1, 1, 1, 0, 1, 1, 1, 1), t(*[i // 4 for i in range(12)])
    close(A.dgpo(r, ids, **b), [1.999867, *[-0.666622] * 3, *[0.666622] * 3, -1.999867, *[0] * 4])
    close(A.dgpo(r, ids, accuracy=r, **b), [2.248556, *[-0.749519] * 3, *[0.583726] * 3, -1.751177, *[0] * 4])


@pytest.mark.parametrize("offset", [-1e4, 1e4])
def test_dgpo_weighs_groups_by_differences_of_their_accuracies(backend, offset):
    t, b = on(backend)
    r, ids = t(1.0, 0, 0, 0, 1, 1, 1, 0, 1, 1, 1, 1), t(*[i // 4 for i in range(12)])
    near, far = (A.dgpo(r, ids, accuracy=accuracy, **b) for accuracy in (r + 1, r + offset))
    close(far, near.tolist(), 1e-3)
    assert near.any()


def test_w12_sgrpo(backend):
    t, b = on(backend)
    given = (t(1.0, 0, 0.5, 0.5), t(0.8, 0.8, 0.2, 0.2), t(0, 0, 0, 0), t(0, 0, 1, 1))
    close(A.sgrpo(*given, **b), [0.633333, -0.033333, -0.3, -0.3])
    close(A.sgrpo(*given, scaled=True, **b), [1.523237, -0.109356, -0.706940, -0.706940])


def test_w13_spo(backend):
    t, b = on(backend)
    tracker = A.BetaTracker.start(t(3.0), 8)
    close(torch.cat(tracker), [3.111111, 4.888889])
    close(tracker.value, [0.388889])
    close(tracker.updated(t(1.0), t(0), t(1.0)).value, [0.465278])
    memory = [
        tracker.updated(t(0.0), t(0), t(d)).alpha.item() / tracker.alpha.item() for d in (0.0, 0.003, 0.0116, 9.0)
    ]
    close(torch.tensor(memory), [0.96, 0.96, 0.875, 0.875], 2e-4)
    v = t(0.388889, 0.25, 0.9, 0.5)
    close(A.spo_single_stream(t(1.0, 0, 1, 0), v, **b), [1.289325, -0.499001, 0.227867, -1.018192])
    close(A.BetaTracker(v, 1 - v).sampling_weights, [0.537498, 0.483013, 0.35, 0.55])


def test_w14_bnpo(backend):
    t, b = on(backend)
    r = t(1.0, 0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 0)
    up, down = [0.680175, 0.392699, 0.226725], [-0.226725, -0.392699, -0.680175]
    out = A.bnpo(r, t(*[i // 4 for i in range(12)]), **b)
    close(out[[0, 4, 8]], up)
    close(out[[1, 6, 11]], down)
    # Equal means, whatever the order of their rewards: Dr.GRPO's.
    thirds, ids = t(*[1.0, 1, 0, 0, 1, 1] * 3), t(*[i // 3 for i in range(18)])
    for same in (A.bnpo(thirds, ids, **b), A.bnpo(thirds.double(), ids, backend="reference")):
        close(same, (thirds - 2 / 3).tolist())


def test_w15_v05(backend):
    t, b = on(backend)
    r = t(1.0, -1, -1, 1)
    close(A.v05(r, None, t(*[0.5] * 4), **b), [0.5, -1.5, -1.5, 0.5])
    close(A.v05(r, None, t(*[-0.9] * 4), **b), [1.277778, -0.722222, -0.722222, 1.277778])


def test_w16_the_rest(backend):
    t, b = on(backend)
    close(A.pass_at_k(t(*[True] * 2, *[False] * 6), None, 4, **b), [0.522232] * 2 + [-0.174077] * 6)
    close(A.maxrl(t(1.0, 0, 0, 0), None, **b), [2.999988, *[-0.999996] * 3], 4e-6)
    close(A.ngrpo(t(0.0, 0, 0, 0), None, **b), [-0.447213] * 4)
    assert not A.ngrpo(t(1.0, 1, 1, 1), None, **b).any()
    leaves = [t(0, 0, 0, 0), t(0, 0, 1, 1)]
    close(A.treepo(t(1.0, 0, 1, 1), leaves, **b), [0.333333, -0.666667, 0.166667, 0.166667])
    r, lengths, stray = t(1.0, 0, 1, 1, 5), t(5.0, 9, 5, 9, 7), [t(0, 0, 0, 0, -1), t(0, 0, 1, 1, 2)]
    whole = A.treepo(r[:4], [each[:4] for each in stray], lengths[:4], **b)
    close(A.treepo(r, stray, lengths, **b), [*whole.tolist(), 0])  # whitening takes leaves of prompts alone
    trees = t(0, 0, 1, 1, 2)  # the last leaf is alone in its tree
    together = A.tree_grpo(t(1.0, 0, 1, 1, 0), t(*[0] * 5), trees, singleton="raw", **b)
    close(together, [1.437401, -1.802549, 0.730295, 0.730295, -1.095443])
    strata = A.stratified(t(1.0, 0, 1, 1, 0, 0), t(*[0] * 6), t(0, 0, 0, 1, 1, 1), alpha=0.8, **b)
    close(strata, [0.644453, -1.106333, 0.644453, 1.106333, -0.644453, -0.644453])
    tree = (t(0.2, 0.6, 0.8, 0.4), t(-1, -1, 0, 0), t(0, 0, 0, 0))
    close(A.mars2(*tree, **b), [-1.174224, 0.495783, 1.095942, -0.417502])
    branches = [t(0, 0, 0), t(0, 0, 1)]
    rose = A.rose(t(1.0, 0, 1), branches, **b)
    close(rose, [[-1 / 6, -1 / 6, 1 / 3], [0.5, -0.5, 0]])
    for first in (0, 1, 8192):  # ranks may count from any number
        close(A.arena(t(0.0, 1, 2, 3) + first, None, **b), [1.161892, 0.387297, -0.387297, -1.161892])
        close(A.arena(t(0.0, 1, 1, 3) + first, None, **b), [0.993397, 0.198679, 0.198679, -1.390756])  # a round robin
    sets = t([[1.0, 0], [0, 1]], [[0.6, 0.6], [0.5, 0.5]])
    close(A.vpo(sets, None, t([1.0, 0], [0, 1], [0.5, 0.5]), **b), [0.707102, -0.707102], 4e-6)
    aspo = A.aspo_shaping(t(1.0, -1), None, t(200.0, 400), t(1000.0, 1000), t(True, True), **b)
    close(aspo, [1.2, -1.2])
    close(A.mc_grpo(t(1.0, 0, 0, 1, 0), None, **b), [1000, 0, 0, 1000, 0])
    close(R.ib_tpo(*(t(x) for x in (0.5, 0.25, 0.6, 0.5, 0.5, 0.3)), **b), [0.224])
    history = A.GroupHistory(*(torch.tensor([x], dtype=torch.float64) for x in (1, 0.5, 0.25)))
    merged = history.merged(torch.tensor([0]), torch.tensor([0.25]), torch.tensor([0.1875]))
    close(torch.cat(merged), [2, 0.375, 0.234375])


def test_a_star_has_its_value_from_the_rollouts_of_the_reference(backend):
    t, b = on(backend)
    rewards, of_reference = t(1.0, 0, 1, 0, 3, 0.5), t(True, True, False, False, False, False)
    masks = {"mask": of_reference, "apply_mask": ~of_reference}
    out = A.a_star(rewards, t(0, 0, 0, 0, 0, 1), beta=1.0, **masks, **b)
    close(out, [0, 0, 0.379885, -0.620115, 2.379885, 0])  # V is log((e + 1) / 2); no rollout of the reference: 0
    close(A.a_star(rewards, None, beta=1e-3, **b), [x - 2.998208 for x in (1.0, 0, 1, 0, 3, 0.5)])
    close(A.a_star(rewards, None, beta=1e18, **b), [x - 5.5 / 6 for x in (1.0, 0, 1, 0, 3, 0.5)])


def test_asymre_shifts_what_is_compared(backend):
    t, b = on(backend)
    rewards, ids = t(1.0, 0, 0.5, 0.5, 0.75, 2), t(0, 0, 1, 1, 2, -1)
    close(A.asymre(rewards, ids, **b), [0.6, -0.4, 0.1, 0.1, 0, 0])
    close(A.asymre(rewards, ids, shift=0.25, singleton="raw", **b), [0.25, -0.75, -0.25, -0.25, 0.75, 0])
    first = t(True, True, False, False)
    close(A.asymre(t(1.0, 0, 0.5, 3), None, mask=first, apply_mask=~first, **b), [0, 0, 0.1, 2.6])


def test_grpo_leave_one_out_scales_where_the_others_differ(backend):
    t, b = on(backend)
    rewards, ids = t(1.0, 0, 0, 0.1, 0.1, 0.1, 0.7, 2, 5, 3), t(0, 0, 0, 1, 1, 1, 1, 2, 2, 3)
    third = -0.2 / 0.3464102  # of (.1, .1, .7)
    close(
        A.grpo_leave_one_out(rewards, ids, eps=0.0, **b), [1, -0.707107, -0.707107, third, third, third, 0.6, -3, 3, 0]
    )
    close(A.grpo_leave_one_out(rewards, ids, eps=0.5, singleton="raw", **b)[[1, 8, 9]], [-0.414214, 3, 3])
    first = t(True, True, True, False)  # to the last unit all members are others
    judged = A.grpo_leave_one_out(t(1.0, 2, 3, 5), None, mask=first, apply_mask=~first, eps=0.0, **b)
    close(judged, [0, 0, 0, 3])
    assert A.grpo_leave_one_out(t(*[0.1] * 7), None, **b).tolist() == [0.0] * 7


def test_grpo_leave_one_out_knows_others_that_nearly_agree(backend):
    """Without the outlier 13 digits of the group's squares cancel."""
    t, b = on(backend)
    rewards = [0.0, 1e6, 1e6 + 0.0625, 1e6, 1e6 + 0.125]
    expected = []
    for place, reward in enumerate(rewards):
        others = [Fraction(other) for other in rewards[:place] + rewards[place + 1 :]]
        mean = sum(others) / 4
        deviation = math.sqrt(sum((other - mean) ** 2 for other in others) / 3)
        expected.append(float(Fraction(reward) - mean) / deviation)
    for sign in (1.0, -1.0):
        found = A.grpo_leave_one_out(sign * t(*rewards), None, eps=0.0, **b)
        torch.testing.assert_close(found.cpu(), torch.tensor(expected) * sign, rtol=3e-7, atol=0)


# What the authors' code gives, run at the commits that docs/advantages_evidence.md names.


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
        ("gamma", functools.partial(A.reinforce_pp, ones, batch)),
        ("lam", functools.partial(A.t_ppo, ones, ones, batch, ones[:1] > 0)),
        ("lam", functools.partial(A.token_gae, ones, ones, batch)),
        ("gamma", functools.partial(A.vapo, ones, ones, batch)),
    ):
        with pytest.raises(ValueError, match=rf"^{name}: expected a number in \[0, 1\], got {discount}"):
            call(**{name: discount})


@pytest.mark.parametrize("eps", [-1e-6, math.nan, math.inf])
def test_eps_is_finite_and_not_negative(eps):
    rewards, ids = torch.tensor([1.0, 0.0]), torch.zeros(2, dtype=torch.int64)
    for estimator in (
        functools.partial(A.grpo, rewards, None), functools.partial(A.ngrpo, rewards, None),
        functools.partial(A.mc_grpo, rewards, None), functools.partial(A.pass_at_k, rewards > 0, None, 1),
        functools.partial(R.graph_grpo, rewards, ids, ids, ids), functools.partial(A.whiten, rewards),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"^eps: expected a finite number >= 0, got"):
            estimator(eps=eps)
    assert A.mc_grpo(torch.tensor([1.0, 1, 0]), None, eps=0.0).tolist() == [0, 0, 0]


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
        (lambda: A.ngrpo(rewards, None, best=math.nan), r"best: expected a finite number, got nan"),
        (lambda: A.treepo(rewards, []), r"prefix_ids: expected 1 to 8 depths, got 0"),
        (lambda: A.treepo(rewards, [torch.zeros(2).long()] * 9), r"prefix_ids: expected 1 to 8 depths, got 9"),
        (lambda: A.rose(rewards, []), r"prefix_ids: expected at least one depth, got none"),
        (lambda: A.vpo(torch.zeros(2, 0, 1), None, torch.ones(1, 1)), r"rewards: expected sets of at least one cand"),
        (lambda: A.vpo(torch.zeros(2, 1, 1), None, torch.ones(0, 1)), r"directions: .*at least one"),
        (lambda: A.hgpo(rewards, *[torch.zeros(2).long()] * 3, alpha=800.0), r"alpha: .* weight 3\^alpha .* got 800"),
        (lambda: update(half_life=0.0), r"half_life: expected a number above 0, got 0"),
        (lambda: update(least_memory=math.nan), r"least_memory: expected a number in \[0, 1\], got nan"),
        (lambda: update(most_memory=1.5), r"most_memory: expected a number in \[0, 1\], got 1.5"),
        (lambda: update(most_memory=0.5), r"least_memory: expected at most 0.5 \(most_memory\), got 0.875"),
        (lambda: A.sgrpo(rewards, rewards, *ids, group_weight=50), r"^group_weight: expected .*, got 50"),
        (lambda: A.sgrpo_reward_sum(rewards, rewards, ids[0], group_weight=-1), r"^group_weight: expected .*, got -1"),
        (lambda: A.sgrpo_hierarchical_sum(rewards, rewards, *ids, group_weight=2), r"^group_weight: .*, got 2"),
        (lambda: A.hbpo(rewards, rewards > 0, rewards, ids[0], longest=0.0), r"^longest: .* above 0, got 0.0"),
        (lambda: A.hbpo(rewards, rewards > 0, rewards, ids[0], beta=math.nan), r"^beta: expected a finite .* nan"),
        (lambda: A.icpo(rewards, None, rewards > 0, progress=0, bonus=math.nan), r"^bonus: .* finite number, got nan"),
        (lambda: A.hila(rewards, rewards > 0, rewards > 1, None, defer_cost=math.nan), r"^defer_cost: .* got nan"),
        (lambda: A.tool_star(rewards, rewards > 0, rewards > 0, None, bonus=math.inf), r"^bonus: .* got inf"),
        (lambda: A.unidoc_rl(*[rewards] * 5, None, answer_weight=math.nan), r"^answer_weight: .* got nan"),
        (lambda: A.mars2(rewards, ids[0] - 1, ids[0], shaping=math.nan), r"^shaping: .* got nan"),
        (lambda: A.adora(rewards, None, rewards, rewards > 0, damping=math.nan), r"^damping: .* got nan"),
        (lambda: A.rae(rewards, ids[0], rewards, decay=1.5), r"^decay: expected a number in \[0, 1\], got 1.5"),
        (lambda: A.vapo(rewards, rewards, hpo.PackedBatch.from_lengths([2]), alpha=0), r"^alpha: .* above 0, got 0"),
        (lambda: A.real(rewards > 0, None, rewards, temperature=0), r"^temperature: .* > 0, got 0"),
        (lambda: R.hi_agent(*[rewards] * 3, None, weights=(1.0, math.nan, 1.0)), r"^weights\[1\]: .* got nan"),
        (lambda: R.hi_grpo(torch.stack([rewards] * 2), None, carry=math.nan), r"^carry: .* got nan"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


# ------------------------------------------------------------------------------------------ no score, and no group


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


@pytest.mark.parametrize("beyond", [5, 2**40, 2**63 - 1])
def test_a_parent_beyond_the_nodes_is_an_error_that_the_loss_counts(backend, beyond):
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


# ---------------------------------------------------------------------------------------------------------- families


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


def test_the_pages_say_the_same_and_what_was_run():
    docs = Path(__file__).parents[1] / "docs"
    table, rest = ((docs / name).read_text() for name in ("advantages.md", "advantages_evidence.md"))
    said = {}
    for cells in (line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")):
        said |= dict.fromkeys(re.findall(r"`(\w+)`", cells[0]), cells[-1])
    ran = set(re.findall(r"`(\w+)", rest.partition("\n\nWhat was found")[0]))
    for name, function in functions(advantages).items():
        if function.level != "selection":
            assert said.pop(name) == function.provenance.name.lower(), name
        assert (function.provenance is Provenance.VERIFIED) == (name in ran), name
    assert not said


def test_a_name_belongs_to_one_family():
    """A published name is a gate, an estimator or a window, never two of them."""
    found = [*functions(advantages), *functions(reconstructed)]
    found += [name for name in gates.__all__ if callable(getattr(gates, name)) and name.islower()]
    found += [name for name in hpo.entropy.__all__ if callable(getattr(hpo.entropy, name)) and name.islower()]
    assert len(found) == len(set(found)), sorted(name for name in found if found.count(name) > 1)
    assert {"spo", "aspo"} <= set(found) and {"spo_single_stream", "aspo_shaping"} <= set(found)
