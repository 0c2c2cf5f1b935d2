"""slime and miles, which no package index has, on tensors as they hand them over, against formulas of their own losses
that were read at the commit named with each."""

from types import SimpleNamespace

import pytest
import torch
from trainer_batches import LENGTH, ROWS, Batch, clipped, equal, integration, k3, masked, modules, parts

# --------------------------------------------------------------------------------------------------------------- slime
# policy_loss_function and sum_of_sample_mean of slime/backends/megatron_utils/loss.py at 624b824.


def truncated(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **_):
    ratio = torch.exp(torch.cat(train_log_probs) - torch.cat(rollout_log_probs))
    factor = ratio.clamp(args.tis_clip_low, args.tis_clip)
    return pg_loss * factor, loss_masks, {"tis": ratio}


def rejecting(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths):
    """A function of a user: factors on tokens, and masks without those whose ratio is high."""
    ratios = [torch.exp(one - other) for one, other in zip(train_log_probs, rollout_log_probs, strict=True)]
    assert [len(ratio) for ratio in ratios] == response_lengths
    kept = [mask * (ratio < args.tis_clip) for mask, ratio in zip(loss_masks, ratios, strict=True)]
    return pg_loss * torch.cat(ratios), kept, {"rejected": (torch.cat(ratios) >= args.tis_clip).float()}


def sums_of_means(lengths, masks, sums, per_token):
    weights = [1.0] * ROWS if per_token else [1.0 / n for n in sums]
    return lambda values: sum(
        w * (m * v).sum() for w, m, v in zip(weights, masks, torch.split(values, lengths), strict=True)
    )


def of_slime(batch, logp, sums, sampled=True, **fields):
    told = {
        "advantage_estimator": "grpo", "calculate_per_token_loss": False, "entropy_coef": 0.0, "eps_clip": 0.2,
        "eps_clip_c": None, "eps_clip_high": 0.2, "kl_loss_coef": 0.0, "kl_loss_type": "k3", "use_kl_loss": False,
        "use_opsm": False, "use_rollout_logprobs": False, "use_tis": False, "use_unbiased_kl": False, "tis_clip": 1.1,
        "tis_clip_low": 0.0, "get_mismatch_metrics": False, "custom_tis_function_path": None,
        "custom_pg_loss_reducer_function_path": None, **fields,
    }  # fmt: skip
    entropy = [logp[row, :length] ** 2 for row, length in enumerate(batch.lengths)]
    theirs = {
        "get_log_probs_and_entropy": lambda *_, **__: (None, {"log_probs": parts(logp, batch), "entropy": entropy}),
        "get_rollout_top_p_logprob_kwargs": lambda args, batch: {"of": (args.eps_clip, batch["advantages"])},
        "compute_approx_kl": k3,
        "vanilla_tis_function": truncated, "load_function": {"mine.rejecting": rejecting}.get,
        "get_sum_of_sample_mean": lambda *told: sums_of_means(*told[1:]),
    }  # fmt: skip
    handed = {
        "unconcat_tokens": None, "total_lengths": None, "response_lengths": batch.lengths,
        "loss_masks": parts(batch.mask.long(), batch), "advantages": parts(batch.advantages, batch),
        "log_probs": parts(batch.old, batch), "rollout_log_probs": parts(batch.rollout, batch),
        "ref_log_probs": parts(batch.ref, batch), "rollout_mask_sums": sums,
    }  # fmt: skip
    if not sampled:
        del handed["rollout_log_probs"]

    reducer = sums_of_means(batch.lengths, handed["loss_masks"], sums, told["calculate_per_token_loss"])
    with modules(slime__backends__megatron_utils__loss=theirs):
        found = integration("slime").loss(SimpleNamespace(**told), handed, logp, reducer)
    assert all(torch.is_tensor(value) and value.dim() == 0 for value in found[1].values())
    return found


def slime_sums(batch):
    """Two samples of one trajectory share their tokens."""
    counts = batch.mask.sum(1).tolist()
    return [counts[0] + counts[1]] * 2 + counts[2:]


