"""The integrations of trainers as far as they run without them: on tensors as the trainer hands them over, against
formulas of its own loss. `make test-trainers` runs those that install against the trainer itself."""

import contextlib
import math
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from trainer_batches import LENGTH, ROWS, Batch, clipped, equal, gradient, integration, masked, modules, two_ranks

import hpo_core as hpo
from hpo_core import gates
from hpo_core.integrations import prompt_advantages
from hpo_core.integrations.micro_batch import fractions, packed_rows, padded_rows, token_loss
from hpo_core.integrations.named import named_estimator, named_gate, named_window
from hpo_core.integrations.served import check_gate
from hpo_core.integrations.trl_metrics import reported
from hpo_core.metrics import FLAGS

# --------------------------------------------------------------------------------------------- names in configurations


def test_a_text_names_a_gate():
    assert named_gate("gspo") == gates.gspo()
    assert named_gate("gspo(3e-4, eps_high=4e-4)") == gates.gspo(3e-4, 4e-4)
    assert named_gate("icepop(0.5, 4.0, gate=ppo_clip(ratio_dual=3.0))") == gates.icepop(
        0.5, 4.0, gate=gates.ppo_clip(ratio_dual=3.0)
    )
    assert named_gate("ppo_clip(ratio_dual=None)") == gates.ppo_clip()
    assert named_gate("ppo_clip(eps_high=inf)") == gates.ppo_clip(eps_high=math.inf)
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
        ("inf", "expected a RatioGate"),
        ("gspo(eps_low=1.2)", "eps_low"),
        ("gspo(eps_lo=3e-4)", r"^gate: gspo: .*'eps_lo'; it takes eps_low, eps_high, got 'gspo\(eps_lo=3e-4\)'"),
        ("icepop(gate=gspo(1, 2, 3))", r"^gate: gspo: too many positional arguments; it takes eps_low"),
        ("clip_cov_mask()", "^gate: clip_cov_mask: missing a required argument: 'logp'; it takes logp, old_logp"),
        ("gspo(eps_low=3e-4, eps_low=4e-4)", "^gate: expected each argument once, got 'eps_low' twice"),
        ("GSPO", "did you mean 'gspo'"),
        ("hpo.gates.dapo()", "did you mean 'dapo'"),
        ("hpo_gspo", "did you mean 'gspo'"),
    ],
)
def test_a_text_that_names_no_gate_is_refused(text, said):
    with pytest.raises((ValueError, TypeError), match=said):
        named_gate(text)


def test_an_estimator_takes_arguments_by_name():
    with pytest.raises(ValueError, match="by name"):
        named_estimator("grpo(1.0)")
    with pytest.raises(ValueError, match=r"^advantage: grpo: .*'epsilon'; it takes rewards, group_ids, .*eps"):
        named_estimator("grpo(epsilon=1.0)")


def test_trl_asks_for_levels_but_for_the_one_mean_with_kernels_of_its_own():
    for gate in (gates.gspo(), gates.gspo_token(), gates.luspo(), gates.ppo_clip()):
        assert reported(gate) == (), gate.name
    assert reported(gates.step_gspo()) == reported(gates.fiberpo()) == ("levels",)
    assert reported(gates.icepop(gate=gates.gspo())) == ("corrections",)


def test_verls_list_has_every_estimator_that_its_batches_suffice_for():
    accepted = set()
    for name in hpo.advantages.__all__:
        function = getattr(hpo.advantages, name)
        if hasattr(function, "provenance"):
            with contextlib.suppress(ValueError):
                prompt_advantages.check_prompt_estimator(function, "verl")
                accepted.add(name)
    # m_grpo is called once for each kind of trajectory.
    assert accepted == {*prompt_advantages.ESTIMATORS, "m_grpo"}
    page = " ".join((Path(__file__).parents[1] / "docs/verl_advantages.md").read_text().split())
    assert f"`algorithm.adv_estimator=hpo_<name>`: {', '.join(prompt_advantages.ESTIMATORS)}. " in page


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


