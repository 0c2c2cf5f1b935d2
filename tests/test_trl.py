"""HPOTrainer against TRL's own GRPOTrainer: one micro-batch in every setting, and whole training runs."""

from __future__ import annotations

import functools
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lazily import Lazy, skip_without
from trainers import LENGTH, ROWS, build, loss_of, micro_batch
from trl_runs import DEEP, differences, run

import hpo_core as hpo
from hpo_core.integrations import trl_entropy

skip_without("trl")
hpo_trl, trl = Lazy("hpo_core.integrations.trl"), Lazy("trl")

pytestmark = pytest.mark.peers


def assert_same_loss(trainer, inputs, scored):
    """Both losses of one trainer: value, gradient, and every metric TRL logs."""
    loss, grad, metrics = loss_of(hpo_trl.HPOTrainer._compute_loss, trainer, inputs, scored, poison=math.nan)
    expected_loss, expected_grad, expected_metrics = loss_of(trl.GRPOTrainer._compute_loss, trainer, inputs, scored)
    torch.testing.assert_close(loss, expected_loss, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(grad, expected_grad, rtol=5e-6, atol=1e-7)
    assert (grad[~scored.valid] == 0).all()
    assert {key for key in metrics if not key.startswith("hpo_core/")} == set(expected_metrics)
    for key, value in expected_metrics.items():
        assert metrics[key] == pytest.approx(value, rel=1e-5, abs=1e-7), key
    return metrics


SETTINGS = {
    **{kind: {"loss_type": kind} for kind in ("dapo", "bnpo", "grpo", "dr_grpo", "luspo")},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.2},
    "asymmetric": {"epsilon": 0.1, "epsilon_high": 0.3},
    "wide": {"epsilon": 1.5},
    "delta": {"delta": 1.4},
    "kl": {"beta": 0.1},
    "kl without correction": {"beta": 0.1, "use_bias_correction_kl": False, "loss_type": "grpo"},
    "cispo with kl": {"loss_type": "cispo", "epsilon_high": 1.2, "beta": 0.1},
    "sapo": {"loss_type": "sapo", "sapo_temperature_pos": 0.8},
    "vespo": {"loss_type": "vespo"},
    "vespo, other shapes": {"loss_type": "vespo", "vespo_k_pos": 1.0, "vespo_lambda_pos": 0.0, "vespo_k_neg": 1.5},
    "off-policy mask": {"off_policy_mask_threshold": 0.05},
    "sapo, off-policy mask and kl": {"loss_type": "sapo", "off_policy_mask_threshold": 0.01, "beta": 0.1},
    "entropy": {"top_entropy_quantile": 0.3},
    "entropy with kl": {"top_entropy_quantile": 0.3, "beta": 0.1},
    "entropy bonus": {"entropy_coef": 0.2},
    "entropy bonus of some tokens": {"entropy_coef": -0.2, "top_entropy_quantile": 0.3, "loss_type": "bnpo"},
    **{
        f"sequence {name}": {"importance_sampling_level": "sequence", "epsilon": 0.03} | config
        for name, config in {
            **{kind: {"loss_type": kind} for kind in ("dapo", "grpo", "luspo")},
            "cispo": {"loss_type": "cispo", "epsilon_high": 1.02},
            "delta": {"delta": 1.05},
            "kl": {"beta": 0.1, "use_bias_correction_kl": False},
            "entropy": {"top_entropy_quantile": 0.3},
        }.items()
    },
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_one_micro_batch_equals_trl(setting, tmp_path):
    config = SETTINGS[setting]
    trainer = build(hpo_trl.HPOTrainer, tmp_path, gradient_accumulation_steps=2, **config)
    trainer.current_gradient_accumulation_steps = 2
    inputs, scored = micro_batch()
    metrics = assert_same_loss(trainer, inputs, scored)
    kind = config.get("loss_type", "dapo")
    if kind not in ("sapo", "vespo"):
        clipped = metrics["cispo_clip_ratio" if kind == "cispo" else "clip_ratio/region_mean"]
        assert clipped > 0 or setting == "wide"

    # sampled by vLLM: a weight per token or per sequence, on the policy term only
    trainer.use_vllm = True
    token_weight = torch.rand(ROWS, LENGTH) * 2
    for weight in (token_weight, token_weight[:, :1]) if kind != "vespo" else ():  # there this is refused
        assert_same_loss(trainer, inputs | {"importance_sampling_ratio": weight}, scored)
    if kind != "vespo":  # switched off by a callback: rollouts in the buffer keep their weights, the loss takes none
        trainer.vllm_importance_sampling_correction = False
        assert_same_loss(trainer, inputs | {"importance_sampling_ratio": token_weight}, scored)
        trainer.vllm_importance_sampling_correction = True
    trainer.use_vllm = False
    if "off_policy_mask_threshold" in config:
        sampler = inputs["old_per_token_logps"] + torch.tensor([math.nan, 0.1, 0.3] * (LENGTH // 3))
        assert_same_loss(trainer, inputs | {"sampling_per_token_logps": sampler}, scored)

    trainer.model.eval()
    assert_same_loss(trainer, inputs, scored)
    trainer.model.train()
    assert_same_loss(trainer, *micro_batch(seed=1, per_token_advantages=True))
    assert_same_loss(trainer, inputs | {"advantages": inputs["advantages"][:, None]}, scored)
    without = {key: value for key, value in inputs.items() if key not in ("old_per_token_logps", "tool_mask")}
    everything = SimpleNamespace(**vars(scored) | {"valid": inputs["completion_mask"] != 0})
    assert_same_loss(trainer, without, everything)


def test_an_asked_backend_is_used(tmp_path):
    trainer = build(hpo_trl.HPOTrainer, tmp_path, extra={"backend": "reference"}, beta=0.1, top_entropy_quantile=0.3)
    trainer.current_gradient_accumulation_steps = 1
    assert trainer._hpo.backend == "reference"
    assert_same_loss(trainer, *micro_batch())


def test_a_wrong_clip_is_noticed(tmp_path):
    trainer = build(hpo_trl.HPOTrainer, tmp_path, extra={"gate": hpo.gates.ppo_clip(0.21, 0.21)})
    trainer.current_gradient_accumulation_steps = 1
    with pytest.raises(AssertionError):
        assert_same_loss(trainer, *micro_batch())


SCHEDULED = {"beta": 0.7, "epsilon_high": 0.05, "epsilon_low": 0.1, "top_entropy_quantile": 0.4, "loss_type": "bnpo"}


def test_what_a_callback_changes_in_training_counts(tmp_path):
    trainer = build(hpo_trl.HPOTrainer, tmp_path, beta=0.1)
    trainer.current_gradient_accumulation_steps = 1
    assert_same_loss(trainer, *micro_batch())
    for name, value in SCHEDULED.items():
        setattr(trainer, name, value)
        assert_same_loss(trainer, *micro_batch())
    trainer.args.delta = 1.3
    assert_same_loss(trainer, *micro_batch())
    trainer.args.use_bias_correction_kl = False
    assert_same_loss(trainer, *micro_batch())
    trainer.importance_sampling_level = "sequence"
    assert_same_loss(trainer, *micro_batch())
    trainer.loss_type = "unheard of"
    with pytest.raises(ValueError, match=r"^loss_type: expected one of"):
        assert_same_loss(trainer, *micro_batch())


@pytest.mark.parametrize(
    ("extra", "name"),
    [
        ({"gate": hpo.gates.dapo()}, "epsilon_high"),
        ({"window": hpo.entropy.ares()}, "top_entropy_quantile"),
        ({"advantage": hpo.advantages.grpo}, "scale_rewards"),
        ({"advantage": hpo.advantages.grpo}, "multi_objective_aggregation"),
    ],
)
def test_a_change_that_an_argument_silences_is_refused(extra, name, tmp_path):
    trainer = build(hpo_trl.HPOTrainer, tmp_path, extra=extra)
    setattr(trainer, name, 0.3)
    with pytest.raises(ValueError, match=f"^{name}: changed from .* to 0.3 .*; {next(iter(extra))}= replaces it"):
        trainer._compute_loss(None, {})
    trainer = build(hpo_trl.HPOTrainer, tmp_path, extra=extra, beta=0.1)
    trainer.beta, trainer.current_gradient_accumulation_steps = 0.5, 1
    loss_of(hpo_trl.HPOTrainer._compute_loss, trainer, *micro_batch())
    assert trainer._hpo.kl.beta == 0.5 and trainer._hpo.gate == extra.get("gate", trainer._hpo.gate)


def test_no_valid_token_gives_a_zero_that_can_be_differentiated(tmp_path):
    inputs, scored = micro_batch()
    inputs["completion_mask"] = torch.zeros_like(inputs["completion_mask"])
    scored.valid[:] = False
    for config in ({}, {"loss_type": "grpo"}, {"loss_type": "bnpo", "top_entropy_quantile": 0.3}):
        trainer = build(hpo_trl.HPOTrainer, tmp_path, **config)
        trainer.current_gradient_accumulation_steps = 1
        loss, grad, metrics = loss_of(hpo_trl.HPOTrainer._compute_loss, trainer, inputs, scored, poison=math.nan)
        assert loss == 0 and metrics["entropy"] == 0.0  # as TRL logs it
        assert (grad == 0).all()


def test_autocast_changes_nothing(tmp_path):
    trainer = build(hpo_trl.HPOTrainer, tmp_path, beta=0.1, top_entropy_quantile=0.3)
    trainer.current_gradient_accumulation_steps = 1
    inputs, scored = micro_batch()
    expected = loss_of(hpo_trl.HPOTrainer._compute_loss, trainer, inputs, scored)
    with torch.autocast("cpu", torch.bfloat16):
        loss, grad, metrics = loss_of(hpo_trl.HPOTrainer._compute_loss, trainer, inputs, scored)
    assert torch.equal(loss, expected[0])
    assert torch.equal(grad, expected[1])
    assert metrics == expected[2]


def test_auxiliary_loss_of_experts(tmp_path):
    trainer = build(hpo_trl.HPOTrainer, tmp_path)
    trainer.current_gradient_accumulation_steps = 2
    trainer.aux_loss_enabled, trainer.router_aux_loss_coef = True, 0.5
    inputs, scored = micro_batch()
    results = []
    for compute_loss in (hpo_trl.HPOTrainer._compute_loss, trl.GRPOTrainer._compute_loss):
        aux = torch.tensor(3.0, requires_grad=True)
        logps = scored.logps.clone().requires_grad_()
        trainer._get_per_token_logps_and_entropies = lambda *_, a=aux, x=logps, **__: (x, scored.entropies, a)
        loss = compute_loss(trainer, None, inputs)
        loss.backward()
        results.append((loss.item(), aux.grad.item(), trainer._metrics["train"]["aux_loss"].pop()))
    assert results[0] == pytest.approx(results[1], rel=1e-6)


def test_the_adaptive_bonus_moves_between_its_bounds():
    """TRL's rule on five steps of two micro-batches with these entropies, of which the mean is that of both."""
    trainer = SimpleNamespace(
        args=SimpleNamespace(entropy_target=1.0, entropy_coef_delta=0.25, entropy_coef_min=0.125, entropy_coef_max=0.5),
        use_adaptive_entropy=True, entropy_coef=0.375, _last_world_entropy=0.0, _entropy_window_stats=None,
        model=SimpleNamespace(training=True), _metrics={"train": {"entropy_coef": []}},
        accelerator=SimpleNamespace(reduce=lambda sums, reduction: sums),
    )  # fmt: skip
    steps, bonuses = ((0.5, 1.5), (0.0, 0.5), (3.0, 0.0), (3.0, 3.0), (3.0, 3.0)), []
    for step in steps:
        for trainer.accelerator.sync_gradients, entropy in zip((False, True), step, strict=True):
            entropies = torch.tensor([[entropy, 9.0, entropy]])
            bonuses.append(trl_entropy.entropy_bonus(trainer, entropies, entropies < 9, 2).item())
    assert trainer._metrics["train"]["entropy_coef"] == [0.5, 0.5, 0.25, 0.125, 0.125]
    assert bonuses == [0.375 / 4, 0.375 * 0.75, 0.0, 0.125, 0.75, 0.0, 0.0, 0.0, 0.0, 0.0]


# -------------------------------------------------------------------------------------------------------- whole runs


RUNS = {
    "dapo": {},
    "dapo, accumulated, two iterations": {"gradient_accumulation_steps": 4, "num_iterations": 2},
    "bnpo, accumulated": {"loss_type": "bnpo", "gradient_accumulation_steps": 2},
    "grpo, two iterations": {"loss_type": "grpo", "num_iterations": 2},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.1},
    "sequence": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-3, "epsilon_high": 4e-3},
    "on-policy, accumulated": {"gradient_accumulation_steps": 4},
    "on-policy, adaptive entropy bonus": {
        "gradient_accumulation_steps": 2,
        "use_adaptive_entropy": True,
        "entropy_target": 2.5,
        "entropy_coef_delta": 0.1,
        "entropy_coef_max": 0.3,
    },
}


@pytest.fixture(scope="module")
def trl_run(tmp_path_factory):
    """TRL's own run of a setting, trained once."""
    return functools.cache(lambda name: run(trl.GRPOTrainer, tmp_path_factory.mktemp("trl"), **RUNS[name]))


OFTEN = ("dapo, accumulated, two iterations", "bnpo, accumulated", "cispo", "sequence")  # the rest is long


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.long) for name in RUNS]
)
def test_training_equals_trl(name, trl_run, tmp_path, monkeypatch):
    """The loss alone: both score with TRL's head."""
    monkeypatch.setattr(hpo_trl.module(), "give_head", lambda model, backend: None)
    ours, theirs = run(hpo_trl.HPOTrainer, tmp_path, **RUNS[name]), trl_run(name)
    difference = differences(ours, theirs)
    assert ours.tokens == theirs.tokens
    assert difference.loss <= 2e-5
    assert difference.norm <= 2e-5
    assert difference.parameters <= 1e-6
    key = "cispo_clip_ratio" if name == "cispo" else "clip_ratio/region_mean"
    clipped = [entry[key] for entry in theirs.logs if key in entry]
    assert max(clipped) > 0 or name.startswith("on-policy")
    for entry, expected in zip(ours.logs, theirs.logs, strict=True):
        for metric in expected:
            if metric.startswith(("clip", "cispo", "entropy", "reward", "completions")):
                assert entry[metric] == pytest.approx(expected[metric], rel=1e-4, abs=1e-6), metric


