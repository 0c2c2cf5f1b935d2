"""Gates of one structure are one path of every backend, and start the same kernels."""

import sys

import pytest
from catalogue import CATALOGUE, FIRSTS, paths_of, structure
from cover import COVER
from promised import is_slow, twelve_rows

import hpo_core as hpo
from hpo_core.backends import resolve


def test_every_structure_of_the_catalogue_is_a_path_of_every_backend(backend):
    """Kernels of every structure are run by each backend, and where calls are slow once."""
    paths = [structure(CATALOGUE[name]) for name in paths_of(backend)]
    methods = {structure(gate) for name, gate in CATALOGUE.items() if not name.startswith("term: ")}
    assert methods <= set(paths)
    if is_slow(backend) or backend == "cuda_emulated":
        assert len(paths) == len(set(paths)) == len(methods)
    else:
        assert paths_of(backend) == set(CATALOGUE)


def kernels_of(gate, monkeypatch):
    """The launches of Triton for a call: kernels, their structures, and the arguments that exist."""
    started = []

    def existing(argument):
        return tuple(map(existing, argument)) if isinstance(argument, tuple) else argument is not None

    def note(kernel, programs, *arguments, **structure):
        started.append((kernel.fn.__name__, structure, existing(arguments)))

    example = twelve_rows()
    with monkeypatch.context() as patch:
        for name in [name for name in sys.modules if name.startswith("hpo_core._triton.")]:
            if hasattr(sys.modules[name], "launch"):
                patch.setattr(sys.modules[name], "launch", note)
        example.run(gate, "triton", **example.everything(gate))
    return started


def what_specialises(kernel, name, value):
    """A kernel's structure, taken apart: each of its values alone."""
    if isinstance(value, tuple):
        for place, each in enumerate(value):
            yield from what_specialises(kernel, (*name, place), each)
    yield kernel, name, len(value) if isinstance(value, tuple) else value


def test_gates_of_one_structure_start_the_same_kernels(monkeypatch):
    """So that one of them is a path for all; and whatever kernels are compiled for is in the cover."""
    if not hpo.backends()["triton"]:
        pytest.skip("triton is not available")
    example, first, values = twelve_rows(), {}, {name: set() for name in CATALOGUE}
    for op in ("gates", "corrections", "entropy"):
        resolve(op, example.logp, "triton")
    for name, gate in CATALOGUE.items():
        started = kernels_of(gate, monkeypatch)
        assert started and first.setdefault(structure(gate), started) == started, name
        for kernel, constants, existing in started:
            for each in (*constants.items(), ("existing", existing)):
                values[name].update(what_specialises(kernel, each[:1], each[1]))
    assert set().union(*(values[name] for name in FIRSTS)) == set().union(*(values[name] for name in COVER))
