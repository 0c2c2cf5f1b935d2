"""The policy loss: straight to the backend, as a node of autograd, or as an operator."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, get_type_hints

import torch

from ..backends import is_reference, resolve
from ..checks import check, check_dtype, check_shape, refuse_tangent
from ..metrics import SLOTS
from ..specs import (
    BOOLS_OF_TOKENS,
    FLOATS_OF_TOKENS,
    MOST_ROW_CORRECTIONS,
    Action,
    CorrectionSpec,
    Exchange,
    Head,
    LevelKind,
    LevelSpec,
    PolicyLossInputs,
    PolicyLossSpec,
    Reduction,
    Statistic,
    TermSpec,
    Unit,
)
from .library import (
    OPERATORS,
    TRANSFORM_IN_COMPILED,
    VMAP,
    check_count,
    check_native,
    check_offsets,
    check_operand,
    is_batched,
    is_seen,
    is_traced,
    keeps_hooked,
    node,
    register,
)

SECOND_DERIVATIVE = (
    "hpo_core.policy_loss: second derivatives are not supported (the backward holds dL/dlogp, not a graph); "
    "use backend='reference' to differentiate twice"
)

Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]  # loss, metrics, grad, loss_t


def policy_loss(
    inputs: PolicyLossInputs,
    spec: PolicyLossSpec,
    backend: str | None,
    want_tokens: bool,
    exchange: Exchange | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Loss (differentiable in ``inputs.logp``), metrics vector, and loss_t in the shape of logp if wanted; not for the
    reference backend. ``exchange``: only where nothing is :func:`is_traced`."""
    logp = inputs.logp
    refuse_tangent("policy_loss", logp)
    want_grad = logp.requires_grad and torch.is_grad_enabled()
    if not is_traced(logp):
        run = resolve("gates", logp, backend).policy_loss
        # The gradient has collectives of its own, and all ranks must make the same number of them: also a rank without
        # tokens, whose logp may require no gradient.
        computed = want_grad or (exchange is not None and torch.is_grad_enabled())
        loss, metrics, grad, tokens = run(_contiguous(inputs), spec, computed, want_tokens, exchange)
        if want_grad:
            loss, _ = _apply(logp, (loss, grad), backend)
    elif torch._C._are_functorch_transforms_active():
        if torch.compiler.is_compiling():
            fix = ", or call policy_loss_and_grad there"
            raise RuntimeError(TRANSFORM_IN_COMPILED.format("policy_loss") + fix)
        call = _Call(spec, backend, want_tokens)
        loss, _ = _apply_in_transform(logp, inputs, call)
        metrics, tokens = call.metrics, call.tokens
    else:
        loss, metrics, _, tokens = _through_operator(_contiguous(inputs), spec, backend, want_grad, want_tokens)
    return loss, metrics, tokens if want_tokens else None


