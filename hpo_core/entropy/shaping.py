"""Advantages and loss weights that follow the entropy of tokens, made of statistics and :func:`.two_knot`.

Nothing here carries a gradient, and nothing is read at masked tokens. A valid token whose entropy is not finite gets
NaN, so that the loss leaves it out and counts it. ``state``: the result of :func:`.fit_scopes` for the whole optimiser
step, over all its ranks; None: the statistics are those of this call's tokens, as papers that say "batch" have it.
"""

from __future__ import annotations

import math

import torch
import torch.distributed

from ..arguments import check_finite, check_limit
from ..batch import PackedBatch, as_batch
from ..checks import check
from ..reference.terms import SATURATION
from ..specs import Provenance
from .maps import two_knot
from .selection import Selection
from .signals import Signal, advantages_of_tokens, preset, read
from .statistics import ScopeStatistics, fit_scopes


def statistics_of(signal: Signal, state: ScopeStatistics | None, backend: str | None) -> ScopeStatistics:
    """The given state, or the statistics of this call's usable tokens."""
    if state is not None:
        return state
    return fit_scopes(signal.values.to(signal.dtype), mask=signal.usable, backend=backend)


def check_bonus(alpha: float, kappa: float) -> None:
    """Check the numbers of a bonus ``min(alpha H, |A| / kappa)``, with which no advantage changes its sign."""
    check(alpha >= 0, "alpha: expected a number >= 0, got {}; below, the entropy would turn signs", alpha)
    check(kappa >= 1, "kappa: expected a number >= 1, got {}; below, the entropy would turn signs", kappa)
    check_finite(alpha=alpha)


@preset(Provenance.PAPER)
def entropy_advantage(
    advantages: torch.Tensor,
    entropy: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    *,
    alpha: float = 0.4,
    kappa: float = 2.0,
    advantage_level: str | None = None,
) -> Selection:
    """Entropy-shaped advantages: ``A + min(alpha H, |A| / kappa)`` (arXiv 2506.14758). Returns a
    :class:`Selection` with an addend.

    Args:
        entropy: ``[T]`` in nats, of the current or the old policy.
        alpha: at least 0; 0.4, the paper's for GRPO; for PPO 0.1 is reported.
        kappa: 2. Above 1 no sign changes: ``|A'| >= (1 - 1 / kappa) |A|``.

    Traps: ``kappa = 1``, a baseline of others, takes mistakes of high entropy out of the loss.

    >>> given = torch.tensor([1.0]), torch.tensor([0.05, 0.5, 2.0]), PackedBatch.from_lengths([3])
    >>> entropy_advantage(*given).advantage_addend
    tensor([0.0200, 0.2000, 0.5000])
    """
    batch = as_batch(batch)
    check_bonus(alpha, kappa)
    signal = read(batch, entropy=entropy)
    most = advantages_of_tokens(advantages, batch, advantage_level).abs() / kappa
    addend = two_knot(signal.values, low=(0.0, alpha), high=(0.0, alpha), most=most)
    return Selection(advantage_addend=signal.result(addend, 0.0))


@preset(Provenance.VERIFIED)
def aepo_ruc(
    entropy: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    *,
    alpha: float = 0.2,
    least: float = -math.inf,
    state: ScopeStatistics | None = None,
    backend: str | None = None,
) -> Selection:
    """AEPO's entropy-aware advantage: ``A (1 + alpha z)``, ``z = (H - mean) / std``, ddof 1 (arXiv 2510.14545; its
    code as WillDreamer/ARLArena adapts it). Returns a :class:`Selection` with a factor.

    Args:
        entropy: ``[T]`` in nats, of the current policy.
        state: ``fit_scopes(entropy, mask=...)`` of the optimiser step; in the code of the micro-batch.
        alpha: 0.2, the code's.
        least: the smallest factor; the code has no limit.

    Traps: z is not bounded, and below ``-1 / alpha`` the factor turns the sign of the advantage; ``least=0`` forbids
    it. Where all entropies are equal z is 0.

    >>> aepo_ruc(torch.tensor([0.2, 0.4, 0.9]), PackedBatch.from_lengths([3])).advantage_factor
    tensor([0.8336, 0.9445, 1.2219])
    """
    batch = as_batch(batch)
    check_finite(alpha=alpha)
    check_limit("least", least, -math.inf)
    signal = read(batch, entropy=entropy)
    step = statistics_of(signal, state, backend).at()
    deviation = step.deviation(1)
    gain = torch.where(deviation > 0, alpha / deviation, 0.0)
    factor = two_knot(signal.values, 1.0, low=(step.mean, gain), high=(step.mean, gain), least=least)
    return Selection(advantage_factor=signal.result(factor, 1.0))


