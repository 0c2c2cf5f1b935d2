"""The one voice of every error: the argument's name, what was expected, what came, and the fix."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["check", "check_dtype", "check_shape", "check_type"]


def check(condition: bool, message: str, *values: object) -> None:
    """Raise ``ValueError`` unless ``condition``. ``message`` is formatted only on failure: the happy path stays
    cheap."""
    if not condition:
        raise ValueError(message.format(*values))


def check_type(condition: bool, message: str, *values: object) -> None:
    """Raise ``TypeError`` unless ``condition``."""
    if not condition:
        raise TypeError(message.format(*values))


def check_shape(name: str, tensor: torch.Tensor, shape: Sequence[int], meaning: str, fix: str = "") -> None:
    """``meaning`` spells the expected shape in the vocabulary of the docs, for example ``[S] (one per row)``."""
    if tuple(tensor.shape) != tuple(shape):
        tail = f"; {fix}" if fix else ""
        raise ValueError(f"{name}: expected shape {meaning} = {list(shape)}, got {list(tensor.shape)}{tail}")


def check_dtype(name: str, tensor: torch.Tensor, allowed: Sequence[torch.dtype], fix: str) -> None:
    if tensor.dtype not in allowed:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise TypeError(f"{name}: expected dtype {names}, got {str(tensor.dtype).removeprefix('torch.')}; {fix}")
