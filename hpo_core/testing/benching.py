"""Time and memory of any policy loss next to the one of hpo_core, eager and compiled."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import gates
from ..batch import PackedBatch
from ..checks import check, require_type
from ..gates import RatioGate
from ..losses import policy_loss
from ..specs import Unit
from .examples import PolicyLossExample
from .expected import Outcome, keywords_of, outcome_of
from .subjects import on_packed_batches
from .timing import extra_bytes, interleave

_TOLERANCE = 1e-4  # of the largest element; a function with another result is not timed


class Measured(NamedTuple):
    """One line of the table: loss and gradient, forward and backward."""

    name: str
    milliseconds: float | None = None  # the median; None: not timed, with the reason in the note
    low: float = 0.0  # the 20th percentile
    high: float = 0.0  # the 80th
    bytes_per_token: float = 0.0  # the peak beyond the inputs
    first_call_milliseconds: float = 0.0  # compilation included
    note: str = ""


@dataclass(frozen=True)
class Measurements:
    """The result of :func:`bench`. ``str`` is the table, :meth:`picture` draws it."""

    title: str
    lines: tuple[Measured, ...]

    def __str__(self) -> str:
        width = max(len(line.name) for line in self.lines)
        ours = self.lines[0].milliseconds
        head = f"  {'':{width}}  {'ms':>9} {'20 to 80 %':>19} {'/ hpo_core':>10} {'bytes/token':>11} {'first call':>10}"
        table = [self.title, head]
        for name, milliseconds, low, high, memory, first, note in self.lines:
            if milliseconds is None:
                table.append(f"  {name:{width}}  not timed: {note}")
                continue
            times = f"{milliseconds:9.3f} {low:9.3f} {high:9.3f} {milliseconds / ours if ours else 1:10.2f}"
            table.append(f"  {name:{width}}  {times} {memory:11.1f} {first:10.1f}")
        return "\n".join(table)

    def picture(self, path: str | Path) -> None:
        """Draw times and memory as bars, one pair for each line that was timed."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError(f"picture: drawing {path} needs matplotlib: pip install matplotlib") from error
        timed = [line for line in self.lines if line.milliseconds is not None][::-1]
        names = [line.name for line in timed]
        figure = Figure(figsize=(9, 1.2 + 0.45 * len(timed)), layout="constrained")
        figure.suptitle(self.title, fontsize="medium")
        left, right = figure.subplots(1, 2, sharey=True)
        left.barh(names, [line.milliseconds or 0.0 for line in timed])
        left.set_xlabel("ms, loss and gradient")
        right.barh(names, [line.bytes_per_token for line in timed], color="C1")
        right.set_xlabel("bytes per token beyond the inputs")
        figure.savefig(path, dpi=150)


