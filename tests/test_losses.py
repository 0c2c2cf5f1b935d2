"""policy_loss and its relatives as functions of their arguments: defaults, levels, shapes, and every error."""

import functools

import pytest
import torch

import hpo_core as hpo
from hpo_core import entropy, gates, kl, testing

TOKENS, ROWS = 12, 4
GATE = gates.ppo_clip(0.1, 0.2)


class Example:
    """Four rows, one empty and one partly masked, with everything a call can take."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)

        def normal(*shape):
            return torch.randn(*shape, generator=generator)

        self.mask = torch.tensor([1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 1, 1], dtype=torch.bool)
        self.batch = hpo.PackedBatch.from_lengths([4, 3, 0, 5], mask=self.mask, group_ids=torch.tensor([0, 0, 1, 1]))
        self.logp = -normal(TOKENS).abs()
        self.old_logp = self.logp + 0.3 * normal(TOKENS)
        self.ref_logp = self.logp + 0.3 * normal(TOKENS)
        self.advantages = normal(ROWS)
        self.entropy = normal(TOKENS).abs()
        self.token_mask = normal(TOKENS) > -0.5
        self.token_weight = normal(TOKENS).abs()
        self.low, self.high = 1 - normal(TOKENS).abs() / 9, 1 + normal(TOKENS).abs() / 9

    def to(self, device):
        for name, value in vars(self).items():
            setattr(self, name, value.to(device))
        return self

    def arguments(self, **keywords):
        given = {"logp": self.logp, "old_logp": self.old_logp, "advantages": self.advantages, "batch": self.batch}
        return {**given, **keywords}

    def loss(self, **keywords):
        return hpo.policy_loss(**self.arguments(**keywords))

    def grad(self, **keywords):
        return hpo.policy_loss_and_grad(**self.arguments(**keywords))


@pytest.fixture
def example(request):
    """On the device of the test's backend."""
    parameters = getattr(getattr(request.node, "callspec", None), "params", {})
    return Example().to(testing.device_of(parameters.get("backend", "cpu")))


def same(one, other):
    assert torch.equal(one.loss, other.loss) and torch.equal(one.metrics.vector, other.metrics.vector)
    assert not (hasattr(one, "grad") and hasattr(other, "grad")) or torch.equal(one.grad, other.grad)


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
    [([1, 1], [0, 1, 2]), ([4, 4], [0, 4, 8]), ([2, 2, 0], [0, 1, 2, 4]), ([3], [0, 1, 3]), ([1], [0, 1]), ([], [0])],
)
def test_the_single_call_knows_the_level_of_its_estimator(lengths, cu_steps):
    """Whatever the numbers of tokens, steps and rows happen to be."""
    ids = torch.zeros(max(len(lengths), len(cu_steps)), dtype=torch.int64)
    batch = hpo.PackedBatch.from_lengths(lengths, cu_steps=torch.tensor(cu_steps), group_ids=ids[: len(lengths)])
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


# ---------------------------------------------------------------------------------------------------------- errors


