"""Estimators in verl: the observations and rewards of turns, as an agent loop reports them, and the rows of one run.

verl's driver hands an estimator rewards, a mask and prompt ids. The ``extra_fields`` that an agent loop puts into its
output lie one call above, in ``compute_advantage``: beside the rows in ``RayPPOTrainer``, and in the TransferQueue,
from which it is fetched, in the trainers of ``trainer.use_v1=True``. :func:`install_steps` lets estimators see it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from types import ModuleType
from typing import Any, NamedTuple

import torch

from ..advantages.terms import accepted_keywords, check_estimator, level_of
from ..batch import PackedBatch
from ..checks import check
from .prompt_advantages import numbers_of, prompt_advantages, settings_of
from .replaced import after_import
from .turns import Step, steps_of_turns, turns
from .verl_prompts import keep_prompts
from .verl_rows import check_bypass

FIELD = "hpo_steps"
STEP_ESTIMATORS = ("gigpo", "hgpo")


class _Rows(NamedTuple):
    """The fields that agent loops attach to rows."""

    steps: Callable[[], Sequence[Any] | None] = lambda: None  # fetched at its call; None: no row has the field
    keys: Sequence[str] | None = None  # UID_SESSION_PLACE

    def sessions(self) -> list[tuple[str, int]] | None:
        """An agent's run and the place of the row in it; None: one row each."""
        if self.keys is None:
            return None
        return [(run, int(place)) for run, place in (key.rsplit("_", 1) for key in self.keys)]


_NONE = _Rows()
_rows: ContextVar[_Rows] = ContextVar("the fields that agent loops attach to rows", default=_NONE)


def is_of_steps(estimator: Callable[..., torch.Tensor]) -> bool:
    return callable(estimator) and level_of(estimator) == "step"


def check_step_estimator(estimator: Callable[..., torch.Tensor]) -> None:
    """Check that an estimator of steps takes no more than :func:`step_advantages` has."""
    check_estimator("estimator", estimator, ("group_ids", "trajectory_ids", "anchor_ids", "positions"), "verl")