def test_training_with_our_head_equals_trl(trl_run, tmp_path, monkeypatch):
    """It is as far from TRL's as a run of TRL's own whose vocabulary is summed up in other chunks."""
    ours, theirs = run(hpo_trl.HPOTrainer, tmp_path, **RUNS["dapo"]), trl_run("dapo")
    monkeypatch.setattr("trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE", 5)
    rounding = differences(run(trl.GRPOTrainer, tmp_path, **RUNS["dapo"]), theirs)
    difference = differences(ours, theirs)
    assert ours.tokens == theirs.tokens
    assert difference.loss <= 2e-5 and difference.norm <= 2e-5
    assert 0 < difference.parameters <= 3 * rounding.parameters


def test_another_epsilon_is_another_run(trl_run, tmp_path):
    difference = differences(run(hpo_trl.HPOTrainer, tmp_path, epsilon=0.21), trl_run("dapo"))
    assert difference.loss > 2e-5 or difference.norm > 2e-5
    assert difference.parameters > 1e-6


def test_evaluation_equals_trl(tmp_path):
    logged = []
    for kind in (hpo_trl.HPOTrainer, trl.GRPOTrainer):
        trainer = build(kind, tmp_path, eval_dataset=True, per_device_eval_batch_size=16)
        torch.manual_seed(0)
        logged.append(trainer.evaluate())
    for key, value in logged[1].items():
        if not key.endswith(("time", "per_second")):
            assert logged[0][key] == pytest.approx(value, rel=1e-5, abs=1e-6), key


