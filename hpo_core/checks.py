"""The one voice of every error: the argument's name, what was expected, what came, and the fix."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["check", "check_dtype", "check_precision", "check_shape", "check_type", "check_units", "checked_constant"]

_ROUNDING = (
    "16-bit rounding of a log-probability is up to 1.6e-2 a token, more than most clips; compute log-probabilities in "
    "float32 (logits.float() before log_softmax)"
)


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


def check_units(**given: torch.Tensor | None) -> None:
    """Checks tensors of one value per unit by name: the first has the shape and the device of the others.

    ``..._ids`` are integers, ``..._mask`` and ``is_...`` bools, everything else floating point.
    """
    (first_name, first), *_ = given.items()
    check_type(isinstance(first, torch.Tensor), "{}: expected a tensor [U], got {}", first_name, type(first))
    assert first is not None
    check(first.dim() == 1, "{}: expected shape [U] (one per unit), got {}", first_name, list(first.shape))
    for name, tensor in given.items():
        if tensor is None:
            continue
        check_type(isinstance(tensor, torch.Tensor), "{}: expected a tensor [U], got {}", name, type(tensor))
        if name.endswith("ids"):
            check_dtype(name, tensor, (torch.int32, torch.int64), "renumber or hash them to int64 first")
        elif name.endswith("mask") or name.startswith("is_"):
            check_dtype(name, tensor, (torch.bool,), f"use {name}.bool()")
        else:
            check_type(
                tensor.is_floating_point(), "{}: expected floating point, got {}; use .float()", name, tensor.dtype
            )
        check_shape(name, tensor, first.shape, f"[U] (that of {first_name})")
        check(tensor.device == first.device, "{}: expected device {}, got {}", name, first.device, tensor.device)


def check_precision(dtype: torch.dtype, backend: str | None) -> None:
    """That of ``logp``: float32, or for the reference float64."""
    got = str(dtype).removeprefix("torch.")
    if dtype in (torch.float16, torch.bfloat16):
        raise TypeError(f"logp: expected float32, got {got}; {_ROUNDING}")
    if backend != "reference" or dtype != torch.float64:
        raise TypeError(f"logp: expected float32, got {got}; use .float(), or backend='reference' for float64")


def checked_constant(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int, ...] | None,
    meaning: str,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """A checked constant of the differentiation: contiguous, in the op's dtype, on logp's device."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor {meaning}, got {type(tensor)}")
    if shape is not None and tensor.shape != shape:
        check_shape(name, tensor, shape, meaning)
    if tensor.device != device:
        raise ValueError(f"{name}: expected device {device} (that of logp), got {tensor.device}")
    if tensor.requires_grad:
        raise ValueError(f"{name}: it is a constant of the loss but requires a gradient; pass {name}.detach()")
    if tensor.dtype is not dtype:
        if dtype == torch.bool or tensor.dtype == torch.bool:
            check_dtype(name, tensor, (dtype,), "convert it")
        if tensor.dtype in (torch.float16, torch.bfloat16) and name in ("old_logp", "ref_logp"):
            raise TypeError(f"{name}: expected float32, got {str(tensor.dtype).removeprefix('torch.')}; {_ROUNDING}")
        tensor = tensor.to(dtype)
    return tensor.contiguous()
