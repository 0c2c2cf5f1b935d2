"""The ops: straight to the backend on plain tensors, through ``torch.library`` operators where something watches.

In eager mode the dispatcher would cost more than a small kernel, so plain tensors skip it. Under ``torch.compile``, a
dispatch mode or a ``torch.func`` transform, and for fake or other subclassed tensors, the same call goes through
``torch.ops.hpo_core.*``, whose fakes are shape functions. In a compiled graph the numbers of a gate are constants;
sizes are not.
"""

from __future__ import annotations

from typing import Any

import torch

from .backends import resolve
from .metrics import SLOTS
from .specs import (
    Action,
    Aggregate,
    Boundary,
    Center,
    CorrectionSpec,
    EpsMode,
    Exchange,
    GroupNormalisation,
    Head,
    Invalid,
    KLEstimator,
    KLGradient,
    LevelKind,
    LevelSpec,
    OrderRule,
    Penalty,
    PolicyLossInputs,
    PolicyLossSpec,
    Reduction,
    Routing,
    Scale,
    SegmentReduce,
    Statistic,
    TermSpec,
    TokenGate,
    Unit,
)

__all__ = [
    "SECOND_DERIVATIVE",
    "correction",
    "group_normalise",
    "order_statistic",
    "policy_loss",
    "policy_loss_and_grad",
    "row_counts",
    "select",
    "select_top",
    "watched",
    "window_score",
]

SECOND_DERIVATIVE = (
    "hpo_core.policy_loss: second derivatives are not supported (the backward holds dL/dlogp, not a graph); "
    "use backend='reference' to differentiate twice"
)

_LIBRARY: Any = torch.library.Library("hpo_core", "DEF")  # type: ignore[no-untyped-call]
_OPERATORS = torch.ops.hpo_core


def watched(tensor: torch.Tensor) -> bool:
    """Whether a tracer, a transform, a dispatch mode or the tensor's own class must see the call."""
    return (
        torch.compiler.is_compiling()
        or type(tensor) not in (torch.Tensor, torch.nn.Parameter)
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
    )


# ------------------------------------------------------------------------------------------------ policy loss

Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]  # loss, metrics, grad, loss_t


