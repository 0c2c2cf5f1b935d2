"""Windows, order statistics and scopes, as kernels know them."""

from __future__ import annotations

import enum
from typing import NamedTuple

import torch

from ..checks import check


class Boundary(enum.IntEnum):
    """A window that sticks out of its row."""

    FULL = 0  # is undefined
    SHRINK = 1  # aggregates the part inside
    ZERO = 2  # counts 0 outside: a mean divides by the full width anyway
    CARRY = 3  # and every other undefined one takes the mean of the row's defined windows, or its first value


class Invalid(enum.IntEnum):
    """Masked tokens inside a window."""

    SKIP = 0  # are left out (at least one valid token must remain)
    BREAK = 1  # make the window undefined


class WindowAggregate(enum.IntEnum):
    """The aggregate of the values of a window."""

    MEAN = 0
    SUM = 1
    MAX = 2
    MIN = 3


class Scopes(NamedTuple):
    """Scopes of tokens for order statistics: a scope is a list of segments, which are ranges of tokens."""

    offsets: torch.Tensor  # [N + 1] int64: segment n holds the tokens offsets[n] .. offsets[n + 1] - 1
    order: torch.Tensor | None = None  # [N] int64: segments, one scope after the other; None: scope n is segment n
    begin: torch.Tensor | None = None  # [C + 1] int64: scope c has the segments order[begin[c] : begin[c + 1]]

    @property
    def number(self) -> int:
        """C, the number of scopes."""
        return (self.offsets if self.begin is None else self.begin).shape[0] - 1


class TokenDraw(NamedTuple):
    """A draw among tokens by their terms of the covariance and their log-ratios; the default is none."""

    old_logp: torch.Tensor | None = None  # [T]
    bounds: tuple[float, ...] = (0.0,) * 4  # of terms from and to, of log-ratios where A < 0 from, where A > 0 to
    factor: int = 1  # this and the offset are of 32 bits, see key_of_places
    offset: int = 0


class OrderRule(enum.IntEnum):
    """The ascending 0-based order statistic of n values that stands for the quantile q."""

    CEIL = 0  # ceil(q (n - 1)): with `>=`, the mask of the linearly interpolated quantile
    FLOOR = 1  # floor(q (n - 1)): with `>`, the same
    NEAREST = 2  # round(q (n - 1)), half to even
    LINEAR = 3  # none: the interpolation between the floor and the ceiling

    def index(self, numerator: int, denominator: int, n: int) -> int:
        """The index for q = numerator / denominator, in exact integers: floats get it wrong for q = .28 and n = 26."""
        check(self is not OrderRule.LINEAR, "rule: expected one of an index, got {!r}", self)
        floor, remainder = divmod(numerator * (n - 1), denominator)
        if self is OrderRule.FLOOR or remainder == 0:
            return floor
        if self is OrderRule.CEIL:
            return floor + 1
        return floor + (2 * remainder > denominator or (2 * remainder == denominator and floor % 2 == 1))


INDEX_RULES = (OrderRule.CEIL, OrderRule.FLOOR, OrderRule.NEAREST)  # those that pick one of the values
