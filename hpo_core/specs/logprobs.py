"""Rows of logits, as kernels know them."""

from __future__ import annotations

import enum
from typing import NamedTuple

import torch

LOGITS = (torch.float32, torch.bfloat16, torch.float16)


class LogitType(enum.IntEnum):
    """The type of stored logits."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2

    @staticmethod
    def of(logits: torch.Tensor) -> LogitType:
        return LogitType[str(logits.dtype).removeprefix("torch.").upper()]


class LogitRows(NamedTuple):
    """Rows of logits over a vocabulary or a part of it, with the inputs of both directions of ``token_logprobs``."""

    logits: torch.Tensor  # [..., columns]; columns first to first + columns - 1 of the vocabulary
    targets: torch.Tensor  # [...] int64 ids in the whole vocabulary
    temperatures: torch.Tensor | None  # [...] float32, instead of `temperature`
    temperature: float
    ignore_index: int
    floors: torch.Tensor | None  # [...] float32: logits below are outside the support, as -inf is
    first: int
    vocabulary: int

    def at_two_strides(self) -> tuple[torch.Tensor, tuple[int, int, int]]:
        """The logits, copied unless their rows lie at two strides, which is how a slice of ``[B, L, V]`` lies in memory
        and all that kernels know; and ``(inner, outer stride, inner stride)``: row r begins at element
        ``(r // inner) * outer stride + (r % inner) * inner stride``."""
        logits = self.logits if len(_leading(self.logits)) <= 2 else self.logits.contiguous()
        (_, outer_stride), (inner, inner_stride) = [(1, 0), (1, 0), *_leading(logits)][-2:]
        return logits, (inner, outer_stride, inner_stride)

    @staticmethod
    def strides_of(grad: torch.Tensor, logits: torch.Tensor, layout: tuple[int, int, int]) -> tuple[int, int]:
        """The outer and inner stride of a gradient: contiguous, or the logits themselves, at two strides."""
        inner, *strides = layout
        return (strides[0], strides[1]) if grad is logits else (inner * logits.shape[-1], logits.shape[-1])


def _leading(logits: torch.Tensor) -> list[tuple[int, int]]:
    """Sizes and strides of all dimensions but the last, joined where they lie one after the other."""
    joined: list[tuple[int, int]] = []
    for size, stride in zip(logits.shape[:-1], logits.stride()[:-1], strict=True):
        if size == 1:
            continue
        if joined and joined[-1][1] == size * stride:
            joined[-1] = (joined[-1][0] * size, stride)
        else:
            joined.append((size, stride))
    return joined
