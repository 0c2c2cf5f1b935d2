"""Hands tensors to the C interface as raw pointers: one function per op, shared by cpu, cuda and cuda_emulated.

Everything is checked before it gets here: dtypes, shapes, contiguity, one device. Outputs are allocated here;
workspaces come uninitialised and kernels assume nothing of their content.
"""

from __future__ import annotations

import functools
import os
from types import ModuleType
from typing import Any

import torch

from .specs import Boundary, GroupNormalisation, Invalid, OrderRule, PolicyLossInputs, PolicyLossSpec

__all__ = ["Native"]


def _addresses(*tensors: torch.Tensor | None) -> list[int]:
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def _rows(cu_seqlens: torch.Tensor | None) -> int:
    return 0 if cu_seqlens is None else cu_seqlens.numel() - 1


# OpenMP's threads do not survive a fork, and a forked worker would wait for them forever: it computes on one thread.
_forked = False


def _mark_forked() -> None:
    global _forked
    _forked = True


os.register_at_fork(after_in_child=_mark_forked)


class Native:
    """The ops of one extension module."""

    def __init__(self, module: ModuleType, on_cuda: bool) -> None:
        self.module = module
        self._on_cuda = on_cuda
        self._spec = functools.lru_cache(maxsize=None)(self._make_spec)

    def _call(self, function: Any, tensor: torch.Tensor, *arguments: Any) -> None:
        """``function(*arguments, context)``: the context is the CUDA stream, or the number of threads on the CPU."""
        if self._on_cuda:
            with torch.cuda.device(tensor.device):
                function(*arguments, torch.cuda.current_stream().cuda_stream)
        else:
            function(*arguments, 1 if _forked else torch.get_num_threads())

    def _workspace(self, size: int, like: torch.Tensor) -> torch.Tensor:
        return like.new_empty(size, dtype=torch.uint8)  # quicker than torch.empty, which parses a device

    def _make_spec(self, spec: PolicyLossSpec) -> Any:
        return self.module.PolicyLossSpec(
            int(spec.token), spec.has_level, spec.level_clips, int(spec.routing), int(spec.head), int(spec.kl),
            int(spec.kl_gradient), spec.strict, spec.low_driven, spec.high_driven, spec.token_low, spec.token_high,
            spec.level_log_low, spec.level_log_high, spec.kl_beta,
        )  # fmt: skip

    def policy_loss(
        self, inputs: PolicyLossInputs, spec: PolicyLossSpec, want_grad: bool, want_tokens: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Loss (0-dim float32), metrics (float64), dL/dlogp ``[T]`` and loss_t ``[T]`` where wanted."""
        logp = inputs.logp
        tokens, rows = logp.numel(), inputs.weights.numel()
        loss = logp.new_empty(())
        metrics = logp.new_empty(self.module.metrics, dtype=torch.float64)
        grad = torch.empty_like(logp) if want_grad else None
        token_loss = torch.empty_like(logp) if want_tokens else None
        workspace = self._workspace(self.module.policy_loss_workspace(tokens, rows), logp)
        self._call(
            self.module.policy_loss, logp, self._spec(spec), tokens, rows,
            *_addresses(
                logp, inputs.old_logp, inputs.ref_logp, inputs.entropy, inputs.score, inputs.token_weight, inputs.low,
                inputs.high, inputs.mask, inputs.token_mask, inputs.cu_seqlens, inputs.weights, inputs.advantages,
            ),
            inputs.advantage_per_token,
            *_addresses(
                inputs.row_trajectory, inputs.trajectory_start, inputs.trajectory_rows, inputs.threshold,
                loss, metrics, grad, token_loss, workspace,
            ),
        )  # fmt: skip
        return loss, metrics, grad, token_loss

    def group_normalise(
        self,
        values: torch.Tensor,
        ids: torch.Tensor | None,
        mask: torch.Tensor | None,
        apply_mask: torch.Tensor | None,
        spec: GroupNormalisation,
    ) -> torch.Tensor:
        units = values.numel()
        out = torch.empty_like(values)
        workspace = self._workspace(self.module.group_normalise_workspace(units), values)
        self._call(
            self.module.group_normalise, values, units, *_addresses(values, ids, mask, apply_mask), int(spec.center),
            int(spec.scale), spec.ddof, int(spec.eps_mode), spec.eps, spec.keep_singletons, *_addresses(out, workspace),
        )  # fmt: skip
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
    ) -> torch.Tensor:
        tokens = values.numel()
        score = torch.empty_like(values)
        workspace = self._workspace(self.module.window_score_workspace(tokens, last - first + 1), values)
        self._call(
            self.module.window_score, values, tokens, cu_seqlens.numel() - 1, *_addresses(values, mask, cu_seqlens),
            first, last, int(boundary), int(invalid), *_addresses(score, workspace),
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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = values.numel()
        threshold = values.new_empty(1)
        counts = values.new_empty(2, dtype=torch.int64)
        workspace = self._workspace(self.module.order_statistic_workspace(tokens), values)
        self._call(
            self.module.order_statistic, values, tokens, _rows(cu_seqlens), *_addresses(values, mask, cu_seqlens),
            numerator, denominator, int(rule), *_addresses(threshold, counts, workspace),
        )  # fmt: skip
        return threshold, counts

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
            self.module.select, values, values.numel(), _rows(cu_seqlens), *_addresses(values, mask, cu_seqlens),
            threshold.data_ptr(), strict, selected.data_ptr(),
        )  # fmt: skip
        return selected

    def row_counts(self, mask: torch.Tensor | None, cu_seqlens: torch.Tensor, total_tokens: int) -> torch.Tensor:
        rows = cu_seqlens.numel() - 1
        counts = cu_seqlens.new_empty(rows)
        self._call(self.module.row_counts, cu_seqlens, total_tokens, rows, *_addresses(mask, cu_seqlens, counts))
        return counts
