"""HAPO: clip bounds, advantages and temperatures that follow the log-entropy relative to a pivot (arXiv 2509.16591).

``h = (L - P) / (M - P)`` above the pivot and ``(L - P) / (P - m)`` below, with L the log-entropy and (m, P, M) the
least, the 80 % quantile and the greatest: in [-1, 1], and free of the unit of entropy.
"""

from __future__ import annotations

import torch

from ..arguments import check_compat, check_finite
from ..batch import PackedBatch, as_batch
from ..checks import check_tokens
from ..gates.token_level import check_epsilons
from ..reference.terms import SATURATION
from ..specs import Provenance
from .maps import two_knot
from .selection import Selection
from .signals import Signal, preset, read
from .statistics import PivotState, checked_pivot, fit_pivot


@preset(Provenance.VERIFIED)
def hapo(
    entropy: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    alpha: float = 1.0,
    compat: str = "paper",
    state: PivotState | None = None,
    backend: str | None = None,
) -> Selection:
    """HAPO's clip bounds: the lower epsilon is ``eps_low (1 - alpha h)`` where ``h <= 0``, the upper one
    ``eps_high (1 + alpha h)`` above (arXiv 2509.16591). Returns a :class:`Selection` with bounds, for
    :func:`hpo_core.gates.hapo_clip`.

    Args:
        entropy: ``[T]`` in nats, of the current policy.
        eps_low, eps_high: 0.2 and 0.28 as in the paper; the recipes take 0.2 twice.
        compat: "code": there h is positive below the pivot, too, so that the upper bound of every token widens and the
            lower one of none.
        state: from :func:`fit_pivot`; None: fitted on this call's tokens, as in the code.

    Where all entropies are equal, and at the pivot, h is 0, as it is where the state has seen no entropy.

    >>> entropy = torch.tensor([0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2])
    >>> low, high = hapo(entropy, PackedBatch.from_lengths([7])).bounds
    >>> low, high[-2:]
    (tensor([0.6000, 0.6400, 0.6800, 0.7200, 0.7600, 0.8000, 0.8000]), tensor([1.2800, 1.5600]))
    """
    batch = as_batch(batch)
    check_epsilons(eps_low, eps_high, finite=True)
    check_finite(alpha=alpha)
    given, state = _read(entropy, batch, state, backend)
    h = _relative(given, state, compat)
    lower = two_knot(h, eps_low, low=(0.0, -alpha * eps_low))
    upper = two_knot(h, eps_high, high=(0.0, alpha * eps_high))
    return Selection(bounds=(given.result((1 - lower).clamp(min=0), 1.0), given.result(1 + upper, 1.0)))


@preset(Provenance.VERIFIED)
def hapo_redistribution(
    entropy: torch.Tensor,
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    *,
    eps: tuple[float, float] = (0.2, 0.28),
    bounds: tuple[torch.Tensor, torch.Tensor] | None = None,
    beta: float = 1.0,
    compat: str = "paper",
    state: PivotState | None = None,
    backend: str | None = None,
) -> Selection:
    """HAPO's differential redistribution: the advantage times ``1 + beta h`` where ``h > 0`` and the ratio is outside
    the zone, or ``h <= 0`` and it is inside (arXiv 2509.16591). Returns a :class:`Selection` with a factor.

    Args:
        eps: the zone is ``[1 - eps[0] / 2, 1 + eps[1] / 2]``, as in the paper.
        bounds: those of :func:`hapo`; with them the zone takes the epsilons of each token, and is open, as in the code,
            where the adapted clip runs first.
        compat, state: as in :func:`hapo`.

    >>> entropy = torch.tensor([0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2])
    >>> ratio, batch = torch.tensor([1, 1.12, 0.95, 1, 1.05, 1, 1.2]), PackedBatch.from_lengths([7])
    >>> hapo_redistribution(entropy, ratio.log(), torch.zeros(7), batch).advantage_factor
    tensor([0.0000, 0.2000, 0.4000, 0.6000, 0.8000, 1.0000, 2.0000])
    """
    batch = as_batch(batch)
    check_finite(beta=beta)
    _, state = _read(entropy, batch, state, backend)
    signal = read(batch, entropy=entropy, logp=logp, old_logp=old_logp)
    ratio = torch.exp((signal.also(logp) - signal.also(old_logp)).clamp(-SATURATION, SATURATION))
    if bounds is None:
        is_inside = (ratio >= 1 - eps[0] / 2) & (ratio <= 1 + eps[1] / 2)
    else:
        for bound in bounds:
            check_tokens(batch, bounds=bound)
        low, high = map(signal.also, bounds)
        is_inside = (ratio > (1 + low) / 2) & (ratio < (1 + high) / 2)
    h = _relative(signal, state, compat)
    factor = torch.where((h > 0) ^ is_inside, 1 + beta * h, 1.0)
    return Selection(advantage_factor=signal.result(factor, 1.0))


