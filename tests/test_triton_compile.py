"""The Triton kernels after assembly, for GPUs that need not be present, and the number of their compilations.

Other tests of this process run in Triton's interpreter, which compiles nothing, so these start processes without it.
Their reports are kept in build/triton, with the kernels, as long as no source changes.
"""

import functools
import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import gpu_page
import pytest
from compiled import kept
from sass import loop_of, with_loops
from triton_budgets import AT_LENGTH, MOST_SPILLED, TRITON, WIDE_LOADS

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / "build/triton"
OTHERS = (80, 100, 120)
AMD = ("gfx942", "gfx950")  # MI300 and MI350, whose waves have 64 threads
TARGETS = (90, *OTHERS, *AMD)
SHARES, SHARES_OF_ALL = 2, 10  # shares of the kernels for workers


PAGE = gpu_page.rows_of("Triton on sm_90", keys=2)  # by path and kernel
SLOTS = gpu_page.rows_of("Issue slots of Triton", keys=3)  # of these by the number of the loop
EVERY_RUN = sorted(f"{path}/{kernel}" for path, kernel in PAGE if path not in AT_LENGTH)
# The path on which each kernel takes the most registers.
HEAVIEST = {
    kernel: path for path, kernel in sorted(PAGE, key=lambda each: PAGE[each]["registers"]) if path not in AT_LENGTH
}
REGENERATE = "in docs/gpu.md; if it is worth it, run python tests/gpu_page.py triton"


def in_turn(*targets):
    """Each kernel meets one of these targets."""
    kernels = sorted(HEAVIEST)
    return {target: kernels[i :: len(targets)] for i, target in enumerate(targets)}


OF_OTHERS = in_turn(*OTHERS) | in_turn(*AMD)


def run(*arguments):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # Line numbers in the binary double the time of the assembler.
    environment |= {"TRITON_DISABLE_LINE_INFO": "1", "TRITON_CACHE_DIR": str(CACHE / "kernels")}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@functools.cache
def fingerprint():
    """A digest of everything that a report depends on."""
    settings = sorted(item for item in os.environ.items() if item[0].startswith("TRITON_"))
    digest = hashlib.sha256(repr((sys.version, settings)).encode())
    for package in ("triton", "torch"):
        digest.update(importlib.metadata.version(package).encode())
    sources = *ROOT.glob("kernels/hpo_triton/*.py"), *ROOT.glob("hpo_core/**/*.py"), ROOT / "tests/sass.py"
    for path in sorted(sources):
        digest.update(path.read_bytes())
    return digest.hexdigest()


# The garbage collector would go through everything that is imported, again and again.
COMPILE = """
import gc
gc.disable()
from hpo_core._triton import compile
compile.main()
"""


def reports(target, *options):
    """The reports of the kernels on this target."""

    def compile_them():
        output = run("-c", COMPILE, "--json", str(target), *options)
        return with_loops([json.loads(line) for line in output.splitlines()])

    name = hashlib.sha256(repr(options).encode()).hexdigest()[:16]
    return kept(CACHE / f"{target}-{name}.json", fingerprint(), compile_them)


FORKED = """
import contextlib
import gc
import io
import json
import multiprocessing
import sys

import torch
from hpo_core._triton import compile

gc.disable()


def answer(script):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(script, {})
    return json.loads(printed.getvalue())


with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
    print(json.dumps(pool.map(answer, sys.argv[1:], chunksize=1)))
"""


def answer(script):
    """The output of a script without the interpreter. Each has a process, forked from one that imports everything."""
    name = hashlib.sha256(repr((FORKED, SCRIPTS)).encode()).hexdigest()[:16]
    answers = kept(CACHE / f"{name}.json", fingerprint(), lambda: json.loads(run("-c", FORKED, *SCRIPTS)))
    return answers[SCRIPTS.index(script)]


