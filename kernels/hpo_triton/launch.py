"""The declaration and launch of every kernel of this package: the parameters that specialise it, and its options."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton
import triton.language as tl

# Triton's interpreter runs each operation as one call of NumPy: few calls count there, so blocks are larger.
INTERPRETED = bool(triton.knobs.runtime.interpret)

WARPS = 8  # of a program, unless its launch sets num_warps
REGISTERS = 128  # of a thread, for kernels that need fewer: by default the assembler keeps some to 64 or 80, and spills
# A sweep has at most this many programs, about as many as the largest GPU holds at once; each takes more steps instead.
MOST_PROGRAMS = 512

launches: Counter[str] = Counter()  # by kernel, since this package was imported
amd = torch.version.hip is not None
compiled: list[Any] | None = None  # where compile.py gathers kernels that are compiled instead of started


def kernel(function: Callable[..., None]) -> Any:
    """A Triton kernel whose numbers and addresses are run-time values: only its ``constexpr`` structure, and the
    presence of optional tensors, may cost a compilation.

    By default Triton also compiles anew for integers that are 1 or divisible by 16 and for addresses divisible by 16.
    Numbers are annotated in the signature, because Triton types a number without annotation by its value. Each tensor
    is a parameter: one in a tuple is specialised by the alignment of its address, whatever the tuple is declared to be.
    """
    parameters = inspect.signature(function).parameters.values()
    run_time = [parameter.name for parameter in parameters if "constexpr" not in str(parameter.annotation)]
    return triton.jit(function, do_not_specialize=run_time, do_not_specialize_on_alignment=run_time)


def launch(kernel: Any, programs: int, *arguments: Any, **structure: Any) -> None:
    """Start ``programs`` programs on the device of the first argument.

    Multiply-adds are fused only where the source says so: Triton's default differs between versions, and so would bits.
    Integers may overflow: hashes wrap, and so do numbers that are selected away; ``TRITON_DEBUG=1`` would stop there.
    """
    launches[kernel.fn.__name__] += 1
    options = {"num_warps": WARPS, **structure, "enable_fp_fusion": False, "sanitize_overflow": False}
    if amd:  # waves of AMD have 64 threads, and its compiler refuses a bound on registers
        options["num_warps"] = max(options["num_warps"] // 2, 1)
        options.pop("maxnreg", None)
    if compiled is not None:
        compiled.append(kernel.warmup(*arguments, grid=(programs,), **options))
    elif programs > 0:
        with torch.cuda.device_of(arguments[0]):
            kernel[(programs,)](*arguments, **options)
    # Every launch would compare the constants of this package with those that were compiled, for half of its host time.
    if getattr(kernel, "used_global_vals", None):
        kernel.used_global_vals = {}


def programs_for(items: int, step: int) -> int:
    """The number of programs of a sweep that takes ``step`` items at a time."""
    return max(1, min(triton.cdiv(items, step), MOST_PROGRAMS))


def programs_together(device: torch.device, items: int, step: int, registers: int = REGISTERS) -> tuple[int, bool]:
    """The same for programs that wait for each other in one cooperative launch, and whether there can be one: the
    interpreter runs programs one after another, and on AMD cooperative launches are untried.

    Two programs of 128 registers a thread fit into a multiprocessor. A quarter of the device stays free: a collective
    operation of another stream may hold its multiprocessors until other devices have come to it.
    """
    if INTERPRETED or amd:
        return programs_for(items, step), False
    fit = 2 * REGISTERS // registers
    return max(1, min(triton.cdiv(items, step), processors_and_cache(device)[0] * fit * 3 // 4)), True


@triton.jit
def wait_for_programs(arrived, expected):
    """Waits until ``expected`` programs are here: their writes can then be read."""
    tl.debug_barrier()  # the release below is of one thread, and is for the writes of all threads of the program
    tl.atomic_add(arrived, 1, sem="release")
    while tl.atomic_add(arrived, 0, sem="acquire") < expected:
        pass
    tl.debug_barrier()


def launch_steps(kernel: Any, steps: dict[int, int], registers: int, *arguments: Any, **structure: Any) -> None:
    """Start a kernel for the steps FIRST to LAST, each with its number of blocks: in one cooperative launch, whose
    programs wait for each other between steps, or else in a launch for each step, with a program for each block."""
    names, blocks = list(steps), max(steps.values())
    programs, cooperative = programs_together(arguments[0].device, blocks, 1, registers)
    if cooperative and len(names) > 1:
        parts = [(names[0], names[-1], programs)]
    else:
        parts, cooperative = [(step, step, blocks) for step, blocks in steps.items()], False
    for first, last, count in parts:
        launch(
            kernel, count, *arguments, FIRST=first, LAST=last, launch_cooperative_grid=cooperative, maxnreg=registers,
            **structure,
        )  # fmt: skip


def counter(device: torch.device) -> torch.Tensor:
    """A number ``[1]`` that is 0 before a launch on the current stream; the launch sets it back to 0.

    The launches of a stream share one, because they run one after the other. A graph has one of its own, which each
    replay clears, because a replay may run beside the launches of any stream.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    return _counter_of(device, torch.cuda.current_stream(device).cuda_stream)


@functools.cache
def _counter_of(device: torch.device, stream: int) -> torch.Tensor:
    """Another thread allocates it: while ``torch.compile`` warms up CUDA graphs, it puts the allocations of this thread
    into a pool in which no memory may stay."""
    with ThreadPoolExecutor(1) as thread:
        zero = thread.submit(torch.zeros, 1, dtype=torch.int32, device=device).result()
    torch.cuda.current_stream(device).wait_stream(torch.cuda.default_stream(device))
    return zero


@functools.cache
def processors_and_cache(device: torch.device) -> tuple[int, int]:
    """The multiprocessors of a device and the bytes of its L2 cache; those of an H100 where there is no device."""
    if device.type != "cuda":
        return 132, 50 << 20
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.L2_cache_size


def aligned(*tensors: torch.Tensor | None) -> bool:
    """Whether four consecutive elements that start at a multiple of four are always aligned as one vector."""
    return all(tensor is None or tensor.data_ptr() % (4 * tensor.element_size()) == 0 for tensor in tensors)
