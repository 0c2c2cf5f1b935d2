"""Segments that lie on several ranks: what many processes compute is what one does."""

import datetime
import functools
import os
import subprocess
import sys
from typing import NamedTuple

os.environ.setdefault("TRITON_INTERPRET", "1")  # this file is a program, too, which no conftest.py serves

import pytest
import torch
import torch.distributed as dist
from test_hierarchy import DOMAIN, FOUR, GROUP, SMALL, STEP, aggregated, levels
from test_hierarchy import GATES as HIERARCHIES

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
    Unit,
)

TRAJECTORY = Unit.TRAJECTORY
NATIVE = [name for name, available in hpo.backends().items() if available and name != "reference"]
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
    "mean and minimum": gates.mis(0.985, 1.01, reduction=Reduction.MEAN, veto=0.89),
    "sum": gates.tis(1.1, TRAJECTORY),
    "steps": gates.compose(gates.ppo_clip(), Correction(Action.MASK, (-0.012, -0.01), (0.01, 0.008), unit=STEP)),
    "maximum": gates.compose(
        gates.ppo_clip(), Correction(Action.MASK, high=(0.06, 0.055), unit=GROUP, reduction=Reduction.MAX)
    ),
}


def stopped_group(aggregate=Aggregate.MEAN, split=False):
    own = aggregate if aggregate is Aggregate.LOG_MEAN_EXP else Aggregate.MEAN  # all levels have it or none
    trajectory, group = Level(Tanh(0.05), aggregate=own), Level(Tanh(0.03), Routing.STOPPED, GROUP, aggregate)
    return RatioGate("stopped", LogClip((-0.1, -0.1), (0.15, 0.15)), (trajectory, group), split=split)


# --------------------------------------------------------------------------------------------------------- one step

LENGTHS = (5, 0, 9, 1, 7, 12, 3, 6)
TRAJECTORIES = (3, 3, -2, 5, 5, 4, 9, 9)  # rows of a trajectory may lie apart, and any integer names one
GROUPS = (1, 1, 1, 4, 4, -1, -1, -1)  # a trajectory in no group is a group by itself, also that with the id 4
DOMAINS = (0, 0, 0, 7, 7, 0, 0, 0)


class Step(NamedTuple):
    """One optimiser step, the same in every process."""

    logp: torch.Tensor
    old_logp: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    batch: hpo.PackedBatch

    @staticmethod
    def make(seed=0):
        draw = torch.Generator().manual_seed(seed)
        tokens, rows = sum(LENGTHS), len(LENGTHS)
        old_logp = -torch.rand(tokens, generator=draw) * 3 - 0.1
        logp = old_logp + 0.1 * torch.randn(tokens, generator=draw)
        mask = torch.rand(tokens, generator=draw) < 0.85
        advantages, weights = torch.randn(rows, generator=draw), torch.rand(rows, generator=draw) + 0.1
        ends = torch.tensor(LENGTHS).cumsum(0).tolist()
        steps, step_ids = [], []
        for end, length, trajectory in zip(ends, LENGTHS, TRAJECTORIES, strict=True):
            for at in range(end - length, end, 4):  # with gaps
                steps.append((at, min(at + 3, end)))
                # Two ranges to some steps, with one between them, and in rows one after the other.
                own, shared = 10**6 + len(steps), 100 * (trajectory + 5) + (at - end + length) // 9
                step_ids.append(own if at - end + length == 4 else shared)
        ids = {"trajectory_ids": TRAJECTORIES, "group_ids": GROUPS, "domain_ids": DOMAINS}
        batch = hpo.PackedBatch.from_lengths(
            LENGTHS, mask=mask, steps=torch.tensor(steps), step_ids=torch.tensor(step_ids),
            **{name: torch.tensor(each) for name, each in ids.items()},
        )  # fmt: skip
        return Step(logp, old_logp, advantages, weights, batch)

    def whole_rows(self, rows):
        """These rows, and the tokens they take."""
        batch, tokens = self.batch.select(rows)
        part = Step(self.logp[tokens], self.old_logp[tokens], self.advantages[rows], self.weights[rows], batch)
        return part, tokens

    def cut(self, start, stop):
        """From every row what lies between these fractions of it, as sequence parallelism cuts them."""
        begin, length = self.batch.cu_seqlens[:-1], self.batch.cu_seqlens.diff()
        first, last = begin + (length * start).long(), begin + (length * stop).long()
        parts = list(zip(first.tolist(), last.tolist(), strict=True))
        tokens = torch.cat([torch.arange(*each) for each in parts])
        place = {token: at for at, token in enumerate(tokens.tolist())}
        steps, step_ids = [], []
        for (start_of, stop_of), name in zip(self.batch.steps.tolist(), self.batch.step_ids.tolist(), strict=True):
            kept = [place[token] for token in range(start_of, stop_of) if token in place]
            if kept:
                steps.append((kept[0], kept[-1] + 1))
                step_ids.append(name)
        batch = hpo.PackedBatch.from_lengths(
            last - first, mask=self.batch.mask[tokens], trajectory_ids=self.batch.trajectory_ids,
            group_ids=self.batch.group_ids, domain_ids=self.batch.domain_ids,
            steps=torch.tensor(steps, dtype=torch.int64).reshape(-1, 2),
            step_ids=torch.tensor(step_ids, dtype=torch.int64),
        )  # fmt: skip
        return Step(self.logp[tokens], self.old_logp[tokens], self.advantages, self.weights, batch), tokens

    def run(self, gate, backend, **keywords):
        reals = {name: getattr(self, name) for name in ("logp", "old_logp", "advantages", "weights")}
        if backend == "reference":
            reals = {name: values.double() for name, values in reals.items()}
        arguments = {"batch": self.batch, "advantage_level": "row", **reals, **keywords}
        return hpo.policy_loss_and_grad(gate=gate, backend=backend, **arguments)


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


