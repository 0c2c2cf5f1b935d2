"""policy_loss and its relatives as functions of their arguments: defaults, levels and shapes."""

import functools

import pytest
import torch
from loss_examples import GATE, TOKENS, example_of, same

import hpo_core as hpo
from hpo_core import entropy, gates, kl, testing

example = pytest.fixture(example_of)

# ------------------------------------------------------------------------------------------------------- defaults


def test_defaults(example):
    expected = example.grad(gate=gates.ppo_clip(0.2, 0.2), weights=hpo.aggregation.token_mean(example.batch))
    same(example.grad(), expected)
    same(example.grad(gate=None), expected)


def test_default_weights_count_what_the_gate_takes(backend):
    """Where steps are a level tokens outside all of them are masked: the default is the mean over the others, in a
    padded batch too. Every other gate takes all tokens."""
    place = testing.device_of(backend)
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]], dtype=torch.bool, device=place)
    steps = torch.tensor([[1, 4], [5, 6]], device=place)  # of 7 valid tokens 3, as token 3 is masked
    advantages = torch.ones(2, device=place)
    for batch in (hpo.PackedBatch.from_padded(mask, steps=steps), hpo.PackedBatch(
        torch.tensor([0, 4, 8], device=place), mask.flatten(), steps=steps
    )):  # fmt: skip
        logp = torch.zeros(batch.padded_shape or (8,), device=place)
        run = functools.partial(hpo.policy_loss_and_grad, logp, None, advantages, batch, backend=backend)
        third = -1 / 3
        assert run(gates.step_gspo()).grad.flatten().tolist() == pytest.approx([0, third, third, 0, 0, third, 0, 0])
        assert run(gates.ppo_clip()).loss.item() == pytest.approx(-1.0)


def test_without_old_logp_every_ratio_is_one(example):
    same(example.grad(old_logp=None), example.grad(old_logp=example.logp))
    one = example.grad(old_logp=None)
    expected = torch.where(example.mask, -(one_per_token(example, example.advantages)) / example.mask.sum(), 0.0)
    torch.testing.assert_close(one.grad, expected)


def one_per_token(example, per_row):
    return per_row.repeat_interleave(torch.tensor([4, 3, 0, 5], device=per_row.device))


def test_everything_at_once(example, backend):
    """Each optional input takes part: leaving one out changes the gradient."""
    window = entropy.forking_tokens("0.6")
    keywords = {
        "gate": GATE,
        "weights": torch.tensor([0.1, 0.2, 0.3, 0.4], device=example.logp.device),
        "ref_logp": example.ref_logp,
        "kl": kl.k3(0.5),
        "entropy": example.entropy,
        "window": window,
        "threshold": window.fit(example.entropy, example.batch),
        "token_mask": example.token_mask,
        "token_weight": example.token_weight,
        "gate_inputs": gates.GateInputs(bounds=(example.low, example.high)),
    }
    whole = example.grad(backend=backend, **keywords)
    exact = example.grad(backend="reference", **keywords)
    torch.testing.assert_close(whole.grad, exact.grad, rtol=1e-5, atol=1e-7)
    for names in (
        ("gate",),
        ("weights",),
        ("ref_logp", "kl"),
        ("window", "threshold"),
        ("token_mask",),
        ("token_weight",),
        ("gate_inputs",),
    ):
        fewer = example.grad(backend=backend, **{name: value for name, value in keywords.items() if name not in names})
        changed = not torch.equal(fewer.grad, whole.grad)
        assert changed or names == ("gate",), names  # the bounds stand in for this gate's


@pytest.mark.parametrize("gate", [GATE, gates.gspo(0.05, 0.05), gates.cispo(1.1)], ids=lambda gate: gate.name)
@pytest.mark.parametrize("named", ["cpu", "reference"])
def test_without_autograd(example, gate, named):
    leaf = example.logp.clone().requires_grad_()
    expected = example.loss(logp=leaf, gate=gate, backend=named)
    expected.loss.backward()
    for logp in (example.logp, leaf):
        for grad_mode in (torch.enable_grad, torch.no_grad):
            with grad_mode():
                result = example.grad(logp=logp, gate=gate, backend=named)
            same(result, expected)
            assert torch.equal(result.grad, leaf.grad)
            assert not result.loss.requires_grad and not result.grad.requires_grad


