"""RatioGate: how importance ratios become a loss, as data. A published method is one value of it.

The unified operator is ``z_t = sum_k g_k(a_k - a_{k+1})`` over nested levels token < step < trajectory < group <
domain: a gate ``g`` on each level's residual log-ratio, a routing of the gradient through each level's aggregate, and a
head that turns z into the objective.
"""

from __future__ import annotations

import enum
import itertools
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import NamedTuple

import torch

from ..checks import check, check_numbers, require_type
from ..kl import KLPenalty
from ..specs import (
    Action,
    Aggregate,
    CorrectionSpec,
    Head,
    LevelKind,
    LevelSpec,
    Penalty,
    PolicyLossSpec,
    Provenance,
    Reduction,
    Routing,
    Statistic,
    TermSpec,
    TokenGate,
    Unit,
)

__all__ = [
    "Channel",
    "Clip",
    "Correction",
    "Drop",
    "Excess",
    "FirstOrder",
    "Gamma",
    "GateInputs",
    "Identity",
    "Level",
    "LogClip",
    "Provenance",
    "RatioGate",
    "Rollback",
    "Tanh",
]

Pair = tuple[float, float]  # (advantage >= 0, advantage < 0)


class GateInputs(NamedTuple):
    """What some gates read beside the batch, made by the functions of :mod:`hpo_core.gates` that end in ``_bounds``,
    ``_mask``, ``_target`` and ``_weight``, or by the caller. All are constants of the differentiation.

    Attributes:
        bounds: ``(low, high)``, each ``[T]`` or None: ratios per token, in place of the gate's bounds where it has
            them, for both signs of A. A dual clip (what bounds ``A < 0`` above and not ``A >= 0`` below) stays. A token
            for which ``0 <= low <= 1 <= high`` does not hold, as of epsilons or NaN, is left out and counted
            (``bad_advantages``).
        target: one for each advantage, at their level: what the heads TARGET and NEGATIVE_AWARE compare the ratio with.
        token_mask: bool ``[T]``: the tokens that the method keeps, besides those that the loss is told to keep.
        penalty_mask: bool ``[T]``: the tokens that pay the gate's own penalty. None: every valid token.
        aggregates: by level (``"step"``, ``"trajectory"``, ``"group"``, ``"domain"``), what replaces the
            aggregates of this call's tokens, for a level routed STOPPED whose segments other micro-batches have, too:
            float ``[G]``, entry i the log-ratio (a mean or sum, as the level says) of the segment with id i; with a
            split ``[2, G]``, of x+ and x-. An id without an entry, or with NaN, keeps its own.
        token_weight: float ``[T]``: the method's factor on the policy term, beside that which the loss is told.

    >>> GateInputs(bounds=(None, torch.tensor([1.2, 1.4]))).bounds[1]
    tensor([1.2000, 1.4000])
    """

    bounds: tuple[torch.Tensor | None, torch.Tensor | None] | None = None
    target: torch.Tensor | None = None
    token_mask: torch.Tensor | None = None
    penalty_mask: torch.Tensor | None = None
    aggregates: Mapping[str, torch.Tensor] | None = None
    token_weight: torch.Tensor | None = None

    def on_tokens(self, change: Callable[[torch.Tensor], torch.Tensor], per_token: bool) -> GateInputs:
        """With ``change`` applied to each ``[T]`` tensor; ``per_token``: ``target`` is one."""

        def changed(values: torch.Tensor | None) -> torch.Tensor | None:
            return None if values is None else change(values)

        return self._replace(
            bounds=None if self.bounds is None else (changed(self.bounds[0]), changed(self.bounds[1])),
            target=changed(self.target) if per_token else self.target,
            token_mask=changed(self.token_mask),
            penalty_mask=changed(self.penalty_mask),
            token_weight=changed(self.token_weight),
        )


class FirstOrder(enum.Enum):
    """The gradient at ``logp == old_logp``."""

    EXACT = "-w A at every token, to the bit"
    SEGMENT_MEAN = "the mean of -w A over the token's segment of the finest level"
    SEGMENT_SUM = "the sum of -w A over the token's segment of the finest level"
    SCALED = "-w A times a factor that depends on the sign of A"


class Channel(enum.Enum):
    """Between which two policies a log-ratio is taken: ``logp`` now, ``old_logp`` at the start of the optimiser step as
    the trainer computes it, ``rollout_logp`` as the sampler did."""

    STALENESS = "logp - old_logp"
    DISCREPANCY = "old_logp - rollout_logp"
    TOTAL = "logp - rollout_logp"


