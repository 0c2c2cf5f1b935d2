"""The factor of a correction, token by token, and the token weights of sweeps that multiply with it.

The definition is hpo_core/reference/corrections.py; the arithmetic is that of csrc/include/hpo/correction_rules.h in
the same order.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ..specs import Action, CorrectionSpec, Statistic
from .math import SATURATION, clamp, exp, k3, k3_slope, log_parts, log_tail
from .rows import load
from .terms import by_sign
from .tokens import advantage_of

LOG_RATIO = tl.constexpr(int(Statistic.LOG_RATIO))
K2 = tl.constexpr(int(Statistic.K2))
K3 = tl.constexpr(int(Statistic.K3))
BINARY_KL = tl.constexpr(int(Statistic.BINARY_KL))
MASK = tl.constexpr(int(Action.MASK))
CLAMP = tl.constexpr(int(Action.CLAMP))

EXPONENT_BOUND = tl.constexpr(20.0)
GUARD = tl.constexpr(1e-8)  # keeps the logarithm of a binary KL finite


class Bounds(NamedTuple):
    """The bounds of the statistic, for advantages >= 0 and < 0."""

    low: tuple[float, float]
    high: tuple[float, float]


@triton.jit
def _bounded_logp(logp):
    """The exponent: rounding may lift a log-probability above 0, and below e^-87 nothing is left of a probability."""
    return clamp(logp, -87.0, 0.0)


@triton.jit
def _log_shortfall(f, x):
    """f - log(1 + f) without cancellation; ``x`` is 1 + f with all its digits, where f may have lost them."""
    mantissa, k = log_parts(x)
    t = tl.where(k == 0.0, f, mantissa - 1.0)  # 1 + f = (1 + t) 2^k
    near = (t * t) * tl.fma(-t, log_tail(t), 0.5)  # t - log(1 + t)
    far = tl.fma(k, -0.693359375, f - t)  # exactly 0 where k is
    return near + tl.fma(k, 2.12194440e-4, far)


@triton.jit
def _probability_difference(first, second):
    """p - q of p = e^first and q = e^second. As both go to 1, no difference of exponentials leaves digits."""
    bounded_second = _bounded_logp(second)
    step = _bounded_logp(first) - bounded_second
    return -(exp(bounded_second) * k3_slope(-step, exp(step)))


@triton.jit
def _signed_binary_kl(first, second, u):
    """The KL divergence of (q, 1 - q) from (p, 1 - p) with the sign of p - q, by terms that do not cancel."""
    bounded_first = _bounded_logp(first)
    bounded_second = _bounded_logp(second)
    step = bounded_first - bounded_second
    q = exp(bounded_second)
    ratio = exp(step)
    d = -(q * k3_slope(-step, ratio))
    other_p = k3_slope(-bounded_first, q * ratio)
    other_q = k3_slope(-bounded_second, q)
    reciprocal = tl.div_rn(1.0, other_q + GUARD)
    share = d * reciprocal
    of_token = tl.where(tl.abs(step) < 0.5, q * (k3(-step) + (step - u)), d - q * u)
    of_others = other_q * _log_shortfall(-share, (other_p + GUARD) * reciprocal)
    kl = of_token + of_others - GUARD * share
    return tl.where(d > 0.0, kl, tl.where(d < 0.0, -kl, 0.0))


@triton.jit
def statistic_of(first, second, STATISTIC: tl.constexpr):
    """NaN where a token has none, because its log-ratio is NaN or infinite. The log-ratio saturates, not the
    statistic."""
    difference = first - second
    u = clamp(difference, -SATURATION, SATURATION)
    if STATISTIC == LOG_RATIO:
        value = u
    elif STATISTIC == K2:
        value = 0.5 * u * u
    elif STATISTIC == K3:
        value = k3(-clamp(u, -EXPONENT_BOUND, EXPONENT_BOUND))
    elif STATISTIC == BINARY_KL:
        value = _signed_binary_kl(first, second, u)
    else:
        value = _probability_difference(first, second)
    zero_or_nan = difference - difference
    return tl.where(zero_or_nan == 0.0, value, zero_or_nan)


@triton.jit
def factor_of(v, low, high, ACTION: tl.constexpr, STRICT: tl.constexpr):
    if ACTION == CLAMP:
        return exp(clamp(clamp(v, low, high), -EXPONENT_BOUND, EXPONENT_BOUND))
    inside = (low < v) & (v < high) if STRICT else (low <= v) & (v <= high)
    kept = 1.0 if ACTION == MASK else exp(clamp(v, -EXPONENT_BOUND, EXPONENT_BOUND))
    return tl.where(inside, kept, 0.0)


@triton.jit
def weight_of_tokens(loaded, inputs, bounds, row, rows, token, tokens, whole, READING: tl.constexpr):
    """The token weights, if there are any, with the factors of a correction in them."""
    if READING.rule is None:
        return loaded.token_weight
    else:
        first = loaded.logp
        if inputs.correction_first is not None:
            first = load(inputs.correction_first, token, tokens, whole, READING.aligned)
        second = load(inputs.correction_second, token, tokens, whole, READING.aligned)
        v = statistic_of(first, second, READING.rule.statistic)
        negative = advantage_of(inputs, loaded, row, row < rows, READING) < 0.0
        # Field by field: in Triton 3.6 a tuple inside a constant tuple is no constant as an argument.
        low, high = by_sign(negative, bounds.low), by_sign(negative, bounds.high)
        factor = factor_of(v, low, high, READING.rule.action, READING.rule.strict)
        factor = tl.where(v == v, factor, v)
        if inputs.token_weight is not None:
            factor = factor * loaded.token_weight
        return factor


# --------------------------------------------------------------------------------------------------------------- host


def rule_bounds_of(spec: CorrectionSpec | None) -> Bounds | None:
    """The bounds as floats: Triton compiles a kernel again for integers in a tuple, and once more for a 1."""
    if spec is None:
        return None
    low, high = (tuple(map(float, pair)) for pair in (spec.low, spec.high))
    return Bounds(low, high)
