"""CUDA kernels as nvcc compiles them, held to docs/gpu.md: registers, spills, accesses, issue slots. No GPU needed."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys

import gpu_page
import pytest
from cuda_kernels import (
    ROOT,
    SOURCES,
    TARGETS,
    Kernel,
    every_kernel,
    find_nvcc,
    find_nvdisasm,
    kernels_of,
    logits_of,
    nvcc_release,
)
from sass import ACCESS, DOUBLE, FLOAT, Way, code_of, loops, with_way

NVCC = find_nvcc()
pytestmark = pytest.mark.skipif(NVCC is None, reason="nvcc was found neither in PATH nor in /usr/local/cuda/bin")
on_others = [90, *(pytest.param(target, marks=pytest.mark.long) for target in TARGETS if target != 90)]

SLACK = 4  # registers that come and go with any edit
REGENERATE = "(now, in docs/gpu.md); if it is worth it, run python tests/gpu_page.py"

# Kernels that read every token or score must read 16 bytes at once to use the bandwidth.
WIDE = {
    "sweep", "prepare_settled<4, 1>", "prepare_leaves", "sweep_leaves", "deliver_gradient", "correct_tokens",
    "select_top", "count_rows", "weigh_rows", "sum_rows", "differentiate_rows", "differentiate_loss", "scale",
}  # fmt: skip

# The limit of instructions per aligned logit. An SM of an H100 issues 4 per cycle and gets 13 bytes from memory, so a
# kernel that reads logits of 16 bits has 20 per logit, one that also writes them 40, and for 32 bits both are doubled.
SLOTS = {
    ("sum_rows", 16): 13, ("sum_rows", 32): 16, ("differentiate_rows", 16): 12, ("differentiate_rows", 32): 24,
    ("sum_rows<Bfloat16, 3, 0>", 16): 10, ("sum_rows<Float16, 3, 0>", 16): 10,
}  # fmt: skip


BUILT = importlib.util.find_spec("hpo_core._cuda") is not None


@pytest.fixture
def kernels() -> dict[str, Kernel]:
    return every_kernel()


@pytest.fixture
def of_this_compiler() -> None:
    release = gpu_page.release_of_page()
    if nvcc_release(NVCC) != release:
        pytest.skip(f"the page is of nvcc {release}")
    if find_nvdisasm() is None:
        pytest.skip("no nvdisasm: neither CUDA's nor the one in Triton's wheel")


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


@pytest.mark.long
@pytest.mark.usefixtures("of_this_compiler")
@pytest.mark.parametrize(("lower", "higher"), [(80, 90), (100, 120)])
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_what_a_gpu_is_given_is_what_nvcc_makes_for_it(tmp_path, source, lower, higher):
    """setup.py has both assembled from the PTX of the lower one; the figures here are of PTX for each."""
    text = []
    for target in (lower, higher):
        path = tmp_path / f"{target}.ptx"
        command = [NVCC, "-std=c++17", "-O3", "-fmad=false", "-Icsrc/include", "-ptx", f"-arch=compute_{target}"]
        subprocess.run([*command, "-o", str(path), str(source.relative_to(ROOT))], cwd=ROOT, check=True)
        lines = re.sub(r"%[a-z]+\d+", "%", path.read_text()).splitlines()  # nvcc numbers registers anew
        text.append([line for line in lines if not line.startswith((".target", "//"))])
    assert text[0] == text[1]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_no_kernel_spills(source):
    assert {kernel.name: kernel.spilled for kernel in kernels_of(source) if kernel.spilled} == {}


@pytest.mark.long
@pytest.mark.parametrize("target", [80, 100, 120])
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_no_kernel_spills_elsewhere(source, target):
    assert {kernel.name: kernel.spilled for kernel in kernels_of(source, target) if kernel.spilled} == {}


def test_every_kernel_is_on_the_page(kernels):
    assert set(kernels) == set(gpu_page.rows_of("CUDA on sm_90")), "run python tests/gpu_page.py"


def worse(now, before, slack=0.0):
    """The kernels with a larger number than before."""
    return {name: (now[name], before[name]) for name in now if now[name] > before[name] + slack}


@pytest.mark.usefixtures("of_this_compiler")
def test_no_kernel_takes_more_registers_barriers_fences_or_float64(kernels):
    before = gpu_page.rows_of("CUDA on sm_90")
    for head, of_kernel, slack in (
        ("registers", lambda kernel: kernel.registers, SLACK),
        ("shared bytes", lambda kernel: kernel.shared, 0),
        ("read-only", lambda kernel: kernel.read_only, 0),
        ("float64", lambda kernel: kernel.doubles, 0),
        ("barriers", lambda kernel: kernel.barriers, 0),
        ("fences", lambda kernel: kernel.fences, 0),
        ("128-bit loads", lambda kernel: -kernel.wide_loads, 0),
        ("128-bit stores", lambda kernel: -kernel.wide_stores, 0),
    ):
        sign = -1 if head.startswith("128") else 1
        now = {name: of_kernel(kernel) for name, kernel in kernels.items()}
        assert worse(now, {name: sign * row[head] for name, row in before.items()}, slack) == {}, (head, REGENERATE)


@pytest.mark.long
@pytest.mark.usefixtures("of_this_compiler")
@pytest.mark.parametrize("target", [80, 100, 120])
def test_no_kernel_takes_more_registers_elsewhere(target):
    before = {
        name: row[f"sm_{target} registers"] for name, row in gpu_page.rows_of("CUDA on other architectures").items()
    }
    now = {name: kernel.registers for name, kernel in every_kernel(target).items()}
    assert worse(now, before, SLACK) == {}, REGENERATE


@pytest.mark.usefixtures("of_this_compiler")
def test_no_loop_takes_more_issue_slots(kernels):
    before = gpu_page.rows_of("Issue slots")
    now = {name: loop.way for kernel in kernels.values() for name, loop in gpu_page.loops_of(kernel)}
    assert set(now) == set(before), "run python tests/gpu_page.py"
    longer = {n: (way, row["way"]) for n, row in before.items() if (way := now[n].instructions) > 1.03 * row["way"]}
    assert longer == {}, REGENERATE
    doubles = {name: row["float64"] for name, row in before.items()}
    assert worse({name: way.doubles for name, way in now.items()}, doubles) == {}, REGENERATE


CLASSES = {
    "float32": (
        "@!P0 FADD R1, R2, R3", "FMNMX3 R1, R2, R3, R4, !PT", "UFMUL UR4, UR5, UR6", "VHMNMX R1, R2, R3, !PT",
        "FFMA2 R2, R4.F32x2.HI_LO, R6.F32x2.HI_LO, R8.F32x2.HI_LO",
        "F2FP.BF16.F32.PACK_AB R1, R2, R3", "I2FP.F32.S32 R1, R2", "HFMA2.BF16_V2 R1, R2, R3, R4",
    ),
    "float64": ("F2F.F64.F32 R2, R4", "@P0 DFMA R2, R4, R6, R8"),
    "access": ("LDS R1, [R2]", "@P1 STG.E.128.STRONG.SM desc[UR8][R2.64], R28"),
    "none": ("HFMA2.MMA R3, -RZ, RZ, 0, 0", "HFMA2 R10, -RZ, RZ, 1.875, 0", "IADD3 R1, R2, R3, RZ"),
}  # fmt: skip


@pytest.mark.parametrize("name", CLASSES)
def test_an_instruction_is_of_one_class(name):
    """The instructions are those of all architectures."""
    classes = {"float32": FLOAT, "float64": DOUBLE, "access": ACCESS}
    found = {each: [which for which in classes if re.search(classes[which], each)] for each in CLASSES[name]}
    assert found == dict.fromkeys(CLASSES[name], [name] if name in classes else [])


def test_a_way_may_go_through_a_table_of_branches():
    """Behind it are a shorter branch without the store, and one with it."""
    text = """
        .L_x_1: LDG.E.128.CONSTANT R4, [R2];
        BRX R2 -0x20 (*"BRANCH_TARGETS .L_x_2,.L_x_3"*);
        .L_x_2: FADD R4, R4, R5; FADD R4, R4, R5; STG.E.128 [R2], R4;
        .L_x_3: @P0 BRA `(.L_x_1);
    """
    lines = [part for line in re.split(r"(?<=;)|(?<=\d:)", text) if (part := line.strip())]
    lines = [line if line.endswith(":") else f"        /*0000*/ {line}" for line in lines]
    code, labels = code_of(lines)
    assert with_way(code, labels, loops(code, labels)[0]).way == Way(6, 2, 0, 2)


# One kernel of each other architecture stands for all in every run: its file is compiled in a second.
@pytest.mark.usefixtures("of_this_compiler")
@pytest.mark.parametrize("target", gpu_page.OTHERS)
@pytest.mark.parametrize(
    "source",
    [pytest.param(each, marks=() if each.stem == "scale" else pytest.mark.long, id=each.stem) for each in SOURCES],
)
def test_no_loop_takes_more_issue_slots_elsewhere(source, target):
    before = gpu_page.rows_of("Issue slots")
    found = gpu_page.loops_elsewhere(kernels_of(source), kernels_of(source, target))
    missing = [name for name, loop in found.items() if (loop is None) != (before[name][f"sm_{target}"] == "")]
    assert missing == [], "run python tests/gpu_page.py"
    now = {name: loop.way.instructions for name, loop in found.items() if loop}
    longer = {n: (way, row) for n, way in now.items() if way > 1.03 * (row := before[n][f"sm_{target}"])}
    assert longer == {}, REGENERATE


# Where an input may be what the launch writes, or a list that it makes, the read-only path is not for it.
WRITTEN = (
    *("differentiate_rows", "scale", "sum_rows", "normalise", "statistics", "carry_rows", "scan_only_scope"),
    "add_wide_digit",
)


@pytest.mark.parametrize("target", on_others)
def test_what_a_launch_may_write_is_not_read_through_the_read_only_path(target):
    if find_nvdisasm() is None:
        pytest.skip("no nvdisasm: neither CUDA's nor the one in Triton's wheel")
    kernels = every_kernel(target)
    found = {name for name, kernel in kernels.items() if name.startswith(WRITTEN) and kernel.read_only}
    assert found == set() and all(any(name.startswith(each) for name in kernels) for each in WRITTEN)
    # Besides their logits these read the numbers of a token.
    assert all(kernels[name].read_only < 20 for name in kernels if name.startswith("differentiate_loss"))


def test_the_launches_of_presets_are_those_of_the_page():
    if any(importlib.util.find_spec(name) is None for name in ("hpo_core._cuda_emulated", "triton")):
        pytest.skip("the emulated CUDA or Triton is missing")
    written = gpu_page.PAGE.read_text().partition("## Launches\n")[2].partition("\n## ")[0].splitlines()
    now = gpu_page.presets_table()
    assert [line for line in written if line.startswith("|")] == now[1:], "run python tests/gpu_page.py launches"


def test_presets_take_few_launches():
    """With one for the weights of a new batch: of CUDA three, or four under a hierarchy or a second correction over
    segments, which `deliver_gradient` and `correct_tokens` tell; of Triton five."""

    def count(cell):
        kernels = cell.split(", `")
        return sum(int(kernel.rpartition(" x ")[2]) if " x " in kernel else 1 for kernel in kernels)

    for _, *launched in gpu_page.section("Launches")[1:]:
        many, few, triton = map(count, launched)
        more = "deliver_gradient" in launched[0] or "x 2" in launched[0]
        assert few <= many <= 2 + more and triton <= 4, launched


def test_token_sweeps_load_and_store_128_bits(kernels):
    if any(kernel.wide_loads is None for kernel in kernels.values()):
        pytest.skip("no nvdisasm: neither CUDA's nor the one in Triton's wheel")
    narrow = [n for n, k in kernels.items() if {n, n.partition("<")[0]} & WIDE and k.wide_loads == 0]
    assert narrow == []
    writing = {
        *("sweep", "sweep_leaves", "deliver_gradient", "correct_tokens"),
        *("differentiate_rows", "differentiate_loss", "scale"),
    }
    assert [n for n, k in kernels.items() if n.partition("<")[0] in writing and k.wide_stores == 0] == []


@pytest.mark.parametrize("target", [90, *(pytest.param(target, marks=pytest.mark.long) for target in (80, 100, 120))])
def test_instructions_per_logit(target):
    """Each logit takes one exponential, besides the one for the rescaling in an iteration of four loads."""
    if find_nvdisasm() is None:
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
