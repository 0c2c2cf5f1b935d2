"""The registration of the ops with ``torch.library``, and the test for calls that need it.

In eager mode the dispatcher would cost more than a small kernel, so plain tensors skip it. Under ``torch.compile``, a
dispatch mode or a ``torch.func`` transform, and for fake or other subclassed tensors, the same call goes through
``torch.ops.hpo_core.*``, whose fakes are shape functions. In a compiled graph the numbers of a gate are constants,
sizes are not.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, cast, get_type_hints

import torch

from ..backends import is_reference
from ..checks import (
    check,
    check_device,
    check_dtype,
    check_shape,
    examined,
    is_compiling,
    keeps_doubles,
    no_forward_mode,
    refuse_tangent,
)

LIBRARY: Any = torch.library.Library("hpo_core", "DEF")  # type: ignore[no-untyped-call]
OPERATORS = torch.ops.hpo_core
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_PLAIN = (torch.Tensor, torch.nn.Parameter)
# autograd.grad(is_grads_batched=True), which is no transform of torch.func, makes such tensors.
is_batched = torch._C._functorch.is_legacy_batchedtensor
# Looked up once, because every call asks them.
_is_tracing = torch._C._is_tracing  # by torch.jit.trace, which records operators alone
_dispatch_modes = torch._C._len_torch_dispatch_stack
_has_transforms = torch._C._are_functorch_transforms_active
_BATCHED = (
    "{}: vmap of its backward is not supported (torch.func.jacrev is one); leave is_grads_batched=False and take one "
    "gradient after another"
)
VMAP = "hpo_core.{}: torch.func.vmap is not supported; {}"
TRANSFORM_IN_COMPILED = (
    "hpo_core.{}: torch.func transforms of this function inside torch.compile are not supported; take the transform "
    "out of the compiled function"
)


def is_traced(tensor: torch.Tensor) -> bool:
    """Whether a tracer, a transform, a dispatch mode or the tensor's own class must see the call."""
    return is_seen(tensor) or _has_transforms()


def is_seen(tensor: torch.Tensor) -> bool:
    """Whether a tracer, a mode or the tensor's class must see a call behind all transforms, as inside a node."""
    return is_compiling() or _is_tracing() or type(tensor) not in _PLAIN or _dispatch_modes() > 0


def keeps_hooked() -> bool:
    """Whether hooks for saved tensors (torch.utils.checkpoint, save_on_cpu) hold the tensors that autograd keeps. These
    are not ours: one may stand for equal tensors of two nodes."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def raising(error: Callable[..., Exception], *arguments: str) -> Callable[..., Any]:
    """A function of anything that raises this error."""

    def run(*_: Any) -> Any:
        raise error(*arguments)

    return run


def node(
    function: str, forward: Callable[..., Any], setup_context: Any, backward: Callable[..., Any], no_vmap: str
) -> Any:
    """``apply`` of a node of autograd without forward mode and vmap; ``no_vmap``: the error of the latter."""
    methods = {
        "forward": forward,
        "setup_context": setup_context,
        "backward": backward,
        "jvp": raising(no_forward_mode, function),
        "vmap": raising(RuntimeError, no_vmap),
    }
    function_class: Any = type(
        function, (torch.autograd.Function,), {name: staticmethod(each) for name, each in methods.items()}
    )
    return function_class.apply


def call_differentiable(
    function: str,
    tensors: Sequence[torch.Tensor],
    forward: Callable[..., Any],
    apply: Callable[..., Any],
    arguments: Sequence[Any],
    others: Sequence[Any],
    has_operator: bool = True,
) -> Any:
    """The function of the arguments: the node ``apply`` where one of these tensors is differentiated, ``forward`` where
    none is, and in a trace the operator of this name, which does not take the ``others``."""
    for each in tensors:
        refuse_tangent(function, each)
    if torch._C._are_functorch_transforms_active():
        if not torch.compiler.is_compiling():
            return apply(*arguments, *others)
        # Dynamo does not know that the arguments of a transform require a gradient; it knows that their views do.
        if torch.is_grad_enabled() and any(each.view_as(each).requires_grad for each in tensors):
            raise RuntimeError(TRANSFORM_IN_COMPILED.format(function))
    if has_operator and any(is_traced(each) for each in tensors):
        return getattr(OPERATORS, function)(*arguments)
    is_differentiated = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
    return (apply if is_differentiated else forward)(*arguments, *others)


def not_differentiable(function: Callable[..., Any], message: str) -> Any:
    """The function of tensors as a node of autograd, which says so where its result is differentiated."""
    name = message.partition(":")[0]
    no_vmap = _BATCHED.format(name)

    def forward(*arguments: Any) -> Any:
        if any(is_batched(each) for each in arguments if isinstance(each, torch.Tensor)):
            raise RuntimeError(no_vmap)
        return function(*arguments)

    def keep_nothing(*_: Any) -> None:
        pass

    return node(name.removeprefix("hpo_core."), forward, keep_nothing, raising(RuntimeError, message), no_vmap)


def register(
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    check_operands: Callable[..., None],
    strided: Sequence[str] = (),
    setup_context: Any = None,
    backward: Any = None,
) -> None:
    """Register an operator. It repeats the checks of the functions of this package, because users can call it directly.

    ``check_operands`` compares dtypes, shapes and devices, also of fakes. Kernels get examined, contiguous tensors;
    ``strided`` arguments are examined but keep their strides. All three functions get every argument: PyTorch leaves
    out those at the end that have their default. ``setup_context`` and ``backward`` make the gradient.
    """
    LIBRARY.define(schema)
    name = schema.partition("(")[0]
    parameters = _parameters(name)
    defaults = [parameter.default_value for parameter in parameters]

    def run(*arguments: Any) -> Any:
        given = [
            examined(parameter.name, value) if parameter.name in strided else _readable(parameter, value)
            for parameter, value in zip(parameters, (*arguments, *defaults[len(arguments) :]), strict=True)
        ]
        check_operands(*given)
        return implementation(*given)

    def shapes(*arguments: Any) -> Any:
        given = (*arguments, *defaults[len(arguments) :])
        check_operands(*given)
        return fake(*given)

    for device in ("CPU", "CUDA"):
        LIBRARY.impl(name, run, device)
    qualified = f"hpo_core::{name}"
    torch.library.register_fake(qualified, shapes, lib=LIBRARY)
    if backward is not None:
        torch.library.register_autograd(qualified, backward, setup_context=setup_context, lib=LIBRARY)


def operator(
    schema: str, fake: Callable[..., Any], check_operands: Callable[..., None]
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Make an operator of a function: traced tensors go through the operator, plain ones straight to the function.

    The function takes the arguments of the schema by position. Its last one is the backend, None where the operator
    takes ""; where its annotation is an enum, the operator takes an integer.
    """
    name = schema.partition("(")[0]

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        untyped: Any = function
        hints = enumerate(get_type_hints(function).values())
        enums = [(at, kind) for at, kind in hints if isinstance(kind, enum.EnumMeta)]

        def implementation(*arguments: Any) -> Any:
            given = [*arguments[:-1], arguments[-1] or None]
            for at, kind in enums:
                given[at] = kind(given[at])
            return untyped(*given)

        @functools.wraps(function)
        def call(*arguments: Any) -> Any:
            if not is_traced(arguments[like]):
                return untyped(*arguments)
            *given, backend = (int(each) if isinstance(each, enum.IntEnum) else each for each in arguments)
            return getattr(OPERATORS, name)(*given, backend or "")

        register(schema, implementation, fake, check_operands)
        like = [str(each.type) for each in _parameters(name)].index("Tensor")  # the first that is never None
        return cast("Callable[Arguments, Result]", call)

    return decorate


