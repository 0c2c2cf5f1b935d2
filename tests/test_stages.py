"""A call in stages: what segments add up stands between them in tables that the caller may change."""

import itertools
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import NATIVE
from test_hierarchy import GATES, Example, clear_of_branches

import hpo_core as hpo
from hpo_core import gates
from hpo_core.gates import Aggregate, Head, Identity, Level, RatioGate, Rollback, Routing

STAGED = {
    **GATES,
    "pre-gated": gates.gmpo(0.1, 0.1),
    "flat": RatioGate("flat", Identity(), head=Head.LOG, head_numbers=(0.7, 1.3)),
}
every_gate = pytest.mark.parametrize("gate", STAGED.values(), ids=STAGED)


def aggregates_of(gate):
    return {level.aggregate for level in gate.levels}


# Of a censored head and under a pre-gate they are no log-ratios.
PLAIN = {name: gate for name, gate in STAGED.items() if gate.head is not Head.CENSORED and name != "pre-gated"}
SUMMED = {name: gate for name, gate in PLAIN.items() if aggregates_of(gate) <= {Aggregate.MEAN, Aggregate.SUM}}
THROUGH = {name: gate for name, gate in STAGED.items() if any(x.routing is Routing.THROUGH for x in gate.levels)}
for name in [name for name, gate in THROUGH.items() if gate.head is Head.SCORE]:  # whose ratio carries no gradient
    THROUGH.pop(name)


@pytest.fixture(autouse=True)
def _workspaces_and_tables_come_with_garbage():
    torch.use_deterministic_algorithms(True)  # fills what torch.empty gives
    yield
    torch.use_deterministic_algorithms(False)


def run(example, gate, backend, exchange=None, mask=None, want_grad=True):
    """Loss, metrics, gradient and the loss of every token, by the op itself."""
    inputs, spec, _, _ = sys.modules["hpo_core.losses"]._prepare(
        example.logp, example.old_logp, example.advantages, example.batch, gate, example.weights, *[None] * 12, "row",
        None, None, False, False, backend,
    )  # fmt: skip
    inputs = inputs if mask is None else inputs._replace(mask=mask)
    op = sys.modules["hpo_core.backends"].resolve("gates", inputs.logp, backend)
    return op.policy_loss(inputs, spec, want_grad, True, exchange)


class Watched:
    """Changes nothing and keeps what it saw."""

    def __init__(self):
        self.seen = {}

    def _see(self, name, table):
        assert table.dtype == torch.int64
        self.seen[name] = table.clone()

    def sums(self, table):
        self._see("sums", table)

    def largest(self, table):
        self._see("largest", table)

    def arriving(self, table):
        self._see("arriving", table)


