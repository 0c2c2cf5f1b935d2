"""The error budget of a float32 kernel against the float64 reference, element by element."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ..arguments import examines
from ..checks import check_device, check_dtype, check_real, check_shape, require_type

UNIT = 2.0**-24  # half the distance from 1 to the next float32
SMALLEST = 2.0**-126  # below the smallest normal float32 a kernel may flush to zero
MARGIN = 1e-5  # generated inputs stay this far from every point where a gate changes branch


class Expected(NamedTuple):
    """The expected value of one output, and the two tensors that make its error budget: float64, of one shape."""

    exact: torch.Tensor  # the reference in float64
    eager: torch.Tensor  # the same formula in eager float32
    magnitude: torch.Tensor  # sum of the absolute values of the terms that make each element


@examines
def budget(expected: Expected) -> torch.Tensor:
    """``max(2 e, 4 * 2^-24 m)`` per element: e is the largest error of eager float32 in the tensor, m the magnitude."""
    for name, tensor in expected._asdict().items():
        check_dtype(f"expected.{name}", tensor, (torch.float64, torch.float32), "compare in float64")
        check_shape(f"expected.{name}", tensor, expected.exact.shape, "that of expected.exact")
        check_device(f"expected.{name}", tensor, expected.exact.device, "expected.exact")
    error = (expected.eager - expected.exact).abs()
    known = error[torch.isfinite(error)]
    largest = known.max() if known.numel() else error.new_zeros(())
    return torch.maximum(2 * largest, 4 * UNIT * expected.magnitude) + SMALLEST


@examines
def assert_within_budget(op: str, got: torch.Tensor, expected: Expected) -> float:
    """Raise AssertionError, with op, element, error and budget, unless every element is within its budget.

    Infinities and NaN of the exact result must be met exactly. Returns the largest error / budget.
    """
    check_real("got", got)
    require_type(not got.is_meta, "got: expected real numbers, got a tensor on {}", got.device)
    got = got.detach().to("cpu", torch.float64)
    exact = expected.exact
    assert got.shape == exact.shape, f"{op}: expected shape {list(exact.shape)}, got {list(got.shape)}"
    if exact.numel() == 0:
        return 0.0
    allowed = budget(expected)
    same = (got == exact) | (got.isnan() & exact.isnan())
    error = torch.where(same, torch.zeros_like(exact), (got - exact).abs())
    share = torch.where(same, 0.0, (error / allowed).nan_to_num(nan=math.inf))
    if not bool((share <= 1).all()):
        at = int(share.argmax())
        value, wanted, off, limit, eager = (
            tensor.reshape(-1)[at].item() for tensor in (got, exact, error, allowed, expected.eager)
        )
        element = [int(index) for index in torch.unravel_index(share.argmax(), exact.shape)]
        beyond = (share > 1).nonzero().tolist()
        first = f", first {beyond[0]} and last {beyond[-1]}" if len(beyond) > 2 else ""
        raise AssertionError(
            f"{op}: element {element} is {value!r}, expected {wanted!r}: error {off:.3g}, budget {limit:.3g} "
            f"(eager float32 gives {eager!r}); {len(beyond)} of {share.numel()} elements are off{first}"
        )
    return float(share.max())


def agrees(got: torch.Tensor, expected: Expected) -> bool:
    """Whether every element is within its budget."""
    try:
        assert_within_budget("", got, expected)
    except AssertionError:
        return False
    return True
