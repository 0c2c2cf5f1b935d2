"""The trainer of the ms-swift integration against swift's own on scored micro-batches; `make test-trainers` installs
it."""

import importlib
import sys
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from lazily import skip_without
from trainer_batches import LENGTH, ROWS, Batch, close, integration

import hpo_core as hpo

skip_without("swift")
pytestmark = pytest.mark.peers

# Arguments of swift, and whether some policy terms must then be clipped or left out
ARGUMENTS = {
    "grpo": ({"loss_type": "grpo", "epsilon_high": 0.28}, True),
    "bnpo": ({"loss_type": "bnpo"}, True),
    "dr_grpo and kl": ({"loss_type": "dr_grpo", "beta": 0.04}, False),
    "dapo": ({"loss_type": "dapo"}, True),
    "no lower clip": ({"loss_type": "dapo", "epsilon": 2.0, "epsilon_high": 0.2}, True),
    "delta": ({"loss_type": "dapo", "delta": 1.4}, True),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.5}, False),
    "sapo": ({"loss_type": "sapo", "tau_pos": 1.5}, False),
    "sequence": ({"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.02}, True),
    "no lower clip of sequences": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 2.0, "epsilon_high": 0.02},
        True,
    ),
    "sequence_token": ({"loss_type": "grpo", "importance_sampling_level": "sequence_token", "epsilon": 0.02}, True),
    **{
        f"{level} and delta": (
            {"loss_type": "grpo", "importance_sampling_level": level, "epsilon": 0.1, "delta": 1.15},
            True,
        )
        for level in ("sequence", "sequence_token")
    },
    "overlong": ({"loss_type": "bnpo", "overlong_filter": True}, True),
    "entropies": ({"loss_type": "dapo", "top_entropy_quantile": 0.4}, True),
    "off-policy sequences": ({"loss_type": "bnpo", "off_policy_sequence_mask_delta": 0.02}, True),
    "truncated": ({"loss_type": "dapo", "rollout_importance_sampling_mode": "token_truncate"}, True),
    "masked sequences": ({"loss_type": "grpo", "rollout_importance_sampling_mode": "sequence_mask"}, True),
}


@pytest.fixture(scope="module")
def swift():
    trainers = importlib.import_module("swift.rlhf_trainers.grpo_trainer")
    importlib.import_module("accelerate").PartialState(cpu=True)
    return trainers


@pytest.fixture(scope="module")
def ours(swift):
    return integration("ms_swift")


def trainer(kind, logp, entropy, arguments, gate=None):
    """One of this class with what its loss reads of it, and scores in place of a model's."""
    told = {
        "beta": 0.0, "delta": None, "epsilon": 0.2, "epsilon_high": None, "importance_sampling_level": "token",
        "off_policy_sequence_mask_delta": None, "overlong_filter": False, "rollout_importance_sampling_mode": None,
        "top_entropy_quantile": 1.0, "tau_pos": 1.0, "tau_neg": 1.05, **arguments,
    }  # fmt: skip
    scored = type("Scored", (kind,), {})
    made = scored.__new__(scored)
    made.args = SimpleNamespace(
        delta=told["delta"], log_entropy=False, top_entropy_quantile=told["top_entropy_quantile"],
        gradient_accumulation_steps=2,
    )  # fmt: skip
    epsilon_high = told["epsilon"] if told["epsilon_high"] is None else told["epsilon_high"]
    made.__dict__ |= {
        **{name: told[name] for name in told if name not in ("delta", "epsilon", "epsilon_high")},
        "epsilon_low": told["epsilon"], "epsilon_high": epsilon_high,
        "compute_entropy": told["top_entropy_quantile"] < 1, "kl_in_reward": False, "sdar_loss_coef": 0.0,
        "log_rollout_offpolicy_metrics": False, "disable_rollout_importance_sampling": False, "_has_teacher": False,
        "rollout_importance_sampling_threshold": 1.1, "max_completion_length": 20, "chord_sft_iterator": None,
        "model": SimpleNamespace(training=True), "_metrics": {"train": defaultdict(list)}, "use_liger_loss": False,
        "accelerator": SimpleNamespace(num_processes=2, gather_for_metrics=lambda x: x.reshape(-1, *x.shape[1:])),
        "model_accepts_loss_kwargs": False, "compute_loss_func": None, "current_gradient_accumulation_steps": 2,
    }  # fmt: skip
    base = kind.__mro__[1] if hasattr(kind, "gate") else kind
    made.gate = gate
    return made, base, (logp, entropy if made.compute_entropy else None)


def run(kind, swift, batch, arguments, gate=None):
    leaf = batch.logp.clone().requires_grad_()
    entropy = torch.rand(ROWS, LENGTH, generator=torch.Generator().manual_seed(5))
    made, base, scores = trainer(kind, leaf, entropy, arguments, gate)
    if gate is not None or hasattr(kind, "gate"):
        made._check_arguments()
    of_rollout = "rollout_importance_sampling_mode" in arguments or (gate is not None and gate.reads_rollout)
    rows = SimpleNamespace(
        completion_mask=batch.mask, truncated_mask=torch.arange(ROWS) == 1, advantages=batch.advantages,
        old_per_token_logps=batch.old, ref_per_token_logps=batch.ref, num_items_in_batch=torch.tensor(230),
        rollout_per_token_logps=batch.rollout if of_rollout else None,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "_get_per_token_logps_and_entropies", lambda self, *_, **__: scores)
        loss, metrics = made._compute_loss_and_metrics(None, {}, rows)
    (grad,) = torch.autograd.grad(loss, leaf)
    return (loss.detach(), grad), metrics, made


