"""Whether the tensors of a batch have the shapes of rows, steps and levels, and values that nest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..checks import INTEGERS, check, check_dtype, check_row_offsets, check_shape, dtype_name, require_type
from ..ops.library import check_count

if TYPE_CHECKING:
    from .packed import PackedBatch


def checked_tensors(
    given: dict[str, Any], mask: torch.Tensor | None, total_tokens: int | None, validate: bool
) -> tuple[dict[str, Any], torch.Tensor | None, int]:
    """The integer tensors of the constructor by name, the bool mask and the number of tokens.

    Raises:
        ValueError, TypeError: the first that has a wrong shape, device or dtype.
    """
    cu_seqlens, cu_steps, steps = given["cu_seqlens"], given["cu_steps"], given["steps"]
    for name, tensor in {"cu_seqlens": cu_seqlens, "mask": mask, **given}.items():
        if tensor is None and name != "cu_seqlens":
            continue
        require_type(isinstance(tensor, torch.Tensor), "{}: expected a tensor, got {}", name, type(tensor))
        if name != "mask" and tensor.numel() > 0:  # torch.tensor([]), on a rank without rows, holds floats
            fix = "offsets and ids are integers: use .to(torch.int64)"
            if name == "cu_seqlens" and tensor.dtype == torch.bool:
                fix = "a mask [B, L] goes to PackedBatch.from_padded, one of packed tokens to mask="
            check_dtype(name, tensor, INTEGERS, fix)
        check(
            tensor.device == cu_seqlens.device,
            "{}: expected device {} (that of cu_seqlens), got {}; move the batch with batch.to(device)",
            name,
            cu_seqlens.device,
            tensor.device,
        )
    check(
        cu_seqlens.dim() == 1 and cu_seqlens.numel() >= 1,
        "cu_seqlens: expected shape [S + 1] with a leading 0, got {}",
        list(cu_seqlens.shape),
    )
    if total_tokens is None:
        check(
            mask is not None or validate,
            "total_tokens: with validate=False and no mask the number of tokens is not known without reading the "
            "offsets; pass total_tokens",
        )
        total_tokens = mask.numel() if mask is not None else int(cu_seqlens[-1])
        check(total_tokens >= 0, "cu_seqlens: expected a last offset >= 0, got {}", total_tokens)
    require_type(isinstance(total_tokens, (int, torch.SymInt)), "total_tokens: expected an int, got {!r}", total_tokens)
    check(total_tokens >= 0, "total_tokens: expected a count >= 0, got {}", total_tokens)
    if mask is not None:
        check_shape("mask", mask, (total_tokens,), "[T]", "for a padded [B, L] mask use PackedBatch.from_padded(mask)")
        given_mask, mask = mask, as_bool(mask)
        if validate and given_mask is not mask:
            check_zeros_and_ones(given_mask)
    check(cu_steps is None or steps is None, "steps: give cu_steps or steps, not both")
    check(
        cu_steps is None or (cu_steps.dim() == 1 and cu_steps.numel() >= 1),
        "cu_steps: expected shape [N + 1], got {}",
        None if cu_steps is None else list(cu_steps.shape),
    )
    if steps is not None and steps.shape == (0,):
        steps = given["steps"] = steps.reshape(0, 2)
    check(
        steps is None or (steps.dim() == 2 and steps.shape[1] == 2),
        "steps: expected shape [N, 2] of half-open token ranges, got {}",
        None if steps is None else list(steps.shape),
    )
    check_count("cu_seqlens", cu_seqlens.numel() - 1)
    if cu_steps is not None:
        check_count("cu_steps", cu_steps.numel() - 1)
    if steps is not None:
        check_count("steps", steps.shape[0])
    for name in ("trajectory_ids", "group_ids", "domain_ids"):
        if (tensor := given[name]) is not None:
            check_shape(name, tensor, (cu_seqlens.numel() - 1,), "[S] (one per row)")
    return given, mask, total_tokens


def check_structure(batch: PackedBatch) -> None:
    """Raises ValueError, naming the first row or step that is wrong. It reads the tensors on the host."""
    longer = "; pass a mask of all tokens, or total_tokens if the buffer is longer"
    offsets = batch.cu_seqlens.cpu()
    check_row_offsets(offsets, batch.total_tokens, longer)
    if batch.cu_steps is not None:
        tiles = batch.cu_steps.cpu()
        check(
            int(tiles[0]) == 0 and int(tiles[-1]) == int(offsets[-1]),
            "cu_steps: expected offsets from 0 to {}, where the last row ends, got {} to {}; "
            "use steps=[N, 2] for ranges with gaps",
            int(offsets[-1]),
            int(tiles[0]),
            int(tiles[-1]),
        )
        gap = _first_true(~torch.isin(offsets, tiles))
        check(
            gap is None,
            "cu_steps: expected steps that tile every row (each row offset starts a step), not so from row {} on; "
            "use steps=[N, 2] for ranges with gaps",
            gap,
        )
        _check_steps("cu_steps", tiles[:-1], tiles[1:], offsets)
    if batch.steps is not None:
        ranges = batch.steps.cpu()
        _check_steps("steps", ranges[:, 0], ranges[:, 1], offsets)
    if batch.step_ids is not None:
        begin, end = (offsets.cpu() for offsets in batch.step_ranges())
        filled = end > begin
        holder = torch.searchsorted(offsets, begin[filled], right=True) - 1
        of_row = torch.arange(batch.rows, device="cpu") if batch.trajectory_ids is None else batch.trajectory_ids.cpu()
        _check_nested("step", batch.step_ids.cpu()[filled], "trajectory", of_row[holder])
    _check_nested("trajectory", batch.trajectory_ids, "group", batch.group_ids)
    _check_nested("trajectory", batch.trajectory_ids, "domain", batch.domain_ids)
    _check_nested("group", batch.group_ids, "domain", batch.domain_ids)


def _check_nested(finer: str, ids: torch.Tensor | None, coarser: str, parents: torch.Tensor | None) -> None:
    if ids is None or parents is None:
        return
    ids, order = ids.cpu().sort(stable=True)
    parents = parents.cpu()[order]
    if coarser != "trajectory":  # a negative group or domain id means none, a negative trajectory id is a name
        parents = parents.clamp(min=-1)
    torn = (ids[1:] == ids[:-1]) & (parents[1:] != parents[:-1])
    if finer in ("step", "group"):  # a step or group with a negative id is a segment of its own
        torn &= ids[1:] >= 0
    place = _first_true(torn)
    if place is not None:
        raise ValueError(
            f"{coarser}_ids: expected one {coarser} for all of {finer} {int(ids[place])}, got "
            f"{int(parents[place])} and {int(parents[place + 1])}; levels nest: mend the ids, or pass validate=False "
            f"where no gate has both levels"
        )


def _check_steps(name: str, begin: torch.Tensor, end: torch.Tensor, offsets: torch.Tensor) -> None:
    overlaps = torch.zeros_like(begin, dtype=torch.bool)
    overlaps[1:] = begin[1:] < end[:-1]
    row = torch.searchsorted(offsets, begin.contiguous(), right=True) - 1  # [N], the row that holds the first token
    outside = (row < 0) | (row >= offsets.numel() - 1) | (end > offsets[(row + 1).clamp(0, offsets.numel() - 1)])
    for wrong, expected, fix in (
        (end < begin, "begin <= end at every step", "a range ends one token behind its last"),
        (overlaps, "steps in order without overlap", "it begins before the last one ends; count from the first row"),
        (outside & (begin < end), "each step inside one row", "cut it where a row ends"),
        ((begin < 0) | (end > offsets[-1]), "empty steps inside the pack, too", "give one the first token of its row"),
    ):
        step = _first_true(wrong)
        got = None if step is None else [int(begin[step]), int(end[step])]
        check(step is None, "{}: expected {}, got {} at step {}; {}", name, expected, got, step, fix)


def check_zeros_and_ones(mask: torch.Tensor) -> None:
    token = _first_true((mask != 0) & (mask != 1))
    got = None if token is None else mask[token].item()
    check(token is None, "mask: expected 0 and 1, got {} at token {}; compare first, mask != 0", got, token)


def _first_true(wrong: torch.Tensor) -> int | None:
    """Index of the first True, or None."""
    return int(wrong.int().argmax()) if bool(wrong.any()) else None


def as_bool(mask: torch.Tensor) -> torch.Tensor:
    if mask.dtype != torch.bool:
        require_type(
            mask.numel() == 0 or not (mask.is_floating_point() or mask.is_complex()),
            "mask: expected bool or integers 0 and 1, got {}; use mask.bool() if 1.0 marks tokens that count, "
            "mask == 0 if it is additive (0 and -inf)",
            dtype_name(mask.dtype),
        )
        mask = mask != 0
    return mask.contiguous()