@preset(Provenance.VERIFIED)
def covariance(
    logp: torch.Tensor,
    advantages: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    *,
    advantage_level: str | None = None,
    process_group: torch.distributed.ProcessGroup | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """The score of Clip-Cov and KL-Cov, ``(A - mean A) (logp - mean logp)``, ``[T]`` (arXiv 2505.22617): means over the
    valid tokens of the call and of the ranks of ``process_group``. 0 at masked tokens.

    :func:`hpo_core.gates.clip_cov_mask` and :func:`hpo_core.gates.kl_cov_mask` select by it within a call.

    >>> logp, advantages = torch.tensor([-0.1, -2.0, -0.1, -3.0]), torch.tensor([1.0, -1.0])
    >>> covariance(logp, advantages, PackedBatch.from_lengths([2, 2]))
    tensor([ 1.2000, -0.7000, -1.2000,  1.7000])
    """
    batch = as_batch(batch)
    signal = read(batch, logp=logp)
    own = advantages_of_tokens(advantages, batch, advantage_level)
    members = signal.usable & torch.isfinite(own)
    product = torch.ones_like(own)
    for values in (own, signal.values):
        table = fit_scopes(values.to(signal.dtype), mask=members, process_group=process_group, backend=backend)
        product = product * (values - table.at().mean)
    return signal.result(product, 0.0)


@preset(Provenance.VERIFIED)
def entropy_change(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    entropy: torch.Tensor,
    advantages: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    *,
    advantage_level: str | None = None,
) -> torch.Tensor:
    """STEER's score ``Omega = A / pi_old pi (1 - pi) (log pi + H)``, ``[T]`` (arXiv 2510.10150): the part of a policy
    gradient's effect on the entropy that goes through the token's own logit. 0 at masked tokens.

    >>> logp, entropy = torch.tensor([0.9, 0.5, 0.1]).log(), torch.tensor([0.3, 0.7, 2.3])
    >>> entropy_change(logp, logp, entropy, torch.ones(1), PackedBatch.from_lengths([3]))
    tensor([ 0.0195,  0.0034, -0.0023])
    """
    batch = as_batch(batch)
    signal = read(batch, logp=logp, old_logp=old_logp, entropy=entropy)
    own = signal.values.clamp(max=0)
    ratio = torch.exp((own - signal.also(old_logp)).clamp(-SATURATION, SATURATION))
    change = advantages_of_tokens(advantages, batch, advantage_level) * ratio * -torch.expm1(own)
    return signal.result(change * (own + signal.also(entropy)), 0.0)


@preset(Provenance.VERIFIED)
def steer(
    change: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    *,
    least: float = 0.8,
    floor: float = 0.02,
    state: ScopeStatistics | None = None,
    backend: str | None = None,
) -> Selection:
    """STEER: tokens that move the entropy count less, ``w = max(exp(-k |Omega|), least)`` with
    ``k = -ln(least) / max(max |Omega|, floor)`` (arXiv 2510.10150; code of zz-haooo/STEER). Returns a
    :class:`Selection` with a weight.

    Args:
        change: Omega ``[T]`` from :func:`entropy_change`.
        least: 0.8, the weight of the token with the largest change.
        floor: 0.02, the code's.
        state: ``fit_scopes(change.abs(), mask=...)`` of the optimiser step; in the code of the micro-batch.

    Traps: the paper speaks of the sign of the change, the code takes its absolute value. Omega is a score and no
    estimate of the change.

    >>> steer(torch.tensor([0.019464, 0.003426, -0.002327]), PackedBatch.from_lengths([3])).weight
    tensor([0.8048, 0.9625, 0.9744])
    """
    batch = as_batch(batch)
    check(0 < least <= 1, "least: expected a weight in (0, 1], got {}", least)
    check(floor > 0, "floor: expected a number > 0, got {}", floor)
    size = _sizes(change, batch)
    k = -math.log(least) / statistics_of(size, state, backend).at().greatest.clamp(min=floor)
    return Selection(weight=size.result(torch.exp(-k * size.values).clamp(least, 1.0), 1.0))


@preset(Provenance.VERIFIED)
def steer_linear(
    change: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    *,
    least: float = 0.8,
    most: float = 1.2,
    state: ScopeStatistics | None = None,
    backend: str | None = None,
) -> Selection:
    """STEER's linear weights: from ``most`` at the smallest ``|Omega|`` to ``least`` at the largest; the rest is as in
    :func:`steer`.

    Where all changes are equal the weight is ``most``; the code takes the mean of both there.

    >>> steer_linear(torch.tensor([0.019464, 0.003426, -0.002327]), PackedBatch.from_lengths([3])).weight
    tensor([0.8000, 1.1743, 1.2000])
    """
    batch = as_batch(batch)
    check_finite(least=least, most=most)
    check(least <= most, "least: expected a weight <= {} (most), got {}", most, least)
    size = _sizes(change, batch)
    changes = statistics_of(size, state, backend).at()
    span = changes.greatest - changes.least
    gain = torch.where(span > 0, -(most - least) / span, 0.0)
    weight = two_knot(size.values, most, low=(changes.least, gain), high=(changes.least, gain))
    return Selection(weight=size.result(weight, 1.0))


def _sizes(change: torch.Tensor, batch: PackedBatch) -> Signal:
    signal = read(batch, change=change)
    return signal._replace(values=signal.values.abs())