@pytest.mark.parametrize("gate", [gates.step_gspo(), gates.mis(unit=gates.Unit.STEP)])
def test_rows_that_touch_are_two_steps_and_an_empty_row_is_none(gate):
    cu, mask = torch.tensor([0, 2, 2, 4]), torch.ones(4).bool()
    assert packed_rows(cu, mask, gate).row_of_step().tolist() == [0, 2]
    assert packed_rows(torch.tensor([0, 4, 4]), mask, gate).row_of_step().tolist() == [0]
    assert padded_rows(mask[None], gate).row_of_step().tolist() == [0]
    without = gates.dapo()  # steps cost a wait for the device
    assert padded_rows(mask[None], without).steps is None and packed_rows(cu, mask, without).steps is None


def test_fractions_of_clipped_and_dual_clipped_tokens():
    logp, advantages = torch.tensor([[0.5, -0.5, 1.5, 0.0]]), torch.tensor([[1.0, -1.0, -1.0, 1.0]])
    gate = gates.ppo_clip(ratio_dual=3.0)
    out = hpo.policy_loss(logp, torch.zeros(1, 4), advantages, torch.ones(1, 4).bool(), gate, advantage_level="token")
    healthy = {"tokens": 4.0, "clipped": 0.5, "dual_clipped": 0.25, "kl": -0.375, **dict.fromkeys(FLAGS, 0.0)}
    assert fractions(out.metrics, gate) == healthy
    logp[0, 3] = torch.nan
    out = hpo.policy_loss(logp, torch.zeros(1, 4), advantages, torch.ones(1, 4).bool(), gate, advantage_level="token")
    assert fractions(out.metrics, gate)["nan_tokens"] == 1.0


def test_trainers_without_a_place_for_error_counters_warn():
    batch = Batch()
    batch.logp[0, 0] = torch.nan
    loss = integration("openrlhf").HPOPolicyLoss()
    for call in (lambda: of_verl_agent(batch, batch.logp), lambda: loss(batch.logp, batch.old, batch.advantages)):
        with pytest.warns(UserWarning, match=r"policy_loss: nan_tokens: a log-ratio"):
            call()


@pytest.mark.parametrize(
    ("gate", "said"),
    [
        (gates.reconstructed.fiberpo_domain(), "level of groups"),
        (gates.mis(unit=gates.Unit.GROUP), "level of groups"),
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
        ("", {"policy_loss_type": "reinforce"}, "policy_loss_type: expected one of ppo, gspo"),
        ("", {"is_correction_level": "tokens"}, "is_correction_level: expected one of off, token, seq"),
        ("gspo", {"is_correction_mode": "drop"}, "is_correction_mode: expected one of mask, clip"),
        ("", {"is_correction_gating": "kl"}, "is_correction_gating: expected one of ratio, binary_kl, tv"),
        ("", {"is_correction_level": "seq", "is_correction_mode": "clip"}, "is of the ratios of tokens"),
        ("", {"is_correction_level": "token", "is_correction_gating": "tv"}, "an upper bound alone"),
    ],
)
def test_openrlhf_refuses_by_name(gate, flags, said, monkeypatch):
    monkeypatch.setenv("HPO_GATE", gate)
    with pytest.raises(ValueError, match=said):
        integration("openrlhf").HPOPolicyLoss(**flags)


@pytest.mark.parametrize("kind", ["ppo", "gspo"])
def test_openrlhfs_correction_needs_the_sampler(kind):
    batch, loss = Batch(), integration("openrlhf").HPOPolicyLoss(policy_loss_type=kind, is_correction_level="token")
    with pytest.raises(ValueError, match=r"rollout_log_probs: is_correction_\* needs the sampler"):
        loss(batch.logp, batch.old, batch.advantages, batch.mask)


