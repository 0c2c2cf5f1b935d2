"""FIPO: PPO's objective of a token, times how far the policy moved on the tokens that follow."""

from __future__ import annotations

import math

import torch

from .. import ops
from ..arguments import check_limit, examines
from ..batch import PackedBatch, as_batch, row_counts, spread_rows, valid_tokens
from ..checks import check
from .inputs import check_policies, of_tokens, per_token
from .ratio_gate import GateInputs, RatioGate
from .token_level import check_epsilons, ppo_clip, renamed

_LEAST_LOG = -20.0  # of a token's log-ratio in the sum, as in the code
_UNSAFE = (0.8, 1.0)  # where the weight of a mistake that became likely is held, as in the code


@examines
def fipo(eps_low: float = 0.2, eps_high: float = 0.28, ratio_dual: float = 10.0) -> RatioGate:
    """FIPO, future-KL influenced: PPO's clip with the dual clip, ``f`` times its objective: pass
    ``gate_inputs=fipo_weight(logp, old_logp, advantages, batch)`` (arXiv 2603.19835).

    ``loss_t = -f_t min(r A, clip(r) A)``, for ``A < 0`` at least ``ratio_dual A``; f is a constant of the
    differentiation, and 1 on-policy.

    Args:
        eps_low, eps_high, ratio_dual: 0.2, 0.28 and 10 as in the authors' recipe; verl's default dual clip is 3.

    Traps: without several updates per rollout ``logp`` is ``old_logp``, every f is 1 and this is DAPO.

    >>> fipo().needs[0][0]
    'token_weight'
    """
    weight = "gates.fipo_weight(logp, old_logp, advantages, batch)"
    return renamed("fipo", ppo_clip(eps_low, eps_high, ratio_dual), "arXiv 2603.19835", token_weight=weight)


@of_tokens
def fipo_weight(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    advantages: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    *,
    half_life: float = 32.0,
    eps_low: float = 0.0,
    eps_high: float = 0.2,
    ratio_dual: float = 10.0,
    ratio_unsafe: float = 10.0,
    most_dual: int = 1,
    advantage_level: str | None = None,
) -> GateInputs:
    """``gate_inputs`` for :func:`fipo`: the weights f, and a mask without the rows that the dual clip touches too often
    (arXiv 2603.19835 and its code).

    ``f_t = clip(exp(sum over k >= t of the row of M_k 2^(-(k - t) / half_life) log r_k), 1 - eps_low, 1 + eps_high)``;
    ``M_k = 0`` at masked tokens and where ``r_k > ratio_dual``. Where ``A < 0`` and ``r > ratio_unsafe`` f is held
    within [0.8, 1]. A row is left out that has more than ``most_dual`` tokens with ``A < 0`` and ``r > ratio_dual``.

    Args:
        logp, old_logp: ``[T]``, of the current policy and of the rollout.
        advantages, advantage_level: as in :func:`~hpo_core.policy_loss`.
        half_life: in tokens, 32 in the recipe. Masked tokens count as distance.
        eps_low, eps_high: epsilons of f, 0 and 0.2: the recipe for 32 billion parameters lets f only rise. The paper's
            form, and the code for smaller models, has both: 0.2 and 0.2.
        ratio_dual: that of the gate, 10 in the recipe.
        ratio_unsafe: 10 in the recipe, 4 by default in the code.

    A token whose log-ratio is not a number adds nothing to the sums of those before it.

    Traps: the row must be whole. f is made of the current policy: compute it in each micro-batch. The code divides by
    the tokens of the rows that stay: ``weights=aggregation.token_mean(batch, selected=inputs.token_mask)``.

    >>> logp, old_logp = torch.tensor([-1.0, -1.0, -0.9, -1.2]), torch.full((4,), -1.0)
    >>> inputs = fipo_weight(logp, old_logp, torch.tensor([1.0]), PackedBatch.from_lengths([4]), half_life=1.0)
    >>> inputs.token_weight  # exp of 0, 0, 0 and -0.2, and of nothing below 1
    tensor([1., 1., 1., 1.])
    >>> fipo_weight(old_logp, logp, torch.tensor([1.0]), PackedBatch.from_lengths([4]), half_life=1.0).token_weight
    tensor([1.0000, 1.0000, 1.0000, 1.2000])
    """
    batch = as_batch(batch)
    for name, value in (("half_life", half_life), ("ratio_unsafe", ratio_unsafe)):
        check(value > 0, "{}: expected a number above 0, got {}", name, value)
    check(ratio_dual >= 1, "ratio_dual: expected a factor >= 1, got {}", ratio_dual)
    check_epsilons(eps_low, eps_high)
    check_limit("eps_high", eps_high)
    check_policies(batch, logp, old_logp)
    valid = valid_tokens(batch)
    negative = valid & (per_token(advantages, batch, advantage_level) < 0)
    x = torch.where(valid, logp.detach() - old_logp.detach(), 0.0)
    beyond = x > math.log(ratio_dual)
    counted = torch.where(beyond, 0.0, x).nan_to_num(0.0, neginf=_LEAST_LOG).clamp(min=_LEAST_LOG)
    counted = counted.double()
    decay = torch.full_like(counted, 2.0 ** (-1.0 / half_life))
    future = ops.recurrence(counted, decay, batch.cu_seqlens, None).float()
    weight = future.exp().clamp(1.0 - eps_low, 1.0 + eps_high)
    weight = torch.where(negative & (x > math.log(ratio_unsafe)), weight.clamp(*_UNSAFE), weight)
    often = spread_rows(row_counts(batch, negative & beyond) > most_dual, batch, False)
    return GateInputs(token_mask=valid & ~often, token_weight=weight.to(logp.dtype))
