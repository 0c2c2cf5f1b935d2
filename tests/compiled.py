"""What takes long to compile is compiled once for its sources, by one process of those that need it."""

import contextlib
import fcntl
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time; the others wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def kept(path: Path, contents: str, make: Callable[[], Any]) -> Any:
    """What ``make`` gives, read from the JSON file if it was made from the same ``contents``, a hash."""
    with locked(path.with_suffix(".lock")):
        if not path.exists() or json.loads(path.read_text())["contents"] != contents:
            made = json.dumps({"contents": contents, "made": make()})
            unfinished = path.with_suffix(".unfinished")
            unfinished.write_text(made)
            unfinished.rename(path)
        return json.loads(path.read_text())["made"]
