"""The steps of padded completions: the tokens that the policy wrote between two answers of tools."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real
from typing import NamedTuple

import torch

from ..batch import PackedBatch
from ..checks import check, require_type
from ..segments import ids_of


class Step(NamedTuple):
    """One turn of a completion: the observation before it, by which steps of a prompt are compared, and the reward
    it got at once."""

    observation: str | bytes | int
    reward: float = 0.0


def turns(mask: torch.Tensor) -> torch.Tensor:
    """``[N, 2]`` int64: the runs of valid tokens in each row of a bool ``[B, L]``, as half-open ranges of its tokens.

    For ``PackedBatch.from_padded(mask, steps=turns(mask))``. Synchronises: how many there are decides a shape.

    >>> turns(torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0]]).bool()).tolist()
    [[0, 2], [3, 4], [4, 5]]
    """
    before, behind = torch.nn.functional.pad(mask, (1, -1)), torch.nn.functional.pad(mask, (-1, 1))
    begin, end = (mask & ~before).flatten().nonzero(), (mask & ~behind).flatten().nonzero() + 1
    return torch.cat((begin, end), dim=1)


def steps_of_turns(
    batch: PackedBatch, steps: Sequence[Sequence[Step]], outcomes: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The steps of all completions in a row, as estimators of steps take them: rewards ``[N]``, and ``trajectory_ids``
    (their rows) and ``anchor_ids``.

    Args:
        batch: B completions whose steps are their :func:`turns`.
        steps: for each completion one for each of its turns. Those of a completion without valid tokens, as of one
            that was truncated and is masked throughout, are in no statistic.
        outcomes: ``[B]``, the reward of each completion, added to that of its last step.

    >>> mask = torch.tensor([[True, False, True], [True, True, False]])
    >>> batch = PackedBatch.from_padded(mask, steps=turns(mask))
    >>> steps = [[Step("door"), Step("hall", 0.5)], [Step("door")]]
    >>> rewards, ids = steps_of_turns(batch, steps, torch.tensor([1.0, 0.0]))
    >>> rewards, ids["trajectory_ids"]
    (tensor([0.0000, 1.5000, 0.0000]), tensor([0, 0, 1]))
    """
    row = batch.row_of_step()
    counts = row.bincount(minlength=batch.rows).tolist()
    _check_steps(steps, counts)
    flat = [step for of_row, count in zip(steps, counts, strict=True) if count for step in of_row]
    rewards = torch.tensor([step.reward for step in flat], dtype=torch.float32, device=row.device)
    last = torch.ones_like(row, dtype=torch.bool)
    last[:-1] = row[1:] != row[:-1]
    anchors = ids_of((step.observation for step in flat), row.device)
    rewards = torch.where(last, rewards + outcomes[row], rewards)
    return rewards, {"trajectory_ids": row, "anchor_ids": anchors}


def _check_steps(steps: Sequence[Sequence[Step]], turns: list[int]) -> None:
    require_type(isinstance(steps, Sequence), "steps: expected a list of Step for each completion, got {}", type(steps))
    check(
        len(steps) == len(turns), "steps: expected one list for each of {} completions, got {}", len(turns), len(steps)
    )
    for at, (of_row, count) in enumerate(zip(steps, turns, strict=True)):
        name = f"steps[{at}]"
        is_list = isinstance(of_row, Sequence) and not isinstance(of_row, str | Step)
        require_type(is_list, "{}: expected a list of Step, one for each turn, got {!r}", name, of_row)
        check(
            count in (0, len(of_row)),
            "{}: expected {} steps, got {}; a turn is a run of tokens that no tool wrote, and each has its Step",
            name,
            count,
            len(of_row),
        )
        for place, step in enumerate(of_row):
            require_type(
                isinstance(step, Step)
                and isinstance(step.observation, str | bytes | Integral)
                and isinstance(step.reward, Real),
                "{}[{}]: expected Step(observation, reward) of a string, bytes or an integer and a number, got {!r}",
                name,
                place,
                step,
            )
