"""Units and groups over several ranks: gathered whole, or as tables of their groups.

Inside :func:`spanning` the primitives of estimators (group statistics, common ids, totals) speak of the units of all
ranks. A rank sends one row per group, not its units; every rank merges the same rows in the order of ranks, and so
finds the same bits.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
import torch.distributed
from torch.distributed import ProcessGroup

from . import ops
from .backends import untraced
from .batch import PackedBatch, check_whole
from .checks import check, require_type

T = TypeVar("T")

# All of them: a caller refuses a dtype in words of its own, on every rank alike.
_DTYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)
# Numbers that describe a rank's tensor: length, place of its dtype, dimensions, two more sizes, a checksum of `beside`.
_FORM = 6
_ALL_UNITS = -2  # the name of the only group of a rank without ids

_GROUP: ContextVar[ProcessGroup | None] = ContextVar("hpo_core_ranks", default=None)


def spanning(group: ProcessGroup | None, compute: Callable[..., T], *arguments: Any, **keywords: Any) -> T:
    """``compute`` of these arguments, whose groups span the ranks of the process group, if there is one.

    Dynamo skips such a call. After a graph break it would compile the functions inside, and compiled code knows no
    ranks: each would compute the statistics of its own units.
    """
    if group is None:
        return compute(*arguments, **keywords)
    return untraced(_spanning)(group, compute, arguments, keywords)


def _spanning(group: ProcessGroup, compute: Callable[..., T], arguments: Any, keywords: Any) -> T:
    check(not torch.compiler.is_compiling(), "tables: only eager calls gather; call it outside torch.compile")
    token = _GROUP.set(group)
    try:
        return compute(*arguments, **keywords)
    finally:
        _GROUP.reset(token)


def ranks() -> ProcessGroup | None:
    """The process group whose ranks groups span at the moment, see :func:`spanning`; None in compiled code."""
    return None if torch.compiler.is_compiling() else _GROUP.get()


def is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def world_size(group: ProcessGroup | None) -> int:
    return torch.distributed.get_world_size(group) if is_distributed() else 1


def whole_groups(
    batch: PackedBatch, process_group: ProcessGroup | None = None, spans: bool = True
) -> torch.Tensor | None:
    """The ids of prompt groups, which the caller compares over the ranks of ``process_group``, or where it ``spans``
    over those of :func:`spanning`; None: the batch is one group, of which a part would be a piece."""
    otherwise = "call it on the whole batch and take the part's entries of the result"
    check_whole(batch, "group", "this function", otherwise + "; under TRL set steps_per_generation=1")
    check(
        "ranks" not in batch.torn or process_group is not None or (spans and ranks() is not None),
        "batch: this function looks at whole groups, and rows of a group lie on several ranks; {}",
        "wrap this function, not one that calls it: advantages.over_ranks(..., process_group, tables=True)"
        if spans
        else "pass process_group= if it takes one, or keep each group on one rank",
    )
    check(
        batch.group_ids is not None or not batch.is_part,
        "batch: without group_ids the whole batch is one group, and this is a part of it; pass group_ids to "
        "PackedBatch, or {}",
        otherwise,
    )
    return batch.group_ids


def check_is_step(
    name: str, verb: str, batch: PackedBatch, whole: str, ranks: str, group: ProcessGroup | None = None
) -> None:
    """Check that a default made of this batch's tokens, and those of the ``group``, is not known to miss some of the
    optimiser step. ``whole``, ``ranks``: the arguments to pass instead."""
    check(
        not batch.is_part,
        "{}: this batch is a part of a larger one, and by default would {} its own tokens alone; pass {} of the whole",
        name,
        verb,
        whole,
    )
    world = world_size(None)
    check(
        world == 1 or group is not None,
        "{}: {} ranks are initialised, and by default each would {} its own tokens alone; pass {}",
        name,
        world,
        verb,
        ranks,
    )


def gather(
    own: torch.Tensor, group: ProcessGroup, name: str = "process_group", beside: Sequence[str] = ()
) -> list[torch.Tensor]:
    """``own`` ``[n, ...]`` of every rank, in their order; n may differ. Synchronises: sizes are read.

    ``beside``: the names of the tensors that the caller gathers next.

    A rank that has nothing takes dtype and shape from the others: an empty list is a tensor of floats.

    Raises:
        ValueError, TypeError: no units or too many dimensions on a rank, dtypes, shapes or names of the tensors
            beside it that differ; on every rank alike: none is left waiting. They begin with ``name``.
    """
    return untraced(_gather)(own, group, name, beside)  # Dynamo would compile a dozen pieces between the collectives


def _gather(own: torch.Tensor, group: ProcessGroup, name: str, beside: Sequence[str]) -> list[torch.Tensor]:
    length, *others = own.shape or (1,)
    sizes_of_own = (length, _DTYPES.index(own.dtype), own.dim(), *others, 0, 0)[: _FORM - 1]
    form = torch.tensor((*sizes_of_own, zlib.crc32(" ".join(beside).encode())), device=own.device)
    forms = torch.empty(torch.distributed.get_world_size(group), _FORM, dtype=torch.int64, device=own.device)
    torch.distributed.all_gather(list(forms), form, group=group)
    sizes = forms[:, 0].tolist()
    check(
        len({checksum for *_, checksum in forms.tolist()}) == 1,
        "{}: expected every rank to give the same tensors beside it, got others on one rank than on another, on this "
        "one {}; give a rank that lacks one a tensor that changes nothing, such as a mask of ones",
        name,
        ", ".join(beside) or "none",
    )
    given = sorted({tuple(form) for size, *form, _ in forms.tolist() if size > 0})
    for _, dimensions, *_ in given:
        check(
            0 < dimensions <= _FORM - 3,
            "{}: expected shape [U] (one per unit), got a tensor of {} dimensions",
            name,
            dimensions,
        )
    require_type(
        len(given) <= 1,
        "{}: expected tensors of one dtype and one shape behind the first size on all ranks, got {}",
        name,
        " and ".join(f"{_DTYPES[kind]} {shape[: dimensions - 1]}" for kind, dimensions, *shape in given),
    )
    if not given:
        return [own] * len(sizes)
    kind, dimensions, *shape = given[0]
    padded = torch.zeros(max(sizes), *shape[: dimensions - 1], dtype=_DTYPES[kind], device=own.device)
    if len(own):
        padded[: len(own)] = own.detach()
    sent = padded.view(torch.uint8)  # collectives do not take every dtype
    gathered = [torch.empty_like(sent) for _ in sizes]
    torch.distributed.all_gather(gathered, sent, group=group)
    return [each.view(_DTYPES[kind])[:size] for each, size in zip(gathered, sizes, strict=True)]


def place_of_own(parts: list[torch.Tensor], group: ProcessGroup) -> slice:
    """Where among the units of all ranks, as :func:`gather` gives them, those of this rank are."""
    rank = torch.distributed.get_rank(group)
    before = sum(map(len, parts[:rank]))
    return slice(before, before + len(parts[rank]))


def merged(table: torch.Tensor, ids: torch.Tensor | None, group: ProcessGroup) -> torch.Tensor:
    """Statistics of groups ``[6, U]`` (:class:`~hpo_core.segments.GroupStatistics`) of the units of this rank, merged
    with those of all."""
    keys = torch.full_like(table[0], _ALL_UNITS, dtype=torch.int64) if ids is None else ids.clamp(min=-1)
    own, of_unit = torch.unique(keys, return_inverse=True)
    unit = torch.empty_like(own).scatter_(0, of_unit, torch.arange(len(keys), device=keys.device))  # any: all say it
    parts = gather(torch.cat((own.view(torch.float64)[:, None], table[:, unit].T), dim=1), group)  # [G of the rank, 7]
    name, place = torch.unique(torch.cat([_names(part) for part in parts]), return_inverse=True)
    places = place.split([len(part) for part in parts])
    check(
        not bool((name == _ALL_UNITS).any() & (name >= 0).any()),  # no wait: gather has read sizes
        "ids: expected them on all ranks or on none; the units of a rank without ids are one group by themselves",
    )

    number, weight, center, squares = table.new_zeros(4, len(name))
    least = table.new_full((len(name),), torch.inf)
    greatest = -least
    # One rank after the other, of which each names a group once: no two additions meet, and their order is fixed.
    for at, (_, n, w, _, _, low, high) in zip(places, (part.T for part in parts), strict=True):
        number[at] += n
        weight[at] += w
        least[at] = torch.minimum(least[at], torch.where(n > 0, low, torch.inf))
        greatest[at] = torch.maximum(greatest[at], torch.where(n > 0, high, -torch.inf))
    for at, (_, n, w, mean, _, _, _) in zip(places, (part.T for part in parts), strict=True):
        # Relative to a value of the group: where all are equal nothing is left to round.
        center[at] += torch.where(n > 0, w * (mean - least[at]), 0.0) / weight[at]
    for at, (_, n, w, mean, inside, _, _) in zip(places, (part.T for part in parts), strict=True):
        squares[at] += torch.where(n > 0, inside + w * ((mean - least[at]) - center[at]).square(), 0.0)

    whole = torch.where(number > 0, torch.stack((number, weight, least + center, squares, least, greatest)), 0.0)
    of_own = places[torch.distributed.get_rank(group)]
    return torch.where(keys != -1, whole[:, of_own[of_unit]], 0.0)


def _names(part: torch.Tensor) -> torch.Tensor:
    """Ids travel as the bits of doubles."""
    return part[:, 0].contiguous().view(torch.int64)


def common_ids(keys: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """One number ``[U]`` int64 per distinct combination of keys ``[U, K]``, the same on every rank."""
    own, of_unit = torch.unique(keys, dim=0, return_inverse=True)
    parts = gather(own, group)
    _, place = torch.unique(torch.cat(parts), dim=0, return_inverse=True)
    of_own: torch.Tensor = place.split([len(part) for part in parts])[torch.distributed.get_rank(group)]
    return of_own[of_unit]


def sum_in_order(values: torch.Tensor) -> torch.Tensor:
    """The sum over the last dimension, which may be empty. ``sum`` makes as many parts of a long one as threads run,
    but none of a short one: that of 2^35 elements is short after two steps."""
    for _ in range(2):
        blocks = (values.shape[-1] + 1023) // 1024
        padded = torch.nn.functional.pad(values, (0, blocks * 1024 - values.shape[-1]))
        values = padded.reshape(*values.shape[:-1], blocks, 1024).sum(-1)
    return values.sum(-1)


def running_sum(values: torch.Tensor) -> torch.Tensor:
    """The sums ``[n]`` up to each float64, which are those within its block and of the blocks before. ``cumsum`` of
    floats on a GPU differs from run to run, and some versions of PyTorch refuse it where they promise the same bits."""
    backwards, size = values.flip(0), 1024
    ends = torch.arange(0, len(values) + size, size, device=values.device).clamp(max=len(values))
    within = ops.recurrence(backwards, torch.ones_like(backwards), ends, None)
    blocks = within[ends[:-1]]
    whole = torch.arange(2, device=values.device) * len(blocks)
    before = torch.nn.functional.pad(ops.recurrence(blocks, torch.ones_like(blocks), whole, None)[1:], (0, 1))
    return (within + before.repeat_interleave(size)[: len(values)]).flip(0)


def sum_of_ranks(own: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """The sum of a 0-dim tensor over the ranks, added in their order."""
    return sum_in_order(torch.cat(gather(own[None], group)))
