"""Aggregates of entropies over windows of tokens. No result has a gradient."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

import torch

from .. import ops
from ..arguments import check_choice, examines
from ..batch import PackedBatch, as_batch
from ..checks import check, check_device, check_precise, check_shape, keeps_doubles, require_type
from ..specs import Boundary, Invalid, WindowAggregate

_AGGREGATES = {each.name.lower(): each for each in WindowAggregate}
BOUNDARIES = {each.name.lower(): each for each in Boundary}
INVALID = {each.name.lower(): each for each in Invalid}
_FARTHEST = 2**62  # beyond every row; a place in a row and an offset are an int64 together


@dataclass(frozen=True)
class Window:
    """The window ``{t + first, ..., t + last}`` of a token t, cut by the token's row, and its aggregate.

    A row begins at its first valid token and ends at its last: masked tokens outside are padding, and how many there
    are changes no score. Frozen, hashable, picklable.

    Args:
        first, last: integers, ``first <= last``.
        aggregate: ``"mean"``, ``"sum"``, ``"max"`` or ``"min"``.
        boundary: a window that sticks out of its row. ``"full"``: undefined; ``"shrink"``: its part inside; ``"zero"``:
            the row is 0 outside, so that every mean divides by the full width, and a token left out of a window counts
            as 0, a masked one, too, but a window without a valid token is undefined; ``"carry"``: an undefined
            window, also one that ``invalid`` makes so, gets the mean of the row's defined ones, or the row's first
            valid value if it has none (the threshold statistic of ARES' code).
        invalid: masked tokens inside a window. ``"skip"``: they are left out (one valid token must remain);
            ``"break"``: the window is undefined.

    >>> Window.centred(4)
    Window(first=-2, last=1, aggregate='mean', boundary='full', invalid='skip')
    """

    first: int = 0
    last: int = 0
    aggregate: str = "mean"
    boundary: str = "full"
    invalid: str = "skip"

    def __post_init__(self) -> None:
        check_offsets(self.first, self.last)
        for name in ("first", "last"):  # kernels take no integer of NumPy
            object.__setattr__(self, name, int(getattr(self, name)))
        check_choice("aggregate", self.aggregate, _AGGREGATES)
        check_choice("boundary", self.boundary, BOUNDARIES)
        check_choice("invalid", self.invalid, INVALID)
        check(
            self.boundary != "zero" or self.aggregate in ("mean", "sum"),
            "boundary: 'zero' is for means and sums, got aggregate {!r}; use 'shrink'",
            self.aggregate,
        )

    @classmethod
    def forward(cls, width: int, **rules: str) -> Window:
        """``{t, ..., t + width - 1}``; ``rules``: aggregate, boundary and invalid.

        >>> Window.forward(4).last
        3
        """
        return cls(0, _width(width) - 1, **rules)

    @classmethod
    def forward_exclusive(cls, width: int, **rules: str) -> Window:
        """``{t + 1, ..., t + width}``."""
        return cls(1, _width(width), **rules)

    @classmethod
    def causal(cls, width: int, **rules: str) -> Window:
        """``{t - width + 1, ..., t}``."""
        return cls(1 - _width(width), 0, **rules)

    @classmethod
    def centred(cls, width: int, **rules: str) -> Window:
        """``{t - floor(width / 2), ..., t + ceil(width / 2) - 1}``."""
        return cls(-(_width(width) // 2), (width + 1) // 2 - 1, **rules)


@examines
def window_aggregate(
    values: torch.Tensor, batch: PackedBatch | torch.Tensor, window: Window, *, backend: str | None = None
) -> torch.Tensor:
    """The aggregate of ``values`` over the window of each token.

    Args:
        values: ``[T]`` or the padded ``[B, L]``, floating point (entropies, in nats).
        batch: a PackedBatch, or a padded mask ``[B, L]``.

    Returns:
        float32 in the shape of ``values``: -inf where the window is undefined or the token masked (below every
        threshold), NaN where a valid token's own value is not finite. Sums have a fixed order that depends only on the
        position inside the window, and are exact on constant values for widths that are powers of two.

    >>> batch = PackedBatch.from_lengths([3, 2])
    >>> window_aggregate(torch.tensor([1.0, 3.0, 5.0, 9.0, 7.0]), batch, Window.forward(2, aggregate="max"))
    tensor([3., 5., -inf, 9., -inf])
    """
    batch = as_batch(batch)
    flat = flat_values("values", values, batch, backend)
    rules = (BOUNDARIES[window.boundary], INVALID[window.invalid], _AGGREGATES[window.aggregate], backend)
    spans = batch.once(PackedBatch.spans)
    return ops.window_score(flat, batch.mask, spans, window.first, window.last, *rules).reshape(values.shape)


@examines
def window_mean(
    values: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    first: int,
    last: int,
    *,
    boundary: str = "full",
    invalid: str = "skip",
    backend: str | None = None,
) -> torch.Tensor:
    """Mean of ``values`` over the window ``{t + first, ..., t + last}`` of each token t, cut by the token's row.

    It is :func:`window_aggregate` of ``Window(first, last, "mean", boundary, invalid)``.

    >>> batch = PackedBatch.from_lengths([3, 2])
    >>> window_mean(torch.tensor([1.0, 3.0, 5.0, 7.0, 9.0]), batch, 0, 1)
    tensor([2., 4., -inf, 8., -inf])
    """
    return window_aggregate(values, batch, Window(first, last, "mean", boundary, invalid), backend=backend)


def flat_values(name: str, tensor: torch.Tensor, batch: PackedBatch, backend: str | None) -> torch.Tensor:
    """A checked constant ``[T]`` from values ``[T]`` or ``[B, L]``; the reference keeps their precision."""
    check_precise(name, tensor)
    shape = batch.padded_shape or (batch.total_tokens,)
    if tuple(tensor.shape) != (batch.total_tokens,):
        check_shape(name, tensor, shape, "[T] (or the padded [B, L])")
    check_device(name, tensor, batch.device, "the batch")
    flat = tensor.detach() if tensor.requires_grad else tensor
    flat = flat if flat.dim() == 1 else flat.reshape(-1)
    return flat if keeps_doubles(backend) else flat.float().contiguous()


def check_offsets(first: int, last: int) -> None:
    """Check the offsets of a window's first and last token."""
    for name, offset in (("first", first), ("last", last)):
        _check_integer(name, offset)
        check(abs(offset) <= _FARTHEST, "{}: expected an offset from -2^62 to 2^62, got {}", name, offset)
    check(first <= last, "first: expected first <= last, got {} and {}", first, last)


def _check_integer(name: str, value: int) -> None:
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)  # NumPy's, too
    require_type(is_integer, "{}: expected an integer, got {!r}", name, value)


def _width(width: int) -> int:
    _check_integer("width", width)
    check(width >= 1, "width: expected a width >= 1, got {}", width)
    return width