CASES = [
    (ranks, layout, name)
    for ranks, layouts in LAYOUTS.items()
    for layout in layouts
    for name in (*GATES, *STEPS)
    if ranks == 2 or name in ("fiberpo_domain", "mixed", "four levels")
]
GATE_OF = {**GATES, **STEPS}
# Of the metrics of levels: what ranks share in rows, in parts of them, and not at all.
OBSERVED = [
    (2, "rows", "four levels"),
    (2, "cut", "mixed"),
    (2, "cut", "gspo"),
    (2, "cut", "four levels"),
    (2, "no rows on one", "fiberpo_domain"),
    (4, "rows", "four levels"),
    (4, "cut", "fiberpo_domain"),
]


def backends_of(name):
    """Interpreted, Triton takes a second for each call of each rank."""
    return [each for each in NATIVE if each != "triton" or name in ("fiberpo", "mixed", "four levels")]


# --------------------------------------------------------------------------------------------- what one rank does


def compute(rank, ranks):
    step, world, found = Step.make(), dist.group.WORLD, {}
    for case in CASES:
        if case[0] == ranks:
            part, tokens = part_of(step, *case[:2], rank)
            for backend in ("reference", *backends_of(case[2])):
                out = part.run(GATE_OF[case[2]], backend, process_group=world)
                found[case, backend] = tokens, out.loss, out.grad, out.metrics.vector
    part, _ = part_of(step, ranks, "cut", rank)
    for backend in NATIVE:
        on_policy = part.run(GATES["fiberpo_domain"], backend, old_logp=part.logp, process_group=world)
        given = {"group": torch.tensor([0.5, 0.02, -0.1])}
        both = part.run(stopped_group(), backend, process_group=world, aggregates=given)
        found["on-policy", backend], found["given", backend] = on_policy.grad, both.grad
    found["autograd"] = {backend: by_autograd(part, backend) for backend in ("reference", "cpu")}
    found["single call"] = single_call(step, rank, ranks)
    found["collectives"] = collectives(step, rank, ranks)
    found["corrections"] = corrections(step, rank, ranks)
    for case in OBSERVED:
        if case[0] == ranks:
            for backend in ("reference", *NATIVE):
                out, bits = observed(step, case, rank, backend)
                found["levels", case, backend] = out, bits
    return found


