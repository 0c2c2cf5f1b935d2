"""The divisors of weights of rows, as kernels know them."""

from __future__ import annotations

import enum


class Denominator(enum.IntEnum):
    """The count that divides the weight of a row; the weight is 0 where the count is."""

    TOKENS = 0  # all valid tokens
    ROWS = 1  # the rows with a valid token
    ROWS_AND_TOKENS = 2  # these rows, and after them the valid tokens of the row