def error_cases():
    example = Example()
    batch, logp, mask = example.batch, example.logp, example.mask
    window = entropy.forking_tokens()
    state = window.fit(example.entropy, batch)
    stepped = hpo.PackedBatch.from_lengths([2, 2], cu_steps=torch.tensor([0, 1, 2, 4]))
    padded = {
        "logp": torch.zeros(2, 3),
        "old_logp": None,
        "advantages": torch.ones(2),
        "batch": torch.ones(2, 3).bool(),
    }
    elsewhere, ids, given = torch.zeros(TOKENS, device="meta"), torch.arange(TOKENS), gates.GateInputs
    selecting = {"window": window, "entropy": example.entropy, "threshold": state}
    of_domains = gates.RatioGate("own", gates.Identity(), (gates.Level(gates.Tanh(0.1), unit=gates.Unit.DOMAIN),))
    return [
        # logp
        ({"logp": [0.0]}, TypeError, "logp: expected a tensor [T], got <class 'list'>"),
        ({"logp": logp[:5]}, ValueError, "logp: expected shape [T] (one per token of the batch) = [12], got [5]"),
        (
            {**padded, "logp": torch.zeros(3, 2)},
            ValueError,
            "logp: expected shape [B, L] (that of the padded batch) = [2, 3]",
        ),
        ({"logp": logp.half()}, TypeError, "logp: expected float32, got float16; 16-bit rounding"),
        ({"logp": logp.bfloat16()}, TypeError, "1.6e-2 a token"),
        ({"logp": logp.bfloat16()}, TypeError, "logits.float() before log_softmax"),
        (
            {"logp": logp.double()},
            TypeError,
            "logp: expected float32, got float64; use .float(), or backend='reference'",
        ),
        ({"logp": torch.zeros(TOKENS, dtype=torch.int64)}, TypeError, "logp: expected float32, got int64"),
        ({"logp": elsewhere}, ValueError, "device cpu (that of the batch), got meta; use logp.to('cpu')"),
        # constants
        ({"old_logp": logp[:5]}, ValueError, "old_logp: expected shape [T] (that of logp) = [12], got [5]"),
        ({"old_logp": logp.bfloat16()}, TypeError, "old_logp: expected float32, got bfloat16; 16-bit rounding"),
        ({"old_logp": ids}, TypeError, "old_logp: expected dtype float32, got int64; are these ids of tokens?"),
        ({"kl": kl.k3(0.1), "ref_logp": ids}, TypeError, "ref_logp: expected dtype float32, got int64; are these ids"),
        ({"rollout_logp": ids, "gate": gates.tis()}, TypeError, "rollout_logp: expected dtype float32, got int64; are"),
        ({"entropy": ids}, TypeError, "entropy: expected dtype float32, got int64; are these ids of tokens?"),
        ({"old_logp": elsewhere}, ValueError, "device cpu (that of logp), got meta; use old_logp.to('cpu')"),
        ({"old_logp": 0.0}, TypeError, "old_logp: expected a tensor [T] (that of logp), got <class 'float'>"),
        (
            {"old_logp": logp.clone().requires_grad_()},
            ValueError,
            "old_logp: it is a constant of the loss but requires a gradient; pass old_logp.detach(), and as logp what",
        ),
        ({"token_mask": logp}, TypeError, "token_mask: expected dtype bool, got float32"),
        ({"token_weight": mask}, TypeError, "token_weight: expected dtype float32, got bool"),
        ({"token_weight": logp[:5]}, ValueError, "token_weight: expected shape"),
        ({"weights": torch.ones(3)}, ValueError, "weights: expected shape [S] (one per row) = [4], got [3]"),
        ({"weights": 0.5}, TypeError, "weights: expected a tensor [S] (one per row), got <class 'float'>"),
        ({"weights": torch.ones(4).half()}, TypeError, "weights: expected float32, got float16; 16-bit rounding"),
        ({"entropy": logp[:5]}, ValueError, "entropy: expected shape"),
        ({"entropy": logp.clone().requires_grad_()}, ValueError, "entropy: it is a constant of the loss but requires"),
        (
            {"rollout_logp": logp.bfloat16(), "gate": gates.tis()},
            TypeError,
            "rollout_logp: expected float32, got bfloat16; 16-bit rounding",
        ),
        # batch, gate
        ({"batch": [4, 3, 0, 5]}, TypeError, "batch: expected a PackedBatch or a mask [B, L], got <class 'list'>"),
        ({"batch": mask}, ValueError, "batch: expected a PackedBatch or a mask [B, L], got a tensor [12]"),
        ({"batch": torch.nested.nested_tensor([mask])}, TypeError, "batch: expected a dense tensor, got a nested"),
        ({"gate": "ppo"}, TypeError, "gate: expected a RatioGate from hpo_core.gates, got ppo"),
        # what some gates are given
        ({"gate_inputs": given(bounds=logp)}, TypeError, "bounds: expected a pair (low, high)"),
        ({"gate_inputs": given(bounds=(logp[:5], None))}, ValueError, "bounds[0]: expected shape"),
        ({"gate_inputs": given(bounds=(None, elsewhere))}, ValueError, "bounds[1]: expected device"),
        (
            {"gate_inputs": given(bounds=(logp, None)), "gate": gates.gspo()},
            ValueError,
            "bounds: the gate 'gspo' has no token clip",
        ),
        (
            {"gate_inputs": given(bounds=(logp, logp)), "gate": gates.RatioGate("open", gates.Clip())},
            ValueError,
            "bounds: the gate 'open' has no token clip with bounds for them to replace",
        ),
        # levels and corrections
        ({"gate": of_domains}, ValueError, "domain_ids: the gate has a level or correction of domains"),
        (
            {"gate": gates.mis(unit=gates.Unit.DOMAIN), "rollout_logp": logp},
            ValueError,
            "domain_ids: the gate has a level or correction of domains, and the batch has none; pass domain_ids [S]",
        ),
        # penalty
        ({"kl": kl.k3(0.1)}, ValueError, "kl: ref_logp and kl go together, got only kl"),
        ({"ref_logp": logp}, ValueError, "kl: ref_logp and kl go together, got only ref_logp"),
        ({"kl": 0.1, "ref_logp": logp}, TypeError, "kl: expected a penalty such as hpo_core.kl.k3(beta), got 0.1"),
        ({"kl": kl.k3(0.1), "ref_logp": logp.half()}, TypeError, "ref_logp: expected float32, got float16; 16-bit"),
        # window
        ({"window": window}, ValueError, "entropy: a window needs the entropies [T]; pass entropy="),
        (
            {"window": window, "entropy": example.entropy},
            ValueError,
            "threshold: the window 'forking_tokens' selects over the whole batch; pass threshold=window.fit(",
        ),
        ({"threshold": state}, ValueError, "threshold: given without a window"),
        (
            {**selecting, "threshold": torch.ones(2)},
            ValueError,
            "threshold: expected shape [1] (what window.fit returned)",
        ),
        ({**selecting, "threshold": 0.5}, TypeError, "threshold: expected a tensor [1]"),
        ({**selecting, "threshold": state.to("meta")}, ValueError, "threshold: expected device cpu"),
        ({**selecting, "window": 0.2}, TypeError, "window: expected one of hpo_core.entropy, got 0.2"),
        ({**selecting, "entropy": example.entropy.half()}, TypeError, "entropy: expected dtype float32 or float64"),
        # what this gate does not read
        ({"rollout_logp": logp}, ValueError, "rollout_logp: the gate 'ppo_clip' does not read"),
        (
            {"process_group": torch.distributed.ProcessGroup(0, 1)},
            ValueError,
            "process_group: no level and no correction of the gate 'ppo_clip' spans ranks",
        ),
        # advantages
        ({"advantages": [1.0]}, TypeError, "advantages: expected a tensor [S], got <class 'list'>"),
        (
            {"advantages": torch.ones(7)},
            ValueError,
            "advantages: expected shape [S] (one per row) = [4], got [7]; "
            "or say advantage_level='token' ([12]), 'trajectory', 'group' or 'domain'",
        ),
        ({"advantages": torch.ones(4, 1)}, ValueError, "expected shape [S] (one per row) = [4], got [4, 1]"),
        ({"advantages": mask, "advantage_level": "token"}, TypeError, "advantages: expected dtype float32, got bool"),
        ({"advantages": torch.ones(4, requires_grad=True)}, ValueError, "advantages: it is a constant of the loss"),
        ({"advantages": torch.ones(4, device="meta")}, ValueError, "advantages: expected device cpu"),
        ({"advantage_level": "tokens"}, ValueError, "advantage_level: expected one of token, step, row"),
        (
            {"advantage_level": "token"},
            ValueError,
            "advantages: expected shape [T] (one per token of the batch) = [12], got [4]",
        ),
        ({"advantage_level": "step"}, ValueError, "advantage_level: 'step' needs"),
        (
            {"advantage_level": "trajectory"},
            ValueError,
            "advantage_level: 'trajectory' needs trajectory_ids in the batch",
        ),
        ({"advantage_level": "domain"}, ValueError, "advantage_level: 'domain' needs domain_ids in the batch"),
        (
            {"advantages": torch.ones(2, 2), "advantage_level": "group"},
            ValueError,
            "advantages: expected one per group, got shape [2, 2]",
        ),
        (
            {"logp": torch.zeros(4), "old_logp": None, "batch": stepped, "advantages": torch.ones(5)},
            ValueError,
            "(one per row) = [2], got [5]; or say advantage_level='token' ([4]), 'step' ([3]), 'trajectory'",
        ),
        ({"report": True}, ValueError, "report: expected some of ('tokens', 'levels', 'corrections'), as in"),
        # backend
        ({"backend": "gpu"}, ValueError, "backend: expected one of reference, cpu"),
    ]


