"""Functions of tokens ``[T]`` on the tensors ``[B, L]`` of a padded batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from ..checks import examined
from .packed import PackedBatch

__all__ = ["takes_padded"]

Function = TypeVar("Function", bound=Callable[..., Any])


def takes_padded(
    function: Function, names: Sequence[str], padded: Callable[[Any, tuple[int, int]], Any] = torch.Tensor.reshape
) -> Function:
    """The function, which then takes tensors ``[B, L]`` beside a padded ``batch``, too, and returns such.

    ``names``: its parameters. ``padded``: of its result and ``(B, L)``, the result for such tensors.
    """

    @functools.wraps(function)
    def run(*arguments: Any, **keywords: Any) -> Any:
        given = dict(zip(names, arguments, strict=False)) | keywords
        batch = given.get("batch")
        shape = batch.padded_shape if isinstance(batch, PackedBatch) else None
        if shape is None or len(arguments) > len(names):
            return function(*arguments, **keywords)
        tensors = {name: examined(name, each) for name, each in given.items() if isinstance(each, torch.Tensor)}
        flat = {name: each.reshape(-1) for name, each in tensors.items() if each.shape == shape}
        result = function(**given | flat)
        return padded(result, shape) if flat else result

    return run  # type: ignore[return-value]
