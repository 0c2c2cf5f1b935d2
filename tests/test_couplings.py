"""How much a token's gated log-ratio z depends on the other tokens: the backward's closed form (T2), and how the
coupling falls with the size of segments (T5)."""

import itertools
import math

import pytest
import torch
from catalogue import Example
from hierarchies import GATES, exact_off_branches, levels, naive_gate

import hpo_core as hpo
from hpo_core.gates import Aggregate, Head, Identity, LogClip, RatioGate, Rollback, Routing, Tanh, Unit

# --------------------------------------------------------------------------------------------------- the closed form

LINEAR = {
    name: gate
    for name, gate in GATES.items()
    if gate.head is Head.LINEAR and not any(level.aggregate is Aggregate.BALANCED for level in gate.levels)
}


def value_and_slope(gate, u, *which):
    leaf = torch.tensor(u, dtype=torch.float64, requires_grad=True)
    value = naive_gate(gate, leaf, *which)
    (slope,) = torch.autograd.grad(value, leaf, allow_unused=True) if value.requires_grad else (None,)
    return value.item(), 0.0 if slope is None else slope.item()


def by_abel_summation(example, gate):
    """Loss and gradient from the coefficient of every aggregate, the difference of the slopes of two neighbouring
    levels; nothing is differentiated but single gates."""
    x = (example.logp.double() - example.old_logp.double()).tolist()
    covered, row = example.covered(gate).tolist(), example.row().tolist()
    valid = [t for t in range(len(x)) if covered[t]]
    channel_of = [int(gate.split and each < 0) for each in x]
    segments = [example.segment(level.unit).tolist() for level in gate.levels]
    channels = (0, 1) if gate.split else (0,)
    loss, grad = 0.0, [0.0] * len(x)
    for t in valid:
        sign, z = int(example.advantages[row[t]] < 0), 0.0
        members = [[u for u in valid if segment[u] == segment[t]] for segment in segments]
        slopes, aggregates = {}, {}
        for c in channels:
            entering = {u: (-x[u] if c else x[u]) * (channel_of[u] == c) for u in valid}
            values, sizes = [entering[t]], [1]
            for level, inside in zip(gate.levels, members, strict=True):
                if level.aggregate is Aggregate.LOG_MEAN_EXP:
                    values.append(math.log(math.fsum(math.exp(entering[u]) for u in inside) / len(inside)))
                else:
                    total = math.fsum(entering[u] for u in inside)
                    values.append(total if level.aggregate is Aggregate.SUM else total / len(inside))
                sizes.append(len(inside))
            values.append(0.0)
            slopes[c], aggregates[c] = [], values
            for k, each in enumerate([gate.token, *(level.gate for level in gate.levels)]):
                gated, slope = value_and_slope(each, values[k] - values[k + 1], sign, c, sizes[k])
                z += -gated if c else gated
                slopes[c].append(slope)
        term = -float(example.weights[row[t]]) * float(example.advantages[row[t]]) * math.exp(z)
        loss += term
        grad[t] += term * slopes[channel_of[t]][0]
        for k, (level, inside) in enumerate(zip(gate.levels, members, strict=True), 1):
            share = 1 if level.aggregate is Aggregate.SUM else len(inside)
            reached = {Routing.THROUGH: inside, Routing.SELF: [t], Routing.STOPPED: []}[level.routing]
            for u in reached:
                slope = slopes[channel_of[u]]
                part = 1 / share if level.routing is Routing.THROUGH else 1
                if level.routing is Routing.THROUGH and level.aggregate is Aggregate.LOG_MEAN_EXP:
                    part *= math.exp(abs(x[u]) * (1 if gate.split or x[u] > 0 else -1) - aggregates[channel_of[u]][k])
                grad[u] += term * (slope[k] - slope[k - 1]) * part
    return loss, torch.tensor(grad, dtype=torch.float64)


every_linear = pytest.mark.parametrize("gate", LINEAR.values(), ids=LINEAR)


def assert_the_closed_form(form, example, gate, engine, near):
    loss, grad = form
    out = example.run(gate, engine)
    assert out.loss.item() == pytest.approx(loss, rel=near, abs=near), engine
    largest = max(1e-3, grad.abs().max().item())
    assert (out.grad.double() - grad).abs().max() <= near * largest, engine


@every_linear
def test_the_gradient_is_the_closed_form(gate):
    """T2 for the definition, which autograd differentiates."""
    moved = 0
    for seed, spread in itertools.product(range(4), (0.02, 0.1)):
        example = Example(seed, spread=spread)
        form = by_abel_summation(example, gate)
        assert_the_closed_form(form, example, gate, "reference", 1e-12)
        moved += bool(form[1].abs().max() > 1e-3)
    assert moved >= 4


