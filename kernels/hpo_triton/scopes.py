"""Order statistics of scopes, and the exact number of their largest values: a program for a scope.

The definition is hpo_core/reference/scopes.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..specs import OrderRule, Scopes
from .entropy import BINS, digit_of, from_order_key, order_index, order_key
from .launch import INTERPRETED, REGISTERS, kernel, launch
from .math import is_finite
from .rows import row_range

# Tokens of one step. Segments are short, and the interpreter's histogram takes them one by one.
STEP = tl.constexpr(256 if INTERPRETED else 1024)


@triton.jit
def _places(order, begin, scope):
    """The places of the list that a scope has; without a list its only segment."""
    first, end = scope, scope + 1
    if order is not None:
        first, end = tl.load(begin + scope), tl.load(begin + scope + 1)
    return first, end


@triton.jit
def _segment(offsets, order, place, segments, tokens):
    segment = place if order is None else tl.load(order + place)
    return row_range(offsets, segment, segments, tokens)


@triton.jit
def _load_step(values, mask, start, end):
    """Tokens of a segment, whether each is valid, and their values, -inf where it is not."""
    token = start + tl.arange(0, STEP)
    valid = token < end
    if mask is not None:
        valid &= tl.load(mask + token, mask=valid, other=False)
    return token, valid, tl.load(values + token, mask=valid, other=float("-inf"))


@triton.jit
def _count_digit(
    values, mask, offsets, order, first, end, segments, tokens, prefix, SHIFT: tl.constexpr, BITS: tl.constexpr
):
    """Counts ``[BINS]`` of one digit of the keys that continue ``prefix``, and the number of errors."""
    histogram = tl.zeros([BINS], tl.int32)
    errors = tl.zeros([STEP], tl.int64)
    for place in range(first, end):
        segment = _segment(offsets, order, place, segments, tokens)
        for start in range(segment.begin, segment.end, STEP):
            _, _, x = _load_step(values, mask, start, segment.end)
            key = order_key(x + 0.0)
            finite = is_finite(x)
            counted = finite
            if SHIFT + BITS < 32:
                counted &= ((key >> (SHIFT + BITS)) & ((1 << (32 - SHIFT - BITS)) - 1)) == prefix
            histogram += tl.histogram((key >> SHIFT) & ((1 << BITS) - 1), BINS, mask=counted)
            errors += ((finite == False) & (x != float("-inf"))).to(tl.int64)  # noqa: E712
    return histogram.to(tl.int64), tl.sum(errors)


@kernel
def _scan_scopes(
    values,
    mask,
    offsets,
    order,
    begin,
    k,  # or None: thresholds and counts are wanted
    thresholds,
    counts,
    selected,
    tokens: tl.int64,
    segments: tl.int64,
    numerator: tl.int64,
    denominator: tl.int64,
    digits: tl.int64,
    RULE: tl.constexpr,
):
    scope = tl.program_id(0).to(tl.int64)
    first, end = _places(order, begin, scope)
    histogram, errors = _count_digit(values, mask, offsets, order, first, end, segments, tokens, 0, 21, 11)
    n = tl.sum(histogram)
    if k is None:
        wanted = tl.minimum(n, 1)
        rank = order_index(numerator, denominator, tl.maximum(n, 1), digits, RULE)
    else:
        wanted = tl.maximum(tl.minimum(tl.load(k + scope), n), 0)
        rank = n - wanted
    prefix, rank = digit_of(histogram, rank)
    histogram, _ = _count_digit(values, mask, offsets, order, first, end, segments, tokens, prefix, 10, 11)
    digit, rank = digit_of(histogram, rank)
    prefix = (prefix << 11) | digit
    histogram, _ = _count_digit(values, mask, offsets, order, first, end, segments, tokens, prefix, 0, 10)
    digit, rank = digit_of(histogram, rank)
    least = (prefix << 10) | digit
    if k is None:
        tl.store(thresholds + scope, tl.where(n > 0, from_order_key(least), float("nan")))
        tl.store(counts + 2 * scope, n)
        tl.store(counts + 2 * scope + 1, errors)
    else:
        # The selected scores of the least key are the first ones in the order of the list.
        needed = tl.sum(tl.where(tl.arange(0, BINS) == digit, histogram, 0)) - rank
        for place in range(first, end):
            segment = _segment(offsets, order, place, segments, tokens)
            for start in range(segment.begin, segment.end, STEP):
                token, valid, x = _load_step(values, mask, start, segment.end)
                key = order_key(x + 0.0)
                ties = key == least
                before = tl.cumsum(ties.to(tl.int64), 0) - ties.to(tl.int64)
                greater = (key ^ -0x80000000) > (least ^ -0x80000000)  # in the order of unsigned keys
                chosen = (greater & is_finite(x)) | (ties & (before < needed))
                tl.store(selected + token, chosen & (wanted > 0), mask=valid)
                needed = tl.maximum(needed - tl.sum(ties.to(tl.int64)), 0)


def order_statistics(
    values: torch.Tensor, scopes: Scopes, numerator: int, denominator: int, rule: OrderRule, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Thresholds ``[C]`` and ``[C, 2]`` int64: the population and the errors."""
    thresholds = values.new_empty(scopes.number)
    counts = values.new_empty((scopes.number, 2), dtype=torch.int64)
    denominator = max(1, min(denominator, 2**61))
    quantile = (max(0, min(numerator, denominator)), denominator)
    _scan(values, scopes, mask, None, thresholds, counts, None, quantile, rule)
    return thresholds, counts


def select_exact(values: torch.Tensor, scopes: Scopes, k: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The ``k[c]`` largest values of scope c, bool ``[T]``."""
    selected = torch.zeros_like(values, dtype=torch.bool)
    _scan(values, scopes, mask, k, None, None, selected, (0, 1), OrderRule.CEIL)
    return selected


def _scan(
    values: torch.Tensor,
    scopes: Scopes,
    mask: torch.Tensor | None,
    k: torch.Tensor | None,
    thresholds: torch.Tensor | None,
    counts: torch.Tensor | None,
    selected: torch.Tensor | None,
    quantile: tuple[int, int],
    rule: OrderRule,
) -> None:
    tokens = values.numel()
    launch(
        _scan_scopes, scopes.number, values, mask, *scopes, k, thresholds, counts, selected, tokens,
        scopes.offsets.numel() - 1, *quantile, tokens.bit_length(), RULE=int(rule), maxnreg=REGISTERS,
    )  # fmt: skip
