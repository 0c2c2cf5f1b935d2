"""selection= of the loss: each slot is the argument or the advantage that it stands for."""

import dataclasses
import io

import pytest
import torch

import hpo_core as hpo
from hpo_core import gates, kl, testing
from hpo_core.entropy import Selection

ROWS, TOKENS = 4, 17


class Example:
    def __init__(self, backend, seed=0):
        draw = torch.Generator().manual_seed(seed)
        device = testing.device_of(backend)
        mask = torch.rand(TOKENS, generator=draw) < 0.8
        self.batch = hpo.PackedBatch(torch.tensor([0, 5, 5, 11, 16]), mask).to(device)  # a tail token, an empty row

        def normal(*shape):
            return torch.randn(*shape, generator=draw).to(device)

        self.logp, self.old, self.ref = (-normal(TOKENS).abs() for _ in range(3))
        self.advantages, self.weights = normal(ROWS), normal(ROWS).abs()
        self.factor, self.addend, self.weight, self.kl_weight = (normal(TOKENS) for _ in range(4))
        self.mask = (torch.rand(TOKENS, generator=draw) < 0.6).to(device)
        self.bounds = (1 - self.weight.abs().clamp(max=1) / 2, 1 + self.factor.abs())
        self.backend = backend

    def of_tokens(self):
        row = self.batch.row_of_token()
        return torch.where(row >= 0, self.advantages[row.clamp(min=0)], 0.0)

    def run(self, gate=None, advantages=None, **options):
        logp = self.logp.clone().requires_grad_()
        advantages = self.advantages if advantages is None else advantages
        out = hpo.policy_loss(
            logp, self.old, advantages, self.batch, gate, weights=self.weights, backend=self.backend, **options
        )
        out.loss.backward()
        return out.loss.item(), logp.grad.tolist(), out.metrics.vector.tolist(), out.tokens


WINDOW = hpo.entropy.forking_tokens("0.5")

SLOTS = {
    "mask": lambda e: ({"mask": e.mask}, {"token_mask": e.mask}),
    "weight": lambda e: ({"weight": e.weight}, {"token_weight": e.weight}),
    "bounds": lambda e: ({"bounds": e.bounds}, {"gate_inputs": gates.GateInputs(bounds=e.bounds)}),
    "factor": lambda e: ({"advantage_factor": e.factor}, _shaped(e.of_tokens() * e.factor)),
    "addend": lambda e: ({"advantage_addend": e.addend}, _shaped(e.of_tokens() + e.addend)),
    "score": lambda e: ({"score": e.weight, "threshold": e.weight[2:3]}, {"token_mask": e.weight >= e.weight[2]}),
    "strict": lambda e: (
        {"score": e.weight, "threshold": e.weight[2:3], "strict": True},
        {"token_mask": e.weight > e.weight[2]},
    ),
    "both": lambda e: (
        {"advantage_factor": e.factor, "advantage_addend": e.addend},
        _shaped(e.of_tokens() * e.factor + e.addend),
    ),
}


def _shaped(advantages):
    return {"advantages": advantages, "advantage_level": "token"}


@pytest.mark.parametrize("slot", SLOTS)
def test_a_slot_is_the_argument_it_stands_for(backend, slot):
    example = Example(backend)
    given, meaning = SLOTS[slot](example)
    assert example.run(selection=Selection(**given)) == example.run(**meaning)


@pytest.mark.parametrize("window", [WINDOW, hpo.entropy.ares(2, "0.5")], ids=lambda window: window.name)
def test_a_window_and_its_selection_are_one(backend, window):
    example = Example(backend, 6)
    given = {"entropy": example.weight.abs(), "batch": example.batch, "backend": backend}
    state = window.fit(**given)
    expected = example.run(window=window, entropy=given["entropy"], threshold=state)
    for selection in (window.selection(**given, state=state), window.selection(**given)):
        got = example.run(selection=selection, entropy=given["entropy"])
        assert got == expected
        assert example.run(selection=selection.as_mask(), entropy=given["entropy"])[:2] == expected[:2]
        assert torch.equal(selection.as_mask().mask & example.batch.mask, window.apply(**given, state=state))
    mask = Selection(mask=example.mask)
    combined = example.run(selection=selection.merged(mask), entropy=given["entropy"])
    assert combined == example.run(selection=mask.merged(selection), entropy=given["entropy"])
    assert combined == example.run(window=window, entropy=given["entropy"], threshold=state, token_mask=example.mask)
    assert combined != expected