@pytest.mark.parametrize(("keywords", "error", "message"), error_cases())
@pytest.mark.parametrize(
    "function", [hpo.policy_loss, hpo.policy_loss_and_grad], ids=lambda function: function.__name__
)
def test_errors_name_argument_expectation_value_and_fix(function, keywords, error, message):
    with pytest.raises(error) as raised:
        function(**Example().arguments(**keywords))
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"windw": 3}, "windw: {} has no such argument; did you mean 'window'?"),
        ({"xyz": 3}, "xyz: {} has no such argument; it takes "),
        ({"score": torch.zeros(4)}, "score: {} has no such argument; it takes "),
        ({"_score": torch.zeros(4)}, "_score: {} has no such argument"),  # the name that the function inside has for it
    ],
)
def test_an_unknown_keyword_is_one_of_the_public_function(keywords, message):
    logp, of_rows = torch.zeros(4), torch.ones(2)
    batch = hpo.PackedBatch.from_lengths([2, 2], group_ids=torch.zeros(2, dtype=torch.int64))
    calls = {
        hpo.policy_loss_and_grad: (logp, None, of_rows, batch),
        hpo.hierarchical_policy_loss: (logp, None, of_rows, batch),
        hpo.policy_loss_from_logits: (torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64), None, of_rows, batch),
    }
    for function, arguments in calls.items():
        with pytest.raises(TypeError) as raised:
            function(*arguments, **keywords)
        assert str(raised.value).startswith(message.format(function.__name__))


