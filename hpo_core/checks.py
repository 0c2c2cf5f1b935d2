"""Checks of arguments. Every error has the argument's name, the expected and the given value, and the fix."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

Tensor = torch.Tensor
is_compiling = torch.compiler.is_compiling
INTEGERS = (torch.int32, torch.int64)
REFERENCE = "reference"  # the backend that is the definition, in plain PyTorch

_ROUNDING = (
    "16-bit rounding of a log-probability is up to 1.6e-2 a token, more than most clips, and 8 bits are worse; compute "
    "log-probabilities in float32 (logits.float() before log_softmax)"
)


# Arguments for which 16 bits are too coarse, and the reason.
_PRECISE = {
    **dict.fromkeys(("old_logp", "ref_logp", "rollout_logp"), _ROUNDING),
    "weights": "16-bit rounding changes the step by up to 0.4 %, that of 8 bits by more; compute them in float32",
}
_COARSE = "16-bit log-probabilities and entropies are too coarse; compute and store them in float32"
_IDS = "are these ids of tokens?"
_MEASURED = ("old_logp", "ref_logp", "rollout_logp", "entropy")  # integers there are most likely ids of tokens


def check(condition: bool, message: str, *values: object) -> None:
    """Raise ``ValueError`` unless ``condition``. ``message`` is formatted only on failure: a check that passes is
    cheap."""
    if not condition:
        raise ValueError(message.format(*map(shown, values)))


def require_type(condition: bool, message: str, *values: object) -> None:
    """Raise ``TypeError`` unless ``condition``."""
    if not condition:
        raise TypeError(message.format(*map(shown, values)))


class _Text(str):
    """Text without quotes in a message, also under ``!r``."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


_LONGEST = 200  # characters of a value in a message


def shown(value: object) -> object:
    """A value as one short line of a message."""
    if isinstance(value, str | type):
        return value
    if inspect.isroutine(value) or isinstance(value, functools.partial):
        name = getattr(value, "__name__", "functools.partial")
        is_ours = (getattr(value, "__module__", None) or "").startswith("hpo_core.")  # most likely a constructor
        return _Text(f"the function {name}" + (f"; call it: {name}({_needed(value)})" if is_ours else ""))
    text = repr(value)
    if len(text) <= _LONGEST and "\n" not in text:
        return value
    if isinstance(value, Tensor):
        return _Text(f"a tensor {list(value.shape)} of {dtype_name(value.dtype)}")
    return _Text(" ".join(text[:_LONGEST].split()) + " ...")


def _needed(function: Any) -> str:
    """The parameters that a call of the function cannot leave out."""
    parameters = inspect.signature(function).parameters.values()
    return ", ".join(each.name for each in parameters if each.default is each.empty and each.kind < each.VAR_POSITIONAL)


def check_shape(name: str, tensor: torch.Tensor, shape: Sequence[int], meaning: str, fix: str = "") -> None:
    """``meaning`` spells the expected shape in the vocabulary of the docs, for example ``[S] (one per row)``."""
    if tuple(tensor.shape) != tuple(shape):
        tail = f"; {fix}" if fix else ""
        raise ValueError(f"{name}: expected shape {meaning} = {list(shape)}, got {list(tensor.shape)}{tail}")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_dtype(name: str, tensor: torch.Tensor, allowed: Sequence[torch.dtype], fix: str) -> None:
    if tensor.dtype not in allowed:
        names = " or ".join(map(dtype_name, allowed))
        raise TypeError(f"{name}: expected dtype {names}, got {dtype_name(tensor.dtype)}; {fix}")


