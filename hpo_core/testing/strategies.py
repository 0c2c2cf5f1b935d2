"""Hypothesis strategies of examples: they draw the *structure* (rows, masks, which optional inputs) and a seed for the
numbers, so that a failing example shrinks to a few tokens."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterable
from typing import Any

import torch

from ..arguments import examines
from ..entropy import EntropyWindow
from ..gates import RatioGate
from ..kl import KLPenalty
from .examples import FEATURES, PolicyLossExample, RewardsExample, random_policy_loss, random_rewards, random_steps
from .examples_of_entropy import MaskExample, random_scores, random_window
from .layouts import Layout, wide_ids

# An example that is long crosses the blocks of usual kernels: 128 rows, 1,024 groups, 2,048 units, 4,096 tokens. The
# longest rows and groups, and all tokens or units, are multiples of every block up to 1,024: a last block that is full.
LONG = (1024, 0, 1, 2050, *(3,) * 140, 517, 1108)
LONG_RECTANGLES = ((33,) * 130, (2048,) * 2)
LONG_GROUPS = (1024, 511, 1, *(2,) * 1280)
LONG_UNITS = sum(LONG_GROUPS)
LONG_WIDTH = 300  # of windows, in tokens


def hypothesis() -> Any:
    """The hypothesis package, imported on first use, because the library itself does not need it."""
    try:
        importlib.import_module("hypothesis.strategies")
        return importlib.import_module("hypothesis")
    except ImportError as error:
        raise ImportError("hpo_core.testing: strategies and check() need hypothesis: pip install hypothesis") from error


@examines
def layouts(rows: int = 5, longest: int = 7, padded: bool = False, long: bool = False) -> Any:
    """Strategy of :class:`Layout`; shrinks towards few short rows, no mask and seed 0. ``padded``: a rectangle;
    ``long``: thousands of tokens, which no usual block of a kernel holds."""
    st = hypothesis().strategies
    lengths = st.lists(st.integers(0, longest), max_size=rows).map(tuple)
    if long:
        lengths = st.sampled_from(LONG_RECTANGLES) if padded else st.just(LONG)
    elif padded:
        lengths = st.tuples(st.integers(0, rows), st.integers(0, longest)).map(lambda size: (size[1],) * size[0])
    masked = st.sampled_from(("none", "some", "row", "all"))
    shared = st.just(False) if padded else st.booleans()
    return st.builds(Layout, lengths, st.integers(0, 0 if padded else 3), masked, shared, st.integers(0, 9999))


def policy_losses(
    gate: RatioGate | None = None,
    features: Iterable[str] = FEATURES,
    *,
    always: Collection[str] = ("weights",),
    penalty: KLPenalty | None = None,
    padded: bool = False,
    long: bool = False,
) -> Any:
    """Strategy of :class:`PolicyLossExample` with ``always`` and any subset of ``features``; ``long`` as in
    :func:`layouts`."""
    st = hypothesis().strategies
    names = sorted(set(features) - set(always))
    subset = st.sets(st.sampled_from(names)) if names else st.just(set())

    def build(layout: Layout, chosen: set[str]) -> PolicyLossExample:
        return random_policy_loss(0, gate, chosen | set(always), penalty=penalty, layout=layout)

    return st.builds(build, layouts(padded=padded, long=long), subset)


@examines
def reward_groups(units: int = 12, masks: bool = True, long: bool = False) -> Any:
    """Strategy of :class:`RewardsExample`; ``long``: of 4,096 units, in groups of 1 to 1,024."""
    st = hypothesis().strategies

    def build(seed: int, count: int) -> RewardsExample:
        example = random_rewards(seed, count, masks=masks)
        if not long or example.group_ids is None:
            return example
        group = torch.arange(len(LONG_GROUPS), device="cpu").repeat_interleave(torch.tensor(LONG_GROUPS, device="cpu"))
        order = torch.randperm(count, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
        return example._replace(group_ids=wide_ids(group[order]))

    return st.builds(build, st.integers(0, 9999), _count(units, long))


@examines
def steps(units: int = 12, long: bool = False) -> Any:
    """Strategy of :class:`RewardsExample` for steps; ``long``: of 4,096 units."""
    st = hypothesis().strategies
    return st.builds(random_steps, st.integers(0, 9999), _count(units, long))


def _count(most: int, long: bool) -> Any:
    st = hypothesis().strategies
    return st.just(LONG_UNITS) if long else st.integers(0, most)


def windows(padded: bool = False, long: bool = False) -> Any:
    """Strategy of :class:`WindowExample`; ``long`` as in :func:`layouts`."""
    drawn = layouts(longest=10, padded=padded, long=long)
    widest = LONG_WIDTH if long else 16
    return drawn.map(lambda layout: random_window(layout=layout, widest=widest))


def masks(window: EntropyWindow, padded: bool = False, long: bool = False) -> Any:
    """Strategy of :class:`MaskExample`; ``long`` as in :func:`layouts`."""

    def build(layout: Layout) -> MaskExample:
        # Sums of multiples of 1/64 are exact, so a tie is a tie in every precision.
        entropy = torch.randint(0, 128, (layout.tokens,), generator=layout.generator(2), device="cpu").float() / 64
        return MaskExample(entropy, layout.batch(), window)

    return layouts(longest=10, padded=padded, long=long).map(build)


@examines
def scores(count: int = 40, long: bool = False) -> Any:
    """Strategy of :class:`ScoresExample`; ``long``: of 8,192 scores, hardly two alike."""
    st = hypothesis().strategies
    size = (st.just(2 * LONG_UNITS), st.just("distinct")) if long else (st.integers(0, count),)
    return st.builds(random_scores, st.integers(0, 9999), *size)
