"""Heads, pre-gates, slopes, weights, penalties and corrections in combinations that no preset has, on every backend."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from breadth import at_length, number, tried  # noqa: F401 (the first is a fixture)
from catalogue import ROLLED, SLOPES, TERMS, Example, assert_exact, gate_of
from hierarchies import index_inputs, raw

import hpo_core as hpo
from hpo_core import ops, testing
from hpo_core.gates import (
    Action,
    Aggregate,
    Channel,
    Clip,
    Correction,
    Drop,
    Gamma,
    GateInputs,
    Head,
    Identity,
    Level,
    Penalty,
    RatioGate,
    Reduction,
    Routing,
    Statistic,
    Unit,
)
from hpo_core.reference.terms import penalty_of
from hpo_core.specs import PolicyLossInputs, TermSpec
from hpo_core.testing.expected import _own_penalty_terms

INF = math.inf


def inputs_of(gate, example, seed):
    """The inputs of the gate, per row or per token."""
    draw = torch.Generator().manual_seed(seed)
    tokens, rows = example.logp.numel(), example.weights.numel()
    given = {}
    if gate.takes_target:
        target = torch.rand(tokens if seed % 2 else rows, generator=draw)  # as many as advantages, below
        given["target"] = 0.2 + 0.6 * target if gate.head is Head.NEGATIVE_AWARE else 0.9 + 0.2 * target
    if gate.penalty_coefficient and (seed % 2 or "penalty_mask" in gate.required):
        given["penalty_mask"] = torch.rand(tokens, generator=draw) < 0.5
    if seed == 2:
        given["token_weight"] = torch.rand(tokens, generator=draw)
        given["token_mask"] = torch.rand(tokens, generator=draw) < 0.7
    if seed == 3:
        example.logp[3], example.logp[7] = -INF, INF
    if seed % 2:
        given["advantages"] = example.token_advantages
    return given


def assert_near(got, wanted, backend, near=3e-6):
    allowed = near * float(wanted.abs().max().clamp(min=1e-3))
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=allowed, msg=lambda text: f"{backend}: {text}")


def judged(example, gate, backends, **given):
    """The results of each backend, by its name, within the budget of the definition: loss, gradient, the losses of
    tokens and metrics."""
    call = example.call(gate, **given)
    expected, results = testing.expect_policy_loss(call), {}
    for backend in backends:
        results[backend] = assert_exact(backend, call, expected)
        if tried(backend, True, False):  # the call without autograd, too, which has ways of its own
            direct = example.run(gate, backend, **given)
            testing.assert_within_budget(f"{backend} loss", direct.loss, expected["loss"])
            testing.assert_within_budget(f"{backend} gradient", direct.grad, expected["grad"])
    return results


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("name", TERMS)
def test_every_combination(name, native_backends):
    gate = TERMS[name]
    for seed in range(8):
        example = Example(seed, (5, 0, 9, 1, 40, 12, 3, 33))
        given = inputs_of(gate, example, seed)
        backends = [
            each
            for each in native_backends
            if seed < number(each, at_length=8, machine_code=8, emulated=4, interpreted=2)
        ]
        judged(example, gate, backends, **given)


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("name", [*TERMS, "LINEAR, open"])
def test_every_combination_without_a_penalty(name, native_backends):
    """Where advantages are those of rows the CPU reads the tokens of a leaf where they are."""
    under_open_level = RatioGate("open", SLOPES, (Level(Identity()),))
    gate = replace(TERMS.get(name, under_open_level), penalty=Penalty.NONE, penalty_coefficient=0.0)
    for seed in (0, 2, 4, 6):
        example = Example(seed, (5, 0, 9, 1, 40, 12, 3, 33), masked=seed < 6, gaps=seed > 0)
        cases = {each: number(each, at_length=8, machine_code=8, emulated=1, interpreted=1) for each in native_backends}
        judged(example, gate, [each for each, most in cases.items() if seed < most], **inputs_of(gate, example, seed))


@pytest.mark.parametrize("levels", [(), (ROLLED,)], ids=["tokens", "levels"])
@pytest.mark.parametrize("penalty", list(Penalty)[1:])
def test_every_penalty(penalty, levels, native_backends):
    gate = RatioGate("x", SLOPES, levels, penalty=penalty, penalty_coefficient=0.3)
    judged(Example(1), gate, native_backends)


@pytest.mark.parametrize("penalty", list(Penalty)[1:])
def test_the_budget_of_a_penalty_is_of_its_own_terms(penalty):
    """They are nowhere less than the penalty and its slope: those of K3 are, far below 0, for K2."""
    x = torch.linspace(-40, 40, 321, dtype=torch.float64, requires_grad=True)
    value = penalty_of(TermSpec(penalty=penalty), x)
    (slope,) = torch.autograd.grad(value.sum(), x)
    for exact, terms in zip((value, slope), _own_penalty_terms(penalty, x.detach()), strict=True):
        assert (exact.abs() <= terms).all()


@pytest.mark.parametrize("x", [0.3, 2.0, 3.6, 3.8, 9.0])
def test_sums_of_large_deviations(x, native_backends):
    """They are added up as integers: those of ratios near 1 in another way than larger ones, without a gap between."""
    example = Example(0, (700, 40), masked=False, several=False)
    example.logp = example.old_logp + x * torch.linspace(0.9, 1, example.logp.numel())
    for delta in (0.07, 1e3):
        judged(example, hpo.gates.reconstructed.apc(delta), native_backends)


LONG = (20_000, 9000)


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("head", Head)
def test_a_row_longer_than_any_tile(head, native_backends):
    gate = gate_of(head, "token")
    for backend in native_backends:
        long, other = number(backend, at_length=LONG, machine_code=LONG, emulated=(1100, 600), interpreted=(2100, 900))
        example = Example(1, (long, 3, other), several=False)
        judged(example, gate, [backend], **inputs_of(gate, example, 5))


@pytest.mark.parametrize("head", [Head.SIMPLE, Head.TARGET, Head.NEGATIVE_AWARE])
def test_weights_below_zero_turn_the_sign_of_the_loss(head, native_backends):
    gate, example = gate_of(head, "token"), Example(0)
    given = inputs_of(gate, example, 0)
    turned = judged(example, gate, native_backends, **given, weights=-example.weights)
    for backend, out in turned.items():
        grad = example.run(gate, backend, **given).grad
        torch.testing.assert_close(out.grad.cpu(), -grad, msg=backend)


# Log-probabilities (now, then) beyond where heads saturate, and as low as numbers go.
LOWEST = torch.finfo(torch.float32).min
EDGES = [(-0.5, -61.5), (-61.5, -0.5), (-0.5, -31.5), (LOWEST, -0.5), (-0.5, LOWEST), (LOWEST, LOWEST), (-0.4, -0.5)]


@pytest.mark.parametrize("head", Head)
def test_heads_of_huge_ratios_and_lowest_log_probabilities(head, native_backends):
    """The signs of A are both, so that a loss cancels: also where kernels are interpreted."""
    gate, batch = gate_of(head, "token"), hpo.PackedBatch.from_lengths([len(EDGES)] * 2)
    if head is not Head.CENSORED:  # whose level bounds what it takes; the others without any bound
        gate = RatioGate("open", Identity(), head=head, head_numbers=gate.head_numbers)
    logp, old_logp = torch.tensor(EDGES * 2).T.contiguous()
    for size in (2.0, 1e12):
        given = {"advantages": torch.tensor([size, -size]), "weights": torch.ones(2)}
        found = {}
        for backend in ("reference", *native_backends):
            place = testing.device_of(backend)
            on = {name: value.to(place) for name, value in (given | {"logp": logp, "old_logp": old_logp}).items()}
            inputs = GateInputs(target=torch.tensor([0.5, 0.5], device=place)) if gate.takes_target else None
            on["gate_inputs"] = inputs
            out = hpo.policy_loss_and_grad(batch=batch.to(place), gate=gate, backend=backend, **on)
            assert torch.isfinite(out.loss) and torch.isfinite(out.grad).all(), backend
            found[backend] = out.grad.cpu()
        for backend, grad in found.items():
            assert_near(grad, found["reference"].double(), (backend, size), 1e-5)


def test_the_square_of_a_whole_answer_has_no_end(native_backends):
    """Kimi's: the log-ratio of an answer is a sum, which nothing exponentiates."""
    answer = Level(Identity(), aggregate=Aggregate.SUM)
    gate = RatioGate("kimi of answers", Drop(), (answer,), Head.LOG, head_numbers=(0.1, 0.1))
    batch, old_logp = hpo.PackedBatch.from_lengths([40]), torch.full((40,), -3.0)
    weights = batch.cu_seqlens.new_full((1,), 0.25, dtype=torch.float32)
    for backend in ("reference", *native_backends):
        place = testing.device_of(backend)
        logp = (old_logp + 2.0).to(place).requires_grad_()
        tensors = (old_logp.to(place), torch.zeros(1, device=place), batch.to(place), gate)
        out = hpo.policy_loss(logp, *tensors, weights=weights.to(place), report=("tokens",), backend=backend)
        out.loss.backward()
        assert out.tokens.tolist() == pytest.approx([0.05 * 80.0**2] * 40), backend
        assert logp.grad.tolist() == pytest.approx([0.25 * 40 * 0.1 * 80.0] * 40), backend


