"""A call in stages: what segments add up stands between them in tables that the caller may change."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from test_hierarchy import GATES, Example

from hpo_core.gates import Head, Identity, RatioGate, Routing

STAGED = {**GATES, "flat": RatioGate("flat", Identity(), head=Head.LOG, head_numbers=(0.7, 1.3))}
every_gate = pytest.mark.parametrize("gate", STAGED.values(), ids=STAGED)
SUMMED = {name: gate for name, gate in STAGED.items() if gate.head is not Head.CENSORED}  # else no log-ratios
THROUGH = {name: gate for name, gate in GATES.items() if any(x.routing is Routing.THROUGH for x in gate.levels)}
THROUGH.pop("score")  # whose ratio carries no gradient


@pytest.fixture(autouse=True)
def _workspaces_and_tables_come_with_garbage():
    torch.use_deterministic_algorithms(True)  # fills what torch.empty gives
    yield
    torch.use_deterministic_algorithms(False)


def run(example, gate, backend, exchange=None, mask=None, want_grad=True):
    """Loss, metrics, gradient and the loss of every token, by the op itself."""
    inputs, spec, _ = sys.modules["hpo_core.losses"]._prepare(
        example.logp, example.old_logp, example.advantages, example.batch, gate, example.weights, *[None] * 12, "row",
        None, None, backend,
    )  # fmt: skip
    inputs = inputs if mask is None else inputs._replace(mask=mask)
    op = sys.modules["hpo_core.backends"].resolve("gates", inputs.logp, backend)
    return op.policy_loss(inputs, spec, want_grad, True, exchange)


class Watched:
    """Changes nothing and keeps what it saw."""

    def __init__(self):
        self.seen = {}

    def sums(self, table):
        self.seen["sums"] = table.clone()

    def largest(self, table):
        self.seen["largest"] = table.clone()

    def arriving(self, table):
        self.seen["arriving"] = table.clone()


def assert_same(got, expected):
    for mine, theirs in zip(got, expected, strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or mine.numpy().tobytes() == theirs.numpy().tobytes()


@every_gate
@pytest.mark.parametrize("want_grad", [True, False])
def test_in_stages_is_the_whole(gate, want_grad, backend):
    for seed, lengths in enumerate([(5, 0, 9, 1, 7, 12, 3), (700, 2, 40)]):
        example, exchange = Example(seed, lengths, spread=0.3), Watched()
        staged = run(example, gate, backend, exchange, want_grad=want_grad)
        assert_same(staged, run(example, gate, backend, want_grad=want_grad))
        hands_up = want_grad and gate in THROUGH.values()
        assert list(exchange.seen) == ["sums", "largest", "arriving"][: 3 if hands_up else 1]


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


JOINED = {name: gate for name, gate in THROUGH.items() if name in SUMMED}


@pytest.mark.parametrize("gate", JOINED.values(), ids=JOINED)
def test_processes_that_share_their_segments_get_the_gradient_of_one(gate, backend):
    """Each knows tokens that the others mask; together they have every bit of a single process. (The two terms of a
    censored gradient, of which nothing may be left, would have it only if nothing was rounded on the way.)"""
    if backend == "triton":
        pytest.skip("its interpreter is not made for threads; test_spanning.py has processes")
    processes, moved = 2, False
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
