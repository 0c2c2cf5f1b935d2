"""Methods whose ratio is the trajectory's."""

from __future__ import annotations

from ..specs import Routing
from .ratio_gate import Clip, Drop, Level, RatioGate
from .token_level import _check_epsilons

__all__ = ["gspo", "gspo_token"]


def gspo(low: float = 3e-4, high: float = 4e-4) -> RatioGate:
    """GSPO: PPO's clipped surrogate of the sequence ratio ``s = exp(mean_t log r_t)`` (arXiv 2507.18071).

    The gradient reaches every token of the trajectory: ``-(s / n) sum_u w_u A_u`` over its unclipped tokens u.
    On-policy it is the trajectory's mean of ``-w A``, which is ``-w A`` where both are constant on the trajectory.

    Args:
        low, high: epsilons on s, 3e-4 and 4e-4 from the paper.

    Traps: the paper aggregates by ``aggregation.seq_mean_token_mean``; other weights change the length weighting.
    verl's "gspo" is :func:`gspo_token` with the log-ratio clamped at 10. Needs float32 log-probabilities: bfloat16
    rounding is as large as the clip.

    >>> gspo().first_order.name
    'SEGMENT_MEAN'
    """
    return RatioGate("gspo", Drop(), (_sequence(low, high, Routing.THROUGH),), source="arXiv 2507.18071")


def gspo_token(low: float = 3e-4, high: float = 4e-4) -> RatioGate:
    """GSPO-token: the value of the sequence ratio, each token's own gradient ``-w A s`` (arXiv 2507.18071).

    Equal to :func:`gspo` in value and gradient where ``w A`` is constant on the trajectory; differs for token-level
    advantages.
    """
    return RatioGate("gspo_token", Drop(), (_sequence(low, high, Routing.SELF),), source="arXiv 2507.18071")


def _sequence(low: float, high: float, routing: Routing) -> Level:
    _check_epsilons(low, high)
    return Level(Clip(low=(0.0, 1.0 - low), high=(1.0 + high, float("inf"))), routing)
