"""The CUDA emulation: correct kernels give NumPy's results in every order, and planted bugs are found."""

import importlib.util
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
ORDERS = ["forward", "reverse", *(f"random:{seed}" for seed in range(1, 5))]


def load_selftest():
    path = os.environ.get("HPO_CORE_INSTRUMENTED_SELFTEST")
    if path is None:
        return importlib.import_module("hpo_core._emulation_selftest")
    spec = importlib.util.spec_from_file_location("_emulation_selftest", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


cuda = load_selftest()


def address(array):
    assert array.flags.c_contiguous
    return array.ctypes.data


def in_every_order(monkeypatch, run):
    """The arrays that `run` returns, which must have the same bits in every order of blocks and threads."""
    results = []
    for order in ORDERS:
        monkeypatch.setenv("HPO_EMULATION_ORDER", order)
        results.append(run())
    for other in results[1:]:
        for first, second in zip(results[0], other, strict=True):
            assert first.tobytes() == second.tobytes()
    return results[0]


# ---- right kernels ----


def test_segmented_sum(monkeypatch):
    random = np.random.default_rng(0)
    lengths = np.concatenate([random.integers(0, 900, 40), [0, 1, 2, 3, 4, 5]])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    values = random.standard_normal(offsets[-1] + 4).astype(np.float32)

    def run():
        sums = np.full(len(lengths), np.nan, np.float32)
        cuda.segmented_sum(address(values), address(offsets), address(sums), len(lengths))
        return [sums]

    [sums] = in_every_order(monkeypatch, run)
    expected = [values[a:b].astype(np.float64).sum() for a, b in itertools.pairwise(offsets)]
    np.testing.assert_allclose(sums, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("bf16", [False, True])
def test_logsumexp(monkeypatch, bf16):
    values = (np.random.default_rng(1).standard_normal((5, 1003)) * 10).astype(np.float32)
    values[3, 5:] = -np.inf
    values[4] = -np.inf
    stored = values
    if bf16:
        bits = values.view(np.uint32)
        stored = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
        values = (stored.astype(np.uint32) << 16).view(np.float32)

    def run():
        out = np.full(len(values), np.nan, np.float32)
        (cuda.logsumexp_bf16 if bf16 else cuda.logsumexp)(address(stored), address(out), *values.shape)
        return [out]

    [out] = in_every_order(monkeypatch, run)
    np.testing.assert_allclose(out, np.logaddexp.reduce(values.astype(np.float64), axis=1), rtol=1e-6)


def test_histogram_whose_last_block_sums(monkeypatch):
    bins, values = 300, np.random.default_rng(2).integers(0, 300, 5000).astype(np.int32)

    def run():
        counts, below = np.full(bins, 7, np.uint32), np.full(bins, 7, np.uint32)
        finished = np.zeros(1, np.uint32)
        cuda.histogram(address(values), len(values), address(counts), address(below), address(finished), bins, 7)
        return [counts, below, finished]

    counts, below, finished = in_every_order(monkeypatch, run)
    expected = np.bincount(values, minlength=bins)
    np.testing.assert_array_equal(counts, expected)
    np.testing.assert_array_equal(below, np.cumsum(expected) - expected)
    assert finished == 0


def test_sliding_mean(monkeypatch):
    values, radius = np.random.default_rng(3).standard_normal(1000).astype(np.float32), 17

    def run():
        means = np.full(len(values), np.nan, np.float32)
        cuda.sliding_mean(address(values), address(means), len(values), radius)
        return [means]

    [means] = in_every_order(monkeypatch, run)
    expected = [values[max(0, i - radius) : i + radius + 1].mean(dtype=np.float64) for i in range(len(values))]
    np.testing.assert_allclose(means, expected, rtol=0, atol=1e-6)


def test_every_warp_and_block_primitive(monkeypatch):
    threads = 96

    def run():
        out = np.full((threads, 17), np.nan)
        atomics = np.zeros(7, np.int64)
        cuda.primitives(address(out), address(atomics), threads)
        return [out, atomics]

    out, atomics = in_every_order(monkeypatch, run)
    thread = np.arange(threads)
    lane, warp = thread % 32, thread // 32 * 32
    expected = [
        warp + 3,
        thread // 8 * 8 + (lane + 1) % 8,
        np.where(lane >= 2, thread - 2, thread),
        np.where(lane % 4 >= 1, thread - 1, thread),
        np.where(lane < 27, thread + 5, thread),
        np.where(lane % 16 < 15, thread + 1, thread),
        thread ^ 7,
        warp + np.where(lane < 16, 15, 16),
        sum(1 << i for i in range(0, 32, 3)),
        1 + 4 * np.where(lane < 16, 0xFFFF, 0xFFFF0000),
        1,
        1,
        8 + 100 * 4 + 10000 * 31,
        0x3F800000 + 1.0,  # 1.00390625 is between two bfloat16 numbers and rounds to the even one
        1 + 10 * -3 + 100,
        1 + 10 * -3 + 100,
        1 + 1000 * 8 + 10000,
    ]
    for column, numbers in enumerate(expected):
        np.testing.assert_array_equal(out[:, column], np.broadcast_to(numbers, threads), err_msg=f"column {column}")
    assert atomics[0].astype(np.int32) == -threads
    assert list(atomics[1:6]) == [2 * threads, -threads << 32, threads << 40, 1 - threads, threads - 1]
    assert list(atomics[6:].view(np.int32)) == [threads, 7]


@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_blocks_that_wait_for_each_other(monkeypatch, blocks):
    monkeypatch.setenv("HPO_EMULATION_PROCESSORS", str(2 * blocks))
    threads, rounds = 70, 3

    def run():
        sums, out = np.full(blocks, -1, np.int32), np.full((blocks, threads), -1, np.int32)
        cuda.rounds(address(sums), address(out), rounds, blocks, threads)
        return [out]

    [out] = in_every_order(monkeypatch, run)
    expected = np.arange(blocks * threads).reshape(blocks, threads)
    for _ in range(rounds):
        total = (np.arange(1, blocks + 1) * expected.sum(1)).sum()
        expected = np.broadcast_to((np.arange(threads) + total) % 1000, (blocks, threads))
    np.testing.assert_array_equal(out, expected)


# ---- planted bugs ----


def run_bug(name):
    out = np.zeros(64, np.float32)
    cuda.bug(name, address(out))
    return out


RACES = ["missing_barrier", "write_after_read", "missing_syncwarp", "same_address", "racing_blocks", "order_of_arrival"]


@pytest.mark.parametrize("bug", RACES)
def test_a_race_changes_the_result_with_the_order(monkeypatch, bug):
    outcomes = {}
    for order in ("forward", "reverse"):
        monkeypatch.setenv("HPO_EMULATION_ORDER", order)
        outcomes[order] = run_bug(bug).tobytes()
    assert outcomes["forward"] != outcomes["reverse"]


# The accesses that a GPU may answer with an old value, or refuses, and a part of the message for each. The emulation
# finds them in every order; the block and the line that it names depend on the order.
UNORDERED = {
    "missing_grid_barrier": "reads what block",
    "missing_second_grid_barrier": "reads what block",
    "missing_fence_before": "reads what block",
    "missing_fence_behind": "reads what block",
    "fences_of_others_before": "reads what block",
    "fences_of_others_behind": "reads what block",
    "read_only_of_written": "reads through the read-only path what this launch has written",
    "written_of_read_only": "writes what this launch reads through the read-only path (4 bytes), behind",
    "misaligned_vector": "a misaligned load of 16 bytes, at",
    "misaligned_read_only": "a misaligned load of 16 bytes, at",
    "misaligned_store": "a misaligned store of 16 bytes, behind",
    "misaligned_scalar": "a misaligned store (8 bytes), behind",
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("bug", UNORDERED)
def test_an_unordered_access_is_found(monkeypatch, bug, order):
    monkeypatch.setenv("HPO_EMULATION_ORDER", order)
    with pytest.raises(RuntimeError) as caught:
        run_bug(bug)
    message = str(caught.value)
    assert message.startswith(f"emulated kernel {bug}, block (") and UNORDERED[bug] in message
    assert np.isnan(run_bug("uninitialised_shared")).all(), "the next launch works"


@pytest.mark.parametrize("order", ORDERS)
def test_fences_around_a_ticket_are_enough(monkeypatch, order):
    monkeypatch.setenv("HPO_EMULATION_ORDER", order)
    assert run_bug("fences_around_a_ticket")[32] == 3
    assert (run_bug("fences_of_the_ticket")[2:60:4] == 2).all()


def test_an_unordered_ticket_is_found(monkeypatch):
    monkeypatch.setenv("HPO_EMULATION_ORDER", "forward")
    with pytest.raises(RuntimeError, match="reads what block 0 writes"):
        run_bug("missing_barrier_before_a_ticket")


def test_blocks_interleave_at_random(monkeypatch):
    """Blocks that run one after the other hide a lost update."""

    def updates(order):
        monkeypatch.setenv("HPO_EMULATION_ORDER", order)
        return int(run_bug("lost_update").view(np.int32)[0])

    assert updates("forward") == updates("reverse") == 3
    assert {updates(f"random:{seed}") for seed in range(20)} >= {1, 2, 3}


def test_shared_memory_starts_as_nan():
    assert np.isnan(run_bug("uninitialised_shared")).all()


# The text of each message; "" if the thread that meets the bug first depends on the order.
FAULTS = {
    "early_return": "",
    "late_return": "",
    "divergent_barrier": "a barrier, while other threads of the block wait at the one of",
    "absent_block": "a grid barrier, while block (1, 0, 0) has returned",
    "absent_thread": "",
    "divergent_grid_barrier": "a grid barrier, while block (1, 0, 0) waits at the one of",
    "barriers_of_both_kinds": "a barrier, while other threads of the block wait at the one of",
    "grid_barrier_of_no_grid": "a grid barrier, which only a cooperative launch has",
    "deadlock": "a deadlock: no thread can go on; thread (0, 0, 0) waits at",
    "lane_outside_mask": "a warp operation by a lane outside its own mask",
    "source_outside_mask": "a shuffle that reads lane 20, which is outside its mask",
    "different_masks": "",
    "different_operations": "a warp operation that names lanes which wait for this one at another",
    "returned_lane": "",
    "static_overflow": "index 64 of shared values, which has 64",
    "static_underflow": "index -1 of shared values, which has 64",
    "inner_overflow": "of shared values, which has 32",
    "dynamic_overflow": "index 64 of shared values, which has 64",
    "misaligned_dynamic": "misaligned shared values",
    "raw_overflow": "a write past the end of shared array values",
    "too_much_with_static": "no room for shared values",
}
REFUSED = {
    "no_blocks": "a grid of (0, 1, 1) blocks",
    "no_threads": "blocks of (0, 1, 1) threads",
    "too_many_threads": "blocks of (64, 32, 1) threads",
    "too_many_blocks": "a grid of (1, 65536, 1) blocks",
    "too_many_together": "4 blocks together, over 3",
    "too_much_shared": "50176 bytes of dynamic shared memory, over 49152",
}


def lines_of(kernel):
    source = (ROOT / "csrc/emulation/planted_bugs.h").read_text().splitlines()
    first = next(number for number, line in enumerate(source, 1) if line.startswith(f"__global__ void {kernel}("))
    return range(first, first + source[first:].index("}") + 1)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("bug", FAULTS)
def test_a_fault_names_kernel_block_and_line(monkeypatch, bug, order):
    monkeypatch.setenv("HPO_EMULATION_ORDER", order)
    with pytest.raises(RuntimeError) as caught:
        run_bug(bug)
    message = str(caught.value)
    assert message.startswith(f"emulated kernel {bug}, block (0, 0, 0)")
    assert FAULTS[bug] in message
    assert int(message.rpartition("planted_bugs.h:")[2]) in lines_of(bug)
    assert np.isnan(run_bug("uninitialised_shared")).all(), "the next launch works"


@pytest.mark.parametrize("bug", REFUSED)
def test_an_impossible_launch_is_refused(bug):
    with pytest.raises(RuntimeError) as caught:
        run_bug(bug)
    assert str(caught.value) == f"emulated kernel nothing: invalid launch with {REFUSED[bug]}"


ALONE = [
    "uninitialised_shared", "fences_around_a_ticket", "fences_of_the_ticket", "missing_barrier_before_a_ticket",
    "lost_update",
]  # fmt: skip


def test_every_planted_bug_is_tested():
    assert set(cuda.bugs()) == {*RACES, *UNORDERED, *FAULTS, *REFUSED, *ALONE}


def test_an_unknown_order_is_refused(monkeypatch):
    monkeypatch.setenv("HPO_EMULATION_ORDER", "sideways")
    with pytest.raises(RuntimeError, match="HPO_EMULATION_ORDER is forward, reverse or random:SEED, not sideways"):
        run_bug("same_address")


# ---- the launch counter, the sanitizers, the other compiler ----


def test_launches_are_counted_by_kernel():
    def count():
        return {name: cuda.launches().get(name, 0) for name in ("same_address", "logsumexp_kernel")}

    before = count()
    run_bug("same_address")
    run_bug("same_address")
    row, out = np.zeros((1, 8), np.float32), np.zeros(1, np.float32)
    cuda.logsumexp(address(row), address(out), 1, 8)
    cuda.logsumexp_bf16(address(row.astype(np.uint16)), address(out), 1, 8)
    after = count()
    assert {name: after[name] - before[name] for name in after} == {"same_address": 2, "logsumexp_kernel": 2}


@pytest.mark.long
def test_sanitizers_understand_the_fibers(tmp_path):
    """The tests of this file pass with an instrumented emulation, and a sanitizer names the access that writes past the
    end of an array, of which the emulation names the array."""
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("csrc/include", "csrc/emulation"):
        shutil.copytree(ROOT / name, tmp_path / name)
    build = os.environ | {"HPO_CORE_EMULATED": "1", "HPO_CORE_CUDA": "0", "HPO_CORE_SANITIZE": "address,undefined"}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", "built"]
    subprocess.run(command, cwd=tmp_path, env=build, check=True, capture_output=True)
    [module] = tmp_path.glob("built/hpo_core/_emulation_selftest*")

    def library(name):
        return subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip()

    instrumented = os.environ | {
        "HPO_CORE_INSTRUMENTED_SELFTEST": str(module),
        "LD_PRELOAD": f"{library('libasan.so')} {library('libstdc++.so')}",
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=1",
    }

    def run(selection):
        command = [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", "-k", selection, __file__]
        return subprocess.run(command, cwd=tmp_path, env=instrumented, capture_output=True, text=True)

    # This build has the hooks of the sanitizers in place of those that find unordered accesses.
    everything = run("not raw_overflow and not unordered and not sanitizers and not nvcc")
    assert everything.returncode == 0, everything.stdout + everything.stderr
    overflow = run("raw_overflow and forward")
    assert "ERROR: AddressSanitizer: use-after-poison" in overflow.stderr
    assert "in raw_overflow" in overflow.stderr


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("name", ["selftest", "selftest_memory"])
def test_nvcc_compiles_the_same_source(tmp_path, name):
    """Source that the emulation accepts must be CUDA."""
    source, target = ROOT / f"csrc/emulation/{name}.cu", tmp_path / f"{name}.o"
    command = ["nvcc", "-std=c++17", "-arch=sm_90", f"-I{ROOT / 'csrc/include'}", "-c", source, "-o", target]
    subprocess.run(command, check=True)
    assert target.stat().st_size > 0
