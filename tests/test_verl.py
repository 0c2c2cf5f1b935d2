"""The losses registered with verl against verl's own, through verl's own ppo_loss, and how verl finds them."""

import functools
import importlib
import inspect
import os
import pickle
import re

import pytest
import torch
from lazily import Lazy, skip_without
from ranks import apart, forget
from verl_batches import ROWS, Batch, actor, close, run

import hpo_core as hpo

skip_without("verl")
core_algos, tensordict_utils = Lazy("verl.trainer.ppo.core_algos"), Lazy("verl.utils.tensordict_utils")
workers, losses = Lazy("verl.workers.config"), Lazy("verl.workers.utils.losses")
hpo_verl, tensordict = Lazy("hpo_core.integrations.verl"), Lazy("tensordict")

pytestmark = pytest.mark.peers

AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
COUNTS = {"local": {}, "global": {"dp_size": 3, "batch_num_tokens": 77, "global_batch_size": 19}}
# name -> verl's name for the same loss, and bounds that clip on the batches below
PRESETS = {
    "hpo_ppo_clip": ("vanilla", {"clip_ratio_high": 0.25, "clip_ratio_c": 1.5}),
    "hpo_gspo": ("gspo", {"clip_ratio_low": 0.03, "clip_ratio_high": 0.04}),
    "hpo_gspo_token": ("gspo", {"clip_ratio_low": 0.03, "clip_ratio_high": 0.04}),
    "hpo_cispo": ("cispo", {"clip_ratio_low": 0.1, "clip_ratio_high": 0.25}),
}
# The gates whose numbers are the configuration's.
CONFIGURED = ("ppo_clip", "dapo", "cispo", "gspo", "gspo_token", "sapo", "dro")


@pytest.fixture(scope="module", autouse=True)
def registry():
    """The losses that tests register under new names do not stay; those of hpo_core are there."""
    assert callable(hpo_verl.register)
    before = dict(core_algos.POLICY_LOSS_REGISTRY)
    yield
    core_algos.POLICY_LOSS_REGISTRY.clear()
    core_algos.POLICY_LOSS_REGISTRY.update(before)


def test_every_field_that_verls_losses_read_is_read_or_refused():
    """A field of a new release is noticed here."""
    by_ppo_loss = {"loss_agg_mode", "loss_scale_factor", "loss_mode", "entropy_coeff", "use_kl_loss", "kl_loss_type"}
    by_ppo_loss |= {"kl_loss_coef", "policy_loss", "rollout_correction", "global_batch_info"}
    fields = {*workers.ActorConfig.__dataclass_fields__, *workers.PolicyLossConfig.__dataclass_fields__}
    read = set()
    for loss in (*core_algos.POLICY_LOSS_REGISTRY.values(), inspect.unwrap(losses.ppo_loss)):
        source = "" if isinstance(loss, functools.partial) else inspect.getsource(loss)
        read |= fields & {*re.findall(r"\bconfig\.(?:policy_loss\.)?(?:get\(\s*\")?(\w+)", source)}
    assert read - by_ppo_loss == {*hpo_verl.module()._UNSET}


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", PRESETS)
def test_equals_verl(name, aggregation, counts):
    peer, fields = PRESETS[name]
    for seed in range(3):
        batch = Batch(seed, weights=seed == 2 and name != "hpo_gspo")
        expected, ours = (
            run(batch, actor(mode, loss_agg_mode=aggregation, **fields), COUNTS[counts]) for mode in (peer, name)
        )
        close(ours, expected)
        assert expected[2]["actor/pg_clipfrac"] > 0.05, "nothing was clipped: the comparison says little"
        assert expected[2]["actor/pg_clipfrac_lower"] > 0.01 or peer != "vanilla"
        for metric, value in expected[2].items():
            assert ours[2][metric] == pytest.approx(value, rel=1e-6, abs=1e-7), metric


def test_equals_verl_only_with_the_same_bounds():
    """The comparison above discriminates."""
    batch = Batch()
    one, other = (run(batch, actor(mode, clip_ratio_high=0.25)) for mode in ("vanilla", "hpo_ppo_clip"))
    other_bound = run(batch, actor("hpo_ppo_clip", clip_ratio_high=0.1))
    close(other, one)
    assert not torch.allclose(other_bound[1], one[1], rtol=1e-3)


