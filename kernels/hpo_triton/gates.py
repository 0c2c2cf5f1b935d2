"""The policy loss under gates on tokens: selection, weights and the reference penalty, with its gradient.

    _sweep         every token once: loss, gradient and metrics
    _finalise      the sums of all programs, added in their order (sums.py)

Gates on several levels, and those with a term of their own, are in hierarchy.py, which ``policy_loss`` calls for them.

The definition is hpo_core/reference/gates.py; the arithmetic of one token is that of csrc/include/hpo/gates.h.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..metrics import SLOTS as METRICS
from ..specs import (
    Exchange,
    Head,
    KLEstimator,
    KLGradient,
    PolicyLossInputs,
    PolicyLossSpec,
    TokenGate,
    rows_as_weights,
)
from . import hierarchy
from .correction_rules import rule_bounds_of, weight_of_tokens
from .corrections import correction
from .launch import kernel, launch, programs_for
from .math import LARGEST_FLOAT, clamp, exp
from .rows import TILE, load, places_of_tile, store
from .scale import scale  # noqa: F401 (an op of its own)
from .sums import COLUMNS, add_tokens, bad_rows, count_tokens, finalise, no_sums, policy_term, store_sums, with_penalty
from .tokens import bits, given_to, has_own_bound, load_tokens, read_tokens, reading_of

DROP = tl.constexpr(int(TokenGate.DROP))

# Registers of a thread: with 128 two programs fit on a multiprocessor. The assembler aims there by itself, but where
# it takes a few more it would rather spill than have one program. Bounds of tokens do take more, and narrow loads
# without a result of tokens.
LIGHT_REGISTERS, MOST_REGISTERS = 128, 255


class Gate(NamedTuple):
    """The choices that specialise the sweep, beside the reading of tokens and which of the optional tensors exist."""

    token: int  # DROP, or CLIP: the identity is a clip without bounds
    score_head: bool
    kl: int
    kl_gradient: int


class Clipped(NamedTuple):
    """The ratios of a block of tokens behind the token gate, and on which side of its bounds they were."""

    ratio: tl.tensor
    below: tl.tensor
    above: tl.tensor


@triton.jit
def _bound(tensor, loaded, of_positive, of_negative, driven, t):
    """A token's bound, a ratio. ``tensor``: of the bounds of tokens, or None; ``driven``: see has_own_bound."""
    value = tl.where(t.negative, of_negative, of_positive)
    if tensor is not None:
        value = tl.where(has_own_bound(t, driven), loaded, value)
    return value


@triton.jit
def clip_tokens(
    t, inputs, loaded, low_positive, low_negative, high_positive, high_negative, low_driven, high_driven,
    DROP: tl.constexpr,
):  # fmt: skip
    if DROP:
        ratio = tl.full(t.x.shape, 1.0, tl.float32)
        below = t.x != t.x
        above = below
    else:
        ratio = exp(t.x)
        lowest = _bound(inputs.low, loaded.low, low_positive, low_negative, low_driven, t)
        highest = _bound(inputs.high, loaded.high, high_positive, high_negative, high_driven, t)
        below = ratio < lowest
        above = ratio > highest
        ratio = tl.where(above, highest, tl.where(below, lowest, ratio))
    return Clipped(ratio, below, above)


@triton.jit
def differentiate_clipped(t, clipped, kl_weight, kl_beta, GATE: tl.constexpr):
    """The policy term of clipped tokens, their penalty, their loss, and its derivative in their log-probability.
    ``kl_weight``: loaded, or None."""
    policy = policy_term(t, clipped.ratio, GATE.score_head)
    derivative = policy.value
    if GATE.score_head == False:  # noqa: E712 (a constexpr)
        derivative = tl.where(clipped.below | clipped.above, 0.0, derivative)
        if GATE.token == DROP:
            derivative = tl.zeros_like(derivative)
    derivative = tl.where(t.x_finite, derivative, 0.0)
    penalty, loss_t, derivative = with_penalty(
        t, kl_weight, policy.loss_t, derivative, kl_beta, GATE.kl, GATE.kl_gradient
    )
    return policy, penalty, loss_t, derivative


