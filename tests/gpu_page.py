"""docs/gpu.md: what the compilers' output says of the kernels for GPUs. None is needed.

``python tests/gpu_page.py`` writes the page, in ten minutes of two cores; tests read it as the baseline. With
``launches`` it writes the table of launches alone, without a compiler: a new preset changes nothing else. With
``triton`` it writes those of Triton alone, which has its own assembler, and compiles the kernels that have changed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

import cuda_kernels
import sass
import torch
from cuda_kernels import LOGIT_KERNELS, TARGETS, Kernel, logits_of
from sass import Loop

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "gpu.md"
ROW = 2048  # tokens of a row in the model of blocks
SIZES = (17, 20, 24)  # powers of two tokens
OTHERS = tuple(target for target in TARGETS if target != 90)


class Device(NamedTuple):
    name: str
    processors: int
    warps: int  # of a multiprocessor
    shared: int  # KiB of a multiprocessor


DEVICES = {
    80: Device("A100", 108, 64, 164), 90: Device("H100", 132, 64, 228), 100: Device("B200", 148, 64, 228),
    120: Device("RTX 5090", 170, 48, 100),
}  # fmt: skip
TOKEN_KERNELS = ("sweep", "prepare_settled", "prepare_leaves", "sweep_leaves", "deliver_gradient", "correct_tokens")
OF_1024 = ("score_windows", "begin_wide", "add_wide", "finish_wide", "select_tokens", "select_top", "scan_")


def warps_of_block(kernel: str) -> int:
    return 32 if kernel.startswith(OF_1024) and kernel != "scan_rows" else 8


def resident(registers: int, shared: int, warps: int, target: int) -> int:
    """Blocks of ``warps`` that a multiprocessor holds: registers come by 256 for a warp, to each quarter by itself."""
    device = DEVICES[target]
    by_registers = 4 * (65536 // 4 // (-(-registers * 32 // 256) * 256)) // warps
    by_shared = device.shared * 1024 // (shared + 1024)
    return min(by_registers, device.warps // warps, by_shared, 32)


# Blocks that a multiprocessor is to hold; of other sweeps two.
HELD = {"sweep<0, 0>": 4, "sweep<1, 0>": 3, **{f"sweep_leaves<0, 0, {gate}>": 3 for gate in (0, 1, 3)}}


def blocks_of(kernel: Kernel, tokens: int, target: int) -> int | None:
    """Blocks of a launch over rows of ROW tokens, each a leaf, as csrc/cuda asks for them; None: of another op."""
    name, rows = kernel.name.partition("<")[0], tokens // ROW
    swept = 32 * (rows + tokens // 512)
    threads = {
        "prepare": rows, "sweep": swept, "sweep_leaves": swept, "deliver_gradient": swept, "prepare_leaves": swept,
        "prepare_settled": swept, "correct_tokens": tokens // 4,
    }.get(name)  # fmt: skip
    if threads is None:
        return None
    most = 132 * (HELD.get(kernel.name, 2) if name in ("sweep", "sweep_leaves") else 4)  # blocks_at_once
    wanted = min(512, most, max(1, -(-threads // 256)))
    if name not in ("prepare_leaves", "prepare_settled", "deliver_gradient", "correct_tokens"):
        return wanted
    together = resident(kernel.registers, kernel.shared, 8, target) * DEVICES[target].processors * 3 // 4
    return max(1, min(wanted, together))


# --------------------------------------------------------------------------------------------------------- launches


def short(instance: str) -> str:
    """``sweep<0, 1>`` of what the emulation calls an instance, the name in the tables."""
    name = instance.partition("KERNEL = ")[2].removesuffix("]")
    for text, shorter in (("{anonymous}::", ""), ("hpo::", ""), ("false", "0"), ("true", "1")):
        name = name.replace(text, shorter)
    return name


@contextlib.contextmanager
def launches_of_triton() -> Iterator[list[str]]:
    """The kernels that are launched inside, as on a GPU, where programs wait for each other; nothing runs."""
    from triton.runtime.interpreter import InterpretedFunction

    launch = importlib.import_module("hpo_core._triton.launch")
    named: list[str] = []
    InterpretedFunction.warmup = lambda kernel, *_, **__: named.append(kernel.fn.__name__)
    launch.compiled, interpreted, launch.INTERPRETED = [], launch.INTERPRETED, False
    try:
        yield named
    finally:
        launch.compiled, launch.INTERPRETED = None, interpreted
        del InterpretedFunction.warmup


def launches() -> dict[tuple[str, ...], list[str]]:
    """The presets by their launches of loss and gradient: on CUDA, where the device holds one block at once and where
    it holds all, and with Triton."""
    from catalogue import PRESETS, Example

    import hpo_core as hpo

    emulated = importlib.import_module("hpo_core._cuda_emulated")
    example, found = Example(3, lengths=(5, 0, 9, 1, 7, 12, 3) * 3), {}

    def run(gate: Any, backend: str) -> None:
        call = example.call(gate, torch.float32, **example.needed(gate))
        arguments = (call.logp, call.old_logp, call.advantages, call.batch, gate)
        hpo.policy_loss_and_grad(*arguments, backend=backend, **call.keywords)

    def of_cuda(gate: Any, processors: int) -> dict[str, int]:
        before = emulated.launches_of_instances()
        with mock.patch.dict(os.environ, HPO_EMULATION_PROCESSORS=str(processors)):
            run(gate, "cuda_emulated")
        after = Counter(emulated.launches_of_instances())
        after.subtract(before)
        return {short(instance): count for instance, count in after.items() if count}

    for name, (gate, _, _) in PRESETS.items():
        with launches_of_triton() as named:
            run(gate, "triton")
        kernels = of_cuda(gate, 1), of_cuda(gate, 64), Counter(named)
        found.setdefault(tuple(map(_counted, kernels)), []).append(name)
    return found


def _counted(kernels: dict[str, int]) -> str:
    return ", ".join(f"`{name}`" + (f" x {count}" if count > 1 else "") for name, count in sorted(kernels.items()))


# ------------------------------------------------------------------------------------------------------------- page


TOP = """
# Kernels for GPUs