# ------------------------------------------------------------------------------------------------- the single call


@pytest.mark.parametrize("advantage", [hpo.advantages.grpo, functools.partial(hpo.advantages.rloo, singleton="raw")])
@pytest.mark.parametrize("gate", [GATE, gates.gspo(0.05, 0.05)], ids=lambda gate: gate.name)
@pytest.mark.parametrize("scope", ["batch", "call"])
def test_the_single_call_is_the_three_calls(example, advantage, gate, scope, backend):
    """To the bit: loss, metrics, gradient."""
    rewards = torch.tensor([1.0, 0.0, 2.0, 1.0], device=example.logp.device)
    window = entropy.ares(2, "0.4", scope=scope)
    keywords = {
        "gate": gate, "window": window, "entropy": example.entropy, "kl": kl.k3(0.1), "ref_logp": example.ref_logp,
        "token_weight": example.token_weight, "backend": backend,
    }  # fmt: skip

    def single_call(logp, **more):
        return hpo.hierarchical_policy_loss(
            logp, example.old_logp, rewards, example.batch, advantage=advantage, **keywords, **more
        )

    leaf = example.logp.clone().requires_grad_()
    single = single_call(leaf, report=("tokens",))
    (grad,) = torch.autograd.grad(single.loss, leaf)

    advantages = advantage(rewards, example.batch.group_ids, backend=backend)
    state = window.fit(example.entropy, example.batch, backend=backend)
    keywords["threshold"] = state
    three = example.loss(report=("tokens",), advantages=advantages, **keywords)
    same(single, three)
    assert torch.equal(single.tokens, three.tokens)
    assert torch.equal(grad, example.grad(advantages=advantages, **keywords).grad)
    assert 0 < single.metrics["selected"] < single.metrics["tokens"], "the window selects some"
    same(single_call(example.logp), single)


def test_the_single_call_without_a_window_or_groups(example):
    rewards = torch.tensor([1.0, 0.0, 2.0, 1.0])
    ungrouped = hpo.PackedBatch(example.batch.cu_seqlens, example.mask)
    one_group = functools.partial(hpo.advantages.grpo, group_ids=None)
    result = hpo.hierarchical_policy_loss(example.logp, example.old_logp, rewards, ungrouped, advantage=one_group)
    same(result, example.loss(advantages=hpo.advantages.grpo(rewards, None), batch=ungrouped))


