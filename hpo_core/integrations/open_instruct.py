"""open-instruct: any gate of tokens, steps or trajectories in its GRPO, on its packed sequences as they are.

    HPO_GATE="gspo(eps_low=3e-4, eps_high=4e-4)" python -m hpo_core.integrations.open_instruct grpo_fast ARGUMENTS

takes the arguments of ``open_instruct/grpo_fast.py``, or of ``open_instruct/grpo.py`` after ``grpo``. open-instruct has
no registry of losses, and tells ``compute_grpo_loss`` of its ``grpo_utils`` ratios without masks or sequences: the
functions that are called before it with these are wrapped, in each Ray worker. Without ``HPO_GATE`` the gate is the one
that the arguments describe. Shapes: ``B`` packs of ``L`` tokens. Position t speaks of token t + 1.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch

from .. import gates
from ..arguments import check_choice
from ..checks import check
from ..gates import RatioGate
from .micro_batch import fractions, packed_rows, token_clip, token_loss, warn_of_flags
from .replaced import after_import, run_under_ray
from .served import check_environment_gate, check_gate, environment_gate_beside

__all__ = ["PackedLoss", "install", "launch"]

# open-instruct's own values; a field that holds them counts as not set.
_UNSET = {"clip_lower": 0.2, "clip_higher": 0.272, "loss_fn": "dapo"}

_NAN = 1.0  # the value that open-instruct writes over a log-probability that is NaN, as vLLM's missing ones are

_HOOK = "hpo_core.integrations.open_instruct.install"
_MAINS = ("grpo_fast", "grpo")


class PackedLoss:
    """Three functions in place of those of ``grpo_utils``, which open-instruct calls in this order for each pack.

    The first two are open-instruct's and keep their arguments: positions, from which sequences follow, the mask, and
    both old policies. The penalty on the KL to the reference and the correction by ``rho`` stay open-instruct's.
    """

    names = ("forward_for_logprobs", "compute_rho_correction", "compute_grpo_loss")

    def __init__(self, theirs: ModuleType) -> None:
        self._forward, self._correct, self._loss = (getattr(theirs, name) for name in self.names)

    def forward_for_logprobs(
        self,
        model: Any,
        query_responses: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor,
        *arguments: Any,
        **options: Any,
    ) -> Any:
        self._positions = position_ids[:, 1:]
        return self._forward(model, query_responses, attention_mask, position_ids, *arguments, **options)

    def compute_rho_correction(
        self,
        old_logprob: torch.Tensor,
        vllm_logprobs: torch.Tensor,
        response_mask: torch.Tensor,
        advantages: torch.Tensor,
        config: Any,
    ) -> Any:
        self._old, self._sampler, self._mask = old_logprob, vllm_logprobs, response_mask
        return self._correct(old_logprob, vllm_logprobs, response_mask, advantages, config)

    def compute_grpo_loss(
        self,
        new_logprobs: torch.Tensor,
        ratio: torch.Tensor,
        advantages: torch.Tensor,
        ref_logprobs: torch.Tensor | None,
        config: Any,
        rho_weights: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``[B, L]`` each: the loss, the fraction of clipped tokens, and open-instruct's KL. open-instruct adds the
        loss up over the mask, which is why each token has the mean of all.

        Raises:
            ValueError: a field that the gate of ``HPO_GATE`` would silence; a gate that needs an input that
                open-instruct does not give; sequence parallelism, with which a rank has parts of the sequences.
        """
        gate = _gate(config)
        check(
            not gate.units or config.sequence_parallel_size == 1,
            "sequence_parallel_size: the gate {!r} takes whole sequences, expected 1, got {}",
            gate.name,
            config.sequence_parallel_size,
        )
        mask = self._mask
        begins = self._positions == 0  # also of padding, each token of which is a row without valid tokens
        begins[:, 0] = True
        starts = torch.nn.functional.pad(begins.flatten().nonzero()[:, 0], (0, 1), value=mask.numel())
        batch = packed_rows(starts, mask.flatten(), gate)
        _, _, kl = self._loss(new_logprobs, ratio, advantages, ref_logprobs, config, rho_weights)
        logp, old, sampler = (
            torch.where(each == _NAN, torch.nan, each).flatten() for each in (new_logprobs, self._old, self._sampler)
        )
        out = token_loss(
            logp, old, advantages.flatten(), batch, gate, logp.new_ones(batch.rows, dtype=torch.float32),
            rollout_logp=sampler, token_mask=rho_weights.flatten() != 0, token_weight=rho_weights.flatten().float(),
        )  # fmt: skip
        reported = fractions(out.metrics, gate)
        warn_of_flags(reported)
        mean = out.loss / mask.sum().clamp(min=1)
        return torch.where(mask, mean, 0.0), torch.where(mask, reported["clipped"], 0.0), kl


def _gate(config: Any) -> RatioGate:
    override = environment_gate_beside("open-instruct", {name: getattr(config, name) for name in _UNSET}, _UNSET)
    gate = _described(config) if override is None else override
    anchored = "with --use_vllm_logprobs there is one old policy" if config.use_vllm_logprobs else ""
    check_gate(gate, "open-instruct", one_policy=anchored)
    check(
        not (gate.corrects_sampler and config.use_rho_correction),
        "use_rho_correction: it and the gate {!r} correct the same difference; set it to False",
        gate.name,
    )
    return gate


def _described(config: Any) -> RatioGate:
    """The gate of open-instruct's arguments."""
    check_choice("loss_fn", config.loss_fn, ("dapo", "cispo"))
    if config.loss_fn == "cispo":
        return gates.cispo(ratio_cap=1 + config.clip_higher)
    return token_clip(config.clip_lower, config.clip_higher)


def install() -> None:
    """Replaces the functions in this process when they are imported; Ray calls it in each of its workers."""
    after_import("open_instruct.grpo_utils", _replace)


def _replace(theirs: ModuleType) -> None:
    loss = PackedLoss(theirs)
    for name in loss.names:
        setattr(theirs, name, getattr(loss, name))


def launch() -> None:
    """open-instruct's own command line, whose Ray workers have the hook.

    Raises:
        ValueError: another program than its two; a gate that the workers would refuse.
    """
    main = sys.argv.pop(1) if len(sys.argv) > 1 else None
    check_choice("program", main, _MAINS)
    check_environment_gate("open-instruct")
    run_under_ray(f"open_instruct.{main}", _HOOK)


if __name__ == "__main__":
    launch()
