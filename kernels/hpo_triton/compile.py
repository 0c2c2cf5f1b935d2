"""Compiles kernels ahead of time for GPUs that need not be present, and reports their resources.

    python -m hpo_core._triton.compile          the kernels of each path, for every target
    python -m hpo_core._triton.compile 90       for compute capability 9.0 alone, gfx942 for an MI300
    python -m hpo_core._triton.compile --all    in every structure a gate can have (an hour of compiling)

TRITON_INTERPRET=1 must not be set: the interpreter compiles nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from . import launch
from .compiled_paths import NamedCall, every_path, paths

Target = int | str  # a compute capability of NVIDIA, such as 90, or an architecture of AMD, such as gfx942
TARGETS: tuple[Target, ...] = (80, 90, 100, 120, "gfx942", "gfx950")


# ------------------------------------------------------------------------------------------------------- compilation


class _Target:
    """A driver for a GPU that is not there: enough for Triton to compile for it, too little to start anything."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return GPUTarget(*(("hip", self.target, 64) if isinstance(self.target, str) else ("cuda", self.target, 32)))

    def get_current_device(self) -> Target:
        return self.target  # kernels are cached by device

    def get_current_stream(self, device: Target) -> int:
        return 0


@contextlib.contextmanager
def compiling(target: Target, wanted: Callable[[str, str], bool] | None = None) -> Iterator[list[Any]]:
    """Inside this context the ops of this package, called with tensors on the CPU, compile their launches and compute
    nothing. The context gives the compiled kernels, one per launch; launches of one specialisation give one object.

    ``wanted(name, key)``, with a kernel's name and Triton's key of the specialisation, decides at each launch that is
    not compiled yet; ``None`` stands for a kernel that is not wanted.
    """

    def declined(*, key: str, fn: Any, **_: Any) -> bool:
        return wanted is not None and not wanted(fn.name, key)

    driver.set_active(_Target(target))
    amd = launch.amd
    launch.compiled, triton.knobs.runtime.jit_cache_hook = [], declined
    launch.amd = isinstance(target, str)
    try:
        yield launch.compiled
    finally:
        launch.compiled = triton.knobs.runtime.jit_cache_hook = None
        launch.amd = amd
        with contextlib.suppress(RuntimeError):  # without a GPU there is no driver to restore
            driver.reset_active()


class Report(NamedTuple):
    """The resources of an assembled kernel."""

    kernel: str
    registers: int  # per thread; of AMD the vector registers
    spilled: int  # bytes per thread in local memory
    shared: int  # bytes per program
    loads: dict[str, int]  # the number of loads from global memory by width in bits
    stores: dict[str, int]  # of stores, likewise; here and below of NVIDIA alone
    barriers: int = 0  # of the program
    fences: int = 0  # orders of memory on the whole device
    doubles: int = 0  # operations with float64
    read_only: int = 0  # loads through the read-only path
    orders: tuple[str, ...] = ()  # barriers of the program and orders of the device, in the order of the code
    cooperative: bool = False  # whether all programs of a launch run at once, so that one can wait for the others
    binary: str = ""  # the file in Triton's cache
    narrowed: int = 0  # tensors of int64 that are cut to 32 bits; of AMD alone


def report(compiled: Any) -> Report:
    return _report_of_amd(compiled) if "amdgcn" in compiled.asm else _report_of_nvidia(compiled)


def _report_of_amd(compiled: Any) -> Report:
    source = compiled.asm["amdgcn"]
    registers, spilled, scratch = (
        int(re.search(rf"\.{name}:\s+(\d+)", source)[1])  # type: ignore[index]
        for name in ("vgpr_count", "vgpr_spill_count", "private_segment_fixed_size")
    )
    loads: Counter[str] = Counter()
    for words, byte_or_short in re.findall(r"(?:global|buffer)_load_(?:dword(?:x(\d))?|[us](byte|short))", source):
        loads[{"byte": "8", "short": "16"}.get(byte_or_short) or str(32 * int(words or 1))] += 1
    name, shared = compiled.metadata.name, compiled.metadata.shared
    narrowed = len(re.findall(r"arith\.trunci [^\n]*xi64[^\n]* to tensor<[^\n]*xi32", compiled.asm["ttgir"]))
    return Report(name, registers, max(4 * spilled, scratch), shared, dict(loads), {}, narrowed=narrowed)


