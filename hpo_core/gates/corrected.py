"""Methods that mask or weigh tokens by a ratio that is a constant of the differentiation, around any other gate.

Order: the gate's objective, times the weights and masks, then the aggregation. Denominators stay those of ``weights``;
to count only the kept tokens, build the weights with ``selected=``.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ..arguments import examines
from ..checks import check, require_type
from ..specs import Action, Head, Provenance, Reduction, Statistic, Unit
from .parts import Channel, Clip, Correction
from .ratio_gate import RatioGate
from .token_level import ppo_clip, triplet_clip


@examines
def compose(gate: RatioGate, *corrections: Correction) -> RatioGate:
    """``gate`` with these corrections after those it has; they multiply, so their order does not matter.

    >>> from hpo_core import gates
    >>> gates.compose(gates.gspo(), *gates.icepop().corrections).name
    'gspo'
    """
    for each in corrections:
        message = "corrections: expected Corrections, got {}; pass those of another gate as *gate.corrections"
        require_type(isinstance(each, Correction), message, type(each))
    return replace(gate, corrections=gate.corrections + corrections)


@examines
def decoupled(eps_low: float = 0.2, eps_high: float = 0.2, ratio_cap: float | None = None) -> RatioGate:
    """Decoupled PPO: PPO's clip around the proximal policy ``old_logp``, times ``exp(old_logp - rollout_logp)`` (arXiv
    2110.00641).

    Args:
        ratio_cap: of that weight; None as in the paper (exponents saturate at 20).

    A-3PO (arXiv 2512.06547; ``loglinear`` in AReaL) needs no forward pass of the proximal policy: its ``old_logp``
    is ``torch.lerp(rollout_logp, logp.detach(), 1 - 1 / age)``, age the policy versions since the token was sampled,
    at least 1.

    >>> decoupled().corrections[0].action.name
    'CLAMP'
    """
    return _around(ppo_clip(eps_low, eps_high), "decoupled", "arXiv 2110.00641", _truncated(ratio_cap))


@examines
def tis(
    ratio_cap: float = 2.0,
    unit: Unit | None = None,
    reduction: Reduction = Reduction.SUM,
    gate: RatioGate | None = None,
) -> RatioGate:
    """Truncated importance sampling: the loss times ``min(exp d, ratio_cap)``, d = old_logp - rollout_logp (verl, TRL,
    slime; fengyao.notion.site "off-policy-rl").

    Args:
        ratio_cap: absolute, 2 as in verl; TRL takes 3. ``math.inf``: no bound, the plain importance weight.
        unit: None: per token. ``Unit.TRAJECTORY``: of the sum of d (``reduction`` MEAN: the geometric mean).
        gate: the gate that is corrected. Default: ``ppo_clip()``.

    >>> round(tis().corrections[0].high[0], 4)
    0.6931
    """
    return _around(gate, "tis", "verl, TRL, slime", _truncated(ratio_cap, unit, reduction))


@examines
def mis(
    ratio_low: float = 0.0,
    ratio_high: float = 3.0,
    unit: Unit | None = Unit.TRAJECTORY,
    reduction: Reduction = Reduction.SUM,
    ratio_veto: float | None = None,
    gate: RatioGate | None = None,
) -> RatioGate:
    """Masked importance sampling: the loss times ``exp d`` where it lies in ``[ratio_low, ratio_high]``, else 0 (TRL
    ``sequence_mask``, slime).

    Args:
        ratio_low, ratio_high: absolute, 0 and 3 as in TRL. slime: 0.5 and 2, and 0.999 to 1.001 for geometric means.
        unit, reduction: whose ratio: None per token; by default the product over the trajectory, MEAN the geometric
            mean.
        ratio_veto: a token ratio below it takes its whole trajectory out; slime: 1e-4.
        gate: the gate that is corrected. Default: ``ppo_clip()``.

    >>> len(mis(ratio_veto=1e-4).corrections)
    2
    """
    corrections = [_band(ratio_low, ratio_high, unit, reduction)]
    if ratio_veto is not None:
        check(ratio_veto <= 1, "ratio_veto: expected a ratio <= 1, which equal policies have, got {}", ratio_veto)
        veto = _log_pair("ratio_veto", ratio_veto)
        corrections.append(Correction(Action.MASK, veto, unit=Unit.TRAJECTORY, reduction=Reduction.MIN))
    return _around(gate, "mis", "TRL, slime", *corrections)


@examines
def icepop(ratio_low: float = 0.5, ratio_high: float = 5.0, gate: RatioGate | None = None) -> RatioGate:
    """IcePop: the loss times ``exp d`` where ``ratio_low <= exp d <= ratio_high``, token by token, else 0
    (ringtech.notion.site).

    Args:
        ratio_low, ratio_high: 0.5 and 5, the notion page's.
        gate: the gate that is corrected. Default: ``ppo_clip()``.

    >>> icepop().corrections[0].action.name
    'BAND'
    """
    return _around(gate, "icepop", "ringtech.notion.site/icepop", _band(ratio_low, ratio_high))


@examines
def hispo(
    eps_sequence: float = 0.1,
    eps_token: float = 0.5,
    eps_low: float = 0.2,
    ratio_dual: float = 3.0,
    eps_high: float = 0.28,
) -> RatioGate:
    """HisPO: a triplet clip of the total ratio ``logp - rollout_logp`` where both engines agree (arXiv 2603.21065).

    Equations 8 and 9: a token counts where ``|exp d - 1| < eps_token``, and where the same holds of its trajectory's
    geometric mean and ``eps_sequence``; d = old_logp - rollout_logp, both strictly.

    Args:
        eps_sequence, eps_token: the paper gives no numbers; 0.1 and 0.5 are the neighbours'. From 1 on nothing is
            bounded below.
        eps_low, ratio_dual, eps_high: see :func:`triplet_clip`.

    Traps: aggregate by ``aggregation.fixed_length``. The masks do not change within an optimiser step: neither factor
    reads ``logp``.

    >>> hispo().channel.name
    'TOTAL'
    """
    masks = []
    for name, delta, unit in (("eps_sequence", eps_sequence, Unit.TRAJECTORY), ("eps_token", eps_token, None)):
        check(delta > 0, "{}: expected a deviation from 1 above 0, got {}", name, delta)
        low, high = _log_pair(name, max(1 - delta, 0)), _log_pair(name, 1 + delta)
        masks.append(Correction(Action.MASK, low, high, unit, strict=True))
    base = triplet_clip(eps_low, ratio_dual, eps_high)
    return replace(base, name="hispo", channel=Channel.TOTAL, corrections=tuple(masks), source="arXiv 2603.21065")


@examines
def opsm(log_delta: float = 0.5, gate: RatioGate | None = None) -> RatioGate:
    """DeepSeek-V3.2's off-policy sequence mask: a trajectory with ``A < 0`` counts only while the mean of
    ``rollout_logp - logp`` is at most ``log_delta`` (arXiv 2512.02556).

    Args:
        log_delta: 0.5 as TRL's documentation suggests; the report gives none.
        gate: the gate whose tokens are masked. Default: ``ppo_clip()``.

    Traps: the mask reads ``logp``, as a constant. Under ``bnpo`` ms-swift takes masked tokens out of the denominator;
    TRL does not.

    >>> opsm().corrections[0].low
    (-inf, -0.5)
    """
    mask = Correction(
        Action.MASK, low=(-math.inf, -log_delta), unit=Unit.TRAJECTORY, reduction=Reduction.MEAN, channel=Channel.TOTAL
    )
    return _around(gate, "opsm", "arXiv 2512.02556", mask)


@examines
def dppo_tv(
    low: float = 0.15,
    high: float = 0.15,
    ratio_cap: float = 20.0,
    channel: Channel = Channel.STALENESS,
    symmetric: bool = False,
) -> RatioGate:
    """DPPO with binary total variation: ``loss_t = -sg[min(r, ratio_cap)] A logp`` while the token's probability has
    moved little (arXiv 2602.04879; verl).

    ``A >= 0`` counts where ``p - q <= high``, ``A < 0`` where ``p - q >= -low``; p and q are the probabilities of the
    token now and then.

    Args:
        low, high: 0.15 as in the authors' code (sail-sg/Stable-RL); verl takes its ``clip_ratio_low`` and
            ``clip_ratio_high``, 0.2 unless they are set, and prime-rl 0.2.
        ratio_cap: absolute, 20, the default of verl's function; its trainer passes ``clip_ratio_c``, 3 unless it is
            set. prime-rl and SkyRL have none, inf.
        channel: the policy of q and of the ratio: STALENESS ``old_logp`` as in verl, TOTAL ``rollout_logp`` as in the
            authors' code.
        symmetric: a token counts where ``-low <= p - q <= high``, whatever the sign of A. prime-rl's ``ipo`` is
            ``dppo_tv(0.1, 0.1, inf, symmetric=True)``, its ``ref_kl`` has 0.2 and 1. With each of its losses goes
            ``kl_tau x^2``, on all tokens: ``kl=kl.k2(2 * kl_tau)`` with the sampler as ``ref_logp``.

    >>> dppo_tv().corrections[0].statistic.name
    'PROBABILITY'
    """
    for name, bound in (("low", low), ("high", high)):
        check(0 <= bound <= 1, "{}: expected a difference of probabilities in [0, 1], got {}", name, bound)
    back = (low, high) if symmetric else (math.inf, math.inf)
    return _dppo("dppo_tv", Statistic.PROBABILITY, low, high, ratio_cap, channel, back)


@examines
def dppo_kl(delta: float = 0.05, ratio_cap: float = 20.0, channel: Channel = Channel.STALENESS) -> RatioGate:
    """DPPO with the binary KL: as :func:`dppo_tv`, a token counting while ``KL(q || p)`` of "this token or another" is
    at most ``delta`` or it moves back (arXiv 2602.04879; verl).

    Args:
        delta: in nats, 0.05 as in verl.
        ratio_cap, channel: as in :func:`dppo_tv`.

    >>> dppo_kl().corrections[0].high
    (0.05, inf)
    """
    check(delta >= 0, "delta: expected a divergence >= 0, got {}", delta)
    return _dppo("dppo_kl", Statistic.BINARY_KL, delta, delta, ratio_cap, channel)


def _around(gate: RatioGate | None, name: str, source: str, *corrections: Correction) -> RatioGate:
    """The gate, by default PPO's clip, with these corrections as a method of this name."""
    return replace(compose(ppo_clip() if gate is None else gate, *corrections), name=name, source=source)


