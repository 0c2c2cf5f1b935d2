"""Gates on several levels where there is next to nothing: empty segments, one token, no advantage; what is refused; and
a new user's own gate."""

import functools
import itertools
import math
from pathlib import Path

import pytest
import torch
from catalogue import Example, bits
from hierarchies import FOUR, GATES, GROUP, SEVEN, SMALL, STEP, levels

import hpo_core as hpo
from hpo_core import gates, testing
from hpo_core.gates import (
    Aggregate,
    Clip,
    Drop,
    FirstOrder,
    Head,
    Identity,
    Level,
    LogClip,
    RatioGate,
    Rollback,
    Routing,
    Tanh,
    Unit,
)

ROOT = Path(__file__).parents[1]
MEAN_EXP = Aggregate.LOG_MEAN_EXP


def test_a_group_of_one_trajectory_leaves_no_residual(backend):
    batch = hpo.PackedBatch.from_lengths([3, 4], group_ids=torch.tensor([5, 9]))
    tight, wide = (Rollback((0.0, 0.0)), Unit.TRAJECTORY), (Rollback((0.5, 0.5)), GROUP)
    two = RatioGate("two", SMALL, levels(tight, wide), split=True)
    one = RatioGate("one", SMALL, levels((Rollback((0.5, 0.5)), Unit.TRAJECTORY)), split=True)
    x, old = SEVEN.float(), torch.zeros(7)
    results = [hpo.policy_loss_and_grad(x, old, torch.ones(2), batch, gate, backend=backend) for gate in (two, one)]
    torch.testing.assert_close(results[0].grad, results[1].grad)
    torch.testing.assert_close(results[0].loss, results[1].loss)


@pytest.mark.parametrize("aggregate", [Aggregate.MEAN, Aggregate.BALANCED], ids=["mean", "balanced"])
def test_an_empty_range_with_the_name_of_a_step_changes_nothing(aggregate, backend):
    """It lies in a row of another trajectory, or behind the row that it ends."""

    def run(ranges, names):
        steps, step_ids = torch.tensor(ranges), torch.tensor(names)
        ids = {"trajectory_ids": torch.tensor([0, 1, 0]), "steps": steps, "step_ids": step_ids}
        batch = hpo.PackedBatch.from_lengths([3, 3, 2], **ids)
        coarse = Level(Tanh(0.2), aggregate=aggregate)
        gate = RatioGate("steps", SMALL, (Level(Identity(), unit=STEP), coarse))
        x, old = torch.tensor([0.3, 0.1, -0.2, 0.4, 0.2, 0.1, 0.5, -0.1]).requires_grad_(), torch.zeros(8)
        advantages = torch.tensor([1.0, -1.0, 1.0])
        report = ("levels",) if aggregate is Aggregate.MEAN else ()
        out = hpo.policy_loss(x, old, advantages, batch, gate, report=report, backend=backend)
        return out.levels and out.levels.table, bits(torch.autograd.grad(out.loss, x)[0]), bits(out.loss)

    table, *expected = run([[0, 3], [3, 5], [5, 6], [6, 8]], [4, 8, 9, 7])
    in_another = run([[0, 3], [3, 3], [3, 5], [5, 6], [6, 8]], [4, 7, 8, 9, 7])
    behind = run([[0, 3], [3, 5], [5, 6], [6, 6], [6, 8]], [4, 8, 9, 9, 7])
    for of_levels, *found in (in_another, behind):
        assert found == expected
        assert table is None or torch.allclose(of_levels, table, rtol=1e-12, atol=1e-12)


def test_rows_in_no_group_stand_alone(backend):
    ids = (torch.tensor([-1, -1, 3]), torch.tensor([0, 1, 2]))
    gate = RatioGate("group", SMALL, levels((Rollback((0.01, 0.01), 1.0), GROUP)))
    old = torch.zeros(7)
    grads = [
        hpo.policy_loss_and_grad(
            SEVEN.float(), old, torch.ones(3), hpo.PackedBatch.from_lengths([2, 3, 2], group_ids=each), gate,
            backend=backend,
        ).grad
        for each in ids
    ]  # fmt: skip
    assert bits(grads[0]) == bits(grads[1])