These are figures of code that nvcc RELEASE and Triton assemble; modelled figures say so.
[What was measured on a GPU](gpu_measured.md) stands on a page of its own. `python tests/gpu_page.py` writes this one.
Every test run compiles the kernels for sm_90 again and fails on a spill, on more than 4 registers more, on fewer
128-bit accesses, on more barriers, fences, read-only loads or float64, on 3 % more issue slots, and on other launches;
`make test-long` looks at spills, registers and issue slots on sm_80, sm_100 and sm_120, too, and every run there at the
issue slots of `scale` and of Triton's kernels, each on one of the three.

## Launches

The launches of `policy_loss_and_grad` on a batch whose weights are known, with the inputs that a preset needs; each
once unless the table says more. Tokens are few where the blocks of a sweep are at most three quarters of those that
the device holds at once: on an H100 up to 970,000 in rows of 2048, or 640,000 with two blocks on a multiprocessor.
Default weights of a new batch are one launch more, of `weigh_rows` or `_count_rows`. `logp.backward(out.grad)` behind
`policy_loss_and_grad` adds none; `loss.backward()` behind `policy_loss` two, the seed of the gradient and the product
with it.\
""".splitlines()
CUDA = """
## CUDA on sm_90

Blocks: how many a multiprocessor holds (modelled, from registers and shared memory). Read-only: loads through the
read-only path. Float64: instructions. Fences: of the memory of the device, those of grid barriers included.\
""".splitlines()
SLOTS = """
## Issue slots

The loop is the shortest one with 128-bit loads and the fewest 128-bit stores, in `sweep_leaves` the sweep's, which is
longer than those of the sums and the delivery. The table has all instructions of its code, and the shortest way through
an iteration on which all 128-bit accesses are made and no loop inside is entered, as exceptions and masked tokens enter
one: its instructions, those for one token (for a logit in kernels that read logits), and their classes. The last
columns have the way on other architectures, and in brackets what it is for one. Where an array of tokens begins off
alignment, a branch beside this way reads it token by token, and accesses all other arrays as here.\
""".splitlines()
BLOCKS = f"""
## Blocks and waves

Modelled, for rows of {ROW} tokens that are a leaf each: blocks of a launch, and in brackets the share of what the whole
device holds at once; 1.00 is one wave. Cooperative launches leave a quarter of the device free.""".splitlines()
TRITON = """
## Triton on sm_90

Where a path has several specialisations of a kernel, the one with most registers. Nothing spills, on any target.
Where an array of tokens begins off alignment, kernels read all of them token by token, and `_sweep` stores results at
once: a choice for each array would compile kernels again.\
""".splitlines()
TRITON_SLOTS = """
## Issue slots of Triton

