"""Advantages of responses and steps that follow their mean entropy: the unit of every statistic is the response, or the
step, however long.

Advantages are computed once per optimiser step from whole batches, and over ranks by
``hpo_core.advantages.over_ranks(..., tables=True)``. A token whose entropy is not finite is in no mean.
"""

from __future__ import annotations

import math

import torch

from ..advantages import grpo
from ..advantages.terms import as_advantages, known
from ..arguments import check_compat, check_finite, check_limit
from ..batch import PackedBatch, as_batch, first_ranges, of_row, row_counts, spread_rows
from ..checks import check, check_rows, check_units
from ..distributed import whole_groups
from ..segments import chains, statistics
from ..specs import Provenance
from .signals import Signal, preset, read
from .statistics import LEAST_DIFFERENCE, means_of_segments


@preset(Provenance.VERIFIED, level="row")
def edge_grpo(
    advantages: torch.Tensor,
    entropy: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    *,
    most: float = math.inf,
    compat: str = "paper",
    backend: str | None = None,
) -> torch.Tensor:
    """EDGE-GRPO: ``A mean(Hbar) / Hbar``, Hbar the mean entropy of a response, and its mean over the prompt group
    (repository ZhangXJ199/EDGE-GRPO). Returns ``[S]`` float32.

    Args:
        advantages: ``[S]``, GRPO's.
        entropy: ``[T]`` in nats.
        most: the largest factor. The code has none; without one a response of entropy 0 gets 0, not infinity.
        compat: "code": there Hbar is the sum over the padded length, so a long response counts as uncertain.

    Without group ids the batch is one group, as the micro-batch of all processes is in the code. Where every response
    of a group has entropy 0 the factor is 1.

    Traps: the code reads the entropies at padding, too; here they are 0. Its factor is infinite at entropy 0.

    >>> batch = PackedBatch.from_lengths([1, 1, 1])
    >>> edge_grpo(torch.ones(3), torch.tensor([0.2, 0.4, 0.6]), batch)
    tensor([2.0000, 1.0000, 0.6667])
    """
    batch = as_batch(batch)
    check_rows(batch, advantages=advantages)
    check_limit("most", most)
    mean, usual = _means(read(batch, entropy=entropy), batch, check_compat(compat), backend)
    factor = torch.where(usual > 0, usual / mean, 1.0).clamp(max=most)
    return as_advantages(known(torch.where(advantages != 0, advantages * factor, 0.0)), advantages, backend)


@preset(Provenance.PAPER, level="row")
def ettrl(
    advantages: torch.Tensor,
    entropy: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    *,
    least: float = -math.inf,
    backend: str | None = None,
) -> torch.Tensor:
    """ETTRL: ``A (2 - Hbar / mean(Hbar))``, so that confident responses count more (arXiv 2508.11356, as
    others describe it). Returns ``[S]`` float32.

    Args:
        advantages, entropy: as in :func:`edge_grpo`, whose groups these are, too.
        least: the smallest factor. Without one, a response of more than twice the mean entropy changes sign.

    >>> batch = PackedBatch.from_lengths([1, 1, 1])
    >>> ettrl(torch.ones(3), torch.tensor([0.2, 0.4, 0.6]), batch)
    tensor([1.5000, 1.0000, 0.5000])
    """
    batch = as_batch(batch)
    check_rows(batch, advantages=advantages)
    check_limit("least", least, -math.inf)
    mean, usual = _means(read(batch, entropy=entropy), batch, False, backend)
    factor = torch.where(usual > 0, 2 - mean / usual, 1.0).clamp(min=least)
    return as_advantages(known(advantages * factor), advantages, backend)