def policy_loss_and_grad(
    inputs: PolicyLossInputs, spec: PolicyLossSpec, backend: str | None, exchange: Exchange | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss, metrics vector and dL/dlogp in its shape, without autograd; not for the reference backend."""
    if inputs.logp.requires_grad:
        inputs = inputs._replace(logp=inputs.logp.detach())
    inputs = _contiguous(inputs)
    if is_traced(inputs.logp):
        loss, metrics, grad, _ = _through_operator(inputs, spec, backend, True, False)
    else:
        loss, metrics, grad, _ = resolve("gates", inputs.logp, backend).policy_loss(inputs, spec, True, False, exchange)
    assert grad is not None
    return loss, metrics, grad


def _through_operator(
    inputs: PolicyLossInputs, spec: PolicyLossSpec, backend: str | None, want_grad: bool, want_tokens: bool
) -> Outputs:
    outputs: Outputs = OPERATORS.policy_loss(*inputs, *_numbers_of(spec), backend or "", want_grad, want_tokens)
    return outputs


def _contiguous(inputs: PolicyLossInputs) -> PolicyLossInputs:
    """Kernels count tokens and know no shapes, but they need them one after the other."""
    return inputs if inputs.logp.is_contiguous() else inputs._replace(logp=inputs.logp.contiguous())


class _PolicyLoss(torch.autograd.Function):
    """Hands on loss and dL/dlogp, computed before, and saves the second and nothing else; the backward is one
    multiplication, or none.

    logp comes as it is, ``[B, L]`` too: a view of it in the graph would cost as much again as this node.
    """

    @staticmethod
    def forward(
        ctx: Any, logp: torch.Tensor, outputs: tuple[torch.Tensor, torch.Tensor], backend: str | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.backend = backend
        _remember(ctx, outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, loss_gradient: torch.Tensor | None, grad_gradient: torch.Tensor | None) -> Any:
        return _scaled(ctx, loss_gradient, grad_gradient, in_place=True), None, None


class _Call:
    """One call on its way through a transform's node, and its outputs beside those of the node."""

    metrics: torch.Tensor
    tokens: torch.Tensor | None

    def __init__(self, spec: PolicyLossSpec, backend: str | None, want_tokens: bool) -> None:
        self.spec, self.backend, self.want_tokens = spec, backend, want_tokens


def _forward_in_transform(
    logp: torch.Tensor, inputs: PolicyLossInputs, call: _Call
) -> tuple[torch.Tensor, torch.Tensor | None]:
    inputs = _contiguous(inputs)
    if is_seen(inputs.logp):
        results = _through_operator(inputs, call.spec, call.backend, True, call.want_tokens)
    else:
        results = resolve("gates", inputs.logp, call.backend).policy_loss(inputs, call.spec, True, call.want_tokens)
    loss, call.metrics, grad, call.tokens = results
    return loss, grad


def _remember(ctx: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
    # grad stays differentiable on purpose: a second derivative comes through it, and is refused there.
    ctx.set_materialize_grads(False)
    ctx.is_hooked = keeps_hooked()
    ctx.save_for_backward(output[1])


_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
# torch.func wants the node in two parts, which costs microseconds, and takes its wrappers off the inputs.
_apply_in_transform = node(
    "policy_loss",
    _forward_in_transform,
    lambda ctx, inputs, output: _remember(ctx, output),
    lambda ctx, *gradients: (_scaled(ctx, *gradients), None, None),
    VMAP.format("policy_loss", "call the loss once for each batch"),
)
# The same without the part for torch.func: Function.apply inspects the signature of forward at every call, which
# takes as long as all the rest.
_apply: Any = super(torch.autograd.Function, _PolicyLoss).apply


def _scaled(
    ctx: Any, loss_gradient: torch.Tensor | None, grad_gradient: torch.Tensor | None, in_place: bool = False
) -> torch.Tensor | None:
    """dL/dlogp times the incoming gradient; ``in_place``: where no caller has dL/dlogp."""
    if grad_gradient is not None:
        raise RuntimeError(SECOND_DERIVATIVE)
    if loss_gradient is None:
        return None
    grad: torch.Tensor = ctx.saved_tensors[0]
    if in_place and not ctx.is_hooked and hands_on(loss_gradient):
        return times(grad.detach(), loss_gradient, ctx.backend)
    return loss_gradient * grad


def hands_on(factor: torch.Tensor) -> bool:
    """Whether the product with the saved tensor can stand in its memory, which no later backward needs. In a backward
    that records a graph the product is an operation of the graph, which refuses second derivatives."""
    recorded = torch.is_grad_enabled() or factor.requires_grad
    return not (is_traced(factor) or recorded or _keeps_graph() or is_batched(factor))


def times(values: torch.Tensor, factor: torch.Tensor, backend: str | None) -> torch.Tensor:
    """``values *= factor``. A plain ``backward()`` sends 1: a CPU reads it here, another device in the kernel,
    because reading it here would be a synchronisation."""
    if factor.is_cpu:
        return values if factor.item() == 1.0 else values.mul_(factor)
    if values.is_contiguous() and factor.dtype is torch.float32 and not is_reference(values, backend):
        resolve("gates", values, backend).scale(values, factor)
        return values
    return values.mul_(factor)


def _save(ctx: Any, inputs: Any, output: Outputs) -> None:
    """Save the gradient for the backward of the operator, which has four outputs."""
    _, metrics, grad, tokens = output
    ctx.mark_non_differentiable(*(tensor for tensor in (metrics, tokens) if tensor is not None))
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(grad)


def _backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    loss_gradient, _, grad_gradient, _ = gradients
    return _scaled(ctx, loss_gradient, grad_gradient), *[None] * (len(ctx.needs_input_grad) - 1)


_OF_TYPES = {torch.Tensor: "Tensor", torch.Tensor | None: "Tensor?", bool: "bool"}
INPUTS = "".join(f"{_OF_TYPES[kind]} {name}, " for name, kind in get_type_hints(PolicyLossInputs).items())


def _policy_loss(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    *tensors, structure, numbers, backend, want_grad, want_tokens = arguments
    inputs = PolicyLossInputs(*tensors)
    check_native(inputs.logp, backend, "torch.ops.hpo_core.policy_loss", "policy_loss")
    run = resolve("gates", inputs.logp, backend or None).policy_loss
    loss, metrics, grad, tokens = run(inputs, _spec_of(tuple(structure), tuple(numbers)), want_grad, want_tokens)
    nothing = inputs.logp.new_empty(0)
    return loss, metrics, nothing if grad is None else grad, nothing.clone() if tokens is None else tokens


def _policy_loss_fake(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    logp, want_grad, want_tokens = arguments[0], *arguments[-2:]
    metrics = logp.new_empty(len(SLOTS), dtype=torch.float64)
    grad, tokens = (torch.empty_like(logp) if want else logp.new_empty(0) for want in (want_grad, want_tokens))
    return logp.new_empty(()), metrics, grad, tokens


# The form of a spec: one of everything. Operators take its kinds and its numbers in the order of the fields.
_LEVEL = LevelSpec(Unit.STEP, LevelKind.IDENTITY)
_NO_CORRECTION = CorrectionSpec(
    Statistic.LOG_RATIO, Reduction.MEAN, Action.MASK, False, False, (-math.inf, -math.inf), (math.inf, math.inf)
)
_STRUCTURE, _NUMBERS = 19, 28  # of a spec without levels and corrections of rows
_OF_LEVEL, _OF_CORRECTION = (4, 9), (5, 4)


def _form(levels: int, row_corrections: int) -> PolicyLossSpec:
    rows = (_NO_CORRECTION,) * row_corrections
    return PolicyLossSpec(levels=(_LEVEL,) * levels, term=TermSpec(), correction=_NO_CORRECTION, row_corrections=rows)


def _levels_in(structure: Sequence[int]) -> int:
    return (len(structure) - _STRUCTURE - _OF_CORRECTION[0] * structure[2]) // _OF_LEVEL[0]


def _numbers_of(spec: PolicyLossSpec) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """A spec as operator arguments: its structure, and its numbers."""
    kinds = [int(spec.term is not None), int(spec.correction is not None), len(spec.row_corrections)]
    numbers: list[float] = []
    term = TermSpec() if spec.term is None else spec.term
    correction = _NO_CORRECTION if spec.correction is None else spec.correction
    form = _form(len(spec.levels), len(spec.row_corrections))
    _take_apart(spec._replace(term=term, correction=correction), form, kinds, numbers)
    return tuple(kinds), tuple(numbers)


def _take_apart(value: Any, form: Any, kinds: list[int], numbers: list[float]) -> None:
    if isinstance(form, tuple):
        for each, of in zip(value, form, strict=True):
            _take_apart(each, of, kinds, numbers)
    elif isinstance(form, float):
        numbers.append(value)
    else:
        kinds.append(int(value))


@functools.lru_cache(maxsize=256)  # a compiled function asks twice in every call
def _spec_of(structure: tuple[int, ...], numbers: tuple[float, ...]) -> PolicyLossSpec:
    has_term, has_correction, row_corrections, *kinds = structure
    form = _form(_levels_in(structure), row_corrections)
    spec: PolicyLossSpec = _put_together(form, iter(kinds), iter(numbers))
    return spec._replace(term=spec.term if has_term else None, correction=spec.correction if has_correction else None)


def _put_together(form: Any, kinds: Iterator[int], numbers: Iterator[float]) -> Any:
    if isinstance(form, tuple):
        parts = [_put_together(each, kinds, numbers) for each in form]
        return type(form)(*parts) if hasattr(form, "_fields") else tuple(parts)
    return next(numbers) if isinstance(form, float) else type(form)(next(kinds))


def _check_loss(*arguments: Any) -> None:
    *tensors, structure, numbers, _, _, _ = arguments
    levels, rows = (_levels_in(structure), structure[2]) if len(structure) >= _STRUCTURE else (-1, 0)
    check(
        levels >= 0
        and 0 <= rows <= MOST_ROW_CORRECTIONS
        and len(structure) == _STRUCTURE + _OF_LEVEL[0] * levels + _OF_CORRECTION[0] * rows
        and len(numbers) == _NUMBERS + _OF_LEVEL[1] * levels + _OF_CORRECTION[1] * rows,
        "structure: expected that of a gate, got {} kinds and {} numbers",
        len(structure),
        len(numbers),
    )
    spec = _spec_of(tuple(structure), tuple(numbers))
    check(
        all(each.of_segments for each in spec.row_corrections), "structure: expected corrections of rows over segments"
    )
    needs = ["target"] if spec.head in (Head.TARGET, Head.NEGATIVE_AWARE) else []
    needs += ["correction_second"] if spec.correction is not None or spec.row_corrections else []
    inputs = PolicyLossInputs(*tensors)
    # Shapes do not tell leaves that are rows from parts of rows, whose factor another thread may not have computed yet.
    check(
        not spec.row_corrections or inputs.leaf_begin is None,
        "leaf_begin: expected None beside corrections of rows, which need whole rows as leaves, got a tensor; "
        "drop leaf_begin, leaf_end and leaf_row, or multiply the factors of rows into token_weight",
    )
    check_inputs(inputs, levels, needs)


# Tensors that come together.
_SETS = (("score", "threshold"), ("leaf_begin", "leaf_end", "leaf_row"))


def check_inputs(inputs: PolicyLossInputs, levels: int, needs: Sequence[str]) -> None:
    """The tensors of an operator, and that those are there which a spec reads."""
    logp, rows = inputs.logp, (inputs.weights.numel(),)
    for names in (*_SETS, *((name,) for name in needs)):
        given = [name for name in names if getattr(inputs, name) is not None]
        missing = [name for name in names if name not in given]
        if missing and (given or names not in _SETS):
            raise ValueError(f"{missing[0]}: expected a tensor{f' beside {given[0]}' if given else ''}, got None")

    check(
        inputs.kl_weight is None or inputs.ref_logp is not None,
        "ref_logp: expected a tensor beside kl_weight, got None; pass it, or drop the factors on its penalty",
    )

    def of_tokens(*names: str, dtype: torch.dtype = torch.float32) -> None:
        for name in names:
            tensor = getattr(inputs, name)
            if tensor is not None:  # one after the other, or in the shape of logp
                shape = logp.shape if tensor.shape == logp.shape else (logp.numel(),)
                check_operand(name, tensor, shape, (dtype,), ("logp", logp))

    check_dtype("logp", logp, (torch.float32,), "use logp.float()")
    of_tokens(*FLOATS_OF_TOKENS)
    of_tokens(*BOOLS_OF_TOKENS, dtype=torch.bool)
    for name, per_token in (("advantages", inputs.advantage_per_token), ("target", inputs.target_per_token)):
        if per_token:
            of_tokens(name)
        else:
            check_operand(name, getattr(inputs, name), rows, (torch.float32,), ("logp", logp), "weights")
    check_operand("weights", inputs.weights, rows, (torch.float32,), ("logp", logp), "weights")
    check_operand("threshold", inputs.threshold, (1,), (torch.float32,), ("logp", logp))
    check_offsets("cu_seqlens", inputs.cu_seqlens, ("logp", logp))
    check_shape("cu_seqlens", inputs.cu_seqlens, (rows[0] + 1,), "[S + 1] (weights are [S])")
    check_count("leaf_begin", inputs.leaves)
    for name in ("leaf_begin", "leaf_end", "leaf_row"):
        check_operand(name, getattr(inputs, name), (inputs.leaves,), (torch.int64,), ("logp", logp), "leaf_begin")
    check_operand("ancestors", inputs.ancestors, (levels, inputs.leaves), (torch.int64,), ("logp", logp), "leaf_begin")


register(
    f"policy_loss({INPUTS}int[] structure, float[] numbers, str backend, bool want_grad, bool want_tokens) "
    "-> (Tensor loss, Tensor metrics, Tensor grad, Tensor tokens)",
    _policy_loss,
    _policy_loss_fake,
    _check_loss,
    setup_context=_save,
    backward=_backward,
)
