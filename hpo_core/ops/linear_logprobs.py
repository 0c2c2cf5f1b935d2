"""Token log-probabilities and entropies from hidden states, one block of logits at a time.

The forward computes a block, sums it up and drops it; the backward computes it again. The vocabulary is the outer loop,
so that each block of the weight is read, and widened where the CPU multiplies float32 only, once per direction. Every
chunk of rows has the same size: the last one is padded with rows of zeros, so that the bits of a row do not depend on
the number of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed

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
    node,
    not_differentiable,
    raising,
    register,
)
from .logprob_states import LogprobState, finished, folded, inverse_of, mapped, merged, shared
from .logprobs import check_columns, check_upstream, keep, kept_by, results_like, without_none

SECOND_DERIVATIVE = (
    "hpo_core.linear_token_logprobs: second derivatives are not supported (the backward makes the logits again, and no "
    "graph); use backend='reference' to differentiate twice"
)

# The states of n / 1024 blocks of n columns are merged at once. A merge takes tens of launches, and a state that
# waits for it takes a hundred bytes of a row, whose logits in a block take 4 n.
_MERGED = 1024

# Products of fewer columns are padded with zeros: MKL adds up some rows of a narrow one in another order than others.
_NARROW = 16


class LinearRows(NamedTuple):
    """Rows of hidden states and a head, ``x = hidden @ weight.T + bias``, with a softcap ``softcap tanh(x / softcap)``.
    The weight may be a part of a larger one, whose row ``first`` is its first row."""

    hidden: torch.Tensor  # [T, D]
    weight: torch.Tensor  # [columns, D]
    bias: torch.Tensor | None  # [columns]
    targets: torch.Tensor  # [T] int64 ids in the whole vocabulary
    temperatures: torch.Tensor | None  # [T] float32, which replace `temperature`
    temperature: float
    ignore_index: int
    softcap: float | None
    first: int
    vocabulary: int
    chunk: int  # rows of a block of logits
    columns: int  # the most columns of a block


_FIELDS = len(LinearRows._fields)


def linear_token_logprobs(
    given: LinearRows, kept: int, backend: str | None, group: Any = None, sizes: Sequence[int] | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probabilities and, where ``kept`` is 3, entropies ``[T]``, differentiable in hidden states, weight and bias.
    With a ``group`` the ranks' shards of the weight have ``sizes`` rows. Not for the reference backend."""
    arguments, others = (*given, backend or "", kept), (group, sizes)
    differentiable = [each for each in given[:3] if each is not None]
    logp, entropy, _ = call_differentiable(
        "linear_token_logprobs", differentiable, _forward, _apply, arguments, others, has_operator=group is None
    )
    return logp, entropy if kept > 2 else None


# ---------------------------------------------------------------------------------------------------- chunks and blocks


