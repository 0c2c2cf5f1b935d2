"""Exact order statistics by radix selection, and the scores that they select.

The definition is hpo_core/reference/entropy.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..specs import Boundary, Invalid, OrderRule
from .launch import REGISTERS, aligned, kernel, launch, programs_together, wait_for_programs
from .math import is_finite
from .rows import TILE, load, places_of_tile, store
from .windows import window_score

# ---------------------------------------------------------------------------------------------------- order statistics

CEIL = tl.constexpr(int(OrderRule.CEIL))
NEAREST = tl.constexpr(int(OrderRule.NEAREST))

# Each pass finds the next 11, 11 or 10 bits of a key, from a histogram of the keys that share the bits found before.
# Where programs can wait for each other, all passes and the selection are one launch.
BINS = tl.constexpr(2048)
PASSES = 3
# The scores of one step. Before Triton 3.9 the histogram of more spills.
SCORES = tl.constexpr(2048 if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9) else 1024)


@triton.jit
def order_key(x):
    """A key that as an unsigned integer has the order of the floats (-0 just below +0)."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) | -0x80000000)


@triton.jit
def from_order_key(key):
    bits = key ^ ((~key >> 31) | -0x80000000)
    return bits.to(tl.float32, bitcast=True) + 0.0  # -0 becomes +0


@triton.jit
def order_index(numerator, denominator, n, digits, RULE: tl.constexpr):
    """rule(numerator * (n - 1) / denominator) in exact integers, for 0 <= numerator <= denominator <= 2^61 and n > 0.

    The product may not fit into 64 bits, so the division goes along the binary ``digits`` of n - 1, from the top.
    """
    quotient = n * 0
    remainder = n * 0
    for digit in range(digits):
        remainder = 2 * remainder + (((n - 1) >> (digits - 1 - digit)) & 1) * numerator
        carry = (remainder >= denominator).to(tl.int64) + (remainder - denominator >= denominator).to(tl.int64)
        quotient = 2 * quotient + carry
        remainder -= carry * denominator
    if RULE == CEIL:
        quotient += (remainder > 0).to(tl.int64)
    if RULE == NEAREST:
        rest = denominator - remainder
        quotient += ((remainder > rest) | ((remainder == rest) & (quotient % 2 == 1))).to(tl.int64)
    return quotient


@triton.jit
def _digit_at(histogram, rank):
    """The digit of the key of this rank, and its rank among the keys with that digit."""
    return digit_of(tl.load(histogram + tl.arange(0, BINS)), rank)


@triton.jit
def digit_of(histogram, rank):
    """The same from counts in registers, ``[BINS]``."""
    up_to = tl.cumsum(histogram, 0)
    before = up_to <= rank
    return tl.sum(before.to(tl.int32)), rank - tl.max(tl.where(before, up_to, 0))


@triton.jit
def _key_at(histograms, numerator, denominator, digits, RULE: tl.constexpr, PASSES: tl.constexpr):
    """The first PASSES digits of the sought key, and the number n of finite scores (needs PASSES > 0)."""
    n = tl.sum(tl.load(histograms + tl.arange(0, BINS)))
    rank = order_index(numerator, denominator, tl.maximum(n, 1), digits, RULE)
    key, rank = _digit_at(histograms, rank)
    if PASSES > 1:
        digit, rank = _digit_at(histograms + BINS, rank)
        key = (key << 11) | digit
    if PASSES > 2:
        digit, rank = _digit_at(histograms + 2 * BINS, rank)
        key = (key << 10) | digit
    return key, n


@triton.jit
def _count_digits(
    score, histograms, tokens, numerator, denominator, digits,
    RULE: tl.constexpr, PASS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Adds this program's share of the scores to the histogram of a pass, and the first pass counts NaN."""
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0).to(tl.int64)
    if PASS > 0:
        prefix, _ = _key_at(histograms, numerator, denominator, digits, RULE, PASS)
    histogram = tl.zeros([BINS], tl.int32)
    nan_scores = tl.zeros([SCORES], tl.int32)
    for start in range(program * SCORES, tokens, programs * SCORES):
        token = start + tl.arange(0, SCORES)
        x = load(score, token, tokens, start + SCORES <= tokens, ALIGNED)
        exists = token < tokens
        counted = exists & is_finite(x)
        key = order_key(x)
        if PASS == 0:
            digit = (key >> 21) & 2047
            nan_scores += (exists & (x != x)).to(tl.int32)
        elif PASS == 1:
            digit = (key >> 10) & 2047
            counted &= ((key >> 21) & 2047) == prefix
        else:
            digit = key & 1023
            counted &= ((key >> 10) & 0x3FFFFF) == prefix
        histogram += tl.histogram(digit, BINS, mask=counted)
    # Sums of integers do not depend on the order of the programs.
    bins = tl.arange(0, BINS)
    tl.atomic_add(histograms + PASS * BINS + bins, histogram.to(tl.int64), mask=histogram > 0, sem="relaxed")
    if PASS == 0:
        tl.atomic_add(histograms + 3 * BINS, tl.sum(nan_scores).to(tl.int64), sem="relaxed")


