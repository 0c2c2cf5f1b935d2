"""Integrations of trainers that no package index has, on tensors as they hand them over, against formulas of their own
losses that were read at the commit named with each."""

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from trainer_batches import (
    LENGTH,
    ROWS,
    Batch,
    clamped_k3,
    clipped,
    equal,
    gradient,
    integration,
    masked,
    modules,
    with_a_far_reference,
)

import hpo_core as hpo
from hpo_core import gates
from hpo_core.integrations.micro_batch import padded_rows, token_loss

# ------------------------------------------------------------------------------------------------------------ prime-rl
# LossInputs, LossOutputs and default_loss_fn of src/prime_rl/trainer/rl/loss.py at 559b447.


class LossOutputs(NamedTuple):
    loss: torch.Tensor
    metrics: dict


def prime_inputs(batch, row, logp, weights=None):
    cut = slice(0, batch.lengths[row])
    return SimpleNamespace(
        trainer_logprobs=logp[row, cut], inference_logprobs=batch.poisoned(batch.rollout)[row, cut], ref_logprobs=None,
        advantages=batch.advantages[row, cut], loss_mask=batch.mask[row, cut], loss_weights=weights,
    )  # fmt: skip


def of_prime_rl(batch, logp, weights=None, **keywords):
    with modules(prime_rl__trainer__rl__loss={"LossOutputs": LossOutputs}):
        loss = integration("prime_rl").loss
        found = [loss(prime_inputs(batch, row, logp, weights), **keywords) for row in range(len(batch.lengths))]
    assert all(value.dtype is torch.float32 and value.dim() == 0 for value in found[0].metrics.values())
    return sum(each.loss for each in found)


def prime_rl_default(batch, logp, kl_tau):
    moved = torch.exp(logp) - torch.exp(batch.rollout)
    return prime_rl_without(torch.where(batch.advantages > 0, moved > 0.2, moved < -0.2), batch, logp, kl_tau)


def prime_rl_ipo(batch, logp, kl_tau):
    return prime_rl_without((torch.exp(logp) - torch.exp(batch.rollout)).abs() > 0.1, batch, logp, kl_tau)


def prime_rl_without(dropped, batch, logp, kl_tau):
    """The value of its policy term is another than that of our score head; its gradient is the same."""
    ratio = torch.exp(logp - batch.rollout)
    terms = -batch.advantages * ratio * ~dropped + kl_tau * (logp - batch.rollout) ** 2
    return masked(terms, batch.mask).sum()


@pytest.mark.parametrize(
    ("theirs", "gate"), [(prime_rl_default, {}), (prime_rl_ipo, {"gate": "dppo_tv(0.1, 0.1, inf, symmetric=True)"})]
)
def test_prime_rl(theirs, gate):
    batch = Batch(width=0.8)
    batch.rollout[:, 0], batch.logp[:, 0] = math.log(0.01), math.log(0.9)  # a ratio of 90
    _, found = gradient(lambda logp: of_prime_rl(batch, logp, kl_tau=0.01, **gate), batch.logp)
    _, expected = gradient(lambda logp: theirs(batch, logp, 0.01), batch.logp)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6 * expected.abs().max().item())
    _, without = gradient(lambda logp: theirs(batch, logp, 0.0), batch.logp)
    assert (without[batch.mask] == 0).any(), "nothing was dropped: the comparison says little"


def prime_rl_of_2025(batch, logp, kl_tau):
    """compute_loss at 5f47740dd with its defaults, by tokens; and which tokens each of its masks leaves out."""
    x = (logp - batch.rollout).detach()
    mean = masked(x, batch.mask).sum(1, keepdim=True) / batch.mask.sum(1, keepdim=True)
    greatest = x.masked_fill(~batch.mask, -math.inf).amax(1, keepdim=True)
    off = ((x < math.log(0.125)) | (x > math.log(8)), mean.abs() > math.log(10), greatest > math.log(100))
    kept = ~(off[0] | off[1] | off[2])
    coefficient = x.exp() * (batch.advantages - kl_tau * x)
    return masked(-coefficient * logp * kept, batch.mask).sum() / batch.mask.sum(), off