def _check_pair(name: str, pair: object) -> None:
    is_pair = isinstance(pair, tuple) and len(pair) == 2
    require_type(is_pair, "{}: expected a pair (advantage >= 0, advantage < 0) of numbers, got {!r}", name, pair)
    check_numbers(name, pair)


def _names_of(kinds: tuple[type, ...]) -> str:
    return ", ".join(f"{kind.__name__}()" for kind in kinds[:-1]) + f" or {kinds[-1].__name__}()"


class _Short:
    """Its ``repr`` says what differs from the defaults, on one line."""

    def __repr__(self) -> str:
        said = []
        for each in fields(self):  # type: ignore[arg-type]
            value = getattr(self, each.name)
            if each.repr and (each.default is MISSING or value != each.default):
                text = f"{type(value).__name__}.{value.name}" if isinstance(value, enum.Enum) else repr(value)
                said.append(text if each.default is MISSING else f"{each.name}={text}")
        return f"{type(self).__name__}({', '.join(said)})"


@dataclass(frozen=True)
class Identity:
    """``g(u) = u``."""


@dataclass(frozen=True)
class Drop:
    """``g(u) = 0``: the residual does not count."""


@dataclass(frozen=True, repr=False)
class Clip(_Short):
    """``g(u) = clamp(u, log low, log high)``, derivative 1 inside and at the bounds, 0 outside.

    ``low`` and ``high`` are pairs of *ratio* bounds, for advantage >= 0 and < 0; 0 and inf mean "no bound". A one-sided
    pair ``low=(0, 1 - e), high=(1 + e, inf)`` is PPO's pessimistic minimum.

    On tokens, what lies beyond a bound may have a slope (``slope_low``, ``slope_high``: the derivative there, 0 by
    default; 1 keeps the gradient at the bound's value) and a factor on its objective (``weight_low``, ``weight_high``).
    """

    low: Pair = (0.0, 0.0)
    high: Pair = (math.inf, math.inf)
    slope_low: Pair = (0.0, 0.0)
    slope_high: Pair = (0.0, 0.0)
    weight_low: Pair = (1.0, 1.0)
    weight_high: Pair = (1.0, 1.0)

    def __post_init__(self) -> None:
        for name, pair in vars(self).items():
            _check_pair(f"clip: {name}", pair)
        beyond = (*self.slope_low, *self.slope_high, *self.weight_low, *self.weight_high)
        check(
            all(math.isfinite(number) for number in beyond),
            "clip: expected finite slopes and weights beyond the bounds, got {}",
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
class LogClip(_Short):
    """``g(u) = clamp(u, low, high)`` like :class:`Clip`, with bounds on the log-ratio, for residuals of a hierarchy."""

    low: Pair = (-math.inf, -math.inf)
    high: Pair = (math.inf, math.inf)

    def __post_init__(self) -> None:
        for name, pair in vars(self).items():
            _check_pair(f"log_clip: {name}", pair)
        for low, high in zip(self.low, self.high, strict=True):
            check(
                low <= 0 <= high,
                "log_clip: expected log-ratios with low <= 0 <= high, got low {} and high {}",
                low,
                high,
            )


@dataclass(frozen=True, repr=False)
class Rollback(_Short):
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
        _check_pair("budgets", self.budgets)
        for budget in self.budgets:
            check(0 <= budget < math.inf, "budgets: expected finite log-ratios >= 0, got {}", self.budgets)
        check(self.slope is None or self.slope >= 0, "slope: expected a number >= 0 or None, got {}", self.slope)
        check(self.most > 0, "most: expected a number > 0, got {}", self.most)
        check(self.slope is None or self.most == math.inf, "most: bounds the number of tokens; drop slope= or most=")


@dataclass(frozen=True, repr=False)
class Tanh(_Short):
    """``g(u) = C tanh(u / C)``: a smooth bound, ``|g| < C``; C > 0 in log space."""

    bound: float

    def __post_init__(self) -> None:
        check_numbers("bound", self.bound)
        check(0 < self.bound < math.inf, "bound: expected a finite log-ratio > 0, got {}", self.bound)


@dataclass(frozen=True, repr=False)
class Gamma(_Short):
    """``g(u) = lam + k u - lam e^u``: e^g is a gamma density in the ratio, 1 at u = 0. For score heads: g'(0) is not 1.

    ``k`` and ``lam`` are pairs, for advantage >= 0 and < 0.
    """

    k: Pair
    lam: Pair

    def __post_init__(self) -> None:
        for name, pair in vars(self).items():
            _check_pair(f"gamma: {name}", pair)
        for number in (*self.k, *self.lam):
            check(0 <= number < math.inf, "gamma: expected finite numbers >= 0, got k {} and lam {}", self.k, self.lam)


@dataclass(frozen=True, repr=False)
class Excess(_Short):
    """``g(u) = -max(u - n budget, 0)``, n the segment's number of tokens: how far a sum is above its budget. For the
    censored head, whose levels add up ``|r - 1|``.
    """

    budget: float

    def __post_init__(self) -> None:
        check_numbers("budget", self.budget)
        check(0 <= self.budget < math.inf, "budget: expected a finite number >= 0, got {}", self.budget)


@dataclass(frozen=True, repr=False)
class Level(_Short):
    """A gate on the aggregate log-ratio of each segment of one kind, and how that aggregate carries gradient.

    The aggregate of the n valid tokens of a segment, with a split of each channel:

    * ``MEAN``: ``a = sum x / n``; ``SUM``: ``a = sum x``.
    * ``LOG_MEAN_EXP``: ``a = log(sum e^x / n)``, the logarithm of the mean ratio; ``da/dx_j = e^{x_j - a} / n``. In it
      x saturates at +-7.5, with its derivative kept. All levels of a gate have it or none, ``BALANCED`` ones apart.
    * ``BALANCED``: the mean of the aggregates of the next finer level's segments, as far as they have tokens: each
      counts once, however long it is. What a rollback takes for the number of tokens is then how many they are.
    """

    gate: Identity | Clip | LogClip | Rollback | Tanh | Gamma | Excess
    routing: Routing = Routing.THROUGH
    unit: Unit = Unit.TRAJECTORY
    aggregate: Aggregate = Aggregate.MEAN

    def __post_init__(self) -> None:
        kinds = (Identity, Clip, LogClip, Rollback, Tanh, Gamma, Excess)
        require_type(isinstance(self.gate, kinds), "gate: expected {}, got {!r}", _names_of(kinds), self.gate)
        require_type(isinstance(self.unit, Unit), "unit: expected one of Unit, got {!r}", self.unit)
        check(
            not isinstance(self.gate, Clip) or self.gate == Clip(self.gate.low, self.gate.high),
            "gate: slopes and weights beyond the bounds are for the clip of tokens, got {!r} on a level",
            self.gate,
        )


@dataclass(frozen=True, repr=False)
class Correction(_Short):
    """A factor on tokens, 0 or an importance weight, that is a constant of the differentiation.

    ``v`` is the ``statistic`` of the token, or its ``reduction`` over the valid tokens of the token's segment. A MASK
    is 1 for ``low <= v <= high`` and else 0; a BAND is ``e^v`` there and else 0; a CLAMP is ``e^v`` of v within its
    bounds. Several corrections multiply. Denominators stay those of ``weights``.

    Args:
        low, high: pairs, for advantage >= 0 and < 0, in units of v: log-ratios are not ratios.
        unit: whose segments; None: the token itself.
        channel: between which policies; without ``rollout_logp`` the sampler's are taken to be ``old_logp``.
        strict: what lies on a bound is outside.
    """

    action: Action
    low: Pair = (-math.inf, -math.inf)
    high: Pair = (math.inf, math.inf)
    unit: Unit | None = None
    reduction: Reduction = Reduction.MEAN
    channel: Channel = Channel.DISCREPANCY
    statistic: Statistic = Statistic.LOG_RATIO
    strict: bool = False

    def __post_init__(self) -> None:
        _check_pair("correction: low", self.low)
        _check_pair("correction: high", self.high)
        for low, high in zip(self.low, self.high, strict=True):
            check(low <= high, "correction: expected low <= high, got low {} and high {}", low, high)
        check(
            self.action is Action.MASK or self.statistic is Statistic.LOG_RATIO,
            "statistic: only a log-ratio has a weight e^v; use Action.MASK with {}",
            self.statistic.name,
        )

    def spec(self) -> CorrectionSpec:
        """As kernels take it."""
        return CorrectionSpec(
            self.statistic, self.reduction, self.action, self.unit is not None, self.strict, self.low, self.high
        )


@dataclass(frozen=True, repr=False)
class RatioGate(_Short):
    """One ratio-gating method: frozen, hashable, picklable.

    ``z_t = g_0(x_t - a_1) + g_1(a_1 - a_2) + ... + g_K(a_K)``: x is the token's log-ratio, ``a_k`` the aggregate of x
    over its segment at level k. With ``split``, x+ = max(x, 0) and x- = max(-x, 0) are two channels with aggregates of
    their own, and z is the difference of their sums. Identity gates everywhere give ``z = x``, whatever the levels.

    Args:
        name: of the constructor that made it.
        token: the gate on the token's log-ratio, or on its residual ``x - a_1`` below a level.
        levels: from the finest to the coarsest.
        head: from z to the objective: ``Head.LINEAR`` (``A e^z``), ``Head.SCORE`` (``A sg[e^z] logp``) or another.
        split: whether the sign of the log-ratio separates two channels.
        head_numbers: the number p of the head, for advantage >= 0 and < 0.
        pre: a clip of the log-ratio before it is aggregated.
        channel: which log-ratio x is; with ``Channel.TOTAL`` the sampler's ``rollout_logp`` takes the place of
            ``old_logp``.
        corrections: masks and weights that are constants of the differentiation.
        advantage_weights: factors on advantages >= 0 and < 0.
        penalty, penalty_coefficient: on x, whatever the gates do: added to the loss of every valid token.
        needs: the inputs without which the gate is another method: pairs of a field of :class:`GateInputs` and the call
            that makes it. With those that the head needs they are ``required``, a mapping.
        source, provenance: where the formula comes from.
    """

    name: str
    token: Identity | Drop | Clip | LogClip
    levels: tuple[Level, ...] = ()
    head: Head = Head.LINEAR
    split: bool = False
    head_numbers: Pair = (0.0, 0.0)
    pre: Clip | LogClip | None = None
    channel: Channel = Channel.STALENESS
    corrections: tuple[Correction, ...] = ()
    advantage_weights: Pair = (1.0, 1.0)
    penalty: Penalty = Penalty.NONE
    penalty_coefficient: float = 0.0
    needs: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    source: str = field(default="", repr=False)
    provenance: Provenance = field(default=Provenance.VERIFIED, repr=False)
    # Made once: every loss call asks for them.
    _spec: PolicyLossSpec = field(init=False, repr=False, compare=False)
    _facts: tuple[bool, bool, bool] = field(init=False, repr=False, compare=False)
    required: Mapping[str, str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        kinds = (Identity, Drop, Clip, LogClip)
        require_type(isinstance(self.token, kinds), "token: expected {}, got {!r}", _names_of(kinds), self.token)
        require_type(isinstance(self.head, Head), "head: expected one of Head, got {!r}", self.head)
        require_type(
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
            not self.levels or self.levels[0].aggregate is not Aggregate.BALANCED,
            "levels: Aggregate.BALANCED is the mean of the aggregates of the next finer level, and below the finest "
            "({}) are tokens; take Aggregate.MEAN there",
            self.levels[0].unit.name.lower() if self.levels else "",
        )
        aggregates = {level.aggregate for level in self.levels} - {Aggregate.BALANCED}
        check(
            Aggregate.LOG_MEAN_EXP not in aggregates or len(aggregates) == 1,
            "levels: segments add up e^x or x, one of them for all levels: give all of them Aggregate.LOG_MEAN_EXP or "
            "none, got {}",
            ", ".join(level.aggregate.name for level in self.levels),
        )
        check(
            Aggregate.LOG_MEAN_EXP not in aggregates or self.pre is None,
            "pre: a clip of x takes the place of what is aggregated, and so does e^x under Aggregate.LOG_MEAN_EXP; "
            "drop pre= or take Aggregate.MEAN",
        )
        check(
            self.head is Head.SCORE or not any(isinstance(level.gate, Gamma) for level in self.levels),
            "levels: Gamma does not agree with the ratio to first order, so it is a weight; use Head.SCORE",
        )
        check(
            self._adds_up_deviations()
            or not (self.head is Head.CENSORED or any(isinstance(level.gate, Excess) for level in self.levels)),
            "head: Head.CENSORED goes with one level, Level(Excess(...), aggregate=Aggregate.SUM), over Drop(), and "
            "Excess with no other head; Routing.SELF, split= and pre= with neither; got Head.{} and levels {}",
            self.head.name,
            self.levels,
        )
        beyond = self.token if isinstance(self.token, Clip) else Clip()
        check(
            not self.split or beyond.slope_low == beyond.slope_high == (0.0, 0.0),
            "token: beyond its bounds a clip of two channels has no slope; drop split= or the slopes",
        )
        check(
            not self.levels or beyond.weight_low == beyond.weight_high == (1.0, 1.0),
            "token: weights beyond its bounds are for a token's own ratio; drop the levels or the weights",
        )
        check(self.channel is not Channel.DISCREPANCY, "channel: it has no gradient; take Channel.STALENESS or TOTAL")
        check(
            self.head not in _LEAST or all(map(operator.ge, self.head_numbers, _LEAST[self.head])),
            "head_numbers: expected at least {} for A >= 0 and A < 0 with Head.{}, got {}",
            _LEAST.get(self.head),
            self.head.name,
            self.head_numbers,
        )
        check(
            all(0 <= number < math.inf for number in (*self.head_numbers, self.penalty_coefficient)),
            "head_numbers, penalty_coefficient: expected finite numbers >= 0, got {} and {}",
            self.head_numbers,
            self.penalty_coefficient,
        )
        check(
            all(math.isfinite(number) for number in self.advantage_weights),
            "advantage_weights: expected finite numbers, got {}",
            self.advantage_weights,
        )
        check(
            self.head in _OWN_GRADIENT
            or not isinstance(self.token, Drop)
            or (bool(self.levels) and self.levels[0].routing is not Routing.STOPPED),
            "token: Drop() under the linear head has no gradient unless the finest level carries it; use Head.SCORE",
        )
        require_type(
            isinstance(self.corrections, tuple) and all(isinstance(each, Correction) for each in self.corrections),
            "corrections: expected a tuple of Correction, got {!r}",
            self.corrections,
        )
        require_type(
            isinstance(self.needs, tuple)
            and all(isinstance(pair, tuple) and pair[0] in GateInputs._fields for pair in self.needs),
            "needs: expected pairs of a field of GateInputs ({}) and the call that makes it, got {!r}",
            ", ".join(GateInputs._fields),
            self.needs,
        )
        object.__setattr__(self, "_spec", self._make_spec())
        object.__setattr__(self, "_facts", self._make_facts())
        needed = {"target": "gates.GateInputs(target=...)"} if self.takes_target else {}
        object.__setattr__(self, "required", needed | dict(self.needs))

    @property
    def level(self) -> Level | None:
        """The gate on the mean of the trajectory where that is all there is: one level, its residual dropped."""
        if len(self.levels) != 1 or not isinstance(self.token, Drop) or self.split or self._term() is not None:
            return None
        (level,) = self.levels
        simple = isinstance(level.gate, (Identity, Clip)) and level.aggregate is Aggregate.MEAN
        return level if simple and level.unit is Unit.TRAJECTORY else None

    @property
    def of_steps(self) -> bool:
        """Whether steps are a level: tokens outside every step are then masked."""
        return bool(self.levels) and self.levels[0].unit is Unit.STEP

    @property
    def first_order(self) -> FirstOrder:
        """Which promise the on-policy gradient of the policy term keeps, where no correction takes the token out; under
        Head.TARGET where the target lies on A's side of 1."""
        if self.head is Head.NEGATIVE_AWARE or self.advantage_weights != (1.0, 1.0):
            return FirstOrder.SCALED
        if self.head in _OWN_GRADIENT or not isinstance(self.token, Drop) or self.levels[0].routing is Routing.SELF:
            return FirstOrder.EXACT
        return FirstOrder.SEGMENT_SUM if self.levels[0].aggregate is Aggregate.SUM else FirstOrder.SEGMENT_MEAN

    @property
    def takes_bounds(self) -> bool:
        """Whether per-token ``bounds`` can replace this gate's."""
        return isinstance(self.token, Clip)

    def spec(self, kl: KLPenalty | None = None, strict: bool = False) -> PolicyLossSpec:
        """The gate, a KL penalty and the window's comparison, as kernels take them."""
        if kl is None:
            return self._spec._replace(strict=True) if strict else self._spec
        return self._spec._replace(kl=kl.estimator, kl_gradient=kl.gradient, kl_beta=kl.beta, strict=strict)

    def _make_spec(self) -> PolicyLossSpec:
        clip = self.token if isinstance(self.token, Clip) else Clip()
        kinds = {
            Identity: TokenGate.IDENTITY, Drop: TokenGate.DROP, Clip: TokenGate.CLIP, LogClip: TokenGate.CLIP
        }  # fmt: skip
        spec = PolicyLossSpec(
            token=kinds[type(self.token)],
            token_low=clip.low,
            token_high=clip.high,
            low_driven=(clip.low[0] > 0, clip.low[1] > 0),
            high_driven=(clip.high[0] < math.inf, clip.high[1] < math.inf and not _has_dual(clip)),
            head=self.head,
            term=self._term(),
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

    @property
    def reads_rollout(self) -> bool:
        """Whether the loss can make use of ``rollout_logp``."""
        return self._facts[0]

    @property
    def needs_rollout(self) -> bool:
        """Whether the gate does nothing of its own without ``rollout_logp``: it corrects what sampler and trainer
        differ by."""
        return any(correction.channel is Channel.DISCREPANCY for correction in self.corrections)

    @property
    def has_fast_path(self) -> bool:
        """Whether nothing has to be prepared for kernels but what every gate takes."""
        return self._facts[1]

    @property
    def takes_target(self) -> bool:
        """Whether the loss needs ``target``."""
        return self._facts[2]

    def _make_facts(self) -> tuple[bool, bool, bool]:
        channels = {self.channel, *(correction.channel for correction in self.corrections)}
        unweighted = self.channel is Channel.STALENESS and self.advantage_weights == (1.0, 1.0)
        fast_path = self._spec.term is None and unweighted and not self.corrections and not self.needs
        return channels != {Channel.STALENESS}, fast_path, self.head in (Head.TARGET, Head.NEGATIVE_AWARE)

    def _adds_up_deviations(self) -> bool:
        """Whether all is as the censored head needs it."""
        if self.head is not Head.CENSORED or len(self.levels) != 1:
            return False
        (level,) = self.levels
        sums = isinstance(level.gate, Excess) and level.aggregate is Aggregate.SUM
        alone = isinstance(self.token, Drop) and self.pre is None and not self.split
        return sums and alone and level.routing is not Routing.SELF

    def _term(self) -> TermSpec | None:
        clip = self.token if isinstance(self.token, Clip) else Clip()
        pre_low, pre_high = _log_bounds(self.pre)
        term = TermSpec(
            self.head_numbers, clip.slope_low, clip.slope_high, clip.weight_low, clip.weight_high, pre_low, pre_high,
            self.penalty, self.penalty_coefficient,
        )  # fmt: skip
        mean_exp = any(level.aggregate is Aggregate.LOG_MEAN_EXP for level in self.levels)
        return None if term == TermSpec() and self.head in (Head.LINEAR, Head.SCORE) and not mean_exp else term


_OWN_GRADIENT = (Head.SCORE, Head.LOG, Head.CENSORED)  # past z, so that the token's own log-ratio may be dropped
# What head numbers divide overflows below; and on-policy the factor that FLIPPED bounds is 1.
_LEAST = {
    Head.SIGMOID: (1e-4, 1e-4),
    Head.SIMPLE: (1e-4, 1e-4),
    Head.NEGATIVE_AWARE: (0.0, 1e-4),
    Head.FLIPPED: (1.0, 1.0),
}


def _level_spec(level: Level) -> LevelSpec:
    gate = level.gate
    spec = LevelSpec(level.unit, LevelKind.IDENTITY, level.routing, level.aggregate)
    if isinstance(gate, (Clip, LogClip)):
        low, high = _log_bounds(gate)
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


def _log_bounds(gate: object) -> tuple[Pair, Pair]:
    if isinstance(gate, Clip):
        return _log(gate.low), _log(gate.high)
    return (gate.low, gate.high) if isinstance(gate, LogClip) else (LogClip().low, LogClip().high)


def _has_dual(clip: Clip) -> bool:
    """Whether the upper bound for A < 0 is a dual clip, which per-token bounds leave alone: the clip is not the same
    for both signs, and nothing bounds A >= 0 from below."""
    return clip.low[0] == 0 and (clip.low[0], clip.high[0]) != (clip.low[1], clip.high[1])


def _log(bounds: Pair) -> Pair:
    low, high = (math.log(bound) if bound > 0 else -math.inf for bound in bounds)
    return low, high
