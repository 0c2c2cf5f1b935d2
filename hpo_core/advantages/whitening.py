"""Advantages centred and scaled over the batch, whatever their groups."""

from __future__ import annotations

import torch

from ..arguments import examines
from ..checks import check_units
from ..specs import EpsMode, GroupTerm, Provenance
from .flat import dr_grpo
from .terms import Term, combine, estimator, grouped, scorable


@examines
def whiten(
    advantages: torch.Tensor,
    lengths: torch.Tensor | None = None,
    *,
    mask: torch.Tensor | None = None,
    eps: float = 1e-8,
    backend: str | None = None,
) -> torch.Tensor:
    """Advantages of units centred and scaled over the batch, ddof 1: ``(A - mean) / (std + eps)``. Returns ``[S]``
    float32.

    With ``lengths`` ``[S]``, the tokens of each unit, statistics count a unit once for each of its tokens:
    ``(A - mean) / sqrt(var + eps)``. Trainers do the same to token advantages (verl's ``masked_whiten``, but for
    its 1e-8 beside counts): a value that is constant on a unit needs no ``[T]``.

    >>> whiten(torch.tensor([1.0, 2.0, 3.0]))
    tensor([-1.,  0.,  1.])
    """
    rule = GroupTerm(eps=eps, eps_mode=EpsMode.ADD if lengths is None else EpsMode.SQRT)
    check_units(advantages=advantages, lengths=lengths, mask=mask)
    return combine([Term(advantages, None, rule, lengths)], mask=mask, backend=backend)


@estimator(Provenance.VERIFIED, tables=True)
def reinforce_pp_baseline(
    rewards: torch.Tensor,
    group_ids: torch.Tensor | None,
    lengths: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    singleton: str = "raw",
    backend: str | None = None,
) -> torch.Tensor:
    """REINFORCE++-baseline: ``a = r - mean_g``, whitened over the batch's tokens (arXiv 2501.03262). Returns ``[S]``
    float32.

    Args:
        lengths: ``[S]`` floating point, tokens of each response: the batch's statistics are those of tokens.
        singleton: verl keeps the raw reward of a group of one; ``"zero"`` starts from 0.

    Traps: the whitening moves a group of equal rewards off 0, where the mean over the tokens of the batch is not 0.

    >>> r, ids = torch.tensor([1.0, 0, 0, 1, 2, 4, 6]), torch.tensor([0, 0, 0, 0, 1, 1, 1])
    >>> reinforce_pp_baseline(r, ids, torch.tensor([3.0, 1, 2, 4, 5, 1, 2]))
    tensor([ 0.5472, -0.2105, -0.2105,  0.5472, -1.3470,  0.1684,  1.6838])
    """
    centred = dr_grpo(rewards, group_ids, mask=mask, singleton=singleton, backend=backend)
    return whiten(centred, lengths, mask=grouped(scorable(rewards, mask), group_ids), backend=backend)
