"""Methods that gate several levels at once, or one that is not the trajectory."""

from __future__ import annotations

import math

from ..checks import check
from ..specs import Routing, Unit
from .ratio_gate import Clip, Drop, Level, LogClip, Provenance, RatioGate, Rollback
from .token_level import _check_epsilons

__all__ = ["fiberpo", "fiberpo_domain", "step_gspo", "two_scale"]


def step_gspo(low: float = 3e-4, high: float = 4e-4) -> RatioGate:
    """GSPO with a step (a turn) in the place of the sequence: ``s = exp(mean of log r over the token's step)``.

    Used for agents with many turns (StepPO, AgileRL). Needs a batch with steps; a token outside all steps is masked.

    Args:
        low, high: epsilons on s, those of GSPO; no paper gives others.

    Traps: a step is shorter than a sequence, so its mean spreads more, and GSPO's epsilons clip more of them.

    >>> step_gspo().first_order.name
    'SEGMENT_MEAN'
    """
    level = Level(_pessimistic(low, high), unit=Unit.STEP)
    return RatioGate("step_gspo", Drop(), (level,), source="arXiv 2507.18071, per step", provenance=Provenance.PAPER)


def two_scale(
    step: tuple[float, float] = (0.2, 0.2), trajectory: tuple[float, float] = (0.1, 0.1), token: float | None = None
) -> RatioGate:
    """A pessimistic clip on the step's residual ratio and one on the trajectory's, their product being the ratio.

    ``z = g_T(a_step - a_traj) + g_S(a_traj)``, and with ``token`` also ``g_0(x - a_step)``: where nothing is clipped, z
    is the step's mean log-ratio, or the token's own. One-sided clips at every level keep PPO's lower bound: ``A e^z <=
    A e^x`` with ``token``.

    Args:
        step, trajectory: epsilons (low, high) of either level.
        token: the epsilon of the token's residual. None: the residual is dropped, as in GSPO.

    >>> two_scale().levels[1].unit.name
    'TRAJECTORY'
    """
    levels = (Level(_pessimistic(*step), unit=Unit.STEP), Level(_pessimistic(*trajectory)))
    residual = Drop() if token is None else _pessimistic(token, token)
    return RatioGate("two_scale", residual, levels, source="hpo_core", provenance=Provenance.RECONSTRUCTED)


def fiberpo(
    epsilon: float = 0.2,
    budgets: tuple[float, float] = (0.2, 0.2),
    slope: float | None = None,
) -> RatioGate:
    """FiberPO: a budget for the trajectory's drift, and a clip on each token's deviation from it (arXiv 2604.03044).

    ``z = sum over the channels c = +, - of c [g(a^c) + clip(x^c - a^c, -epsilon, epsilon)]``, where ``x+ = max(x, 0)``,
    ``x- = max(-x, 0)``, ``a^c`` is the mean of ``x^c`` over the trajectory, and g lets a drift up to the budget pass,
    rolls it back beyond, and zeroes it at last. Equal to equations 1 to 5 of the paper.

    Args:
        epsilon: on the log-ratio, 0.2. The paper gives no numbers; these are those of the authors' code.
        budgets: C+ and C-, log-ratios: 0.2 each, delta / 2 in the authors' code; the paper recommends C- < C+.
        slope: of the rollback; None: the trajectory's length, as in the paper, which multiplies the gradient by it in
            a zone ``C / length`` wide. See :class:`Rollback`.

    Traps: aggregate by ``aggregation.seq_mean_token_mean`` as the paper does; the authors' code defaults to the token
    mean, and triples the gradient where ``logp == old_logp`` (it has no sign for a log-ratio of 0; here +0 and -0 are
    positive). No minimum is taken: the surrogate is not PPO's lower bound.

    >>> fiberpo().first_order.name
    'EXACT'
    """
    return RatioGate(
        "fiberpo", _residual_clip(epsilon), (Level(Rollback(budgets, slope)),), split=True, source="arXiv 2604.03044"
    )


def fiberpo_domain(
    epsilon: float = 0.2,
    trajectory: float = 0.2,
    group: float = 0.1,
    domain: float = 0.1,
    slope: float | None = 1.0,
    routing: Routing = Routing.THROUGH,
) -> RatioGate:
    """FiberPO over four levels, token < trajectory < prompt group < domain, each with a budget of its own.

    Every level gates its residual, the aggregate minus that of the next coarser level, per channel (arXiv 2603.08239;
    the full text is not available: this generalises the two-level method, to which it reduces).

    Args:
        epsilon, trajectory, group, domain: log-ratio budgets. No paper gives numbers.
        slope: of every rollback. 1: a group has so many tokens that the paper's slope, their number, would be a wall;
            None asks for it.
        routing: how groups and domains carry gradient; ``Routing.STOPPED`` where they span micro-batches.

    >>> [level.unit.name for level in fiberpo_domain().levels]
    ['TRAJECTORY', 'GROUP', 'DOMAIN']
    """
    levels = (
        Level(Rollback((trajectory, trajectory), slope)),
        Level(Rollback((group, group), slope), routing, Unit.GROUP),
        Level(Rollback((domain, domain), slope), routing, Unit.DOMAIN),
    )
    return RatioGate(
        "fiberpo_domain", _residual_clip(epsilon), levels, split=True, source="arXiv 2603.08239",
        provenance=Provenance.RECONSTRUCTED,
    )  # fmt: skip


def _pessimistic(low: float, high: float) -> Clip:
    _check_epsilons(low, high)
    return Clip(low=(0.0, 1.0 - low), high=(1.0 + high, math.inf))


def _residual_clip(epsilon: float) -> LogClip:
    check(0 <= epsilon < math.inf, "epsilon: expected a log-ratio >= 0, got {}", epsilon)
    return LogClip(low=(-epsilon, -epsilon), high=(epsilon, epsilon))
