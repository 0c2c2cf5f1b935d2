"""The policy loss: hierarchical ratio gating, selection, weights and the reference penalty, as one differentiable
formula.

For token t of row s in trajectory i, with ``m`` the validity mask and ``w`` the row weights::

    x_t = logp_t - old_logp_t                              saturated at +-60 with its derivative kept
    a_k = mean (or another aggregate) of x over the valid tokens of t's segment at level k;  a_0 = x_t,  a_{K+1} = 0
    z_t = sum_k g_k(a_k - a_{k+1})                         gates chosen by the sign of A_t
    M_t = token_mask_t  and  score_t >= threshold  and  A_t finite
    loss_t = -M_t W_t Phi(z_t, A_t) + c_t beta k(logp_t - ref_logp_t) + kappa p(x_t)
    loss   = sum_t m_t w_s loss_t

``Phi`` is the head, ``A e^z`` for the linear one; c is ``kl_weight``, 0 where it is not finite; p is the term's
penalty. A pre-gate clips x before it is aggregated; under the censored head ``|e^x - 1|``, at most 2048 with its
derivative kept, is aggregated in its place. The log mean exp is ``log(1 + mean of e^x - 1)``, x within +-7.5 with its
derivative kept, so that no weight e^x can outgrow the sum. A balanced aggregate is the mean over those segments of the
next finer level that have tokens. A NaN log-ratio takes its token out of m; an infinite one saturates with derivative
0. With a split, x+ = max(x, 0) and x- = max(-x, 0) each go through the gates by themselves, and z is the difference.
Where steps are a level, a token outside every step is masked. A correction (corrections.py) is a factor in W.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..metrics import empty_metrics, slot
from ..specs import Exchange, Head, Penalty, PolicyLossInputs, PolicyLossSpec, TokenGate, rows_as_weights
from .corrections import correction, factor_of_tokens
from .hierarchy import Channel, combined, gated_hierarchy, gated_log_ratio, leaf_of_token
from .segments import flat, of_row, read_at, row_of_token
from .terms import (
    MOST,
    SATURATION,
    STATISTIC_SATURATION,
    deviation_of,
    factor_beyond,
    general_term,
    kl_of_tokens,
    penalty_of,
    policy_term,
    pre_gate,
    saturate,
)

ROUNDING = 1e-6  # of a bound that is meant to be 1


class Tokens(NamedTuple):
    """The numbers read of each token, ``[T]``; those of a masked position are replaced by 0 or 1."""

    row: torch.Tensor  # 0 where the token is in none
    leaf: torch.Tensor | None  # the same of the finest level, if there are levels
    given: torch.Tensor  # bool, in a row, in a leaf and not masked
    valid: torch.Tensor  # bool, given, and no log-ratio is NaN
    selected: torch.Tensor  # bool, valid, and the policy's term counts
    logp: torch.Tensor
    log_ratio: torch.Tensor  # logp - old_logp as it is
    x: torch.Tensor  # the same saturated
    s: torch.Tensor | None  # logp - ref_logp, saturated
    advantage: torch.Tensor
    weight: torch.Tensor  # of its row, 0 where not valid
    token_weight: torch.Tensor
    kl_weight: torch.Tensor  # 0 where not valid or not finite
    target: torch.Tensor
    infinite: torch.Tensor  # bool, some log-ratio is
    nan: torch.Tensor  # bool, a log-ratio or the score is
    bad_advantage: torch.Tensor  # bool, advantage, weight or target is of no use
    bad_offsets: torch.Tensor  # 0-dim, rows and leaves that lie nowhere

    @property
    def negative(self) -> torch.Tensor:
        """1 where the advantage is below 0, else 0: the index into pairs (A >= 0, A < 0)."""
        return (self.advantage < 0).long()


def policy_loss(
    inputs: PolicyLossInputs, spec: PolicyLossSpec, exchange: Exchange | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the loss (0-dim, differentiable in ``logp``), the metrics vector (float64) and ``loss_t`` ``[T]``
    (detached).

    Computes in the dtype of ``logp``; float64 is the definition. An ``exchange`` changes n and the sums of x of every
    segment of ``spec.levels``.
    """
    inputs = flat(inputs)
    tokens = read_tokens(inputs, spec)
    z, below, above = combined(gate_tokens(tokens, inputs, spec, exchange))
    weighted, loss_t = policy_terms(tokens, spec, z, below, above)
    penalties = list(penalties_of(tokens, inputs, spec))
    loss = weighted.double().sum()
    for penalty in penalties:
        loss_t, loss = loss_t + penalty.detach(), loss + (tokens.weight * penalty).double().sum()
    largest = torch.finfo(torch.float32).max
    loss = (loss.detach().clamp(-largest, largest) + (loss - loss.detach())).to(inputs.logp.dtype)
    with torch.no_grad():
        return loss, metrics_of(tokens, inputs, loss, penalties, below, above), loss_t


