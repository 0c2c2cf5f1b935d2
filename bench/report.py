"""The results of a run: a table to read, JSON and CSV to compute with, and a roofline picture."""

from __future__ import annotations

import csv
import dataclasses
import datetime
import json
import os
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from harness import Outcome, Row, available

import hpo_core

PACKAGES = ("torch", "triton", "numpy", "verl", "trl", "liger_kernel")


def environment() -> dict[str, Any]:
    """Everything a number depends on."""
    cpu = hpo_core.backends()["cpu"]
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "cpu_backend": cpu.detail or cpu.reason,
        "pages": page_mode(),
        "load": os.getloadavg(),
        "python": platform.python_version(),
        "hpo_core": hpo_core.__version__,
        **{name: metadata.version(name) if available(name) else "not installed" for name in PACKAGES},
    }


def processor() -> str:
    """The name that the kernel knows, and the widest vectors that PyTorch uses."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.split(":")[1].strip() for line in text.splitlines() if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"


def page_mode() -> str:
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not path.exists():
        return "unknown"
    mode = path.read_text().split("[")[1].split("]")[0]
    return "transparent huge pages" if mode == "always" else f"4 KiB pages (transparent huge pages: {mode})"


# ---------------------------------------------------------------------------------------------------------------- table


COLUMNS = ("", "ms", "busy ms", "ns/unit", "GB/s", "x floor", "x hpo_core", "B/unit", "first ms", "samples", "goal")


def table(outcome: Outcome) -> str:
    """One case: a line per contestant."""
    if outcome.failure:
        return f"\n{outcome.case}\n  FAILED its check, so nothing was timed: {outcome.failure}"
    lines = [cells(row) for row in outcome.rows]
    widths = [max(len(line[i]) for line in (COLUMNS, *lines)) for i in range(len(COLUMNS))]
    text = [_line(line, widths) for line in (COLUMNS, *lines)]
    launches = next((f", {row.launches} launches on cuda" for row in outcome.rows if row.launches is not None), "")
    head = f"\n{outcome.case} ({outcome.rows[0].intensity:.2g} FLOP/byte, load {outcome.rows[0].load:.1f}{launches})"
    return "\n".join([head, *text])


def cells(row: Row) -> tuple[str, ...]:
    return (
        row.contestant,
        digits(row.milliseconds),
        digits(row.busy),
        digits(row.nanoseconds_per_unit),
        digits(row.gigabytes_per_second),
        digits(row.to_floor),
        digits(row.slower_than_hpo_core),
        "" if row.extra_bytes_per_unit is None else f"{row.extra_bytes_per_unit:.1f}",
        "" if row.first_call_milliseconds is None else f"{row.first_call_milliseconds:.1f}",
        f"{row.clean_samples}/{row.samples}",
        row.goal,
    )


def digits(value: float) -> str:
    """The number with three significant digits."""
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _line(line: tuple[str, ...], widths: list[int]) -> str:
    """Words to the left, numbers to the right."""
    name, *numbers, goal = line
    padded = [number.rjust(width) for number, width in zip(numbers, widths[1:], strict=False)]
    return "  " + "  ".join([name.ljust(widths[0]), *padded, goal]).rstrip()


def summary(outcomes: list[Outcome]) -> str:
    """The goals that were missed, and the checks that failed."""
    rows = [row for outcome in outcomes for row in outcome.rows if row.goal]
    met = [row for row in rows if row.goal.startswith("met")]
    missed = [row for row in rows if row.goal.startswith("MISSED")]
    lines = [f"\n{len(met)} of {len(rows)} goals met, {len(missed)} missed, the rest not judged"]
    lines += [f"  {row.case}: {row.contestant}: {row.goal}" for row in missed]
    lines += [f"  FAILED {outcome.case}: {outcome.failure}" for outcome in outcomes if outcome.failure]
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------- files


def write(folder: Path, facts: dict[str, Any], outcomes: list[Outcome]) -> None:
    """results.json and results.csv, after every case, so that an interrupted run leaves results, too."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [dataclasses.asdict(row) for outcome in outcomes for row in outcome.rows]
    failures = {outcome.case: outcome.failure for outcome in outcomes if outcome.failure}
    content = {"environment": facts, "failures": failures, "rows": rows}
    (folder / "results.json").write_text(json.dumps(content, indent=1) + "\n")
    if rows:
        with open(folder / "results.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


def roofline(path: Path, ceilings: dict[str, float], outcomes: list[Outcome]) -> None:
    """GFLOP/s over FLOP per byte, below the ceilings of memory, cache and arithmetic of this machine."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    low, high, peak = 0.1, 10.0, ceilings["matrix_multiply_gigaflops"]
    for name, style in (("cache", "-"), ("memory", "--")):
        bandwidth = ceilings[f"{name}_read_write_gigabytes_per_second"]
        ridge = min(max(peak / bandwidth, low), high)
        axes.plot([low, ridge, high], [low * bandwidth, ridge * bandwidth, min(peak, high * bandwidth)], style, c="0.5")
        place = (low, low * bandwidth)
        axes.annotate(f"{name}, {bandwidth:.0f} GB/s", place, (2, 6), textcoords="offset points", color="0.4")
    for label, row, peer in shown(outcomes):
        axes.plot(row.intensity, row.gigaflops, "o", c="C0")
        axes.annotate(label, (row.intensity, row.gigaflops), (6, -3), textcoords="offset points", fontsize=8)
        if peer is not None:
            axes.plot(peer.intensity, peer.gigaflops, "x", c="C1")
    axes.plot([], [], "o", c="C0", label="hpo_core")
    axes.plot([], [], "x", c="C1", label="fastest peer")
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="GFLOP/s", xlim=(low, high))
    axes.legend(loc="upper left", frameon=False)
    figure.savefig(path)
    plt.close(figure)


def shown(outcomes: list[Outcome]) -> Iterator[tuple[str, Row, Row | None]]:
    """A label, our fastest row and the peers' fastest, of the first case of each kind."""
    seen = set()
    for outcome in outcomes:
        label = outcome.case.partition(", ")[0]
        if outcome.rows and label not in seen:
            seen.add(label)
            peers = [row for row in outcome.rows if row.role == "peer"]
            ours = [row for row in outcome.rows if row.role == "hpo_core"]
            fastest = min(peers, key=lambda row: row.milliseconds) if peers else None
            yield label, min(ours, key=lambda row: row.milliseconds), fastest
