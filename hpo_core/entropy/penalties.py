"""Loss terms with a gradient through the entropies of :func:`~hpo_core.token_logprobs`: bonuses, corridors, anchors.

Each function returns a scalar to add to the loss: ``sum_t m_t w[s(t)] P(H_t)``, with the row weights ``[S]`` of
:mod:`hpo_core.aggregation` that the loss takes, so that micro-batches and ranks add up. Masked tokens are not read, and
their gradient is exactly 0. A valid token whose entropy is not finite is left out.
"""

from __future__ import annotations

import torch

from ..arguments import check_all_finite, check_compat, check_finite, check_pair
from ..batch import PackedBatch, as_batch, row_counts, spread_rows, valid_tokens
from ..checks import check, check_device, check_precise, check_rows, check_scalar, check_tokens
from ..distributed import sum_in_order
from ..specs import Provenance
from .maps import two_knot
from .signals import preset


@preset(Provenance.VERIFIED, differentiable=True)
def mean_entropy(entropy: torch.Tensor, batch: PackedBatch | torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """``sum_t m_t w[s(t)] H_t``, 0-dim: minus a coefficient times this is an entropy bonus; plus, it is the entropy
    minimisation of arXiv 2505.15134.

    Args:
        entropy: ``[T]`` in nats, with its graph.
        weights: ``[S]`` from :mod:`hpo_core.aggregation`.

    Traps: every valid token counts, whatever the loss selects. TRL's bonus is the mean over the selected tokens: pass
    ``torch.where(mask, entropy, 0.0)`` with ``token_mean(batch, selected=mask)``.

    >>> entropy = torch.tensor([0.5, 1.5], requires_grad=True)
    >>> mean_entropy(entropy, PackedBatch.from_lengths([2]), torch.tensor([0.5])).item()
    1.0
    """
    batch = as_batch(batch)
    values, usable = _differentiable(entropy, batch)
    return _summed(values, usable, batch, weights, entropy.dtype)


@preset(Provenance.VERIFIED, differentiable=True)
def entropy_band(
    entropy: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    weights: torch.Tensor,
    *,
    low: torch.Tensor,
    high: torch.Tensor,
) -> torch.Tensor:
    """The distance of entropies to a corridor, ``sum_t m_t w[s(t)] ([low - H]_+ + [H - high]_+)``, 0-dim.

    Args:
        entropy, weights: as in :func:`mean_entropy`.
        low, high: ``[S]``, the corridor of each row, such as that of its task.

    The slope is -1 below, 1 above and 0 inside and at the edges.

    >>> entropy = torch.tensor([0.2, 0.5, 1.4], requires_grad=True)
    >>> bounds = {"low": torch.tensor([0.35]), "high": torch.tensor([1.05])}
    >>> entropy_band(entropy, PackedBatch.from_lengths([3]), torch.ones(1), **bounds).backward()
    >>> entropy.grad
    tensor([-1.,  0.,  1.])
    """
    batch = as_batch(batch)
    check_rows(batch, low=low, high=high)
    values, usable = _differentiable(entropy, batch)
    edges = [spread_rows(edge.detach().double(), batch, 0.0) for edge in (low, high)]
    distance = two_knot(values, low=(edges[0], -1.0), high=(edges[1], 1.0))
    return _summed(torch.where(usable, distance, 0.0), usable, batch, weights, entropy.dtype)


@preset(Provenance.VERIFIED, differentiable=True)
def epo(
    entropy: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    weights: torch.Tensor,
    history: torch.Tensor,
    *,
    coefficient: float = 1e-3,
    kappa: tuple[float, float] = (0.8, 1.2),
    alpha: float = 0.1,
    beta: float = 1.0,
    compat: str = "paper",
) -> torch.Tensor:
    """EPO: an entropy bonus, minus the distance of entropies to a corridor around their history (arXiv 2509.22576).
    Returns ``-coefficient (mean H - beta mean(alpha P))``, 0-dim.

    ``P = [kappa_low h - H]_+ + [H - kappa_high h]_+``, h the mean of the history.

    Args:
        entropy, weights: as in :func:`mean_entropy`.
        history: ``[K]``, the mean entropies of earlier steps; empty: no smoothing. In the code those of the same turn.
        coefficient, kappa, alpha: 0.001, (0.8, 1.2) and 0.1, as in the code.
        beta: :func:`epo_phase` of the step.
        compat: "code": P is 1 outside the corridor and at its edges, a constant without any gradient. The P of the
            code's mode for sequences, which compares means over padded rows, has none either.

    Traps: edges are compared in float64 here and in float32 in the code, which may put a token at an edge elsewhere.

    >>> entropy = torch.tensor([0.2, 0.5, 0.9, 1.4], requires_grad=True)
    >>> given = entropy, PackedBatch.from_lengths([4]), torch.tensor([0.25]), torch.tensor([0.8, 0.6])
    >>> round(epo(*given, coefficient=1.0, kappa=(0.5, 1.5)).item(), 4)  # -(0.75 - 0.0125)
    -0.7375
    """
    batch = as_batch(batch)
    check_precise("history", history, "use history.float()")
    check(history.dim() == 1, "history: expected shape [K] (one per step), got {}", list(history.shape))
    check_device("history", history, batch.device, "the batch")
    check_pair("kappa", kappa, "(low, high)")
    check_all_finite("kappa", kappa)
    check(kappa[0] <= kappa[1], "kappa: expected low <= high, got {}", kappa)
    check_finite(coefficient=coefficient, alpha=alpha, beta=beta)
    is_code = check_compat(compat)
    values, usable = _differentiable(entropy, batch)
    bonus = _summed(values, usable, batch, weights, entropy.dtype)
    if history.numel() == 0:
        return -coefficient * bonus
    centre = history.detach().double().mean()
    low, high = kappa[0] * centre, kappa[1] * centre
    if is_code:
        distance = ((values <= low) | (values >= high)).to(values.dtype)
    else:
        distance = two_knot(values, low=(low, -1.0), high=(high, 1.0))
    smoothing = _summed(torch.where(usable, alpha * distance, 0.0), usable, batch, weights, entropy.dtype)
    return -coefficient * (bonus - beta * smoothing)


@preset(Provenance.VERIFIED, differentiable=True)
def siren_mean(entropy: torch.Tensor, batch: PackedBatch | torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mean over rows of the mean entropy of their selected tokens, 0-dim, with its graph, which :func:`siren` holds
    to an anchor. A row without a selected token is not counted.

    >>> mask = torch.tensor([True, False, True])
    >>> siren_mean(torch.tensor([0.5, 9.0, 1.5]), PackedBatch.from_lengths([2, 1]), mask).item()
    1.0
    """
    batch = as_batch(batch)
    check_tokens(batch, mask=mask)
    values, usable = _differentiable(entropy, batch)
    chosen = usable & mask
    count = row_counts(batch, chosen)
    rows = (count > 0).sum().clamp(min=1)
    weights = torch.where(count > 0, 1.0 / (count.clamp(min=1) * rows).double(), 0.0)
    return _summed(torch.where(chosen, values, 0.0), chosen, batch, weights, entropy.dtype)


@preset(Provenance.VERIFIED, differentiable=True)
def siren(
    entropy: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    mask: torch.Tensor,
    anchor: torch.Tensor,
    *,
    coefficient: float = 0.005,
) -> torch.Tensor:
    """SIREN: ``coefficient (m - anchor)^2``, m the :func:`siren_mean` of the selected entropies (arXiv 2509.25133).
    Returns a 0-dim loss term.

    Args:
        mask: ``[T]`` bool, :func:`siren_tokens` of entropies over the nucleus.
        anchor: 0-dim, m of the first step, or a running mean of it.
        coefficient: 0.005, the code's.

    Traps: the square is of the call's mean, so micro-batches do not add up to the step. In the code a row without a
    selected token, such as one of a single token, is counted, with a mean of 0.

    >>> given = torch.tensor([0.5, 1.5]), PackedBatch.from_lengths([2]), torch.tensor([True, True])
    >>> round(siren(*given, torch.tensor(3.0)).item(), 4)
    0.02
    """
    batch = as_batch(batch)
    check_scalar("anchor", anchor, batch.device, "the batch")
    check_finite(coefficient=coefficient)
    return coefficient * (siren_mean(entropy, batch, mask) - anchor.detach()).square()


def _differentiable(entropy: torch.Tensor, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Entropies ``[T]`` float64 with their graph, 0 where one is not read, and the tokens that have one."""
    check_precise("entropy", entropy)
    check_tokens(batch, entropy=entropy)
    usable = valid_tokens(batch) & torch.isfinite(entropy.detach())
    return torch.where(usable, entropy, 0.0).double(), usable


def _summed(
    values: torch.Tensor, usable: torch.Tensor, batch: PackedBatch, weights: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """``sum_t w[s(t)] v_t`` in a fixed order, 0-dim."""
    check_rows(batch, weights=weights)
    of_token = spread_rows(weights.detach().double(), batch, 0.0)
    terms = torch.where(usable, of_token, 0.0) * values
    return sum_in_order(terms).to(dtype)