@kernel
def _select_top(
    score,
    histograms,  # [3, BINS] int64, then the number of NaN scores, and that of programs that have come to a barrier
    threshold,
    counts,
    selected,  # or None
    tokens: tl.int64,
    numerator: tl.int64,
    denominator: tl.int64,
    digits: tl.int64,
    RULE: tl.constexpr,
    STRICT: tl.constexpr,
    FIRST: tl.constexpr,  # of the steps 0, 1, 2 (a digit each) and 3 (threshold and selection)
    LAST: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    programs = tl.num_programs(0).to(tl.int64)
    for STEP in tl.static_range(FIRST, LAST + 1):
        if STEP > FIRST:
            wait_for_programs(histograms + 3 * BINS + 1, (STEP - FIRST) * programs)
        if STEP < 3:
            _count_digits(score, histograms, tokens, numerator, denominator, digits, RULE, STEP, ALIGNED)
        else:
            key, n = _key_at(histograms, numerator, denominator, digits, RULE, 3)
            limit = tl.where(n > 0, from_order_key(key), float("nan"))
            program = tl.program_id(0).to(tl.int64)
            if program == 0:
                tl.store(threshold, limit)
                tl.store(counts, n)
                tl.store(counts + 1, tl.load(histograms + 3 * BINS))
            if selected is not None:
                for start in range(program * SCORES, tokens, programs * SCORES):
                    token = start + tl.arange(0, SCORES)
                    whole = start + SCORES <= tokens
                    x = load(score, token, tokens, whole, ALIGNED)
                    store(selected, token, x > limit if STRICT else x >= limit, tokens, whole, ALIGNED)


def order_statistic(
    values: torch.Tensor,
    numerator: int,
    denominator: int,
    rule: OrderRule,
    mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    strict: bool = False,
    selected: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x_(i)`` of the n finite scores in ascending order, ``i = rule(numerator (n - 1) / denominator)``; ``selected``:
    where the selection of :func:`select_top` is written."""
    score = values
    if cu_seqlens is not None:  # scores are computed once; otherwise each step would search the rows
        score = window_score(values, mask, cu_seqlens, 0, 0, Boundary.FULL, Invalid.SKIP)
    tokens = score.numel()
    threshold = torch.empty(1, dtype=torch.float32, device=score.device)
    counts = torch.empty(2, dtype=torch.int64, device=score.device)
    histograms = torch.zeros(PASSES * BINS.value + 2, dtype=torch.int64, device=score.device)
    denominator = max(1, min(denominator, 2**61))
    numbers = (tokens, max(0, min(numerator, denominator)), denominator, tokens.bit_length())
    programs, cooperative = programs_together(score.device, tokens, SCORES.value)
    for first, last in [(0, PASSES)] if cooperative else [(step, step) for step in range(PASSES + 1)]:
        launch(
            _select_top, programs, score, histograms, threshold, counts, selected, *numbers,
            RULE=int(rule), STRICT=strict, FIRST=first, LAST=last, ALIGNED=aligned(score),
            launch_cooperative_grid=cooperative, maxnreg=REGISTERS,
        )  # fmt: skip
    return threshold, counts


def select_top(
    values: torch.Tensor,
    numerator: int,
    denominator: int,
    rule: OrderRule,
    strict: bool,
    mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The threshold, the counts of the population, and the selection with that threshold."""
    selected = torch.empty_like(values, dtype=torch.bool)
    threshold_and_counts = order_statistic(values, numerator, denominator, rule, mask, cu_seqlens, strict, selected)
    return *threshold_and_counts, selected


# ----------------------------------------------------------------------------------------------------------- selection


@kernel
def _select(
    values,
    mask,
    cu_seqlens,  # or None: the values are scores
    threshold,
    selected,
    tokens: tl.int64,
    rows: tl.int64,
    STRICT: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * TILE
    whole = start + TILE <= tokens
    token = start + tl.arange(0, TILE)
    score = load(values, token, tokens, whole, ALIGNED)
    if cu_seqlens is not None:
        _, _, valid = places_of_tile(cu_seqlens, rows, tokens, start)
        if mask is not None:
            valid &= load(mask, token, tokens, whole, ALIGNED)
        score = tl.where(is_finite(score), score, float("nan"))
        score = tl.where(valid, score, float("-inf"))
    limit = tl.load(threshold)
    store(selected, token, score > limit if STRICT else score >= limit, tokens, whole, ALIGNED)


def select(
    values: torch.Tensor,
    threshold: torch.Tensor,
    strict: bool,
    mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """``score >= threshold`` (``strict``: ``>``), bool ``[T]``."""
    tokens, rows = values.numel(), 0 if cu_seqlens is None else cu_seqlens.numel() - 1
    selected = torch.empty_like(values, dtype=torch.bool)
    launch(
        _select, triton.cdiv(tokens, TILE.value), values, mask, cu_seqlens, threshold, selected, tokens, rows,
        STRICT=strict, ALIGNED=aligned(values, mask),
    )  # fmt: skip
    return selected
