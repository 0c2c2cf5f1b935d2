"""Corrections: masks and weights on tokens from log-ratios that are constants of the differentiation.

For token t with ``u_t = first_t - second_t``, ``p = e^first`` and ``q = e^second`` (at most 1)::

    v_t    = the statistic of (u, p, q), u saturated at +-60, under K3 at +-20
    v      = v_t, or its mean, sum, minimum or maximum over the valid tokens of t's segment
    factor = 1 or e^v where low <= v <= high, else 0;   or e^clamp(v, low, high)       |v| <= 20 in exponents

A token whose u is NaN or infinite has no statistic: it is in no segment, and its factor is NaN, with which the loss
counts it and leaves it out. Masked tokens and tokens outside all leaves get 1. The result is the
factor times ``token_weight``.
"""

from __future__ import annotations

import torch

from ..specs import Action, CorrectionSpec, PolicyLossInputs, Reduction, SegmentReduce, Statistic
from .hierarchy import ancestors_of, leaf_of_token
from .segments import flat, of_row, row_of_token
from .terms import SATURATION

EXPONENT = 20.0
GUARD = 1e-8  # keeps the logarithm of a binary KL finite


def correction(inputs: PolicyLossInputs, spec: CorrectionSpec, reduce: SegmentReduce | None = None) -> torch.Tensor:
    """The factor ``[T]``, times ``inputs.token_weight``.

    It compares ``correction_first`` and ``correction_second`` of the inputs, or else ``logp`` and ``old_logp``.

    ``reduce`` may change the sums of the segments of ``spec.of_segments`` in place, such as by an all-reduce.
    """
    inputs = flat(inputs)
    assert inputs.old_logp is not None
    first, second, counts = inputs.logp, inputs.old_logp, None
    if inputs.correction_second is not None:
        counts = ~(inputs.logp - inputs.old_logp).isnan()
        if inputs.ref_logp is not None:
            counts = counts & ~(inputs.logp - inputs.ref_logp).isnan()
        first = inputs.logp if inputs.correction_first is None else inputs.correction_first
        second = inputs.correction_second
    second = second.to(first.dtype)
    row = row_of_token(inputs.cu_seqlens, first.numel())
    leaf, _ = leaf_of_token(inputs, row)
    given = (leaf >= 0) if inputs.mask is None else (leaf >= 0) & inputs.mask
    given = given if counts is None else given & counts
    row = row.clamp(min=0)
    own = _statistic(spec.statistic, first, second)
    known = given & ~own.isnan()
    own = torch.where(known, own, torch.zeros_like(own))
    v = own
    if spec.of_segments:
        segment = of_row(ancestors_of(inputs, 1)[0], leaf.clamp(min=0))
        v = _of_segments(spec, own, known, segment, max(inputs.leaves, 1), reduce)
    advantage = inputs.advantages if inputs.advantage_per_token else of_row(inputs.advantages, row)
    factor = _factor(spec, v, (advantage < 0).long())
    factor = torch.where(known, factor, torch.full_like(factor, torch.nan))
    factor = torch.where(given, factor, torch.ones_like(factor))
    return factor if inputs.token_weight is None else factor * inputs.token_weight.to(factor.dtype)


def factor_of_tokens(
    spec: CorrectionSpec, first: torch.Tensor, second: torch.Tensor, negative: torch.Tensor
) -> torch.Tensor:
    """The factor of each token by its own statistic; ``negative``: 1 where the advantage is below 0, else 0."""
    v = _statistic(spec.statistic, first, second)
    factor = _factor(spec, torch.nan_to_num(v), negative)
    return torch.where(v.isnan(), v, factor)


def _factor(spec: CorrectionSpec, v: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
    low, high = (v.new_tensor(bound)[negative] for bound in (spec.low, spec.high))
    if spec.action is Action.CLAMP:
        return torch.exp(v.maximum(low).minimum(high).clamp(-EXPONENT, EXPONENT))
    inside = (low < v) & (v < high) if spec.strict else (low <= v) & (v <= high)
    kept = torch.ones_like(v) if spec.action is Action.MASK else torch.exp(v.clamp(-EXPONENT, EXPONENT))
    return torch.where(inside, kept, torch.zeros_like(v))


def _statistic(statistic: Statistic, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    # The log-ratio saturates, not the statistic, so that a bound on any statistic stays within reach.
    difference = first - second
    u = torch.where(difference.isfinite(), difference.clamp(-SATURATION, SATURATION), torch.nan)
    p, q = torch.exp(first).clamp(max=1), torch.exp(second).clamp(max=1)
    if statistic is Statistic.LOG_RATIO:
        return u
    if statistic is Statistic.K2:
        return 0.5 * u.square()
    if statistic is Statistic.K3:
        u = u.clamp(-EXPONENT, EXPONENT)
        return torch.exp(u) - 1 - u
    if statistic is Statistic.PROBABILITY:
        return torch.where(u.isnan(), u, p - q)
    other = torch.log((1 - q + GUARD) / (1 - p + GUARD))
    return torch.sign(p - q) * (-q * u + (1 - q) * other)


def _of_segments(
    spec: CorrectionSpec,
    v: torch.Tensor,
    known: torch.Tensor,
    segment: torch.Tensor,
    segments: int,
    reduce: SegmentReduce | None,
) -> torch.Tensor:
    """The statistic of each token's segment."""
    sign = -1 if spec.reduction is Reduction.MIN else 1
    if spec.is_extremum:
        entering = torch.where(known, sign * v, torch.full_like(v, -torch.inf))
        table = v.new_full((segments, 1), -torch.inf).scatter_reduce(0, segment[:, None], entering[:, None], "amax")
    else:
        table = v.new_zeros(segments, 2).index_add(0, segment, torch.stack((known.to(v.dtype), v), 1))
    if reduce is not None:
        reduce(table, spec.is_extremum)
    if spec.is_extremum:
        return (sign * table[:, 0])[segment]
    count, total = table[segment].unbind(1)
    return total / count.clamp(min=1) if spec.reduction is Reduction.MEAN else total
