"""Colours, and matplotlib where something is drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..checks import require_type

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
