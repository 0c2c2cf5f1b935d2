"""Random arguments of windows over entropies and of exact quantiles of scores, drawn from a seed."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from ..arguments import examines
from ..batch import PackedBatch
from ..entropy import EntropyWindow
from ..entropy.aggregates import BOUNDARIES
from ..specs import OrderRule
from .layouts import Layout, below, random_layout


class WindowExample(NamedTuple):
    """The arguments of one call of ``window_mean``."""

    values: torch.Tensor
    batch: PackedBatch
    first: int
    last: int
    keywords: dict[str, Any]  # boundary, invalid


@examines
def random_window(seed: int = 0, *, layout: Layout | None = None, widest: int = 16) -> WindowExample:
    """Entropies and a random window: forward, backward, around the token or beside it, or wider than some rows."""
    layout = random_layout(seed, longest=12) if layout is None else layout
    draw = layout.generator(2)

    width, first = 1 + below(draw, widest), below(draw, widest) - widest // 2
    keywords = {
        "boundary": tuple(BOUNDARIES)[below(draw, len(BOUNDARIES))],
        "invalid": ("skip", "break")[below(draw, 2)],
    }
    values = 2 * torch.rand(layout.tokens, generator=draw, dtype=torch.float32, device="cpu")
    return WindowExample(values, layout.batch(), first, first + width - 1, keywords)


class MaskExample(NamedTuple):
    """Entropies, and the window that selects tokens by its exact quantile of this batch."""

    entropy: torch.Tensor
    batch: PackedBatch
    window: EntropyWindow


class ScoresExample(NamedTuple):
    """The arguments of one call of ``order_statistic(score, numerator, denominator, rule)``: threshold and counts."""

    score: torch.Tensor
    numerator: int
    denominator: int
    rule: OrderRule


@examines
def random_scores(seed: int = 0, count: int | None = None, kind: str | None = None) -> ScoresExample:
    """Scores and a rational quantile, with undefined (-inf) and broken (NaN) scores among them.

    ``kind``: "distinct", "ties", "equal", "signed", "extreme". Default: a random kind.
    """
    draw = torch.Generator("cpu").manual_seed(seed)

    kind = ("distinct", "ties", "equal", "signed", "extreme")[below(draw, 5)] if kind is None else kind
    count = below(draw, 40) if count is None else count
    extreme = torch.tensor(
        [0.0, -0.0, 1e-45, -1e-45, 3.4028235e38, -3.4028235e38, 1.0, 1.0000001], dtype=torch.float32, device="cpu"
    )
    score = {
        "distinct": torch.rand(count, generator=draw, dtype=torch.float32, device="cpu"),
        "ties": torch.randint(0, 3, (count,), generator=draw, device="cpu").float() / 4,
        "equal": torch.full((count,), 0.7, dtype=torch.float32, device="cpu"),
        "signed": torch.randn(count, generator=draw, dtype=torch.float32, device="cpu"),
        "extreme": extreme[torch.randint(0, len(extreme), (count,), generator=draw, device="cpu")],
    }[kind]
    left_out = torch.rand(count, generator=draw, dtype=torch.float32, device="cpu")
    score = torch.where(left_out < 0.15, -math.inf, score)
    score = torch.where(left_out > 0.97, math.nan, score)
    quantiles = ((7, 10), (4, 5), (19, 20), (1, 2), (0, 1), (1, 1), (1, 3), (999_999_999, 10**9))
    numerator, denominator = quantiles[below(draw, 8)]
    return ScoresExample(score, numerator, denominator, OrderRule(below(draw, 3)))
