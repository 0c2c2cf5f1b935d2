"""Entropy presets against numbers that their authors' functions gave, run once on the batch below.

`docs/entropy_evidence.md` has the commits. The numbers are facts about those functions, whatever a paper says.
"""

import math

import pytest
import torch
from naive_entropy import BATCH, SHARED, close, places

import hpo_core as hpo
from hpo_core import entropy as E

ADVANTAGES = torch.tensor([1.2, -0.8, 0.4])
T = torch.arange(19)
LOGP = -(0.3 + 0.13 * ((7 * T) % 11))
OLD_LOGP = LOGP - 0.02 * ((5 * T) % 13 - 6)


def test_hapo():
    """starriver030515/HAPO: compute_entropy_h, ada_clip, ada_advantage, compute_entropy_based_temperature."""
    low, high = E.hapo(SHARED, BATCH, compat="code").bounds
    close(low, [0.8] * 19)
    epsilons = [
        .457161, .412871, .460606, .332464, .28, .288532, .51571, .489802, .56, .471419, .32429, .51571, .56, .56,
        .489802, .51571, .298382, .342672, .332464,
    ]  # fmt: skip
    close(high - 1, epsilons)
    factor = E.hapo_redistribution(SHARED, LOGP, OLD_LOGP, BATCH, bounds=(low, high), compat="code").advantage_factor
    close(factor, [1.632718, *[1.0] * 12, 2.0, *[1.0] * 5])
    seven = torch.tensor([0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2])
    state = E.fit_pivot(seven, hpo.PackedBatch.from_lengths([7]))
    entropy = torch.tensor([1.38629436, 0.26183054, 0.03181361, 1.26830161, 0.69438124])
    got = E.hapo_temperature(entropy, hpo.PackedBatch.from_lengths([5]), state, tau=0.05, compat="code")
    close(got, [1.002068, 1.026114, 1.05, 1.003352, 1.012043])


def test_hapo_advantages():
    """starriver030515/HAPO: compute_hapo_outcome_advantage, whose last group falls back for what its padding has."""
    rewards = torch.tensor([1.0, 0.0, 0.0, *[0.0] * 29, 1.0, 4.0, 5.0])
    groups, lengths = torch.tensor([7] * 3 + [3] * 30 + [5] * 2), torch.tensor([4.0, 2.0, 6.0, *[1.0] * 32])
    got = E.hapo_advantages(rewards, groups, lengths, compat="code")
    expected = [1.414214, -0.707107, -0.707107, *[-0.182574] * 29, 5.294649, -0.707107, 0.707107]
    close(got, expected, 1e-4)


def test_archer_and_siren():
    """wizard-III/ArcherCodeR: the masks of dp_actor; Linn3a/siren: mask_by_quantile, agg_loss."""
    assert places(E.archer(SHARED, BATCH, compat="code").bounds[1] > 1.3) == [2, 3, 13, 18]
    mask = E.siren_tokens(SHARED, BATCH)
    assert places(mask) == [2, 3, 13, 18]
    close(E.siren_mean(SHARED, BATCH, mask), 1.15)
    close(E.siren(SHARED, BATCH, mask, torch.tensor(0.7)), 0.0010125, 1e-9)


def test_steer():
    """zz-haooo/STEER: compute_token_weights."""
    change = E.entropy_change(LOGP, OLD_LOGP, SHARED, ADVANTAGES, BATCH)
    exponential = [
        .988118, .853149, .944334, .898285, .961522, .986021, .8, .882843, .972753, .819064, .964625, .990568, .885552,
        .951561, .843404, .900186, .998903, .938259, .997606,
    ]  # fmt: skip
    close(E.steer(change, BATCH).weight, exponential)
    linear = [
        1.180445, .915873, 1.0988, 1.008742, 1.131293, 1.176617, .8, .977506, 1.152212, .842424, 1.137097, 1.184905,
        .983025, 1.112534, .895178, 1.012551, 1.2, 1.087174, 1.19766,
    ]  # fmt: skip
    close(E.steer_linear(change, BATCH).weight, linear)


def test_epo():
    """WujiangXu/EPO: generate_entropy_penalty, agg_loss, _calculate_epoch_based_entropy_weight."""
    weights, history = torch.full((3,), 1 / 19), torch.tensor([0.5])
    got = E.epo(SHARED, BATCH, weights, history, coefficient=1.0, kappa=(0.3, 1.7), beta=0.5, compat="code")
    close(got, -0.36473689)
    expected = [1, 0.827067, 0.377893, 0.03983]
    assert [round(E.epo_phase(epoch, 7, compat="code"), 6) for epoch in (0, 3, 4, 7)] == expected


def test_advantages():
    """ZhangXJ199/EDGE-GRPO: _compute_loss; xvolcano02/UCAS: compute_ucas_advantage."""
    close(E.edge_grpo(ADVANTAGES, SHARED, BATCH, compat="code"), [0.792727, -1.02761, 0.565185], 2e-6)
    full = hpo.PackedBatch.from_lengths([6] * 3)
    close(E.edge_grpo(ADVANTAGES, SHARED[:18], full), [0.717867, -3.451282, 0.36477])
    own, confidence = torch.tensor([1.154698, -0.577349, -0.577349]), torch.tensor([7.7, 3.96, 3.6])
    expected = [
        .815951, .850951, .830951, .865951, .845951, .825951, .860951, .840951, .820951, .855951, -.515296, -.535296,
        -.500296, -.520296, -.485296, -.505296, -.499097, -.464097, -.484097,
    ]  # fmt: skip
    close(E.ucas(own, confidence, LOGP * 10, BATCH), expected, 3e-6)


