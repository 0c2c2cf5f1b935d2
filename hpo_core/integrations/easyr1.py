"""EasyR1, a fork of verl from before its registries: any gate of tokens, steps or trajectories in its actor.

    HPO_GATE="step_gspo" python -m hpo_core.integrations.easyr1 config=examples/config.yaml ...

takes the arguments of ``verl.trainer.main``. EasyR1 has no registry of losses: the launcher replaces
``compute_policy_loss`` of ``verl.workers.actor.dp_actor`` in each Ray worker, through Ray's own
``worker_process_setup_hook``. Without ``HPO_GATE`` the gate is the one that the configuration describes.
Shapes: ``B`` rows of a micro-batch, ``L`` tokens each.
"""

from __future__ import annotations

import torch

from .. import gates
from ..arguments import check_choice
from ..checks import check
from ..gates import RatioGate
from ..specs import Routing
from .micro_batch import fractions, padded_rows, sequence_clip, token_clip, token_loss, weights_of
from .replaced import after_import, run_under_ray
from .served import check_environment_gate, check_gate, environment_gate_beside

__all__ = ["compute_policy_loss", "install", "launch"]

# EasyR1's own values; a field that holds them counts as not set.
_UNSET = {
    "clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "clip_ratio_dual": 3.0, "tau_positive": 1.0, "tau_negative": 1.05,
    "loss_type": "default",
}  # fmt: skip

_HOOK = "hpo_core.integrations.easyr1.install"


def compute_policy_loss(
    old_log_probs: torch.Tensor,
    log_probs: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_dual: float,
    tau_positive: float,
    tau_negative: float,
    loss_type: str,
    loss_avg_mode: str,
) -> tuple[torch.Tensor, dict[str, float]]:
    """The function that EasyR1's actor calls: all ``[B, L]``. A mean of the micro-batch, which the actor weighs by its
    tokens.

    Raises:
        ValueError: a field that ``HPO_GATE`` would silence; a gate that needs an input that EasyR1 does not give.
    """
    given = (clip_ratio_low, clip_ratio_high, clip_ratio_dual, tau_positive, tau_negative, loss_type)
    fields = dict(zip(_UNSET, given, strict=True))
    gate = environment_gate_beside("EasyR1", fields, _UNSET)
    if gate is None:
        gate = _described(loss_type, clip_ratio_low, clip_ratio_high, clip_ratio_dual, tau_positive, tau_negative)
    check_gate(gate, "EasyR1", one_policy="EasyR1 passes its loss no log-probabilities of the sampler")
    check_choice("loss_avg_mode", loss_avg_mode, ("token", "seq"))
    batch = padded_rows(response_mask, gate)
    mode = "token-mean" if loss_avg_mode == "token" else "seq-mean-token-mean"
    weights = weights_of(mode, batch)
    out = token_loss(log_probs, old_log_probs, advantages, batch, gate, weights)
    reported = fractions(out.metrics, gate)
    names = {"clipped": "pg_clipfrac_higher", "dual_clipped": "pg_clipfrac_lower", "kl": "ppo_kl"}
    minus = torch.where(response_mask != 0, -log_probs.detach(), 0.0)
    entropy = float((weights[:, None] * minus).sum())  # EasyR1's estimate of it
    logged = {names.get(name, f"hpo_{name}"): value for name, value in reported.items() if name != "tokens"}
    return out.loss, {**logged, "entropy_loss": entropy}


def _described(kind: str, low: float, high: float, dual: float, positive: float, negative: float) -> RatioGate:
    """The gate of EasyR1's ``loss_type``."""
    check_choice("loss_type", kind, ("default", "gspo", "gspo_token", "cispo", "sapo"))
    check(
        kind == "sapo" or low <= 1,
        "clip_ratio_low: expected an epsilon <= 1, got {}; EasyR1 takes the logarithm of 1 - clip_ratio_low, and "
        "its own loss would be NaN; 1 is no lower clip",
        low,
    )
    if kind == "cispo":
        return gates.cispo(ratio_cap=1 + high, ratio_low=1 - low)
    if kind == "sapo":
        return gates.sapo(positive, negative)
    if kind == "default":
        return token_clip(low, high, dual)
    return sequence_clip(low, high, dual, routing=Routing.THROUGH if kind == "gspo" else Routing.SELF)


def install() -> None:
    """Replaces the name in this process when the actor is imported; Ray calls it in each of its workers."""
    name = "compute_policy_loss"
    after_import("verl.workers.actor.dp_actor", lambda module: setattr(module, name, compute_policy_loss))


def launch() -> None:
    """EasyR1's own command line, whose Ray workers have the hook.

    Raises:
        ValueError: a gate that the workers would refuse.
    """
    check_environment_gate("EasyR1", one_policy="EasyR1 passes its loss no log-probabilities of the sampler")
    run_under_ray("verl.trainer.main", _HOOK)


if __name__ == "__main__":
    launch()