@pytest.mark.parametrize("per_token", [True, False])
def test_slime(per_token):
    batch = Batch()
    sums = slime_sums(batch)
    weights = torch.ones(ROWS, 1) if per_token else 1 / torch.tensor(sums)[:, None]

    def theirs(logp, high=0.28):
        ratio = torch.exp(batch.old - batch.rollout).clamp(0.0, 1.1)
        terms = ratio * clipped(logp, batch.old, batch.advantages, 0.2, high, 1.5)
        terms = terms - 0.1 * logp**2 + 0.05 * k3(logp, batch.ref, "k3")
        return (weights * masked(terms, batch.mask)).sum()

    fields = {
        "calculate_per_token_loss": per_token, "eps_clip_high": 0.28, "eps_clip_c": 1.5, "entropy_coef": 0.1,
        "use_kl_loss": True, "kl_loss_coef": 0.05, "use_tis": True,
    }  # fmt: skip
    equal(lambda logp: of_slime(batch, logp, sums, **fields), theirs, batch.logp)
    ratio = torch.exp(batch.logp - batch.old)
    outside = ((ratio > 1.28) & (batch.advantages > 0)) | ((ratio < 0.8) & (batch.advantages < 0))
    count, counts = (outside & batch.mask).sum(), batch.mask.sum(1).tolist()
    logged = of_slime(batch, batch.logp, counts, calculate_per_token_loss=per_token, eps_clip_high=0.28)[1]
    assert count > 5 and logged["pg_clipfrac"] == pytest.approx(count * (1 if per_token else ROWS / batch.tokens))


@pytest.mark.parametrize("flag", ["use_tis", "get_mismatch_metrics"])
@pytest.mark.parametrize("per_token", [True, False])
def test_slimes_custom_correction(per_token, flag):
    """Its masks are those of all terms, in the denominators of all tokens."""
    batch = Batch()
    sums = slime_sums(batch)
    weights = torch.ones(ROWS, 1) if per_token else 1 / torch.tensor(sums)[:, None]
    ratio = torch.exp(batch.old - batch.rollout)
    kept = batch.mask & (ratio < 1.1)

    def theirs(logp):
        terms = ratio * clipped(logp, batch.old, batch.advantages) - 0.1 * logp**2 + 0.05 * k3(logp, batch.ref, "k3")
        return (weights * masked(terms, kept)).sum()

    fields = {
        flag: True, "custom_tis_function_path": "mine.rejecting", "calculate_per_token_loss": per_token,
        "entropy_coef": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.05,
    }  # fmt: skip
    equal(lambda logp: of_slime(batch, logp, sums, **fields), theirs, batch.logp)
    rejected = (weights * (batch.mask & ~kept)).sum().item()
    assert rejected > 0 and of_slime(batch, batch.logp, sums, **fields)[1]["rejected"] == pytest.approx(rejected)


def test_slimes_old_policy_is_the_sampler_where_it_is_told():
    batch = Batch()
    sums = slime_sums(batch)

    def theirs(logp):
        return (masked(clipped(logp, batch.rollout, batch.advantages), batch.mask) / torch.tensor(sums)[:, None]).sum()

    equal(lambda logp: of_slime(batch, logp, sums, use_rollout_logprobs=True), theirs, batch.logp)


@pytest.mark.parametrize("per_token", [True, False])
def test_slimes_log(per_token):
    """ppo_kl as slime has it, and counts of what the loss leaves out, under the same names in each micro-batch."""
    batch, bad = Batch(), Batch()
    sums = slime_sums(batch)
    bad.old[0, 0] = torch.nan
    one, other = (of_slime(each, batch.logp, sums, calculate_per_token_loss=per_token)[1] for each in (batch, bad))
    weights = torch.ones(ROWS, 1) if per_token else 1 / torch.tensor(sums)[:, None]
    kl = (weights * masked(batch.old - batch.logp, batch.mask)).sum().item()
    assert one["ppo_kl"] == pytest.approx(kl, rel=1e-5)
    gap = (weights * masked((batch.old - batch.rollout).abs(), batch.mask)).sum().item()
    assert one["train_rollout_logprob_abs_diff"] == pytest.approx(gap, rel=1e-5)
    fields = {"calculate_per_token_loss": per_token, "use_rollout_logprobs": True}
    anchored = of_slime(batch, batch.logp, sums, **fields)[1]["train_rollout_logprob_abs_diff"]
    gap = (weights * masked((batch.logp - batch.rollout).abs(), batch.mask)).sum().item()
    assert anchored == pytest.approx(gap, rel=1e-5)
    assert list(one) == list(other) and one["hpo/nan_tokens"] == 0 and other["hpo/nan_tokens"] == 1


@pytest.mark.parametrize("unbiased", [False, True])
def test_a_reference_that_is_no_number_pays_no_penalty(unbiased):
    """At a masked position, and at a valid token, whose share is left out as the loss leaves it out."""
    batch, fields = Batch(), {"use_kl_loss": True, "kl_loss_coef": 0.5, "use_unbiased_kl": unbiased}
    sums, gradients = slime_sums(batch), []
    for broken in (False, True):
        if broken:
            batch.ref = batch.poisoned(batch.ref)
        leaf = batch.logp.clone().requires_grad_()
        of_slime(batch, leaf, sums, **fields)[0].backward()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients) and gradients[0].any()
    batch.ref[0, 0] = torch.nan
    assert batch.mask[0, 0] and of_slime(batch, batch.logp, sums, **fields)[0].isfinite()