def _report_of_nvidia(compiled: Any) -> Report:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    binary = next(path for name, path in compiled.metadata_group.items() if name.endswith(".cubin"))
    usage = subprocess.run([tool, "-res-usage", binary], capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK", "LOCAL"))
    source = compiled.asm["ptx"]

    def accesses(operation: str) -> dict[str, int]:
        matches = re.findall(rf"\b{operation}\.global\S*?(?:\.v(\d))?\.b(\d+)", source)
        return dict(Counter(str(int(count or 1) * int(bits)) for count, bits in matches))

    def count(operation: str) -> int:
        return len(re.findall(operation, source))

    fences = r"\b(?:fence|membar)\.|\b(?:atom|red)\.\S*(?:acquire|release|acq_rel)"
    orders = re.findall(r"\bbar\.(sync)|\b(?:atom|red|ld)\.global\.gpu\.\S*(relaxed|release|acquire|acq_rel)", source)
    return Report(
        compiled.metadata.name, registers, stack + local, compiled.metadata.shared, accesses("ld"), accesses("st"),
        count(r"\bbar(?:rier)?\.sync"), count(fences), count(r"\b(?:add|sub|mul|fma|div|setp|min|max)\S*\.f64\b"),
        count(r"\bld\.global\.nc\b"), tuple(map("".join, orders)), compiled.metadata.launch_cooperative_grid,
        binary,
    )  # fmt: skip


def specialisations(
    calls: Iterable[NamedCall], target: Target, names: Container[str] | None = None, share: tuple[int, int] = (0, 1)
) -> Iterator[tuple[str, Any]]:
    """Each kernel compiled once, with the first path that launches it.

    ``names`` selects some of them by "path/kernel"; a share (i, n) takes every n-th of these, starting at i.
    """
    decided: set[tuple[str, str]] = set()
    yielded: set[int] = set()
    turns = itertools.cycle(range(share[1]))
    for path, call in calls:

        def wanted(kernel: str, key: str, path: str = path) -> bool:
            if (kernel, key) in decided:
                return False
            decided.add((kernel, key))
            return (names is None or f"{path}/{kernel}" in names) and next(turns) == share[0]

        with compiling(target, wanted) as compiled:
            call()
        for kernel in compiled:
            if kernel is not None and id(kernel) not in yielded:
                yielded.add(id(kernel))
                yield path, kernel


def _target(name: str) -> Target:
    return int(name) if name.isdigit() else name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", type=_target, default=TARGETS, help="such as 90 or gfx942")
    parser.add_argument("--all", action="store_true", help="every structure instead of the ends of each path")
    parser.add_argument("--only", nargs="+", metavar="PATH/KERNEL", help="these alone")
    parser.add_argument("--share", nargs=2, type=int, default=(0, 1), metavar=("I", "N"), help="each N-th from I")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    arguments = parser.parse_args()
    for target in arguments.targets:
        calls = every_path() if arguments.all else paths()
        for path, kernel in specialisations(calls, target, arguments.only, arguments.share):
            resources = report(kernel)
            if arguments.json:
                print(json.dumps({"target": target, "path": path, **resources._asdict()}), flush=True)
            else:
                loads = "  ".join(f"{count} x {bits} bit" for bits, count in sorted(resources.loads.items()))
                name = target if isinstance(target, str) else f"sm_{target}"
                print(
                    f"{name:6}  {resources.kernel:22} {resources.registers:3} registers  {resources.spilled} spilled  "
                    f"{resources.shared:5} shared  {loads:60} {path}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
