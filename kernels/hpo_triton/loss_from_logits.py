"""loss_from_logits in one launch: for each row of logits its log-probability and entropy, the derivative of the
loss in this log-probability under a gate on tokens, and the gradient of the row's logits.

A program takes a row at a time and reads it twice: the second time from the L2 cache, since so few programs work at
once that it holds their rows. The second reading and the gradient are marked for the cache to forget first.

The definition is hpo_core/reference/logprobs.py followed by hpo_core/reference/gates.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..specs import LogitRows, PolicyLossInputs, PolicyLossSpec
from .gates import DROP, clip_tokens, differentiate_clipped, gate_of, influential
from .hierarchy import shape_of
from .hierarchy_tokens import differentiate_tokens, gate_tokens, token_bound
from .launch import REGISTERS, kernel, launch, processors_and_cache
from .logits_rows import (
    NUM_WARPS,
    Row,
    address_of_row,
    everything,
    exponent_of,
    fill_gradient,
    gradient_of,
    is_defined,
    load_target,
    row_result,
    write_gradient,
)
from .logprobs import numbers_of, rows_aligned
from .rows import load, places_of_few
from .terms import numbers_of as numbers_of_term
from .terms import pre_of
from .tokens import bits, load_constants, read_tokens, reading_of

PROGRAMS_TOGETHER = 4  # on a multiprocessor: of 128 threads that take 128 registers each
EVICT_FIRST = tl.constexpr("evict_first")


@triton.jit
def _token_gradient(
    inputs, logp, token, tokens, rows, low_positive, low_negative, high_positive, high_negative, low_driven,
    high_driven, kl_beta, pre, numbers, READING: tl.constexpr, GATE: tl.constexpr, SHAPE: tl.constexpr,
):  # fmt: skip
    """d loss / d logp of the tokens ``[1]``, as the sweeps of policy_loss compute it."""
    loaded = load_constants(inputs, logp, token, tokens, False, READING)
    row, _, inside = places_of_few(inputs.cu_seqlens, rows, tokens, token)
    t = read_tokens(inputs, loaded, loaded.token_weight, row, rows, inside, READING)
    if SHAPE is None:
        clipped = clip_tokens(
            t, inputs, loaded, low_positive, low_negative, high_positive, high_negative, low_driven, high_driven,
            GATE.token == DROP,
        )  # fmt: skip
        c = None if inputs.kl_weight is None else load(inputs.kl_weight, token, tokens, False, False)
        _, _, _, derivative = differentiate_clipped(t, clipped, c, kl_beta, GATE)
    else:
        lowest = token_bound(inputs.low, loaded.low, low_positive, low_negative, low_driven, t)
        highest = token_bound(inputs.high, loaded.high, high_positive, high_negative, high_driven, t)
        weight = None if inputs.token_weight is None else loaded.token_weight
        gated = gate_tokens(t, lowest, highest, None, row, inside, pre, numbers, SHAPE)
        _, _, _, derivative = differentiate_tokens(
            t, gated, weight, inputs, token, tokens, False, kl_beta, pre, numbers, SHAPE, False
        )
    return tl.where(t.valid, derivative, 0.0)


@kernel
def _differentiate_loss(
    logits,
    targets,
    temperatures,
    logp,  # [T] by token, written here
    entropy,
    grad,
    old_logp,
    advantages,
    weights,
    cu_seqlens,
    mask,
    ref_logp,
    score,
    threshold,
    token_mask,
    token_weight,
    low,
    high,
    target,
    penalty_mask,
    kl_weight,
    pre,
    numbers,  # of the term
    tokens: tl.int64,  # rows of logits, each of which predicts the next token; the last one predicts none
    columns: tl.int64,
    first: tl.int64,
    vocabulary: tl.int64,
    inner: tl.int64,
    outer_stride: tl.int64,
    inner_stride: tl.int64,
    temperature: tl.float64,
    ignore_index: tl.int64,
    grad_outer_stride: tl.int64,
    grad_inner_stride: tl.int64,
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
    SHAPE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    inputs = PolicyLossInputs(
        None, old_logp, advantages, weights, cu_seqlens, mask, ref_logp, None, score, threshold, token_mask,
        token_weight, low, high, target=target, penalty_mask=penalty_mask, kl_weight=kl_weight,
    )  # fmt: skip
    for at in range(tl.program_id(0).to(tl.int64), tokens, tl.num_programs(0).to(tl.int64)):
        # The length is made for each row: else the compiler finds the columns of the last step ahead of all rows, and
        # holds them in 64 registers.
        length = tl.where(at < 0, 0, columns)
        id = tl.load(targets + at)
        exponent = exponent_of(temperatures, temperature, at)
        to = address_of_row(grad, at, inner, grad_outer_stride, grad_inner_stride)
        place = tl.where(at + 1 < tokens, at + 1, 0)
        if id == ignore_index:
            tl.store(logp + place, 0.0)
            tl.store(entropy + place, 0.0)
            fill_gradient(to, length, 0.0, ALIGNED, EVICT_FIRST)
        else:
            row = Row(address_of_row(logits, at, inner, outer_stride, inner_stride), length, None, exponent)
            result = everything(float("nan"))
            logit, has_gradient = load_target(row, id - first)
            if is_defined(id, vocabulary, exponent):
                result = row_result(row, logit, True, 3, ALIGNED)
            tl.store(logp + place, result.logp)
            tl.store(entropy + place, result.entropy)
            of_logp = tl.sum(_token_gradient(
                inputs, result.logp + tl.zeros([1], tl.float32), at + 1 + tl.arange(0, 1), tokens, rows, low_positive,
                low_negative, high_positive, high_negative, low_driven, high_driven, kl_beta, pre, numbers,
                READING, GATE, SHAPE,
            ))  # fmt: skip
            if result.top != result.top:
                fill_gradient(to, length, float("nan"), ALIGNED, EVICT_FIRST)
            elif of_logp == 0.0:
                fill_gradient(to, length, 0.0, ALIGNED, EVICT_FIRST)
            else:
                tl.debug_barrier()  # in place, another warp may write the gradient of a logit before all have read it
                none = tl.zeros([], tl.float32)  # of the entropy
                gradient = gradient_of(
                    exponent, result.top, result.others, none, logit, of_logp.to(tl.float64), none.to(tl.float64)
                )
                write_gradient(row, to, result.top, gradient, id - first, has_gradient, ALIGNED, EVICT_FIRST)


def loss_from_logits(
    rows: LogitRows, inputs: PolicyLossInputs, spec: PolicyLossSpec, into: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """See Native.loss_from_logits."""
    logits, layout = rows.at_two_strides()
    strides = rows.strides_of(into, logits, layout)
    programs = _programs(logits, rows.targets.numel())
    if programs == 0:
        return None
    logp = torch.empty(rows.targets.numel(), dtype=torch.float32, device=logits.device)
    entropy = torch.empty_like(logp)
    inputs, spec = influential(inputs, spec)
    of_term = spec.is_hierarchical
    low, high = (spec.token_log_low, spec.token_log_high) if of_term else (spec.token_low, spec.token_high)
    launch(
        _differentiate_loss, programs, logits, rows.targets, rows.temperatures, logp, entropy, into, inputs.old_logp,
        inputs.advantages, inputs.weights, inputs.cu_seqlens, inputs.mask, inputs.ref_logp, inputs.score,
        inputs.threshold, inputs.token_mask, inputs.token_weight, inputs.low, inputs.high, inputs.target,
        inputs.penalty_mask, inputs.kl_weight, pre_of(spec), numbers_of_term(spec.term), *numbers_of(rows, layout),
        *strides, inputs.weights.numel(), *low, *high, bits(spec.low_driven), bits(spec.high_driven), spec.kl_beta,
        READING=reading_of(inputs, spec)._replace(aligned=False), GATE=None if of_term else gate_of(spec),
        SHAPE=shape_of(spec, True) if of_term else None,
        ALIGNED=rows_aligned(logits, *layout[1:]) and rows_aligned(into, *strides),
        num_warps=NUM_WARPS, maxnreg=REGISTERS,
    )  # fmt: skip
    return logp, entropy


def _programs(logits: torch.Tensor, rows: int) -> int:
    """The number of rows that may be read at once, so that the cache keeps them for the gradient; 0: so few that the
    device is not full, and one launch for each direction is the quicker way, on an H200 up to three times."""
    processors, cache = processors_and_cache(logits.device)
    # A row is in the cache for half of its time on average, and the cache also holds gradients: a quarter is left to
    # these.
    kept = cache // 4 * 3 // (logits.shape[-1] * logits.element_size())
    programs = min(rows, processors * PROGRAMS_TOGETHER)
    return 0 if kept < programs else programs
