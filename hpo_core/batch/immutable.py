"""The base of PackedBatch: attributes that stay, and results of its tensors that are computed once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch

from .. import ops
from ..checks import check

Made = TypeVar("Made")

STRUCTURE = ("cu_seqlens", "cu_steps", "steps", "step_ids", "trajectory_ids", "group_ids", "domain_ids")


class Immutable:
    """A batch whose attributes, the slots of its class, are set by ``__setstate__`` alone. Its tensors may be refilled
    in place: the results that :meth:`once` has kept are then made anew."""

    __slots__ = ("_cache", "_is_plain", "_structure")

    cu_seqlens: torch.Tensor
    mask: torch.Tensor | None
    _is_plain: bool  # every tensor has memory of its own; fake tensors and other subclasses may have none
    _structure: tuple[torch.Tensor, ...]  # every tensor but the mask
    _cache: dict[Any, tuple[list[int], Any]]  # by key of once: the state of the tensors, and the result

    def once(self, make: Callable[..., Made], *arguments: Any, static: bool = False) -> Made:
        """``make(self, *arguments)``, computed once, because every loss call needs counts and default weights.

        The result is kept until a tensor of the batch changes in place, for the stream that computed it. Inside a CUDA
        graph, a trace or a transform no kept result is read and none is kept: a replay has to count the mask anew, and
        tensors of a trace or of a graph's pool do not outlive it.

        ``static``: ``make`` reads sizes on the host, which is impossible during a capture, and does not depend on the
        mask; a capture takes the result of an earlier call.
        """
        if not self._is_plain or ops.is_traced(self.cu_seqlens):
            return make(self, *arguments)
        capturing = _is_capturing(self.cu_seqlens)
        if capturing and not static:
            return make(self, *arguments)
        state = self._state(static)
        key = (make, *arguments)
        kept = self._cache.get(key)
        if kept is not None and kept[0] == state:
            return kept[1]  # type: ignore[no-any-return]
        check(
            not capturing,
            "batch: expected a batch that an earlier call has seen, got a new or changed one inside a CUDA graph; "
            "levels over a process group read sizes on the host: call the loss once before the capture",
        )
        result = make(self, *arguments)
        if state is not None and not torch.is_inference_mode_enabled():  # autograd cannot save inference tensors
            self._cache[key] = (state, result)
        return result

    def _state(self, static: bool) -> list[int] | None:
        """Versions and addresses of the tensors, which differ after any change; None for tensors without versions."""
        tensors = self._structure if static or self.mask is None else (self.mask, *self._structure)
        try:
            state = [number for tensor in tensors for number in (tensor._version, tensor.data_ptr())]
        except RuntimeError:  # tensors made in inference mode count no versions
            return None
        if self.cu_seqlens.is_cuda and not static:
            state.append(torch._C._cuda_getCurrentRawStream(self.cu_seqlens.device.index))
        return state

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, value)
        structure = [tensor for name in STRUCTURE if (tensor := getattr(self, name)) is not None]
        object.__setattr__(self, "_structure", tuple(structure))
        plain = all(type(tensor) is torch.Tensor for tensor in (*structure, self.mask) if tensor is not None)
        object.__setattr__(self, "_is_plain", plain)
        object.__setattr__(self, "_cache", {})

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(
            f"{name}: a PackedBatch is immutable; make a new one with batch.replace({name}=...), or refill the tensor "
            f"in place"
        )

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{name}: a PackedBatch is immutable; make a new one without it")


def _is_capturing(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