def bench(
    fn: Callable[..., Any],
    *,
    gate: RatioGate | None = None,
    tokens: int = 1 << 17,
    rows: int | None = None,
    padded: bool = False,
    compiled: bool = True,
    seconds: float = 2.0,
    device: str = "cpu",
    backend: str | None = None,
    picture: str | Path | None = None,
    **options: Any,
) -> Measurements:
    """Time ``fn`` and :func:`hpo_core.policy_loss` on the same batch, both eager and under ``torch.compile``: the loss,
    the backward, and the memory of both.

    A function that raises, or computes another loss or gradient, is not timed; the table says so.

    Args:
        fn: a function as in :func:`check` for the op ``"policy_loss"``.
        gate: one that reads tokens, rows and ``rollout_logp`` alone; default ``gates.ppo_clip()``.
        tokens: the size of the batch, of which a fifth is masked.
        rows: the number of rows of equal length; default: one for each 1024 tokens.
        padded: as in :func:`check`.
        compiled: False leaves ``torch.compile`` out, whose first call takes seconds to minutes.
        seconds: the time for samples, all contestants in turn.
        backend: the backend of hpo_core.
        picture: a path, such as ``"bench.png"``, to draw to; needs matplotlib.
        options: passed to ``fn``.
    """
    require_type(callable(fn), "fn: expected a function, got {!r}", fn)
    for name, number in (("tokens", tokens), ("rows", rows)):
        is_count = number is None or (isinstance(number, int) and number >= 1)
        check(is_count, "{}: expected a number >= 1, got {!r}", name, number)
    gate = gates.ppo_clip() if gate is None else gate
    require_type(isinstance(gate, RatioGate), "gate: expected a RatioGate such as gates.dapo(), got {!r}", gate)
    needs = ", ".join((*gate.required, *(f"{unit.name.lower()}s" for unit in sorted(gate.units - {Unit.TRAJECTORY}))))
    check(not needs, "gate: expected one such as gates.icepop(), got {!r}, which needs {}", gate.name, needs)
    example = _example(gate, tokens, rows, device)

    def ours(
        logp: torch.Tensor, old_logp: torch.Tensor | None, advantages: torch.Tensor, batch: PackedBatch, **given: Any
    ) -> torch.Tensor:
        return policy_loss(logp, old_logp, advantages, batch, **given, backend=backend).loss

    name = getattr(fn, "__name__", type(fn).__name__)
    kernel = on_packed_batches(fn) if padded else fn
    contestants: dict[str, Callable[[], Outcome]] = {}
    for label, function, more in (("hpo_core", ours, {}), (name, kernel, options)):
        given = keywords_of(function, example) | more
        contestants[label] = _call(function, example, given)
        if compiled:
            contestants[f"{label}, compiled"] = _call(torch.compile(function, dynamic=False), example, given)

    lines, runs = {}, {}
    expected: Outcome | None = None
    for label, run in contestants.items():
        begin = time.perf_counter()
        if expected is None:
            expected, fault = run(), ""
        else:
            fault = _fault(run, expected)
        lines[label] = Measured(label, first_call_milliseconds=1e3 * (time.perf_counter() - begin), note=fault)
        if not fault:
            runs[label] = run
    for (label, run), timing in zip(runs.items(), interleave(list(runs.values()), seconds), strict=True):
        lines[label] = lines[label]._replace(
            milliseconds=1e3 * timing.median,
            low=1e3 * timing.low,
            high=1e3 * timing.high,
            bytes_per_token=extra_bytes(run) / example.batch.total_tokens,
        )
    hardware = torch.cuda.get_device_name(device) if "cuda" in device else f"{torch.get_num_threads()} threads of a CPU"
    batch = example.batch
    title = f"{example.gate.name}, {batch.total_tokens:,} tokens in {batch.rows:,} rows, {hardware}"
    measurements = Measurements(title, tuple(lines.values()))
    if picture is not None:
        measurements.picture(picture)
    return measurements


def _example(gate: RatioGate, tokens: int, rows: int | None, device: str) -> PolicyLossExample:
    """Log-probabilities are multiples of 1/1024, so that no rounding decides whether a ratio is beyond its bound."""
    rows = max(1, tokens // 1024) if rows is None else rows
    length = max(1, tokens // rows)
    draw = torch.Generator("cpu").manual_seed(0)

    def steps(low: int, high: int) -> torch.Tensor:
        return (torch.randint(low, high, (rows * length,), generator=draw, device="cpu").float() / 1024).to(device)

    old = steps(-4096, -1)
    mask = steps(0, 1024) >= 0.2
    offsets = torch.arange(rows + 1, device=device) * length
    batch = PackedBatch(offsets, mask)
    advantages = torch.randn(rows, generator=draw, device="cpu", dtype=torch.float32).to(device)
    weights = torch.full_like(advantages, 1.0) / mask.sum()
    example = PolicyLossExample(old + steps(-400, 400), old, advantages, batch, gate, {"weights": weights})
    return example.given(rollout_logp=old + steps(-400, 400)) if gate.reads_rollout else example


def _call(function: Callable[..., Any], example: PolicyLossExample, given: dict[str, Any]) -> Callable[[], Outcome]:
    def run() -> Outcome:
        leaf = example.logp.detach().requires_grad_()
        return outcome_of(function(leaf, example.old_logp, example.advantages, example.batch, **given), leaf)

    return run


def _fault(run: Callable[[], Outcome], expected: Outcome) -> str:
    """The reason why a contestant is not timed; empty if its results are the expected ones."""
    try:
        got = run()
    except Exception as error:
        return f"raised {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    for name, ours, theirs in (("loss", expected.loss, got.loss), ("gradient", expected.grad, got.grad)):
        assert ours is not None
        off = (theirs - ours).abs().max() if theirs is not None else torch.tensor(torch.inf)
        if not bool(off <= _TOLERANCE * ours.abs().max()):
            return (
                f"its {name} is off by {off:.2g}, the largest element being {ours.abs().max():.2g}; see testing.check"
            )
    return ""