def test_the_single_call_takes_a_padded_mask():
    logp, mask, rewards = torch.randn(2, 3), torch.ones(2, 3).bool(), torch.tensor([1.0, 0.0])
    one_group = functools.partial(hpo.advantages.grpo, group_ids=None)
    result = hpo.hierarchical_policy_loss(logp, None, rewards, mask, advantage=one_group)
    same(result, hpo.policy_loss(logp, None, hpo.advantages.grpo(rewards, None), mask))


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"advantage": "grpo"}, TypeError, "advantage: expected an estimator of hpo_core.advantages, got 'grpo'"),
        ({"rewards": torch.ones(3)}, ValueError, "group_ids: expected shape [U] (that of rewards) = [3], got [4]"),
        ({"rewards": [1.0]}, TypeError, "rewards: expected a tensor, got <class 'list'>"),
        ({"window": entropy.ares()}, ValueError, "entropy: a window needs the entropies [T]; pass entropy="),
        ({"batch": "all"}, TypeError, "batch: expected a PackedBatch or a mask [B, L], got <class 'str'>"),
        ({"logp": torch.zeros(12).half()}, TypeError, "logp: expected float32, got float16"),
        ({"kl": kl.k3(0.1)}, ValueError, "kl: ref_logp and kl go together"),
    ],
)
def test_errors_of_the_single_call(example, keywords, error, message):
    given = {"logp": example.logp, "old_logp": None, "rewards": torch.ones(ROWS), "batch": example.batch}
    with pytest.raises(error) as raised:
        hpo.hierarchical_policy_loss(**{**given, **keywords})
    assert message in str(raised.value)


# ------------------------------------------------------------------------------------------- estimators in the call


def of_rows(rewards, group_ids):
    return rewards


@pytest.mark.parametrize(
    "estimator",
    [
        hpo.advantages.grpo,
        functools.partial(hpo.advantages.rloo, singleton="raw"),
        functools.partial(hpo.advantages.gigpo, anchor_ids=torch.zeros(2, dtype=torch.int64)),
        hpo.advantages.over_ranks(hpo.advantages.grpo),
        functools.partial(hpo.advantages.otb, chosen_probability=torch.ones(4), moment=torch.ones(4)),
        of_rows,
    ],
)
def test_forgotten_groups_are_no_single_group(estimator):
    """Two prompts of two answers each, with rewards around 0 and around 10."""
    batch = hpo.PackedBatch.from_lengths([2, 2], cu_steps=torch.tensor([0, 2, 4]))
    message = r"group_ids: \w+ normalises within prompt groups and the batch has no ids, .*; pass group_ids \[S\] to"
    with pytest.raises(ValueError, match=message):
        hpo.hierarchical_policy_loss(torch.zeros(4), None, torch.ones(2), batch, advantage=estimator)


def test_one_group_is_said():
    batch = hpo.PackedBatch.from_lengths([1, 1, 1, 1])
    rewards, logp = torch.tensor([1.0, 0.0, 11.0, 10.0]), torch.zeros(4)
    grouped = batch.replace(group_ids=torch.tensor([0, 0, 1, 1]))
    one = functools.partial(hpo.advantages.dr_grpo, group_ids=None)
    run = functools.partial(hpo.hierarchical_policy_loss, logp, None, rewards, report=("tokens",))
    assert run(batch, advantage=one).tokens.tolist() == [4.5, 5.5, -5.5, -4.5]
    assert run(grouped, advantage=one).tokens.tolist() == [4.5, 5.5, -5.5, -4.5]
    assert run(grouped, advantage=hpo.advantages.dr_grpo).tokens.tolist() == [-0.5, 0.5, -0.5, 0.5]


def test_estimators_without_groups_need_none():
    """What they take beside rewards is no ids."""
    batch, rewards, logp = hpo.PackedBatch.from_lengths([2, 2]), torch.tensor([1.0, 0.0]), torch.zeros(4)
    run = functools.partial(hpo.hierarchical_policy_loss, logp, None, report=("tokens",), backend="cpu")
    for each in (batch, batch.replace(group_ids=torch.tensor([0, 0]))):
        out = run(rewards > 0, each, advantage=hpo.advantages.negative_sample)
        assert out.tokens.tolist() == [0, 0, 1, 1]
        assert run(rewards, each, advantage=lambda rewards: rewards).tokens.tolist() == [-1, -1, 0, 0]


