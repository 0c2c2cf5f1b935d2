"""CUDA kernels as nvcc compiles them for sm_90: registers, spills and load width. No GPU is needed.

``python tests/test_cuda_compile.py`` writes docs/kernels_sm90.md, the baseline of these tests.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
from compiled import kept

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
BASELINE = ROOT / "docs" / "kernels_sm90.md"
FLAGS = ["-std=c++17", "-O3", "-fmad=false", "-Icsrc/include", "-cubin", "-Xptxas", "-v"]


class Loop(NamedTuple):
    """The shortest loop with 128-bit loads of a kernel, which runs if everything is aligned."""

    instructions: int
    loads: int  # of 128 bits
    stores: int
    exponentials: int
    evicted_first: int  # of the loads and stores
    last_load: int  # the place of the last one of 128 bits among the instructions


class Kernel(NamedTuple):
    name: str
    registers: int
    spilled: int  # bytes stored and loaded
    stack: int  # bytes
    shared: int  # bytes, static
    wide_loads: int | None  # 128-bit loads in the code; None: no disassembler here
    loop: Loop | None = None
    writing: Loop | None = None  # the shortest one that also has 128-bit stores, where it is another


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
        return sorted(_parse(done.stdout + done.stderr, _disassembled(cubin)))


def table(kernels: list[Kernel], release: str) -> str:
    rows = [
        "# CUDA kernels on sm_90",
        "",
        f"Compiled by nvcc {release}, never run on a GPU; written by `python tests/test_cuda_compile.py`.",
        "`tests/test_cuda_compile.py` fails on a spill, on more registers than here (4 are tolerated),",
        "and where a kernel loses its 128-bit loads.",
        "",
        "| kernel | registers | spilled bytes | stack bytes | static shared bytes | 128-bit loads |",
        "|---|---|---|---|---|---|",
    ]
    for k in kernels:
        loads = "?" if k.wide_loads is None else k.wide_loads
        rows.append(f"| `{k.name}` | {k.registers} | {k.spilled} | {k.stack} | {k.shared} | {loads} |")
    rows += [
        "",
        "The loops that read logits, where rows are aligned: 32 logits of 16 bits, or 16 of 32 bits, in an iteration.",
        "",
        "| kernel | instructions | a logit | 128-bit loads | 128-bit stores | exponentials |",
        "|---|---|---|---|---|---|",
    ]
    for k in kernels:
        if k.name.startswith(LOGIT_KERNELS):
            for name, loop in ((k.name, k.loop), (f"{k.name}, gradient", k.writing)):
                if loop:
                    of_logit = loop.instructions / loop.loads / logits_of(k)
                    rows.append(
                        f"| `{name}` | {loop.instructions} | {of_logit:.1f} | {loop.loads} | {loop.stores} | "
                        f"{loop.exponentials} |"
                    )
    return "\n".join(rows) + "\n"


LOGIT_KERNELS = ("sum_rows", "differentiate_rows", "differentiate_loss")


def logits_of(kernel: Kernel) -> int:
    """The number of logits in a 128-bit load of a kernel that reads logits."""
    return 4 if "Float32" in kernel.name else 8


def read_table(text: str) -> tuple[str, dict[str, Kernel]]:
    release = re.search(r"nvcc ([\d.]+),", text)[1]  # type: ignore[index]
    row = re.compile(r"^\| `(.+?)` \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+|\?) \|$", re.M)
    kernels = [
        Kernel(m[1], *map(int, m.group(2, 3, 4, 5)), None if m[6] == "?" else int(m[6])) for m in row.finditer(text)
    ]
    return release, {kernel.name: kernel for kernel in kernels}


def _parse(log: str, code: dict[str, list[str]] | None) -> list[Kernel]:
    kernels = []
    for entry in log.split("Compiling entry function '")[1:]:
        symbol = entry.split("'")[0]

        def number(pattern: str, entry: str = entry) -> int:
            found = re.search(pattern, entry)
            return int(found[1]) if found else 0

        spilled = number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads")
        kernels.append(
            Kernel(
                _name(symbol),
                number(r"Used (\d+) registers"),
                spilled,
                number(r"(\d+) bytes stack frame"),
                number(r"(\d+) bytes smem"),
                None if code is None else sum(_is_wide("LDG", line) for line in code[symbol]),
                *((None, None) if code is None else _loops(code[symbol])),
            )
        )
    return kernels


def _name(symbol: str) -> str:
    """``sweep<1, 0, 0>`` from a mangled symbol: the last of its nested names, then types, bools and ints."""
    rest, name = symbol.removeprefix("_ZN"), ""
    while found := re.match(r"\d+", rest):
        length = int(found[0])
        name, rest = rest[found.end() :][:length], rest[found.end() + length :]
    arguments = re.match(r"I((?:L[bi]\d+E|NS_\d+[A-Za-z]+?\d*E)+)E", rest)
    values = re.findall(r"(?:L[bi]|NS_\d+)([A-Za-z]*?\d*)E(?=L|N|$)", arguments[1]) if arguments else []
    return f"{name}<{', '.join(values)}>" if values else name


def _disassembled(cubin: Path) -> dict[str, list[str]] | None:
    """The lines of every kernel."""
    disassembler = _find_nvdisasm()
    if disassembler is None:
        return None
    code = subprocess.run([disassembler, "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
    lines: dict[str, list[str]] = {}
    symbol = ""
    for line in code.splitlines():
        if found := re.match(r"\.text\.(\w+):", line):
            symbol = found[1]
        if symbol:
            lines.setdefault(symbol, []).append(line)
    return lines


def _is_wide(operation: str, line: str) -> bool:
    """Whether a load or store is of 128 bits; EF: evicted first."""
    return re.search(rf"{operation}\.E(\.EF)?\.128", line) is not None


def _loops(lines: list[str]) -> tuple[Loop | None, Loop | None]:
    labels = {line.rstrip(": \t"): at for at, line in enumerate(lines) if line.startswith(".L_")}
    found = []
    for end, line in enumerate(lines):
        branch = re.search(r"(?:BRA|CALL)\S* .*`\((\.L_\w+)\)", line)
        if branch and labels.get(branch[1], end) < end:
            body = [each for each in lines[labels[branch[1]] : end + 1] if re.match(r"\s+/\*[0-9a-f]{4,}\*/", each)]
            wide = (sum(_is_wide(name, each) for each in body) for name in ("LDG", "STG"))
            others = (sum(name in each for each in body) for name in ("MUFU.EX2", ".EF.128"))
            last = max((at for at, each in enumerate(body) if _is_wide("LDG", each)), default=-1)
            found.append(Loop(len(body), *wide, *others, last))
    first = min((loop for loop in found if loop.loads), default=None)
    writing = min((loop for loop in found if loop.loads and loop.stores), default=None)
    return first, None if writing == first else writing


def _find_nvdisasm() -> str | None:
    """The nvdisasm of CUDA, or of Triton's wheel."""
    found = shutil.which("nvdisasm") or shutil.which("nvdisasm", path="/usr/local/cuda/bin")
    spec = importlib.util.find_spec("triton")
    if found or spec is None or not spec.submodule_search_locations:
        return found
    carried = Path(spec.submodule_search_locations[0]) / "backends" / "nvidia" / "bin" / "nvdisasm"
    return str(carried) if carried.exists() else None


