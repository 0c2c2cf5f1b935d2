"""Lets tests whose tensors lie on the CPU run the kernels of a GPU: arguments are carried there, and results back.

The statements of a test about an op then hold for the GPU, too, although the test knows nothing of it. Tensors that a
test puts on the GPU itself stay there.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

backends = importlib.import_module("hpo_core.backends")  # the package has a function of this name

Move = Callable[[torch.Tensor], torch.Tensor]

# Functions that leave a result in their last argument.
WRITING = ("token_logprobs_backward", "loss_from_logits", "widen")


def to_gpu(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the GPU with the same strides, which a test may be about."""
    if 0 in tensor.stride() or not tensor.numel():
        return tensor.to("cuda")
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cuda").copy_(tensor)


class Carried:
    """The functions of a backend for tensors elsewhere: ``move`` carries one there."""

    def __init__(self, functions: Any, move: Move) -> None:
        self._functions, self._move = functions, move

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._functions, name)
        return self._carrying(name, function) if callable(function) else function

    def _carrying(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def carried(*arguments: Any, **keywords: Any) -> Any:
            trip = Trip(self._move)
            there, keywords_there = trip.out(arguments), trip.out(keywords)
            if not trip.copies:
                return function(*arguments, **keywords)
            returned = trip.back(function(*there, **keywords_there))
            if name in WRITING and arguments[-1] is not None:
                arguments[-1].data.copy_(there[-1])  # autograd does not see what a kernel writes, either
            return returned

        return carried


class Trip:
    """One call: tensors that are one on this side are one on the other."""

    def __init__(self, move: Move) -> None:
        self._move = move
        self.copies: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}

    def out(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.device.type == "cpu":
            key = (value.data_ptr(), value.dtype, value.size(), value.stride())
            if key not in self.copies:
                self.copies[key] = (value, self._move(value.detach()))
            return self.copies[key][1]
        return _in_structure(self.out, value)

    def back(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            known = [here for here, there in self.copies.values() if there is value]
            return known[0] if known else value.cpu()
        return _in_structure(self.back, value)


def _in_structure(change: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, tuple):
        items = [change(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, dict):
        return {name: change(item) for name, item in value.items()}
    if _is_exchange(value):
        # Its methods take tables of the GPU and change them in place.
        return SimpleNamespace(**{name: _changing_in_place(getattr(value, name)) for name in EXCHANGED})
    if callable(value) and not isinstance(value, type):
        return _changing_in_place(value)
    return value


EXCHANGED = ("sums", "largest", "aggregate_grad")


def _is_exchange(value: Any) -> bool:
    return all(hasattr(value, name) for name in EXCHANGED)


def _changing_in_place(function: Callable[..., Any]) -> Callable[..., Any]:
    def changed(table: torch.Tensor, *rest: Any) -> Any:
        here = table.to("cpu", copy=True)
        result = function(here, *rest)
        table.copy_(here)
        return result

    return changed


def carry(backend: str) -> None:
    """Let the backend take tensors of the CPU, too, from now on."""
    load = backends._LOADERS[backend]
    backends._LOADERS[backend] = lambda op: Carried(load(op), to_gpu)
    backends._DEVICES[backend] = (*backends._DEVICES[backend], "cpu")
    backends._resolve.cache_clear()
