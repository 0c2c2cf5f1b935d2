"""The promises of group-normalised advantages.

Examples come with the estimator of the reference. A promise that holds for some estimators only applies if the
reference keeps it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..advantages.terms import name_of
from .budget import Expected, agrees, assert_within_budget
from .examples import RewardsExample
from .expected import accepts, expect_rewards
from .promises import PLACEMENTS, UNWRITTEN, Inapplicable, Run, Undefined, distinct, promise, same


class Estimator(NamedTuple):
    """An estimator of :mod:`hpo_core.advantages` and its options."""

    function: Callable[..., torch.Tensor]
    options: dict[str, Any]

    def expect(self, example: RewardsExample, **other: Any) -> Expected:
        try:
            return expect_rewards(example, self.function, **(self.options | other))
        except Exception as error:
            raise Undefined(
                f"estimator: expected advantages of every example, but {name_of(self.function)} raised "
                f"{type(error).__name__}: {error}"
            ) from error

    def without_nan(self, example: RewardsExample) -> Expected:
        """The part that a promise compares: NaN equals nothing."""
        expected = self.expect(example)
        if bool(expected.exact.isnan().any()):
            raise Inapplicable("the estimator gives NaN")
        return expected


Rewards = tuple[RewardsExample, Estimator]


def _on_units(example: RewardsExample, change: Callable[[torch.Tensor], torch.Tensor]) -> RewardsExample:
    ids = None if example.group_ids is None else change(example.group_ids)
    return RewardsExample(change(example.rewards), ids, {name: change(mask) for name, mask in example.keywords.items()})


def _ids(example: RewardsExample) -> torch.Tensor:
    return torch.zeros_like(example.rewards, dtype=torch.int64) if example.group_ids is None else example.group_ids


def _group_sizes(example: RewardsExample) -> torch.Tensor:
    """Members of the group of each unit ``[U]``."""
    ids = _ids(example)
    mask = example.keywords.get("mask", torch.ones_like(ids, dtype=torch.bool))
    return (ids[:, None] == ids[mask]).sum(1)


@promise("advantages", "exact")
def _(run: Run, drawn: Rewards) -> float:
    example, estimator = drawn
    got, expected = run(example), estimator.expect(example)
    try:
        return assert_within_budget("the advantages", got, expected)
    except AssertionError as error:
        hints = [
            hint for hint, other in _likely_faults(estimator).items() if agrees(got, estimator.expect(example, **other))
        ]
        raise AssertionError(f"{error}" + "".join(f"; {hint}" for hint in hints)) from None


def _likely_faults(estimator: Estimator) -> dict[str, dict[str, Any]]:
    faults: dict[str, dict[str, Any]] = {}
    if accepts(estimator.function, "ddof"):
        biased = estimator.options.get("ddof", 1) == 1
        divisor = "n (biased) where n - 1 is meant" if biased else "n - 1 where n is meant"
        faults[f"the standard deviation divides by {divisor}"] = {"ddof": 0 if biased else 1}
    if accepts(estimator.function, "singleton"):
        raw = estimator.options.get("singleton", "zero") == "zero"
        meant = "keeps its raw reward where 0 is meant" if raw else "gets 0 where its raw reward is meant"
        faults[f"a group of one {meant}"] = {"singleton": "raw" if raw else "zero"}
    return faults


@promise("advantages", "deterministic")
def _(run: Run, drawn: Rewards) -> None:
    same("the advantages", run(drawn[0]), run(drawn[0]), "in a second run")


@promise("advantages", "strides are honoured")
def _(run: Run, drawn: Rewards) -> None:
    before = run(drawn[0])
    for change, where in PLACEMENTS:
        same("the advantages", run(_on_units(drawn[0], change)), before, where)


@promise("advantages", UNWRITTEN)
def _(run: Run, drawn: Rewards) -> None:
    run(drawn[0])


@promise("advantages", "groups do not see each other")
def _(run: Run, drawn: Rewards) -> None:
    example, estimator = drawn
    before, exact, ids = run(example), estimator.without_nan(example).exact, _ids(example)
    for key in distinct(ids):
        own = ids == key
        changed = example._replace(rewards=torch.where(own, example.rewards, example.rewards * 1.75 + 3))
        if not torch.equal(estimator.without_nan(changed).exact[own], exact[own]):
            raise Inapplicable("groups share a number by definition")
        same("a group's advantages", run(changed)[own], before[own], "after only other groups were changed")


@promise("advantages", "masked is never read", "mask")
def _(run: Run, drawn: Rewards) -> None:
    example, _estimator = drawn
    mask = example.keywords.get("mask", torch.ones_like(example.rewards, dtype=torch.bool))
    hole = ~mask & ~example.keywords.get("apply_mask", mask)
    clean = run(example)
    for poison in (math.nan, math.inf, 1e30):
        dirty = run(example._replace(rewards=torch.where(hole, poison, example.rewards)))
        same("the advantages", dirty, clean, f"with {poison} at masked units")


@promise("advantages", "a reward that is not finite is in no statistic")
def _(run: Run, drawn: Rewards) -> float:
    example, estimator = drawn
    worst, lost = 0.0, torch.arange(example.rewards.numel(), device="cpu") % 4 == 1
    for nothing in (math.nan, math.inf, -math.inf):
        changed = example._replace(rewards=torch.where(lost, nothing, example.rewards))
        where = f"the advantages with rewards of {nothing}"
        worst = max(worst, assert_within_budget(where, run(changed), estimator.without_nan(changed)))
    return worst


@promise("advantages", "identical rewards get exactly 0")
def _(run: Run, drawn: Rewards) -> None:
    example, estimator = drawn
    ids = _ids(example)
    constant = (ids.double().abs() % 97 + 1).float() * 0.1  # one per group; few of them are dyadic
    units = {name: value for name, value in example.keywords.items() if name not in ("mask", "apply_mask")}
    example = RewardsExample(constant, example.group_ids, units)
    has_others = _group_sizes(example) > 1
    if bool(estimator.without_nan(example).exact[has_others].any()):
        raise Inapplicable("the estimator gives a flat group other advantages")
    out = run(example)[has_others]
    same("the advantage of a flat group", out, torch.zeros_like(out), "")


@promise("advantages", "an offset common to a group costs no digits")
def _(run: Run, drawn: Rewards) -> float:
    example, estimator = drawn
    example = example._replace(rewards=(example.rewards.clamp(-99, 99) * 64).round() / 64)  # a sum with 8192 is exact
    offset = example._replace(rewards=example.rewards + 8192)
    has_others = _group_sizes(example) > 1  # a single unit may keep its raw reward
    expected = estimator.without_nan(example)
    moved = (estimator.without_nan(offset).exact - expected.exact)[has_others]
    if not bool((moved.abs() <= 1e-6 + 1e-6 * expected.exact[has_others].abs()).all()):
        raise Inapplicable("the estimator's advantages depend on an offset")
    near = run(example)[has_others].double() + moved  # beside a group of one, an eps weighs less
    magnitude = 2 * expected.magnitude[has_others]
    return assert_within_budget(
        "the advantages at an offset of 8192", run(offset)[has_others], Expected(near, near, magnitude)
    )