def test_tokens(example, backend):
    keywords = {"gate": GATE, "kl": kl.k3(0.1), "ref_logp": example.ref_logp, "backend": backend}
    assert example.loss(**keywords).tokens is None
    result = example.loss(report=("tokens",), **keywords)
    assert result.tokens.shape == (TOKENS,) and (result.tokens[~example.mask] == 0).all()
    torch.testing.assert_close((result.tokens / example.mask.sum()).sum(), result.loss)
    for mode in (hpo.aggregation.seq_mean_token_mean, hpo.aggregation.seq_mean_token_sum):
        weights = mode(example.batch)
        weighted = example.loss(report=("tokens",), weights=weights, **keywords)
        assert torch.equal(weighted.tokens, result.tokens), "loss_t does not know the weights"
        torch.testing.assert_close((one_per_token(example, weights) * weighted.tokens).sum(), weighted.loss)


def test_a_report_may_be_asked_for_by_a_generator():
    logp, batch = torch.zeros(2), hpo.PackedBatch.from_lengths([2])
    out = hpo.policy_loss(
        logp, None, torch.ones(1), batch, gates.gspo(), report=(name for name in ("tokens", "levels"))
    )
    assert out.tokens is not None and out.levels is not None
    with pytest.raises(ValueError, match="report: expected 'levels' or 'corrections', got 'tokens'"):
        hpo.policy_loss_and_grad(logp, None, torch.ones(1), batch, report=(name for name in ("tokens",)))


# ---------------------------------------------------------------------------------------------------------- shapes


def test_padded_in_and_out(backend):
    generator = torch.Generator().manual_seed(0)
    device = testing.device_of(backend)
    mask = torch.rand(3, 5, generator=generator).to(device) > 0.3
    logp, old_logp, ref_logp, scores = torch.randn(4, 3, 5, generator=generator).to(device)
    advantages = torch.tensor([1.0, -1.0, 0.5], device=device)
    window = entropy.ares(2, "0.3", scope="call")
    keywords = {"kl": kl.k3(0.1), "window": window, "backend": backend}
    shaped = {"ref_logp": ref_logp, "entropy": scores.abs(), "token_mask": mask, "token_weight": scores.exp()}
    packed = {name: tensor.reshape(-1) for name, tensor in shaped.items()}
    batch = hpo.PackedBatch.from_padded(mask)
    expected = hpo.policy_loss_and_grad(
        logp.reshape(-1), old_logp.reshape(-1), advantages, batch, GATE, **packed, **keywords
    )
    for given in (mask, mask.long(), batch):
        result = hpo.policy_loss_and_grad(logp, old_logp, advantages, given, GATE, **shaped, **keywords)
        assert result.grad.shape == (3, 5) and torch.equal(result.grad.reshape(-1), expected.grad)
    per_token = advantages[:, None].expand(3, 5)
    bounds = gates.GateInputs(bounds=(None, scores.exp() + 1))
    result = hpo.policy_loss(
        logp, old_logp, per_token, mask, GATE, gate_inputs=bounds, report=("tokens",), backend=backend,
        advantage_level="token",
    )  # fmt: skip
    assert result.tokens.shape == (3, 5)


def test_inputs_of_any_stride(example):
    def strided(tensor):
        return torch.stack((tensor, torch.full_like(tensor, 9)), -1)[..., 0]

    expected = example.grad(token_weight=example.token_weight)
    keywords = {name: strided(getattr(example, name)) for name in ("logp", "old_logp", "advantages", "token_weight")}
    assert not keywords["logp"].is_contiguous()
    same(example.grad(**keywords), expected)
    expanded = torch.tensor(2.0).expand(TOKENS)
    same(example.grad(token_weight=expanded), example.grad(token_weight=expanded.contiguous()))


@pytest.mark.parametrize("name", ["logp", "old_logp", "advantages", "weights", "token_weight"])
def test_a_negated_view_has_its_values_and_not_those_in_memory(name):
    batch = hpo.PackedBatch.from_lengths([3, 2])
    given = dict(zip(("logp", "old_logp", "token_weight"), -torch.rand(3, 5), strict=True), batch=batch)
    given |= {"advantages": torch.tensor([1.0, -1.0]), "weights": hpo.aggregation.token_mean(batch)}
    expected = hpo.policy_loss_and_grad(**given)
    given[name] = torch._neg_view(-given[name])
    assert given[name].is_neg() and given[name].is_contiguous()
    same(hpo.policy_loss_and_grad(**given), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.float16])
def test_constants_are_brought_to_float32(example, dtype):
    advantages = torch.tensor([1, -1, 2, 3]).to(dtype)
    same(example.grad(advantages=advantages), example.grad(advantages=advantages.float()))
    if dtype != torch.float16:  # too coarse for weights
        weights = torch.tensor([1, 2, 3, 4]).to(dtype)
        same(example.grad(weights=weights), example.grad(weights=weights.float()))