def policy_terms(
    tokens: Tokens, spec: PolicyLossSpec, z: torch.Tensor, below: torch.Tensor, above: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``-w M W Phi(z, A)`` and ``-M W Phi(z, A)`` (detached) of each token ``[T]``."""
    logp, selected, negative = tokens.logp, tokens.selected, tokens.negative
    z = saturate(z, tokens.valid, MOST.get(spec.head, SATURATION))
    zero = torch.zeros_like(logp)
    own = torch.where(tokens.log_ratio.isinf(), zero, logp)
    unweighted = torch.where(selected, tokens.advantage * tokens.token_weight, zero)
    if spec.term is not None:
        factor = factor_beyond(below, above, negative, spec.term, logp)
        unweighted, kept = unweighted * factor, torch.where(selected, tokens.token_weight * factor, zero)
        target = torch.where(selected, tokens.target, zero)
        number = logp.new_tensor(spec.term.head_numbers)[negative]

    def policy(scale: torch.Tensor | float) -> torch.Tensor:
        """The term of each token, of an objective ``scale`` times as large."""
        if spec.term is None:
            term = policy_term(spec.head, z, scale * unweighted, own)
        else:
            term = general_term(spec.head, z, tokens.x, scale * unweighted, scale * kept, own, target, number, negative)
        return torch.where(selected, term, zero)

    # a huge term may saturate where its share of the loss does not
    return policy(tokens.weight), policy(1.0).detach()


def penalties_of(tokens: Tokens, inputs: PolicyLossInputs, spec: PolicyLossSpec) -> Iterator[torch.Tensor]:
    """``kappa p(x)`` and ``c beta k(s)`` of each token ``[T]``, where the loss has them."""
    zero = torch.zeros_like(tokens.logp)
    if spec.term is not None and spec.term.penalty is not Penalty.NONE:
        pays = tokens.valid if inputs.penalty_mask is None else tokens.valid & inputs.penalty_mask
        yield torch.where(pays, spec.term.penalty_coefficient * penalty_of(spec.term, tokens.x), zero)
    if tokens.s is not None:
        k = kl_of_tokens(spec.kl, spec.kl_gradient, tokens.s, tokens.x, tokens.infinite)
        yield torch.where(tokens.kl_weight != 0, tokens.kl_weight * (spec.kl_beta * k), zero)


def metrics_of(
    tokens: Tokens,
    inputs: PolicyLossInputs,
    loss: torch.Tensor,
    penalties: list[torch.Tensor],
    below: torch.Tensor,
    above: torch.Tensor,
) -> torch.Tensor:
    """The metrics vector, float64."""
    metrics, valid, selected = empty_metrics(loss.device), tokens.valid, tokens.selected
    x = tokens.x[valid]
    r = torch.exp(x.clamp(-STATISTIC_SATURATION, STATISTIC_SATURATION))
    metrics[slot("tokens")] = valid.sum()
    metrics[slot("selected")] = selected.sum()
    metrics[slot("rows")] = tokens.row[valid].unique().numel()  # type: ignore[no-untyped-call]
    metrics[slot("loss")] = loss
    metrics[slot("log_ratio_sum")] = x.sum()
    metrics[slot("log_ratio_square")] = x.square().sum()
    metrics[slot("ratio_deviation")] = (r - 1).sum()
    metrics[slot("ratio_deviation_square")] = (r - 1).square().sum()
    if valid.any():
        metrics[slot("log_ratio_min")] = x.min()
        metrics[slot("log_ratio_max")] = x.max()
    for name, side in (("low", below), ("high", above)):
        metrics[slot(f"clipped_{name}_positive")] = (selected & side & (tokens.negative == 0)).sum()
        metrics[slot(f"clipped_{name}_negative")] = (selected & side & (tokens.negative == 1)).sum()
    for penalty in penalties:
        metrics[slot("penalty")] += (tokens.weight * penalty).sum()
    if tokens.s is not None:
        s = tokens.s[valid]
        metrics[slot("reference_log_ratio")] = s.sum()
        metrics[slot("reference_log_ratio_square")] = s.square().sum()
        metrics[slot("reference_k3")] = (torch.exp(-s) - 1 + s).sum()
    if inputs.entropy is not None:
        counted = valid & torch.isfinite(inputs.entropy)
        metrics[slot("entropy")] = inputs.entropy[counted].sum()
        metrics[slot("entropy_tokens")] = counted.sum()
    metrics[slot("nan_tokens")] = tokens.nan.sum()
    metrics[slot("infinite_tokens")] = tokens.infinite.sum()
    metrics[slot("bad_offsets")] = tokens.bad_offsets
    metrics[slot("bad_advantages")] = tokens.bad_advantage.sum()
    return metrics


def read_tokens(inputs: PolicyLossInputs, spec: PolicyLossSpec) -> Tokens:
    """The state and the numbers of tokens. A masked position is replaced before any arithmetic: 0 * NaN would be NaN,
    in the gradient too."""
    inputs, spec = rows_as_weights(inputs, spec, correction)
    logp = inputs.logp
    row = row_of_token(inputs.cu_seqlens, logp.numel())
    offsets = inputs.cu_seqlens
    bad_offsets = ((offsets[:-1] < 0) | (offsets[1:] < offsets[:-1]) | (offsets[1:] > logp.numel())).sum()
    given = row >= 0 if inputs.mask is None else (row >= 0) & inputs.mask
    leaf = None
    if spec.is_hierarchical:
        leaf, bad_leaves = leaf_of_token(inputs, row)
        given, bad_offsets = given & (leaf >= 0), bad_offsets + bad_leaves
        leaf = leaf.clamp(min=0)
    row = row.clamp(min=0)

    logp = torch.where(given, logp, torch.zeros_like(logp))
    old_logp = logp.detach() if inputs.old_logp is None else read_at(inputs.old_logp, given, logp)
    log_ratio = logp - old_logp
    to_reference = None if inputs.ref_logp is None else logp - read_at(inputs.ref_logp, given, logp)
    score = None if inputs.score is None else read_at(inputs.score, given, logp)
    nan, infinite = log_ratio.isnan(), log_ratio.isinf()
    if to_reference is not None:
        nan, infinite = nan | to_reference.isnan(), infinite | to_reference.isinf()
    valid = given & ~nan

    advantage = (inputs.advantages if inputs.advantage_per_token else of_row(inputs.advantages, row)).to(logp.dtype)
    token_weight = torch.ones_like(logp)
    if inputs.token_weight is not None:
        token_weight = read_at(inputs.token_weight, given, logp, 1.0)
    if spec.correction is not None:
        assert inputs.correction_second is not None
        first = logp.detach() if inputs.correction_first is None else read_at(inputs.correction_first, given, logp)
        second = read_at(inputs.correction_second, given, logp)
        token_weight = token_weight * factor_of_tokens(spec.correction, first, second, (advantage < 0).long())
    kl_weight = torch.ones_like(logp)
    if inputs.kl_weight is not None:
        kl_weight = read_at(inputs.kl_weight, given, logp, 1.0)
    weight = of_row(inputs.weights.to(logp.dtype), row)
    bad_advantage = valid & ~torch.isfinite(weight * advantage * token_weight)
    target = torch.zeros_like(logp)
    if inputs.target is not None:
        target = (inputs.target if inputs.target_per_token else of_row(inputs.target, row)).to(logp.dtype)
        fits = torch.isfinite(target)
        if spec.head is Head.NEGATIVE_AWARE:  # a success rate, and no answer is wrong where it is 1
            fits = fits & ((advantage >= 0) | ((target >= 0) & (target < 1)))
        bad_advantage = bad_advantage | (valid & ~fits)
    for bound in possible_bounds(inputs) if spec.token is TokenGate.CLIP else ():
        bad_advantage = bad_advantage | (valid & ~bound)
    selected = valid & ~bad_advantage
    if inputs.token_mask is not None:
        selected = selected & inputs.token_mask
    if score is not None and inputs.threshold is not None:
        selected = selected & (score > inputs.threshold if spec.strict else score >= inputs.threshold)
    score_nan = torch.zeros_like(valid) if score is None else valid & score.isnan()
    return Tokens(
        row=row,
        leaf=leaf,
        given=given,
        valid=valid,
        selected=selected,
        logp=logp,
        log_ratio=log_ratio,
        x=saturate(log_ratio, valid),
        s=None if to_reference is None else saturate(to_reference, valid),
        advantage=advantage,
        weight=torch.where(valid & torch.isfinite(weight), weight, torch.zeros_like(weight)),
        token_weight=token_weight,
        kl_weight=torch.where(valid & torch.isfinite(kl_weight), kl_weight, torch.zeros_like(kl_weight)),
        target=target,
        infinite=valid & infinite,
        nan=(given & nan) | score_nan,
        bad_advantage=bad_advantage,
        bad_offsets=bad_offsets,
    )


def possible_bounds(inputs: PolicyLossInputs) -> Iterator[torch.Tensor]:
    """Where ``0 <= low <= 1`` and where ``1 <= high``, but for rounding: epsilons in place of ratios are no bounds, nor
    are numbers that come from a broken entropy."""
    if inputs.low is not None:
        yield (inputs.low >= 0) & (inputs.low <= 1 + ROUNDING)
    if inputs.high is not None:
        yield inputs.high >= 1 - ROUNDING


def gate_tokens(
    tokens: Tokens, inputs: PolicyLossInputs, spec: PolicyLossSpec, exchange: Exchange | None = None
) -> tuple[Channel, ...]:
    """The gates that the log-ratio of each token goes through, by channel and level."""
    negative = tokens.negative
    if tokens.leaf is None:
        return gated_log_ratio(tokens.x, negative, tokens.given, inputs, spec)
    entering = tokens.x
    if spec.head is Head.CENSORED:
        entering = deviation_of(tokens.x).abs()
    elif spec.term is not None:
        entering = pre_gate(tokens.x, negative, spec.term)
    return gated_hierarchy(entering, tokens.valid, tokens.leaf, negative, tokens.given, inputs, spec, exchange)
