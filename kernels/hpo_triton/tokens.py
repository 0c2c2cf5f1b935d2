"""Tokens before any gate: validity, selection, log-ratios and weights."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..specs import BOOLS_OF_TOKENS, FLOATS_OF_TOKENS, Head, PolicyLossInputs, PolicyLossSpec
from .launch import aligned
from .math import SATURATION, clamp, is_finite
from .rows import load

# Bounds of tokens outside these limits are no ratios: they are epsilons, or computed from a broken entropy. A bound
# that is meant to be 1 may be rounded.
HIGHEST_LOW, LOWEST_HIGH = tl.constexpr(1.0 + 1e-6), tl.constexpr(1.0 - 1e-6)


class Rule(NamedTuple):
    """The choices of a correction that specialise kernels. A correction of tokens by themselves has no reduction."""

    statistic: int
    reduction: int
    extremum: bool  # the reduction is a minimum or a maximum; else it adds
    action: int
    strict: bool


class Reading(NamedTuple):
    """The choices that specialise the reading of tokens, beside which of the optional tensors exist."""

    strict: bool  # score > threshold instead of >=
    advantage_per_token: bool
    aligned: bool  # every tensor of tokens allows vector loads, see launch.aligned
    target_per_token: bool
    rates: bool  # targets are success rates, and no answer is wrong where they are 1
    rule: Rule | None  # of a correction, see weight_of_tokens


class Loaded(NamedTuple):
    """A block of every tensor of tokens, as it lies in memory: masked positions hold anything. ``logp`` stands in for
    tensors that are not given."""

    logp: tl.tensor
    old_logp: tl.tensor
    ref_logp: tl.tensor
    advantage: tl.tensor
    token_weight: tl.tensor
    score: tl.tensor
    mask: tl.tensor
    token_mask: tl.tensor
    target: tl.tensor
    low: tl.tensor
    high: tl.tensor


class Tokens(NamedTuple):
    """A block of tokens. Its numbers are finite, whatever was loaded, but ``logp``, which is read only where
    ``x_finite``."""

    valid: tl.tensor
    selected: tl.tensor
    negative: tl.tensor  # the advantage is
    logp: tl.tensor
    x: tl.tensor  # log-ratio, saturated
    x_finite: tl.tensor  # the log-ratio was finite before it saturated: it has a derivative
    s: tl.tensor  # log-ratio to the reference, saturated
    s_finite: tl.tensor
    a: tl.tensor  # weight * advantage * token weight, 0 where not selected
    unweighted: tl.tensor  # the same without the row's weight
    weight: tl.tensor  # of the row, 0 where it is not finite
    nan: tl.tensor  # unmasked, with a log-ratio that is NaN; or valid, with a score that is NaN
    infinite: tl.tensor  # valid, with an infinite log-ratio
    bad: tl.tensor  # valid, with a coefficient, target or bound that cannot be used
    target: tl.tensor  # 0 where not selected


@triton.jit
def _load_or(stand_in, pointer, token, tokens, whole, ALIGNED: tl.constexpr):
    return stand_in if pointer is None else load(pointer, token, tokens, whole, ALIGNED)


@triton.jit
def load_tokens(inputs, token, tokens, whole, READING: tl.constexpr):
    """``inputs``: PolicyLossInputs; ``token`` of any shape. Loads are no part of ``read_tokens``, because they need not
    wait until the rows of the tokens are found."""
    logp = load(inputs.logp, token, tokens, whole, READING.aligned)
    return load_constants(inputs, logp, token, tokens, whole, READING)


@triton.jit
def load_constants(inputs, logp, token, tokens, whole, READING: tl.constexpr):
    """``Loaded`` with these log-probabilities of the policy, and everything else from memory."""
    ALIGNED: tl.constexpr = READING.aligned
    advantage = inputs.advantages if READING.advantage_per_token else None
    target = inputs.target if READING.target_per_token else None
    return Loaded(
        logp=logp,
        old_logp=_load_or(logp, inputs.old_logp, token, tokens, whole, ALIGNED),
        ref_logp=_load_or(logp, inputs.ref_logp, token, tokens, whole, ALIGNED),
        advantage=_load_or(logp, advantage, token, tokens, whole, ALIGNED),
        token_weight=_load_or(logp, inputs.token_weight, token, tokens, whole, ALIGNED),
        score=_load_or(logp, inputs.score, token, tokens, whole, ALIGNED),
        mask=_load_or(logp, inputs.mask, token, tokens, whole, ALIGNED),
        token_mask=_load_or(logp, inputs.token_mask, token, tokens, whole, ALIGNED),
        target=_load_or(logp, target, token, tokens, whole, ALIGNED),
        low=_load_or(logp, inputs.low, token, tokens, whole, ALIGNED),
        high=_load_or(logp, inputs.high, token, tokens, whole, ALIGNED),
    )


@triton.jit
def advantage_of(inputs, loaded, row, exists, READING: tl.constexpr):
    """The advantage of each token: its own, or that of its row, which is read where the row ``exists``."""
    if READING.advantage_per_token:
        advantage = loaded.advantage
    else:
        advantage = tl.load(inputs.advantages + row, mask=exists, other=0.0)
    return advantage


@triton.jit
def has_own_bound(t, driven):
    """Whether the bound of a token replaces that of its gate. ``driven``: bit 0 for advantages >= 0, bit 1 for < 0."""
    return t.valid & (((driven >> t.negative.to(tl.int64)) & 1) == 1)


@triton.jit
def read_tokens(inputs, loaded, token_weight, row, rows, inside, READING: tl.constexpr):
    """``token_weight``: see weight_of_tokens; ``row`` and ``inside`` broadcast to the tokens. Selects and never
    multiplies by a mask: the numbers at masked positions do not matter, not even NaN."""
    unmasked = inside if inputs.mask is None else inside & loaded.mask
    logp = tl.where(unmasked, loaded.logp, 0.0)
    raw = logp - tl.where(unmasked, loaded.old_logp, 0.0)
    known = raw == raw
    infinite = tl.abs(raw) == float("inf")
    raw_s = raw
    if inputs.ref_logp is not None:
        raw_s = logp - tl.where(unmasked, loaded.ref_logp, 0.0)
        known &= raw_s == raw_s
        infinite |= tl.abs(raw_s) == float("inf")
    valid = unmasked & known
    unknown = unmasked & (known == False)  # noqa: E712 (`not` is for scalars)

    weight = tl.load(inputs.weights + row, mask=row < rows, other=0.0)
    advantage = advantage_of(inputs, loaded, row, row < rows, READING)
    scaled = weight * advantage
    unweighted = advantage
    if inputs.token_weight is not None or READING.rule is not None:
        scaled = scaled * token_weight
        unweighted = unweighted * token_weight

    usable = is_finite(scaled)
    target = 0.0
    if inputs.target is not None:
        of_row = inputs.target + row
        target = loaded.target if READING.target_per_token else tl.load(of_row, mask=row < rows, other=0.0)
        usable &= is_finite(target)
        if READING.rates:
            usable &= (advantage >= 0.0) | ((target >= 0.0) & (target < 1.0))
    if inputs.low is not None:
        usable &= (loaded.low >= 0.0) & (loaded.low <= HIGHEST_LOW)
    if inputs.high is not None:
        usable &= loaded.high >= LOWEST_HIGH
    selected = valid & usable
    bad = valid & (selected == False)  # noqa: E712
    if inputs.token_mask is not None:
        selected &= loaded.token_mask
    if inputs.score is not None:
        score = tl.where(unmasked, loaded.score, 0.0)
        unknown |= valid & (score != score)
        threshold = tl.load(inputs.threshold)
        selected &= (score > threshold) if READING.strict else (score >= threshold)

    return Tokens(
        valid=valid,
        selected=selected,
        negative=valid & (advantage < 0.0),
        logp=logp,
        x=tl.where(valid, clamp(raw, -SATURATION, SATURATION), 0.0),
        x_finite=valid & is_finite(raw),
        s=tl.where(valid, clamp(raw_s, -SATURATION, SATURATION), 0.0),
        s_finite=valid & is_finite(raw_s),
        a=tl.where(selected, scaled, 0.0),
        unweighted=tl.where(selected, unweighted, 0.0),
        weight=tl.where(is_finite(weight), weight, 0.0),
        nan=unknown,
        infinite=valid & infinite,
        bad=bad,
        target=tl.where(selected, target, 0.0),
    )


# --------------------------------------------------------------------------------------------------------------- host


def reading_of(inputs: PolicyLossInputs, spec: PolicyLossSpec) -> Reading:
    rule = spec.correction
    return Reading(
        strict=spec.strict and inputs.score is not None,
        advantage_per_token=inputs.advantage_per_token,
        aligned=aligned(*_of_tokens(inputs)),
        target_per_token=inputs.target_per_token and inputs.target is not None,
        rates=spec.head is Head.NEGATIVE_AWARE,
        rule=None if rule is None else Rule(int(rule.statistic), 0, False, int(rule.action), rule.strict),
    )


_always_of_tokens = operator.attrgetter(*FLOATS_OF_TOKENS, *BOOLS_OF_TOKENS)


def _of_tokens(inputs: PolicyLossInputs) -> tuple[torch.Tensor | None, ...]:
    advantages = inputs.advantages if inputs.advantage_per_token else None
    return *_always_of_tokens(inputs), advantages, inputs.target if inputs.target_per_token else None


@functools.cache  # the names are the same for every call
def _leading_inputs(kernel: Any) -> Callable[[PolicyLossInputs], tuple[torch.Tensor | None, ...]]:
    leading = itertools.takewhile(PolicyLossInputs._fields.__contains__, kernel.arg_names)
    return operator.attrgetter(*leading)


def given_to(kernel: Any, inputs: PolicyLossInputs) -> tuple[torch.Tensor | None, ...]:
    """The first arguments of a launch: the inputs that the kernel's leading parameters name."""
    return _leading_inputs(kernel)(inputs)


def bits(pair: tuple[bool, bool]) -> int:
    """The pair as the bits 0 and 1 of an integer, as :func:`has_own_bound` reads it."""
    return pair[0] + 2 * pair[1]