@kernel
def _sweep(
    logp,
    old_logp,
    advantages,
    weights,
    cu_seqlens,
    mask,
    ref_logp,
    entropy,
    score,
    threshold,
    token_mask,
    token_weight,
    low,
    high,
    kl_weight,
    correction_first,
    correction_second,
    rule_bounds,  # of the correction
    seen,  # [S] uint8, 0: becomes 1 for rows with a valid token
    sums,  # [programs, COLUMNS] float64
    grad,
    token_loss,
    tokens: tl.int64,
    rows: tl.int64,
    low_positive: tl.float32,
    low_negative: tl.float32,
    high_positive: tl.float32,
    high_negative: tl.float32,
    low_driven: tl.int64,
    high_driven: tl.int64,
    kl_beta: tl.float32,
    READING: tl.constexpr,
    GATE: tl.constexpr,
):
    inputs = PolicyLossInputs(
        logp, old_logp, advantages, weights, cu_seqlens, mask, ref_logp, entropy, score, threshold, token_mask,
        token_weight, low, high, correction_first=correction_first, correction_second=correction_second,
    )  # fmt: skip
    ALIGNED: tl.constexpr = READING.aligned
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0).to(tl.int64)
    counts, total = no_sums()
    for start in range(program * TILE, tokens, programs * TILE):
        whole = start + TILE <= tokens
        token = start + tl.arange(0, TILE)
        loaded = load_tokens(inputs, token, tokens, whole, READING)
        row, _, inside = places_of_tile(cu_seqlens, rows, tokens, start)
        weight = weight_of_tokens(loaded, inputs, rule_bounds, row, rows, token, tokens, whole, READING)
        t = read_tokens(inputs, loaded, weight, row, rows, inside, READING)
        tl.store(seen + row, tl.full([TILE], 1, tl.uint8), mask=t.valid)

        gated = clip_tokens(
            t, inputs, loaded, low_positive, low_negative, high_positive, high_negative, low_driven, high_driven,
            GATE.token == DROP,
        )  # fmt: skip
        counts = count_tokens(counts, t, gated.below, gated.above)

        c = None if kl_weight is None else load(kl_weight, token, tokens, whole, ALIGNED)
        policy, penalty, loss_t, derivative = differentiate_clipped(t, gated, c, kl_beta, GATE)
        # New tensors are aligned, wherever the inputs begin. A store of four neighbours keeps them in one thread: in
        # the layout of narrow accesses the sums take twice the registers.
        if grad is not None:
            store(grad, token, tl.where(t.valid, derivative, 0.0), tokens, whole, True)
        if token_loss is not None:
            bounded = clamp(loss_t, -LARGEST_FLOAT, LARGEST_FLOAT).to(tl.float32)
            store(token_loss, token, tl.where(t.valid, bounded, 0.0), tokens, whole, True)

        h = None if entropy is None else load(entropy, token, tokens, whole, ALIGNED)
        total = add_tokens(total, t, policy.loss, penalty, h, ref_logp is not None)

    bad_offsets = bad_rows(cu_seqlens, tokens, rows)
    store_sums(sums, counts, total, bad_offsets)


# --------------------------------------------------------------------------------------------------------------- host


def policy_loss(
    inputs: PolicyLossInputs, spec: PolicyLossSpec, want_grad: bool, want_tokens: bool, exchange: Exchange | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Loss (0-dim float32), metrics (float64), dL/dlogp ``[T]`` and loss_t ``[T]`` where wanted; ``exchange``: for
    ``spec.levels``."""
    inputs, spec = influential(*rows_as_weights(inputs, spec, correction))
    logp, device = inputs.logp, inputs.logp.device
    loss = torch.empty((), dtype=torch.float32, device=device)
    metrics = torch.empty(len(METRICS), dtype=torch.float64, device=device)
    grad = torch.empty_like(logp) if want_grad else None
    token_loss = torch.empty_like(logp) if want_tokens else None
    if spec.is_hierarchical:
        hierarchy.policy_loss(inputs, spec, loss, metrics, grad, token_loss, exchange)
        return loss, metrics, grad, token_loss

    tokens, rows, programs = logp.numel(), inputs.weights.numel(), programs_for(logp.numel(), TILE.value)
    sums = torch.empty((programs, COLUMNS.value), dtype=torch.float64, device=device)
    reading = reading_of(inputs, spec)
    seen = torch.zeros(rows, dtype=torch.uint8, device=device)
    by_fours = reading.aligned or want_grad or want_tokens
    light = by_fours and reading.rule is None and inputs.low is None and inputs.high is None
    launch(
        _sweep, programs, *given_to(_sweep, inputs),
        rule_bounds_of(spec.correction), seen, sums, grad, token_loss, tokens, rows,
        *spec.token_low, *spec.token_high, bits(spec.low_driven), bits(spec.high_driven), spec.kl_beta,
        READING=reading, GATE=gate_of(spec), maxnreg=LIGHT_REGISTERS if light else MOST_REGISTERS,
    )  # fmt: skip
    finalise(sums, seen, loss, metrics, rows)
    return loss, metrics, grad, token_loss


def influential(inputs: PolicyLossInputs, spec: PolicyLossSpec) -> tuple[PolicyLossInputs, PolicyLossSpec]:
    """Inputs and spec without the choices that have no influence, so that they are no part of the specialisation."""
    if spec.token is not TokenGate.CLIP:
        inputs = inputs._replace(low=None, high=None)
        spec = spec._replace(token_low=NO_LOW, token_high=NO_HIGH, token_log_low=NO_LOG_LOW, token_log_high=NO_HIGH)
    if inputs.ref_logp is None:
        spec = spec._replace(kl=KLEstimator.NONE, kl_gradient=KLGradient.VALUE)
    return inputs, spec


def gate_of(spec: PolicyLossSpec) -> Gate:
    return Gate(
        token=int(TokenGate.DROP if spec.token is TokenGate.DROP else TokenGate.CLIP),
        score_head=spec.head is Head.SCORE,
        kl=int(spec.kl),
        kl_gradient=int(spec.kl_gradient),
    )


NO_LOW, NO_LOG_LOW, NO_HIGH = (0.0, 0.0), (-math.inf, -math.inf), (math.inf, math.inf)
