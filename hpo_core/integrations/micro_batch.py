"""The common parts of trainers' losses: the rows of a micro-batch, the loss of its tokens, and the metrics."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from .. import aggregation, gates
from ..arguments import check_choice
from ..batch import PackedBatch, spread_rows, valid_tokens
from ..entropy import Selection
from ..gates import Clip, Drop, Level, RatioGate
from ..kl import KLPenalty
from ..losses import PolicyLoss, policy_loss
from ..metrics import FLAGS, SLOTS, Metrics
from ..specs import Head, Unit
from .turns import turns

MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")

_DUAL = "clipped_high_negative"
_MOST_K3 = 10.0  # of a token, in trainers that clamp k3


def lower_epsilon(low: float) -> float:
    """The lower epsilon of a trainer as gates take it. Trainers compute with one above 1, too; as ratios are positive,
    it is no clip.

    >>> lower_epsilon(0.2), lower_epsilon(10.0)
    (0.2, 1.0)
    """
    return 1.0 if isinstance(low, int | float) and low > 1 else low  # others are refused by the gate


def token_clip(low: float, high: float, ratio_dual: float | None = None) -> RatioGate:
    """PPO's clip with the numbers of a trainer."""
    return gates.ppo_clip(lower_epsilon(low), high, ratio_dual=ratio_dual)


def sequence_clip(low: float, high: float, ratio_dual: float | None = None, **level: Any) -> RatioGate:
    """GSPO with the numbers of a trainer and the dual clip that trainers add to it. ``level``: its unit and routing,
    where they are others.

    >>> from hpo_core import gates
    >>> sequence_clip(3e-4, 4e-4).levels == gates.gspo().levels
    True
    """
    clip = token_clip(low, high, ratio_dual).token
    assert isinstance(clip, Clip)
    return RatioGate("gspo", Drop(), (Level(clip, **level),), source="arXiv 2507.18071")


def padded_rows(
    mask: torch.Tensor, gate: RatioGate, group_ids: torch.Tensor | None = None, *, generated: torch.Tensor | None = None
) -> PackedBatch:
    """Rows ``[B, L]`` as a batch; ``mask`` is of any dtype. The steps, for gates that have a level of them, are the
    runs of tokens that are ``generated``, by default of valid ones. A trainer that has taken single tokens out of
    ``mask`` names them: its filter does not part a turn.

    >>> from hpo_core import gates
    >>> padded_rows(torch.tensor([[1, 0, 1]]), gates.step_gspo()).row_of_step()
    tensor([0, 0])
    """
    valid = mask if mask.dtype is torch.bool else mask != 0
    steps = turns(valid if generated is None else generated != 0) if Unit.STEP in gate.units else None
    return PackedBatch.from_padded(valid, steps=steps, group_ids=group_ids)


def packed_rows(
    cu_seqlens: torch.Tensor,
    mask: torch.Tensor,
    gate: RatioGate,
    group_ids: torch.Tensor | None = None,
    *,
    generated: torch.Tensor | None = None,
) -> PackedBatch:
    """Packed tokens ``[T]`` as a batch, which :class:`PackedBatch` trusts: the trainer made the offsets. ``generated``
    as for :func:`padded_rows`.

    >>> from hpo_core import gates
    >>> packed_rows(torch.tensor([0, 2, 4]), torch.ones(4), gates.step_gspo()).row_of_step()
    tensor([0, 1])
    """
    valid = mask if mask.dtype is torch.bool else mask != 0
    steps = None
    if Unit.STEP in gate.units:
        spoken = valid if generated is None else generated != 0
        begins = torch.zeros_like(spoken)
        begins[cu_seqlens[:-1][cu_seqlens[:-1] < len(valid)].long()] = True
        before, behind = torch.nn.functional.pad(spoken, (1, -1)), torch.nn.functional.pad(spoken, (-1, 1))
        last = torch.nn.functional.pad(begins, (-1, 1), value=True)
        begin, end = (spoken & (~before | begins)).nonzero(), (spoken & (~behind | last)).nonzero() + 1
        steps = torch.cat((begin, end), dim=1)
    return PackedBatch(cu_seqlens, valid, steps=steps, group_ids=group_ids, validate=False)