def test_the_square_of_a_whole_answer_is_kimis(native_backends):
    """The recipe of its docstring: the mean over answers of ``-A sum logp + tau (sum x)^2 / 2``."""
    answer = Level(Identity(), aggregate=Aggregate.SUM)
    gate = RatioGate("kimi of answers", Drop(), (answer,), Head.LOG, head_numbers=(0.1, 0.1))
    lengths, x = torch.tensor([3, 2]), torch.tensor([0.1, 0.2, 0.3, 0.05, -0.2])
    batch, advantages = hpo.PackedBatch.from_lengths(lengths), torch.tensor([1.0, -1.0])
    old_logp = torch.full((5,), -1.0)
    weights = hpo.aggregation.seq_mean_token_mean(batch)
    expected = [-1 + 0.1 * 0.6] * 3 + [1 + 0.1 * -0.15] * 2  # of one answer
    for backend in ("reference", *native_backends):
        place = testing.device_of(backend)
        tensors = [each.to(place) for each in (old_logp + x, old_logp, advantages * lengths, batch)]
        out = hpo.policy_loss_and_grad(*tensors, gate, weights=weights.to(place), backend=backend)
        assert out.grad.tolist() == pytest.approx([each / 2 for each in expected]), backend
        assert out.loss.item() == pytest.approx((2.4 + 0.05 * 0.6**2 - 2.15 + 0.05 * 0.15**2) / 2), backend


