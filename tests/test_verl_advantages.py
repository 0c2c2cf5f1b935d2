"""Estimators next to those that verl registers, on padded batches as it has them.

docs/advantages_evidence.md has the table of where definitions differ.
"""

import functools

import numpy as np
import pytest
import torch
from lazily import Lazy, skip_without

from hpo_core import PackedBatch, advantages

skip_without("verl")
algorithm = Lazy("verl.trainer.config.algorithm")
protocol, ray_trainer = Lazy("verl.protocol"), Lazy("verl.trainer.ppo.ray_trainer")
core_algos, verl = Lazy("verl.trainer.ppo.core_algos"), Lazy("hpo_core.integrations.verl")

pytestmark = pytest.mark.peers


class Padded:
    """Responses ``[B, L]`` with tool tokens masked inside, an outcome at the last token, and ids of any kind."""

    def __init__(self, seed, groups=3, tools=True):
        draw = torch.Generator().manual_seed(seed)
        rows, length = 8, 7
        lengths = torch.randint(1, length + 1, (rows,), generator=draw)
        place = torch.arange(length)
        self.mask = (place < lengths[:, None]) & (torch.rand(rows, length, generator=draw) > 0.2 * tools)
        self.mask[torch.arange(rows), lengths - 1] = True
        self.mask[:, 0] = True
        scores = torch.randint(0, 9, (rows,), generator=draw) / 4
        self.rewards = torch.zeros(rows, length)
        self.rewards[torch.arange(rows), lengths - 1] = scores
        self.scores, self.lengths = scores, self.mask.sum(-1).float()
        self.ids = torch.randint(0, groups, (rows,), generator=draw)
        self.index = np.array([f"prompt {i}" for i in self.ids.tolist()], dtype=object)
        self.probability, others = (torch.rand(rows, length, generator=draw) for _ in range(2))
        self.squares = self.probability**2 + others * (1 - self.probability) ** 2
        self.batch = PackedBatch.from_padded(self.mask)

    def verl(self, name, **keywords):
        if "index" not in keywords and name not in ("reinforce_plus_plus", "remax"):
            keywords["index"] = self.index
        estimator = core_algos.ADV_ESTIMATOR_REGISTRY[name]
        return estimator(token_level_rewards=self.rewards, response_mask=self.mask.float(), **keywords)[0]

    def spread(self, of_rows):
        return of_rows[:, None] * self.mask

    def tokens(self, of_tokens):
        return of_tokens.reshape(self.mask.shape)


class Config(dict):
    """The fields of verl's configuration that its estimators read."""

    gamma = 0.9


