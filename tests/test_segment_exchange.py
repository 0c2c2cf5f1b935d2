"""Segments that lie on several ranks: what many processes compute is what one does."""

import functools

import pytest
import torch
import torch.distributed as dist
from breadth import at_length, tried  # noqa: F401 (the first is a fixture)
from hierarchies import DOMAIN, FOUR, GROUP, LENGTHS, SMALL, STEP, TRAJECTORY, Step, aggregated, levels, stopped_group
from hierarchies import GATES as HIERARCHIES
from ranks import on_ranks

import hpo_core as hpo
from hpo_core import gates
from hpo_core.gates import (
    Action,
    Aggregate,
    Correction,
    Drop,
    Head,
    Identity,
    Level,
    LogClip,
    RatioGate,
    Reduction,
    Rollback,
    Routing,
    Tanh,
)

pytestmark = pytest.mark.usefixtures("at_length")

TANH = RatioGate("tanh", LogClip((-0.1, -0.1), (0.15, 0.15)), levels((Tanh(0.05), TRAJECTORY), (Tanh(0.03), GROUP)))
GATES = {
    "gspo": gates.gspo(0.01, 0.01),
    "fiberpo": gates.fiberpo(0.05, (0.03, 0.02)),
    "fiberpo_domain": gates.reconstructed.fiberpo_domain(0.05, 0.03, 0.01, 0.01),
    "tanh": TANH,
    "mixed": RatioGate(
        "mixed",
        Identity(),
        (
            Level(Rollback((0.02, 0.015), 2.0), Routing.SELF),
            Level(Tanh(0.02), Routing.STOPPED, GROUP),
            Level(Tanh(0.02), Routing.THROUGH, DOMAIN, Aggregate.SUM),
        ),
        split=True,
    ),
    "score": RatioGate("score", SMALL, levels(*FOUR[1:]), Head.SCORE),
    "pre-gated": gates.gmpo(0.1, 0.1),
    "mean exp": RatioGate("mean exp", SMALL, aggregated("mean exp", FOUR[1:], Routing.THROUGH), split=True),
}
STEPS = {
    "steps": RatioGate("steps", Drop(), levels((Tanh(0.05), STEP), (Tanh(0.03), TRAJECTORY), (Tanh(0.02), DOMAIN))),
    "four levels": HIERARCHIES["four levels, through, split"],
}
# One for each reduction, on segments that several ranks share.
CORRECTED = {
    "mean and minimum": gates.mis(0.985, 1.01, reduction=Reduction.MEAN, ratio_veto=0.89),
    "sum": gates.tis(1.1, TRAJECTORY),
    "steps": gates.compose(gates.ppo_clip(), Correction(Action.MASK, (-0.012, -0.01), (0.01, 0.008), unit=STEP)),
    "maximum": gates.compose(
        gates.ppo_clip(), Correction(Action.MASK, high=(0.06, 0.055), unit=GROUP, reduction=Reduction.MAX)
    ),
}


# A layout: which rows each rank has, or where every row is cut into one part for each.
LAYOUTS = {
    2: {
        "rows": ([0, 2, 4, 6], [1, 3, 5, 7]),
        "cut": (0, 0.5, 1),
        "no rows on one": ([], list(range(8))),
        "no tokens on one": (0, 0, 1),
    },
    4: {"rows": ([7, 0], [], [2, 5, 6, 3], [4, 1]), "cut": (0, 0.25, 0.25, 0.75, 1)},
}


def cuts(ranks, layout):
    return not isinstance(LAYOUTS[ranks][layout][0], list)


def part_of(step, ranks, layout, rank):
    """The share of a rank, and its tokens."""
    shares = LAYOUTS[ranks][layout]
    return step.cut(*shares[rank : rank + 2]) if cuts(ranks, layout) else step.whole_rows(shares[rank])


GATE_OF = {**GATES, **STEPS}
PLACES = [(ranks, layout) for ranks, layouts in LAYOUTS.items() for layout in layouts]
every_place = pytest.mark.parametrize(
    ("ranks", "layout"), PLACES, ids=[f"{ranks} {layout}" for ranks, layout in PLACES]
)


