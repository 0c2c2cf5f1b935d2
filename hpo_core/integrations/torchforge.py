"""torchforge: any gate of tokens, steps or trajectories as the loss of its trainer, in a copy of ``apps/grpo/main.py``.

    TitanTrainer.options(**cfg.actors.trainer).as_actor(**cfg.trainer, loss=HPOLoss("dapo(eps_high=0.28)"))

The trainer calls it with logits and with the targets that ``collate`` of that script returns. Shapes: ``B`` rows,
``P`` tokens of a prompt, ``L`` of a response, ``V`` of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import aggregation, kl
from ..gates import RatioGate
from ..logprobs import token_logprobs
from ..losses import policy_loss
from .micro_batch import fractions, padded_rows, warn_of_flags
from .served import served_gate

__all__ = ["HPOLoss"]


@dataclass(frozen=True)
class HPOLoss:
    """A loss of torchforge: the mean over rows of the means over their tokens, which FSDP averages over ranks.

    Args:
        gate: a RatioGate, or a text as in ``HPO_GATE``. It acts where targets have ``old_logprobs``; without them the
            old policy is the current one, as in torchforge's own loss, and every ratio is 1.
        beta: of torchforge's penalty, k3 to the reference policy; 0.1 as there, 0: none.

    Raises:
        ValueError: a gate that needs an input that torchforge does not give its loss.
    """

    gate: RatioGate | str = "ppo_clip"
    beta: float = 0.1

    def __post_init__(self) -> None:
        made = served_gate(self.gate, "torchforge", one_policy="targets have one old policy")
        object.__setattr__(self, "gate", made)

    def __call__(
        self, logits: torch.Tensor, response: torch.Tensor, ref_logprobs: torch.Tensor, advantages: torch.Tensor,
        padding_mask: torch.Tensor, old_logprobs: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """The loss of ``[B, P + L, V]`` logits, ``[B, L]`` tokens and log-probabilities, and ``[B, 1]`` advantages. The
        ``collate`` of torchforge squeezes the log-probabilities of one row, or of rows of one token."""
        assert isinstance(self.gate, RatioGate)
        logp, _ = token_logprobs(logits[:, -response.shape[1] - 1 : -1], response, entropy=False)
        batch = padded_rows(padding_mask, self.gate)
        old = None if old_logprobs is None else old_logprobs.float().reshape(response.shape)
        weights = aggregation.seq_mean_token_mean(batch, total=batch.rows, ranks=1)
        penalty, ref = (kl.k3(self.beta), ref_logprobs.float().reshape(response.shape)) if self.beta else (None, None)
        out = policy_loss(
            logp, old, advantages.flatten().float(), batch, self.gate, weights=weights, kl=penalty, ref_logp=ref
        )
        warn_of_flags(fractions(out.metrics, self.gate))  # torchforge logs nothing of a loss but the loss
        return out.loss