@pytest.mark.parametrize(("name", "bound"), [("dppo_tv", 0.15), ("dppo_kl", 0.05)])
def test_what_a_mask_drops_is_what_verl_calls_clipped(name, bound):
    batch = Batch()
    batch.fields["old_log_probs"] = [old.clamp(max=0) for old in batch.fields["old_log_probs"]]  # probabilities
    batch.fields["advantages"][1].fill_(-1.0)  # at 0 verl and the gate drop other tokens, which have no gradient
    bounds = {"clip_ratio_low": bound, "clip_ratio_high": bound, "clip_ratio_c": 20.0}
    expected, ours = run(batch, actor(name, **bounds)), run(batch, actor(f"hpo_{name}"))
    close(ours, expected)
    dropped = expected[2]["actor/pg_clipfrac"]
    assert ours[2]["actor/hpo_correction_0_selected_fraction"] == pytest.approx(1 - dropped) and dropped > 0.05


def test_of_no_tokens_a_correction_drops_none():
    _, metrics = call("hpo_dppo_tv", response_mask=torch.zeros(2, 3))
    assert metrics["actor/hpo_correction_0_selected_fraction"] == 1


def test_dapo_is_vanilla_without_the_dual_clip():
    batch = Batch()
    expected = run(batch, actor("vanilla", clip_ratio_high=0.28, clip_ratio_c=1e30))
    ours = run(batch, actor("hpo_dapo", clip_ratio_high=0.28))
    close(ours, expected)


def test_sapo_and_dro_take_verl_s_numbers():
    batch = Batch()

    def of(mode, aggregation, beta, **fields):
        told = workers.PolicyLossConfig(loss_mode=mode, dro_beta=beta)
        return run(batch, actor(mode, policy_loss=told, loss_agg_mode=aggregation, **fields))

    for name, (aggregation, beta, fields) in {
        "sapo": ("seq-mean-token-mean", None, {"tau_pos": 2.0, "tau_neg": 3.0}),
        "dro": ("token-mean", 0.4, {}),
    }.items():
        ours, theirs = (of(mode, aggregation, beta, **fields) for mode in (f"hpo_{name}", name))
        close(ours, theirs)
        assert not torch.allclose(ours[1], of(f"hpo_{name}", aggregation, None)[1], rtol=1e-2)


def test_every_gate_that_needs_no_more_is_there():
    """The others need inputs, the sampler's log-probabilities, or a field of the configuration."""
    made = {name: getattr(hpo.gates, name) for name in hpo.gates.__all__ if name.islower()}
    constructors = {
        name: gate() for name, gate in made.items()
        if inspect.isfunction(gate) and inspect.signature(gate).return_annotation == "RatioGate"
        and not any(each.default is each.empty for each in inspect.signature(gate).parameters.values())
    }  # fmt: skip
    free = {name for name, gate in constructors.items() if not gate.required and not gate.reads_rollout}
    assert len(constructors) > 40
    assert free == {*hpo_verl.PRESETS, *CONFIGURED}


@pytest.mark.parametrize("name", ["fiberpo", "gmpo", "sapo", "dppo_kl", "step_gspo", "vespo", "luspo", "ppo_penalty"])
def test_a_preset_is_its_gate(name):
    batch = Batch(3)
    assert f"hpo_{name}" in core_algos.POLICY_LOSS_REGISTRY
    hpo_verl.register("mine", getattr(hpo.gates, name)())
    expected, ours = (run(batch, actor(mode)) for mode in ("mine", f"hpo_{name}"))
    assert torch.equal(expected[1], ours[1]) and ours[1].any()
    assert not torch.equal(ours[1], run(batch, actor("hpo_ppo_clip"))[1])