def within(low, high, **segment):
    """A mask of the ratio to the sampler, as docs/compositions.md has it."""
    bounds = {"low": (math.log(low),) * 2, "high": (math.log(high),) * 2}
    return gates.Correction(gates.Action.MASK, channel=gates.Channel.TOTAL, **bounds, **segment)


def test_prime_rl_of_2025_is_put_together(native_backends):
    """Ratios of 90, which is left out alone, of 200, with its row, and a row whose mean leaves it out."""
    batch = Batch(width=0.3)
    batch.rollout[0, 0] = batch.logp[0, 0] - math.log(90)
    batch.rollout[1, 0] = batch.logp[1, 0] - math.log(200)
    batch.rollout[2] = batch.logp[2] + 2
    batch.rollout[2, 0] = batch.logp[2, 0] + 20
    unit = gates.Unit.TRAJECTORY
    gate = gates.compose(
        gates.ppo_clip(1.0, math.inf), within(0.125, 8.0), within(0.1, 10.0, unit=unit),
        within(1e-20, 100.0, unit=unit, reduction=gates.Reduction.MAX),
    )  # fmt: skip
    for kl_tau in (0.0, 0.1):
        _, expected = gradient(lambda logp, tau=kl_tau: prime_rl_of_2025(batch, logp, tau)[0], batch.logp)
        for backend in ("reference", *native_backends):
            place = hpo.testing.device_of(backend)
            logp, rollout, mask = (each.to(place) for each in (batch.logp, batch.poisoned(batch.rollout), batch.mask))
            advantages = batch.advantages.to(place) - kl_tau * (logp - rollout)
            found = hpo.policy_loss_and_grad(
                logp, rollout, advantages, mask, gate, advantage_level="token", backend=backend
            ).grad.cpu()
            torch.testing.assert_close(found.float(), expected, rtol=1e-5, atol=1e-6 * expected.abs().max().item())
    alone, by_mean, by_greatest = ((batch.mask & off).any(1) for off in prime_rl_of_2025(batch, batch.logp, 0.0)[1])
    assert alone[:3].all() and by_mean.nonzero().tolist() == [[2]] and by_greatest.nonzero().tolist() == [[1]]


def test_prime_rl_with_another_gate():
    batch = Batch()
    equal(
        lambda logp: of_prime_rl(batch, logp, gate="ppo_clip(eps_high=0.28)", adv_tau=0.5),
        lambda logp: masked(clipped(logp, batch.rollout, 0.5 * batch.advantages, 0.2, 0.28), batch.mask).sum(),
        batch.logp,
    )


def test_prime_rls_weights_are_on_both_terms():
    batch = Batch()
    batch.lengths = batch.lengths[:1]
    weights = torch.rand(batch.lengths[0], generator=torch.Generator().manual_seed(1))
    terms = clipped(batch.logp, batch.rollout, batch.advantages) + 0.1 * (batch.logp - batch.rollout) ** 2
    expected = (weights * masked(terms, batch.mask)[0]).sum()
    found = of_prime_rl(batch, batch.logp, weights, gate="ppo_clip", kl_tau=0.1)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("gate", "said"), [("icepop", "old policy is the sampler"), ("kl_cov", "needs"), ("gpso", "did you mean")]
)
def test_prime_rl_refuses_by_name(gate, said):
    with pytest.raises(ValueError, match=said):
        of_prime_rl(Batch(), Batch().logp, gate=gate)


# -------------------------------------------------------------------------------------------------------------- EasyR1
# compute_policy_loss and average_loss of verl/trainer/core_algos.py, called in verl/workers/actor/dp_actor.py, at
# b44b311.


def of_easyr1(batch, logp, **fields):
    told = {
        "clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "clip_ratio_dual": 3.0, "tau_positive": 1.0,
        "tau_negative": 1.05, "loss_type": "default", "loss_avg_mode": "token", **fields,
    }  # fmt: skip
    with modules(verl__workers__actor__dp_actor={}) as stubs:
        integration("easyr1").install()
        return stubs["verl.workers.actor.dp_actor"].compute_policy_loss(
            old_log_probs=batch.poisoned(batch.old), log_probs=logp, advantages=batch.advantages,
            response_mask=batch.mask.long(), **told,
        )  # fmt: skip


