"""PackedBatch: the one description of how tokens form rows, and rows form the hierarchy above them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from . import ops
from .checks import check, check_device, check_dtype, check_real, check_shape, examined, examines, require_type
from .specs import Unit

__all__ = ["MicroBatch", "PackedBatch"]

_INTEGERS = (torch.int32, torch.int64)
_LEVELS = ("token", "step", "row", "trajectory", "group", "domain")
_STRUCTURE = ("cu_seqlens", "cu_steps", "steps", "step_ids", "trajectory_ids", "group_ids", "domain_ids")


class PackedBatch:
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
            another row or on another rank. A range with a negative id is a step of its own. Default: each range is a
            step.
        trajectory_ids: ``[S]`` any integers: rows with equal ids form one trajectory. Default: each row is a
            trajectory.
        group_ids: ``[S]`` any integers: the prompt group of each row (advantages). A negative id means no group.
        domain_ids: ``[S]`` any integers: the domain of each row. A negative id means no domain.
        validate: check the *values* of offsets, steps, ids and integer masks, and that trajectories, groups and domains
            nest. This check is the only place in the library that synchronises with the device. With ``False`` wrong
            values never cause a bad memory access: they are clamped and flagged in the metrics.

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
        "_cache",
        "_is_plain",
        "_structure",
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
    _is_plain: bool  # every tensor has memory of its own; fake tensors and other subclasses may have none
    _structure: tuple[torch.Tensor, ...]  # every tensor but the mask
    _cache: dict[Any, tuple[list[int], Any]]  # by key of once: the state of the tensors, and the result

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
        ids = {"trajectory_ids": trajectory_ids, "group_ids": group_ids, "domain_ids": domain_ids}
        steps_or_ids = {"cu_steps": cu_steps, "steps": steps, "step_ids": step_ids, **ids}
        for name, tensor in {"cu_seqlens": cu_seqlens, "mask": mask, **steps_or_ids}.items():
            if tensor is None and name != "cu_seqlens":
                continue
            require_type(isinstance(tensor, torch.Tensor), "{}: expected a tensor, got {}", name, type(tensor))
            assert tensor is not None
            if name != "mask" and tensor.numel() > 0:  # torch.tensor([]), on a rank without rows, holds floats
                check_dtype(name, tensor, _INTEGERS, "offsets and ids are integers: use .to(torch.int64)")
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
        require_type(
            isinstance(total_tokens, (int, torch.SymInt)), "total_tokens: expected an int, got {!r}", total_tokens
        )
        check(total_tokens >= 0, "total_tokens: expected a count >= 0, got {}", total_tokens)
        if mask is not None:
            check_shape(
                "mask", mask, (total_tokens,), "[T]", "for a padded [B, L] mask use PackedBatch.from_padded(mask)"
            )
            given, mask = mask, _as_bool(mask)
            if validate and given is not mask:
                token = _first((given != 0) & (given != 1))
                got = None if token is None else given[token].item()
                check(token is None, "mask: expected 0 and 1, got {} at token {}; compare first, mask != 0", got, token)
        check(cu_steps is None or steps is None, "steps: give cu_steps or steps, not both")
        check(
            cu_steps is None or (cu_steps.dim() == 1 and cu_steps.numel() >= 1),
            "cu_steps: expected shape [N + 1], got {}",
            None if cu_steps is None else list(cu_steps.shape),
        )
        if steps is not None and steps.shape == (0,):
            steps = steps_or_ids["steps"] = steps.reshape(0, 2)
        check(
            steps is None or (steps.dim() == 2 and steps.shape[1] == 2),
            "steps: expected shape [N, 2] of half-open token ranges, got {}",
            None if steps is None else list(steps.shape),
        )
        for name, tensor in ids.items():
            if tensor is not None:
                check_shape(name, tensor, (cu_seqlens.numel() - 1,), "[S] (one per row)")
        # Kernels index in int64 and assume contiguous memory; the copies are made once, here.
        integers = {"cu_seqlens": cu_seqlens, **steps_or_ids}
        self.__setstate__(
            {name: None if tensor is None else _as_int64(tensor) for name, tensor in integers.items()}
            | {"rows": cu_seqlens.numel() - 1, "mask": mask, "total_tokens": total_tokens}
            | {"padded_shape": None, "is_part": False}
        )
        if self.step_ids is not None:
            check(self.num_steps is not None, "step_ids: there are no steps to name; pass cu_steps or steps, too")
            check_shape("step_ids", self.step_ids, (self.num_steps or 0,), "[N] (one per range)")
        if validate:
            self._validate()

    # ------------------------------------------------------------------------------------------------ constructors

    @classmethod
    @examines
    def from_padded(cls, mask: torch.Tensor, **ids: torch.Tensor | None) -> PackedBatch:
        """The batch of a padded ``[B, L]`` mask: B rows of L tokens, without a copy or a synchronisation.

        Calls with this batch take ``[B, L]`` tensors, and their results have that shape. ``ids`` are the keyword ids of
        the constructor.

        >>> import torch
        >>> PackedBatch.from_padded(torch.tensor([[1, 1, 0], [1, 0, 0]]))
        PackedBatch(rows=2, tokens=6, padded=(2, 3), mask)
        """
        require_type(isinstance(mask, torch.Tensor), "mask: expected a tensor [B, L], got {}", type(mask))
        check(mask.dim() == 2, "mask: expected a padded mask [B, L], got shape {}", list(mask.shape))
        batch, length = mask.shape
        offsets = torch.arange(batch + 1, dtype=torch.int64, device=mask.device) * length
        result = cls(offsets, _as_bool(mask).reshape(-1), total_tokens=batch * length, validate=False, **ids)
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
        counts = _as_indices("lengths", lengths)
        check(counts.dim() == 1, "lengths: expected shape [S], got {}", list(counts.shape))
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
        counts: torch.Tensor = self.once(row_counts)
        return counts.clone()

    def once(self, make: Callable[..., Any], *arguments: Any, static: bool = False) -> Any:
        """``make(self, *arguments)``, computed once, because every loss call needs counts and default weights.

        The result is kept until a tensor of the batch changes in place, for the stream that computed it. Inside a CUDA
        graph, a trace or a transform no kept result is read and none is kept: a replay has to count the mask anew, and
        tensors of a trace or of a graph's pool do not outlive it.

        ``static``: ``make`` reads sizes on the host, which is impossible during a capture, and does not depend on the
        mask; a capture takes the result of an earlier call.
        """
        if not self._is_plain or ops.is_traced(self.cu_seqlens):
            return make(self, *arguments)
        capturing = _is_capturing(self.cu_seqlens)
        if capturing and not static:
            return make(self, *arguments)
        state = self._state(static)
        key = (make, *arguments)
        kept = self._cache.get(key)
        if kept is not None and kept[0] == state:
            return kept[1]
        check(
            not capturing,
            "batch: expected a batch that an earlier call has seen, got a new or changed one inside a CUDA graph; "
            "levels over a process group read sizes on the host: call the loss once before the capture",
        )
        made = make(self, *arguments)
        if state is not None and not torch.is_inference_mode_enabled():  # autograd cannot save inference tensors
            self._cache[key] = (state, made)
        return made

    def _state(self, static: bool) -> list[int] | None:
        """Versions and addresses of the tensors, which differ after any change; None for tensors without versions."""
        tensors = self._structure if static or self.mask is None else (self.mask, *self._structure)
        try:
            state = [tensor._version for tensor in tensors] + [tensor.data_ptr() for tensor in tensors]
        except RuntimeError:  # tensors made in inference mode count no versions
            return None
        if self.cu_seqlens.is_cuda and not static:
            state.append(torch._C._cuda_getCurrentRawStream(self.cu_seqlens.device.index))
        return state

    @property
    def trajectories(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """``(row_trajectory [S], start [S + 1], rows [S])``: the rows of each trajectory, in pack order; None if each
        row is a trajectory.

        Trajectories are renumbered 0, 1, ... in the order of their ids. Their number stays on the device: no
        synchronisation.
        """
        if self.trajectory_ids is None:
            return None
        result: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = self.once(_trajectories)
        return result

    def hierarchy(self, units: tuple[Unit, ...]) -> Hierarchy:
        """The token ranges that tile the finest of ``units``, and the segment of each range at every unit; made once.

        Raises:
            ValueError: the batch does not describe a unit.
        """
        result: Hierarchy = self.once(_hierarchy, units)
        return result

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
        token = torch.arange(self.total_tokens, device=self.device)
        row = torch.searchsorted(self.cu_seqlens[1:].contiguous(), token, right=True)  # empty rows hold no token
        return torch.where(row < self.rows, row, -1)

    def is_first_token(self) -> torch.Tensor:
        """Whether each token is the first of its row, ``[T]`` bool."""
        row = self.row_of_token()
        return (row >= 0) & (row.diff(prepend=row.new_full((1,), -1)) != 0)

    def without_first_tokens(self) -> PackedBatch:
        """The batch with the first token of each row masked, because no logits of the row predict it.

        >>> PackedBatch.from_lengths([2, 0, 3]).without_first_tokens().mask
        tensor([False,  True, False,  True,  True])
        """
        mask = ~self.is_first_token()
        return self.replace(mask=mask if self.mask is None else mask & self.mask, validate=False)

    def step_of_token(self) -> torch.Tensor:
        """Step of every token ``[T]`` int64, -1 outside all steps. Needs ``cu_steps`` or ``steps``."""
        begin, end = self._step_ranges()
        token = torch.arange(self.total_tokens, device=self.device)
        if self.num_steps == 0:
            return torch.full_like(token, -1)
        step = torch.searchsorted(begin, token, right=True) - 1  # the last step that begins at or before the token
        inside = (step >= 0) & (token < end[step.clamp(min=0)])
        return torch.where(inside, step, -1)

    @examines
    def spread_steps(self, values: torch.Tensor) -> torch.Tensor:
        """Values of steps ``[N]`` at their tokens ``[T]``; 0 outside all steps."""
        check_shape("values", values, (self.num_steps or 0,), "[N] (one per step)")
        check_device("values", values, self.device, "the batch")
        check_real("values", values)
        return torch.cat((values, values.new_zeros(1)))[self.once(PackedBatch.step_of_token)]  # -1: the zero at the end

    def of_level(
        self, name: str, values: torch.Tensor, level: str | None, tokens: Sequence[int]
    ) -> tuple[bool, torch.Tensor]:
        """Whether the values of a level (None: rows) are spread per token, and the values per token or per row.

        ``tokens``: the shape of values per token. ``name``: the name of the values in errors, which call their level
        ``advantage_level``.
        """
        values = examined(name, values, "[S]")
        check_device(name, values, self.device, "the batch")
        check_real(name, values)
        if level is None or level == "row":
            if values.shape != (self.rows,):
                among = "" if self.num_steps is None else f" 'step' ([{self.num_steps}]),"
                fix = f"or say advantage_level='token' ({list(tokens)}),{among} 'trajectory', 'group' or 'domain'"
                check_shape(name, values, (self.rows,), "[S] (one per row)", fix if level is None else "")
            return False, values
        check(level in _LEVELS, "advantage_level: expected one of {}, got {!r}", _LEVELS, level)
        if level == "token":
            check_shape(name, values, tokens, "(one per token)")
            return True, values
        if level == "step":
            steps = self.num_steps
            check(steps is not None, "advantage_level: 'step' needs steps in the batch; pass cu_steps or steps to it")
            check_shape(name, values, (steps or 0,), "(one per step)")
            return True, self.spread_steps(values).reshape(*tokens)
        ids = {"trajectory": self.trajectory_ids, "group": self.group_ids, "domain": self.domain_ids}[level]
        check(ids is not None, "advantage_level: {!r} needs {}_ids in the batch", level, level)
        assert ids is not None
        check(values.dim() == 1, "{}: expected one per {}, got shape {}", name, level, list(values.shape))
        require_type(
            values.is_floating_point(), "{}: expected floating point, got {}; use .float()", name, values.dtype
        )
        # An id without a value gets NaN: the loss leaves its tokens out and counts them in metrics.bad_advantages.
        known = torch.nn.functional.pad(values, (0, 1), value=torch.nan)
        return False, known[ids.clamp(-1, values.numel())]

    def row_of_step(self) -> torch.Tensor:
        """Row of every step ``[N]`` int64, -1 for empty steps. Needs ``cu_steps`` or ``steps``."""
        begin, end = self._step_ranges()
        row = torch.searchsorted(self.cu_seqlens, begin, right=True) - 1
        return torch.where(end > begin, row, -1)

    def ids_of_steps(self) -> dict[str, torch.Tensor]:
        """``group_ids`` and ``trajectory_ids`` of every step ``[N]``, as estimators of steps take them. Without group
        ids the batch is one group, without trajectory ids each row is a trajectory.

        A negative trajectory id is a name in a batch but means none in an estimator, so ids lose their sign bit.
        """
        row = self.row_of_step()
        ids = {"group_ids": self.group_ids, "trajectory_ids": self.trajectory_ids}
        default = {"group_ids": torch.zeros_like(row), "trajectory_ids": row}
        found = {name: default[name] if of is None else of[row.clamp(min=0)] for name, of in ids.items()}
        found["trajectory_ids"] = found["trajectory_ids"] & (2**63 - 1)
        return {name: torch.where(row >= 0, of, -1) for name, of in found.items()}

    def _step_ranges(self) -> tuple[torch.Tensor, torch.Tensor]:
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

        Steps, ids and offsets are selected, too; index every ``[T]`` tensor with the second result. The call
        synchronises, because it reads lengths.

        >>> import torch
        >>> part, tokens = PackedBatch.from_lengths([2, 3, 1]).select([2, 0])
        >>> part, tokens
        (PackedBatch(rows=2, tokens=3), tensor([5, 0, 1]))
        """
        index = (rows if isinstance(rows, torch.Tensor) else torch.tensor(rows, device="cpu")).to(self.device)
        if index.dtype == torch.bool:
            check_shape("rows", index, (self.rows,), "[S] for a bool mask")
            index = index.nonzero().flatten()
        index = _as_indices("rows", index)
        check(index.dim() == 1, "rows: expected indices [R] or a bool mask [S], got shape {}", list(index.shape))
        inside = (index >= 0) & (index < self.rows)
        check(bool(inside.all()), "rows: expected indices in [0, {}), got {}", self.rows, index)
        part = self._part(index)
        object.__setattr__(part.batch, "is_part", self.is_part)
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
                without ids, or with a negative group or domain id, belongs together with no other row.

        >>> batch = PackedBatch.from_lengths([2, 1, 3], group_ids=torch.tensor([5, 5, 8]))
        >>> [part.rows.tolist() for part in batch.micro_batches(4)]
        [[0, 1], [2]]
        """
        check(max_tokens > 0, "max_tokens: expected a count > 0, got {}", max_tokens)
        lengths = (self.cu_seqlens[1:] - self.cu_seqlens[:-1]).tolist()
        rows: list[int] = []
        used = 0
        for block in self._blocks(whole):
            size = sum(lengths[row] for row in block)
            if rows and used + size > max_tokens:
                yield self._micro_batch(rows)
                rows, used = [], 0
            rows, used = rows + block, used + size
        if rows:
            yield self._micro_batch(rows)

    def replace(self, *, validate: bool = True, **changed: torch.Tensor | None) -> PackedBatch:
        """The batch with some of the constructor's tensors replaced; a padded batch also takes a mask ``[B, L]``.

        >>> PackedBatch.from_lengths([2, 1]).replace(mask=torch.tensor([1, 0, 1])).row_counts
        tensor([1, 1])
        """
        names = ("mask", *_STRUCTURE)
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
        return result

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedBatch:
        """The same batch on another device."""
        moved = object.__new__(PackedBatch)
        moved.__setstate__(
            {
                name: value.to(device, non_blocking=non_blocking) if isinstance(value, torch.Tensor) else value
                for name, value in self.__getstate__().items()
            }
        )
        return moved

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__ if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, value)
        structure = [tensor for name in _STRUCTURE if (tensor := getattr(self, name)) is not None]
        object.__setattr__(self, "_structure", tuple(structure))
        plain = all(type(tensor) is torch.Tensor for tensor in (*structure, self.mask) if tensor is not None)
        object.__setattr__(self, "_is_plain", plain)
        object.__setattr__(self, "_cache", {})

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(
            f"{name}: a PackedBatch is immutable; make a new one with batch.replace({name}=...), or refill the tensor "
            f"in place"
        )

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{name}: a PackedBatch is immutable; make a new one without it")

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

    # ----------------------------------------------------------------------------------------------------- internals

    def _blocks(self, whole: str | None) -> Iterator[list[int]]:
        """Blocks of consecutive rows that stay in one part, in order."""
        ids = {"trajectory": self.trajectory_ids, "group": self.group_ids, "domain": self.domain_ids}
        named = [name for name, of in ids.items() if of is not None]
        if whole is None:
            whole = named[-1] if named else "trajectory"
        check(whole in ids, "whole: expected one of {}, got {!r}", tuple(ids), whole)
        check(whole == "trajectory" or whole in named, "{}_ids: whole={!r} needs them in the batch", whole, whole)
        levels = list(ids)[: list(ids).index(whole) + 1]
        # names[row]: the ids, by level, that the row may share with other rows.
        columns = {name: of.tolist() for name in levels if (of := ids[name]) is not None}
        names = [
            {level: of[row] for level, of in columns.items() if level == "trajectory" or of[row] >= 0}
            for row in range(self.rows)
        ]
        block: list[int] = []
        seen: set[tuple[str, int]] = set()
        for row in range(self.rows):
            if block and not names[row].items() & names[row - 1].items():
                seen |= {name for earlier in block for name in names[earlier].items()}
                yield block
                block = []
            torn = next((name for name in names[row].items() if name in seen), None)
            check(
                torn is None,
                "{0}_ids: the rows of {0} {1} are not consecutive, so micro-batches would tear it; sort them first, "
                "batch.select(batch.{0}_ids.argsort(stable=True))",
                *(torn or ("", "")),
            )
            block.append(row)
        if block:
            yield block

    def _micro_batch(self, rows: list[int]) -> MicroBatch:
        part = self._part(torch.tensor(rows, device=self.device))
        object.__setattr__(part.batch, "is_part", True)
        return part

    def _part(self, index: torch.Tensor) -> MicroBatch:
        """The batch of these rows, with its indices into this batch."""
        begin = self.cu_seqlens[index]
        lengths = self.cu_seqlens[index + 1] - begin
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        tokens, _ = _concatenated_ranges(begin, lengths)
        ids = (("trajectory_ids", self.trajectory_ids), ("group_ids", self.group_ids), ("domain_ids", self.domain_ids))
        steps, given = self._select_steps(index, begin - offsets[:-1])
        part = PackedBatch(
            offsets,
            None if self.mask is None else self.mask[tokens],
            total_tokens=tokens.numel(),
            validate=False,
            **given,
            **{name: None if tensor is None else tensor[index] for name, tensor in ids},
        )
        return MicroBatch(part, index, steps, tokens)

    def _select_steps(
        self, index: torch.Tensor, shift: torch.Tensor
    ) -> tuple[torch.Tensor | None, dict[str, torch.Tensor | None]]:
        """The steps of these rows, their ranges and ids; ``shift`` of a row is its old position minus its new one."""
        if self.num_steps is None:
            return None, {}
        begin, end = self._step_ranges()
        filled = (end > begin).nonzero().flatten()  # an empty step belongs to no row
        begin, end = begin[filled], end[filled]
        row = torch.searchsorted(self.cu_seqlens, begin, right=True) - 1  # [N], ascending as the steps are
        first, last = torch.searchsorted(row, index), torch.searchsorted(row, index, right=True)
        chosen, owner = _concatenated_ranges(first, last - first)
        ranges = torch.stack((begin[chosen], end[chosen]), 1) - shift[owner, None]
        steps = filled[chosen]
        return steps, {"steps": ranges, "step_ids": None if self.step_ids is None else self.step_ids[steps]}

    def _validate(self) -> None:
        offsets = self.cu_seqlens.cpu()
        check(int(offsets[0]) == 0, "cu_seqlens: expected a first offset of 0, got {}", int(offsets[0]))
        row = _first(offsets[1:] < offsets[:-1])
        check(
            row is None,
            "cu_seqlens: expected offsets that never decrease, got {} at row {}",
            None if row is None else offsets[row : row + 2].tolist(),
            row,
        )
        check(
            int(offsets[-1]) <= self.total_tokens,
            "cu_seqlens: expected a last offset <= {} tokens, got {}; pass total_tokens if the buffer is longer",
            self.total_tokens,
            int(offsets[-1]),
        )
        if self.cu_steps is not None:
            tiles = self.cu_steps.cpu()
            check(
                int(tiles[0]) == 0 and int(tiles[-1]) == int(offsets[-1]),
                "cu_steps: expected offsets from 0 to {}, where the last row ends, got {} to {}; "
                "use steps=[N, 2] for ranges with gaps",
                int(offsets[-1]),
                int(tiles[0]),
                int(tiles[-1]),
            )
            gap = _first(~torch.isin(offsets, tiles))
            check(
                gap is None,
                "cu_steps: expected steps that tile every row (each row offset starts a step), not so from row {} on; "
                "use steps=[N, 2] for ranges with gaps",
                gap,
            )
            _check_steps("cu_steps", tiles[:-1], tiles[1:], offsets)
        if self.steps is not None:
            ranges = self.steps.cpu()
            _check_steps("steps", ranges[:, 0], ranges[:, 1], offsets)
        if self.step_ids is not None:
            begin, end = (offsets.cpu() for offsets in self._step_ranges())
            filled = end > begin
            holder = torch.searchsorted(offsets, begin[filled], right=True) - 1
            of_row = torch.arange(self.rows, device="cpu") if self.trajectory_ids is None else self.trajectory_ids.cpu()
            _check_nested("step", self.step_ids.cpu()[filled], "trajectory", of_row[holder])
        _check_nested("trajectory", self.trajectory_ids, "group", self.group_ids)
        _check_nested("trajectory", self.trajectory_ids, "domain", self.domain_ids)
        _check_nested("group", self.group_ids, "domain", self.domain_ids)


class MicroBatch(NamedTuple):
    """Some rows as a batch, with indices into the whole batch: ``advantages[part.rows]``, ``logp[part.tokens]``."""

    batch: PackedBatch
    rows: torch.Tensor  # [S'] int64: indices into [S] tensors of the whole batch
    steps: torch.Tensor | None  # [N'] int64: indices into [N] tensors; empty steps belong to no row and are left out
    tokens: torch.Tensor  # [T'] int64: indices into [T] tensors


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
    place = _first(torn)
    if place is not None:
        raise ValueError(
            f"{coarser}_ids: expected one {coarser} for all of {finer} {int(ids[place])}, got "
            f"{int(parents[place])} and {int(parents[place + 1])}; levels nest: mend the ids, or pass validate=False "
            f"where no gate has both levels"
        )


def _check_steps(name: str, begin: torch.Tensor, end: torch.Tensor, offsets: torch.Tensor) -> None:
    filled = begin < end
    step = _first(end < begin)
    check(step is None, "{}: expected begin <= end at every step, not so at step {}", name, step)
    step = _first(begin[1:] < end[:-1])
    check(step is None, "{}: expected steps in order without overlap, not so after step {}", name, step)
    row = torch.searchsorted(offsets, begin.contiguous(), right=True) - 1  # [N], the row that holds the first token
    outside = (row < 0) | (row >= offsets.numel() - 1) | (end > offsets[(row + 1).clamp(0, offsets.numel() - 1)])
    step = _first(filled & outside)
    check(step is None, "{}: expected each step inside one row, not so at step {}", name, step)


def _is_capturing(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def row_counts(batch: PackedBatch) -> torch.Tensor:
    return ops.row_counts(batch.mask, batch.cu_seqlens, batch.total_tokens, None)


class Hierarchy(NamedTuple):
    """P leaves: the steps if a level is finer than rows, else the rows."""

    begin: torch.Tensor  # [P] int64
    end: torch.Tensor  # [P] int64
    row: torch.Tensor  # [P] int64, the row of each leaf
    ancestors: torch.Tensor  # [levels, P] int64 in [0, P): the first leaf of the segment of each leaf at every level


def _hierarchy(batch: PackedBatch, units: tuple[Unit, ...]) -> Hierarchy:
    # Kernels check leaves and read them again later; copies cannot be refilled in between.
    if Unit.STEP in units and batch.rows > 0:  # without rows every step is empty
        begin, end = (offsets.clone() for offsets in batch._step_ranges())
        row = torch.searchsorted(batch.cu_seqlens[1:].contiguous(), begin, right=True).clamp(max=max(batch.rows - 1, 0))
    else:
        begin, end = batch.cu_seqlens[:-1].clone(), batch.cu_seqlens[1:].clone()
        row = torch.arange(batch.rows, device=batch.device)
    trajectory = torch.arange(batch.rows, device=batch.device) if batch.trajectories is None else batch.trajectories[0]
    segments = {Unit.TRAJECTORY: trajectory}
    for unit, ids in ((Unit.GROUP, batch.group_ids), (Unit.DOMAIN, batch.domain_ids)):
        if unit in units:
            name = unit.name.lower()
            check(ids is not None, "batch: the gate has a level of {}s; pass {}_ids to PackedBatch", name, name)
            assert ids is not None
            # A negative id means none: the trajectory is then a segment of its own.
            segments[unit] = torch.where(ids < 0, -1 - trajectory, ids)
    leaf = torch.arange(begin.numel(), device=batch.device)
    step = leaf
    if batch.step_ids is not None and Unit.STEP in units and batch.rows > 0:
        step = _first_of_each(torch.where(batch.step_ids < 0, -1 - leaf, batch.step_ids))
    ancestors = [step if unit is Unit.STEP else _first_of_each(segments[unit][row]) for unit in units]
    return Hierarchy(begin, end, row, torch.stack(ancestors) if units else leaf.new_empty((0, leaf.numel())))


def _first_of_each(ids: torch.Tensor) -> torch.Tensor:
    """For every id the index of its first occurrence."""
    numbers, ranks, order = renumber(ids)
    return order[torch.searchsorted(ranks, numbers)]


def _trajectories(batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    assert batch.trajectory_ids is not None
    row_trajectory, ranks, order = renumber(batch.trajectory_ids)
    start = torch.searchsorted(ranks, torch.arange(batch.rows + 1, device=batch.device))
    return row_trajectory, start, order


def renumber(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids as 0, 1, ... in the order of their values. Their number stays on the device: no synchronisation.

    Returns the new ids, the new ids in ascending order, and the stable order that sorts them, each ``[S]``.
    """
    ordered, order = torch.sort(ids, stable=True)
    ranks = (ordered.diff(prepend=ordered[:1]) != 0).cumsum(0)
    return torch.empty_like(ranks).scatter_(0, order, ranks), ranks, order


