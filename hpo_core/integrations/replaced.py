"""Names of a trainer's module that are ours for the time of a call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

__all__ = ["replaced"]


@contextlib.contextmanager
def replaced(module: ModuleType, **names: Any) -> Iterator[None]:
    kept = {name: getattr(module, name) for name in names}
    try:
        for name, value in names.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in kept.items():
            setattr(module, name, value)
