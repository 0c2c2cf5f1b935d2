"""Names of a trainer's module that are ours: for the time of a call, from its import on, or in its Ray workers."""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from .named import VARIABLE


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


def after_import(name: str, function: Callable[[ModuleType], None]) -> None:
    """Call ``function`` with the module: now if it is imported, else when somebody imports it. A later function for the
    same name takes the place of one that waits.

    For modules that take seconds to import, or that import the package that is being imported now.
    """
    if name in sys.modules:
        return function(sys.modules[name])
    waiting = [finder for finder in sys.meta_path if isinstance(finder, _Finder) and finder.name == name]
    for finder in waiting:
        finder.function = function
    if not waiting:
        sys.meta_path.insert(0, _Finder(name, function))


def run_under_ray(main: str, hook: str) -> None:
    """Runs the trainer's own ``main``. Where that starts Ray, as it likes, workers call ``hook`` and get ``HPO_GATE``,
    too."""
    import ray

    def start(*arguments: Any, runtime_env: Mapping[str, Any] | None = None, **options: Any) -> Any:
        given = {VARIABLE: os.environ[VARIABLE]} if os.environ.get(VARIABLE) else {}
        asked = dict(runtime_env or {})
        variables = {**asked.get("env_vars", {}), **given}
        asked |= {"env_vars": variables, "worker_process_setup_hook": hook}
        return begin(*arguments, runtime_env=asked, **options)

    begin = ray.init
    with replaced(ray, init=start):
        runpy.run_module(main, run_name="__main__", alter_sys=True)


class _Finder:
    """Finds one module, as the other finders do, until it has been imported."""

    def __init__(self, name: str, function: Callable[[ModuleType], None]) -> None:
        self.name, self.function, self.is_asking = name, function, False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self.name or self.is_asking:
            return None
        self.is_asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.is_asking = False
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_call(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)  # type: ignore[arg-type,unused-ignore]
            self.function(module)

        loader.exec_module = execute_and_call
        return spec
