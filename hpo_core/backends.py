"""The backends: their names, their availability with the reason, the choice for an op, and the loaders.

A requested backend is used, or an error says why it cannot be. The device chooses only if neither the call nor the
environment variable HPO_CORE_BACKEND requests one. If no native backend serves a device, the reference does, and one
warning says so.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .native import Native

OPS = ("segments", "advantages", "entropy", "scopes", "gates", "corrections", "logprobs", "loss_from_logits")

# The backends of CUDA tensors without a request, in order of preference. The order of an entry changes only with a
# measured figure in docs/; cuda comes first because it shares its arithmetic with the CPU backend and has no first-call
# compile.
_CUDA_PREFERENCE: dict[str, tuple[str, ...]] = dict.fromkeys(OPS, ("cuda", "triton"))


class Availability:
    """Truthy if a backend can be used in this process, else falsy with a ``reason`` that says how to get it."""

    def __init__(self, name: str, reason: str = "", detail: str = "") -> None:
        self.name = name
        self.reason = reason
        self.detail = detail

    def __bool__(self) -> bool:
        return not self.reason

    def __repr__(self) -> str:
        return f"{self.name}: {'available' if self else 'not available'} ({self.detail or self.reason})"


def backends() -> dict[str, Availability]:
    """Name -> :class:`Availability` of every backend.

    >>> bool(backends()["reference"])
    True
    """
    return {name: probe() for name, probe in _PROBES.items()}


def resolve(op: str, tensor: torch.Tensor, backend: str | None = None) -> Any:
    """The functions of ``op`` on the requested backend, or on the one that serves ``tensor``'s device.

    Raises:
        ValueError: the backend is unknown or does not serve this device; RuntimeError: it is not available here.
    """
    if backend is not None and not isinstance(backend, str):
        raise TypeError(f"backend: expected one of {', '.join(_PROBES)}, or None, got {backend!r}; pass one name")
    return _resolve(op, tensor.device, backend)


@functools.cache  # every call resolves; availability does not change within a process
def _resolve(op: str, device: torch.device, backend: str | None) -> Any:
    name = backend or choice(op, device.type)
    served = _DEVICES.get(name)
    if served is None:
        raise ValueError(f"backend: expected one of {', '.join(_PROBES)}, got {name!r}")
    if device.type not in served and not (name == "triton" and device.type == "cpu" and _interpreting()):
        raise ValueError(
            f"backend: {name!r} serves {' and '.join(served)} tensors, got a tensor on {device}; "
            f"move it, or leave backend=None"
        )
    available = _PROBES[name]()
    if not available:
        raise RuntimeError(f"backend: {name!r} is not available: {available.reason}")
    return _untraced(_LOADERS[name])(op)


def _untraced(load: Callable[[str], Any]) -> Callable[[str], Any]:
    """The loader, skipped by Dynamo, which after a graph break would trace it and copy the objects it returns."""
    dynamo = sys.modules.get("torch._dynamo")  # torch.compiler.disable would import it, which takes seconds
    return load if dynamo is None else dynamo.disable(load)


@functools.cache  # one warning for each op and device; Python shows one for each device
def choice(op: str, device: str) -> str:
    """The backend that serves ``op`` for tensors on this device type without a request."""
    asked = os.environ.get("HPO_CORE_BACKEND")
    if asked:
        if asked not in _PROBES:
            raise ValueError(f"HPO_CORE_BACKEND: expected one of {', '.join(_PROBES)}, got {asked!r}")
        return asked
    if device not in ("cpu", "cuda"):
        raise ValueError(
            f"backend: no backend serves {device} tensors by itself; move them to cpu or cuda, or ask for 'reference'"
        )
    if device == "cpu" and os.environ.get("HPO_CORE_ISA"):  # a request for cpu: if it cannot run, _resolve says why
        return "cpu"
    native = ("cpu",) if device == "cpu" else _CUDA_PREFERENCE[op]
    for name in native:
        if _PROBES[name]():
            return name
    reasons = "; ".join(f"{name}: {_PROBES[name]().reason}" for name in native)
    warnings.warn(
        f"hpo_core: no native backend serves {device} tensors here ({reasons}), so the reference does, in plain "
        "PyTorch and many times slower; HPO_CORE_BACKEND=reference says that this is meant",
        RuntimeWarning,
        stacklevel=2,
    )
    return "reference"


def is_reference(tensor: torch.Tensor, backend: str | None) -> bool:
    """Whether the reference, whose loss has a graph of its own, serves a call: by request, or for lack of others."""
    if backend is not None:
        return backend == "reference"
    found = _FALLS_BACK.get(tensor.device.type)
    if found is None and torch.compiler.is_compiling():  # a probe cannot be traced
        return False
    if found is None:
        kind = tensor.device.type
        found = _FALLS_BACK[kind] = kind in _DEVICES["reference"] and choice("gates", kind) == "reference"
    return found


# By device type. Entries that need no extension to be loaded are filled in at import.
_FALLS_BACK: dict[str, bool] = {}


# ---------------------------------------------------------------------------------------------- availability


def _extension(name: str) -> Availability:
    """A compiled extension of this package: its own description, or the reason why the build left it out."""
    try:
        module = importlib.import_module(f"hpo_core._{name}")
    except ImportError as error:
        recorded = _build_info().get(f"_{name}", {}).get("reason")
        return Availability(name, recorded or f"hpo_core._{name} cannot be imported ({error}); reinstall hpo-core")
    try:
        return Availability(name, detail=str(module.description()))
    except RuntimeError as error:  # built, but not for this machine
        return Availability(name, str(error))


def _build_info() -> dict[str, Any]:
    path = Path(__file__).with_name("_build_info.json")
    if not path.exists():
        return {}
    extensions: dict[str, Any] = json.loads(path.read_text())["extensions"]
    return extensions


def _probe_reference() -> Availability:
    return Availability("reference", detail="plain PyTorch, the definition")


def _probe_cuda() -> Availability:
    built = _extension("cuda")
    if not built:
        return built
    if not torch.cuda.is_available():
        return Availability(
            "cuda", "this process sees no CUDA device (no GPU, a driver that is too old, or a CPU build of torch)"
        )
    major, minor = torch.cuda.get_device_capability()
    binaries, portable = ([int(n) for n in re.findall(rf"{kind}_(\d+)", built.detail)] for kind in ("sm", "compute"))
    # A binary for sm_XY runs where the major version is X and the minor at least Y; PTX runs on everything newer.
    runs = any(target // 10 == major and target % 10 <= minor for target in binaries)
    if not runs and not any(target <= 10 * major + minor for target in portable):
        return Availability(
            "cuda",
            f"built for {built.detail}, not for this device (sm_{major}{minor}); set HPO_CORE_CUDA_ARCHS and reinstall",
        )
    return built


def _probe_triton() -> Availability:
    try:
        found = importlib.util.find_spec("triton")
    except ValueError:  # a module without a spec, as some packages put in Triton's place
        return Availability("triton", "another module stands in its place (sys.modules['triton'] has no __spec__)")
    if found is None:
        return Availability("triton", "Triton is not installed: pip install 'triton>=3.6'")
    if _interpreting():
        return Availability("triton", detail="in Triton's interpreter (TRITON_INTERPRET=1)")
    if not torch.cuda.is_available():
        return Availability(
            "triton", "this process sees no CUDA device; TRITON_INTERPRET=1 runs it on the CPU, for tests"
        )
    return Availability("triton", detail="compiles at the first call of each kernel")


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


_PROBES: dict[str, Callable[[], Availability]] = {
    "reference": _probe_reference,
    "cpu": lambda: _extension("cpu"),
    "triton": _probe_triton,
    "cuda": _probe_cuda,
    "cuda_emulated": lambda: _extension("cuda_emulated"),
}
_DEVICES: dict[str, tuple[str, ...]] = {
    "reference": ("cpu", "cuda"),
    "cpu": ("cpu",),
    "triton": ("cuda",),
    "cuda": ("cuda",),
    "cuda_emulated": ("cpu",),
}


# ---------------------------------------------------------------------------------------------------- loaders


@functools.cache
def _native(name: str) -> Native:
    return Native(importlib.import_module(f"hpo_core._{name}"), on_cuda=name == "cuda")


_LOADERS: dict[str, Callable[[str], Any]] = {
    "reference": lambda op: importlib.import_module(f"hpo_core.reference.{op}"),
    "cpu": lambda op: _native("cpu"),
    "triton": lambda op: importlib.import_module(f"hpo_core._triton.{op}"),
    "cuda": lambda op: _native("cuda"),
    "cuda_emulated": lambda op: _native("cuda_emulated"),
}

_asked = os.environ.get("HPO_CORE_BACKEND") or os.environ.get("HPO_CORE_ISA")
if _asked == "reference" or (not _asked and importlib.util.find_spec("hpo_core._cpu") is None):
    _FALLS_BACK["cpu"] = True
