"""Methods whose ratio is the token's own."""

from __future__ import annotations

import math
from dataclasses import replace

from ..arguments import check_finite, examines
from ..checks import check
from ..specs import Head, Provenance
from .parts import Clip, Drop, Pair
from .ratio_gate import RatioGate


def reinforce() -> RatioGate:
    """REINFORCE: ``loss_t = -A logp``, no importance ratio (Williams 1992; GPG, arXiv 2504.02546, without its scaling).

    ``old_logp`` is used for metrics only. The loss *value* is not comparable with a ratio loss; the gradient is
    ``-w A``.

    >>> reinforce().first_order.name
    'EXACT'
    """
    return RatioGate(
        "reinforce", Drop(), head=Head.SCORE, source="Williams 1992; arXiv 2504.02546", provenance=Provenance.VERIFIED
    )


@examines
def ppo_clip(eps_low: float = 0.2, eps_high: float = 0.2, ratio_dual: float | None = None) -> RatioGate:
    r"""PPO's clipped surrogate: ``loss_t = -min(r A, clip(r, 1 - eps_low, 1 + eps_high) A)`` (arXiv 1707.06347).

    The gradient is ``-w A r`` unless clipped: ``A >= 0`` and ``r > 1 + eps_high``, or ``A < 0`` and
    ``r < 1 - eps_low``; at a bound it passes.

    Args:
        eps_low, eps_high: epsilons, 0.2 and 0.2 as in the paper; inf is no upper bound.
        ratio_dual: ``c > 1``: for ``A < 0`` the loss is at most ``-c A`` and the gradient 0 beyond ``r > c`` (dual
            clip, arXiv 1912.09729; verl's default is 3, TRL's ``delta``). None: no such bound, the paper's form.

    Traps: verl clamps the log-ratio at +-20 with gradient 0 beyond; here it saturates at +-60 and keeps its slope.

    >>> ppo_clip(0.2, 0.28, ratio_dual=3.0).token.high
    (1.28, 3.0)
    """
    check(ratio_dual is None or ratio_dual > 1, "ratio_dual: expected a ratio c > 1 or None, got {}", ratio_dual)
    clip = pessimistic_clip(eps_low, eps_high, math.inf if ratio_dual is None else ratio_dual)
    return RatioGate(
        "ppo_clip", clip, source="arXiv 1707.06347; dual clip arXiv 1912.09729", provenance=Provenance.VERIFIED
    )


@examines
def dapo(eps_low: float = 0.2, eps_high: float = 0.28) -> RatioGate:
    """DAPO's clip-higher: PPO's surrogate with a wider upper bound (arXiv 2503.14476).

    DAPO also aggregates by ``aggregation.token_mean`` over the whole optimiser step and uses no KL; both are arguments
    of the loss, not of the gate.

    Args:
        eps_low, eps_high: epsilons, 0.2 and 0.28 as in the paper.

    >>> dapo().token.high[0]
    1.28
    """
    return renamed("dapo", ppo_clip(eps_low, eps_high), "arXiv 2503.14476")


@examines
def triplet_clip(eps_low: float = 0.2, ratio_dual: float = 3.0, eps_high: float = 0.28) -> RatioGate:
    r"""LongCat's three bounds: ``1 + eps_high`` for ``A >= 0``; ``1 - eps_low`` and the absolute
    ``ratio_dual`` for ``A < 0`` (arXiv 2509.18883, equation 4).

    The gradient is ``-w A r`` unless clipped. The paper gives no numbers; these are DAPO's and the usual dual clip.

    Traps: as printed, the outer maximum would act for ``A > 0`` too and stop small ratios there; it is meant for
    ``A < 0``, as here.

    >>> triplet_clip().token.high
    (1.28, 3.0)
    """
    check(ratio_dual >= 1, "ratio_dual: expected an absolute ratio >= 1, got {}", ratio_dual)
    return RatioGate(
        "triplet_clip",
        pessimistic_clip(eps_low, eps_high, ratio_dual),
        source="arXiv 2509.18883",
        provenance=Provenance.VERIFIED,
    )


@examines
def ce_gppo(
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    low_weight: float = 0.25,
    high_weight: float = 1.0,
    ratio_dual: float = 3.0,
) -> RatioGate:
    """CE-GPPO: PPO's clip, but a clipped token keeps a gradient of fixed size (arXiv 2509.20712; its code).

    Beyond ``1 + eps_high`` with ``A >= 0`` the gradient is ``-w high_weight (1 + eps_high) A``; below ``1 - eps_low``
    with ``A < 0`` it is ``-w low_weight (1 - eps_low) A``; the loss there is multiplied by the same weight.

    Args:
        low_weight, high_weight: 0.25 and 1, the code's defaults (its recipes use 0.25 to 0.75 for the first).
        ratio_dual: c of the dual clip for ``A < 0``, beyond which there is no gradient.

    Traps: aggregate by the token mean, as the code does. The clip of agentic entropy-balanced optimisation (AEPO, arXiv
    2510.14545), which keeps the gradient only of tokens clipped from above, is ``ce_gppo(0.2, 0.28, 0.0, 1.0)``.

    >>> ce_gppo().token.weight_low
    (1.0, 0.25)
    """
    check_epsilons(eps_low, eps_high)
    check(ratio_dual > 1, "ratio_dual: expected a ratio c > 1, got {}", ratio_dual)
    for name, weight in (("low_weight", low_weight), ("high_weight", high_weight)):
        check(weight >= 0, "{}: expected a share of the gradient >= 0, got {}", name, weight)
    clip = Clip(
        low=(0.0, 1.0 - eps_low),
        high=(1.0 + eps_high, float(ratio_dual)),
        slope_low=(0.0, 1.0),
        slope_high=(1.0, 0.0),
        weight_low=(1.0, float(low_weight)),
        weight_high=(float(high_weight), 1.0),
    )
    return RatioGate("ce_gppo", clip, source="arXiv 2509.20712", provenance=Provenance.VERIFIED)