@pytest.mark.parametrize("mode", ["token", "seq"])
@pytest.mark.parametrize("kind", ["default", "gspo", "gspo_token", "cispo", "sapo"])
def test_easyr1(kind, mode):
    batch = Batch(empty_row=True, per_token=True, width=1.5 if "gspo" in kind else 0.4)  # means of rows are smaller
    counts = batch.mask.sum(1, keepdim=True)
    shares = 1 / counts.sum() if mode == "token" else 1 / (ROWS * counts.clamp(min=1))

    def theirs(logp):
        ratio = torch.exp(logp - batch.old)
        mean = masked(logp - batch.old, batch.mask).sum(1, keepdim=True) / counts.clamp(min=1)
        tau = torch.where(batch.advantages >= 0, 1.0, 1.05)
        terms = {
            "default": lambda: clipped(logp, batch.old, batch.advantages, 0.2, 0.3, 1.2),
            "gspo": lambda: clipped(mean, 0.0, batch.advantages, 0.2, 0.3, 1.2),
            "gspo_token": lambda: clipped(mean.detach() + logp - logp.detach(), 0.0, batch.advantages, 0.2, 0.3, 1.2),
            "cispo": lambda: -batch.advantages * logp * ratio.detach().clamp(0.8, 1.3),
            "sapo": lambda: -batch.advantages * 4 / tau * torch.sigmoid(tau * (ratio - 1)),
        }[kind]()
        return (shares * masked(terms, batch.mask)).sum()

    fields = {"loss_type": kind, "loss_avg_mode": mode, "clip_ratio_dual": 1.2}
    equal(lambda logp: of_easyr1(batch, logp, **fields), theirs, batch.logp)
    logged = of_easyr1(batch, batch.logp, **fields)[1]
    assert logged["pg_clipfrac_higher"] > 0.05 or kind == "sapo", "nothing was clipped: the comparison says little"
    assert logged["ppo_kl"] == pytest.approx((batch.old - batch.logp)[batch.mask].mean().item(), rel=1e-5)
    assert logged["entropy_loss"] == pytest.approx((shares * masked(-batch.logp, batch.mask)).sum().item(), rel=1e-5)


def test_easyr1_takes_the_gate_of_the_environment_or_refuses_it(monkeypatch):
    batch = Batch()
    monkeypatch.setenv("HPO_GATE", "gspo(0.05, 0.06)")
    expected = hpo.policy_loss(
        batch.logp, batch.old, batch.advantages, batch.mask, gates.gspo(0.05, 0.06), advantage_level="token"
    )
    torch.testing.assert_close(of_easyr1(batch, batch.logp)[0], expected.loss)
    with pytest.raises(ValueError, match="clip_ratio_high: the gate 'gspo' does not read it; got 0"):
        of_easyr1(batch, batch.logp, clip_ratio_high=0.2)
    monkeypatch.setenv("HPO_GATE", "icepop")
    with pytest.raises(ValueError, match="EasyR1 passes its loss no log-probabilities"):
        of_easyr1(batch, batch.logp)
    monkeypatch.setenv("HPO_GATE", "")
    with pytest.raises(ValueError, match="loss_type"):
        of_easyr1(batch, batch.logp, loss_type="mean")
    for kind in ("default", "gspo", "cispo"):
        with pytest.raises(ValueError, match=r"clip_ratio_low: expected an epsilon <= 1, got 2\.0; EasyR1 takes"):
            of_easyr1(batch, batch.logp, loss_type=kind, clip_ratio_low=2.0)
        assert of_easyr1(batch, batch.logp, loss_type=kind, clip_ratio_low=1.0)[0].isfinite()
    assert of_easyr1(batch, batch.logp, loss_type="sapo", clip_ratio_low=2.0)[0].isfinite()


# ------------------------------------------------------------------------------------------------------------- NeMo-RL
# LossFunction, calculate_kl of nemo_rl/algorithms/utils.py and ClippedPGLossFn of
# nemo_rl/algorithms/loss/loss_functions.py at 7ea279a.


