"""The parts of a ratio gate: gates on residuals, levels, and corrections, each a value that checks itself."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..arguments import Short, check_flag, check_member, check_number, check_numbers, is_finite
from ..checks import check, require_type
from ..specs import (
    Action,
    Aggregate,
    CorrectionSpec,
    LevelKind,
    LevelSpec,
    Reduction,
    Routing,
    Statistic,
    Unit,
    in_floats,
)

Pair = tuple[float, float]  # (advantage >= 0, advantage < 0)


class Channel(enum.Enum):
    """Between which two policies a log-ratio is taken: ``logp`` now, ``old_logp`` at the start of the optimiser step as
    the trainer computes it, ``rollout_logp`` as the sampler did."""

    STALENESS = "logp - old_logp"
    DISCREPANCY = "old_logp - rollout_logp"
    TOTAL = "logp - rollout_logp"


def check_number_pair(name: str, pair: object, meaning: str = "(advantage >= 0, advantage < 0) of numbers") -> None:
    is_pair = isinstance(pair, tuple) and len(pair) == 2
    require_type(is_pair, "{}: expected a pair {}, got {!r}", name, meaning, pair)
    check_numbers(name, pair)


def check_bounds_alone(name: str, gate: object) -> None:
    """Check that a clip has no slopes and weights beyond its bounds."""
    check(
        not isinstance(gate, Clip) or gate == Clip(gate.low, gate.high),
        "{}: slopes and weights beyond the bounds are for the clip of tokens, got {!r}; drop them",
        name,
        gate,
    )


def names_of(kinds: tuple[type, ...]) -> str:
    return ", ".join(f"{kind.__name__}()" for kind in kinds[:-1]) + f" or {kinds[-1].__name__}()"


@dataclass(frozen=True)
class Identity:
    """``g(u) = u``."""


@dataclass(frozen=True)
class Drop:
    """``g(u) = 0``: the residual does not count."""


@dataclass(frozen=True, repr=False)
class Clip(Short):
    """``g(u) = clamp(u, log low, log high)``, derivative 1 inside and at the bounds, 0 outside.

    ``low`` and ``high`` are pairs of *ratio* bounds, for advantage >= 0 and < 0; 0 and inf mean "no bound". A one-sided
    pair ``low=(0, 1 - e), high=(1 + e, inf)`` is PPO's pessimistic minimum.

    Tokens beyond a bound may have a slope (``slope_low``, ``slope_high``: the derivative there, 0 by default; 1 keeps
    the gradient at the bound's value) and a factor on their objective (``weight_low``, ``weight_high``).
    """

    low: Pair = (0.0, 0.0)
    high: Pair = (math.inf, math.inf)
    slope_low: Pair = (0.0, 0.0)
    slope_high: Pair = (0.0, 0.0)
    weight_low: Pair = (1.0, 1.0)
    weight_high: Pair = (1.0, 1.0)

    def __post_init__(self) -> None:
        # The Dynamo of torch 2.10 traces no vars(self).
        for name in ("low", "high", "slope_low", "slope_high", "weight_low", "weight_high"):
            check_number_pair(f"clip: {name}", getattr(self, name))
        beyond = (*self.slope_low, *self.slope_high, *self.weight_low, *self.weight_high)
        check(
            all(is_finite(number) for number in beyond),
            "clip: expected slopes and weights beyond the bounds that are finite in float32, got {}",
            beyond,
        )
        for low, high in zip(self.low, self.high, strict=True):
            check(
                0 <= low <= 1 <= high,
                "clip: expected ratio bounds with 0 <= low <= 1 <= high, got low {} and high {}; "
                "bounds are ratios (1 - epsilon, 1 + epsilon), not epsilons",
                low,
                high,
            )


@dataclass(frozen=True, repr=False)
class LogClip(Short):
    """``g(u) = clamp(u, low, high)`` like :class:`Clip`, with bounds on the log-ratio, for residuals of a hierarchy."""

    low: Pair = (-math.inf, -math.inf)
    high: Pair = (math.inf, math.inf)

    def __post_init__(self) -> None:
        check_number_pair("log_clip: low", self.low)
        check_number_pair("log_clip: high", self.high)
        for low, high in zip(self.low, self.high, strict=True):
            check(
                low <= 0 <= high,
                "log_clip: expected log-ratios with low <= 0 <= high, got low {} and high {}",
                low,
                high,
            )


@dataclass(frozen=True, repr=False)
class Rollback(Short):
    """FiberPO's budget: ``u`` up to ``|u| = C``, then back to 0 with slope ``-slope``, then 0 (arXiv 2604.03044).

    Args:
        budgets: C in log space, for the channels of positive and of negative log-ratios; without a split the first.
        slope: how steeply the gate rolls back. None: the number of the segment's tokens, as in the paper, which
            multiplies the gradient by that number in a zone ``C / n`` wide (under ``Aggregate.BALANCED`` the number of
            segments it is the mean of); 0: a hard clip at C; inf: 0 beyond C.
        most: with ``slope`` None, the slope is at most this: ``min(n, most)``.
    """

    budgets: tuple[float, float]
    slope: float | None = None
    most: float = math.inf

    def __post_init__(self) -> None:
        check_number_pair(
            "budgets", self.budgets, "of numbers (log-ratio >= 0, log-ratio < 0; the first without a split)"
        )
        for budget in self.budgets:
            check(
                budget >= 0 and is_finite(budget),
                "budgets: expected log-ratios >= 0 that are finite in float32, got {}",
                self.budgets,
            )
        if self.slope is not None:
            check_number("slope", self.slope)
        check_number("most", self.most)
        check(self.slope is None or self.slope >= 0, "slope: expected a number >= 0 or None, got {}", self.slope)
        check(self.most > 0, "most: expected a number > 0, got {}", self.most)
        check(self.slope is None or self.most == math.inf, "most: bounds the number of tokens; drop slope= or most=")


@dataclass(frozen=True, repr=False)
class Tanh(Short):
    """``g(u) = C tanh(u / C)``: a smooth bound, ``|g| < C``; C > 0 in log space."""

    bound: float

    def __post_init__(self) -> None:
        check_number("bound", self.bound)
        check(
            self.bound > 0 and is_finite(self.bound),
            "bound: expected a log-ratio > 0 that is finite in float32, got {}",
            self.bound,
        )


@dataclass(frozen=True, repr=False)
class Gamma(Short):
    """``g(u) = lam + k u - lam e^u``: e^g is a gamma density in the ratio, 1 at u = 0. For score heads: g'(0) is not 1.

    ``k`` and ``lam`` are pairs, for advantage >= 0 and < 0.
    """

    k: Pair
    lam: Pair

    def __post_init__(self) -> None:
        check_number_pair("gamma: k", self.k)
        check_number_pair("gamma: lam", self.lam)
        for number in (*self.k, *self.lam):
            check(
                number >= 0 and is_finite(number),
                "gamma: expected numbers >= 0 that are finite in float32, got k {} and lam {}",
                self.k,
                self.lam,
            )


@dataclass(frozen=True, repr=False)
class Excess(Short):
    """``g(u) = -max(u - n budget, 0)``, n the segment's number of tokens: how far a sum is above its budget. For the
    censored head, whose levels add up ``|r - 1|``.
    """

    budget: float

    def __post_init__(self) -> None:
        check_number("budget", self.budget)
        check(
            self.budget >= 0 and is_finite(self.budget),
            "budget: expected a number >= 0 that is finite in float32, got {}",
            self.budget,
        )


OF_LEVELS = (Rollback, Tanh, Gamma, Excess)  # gates that tokens do not have


@dataclass(frozen=True, repr=False)
class Level(Short):
    """A gate on the aggregate log-ratio of each segment of one kind, and how that aggregate carries gradient.

    The aggregate of the n valid tokens of a segment, with a split of each channel:

    * ``MEAN``: ``a = sum x / n``; ``SUM``: ``a = sum x``.
    * ``LOG_MEAN_EXP``: ``a = log(sum e^x / n)``, the logarithm of the mean ratio; ``da/dx_j = e^{x_j - a} / n``. In it
      x saturates at +-7.5, with its derivative kept. All levels of a gate have it or none, ``BALANCED`` ones apart.
    * ``BALANCED``: the mean of the aggregates of the next finer level's segments, as far as they have tokens: each
      counts once, however long it is. A rollback then counts children where it counts tokens elsewhere.
    """

    gate: Identity | Clip | LogClip | Rollback | Tanh | Gamma | Excess
    routing: Routing = Routing.THROUGH
    unit: Unit = Unit.TRAJECTORY
    aggregate: Aggregate = Aggregate.MEAN

    def __post_init__(self) -> None:
        kinds = (Identity, Clip, LogClip, *OF_LEVELS)
        require_type(isinstance(self.gate, kinds), "gate: expected {}, got {!r}", names_of(kinds), self.gate)
        check_member("routing", self.routing, Routing)
        check_member("unit", self.unit, Unit)
        check_member("aggregate", self.aggregate, Aggregate)
        check_bounds_alone("gate", self.gate)


@dataclass(frozen=True, repr=False)
class Correction(Short):
    """A factor on tokens, 0 or an importance weight, that is a constant of the differentiation.

    ``v`` is the ``statistic`` of the token, or its ``reduction`` over the valid tokens of the token's segment. A MASK
    is 1 for ``low <= v <= high`` and else 0; a BAND is ``e^v`` there and else 0; a CLAMP is ``e^v`` of v within its
    bounds. Several corrections multiply. Denominators stay those of ``weights``.

    Args:
        low, high: pairs, for advantage >= 0 and < 0, in units of v: log-ratios are not ratios.
        unit: whose segments; None: the token itself. The factor of a token in none of them, as between steps, is 1.
        channel: between which policies. The discrepancy needs ``rollout_logp``; in the total ``old_logp`` stands for it
            where it is missing.
        statistic: ``PROBABILITY`` and ``BINARY_KL`` have the sign of the difference, so a bound of their size is two
            bounds, and their mean over a segment is not that of absolute values.
        strict: a statistic on a bound is outside.
    """

    action: Action
    low: Pair = (-math.inf, -math.inf)
    high: Pair = (math.inf, math.inf)
    unit: Unit | None = None
    reduction: Reduction = Reduction.MEAN
    channel: Channel = Channel.DISCREPANCY
    statistic: Statistic = Statistic.LOG_RATIO
    strict: bool = False
    if TYPE_CHECKING:  # see RatioGate
        _spec: CorrectionSpec = field(init=False)

    def __post_init__(self) -> None:
        check_member("action", self.action, Action)
        check_member("unit", self.unit, Unit, or_none=True)
        check_member("reduction", self.reduction, Reduction)
        check_member("channel", self.channel, Channel)
        check_member("statistic", self.statistic, Statistic)
        check_flag("strict", self.strict)
        check_number_pair("correction: low", self.low)
        check_number_pair("correction: high", self.high)
        for low, high in zip(self.low, self.high, strict=True):
            check(low <= high, "correction: expected low <= high, got low {} and high {}", low, high)
            check(
                self.statistic is not Statistic.LOG_RATIO or not 0 < low < 1 < high < math.inf,
                "correction: expected bounds of log-ratios, got low {} and high {}, which look like ratios and leave "
                "out where policies agree; pass math.log of them",
                low,
                high,
            )
        check(
            self.action is Action.MASK or self.statistic is Statistic.LOG_RATIO,
            "statistic: only a log-ratio has a weight e^v; use Action.MASK with {}",
            self.statistic.name,
        )
        spec = CorrectionSpec(
            self.statistic, self.reduction, self.action, self.unit is not None, self.strict, self.low, self.high
        )
        object.__setattr__(self, "_spec", in_floats(spec))

    def spec(self) -> CorrectionSpec:
        """The correction as kernels take it."""
        return self._spec


def level_spec(level: Level) -> LevelSpec:
    gate = level.gate
    spec = LevelSpec(level.unit, LevelKind.IDENTITY, level.routing, level.aggregate)
    if isinstance(gate, (Clip, LogClip)):
        low, high = log_bounds(gate)
        return spec._replace(gate=LevelKind.CLIP, low=low * 2, high=high * 2)
    if isinstance(gate, Rollback):
        positive, negative = gate.budgets
        slope = -float(gate.most) if gate.slope is None else float(gate.slope)
        return spec._replace(gate=LevelKind.ROLLBACK, high=(positive, positive, negative, negative), slope=slope)
    if isinstance(gate, Tanh):
        return spec._replace(gate=LevelKind.TANH, high=(gate.bound,) * 4)
    if isinstance(gate, Gamma):
        return spec._replace(gate=LevelKind.GAMMA, low=gate.k * 2, high=gate.lam * 2)
    if isinstance(gate, Excess):
        return spec._replace(gate=LevelKind.EXCESS, high=(gate.budget,) * 4)
    return spec


def log_bounds(gate: object) -> tuple[Pair, Pair]:
    if isinstance(gate, Clip):
        return _log(gate.low), _log(gate.high)
    return (gate.low, gate.high) if isinstance(gate, LogClip) else (LogClip().low, LogClip().high)


def has_dual(clip: Clip) -> bool:
    """Whether the upper bound for A < 0 is a dual clip, which per-token bounds leave alone: the clip is not the same
    for both signs, and nothing bounds A >= 0 from below."""
    return clip.low[0] == 0 and (clip.low[0], clip.high[0]) != (clip.low[1], clip.high[1])


def _log(bounds: Pair) -> Pair:
    low, high = (math.log(bound) if bound > 0 else -math.inf for bound in bounds)
    return low, high
