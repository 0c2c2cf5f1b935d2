"""The cases of a test on each backend: all cases if kernels are machine code, else one case for each path.

Only structure specialises a kernel; numbers are arguments, and a size takes another path if it crosses a tile or a
block. Triton's interpreter, which takes a hundred times as long, therefore runs every structure at the smallest sizes
that cross, and the emulated CUDA runs these sizes. A test that uses the fixture ``at_length`` runs a second time in
`make test-long`, with every case on every backend.
"""

import itertools

import pytest

from hpo_core import testing

# Triton takes 2,048 scores in a step and 1,024 tokens in a tile; a block of CUDA's takes 4,096 scores in a step.
CROSSING = {"triton": 2_100, "cuda_emulated": 4_200}
AT_LENGTH = False


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.long)], ids=["paths", "at length"])
def at_length(request, monkeypatch):
    monkeypatch.setitem(globals(), "AT_LENGTH", request.param)


def is_interpreted(backend):
    return backend == "triton" and testing.device_of(backend) == "cpu"


def tried(backend, every_case, paths):
    return paths if is_interpreted(backend) and not AT_LENGTH else every_case


def few(backend, cases, count=1):
    """All cases; in the interpreter the first ones, which take all paths."""
    return tried(backend, cases, cases[:count])


def number(backend, *, at_length, machine_code, emulated, interpreted):
    """The number of cases of one kind."""
    if AT_LENGTH:
        return at_length
    return interpreted if is_interpreted(backend) else emulated if backend == "cuda_emulated" else machine_code


def at_most(backend, size):
    """The size, or a smaller one that takes the same path on this backend."""
    if is_interpreted(backend) or backend == "cuda_emulated":
        return min(size, 20_000 if AT_LENGTH else CROSSING[backend])
    return size


def crossed(backends, **axes):
    """Parameters of a test: every combination of the axes on each backend. The interpreter gets each value of each axis
    once, and the other combinations in `make test-long`."""
    longest = max(map(len, axes.values()))
    paths = list(zip(*(itertools.islice(itertools.cycle(values), longest) for values in axes.values()), strict=True))
    cases = [
        pytest.param(backend, *case, marks=[pytest.mark.long] if is_interpreted(backend) and case not in paths else [])
        for backend, case in itertools.product(backends, itertools.product(*axes.values()))
    ]
    return pytest.mark.parametrize(("backend", *axes), cases, ids=str)
