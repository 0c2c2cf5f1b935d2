"""NeMo-RL: any gate of tokens, steps or trajectories as its loss function.

    from hpo_core.integrations.nemo_rl import HPOLossFn
    grpo_train(..., loss_fn=HPOLossFn("gspo(eps_low=3e-4, eps_high=4e-4)", token_level_loss=False), ...)

in a copy of NeMo-RL's ``examples/run_grpo.py``, instead of the ``loss_fn`` that ``setup`` returns: NeMo-RL has no
configuration for losses. Its yaml still chooses the inputs of a loss: ``loss_fn.force_on_policy_ratio`` must be false,
and ``loss_fn.reference_policy_kl_penalty`` above 0 for a penalty. The object is pickled to the workers. Shapes: ``B``
rows of a micro-batch, ``L`` tokens each.
"""

from __future__ import annotations

from typing import Any

import torch

try:
    from nemo_rl.algorithms.loss.interfaces import LossFunction, LossInputType, LossType, MetricNormalizer  # type: ignore[import-not-found,unused-ignore]
except ImportError as error:
    raise ImportError("hpo_core.integrations.nemo_rl needs NeMo-RL 0.6 from github.com/NVIDIA-NeMo/RL") from error

from .. import aggregation, gates, kl
from ..checks import check
from ..gates import RatioGate
from ..metrics import FLAGS
from .micro_batch import fractions, padded_rows, token_loss
from .served import served_gate

__all__ = ["HPOLossFn"]


class HPOLossFn(LossFunction):  # type: ignore[misc]
    """A loss function of NeMo-RL.

    Args:
        gate: a RatioGate, or a text as in ``HPO_GATE``. NeMo-RL tells a loss the sampler's log-probabilities, so gates
            with corrections work: ``icepop``, ``tis``, ``decoupled`` ...
        token_level_loss: the mean over tokens, or that over rows of their means; over the counts of the step, which
            NeMo-RL tells.
        reference_policy_kl_penalty: the coefficient of NeMo-RL's penalty: the value of k3, the gradient of k2.
        use_fused_linear_logprobs: that of ``policy.megatron_cfg``, which NeMo-RL asks its loss for.

    Raises:
        ValueError: a gate that needs an input that NeMo-RL does not give its loss; in the call, zeros that NeMo-RL
            hands over for log-probabilities that its yaml lets it skip.
    """

    input_type = LossInputType.LOGPROB

    def __init__(
        self,
        gate: RatioGate | str = "ppo_clip",
        *,
        token_level_loss: bool = True,
        reference_policy_kl_penalty: float = 0.0,
        use_fused_linear_logprobs: bool = False,
    ) -> None:
        self.gate = served_gate(gate, "NeMo-RL")
        check(
            reference_policy_kl_penalty >= 0,
            "reference_policy_kl_penalty: expected a coefficient >= 0, got {}",
            reference_policy_kl_penalty,
        )
        beta = reference_policy_kl_penalty
        self.kl = kl.k3(beta, "straight_through") if beta else None
        # The attributes that NeMo-RL reads of a loss: whether it gets log-probabilities, and whether it needs
        # unfiltered ones.
        self.use_fused_linear_logprobs, self.reference_policy_kl_penalty = use_fused_linear_logprobs, beta
        self.loss_type = LossType.TOKEN_LEVEL if token_level_loss else LossType.SEQUENCE_LEVEL
        self.metric_normalizations = {
            "loss": MetricNormalizer.TOKENS if token_level_loss else MetricNormalizer.SEQUENCES,
            "token_mult_prob_error": MetricNormalizer.TOKENS,
            **dict.fromkeys(("hpo/clipped", "hpo/dual_clipped", "hpo/kl"), MetricNormalizer.TOKENS),
            "num_valid_samples": MetricNormalizer.NONE,
            **dict.fromkeys((f"hpo/{name}" for name in FLAGS), MetricNormalizer.NONE),
        }

    def __call__(
        self,
        next_token_logprobs: torch.Tensor,
        data: Any,
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """The function that NeMo-RL calls: log-probabilities ``[B, L - 1]`` of the next tokens, data ``[B, L]``, and
        the counts of the step over all ranks, 0-dim."""
        sampled = data["sample_mask"]
        mask = (data["token_mask"][:, 1:] * sampled[:, None]) != 0
        old, rollout = data["prev_logprobs"][:, 1:], data["generation_logprobs"][:, 1:]
        batch = padded_rows(mask, self.gate)
        if self.loss_type is LossType.TOKEN_LEVEL:
            weights = aggregation.token_mean(batch, total=global_valid_toks, ranks=1)
        else:
            weights = aggregation.seq_mean_token_mean(batch, total=global_valid_seqs, ranks=1)
        weights = weights * sampled.to(weights.dtype)  # loss_multiplier of each datum
        self._check_scored("prev_logprobs", old, next_token_logprobs, mask, "force_on_policy_ratio to false")
        penalty: dict[str, Any] = {}
        if self.kl:
            ref = data["reference_policy_logprobs"][:, 1:]
            setting = "reference_policy_kl_penalty above 0"
            self._check_scored("reference_policy_logprobs", ref, next_token_logprobs, mask, setting)
            penalty = {"ref_logp": ref, "kl": self.kl, "clamp_k3": True}
        # The reference is that of the whole vocabulary under top-k and top-p, too, and so is the policy in the penalty.
        unfiltered = data.get("curr_logprobs_unfiltered") if self.kl else None
        out = token_loss(
            next_token_logprobs, old, data["advantages"][:, 1:], batch, self.gate, weights, rollout_logp=rollout,
            **(penalty if unfiltered is None else {}),
        )  # fmt: skip
        seen, total = fractions(out.metrics, self.gate), out.loss
        if unfiltered is not None:
            alone = token_loss(
                unfiltered, None, torch.zeros_like(unfiltered), batch, gates.ppo_clip(), weights, **penalty
            )
            total = total + alone.loss
            of_penalty = fractions(alone.metrics, self.gate)
            seen |= {name: seen[name] + of_penalty[name] for name in FLAGS}
        # NeMo-RL adds up micro-batches' numbers, each over the count of the step; it warns about a mean above 1.05
        count = max(float(global_valid_toks), 1.0)
        share = seen.pop("tokens") / count
        error = torch.where(mask, (rollout - old).abs(), 0.0).float().exp()
        error = torch.where(mask, error, 0.0).sum() / count
        return total, {
            "loss": float(total.detach()),
            "token_mult_prob_error": float(error),
            **{f"hpo/{name}": seen[name] * share for name in ("clipped", "dual_clipped", "kl")},
            "num_valid_samples": float(sampled.sum()),
            **{f"hpo/{name}": seen[name] for name in FLAGS},
        }

    def _check_scored(
        self, name: str, given: torch.Tensor, logp: torch.Tensor, mask: torch.Tensor, setting: str
    ) -> None:
        """Check that ``given`` is no placeholder: zeros make every token certain, although the policy gives one a
        probability below 1/e. NeMo-RL's own loss waits for the device, too."""
        is_zero = (torch.where(mask, given, 0.0) == 0).all() & (torch.where(mask, logp.detach(), 0.0) < -1).any()
        check(
            not bool(is_zero),
            "{}: expected log-probabilities, got zeros, which NeMo-RL hands over where its yaml lets it skip them; set "
            "loss_fn.{}",
            name,
            setting,
        )
