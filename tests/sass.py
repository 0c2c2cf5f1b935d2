"""The code of kernels for GPUs as the disassembler shows it: loops, and what is counted in them. No GPU is needed."""

from __future__ import annotations

import importlib.util
import itertools
import re
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

# Triton's kernels that read all tokens, and those that read logits.
TRITON_TOKEN_KERNELS = (
    "_sweep", "_prepare_leaves", "_sweep_leaves", "_deliver_gradient", "_correct_tokens", "_sum_members", "_write_keys",
)  # fmt: skip
TRITON_LOGIT_KERNELS = ("_forward", "_backward", "_differentiate_loss")


class Way(NamedTuple):
    """Instructions of a way through an iteration."""

    instructions: int
    floats: int  # arithmetic of float32 or less, conversions, and special functions
    doubles: int  # arithmetic of float64, and conversions to and from it
    accesses: int  # to memory, shared memory included, and exchanges between lanes


class Loop(NamedTuple):
    """The shortest loop with 128-bit loads and the fewest stores of a kernel, which runs if everything is aligned and
    has no other such loop inside. Of a sweep under levels it is the longest without another inside: the loops of its
    sums and its delivery stand in kernels of their own, too."""

    instructions: int
    loads: int  # of 128 bits
    stores: int
    exponentials: int
    evicted_first: int  # of the loads and stores
    last_load: int  # the place of the last one of 128 bits among the instructions
    way: Way  # the shortest on which all of these accesses are made


def find_nvdisasm() -> str | None:
    """The nvdisasm of CUDA, or of Triton's wheel."""
    found = shutil.which("nvdisasm") or shutil.which("nvdisasm", path="/usr/local/cuda/bin")
    spec = importlib.util.find_spec("triton")
    if found or spec is None or not spec.submodule_search_locations:
        return found
    carried = Path(spec.submodule_search_locations[0]) / "backends" / "nvidia" / "bin" / "nvdisasm"
    return str(carried) if carried.exists() else None


def disassembled(cubin: Path) -> dict[str, list[str]] | None:
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


