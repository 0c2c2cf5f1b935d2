"""Estimators of advantages: worked numbers."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from by_hand import close, on

import hpo_core as hpo
from hpo_core import advantages
from hpo_core.advantages import reconstructed

A, R = advantages, reconstructed


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
    # Far below its budget a response has f1(100, 512) in the code, which is less than f2(512).
    short, least, most = t(100.0, 400), 4 * math.cos(3.1416 * 100 / 8192) - 412 / 4096, 4 * math.cos(0.3927 / 2)
    inter = A.grpo(t(least, most), beyond[3][:2], **b)
    expected = (inter + least - most).tolist()
    close(A.hbpo(short, t(True, True), t(512.0, 512), beyond[3][:2], compat="code", **b), expected, 3e-6)


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


def test_dgpo_takes_accuracies_of_any_size(backend):
    """The hardest group takes all: as float32 it was harder than itself, by more than an exponential holds."""
    t, b = on(backend)
    rewards, ids = t(1.0, 0, 1, 0, 1, 0), t(0, 0, 1, 1, 2, 2)
    accuracy = t(1e30, 3e29, 7e29, 1.1e30, 9e29, 1e30)
    close(A.dgpo(rewards, ids, accuracy=accuracy, eps=0.0, **b), [3, -3, 0, 0, 0, 0])


def test_w12_sgrpo(backend):
    t, b = on(backend)
    given = (t(1.0, 0, 0.5, 0.5), t(0.8, 0.8, 0.2, 0.2), t(0, 0, 0, 0), t(0, 0, 1, 1))
    close(A.sgrpo(*given, **b), [0.633333, -0.033333, -0.3, -0.3])
    close(A.sgrpo(*given, scaled=True, **b), [1.523237, -0.109356, -0.706940, -0.706940])
    opposite = (t(1.0, 0), t(0.0, 1), t(0, 0), t(0, 1))  # both parts differ, their sum does not: there is no scale
    assert A.sgrpo_hierarchical_sum(*opposite, scaled=True, eps=0.0, **b).tolist() == [0, 0]


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
    # In float32 the means of equal decimals are 1e-9 apart.
    tenths, fours = t(0.1, 0.3, 0.3, 0.1, 0.3, 0.2, 0.2, 0.1), t(0, 0, 0, 0, 1, 1, 1, 1)
    close(A.bnpo(tenths, fours, **b), [-0.1, 0.1, 0.1, -0.1, 0.1, 0, 0, -0.1])


def test_w15_v05(backend):
    t, b = on(backend)
    r = t(1.0, -1, -1, 1)
    close(A.v05(r, None, t(*[0.5] * 4), **b), [0.5, -1.5, -1.5, 0.5])
    close(A.v05(r, None, t(*[-0.9] * 4), **b), [1.277778, -0.722222, -0.722222, 1.277778])


def test_w16_the_rest(backend):
    t, b = on(backend)
    close(A.pass_at_k(t(*[True] * 2, *[False] * 6), None, 4, **b), [0.522232] * 2 + [-0.174077] * 6)
    close(A.pkpo(t(0.0, 1, 0.5, 0), None, 2, **b), [0, 2.5 / 6, 1 / 6, 0])
    close(A.pkpo(t(0.0, 1, 0.5, 0), None, 4, **b), [0, 0.5, 0, 0])
    close(A.qae(t(1.0, 5, 0, 2, 1), None, **b), [0, 2.324953, -0.581238, 0.581238, 0], 3e-6)
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


def test_bnpo_of_means_that_differ_a_little(backend):
    """Their variance is 2e-10, above the 1e-12 of one mean."""
    t, b = on(backend)
    found = A.bnpo(t(0.0, 1.0, 0.00004, 1.0), t(0, 0, 1, 1), **b)
    assert float(found.abs().max()) < 0.01


def z_scores(values, eps, ddof=1):
    values = np.array(values, dtype=float)
    return (values - values.mean()) / (values.std(ddof=ddof) + eps)


def test_rewards_that_are_changed_before_they_are_compared(backend):
    """The calls of docs/compositions.md: DRA-GRPO, TIC-GRPO, EM-RL, CAPO, XRPO."""
    t, b = on(backend)
    rewards, texts, lengths = t(1.0, 1, 0, 1), t([1.0, 0], [0.8, 0.6], [0, 1], [0.6, 0.8]), t(4.0, 2, 8, 5)
    s = (texts @ texts.T).sum(1) - 1  # cosines of texts of length 1, without that of itself
    close(s, [1.4, 2.36, 1.4, 2.36])
    found = A.grpo(rewards / (1 + s), None, eps=1e-4, **b)
    close(found, z_scores([1 / 2.4, 1 / 3.36, 0, 1 / 3.36], 1e-4))
    close(A.grpo(rewards / lengths, None, eps=1e-8, **b), z_scores([1 / 4, 1 / 2, 0, 1 / 5], 1e-8))
    likelihood = t(-0.2, -0.9, -0.1, -0.4)
    plain, mean = A.grpo(rewards, None, **b), hpo.segments.statistics(likelihood, None, **b).mean
    gain = (0.8 * (1 - (likelihood - mean).exp())).clamp(min=0).minimum(0.5 * plain)
    novelty = 0.8 * (1 - np.exp(np.array([-0.2, -0.9, -0.1, -0.4]) + 0.4))
    expected = z_scores([1, 1, 0, 1], 1e-6)
    right = np.minimum(np.maximum(novelty, 0), 0.5 * expected)
    assert right[0] == 0 < right[1] == 0.5 * expected[1]  # likely; bounded
    close(plain + torch.where(rewards > 0, gain, 0.0), expected + right * [1, 1, 0, 1])
    close(plain.clamp(min=0), np.maximum(expected, 0))
    batch = hpo.PackedBatch.from_lengths([2, 1, 3], mask=t(True, True, True, True, False, True))
    entropy = t(0.5, 0.25, 1.0, 0.125, math.nan, 0.5)
    certain = -hpo.entropy.segment_aggregate(entropy, batch, "row", aggregate="sum", expand=False, **b)
    close(certain, [-0.75, -1, -0.625])
    close(A.rloo(certain, None, **b), [0.0625, -0.3125, 0.25])


def test_groups_that_are_subsets_of_a_prompt(backend):
    """MS-GRPO, in the call of docs/compositions.md, over all pairs and all triples of five answers."""
    t, b = on(backend)
    values = (1.0, 0.0, 0.25, 1.0, 0.5)
    rewards, found, expected = t(*values), t(*[0.0] * 5), np.zeros(5)
    for size in (2, 3):
        subsets = torch.combinations(torch.arange(5), size).to(rewards.device)
        units, ids = subsets.flatten(), torch.arange(len(subsets), device=rewards.device).repeat_interleave(size)
        of_pairs = A.grpo(rewards[units], ids, ddof=0, eps=1e-8, **b)
        found += found.new_zeros(5).index_add(0, units, of_pairs) / units.bincount() / 2
        for unit in range(5):
            own = [subset for subset in itertools.combinations(range(5), size) if unit in subset]
            scores = [z_scores([values[at] for at in subset], 1e-8, 0)[subset.index(unit)] for subset in own]
            expected[unit] += np.mean(scores) / 2
    close(found, expected)


def test_the_switch_of_hiper_as_its_paper_has_it(backend):
    """(q - p) (V_high - V_low), V_low of the state under the former sub-goal, in the call of docs/compositions.md."""
    t, b = on(backend)
    switches, p, high, low = t(True, False, True), t(0.25, 0.5, 0.75), t(0.5, 0.25, 1.0), t(0.25, 0.5, 1.5)
    advantages = (switches.float() - p) * (high - low)
    close(advantages, [0.1875, 0.125, -0.125])
    batch = hpo.PackedBatch.from_lengths([2, 1]).to(advantages.device)
    batch = batch.replace(steps=t([0, 1], [1, 2], [2, 3]))
    logp = torch.full((3,), -1.0, device=advantages.device)
    given = {"advantage_level": "step", "token_mask": t(True, True, False), **b}
    out = hpo.policy_loss_and_grad(logp, None, advantages, batch, hpo.gates.reinforce(), **given)
    close(out.grad, [-0.0625, -0.125 / 3, 0])


def test_the_tokens_from_which_cure_resumes(backend):
    """The k of greatest entropy of each answer, of those that may be taken."""
    t, b = on(backend)
    entropy, batch = t(9.0, 0.5, 2.0, 1.0, 9.0, 0.25), hpo.PackedBatch.from_lengths([4, 2]).to(t(0).device)
    allowed = t(False, True, True, True, False, True)
    found = hpo.entropy.top_k(torch.where(allowed, entropy, -1.0), batch, 2, **b) & allowed
    assert found.tolist() == [False, False, True, True, False, True]