def test_a_gate_on_several_levels():
    """FiberPO with room for everything is the ratio itself; with its own budgets it is not."""
    hpo_verl.register("hpo_fiberpo", hpo.gates.fiberpo())
    hpo_verl.register("hpo_fiberpo_wide", hpo.gates.fiberpo(50.0, (50.0, 50.0)))
    batch = Batch()
    unclipped = run(batch, actor("vanilla", clip_ratio_low=1.0, clip_ratio_high=1e6, clip_ratio_c=1e6))
    wide, tight = (run(batch, actor(mode, loss_agg_mode="token-mean")) for mode in ("hpo_fiberpo_wide", "hpo_fiberpo"))
    close(wide, unclipped)
    assert not torch.allclose(tight[1], wide[1], rtol=1e-2)
    assert tight[2]["actor/pg_clipfrac"] > 0.1


def test_steps_are_what_no_tool_wrote():
    """A step is a run of valid tokens inside a response."""
    batch, gate = Batch(), hpo.gates.step_gspo(0.02, 0.03)
    hpo_verl.register("hpo_step_gspo", gate)
    loss, grad, _ = run(batch, actor("hpo_step_gspo", loss_agg_mode="token-sum"))
    steps, begin = [], 0
    for valid in batch.fields["response_mask"]:
        for at in range(len(valid)):
            if valid[at] and (at == 0 or not valid[at - 1]):
                steps.append([begin + at, begin + at])
            if valid[at]:
                steps[-1][1] = begin + at + 1
        begin += len(valid)
    packed = hpo.PackedBatch.from_lengths(
        batch.responses, mask=torch.cat(batch.fields["response_mask"]), steps=torch.tensor(steps)
    )
    expected = hpo.policy_loss_and_grad(
        torch.cat(batch.response(batch.logp.detach())), torch.cat(batch.fields["old_log_probs"]),
        torch.stack([row[0] for row in batch.fields["advantages"]]), packed, gate, weights=torch.ones(ROWS),
        advantage_level="row",
    )  # fmt: skip
    assert len(steps) > ROWS
    torch.testing.assert_close(loss, expected.loss)
    torch.testing.assert_close(torch.cat(batch.response(grad)), expected.grad)


def test_gspo_with_token_advantages():
    """verl's gspo is the paper's GSPO-token; the sequence form has another gradient where advantages vary in a row."""
    batch, fields = Batch(per_token=True), PRESETS["hpo_gspo"][1]
    expected, token, sequence = (run(batch, actor(mode, **fields)) for mode in ("gspo", "hpo_gspo_token", "hpo_gspo"))
    close(token, expected)
    torch.testing.assert_close(sequence[0], token[0])
    assert not torch.allclose(sequence[1], expected[1], rtol=1e-2)


def test_terms_that_verl_adds():
    """ppo_loss changes the returned loss in place by entropy and KL."""
    batch = Batch()
    batch.fields["ref_log_prob"] = [old - 0.1 for old in batch.fields["old_log_probs"]]
    fields = {"entropy_coeff": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.2}
    entropy = torch.nested.nested_tensor_from_jagged(torch.rand(len(batch.logp)), batch.offsets)
    expected, ours = (run(batch, actor(mode, **fields), entropy=entropy) for mode in ("vanilla", "hpo_ppo_clip"))
    close(ours, expected)
    assert ours[2].keys() > expected[2].keys()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_micro_batches_and_ranks_add_up_to_the_step(aggregation):
    batch = Batch()
    tokens, rows = int(sum(mask.sum() for mask in batch.fields["response_mask"])), ROWS
    counts = {"batch_num_tokens": tokens, "global_batch_size": rows}
    fields = {"loss_agg_mode": aggregation, "loss_scale_factor": 20}
    whole = run(batch, actor("hpo_gspo", **fields), counts)
    # two ranks, whose gradients the engine averages, of two micro-batches each
    parts = [
        run(batch, actor("hpo_gspo", **fields), {**counts, "dp_size": 2}, part)
        for part in ([0, 1, 2], [3], [4, 5], [6, 7])
    ]
    loss, gradient = sum(part[0] for part in parts) / 2, sum(part[1] for part in parts) / 2
    assert torch.equal(gradient, whole[1])
    close((loss, gradient), whole)


