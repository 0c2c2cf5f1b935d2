"""Rows of a packed batch: loads and stores of its tokens, the row of a token, and the slots of a row.

Tokens are divided in two ways. A *tile* is TILE consecutive tokens of the pack, whatever rows they are in: each token
is in exactly one tile, and loads are aligned. A *slot* is a part of one row: sums over a slot do not depend on other
rows.

Offsets are data. Whatever their values, a row found here is a row of the batch and its range lies inside [0, tokens].
If they are not in order, rows may be left out; at least one row is then broken, and reported.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

TILE = tl.constexpr(1024)
ROWS = tl.constexpr(1024)  # the number of rows whose offsets a program reads at once
SLOT = tl.constexpr(64)  # tokens
SLOTS = tl.constexpr(16)  # of one program

# ------------------------------------------------------------------------------------------------------------- tokens


@triton.jit
def _address(pointer, token, ALIGNED: tl.constexpr):
    address = pointer + token
    if ALIGNED:  # four tokens that start at a multiple of four are 16 aligned bytes, or 4 of a mask
        size: tl.constexpr = 4 if pointer.dtype.element_ty == tl.int1 else 16
        address = tl.multiple_of(address, [1, size] if len(token.shape) == 2 else size)
    return address


@triton.jit
def _quarters(x):
    """[K, N] -> four [K, N / 4]: every fourth element, starting at the first, second, third and fourth."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 4, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _load_one_by_one(pointer, token, tokens):
    """Scalar loads that give each thread four neighbours, the layout of a wide load for the computation after it."""
    first, second, third, fourth = _quarters(token)
    even = tl.join(
        tl.load(pointer + first, mask=first < tokens, other=0), tl.load(pointer + third, mask=third < tokens, other=0)
    )
    odd = tl.join(
        tl.load(pointer + second, mask=second < tokens, other=0),
        tl.load(pointer + fourth, mask=fourth < tokens, other=0),
    )
    return tl.reshape(tl.join(even, odd), token.shape)


EVICT_NORMALLY = tl.constexpr("")  # Triton 3.6 takes no default that is a plain string into a branch


@triton.jit
def load(pointer, token, tokens, whole, ALIGNED: tl.constexpr, EVICTION: tl.constexpr = EVICT_NORMALLY):
    """The elements ``token``, 0 beyond the end of the pack; ``whole``: all are inside the pack."""
    if len(token.shape) == 2 and not ALIGNED:
        return _load_one_by_one(pointer, token, tokens)
    address = _address(pointer, token, ALIGNED)
    # A mask that cuts at an arbitrary T would split every 128-bit load into four; only the last tile needs one.
    return (
        tl.load(address, eviction_policy=EVICTION)
        if whole
        else tl.load(address, mask=token < tokens, other=0, eviction_policy=EVICTION)
    )


@triton.jit
def store(pointer, token, value, tokens, whole, ALIGNED: tl.constexpr, EVICTION: tl.constexpr = EVICT_NORMALLY):
    address = _address(pointer, token, ALIGNED)
    if whole:
        tl.store(address, value, eviction_policy=EVICTION)
    else:
        tl.store(address, value, mask=token < tokens, eviction_policy=EVICTION)


# --------------------------------------------------------------------------------------------------------------- rows


class Range(NamedTuple):
    """Half-open token ranges of rows; a broken row is empty and marked."""

    begin: tl.tensor
    end: tl.tensor
    bad: tl.tensor


@triton.jit
def _range(begins, ends, row, rows, tokens):
    exists = row < rows
    begin = tl.load(begins + row, mask=exists, other=0)
    end = tl.load(ends + row, mask=exists, other=0)
    bad = (begin < 0) | (end < begin) | (end > tokens)
    return Range(tl.where(bad, 0, begin), tl.where(bad, 0, end), bad)


@triton.jit
def row_range(cu_seqlens, row, rows, tokens):
    return _range(cu_seqlens, cu_seqlens + 1, row, rows, tokens)


@triton.jit
def any_broken(cu_seqlens, rows, tokens):
    """Whether a search may miss the row that owns a token. Offsets may be None: there are no rows."""
    broken = tl.zeros([ROWS], tl.int1)
    if cu_seqlens is not None:
        for first in range(0, rows, ROWS):
            broken |= row_range(cu_seqlens, first + tl.arange(0, ROWS), rows, tokens).bad
    return tl.max(broken.to(tl.int32)) > 0


@triton.jit
def _places(cu_seqlens, row, rows, tokens, token):
    """Rows of tokens, the ranges of these, and which tokens are inside; one that is not has no row."""
    range_ = row_range(cu_seqlens, row, rows, tokens)
    return row, range_, (token >= range_.begin) & (token < range_.end)


