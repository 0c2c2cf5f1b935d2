"""Methods whose ratio is the trajectory's."""

from __future__ import annotations

import math

from ..arguments import examines
from ..checks import check
from ..specs import Action, Aggregate, Head, Provenance, Routing
from .parts import Channel, Clip, Correction, Drop, Gamma, Identity, Level, LogClip
from .ratio_gate import RatioGate
from .token_level import check_epsilons, pessimistic_clip


@examines
def gspo(eps_low: float = 3e-4, eps_high: float = 4e-4) -> RatioGate:
    """GSPO: PPO's clipped surrogate of the sequence ratio ``s = exp(mean_t log r_t)`` (arXiv 2507.18071).

    The gradient reaches every token of the trajectory: ``-(s / n) sum_u w_u A_u`` over its unclipped tokens u.
    On-policy it is the trajectory's mean of ``-w A``, which is ``-w A`` where both are constant on the trajectory.

    Args:
        eps_low, eps_high: epsilons on s, 3e-4 and 4e-4 from the paper.

    Traps: the paper aggregates by ``aggregation.seq_mean_token_mean``; other weights change the length weighting.
    verl's "gspo" is :func:`gspo_token` with the log-ratio clamped at 10. Needs float32 log-probabilities: bfloat16
    rounding is as large as the clip.

    >>> gspo().first_order.name
    'SEGMENT_MEAN'
    """
    level = Level(pessimistic_clip(eps_low, eps_high))
    return RatioGate("gspo", Drop(), (level,), source="arXiv 2507.18071", provenance=Provenance.VERIFIED)


@examines
def gspo_token(eps_low: float = 3e-4, eps_high: float = 4e-4) -> RatioGate:
    """GSPO-token: the value of the sequence ratio, each token's own gradient ``-w A s`` (arXiv 2507.18071).

    Equal to :func:`gspo` in value and gradient where ``w A`` is constant on the trajectory; differs for token-level
    advantages.

    Args:
        eps_low, eps_high: epsilons on s, those of :func:`gspo`.

    >>> gspo_token().first_order.name
    'EXACT'
    """
    level = Level(pessimistic_clip(eps_low, eps_high), Routing.SELF)
    return RatioGate("gspo_token", Drop(), (level,), source="arXiv 2507.18071", provenance=Provenance.VERIFIED)


@examines
def luspo(eps_low: float = 2e-3, eps_high: float = 2.5e-3) -> RatioGate:
    """LUSPO, length-unbiased: GSPO's objective of a sequence times its length (arXiv 2602.05261).

    ``loss = -(1 / S) sum over sequences of n min(s A, clip(s) A)``, ``s = exp(mean_t log r_t)``: the gate is that of
    :func:`gspo`, and the length comes from ``weights=aggregation.seq_mean_token_sum(batch)``, which must be passed.
    The gradient at a token is ``-(1 / S) s A`` whatever the length of its sequence, where GSPO's is that over n; it is
    0 where s is clipped.

    Args:
        eps_low, eps_high: epsilons on s, 2e-3 and 2.5e-3, as TRL's list of papers has them.

    Traps: with other weights this is GSPO with a wider clip. The loss grows with the mean length, and so does the
    effect of a learning rate. TRL asks for ``importance_sampling_level="sequence"`` beside ``loss_type="luspo"``;
    Liger's kernels weigh a row by ``n / L``, L the padded length.

    >>> import torch, hpo_core as hpo
    >>> batch, logp = hpo.PackedBatch.from_lengths([1, 3]), torch.full((4,), -1.0, requires_grad=True)
    >>> weights = hpo.aggregation.seq_mean_token_sum(batch)
    >>> hpo.policy_loss(logp, logp.detach(), torch.ones(2), batch, luspo(), weights=weights).loss.backward()
    >>> logp.grad
    tensor([-0.5000, -0.5000, -0.5000, -0.5000])
    """
    level = Level(pessimistic_clip(eps_low, eps_high))
    return RatioGate("luspo", Drop(), (level,), source="arXiv 2602.05261", provenance=Provenance.VERIFIED)


@examines
def gmpo(log_low: float = 0.4, log_high: float = 0.4) -> RatioGate:
    """GMPO: ``loss = -A exp(mean of the clipped log-ratios)``: each token is clipped before the geometric mean (arXiv
    2507.20673).

    The clip is one-sided, at most ``log_high`` for ``A >= 0`` and at least ``-log_low`` for ``A < 0``. The gradient is
    ``-(s / n) sum_u w_u A_u`` at tokens that are not clipped.

    Args:
        log_low, log_high: log-ratios, 0.4 as in the paper.

    Traps: aggregate by ``aggregation.seq_mean_token_mean``. The paper's A belongs to the sequence, and with it the side
    of the clip. Where A changes its sign within a trajectory (advantages of tokens or steps) each token is clipped on
    the side of its own A and all of them enter one mean, which no paper proposes and no flag reports: pass advantages
    of rows or trajectories. verl takes every token of a sequence with A = 0 for clipped.

    >>> gmpo().first_order.name
    'SEGMENT_MEAN'
    """
    for name, bound in (("log_low", log_low), ("log_high", log_high)):
        check(bound >= 0, "{}: expected a log-ratio >= 0, got {}", name, bound)
    pre = LogClip((-math.inf, -log_low), (log_high, math.inf))
    return RatioGate(
        "gmpo", Drop(), (Level(Identity()),), pre=pre, source="arXiv 2507.20673", provenance=Provenance.VERIFIED
    )


