"""Rows of a packed batch: where each token belongs, and how many valid tokens each row has."""

from __future__ import annotations

from typing import Any

import torch

from ..specs import PolicyLossInputs

__all__ = ["flat", "row_counts", "row_of_token"]


def flat(inputs: PolicyLossInputs) -> PolicyLossInputs:
    """Padded tensors ``[B, L]`` as ``[T]``: formulas count tokens in one dimension."""
    padded: dict[str, Any] = {
        name: field.reshape(-1)
        for name, field in inputs._asdict().items()
        if isinstance(field, torch.Tensor) and field.dim() > 1 and name != "ancestors"
    }
    return inputs._replace(**padded)


def row_of_token(cu_seqlens: torch.Tensor, total_tokens: int) -> torch.Tensor:
    """Row of every token ``[T]`` int64; -1 for tokens before the first or beyond the last offset, and in broken rows.

    >>> import torch
    >>> row_of_token(torch.tensor([0, 2, 2, 3]), 4)
    tensor([ 0,  0,  2, -1])
    """
    rows = torch.full((total_tokens,), -1, dtype=torch.int64, device=cu_seqlens.device)
    for row, (begin, end) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)):
        if 0 <= begin <= end <= total_tokens:
            rows[begin:end] = row
    return rows


def row_counts(mask: torch.Tensor | None, cu_seqlens: torch.Tensor, total_tokens: int) -> torch.Tensor:
    """Valid tokens of each row ``[S]`` int64."""
    row = row_of_token(cu_seqlens, total_tokens)
    valid = row >= 0 if mask is None else mask & (row >= 0)
    counts = torch.zeros(cu_seqlens.numel() - 1, dtype=torch.int64, device=cu_seqlens.device)
    return counts.index_add(0, row[valid], torch.ones_like(row[valid]))
