"""The inputs of some gates beside the batch: bounds per token, masks, targets, each as ``gate_inputs=`` of the loss.

These are constants of the differentiation, made once per optimiser step from whole batches, in plain PyTorch. Nothing
here synchronises, and nothing is read at masked positions. With a padded batch, or its ``[B, L]`` mask in its
place, tensors ``[T]`` may be ``[B, L]``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from .. import ops
from ..arguments import check_compat, check_finite, check_limit, examines, parameter_names
from ..batch import (
    PackedBatch,
    alone_without,
    as_batch,
    renumber,
    row_counts,
    row_sums,
    spread_rows,
    takes_padded,
    valid_tokens,
)
from ..checks import check, check_dtype, check_precise, check_tokens, check_units
from ..specs import GroupStatistics, OrderRule, TokenDraw
from .draws import key_of_places
from .ratio_gate import GateInputs
from .token_level import check_epsilons

Method = TypeVar("Method", bound=Callable[..., Any])


def of_tokens(function: Method) -> Method:
    """The function of :class:`GateInputs`, which then takes tensors ``[B, L]`` with a padded batch, too, and returns
    such."""
    return takes_padded(examines(function), parameter_names(function), _padded)


def of_logps(function: Method) -> Method:
    """The same for a function that returns log-probabilities."""
    return takes_padded(examines(function), parameter_names(function))


def _padded(made: GateInputs, shape: tuple[int, int]) -> GateInputs:
    return made.on_tokens(lambda values: values.reshape(shape), per_token=False)


@examines
def archer_bounds(
    wide: torch.Tensor, eps_narrow: tuple[float, float] = (0.2, 0.2), eps_wider: tuple[float, float] = (0.4, 0.4)
) -> GateInputs:
    """Two pairs of epsilons by class: ``gate_inputs`` for :func:`archer_clip` and :func:`aspo` (arXiv
    2510.06062).

    Args:
        wide: bool ``[T]``, the tokens of the wider class: in the paper those above the 80 % quantile of the entropy
            within their sequence (the code's names for the two classes are exchanged).
        eps_narrow, eps_wider: epsilons (low, high), the paper's 0.2 and 0.4.

    >>> archer_bounds(torch.tensor([True, False])).bounds[1]
    tensor([1.4000, 1.2000])
    """
    check_dtype("wide", wide, (torch.bool,), "use wide.bool()")
    check_epsilons(*eps_narrow, ("eps_narrow[0]", "eps_narrow[1]"))
    check_epsilons(*eps_wider, ("eps_wider[0]", "eps_wider[1]"))
    check_limit("eps_narrow[1]", eps_narrow[1])
    check_limit("eps_wider[1]", eps_wider[1])
    low, high = (torch.full_like(wide, 1 + epsilon, dtype=torch.float32) for epsilon in (-eps_narrow[0], eps_narrow[1]))
    return GateInputs(bounds=(low.masked_fill(wide, 1.0 - eps_wider[0]), high.masked_fill(wide, 1.0 + eps_wider[1])))


@examines
def dcpo_bounds(
    old_logp: torch.Tensor, eps_low: float = 0.16, eps_high: float = 0.2, ratio_cap: float = 10.0
) -> GateInputs:
    """Bounds that let unlikely tokens move further: for :func:`dcpo_clip` (arXiv 2509.02333; its code).

    ``(1 + sqrt(max(1 - 4 eps_low / q, 0))) / 2 <= r <= (1 + sqrt(1 + 4 eps_high / q)) / 2``, q the old probability.

    Args:
        eps_low, eps_high: 0.16 and 0.2, the code's.
        ratio_cap: of the upper bound, 10 as in the code.

    >>> [round(bound.item(), 6) for bound in dcpo_bounds(torch.tensor([0.9]).log()).bounds]
    [0.768742, 1.187184]
    """
    check_precise("old_logp", old_logp)
    check_epsilons(eps_low, eps_high)
    check(ratio_cap >= 1, "ratio_cap: expected an absolute ratio >= 1, got {}", ratio_cap)
    check_limit("eps_high", eps_high)
    check_limit("ratio_cap", ratio_cap)
    q = old_logp.detach().exp()
    below = 0.5 + 0.5 * (1 - 4 * eps_low / q).clamp(min=0).sqrt()
    above = 0.5 + 0.5 * (1 + 4 * eps_high / q).sqrt()
    return GateInputs(bounds=(below, above.clamp(max=ratio_cap)))


@of_tokens
def hapo_bounds(
    entropy: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    alpha: float = 1.0,
    pivot: tuple[int, int] = (4, 5),
    compat: str = "paper",
) -> GateInputs:
    """Bounds that follow the entropy: for :func:`hapo_clip` (arXiv 2509.16591; repository starriver030515/HAPO).

    ``h`` is the log-entropy minus its ``pivot`` quantile over the batch, and ``h / max h`` above, ``-h / min h`` below.
    Where ``h <= 0`` the lower epsilon is ``eps_low (1 - alpha h)``; above, the upper one is ``eps_high (1 + alpha h)``.

    Args:
        entropy: ``[T]`` in nats. A token whose entropy is not finite is in no statistic and gets bounds of NaN, with
            which the loss leaves it out and counts it.
        eps_low, eps_high, alpha: 0.2, 0.2 and 1, those of the recipes.
        pivot: the quantile as a fraction, ``(4, 5)`` in the recipes and the paper; the nearest order statistic. The
            code's function alone, without a recipe, has the median, ``(1, 2)``.
        compat: "code": there ``h / min h`` is used below, which is positive, so the upper bound of every token widens
            and the lower one of none.

    :func:`hpo_core.entropy.hapo` is the same for a threshold fitted once per optimiser step, with the paper's epsilons.

    >>> low, high = hapo_bounds(torch.tensor([0.2, 0.4, 0.8, 1.6, 3.2]), PackedBatch.from_lengths([5])).bounds
    >>> low, high
    (tensor([0.6000, 0.6667, 0.7333, 0.8000, 0.8000]), tensor([1.2000, 1.2000, 1.2000, 1.2000, 1.4000]))
    """
    batch = as_batch(batch)
    as_code = check_compat(compat)
    check_epsilons(eps_low, eps_high, finite=True)
    check(0 <= alpha < math.inf, "alpha: expected a finite number >= 0, got {}", alpha)
    check_finite(alpha=alpha)
    check(0 <= pivot[0] <= pivot[1] != 0, "pivot: expected a fraction in [0, 1], got {}", pivot)
    check_precise("entropy", entropy)
    check_tokens(batch, entropy=entropy)
    valid, given = valid_tokens(batch), entropy.detach().float()
    usable = valid & given.isfinite()
    log_entropy = torch.where(usable, given.clamp(min=1e-8), 1.0).log()
    middle, _ = ops.order_statistic(log_entropy, *pivot, OrderRule.NEAREST, usable, batch.cu_seqlens, None)
    h = torch.where(usable, log_entropy - middle, torch.zeros_like(log_entropy))
    tiny = torch.finfo(h.dtype).tiny
    h_or_0 = torch.nn.functional.pad(h, (0, 1))  # there may be no tokens
    above, below = h_or_0.max().clamp(min=tiny), h_or_0.min().clamp(max=-tiny)
    down = h / below if as_code else -h / below
    relative = torch.where(h > 0, h / above, down)
    lower = torch.where(relative <= 0, eps_low * (1 - alpha * relative), torch.full_like(h, eps_low))
    upper = torch.where(relative > 0, eps_high * (1 + alpha * relative), torch.full_like(h, eps_high))
    broken = valid & ~usable
    low, high = (1 - lower).clamp(min=0), 1 + upper
    return GateInputs(bounds=(low.masked_fill(broken, torch.nan), high.masked_fill(broken, torch.nan)))


@examines
def chord_weight(logp: torch.Tensor) -> torch.Tensor:
    """``token_weight`` ``[T]`` for CHORD's expert rows: ``p (1 - p)``, p the token's probability (arXiv 2508.11408).

    CHORD is ``(1 - mu) L_GRPO + mu L_SFT``, ``L_SFT = -w p (1 - p) logp`` on rows an expert wrote: two calls of the
    loss, with weights that are 0 on the rows of the other, under ``reinforce()`` with advantages of 1 for the expert's.
    Tokens of which the model is sure, and tokens which it thinks impossible, hardly count.

    Args:
        logp: ``[T]`` or ``[B, L]``; a constant here.

    Traps: mu is the trainer's, and follows its schedule: Trinity-RFT takes 0.1, or a linear warm-up and a cosine decay.
    Each term has a denominator of its own: that of its own rows.

    >>> import hpo_core as hpo
    >>> batch, mu, expert = PackedBatch.from_lengths([2, 2]), 0.1, torch.tensor([False, True])
    >>> logp, old_logp = torch.tensor([0.9, 0.5, 0.9, 0.5]).log().requires_grad_(), torch.tensor([0.8, 0.5, 1, 1]).log()
    >>> of_token = expert.repeat_interleave(2)
    >>> usual = hpo.aggregation.token_mean(batch, selected=~of_token) * (1 - mu) * ~expert
    >>> others = hpo.aggregation.token_mean(batch, selected=of_token) * mu * expert
    >>> grpo = hpo.policy_loss(logp, old_logp, torch.tensor([1.0, 0.0]), batch, weights=usual)
    >>> weight, ones = chord_weight(logp), torch.ones(2)
    >>> sft = hpo.policy_loss(logp, None, ones, batch, hpo.gates.reinforce(), weights=others, token_weight=weight)
    >>> (grpo.loss + sft.loss).backward()
    >>> logp.grad
    tensor([-0.5062, -0.4500, -0.0045, -0.0125])
    """
    check_precise("logp", logp)
    certain = logp.detach().clamp(max=0)  # rounding may lift a log-probability above 0
    return certain.exp() * -certain.expm1()


@of_tokens
def clip_cov_mask(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    advantages: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    *,
    seed: int,
    share: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    advantage_level: str | None = None,
) -> GateInputs:
    """``gate_inputs`` for :func:`clip_cov`: a mask that is False for a few tokens drawn among those of high covariance.

    ``cov = (A - mean A) (logp - mean logp)`` over the n valid tokens where both are finite; of those with
    ``low < cov < high`` that PPO does not clip, ``max(1, floor(share n))`` are drawn by a counter-based generator: the
    same seed and batch give the same tokens.

    Args:
        seed: an integer of 64 bits; give every micro-batch and every rank its own: one seed draws equal places of two
            batches.
        share, low, high: 2e-4, 1 and 5 as in verl (arXiv 2505.22617); ``share n`` is a product of doubles, as there.
        eps_low, eps_high: those of the gate.
        advantage_level: as in :func:`~hpo_core.policy_loss`.

    >>> batch = PackedBatch.from_lengths([2, 2])
    >>> logp = torch.tensor([-0.1, -3.0, -0.1, -3.0])
    >>> clip_cov_mask(logp, logp, torch.tensor([2.0, -2.0]), batch, seed=1).token_mask.sum().item()
    3
    """
    batch = as_batch(batch)
    check(low <= high, "low, high: expected low <= high, got {} and {}", low, high)
    check_epsilons(eps_low, eps_high)
    check_policies(batch, logp, old_logp)
    least = math.log1p(-eps_low) if eps_low < 1 else -math.inf
    bounds = (low, high, least, math.log1p(eps_high))
    draw = TokenDraw(old_logp.detach().float().contiguous(), bounds, *key_of_places(seed))
    return GateInputs(token_mask=~_greatest(logp, advantages, batch, advantage_level, share, draw))


@of_tokens
def kl_cov_mask(
    logp: torch.Tensor,
    advantages: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    *,
    share: float = 2e-4,
    advantage_level: str | None = None,
) -> GateInputs:
    """``gate_inputs`` for :func:`kl_cov`: the ``max(1, floor(share n))`` tokens of highest covariance pay (arXiv
    2505.22617), of the n valid tokens with a finite advantage and log-probability.

    Args:
        share: 2e-4 as in verl, where ``share n`` is a product of doubles, too; the paper takes 2e-3 for 7 billion
            parameters and 2e-4 for 32.
        advantage_level: as in :func:`~hpo_core.policy_loss`.

    >>> batch = PackedBatch.from_lengths([2, 2])
    >>> kl_cov_mask(torch.tensor([-0.1, -6.0, -0.1, -5.0]), torch.tensor([2.0, -2.0]), batch).penalty_mask
    tensor([ True, False, False, False])
    """
    batch = as_batch(batch)
    check_policies(batch, logp)
    return GateInputs(penalty_mask=_greatest(logp, advantages, batch, advantage_level, share, TokenDraw()))


@of_tokens
def rec_ring_mask(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    advantages: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    eps_near: tuple[float, float] = (0.2, 0.2),
    eps_far: tuple[float, float] = (0.6, 2.0),
    *,
    advantage_level: str | None = None,
) -> GateInputs:
    """``gate_inputs`` for :func:`rec_ring`: a mask of ``1 - eps_near[0] <= r <= 1 + eps_near[1]``, or for ``A >= 0``
    ``r <= 1 - eps_far[0]``, for ``A < 0`` ``r >= 1 + eps_far[1]`` (Trinity-RFT).

    Args:
        advantages, advantage_level: as in :func:`~hpo_core.policy_loss`.
        eps_near, eps_far: epsilons (low, high), 0.2 and 0.2, and 0.6 and 2, as there.

    >>> ratio = torch.tensor([0.3, 0.5, 1.0, 1.5, 3.5])
    >>> rec_ring_mask(ratio.log(), torch.zeros(5), torch.tensor([1.0]), PackedBatch.from_lengths([5])).token_mask
    tensor([ True, False,  True, False, False])
    """
    batch = as_batch(batch)
    for name, pair in (("eps_near", eps_near), ("eps_far", eps_far)):
        check(0 <= pair[0] < 1 and pair[1] >= 0, "{}: expected epsilons (low < 1, high), got {}", name, pair)
    check_policies(batch, logp, old_logp)
    valid = valid_tokens(batch)
    advantage = per_token(advantages, batch, advantage_level)
    x = torch.where(valid, logp.detach() - old_logp, torch.zeros_like(logp))
    inside = (x >= math.log1p(-eps_near[0])) & (x <= math.log1p(eps_near[1]))
    strayed = torch.where(advantage < 0, x >= math.log1p(eps_far[1]), x <= math.log1p(-eps_far[0]))
    return GateInputs(token_mask=valid & (inside | strayed))


@of_tokens
def vaco_mask(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    advantages: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    delta: float,
    *,
    advantage_level: str | None = None,
) -> GateInputs:
    """``gate_inputs`` for any gate: a row that has moved too far learns from the tokens that move back (VACO's filter,
    arXiv 2603.01365, as open-instruct has it).

    A token is left out where ``mean |r - 1|`` of its row, an estimate of twice the total variation, exceeds ``delta``,
    and ``A log r > 0``; ``r = exp(logp - old_logp)``, whose exponent saturates at 20.

    Args:
        logp, old_logp: ``[T]``; open-instruct gives ``old_logp`` and ``rollout_logp``, and the gate is
            ``tis(gate=dapo())``.
        advantages, advantage_level: as in :func:`~hpo_core.policy_loss`.
        delta: no source gives a number; open-instruct takes those above 1 alone.

    A token whose log-ratio is not a number is in no mean, and is left to the loss, which counts it.

    Traps: open-instruct's mean is that of a line of its batch, with all responses that are packed there. Its author
    calls the mask a modification of the paper's for language models; the paper realigns advantages, too, by V-trace.

    >>> ratio, batch = torch.tensor([0.25, 1.0, 4.0, 0.9, 1.2]), PackedBatch.from_lengths([3, 2])
    >>> vaco_mask(ratio.log(), torch.zeros(5), torch.tensor([1.0, 1.0]), batch, delta=1.2).token_mask
    tensor([ True,  True, False,  True,  True])
    """
    batch = as_batch(batch)
    check(0 <= delta < math.inf, "delta: expected a finite mean of |r - 1| >= 0, got {}", delta)
    check_policies(batch, logp, old_logp)
    valid = valid_tokens(batch)
    x = torch.where(valid, logp.detach().double() - old_logp.detach(), 0.0)
    moved = x.clamp(max=20).expm1().abs().float()
    counted = valid & ~moved.isnan()
    mean = row_sums(torch.where(counted, moved, 0.0), batch) / row_counts(batch, counted)
    strayed = spread_rows(mean > delta, batch, False)
    away = x.sign() * per_token(advantages, batch, advantage_level) > 0
    return GateInputs(token_mask=valid & ~(strayed & away))


@examines
def bpo_target(advantages: torch.Tensor, eps: float = 0.2, *, temperature: float = 0.0) -> GateInputs:
    """``gate_inputs`` for :func:`bpo`: targets ``1 + eps sign A``, in the shape of ``advantages`` (arXiv
    2604.18578).

    Args:
        temperature: above 0 targets are ``1 - eps + 2 eps sigmoid(A / temperature)``, the authors' code: 0.001 and
            an eps of 0.3 in its recipes of MuJoCo and Atari. 0: the limit. A is a return about a learned median here,
            and about a value in the loss.

    >>> bpo_target(torch.tensor([2.0, -1.0])).target
    tensor([1.2000, 0.8000])
    """
    check_precise("advantages", advantages, "use advantages.float()")
    check(0 <= eps <= 1, "eps: expected an epsilon in [0, 1], got {}", eps)
    check(0 <= temperature < math.inf, "temperature: expected a finite number >= 0, got {}", temperature)
    given = advantages.detach()
    side = given.sign() if temperature == 0 else 2 * torch.sigmoid(given / temperature) - 1
    return GateInputs(target=1 + eps * side)


@examines
def gbpo_target(
    scores: torch.Tensor,
    group_ids: torch.Tensor | None = None,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    temperature: float = 1.0,
) -> GateInputs:
    """``gate_inputs`` for :func:`gbpo`: targets ``[S]`` from the median of the group (arXiv 2604.18578).

    They are ``1 - eps_low + (eps_low + eps_high) sigmoid(a / temperature)``, ``a = (score - median) / (std + 1e-6)`` in
    the group.

    Args:
        scores: ``[S]``.
        group_ids: ``[S]`` integers; a negative one means none: a group of one. None: one group.
        eps_low, eps_high, temperature: 0.2, 0.2 and 1, the code's. A group of one has median 0 and std 1, as there.

    A score that is not finite is in no median and no deviation, and gets a target of NaN, with which the loss leaves it
    out and counts it.

    >>> gbpo_target(torch.tensor([0.0, 1.0, 2.0])).target
    tensor([0.9076, 1.0000, 1.0924])
    """
    check_units(scores=scores, group_ids=group_ids)
    check_precise("scores", scores, "use scores.float()")
    check_epsilons(eps_low, eps_high, finite=True)
    check(temperature > 0, "temperature: expected a number above 0, got {}", temperature)
    x = scores.detach().float()
    x = torch.where(x.isfinite(), x, torch.nan)  # which is sorted to the end
    ids = torch.zeros(x.shape, dtype=torch.int64, device=x.device) if group_ids is None else group_ids
    group, ranks, _ = renumber(alone_without(ids))
    groups = GroupStatistics(*ops.group_statistics(x, group, None, None, None))
    by_score = x.argsort(stable=True)
    ordered = x[by_score[group[by_score].argsort(stable=True)]].double()  # groups in order, scores within each
    start, last = torch.searchsorted(ranks, group), (groups.members.long() - 1).clamp(min=0)
    alone = groups.members == 1
    median = 0.5 * (ordered[start + last // 2] + ordered[start + (last + 1) // 2]).masked_fill(alone, 0.0)
    relative = (x - median) / (groups.deviation(1).masked_fill(alone, 1.0) + 1e-6)
    target = 1 - eps_low + (eps_low + eps_high) * torch.sigmoid(relative / temperature)
    return GateInputs(target=target.to(scores.dtype))


def check_policies(batch: PackedBatch, logp: torch.Tensor, old_logp: torch.Tensor | None = None) -> None:
    check_precise("logp", logp)
    if old_logp is not None:
        check_precise("old_logp", old_logp)
    check_tokens(batch, logp=logp, old_logp=old_logp)


def per_token(advantages: torch.Tensor, batch: PackedBatch, level: str | None) -> torch.Tensor:
    """``[T]`` from those of any level."""
    is_per_token, values = _advantages(advantages, batch, level)
    return values if is_per_token else spread_rows(values, batch, 0.0)


def _advantages(advantages: torch.Tensor, batch: PackedBatch, level: str | None) -> tuple[bool, torch.Tensor]:
    """Whether there is one for every token, and those of tokens ``[T]`` or rows ``[S]``."""
    check_precise("advantages", advantages, "use advantages.float()")
    return batch.of_level("advantages", advantages, level, (batch.total_tokens,))


def _greatest(
    logp: torch.Tensor, advantages: torch.Tensor, batch: PackedBatch, level: str | None, share: float, draw: TokenDraw
) -> torch.Tensor:
    """The ``max(1, floor(share n))`` tokens of n with the greatest covariance, or of those that may be drawn with the
    greatest numbers; equal ones in order."""
    check(0 <= share <= 1, "share: expected a number in [0, 1], got {}", share)
    is_per_token, values = _advantages(advantages, batch, level)
    rows, mask = (None, valid_tokens(batch)) if is_per_token else (batch.cu_seqlens, batch.mask)
    values = values.detach().float().contiguous()
    logp = logp.detach().float().contiguous()
    keys, n = ops.covariance(logp, values, rows, mask, *draw, None)
    wanted = (share * n.double()).clamp(min=1).long()
    segments = ops.segments_of_call(batch.cu_seqlens, keys.numel())
    return ops.select_exact(keys, segments, segments.new_zeros(len(segments) - 1), wanted, None, None, None)
