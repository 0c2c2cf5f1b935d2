"""The gates of all levels above a leaf, by channel and sign of the advantage, as its tokens need them."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..specs import Aggregate, LevelKind, LevelSpec, PolicyLossSpec, Routing, Unit
from .fixed_point import FIXED_POINT
from .launch import kernel, launch
from .leaves import FIELDS, FIXED, VALID, Leaves, add_to_segments, segment_of
from .terms import Term

__all__ = ["GATED_FIELDS", "KINDS", "MEAN", "OWN", "SIDE", "SLOPE", "Shape", "Z", "add_children", "gate_leaves"]

GATED = 64  # leaves of one program
MOST_LEVELS = 4

CLIP = tl.constexpr(int(LevelKind.CLIP))
ROLLBACK = tl.constexpr(int(LevelKind.ROLLBACK))
TANH = tl.constexpr(int(LevelKind.TANH))
GAMMA = tl.constexpr(int(LevelKind.GAMMA))
EXCESS = tl.constexpr(int(LevelKind.EXCESS))
SELF = tl.constexpr(int(Routing.SELF))
SUM = tl.constexpr(int(Aggregate.SUM))
LOG_MEAN_EXP = tl.constexpr(int(Aggregate.LOG_MEAN_EXP))

# The gated levels of a leaf by kind, 2 channel + (the advantage is negative). A side is 1 below, 2 above or 3.
KINDS = tl.constexpr(4)
GATED_FIELDS = tl.constexpr(5)
Z, MEAN, SLOPE, OWN, SIDE = (tl.constexpr(field) for field in range(5))

LARGEST_DOUBLE = tl.constexpr(torch.finfo(torch.float64).max)


class Shape(NamedTuple):
    """The choices of a hierarchy that specialise kernels, beside the token reads and the optional tensors."""

    gates: tuple[int, ...]  # by level, finest first
    routings: tuple[int, ...]
    aggregates: tuple[int, ...]
    divisors: tuple[tuple[bool, ...], ...]  # by level, which levels' sizes divide the gradient of its aggregate
    channels: int
    takes_place: bool  # the finest level takes the place of the token's own slope
    drop: bool  # the token gate; else it clips
    score_head: bool
    term: Term | None
    carries: bool  # gradient flows through some aggregate
    kl: int
    kl_gradient: int


# ------------------------------------------------------------------------------------------------------------- levels


class Residual(NamedTuple):
    value: tl.tensor
    slope: tl.tensor
    side: tl.tensor  # int32: 1 below its bounds, 2 above


@triton.jit
def _gate_residual(u, size, low, high, slope, GATE: tl.constexpr):
    """A level's gate on the residual of a segment with ``size`` tokens, all in double."""
    one = tl.full(u.shape, 1.0, tl.float64)
    zero = tl.zeros(u.shape, tl.float64)
    below, above = u < u, u < u
    value, derivative = u, one
    if GATE == CLIP:
        below, above = u < low, u > high
        value = tl.where(above, high, tl.where(below, low, u))
        derivative = tl.where(below | above, zero, one)
    elif GATE == ROLLBACK:
        towards = tl.where(u < 0.0, -one, one)
        beyond = tl.abs(u) > high
        down = tl.where(slope < 0.0, tl.minimum(size, -slope), one * slope)
        at_once = down > LARGEST_DOUBLE
        down = tl.where(at_once, one, down)
        back = tl.where(at_once, -one, (down + 1.0) * high - down * tl.abs(u))
        rolled = tl.where(back > 0.0, towards * back, zero)
        rolled_slope = tl.where(back > 0.0, -down, zero)
        flat = down == 0.0  # a clip: no zone to roll back in
        value = tl.where(beyond, tl.where(flat, towards * high, rolled), u)
        derivative = tl.where(beyond, tl.where(flat, zero, rolled_slope), one)
        below, above = beyond & (u < 0.0), beyond & (u > 0.0)
    elif GATE == TANH:
        decay = tl.exp(-2.0 * tl.abs(u / high))
        size_of_bend = (1.0 - decay) / (1.0 + decay)
        value = tl.where(u < 0.0, -high, high) * size_of_bend
        derivative = 1.0 - size_of_bend * size_of_bend
    elif GATE == GAMMA:
        rise = high * tl.exp(tl.minimum(u, 80.0))  # as a float; z has long saturated there
        value = high + low * u - rise
        derivative = low - rise
    elif GATE == EXCESS:
        excess = u - size * high
        above = excess > 0.0
        value = tl.where(above, -excess, zero)
        derivative = tl.where(above, -one, zero)
    return Residual(value, derivative, below.to(tl.int32) + 2 * above.to(tl.int32))