def policy_loss(
    inputs: PolicyLossInputs,
    spec: PolicyLossSpec,
    backend: str | None,
    want_tokens: bool,
    exchange: Exchange | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Loss (differentiable in ``inputs.logp``), metrics vector, and loss_t in the shape of logp if wanted; not for the
    reference backend. ``exchange``: only where nothing is :func:`watched`."""
    logp = inputs.logp
    want_grad = logp.requires_grad and torch.is_grad_enabled()
    others_watch = watched(logp)
    in_transform = others_watch and torch._C._are_functorch_transforms_active()
    if in_transform or (want_grad and not others_watch):
        call = _Call(spec, backend, want_tokens, exchange)
        loss, _ = (_apply_in_transform if in_transform else _apply)(logp, inputs, call)
        metrics, tokens = call.metrics, call.tokens
    else:
        loss, metrics, _, tokens = _run(_contiguous(inputs), spec, backend, want_grad, want_tokens, exchange)
    return loss, metrics, tokens if want_tokens else None


def policy_loss_and_grad(
    inputs: PolicyLossInputs, spec: PolicyLossSpec, backend: str | None, exchange: Exchange | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss, metrics vector and dL/dlogp in its shape, without autograd; not for the reference backend."""
    if inputs.logp.requires_grad:
        inputs = inputs._replace(logp=inputs.logp.detach())
    inputs = _contiguous(inputs)
    loss, metrics, grad, _ = _run(inputs, spec, backend, True, False, exchange)
    assert grad is not None
    return loss, metrics, grad


def _run(
    inputs: PolicyLossInputs,
    spec: PolicyLossSpec,
    backend: str | None,
    want_grad: bool,
    want_tokens: bool,
    exchange: Exchange | None,
) -> Outputs:
    outputs: Outputs
    if watched(inputs.logp):
        outputs = _OPERATORS.policy_loss(*inputs, *_numbers_of(spec), backend or "", want_grad, want_tokens)
    else:
        run = resolve("gates", inputs.logp, backend).policy_loss
        outputs = run(inputs, spec, want_grad, want_tokens, exchange)
    return outputs


def _contiguous(inputs: PolicyLossInputs) -> PolicyLossInputs:
    """Kernels count tokens and know no shapes, but they need them one after the other."""
    return inputs if inputs.logp.is_contiguous() else inputs._replace(logp=inputs.logp.contiguous())


class _Call:
    """One call on its way through a node: an argument of the node costs time, and so does an output."""

    __slots__ = ("backend", "exchange", "metrics", "spec", "tokens", "want_tokens")
    metrics: torch.Tensor
    tokens: torch.Tensor | None

    def __init__(self, spec: PolicyLossSpec, backend: str | None, want_tokens: bool, exchange: Exchange | None) -> None:
        self.spec, self.backend, self.want_tokens, self.exchange = spec, backend, want_tokens, exchange

    def __call__(self, inputs: PolicyLossInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss and dL/dlogp."""
        run = resolve("gates", inputs.logp, self.backend).policy_loss
        loss, self.metrics, grad, self.tokens = run(
            _contiguous(inputs), self.spec, True, self.want_tokens, self.exchange
        )
        return loss, grad


class _PolicyLoss(torch.autograd.Function):
    """Saves dL/dlogp and nothing else; the backward is one multiplication, or none.

    logp comes as it is, ``[B, L]`` too: a view of it in the graph would cost as much again as this node.
    """

    @staticmethod
    def forward(
        ctx: Any, logp: torch.Tensor, inputs: PolicyLossInputs, call: _Call
    ) -> tuple[torch.Tensor, torch.Tensor]:
        output = call(inputs)
        _remember(ctx, output)
        return output

    @staticmethod
    def backward(ctx: Any, loss_gradient: torch.Tensor | None, grad_gradient: torch.Tensor | None) -> Any:
        return _scaled(ctx, loss_gradient, grad_gradient), None, None


class _PolicyLossInTransform(_PolicyLoss):
    """The same in two parts, as torch.func wants them (which costs microseconds); it takes its wrappers off inputs."""

    @staticmethod
    def forward(  # type: ignore[override]
        logp: torch.Tensor, inputs: PolicyLossInputs, call: _Call
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return call(inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        _remember(ctx, output)


def _remember(ctx: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
    # grad stays differentiable on purpose: who differentiates the backward again arrives in it, and is told.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1])


_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
_apply_in_transform: Any = _PolicyLossInTransform.apply
# The same without what torch.func needs: Function.apply inspects the signature of forward at every call, which takes as
# long as all the rest.
_apply: Any = super(torch.autograd.Function, _PolicyLoss).apply


def _scaled(ctx: Any, loss_gradient: torch.Tensor | None, grad_gradient: torch.Tensor | None) -> torch.Tensor | None:
    """dL/dlogp times the incoming gradient."""
    if grad_gradient is not None:
        raise RuntimeError(SECOND_DERIVATIVE)
    if loss_gradient is None:
        return None
    grad: torch.Tensor = ctx.saved_tensors[0]
    return grad if _hands_on(loss_gradient) else loss_gradient * grad


def _hands_on(factor: torch.Tensor) -> bool:
    """Whether the product with the saved tensor can be the saved tensor itself, which nobody will ask for again.

    1 is what a plain ``backward()`` sends, and on a CPU reading it is no synchronisation.
    """
    if _keeps_graph() or not factor.is_cpu or factor.requires_grad or watched(factor):
        return False
    return factor.item() == 1.0


def _save(ctx: Any, inputs: Any, output: Outputs) -> None:
    """For the operator, which has four outputs."""
    _, metrics, grad, tokens = output
    ctx.mark_non_differentiable(*(tensor for tensor in (metrics, tokens) if tensor is not None))
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(grad)


def _backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    loss_gradient, _, grad_gradient, _ = gradients
    return _scaled(ctx, loss_gradient, grad_gradient), *[None] * (len(ctx.needs_input_grad) - 1)


_INPUTS = (
    "Tensor logp, Tensor? old_logp, Tensor advantages, Tensor weights, Tensor cu_seqlens, Tensor? mask, "
    "Tensor? ref_logp, Tensor? entropy, Tensor? score, Tensor? threshold, Tensor? token_mask, Tensor? token_weight, "
    "Tensor? low, Tensor? high, Tensor? row_trajectory, Tensor? trajectory_start, Tensor? trajectory_rows, "
    "bool advantage_per_token, Tensor? piece_begin, Tensor? piece_end, Tensor? piece_row, Tensor? ancestors, "
    "Tensor? target, bool target_per_token, Tensor? penalty_mask, "
)
_LIBRARY.define(
    f"policy_loss({_INPUTS}int[] structure, float[] numbers, str backend, bool want_grad, bool want_tokens) "
    "-> (Tensor loss, Tensor metrics, Tensor grad, Tensor tokens)"
)


def _policy_loss(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    *tensors, structure, numbers, backend, want_grad, want_tokens = arguments
    inputs = PolicyLossInputs(*tensors)
    run = resolve("gates", inputs.logp, backend or None).policy_loss
    loss, metrics, grad, tokens = run(inputs, _spec_of(structure, numbers), want_grad, want_tokens)
    nothing = inputs.logp.new_empty(0)
    return loss, metrics, nothing if grad is None else grad, nothing.clone() if tokens is None else tokens


def _policy_loss_fake(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    logp, want_grad, want_tokens = arguments[0], *arguments[-2:]
    metrics = logp.new_empty(len(SLOTS), dtype=torch.float64)
    grad, tokens = (torch.empty_like(logp) if want else logp.new_empty(0) for want in (want_grad, want_tokens))
    return logp.new_empty(()), metrics, grad, tokens


def _numbers_of(spec: PolicyLossSpec) -> tuple[list[int], list[float]]:
    """A spec as operator arguments: its structure, and its numbers."""
    term = TermSpec() if spec.term is None else spec.term
    flags = (*spec.low_driven, *spec.high_driven, spec.has_level, spec.level_clips, spec.strict, spec.split)
    kinds = (spec.token, spec.routing, spec.head, spec.kl, spec.kl_gradient, term.penalty, spec.term is not None)
    levels = (kind for level in spec.levels for kind in (level.unit, level.gate, level.routing, level.aggregate))
    pairs = (
        spec.token_low, spec.token_high, spec.level_log_low, spec.level_log_high, spec.token_log_low,
        spec.token_log_high, term.head_numbers, term.slope_low, term.slope_high, term.weight_low, term.weight_high,
        term.pre_low, term.pre_high,
    )  # fmt: skip
    bounds = (number for level in spec.levels for number in (*level.low, *level.high, level.slope))
    numbers = [*(number for pair in pairs for number in pair), spec.kl_beta, term.penalty_coefficient, *bounds]
    return [int(kind) for kind in (*kinds, *flags, *levels)], numbers


def _spec_of(structure: list[int], numbers: list[float]) -> PolicyLossSpec:
    token, routing, head, kl, kl_gradient, penalty, has_term = structure[:7]
    low_1, low_2, high_1, high_2, has_level, level_clips, strict, split = map(bool, structure[7:15])
    kinds = iter(structure[15:])
    pairs = [(numbers[at], numbers[at + 1]) for at in range(0, 26, 2)]
    kl_beta, coefficient, *bounds = numbers[26:]
    levels = []
    for index, (unit, gate, level_routing, aggregate) in enumerate(zip(kinds, kinds, kinds, kinds, strict=True)):
        low_3, low_4, low_5, low_6, high_3, high_4, high_5, high_6, slope = bounds[9 * index : 9 * index + 9]
        levels.append(
            LevelSpec(
                Unit(unit), LevelKind(gate), Routing(level_routing), Aggregate(aggregate), (low_3, low_4, low_5, low_6),
                (high_3, high_4, high_5, high_6), slope,
            )
        )  # fmt: skip
    return PolicyLossSpec(
        token=TokenGate(token),
        token_low=pairs[0],
        token_high=pairs[1],
        low_driven=(low_1, low_2),
        high_driven=(high_1, high_2),
        has_level=has_level,
        level_clips=level_clips,
        level_log_low=pairs[2],
        level_log_high=pairs[3],
        routing=Routing(routing),
        head=Head(head),
        kl=KLEstimator(kl),
        kl_gradient=KLGradient(kl_gradient),
        token_log_low=pairs[4],
        token_log_high=pairs[5],
        kl_beta=kl_beta,
        strict=strict,
        levels=tuple(levels),
        split=split,
        term=TermSpec(
            pairs[6], pairs[7], pairs[8], pairs[9], pairs[10], pairs[11], pairs[12], Penalty(penalty), coefficient
        )
        if has_term
        else None,
    )


# ------------------------------------------------------------------------------------- ops without a gradient


def group_normalise(
    values: torch.Tensor,
    ids: torch.Tensor | None,
    mask: torch.Tensor | None,
    apply_mask: torch.Tensor | None,
    spec: GroupNormalisation,
    backend: str | None,
) -> torch.Tensor:
    result: torch.Tensor
    if watched(values):
        kinds = (int(spec.center), int(spec.scale), spec.ddof, spec.eps, int(spec.eps_mode), spec.keep_singletons)
        result = _OPERATORS.group_normalise(values, ids, mask, apply_mask, *kinds, backend or "")
    else:
        result = resolve("advantages", values, backend).group_normalise(values, ids, mask, apply_mask, spec)
    return result


_LIBRARY.define(
    "group_normalise(Tensor values, Tensor? ids, Tensor? mask, Tensor? apply_mask, int center, int scale, int ddof, "
    "float eps, int eps_mode, bool keep_singletons, str backend) -> Tensor"
)


def _group_normalise(
    values: torch.Tensor,
    ids: torch.Tensor | None,
    mask: torch.Tensor | None,
    apply_mask: torch.Tensor | None,
    center: int,
    scale: int,
    ddof: int,
    eps: float,
    eps_mode: int,
    keep_singletons: bool,
    backend: str,
) -> Any:
    spec = GroupNormalisation(Center(center), Scale(scale), ddof, eps, EpsMode(eps_mode), keep_singletons)
    run = resolve("advantages", values, backend or None).group_normalise
    return run(values, ids, mask, apply_mask, spec)


def correction(
    inputs: PolicyLossInputs, spec: CorrectionSpec, backend: str | None, reduce: SegmentReduce | None = None
) -> torch.Tensor:
    """The factor ``[T]`` of ``inputs.logp - inputs.old_logp``, times ``inputs.token_weight``. ``reduce``: only where
    nothing is :func:`watched`."""
    result: torch.Tensor
    if watched(inputs.logp):
        kinds = (int(spec.statistic), int(spec.reduction), int(spec.action), spec.of_segments, spec.strict)
        result = _OPERATORS.correction(*inputs, *kinds, [*spec.low, *spec.high], backend or "")
    else:
        result = resolve("corrections", inputs.logp, backend).correction(inputs, spec, reduce)
    return result


_LIBRARY.define(
    f"correction({_INPUTS}int statistic, int reduction, int action, bool of_segments, bool strict, float[] bounds, "
    "str backend) -> Tensor"
)


def _correction(*arguments: Any) -> Any:
    *tensors, statistic, reduction, action, of_segments, strict, bounds, backend = arguments
    inputs = PolicyLossInputs(*tensors)
    low, high = (bounds[0], bounds[1]), (bounds[2], bounds[3])
    spec = CorrectionSpec(
        Statistic(statistic), Reduction(reduction), Action(action), of_segments, strict, low, high
    )  # fmt: skip
    return resolve("corrections", inputs.logp, backend or None).correction(inputs, spec)


def window_score(
    values: torch.Tensor,
    mask: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    first: int,
    last: int,
    boundary: Boundary,
    invalid: Invalid,
    backend: str | None,
) -> torch.Tensor:
    result: torch.Tensor
    if watched(values):
        kinds = (int(boundary), int(invalid))
        result = _OPERATORS.window_score(values, mask, cu_seqlens, first, last, *kinds, backend or "")
    else:
        run = resolve("entropy", values, backend).window_score
        result = run(values, mask, cu_seqlens, first, last, boundary, invalid)
    return result


_LIBRARY.define(
    "window_score(Tensor values, Tensor? mask, Tensor cu_seqlens, int first, int last, int boundary, int invalid, "
    "str backend) -> Tensor"
)


def _window_score(
    values: torch.Tensor,
    mask: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    first: int,
    last: int,
    boundary: int,
    invalid: int,
    backend: str,
) -> Any:
    run = resolve("entropy", values, backend or None).window_score
    return run(values, mask, cu_seqlens, first, last, Boundary(boundary), Invalid(invalid))


def order_statistic(
    values: torch.Tensor,
    numerator: int,
    denominator: int,
    rule: OrderRule,
    backend: str | None,
    mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of scores, or with ``cu_seqlens`` of the values of tokens, each its own score."""
    result: tuple[torch.Tensor, torch.Tensor]
    if watched(values):
        quantile = (numerator, denominator, int(rule))
        result = _OPERATORS.order_statistic(values, *quantile, backend or "", mask, cu_seqlens)
    else:
        run = resolve("entropy", values, backend).order_statistic
        result = run(values, numerator, denominator, rule, mask, cu_seqlens)
    return result


_LIBRARY.define(
    "order_statistic(Tensor values, int numerator, int denominator, int rule, str backend, Tensor? mask=None, "
    "Tensor? cu_seqlens=None) -> (Tensor threshold, Tensor counts)"
)


def _order_statistic(
    values: torch.Tensor,
    numerator: int,
    denominator: int,
    rule: int,
    backend: str,
    mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> Any:
    run = resolve("entropy", values, backend or None).order_statistic
    return run(values, numerator, denominator, OrderRule(rule), mask, cu_seqlens)


def select(
    values: torch.Tensor,
    threshold: torch.Tensor,
    strict: bool,
    backend: str | None,
    mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Which scores, those of :func:`order_statistic`, are at or above the threshold ``[1]``; strictly: above it."""
    result: torch.Tensor
    if watched(values):
        result = _OPERATORS.select(values, threshold, strict, backend or "", mask, cu_seqlens)
    else:
        result = resolve("entropy", values, backend).select(values, threshold, strict, mask, cu_seqlens)
    return result


_LIBRARY.define(
    "select(Tensor values, Tensor threshold, bool strict, str backend, Tensor? mask=None, Tensor? cu_seqlens=None) "
    "-> Tensor"
)


def _select(
    values: torch.Tensor,
    threshold: torch.Tensor,
    strict: bool,
    backend: str,
    mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> Any:
    return resolve("entropy", values, backend or None).select(values, threshold, strict, mask, cu_seqlens)


def select_top(
    values: torch.Tensor,
    numerator: int,
    denominator: int,
    rule: OrderRule,
    strict: bool,
    backend: str | None,
    mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`order_statistic`, and what :func:`select` selects with its threshold."""
    result: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    if watched(values):
        quantile = (numerator, denominator, int(rule))
        result = _OPERATORS.select_top(values, *quantile, strict, backend or "", mask, cu_seqlens)
    else:
        run = resolve("entropy", values, backend).select_top
        result = run(values, numerator, denominator, rule, strict, mask, cu_seqlens)
    return result


_LIBRARY.define(
    "select_top(Tensor values, int numerator, int denominator, int rule, bool strict, str backend, Tensor? mask=None, "
    "Tensor? cu_seqlens=None) -> (Tensor threshold, Tensor counts, Tensor selected)"
)


def _select_top(
    values: torch.Tensor,
    numerator: int,
    denominator: int,
    rule: int,
    strict: bool,
    backend: str,
    mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> Any:
    run = resolve("entropy", values, backend or None).select_top
    return run(values, numerator, denominator, OrderRule(rule), strict, mask, cu_seqlens)


def row_counts(
    mask: torch.Tensor | None, cu_seqlens: torch.Tensor, total_tokens: int, backend: str | None
) -> torch.Tensor:
    result: torch.Tensor
    if watched(cu_seqlens):
        result = _OPERATORS.row_counts(mask, cu_seqlens, total_tokens, backend or "")
    else:
        result = resolve("segments", cu_seqlens, backend).row_counts(mask, cu_seqlens, total_tokens)
    return result


_LIBRARY.define("row_counts(Tensor? mask, Tensor cu_seqlens, SymInt total_tokens, str backend) -> Tensor")


def _row_counts(mask: torch.Tensor | None, cu_seqlens: torch.Tensor, total_tokens: int, backend: str) -> Any:
    return resolve("segments", cu_seqlens, backend or None).row_counts(mask, cu_seqlens, total_tokens)


# ----------------------------------------------------------------------------------------------- registration


def _register(name: str, implementation: Any, fake: Any) -> None:
    for device in ("CPU", "CUDA"):
        _LIBRARY.impl(name, implementation, device)
    torch.library.register_fake(f"hpo_core::{name}", fake, lib=_LIBRARY)


def _order_statistic_fake(values: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return values.new_empty(1), values.new_empty(2, dtype=torch.int64)


def _select_fake(values: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(values, dtype=torch.bool)


_register("policy_loss", _policy_loss, _policy_loss_fake)
_register("correction", _correction, lambda logp, *_: torch.empty_like(logp))
_register("group_normalise", _group_normalise, lambda values, *_: torch.empty_like(values))
_register("window_score", _window_score, lambda values, *_: torch.empty_like(values))
_register("order_statistic", _order_statistic, _order_statistic_fake)
_register("select", _select, _select_fake)
_register("select_top", _select_top, lambda values, *_: (*_order_statistic_fake(values), _select_fake(values)))
_register("row_counts", _row_counts, lambda mask, cu_seqlens, *_: cu_seqlens.new_empty(cu_seqlens.shape[0] - 1))
torch.library.register_autograd("hpo_core::policy_loss", _backward, setup_context=_save, lib=_LIBRARY)