The loops are those with 128-bit loads and no other such loop inside, in the order of the code; a `_sweep_leaves` that
has none has its loop over slots, and other kernels without them have no row. The way is that of CUDA's table. A thread
has four tokens of an iteration, which is a tile or 16 full slots, or the logits of its loads. The search for the rows
of a tile is a loop inside.\
""".splitlines()
RESOURCES = (
    "kernel | registers | spilled bytes | stack bytes | shared bytes | blocks | 128-bit loads | 128-bit stores | "
    "read-only | float64 | barriers | fences"
)
LOOPS = (
    "code | way | for one | integers, control | float32 | float64 | accesses, shuffles | 128-bit loads | "
    "128-bit stores | exponentials | " + " | ".join(f"sm_{target}" for target in OTHERS)
)
ELSEWHERE = "kernel | " + " | ".join(f"sm_{target} registers | spilled | blocks" for target in OTHERS)
COUNTS = "kernel | device | " + " | ".join(f"2^{size} tokens" for size in SIZES)
PATHS = (
    "path | kernel | registers | shared bytes | 128-bit loads | 128-bit stores | float64 | barriers | fences | "
    "registers on sm_80 | sm_100 | sm_120"
)


def table(head: str, rows: list[list[Any]]) -> list[str]:
    columns = head.split(" | ")
    return ["", f"| {head} |", "|---" * len(columns) + "|", *(f"| {' | '.join(map(str, row))} |" for row in rows)]


def presets_table() -> list[str]:
    return table(
        "presets | CUDA | CUDA, few tokens | Triton",
        [[", ".join(f"`{name}`" for name in names), *kernels] for kernels, names in launches().items()],
    )


def loops_of(kernel: Kernel) -> list[tuple[str, Loop]]:
    named = [(kernel.name, kernel.loop), (f"{kernel.name}, writing", kernel.writing)]
    return [(name, loop) for name, loop in named if loop]


def loops_elsewhere(kernels: list[Kernel], others: list[Kernel]) -> dict[str, Loop | None]:
    """The loops of the same kernels for another architecture that make the same accesses."""
    accesses = lambda loop: (loop.loads, loop.stores)  # noqa: E731
    there = {(kernel.name, accesses(loop)): loop for kernel in others for _, loop in loops_of(kernel)}
    return {name: there.get((kernel.name, accesses(loop))) for kernel in kernels for name, loop in loops_of(kernel)}


def loop_cells(loop: Loop, each: int, elsewhere: list[Loop | None]) -> list[Any]:
    """``each``: the tokens or logits that a thread has of an iteration, 0 where they are not known. ``elsewhere``: the
    same loop on each other architecture."""
    way = loop.way
    rest = way.instructions - way.floats - way.doubles - way.accesses
    for_one = lambda other: f"{other.way.instructions / each:.1f}" if each else ""  # noqa: E731
    row = [loop.instructions, way.instructions, for_one(loop), rest, way.floats, way.doubles, way.accesses]
    slots = lambda other: f"{other.way.instructions} ({for_one(other)})".removesuffix(" ()")  # noqa: E731
    others = [slots(other) if other else "" for other in elsewhere]
    return [*row, loop.loads, loop.stores, loop.exponentials, *others]


def cuda_tables(of: dict[int, dict[str, Kernel]]) -> list[str]:
    resources, loops, others, blocks = [], [], [], []
    elsewhere = [loops_elsewhere([*of[90].values()], [*of[target].values()]) for target in OTHERS]
    for name, k in of[90].items():
        held = resident(k.registers, k.shared, warps_of_block(name), 90)
        counted = [k.wide_loads, k.wide_stores, k.read_only, k.doubles, k.barriers, k.fences]
        resources.append([f"`{name}`", k.registers, k.spilled, k.stack, k.shared, held, *counted])
        for loop_name, loop in loops_of(k):
            logits = loop.loads * logits_of(k) if name.startswith(LOGIT_KERNELS) else 0
            each = logits or (4 if name.startswith(TOKEN_KERNELS) else 0)
            loops.append([f"`{loop_name}`", *loop_cells(loop, each, [found[loop_name] for found in elsewhere])])
        cells = []
        for target in OTHERS:
            other = of[target][name]
            held = resident(other.registers, other.shared, warps_of_block(name), target)
            cells += [other.registers, other.spilled, held]
        others.append([f"`{name}`", *cells])
        for target in TARGETS:
            kernel, device = of[target][name], DEVICES[target]
            if blocks_of(kernel, 1 << 20, target) is None:
                continue
            held = resident(kernel.registers, kernel.shared, 8, target) * device.processors
            counts = [blocks_of(kernel, 1 << size, target) for size in SIZES]
            cells = [f"{count} ({count / held:.2f})" for count in counts if count]
            blocks.append([f"`{name}`", device.name, *cells])
    return [
        *CUDA, *table(RESOURCES, resources), *SLOTS, *table(f"loop | {LOOPS}", loops), "",
        "## CUDA on other architectures", *table(ELSEWHERE, others), *BLOCKS, *table(COUNTS, blocks),
    ]  # fmt: skip


def triton_reports() -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_DISABLE_LINE_INFO": "1", "TRITON_CACHE_DIR": str(ROOT / "build/triton/kernels")}
    command = [sys.executable, "-m", "hpo_core._triton.compile", "--json", *map(str, TARGETS)]
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    return sass.with_loops([json.loads(line) for line in output.splitlines()])


def triton_slots(reports: list[dict[str, Any]]) -> list[str]:
    loops = {(each["target"], each["path"], each["kernel"]): each["loops"] for each in reports if each.get("loops")}
    rows = []
    for report in reports:
        if report["target"] != 90:
            continue
        of_logits = 0
        if report["kernel"] in sass.TRITON_LOGIT_KERNELS:
            of_logits = 4 if "all inputs" in report["path"] else 8  # in 128 bits, which are of float32 on that path
        for number, loop in enumerate(report.get("loops", ()), 1):
            elsewhere = [loops[target, report["path"], report["kernel"]][number - 1] for target in OTHERS]
            cells = loop_cells(loop, of_logits * loop.loads or 4, elsewhere)
            rows.append([report["path"], f"`{report['kernel']}`", number, *cells])
    return table(f"path | kernel | number | {LOOPS}", rows)


def triton_table(reports: list[dict[str, Any]]) -> list[str]:
    rows: dict[tuple[str, str], list[Any]] = {}
    registers: dict[tuple[str, str], dict[int, int]] = {}
    for each in reports:
        key = each["path"], each["kernel"]
        of_targets = registers.setdefault(key, {})
        of_targets[each["target"]] = max(of_targets.get(each["target"], 0), each["registers"])
        assert each["spilled"] == 0, key
        if each["target"] == 90 and (key not in rows or rows[key][0] < each["registers"]):
            wide = [each[name].get("128", 0) for name in ("loads", "stores")]
            rows[key] = [each["registers"], each["shared"], *wide, each["doubles"], each["barriers"], each["fences"]]
    others = lambda key: [registers[key].get(target, "") for target in OTHERS]  # noqa: E731
    cells = [[path, f"`{kernel}`", *row, *others((path, kernel))] for (path, kernel), row in rows.items()]
    return table(PATHS, cells)


def page(of: dict[int, dict[str, Kernel]], reports: list[dict[str, Any]], release: str) -> str:
    lines = [*TOP, *presets_table(), *cuda_tables(of), *TRITON, *triton_table(reports)]
    lines += [*TRITON_SLOTS, *triton_slots(reports)]
    return "\n".join(lines).replace("RELEASE", release).strip() + "\n"


# ---------------------------------------------------------------------------------------------------------- baseline


def section(title: str) -> list[list[str]]:
    """The cells of the table in a section, its head first."""
    text = PAGE.read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip("` ") for cell in line.strip("| ").split(" | ")] for line in lines]


def rows_of(title: str, keys: int = 1) -> dict[Any, dict[str, int]]:
    """The numbers of a section's table by row, whose first cells are its key, and column."""
    head, *rows = section(title)
    names = head[keys:]
    key = (lambda row: row[0].replace("`", "")) if keys == 1 else (lambda row: tuple(row[:keys]))
    return {key(row): dict(zip(names, map(_whole, row[keys:]), strict=False)) for row in rows}


