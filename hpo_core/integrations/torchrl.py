"""TorchRL: ``HPOLoss(actor, gate=gates.gspo(3e-4, 4e-4))`` instead of its ``GRPOLoss``, on the same tensordicts.

Shapes: ``B`` rows, ``L`` tokens each, padded on the left or right.
"""

from __future__ import annotations

from typing import Any

import torch

try:
    from torchrl.objectives.llm.grpo import GRPOLoss  # type: ignore[import-not-found,unused-ignore]
except ImportError as error:
    raise ImportError("hpo_core.integrations.torchrl needs TorchRL 0.14: pip install torchrl") from error

from .. import aggregation, gates
from ..checks import check
from ..gates import RatioGate
from .micro_batch import clipped_tokens, padded_rows, token_loss
from .named import named_gate
from .served import check_gate

__all__ = ["HPOLoss"]

_UNREAD = "clip_epsilon: the gate {!r} does not read it; leave it out"


class HPOLoss(GRPOLoss):  # type: ignore[misc]
    """TorchRL's GRPO loss with another gate. Masks, entropy bonus, both KL terms and most reports stay TorchRL's.

    ``clip_fraction`` is another: of the valid tokens, those that the gate's clip stops, which PPO's does on one side
    for each sign of the advantage; TorchRL's is of all positions, and of ratios beyond either bound. It is NaN where a
    token was left out, as with a NaN log-probability (``hpo_core.metrics.FLAGS``).

    Args:
        gate: a RatioGate, or a text as in ``HPO_GATE``. None: ``ppo_clip`` of ``clip_epsilon``. The anchor of ratios is
            the sampler.
        keywords: of ``GRPOLoss``; ``aggregation`` is ``"token_mean"`` or ``"prompt_mean"``, TorchRL's word for the mean
            over rows of their means.

    Raises:
        ValueError: a gate that needs an input that a tensordict does not hold; ``clip_epsilon`` beside a gate.
    """

    def __init__(self, actor_network: Any = None, *, gate: RatioGate | str | None = None, **keywords: Any) -> None:
        super().__init__(actor_network, **keywords)
        modes = ("token_mean", "prompt_mean")
        check(
            self.aggregation in modes and self.reduction == "mean",
            "aggregation: expected one of {} with reduction='mean', got {!r} and {!r}",
            ", ".join(modes),
            self.aggregation,
            self.reduction,
        )
        self._is_described, self._bounds, self._seen = gate is None, self._read_bounds(), self._bound_buffers()
        self.gate = gates.ppo_clip(*self._bounds) if gate is None else named_gate(gate)
        check(gate is None or "clip_epsilon" not in keywords, _UNREAD, self.gate.name)
        check_gate(self.gate, "TorchRL", one_policy="TorchRL's old policy is the sampler")
        self._scored: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def _read_bounds(self) -> tuple[float, float]:
        return float(self.clip_epsilon_low), float(self.clip_epsilon_high)

    def _bound_buffers(self) -> list[int]:
        """Numbers that differ after an assignment, as of a scheduler, and after ``load_state_dict``."""
        buffers = (self.clip_epsilon_low, self.clip_epsilon_high)
        return [number for each in buffers for number in (each.data_ptr(), each._version)]

    def _current_gate(self) -> RatioGate:
        if torch.compiler.is_compiling():  # addresses would break its graph
            return self.gate
        seen = self._bound_buffers()
        if seen != self._seen:  # else nothing is copied to the host
            bounds = self._read_bounds()
            check(self._is_described or bounds == self._bounds, _UNREAD, self.gate.name)
            if self._is_described:
                self.gate = gates.ppo_clip(*bounds)
            self._bounds, self._seen = bounds, seen
        return self.gate

    def _log_weight(self, tensordict: Any, adv_shape: torch.Size) -> Any:
        found = super()._log_weight(tensordict, adv_shape)
        log_weight, mask, generated = found[0].squeeze(-1), found[3], found[3]
        if self.kl_mask_threshold is not None and self.kl_mask_threshold > 0:
            mask = mask & (0.5 * log_weight.detach().square() <= self.kl_mask_threshold)
        self._scored = tensordict.get("_cur_log_prob"), mask, generated
        return found

    def _compute_policy_objective(
        self, log_weight: torch.Tensor, advantage: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """TorchRL averages the result over tokens or rows; with the loss at each token the mean is the loss. Each
        rank counts its own tokens, as in TorchRL."""
        assert self._scored is not None
        logp, mask, generated = self._scored
        gate = self._current_gate()
        batch = padded_rows(mask, gate, generated=generated)
        per_row = self.aggregation == "prompt_mean"
        old = (logp - log_weight.squeeze(-1)).detach()
        weights = (aggregation.seq_mean_token_mean if per_row else aggregation.token_mean)(batch, ranks=1)
        advantages = advantage.expand_as(log_weight).squeeze(-1)
        out = token_loss(logp, old, advantages, batch, gate, weights, rollout_logp=old)
        fraction = clipped_tokens(out.metrics, gate) / out.metrics["tokens"].clamp(min=1)
        fraction = torch.where(out.metrics.flags.any(), torch.nan, fraction).to(log_weight.dtype)
        return out.loss.to(log_weight.dtype).expand_as(log_weight), fraction
