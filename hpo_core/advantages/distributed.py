"""Groups whose units lie on several ranks."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed

from ..arguments import check_group
from ..checks import INTEGERS, check, require_type
from ..distributed import gather, is_distributed, place_of_own, spanning
from .terms import accepted_keywords, is_multi_reward, level_of, name_of, takes_tables

# The arguments that are places among the units, and those that may be [D, U], a row for each depth or kind.
_PLACES, _BY_ROW = ("parents", "sources"), ("costs", "lengths", "starts")


def over_ranks(
    estimator: Callable[..., torch.Tensor],
    process_group: torch.distributed.ProcessGroup | None = None,
    *,
    tables: bool = False,
) -> Callable[..., torch.Tensor]:
    """The estimator over the units of all ranks: units with equal ids are one group wherever they lie.

    All ranks call it, each with its own units (or none), and get the advantages of their own. Scalars of units are
    gathered and every rank computes the same from them, bitwise the result of one process. A call takes a round trip
    per argument, some 100 KB for 10^4 units, and synchronises, because the numbers of units are read.

    Args:
        estimator: one of rows or steps, or ``functools.partial`` of one, that returns ``[U]``. Of its arguments the
            first and all one-dimensional tensors, alone, in a list or in a tuple, are gathered: they belong to units.
            So are ``costs``, ``lengths`` and ``starts`` ``[D, U]``; other tensors of more dimensions are the same on
            every rank. Ids must mean the same on every rank (rows of a batch without ``trajectory_ids`` have none that
            do). Places (``parents``, ``sources``) are those among the units of this rank: the number of units on
            earlier ranks is added to them, and a place beyond this rank's units is one beyond all.
        process_group: ranks of which no two have the same unit, such as a piece of one response each: it would count
            for each of them. Default: all processes.
        tables: gather the statistics of groups instead of the units: 56 bytes per group, rank and statistic, for many
            units (steps, tokens) in few groups. Advantages are equal on all ranks to the bit, and to those
            of one process within rounding of float32; equal rewards still give exactly 0. Trajectories must lie whole
            on a rank. Estimators that rank units, or count groups, need the units and are refused.

    >>> from hpo_core.advantages import gigpo
    >>> over_ranks(gigpo).level  # with several processes: over_ranks(grpo)(rewards, group_ids)
    'step'
    """
    if process_group is not None:
        check_group("process_group", process_group)
    require_type(callable(estimator), "estimator: expected one of hpo_core.advantages, got {!r}", estimator)
    level = level_of(estimator)
    check(
        level != "token" or (tables and takes_tables(estimator)),
        "estimator: expected one of rows or steps, got one of tokens, which stay with their rows; call it on each "
        "rank, one that whitens with whitened=False and then "
        "over_ranks(whiten)(advantages, torch.ones_like(advantages), mask=batch.mask)",
    )
    check(
        not tables or takes_tables(estimator),
        "tables: {} needs the units themselves; gather them with tables=False",
        name_of(estimator),
    )
    check(
        tables or "batch" not in accepted_keywords(estimator, None, batch=None),
        "estimator: {} takes the batch, which holds the rows of this process, beside the rewards of all; call it with "
        "advantages that are already those over ranks",
        name_of(estimator),
    )
    run: Any = functools.partial(_with_tables if tables else _run, estimator, process_group)
    run.level, run.__signature__ = level, inspect.signature(estimator)  # the single call asks for both, and for more
    run.gathers, run.__name__ = not tables, name_of(estimator)
    fixed = getattr(estimator, "keywords", {})
    run.parameters = tuple(name for name in run.__signature__.parameters if name not in fixed)
    wrapped: Callable[..., torch.Tensor] = run
    return wrapped


def _run(
    estimator: Callable[..., torch.Tensor],
    process_group: torch.distributed.ProcessGroup | None,
    /,
    *arguments: Any,
    **keywords: Any,
) -> torch.Tensor:
    if isinstance(estimator, functools.partial):  # the fixed keywords belong to units, too
        check(not estimator.args, "estimator: expected a partial of keywords only, got {}", estimator.args)
        keywords = estimator.keywords | keywords
        estimator = estimator.func
    names = list(inspect.signature(estimator).parameters) or ["rewards"]
    first, *rest = arguments or (keywords.pop(names[0], None),)
    require_type(isinstance(first, torch.Tensor), "{}: expected a tensor, got {}", names[0], type(first))
    group = _group(process_group)
    units = -1 if first.dim() < 3 else 0  # of rewards [C, U] or [U], or of sets of candidates [U, M, C]
    of_rewards = "weights" if is_multi_reward(estimator) else None
    names += [""] * len(rest)  # of arguments beyond the parameters
    keywords = dict(sorted(keywords.items()))  # all ranks gather in one order
    others = [*zip(names[1:], rest, strict=False), *keywords.items()]
    beside = [each for name, given in others for each in _names_of_units(of_rewards, name, given)]
    parts = gather(first.movedim(units, 0), group, names[0], beside)
    everywhere = functools.partial(_everywhere, group, of_rewards, [*map(len, parts)])
    whole = estimator(
        torch.cat(parts).movedim(0, units),
        *map(everywhere, names[1:], rest),
        **{name: everywhere(name, given) for name, given in keywords.items()},
    )
    require_type(isinstance(whole, torch.Tensor), "estimator: expected one that returns a tensor, got {}", type(whole))
    return whole[..., place_of_own(parts, group)]


def _with_tables(
    estimator: Callable[..., torch.Tensor],
    process_group: torch.distributed.ProcessGroup | None,
    /,
    *arguments: Any,
    **keywords: Any,
) -> torch.Tensor:
    return spanning(_group(process_group), estimator, *arguments, **keywords)


def _group(process_group: torch.distributed.ProcessGroup | None) -> Any:
    check(
        is_distributed(),
        "process_group: expected ranks to gather from, but torch.distributed is not initialised; call "
        "init_process_group first, or the estimator itself in a single process",
    )
    return torch.distributed.group.WORLD if process_group is None else process_group


def _everywhere(
    group: torch.distributed.ProcessGroup, of_rewards: str | None, units: list[int], name: str, given: Any
) -> Any:
    """The arguments that belong to units, of the units of all ranks; others as they are, that named ``of_rewards`` too.

    Not a closure that calls itself: the cycle would keep the process group, and its threads, beyond its destruction.
    """
    if type(given) in (list, tuple):
        return type(given)(_everywhere(group, of_rewards, units, name, each) for each in given)
    if not _is_of_units(of_rewards, name, given):
        return given
    parts = gather(given.movedim(-1, 0), group, name)
    shifts = name in _PLACES and given.dtype in INTEGERS  # the estimator refuses others
    return torch.cat(_among_all(parts, units) if shifts else parts).movedim(0, -1)


def _among_all(parts: list[torch.Tensor], units: list[int]) -> list[torch.Tensor]:
    """Places among the units of each rank as places among those of all. ``units``: how many each rank has."""
    before = itertools.accumulate(units, initial=0)
    return [
        torch.where(part < own, torch.where(part < 0, part, part + earlier), sum(units)).to(part.dtype)
        for part, own, earlier in zip(parts, units, before, strict=False)
    ]


def _is_of_units(of_rewards: str | None, name: str, given: Any) -> bool:
    if not isinstance(given, torch.Tensor):
        return False
    return (given.dim() == 1 and name != of_rewards) or (given.dim() == 2 and name in _BY_ROW)


def _names_of_units(of_rewards: str | None, name: str, given: Any) -> list[str]:
    """The name of an argument, once for each tensor in it that belongs to units."""
    if type(given) in (list, tuple):
        return [found for each in given for found in _names_of_units(of_rewards, name, each)]
    return [name] * _is_of_units(of_rewards, name, given)
