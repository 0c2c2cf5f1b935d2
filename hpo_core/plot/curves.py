"""The gradient of a token under a gate."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from ..arguments import check_finite, examines
from ..batch import PackedBatch
from ..checks import REFERENCE, check
from ..gates import RatioGate
from ..losses import policy_loss_and_grad
from .canvas import BLUE, GREY, RED, axes_of, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@examines
def gate_curve(
    gate: RatioGate,
    *,
    ratios: tuple[float, float] = (0.5, 1.6),
    tokens: int = 1,
    alone: bool = False,
    old_logp: float = -2.0,
    points: int = 441,
    axes: Axes | None = None,
) -> Axes:
    """The slope of the objective against the ratio, for advantages of 1 and of -1: the effect of a gate on a gradient.

    ``slope = d objective / d logp``, minus the gradient of the loss: A where the gate lets a ratio of 1 pass, 0 where
    it stops the token, and of PPO's surrogate ``A r`` between its bounds.

    Args:
        gate: a RatioGate whose inputs are the batch alone; one that ``needs`` others is refused as by the loss.
        ratios: the least and the greatest ratio, above 0 and finite. Gates of sequences want a closer look:
            ``(0.999, 1.001)``.
        tokens: in the trajectory of the token, which is also its step, group and domain. Default: it alone.
        alone: True: one of the tokens has the ratio and the others have 1, so that a level hardly moves and the gate on
            the token's residual shows; the slope is that in its own log-probability. False: all move together, and the
            objective is their mean.
        old_logp: of each token, which only gates that look at probabilities read.
        points: on each of the two lines.
        axes: to draw on. Default: new ones.

    Returns:
        The Axes; its two lines are labelled ``A = 1`` and ``A = -1``.

    Raises:
        ValueError, TypeError: naming the argument; ImportError: without matplotlib.

    >>> import hpo_core as hpo
    >>> axes = gate_curve(hpo.gates.ppo_clip(), ratios=(0.55, 1.55), points=11)
    >>> [round(float(slope), 2) for slope in axes.lines[0].get_ydata()]
    [0.55, 0.65, 0.75, 0.85, 0.95, 1.05, 1.15, 0.0, 0.0, 0.0, 0.0]
    """
    low, high = ratios
    check(0 < low < high < math.inf, "ratios: expected 0 < least < greatest < inf, got {}", ratios)
    check_finite(old_logp=old_logp)
    check(tokens >= 1 and (tokens > 1 or not alone), "tokens: expected at least 1, with alone=True 2, got {}", tokens)
    check(points >= 2, "points: expected at least 2, got {}", points)
    ratio = torch.linspace(low, high, points, dtype=torch.float64)
    slopes = {advantage: _slopes(gate, ratio, advantage, tokens, alone, old_logp) for advantage in (1.0, -1.0)}
    ax = axes_of("gate_curve", axes, (5.6, 3.6))
    for (advantage, slope), colour, style in zip(slopes.items(), (BLUE, RED), ("-", "--"), strict=True):
        ax.plot(ratio.tolist(), slope.tolist(), style, color=colour, lw=1.8, label=f"A = {advantage:g}")
    ax.axhline(0, color="black", lw=0.6)
    ax.axvline(1, color=GREY, lw=0.8, ls=":")
    moved = "ratio of the token" if tokens == 1 else "ratio of one token" if alone else f"ratio of all {tokens} tokens"
    ax.set(xlabel=f"{moved}, e^(logp - old_logp)", ylabel="d objective / d logp")
    title(ax, gate.name)
    ax.legend(frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
    return ax  # type: ignore[no-any-return]


def _slopes(
    gate: RatioGate, ratio: torch.Tensor, advantage: float, tokens: int, alone: bool, old_logp: float
) -> torch.Tensor:
    rows = ratio.numel()
    ids = torch.arange(rows)
    offsets = torch.arange(rows + 1) * tokens
    batch = PackedBatch(offsets, cu_steps=offsets, group_ids=ids, domain_ids=ids)
    old = torch.full((rows, tokens), old_logp, dtype=torch.float64)
    moved = torch.zeros_like(old)
    moved[:, : 1 if alone else tokens] = ratio.log()[:, None]
    out = policy_loss_and_grad(
        (old + moved).flatten(),
        old.flatten(),
        torch.full((rows,), advantage, dtype=torch.float64),
        batch,
        gate,
        weights=torch.full((rows,), 1.0 if alone else 1.0 / tokens, dtype=torch.float64),
        backend=REFERENCE,
    )
    grad = -out.grad.reshape(rows, tokens)
    return grad[:, 0] if alone else grad.sum(1)
