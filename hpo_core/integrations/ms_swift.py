"""ms-swift: its GRPO trainer with any gate of tokens, steps or trajectories. A file of two lines,

    from hpo_core import gates; from hpo_core.integrations.ms_swift import use
    use(gates.gspo(eps_low=3e-4, eps_high=4e-4))

is named by ``swift rlhf --rlhf_type grpo --external_plugins file.py``: swift imports it in each process, before it
looks its trainer up. Shapes: ``B`` completions of a micro-batch, ``L`` tokens each.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch

try:
    from swift.rlhf_trainers import grpo_trainer  # type: ignore[import-not-found,unused-ignore]
    from swift.trainers.trainer_factory import TrainerFactory  # type: ignore[import-not-found,unused-ignore]
except ImportError as error:
    raise ImportError("hpo_core.integrations.ms_swift needs ms-swift 4.6: pip install ms-swift") from error

from .. import aggregation, gates, kl
from ..arguments import check_choice
from ..batch import PackedBatch
from ..checks import check, require_type
from ..gates import RatioGate
from ..specs import Routing
from .micro_batch import fractions, padded_rows, sequence_clip, token_clip, token_loss
from .served import check_gate, check_sampler, check_unread

__all__ = ["HPOSwiftTrainer", "use"]

# swift's own values; an argument that holds them counts as not set.
_UNSET = {
    "importance_sampling_level": "token", "epsilon": 0.2, "epsilon_high": 0.2, "delta": None, "tau_pos": 1.0,
    "tau_neg": 1.05,
}  # fmt: skip


class HPOSwiftTrainer(grpo_trainer.GRPOTrainer):  # type: ignore[misc]
    """swift's GRPO trainer; :attr:`gate` is the gate, or None for the one that the arguments describe.

    ``loss_type`` names the denominator beside any gate. Masks, rollout correction, top entropies, CHORD and logs
    stay swift's; the logged ``hpo_core/...`` are those of the main process.

    Raises:
        ValueError: an argument that the gate would silence; one without a counterpart here.
    """

    gate: RatioGate | None = None
    chord_sft_iterator: Any
    # The tensors that swift's own pass over a scored micro-batch left behind.
    _scored: tuple[torch.Tensor, torch.Tensor | None] | None = None
    _sampler_weight: torch.Tensor | None = None

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._check_arguments()

    def _check_arguments(self) -> None:
        check_choice("loss_type", self.loss_type, ("bnpo", "cispo", "dapo", "dr_grpo", "grpo", "sapo"))
        check(not self.use_liger_loss, "use_liger_kernel: Liger's loss takes the place of any other; set it to false")
        check(not self.sdar_loss_coef > 0, "sdar_loss_coef: no distillation beside hpo_core's loss; set it to 0")
        if self.gate is None:
            self._described()
            return
        check_gate(self.gate, "ms-swift")
        given = {
            "importance_sampling_level": self.importance_sampling_level, "epsilon": self.epsilon_low,
            "epsilon_high": self.epsilon_high, "delta": self.args.delta, "tau_pos": self.tau_pos,
            "tau_neg": self.tau_neg,
        }  # fmt: skip
        check_unread(self.gate, "swift", given, _UNSET)
        check(
            self.rollout_importance_sampling_mode is None or not self.gate.corrects_sampler,
            "rollout_importance_sampling_mode: {!r} and the gate {!r} correct the same difference; leave it out",
            self.rollout_importance_sampling_mode,
            self.gate.name,
        )

    def _described(self) -> RatioGate:
        """The gate of ``loss_type``, ``importance_sampling_level``, ``epsilon``, ``epsilon_high`` and ``delta``."""
        level, delta = self.importance_sampling_level, self.args.delta
        if self.loss_type in ("cispo", "sapo"):
            check(level == "token", "importance_sampling_level: {!r} is of tokens, got {!r}", self.loss_type, level)
            return (
                gates.cispo(ratio_cap=self.epsilon_high)
                if self.loss_type == "cispo"
                else gates.sapo(self.tau_pos, self.tau_neg)
            )
        least = 1 + self.epsilon_high
        check(delta is None or delta >= least, "delta: expected >= 1 + epsilon_high = {}, got {}", least, delta)
        if level == "token":
            return token_clip(self.epsilon_low, self.epsilon_high, delta)
        routings = {"sequence": Routing.THROUGH, "sequence_token": Routing.SELF}
        check_choice("importance_sampling_level", level, ("token", *routings))
        return sequence_clip(self.epsilon_low, self.epsilon_high, delta, routing=routings[level])

    def _compute_loss_and_metrics(
        self, model: Any, model_inputs: dict[str, Any], grpo_batch: Any
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """The function that swift calls. Its own function runs on the scores without their graph and tells masks,
        corrections and metrics; the loss is ours."""
        logp, entropy = self._get_per_token_logps_and_entropies(
            model, model_inputs, grpo_batch, compute_entropy=self.compute_entropy
        )
        chord, self.chord_sft_iterator = self.chord_sft_iterator, None
        present, read = grpo_batch.completion_mask.bool(), copy.copy(grpo_batch)
        for name in ("old_per_token_logps", "rollout_per_token_logps", "ref_per_token_logps", "advantages"):
            tensor = getattr(read, name)
            if tensor is not None and tensor.shape == present.shape:
                setattr(read, name, torch.where(present, tensor, 0.0))
        # swift multiplies by its mask, which leaves NaN as it is
        self._scored, self._sampler_weight = (torch.where(present, logp.detach(), 0.0), entropy), None
        try:
            with torch.no_grad():
                _, metrics = super()._compute_loss_and_metrics(model, model_inputs, read)
        finally:
            self._scored, self.chord_sft_iterator = None, chord
        if self.gate is not None:
            metrics.pop("clipping", None)  # the gate replaces the clip that this describes
        gate = self._described() if self.gate is None else self.gate
        rollout = grpo_batch.rollout_per_token_logps
        check_sampler(gate, rollout, "--use_vllm true, whose log-probabilities swift keeps")
        mask = metrics["completion_mask"].bool()
        batch = padded_rows(mask, gate)
        old, weight = grpo_batch.old_per_token_logps, self._sampler_weight
        penalty = kl.k3(self.beta) if self.beta and not self.kl_in_reward else None
        threshold = metrics["entropy"].get("entropy_threshold")
        out = token_loss(
            logp, old, grpo_batch.advantages, batch, gate, self._weights(batch, grpo_batch), rollout_logp=rollout,
            ref_logp=None if penalty is None else grpo_batch.ref_per_token_logps, kl=penalty, clamp_k3=True,
            token_mask=None if threshold is None or entropy is None else entropy.detach() >= threshold,
            token_weight=None if weight is None else weight.expand_as(logp).float(),
        )  # fmt: skip
        loss = out.loss
        if metrics["mode"] == "train" and chord is not None:
            loss = grpo_trainer.compute_chord_loss(self, grpo_loss=loss)
        for name, value in fractions(out.metrics, gate).items():
            if name != "tokens":
                self._metrics[metrics["mode"]][f"hpo_core/{name}"].append(value)
        return loss, metrics

    def _weights(self, batch: PackedBatch, grpo_batch: Any) -> torch.Tensor:
        """``[B]``: the denominator of ``loss_type``. Trainer divides the loss by the accumulation steps; counts of the
        whole step undo that by swift's own function."""
        if self.loss_type in ("grpo", "sapo"):
            return aggregation.seq_mean_token_mean(batch, total=batch.rows, ranks=1)
        if self.loss_type == "bnpo":
            return aggregation.token_mean(batch, total=batch.row_counts.sum(), ranks=1)
        if self.loss_type == "dr_grpo":
            return aggregation.fixed_length(batch, self.max_completion_length, total=batch.rows, ranks=1)
        tokens = grpo_batch.num_items_in_batch / self.accelerator.num_processes
        weights: torch.Tensor = self._undo_gradient_accumulation_scaling(
            aggregation.token_mean(batch, total=tokens, ranks=1)
        )
        return weights

    def _get_per_token_logps_and_entropies(self, *args: Any, **keywords: Any) -> Any:
        if self._scored is not None:
            return self._scored
        return super()._get_per_token_logps_and_entropies(*args, **keywords)

    def _get_rollout_is_correction(self, *args: Any, **keywords: Any) -> Any:
        found = super()._get_rollout_is_correction(*args, **keywords)
        self._sampler_weight = found[1]
        return found


def use(gate: RatioGate | None = None) -> None:
    """Let ``swift rlhf --rlhf_type grpo`` train with this gate, in this process. None: the gate that its arguments
    describe.

    Raises:
        ValueError: a gate that needs an input that swift does not give its loss; ``megatron rlhf``, which ignores it.
    """
    check(  # its command imports the package before plugins, and no other does
        "swift.megatron" not in sys.modules,
        "use: 'megatron rlhf' has trainers of its own, which no gate reaches; expected 'swift rlhf', run that",
    )
    require_type(
        gate is None or isinstance(gate, RatioGate), "gate: expected a RatioGate such as gates.dapo(), got {!r}", gate
    )
    if gate is not None:
        check_gate(gate, "ms-swift")
    HPOSwiftTrainer.gate = gate
    TrainerFactory.TRAINER_MAPPING["grpo"] = f"{__name__}.HPOSwiftTrainer"
