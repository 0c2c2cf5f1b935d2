"""The integrations of trainers as far as they run without them: on tensors as the trainer hands them over, against
formulas of its own loss. `make test-trainers` runs those that install against the trainer itself."""

from unittest import mock

import pytest
import torch
from trainer_batches import Batch, clipped, equal, gradient, integration, masked, modules

import hpo_core as hpo
from hpo_core import gates
from hpo_core.integrations.micro_batch import check_gate, fractions, packed_rows, padded_rows
from hpo_core.integrations.named import named_estimator, named_gate, named_window


@pytest.fixture(autouse=True)
def no_gate_in_the_environment(monkeypatch):
    monkeypatch.delenv("HPO_GATE", raising=False)


# --------------------------------------------------------------------------------------------- names in configurations


def test_a_text_names_a_gate():
    assert named_gate("gspo") == gates.gspo()
    assert named_gate("gspo(3e-4, eps_high=4e-4)") == gates.gspo(3e-4, 4e-4)
    assert named_gate("icepop(0.5, 4.0, gate=ppo_clip(ratio_dual=3.0))") == gates.icepop(
        0.5, 4.0, gate=gates.ppo_clip(ratio_dual=3.0)
    )
    assert named_gate("ppo_clip(ratio_dual=None)") == gates.ppo_clip()
    assert named_gate(gates.dapo()) == gates.dapo()
    assert named_gate("reconstructed.p3o(0.1)") == gates.reconstructed.p3o(0.1)


def test_a_text_names_windows_and_estimators():
    assert named_window("ares") == hpo.entropy.ares()
    rewards, groups = torch.tensor([1.0, 0.0, 3.0]), torch.zeros(3).long()
    expected = hpo.advantages.grpo(rewards, groups, eps=1.0)
    assert torch.equal(named_estimator("grpo(eps=1.0)")(rewards, groups), expected)
    assert named_estimator("rloo") is hpo.advantages.rloo


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gpso", "did you mean 'gspo'"),
        ("gspo(", "expected one call"),
        ("__import__('os').system('true')", "no function"),
        ("gspo(eps_low=open('x'))", "no function 'open'"),
        ("gspo(*[1])", "without"),
        ("gspo(**{})", "without"),
        ("gspo(1 if True else 2)", "expected numbers"),
        ("RatioGate", "no function"),
        ("GateInputs()", "no function"),
        ("os.system('true')", "no function"),
        ("3", "expected a RatioGate"),
        ("gspo(eps_low=1.2)", "eps_low"),
    ],
)
def test_a_text_that_names_no_gate_is_refused(text, said):
    with pytest.raises((ValueError, TypeError), match=said):
        named_gate(text)


def test_an_estimator_takes_arguments_by_name():
    with pytest.raises(ValueError, match="by name"):
        named_estimator("grpo(1.0)")


# ------------------------------------------------------------------------------------------------------ rows and gates


def test_steps_are_the_runs_of_valid_tokens_packed_as_padded():
    batch = Batch()
    gate = gates.step_gspo()
    padded = padded_rows(batch.mask.float(), gate)
    packed = packed_rows(batch.cu_seqlens(), batch.packed(batch.mask).long(), gate)
    assert torch.equal(padded.row_of_step(), packed.row_of_step()) and padded.row_of_step().numel() > 6
    arguments = (batch.logp, batch.old, batch.advantages)
    one = hpo.policy_loss(*arguments, padded, gate, advantage_level="token")
    other = hpo.policy_loss(*map(batch.packed, arguments), packed, gate, advantage_level="token")
    torch.testing.assert_close(one.loss, other.loss)


def test_rows_that_touch_are_two_steps_and_an_empty_row_is_none():
    cu, mask = torch.tensor([0, 2, 2, 4]), torch.ones(4).bool()
    assert packed_rows(cu, mask, gates.step_gspo()).row_of_step().tolist() == [0, 2]
    assert packed_rows(torch.tensor([0, 4, 4]), mask, gates.step_gspo()).row_of_step().tolist() == [0]


def test_fractions_of_clipped_and_dual_clipped_tokens():
    logp, advantages = torch.tensor([[0.5, -0.5, 1.5, 0.0]]), torch.tensor([[1.0, -1.0, -1.0, 1.0]])
    gate = gates.ppo_clip(ratio_dual=3.0)
    out = hpo.policy_loss(logp, torch.zeros(1, 4), advantages, torch.ones(1, 4).bool(), gate, advantage_level="token")
    assert fractions(out.metrics, gate) == {"tokens": 4.0, "clipped": 0.5, "dual_clipped": 0.25, "kl": -0.375}
    logp[0, 3] = torch.nan
    out = hpo.policy_loss(logp, torch.zeros(1, 4), advantages, torch.ones(1, 4).bool(), gate, advantage_level="token")
    assert fractions(out.metrics, gate)["nan_tokens"] == 1.0


