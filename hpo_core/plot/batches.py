"""A packed batch and the levels above its tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from ..arguments import examines
from ..batch import PackedBatch, as_batch
from ..checks import check
from .canvas import GREY, LIGHT, axes_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@examines
def batch_layout(
    batch: PackedBatch | torch.Tensor, *, rows: tuple[int, int] | None = None, axes: Axes | None = None
) -> Axes:
    """A packed batch from above: its tokens from left to right, and over them the levels that the batch names.

    Segments of one id have one colour and their id, or number, in them; a segment in several places shows as several
    areas of its colour. Tokens that are masked are hatched, and tokens in no row are left white. Where tokens are too
    narrow to tell apart, runs of masked and of other tokens are one area each.

    Args:
        batch: a PackedBatch, or a padded mask ``[B, L]``.
        rows: the first row to draw and the one behind the last. Default: all.
        axes: to draw on. Default: new ones.

    Returns:
        The Axes; ticks of its y axis are the levels, from tokens upwards.

    Raises:
        ValueError: for rows that are not there; ImportError: without matplotlib.

    >>> batch = PackedBatch.from_lengths([3, 2], group_ids=torch.tensor([7, 7]))
    >>> [label.get_text() for label in batch_layout(batch).get_yticklabels()]
    ['token', 'row', 'group']
    """
    batch = as_batch(batch).to("cpu")
    has_tokens = batch.rows > 0 and batch.total_tokens > 0
    check(has_tokens, "batch: expected a row with tokens, got {}", batch)
    first, last = (0, batch.rows) if rows is None else rows
    check(0 <= first < last <= batch.rows, "rows: expected 0 <= first < last <= {}, got {}", batch.rows, rows)
    begin, end = int(batch.cu_seqlens[first]), int(batch.cu_seqlens[last])
    end = batch.total_tokens if last == batch.rows else end
    check(begin < end, "rows: expected rows with tokens, got {}", rows)
    ax = axes_of("batch_layout", axes, (9, 3.2))
    names = []
    for height, (name, segments) in enumerate(_layers(batch, first, last)):
        names.append(name)
        if name == "token" and not _fits("0", 1, end - begin, ax):
            segments = list(_joined(segments))
        colour: dict[int, str] = {}
        for left, right, number, is_valid in segments:
            face = colour.setdefault(number, LIGHT[len(colour) % len(LIGHT)]) if is_valid else "white"
            face = GREY if name == "token" and is_valid else face
            hatch = None if is_valid else "////"
            width = right - left
            ax.barh(height, width, left=left, color=face, edgecolor="black", lw=0.7, hatch=hatch, clip_on=False)
            if name != "token" and _fits(str(number), width, end - begin, ax):
                ax.text(left + width / 2, height, str(number), ha="center", va="center", fontsize=9)
    ax.set_yticks(range(len(names)), names)
    ax.set(xlim=(begin, end), xlabel="token in the pack")
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)
    return ax  # type: ignore[no-any-return]


def _layers(batch: PackedBatch, first: int, last: int) -> Iterator[tuple[str, list[tuple[int, int, int, bool]]]]:
    """The areas of each level, finest first: first token, the one behind the last, number, and whether they count."""
    begins, ends = batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist()
    valid = torch.ones(batch.total_tokens, dtype=torch.bool) if batch.mask is None else batch.mask.flatten()
    shown = range(begins[first], ends[last - 1])
    counts = valid.tolist()
    yield "token", [(token, token + 1, int(counts[token]), counts[token]) for token in shown]
    if batch.steps is not None or batch.cu_steps is not None:
        lefts, rights = (each.tolist() for each in batch.step_ranges())
        numbers = range(len(lefts)) if batch.step_ids is None else batch.step_ids.tolist()
        steps = [(*each, True) for each in zip(lefts, rights, numbers, strict=True)]
        yield "step", [each for each in steps if begins[first] <= each[0] < each[1] <= ends[last - 1]]
    places = range(first, last)
    yield "row", [(begins[row], ends[row], row, True) for row in places if begins[row] < ends[row]]
    named = {"trajectory": batch.trajectory_ids, "group": batch.group_ids, "domain": batch.domain_ids}
    for name, of_rows in named.items():
        if of_rows is not None:
            numbers = of_rows.tolist()
            areas = [(begins[row], ends[row], numbers[row], True) for row in places if begins[row] < ends[row]]
            yield name, [each for each in _joined(areas) if name == "trajectory" or each[2] >= 0]


def _joined(areas: list[tuple[int, int, int, bool]]) -> Iterator[tuple[int, int, int, bool]]:
    """Neighbours of one number as one area."""
    for (number, is_valid), same in itertools.groupby(areas, key=lambda area: area[2:]):
        run = list(same)
        yield run[0][0], run[-1][1], number, is_valid


def _fits(text: str, width: int, tokens: int, axes: Any) -> bool:
    points: float = axes.get_position().width * axes.figure.get_figwidth() * 72
    return bool(len(text) * 6.5 < points * width / tokens)