def test_an_estimator_sees_whole_groups(trl_run, tmp_path):
    """TRL's own normalisation, computed by ours: the same run, although micro-batches hold parts of groups."""
    calls = []

    def estimator(rewards, group_ids, **keywords):
        calls.append((rewards.numel(), group_ids))
        return hpo.advantages.grpo(rewards, group_ids, eps=1e-4, **keywords)

    ours, theirs = run(hpo_trl.HPOTrainer, tmp_path, extra={"advantage": estimator}), trl_run("dapo")
    difference = differences(ours, theirs)
    assert ours.tokens == theirs.tokens
    assert difference.norm <= 2e-5
    assert difference.parameters <= 1e-5  # ours computes deviations in float64, TRL in float32
    assert [units for units, _ in calls] == [64] * 3  # the generation batch, once per rollout
    assert torch.equal(calls[0][1], torch.arange(64) // 8)


# ------------------------------------------------------------------------------------------------- several processes


def compare_in_this_process(folder):
    """Body of each process of the test below: groups of 16 span two processes of 8 completions."""
    common = {"per_device_train_batch_size": 4, "steps_per_generation": 2, "num_generations": 16, "max_steps": 10}
    estimator = functools.partial(hpo.advantages.grpo, eps=1e-4)  # what TRL computes
    ares = hpo.entropy.ares(2, "0.5")
    for extra, config in (({}, {"top_entropy_quantile": 0.3}), ({"advantage": estimator}, {"loss_type": "bnpo"})):
        ours = run(hpo_trl.HPOTrainer, folder, extra=extra, **common, **config)
        theirs = run(trl.GRPOTrainer, folder, **common, **config)
        difference = differences(ours, theirs)
        assert torch.distributed.get_world_size() == 2
        assert ours.tokens == theirs.tokens
        assert difference.loss <= 2e-5
        assert difference.norm <= 2e-5
        assert difference.parameters <= 1e-5
        for entry, expected in zip(ours.logs, theirs.logs, strict=True):
            for metric in expected:
                if metric.startswith(("clip", "entropy", "reward")):
                    assert entry[metric] == pytest.approx(expected[metric], rel=1e-4, abs=1e-6), metric
    whole = {"max_steps": 3, "per_device_train_batch_size": 8, "steps_per_generation": 1}
    deep = run(hpo_trl.HPOTrainer, folder, extra={"gate": DEEP, "domain": "kind"}, **common | whole)
    assert all(math.isfinite(entry["loss"]) for entry in deep.logs if "loss" in entry)
    result = run(hpo_trl.HPOTrainer, folder, extra={"window": ares}, **common)
    fractions = [entry["hpo_core/selected_fraction"] for entry in result.logs if "hpo_core/selected_fraction" in entry]
    assert sum(fractions[:2]) / 2 == pytest.approx(0.46, abs=0.06)


@pytest.mark.long
def test_two_processes_equal_trl(tmp_path):
    script = tmp_path / "compare.py"
    script.write_text(
        "import pathlib, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import test_trl\n"
        f"test_trl.compare_in_this_process(pathlib.Path({str(tmp_path)!r}))\n"
    )
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    finished = subprocess.run(launch, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr[-6000:]