def test_float64_is_for_the_reference(example):
    logp = example.logp.double()
    result = example.grad(logp=logp, old_logp=example.old_logp.double(), backend="reference")
    assert result.grad.dtype == torch.float64
    torch.testing.assert_close(result.grad.float(), example.grad().grad)


# ---------------------------------------------------------------------------------------------------------- levels


def test_levels_within_the_row(example):
    per_row = example.grad()
    per_token = example.grad(advantages=one_per_token(example, example.advantages), advantage_level="token")
    same(per_row, per_token)
    steps = torch.tensor([[0, 4], [4, 7], [7, 9], [9, 12], [12, 12]])
    batch = hpo.PackedBatch(example.batch.cu_seqlens, example.mask, steps=steps)
    per_step = torch.cat((example.advantages[[0, 1, 3, 3]], torch.ones(1)))
    same(example.grad(advantages=per_step, batch=batch, advantage_level="step"), per_row)


@pytest.mark.parametrize("level", ["trajectory", "group", "domain"])
def test_levels_above_the_row(example, level):
    ids = torch.tensor([1, 0, 2, 1])
    batch = hpo.PackedBatch(example.batch.cu_seqlens, example.mask, **{f"{level}_ids": ids})
    values = torch.tensor([1.0, -2.0, 3.0])
    result = example.grad(advantages=values, batch=batch, advantage_level=level)
    same(result, example.grad(advantages=values[ids], batch=batch))