def share_on_sm_90(share, every_run=False):
    return reports(90, *(("--only", *EVERY_RUN) if every_run else ()), "--share", str(share), str(SHARES))


def assert_no_spills(compiled):
    assert compiled and [report for report in compiled if report["spilled"] > MOST_SPILLED] == []


# The tests of a share run one after another on one worker, so that none waits for another.
of_each_share = pytest.mark.parametrize(
    ("share", "every_run"),
    [
        *(pytest.param(share, True, id=str(share)) for share in range(SHARES)),
        *(pytest.param(share, False, id=f"{share}, all", marks=pytest.mark.long) for share in range(SHARES)),
    ],
    scope="module",
)


@of_each_share
def test_every_kernel_compiles_for_sm_90_without_spilling(share, every_run):
    assert_no_spills(share_on_sm_90(share, every_run))
    least = 99 * 1024  # bytes that a program can share on sm_120, which are more elsewhere
    assert [report for report in share_on_sm_90(share, every_run) if report["shared"] > least] == []


@of_each_share
def test_sweeps_load_128_bits_at_once(share, every_run):
    found = {
        (report["path"], report["kernel"]): report["loads"].get("128", 0)
        for report in share_on_sm_90(share, every_run)
        if (report["path"], report["kernel"]) in WIDE_LOADS
    }
    assert found and found == {kernel: WIDE_LOADS[kernel] for kernel in found}


@pytest.mark.skipif(TRITON != "3.9.0", reason="docs/gpu.md is of Triton 3.9.0")
@of_each_share
def test_no_kernel_takes_more_than_on_the_page(share, every_run):
    """More registers, shared memory, float64 or barriers, or narrower stores."""
    for report in share_on_sm_90(share, every_run):
        row = PAGE[report["path"], report["kernel"]]
        worse = (report, row, REGENERATE)
        assert report["registers"] <= row["registers"] and report["shared"] <= row["shared bytes"], worse
        if report["registers"] == row["registers"]:  # the specialisation on the page
            assert report["doubles"] <= 1.03 * row["float64"] and report["barriers"] <= row["barriers"], worse
            assert report["stores"].get("128", 0) >= row["128-bit stores"], worse


@pytest.mark.skipif(TRITON != "3.9.0", reason="docs/gpu.md is of Triton 3.9.0")
@of_each_share
def test_no_loop_takes_more_issue_slots(share, every_run):
    for report in share_on_sm_90(share, every_run):
        kernel = report["path"], report["kernel"]
        now = {(*kernel, str(i)): loop_of(loop) for i, loop in enumerate(report.get("loops", ()), 1)}
        assert set(now) == {row for row in SLOTS if row[:2] == kernel}, "run python tests/gpu_page.py triton"
        for row, loop in now.items():
            worse = (row, loop, SLOTS[row], REGENERATE)
            assert loop.way.instructions <= 1.03 * SLOTS[row]["way"], worse
            assert loop.way.doubles <= SLOTS[row]["float64"], worse


@of_each_share
def test_programs_that_wait_for_each_other_order_their_memory(share, every_run):
    """Each barrier orders what all threads have written before the release of one of them, and what all threads read
    after its acquire; so does the count of programs by which one finds that it is the last. Other orders of the device
    would cost a flush of caches each. Nothing is read through the read-only path, which may keep an old value of a word
    that a launch writes."""
    found = set()
    for report in share_on_sm_90(share, every_run):
        orders = report["orders"]
        released = [i for i, order in enumerate(orders) if order == "release"]
        arrived = [i for i, order in enumerate(orders) if order == "acq_rel"]
        assert all(orders[i - 1 : i + 4] == ["sync", "release", "sync", "acquire", "sync"] for i in released), report
        assert all(orders[i - 1 : i + 2] == ["sync", "acq_rel", "sync"] for i in arrived), report
        assert not arrived or report["kernel"] == "_count_rows", report
        assert report["cooperative"] == bool(released) and not report["read_only"], report
        orders_of_device = len(released) + len(arrived)
        assert orders_of_device == report["fences"] == PAGE[report["path"], report["kernel"]]["fences"], report
        if released:
            assert "relaxed" in orders[: released[0]], report
            found.add(report["kernel"])
    assert found == {"_select_top", "_scan_only_scope", "_correct_tokens", "_deliver_gradient", "_prepare_leaves"}


