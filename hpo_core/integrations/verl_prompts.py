"""verl's V1 trainers under a gate with a level of prompt groups: rows go to the ranks by whole prompts.

V1 shares rows out so that ranks have about as many tokens, whatever ``trainer.balance_batch`` says, and parts the
answers to a prompt. :func:`keep_prompts` puts the rows of a prompt into one micro-batch instead.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from ..checks import check
from .replaced import replaced
from .verl_rows import GROUPED


def keep_prompts(module: ModuleType) -> None:
    """Wraps ``_balance_batch`` of the trainers of ``verl.trainer.ppo.v1.trainer_base``."""
    trainer: Any = module.PPOTrainer
    balance, balanced_rows = trainer._balance_batch, module.get_seqlen_balanced_partitions

    @functools.wraps(balance)
    def balanced(self: Any, batch: Any, *arguments: Any, **keywords: Any) -> Any:
        actor = self.config.actor_rollout_ref.actor
        mode = actor.policy_loss.get("loss_mode", "vanilla")
        if mode not in GROUPED or self.config.trainer.critic_warmup > self.global_steps:
            return balance(self, batch, *arguments, **keywords)
        prompts = [key.rsplit("_", 2)[0] for key in batch.keys]  # UID_SESSION_PLACE

        def partitions(workloads: Any, k_partitions: int, equal_size: bool) -> list[list[int]]:
            size, rest = divmod(actor.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n, k_partitions)
            found = None
            if rest == 0:  # verl's workers refuse another mini-batch
                micro_batch = None if actor.use_dynamic_bsz else actor.ppo_micro_batch_size_per_gpu
                size = size if micro_batch is None or size % micro_batch != 0 else micro_batch
                _check_room(mode, prompts, size)
                found = whole_prompts(prompts, [*map(int, workloads)], k_partitions, size)
            return found or balanced_rows(workloads, k_partitions=k_partitions, equal_size=equal_size)

        with replaced(module, get_seqlen_balanced_partitions=partitions):
            return balance(self, batch, *arguments, **keywords)

    trainer._balance_batch = balanced


def _check_room(mode: str, prompts: Sequence[str], size: int) -> None:
    prompt, rows = collections.Counter(prompts).most_common(1)[0]
    check(
        rows <= size,
        "loss_mode: the gate of {!r} has a level of prompt groups, and a micro-batch of {} rows has no room for the {} "
        "rows of prompt {}; set actor.ppo_mini_batch_size to a multiple of the data-parallel ranks, and "
        "actor.ppo_micro_batch_size_per_gpu to a multiple of rollout.n, a greater one where runs of an agent have "
        "several rows",
        mode,
        size,
        rows,
        prompt,
    )


def whole_prompts(prompts: Sequence[str], workloads: Sequence[int], ranks: int, size: int) -> list[list[int]] | None:
    """The rows of each rank, in micro-batches of ``size``; ranks have the same number of rows, and about as much work.
    None where prompts of different numbers of rows leave one without room.

    Args:
        prompts: verl's uid of each row.
        workloads: of each row, and of those that verl has added behind them to fill the batch up.

    >>> whole_prompts(["a", "b", "b", "a"], [1, 2, 2, 3, 1, 1], ranks=2, size=3)
    [[0, 3, 4], [1, 2, 5]]
    """
    rows: dict[str, list[int]] = collections.defaultdict(list)
    for row, prompt in enumerate(prompts):
        rows[prompt].append(row)
    work = {prompt: sum(workloads[row] for row in of_prompt) for prompt, of_prompt in rows.items()}
    number = len(workloads) // (ranks * size)
    order = sorted(rows, key=lambda each: (-len(rows[each]), -work[each]))
    given = None
    for by_work in (True, False):  # where prompts differ in rows, the least loaded rank may leave a later one no room
        given = given or _ranks_of(order, rows, work, [[size] * number for _ in range(ranks)], by_work)
    if given is None:
        return None
    added = iter(range(len(prompts), len(workloads)))
    return [_in_micro_batches(of_rank, number, size, added) for of_rank in given]


def _ranks_of(
    order: Sequence[str], rows: Mapping[str, list[int]], work: Mapping[str, int], places: list[list[int]], by_work: bool
) -> list[list[list[int]]] | None:
    """The prompts of each rank: the next one goes to the rank with the least work, or with the tightest place."""
    loads, given = [0] * len(places), [list[list[int]]() for _ in places]
    for prompt in order:
        needed = len(rows[prompt])
        having_room = [rank for rank, free in enumerate(places) if max(free) >= needed]
        if not having_room:
            return None
        if by_work:
            rank = min(having_room, key=loads.__getitem__)
        else:
            rank = min(having_room, key=lambda each: min(free for free in places[each] if free >= needed))
        _take_tightest(places[rank], needed)
        loads[rank] += work[prompt]
        given[rank].append(rows[prompt])
    return given


def _in_micro_batches(groups: list[list[int]], number: int, size: int, added: Iterator[int]) -> list[int]:
    """The rows of a rank. Prompts of as many rows keep their order: sorted by work, the long ones would make the first
    updates. They take the places that :func:`whole_prompts` found, because places depend on numbers of rows alone."""
    places, parts = [size] * number, [list[int]() for _ in range(number)]
    for group in sorted(groups, key=lambda each: (-len(each), each[0])):
        parts[_take_tightest(places, len(group))].extend(group)
    return [row for part in parts for row in (*part, *(next(added) for _ in range(size - len(part))))]


def _take_tightest(places: list[int], needed: int) -> int:
    at = min((at for at, free in enumerate(places) if free >= needed), key=places.__getitem__)
    places[at] -= needed
    return at
