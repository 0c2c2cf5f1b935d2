"""M2PO: the mean square of the log-ratios of a step held down, as AReaL does it and as the authors of the method do."""

from __future__ import annotations

import math

import torch
from torch.distributed import ProcessGroup

from ..arguments import check_finite, examines
from ..batch import PackedBatch, as_batch, valid_tokens
from ..checks import check
from ..distributed import gather, place_of_own, running_sum
from ..specs import Provenance
from .inputs import check_policies, of_tokens, per_token
from .parts import Identity
from .ratio_gate import GateInputs, RatioGate
from .token_level import ppo_clip, renamed


def m2po() -> RatioGate:
    """M2PO: ``loss_t = -r A`` on the tokens that keep the mean squared log-ratio small: pass
    ``gate_inputs=m2po_mask(...)`` (arXiv 2510.01161 as AReaL has it). The authors' code: :func:`m2po_clip`.

    >>> m2po().takes_bounds
    False
    """
    needs = (("token_mask", "gates.m2po_mask(logp, old_logp, batch)"),)
    return RatioGate("m2po", Identity(), needs=needs, source="AReaL", provenance=Provenance.VERIFIED)


@examines
def m2po_clip(ratio_dual: float | None = None) -> RatioGate:
    """PPO's clip with the bounds of M2PO's authors, which hold the mean squared log-ratio: pass
    ``gate_inputs=m2po_bounds(...)`` (arXiv 2510.01161; its code).

    Args:
        ratio_dual: as in :func:`ppo_clip`; none there.

    :func:`m2po`, AReaL's form, leaves tokens out on either side of every advantage and clips none.

    >>> m2po_clip().needs[0]
    ('bounds', 'gates.m2po_bounds(logp, old_logp, advantages, batch)')
    """
    bounds = "gates.m2po_bounds(logp, old_logp, advantages, batch)"
    return renamed("m2po_clip", ppo_clip(ratio_dual=ratio_dual), "arXiv 2510.01161", bounds=bounds)


@of_tokens
def m2po_mask(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    threshold: float = 0.04,
    *,
    process_group: ProcessGroup | None = None,
) -> GateInputs:
    """``gate_inputs`` for :func:`m2po`: a mask without the largest log-ratios, until the mean of the other squares is
    below ``threshold`` (arXiv 2510.01161 as AReaL has it; 0.04). The smallest stays, whatever it is, as there.
    ``process_group``: the mean is that of the tokens of these ranks together, whose log-ratios it gathers.

    Traps: AReaL takes the ratio of the proximal policy to the sampler, which no step of the minibatches moves:
    ``m2po_mask(old_logp, rollout_logp, batch)``, and keeps PPO's clip: ``ppo_clip`` with this mask. The authors' own
    code bounds the tokens that PPO would clip and no others: :func:`m2po_bounds`.

    >>> m2po_mask(torch.tensor([0.1, 0.9, -0.1]), torch.zeros(3), PackedBatch.from_lengths([3])).token_mask
    tensor([ True, False,  True])
    """
    batch = as_batch(batch)
    check(threshold >= 0, "threshold: expected a mean square >= 0, got {}", threshold)
    check_policies(batch, logp, old_logp)
    valid = valid_tokens(batch)
    every, own = _of_ranks(torch.where(valid, (logp.detach() - old_logp).abs(), torch.inf), process_group)
    ordered, order = _ascending(every)
    means = running_sum(ordered.double().square()) / torch.arange(1, ordered.numel() + 1, device=ordered.device)
    kept = means < threshold  # means of ascending numbers ascend
    kept[:1] = True
    return GateInputs(token_mask=torch.empty_like(kept).scatter_(0, order, kept)[own] & valid)


@of_tokens
def m2po_bounds(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    advantages: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    *,
    budget: float = 0.04,
    advantage_level: str | None = None,
    process_group: ProcessGroup | None = None,
) -> GateInputs:
    """One pair of bounds ``exp(-+ tau)`` for :func:`m2po_clip`, within which the tokens that run ahead of their
    advantage stay near the old policy in the mean square (arXiv 2510.01161; its code).

    Of the n tokens with ``A x > 0``, x the log-ratio, tau is the largest ``|x|`` at which the mean of
    ``min(x^2, tau^2)`` is below ``budget``; 0 where there is none. There is no bound where the mean of ``x^2`` is at
    most ``budget``.

    Args:
        logp: of the current policy: the bounds belong to this minibatch.
        budget: 0.04 as in the recipes, which set no least width of the clip either.
        advantage_level: as in :func:`~hpo_core.policy_loss`.
        process_group: the tokens are those of these ranks together, which gather their log-ratios; the bounds are one.

    A token whose advantage or log-ratio is not finite has no say. The token that tau is of passes (in the code rounding
    decides): the bounds lie a millionth outside.

    >>> x, batch = torch.tensor([0.1, 0.2, 0.5, -0.3]), PackedBatch.from_lengths([4])
    >>> low, high = m2po_bounds(x, torch.zeros(4), torch.tensor([1.0]), batch).bounds
    >>> low, high
    (tensor([0.8187, 0.8187, 0.8187, 0.8187]), tensor([1.2214, 1.2214, 1.2214, 1.2214]))
    """
    batch = as_batch(batch)
    check(0 <= budget < math.inf, "budget: expected a mean square >= 0, got {}", budget)
    check_finite(budget=budget)
    check_policies(batch, logp, old_logp)
    advantage, x = per_token(advantages, batch, advantage_level), (logp.double() - old_logp.double()).detach()
    moved = advantage.sign() * x
    ahead = valid_tokens(batch) & (advantage.abs() < torch.inf) & (moved > 0) & (moved < torch.inf)
    ordered = _ascending(_of_ranks(torch.where(ahead, moved, torch.inf), process_group)[0])[0].square()
    n, place = ordered.isfinite().sum(), torch.arange(ordered.numel(), device=ordered.device)
    known = torch.where(place < n, ordered, 0.0)
    added = running_sum(known)
    capped = added + known * (n - place - 1)  # the sum of min(x^2, tau^2) for each x as tau; it ascends
    within = ((place < n) & (capped < budget * n)).sum()
    tau = torch.cat((known.new_zeros(1), known)).gather(0, within.reshape(1)).sqrt()
    tau = torch.where(within > 0, tau + 1e-6 * (1 + tau), tau)  # kernels round the ratio of the token that tau is of
    tau = torch.where((added <= budget * n).all(), torch.inf, tau)
    low, high = (each.exp().float().repeat(logp.numel()) for each in (-tau, tau))
    return GateInputs(bounds=(low, high))


def _ascending(sizes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers without a sign in ascending order, equal ones as they stand, and where each was. Their bits have the same
    order, and integers are sorted by their digits."""
    of_bits = torch.int32 if sizes.dtype == torch.float32 else torch.int64
    ordered, order = sizes.view(of_bits).sort(stable=True)
    return ordered.view(sizes.dtype), order


def _of_ranks(own: torch.Tensor, group: ProcessGroup | None) -> tuple[torch.Tensor, slice]:
    """The numbers of the tokens of all ranks, one rank after the other, and where among them those of this rank are."""
    if group is None:
        return own, slice(None)
    parts = gather(own, group)
    return torch.cat(parts), place_of_own(parts, group)
