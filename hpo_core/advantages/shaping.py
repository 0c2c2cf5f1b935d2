"""Estimators that shape the advantages of others by sign, length, position, difficulty or confidence."""

from __future__ import annotations

import math

import torch

from ..arguments import check_finite
from ..checks import check, check_units
from ..segments import dense_ids, statistics
from ..specs import Provenance
from .flat import grpo, grpo_of_exact
from .terms import as_advantages, estimator, grouped, known, scorable


@estimator(Provenance.VERIFIED, tables=True)
def icpo(
    rewards: torch.Tensor,
    group_ids: torch.Tensor | None,
    is_steered: torch.Tensor,
    *,
    progress: float,
    bonus: float = 1.0,
    threshold: float = 0.0,
    rejected: bool = True,
    ddof: int = 1,
    eps: float = 1e-6,
    mask: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """ICPO: GRPO of a prompt's own rollouts and of those that an example steered, which earn a bonus that fades (arXiv
    2510.26519). Returns ``[S]`` float32.

    A steered rollout whose reward is above ``threshold`` earns ``bonus (1 - progress)`` more; one whose reward is not
    is rejected: it enters no statistic and gets 0. Without steered rollouts this is GRPO. Their loss:
    :func:`hpo_core.gates.icpo_weight`.

    Args:
        is_steered: ``[S]`` bool.
        progress: the updates done over those planned, in [0, 1]; 400 in the authors' recipe.
        bonus: 1 in the recipe; 0: ICPO without shaping.
        threshold: for rewards of 0 and 1. The paper rejects below 1; a comparison with 1 itself would reject all.
        rejected: False: steered rollouts that failed stay, without a bonus, as in the released code.

    >>> icpo(torch.tensor([1.0, 0, 1, 0]), None, torch.tensor([False, False, True, True]), progress=0.5)
    tensor([ 0.2182, -1.0911,  0.8729,  0.0000])
    """
    check_units(rewards=rewards, group_ids=group_ids, is_steered=is_steered, mask=mask)
    check(0 <= progress <= 1, "progress: expected a number in [0, 1], got {}", progress)
    check_finite(bonus=bonus, threshold=threshold)
    right = rewards > threshold
    shaped = torch.where(is_steered & right, rewards.double() + bonus * (1 - progress), rewards.double())
    if rejected:
        mask = right | ~is_steered if mask is None else mask & (right | ~is_steered)
    return grpo_of_exact(shaped, rewards, group_ids, ddof=ddof, eps=eps, mask=mask, backend=backend)


@estimator(Provenance.VERIFIED, tables=True)
def adora(
    rewards: torch.Tensor,
    group_ids: torch.Tensor | None,
    lengths: torch.Tensor,
    is_correct: torch.Tensor,
    *,
    damping: float = 0.1,
    cutoff: float = math.inf,
    without_success: bool = False,
    without_mistake: bool = True,
    ddof: int = 1,
    eps: float = 1e-6,
    mask: torch.Tensor | None = None,
    singleton: str = "zero",
    backend: str | None = None,
) -> torch.Tensor:
    """ADORA: GRPO, times ``damping`` in groups whose longest correct response is not longer than the mean of the wrong
    ones (official code). Returns ``[S]`` float32.

    Args:
        lengths: ``[S]`` floating point. A response whose length is NaN or infinite is neither the longest nor in the
            mean. A group whose right responses all lack a length counts as all wrong, and one whose wrong responses all
            lack one as all right.
        is_correct: ``[S]`` bool.
        cutoff: wrong responses of this length or more are not in the mean: they were cut off. 4054 in the authors' code
            for language models, 4094 in that for vision models.
        without_success, without_mistake: whether a group that got everything wrong, or everything right, keeps its
            advantages. The authors' code for vision models has True and False.
        singleton: ``"raw"`` keeps the reward of a group of one, as the authors' code for language models does.

    Responses without a reward are neither right nor wrong.

    >>> r, n = torch.tensor([1.0, 0.0]), torch.tensor([5.0, 9.0])
    >>> adora(r, None, n, r > 0)
    tensor([ 0.0707, -0.0707])
    """
    check_units(rewards=rewards, group_ids=group_ids, lengths=lengths, is_correct=is_correct, mask=mask)
    check_finite(damping=damping)
    scored = scorable(rewards, mask)
    right = statistics(lengths, group_ids, mask=scored & is_correct, backend=backend)
    wrong = statistics(lengths, group_ids, mask=scored & ~is_correct & (lengths < cutoff), backend=backend)
    longer = torch.where(wrong.members == 0, without_mistake, right.greatest > wrong.mean)
    kept = torch.where(right.members == 0, without_success, longer)
    advantages = grpo(rewards, group_ids, mask=mask, ddof=ddof, eps=eps, singleton=singleton, backend=backend)
    return torch.where(kept, advantages, damping * advantages)


@estimator(Provenance.VERIFIED, tables=True)
def grpo_lead(
    rewards: torch.Tensor,
    group_ids: torch.Tensor | None,
    *,
    is_correct: torch.Tensor | None = None,
    least: float = 0.4,
    most: float = 1.5,
    midpoint: float = 0.75,
    steepness: float = 10.0,
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: str = "zero",
    mask: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """GRPO-LEAD: GRPO, where right answers to hard prompts and wrong answers to easy ones weigh most (arXiv 2504.09696;
    its code). Returns ``[S]`` float32.

    ``A w(rho)`` where GRPO's A is above 0, else ``A w(1 - rho)``; rho is the share of right responses in the group and
    ``w(x) = least + (most - least) / (1 + exp(steepness (x - midpoint)))``.

    Args:
        is_correct: ``[S]`` bool. None: the responses with a reward above 0, as in the code.
        least, most, midpoint, steepness: 0.4, 1.5, 0.75 and 10, the paper's and the code's.
        singleton: of a group of one; ``"raw"`` keeps its reward, times its weight, as the authors' code does.

    Traps: the advantages of a group do not sum to 0. The rewards are the caller's. The paper's are -1 for wrong answers
    and more for short right ones than for long ones: in its code, for prompts whose answers have thousands of tokens,
    ``torch.where(right, (-0.05 * grpo(lengths.float(), group_ids, mask=right)).exp(), -1.0)``.

    >>> grpo_lead(torch.tensor([1.0, 0.0, 0.0, 0.0]), None)
    tensor([ 2.2390, -0.4750, -0.4750, -0.4750])
    """
    check_units(rewards=rewards, group_ids=group_ids, is_correct=is_correct, mask=mask)
    check_finite(least=least, most=most, midpoint=midpoint, steepness=steepness)
    right = (rewards > 0 if is_correct is None else is_correct).to(rewards.dtype)
    share = statistics(right, group_ids, mask=scorable(rewards, mask), backend=backend).mean
    advantages = grpo(rewards, group_ids, mask=mask, ddof=ddof, eps=eps, singleton=singleton, backend=backend)
    difficulty = torch.where(advantages > 0, share, 1 - share)
    weight = least + (most - least) * torch.sigmoid(steepness * (midpoint - difficulty))
    return as_advantages(advantages * weight, rewards, backend)


@estimator(Provenance.VERIFIED, tables=True)
def copo(
    rewards: torch.Tensor,
    group_ids: torch.Tensor | None,
    variant_ids: torch.Tensor,
    is_original: torch.Tensor,
    confidences: torch.Tensor,
    *,
    variants: int = 4,
    sharpness: float = 2.0,
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: str = "zero",
    mask: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """CoPO (CogRouter): GRPO of steps, shared out among variants of each step's thought by how likely they make its
    action (arXiv 2602.12662; its code). Returns ``[S]`` float32.

    The steps that were played, the originals, are compared within their prompt. The variants of an original, with more
    or less thought before the same action, have its advantage A, and all of them get
    ``A e^(sharpness p) / mean e^(sharpness p)``: ``p = (c - least) / (greatest - least)`` is the place of a variant's
    confidence c, clamped to [1e-6, 1], among those of the step. The mean of the factor over a step is 1.

    Args:
        rewards: ``[S]``, of originals; those of others are not read.
        variant_ids: ``[S]`` integers, one for an original and its variants; negative: an original without variants.
            Equal numbers of two prompts are two sets.
        is_original: ``[S]`` bool, the steps that were played.
        confidences: ``[S]``, in the code the geometric mean of the probabilities of the action's tokens after each
            variant's thought. A unit without a finite one is in no statistic and gets 0, also an original without
            variants.
        variants: the size of a set with its original, 4 in the code. The factor is 1 in a set of another size, as
            there.
        sharpness: 2, the code's.
        singleton: of an original alone in its prompt; ``"raw"`` keeps its reward, as the authors' code does.

    Traps: every original counts in the mean and deviation of its prompt, so that long trajectories weigh more. Where
    confidences are at most 1e-6 apart the factor is 1. In the code rewards of originals that are less than 1e-6 apart
    count as equal, and a schedule of the factor and a bonus for rare levels are switched off.

    >>> ids, original = torch.tensor([0, 0, 0, 0, 1]), torch.tensor([True, False, False, False, True])
    >>> copo(torch.tensor([1.0, 0, 0, 0, 0]), None, ids, original, torch.tensor([0.2, 0.4, 0.6, 0.8, 0.5]))
    tensor([ 0.2002,  0.3899,  0.7594,  1.4790, -0.7071])
    """
    check_units(
        rewards=rewards, group_ids=group_ids, variant_ids=variant_ids, is_original=is_original,
        confidences=confidences, mask=mask,
    )  # fmt: skip
    check(variants >= 1, "variants: expected a count of at least 1, got {}", variants)
    check(0 <= sharpness < math.inf, "sharpness: expected a finite number >= 0, got {}", sharpness)
    if group_ids is not None:
        variant_ids = dense_ids(group_ids, variant_ids)
    member = scorable(confidences, mask) & (torch.isfinite(rewards) | ~is_original)
    played = member & is_original
    own = grpo(rewards, group_ids, ddof=ddof, eps=eps, singleton=singleton, mask=played, backend=backend)
    of_original = statistics(own, variant_ids, mask=played, backend=backend).mean
    advantages = torch.where(is_original, own.double(), of_original)
    confidence = confidences.double().clamp(1e-6, 1)
    alike = statistics(as_advantages(confidence, rewards, backend), variant_ids, mask=member, backend=backend)
    spread = alike.greatest - alike.least
    power = (sharpness * (confidence - alike.greatest) / spread).exp()  # at most 1, so that no sum overflows
    differ = spread > 1e-6
    mean = statistics(torch.where(differ, power, 1.0), variant_ids, mask=member, backend=backend).mean
    factor = torch.where(differ & (alike.members == variants), power / mean, 1.0)
    return as_advantages(torch.where(member, advantages * factor, 0.0), rewards, backend)


@estimator(Provenance.PAPER, tables=True)
def aspo_shaping(
    advantages: torch.Tensor,
    group_ids: torch.Tensor | None,
    positions: torch.Tensor,
    lengths: torch.Tensor,
    is_shaped: torch.Tensor,
    *,
    slope: float = -2.0,
    most: float = 0.7,
    backend: str | None = None,
) -> torch.Tensor:
    """ASPO: responses that call code earlier than their group's gain, by at most a part of their advantage (arXiv
    2508.19201). Returns ``[S]`` float32.

    ``A + clip(slope (p - mean p) / mean L, -most |A|, most |A|)``. The sign stays, since ``most`` < 1. The gate
    :func:`hpo_core.gates.aspo` is another paper's.

    Args:
        advantages: ``[S]``, GRPO's in the paper. A unit whose advantage is NaN or infinite, or that is in no group, is
            in no mean and gets 0.
        positions: p ``[S]`` floating point, the place of the first token of code; NaN: no bonus.
        lengths: L ``[S]`` floating point, tokens of each response.
        is_shaped: ``[S]`` bool, correct responses that use code. Assumed: mean p is over these, mean L over the group.

    >>> given = (torch.tensor([x, y]) for x, y in ((1.0, -1.0), (200.0, 400.0), (1000.0, 1000.0)))
    >>> aspo_shaping(next(given), None, *given, torch.tensor([True, True]))
    tensor([ 1.2000, -1.2000])
    """
    check_units(advantages=advantages, group_ids=group_ids, positions=positions, lengths=lengths, is_shaped=is_shaped)
    check(0 <= most < 1, "most: expected a number in [0, 1), which keeps the sign, got {}", most)
    check_finite(slope=slope)
    scored = torch.isfinite(advantages)
    given = torch.where(grouped(scored, group_ids), advantages.double(), 0.0)
    mean = statistics(positions, group_ids, mask=scored & is_shaped, backend=backend).mean
    length = statistics(lengths, group_ids, mask=scored, backend=backend).mean
    bound = most * given.abs()
    shift = known(torch.where(is_shaped & (length > 0), slope * (positions.double() - mean) / length, 0.0))
    return as_advantages(given + torch.minimum(torch.maximum(shift, -bound), bound), advantages, backend)


@estimator(Provenance.VERIFIED)
def negative_sample(
    is_correct: torch.Tensor, *, positive_weight: float = 0.0, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Negative-sample reinforcement: -1 for wrong responses, ``positive_weight`` for right ones (arXiv 2506.01347).
    Returns ``[S]`` float32.

    Args:
        is_correct: ``[S]`` bool.
        positive_weight: 0 learns from mistakes alone; .1 is the paper's weighted REINFORCE, 1 REINFORCE.

    Traps: with a weight of 0 the code takes right responses out of the batch before its token mean, and so does
    ``aggregation.token_mean(batch, selected=mask)`` with the tokens of the others; else they stay in the denominator.

    >>> negative_sample(torch.tensor([True, False]), positive_weight=0.1)
    tensor([ 0.1000, -1.0000])
    """
    check_units(is_correct=is_correct, mask=mask)
    check(0 <= positive_weight < math.inf, "positive_weight: expected a finite number >= 0, got {}", positive_weight)
    check_finite(positive_weight=positive_weight)
    advantages = torch.full_like(is_correct, -1.0, dtype=torch.float32).masked_fill(is_correct, positive_weight)
    return advantages if mask is None else torch.where(mask, advantages, 0.0)


@estimator(Provenance.VERIFIED)
def positive_sample(is_correct: torch.Tensor, *, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Positive-sample reinforcement: 1 for right responses, nothing for wrong ones (arXiv 2506.01347). Returns ``[S]``
    float32. Wrong ones stay in denominators unless ``selected=`` leaves them out, as :func:`negative_sample` says.

    Args:
        is_correct: ``[S]`` bool.

    >>> positive_sample(torch.tensor([True, False]))
    tensor([1., 0.])
    """
    check_units(is_correct=is_correct, mask=mask)
    chosen = is_correct if mask is None else is_correct & mask
    return chosen.float()


@estimator(Provenance.VERIFIED)
def real(
    is_correct: torch.Tensor,
    group_ids: torch.Tensor | None,
    drift: torch.Tensor,
    *,
    temperature: float = 0.5,
    mask: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """REAL: rewards as the labels of a classification within each prompt (arXiv 2602.05630; ms-swift). Returns ``[S]``
    float32.

    ``A = n p / temperature`` for right responses of a group of n, with ``p = e^z / (1 + sum e^z)`` over its right
    responses and ``z = -drift / temperature``; for wrong ones ``-n p / temperature``, the sum over the wrong and
    ``z = drift / temperature``. With :func:`hpo_core.gates.reinforce` and ``aggregation.seq_mean_token_mean`` the
    gradient is that of ``log(1 + sum over right of e^z) + log(1 + sum over wrong of e^z)``, averaged over groups of one
    size.

    Args:
        is_correct: ``[S]`` bool.
        drift: ``[S]``, the mean of the response's log-ratios under the current policy, 0 before the first update. A
            unit whose drift is not finite is in no sum and gets 0.
        temperature: 0.5 as in ms-swift; z saturates at +-60.

    Traps: the drift belongs to one minibatch, and so do these advantages. A group whose responses are all right, or all
    wrong, gets 0, as there.

    >>> real(torch.tensor([True, False, False]), None, torch.zeros(3))
    tensor([ 3., -2., -2.])
    """
    check_units(is_correct=is_correct, group_ids=group_ids, drift=drift, mask=mask)
    check(0 < temperature < math.inf, "temperature: expected a finite number > 0, got {}", temperature)
    scored = scorable(drift, mask)
    exponents = (torch.where(is_correct, -drift, drift).double() / temperature).clamp(-60, 60)
    powers = as_advantages(exponents.exp(), drift, backend)
    right = statistics(powers, group_ids, mask=scored & is_correct, backend=backend)
    wrong = statistics(powers, group_ids, mask=scored & ~is_correct, backend=backend)
    total = torch.where(is_correct, right.mean * right.members, wrong.mean * wrong.members)
    size = torch.where((right.members > 0) & (wrong.members > 0), right.members + wrong.members, 0)
    exact = torch.where(is_correct, size, -size) * powers.double() / (1 + total) / temperature
    return as_advantages(torch.where(grouped(scored, group_ids), exact, 0.0), drift, backend)


@estimator(Provenance.VERIFIED)
def tpo(
    rewards: torch.Tensor,
    group_ids: torch.Tensor | None,
    sequence_logp: torch.Tensor,
    old_sequence_logp: torch.Tensor,
    *,
    temperature: float = 1.0,
    mask: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """TPO, target policy optimisation: the policy among the n responses of a prompt, fitted to the old one tilted by
    their rewards (arXiv 2604.06159). Returns ``[S]`` float32.

    ``A = n (q - p)``; ``p = softmax(sequence_logp)`` and ``q = softmax(old_sequence_logp + u / temperature)`` over the
    prompt, ``u = (r - mean) / std`` with ddof 0, 0 where rewards are all equal. With
    :func:`hpo_core.gates.reinforce` and ``aggregation.seq_mean_token_sum`` the gradient is that of the cross-entropy
    ``-sum q log p``, averaged over prompts of one size.

    Args:
        sequence_logp: ``[S]``, the sum of the response's log-probabilities under the current policy; a constant here.
            A unit whose sum, or old sum, is not finite is in no statistic and gets 0.
        old_sequence_logp: ``[S]``, the same when the responses were sampled.
        temperature: 1 throughout the paper.

    Traps: ``sequence_logp`` belongs to one minibatch, and so do these advantages: they are 0 where the policy has
    reached the target. Of long responses p and q are near 0 for all but one, by the differences of their sums.

    >>> tpo(torch.tensor([1.0, 0.0]), None, torch.tensor([-3.0, -3.0]), torch.tensor([-3.0, -3.0]))
    tensor([ 0.7616, -0.7616])
    """
    check_units(
        rewards=rewards, group_ids=group_ids, sequence_logp=sequence_logp, old_sequence_logp=old_sequence_logp,
        mask=mask,
    )  # fmt: skip
    check(0 < temperature < math.inf, "temperature: expected a finite number > 0, got {}", temperature)
    scored = scorable(sequence_logp, scorable(old_sequence_logp, scorable(rewards, mask)))
    tilt = grpo(rewards, group_ids, ddof=0, eps=0.0, mask=scored, backend=backend).double() / temperature
    target, size = _softmax(old_sequence_logp.double() + tilt, group_ids, scored, backend)
    present, _ = _softmax(sequence_logp.double(), group_ids, scored, backend)
    exact = size * (target - present)
    return as_advantages(torch.where(grouped(scored, group_ids), exact, 0.0), rewards, backend)


def _softmax(
    exponents: torch.Tensor, ids: torch.Tensor | None, mask: torch.Tensor, backend: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The softmax of each unit among those of its group in the mask, in float64, and their number."""
    lead = exponents
    for _ in range(2):  # kernels round the greatest of large sums to float32: the first difference keeps a remainder
        lead = lead - statistics(lead, ids, mask=mask, backend=backend).greatest
    powers = torch.where(mask, lead, 0.0).exp()
    group = statistics(powers, ids, mask=mask, backend=backend)
    return powers / (group.mean * group.members), group.members