def test_slimes_cispo_counts_what_its_clamp_moves():
    batch = Batch()
    ratio = torch.exp(batch.logp - batch.old)
    moved = (ratio.clamp(0.8, 1.28) != ratio)[batch.mask].sum()
    fields = {"advantage_estimator": "cispo", "calculate_per_token_loss": True, "eps_clip_high": 0.28}
    assert of_slime(batch, batch.logp, slime_sums(batch), **fields)[1]["pg_clipfrac"] == moved


def test_slimes_gspo_and_the_gate_of_the_environment(monkeypatch):
    batch = Batch(per_token=True)
    sums = batch.mask.sum(1).tolist()

    def theirs(logp, *dual):
        mean = masked(logp - batch.old, batch.mask).sum(1, keepdim=True) / batch.mask.sum(1, keepdim=True)
        terms = clipped(mean, 0.0, batch.advantages, 0.05, 0.06, *dual)
        return (masked(terms, batch.mask).sum(1) / torch.tensor(sums)).sum()

    fields = {"advantage_estimator": "gspo", "eps_clip": 0.05, "eps_clip_high": 0.06}
    equal(lambda logp: of_slime(batch, logp, sums, **fields), theirs, batch.logp)
    assert theirs(batch.logp) != theirs(batch.logp, 1.02)
    equal(
        lambda logp: of_slime(batch, logp, sums, **fields, eps_clip_c=1.02), lambda logp: theirs(logp, 1.02), batch.logp
    )
    monkeypatch.setenv("HPO_GATE", "gspo(0.05, 0.06)")
    equal(lambda logp: of_slime(batch, logp, sums), theirs, batch.logp)


@pytest.mark.parametrize(
    ("gate", "fields", "said"),
    [
        ("", {"context_parallel_size": 2}, "context_parallel_size"),
        ("", {"use_opsm": True}, "use_opsm"),
        ("icepop", {"use_tis": True}, "use_tis: it and .* correct the same difference"),
        ("icepop", {"get_mismatch_metrics": True}, "get_mismatch_metrics: it and .* correct the same difference"),
        ("icepop", {"use_rollout_logprobs": True}, "with --use-rollout-logprobs there is one old policy"),
        (
            "",
            {"custom_pg_loss_reducer_function_path": "mine.dr_grpo"},
            "^custom_pg_loss_reducer_function_path: .*leave",
        ),
        ("gspo", {"eps_clip_high": 0.28}, "eps_clip_high: the gate 'gspo' does not read it.*or take HPO_GATE away"),
        ("dapo", {"advantage_estimator": "gspo"}, "^advantage_estimator: 'gspo' has .* the gate 'dapo' replaces; set"),
        ("dapo", {"advantage_estimator": "cispo"}, "^advantage_estimator: 'cispo' has .* the gate 'dapo' replaces"),
        ("reconstructed.p3o", {}, "level of groups"),
    ],
)
def test_slime_refuses_by_name(gate, fields, said, monkeypatch):
    monkeypatch.setenv("HPO_GATE", gate)
    with pytest.raises(ValueError, match=said):
        of_slime(Batch(), Batch().logp, slime_sums(Batch()), **fields)


# --------------------------------------------------------------------------------------------------------------- miles
# policy_loss_function of miles/backends/training_utils/loss_hub/losses.py and get_sum_of_sample_mean of cp_utils.py
# beside it, at 31f1ca9.