def _dppo(
    name: str,
    statistic: Statistic,
    low: float,
    high: float,
    cap: float,
    channel: Channel,
    back: tuple[float, float] = (math.inf, math.inf),
) -> RatioGate:
    """``back``: how far tokens may move down and up against the sign of their advantage."""
    check(cap >= 1, "ratio_cap: expected an absolute ratio >= 1, got {}", cap)
    mask = Correction(Action.MASK, (-back[0], -low), (high, back[1]), channel=channel, statistic=statistic)
    clip = Clip(high=(float(cap), float(cap)))
    return RatioGate(
        name,
        clip,
        head=Head.SCORE,
        channel=channel,
        corrections=(mask,),
        source="arXiv 2602.04879",
        provenance=Provenance.VERIFIED,
    )


def _truncated(cap: float | None, unit: Unit | None = None, reduction: Reduction = Reduction.SUM) -> Correction:
    check(cap is None or cap >= 1, "ratio_cap: expected an absolute ratio >= 1 or None, got {}", cap)
    high = _log_pair("ratio_cap", math.inf if cap is None else cap)
    return Correction(Action.CLAMP, high=high, unit=unit, reduction=reduction)


def _band(low: float, high: float, unit: Unit | None = None, reduction: Reduction = Reduction.MEAN) -> Correction:
    bounds = _log_pair("ratio_low", low), _log_pair("ratio_high", high)
    check(low <= 1 <= high, "ratio_low, ratio_high: expected ratio_low <= 1 <= ratio_high, got {}, {}", low, high)
    return Correction(Action.BAND, *bounds, unit, reduction)


def _log_pair(name: str, ratio: float) -> tuple[float, float]:
    check(ratio >= 0, "{}: expected an absolute ratio >= 0, got {}", name, ratio)
    log = -math.inf if ratio == 0 else math.log(ratio)
    return (log, log)
