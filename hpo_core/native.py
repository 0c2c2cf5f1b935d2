"""Hands tensors to the C interface: one function per op, shared by cpu, cuda and cuda_emulated.

Everything is checked before it gets here: dtypes, shapes, contiguity, one device. Outputs are allocated here;
workspaces come with any content and kernels assume nothing of it. For a few thousand tokens this file takes longer than
the kernel, so it counts its allocations.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Sequence
from dataclasses import astuple
from types import ModuleType
from typing import Any

import torch

from .specs import (
    Boundary,
    CorrectionSpec,
    Exchange,
    GroupInputs,
    GroupNormalisation,
    Invalid,
    LogitRows,
    LogitType,
    OrderRule,
    PolicyLossInputs,
    PolicyLossSpec,
    Scopes,
    SegmentReduce,
    Stage,
    TokenDraw,
    WindowAggregate,
    rows_as_weights,
)


def _rows(cu_seqlens: torch.Tensor | None) -> int:
    return 0 if cu_seqlens is None else cu_seqlens.numel() - 1


# OpenMP's threads do not survive a fork, and a forked worker would wait for them forever: it computes on one thread.
_forked = False


def _mark_forked() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_mark_forked)


_SPECS = 256  # that are kept of each kind, some hundred kilobytes: a schedule of epsilons makes one for every step
_LARGE = 1 << 22  # bytes of a workspace on the CPU for which large pages are worth a system call


class _Scratch(threading.local):
    """The workspace of small calls on the CPU, one per thread: allocating it anew would take a tenth of such a call."""

    def __init__(self) -> None:
        self.tensor = torch.empty(1 << 18, dtype=torch.uint8, device="cpu")


class Native:
    """The ops of one extension module."""

    def __init__(self, module: ModuleType, on_cuda: bool) -> None:
        self.module = module
        self._on_cuda = on_cuda
        self._scratch = _Scratch()
        self._widen = getattr(module, "widen", None)  # the CPU's, whose products multiply float32 only
        self._loss_from_logits = getattr(module, "loss_from_logits", None)  # that of CUDA
        self._corrects_rows = hasattr(module, "corrects_rows")  # in its sweeps: the CPU
        # empty_like is the quickest way to a tensor; these are its patterns on the CPU, whatever the defaults are when
        # a process calls for the first time.
        self._loss = torch.empty((), dtype=torch.float32, device="cpu")
        self._metrics = torch.empty(module.metrics, dtype=torch.float64, device="cpu")
        self._gate, self._groups = (
            functools.lru_cache(maxsize=_SPECS)(make) for make in (self._make_gate, self._make_groups)
        )

    def _call(self, function: Any, tensor: torch.Tensor, *arguments: Any) -> Any:
        """``function(*arguments, context)``: the context is the CUDA stream, or the number of threads on the CPU."""
        if self._on_cuda:
            with torch.cuda.device(tensor.device):
                return function(*arguments, torch.cuda.current_stream().cuda_stream)
        return function(*arguments, 1 if _forked else torch.get_num_threads())

    def _workspace(self, size: int, like: torch.Tensor) -> torch.Tensor:
        if not self._on_cuda and size <= (scratch := self._scratch.tensor).numel():
            return scratch
        workspace = like.new_empty(size, dtype=torch.uint8)  # quicker than torch.empty, which parses a device
        if size >= _LARGE and not self._on_cuda:
            self.module.advise_large_pages(workspace, size)
        return workspace

    def _make_gate(self, spec: PolicyLossSpec) -> tuple[Any, Any]:
        """The two parts of a spec, of which a gate without a hierarchy has the first alone."""
        return self._make_spec(spec), self._make_levels(spec) if spec.is_hierarchical else None

    def _make_spec(self, spec: PolicyLossSpec) -> Any:
        def rule(of: CorrectionSpec) -> tuple[Any, ...]:
            return int(of.statistic), int(of.action), of.strict, of.low, of.high

        correction = None if spec.correction is None else rule(spec.correction)
        row_corrections = tuple((rule(each), int(each.reduction)) for each in spec.row_corrections)
        return self.module.PolicyLossSpec(
            int(spec.token), int(spec.head), int(spec.kl), int(spec.kl_gradient), spec.strict, spec.low_driven,
            spec.high_driven, spec.token_low, spec.token_high, spec.kl_beta, correction, row_corrections,
        )  # fmt: skip

    def _make_levels(self, spec: PolicyLossSpec) -> Any:
        levels = [
            (int(level.gate), int(level.routing), int(level.aggregate), level.low, level.high, level.slope)
            for level in spec.levels
        ]
        term = None if spec.term is None else (int(spec.term.penalty), spec.term.penalty_coefficient, *spec.term[:7])
        return self.module.Hierarchy(spec.split, spec.token_log_low, spec.token_log_high, levels, term)

    def _make_groups(self, spec: GroupNormalisation) -> Any:
        terms = [astuple(term) for term in spec.terms]
        return self.module.GroupNormalisation(terms, int(spec.share), spec.share_eps, spec.share_least)

    def policy_loss(
        self,
        inputs: PolicyLossInputs,
        spec: PolicyLossSpec,
        want_grad: bool,
        want_tokens: bool,
        exchange: Exchange | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Loss (0-dim float32), metrics (float64), dL/dlogp ``[T]`` and loss_t ``[T]`` where wanted; ``exchange``: for
        ``spec.levels``."""
        if not self._corrects_rows:
            inputs, spec = rows_as_weights(inputs, spec, self.correction)
        logp = inputs.logp
        tokens, rows = logp.numel(), inputs.weights.numel()
        if self._on_cuda:
            loss, metrics = logp.new_empty(()), logp.new_empty(self.module.metrics, dtype=torch.float64)
        else:
            loss, metrics = torch.empty_like(self._loss), torch.empty_like(self._metrics)
        grad = torch.empty_like(logp) if want_grad else None
        token_loss = torch.empty_like(logp) if want_tokens else None
        outputs = (loss, metrics, grad, token_loss)
        flat, levels = gate = self._gate(spec)
        if levels is None:
            workspace = self._workspace(self.module.policy_loss_workspace(tokens, rows), logp)
            self._call(self.module.policy_loss, logp, flat, tokens, rows, inputs, outputs, workspace)
        else:
            self._hierarchy(inputs, spec, gate, tokens, rows, outputs, exchange)
        return outputs

    def _hierarchy(
        self,
        inputs: PolicyLossInputs,
        spec: PolicyLossSpec,
        gate: tuple[Any, Any],
        tokens: int,
        rows: int,
        outputs: tuple[torch.Tensor | None, ...],
        exchange: Exchange | None,
    ) -> None:
        logp, leaves, run = inputs.logp, inputs.leaves, self.module.hierarchy
        size = self.module.hierarchy_workspace(tokens, rows, leaves)
        if exchange is None:
            workspace = self._workspace(size, logp)
            self._call(run, logp, *gate, tokens, rows, leaves, inputs, outputs, workspace, Stage.WHOLE, ())
            return
        call = (run, logp, *gate, tokens, rows, leaves, inputs, outputs)
        # The scratch of small calls would not do: an exchange may make some. Tables begin as zeros because a process
        # without tokens has a gradient of no elements, whose null address tells kernels to leave them.
        workspace = logp.new_empty(size, dtype=torch.uint8)
        tables = tuple(logp.new_zeros(len(spec.levels), leaves, n, dtype=torch.int64) for n in (3, 2, 2))
        sums, largest, aggregate_grad = tables
        self._call(*call, workspace, Stage.SUMS, tables)
        exchange.sums(sums)
        self._call(*call, workspace, Stage.SWEEP, tables)
        if outputs[2] is None or not spec.has_aggregate_grad:  # no gradient, or none through an aggregate
            return
        exchange.largest(largest)
        self._call(*call, workspace, Stage.REDUCE_GRAD, tables)
        exchange.aggregate_grad(aggregate_grad)
        self._call(*call, workspace, Stage.BROADCAST_GRAD, tables)

    def correction(
        self, inputs: PolicyLossInputs, spec: CorrectionSpec, reduce: SegmentReduce | None = None
    ) -> torch.Tensor:
        """The factor ``[T]`` of ``logp - old_logp``, times ``token_weight``; ``reduce``: for ``spec.of_segments``."""
        tokens, rows, leaves = inputs.logp.numel(), _rows(inputs.cu_seqlens), inputs.leaves
        factor = torch.empty_like(inputs.logp)
        workspace = self._workspace(self.module.correction_workspace(tokens, leaves), inputs.logp)
        call = (
            self.module.correction, inputs.logp, int(spec.statistic), int(spec.reduction), int(spec.action),
            spec.of_segments, spec.strict, spec.low, spec.high, tokens, rows, leaves, inputs, factor, workspace,
        )  # fmt: skip
        if reduce is None:
            self._call(*call, Stage.WHOLE, None)
        else:
            segments = inputs.logp.new_zeros(leaves, 3, dtype=torch.int64)
            self._call(*call, Stage.SUMS, segments)
            reduce(segments, spec.is_extremum)
            self._call(*call, Stage.SWEEP, segments)
        return factor

    def group_normalise(self, inputs: GroupInputs, spec: GroupNormalisation) -> torch.Tensor:
        """``A_u = sum_m k_m(u) a_m(u)`` for every unit u, ``[U]``."""
        values = inputs.values[0]
        units = values.numel()
        out = torch.empty_like(values)
        workspace = self._workspace(self.module.group_normalise_workspace(units, len(spec.terms)), values)
        self._call(self.module.group_normalise, values, self._groups(spec), units, inputs, out, workspace)
        return out

    def window_score(
        self,
        values: torch.Tensor,
        mask: torch.Tensor | None,
        cu_seqlens: torch.Tensor,
        first: int,
        last: int,
        boundary: Boundary,
        invalid: Invalid,
        aggregate: WindowAggregate,
    ) -> torch.Tensor:
        tokens = values.numel()
        score = torch.empty_like(values)
        width = min(last - first + 1, 2**62)  # kernels stop before it
        workspace = self._workspace(self.module.window_score_workspace(tokens, width), values)
        self._call(
            self.module.window_score, values, tokens, cu_seqlens.numel() - 1, values, mask, cu_seqlens,
            first, last, int(boundary), int(invalid), int(aggregate), score, workspace,
        )  # fmt: skip
        return score

    def order_statistic(
        self,
        values: torch.Tensor,
        numerator: int,
        denominator: int,
        rule: OrderRule,
        mask: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        strict: bool = False,
        selected: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``selected``: where the selection of :meth:`select_top` is written."""
        tokens = values.numel()
        threshold = values.new_empty(1)
        counts = values.new_empty(2, dtype=torch.int64)
        workspace = self._workspace(self.module.order_statistic_workspace(tokens), values)
        self._call(
            self.module.order_statistic, values, tokens, _rows(cu_seqlens), values, mask, cu_seqlens,
            numerator, denominator, int(rule), threshold, counts, strict, selected, workspace,
        )  # fmt: skip
        return threshold, counts

    def select_top(
        self,
        values: torch.Tensor,
        numerator: int,
        denominator: int,
        rule: OrderRule,
        strict: bool,
        mask: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        selected = torch.empty_like(values, dtype=torch.bool)
        return *self.order_statistic(values, numerator, denominator, rule, mask, cu_seqlens, strict, selected), selected

    def select(
        self,
        values: torch.Tensor,
        threshold: torch.Tensor,
        strict: bool,
        mask: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        selected = torch.empty_like(values, dtype=torch.bool)
        self._call(
            self.module.select, values, values.numel(), _rows(cu_seqlens), values, mask, cu_seqlens,
            threshold, strict, selected,
        )  # fmt: skip
        return selected

    def order_statistics(
        self,
        values: torch.Tensor,
        scopes: Scopes,
        numerator: int,
        denominator: int,
        rule: OrderRule,
        mask: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        thresholds = values.new_empty(scopes.number)
        counts = values.new_empty((scopes.number, 2), dtype=torch.int64)
        quantile = (numerator, denominator, int(rule))
        self._order_statistics(values, scopes, mask, quantile, None, thresholds, counts, None)
        return thresholds, counts

    def select_exact(
        self, values: torch.Tensor, scopes: Scopes, k: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        selected = torch.zeros_like(values, dtype=torch.bool)
        self._order_statistics(values, scopes, mask, (0, 1, 0), k, None, None, selected)
        return selected

    def _order_statistics(
        self,
        values: torch.Tensor,
        scopes: Scopes,
        mask: torch.Tensor | None,
        quantile: tuple[int, int, int],
        *k_and_outputs: torch.Tensor | None,
    ) -> None:
        sizes = (values.numel(), scopes.offsets.numel() - 1, scopes.number)
        workspace = self._workspace(self.module.order_statistics_workspace(*sizes[:2]), values)
        self._call(
            self.module.order_statistics, values, sizes, values, mask, *scopes, *quantile, *k_and_outputs, workspace
        )  # fmt: skip

    def covariance(
        self,
        logp: torch.Tensor,
        advantages: torch.Tensor,
        cu_seqlens: torch.Tensor | None,
        mask: torch.Tensor | None,
        draw: TokenDraw,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, members = torch.empty_like(logp), logp.new_empty(1, dtype=torch.int64)
        given = (logp, advantages, cu_seqlens, mask, *draw, keys, members)
        workspace = self._workspace(self.module.covariance_workspace(logp.numel()), logp)
        self._call(self.module.covariance, logp, logp.numel(), _rows(cu_seqlens), *given, workspace)
        return keys, members

    def group_statistics(
        self, values: torch.Tensor, ids: torch.Tensor | None, weights: torch.Tensor | None, mask: torch.Tensor | None
    ) -> torch.Tensor:
        units = values.numel()
        statistics = values.new_empty((6, units), dtype=torch.float64)
        workspace = self._workspace(self.module.group_statistics_workspace(units), values)
        self._call(
            self.module.group_statistics, values, units, values, ids, weights, mask, statistics, workspace
        )  # fmt: skip
        return statistics

    def recurrence(self, values: torch.Tensor, gains: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        scanned = torch.empty_like(values)
        given = (values, gains, cu_seqlens, scanned)
        self._call(self.module.recurrence, values, values.numel(), _rows(cu_seqlens), *given)
        return scanned

    def row_counts(self, mask: torch.Tensor | None, cu_seqlens: torch.Tensor, total_tokens: int) -> torch.Tensor:
        counts = cu_seqlens.new_empty(_rows(cu_seqlens))
        self._call(self.module.row_counts, cu_seqlens, total_tokens, len(counts), mask, cu_seqlens, counts, None, 0, 0)
        return counts

    def row_weights(
        self, mask: torch.Tensor | None, cu_seqlens: torch.Tensor, total_tokens: int, denominator: int, factor: float
    ) -> torch.Tensor:
        weights, counts = cu_seqlens.new_empty(_rows(cu_seqlens), dtype=torch.float32), torch.empty_like(cu_seqlens)
        given = (total_tokens, weights.numel(), mask, cu_seqlens, counts, weights, int(denominator), factor)
        self._call(self.module.row_counts, cu_seqlens, *given)
        return weights

    def row_spans(self, mask: torch.Tensor, cu_seqlens: torch.Tensor, total_tokens: int) -> torch.Tensor:
        spans = cu_seqlens.new_empty(2 * cu_seqlens.numel())
        self._call(self.module.row_spans, cu_seqlens, total_tokens, _rows(cu_seqlens), mask, cu_seqlens, spans)
        return spans

    def uninitialised(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor that a kernel fills. On the CPU it asks for large pages: faults on small ones take longer than the
        kernel."""
        tensor = torch.empty(shape, dtype=dtype, device=device)
        if tensor.nbytes >= _LARGE and not self._on_cuda:
            self.module.advise_large_pages(tensor, tensor.nbytes)
        return tensor

    def widen(self, block: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        """The ``block`` in the float32 numbers of ``into``, which is contiguous and whose old numbers were read."""
        if self._widen is None or block.dtype is not torch.bfloat16 or not block.is_contiguous():
            return into.copy_(block)
        self._call(self._widen, block, block, into, block.numel())
        return into

    def scale(self, values: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """Contiguous ``values`` of a type of logits, times a float32 number on their device, in place. Where it is 1
        they are not touched."""
        self._call(self.module.scale, values, values, values.numel(), int(LogitType.of(values)), factor)
        return values

    def token_logprobs(self, rows: LogitRows, kept: int) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Log-probabilities, entropies where ``kept`` is above 2, and that many statistics ``[kept, T]``: of each row
        the greatest logit, the sum of the others, the mean distance and the sum of squared probabilities."""
        logp = torch.empty_like(rows.targets, dtype=torch.float32)
        entropy = torch.empty_like(logp) if kept > 2 else None
        statistics = logp.new_empty((kept, logp.numel()))
        logits, call = _logits(rows)
        self._call(self.module.token_logprobs, logits, call, kept, logp, entropy, statistics)
        return logp, entropy, statistics

    def token_logprobs_backward(
        self,
        rows: LogitRows,
        statistics: torch.Tensor,
        logp_gradient: torch.Tensor | None,
        entropy_gradient: torch.Tensor | None,
        into: torch.Tensor | None,
    ) -> torch.Tensor:
        """The gradient of the logits from those of the two results; an upstream gradient of None is 0. It is written
        ``into`` the logits, whose rows then lie at two strides at most, or into a contiguous tensor (None: a new one).
        """
        logits, call = _logits(rows)
        grad = self.uninitialised(logits.shape, logits.dtype, logits.device) if into is None else into
        self._call(
            self.module.token_logprobs_backward, logits, call, statistics, logp_gradient, entropy_gradient, grad,
            *rows.strides_of(grad, logits, call[1]),
        )  # fmt: skip
        return grad

    def loss_from_logits(
        self, rows: LogitRows, inputs: PolicyLossInputs, spec: PolicyLossSpec, into: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Log-probabilities and entropies ``[T]`` of the tokens that rows of logits predict, each row the next one, and
        the gradient of the loss under a gate on tokens ``into`` the logits or a contiguous tensor; ``inputs.logp`` is
        not read. None, and nothing is computed, where one launch cannot do this or is not the quicker way."""
        if self._loss_from_logits is None:
            return None
        logits, call = _logits(rows)
        tokens = rows.targets.numel()
        logp = torch.empty(tokens, dtype=torch.float32, device=logits.device)
        entropy = torch.empty_like(logp)
        done = self._call(
            self._loss_from_logits, logits, call, *self._gate(spec), tokens, inputs.weights.numel(), inputs, logp,
            entropy, into, *rows.strides_of(into, logits, call[1]),
        )  # fmt: skip
        return (logp, entropy) if done else None


def _logits(rows: LogitRows) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """The logits, and the arguments of kernels of both directions."""
    logits, layout = rows.at_two_strides()
    return logits, (
        (rows.targets.numel(), logits.shape[-1], rows.first, rows.vocabulary), layout, logits,
        int(LogitType.of(logits)), rows.targets, rows.temperatures, rows.temperature, rows.ignore_index, rows.floors,
    )  # fmt: skip