def of_miles(batch, logp, sums, **fields):
    told = {
        "advantage_estimator": "grpo", "calculate_per_token_loss": False, "entropy_coef": 0.0, "eps_clip": 0.2,
        "eps_clip_c": None, "eps_clip_high": 0.2, "use_kl_loss": False, "use_opsm": False, "use_tis": False,
        "use_rollout_logprobs": False, "use_unbiased_kl": False, "tis_clip": 1.1, "tis_clip_low": 0.0,
        "get_mismatch_metrics": False, "custom_tis_function_path": None, "qkv_format": "thd",
        "observe_training_entropy": False, **fields,
    }  # fmt: skip
    state, lengths, seen = object(), [LENGTH] * ROWS, {}

    def scores(logits, *, args, with_entropy, entropy_requires_grad, max_seq_lens, **keywords):
        assert sorted(keywords) == ["response_lengths", "total_lengths", "unconcat_tokens"] and max_seq_lens is lengths
        seen["entropy"] = with_entropy
        entropy = [logp[row, :length] ** 2 for row, length in enumerate(batch.lengths)]
        found = {"log_probs": parts(logp, batch)}
        if with_entropy:
            found["entropy"] = entropy if entropy_requires_grad else [each.detach() for each in entropy]
        return found

    def corrected(args, *, parallel_state, max_seq_lens, **keywords):
        assert parallel_state is state and max_seq_lens is lengths
        return truncated(args, **keywords)

    def reducer(total, responses, masks, per_token, qkv_format, max_seq_lens, *, denominators):
        assert (qkv_format, max_seq_lens) == ("thd", lengths)
        return sums_of_means(responses, masks, denominators, per_token)

    theirs = {
        "get_log_probs_and_entropy": scores, "compute_approx_kl": k3, "vanilla_tis_function": corrected,
        "load_function": {"mine.corrected": corrected}.get, "get_sum_of_sample_mean": reducer,
        "get_parallel_state": lambda: state,
    }  # fmt: skip
    handed = {
        "unconcat_tokens": [], "total_lengths": batch.lengths, "response_lengths": batch.lengths,
        "loss_masks": parts(batch.mask.long(), batch), "advantages": parts(batch.advantages, batch),
        "log_probs": parts(batch.old, batch), "rollout_log_probs": parts(batch.rollout, batch),
        "ref_log_probs": parts(batch.ref, batch), "rollout_mask_sums": sums, "max_seq_lens": lengths,
        "teacher_log_probs": None,
    }  # fmt: skip
    given = sums_of_means(batch.lengths, handed["loss_masks"], sums or [1.0] * ROWS, told["calculate_per_token_loss"])
    with modules(miles__backends__training_utils__loss_hub__losses=theirs):
        found = integration("miles").loss(SimpleNamespace(**told), handed, logp, given)
    assert seen["entropy"] == (told["entropy_coef"] != 0 or told["observe_training_entropy"])
    return found


@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize("path", [None, "mine.corrected"])
def test_miles(path, per_token):
    batch = Batch()
    sums = slime_sums(batch)
    weights = torch.ones(ROWS, 1) if per_token else 1 / torch.tensor(sums)[:, None]

    def theirs(logp, coefficient=0.1):
        ratio = torch.exp(batch.old - batch.rollout).clamp(0.0, 1.1)
        terms = ratio * clipped(logp, batch.old, batch.advantages, 0.2, 0.28, 1.5)
        terms = terms - coefficient * logp**2 + 0.05 * k3(logp, batch.ref, "k3")
        return (weights * masked(terms, batch.mask)).sum()

    fields = {
        "calculate_per_token_loss": per_token, "eps_clip_high": 0.28, "eps_clip_c": 1.5, "use_kl_loss": True,
        "kl_loss_coef": 0.05, "kl_loss_type": "k3", "use_tis": True, "custom_tis_function_path": path,
    }  # fmt: skip
    equal(lambda logp: of_miles(batch, logp, sums, entropy_coef=0.1, **fields), theirs, batch.logp)
    equal(
        lambda logp: of_miles(batch, logp, sums, observe_training_entropy=True, **fields),
        lambda logp: theirs(logp, 0.0),
        batch.logp,
    )
    entropy = of_miles(batch, batch.logp, sums, observe_training_entropy=True, **fields)[1]["entropy_loss"]
    assert entropy > 0 and of_miles(batch, batch.logp, sums, **fields)[1]["entropy_loss"] == 0


def test_miles_takes_the_gate_of_the_environment_or_refuses_it(monkeypatch):
    batch = Batch()
    monkeypatch.setenv("HPO_GATE", "gspo(0.05, 0.06)")
    expected = of_slime(batch, batch.logp, slime_sums(batch))[0]
    assert of_miles(batch, batch.logp, slime_sums(batch))[0] == expected
    with pytest.raises(ValueError, match=r"eps_clip: the gate 'gspo' does not read it; .*miles's 0\.2"):
        of_miles(batch, batch.logp, slime_sums(batch), eps_clip=0.3)
    with pytest.raises(ValueError, match="batch: expected 'rollout_mask_sums'"):
        of_miles(batch, batch.logp, None)


def test_slime_needs_no_sampler_without_a_correction():
    batch = Batch()
    sums = batch.mask.sum(1).tolist()
    with_sampler = of_slime(batch, batch.logp, sums)[0]
    assert torch.equal(of_slime(batch, batch.logp, sums, sampled=False)[0], with_sampler)
