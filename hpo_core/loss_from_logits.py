"""policy_loss_from_logits: the policy loss and its gradient from a model's logits, for gates on tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from . import ops
from .arguments import check_flag
from .backends import is_reference, resolve
from .batch import PackedBatch, as_batch
from .checks import check, check_dtype, examined, refuse_tangent
from .gates import Channel, RatioGate
from .logprobs import checked_call, token_logprobs
from .losses import policy_loss
from .metrics import Metrics, observed
from .ops.gates import hands_on, times
from .ops.library import not_differentiable
from .ops.logprobs import readable
from .prepared import PolicyLossOptions, check_options, prepare
from .specs import BOOLS_OF_TOKENS, FLOATS_OF_TOKENS, LogitRows, PolicyLossInputs, PolicyLossSpec
from .support import logit_types

if TYPE_CHECKING:
    from typing_extensions import Unpack

SECOND_DERIVATIVE = (
    "hpo_core.policy_loss_from_logits: second derivatives are not supported (the call keeps the gradient, not a "
    "graph); use backend='reference' to differentiate twice"
)

# No label: one of -100 that the mask counts is an error in the data, which gives NaN. The number is not the least of 32
# or 64 bits, because NaN becomes that as an integer.
_NONE = -(2**62) - 1
_CHUNK = 16 << 20  # bytes of logits that a CPU's last-level cache holds between the two passes


class PolicyLossFromLogits(NamedTuple):
    """The result: ``loss`` 0-dim, differentiable in the logits; ``metrics`` still on the device; ``logp`` and
    ``entropy`` of each target, which are constants."""

    loss: torch.Tensor
    metrics: Metrics
    logp: torch.Tensor
    entropy: torch.Tensor


def policy_loss_from_logits(
    logits: torch.Tensor,
    targets: torch.Tensor,
    old_logp: torch.Tensor | None,
    advantages: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    gate: RatioGate | None = None,
    *,
    temperature: float | torch.Tensor = 1.0,
    inplace_gradient: bool = False,
    **options: Unpack[PolicyLossOptions],
) -> PolicyLossFromLogits:
    """:func:`policy_loss` of :func:`token_logprobs`, in one call that reads the logits from memory once.

    ``loss(logp(logits))`` and its gradient equal those of the two calls, to the bit where the incoming gradient is 1.
    Under a gate on tokens the gradient of a token's logits depends on no other token: so the call computes it while
    these logits are in the cache, on the CPU some megabytes at a time, on a GPU some rows. The backward multiplies it
    by the incoming gradient unless that is 1. A GPU reads the logits a second time where its L2 cache holds too few
    rows to keep half of its multiprocessors busy (the backend triton: four rows on each of them).

    Args:
        logits: ``[T, V]`` (or ``[B, L, V]``) float32, bfloat16 or float16, as a model returns them for the batch's
            tokens: the logits of token t predict token t + 1.
        targets: ``[T]`` (or ``[B, L]``) int64 or int32, the tokens. As in :func:`token_logprobs` with ``batch=``, the
            mask leaves out the first token of each row, and logits of tokens outside the mask are not read. A target
            outside ``[0, V)`` that the mask counts, -100 included, is one of the ``nan_tokens``: the loss leaves it
            out, and the gradient of its logits is NaN.
        old_logp, advantages, batch, gate, options: as in :func:`policy_loss`, but for ``report`` and
            ``process_group``, which are refused. The metrics hold the entropy of the logits, unless ``entropy=`` is
            given, which a ``window`` needs.
        temperature: as in :func:`token_logprobs`.
        inplace_gradient: whether the gradient overwrites the logits, so that no second ``[T, V]`` tensor exists. The
            logits must not be a leaf that requires grad, nor be read or written after this call, nor be made under
            hooks for saved tensors or be a view that code of ``torch.compile`` returns, as in :func:`token_logprobs`.

    Traps: the gradient stands in the dtype of the logits before the incoming one multiplies it. In float16 it loses
    the small values that a loss scaler is there to keep: call the two functions, which multiply first.

    Raises:
        ValueError, TypeError: naming the argument. Two kinds of gates are refused: with levels, or corrections over
            more than tokens, the gradient of a token depends on others; corrections that read ``logp``, as on the
            staleness, or on the discrepancy without ``old_logp``, are computed before the call has it. Call the two
            functions. ``torch.compile`` and ``torch.func`` are refused, too.

    >>> import hpo_core as hpo
    >>> logits = torch.tensor([[2.0, 1.0], [0.0, 0.0], [5.0, 5.0]], requires_grad=True)
    >>> batch = hpo.PackedBatch.from_lengths([3]).without_first_tokens()
    >>> out = hpo.policy_loss_from_logits(logits, torch.tensor([0, 0, 1]), None, torch.ones(1), batch)
    >>> out.loss.backward()
    >>> logits.grad
    tensor([[-0.1345,  0.1345],
            [ 0.2500, -0.2500],
            [ 0.0000,  0.0000]])
    """
    check_options(policy_loss_from_logits, options)
    check_flag("inplace_gradient", inplace_gradient)
    logits, targets = examined("logits", logits), examined("targets", targets)
    batch = as_batch(batch)
    _check_alone(old_logp, gate, options)
    backend, reference = options.get("backend"), is_reference(logits, options.get("backend"))
    if reference:
        check(not inplace_gradient, "inplace_gradient: the reference has a graph of its own; leave it False")
        types = logit_types(bool(backend))  # policy_loss takes float64 where a call asks for it
        check_dtype("logits", logits, types, "use logits.float(), or backend='reference' for float64")
        logp, entropy = token_logprobs(logits, targets, temperature, _NONE, batch=batch, backend=backend)
        assert entropy is not None
        if options.get("entropy") is None:
            options["entropy"] = entropy.detach()
        loss, metrics, *_ = policy_loss(logp, old_logp, advantages, batch, gate, **options)
        return PolicyLossFromLogits(loss, metrics, logp.detach(), entropy.detach())
    refuse_tangent("policy_loss_from_logits", logits)
    check(
        not ops.is_traced(logits),
        "logits: expected an eager call, got one in torch.compile, a dispatch mode or torch.func, or logits of a "
        "tensor subclass; call token_logprobs and policy_loss there",
    )
    call = checked_call(logits, targets, temperature, _NONE, batch, None, None, None, inplace_gradient, backend)
    rows = readable(call.rows._replace(logits=logits.detach()))
    unknown = torch.empty(targets.shape, dtype=torch.float32, device=logits.device)
    prepared = prepare(unknown, old_logp, advantages, batch, gate, **options, _logp_known=False)
    inputs, spec = prepared.inputs, prepared.spec
    run, kernels = resolve("gates", logits, backend).policy_loss, resolve("logprobs", logits, backend)

    grad = streams = None
    if logits.requires_grad and torch.is_grad_enabled():
        grad = rows.logits if inplace_gradient else kernels.uninitialised(logits.shape, logits.dtype, logits.device)
        streams = resolve("loss_from_logits", logits, backend).loss_from_logits(rows, inputs, spec, grad)
    streams = streams or _in_chunks(rows, inputs, spec, run, kernels, grad)
    logp, entropy = (call.places.marked(each.view(targets.shape)) for each in streams)
    if inputs.entropy is None:
        inputs = inputs._replace(entropy=entropy)
    loss, vector, *_ = run(inputs._replace(logp=logp), spec, False, False)
    if grad is not None:
        if inplace_gradient:  # every operation that has kept the logits for its own backward is told
            torch.autograd.graph.increment_version(logits)
        loss, _ = _apply(logits, (loss, grad), backend)
    return PolicyLossFromLogits(loss, observed(vector, None, prepared.positive), logp, entropy)


def _check_alone(old_logp: torch.Tensor | None, gate: RatioGate | None, options: PolicyLossOptions) -> None:
    """Check that no token reads another, and that no correction reads the log-probabilities that the call makes."""
    check(
        not options.get("report") and options.get("process_group") is None,
        "report, process_group: policy_loss_from_logits knows neither; call token_logprobs and policy_loss",
    )
    if not isinstance(gate, RatioGate):  # None, or a type that policy_loss refuses
        return
    check(
        not gate.levels and all(each.unit is None for each in gate.corrections),
        "gate: expected one on tokens alone, got {!r}, under which the gradient of a token depends on others; call "
        "token_logprobs and policy_loss",
        gate.name,
    )
    check(
        all(each.channel is Channel.DISCREPANCY for each in gate.corrections),
        "gate: {!r} corrects by logp, which this call makes after its corrections; call token_logprobs and policy_loss",
        gate.name,
    )
    check(
        not gate.corrections or old_logp is not None or options.get("rollout_logp") is None,
        "old_logp: without it {!r} compares rollout_logp with logp, which this call makes after its corrections; pass "
        "old_logp, or call token_logprobs and policy_loss",
        gate.name,
    )


def _in_chunks(
    rows: LogitRows, inputs: PolicyLossInputs, spec: PolicyLossSpec, run: Any, kernels: Any, grad: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of all tokens, and ``grad``, by the kernels of :func:`token_logprobs` and of the
    loss: a chunk of rows goes through all of them before the next one."""
    total, device = rows.targets.numel(), rows.logits.device
    logp = torch.zeros(total + 1, dtype=torch.float32, device=device)  # the last logits predict no token
    entropy = torch.zeros_like(logp)
    for index, begin, end in _chunks(rows.logits):
        part = _part(rows, index)
        tokens = slice(begin + 1, end + 1)  # that these rows of logits predict
        part_logp, part_entropy, statistics = kernels.token_logprobs(part, 3)
        logp[tokens], entropy[tokens] = part_logp.view(-1), part_entropy.view(-1)
        if grad is not None:
            of_logp = torch.zeros(end - begin, dtype=torch.float32, device=device)
            known = _of_tokens(inputs._replace(logp=logp[:total]), tokens.start, min(tokens.stop, total))
            of_logp[: known.logp.numel()] = run(known, spec, True, False)[2]
            into = part.logits if grad is rows.logits else grad[index]
            kernels.token_logprobs_backward(part, statistics, of_logp.view(part.targets.shape), None, into)
    return logp[:total], entropy[:total]


