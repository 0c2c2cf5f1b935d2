"""RatioGate: how importance ratios become a loss, as data. A published method is one value of it.

The unified operator is ``z_t = sum_k g_k(a_k - a_{k+1})`` over nested levels token < step < trajectory < group <
domain: a gate ``g`` on each level's residual log-ratio, a routing of the gradient through each level's aggregate, and a
head that turns z into the objective.
"""

from __future__ import annotations

import enum
import itertools
import math
from dataclasses import dataclass

from ..checks import check, check_type
from ..kl import KLPenalty
from ..specs import Aggregate, Head, LevelKind, LevelSpec, PolicyLossSpec, Routing, TokenGate, Unit

__all__ = [
    "Clip",
    "Drop",
    "FirstOrder",
    "Identity",
    "Level",
    "LogClip",
    "Provenance",
    "RatioGate",
    "Rollback",
    "Tanh",
]

Pair = tuple[float, float]  # (advantage >= 0, advantage < 0)


class Provenance(enum.Enum):
    """Where a preset's formula comes from."""

    VERIFIED = "official code run, or the paper's equations and independent numbers"
    PAPER = "the paper's equations"
    RECONSTRUCTED = "reconstructed from partial sources"


class FirstOrder(enum.Enum):
    """The gradient at ``logp == old_logp``."""

    EXACT = "-w A at every token, to the bit"
    SEGMENT_MEAN = "the mean of -w A over the token's segment of the finest level"
    SEGMENT_SUM = "the sum of -w A over the token's segment of the finest level"


@dataclass(frozen=True)
class Identity:
    """``g(u) = u``."""


@dataclass(frozen=True)
class Drop:
    """``g(u) = 0``: the residual does not count."""


@dataclass(frozen=True)
class Clip:
    """``g(u) = clamp(u, log low, log high)``, derivative 1 inside and at the bounds, 0 outside.

    ``low`` and ``high`` are pairs of *ratio* bounds, for advantage >= 0 and < 0; 0 and inf mean "no bound". A one-sided
    pair ``low=(0, 1 - e), high=(1 + e, inf)`` is PPO's pessimistic minimum.
    """

    low: Pair = (0.0, 0.0)
    high: Pair = (math.inf, math.inf)

    def __post_init__(self) -> None:
        for low, high in zip(self.low, self.high, strict=True):
            check(
                0 <= low <= 1 <= high,
                "clip: expected ratio bounds with 0 <= low <= 1 <= high, got low {} and high {}; "
                "bounds are ratios (1 - epsilon, 1 + epsilon), not epsilons",
                low,
                high,
            )


@dataclass(frozen=True)
class LogClip:
    """``g(u) = clamp(u, low, high)`` like :class:`Clip`, with bounds on the log-ratio, for residuals of a hierarchy."""

    low: Pair = (-math.inf, -math.inf)
    high: Pair = (math.inf, math.inf)

    def __post_init__(self) -> None:
        for low, high in zip(self.low, self.high, strict=True):
            check(
                low <= 0 <= high,
                "log_clip: expected log-ratios with low <= 0 <= high, got low {} and high {}",
                low,
                high,
            )


@dataclass(frozen=True)
class Rollback:
    """FiberPO's budget: ``u`` up to ``|u| = C``, then back to 0 with slope ``-slope``, then 0 (arXiv 2604.03044).

    Args:
        budgets: C in log space, for the channels of positive and of negative log-ratios; without a split the first.
        slope: how steeply the gate rolls back. None: the number of the segment's tokens, as in the paper, which
            multiplies the gradient by that number in a zone ``C / n`` wide; 0: a hard clip at C; inf: 0 beyond C.
    """

    budgets: tuple[float, float]
    slope: float | None = None

    def __post_init__(self) -> None:
        for budget in self.budgets:
            check(0 <= budget < math.inf, "budgets: expected finite log-ratios >= 0, got {}", self.budgets)
        check(self.slope is None or self.slope >= 0, "slope: expected a number >= 0 or None, got {}", self.slope)


@dataclass(frozen=True)
class Tanh:
    """``g(u) = C tanh(u / C)``: a smooth bound, ``|g| < C``; C > 0 in log space."""

    bound: float

    def __post_init__(self) -> None:
        check(0 < self.bound < math.inf, "bound: expected a finite log-ratio > 0, got {}", self.bound)


@dataclass(frozen=True)
class Level:
    """A gate on the aggregate log-ratio of each segment of one kind, and how that aggregate carries gradient."""

    gate: Identity | Clip | LogClip | Rollback | Tanh
    routing: Routing = Routing.THROUGH
    unit: Unit = Unit.TRAJECTORY
    aggregate: Aggregate = Aggregate.MEAN