# -------------------------------------------------------------------------------------------------------------- tests

NVCC = find_nvcc()
pytestmark = pytest.mark.skipif(NVCC is None, reason="nvcc was found neither in PATH nor in /usr/local/cuda/bin")

SLACK = 4  # registers that come and go with any edit

# Kernels that read every token or score must read 16 bytes at once to use the bandwidth.
WIDE = {
    "sweep", "sum_tiles<4>", "prepare_leaves", "sweep_leaves", "deliver_gradient", "correct_tokens",
    "select_top", "count_rows", "sum_rows", "differentiate_rows", "differentiate_loss",
}  # fmt: skip

# The limit of instructions per aligned logit. An SM of an H100 issues 4 per cycle and gets 13 bytes from memory, so a
# kernel that reads logits of 16 bits has 20 per logit, one that also writes them 40, and for 32 bits both are doubled.
SLOTS = {
    ("sum_rows", 16): 13, ("sum_rows", 32): 16, ("differentiate_rows", 16): 12, ("differentiate_rows", 32): 24,
    ("sum_rows<Bfloat16, 3, 0>", 16): 10, ("sum_rows<Float16, 3, 0>", 16): 10,
}  # fmt: skip


CACHE = ROOT / "build" / "cuda"
BUILT = importlib.util.find_spec("hpo_core._cuda") is not None


@functools.cache
def fingerprint() -> str:
    """A digest of everything that determines nvcc's output for a file."""
    assert NVCC is not None
    version = subprocess.check_output([NVCC, "--version"], text=True)
    digest = hashlib.sha256(repr((FLAGS, version, _find_nvdisasm())).encode())
    for path in sorted(path for folder in ("cuda", "include") for path in (ROOT / "csrc" / folder).rglob("*.*")):
        digest.update(f"{path.relative_to(ROOT)}\n{path.read_text()}".encode())
    return digest.hexdigest()


def kernels_of(source: Path, target: int = 90) -> list[Kernel]:
    assert NVCC is not None
    nvcc, path = NVCC, CACHE / f"{source.stem}-sm_{target}.json"
    kernels = [Kernel(*kernel) for kernel in kept(path, fingerprint(), lambda: compile_kernels(nvcc, source, target))]
    return [
        kernel._replace(loop=kernel.loop and Loop(*kernel.loop), writing=kernel.writing and Loop(*kernel.writing))
        for kernel in kernels
    ]


