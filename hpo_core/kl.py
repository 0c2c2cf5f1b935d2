"""The penalty on the divergence from a reference policy: which estimator, and which gradient.

With ``s = logp - ref_logp`` on samples of the policy, ``E[k1] = E[k3] = KL(policy || reference)``. The value and the
gradient are two choices. The gradient of k1 as a loss has mean zero (no restoring force), the gradient of k2 is the
true reverse-KL gradient on-policy, and k3 has the gradient ``1 - e^-s``. Estimators:
http://joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

from dataclasses import dataclass

from .arguments import Short, check_choice, check_member, check_number, examines, is_finite
from .checks import check
from .specs import KLEstimator, KLGradient

__all__ = ["KLPenalty", "k1", "k2", "k3"]

_GRADIENTS = {
    "value": KLGradient.VALUE,
    "straight_through": KLGradient.STRAIGHT_THROUGH,
    "importance": KLGradient.IMPORTANCE,
}


@dataclass(frozen=True, repr=False)
class KLPenalty(Short):
    """``beta * k(s)`` added to the loss of every valid token, whatever token masks, token weights and windows are."""

    estimator: KLEstimator
    beta: float
    gradient: KLGradient

    def __post_init__(self) -> None:
        check_member("estimator", self.estimator, KLEstimator)
        check_member("gradient", self.gradient, KLGradient)
        check_number("beta", self.beta)
        check(
            self.beta >= 0 and is_finite(self.beta),
            "beta: expected a number >= 0 that is finite in float32, got {}; below 0 the loss would pay for divergence",
            self.beta,
        )


def _penalty(estimator: KLEstimator, beta: float, gradient: str) -> KLPenalty:
    check_choice("gradient", gradient, _GRADIENTS)
    return KLPenalty(estimator, float(beta), _GRADIENTS[gradient])


@examines
def k1(beta: float, gradient: str = "value") -> KLPenalty:
    """``k1 = s``: unbiased, can be negative; its own gradient has mean zero.

    The arguments are those of :func:`k3`.

    >>> k1(0.01, gradient="straight_through").gradient.name
    'STRAIGHT_THROUGH'
    """
    return _penalty(KLEstimator.K1, beta, gradient)


@examines
def k2(beta: float, gradient: str = "value") -> KLPenalty:
    """``k2 = s^2 / 2``: biased, low variance; its gradient ``s`` is the true reverse-KL gradient on-policy.

    The arguments are those of :func:`k3`.

    >>> k2(0.01).estimator.name
    'K2'
    """
    return _penalty(KLEstimator.K2, beta, gradient)


@examines
def k3(beta: float, gradient: str = "value") -> KLPenalty:
    """``k3 = e^-s - 1 + s``: unbiased, never negative, low variance. GRPO's penalty (arXiv 2402.03300).

    Args:
        beta: the coefficient, in loss units per nat.
        gradient: ``"value"``: the estimator's own, ``1 - e^-s``. ``"straight_through"``: the value of k3, the gradient
            ``s`` of k2 (verl's ``low_var_kl+``). ``"importance"``: ``r k3``, r the gate's ratio,
            ``e^(logp - old_logp)``, or ``e^(logp - rollout_logp)`` under a gate on ``Channel.TOTAL``, differentiated
            through r as well, ``r s`` (DeepSeek-V3.2, arXiv 2512.02556; TRL's ``use_bias_correction_kl``).

    >>> k3(0.04).beta
    0.04
    """
    return _penalty(KLEstimator.K3, beta, gradient)
