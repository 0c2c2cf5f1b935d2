"""Time and memory of calls, for ``bench/`` and for :func:`hpo_core.testing.bench`.

Samples are interleaved, so that a busy neighbour slows all contestants alike. Each sample follows an untimed call of
the same contestant, so that it starts from the cache which that contestant leaves behind.
"""

from __future__ import annotations

import glob
import os
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

SAMPLES = 15
SLOW_SAMPLES = 5  # of calls longer than SLOW
FEW = 5  # with fewer undisturbed samples than this all samples are taken, and no goal is judged by them
SLOW = 0.1  # s
SHORTEST = 5e-3  # s; shorter calls are repeated until a sample lasts this long, and divided
CLEAN = 0.03  # the share of a sample that threads may spend waiting for a core


class Timing(NamedTuple):
    median: float  # s
    low: float
    high: float
    busy: float
    samples: int
    clean: int


class Sample(NamedTuple):
    """Seconds of one call."""

    wall: float
    busy: float  # processor time of the main thread or of all others together, whichever is longer
    clean: bool  # no thread waited long for a core


def run_queue_wait() -> float:
    """Seconds that threads of this process were ready to run without a core; 0 if the system does not report them."""
    total = 0
    for path in glob.glob("/proc/self/task/*/schedstat"):
        try:
            with open(path) as file:
                total += int(file.read().split()[1])
        except OSError:  # the thread has ended
            continue
    return total * 1e-9


class _Clock:
    """Collects the samples of one contestant."""

    def __init__(self, run: Callable[[], object], before: Callable[[], object] | None) -> None:
        self.run, self.before = run, before
        self.samples: list[Sample] = []
        self.spent = 0.0
        self.repeat = 1
        run()
        single = self._timed().wall
        self.repeat = 1 if before else max(1, round(SHORTEST / single))
        self.wanted = SLOW_SAMPLES if single > SLOW else SAMPLES

    def sample(self) -> None:
        begin = time.perf_counter()
        self.run()
        if self.before:
            self.before()
        self.samples.append(self._timed())
        self.spent += time.perf_counter() - begin

    def _timed(self) -> Sample:
        waited, process, thread, begin = run_queue_wait(), time.process_time(), time.thread_time(), time.perf_counter()
        for _ in range(self.repeat):
            self.run()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        wall = time.perf_counter() - begin
        main = time.thread_time() - thread
        others = time.process_time() - process - main
        clean = run_queue_wait() - waited <= CLEAN * wall
        return Sample(wall / self.repeat, max(main, others) / self.repeat, clean)

    @property
    def clean(self) -> list[float]:
        return [sample.wall for sample in self.samples if sample.clean]

    def timing(self) -> Timing:
        ordered = sorted(self.clean if len(self.clean) >= FEW else [sample.wall for sample in self.samples])
        fifth = len(ordered) // 5
        busy = statistics.median(sample.busy for sample in self.samples)
        return Timing(
            statistics.median(ordered), ordered[fifth], ordered[-1 - fifth], busy, len(self.samples), len(self.clean)
        )


def interleave(
    runs: list[Callable[[], object]], seconds: float, before: Callable[[], object] | None = None
) -> list[Timing]:
    """Time all runs in turn until each has enough undisturbed samples, or after ``seconds`` enough of any kind.

    Timing takes at least half of ``seconds``, so that a neighbour's burst of some tenths does not make the median.
    """
    clocks = [_Clock(run, before) for run in runs]
    begin = time.perf_counter()
    while True:
        spent = time.perf_counter() - begin
        pending = [clock for clock in clocks if len(clock.samples if spent > seconds else clock.clean) < clock.wanted]
        if not pending and spent > seconds / 2:
            return [clock.timing() for clock in clocks]
        for clock in clocks:  # quick runs continue, so that slow runs keep them as neighbours
            if not pending or clock in pending or clock.spent < seconds / len(clocks) / 4:
                clock.sample()


def extra_bytes(run: Callable[[], object]) -> int:
    """The peak of torch's memory during one call above the memory before it: results and temporaries."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler, which counts memory, would print a line per use
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        run()
    held = peak = 0
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