@examines
def aspo(eps_low: float = 0.2, eps_high: float = 0.2, ratio_dual: float = 3.0) -> RatioGate:
    """ASPO: for ``A >= 0`` the ratio is turned over, so that tokens whose probability fell gain most (arXiv
    2510.06062; its code).

    ``A >= 0``: the loss is ``-A / min(r, 1 + eps_high)`` with gradient ``-w A / r`` up to the bound and 0 beyond.
    ``A < 0``: PPO's lower clip. Where the factor, ``1 / r`` or r, exceeds ``ratio_dual``, the loss is
    ``-ratio_dual A logp`` with gradient ``-w ratio_dual A``.

    Args:
        eps_low, eps_high: 0.2 each; the paper uses 0.4 for one entropy class: see :func:`archer_bounds`.

    Traps: the code clamps log-ratios at +-20.

    >>> aspo().head.name
    'FLIPPED'
    """
    clip = pessimistic_clip(eps_low, eps_high)
    check(ratio_dual >= 1, "ratio_dual: expected a factor >= 1, got {}; below 1 it would act on-policy", ratio_dual)
    check(ratio_dual < math.inf, "ratio_dual: expected a finite factor, got {}", ratio_dual)
    numbers = (float(ratio_dual), float(ratio_dual))
    return RatioGate(
        "aspo", clip, head=Head.FLIPPED, head_numbers=numbers, source="arXiv 2510.06062", provenance=Provenance.VERIFIED
    )


@examines
def hapo_clip(eps_low: float = 0.2, eps_high: float = 0.2, ratio_dual: float | None = 10.0) -> RatioGate:
    """PPO's clip with HAPO's bounds, wider where the entropy is high: pass ``gate_inputs=hapo_bounds(entropy, batch)``
    (repository starriver030515/HAPO).

    Args:
        eps_low, eps_high: where a bound is None; else the bounds replace them.
        ratio_dual: as in :func:`ppo_clip`; 10 as in the authors' recipes.

    >>> hapo_clip().token.high
    (1.2, 10.0)
    >>> hapo_clip().needs[0]
    ('bounds', 'gates.hapo_bounds(entropy, batch)')
    """
    check_epsilons(eps_low, eps_high, finite=True)  # bounds of tokens replace those that there are
    gate = ppo_clip(eps_low, eps_high, ratio_dual)
    return renamed("hapo_clip", gate, "starriver030515/HAPO", bounds="gates.hapo_bounds(entropy, batch)")


@examines
def archer_clip(eps_low: float = 0.2, eps_high: float = 0.2, ratio_dual: float | None = 10.0) -> RatioGate:
    """PPO's clip with two pairs of bounds, by entropy class: pass ``gate_inputs=archer_bounds(wide)`` (Archer, whose
    second version is ASPO, arXiv 2510.06062).

    Args:
        eps_low, eps_high: where a bound is None; else the bounds replace them.
        ratio_dual: as in :func:`ppo_clip`; 10 as in the authors' recipes.

    >>> archer_clip().token.high
    (1.2, 10.0)
    >>> archer_clip().needs[0]
    ('bounds', 'gates.archer_bounds(wide)')
    """
    check_epsilons(eps_low, eps_high, finite=True)  # as in hapo_clip
    gate = ppo_clip(eps_low, eps_high, ratio_dual)
    return renamed("archer_clip", gate, "arXiv 2510.06062", bounds="gates.archer_bounds(wide)")


@examines
def dcpo_clip(ratio_cap: float = 10.0) -> RatioGate:
    """PPO's clip with DCPO's bounds, wider for unlikely tokens: pass ``gate_inputs=dcpo_bounds(old_logp)`` (arXiv
    2509.02333; its code).

    Args:
        ratio_cap: of the ratio for ``A < 0``, 10 as in the code.

    >>> dcpo_clip().token.high
    (1.2, 10.0)
    """
    gate = ppo_clip(0.16, 0.2, ratio_cap)
    return renamed("dcpo_clip", gate, "arXiv 2509.02333", bounds="gates.dcpo_bounds(old_logp)")