def step_advantages(
    name: str,
    estimator: Callable[..., torch.Tensor],
    backend: str | None,
    /,
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Any = None,
    config: Any = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The function that verl calls, by keyword: tensors ``[B, L]``; advantages and returns of the same shape."""
    check(index is not None, "uid: {!r} compares the trajectories of a prompt, and verl gives no uid", name)
    mask = response_mask != 0
    batch = PackedBatch.from_padded(mask, steps=turns(mask))
    filled = mask.any(1).tolist()
    rows_of_loops = _rows.get()
    steps, sessions = _steps_of(name, rows_of_loops.steps(), filled), rows_of_loops.sessions()
    outcomes = token_level_rewards.sum(-1)
    if sessions is None:
        rewards, ids = steps_of_turns(batch, steps, outcomes)
    else:
        rewards, ids = _of_sessions(batch, steps, outcomes, sessions, filled)
    groups = numbers_of(index, mask.device)[batch.row_of_step()]
    asked = _settings(estimator, config) | ({} if backend is None else {"backend": backend})
    advantages = estimator(rewards, **accepted_keywords(estimator, rewards, group_ids=groups, **ids, **asked))
    of_tokens = batch.spread_steps(advantages).view(mask.shape)
    return of_tokens, of_tokens


def row_advantages(
    estimator: Callable[..., torch.Tensor], backend: str | None, /, config: Any = None, **keywords: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The function that verl calls for an estimator of rows or tokens."""
    runs, settings = _rows.get().sessions(), _settings(estimator, config)
    return prompt_advantages(estimator, backend, runs=runs, settings=settings, **keywords)


def _settings(estimator: Callable[..., torch.Tensor], config: Any) -> dict[str, Any]:
    """The settings of verl's AlgoConfig that the estimator takes."""
    name = "norm_adv_by_std_in_grpo"
    gamma, scaled = (1.0, True) if config is None else (config.get("gamma", 1.0), config.get(name, True))
    return settings_of(estimator, gamma, scaled, f"algorithm.{name}")


def _steps_of(name: str, field: Sequence[Any] | None, filled: Sequence[bool]) -> list[list[Any]]:
    """A list for each row; rows without valid tokens, with which verl fills batches up, have no turns."""
    missing = [row for row, has_turns in enumerate(filled) if has_turns and (field is None or field[row] is None)]
    check(
        not missing,
        "adv_estimator: {!r} compares steps by the observations before them, and the agent loop of row {} reports no "
        "{}; return AgentLoopOutput(..., extra_fields={{{!r}: [(observation, reward), ...]}}), one pair for each turn, "
        "which is a run of tokens with response_mask 1",
        name,
        missing[0] if missing else None,
        FIELD,
        FIELD,
    )
    return [
        [_step(each) for each in field[row]] if has_turns and field is not None else []
        for row, has_turns in enumerate(filled)
    ]


def _step(value: Any) -> Any:
    """Pairs lose their class on the way to the driver; a value that is no pair is refused later, with its place."""
    return Step(*value) if isinstance(value, tuple | list) and len(value) == 2 else value


def _of_sessions(
    batch: PackedBatch,
    steps: list[list[Any]],
    outcomes: torch.Tensor,
    sessions: Sequence[tuple[str, int]],
    filled: Sequence[bool],
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The steps of agents whose run is cut into several rows, each of which verl gives the reward of the run."""
    last: dict[str, int] = {}
    for session, place in (each for each, has_turns in zip(sessions, filled, strict=True) if has_turns):
        last[session] = max(place, last.get(session, place))
    ends = torch.tensor([last.get(session) == place for session, place in sessions], device=outcomes.device)
    rewards, ids = steps_of_turns(batch, steps, torch.where(ends, outcomes, 0.0))
    row = ids["trajectory_ids"]
    places = torch.tensor([place for _, place in sessions], dtype=torch.int64, device=row.device)[row]
    number = torch.arange(row.numel(), device=row.device)
    positions = places * row.numel() + number  # steps of a row are in order
    return rewards, ids | {
        "trajectory_ids": numbers_of([session for session, _ in sessions], row.device)[row], "positions": positions,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- hooks


@functools.cache
def install_steps() -> None:
    """Shows rows to estimators, in this process; verl's trainers are imported after the plug-ins, and take seconds."""
    after_import("verl.trainer.ppo.ray_trainer", _show_rows)
    after_import("verl.trainer.ppo.v1.trainer_base", _wrap_v1)


def _wrap_v1(module: ModuleType) -> None:
    """One function for both, because a module has one that waits for it."""
    _show_queue(module)
    keep_prompts(module)


def _show_rows(module: ModuleType) -> None:
    compute_advantage = module.compute_advantage

    @functools.wraps(compute_advantage)
    def shown(data: Any, *arguments: Any, **keywords: Any) -> Any:
        steps = data.non_tensor_batch.get(FIELD)
        if steps is None:  # as in all trainers whose rows are in the queue
            return compute_advantage(data, *arguments, **keywords)
        return _with(_Rows(lambda: steps), compute_advantage, data, *arguments, **keywords)

    module.compute_advantage = shown  # type: ignore[attr-defined]


def _show_queue(module: ModuleType) -> None:
    trainer: Any = module.PPOTrainer
    compute_advantage = trainer._compute_advantage

    @functools.wraps(compute_advantage)
    def shown(self: Any, batch: Any, *arguments: Any, **keywords: Any) -> Any:
        check_bypass(self.config)

        def fetched() -> list[Any]:
            wanted = {"keys": batch.keys, "partition_id": batch.partition_id, "select_fields": ["extra_fields"]}
            of_rows = [getattr(each, "data", each) for each in module.tq.kv_batch_get(**wanted)["extra_fields"]]
            return [of_row.get(FIELD) for of_row in of_rows]

        return _with(_Rows(fetched, batch.keys), compute_advantage, self, batch, *arguments, **keywords)

    trainer._compute_advantage = shown


def _with(rows: _Rows, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    token = _rows.set(rows)
    try:
        return function(*arguments, **keywords)
    finally:
        _rows.reset(token)
