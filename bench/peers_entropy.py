"""Entropy masks and windowed means as others compute them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from harness import Tensors


def accelerator_of_one_process() -> SimpleNamespace:
    """The part of an Accelerator that TRL calls, for one process: nothing is gathered."""
    return SimpleNamespace(
        num_processes=1,
        pad_across_processes=lambda tensor, **_: tensor,
        gather=lambda tensor: tensor,
        reduce=lambda tensor, **_: tensor,
    )


# ----------------------------------------------------------------------------- the tokens at or above an exact quantile


def rank(tokens: int, keep: float) -> int:
    """The place of the threshold among the entropies in ascending order, from 1."""
    return tokens - int(keep * (tokens - 1))


def kthvalue(entropy: torch.Tensor, keep: float) -> Tensors:
    threshold = entropy.kthvalue(rank(entropy.numel(), keep)).values
    return {"threshold": threshold.reshape(1), "mask": entropy >= threshold}


def topk(entropy: torch.Tensor, keep: float) -> Tensors:
    above = entropy.numel() - rank(entropy.numel(), keep) + 1
    threshold = entropy.topk(above, sorted=False).values.min()
    return {"threshold": threshold.reshape(1), "mask": entropy >= threshold}


def partition(entropy: torch.Tensor, keep: float) -> Tensors:
    values = entropy.numpy()
    place = rank(entropy.numel(), keep) - 1
    threshold = np.partition(values, place)[place]
    return {"threshold": torch.tensor([threshold]), "mask": torch.from_numpy(values >= threshold)}


def quantile(entropy: torch.Tensor, keep: float) -> Tensors:
    """The interpolated quantile: another threshold, the same mask."""
    return {"mask": entropy >= torch.quantile(entropy, 1 - keep)}


def trl(entropy: torch.Tensor, mask: torch.Tensor, keep: float) -> Tensors:
    """GRPOTrainer.get_high_entropy_mask on ``[B, L]``."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    trainer = SimpleNamespace(accelerator=accelerator_of_one_process())
    return {"mask": GRPOTrainer.get_high_entropy_mask(trainer, entropy, mask, 1 - keep).flatten()}


# ------------------------------------------------------------------- scopes, the rows of [C, n]: as a loop, and at once


def quantile_loop(scopes: torch.Tensor) -> Tensors:
    return {"threshold": torch.stack([torch.quantile(values, 0.8, interpolation="higher") for values in scopes])}


def kthvalue_loop(scopes: torch.Tensor) -> Tensors:
    place = rank(scopes.shape[1], 0.2)
    return {"threshold": torch.stack([values.kthvalue(place).values for values in scopes])}


def quantile_padded(scopes: torch.Tensor) -> Tensors:
    """Without a loop, where all scopes have one size."""
    return {"threshold": torch.quantile(scopes, 0.8, dim=1, interpolation="higher")}


def topk_loop(scopes: torch.Tensor, k: int) -> Tensors:
    mask = torch.zeros_like(scopes, dtype=torch.bool)
    for chosen, values in zip(mask, scopes, strict=True):
        chosen[values.topk(k, sorted=False).indices] = True
    return {"mask": mask.flatten()}


def topk_padded(scopes: torch.Tensor, k: int) -> Tensors:
    mask = torch.zeros_like(scopes, dtype=torch.bool)
    return {"mask": mask.scatter_(1, scopes.topk(k, dim=1, sorted=False).indices, True).flatten()}


# --------------------------------------------------------------- forward means over full windows, on rows of one length


def average_pool(entropy: torch.Tensor, width: int) -> Tensors:
    """``[B, L]``: rows do not mix, because pooling is along the last dimension."""
    means = F.avg_pool1d(entropy[:, None], width, stride=1)[:, 0]
    return {"score": F.pad(means, (0, width - 1), value=-torch.inf).flatten()}


def average_pool_over_pack(entropy: torch.Tensor, width: int) -> Tensors:
    """``[T]`` as one row: windows run over the ends of rows."""
    means = F.avg_pool1d(entropy[None, None], width, stride=1)[0, 0]
    return {"score": F.pad(means, (0, width - 1), value=-torch.inf)}


def cumulative_sum(entropy: torch.Tensor, width: int) -> Tensors:
    """Differences of prefix sums on ``[B, L]``, in float64: in float32 they lose the window's digits."""
    sums = F.pad(entropy.double().cumsum(-1), (1, 0))
    means = ((sums[:, width:] - sums[:, :-width]) / width).float()
    return {"score": F.pad(means, (0, width - 1), value=-torch.inf).flatten()}
