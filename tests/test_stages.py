"""A call in stages: what segments add up stands between them in tables that the caller may change."""

import dataclasses
import functools
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from breadth import at_length, number  # noqa: F401 (the first is a fixture)
from catalogue import Example, bits
from cover import COVER
from devices import garbage_in_new_memory
from hierarchies import GATES, exact_off_branches, raw

import hpo_core as hpo
from hpo_core import gates
from hpo_core.gates import Aggregate, Head, Identity, Level, RatioGate, Rollback, Routing

STAGED = {
    **GATES,
    "pre-gated": gates.gmpo(0.1, 0.1),
    "gspo, with a head": dataclasses.replace(gates.gspo(0.1, 0.2), head=Head.LOG, head_numbers=(0.7, 1.3)),
    "flat": RatioGate("flat", Identity(), head=Head.LOG, head_numbers=(0.7, 1.3)),
}


def aggregates_of(gate):
    return {level.aggregate for level in gate.levels}


# The gates whose sums are log-ratios, as those of a censored head and under a pre-gate are not.
PLAIN = {name: gate for name, gate in STAGED.items() if gate.head is not Head.CENSORED and name != "pre-gated"}
SUMMED = {name: gate for name, gate in PLAIN.items() if aggregates_of(gate) <= {Aggregate.MEAN, Aggregate.SUM}}
THROUGH = {name: gate for name, gate in STAGED.items() if any(x.routing is Routing.THROUGH for x in gate.levels)}
for name in [name for name, gate in THROUGH.items() if gate.head is Head.SCORE]:  # whose ratio carries no gradient
    THROUGH.pop(name)


@pytest.fixture(autouse=True)
def _workspaces_and_tables_come_with_garbage():
    with garbage_in_new_memory():
        yield


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

    def aggregate_grad(self, table):
        self._see("aggregate_grad", table)


def assert_same(got, expected, backend):
    for mine, theirs in zip(got, expected, strict=True):
        assert (mine is None) == (theirs is None), backend
        assert mine is None or bits(mine) == bits(theirs), backend


class Nobody:
    """The inputs of a process without tokens."""

    def __init__(self, rows):
        ids = {f"{name}_ids": torch.arange(rows) for name in ("trajectory", "group", "domain")}
        self.batch = hpo.PackedBatch.from_lengths([0] * rows, steps=torch.zeros(0, 2, dtype=torch.int64), **ids)
        self.logp = self.old_logp = torch.zeros(0)
        self.advantages = self.weights = torch.zeros(rows)


# Lengths of rows, whether trajectories have several of them, and whether a gradient is wanted.
MANY = [*itertools.product([(5, 0, 9, 1, 7, 12, 3), (600, 2, 4500)], (True, False), (True, False))]
NONE = [(0, True, True), (1, True, True), (1, True, False)]  # that many rows of a process without tokens
EMULATED = [*MANY[:4], ((600, 2, 1100), True, True), ((600, 2, 1100), False, True), *NONE]
INTERPRETED = [((5, 0, 9, 1, 7), True, True)]
ALSO_INTERPRETED = [((5, 2), False, False), ((140, 2, 40), True, True), *NONE]  # for a few gates
FEW = ("fiberpo", "mixed routing", "four levels, through, split", "score")


def examples_of(name, backend):
    interpreted = INTERPRETED + ALSO_INTERPRETED * (name in FEW)
    everything = MANY + NONE if backend != "triton" else MANY[:4] + interpreted
    return number(backend, at_length=everything, machine_code=MANY + NONE, emulated=EMULATED, interpreted=interpreted)


@functools.cache
def example_of(rows, several):
    return Nobody(rows) if isinstance(rows, int) else Example(3, rows, 0.3, several=several)


BY_PARTS = [  # a gate of GATES whose parts the others have is tried at length
    pytest.param(name, marks=[pytest.mark.long] if name in GATES and f"hierarchy: {name}" not in COVER else [])
    for name in STAGED
]


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("name", BY_PARTS)
def test_in_stages_is_the_whole(name, native_backends):
    """The bits agree for leaves that stand alone and for long ones; a process without tokens asks the same."""
    gate = STAGED[name]
    for backend in native_backends:
        for rows, several, want_grad in examples_of(name, backend):
            example, exchange = example_of(rows, several), Watched()
            staged = raw(example, gate, backend, exchange, want_grad)
            assert_same(staged, raw(example, gate, backend, want_grad=want_grad), backend)
            asked = [("sums", 3), ("largest", 2), ("aggregate_grad", 2)][: 3 if want_grad and name in THROUGH else 1]
            depth, leaves = len(gate.levels), exchange.seen["sums"].shape[1]
            assert [(table, *seen.shape) for table, seen in exchange.seen.items()] == [
                (table, depth, leaves, n) for table, n in asked
            ], backend
            # others would add what memory held
            assert example.logp.numel() or not any(table.any() for table in exchange.seen.values()), backend


