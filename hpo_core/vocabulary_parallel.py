"""Vocabularies that ranks share: the columns of each rank, and how distributed tensors describe them."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed
from torch.distributed import ProcessGroup

from .arguments import check_group
from .checks import check
from .distributed import gather

Function = TypeVar("Function", bound=Callable[..., Any])
Sizes = Sequence[int] | None


class Shards(NamedTuple):
    """``sizes``: the columns of every rank, one rank after the other; ``first``: this rank's first."""

    sizes: tuple[int, ...]
    first: int
    vocabulary: int


def shards(columns: int, group: ProcessGroup, sizes: Sequence[int] | None) -> Shards:
    """The shards of ranks with ``sizes`` columns (None: all as many as this one). A wrong size raises later, in the
    all-gather, on every rank alike."""
    check(not torch.compiler.is_compiling(), "process_group: only eager calls gather; call it outside torch.compile")
    check_group("process_group", group)
    ranks, rank = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
    given = [columns] * ranks if sizes is None else list(sizes)
    check(
        all(type(size) is int and size >= 0 for size in given) and len(given) == ranks,
        "vocabulary_sizes: expected the columns of each of {} ranks, got {}",
        ranks,
        given,
    )
    return Shards(tuple(given), sum(given[:rank]), sum(given))


def check_shards(group: ProcessGroup | None, sizes: Sequence[int] | None) -> None:
    """Check that sizes of shards come with their ranks: without these, logits of one shard would be a vocabulary."""
    is_right = group is not None or sizes is None
    check(is_right, "vocabulary_sizes: expected None without a process_group, got {}; pass process_group=, too", sizes)


def all_rows(own: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """The rows of all ranks, for the reference; only this rank's rows have a gradient."""
    parts = gather(own, group)
    parts[torch.distributed.get_rank(group)] = own
    return torch.cat(parts)


def recognises_shards(**dimensions: int) -> Callable[[Function], Function]:
    """A decorator: arguments of these names may be distributed tensors. One that is sharded along the given dimension
    over a mesh of one dimension supplies ``process_group`` and ``vocabulary_sizes``; every other one is refused by name
    later."""

    def decorated(function: Any) -> Any:
        names = inspect.signature(function).parameters

        @functools.wraps(function)
        def run(*arguments: Any, **keywords: Any) -> Any:
            # Without the module there is no distributed tensor, and importing it takes a second.
            if torch.compiler.is_compiling() or "torch.distributed.tensor" not in sys.modules:
                return function(*arguments, **keywords)
            given = dict(zip(names, arguments, strict=False)) | keywords
            if len(arguments) > len(names) or not any(_is_distributed(given.get(name)) for name in dimensions):
                return function(*arguments, **keywords)
            return function(**_localised(given, dimensions))

        return run

    return decorated


def _is_distributed(value: Any) -> bool:
    return isinstance(value, sys.modules["torch.distributed.tensor"].DTensor)


def _localised(given: dict[str, Any], dimensions: dict[str, int]) -> dict[str, Any]:
    """The arguments with this rank's shards, their process group and the sizes of all shards."""
    shard = sys.modules["torch.distributed.tensor"].Shard
    local = dict(given)
    for name, dimension in dimensions.items():
        tensor: Any = given.get(name)
        if not _is_distributed(tensor) or tensor.device_mesh.ndim != 1:
            continue
        placement = shard(dimension % tensor.dim())
        if tensor.placements != (placement,):
            continue
        group = tensor.device_mesh.get_group()
        check(
            given.get("process_group") is group or dimension == -1,
            "{0}: sharded by rows over {1} ranks, as tensor parallelism shards it, whose ranks share their tokens, and "
            "as FSDP does, whose ranks have tokens of their own: expected process_group={0}.device_mesh.get_group() "
            "for the first, a call inside the head's own forward for the second, or {0}.full_tensor(grad_placements="
            "[Partial('avg')]), with Partial() where gradients are added; got process_group={2}",
            name,
            tensor.device_mesh.size(),
            given.get("process_group"),
        )
        check(
            given.get("process_group") is None or given.get("process_group") is group,
            "process_group: expected None or the mesh's of {}, got {}",
            name,
            given.get("process_group"),
        )
        total, ranks = tensor.shape[dimension], tensor.device_mesh.size()
        most = -(-total // ranks)
        sizes = [min(max(total - rank * most, 0), most) for rank in range(ranks)]
        asked = given.get("vocabulary_sizes")
        is_right = asked is None or list(asked) == sizes
        check(is_right, "vocabulary_sizes: expected None or {}, those of the shards of {}, got {}", sizes, name, asked)
        local |= {name: tensor.to_local(grad_placements=[placement]), "process_group": group, "vocabulary_sizes": sizes}
    return local
