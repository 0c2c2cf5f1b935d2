"""The promises of windowed scores, of the masks they make, and of order statistics."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from ..checks import REFERENCE
from ..reference.entropy import order_statistic
from ..specs import INDEX_RULES, OrderRule
from .budget import assert_within_budget
from .examples_of_entropy import MaskExample, ScoresExample, WindowExample
from .expected import expect_window
from .layouts import valid_tokens
from .promises import PLACEMENTS, UNWRITTEN, Run, promise, same

Example = WindowExample | MaskExample | ScoresExample

_ALL = "window_mean window_mask order_statistic quantile"
_OUTPUT = {WindowExample: "the score", MaskExample: "the mask", ScoresExample: "the threshold"}


@promise("window_mean", "exact")
def _(run: Run, example: WindowExample) -> float:
    rule = f"the score (boundary {example.keywords['boundary']}, invalid {example.keywords['invalid']})"
    return assert_within_budget(rule, run(example), expect_window(example))


@promise("window_mask", "exact, ties included")
def _(run: Run, example: MaskExample) -> None:
    _state, expected = example.window.fit_apply(example.entropy.double(), example.batch, backend=REFERENCE)
    same("the mask", run(example), expected, f"(window {example.window.name!r})")


@promise("order_statistic quantile", "exact, ties included")
def _(run: Run, example: ScoresExample) -> None:
    same("the threshold", run(example), order_statistic(*example)[0], f"(rule {example.rule.name})")


@promise(_ALL, "deterministic")
def _(run: Run, example: Example) -> None:
    same(_OUTPUT[type(example)], run(example), run(example), "in a second run")


@promise(_ALL, "strides are honoured")
def _(run: Run, example: Example) -> None:
    before = run(example)
    for change, where in PLACEMENTS:
        changed: dict[str, Any] = {example._fields[0]: change(example[0])}
        same(_OUTPUT[type(example)], run(example._replace(**changed)), before, where)


@promise(_ALL, UNWRITTEN)
def _(run: Run, example: Example) -> None:
    run(example)


# -------------------------------------------------------------------------------------------------------------- windows


def _changed_values(example: WindowExample, where: torch.Tensor, value: float) -> WindowExample:
    return example._replace(values=torch.where(where, value, example.values))


@promise("window_mean", "packed: no window crosses a row")
def _(run: Run, example: WindowExample) -> None:
    before = run(example)
    for begin, end in zip(example.batch.cu_seqlens[:-1].tolist(), example.batch.cu_seqlens[1:].tolist(), strict=True):
        position = torch.arange(example.values.numel(), device="cpu")
        others = valid_tokens(example.batch) & ((position < begin) | (position >= end))
        out = run(_changed_values(example, others, 1e6))
        same("a row's score", out[begin:end], before[begin:end], "after only other rows were changed")


@promise("window_mean", "masked is never read")
def _(run: Run, example: WindowExample) -> None:
    clean = run(example)
    for poison in (math.nan, math.inf, 1e30):
        same(
            "the score",
            run(_changed_values(example, ~valid_tokens(example.batch), poison)),
            clean,
            f"with {poison} in masked places",
        )


@promise("window_mean", "a value that is not finite: the score of its token is NaN, and other windows leave it out")
def _(run: Run, example: WindowExample) -> None:
    valid = valid_tokens(example.batch)
    first = valid & (valid.cumsum(0) == 1)
    for value in (math.nan, math.inf):
        broken = _changed_values(example, first, value)
        assert_within_budget(f"the score with {value} at a valid token", run(broken), expect_window(broken))


@promise("window_mean", "batch-invariant: a row's scores do not depend on its place")
def _(run: Run, example: WindowExample) -> None:
    whole = run(example)
    for row in range(example.batch.rows):
        batch, tokens = example.batch.select([row])
        alone = run(example._replace(values=example.values[tokens], batch=batch))
        same("a row's score", alone, whole[tokens], "alone in its batch")


@promise("window_mean", "a constant is its own mean, to the bit, for widths that are powers of two")
def _(run: Run, example: WindowExample) -> None:
    width = 1 << (example.last - example.first).bit_length()
    out = run(
        example._replace(
            values=torch.full_like(example.values, 0.7),
            last=example.first + width - 1,
            keywords={"boundary": "full", "invalid": "break"},
        )
    )
    defined = out > -math.inf
    same("the score of a constant", out[defined], torch.full_like(out[defined], 0.7), f"at width {width}")


# ----------------------------------------------------------------------------------------------------- masks of windows


@promise("window_mask", "masked is never read")
def _(run: Run, example: MaskExample) -> None:
    clean = run(example)
    for poison in (math.nan, math.inf, 1e30):
        dirty = run(example._replace(entropy=torch.where(valid_tokens(example.batch), example.entropy, poison)))
        same("the mask", dirty, clean, f"with {poison} in masked places")


@promise("window_mask", "a token without a finite entropy is not selected")
def _(run: Run, example: MaskExample) -> None:
    valid = valid_tokens(example.batch)
    first = valid & (valid.cumsum(0) == 1)
    for value in (math.nan, math.inf):
        broken = example._replace(entropy=torch.where(first, value, example.entropy))
        _state, expected = example.window.fit_apply(broken.entropy.double(), example.batch, backend=REFERENCE)
        same("the mask", run(broken), expected, f"with {value} at a valid token")


# ----------------------------------------------------------------------------------------------------- order statistics


@promise("order_statistic quantile", "the order of the scores does not matter")
def _(run: Run, example: ScoresExample) -> None:
    same("the threshold", run(example._replace(score=example.score.flip(0))), run(example), "with the scores reversed")


@promise("order_statistic", "undefined and broken scores are not in the population")
def _(run: Run, example: ScoresExample) -> None:
    more = torch.cat((example.score, example.score.new_tensor([-math.inf, math.nan, math.inf, -math.inf])))
    same("the threshold", run(example._replace(score=more)), run(example), "with -inf, inf and NaN added")


# Quantiles (numerator, denominator) of so many scores whose index is another one in double precision, and in single.
ROUNDED = {
    OrderRule.CEIL: ((7, 25, 26), (7, 100, 101), (3, 10, 51)),
    OrderRule.FLOOR: ((7, 10, 91), (29, 100, 101), (53, 100, 101)),
    OrderRule.NEAREST: ((7, 10, 46), (7, 20, 91), (3, 10, 96)),
}


def _assert_exact_index(run: Run, example: ScoresExample, rules: Iterable[OrderRule]) -> None:
    for rule in rules:
        rounded = ROUNDED[rule][example.score.numel() % 3]
        own = example.numerator, example.denominator, max(example.score.numel(), 11)
        for numerator, denominator, count in (own, rounded):
            drawn = torch.randperm(count, generator=torch.Generator("cpu").manual_seed(count), device="cpu").float()
            expected = float(rule.index(numerator, denominator, count))
            got = run(ScoresExample(drawn, numerator, denominator, rule)).item()
            assert got == expected, (
                f"{rule.name} of {numerator}/{denominator} of {count} distinct scores is order statistic "
                f"{expected:.0f}, got {got:.0f}"
            )


@promise("order_statistic", "the index is exact in integers")
def _(run: Run, example: ScoresExample) -> None:
    _assert_exact_index(run, example, INDEX_RULES)


@promise("quantile", "the index is exact in integers")
def _(run: Run, example: ScoresExample) -> None:
    _assert_exact_index(run, example, (example.rule,))