def check_floating(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_floating_point():
        raise TypeError(f"{name}: expected floating point, got {dtype_name(tensor.dtype)}; use {name}.float()")


def check_ids(name: str, tensor: torch.Tensor) -> None:
    is_narrow = tensor.dtype in (torch.int8, torch.int16, torch.uint8, torch.uint16, torch.uint32)
    fix = f"use {name}.to(torch.int64)" if is_narrow else "renumber or hash them to int64 first"
    check_dtype(name, tensor, INTEGERS, fix)


def check_precise(name: str, tensor: torch.Tensor, fix: str = "") -> None:
    """Check that the tensor is in float32 or float64. Without a ``fix`` it is log-probabilities or entropies."""
    fix = fix or (_COARSE if tensor.is_floating_point() else _IDS)
    check_dtype(name, tensor, (torch.float32, torch.float64), fix)


def check_scalar(name: str, tensor: torch.Tensor, device: torch.device, whose: str) -> None:
    check_precise(name, tensor, f"use {name}.float()")
    check(tensor.dim() == 0, "{}: expected a 0-dim tensor, got shape {}", name, list(tensor.shape))
    check_device(name, tensor, device, whose)


def check_real(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_complex() or tensor.is_quantized:
        raise TypeError(f"{name}: expected real numbers, got {dtype_name(tensor.dtype)}; use .real or .dequantize()")


def check_device(name: str, tensor: torch.Tensor, device: torch.device, whose: str) -> None:
    if tensor.device != device:
        # A batch is made on the CPU unless its tensors are elsewhere; the tokens are where training is.
        moved, to = ("batch", tensor.device) if whose == "the batch" and device.type == "cpu" else (name, device)
        raise ValueError(
            f"{name}: expected device {device} (that of {whose}), got {tensor.device}; use {moved}.to({str(to)!r})"
        )


# ----------------------------------------------------------------------------------------------- memory of tensors


def examined(name: str, tensor: Any, meaning: str = "") -> torch.Tensor:
    """The argument as a tensor whose memory kernels can read; every tensor argument passes this one check.

    A pending collective is awaited. A lazy tensor (a negated view, zeros without memory) is materialised. A tensor of a
    tracer passes unchanged. Any other tensor without dense memory of its own is refused by name.
    """
    if type(tensor) is not Tensor:
        tensor = _unwrapped(name, tensor, meaning)
    if is_compiling() or (type(tensor) is not Tensor and is_traced()):  # torch warns of the address of a fake
        return tensor  # type: ignore[no-any-return]
    try:
        # A wrapper has no memory: its address is an offset into the wrapped tensor, the address of its storage is 0.
        has_memory = tensor.data_ptr() and (type(tensor) is Tensor or tensor.untyped_storage().data_ptr())
        if has_memory and not tensor.is_neg() and not tensor.is_nested:
            return tensor  # type: ignore[no-any-return]
    except RuntimeError:  # it has no address
        pass
    return _materialised(name, tensor)


def _tensor_meant(name: str, value: Any, meaning: str) -> str:
    """How to get at the tensor that was meant."""
    are_ids = name.partition("[")[0].endswith(("ids", "keys"))
    if value is None:
        return "; pass torch.zeros(n, dtype=torch.int64) if all units have one id" if are_ids else ""
    if hasattr(value, "as_mask"):
        return "; its mask is .as_mask().mask"
    if isinstance(value, torch.nn.Module):
        return "; pass its .weight"
    if name == "weights" and isinstance(value, str):
        return "; the functions of hpo_core.aggregation make one"
    if hasattr(value, "logits"):
        return "; pass its .logits"
    if hasattr(value, "cu_seqlens"):
        field = "group_ids" if name == "ids" else name
        if isinstance(getattr(value, field, None), Tensor):
            return f"; pass its .{field}"
        return f"; it has no {field}" if field.endswith("ids") else "; a batch goes to batch=, if the call has it"
    of_names = isinstance(value, list | tuple) and any(isinstance(each, str | bytes) for each in value)
    fields = getattr(value, "_fields", ())
    if isinstance(value, tuple) and fields and any(isinstance(each, Tensor) for each in value):
        return f"; pass one of its fields, such as .{fields[0]}"
    if isinstance(value, int | float):
        shaped = f"; make one of that shape, such as torch.full((n,), {value})"
        return (
            shaped if meaning or name.endswith("ids") else f"{shaped}, or torch.tensor({float(value)}) if it is 0-dim"
        )
    if of_names or (are_ids and not callable(value)):
        return "; convert it with hpo_core.segments.ids_of"
    return "" if callable(value) or isinstance(value, str | bytes) else "; convert it with torch.as_tensor"


def _unwrapped(name: str, tensor: Any, meaning: str) -> torch.Tensor:
    if not isinstance(tensor, Tensor):
        got = shown(tensor) if inspect.isroutine(tensor) else type(tensor)
        raise TypeError(
            f"{name}: expected a tensor{meaning and ' ' + meaning}, got {got}{_tensor_meant(name, tensor, meaning)}"
        )
    # A module that was never imported has made no tensor.
    collectives = sys.modules.get("torch.distributed._functional_collectives")
    if collectives is not None and isinstance(tensor, collectives.AsyncCollectiveTensor):
        # A clone keeps the autograd graph; the wrapped tensor has none.
        waited: torch.Tensor = tensor.clone() if tensor.requires_grad else tensor.trigger_wait()
        return waited
    return tensor


def _empty(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without elements in the dtype that its name stands for. ``torch.tensor([])`` holds floats; an error
    about them, on a rank that has nothing, would leave the other ranks waiting for its collectives."""
    if not tensor.is_floating_point():
        return tensor
    if name.partition("[")[0].endswith(("ids", "keys")) or name in ("difficulty", "scope", "uid"):
        return tensor.to(torch.int64)
    if name.endswith(("mask", "selected")) or name.startswith("is_"):
        return tensor.to(torch.bool)
    return tensor


def _materialised(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor without an address, or with other numbers in memory, as a dense tensor."""
    if is_traced():
        return tensor
    if tensor.layout is not torch.strided or tensor.is_nested:
        layout = "a nested tensor" if tensor.is_nested else str(tensor.layout)
        fix = f"torch.nested.to_padded_tensor({name}, 0)" if tensor.is_nested else f"{name}.to_dense()"
        raise TypeError(f"{name}: expected a dense tensor, got {layout}; use {fix}")
    if tensor.is_meta:
        return tensor  # there is nothing to read; device checks follow
    if tensor.numel() == 0:
        return _empty(name, tensor)
    if tensor.is_neg():
        return tensor.resolve_neg()
    if tensor._is_zerotensor():
        return tensor.clone()
    kind = type(tensor).__name__
    if kind == "DTensor":
        raise TypeError(
            f"{name}: expected a tensor of this rank, got a DTensor; pass {name}.to_local() for this rank's part or "
            f"{name}.full_tensor() for all of it, with grad_placements=[Partial('avg')] * {name}.device_mesh.ndim to "
            f"train it on ranks with tokens of their own"
        )
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        raise TypeError(
            f"{name}: expected a tensor with memory of its own, got a {kind}; pass the tensor that it stands for"
        )
    raise ValueError(
        f"{name}: expected a tensor with memory, got {tensor.numel()} elements whose storage is freed "
        f"(untyped_storage().resize_(0), as FSDP frees parameters); gather or copy it before the call"
    )


def is_traced() -> bool:
    """Whether tensors may be stand-ins whose numbers nobody can read, inside a tracer or a ``torch.func`` transform."""
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._are_functorch_transforms_active()


def check_units(**given: torch.Tensor | None) -> None:
    """Check tensors of one value per unit by name: all have the shape and the device of the first.

    ``..._ids`` are integers, ``..._mask`` and ``is_...`` bools, everything else floating point.
    """
    (first_name, first), *_ = given.items()
    require_type(isinstance(first, torch.Tensor), "{}: expected a tensor [U], got {}", first_name, type(first))
    assert first is not None
    fix = f"; use {first_name}.flatten() if each number is a unit's" if first.dim() > 1 else ""
    check(first.dim() == 1, "{}: expected shape [U] (one per unit), got {}{}", first_name, list(first.shape), fix)
    for name, tensor in given.items():
        if tensor is None:
            continue
        require_type(isinstance(tensor, torch.Tensor), "{}: expected a tensor [U], got {}", name, type(tensor))
        if name.endswith("ids"):
            check_ids(name, tensor)
        elif name.endswith("mask") or name.startswith("is_"):
            check_dtype(name, tensor, (torch.bool,), f"use {name}.bool()")
        else:
            check_floating(name, tensor)
        check_shape(name, tensor, first.shape, f"[U] (that of {first_name})")
        check_device(name, tensor, first.device, first_name)


def check_places(name: str, places: torch.Tensor, units: torch.Tensor) -> None:
    """One place ``[S]`` for every unit."""
    check_dtype(name, places, INTEGERS, "places are integers")
    check_shape(name, places, units.shape, "[S] (one per unit)")
    check_device(name, places, units.device, "the units")


def check_tokens(batch: Any, **given: torch.Tensor | None) -> None:
    """:func:`check_units` for one value per token of a batch, ``[T]``."""
    for name, tensor in given.items():
        if isinstance(tensor, Tensor):
            check_shape_of_tokens(name, tensor, batch)
    _check_of_batch(batch, batch.total_tokens, "[T] (one per token of the batch)", given)


def check_row_offsets(offsets: torch.Tensor, tokens: int, fix: str = "") -> None:
    """Check that ``cu_seqlens``, here offsets on the host, are those of rows inside the tokens."""
    check(
        int(offsets[0]) == 0,
        "cu_seqlens: expected a first offset of 0, got {}; lengths of rows are for PackedBatch.from_lengths",
        int(offsets[0]),
    )
    falls = offsets[1:] < offsets[:-1]
    is_falling = bool(falls.any())
    row = int(falls.nonzero()[0]) if is_falling else 0
    check(
        not is_falling,
        "cu_seqlens: expected offsets that never decrease, got {} at row {}",
        offsets[row : row + 2].tolist(),
        row,
    )
    last = int(offsets[-1])
    check(last <= tokens, "cu_seqlens: expected a last offset <= {} tokens, got {}" + fix, tokens, last)


def check_shape_of_tokens(name: str, tensor: torch.Tensor, batch: Any) -> None:
    """Check that the tensor is ``[T]``, or ``[B, L]`` beside a padded batch."""
    if tensor.shape == (batch.total_tokens,) or tensor.shape == batch.padded_shape:
        return
    if batch.padded_shape is not None:
        check_shape(name, tensor, batch.padded_shape, "[B, L] (that of the padded batch)")
    fix = "a batch of tensors [B, L] is PackedBatch.from_padded(mask)" if tensor.dim() == 2 else ""
    check_shape(name, tensor, (batch.total_tokens,), "[T] (one per token of the batch)", fix)


def check_rows(batch: Any, **given: torch.Tensor | None) -> None:
    """:func:`check_units` for one value per row of a batch."""
    _check_of_batch(batch, batch.rows, "[S] (one per row)", given)


def _check_of_batch(batch: Any, count: int, meaning: str, given: dict[str, torch.Tensor | None]) -> None:
    check_units(**given)
    for name, tensor in given.items():
        if tensor is not None:
            check_shape(name, tensor, (count,), meaning)
            check_device(name, tensor, batch.device, "the batch")


def keeps_doubles(backend: str | None) -> bool:
    """Whether a call asks for the reference, which alone computes in float64, too."""
    return backend == REFERENCE


def check_precision(dtype: torch.dtype, backend: str | None) -> None:
    """Raise ``TypeError`` for a dtype of ``logp`` other than float32, or float64 with the reference."""
    got = dtype_name(dtype)
    if dtype.is_floating_point and dtype.itemsize < 4:
        raise TypeError(f"logp: expected float32, got {got}; {_ROUNDING}")
    if not keeps_doubles(backend) or dtype != torch.float64:
        raise TypeError(f"logp: expected float32, got {got}; use .float(), or backend='reference' for float64")


def checked_constant(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int, ...] | None,
    meaning: str,
    dtype: torch.dtype,
    device: torch.device,
    whose: str = "logp",
) -> torch.Tensor:
    """A checked constant of the differentiation: contiguous, in the op's dtype, on the device of ``whose``."""
    return as_constant(name, examined(name, tensor, meaning), shape, meaning, dtype, device, whose)


def is_constant(tensor: torch.Tensor, shape: tuple[int, ...] | None, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether :func:`checked_constant` would return the tensor as it is: the one question that the arguments of a usual
    call are asked, because on a few thousand tokens the checks take longer than the kernel. For eager code alone: no
    tracer follows the question for an address."""
    if type(tensor) is not Tensor:
        return False
    try:
        return (
            tensor.shape == shape
            and tensor.dtype is dtype
            and tensor.is_contiguous()
            and not tensor.requires_grad
            and tensor.data_ptr() != 0
            and tensor.device == device
            and not tensor.is_neg()
            and forward_ad._current_level < 0
        )
    except RuntimeError:  # a nested tensor has no shape, a sparse one no address
        return False


def as_constant(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int, ...] | None,
    meaning: str,
    dtype: torch.dtype,
    device: torch.device,
    whose: str = "logp",
) -> torch.Tensor:
    """:func:`checked_constant` for a tensor that is already examined."""
    if shape is not None and tensor.shape != shape:
        check_shape(name, tensor, shape, meaning)
    if tensor.device != device:
        check_device(name, tensor, device, whose)
    if tensor.requires_grad or has_tangent(tensor):
        found = "requires a gradient" if tensor.requires_grad else "has a tangent (of forward-mode derivatives)"
        swapped = ", and as logp the log-probabilities of the current policy" if name == "old_logp" else ""
        raise ValueError(f"{name}: it is a constant of the loss but {found}; pass {name}.detach(){swapped}")
    if tensor.dtype is not dtype:
        check_real(name, tensor)
        if torch.bool in (dtype, tensor.dtype):
            check_dtype(name, tensor, (dtype,), f"use {name}.{'bool' if dtype == torch.bool else 'float'}()")
        if name in _MEASURED and not tensor.is_floating_point():
            check_dtype(name, tensor, (dtype,), _IDS)
        if tensor.is_floating_point() and tensor.dtype.itemsize < 4 and name in _PRECISE:
            raise TypeError(f"{name}: expected float32, got {dtype_name(tensor.dtype)}; {_PRECISE[name]}")
        tensor = tensor.to(dtype)
    return tensor.contiguous()


def has_tangent(tensor: torch.Tensor) -> bool:
    """Whether forward-mode derivatives go through the tensor. Inside a level of them the call takes microseconds."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def refuse_tangent(function: str, tensor: torch.Tensor) -> None:
    """Raise ``RuntimeError`` if forward-mode derivatives go through a tensor of a function without them."""
    if has_tangent(tensor):
        raise no_forward_mode(function)


def no_forward_mode(function: str) -> RuntimeError:
    return RuntimeError(
        f"hpo_core.{function}: forward-mode derivatives (torch.func.jvp, jacfwd, hessian, dual numbers) are not "
        "supported; use backend='reference'"
    )