@examines
def topr(aggregate: Aggregate = Aggregate.SUM) -> RatioGate:
    """TOPR: REINFORCE on good trajectories, ``min(w, 1)`` times REINFORCE on bad ones (arXiv 2503.14286).

    ``loss_t = -sg[a] A logp``, ``a = 1`` for ``A >= 0`` and ``min(w, 1)`` for ``A < 0``; w is the ratio of the
    trajectory.

    Args:
        aggregate: SUM, the product of token ratios, as in the paper; MEAN, their geometric mean, as in verl.

    Traps: ROLL uses the ratio of the token; that is
    ``RatioGate(..., Clip(high=(1.0, 1.0), low=(1.0, 0.0)), head=Head.SCORE)``.

    >>> topr().head.name
    'SCORE'
    """
    level = Level(LogClip((0.0, -math.inf), (0.0, 0.0)), aggregate=aggregate)
    return RatioGate("topr", Drop(), (level,), Head.SCORE, source="arXiv 2503.14286", provenance=Provenance.VERIFIED)


@examines
def vespo(k: tuple[float, float] = (2.0, 3.0), lam: tuple[float, float] = (3.0, 2.0)) -> RatioGate:
    """VESPO: ``loss_t = -sg[phi(W)] A logp``, ``phi = exp(lam + k log W - lam W)``, W the product of the trajectory's
    ratios (arXiv 2602.10693).

    Args:
        k, lam: for ``A >= 0`` and ``A < 0``, those of TRL.

    Traps: TRL also clamps log W to [log 1e-8, 20]; with these numbers phi is below 1e-6 there already, with a k below 1
    it is not.

    >>> vespo().first_order.name
    'EXACT'
    """
    level = Level(Gamma(k, lam), aggregate=Aggregate.SUM)
    return RatioGate("vespo", Drop(), (level,), Head.SCORE, source="arXiv 2602.10693", provenance=Provenance.VERIFIED)


@examines
def a_lol(eps: float = 0.9) -> RatioGate:
    """A-LoL: ``loss_t = -sg[clip(W, 1 - eps, 1 + eps)] max(A, 0) logp``, W the product of the trajectory's
    ratios (arXiv 2305.14718).

    Args:
        eps: 0.9 as in the code's examples.

    Traps: trajectories with ``A <= 0`` are discarded, but stay in the denominators of ``weights``. Aggregate by
    ``aggregation.seq_mean_token_sum``.

    >>> a_lol().advantage_weights
    (1.0, 0.0)
    """
    check(0 <= eps <= 1, "eps: expected an epsilon in [0, 1], got {}", eps)
    low, high = 1.0 - eps, 1.0 + eps
    level = Level(Clip((low, low), (high, high)), aggregate=Aggregate.SUM)
    return RatioGate(
        "a_lol",
        Drop(),
        (level,),
        Head.SCORE,
        advantage_weights=(1.0, 0.0),
        source="arXiv 2305.14718",
        provenance=Provenance.VERIFIED,
    )


@examines
def rec(eps_low: float = 0.2, eps_high: float = 0.2, one_sided: bool = True, importance: bool = False) -> RatioGate:
    """REC: ``loss_t = -sg[W] A logp`` on tokens whose ratio is in range, else 0 (Trinity-RFT).

    Args:
        eps_low, eps_high: epsilons of the range ``[1 - eps_low, 1 + eps_high]``.
        one_sided: only the side to which A pushes: ``r <= 1 + eps_high`` for ``A >= 0``, ``r >= 1 - eps_low`` for
            ``A < 0``.
        importance: W is the token's ratio; else 1.

    Traps: the variant "ring", whose range is two intervals, is :func:`rec_ring`.

    >>> rec().corrections[0].channel.name
    'STALENESS'
    """
    check_epsilons(eps_low, eps_high)
    below, above = math.log1p(-eps_low) if eps_low < 1 else -math.inf, math.log1p(eps_high)
    lows, highs = ((-math.inf, below), (above, math.inf)) if one_sided else ((below, below), (above, above))
    mask = Correction(Action.MASK, lows, highs, channel=Channel.STALENESS)
    token = Identity() if importance else Drop()
    return RatioGate(
        "rec", token, head=Head.SCORE, corrections=(mask,), source="Trinity-RFT", provenance=Provenance.VERIFIED
    )


@examines
def rec_ring(importance: bool = False) -> RatioGate:
    """REC with the range "ring": ``loss_t = -sg[W] A logp`` also on tokens whose ratio strayed far to the side to which
    A does not push: pass ``gate_inputs=rec_ring_mask(...)`` (Trinity-RFT).

    Args:
        importance: W is the token's ratio; else 1.

    >>> rec_ring().first_order.name
    'EXACT'
    """
    token = Identity() if importance else Drop()
    needs = (("token_mask", "gates.rec_ring_mask(logp, old_logp, advantages, batch)"),)
    return RatioGate(
        "rec_ring", token, head=Head.SCORE, needs=needs, source="Trinity-RFT", provenance=Provenance.VERIFIED
    )