class _Blocks:
    """Blocks of logits of the rows that count, one at a time."""

    def __init__(self, given: LinearRows, counting: torch.Tensor, functions: Any, masks: bool) -> None:
        """``masks``: hidden states of rows that do not count are replaced by zeros; a forward does not read their
        logits."""
        self.given = given
        self.size, self.widen = given.chunk, functions.widen
        hidden, weight = given.hidden, given.weight
        everywhere = torch.arange(len(hidden), device=hidden.device)
        self.rows = counting.nonzero()[:, 0] if _is_readable(hidden) else everywhere
        self.ignored = ~counting if masks and not _is_readable(hidden) else None
        self.chunks = -(-len(self.rows) // self.size)
        operand = torch.promote_types(hidden.dtype, weight.dtype)
        if hidden.is_cpu:
            operand = torch.float32  # a CPU product of 16-bit operands would round its result to 16 bits
        self.hidden = hidden.new_zeros(self.size, hidden.shape[1], dtype=operand)
        self.held: int | None = None  # the chunk whose hidden states these are
        self.views = self._views()
        blocks = max(-(-len(weight) // given.columns), 1)
        self.columns = min(-(-len(weight) // (16 * blocks)) * 16, len(weight))  # so that blocks have about one size
        self.weight = (
            None
            if weight.dtype is operand
            else functions.uninitialised((self.columns, weight.shape[1]), operand, weight.device)
        )
        self.logits = functions.uninitialised((self.size * self.columns,), torch.float32, hidden.device)
        self.targets = self.padded(given.targets, given.ignore_index)
        self.temperatures = None if given.temperatures is None else self.padded(given.temperatures, 1.0)

    def _views(self) -> list[torch.Tensor | None]:
        """The hidden states of each chunk where they lie, if they need neither padding nor a copy."""
        hidden, whole = self.given.hidden, len(self.rows) // self.size
        views: list[torch.Tensor | None] = [None] * self.chunks
        if self.ignored is not None or hidden.dtype is not self.hidden.dtype or not hidden.is_contiguous():
            return views
        readable = _is_readable(hidden)  # elsewhere all rows are listed
        for at in range(whole):
            first, last = at * self.size, (at + 1) * self.size - 1
            if readable:
                first, last = int(self.rows[first]), int(self.rows[last])
            view = hidden[first : last + 1]
            if len(view) == self.size and view.data_ptr() % 64 == 0:  # bits of a product may depend on the alignment
                views[at] = view
        return views

    def states(self, at: int) -> torch.Tensor:
        """The hidden states of a chunk, padded with zeros; the next chunk may reuse their memory."""
        view = self.views[at]
        if view is not None:
            return view
        if self.held != at:
            self.held = at
            rows = self.rows[at * self.size : (at + 1) * self.size]
            self.hidden[: len(rows)] = self.given.hidden[rows]
            self.hidden[len(rows) :] = 0.0
            if self.ignored is not None:
                self.hidden[: len(rows)].masked_fill_(self.ignored[rows, None], 0.0)
        return self.hidden

    def padded(self, values: torch.Tensor, filling: float) -> torch.Tensor:
        """The values of the rows that count, padded: ``[chunks, size]``."""
        filled = values.new_full((self.chunks * self.size,), filling)
        filled[: len(self.rows)] = values[self.rows]
        return filled.view(self.chunks, self.size)

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`padded`, with zeros in the other rows: ``[T, ...]``."""
        counting = values.flatten(0, 1)[: len(self.rows)]
        return counting.new_zeros(len(self.given.hidden), *counting.shape[1:]).index_copy_(0, self.rows, counting)

    def places_of_targets(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The place of the target's logit in each block of the vocabulary from ``first`` on, chunk and row, 0 where it
        is in another block; and whether it is in this one."""
        end = len(self.given.weight)
        begins = range(first * self.columns, min(last * self.columns, end), self.columns)
        begin = torch.arange(begins.start, begins.stop, begins.step, device=self.targets.device)[:, None, None]
        length = (end - begin).clamp(max=self.columns)
        column = self.targets - (self.given.first + begin)
        is_here = (column >= 0) & (column < length) & (self.targets != self.given.ignore_index)
        row = torch.arange(self.size, device=column.device)
        return torch.where(is_here, column + row * length, 0), is_here

    def of_vocabulary(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """The columns of each block and their part of the weight, in the dtype of the products."""
        weight = self.given.weight
        for begin in range(0, len(weight), max(self.columns, 1)):
            columns = slice(begin, min(begin + self.columns, len(weight)))
            block = weight[columns]
            yield columns, block if self.weight is None else self.widen(block, self.weight[: len(block)])

    def of_rows(self, columns: slice, weight: torch.Tensor) -> Iterator[tuple[int, LogitRows, torch.Tensor]]:
        """The number, the logits and the hidden states of each chunk; the next chunk may reuse the memory of both."""
        given = self.given
        for at in range(self.chunks):
            hidden = self.states(at)
            logits = self.logits[: self.size * len(weight)].view(self.size, len(weight))
            _multiply(hidden, weight.t(), logits, adds=False)
            if given.bias is not None:
                logits.add_(given.bias[columns])
            if given.softcap is not None:
                logits.div_(given.softcap).tanh_().mul_(given.softcap)
            yield at, LogitRows(
                logits, self.targets[at], None if self.temperatures is None else self.temperatures[at],
                given.temperature, given.ignore_index, None, given.first + columns.start, given.vocabulary,
            ), hidden  # fmt: skip


def _is_readable(tensor: torch.Tensor) -> bool:
    """Whether reading the number of rows that count waits for no device."""
    return tensor.is_cpu


def _multiply(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, adds: bool) -> None:
    """``out = left @ right`` or ``out += left @ right`` in float32. Autocast leaves calls with ``out=`` alone."""
    wide: dict[str, Any] = {} if left.dtype is torch.float32 else {"out_dtype": torch.float32}
    lacking, whole = max(_NARROW - right.shape[1], 0), out
    if lacking:
        right, whole = (torch.nn.functional.pad(each, (0, lacking)) for each in (right, out))
    if adds:
        torch.addmm(whole, left, right, **wide, out=whole)
    else:
        torch.mm(left, right, **wide, out=whole)
    if lacking:
        out.copy_(whole[:, :-lacking])


# ---------------------------------------------------------------------------------------------------- both directions


def _forward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    *values, backend, kept, group, sizes = arguments
    given = LinearRows(*values)
    counting = given.targets != given.ignore_index
    functions = resolve("logprobs", given.hidden, backend or None)
    blocks = _Blocks(given, counting, functions, masks=False)
    inverse = inverse_of(given.temperature, given.temperatures)
    inverse_of_chunks = inverse_of(given.temperature, blocks.temperatures)
    nothing = torch.full_like(blocks.targets, -torch.inf, dtype=torch.float64)
    zeros = torch.zeros_like(nothing)
    state = LogprobState(nothing, zeros, zeros if kept > 2 else None, nothing)
    together = max(1, blocks.columns // _MERGED)  # never of the number of rows, on which no bit depends
    for index, (columns, weight) in enumerate(blocks.of_vocabulary()):
        place = index % together
        if place == 0:
            parts, (element, is_here) = [], blocks.places_of_targets(index, index + together)
        for at, rows, _ in blocks.of_rows(columns, weight):
            statistics = functions.token_logprobs(rows, kept)[2]
            parts.append((*statistics.unbind(), rows.logits.take(element[place, at])))
        if parts and (place == together - 1 or columns.stop == len(given.weight)):
            top, others, *distance, logit = (torch.stack(each).view(is_here.shape) for each in zip(*parts, strict=True))
            logit = torch.where(is_here, logit, -torch.inf)
            new = LogprobState(top, others, distance[0] if distance else None, logit)
            state = merged(state, new, inverse_of_chunks)
    state = mapped(state, blocks.spread)
    if group is not None:
        state = folded(shared(mapped(state, torch.Tensor.float), len(given.weight), group, sizes), inverse)
    return finished(state, inverse, ~counting)


def _backward(*arguments: Any) -> list[torch.Tensor | None]:
    *values, backend, statistics, of_logp, of_entropy, wanted, group = arguments
    given = LinearRows(*values)
    upstream = torch.stack([each != 0 for each in (of_logp, of_entropy) if each is not None])
    functions = resolve("logprobs", given.hidden, backend or None)
    counting = (given.targets != given.ignore_index) & (upstream.any(0) | statistics[0].isnan())
    blocks = _Blocks(given, counting, functions, masks=True)
    known = torch.stack([blocks.padded(each, 0.0) for each in statistics], 1)
    upstreams = [each if each is None else blocks.padded(each, 0.0) for each in (of_logp, of_entropy)]
    gradients = _Gradients(blocks, wanted)
    memory = blocks.logits
    if given.softcap is not None:  # its slope is made of the logits, over which the gradient cannot be written
        memory = functions.uninitialised(memory.shape, memory.dtype, memory.device)
    for columns, weight in blocks.of_vocabulary():
        for at, rows, hidden in blocks.of_rows(columns, weight):
            of_chunk = [each if each is None else each[at] for each in upstreams]
            into = memory[: rows.logits.numel()].view_as(rows.logits)
            gradient = functions.token_logprobs_backward(rows, known[at], *of_chunk, into)
            if given.softcap is not None:
                gradient.addcmul_(gradient, rows.logits.div_(given.softcap).square_(), value=-1.0)  # 1 - tanh^2
            gradients.add(at, columns, gradient, hidden, weight)
    return gradients.finished(group)


class _Gradients:
    """The wanted gradients of hidden states, weight and bias, summed over blocks of logits."""

    def __init__(self, blocks: _Blocks, wanted: Sequence[bool]) -> None:
        hidden, weight, bias = blocks.given[:3]
        self.blocks, (self.of_hidden, self.of_weight, self.of_bias) = blocks, wanted
        if self.of_hidden:
            self.hidden = hidden.new_zeros(blocks.chunks, *blocks.hidden.shape, dtype=torch.float32)
        if self.of_weight:
            self.weight = (weight.new_empty if blocks.chunks else weight.new_zeros)(weight.shape)
            is_exact = weight.dtype is torch.float32  # then the result itself holds the sums
            self.sums = None if is_exact else weight.new_empty(blocks.columns, weight.shape[1], dtype=torch.float32)
        if bias is not None and self.of_bias:
            self.bias = torch.zeros_like(bias, dtype=torch.float32)

    def add(self, at: int, columns: slice, gradient: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor) -> None:
        narrow = gradient.to(hidden.dtype)
        if self.of_hidden:
            _multiply(narrow, weight, self.hidden[at], adds=True)
        if self.of_weight:
            sums = self.sums[: len(weight)] if self.sums is not None else self.weight[columns]
            _multiply(narrow.t(), hidden, sums, adds=at > 0)
            if self.sums is not None and at == self.blocks.chunks - 1:
                self.weight[columns] = sums
        if self.of_bias:
            self.bias[columns] += gradient.sum(0)

    def finished(self, group: Any) -> list[torch.Tensor | None]:
        hidden, _, bias = self.blocks.given[:3]
        results: list[torch.Tensor | None] = [None, self.weight if self.of_weight else None, None]
        if self.of_hidden:
            if group is None:
                rounded = self.hidden.to(hidden.dtype)
                del self.hidden  # so that no second tensor of float32 exists
                results[0] = self.blocks.spread(rounded)
            else:
                whole = self.blocks.spread(self.hidden)
                torch.distributed.all_reduce(whole, group=group)
                results[0] = whole.to(hidden.dtype)
        if bias is not None and self.of_bias:
            results[2] = self.bias.to(bias.dtype)
        return results


# ------------------------------------------------------------------------------------------------------------ autograd


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    given, (ctx.backend, _, *others) = LinearRows(*inputs[:_FIELDS]), inputs[_FIELDS:]
    ctx.group = others[0] if others else None
    keep(ctx, given, output[2])


def _gradient(ctx: Any, apply: Any, logp_gradient: Any, entropy_gradient: Any) -> Any:
    others = (None,) * (len(ctx.needs_input_grad) - 3)
    if logp_gradient is None and entropy_gradient is None:
        return None, None, None, *others
    given, statistics = kept_by(ctx)
    if len(statistics) == 2:  # the call has no entropy; traced graphs pass zeros as its gradient
        entropy_gradient = None
    wanted = list(ctx.needs_input_grad[:3])
    results = apply(*given, ctx.backend, statistics, logp_gradient, entropy_gradient, wanted, ctx.group)
    return *(each if want else None for each, want in zip(results, wanted, strict=True)), *others


def _forward_in_node(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    *given, kept, group, _ = arguments
    if group is not None or not is_seen(given[0]):
        return _forward(*arguments)
    logp, entropy, statistics = OPERATORS.linear_token_logprobs(*given, kept)
    return logp, entropy if kept > 2 else None, statistics


def _backward_in_node(*arguments: Any) -> tuple[torch.Tensor | None, ...]:
    *given, group = arguments
    if group is not None or not is_seen(given[0]):
        return tuple(_backward(*arguments))
    return tuple(OPERATORS.linear_token_logprobs_backward(*given))


_apply_backward = not_differentiable(_backward_in_node, SECOND_DERIVATIVE)
_apply = node(
    "linear_token_logprobs",
    _forward_in_node,
    _save,
    lambda ctx, *gradients: _gradient(ctx, _apply_backward, *gradients[:2]),
    VMAP.format("linear_token_logprobs", "pass hidden [..., D] and targets as they are"),
)

# ----------------------------------------------------------------------------------------------------------- operators

_ROWS = (
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, Tensor? temperatures, float temperature, "
    "int ignore_index, float? softcap, SymInt first, SymInt vocabulary, int chunk, int columns, str backend, "
)


def _backward_operator(*arguments: Any) -> tuple[torch.Tensor, ...]:
    hidden = arguments[0]
    return tuple(hidden.new_empty(0) if each is None else each for each in _backward(*arguments, None))


def _backward_fake(*arguments: Any) -> tuple[torch.Tensor, ...]:
    hidden, wanted = arguments[0], arguments[-1]
    return tuple(
        each.new_empty(each.shape) if want else hidden.new_empty(0)
        for each, want in zip(arguments[:3], wanted, strict=True)
    )


def _check_rows(given: LinearRows, backend: str) -> None:
    hidden, weight = given.hidden, given.weight
    check_native(hidden, backend, "this operator", "linear_token_logprobs")
    for name, tensor in (("hidden", hidden), ("weight", weight)):
        check_dtype(name, tensor, LOGITS, f"use {name}.float()")
        check(tensor.dim() == 2, "{}: expected two dimensions, got {}", name, list(tensor.shape))
    like = ("hidden", hidden)
    check_operand("weight", weight, (weight.shape[0], hidden.shape[1]), LOGITS, like)
    check_operand("bias", given.bias, weight.shape[:1], LOGITS, like, "weight's rows")
    check_operand("targets", given.targets, hidden.shape[:1], (torch.int64,), like)
    check_operand("temperatures", given.temperatures, hidden.shape[:1], (torch.float32,), like)
    check_columns(given.first, weight.shape[0], given.vocabulary)
    for name in ("chunk", "columns"):
        check(getattr(given, name) > 0, "{}: expected a number above 0, got {}", name, getattr(given, name))


def _check_forward(*arguments: Any) -> None:
    *values, backend, kept = arguments
    _check_rows(LinearRows(*values), backend)
    check(kept in (2, 3), "kept: expected 2 or 3 statistics, got {}", kept)


def _check_backward(*arguments: Any) -> None:
    *values, backend, statistics, logp_gradient, entropy_gradient, wanted = arguments
    given = LinearRows(*values)
    _check_rows(given, backend)
    check_upstream(("hidden", given.hidden), given.targets, statistics, logp_gradient, entropy_gradient)
    check(
        logp_gradient is not None or entropy_gradient is not None,
        "logp_gradient, entropy_gradient: expected at least one of them",
    )
    check(
        len(wanted) == 3 and not (wanted[2] and given.bias is None),
        "wanted: expected whether the gradients of hidden, weight and bias are wanted, got {} and {}",
        list(wanted),
        "no bias" if given.bias is None else "a bias",
    )


def _operator_gradient(ctx: Any, *gradients: Any) -> Any:
    def apply(*arguments: Any) -> Any:
        return OPERATORS.linear_token_logprobs_backward(*arguments[:-1])

    return _gradient(ctx, apply, *gradients[:2])


register(
    f"linear_token_logprobs({_ROWS}int kept) -> (Tensor logp, Tensor entropy, Tensor statistics)",
    lambda *arguments: without_none(*_forward(*arguments, None, None)),
    lambda *arguments: results_like(arguments[3], arguments[-1]),
    _check_forward,
    setup_context=_save,
    backward=_operator_gradient,
)
register(
    f"linear_token_logprobs_backward({_ROWS}Tensor statistics, Tensor? logp_gradient, Tensor? entropy_gradient, "
    "bool[] wanted) -> (Tensor hidden, Tensor weight, Tensor bias)",
    _backward_operator,
    _backward_fake,
    _check_backward,
    backward=raising(RuntimeError, SECOND_DERIVATIVE),
)
