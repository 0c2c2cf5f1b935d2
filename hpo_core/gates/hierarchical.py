"""Methods that gate several levels at once, or one that is not the trajectory."""

from __future__ import annotations

import math

from ..arguments import examines
from ..checks import check
from ..specs import Provenance, Unit
from .parts import Drop, Level, LogClip, Rollback
from .ratio_gate import RatioGate
from .token_level import pessimistic_clip


@examines
def step_gspo(eps_low: float = 3e-4, eps_high: float = 4e-4) -> RatioGate:
    """GSPO with a step (a turn) instead of the sequence: ``s = exp(mean of log r over the token's step)``.

    Used for agents with many turns (StepPO, AgileRL). Needs a batch with steps; a token outside all steps is masked.

    Args:
        eps_low, eps_high: epsilons on s, those of GSPO; no paper gives others.

    Traps: a step is shorter than a sequence, so its mean spreads more, and GSPO's epsilons clip more of them.

    >>> step_gspo().first_order.name
    'SEGMENT_MEAN'
    """
    level = Level(pessimistic_clip(eps_low, eps_high), unit=Unit.STEP)
    return RatioGate("step_gspo", Drop(), (level,), source="arXiv 2507.18071, per step", provenance=Provenance.PAPER)


@examines
def fiberpo(
    log_clip: float = 0.2, log_budgets: tuple[float, float] = (0.2, 0.2), slope: float | None = None
) -> RatioGate:
    """FiberPO: a budget for the trajectory's drift, and a clip on each token's deviation from it (arXiv 2604.03044).

    ``z = sum over the channels c = +, - of c [g(a^c) + clip(x^c - a^c, -log_clip, log_clip)]``, where
    ``x+ = max(x, 0)``, ``x- = max(-x, 0)``, ``a^c`` is the mean of ``x^c`` over the trajectory, and g lets a drift up
    to the budget pass, rolls it back beyond, and zeroes it at last. Equal to equations 1 to 5 of the paper.

    Args:
        log_clip: on the log-ratio, 0.2. The paper gives no numbers; these are those of the authors' code.
        log_budgets: C+ and C-, log-ratios: 0.2 each, delta / 2 in the authors' code; the paper recommends C- < C+.
        slope: of the rollback; None: the trajectory's length, as in the paper, which multiplies the gradient by it in
            a zone ``C / length`` wide. See :class:`Rollback`.

    Traps: aggregate by ``aggregation.seq_mean_token_mean`` as the paper does; the authors' code defaults to the token
    mean, and triples the gradient where ``logp == old_logp`` (it has no sign for a log-ratio of 0; here +0 and -0 are
    positive). No minimum is taken: the surrogate is not PPO's lower bound.

    >>> fiberpo().first_order.name
    'EXACT'
    """
    return RatioGate(
        "fiberpo",
        residual_clip(log_clip),
        (Level(Rollback(log_budgets, slope)),),
        split=True,
        source="arXiv 2604.03044",
        provenance=Provenance.VERIFIED,
    )


def residual_clip(epsilon: float) -> LogClip:
    check(0 <= epsilon < math.inf, "log_clip: expected a finite log-ratio >= 0, got {}", epsilon)
    return LogClip(low=(-epsilon, -epsilon), high=(epsilon, epsilon))