@pytest.fixture
def nemo_rl():
    kinds = {"TOKEN_LEVEL": "token_level", "SEQUENCE_LEVEL": "sequence_level"}
    names = {
        "LossFunction": object, "LossInputType": SimpleNamespace(LOGPROB="logprob"),
        "LossType": SimpleNamespace(**kinds),
        "MetricNormalizer": SimpleNamespace(TOKENS="tokens", SEQUENCES="sequences", NONE="none"),
    }  # fmt: skip
    with modules(nemo_rl__algorithms__loss__interfaces=names):
        yield integration("nemo_rl").HPOLossFn


def nemo_data(batch):
    def shifted(values):  # data has a column more, the first token's
        return torch.nn.functional.pad(values, (1, 0))

    sampled = torch.ones(ROWS)
    sampled[3], sampled[1] = 0, 0.25  # a row that is left out, and a loss_multiplier
    poisoned = {
        "prev_logprobs": batch.old, "generation_logprobs": batch.rollout, "reference_policy_logprobs": batch.ref,
    }  # fmt: skip
    data = {name: shifted(batch.poisoned(value)) for name, value in poisoned.items()}
    data |= {"advantages": shifted(batch.advantages), "token_mask": shifted(batch.mask.float()), "sample_mask": sampled}
    return data, batch.mask & (sampled > 0)[:, None]


@pytest.mark.parametrize("per_token", [True, False])
def test_nemo_rl(per_token, nemo_rl):
    batch = with_a_far_reference(Batch())
    data, mask = nemo_data(batch)
    loss = nemo_rl(
        "icepop(0.8, 1.2, gate=ppo_clip(0.2, 0.28, 1.5))", token_level_loss=per_token, reference_policy_kl_penalty=0.1
    )
    counts = {"global_valid_seqs": torch.tensor(9.0), "global_valid_toks": torch.tensor(77.0)}

    def ours(logp):
        return loss(next_token_logprobs=logp, data=data, **counts)

    def theirs(logp):
        weight = torch.exp(batch.old - batch.rollout)
        weight = torch.where((weight >= 0.8) & (weight <= 1.2), weight, 0.0)
        terms = weight * clipped(logp, batch.old, batch.advantages, 0.2, 0.28, 1.5)
        factor = torch.exp(logp - logp.detach())  # of the score function
        terms = masked(terms + 0.1 * clamped_k3(logp, batch.ref, factor), mask) * data["sample_mask"][:, None]
        return terms.sum() / 77.0 if per_token else (terms.sum(1) / batch.mask.sum(1)).sum() / 9.0

    equal(ours, theirs, batch.logp)
    assert loss.loss_type == ("token_level" if per_token else "sequence_level") and loss.input_type == "logprob"
    metrics = ours(batch.logp)[1]
    assert set(metrics) == set(loss.metric_normalizations)
    error = masked((batch.rollout - batch.old).abs().exp(), mask).sum() / 77.0
    assert metrics["token_mult_prob_error"] == pytest.approx(error.item(), rel=1e-5)
    assert metrics["num_valid_samples"] == 4.25


def test_nemo_rl_adds_metrics_over_micro_batches(nemo_rl):
    batch = Batch()
    batch.logp[0, 0] = batch.logp[5, 0] = torch.nan
    data, mask = nemo_data(batch)
    counts = {"global_valid_seqs": torch.tensor(5), "global_valid_toks": mask.sum()}
    whole = nemo_rl()(batch.logp, data, **counts)[1]
    cuts = [
        nemo_rl()(batch.logp[cut], {k: v[cut] for k, v in data.items()}, **counts)[1]
        for cut in (slice(0, 2), slice(2, 6))
    ]
    for name in ("loss", "hpo/clipped", "hpo/kl", "token_mult_prob_error", "num_valid_samples"):
        assert sum(cut[name] for cut in cuts) == pytest.approx(whole[name], rel=1e-5, abs=1e-7)
    assert whole["hpo/clipped"] > 0.05 and [cut["hpo/nan_tokens"] for cut in cuts] == [1.0, 1.0]