@pytest.mark.parametrize(
    ("gate", "said"),
    [
        (gates.reconstructed.fiberpo_domain(), "level of groups"),
        (gates.kl_cov(), "needs"),
    ],
)
def test_a_gate_that_a_trainer_cannot_serve_is_refused_by_name(gate, said):
    with pytest.raises(ValueError, match=f"gate: '{gate.name}' .*{said}"):
        check_gate(gate, "a trainer")


# ------------------------------------------------------------------------------------------------------------ OpenRLHF
# PolicyLoss of openrlhf/models/loss.py, 0.11.2.


def test_openrlhf():
    loss = integration("openrlhf").HPOPolicyLoss
    batch, counts = Batch(), {"dp_size": 2, "batch_num_tokens": 60.5, "global_batch_size": 9.5}
    arguments = {"action_mask": batch.mask.long(), "rollout_log_probs": batch.poisoned(batch.rollout)}

    def ours(logp, **flags):
        return loss(**flags)(logp, batch.poisoned(batch.old), batch.advantages, **arguments, **counts)

    def theirs(logp, per_token):
        terms = masked(clipped(logp, batch.old, batch.advantages, 0.2, 0.28), batch.mask)
        return terms.sum() / 60.5 * 2 if per_token else (terms.sum(1) / batch.mask.sum(1)).sum() / 9.5 * 2

    for per_token in (True, False):
        equal(
            lambda logp, x=per_token: ours(logp, clip_eps_high=0.28, token_level_loss=x),
            lambda logp, x=per_token: theirs(logp, x),
            batch.logp,
        )
    gradients = gradient(lambda logp: ours(batch.poisoned(logp)), batch.logp)
    assert torch.isfinite(gradients[0]) and torch.isfinite(gradients[1]).all()


def test_openrlhf_takes_the_gate_of_the_environment_and_keeps_its_own_correction(monkeypatch):
    monkeypatch.setenv("HPO_GATE", "gspo(0.05, 0.06)")
    loss, batch = integration("openrlhf").HPOPolicyLoss, Batch()
    found = loss(is_correction_level="token", is_correction_mode="clip", is_correction_threshold=(0.0, 1.1))(
        batch.logp, batch.old, batch.advantages, batch.mask, batch.rollout
    )
    factor = torch.exp(batch.old - batch.rollout).clamp(max=1.1)
    expected = hpo.policy_loss(
        batch.logp, batch.old, batch.advantages, batch.mask, gates.gspo(0.05, 0.06),
        token_weight=factor, advantage_level="token",
    )  # fmt: skip
    torch.testing.assert_close(found[0], expected.loss)
    kl, dropped = found[3:]
    torch.testing.assert_close(kl, (batch.rollout - batch.old)[batch.mask].mean())
    torch.testing.assert_close(dropped, (torch.exp(batch.old - batch.rollout) > 1.1)[batch.mask].float().mean())


@pytest.mark.parametrize(
    ("gate", "flags", "said"),
    [
        ("gspo", {"clip_eps_high": 0.28}, "clip_eps_high: the gate 'gspo' does not read it"),
        ("gspo", {"policy_loss_type": "gspo"}, "policy_loss_type"),
        ("gspo", {"dual_clip": 3.0}, "dual_clip"),
        ("icepop", {}, "is_correction_level"),
        ("reconstructed.fiberpo_domain", {}, "level of groups"),
        ("", {"policy_loss_type": "reinforce"}, "expected ppo or gspo"),
    ],
)
def test_openrlhf_refuses_by_name(gate, flags, said, monkeypatch):
    monkeypatch.setenv("HPO_GATE", gate)
    with pytest.raises(ValueError, match=said):
        integration("openrlhf").HPOPolicyLoss(**flags)


def test_openrlhf_is_replaced_where_its_actor_looks_the_name_up(monkeypatch):
    with modules(
        openrlhf__models={"PolicyLoss": None}, openrlhf__trainer__ray__ppo_actor={"PolicyLoss": None}
    ) as found:
        module = integration("openrlhf")
        module.install()
        assert found["openrlhf.models"].PolicyLoss is module.HPOPolicyLoss
        assert found["openrlhf.trainer.ray.ppo_actor"].PolicyLoss is module.HPOPolicyLoss


def test_openrlhf_starts_ray_with_the_hook_and_the_gate(monkeypatch):
    monkeypatch.setenv("HPO_GATE", "gspo")
    asked = {}
    with modules(ray={"init": asked.update}):
        module = integration("openrlhf")
        monkeypatch.setattr(module.runpy, "run_module", lambda name, **_: asked.update(ran=name))
        module.launch()
    told = asked["runtime_env"]
    assert told["worker_process_setup_hook"] == "hpo_core.integrations.openrlhf.install"
    assert told["env_vars"]["HPO_GATE"] == "gspo" and asked["ran"] == "openrlhf.cli.train_ppo_ray"