def test_the_single_call_takes_estimators_of_steps(backend):
    """Bitwise the three calls, ids of steps read off the batch; trajectories of several rows and of several steps."""
    device = testing.device_of(backend)
    draw = torch.Generator().manual_seed(5)
    batch = hpo.PackedBatch(
        torch.tensor([0, 5, 9, 14, 16]), cu_steps=torch.tensor([0, 2, 5, 7, 9, 14, 14, 16]),
        trajectory_ids=torch.tensor([3, 3, 8, 9]), group_ids=torch.tensor([1, 1, 1, 2]),
    ).to(device)  # fmt: skip
    logp, old, entropy = (torch.randn(16, generator=draw).to(device) for _ in range(3))
    window, gate = hpo.entropy.ares(2, "0.6"), hpo.gates.fiberpo()
    rewards, anchors = torch.rand(7, generator=draw).to(device), torch.tensor([0, 1, 1, 2, 0, 0, 1], device=device)
    ids = batch.ids_of_steps()
    assert ids["trajectory_ids"].tolist() == [3, 3, 3, 3, 8, -1, 9]
    assert ids["group_ids"].tolist() == [1, 1, 1, 1, 1, -1, 2]
    for estimator in (hpo.advantages.gigpo, hpo.advantages.hgpo):
        leaves = [logp.clone().requires_grad_() for _ in range(2)]
        whole = hpo.hierarchical_policy_loss(
            leaves[0], old, rewards, batch, advantage=functools.partial(estimator, anchor_ids=anchors), gate=gate,
            window=window, entropy=entropy, backend=backend,
        )  # fmt: skip
        advantages = estimator(rewards, anchor_ids=anchors, **ids, backend=backend)
        threshold = window.fit(entropy, batch, backend=backend)
        parts = hpo.policy_loss(
            leaves[1], old, advantages, batch, gate, advantage_level="step", window=window, entropy=entropy,
            threshold=threshold, backend=backend,
        )  # fmt: skip
        assert torch.equal(whole.loss, parts.loss) and float(whole.loss.detach()) != 0.0
        whole.loss.backward()
        parts.loss.backward()
        assert torch.equal(leaves[0].grad, leaves[1].grad) and bool(leaves[0].grad.any())


def test_estimators_of_steps_count_a_step_of_several_ranges_once():
    """A step with a gap and one that goes on in the next row have one reward, one return and one advantage."""
    named = {"step_ids": torch.tensor([7, 7, -1, 8, 9, 9, 9])}  # the last step begins with a range without tokens
    ranges = torch.tensor([[0, 2], [3, 5], [5, 7], [7, 9], [9, 9], [9, 10], [10, 12]])
    offsets, ids = torch.tensor([0, 5, 9, 10, 12]), torch.tensor([4, 6, 6, 6])
    batch = hpo.PackedBatch(offsets, steps=ranges, trajectory_ids=ids, group_ids=torch.zeros_like(ids), **named)
    whole = torch.tensor([[0, 5], [5, 7], [7, 9], [9, 10]])
    plain = hpo.PackedBatch(
        offsets[:4], mask=torch.arange(12) != 2, steps=whole, trajectory_ids=ids[:3], group_ids=ids[:3] * 0
    )
    rewards, anchors = torch.tensor([1.0, 0.5, 0.0, 2.0]), torch.tensor([0, 0, 0, 1])
    of_range = torch.tensor([0, 0, 1, 2, 3, 3, 3])
    for estimator in (hpo.advantages.gigpo, hpo.advantages.hgpo):
        once = estimator(rewards, anchor_ids=anchors, **plain.ids_of_steps())
        given = torch.where(torch.tensor([1, 0, 1, 1, 1, 1, 0]) > 0, rewards[of_range], torch.nan)
        found = estimator(given, anchor_ids=anchors[of_range], **batch.ids_of_steps())
        assert torch.equal(found[[0, 2, 3, 5]], once) and once.any()
        expected = once[torch.tensor([0, 0, -1, 0, 0, 1, 1, 2, 2, 3, 3, 3])]
        expected[2] = 0.0
        assert torch.equal(batch.spread_steps(found), expected)


