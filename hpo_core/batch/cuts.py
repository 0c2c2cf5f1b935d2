"""Parts of a batch: rows that are selected, and micro-batches that split no level."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..arguments import check_choice
from ..checks import INTEGERS, check, check_dtype, check_shape, shown
from .hierarchy import row_at

if TYPE_CHECKING:
    from .packed import PackedBatch


class MicroBatch(NamedTuple):
    """Some rows as a batch, with indices into the whole batch: ``advantages[part.rows]``, ``logp[part.tokens]``, or
    ``logp[part.rows]`` where it is ``[B, L]``: the part of a padded batch is padded."""

    batch: PackedBatch
    rows: torch.Tensor  # [S'] int64: indices into [S] tensors of the whole batch
    steps: torch.Tensor | None  # [N'] int64: indices into [N] tensors; empty steps belong to no row and are left out
    tokens: torch.Tensor  # [T'] int64: indices into [T] tensors


def indices_of(batch: PackedBatch, rows: torch.Tensor | Sequence[int]) -> torch.Tensor:
    """``[R]`` int64 from indices or a bool mask ``[S]``, all inside the batch."""
    index = _as_tensor("rows", rows).to(batch.device)
    if index.dtype == torch.bool:
        check_shape("rows", index, (batch.rows,), "[S] for a bool mask")
        index = index.nonzero().flatten()
    index = as_indices("rows", index)
    check(index.dim() == 1, "rows: expected indices [R] or a bool mask [S], got shape {}", list(index.shape))
    inside = (index >= 0) & (index < batch.rows)
    check(bool(inside.all()), "rows: expected indices in [0, {}), got {}", batch.rows, index)
    return index


def parts_of(batch: PackedBatch, max_tokens: int, whole: str | None) -> Iterator[list[int]]:
    """The rows of each micro-batch, which takes as many blocks as fit into it."""
    lengths = (batch.cu_seqlens[1:] - batch.cu_seqlens[:-1]).tolist()
    rows: list[int] = []
    used = 0
    for block in _blocks_of(batch, whole):
        size = sum(lengths[row] for row in block)
        if rows and used + size > max_tokens:
            yield rows
            rows, used = [], 0
        rows.extend(block)
        used += size
    if rows:
        yield rows


def _blocks_of(batch: PackedBatch, whole: str | None) -> Iterator[list[int]]:
    """Blocks of consecutive rows that stay in one part, in order."""
    ids = {"trajectory": batch.trajectory_ids, "group": batch.group_ids, "domain": batch.domain_ids}
    named = [name for name, of in ids.items() if of is not None]
    if whole is None:
        whole = named[-1] if named else "trajectory"
    check_choice("whole", whole, ids)
    check(whole == "trajectory" or whole in named, "{}_ids: whole={!r} needs them in the batch", whole, whole)
    levels = list(ids)[: list(ids).index(whole) + 1]
    # names[row]: the ids, by level, that the row may share with other rows.
    columns = {name: of.tolist() for name in levels if (of := ids[name]) is not None}
    names = [
        {level: of[row] for level, of in columns.items() if level == "trajectory" or of[row] >= 0}
        for row in range(batch.rows)
    ]
    block: list[int] = []
    finished: set[tuple[str, int]] = set()
    for row in range(batch.rows):
        if block and not names[row].items() & names[row - 1].items():
            finished |= {name for earlier in block for name in names[earlier].items()}
            yield block
            block = []
        split = next((name for name in names[row].items() if name in finished), None)
        check(
            split is None,
            "{0}_ids: the rows of {0} {1} are not consecutive, so micro-batches would tear it; sort them first, "
            "batch.select(batch.{0}_ids.argsort(stable=True))",
            *(split or ("", "")),
        )
        block.append(row)
    if block:
        yield block


def torn_by(parts: list[list[int]], batch: PackedBatch) -> list[tuple[str, ...]]:
    """For each part the levels of which it has a piece: "group", "domain"; those of a torn batch stay."""
    torn = [batch.torn] * len(parts)
    for level, ids in (("group", batch.group_ids), ("domain", batch.domain_ids)):
        if ids is None:
            continue
        numbers = ids.tolist()
        units = [{numbers[row] for row in rows if numbers[row] >= 0} for rows in parts]
        seen = Counter(unit for of_part in units for unit in of_part)
        for index, of_part in enumerate(units):
            if level not in torn[index] and any(seen[unit] > 1 for unit in of_part):
                torn[index] += (level,)
    return torn


def check_whole(batch: PackedBatch, level: str, reader: str, otherwise: str) -> None:
    """Check that no other part of micro_batches has rows of this batch's groups, or domains."""
    check(
        level not in batch.torn,
        "batch: {} looks at whole {}s, and another part has rows of a {} of this part; cut with "
        "micro_batches(..., whole={!r}), or {}",
        reader,
        level,
        level,
        level,
        otherwise,
    )