def test_a_threshold_of_no_dimension_is_that_number(backend):
    window, where = hpo.entropy.forking_tokens(), testing.device_of(backend)
    batch, advantages = hpo.PackedBatch.from_lengths([3, 2]).to(where), torch.tensor([1.0, 2.0]).to(where)
    entropy, logp = torch.tensor([0.1, 0.9, 0.3, 0.2, 0.8]).to(where), torch.linspace(-2, -1, 5).to(where)
    score = window.score(entropy, batch, backend=backend)
    for threshold in (torch.tensor(0.25).to(where), torch.tensor([0.25]).to(where)):
        selection = {"selection": Selection(score=score, threshold=threshold)}
        for given in (selection, {"window": window, "entropy": entropy, "threshold": threshold}):
            out = hpo.policy_loss(logp, logp, advantages, batch, backend=backend, **given)
            assert out.loss.item() == pytest.approx(-(1 + 1 + 2) / 5)


def test_a_window_over_the_step_is_not_fitted_on_a_part_of_it():
    batch, entropy = hpo.PackedBatch.from_lengths([3, 2]), torch.arange(5.0)
    window, state = hpo.entropy.forking_tokens("0.5"), hpo.entropy.forking_tokens("0.5").fit(entropy, batch)
    part, _, _, tokens = next(iter(batch.micro_batches(3)))
    with pytest.raises(ValueError, match=r"batch: this batch is a part .*pass .*scope='call', or state=window\.fit\("):
        window.selection(entropy[tokens], part)
    assert window.selection(entropy[tokens], part, state).threshold == 2
    assert hpo.entropy.forking_tokens("0.5", scope="call").selection(entropy[tokens], part).threshold == 1


def test_a_score_that_is_nan_is_counted():
    example = Example("cpu", 7)
    score = example.weight.clone()
    hole = int(example.batch.mask.nonzero()[0])
    score[hole] = torch.nan
    logp = example.logp.clone().requires_grad_()
    selection = Selection(score=score, threshold=torch.tensor([-9.0]))
    out = hpo.policy_loss(logp, example.old, example.advantages, example.batch, selection=selection)
    out.loss.backward()
    assert out.metrics["nan_tokens"] == 1 and logp.grad[hole] == 0 and logp.grad.count_nonzero() > 3


def test_slots_and_arguments_combine(backend):
    example = Example(backend, 1)
    both = {"token_mask": example.factor > -1, "token_weight": example.addend}
    got = example.run(selection=Selection(mask=example.mask, weight=example.weight), **both)
    mask, weight = example.mask & both["token_mask"], example.weight * both["token_weight"]
    assert got == example.run(token_mask=mask, token_weight=weight)


PENALTIES = [kl.k1(0.5), kl.k2(0.25), kl.k3(0.125), kl.k3(0.5, "straight_through"), kl.k3(0.25, "importance")]


def assert_same(got, expected):
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


@pytest.mark.parametrize("penalty", PENALTIES, ids=str)
@pytest.mark.parametrize("gate", [gates.ppo_clip(), gates.gspo()], ids=lambda gate: gate.name)
def test_a_constant_factor_on_the_penalty_is_its_coefficient(gate, penalty, backend):
    """The bits agree: a factor of 1 changes nothing, and one of 1/2 is half the coefficient."""
    example = Example(backend, 2)
    constant = Selection(kl_weight=torch.full_like(example.weight, 0.5))
    given = {"ref_logp": example.ref, "report": ("tokens",)}
    got = example.run(gate, kl=penalty, selection=constant, **given)
    half = type(penalty)(penalty.estimator, penalty.beta / 2, penalty.gradient)
    assert_same(got, example.run(gate, kl=half, **given))
    ones = Selection(kl_weight=torch.ones_like(example.weight))
    assert_same(example.run(gate, kl=penalty, selection=ones, **given), example.run(gate, kl=penalty, **given))
    call = {"kl": penalty, "ref_logp": example.ref, "selection": constant, "backend": backend}
    call["weights"] = example.weights
    out = hpo.policy_loss_and_grad(example.logp, example.old, example.advantages, example.batch, gate, **call)
    assert_same(got[:2], (out.loss.item(), out.grad.tolist()))


def test_the_ratio_of_a_weighted_penalty_is_that_of_the_gate(backend):
    """A gate on the total ratio takes it to the sampler, in the penalty, too."""
    example = Example(backend, 4)
    total = dataclasses.replace(gates.ppo_clip(), channel=gates.Channel.TOTAL)
    given = {"ref_logp": example.ref, "rollout_logp": example.old - 0.5}
    penalty, half = kl.k3(0.5, "importance"), kl.k3(0.25, "importance")
    constant = Selection(kl_weight=torch.full_like(example.weight, 0.5))
    got = example.run(total, kl=penalty, selection=constant, **given)
    expected = example.run(total, kl=half, **given)
    torch.testing.assert_close(torch.tensor(got[1]), torch.tensor(expected[1]))
    assert got[0] == pytest.approx(expected[0], rel=1e-5)


