"""BAPO: PPO's clip with bounds that balance the contributions of positive and negative advantages."""

from __future__ import annotations

import math

import torch
from torch.distributed import ProcessGroup

from ..arguments import check_all_finite, examines
from ..batch import PackedBatch, as_batch, valid_tokens
from ..checks import check
from ..distributed import gather, sum_in_order
from .inputs import check_policies, of_tokens, per_token
from .ratio_gate import GateInputs, RatioGate
from .token_level import ppo_clip, renamed


@examines
def bapo(ratio_dual: float | None = 3.0) -> RatioGate:
    """PPO's clip with bounds that balance positive and negative advantages (arXiv 2510.18927; its code): pass
    ``gate_inputs=bapo_bounds(logp, old_logp, advantages, batch)``.

    Args:
        ratio_dual: of the ratio for ``A < 0``, 3 as in the code, which is verl's default.

    >>> bapo().token.high
    (1.2, 3.0)
    """
    gate = ppo_clip(0.4, 0.2, ratio_dual)
    return renamed("bapo", gate, "arXiv 2510.18927", bounds="gates.bapo_bounds(logp, old_logp, advantages, batch)")


@of_tokens
def bapo_bounds(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    advantages: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    *,
    target: float = 1.0,
    low: tuple[float, float] = (0.6, 0.8),
    high: tuple[float, float] = (1.2, 2.0),
    step: float = 0.05,
    advantage_level: str | None = None,
    process_group: ProcessGroup | None = None,
) -> GateInputs:
    """One pair of bounds, at which tokens with ``A > 0`` contribute enough beside those with ``A < 0``: for
    :func:`bapo` (arXiv 2510.18927; its code).

    ``P(h)`` is the sum of ``A min(r, h)`` over valid tokens with ``A > 0``, ``N(l)`` that of ``|A| max(r, l)`` where
    ``A < 0``. The bounds stay at ``low[0]`` and ``high[0]`` if ``P >= target N`` there. If not, the lower one goes to
    ``low[1]``, and the upper one rises by steps to the first with ``P(h) >= target N(low[1])``, at most to ``high[1]``.

    Args:
        logp: of the current policy: the bounds belong to this minibatch.
        target: of P over N; 1, the code's, is the paper's share of 0.5.
        low, high: ratios at which the bounds begin and end; (0.6, 0.8) and (1.2, 2.0) as in the recipe. Its README has
            (0.6, 0.9) and (1.2, 3.0), those of the paper.
        step: 0.05, the code's, by which it raises the lower bound, too, before it looks at the upper one: since
            N grows with the lower bound, this never reaches the target, and all steps are taken.
        advantage_level: as in :func:`~hpo_core.policy_loss`.
        process_group: sums P and N over these ranks, which then have the same bounds (the code uses all ranks).

    A token whose advantage or ratio is not a finite number has no say.

    >>> ratio, batch = torch.tensor([3.0, 0.5]), PackedBatch.from_lengths([1, 1])
    >>> low, high = bapo_bounds(ratio.log(), torch.zeros(2), torch.tensor([1.0, -2.1]), batch).bounds
    >>> low, high
    (tensor([0.8000, 0.8000]), tensor([1.7000, 1.7000]))
    """
    batch = as_batch(batch)
    check(0 <= target < math.inf, "target: expected a ratio >= 0, got {}", target)
    check(0 <= low[0] <= low[1] <= 1, "low: expected two ascending ratios in [0, 1], got {}", low)
    check(1 <= high[0] <= high[1] < math.inf, "high: expected two ascending ratios >= 1, got {}", high)
    check_all_finite("high", high)
    check(0 < step < math.inf, "step: expected a number > 0, got {}", step)
    check(
        high[1] - high[0] <= 10_000 * step,
        "step: expected at most 10,000 steps from {} to {}, got {}; take a larger step",
        *high,
        step,
    )
    check_policies(batch, logp, old_logp)
    advantage = per_token(advantages, batch, advantage_level).double()
    ratio = (logp.detach().double() - old_logp.double()).clamp(-20, 20).exp()  # as verl does
    counted = valid_tokens(batch) & (advantage.abs() < torch.inf) & ~ratio.isnan()
    negative, positive = (torch.where(counted, (sign * advantage).clamp(min=0), 0.0) for sign in (-1, 1))
    ratio = torch.where(counted, ratio, 0.0)
    heights = [high[0]]
    while heights[-1] < high[1]:
        heights.append(min(heights[-1] + step, high[1]))

    sums = [sum_in_order(ratio.clamp(min=lower).mul_(negative)) for lower in low]
    sums += [sum_in_order(ratio.clamp(max=upper).mul_(positive)) for upper in heights]
    every = torch.stack(sums)
    if process_group is not None:
        every = sum_in_order(torch.stack(gather(every, process_group), -1))
    (begin, end), pulled = every[:2], every[2:]
    stays = pulled[0] >= target * begin
    widest = torch.full_like(end, high[1])
    for height, contributed in zip(reversed(heights), reversed(pulled.unbind()), strict=True):
        widest = torch.where(contributed >= target * end, height, widest)  # a search on the host would synchronise
    lower, upper = torch.where(stays, low[0], torch.full_like(end, low[1])), torch.where(stays, high[0], widest)
    return GateInputs(bounds=(lower.float().repeat(logp.numel()), upper.float().repeat(logp.numel())))
