"""Token log-probabilities and entropies from logits: calls of the backend, the autograd node and the operators."""

from __future__ import annotations

from typing import Any

import torch

from ..backends import resolve
from ..checks import check, check_dtype, no_forward_mode, refuse_tangent
from ..specs import LOGITS, LogitRows
from .library import (
    LIBRARY,
    OPERATORS,
    VMAP,
    check_native,
    check_operand,
    define,
    is_traced,
    not_differentiable,
    raising,
    refuse_transform_in_compiled,
    register,
)

SECOND_DERIVATIVE = (
    "hpo_core.token_logprobs: second derivatives are not supported (the backward keeps three numbers a row, not a "
    "graph); use backend='reference' to differentiate twice"
)

IN_PLACE = "inplace_gradient: expected an eager backward, got {}; leave inplace_gradient=False"


def token_logprobs(
    rows: LogitRows, kept: int, backend: str | None, in_place: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Log-probabilities and, where ``kept`` is above 2, entropies, in the shape of the targets and differentiable in
    the logits; ``kept`` statistics ``[kept, T]``. ``in_place``: the backward writes the gradient over the logits.
    Not for the reference backend."""
    logits = rows.logits
    outputs: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]
    refuse_tangent("token_logprobs", logits)
    is_differentiated = logits.requires_grad and torch.is_grad_enabled()
    in_place = in_place and is_differentiated
    if torch._C._are_functorch_transforms_active():
        if not torch.compiler.is_compiling():
            check(not in_place, IN_PLACE, "a transform of torch.func")
            outputs = _apply(*rows, backend or "", kept, in_place)
            return outputs
        refuse_transform_in_compiled("token_logprobs", logits)
    if is_traced(logits):
        check(not in_place, IN_PLACE, "a graph that is traced")
        logp, entropy, statistics = OPERATORS.token_logprobs(*rows, backend or "", kept)
        return logp, entropy if kept > 2 else None, statistics
    if is_differentiated:
        outputs = _apply(*rows, backend or "", kept, in_place)
        return outputs
    return _forward(*rows, backend or "", kept)


# ---------------------------------------------------------------------------------------------------- both directions


def _functions(rows: LogitRows, backend: str) -> Any:
    return resolve("logprobs", rows.logits, backend or None)


def readable(rows: LogitRows) -> LogitRows:
    """The rows with contiguous targets, temperatures and floors, as kernels need them."""
    each, floors = (None if tensor is None else tensor.contiguous() for tensor in (rows.temperatures, rows.floors))
    return rows._replace(targets=rows.targets.contiguous(), temperatures=each, floors=floors)


def _forward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    *given, backend, kept = arguments
    rows = readable(LogitRows(*given))
    outputs: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]
    outputs = _functions(rows, backend).token_logprobs(rows, kept)
    return outputs


def backward(
    rows: LogitRows,
    backend: str,
    statistics: torch.Tensor,
    logp_gradient: torch.Tensor | None,
    entropy_gradient: torch.Tensor | None,
    in_place: bool = False,
) -> torch.Tensor:
    """The gradient of the logits. ``statistics`` are those of whole rows; an upstream gradient of None is 0."""
    gradients = (each if each is None else each.contiguous() for each in (logp_gradient, entropy_gradient))
    rows, functions = readable(rows), _functions(rows, backend)
    into = rows.logits if in_place else None
    grad: torch.Tensor = functions.token_logprobs_backward(rows, statistics, *gradients, into)
    return grad


def _backward(*arguments: Any) -> torch.Tensor:
    *given, backend, statistics, logp_gradient, entropy_gradient, in_place = arguments
    grad = backward(LogitRows(*given), backend, statistics, logp_gradient, entropy_gradient, in_place)
    if in_place:  # so that autograd raises for any other operation that has kept the logits
        torch.autograd.graph.increment_version(grad)
        grad = grad.detach()
    return grad


_TENSORS = ("logits", "targets", "temperatures", "floors")


def save(ctx: Any, inputs: Any, output: Any) -> None:
    rows, (backend, kept, *in_place) = LogitRows(*inputs[: len(LogitRows._fields)]), inputs[len(LogitRows._fields) :]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])
    nothing: dict[str, Any] = dict.fromkeys(_TENSORS)
    ctx.rest = rows._replace(**nothing), backend, kept, in_place
    ctx.save_for_backward(*(getattr(rows, name) for name in _TENSORS), output[2])


def gradient(ctx: Any, logp_gradient: Any, entropy_gradient: Any, apply: Any = None) -> Any:
    others = (None,) * (len(ctx.needs_input_grad) - 1)
    if logp_gradient is None and entropy_gradient is None:
        return None, *others
    rest, backend, kept, in_place = ctx.rest
    *tensors, statistics = ctx.saved_tensors
    statistics = statistics[:3]
    rows = rest._replace(**dict(zip(_TENSORS, tensors, strict=True)))
    if kept == 2:  # the call has no entropy; traced graphs pass zeros as its gradient
        entropy_gradient = None
    apply = apply or _apply_backward
    return apply(*rows, backend, statistics, logp_gradient, entropy_gradient, *in_place), *others


class LogprobsNode(torch.autograd.Function):
    """Keeps the logits and the statistics of their rows."""

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return _forward(*arguments[:-1])  # in_place is for the backward

    setup_context = staticmethod(save)

    @staticmethod
    def backward(ctx: Any, logp_gradient: Any, entropy_gradient: Any, _: Any) -> Any:
        return gradient(ctx, logp_gradient, entropy_gradient)

    jvp = raising(no_forward_mode, "token_logprobs")
    vmap = raising(RuntimeError, VMAP.format("token_logprobs", "pass logits [..., V] and targets [...] as they are"))


_apply: Any = LogprobsNode.apply
_apply_backward = not_differentiable(_backward, SECOND_DERIVATIVE)

# ----------------------------------------------------------------------------------------------------------- operators


_ROWS = (
    "Tensor logits, Tensor targets, Tensor? temperatures, float temperature, int ignore_index, Tensor? floors, "
    "SymInt first, SymInt vocabulary, str backend, "
)
define(f"token_logprobs({_ROWS}int kept) -> (Tensor logp, Tensor entropy, Tensor statistics)")
define(f"token_logprobs_backward({_ROWS}Tensor statistics, Tensor? logp_gradient, Tensor? entropy_gradient) -> Tensor")


def without_none(
    logp: torch.Tensor, entropy: torch.Tensor | None, statistics: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The results of a forward as an operator returns them: no entropy is an empty one."""
    return logp, logp.new_empty(0) if entropy is None else entropy, statistics


def results_like(targets: torch.Tensor, kept: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What :func:`without_none` returns of these targets, in shape and dtype."""
    logp = targets.new_empty(targets.shape, dtype=torch.float32)
    entropy = torch.empty_like(logp) if kept > 2 else None
    return without_none(logp, entropy, logp.new_empty((kept, targets.numel())))


def check_columns(first: int, columns: int, vocabulary: int) -> None:
    check(
        first >= 0 and first + columns <= vocabulary,
        "first, vocabulary: expected that {} columns from `first` on lie in the vocabulary, got {} of {}",
        columns,
        first,
        vocabulary,
    )


def check_upstream(
    like: tuple[str, torch.Tensor],
    targets: torch.Tensor,
    statistics: torch.Tensor,
    logp_gradient: torch.Tensor | None,
    entropy_gradient: torch.Tensor | None,
) -> None:
    """Check what a backward gets beside the operands of its forward."""
    kept = 2 if statistics.shape[:1] == (2,) else 3
    check(kept > 2 or entropy_gradient is None, "statistics: expected 3 of each row for an entropy_gradient, got 2")
    check_operand("statistics", statistics, (kept, targets.numel()), (torch.float32,), like)
    for name, gradient in (("logp_gradient", logp_gradient), ("entropy_gradient", entropy_gradient)):
        check_operand(name, gradient, targets.shape, (torch.float32,), like, "targets")


def _check_rows(rows: LogitRows, backend: str) -> None:
    logits = rows.logits
    check_native(logits, backend, "this operator", "token_logprobs")
    check_dtype("logits", logits, LOGITS, "use logits.float()")
    check(logits.dim() > 0 and logits.shape[-1] > 0, "logits: expected shape [..., V], got {}", list(logits.shape))
    check(
        logits.stride(-1) == 1 or logits.shape[-1] == 1 or logits.numel() == 0,
        "logits: expected a contiguous last dimension, got a stride of {}; use logits.contiguous()",
        logits.stride(-1),
    )
    check_columns(rows.first, logits.shape[-1], rows.vocabulary)
    shape, like = logits.shape[:-1], ("logits", logits)
    check_operand("targets", rows.targets, shape, (torch.int64,), like)
    check_operand("temperatures", rows.temperatures, shape, (torch.float32,), like, "targets")
    check_operand("floors", rows.floors, shape, (torch.float32,), like, "targets")


def _check_forward(*arguments: Any) -> None:
    *given, backend, kept = arguments
    _check_rows(LogitRows(*given), backend)
    check(kept in (2, 3, 4), "kept: expected 2, 3 or 4 statistics, got {}", kept)


def _check_backward(*arguments: Any) -> None:
    *given, backend, statistics, logp_gradient, entropy_gradient = arguments
    rows = LogitRows(*given)
    _check_rows(rows, backend)
    check_upstream(("logits", rows.logits), rows.targets, statistics, logp_gradient, entropy_gradient)


def _operator_gradient(ctx: Any, logp_gradient: Any, entropy_gradient: Any, _: Any) -> Any:
    return gradient(ctx, logp_gradient, entropy_gradient, OPERATORS.token_logprobs_backward)


register(
    "token_logprobs",
    lambda *arguments: without_none(*_forward(*arguments)),
    lambda *arguments: results_like(arguments[1], arguments[-1]),
    _check_forward,
    strided=("logits",),
)
register(
    "token_logprobs_backward",
    lambda *arguments: _backward(*arguments, False),
    lambda logits, *_: logits.new_empty(logits.shape),
    _check_backward,
    strided=("logits",),
)
torch.library.register_autograd("hpo_core::token_logprobs", _operator_gradient, setup_context=save, lib=LIBRARY)
torch.library.register_autograd(
    "hpo_core::token_logprobs_backward", raising(RuntimeError, SECOND_DERIVATIVE), lib=LIBRARY
)
