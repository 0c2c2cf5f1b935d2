"""ARES' rewards for as much entropy as a problem's difficulty asks for (arXiv 2510.08457; repository shawn0728/ARES).

``N`` is the number of high-entropy windows of a response (:func:`.count_of_rows`), difficulty 0, 1 and 2 are easy,
medium and hard, and every ``[3]`` has one entry for each.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed

from ..advantages.terms import known
from ..arguments import check_compat, check_finite, check_limit, examines
from ..checks import INTEGERS, check, check_device, check_dtype, check_precise, check_shape, check_units
from ..distributed import spanning
from ..segments import statistics
from ..specs import Provenance
from .signals import preset
from .statistics import fit_scopes


class AresTargets(NamedTuple):
    """The state of :func:`ares_targets`; ``AresTargets.start()`` begins. It pickles, and loads with
    ``weights_only=True``."""

    target: torch.Tensor  # [3] float32, the usual N; NaN before the first response of a difficulty
    alpha: torch.Tensor  # [3] float32, the height of the code's entropy reward

    @staticmethod
    @examines
    def start(alpha: float = 0.5, device: torch.device | str = "cpu") -> AresTargets:
        """The state before the first step.

        >>> AresTargets.start().alpha
        tensor([0.5000, 0.5000, 0.5000])
        """
        check_finite(alpha=alpha)
        values = torch.full((3,), alpha, dtype=torch.float32, device=device)
        return AresTargets(torch.full_like(values, torch.nan), values)

    def to(self, device: torch.device | str) -> AresTargets:
        return AresTargets(*(each.to(device) for each in self))


torch.serialization.add_safe_globals([AresTargets])


@preset(Provenance.VERIFIED)
def ares_difficulty(
    is_correct: torch.Tensor,
    group_ids: torch.Tensor | None,
    *,
    compat: str = "paper",
    process_group: torch.distributed.ProcessGroup | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """The difficulty of each response's prompt, ``[S]`` int64: 0 easy, 1 medium, 2 hard; -1 without a group.

    Args:
        is_correct: ``[S]`` bool.
        compat: "paper": easy from 6 of 8 right, medium from 3 of 8; "code": from two thirds and one third.
        process_group: groups span these ranks.

    >>> ares_difficulty(torch.tensor([True, True, False]), torch.tensor([0, 0, 1]))
    tensor([0, 0, 2])
    """
    check_units(is_correct=is_correct, group_ids=group_ids)
    group = spanning(process_group, statistics, is_correct.float(), group_ids, backend=backend)
    right, count = (group.mean * group.members).round(), group.members
    if check_compat(compat):
        easy, medium = 3 * right >= 2 * count, 3 * right >= count
    else:
        easy, medium = 4 * right >= 3 * count, 8 * right >= 3 * count
    level = torch.full_like(count, 2, dtype=torch.int64).masked_fill(medium, 1).masked_fill(easy, 0)
    return level.masked_fill(count == 0, -1)


@preset(Provenance.VERIFIED)
def ares_targets(
    counts: torch.Tensor,
    difficulty: torch.Tensor,
    state: AresTargets,
    group_ids: torch.Tensor | None = None,
    *,
    memory: float = 0.0,
    rate: float = 0.05,
    most: float = 2.0,
    compat: str = "paper",
    process_group: torch.distributed.ProcessGroup | None = None,
    backend: str | None = None,
) -> AresTargets:
    """The usual number of windows of each difficulty, after this batch.

    Args:
        counts: ``[S]`` floating point, N of each response.
        difficulty: ``[S]`` int64; -1: the response is not counted.
        state: the numbers before this batch, at first ``AresTargets.start()``.
        group_ids: ``[S]``; "code" averages prompts, not responses.
        memory: of the last target, 0: the mean of this batch replaces it.
        compat: "code": the target is the mean of the prompts' means, rounded, and ``alpha += rate (mean - target)``,
            with the opposite sign for hard problems, within ``[0, most]``; 0.05 and 2 are the code's.
        process_group: means are over the responses of these ranks.

    A difficulty without responses keeps its numbers. A mean of prompts at a half may be rounded up or down, because
    the means are float32; the code's are float64.

    >>> given = torch.tensor([4.0, 6.0, 1.0]), torch.tensor([0, 0, 2])
    >>> ares_targets(*given, AresTargets.start()).target
    tensor([5., nan, 1.])
    """
    check_units(counts=counts, group_ids=group_ids)
    check_difficulty(difficulty, counts)
    _check_state(state, counts)
    check(0 <= memory <= 1, "memory: expected a number in [0, 1], got {}", memory)
    check_finite(rate=rate)
    check_limit("most", most)
    last, alpha = state.target.detach(), state.alpha.detach()
    if not check_compat(compat):
        lengths = fit_scopes(counts, difficulty, scopes=3, process_group=process_group, backend=backend)
        moved = torch.where(last.isnan(), lengths.mean, memory * last + (1 - memory) * lengths.mean)
        return AresTargets(torch.where(lengths.members > 0, moved, last).float(), alpha)
    mean, seen = spanning(process_group, _means_of_prompts, counts, difficulty, group_ids, backend)
    target = mean.round()
    sign = mean.new_ones(3)
    sign[2:] = -1.0
    moved = (alpha + rate * sign * (mean - target)).clamp(0.0, most)
    return AresTargets(torch.where(seen, target, last).float(), torch.where(seen, moved, alpha).float())


@preset(Provenance.PAPER)
def ares_scales(
    counts: torch.Tensor,
    difficulty: torch.Tensor,
    target: torch.Tensor,
    *,
    process_group: torch.distributed.ProcessGroup | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """The paper's ``lambda_d = max(0, (mean N - target) / var N)``, ``[3]`` (arXiv 2510.08457).

    Args:
        target: ``[3]``, of an *earlier* batch: with the mean of the same one, as printed, lambda is always 0.
        process_group: means are over the responses of these ranks.

    0 where all N of a difficulty are equal, or without a target.

    >>> counts, easy = torch.tensor([4.0, 6.0, 8.0, 10.0]), torch.zeros(4, dtype=torch.int64)
    >>> ares_scales(counts, easy, torch.tensor([5.0, 5.0, 5.0]))
    tensor([0.4000, 0.0000, 0.0000])
    """
    check_units(counts=counts)
    check_difficulty(difficulty, counts)
    check_three("target", target, counts)
    lengths = fit_scopes(counts, difficulty, scopes=3, process_group=process_group, backend=backend)
    variance = lengths.squares / lengths.members.clamp(min=1)
    scale = torch.where(variance > 0, (lengths.mean - target.detach()) / variance, 0.0)
    return known(scale).clamp(min=0).float()


@preset(Provenance.PAPER)
def ares_rewards(
    is_correct: torch.Tensor, counts: torch.Tensor, difficulty: torch.Tensor, target: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """The paper's reward ``1[right] - 1[wrong] lambda_d g_d(N - target)``, ``[S]``: too many windows cost on easy
    problems, too few on hard ones, both on medium ones (arXiv 2510.08457).

    Args:
        counts, difficulty: ``[S]``, as in :func:`ares_targets`.
        target, scale: ``[3]``, :class:`AresTargets` of an earlier batch, and :func:`ares_scales`.

    >>> easy, scale = torch.zeros(2, dtype=torch.int64), torch.tensor([0.4, 0.4, 0.4])
    >>> ares_rewards(torch.tensor([True, False]), torch.tensor([8.0, 8.0]), easy, torch.full((3,), 5.0), scale)
    tensor([ 1.0000, -1.2000])
    """
    check_units(counts=counts, is_correct=is_correct)
    check_difficulty(difficulty, counts)
    check_three("target", target, counts)
    check_three("scale", scale, counts)
    excess = counts.double() - at_difficulty(target, difficulty)
    cost = torch.where(difficulty == 0, excess, torch.where(difficulty == 1, excess.abs(), -excess)).clamp(min=0)
    penalty = known(at_difficulty(scale, difficulty) * cost)
    return torch.where(is_correct, 1.0, -penalty).float()


@preset(Provenance.VERIFIED)
def ares_entropy_reward(
    is_correct: torch.Tensor, counts: torch.Tensor, difficulty: torch.Tensor, state: AresTargets
) -> torch.Tensor:
    """The reward of ARES' code, ``1[right] + s``, ``[S]``: right answers lose by too many windows (by any distance on
    medium problems), gain by many on hard ones, and wrong answers gain by exploration (repository shawn0728/ARES).

    With ``D = N - target``, a margin ``m = max(1, frac max(target, 1))``, a Huber loss of width kappa and a logistic of
    width temp, s is at most ``alpha`` (1.2 alpha on hard problems); frac is .15, .25, .35, kappa 2, 3, 4 and temp 2,
    2.5, 3.

    Args:
        counts, difficulty: ``[S]``, as in :func:`ares_targets`.
        state: :class:`AresTargets`, as "code" has it.

    >>> given = torch.tensor([True, False]), torch.tensor([20.0, 10.0]), torch.tensor([0, 0])
    >>> ares_entropy_reward(*given, AresTargets(torch.full((3,), 10.0), torch.full((3,), 0.5)))
    tensor([0.5000, 0.1500])
    """
    check_units(counts=counts, is_correct=is_correct)
    check_difficulty(difficulty, counts)
    _check_state(state, counts)

    def of(easy: float, medium: float, hard: float) -> torch.Tensor:
        number = torch.full_like(counts, hard, dtype=torch.float64)
        return number.masked_fill(difficulty == 1, medium).masked_fill(difficulty == 0, easy)

    target = at_difficulty(state.target, difficulty)
    cap = at_difficulty(state.alpha, difficulty) * of(1.0, 1.0, 1.2)
    margin = (of(0.15, 0.25, 0.35) * target.clamp(min=1)).clamp(min=1)
    kappa, temp = of(2.0, 3.0, 4.0), of(2.0, 2.5, 3.0)
    distance = counts.double() - target
    beyond = torch.where(difficulty == 1, distance.abs(), distance) - margin

    def huber(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x <= kappa, 0.5 * x.square() / kappa, x - 0.5 * kappa)

    loses = -torch.minimum(cap, huber(beyond.clamp(min=0)) / (margin + kappa) * cap)
    falls_short = -torch.minimum(cap, 0.5 * huber((-distance - margin).clamp(min=0)) / (margin + kappa) * cap)
    reaches = torch.where(distance >= -margin, cap * torch.sigmoid((distance + margin) / temp), falls_short)
    right = torch.where(difficulty == 2, reaches, loses)
    wrong = of(0.6, 0.8, 1.0) * cap * torch.sigmoid((distance - margin).clamp(min=0) / temp)
    return (is_correct.double() + known(torch.where(is_correct, right, wrong))).float()


def check_difficulty(difficulty: torch.Tensor, rows: torch.Tensor) -> None:
    """Check difficulties against a tensor of one value per row."""
    check_dtype("difficulty", difficulty, INTEGERS, "take it as ares_difficulty returned it")
    check_shape("difficulty", difficulty, rows.shape, "[S] (one per row)")
    check_device("difficulty", difficulty, rows.device, "the rows")


def _means_of_prompts(
    counts: torch.Tensor, difficulty: torch.Tensor, group_ids: torch.Tensor | None, backend: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean over the prompts of each difficulty of their mean count ``[3]`` float64, and whether there is one."""
    group = statistics(counts, group_ids, backend=backend)
    counted = torch.isfinite(counts) & (group.members > 0)  # a response of no prompt has no mean
    means = torch.where(counted, group.mean.float(), torch.nan)
    shares = (1 / group.members.clamp(min=1)).float()
    # One more unit for each difficulty, which is no member, gives it an entry.
    ids = torch.cat((difficulty.to(torch.int64), torch.arange(3, device=counts.device)))
    means, shares = (torch.nn.functional.pad(each, (0, 3), value=torch.nan) for each in (means, shares))
    by_difficulty = statistics(means, ids, weights=shares, backend=backend)
    return by_difficulty.mean[-3:], by_difficulty.members[-3:] > 0


def at_difficulty(numbers: torch.Tensor, difficulty: torch.Tensor, nowhere: float = torch.nan) -> torch.Tensor:
    """The numbers of difficulties ``[3]`` at the rows ``[S]`` float64, ``nowhere`` at a row without one."""
    inside = (difficulty >= 0) & (difficulty < 3)
    return torch.where(inside, numbers.detach().double()[difficulty.clamp(0, 2)], nowhere)


def check_three(name: str, tensor: torch.Tensor, rows: torch.Tensor) -> None:
    """Check a tensor of one value per difficulty against one of one value per row."""
    check_precise(name, tensor, f"use {name}.float()")
    check_shape(name, tensor, (3,), "[3] (one per difficulty)")
    check_device(name, tensor, rows.device, "the rows")


def _check_state(state: AresTargets, like: torch.Tensor) -> None:
    for name, tensor in state._asdict().items():
        check_three(name, tensor, like)