def test_nemo_rl_takes_the_advantages_that_the_manual_says():
    """``compute_advantage`` as grpo_train of nemo_rl/algorithms/grpo.py at 7ea279a calls it."""
    page = Path(__file__).parent.parent.joinpath("docs", "trainer_setup.md").read_text()
    (code,) = re.findall(r"^```python\n((?:(?!```).*\n)*?.*_create_advantage_estimator.*\n)```", page, re.MULTILINE)
    with modules(nemo_rl__algorithms__grpo={}) as stubs:
        exec(code, {})
        estimator = stubs["nemo_rl.algorithms.grpo"]._create_advantage_estimator(None)
    prompts = torch.tensor([[7, 8, 0], [7, 9, 0], [7, 8, 0], [7, 8, 0]])
    found = estimator.compute_advantage(
        prompt_ids=prompts, rewards=torch.tensor([1.0, 3.0, 0.0, 0.5]), mask=torch.ones(4, 5), repeated_batch=None,
        logprobs_policy=None, logprobs_reference=None,
    )  # fmt: skip
    expected = hpo.advantages.maxrl(torch.tensor([1.0, 0.0, 0.5]), None)
    assert found.shape == (4, 5) and torch.equal(found[[0, 2, 3], 4], expected) and not found[1].any()


def test_nemo_rls_penalty_takes_log_probabilities_without_its_filter(nemo_rl):
    """NeMo-RL computes them if the loss has the attribute ``reference_policy_kl_penalty``."""
    batch = with_a_far_reference(Batch())
    data, mask = nemo_data(batch)
    loss = nemo_rl(reference_policy_kl_penalty=0.1)
    counts = {"global_valid_seqs": torch.tensor(9.0), "global_valid_toks": torch.tensor(77.0)}

    def ours(logp):
        return loss(logp, data | {"curr_logprobs_unfiltered": logp - 0.5}, **counts)

    def theirs(logp):
        unfiltered = logp - 0.5
        penalty = clamped_k3(unfiltered, batch.ref, torch.exp(unfiltered - unfiltered.detach()))
        terms = masked(clipped(logp, batch.old, batch.advantages) + 0.1 * penalty, mask)
        return (terms * data["sample_mask"][:, None]).sum() / 77.0

    equal(ours, theirs, batch.logp)
    assert (loss.reference_policy_kl_penalty, loss.use_fused_linear_logprobs) == (0.1, False)
    assert nemo_rl(use_fused_linear_logprobs=True).use_fused_linear_logprobs
    data["reference_policy_logprobs"][0, 2] = torch.nan
    assert ours(batch.logp)[1]["hpo/nan_tokens"] == 1.0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("prev_logprobs", "set loss_fn.force_on_policy_ratio to false"),
        ("reference_policy_logprobs", "set loss_fn.reference_policy_kl_penalty above 0"),
    ],
)
def test_nemo_rls_placeholders_are_refused(name, said, nemo_rl):
    batch = Batch()
    data, _ = nemo_data(batch)
    data[name] = torch.zeros_like(data[name])
    counts = {"global_valid_seqs": torch.tensor(9.0), "global_valid_toks": torch.tensor(77.0)}
    loss = nemo_rl(reference_policy_kl_penalty=0.1)
    with pytest.raises(ValueError, match=f"^{name}: expected log-probabilities, got zeros.*{said}"):
        loss(batch.logp, data, **counts)
    certain = loss(torch.full_like(batch.logp, -1e-3), data, **counts)[0]  # a policy may be certain of all its tokens
    assert torch.isfinite(certain)


def test_nemo_rl_refuses_by_name(nemo_rl):
    with pytest.raises(ValueError, match="level of groups"):
        nemo_rl("reconstructed.p3o")
    with pytest.raises(ValueError, match="reference_policy_kl_penalty"):
        nemo_rl(reference_policy_kl_penalty=-1.0)


# ---------------------------------------------------------------------------------------------------------------- ROLL
# ActorWorker.loss_func of roll/pipeline/rlvr/actor_worker.py and of roll/pipeline/agentic/agentic_actor_worker.py, and
# compute_train_infer_correction of roll/utils/train_infer_corrections.py at 8eb27cc.


class RLVRWorker:
    def compute_sample_weights(self, data, response_mask):
        return 2.0 - response_mask.sum(1) / LENGTH  # of the lengths, which ROLL scales otherwise


