"""OneRec-V2's GBPO: token ratios whose denominator bounds the gradient."""

from __future__ import annotations

import torch

from ..batch import PackedBatch, as_batch, valid_tokens
from .inputs import check_policies, of_logps, per_token


@of_logps
def gbpo_onerec_old_logp(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    advantages: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    *,
    advantage_level: str | None = None,
) -> torch.Tensor:
    """``old_logp`` ``[T]`` for OneRec-V2's GBPO, gradient-bounded policy optimisation: ``log max(q, p)`` where
    ``A >= 0`` and ``log max(q, 1 - p)`` where ``A < 0``, q the old and p the current probability of the token (arXiv
    2508.20900).

    Under ``ppo_clip(1.0, math.inf)``, which has no bounds, the loss is ``-A p / max(q, p)`` or
    ``-A p / max(q, 1 - p)`` with a constant denominator. Every token keeps its gradient: for ``A >= 0``
    ``-w A min(r, 1)``, for ``A < 0`` at most that of a binary cross-entropy, ``w |A| p / (1 - p)``, which is small
    where the token has become unlikely.

    Args:
        logp: ``[T]`` of the current policy: the result belongs to this minibatch.
        old_logp: ``[T]``; in the paper also ``logp`` itself where the sampler's probabilities are unknown.
        advantage_level: as in the loss.

    A token whose ``logp`` is not finite keeps its ``old_logp``, and one whose ``old_logp`` is NaN has NaN, so that the
    loss counts them. An ``old_logp`` of -inf is a q of 0.

    Traps: on-policy the ratio of an unlikely token with ``A < 0`` is ``p / (1 - p)``, not 1, so that ``first_order``
    promises nothing here, and log-ratios in the metrics are those to the denominator. The paper has no KL and takes
    advantages of 1, -1 and 0; :func:`gbpo` is another method.

    >>> batch, half = PackedBatch.from_lengths([1, 1]), torch.tensor([0.5, 0.5]).log()
    >>> gbpo_onerec_old_logp(torch.tensor([0.8, 0.2]).log(), half, torch.tensor([1.0, -1.0]), batch).exp()
    tensor([0.8000, 0.8000])
    """
    batch = as_batch(batch)
    check_policies(batch, logp, old_logp)
    valid, new, old = valid_tokens(batch), logp.detach(), old_logp.detach()
    known = valid & new.isfinite()
    log_p = torch.where(known, new, -1.0)
    log_rest = (-torch.expm1(log_p.clamp(max=0))).log()  # log (1 - p)
    denominator = torch.where(per_token(advantages, batch, advantage_level) < 0, log_rest, log_p)
    return torch.where(known, torch.maximum(old, denominator.to(old.dtype)), torch.where(valid, old, 0.0))