SELECT_TOP = """
import json

import torch
from hpo_core._triton import compile, entropy, launch
from hpo_core.specs import Boundary, Invalid, OrderRule

tokens = torch.ones(5000, device="meta")
with compile.compiling(90, lambda kernel, key: False):
    score = entropy.window_score(tokens, None, torch.tensor([0, 5000]), 0, 3, Boundary.FULL, Invalid.SKIP)
    entropy.select_top(score, 4, 5, OrderRule.CEIL, False)
print(json.dumps(launch.launches))
"""


def test_window_threshold_and_mask_are_two_launches():
    """Besides them, one clears the histograms."""
    assert answer(SELECT_TOP) == {"_score_windows": 1, "_select_top": 1}


NAME_KERNELS = """
import json
from hpo_core._triton import compile

paths = {}
for path, call in compile.paths():
    with compile.compiling(90, lambda kernel, key: paths.setdefault((kernel, key), path) is None):
        call()
print(json.dumps([[path, kernel] for (kernel, _), path in paths.items()]))
"""


def test_every_kernel_is_on_the_page():
    kernels = set(map(tuple, answer(NAME_KERNELS)))
    assert kernels == set(PAGE), "docs/gpu.md has other rows: run python tests/gpu_page.py triton"
    assert kernels >= set(WIDE_LOADS) | {row[:2] for row in SLOTS}
    sources = "".join(path.read_text() for path in (ROOT / "kernels/hpo_triton").glob("*.py"))
    written = set(re.findall(r"^@kernel\ndef (\w+)", sources, re.M))
    assert len(written) > 20 and written == {name for _, name in kernels}, (
        "give each a call in paths of compiled_paths.py"
    )


def test_programs_are_numbered_in_64_bits():
    """Their number times a tile may be beyond 2^31, but where a call has few units, which 32 bits count."""
    lines = [line for path in ROOT.glob("kernels/hpo_triton/*.py") for line in path.read_text().splitlines()]
    numbered = [line for line in lines if "tl.program_id(" in line]
    narrow = [line for line in numbered if "tl.program_id(0).to(tl.int64)" not in line]
    few = [line for line in narrow if "unit = tl.program_id(0) * UNITS + tl.arange(0, UNITS)[:, None]" in line]
    assert len(numbered) > 30 and len(few) == 2
    assert [line.strip() for line in narrow if line not in few] == ["if tl.program_id(0) == 0:"]


def of_each(targets):
    """Parameters of a test: the kernels that a target meets in its turn, and in `make test-long` all on each."""
    every_run = [pytest.param(target, OF_OTHERS[target], id=f"{target}") for target in targets]
    at_length = [
        pytest.param(target, sorted(HEAVIEST), marks=pytest.mark.long, id=f"{target}, all") for target in targets
    ]
    return pytest.mark.parametrize(("target", "kernels"), [*every_run, *at_length], scope="module")


def compiled_on(target, kernels):
    if kernels is not OF_OTHERS[target]:
        return reports(target, "--only", *(f"{HEAVIEST[kernel]}/{kernel}" for kernel in kernels))
    return [report for report in answer(ELSEWHERE) if report["target"] == target]


@of_each([*OTHERS, *AMD])
def test_every_kernel_compiles_for_every_vendor_without_spilling(target, kernels):
    """Targets of a vendor differ in their assembler alone, and no kernel takes the registers that each of them has."""
    compiled = compiled_on(target, kernels)
    assert {(report["kernel"], report["path"]) for report in compiled} == {(name, HEAVIEST[name]) for name in kernels}
    assert_no_spills(compiled)