@pytest.fixture
def kernels() -> dict[str, Kernel]:
    return {kernel.name: kernel for source in SOURCES for kernel in kernels_of(source)}


@pytest.fixture(scope="module")
def baseline() -> tuple[str, dict[str, Kernel]]:
    return read_table(BASELINE.read_text())


@(lambda test: test) if BUILT else pytest.mark.long
def test_the_package_holds_code_for_every_architecture(tmp_path):
    """The package is the one installed here or, if it has no CUDA extension, one built with it."""
    package = ROOT / "hpo_core"
    if not BUILT:
        command = [sys.executable, "setup.py", "-q", "build", "--build-lib", str(tmp_path)]
        subprocess.run(command, cwd=ROOT, env=os.environ | {"HPO_CORE_CUDA": "1"}, check=True)
        package = tmp_path / "hpo_core"
    info = json.loads((package / "_build_info.json").read_text())["extensions"]["_cuda"]
    assert {arch.partition("+")[0] for arch in info["archs"]} >= {"80", "90", "100", "120"}
    assert any(arch.endswith("+ptx") for arch in info["archs"])


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_no_kernel_spills(source):
    assert {kernel.name: kernel.spilled for kernel in kernels_of(source) if kernel.spilled} == {}


@pytest.mark.long
@pytest.mark.parametrize("target", [80, 100, 120])
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_no_kernel_spills_elsewhere(source, target):
    assert {kernel.name: kernel.spilled for kernel in kernels_of(source, target) if kernel.spilled} == {}


def test_every_kernel_is_in_the_table(kernels, baseline):
    assert set(kernels) == set(baseline[1]), "run python tests/test_cuda_compile.py"


def test_no_kernel_takes_more_registers(kernels, baseline):
    release, expected = baseline
    if nvcc_release(NVCC) != release:
        pytest.skip(f"the table is of nvcc {release}")
    more = {
        n: (k.registers, expected[n].registers)
        for n, k in kernels.items()
        if k.registers > expected[n].registers + SLACK
    }
    assert more == {}, "kernel: (now, before); if it is worth it, run python tests/test_cuda_compile.py"


def test_token_sweeps_load_128_bits(kernels):
    if any(kernel.wide_loads is None for kernel in kernels.values()):
        pytest.skip("no nvdisasm: neither CUDA's nor the one in Triton's wheel")
    narrow = [n for n, k in kernels.items() if {n, n.partition("<")[0]} & WIDE and k.wide_loads == 0]
    assert narrow == []


@pytest.mark.parametrize("target", [90, *(pytest.param(target, marks=pytest.mark.long) for target in (80, 100, 120))])
def test_instructions_per_logit(target):
    """Each logit takes one exponential, besides the one for the rescaling in an iteration of four loads."""
    if _find_nvdisasm() is None:
        pytest.skip("no nvdisasm: neither CUDA's nor the one in Triton's wheel")
    kernels = kernels_of(ROOT / "csrc/cuda/logprobs.cu", target)
    fused = kernels_of(ROOT / "csrc/cuda/loss_from_logits.cu", target)
    assert len(kernels) == 21 and len(fused) == 6
    loops = [(kernel, kernel.name.partition("<")[0], kernel.loop) for kernel in kernels]
    loops += [(kernel, "sum_rows", kernel.loop) for kernel in fused]
    loops += [(kernel, "differentiate_rows", kernel.writing) for kernel in fused]
    for kernel, kind, loop in loops:
        logits = loop.loads * logits_of(kernel)
        bits = 128 // logits_of(kernel)
        allowed = SLOTS.get((kernel.name, bits)) or SLOTS[kind, bits]
        assert loop.instructions / logits <= allowed, kernel
        sums = kind == "sum_rows"
        assert loop.stores == (0 if sums else loop.loads)
        assert loop.exponentials == (logits + 1 if sums else 0 if "Float32" in kernel.name else logits), kernel
        # The second reading of a row and its gradient leave the cache to the rows that are still read.
        again = kernel in fused and not sums
        assert loop.evicted_first == (loop.loads + loop.stores if again else 0), kernel
        # A step is loaded while the one before it is computed, so that few blocks keep memory busy.
        assert kernel not in fused or loop.last_load < loop.instructions / 3, kernel


if __name__ == "__main__":
    compiler = find_nvcc()
    if compiler is None:
        raise SystemExit("nvcc was found neither in PATH nor in /usr/local/cuda/bin")
    everything = [kernel for source in SOURCES for kernel in compile_kernels(compiler, source, 90)]
    BASELINE.write_text(table(everything, nvcc_release(compiler)))