@triton.jit
def _by_kind(kind, values):
    first, second, third, fourth = values
    return tl.where(kind == 0, first, tl.where(kind == 1, second, tl.where(kind == 2, third, fourth)))


@triton.jit
def _aggregate(segments, segment, channel, exists, AGGREGATE: tl.constexpr):
    """Of each segment, and its size."""
    at = segments + segment * FIELDS
    size = tl.maximum(tl.load(at + VALID, mask=exists, other=0), 1).to(tl.float64)
    sum = tl.load(at + FIXED + channel, mask=exists, other=0).to(tl.float64) / FIXED_POINT
    value = sum if AGGREGATE == SUM else sum / size
    if AGGREGATE == LOG_MEAN_EXP:
        value = tl.log(1.0 + value)
    return value, size


@kernel
def _gate_leaves(
    begin,
    end,
    ancestors,
    segments,
    gated_levels,  # [P, GATED_FIELDS, KINDS] float32
    steps,  # [P, DEPTH, KINDS] float64: the slope of a level less that of the finer one
    leaves: tl.int64,
    # by level: bounds by kind, and the slope
    low_00: tl.float64, low_01: tl.float64, low_02: tl.float64, low_03: tl.float64,
    high_00: tl.float64, high_01: tl.float64, high_02: tl.float64, high_03: tl.float64, slope_0: tl.float64,
    low_10: tl.float64, low_11: tl.float64, low_12: tl.float64, low_13: tl.float64,
    high_10: tl.float64, high_11: tl.float64, high_12: tl.float64, high_13: tl.float64, slope_1: tl.float64,
    low_20: tl.float64, low_21: tl.float64, low_22: tl.float64, low_23: tl.float64,
    high_20: tl.float64, high_21: tl.float64, high_22: tl.float64, high_23: tl.float64, slope_2: tl.float64,
    low_30: tl.float64, low_31: tl.float64, low_32: tl.float64, low_33: tl.float64,
    high_30: tl.float64, high_31: tl.float64, high_32: tl.float64, high_33: tl.float64, slope_3: tl.float64,
    SHAPE: tl.constexpr,
    DEPTH: tl.constexpr,
    LEAVES: tl.constexpr,
):  # fmt: skip
    lows = (
        (low_00, low_01, low_02, low_03), (low_10, low_11, low_12, low_13),
        (low_20, low_21, low_22, low_23), (low_30, low_31, low_32, low_33),
    )  # fmt: skip
    highs = (
        (high_00, high_01, high_02, high_03), (high_10, high_11, high_12, high_13),
        (high_20, high_21, high_22, high_23), (high_30, high_31, high_32, high_33),
    )  # fmt: skip
    slopes = (slope_0, slope_1, slope_2, slope_3)
    leaf = tl.program_id(0).to(tl.int64) * LEAVES + tl.arange(0, LEAVES)[:, None]
    exists = leaf < leaves
    first, last = tl.load(begin + leaf, mask=exists, other=0), tl.load(end + leaf, mask=exists, other=0)
    exists &= first < last  # a leaf that is not good is empty
    kind = tl.arange(0, 2 * SHAPE.channels)[None, :]
    channel = kind // 2
    exists = tl.broadcast_to(exists, [LEAVES, 2 * SHAPE.channels])

    z = tl.zeros([LEAVES, 2 * SHAPE.channels], tl.float64)
    finer_slope = z
    own = z.to(tl.float32)
    side = z.to(tl.int32)
    here, size = _aggregate(
        segments, segment_of(ancestors, 0, leaf, leaves, exists), channel, exists, SHAPE.aggregates[0]
    )
    at = gated_levels + leaf * GATED_FIELDS * KINDS + kind
    tl.store(at + MEAN * KINDS, here.to(tl.float32), mask=exists)
    for k in tl.static_range(DEPTH):
        u, size_here = here, size
        if k + 1 < DEPTH:
            parent = segment_of(ancestors, k + 1, leaf, leaves, exists)
            here, size = _aggregate(segments, parent, channel, exists, SHAPE.aggregates[k + 1])
            u -= here
        gated = _gate_residual(
            u, size_here, _by_kind(kind, lows[k]), _by_kind(kind, highs[k]), slopes[k], SHAPE.gates[k]
        )
        z += gated.value
        side |= gated.side
        step = gated.slope - finer_slope  # at the finest level the token subtracts its own slope
        finer_slope = gated.slope
        if SHAPE.routings[k] == SELF:
            own += step.to(tl.float32)
        if k == 0:
            tl.store(at + SLOPE * KINDS, gated.slope.to(tl.float32), mask=exists)
        if steps is not None:
            tl.store(steps + (leaf * DEPTH + k) * KINDS + kind, step, mask=exists)
    falls = channel == 1  # below in the falling channel is above in the log-ratio
    side = tl.where(falls, side // 2 + side % 2 * 2, side)
    tl.store(at + Z * KINDS, tl.where(falls, -z, z).to(tl.float32), mask=exists)
    tl.store(at + OWN * KINDS, own, mask=exists)
    tl.store(at + SIDE * KINDS, side.to(tl.float32), mask=exists)


@kernel
def _add_children(
    ancestors,
    segments,
    leaves: tl.int64,
    LEVEL: tl.constexpr,
    AGGREGATE: tl.constexpr,  # of the finer level
    CHANNELS: tl.constexpr,
    LEAVES: tl.constexpr,
):
    """To the segments of a balanced level the finer ones that have tokens. A segment's number is that of its first
    leaf, which has its parent; this exists, whatever the ancestors are."""
    segment = tl.program_id(0).to(tl.int64) * LEAVES + tl.arange(0, LEAVES)
    exists = segment < leaves
    parent = tl.load(ancestors + LEVEL * leaves + segment, mask=exists, other=-1)
    segment += (LEVEL - 1) * leaves
    counts = (
        (tl.load(segments + segment * FIELDS + VALID, mask=exists, other=0) > 0) & (parent >= 0) & (parent < leaves)
    )
    parent = LEVEL * leaves + tl.where(counts, parent, 0)
    add_to_segments(segments, parent, counts.to(tl.int64), VALID, counts)
    for channel in tl.static_range(CHANNELS):
        value, _ = _aggregate(segments, segment, channel, counts, AGGREGATE)
        add_to_segments(segments, parent, (value * FIXED_POINT).to(tl.int64), FIXED + channel, counts)


# --------------------------------------------------------------------------------------------------------------- host


def add_children(leaves: Leaves, shape: Shape) -> None:
    """A launch for each balanced level, finest first: each reads the sums of the one before."""
    depth, count = leaves.ancestors.shape
    for level in range(1, depth):
        if shape.aggregates[level] == Aggregate.BALANCED:
            launch(
                _add_children, triton.cdiv(count, GATED), leaves.ancestors, leaves.segments, count, LEVEL=level,
                AGGREGATE=shape.aggregates[level - 1], CHANNELS=shape.channels, LEAVES=GATED,
            )  # fmt: skip


def gate_leaves(spec: PolicyLossSpec, leaves: Leaves, shape: Shape) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gated levels of all leaves, and the steps of slopes where aggregates carry gradient; None without levels."""
    (depth, count), device = leaves.ancestors.shape, leaves.ancestors.device
    if depth == 0:
        return None, None
    gated_levels = torch.empty((count, GATED_FIELDS.value, KINDS.value), dtype=torch.float32, device=device)
    steps = torch.empty((count, depth, KINDS.value), dtype=torch.float64, device=device) if shape.carries else None
    spare = [LevelSpec(Unit.TRAJECTORY, LevelKind.IDENTITY)] * (MOST_LEVELS - depth)
    numbers = [number for level in (*spec.levels, *spare) for number in (*level.low, *level.high, level.slope)]
    launch(
        _gate_leaves, triton.cdiv(count, GATED), leaves.begin, leaves.end, leaves.ancestors, leaves.segments,
        gated_levels, steps, count, *numbers, SHAPE=shape, DEPTH=depth, LEAVES=GATED,
    )  # fmt: skip
    return gated_levels, steps