def test_agents():
    """WillDreamer/ARLArena: compute_EMPG_advantage, whose rows are steps; the factor of compute_policy_loss_aepo."""
    offsets, of_steps = torch.tensor([0, 3, 5, 6, 9, 11]), torch.tensor([1.2, 1.2, 1.2, -0.8, -0.8])
    steps = hpo.PackedBatch(offsets, cu_steps=offsets, trajectory_ids=torch.tensor([7, 7, 7, 3, 3]))
    entropy = torch.tensor([0.1, 0.3, 0.2, 0.5, 0.7, 1.2, 0.4, 0.4, 0.4, 0.9, 0.1])
    close(E.empg(of_steps, entropy, steps, zeta=0.1), [1.36612, 0.786065, 0.244894, -1.20481, -1.192269])
    factors = [
        .850898, .872103, 1.338604, 1.211376, 1.168967, 1.126558, .838176, .842416, .833935, .846657, .99933, .838176,
        .833935, 1.465831, .842416, .838176, 1.084149, .956921, 1.211376,
    ]  # fmt: skip
    close(E.aepo_ruc(SHARED, BATCH).advantage_factor, factors)


def test_gtpo():
    """teilomillet/textpolicy: compute_gtpo_shaped_rewards, normalize_gtpo_advantages."""
    is_correct = torch.tensor([False, False, True])
    rewards = [
        -1.177778, -1.033333, -1.001653, -1.125, -1.007229, -1.005556, -1.1, -1.1, -1.1, -1.1, -1.022222, -1.166667,
        -1.198347, -1.075, -1.192771, -1.194444, 1.1, 1.1, 1.1,
    ]  # fmt: skip
    close(E.gtpo(is_correct, SHARED, BATCH, normalised=False), rewards)
    advantages = [
        -1.123839, 0.963289, 1.42105, -0.361235, 1.340479, 1.364659, 0, 0, 0, 0, 1.123835, -0.96329, -1.421052,
        0.361231, -1.340482, -1.364661, 0, 0, 0,
    ]  # fmt: skip
    close(E.gtpo(is_correct, SHARED, BATCH), advantages, 5e-6)


def test_the_penalty_of_ares():
    """shawn0728/ARES: _update_beta_per_bucket with an interval of 2 and a rate of 1."""
    state = E.AresPenalty.start(3)
    for divergence in ((0.02, 0.03, math.nan), (0.05, math.nan, 0.001), (math.nan, 0.003, 0.5), (0.02, 0.01, 0.001)):
        state = E.ares_penalty(state, torch.tensor(divergence), period=2, rate=1.0)
    close(state.beta, [1.101902, 1.057432, 0.964035], 3e-6)
    close(state.error, [0.064338, 0.055843, -0.009627])


def test_coefficients():
    """SkyworkAI/Skywork-OR1: EntController; TRL: the adaptive coefficient of _compute_loss. Both at their targets."""
    skywork = trl = torch.tensor(0.0)
    for entropy, first, second in ((0.1, 1, 1), (0.25, 0, 2), (0.1, 1, 3), (0.1, 2, 4), (0.3, 1, 3), (0.25, 0, 4)):
        skywork, bonus = E.skywork_coefficient(skywork, torch.tensor(entropy), target=0.25, delta=0.001)
        close(torch.stack([skywork, bonus]), [first * 0.001, first * 0.001 * (entropy < 0.25)], 1e-8)
        trl, bonus = E.trl_coefficient(trl, torch.tensor(entropy), target=0.25)
        close(torch.stack([trl, bonus]), [second * 0.005, second * 0.005 * (entropy <= 0.25)], 1e-8)


def test_covariances_and_confidences():
    """PRIME-RL/Entropy-Mechanism-of-RL: both losses; facebookresearch/deepconf: ConfPerReqLogitsProcessor."""
    assert places(hpo.gates.kl_cov_mask(LOGP, ADVANTAGES, BATCH, share=0.18).penalty_mask) == [0, 8, 14]
    score = E.covariance(LOGP, ADVANTAGES, BATCH)
    assert sorted(score.topk(3).indices.tolist()) == [0, 8, 14]
    given = LOGP, OLD_LOGP, ADVANTAGES, BATCH
    kept = hpo.gates.clip_cov_mask(*given, seed=1, share=1.0, low=0.1, high=0.5).token_mask
    assert places(~kept) == [2, 5, 8, 12, 15]
    five = torch.tensor([4.0, 2.0, 6.0, 1.0, 9.0]), hpo.PackedBatch.from_lengths([5])
    close(E.group_confidence(*five, 3), [4, 3, 4, 3, 16 / 3])


ASCENDING = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2]
OTHER = [0.1, 0.2, 0.3, 1.4, 0.5, 0.14, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]


@pytest.mark.parametrize(
    ("entropy", "lengths", "share", "expected"),
    [
        (ASCENDING, (6, 4), "0.2", [8, 9]),
        (OTHER, (4, 4), "0.2", [3, 9]),
        (ASCENDING, (6, 4), "0.5", [5, 6, 7, 8, 9]),
        (ASCENDING, (6, 4), "1", list(range(10))),
        (ASCENDING, (6, 4), "0", [9]),
        (ASCENDING, (0, 0), "0.5", []),
    ],
)
def test_forking_tokens(entropy, lengths, share, expected):
    """TRL: what its own tests expect of get_high_entropy_mask, whose threshold is 1 - share."""
    mask = torch.arange(6) < torch.tensor(lengths)[:, None]  # [2, 6]
    batch, values = hpo.PackedBatch.from_padded(mask), torch.tensor(entropy).reshape(2, 6)
    window = E.forking_tokens(share)
    assert places(window.apply(values, batch, window.fit(values, batch)).reshape(-1)) == expected