@pytest.mark.skipif(TRITON != "3.9.0", reason="docs/gpu.md is of Triton 3.9.0")
@of_each(OTHERS)
def test_no_loop_takes_more_issue_slots_elsewhere(target, kernels):
    for report in with_loops(compiled_on(target, kernels)):
        kernel = report["path"], report["kernel"]
        now = [loop_of(loop).way.instructions for loop in report.get("loops", ())]
        before = [row[f"sm_{target}"] for key, row in SLOTS.items() if key[:2] == kernel]
        assert len(now) == len(before), "run python tests/gpu_page.py triton"
        assert all(way <= 1.03 * row for way, row in zip(now, before, strict=True)), (kernel, now, before, REGENERATE)


@of_each(AMD)
def test_amd_loads_as_wide(target, kernels):
    compiled = compiled_on(target, kernels)
    found = {(report["path"], report["kernel"]): report["loads"].get("128", 0) for report in compiled}
    for kernel in {"_select_top", "_prepare_leaves", "_deliver_gradient", "_correct_tokens"}.intersection(kernels):
        steps = [report["loads"].get("128", 0) for report in compiled if report["kernel"] == kernel]
        found[HEAVIEST[kernel], kernel] = sum(steps)  # one launch on NVIDIA, one for each step here
    expected = {kernel: loads for kernel, loads in WIDE_LOADS.items() if kernel in found}
    assert expected  # a loop may be unrolled there, and hold more
    assert [kernel for kernel, loads in expected.items() if found[kernel] < loads] == []


NARROWED = {
    *("_prepare_leaves", "_correct_tokens", "_deliver_gradient"),  # indices of leaves
    *("_forward", "_backward", "_differentiate_loss"),  # columns of a row
    "_write_keys",  # which hashes the number of a token
}


@of_each(AMD)
def test_amd_indexes_tokens_in_64_bits(target, kernels):
    """Triton's backend for AMD would cut the indices of a loop over numbers of tiles, and lose tokens from 2^29 on."""
    cut = {each["kernel"] for each in compiled_on(target, kernels) if each["narrowed"]}
    assert cut <= NARROWED


@pytest.mark.long
@pytest.mark.parametrize("target", [*OTHERS, *AMD])
@pytest.mark.parametrize("share", range(SHARES))
def test_every_path_compiles_for_every_target_without_spilling(share, target):
    compiled = reports(target, "--share", str(share), str(SHARES))
    if target not in AMD:  # where each step of a kernel is a launch
        assert [report["kernel"] for report in compiled] == [report["kernel"] for report in share_on_sm_90(share)]
    assert_no_spills(compiled)


@pytest.mark.long
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("share", range(SHARES_OF_ALL))
def test_every_structure_compiles_for_every_target_without_spilling(share, target):
    assert_no_spills(reports(target, "--all", "--share", str(share), str(SHARES_OF_ALL)))


DEBUGGED = """
import json

import triton
from hpo_core._triton import compile

triton.knobs.runtime.debug = True  # TRITON_DEBUG=1
kernels = compile.specialisations(compile.paths(), 90, ["covariance, draw/_write_keys"])
print(json.dumps(["__assertfail" in kernel.asm["ptx"] for _, kernel in kernels]))
"""


def test_debug_mode_takes_no_intended_overflow_for_an_error():
    """A hash wraps."""
    assert answer(DEBUGGED) == [False]


