"""CUDA kernels as nvcc compiles them: what the assembler reports, and what is counted in the code. No GPU is needed."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import itertools
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from compiled import kept

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
CACHE = ROOT / "build" / "cuda"
FLAGS = ["-std=c++17", "-O3", "-fmad=false", "-Icsrc/include", "-cubin", "-Xptxas", "-v"]
TARGETS = (80, 90, 100, 120)
LOGIT_KERNELS = ("sum_rows", "differentiate_rows", "differentiate_loss")


class Way(NamedTuple):
    """Instructions of a way through an iteration."""

    instructions: int
    floats: int  # arithmetic of float32, and special functions
    doubles: int  # arithmetic of float64, and conversions to and from it
    accesses: int  # to memory, shared memory included, and exchanges between lanes


class Loop(NamedTuple):
    """The shortest loop with 128-bit loads of a kernel, which runs if everything is aligned. Of a sweep under levels it
    is the longest without another inside: the loops of its sums and its delivery stand in kernels of their own, too."""

    instructions: int
    loads: int  # of 128 bits
    stores: int
    exponentials: int
    evicted_first: int  # of the loads and stores
    last_load: int  # the place of the last one of 128 bits among the instructions
    way: Way  # the shortest on which all of these accesses are made


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
                *((None,) * 8 if code is None else (*_counts(code[symbol]), *_loops(name, code[symbol]))),
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


def _disassembled(cubin: Path) -> dict[str, list[str]] | None:
    """The lines of every kernel."""
    disassembler = find_nvdisasm()
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
    return f"{operation}.E.128" in line or f"{operation}.E.EF.128" in line


INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?);")
FLOAT = r"^(?:@\S+ )?(?:F(?:ADD|MUL|FMA|SETP|SEL|MNMX3?|SET|CHK|RND)|MUFU|H(?:ADD|MUL|FMA|MNMX|SETP)2|F2F|F2I|I2F)\b"
DOUBLE = r"\bD(?:ADD|MUL|FMA|SETP|MNMX)\b|\b(?:F2F|F2I|I2F|FRND)\S*F64"
ACCESS = r"^(?:@\S+ )?(?:LD[GS]?|ST[GS]?|ATOM[GS]?|REDG?|SHFL)\b"


def _number(code: list[str], pattern: str) -> int:
    return sum(map(bool, map(re.compile(pattern).search, code)))


def _counts(lines: list[str]) -> tuple[int, ...]:
    code = [found[1] for line in lines if (found := INSTRUCTION.match(line))]
    wide = (sum(_is_wide(name, each) for each in code) for name in ("LDG", "STG"))
    return *wide, *(_number(code, each) for each in (r"LDG\S*CONSTANT", DOUBLE, r"\bBAR\.", r"\bMEMBAR\."))


def _loops(name: str, lines: list[str]) -> tuple[Loop | None, Loop | None]:
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in lines:
        if line.startswith(".L_"):
            labels[line.rstrip(": \t")] = len(code)
        elif instruction := INSTRUCTION.match(line):
            code.append(instruction[1])
    wide = [[_is_wide(access, each) for each in code] for access in ("LDG", "STG")]
    marks = (*wide, *([part in each for each in code] for part in ("MUFU.EX2", ".EF.128")))
    before = [list(itertools.accumulate(marked, initial=0)) for marked in marks]  # of a mark, at each instruction
    latest = list(itertools.accumulate((at if load else -1 for at, load in enumerate(wide[0])), max))
    found = []
    for end, each in enumerate(code):
        branch = re.search(r"(?:BRA|CALL)\S* .*`\((\.L_\w+)\)", each)
        if branch and labels.get(branch[1], end) < end:
            begin = labels[branch[1]]
            counts = (number[end + 1] - number[begin] for number in before)
            last = max(latest[end] - begin, -1)
            found.append((Loop(end + 1 - begin, *counts, last, Way(0, 0, 0, 0)), begin, end))

    def with_way(loop: Loop, begin: int, end: int) -> Loop:
        return loop._replace(way=_shortest_way(code, labels, begin, end))

    found = [each for each in found if each[0].loads]
    if not found:
        return None, None
    if name.startswith("sweep_leaves"):
        innermost = [each for each in found if sum(each[1] <= begin and end <= each[2] for _, begin, end in found) == 1]
        return with_way(*max(innermost)), None
    first, writing = min(found), min((each for each in found if each[0].stores), default=None)
    return with_way(*first), with_way(*writing) if writing and writing != first else None


def _target(instruction: str, labels: dict[str, int]) -> int | None:
    branch = re.search(r"\bBRA\S* .*`\((\.L_\w+)\)", instruction)
    return labels[branch[1]] if branch else None


def _inside_loops(code: list[str], labels: dict[str, int], begin: int, end: int) -> set[int]:
    """Instructions of loops between ``begin`` and ``end``, and the branches around loops that have nothing to do."""
    targets = {at: to for at in range(begin, end) if (to := _target(code[at], labels)) is not None}
    inside: set[int] = set()
    for at, to in targets.items():
        if begin < to < at:
            inside |= set(range(to, at + 1))
            before = max((other for other in targets if other < to), default=begin)
            inside |= {before} if targets.get(before, begin) > at else set()
    return inside


def _shortest_way(code: list[str], labels: dict[str, int], begin: int, end: int) -> Way:
    """The way from ``begin`` to ``end``, never back, with most 128-bit accesses; of several that with the fewest
    instructions of loops inside, and of these the shortest. No token on it is an exception or masked, for which there
    is a loop."""
    inner = _inside_loops(code, labels, begin, end)
    best = {begin: (0, 0, 0, -1)}  # by instruction; the last is where it comes from
    for at in range(begin, end):
        if at not in best:
            continue
        each = code[at]
        wide = _is_wide("LDG", each) or _is_wide("STG", each)
        accesses, looped, length, _ = best[at]
        value = (accesses + wide, looped - (at in inner), length - 1, at)
        branch = re.search(r"\bBRA\S* (.*)`\((\.L_\w+)\)", each)
        following = [at + 1]
        if branch and ".DIV" not in each:  # a branch of lanes that diverge
            always = not each.startswith("@") and not branch[1].strip()
            following = [labels[branch[2]]] if always else [at + 1, labels[branch[2]]]
        elif re.match(r"(?:EXIT|RET|BRX)\b", each):
            following = []
        for to in following:
            if at < to <= end and value > best.get(to, (-1, 0, 0, -1)):
                best[to] = value
    way = []
    at = end
    while at in best:
        way.append(code[at])
        at = best[at][-1]
    return Way(len(way), *(_number(way, each) for each in (FLOAT, DOUBLE, ACCESS)))


def find_nvdisasm() -> str | None:
    """The nvdisasm of CUDA, or of Triton's wheel."""
    found = shutil.which("nvdisasm") or shutil.which("nvdisasm", path="/usr/local/cuda/bin")
    spec = importlib.util.find_spec("triton")
    if found or spec is None or not spec.submodule_search_locations:
        return found
    carried = Path(spec.submodule_search_locations[0]) / "backends" / "nvidia" / "bin" / "nvdisasm"
    return str(carried) if carried.exists() else None


