"""Deliberate bugs in every backend, each killed by a named test. A test that cannot fail proves nothing."""

import functools
import importlib
import sys

import mutants_of_cpu
import mutants_of_cuda
import mutants_of_triton
import pytest
from changed import affected
from mutants import Mutated, assert_killed, killer, triton

import hpo_core as hpo
from hpo_core import gates

backends = sys.modules["hpo_core.backends"]

MUTANTS = {**mutants_of_cpu.MUTANTS, **mutants_of_cuda.MUTANTS, **mutants_of_triton.MUTANTS}

NATIVE = {name: mutant for name, mutant in MUTANTS.items() if mutant.backend != "triton"}
NUMBERS = {name: number for number, name in enumerate(NATIVE, 1)}
KILLERS = {(mutant.backend, mutant.killer, repr(mutant.arguments)): name for name, mutant in NATIVE.items()}
EVERY_RUN = {(NATIVE[name].backend, NATIVE[name].file): name for name in KILLERS.values()}.values()  # one for each file


@functools.cache
def mutated(backend):
    return Mutated(backend, {NUMBERS[name]: mutant for name, mutant in NATIVE.items() if mutant.backend == backend})


@pytest.fixture
def as_backend(monkeypatch):
    """Makes what loads ops a backend, of a name of its own: whatever caches backends does so by name."""

    def add(name, load):
        monkeypatch.setitem(backends._PROBES, name, lambda _: backends.Availability(name))
        monkeypatch.setitem(backends._DEVICES, name, ("cpu",))
        monkeypatch.setitem(backends._LOADERS, name, load)
        backends._resolve.cache_clear()
        return name

    monkeypatch.setenv("HPO_CORE_ISA", "generic")
    yield add
    backends._resolve.cache_clear()


def skip_without(backend):
    if not hpo.backends()[backend]:
        pytest.skip(f"{backend} is not available")


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_killed(name, as_backend, tmp_path):
    mutant = MUTANTS[name]
    skip_without(mutant.backend)
    load = triton(mutant, tmp_path) if name not in NATIVE else mutated(mutant.backend).with_bug(NUMBERS[name])
    backend = as_backend(f"mutant, {name}", load)
    assert_killed(name, mutant.killer, {"backend": backend, **mutant.arguments})


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in EVERY_RUN else pytest.mark.long) for name in KILLERS.values()]
)
def test_killer_passes_where_no_mutant_is_switched_on(name, as_backend):
    """So it is the mutant that fails it, and not the library around all of them."""
    mutant = NATIVE[name]
    skip_without(mutant.backend)
    backend = as_backend(f"no mutant, {name}", mutated(mutant.backend).with_bug(0))
    killer(mutant.killer, {"backend": backend, **mutant.arguments})()


def test_rank_local_quantile_is_killed(three_ranks, monkeypatch):
    window = importlib.import_module("hpo_core.entropy.window")

    def of_rank(score, scope, scopes, quantile, rule, group):
        threshold, counts = hpo.ops.order_statistic(score, *quantile, rule, None, None, None)
        return threshold, counts[None]

    monkeypatch.setattr(window, "quantiles_over_ranks", of_rank)
    assert_killed(
        "python: quantile of the rank alone",
        "test_entropy.test_threshold_over_ranks_is_that_of_the_whole_step",
        {"three_ranks": three_ranks},
    )


def test_ignored_stride_is_killed(monkeypatch):
    prepared = importlib.import_module("hpo_core.prepared")
    honest = prepared.checked_constant

    def constant(name, tensor, *rest):
        return honest(name, tensor.as_strided(tensor.shape, (1,)) if tensor.dim() == 1 else tensor, *rest)

    monkeypatch.setattr(prepared, "checked_constant", constant)
    assert_killed(
        "python: strides of the constants are ignored",
        "test_promises.test_the_public_check_finds_nothing",
        {"backend": "cpu", "gate": gates.dapo()},
    )


def test_what_kills_a_mutant_runs_when_its_file_changes():
    """The rules of `make test-changed` could otherwise leave out a test that would have found a bug."""
    for name, mutant in MUTANTS.items():
        folder = "kernels/hpo_triton" if mutant.backend == "triton" else "csrc"
        modules, on = affected([f"{folder}/{mutant.file}"])
        assert mutant.killer.partition(".")[0].removeprefix("test_") in modules and mutant.backend in on, name


def test_there_are_enough_of_them():
    assert len(MUTANTS) + 2 >= 12 and {mutant.backend for mutant in MUTANTS.values()} == {
        "cpu",
        "cuda_emulated",
        "triton",
    }
