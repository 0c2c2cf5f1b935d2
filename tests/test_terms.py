"""Heads, pre-gates, slopes, weights, penalties and corrections in combinations that no preset has, on every backend."""

import itertools
import math

import pytest
import torch
from test_hierarchy import Example, index_inputs, raw

import hpo_core as hpo
from hpo_core import ops
from hpo_core.gates import (
    Action,
    Aggregate,
    Channel,
    Clip,
    Correction,
    Drop,
    Excess,
    Gamma,
    Head,
    Identity,
    Level,
    LogClip,
    Penalty,
    RatioGate,
    Reduction,
    Rollback,
    Routing,
    Statistic,
    Tanh,
    Unit,
)
from hpo_core.specs import PolicyLossInputs

INF = math.inf
NUMBERS = {Head.FLIPPED: (1.05, 1.06)}
# Both bounds of both signs, each with a slope and a weight of its own.
BEYOND = Clip((0.93, 0.9), (1.08, 1.05), (0.5, 0.25), (0.3, 1.0), (1.1, 0.75), (0.6, 1.2))
SLOPES = Clip((0.93, 0.9), (1.08, 1.05), (0.5, 0.25), (0.3, 1.0))
SMALL = LogClip((-0.05, -0.08), (0.06, 0.04))
CENSORED = {
    "token": (Unit.TRAJECTORY, Routing.THROUGH),
    "split": (Unit.GROUP, Routing.THROUGH),
    "pre-gated": (Unit.STEP, Routing.STOPPED),
}
BUDGETS = Level(Rollback((0.03, 0.02), most=3.0))


def gate_of(head, kind):
    numbers = NUMBERS.get(head, (0.7, 1.3))
    shared = {"head": head, "head_numbers": numbers, "penalty": Penalty.K3, "penalty_coefficient": 0.1}
    if head is Head.CENSORED:  # it knows no other levels
        unit, routing = CENSORED[kind]
        return RatioGate(kind, Drop(), (Level(Excess(0.07), routing, unit, Aggregate.SUM),), **shared)
    if kind == "token":
        return RatioGate("token", BEYOND, **shared)
    if kind == "split":
        levels = (BUDGETS, Level(Tanh(0.02), unit=Unit.GROUP))
        return RatioGate("split", SMALL, levels, split=True, **(shared | {"penalty": Penalty.ABSOLUTE}))
    pre = LogClip((-0.05, -0.1), (0.06, 0.04))
    levels = (Level(Identity(), Routing.SELF, Unit.STEP), BUDGETS)
    return RatioGate("pre-gated", SLOPES, levels, pre=pre, **(shared | {"penalty": Penalty.K2}))


GATES = {
    **{
        f"{head.name}, {kind}": gate_of(head, kind)
        for head, kind in itertools.product(Head, ("token", "split", "pre-gated"))
    },
    "GAMMA": RatioGate("gamma", Drop(), (Level(Gamma((2.0, 3.0), (3.0, 2.0)), aggregate=Aggregate.SUM),), Head.SCORE),
}


def inputs_of(gate, example, seed):
    """What the gate takes, per row or per token."""
    draw = torch.Generator().manual_seed(seed)
    tokens, rows = example.logp.numel(), example.weights.numel()
    given = {}
    if gate.takes_target:
        target = torch.rand(tokens if seed % 2 else rows, generator=draw)  # as many as advantages, below
        given["target"] = 0.2 + 0.6 * target if gate.head is Head.NEGATIVE_AWARE else 0.9 + 0.2 * target
    if gate.penalty_coefficient and seed % 2:
        given["penalty_mask"] = torch.rand(tokens, generator=draw) < 0.5
    if seed == 2:
        given["token_weight"] = torch.rand(tokens, generator=draw)
        given["token_mask"] = torch.rand(tokens, generator=draw) < 0.7
    if seed == 3:
        example.logp[3], example.logp[7] = -INF, INF
    if seed % 2:
        given["advantages"] = example.token_advantages
    return given


def both(example, gate, backend, **given):
    """What a backend computes, and the definition, with the losses of tokens."""
    results = []
    for name, dtype in ((backend, torch.float32), ("reference", torch.float64)):
        cast = {
            key: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
            for key, value in {
                "logp": example.logp, "old_logp": example.old_logp, "advantages": example.advantages,
                "weights": example.weights, "advantage_level": "token" if "advantages" in given else "row", **given,
            }.items()
        }  # fmt: skip
        level = cast.pop("advantage_level")
        arguments = {"batch": example.batch, "gate": gate, "backend": name, "advantage_level": level, **cast}
        results.append((hpo.policy_loss_and_grad(**arguments), hpo.policy_loss(return_tokens=True, **arguments).tokens))
    return results


def assert_near(got, wanted, near=3e-6):
    size = wanted.abs().max().clamp(min=1e-3)
    assert ((got.double() - wanted).abs().max() <= near * size).item()


@pytest.mark.parametrize("name", GATES)
def test_every_combination(name, backend):
    gate = GATES[name]
    compared = ("tokens", "selected", "penalty", "bad_advantages", "clipped_low_negative", "clipped_high_positive")
    slots = [hpo.metrics.slot(each) for each in compared]
    for seed in range(2 if backend == "triton" else 8):
        example = Example(seed, (5, 0, 9, 1, 40, 12, 3, 33))
        (out, tokens), (exact, exact_tokens) = both(example, gate, backend, **inputs_of(gate, example, seed))
        assert_near(out.loss, exact.loss)
        assert_near(out.grad, exact.grad)
        assert_near(tokens, exact_tokens)
        assert out.metrics.vector[slots].tolist() == pytest.approx(
            exact.metrics.vector[slots].tolist(), rel=1e-5, abs=1e-6
        )


