"""Rows of a packed batch and groups of units: the row of each token, counts, statistics, and scans along rows."""

from __future__ import annotations

from typing import Any

import torch

from ..specs import Denominator, PolicyLossInputs


def flat(inputs: PolicyLossInputs) -> PolicyLossInputs:
    """The inputs with padded tensors ``[B, L]`` as ``[T]``: formulas count tokens in one dimension."""
    flattened: dict[str, Any] = {
        name: field.reshape(-1)
        for name, field in inputs._asdict().items()
        if isinstance(field, torch.Tensor) and field.dim() > 1 and name != "ancestors"
    }
    return inputs._replace(**flattened)


def doubles(inputs: PolicyLossInputs) -> PolicyLossInputs:
    """The inputs with numbers as float64: in float32 the mean of a long row would lose digits."""
    converted: dict[str, Any] = {
        name: field.double()
        for name, field in inputs._asdict().items()
        if isinstance(field, torch.Tensor) and field.is_floating_point()
    }
    return inputs._replace(**converted)


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


def of_row(values: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """The value of each token's row; 0 in a batch that has tokens but no row."""
    return values[row] if values.numel() else values.new_zeros(row.shape)


def read_at(tensor: torch.Tensor, given: torch.Tensor, like: torch.Tensor, otherwise: float = 0.0) -> torch.Tensor:
    """``tensor`` at given positions, ``otherwise`` elsewhere: a masked position is never read into arithmetic."""
    return torch.where(given, tensor.to(like.dtype), torch.full_like(like, otherwise))


def row_counts(mask: torch.Tensor | None, cu_seqlens: torch.Tensor, total_tokens: int) -> torch.Tensor:
    """Valid tokens of each row ``[S]`` int64."""
    row = row_of_token(cu_seqlens, total_tokens)
    valid = row >= 0 if mask is None else mask & (row >= 0)
    counts = torch.zeros(cu_seqlens.numel() - 1, dtype=torch.int64, device=cu_seqlens.device)
    return counts.index_add(0, row[valid], torch.ones_like(row[valid]))


def row_weights(
    mask: torch.Tensor | None, cu_seqlens: torch.Tensor, total_tokens: int, denominator: Denominator, factor: float
) -> torch.Tensor:
    """``factor`` divided by the :class:`Denominator`, ``[S]`` float32; 0 where that is 0. The quotient by the tokens or
    rows of the batch is rounded to float32 before a row's own tokens divide it."""
    counts = row_counts(mask, cu_seqlens, total_tokens)
    total = (counts if denominator is Denominator.TOKENS else counts > 0).sum()
    # A number divided by a tensor is the number times a reciprocal in PyTorch, which rounds twice.
    scale = torch.where(total > 0, torch.full_like(total, factor, dtype=torch.float64) / total, 0.0).float()
    if denominator is not Denominator.ROWS_AND_TOKENS:
        return scale.repeat(counts.numel())
    return torch.where(counts > 0, scale / counts.clamp(min=1), torch.zeros_like(scale))


def row_spans(mask: torch.Tensor, cu_seqlens: torch.Tensor, total_tokens: int) -> torch.Tensor:
    """The first offset, each row's first valid token and the one after its last, and the last offset: ``[2 S + 2]``.

    Both are the begin of a row without a valid token. A broken row has T + 1 and -1: rows of these offsets that begin
    or end there are broken, too.
    """
    spans = []
    for begin, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        if not 0 <= begin <= end <= total_tokens:
            spans += [total_tokens + 1, -1]
            continue
        valid = mask[begin:end].nonzero().flatten().tolist() or [0, -1]
        spans += [begin + valid[0], begin + valid[-1] + 1]
    return torch.cat((cu_seqlens[:1], cu_seqlens.new_tensor(spans), cu_seqlens[-1:]))


def group_statistics(
    values: torch.Tensor, ids: torch.Tensor | None, weights: torch.Tensor | None, mask: torch.Tensor | None
) -> torch.Tensor:
    """Statistics of the members of its group, for every unit: ``[6, U]`` float64.

    The rows are the number of members, the sum W of their weights w, the mean ``sum w x / W``,
    ``sum w (x - mean)^2``, the least and the greatest value. Members are units with ``mask``, ``id >= 0``, a finite
    weight above 0 and a finite value; a unit with ``id < 0``, or in a group without members, gets zeros.
    """
    exact = values.detach().double()
    weights = torch.ones_like(exact) if weights is None else weights.double()
    keys = torch.zeros(values.shape, dtype=torch.int64, device=values.device) if ids is None else ids
    member = (keys >= 0) & torch.isfinite(exact) & torch.isfinite(weights) & (weights > 0)
    member = member if mask is None else member & mask
    table = exact.new_zeros(6, values.numel())
    for key in keys[member].unique().tolist():  # type: ignore[no-untyped-call]
        x, w = exact[member & (keys == key)], weights[member & (keys == key)]
        offset = (w * (x - x[0])).sum() / w.sum()  # from the first member: identical values have no deviation
        squares = (w * ((x - x[0]) - offset).square()).sum()
        numbers = torch.stack([w.new_tensor(w.numel()), w.sum(), x[0] + offset, squares, x.min(), x.max()])
        table[:, keys == key] = numbers[:, None]
    return table


def recurrence(values: torch.Tensor, gains: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """``y_i = x_i + g_i y_{i+1}`` from the end of every row to its start, ``[U]``; after a row y is 0.

    Units in no row get 0.
    """
    scanned = torch.zeros_like(values)
    for begin, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        if 0 <= begin <= end <= values.numel():
            following = values.new_zeros(())
            for unit in reversed(range(begin, end)):
                following = values[unit] + gains[unit] * following
                scanned[unit] = following
    return scanned
