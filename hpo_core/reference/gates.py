"""The policy loss: hierarchical ratio gating, selection, weights and the reference penalty, as one differentiable
formula.

For token t of row s in trajectory i, with ``m`` the validity mask and ``w`` the row weights::

    x_t = logp_t - old_logp_t                              saturated at +-60 with its derivative kept
    a_k = mean (or another aggregate) of x over the valid tokens of t's segment at level k;  a_0 = x_t,  a_{K+1} = 0
    z_t = sum_k g_k(a_k - a_{k+1})                         gates chosen by the sign of A_t
    M_t = token_mask_t  and  score_t >= threshold  and  A_t finite
    loss_t = -M_t W_t Phi(z_t, A_t) + beta k(logp_t - ref_logp_t) + kappa p(x_t)
    loss   = sum_t m_t w_s loss_t

``Phi`` is the head, ``A e^z`` for the linear one; p is the term's penalty. A pre-gate clips x before it is aggregated;
under the censored head ``|e^x - 1|``, at most 2048 with its derivative kept, is aggregated in its place. The log mean
exp is ``log(1 + mean of e^x - 1)``, x within +-7.5 with its derivative kept, so that no weight e^x can outgrow the sum.
A balanced aggregate is the mean over those segments of the next finer level that have tokens. A NaN log-ratio takes
its token out of m; an infinite one saturates with derivative 0. With a split, x+ = max(x, 0) and x- = max(-x, 0) each
go through the gates by themselves, and z is the difference. Where steps are a level, a token outside every step is
masked.
"""

from __future__ import annotations

import itertools
import math

import torch

from ..metrics import empty_metrics, slot
from ..specs import (
    Aggregate,
    Exchange,
    Head,
    KLEstimator,
    KLGradient,
    LevelKind,
    LevelSpec,
    Penalty,
    PolicyLossInputs,
    PolicyLossSpec,
    Routing,
    TermSpec,
    TokenGate,
)
from .segments import flat, row_of_token

__all__ = ["SATURATION", "leaf_of_token", "of_row", "policy_loss"]

SATURATION = 60.0
SQUARE_SATURATION = 25.0  # of z, for heads that multiply the ratio by another large number, or by itself
IMPLIED_SATURATION = 2.0**36  # of the ratio in the implied policy, which divides it by what may be 2^-24
SCORE_SATURATION = 2e37  # of the loss of a token that is multiplied by its log-probability: eight of them fit a float
SUM_SATURATION = 2.0**31  # of z, for the head that has no ratio: what sums in fixed point hold
DEVIATION_SATURATION = 2048.0  # of a ratio's deviation from 1, where deviations are added up
# Of u in a gamma gate, its slope kept. The gate is far below -SATURATION there: this tells only between the channels of
# a split, where sums of any size would be infinity minus infinity, and a float has to hold each.
GAMMA_SATURATION = 80.0
EXPONENT_SATURATION = 7.5  # of x, where its exponentials are added up: e^7.5 < 2048
STATISTIC_SATURATION = 40.0  # ratio statistics, not the loss

_MOST = {  # of z
    Head.LOG: SUM_SATURATION,
    Head.MIRROR: SQUARE_SATURATION,
    Head.SIMPLE: SQUARE_SATURATION,
    Head.CENSORED: 2 * DEVIATION_SATURATION,
}