def train_infer(*, cfg, response_mask, old_log_probs, infer_log_probs, global_valid_samples, global_valid_tokens):
    assert response_mask.dtype is torch.int64 and (global_valid_samples, global_valid_tokens) == (7, 99)
    ratio = torch.exp(old_log_probs - infer_log_probs)
    return ratio.clamp(max=1.1), (ratio > 0.8).float(), {"actor/train_infer_ratio_token_mean@sum": 1.0}


def of_roll(batch, logp, final_mask=None, counted=True, **fields):
    told = {
        "dual_clip_loss": True, "entropy_loss_coef": 0.0, "kl_loss_coef": 0.0, "loss_agg_mode": "token-mean",
        "pg_clip": 0.2, "pg_clip_high": 0.28, "pg_clip_low": 0.2, "use_kl_loss": False, "use_pg_clip_range": True,
        "enable_old_logprobs_recompute": True,
        "train_infer_correction": SimpleNamespace(is_weight=SimpleNamespace(enabled=False)), **fields,
    }  # fmt: skip
    with modules(
        roll__pipeline__rlvr__actor_worker={"ActorWorker": RLVRWorker},
        roll__utils__train_infer_corrections={"compute_train_infer_correction": train_infer},
    ):
        worker = integration("roll").HPOActorWorker()
    worker.pipeline_config = SimpleNamespace(**told)
    worker.strategy = SimpleNamespace(op_compute_log_probs=lambda **_: logp, op_compute_entropy=lambda **_: logp**2)
    worker.get_old_log_probs_with_cache = lambda data, log_probs: batch.poisoned(batch.old)
    rows = {
        "response_mask": torch.nn.functional.pad(batch.mask.long(), (1, 0)), "input_ids": None,
        "advantages": batch.advantages, "ref_log_probs": batch.poisoned(batch.ref),
        "infer_logprobs": batch.poisoned(batch.rollout), "train_infer_is_weight": torch.full_like(batch.old, 0.7),
    }  # fmt: skip
    counts = {"batch_num_tokens": {"response_mask": 99}, "global_valid_samples": {"response_mask": 7}}
    if final_mask is not None:
        rows["final_response_mask"] = final_mask.long()
        if counted:
            counts["batch_num_tokens"]["final_response_mask"] = 55
            counts["global_valid_samples"]["final_response_mask"] = 5
    return worker.loss_func(SimpleNamespace(batch=rows, meta_info=counts), logp)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_roll(mode):
    batch = with_a_far_reference(Batch())
    counts = batch.mask.sum(1, keepdim=True)
    weights = {
        "token-mean": 1 / 99, "seq-mean-token-sum": 1 / 7, "seq-mean-token-mean": 1 / (7 * counts),
        "seq-mean-token-sum-norm": 1 / LENGTH,
    }[mode]  # fmt: skip

    def theirs(logp):
        terms = clipped(logp, batch.old, batch.advantages, 0.2, 0.28, 1.4)
        terms = terms + 0.1 * clamped_k3(logp, batch.ref) - 0.05 * logp**2
        return (weights * masked(terms, batch.mask)).sum()

    fields = {"loss_agg_mode": mode, "use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_loss_coef": 0.05}
    equal(lambda logp: of_roll(batch, logp, **fields), theirs, batch.logp)


def test_rolls_penalty_with_a_coefficient_of_0_is_none():
    batch = Batch()
    (loss, logged), (alone, expected) = (of_roll(batch, batch.logp, use_kl_loss=each) for each in (True, False))
    assert torch.equal(loss, alone) and logged == expected


def test_a_bound_of_k3_counts_no_masked_token_and_hides_no_infinite_one():
    batch, gate = Batch(), gates.ppo_clip()
    rows = padded_rows(batch.mask, gate)

    def loss(logp, ref):
        given = {"ref_logp": ref, "kl": hpo.kl.k3(0.1), "clamp_k3": True}
        return token_loss(logp, batch.old, batch.advantages, rows, gate, torch.ones(ROWS), **given)

    far = torch.where(batch.mask, batch.ref, batch.logp + 50)
    assert torch.equal(loss(batch.logp, far).loss, loss(batch.logp, batch.ref).loss)
    batch.logp[0, 0] = -torch.inf
    seen = loss(batch.logp, batch.ref).metrics
    assert (seen["infinite_tokens"], seen["nan_tokens"]) == (1, 0)