def mark_torn(batch: PackedBatch, *levels: str) -> None:
    """Marks a batch as one with pieces of these levels, see ``PackedBatch.torn``: its maker knows of other parts."""
    object.__setattr__(batch, "torn", (*batch.torn, *levels))


def part_of(batch: PackedBatch, index: torch.Tensor, is_part: bool, torn: tuple[str, ...]) -> MicroBatch:
    """The batch of these rows, with its indices into this batch."""
    begin = batch.cu_seqlens[index]
    lengths = batch.cu_seqlens[index + 1] - begin
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    tokens, _ = _concatenated_ranges(begin, lengths)
    ids = (("trajectory_ids", batch.trajectory_ids), ("group_ids", batch.group_ids), ("domain_ids", batch.domain_ids))
    steps, given = _steps_of(batch, index, begin - offsets[:-1])
    part = type(batch)(
        offsets,
        None if batch.mask is None else batch.mask[tokens],
        total_tokens=tokens.numel(),
        validate=False,
        **given,
        **{name: None if tensor is None else tensor[index] for name, tensor in ids},
    )
    object.__setattr__(part, "is_part", is_part)
    object.__setattr__(part, "torn", torn)
    if batch.padded_shape is not None:
        object.__setattr__(part, "padded_shape", (part.rows, batch.padded_shape[1]))
    return MicroBatch(part, index, steps, tokens)


def _filled_steps(batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The steps with tokens, because an empty one belongs to no row, their ranges and rows, which ascend, ``[N]``."""
    begin, end = batch.step_ranges()
    filled = (end > begin).nonzero().flatten()
    begin, end = begin[filled], end[filled]
    return filled, begin, end, row_at(batch, begin)


def _steps_of(
    batch: PackedBatch, index: torch.Tensor, shift: torch.Tensor
) -> tuple[torch.Tensor | None, dict[str, torch.Tensor | None]]:
    """The steps of these rows, their ranges and ids; ``shift`` of a row is its old position minus its new one."""
    if batch.num_steps is None:
        return None, {}
    filled, begin, end, row = batch.once(_filled_steps)
    first, last = torch.searchsorted(row, index), torch.searchsorted(row, index, right=True)
    chosen, owner = _concatenated_ranges(first, last - first)
    ranges = torch.stack((begin[chosen], end[chosen]), 1) - shift[owner, None]
    steps = filled[chosen]
    return steps, {"steps": ranges, "step_ids": None if batch.step_ids is None else batch.step_ids[steps]}


def _concatenated_ranges(begin: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The positions in the ranges ``begin .. begin + length - 1``, one range after the other, and the range of each."""
    owner = torch.repeat_interleave(torch.arange(begin.numel(), device=begin.device), lengths)
    shift = begin - (lengths.cumsum(0) - lengths)
    return torch.arange(owner.numel(), device=begin.device) + shift[owner], owner


def as_indices(name: str, values: torch.Tensor | Sequence[int]) -> torch.Tensor:
    tensor = _as_tensor(name, values)
    if tensor.numel() > 0:  # an empty list is a float tensor
        check_dtype(name, tensor, INTEGERS, f"use {name}.to(torch.int64)")
    return tensor.to(torch.int64)


def _as_tensor(name: str, values: torch.Tensor | Sequence[int]) -> torch.Tensor:
    try:
        return values if isinstance(values, torch.Tensor) else torch.tensor(values, device="cpu")
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{name}: expected a list of integers that 64 bits hold, got {shown(values)}") from error