COUNT_COMPILATIONS = """
import collections, itertools, json, math
import torch
from hpo_core._triton import advantages, compile, corrections, covariance, entropy, gates, logprobs, loss_from_logits
from hpo_core._triton import scale, scopes, segments
from hpo_core.specs import *

def row_values(rows, dtype=torch.float32):
    return torch.empty(rows, dtype=dtype, device="meta")

def sweep():
    bounds = [(0.0, math.inf), (0.8, 1.2), (1.0, 16.0)]
    for (tokens, rows), (low, high) in itertools.product(SIZES, bounds):
        offsets, mask = row_values(rows + 1, torch.int64), row_values(tokens, torch.bool)
        batch = PolicyLossInputs(*map(row_values, (tokens, tokens, rows, rows)), offsets, mask)
        clip = PolicyLossSpec(token_low=(low, low), token_high=(high, high), low_driven=(low > 0, True))
        gates.policy_loss(batch, clip, True, False)
        ranges = {name: row_values(rows, torch.int64) for name in ("leaf_begin", "leaf_end", "leaf_row")}
        leaves = batch._replace(**ranges, ancestors=torch.empty((1, rows), dtype=torch.int64, device="meta"))
        steps = LevelSpec(Unit.STEP, LevelKind.CLIP, low=(-low,) * 4, high=(high,) * 4, slope=low)
        for drops in ({"token_log_high": (low, high)}, {"token": TokenGate.DROP}):
            gates.policy_loss(leaves, PolicyLossSpec(levels=(steps,), **drops), True, False)
        term = TermSpec((low + 1, high), (low, 0.5), pre_high=(high, low), penalty=Penalty.K1, penalty_coefficient=low)
        gates.policy_loss(leaves, PolicyLossSpec(levels=(steps,), head=Head.SIMPLE, term=term), True, False)
        mean = Statistic.LOG_RATIO, Reduction.MEAN, Action.BAND
        corrections.correction(leaves, CorrectionSpec(*mean, True, False, (-low, low), (high, 1.0)))
        segments.row_counts(mask, offsets, tokens)
        segments.row_weights(mask, offsets, tokens, Denominator.TOKENS, low)
        segments.row_spans(mask, offsets, tokens)
        for first, last in ((0, 0), (1, 4), (-16, 0)):
            entropy.window_score(batch.logp, mask, offsets, first, last, Boundary.FULL, Invalid.SKIP)
            carried = Boundary.CARRY, Invalid.SKIP, WindowAggregate.MAX
            entropy.window_score(batch.logp, mask, offsets, first, last, *carried)
            entropy.window_score(batch.logp, mask, offsets, first, last + 1000, Boundary.FULL, Invalid.SKIP)
        for quantile in ((1, 1), (16, 32), (3602879701896397, 2**52)):
            threshold, _ = entropy.order_statistic(batch.logp, *quantile, OrderRule.CEIL, mask, offsets)
            entropy.select(batch.logp, threshold, False, mask, offsets)
            scopes.order_statistics(batch.logp, Scopes(offsets), *quantile, OrderRule.CEIL, mask)
            scopes.select_exact(batch.logp, Scopes(offsets), row_values(rows, torch.int64), mask)
            if rows > 1:
                only = Scopes(offsets, row_values(rows, torch.int64), row_values(2, torch.int64))
                scopes.order_statistics(batch.logp, only, *quantile, OrderRule.CEIL, mask)
                scopes.select_exact(batch.logp, only, row_values(1, torch.int64), mask)
            draw = TokenDraw(batch.old_logp, (-low, high, low, 1.0), quantile[0] % 2**32, quantile[1] % 2**32)
            covariance.covariance(batch.logp, batch.advantages, offsets, mask, draw)
        for ddof, eps, keep, size in ((0, 0.0, False, 1.0), (1, 1e-6, True, -0.5), (1, 16.0, False, 0.0)):
            rule = GroupTerm(ddof=ddof, eps=eps, keep_singletons=keep, coefficient=size)
            ids = row_values(rows, torch.int64)
            groups = GroupInputs((batch.weights,) * 2, (ids, None), (None, batch.weights))
            advantages.group_normalise(groups, GroupNormalisation((rule, rule), share_eps=eps, share_least=eps))
            absolute = GroupTerm(scale=Scale.ABSOLUTE, ddof=ddof, eps=eps, keep_singletons=keep, coefficient=size)
            one_group = GroupInputs((batch.weights,), (None,), (None,))
            advantages.group_normalise(one_group, GroupNormalisation((absolute,), share_eps=eps, share_least=eps))
        segments.group_statistics(batch.weights, ids, None, None)
        segments.group_statistics(batch.weights, None, None, None)
        scale.scale(batch.logp, row_values(1))
        segments.recurrence(batch.logp.double(), batch.logp.double(), offsets)
        for vocabulary, temperature, ignored in ((1, 1.0, -100), (1024, 16.0, 1), (50257, 0.7, 0), (151936, 0.5, 16)):
            logits = torch.empty((rows, vocabulary), dtype=torch.bfloat16, device="meta")
            targets = row_values(rows, torch.int64)
            every = LogitRows(logits, targets, None, temperature, ignored, None, 0, vocabulary)
            statistics = logprobs.token_logprobs(every, 3)[2]
            logprobs.token_logprobs_backward(every, statistics, batch.weights, batch.weights, None)
            values = batch.weights
            of_rows = batch._replace(logp=values, old_logp=values, mask=row_values(rows, torch.bool))
            loss_from_logits.loss_from_logits(every, of_rows, clip, logits)

SIZES = [(0, 0), (0, 1), (1, 1), (15, 2), (16, 16), (1024, 17), (4097, 4096), (2**33, 2**20)]
asked = []  # one entry per launch, because no kernel is ever compiled
with compile.compiling(90, lambda kernel, key: asked.append((kernel, key))):
    sweep()
launches = collections.Counter(kernel for kernel, _ in asked)
kernels = collections.Counter(kernel for kernel, _ in set(asked))
print(json.dumps([launches, kernels]))
"""