def test_masked_positions_are_never_read():
    batch = Batch()
    expected = run(batch, actor("hpo_cispo"))
    hidden = torch.zeros(len(batch.logp), dtype=torch.bool)
    for view, mask in zip(batch.response(hidden), batch.fields["response_mask"], strict=True):
        view |= ~mask
    assert hidden.any()
    with torch.no_grad():
        batch.logp[hidden] = float("nan")
    ours, verl = (run(batch, actor(mode)) for mode in ("hpo_cispo", "cispo"))
    assert torch.equal(ours[0], expected[0]) and torch.equal(ours[1], expected[1])
    assert verl[1].isnan().any(), "verl reads them: see docs/verl.md"


def test_nothing_valid_is_a_connected_zero():
    batch = Batch()
    batch.fields["response_mask"] = [torch.zeros_like(mask) for mask in batch.fields["response_mask"]]
    for name in PRESETS:
        loss, gradient, logged = run(batch, actor(name))
        assert loss == 0 and (gradient == 0).all()
        assert all(value == 0 for value in logged.values())


def test_a_nan_at_a_valid_token_is_counted():
    batch = Batch()
    batch.fields["response_mask"][0][:] = True
    with torch.no_grad():
        batch.response(batch.logp)[0][0] = float("nan")
    loss, gradient, logged = run(batch, actor("hpo_ppo_clip"))
    assert loss.isfinite() and gradient.isfinite().all()
    assert logged["actor/hpo_nan_tokens"] == 1


# ------------------------------------------------------------------------------------------------ the contract


@pytest.mark.parametrize("name", [*PRESETS, "hpo_dapo"])
def test_signature_and_pickling(name):
    function = core_algos.get_policy_loss_fn(name)
    expected = inspect.signature(core_algos.compute_policy_loss_vanilla).parameters
    assert list(inspect.signature(function).parameters) == list(expected)
    assert pickle.loads(pickle.dumps(function)).keywords == function.keywords


def call(name, **fields):
    zeros = torch.zeros(2, 3)
    arguments = {"old_log_prob": zeros, "log_prob": zeros.clone().requires_grad_(), "advantages": zeros + 1}
    return core_algos.get_policy_loss_fn(name)(
        **{**arguments, "response_mask": zeros == 0, "loss_agg_mode": "token-mean", "config": actor(name), **fields}
    )


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("hpo_dapo", {"clip_ratio_high": 0.28, "clip_ratio_c": 10.0}, "clip_ratio_c: the gate 'dapo' does not read it"),
        ("hpo_dapo", {}, "clip_ratio_high: hpo_dapo clips higher"),
        ("hpo_cispo", {"clip_ratio_c": 10.0}, "clip_ratio_c: the gate 'cispo' does not read it"),
        ("hpo_gspo", {"clip_ratio_c": 10.0}, "clip_ratio_c: the gate 'gspo' does not read it"),
        ("hpo_gspo_token", {"clip_ratio_c": 10.0}, "clip_ratio_c: the gate 'gspo_token' does not read it"),
        ("hpo_gspo", {"policy_loss": {"dro_beta": 0.5}}, "dro_beta: the gate 'gspo' does not read it; got 0.5"),
        ("hpo_sapo", {"clip_ratio": 0.3}, "clip_ratio: the gate 'sapo' does not read it"),
        ("hpo_dro", {"tau_neg": 2.0}, "tau_neg: the gate 'dro' does not read it"),
        ("hpo_vespo", {"tau_pos": 1.5}, "tau_pos: the gate 'vespo' does not read it"),
        ("hpo_vespo", {"policy_loss": {"ppo_kl_coef": 9.0}}, "ppo_kl_coef: the gate 'vespo' does not read it"),
        ("hpo_vespo", {"policy_loss": {"kl_cov_ratio": 0.5}}, "kl_cov_ratio: the gate 'vespo' does not read it"),
        ("hpo_vespo", {"policy_loss": {"clip_cov_ratio": 0.5}}, "clip_cov_ratio: the gate 'vespo' does not read it"),
        ("hpo_ppo_clip", {"policy_loss": {"clip_cov_lb": 2.0}}, "clip_cov_lb: the gate 'ppo_clip' does not read it"),
        ("hpo_dapo", {"clip_ratio_high": 0.28, "policy_loss": {"clip_cov_ub": 2.0}}, "clip_cov_ub: the gate 'dapo'"),
        ("hpo_ppo_clip", {"clip_ratio_c": 1.0}, "clip_ratio_c: expected a ratio > 1"),
        ("hpo_dro", {"policy_loss": {"dro_beta": 0.0}}, "dro_beta: expected a number > 0, got 0"),
        ("hpo_ppo_clip", {"clip_ratio_low": -0.1}, "clip_ratio_low: expected an epsilon >= 0"),
        ("hpo_gspo", {"clip_ratio_high": -0.1}, "clip_ratio_high: expected an epsilon >= 0"),
    ],
)
def test_a_field_that_cannot_be_honoured_is_an_error(name, fields, message):
    if "policy_loss" in fields:
        fields = fields | {"policy_loss": workers.PolicyLossConfig(loss_mode=name, **fields["policy_loss"])}
    with pytest.raises(ValueError, match=f"^{message}"):
        call(name, config=actor(name, **fields))