def test_a_negative_trajectory_id_of_a_batch_names_a_trajectory():
    """To an estimator it would mean that a step is in none."""
    rewards, anchors = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0, 0, 1])
    gradients = []
    for trajectories in ([7, 4, 4], [-1, -(2**63), -(2**63)], [-1, 4, 4]):
        batch = hpo.PackedBatch(
            torch.tensor([0, 2, 4, 6]), cu_steps=torch.tensor([0, 2, 4, 6]),
            trajectory_ids=torch.tensor(trajectories), group_ids=torch.tensor([0, 0, 0]),
        )  # fmt: skip
        logp = torch.zeros(6, requires_grad=True)
        estimator = functools.partial(hpo.advantages.gigpo, anchor_ids=anchors)
        hpo.hierarchical_policy_loss(logp, None, rewards, batch, advantage=estimator).loss.backward()
        gradients.append(logp.grad)
    assert gradients[0].any() and all(torch.equal(gradient, gradients[0]) for gradient in gradients)


def test_rows_of_several_ranks_are_no_trajectories_without_names():
    """Row 0 of one rank would be a trajectory with row 0 of another."""
    batch = hpo.PackedBatch(torch.tensor([0, 2, 4]), cu_steps=torch.tensor([0, 2, 4]), group_ids=torch.tensor([0, 0]))
    everywhere = hpo.advantages.over_ranks(hpo.advantages.gigpo)
    for estimator in (functools.partial(everywhere, anchor_ids=torch.tensor([0, 0])), everywhere):
        with pytest.raises(ValueError, match=r"trajectory_ids: gigpo gathers the steps of all ranks .* has no ids"):
            hpo.hierarchical_policy_loss(torch.zeros(4), None, torch.ones(2), batch, advantage=estimator)


def test_what_a_partial_has_fixed_stays():
    """The batch's ids are for what the caller left open."""
    batch = hpo.PackedBatch(torch.tensor([0, 2, 4]), cu_steps=torch.tensor([0, 2, 4]), group_ids=torch.tensor([0, 0]))
    rewards, alone, anchors = torch.tensor([1.0, 0.0]), torch.tensor([0, 1]), torch.tensor([0, 0])
    for fixed, zero in (({}, False), ({"group_ids": alone}, True)):
        estimator = functools.partial(hpo.advantages.gigpo, anchor_ids=anchors, **fixed)
        logp = torch.zeros(4, requires_grad=True)
        hpo.hierarchical_policy_loss(logp, None, rewards, batch, advantage=estimator).loss.backward()
        assert bool(logp.grad.any()) is not zero


def test_the_single_call_takes_estimators_of_tokens(backend):
    device = testing.device_of(backend)
    batch = hpo.PackedBatch.from_lengths([3, 4]).to(device)
    logp, rewards = torch.zeros(7, device=device), torch.arange(7.0, device=device)
    whole = hpo.hierarchical_policy_loss(
        logp, None, rewards, batch, advantage=hpo.advantages.reinforce_pp, backend=backend
    )
    advantages = hpo.advantages.reinforce_pp(rewards, batch, backend=backend)
    alone = hpo.policy_loss(logp, None, advantages, batch, advantage_level="token", backend=backend)
    assert torch.equal(whole.loss, alone.loss)
    rewards = torch.cat((rewards[:3], rewards.new_full((1,), torch.nan), rewards[3:])).view(2, 4)
    padded = hpo.PackedBatch.from_padded(rewards.isfinite())
    for given in (rewards, rewards.flatten()):
        found = hpo.hierarchical_policy_loss(
            torch.zeros_like(rewards), None, given, padded, advantage=hpo.advantages.reinforce_pp, backend=backend
        )
        torch.testing.assert_close(found.loss, whole.loss, rtol=1e-5, atol=1e-6)


def test_an_estimator_of_several_streams_is_refused_by_the_single_call():
    batch = hpo.PackedBatch(torch.tensor([0, 2]), cu_steps=torch.tensor([0, 1, 2]))
    ones = torch.ones(2)
    estimator = functools.partial(hpo.advantages.hiper, switches=ones > 0, low_values=ones, high_values=ones)
    with pytest.raises(TypeError, match="advantage: expected an estimator of one tensor"):
        hpo.hierarchical_policy_loss(ones, None, ones, batch, advantage=estimator)