def names_of(ranks):
    return GATE_OF if ranks == 2 else ("fiberpo_domain", "mixed", "four levels")


# The cases of metrics of levels: what ranks share in rows, in parts of them, and not at all.
OBSERVED = [
    (2, "rows", "four levels"),
    (2, "cut", "mixed"),
    (2, "cut", "gspo"),
    (2, "cut", "four levels"),
    (2, "no rows on one", "fiberpo_domain"),
    (4, "rows", "four levels"),
    (4, "cut", "fiberpo_domain"),
]


INTERPRETED = [
    ("fiberpo", "rows"),
    ("fiberpo", "cut"),
    ("four levels", "cut"),
    *(("mixed", each) for each in LAYOUTS[2]),
]


def backends_of(name, layout, backends):
    """Interpreted, Triton takes a tenth of a second for each call of each rank."""
    return [each for each in backends if tried(each, True, (name, layout) in INTERPRETED)]


# --------------------------------------------------------------------------------------------- what one rank does


def compute(rank, ranks, backends):
    step, world, found = Step.make(), dist.group.WORLD, {}
    for name in names_of(ranks):
        for layout in LAYOUTS[ranks]:
            part, tokens = part_of(step, ranks, layout, rank)
            for backend in ("reference", *backends_of(name, layout, backends)):
                out = part.run(GATE_OF[name], backend, process_group=world)
                found[layout, name, backend] = tokens, out.loss, out.grad, out.metrics.vector
    part, _ = part_of(step, ranks, "cut", rank)
    for backend in backends:
        on_policy = part.run(GATES["fiberpo_domain"], backend, old_logp=part.logp, process_group=world)
        given = {"group": torch.tensor([0.5, 0.02, -0.1])}
        both = part.run(stopped_group(), backend, process_group=world, aggregates=given)
        found["on-policy", backend], found["given", backend] = on_policy.grad, both.grad
    found["autograd"] = {backend: by_autograd(part, backend) for backend in ("reference", "cpu")}
    found["single call"] = single_call(step, rank, ranks)
    found["collectives"] = collectives(step, rank, ranks)
    found["corrections"] = corrections(step, rank, ranks, backends)
    for case in OBSERVED:
        if case[0] == ranks:
            for backend in ("reference", *backends_of(case[2], case[1], backends)):
                found["levels", case, backend] = observed(step, case, rank, backend)
    return found


def observed(step, case, rank, backend):
    """The metrics of levels of all ranks, and whether asking for them left loss and gradient as they were."""
    part, _ = part_of(step, *case[:2], rank)
    asked, plain = (
        part.run(GATE_OF[case[2]], backend, process_group=dist.group.WORLD, report=report)
        for report in (("levels",), ())
    )
    same = torch.equal(asked.loss, plain.loss) and torch.equal(asked.grad, plain.grad)
    return asked.levels.all_reduce().table, same


def by_autograd(part, backend):
    """A loss whose backward starts from 3."""
    logp = part.logp.clone().to(torch.float64 if backend == "reference" else torch.float32).requires_grad_()
    out = hpo.policy_loss(
        logp, part.old_logp, part.advantages, part.batch, GATES["fiberpo"], weights=part.weights,
        advantage_level="row", process_group=dist.group.WORLD, backend=backend,
    )  # fmt: skip
    (3 * out.loss).backward()
    return out.loss.detach(), logp.grad


def single_call(step, rank, ranks):
    part, _ = step.whole_rows(list(range(rank, len(LENGTHS), ranks)))
    rewards, world = part.advantages, dist.group.WORLD
    out = hpo.hierarchical_policy_loss(
        part.logp, part.old_logp, rewards, part.batch, gate=TANH, weights=part.weights, process_group=world
    )
    advantages = hpo.advantages.grpo(rewards, part.batch.group_ids)
    three = hpo.policy_loss(
        part.logp, part.old_logp, advantages, part.batch, TANH, weights=part.weights, process_group=world
    )
    return out.loss, three.loss