@pytest.mark.parametrize("aggregate", [Aggregate.MEAN, Aggregate.BALANCED])
@pytest.mark.parametrize("unit", [GROUP, Unit.TRAJECTORY])
def test_a_group_in_no_domain_is_one_by_itself(unit, aggregate, backend):
    """Also where the gate has no level of groups; a row in no group is a group, and so a domain."""
    narrow = Level(LogClip((-0.004, -0.004), (0.004, 0.004)), unit=unit)
    gate = RatioGate("domain", Drop(), (narrow, Level(SMALL, unit=Unit.DOMAIN, aggregate=aggregate)))
    old, x, rows = torch.zeros(7), SEVEN.float(), torch.tensor([0, 1, 0, 2])
    losses = [
        hpo.policy_loss(
            x, old, torch.ones(4), hpo.PackedBatch.from_lengths([2, 3, 1, 1], group_ids=groups, domain_ids=domains),
            gate, report=("tokens",), backend=backend,
        ).tokens
        for groups, domains in (
            (torch.tensor([0, -1, 0, -1]), torch.tensor([-1, -5, -2, -1])),
            (rows, rows + 4),
            (rows, torch.tensor([4, 0, 4, -1])),
        )
    ]  # fmt: skip
    assert bits(losses[0]) == bits(losses[1]) == bits(losses[2])


@pytest.mark.parametrize("name", [name for name, gate in GATES.items() if STEP in [each.unit for each in gate.levels]])
def test_a_step_in_two_ranges_is_one_around_masked_tokens(name, native_backends):
    ids = {"trajectory_ids": torch.tensor([6]), "group_ids": torch.tensor([2]), "domain_ids": torch.tensor([1])}
    x = 0.06 * torch.sin(torch.arange(12.0) ** 2)
    offsets, mask = torch.tensor([0, 12]), torch.ones(12, dtype=torch.bool)
    mask[2:4] = False
    masked = hpo.PackedBatch(offsets, mask, steps=torch.tensor([[0, 9], [9, 12]]), **ids)
    ranges = torch.tensor([[0, 2], [4, 9], [9, 12]])
    named, nameless = (
        hpo.PackedBatch(offsets, steps=ranges, step_ids=None if each is None else torch.tensor(each), **ids)
        for each in ([8, 8, -1], None)
    )
    old, one = torch.full((12,), -1.0), torch.ones(1)

    def run(batch, backend):
        given = {"weights": one, "advantage_level": "row", "backend": backend}
        return hpo.policy_loss_and_grad(old + x, old, one, batch, GATES[name], **given)

    exact = run(masked, "reference")
    for backend in native_backends:
        out = run(named, backend)
        assert torch.allclose(out.grad, exact.grad, rtol=1e-5, atol=1e-6), backend
        assert torch.allclose(out.loss, exact.loss, rtol=1e-5, atol=1e-6), backend
        if name == "four levels, through, whole":  # others pass what is inside their bounds on as it is
            assert not torch.allclose(run(nameless, backend).grad, exact.grad, rtol=1e-4), backend


def test_a_trajectory_of_one_token(native_backends):
    """FiberPO: no residual is left, and the rollback has slope -1."""
    gate, batch = gates.fiberpo(0.1, (0.2, 0.2)), hpo.PackedBatch.from_lengths([1])
    for on in ("reference", *native_backends):
        x = torch.tensor([0.3], dtype=torch.float64 if on == "reference" else torch.float32)
        out = hpo.policy_loss_and_grad(x, x * 0, x * 0 + 1, batch, gate, backend=on, advantage_level="row")
        assert out.loss.item() == pytest.approx(-math.exp(0.1)), on
        assert out.grad.item() == pytest.approx(math.exp(0.1)), on


