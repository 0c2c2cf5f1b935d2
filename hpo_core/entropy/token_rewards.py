"""GTPO and GRPO-S: rewards that a group's responses share out by entropy, and their advantages (arXiv 2508.04349)."""

from __future__ import annotations

import torch

from ..advantages.terms import as_advantages, known
from ..arguments import check_all_finite, constant
from ..batch import PackedBatch, as_batch, place_in_row, row_counts, spread_rows
from ..checks import check_rows
from ..distributed import whole_groups
from ..segments import dense_ids, statistics
from ..specs import Provenance
from .signals import preset, read
from .statistics import LEAST_DIFFERENCE, means_of_segments

_LEAST = 1e-8  # of an entropy whose inverse is taken


@preset(Provenance.VERIFIED, level="token")
def gtpo(
    is_correct: torch.Tensor,
    entropy: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    *,
    alpha: tuple[float, float] = (1.0, 0.1),
    normalised: bool = True,
    backend: str | None = None,
) -> torch.Tensor:
    """GTPO: token rewards ``+-(a_1 + a_2 u / mean(u))``, u the entropy of tokens of right responses and its inverse for
    wrong ones, the mean over the tokens at the same position of the group's responses of the same outcome; then
    standardised, right and wrong ones apart (arXiv 2508.04349). Returns ``[T]`` float32.

    Args:
        is_correct: ``[S]`` bool.
        entropy: ``[T]`` in nats, of the old policy; an inverse is that of at least 1e-8.
        alpha: (1, 0.1), the paper's.
        normalised: False gives the rewards themselves.

    A position counts the valid tokens of a response that have an entropy. Where all entropies at a position are 0,
    ``u / mean(u)`` is 1. Without group ids the batch is one group; a response outside every group gets 0. A valid token
    whose entropy is not finite gets NaN, so that the loss leaves it out and counts it. Assumed: rewards are
    standardised over the tokens of the group, with ddof 0.

    Traps: after standardisation half of the tokens of *right* responses have a negative advantage. A public port
    standardises over the tokens of the whole batch.

    >>> batch = PackedBatch.from_lengths([2, 2])
    >>> entropy = torch.tensor([0.2, 0.6, 0.6, 0.2])
    >>> gtpo(torch.tensor([True, True]), entropy, batch, normalised=False)
    tensor([1.0500, 1.1500, 1.1500, 1.0500])
    """
    batch = as_batch(batch)
    check_rows(batch, is_correct=is_correct)
    signal = read(batch, entropy=entropy)
    outcome = spread_rows(outcomes(is_correct, batch), batch, -1)
    right = spread_rows(is_correct, batch, False)
    position = torch.where(signal.usable, place_in_row(signal.usable, batch), -1)
    sharers = dense_ids(outcome, position)
    shared = _shared(signal.values, right, sharers, outcome, signal.usable & (outcome >= 0), alpha, normalised, backend)
    return as_advantages(torch.where(signal.broken, torch.nan, shared), entropy, backend)


@preset(Provenance.PAPER, level="row")
def grpo_s(
    is_correct: torch.Tensor,
    entropy: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    *,
    alpha: tuple[float, float] = (1.0, 0.1),
    normalised: bool = True,
    backend: str | None = None,
) -> torch.Tensor:
    """GRPO-S: :func:`gtpo` with u the mean entropy of a response, or its inverse, and means over the responses of the
    same outcome (arXiv 2508.04349). Returns ``[S]`` float32.

    Args:
        alpha, normalised: as in :func:`gtpo`.

    The paper's ratio is the mean of a response's token ratios. A response without valid tokens gets 0, and one
    whose valid entropies are all not finite NaN, so that the loss leaves it out and counts it.

    Assumed: right and wrong responses are standardised apart, as tokens are in :func:`gtpo`, so that a right one may
    have a negative advantage. A public port takes them together: :func:`hpo_core.advantages.grpo` of these rewards,
    with ``normalised=False``.

    >>> batch = PackedBatch.from_lengths([1, 1])
    >>> grpo_s(torch.tensor([False, False]), torch.tensor([0.3, 1.0]), batch, normalised=False)
    tensor([-1.1538, -1.0462])
    """
    batch = as_batch(batch)
    check_rows(batch, is_correct=is_correct)
    signal, row = read(batch, entropy=entropy), batch.row_of_token()
    outcome = outcomes(is_correct, batch)
    mean = means_of_segments(signal.values, row, batch.rows, signal.usable, backend)
    usable = torch.isfinite(mean) & (outcome >= 0)
    shared = _shared(mean, is_correct, outcome, outcome, usable, alpha, normalised, backend)
    broken = ~torch.isfinite(mean) & (row_counts(batch, signal.broken) > 0)
    return as_advantages(torch.where(broken, torch.nan, shared), entropy, backend)


def outcomes(is_correct: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """An id ``[S]`` for each group and outcome, the same on all ranks; -1 outside every group."""
    right = is_correct.to(torch.int64)
    groups = whole_groups(batch)
    return right if groups is None else dense_ids(groups, right)


def _shared(
    entropy: torch.Tensor,
    right: torch.Tensor,
    sharers: torch.Tensor,
    outcome: torch.Tensor,
    members: torch.Tensor,
    alpha: tuple[float, float],
    normalised: bool,
    backend: str | None,
) -> torch.Tensor:
    """The rewards of units, whose mean is over those with equal ids ``sharers``, and the deviation over those with
    equal ``outcome``, with ddof 0: ``[U]`` float64, 0 where a unit is no member, or where all rewards are equal."""
    check_all_finite("alpha", alpha)
    u = torch.where(right, entropy, 1 / entropy.clamp(min=_LEAST))
    base = statistics(u, sharers, mask=members, backend=backend).least
    # float32 keeps more of this difference than of u, and equal numbers are equal to their mean.
    above = constant(u - base, backend)
    usual = statistics(above, sharers, mask=members, backend=backend).mean
    mean = base + usual
    part = alpha[1] * torch.where(mean > 0, (above - usual) / mean, 0.0)
    if normalised:  # without the size that rewards share, beside which float32 would lose their differences
        part = constant(torch.where(right, part, -part), backend)
        of_outcome = statistics(part, outcome, mask=members, backend=backend)
        deviation = of_outcome.deviation(0)
        apart = deviation > LEAST_DIFFERENCE * abs(alpha[1])
        rewards = torch.where(apart, (part.double() - of_outcome.mean) / deviation, 0.0)
    else:
        size = alpha[0] + alpha[1] + part
        rewards = torch.where(right, size, -size)
    return known(torch.where(members, rewards.double(), 0.0))