def test_a_token_without_a_coefficient_is_not_read(backend):
    example = Example(backend, 3)
    pays = example.mask & example.batch.mask
    pays[-1] = False
    ref = torch.where(pays, example.ref, -1.0)
    selection = Selection(kl_weight=pays.float() * 3)
    loss, grad, *_ = example.run(kl=kl.k2(0.5), ref_logp=ref, selection=selection)
    base, base_grad, *_ = example.run()
    row = example.batch.row_of_token().clamp(min=0)
    s = torch.where(pays, example.logp - example.ref, 0.0)
    assert loss == pytest.approx(base + (0.75 * example.weights[row] * s.square()).sum().item(), rel=1e-5)
    expected = torch.tensor(base_grad) + (1.5 * example.weights[row] * s).cpu()
    torch.testing.assert_close(torch.tensor(grad), expected)
    for hole in (torch.nan, 99.0):
        poisoned = torch.where(example.batch.mask, selection.kl_weight, hole)
        assert example.run(kl=kl.k2(0.5), ref_logp=ref, selection=Selection(kl_weight=poisoned))[0] == loss


@pytest.mark.parametrize("gate", [gates.dapo(), gates.gspo(), gates.reinforce(), gates.kl_cov()], ids=str)
def test_a_coefficient_that_is_not_finite_is_0(gate, backend):
    """So is that of a token without one, whatever is left of its penalty, which may be infinite; and a product with the
    weight of the row that no float holds takes nothing from the others. Triton keeps to the largest float."""
    example = Example(backend, 6)
    needed = {"gate_inputs": gates.GateInputs(penalty_mask=example.mask)} if gate.required else {}
    given = {"ref_logp": example.ref.clone(), "kl": kl.k3(1e30), "report": ("tokens",)} | needed
    given["ref_logp"][2:5] = 59.0
    zero = torch.where(torch.arange(TOKENS, device=example.ref.device) % 3 == 2, 0.0, 1e-30 * example.kl_weight)
    zero[2:5] = 0.0
    expected = example.run(gate, selection=Selection(kl_weight=zero), **given)
    assert all(torch.tensor(each).isfinite().all() for each in expected[:2])
    for hole in (torch.nan, torch.inf, -torch.inf):
        weight = torch.where(zero == 0, hole, zero)
        assert_same(example.run(gate, selection=Selection(kl_weight=weight), **given), expected)
    example.weights, given["kl"] = 10 * example.weights, kl.k1(100.0)
    given["ref_logp"] = example.logp.clone()
    huge = torch.full_like(zero, 3e38)
    none = example.run(gate, selection=Selection(kl_weight=torch.zeros_like(zero)), **given)
    loss, _, metrics, tokens = example.run(gate, selection=Selection(kl_weight=huge), **given)
    assert loss == none[0] and metrics == none[2] and torch.equal(tokens, none[3])
    if backend == "triton":
        given |= {"ref_logp": example.logp - 2.0, "kl": kl.k2(100.0)}
        _, grad, _, tokens = example.run(gate, selection=Selection(kl_weight=huge), **given)
        for each in (torch.tensor(grad), tokens):
            assert each.isfinite().all() and (each > 3e38).any()


def test_merged():
    one = Selection(mask=torch.tensor([True, False]), advantage_addend=torch.tensor([1.0, 2.0]))
    two = Selection(
        mask=torch.tensor([True, True]), weight=torch.tensor([2.0, 3.0]), advantage_factor=torch.tensor([3.0, 5.0])
    )
    both = one.merged(two)
    assert both.mask.tolist() == [True, False] and both.weight.tolist() == [2, 3]
    assert both.advantage_factor.tolist() == [3, 5] and both.advantage_addend.tolist() == [3, 10]
    back = two.merged(one)
    assert back.advantage_addend.tolist() == [1, 2] and back.bounds is None
    bounds = Selection(bounds=(torch.ones(2), torch.ones(2)))
    assert one.merged(bounds).bounds is bounds.bounds
    with pytest.raises(ValueError, match="bounds: both selections have some"):
        bounds.merged(bounds)


def test_both_of_two_scores_count():
    score = torch.tensor([0.1, 0.5, 0.9])
    low, high = Selection(score=score, threshold=score[1:2]), Selection(score=-score, threshold=-score[1:2])
    both = low.merged(high)
    assert both.score is score and both.as_mask().mask.tolist() == [False, True, False]
    both = low.merged(high._replace(strict=True))
    assert not both.strict and both.as_mask().mask.tolist() == [False, False, False]
    strict = Selection().merged(low._replace(strict=True))
    assert strict.strict and strict.as_mask().mask.tolist() == [False, False, True]


