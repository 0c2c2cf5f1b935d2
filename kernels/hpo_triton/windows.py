"""Aggregates over windows that never cross a row.

Narrow windows are read value by value. Wide ones are built by doubling: P_1 = values, P_2k[t] = P_k[t] + P_k[t + k].
A window is the sum of the P_k of the binary digits of its length. The P_k of a window never leave its row. The order of
additions depends only on the offset inside the window.

The definition is hpo_core/reference/entropy.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..specs import Boundary, Invalid, WindowAggregate
from .launch import REGISTERS, aligned, kernel, launch
from .math import is_finite
from .rows import TILE, load, places_of_tile, row_range, store

FULL = tl.constexpr(int(Boundary.FULL))
ZERO = tl.constexpr(int(Boundary.ZERO))
BREAK = tl.constexpr(int(Invalid.BREAK))
MEAN = tl.constexpr(int(WindowAggregate.MEAN))
MAX = tl.constexpr(int(WindowAggregate.MAX))
MIN = tl.constexpr(int(WindowAggregate.MIN))

WIDE = 128  # a wider window takes a launch for each binary digit of its width


@triton.jit
def _empty(AGGREGATE: tl.constexpr):
    """The part of a window without usable values."""
    return float("-inf") if AGGREGATE == MAX else float("inf") if AGGREGATE == MIN else 0.0


@triton.jit
def _fold(part, further, AGGREGATE: tl.constexpr):
    if AGGREGATE == MAX:
        folded = tl.maximum(part, further)
    elif AGGREGATE == MIN:
        folded = tl.minimum(part, further)
    else:
        folded = part + further
    return folded


@triton.jit
def _score_of(
    value, valid, folded, usable, inside, width,
    BOUNDARY: tl.constexpr, INVALID: tl.constexpr, AGGREGATE: tl.constexpr,
):  # fmt: skip
    """The scores of tokens whose windows, cut by their rows, have ``inside`` positions, ``usable`` of them in
    ``folded``. ``valid``: the token is in a row and not masked."""
    defined = valid & (usable > 0)
    if BOUNDARY == FULL:
        defined &= inside == width
    if INVALID == BREAK:
        defined &= usable == inside
    folded = folded.to(tl.float64)
    if AGGREGATE == MEAN:
        terms = width if BOUNDARY == ZERO else tl.maximum(usable, 1)
        folded = folded / terms.to(tl.float64)
    result = tl.where(defined, folded.to(tl.float32), float("-inf"))
    return tl.where(valid & (is_finite(value) == False), float("nan"), result)  # noqa: E712


@triton.jit
def _window(token, range_, first, last):
    """The first position of each token's window, cut by its row, and the number of positions."""
    low = tl.maximum(token + first, range_.begin)
    return low, tl.maximum(tl.minimum(token + last, range_.end - 1) - low + 1, 0)