@examines
def clip_cov(eps_low: float = 0.2, eps_high: float = 0.2, ratio_dual: float | None = None) -> RatioGate:
    """Clip-Cov: PPO's clip, with a few tokens of high covariance taken out: pass ``gate_inputs=clip_cov_mask(...)``
    (arXiv 2505.22617; verl).

    Args:
        eps_low, eps_high, ratio_dual: as in :func:`ppo_clip`.

    >>> clip_cov().token.high[0]
    1.2
    """
    mask = "gates.clip_cov_mask(logp, old_logp, advantages, batch, seed=...)"
    return renamed("clip_cov", ppo_clip(eps_low, eps_high, ratio_dual), "arXiv 2505.22617", token_mask=mask)


@examines
def capo(eps_low: float = 0.2, eps_high: float = 0.2) -> RatioGate:
    """CAPO: PPO's clip on the tokens whose curvature the trainer accepts: pass ``gate_inputs=GateInputs(token_mask=)``
    (arXiv 2510.00819).

    A token is kept where the quadratic model of the step, ``m_H = g D + D H D / 2`` and ``m_F = D F D / 2`` of a
    simulated optimiser step D of the head, stays below ``|m_H| = 0.01`` and ``m_F = 1e-4``, the bounds of the authors'
    recipe; without ``hessian_symmetric_clipping`` their code also drops every ``m_H < 0``. D needs the optimiser, so
    the mask is the trainer's to compute.

    Args:
        eps_low, eps_high: as in :func:`ppo_clip`.

    Traps: the authors divide by the tokens that a response keeps and by all responses: pass as ``weights``
    ``aggregation.seq_mean_token_mean(batch, total=batch.rows, selected=token_mask)``.

    >>> capo().name
    'capo'
    """
    gate = ppo_clip(eps_low, eps_high)
    return renamed("capo", gate, "arXiv 2510.00819", token_mask="gates.GateInputs(token_mask=...)")


@examines
def cispo(ratio_cap: float = 5.0, ratio_low: float = 0.0, *, unified: bool = False) -> RatioGate:
    """CISPO: ``loss_t = -sg[clip(r, ratio_low, ratio_cap)] A logp``; every token keeps its gradient
    ``-w A clip(r)`` (arXiv 2506.13585).

    Args:
        ratio_cap: the *absolute* upper bound of the weight, 5.0 as ScaleRL and TRL use; the paper gives no number.
        ratio_low: the absolute lower bound, 0 (none) as in the paper.
        unified: also drop the tokens that PPO would clip, ``A >= 0`` beyond the cap and ``A < 0`` below ``ratio_low``
            (equations 6, 7).

    Traps: ``epsilon_high`` differs between frameworks: TRL takes the absolute cap, verl ``1 + clip_ratio_high``. The
    loss value is that of a score function and not comparable with PPO's.

    >>> cispo(ratio_cap=1.28).token.high
    (1.28, 1.28)
    """
    check(
        ratio_cap >= 1,
        "ratio_cap: expected an absolute ratio >= 1 (for verl's clip_ratio_high pass 1 + it), got {}",
        ratio_cap,
    )
    check(
        0 <= ratio_low <= 1,
        "ratio_low: expected an absolute ratio in [0, 1] (for an epsilon pass 1 - it), got {}",
        ratio_low,
    )
    kept: Pair = (1.0, 1.0)
    clip = Clip(
        low=(float(ratio_low), float(ratio_low)),
        high=(float(ratio_cap), float(ratio_cap)),
        weight_low=(1.0, 0.0) if unified else kept,
        weight_high=(0.0, 1.0) if unified else kept,
    )
    return RatioGate("cispo", clip, head=Head.SCORE, source="arXiv 2506.13585", provenance=Provenance.VERIFIED)


def pessimistic_clip(eps_low: float, eps_high: float, ratio_dual: float = math.inf) -> Clip:
    """PPO's clip, which bounds the ratio on the side to which the advantage pulls it."""
    check_epsilons(eps_low, eps_high)
    return Clip(low=(0.0, 1.0 - eps_low), high=(1.0 + eps_high, float(ratio_dual)))


def renamed(name: str, gate: RatioGate, source: str, **needs: str) -> RatioGate:
    """The gate under another name, with the inputs that it ``needs`` and the calls that make them."""
    return replace(gate, name=name, source=source, needs=tuple(needs.items()))


def check_epsilons(
    low: float, high: float, names: tuple[str, str] = ("eps_low", "eps_high"), *, finite: bool = False
) -> None:
    """``finite``: an upper epsilon of inf, which is no bound, is refused."""
    check(0 <= low <= 1, "{}: expected an epsilon in [0, 1], got {}; the ratio's bound is 1 - it", names[0], low)
    check(high >= 0, "{}: expected an epsilon >= 0, got {}", names[1], high)
    if finite:
        check_finite(**{names[1]: high})
    check(
        not 0.5 <= low < 1 < high,
        "{}: expected epsilons, got {} and {}, which look like ratios; pass {:g} and {:g}",
        ", ".join(names),
        low,
        high,
        1 - low,
        high - 1,
    )