def clamped_k3(logp: torch.Tensor, ref_logp: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``k3`` of trainers that clamp it at 10, where its gradient is 0: ``ref_logp`` with the log-probabilities of
    the policy itself, of which k3 and its gradient are 0, at tokens above that bound, and which tokens these are. NaN
    is above no bound. A policy of probability 0 stays, as an infinite log-ratio does.

    >>> clamped_k3(torch.tensor([-3.0, -3.0]), torch.tensor([-2.0, 1.0]))
    (tensor([-2., -3.]), tensor([False,  True]))
    """
    log_ratio = ref_logp - logp.detach()
    above = (torch.exp(log_ratio) - 1 - log_ratio > _MOST_K3) | ((log_ratio == torch.inf) & logp.detach().isfinite())
    return torch.where(above, logp.detach(), ref_logp), above


def pushed_units(gate: RatioGate, advantages: torch.Tensor, selection: Selection | None = None) -> torch.Tensor | None:
    """The units whose advantage, as a ``selection`` shapes it, is not 0, as a mask for the metrics: trainers count no
    other token as clipped, and its term is 0 either way. None under heads for which they count all."""
    if gate.head is not Head.LINEAR:
        return None
    if selection is not None and selection.advantage_factor is not None:
        advantages = advantages * selection.advantage_factor
    if selection is not None and selection.advantage_addend is not None:
        advantages = advantages + selection.advantage_addend
    return advantages != 0


def token_loss(
    logp: torch.Tensor,
    old_logp: torch.Tensor | None,
    advantages: torch.Tensor,
    batch: PackedBatch,
    gate: RatioGate,
    weights: torch.Tensor,
    *,
    rollout_logp: torch.Tensor | None = None,
    ref_logp: torch.Tensor | None = None,
    kl: KLPenalty | None = None,
    clamp_k3: bool = False,
    advantage_level: str = "token",
    **options: Any,
) -> PolicyLoss:
    """:func:`~hpo_core.policy_loss` of tensors of any precision; the sampler is read where the gate asks for it.
    ``clamp_k3``: a penalty ``kl`` of k3 is that of :func:`clamped_k3`; its metrics are without the tokens at the bound,
    the loss has them."""
    logp = logp.float()
    ref, above = None if ref_logp is None else ref_logp.float(), None
    if clamp_k3 and ref is not None:
        ref, above = clamped_k3(logp, ref)
    others, pushed = options.get("token_mask"), pushed_units(gate, advantages)
    if pushed is not None:
        if advantage_level == "row":
            pushed = spread_rows(pushed, batch, False).reshape(logp.shape)
        options["token_mask"] = pushed if others is None else pushed & others
    out = policy_loss(
        logp,
        None if old_logp is None else old_logp.float(),
        advantages.float(),
        batch,
        gate,
        weights=weights,
        rollout_logp=rollout_logp.float() if gate.reads_rollout and rollout_logp is not None else None,
        ref_logp=ref,
        kl=kl,
        advantage_level=advantage_level,
        **options,
    )
    if above is None or kl is None:
        return out
    # The kernel leaves out tokens without a log-ratio or a weight, and tokens of no row; so does this sum.
    weight = weights[batch.row_of_token()].reshape(above.shape)
    counted = above & valid_tokens(batch).reshape(above.shape) & weight.isfinite()
    if old_logp is not None:
        counted &= ~(logp.detach() - old_logp).isnan()
    return out._replace(loss=out.loss + kl.beta * _MOST_K3 * torch.where(counted, weight, 0.0).sum())


def clipped_tokens(metrics: Metrics, gate: RatioGate) -> torch.Tensor:
    """The number of clipped tokens, on the device: without those of a dual clip, which only linear heads have."""
    return torch.stack([metrics[slot] for slot in _clip_slots(gate)]).sum()


def _clip_slots(gate: RatioGate) -> list[str]:
    slots = [slot for slot in SLOTS if slot.startswith("clipped_")]
    return [slot for slot in slots if slot != _DUAL] if gate.head is Head.LINEAR else slots


def fractions(metrics: Metrics, gate: RatioGate) -> dict[str, float]:
    """The numbers that trainers log of a loss, in one copy to the host: ``tokens``, ``clipped`` and ``dual_clipped``
    (fractions of the valid tokens), ``kl`` (the mean of ``old_logp - logp``), and the error counters, 0 in a healthy
    run: trainers average over the micro-batches, and reduce over the ranks, that report a name.

    >>> import hpo_core as hpo
    >>> out = hpo.policy_loss(torch.ones(1, 2), torch.zeros(1, 2), torch.ones(1), torch.ones(1, 2).bool())
    >>> list(fractions(out.metrics, hpo.gates.ppo_clip()).items())[:5]
    [('tokens', 2.0), ('clipped', 1.0), ('dual_clipped', 0.0), ('kl', -1.0), ('nan_tokens', 0.0)]
    """
    count = dict(zip(SLOTS, metrics.vector.tolist(), strict=True))
    tokens = max(count["tokens"], 1.0)
    slots = _clip_slots(gate)
    return {
        "tokens": count["tokens"],
        "clipped": sum(count[slot] for slot in slots) / tokens,
        "dual_clipped": 0.0 if _DUAL in slots else count[_DUAL] / tokens,
        "kl": -count["log_ratio_sum"] / tokens,
        **{name: count[name] for name in FLAGS},
    }


def warn_of_flags(seen: Mapping[str, float]) -> None:
    """Warn of the error counters among :func:`fractions`, once each, where the trainer's log has no place for them."""
    for name in FLAGS:
        if seen[name] > 0:
            warnings.warn(f"hpo_core.policy_loss: {name}: {FLAGS[name]}", stacklevel=2)


def weights_of(mode: str, batch: PackedBatch, tokens: Any = None, rows: Any = None) -> torch.Tensor:
    """``[B]``: the denominator of one of verl's :data:`MODES`, which others took over, for these numbers of tokens and
    rows. Default: those of the micro-batch, of which rows without tokens are rows, too."""
    check_choice("loss_agg_mode", mode, MODES)
    tokens = batch.row_counts.sum() if tokens is None else tokens
    rows = batch.rows if rows is None else rows
    if mode == "token-mean":
        return aggregation.token_mean(batch, total=tokens, ranks=1)
    if mode == "seq-mean-token-sum":
        return aggregation.seq_mean_token_sum(batch, total=rows, ranks=1)
    if mode == "seq-mean-token-mean":
        return aggregation.seq_mean_token_mean(batch, total=rows, ranks=1)
    assert batch.padded_shape is not None
    return aggregation.fixed_length(batch, batch.padded_shape[1], total=1, ranks=1)