def _whole(cell: str) -> Any:
    found = re.fullmatch(r"(\d+)(?: \([\d.]+\))?", cell)
    return int(found[1]) if found else cell


def release_of_page() -> str:
    return re.search(r"nvcc ([\d.]+) and", PAGE.read_text())[1]  # type: ignore[index]


def with_table(title: str, lines: list[str]) -> str:
    """The page with another table in a section."""
    before, heading, rest = PAGE.read_text().partition(f"## {title}\n")
    words, _, tail = rest.partition("\n| ")
    _, following, below = tail.partition("\n## ")
    return "".join((before, heading, words, "\n".join(lines), "\n", following, below))


def whole_page() -> str:
    nvcc = cuda_kernels.find_nvcc()
    if nvcc is None or cuda_kernels.find_nvdisasm() is None:
        raise SystemExit(
            "nvcc or nvdisasm was found neither in PATH nor in /usr/local/cuda/bin; `launches` and `triton`, each for "
            "one table, need neither"
        )
    reports = triton_reports()
    of = {target: cuda_kernels.every_kernel(target) for target in TARGETS}
    return page(of, reports, cuda_kernels.nvcc_release(nvcc))


def main() -> None:
    parser = argparse.ArgumentParser(description="write docs/gpu.md")
    parser.add_argument("table", nargs="?", choices=("launches", "triton"), help="this table alone")
    table = parser.parse_args().table
    if table == "launches":
        text = with_table("Launches", presets_table())
    elif table == "triton":
        reports = triton_reports()
        PAGE.write_text(with_table("Triton on sm_90", triton_table(reports)))
        text = with_table("Issue slots of Triton", triton_slots(reports))
    else:
        text = whole_page()
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
