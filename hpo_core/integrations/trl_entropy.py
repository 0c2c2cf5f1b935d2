"""TRL's entropy bonus, constant or adaptive (Skywork-OR1, arXiv 2505.22312). ``B`` completions of ``L`` tokens."""

from __future__ import annotations

from typing import Any

import torch


def entropy_bonus(trainer: Any, entropies: torch.Tensor, selected: torch.Tensor, accumulated: int) -> torch.Tensor:
    """The bonus that TRL subtracts from the loss of a micro-batch: ``c mean(H) / accumulated`` over the selected
    tokens.

    ``c`` is ``entropy_coef``. With ``use_adaptive_entropy`` it counts only while the entropy of the last optimiser
    step, of all processes, was at most ``entropy_target``, and each step adds ``entropy_coef_delta`` to it below the
    target and takes it away above. The state lives in TRL's own attributes, which its checkpoints hold.

    Args:
        entropies: ``[B, L]`` float32, with a gradient.
        selected: ``[B, L]`` bool.
    """
    total, count = torch.where(selected, entropies, 0.0).sum(), selected.sum()
    adaptive, config = trainer.use_adaptive_entropy, trainer.args
    counts = not adaptive or trainer._last_world_entropy <= config.entropy_target
    bonus = (trainer.entropy_coef if counts else 0.0) * total / count.clamp(min=1) / accumulated
    if trainer.model.training:
        if adaptive:
            _adapt(trainer, torch.stack([total.detach(), count.to(total.dtype)]))
        if trainer.accelerator.sync_gradients:
            trainer._metrics["train"]["entropy_coef"].append(trainer.entropy_coef)
    return bonus


def _adapt(trainer: Any, sums: torch.Tensor) -> None:
    """The coefficient of the next step, once all micro-batches of this one have come; ``sums``: entropy and tokens."""
    config, seen = trainer.args, trainer._entropy_window_stats
    trainer._entropy_window_stats = seen = sums if seen is None else seen + sums
    if not trainer.accelerator.sync_gradients:
        return
    total, count = trainer.accelerator.reduce(seen, reduction="sum").tolist()
    mean = total / max(count, 1.0)
    step = config.entropy_coef_delta if mean <= config.entropy_target else -config.entropy_coef_delta
    trainer.entropy_coef = min(max(trainer.entropy_coef + step, config.entropy_coef_min), config.entropy_coef_max)
    trainer._last_world_entropy, trainer._entropy_window_stats = mean, None
