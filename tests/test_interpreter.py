"""Triton's interpreter as `interpreter.py` leaves it, held to the C library, and kernels held to their tensors."""

import ctypes
import ctypes.util
import os

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


@pytest.fixture
def bounded(monkeypatch):
    """A kernel that reads or writes anything but the tensors of its launch raises an error."""
    import triton.runtime.interpreter as interpreter

    begins, ends = np.empty(0, np.uint64), np.empty(0, np.uint64)
    start = interpreter.GridExecutor.__call__

    def tensors_of(arguments):
        for each in arguments:
            if isinstance(each, torch.Tensor) and each.numel():
                yield each
            elif isinstance(each, tuple):
                yield from tensors_of(each)

    def start_within(self, *arguments, **options):
        nonlocal begins, ends
        found = sorted((each.data_ptr(), each.data_ptr() + each.nbytes) for each in tensors_of(arguments))
        begins, ends = np.array(found, np.uint64).reshape(-1, 2).T
        ends = np.maximum.accumulate(ends)  # some are parts of others
        return start(self, *arguments, **options)

    def watch(access, place_of_pointer, place_of_mask):
        unwatched = getattr(interpreter.InterpreterBuilder, access)

        def watched(self, *operands):
            pointer, mask = operands[place_of_pointer], operands[place_of_mask]
            size = max(pointer.get_element_ty().primitive_bitwidth // 8, 1)
            address = np.asarray(pointer.data, np.uint64)
            address = address[np.broadcast_to(mask.data, address.shape).astype(bool)]
            nearest = np.searchsorted(begins, address, side="right").astype(np.int64) - 1
            within = (nearest >= 0) & (address + np.uint64(size) <= ends[nearest])
            assert within.all(), f"{access} at {address[~within]} of no tensor"
            return unwatched(self, *operands)

        monkeypatch.setattr(interpreter.InterpreterBuilder, access, watched)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", start_within)
    watch("create_masked_load", 0, 1)
    watch("create_masked_store", 0, 2)
    watch("create_atomic_rmw", 1, 3)


# The kernels of these paths read lists that this package makes, and trust them.
LISTED = {f"{name}{scopes}" for name in ("order_statistics", "select_exact") for scopes in ("", ", one scope")}


@pytest.mark.skipif(os.environ["TRITON_INTERPRET"] != "1", reason="only the interpreter tells what a kernel reads")
@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("kind", ["sound", "hostile"])
@pytest.mark.parametrize("backend", ["triton"])
def test_no_kernel_leaves_its_tensors(kind, backend, monkeypatch):
    """On no path, for sizes that end within every tile, and whatever offsets, ids, targets and leaves are."""
    from hpo_core._triton import advantages, compiled_paths, segments, windows

    for module, name, number in (
        (compiled_paths, "TOKENS", 10),
        (compiled_paths, "ROWS", 3),
        (compiled_paths, "MANY", 9),
        (advantages, "SCANNED", 8),
        (segments, "SCANNED", 8),
        (windows, "WIDE", 4),
    ):
        monkeypatch.setattr(module, name, number)
    halves = lambda count: torch.full((count,), 0.5)  # noqa: E731
    monkeypatch.setattr(compiled_paths, "_floats", halves)  # a factor of 1 would read nothing
    if kind == "hostile":
        draw, sound = np.random.default_rng(0), compiled_paths._inputs

        def integers(count):
            some = [-(2**62), -(2**40), -7, -1, 0, 1, 2, 5, count, count + 1, 2**31, 2**40, 2**62]
            return torch.from_numpy(draw.choice(some, count))

        monkeypatch.setattr(compiled_paths, "_integers", integers)
        monkeypatch.setattr(
            compiled_paths, "_inputs", lambda **fields: sound(**fields)._replace(cu_seqlens=integers(4))
        )
    names = set()
    for name, call in compiled_paths.paths():
        names.add(name)
        if kind == "sound" or name not in LISTED:
            call()
    assert names > LISTED