def disassembled_together(kernels: list[bytes], target: int) -> list[list[str]]:
    """The lines of each kernel's instructions for a GPU, by one start of the disassembler, which takes half a second.
    Such instructions are shown with addresses instead of labels."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"".join(kernels))
        file.flush()
        command = [str(find_nvdisasm()), "--no-dataflow", "--binary", f"SM{target}", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    text = re.sub(r"\b((?:BRA|CALL)\S* .*)\b0x([0-9a-f]+) ;", lambda to: f"{to[1]}`(.L_{int(to[2], 16)}) ;", text)
    targets = set(re.findall(r"`\((\.L_\d+)\)", text))
    each_line = iter(line for line in text.splitlines() if INSTRUCTION.match(line))
    place, found = 0, []
    for kernel in kernels:
        lines: list[str] = []
        for _ in range(len(kernel) // BYTES):
            lines += [f".L_{place}:"] if f".L_{place}" in targets else []
            lines.append(next(each_line))
            place += BYTES
        found.append(lines)
    return found


def instructions_of(cubin: Path) -> bytes:
    """The section of a file with the instructions of its only kernel."""
    content = cubin.read_bytes()
    table = int.from_bytes(content[0x28:0x30], "little")
    size, number, names = struct.unpack_from("<3H", content, 0x3A)
    sections = [struct.unpack_from("<2I4Q", content, table + size * at) for at in range(number)]
    found = [each for each in sections if content.startswith(b".text.", sections[names][4] + each[0])]
    assert len(found) == 1, cubin
    return content[found[0][4] :][: found[0][5]]


def _is_wide(operation: str, line: str) -> bool:
    """Whether a load or store is of 128 bits; EF: evicted first."""
    return f"{operation}.E.128" in line or f"{operation}.E.EF.128" in line


BYTES = 16  # of an instruction
INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?);")
# An HFMA2 of zeros makes a constant; conversions of float64 are counted with float64.
FLOAT = (
    r"^(?:@\S+ )?(?!HFMA2\S* \w+, -RZ, RZ|\S*F64)U?"
    r"(?:F(?:ADD2?|MUL2?|FMA2?|SETP|SEL|MNMX3?|SET|CHK|RND)|MUFU|V?H(?:ADD2|MUL2|FMA2|SETP2|MNMX2?)|F2FP?|F2IP?|I2FP?)\b"
)
DOUBLE = r"\bD(?:ADD|MUL|FMA|SETP|MNMX)\b|\b(?:F2F|F2I|I2F|FRND)\S*F64"
ACCESS = r"^(?:@\S+ )?(?:LD[GS]?|ST[GS]?|ATOM[GS]?|REDG?|SHFL)\b"


def loop_of(kept: list) -> Loop:
    """A loop that was kept as lists."""
    return Loop(*kept[:-1], Way(*kept[-1]))


def _number(code: list[str], pattern: str) -> int:
    return sum(map(bool, map(re.compile(pattern).search, code)))


def counts(lines: list[str]) -> tuple[int, ...]:
    code = [found[1] for line in lines if (found := INSTRUCTION.match(line))]
    wide = (sum(_is_wide(name, each) for each in code) for name in ("LDG", "STG"))
    return *wide, *(_number(code, each) for each in (r"LDG\S*CONSTANT", DOUBLE, r"\bBAR\.", r"\bMEMBAR\."))


Found = tuple[Loop, int, int]  # a loop with the places of its first and its last instruction


def code_of(lines: list[str]) -> tuple[list[str], dict[str, int]]:
    """The instructions, and the places of the labels among them."""
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in lines:
        if line.startswith(".L_"):
            labels[line.rstrip(": \t")] = len(code)
        elif instruction := INSTRUCTION.match(line):
            code.append(instruction[1])
    return code, labels


def loops(code: list[str], labels: dict[str, int]) -> list[Found]:
    """The loops by their branches back; each has yet to get its way."""
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
    return found


def with_way(code: list[str], labels: dict[str, int], found: Found) -> Loop:
    loop, begin, end = found
    return loop._replace(way=_shortest_way(code, labels, begin, end))


def with_loops(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The reports of Triton's kernels, those for NVIDIA's GPUs with their loops over tokens or logits."""
    kernels = {*TRITON_TOKEN_KERNELS, *TRITON_LOGIT_KERNELS}
    of_loops = [each for each in reports if isinstance(each["target"], int) and each["kernel"] in kernels]
    of_loops = [each for each in of_loops if "128" in each["loads"] or each["kernel"] == "_sweep_leaves"]
    for target in {each["target"] for each in of_loops}:
        of_target = [each for each in of_loops if each["target"] == target]
        code = disassembled_together([instructions_of(Path(each["binary"])) for each in of_target], target)
        for report, lines in zip(of_target, code, strict=True):
            report["loops"] = token_loops(report["kernel"], lines)
    return reports


def token_loops(kernel: str, lines: list[str]) -> list[Loop]:
    """The loops of a kernel of Triton with 128-bit loads and no other such loop inside. Under levels a slot begins
    where its leaf does, which need not be a multiple of 4: a sweep without such loads has its one loop over slots."""
    code, labels = code_of(lines)
    found = loops(code, labels)
    wide = [each for each in found if each[0].loads] or (found if kernel == "_sweep_leaves" else [])
    ways = [(with_way(code, labels, each), *each[1:]) for each in wide]
    # Rare code behind the end of a kernel branches back, too, but no way goes there.
    ways = [each for each in ways if each[0].way.instructions]
    if kernel == "_sweep_leaves":
        return [max(ways)[0]] if ways else []
    return [a[0] for a in ways if not any(a[1] <= b[1] and b[2] <= a[2] for b in ways if b != a)]


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
        elif re.match(r"(?:EXIT|RET|BRX)\b", each):  # BRX takes one of a table
            following = [labels[target] for target in re.findall(r"\.L_\w+", each)]
        for to in following:
            if at < to <= end and value > best.get(to, (-1, 0, 0, -1)):
                best[to] = value
    way = []
    at = end
    while at in best:
        way.append(code[at])
        at = best[at][-1]
    return Way(len(way), *(_number(way, each) for each in (FLOAT, DOUBLE, ACCESS)))