def test_a_teacher_is_distilled_by_advantages_of_tokens():
    """Over all tokens that could be sampled, the expected gradient is that of KL(policy | teacher)."""
    logits, teacher = torch.randn(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits.requires_grad_()
    logp, teacher_logp = logits.log_softmax(0), teacher.log_softmax(0)
    old_logp, batch = logp.detach(), hpo.PackedBatch.from_lengths([1] * 6)
    loss = hpo.policy_loss(
        logp, old_logp, teacher_logp - old_logp, batch, gates.dapo(), advantage_level="token", weights=old_logp.exp(),
        backend="reference",
    ).loss  # fmt: skip
    divergence = (logp.exp() * (logp - teacher_logp)).sum()
    found, expected = (torch.autograd.grad(each, logits, retain_graph=True)[0] for each in (loss, divergence))
    torch.testing.assert_close(found, expected)


def test_an_id_without_an_advantage_is_counted(example):
    batch = hpo.PackedBatch(example.batch.cu_seqlens, example.mask, group_ids=torch.tensor([0, 5, 0, -1]))
    for values in (torch.ones(2), torch.ones(0)):
        result = example.grad(advantages=values, batch=batch, advantage_level="group")
        left_out = 7 if len(values) else 10
        assert result.metrics["bad_advantages"] == left_out and (result.grad[4:] == 0).all()


def test_levels_of_equal_sizes():
    """A row of two tokens and an empty one: advantages of rows, unless another level is said."""
    batch = hpo.PackedBatch(torch.tensor([0, 2, 2]), steps=torch.tensor([[0, 1], [2, 2]]))
    logp, advantages = torch.zeros(2), torch.tensor([1.0, -3.0])
    for level, grad in ((None, [-1, -1]), ("row", [-1, -1]), ("token", [-1, 3]), ("step", [-1, 0])):
        out = hpo.policy_loss_and_grad(logp, None, advantages, batch, advantage_level=level)
        assert (2 * out.grad).tolist() == grad


@pytest.mark.parametrize(
    ("lengths", "cu_steps"),
    [
        ([1, 1], [0, 1, 2]),
        ([4, 4], [0, 4, 8]),
        ([2, 2, 0], [0, 1, 2, 4]),
        ([3], [0, 1, 3]),
        ([1], [0, 1]),
        ([], [0]),
        ([], [0, 0]),
    ],
)
def test_the_single_call_knows_the_level_of_its_estimator(lengths, cu_steps):
    """Whatever the numbers of tokens, steps and rows happen to be."""
    ids = torch.zeros(max(len(lengths), len(cu_steps)), dtype=torch.int64)
    of_rows = {"group_ids": ids[: len(lengths)], "domain_ids": ids[: len(lengths)]}
    batch = hpo.PackedBatch.from_lengths(lengths, cu_steps=torch.tensor(cu_steps), **of_rows)
    logp = torch.zeros(batch.total_tokens)
    of_steps = functools.partial(hpo.advantages.gigpo, anchor_ids=ids[: batch.num_steps])
    for estimator, level, count in ((hpo.advantages.grpo, "row", batch.rows), (of_steps, "step", batch.num_steps)):
        rewards = torch.arange(1.0, count + 1)
        given = batch.ids_of_steps() if level == "step" else {"group_ids": batch.group_ids}
        expected = hpo.policy_loss(logp, None, estimator(rewards, **given), batch, advantage_level=level)
        got = hpo.hierarchical_policy_loss(logp, None, rewards, batch, advantage=estimator)
        assert torch.equal(got.loss, expected.loss)
        said = hpo.hierarchical_policy_loss(logp, None, rewards, batch, advantage=estimator, advantage_level=level)
        assert torch.equal(said.loss, expected.loss)


def test_a_function_that_says_no_level_is_one_of_rows_unless_the_call_says():
    batch = hpo.PackedBatch(torch.tensor([0, 2, 2]), group_ids=torch.tensor([0, 0]))
    run = functools.partial(hpo.hierarchical_policy_loss, torch.zeros(2), None, torch.tensor([1.0, -3.0]), batch)
    assert run(advantage=lambda rewards, group_ids: rewards).loss == -1
    assert run(advantage=lambda rewards, group_ids: rewards, advantage_level="token").loss == 1


def test_a_function_of_the_users_gets_what_it_names():
    """The batch at every level, and ids of steps where the call says that its advantages are those of steps."""
    batch = hpo.PackedBatch.from_lengths([2, 2], cu_steps=torch.arange(5), group_ids=torch.tensor([0, 0]))
    run = functools.partial(hpo.hierarchical_policy_loss, torch.zeros(4), None, report=("tokens",))
    out = run(torch.ones(2), batch, advantage=lambda rewards, batch: rewards * batch.row_counts)
    assert out.tokens.tolist() == [-2, -2, -2, -2]

    def of_steps(rewards, trajectory_ids, batch):
        return rewards * trajectory_ids

    assert run(torch.ones(4), batch, advantage=of_steps, advantage_level="step").tokens.tolist() == [0, 0, -1, -1]
    assert run(torch.ones(2), batch, advantage=lambda batch: batch).tokens.tolist() == [-1, -1, -1, -1]  # the rewards
    shaped = functools.partial(hpo.entropy.edge_grpo, entropy=torch.ones(4))
    assert run(torch.ones(2), batch, advantage=shaped).tokens.shape == (4,)

    def of_domains(rewards, domain_ids):
        return rewards * domain_ids

    two = batch.replace(group_ids=torch.tensor([0, 1]), domain_ids=torch.tensor([5, 2]))
    for level, count in (("row", 2), ("step", 4)):
        out = run(torch.ones(count), two, advantage=of_domains, advantage_level=level)
        assert out.tokens.tolist() == [-5, -5, -2, -2]
    with pytest.raises(ValueError, match=r"^advantage: of_domains needs domain_ids, of which a call of level 'row'"):
        run(torch.ones(2), batch, advantage=of_domains)
    with pytest.raises(ValueError, match=r"^advantage: of_steps needs trajectory_ids, of which a call of level 'row'"):
        run(torch.ones(4), batch, advantage=of_steps)


def test_targets_have_the_level_of_the_advantages():
    """One per advantage, whatever sizes happen to be equal."""
    steps, ids = torch.tensor([[0, 1], [1, 2]]), torch.tensor([0, 3])
    batch = hpo.PackedBatch(torch.tensor([0, 2, 2]), steps=steps, group_ids=ids)
    advantages = torch.tensor([1.0, -1.0])
    given = hpo.gates.bpo_target(advantages)
    run = functools.partial(hpo.policy_loss_and_grad, torch.zeros(2), None, advantages, batch, hpo.gates.bpo())
    for level, grad in ((None, [-1, -1]), ("token", [-1, 1]), ("step", [-1, 1]), ("group", [-1, -1])):
        assert (2 * run(advantage_level=level, gate_inputs=given).grad).tolist() == grad
    with pytest.raises(ValueError, match=r"target: expected shape \[T\] \(one per token of the batch\) = \[2\], got"):
        run(advantage_level="token", gate_inputs=given._replace(target=given.target[:1]))
    with pytest.raises(ValueError, match=r"target: expected shape \[S\] \(one per row\) = \[2\], got \[3\]"):
        run(gate_inputs=hpo.gates.GateInputs(target=torch.ones(3)))