@preset(Provenance.VERIFIED)
def hapo_temperature(
    entropy: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    state: PivotState,
    *,
    base: float = 1.0,
    tau: float = 0.1,
    compat: str = "paper",
) -> torch.Tensor:
    """HAPO's sampling temperatures ``base (1 + tau h)``, ``[T]`` (arXiv 2509.16591, equation 8).

    Args:
        entropy: ``[T]`` of the distribution to sample from.
        state: from :func:`fit_pivot` on the previous step.
        tau: 0.1 in the paper, with ``h = (L - P) / sigma``, sigma the deviation of log-entropies around the pivot.
        compat: "code": h as in :func:`hapo`'s, clamped to [-1, 1] where this step leaves the last one's range, so that
            temperatures *rise* below the pivot, too; there tau is 0.05.

    Masked tokens get ``base``, and so do all where the last step had no entropies or equal ones, and with "code" those
    on a side of the pivot where it had none; in the code itself those get the most.

    >>> entropy, batch = torch.tensor([0.05, 1.6, 3.2]), PackedBatch.from_lengths([3])
    >>> hapo_temperature(entropy, batch, fit_pivot(entropy, batch, "0.5"), tau=0.05, compat="code")
    tensor([1.0500, 1.0000, 1.0500])
    """
    batch = as_batch(batch)
    check_finite(base=base, tau=tau)
    given, state = _read(entropy, batch, state, None)
    if check_compat(compat):
        h = _relative(given, state, compat).clamp(-1, 1)
    else:
        spread = torch.where(state.deviation > 0, state.deviation, torch.inf)
        h = (_logs(given) - state.pivot.log()) / spread
    return given.result(base * (1 + tau * h), base)


def _read(
    entropy: torch.Tensor, batch: PackedBatch, state: PivotState | None, backend: str | None
) -> tuple[Signal, PivotState]:
    state = fit_pivot(entropy, batch, backend=backend) if state is None else checked_pivot(state, entropy)
    pivot = torch.where(state.pivot.isnan(), 1.0, state.pivot)  # nothing to compare with: h is 0
    return read(batch, entropy=entropy), state._replace(pivot=pivot)


def _relative(given: Signal, state: PivotState, compat: str) -> torch.Tensor:
    """h ``[T]`` float64; in the released code positive below the pivot, too."""
    below = -1.0 if check_compat(compat) else 1.0
    least, pivot, greatest = (each.log() for each in state[:3])
    down, up = pivot - least, greatest - pivot
    low = torch.where(down > 0, below / down, 0.0)
    high = torch.where(up > 0, 1 / up, 0.0)
    return two_knot(_logs(given), low=(pivot, low), high=(pivot, high))


def _logs(given: Signal) -> torch.Tensor:
    """Log-entropies ``[T]`` float64, clamped in the precision in which fit_pivot clamps."""
    return given.values.to(given.dtype).clamp(min=1e-8).double().log()
