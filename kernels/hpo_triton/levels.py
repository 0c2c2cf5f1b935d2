"""The gate on a trajectory's mean log-ratio, before the sweep over the tokens: slots, then trajectories.

Sums of log-ratios are integers, and sums of weighted advantages are added in double in the order of a row's tokens:
what a trajectory gives back to its tokens is bitwise the same wherever its rows lie in the pack.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..specs import PolicyLossInputs, PolicyLossSpec
from .correction_rules import rule_bounds_of, with_correction
from .launch import kernel, launch
from .math import SATURATION, clamp, exp
from .segments import SLOT_TOKENS, SLOTS, number_of_slots, row_range, slot_count, slot_tokens
from .tokens import Reading, load_tokens, read_tokens

__all__ = ["FIXED_POINT", "Levels", "gate_levels", "to_fixed"]

TRAJECTORIES = 8  # of one program
SLOTS_AT_ONCE = 128

# Fixed point with 32 binary digits: 60 * 2^32 leaves room for 2^25 tokens.
FIXED_POINT = tl.constexpr(4294967296.0)
SHIFTER = tl.constexpr(6755399441055744.0)  # adding 1.5 * 2^52 rounds a double to an integer
SHIFTER_BITS = tl.constexpr(0x4338000000000000)


class Levels(NamedTuple):
    """The gates of all trajectories, as the sweep reads them."""

    ratio: torch.Tensor | None  # [S, 2] e^g(mean) for advantages >= 0 and < 0
    side: torch.Tensor | None  # [S, 2] int8: the mean is below its bounds (-1), inside (0) or above (1)
    slope: torch.Tensor | None  # [S] the gradient of every token, where it goes through the mean


@triton.jit
def to_fixed(x):
    return (x.to(tl.float64) * FIXED_POINT + SHIFTER).to(tl.int64, bitcast=True) - SHIFTER_BITS


@kernel
def _sum_slots(
    logp,
    old_logp,
    advantages,
    weights,
    cu_seqlens,
    mask,
    ref_logp,
    score,
    threshold,
    token_mask,
    token_weight,
    correction_first,
    correction_second,
    rule_bounds,
    seen,  # [slots] uint8: set to 0 here for the sweep, which has no other launch before it
    counts,  # [slots] int32: valid tokens
    sums,  # [slots] int64: of the log-ratios, fixed point
    coefficients,  # [slots, 2] float64: sums of weighted advantages >= 0 and < 0; None: not needed
    tokens: tl.int64,
    rows: tl.int64,
    READING: tl.constexpr,
    SLOT: tl.constexpr,
    SLOTS: tl.constexpr,
    ALIGN: tl.constexpr,
):
    inputs = PolicyLossInputs(
        logp, old_logp, advantages, weights, cu_seqlens, mask, ref_logp, None, score, threshold, token_mask,
        token_weight,
    )  # fmt: skip
    slot = tl.program_id(0).to(tl.int64) * SLOTS + tl.arange(0, SLOTS)
    slots = slot_tokens(cu_seqlens, rows, tokens, slot, SLOT, ALIGN)
    whole = tl.max(slots.token) < tokens
    loaded = load_tokens(inputs, slots.token, tokens, whole, READING)
    loaded = with_correction(
        loaded, inputs, correction_first, correction_second, rule_bounds, slots.row, rows, slots.token, tokens,
        whole, READING,
    )  # fmt: skip
    t = read_tokens(inputs, loaded, slots.row, rows, slots.inside, READING)
    tl.store(seen + slot, tl.zeros([SLOTS], tl.uint8))
    tl.store(counts + slot, tl.sum(t.valid.to(tl.int32), axis=1))
    tl.store(sums + slot, tl.sum(to_fixed(t.x), axis=1))
    if coefficients is not None:
        a = t.a.to(tl.float64)
        tl.store(coefficients + 2 * slot, tl.sum(tl.where(t.negative, 0.0, a), axis=1))
        tl.store(coefficients + 2 * slot + 1, tl.sum(tl.where(t.negative, a, 0.0), axis=1))


@triton.jit
def _gate(mean, low, high, CLIPS: tl.constexpr):
    """The ratio of a trajectory for one advantage sign, and the side of its bounds."""
    gated = mean
    side = tl.zeros(mean.shape, tl.int8)
    if CLIPS:
        below = mean < low
        above = mean > high
        gated = tl.where(above, high, tl.where(below, low, mean))
        side = above.to(tl.int8) - below.to(tl.int8)
    return exp(clamp(gated.to(tl.float32), -SATURATION, SATURATION)), side


@kernel
def _gate_trajectories(
    cu_seqlens,
    trajectory_start,  # [S + 1], with
    trajectory_rows,  # [S]; None: each row is a trajectory
    counts,
    sums,
    coefficients,
    ratio,
    side,
    slope,
    tokens: tl.int64,
    rows: tl.int64,
    low_positive: tl.float64,
    low_negative: tl.float64,
    high_positive: tl.float64,
    high_negative: tl.float64,
    CLIPS: tl.constexpr,
    SLOT: tl.constexpr,
    ALIGN: tl.constexpr,
    TRAJECTORIES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    trajectory = tl.program_id(0).to(tl.int64) * TRAJECTORIES + tl.arange(0, TRAJECTORIES)
    exists = trajectory < rows
    position = trajectory
    stop = tl.minimum(trajectory + 1, rows)
    if trajectory_start is not None:
        position = clamp(tl.load(trajectory_start + trajectory, mask=exists, other=0), 0, rows)
        stop = clamp(tl.load(trajectory_start + trajectory + 1, mask=exists, other=0), 0, rows)

    n = tl.zeros([TRAJECTORIES], tl.int64)
    sum = tl.zeros([TRAJECTORIES], tl.int64)
    positive = tl.zeros([TRAJECTORIES], tl.float64)
    negative = tl.zeros([TRAJECTORIES], tl.float64)
    while tl.max(stop - position) > 0:
        owned = position < stop
        row = position
        if trajectory_rows is not None:
            row = clamp(tl.load(trajectory_rows + position, mask=owned, other=0), 0, rows - 1)
        range_ = row_range(cu_seqlens, row, rows, tokens)
        held = tl.where(owned, slot_count(range_, SLOT, ALIGN), 0)
        first = row + range_.begin // SLOT
        for done in range(0, tl.max(held), WIDTH):
            index = done + tl.arange(0, WIDTH)[None, :]
            slot = first[:, None] + index
            mine = index < held[:, None]
            n += tl.sum(tl.load(counts + slot, mask=mine, other=0), axis=1)
            sum += tl.sum(tl.load(sums + slot, mask=mine, other=0), axis=1)
            if coefficients is not None:
                positive += tl.sum(tl.load(coefficients + 2 * slot, mask=mine, other=0.0), axis=1)
                negative += tl.sum(tl.load(coefficients + 2 * slot + 1, mask=mine, other=0.0), axis=1)
        position += 1

    n = tl.maximum(n, 1).to(tl.float64)
    mean = sum.to(tl.float64) / FIXED_POINT / n
    ratio_positive, side_positive = _gate(mean, low_positive, high_positive, CLIPS)
    ratio_negative, side_negative = _gate(mean, low_negative, high_negative, CLIPS)
    tl.store(ratio + 2 * trajectory, ratio_positive, mask=exists)
    tl.store(ratio + 2 * trajectory + 1, ratio_negative, mask=exists)
    tl.store(side + 2 * trajectory, side_positive, mask=exists)
    tl.store(side + 2 * trajectory + 1, side_negative, mask=exists)
    if coefficients is not None:
        # A sum of equal floats is exact in double: where all tokens agree, the mean is their common value to the bit.
        passed = tl.where(side_positive == 0, positive * ratio_positive.to(tl.float64), 0.0)
        passed += tl.where(side_negative == 0, negative * ratio_negative.to(tl.float64), 0.0)
        tl.store(slope + trajectory, (0.0 - passed / n).to(tl.float32), mask=exists)  # never -0


def gate_levels(
    inputs: PolicyLossInputs, spec: PolicyLossSpec, reading: Reading, want_slope: bool
) -> tuple[Levels, torch.Tensor]:
    """The gates of all trajectories, and a zero for each row (uint8, at least ``[S]``) for the sweep to mark."""
    tokens, rows, device = inputs.logp.numel(), inputs.weights.numel(), inputs.logp.device
    programs = triton.cdiv(number_of_slots(rows, tokens), SLOTS)
    slots = programs * SLOTS
    seen = torch.empty(slots, dtype=torch.uint8, device=device)
    counts = torch.empty(slots, dtype=torch.int32, device=device)
    sums = torch.empty(slots, dtype=torch.int64, device=device)
    coefficients = torch.empty((slots, 2), dtype=torch.float64, device=device) if want_slope else None
    levels = Levels(
        ratio=torch.empty((rows, 2), dtype=torch.float32, device=device),
        side=torch.empty((rows, 2), dtype=torch.int8, device=device),
        slope=torch.empty(rows, dtype=torch.float32, device=device) if want_slope else None,
    )
    # Only sums of floats that differ within a row have an order to keep.
    varies = inputs.advantage_per_token or inputs.token_weight is not None or spec.correction is not None
    ordered = want_slope and varies
    align = 1 if ordered else 4
    launch(
        _sum_slots, programs, inputs.logp, inputs.old_logp, inputs.advantages, inputs.weights, inputs.cu_seqlens,
        inputs.mask, inputs.ref_logp, inputs.score, inputs.threshold, inputs.token_mask, inputs.token_weight,
        inputs.correction_first, inputs.correction_second, rule_bounds_of(spec.correction), seen, counts, sums,
        coefficients, tokens, rows, READING=reading._replace(aligned=reading.aligned and not ordered),
        SLOT=SLOT_TOKENS, SLOTS=SLOTS, ALIGN=align,
    )  # fmt: skip
    launch(
        _gate_trajectories, triton.cdiv(rows, TRAJECTORIES), inputs.cu_seqlens, inputs.trajectory_start,
        inputs.trajectory_rows, counts, sums, coefficients, *levels, tokens, rows, spec.level_log_low[0],
        spec.level_log_low[1], spec.level_log_high[0], spec.level_log_high[1], CLIPS=spec.level_clips, SLOT=SLOT_TOKENS,
        ALIGN=align, TRAJECTORIES=TRAJECTORIES, WIDTH=SLOTS_AT_ONCE,
    )  # fmt: skip
    return levels, seen
