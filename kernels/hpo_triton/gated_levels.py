"""The gates of all levels above a leaf, by channel and sign of the advantage, as its tokens need them."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ..specs import Aggregate, LevelKind, Routing
from .fixed_point import FIXED_POINT, from_fixed_below
from .leaves import EXPONENT, FIELDS, FIXED, FLOW, VALID, add_to_segments, segment_of
from .math import LARGEST_DOUBLE, LARGEST_FLOAT, SATURATION, clamp, exp
from .terms import Term

CLIP = tl.constexpr(int(LevelKind.CLIP))
ROLLBACK = tl.constexpr(int(LevelKind.ROLLBACK))
TANH = tl.constexpr(int(LevelKind.TANH))
GAMMA = tl.constexpr(int(LevelKind.GAMMA))
EXCESS = tl.constexpr(int(LevelKind.EXCESS))
SELF = tl.constexpr(int(Routing.SELF))
SUM = tl.constexpr(int(Aggregate.SUM))
LOG_MEAN_EXP = tl.constexpr(int(Aggregate.LOG_MEAN_EXP))

# The gated levels of a leaf by kind, 2 channel + (the advantage is negative). A side is 1 below, 2 above, 3 both.
GATED = tl.constexpr(64)  # leaves of one block
KINDS = tl.constexpr(4)
GATED_FIELDS = tl.constexpr(5)
Z, MEAN, SLOPE, OWN, SIDE = (tl.constexpr(field) for field in range(5))


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
    carries: bool  # gradient flows through some aggregate, and the sweep has to find out how much
    as_ratio: bool  # every token of a leaf has the ratio that stands at Z
    settled: bool  # gradient flows through the aggregate of the only level, and OWN of a leaf is this gradient
    kl: int
    kl_gradient: int


def of_levels(shape: Shape) -> Shape:
    """The shape without the choices that concern tokens alone: one kernel that reads no token serves all."""
    return shape._replace(
        takes_place=False, drop=False, score_head=False, term=None, carries=False, kl=0, kl_gradient=0
    )


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
        v = tl.abs(u / high)
        decay = tl.exp(-2.0 * v)
        # Where v is small the quotient cancels, and the next term of the series is beyond a double.
        size_of_bend = tl.where(v < 1e-4, v - v * v * v / 3.0, (1.0 - decay) / (1.0 + decay))
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
    """The aggregate of each segment, and its size."""
    at = segments + segment * FIELDS
    size = tl.maximum(tl.load(at + VALID, mask=exists, other=0), 1).to(tl.float64)
    sum = tl.load(at + FIXED + channel, mask=exists, other=0).to(tl.float64) / FIXED_POINT
    value = sum if AGGREGATE == SUM else sum / size
    if AGGREGATE == LOG_MEAN_EXP:
        value = tl.log(1.0 + value)
    return value, size


@triton.jit
def gate_leaves(
    tables, gated_levels, slope_differences, block, leaves, lows, highs, slopes,
    SHAPE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """The gated levels of a block of leaves. ``lows``, ``highs`` and ``slopes``: by level, the bounds by kind."""
    leaf = block * GATED + tl.arange(0, GATED).to(tl.int64)[:, None]
    exists = leaf < leaves
    ancestors, segments = tables.ancestors, tables.segments
    first = tl.load(tables.begin + leaf, mask=exists, other=0)
    last = tl.load(tables.end + leaf, mask=exists, other=0)
    exists &= first < last  # a leaf that is not good is empty
    kind = tl.arange(0, 2 * SHAPE.channels)[None, :]
    channel = kind // 2
    exists = tl.broadcast_to(exists, [GATED, 2 * SHAPE.channels])

    z = tl.zeros([GATED, 2 * SHAPE.channels], tl.float64)
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
        difference = gated.slope - finer_slope  # at the finest level the token subtracts its own slope
        finer_slope = gated.slope
        if SHAPE.routings[k] == SELF:
            own += difference.to(tl.float32)
        if k == 0:
            tl.store(at + SLOPE * KINDS, gated.slope.to(tl.float32), mask=exists)
        if slope_differences is not None:
            tl.store(slope_differences + (leaf * DEPTH + k) * KINDS + kind, difference, mask=exists)
    falls = channel == 1  # below in the falling channel is above in the log-ratio
    side = tl.where(falls, side // 2 + side % 2 * 2, side)
    value = tl.where(falls, -z, z).to(tl.float32)
    if SHAPE.as_ratio:
        value = exp(clamp(value, -SATURATION, SATURATION))
    tl.store(at + Z * KINDS, value, mask=exists)
    if SHAPE.settled:
        segment = segments + segment_of(ancestors, 0, leaf, leaves, exists) * FIELDS
        coefficients = from_fixed_below(
            tl.load(segment + FLOW + kind, mask=exists, other=0),
            tl.load(segment + EXPONENT + kind, mask=exists, other=0),
        )
        passed = tl.sum(coefficients * value.to(tl.float64) * finer_slope, axis=1, keep_dims=True)
        if SHAPE.divisors[0][0]:
            passed = passed / size
        passed = clamp(0.0 - passed, -LARGEST_FLOAT, LARGEST_FLOAT).to(tl.float32)  # never -0
        own = tl.broadcast_to(passed, own.shape)
    tl.store(at + OWN * KINDS, own, mask=exists)
    tl.store(at + SIDE * KINDS, side.to(tl.float32), mask=exists)


@triton.jit
def add_children(
    tables, block, leaves, LEVEL: tl.constexpr, AGGREGATE: tl.constexpr, CHANNELS: tl.constexpr
):  # fmt: skip
    """Adds a block of finer segments with tokens, of the given AGGREGATE, to those of a balanced level. A segment's
    number is that of its first leaf, whose ancestor is the parent: the leaf exists, whatever the ancestors are."""
    segment = block * GATED + tl.arange(0, GATED).to(tl.int64)
    exists = segment < leaves
    segments, parent = tables.segments, segment
    if tables.ancestors is not None:
        parent = tl.load(tables.ancestors + LEVEL * leaves + segment, mask=exists, other=-1)
    segment += (LEVEL - 1) * leaves
    counts = (
        (tl.load(segments + segment * FIELDS + VALID, mask=exists, other=0) > 0) & (parent >= 0) & (parent < leaves)
    )
    parent = LEVEL * leaves + tl.where(counts, parent, 0)
    add_to_segments(segments, parent, counts.to(tl.int64), VALID, counts)
    for channel in tl.static_range(CHANNELS):
        value, _ = _aggregate(segments, segment, channel, counts, AGGREGATE)
        add_to_segments(segments, parent, (value * FIXED_POINT).to(tl.int64), FIXED + channel, counts)
