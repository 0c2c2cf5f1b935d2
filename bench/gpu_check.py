"""The GPU part of `make gpu-check`: `exercise` checks every op against the float64 reference, `bench` times them.

Each result is appended to a file of JSON lines before the next begins, so an interrupted run keeps its results.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import bench_gates as gates
import peers_gates
import torch
from harness import Contestant, Mismatch, Tensors, compare
from peers_gates import Objective, Padded

import hpo_core as hpo

PENALISED = gates.PPO._replace(beta=0.04)
CHECKED = (gates.PPO, gates.GSPO, gates.GSPO_TOKEN, gates.CISPO, gates.REINFORCE, PENALISED._replace(keep=0.2))
TIMED = (gates.PPO, gates.GSPO, gates.CISPO, PENALISED)
SHAPES = ((2, 2048), (64, 2048), (512, 2048), (2048, 2048))
LAUNCHES = {"cuda": 3, "triton": 5}  # the limit of a loss, from the call to the gradient
LAUNCHES_OF_SINGLE_CALL = 8


class Run(NamedTuple):
    case: str
    contestant: str
    call: Callable[[], Tensors]
    bytes: int  # each input read once, each output written once
    launches: int | None = None  # the limit


# ----------------------------------------------------------------------------------------------------------------- runs


def on(device: str, objective: Objective, rows: int, length: int, ragged: bool) -> tuple[Padded, hpo.PackedBatch]:
    data, batch = gates.padded_batch(objective, rows, length, ragged)
    return Padded(*(tensor.to(device) for tensor in data)), batch.to(device)


def losses(backend: str) -> Iterator[Run]:
    for objective in TIMED:
        for rows, length in SHAPES:
            data, batch = on("cuda", objective, rows, length, ragged=False)
            case = f"{gates.describe(objective)}, {rows} x {length}"
            size = rows * length * (gates.bytes_per_token(objective) + 1)
            if backend == "peers":
                yield Run(case, "eager", peers_gates.eager(objective, data), size)
                yield Run(case, "compile", peers_gates.compiled(objective, data, expanded=True), size)
                continue
            gate, options = gates.gate_of(objective), gates.extras(objective, data)
            for name, call, *_ in gates.ours(gate, data, batch, backend, {}, **options):
                yield Run(case, f"{backend}: {name}", call, size, LAUNCHES[backend])


def single_calls(backend: str) -> Iterator[Run]:
    for rows, length in SHAPES[1:3]:
        data, _ = on("cuda", gates.GSPO, rows, length, ragged=False)
        offsets = torch.arange(rows + 1, device="cuda") * length
        batch = hpo.PackedBatch(offsets, group_ids=torch.arange(rows, device="cuda") // 8)
        call = single_call(data, batch, backend)
        case, size = f"grpo + gspo + ares, {rows} x {length}", 28 * rows * length
        yield Run(case, f"{backend}: hpo_core", call, size, LAUNCHES_OF_SINGLE_CALL)


def single_call(data: Padded, batch: hpo.PackedBatch, backend: str) -> Callable[[], Tensors]:
    def loss_of(leaf: torch.Tensor) -> torch.Tensor:
        return hpo.hierarchical_policy_loss(
            leaf, data.old_logp.view(-1), data.advantages, batch, gate=hpo.gates.gspo(), window=hpo.entropy.ares(),
            entropy=data.entropy.view(-1), weights=data.weights, backend=backend,
        ).loss  # fmt: skip

    return peers_gates.differentiated(data.logp.view(-1), loss_of)


def others(backend: str, tokens: int, device: str) -> Iterator[Run]:
    """The ops without a gradient."""
    generator = torch.Generator().manual_seed(0)
    kind = torch.float64 if backend == "reference" else torch.float32
    entropy = torch.rand(tokens, generator=generator).to(device, kind)
    rewards = (100 + torch.randn(tokens, generator=generator)).to(device, kind)
    ids = torch.arange(tokens, device=device) // 8
    batch = hpo.PackedBatch(torch.arange(0, tokens + 1, 100, device=device))
    window = hpo.entropy.forking_tokens(Fraction(1, 5))

    def selected() -> torch.Tensor:
        return hpo.entropy.top_k(entropy, batch, tokens // 5, scope="call", backend=backend)

    calls: dict[str, tuple[Callable[[], Tensors], int]] = {
        "group_normalise": (lambda: {"value": hpo.advantages.grpo(rewards, ids, backend=backend)}, 16),
        "window_score": (lambda: {"value": hpo.entropy.window_mean(entropy, batch, 0, 3, backend=backend)}, 8),
        "order_statistic": (lambda: {"value": window.fit_score(entropy, backend=backend).threshold}, 4),
        "order_statistics": (lambda: {"value": hpo.entropy.quantiles(entropy, batch, "0.8", backend=backend)}, 4),
        "select_exact": (lambda: {"value": selected().to(kind)}, 5),
    }
    for name, (call, size) in calls.items():
        yield Run(f"{name}, {tokens:,}", f"{backend}: hpo_core", call, size * tokens)


# ------------------------------------------------------------------------------------------------------------- exercise


def exercise(backend: str, device: str) -> int:
    """Runs every op on small ragged batches; returns the number of results that differ from the reference."""
    failures = 0
    for objective in CHECKED:
        gate = gates.gate_of(objective)
        data, batch = on("cpu", objective, 6, 44, ragged=True)
        expected = gates.truth(gate, data, batch, **gates.extras(objective, data))
        data, batch = on(device, objective, 6, 44, ragged=True)
        for contestant in gates.ours(gate, data, batch, backend, {}, **gates.extras(objective, data)):
            failures += differs(f"{gates.describe(objective)}, {contestant.name}", contestant, expected)
    for run, reference in zip(others(backend, 400, device), others("reference", 400, "cpu"), strict=True):
        failures += differs(run.case, Contestant("", run.call), reference.call())
    print(f"{backend}: {failures} differ from the reference")
    return failures


def differs(name: str, contestant: Contestant, expected: Tensors) -> bool:
    try:
        got = {key: tensor.cpu() for key, tensor in contestant.run().items()}
        compare(name, got, expected, 2e-6)
    except Mismatch as mismatch:
        print(mismatch)
        return True
    return False


# ---------------------------------------------------------------------------------------------------------------- bench


def event_microseconds(call: Callable[[], object], repeat: int = 20, samples: int = 15) -> float:
    """The median over samples of the mean time of ``repeat`` calls, from events on the device."""
    call()
    found = []
    for _ in range(samples):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(repeat):
            call()
        end.record()
        end.synchronize()
        found.append(1e3 * begin.elapsed_time(end) / repeat)
    return statistics.median(found)


def graph_microseconds(call: Callable[[], object]) -> float:
    """:func:`event_microseconds` for replays of a CUDA graph of the call: the kernels without the cost of launches."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return event_microseconds(graph.replay)


