"""The promises of the library for each op, as properties of any kernel.

A promise compares the kernel with the float64 reference, or with itself on two inputs that must have the same result.
Correctness comes first.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from ..batch import PackedBatch
from ..gates import Clip, FirstOrder, Penalty
from ..reference.entropy import order_statistic
from ..specs import INDEX_RULES, OrderRule
from .budget import Expected, assert_within_budget
from .examples import MaskExample, PolicyLossExample, RewardsExample, ScoresExample, WindowExample
from .expected import Outcome, accepts, expect_policy_loss, expect_rewards, expect_window

__all__ = ["GRADIENT", "NOTHING_VALID", "PROMISES", "Estimator", "Inapplicable", "Promise", "has_tokens"]

Run = Callable[[Any], Any]

GRADIENT = "gradient"  # a requirement of promises that is no keyword


class Inapplicable(Exception):
    """The gate or the estimator does not promise this, and the message says why."""


class Promise(NamedTuple):
    name: str
    # Raises AssertionError if broken; returns the largest error / budget, if there is one.
    holds: Callable[[Run, Any], float | None]
    needs: tuple[str, ...]  # keywords that the kernel must take for the promise to make sense


PROMISES: dict[str, list[Promise]] = {}


def _promise(ops: str, name: str, *needs: str) -> Callable[[Any], Any]:
    def register(holds: Any) -> Any:
        for op in ops.split():
            PROMISES.setdefault(op, []).append(Promise(name, holds, needs))
        return holds

    return register


def _same(what: str, got: torch.Tensor, expected: torch.Tensor, why: str) -> None:
    """Bitwise equality, in which the two zeros are one number."""
    got, expected = got.detach() + 0.0, expected.detach() + 0.0
    if got.shape == expected.shape and torch.equal(got.nan_to_num(1e38), expected.nan_to_num(1e38)):
        return
    raise AssertionError(f"{what} is {got.tolist()} instead of {expected.tolist()} {why}")


def _strided(x: torch.Tensor) -> torch.Tensor:
    """The same values as every second element of wider memory; the elements between them must not be read."""
    wide = x.new_full((x.numel(), 2), math.nan if x.is_floating_point() else 1)
    wide[:, 1] = x
    return wide[:, 1]


def _growing(where: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """A change of the numbers at ``where``, which leaves masks as they are."""
    return lambda x: torch.where(where, 1.75 * x, x) if x.is_floating_point() else x


def _distinct(ids: torch.Tensor) -> list[int]:
    return sorted(set(ids.tolist()))


def _shifted(x: torch.Tensor) -> torch.Tensor:
    """The same values, contiguous, one element off the boundaries on which memory is allocated."""
    wide = x.new_full((x.numel() + 1,), math.nan if x.is_floating_point() else 1)
    wide[1:] = x
    return wide[1:]


# ---------------------------------------------------------------------------------------------------------- policy loss


NOTHING_VALID = "nothing valid: loss 0, gradient 0"


def has_tokens(example: PolicyLossExample) -> bool:
    return bool(example.valid().any())


def _same_outcome(got: Outcome, expected: Outcome, why: str) -> None:
    _same("the loss", got.loss, expected.loss, why)
    if expected.grad is not None:
        _same("the gradient", _grad(got), expected.grad, why)


def _grad(outcome: Outcome) -> torch.Tensor:
    assert outcome.grad is not None, "the kernel returned a gradient before, and now none"
    return outcome.grad


@_promise("policy_loss kl", "exact")
def _(run: Run, example: PolicyLossExample) -> float:
    out, expected = run(example), expect_policy_loss(example)
    # The gradient comes first: wrong terms make a wrong loss, and the message should point to the terms.
    share = [
        assert_within_budget(f"the {meaning}", value, expected[name])
        for name, meaning, value in (("grad", "gradient", out.grad), ("loss", "loss", out.loss))
        if value is not None
    ]
    if out.tokens is not None:
        share.append(assert_within_budget("loss_t", out.tokens, expected["tokens"]))
    if out.metrics is not None:
        share.append(assert_within_budget("the metrics", out.metrics.vector, expected["metrics"]))
    return max(share)


@_promise("policy_loss kl", "deterministic")
def _(run: Run, example: PolicyLossExample) -> None:
    first, threads = run(example), torch.get_num_threads()
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            _same_outcome(run(example), first, f"in a second run on {number} threads")
    finally:
        torch.set_num_threads(threads)


@_promise("policy_loss kl", "strides are honoured")
def _(run: Run, example: PolicyLossExample) -> None:
    before = run(example)
    _same_outcome(run(example.on_tokens(_strided).on_rows(_strided)), before, "where inputs have stride 2")
    _same_outcome(run(example.on_tokens(_shifted).on_rows(_shifted)), before, "where inputs begin off alignment")


@_promise("policy_loss", "packed: rows do not see each other", GRADIENT)
def _(run: Run, example: PolicyLossExample) -> None:
    before, owner, valid = run(example), example.trajectory(), example.valid()
    trajectory_of_row = torch.arange(example.batch.rows, device="cpu")
    if example.batch.trajectories is not None:
        trajectory_of_row = example.batch.trajectories[0]
    for kept in _distinct(owner[valid]):
        changed = example.on_tokens(_growing(valid & (owner != kept))).on_rows(_growing(trajectory_of_row != kept))
        own = owner == kept
        _same(
            "the gradient of a row", _grad(run(changed))[own], _grad(before)[own], "after only other rows were changed"
        )


@_promise("policy_loss", "masked is never read")
def _(run: Run, example: PolicyLossExample) -> None:
    clean, hole = run(example), ~example.valid()
    for poison in (math.nan, math.inf, 1e30):
        dirty = run(example.poisoned(poison))
        _same_outcome(dirty, clean, f"with {poison} at masked positions")
        if dirty.grad is not None:
            _same("the gradient at masked positions", dirty.grad[hole], torch.zeros_like(dirty.grad[hole]), "")


@_promise("policy_loss", NOTHING_VALID)
def _(run: Run, example: PolicyLossExample) -> None:
    batch = example.batch
    nothing = torch.zeros(batch.total_tokens, dtype=torch.bool, device="cpu")
    empty = PackedBatch(batch.cu_seqlens, nothing, trajectory_ids=batch.trajectory_ids)
    out = run(example._replace(batch=empty))
    zeros = None if out.grad is None else torch.zeros_like(out.grad)
    _same_outcome(out, Outcome(torch.zeros_like(out.loss), zeros, None, None), "with all masked")


def _on_policy(example: PolicyLossExample) -> tuple[PolicyLossExample, torch.Tensor] | None:
    """The example with ``logp == old_logp``, and -w A where the reference has a gradient; None if not promised."""
    example = example.without("kl", "ref_logp", "token_weight")
    of_gate = example.gate_inputs
    if of_gate.token_weight is not None:
        of_gate = of_gate._replace(token_weight=torch.ones_like(of_gate.token_weight))
        example = example._replace(keywords=example.keywords | {"gate_inputs": of_gate})
    if example.gate.first_order in (FirstOrder.SCALED, FirstOrder.SEGMENT_SUM):
        raise Inapplicable(f"the gate promises {example.gate.first_order.value}")
    if example.gate.penalty is Penalty.K1:
        raise Inapplicable("the gate's own penalty has a gradient on-policy")
    if example.gate.first_order is FirstOrder.SEGMENT_MEAN:  # -w A only if w and A are constant on the trajectory
        if example.per_token:
            return None
        example = example.without("token_mask", "window", "threshold")
        if example.batch.trajectories is not None and example.batch.rows:
            trajectory, start, rows = example.batch.trajectories
            representative = rows[start[trajectory]]
            example = example.on_rows(lambda x: x[representative])
    if example.old_logp is not None:
        zero = torch.arange(example.logp.numel(), device="cpu") % 3 == 0  # with zeros of either sign on either side
        example = example._replace(
            logp=torch.where(zero, -0.0, example.old_logp), old_logp=torch.where(zero, 0.0, example.old_logp)
        )
    exact = expect_policy_loss(example)["grad"].exact
    weights = example.spread(example.weights())
    advantages = example.advantages if example.per_token else example.spread(example.advantages)
    return example, torch.where(exact != 0, -(weights * advantages), 0.0)


def _first_order(run: Run, example: PolicyLossExample, why: str) -> float | None:
    found = _on_policy(example)
    if found is None:
        return None
    example, expected = found
    grad = _grad(run(example))
    if "weights" in example.keywords:
        _same("the gradient", grad, expected, f"(-w A) {why}")
        return None
    # A kernel with weights of its own may divide before it multiplies.
    exact = expected.double()
    return assert_within_budget(f"the gradient {why}", grad, Expected(exact, exact, exact.abs()))


@_promise("policy_loss", "first-order true: on-policy, the gradient is -w A", GRADIENT)
def _(run: Run, example: PolicyLossExample) -> float | None:
    return _first_order(run, example, "on-policy")


@_promise("policy_loss", "ties: a ratio exactly at its bound passes the gradient", "gate", GRADIENT)
def _(run: Run, example: PolicyLossExample) -> float | None:
    gate, tie = example.gate, Clip((1.0, 1.0), (1.0, 1.0))
    if isinstance(gate.token, Clip):
        gate = dataclasses.replace(gate, token=tie, needs=())
    elif gate.level is not None and isinstance(gate.level.gate, Clip):
        gate = dataclasses.replace(gate, levels=(dataclasses.replace(gate.level, gate=tie),))
    else:
        raise Inapplicable("the gate has no bounds")
    bare = example._replace(gate=gate).without("gate_inputs")
    return _first_order(run, bare, "where every ratio is exactly at its bound")


@_promise(
    "policy_loss",
    "ties: a score equal to the threshold is selected (unless strict)",
    *("window", "threshold", "entropy", GRADIENT),
)
def _(run: Run, example: PolicyLossExample) -> None:
    valid = example.valid()
    if "window" not in example.keywords or not bool(valid.any()):
        return
    window = dataclasses.replace(example.keywords["window"], first=0, last=0)
    middle = example.keywords["entropy"][valid].median().reshape(1)
    example = example.given(window=window, threshold=middle).without("kl", "ref_logp")
    selected = expect_policy_loss(example)["grad"].exact != 0
    _same("the set of tokens with a gradient", (_grad(run(example)) != 0).int(), selected.int(), "at tied scores")


@_promise("policy_loss", "overflow-safe: log-ratios saturate at +-60 and keep their slope")
def _(run: Run, example: PolicyLossExample) -> float:
    sizes = torch.tensor([30.0, 59.0, 61.0, 120.0, 1e4], dtype=torch.float32, device="cpu")
    size = sizes.repeat(example.logp.numel())[: example.logp.numel()]
    up = torch.arange(example.logp.numel(), device="cpu") % 2 == 0
    old = example.logp if example.old_logp is None else example.old_logp
    example = example.without("kl", "ref_logp")._replace(
        logp=torch.where(up, -0.5, -0.5 - size), old_logp=torch.where(up, -0.5 - size, old.new_tensor(-0.5))
    )
    example = example._replace(advantages=example.advantages * 1e9)
    out, expected = run(example), expect_policy_loss(example)
    largest = f"not finite at log-ratios up to {float(size.max()) if size.numel() else 0.0}"
    assert bool(torch.isfinite(out.loss)), f"loss {out.loss.item()} is {largest}"
    if out.grad is None:
        return assert_within_budget("the loss", out.loss, expected["loss"])
    assert bool(torch.isfinite(out.grad).all()), f"gradient {out.grad.tolist()} is {largest}"
    return assert_within_budget("the gradient", out.grad, expected["grad"])


@_promise(
    "policy_loss",
    "batch-invariant: a row's gradient does not depend on its place or its neighbours",
    "weights",
    GRADIENT,
)
def _(run: Run, example: PolicyLossExample) -> None:
    whole, rows = run(example), example.batch.rows
    order = torch.randperm(rows, generator=torch.Generator("cpu").manual_seed(rows), device="cpu")
    shuffled, tokens = example.select(order)
    _same("the gradient", _grad(run(shuffled)), _grad(whole)[tokens], "in another order of the rows")
    trajectory = order if example.batch.trajectories is None else example.batch.trajectories[0]
    for number in _distinct(trajectory):
        alone, tokens = example.select(trajectory == number)
        _same("the gradient of a row", _grad(run(alone)), _grad(whole)[tokens], "alone in its batch")


@_promise("policy_loss", "micro-batch-invariant: parts add up to the whole", "weights")
def _(run: Run, example: PolicyLossExample) -> float:
    whole, loss = run(example), torch.zeros((), dtype=torch.float64, device="cpu")
    trajectory = torch.arange(example.batch.rows, device="cpu")
    if example.batch.trajectories is not None:
        trajectory = example.batch.trajectories[0]
    for part in (0, 1):
        micro, tokens = example.select(trajectory % 2 == part)
        out = run(micro)
        loss += out.loss.double()
        if whole.grad is not None:
            _same("the gradient", _grad(out), whole.grad[tokens], "in a micro-batch")
    return assert_within_budget("the loss summed over micro-batches", loss, expect_policy_loss(example)["loss"])


# ----------------------------------------------------------------------------------------------------------- advantages
# Examples come with the estimator of the reference. A promise that holds for some estimators only applies if the
# reference keeps it.


class Estimator(NamedTuple):
    """An estimator of :mod:`hpo_core.advantages` and its options."""

    function: Callable[..., torch.Tensor]
    options: dict[str, Any]

    def expect(self, example: RewardsExample, **other: Any) -> Expected:
        return expect_rewards(example, self.function, **(self.options | other))


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


@_promise("advantages", "exact")
def _(run: Run, drawn: Rewards) -> float:
    example, estimator = drawn
    got, expected = run(example), estimator.expect(example)
    try:
        return assert_within_budget("the advantages", got, expected)
    except AssertionError as error:
        hints = [
            hint
            for hint, other in _likely_faults(estimator).items()
            if _agrees(got, estimator.expect(example, **other)) and not _agrees(got, expected)
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


def _agrees(got: torch.Tensor, expected: Expected) -> bool:
    try:
        assert_within_budget("", got, expected)
    except AssertionError:
        return False
    return True


@_promise("advantages", "deterministic")
def _(run: Run, drawn: Rewards) -> None:
    _same("the advantages", run(drawn[0]), run(drawn[0]), "in a second run")


@_promise("advantages", "strides are honoured")
def _(run: Run, drawn: Rewards) -> None:
    before = run(drawn[0])
    _same("the advantages", run(_on_units(drawn[0], _strided)), before, "where inputs have stride 2")
    _same("the advantages", run(_on_units(drawn[0], _shifted)), before, "where inputs begin off alignment")


@_promise("advantages", "groups do not see each other")
def _(run: Run, drawn: Rewards) -> None:
    example, estimator = drawn
    before, exact, ids = run(example), estimator.expect(example).exact, _ids(example)
    for key in _distinct(ids):
        own = ids == key
        changed = example._replace(rewards=torch.where(own, example.rewards, example.rewards * 1.75 + 3))
        if not torch.equal(estimator.expect(changed).exact[own], exact[own]):
            raise Inapplicable("groups share a number by definition")
        _same("a group's advantages", run(changed)[own], before[own], "after only other groups were changed")


@_promise("advantages", "masked is never read", "mask")
def _(run: Run, drawn: Rewards) -> None:
    example, _estimator = drawn
    mask = example.keywords.get("mask", torch.ones_like(example.rewards, dtype=torch.bool))
    hole = ~mask & ~example.keywords.get("apply_mask", mask)
    clean = run(example)
    for poison in (math.nan, math.inf, 1e30):
        dirty = run(example._replace(rewards=torch.where(hole, poison, example.rewards)))
        _same("the advantages", dirty, clean, f"with {poison} at masked units")


@_promise("advantages", "identical rewards get exactly 0")
def _(run: Run, drawn: Rewards) -> None:
    example, estimator = drawn
    ids = _ids(example)
    constant = (ids.double().abs() % 97 + 1).float() * 0.1  # one per group; few of them are dyadic
    units = {name: value for name, value in example.keywords.items() if name not in ("mask", "apply_mask")}
    example = RewardsExample(constant, example.group_ids, units)
    has_others = _group_sizes(example) > 1
    if bool(estimator.expect(example).exact[has_others].any()):
        raise Inapplicable("the estimator gives a flat group other advantages")
    out = run(example)[has_others]
    _same("the advantage of a flat group", out, torch.zeros_like(out), "")


@_promise("advantages", "an offset common to a group costs no digits")
def _(run: Run, drawn: Rewards) -> float:
    example, estimator = drawn
    example = example._replace(rewards=(example.rewards.clamp(-99, 99) * 64).round() / 64)  # a sum with 8192 is exact
    offset = example._replace(rewards=example.rewards + 8192)
    has_others = _group_sizes(example) > 1  # a single unit may keep its raw reward
    expected = estimator.expect(example)
    if not torch.allclose(estimator.expect(offset).exact[has_others], expected.exact[has_others], 1e-6, 1e-6):
        raise Inapplicable("the estimator's advantages depend on an offset")
    near = run(example)[has_others].double()
    magnitude = 2 * expected.magnitude[has_others]
    return assert_within_budget(
        "the advantages at an offset of 8192", run(offset)[has_others], Expected(near, near, magnitude)
    )


# -------------------------------------------------------------------------------------------------------------- windows


def _changed_values(example: WindowExample, where: torch.Tensor, value: float) -> WindowExample:
    return example._replace(values=torch.where(where, value, example.values))


@_promise("window_mean", "exact")
def _(run: Run, example: WindowExample) -> float:
    rule = f"the score (boundary {example.keywords['boundary']}, invalid {example.keywords['invalid']})"
    return assert_within_budget(rule, run(example), expect_window(example))


@_promise("window_mean", "deterministic")
def _(run: Run, example: WindowExample) -> None:
    _same("the score", run(example), run(example), "in a second run")


@_promise("window_mean", "strides are honoured")
def _(run: Run, example: WindowExample) -> None:
    before = run(example)
    _same("the score", run(example._replace(values=_strided(example.values))), before, "where values have stride 2")
    _same("the score", run(example._replace(values=_shifted(example.values))), before, "where values are not aligned")


@_promise("window_mean", "packed: no window crosses a row")
def _(run: Run, example: WindowExample) -> None:
    before = run(example)
    for begin, end in zip(example.batch.cu_seqlens[:-1].tolist(), example.batch.cu_seqlens[1:].tolist(), strict=True):
        position = torch.arange(example.values.numel(), device="cpu")
        others = example.valid() & ((position < begin) | (position >= end))
        out = run(_changed_values(example, others, 1e6))
        _same("a row's score", out[begin:end], before[begin:end], "after only other rows were changed")


@_promise("window_mean", "masked is never read")
def _(run: Run, example: WindowExample) -> None:
    clean = run(example)
    for poison in (math.nan, math.inf, 1e30):
        _same(
            "the score",
            run(_changed_values(example, ~example.valid(), poison)),
            clean,
            f"with {poison} in masked places",
        )


@_promise("window_mean", "batch-invariant: a row's scores do not depend on its place")
def _(run: Run, example: WindowExample) -> None:
    whole = run(example)
    for row in range(example.batch.rows):
        batch, tokens = example.batch.select([row])
        alone = run(example._replace(values=example.values[tokens], batch=batch))
        _same("a row's score", alone, whole[tokens], "alone in its batch")


@_promise("window_mean", "a constant is its own mean, to the bit, for widths that are powers of two")
def _(run: Run, example: WindowExample) -> None:
    width = 1 << (example.last - example.first).bit_length()
    example = example._replace(last=example.first + width - 1, values=torch.full_like(example.values, 0.7))
    example.keywords.update(boundary="full", invalid="break")
    out = run(example)
    defined = out > -math.inf
    _same("the score of a constant", out[defined], torch.full_like(out[defined], 0.7), f"at width {width}")


# ----------------------------------------------------------------------------------------------------- masks of windows


@_promise("window_mask", "exact, ties included")
def _(run: Run, example: MaskExample) -> None:
    _state, expected = example.window.fit_apply(example.entropy.double(), example.batch, backend="reference")
    _same("the mask", run(example).int(), expected.int(), f"(window {example.window.name!r})")


@_promise("window_mask", "deterministic")
def _(run: Run, example: MaskExample) -> None:
    _same("the mask", run(example).int(), run(example).int(), "in a second run")


@_promise("window_mask", "strides are honoured")
def _(run: Run, example: MaskExample) -> None:
    strided = run(example._replace(entropy=_strided(example.entropy)))
    _same("the mask", strided.int(), run(example).int(), "where entropies have stride 2")


@_promise("window_mask", "masked is never read")
def _(run: Run, example: MaskExample) -> None:
    clean = run(example)
    for poison in (math.nan, math.inf, 1e30):
        dirty = run(example._replace(entropy=torch.where(example.valid(), example.entropy, poison)))
        _same("the mask", dirty.int(), clean.int(), f"with {poison} in masked places")


# ----------------------------------------------------------------------------------------------------- order statistics


@_promise("order_statistic quantile", "exact, ties included")
def _(run: Run, example: ScoresExample) -> None:
    _same("the threshold", run(example), order_statistic(*example)[0], f"(rule {example.rule.name})")


@_promise("order_statistic quantile", "deterministic")
def _(run: Run, example: ScoresExample) -> None:
    _same("the threshold", run(example), run(example), "in a second run")


@_promise("order_statistic quantile", "strides are honoured")
def _(run: Run, example: ScoresExample) -> None:
    before = run(example)
    _same("the threshold", run(example._replace(score=_strided(example.score))), before, "where scores have stride 2")
    _same("the threshold", run(example._replace(score=_shifted(example.score))), before, "where scores are not aligned")


@_promise("order_statistic quantile", "the order of the scores does not matter")
def _(run: Run, example: ScoresExample) -> None:
    _same("the threshold", run(example._replace(score=example.score.flip(0))), run(example), "with the scores reversed")


@_promise("order_statistic", "undefined and broken scores are not in the population")
def _(run: Run, example: ScoresExample) -> None:
    more = torch.cat((example.score, example.score.new_tensor([-math.inf, math.nan, math.inf, -math.inf])))
    _same("the threshold", run(example._replace(score=more)), run(example), "with -inf, inf and NaN added")


def _assert_exact_index(run: Run, example: ScoresExample, rules: Iterable[OrderRule]) -> None:
    count = max(example.score.numel(), 11)  # 7/10 of 11 is the smallest where ceil(q (n - 1)) fails in floats
    drawn = torch.randperm(count, generator=torch.Generator("cpu").manual_seed(count), device="cpu").float()
    for rule in rules:
        expected = float(rule.index(example.numerator, example.denominator, count))
        got = run(ScoresExample(drawn, example.numerator, example.denominator, rule)).item()
        assert got == expected, (
            f"{rule.name} of {example.numerator}/{example.denominator} of {count} distinct scores is order statistic "
            f"{expected:.0f}, got {got:.0f}"
        )


@_promise("order_statistic", "the index is exact in integers")
def _(run: Run, example: ScoresExample) -> None:
    _assert_exact_index(run, example, INDEX_RULES)


@_promise("quantile", "the index is exact in integers")
def _(run: Run, example: ScoresExample) -> None:
    _assert_exact_index(run, example, (example.rule,))