def test_openrlhf_drops_a_row_whose_statistic_is_nan():
    batch = Batch()
    batch.rollout[0, 0] = torch.nan
    loss = integration("openrlhf").HPOPolicyLoss(is_correction_level="seq")
    _, grad = gradient(lambda logp: loss(logp, batch.old, batch.advantages, batch.mask, batch.rollout), batch.logp)
    assert (grad[0] == 0).all() and (grad[1:] != 0).any()
    assert loss(batch.logp, batch.old, batch.advantages, batch.mask, batch.rollout)[4] == pytest.approx(1 / ROWS)


@pytest.mark.parametrize("corrected", [False, True])
def test_openrlhfs_gspo(corrected):
    """Its ratios are those to the sampler where ``is_correction_level`` is set, its mean is always that over rows."""
    flags = {"policy_loss_type": "gspo", "clip_eps_low": 0.05, "clip_eps_high": 0.06, "dual_clip": 1.15}
    flags |= {"is_correction_level": "seq"} if corrected else {}
    batch, counts = Batch(width=0.8), Batch().mask.sum(1, keepdim=True)
    anchor = batch.rollout if corrected else batch.old

    def ours(logp):
        loss = integration("openrlhf").HPOPolicyLoss(**flags)
        return loss(logp, batch.poisoned(batch.old), batch.advantages, batch.mask, batch.poisoned(batch.rollout))

    def theirs(logp):
        mean = masked(logp - anchor, batch.mask).sum(1, keepdim=True) / counts
        terms = clipped(mean.expand_as(logp), 0.0, batch.advantages, 0.05, 0.06, 1.15)
        return (masked(terms, batch.mask) / counts).sum() / ROWS

    equal(ours, theirs, batch.logp)
    ratio = (masked(batch.logp - anchor, batch.mask).sum(1, keepdim=True) / counts).exp()
    beyond = (ratio > 1.06) & (batch.advantages > 0) | (ratio < 0.95) & (batch.advantages < 0)
    share = beyond[:, 0].float().mean().item()  # no row of advantages 0 is clipped
    assert ours(batch.logp)[1].item() == pytest.approx(share) and share > 0.1


def test_openrlhf_is_replaced_where_its_actor_looks_the_name_up(monkeypatch):
    with modules(
        openrlhf__models={"PolicyLoss": None}, openrlhf__trainer__ray__ppo_actor={"PolicyLoss": None}
    ) as found:
        module = integration("openrlhf")
        module.install()
        assert found["openrlhf.models"].PolicyLoss is module.HPOPolicyLoss
        assert found["openrlhf.trainer.ray.ppo_actor"].PolicyLoss is module.HPOPolicyLoss


@pytest.mark.parametrize(
    ("name", "main", "arguments"),
    [
        ("openrlhf", "openrlhf.cli.train_ppo_ray", ["--x"]),
        ("easyr1", "verl.trainer.main", ["--x"]),
        ("open_instruct", "open_instruct.grpo", ["grpo", "--x"]),
    ],
)
@pytest.mark.parametrize("gate", ["gspo", ""])
def test_ray_of_a_launched_trainer_gets_the_hook_and_the_gate(gate, name, main, arguments, monkeypatch):
    """Both stand beside the options with which the trainer itself starts Ray."""
    monkeypatch.setenv("HPO_GATE", gate)
    monkeypatch.setattr(sys, "argv", ["launcher", *arguments])
    asked, bare = {}, {}

    def run(name, *, run_name, alter_sys):
        assert (run_name, alter_sys) == ("__main__", True)
        asked.update(ran=name, arguments=sys.argv[1:])
        stubs["ray"].init()
        bare.update(asked.pop("runtime_env"))
        stubs["ray"].init(num_cpus=2, runtime_env={"env_vars": {"OWN": "1"}, "excludes": [".git/"]})

    def start(**options):
        asked.update(options)

    with modules(ray={"init": start}) as stubs:
        monkeypatch.setattr(runpy, "run_module", run)
        integration(name).launch()
        assert stubs["ray"].init is start
    hook = f"hpo_core.integrations.{name}.install"
    told = {"HPO_GATE": gate} if gate else {}
    assert bare == {"env_vars": told, "worker_process_setup_hook": hook}
    environment = {"env_vars": {"OWN": "1", **told}, "excludes": [".git/"]}
    assert asked == {
        "ran": main, "arguments": ["--x"], "num_cpus": 2,
        "runtime_env": {**environment, "worker_process_setup_hook": hook},
    }  # fmt: skip


