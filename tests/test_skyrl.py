"""The losses and estimators registered with SkyRL against SkyRL's own; `make test-trainers` installs it."""

import importlib
import inspect
import math
import pickle
import typing

import numpy as np
import pytest
import torch
import typing_extensions
from lazily import skip_without
from trainer_batches import LENGTH, ROWS, Batch, equal, gradient, integration

import hpo_core as hpo

skip_without("skyrl")
pytestmark = pytest.mark.peers

REDUCTIONS = ("token_mean", "token_mean_legacy", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean")
# SkyRL's loss, ours, and the fields of the configuration
LOSSES = {
    "regular": ("hpo_ppo_clip", {"eps_clip_low": 0.2, "eps_clip_high": 0.28}),
    "dual_clip": ("hpo_dual_clip", {"clip_ratio_c": 1.5}),
    "gspo": ("hpo_gspo_token", {"eps_clip_low": 0.05, "eps_clip_high": 0.06}),
    "sapo": ("hpo_sapo", {}),
    "cispo": ("hpo_cispo", {"cispo.cispo_eps_clip_low": 0.2, "cispo.cispo_eps_clip_high": 0.3}),
}
CORRECTIONS = {
    "token": {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 1.1},
    "sequence": {"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": 1.2},
    "mask": {"sequence_mask_metric": "geometric", "geo_mask_high": 1.05, "geo_mask_low": 0.95},
    "product": {"sequence_mask_metric": "product", "product_mask_high": 1.5, "product_mask_low": 0.6},
    "tokens": {"token_mask_is_threshold_low": 0.8, "token_mask_is_threshold_high": 1.25},
    "outliers": {"outlier_token_is_threshold_low": 0.6, "outlier_token_is_threshold_high": 1.6},
}


@pytest.fixture(scope="module")
def skyrl():
    """SkyRL asks for Python 3.12, where pydantic takes the TypedDict of typing; its losses run on 3.11, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typing, "TypedDict", typing_extensions.TypedDict)
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        yield importlib.import_module("skyrl.backends.skyrl_train.utils.ppo_utils")


@pytest.fixture(scope="module")
def ours(skyrl):
    return integration("skyrl")


def configuration(**fields):
    made = importlib.import_module("skyrl.train.config").AlgorithmConfig()
    for path, value in fields.items():
        *parents, name = path.split(".")
        target = made
        for parent in parents:
            target = getattr(target, parent)
        assert hasattr(target, name), path
        setattr(target, name, value)
    return made


def call(skyrl, name, batch, advantages, config):
    loss = skyrl.PolicyLossRegistry.get(name)
    return lambda logp: loss(
        logp, batch.old, advantages, config=config, loss_mask=batch.mask.float(), rollout_logprobs=batch.rollout
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("theirs", LOSSES)
def test_equals_skyrl(theirs, reduction, skyrl, ours):
    name, fields = LOSSES[theirs]
    clipped = 0.0
    for seed in range(3):
        batch = Batch(seed, empty_row=seed == 1, per_token=seed == 2)
        scaled = skyrl.apply_loss_reduction_to_advantages_minibatch(
            batch.advantages, batch.mask.float(), reduction, 3, LENGTH, [(0, 2), (2, ROWS)]
        )
        config = configuration(policy_loss_type=theirs, **fields)
        own, peer = (call(skyrl, each, batch, scaled, config) for each in (name, theirs))
        equal(own, peer, batch.logp)
        expected = peer(batch.logp)[1].get("clip_ratio", 1.0)
        clipped += expected
        assert theirs == "sapo" or own(batch.logp)[1]["clip_ratio"] == pytest.approx(expected, abs=1e-6)
    assert clipped > 0.1 or theirs == "sapo", "nothing was clipped: the comparison says little"


@pytest.mark.parametrize("theirs", ["regular", "dual_clip", "gspo"])
def test_a_lower_epsilon_above_1_is_no_clip(theirs, skyrl, ours):
    name, fields = LOSSES[theirs]
    batch, config = Batch(per_token=True), configuration(policy_loss_type=theirs, **{**fields, "eps_clip_low": 2.0})
    own, peer = (call(skyrl, each, batch, batch.advantages, config) for each in (name, theirs))
    equal(own, peer, batch.logp)


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("theirs", LOSSES)
def test_equals_skyrl_with_its_corrections(theirs, correction, skyrl, ours):
    name, fields = LOSSES[theirs]
    told = {f"off_policy_correction.{field}": value for field, value in CORRECTIONS[correction].items()}
    differences = 0
    for seed in range(4):
        batch, config = Batch(seed), configuration(policy_loss_type=theirs, **fields, **told)
        own, peer = (call(skyrl, each, batch, batch.advantages, config) for each in (name, theirs))
        equal(own, peer, batch.logp)
        uncorrected = call(skyrl, theirs, batch, batch.advantages, configuration(policy_loss_type=theirs, **fields))
        differences += not torch.allclose(gradient(own, batch.logp)[1], gradient(uncorrected, batch.logp)[1])
    assert differences, "nothing was corrected: the comparison says little"


@pytest.mark.parametrize("name", ["grpo", "rloo", "maxrl"])
def test_estimators_equal_skyrls(name, skyrl, ours):
    draw = torch.Generator().manual_seed(0)
    rewards = torch.zeros(8, 5)
    rewards[:, 3] = torch.rand(8, generator=draw) + 0.5
    mask = torch.ones(8, 5)
    mask[:, 4] = 0
    index = np.array(list("abab") + list("cccc"))
    expected, found = (
        skyrl.compute_advantages_and_returns(rewards, mask, index, each, configuration())
        for each in (name, f"hpo_{name}")
    )
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=2e-6)


def test_settings_of_advantages_are_read_or_refused(skyrl, ours):
    rewards, mask, index = torch.rand(4, 5), torch.ones(4, 5, dtype=torch.int64), np.array(list("aabb"))
    one, other = (
        skyrl.compute_advantages_and_returns(
            rewards, mask, index, "hpo_reinforce_pp", configuration(), gamma=gamma, grpo_norm_by_std=False
        )[0]
        for gamma in (1.0, 0.5)
    )
    assert not torch.allclose(one, other)
    with pytest.raises(ValueError, match=r"grpo_norm_by_std: grpo divides by a deviation .*take hpo_dr_grpo"):
        skyrl.compute_advantages_and_returns(rewards, mask, index, "hpo_grpo", configuration(), grpo_norm_by_std=False)


def test_rows_that_fill_a_batch_up_are_in_no_statistic(skyrl, ours):
    """Copies of the first row, whose rewards and masks they have, under prompts of their own."""
    rewards, mask, index = torch.zeros(6, 5), torch.ones(6, 5, dtype=torch.int64), np.array([*"aabbcc"])
    rewards[:, 2] = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    mask[1, 3:] = 0
    filled = np.array([*index, "pad0", "pad1"])
    for name in ours.ESTIMATORS:
        few, many = (
            skyrl.compute_advantages_and_returns(*given, f"hpo_{name}", configuration())[0]
            for given in ((rewards, mask, index), (rewards[[*range(6), 0, 0]], mask[[*range(6), 0, 0]], filled))
        )
        assert torch.equal(many[:6], few) and not many[6:].any(), name


def test_step_by_step_there_are_no_lengths(skyrl, ours):
    rewards, ones, index = torch.rand(4, 5), torch.ones(4, 5), np.array([*"aabb"])
    refused = []
    for name in ours.ESTIMATORS:
        try:
            skyrl.compute_advantages_and_returns(rewards, ones, index, f"hpo_{name}", configuration())
        except ValueError as error:
            assert "advantage_estimator" in str(error) and "step_wise_trajectories" in str(error)
            refused.append(name)
    assert {"opo", "reinforce_pp", "reinforce_pp_baseline"} <= set(refused) and "grpo" not in refused


def test_a_healthy_micro_batch_reports_the_names_of_a_broken_one(skyrl, ours):
    """SkyRL reduces over the ranks name by name: one that a rank lacks would be waited for."""
    batch, broken = Batch(), Batch()
    broken.logp = torch.where(torch.arange(broken.logp.numel()).view_as(broken.logp) == 0, torch.nan, broken.logp)
    assert broken.mask.flatten()[0]
    one, other = (
        call(skyrl, "hpo_ppo_clip", each, each.advantages, configuration())(each.logp)[1] for each in (batch, broken)
    )
    assert one.keys() == other.keys() and other["hpo/nan_tokens"] == 1 and one["hpo/nan_tokens"] == 0


def test_what_is_registered_takes_what_skyrl_hands_over(skyrl, ours):
    for registry, peer in ((skyrl.PolicyLossRegistry, "regular"), (skyrl.AdvantageEstimatorRegistry, "grpo")):
        names = [name for name in registry.list_available() if name.startswith("hpo_")]
        assert len(names) > 12
        for name in names:
            taken = inspect.signature(registry.get(name)).parameters
            wanted = inspect.signature(registry.get(peer)).parameters
            assert set(wanted) <= set(taken) or any(each.kind is each.VAR_KEYWORD for each in taken.values())
            pickle.loads(pickle.dumps(registry.get(name)))  # workers get it from an actor of Ray


def test_every_preset_computes_a_loss_proportional_to_advantages(skyrl, ours):
    batch = Batch()
    for name in (*(f"hpo_{preset}" for preset in ours.PRESETS), *(name for name, _ in LOSSES.values())):
        one, other = (
            torch.autograd.grad(call(skyrl, name, batch, scale * batch.advantages, configuration())(leaf)[0], leaf)[0]
            for scale, leaf in (
                (1.0, batch.logp.clone().requires_grad_()),
                (1 / 64, batch.logp.clone().requires_grad_()),
            )
        )
        assert one.abs().max() > 0
        torch.testing.assert_close(one, 64 * other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("gate", [hpo.gates.dro(), hpo.gates.ppo_penalty(), hpo.gates.kimi()])
def test_what_would_lack_the_denominator_is_refused(gate, ours):
    with pytest.raises(ValueError, match="does not grow with the advantage"):
        ours.register("mine", gate)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("hpo_dapo", "eps_clip_high", 0.1),
        ("hpo_dapo", "kl_cov.ppo_kl_coef", 0.1),
        ("hpo_cispo", "eps_clip_low", 0.1),
        ("hpo_cispo", "cispo.cispo_anchor", "rollout"),
        ("hpo_ppo_clip", "clip_ratio_c", 0.1),
        ("hpo_dual_clip", "sapo.tau_neg", 0.1),
        ("hpo_gspo", "clip_ratio_c", 0.1),
        ("hpo_gspo_token", "clip_ratio_c", 0.1),
        ("hpo_sapo", "eps_clip_low", 0.1),
        ("hpo_dppo_tv", "dppo.delta_low", 0.1),
        ("hpo_icepop", "cispo.cispo_eps_clip_high", 0.1),
    ],
)
def test_a_field_without_effect_is_refused(name, field, value, skyrl, ours):
    batch, config = Batch(), configuration(**{field: value})
    with pytest.raises(ValueError, match=f"^{field}: the gate '.*' does not read it; got {value}, leave it at SkyRL's"):
        call(skyrl, name, batch, batch.advantages, config)(batch.logp)


def test_every_field_of_skyrls_losses_is_read_or_refused(skyrl, ours):
    """A field that a new release adds is noticed here."""
    config, values = configuration(), {}
    for name in ("cispo", "clip_cov", "dppo", "kl_cov", "sapo"):
        values |= {f"{name}.{field}": value for field, value in vars(getattr(config, name)).items()}
    values |= {field: getattr(config, field) for field in ("eps_clip_low", "eps_clip_high", "clip_ratio_c")}
    assert values == ours._UNSET


def test_refusals(skyrl, ours):
    batch, config = Batch(), configuration(**{"off_policy_correction.tis_ratio_type": "token"})
    with pytest.raises(TypeError, match=r"gate: expected a RatioGate, or .* got the function gspo; call it: gspo\(\)"):
        ours.register("mine", hpo.gates.gspo)
    with pytest.raises(ValueError, match="level of groups"):
        ours.register("mine", hpo.gates.reconstructed.fiberpo_domain())
    with pytest.raises(ValueError, match="correct the same difference"):
        call(skyrl, "hpo_icepop", batch, batch.advantages, config)(batch.logp)
    batch.rollout = None
    with pytest.raises(ValueError, match="the batch has none"):
        call(skyrl, "hpo_icepop", batch, batch.advantages, configuration())(batch.logp)
    with pytest.raises(ValueError, match="one of steps"):
        ours.register_advantage("mine", hpo.advantages.gigpo)


def test_a_gate_of_the_samplers_ratio_has_the_gradient_of_dppo(skyrl, ours):
    """And reads no recomputed old policy, so that it may train fully asynchronously."""
    batch, config = Batch(), configuration(policy_loss_type="dppo")
    ours.register("mine", hpo.gates.dppo_tv(0.2, 0.2, math.inf, hpo.gates.Channel.TOTAL))
    _, expected = gradient(call(skyrl, "dppo", batch, batch.advantages, config), batch.logp)
    batch.old = batch.old - 1.0
    _, found = gradient(call(skyrl, "mine", batch, batch.advantages, configuration()), batch.logp)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_what_stands_at_masked_positions_is_not_read(skyrl, ours):
    batch, config = Batch(), configuration(**{"off_policy_correction.tis_ratio_type": "token"})
    own = call(skyrl, "hpo_ppo_clip", batch, batch.advantages, config)(batch.logp)[0]
    batch.old, batch.rollout = batch.poisoned(batch.old), batch.poisoned(batch.rollout)
    assert call(skyrl, "hpo_ppo_clip", batch, batch.advantages, config)(batch.poisoned(batch.logp))[0] == own
