"""Modules that are imported at their first use in a test, so that collection does not wait for them."""

import functools
import importlib
import importlib.util
from pathlib import Path

import pytest


class Lazy:
    """A stand-in for a module."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, attribute):
        if attribute.startswith("_"):  # pytest asks every object of a module for such names
            raise AttributeError(attribute)
        return getattr(self.module(), attribute)

    def module(self):
        return importlib.import_module(self._name)


@functools.cache
def script(path):
    """The module of a file that is in no package, by its path in the repository."""
    path = Path(__file__).parents[1] / path
    spec = importlib.util.spec_from_file_location(f"hpo_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def skip_without(name):
    """Skips a test module if a package is not installed, without importing it."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed", allow_module_level=True)
