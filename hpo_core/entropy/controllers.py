"""Coefficients that follow the entropy or the divergence of training: state in, state out, without a synchronisation.

Every state is a 0-dim tensor or a named tuple of tensors, to keep between steps and in checkpoints. Entropies and
divergences are means over the whole step and all ranks, 0-dim, for instance from ``Metrics`` or
:func:`.fit_scopes`. Where one is NaN (a step without tokens) or infinite the state stays as it is.

Of D difficulties ``table = fit_scopes(kl, difficulty, scopes=D, process_group=...)`` is the same on all ranks, and
``torch.where(table.members > 0, table.mean, torch.nan).float()`` is their divergence ``[D]``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ..arguments import check_compat, check_finite, check_limit, examines
from ..checks import check, check_device, check_dtype, check_precise, check_scalar, check_shape
from ..specs import Provenance
from .signals import preset


class ControlledCoefficient(NamedTuple):
    """The result of a controller of one coefficient, 0-dim each."""

    state: torch.Tensor  # for the next step
    coefficient: torch.Tensor  # for the loss of this one

    def to(self, device: torch.device | str) -> ControlledCoefficient:
        return ControlledCoefficient(*(each.to(device) for each in self))


@preset(Provenance.VERIFIED)
def skywork_coefficient(
    coefficient: torch.Tensor,
    entropy: torch.Tensor,
    *,
    target: float = 0.2,
    delta: float = 1e-4,
    least: float = 0.0,
    most: float = 0.005,
) -> ControlledCoefficient:
    """Skywork-OR1: the coefficient grows by ``delta`` while the entropy is below its target and shrinks above, within
    ``[least, most]``; the bonus counts below the target only (repository SkyworkAI/Skywork-OR1).

    Args:
        coefficient: 0-dim, the state; 0 at the start.
        entropy: 0-dim, the mean of the step.

    Returns:
        ``state``, the new one, and ``coefficient``, that of the bonus; 0 without an entropy.

    >>> skywork_coefficient(torch.tensor(0.0), torch.tensor(0.1))
    ControlledCoefficient(state=tensor(1.0000e-04), coefficient=tensor(1.0000e-04))
    """
    _check_scalars(coefficient=coefficient, entropy=entropy)
    return _step_coefficient(coefficient, entropy, entropy < target, delta, least, most)


@preset(Provenance.VERIFIED)
def trl_coefficient(
    coefficient: torch.Tensor,
    entropy: torch.Tensor,
    *,
    target: float = 0.2,
    delta: float = 0.005,
    least: float = 0.0,
    most: float = 1.0,
) -> ControlledCoefficient:
    """TRL's variant of :func:`skywork_coefficient`: the coefficient grows and counts at the target, too, in larger
    steps.

    Args:
        delta: the step of the coefficient, which stays within ``least`` and ``most``.
        entropy: 0-dim, the mean of the *last* step: TRL moves the coefficient after the step that it measures.

    >>> trl_coefficient(torch.tensor(0.01), torch.tensor(0.25), target=0.25)
    ControlledCoefficient(state=tensor(0.0150), coefficient=tensor(0.0150))
    """
    _check_scalars(coefficient=coefficient, entropy=entropy)
    return _step_coefficient(coefficient, entropy, entropy <= target, delta, least, most)


def _step_coefficient(
    coefficient: torch.Tensor, entropy: torch.Tensor, grows: torch.Tensor, delta: float, least: float, most: float
) -> ControlledCoefficient:
    check(delta >= 0, "delta: expected a number >= 0, got {}", delta)
    check(most >= 0, "most: expected a number >= 0, got {}", most)
    check(0 <= least <= most, "least: expected a coefficient from 0 to {} (most), got {}", most, least)
    check_finite(delta=delta, least=least)
    check_limit("most", most)
    old = coefficient.detach()
    moved = torch.where(grows, old + delta, old - delta).clamp(least, most)
    known = torch.isfinite(entropy)
    return ControlledCoefficient(torch.where(known, moved, old), torch.where(known & grows, moved, 0.0))


@preset(Provenance.VERIFIED)
def entropic(
    integral: torch.Tensor,
    entropy: torch.Tensor,
    *,
    target: float,
    proportional: float = 1.0,
    integral_gain: float = 0.01,
) -> ControlledCoefficient:
    """EntroPIC: the coefficient ``alpha = K_p e + K_i sum of earlier e``, clipped to [-1, 1], e the entropy's distance
    above its target (arXiv 2511.15248; repository yk7333/EntroPIC).

    The coefficient is not that of an entropy bonus: ``alpha r |A|`` is a second objective of tokens whose probability
    is above 0.95, without a clip. Where the entropy is too low, alpha < 0 reduces the rise of likely tokens by a
    success, and pushes them further down in a failure.

    Args:
        integral: 0-dim, the state, the sum of errors so far; 0 at the start.
        target, proportional, integral_gain: the authors' recipe has 0.1, 1 and 0.01.

    Returns:
        ``state``, the new one, and ``coefficient``; without an entropy e is 0.

    Traps: the code moves the integral in every micro-batch, by its share; here once a call.

    >>> import hpo_core as hpo
    >>> state, alpha = entropic(torch.tensor(1.0), torch.tensor(0.35), target=0.1)
    >>> round(alpha.item(), 4)
    0.26
    >>> logp, batch = torch.tensor([-0.01, -0.7, -0.02]), hpo.PackedBatch.from_lengths([2, 1])
    >>> likely = logp > math.log(0.95)
    >>> weights = hpo.aggregation.token_mean(batch, selected=likely)
    >>> given = {"token_mask": likely, "weights": weights}
    >>> unclipped = hpo.gates.ppo_clip(1.0, math.inf)
    >>> second = alpha * hpo.policy_loss(logp, None, torch.tensor([1.0, 2.0]), batch, unclipped, **given).loss
    >>> round(second.item(), 4)  # beside the loss of the policy
    -0.39
    """
    _check_scalars(integral=integral, entropy=entropy)
    check_finite(target=target, proportional=proportional, integral_gain=integral_gain)
    error = torch.where(torch.isfinite(entropy), entropy.detach() - target, 0.0)
    earlier = integral.detach()
    coefficient = (proportional * error + integral_gain * earlier).clamp(-1, 1)
    return ControlledCoefficient(earlier + error, coefficient)


@preset(Provenance.VERIFIED)
def target_temperature(
    entropy: torch.Tensor, *, target: float = 0.5, low: float = 0.8, high: float = 1.2
) -> torch.Tensor:
    """Arbitrary-entropy policy optimisation: the temperature of the regulariser's samples is ``high`` while the mean
    entropy is at most its target, and ``low`` above, 0-dim (arXiv 2510.08141; repository 597358816/AEPO, which has the
    numbers).

    Its loss is GRPO's plus a coefficient times REINFORCE on successful samples of that temperature. It has no state:
    where the entropy is NaN it is ``low``.

    Args:
        entropy: 0-dim, the mean of the last step; 0 in the first.

    >>> target_temperature(torch.tensor(0.3))
    tensor(1.2000)
    """
    _check_scalars(entropy=entropy)
    for name, temperature in (("low", low), ("high", high)):
        check(0 < temperature < math.inf, "{}: expected a temperature above 0, got {}", name, temperature)
    check_finite(low=low, high=high)
    check(low <= high, "low, high: expected low <= high, got {} and {}", low, high)
    return torch.where(entropy <= target, torch.full_like(entropy, high), torch.full_like(entropy, low))


@examines
def epo_phase(step: float, steps: float, gamma: float = 1.0, compat: str = "paper") -> float:
    """The weight of EPO's smoothing at a step of the training, ``1 + exp(-gamma k / floor(K / 2))`` (arXiv 2509.22576).

    Args:
        step, steps: k and K.
        compat: "code": a weight of the distance by epoch, ``1 - 0.2 (1 - exp(-2 e / h))`` up to epoch
            ``h = floor(K / 2)``, 75 in the code, then ``0.8 exp(-3 (e - h) / (K - h))``, with a jump between them.

    >>> round(epo_phase(1, 120), 6), round(epo_phase(75, 150, compat="code"), 6)
    (1.983471, 0.827067)
    """
    check(2 <= steps < math.inf, "steps: expected a finite number >= 2, got {}", steps)
    check(0 <= step < math.inf, "step: expected a finite number >= 0, got {}", step)
    check_finite(step=step, steps=steps, gamma=gamma)
    middle = math.floor(steps / 2)
    if not check_compat(compat):
        power = -gamma * step / middle
        check(power < 88, "gamma: expected a number with a weight e^{} that float32 holds, got {}", power, gamma)
        return 1 + math.exp(power)
    early = 1 - 0.2 * (1 - math.exp(-2 * step / middle))
    return early if step <= middle else 0.8 * math.exp(-3 * (step - middle) / (steps - middle))


@preset(Provenance.PAPER)
def ares_kappa(
    kappa: torch.Tensor, divergence: torch.Tensor, *, budget: float, rate: float, least: float, most: float
) -> torch.Tensor:
    """ARES' coefficient of the penalty, ``clip(kappa (1 + rate (KL / budget - 1)), least, most)``, by difficulty (arXiv
    2510.08457, algorithm 1, which gives no numbers). Returns ``[D]``.

    Args:
        kappa: ``[D]``, the state.
        divergence: ``[D]``, the mean penalty of the tokens *outside* the windows, by difficulty; NaN where a difficulty
            has none, which then keeps its coefficient.

    >>> given = torch.tensor([1.0, 1.0]), torch.tensor([0.02, torch.nan])
    >>> ares_kappa(*given, budget=0.01, rate=0.1, least=0.1, most=10.0)
    tensor([1.1000, 1.0000])
    """
    _check_difficulties(kappa=kappa, divergence=divergence)
    check(budget > 0, "budget: expected a divergence > 0, got {}", budget)
    _check_rate(rate, least, most)
    updated = kappa.detach() * (1 + rate * (divergence.detach() / budget - 1))
    return torch.where(torch.isfinite(divergence), updated.clamp(least, most), kappa.detach())


class AresPenalty(NamedTuple):
    """The state of :func:`ares_penalty`, by difficulty; ``AresPenalty.start(3)`` begins.

    It pickles, and loads with ``weights_only=True``.
    """

    beta: torch.Tensor  # [D] coefficients
    average: torch.Tensor  # [D] moving averages of KL; NaN before the first
    error: torch.Tensor  # [D] moving averages of the relative distance from the target
    calls: torch.Tensor  # 0-dim int64

    @staticmethod
    @examines
    def start(buckets: int, beta: float = 1.0, device: torch.device | str = "cpu") -> AresPenalty:
        """The state before the first step.

        >>> AresPenalty.start(2).beta
        tensor([1., 1.])
        """
        check(buckets >= 0, "buckets: expected a count >= 0, got {}", buckets)
        check_finite(beta=beta)
        beta_of = torch.full((buckets,), beta, dtype=torch.float32, device=device)
        none, calls = torch.full_like(beta_of, torch.nan), torch.zeros((), dtype=torch.int64, device=device)
        return AresPenalty(beta_of, none, torch.zeros_like(beta_of), calls)

    def to(self, device: torch.device | str) -> AresPenalty:
        return AresPenalty(*(each.to(device) for each in self))


torch.serialization.add_safe_globals([ControlledCoefficient, AresPenalty])


@preset(Provenance.VERIFIED)
def ares_penalty(
    state: AresPenalty,
    divergence: torch.Tensor,
    *,
    target: float = 0.01,
    memory: float = 0.97,
    dead_zone: float = 0.02,
    period: int = 100,
    rate: float = 0.05,
    clip: float = 0.2,
    least: float = 1e-4,
    most: float = 1e2,
) -> AresPenalty:
    """The factor that ARES' code puts on the penalty of each difficulty: every ``period`` calls
    ``log beta += rate clip(e, -clip, clip)``, e a moving average of the relative distance of the moving average of KL
    from its target (repository shawn0728/ARES).

    Args:
        state: an :class:`AresPenalty`.
        divergence: ``[D]``, the mean of k3 over the rows of each difficulty; NaN: there are none, and it stays.
        target, memory, dead_zone, period, rate, clip, least, most: the code's. ``memory``: of both averages.

    Traps: e moves only with beta, once a period and outside the dead zone, and starts at 0: the first step is 0.03 of
    the distance. In the code a call is a micro-batch of one rank.

    >>> state = ares_penalty(AresPenalty.start(1), torch.tensor([0.02]), period=1)
    >>> round(state.beta.item(), 6)  # e^(0.05 * 0.03 * 1)
    1.001501
    """
    check(period >= 1, "period: expected a number of calls >= 1, got {}", period)
    check(0 <= memory <= 1, "memory: expected a number in [0, 1], got {}", memory)
    check_limit("clip", clip)
    _check_rate(rate, least, most)
    _check_difficulties(divergence=divergence, beta=state.beta, average=state.average, error=state.error)
    check_dtype("calls", state.calls, (torch.int64,), "take the state as ares_penalty returned it")
    check_shape("calls", state.calls, (), "[] (as ares_penalty returned it)")
    check_device("calls", state.calls, divergence.device, "divergence")
    known = torch.isfinite(divergence)
    latest = torch.where(known, divergence.detach(), 0.0)
    first = state.average.isnan()
    average = torch.where(first, latest, memory * torch.where(first, 0.0, state.average) + (1 - memory) * latest)
    calls, distance = state.calls + 1, average / target - 1
    moves = known & (calls % period == 0) & (distance.abs() >= dead_zone)
    error = torch.where(moves, memory * state.error + (1 - memory) * distance, state.error)
    updated = (state.beta * torch.exp(rate * error.clamp(-clip, clip))).clamp(least, most)
    return AresPenalty(
        torch.where(moves, updated, state.beta), torch.where(known, average, state.average), error, calls
    )


def _check_rate(rate: float, least: float, most: float) -> None:
    check_finite(rate=rate)
    check_limit("least", least, -math.inf)
    check_limit("most", most)
    check(least <= most, "least: expected a coefficient <= {} (most), got {}", most, least)


def _check_scalars(**tensors: torch.Tensor) -> None:
    (first_name, first), *_ = tensors.items()
    for name, tensor in tensors.items():
        check_scalar(name, tensor, first.device, first_name)


def _check_difficulties(**tensors: torch.Tensor) -> None:
    (first_name, first), *_ = tensors.items()
    check(first.dim() == 1, "{}: expected shape [D] (one per difficulty), got {}", first_name, list(first.shape))
    for name, tensor in tensors.items():
        check_precise(name, tensor, f"use {name}.float()")
        check_shape(name, tensor, first.shape, f"[D] (that of {first_name})")
        check_device(name, tensor, first.device, first_name)