def assert_same(got, expected):
    for mine, theirs in zip(got, expected, strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or mine.numpy().tobytes() == theirs.numpy().tobytes()


class Nobody:
    """What a process has that has no token."""

    def __init__(self, rows):
        ids = {f"{name}_ids": torch.arange(rows) for name in ("trajectory", "group", "domain")}
        self.batch = hpo.PackedBatch.from_lengths([0] * rows, steps=torch.zeros(0, 2, dtype=torch.int64), **ids)
        self.logp = self.old_logp = torch.zeros(0)
        self.advantages = self.weights = torch.zeros(rows)


LENGTHS = [(5, 0, 9, 1, 7, 12, 3), (600, 2, 4500)]
FEW = [((5, 0, 9, 1, 7), True, True), ((5, 2), False, False)]  # interpreted Triton is slow
ALSO_LONG = ("fiberpo", "mixed routing", "four levels, through, split", "score")


@every_gate
def test_in_stages_is_the_whole(gate, backend):
    """To the bit, for pieces that stand alone and for long ones; a process without tokens asks the same."""
    several = [*itertools.product(LENGTHS, (True, False), (True, False))]
    if backend == "triton":
        several = FEW + [((700, 2, 40), True, True)] * (gate in [STAGED[name] for name in ALSO_LONG])
    examples = [(Example(3, lengths, 0.3, several=more), want_grad) for lengths, more, want_grad in several]
    for example, want_grad in [*examples, (Nobody(0), True), (Nobody(1), True), (Nobody(1), False)]:
        exchange = Watched()
        staged = run(example, gate, backend, exchange, want_grad=want_grad)
        assert_same(staged, run(example, gate, backend, want_grad=want_grad))
        asked = [("sums", 3), ("largest", 2), ("arriving", 2)][: 3 if want_grad and gate in THROUGH.values() else 1]
        depth, pieces = len(gate.levels), exchange.seen["sums"].shape[1]
        assert [(name, *table.shape) for name, table in exchange.seen.items()] == [
            (name, depth, pieces, n) for name, n in asked
        ]
        # others would add what memory held
        assert example.logp.numel() or not any(table.any() for table in exchange.seen.values())


@pytest.mark.parametrize("gate", SUMMED.values(), ids=SUMMED)
def test_what_segments_have_added_up(gate, backend):
    example, exchange = Example(2, spread=0.3), Watched()
    run(example, gate, backend, exchange)
    seen = exchange.seen
    covered = example.covered(gate)
    x = (example.logp - example.old_logp)[covered].double()
    fixed = (x * 2.0**32).round().long()
    for k, level in enumerate(gate.levels):
        segment = example.segment(level.unit)[covered]
        sums = seen["sums"][k]
        numbers, place = segment.unique(return_inverse=True)
        valid = torch.zeros(len(numbers), dtype=torch.int64).index_add(0, place, torch.ones_like(segment))
        positive = torch.zeros_like(valid).index_add(0, place, fixed.clamp(min=0) if gate.split else fixed)
        negative = torch.zeros_like(valid).index_add(0, place, (-fixed).clamp(min=0) if gate.split else 0 * fixed)
        expected = torch.stack([valid, positive, negative], 1)
        assert sorted(sums[sums[:, 0] > 0].tolist()) == sorted(expected.tolist())
        assert not sums[sums[:, 0] == 0].any()
        if gate in THROUGH.values():
            largest, arriving = seen["largest"][k], seen["arriving"][k]
            assert level.routing is Routing.THROUGH or (not largest.any() and not arriving.any())
            assert not largest[sums[:, 0] == 0].any()


class Joined:
    """One of several processes, here threads."""

    def __init__(self, tables, rank, barrier):
        self.tables, self.rank, self.barrier = tables, rank, barrier

    def _reduce(self, table, reduction):
        self.tables[self.rank] = table
        self.barrier.wait()
        total = reduction(torch.stack(self.tables))
        self.barrier.wait()
        table.copy_(total)

    def sums(self, table):
        self._reduce(table, lambda tables: tables.sum(0))

    def largest(self, table):
        self._reduce(table, lambda tables: tables.amax(0))

    def arriving(self, table):
        self._reduce(table, lambda tables: tables.sum(0))


# Which segments a balanced one has with others, they do not know.
JOINED = {
    name: gate for name, gate in THROUGH.items() if name in PLAIN and Aggregate.BALANCED not in aggregates_of(gate)
}


# Triton's interpreter is not made for threads; test_spanning.py has processes.
THREADED = [(name, where) for name in JOINED for where in NATIVE if where != "triton"]


@pytest.mark.parametrize(("name", "where"), THREADED, ids=[f"{where}-{name}" for name, where in THREADED])
def test_processes_that_share_their_segments_get_the_gradient_of_one(name, where):
    """Each knows tokens that the others mask; together they have every bit of a single process. (The two terms of a
    censored gradient, of which nothing may be left, would have it only if nothing was rounded on the way.)"""
    gate, backend, processes, moved = JOINED[name], where, 2, False
    for seed in range(3):
        example = Example(seed, spread=0.3)
        owner = torch.randint(0, processes, (len(example.lengths),), generator=torch.Generator().manual_seed(seed))
        masks = [example.mask & (owner[example.row()] == rank) for rank in range(processes)]
        tables, barrier = [None] * processes, threading.Barrier(processes, timeout=60)
        with ThreadPoolExecutor(processes) as pool:
            waiting = [
                pool.submit(run, example, gate, backend, Joined(tables, rank, barrier), masks[rank])
                for rank in range(processes)
            ]
            parts = [part.result() for part in waiting]
        whole = run(example, gate, backend)
        loss, grad, token_loss = (sum(part[at] for part in parts) for at in (0, 2, 3))
        moved |= bool(grad.any())
        assert torch.equal(grad, whole[2]) and torch.equal(token_loss, whole[3])
        torch.testing.assert_close(loss, whole[0], rtol=1e-5, atol=1e-6)
    assert moved


class Doubled(Watched):
    """As if a second process had the same."""

    def sums(self, table):
        table *= 2

    def arriving(self, table):
        table *= 2


def fixed_slope(level):
    """A rollback that does not read the number of tokens."""
    known = isinstance(level.gate, Rollback) and level.gate.slope is None
    return Level(Rollback(level.gate.budgets, 2.0), level.routing, level.unit) if known else level


@pytest.mark.parametrize("name", ["fiberpo", "four levels, through, split"])
def test_what_an_exchange_adds_counts(name, backend):
    """Twice the same tokens leave every mean where it is, and double what each hands up and its divisor."""
    gate, example = GATES[name], Example(3, spread=0.3)
    gate = RatioGate("fixed", gate.token, tuple(fixed_slope(level) for level in gate.levels), split=gate.split)
    assert clear_of_branches(example, gate)
    assert_same(run(example, gate, backend, Doubled()), run(example, gate, backend))
