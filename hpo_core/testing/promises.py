"""The promises of the library for each op, as properties of any kernel.

A promise compares the kernel with the float64 reference, or with itself on two inputs that must have the same result.
Correctness comes first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

Run = Callable[..., Any]  # of an example, and of the incoming gradient where it is not 1

SHOWN = 128  # of a tensor with more elements a report shows the first ones
GRADIENT = "gradient"  # a requirement of promises that is no keyword
UNWRITTEN = "inputs and earlier results are not written"  # check() compares both with copies


class Inapplicable(Exception):
    """The gate or the estimator does not promise this, and the message says why."""


class Undefined(ValueError):
    """The caller's definition raises, so that there is no verdict on the kernel."""


class Promise(NamedTuple):
    name: str
    # Raises AssertionError if broken; returns the largest error / budget, if there is one.
    holds: Callable[[Run, Any], float | None]
    needs: tuple[str, ...]  # keywords that the kernel must take for the promise to make sense


PROMISES: dict[str, list[Promise]] = {}


def promise(ops: str, name: str, *needs: str) -> Callable[[Any], Any]:
    def register(holds: Any) -> Any:
        for op in ops.split():
            PROMISES.setdefault(op, []).append(Promise(name, holds, needs))
        return holds

    return register


def same(what: str, got: torch.Tensor, expected: torch.Tensor, why: str) -> None:
    """Bitwise equality, in which the two zeros are one number."""
    got, expected = got.detach() + 0.0, expected.detach() + 0.0
    if got.shape == expected.shape and torch.equal(got.nan_to_num(1e38), expected.nan_to_num(1e38)):
        return
    if got.shape == expected.shape and got.numel() > SHOWN:
        differ = ~((got == expected) | (got.isnan() & expected.isnan()))
        first, count = differ.nonzero()[0].tolist(), int(differ.sum())
        got, expected = got[tuple(first)], expected[tuple(first)]
        what, why = f"{what} at {first}", f"{why}; {count} of {differ.numel()} elements differ"
    raise AssertionError(f"{what} is {got.tolist()} instead of {expected.tolist()} {why}")


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values as every second element of wider memory; the elements between them must not be read."""
    wide = x.new_full((x.numel(), 2), math.nan if x.is_floating_point() else 1)
    wide[:, 1] = x
    return wide[:, 1]


def growing(where: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """A change of the numbers at ``where``, which leaves masks as they are."""
    return lambda x: torch.where(where, 1.75 * x, x) if x.is_floating_point() else x


def distinct(ids: torch.Tensor) -> list[int]:
    return sorted(set(ids.tolist()))


def shifted(x: torch.Tensor) -> torch.Tensor:
    """The same values, contiguous, one element off the boundaries on which memory is allocated."""
    wide = x.new_full((x.numel() + 1,), math.nan if x.is_floating_point() else 1)
    wide[1:] = x
    return wide[1:]


# Ways to lay out the same values, and their names in a report.
PLACEMENTS = ((strided, "where inputs have stride 2"), (shifted, "where inputs begin off alignment"))