COUNT_BY_PRESET = """
import json

import torch
from hpo_core import gates as presets
from hpo_core import kl
from hpo_core._triton import compile, gates
from hpo_core.specs import PolicyLossInputs

def values(*size, dtype=torch.float32):
    return torch.empty(size, dtype=dtype, device="meta")

def own(number):
    clip = presets.Clip((0, 0), (number, 2), weight_low=(number, 3), slope_high=(number, 2))
    return presets.RatioGate("own", clip, pre=presets.LogClip((0, -2), (number, 2)))

batch = PolicyLossInputs(*map(values, (64, 64, 2, 2)), values(3, dtype=torch.int64), ref_logp=values(64))
names = "dro", "gmpo", "kimi", "opmd", "ppo_penalty", "sapo", "spo", "vespo"
makers = {name: getattr(presets, name) for name in names} | {"own": own}
makers["vespo"] = lambda number: presets.vespo((number, 3), (3, number))
kernels = {}  # the specialisations of each by its number
for name, make in makers.items():
    kernels[name] = []
    for number in (1.0, 1, 2, 16):
        asked = set()
        with compile.compiling(90, lambda kernel, key: asked.add(kernel + key)):
            gates.policy_loss(batch, make(number).spec(kl.k3(number)), True, False)
        kernels[name].append(sorted(asked))
print(json.dumps(kernels))
"""


COUNT_ALIGNED = """
import json

from hpo_core._triton import compile, compiled_paths

asked = []
with compile.compiling(90, lambda kernel, key: asked.append((kernel, key))):
    for _, call in compiled_paths.paths():
        call()
print(json.dumps([len(asked), sorted({kernel for kernel, key in asked if "'D'" in key})]))
"""


# The compiler stops behind its front end, which types every operation and unrolls every loop.
FRONT_END = f"""
import json

from hpo_core._triton import compile
from triton import knobs

def stop(backend=None, stages=None, *_):
    if backend is None:
        return "front end", "front end"  # of the kernels' key in the cache
    front = stages["ttir"]
    stages.clear()
    stages["ttir"] = front
    stages["cubin"] = lambda ir, metadata: metadata.update(name="", shared=0) or b""

wanted = {[f"{path}/{kernel}" for path, kernel in PAGE if path in AT_LENGTH]!r}
knobs.runtime.add_stages_inspection_hook = stop
passed = [[path, kernel.src.fn.__name__] for path, kernel in compile.specialisations(compile.paths(), 90, wanted)]
print(json.dumps(passed))
"""


