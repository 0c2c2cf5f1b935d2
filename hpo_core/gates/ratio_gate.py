"""RatioGate: how importance ratios become a loss, as data. A published method is one value of it.

The unified operator is ``z_t = sum_k g_k(a_k - a_{k+1})`` over nested levels token < ... < trajectory: a gate ``g`` on
each level's residual log-ratio, a routing of the gradient through each level's mean, and a head that turns z into the
objective.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from ..checks import check
from ..kl import KLPenalty
from ..specs import Head, PolicyLossSpec, Routing, TokenGate

__all__ = ["Clip", "Drop", "FirstOrder", "Identity", "Level", "Provenance", "RatioGate"]

Pair = tuple[float, float]  # (advantage >= 0, advantage < 0)


class Provenance(enum.Enum):
    """Where a preset's formula comes from."""

    VERIFIED = "official code run, or the paper's equations and independent numbers"
    PAPER = "the paper's equations"
    RECONSTRUCTED = "reconstructed from partial sources"


class FirstOrder(enum.Enum):
    """The gradient at ``logp == old_logp``."""

    EXACT = "-w A at every token, to the bit"
    SEGMENT_MEAN = "the mean of -w A over the token's trajectory"


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
class Level:
    """A gate on the mean log-ratio of each trajectory, and how that mean carries gradient."""

    gate: Identity | Clip
    routing: Routing = Routing.THROUGH


@dataclass(frozen=True)
class RatioGate:
    """One ratio-gating method: frozen, hashable, picklable.

    Args:
        name: of the constructor that made it.
        token: the gate on the token's log-ratio, or on its residual ``x - mean`` below a level.
        level: the gate on the trajectory's mean log-ratio, or None. Below a level the token gate must be :class:`Drop`:
            gates that keep a residual (two levels at once) are not supported yet, and say so.
        head: ``Head.LINEAR`` (``A e^z``) or ``Head.SCORE`` (``A sg[e^z] logp``).
        source, provenance: where the formula comes from.
    """

    name: str
    token: Identity | Drop | Clip
    level: Level | None = None
    head: Head = Head.LINEAR
    source: str = ""
    provenance: Provenance = Provenance.VERIFIED

    def __post_init__(self) -> None:
        check(
            self.level is None or isinstance(self.token, Drop),
            "token: a gate on the residual below a trajectory level is not supported yet, got {}; "
            "use Drop() below a level, or no level",
            self.token,
        )
        flows = self.level is not None and self.level.routing is not Routing.STOPPED
        check(
            flows or self.head is Head.SCORE or not isinstance(self.token, Drop),
            "token: Drop() under the linear head has no gradient without a level that carries it; use Head.SCORE",
        )
        object.__setattr__(self, "_spec", self._make_spec())  # once: every loss call asks for it

    @property
    def first_order(self) -> FirstOrder:
        """Which promise the on-policy gradient keeps."""
        averaged = self.level is not None and self.level.routing is Routing.THROUGH and self.head is Head.LINEAR
        return FirstOrder.SEGMENT_MEAN if averaged else FirstOrder.EXACT

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
        level_clip = self.level.gate if self.level is not None and isinstance(self.level.gate, Clip) else Clip()
        kinds = {Identity: TokenGate.IDENTITY, Drop: TokenGate.DROP, Clip: TokenGate.CLIP}
        return PolicyLossSpec(
            token=kinds[type(self.token)],
            token_low=clip.low,
            token_high=clip.high,
            low_driven=_driven(clip.low, absent=0.0),
            high_driven=_driven(clip.high, absent=math.inf),
            has_level=self.level is not None,
            level_clips=self.level is not None and isinstance(self.level.gate, Clip),
            level_log_low=_log(level_clip.low),
            level_log_high=_log(level_clip.high),
            routing=Routing.THROUGH if self.level is None else self.level.routing,
            head=self.head,
        )


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
