"""Gates on the log-ratios of tokens and of the levels above them: aggregates of nested segments, gated residuals."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch

from ..specs import Aggregate, Exchange, LevelKind, LevelSpec, PolicyLossInputs, PolicyLossSpec, Routing, TokenGate
from .segments import of_row, read_at
from .terms import EXPONENT_SATURATION, GAMMA_SATURATION, clip, of_side, saturate


class Gated(NamedTuple):
    """One level as its tokens see it, each ``[T]``; the finest are the tokens themselves."""

    aggregate: torch.Tensor  # a_k
    residual: torch.Tensor  # a_k - a_{k+1}
    value: torch.Tensor  # g_k of it
    below: torch.Tensor  # bool, the residual is below the gate's bounds
    above: torch.Tensor
    size: torch.Tensor | None = None  # n of the segment; of a token None


class Channel(NamedTuple):
    """All log-ratios, or with a split the rising ones (sign 1) and the sizes of the falling ones (sign -1)."""

    sign: int
    levels: tuple[Gated, ...]  # finest first


def leaf_of_token(inputs: PolicyLossInputs, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The leaf of every token, -1 outside all of them, and how many leaves leave their row or overlap."""
    bad = torch.zeros((), dtype=torch.int64, device=row.device)
    begin, end, owner = inputs.leaf_begin, inputs.leaf_end, inputs.leaf_row
    if begin is None or end is None or owner is None:
        return row, bad
    leaf = torch.full_like(row, -1)
    offsets, covered = inputs.cu_seqlens.tolist(), 0
    for index, (first, last, of) in enumerate(zip(begin.tolist(), end.tolist(), owner.tolist(), strict=True)):
        inside = 0 <= of < len(offsets) - 1 and offsets[of] <= first <= last <= offsets[of + 1]
        if inside and covered <= first and last <= row.numel():
            leaf[first:last] = index
            covered = last
        else:
            bad += 1
    return leaf, bad


def ancestors_of(inputs: PolicyLossInputs, levels: int) -> torch.Tensor:
    """The segment of each leaf at every level, ``[levels, P]``."""
    if inputs.ancestors is not None:
        return inputs.ancestors
    return torch.arange(inputs.leaves, device=inputs.logp.device).expand(levels, -1)


def gated_log_ratio(
    x: torch.Tensor, negative: torch.Tensor, given: torch.Tensor, inputs: PolicyLossInputs, spec: PolicyLossSpec
) -> tuple[Channel, ...]:
    """The gates of tokens that no level is above."""
    return (Channel(1, (Gated(x, x, *_gate_token(x, negative, given, inputs, spec)),)),)