@every_linear
def test_every_backend_is_the_closed_form(gate, native_backends):
    for seed in range(30):
        example = Example(seed, spread=0.02 + 0.04 * (seed % 3))
        form = by_abel_summation(example, gate)
        if form[1].abs().max() > 1e-3 and exact_off_branches(example, gate) is not None:
            break
    else:
        raise AssertionError("no example keeps off the branches")
    for backend in native_backends:
        assert_the_closed_form(form, example, gate, backend, 2e-5)


# -------------------------------------------------------------------------------------------------- scale separation

UNITS = {1: (Unit.TRAJECTORY,), 2: (Unit.STEP, Unit.TRAJECTORY), 3: (Unit.STEP, Unit.TRAJECTORY, Unit.GROUP)}
every_place = pytest.mark.parametrize("depth, bent", [(depth, bent) for depth in UNITS for bent in range(depth)])
BUDGET = 0.05
FALLING = {
    "clip": LogClip((-BUDGET, -BUDGET), (BUDGET, BUDGET)),
    "tanh": Tanh(BUDGET),
    "rollback, slope 2": Rollback((BUDGET, BUDGET), 2.0),
    "rollback, at most 4": Rollback((BUDGET, BUDGET), most=4.0),
}
PAPERS = Rollback((BUDGET, BUDGET))


def measured(gate, depth, bent, engine):
    """The couplings at sizes that double. Interpreted, Triton computes two of them, and not at every place."""
    sizes = (8, 16, 32)
    if engine == "triton":
        sizes = sizes[:2] if (depth, bent) in ((1, 0), (3, 1)) else ()
    return [coupling(gate, depth, bent, size, engine) for size in sizes]


def couplings(gate, depth, bent, size, engine):
    """``dz_t / dx_j`` of the first token t, for every j, where only one level's gate is not the identity.

    A segment of a level is two of the next finer one, the finest holds ``size`` tokens. All segments of one level but
    the bent one have the same residual whatever their size, so that nothing but sizes tells two runs apart; the
    bent level's residual lies beyond its budget, inside the zone in which a rollback comes back, C / n wide.
    """
    number = 2 ** (depth - 1) * size  # tokens of the coarsest level
    beyond = BUDGET * (1.0 + 0.5 / (number if gate == PAPERS else 4.0))
    token = torch.arange(number)
    x = torch.where(token % 2 == 0, 0.02, -0.02).double()
    for level in range(depth):
        block = token // (2**level * size)  # the segment; two of them make a parent, whose aggregate is their mean
        shift = beyond if level == bent else 0.01
        x += shift if level == depth - 1 else torch.where(block % 2 == 0, shift, -shift)
    gates = [Identity()] * depth
    gates[bent] = gate
    units = UNITS[depth]
    steps = torch.tensor([[begin, begin + size] for begin in range(0, number, size)]) if depth > 1 else None
    rows = 2 if depth > 2 else 1
    batch = hpo.PackedBatch.from_lengths(
        [number // rows] * rows, steps=steps, group_ids=torch.zeros(rows, dtype=torch.int64)
    )
    dtype = torch.float64 if engine == "reference" else torch.float32
    ratio_gate = RatioGate("one bends", Identity(), levels(*zip(gates, units, strict=True)))
    out = hpo.policy_loss_and_grad(
        x.to(dtype), torch.zeros(number, dtype=dtype), torch.ones(rows, dtype=dtype), batch, ratio_gate,
        weights=torch.ones(rows, dtype=dtype), token_mask=token == 0, backend=engine, advantage_level="row",
    )  # fmt: skip
    return out.grad / out.loss  # the loss is -e^z, its gradient -e^z dz/dx


def coupling(gate, depth, bent, size, engine):
    """The largest with another token."""
    return couplings(gate, depth, bent, size, engine)[1:].abs().max().item()


@every_place
@pytest.mark.parametrize("name", FALLING)
def test_couplings_halve_where_segments_double(name, depth, bent, native_backends):
    """T5: the slopes of these gates do not grow with n, so that a mean leaves O(1 / n) of them to each token."""
    for engine in ("reference", *native_backends):
        found = measured(FALLING[name], depth, bent, engine)
        assert not found or found[0] > 1e-2, engine
        for smaller, larger in itertools.pairwise(found):
            assert larger == pytest.approx(smaller / 2, rel=1e-9 if engine == "reference" else 1e-3), engine


@every_place
def test_the_papers_rollback_couples_at_any_size(depth, bent, native_backends):
    """T5's exception: its slope is n, so that the coupling stays in a band, whatever the size."""
    for engine in ("reference", *native_backends):
        found = measured(PAPERS, depth, bent, engine)
        assert all(0.5 <= each <= 2.0 for each in found), engine
        assert not found or max(found) <= 1.1 * min(found), engine