@pytest.mark.parametrize("corrected", [True, False])
def test_roll_keeps_rlvrs_masks_and_weights(corrected):
    """A mask of samples with counts of its own, weights of samples, the coefficient and the correction."""
    batch, final = Batch(), Batch().mask
    final[3] = False
    ratio = torch.exp(batch.old - batch.rollout)
    kept = ratio > 0.8 if corrected else torch.ones_like(final)
    factor = ratio.clamp(max=1.1) if corrected else 0.7
    of_samples = 2.0 - (batch.mask & kept).sum(1, keepdim=True) / LENGTH

    def theirs(logp):
        terms = of_samples * factor * clipped(logp, batch.old, batch.advantages, 0.2, 0.28, 1.4)
        terms = masked(terms + 0.1 * clamped_k3(logp, batch.ref), final & kept)
        entropy = masked(logp**2, batch.mask)
        if not corrected:
            return 0.3 * terms.sum() / 55 - 0.05 * entropy.sum() / 99
        means = terms.sum(1) / (final & kept).sum(1).clamp(min=1)
        return 0.3 * means.sum() / 5 - 0.05 * (entropy.sum(1) / batch.mask.sum(1)).sum() / 7

    fields = {
        "loss_agg_mode": "seq-mean-token-mean" if corrected else "token-mean", "entropy_loss_coef": 0.05,
        "use_kl_loss": True, "kl_loss_coef": 0.1, "rl_loss_coef": 0.3, "length_loss_weight": True,
        "enable_old_logprobs_recompute": not corrected,
        "train_infer_correction": SimpleNamespace(is_weight=SimpleNamespace(enabled=True)),
    }  # fmt: skip
    equal(lambda logp: of_roll(batch, logp, final, **fields), theirs, batch.logp)
    assert ("actor/train_infer_ratio_token_mean@sum" in of_roll(batch, batch.logp, final, **fields)[1]) == corrected


def test_roll_logs_parts_over_the_counts_of_the_step():
    """ROLL adds what ends in @sum over micro-batches and ranks, and takes the mean of the rest."""
    batch = with_a_far_reference(Batch())
    fields = {"dual_clip_loss": False, "use_kl_loss": True, "kl_loss_coef": 0.1}
    total, logged = of_roll(batch, batch.logp, **fields)
    ratio = torch.exp(batch.logp - batch.old)
    outside = ((ratio > 1.28) & (batch.advantages > 0)) | ((ratio < 0.8) & (batch.advantages < 0))
    expected = {
        "pg_loss": clipped(batch.logp, batch.old, batch.advantages, 0.2, 0.28),
        "kl_loss": clamped_k3(batch.logp, batch.ref),
        "policykl": batch.logp - batch.old,
        "clipfrac": outside.float(),
    }
    for name, terms in expected.items():
        assert logged[f"actor/{name}@sum"] == pytest.approx(masked(terms, batch.mask).sum().item() / 99, rel=1e-4), name
    assert logged["actor/total_loss@sum"] == total.item() and all(name.endswith("@sum") for name in logged)
    weighted = of_roll(batch, batch.logp, length_loss_weight=True)[1]
    assert "actor/weighted_pg_loss@sum" in weighted and "actor/pg_loss@sum" not in weighted


def test_roll_trains_agents_without_the_mask_of_samples_and_filters_their_entropy():
    batch, final = Batch(), torch.zeros_like(Batch().mask)
    kept = batch.mask & (torch.exp(batch.old - batch.rollout) > 0.8)

    def theirs(logp):
        return masked(clipped(logp, batch.old, batch.advantages, 0.2, 0.28, 1.4) - 0.05 * logp**2, kept).sum() / 99

    fields = {"entropy_loss_coef": 0.05, "enable_old_logprobs_recompute": False}
    equal(lambda logp: of_roll(batch, logp, final, counted=False, **fields), theirs, batch.logp)


def means(values, mask, of_turns):
    """The mean of each row, or of each of its runs of valid tokens, at all its tokens."""
    found = torch.zeros_like(values)
    for row in range(ROWS):
        begins = mask[row].long().diff(prepend=torch.zeros(1).long()) > 0
        run_of = begins.cumsum(0) if of_turns else torch.ones_like(begins).long()
        for run in range(1, int(run_of[-1]) + 1):
            here = mask[row] & (run_of == run)
            found[row, here] = values[row, here].mean()
    return found