def test_a_configuration_may_lack_the_fields_of_verl_s_losses():
    """A loop of one's own has no reason to set them."""
    from omegaconf import OmegaConf

    clips = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2}
    clips |= {"use_kl_loss": False, "kl_loss_coef": 0, "global_batch_info": {}}
    for config in (clips, clips | {"policy_loss": None}):
        assert call("hpo_gspo", config=OmegaConf.create(config))[0] == -1


def test_fields_that_are_none_fall_back():
    batch = Batch()
    fields = {"clip_ratio": 0.1, "clip_ratio_low": None, "clip_ratio_high": None}
    expected, ours = (run(batch, actor(mode, **fields)) for mode in ("vanilla", "hpo_ppo_clip"))
    close(ours, expected)


def test_an_epsilon_above_one_is_no_lower_bound():
    """verl's recipes switch CISPO's lower bound off with clip_ratio_low=10."""
    batch = Batch()
    expected, ours = (run(batch, actor(mode, clip_ratio_low=10.0)) for mode in ("cispo", "hpo_cispo"))
    close(ours, expected)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"config": None}, ValueError, "config: expected verl's ActorConfig"),
        ({"loss_agg_mode": "mean"}, ValueError, "loss_agg_mode: expected one of verl's"),
        ({"log_prob": torch.zeros(2, 3).bfloat16()}, TypeError, "logp: expected float32, got bfloat16"),
        ({"advantages": torch.zeros(2, 4)}, ValueError, "advantages"),
        ({"info": {"dp_size": 2}}, ValueError, "batch_num_tokens: 'token-mean' needs it"),
        (
            {"info": {"dp_size": 2}, "loss_agg_mode": "seq-mean-token-mean"},
            ValueError,
            "global_batch_size: 'seq-mean-token-mean' needs it",
        ),
    ],
)
def test_errors_name_the_argument(fields, error, message):
    if "info" in fields:
        fields = dict(fields)
        fields["config"] = actor("x", global_batch_info=fields.pop("info"))
    with pytest.raises(error, match=message):
        call("hpo_ppo_clip", **fields)


def test_register_a_gate_of_your_own():
    hpo_verl.register("hpo_mine", hpo.gates.ppo_clip(0.1, 0.3, ratio_dual=2.0))
    batch = Batch()
    expected = run(batch, actor("vanilla", clip_ratio_low=0.1, clip_ratio_high=0.3, clip_ratio_c=2.0))
    close(run(batch, actor("hpo_mine")), expected)
    for field, value in {"clip_ratio": 0.3, "clip_ratio_low": 0.1, "clip_ratio_high": 0.3, "clip_ratio_c": 2.0}.items():
        with pytest.raises(ValueError, match=f"^{field}: the gate 'ppo_clip' does not read it"):
            call("hpo_mine", config=actor("hpo_mine", **{field: value}))


def test_register_a_function_of_the_config():
    hpo_verl.register("hpo_annealed", lambda config: hpo.gates.ppo_clip(config.clip_ratio_low, 0.5))
    batch = Batch()
    expected = run(batch, actor("vanilla", clip_ratio_low=0.1, clip_ratio_high=0.5, clip_ratio_c=1e30))
    close(run(batch, actor("hpo_annealed", clip_ratio_low=0.1)), expected)