def collectives(step, rank, ranks):
    """How many there are in a first call, in a second, after a refill of the mask, and where nothing flows."""
    counts, originals = [], (dist.all_reduce, dist.all_gather)

    def counted(function, *arguments, **keywords):
        counts[-1] += 1
        return function(*arguments, **keywords)

    dist.all_reduce, dist.all_gather = (functools.partial(counted, each) for each in originals)
    try:
        part, _ = part_of(step, ranks, "cut", rank)
        for gate in (TANH, TANH, TANH, stopped_group(), GATES["score"], GATES["score"]):
            if len(counts) == 2:  # ids of segments are not of a mask, which another rank may not refill
                part.batch.mask.copy_(part.batch.mask.clone())
            counts.append(0)
            part.run(gate, "cpu", process_group=dist.group.WORLD)
        counts.append(0)
        arguments = (part.logp, part.old_logp, part.advantages, part.batch, TANH)
        with torch.no_grad():  # wants no gradient
            hpo.policy_loss(*arguments, weights=part.weights, advantage_level="row", process_group=dist.group.WORLD)
    finally:
        dist.all_reduce, dist.all_gather = originals
    return counts


def sampled(part):
    """Log-probabilities of a sampler that differs from the old policy."""
    return part.old_logp + 0.4 * (part.logp - part.old_logp)


def corrections(step, rank, ranks, backends):
    """The gradients under corrections of trajectories and groups that are cut."""
    part, _ = part_of(step, ranks, "cut", rank)
    return {
        (name, backend): part.run(gate, backend, rollout_logp=sampled(part), process_group=dist.group.WORLD).grad
        for name, gate in CORRECTED.items()
        for backend in ("reference", *backends)
    }


# --------------------------------------------------------------------------------------------------- ranks against one


@functools.cache  # a failure, too
def outcome(ranks, backends, everything):
    try:
        return on_ranks(ranks, functools.partial(compute, ranks=ranks, backends=backends))
    except Exception as error:
        return str(error)


@pytest.fixture
def found(native_backends):
    """The results of each of some ranks."""

    def of(ranks):
        results = outcome(ranks, tuple(native_backends), tried("triton", True, False))
        assert isinstance(results, list), results
        return results

    return of


def gathered(results, step):
    """The loss, the gradient and the metrics of all ranks."""
    grad = torch.zeros_like(step.logp, dtype=results[0][2].dtype)
    for tokens, _, mine, _ in results:
        grad[tokens] = mine
    metrics = functools.reduce(lambda a, b: a + b, (hpo.Metrics(vector) for *_, vector in results))
    return torch.stack([loss for _, loss, _, _ in results]).sum(), grad, metrics


