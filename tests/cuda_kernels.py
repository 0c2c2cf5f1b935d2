"""CUDA kernels as nvcc compiles them: what the assembler reports, and what is counted in the code. No GPU is needed."""

from __future__ import annotations

import functools
import hashlib
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from compiled import kept
from sass import Loop, code_of, counts, disassembled, find_nvdisasm, loop_of, loops, with_way

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
READERS = [ROOT / "tests" / name for name in ("cuda_kernels.py", "sass.py")]
CACHE = ROOT / "build" / "cuda"
FLAGS = ["-std=c++17", "-O3", "-fmad=false", "-Icsrc/include", "-cubin", "-Xptxas", "-v"]
TARGETS = (80, 90, 100, 120)
LOGIT_KERNELS = ("sum_rows", "differentiate_rows", "differentiate_loss")


class Kernel(NamedTuple):
    """Counts of the code are None where no disassembler is found."""

    name: str
    registers: int
    spilled: int  # bytes stored and loaded
    stack: int  # bytes
    shared: int  # bytes, static
    wide_loads: int | None  # 128-bit loads
    wide_stores: int | None = None
    read_only: int | None = None  # loads through the read-only path
    doubles: int | None = None  # instructions with float64
    barriers: int | None = None  # of the block
    fences: int | None = None  # of the device
    loop: Loop | None = None
    writing: Loop | None = None  # the shortest one with the most 128-bit stores, where these are more


def find_nvcc() -> str | None:
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def nvcc_release(nvcc: str) -> str:
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    return re.search(r"release ([\d.]+)", version)[1]  # type: ignore[index]


def compile_kernels(nvcc: str, source: Path, target: int) -> list[Kernel]:
    """The kernels of a file for sm_``target``, in the order of their names."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernels.cubin"
        command = [nvcc, *FLAGS, f"-arch=sm_{target}", "-o", str(cubin), str(source.relative_to(ROOT))]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{source.name}: {done.stdout}{done.stderr}")
        return sorted(_parse(done.stdout + done.stderr, disassembled(cubin)))


def logits_of(kernel: Kernel) -> int:
    """The number of logits in a 128-bit load of a kernel that reads logits."""
    return 4 if "Float32" in kernel.name else 8


def _parse(log: str, code: dict[str, list[str]] | None) -> list[Kernel]:
    kernels = []
    for entry in log.split("Compiling entry function '")[1:]:
        symbol = entry.split("'")[0]

        def number(pattern: str, entry: str = entry) -> int:
            found = re.search(pattern, entry)
            return int(found[1]) if found else 0

        spilled = number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads")
        name = _name(symbol)
        kernels.append(
            Kernel(
                name,
                number(r"Used (\d+) registers"),
                spilled,
                number(r"(\d+) bytes stack frame"),
                number(r"(\d+) bytes smem"),
                *((None,) * 8 if code is None else (*counts(code[symbol]), *_loops(name, code[symbol]))),
            )
        )
    return kernels


def _name(symbol: str) -> str:
    """``sweep<1, 0>`` from a mangled symbol: the last of its nested names, then types, bools and ints."""
    rest, name = symbol.removeprefix("_ZN"), ""
    while found := re.match(r"\d+", rest):
        length = int(found[0])
        name, rest = rest[found.end() :][:length], rest[found.end() + length :]
    arguments = re.match(r"I((?:L[bi]\d+E|NS_\d+[A-Za-z]+?\d*E)+)E", rest)
    values = re.findall(r"(?:L[bi]|NS_\d+)([A-Za-z]*?\d*)E(?=L|N|$)", arguments[1]) if arguments else []
    return f"{name}<{', '.join(values)}>" if values else name


def _loops(name: str, lines: list[str]) -> tuple[Loop | None, Loop | None]:
    code, labels = code_of(lines)
    found = [each for each in loops(code, labels) if each[0].loads]
    if not found:
        return None, None
    innermost = [each for each in found if sum(each[1] <= begin and end <= each[2] for _, begin, end in found) == 1]
    if name.startswith("sweep_leaves"):
        return with_way(code, labels, max(innermost)), None
    first = min(innermost, key=lambda each: (each[0].stores, each))
    writing = min(innermost, key=lambda each: (-each[0].stores, each))
    other = with_way(code, labels, writing) if writing[0].stores > first[0].stores else None
    return with_way(code, labels, first), other


@functools.cache
def fingerprint(source: Path) -> str:
    """A digest of everything that determines what is kept of a file: itself, all headers, and the compiler."""
    version = subprocess.check_output([str(find_nvcc()), "--version"], text=True)
    digest = hashlib.sha256(repr((FLAGS, version, find_nvdisasm())).encode() + b"".join(map(Path.read_bytes, READERS)))
    for path in (source, *sorted([*ROOT.glob("csrc/cuda/*.cuh"), *ROOT.glob("csrc/include/**/*.h")])):
        digest.update(f"{path.relative_to(ROOT)}\n{path.read_text()}".encode())
    return digest.hexdigest()


def kernels_of(source: Path, target: int = 90) -> list[Kernel]:
    nvcc, path = str(find_nvcc()), CACHE / f"{source.stem}-sm_{target}.json"
    made = kept(path, fingerprint(source), lambda: compile_kernels(nvcc, source, target))
    kernels = [Kernel(*kernel) for kernel in made]
    return [
        each._replace(
            **{name: loop and loop_of(loop) for name, loop in zip(("loop", "writing"), each[-2:], strict=True)}
        )
        for each in kernels
    ]


def every_kernel(target: int = 90) -> dict[str, Kernel]:
    kernels = [kernel for source in SOURCES for kernel in kernels_of(source, target)]
    by_name = {kernel.name: kernel for kernel in kernels}
    twice = [name for name, count in Counter(kernel.name for kernel in kernels).items() if count > 1]
    assert twice == [], "two kernels of csrc/cuda have one name, and a row of docs/gpu.md is one kernel: rename one"
    return by_name