def test_a_threshold_without_a_score_is_not_dropped():
    """It would select every token."""
    half, whole = Selection(threshold=torch.ones(1)), Selection(score=torch.ones(2), threshold=torch.ones(1))
    for call in (half.as_mask, lambda: half.merged(whole), lambda: whole.merged(half), lambda: half.merged(half)):
        with pytest.raises(ValueError, match=r"^selection: its score and its threshold .* got only threshold"):
            call()


@pytest.mark.parametrize("kind", [Selection, gates.GateInputs])
def test_what_a_loss_is_given_is_read_back_as_weights(kind):
    file = io.BytesIO()
    torch.save(kind(bounds=(torch.zeros(2), torch.ones(2))), file)
    file.seek(0)
    again = torch.load(file, weights_only=True)
    assert type(again) is kind and again.bounds[1].tolist() == [1, 1]


def test_the_padded_shape_and_the_other_calls():
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]]).bool()
    logp, entropy = -torch.rand(2, 3), torch.rand(2, 3)
    batch = hpo.PackedBatch.from_padded(mask).without_first_tokens()
    selection = hpo.entropy.entropy_advantage(torch.tensor([1.0, -1.0]), entropy, batch)
    assert selection.advantage_addend.shape == (2, 3)
    given = (logp, None, torch.tensor([1.0, -1.0]), batch)
    loss = hpo.policy_loss(*given, selection=selection).loss
    assert torch.equal(loss, hpo.policy_loss_and_grad(*given, selection=selection).loss)
    assert torch.equal(loss, hpo.policy_loss(*given, selection=selection, backend="cpu").loss)
    flat = hpo.PackedBatch(torch.tensor([0, 3, 6]), batch.mask)
    packed = hpo.entropy.entropy_advantage(torch.tensor([1.0, -1.0]), entropy.reshape(-1), flat)
    assert torch.equal(packed.advantage_addend, selection.advantage_addend.reshape(-1))
    rewards = torch.tensor([1.0, -1.0])
    single = hpo.hierarchical_policy_loss(
        logp, None, rewards, batch, advantage=lambda rewards: rewards, selection=selection
    )
    assert torch.equal(loss, single.loss)
    logits, targets = torch.randn(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64)
    out = hpo.policy_loss_from_logits(logits, targets, *given[1:], selection=selection)
    both = hpo.token_logprobs(logits, targets, batch=batch)[0]
    assert torch.equal(out.loss, hpo.policy_loss(both, *given[1:], selection=selection).loss)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"selection": torch.ones(5)}, "selection: expected a Selection"),
        ({"selection": Selection(kl_weight=torch.ones(5))}, "selection: its kl_weight .*; pass kl= and ref_logp="),
        ({"selection": Selection(weight=torch.ones(4))}, "weight: expected shape"),
        ({"selection": Selection(mask=torch.ones(5))}, "mask: expected dtype bool"),
        (
            {
                "selection": Selection(bounds=(torch.ones(5), torch.ones(5))),
                "gate_inputs": gates.GateInputs(bounds=(torch.ones(5), None)),
            },
            "selection: it has bounds and so has gate_inputs",
        ),
        (
            {"selection": Selection(), "window": hpo.entropy.ares(), "entropy": torch.ones(5)},
            "selection: it replaces window=, got both",
        ),
        (
            {"selection": Selection(score=torch.ones(5))},
            "selection: its score and its threshold go together, got only score",
        ),
        (
            {"selection": Selection(threshold=torch.ones(1))},
            "selection: its score and its threshold go together, got only threshold",
        ),
        (
            {"selection": Selection(score=torch.ones(5), threshold=torch.ones(1), strict="False")},
            "strict: expected True or False, got 'False'",
        ),
        ({"selection": Selection(score=torch.ones(4), threshold=torch.ones(1))}, "score: expected shape"),
        ({"selection": Selection(score=torch.ones(5), threshold=torch.ones(5))}, "threshold: expected shape"),
        (
            {"selection": Selection(bounds=(torch.ones(5), torch.ones(5))), "gate": gates.gspo()},
            "bounds: the gate 'gspo' has no token clip",
        ),
    ],
)
def test_errors(given, message):
    batch = hpo.PackedBatch.from_lengths([3, 2])
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        hpo.policy_loss(torch.zeros(5), torch.zeros(5), torch.ones(2), batch, **given)


@pytest.mark.long
def test_compilation():
    """Advantages of tokens, made of those of rows inside the call, in one graph."""
    example = Example("cpu", 5)
    selection = Selection(advantage_factor=example.factor, mask=example.mask, kl_weight=example.kl_weight)
    penalty = {"kl": kl.k3(0.1), "ref_logp": example.ref}

    def loss(logp):
        given = (example.old, example.advantages, example.batch)
        return hpo.policy_loss(logp, *given, weights=example.weights, selection=selection, **penalty).loss

    compiled = torch.compile(loss, fullgraph=True, backend="eager")
    assert torch.equal(compiled(example.logp), loss(example.logp))
