"""Tinker: any gate as a custom loss, computed on the client from the log-probabilities that the service returns.

    future = training_client.forward_backward_custom(data, custom_loss(gates.gspo(3e-4, 4e-4)))

``data`` are datums as tinker-cookbook makes them: ``loss_fn_inputs`` holds ``target_tokens``, ``logprobs`` of the
sampler, ``advantages`` and, where some tokens are not the policy's, ``mask``, each ``[N]`` for the N tokens of a datum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .. import aggregation
from ..arguments import check_choice
from ..checks import check, require_type
from ..gates import RatioGate
from ..segments import ids_of
from ..specs import Unit
from .micro_batch import fractions, packed_rows, token_loss
from .served import served_gate

__all__ = ["custom_loss"]

Loss = Callable[[Sequence[Any], Sequence[torch.Tensor]], tuple[torch.Tensor, dict[str, float]]]


def custom_loss(
    gate: RatioGate | str, *, prompts: Sequence[Any] | None = None, reduction: str = "sum", backend: str | None = None
) -> Loss:
    """The function for ``forward_backward_custom``: loss and metrics of all its datums in one call.

    Args:
        gate: a RatioGate, or a text as in ``HPO_GATE``. The anchor is the sampler.
        prompts: an id for each datum, for gates with a level of groups: strings, numbers or tuples of them.
        reduction: ``"sum"`` over tokens, as Tinker's own losses have it, or ``"mean"`` over the tokens of the call.
        backend: a name from ``hpo_core.backends()``. Default: by device.

    Raises:
        ValueError: a gate that needs an input that datums do not hold.
    """
    resolved = served_gate(gate, "Tinker", groups=prompts is not None, one_policy="a datum has one old policy")
    grouped = Unit.GROUP in resolved.units
    check_choice("reduction", reduction, ("sum", "mean"))

    def loss(data: Sequence[Any], logprobs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        check(len(data) > 0, "data: expected datums, got none")
        pairs = zip(data, logprobs, strict=True)
        fields = [{"mask": torch.ones_like(each), **datum.loss_fn_inputs} for datum, each in pairs]
        sizes = [each.numel() for each in logprobs]
        old, advantages, mask = (_field(fields, name, sizes) for name in ("logprobs", "advantages", "mask"))
        mask = mask != 0
        lengths = torch.tensor([0, *(len(each) for each in logprobs)], device=old.device)
        ids = None
        if grouped:
            assert prompts is not None
            check(
                len(prompts) == len(data), "prompts: expected one of each of {} datums, got {}", len(data), len(prompts)
            )
            ids = ids_of([str(each) for each in prompts], old.device)
        batch = packed_rows(lengths.cumsum(0), mask, resolved, ids)
        if reduction == "sum":
            weights = torch.ones(batch.rows, device=old.device)
        else:
            weights = aggregation.token_mean(batch, ranks=1)
        logp = torch.cat([each.reshape(-1) for each in logprobs])
        out = token_loss(logp, old, advantages, batch, resolved, weights, rollout_logp=old, backend=backend)
        reported = fractions(out.metrics, resolved)
        return out.loss, {f"hpo/{name}:{'sum' if name == 'tokens' else 'mean'}": reported[name] for name in reported}

    return loss


def _field(fields: Sequence[Mapping[str, Any]], name: str, sizes: Sequence[int]) -> torch.Tensor:
    parts = []
    for at, (inputs, size) in enumerate(zip(fields, sizes, strict=True)):
        check(name in inputs, "loss_fn_inputs: expected {!r} in each datum", name)
        value = inputs[name]
        value = value.to_torch() if hasattr(value, "to_torch") else value
        require_type(
            isinstance(value, torch.Tensor), "loss_fn_inputs: expected {!r} as a tensor, got {}", name, type(value)
        )
        check(
            value.numel() == size,
            "loss_fn_inputs: expected {!r} of datum {} for its {} tokens, got {}",
            name,
            at,
            size,
            value.numel(),
        )
        parts.append(value.reshape(-1))
    return torch.cat(parts)
