"""Worked numbers and where they are computed."""

import torch

from hpo_core import testing


def close(got, expected, tolerance=1.5e-6):
    got, expected = got.cpu().double(), torch.tensor(expected, dtype=torch.float64)
    assert got.shape == expected.shape
    assert bool(((got - expected).abs() <= tolerance * expected.abs().clamp(min=1)).all()), (got, expected)


def on(backend):
    device = testing.device_of(backend)
    return lambda *values: torch.tensor(values, device=device), {"backend": backend}
