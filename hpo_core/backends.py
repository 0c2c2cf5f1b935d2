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
from typing import Any, TypeVar

import torch

from .checks import REFERENCE
from .native import Native

Function = TypeVar("Function", bound=Callable[..., Any])

OPS = (
    "segments",
    "advantages",
    "entropy",
    "scopes",
    "covariance",
    "gates",
    "corrections",
    "logprobs",
    "loss_from_logits",
)

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
    """Name -> :class:`Availability` of every backend, for CUDA on the current device.

    >>> bool(backends()["reference"])
    True
    """
    return {name: probe(None) for name, probe in _PROBES.items()}


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
    name = backend or choice(op, str(device))
    served = _DEVICES.get(name)
    if served is None:
        raise ValueError(f"backend: expected one of {', '.join(_PROBES)}, got {name!r}")
    if device.type not in served and not (name == "triton" and device.type == "cpu" and _interpreting()):
        raise ValueError(
            f"backend: {name!r} serves {' and '.join(served)} tensors, got a tensor on {device}; "
            f"move it, or leave backend=None"
        )
    available = _PROBES[name](device if device.type == "cuda" else None)
    if not available:
        raise RuntimeError(f"backend: {name!r} is not available: {available.reason}")
    return untraced(_LOADERS[name])(op)


def untraced(function: Function) -> Function:
    """The function, skipped by Dynamo, which after a graph break would trace it and copy the objects it returns."""
    dynamo = sys.modules.get("torch._dynamo")  # torch.compiler.disable would import it, which takes seconds
    return function if dynamo is None else dynamo.disable(function)


@functools.cache  # one warning for each op and device; Python shows one for each device
def choice(op: str, device: str) -> str:
    """The backend that serves ``op`` for tensors on this device without a request: ``"cpu"``, ``"cuda:1"``, or
    ``"cuda"`` for the current one."""
    asked = os.environ.get("HPO_CORE_BACKEND")
    if asked:
        if asked not in _PROBES:
            raise ValueError(f"HPO_CORE_BACKEND: expected one of {', '.join(_PROBES)}, got {asked!r}")
        return asked
    kind = torch.device(device).type
    if kind not in ("cpu", "cuda"):
        raise ValueError(
            f"backend: no backend serves {device} tensors by itself; move them to cpu or cuda, or ask for 'reference'"
        )
    if kind == "cpu" and os.environ.get("HPO_CORE_ISA"):  # a request for cpu: if it cannot run, _resolve says why
        return "cpu"
    native = ("cpu",) if kind == "cpu" else _CUDA_PREFERENCE[op]
    probes = {}
    for name in native:
        probes[name] = _PROBES[name](torch.device(device))
        if probes[name]:
            return name
    reasons = "; ".join(f"{name}: {available.reason}" for name, available in probes.items())
    warnings.warn(
        f"hpo_core: no native backend serves {device} tensors here ({reasons}), so the reference does, in plain "
        "PyTorch and many times slower; HPO_CORE_BACKEND=reference says that this is meant",
        RuntimeWarning,
        stacklevel=2,
    )
    return REFERENCE


def is_reference(tensor: torch.Tensor, backend: str | None) -> bool:
    """Whether the reference, whose loss has a graph of its own, serves a call: by request, or for lack of others."""
    if backend is not None:
        return backend == REFERENCE
    falls_back = _FALLS_BACK.get(tensor.device)
    if falls_back is None and torch.compiler.is_compiling():  # a probe cannot be traced
        return False
    if falls_back is None:
        device = tensor.device
        chosen = choice("gates", str(device)) if device.type in _DEVICES[REFERENCE] else ""
        falls_back = _FALLS_BACK[device] = chosen == REFERENCE
    return falls_back


# Entries that need no extension to be loaded are filled in at import.
_FALLS_BACK: dict[torch.device, bool] = {}


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


def _probe_reference(_: torch.device | None = None) -> Availability:
    return Availability(REFERENCE, detail="plain PyTorch, the definition")


def _probe_cuda(device: torch.device | None = None) -> Availability:
    if torch.version.hip is not None:  # whose devices torch calls CUDA, too
        return Availability("cuda", "this torch is built for ROCm; on AMD GPUs backend='triton' runs")
    built = _extension("cuda")
    if not built:
        return built
    if not torch.cuda.is_available():
        return Availability(
            "cuda", "this process sees no CUDA device (no GPU, a driver that is too old, or a CPU build of torch)"
        )
    driver, toolkit = sys.modules["hpo_core._cuda"].versions()
    if driver // 1000 < toolkit // 1000:
        return Availability(
            "cuda",
            f"built with CUDA {_version(toolkit)}, and the driver knows CUDA up to {_version(driver)}; update the "
            f"driver, or reinstall with an nvcc of CUDA {driver // 1000} and pip's --no-cache-dir",
        )
    try:
        capability = torch.cuda.get_device_capability(device)
    except RuntimeError as error:  # in a forked process, whose parent has started CUDA
        return Availability("cuda", str(error))
    if not _has_code_for(capability, built.detail, driver >= toolkit):
        return Availability(
            "cuda",
            f"built for {built.detail}, not for this device (sm_{capability[0]}{capability[1]}); set "
            "HPO_CORE_CUDA_ARCHS and reinstall with pip's --no-cache-dir",
        )
    return built


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _has_code_for(capability: tuple[int, int], built: str, compiles_ptx: bool) -> bool:
    """Whether one of these targets runs on the device. A binary runs where the major version is the same and the minor
    one at least its own, and PTX on everything newer, if the driver is no older than the toolkit. With an ``f`` PTX,
    too, is for the minor versions of one major; with an ``a`` both are for one device alone."""
    for kind, number, suffix in re.findall(r"\b(sm|compute)_(\d+)([af]?)\b", built):
        target = divmod(int(number), 10)
        if suffix == "a":
            runs = target == capability
        elif kind == "sm" or suffix == "f":
            runs = target[0] == capability[0] and target[1] <= capability[1]
        else:
            runs = target <= capability
        if runs and (kind == "sm" or compiles_ptx):
            return True
    return False


def _probe_triton(_: torch.device | None = None) -> Availability:
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


_PROBES: dict[str, Callable[[torch.device | None], Availability]] = {
    REFERENCE: _probe_reference,
    "cpu": lambda _: _extension("cpu"),
    "triton": _probe_triton,
    "cuda": _probe_cuda,
    "cuda_emulated": lambda _: _extension("cuda_emulated"),
}
_DEVICES: dict[str, tuple[str, ...]] = {
    REFERENCE: ("cpu", "cuda"),
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
    REFERENCE: lambda op: importlib.import_module(f"hpo_core.reference.{op}"),
    "cpu": lambda op: _native("cpu"),
    "triton": lambda op: importlib.import_module(f"hpo_core._triton.{op}"),
    "cuda": lambda op: _native("cuda"),
    "cuda_emulated": lambda op: _native("cuda_emulated"),
}

_asked = os.environ.get("HPO_CORE_BACKEND") or os.environ.get("HPO_CORE_ISA")
if _asked == REFERENCE or (not _asked and importlib.util.find_spec("hpo_core._cpu") is None):
    _FALLS_BACK[torch.device("cpu")] = True
