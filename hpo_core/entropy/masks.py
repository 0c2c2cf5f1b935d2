"""Masks beside thresholds: spans of windows, runs of tokens, tokens that are mastered, tokens whose entropy moved. They
combine by & | ~."""

from __future__ import annotations

import math

import torch

from ..batch import PackedBatch, as_batch, spread_rows
from ..checks import check, check_rows, check_tokens
from ..gates.token_level import check_epsilons
from ..specs import Provenance
from .aggregates import Window, window_aggregate
from .selection import Selection
from .signals import preset, read
from .statistics import means_of_segments


@preset(Provenance.VERIFIED)
def cover(
    mask: torch.Tensor, batch: PackedBatch | torch.Tensor, window: Window, *, backend: str | None = None
) -> torch.Tensor:
    """The tokens inside the windows of selected tokens, ``[T]`` bool: ARES' high-entropy windows as spans.

    Args:
        mask: ``[T]`` bool, tokens whose window counts; a masked token has none.
        window: its tokens are ``{t + first, ..., t + last}``; the other fields are not read.

    >>> mask = torch.tensor([True, False, False, False, True])
    >>> cover(mask, PackedBatch.from_lengths([4, 1]), Window.forward(2))
    tensor([ True,  True, False, False,  True])
    """
    batch = as_batch(batch)
    check_tokens(batch, mask=mask)
    reflected = Window(-window.last, -window.first, "max", "shrink")
    return window_aggregate(mask.float(), batch, reflected, backend=backend) > 0


@preset(Provenance.VERIFIED)
def opened(
    mask: torch.Tensor, batch: PackedBatch | torch.Tensor, length: int, *, backend: str | None = None
) -> torch.Tensor:
    """The runs of at least ``length`` selected tokens, ``[T]`` bool. A masked token ends a run.

    >>> mask = torch.tensor([True, False, True, True, True])
    >>> opened(mask, PackedBatch.from_lengths([5]), 2)
    tensor([False, False,  True,  True,  True])
    """
    batch = as_batch(batch)
    check_tokens(batch, mask=mask)
    check(length >= 1, "length: expected a number of tokens >= 1, got {}", length)
    run = Window(0, length - 1, "min", "full", "break")
    begins = window_aggregate(mask.float(), batch, run, backend=backend) > 0
    return cover(begins, batch, run, backend=backend)


@preset(Provenance.VERIFIED)
def checked_mask(mask: torch.Tensor, entropy: torch.Tensor, batch: PackedBatch | torch.Tensor) -> Selection:
    """A mask as a :class:`Selection` that does not hide errors: valid tokens whose entropy is not finite are selected
    by no mask, and here they have the weight NaN, so that the loss counts them (``bad_advantages``).

    Args:
        mask: ``[T]`` bool, such as that of :func:`ares_windows` or :func:`less_tokens`.
        entropy: ``[T]``, the numbers that the mask was made of.

    The other tokens have the weight 1. Masks that are a ``Selection`` already count in this way by themselves.

    >>> given = torch.tensor([True, False]), torch.tensor([0.5, torch.nan]), PackedBatch.from_lengths([2])
    >>> checked_mask(*given).weight
    tensor([1., nan])
    """
    batch = as_batch(batch)
    check_tokens(batch, mask=mask)
    return read(batch, entropy=entropy).selected(mask)


@preset(Provenance.VERIFIED)
def group_confidence(
    confidence: torch.Tensor, batch: PackedBatch | torch.Tensor, width: int = 2048, *, backend: str | None = None
) -> torch.Tensor:
    """DeepConf's group confidence: the mean of ``confidence`` over the last ``width`` tokens, ``[T]`` (as ECHO and
    DeepConf describe it).

    Args:
        confidence: ``[T]``, minus the mean log-probability of each token's k likeliest candidates.
        width: 2048; at the beginning of a row the mean is over fewer tokens.

    A rollout stops, or counts less, where the result falls below a threshold. Masked tokens get -inf, and tokens whose
    confidence is not finite NaN.

    >>> group_confidence(torch.tensor([4.0, 2.0, 6.0]), PackedBatch.from_lengths([3]), 2)
    tensor([4., 3., 4.])
    """
    batch = as_batch(batch)
    read(batch, confidence=confidence)
    return window_aggregate(confidence, batch, Window.causal(width, boundary="shrink"), backend=backend)


@preset(Provenance.VERIFIED)
def erc(
    entropy: torch.Tensor,
    old_entropy: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    *,
    eps_low: float = 0.05,
    eps_high: float = 0.05,
) -> Selection:
    """Entropy ratio clipping: only tokens whose entropy has hardly changed since the rollout are trained on,
    ``1 - eps_low < (H + 1e-8) / (H_old + 1e-8) < 1 + eps_high`` (arXiv 2512.05591). Returns a :class:`Selection` with a
    mask, beside any gate; the authors take ``ppo_clip(0.2, 0.28, 10.0)`` and GPPO, ``ce_gppo`` with weights of 1.

    Args:
        entropy: ``[T]`` in nats, of the current policy: compute the mask in each micro-batch.
        old_entropy: ``[T]``, of the policy that wrote the rollout.
        eps_low, eps_high: epsilons of the ratio, 0.05 in the authors' recipes.

    Traps: the mask takes a fifth of the tokens, where PPO's clip takes one in thousands, and denominators stay those of
    ``weights``, as the authors' do. Their loss keeps the terms of the other tokens, without a gradient, in its value.

    >>> entropy, old_entropy = torch.tensor([1.0, 1.04, 0.0, 2.0]), torch.tensor([1.0, 1.0, 0.0, 1.0])
    >>> erc(entropy, old_entropy, PackedBatch.from_lengths([4])).mask
    tensor([ True,  True,  True, False])
    """
    batch = as_batch(batch)
    check_epsilons(eps_low, eps_high, finite=True)
    signal = read(batch, entropy=entropy, old_entropy=old_entropy)
    ratio = (signal.values + 1e-8) / (signal.also(old_entropy) + 1e-8)
    return signal.selected((ratio > 1 - eps_low) & (ratio < 1 + eps_high))


@preset(Provenance.PAPER)
def ulorl(
    logp: torch.Tensor,
    entropy: torch.Tensor,
    is_correct: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    *,
    probability: float = 0.99,
    sigma: float = 0.2,
    backend: str | None = None,
) -> Selection:
    """UloRL: mastered tokens of correct responses, ``pi(o_t) >= probability``, are left out while the response's mean
    entropy is below ``sigma`` (arXiv 2507.19766). Returns a :class:`Selection` with a mask.

    Args:
        logp, entropy: ``[T]`` of the current policy.
        is_correct: ``[S]`` bool.
        probability, sigma: 0.99 and 0.2, the paper's.

    Traps: the denominator stays that of all tokens. The paper prints the mean entropy without its minus sign.

    >>> logp, entropy = torch.tensor([0.999, 0.5]).log(), torch.tensor([0.01, 0.2])
    >>> ulorl(logp, entropy, torch.tensor([True]), PackedBatch.from_lengths([2])).mask
    tensor([False,  True])
    """
    batch = as_batch(batch)
    check(0 < probability <= 1, "probability: expected a number in (0, 1], got {}", probability)
    check_rows(batch, is_correct=is_correct)
    signal, row = read(batch, entropy=entropy, logp=logp), batch.row_of_token()
    mean = means_of_segments(signal.values, row, batch.rows, signal.usable, backend)
    settled = spread_rows(is_correct & (mean < sigma), batch, False)
    return signal.selected(~(settled & (signal.also(logp) >= math.log(probability))))