@functools.cache
def fingerprint(source: Path) -> str:
    """A digest of everything that determines what is kept of a file: itself, all headers, and the compiler."""
    version = subprocess.check_output([str(find_nvcc()), "--version"], text=True)
    digest = hashlib.sha256(repr((FLAGS, version, find_nvdisasm())).encode() + Path(__file__).read_bytes())
    for path in (source, *sorted([*ROOT.glob("csrc/cuda/*.cuh"), *ROOT.glob("csrc/include/**/*.h")])):
        digest.update(f"{path.relative_to(ROOT)}\n{path.read_text()}".encode())
    return digest.hexdigest()


def _loop_of(kept_loop: list | None) -> Loop | None:
    return kept_loop and Loop(*kept_loop)._replace(way=Way(*kept_loop[-1]))


def kernels_of(source: Path, target: int = 90) -> list[Kernel]:
    nvcc, path = str(find_nvcc()), CACHE / f"{source.stem}-sm_{target}.json"
    made = kept(path, fingerprint(source), lambda: compile_kernels(nvcc, source, target))
    kernels = [Kernel(*kernel) for kernel in made]
    return [each._replace(loop=_loop_of(each.loop), writing=_loop_of(each.writing)) for each in kernels]


def every_kernel(target: int = 90) -> dict[str, Kernel]:
    kernels = [kernel for source in SOURCES for kernel in kernels_of(source, target)]
    by_name = {kernel.name: kernel for kernel in kernels}
    twice = [name for name, count in Counter(kernel.name for kernel in kernels).items() if count > 1]
    assert twice == [], "two kernels of csrc/cuda have one name, and a row of docs/gpu.md is one kernel: rename one"
    return by_name
