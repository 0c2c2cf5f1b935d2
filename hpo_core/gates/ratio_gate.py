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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..arguments import Short, check_flag, check_member, check_number, is_finite
from ..checks import check, require_type
from ..kl import KLPenalty
from ..specs import Aggregate, Head, Penalty, PolicyLossSpec, Provenance, Routing, TermSpec, TokenGate, Unit, in_floats
from .parts import (
    OF_LEVELS,
    Channel,
    Clip,
    Correction,
    Drop,
    Excess,
    Gamma,
    Identity,
    Level,
    LogClip,
    Pair,
    check_bounds_alone,
    check_number_pair,
    has_dual,
    level_spec,
    log_bounds,
    names_of,
)


class GateInputs(NamedTuple):
    """Inputs of some gates beside the batch, made by the functions of :mod:`hpo_core.gates` that end in ``_bounds``,
    ``_mask``, ``_target`` and ``_weight``, or by the caller. All are constants of the differentiation. It pickles, and
    loads with ``weights_only=True``.

    Attributes:
        bounds: ``(low, high)``, each ``[T]`` or None: ratios per token, in place of the gate's bounds where it has
            them, for both signs of A. A dual clip (an upper bound for ``A < 0`` without a lower one for ``A >= 0``)
            stays. A token for which ``0 <= low <= 1 <= high`` does not hold, as of epsilons or NaN, is left out and
            counted (``bad_advantages``).
        target: one for each advantage, at their level; the heads TARGET and NEGATIVE_AWARE compare the ratio with it.
        token_mask: bool ``[T]``: the tokens that the method keeps. The loss keeps those that its own ``token_mask``
            keeps, too.
        penalty_mask: bool ``[T]``: the tokens that pay the gate's own penalty. None: every valid token.
        aggregates: by level (``"step"``, ``"trajectory"``, ``"group"``, ``"domain"``), the values that replace the
            aggregates of this call's tokens, for a level routed STOPPED whose segments other micro-batches have, too:
            float ``[G]``, entry i the log-ratio (a mean or sum, as the level says) of the segment with id i; with a
            split ``[2, G]``, of x+ and x-. An id without an entry, or with NaN, keeps its own.
        token_weight: float ``[T]``: the method's factor on the policy term, besides the ``token_weight`` of the loss.

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
        """The inputs with ``change`` applied to each ``[T]`` tensor; ``per_token``: ``target`` is one."""

        def changed(values: torch.Tensor | None) -> torch.Tensor | None:
            return None if values is None else change(values)

        return self._replace(
            bounds=None if self.bounds is None else (changed(self.bounds[0]), changed(self.bounds[1])),
            target=changed(self.target) if per_token else self.target,
            token_mask=changed(self.token_mask),
            penalty_mask=changed(self.penalty_mask),
            token_weight=changed(self.token_weight),
        )


torch.serialization.add_safe_globals([GateInputs])


class FirstOrder(enum.Enum):
    """The gradient at ``logp == old_logp``."""

    EXACT = "-w A at every token, to the bit"
    SEGMENT_MEAN = "the mean of -w A over the token's segment of the finest level"
    SEGMENT_SUM = "the sum of -w A over the token's segment of the finest level"
    SCALED = "-w A times a factor that depends on the sign of A"
    TARGET = "w abs(A) towards the target, which is -w A where the target lies on A's side of 1"


@dataclass(frozen=True, repr=False)
class RatioGate(Short):
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
        advantage_weights: factors on advantages >= 0 and < 0. A factor of 0 makes the advantage 0, whose bounds and
            numbers are those of ``A >= 0``.
        penalty, penalty_coefficient: on x, whatever the gates do: added to the loss of every valid token.
        needs: the inputs without which the gate is another method: pairs of a field of :class:`GateInputs` and the call
            that makes it. With those that the head needs they are ``required``, a mapping.
        source, provenance: the origin of a published gate; None: of no source.
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
    needs: tuple[tuple[str, str], ...] = ()
    # Results of a gate do not depend on these, so gates that differ in them alone are equal.
    source: str = field(default="", repr=False, compare=False)
    provenance: Provenance | None = field(default=None, repr=False, compare=False)
    # Made once, because every loss call asks for them. No fields at run time: FSDP1 makes the dataclasses among a
    # module's arguments again, from all their fields.
    if TYPE_CHECKING:
        _spec: PolicyLossSpec = field(init=False)
        _facts: tuple[bool, bool, bool] = field(init=False)
        required: Mapping[str, str] = field(init=False)
        level_units: tuple[Unit, ...] = field(init=False)

    def __post_init__(self) -> None:
        self._check_kinds()
        self._check_levels()
        self._check_head()
        self._check_numbers()
        object.__setattr__(self, "_spec", in_floats(self._make_spec()))
        check(
            self.takes_bounds or all(name != "bounds" for name, _ in self.needs),
            "needs: the token gate has no bounds that those of tokens could replace, got {}; take Clip or LogClip",
            self.needs,
        )
        object.__setattr__(self, "_facts", self._make_facts())
        needed = {"target": "gates.GateInputs(target=...)"} if self.takes_target else {}
        object.__setattr__(self, "required", needed | dict(self.needs))
        object.__setattr__(self, "level_units", tuple(level.unit for level in self.levels))

    def _check_kinds(self) -> None:
        kinds = (Identity, Drop, Clip, LogClip)
        require_type(isinstance(self.name, str), "name: expected a string, got {!r}", self.name)
        require_type(
            isinstance(self.token, kinds),
            "token: expected {}, got {!r}{}",
            names_of(kinds),
            self.token,
            f"; put it on Level({self.token!r}, unit=Unit.STEP)" if isinstance(self.token, OF_LEVELS) else "",
        )
        check_member("head", self.head, Head)
        check_member("channel", self.channel, Channel)
        check_member("penalty", self.penalty, Penalty)
        check_flag("split", self.split)
        check_number_pair("head_numbers", self.head_numbers)
        check_number_pair("advantage_weights", self.advantage_weights)
        check_number("penalty_coefficient", self.penalty_coefficient)
        require_type(
            self.pre is None or isinstance(self.pre, (Clip, LogClip)),
            "pre: expected {}, or None, got {!r}",
            names_of((Clip, LogClip)),
            self.pre,
        )
        check_bounds_alone("pre", self.pre)
        require_type(
            isinstance(self.levels, tuple) and all(isinstance(level, Level) for level in self.levels),
            "levels: expected a tuple of Level, of one (level,), got {!r}",
            self.levels,
        )
        require_type(
            isinstance(self.corrections, tuple) and all(isinstance(each, Correction) for each in self.corrections),
            "corrections: expected a tuple of Correction, of one (correction,), got {!r}",
            self.corrections,
        )
        require_type(
            isinstance(self.needs, tuple)
            and all(
                isinstance(pair, tuple) and len(pair) == 2 and pair[0] in GateInputs._fields for pair in self.needs
            ),
            "needs: expected pairs of a field of GateInputs ({}) and the call that makes it, got {!r}",
            ", ".join(GateInputs._fields),
            self.needs,
        )

    def _check_levels(self) -> None:
        units = [level.unit for level in self.levels]
        check(
            all(finer < coarser for finer, coarser in itertools.pairwise(units)),
            "levels: expected each once, from the finest to the coarsest (step, trajectory, group, domain), got {}",
            ", ".join(unit.name.lower() for unit in units),
        )
        check(not self.split or len(self.levels) > 0, "split: without a level the channels would never meet; drop it")
        check(
            len(self.levels) > 0 or not isinstance(self.token, LogClip),
            "token: LogClip is for residuals below a level; a token's own ratio takes Clip, whose bounds are ratios",
        )
        check(
            len(self.levels) == 0 or self.levels[0].aggregate is not Aggregate.BALANCED,
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
            "pre: a clip of x takes the place of the aggregated x, and so does e^x under Aggregate.LOG_MEAN_EXP; "
            "drop pre= or take Aggregate.MEAN",
        )
        clip = self.token if isinstance(self.token, Clip) else Clip()
        check(
            not self.split or clip.slope_low == clip.slope_high == (0.0, 0.0),
            "token: beyond its bounds a clip of two channels has no slope; drop split= or the slopes",
        )
        check(
            len(self.levels) == 0 or clip.weight_low == clip.weight_high == (1.0, 1.0),
            "token: weights beyond its bounds are for a token's own ratio; drop the levels or the weights",
        )

    def _check_head(self) -> None:
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
        check(self.channel is not Channel.DISCREPANCY, "channel: it has no gradient; take Channel.STALENESS or TOTAL")
        check(
            self.head in _OWN_GRADIENT
            or not isinstance(self.token, Drop)
            or (len(self.levels) > 0 and self.levels[0].routing is not Routing.STOPPED),
            "token: Drop() under the linear head has no gradient unless the finest level carries it; use Head.SCORE",
        )

    def _check_numbers(self) -> None:
        check(
            self.head not in _LEAST or all(map(operator.ge, self.head_numbers, _LEAST[self.head])),
            "head_numbers: expected at least {} for A >= 0 and A < 0 with Head.{}, got {}",
            _LEAST.get(self.head),
            self.head.name,
            self.head_numbers,
        )
        check(
            all(number >= 0 and is_finite(number) for number in (*self.head_numbers, self.penalty_coefficient)),
            "head_numbers, penalty_coefficient: expected numbers >= 0 that are finite in float32, got {} and {}",
            self.head_numbers,
            self.penalty_coefficient,
        )
        check(
            self.penalty is not Penalty.NONE or self.penalty_coefficient == 0,
            "penalty_coefficient: without a penalty it does nothing, got {}; pass penalty=Penalty.K3 or another",
            self.penalty_coefficient,
        )
        check(
            all(is_finite(number) for number in self.advantage_weights),
            "advantage_weights: expected numbers that are finite in float32, got {}",
            self.advantage_weights,
        )

    @property
    def level(self) -> Level | None:
        """The gate on the mean of the trajectory where that is all there is: one level, its residual dropped."""
        if len(self.levels) != 1 or not isinstance(self.token, Drop) or self.split or self._term() is not None:
            return None
        (level,) = self.levels
        simple = isinstance(level.gate, (Identity, Clip)) and level.aggregate is Aggregate.MEAN
        return level if simple and level.unit is Unit.TRAJECTORY else None

    @property
    def units(self) -> frozenset[Unit]:
        """The units of its levels and corrections."""
        corrected = (each.unit for each in self.corrections if each.unit is not None)
        return frozenset((*self.level_units, *corrected))

    @property
    def of_steps(self) -> bool:
        """Whether steps are a level: tokens outside every step are then masked."""
        return Unit.STEP in self.level_units

    @property
    def first_order(self) -> FirstOrder:
        """The promise that the on-policy gradient of the policy term keeps, where no correction takes the token out;
        that of a segment under Head.TARGET where the target lies on A's side of 1."""
        if self.head is Head.NEGATIVE_AWARE or self.advantage_weights != (1.0, 1.0):
            return FirstOrder.SCALED
        if self.head in _OWN_GRADIENT or not isinstance(self.token, Drop) or self.levels[0].routing is Routing.SELF:
            return FirstOrder.TARGET if self.head is Head.TARGET else FirstOrder.EXACT
        return FirstOrder.SEGMENT_SUM if self.levels[0].aggregate is Aggregate.SUM else FirstOrder.SEGMENT_MEAN

    @property
    def takes_bounds(self) -> bool:
        """Whether per-token ``bounds`` can replace some of this gate's."""
        return any((*self._spec.low_driven, *self._spec.high_driven))

    def spec(self, kl: KLPenalty | None = None, strict: bool = False) -> PolicyLossSpec:
        """The gate, a KL penalty and the window's comparison, as kernels take them."""
        if kl is None:
            return self._spec._replace(strict=True) if strict else self._spec
        return self._spec._replace(kl=kl.estimator, kl_gradient=kl.gradient, kl_beta=float(kl.beta), strict=strict)

    def _make_spec(self) -> PolicyLossSpec:
        clip = self.token if isinstance(self.token, Clip) else Clip()
        kinds = {
            Identity: TokenGate.IDENTITY, Drop: TokenGate.DROP, Clip: TokenGate.CLIP, LogClip: TokenGate.CLIP
        }  # fmt: skip
        log_low, log_high = log_bounds(self.token if self.levels or self._term() is not None else Clip())
        return PolicyLossSpec(
            token=kinds[type(self.token)],
            token_low=clip.low,
            token_high=clip.high,
            low_driven=(clip.low[0] > 0, clip.low[1] > 0),
            high_driven=(clip.high[0] < math.inf, clip.high[1] < math.inf and not has_dual(clip)),
            head=self.head,
            levels=tuple(level_spec(level) for level in self.levels),
            token_log_low=log_low,
            token_log_high=log_high,
            split=self.split,
            term=self._term(),
        )

    @property
    def reads_rollout(self) -> bool:
        """Whether the loss can make use of ``rollout_logp``."""
        return self._facts[0]

    @property
    def needs_rollout(self) -> bool:
        """Whether the loss refuses to go without ``rollout_logp``: the gate corrects the difference of the sampler from
        the trainer."""
        return any(correction.channel is Channel.DISCREPANCY for correction in self.corrections)

    @property
    def corrects_sampler(self) -> bool:
        """Whether the gate accounts for the difference of the sampler from the trainer, by a correction or because its
        ratio is to the sampler. A weight of the trainer for it would count the difference twice."""
        return self.needs_rollout or self.channel is Channel.TOTAL

    @property
    def has_fast_path(self) -> bool:
        """Whether kernels need only the arguments that every gate has."""
        return self._facts[1]

    @property
    def takes_target(self) -> bool:
        """Whether the loss needs ``target``."""
        return self._facts[2]

    def _make_facts(self) -> tuple[bool, bool, bool]:
        channels = {self.channel, *(correction.channel for correction in self.corrections)}
        unweighted = self.channel is Channel.STALENESS and self.advantage_weights == (1.0, 1.0)
        fast_path = self._spec.term is None and unweighted and len(self.corrections) == 0 and not self.needs
        return channels != {Channel.STALENESS}, fast_path, self.head in (Head.TARGET, Head.NEGATIVE_AWARE)

    def _adds_up_deviations(self) -> bool:
        """Whether the head is the censored one, over the token and the level that it needs."""
        if self.head is not Head.CENSORED or len(self.levels) != 1:
            return False
        (level,) = self.levels
        sums = isinstance(level.gate, Excess) and level.aggregate is Aggregate.SUM
        alone = isinstance(self.token, Drop) and self.pre is None and not self.split
        return sums and alone and level.routing is not Routing.SELF

    def _term(self) -> TermSpec | None:
        clip = self.token if isinstance(self.token, Clip) else Clip()
        pre_low, pre_high = log_bounds(self.pre)
        term = TermSpec(
            self.head_numbers, clip.slope_low, clip.slope_high, clip.weight_low, clip.weight_high, pre_low, pre_high,
            self.penalty, self.penalty_coefficient,
        )  # fmt: skip
        mean_exp = any(level.aggregate is Aggregate.LOG_MEAN_EXP for level in self.levels)
        return None if term == TermSpec() and self.head in (Head.LINEAR, Head.SCORE) and not mean_exp else term


_OWN_GRADIENT = (Head.SCORE, Head.LOG, Head.CENSORED)  # past z, so that the token's own log-ratio may be dropped
# Below these a division by the head number overflows; the factor that FLIPPED bounds is 1 on-policy.
_LEAST = {
    Head.SIGMOID: (1e-4, 1e-4),
    Head.SIMPLE: (1e-4, 1e-4),
    Head.NEGATIVE_AWARE: (0.0, 1e-4),
    Head.FLIPPED: (1.0, 1.0),
}