@pytest.mark.parametrize(
    "arguments",
    [
        {"loss_type": "grpo", "rollout_importance_sampling_mode": "sequence_mask"},
        {"loss_type": "grpo", "rollout_importance_sampling_mode": "sequence_truncate"},
        {"loss_type": "bnpo", "off_policy_sequence_mask_delta": 0.02},
    ],
)
def test_masked_positions_are_never_read(arguments, swift, ours):
    batch, poisoned = Batch(per_token=True), Batch(per_token=True)
    for name in ("logp", "old", "rollout", "ref", "advantages"):
        setattr(poisoned, name, poisoned.poisoned(getattr(batch, name)))
    (one, expected), (other, found) = (
        run(ours.HPOSwiftTrainer, swift, each, arguments)[0] for each in (batch, poisoned)
    )
    assert torch.equal(other, one) and torch.equal(found, expected) and expected.any()


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_equals_swift(arguments, swift, ours):
    told, stops = ARGUMENTS[arguments]
    stopped = 0.0
    for seed in range(3):
        batch = Batch(seed, empty_row=seed == 1, per_token=seed == 2)
        expected, metrics, _ = run(swift.GRPOTrainer, swift, batch, told)
        found, own, _ = run(ours.HPOSwiftTrainer, swift, batch, told)
        close(found, expected)
        assert own.keys() == metrics.keys() and own.get("clipping") == metrics.get("clipping")
        stopped += (expected[1][batch.mask] == 0).float().mean()
    assert not stops or stopped > 0.1, "nothing was clipped: the comparison says little"


@pytest.mark.parametrize("gap", [2.0, 4.0, 25.0, -13.0])
def test_the_penalty_is_swifts_clamped_k3(gap, swift, ours):
    batch, told = Batch(), {"loss_type": "grpo", "beta": 0.04, "top_entropy_quantile": 0.4}
    batch.ref[1, :3] = batch.logp[1, :3] + gap
    expected, found = (run(kind, swift, batch, told)[0] for kind in (swift.GRPOTrainer, ours.HPOSwiftTrainer))
    close(found, expected)


def test_another_gate_keeps_denominators_and_corrections(swift, ours):
    batch, told = Batch(), {"loss_type": "grpo", "rollout_importance_sampling_mode": "token_truncate"}
    gate = hpo.gates.step_gspo(0.02, 0.03)
    found, logged, made = run(ours.HPOSwiftTrainer, swift, batch, told, gate)
    assert "clipping" not in logged, "swift's clip is not in use"
    leaf = batch.logp.clone().requires_grad_()
    rows = importlib.import_module("hpo_core.integrations.micro_batch").padded_rows(batch.mask, gate)
    out = hpo.policy_loss(
        leaf, batch.old, batch.advantages, rows, gate, advantage_level="token",
        weights=hpo.aggregation.seq_mean_token_mean(rows, total=ROWS),
        token_weight=torch.exp(batch.old - batch.rollout).clamp(max=1.1),
    )  # fmt: skip
    close(found, (out.loss.detach(), torch.autograd.grad(out.loss, leaf)[0]))
    assert len(made._metrics["train"]["hpo_core/clipped"]) == 1


@pytest.mark.parametrize(
    ("arguments", "gate", "said"),
    [
        ({"loss_type": "real"}, None, "loss_type"),
        ({"loss_type": "fipo"}, None, "loss_type"),
        ({"loss_type": "cispo", "importance_sampling_level": "sequence"}, None, "importance_sampling_level"),
        ({"loss_type": "dapo", "delta": 1.1}, None, "delta: expected >= 1 "),
        ({"loss_type": "grpo", "epsilon": 0.1}, hpo.gates.gspo(), "epsilon: the gate 'gspo' does not read it"),
        ({"loss_type": "grpo", "epsilon_high": 0.5}, hpo.gates.gspo(), "epsilon_high: the gate 'gspo'"),
        ({"loss_type": "grpo", "delta": 2.0}, hpo.gates.gspo(), "delta"),
        ({"loss_type": "sapo", "tau_pos": 2.0}, hpo.gates.gspo(), "tau_pos: the gate 'gspo' does not read it"),
        ({"loss_type": "sapo", "tau_neg": 2.0}, hpo.gates.gspo(), "tau_neg: the gate 'gspo' does not read it"),
        (
            {"loss_type": "grpo", "rollout_importance_sampling_mode": "token_mask"},
            hpo.gates.icepop(),
            "correct the same difference",
        ),
        ({"loss_type": "grpo"}, hpo.gates.reconstructed.fiberpo_domain(), "level of groups"),
    ],
)
def test_refusals(arguments, gate, said, swift, ours):
    with pytest.raises(ValueError, match=said):
        run(ours.HPOSwiftTrainer, swift, Batch(), arguments, gate)


def test_swift_finds_the_trainer_and_the_gate(swift, ours, monkeypatch):
    factory = importlib.import_module("swift.trainers.trainer_factory").TrainerFactory
    monkeypatch.setitem(factory.TRAINER_MAPPING, "grpo", factory.TRAINER_MAPPING["grpo"])
    monkeypatch.setattr(ours.HPOSwiftTrainer, "gate", None)
    ours.use(hpo.gates.dapo())
    module, _, name = factory.TRAINER_MAPPING["grpo"].rpartition(".")
    assert getattr(importlib.import_module(module), name) is ours.HPOSwiftTrainer
    assert ours.HPOSwiftTrainer.gate == hpo.gates.dapo()
    with pytest.raises(TypeError, match="expected a RatioGate"):
        ours.use("gspo")
    monkeypatch.setitem(sys.modules, "swift.megatron", None)
    with pytest.raises(ValueError, match="'megatron rlhf' has trainers of its own"):
        ours.use(hpo.gates.dapo())
