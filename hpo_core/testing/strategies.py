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
from .examples import (
    FEATURES,
    MaskExample,
    PolicyLossExample,
    random_policy_loss,
    random_rewards,
    random_scores,
    random_steps,
    random_window,
)
from .layouts import Layout


def hypothesis() -> Any:
    """The hypothesis package, imported on first use, because the library itself does not need it."""
    try:
        importlib.import_module("hypothesis.strategies")
        return importlib.import_module("hypothesis")
    except ImportError as error:
        raise ImportError("hpo_core.testing: strategies and check() need hypothesis: pip install hypothesis") from error


@examines
def layouts(rows: int = 5, longest: int = 7, padded: bool = False) -> Any:
    """Strategy of :class:`Layout`; shrinks towards few short rows, no mask and seed 0. ``padded``: a rectangle."""
    st = hypothesis().strategies
    lengths = st.lists(st.integers(0, longest), max_size=rows).map(tuple)
    if padded:
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
) -> Any:
    """Strategy of :class:`PolicyLossExample` with ``always`` and any subset of ``features``."""
    st = hypothesis().strategies
    names = sorted(set(features) - set(always))
    subset = st.sets(st.sampled_from(names)) if names else st.just(set())

    def build(layout: Layout, chosen: set[str]) -> PolicyLossExample:
        return random_policy_loss(0, gate, chosen | set(always), penalty=penalty, layout=layout)

    return st.builds(build, layouts(padded=padded), subset)


@examines
def reward_groups(units: int = 12, masks: bool = True) -> Any:
    """Strategy of :class:`RewardsExample`."""
    st = hypothesis().strategies
    return st.builds(random_rewards, st.integers(0, 9999), st.integers(0, units), masks=st.just(masks))


@examines
def steps(units: int = 12) -> Any:
    """Strategy of :class:`RewardsExample` for steps."""
    st = hypothesis().strategies
    return st.builds(random_steps, st.integers(0, 9999), st.integers(0, units))


def windows(padded: bool = False) -> Any:
    """Strategy of :class:`WindowExample`."""
    return layouts(longest=10, padded=padded).map(lambda layout: random_window(layout=layout))


def masks(window: EntropyWindow, padded: bool = False) -> Any:
    """Strategy of :class:`MaskExample`."""

    def build(layout: Layout) -> MaskExample:
        # Sums of multiples of 1/64 are exact, so a tie is a tie in every precision.
        entropy = torch.randint(0, 128, (layout.tokens,), generator=layout.generator(2), device="cpu").float() / 64
        return MaskExample(entropy, layout.batch(), window)

    return layouts(longest=10, padded=padded).map(build)


@examines
def scores(count: int = 40) -> Any:
    """Strategy of :class:`ScoresExample`."""
    st = hypothesis().strategies
    return st.builds(random_scores, st.integers(0, 9999), st.integers(0, count))
