"""LESS' low-entropy segments, and the advantages of those that only right, only wrong or both kinds of responses have
(arXiv 2512.00908; repository QWE-CXZ/LESS)."""

from __future__ import annotations

from fractions import Fraction

import torch

from ..advantages.returns import once
from ..advantages.terms import among, as_advantages, known
from ..batch import PackedBatch, as_batch, row_counts, spread_rows
from ..checks import check_rows, check_tokens
from ..segments import chains, dense_ids, statistics
from ..specs import Provenance
from .masks import opened
from .scopes import exact_fraction
from .signals import Signal, preset, read
from .thresholds import of_sorted_rows
from .token_rewards import outcomes


@preset(Provenance.VERIFIED)
def less_tokens(
    entropy: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    *,
    quantile: str | Fraction | float = "0.8",
    length: int = 5,
    backend: str | None = None,
) -> torch.Tensor:
    """The tokens of LESS' segments, ``[T]`` bool: runs of at least ``length`` tokens whose entropy is below the
    ``quantile`` of their response (arXiv 2512.00908).

    Args:
        entropy: ``[T]`` in nats, of the old policy.
        quantile: 0.8: of n tokens the order statistic at ``0.8 n``, rounded.
        length: 5 in the paper.

    >>> entropy = torch.tensor([0.1, 0.2, 0.1, 0.9, 0.1])
    >>> less_tokens(entropy, PackedBatch.from_lengths([5]), length=2)
    tensor([ True,  True,  True, False, False])
    """
    batch = as_batch(batch)
    signal = read(batch, entropy=entropy)
    below, _ = _below(signal, batch, quantile, backend)
    return opened(below, batch, length, backend=backend)


@preset(Provenance.VERIFIED, level="token")
def less(
    advantages: torch.Tensor,
    is_correct: torch.Tensor,
    entropy: torch.Tensor,
    segment_ids: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    *,
    quantile: str | Fraction | float = "0.8",
    backend: str | None = None,
) -> torch.Tensor:
    """LESS: of a prompt's n right responses k have a segment, and no wrong one: its tokens get ``k / n`` of the
    advantage, those of segments of wrong responses the same share of these. A segment of both kinds gets 0, other
    low-entropy tokens ``1 / n``, high-entropy tokens the whole (arXiv 2512.00908). Returns ``[T]`` float32.

    Args:
        advantages: ``[S]``, in the paper :func:`~hpo_core.advantages.grpo`'s.
        entropy: ``[T]`` in nats, of the old policy. Low is at or below the ``quantile`` of the response.
        segment_ids: ``[T]``, equal for the tokens of segments with the same text (:func:`hpo_core.segments.ids_of`), -1
            outside :func:`less_tokens`.
        quantile: that of :func:`less_tokens`.

    A valid token whose entropy is not finite gets NaN, so that the loss leaves it out and counts it.

    Traps: four fifths of the tokens get less, most of them ``1 / n``: raise the learning rate with care. The authors
    also match a segment with a part of a longer one, in the order in which they find them: such a part is a segment of
    its own text here if you give it the id.

    >>> given = torch.ones(3), torch.tensor([True, True, False]), torch.tensor([0.1, 0.1, 0.9] * 3)
    >>> segments = torch.tensor([5, -1, -1, 5, 7, -1, 7, -1, -1])
    >>> less(*given, segments, PackedBatch.from_lengths([3, 3, 3]), quantile="0.4")
    tensor([1.0000, 0.5000, 1.0000, 1.0000, 0.0000, 1.0000, 0.0000, 1.0000, 1.0000])
    """
    batch = as_batch(batch)
    check_rows(batch, advantages=advantages, is_correct=is_correct)
    check_tokens(batch, segment_ids=segment_ids)
    signal, row = read(batch, entropy=entropy), batch.row_of_token()
    some = row_counts(batch, signal.usable) > 0
    alike = statistics(advantages.new_ones(batch.rows), outcomes(is_correct, batch), mask=some, backend=backend).members
    share = 1 / spread_rows(alike.clamp(min=1), batch, 1)
    _, low = _below(signal, batch, quantile, backend)
    factor = torch.where(low, share, 1.0)
    group = torch.zeros_like(row) if batch.group_ids is None else spread_rows(batch.group_ids, batch, -1)
    segment = among(dense_ids(group, segment_ids), signal.usable)
    of_rows = once(chains(dense_ids(segment, row)))
    right = spread_rows(is_correct, batch, False).float()
    shared = statistics(right, segment, weights=of_rows, backend=backend)
    raised = torch.where(shared.least == shared.greatest, torch.maximum(factor, shared.members * share), 0.0)
    factor = torch.where(shared.members > 0, raised, factor)
    own = known(spread_rows(advantages.double(), batch, 0.0) * factor)
    return as_advantages(
        torch.where(signal.broken, torch.nan, torch.where(signal.usable, own, 0.0)), advantages, backend
    )


def _below(
    given: Signal, batch: PackedBatch, quantile: str | Fraction | float, backend: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The usable tokens ``[T]`` below the order statistic at ``quantile n``, rounded, of their response, and those at
    or below it."""
    q = exact_fraction("quantile", quantile)
    n = row_counts(batch, given.usable)
    scaled = n * q.numerator
    nearest = scaled // q.denominator + (2 * (scaled % q.denominator) >= q.denominator)
    of_rows = of_sorted_rows(given, batch, torch.minimum(nearest, n - 1), backend)
    border, values = spread_rows(of_rows, batch, torch.inf), given.values.to(of_rows.dtype)
    return given.usable & (values < border), given.usable & (values <= border)