def launches(call: Callable[[], object]) -> Counter[str]:
    """Kernels, copies and fills that one call puts on the device."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    return Counter(event.name for event in profile.events() if "CUDA" in str(event.device_type))


def synchronises(call: Callable[[], object]) -> bool:
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError:
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def copy_gigabytes_per_second() -> float:
    source = torch.rand(1 << 28, device="cuda")
    target = torch.empty_like(source)
    return 8e-3 * source.numel() / event_microseconds(lambda: target.copy_(source), repeat=5)


def measure(run: Run, bandwidth: float) -> dict[str, Any]:
    floor = 1e-3 * run.bytes / bandwidth
    result: dict[str, Any] = {"case": run.case, "contestant": run.contestant, "floor_microseconds": floor}
    try:
        result["event_microseconds"] = event_microseconds(run.call)
        result["launches"] = launches(run.call)
        result["synchronises"] = synchronises(run.call)
        result["graph_microseconds"] = graph_microseconds(run.call)
    except Exception as error:  # a failure must not end the measurement of other runs
        result["error"] = f"{type(error).__name__}: {error}"
    too_many = run.launches is not None and sum(result.get("launches", {}).values()) > run.launches
    result["missed"] = run.launches is not None and ("error" in result or result["synchronises"] or too_many)
    return result


def line(result: dict[str, Any]) -> str:
    found = [f"{result['case']:36} {result['contestant']:32}"]
    if "event_microseconds" in result:
        found.append(f"{result['event_microseconds']:9.1f} us")
    if "graph_microseconds" in result:
        ratio = result["graph_microseconds"] / result["floor_microseconds"]
        found.append(f"graph {result['graph_microseconds']:9.1f} us, {ratio:6.1f} x floor")
    if "launches" in result:
        found.append(f"{sum(result['launches'].values())} launches")
    found += ["synchronises"] * result.get("synchronises", False) + ["MISSED"] * result["missed"]
    return "  ".join([*found, result.get("error", "")]).rstrip()


def bench(backend: str, path: Path) -> int:
    """Times every run; returns the number of runs that fail, synchronise or exceed their launches."""
    bandwidth = copy_gigabytes_per_second()
    versions = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
    facts = {"backend": backend, "copy_gigabytes_per_second": bandwidth, **versions}
    print(facts)
    missed = 0
    with open(path, "a") as file:
        print(json.dumps(facts), file=file, flush=True)
        for run in runs(backend):
            result = measure(run, bandwidth)
            missed += result["missed"]
            print(json.dumps(result), file=file, flush=True)
            print(line(result), flush=True)
    return missed


def runs(backend: str) -> Iterator[Run]:
    yield from losses(backend)
    if backend != "peers":
        yield from single_calls(backend)
        for tokens in (100_000, 10_000_000):
            yield from others(backend, tokens, "cuda")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("exercise", "bench"))
    parser.add_argument("backend", help="cuda, triton, ..., or for bench: peers")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path("gpu_bench.jsonl"))
    arguments = parser.parse_args()
    if arguments.what == "exercise":
        return int(exercise(arguments.backend, arguments.device) > 0)
    return int(bench(arguments.backend, arguments.out) > 0)


if __name__ == "__main__":
    sys.exit(main())