def combined(channels: tuple[Channel, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """z, and where some gate of a token is below and above its bounds, in the direction of the log-ratio."""
    first = channels[0].levels[0]
    z, below, above = torch.zeros_like(first.value), torch.zeros_like(first.below), torch.zeros_like(first.above)
    for sign, levels in channels:
        for level in levels:
            z = z + sign * level.value
            below = below | (level.below if sign > 0 else level.above)
            above = above | (level.above if sign > 0 else level.below)
    return z, below, above


def gated_hierarchy(
    x: torch.Tensor,
    valid: torch.Tensor,
    leaf: torch.Tensor,
    negative: torch.Tensor,
    given: torch.Tensor,
    inputs: PolicyLossInputs,
    spec: PolicyLossSpec,
    exchange: Exchange | None,
) -> tuple[Channel, ...]:
    """The gates of tokens and of all levels above them, in one channel or in that of each sign."""
    ancestors = ancestors_of(inputs, len(spec.levels))
    rising, zero = x >= 0, torch.zeros_like(x)  # +0 and -0 rise: one channel has the whole derivative at 0
    channels = [x, zero]
    if spec.split:
        channels = [torch.where(rising, x, zero), torch.where(rising, zero, -x)]
    entering = channels
    if spec.mean_exp:
        entering = [torch.expm1(saturate(channel, valid, EXPONENT_SATURATION)) for channel in channels]
    sums = _sums(entering, valid, leaf, ancestors)
    if exchange is not None:  # all levels and channels at once: processes must ask in one order
        sums = exchange.differentiable_sums(sums)
    sums = _with_children(sums, ancestors, spec.levels)
    sums = torch.nn.functional.pad(sums, (0, 0, 0, 1))  # no segment, for tokens that are in none
    gated = []
    for channel in range(1 + spec.split):
        of_token = channels[channel]
        aggregates, counts = [], []
        for index, level in enumerate(spec.levels):
            segment = torch.where(valid, of_row(ancestors[index], leaf), -1)
            count, total = sums[index, segment, 0], sums[index, segment, 1 + channel]
            aggregates.append(_aggregate(of_token, count, total, level))
            counts.append(count)
        residuals = [finer - coarser for finer, coarser in itertools.pairwise([of_token, *aggregates, zero])]
        levels = [Gated(of_token, residuals[0], *_gate_token(residuals[0], negative, given, inputs, spec))]
        for aggregate, residual, count, level in zip(aggregates, residuals[1:], counts, spec.levels, strict=True):
            of_level = _gate_level(residual, negative + 2 * channel, count, level)
            levels.append(Gated(aggregate, residual, *of_level, count))
        gated.append(Channel(1 - 2 * channel, tuple(levels)))
    return tuple(gated)


def _sums(
    channels: list[torch.Tensor], valid: torch.Tensor, leaf: torch.Tensor, ancestors: torch.Tensor
) -> torch.Tensor:
    """``[levels, P, 3]``: the valid tokens of each segment, and their sum by channel."""
    levels, leaves = ancestors.shape
    entering = torch.stack((torch.ones_like(channels[0]), *channels), 1)[valid]
    place = ancestors[:, leaf[valid]] + leaves * torch.arange(levels, device=leaf.device)[:, None]
    sums = entering.new_zeros(levels * leaves, 3).index_add(0, place.flatten(), entering.repeat(levels, 1))
    return sums.reshape(levels, leaves, 3)


def _with_children(sums: torch.Tensor, ancestors: torch.Tensor, levels: tuple[LevelSpec, ...]) -> torch.Tensor:
    """The sums where a balanced level has, in place of tokens, the finer segments that have any. A segment's number is
    that of its first leaf, which has its parent."""
    by_level = list(sums.unbind(0))
    for k, (level, finer) in enumerate(zip(levels[1:], levels, strict=False), 1):
        if level.aggregate is Aggregate.BALANCED:
            count, totals = by_level[k - 1][:, :1], by_level[k - 1][:, 1:]
            some = count[:, 0] > 0
            children = torch.cat((torch.ones_like(count), aggregate_of(count, totals, finer)), 1)
            by_level[k] = torch.zeros_like(children).index_add(0, ancestors[k, some], children[some])
    return torch.stack(by_level) if levels else sums


def aggregate_of(count: torch.Tensor, total: torch.Tensor, level: LevelSpec) -> torch.Tensor:
    """The aggregate of segments, from their counts and sums."""
    mean = total if level.aggregate is Aggregate.SUM else total / count.clamp(min=1)
    return mean.log1p() if level.aggregate is Aggregate.LOG_MEAN_EXP else mean


def _aggregate(x: torch.Tensor, count: torch.Tensor, total: torch.Tensor, level: LevelSpec) -> torch.Tensor:
    """The aggregate of each token's segment, with the derivative it is routed."""
    aggregate = aggregate_of(count, total, level)
    if level.routing is not Routing.THROUGH:
        aggregate = aggregate.detach()
    return aggregate + (x - x.detach()) if level.routing is Routing.SELF else aggregate


def _gate_token(
    u: torch.Tensor, negative: torch.Tensor, given: torch.Tensor, inputs: PolicyLossInputs, spec: PolicyLossSpec
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    nowhere = torch.zeros_like(given)
    if spec.token is TokenGate.DROP:
        return torch.zeros_like(u), nowhere, nowhere
    if spec.token is TokenGate.IDENTITY:
        return u, nowhere, nowhere
    value, below, above = clip(u, *bounds_of_tokens(negative, given, inputs, spec))
    if spec.term is not None:  # a slope beyond the bounds, which has no value
        slope = of_side(below, above, negative, spec.term.slope_low, spec.term.slope_high, torch.zeros_like(u))
        value = value + slope * (u - u.detach())
    return value, below, above


def bounds_of_tokens(
    negative: torch.Tensor, given: torch.Tensor, inputs: PolicyLossInputs, spec: PolicyLossSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """The logarithms of the bounds of each token's clip."""
    like = inputs.logp.detach()
    if spec.is_hierarchical:
        low, high = (like.new_tensor(bound)[negative] for bound in (spec.token_log_low, spec.token_log_high))
    else:
        low, high = (like.new_tensor(bound)[negative].log() for bound in (spec.token_low, spec.token_high))
    if inputs.low is not None:
        driven = torch.tensor(spec.low_driven, device=like.device)[negative]
        low = torch.where(driven, read_at(inputs.low, given, like, 1.0).log(), low)
    if inputs.high is not None:
        driven = torch.tensor(spec.high_driven, device=like.device)[negative]
        high = torch.where(driven, read_at(inputs.high, given, like, 1.0).log(), high)
    return low, high


def _gate_level(
    u: torch.Tensor, kind: torch.Tensor, count: torch.Tensor, level: LevelSpec
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gated residual, and where it fell beyond the lower and the upper bound. ``count``: tokens of the segment."""
    low, high = (u.new_tensor(bound)[kind] for bound in (level.low, level.high))
    if level.gate is LevelKind.CLIP:
        return clip(u, low, high)
    if level.gate is LevelKind.ROLLBACK:
        slope = count.clamp(max=-level.slope) if level.slope < 0 else torch.full_like(u, level.slope)
        size, at_once = u.abs(), slope.isinf()
        slope = slope.masked_fill(at_once, 1.0)  # infinity times the derivative 0 would be NaN
        back = torch.where(at_once, -torch.ones_like(u), (slope + 1) * high - slope * size)
        back = torch.where(slope == 0, high, back)  # a clip: no zone to roll back in
        # At the end of the zone the slope is that of 0, as level metrics count it; a clamp would keep the other.
        rolled = torch.where(size <= high, u, torch.sign(u) * torch.where(back > 0, back, torch.zeros_like(u)))
        return rolled, u < -high, u > high
    nowhere = torch.zeros_like(u, dtype=torch.bool)
    if level.gate is LevelKind.TANH:
        return high * torch.tanh(u / high), nowhere, nowhere
    if level.gate is LevelKind.GAMMA:
        saturated = u.detach().clamp(max=GAMMA_SATURATION) + (u - u.detach())
        return high + low * u - high * torch.exp(saturated), nowhere, nowhere
    if level.gate is LevelKind.EXCESS:
        excess = u - count * high
        return torch.where(excess > 0, -excess, torch.zeros_like(u)), nowhere, excess > 0
    return u, nowhere, nowhere
