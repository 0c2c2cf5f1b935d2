"""Colours, checks of what several pictures take, and matplotlib where something is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..batch import PackedBatch
from ..checks import check, require_type

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which readers with every kind of colour vision can distinguish.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY, GREY = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#BBBBBB",
)  # fmt: skip
LIGHT = ("#A6CEE8", "#F5D99B", "#9ADBC4", "#F2B48C", "#E8C5DA", "#D9D9D9")  # the same, for areas with text on them


def pyplot_for(function: str) -> Any:
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError(f"plot.{function}: drawing needs matplotlib: pip install matplotlib") from error
    return pyplot


def check_row(batch: PackedBatch, row: int) -> None:
    check(batch.rows > 0, "batch: expected one with a row to draw, got one without rows; leave the picture out")
    check(0 <= row < batch.rows, "row: expected 0 to {}, got {}", batch.rows - 1, row)


def check_labels(labels: Sequence[str] | None, count: int) -> None:
    several = labels is None or (hasattr(labels, "__len__") and hasattr(labels, "__getitem__"))
    require_type(several, "labels: expected one for each of {} tokens, got {!r}; pass a list of texts", count, labels)
    check(labels is None or len(labels) == count, "labels: expected one for each of {} tokens, got {}", count, labels)


def title(axes: Axes, name: str) -> None:
    """A title at the left that is a name. In matplotlib two dollars begin and end a formula, here they are text."""
    axes.set_title(name, loc="left", fontsize=10, parse_math="$" not in name)


def axes_of(function: str, axes: Axes | None, size: tuple[float, float]) -> Any:
    """The Axes to draw on: those given, or new ones."""
    pyplot = pyplot_for(function)
    is_one = axes is None or isinstance(axes, pyplot.Axes)
    require_type(
        is_one, "axes: expected one matplotlib Axes or None, got {!r}; pass pyplot.gca(), or one of several", axes
    )
    return pyplot.subplots(figsize=size, layout="constrained")[1] if axes is None else axes
