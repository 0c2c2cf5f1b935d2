"""A block of tokens under the gates of hierarchy.py: their residuals behind the gates, the policy term, its derivative.

The definition is hpo_core/reference/hierarchy.py; the arithmetic is that of csrc/include/hpo/hierarchy.h in the same
order.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ..specs import Penalty
from .gated_levels import GATED_FIELDS, KINDS, MEAN, OWN, SIDE, SLOPE, Z
from .math import SATURATION, clamp, exp
from .rows import load
from .sums import policy_term, with_penalty
from .terms import entering, general_term, with_own_penalty, with_slopes
from .tokens import has_own_bound

NO_OWN_PENALTY = tl.constexpr(int(Penalty.NONE))


@triton.jit
def _mean_of_levels(gated_levels, leaf, held, CHANNEL: tl.constexpr):
    if gated_levels is None:  # no level above the token
        mean = tl.zeros(leaf.shape, tl.float32)
    else:
        mean = tl.load(gated_levels + (leaf * GATED_FIELDS + MEAN) * KINDS + 2 * CHANNEL, mask=held, other=0.0)
    return mean


@triton.jit
def _of_levels(gated_levels, leaf, held, negative, FIELD: tl.constexpr, CHANNEL: tl.constexpr):
    if gated_levels is None:
        value = tl.zeros(negative.shape, tl.float32)
    else:
        at = gated_levels + (leaf * GATED_FIELDS + FIELD) * KINDS + 2 * CHANNEL
        positive = tl.load(at, mask=held, other=0.0)
        value = tl.where(negative, tl.load(at + 1, mask=held, other=0.0), positive)
    return value


@triton.jit
def token_bound(tensor, loaded, of_positive, of_negative, driven, t):
    """A token's bound in log space, rounded once, as the bounds of all tokens are. ``tensor``: of the bounds of tokens,
    or None; ``driven``: see has_own_bound."""
    value = tl.where(t.negative, of_negative, of_positive)
    if tensor is not None:
        own = has_own_bound(t, driven)
        ratio = tl.where(own, loaded, 1.0)
        value = tl.where(own, tl.log(ratio.to(tl.float64)).to(tl.float32), value)
    return value


class _OneChannel(NamedTuple):
    """The gate on the residuals of a block of tokens in one channel."""

    value: tl.tensor
    inside: tl.tensor  # float: 1 within the bounds, else 0
    below: tl.tensor
    above: tl.tensor


@triton.jit
def _gate_channel(u, low, high, DROP: tl.constexpr):
    value = tl.zeros_like(u)
    inside, below, above = value, value != value, value != value
    if not DROP:
        below, above = u < low, u > high
        value = tl.where(above, high, tl.where(below, low, u))
        inside = (value == u).to(tl.float32)
    return _OneChannel(value, inside, below, above)


class Gated(NamedTuple):
    """A block of tokens behind all gates."""

    x: tl.tensor  # the log-ratio behind the pre-gate
    z: tl.tensor  # or the ratio, with SHAPE.as_ratio
    below: tl.tensor  # some gate was beyond its bound
    above: tl.tensor
    inside: tl.tensor  # float: the slope of the token gate in the token's channel
    own: tl.tensor  # the slopes that the levels add to it; with SHAPE.settled the gradient itself
    slope: tl.tensor  # of the finest level, by channel, beside the slope of the token gate there
    rising_inside: tl.tensor
    falling_slope: tl.tensor
    falling_inside: tl.tensor


@triton.jit
def gate_tokens(t, lowest, highest, gated_levels, leaf, held, pre, numbers, SHAPE: tl.constexpr):
    """``lowest`` and ``highest``: the bounds of the token gate in log space."""
    SPLIT: tl.constexpr = SHAPE.channels == 2
    # The residual of the token, and with a split that of the other channel.
    negative = t.negative
    x = entering(t.x, negative, pre)
    falls = x < 0.0  # +0 and -0 rise: one channel has the whole derivative at 0
    up = tl.where(falls, 0.0, x) if SPLIT else x
    rising = _gate_channel(up - _mean_of_levels(gated_levels, leaf, held, 0), lowest, highest, SHAPE.drop)
    z = _of_levels(gated_levels, leaf, held, negative, Z, 0)
    slope = _of_levels(gated_levels, leaf, held, negative, SLOPE, 0)
    own = _of_levels(gated_levels, leaf, held, negative, OWN, 0)
    side = _of_levels(gated_levels, leaf, held, negative, SIDE, 0).to(tl.int32)
    below, above = rising.below, rising.above
    rising_inside = with_slopes(rising.inside, below, above, negative, numbers)
    inside = rising_inside
    falling, falling_slope = rising, slope
    if SPLIT:
        falling = _gate_channel((up - x) - _mean_of_levels(gated_levels, leaf, held, 1), lowest, highest, SHAPE.drop)
        z += _of_levels(gated_levels, leaf, held, negative, Z, 1)
        falling_slope = _of_levels(gated_levels, leaf, held, negative, SLOPE, 1)
        own = tl.where(falls, _of_levels(gated_levels, leaf, held, negative, OWN, 1), own)
        side |= _of_levels(gated_levels, leaf, held, negative, SIDE, 1).to(tl.int32)
        inside = tl.where(falls, falling.inside, inside)
        below |= falling.above
        above |= falling.below
    z += rising.value
    if SPLIT:
        z -= falling.value
    below |= side % 2 == 1
    above |= side // 2 == 1
    return Gated(x, z, below, above, inside, own, slope, rising_inside, falling_slope, falling.inside)


@triton.jit
def gated_term(t, gated, token_weight, numbers, SHAPE: tl.constexpr):
    """``token_weight``: loaded, or None."""
    if SHAPE.term is None:
        ratio = gated.z if SHAPE.as_ratio else exp(clamp(gated.z, -SATURATION, SATURATION))
        policy = policy_term(t, ratio, SHAPE.score_head)
    else:
        policy = general_term(t, token_weight, gated.z, gated.below, gated.above, numbers, SHAPE.term.head)
    return policy


@triton.jit
def gated_derivative(t, gated, policy, pre, SHAPE: tl.constexpr):
    """The derivative of the policy term in the log-probability, past the token's own gate."""
    derivative = policy.value
    if SHAPE.settled:
        derivative = gated.own
    elif SHAPE.score_head == False:  # noqa: E712 (a constexpr)
        # Where the finest level takes the place of the token, its own slope does not count.
        derivative = derivative * (gated.own if SHAPE.takes_place else gated.inside + gated.own)
    if pre is not None:
        derivative = tl.where(gated.x == t.x, derivative, 0.0)
    if SHAPE.term is not None:
        derivative += policy.direct
    return tl.where(t.x_finite, derivative, 0.0)


@triton.jit
def differentiate_tokens(
    t, gated, token_weight, inputs, token, tokens, whole, kl_beta, pre, numbers,
    SHAPE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """The policy term of gated tokens, their penalty, their loss, and its derivative in their log-probability."""
    policy = gated_term(t, gated, token_weight, numbers, SHAPE)
    derivative = gated_derivative(t, gated, policy, pre, SHAPE)
    c = None if inputs.kl_weight is None else load(inputs.kl_weight, token, tokens, whole, ALIGNED)
    penalty, loss_t, derivative = with_penalty(t, c, policy.loss_t, derivative, kl_beta, SHAPE.kl, SHAPE.kl_gradient)
    if SHAPE.term is not None and SHAPE.term.penalty != NO_OWN_PENALTY:
        pays = t.valid
        if inputs.penalty_mask is not None:
            pays &= load(inputs.penalty_mask, token, tokens, whole, ALIGNED)
        penalty, loss_t, derivative = with_own_penalty(
            t, pays, penalty, loss_t, derivative, numbers.penalty, SHAPE.term.penalty
        )
    return policy, penalty, loss_t, derivative