def observed(step, case, rank, backend):
    """The metrics of levels of all ranks, and whether asking for them left loss and gradient as they were."""
    part, _ = part_of(step, *case[:2], rank)
    asked, plain = (
        part.run(GATE_OF[case[2]], backend, process_group=dist.group.WORLD, level_metrics=level_metrics)
        for level_metrics in (True, False)
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
    """How many there are in a first call, in a second, and where nothing flows."""
    counts, originals = [], (dist.all_reduce, dist.all_gather)

    def counted(function, *arguments, **keywords):
        counts[-1] += 1
        return function(*arguments, **keywords)

    dist.all_reduce, dist.all_gather = (functools.partial(counted, each) for each in originals)
    try:
        part, _ = part_of(step, ranks, "cut", rank)
        for gate in (TANH, TANH, stopped_group(), GATES["score"], GATES["score"]):
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


def corrections(step, rank, ranks):
    """The gradients under corrections of trajectories and groups that are cut."""
    part, _ = part_of(step, ranks, "cut", rank)
    return {
        (name, backend): part.run(gate, backend, rollout_logp=sampled(part), process_group=dist.group.WORLD).grad
        for name, gate in CORRECTED.items()
        for backend in ("reference", *NATIVE)
    }


def run(rank, ranks, folder):
    torch.set_num_threads(1)
    patience = datetime.timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=patience)
    torch.save(compute(rank, ranks), f"{folder}/{rank}")
    dist.destroy_process_group()


# --------------------------------------------------------------------------------------------------- ranks against one


