"""The penalty on the divergence from a reference policy: which estimator, and which gradient.

With ``s = logp - ref_logp`` on samples of the policy, ``E[k1] = E[k3] = KL(policy || reference)``. The value and the
gradient are two choices. The gradient of k1 as a loss has mean zero (no restoring force), the gradient of k2 is the
true reverse-KL gradient on-policy, and k3 has the gradient ``1 - e^-s``. Estimators:
http://joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from .batch import PackedBatch
from .checks import check, examines, require_type
from .metrics import slot
from .specs import KLEstimator, KLGradient, PolicyLossInputs

__all__ = ["KLPenalty", "k1", "k2", "k3"]

_GRADIENTS = {
    "value": KLGradient.VALUE,
    "straight_through": KLGradient.STRAIGHT_THROUGH,
    "importance": KLGradient.IMPORTANCE,
}


@dataclass(frozen=True)
class KLPenalty:
    """``beta * k(s)`` added to the loss of every valid token, without effect of token masks, windows and weights."""

    estimator: KLEstimator
    beta: float
    gradient: KLGradient


class WeightedPenalty(NamedTuple):
    """``sum_t m_t w[s(t)] c_t beta k(s_t)``: the penalty with a coefficient c of each token, beside the kernels, which
    know one for all."""

    kl: KLPenalty
    weights: torch.Tensor  # [T] w[s(t)] c_t, 0 where a token pays nothing
    factors: torch.Tensor  # [T] c_t, 0 where a token pays nothing
    ref_logp: torch.Tensor  # [T]
    old_logp: torch.Tensor | None  # [T]; None: on-policy

    @staticmethod
    def of(
        kl: KLPenalty, kl_weight: torch.Tensor, inputs: PolicyLossInputs, batch: PackedBatch, of_steps: bool
    ) -> WeightedPenalty:
        assert inputs.ref_logp is not None  # given together with the penalty
        row = batch.once(PackedBatch.row_of_token)
        flat = [None if each is None else each.reshape(-1) for each in (inputs.logp, inputs.ref_logp, inputs.old_logp)]
        logp, ref_logp, old_logp = flat
        assert logp is not None and ref_logp is not None
        pays = row >= 0 if inputs.mask is None else (row >= 0) & inputs.mask.reshape(-1)
        if of_steps:
            pays = pays & (batch.once(PackedBatch.step_of_token) >= 0)
        for other in (ref_logp, old_logp):
            pays = pays if other is None else pays & ~(logp.detach() - other).isnan()
        of_row = torch.cat((inputs.weights, inputs.weights.new_zeros(1)))[row].to(logp.dtype)
        factor = kl_weight.reshape(-1)
        factors = torch.where(pays & torch.isfinite(factor), factor, 0.0)
        weights = torch.where((factors != 0) & torch.isfinite(of_row), factors * of_row, 0.0)
        return WeightedPenalty(kl, weights, factors, ref_logp, old_logp)

    def __call__(self, logp: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The penalty, 0-dim and differentiable in logp, and the penalty of each token ``[T]``, detached."""
        from .reference.terms import kl_of_tokens, saturate  # of the definition, which calls without this do not load

        logp, pays = logp.reshape(-1), self.factors != 0
        own = torch.where(pays, logp, 0.0)
        s = saturate(own - torch.where(pays, self.ref_logp, 0.0), pays)
        x = saturate(own - (own.detach() if self.old_logp is None else torch.where(pays, self.old_logp, 0.0)), pays)
        k = self.kl.beta * kl_of_tokens(self.kl.estimator, self.kl.gradient, s, x)
        # The order of a cumulative sum does not depend on the number of threads.
        summed = torch.cat((k.new_zeros(1, dtype=torch.float64), (self.weights * k).double())).cumsum(0)[-1]
        return summed.to(logp.dtype), (self.factors * k).detach()

    def with_gradient(self, logp: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The penalty, and its derivative in the shape of logp."""
        with torch.inference_mode(False), torch.enable_grad():
            copies: dict[str, Any] = {
                name: each.clone() for name, each in self._asdict().items() if torch.is_tensor(each)
            }
            leaf = logp.detach().clone().requires_grad_()
            loss, _ = self._replace(**copies)(leaf)
            (grad,) = torch.autograd.grad(loss, leaf)
        return loss.detach(), grad

    def counted(self, vector: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """The metrics with this penalty among them."""
        added = torch.zeros_like(vector)
        for name in ("loss", "penalty"):
            added[slot(name)] = own.detach()
        return vector + added


def without_value(kl: KLPenalty) -> KLPenalty:
    """The penalty that kernels measure and do not add to the loss."""
    return replace(kl, beta=0.0)


def _penalty(estimator: KLEstimator, beta: float, gradient: str) -> KLPenalty:
    check(math.isfinite(beta), "beta: expected a finite number, got {}", beta)
    require_type(isinstance(gradient, str), "gradient: expected one of {}, got {!r}", ", ".join(_GRADIENTS), gradient)
    check(gradient in _GRADIENTS, "gradient: expected one of {}, got {!r}", ", ".join(_GRADIENTS), gradient)
    return KLPenalty(estimator, float(beta), _GRADIENTS[gradient])


@examines
def k1(beta: float, gradient: str = "value") -> KLPenalty:
    """``k1 = s``: unbiased, can be negative; its own gradient has mean zero. See :func:`k3` for ``gradient``."""
    return _penalty(KLEstimator.K1, beta, gradient)


@examines
def k2(beta: float, gradient: str = "value") -> KLPenalty:
    """``k2 = s^2 / 2``: biased, low variance; its gradient ``s`` is the true reverse-KL gradient on-policy."""
    return _penalty(KLEstimator.K2, beta, gradient)


@examines
def k3(beta: float, gradient: str = "value") -> KLPenalty:
    """``k3 = e^-s - 1 + s``: unbiased, never negative, low variance. GRPO's penalty (arXiv 2402.03300).

    Args:
        beta: the coefficient, in loss units per nat.
        gradient: ``"value"``: the estimator's own, ``1 - e^-s``. ``"straight_through"``: the value of k3, the gradient
            ``s`` of k2 (verl's ``low_var_kl+``). ``"importance"``: ``r k3`` with ``r = e^(logp - old_logp)``,
            differentiated through r as well, ``r s`` (DeepSeek-V3.2, arXiv 2512.02556; TRL's
            ``use_bias_correction_kl``).

    >>> k3(0.04).beta
    0.04
    """
    return _penalty(KLEstimator.K3, beta, gradient)