def _first(wrong: torch.Tensor) -> int | None:
    """Index of the first True, or None."""
    return int(wrong.int().argmax()) if bool(wrong.any()) else None


def _concatenated_ranges(begin: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The positions in the ranges ``begin .. begin + length - 1``, one range after the other, and the range of each."""
    owner = torch.repeat_interleave(torch.arange(begin.numel(), device=begin.device), lengths)
    shift = begin - (lengths.cumsum(0) - lengths)
    return torch.arange(owner.numel(), device=begin.device) + shift[owner], owner


def _as_indices(name: str, values: torch.Tensor | Sequence[int]) -> torch.Tensor:
    tensor = values if isinstance(values, torch.Tensor) else torch.tensor(values, device="cpu")
    if tensor.numel() > 0:  # an empty list is a float tensor
        check_dtype(name, tensor, _INTEGERS, "use integers")
    return tensor.to(torch.int64)


def _as_bool(mask: torch.Tensor) -> torch.Tensor:
    if mask.dtype != torch.bool:
        require_type(
            mask.numel() == 0 or not (mask.is_floating_point() or mask.is_complex()),
            "mask: expected bool or integers 0 and 1, got {}; use mask.bool() if 1.0 marks tokens that count, "
            "mask == 0 if it is additive (0 and -inf)",
            str(mask.dtype).removeprefix("torch."),
        )
        mask = mask != 0
    return mask.contiguous()


def _as_int64(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.int64).contiguous()
