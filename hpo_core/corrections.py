"""The corrections of a gate: a factor on each token, and, on request, the metrics of each of them.

The loss computes the factors of one correction of tokens and two of rows by itself; others are an op of their own.
"""

from __future__ import annotations

import torch
import torch.distributed

from . import gates, ops
from .backends import is_reference, resolve
from .batch import PackedBatch
from .gates import Channel, Correction, RatioGate
from .metrics import Metrics, is_debugging, observed
from .reference.segments import doubles
from .segment_exchange import reduce_over_ranks
from .specs import MOST_ROW_CORRECTIONS, PolicyLossInputs, PolicyLossSpec, Unit

_OBSERVER = gates.reinforce().spec()


def corrected(
    inputs: PolicyLossInputs,
    spec: PolicyLossSpec,
    gate: RatioGate,
    batch: PackedBatch,
    rollout: torch.Tensor | None,
    process_group: torch.distributed.ProcessGroup | None,
    want_metrics: bool,
    logp_known: bool,
    backend: str | None,
) -> tuple[PolicyLossInputs, PolicyLossSpec, tuple[Metrics, ...]]:
    """Inputs and spec with all corrections in them, and the metrics of each, if they are wanted. If ``logp_known``, the
    loss takes those of :func:`_joining`."""
    seen = []
    logp = inputs.logp.detach()
    joining = _joining(gate, batch, process_group) if logp_known else []
    for index, correction in enumerate(gate.corrections):
        pair = _channel(correction.channel, logp, inputs.old_logp, rollout)
        # An unknown logp does not say which tokens count. Nothing needs it: a token's factor concerns no other token.
        loss_reads = _channel(gate.channel, logp, inputs.old_logp, rollout) if logp_known else pair
        read = _read(inputs, gate, loss_reads, pair, correction, batch)
        own = None
        if want_metrics:
            # The tokens that a correction takes out are known only before other factors join its own. The factor of a
            # token with an infinite log-ratio is NaN, and the loss takes the token out.
            own = _factor(read._replace(token_weight=None), correction, batch, process_group, backend)
            seen.append(_observed(read, _counted(read), own > 0, process_group, backend))
        if index in joining:
            if correction.unit is None:
                spec = spec._replace(correction=correction.spec())
            else:
                spec = spec._replace(row_corrections=(*spec.row_corrections, correction.spec()))
            first = None if pair[0] is logp else read.correction_first
            inputs = inputs._replace(correction_first=first, correction_second=read.correction_second)
            continue
        if own is not None:
            weight = own if inputs.token_weight is None else own * inputs.token_weight
        else:
            weight = _factor(read, correction, batch, process_group, backend)
        inputs = inputs._replace(token_weight=weight)
    return inputs, spec, tuple(seen) if want_metrics else ()


def _joining(gate: RatioGate, batch: PackedBatch, process_group: torch.distributed.ProcessGroup | None) -> list[int]:
    """The corrections, by index, whose factors the loss computes: the first of tokens and two of rows, unless tokens of
    other rows count for a row, too. All are of one channel, that of the first."""
    alone = batch.trajectory_ids is None and process_group is None and not gate.of_steps
    of_tokens = [index for index, each in enumerate(gate.corrections) if each.unit is None][:1]
    of_rows = [index for index, each in enumerate(gate.corrections) if alone and each.unit is Unit.TRAJECTORY]
    channels = [gate.corrections[index].channel for index in (*of_tokens, *of_rows)]
    return (
        of_tokens
        + [index for index in of_rows if gate.corrections[index].channel is channels[0]][:MOST_ROW_CORRECTIONS]
    )


def _channel(
    channel: Channel, logp: torch.Tensor, old_logp: torch.Tensor | None, rollout: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The two policies of a log-ratio; a sampler of which nothing is known is the old policy."""
    old = logp if old_logp is None else old_logp
    sampler = old if rollout is None else rollout
    if channel is Channel.DISCREPANCY:
        return old, sampler
    return logp, old if channel is Channel.STALENESS else sampler


def _read(
    inputs: PolicyLossInputs,
    gate: RatioGate,
    loss_reads: tuple[torch.Tensor, torch.Tensor],
    pair: tuple[torch.Tensor, torch.Tensor],
    correction: Correction,
    batch: PackedBatch,
) -> PolicyLossInputs:
    """The inputs of the op of a correction: its own pair, and those of the loss, because only tokens that count in the
    loss count here. Where steps are a level of the gate, tokens outside every step do not."""
    leaves = batch.leaf_tables(() if correction.unit is None else (correction.unit,))
    mask = inputs.mask
    if gate.of_steps:
        in_step = batch.once(PackedBatch.step_of_token) >= 0
        mask = in_step if mask is None else mask & in_step
    logp, old_logp, first, second = (each.contiguous() for each in (*loss_reads, *pair))
    return PolicyLossInputs(
        logp, old_logp, inputs.advantages, inputs.weights, inputs.cu_seqlens, mask, inputs.ref_logp,
        token_weight=inputs.token_weight, advantage_per_token=inputs.advantage_per_token, leaf_begin=leaves.begin,
        leaf_end=leaves.end, leaf_row=leaves.row, ancestors=leaves.ancestors, correction_first=first,
        correction_second=second,
    )  # fmt: skip


def _counted(read: PolicyLossInputs) -> torch.Tensor | None:
    """The mask of the tokens that count in the loss, which leaves out those of a log-ratio that is NaN."""
    mask = read.mask
    for other in (read.old_logp, read.ref_logp):
        if other is not None:
            log_ratio = (read.logp - other).reshape(-1)
            known = log_ratio == log_ratio
            mask = known if mask is None else mask & known
    return mask


def _factor(
    read: PolicyLossInputs,
    correction: Correction,
    batch: PackedBatch,
    process_group: torch.distributed.ProcessGroup | None,
    backend: str | None,
) -> torch.Tensor:
    """The correction, times the token weights in ``read``, in the shape of logp."""
    reduce = None
    if process_group is not None and correction.unit is not None:
        reduce = reduce_over_ranks(batch, correction.unit, process_group)
    return ops.correction(read, correction.spec(), backend, reduce).reshape(read.logp.shape)


def _observed(
    read: PolicyLossInputs,
    mask: torch.Tensor | None,
    kept: torch.Tensor,
    process_group: torch.distributed.ProcessGroup | None,
    backend: str | None,
) -> Metrics:
    """The metrics of a loss that is 0: the log-ratios of the channel, and how many tokens are kept."""
    nothing = torch.zeros_like(read.weights)
    assert read.correction_first is not None
    inputs = PolicyLossInputs(
        read.correction_first, read.correction_second, nothing, nothing, read.cu_seqlens, mask,
        token_mask=kept.contiguous(),
    )  # fmt: skip
    if is_reference(read.logp, backend):
        vector = resolve("gates", read.logp, backend).policy_loss(doubles(inputs), _OBSERVER)[1]
    else:
        vector = ops.policy_loss(inputs, _OBSERVER, backend, False)[1]
    return observed(vector, process_group, {} if is_debugging() else None)