@functools.cache  # a failure, too
def found_by(ranks, folder):
    """What each rank found, or what they died of: this file, run as a program, that many times."""
    programs = [
        subprocess.Popen([sys.executable, __file__, str(rank), str(ranks), folder], stderr=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    try:
        errors = [program.communicate(timeout=300)[1] for program in programs]
    except subprocess.TimeoutExpired as error:
        return str(error)
    finally:
        for program in programs:
            program.kill()
    if any(program.returncode for program in programs):
        return "\n".join(errors)
    return [torch.load(f"{folder}/{rank}", weights_only=True) for rank in range(ranks)]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each of some ranks found."""
    folders = {ranks: str(tmp_path_factory.mktemp(f"ranks{ranks}")) for ranks in LAYOUTS}

    def of(ranks):
        results = found_by(ranks, folders[ranks])
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


every_case = pytest.mark.parametrize(("ranks", "layout", "name"), CASES, ids=[f"{n} {on} {of}" for n, on, of in CASES])


@every_case
def test_the_definition_of_many_ranks_is_that_of_one(ranks, layout, name, found):
    step = Step.make()
    results = [each[(ranks, layout, name), "reference"] for each in found(ranks)]
    loss, grad, metrics = gathered(results, step)
    one = step.run(GATE_OF[name], "reference")
    torch.testing.assert_close(loss, one.loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad, one.grad, rtol=1e-12, atol=1e-12)
    if not cuts(ranks, layout):
        torch.testing.assert_close(metrics.vector, one.metrics.vector, rtol=1e-12, atol=1e-12)


@every_case
def test_many_ranks_compute_what_one_does(ranks, layout, name, found):
    """Within the budget; where rows stay together to the bit, wherever they lie."""
    step, gate = Step.make(), GATE_OF[name]
    exact = step.run(gate, "reference")
    largest = max(exact.grad.abs().max(), (step.weights * step.advantages.abs()).max())
    terms = (step.weights * step.advantages.abs() * step.batch.row_counts).sum()
    together = layout == "no tokens on one" or not cuts(ranks, layout)
    for backend in backends_of(name):
        loss, grad, _ = gathered([each[(ranks, layout, name), backend] for each in found(ranks)], step)
        assert (grad.double() - exact.grad).abs().max() <= 1e-5 * largest, backend
        assert (loss.double() - exact.loss).abs() <= 1e-5 * terms, backend
        if together and gate.level is None:  # else one process takes a way that ranks do not
            assert torch.equal(grad, step.run(gate, backend).grad), backend


@pytest.mark.parametrize("name", GATE_OF)
def test_the_step_keeps_off_the_branches(name):
    step = Step.make()
    runs = [step.run(GATE_OF[name], "reference", logp=step.logp.double() + shift).grad for shift in (0.0, 2e-6, -2e-6)]
    assert all((run - runs[0]).abs().max() < 1e-3 * runs[0].abs().max() for run in runs)


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_without_saturation_the_gradient_is_minus_w_a(ranks, found, backend):
    step = Step.make()
    for rank, each in enumerate(found(ranks)):
        part, _ = part_of(step, ranks, "cut", rank)
        row = torch.repeat_interleave(part.batch.cu_seqlens.diff())
        expected = torch.where(part.batch.mask, -(step.weights * step.advantages)[row], 0.0)
        assert torch.equal(each["on-policy", backend], expected)


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_aggregates_over_ranks(ranks, found, backend):
    step = Step.make()
    one = step.run(stopped_group(), backend, aggregates={"group": torch.tensor([0.5, 0.02, -0.1])}).grad
    for rank, each in enumerate(found(ranks)):
        _, tokens = part_of(step, ranks, "cut", rank)
        torch.testing.assert_close(each["given", backend], one[tokens], rtol=1e-5, atol=1e-6)


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
        assert each["collectives"] == [5, 3, 3, 3, 1, 1]


@pytest.mark.parametrize("name", CORRECTED)
@pytest.mark.parametrize("ranks", LAYOUTS)
def test_corrections_over_cut_segments(ranks, name, found, backend):
    """Integers have no order: to the bit what one process computes, and not what each would by itself."""
    step, gate, matters = Step.make(), CORRECTED[name], False
    one, exact = (step.run(gate, each, rollout_logp=sampled(step)).grad for each in (backend, "reference"))
    for rank, each in enumerate(found(ranks)):
        part, tokens = part_of(step, ranks, "cut", rank)
        assert torch.equal(each["corrections"][name, backend], one[tokens])
        torch.testing.assert_close(each["corrections"][name, "reference"], exact[tokens], rtol=1e-12, atol=1e-12)
        alone = part.run(gate, backend, rollout_logp=sampled(part)).grad
        matters |= not torch.equal(alone, one[tokens])
    assert matters


@pytest.mark.parametrize(("ranks", "layout", "name"), OBSERVED, ids=[f"{n} {on} {of}" for n, on, of in OBSERVED])
def test_metrics_of_levels(ranks, layout, name, found):
    """Those of all ranks are those of one process, on every rank to the bit; a segment that ranks share counts once."""
    step = Step.make()
    for backend in ("reference", *NATIVE):
        one = step.run(GATE_OF[name], backend, level_metrics=True).levels.table
        tables, same = zip(*(each["levels", (ranks, layout, name), backend] for each in found(ranks)), strict=True)
        assert all(same)
        assert all(torch.equal(table, tables[0]) for table in tables)
        torch.testing.assert_close(tables[0], one, rtol=1e-12, atol=1e-12)


# --------------------------------------------------------------------------------------------------------------- errors


def test_errors():
    step = Step.make()
    bare = hpo.PackedBatch.from_lengths(LENGTHS, group_ids=step.batch.group_ids)

    def refused(message, gate, error=ValueError, batch=step.batch):
        with pytest.raises(error, match=f"^process_group: {message}"):
            step.run(gate, "cpu", batch=batch, process_group=object())

    refused("no level and no correction of the gate 'ppo_clip' spans ranks; drop it", gates.ppo_clip())
    nameless = hpo.PackedBatch.from_lengths(LENGTHS, steps=step.batch.steps)
    refused("no level and no correction of the gate 'step_gspo' spans ranks", gates.step_gspo(), batch=nameless)
    refused(
        "no level of the gate 'gspo' has ids, and without them a trajectory lies on one rank; pass "
        "trajectory_ids= to PackedBatch, or drop it",
        gates.gspo(), batch=bare,
    )  # fmt: skip
    refused(r"expected a torch\.distributed\.ProcessGroup", gates.gspo(), TypeError)
    refused(
        "the level 'trajectory' of the gate 'balanced' counts segments, and which of them lie elsewhere, too",
        HIERARCHIES["balanced, 4 levels, through, split"],
    )


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
