"""The one map from scores to weights: piecewise linear with two knots, between two limits."""

from __future__ import annotations

import torch

from ..arguments import check_pair, examines
from ..checks import check_floating

Number = float | torch.Tensor


@examines
def two_knot(
    x: torch.Tensor,
    base: Number = 0.0,
    *,
    low: tuple[Number, Number] = (0.0, 0.0),
    high: tuple[Number, Number] = (0.0, 0.0),
    least: Number | None = None,
    most: Number | None = None,
) -> torch.Tensor:
    """``clamp(base + g_low min(x - p_low, 0) + g_high max(x - p_high, 0), least, most)``.

    Weights, bounds, addends and penalties of every entropy method are this map of a score, of its logarithm or of its
    exponential. Differentiable in x, with slope 0 at the knots.

    Args:
        x: ``[T]``, or one per unit.
        base: the value between the knots.
        low, high: ``(p, g)``, a knot and the gain beyond it. Every number may be a tensor that broadcasts with x.
        least, most: limits, none by default.

    >>> two_knot(torch.tensor([0.25, 0.5, 2.0]), 1.0, low=(0.5, -1.0), high=(1.0, 2.0))
    tensor([1.2500, 1.0000, 3.0000])
    """
    check_floating("x", x)
    check_pair("low", low, "(knot, gain)")
    check_pair("high", high, "(knot, gain)")
    (p_low, g_low), (p_high, g_high) = low, high
    value = base + g_low * -torch.relu(p_low - x) + g_high * torch.relu(x - p_high)
    if least is not None:
        value = torch.clamp(value, min=least)
    if most is not None:
        value = torch.clamp(value, max=most)
    return value
