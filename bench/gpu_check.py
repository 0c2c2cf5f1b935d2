"""The GPU part of `make gpu-check`: `exercise` holds losses, log-probabilities and estimators to the float64 reference,
`bench` times them.

`bench` appends each result to a file of JSON lines before the next begins: an interrupted run keeps its results.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bench_gates as gates
import bench_presets as presets
import torch
from gpu_runs import PENALISED, Run, loss_of_preset, on, others, preset_on, runs, with_gradient
from harness import Mismatch, Tensors, compare

import hpo_core as hpo

CHECKED = (gates.PPO, gates.GSPO, gates.GSPO_TOKEN, gates.CISPO, gates.REINFORCE, PENALISED._replace(keep=0.2))
SIZES = {"small": (6, 44), "large": (512, 2048)}  # rows and their length; small: for the sanitizer, which is slow
ONE_BY_ONE = 4000  # tokens at most where the definition takes them one by one, as in a window
SAMPLES, SAMPLE = 9, 3000.0  # the number of samples, and the microseconds of one

# ------------------------------------------------------------------------------------------------------------- exercise


def exercise(backend: str, device: str, size: str) -> int:
    """Runs :func:`exercises` on ragged batches; returns the number of results that differ from the reference."""
    failures = 0
    truth_device = "cpu" if size == "small" else device  # where the definition is quicker
    for name, call, expected, tolerance in exercises(backend, device, truth_device, *SIZES[size]):
        try:
            got = {key: tensor.cpu() for key, tensor in call().items()}
            compare(name, got, {key: tensor.cpu() for key, tensor in expected().items()}, tolerance)
        except Mismatch as mismatch:
            print(mismatch, flush=True)
            failures += 1
    print(f"{backend}, {size}: {failures} differ from the reference")
    return failures


Exercise = tuple[str, Callable[[], Tensors], Callable[[], Tensors], float]


def exercises(backend: str, device: str, truth_device: str, rows: int, length: int) -> Iterator[Exercise]:
    for objective in CHECKED:
        if objective.keep < 1 and rows * length > ONE_BY_ONE:
            continue
        gate = gates.gate_of(objective)
        data, batch = on(truth_device, objective, rows, length, ragged=True)
        expected = functools.partial(gates.truth, gate, data, batch, **gates.extras(objective, data))
        data, batch = on(device, objective, rows, length, ragged=True)
        for contestant in gates.ours(gate, data, batch, backend, {}, **gates.extras(objective, data)):
            yield f"{gates.describe(objective)}, {contestant.name}", contestant.run, expected, 2e-6
    for name, gate in presets.PRESETS.items():
        data_here, batch_here = preset_on(truth_device, name, rows, length, ragged=True)
        data_there, batch_there = preset_on(device, name, rows, length, ragged=True)
        expected = functools.partial(presets.truth, gate, data_here, batch_here)
        yield name, loss_of_preset(name, data_there, batch_there, backend), expected, 2e-6
    tokens = min(100 * -(-rows * length // 100), ONE_BY_ONE)
    for run, reference in zip(others(backend, tokens, device), others("reference", tokens, "cpu"), strict=True):
        yield run.case, run.call, reference.call, 2e-6
    yield from log_probabilities(backend, device, truth_device, rows)


def log_probabilities(backend: str, device: str, truth_device: str, rows: int) -> Iterator[Exercise]:
    """Log-probabilities from logits and from hidden states, with both gradients."""
    draw = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(rows, 24, generator=draw), torch.randn(1002, 24, generator=draw)
    targets = torch.randint(0, 1002, (rows,), generator=draw)
    upstream = torch.randn(2, rows, generator=draw).unbind()
    cases: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
        "token_logprobs": (hpo.token_logprobs, (hidden @ weight.t(),)),
        "linear_token_logprobs": (hpo.linear_token_logprobs, (hidden, weight)),
    }
    for name, (function, inputs) in cases.items():
        given = (function, inputs, targets, upstream)
        there = functools.partial(differentiated_at, device, torch.float32, backend, *given)
        here = functools.partial(differentiated_at, truth_device, torch.float64, "reference", *given)
        yield name, there, here, 1e-5


def differentiated_at(
    device: str,
    dtype: torch.dtype,
    backend: str,
    function: Callable[..., Any],
    inputs: tuple[torch.Tensor, ...],
    targets: torch.Tensor,
    upstream: tuple[torch.Tensor, ...],
) -> Tensors:
    leaves = tuple(each.to(device, dtype).requires_grad_() for each in inputs)
    there = tuple(each.to(device) for each in upstream)
    return with_gradient(functools.partial(function, backend=backend), leaves, targets.to(device), there)


# ---------------------------------------------------------------------------------------------------------------- bench


def event_microseconds(call: Callable[[], object]) -> float:
    """The median over samples of the mean time of a call, from events on the device; a sample takes a few milliseconds,
    or one call."""
    call()
    repeat = max(1, min(50, int(SAMPLE / sample(call, 3))))
    return statistics.median(sample(call, repeat) for _ in range(SAMPLES))


def sample(call: Callable[[], object], repeat: int) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeat):
        call()
    end.record()
    end.synchronize()
    return 1e3 * begin.elapsed_time(end) / repeat


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


def extra_bytes(call: Callable[[], object]) -> int:
    """The most memory that a call holds at once beyond the memory held before it, results included."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def synchronises(call: Callable[[], object]) -> bool:
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as error:
        if "synchroniz" not in str(error):  # as PyTorch spells its refusal
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def copy_gigabytes_per_second() -> float:
    source = torch.rand(1 << 28, device="cuda")
    target = torch.empty_like(source)
    return 8e-3 * source.numel() / event_microseconds(lambda: target.copy_(source))


def measure(run: Run, bandwidth: float, is_peer: bool) -> dict[str, Any]:
    floor = 1e-3 * run.bytes / bandwidth
    result: dict[str, Any] = {"case": run.case, "contestant": run.contestant, "floor_microseconds": floor}
    try:
        result["extra_bytes"] = extra_bytes(run.call)
        result["event_microseconds"] = event_microseconds(run.call)
        result["launches"] = launches(run.call)
        result["synchronises"] = synchronises(run.call)
        result["graph_microseconds"] = graph_microseconds(run.call)
    except Exception as error:  # a failure must not end the measurement of other runs
        result["error"] = f"{type(error).__name__}: {error}"
    too_many = run.launches is not None and sum(result.get("launches", {}).values()) > run.launches
    is_late = run.launches is not None and (result.get("synchronises", False) or too_many)
    result["missed"] = is_late or ("error" in result and not is_peer)
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
    """Times every run; returns the number of runs of ours that fail, and of those with a limit of launches that exceed
    it or synchronise."""
    bandwidth = copy_gigabytes_per_second()
    versions = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
    facts = {"backend": backend, "copy_gigabytes_per_second": bandwidth, **versions}
    print(facts)
    missed = 0
    with open(path, "a") as file:
        print(json.dumps(facts), file=file, flush=True)
        for run in runs(backend):
            result = measure(run, bandwidth, is_peer=backend == "peers")
            missed += result["missed"]
            print(json.dumps(result), file=file, flush=True)
            print(line(result), flush=True)
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("exercise", "bench"))
    parser.add_argument("backend", help="cuda, triton, ..., or for bench: peers")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--out", type=Path, default=Path("gpu_bench.jsonl"))
    arguments = parser.parse_args()
    if arguments.what == "exercise":
        return int(exercise(arguments.backend, arguments.device, arguments.size) > 0)
    return int(bench(arguments.backend, arguments.out) > 0)


if __name__ == "__main__":
    sys.exit(main())
