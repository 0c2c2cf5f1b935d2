"""Deliberate bugs in every backend, each killed by a named test. A test that cannot fail proves nothing.

A mutant is one substitution in the sources. Triton's run from a patched copy of the package; of the C++ and CUDA
sources the one patched file is compiled again (CUDA through the emulation) and linked with the objects of the build.
"""

import importlib.util
import inspect
import math
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from test_hierarchy import GATES as HIERARCHIES

import hpo_core as hpo
from hpo_core import gates
from hpo_core.advantages import Share
from hpo_core.native import Native

backends = sys.modules["hpo_core.backends"]
ROOT = Path(__file__).resolve().parents[1]
COMPILER = ("g++", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-O1", "-w")

# name: backend, compiled file, patched file, from, to, the test that kills it, its arguments
WINDOW_BORDER = "test_entropy.test_no_window_crosses_a_border"
MUTANTS = {
    "cuda: window crosses the border": (
        "cuda_emulated", "cuda/entropy.cu", "cuda/entropy.cu",
        "min(token + windows.last, range.end - 1)", "token + windows.last",
        WINDOW_BORDER, {},
    ),
    "cuda: missing barrier between two doublings": (
        "cuda_emulated", "cuda/entropy.cu", "cuda/entropy.cu",
        "    from = to;\n    __syncthreads();", "    from = to;",
        "test_entropy.test_constant_is_its_own_mean", {"width": 8},
    ),
    "cuda: quantile rounds down": (
        "cuda_emulated", "cuda/entropy.cu", "cuda/entropy.cu",
        "args.denominator, args.rule, population", "args.denominator, OrderRule::floor, population",
        "test_entropy_selection.test_index_is_exact_where_floats_fail", {},
    ),
    "cuda: masked entropies are selected": (
        "cuda_emulated", "cuda/entropy.cu", "cuda/entropy.cu",
        "const bool valid = window.exists && (!args.mask || args.mask[token]);", "const bool valid = window.exists;",
        "test_entropy_selection.test_garbage_under_the_mask_is_never_read", {"bad": 99.0},
    ),
    "cuda: missing barrier before warps are added up": (
        "cuda_emulated", "cuda/advantages.cu", "cuda/groups.cuh",
        "of_warp[lane() / kLanes][warp_in_block()] = sum;\n  __syncthreads();",
        "of_warp[lane() / kLanes][warp_in_block()] = sum;",
        "test_advantages.test_many_units", {"units": 1000},
    ),
    "cuda: biased standard deviation": (
        "cuda_emulated", "cuda/advantages.cu", "include/hpo/advantages.h",
        "squares / (group.weight - ddof)", "squares / group.weight",
        "test_advantages.test_p3_second_moment", {"ddof": 1},
    ),
    "cuda: a ratio at its bound is clipped": (
        "cuda_emulated", "cuda/gates.cu", "include/hpo/gates.h",
        "{clipped, clipped == ratio}", "{clipped, clipped == ratio && ratio < high}",
        "test_gates.test_ratio_exactly_at_its_bound_passes_the_gradient", {},
    ),
    "cuda: masked tokens are read": (
        "cuda_emulated", "cuda/gates.cu", "cuda/gates_tokens.cuh",
        "inputs.group.has(i) && (!args.mask || byte_of(inputs.mask, i))", "inputs.group.has(i)",
        "test_gate_promises.test_masked_is_never_read", {"gate": gates.dapo()},
    ),
    "cuda: what a tile hands up is added by place in memory": (
        "cuda_emulated", "cuda/hierarchy.cu", "cuda/hierarchy.cu",
        "token = unsigned(lane()) % kAdders; token < kWindow; token += kAdders",
        "token = lane() % kAdders * 16, end = token + 16; token < end; ++token",
        "test_hierarchy.test_a_trajectory_does_not_know_where_it_lies", {"name": "bent"},
    ),
    "cuda: the further tiles of a piece begin where the pack's do": (
        "cuda_emulated", "cuda/hierarchy.cu", "cuda/pieces.cuh",
        "begin = token + begin % kTile;", "begin = token;",
        "test_hierarchy.test_a_long_piece_is_shared_by_many_workers", {"gate": gates.fiberpo(0.05, (0.03, 0.02))},
    ),
    "cuda: sums begin before every block has cleared its share": (
        "cuda_emulated", "cuda/hierarchy.cu", "cuda/hierarchy.cu",
        "prepare(call);\n  sync_grid();", "prepare(call);",
        "test_hierarchy.test_many_short_pieces", {"routing": gates.Routing.THROUGH},
    ),
    "cuda: gradient is delivered before all has arrived": (
        "cuda_emulated", "cuda/hierarchy.cu", "cuda/hierarchy.cu",
        "if (call.hierarchy.stage == Stage::whole) sync_grid();", "",
        "test_hierarchy.test_many_short_pieces", {"routing": gates.Routing.THROUGH},
    ),
    "cuda: children are counted before all of them are complete": (
        "cuda_emulated", "cuda/hierarchy.cu", "cuda/hierarchy.cu",
        "      sync_grid();\n      add_children(call, k);", "      add_children(call, k);",
        "test_hierarchy.test_every_backend_is_the_definition", {"gate": HIERARCHIES["balanced, 3 levels, self"]},
    ),
    "cpu: what arrives at a balanced level is not divided by its children": (
        "cpu", "cpu/hierarchy.cpp", "include/hpo/hierarchy.h",
        " children *= divisor(hierarchy.levels[k], segment(k).valid);", ";",
        "test_hierarchy.test_every_backend_is_the_definition", {"gate": HIERARCHIES["balanced, 2 levels, through"]},
    ),
    "cpu: what arrives at a log mean exp goes to all tokens alike": (
        "cpu", "cpu/hierarchy.cpp", "cpu/hierarchy_terms.h",
        "return flow * mean_exp_slope(split, tile.x[i]);", "return flow;",
        "test_hierarchy.test_every_backend_is_the_definition", {"gate": HIERARCHIES["mean exp, 1 levels, through"]},
    ),
    "triton: a child without tokens counts": (
        "triton", None, "told.py",
        "mask=exists, other=0) > 0)", "mask=exists, other=0) >= 0)",
        "test_hierarchy.test_every_backend_is_the_definition", {"gate": HIERARCHIES["balanced, 3 levels, self"]},
    ),
    "cpu: window crosses the border": (
        "cpu", "cpu/entropy.cpp", "cpu/entropy.cpp",
        "args.cu_seqlens[row + 1] - rule.last", "args.cu_seqlens[row + 1]",
        "test_entropy.test_every_window", {"boundary": "full", "invalid": "skip", "first": 0, "last": 3},
    ),
    "cpu: off by one at the head of a row": (
        "cpu", "cpu/entropy.cpp", "cpu/entropy.cpp",
        "smaller(t + rule.last + 1, row_end)", "smaller(t + rule.last, row_end)",
        "test_entropy.test_every_window", {"boundary": "shrink", "invalid": "skip", "first": -3, "last": 0},
    ),
    "cpu: masked entropies are averaged": (
        "cpu", "cpu/entropy.cpp", "cpu/entropy.cpp",
        "args.mask[start + j] ? -1 : 0", "-1",
        "test_entropy.test_boundary_and_invalid_policies_by_hand", {},
    ),
    "cpu: masked entropies are in the population": (
        "cpu", "cpu/entropy_selection.cpp", "cpu/entropy_scores.h",
        "masked |= mask_[t] == 0;", "masked |= false;",
        "test_entropy_selection.test_garbage_under_the_mask_is_never_read", {"bad": 99.0},
    ),
    "cpu: infinite entropies are selected": (
        "cpu", "cpu/entropy_selection.cpp", "cpu/entropy_selection.cpp",
        "n, threshold, selected) || scores.given))", "n, threshold, selected) || true))",
        "test_entropy_selection.test_many_tokens", {"masked": "none"},
    ),
    "cpu: a bracket that missed goes unnoticed": (
        "cpu", "cpu/entropy_selection.cpp", "cpu/entropy_selection.cpp",
        "if (index < below || index >= below + kept) {", "if (false) {",
        "test_entropy_selection.test_sample_that_misleads", {"planted": 0.5},
    ),
    "cpu: what was marked before the threshold was known stays": (
        "cpu", "cpu/entropy_selection.cpp", "cpu/entropy_selection.cpp",
        "if (low == end) return;", "return;",
        "test_select_top.test_ties", {"levels": 200},
    ),
    "cpu: marks beyond the room for them are taken for all": (
        "cpu", "cpu/entropy_selection.cpp", "cpu/entropy_selection.cpp",
        "return !full;", "return true;",
        "test_select_top.test_all_equal", {"value": 0.25},
    ),
    "cpu: infinite scores are selected where no threshold is": (
        "cpu", "cpu/entropy_selection.cpp", "cpu/entropy_selection.cpp",
        "marked &= population > 0;", "",
        "test_select_top.test_all_equal", {"value": math.inf},
    ),
    "cpu: plain tiles ignore the mask": (
        "cpu", "cpu/gates.cpp", "cpu/gates_plain.h",
        "kind = keep_if(present_own<kWhole>(own, mask + i), kind);", "",
        "test_gates.test_loss_and_gradient_and_nothing_per_token", {"gate": gates.dapo(), "masked": "some"},
    ),
    "cpu: plain tiles of few rows ignore the mask": (
        "cpu", "cpu/gates.cpp", "cpu/gates_plain.h",
        "kMasked ? present_own<kWhole>(own, mask + i) : own", "own",
        "test_gates.test_tiles_of_few_rows_have_the_gradient_of_any_other", {"gate": gates.dapo(), "masked": True},
    ),
    "cpu: the end of a row in an open tile runs on": (
        "cpu", "cpu/hierarchy.cpp", "cpu/hierarchy_plain.h",
        "kMasked ? present_own<kWhole>(own, mask + i) : own", "all_lanes()",
        "test_hierarchy.test_what_else_is_asked_for_changes_no_bit", {"gate": gates.fiberpo(), "masked": True},
    ),
    "cpu: a lower bound counts as an upper one": (
        "cpu", "cpu/gates.cpp", "cpu/gates.cpp",
        "under = !kHigh ? outside : ", "under = !kHigh ? 0 : ",
        "test_gates.test_tiles_of_few_rows_have_the_gradient_of_any_other", {"gate": gates.dapo(), "masked": True},
    ),
    "cpu: a row writes to tokens of the one before": (
        "cpu", "cpu/gates.cpp", "cpu/lanes.h",
        "else store_where(own, vector, to);", "else store_lanes(vector, to);",
        "test_gates.test_tiles_of_few_rows_have_the_gradient_of_any_other", {"gate": gates.dapo(), "masked": False},
    ),
    "cpu: a row that is clipped loses nothing": (
        "cpu", "cpu/gates.cpp", "cpu/gates.cpp",
        "loss[0] += gate.count(", "gate.count(",
        "test_gates.test_tiles_of_few_rows_have_the_gradient_of_any_other", {"gate": gates.dapo(), "masked": False},
    ),
    "cpu: tokens of no row are left as they were": (
        "cpu", "cpu/gates.cpp", "cpu/rows.h",
        "return covered == n;", "return true;",
        "test_gates.test_tiles_of_few_rows_have_the_gradient_of_any_other", {"gate": gates.dapo(), "masked": False},
    ),
    "cpu: a row without valid tokens is counted": (
        "cpu", "cpu/gates.cpp", "cpu/gates_plain.h",
        "if (of_row[index] > 0) mark_row", "mark_row",
        "test_gates.test_tiles_of_few_rows_have_the_gradient_of_any_other", {"gate": gates.dapo(), "masked": True},
    ),
    "cpu: what a sum near 0 lost stays lost": (
        "cpu", "cpu/hierarchy.cpp", "cpu/gates_plain.h",
        "return rest + int64_t(lost) * (int64_t(1) << 32);", "return rest;",
        "test_gates.test_log_ratios_near_0_have_the_bits_of_any_other", {"gate": gates.fiberpo()},
    ),
    "cpu: the exponential near 0 is used too far from it": (
        "cpu", "cpu/gates.cpp", "cpu/gates_plain.h",
        "kNear = 0.3465f", "kNear = 0.45f",
        "test_gates.test_log_ratios_near_0_have_the_bits_of_any_other", {"gate": gates.dapo()},
    ),
    "cpu: a falling token meets the mean of those that rise": (
        "cpu", "cpu/hierarchy.cpp", "cpu/hierarchy_plain.h",
        "kSplit ? all<Floats>(-levels.mean[1]) : rising_mean", "rising_mean",
        "test_hierarchy.test_what_else_is_asked_for_changes_no_bit", {"gate": gates.fiberpo(), "masked": True},
    ),
    "cpu: levels that saturate are taken for open": (
        "cpu", "cpu/hierarchy.cpp", "cpu/hierarchy_plain.h",
        "if (piece.bent[sign] || !passes(0)) return;", "",
        "test_hierarchy.test_what_else_is_asked_for_changes_no_bit",
        {"gate": gates.fiberpo(0.2, (0.05, 0.2)), "masked": True},
    ),
    "cpu: what is clipped from above is lost twice": (
        "cpu", "cpu/hierarchy.cpp", "cpu/hierarchy_plain.h",
        "counts.below += not_above -", "counts.below += present -",
        "test_hierarchy.test_what_else_is_asked_for_changes_no_bit", {"gate": gates.fiberpo(), "masked": True},
    ),
    "cpu: falling tokens receive what rising ones do": (
        "cpu", "cpu/hierarchy.cpp", "cpu/hierarchy_plain.h",
        "blend(falls, fall, rise)", "rise",
        "test_hierarchy.test_what_else_is_asked_for_changes_no_bit", {"gate": gates.fiberpo(), "masked": False},
    ),
    "cpu: a stretch goes on in tiles that are masked otherwise": (
        "cpu", "cpu/hierarchy.cpp", "cpu/hierarchy_pieces.h",
        "next * kTile < end && masked[next] == kind", "next * kTile < end",
        "test_hierarchy.test_stretches_of_a_long_piece_are_masked_alike", {"gate": gates.fiberpo(), "several": False},
    ),
    "cpu: flows of two tiles reach tokens of the row before": (
        "cpu", "cpu/hierarchy.cpp", "cpu/hierarchy.cpp",
        "add_to_plain(calls.of(masked).args, at, begin, n,", "add_to_plain(calls.of(masked).args, at, 0, n,",
        "test_hierarchy.test_what_else_is_asked_for_changes_no_bit", {"gate": gates.fiberpo(), "masked": False},
    ),
    "cpu: leave-one-out is the plain mean": (
        "cpu", "cpu/advantages.cpp", "include/hpo/advantages.h",
        "map.weight / others : 1.0", "1.0 : 1.0",
        "test_advantages.test_p7_reductions", {},
    ),
    "cpu: shares are not divided by their sum": (
        "cpu", "cpu/advantages.cpp", "include/hpo/advantages.h",
        "total / (shares + args.share_eps)", "total",
        "test_group_terms.test_many_units", {"units": 700, "share": Share.COUNT},
    ),
    "cpu: a row's scan goes on into the row before": (
        "cpu", "cpu/segments.cpp", "cpu/segments.cpp",
        "double following = 0.0;\n      for", "static double following = 0.0;\n      for",
        "test_segments.test_a_row_scans_alone", {},
    ),
    "triton: window crosses the border": (
        "triton", None, "entropy.py",
        "(neighbour >= range_.begin) & (neighbour < range_.end)", "(neighbour >= 0) & (neighbour < tokens)",
        WINDOW_BORDER, {},
    ),
    "triton: off by one at the end of a window": (
        "triton", None, "entropy.py",
        "tl.minimum(last, ahead) + 1)", "tl.minimum(last, ahead))",
        "test_entropy.test_every_window", {"boundary": "shrink", "invalid": "skip", "first": 0, "last": 3},
    ),
    "triton: ties with the threshold are dropped": (
        "triton", None, "entropy.py",
        "score > limit if STRICT else score >= limit", "score > limit",
        "test_entropy.test_worked_forking_tokens", {},
    ),
    "triton: biased standard deviation": (
        "triton", None, "advantages.py",
        "group.weight - ddof, 1.0", "group.weight, 1.0",
        "test_advantages.test_worked_numbers",
        {"op": "grpo", "options": {}, "binary": [0.866024, -0.866024, -0.866024, 0.866024], "other": [-1.0, 0.0, 1.0]},
    ),
    "triton: masked rewards enter the statistics": (
        "triton", None, "groups.py",
        "counted &= tl.load(given.mask + unit, mask=exists, other=False)", "counted &= exists",
        "test_advantages.test_masks_of_statistics_and_of_receivers_are_two", {},
    ),
}  # fmt: skip


def test_module(name):
    spec = importlib.util.spec_from_file_location(f"mutants_{name}", Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


test_module.__test__ = False


def assert_killed(name, test, arguments):
    file, name_of_test = test.split(".")
    function = getattr(test_module(file), name_of_test)
    inspect.signature(function).bind(**arguments)  # a call that cannot be made kills nothing
    try:
        function(**arguments)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__} {error}".split())
        print(f"{name:48} killed by {test}: {reason[:90]}")
        return
    raise AssertionError(f"the mutant {name!r} survives {test}")


def patched(path, before, after):
    text = path.read_text()
    assert text.count(before) == 1, (
        f"the mutant is out of date: {before!r} occurs {text.count(before)} times in {path.name}"
    )
    path.write_text(text.replace(before, after))


def native(backend, folder, compiled, file, before, after):
    """The backend with one file of it patched and compiled again."""
    shutil.copytree(ROOT / "csrc", folder / "csrc")
    patched(folder / "csrc" / file, before, after)
    built = ROOT / "build/native" / sysconfig.get_config_var("SOABI")
    flags = ("-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-DHPO_ISA=generic") if backend == "cpu" else ()
    flags += ("-DHPO_EMULATE", f"-I{folder}/csrc/emulation", "-x", "c++") if backend == "cuda_emulated" else ()
    include = f"-I{folder}/csrc/include"
    subprocess.run(
        (*COMPILER, *flags, include, "-c", folder / "csrc" / compiled, "-o", folder / "mutant.o"), check=True
    )
    own = f"_{backend}.{Path(compiled).stem}." + ("generic." if backend == "cpu" else "") + "o"
    objects = [path for path in built.glob(f"_{backend}.*.o") if path.name != own]
    library = folder / f"_{backend}.so"
    subprocess.run(("g++", "-shared", "-fopenmp", folder / "mutant.o", *objects, "-o", library), check=True)
    # A name of its own: pybind11 gives a second module of one name the contents of the first.
    spec = importlib.util.spec_from_file_location(f"{folder.name}._{backend}", library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.description()  # the instruction set is chosen now
    return lambda op: Native(module, on_cuda=False)


def triton(folder, file, before, after):
    """A copy of the Triton package, under another name in hpo_core, so that its imports find what they look for."""
    package = f"hpo_core._{folder.name.replace('-', '_')}"
    shutil.copytree(ROOT / "kernels/hpo_triton", folder / "triton")
    patched(folder / "triton" / file, before, after)
    spec = importlib.util.spec_from_file_location(
        package, folder / "triton/__init__.py", submodule_search_locations=[str(folder / "triton")]
    )
    sys.modules[package] = importlib.util.module_from_spec(spec)
    return lambda op: importlib.import_module(f"{package}.{op}")


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_killed(name, tmp_path, monkeypatch):
    backend, compiled, file, before, after, test, arguments = MUTANTS[name]
    if not hpo.backends()[backend]:
        pytest.skip(f"{backend} is not available")
    monkeypatch.setenv("HPO_CORE_ISA", "generic")
    if compiled is None:
        load = triton(tmp_path, file, before, after)
    else:
        load = native(backend, tmp_path, compiled, file, before, after)
    mutant = f"mutant, {name}"  # of its own: whatever caches backends does so by name
    monkeypatch.setitem(backends._PROBES, mutant, lambda: backends.Availability(mutant))
    monkeypatch.setitem(backends._DEVICES, mutant, ("cpu",))
    monkeypatch.setitem(backends._LOADERS, mutant, load)
    backends._resolve.cache_clear()
    assert_killed(name, test, {"backend": mutant, **arguments})
    backends._resolve.cache_clear()


def test_rank_local_quantile_is_killed(three_ranks, monkeypatch):
    window = importlib.import_module("hpo_core.entropy.window")
    monkeypatch.setattr(window, "_fit_over_ranks", lambda score, quantile, rule, group: window.WindowState(
        *(lambda threshold, counts: (threshold, counts[:1], counts[1:]))(
            *hpo.ops.order_statistic(score, quantile.numerator, quantile.denominator, rule, None))))  # fmt: skip
    assert_killed(
        "python: quantile of the rank alone",
        "test_entropy.test_threshold_over_ranks_is_that_of_the_whole_step",
        {"three_ranks": three_ranks},
    )


def test_ignored_stride_is_killed(monkeypatch):
    losses = importlib.import_module("hpo_core.losses")
    honest = losses.checked_constant

    def constant(name, tensor, *rest):
        return honest(name, tensor.as_strided(tensor.shape, (1,)) if tensor.dim() == 1 else tensor, *rest)

    monkeypatch.setattr(losses, "checked_constant", constant)
    assert_killed(
        "python: strides of the constants are ignored",
        "test_gates.test_keeps_every_promise",
        {"backend": "cpu", "gate": gates.dapo()},
    )


def test_there_are_enough_of_them():
    assert len(MUTANTS) + 2 >= 12 and {backend for backend, *_ in MUTANTS.values()} == {
        "cpu",
        "cuda_emulated",
        "triton",
    }