def _means(given: Signal, batch: PackedBatch, padded: bool, backend: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean entropy of each row, and the mean of those of its group, ``[S]`` float64 each; 0 where there is none."""
    mean = means_of_segments(given.values, batch.row_of_token(), batch.rows, given.usable, backend)
    if padded:  # the padded length is the same for all rows, and cancels
        mean = mean * row_counts(batch, given.usable)
    of_group = statistics(mean.to(given.dtype), whole_groups(batch), backend=backend)
    known_mean = torch.isfinite(mean)
    return torch.where(known_mean, mean, 0.0), torch.where(known_mean, of_group.mean, 0.0)


@preset(Provenance.VERIFIED, level="step")
def empg(
    advantages: torch.Tensor,
    entropy: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    *,
    k: float = 1.0,
    k_next: float = 1.0,
    zeta: float = 0.05,
    backend: str | None = None,
) -> torch.Tensor:
    """EMPG: confident steps count more, and steps that lead to confident ones gain: ``A g + zeta f``, centred over the
    batch (arXiv 2509.09265). Returns ``[N]`` float32.

    ``g = exp(-k h) / mean of exp(-k h)`` and ``f = exp(-k_next h')``, with h the mean entropy of the step, scaled to
    [0, 1] over the batch's steps, and h' that of the trajectory's next step; after the last step, and before one
    without entropies, f is 0.

    Args:
        advantages: ``[S]`` of rows, spread over their steps.
        entropy: ``[T]`` in nats.
        batch: with steps.
        k, k_next: 1, the authors' (pseudocode of empgseed-seed.github.io).
        zeta: 0.05, ARLArena's, a repository of others; 0.1 in the pseudocode.

    Where all steps have equal entropies h is 0. A step without entropies gets 0. Ranges with equal ``step_ids``, in
    several rows of a trajectory, too, are one step: one mean, one unit of statistics, the advantage of its first row.

    >>> batch = PackedBatch(torch.tensor([0, 3]), cu_steps=torch.tensor([0, 1, 2, 3]))
    >>> empg(torch.ones(1), torch.tensor([0.1, 0.5, 0.9]), batch, zeta=0.0)
    tensor([ 0.5194, -0.0784, -0.4410])
    """
    batch = as_batch(batch)
    check_rows(batch, advantages=advantages)
    check(batch.num_steps is not None, "batch: expected one with steps; pass cu_steps or steps to PackedBatch")
    check_finite(k=k, k_next=k_next, zeta=zeta)
    signal = read(batch, entropy=entropy)
    first = first_ranges(batch)  # they stand for their steps, and other ranges have no mean
    step = of_row(first, batch.step_of_token(), -1)
    mean = means_of_segments(signal.values, step, batch.num_steps or 0, signal.usable, backend)
    usable = torch.isfinite(mean)
    base = statistics(mean, None, backend=backend).least
    above = mean - base  # float32 keeps more of it than of the mean
    ends = statistics(above, None, backend=backend)
    span = ends.greatest - ends.least
    apart = span > LEAST_DIFFERENCE * base.abs()
    h = torch.where(usable & apart, (above - ends.least) / span, 0.0)
    own = torch.exp(-k * h)
    g = own / statistics(own.to(signal.dtype), None, mask=usable, backend=backend).mean
    steps = chains(batch.ids_of_steps()["trajectory_ids"])
    f = steps.unsorted(steps.following(steps.sorted(torch.where(usable, torch.exp(-k_next * h), 0.0))))
    of_step = of_row(advantages.double(), batch.row_of_step(), 0.0)
    shaped = torch.where(usable, of_step * g + zeta * f, 0.0)
    centre = statistics(shaped.to(signal.dtype), None, mask=usable & torch.isfinite(shaped), backend=backend).mean
    return as_advantages(known(torch.where(usable, shaped - centre, 0.0))[first], advantages, backend)


@preset(Provenance.VERIFIED, level="token")
def ucas(
    advantages: torch.Tensor,
    confidence: torch.Tensor,
    logits: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    *,
    right: float = 0.25,
    wrong: float = 0.35,
    certainty: float = 0.05,
    backend: str | None = None,
) -> torch.Tensor:
    """UCAS: certain mistakes cost more, certain successes earn less, and certain tokens less still (arXiv 2510.10649;
    repository xvolcano02/UCAS). Returns ``[T]`` float32.

    ``A exp(-right c)`` where ``A > 0`` and ``A exp(wrong c)`` elsewhere, c the confidence of the response, standardised
    in its group; then minus ``certainty`` times the token's raw logit, scaled to [0, 1] over the batch. A positive
    advantage stays at least 0.

    Args:
        advantages: ``[S]``, GRPO's.
        confidence: ``[S]``, the mean (or sum) over the response of ``KL(uniform || p)``.
        logits: ``[T]``, the raw logit of each token. A valid token whose logit, or whose row's confidence, is not
            finite gets NaN, so that the loss leaves it out and counts it.
        right, wrong, certainty: 0.25, 0.35 and 0.05, the code's.

    Traps: in a group of one c is 0, in the code the confidence itself, which is that of the whole response and large.
    Where all logits are equal they are scaled to 0, in the code to 0.5. The code adds 1e-6 to deviations.

    >>> batch = PackedBatch.from_lengths([1, 1, 1])
    >>> ucas(torch.tensor([1.0, 1.0, -1.0]), torch.tensor([-1.0, 0.0, 1.0]), torch.zeros(3), batch)
    tensor([ 1.2840,  1.0000, -1.4191])
    """
    batch = as_batch(batch)
    check_rows(batch, advantages=advantages, confidence=confidence)
    check_finite(right=right, wrong=wrong, certainty=certainty)
    signal = read(batch, logits=logits)
    group = statistics(confidence, whole_groups(batch), backend=backend)
    deviation = group.deviation(1)
    c = torch.where(deviation > 0, (confidence.double() - group.mean) / deviation, 0.0)
    of_row_advantages = advantages.double()
    shaped = of_row_advantages * torch.exp(torch.where(of_row_advantages > 0, -right * c, wrong * c))
    ends = statistics(signal.values.to(signal.dtype), None, mask=signal.usable, backend=backend)
    span = ends.greatest - ends.least
    scaled = torch.where(span > 0, (signal.values - ends.least) / span, 0.0)
    of_token = spread_rows(shaped, batch, 0.0)
    final = of_token - certainty * scaled
    final = torch.where(of_token > 0, final.clamp(min=0), final)
    exact = known(torch.where(signal.usable, final, 0.0))
    broken = signal.broken | signal.usable & ~spread_rows(torch.isfinite(confidence), batch, True)
    return as_advantages(torch.where(broken, torch.nan, exact), advantages, backend)


@preset(Provenance.VERIFIED, level="row")
def hapo_advantages(
    rewards: torch.Tensor,
    group_ids: torch.Tensor | None,
    lengths: torch.Tensor,
    *,
    compat: str = "paper",
    backend: str | None = None,
) -> torch.Tensor:
    """HAPO's token-level group average: ``(r - mean) / std`` over all *tokens* of the group, which sum to 0 (arXiv
    2509.16591). Returns ``[S]`` float32.

    Args:
        rewards: ``[S]``.
        lengths: ``[S]`` floating point, valid tokens of each response.
        compat: "code": GRPO's advantages for every group in which one of these reaches 5. The code looks at padding,
            too, whose reward is 0; here every group has some.

    The deviation is biased (ddof 0), as in the code. Equal rewards give 0, and so does a group of one, where the code
    keeps the reward.

    >>> hapo_advantages(torch.tensor([1.0, 0.0, 0.0]), None, torch.tensor([4.0, 2.0, 6.0]))
    tensor([ 1.4142, -0.7071, -0.7071])
    """
    check_units(rewards=rewards, group_ids=group_ids, lengths=lengths)
    group = statistics(rewards, group_ids, weights=lengths, backend=backend)
    deviation = group.deviation(0)
    own = known(torch.where(deviation > 0, (rewards.double() - group.mean) / deviation, 0.0))
    own = as_advantages(own, rewards, backend)
    if not check_compat(compat):
        return own
    farthest = torch.maximum(group.greatest.clamp(min=0) - group.mean, group.mean - group.least.clamp(max=0))
    reaches = farthest >= 5 * (deviation + 1e-6)  # the epsilon of the code, where 25 of 26 tokens are at exactly 5
    return torch.where(reaches, grpo(rewards, group_ids, backend=backend), own)