A = advantages
CASES = {
    "grpo": ("grpo", {}, lambda p: p.spread(A.grpo(p.scores, p.ids, singleton="raw"))),
    "grpo, vectorised": ("grpo_vectorized", {}, lambda p: p.spread(A.grpo(p.scores, p.ids, singleton="raw"))),
    "dr_grpo": (
        "grpo", {"norm_adv_by_std_in_grpo": False}, lambda p: p.spread(A.dr_grpo(p.scores, p.ids, singleton="raw")),
    ),
    "rloo": ("rloo", {}, lambda p: p.spread(A.rloo(p.scores, p.ids, singleton="raw"))),
    "rloo, vectorised": ("rloo_vectorized", {}, lambda p: p.spread(A.rloo(p.scores, p.ids))),
    "opo": ("opo", {}, lambda p: p.spread(A.opo(p.scores, p.ids, p.lengths, singleton="raw"))),
    "gpg": ("gpg", {}, lambda p: p.spread(A.gpg(p.scores, p.ids, compat="code"))),
    "reinforce_pp_baseline": (
        "reinforce_plus_plus_baseline", {},
        lambda p: p.spread(A.reinforce_pp_baseline(p.scores, p.ids, p.lengths)),
    ),
    "reinforce_pp": (
        "reinforce_plus_plus", {"config": Config()},
        lambda p: p.tokens(A.reinforce_pp(p.rewards.reshape(-1), p.batch, gamma=0.9)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_verl(name):
    theirs, keywords, ours = CASES[name]
    for seed in range(20):
        padded = Padded(seed)
        expected = padded.verl(theirs, **keywords)
        tolerance = 2e-4 if "reinforce" in theirs else 2e-5  # its 1e-8 beside counts, and float32 sums
        torch.testing.assert_close(ours(padded) * padded.mask, expected * padded.mask, rtol=tolerance, atol=tolerance)


def test_remax_agrees_with_verl():
    padded = Padded(3)
    greedy = torch.rand(8, generator=torch.Generator().manual_seed(0))
    expected = padded.verl("remax", reward_baselines=greedy)
    ours = A.remax(padded.rewards.reshape(-1), greedy, padded.batch)
    torch.testing.assert_close(padded.tokens(ours), expected * padded.mask)


def test_the_optimal_token_baseline_agrees_with_verl():
    """Without tool tokens: verl finds the longest response by its valid tokens, we a position's only response."""
    for seed in range(20):
        padded = Padded(seed, tools=False)
        expected = padded.verl(
            "optimal_token_baseline", old_log_probs=padded.probability.log(), sum_pi_squared=padded.squares
        )
        ours = A.otb(
            padded.rewards.reshape(-1), padded.ids, padded.batch, padded.probability.reshape(-1),
            padded.squares.reshape(-1),
        )  # fmt: skip
        torch.testing.assert_close(padded.tokens(ours), expected * padded.mask, rtol=2e-5, atol=2e-5)


def test_the_baseline_that_counts_valid_tokens_agrees_with_verl():
    """Rows have tool tokens, and the sampler's importance weights."""
    for seed in range(20):
        padded = Padded(seed)
        weights = torch.rand(padded.mask.shape, generator=torch.Generator().manual_seed(seed)) + 0.5
        expected = padded.verl(
            "tir_optimal_token_baseline", old_log_probs=padded.probability.log(), sum_pi_squared=padded.squares,
            rollout_is_weights=weights,
        )  # fmt: skip
        ours = A.tir_otb(
            padded.rewards.reshape(-1), padded.ids, padded.batch, padded.probability.reshape(-1),
            padded.squares.reshape(-1), importance=weights.reshape(-1),
        )  # fmt: skip
        torch.testing.assert_close(padded.tokens(ours), expected * padded.mask, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("scaled", [True, False])
def test_grpo_passk_agrees_with_verl(scaled):
    """verl raises for a group of one."""
    for seed in range(20):
        padded = Padded(seed)
        ids = torch.arange(8) // 4
        config = {"norm_adv_by_std_in_grpo": scaled}
        expected = padded.verl("grpo_passk", index=ids.numpy(), config=config)
        torch.testing.assert_close(padded.spread(A.grpo_passk(padded.scores, ids, scaled=scaled)), expected)


def test_gdpo_agrees_with_verl():
    """Its second stage is over tokens."""
    for seed in range(20):
        padded = Padded(seed)
        scores = torch.rand(2, 8, generator=torch.Generator().manual_seed(seed))
        given = {
            "prompts": torch.zeros(8, 2),
            "attention_mask": torch.ones(8, 2 + padded.mask.shape[1], dtype=torch.int64),
        }
        expected = padded.verl(
            "gdpo", config={"gdpo_reward_keys": ["first", "second"], "gdpo_reward_weights": [1.0, 0.5]},
            non_tensor_batch=dict(zip(("first", "second"), scores.numpy(), strict=True)), batch=given,
        )  # fmt: skip
        ours = A.gdpo(scores, padded.ids, [1.0, 0.5], lengths=padded.lengths)
        torch.testing.assert_close(padded.spread(ours), expected, rtol=2e-4, atol=2e-4)


def test_gae_of_finished_responses_agrees_with_verl():
    """Tool tokens are transparent in both; verl whitens by itself."""
    for seed in range(20):
        padded = Padded(seed)
        values = torch.rand(padded.mask.shape, generator=torch.Generator().manual_seed(seed))
        given = {"token_level_rewards": padded.rewards, "values": values, "response_mask": padded.mask.float()}
        expected, returns = core_algos.ADV_ESTIMATOR_REGISTRY["gae"](**given, gamma=0.9, lam=0.8)
        finished = torch.zeros(8, dtype=torch.bool)
        flat = padded.rewards.reshape(-1), values.reshape(-1), padded.batch, finished
        ours = padded.tokens(A.t_ppo(*flat, gamma=0.9, lam=0.8))
        torch.testing.assert_close(ours + values * padded.mask, returns * padded.mask, rtol=2e-5, atol=2e-5)
        valid = padded.mask.reshape(-1)
        whitened = padded.tokens(A.whiten(ours.reshape(-1), torch.ones(valid.numel()), mask=valid))
        torch.testing.assert_close(whitened, expected * padded.mask, rtol=2e-4, atol=2e-4)
        alone = padded.tokens(A.token_gae(*flat[:3], gamma=0.9, lam=0.8))  # each row is a trajectory
        torch.testing.assert_close(alone, expected * padded.mask, rtol=2e-4, atol=2e-4)


def test_equal_rewards_are_noise_there_and_zero_here():
    """The mean of equal numbers is not that number in float32."""
    padded, noise = Padded(0, groups=1), 0.0
    for reward in torch.linspace(0.1, 3, 30).tolist():
        padded.rewards = torch.zeros_like(padded.rewards)
        padded.rewards[:, 0] = reward
        noise = max(noise, float(padded.verl("grpo").abs().max()))
        assert not A.grpo(padded.rewards.sum(-1), padded.ids).any()
    assert noise > 1e-3


# ------------------------------------------------------------------------------------------------ registered with verl


def through_verl(name, padded, **settings):
    """verl's own call, as its trainer makes it."""
    data = protocol.DataProto.from_dict(
        {"token_level_rewards": padded.rewards, "response_mask": padded.mask.long()}, non_tensors={"uid": padded.index}
    )
    return ray_trainer.compute_advantage(data, adv_estimator=name, config=algorithm.AlgoConfig(**settings)).batch


def test_returns_of_tokens_are_those_of_verl():
    padded = Padded(2, tools=False)
    settings = {"gamma": 0.9}
    expected, ours = (through_verl(name, padded, **settings) for name in ("reinforce_plus_plus", "hpo_reinforce_pp"))
    torch.testing.assert_close(ours["returns"], expected["returns"] * padded.mask)
    assert not torch.equal(ours["returns"], padded.rewards)


def test_every_estimator_is_registered():
    padded = Padded(4)
    for name in verl.ESTIMATORS:
        batch = through_verl(f"hpo_{name}", padded)
        assert batch["advantages"].shape == batch["returns"].shape == padded.mask.shape, name
        assert not batch["advantages"][~padded.mask].any() and batch["advantages"].any(), name


@pytest.mark.parametrize("name", ["gpg", "lite_ppo"])
def test_rows_with_which_verl_fills_a_batch_up_are_in_no_statistic(name):
    """They have a prompt of their own, the reward 0 and no valid token."""
    padded = Padded(4)
    expected = through_verl(f"hpo_{name}", padded)["advantages"]
    padded.mask = torch.cat((padded.mask, torch.zeros_like(padded.mask[:5])))
    padded.rewards = torch.cat((padded.rewards, torch.zeros_like(padded.rewards[:5])))
    padded.index = np.append(padded.index, ["pad"] * 5)
    found = through_verl(f"hpo_{name}", padded)["advantages"]
    assert torch.equal(found[:8], expected) and not found[8:].any()


def test_verl_s_call_gives_the_estimator_s_numbers():
    padded = Padded(5)
    for name, expected in (
        ("hpo_grpo", padded.spread(A.grpo(padded.scores, padded.ids))),
        ("hpo_opo", padded.spread(A.opo(padded.scores, padded.ids, padded.lengths))),
        ("hpo_reinforce_pp", padded.tokens(A.reinforce_pp(padded.rewards.reshape(-1), padded.batch))),
    ):
        assert torch.equal(through_verl(name, padded)["advantages"], expected), name


@pytest.mark.parametrize(
    ("ours", "theirs", "settings"),
    [
        ("hpo_reinforce_pp", "reinforce_plus_plus", {"gamma": 0.9}),
        ("hpo_grpo_passk", "grpo_passk", {"norm_adv_by_std_in_grpo": False}),
    ],
)
def test_settings_mean_what_they_mean_in_verl(ours, theirs, settings):
    padded = Padded(7)
    padded.index = np.arange(8) // 4
    own, peer = (through_verl(name, padded, **settings)["advantages"] * padded.mask for name in (ours, theirs))
    torch.testing.assert_close(own, peer, rtol=2e-4, atol=2e-4)
    assert not torch.allclose(own, through_verl(ours, padded)["advantages"] * padded.mask, rtol=1e-2)


def test_a_deviation_that_verl_is_told_to_leave_out_is_refused():
    said = r"^algorithm\.norm_adv_by_std_in_grpo: grpo divides .*take hpo_dr_grpo"
    with pytest.raises(ValueError, match=said):
        through_verl("hpo_grpo", Padded(7), norm_adv_by_std_in_grpo=False)
    assert through_verl("hpo_dr_grpo", Padded(7), norm_adv_by_std_in_grpo=False)["advantages"].any()


def test_registering_an_estimator():
    before = dict(core_algos.ADV_ESTIMATOR_REGISTRY)
    try:
        verl.register_advantage("mine", functools.partial(A.grpo, eps=0.5))
        padded = Padded(6)
        expected = padded.spread(A.grpo(padded.scores, padded.ids, eps=0.5))
        assert torch.equal(through_verl("mine", padded)["advantages"], expected)
        with pytest.raises(ValueError, match="already been registered"):
            verl.register_advantage("grpo", A.grpo)
        for estimator, message in (
            (A.sgrpo, "sgrpo needs group_rewards, supergroup_ids, of which verl says nothing"),
            (functools.partial(A.sgrpo, group_rewards=None), "sgrpo needs supergroup_ids, of which verl says"),
            (A.gdpo, "expected one of a single reward"),
            (A.pass_at_k, "pass_at_k takes is_correct where verl has rewards"),
            (A.pf_ppo, "expected one of rows or tokens, got one of selections"),
        ):
            with pytest.raises(ValueError, match=f"^estimator: {message}"):
                verl.register_advantage("needs_more", estimator)
        assert "needs_more" not in core_algos.ADV_ESTIMATOR_REGISTRY
        with pytest.raises(TypeError, match=r"estimator: expected one of hpo_core\.advantages"):
            verl.register_advantage("none", "grpo")
    finally:
        core_algos.ADV_ESTIMATOR_REGISTRY.clear()
        core_algos.ADV_ESTIMATOR_REGISTRY.update(before)
