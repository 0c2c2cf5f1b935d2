"""Token log-probabilities and entropies from logits: calls of the backend, the autograd node and the operators."""

from __future__ import annotations

from typing import Any

import torch

from ..backends import resolve
from ..checks import check, check_dtype
from ..specs import LOGITS, LogitRows
from .library import (
    OPERATORS,
    VMAP,
    call_differentiable,
    check_native,
    check_operand,
    is_seen,
    is_traced,
    node,
    not_differentiable,
    raising,
    register,
)

SECOND_DERIVATIVE = (
    "hpo_core.token_logprobs: second derivatives are not supported (the backward keeps three numbers a row, not a "
    "graph); use backend='reference' to differentiate twice"
)

IN_PLACE = "inplace_gradient: expected an eager backward, got {}; leave inplace_gradient=False"


_FIELDS = len(LogitRows._fields)


def token_logprobs(
    rows: LogitRows, kept: int, backend: str | None, in_place: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Log-probabilities and, where ``kept`` is above 2, entropies, in the shape of the targets and differentiable in
    the logits; ``kept`` statistics ``[kept, T]``. ``in_place``: the backward writes the gradient over the logits.
    Not for the reference backend."""
    logits = rows.logits
    in_place = in_place and logits.requires_grad and torch.is_grad_enabled()
    if in_place and is_traced(logits):
        is_transformed = torch._C._are_functorch_transforms_active()
        raise ValueError(IN_PLACE.format("a transform of torch.func" if is_transformed else "a graph that is traced"))
    arguments = (*rows, backend or "", kept)
    results = call_differentiable("token_logprobs", [logits], _forward, _apply, arguments, [in_place])
    logp, entropy, statistics = results
    return logp, entropy if kept > 2 else None, statistics


# ---------------------------------------------------------------------------------------------------- both directions


def _functions(rows: LogitRows, backend: str) -> Any:
    return resolve("logprobs", rows.logits, backend or None)


def readable(rows: LogitRows) -> LogitRows:
    """The rows with contiguous targets, temperatures and floors, as kernels need them."""
    each, floors = (None if tensor is None else tensor.contiguous() for tensor in (rows.temperatures, rows.floors))
    return rows._replace(targets=rows.targets.contiguous(), temperatures=each, floors=floors)


def _forward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    *given, backend, kept, _ = arguments  # the last one is in_place, which is for the backward
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


def keep(ctx: Any, rows: Any, statistics: torch.Tensor) -> None:
    """Keep the named tuple of the rows and the statistics for :func:`kept_by`; only the results are differentiable."""
    tensors = {name: each for name, each in rows._asdict().items() if isinstance(each, torch.Tensor)}
    # Autograd keeps no inference tensors, such as the targets of a rollout, so they are copied.
    tensors = {name: each.clone() if each.is_inference() else each for name, each in tensors.items()}
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(statistics)
    ctx.rows, ctx.names = rows._replace(**dict.fromkeys(tensors)), list(tensors)
    ctx.save_for_backward(*tensors.values(), statistics)


def kept_by(ctx: Any) -> tuple[Any, torch.Tensor]:
    *tensors, statistics = ctx.saved_tensors
    return ctx.rows._replace(**dict(zip(ctx.names, tensors, strict=True))), statistics


def save(ctx: Any, inputs: Any, output: Any) -> None:
    rows, (ctx.backend, _, *ctx.in_place) = LogitRows(*inputs[:_FIELDS]), inputs[_FIELDS:]
    keep(ctx, rows, output[2])


def _gradient(ctx: Any, apply: Any, logp_gradient: Any, entropy_gradient: Any) -> Any:
    others = (None,) * (len(ctx.needs_input_grad) - 1)
    if logp_gradient is None and entropy_gradient is None:
        return None, *others
    rows, statistics = kept_by(ctx)
    if len(statistics) == 2:  # the call has no entropy; traced graphs pass zeros as its gradient
        entropy_gradient = None
    return apply(*rows, ctx.backend, statistics[:3], logp_gradient, entropy_gradient, *ctx.in_place), *others


def logprobs_node(forward: Any, setup_context: Any) -> Any:
    """A node that keeps the logits and the statistics of their rows."""
    no_vmap = VMAP.format("token_logprobs", "pass logits [..., V] and targets [...] as they are")

    def backward(ctx: Any, *gradients: Any) -> Any:
        return _gradient(ctx, _apply_backward, *gradients[:2])

    return node("token_logprobs", forward, setup_context, backward, no_vmap)


def _forward_in_node(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    if not is_seen(arguments[0]):
        return _forward(*arguments)
    *given, kept, _ = arguments
    logp, entropy, statistics = OPERATORS.token_logprobs(*given, kept)
    return logp, entropy if kept > 2 else None, statistics


def _backward_in_node(*arguments: Any) -> Any:
    *given, in_place = arguments
    if in_place or not is_seen(given[0]):
        return _backward(*arguments)
    return OPERATORS.token_logprobs_backward(*given)


_apply_backward = not_differentiable(_backward_in_node, SECOND_DERIVATIVE)
_apply = logprobs_node(_forward_in_node, save)

# ----------------------------------------------------------------------------------------------------------- operators


_ROWS = (
    "Tensor logits, Tensor targets, Tensor? temperatures, float temperature, int ignore_index, Tensor? floors, "
    "SymInt first, SymInt vocabulary, str backend, "
)


def without_none(
    logp: torch.Tensor, entropy: torch.Tensor | None, statistics: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The results of a forward as an operator returns them: no entropy is an empty one."""
    return logp, logp.new_empty(0) if entropy is None else entropy, statistics


def results_like(targets: torch.Tensor, kept: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The result of :func:`without_none` for these targets, in shape and dtype."""
    logp = targets.new_empty(targets.shape, dtype=torch.float32)
    entropy = torch.empty_like(logp) if kept > 2 else None
    return without_none(logp, entropy, logp.new_empty((kept, targets.numel())))


def check_last_dimension(logits: torch.Tensor) -> None:
    check(
        logits.stride(-1) == 1 or logits.shape[-1] == 1 or logits.numel() == 0,
        "logits: expected a contiguous last dimension, got a stride of {}; use logits.contiguous()",
        logits.stride(-1),
    )


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
    """Check the arguments of a backward beside the operands of its forward."""
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
    check_last_dimension(logits)
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


register(
    f"token_logprobs({_ROWS}int kept) -> (Tensor logp, Tensor entropy, Tensor statistics)",
    lambda *arguments: without_none(*_forward(*arguments, False)),
    lambda *arguments: results_like(arguments[1], arguments[-1]),
    _check_forward,
    strided=("logits",),
    setup_context=save,
    backward=lambda ctx, *gradients: _gradient(ctx, OPERATORS.token_logprobs_backward, *gradients[:2]),
)
register(
    f"token_logprobs_backward({_ROWS}Tensor statistics, Tensor? logp_gradient, Tensor? entropy_gradient) -> Tensor",
    lambda *arguments: _backward(*arguments, False),
    lambda logits, *_: logits.new_empty(logits.shape),
    _check_backward,
    strided=("logits",),
    backward=raising(RuntimeError, SECOND_DERIVATIVE),
)
