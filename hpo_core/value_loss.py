"""The loss of a critic, whose values some estimators of :mod:`hpo_core.advantages` take."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from . import aggregation
from .arguments import examines
from .batch import PackedBatch, as_batch, spread_rows, valid_tokens
from .checks import check, check_device, check_precise, check_shape_of_tokens, checked_constant
from .distributed import sum_in_order
from .metrics import Observations, is_debugging, ratio

_FLAG = "at a valid token a value, old value, return or weight was NaN or infinite; the token was left out"


@dataclass(frozen=True, eq=False, repr=False)
class ValueMetrics(Observations):
    """The observations of one :func:`~hpo_core.value_loss`, or the sum of several, still on the device.

    ``vector`` is float64. Vectors of micro-batches and ranks combine by ``+`` and ``all_reduce``.

    >>> import torch, hpo_core as hpo
    >>> batch = hpo.PackedBatch.from_lengths([2])
    >>> out = hpo.value_loss(torch.tensor([0.5, 1.0]), torch.tensor([0.0, 1.0]), batch)
    >>> report = out.metrics.compute()
    >>> report["mean_squared_error"], report["explained_variance"]
    (0.125, 0.75)
    """

    SLOTS: ClassVar[dict[str, str]] = {
        "tokens": "sum",  # valid tokens
        "loss": "sum",
        "clipped": "sum",  # tokens that the clip leaves without a gradient
        "value": "sum",
        "return": "sum",
        "return_square": "sum",
        "error": "sum",  # of value - return
        "error_square": "sum",
        "broken_tokens": "sum",  # valid tokens that are left out
    }

    def raise_for_flags(self) -> None:
        """Raise a ``FloatingPointError`` if tokens were left out; a copy to the host. Every call does this under
        ``HPO_CORE_DEBUG=1``."""
        broken = int(self["broken_tokens"])
        if broken:
            raise FloatingPointError(f"hpo_core.value_loss: broken_tokens = {broken}: {_FLAG}")

    def compute(self) -> dict[str, float]:
        """Means, fractions and counts as Python floats: the only copy to the host. Empty denominators give NaN.

        ``explained_variance`` is ``1 - Var(V - R) / Var(R)`` over all tokens, NaN where all returns are equal.
        """
        raw = dict(zip(self.SLOTS, self.vector.tolist(), strict=True))
        counted = raw["tokens"] - raw["broken_tokens"]
        unexplained = raw["error_square"] - ratio(raw["error"] ** 2, counted)
        spread = raw["return_square"] - ratio(raw["return"] ** 2, counted)
        varies = spread > 1e-12 * raw["return_square"]  # else it is the rounding of the sums
        return {
            "loss": raw["loss"],
            "tokens": raw["tokens"],
            "clip_fraction": ratio(raw["clipped"], counted),
            "value_mean": ratio(raw["value"], counted),
            "return_mean": ratio(raw["return"], counted),
            "mean_squared_error": ratio(raw["error_square"], counted),
            "explained_variance": 1 - unexplained / spread if varies else math.nan,
            "broken_tokens": raw["broken_tokens"],
        }


class ValueLoss(NamedTuple):
    """The result: ``loss`` 0-dim, differentiable in values; ``metrics`` still on the device."""

    loss: torch.Tensor
    metrics: ValueMetrics


@examines
def value_loss(
    values: torch.Tensor,
    returns: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    *,
    old_values: torch.Tensor | None = None,
    clip: float | None = None,
    weights: torch.Tensor | None = None,
) -> ValueLoss:
    """The squared error of a critic, clipped as in PPO: ``loss = sum_t m_t w[s(t)] loss_t``.

    ``loss_t = max((V - R)^2, (C - R)^2) / 2`` with ``C = clamp(V, V_old - clip, V_old + clip)``, without ``old_values``
    ``(V - R)^2 / 2``; m_t is 1 for valid tokens, else 0, and w[s(t)] the entry of ``weights`` for the row of token t.
    The gradient is ``w (V - R)``, and 0 where V lies beyond the clip and nearer to the return than C: it has moved far
    enough. The loss is made of operations of PyTorch on any device, in float64; second derivatives exist.

    Args:
        values: ``[T]`` (or the padded ``[B, L]``) float32 or float64, V of the current critic.
        returns: the same shape, R: ``token_gae(..., whitened=False) + old_values``, or those of another lambda.
        batch: a PackedBatch, or a padded mask ``[B, L]``. Values at masked positions are never read.
        old_values, clip: the critic before the update, and how far V may move from it, in units of values; both or
            neither. verl takes 0.5, TRL's PPO 0.2.
        weights: ``[S]`` float32 from :mod:`hpo_core.aggregation`, as in :func:`~hpo_core.policy_loss`. Default:
            ``aggregation.token_mean(batch)``, where the batch is the whole optimiser step.

    A critic of steps has a batch of its own: rows are trajectories, and their tokens the steps.

    A token whose value, old value, return or weight is NaN or infinite is left out, and counted in the metrics.

    Traps: the factor 1/2 is that of verl and TRL; a coefficient of a trainer without it is half of one here. Returns
    are made of advantages before these are whitened.

    Raises:
        ValueError, TypeError: naming the argument, the expected and given values, and the fix.

    >>> import hpo_core as hpo
    >>> batch = hpo.PackedBatch.from_lengths([3])
    >>> values, old_values = torch.tensor([0.0, 0.5, 0.9], requires_grad=True), torch.zeros(3)
    >>> out = value_loss(values, torch.tensor([1.0, 1.0, 0.0]), batch, old_values=old_values, clip=0.2)
    >>> out.loss.backward()
    >>> values.grad, round(out.metrics.compute()["clip_fraction"], 4)  # the second has moved far enough
    (tensor([-0.3333,  0.0000,  0.3000]), 0.3333)

    The clip is that of the code of PPO (arXiv 2005.12729), not of its paper.
    """
    batch = as_batch(batch)
    check_precise("values", values, "use values.float()")
    check_shape_of_tokens("values", values, batch)
    check_device("values", values, batch.device, "the batch")
    check(
        (old_values is None) == (clip is None),
        "old_values, clip: expected both or neither, got {} alone; pass the other, or drop it",
        "old_values" if clip is None else "clip",
    )
    check(clip is None or 0 <= clip < math.inf, "clip: expected a finite distance >= 0, got {}", clip)

    def constant(name: str, tensor: torch.Tensor) -> torch.Tensor:
        meaning = "[T] (that of values)"
        return checked_constant(name, tensor, values.shape, meaning, values.dtype, values.device, "values").flatten()

    value, target = values.flatten(), constant("returns", returns)
    old = None if old_values is None else constant("old_values", old_values)
    if weights is None:
        weights = aggregation.default(batch, of_steps=False)
    weights = checked_constant(
        "weights", weights, (batch.rows,), "[S] (one per row)", torch.float32, values.device, "values"
    )

    valid, weight = valid_tokens(batch), spread_rows(weights, batch, 0.0)
    counted = valid & value.isfinite() & target.isfinite() & weight.isfinite()
    if old is not None:
        counted = counted & old.isfinite()

    def kept(tensor: torch.Tensor) -> torch.Tensor:
        # Selects, so that NaN at a masked position changes no bit and gets the gradient 0.
        return torch.where(counted, tensor, 0.0).double()

    value, target, weight = kept(value), kept(target), kept(weight)
    error = value - target
    larger, clipped = error, torch.zeros_like(counted)
    if old is not None and clip is not None:
        before = kept(old)
        of_clipped = value.detach().clamp(before - clip, before + clip) - target
        clipped = of_clipped.abs() > error.abs()
        larger = torch.where(clipped, of_clipped, error)  # clipped tokens get the gradient +0
    loss = sum_in_order(weight * (0.5 * larger.square()))

    value, error = value.detach(), error.detach()
    sums = (valid, clipped, value, target, target.square(), error, error.square(), valid & ~counted)
    tokens, *rest = sum_in_order(torch.stack([each.double() for each in sums])).unbind()
    metrics = ValueMetrics(torch.stack([tokens, loss.detach(), *rest]))
    if is_debugging():
        metrics.raise_for_flags()
    return ValueLoss(loss.to(values.dtype), metrics)