@pytest.mark.parametrize("name", ["openrlhf", "easyr1", "open_instruct"])
def test_a_gate_that_workers_would_refuse_starts_no_ray(name, monkeypatch):
    monkeypatch.setenv("HPO_GATE", "kl_cov")
    monkeypatch.setattr(sys, "argv", ["launcher", "grpo"])
    with modules(ray={}), pytest.raises(ValueError, match="gate: 'kl_cov' needs"):
        integration(name).launch()


def test_open_instruct_has_two_programs(monkeypatch):
    for arguments in ([], ["ppo"]):
        monkeypatch.setattr(sys, "argv", ["launcher", *arguments])
        with pytest.raises(ValueError, match="program: expected one of grpo_fast, grpo, got"):
            integration("open_instruct").launch()


# --------------------------------------------------------------------------------------------------------------- AReaL
# grpo_loss_fn of areal/trainer/ppo/actor.py, 1.0.4.


def areal_actor(**names):
    return {
        "_resolve_proximal_logp": lambda **told: told["prox_logp_gt"],
        "infer_token_denominator": lambda data, mask: torch.ones_like(mask),
        "stats_tracker": mock.MagicMock(), "_log_proximal_approximation_stats": mock.Mock(),
        **names,
    }  # fmt: skip


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


def test_areals_ratios_of_sequences():
    """Each has the mean of its tokens' advantages."""
    batch = Batch(per_token=True, width=0.8)
    counts = batch.mask.sum(1, keepdim=True)

    def rows(values):
        return (masked(values, batch.mask).sum(1, keepdim=True) / counts).expand(ROWS, LENGTH)

    def theirs(logp):
        padded = torch.zeros(ROWS, LENGTH).masked_scatter(batch.present, logp)
        terms = clipped(rows(padded - batch.old), 0.0, rows(batch.advantages), 0.05, 0.06, 1.15)
        return masked(terms, batch.mask).sum() / batch.tokens

    told = {"importance_sampling_level": "sequence", "eps_clip": 0.05, "eps_clip_higher": 0.06, "c_clip": 1.15}
    equal(lambda logp: areal_loss(logp, batch, **told), theirs, batch.packed(batch.logp))


def test_areals_engine_weighs_the_means_of_ranks():
    batch = Batch()
    alone = areal_loss(batch.packed(batch.logp), batch)
    with two_ranks():
        assert torch.equal(areal_loss(batch.packed(batch.logp), batch), alone)


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
        torch.testing.assert_close(areal_loss(logp, batch, use_decoupled_loss=True), expected.loss)


