"""Log-probabilities and entropies of tokens from logits: straight to the backend, as a node of autograd, or as
operators."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from ..backends import is_reference, resolve
from ..checks import check, check_dtype, has_tangent
from .library import LIBRARY, OPERATORS, check_operand, define, register, watched

__all__ = ["token_logprobs"]

SECOND_DERIVATIVE = (
    "hpo_core.token_logprobs: second derivatives are not supported (the backward keeps three numbers a row, not a "
    "graph); use backend='reference' to differentiate twice"
)
FORWARD_MODE = (
    "hpo_core.token_logprobs: forward-mode derivatives (torch.func.jvp, jacfwd, hessian, dual numbers) are not "
    "supported; use backend='reference'"
)

_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class Given(NamedTuple):
    """What both directions read. ``temperatures``: one for each target, in place of ``temperature``."""

    logits: torch.Tensor
    targets: torch.Tensor
    temperatures: torch.Tensor | None
    temperature: float
    ignore_index: int
    backend: str

    def call(self) -> tuple[Any, ...]:
        """As the functions of a backend take it."""
        temperature = self.temperature if self.temperatures is None else self.temperatures.contiguous()
        return self.logits, self.targets.contiguous(), temperature, self.ignore_index

    def functions(self) -> Any:
        return resolve("logprobs", self.logits, self.backend or None)


def token_logprobs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float | torch.Tensor,
    ignore_index: int,
    want_entropy: bool,
    backend: str | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Both in the shape of ``targets`` and differentiable in ``logits``; not for the reference backend."""
    if forward_ad._current_level >= 0 and has_tangent(logits):
        raise RuntimeError(FORWARD_MODE)
    each, number = (temperature, 1.0) if isinstance(temperature, torch.Tensor) else (None, temperature)
    given = Given(logits, targets, each, number, ignore_index, backend or "")
    if torch._C._are_functorch_transforms_active() and not torch.compiler.is_compiling():
        logp, entropy, _ = _apply(*given, want_entropy)
    elif watched(logits):
        logp, entropy, _ = OPERATORS.token_logprobs(*given, want_entropy)
    elif logits.requires_grad and torch.is_grad_enabled():
        logp, entropy, _ = _apply(*given, want_entropy)
    else:
        logp, entropy, _ = _forward(*given, want_entropy)
    return logp, entropy if want_entropy else None


# ---------------------------------------------------------------------------------------------------- both directions


def _forward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    *given, want_entropy = arguments
    call = Given(*given)
    outputs: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor] = call.functions().token_logprobs(
        *call.call(), want_entropy
    )
    return outputs


def _backward(*arguments: Any) -> torch.Tensor:
    *given, statistics, logp_gradient, entropy_gradient = arguments
    call = Given(*given)
    gradients = (each if each is None else each.contiguous() for each in (logp_gradient, entropy_gradient))
    grad: torch.Tensor = call.functions().token_logprobs_backward(*call.call(), statistics, *gradients)
    return grad


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    *given, _ = inputs
    call = Given(*given)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])
    ctx.rest = call[3:]
    ctx.save_for_backward(*call[:3], output[2])


def _gradient(ctx: Any, logp_gradient: Any, entropy_gradient: Any, backward: Any) -> Any:
    others = (None,) * (len(ctx.needs_input_grad) - 1)
    if logp_gradient is None and entropy_gradient is None:
        return None, *others
    *tensors, statistics = ctx.saved_tensors
    if statistics.shape[0] == 2:  # no entropy was wanted, and zeros arrive for it where graphs are traced
        entropy_gradient = None
    return backward(*tensors, *ctx.rest, statistics, logp_gradient, entropy_gradient), *others


class _TokenLogprobs(torch.autograd.Function):
    """Keeps the logits and the statistics of their rows."""

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return _forward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _save(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, logp_gradient: Any, entropy_gradient: Any, _: Any) -> Any:
        return _gradient(ctx, logp_gradient, entropy_gradient, _Gradient.apply)


class _Gradient(torch.autograd.Function):
    """The gradient; who differentiates it again is told."""

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return _backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(SECOND_DERIVATIVE)


_apply: Any = _TokenLogprobs.apply

# ----------------------------------------------------------------------------------------------------------- operators


_GIVEN = "Tensor logits, Tensor targets, Tensor? temperatures, float temperature, int ignore_index, str backend, "
define(f"token_logprobs({_GIVEN}bool want_entropy) -> (Tensor logp, Tensor entropy, Tensor statistics)")
define(f"token_logprobs_backward({_GIVEN}Tensor statistics, Tensor? logp_gradient, Tensor? entropy_gradient) -> Tensor")


def _forward_operator(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logp, entropy, statistics = _forward(*arguments)
    return logp, logp.new_empty(0) if entropy is None else entropy, statistics


def _forward_fake(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    targets, want_entropy = arguments[1], arguments[-1]
    logp = targets.new_empty(targets.shape, dtype=torch.float32)
    entropy = torch.empty_like(logp) if want_entropy else logp.new_empty(0)
    return logp, entropy, logp.new_empty((3 if want_entropy else 2, targets.numel()))


def _check_given(given: Given) -> None:
    logits = given.logits
    check(
        not is_reference(logits, given.backend or None),
        "backend: expected a native one for this operator, got {}; call hpo_core.token_logprobs, which serves the "
        "reference, too",
        repr(given.backend) if given.backend else "the reference by default",
    )
    check_dtype("logits", logits, _TYPES, "use logits.float()")
    check(logits.dim() > 0 and logits.shape[-1] > 0, "logits: expected shape [..., V], got {}", list(logits.shape))
    check(
        logits.stride(-1) == 1 or logits.shape[-1] == 1,
        "logits: expected a contiguous last dimension, got a stride of {}; use logits.contiguous()",
        logits.stride(-1),
    )
    shape = logits.shape[:-1]
    check_operand("targets", given.targets, shape, (torch.int64,), ("logits", logits))
    check_operand("temperatures", given.temperatures, shape, (torch.float32,), ("logits", logits), "targets")


def _check_forward(*arguments: Any) -> None:
    *given, _ = arguments
    _check_given(Given(*given))


def _check_backward(*arguments: Any) -> None:
    *tensors, statistics, logp_gradient, entropy_gradient = arguments
    given = Given(*tensors)
    _check_given(given)
    rows = 2 if entropy_gradient is None and statistics.shape[:1] == (2,) else 3
    like = ("logits", given.logits)
    check_operand("statistics", statistics, (rows, given.targets.numel()), (torch.float32,), like)
    for name, gradient in (("logp_gradient", logp_gradient), ("entropy_gradient", entropy_gradient)):
        check_operand(name, gradient, given.targets.shape, (torch.float32,), like, "targets")


def _operator_gradient(ctx: Any, logp_gradient: Any, entropy_gradient: Any, _: Any) -> Any:
    return _gradient(ctx, logp_gradient, entropy_gradient, OPERATORS.token_logprobs_backward)


def _second(ctx: Any, *_: Any) -> Any:
    raise RuntimeError(SECOND_DERIVATIVE)


register("token_logprobs", _forward_operator, _forward_fake, _check_forward, strided=("logits",))
register(
    "token_logprobs_backward",
    _backward,
    lambda logits, *_: logits.new_empty(logits.shape),
    _check_backward,
    strided=("logits",),
)
torch.library.register_autograd("hpo_core::token_logprobs", _operator_gradient, setup_context=_save, lib=LIBRARY)
torch.library.register_autograd("hpo_core::token_logprobs_backward", _second, lib=LIBRARY)