@pytest.mark.parametrize("name", ["fiberpo", "score"])
def test_an_advantage_of_zero(name, backend):
    """No objective and no gradient of its own; penalties act, and its log-ratio is in the aggregates."""
    gate, example = GATES[name], Example(0)
    for zero in (0.0, -0.0):
        out = example.run(gate, backend, advantages=example.advantages * 0 + zero)
        assert out.loss == 0 and bool((out.grad == 0).all())
    pulled = {"ref_logp": example.old_logp + 0.5, "kl": hpo.kl.k2(0.1)}
    out = example.run(gate, backend, advantages=example.advantages * 0, **pulled)
    covered = example.covered(gate)
    assert out.loss > 0 and bool((out.grad[covered] != 0).all())
    first = int(covered.nonzero()[0])
    advantages = example.token_advantages.clone()
    advantages[first] = 0
    runs = []
    for shift in (0.0, 0.3):
        logp = example.logp.clone()
        logp[first] += shift
        runs.append(example.run(gate, backend, logp=logp, advantages=advantages).grad)
    others = covered & (torch.arange(covered.numel()) != first)
    assert not torch.equal(runs[0][others], runs[1][others])


@pytest.mark.parametrize(
    "gate", [GATES["fiberpo"], RatioGate("four", SMALL, levels(*FOUR), split=True)], ids=["1", "4"]
)
def test_empty_segments_do_nothing(gate, backend):
    """Rows without tokens, and rows, steps, trajectories, groups and domains that are masked throughout."""
    draw = torch.Generator().manual_seed(3)
    logp, old = torch.rand(7, generator=draw) * 0.2 - 1, torch.full((7,), -0.9)
    runs, losses = [], []
    for surrounded in (False, True):
        lengths = [2, 0, 3, 4, 3] if surrounded else [3, 4]
        ids = torch.tensor([5, 6, 7, 7, 8] if surrounded else [7, 7])
        steps = [(0, 2), (2, 3), (3, 5), (5, 9), (9, 12)] if surrounded else [(0, 1), (1, 3), (3, 7)]
        inside = slice(2, 9) if surrounded else slice(0, 7)
        mask = torch.zeros(sum(lengths), dtype=torch.bool)
        mask[inside] = True
        of_tokens = [torch.full((sum(lengths),), math.nan) for _ in range(2)]
        of_tokens[0][inside], of_tokens[1][inside] = logp, old
        rows = slice(2, 4) if surrounded else slice(0, 2)
        advantages, weights = torch.full((2, len(lengths)), 3.0)
        advantages[rows], weights[rows] = torch.tensor([1.0, -0.5]), torch.tensor([0.2, 0.1])
        batch = hpo.PackedBatch(
            torch.tensor([0, *itertools.accumulate(lengths)]), mask, steps=torch.tensor(steps), trajectory_ids=ids,
            group_ids=ids, domain_ids=ids,
        )  # fmt: skip
        out = hpo.policy_loss_and_grad(
            *of_tokens, advantages, batch, gate, weights=weights, advantage_level="row", backend=backend
        )
        assert not out.grad[~mask].any()
        losses.append(out.loss.item())
        runs.append((bits(out.grad[inside]), out.metrics["rows"].item(), out.metrics["tokens"].item()))
    assert runs[0] == runs[1]
    assert runs[0][1:] == (2, 7)
    # The losses of two packings agree within the budget: 4 x 2^-24 of the sum of the terms, 3 of 0.2 and 4 of 0.05.
    assert abs(losses[0] - losses[1]) <= 2**-22 * 0.8