@pytest.mark.parametrize(
    ("gate", "fields", "said"),
    [
        ("dapo", {"eps_clip": 0.4}, "eps_clip: the gate 'dapo' does not read it"),
        ("dapo", {"use_sapo_loss": True}, "use_sapo_loss"),
        ("icepop", {"rejection_sampling": object(), "use_decoupled_loss": True}, "correct the same difference"),
        ("icepop", {}, "with actor.use_decoupled_loss=false there is one old policy"),
        ("reconstructed.p3o", {"importance_sampling_level": "sequence"}, "importance_sampling_level"),
        ("kl_cov", {}, "needs"),
        ("", {"importance_sampling_level": "row"}, "expected one of token, sequence"),
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


# ---------------------------------------------------------------------------------------------------------------- rLLM
# register_rllm_adv_estimator and what it registers, of rllm/trainer/algorithms/advantage.py at 9beb6e0.


@pytest.fixture
def rllm():
    registry = {}

    def register(name):
        return lambda function: registry.setdefault(name, function)

    with modules(rllm__trainer__algorithms__advantage={"register_rllm_adv_estimator": register}):
        yield registry, integration("rllm")


def trajectory(length):
    return SimpleNamespace(steps=[SimpleNamespace(response_ids=[0] * length), SimpleNamespace(response_ids=[0])])


def test_rllms_groups_may_be_ragged(rllm):
    registry, _ = rllm
    rewards = [np.array([1.0, 0.0, 0.5]), np.array([2.0, 1.0]), np.array([3.0])]
    found, returns = registry["hpo_rloo"](rewards=rewards, algorithm_config=None)
    for one, same, group in zip(found[:2], returns[:2], rewards[:2], strict=True):
        expected = (group - (group.sum() - group) / (len(group) - 1)).astype(np.float32)
        np.testing.assert_allclose(one, expected, rtol=1e-6)
        np.testing.assert_array_equal(one, same)
    assert found[2].tolist() == [0.0] and registry["hpo_grpo"](rewards=[], algorithm_config=None) == ([], [])


def test_rllm_tells_the_lengths_of_trajectories(rllm):
    registry, _ = rllm
    groups = [SimpleNamespace(trajectories=[trajectory(1), trajectory(5)])]
    found, _ = registry["hpo_opo"](rewards=[np.array([1.0, 0.0])], algorithm_config=None, traj_groups=groups)
    baseline = (2 * 1.0 + 6 * 0.0) / 8  # weighted by the tokens of both steps
    np.testing.assert_allclose(found[0], [1 - baseline, -baseline], rtol=1e-6)


def test_rllms_switch_of_the_deviation_is_read_or_refused(rllm):
    registry, _ = rllm
    rewards, off = [np.array([1.0, 0.0, 0.5])], SimpleNamespace(norm_adv_by_std_in_grpo=False)
    with pytest.raises(ValueError, match=r"norm_adv_by_std_in_grpo: grpo divides by a deviation .*take hpo_dr_grpo"):
        registry["hpo_grpo"](rewards=rewards, algorithm_config=off)
    found, expected = (registry["hpo_rloo"](rewards=rewards, algorithm_config=each)[0] for each in (off, None))
    np.testing.assert_array_equal(found, expected)


def test_rllms_registry_has_every_estimator_that_needs_no_more(rllm):
    registry, module = rllm
    assert set(registry) == {f"hpo_{name}" for name in module.ESTIMATORS}
    with pytest.raises(ValueError, match="one of steps"):
        module.register_advantage("mine", hpo.advantages.gigpo)


# ---------------------------------------------------------------------------------------------------------- verl-agent
# compute_policy_loss of verl/trainer/ppo/core_algos.py, as dp_actor.py calls it, in the fork of verl at 8ca3a46.


def of_verl_agent(batch, logp, **told):
    keywords = {"cliprange": 0.2, "cliprange_low": 0.2, "cliprange_high": 0.2, "clip_ratio_c": 3.0, **told}
    loss = integration("verl_agent").compute_policy_loss
    return loss(
        old_log_prob=batch.poisoned(batch.old), log_prob=logp, advantages=batch.advantages,
        response_mask=batch.mask.long(), **keywords,
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_verl_agent(mode):
    batch = Batch(empty_row=True, width=0.8)
    counts = batch.mask.sum(1, keepdim=True).clamp(min=1)
    weights = {
        "token-mean": 1 / batch.tokens, "seq-mean-token-sum": 1 / ROWS, "seq-mean-token-mean": 1 / (ROWS * counts),
        "seq-mean-token-sum-norm": 1 / LENGTH,
    }[mode]  # fmt: skip

    def theirs(logp, low=0.2):
        return (weights * masked(clipped(logp, batch.old, batch.advantages, low, 0.28, 1.5), batch.mask)).sum()

    told = {"cliprange_high": 0.28, "clip_ratio_c": 1.5, "loss_agg_mode": mode}
    equal(lambda logp: of_verl_agent(batch, logp, **told), theirs, batch.logp)
    torch.testing.assert_close(of_verl_agent(batch, batch.logp, cliprange_low=2.0, **told)[0], theirs(batch.logp, 2.0))
    _, fraction, kl, dual = of_verl_agent(batch, batch.logp, **told)
    torch.testing.assert_close(kl, (batch.old - batch.logp)[batch.mask].mean())
    assert fraction > 0.1 and dual > 0


def test_verl_agent_takes_the_gate_of_the_environment_or_refuses_it(monkeypatch):
    batch = Batch()
    monkeypatch.setenv("HPO_GATE", "step_gspo(0.05, 0.06)")
    gate = gates.step_gspo(0.05, 0.06)
    expected = hpo.policy_loss(
        batch.logp, batch.old, batch.advantages, padded_rows(batch.mask, gate), gate, advantage_level="token"
    )
    torch.testing.assert_close(of_verl_agent(batch, batch.logp)[0], expected.loss)
    with pytest.raises(ValueError, match="clip_ratio_high: the gate 'step_gspo' does not read it"):
        of_verl_agent(batch, batch.logp, cliprange_high=0.28)
    monkeypatch.setenv("HPO_GATE", "tis")
    with pytest.raises(ValueError, match="no log-probabilities of the sampler"):
        of_verl_agent(batch, batch.logp)
    monkeypatch.setenv("HPO_GATE", "gpso")
    with pytest.raises(ValueError, match="HPO_GATE: no function 'gpso'"):
        of_verl_agent(batch, batch.logp)
    monkeypatch.setenv("HPO_GATE", "")
    with pytest.raises(ValueError, match="loss_agg_mode"):
        of_verl_agent(batch, batch.logp, loss_agg_mode="mean")


@pytest.mark.parametrize("far", [9.0, math.inf])
def test_a_clamped_penalty_is_that_of_the_tokens_that_the_loss_counts(far):
    """A token without an old log-probability has none, nor has one of a row without a weight, nor one in no row."""
    batch = hpo.PackedBatch(torch.tensor([0, 2, 4]), total_tokens=5)
    logp, ref, old = torch.full((5,), -1.0), torch.full((5,), far), torch.tensor([-1, math.nan, -1, -1, -1])
    out = token_loss(
        logp.requires_grad_(), old, torch.zeros(5), batch, gates.ppo_clip(), torch.tensor([0.5, math.nan]),
        ref_logp=ref, kl=hpo.kl.k3(0.1), clamp_k3=True,
    )  # fmt: skip
    out.loss.backward()
    assert out.loss.item() == 0.5 and logp.grad.tolist() == [0.0] * 5  # of the first token, 10 x 0.1 x 0.5


def test_verl_agents_actor_finds_the_loss(monkeypatch):
    with modules(verl__workers__actor__dp_actor={"compute_policy_loss": None}) as found:
        module = integration("verl_agent")
        module.install()
        assert found["verl.workers.actor.dp_actor"].compute_policy_loss is module.compute_policy_loss
        monkeypatch.setenv("HPO_GATE", "hapo_clip")
        with pytest.raises(ValueError, match="verl-agent"):  # before a model is loaded
            module.install()


def test_rllm_scales_unless_its_setting_says_no(rllm):
    registry, module = rllm
    rewards = [np.array([1.0, 0.0, 0.5])]
    found, _ = registry["hpo_grpo"](rewards=rewards, algorithm_config=None)
    torch.testing.assert_close(torch.from_numpy(found[0]), hpo.advantages.grpo(torch.tensor([1.0, 0.0, 0.5]), None))
    with pytest.raises(ValueError, match="a single reward"):
        module.register_advantage("mine", hpo.advantages.gdpo)
    with pytest.raises(TypeError, match=r"estimator: expected one of .*, got 'grpo'"):
        module.register_advantage("mine", "grpo")


def test_verl_agent_needs_a_bound():
    with pytest.raises(ValueError, match="cliprange: expected a bound, got None"):
        of_verl_agent(Batch(), Batch().logp, cliprange=None, cliprange_low=None)
