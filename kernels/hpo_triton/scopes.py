"""Order statistics of scopes, and the exact number of their largest values: a program for a scope, or all for one.

The definition is hpo_core/reference/scopes.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..specs import OrderRule, Scopes
from .entropy import BINS, digit_of, from_order_key, order_index, order_key
from .launch import INTERPRETED, REGISTERS, kernel, launch, programs_together, wait_for_programs
from .math import is_finite
from .rows import row_range

# Tokens of one step. Segments are short, and the interpreter's histogram takes them one by one.
STEP = tl.constexpr(256 if INTERPRETED else 1024)
PROGRAMS = tl.constexpr(512)  # the number of programs whose ties are added up at once


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


@triton.jit
def _select(values, mask, offsets, order, first, end, selected, segments, tokens, least, needed):
    """Selects the scores above the key ``least`` and the first ``needed`` of those with this key, in the order of the
    list."""
    for place in range(first, end):
        segment = _segment(offsets, order, place, segments, tokens)
        for start in range(segment.begin, segment.end, STEP):
            token, valid, x = _load_step(values, mask, start, segment.end)
            key = order_key(x + 0.0)
            tied = (key == least).to(tl.int64)
            before = tl.cumsum(tied, 0) - tied
            greater = (key ^ -0x80000000) > (least ^ -0x80000000)  # in the order of unsigned keys
            tl.store(selected + token, (greater & is_finite(x)) | ((tied > 0) & (before < needed)), mask=valid)
            needed -= tl.sum(tied)


@triton.jit
def _sought(n, k, scope, numerator, denominator, digits, RULE: tl.constexpr):
    """The rank of the sought key among n finite scores, and the number of scores to select."""
    wanted = tl.minimum(n, 1)
    if k is None:
        rank = order_index(numerator, denominator, tl.maximum(n, 1), digits, RULE)
    else:
        wanted = tl.maximum(tl.minimum(tl.load(k + scope), n), 0)
        rank = n - wanted
    return rank, wanted


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
    rank, wanted = _sought(n, k, scope, numerator, denominator, digits, RULE)
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
    elif wanted > 0:
        needed = tl.sum(tl.where(tl.arange(0, BINS) == digit, histogram, 0)) - rank
        _select(values, mask, offsets, order, first, end, selected, segments, tokens, least, needed)


@triton.jit
def _prefix_of(histograms, k, numerator, denominator, digits, RULE: tl.constexpr, DIGITS: tl.constexpr):
    """The first DIGITS digits of the sought key, its rank among the keys that have them, and two numbers: of finite
    scores, and of scores to select."""
    n = tl.sum(tl.load(histograms + tl.arange(0, BINS)))
    rank, wanted = _sought(n, k, 0, numerator, denominator, digits, RULE)
    prefix = tl.zeros([], tl.int32)
    for digit_place in tl.static_range(DIGITS):
        digit, rank = digit_of(tl.load(histograms + digit_place * BINS + tl.arange(0, BINS)), rank)
        prefix = (prefix << (10 if digit_place == 2 else 11)) | digit
    return prefix, rank, n, wanted


@kernel
def _scan_only_scope(
    values,
    mask,
    offsets,
    order,
    begin,
    k,
    thresholds,
    counts,
    selected,
    histograms,  # [3, BINS] int64, then the number of errors, and that of programs that have come to a barrier
    ties,  # [programs] int64: the scores with the least key that is selected
    tokens: tl.int64,
    segments: tl.int64,
    numerator: tl.int64,
    denominator: tl.int64,
    digits: tl.int64,
    RULE: tl.constexpr,
    FIRST: tl.constexpr,  # of the steps 0, 1, 2 (a digit each), 3 (threshold, or ties) and 4 (selection)
    LAST: tl.constexpr,
):
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    first, end = _places(order, begin, tl.zeros([], tl.int64))
    share = tl.cdiv(tl.maximum(end - first, 0), programs)  # neighbours, so that ties are in the order of programs
    first += program * share
    end = tl.minimum(first + share, end)
    for AT in tl.static_range(FIRST, LAST + 1):
        if AT > FIRST:
            wait_for_programs(histograms + 3 * BINS + 1, (AT - FIRST) * programs)
        quantile = (numerator, denominator, digits)
        prefix, rank, n, wanted = _prefix_of(histograms, k, *quantile, RULE, AT if AT < 3 else 3)
        if AT < 3:
            histogram, errors = _count_digit(
                values, mask, offsets, order, first, end, segments, tokens, prefix,
                SHIFT=21 if AT == 0 else 10 if AT == 1 else 0, BITS=10 if AT == 2 else 11,
            )  # fmt: skip
            bins = tl.arange(0, BINS)
            tl.atomic_add(histograms + AT * BINS + bins, histogram, mask=histogram > 0, sem="relaxed")
            if AT == 0:
                tl.atomic_add(histograms + 3 * BINS, errors, sem="relaxed")
        elif k is None:
            if program == 0:
                tl.store(thresholds, tl.where(n > 0, from_order_key(prefix), float("nan")))
                tl.store(counts, n)
                tl.store(counts + 1, tl.load(histograms + 3 * BINS))
        elif wanted > 0:
            if AT == 3:  # counts the last digit of its own share once more
                kept = (prefix >> 10) & 0x3FFFFF
                histogram, _ = _count_digit(
                    values, mask, offsets, order, first, end, segments, tokens, kept, SHIFT=0, BITS=10
                )
                own = tl.sum(tl.where(tl.arange(0, BINS) == (prefix & 1023), histogram, 0))
                tl.store(ties + program, own)
            else:
                tied = tl.load(histograms + 2 * BINS + (prefix & 1023))
                before = tl.zeros([PROGRAMS], tl.int64)
                for other in range(0, program, PROGRAMS):
                    each = other + tl.arange(0, PROGRAMS)
                    before += tl.load(ties + each, mask=each < program, other=0)
                needed = tied - rank - tl.sum(before)
                _select(values, mask, offsets, order, first, end, selected, segments, tokens, prefix, needed)


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
    tokens, segments = values.numel(), scopes.offsets.numel() - 1
    wanted = (values, mask, *scopes, k, thresholds, counts, selected)
    numbers = (tokens, segments, *quantile, tokens.bit_length())
    if scopes.number != 1 or segments == 1:
        launch(_scan_scopes, scopes.number, *wanted, *numbers, RULE=int(rule), maxnreg=REGISTERS)
        return
    programs, cooperative = programs_together(values.device, min(segments, triton.cdiv(tokens, STEP.value)), 1)
    histograms = torch.zeros(3 * BINS.value + 2, dtype=torch.int64, device=values.device)
    ties = histograms.new_empty(programs)
    last = 3 if k is None else 4
    for first, end in [(0, last)] if cooperative else [(step, step) for step in range(last + 1)]:
        launch(
            _scan_only_scope, programs, *wanted, histograms, ties, *numbers, RULE=int(rule), FIRST=first, LAST=end,
            launch_cooperative_grid=cooperative, maxnreg=REGISTERS,
        )  # fmt: skip