@pytest.mark.parametrize("name", SUMMED)
def test_what_segments_have_added_up(name, native_backends):
    gate, example = SUMMED[name], Example(2, spread=0.3)
    covered = example.covered(gate)
    x = (example.logp - example.old_logp)[covered].double()
    fixed = (x * 2.0**32).round().long()
    expected = []
    for level in gate.levels:
        segment = example.segment(level.unit)[covered]
        numbers, place = segment.unique(return_inverse=True)
        valid = torch.zeros(len(numbers), dtype=torch.int64).index_add(0, place, torch.ones_like(segment))
        positive = torch.zeros_like(valid).index_add(0, place, fixed.clamp(min=0) if gate.split else fixed)
        negative = torch.zeros_like(valid).index_add(0, place, (-fixed).clamp(min=0) if gate.split else 0 * fixed)
        expected.append(sorted(torch.stack([valid, positive, negative], 1).tolist()))
    for backend in native_backends:
        exchange = Watched()
        raw(example, gate, backend, exchange)
        for k, level in enumerate(gate.levels):
            sums = exchange.seen["sums"][k]
            empty = sums[:, 0] == 0
            assert sorted(sums[~empty].tolist()) == expected[k], backend
            assert not sums[empty].any(), backend
            if name in THROUGH:
                largest, aggregate_grad = exchange.seen["largest"][k], exchange.seen["aggregate_grad"][k]
                assert level.routing is Routing.THROUGH or (not largest.any() and not aggregate_grad.any()), backend
                assert not largest[empty].any(), backend


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

    aggregate_grad = sums

    def largest(self, table):
        self._reduce(table, lambda tables: tables.amax(0))


# They do not know the segments that a balanced one shares with others.
JOINED = {
    name: gate for name, gate in THROUGH.items() if name in PLAIN and Aggregate.BALANCED not in aggregates_of(gate)
}


@pytest.mark.parametrize("name", JOINED)
def test_processes_that_share_their_segments_get_the_gradient_of_one(name, native_backends):
    """Each knows tokens that the others mask; together they have every bit of a single process. (The two terms of a
    censored gradient, of which nothing may be left, would have it only if nothing was rounded on the way.)"""
    gate, processes = JOINED[name], 2
    for backend in native_backends:
        if backend == "triton":  # its interpreter is not made for threads; test_segment_exchange.py has processes
            continue
        moved = False
        for seed in range(3):
            example = Example(seed, spread=0.3)
            owner = torch.randint(0, processes, (len(example.lengths),), generator=torch.Generator().manual_seed(seed))
            masks = [example.mask & (owner[example.row()] == rank) for rank in range(processes)]
            tables, barrier = [None] * processes, threading.Barrier(processes, timeout=60)
            with ThreadPoolExecutor(processes) as pool:
                waiting = [
                    pool.submit(raw, example, gate, backend, Joined(tables, rank, barrier), mask=masks[rank])
                    for rank in range(processes)
                ]
                parts = [part.result() for part in waiting]
            whole = raw(example, gate, backend)
            loss, grad, token_loss = (sum(part[at] for part in parts) for at in (0, 2, 3))
            moved |= bool(grad.any())
            assert torch.equal(grad, whole[2]) and torch.equal(token_loss, whole[3]), backend
            assert torch.allclose(loss, whole[0], rtol=1e-5, atol=1e-6), backend
        assert moved, backend


class Doubled(Watched):
    """An exchange as if a second process had the same."""

    def sums(self, table):
        table *= 2

    aggregate_grad = sums


def fixed_slope(level):
    """A rollback that does not read the number of tokens."""
    known = isinstance(level.gate, Rollback) and level.gate.slope is None
    return Level(Rollback(level.gate.budgets, 2.0), level.routing, level.unit) if known else level


@pytest.mark.parametrize("name", ["fiberpo", "four levels, through, split"])
def test_what_an_exchange_adds_counts(name, native_backends):
    """Twice the same tokens keep every mean, and double the gradient in the aggregate and its divisor."""
    gate, example = GATES[name], Example(3, spread=0.3)
    gate = RatioGate("fixed", gate.token, tuple(fixed_slope(level) for level in gate.levels), split=gate.split)
    assert exact_off_branches(example, gate) is not None
    for backend in native_backends:
        assert_same(raw(example, gate, backend, Doubled()), raw(example, gate, backend), backend)
