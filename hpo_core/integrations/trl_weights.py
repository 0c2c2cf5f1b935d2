"""The denominators of TRL's loss types."""

from __future__ import annotations

from typing import Any

import torch

from .. import aggregation
from ..batch import PackedBatch


def weights_of(trainer: Any, batch: PackedBatch, inputs: dict[str, Any], steps: int) -> torch.Tensor:
    """Row weights ``[B]``: the denominator of ``loss_type``, and of accumulation over ``steps`` micro-batches, which
    TRL leaves to the loss."""
    kind = trainer.loss_type
    # Each process counts its own rows, also those without a valid token, and their means are averaged: 1 rank.
    rows = batch.rows * steps
    if kind in ("grpo", "sapo"):
        return aggregation.seq_mean_token_mean(batch, total=rows, ranks=1)
    if kind == "bnpo":
        return aggregation.token_mean(batch, total=batch.row_counts.sum() * steps, ranks=1)
    if kind == "dr_grpo":
        return aggregation.fixed_length(batch, trainer.max_completion_length, total=rows, ranks=1)
    if kind == "luspo":
        return aggregation.seq_mean_token_sum(batch, total=rows, ranks=1)
    # Counted over the generation batch and over the processes, whose gradients are averaged.
    share = steps / trainer.args.steps_per_generation if trainer.model.training else 1.0
    total = inputs["num_items_in_batch"] * share
    return aggregation.token_mean(batch, total=total, ranks=trainer.accelerator.num_processes)
