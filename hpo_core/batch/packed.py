"""PackedBatch: the one description of how tokens form rows, and rows form the hierarchy above them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .. import ops
from ..arguments import examines
from ..checks import check, check_device, check_real, check_shape, examined, require_type
from ..specs import Unit
from .cuts import MicroBatch, as_indices, indices_of, part_of, parts_of, torn_by
from .hierarchy import (
    ROWS_AS_LEAVES,
    Hierarchy,
    LeafTables,
    first_ranges,
    hierarchy_of,
    of_row,
    row_at,
    row_counts,
    rows_of_tokens,
    trajectories_of,
)
from .immutable import STRUCTURE, Immutable
from .levels import at_level
from .structure import check_structure, check_zeros_and_ones, checked_tensors

_OF_ROWS = ((), (Unit.TRAJECTORY,))  # levels whose segments are the rows, where rows are trajectories


class PackedBatch(Immutable):
    """Rows of tokens packed end to end, and the hierarchy step < row < trajectory < group < domain.

    A batch is immutable: :meth:`replace` makes one with other tensors. Its tensors may be refilled in place, as CUDA
    graphs need it.

    Row s holds the tokens ``cu_seqlens[s] .. cu_seqlens[s + 1] - 1`` of every ``[T]`` tensor. Rows may be empty; tokens
    beyond the last offset (padding of a fixed-size buffer) belong to no row and are never read.

    Args:
        cu_seqlens: ``[S + 1]`` int32 or int64, starting at 0, never decreasing, ending at most at T.
        mask: ``[T]`` bool, or integers 0 and 1: which tokens count. Floats are refused, because an additive mask (0 and
            -inf) means the opposite. Default: all tokens of all rows.
        total_tokens: T. Default: the length of ``mask``, else the last offset (read only with ``validate=True``).
        cu_steps: ``[N + 1]`` offsets of steps that tile every row. At most one of ``cu_steps`` and ``steps``.
        steps: ``[N, 2]`` half-open token ranges, in order, with gaps allowed; each inside one row.
        step_ids: ``[N]`` any integers: ranges with equal ids form one step, so a step may have gaps, or continue in
            another row of its trajectory or on another rank. A range with a negative id is a step of its own. Default:
            each range is a step.
        trajectory_ids: ``[S]`` any integers: rows with equal ids form one trajectory. Default: each row is a
            trajectory.
        group_ids: ``[S]`` any integers: the prompt group of each row (advantages). A negative id means no group: as a
            level of a gate, the trajectory is then a group by itself.
        domain_ids: ``[S]`` any integers: the domain of each row. A negative id means no domain: the group, or the
            trajectory where it is in no group, is then a domain by itself.
        validate: check the *values* of offsets, steps, ids and integer masks, and that trajectories, groups and domains
            nest, which synchronises with the device, as selecting and cutting do; losses, estimators and windows of
            one rank do not. With ``False`` wrong values never cause a bad memory access: they are clamped and flagged
            in the metrics.

    Raises:
        ValueError: a wrong shape, device or value; TypeError: a wrong dtype. Both name the argument and the fix.

    >>> import torch
    >>> batch = PackedBatch(torch.tensor([0, 3, 5]), group_ids=torch.tensor([7, 7]))
    >>> batch
    PackedBatch(rows=2, tokens=5, group_ids)
    >>> batch.row_counts
    tensor([3, 2])
    """

    __slots__ = (
        "cu_seqlens",
        "cu_steps",
        "domain_ids",
        "group_ids",
        "is_part",
        "mask",
        "padded_shape",
        "rows",
        "step_ids",
        "steps",
        "torn",
        "total_tokens",
        "trajectory_ids",
    )

    cu_seqlens: torch.Tensor
    rows: int  # S, the number of packed rows
    mask: torch.Tensor | None
    total_tokens: int
    cu_steps: torch.Tensor | None
    steps: torch.Tensor | None
    step_ids: torch.Tensor | None
    trajectory_ids: torch.Tensor | None
    group_ids: torch.Tensor | None
    domain_ids: torch.Tensor | None
    padded_shape: tuple[int, int] | None
    is_part: bool  # made by micro_batches: the whole batch has the counts of the optimiser step
    # "group", "domain": another part has rows of the same one; "ranks": groups have rows on other ranks
    torn: tuple[str, ...]

    @examines
    def __init__(
        self,
        cu_seqlens: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        total_tokens: int | None = None,
        cu_steps: torch.Tensor | None = None,
        steps: torch.Tensor | None = None,
        step_ids: torch.Tensor | None = None,
        trajectory_ids: torch.Tensor | None = None,
        group_ids: torch.Tensor | None = None,
        domain_ids: torch.Tensor | None = None,
        validate: bool = True,
    ) -> None:
        given = {
            "cu_seqlens": cu_seqlens, "cu_steps": cu_steps, "steps": steps, "step_ids": step_ids,
            "trajectory_ids": trajectory_ids, "group_ids": group_ids, "domain_ids": domain_ids,
        }  # fmt: skip
        integers, mask, total_tokens = checked_tensors(given, mask, total_tokens, validate)
        # Kernels index in int64 and assume contiguous memory; the copies are made once, here.
        self.__setstate__(
            {name: None if each is None else each.to(torch.int64).contiguous() for name, each in integers.items()}
            | {"rows": cu_seqlens.numel() - 1, "mask": mask, "total_tokens": total_tokens}
            | {"padded_shape": None, "is_part": False, "torn": ()}
        )
        if self.step_ids is not None:
            check(self.num_steps is not None, "step_ids: there are no steps to name; pass cu_steps or steps, too")
            check_shape("step_ids", self.step_ids, (self.num_steps or 0,), "[N] (one per range)")
        if validate:
            check_structure(self)

    # ------------------------------------------------------------------------------------------------ constructors

    @classmethod
    @examines
    def from_padded(
        cls, mask: torch.Tensor, *, validate: bool | None = None, **ids: torch.Tensor | None
    ) -> PackedBatch:
        """The batch of a padded ``[B, L]`` mask: B rows of L tokens, without a copy or a synchronisation.

        Calls with this batch take ``[B, L]`` tensors, and their results have that shape. ``ids`` are the keyword ids of
        the constructor; steps count tokens of the flattened ``[B * L]``. ``validate``: as there; by default values are
        checked if there are steps on the CPU, and the values of an integer mask there.

        >>> import torch
        >>> PackedBatch.from_padded(torch.tensor([[1, 1, 0], [1, 0, 0]]))
        PackedBatch(rows=2, tokens=6, padded=(2, 3), mask)
        """
        require_type(isinstance(mask, torch.Tensor), "mask: expected a tensor [B, L], got {}", type(mask))
        check(mask.dim() == 2, "mask: expected a padded mask [B, L], got shape {}", list(mask.shape))
        batch, length = mask.shape
        offsets = torch.arange(batch + 1, dtype=torch.int64, device=mask.device) * length
        if validate is None:
            has_steps = any(ids.get(name) is not None for name in ("steps", "cu_steps", "step_ids"))
            is_read = mask.is_cpu and not ops.is_traced(mask)
            validate = has_steps and is_read
            # Ids or labels in its place would count everywhere. Bytes of bool are right, and comparing them takes
            # longer than a loss.
            if is_read and mask.dtype is not torch.bool and not (mask.is_floating_point() or mask.is_complex()):
                check_zeros_and_ones(mask.reshape(-1))
        result = cls(offsets, mask.reshape(-1), total_tokens=batch * length, validate=validate, **ids)
        object.__setattr__(result, "padded_shape", (batch, length))
        return result

    @classmethod
    @examines
    def from_lengths(
        cls, lengths: torch.Tensor | Sequence[int], total_tokens: int | None = None, **keywords: Any
    ) -> PackedBatch:
        """The batch of rows with these ``lengths`` ``[S]``; ``keywords`` are keywords of the constructor.

        >>> PackedBatch.from_lengths([2, 0, 3]).cu_seqlens
        tensor([0, 2, 2, 5])
        """
        counts = as_indices("lengths", lengths)
        check(counts.dim() == 1, "lengths: expected shape [S], got {}", list(counts.shape))
        is_read = keywords.get("validate", True) and counts.numel() > 0
        check(not is_read or int(counts.min()) >= 0, "lengths: expected numbers of tokens >= 0, got {}", lengths)
        offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        return cls(offsets, total_tokens=total_tokens, **keywords)

    # --------------------------------------------------------------------------------------------------- properties

    @property
    def device(self) -> torch.device:
        return self.cu_seqlens.device

    @property
    def num_steps(self) -> int | None:
        """N, or None without steps."""
        if self.steps is not None:
            return self.steps.shape[0]
        return None if self.cu_steps is None else self.cu_steps.numel() - 1

    @property
    def row_counts(self) -> torch.Tensor:
        """Valid tokens of each row ``[S]`` int64: a copy, so that no change to it reaches a loss."""
        return self.once(row_counts).clone()

    @property
    def trajectories(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """``(row_trajectory [S], start [S + 1], rows [S])``: the rows of each trajectory, in pack order; None if each
        row is a trajectory.

        Trajectories are renumbered 0, 1, ... in the order of their ids. Their number stays on the device: no
        synchronisation.
        """
        if self.trajectory_ids is None:
            return None
        return self.once(trajectories_of)

    def hierarchy(self, units: tuple[Unit, ...]) -> Hierarchy:
        """The token ranges that tile the finest of ``units``, and the segment of each range at every unit; made once.

        Raises:
            ValueError: the batch does not describe a unit.
        """
        return self.once(hierarchy_of, units)

    def leaf_tables(self, units: tuple[Unit, ...]) -> LeafTables:
        """The same for kernels: no table, and so no launch on a new batch, where the offsets say all."""
        if Unit.STEP in units:
            return LeafTables(*self.hierarchy(units))
        if self.trajectory_ids is None and units in _OF_ROWS:
            return ROWS_AS_LEAVES
        return LeafTables(ancestors=self.hierarchy(units).ancestors)

    def ids(self, unit: Unit) -> torch.Tensor | None:
        """The ids ``[S]`` (of steps ``[N]``) of the segments of this unit; None if the batch has none."""
        of_unit = {
            Unit.STEP: self.step_ids,
            Unit.TRAJECTORY: self.trajectory_ids,
            Unit.GROUP: self.group_ids,
            Unit.DOMAIN: self.domain_ids,
        }
        return of_unit[unit]

    def row_of_token(self) -> torch.Tensor:
        """Row of every token ``[T]`` int64, -1 for tokens beyond the last offset."""
        row = self.once(rows_of_tokens).to(torch.int64)
        return torch.where(row < self.rows, row, -1)

    def is_first_token(self) -> torch.Tensor:
        """Whether each token is the first of its row, ``[T]`` bool."""
        row = self.row_of_token()
        return (row >= 0) & (row.diff(prepend=row.new_full((1,), -1)) != 0)

    def spans(self) -> torch.Tensor:
        """The rows as windows see them: each from its first valid token to its last, because masked tokens before and
        behind these are padding. These are the rows 1, 3, ... of the offsets ``[2 S + 2]``; the others are padding.
        Without a mask ``cu_seqlens`` itself.

        >>> PackedBatch.from_lengths([3, 2], mask=torch.tensor([False, True, False, True, True])).spans()
        tensor([0, 1, 2, 3, 5, 5])
        """
        if self.mask is None:
            return self.cu_seqlens
        return ops.row_spans(self.mask, self.cu_seqlens, self.total_tokens, None)

    def without_first_tokens(self) -> PackedBatch:
        """The batch with the first token of each row masked, because no logits of the row predict it.

        Of a padded row it is the first position: behind padding on the left the first token goes on to count, scored by
        logits of padding. Make that batch of ``mask & (mask.cumsum(1) > 1)``.

        >>> PackedBatch.from_lengths([2, 0, 3]).without_first_tokens().mask
        tensor([False,  True, False,  True,  True])
        """
        mask = ~self.is_first_token()
        return self.replace(mask=mask if self.mask is None else mask & self.mask, validate=False)

    def step_of_token(self) -> torch.Tensor:
        """Step of every token ``[T]`` int64, -1 outside all steps. Needs ``cu_steps`` or ``steps``."""
        begin, end = self.step_ranges()
        token = torch.arange(self.total_tokens, device=self.device)
        if self.num_steps == 0:
            return torch.full_like(token, -1)
        step = torch.searchsorted(begin, token, right=True) - 1  # the last step that begins at or before the token
        inside = (step >= 0) & (token < end[step.clamp(min=0)])
        return torch.where(inside, step, -1)

    @examines
    def spread_steps(self, values: torch.Tensor) -> torch.Tensor:
        """Values of steps ``[N]`` at their tokens ``[T]``; 0 outside all steps. A step of several ranges (equal
        ``step_ids``) has the value of its first."""
        check_shape("values", values, (self.num_steps or 0,), "[N] (one per step)")
        check_device("values", values, self.device, "the batch")
        check_real("values", values)
        if self.step_ids is not None:
            values = values[self.once(first_ranges)]
        return torch.cat((values, values.new_zeros(1)))[self.once(PackedBatch.step_of_token)]  # -1: the zero at the end

    def of_level(
        self, name: str, values: torch.Tensor, level: str | None, tokens: Sequence[int]
    ) -> tuple[bool, torch.Tensor]:
        """Whether the values of a level (None: rows) are spread per token, and the values per token or per row.

        ``tokens``: the shape of values per token. ``name``: the name of the values in errors, which call their level
        ``advantage_level``.
        """
        return at_level(self, name, values, level, tokens)

    def row_of_step(self) -> torch.Tensor:
        """Row of every step ``[N]`` int64, -1 for those empty or in no row. Needs ``cu_steps`` or ``steps``."""
        begin, end = self.step_ranges()
        row = row_at(self, begin)
        return torch.where((end > begin) & (row < self.rows), row, -1)

    def ids_of_steps(self) -> dict[str, torch.Tensor]:
        """``group_ids`` and ``trajectory_ids`` of every step ``[N]``, as estimators of steps take them. Without group
        ids the batch is one group, without trajectory ids each row is a trajectory. A range without tokens has -1, as
        have all ranges of a step (equal ``step_ids``) but its first, which stands for the step: it has its reward.

        A negative trajectory id is a name in a batch but means none in an estimator, so ids lose their sign bit: two
        that differ by 2^63 become one.
        """
        row = self.row_of_step()
        if self.step_ids is not None:
            first = self.once(first_ranges)
            row = torch.where(first == torch.arange(first.numel(), device=first.device), row, -1)
        rows = torch.arange(self.rows, device=row.device)
        groups = torch.zeros_like(rows) if self.group_ids is None else self.group_ids
        trajectories = rows if self.trajectory_ids is None else self.trajectory_ids & (2**63 - 1)
        return {"group_ids": of_row(groups, row, -1), "trajectory_ids": of_row(trajectories, row, -1)}

    def step_ranges(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The first token of every step, and the token after its last, each ``[N]``."""
        check(self.num_steps is not None, "steps: this batch has none; pass cu_steps or steps to PackedBatch")
        if self.steps is not None:
            return self.steps[:, 0].contiguous(), self.steps[:, 1].contiguous()
        assert self.cu_steps is not None
        return self.cu_steps[:-1].contiguous(), self.cu_steps[1:].contiguous()

    # --------------------------------------------------------------------------------------------------- operations

    @examines
    def select(self, rows: torch.Tensor | Sequence[int]) -> tuple[PackedBatch, torch.Tensor]:
        """The batch of these rows (indices ``[R]`` or a bool mask ``[S]``), and the indices ``[T']`` of their tokens.

        Steps, ids and offsets are selected, too; index every ``[T]`` tensor with the second result, and ``[B, L]``
        tensors with ``rows``. The call synchronises, because it reads lengths.

        >>> import torch
        >>> part, tokens = PackedBatch.from_lengths([2, 3, 1]).select([2, 0])
        >>> part, tokens
        (PackedBatch(rows=2, tokens=3), tensor([5, 0, 1]))
        """
        part = part_of(self, indices_of(self, rows), self.is_part, self.torn)
        return part.batch, part.tokens

    @examines
    def micro_batches(self, max_tokens: int, whole: str | None = None) -> Iterator[MicroBatch]:
        """Consecutive rows in parts of at most ``max_tokens`` tokens.

        The loss of a part takes a slice of the weights of the whole batch: counts of a part are not counts of the step,
        and default weights refuse a part.

        Args:
            max_tokens: the size of a part; a larger trajectory, group or domain is a part of its own.
            whole: the unit that no part splits: ``"trajectory"``, ``"group"`` (and its trajectories) or ``"domain"``
                (and its groups). Its rows must be consecutive. Default: the coarsest unit with ids in the batch. A row
                without ids, or with a negative group or domain id, belongs together with no other row. Functions that
                look at groups or domains refuse a part with a piece of one.

        >>> batch = PackedBatch.from_lengths([2, 1, 3], group_ids=torch.tensor([5, 5, 8]))
        >>> [part.rows.tolist() for part in batch.micro_batches(4)]
        [[0, 1], [2]]
        """
        check(max_tokens > 0, "max_tokens: expected a count > 0, got {}", max_tokens)
        parts = list(parts_of(self, max_tokens, whole))
        for rows, torn in zip(parts, torn_by(parts, self), strict=True):
            yield part_of(self, torch.tensor(rows, device=self.device), True, torn)

    def replace(self, *, validate: bool = True, **changed: torch.Tensor | None) -> PackedBatch:
        """The batch with some of the constructor's tensors replaced; a padded batch also takes a mask ``[B, L]``.

        >>> PackedBatch.from_lengths([2, 1]).replace(mask=torch.tensor([1, 0, 1])).row_counts
        tensor([1, 1])
        """
        names = ("mask", *STRUCTURE)
        unknown = sorted(changed.keys() - set(names))
        check(not unknown, "replace: expected some of {}, got {}", ", ".join(names), ", ".join(unknown))
        padded = None if "cu_seqlens" in changed else self.padded_shape
        mask = changed.get("mask")
        if padded is not None and isinstance(mask, torch.Tensor) and mask.shape == padded:
            changed["mask"] = mask.reshape(-1)
        tensors: dict[str, Any] = {name: getattr(self, name) for name in names} | changed
        result = PackedBatch(**tensors, total_tokens=self.total_tokens, validate=validate)
        object.__setattr__(result, "padded_shape", padded)
        object.__setattr__(result, "is_part", self.is_part)
        named = {"ranks": "group_ids", "group": "group_ids", "domain": "domain_ids"}
        kept = tuple(level for level in self.torn if named[level] not in changed)
        object.__setattr__(result, "torn", kept)
        return result

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> PackedBatch:
        """The same batch on another device."""
        # A dtype, which Tensor.to takes as well, would turn offsets into numbers that kernels do not read as offsets.
        require_type(
            isinstance(device, torch.device | str | int),
            "device: expected a device such as 'cuda:0', got {!r}; offsets and ids stay integers and the mask "
            "bool, and of a tensor pass its .device",
            device,
        )
        moved = object.__new__(PackedBatch)
        moved.__setstate__(
            {
                name: value.to(device, non_blocking=non_blocking) if isinstance(value, torch.Tensor) else value
                for name, value in self.__getstate__().items()
            }
        )
        return moved

    def __repr__(self) -> str:
        parts = [f"rows={self.rows}", f"tokens={self.total_tokens}"]
        if self.num_steps is not None:
            parts.append(f"steps={self.num_steps}")
        if self.padded_shape is not None:
            parts.append(f"padded={self.padded_shape}")
        known = ("mask", "step_ids", "trajectory_ids", "group_ids", "domain_ids")
        parts += [name for name in known if getattr(self, name) is not None]
        if self.device.type != "cpu":
            parts.append(f"device={self.device}")
        return f"PackedBatch({', '.join(parts)})"


def as_batch(batch: PackedBatch | torch.Tensor) -> PackedBatch:
    """The argument ``batch``, which may be a padded mask."""
    if isinstance(batch, PackedBatch):
        return batch
    expected = "batch: expected a PackedBatch or a mask [B, L], got "
    of_rows = "; PackedBatch.from_lengths(lengths) is one of packed rows"
    fix = "; pass its .batch" if isinstance(batch, MicroBatch) else of_rows
    fix = "; use torch.as_tensor(mask)" if hasattr(batch, "__array__") else fix
    require_type(isinstance(batch, torch.Tensor), expected + "{}" + fix, type(batch))
    batch = examined("batch", batch)
    check(batch.dim() == 2, expected + "a tensor {}" + of_rows, list(batch.shape))
    return PackedBatch.from_padded(batch)
