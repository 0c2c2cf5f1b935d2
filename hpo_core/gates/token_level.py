"""Methods whose ratio is the token's own."""

from __future__ import annotations

import math

from ..checks import check
from ..specs import Head
from .ratio_gate import Clip, Drop, RatioGate

__all__ = ["cispo", "dapo", "ppo_clip", "reinforce"]


def reinforce() -> RatioGate:
    """REINFORCE: ``loss_t = -A logp``, no importance ratio (Williams 1992; GPG, arXiv 2504.02546, without its scaling).

    ``old_logp`` is used for metrics only. The loss *value* is not comparable with a ratio loss; the gradient is ``-w
    A``.

    >>> reinforce().first_order.name
    'EXACT'
    """
    return RatioGate("reinforce", Drop(), head=Head.SCORE, source="Williams 1992; arXiv 2504.02546")


def ppo_clip(low: float = 0.2, high: float = 0.2, dual: float | None = None) -> RatioGate:
    r"""PPO's clipped surrogate: ``loss_t = -min(r A, clip(r, 1 - low, 1 + high) A)`` (arXiv 1707.06347).

    The gradient is ``-w A r`` unless clipped: ``A >= 0`` and ``r > 1 + high``, or ``A < 0`` and ``r < 1 - low``; at a
    bound it passes.

    Args:
        low, high: epsilons, 0.2 and 0.2 as in the paper.
        dual: ``c > 1``: for ``A < 0`` the loss is at most ``-c A`` and the gradient 0 beyond ``r > c`` (dual clip,
            arXiv 1912.09729; verl's default is 3, TRL's ``delta``). None: no such bound, the paper's form.

    Traps: verl clamps the log-ratio at +-20 with gradient 0 beyond; here it saturates at +-60 and keeps its slope.

    >>> ppo_clip(0.2, 0.28, dual=3.0).token
    Clip(low=(0.0, 0.8), high=(1.28, 3.0))
    """
    _check_epsilons(low, high)
    check(dual is None or dual > 1, "dual: expected a ratio c > 1 or None, got {}", dual)
    upper = math.inf if dual is None else float(dual)
    clip = Clip(low=(0.0, 1.0 - low), high=(1.0 + high, upper))
    return RatioGate("ppo_clip", clip, source="arXiv 1707.06347; dual clip arXiv 1912.09729")


def dapo(low: float = 0.2, high: float = 0.28) -> RatioGate:
    """DAPO's clip-higher: PPO's surrogate with a wider upper bound (arXiv 2503.14476, defaults of the paper).

    DAPO also aggregates by ``aggregation.token_mean`` over the whole optimiser step and uses no KL; both are arguments
    of the loss, not of the gate.

    >>> dapo().token.high[0]
    1.28
    """
    gate = ppo_clip(low, high)
    return RatioGate("dapo", gate.token, source="arXiv 2503.14476")


def cispo(cap: float = 5.0, low: float = 0.0) -> RatioGate:
    """CISPO: ``loss_t = -sg[clip(r, low, cap)] A logp``; every token keeps its gradient ``-w A clip(r)`` (arXiv
    2506.13585).

    Args:
        cap: the *absolute* upper bound of the weight, 5.0 as ScaleRL and TRL use; the paper gives no number.
        low: the absolute lower bound, 0 (none) as in the paper.

    Traps: frameworks disagree on what ``epsilon_high`` means: TRL takes the absolute cap, verl ``1 + clip_ratio_high``.
    The loss value is that of a score function and not comparable with PPO's.

    >>> cispo(cap=1.28).token.high
    (1.28, 1.28)
    """
    check(cap >= 1, "cap: expected an absolute ratio >= 1 (for verl's clip_ratio_high pass 1 + it), got {}", cap)
    check(0 <= low <= 1, "low: expected an absolute ratio in [0, 1] (for an epsilon pass 1 - it), got {}", low)
    clip = Clip(low=(float(low), float(low)), high=(float(cap), float(cap)))
    return RatioGate("cispo", clip, head=Head.SCORE, source="arXiv 2506.13585")


def _check_epsilons(low: float, high: float) -> None:
    check(0 <= low <= 1, "low: expected an epsilon in [0, 1], got {}", low)
    check(0 <= high < math.inf, "high: expected an epsilon >= 0, got {}", high)
