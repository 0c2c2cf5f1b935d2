"""Methods whose objective is no clipped ``A r``: smooth in the ratio, quadratic in its logarithm, against a target."""

from __future__ import annotations

import math

from ..arguments import examines
from ..checks import check
from ..specs import Head, Penalty, Provenance
from .parts import Drop, Identity, Pair
from .ratio_gate import RatioGate


@examines
def sapo(positive: float = 1.0, negative: float = 1.05) -> RatioGate:
    """SAPO: ``loss_t = -A (4 / tau) sigmoid(tau (r - 1))``, a soft clip (arXiv 2511.20347).

    The gradient is ``-w A 4 p (1 - p) r`` with ``p = sigmoid(tau (r - 1))``: full at r = 1, fading on both sides.

    Args:
        positive, negative: tau for ``A >= 0`` and ``A < 0``, the paper's.

    Traps: the loss is ``-2 A / tau`` where PPO's is ``-A``: values are not comparable, gradients are. Aggregate by
    ``aggregation.seq_mean_token_mean``.

    >>> sapo().head_numbers
    (1.0, 1.05)
    """
    return _under("sapo", Head.SIGMOID, "arXiv 2511.20347", (positive, negative))


@examines
def spo(eps: float = 0.2) -> RatioGate:
    """SPO, simple policy optimisation: ``loss_t = -(A r - |A| (r - 1)^2 / (2 eps))`` (arXiv 2401.16025).

    The gradient ``-w r (A - |A| (r - 1) / eps)`` vanishes at ``r = 1 + eps sign A`` and pulls back beyond.

    >>> spo().head_numbers
    (0.2, 0.2)
    """
    return _under("spo", Head.SIMPLE, "arXiv 2401.16025", (eps, eps))


def bpo() -> RatioGate:
    """BPO: ``loss_t = |A| |r - target|``, the ratio pulled to the optimum of a bounded step (arXiv 2604.18578).

    Pass ``gate_inputs=bpo_target(advantages)``, ``1 + epsilon sign A`` or its smooth form. The gradient is
    ``w |A| sign(r - target) r``: PPO's at r = 1, and backwards beyond the target.

    >>> bpo().takes_target
    True
    """
    return _under("bpo", Head.TARGET, "arXiv 2604.18578", target="gates.bpo_target(advantages)")


def gbpo() -> RatioGate:
    """GBPO: BPO with a soft target from the group's median: pass
    ``gate_inputs=gbpo_target(rewards, group_ids)`` (arXiv 2604.18578).

    Traps: the target follows the median and A the mean, so they may disagree in sign; such a token is pulled away from
    PPO's direction. OneRec-V2's "GBPO" (arXiv 2508.20900) is another method,
    :func:`gbpo_onerec_old_logp`.

    >>> gbpo().takes_target
    True
    """
    return _under("gbpo", Head.TARGET, "arXiv 2604.18578", target="gates.gbpo_target(rewards, group_ids)")


@examines
def nft(floor: float = 1.0) -> RatioGate:
    """NFT: likelihood of correct answers, and of the implied negative policy on wrong ones (arXiv 2505.18116; its
    code).

    ``A >= 0`` (correct): ``loss_t = -|A| log r``. ``A < 0`` (wrong): ``loss_t = -|A| log max(R, floor)``,
    ``R = (1 - q r) / (1 - q)``, the gradient passing the maximum: ``|A| q r / ((1 - q) max(R, floor))``. Pass the
    success rate q of each row's group, within [0.02, 0.98], as ``gate_inputs=GateInputs(target=)``, and as advantages
    ``+-w``: the code takes ``w = 1 - q`` or ``sqrt((1 - q) / q)``. No answer is wrong where all are right: with
    ``A < 0`` a q outside of [0, 1) is counted with the bad advantages and left out.

    Args:
        floor: 1 as in the code: then R counts as 1 wherever r > 1.

    Traps: the gradient on wrong answers grows like ``q r / (1 - q)``, 49 r at q = 0.98. At r = 1 it is q / (1 - q)
    times ``-w A``: the promise is SCALED.

    >>> nft().first_order.name
    'SCALED'
    """
    return _under("nft", Head.NEGATIVE_AWARE, "arXiv 2505.18116", (0.0, floor))