@pytest.mark.parametrize(("rising", "falling"), [(1, 1), (3, 2), (12, 12), (13, 12), (2, 0), (0, 2)])
def test_gamma_under_a_split_beyond_what_exponentials_hold(rising, falling, native_backends):
    """Sums of log-ratios of 60 on both sides: e^u stands still above u = 80, so two of them cancel, and one alone is
    nothing or without bounds."""
    level = Level(Gamma((2.0, 3.0), (3.0, 2.0)), aggregate=Aggregate.SUM)
    gate = RatioGate("x", Drop(), (level,), Head.SCORE, split=True)
    x = torch.tensor([60.0] * rising + [-60.0] * falling)
    z = 0.0 if rising and falling else (-60.0 if rising else 60.0)
    batch = hpo.PackedBatch.from_lengths([len(x)])
    for backend in ("reference", *native_backends):
        ones = torch.ones(1, device=testing.device_of(backend))
        logp, old_logp = (each.to(ones.device) for each in (x.clamp(max=-1), x.clamp(max=-1) - x))
        out = hpo.policy_loss_and_grad(
            logp, old_logp, ones, batch.to(ones.device), gate, weights=ones, backend=backend
        )  # fmt: skip
        assert out.grad.tolist() == pytest.approx([-math.exp(z)] * len(x), rel=1e-5), backend
        assert torch.isfinite(out.loss), backend


@pytest.mark.parametrize("routing", Routing)
def test_a_gamma_weight_of_huge_ratios_leaves_no_nan(routing, native_backends):
    level = Level(Gamma((2.0, 3.0), (3.0, 2.0)), routing, aggregate=Aggregate.SUM)
    gate = RatioGate("x", Drop(), (level,), Head.SCORE, penalty=Penalty.K2, penalty_coefficient=0.1)
    example = Example(0, masked=False)
    example.logp = example.logp + 50
    exact = example.run(gate, "reference")
    for backend in native_backends:
        assert_near(example.run(gate, backend).grad, exact.grad, backend)