@pytest.mark.parametrize(
    "broken",
    [[[0, 2], [1, 5]], [[-1, 2], [2, 5]], [[0, 2], [2, 99]], [[0, 9], [9, 9]], [[4, 2], [5, 5]], [[2, 5], [0, 2]]],
)
def test_steps_that_are_none(broken, native_backends):
    """Out of their row, overlapping or out of order: left out, counted, never followed."""
    batch = hpo.PackedBatch(torch.tensor([0, 5, 7]), total_tokens=7, steps=torch.tensor(broken), validate=False)
    for on in ("reference", *native_backends):
        dtype = torch.float64 if on == "reference" else torch.float32
        x, ones = SEVEN.to(dtype), torch.ones(2, dtype=dtype)
        out = hpo.policy_loss_and_grad(
            x, 0 * x, ones, batch, gates.step_gspo(), weights=ones, advantage_level="row", backend=on
        )
        assert out.metrics["bad_offsets"] > 0 and bool(torch.isfinite(out.grad).all()), on


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: RatioGate("g", Drop(), (Level(Identity(), unit=GROUP), Level(Identity()))), "from the finest"),
        (lambda: RatioGate("g", Identity(), split=True), "without a level"),
        (lambda: RatioGate("g", SMALL), "LogClip is for residuals"),
        (lambda: RatioGate("g", Drop(), (Level(Identity(), Routing.STOPPED, STEP), Level(Identity()))), "no gradient"),
        (lambda: Rollback((-0.1, 0.1)), "budgets"),
        (lambda: Rollback((0.1, 0.1), -1.0), "slope"),
        (lambda: LogClip((0.1, 0.1), (0.2, 0.2)), "log_clip"),
        (lambda: Tanh(0.0), "bound"),
        (lambda: gates.fiberpo(-0.1), "log_clip"),
        (
            lambda: RatioGate("g", SMALL, (Level(Identity(), aggregate=Aggregate.BALANCED),)),
            "below the finest \\(trajectory\\) are tokens; take Aggregate.MEAN there",
        ),
        (
            lambda: RatioGate("g", SMALL, (Level(Identity(), aggregate=MEAN_EXP), Level(Identity(), unit=GROUP))),
            "one of them for all levels: give all of them Aggregate.LOG_MEAN_EXP or none, got LOG_MEAN_EXP, MEAN",
        ),
        (
            lambda: RatioGate("g", SMALL, (Level(Identity(), aggregate=MEAN_EXP),), pre=SMALL),
            "pre: a clip of x takes the place of the aggregated x, and so does e\\^x",
        ),
        (
            lambda: RatioGate("g", Drop(), (Level(Identity(), aggregate=MEAN_EXP),), Head.CENSORED),
            "head: Head.CENSORED goes with one level",
        ),
        (lambda: RatioGate("g", Drop(), (Level(gates.Excess(0.1), aggregate=Aggregate.SUM),)), "with no other head"),
        (lambda: RatioGate("g", Drop(), (Level(gates.Gamma((1, 1), (1, 1))),)), "Gamma does not agree with the ratio"),
        (lambda: RatioGate("g", Drop()), "Drop\\(\\) under the linear head has no gradient"),
        (lambda: RatioGate("g", Clip(), channel=gates.Channel.DISCREPANCY), "channel: it has no gradient"),
    ],
)  # fmt: skip
def test_what_a_gate_refuses(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_levels_are_a_tuple():
    with pytest.raises(TypeError, match=r"^levels: expected a tuple of Level, of one \(level,\), got Level"):
        RatioGate("g", Drop(), Level(Identity()))


@pytest.mark.parametrize(
    "gate, missing",
    [(gates.step_gspo(), "steps"), (gates.reconstructed.fiberpo_domain(), "group_ids")],
    ids=["steps", "groups"],
)
def test_what_the_batch_lacks_is_named(gate, missing):
    with pytest.raises(ValueError, match=missing):
        hpo.policy_loss(torch.zeros(3), None, torch.zeros(1), hpo.PackedBatch.from_lengths([3]), gate)


def test_the_score_head_has_no_gradient_through_the_ratio():
    gate = RatioGate(
        "score", Clip((0.9, 0.9), (1.1, 1.1)), levels((Clip((0.95, 0.95), (1.05, 1.05)), Unit.TRAJECTORY)), Head.SCORE
    )
    example = Example(0)
    out = example.run(gate, "cpu")
    assert gate.first_order is FirstOrder.EXACT
    torch.testing.assert_close(out.grad.double(), example.run(gate, "reference").grad, rtol=1e-5, atol=1e-7)


@pytest.mark.skipif(not (ROOT / "examples").exists(), reason="needs the source")
def test_a_readers_first_attempt(backend):
    """examples/own_gate.py, as written from docs/own_gate.md alone: the page quotes it, and every backend runs it."""
    written = (ROOT / "examples" / "own_gate.py").read_text()
    assert written.rstrip() in (ROOT / "docs" / "own_gate.md").read_text()
    assert len(written.strip().splitlines()) <= 15
    found = {}
    exec(written, found)
    logp, old, batch, gate = (found[name] for name in ("logp", "old", "batch", "soft_turn_budget"))
    run = functools.partial(hpo.policy_loss_and_grad, batch=batch, gate=gate())
    advantages = torch.tensor([1.0, -1.0])
    out = run(logp.detach(), old, advantages, rollout_logp=old - 0.02, backend=backend)
    exact = run(
        logp.detach().double(), old.double(), advantages.double(), rollout_logp=(old - 0.02).double(),
        backend="reference",
    )  # fmt: skip
    torch.testing.assert_close(out.grad.double(), exact.grad, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(found["logp"].grad, out.grad)
    assert out.grad.abs().min() > 0


@pytest.mark.parametrize("name", ["fiberpo", "gspo"])
def test_a_leaf_of_many_tasks(name, backend):
    """Each of them keeps what it has added up, where leaves wait for each other."""
    tokens, draw = 300_000 if backend == "cpu" else 1_300, torch.Generator().manual_seed(0)
    batch = hpo.PackedBatch.from_lengths([5, tokens - 30, 25], group_ids=torch.zeros(3, dtype=torch.int64))
    old_logp = -1 - torch.rand(tokens, generator=draw)
    rising = torch.linspace(-0.3, 0.5, tokens) + 0.1 * torch.randn(tokens, generator=draw)
    given = (old_logp + rising, old_logp, torch.tensor([1.0, -1.0, 0.5]), batch)
    gate = {"fiberpo": hpo.gates.fiberpo(0.3, (0.05, 0.05), 1.0), "gspo": hpo.gates.gspo(0.5, 0.5)}[name]
    expected = hpo.policy_loss_and_grad(*given, gate, backend="reference")
    place = testing.device_of(backend)
    found = hpo.policy_loss_and_grad(*(each.to(place) for each in given), gate, backend=backend)
    torch.testing.assert_close(found.loss.cpu(), expected.loss, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        found.grad.cpu(), expected.grad, rtol=1e-3, atol=1e-3 * expected.grad.abs().mean().item()
    )


@pytest.mark.parametrize("offsets", [[0, 200, 100, 300], [0, 250, -9, 300], [0, 100, 1 << 40, 300]], ids=str)
def test_rows_in_no_order_have_no_more_tokens_than_there_are(offsets, backend):
    """Rows are the leaves here, and one that is broken tells nothing of those behind it."""
    place, tokens = testing.device_of(backend), 300
    batch = hpo.PackedBatch(torch.tensor(offsets), total_tokens=tokens, validate=False).to(place)
    x, ones = torch.zeros(tokens, device=place), torch.ones(3, device=place)
    for gate in (gates.gspo(), gates.gspo_token()):
        out = hpo.policy_loss_and_grad(x, x, ones, batch, gate, weights=ones, backend=backend)
        assert out.metrics["bad_offsets"] > 0 and out.metrics["tokens"] <= tokens
