"""Functions of tokens ``[T]`` on the tensors ``[B, L]`` of a padded batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from ..checks import examined
from .packed import PackedBatch

Function = TypeVar("Function", bound=Callable[..., Any])


def _reshaped(value: Any, old: Sequence[int], new: Sequence[int]) -> Any:
    """Tensors of the shape ``old``, also those inside named tuples, in the shape ``new``."""
    if isinstance(value, torch.Tensor):
        return value.reshape(new) if tuple(value.shape) == old else value
    if isinstance(value, tuple):
        changed = [_reshaped(each, old, new) for each in value]
        if all(one is other for one, other in zip(changed, value, strict=True)):
            return value
        return type(value)(*changed) if hasattr(value, "_fields") else tuple(changed)
    return value


def _examined(name: str, value: Any) -> Any:
    return examined(name, value) if isinstance(value, torch.Tensor) else value


def _padded_shape(batch: Any) -> tuple[int, int] | None:
    if isinstance(batch, PackedBatch):
        return batch.padded_shape
    is_mask = isinstance(batch, torch.Tensor) and not batch.is_nested and batch.dim() == 2
    return (batch.shape[0], batch.shape[1]) if is_mask else None


def _of_tokens(result: Any, shape: tuple[int, int]) -> Any:
    return _reshaped(result, (shape[0] * shape[1],), shape)


def takes_padded(
    function: Function, names: Sequence[str], padded: Callable[[Any, tuple[int, int]], Any] = _of_tokens
) -> Function:
    """The function, which then takes tensors ``[B, L]`` beside a padded ``batch``, too, and returns such. A padded
    batch is a :class:`PackedBatch` made of a mask, or the mask itself.

    ``names``: its parameters. ``padded(result, (B, L))``: its result ``[T]`` as one ``[B, L]``.
    """

    @functools.wraps(function)
    def run(*arguments: Any, **keywords: Any) -> Any:
        given = dict(zip(names, arguments, strict=False)) | keywords
        shape = _padded_shape(given.get("batch"))
        if shape is None or len(given) < len(arguments) + len(keywords):  # Python refuses the call
            return function(*arguments, **keywords)
        given = {name: one if name == "batch" else _examined(name, one) for name, one in given.items()}
        flat = [one if name == "batch" else _reshaped(one, shape, (-1,)) for name, one in given.items()]
        named = dict(zip(keywords, flat[len(arguments) :], strict=True))
        result = function(*flat[: len(arguments)], **named)
        is_packed = all(one is before for one, before in zip(flat, given.values(), strict=True))
        return result if is_packed else padded(result, shape)

    return run  # type: ignore[return-value]
