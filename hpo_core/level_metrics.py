"""Metrics of each level of a hierarchy: the log-ratios of its segments, and the effect of the level's gate on them.

All metrics come from the few sums per segment that the loss computes anyway; no log-ratio of a token is read for them.
With n valid tokens in a segment and the aggregate a_k of their log-ratios at each level k::

    a_k = sum / n            or the level's other aggregate; with a split a_k = rise_k - fall_k, aggregates of x+ and x-
    u_k = a_k - a_{k+1}      the residual that the level's gate takes, by channel with a split

A segment counts if n > 0. Its residual counts in one region of the gate, once for each advantage sign of its tokens.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field

import torch
import torch.distributed

from .arguments import examines
from .batch import PackedBatch
from .checks import check
from .distributed import sum_in_order
from .metrics import fold, gathered, of_log_ratios, ratio
from .reference.hierarchy import aggregate_of
from .segment_exchange import SegmentExchange
from .specs import LevelKind, LevelSpec, PolicyLossInputs, PolicyLossSpec, Unit

# The regions of a gate that a residual can be in, in the order of the codes of _region.
REGIONS = ("pass", "clip_low", "clip_high", "rollback", "zero")
_PASS, _CLIP_LOW, _CLIP_HIGH, _ROLLBACK, _ZERO = range(len(REGIONS))
_SIGNS = ("positive", "negative")  # of the advantage: >= 0, < 0
_CHANNELS = ("_rise", "_fall")  # of a split
_LARGEST = 300.0  # log-ratio of a segment whose ratio counts: float64 holds sums of squares of such ratios


@functools.cache
def slots(split: bool) -> dict[str, str]:
    """The columns of a LevelMetrics and how each is reduced.

    >>> [name for name in slots(False) if name.endswith("rollback_negative")]
    ['segments_rollback_negative', 'tokens_rollback_negative']
    """
    channels = _CHANNELS if split else ("",)
    moments = {"sum": "sum", "square": "sum", "min": "min", "max": "max"}
    return {
        "segments": "sum",  # with at least one valid token
        "tokens": "sum",  # valid tokens
        "ratio_sum": "sum",  # of e^a, a at most 300
        "ratio_square": "sum",
        "ratio_deviation": "sum",  # sum of e^a - 1
        **{
            f"log_ratio_{moment}{channel}": reduction
            for channel in (("", *channels) if split else channels)
            for moment, reduction in moments.items()
        },
        **{
            f"{counted}_{region}_{sign}{channel}": "sum"
            for counted in ("segments", "tokens")
            for sign in _SIGNS
            for channel in channels
            for region in REGIONS
        },
    }


@dataclass(frozen=True, eq=False)
class LevelMetrics:
    """The observations of the levels of a gate in one loss call, or the sum of several, still on the device.

    ``table`` is float64 ``[levels, len(slots(split))]``, with the levels of ``units``, finest first: sums, minima and
    maxima, no quotient. Nothing is copied to the host before :meth:`compute`.

    A segment that micro-batches split counts in each of them. A segment that R ranks share under ``process_group``
    counts as 1/R on each rank, and its tokens count on the rank that has them: :meth:`all_reduce` gives the numbers of
    one process. Regions by :class:`~hpo_core.specs.LevelKind`, for a residual u:

    * clip: ``clip_low`` below its bounds, ``clip_high`` above, also for a rollback of slope 0;
    * rollback: ``rollback`` beyond the budget C, ``zero`` from ``(1 + 1 / slope) C`` on (slope inf: at once);
    * excess: ``zero`` beyond the segment's budget;
    * ``pass`` otherwise; identity, tanh and gamma have no other region.

    Tokens and segments count by the sign of the advantage (0 and NaN are positive); a segment with tokens of both signs
    counts for both. These counts depend on masks, not on values: if a token is left out because its log-ratio is NaN,
    they include it as long as its segment has other tokens, but ``tokens`` does not. If rows of one segment lie in
    several segments of the next level, the parent of the segment is the first of these.

    >>> import torch, hpo_core as hpo
    >>> batch = hpo.PackedBatch.from_lengths([2, 1])
    >>> logp, old_logp = torch.tensor([0.3, 0.1, 0.0]), torch.zeros(3)
    >>> out = hpo.policy_loss(logp, old_logp, torch.ones(2), batch, hpo.gates.gspo(0.1, 0.1), report=("levels",))
    >>> level = out.levels.compute()["trajectory"]
    >>> level["segments"], level["segment_fraction_clip_high_positive"], level["tokens_positive"]
    (2.0, 0.5, 3.0)
    """

    table: torch.Tensor = field(repr=False)
    units: tuple[Unit, ...]
    split: bool

    def __getitem__(self, name: str) -> torch.Tensor:
        """One raw slot ``[levels]`` on the device."""
        names = list(slots(self.split))
        check(name in names, "level metrics: no slot named {!r}; the slots are {}", name, ", ".join(names))
        return self.table[:, names.index(name)]

    def __add__(self, other: LevelMetrics) -> LevelMetrics:
        if not isinstance(other, LevelMetrics):
            return NotImplemented
        check(
            (self.units, self.split) == (other.units, other.split),
            "level metrics: expected those of the same levels ({}, split={}), got ({}, split={}); add up one gate's",
            *(_names(self.units), self.split, _names(other.units), other.split),
        )
        return self._folded(torch.stack((self.table, other.table)))

    def __radd__(self, other: int) -> LevelMetrics:
        """``sum`` begins with 0."""
        return self if other == 0 else NotImplemented

    @examines
    def all_reduce(self, group: torch.distributed.ProcessGroup | None = None) -> LevelMetrics:
        """Combine over the ranks of ``group``: one all-gather and a local fold in rank order, bitwise equal on every
        rank."""
        return self._folded(gathered(self.table, group))

    def _folded(self, tables: torch.Tensor) -> LevelMetrics:
        return LevelMetrics(fold(tables, slots(self.split).values()), self.units, self.split)

    def compute(self) -> dict[str, dict[str, float]]:
        """Means, fractions and counts as Python floats by level (``"step"``, ``"trajectory"``, ``"group"``,
        ``"domain"``): the only copy to the host. Empty denominators give NaN.

        Ratios, KL estimators and ``effective_sample_size`` are statistics of ``e^a`` with equal weights for segments.
        With an a above 300 ``ratio_mean``, ``kl_old_k3`` and ``effective_sample_size`` are NaN, the last also where
        each a is below -300, and extrema of ratios saturate; float64 holds no more.
        With a split ``log_ratio_mean`` and its extrema are also given by channel (``_rise``, ``_fall``).
        ``segment_fraction_*`` and ``token_fraction_*`` are the shares of the regions by advantage sign and, with a
        split, by channel: the five regions add up to 1.
        """
        return {
            unit.name.lower(): self._computed(dict(zip(slots(self.split), row, strict=True)))
            for unit, row in zip(self.units, self.table.tolist(), strict=True)
        }

    def _computed(self, raw: dict[str, float]) -> dict[str, float]:
        segments = raw["segments"]
        channels = _CHANNELS if self.split else ("",)
        of_ratios = of_log_ratios(raw, segments, raw["ratio_sum"], raw["ratio_square"], _LARGEST)
        if raw["log_ratio_max"] > _LARGEST:
            of_ratios |= dict.fromkeys(("ratio_mean", "kl_old_k3"), math.nan)
        if abs(raw["log_ratio_max"]) > _LARGEST:
            of_ratios["effective_sample_size"] = math.nan
        computed = {"segments": segments, "tokens": raw["tokens"], **of_ratios}
        for channel in ("", *channels) if self.split else channels:
            computed[f"log_ratio_mean{channel}"] = ratio(raw[f"log_ratio_sum{channel}"], segments)
            for extremum in ("min", "max"):
                computed[f"log_ratio_{extremum}{channel}"] = (
                    raw[f"log_ratio_{extremum}{channel}"] if segments else math.nan
                )
        for sign in _SIGNS:
            for singular, plural in (("segment", "segments"), ("token", "tokens")):
                # Each channel counts all of them. Shares of ranks, such as thirds, add up to a whole by rounding.
                whole = sum(raw[f"{plural}_{region}_{sign}{channels[0]}"] for region in REGIONS)
                computed[f"{plural}_{sign}"] = whole
                for channel in channels:
                    for region in REGIONS:
                        name = f"{region}_{sign}{channel}"
                        computed[f"{singular}_fraction_{name}"] = ratio(raw[f"{plural}_{name}"], whole)
        return computed


def observed_levels(
    inputs: PolicyLossInputs, spec: PolicyLossSpec, exchange: SegmentExchange | None, tokens: torch.Tensor
) -> LevelMetrics:
    """The metrics of the call whose sums ``exchange`` has seen; ``tokens``: the number of its valid tokens, 0-dim.

    Tensors per token are read for two things only: the mask, once per batch, and the signs of advantages per token.
    """
    assert inputs.ancestors is not None and exchange is not None  # a call that reports levels makes both
    units = tuple(level.unit for level in spec.levels)
    (sums, one), counted = exchange.seen, _tokens_by_sign(inputs, exchange.batch, units)
    count = sums[..., 0].double()
    present = count > 0
    share = exchange.shares(count) * present

    # [levels, P, 2] numbers of tokens, on this rank and over all ranks: the ranks agree on the signs of a segment
    own = _of_segments(counted, inputs.ancestors)
    has = exchange.total(own) > 0

    channels = _aggregates(count, sums[..., 1:].double() * one, spec)
    residuals = _residuals(channels, inputs.ancestors)
    codes = torch.stack(
        [
            _region(u, count[k], level, sign + 2 * channel)
            for k, level in enumerate(spec.levels)
            for sign in range(len(_SIGNS))
            for channel, u in enumerate(residuals[k])
        ]
    ).reshape(len(units), len(_SIGNS), *residuals.shape[1:])  # [levels, signs, channels, P]
    weights = torch.stack((share[..., None] * has, own * present[..., None]), 1).movedim(-1, 2)[:, :, :, None]
    inside = torch.stack([sum_in_order(weights * (codes == code)[:, None]) for code in range(len(REGIONS))], -1)

    whole = channels[:, 0] - channels[:, 1] if spec.split else channels[:, 0]
    bounded = whole.clamp(max=_LARGEST)
    of_ratios = torch.stack((bounded.exp(), (2 * bounded).exp(), torch.expm1(bounded)), 1)
    log_ratios = torch.cat((whole[:, None], channels), 1) if spec.split else channels
    table = torch.cat(
        (
            sum_in_order(share)[:, None],
            tokens.detach().expand(len(units), 1),
            sum_in_order(share[:, None] * of_ratios),
            _moments(log_ratios, share[:, None], present[:, None]).flatten(1),
            inside.flatten(1),
        ),
        1,
    )
    return LevelMetrics(table, units, spec.split)


def _tokens_by_sign(inputs: PolicyLossInputs, batch: PackedBatch, units: tuple[Unit, ...]) -> torch.Tensor:
    """``[P, 2]``: the number of unmasked tokens of each leaf, with an advantage >= 0 and < 0."""
    counts = batch.once(_tokens_of_leaves, units)
    below = inputs.advantages.flatten() < 0
    if inputs.advantage_per_token:
        negative = _marked_in_leaves(below if batch.mask is None else below & batch.mask, batch, units)
    else:
        of_row = torch.nn.functional.pad(below, (0, 1))  # a batch without rows may have steps, which are empty
        negative = counts * of_row[batch.hierarchy(units).row]
    return torch.stack((counts - negative, negative), 1)


def _tokens_of_leaves(batch: PackedBatch, units: tuple[Unit, ...]) -> torch.Tensor:
    every = torch.ones(batch.total_tokens, dtype=torch.bool, device=batch.device) if batch.mask is None else batch.mask
    return _marked_in_leaves(every, batch, units)


def _marked_in_leaves(marked: torch.Tensor, batch: PackedBatch, units: tuple[Unit, ...]) -> torch.Tensor:
    """``[P]``: the number of tokens of each leaf that are marked in ``[T]``."""
    hierarchy = batch.hierarchy(units)
    before = torch.nn.functional.pad(marked.cumsum(0), (1, 0))
    begin, end = (offsets.clamp(0, marked.numel()) for offsets in (hierarchy.begin, hierarchy.end))
    return (before[end] - before[begin]).clamp(min=0)


def _of_segments(of_leaf: torch.Tensor, ancestors: torch.Tensor) -> torch.Tensor:
    """``[levels, P, n]``: the sums of integers ``[P, n]`` over the leaves of each segment."""
    of_levels = of_leaf.expand(*ancestors.shape, -1)
    return torch.zeros_like(of_levels).scatter_add_(1, ancestors[..., None].expand_as(of_levels), of_levels)


def _aggregates(count: torch.Tensor, totals: torch.Tensor, spec: PolicyLossSpec) -> torch.Tensor:
    """``[levels, channels, P]``: the aggregate of each segment, one channel without a split."""
    by_level = zip(count, totals.movedim(-1, 1)[:, : 1 + spec.split], spec.levels, strict=True)
    return torch.stack([aggregate_of(size, total, level) for size, total, level in by_level])


def _residuals(aggregates: torch.Tensor, ancestors: torch.Tensor) -> torch.Tensor:
    """``[levels, channels, P]``: the aggregate of each segment minus the aggregate of its parent at the next level."""
    no_parent = torch.full_like(ancestors[:1], ancestors.shape[1])  # above the last level, where every aggregate is 0
    above = torch.cat((ancestors[1:], no_parent))
    parent = torch.full_like(ancestors, ancestors.shape[1]).scatter_reduce_(1, ancestors, above, "amin")
    coarser = torch.nn.functional.pad(torch.cat((aggregates[1:], torch.zeros_like(aggregates[:1]))), (0, 1))
    return aggregates - coarser.gather(2, parent[:, None].expand_as(aggregates))


def _region(u: torch.Tensor, count: torch.Tensor, level: LevelSpec, kind: int) -> torch.Tensor:
    """The index in ``REGIONS`` of each residual ``[P]``; ``kind``: the index of the bounds in the level's four."""
    low, high = level.low[kind], level.high[kind]
    if level.gate is LevelKind.ROLLBACK:
        if level.slope == 0:
            return _CLIP_LOW * (u < -high) + _CLIP_HIGH * (u > high)
        slope = count.clamp(max=-level.slope) if level.slope < 0 else level.slope
        beyond = u.abs() > high
        return _ROLLBACK * beyond + (_ZERO - _ROLLBACK) * (beyond & (u.abs() >= high + high / slope))
    if level.gate is LevelKind.EXCESS:
        return _ZERO * (u > count * high)
    if level.gate is LevelKind.CLIP:
        return _CLIP_LOW * (u < low) + _CLIP_HIGH * (u > high)
    return torch.zeros_like(u, dtype=torch.int64)


def _moments(values: torch.Tensor, share: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    """Sum, sum of squares, minimum and maximum over the last dimension, which may be empty."""
    pad = torch.nn.functional.pad
    least = pad(torch.where(present, values, math.inf), (0, 1), value=math.inf).amin(-1)
    largest = pad(torch.where(present, values, -math.inf), (0, 1), value=-math.inf).amax(-1)
    return torch.stack((sum_in_order(share * values), sum_in_order(share * values.square()), least, largest), -1)


def _names(units: tuple[Unit, ...]) -> str:
    return ", ".join(unit.name.lower() for unit in units)
