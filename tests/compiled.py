"""A cache of slow compilations: one process compiles for given sources, and the others wait for the result."""

import contextlib
import fcntl
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """A lock between processes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def kept(path: Path, contents: str, make: Callable[[], Any]) -> Any:
    """The result of ``make``, read from the JSON file if it was made from the same ``contents``, a hash."""
    with locked(path.with_suffix(".lock")):
        if not path.exists() or json.loads(path.read_text())["contents"] != contents:
            made = json.dumps({"contents": contents, "made": make()})
            unfinished = path.with_suffix(".unfinished")
            unfinished.write_text(made)
            unfinished.rename(path)
        return json.loads(path.read_text())["made"]
