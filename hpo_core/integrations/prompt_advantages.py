"""Estimators of rows and tokens as verl and those after its manner call them: rewards of tokens, a mask, prompt ids."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from ..advantages.terms import accepted_keywords, check_estimator, is_multi_reward, level_of, name_of
from ..batch import PackedBatch
from ..checks import check, require_type
from ..segments import scan

# Estimators that need no more than is given here: outcomes or token rewards, the mask, and the prompt of each response.
ESTIMATORS = (
    *("a_star", "asymre", "bnpo", "dgpo", "dr_grpo", "g2rpo", "gpg", "grpo", "grpo_lead"),
    *("grpo_leave_one_out", "grpo_passk", "lite_ppo", "maxrl", "mc_grpo", "ngrpo", "opo", "qae", "reinforce_pp"),
    *("reinforce_pp_baseline", "rloo"),
)

# The estimators that divide by a deviation and have no form without.
_DIVIDING = ("dgpo", "grpo", "grpo_lead", "grpo_leave_one_out", "lite_ppo", "mc_grpo", "ngrpo", "qae")


def check_prompt_estimator(estimator: Callable[..., torch.Tensor], trainer: str) -> None:
    """Check that an estimator takes no more than :func:`prompt_advantages` has.

    Raises:
        ValueError: one of steps or several rewards, or one that needs another argument.
    """
    require_type(callable(estimator), "estimator: expected one of hpo_core.advantages, got {!r}", estimator)
    level = level_of(estimator)
    check(
        level in ("row", "token"),
        "estimator: expected one of rows or tokens, got one of {}s, whose observations {} does not tell; call it in "
        "your own loop",
        level,
        trainer,
    )
    check(
        not is_multi_reward(estimator),
        "estimator: expected one of a single reward, because {} has no more; wrap it",
        trainer,
    )
    check_estimator("estimator", estimator, ("group_ids", "lengths", "batch"), trainer)


def numbers_of(ids: Iterable[Hashable], device: torch.device) -> torch.Tensor:
    """int64: ids of any kind by the order in which they come.

    >>> numbers_of(["b", "a", "b"], torch.device("cpu"))
    tensor([0, 1, 0])
    """
    numbers: dict[Hashable, int] = {}
    numbered = [numbers.setdefault(each, len(numbers)) for each in ids]
    return torch.tensor(numbered, dtype=torch.int64, device="cpu").to(device)


def settings_of(estimator: Callable[..., torch.Tensor], gamma: float, scaled: bool, name: str) -> dict[str, Any]:
    """The keywords of an estimator for a trainer's discount and its switch of GRPO's deviation. At the defaults of
    trainers, 1 and True, it keeps numbers of its own. ``name``: the switch's.

    >>> from hpo_core import advantages
    >>> settings_of(advantages.gigpo, 0.9, False, "norm"), settings_of(advantages.gigpo, 1.0, True, "norm")
    ({'gamma': 0.9, 'scaled': False}, {})
    """
    estimator_name = name_of(estimator)
    check(
        scaled or estimator_name not in _DIVIDING,
        "{}: {} divides by a deviation whatever it says; leave it at True, or take hpo_dr_grpo",
        name,
        estimator_name,
    )
    settings = ({} if gamma == 1 else {"gamma": gamma}) | ({} if scaled else {"scaled": False})
    return accepted_keywords(estimator, **settings)


def prompt_advantages(
    estimator: Callable[..., torch.Tensor],
    backend: str | None,
    /,
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Any = None,
    runs: Sequence[tuple[Hashable, int]] | None = None,
    settings: Mapping[str, Any] = MappingProxyType({}),
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The function that such trainers call, by keyword: advantages and returns, all tensors ``[B, L]``. Prompts without
    any valid token, with which trainers fill batches up, are in no statistic. The return of a token is the sum of the
    rewards from it on, discounted by ``gamma``; of an estimator of rows it is the advantage.

    Args:
        index: ``[B]`` ids of prompts, of any kind.
        runs: of each row its run and its place in it: an estimator of rows takes the reward of a run's last row, the
            tokens of all, and each row gets the advantage of its run. None: one row each.
        settings: further arguments of the estimator.

    >>> from hpo_core import advantages
    >>> rewards, mask = torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.tensor([[1, 1], [1, 0]])
    >>> prompt_advantages(advantages.rloo, None, rewards, mask, ["a", "a"])[0]
    tensor([[ 1.,  1.],
            [-1., -0.]])
    """
    mask = response_mask != 0
    tokens, rows = mask.sum(-1), torch.arange(mask.shape[0], device=mask.device)
    groups = rows if index is None else numbers_of(index, mask.device)
    asked = dict(settings) if backend is None else {**settings, "backend": backend}

    def called(rewards: torch.Tensor, lengths: torch.Tensor, of: torch.Tensor | slice) -> torch.Tensor:
        available = {
            "group_ids": groups[of],
            "lengths": lengths[of].float(),
            "batch": PackedBatch.from_padded(mask[of]),
        }
        flat = rewards[of].flatten()
        return estimator(flat, **accepted_keywords(estimator, flat, **available, **asked))

    if level_of(estimator) == "token":
        batch, rewards = PackedBatch.from_padded(mask), torch.where(mask, token_level_rewards, 0.0).flatten()
        gains = torch.where(mask, settings.get("gamma", 1.0), torch.ones_like(mask, dtype=torch.float64)).flatten()
        returns = scan(rewards, gains, batch.cu_seqlens, backend).to(rewards.dtype).reshape(mask.shape)
        advantages = called(token_level_rewards, tokens, slice(None)).reshape(mask.shape)
        return advantages, torch.where(mask, returns, 0.0)
    last = rows if runs is None else torch.tensor(_last_rows(runs), device="cpu").to(mask.device)
    lengths, in_group = (torch.zeros_like(tokens).index_add(0, each, tokens) for each in (last, groups))
    counted = ((last == rows) & (in_group[groups] > 0)).nonzero().squeeze(1)
    of_runs = called(token_level_rewards.sum(-1), lengths, counted)
    found = of_runs.new_zeros(mask.shape[0]).index_copy(0, counted, of_runs)[last, None] * mask
    return found, found


def _last_rows(runs: Sequence[tuple[Hashable, int]]) -> list[int]:
    """The last row of the run of each row."""
    last: dict[Hashable, int] = {}
    for row, (run, place) in enumerate(runs):
        if run not in last or runs[last[run]][1] < place:
            last[run] = row
    return [last[run] for run, _ in runs]
