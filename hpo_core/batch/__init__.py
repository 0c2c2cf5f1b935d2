"""How tokens form rows, and rows form the levels above them."""

from .cuts import MicroBatch, check_whole, mark_torn
from .hierarchy import (
    ROWS_AS_LEAVES,
    Hierarchy,
    LeafTables,
    alone_without,
    first_ranges,
    of_row,
    place_in_row,
    renumber,
    row_at,
    row_counts,
    row_sums,
    row_weights,
    rows_of_tokens,
    spread_rows,
    valid_tokens,
)
from .packed import PackedBatch, as_batch
from .padded import takes_padded

__all__ = [
    "ROWS_AS_LEAVES",
    "Hierarchy",
    "LeafTables",
    "MicroBatch",
    "PackedBatch",
    "alone_without",
    "as_batch",
    "check_whole",
    "first_ranges",
    "mark_torn",
    "of_row",
    "place_in_row",
    "renumber",
    "row_at",
    "row_counts",
    "row_sums",
    "row_weights",
    "rows_of_tokens",
    "spread_rows",
    "takes_padded",
    "valid_tokens",
]
