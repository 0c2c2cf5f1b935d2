"""Checks and times cases: every contestant in turn, beside a floor that streams the same bytes.

A case with a wrong result is never timed. :mod:`hpo_core.testing.timing` takes the samples.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch

from hpo_core.testing.timing import FEW, Timing, extra_bytes, interleave

Tensors = dict[str, torch.Tensor]

PART = 1 << 24  # elements that are compared at once, in float64
EVICTION = 1 << 24  # floats: 64 MiB, beyond the caches of a core


class Mismatch(Exception):
    """A contestant has a wrong result."""


class Goal(NamedTuple):
    """A bound on a column of a row of the results."""

    column: str
    least: float = 0.0
    most: float = math.inf

    def verdict(self, row: Row, compared: Sequence[Timing]) -> str:
        if min(timing.clean for timing in compared) < FEW:
            return "not judged: disturbed"
        value = getattr(row, self.column)
        wanted = f">= {self.least:g}" if self.most == math.inf else f"<= {self.most:g}"
        return f"{'met' if self.least <= value <= self.most else 'MISSED'} ({wanted})"


def at_most_floors(factor: float) -> Goal:
    return Goal("to_floor", most=factor)


def at_most_milliseconds(milliseconds: float) -> Goal:
    return Goal("milliseconds", most=milliseconds)


def slower_by(factor: float) -> Goal:
    return Goal("slower_than_hpo_core", least=factor)


class Contestant(NamedTuple):
    """One implementation of a case."""

    name: str
    run: Callable[[], Tensors]
    goal: Goal | None = None
    alike: bool = True  # has the results of hpo_core; else it is timed, but not compared
    tolerance: float = 1e-4  # allowed error, relative to the largest element of each tensor; 0: equal


@dataclass
class Case:
    """One computation at one size. The first of ``ours`` is the one with which all others are compared."""

    op: str
    name: str
    unit: str
    units: int
    bytes_per_unit: float  # each input read once and each output written once, counted by hand
    flops_per_unit: float
    ours: list[Contestant]
    peers: list[Contestant]
    floor: Callable[[], object]  # streams the same bytes
    truth: Callable[[], Tensors] | None = None  # the float64 reference; for small sizes
    cold: bool = False  # caches are evicted before every call


class Plan(NamedTuple):
    """A case at the size that is timed and at a size at which the float64 reference is quick."""

    name: str
    build: Callable[..., Case]  # build(**size, full=, backend=)
    size: dict[str, int]
    small: dict[str, int]
    seconds: float | None = None  # of timing, where a family has too many cases for the usual time

    def case(self) -> Case:
        return self.build(**self.size, full=True, backend=None)

    def small_case(self, backend: str | None = None) -> Case:
        """The case with ragged and masked rows if it allows them, with the truth and without compiled contestants."""
        return self.build(**self.small, full=False, backend=backend)


@dataclass
class Row:
    """One line of the results."""

    op: str
    case: str
    contestant: str
    role: str  # hpo_core, peer or floor
    milliseconds: float  # median
    low: float  # 20th percentile
    high: float  # 80th percentile
    busy: float  # median processor time of the busiest thread, in ms: comparable even on a contended machine
    samples: int
    clean_samples: int  # samples without waiting for a core; the median is over these if there are enough
    nanoseconds_per_unit: float
    unit: str
    gigabytes_per_second: float
    gigaflops: float
    intensity: float  # FLOP per byte
    to_floor: float
    slower_than_hpo_core: float  # time relative to the case's first contestant
    goal: str = ""
    extra_bytes_per_unit: float | None = None
    first_call_milliseconds: float | None = None
    launches: int | None = None
    load: float = 0.0


@dataclass
class Outcome:
    """The rows of one case, or the reason why there are none."""

    case: str
    rows: list[Row] = field(default_factory=list)
    failure: str = ""


# ---------------------------------------------------------------------------------------------------------- correctness


def compare(name: str, got: Tensors, expected: Tensors, tolerance: float) -> None:
    """Raises Mismatch if a common tensor differs by more than ``tolerance`` times its largest element."""
    for key in got.keys() & expected.keys():
        ours, theirs = got[key].detach().flatten(), expected[key].detach().flatten()
        if ours.shape != theirs.shape:
            raise Mismatch(f"{name}: {key} has shape {list(got[key].shape)}, expected {list(expected[key].shape)}")
        scale = error = 0.0
        for mine, true in zip(ours.split(PART), theirs.split(PART), strict=True):
            mine, true = mine.double(), true.double()
            finite = torch.isfinite(true)
            if not torch.equal(finite, torch.isfinite(mine)) or not torch.equal(true[~finite], mine[~finite]):
                raise Mismatch(f"{name}: {key} is not finite in other places than expected")
            if bool(finite.any()):
                scale = max(scale, true[finite].abs().max().item())
                error = max(error, (mine[finite] - true[finite]).abs().max().item())
        if error > tolerance * scale:
            raise Mismatch(f"{name}: {key} is off by {error:.2e}, allowed {tolerance * scale:.2e}")


def check(case: Case) -> None:
    """Compares every contestant with the float64 reference at a small size, or with hpo_core at the full size."""
    expected = case.truth() if case.truth else case.ours[0].run()
    for contestant in (*case.ours, *case.peers):
        if contestant.alike:
            compare(contestant.name, contestant.run(), expected, contestant.tolerance)


def small_test(plans: list[Plan]) -> Callable[..., None]:
    """A test for ``pytest bench``: the small case of each plan is checked and timed."""

    @pytest.mark.parametrize("plan", plans, ids=lambda plan: plan.name)
    def test(plan: Plan, benchmark: Any) -> None:
        small = plan.small_case()
        check(small)
        benchmark(small.ours[0].run)

    return test


# ---------------------------------------------------------------------------------------------------------- measurement


def available(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@functools.lru_cache(maxsize=1)
def _eviction_buffer() -> torch.Tensor:
    return torch.zeros(EVICTION)


def evict() -> None:
    _eviction_buffer().add_(1.0)


def launches(plan: Plan) -> int | None:
    """Kernel launches of the CUDA sources for this case, counted under emulation; None without that build."""
    import hpo_core

    if not hpo_core.backends()["cuda_emulated"]:
        return None
    counters = importlib.import_module("hpo_core._cuda_emulated").launches
    run = plan.small_case("cuda_emulated").ours[0].run
    run()  # values that are computed once per batch
    before = sum(counters().values())
    run()
    return int(sum(counters().values()) - before)


def measure(plan: Plan, seconds: float) -> Outcome:
    """Checks, then times one case."""
    torch._dynamo.reset()  # a case must not inherit the compiled graphs of another
    case = plan.case()
    try:
        first_calls = [_first_call(contestant) for contestant in (*case.ours, *case.peers)]
        check(plan.small_case())
        check(case)
    except Mismatch as mismatch:
        return Outcome(case.name, failure=str(mismatch))
    contestants = [*case.ours, *case.peers]
    load = os.getloadavg()[0]
    timings = interleave([case.floor, *(c.run for c in contestants)], seconds, evict if case.cold else None)
    floor, ours = timings[0].median, timings[1].median

    rows = [_row(case, "floor", "floor", timings[0], floor, ours, load)]
    for index, (contestant, timing, first) in enumerate(zip(contestants, timings[1:], first_calls, strict=True)):
        role = "hpo_core" if index < len(case.ours) else "peer"
        row = _row(case, contestant.name, role, timing, floor, ours, load)
        row.extra_bytes_per_unit = extra_bytes(contestant.run) / case.units
        row.first_call_milliseconds = 1e3 * first
        if contestant.goal is not None:
            row.goal = contestant.goal.verdict(row, [timing, *timings[:2]])
        rows.append(row)
    rows[1].launches = launches(plan)
    return Outcome(case.name, rows)


def _first_call(contestant: Contestant) -> float:
    begin = time.perf_counter()
    contestant.run()
    return time.perf_counter() - begin


def _row(case: Case, name: str, role: str, timing: Timing, floor: float, ours: float, load: float) -> Row:
    traffic, work = case.bytes_per_unit * case.units, case.flops_per_unit * case.units
    return Row(
        op=case.op,
        case=case.name,
        contestant=name,
        role=role,
        milliseconds=1e3 * timing.median,
        low=1e3 * timing.low,
        high=1e3 * timing.high,
        busy=1e3 * timing.busy,
        samples=timing.samples,
        clean_samples=timing.clean,
        nanoseconds_per_unit=1e9 * timing.median / case.units,
        unit=case.unit,
        gigabytes_per_second=1e-9 * traffic / timing.median,
        gigaflops=1e-9 * work / timing.median if role != "floor" else math.nan,
        intensity=case.flops_per_unit / case.bytes_per_unit,
        to_floor=timing.median / floor,
        slower_than_hpo_core=timing.median / ours,
        load=load,
    )


def ceilings(seconds: float = 2.0) -> dict[str, float]:
    """The rates of torch's own kernels here: GB/s from memory and from the cache, GFLOP/s in float32."""
    big, small, square = torch.rand(1 << 26), torch.rand(1 << 20), torch.rand(1024, 1024)
    big_out, small_out, product = torch.empty_like(big), torch.empty_like(small), torch.empty_like(square)
    runs: list[Callable[[], object]] = [
        lambda: torch.sum(big),
        lambda: torch.add(big, 1.0, out=big_out),
        lambda: torch.add(small, 1.0, out=small_out),
        lambda: torch.mm(square, square, out=product),
    ]
    read, update, cached, multiply = (timing.low for timing in interleave(runs, seconds))  # a ceiling is a best rate
    return {
        "memory_read_gigabytes_per_second": 4e-9 * big.numel() / read,
        "memory_read_write_gigabytes_per_second": 8e-9 * big.numel() / update,
        "cache_read_write_gigabytes_per_second": 8e-9 * small.numel() / cached,
        "matrix_multiply_gigaflops": 2e-9 * 1024**3 / multiply,
    }