CORRECTIONS = [
    Correction(action, (-0.03, -0.05), (0.04, 0.02), unit, reduction, Channel.TOTAL, statistic, strict)
    for statistic, reduction, action, unit, strict in itertools.product(
        Statistic, Reduction, Action, (None, Unit.STEP, Unit.TRAJECTORY, Unit.GROUP), (False, True)
    )
    if (action is Action.MASK or statistic is Statistic.LOG_RATIO) and (unit or reduction is Reduction.MEAN)
]


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("unit", [None, Unit.STEP, Unit.TRAJECTORY, Unit.GROUP])
def test_every_correction(unit, native_backends):
    """On interpreted Triton, which is slow, every fifth."""
    example = Example(3)
    rollout = example.old_logp + 0.05 * torch.randn(example.logp.shape, generator=torch.Generator().manual_seed(1))
    rollout[4] = math.nan  # a token the sampler did not score is counted and left out
    slot = hpo.metrics.slot("bad_advantages")
    for place, correction in enumerate(CORRECTIONS):
        if correction.unit is not unit:
            continue
        gate = RatioGate("x", Clip((0.0, 0.9), (1.08, INF)), corrections=(correction,))
        exact = example.run(gate, "reference", rollout_logp=rollout)
        for backend in native_backends:
            if place % tried(backend, 1, 5) == 0:
                out = example.run(gate, backend, rollout_logp=rollout)
                assert_near(out.grad, exact.grad, (backend, correction))
                assert out.metrics.vector[slot] == exact.metrics.vector[slot], (backend, correction)


def in_every_order(monkeypatch, backend):
    for order in ("forward", "reverse") if backend == "cuda_emulated" else ("",):
        monkeypatch.setenv("HPO_EMULATION_ORDER", order)
        yield


def broken_leaves(gate):
    """Rows in many leaves of which a few do not count, and the same as garbage."""
    example = Example(0, (*(5, 0, 9, 1, 7, 12, 3) * 12, 1100), masked=False)  # the last one is of several tiles
    inputs = index_inputs(example, gate)
    broken = {name: value.clone() for name, value in inputs.items()}
    broken["leaf_end"][0] = broken["leaf_end"][1] + 1  # runs into the next, or leaves its row
    broken["leaf_row"][3] = -1
    draw = torch.Generator().manual_seed(0)
    garbage = [
        {name: torch.randint(-size, size, value.shape, generator=draw) for name, value in inputs.items()}
        for size in (3, 60, 1 << 40)
    ]
    return example, broken, garbage


def test_a_gate_without_levels_leaves_broken_leaves_out(native_backends, monkeypatch):
    gate = gate_of(Head.LOG, "token")
    example, broken, garbage = broken_leaves(gate)
    expected = raw(example, gate, "cpu", **broken)
    for backend in native_backends:
        for _ in in_every_order(monkeypatch, backend):
            for anything in garbage:  # whose list of leaves is in the workspace then
                assert bool(torch.isfinite(raw(example, gate, backend, **anything)[2]).all()), backend
            got = raw(example, gate, backend, **broken)
            assert all(torch.allclose(*each, rtol=1e-5, atol=1e-5) for each in zip(got, expected, strict=True)), backend
            assert got[1][hpo.metrics.slot("bad_offsets")] >= 2, backend


@pytest.mark.parametrize("unit", [None, Unit.STEP, Unit.GROUP])
def test_a_correction_leaves_broken_leaves_out(unit, native_backends, monkeypatch):
    correction = Correction(Action.CLAMP, (-0.02, -0.01), (0.03, 0.02), unit)
    units = () if unit is None else (Level(Identity(), unit=unit),)
    example, broken, garbage = broken_leaves(RatioGate("x", Identity(), units))

    def factor(on, leaves):
        given = {"cu_seqlens": example.batch.cu_seqlens, **leaves}
        inputs = PolicyLossInputs(example.logp, example.old_logp, example.advantages, example.weights, **given)
        return ops.correction(inputs, correction.spec(), on)

    expected = factor("cpu", broken)
    for backend in native_backends:
        for _ in in_every_order(monkeypatch, backend):
            for anything in garbage:
                assert bool(torch.isfinite(factor(backend, anything)).all()), backend
            got = factor(backend, broken)
            torch.testing.assert_close(got, expected, rtol=1e-6, atol=0, msg=backend)
            assert (got != 1).any(), backend


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("unit", [None, Unit.TRAJECTORY])
@pytest.mark.parametrize("side", [0.25, -0.25])
def test_what_lies_on_a_bound_is_inside_unless_strict(strict, unit, side, backend):
    """Every log-ratio, and so every mean, is the bound to the bit."""
    correction = Correction(Action.MASK, (-0.25, -0.25), (0.25, 0.25), unit, strict=strict)
    gate, batch = RatioGate("x", Identity(), corrections=(correction,)), hpo.PackedBatch.from_lengths([3, 2])
    old = torch.full((5,), -1.0)
    for engine in (backend, "reference"):
        out = hpo.policy_loss_and_grad(
            old, old, torch.tensor([1.0, -1.0]), batch, gate, rollout_logp=old - side, backend=engine
        )
        assert (out.grad == 0).all() if strict else (out.grad != 0).all()
