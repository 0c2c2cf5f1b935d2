"""Triton's interpreter as `interpreter.py` leaves it, held to the C library."""

import ctypes
import ctypes.util

import numpy as np
import pytest
import torch

import hpo_core as hpo
from hpo_core import testing

pytestmark = pytest.mark.skipif(not hpo.backends()["triton"], reason="Triton is not available")

COUNT = 4096


def triples():
    """Numbers of all sizes, sums that nearly cancel, sums a hair from the middle of two numbers, subnormal results."""
    draw = np.random.default_rng(0)
    x, y = (draw.uniform(1, 2, (4, COUNT)).astype(np.float32) for _ in range(2))
    z = draw.uniform(-4, 4, (4, COUNT)).astype(np.float32)
    x[0] *= np.exp2(draw.integers(-30, 30, COUNT)).astype(np.float32)
    z[1] = -(x[1] * y[1])
    bit = np.exp2(-draw.integers(15, 24, COUNT)).astype(np.float32)  # (1 + bit) (1 - bit) is 1 - bit^2
    x[2], y[2], z[2] = (1 + bit) * np.float32(2**-24), 1 - bit, 1 + np.mod(z[2], 1)
    x[3] *= np.float32(2**-70)
    y[3] *= np.float32(2**-68)
    z[3] *= np.float32(2**-130)
    return tuple(np.append(each.reshape(-1), special) for each, special in zip((x, y, z), SPECIAL, strict=True))


SPECIAL = np.array(
    [[np.inf, 1, 0], [np.inf, 0, 1], [np.nan, 1, 1], [3e38, 2, -3e38], [3e38, 3e38, -np.inf], [-0.0, 1, -0.0]],
    np.float32,
).T


def assert_rounded_once(inputs, got):
    fmaf = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
    fmaf.argtypes, fmaf.restype = [ctypes.c_float] * 3, ctypes.c_float
    expected = np.array([fmaf(*numbers) for numbers in zip(*(x.tolist() for x in inputs), strict=True)], np.float32)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    known = ~np.isnan(expected)  # a NaN has many bits
    np.testing.assert_array_equal(got[known].view(np.int32), expected[known].view(np.int32))


def test_fma_rounds_once():
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(x, y, z, out, count, TILE: tl.constexpr):
        at = tl.program_id(0) * TILE + tl.arange(0, TILE)
        here = at < count
        value = tl.fma(tl.load(x + at, here), tl.load(y + at, here), tl.load(z + at, here))
        tl.store(out + at, value, here)

    inputs = triples()
    device = testing.device_of("triton")
    out = torch.empty(inputs[0].size, device=device)
    kernel[(triton.cdiv(out.numel(), 1024),)](
        *(torch.tensor(x, device=device) for x in inputs), out, out.numel(), TILE=1024
    )
    assert_rounded_once(inputs, out.cpu().numpy())


def test_nan_wins_where_a_kernel_asks_for_it():
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(x, y, out, ALL: tl.constexpr):
        at = tl.arange(0, 4)
        one, other = tl.load(x + at), tl.load(y + at)
        tl.store(out + at, tl.minimum(one, other))
        tl.store(out + 4 + at, tl.maximum(one, other))
        tl.store(out + 8 + at, tl.minimum(one, other, propagate_nan=ALL))
        tl.store(out + 12 + at, tl.maximum(one, other, propagate_nan=ALL))

    nan, device = float("nan"), testing.device_of("triton")
    x, y = (torch.tensor(values, device=device) for values in ([1.0, nan, 2.0, nan], [nan, 3.0, 1.0, nan]))
    out = torch.empty(16, device=device)
    kernel[(1,)](x, y, out, ALL=tl.PropagateNan.ALL)
    numbers = [[1.0, 3.0, 1.0, nan], [1.0, 3.0, 2.0, nan], [nan, nan, 1.0, nan], [nan, nan, 2.0, nan]]
    np.testing.assert_array_equal(out.view(4, 4).cpu().numpy(), numbers)


def test_what_old_tritons_get_rounds_once():
    from interpreter import fma

    inputs = triples()
    assert_rounded_once(inputs, fma(*inputs))