@examines
def dro(beta: float = 0.1) -> RatioGate:
    """DRO: ``loss_t = -(A logp - beta x^2 / 2)``, x the log-ratio (arXiv 2405.19107; verl, where beta has no default).

    The gradient is ``-w (A - beta x)``: no ratio, and a pull back to the old policy.

    >>> dro().first_order.name
    'EXACT'
    """
    return _under("dro", Head.LOG, "arXiv 2405.19107", (beta, beta))


@examines
def kimi(tau: float = 0.1) -> RatioGate:
    """Kimi k1.5's mirror descent: ``loss_t = -A logp + tau x^2 / 2`` (arXiv 2501.12599; tau 0.1 as in ROLL).

    Traps: the paper squares the log-ratio of the whole answer. That takes a ``RatioGate`` of ``Drop()``, one
    ``Level(Identity(), aggregate=Aggregate.SUM)``, ``Head.LOG`` and ``head_numbers=(tau, tau)``. Each of its tokens has
    the square: pass the weights of ``seq_mean_token_mean``, and advantages times the number of the answer's tokens.

    >>> kimi().head_numbers
    (0.1, 0.1)
    """
    return _under("kimi", Head.LOG, "arXiv 2501.12599", (tau, tau))


@examines
def opmd(tau: float = 1.0) -> RatioGate:
    """OPMD as Trinity has it: ``loss_t = -A logp / (1 + tau)``, REINFORCE with another learning rate.

    >>> opmd().advantage_weights
    (0.5, 0.5)
    """
    check(0 <= tau < math.inf, "tau: expected a finite number >= 0, got {}", tau)
    factor = 1.0 / (1.0 + tau)
    return RatioGate(
        "opmd",
        Drop(),
        head=Head.SCORE,
        advantage_weights=(factor, factor),
        source="Trinity-RFT",
        provenance=Provenance.VERIFIED,
    )


@examines
def ppo_penalty(beta: float = 0.1, penalty: Penalty = Penalty.K3) -> RatioGate:
    """PPO with a penalty instead of the clip: ``loss_t = -r A + beta k(x)`` (arXiv 1707.06347, section 4).

    Args:
        beta: 0.1; the paper adapts it: twice as large where the KL exceeds 1.5 times a target, half below 2/3 of it.
        penalty: the estimator of KL(old || new): K1 ``-x``, K2 ``x^2 / 2``, K3 ``r - 1 - x``.

    >>> ppo_penalty().penalty.name
    'K3'
    """
    return RatioGate(
        "ppo_penalty",
        Identity(),
        penalty=penalty,
        penalty_coefficient=beta,
        source="arXiv 1707.06347",
        provenance=Provenance.VERIFIED,
    )


@examines
def kl_cov(coefficient: float = 1.0) -> RatioGate:
    """KL-Cov: ``loss_t = -r A``, and ``+ coefficient |x|`` on the tokens of highest covariance: pass
    ``gate_inputs=kl_cov_mask(...)`` (arXiv 2505.22617; coefficient 1 in the paper's code, 0.1 in verl's config).

    Traps: nothing is clipped anywhere.

    >>> kl_cov().penalty.name
    'ABSOLUTE'
    """
    return RatioGate(
        "kl_cov",
        Identity(),
        penalty=Penalty.ABSOLUTE,
        penalty_coefficient=coefficient,
        needs=(("penalty_mask", "gates.kl_cov_mask(logp, advantages, batch)"),),
        source="arXiv 2505.22617",
        provenance=Provenance.VERIFIED,
    )


def _under(name: str, head: Head, source: str, numbers: Pair = (0.0, 0.0), **needs: str) -> RatioGate:
    """The method of a head on the ratio of the token, which no gate changes."""
    return RatioGate(
        name, Identity(), head=head, head_numbers=numbers, needs=tuple(needs.items()), source=source,
        provenance=Provenance.VERIFIED,
    )  # fmt: skip
