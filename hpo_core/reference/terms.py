"""From the gated log-ratio of a token to its term of the loss: heads, the pre-gate, the factor beyond the bounds,
both penalties; and the saturations that keep all of it finite."""

from __future__ import annotations

import math

import torch

from ..specs import Head, KLEstimator, KLGradient, Penalty, TermSpec

SATURATION = 60.0
SQUARE_SATURATION = 25.0  # of z, for heads that multiply the ratio by another large number, or by itself
IMPLIED_SATURATION = 2.0**36  # of the ratio in the implied policy, which divides it by a number that may be 2^-24
SCORE_SATURATION = 2e37  # of the loss of a token that is multiplied by its log-probability: eight of them fit a float
SUM_SATURATION = 2.0**31  # of z, for the head that has no ratio: the limit of sums in fixed point
DEVIATION_SATURATION = 2048.0  # of a ratio's deviation from 1, where deviations are added up
# The bound of u in a gamma gate, whose slope is kept. The gate is far below -SATURATION there, so the bound
# matters only between the channels of a split: sums of any size would be infinity minus infinity there.
GAMMA_SATURATION = 80.0
EXPONENT_SATURATION = 7.5  # of x, where its exponentials are added up: e^7.5 < 2048
STATISTIC_SATURATION = 40.0  # ratio statistics, not the loss

MOST = {  # of z
    Head.LOG: SUM_SATURATION,
    Head.MIRROR: SQUARE_SATURATION,
    Head.SIMPLE: SQUARE_SATURATION,
    Head.CENSORED: 2 * DEVIATION_SATURATION,
}


def saturate(x: torch.Tensor, valid: torch.Tensor, most: float = SATURATION) -> torch.Tensor:
    """x within +-most; the derivative stays 1 where x is finite and is 0 where it is not."""
    finite = torch.where(valid & torch.isfinite(x), x, torch.zeros_like(x))
    bounded = torch.where(valid, x, torch.zeros_like(x)).detach().clamp(-most, most)
    return bounded + (finite - finite.detach())


def clip(u: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Clipped value (derivative 1 inside, bounds included), and where it fell below and above."""
    below, above = u < low, u > high
    return torch.where(above, high, torch.where(below, low, u)), below, above


def pre_gate(x: torch.Tensor, negative: torch.Tensor, term: TermSpec) -> torch.Tensor:
    low, high = (x.new_tensor(bound)[negative] for bound in (term.pre_low, term.pre_high))
    return clip(x, low, high)[0]


def deviation_of(x: torch.Tensor) -> torch.Tensor:
    """The deviation of the ratio e^x from 1, saturated with its derivative kept."""
    deviation = torch.expm1(x)
    return deviation.detach().clamp(max=DEVIATION_SATURATION) + (deviation - deviation.detach())


def factor_beyond(
    below: torch.Tensor, above: torch.Tensor, negative: torch.Tensor, term: TermSpec, like: torch.Tensor
) -> torch.Tensor:
    """The factor on the objective of a token beyond a bound."""
    return of_side(below, above, negative, term.weight_low, term.weight_high, torch.ones_like(like))


def of_side(
    below: torch.Tensor,
    above: torch.Tensor,
    negative: torch.Tensor,
    of_low: tuple[float, float],
    of_high: tuple[float, float],
    otherwise: torch.Tensor,
) -> torch.Tensor:
    """The number of the side of its bounds where a token is."""
    low, high = (otherwise.new_tensor(pair)[negative] for pair in (of_low, of_high))
    return torch.where(above, high, torch.where(below, low, otherwise))


def policy_term(head: Head, z: torch.Tensor, a: torch.Tensor, logp: torch.Tensor) -> torch.Tensor:
    """``-A Phi``; a: the advantage times the token weight, 0 where not selected."""
    ratio = torch.exp(z)
    return -a * ratio if head is Head.LINEAR else _scored(-a * ratio.detach(), logp)


def _scored(a: torch.Tensor, logp: torch.Tensor) -> torch.Tensor:
    """``a logp`` of a log-probability that may be as low as numbers go: saturated with its derivative kept."""
    value = (a * logp).detach().clamp(-SCORE_SATURATION, SCORE_SATURATION)
    return value + a * (logp - logp.detach())


def general_term(
    head: Head,
    z: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    kept: torch.Tensor,
    logp: torch.Tensor,
    target: torch.Tensor,
    number: torch.Tensor,
    negative: torch.Tensor,
) -> torch.Tensor:
    """:func:`policy_term` of every head; kept: the token weight, 0 where not selected."""
    if head is Head.CENSORED:
        deviation = deviation_of(x)
        left = deviation + torch.sign(deviation) * z  # z: the excess of the segment over its budget, negative
        return -a * (1 + torch.where(deviation.abs() + z >= 0, left, torch.zeros_like(z)))
    ratio, size = torch.exp(z), torch.where(negative == 1, -a, a)  # the second: |A|, whatever the sign of weights
    if head is Head.LOG:
        return _scored(-a, logp) + 0.5 * kept * number * z.square()
    if head is Head.MIRROR:
        return -a * ratio + kept * number * (z * ratio - ratio + 1)
    if head is Head.SIGMOID:
        return -a * (4 / number) * torch.sigmoid(number * (ratio - 1))
    if head is Head.SIMPLE:
        return -a * ratio + size * (ratio - 1).square() / (2 * number)
    if head is Head.TARGET:
        return size * (ratio - target).abs()
    if head is Head.NEGATIVE_AWARE:
        capped = torch.exp(z.detach().clamp(max=math.log(IMPLIED_SATURATION)) + (z - z.detach()))
        rate = torch.where(negative == 1, target, torch.zeros_like(target))
        implied = torch.where(negative == 1, (1 - rate * capped) / (1 - rate), ratio)
        bounded = implied.detach().maximum(number) + (implied - implied.detach())
        return -size * bounded.log()
    if head is Head.FLIPPED:
        factor = torch.exp(torch.where(negative == 1, z, -z)).detach()
        through = -a * factor * (1 + z - z.detach())
        return torch.where(factor > number, _scored(-a * number, logp), through)
    assert head in (Head.LINEAR, Head.SCORE), "a head without a term"
    return policy_term(head, z, a, logp)


def penalty_of(term: TermSpec, x: torch.Tensor) -> torch.Tensor:
    if term.penalty is Penalty.K1:
        return -x
    if term.penalty is Penalty.K2:
        return 0.5 * x.square()
    return x.abs() if term.penalty is Penalty.ABSOLUTE else torch.exp(x) - 1 - x


def kl_of_tokens(
    estimator: KLEstimator, gradient: KLGradient, s: torch.Tensor, x: torch.Tensor, infinite: torch.Tensor
) -> torch.Tensor:
    """The estimate of each token, ``[T]``, from saturated log-ratios to the reference (s) and the old policy (x);
    ``infinite``: where one of them is, which then does not follow logp."""
    k2 = 0.5 * s.square()
    k = {KLEstimator.K1: s, KLEstimator.K2: k2}.get(estimator, torch.exp(-s) - 1 + s)
    if gradient is KLGradient.VALUE:
        return k
    if gradient is KLGradient.STRAIGHT_THROUGH:
        return k.detach() + (k2 - k2.detach())
    r = torch.exp(x)
    if estimator is KLEstimator.K3:
        # r e^-s saturates as one exponential. It does not depend on logp: two shares that cancel would hide r s.
        both = torch.where(infinite, x - s, (x - s).detach())
        bounded = both.detach().clamp(-SATURATION, SATURATION) + (both - both.detach())
        return torch.exp(bounded) - r + s * r
    return r * k