def _parameters(name: str) -> Any:
    return getattr(OPERATORS, name).default._schema.arguments


def _readable(parameter: Any, value: Any) -> Any:
    """The argument with its tensors examined and contiguous."""
    kind = str(parameter.type)
    if kind == "Tensor" or isinstance(value, torch.Tensor):  # an optional tensor may be None
        return examined(parameter.name, value).contiguous()
    if kind.startswith("List[") and "Tensor" in kind:
        return [
            each if each is None else examined(f"{parameter.name}[{at}]", each).contiguous()
            for at, each in enumerate(value)
        ]
    return value


def check_native(tensor: torch.Tensor, backend: str, operator: str, function: str) -> None:
    """Check that a native backend serves the call, because the reference has a graph of its own."""
    check(
        not is_reference(tensor, backend or None),
        "backend: expected a native one for {}, got {}; call hpo_core.{}, which serves the reference, too",
        operator,
        repr(backend) if backend else "the reference by default",
        function,
    )


def check_operand(
    name: str,
    tensor: torch.Tensor | None,
    shape: Sequence[int],
    dtypes: Sequence[torch.dtype],
    like: tuple[str, torch.Tensor],
    shaped: str = "",
) -> None:
    """``like``: the operand that has the device, and the shape unless ``shaped`` names another operand for it."""
    if tensor is not None:
        check_dtype(name, tensor, dtypes, f"use {name}.to({dtypes[0]})")
        check_shape(name, tensor, shape, f"that of {shaped or like[0]}")
        check_device(name, tensor, like[1].device, like[0])


MOST_ROWS = 2**30  # CUDA numbers rows, steps and tiles in 32 bits, and a loop over them may step over the last


def check_count(name: str, count: int) -> None:
    if isinstance(count, torch.SymInt) or is_compiling():  # its bound would be a guard; the operator checks the value
        return
    check(
        count <= MOST_ROWS,
        "{}: expected at most 2^30 rows or segments, which kernels number in 32 bits, got {}; make several calls",
        name,
        count,
    )


def check_offsets(name: str, offsets: torch.Tensor | None, like: tuple[str, torch.Tensor]) -> None:
    """Check the kind of the offsets of rows; kernels check or clamp their values."""
    if offsets is not None:
        is_right = offsets.dim() == 1 and offsets.numel() > 0
        check(is_right, "{}: expected shape [S + 1], got {}", name, list(offsets.shape))
        check_count(name, offsets.numel() - 1)
        check_operand(name, offsets, offsets.shape, (torch.int64,), like)


def check_fraction(numerator: int, denominator: int) -> None:
    check(
        0 <= numerator <= denominator and denominator > 0,
        "numerator: expected a fraction in [0, 1], got {} / {}",
        numerator,
        denominator,
    )


def numbers_of(backend: str) -> tuple[torch.dtype, ...]:
    """The dtypes that a backend computes with."""
    return (torch.float32, torch.float64) if keeps_doubles(backend) else (torch.float32,)