@pytest.mark.parametrize("head", Head)
def test_a_row_longer_than_any_tile(head, backend):
    lengths = (20000, 3, 9000) if backend != "triton" else (2100, 3, 900)
    example = Example(1, lengths, several=False)
    gate = gate_of(head, "token")
    (out, _), (exact, _) = both(example, gate, backend, **inputs_of(gate, example, 5))
    assert_near(out.loss, exact.loss)
    assert_near(out.grad, exact.grad)


@pytest.mark.parametrize("head", [Head.SIMPLE, Head.TARGET, Head.NEGATIVE_AWARE])
def test_weights_below_zero_turn_the_sign_of_the_loss(head, backend):
    gate, example = gate_of(head, "token"), Example(0)
    given = inputs_of(gate, example, 0)
    (out, _), _ = both(example, gate, backend, **given)
    (turned, _), (exact, _) = both(example, gate, backend, **given, weights=-example.weights)
    assert_near(turned.grad, exact.grad)
    torch.testing.assert_close(turned.grad, -out.grad)


@pytest.mark.parametrize("routing", Routing)
def test_a_gamma_weight_of_huge_ratios_leaves_no_nan(routing, backend):
    level = Level(Gamma((2.0, 3.0), (3.0, 2.0)), routing, aggregate=Aggregate.SUM)
    gate = RatioGate("x", Drop(), (level,), Head.SCORE, penalty=Penalty.K2, penalty_coefficient=0.1)
    example = Example(0, masked=False)
    example.logp = example.logp + 50
    (out, _), (exact, _) = both(example, gate, backend)
    assert_near(out.grad, exact.grad)


CORRECTIONS = [
    Correction(action, (-0.03, -0.05), (0.04, 0.02), unit, reduction, Channel.TOTAL, statistic, strict)
    for statistic, reduction, action, unit, strict in itertools.product(
        Statistic, Reduction, Action, (None, Unit.STEP, Unit.TRAJECTORY, Unit.GROUP), (False, True)
    )
    if (action is Action.MASK or statistic is Statistic.LOG_RATIO) and (unit or reduction is Reduction.MEAN)
]


def test_every_correction(backend):
    example = Example(3)
    rollout = example.old_logp + 0.05 * torch.randn(example.logp.shape, generator=torch.Generator().manual_seed(1))
    rollout[4] = math.nan  # a token the sampler did not score is counted and left out
    for correction in CORRECTIONS if backend != "triton" else CORRECTIONS[::5]:
        gate = RatioGate("x", Clip((0.0, 0.9), (1.08, INF)), corrections=(correction,))
        (out, _), (exact, _) = both(example, gate, backend, rollout_logp=rollout)
        assert_near(out.grad, exact.grad)
        slot = hpo.metrics.slot("bad_advantages")
        assert out.metrics.vector[slot] == exact.metrics.vector[slot]


def in_every_order(monkeypatch, backend):
    for order in ("forward", "reverse") if backend == "cuda_emulated" else ("",):
        monkeypatch.setenv("HPO_EMULATION_ORDER", order)
        yield


def broken_pieces(gate):
    """Rows in many pieces of which a few do not count, and the same as garbage."""
    example = Example(0, (5, 0, 9, 1, 7, 12, 3) * 12, masked=False)
    inputs = index_inputs(example, gate)
    broken = {name: value.clone() for name, value in inputs.items()}
    broken["piece_end"][0] = broken["piece_end"][1] + 1  # runs into the next, or leaves its row
    broken["piece_row"][3] = -1
    draw = torch.Generator().manual_seed(0)
    garbage = [
        {name: torch.randint(-size, size, value.shape, generator=draw) for name, value in inputs.items()}
        for size in (3, 60, 1 << 40)
    ]
    return example, broken, garbage


def test_a_gate_without_levels_leaves_broken_pieces_out(backend, monkeypatch):
    gate = gate_of(Head.LOG, "token")
    example, broken, garbage = broken_pieces(gate)
    expected = raw(example, gate, "cpu", **broken)
    for _ in in_every_order(monkeypatch, backend):
        for anything in garbage:  # whose list of pieces is in the workspace then
            assert bool(torch.isfinite(raw(example, gate, backend, **anything)[2]).all())
        got = raw(example, gate, backend, **broken)
        for mine, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
        assert got[1][hpo.metrics.slot("bad_offsets")] >= 2


@pytest.mark.parametrize("unit", [None, Unit.STEP, Unit.GROUP])
def test_a_correction_leaves_broken_pieces_out(unit, backend, monkeypatch):
    correction = Correction(Action.CLAMP, (-0.02, -0.01), (0.03, 0.02), unit)
    units = () if unit is None else (Level(Identity(), unit=unit),)
    example, broken, garbage = broken_pieces(RatioGate("x", Identity(), units))

    def factor(on, pieces):
        given = {"cu_seqlens": example.batch.cu_seqlens, **pieces}
        inputs = PolicyLossInputs(example.logp, example.old_logp, example.advantages, example.weights, **given)
        return ops.correction(inputs, correction.spec(), on)

    for _ in in_every_order(monkeypatch, backend):
        for anything in garbage:
            assert bool(torch.isfinite(factor(backend, anything)).all())
        got = factor(backend, broken)
        torch.testing.assert_close(got, factor("cpu", broken), rtol=1e-6, atol=0)
        assert (got != 1).any()


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