@pytest.mark.parametrize("dual", [False, True])
@pytest.mark.parametrize("field", ["importance_sampling", "ratio_type"])
def test_roll_describes_ratios_of_sequences_and_segments(field, dual):
    batch, of_turns = Batch(per_token=True), field == "ratio_type"

    def theirs(logp):
        mean = means(logp - batch.old, batch.mask, of_turns)
        terms = clipped(mean, 0.0, batch.advantages, 0.05, 0.06, 1.01 if dual else None)
        return masked(terms, batch.mask).sum() / 99

    fields = {"dual_clip_loss": dual, "pg_clip": 0.005, "pg_clip_low": 0.05, "pg_clip_high": 0.06}
    fields[field] = "segment" if of_turns else "seq"
    equal(lambda logp: of_roll(batch, logp, **fields), theirs, batch.logp)
    assert abs(theirs(batch.logp) - of_roll(batch, batch.logp, **{**fields, "dual_clip_loss": not dual})[0]) > 1e-4


def test_roll_takes_the_gate_of_the_environment_or_refuses_it(monkeypatch):
    batch = Batch()
    monkeypatch.setenv("HPO_GATE", "gspo(0.05, 0.06)")
    expected = hpo.policy_loss(
        batch.logp, batch.old, batch.advantages, batch.mask, gates.gspo(0.05, 0.06), advantage_level="token",
        weights=torch.full((ROWS,), 1 / 99),
    )  # fmt: skip
    unset = {"use_pg_clip_range": False, "dual_clip_loss": False}
    torch.testing.assert_close(of_roll(batch, batch.logp, **unset)[0], expected.loss)
    silenced = {
        "pg_clip": 0.5, "use_pg_clip_range": True, "importance_sampling": "seq", "ratio_type": "segment",
        "dual_clip_loss": True,
    }  # fmt: skip
    for field, value in silenced.items():
        with pytest.raises(ValueError, match=f"{field}: the gate 'gspo' does not read it; got {value}"):
            of_roll(batch, batch.logp, **{**unset, field: value})
    monkeypatch.setenv("HPO_GATE", "icepop")
    with pytest.raises(ValueError, match="ROLL keeps the sampler's log-probabilities to its own correction"):
        of_roll(batch, batch.logp, **unset)
    monkeypatch.setenv("HPO_GATE", "")
    with pytest.raises(ValueError, match="loss_agg_mode"):
        of_roll(batch, batch.logp, loss_agg_mode="mean")
    variant = SimpleNamespace(pg_variant="cispo")
    with pytest.raises(ValueError, match=r"actor_train\.pg_variant: expected 'ppo' or none, got 'cispo'"):
        of_roll(batch, batch.logp, actor_train=variant)


def test_prime_rls_penalty_leaves_out_what_the_loss_leaves_out():
    batch = Batch()
    batch.lengths = batch.lengths[:1]
    masked_out = ~batch.mask[0]
    batch.logp[0, 0] = torch.nan
    assert batch.mask[0, 0] and masked_out.any()
    alone, both = (of_prime_rl(batch, batch.logp, gate="ppo_clip", kl_tau=tau) for tau in (0.0, 0.1))
    gap = torch.where(batch.mask[0] & ~batch.logp[0].isnan(), batch.logp[0] - batch.rollout[0], 0.0)
    torch.testing.assert_close(both - alone, 0.1 * gap.square().sum())


def test_prime_rl_logs_fractions():
    batch = Batch(width=0.8)
    with modules(prime_rl__trainer__rl__loss={"LossOutputs": LossOutputs}):
        loss = integration("prime_rl").loss
        found = loss(prime_inputs(batch, 0, batch.logp, None), gate="ppo_clip").metrics
    mask, gap = batch.mask[0], (batch.logp - batch.rollout)[0]
    outside = torch.where(batch.advantages[0] > 0, gap.exp() > 1.2, gap.exp() < 0.8)
    torch.testing.assert_close(found["hpo/clipped"], outside[mask].float().mean())
    torch.testing.assert_close(found["hpo/log_ratio"], gap[mask].mean())