# --------------------------------------------------------------------------------------------------------------- AReaL
# grpo_loss_fn of areal/trainer/ppo/actor.py, 1.0.4.


def areal_actor(**names):
    return {
        "_resolve_proximal_logp": lambda **told: told["prox_logp_gt"],
        "infer_token_denominator": lambda data, mask: torch.ones_like(mask),
        "stats_tracker": mock.MagicMock(),
        **names,
    }


def areal_inputs(batch):
    names = {"logprobs": batch.rollout, "prox_logp": batch.old, "advantages": batch.advantages}
    made = {name: batch.packed(batch.poisoned(value)) for name, value in names.items()}
    return {**made, "loss_mask": batch.packed(batch.mask).long(), "cu_seqlens": batch.cu_seqlens()}


def areal_loss(logp, batch, **fields):
    told = {"eps_clip": 0.2, "eps_clip_higher": None, "c_clip": None, **fields}
    with modules(areal__trainer__ppo__actor=areal_actor()):
        return integration("areal").grpo_loss_fn(logp, torch.zeros_like(logp), areal_inputs(batch), **told)


def test_areal():
    batch = Batch()
    mask, old, advantages = (batch.packed(each) for each in (batch.mask, batch.old, batch.advantages))
    equal(
        lambda logp: areal_loss(logp, batch, eps_clip_higher=0.28, c_clip=1.5),
        lambda logp: masked(clipped(logp, old, advantages, 0.2, 0.28, 1.5), mask).sum() / batch.tokens,
        batch.packed(batch.logp),
    )


def test_areal_takes_the_gate_of_the_environment(monkeypatch):
    batch = Batch()
    logp, old, rollout = (batch.packed(each) for each in (batch.logp, batch.old, batch.rollout))
    packed = packed_rows(batch.cu_seqlens(), batch.packed(batch.mask), gates.step_gspo())
    for gate in (gates.step_gspo(), gates.icepop(0.8, 1.2)):
        monkeypatch.setenv("HPO_GATE", "step_gspo" if gate.name == "step_gspo" else "icepop(0.8, 1.2)")
        expected = hpo.policy_loss(
            logp, old, batch.packed(batch.advantages), packed, gate, advantage_level="token",
            rollout_logp=rollout if gate.reads_rollout else None,
        )  # fmt: skip
        torch.testing.assert_close(areal_loss(logp, batch), expected.loss)


@pytest.mark.parametrize(
    ("gate", "fields", "said"),
    [
        ("dapo", {"eps_clip": 0.4}, "eps_clip: the gate 'dapo' does not read it"),
        ("dapo", {"use_sapo_loss": True}, "use_sapo_loss"),
        ("icepop", {"rejection_sampling": object()}, "correct the same difference"),
        ("reconstructed.p3o", {"importance_sampling_level": "sequence"}, "importance_sampling_level"),
        ("kl_cov", {}, "needs"),
        ("", {"importance_sampling_level": "row"}, "expected token or sequence"),
        ("", {"importance_sampling_level": "sequence", "c_clip": 3.0}, "no dual clip"),
        ("", {"use_sapo_loss": True, "use_decoupled_loss": True}, "no proximal policy"),
    ],
)
def test_areal_refuses_by_name(gate, fields, said, monkeypatch):
    monkeypatch.setenv("HPO_GATE", gate)
    batch = Batch()
    with pytest.raises(ValueError, match=said):
        areal_loss(batch.packed(batch.logp), batch, **fields)


def test_areals_trainer_gets_our_actor_and_the_gate(monkeypatch):
    monkeypatch.setenv("HPO_GATE", "gspo")

    class Actor:
        def __init__(self, config):
            self.config = config

    class Trainer:
        def _create_train_engine(self, actor_config, alloc):
            from areal.engine import FSDPPPOActor

            return FSDPPPOActor(actor_config)

    spec = mock.Mock(env_vars={})
    with modules(
        areal={"PPOTrainer": Trainer}, areal__engine={"FSDPPPOActor": Actor},
        areal__trainer__ppo__actor=areal_actor(grpo_loss_fn=None),
    ) as found:  # fmt: skip
        module = integration("areal")
        made = module.HPOTrainer()._create_train_engine(mock.Mock(scheduling_spec=[spec]), mock.Mock(backend="fsdp"))
        assert type(made) is module.HPOFSDPPPOActor and isinstance(made, Actor)
        assert type(made).__module__ == "hpo_core.integrations.areal" and type(made).__name__ == "HPOFSDPPPOActor"
        assert found["areal.trainer.ppo.actor"].grpo_loss_fn is module.grpo_loss_fn
        assert found["areal.engine"].FSDPPPOActor is Actor and spec.env_vars == {"HPO_GATE": "gspo"}
        with pytest.raises(ValueError, match="expected one of fsdp"):
            module.HPOTrainer()._create_train_engine(None, mock.Mock(backend="fsdp2"))
        with pytest.raises(AttributeError):
            module.HPOOtherActor  # noqa: B018