def policy_loss(
    inputs: PolicyLossInputs, spec: PolicyLossSpec, exchange: Exchange | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the loss (0-dim, differentiable in ``logp``), the metrics vector (float64) and ``loss_t`` ``[T]``
    (detached).

    Computes in the dtype of ``logp``; float64 is the definition. With an ``exchange``, n and the sums of x of every
    segment of ``spec.levels`` are what it makes of them.
    """
    inputs = flat(inputs)
    logp, metrics = inputs.logp, empty_metrics(inputs.logp.device)
    row = row_of_token(inputs.cu_seqlens, logp.numel())
    offsets = inputs.cu_seqlens
    bad_rows = (offsets[:-1] < 0) | (offsets[1:] < offsets[:-1]) | (offsets[1:] > logp.numel())
    given = row >= 0 if inputs.mask is None else (row >= 0) & inputs.mask
    leaf = None
    if spec.is_hierarchical:
        leaf, bad_leaves = leaf_of_token(inputs, row)
        given = given & (leaf >= 0)
        leaf = leaf.clamp(min=0)
    row = row.clamp(min=0)

    # What a masked position holds is replaced before any arithmetic: 0 * NaN would be NaN, in the gradient too.
    logp = torch.where(given, logp, torch.zeros_like(logp))
    old_logp = logp.detach() if inputs.old_logp is None else _read(inputs.old_logp, given, logp)
    raw = logp - old_logp
    ref_logp = None if inputs.ref_logp is None else _read(inputs.ref_logp, given, logp)
    raw_ref = None if ref_logp is None else logp - ref_logp
    score = None if inputs.score is None else _read(inputs.score, given, logp)

    nan = raw.isnan() if raw_ref is None else raw.isnan() | raw_ref.isnan()
    valid = given & ~nan
    infinite = valid & (raw.isinf() if raw_ref is None else raw.isinf() | raw_ref.isinf())
    x = saturated(raw, valid)

    advantage = (inputs.advantages if inputs.advantage_per_token else of_row(inputs.advantages, row)).to(logp.dtype)
    token_weight = (
        torch.ones_like(logp) if inputs.token_weight is None else _read(inputs.token_weight, given, logp, 1.0)
    )
    weight = of_row(inputs.weights.to(logp.dtype), row)
    scaled = weight * advantage * token_weight
    bad_advantage = valid & ~torch.isfinite(scaled)
    target = torch.zeros_like(logp)
    if inputs.target is not None:
        target = (inputs.target if inputs.target_per_token else of_row(inputs.target, row)).to(logp.dtype)
        fits = torch.isfinite(target)
        if spec.head is Head.NEGATIVE_AWARE:  # a success rate, and no answer is wrong where it is 1
            fits = fits & ((advantage >= 0) | ((target >= 0) & (target < 1)))
        bad_advantage = bad_advantage | (valid & ~fits)
    selected = valid & ~bad_advantage
    if inputs.token_mask is not None:
        selected = selected & inputs.token_mask
    if score is not None and inputs.threshold is not None:
        above = score > inputs.threshold if spec.strict else score >= inputs.threshold
        selected = selected & above
    unweighted = torch.where(selected, advantage * token_weight, torch.zeros_like(logp))
    weight = torch.where(valid & torch.isfinite(weight), weight, torch.zeros_like(weight))

    negative = (advantage < 0).long()
    if leaf is None:
        z, clipped_low, clipped_high = _gated_log_ratio(x, valid, row, negative, given, inputs, spec)
    else:
        entering = x
        if spec.head is Head.CENSORED:
            entering = _deviation(x).abs()
        elif spec.term is not None:
            entering = _pre_gate(x, negative, spec.term)
        z, clipped_low, clipped_high = _gated_hierarchy(entering, valid, leaf, negative, given, inputs, spec, exchange)
    z = saturated(z, valid, _MOST.get(spec.head, SATURATION))
    own = torch.where(raw.isinf(), torch.zeros_like(logp), logp)
    if spec.term is not None:
        factor = _beyond(clipped_low, clipped_high, negative, spec.term, logp)
        unweighted, kept = unweighted * factor, torch.where(selected, token_weight * factor, torch.zeros_like(logp))
        target = torch.where(selected, target, torch.zeros_like(logp))
        number = logp.new_tensor(spec.term.head_numbers)[negative]

    def policy(scale: torch.Tensor | float) -> torch.Tensor:
        """The term of each token, of an objective ``scale`` times as large."""
        if spec.term is None:
            term = _policy_term(spec.head, z, scale * unweighted, own)
        else:
            term = _general_term(spec.head, z, x, scale * unweighted, scale * kept, own, target, number, negative)
        return torch.where(valid, term, torch.zeros_like(term))

    loss_t = policy(1.0).detach()  # a huge one may saturate where its share of the loss does not
    loss = policy(weight).double().sum()

    if spec.term is not None and spec.term.penalty is not Penalty.NONE:
        pays = valid if inputs.penalty_mask is None else valid & inputs.penalty_mask
        penalty = torch.where(pays, spec.term.penalty_coefficient * _penalty(spec.term, x), torch.zeros_like(x))
        loss_t, loss = loss_t + penalty.detach(), loss + (weight * penalty).double().sum()
        metrics[slot("penalty")] += (weight * penalty).sum().detach()

    if raw_ref is not None:
        s = saturated(raw_ref, valid)
        penalty = torch.where(valid, spec.kl_beta * kl_of_tokens(spec.kl, spec.kl_gradient, s, x), torch.zeros_like(s))
        loss_t, loss = loss_t + penalty.detach(), loss + (weight * penalty).double().sum()
        metrics[slot("penalty")] += (weight * penalty).sum().detach()
        metrics[slot("reference_log_ratio")] = s[valid].sum().detach()
        metrics[slot("reference_log_ratio_square")] = s[valid].square().sum().detach()
        metrics[slot("reference_k3")] = (torch.exp(-s[valid]) - 1 + s[valid]).sum().detach()
    largest = torch.finfo(torch.float32).max
    loss = (loss.detach().clamp(-largest, largest) + (loss - loss.detach())).to(logp.dtype)

    with torch.no_grad():
        r = torch.exp(x[valid].clamp(-STATISTIC_SATURATION, STATISTIC_SATURATION))
        metrics[slot("tokens")] = valid.sum()
        metrics[slot("selected")] = selected.sum()
        metrics[slot("rows")] = row[valid].unique().numel()  # type: ignore[no-untyped-call]
        metrics[slot("loss")] = loss
        metrics[slot("log_ratio_sum")] = x[valid].sum()
        metrics[slot("log_ratio_square")] = x[valid].square().sum()
        metrics[slot("ratio_deviation")] = (r - 1).sum()
        metrics[slot("ratio_deviation_square")] = (r - 1).square().sum()
        if valid.any():
            metrics[slot("log_ratio_min")] = x[valid].min()
            metrics[slot("log_ratio_max")] = x[valid].max()
        for name, side in (("low", clipped_low), ("high", clipped_high)):
            metrics[slot(f"clipped_{name}_positive")] = (selected & side & (negative == 0)).sum()
            metrics[slot(f"clipped_{name}_negative")] = (selected & side & (negative == 1)).sum()
        if inputs.entropy is not None:
            counted = valid & torch.isfinite(inputs.entropy)
            metrics[slot("entropy")] = inputs.entropy[counted].sum()
            metrics[slot("entropy_tokens")] = counted.sum()
        score_nan = torch.zeros_like(valid) if score is None else valid & score.isnan()
        metrics[slot("nan_tokens")] = ((given & nan) | score_nan).sum()
        metrics[slot("infinite_tokens")] = infinite.sum()
        metrics[slot("bad_offsets")] = bad_rows.sum() if leaf is None else bad_rows.sum() + bad_leaves
        metrics[slot("bad_advantages")] = bad_advantage.sum()
    return loss, metrics, loss_t


def of_row(values: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """The value of each token's row; 0 in a batch that has tokens but no row."""
    return values[row] if values.numel() else values.new_zeros(row.shape)


def _read(tensor: torch.Tensor, given: torch.Tensor, like: torch.Tensor, otherwise: float = 0.0) -> torch.Tensor:
    """``tensor`` at given positions, ``otherwise`` elsewhere: a masked position is never read into arithmetic."""
    return torch.where(given, tensor.to(like.dtype), torch.full_like(like, otherwise))


def saturated(x: torch.Tensor, valid: torch.Tensor, most: float = SATURATION) -> torch.Tensor:
    """x within +-most; the derivative stays 1 where x is finite and is 0 where it is not."""
    finite = torch.where(valid & torch.isfinite(x), x, torch.zeros_like(x))
    bounded = torch.where(valid, x, torch.zeros_like(x)).detach().clamp(-most, most)
    return bounded + (finite - finite.detach())


def _clip(u: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Clipped value (derivative 1 inside, bounds included), and where it fell below and above."""
    below, above = u < low, u > high
    return torch.where(above, high, torch.where(below, low, u)), below, above


def _gated_log_ratio(
    x: torch.Tensor,
    valid: torch.Tensor,
    row: torch.Tensor,
    negative: torch.Tensor,
    given: torch.Tensor,
    inputs: PolicyLossInputs,
    spec: PolicyLossSpec,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    z = torch.zeros_like(x)
    below = above = torch.zeros_like(valid)
    residual = x
    if spec.has_level:
        mean = _trajectory_mean(x, valid, row, inputs)
        if spec.routing is not Routing.THROUGH:
            mean = mean.detach()
        if spec.routing is Routing.SELF:
            mean = mean + (x - x.detach())  # the value of the mean, the derivative of the token
        residual = x - mean
        low, high = (x.new_tensor(bound)[negative] for bound in (spec.level_log_low, spec.level_log_high))
        z, below, above = _clip(mean, low, high) if spec.level_clips else (mean, below, above)
    gated, token_below, token_above = _gate_token(residual, negative, given, inputs, spec)
    return z + gated, below | token_below, above | token_above


def leaf_of_token(inputs: PolicyLossInputs, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The leaf of every token, -1 outside all of them, and how many leaves leave their row or overlap."""
    begin, end, owner = inputs.leaf_begin, inputs.leaf_end, inputs.leaf_row
    assert begin is not None and end is not None and owner is not None
    leaf = torch.full_like(row, -1)
    bad = torch.zeros((), dtype=torch.int64, device=row.device)
    offsets, covered = inputs.cu_seqlens, 0
    for index, (first, last, of_row) in enumerate(zip(begin.tolist(), end.tolist(), owner.tolist(), strict=True)):
        inside = 0 <= of_row < offsets.numel() - 1 and offsets[of_row] <= first <= last <= offsets[of_row + 1]
        if inside and covered <= first and last <= row.numel():
            leaf[first:last] = index
            covered = last
        else:
            bad += 1
    return leaf, bad


def _gated_hierarchy(
    x: torch.Tensor,
    valid: torch.Tensor,
    leaf: torch.Tensor,
    negative: torch.Tensor,
    given: torch.Tensor,
    inputs: PolicyLossInputs,
    spec: PolicyLossSpec,
    exchange: Exchange | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sum of the gated residuals over all levels and channels."""
    assert inputs.ancestors is not None
    z = torch.zeros_like(x)
    below = above = torch.zeros_like(valid)
    rising, zero = x >= 0, torch.zeros_like(x)  # +0 and -0 rise: one channel has the whole derivative at 0
    channels = [x, zero]
    if spec.split:
        channels = [torch.where(rising, x, zero), torch.where(rising, zero, -x)]
    entering = channels
    if spec.mean_exp:
        entering = [torch.expm1(saturated(channel, valid, EXPONENT_SATURATION)) for channel in channels]
    sums = _sums(entering, valid, leaf, inputs.ancestors)
    if exchange is not None:  # all levels and channels at once: processes must ask in one order
        sums = exchange.differentiable_sums(sums)
    sums = _with_children(sums, inputs.ancestors, spec.levels)
    sums = torch.nn.functional.pad(sums, (0, 0, 0, 1))  # no segment, for tokens that are in none
    for channel in range(1 + spec.split):
        sign, of_token = 1 - 2 * channel, channels[channel]
        aggregates, counts = [], []
        for index, level in enumerate(spec.levels):
            segment = torch.where(valid, of_row(inputs.ancestors[index], leaf), -1)
            count, total = sums[index, segment, 0], sums[index, segment, 1 + channel]
            aggregates.append(_aggregate(of_token, count, total, level))
            counts.append(count)
        values = [of_token, *aggregates, zero]
        residuals = [finer - coarser for finer, coarser in itertools.pairwise(values)]
        gated = [_gate_token(residuals[0], negative, given, inputs, spec)]
        for residual, count, level in zip(residuals[1:], counts, spec.levels, strict=True):
            gated.append(_gate_level(residual, negative + 2 * channel, count, level))
        for value, low, high in gated:
            z = z + sign * value
            below, above = (below | low, above | high) if sign > 0 else (below | high, above | low)
    return z, below, above


def _sums(
    channels: list[torch.Tensor], valid: torch.Tensor, leaf: torch.Tensor, ancestors: torch.Tensor
) -> torch.Tensor:
    """``[levels, P, 3]``: the valid tokens of each segment, and their sum by channel."""
    levels, leaves = ancestors.shape
    entering = torch.stack((torch.ones_like(channels[0]), *channels), 1)[valid]
    place = ancestors[:, leaf[valid]] + leaves * torch.arange(levels, device=leaf.device)[:, None]
    sums = entering.new_zeros(levels * leaves, 3).index_add(0, place.flatten(), entering.repeat(levels, 1))
    return sums.reshape(levels, leaves, 3)


def _with_children(sums: torch.Tensor, ancestors: torch.Tensor, levels: tuple[LevelSpec, ...]) -> torch.Tensor:
    """The sums where a balanced level has, in place of tokens, the finer segments that have any. A segment's number is
    that of its first leaf, which has its parent."""
    by_level = list(sums.unbind(0))
    for k, (level, finer) in enumerate(zip(levels[1:], levels, strict=False), 1):
        if level.aggregate is Aggregate.BALANCED:
            count, totals = by_level[k - 1][:, :1], by_level[k - 1][:, 1:]
            some = count[:, 0] > 0
            children = torch.cat((torch.ones_like(count), _of_segment(count, totals, finer)), 1)
            by_level[k] = torch.zeros_like(children).index_add(0, ancestors[k, some], children[some])
    return torch.stack(by_level) if levels else sums


def _of_segment(count: torch.Tensor, total: torch.Tensor, level: LevelSpec) -> torch.Tensor:
    """The aggregate that comes of what segments add up."""
    mean = total if level.aggregate is Aggregate.SUM else total / count.clamp(min=1)
    return mean.log1p() if level.aggregate is Aggregate.LOG_MEAN_EXP else mean


def _aggregate(x: torch.Tensor, count: torch.Tensor, total: torch.Tensor, level: LevelSpec) -> torch.Tensor:
    """The aggregate of each token's segment, with the derivative it is routed."""
    aggregate = _of_segment(count, total, level)
    if level.routing is not Routing.THROUGH:
        aggregate = aggregate.detach()
    return aggregate + (x - x.detach()) if level.routing is Routing.SELF else aggregate


def _gate_token(
    u: torch.Tensor, negative: torch.Tensor, given: torch.Tensor, inputs: PolicyLossInputs, spec: PolicyLossSpec
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    nowhere = torch.zeros_like(given)
    if spec.token is TokenGate.DROP:
        return torch.zeros_like(u), nowhere, nowhere
    if spec.token is TokenGate.IDENTITY:
        return u, nowhere, nowhere
    if spec.is_hierarchical:
        low, high = (u.new_tensor(bound)[negative] for bound in (spec.token_log_low, spec.token_log_high))
    else:
        low, high = (u.new_tensor(bound)[negative].log() for bound in (spec.token_low, spec.token_high))
    if inputs.low is not None:
        driven = torch.tensor(spec.low_driven, device=u.device)[negative]
        low = torch.where(driven, _read(inputs.low, given, u, 1.0).log(), low)
    if inputs.high is not None:
        driven = torch.tensor(spec.high_driven, device=u.device)[negative]
        high = torch.where(driven, _read(inputs.high, given, u, 1.0).log(), high)
    value, below, above = _clip(u, low, high)
    if spec.term is not None:  # a slope beyond the bounds, which has no value
        slope = _of_side(below, above, negative, spec.term.slope_low, spec.term.slope_high, torch.zeros_like(u))
        value = value + slope * (u - u.detach())
    return value, below, above


def _of_side(
    below: torch.Tensor,
    above: torch.Tensor,
    negative: torch.Tensor,
    of_low: tuple[float, float],
    of_high: tuple[float, float],
    otherwise: torch.Tensor,
) -> torch.Tensor:
    """What belongs to the side of its bounds where a token is."""
    low, high = (otherwise.new_tensor(pair)[negative] for pair in (of_low, of_high))
    return torch.where(above, high, torch.where(below, low, otherwise))


def _beyond(
    below: torch.Tensor, above: torch.Tensor, negative: torch.Tensor, term: TermSpec, like: torch.Tensor
) -> torch.Tensor:
    """The factor on the objective of a token beyond a bound."""
    return _of_side(below, above, negative, term.weight_low, term.weight_high, torch.ones_like(like))


def _deviation(x: torch.Tensor) -> torch.Tensor:
    """Of the ratio e^x from 1."""
    deviation = torch.expm1(x)
    return deviation.detach().clamp(max=DEVIATION_SATURATION) + (deviation - deviation.detach())


def _pre_gate(x: torch.Tensor, negative: torch.Tensor, term: TermSpec) -> torch.Tensor:
    low, high = (x.new_tensor(bound)[negative] for bound in (term.pre_low, term.pre_high))
    return _clip(x, low, high)[0]


def _policy_term(head: Head, z: torch.Tensor, a: torch.Tensor, logp: torch.Tensor) -> torch.Tensor:
    """``-A Phi``; a: the advantage times the token weight, 0 where not selected."""
    ratio = torch.exp(z)
    return -a * ratio if head is Head.LINEAR else _scored(-a * ratio.detach(), logp)


def _scored(a: torch.Tensor, logp: torch.Tensor) -> torch.Tensor:
    """``a logp`` of a log-probability that may be as low as numbers go: saturated with its derivative kept."""
    value = (a * logp).detach().clamp(-SCORE_SATURATION, SCORE_SATURATION)
    return value + a * (logp - logp.detach())


def _general_term(
    head: Head,
    z: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    kept: torch.Tensor,
    logp: torch.Tensor,
    target: torch.Tensor,
    number: torch.Tensor,
    negative: torch.Tensor,
) -> torch.Tensor:
    """The same of every head; kept: the token weight, 0 where not selected."""
    if head is Head.CENSORED:
        deviation = _deviation(x)
        left = deviation + torch.sign(deviation) * z  # of it; z is what the segment is above its budget, negative
        return -a * (1 + torch.where(deviation.abs() + z >= 0, left, torch.zeros_like(z)))
    ratio, size = torch.exp(z), torch.where(negative == 1, -a, a)  # the second: |A|, whatever the sign of weights
    if head is Head.LOG:
        return _scored(-a, logp) + 0.5 * kept * number * z.square()
    if head is Head.MIRROR:
        return -a * ratio + kept * number * (z * ratio - ratio + 1)
    if head is Head.SIGMOID:
        return -a * (4 / number) * torch.sigmoid(number * (ratio - 1))
    if head is Head.SIMPLE:
        return -a * ratio + size * (ratio - 1).square() / (2 * number)
    if head is Head.TARGET:
        return size * (ratio - target).abs()
    if head is Head.NEGATIVE_AWARE:
        capped = torch.exp(z.detach().clamp(max=math.log(IMPLIED_SATURATION)) + (z - z.detach()))
        rate = torch.where(negative == 1, target, torch.zeros_like(target))
        implied = torch.where(negative == 1, (1 - rate * capped) / (1 - rate), ratio)
        bounded = implied.detach().maximum(number) + (implied - implied.detach())
        return -size * bounded.log()
    if head is Head.FLIPPED:
        factor = torch.exp(torch.where(negative == 1, z, -z)).detach()
        through = -a * factor * (1 + z - z.detach())
        return torch.where(factor > number, _scored(-a * number, logp), through)
    return _policy_term(head, z, a, logp)


def _penalty(term: TermSpec, x: torch.Tensor) -> torch.Tensor:
    if term.penalty is Penalty.K1:
        return -x
    if term.penalty is Penalty.K2:
        return 0.5 * x.square()
    return x.abs() if term.penalty is Penalty.ABSOLUTE else torch.exp(x) - 1 - x


def _gate_level(
    u: torch.Tensor, kind: torch.Tensor, count: torch.Tensor, level: LevelSpec
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gated residual, and where it fell beyond the lower and the upper bound. ``count``: tokens of the segment."""
    low, high = (u.new_tensor(bound)[kind] for bound in (level.low, level.high))
    if level.gate is LevelKind.CLIP:
        return _clip(u, low, high)
    if level.gate is LevelKind.ROLLBACK:
        slope = count.clamp(max=-level.slope) if level.slope < 0 else torch.full_like(u, level.slope)
        size = u.abs()
        back = torch.where(slope.isinf(), -torch.ones_like(u), (slope + 1) * high - slope.clamp(max=1e30) * size)
        back = torch.where(slope == 0, high, back)  # a clip: no zone to roll back in
        # The end of the zone has the slope of what is 0, where level metrics count it; a clamp would keep the other.
        rolled = torch.where(size <= high, u, torch.sign(u) * torch.where(back > 0, back, torch.zeros_like(u)))
        return rolled, u < -high, u > high
    if level.gate is LevelKind.TANH:
        return high * torch.tanh(u / high), torch.zeros_like(u, dtype=torch.bool), torch.zeros_like(u, dtype=torch.bool)
    nowhere = torch.zeros_like(u, dtype=torch.bool)
    if level.gate is LevelKind.GAMMA:
        saturated = u.detach().clamp(max=GAMMA_SATURATION) + (u - u.detach())
        return high + low * u - high * torch.exp(saturated), nowhere, nowhere
    if level.gate is LevelKind.EXCESS:
        excess = u - count * high
        return torch.where(excess > 0, -excess, torch.zeros_like(u)), nowhere, excess > 0
    return u, nowhere, nowhere


def _trajectory_mean(x: torch.Tensor, valid: torch.Tensor, row: torch.Tensor, inputs: PolicyLossInputs) -> torch.Tensor:
    """Mean of x over the valid tokens of each token's trajectory, spread back to the tokens."""
    trajectory = row if inputs.row_trajectory is None else of_row(inputs.row_trajectory, row)
    zeros = x.new_zeros(max(inputs.weights.numel(), 1))
    count = zeros.index_add(0, trajectory, valid.to(x.dtype))
    total = zeros.index_add(0, trajectory, torch.where(valid, x, torch.zeros_like(x)))
    return (total / count.clamp(min=1))[trajectory]


def kl_of_tokens(estimator: KLEstimator, gradient: KLGradient, s: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The estimate of each token, ``[T]``, from saturated log-ratios to the reference (s) and the old policy (x)."""
    k2 = 0.5 * s.square()
    k = {KLEstimator.K1: s, KLEstimator.K2: k2}.get(estimator, torch.exp(-s) - 1 + s)
    if gradient is KLGradient.VALUE:
        return k
    if gradient is KLGradient.STRAIGHT_THROUGH:
        return k.detach() + (k2 - k2.detach())
    r = torch.exp(x)
    if estimator is KLEstimator.K3:  # r e^-s saturates as one exponential
        both = x - s
        bounded = both.detach().clamp(-SATURATION, SATURATION) + (both - both.detach())
        return torch.exp(bounded) - r + s * r
    return r * k
