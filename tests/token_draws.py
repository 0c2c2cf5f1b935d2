"""Random rows for estimators of tokens, and their comparison on every backend."""

import functools
import itertools
import math

import numpy as np
import pytest
import torch
from breadth import number

from hpo_core import testing
from hpo_core.testing.budget import UNIT


def drawn(seed, backend):
    """Rows with masks, tail tokens and poison where nobody may look; dtype and device of the backend."""
    batch = testing.random_batch(seed, rows=4)
    draw = np.random.default_rng(seed)
    dtype = torch.float64 if backend == "reference" else torch.float32
    valid = np.zeros(batch.total_tokens, dtype=bool)
    rows = []
    for begin, end in itertools.pairwise(batch.cu_seqlens.tolist()):
        places = [t for t in range(begin, end) if batch.mask is None or bool(batch.mask[t])]
        rows.append((begin, places))
        valid[places] = True
    given = draw.random((3, batch.total_tokens)).astype(np.float32).astype(float)
    given[:, ~valid] = math.nan

    def tensor(array):
        kind = dtype if array.dtype.kind == "f" else None
        return torch.tensor(array, dtype=kind, device=testing.device_of(backend))

    return batch.to(testing.device_of(backend)), rows, given, draw, tensor


def agree(backend, got, expected):
    got, expected = got.cpu().double(), torch.tensor(np.asarray(expected, dtype=float))
    assert got.shape == expected.shape
    limit = (
        (1e-9 if backend == "reference" else 64 * UNIT) * max(1.0, float(expected.abs().max())) if got.numel() else 0
    )
    assert bool(((got - expected).abs() <= limit).all()), (backend, got, expected)


def on_all(test, batches=(60, 8, 4)):
    """The reference and machine code on many batches, the other kernels on some."""
    machine_code, emulated, interpreted = batches

    @pytest.mark.usefixtures("at_length")
    def run(native_backends):
        for backend in ("reference", *native_backends):
            some = {"machine_code": machine_code, "emulated": emulated, "interpreted": interpreted}
            for seed in range(number(backend, at_length=60, **some)):
                test(backend, seed)

    run.__name__ = test.__name__
    return run


# Where another test takes the same paths of the same kernels on more of them.
on_some = functools.partial(on_all, batches=(16, 2, 1))