@dataclass(frozen=True)
class RatioGate:
    """One ratio-gating method: frozen, hashable, picklable.

    ``z_t = g_0(x_t - a_1) + g_1(a_1 - a_2) + ... + g_K(a_K)``: x is the token's log-ratio, ``a_k`` the aggregate of x
    over its segment at level k. With ``split``, x+ = max(x, 0) and x- = max(-x, 0) are two channels with aggregates of
    their own, and z is the difference of their sums. Identity gates everywhere give ``z = x``, whatever the levels.

    Args:
        name: of the constructor that made it.
        token: the gate on the token's log-ratio, or on its residual ``x - a_1`` below a level.
        levels: from the finest to the coarsest.
        head: ``Head.LINEAR`` (``A e^z``) or ``Head.SCORE`` (``A sg[e^z] logp``).
        split: whether the sign of the log-ratio separates two channels.
        source, provenance: where the formula comes from.
    """

    name: str
    token: Identity | Drop | Clip | LogClip
    levels: tuple[Level, ...] = ()
    head: Head = Head.LINEAR
    split: bool = False
    source: str = ""
    provenance: Provenance = Provenance.VERIFIED

    def __post_init__(self) -> None:
        check_type(
            isinstance(self.levels, tuple) and all(isinstance(level, Level) for level in self.levels),
            "levels: expected a tuple of Level, got {!r}",
            self.levels,
        )
        units = [level.unit for level in self.levels]
        check(
            all(finer < coarser for finer, coarser in itertools.pairwise(units)),
            "levels: expected each once, from the finest to the coarsest (step, trajectory, group, domain), got {}",
            ", ".join(unit.name.lower() for unit in units),
        )
        check(not self.split or bool(self.levels), "split: without a level the channels would never meet; drop it")
        check(
            bool(self.levels) or not isinstance(self.token, LogClip),
            "token: LogClip is for residuals below a level; a token's own ratio takes Clip, whose bounds are ratios",
        )
        check(
            self.head is Head.SCORE
            or not isinstance(self.token, Drop)
            or (bool(self.levels) and self.levels[0].routing is not Routing.STOPPED),
            "token: Drop() under the linear head has no gradient unless the finest level carries it; use Head.SCORE",
        )
        object.__setattr__(self, "_spec", self._make_spec())  # once: every loss call asks for it

    @property
    def level(self) -> Level | None:
        """The gate on the mean of the trajectory where that is all there is: one level, its residual dropped."""
        if len(self.levels) != 1 or not isinstance(self.token, Drop) or self.split:
            return None
        (level,) = self.levels
        simple = isinstance(level.gate, (Identity, Clip)) and level.aggregate is Aggregate.MEAN
        return level if simple and level.unit is Unit.TRAJECTORY else None

    @property
    def first_order(self) -> FirstOrder:
        """Which promise the on-policy gradient keeps."""
        if self.head is Head.SCORE or not isinstance(self.token, Drop) or self.levels[0].routing is Routing.SELF:
            return FirstOrder.EXACT
        return FirstOrder.SEGMENT_SUM if self.levels[0].aggregate is Aggregate.SUM else FirstOrder.SEGMENT_MEAN

    @property
    def takes_bounds(self) -> bool:
        """Whether per-token ``bounds`` can replace this gate's."""
        return isinstance(self.token, Clip)

    def spec(self, kl: KLPenalty | None = None, strict: bool = False) -> PolicyLossSpec:
        """The gate, a KL penalty and the window's comparison, as kernels take them."""
        spec: PolicyLossSpec = self._spec  # type: ignore[attr-defined]
        if kl is None:
            return spec._replace(strict=True) if strict else spec
        return spec._replace(kl=kl.estimator, kl_gradient=kl.gradient, kl_beta=kl.beta, strict=strict)

    def _make_spec(self) -> PolicyLossSpec:
        clip = self.token if isinstance(self.token, Clip) else Clip()
        kinds = {
            Identity: TokenGate.IDENTITY, Drop: TokenGate.DROP, Clip: TokenGate.CLIP, LogClip: TokenGate.CLIP
        }  # fmt: skip
        spec = PolicyLossSpec(
            token=kinds[type(self.token)],
            token_low=clip.low,
            token_high=clip.high,
            low_driven=_driven(clip.low, absent=0.0),
            high_driven=_driven(clip.high, absent=math.inf),
            head=self.head,
        )
        if self.level is None:
            log_low, log_high = _log_bounds(self.token)
            levels = tuple(_level_spec(level) for level in self.levels)
            return spec._replace(levels=levels, split=self.split, token_log_low=log_low, token_log_high=log_high)
        level_clip = self.level.gate if isinstance(self.level.gate, Clip) else Clip()
        return spec._replace(
            has_level=True,
            level_clips=isinstance(self.level.gate, Clip),
            level_log_low=_log(level_clip.low),
            level_log_high=_log(level_clip.high),
            routing=self.level.routing,
        )


def _level_spec(level: Level) -> LevelSpec:
    gate = level.gate
    spec = LevelSpec(level.unit, LevelKind.IDENTITY, level.routing, level.aggregate)
    if isinstance(gate, (Clip, LogClip)):
        low, high = _log_bounds(gate)
        return spec._replace(gate=LevelKind.CLIP, low=low * 2, high=high * 2)
    if isinstance(gate, Rollback):
        positive, negative = gate.budgets
        slope = -1.0 if gate.slope is None else float(gate.slope)
        return spec._replace(gate=LevelKind.ROLLBACK, high=(positive, positive, negative, negative), slope=slope)
    if isinstance(gate, Tanh):
        return spec._replace(gate=LevelKind.TANH, high=(gate.bound,) * 4)
    return spec


def _log_bounds(gate: object) -> tuple[Pair, Pair]:
    if isinstance(gate, Clip):
        return _log(gate.low), _log(gate.high)
    return (gate.low, gate.high) if isinstance(gate, LogClip) else (LogClip().low, LogClip().high)


def _driven(bounds: Pair, absent: float) -> tuple[bool, bool]:
    """Which of a pair a per-token tensor replaces: every bound that exists, except a dual clip's own, different
    bound."""
    exists = (bounds[0] != absent, bounds[1] != absent)
    if all(exists) and bounds[0] != bounds[1]:
        return (True, False) if absent == math.inf else (False, True)
    return exists


def _log(bounds: Pair) -> Pair:
    low, high = (math.log(bound) if bound > 0 else -math.inf for bound in bounds)
    return low, high