@kernel
def _score_windows(
    values,
    mask,
    cu_seqlens,
    score,
    tokens: tl.int64,
    rows: tl.int64,
    first: tl.int64,
    last: tl.int64,
    width: tl.int64,
    BOUNDARY: tl.constexpr,
    INVALID: tl.constexpr,
    AGGREGATE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * TILE
    whole = start + TILE <= tokens
    token = start + tl.arange(0, TILE)
    _, range_, valid = places_of_tile(cu_seqlens, rows, tokens, start)
    # A window is cut by its row: the loop goes no further than the longest row of this tile.
    behind = tl.max(tl.where(valid, token - range_.begin, 0))
    ahead = tl.max(tl.where(valid, range_.end - 1 - token, 0))
    value = load(values, token, tokens, whole, ALIGNED)
    if mask is not None:
        valid &= load(mask, token, tokens, whole, ALIGNED)

    # Sums are float64 and in the order of the window: exact for equal values, and independent of the packing.
    empty = _empty(AGGREGATE)
    folded = tl.full([TILE], 0.0, tl.float64) + empty
    usable = tl.zeros([TILE], tl.int64)
    for offset in range(tl.maximum(first, -behind), tl.minimum(last, ahead) + 1):
        neighbour = token + offset
        used = valid & (neighbour >= range_.begin) & (neighbour < range_.end)
        if mask is not None:
            used &= tl.load(mask + neighbour, mask=used, other=False)
        x = tl.load(values + neighbour, mask=used, other=0.0)
        used &= is_finite(x)
        folded = _fold(folded, tl.where(used, x, empty).to(tl.float64), AGGREGATE)
        usable += used.to(tl.int64)

    _, inside = _window(token, range_, first, last)
    result = _score_of(value, valid, folded, usable, inside, width, BOUNDARY, INVALID, AGGREGATE)
    store(score, token, result, tokens, whole, ALIGNED)


@kernel
def _begin_wide_windows(values, mask, part, count, folded, usable, tokens: tl.int64, AGGREGATE: tl.constexpr):
    token = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    exists = token < tokens
    x = tl.load(values + token, mask=exists, other=0.0)
    used = exists & is_finite(x)
    if mask is not None:
        used &= tl.load(mask + token, mask=exists, other=False)
    empty = _empty(AGGREGATE)
    tl.store(part + token, tl.where(used, x, empty), mask=exists)
    tl.store(count + token, used.to(tl.int32), mask=exists)
    tl.store(folded + token, tl.full([TILE], empty, tl.float32), mask=exists)
    tl.store(usable + token, tl.zeros([TILE], tl.int32), mask=exists)


@kernel
def _add_wide_digit(
    cu_seqlens,
    part,  # P_span of every token, and the number of usable values in it
    count,
    next_part,  # the same of 2 span
    next_count,
    folded,
    usable,
    tokens: tl.int64,
    rows: tl.int64,
    first: tl.int64,
    last: tl.int64,
    span: tl.int64,
    AGGREGATE: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * TILE
    token = start + tl.arange(0, TILE)
    exists = token < tokens
    _, range_, inside = places_of_tile(cu_seqlens, rows, tokens, start)
    low, length = _window(token, range_, first, last)
    takes = inside & ((length & span) != 0)
    at = low + (length & (span - 1))
    empty = _empty(AGGREGATE)
    x = tl.load(part + at, mask=takes, other=empty)
    n = tl.load(count + at, mask=takes, other=0)
    tl.store(folded + token, _fold(tl.load(folded + token, mask=exists, other=empty), x, AGGREGATE), mask=exists)
    tl.store(usable + token, tl.load(usable + token, mask=exists, other=0) + n, mask=exists)
    further = token + span < tokens
    beside = tl.load(part + token + span, mask=further, other=empty)
    tl.store(next_part + token, _fold(tl.load(part + token, mask=exists, other=empty), beside, AGGREGATE), mask=exists)
    beside_count = tl.load(count + token + span, mask=further, other=0)
    tl.store(next_count + token, tl.load(count + token, mask=exists, other=0) + beside_count, mask=exists)


@kernel
def _finish_wide_windows(
    values,
    mask,
    cu_seqlens,
    folded,
    usable,
    score,
    tokens: tl.int64,
    rows: tl.int64,
    first: tl.int64,
    last: tl.int64,
    width: tl.int64,
    BOUNDARY: tl.constexpr,
    INVALID: tl.constexpr,
    AGGREGATE: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * TILE
    token = start + tl.arange(0, TILE)
    exists = token < tokens
    _, range_, valid = places_of_tile(cu_seqlens, rows, tokens, start)
    if mask is not None:
        valid &= tl.load(mask + token, mask=exists, other=False)
    value = tl.load(values + token, mask=exists, other=0.0)
    _, inside = _window(token, range_, first, last)
    sums = tl.load(folded + token, mask=exists, other=0.0)
    terms = tl.load(usable + token, mask=exists, other=0).to(tl.int64)
    result = _score_of(value, valid, sums, terms, inside, width, BOUNDARY, INVALID, AGGREGATE)
    tl.store(score + token, result, mask=exists)


@kernel
def _carry_rows(values, mask, cu_seqlens, score, tokens: tl.int64, rows: tl.int64):
    """Undefined scores of valid tokens become the mean of the row's defined ones, or the row's first value without any.

    A program takes a row, in tiles from its begin: the order of the sum does not depend on the packing.
    """
    range_ = row_range(cu_seqlens, tl.program_id(0).to(tl.int64), rows, tokens)
    total = tl.zeros([TILE], tl.float64)
    defined = tl.zeros([TILE], tl.int64)
    first = tl.full([TILE], 0, tl.int64) + range_.end
    for start in range(range_.begin, range_.end, TILE):
        token = start + tl.arange(0, TILE)
        usable = token < range_.end
        if mask is not None:
            usable &= tl.load(mask + token, mask=usable, other=False)
        usable &= is_finite(tl.load(values + token, mask=usable, other=float("nan")))
        first = tl.minimum(first, tl.where(usable, token, range_.end))
        x = tl.load(score + token, mask=usable, other=float("nan"))
        total += tl.where(is_finite(x), x, 0.0).to(tl.float64)
        defined += is_finite(x).to(tl.int64)
    number = tl.sum(defined)
    of_row = tl.min(first)
    carried = tl.load(values + of_row, mask=of_row < range_.end, other=float("-inf"))
    mean = tl.sum(total) / tl.maximum(number, 1).to(tl.float64)
    carried = tl.where(number > 0, mean.to(tl.float32), carried)
    for start in range(range_.begin, range_.end, TILE):
        token = start + tl.arange(0, TILE)
        valid = token < range_.end
        if mask is not None:
            valid &= tl.load(mask + token, mask=valid, other=False)
        x = tl.load(score + token, mask=valid, other=0.0)
        tl.store(score + token, carried, mask=valid & (x == float("-inf")))


# ---------------------------------------------------------------------------------------------------------------- host


def window_score(
    values: torch.Tensor,
    mask: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    first: int,
    last: int,
    boundary: Boundary,
    invalid: Invalid,
    aggregate: WindowAggregate = WindowAggregate.MEAN,
) -> torch.Tensor:
    """Aggregate of ``values`` over ``{t + first, ..., t + last}`` cut by the row of t, ``[T]``."""
    tokens, rows = values.numel(), cu_seqlens.numel() - 1
    score = torch.empty_like(values)
    programs, carries = triton.cdiv(tokens, TILE.value), boundary is Boundary.CARRY
    tensors, pack = (values, mask, cu_seqlens), (tokens, rows)
    # No bound by the pack changes the content of a window.
    window = (max(first, -tokens), min(last, tokens))
    width = min(last - first + 1, 2**63 - 1)  # a number of a launch has 64 bits
    structure = {
        "BOUNDARY": int(Boundary.FULL if carries else boundary), "INVALID": int(invalid), "AGGREGATE": int(aggregate),
        "maxnreg": REGISTERS,
    }  # fmt: skip
    if window[1] - window[0] < WIDE:
        launch(
            _score_windows, programs, *tensors, score, *pack, *window, width, **structure,
            ALIGNED=aligned(values, mask),
        )  # fmt: skip
    else:
        _score_wide_windows(tensors, pack, window, width, score, structure)
    if carries:
        launch(_carry_rows, rows, *tensors, score, *pack)
    return score


def _score_wide_windows(
    tensors: tuple[torch.Tensor | None, ...],
    pack: tuple[int, int],
    window: tuple[int, int],
    width: int,
    score: torch.Tensor,
    structure: dict[str, int],
) -> None:
    tokens, fold = pack[0], {"AGGREGATE": structure["AGGREGATE"]}
    programs = triton.cdiv(tokens, TILE.value)
    part, next_part, folded = score.new_empty((3, tokens))
    count, next_count, usable = score.new_empty((3, tokens), dtype=torch.int32)
    launch(_begin_wide_windows, programs, *tensors[:2], part, count, folded, usable, tokens, **fold)
    span = 1
    while span <= min(window[1] - window[0] + 1, tokens):
        parts = (part, count, next_part, next_count)
        launch(_add_wide_digit, programs, tensors[2], *parts, folded, usable, *pack, *window, span, **fold)
        part, count, next_part, next_count = next_part, next_count, part, count
        span *= 2
    launch(_finish_wide_windows, programs, *tensors, folded, usable, score, *pack, *window, width, **structure)