def test_the_front_end_takes_what_is_assembled_at_length():
    passed = Counter(map(tuple, answer(FRONT_END)))
    # On four levels one launch of both steps would take more registers than two programs of a multiprocessor have.
    apart = {("hierarchy: four levels, all inputs", "_deliver_gradient"), ("hierarchy: balanced", "_deliver_gradient")}
    assert passed == {each: 1 + (each in apart) for each in PAGE if each[0] in AT_LENGTH}


ELSEWHERE = f"""
import json

from hpo_core._triton import compile

names = { ({target: [f"{HEAVIEST[each]}/{each}" for each in kernels] for target, kernels in OF_OTHERS.items()})!r}
print(json.dumps([
    {{"target": target, "path": path, **compile.report(kernel)._asdict()}}
    for target in names for path, kernel in compile.specialisations(compile.paths(), target, names[target])
]))
"""


SCRIPTS = (DEBUGGED, SELECT_TOP, NAME_KERNELS, COUNT_COMPILATIONS, COUNT_ALIGNED, COUNT_BY_PRESET, FRONT_END, ELSEWHERE)


def test_sizes_and_numbers_never_compile_again():
    """By default Triton compiles anew for 1, for multiples of 16 and for sizes beyond 32 bits."""
    launches, kernels = answer(COUNT_COMPILATIONS)
    of_page = {kernel for _, kernel in PAGE}
    assert of_page - set(kernels) == set(), "call each in COUNT_COMPILATIONS"
    assert set(kernels) - of_page == set(), "docs/gpu.md has no row of these: run python tests/gpu_page.py triton"
    assert kernels == {
        "_sweep": 1,
        "_finalise": 1,
        "_prepare_leaves": 3,  # of a level alone, with a settled gradient, with a pre-gate
        "_sweep_leaves": 3,  # likewise
        "_deliver_gradient": 2,
        "_correct_tokens": 1,
        "_count_rows": 2,  # counts alone, and weights
        "_find_spans": 1,
        "_score_windows": 2,  # means and maxima
        "_carry_rows": 1,
        "_begin_wide_windows": 1,
        "_add_wide_digit": 1,
        "_finish_wide_windows": 1,
        "_select_top": 1,
        "_select": 1,
        "_scan_scopes": 2,  # quantiles and selections of k
        "_scan_only_scope": 2,
        "_sum_members": 1,
        "_write_keys": 1,
        "_normalise_few": 2,  # two terms, and one
        "_sum_tiles": 3,  # with weights, without, and with extremes; from here on with more than groups.SCANNED units
        "_merge_tiles": 1,
        "_normalise_runs": 1,
        "_normalise_all_members": 2,  # two terms, and one
        "_sum_absolute_tiles": 1,
        "_statistics_of_few": 1,
        "_statistics_of_runs": 1,
        "_statistics_of_all_members": 1,
        "_scale": 1,
        "_scan_rows": 1,
        "_forward": 2,  # rows that begin where 128 bits can be loaded, and others
        "_backward": 2,
        "_differentiate_loss": 2,
    }
    assert all(launches[kernel] >= 3 * count for kernel, count in kernels.items())


def test_whole_numbers_of_a_gate_never_compile_again():
    """Triton types a number in a tuple by its value: an integer would be another kernel."""
    for name, (first, *others) in answer(COUNT_BY_PRESET).items():
        assert first and all(each == first for each in others), name


def test_the_address_of_a_tensor_never_compiles_again():
    """A view of a tensor may begin anywhere. Triton's key of a specialisation has a D for what 16 divides."""
    launches, aligned = answer(COUNT_ALIGNED)
    assert launches > 0 and aligned == []
