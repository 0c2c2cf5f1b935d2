"""Estimators that remember prompts or roles from step to step, and their memories."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..arguments import check_finite, examines
from ..checks import check, check_device, check_places, check_real, check_units
from ..segments import chains, scan, statistics
from ..specs import Provenance
from .flat import grpo
from .selection import ordered
from .terms import about_group, as_advantages, estimator, known, members_of, scorable
from .whitening import whiten


class BetaTracker(NamedTuple):
    """The memory of each prompt's success rate: alpha and beta of a Beta distribution, ``[P]`` float32 each.

    It pickles, and loads with ``weights_only=True``.
    """

    alpha: torch.Tensor
    beta: torch.Tensor

    @staticmethod
    @examines
    @torch.no_grad()
    def start(successes: torch.Tensor, samples: int, *, least_memory: float = 0.875) -> BetaTracker:
        """A tracker after the successes s ``[P]`` of n = ``samples`` responses to each prompt:
        ``alpha = N (s + 1/2) / (n + 1)``, ``beta = N (n - s + 1/2) / (n + 1)``, ``N = 1 / (1 - least_memory)``; without
        samples, or where s is NaN or infinite, 1/2 each.

        >>> BetaTracker.start(torch.tensor([3.0]), 8).value
        tensor([0.3889])
        """
        check_real("successes", successes)
        check(samples >= 0, "samples: expected a count >= 0, got {}", samples)
        check(0 <= least_memory < 1, "least_memory: expected a number in [0, 1), got {}", least_memory)
        size = 1 / (1 - least_memory)
        both = (successes.float(), samples - successes.float())
        scored = torch.isfinite(both[0]) & (samples > 0)
        return BetaTracker(*(torch.where(scored, size * (each + 0.5) / (samples + 1), 0.5) for each in both))

    @property
    def value(self) -> torch.Tensor:
        """The mean ``[P]``."""
        return self.alpha / (self.alpha + self.beta)

    @property
    def sampling_weights(self) -> torch.Tensor:
        """How much a prompt has to teach ``[P]``: ``sqrt(v (1 - v)) + 0.05``."""
        return (self.value * (1 - self.value)).sqrt() + 0.05

    @examines
    @torch.no_grad()
    def updated(
        self,
        rewards: torch.Tensor,
        prompts: torch.Tensor,
        divergence: torch.Tensor,
        *,
        half_life: float = 0.06,
        least_memory: float = 0.875,
        most_memory: float = 0.96,
    ) -> BetaTracker:
        """The tracker after rewards in [0, 1]: ``alpha <- rho alpha + r``, ``beta <- rho beta + 1 - r``,
        ``rho = clamp(2^(-D / half_life), least_memory, most_memory)``.

        Over ranks, every rank passes the units of all ranks, gathered, or their trackers drift apart.

        Args:
            rewards: ``[S]``, at most one per prompt; NaN or infinite: its prompt stays as it is.
            prompts: ``[S]`` int64, the place of each unit's prompt; a unit of a negative place, or of one beyond the
                tracker, changes nothing.
            divergence: ``[S]`` D, the mean ``|logp - old_logp|`` on the prompt's last stored response; NaN: its prompt
                stays as it is.

        >>> tracker = BetaTracker.start(torch.tensor([3.0, 3.0]), 8)
        >>> tracker.updated(torch.tensor([1.0, torch.nan]), torch.tensor([0, 1]), torch.ones(2)).value
        tensor([0.4653, 0.3889])
        """
        check_units(alpha=self.alpha, beta=self.beta)
        check_units(rewards=rewards, divergence=divergence)
        check_places("prompts", prompts, rewards)
        check_device("rewards", rewards, self.alpha.device, "alpha")
        check(half_life > 0, "half_life: expected a number above 0, got {}", half_life)
        for name, memory in (("least_memory", least_memory), ("most_memory", most_memory)):
            check(0 <= memory <= 1, "{}: expected a number in [0, 1], got {}", name, memory)
        is_ordered = least_memory <= most_memory
        check(is_ordered, "least_memory: expected at most {} (most_memory), got {}", most_memory, least_memory)
        places = _places(prompts, self.alpha, torch.isfinite(rewards) & ~torch.isnan(divergence))
        kept = torch.exp2(-divergence.float() / half_life).clamp(least_memory, most_memory)
        old_alpha, old_beta, rewards = (x.float() for x in (self.alpha, self.beta, rewards))
        alpha = _written(old_alpha, places, kept * _read(old_alpha, places) + rewards)
        return BetaTracker(alpha, _written(old_beta, places, kept * _read(old_beta, places) + 1 - rewards))

    def to(self, device: torch.device | str) -> BetaTracker:
        return BetaTracker(*(each.to(device) for each in self))


@estimator(Provenance.VERIFIED, tables=True)
def spo_single_stream(
    rewards: torch.Tensor,
    value: torch.Tensor,
    *,
    eps: float = 1e-8,
    mask: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """SPO: ``a = r - v`` of one response per prompt, normalised over the batch, ddof 1 (arXiv 2509.13232). Returns
    ``[S]`` float32.

    Args:
        value: ``[S]``, the ``value`` of the :class:`BetaTracker` at each unit's prompt *before* the tracker is updated.

    There are no groups; identical rewards do not give 0. The gate :func:`hpo_core.gates.spo` is another paper's.

    >>> spo_single_stream(torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([0.388889, 0.25, 0.9, 0.5]))
    tensor([ 1.2893, -0.4990,  0.2279, -1.0182])
    """
    check_units(rewards=rewards, value=value, mask=mask)
    lead = about_group(rewards.double() - value.double(), rewards, None, mask=mask, backend=backend)
    return whiten(lead, mask=mask, eps=eps, backend=backend)


class GroupHistory(NamedTuple):
    """The memory that DCPO has of each prompt ``[P]``: steps seen, and mean and variance over all of them.

    It pickles, and loads with ``weights_only=True``.
    """

    steps: torch.Tensor
    mean: torch.Tensor
    variance: torch.Tensor

    @staticmethod
    @examines
    def start(prompts: int, device: torch.device | str = "cpu") -> GroupHistory:
        """Nothing seen yet."""
        check(prompts >= 0, "prompts: expected a count >= 0, got {}", prompts)
        return GroupHistory(*(torch.zeros(prompts, dtype=torch.float64, device=device) for _ in range(3)))

    @examines
    @torch.no_grad()
    def merged(self, prompts: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> GroupHistory:
        """The history with one more step of equally many samples of these prompts: ``mean <- (t mean + m) / (t + 1)``,
        ``variance <- (t variance + v + t / (t + 1) (m - mean)^2) / (t + 1)``. A prompt whose m or v is NaN or infinite
        has no step more; negative places, and those beyond the history, belong to no prompt.

        >>> old = GroupHistory(*(torch.tensor([x], dtype=torch.float64) for x in (1, 0.5, 0.25)))
        >>> old.merged(torch.tensor([0]), torch.tensor([0.25]), torch.tensor([0.1875])).variance
        tensor([0.2344], dtype=torch.float64)
        """
        check_units(steps=self.steps, mean=self.mean, variance=self.variance)
        check_units(mean=mean, variance=variance)
        check_places("prompts", prompts, mean)
        check_device("mean", mean, self.steps.device, "the history")
        places = _places(prompts, self.steps, torch.isfinite(mean) & torch.isfinite(variance))
        t, before, spread = (_read(field.double(), places) for field in self)
        mean, variance = mean.double(), variance.double()
        merged = (t * spread + variance + t / (t + 1) * (mean - before).square()) / (t + 1)
        news = (t + 1, before + (mean - before) / (t + 1), merged)  # a mean that stays is kept to the bit
        return GroupHistory(*(_written(old.double(), places, new) for old, new in zip(self, news, strict=True)))

    def to(self, device: torch.device | str) -> GroupHistory:
        return GroupHistory(*(each.to(device) for each in self))


class DcpoAdvantages(NamedTuple):
    """The result of :func:`dcpo`."""

    advantages: torch.Tensor  # [S] float32
    history: GroupHistory  # with this step in it, for the next one


class DeGrpoAdvantages(NamedTuple):
    """The result of :func:`de_grpo`."""

    advantages: torch.Tensor  # [S] float32
    utility: torch.Tensor  # [P] with this step in it, for the next one


class RoleAdvantages(NamedTuple):
    """The result of :func:`rae`."""

    advantages: torch.Tensor  # [S] float32
    baselines: torch.Tensor  # [P] with these games in them, for the next ones


torch.serialization.add_safe_globals([BetaTracker, GroupHistory, DcpoAdvantages, DeGrpoAdvantages, RoleAdvantages])


@estimator(Provenance.VERIFIED)
def dcpo(
    rewards: torch.Tensor,
    prompts: torch.Tensor,
    history: GroupHistory,
    *,
    ddof: int = 1,
    mask: torch.Tensor | None = None,
    backend: str | None = None,
) -> DcpoAdvantages:
    """DCPO: this step's normalised reward mixed with that over all steps so far, the smaller of two mixes (arXiv
    2509.02333). Returns ``advantages`` ``[S]`` float32, and ``history`` with this step in it.

    ``A_new = (r - mean) / std`` in the group, ``A_all`` with mean and std over all steps, no eps, 0 where a std is 0;
    with i the steps of the prompt so far, this one included: ``A_new / i + (1 - 1 / i) A_all`` or
    ``(1 - 1 / i) A_new + A_all / i``, whichever has the smaller absolute value.

    Args:
        prompts: ``[S]`` int64, the place of each unit's prompt in the history, which is its group; negative: in none. A
            place beyond the history gets NaN, which the loss leaves out and counts.
        ddof: of each step's variance, 1 as in the authors' code (the paper does not say) or 0. The variance over all
            steps is put together from these by one formula, which is exact for 0.

    A prompt whose units all lack a reward gets 0, and no step in the history. A group of one has ``A_new = 0``: it gets
    0 in the prompt's first step, and a share of ``A_all`` later; the authors' code raises.

    >>> advantages, history = dcpo(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), GroupHistory.start(1))
    >>> advantages, history.mean
    (tensor([ 0.7071, -0.7071]), tensor([0.5000], dtype=torch.float64))
    """
    check_units(rewards=rewards, mask=mask)
    check(ddof in (0, 1), "ddof: expected 0 or 1, got {}", ddof)
    check_places("prompts", prompts, rewards)
    group = statistics(rewards, prompts, mask=mask, backend=backend)
    variance = group.deviation(ddof).square()
    member = members_of(rewards, group, mask)
    merged = history.merged(prompts, torch.where(group.members > 0, group.mean, torch.nan), variance)
    places = _places(prompts, history.steps, member)
    steps, mean, spread = (_read(field, places) for field in merged)

    def normalised(center: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
        return torch.where(square > 0, (rewards.double() - center) / square.sqrt(), 0.0)

    new, overall, part = normalised(group.mean, variance), normalised(mean, spread), 1 / steps
    first, second = part * new + (1 - part) * overall, (1 - part) * new + part * overall
    smaller = torch.where(first.abs() <= second.abs(), first, second)
    smaller = torch.where(prompts < history.steps.numel(), smaller, torch.nan)
    return DcpoAdvantages(as_advantages(torch.where(member, smaller, 0.0), rewards, backend), merged)


@estimator(Provenance.VERIFIED)
def de_grpo(
    rewards: torch.Tensor,
    prompts: torch.Tensor,
    scores: torch.Tensor,
    values: torch.Tensor,
    utility: torch.Tensor,
    *,
    samples: int,
    smoothing: float = 0.8,
    least: float = 0.2,
    most: float = 0.8,
    decay: float = 0.5,
    eps: float = 1e-4,
    mask: torch.Tensor | None = None,
    backend: str | None = None,
) -> DeGrpoAdvantages:
    """DE-GRPO (FaVChat): GRPO times how useful the prompt has been and how far its rewards lie apart (arXiv
    2503.09158, official code). Returns ``advantages`` ``[S]`` float32, and ``utility`` ``[P]`` with this step in it.

    Over the pairs of a prompt's responses ``G(x) = exp(mean log(|x_i - x_j| + 1e-6))``;
    ``U <- smoothing U + (1 - smoothing) G(rewards) G(scores)``; d is 0 where ``U < least``, ``decay`` where
    ``U > most``, else 1. ``A = A_grpo tanh(d (mean |r_i - r_j| - V))``.

    Args:
        prompts: ``[S]`` int64, the place of each unit's prompt in ``utility``, which is its group; negative: in none. A
            place beyond it gets NaN, which the loss leaves out and counts.
        scores: ``[S]``, the mean log-probability of each response's tokens. A unit without one has no reward.
        values: V ``[S]``, a value head's estimate for the unit's prompt; NaN or infinite: the unit gets 0.
        utility: ``[P]`` floating point, 0 at the start.
        samples: the most responses a prompt has, because all pairs are visited; a prompt with more gets NaN and keeps
            its utility.

    Traps: two equal rewards are a pair of 1e-6, so that prompts of binary rewards stay below ``least`` and teach
    nothing; and in the first steps no prompt has reached it. The sign of an advantage turns where V exceeds the gap.

    >>> r, scores = torch.tensor([0.0, 9.0]), torch.tensor([-1.0, -0.5])
    >>> de_grpo(r, torch.tensor([0, 0]), scores, torch.ones(2), torch.zeros(1), samples=2)
    DeGrpoAdvantages(advantages=tensor([-0.7066,  0.7066]), utility=tensor([0.9000]))
    """
    check_units(rewards=rewards, scores=scores, values=values, mask=mask)
    check_units(utility=utility)
    check_device("rewards", rewards, utility.device, "utility")
    check_places("prompts", prompts, rewards)
    check(samples >= 1, "samples: expected a count of at least 1, got {}", samples)
    check_finite(smoothing=smoothing, decay=decay)
    scored = scorable(rewards, mask) & torch.isfinite(scores)
    group = statistics(rewards, prompts, mask=scored, backend=backend)
    (apart, separable), (_, sensitive) = (_gaps(x, prompts, scored, samples, backend) for x in (rewards, scores))
    places = _places(prompts, utility, scored)
    old = _read(utility.double(), places)
    visited = (group.members > 1) & (group.members <= samples)
    new = torch.where(visited, smoothing * old + (1 - smoothing) * separable * sensitive, old)
    stage = torch.where(new < least, 0.0, torch.where(new > most, decay, torch.ones_like(new)))
    plain = grpo(rewards, prompts, mask=scored, eps=eps, backend=backend)
    lead = apart - torch.where(torch.isfinite(values), values, torch.nan).double()
    exact = torch.where(plain == 0, 0.0, known(plain * torch.tanh(stage * lead)))
    exact = torch.where((group.members > samples) | (prompts >= utility.numel()), torch.nan, exact)
    member = scored & (group.members > 0)
    written = _written(utility.double(), places, new).to(utility.dtype)
    return DeGrpoAdvantages(as_advantages(torch.where(member, exact, 0.0), rewards, backend), written)


@estimator(Provenance.VERIFIED)
def rae(
    rewards: torch.Tensor,
    roles: torch.Tensor,
    baselines: torch.Tensor,
    *,
    decay: float = 0.95,
    positions: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    backend: str | None = None,
) -> RoleAdvantages:
    """SPIRAL's role-conditioned advantage estimation, for self-play: a reward minus the moving average of its role's
    rewards in earlier games (arXiv 2506.24119). Returns ``advantages`` ``[S]`` float32, and ``baselines`` ``[P]`` with
    these games in them.

    Of each role, one game after the other: ``A = r - b``, then ``b <- decay b + (1 - decay) r``.

    Args:
        rewards: ``[S]``, of one player of a game each.
        roles: ``[S]`` int64, the place of each unit's role in ``baselines``, a role of another game being another one;
            negative: in none. A place beyond gets NaN, which the loss leaves out and counts.
        baselines: b ``[P]`` floating point, 0 at the start.
        positions: ``[S]``, the order in which games ended. Default: that in which they stand here.

    There are no groups: the role that starts first, or has the better cards, wins more, and a baseline of its own takes
    that away. A unit without a reward changes no baseline.

    Traps: identical rewards do not give 0 before the baselines have moved. With the update first, as one may read the
    paper's equations, every advantage is ``decay`` times this; the authors' code, and this, subtract first. The code
    leaves rows with an advantage of exactly 0 out of the batch.

    >>> rae(torch.tensor([1.0, -1.0, 1.0]), torch.tensor([0, 1, 0]), torch.zeros(2), decay=0.5)
    RoleAdvantages(advantages=tensor([ 1.0000, -1.0000,  0.5000]), baselines=tensor([ 0.7500, -0.5000]))
    """
    check_units(rewards=rewards, mask=mask)
    check_units(baselines=baselines)
    check_device("rewards", rewards, baselines.device, "baselines")
    check_places("roles", roles, rewards)
    check(0 <= decay <= 1, "decay: expected a number in [0, 1], got {}", decay)
    scored = scorable(rewards, mask)
    places, count = _places(roles, baselines, scored), baselines.numel()
    games = chains(torch.where(places < count, places, -1), positions)
    reward, start = games.sorted(known(rewards)).double(), games.sorted(_read(baselines.double(), places))
    news = (1 - decay) * reward + torch.where(games.begins(), decay * start, 0.0)
    after = scan(news, torch.full_like(news, decay), games.cu_seqlens, backend, forward=True)
    before = games.unsorted(torch.where(games.begins(), start, after.roll(1)))
    lead = torch.where(roles < count, rewards.double() - before, torch.nan)
    exact = torch.where(scored & (roles >= 0), lead, 0.0)
    last = torch.where(games.ends(), games.sorted(places), count)
    written = _written(baselines.double(), last, after).to(baselines.dtype)
    return RoleAdvantages(as_advantages(exact, rewards, backend), written)


def _gaps(
    values: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor, samples: int, backend: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean, and the geometric mean beside 1e-6, of the distances of all pairs in each unit's group ``[S]``."""
    groups, rank, size = ordered(values, ids, mask)
    value = groups.sorted(values).double()
    sums = value.new_zeros(2, value.numel())
    for apart in range(1, min(samples, value.numel())):  # no pair is farther apart
        pairs = (rank + apart < size) & (groups.chain >= 0)
        gap = torch.where(pairs, value.roll(-apart) - value, 0.0)
        sums += torch.where(pairs, torch.stack([gap, torch.log(gap + 1e-6)]), 0.0)
    number = ((size - 1) / 2).clamp(min=0.5)  # pairs per member
    mean, log = (statistics(groups.unsorted(each / number), ids, mask=mask, backend=backend).mean for each in sums)
    return mean, torch.exp(log)


def _places(places: torch.Tensor, memory: torch.Tensor, scored: torch.Tensor) -> torch.Tensor:
    """Places ``[S]`` in a memory ``[P]`` of scored units; P, behind it, for the others and for those that have none."""
    own = scored & (places >= 0) & (places < memory.numel())
    return torch.where(own, places.to(torch.int64), memory.numel())


def _read(memory: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The entries of the memory ``[P]`` at places ``[S]``; behind it 0."""
    return torch.cat((memory, memory.new_zeros(1)))[places]


def _written(memory: torch.Tensor, places: torch.Tensor, news: torch.Tensor) -> torch.Tensor:
    """The memory ``[P]`` with news at places ``[S]``; news behind it are dropped."""
    return torch.cat((memory, memory.new_zeros(1))).scatter(0, places, news)[:-1]