@every_place
def test_the_definition_of_many_ranks_is_that_of_one(ranks, layout, found):
    step = Step.make()
    for name in names_of(ranks):
        loss, grad, metrics = gathered([each[layout, name, "reference"] for each in found(ranks)], step)
        one = step.run(GATE_OF[name], "reference")
        torch.testing.assert_close(loss, one.loss, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(grad, one.grad, rtol=1e-12, atol=1e-12)
        if not cuts(ranks, layout):
            torch.testing.assert_close(metrics.vector, one.metrics.vector, rtol=1e-12, atol=1e-12)


@every_place
def test_many_ranks_compute_what_one_does(ranks, layout, found, native_backends):
    """Within the budget; where rows stay together to the bit, wherever they lie."""
    step = Step.make()
    terms = (step.weights * step.advantages.abs() * step.batch.row_counts).sum()
    together = layout == "no tokens on one" or not cuts(ranks, layout)
    for name in names_of(ranks):
        gate = GATE_OF[name]
        exact = step.run(gate, "reference")
        largest = max(exact.grad.abs().max(), (step.weights * step.advantages.abs()).max())
        for backend in backends_of(name, layout, native_backends):
            loss, grad, _ = gathered([each[layout, name, backend] for each in found(ranks)], step)
            assert (grad.double() - exact.grad).abs().max() <= 1e-5 * largest, (name, backend)
            assert (loss.double() - exact.loss).abs() <= 1e-5 * terms, (name, backend)
            if together and gate.level is None:  # else one process takes a way that ranks do not
                assert torch.equal(grad, step.run(gate, backend).grad), (name, backend)


@pytest.mark.parametrize("name", GATE_OF)
def test_the_step_keeps_off_the_branches(name):
    step = Step.make()
    runs = [step.run(GATE_OF[name], "reference", logp=step.logp.double() + shift).grad for shift in (0.0, 2e-6, -2e-6)]
    assert all((run - runs[0]).abs().max() < 1e-3 * runs[0].abs().max() for run in runs)


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_without_saturation_the_gradient_is_minus_w_a(ranks, found, native_backends):
    step = Step.make()
    for rank, each in enumerate(found(ranks)):
        part, _ = part_of(step, ranks, "cut", rank)
        row = torch.repeat_interleave(part.batch.cu_seqlens.diff())
        expected = torch.where(part.batch.mask, -(step.weights * step.advantages)[row], 0.0)
        for backend in native_backends:
            assert torch.equal(each["on-policy", backend], expected), backend


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_aggregates_over_ranks(ranks, found, native_backends):
    step = Step.make()
    for backend in native_backends:
        one = step.run(stopped_group(), backend, aggregates={"group": torch.tensor([0.5, 0.02, -0.1])}).grad
        for rank, each in enumerate(found(ranks)):
            _, tokens = part_of(step, ranks, "cut", rank)
            assert torch.allclose(each["given", backend], one[tokens], rtol=1e-5, atol=1e-6), backend


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_the_backward_of_all_ranks(ranks, found):
    step = Step.make()
    one = step.run(GATES["fiberpo"], "reference")
    for backend, tolerance in (("reference", 1e-12), ("cpu", 1e-5)):
        loss = 0
        for rank, each in enumerate(found(ranks)):
            _, tokens = part_of(step, ranks, "cut", rank)
            mine, grad = each["autograd"][backend]
            torch.testing.assert_close(grad.double(), 3 * one.grad[tokens], rtol=tolerance, atol=tolerance)
            loss += mine.double()
        torch.testing.assert_close(loss, one.loss, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_the_single_call_is_the_three_calls(ranks, found):
    for each in found(ranks):
        one, three = each["single call"]
        assert torch.equal(one, three)


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_collectives(ranks, found):
    """Two gather the ids of the levels, once for a batch; one adds log-ratios, two more what flows through
    aggregates."""
    for each in found(ranks):
        assert each["collectives"] == [5, 3, 3, 3, 3, 1, 1]


@pytest.mark.parametrize("name", CORRECTED)
def test_corrections_over_cut_segments(name, found, native_backends):
    """Integers have no order: to the bit what one process computes, and not what each would by itself."""
    step, gate = Step.make(), CORRECTED[name]
    ones = {each: step.run(gate, each, rollout_logp=sampled(step)).grad for each in ("reference", *native_backends)}
    for ranks in LAYOUTS:
        matters = dict.fromkeys(native_backends, False)
        for rank, each in enumerate(found(ranks)):
            part, tokens = part_of(step, ranks, "cut", rank)
            mine, exact = each["corrections"][name, "reference"], ones["reference"][tokens]
            torch.testing.assert_close(mine, exact, rtol=1e-12, atol=1e-12)
            for backend in native_backends:
                one = ones[backend][tokens]
                assert torch.equal(each["corrections"][name, backend], one), backend
                if tried(backend, True, False):
                    matters[backend] |= not torch.equal(part.run(gate, backend, rollout_logp=sampled(part)).grad, one)
        assert all(found_so or not tried(backend, True, False) for backend, found_so in matters.items()), matters


@pytest.mark.parametrize(("ranks", "layout", "name"), OBSERVED, ids=[f"{n} {on} {of}" for n, on, of in OBSERVED])
def test_metrics_of_levels(ranks, layout, name, found, native_backends):
    """Metrics of all ranks are those of one process, the same bits on each; a segment that ranks share counts once."""
    step = Step.make()
    for backend in ("reference", *backends_of(name, layout, native_backends)):
        one = step.run(GATE_OF[name], backend, report=("levels",)).levels.table
        tables, same = zip(*(each["levels", (ranks, layout, name), backend] for each in found(ranks)), strict=True)
        assert all(same), backend
        assert all(torch.equal(table, tables[0]) for table in tables), backend
        torch.testing.assert_close(tables[0], one, rtol=1e-12, atol=1e-12)


# --------------------------------------------------------------------------------------------------------------- errors


def test_errors():
    step = Step.make()
    bare = hpo.PackedBatch.from_lengths(LENGTHS, group_ids=step.batch.group_ids)

    def refused(message, gate, batch=step.batch):
        with pytest.raises(ValueError, match=f"^process_group: {message}"):
            step.run(gate, "cpu", batch=batch, process_group=torch.distributed.ProcessGroup(0, 1))

    refused("no level and no correction of the gate 'ppo_clip' spans ranks; drop it", gates.ppo_clip())
    nameless = hpo.PackedBatch.from_lengths(LENGTHS, steps=step.batch.steps)
    refused("no level and no correction of the gate 'step_gspo' spans ranks", gates.step_gspo(), batch=nameless)
    refused(
        "no level of the gate 'gspo' has ids, and without them a trajectory lies on one rank; pass "
        "trajectory_ids= to PackedBatch, or drop it",
        gates.gspo(), batch=bare,
    )  # fmt: skip
    refused(
        "the level 'trajectory' of the gate 'balanced' counts segments, and no process knows which of them others hold",
        HIERARCHIES["balanced, 4 levels, through, split"],
    )


TORN = {
    "trajectory 7": ((TRAJECTORY, GROUP), {"trajectory_ids": [7, 7], "group_ids": [3, 4]}),
    "trajectory 7 in none": ((TRAJECTORY, GROUP), {"trajectory_ids": [7, 7], "group_ids": [3, -1]}),
    "group 3": ((GROUP, DOMAIN), {"group_ids": [3, 3], "domain_ids": [0, 1]}),
    "step 5": ((STEP, TRAJECTORY), {"trajectory_ids": [7, 8], "step_ids": [5, 5]}),
}


def on_torn_ids(rank, units, ids):
    told = {name: torch.tensor(values[rank : rank + 1]) for name, values in ids.items()}
    steps = torch.tensor([[0, 2]]) if "step_ids" in ids else None
    batch = hpo.PackedBatch.from_lengths([2], steps=steps, **told)
    gate = RatioGate("torn", Identity(), levels(*((Tanh(0.02), unit) for unit in units)))
    try:
        hpo.policy_loss(
            torch.full((2,), -0.9), torch.full((2,), -1.0), torch.ones(1), batch, gate, weights=torch.ones(1),
            process_group=dist.group.WORLD,
        )  # fmt: skip
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("name", TORN)
def test_ids_that_nest_on_each_rank_alone_are_refused_on_all(name):
    units, ids = TORN[name]
    one, other = on_ranks(2, on_torn_ids, units, ids)
    assert one == other and f"for all of {name.removesuffix(' in none')} on all ranks, got " in one
    whole = {key: [values[0]] * 2 for key, values in ids.items()}
    assert on_ranks(2, on_torn_ids, units, whole) == [None, None]


def on_empty_steps(rank):
    """Step 6 of rank 0 is empty, and lies in no trajectory: it has no token of the trajectory that rank 1 tells."""
    steps, ids = ([[0, 2], [2, 2]], [5, 6]) if rank == 0 else ([[0, 2]], [6])
    batch = hpo.PackedBatch.from_lengths(
        [2], steps=torch.tensor(steps), step_ids=torch.tensor(ids), trajectory_ids=torch.tensor([7 + rank])
    )
    gate = RatioGate("steps", Identity(), levels((Tanh(0.02), STEP), (Tanh(0.02), TRAJECTORY)))
    leaf, old = torch.full((2,), -0.9, requires_grad=True), torch.full((2,), -1.0)
    for group in (None, dist.group.WORLD):
        hpo.policy_loss(
            leaf, old, torch.ones(1), batch, gate, weights=torch.ones(1), process_group=group
        ).loss.backward()
    return leaf.grad


def test_ids_of_steps_without_tokens_name_no_segment():
    for grad in on_ranks(2, on_empty_steps):
        assert grad.any() and grad.isfinite().all()