def test_register_refuses_what_is_no_gate():
    with pytest.raises(TypeError, match="gate: expected a RatioGate, or a function"):
        hpo_verl.register("hpo_wrong", "ppo_clip")
    with pytest.raises(TypeError, match=r"gate: expected .*, got the function gspo; call it: gspo\(\)"):
        hpo_verl.register("hpo_wrong", hpo.gates.gspo)
    with pytest.raises(TypeError, match="entropy: expected an EntropyWindow or a function that"):
        hpo_verl.register("hpo_wrong", hpo.gates.gspo(), entropy=1)
    hpo_verl.register("hpo_late", lambda config: hpo.gates.gspo)
    with pytest.raises(TypeError, match="gate: expected a RatioGate from the function of 'hpo_late', got the function"):
        call("hpo_late", config=actor("hpo_late"))
    deep = hpo.gates.reconstructed.fiberpo_domain()
    with pytest.raises(ValueError, match="gate: 'fiberpo_domain' has a level of domains, of which verl's micro-"):
        hpo_verl.register("hpo_deep", deep)
    hpo_verl.register("hpo_deep_later", lambda config: deep)
    with pytest.raises(ValueError, match="gate: 'fiberpo_domain' has a level of domains"):
        call("hpo_deep_later", config=actor("hpo_deep_later"))


def test_register_refuses_what_verl_cannot_give():
    gates = hpo.gates
    for gate, given, message in (
        (
            gates.kl_cov(),
            None,
            r"gate: 'kl_cov' needs penalty_mask, as from gates.kl_cov_mask\(logp, advantages, batch",
        ),
        (
            gates.hapo_clip(),
            lambda rewards: None,
            "gate_inputs: expected a function of logp, .* that needs rewards too",
        ),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            hpo_verl.register("hpo_wrong", gate, gate_inputs=given)
        hpo_verl.register("hpo_wrong_later", lambda config, gate=gate: gate, gate_inputs=given)
        with pytest.raises(ValueError, match=f"^{message}"):
            call("hpo_wrong_later", config=actor("hpo_wrong_later"))


def test_a_gate_gets_the_inputs_it_needs():
    """KL-Cov, with the covariances of the micro-batch, is verl's own."""
    hpo_verl.register(
        "hpo_kl_cov", hpo.gates.kl_cov(1.0), gate_inputs=functools.partial(hpo.gates.kl_cov_mask, share=0.1)
    )
    batch, fields = Batch(per_token=True), {"kl_cov_ratio": 0.1, "ppo_kl_coef": 1.0}
    of_verl = actor("kl_cov")
    for name, value in fields.items():
        object.__setattr__(of_verl.policy_loss, name, value)
    close(run(batch, actor("hpo_kl_cov")), run(batch, of_verl))


def names_found(variables):
    """The losses that are registered after an import of verl under these variables of the environment."""
    forget("verl", "hpo_core.integrations")
    os.environ.update(variables)
    importlib.import_module("verl")
    registry = importlib.import_module("verl.trainer.ppo.core_algos").POLICY_LOSS_REGISTRY
    return [name for name in registry if name.startswith("hpo_")]


@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_verl_finds_us(monkeypatch):
    """It finds a plugin, and an external module."""
    for name in ("VERL_USE_EXTERNAL_PLUGINS", "VERL_USE_EXTERNAL_MODULES"):
        monkeypatch.delenv(name, raising=False)
    names = [f"hpo_{name}" for name in (*CONFIGURED, *hpo_verl.PRESETS)]
    external = {"VERL_USE_EXTERNAL_PLUGINS": "none", "VERL_USE_EXTERNAL_MODULES": "hpo_core.integrations.verl"}
    assert apart(names_found, {"VERL_USE_EXTERNAL_PLUGINS": "hpo_core"}) == names
    assert apart(names_found, external) == names
    assert apart(names_found, {"VERL_USE_EXTERNAL_PLUGINS": "none"}) == []