@triton.jit
def _last_row(cu_seqlens, rows, tokens, keys, BY_SLOT: tl.constexpr, WIDTH: tl.constexpr):
    """The last row that begins at or before each of a few keys ``[K]``, 0 if there is none.

    A row begins at its offset or, BY_SLOT, at its first slot. WIDTH rows are probed together, so a million rows
    cost two or three dependent reads where a binary search has twenty.
    """
    low = tl.zeros_like(keys)
    span = rows
    while span > 1:
        step = tl.cdiv(span, WIDTH)
        row = low[:, None] + tl.arange(0, WIDTH)[None, :] * step
        begin = tl.load(cu_seqlens + row, mask=row < rows, other=0)
        if BY_SLOT:
            begin = row + tl.minimum(tl.maximum(begin, 0), tokens) // SLOT
        hits = tl.sum(((begin <= keys[:, None]) & (row < rows)).to(tl.int32), axis=1)
        low += tl.maximum(hits - 1, 0) * step
        span = step
    return low


@triton.jit
def places_of_few(cu_seqlens, rows, tokens, token):
    """The places of a few tokens ``[K]``, in no order."""
    return _places(cu_seqlens, _last_row(cu_seqlens, rows, tokens, token, False, 64), rows, tokens, token)


@triton.jit
def places_of_tile(cu_seqlens, rows, tokens, start):
    """The places of the tokens ``start + [0, TILE)``."""
    borders = _last_row(cu_seqlens, rows, tokens, start + tl.arange(0, 2) * (TILE - 1), False, TILE // 2)
    first, last = tl.min(borders), tl.max(borders)
    low = tl.zeros([TILE], tl.int64) + first
    high = tl.zeros([TILE], tl.int64) + last
    token = start + tl.arange(0, TILE)
    span = last - first  # often 0: the tile is inside one row
    while span > 0:
        middle = (low + high + 1) // 2
        below = tl.load(cu_seqlens + middle) <= token
        low, high = tl.where(below, middle, low), tl.where(below, high, middle - 1)
        span = span // 2
    return _places(cu_seqlens, low, rows, tokens, token)


@triton.jit
def owners(cu_seqlens, rows, tokens, token):
    """The row of each token, -1 for none, for offsets in any order; the last of rows that overlap."""
    owner = tl.zeros_like(token) - 1
    for row in range(rows):
        range_ = row_range(cu_seqlens, row, rows, tokens)
        owner = tl.where((token >= range_.begin) & (token < range_.end), row, owner)
    return owner


# -------------------------------------------------------------------------------------------------------------- slots
# Row s owns the slots from s + floor(cu_seqlens[s] / SLOT) to the first slot of row s + 1: these are enough for its
# tokens, slots have the order of rows, and the number of all slots depends on S and T alone.


class Slots(NamedTuple):
    """The tokens of K slots."""

    row: tl.tensor  # [K, 1]
    token: tl.tensor  # [K, SLOT]
    inside: tl.tensor  # [K, SLOT]: the token is one of the row's


def number_of_slots(rows: int, tokens: int) -> int:
    return rows + tokens // SLOT.value + 1


@triton.jit
def slot_count(range, ALIGN: tl.constexpr):
    """The number of slots that hold a row."""
    return tl.where(range.end > range.begin, tl.cdiv(range.end - range.begin // ALIGN * ALIGN, SLOT), 0)


@triton.jit
def slot_owner(begins, rows, tokens, slot):
    """The row of each slot ``[K]``, if it has one."""
    return _last_row(begins, rows, tokens, slot, True, 64)


@triton.jit
def tokens_of_slots(begins, ends, row, rows, tokens, slot, ALIGN: tl.constexpr):
    """The tokens of the slots ``[K]`` of the rows ``[begins, ends)``, which do not overlap.

    With ALIGN = 4 each slot begins at a multiple of four tokens, so the first slot of a row may begin before the row.
    With ALIGN = 1 a token's position in its slot depends only on its position in the row.
    """
    range = _range(begins, ends, row, rows, tokens)
    index = slot - (row + range.begin // SLOT)
    held = (index >= 0) & (index < slot_count(range, ALIGN))  # the others are spare
    start = tl.where(held, range.begin // ALIGN * ALIGN + index * SLOT, 0)
    token = start[:, None] + tl.arange(0, SLOT)[None, :]
    inside = (token >= range.begin[:, None]) & (token < range.end[:, None]) & held[:, None]
    return Slots(row[:, None], token, inside)