def _chunks(logits: torch.Tensor) -> Iterator[tuple[Any, int, int]]:
    """The index of each chunk of rows that fits the cache, and its first and last row in the flat order."""
    *_, length, vocabulary = logits.shape
    count = logits.numel() // vocabulary
    if not logits.is_cpu:
        yield slice(None), 0, count
        return
    size = max(1, _CHUNK // (vocabulary * logits.element_size()))
    for row in range(count // length if length else 0):
        for begin in range(0, length, size):
            end = min(begin + size, length)
            inside = slice(begin, end)
            yield inside if logits.dim() == 2 else (row, inside), row * length + begin, row * length + end


def _part(rows: LogitRows, index: Any) -> LogitRows:
    tensors: dict[str, Any] = {name: each[index] for name, each in rows._asdict().items() if torch.is_tensor(each)}
    return rows._replace(**tensors)


def _of_tokens(inputs: PolicyLossInputs, begin: int, end: int) -> PolicyLossInputs:
    """The inputs of the tokens from ``begin`` to ``end``; the rows stay, mostly empty."""

    def cut(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.reshape(-1)[begin:end]

    chosen: dict[str, Any] = {name: cut(getattr(inputs, name)) for name in (*FLOATS_OF_TOKENS, *BOOLS_OF_TOKENS)}
    if inputs.advantage_per_token:
        chosen["advantages"] = cut(inputs.advantages)
    if inputs.target_per_token:
        chosen["target"] = cut(inputs.target)
    offsets = inputs.cu_seqlens.clamp(begin, end) - begin
    return PolicyLossInputs(**{**inputs._asdict(), **chosen, "cu_seqlens": offsets})


class _FromLogits(torch.autograd.Function):
    """Returns the loss, and in the backward the gradient of the logits that the call has computed.

    The second output is empty: it leads to the logits without keeping their memory. Under ``create_graph`` the gradient
    depends on it, so that a second differentiation arrives at a node that raises.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, outputs: tuple[torch.Tensor, torch.Tensor], backend: str | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        loss, grad = outputs  # in a tuple: an argument that is a result, too, would be a view
        ctx.grad = grad  # not saved_tensors: written in place it is the logits, of a version that autograd minds
        ctx.version = grad._version
        ctx.backend = backend
        ctx.set_materialize_grads(False)
        nothing = loss.new_empty(0)
        ctx.save_for_backward(nothing)
        return loss, nothing

    @staticmethod
    def backward(ctx: Any, factor: torch.Tensor, _: Any) -> Any:
        check(ctx.grad is not None, "loss: its gradient has been handed on; a second backward needs a second call")
        if torch.is_grad_enabled():
            return _without_graph(*ctx.saved_tensors, ctx, factor), None, None
        return _scaled(None, ctx, factor), None, None


def _scaled(_: torch.Tensor | None, ctx: Any, factor: torch.Tensor) -> torch.Tensor:
    grad: torch.Tensor = ctx.grad
    check(
        grad._version == ctx.version,
        "logits: expected those that the call has written its gradient over, got them changed since; leave "
        "inplace_gradient=False",
    )
    if not hands_on(factor):
        return (grad * factor).to(grad.dtype)
    ctx.grad = None
    return times(grad, factor, ctx.backend)


_apply: Any = _FromLogits.apply
_without_graph = not_differentiable(_scaled, SECOND_DERIVATIVE)
