"""Trinity-RFT: any gate of tokens, steps or trajectories by its dotted path in the yaml.

    algorithm:
      loss_agg_mode: seq-mean-token-mean
      policy_loss_fn: hpo_core.integrations.trinity.HPOPolicyLossFn
      policy_loss_fn_args: {gate: "gspo(eps_low=3e-4, eps_high=4e-4)", loss_agg_mode: seq-mean-token-mean}

Trinity-RFT writes the first ``loss_agg_mode`` over the second, if there is a second. Shapes: ``B`` responses of a
micro-batch, ``L`` tokens each.
"""

from __future__ import annotations

from typing import Any

import torch

try:
    from trinity.algorithm.policy_loss_fn.policy_loss_fn import PolicyLossFn  # type: ignore[import-not-found,unused-ignore]
except ImportError as error:
    raise ImportError("hpo_core.integrations.trinity needs Trinity-RFT 0.6: pip install trinity-rft") from error

from ..arguments import check_choice
from ..checks import check
from .micro_batch import MODES, fractions, padded_rows, token_loss, weights_of
from .served import served_gate

__all__ = ["HPOPolicyLossFn"]


class HPOPolicyLossFn(PolicyLossFn):  # type: ignore[misc]
    """A policy loss of Trinity-RFT.

    Args:
        gate: a text as in ``HPO_GATE``.
        loss_agg_mode: one of Trinity-RFT's four, over the micro-batch, as there: Trinity-RFT passes its losses no
            counts of the step, so its gradient grows with the number of micro-batches (docs/trainer_differences.md).

    Raises:
        ValueError: a gate that needs an input that Trinity-RFT does not give its loss; arguments without
            ``loss_agg_mode``, to which ``algorithm.loss_agg_mode`` would say nothing.
    """

    def __init__(self, backend: str = "verl", gate: str = "ppo_clip", loss_agg_mode: str = "") -> None:
        super().__init__(backend=backend)
        why = "Trinity-RFT passes its loss no log-probabilities of the sampler"
        self.gate = served_gate(gate, "Trinity-RFT", one_policy=why)
        self.loss_agg_mode = loss_agg_mode
        check(loss_agg_mode != "", "loss_agg_mode: expected one in policy_loss_fn_args, where Trinity-RFT writes "
              "algorithm.loss_agg_mode over it, got none; name the same in both")  # fmt: skip
        check_choice("loss_agg_mode", loss_agg_mode, MODES)

    def __call__(
        self,
        logprob: torch.Tensor,
        old_logprob: torch.Tensor,
        action_mask: torch.Tensor,
        advantages: torch.Tensor,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """The function that Trinity-RFT calls: all ``[B, L]``, and ``[L]`` from its trainer for Tinker. Every parameter
        but ``logprob`` is a key that its batch must have."""
        if logprob.dim() == 1:
            logprob, old_logprob, action_mask = logprob[None], old_logprob[None], action_mask[None]
            advantages = advantages[None]
        batch = padded_rows(action_mask, self.gate)
        out = token_loss(logprob, old_logprob, advantages, batch, self.gate, weights_of(self.loss_agg_mode, batch))
        reported = fractions(out.metrics, self.gate)
        names = {"clipped": "pg_clipfrac", "dual_clipped": "pg_clipfrac_lower", "kl": "ppo_kl"}
        logged = {names.get(name, f"hpo_{name}"): value for name, value in reported.items() if name != "tokens"}
        return out.loss, {**logged, "pg_loss": float(out.loss.detach())}

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        """The arguments that the yaml need not name."""
        return {"gate": "ppo_clip", "loss_agg_mode": "token-mean"}
