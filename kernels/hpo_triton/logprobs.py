"""Log-probabilities and entropies from logits, and back: one program for each row, one launch in each direction.

The definition is hpo_core/reference/logprobs.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl

from ..specs import LogitRows
from .launch import REGISTERS, kernel, launch
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


@kernel
def _forward(
    logits,
    targets,
    temperatures,
    floors,
    logp,
    entropy,
    statistics,
    rows: tl.int64,
    columns: tl.int64,
    first: tl.int64,
    vocabulary: tl.int64,
    inner: tl.int64,
    outer_stride: tl.int64,
    inner_stride: tl.int64,
    temperature: tl.float64,
    ignore_index: tl.int64,
    KEPT: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + at)
    exponent = exponent_of(temperatures, temperature, at)
    result = everything(0.0)
    if target != ignore_index:
        if is_defined(target, vocabulary, exponent):
            floor = None if floors is None else tl.load(floors + at)
            row = Row(address_of_row(logits, at, inner, outer_stride, inner_stride), columns, floor, exponent)
            logit, _ = load_target(row, target - first)
            result = row_result(row, logit, columns == vocabulary, KEPT, ALIGNED)
        else:
            result = everything(float("nan"))
    tl.store(logp + at, result.logp)
    tl.store(statistics + at, result.top)
    tl.store(statistics + rows + at, result.others)
    if KEPT > 2:
        tl.store(entropy + at, result.entropy)
        tl.store(statistics + 2 * rows + at, result.distance)
    if KEPT > 3:
        tl.store(statistics + 3 * rows + at, result.squares)


def token_logprobs(rows: LogitRows, kept: int) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Log-probabilities, entropies where ``kept`` is above 2, and that many statistics ``[kept, T]``."""
    logp = torch.empty_like(rows.targets, dtype=torch.float32)
    entropy = torch.empty_like(logp) if kept > 2 else None
    statistics = logp.new_empty((kept, logp.numel()))
    logits, layout = rows.at_two_strides()
    launch(
        _forward, logp.numel(), logits, rows.targets, rows.temperatures, rows.floors, logp, entropy, statistics,
        *numbers_of(rows, layout), KEPT=kept, ALIGNED=rows_aligned(logits, *layout[1:]), num_warps=NUM_WARPS,
    )  # fmt: skip
    return logp, entropy, statistics


@kernel
def _backward(
    logits,
    targets,
    temperatures,
    floors,
    statistics,
    logp_gradient,
    entropy_gradient,
    grad,
    rows: tl.int64,
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
    ALIGNED: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + at)
    exponent = exponent_of(temperatures, temperature, at)
    top = tl.load(statistics + at)
    others = tl.load(statistics + rows + at)
    a = tl.zeros([], tl.float32) if logp_gradient is None else tl.load(logp_gradient + at)
    b = tl.zeros([], tl.float32) if entropy_gradient is None else tl.load(entropy_gradient + at)
    distance = b if entropy_gradient is None else tl.load(statistics + 2 * rows + at)
    to = address_of_row(grad, at, inner, grad_outer_stride, grad_inner_stride)
    if (target == ignore_index) | ((a == 0.0) & (b == 0.0) & (top == top)):
        fill_gradient(to, columns, 0.0, ALIGNED)
    elif (top != top) | (is_defined(target, vocabulary, exponent) == False):  # noqa: E712
        fill_gradient(to, columns, float("nan"), ALIGNED)
    else:
        floor = None if floors is None else tl.load(floors + at)
        row = Row(address_of_row(logits, at, inner, outer_stride, inner_stride), columns, floor, exponent)
        logit, has_gradient = load_target(row, target - first)
        tl.debug_barrier()  # in place, another warp may write the gradient of this logit before all have read it
        gradient = gradient_of(exponent, top, others, distance, logit, a.to(tl.float64), b.to(tl.float64))
        write_gradient(row, to, top, gradient, target - first, has_gradient, ALIGNED)


def token_logprobs_backward(
    rows: LogitRows,
    statistics: torch.Tensor,
    logp_gradient: torch.Tensor | None,
    entropy_gradient: torch.Tensor | None,
    into: torch.Tensor | None,
) -> torch.Tensor:
    """The gradient of the logits from those of the two results; an upstream gradient of None is 0. It is written
    ``into`` the logits, whose rows then lie at two strides at most, or into a contiguous tensor; None: a new one."""
    logits, layout = rows.at_two_strides()
    grad = uninitialised(logits.shape, logits.dtype, logits.device) if into is None else into
    strides = rows.strides_of(grad, logits, layout)
    is_aligned = rows_aligned(logits, *layout[1:]) and rows_aligned(grad, *strides)
    # Kept to 96 registers, as the assembler chooses, these spill; others do not, and have room for more programs.
    bound = {"maxnreg": REGISTERS} if logits.dtype is torch.float16 and not is_aligned else {}
    launch(
        _backward, rows.targets.numel(), logits, rows.targets, rows.temperatures, rows.floors, statistics,
        logp_gradient, entropy_gradient, grad, *numbers_of(rows, layout), *strides,
        ALIGNED=is_aligned, num_warps=NUM_WARPS, **bound,
    )  # fmt: skip
    return grad


# ------------------------------------------------------------------------------------------------------------- host


def uninitialised(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor that a kernel fills."""
    return torch.empty(shape, dtype=dtype, device=device)


def widen(block: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """The ``block`` in the numbers of ``into``."""
    return into.copy_(block)


def numbers_of(rows: LogitRows, layout: tuple[int, int, int]) -> tuple[int | float, ...]:
    shape = (rows.targets.numel(), rows.logits.shape[-1], rows.first, rows.vocabulary)
    return *shape, *layout, rows.temperature, rows.ignore_index


def rows_aligned(tensor: torch.Tensor, *strides: int) -> bool:
    """Whether all rows begin where 128 bits can be loaded."""
    return all(number % 16 == 0 for number in (tensor.data_ptr(), *(tensor.element_size() * each for each in strides)))
