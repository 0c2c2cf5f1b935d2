"""The loss that ``GRPOConfig`` asks for: its gate, and the fields that would have no effect."""

from __future__ import annotations

import math
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

from .. import gates
from ..arguments import check_choice
from ..checks import check
from ..entropy import forking_tokens
from ..gates import Clip, Drop, Level, RatioGate
from ..kl import k3
from ..specs import Head

_CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")  # loss types with PPO's clip; they differ in the denominator
KNOWN = (*_CLIPPED, "cispo", "sapo", "vespo")

# Fields that an argument of the trainer replaces.
REPLACED = {
    "gate": (
        *("epsilon", "epsilon_high", "delta", "importance_sampling_level", "off_policy_mask_threshold"),
        *("sapo_temperature_neg", "sapo_temperature_pos"),
        *("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
    ),
    "advantage": ("scale_rewards", "multi_objective_aggregation"),
    "window": ("top_entropy_quantile",),
    "entropy": ("top_entropy_quantile",),
}
# Fields that TRL's trainer keeps as attributes of its own, from which its loss reads them.
_KEPT = (
    *("loss_type", "importance_sampling_level", "epsilon_high", "off_policy_mask_threshold", "beta"),
    *("scale_rewards", "multi_objective_aggregation"),
    *("top_entropy_quantile", "use_vllm", "vllm_importance_sampling_correction"),
)
_REPLACED = (*REPLACED["gate"], *REPLACED["advantage"])
_READ = (*_REPLACED, "loss_type", "beta", "use_bias_correction_kl", *_KEPT[-3:])


def settings_of(trainer: Any) -> dict[str, Any]:
    """The settings of a trainer that TRL's loss and advantages read, by field of ``GRPOConfig``: callbacks may change
    them during the training, on the trainer or, for the rest of the fields, on ``trainer.args``."""
    settings = {name: getattr(trainer if name in _KEPT else trainer.args, name) for name in _READ}
    return settings | {"epsilon": trainer.epsilon_low}


def loss_fields(settings: dict[str, Any], given: Collection[str]) -> dict[str, Any]:
    """The ``kl``, and the ``gate`` and ``window`` that no argument ``given`` replaces, as the ``settings`` say."""
    config = SimpleNamespace(**settings)
    _check_loss(config, "gate" in given)
    bias = "importance" if config.use_bias_correction_kl else "value"
    fields: dict[str, Any] = {"kl": k3(config.beta, gradient=bias) if config.beta != 0.0 else None}
    if "gate" not in given:
        fields["gate"] = gate_from_config(config)
    if "window" not in given and "entropy" not in given:
        quantile = config.top_entropy_quantile
        fields["window"] = forking_tokens(quantile, scope="call") if quantile < 1.0 else None
    return fields


def check_unchanged(settings: dict[str, Any], before: dict[str, Any], given: Collection[str]) -> None:
    """Raise for a field that has changed during the training and that one of the arguments ``given`` replaces."""
    for argument in given:
        for name in REPLACED[argument]:
            check(
                settings.get(name) == before.get(name),
                "{}: changed from {!r} to {!r} during the training, without effect; {}= replaces it",
                name,
                before.get(name),
                settings.get(name),
                argument,
            )


def gate_from_config(args: Any) -> RatioGate:
    """The gate that ``loss_type``, ``importance_sampling_level``, ``epsilon``, ``epsilon_high`` and ``delta`` describe,
    with the mask of ``off_policy_mask_threshold``.

    PPO's clip, ``loss_t = -min(min(r, delta) A, clip(r, 1 - epsilon, 1 + epsilon_high) A)``; for ``cispo``
    ``-sg[min(r, epsilon_high)] A logp``. At the sequence level r is the true sequence ratio, as in GSPO.

    >>> from trl import GRPOConfig
    >>> gate_from_config(GRPOConfig("out", epsilon=0.2, epsilon_high=0.28, bf16=False)).token.high
    (1.28, inf)
    """
    gate = _gate(args)
    if args.off_policy_mask_threshold is None:
        return gate
    return gates.compose(gate, *gates.opsm(args.off_policy_mask_threshold).corrections)


def _gate(args: Any) -> RatioGate:
    kind, level = args.loss_type, args.importance_sampling_level
    check_choice("loss_type", kind, KNOWN)
    check_choice("importance_sampling_level", level, ("token", "sequence"))
    check(
        level == "token" or kind not in ("sapo", "vespo"),
        "importance_sampling_level: expected 'token' with loss_type={!r}, got {!r}; pass gate=",
        kind,
        level,
    )
    if kind == "sapo":
        return gates.sapo(args.sapo_temperature_pos, args.sapo_temperature_neg)
    if kind == "vespo":
        lam = (max(args.vespo_lambda_pos, 1e-4), max(args.vespo_lambda_neg, 1e-4))  # as TRL has it
        return gates.vespo((args.vespo_k_pos, args.vespo_k_neg), lam)
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    if kind == "cispo":
        check(
            high >= 1,
            "epsilon_high: for loss_type='cispo' it is the absolute cap of the ratio, expected >= 1 (5 in ScaleRL), "
            "got {}",
            high,
        )
        clip, head = Clip(high=(float(high), float(high))), Head.SCORE
    else:
        low, cap = max(0.0, 1.0 - args.epsilon), math.inf if args.delta is None else float(args.delta)
        check(cap >= 1.0 + high, "delta: expected a cap >= 1 + epsilon_high = {}, got {}", 1.0 + high, args.delta)
        clip, head = Clip(low=(0.0, low), high=(1.0 + high, cap)), Head.LINEAR
    if level == "sequence":
        return RatioGate(f"trl_{kind}_sequence", Drop(), (Level(clip),), head, source="TRL; arXiv 2507.18071")
    return RatioGate(f"trl_{kind}", clip, head=head, source="TRL; arXiv 1707.06347")


def check_config(args: Any, given: Collection[str]) -> None:
    """Raise for a field that would have no effect: unsupported, or replaced by one of the arguments ``given``."""

    def check_default(name: str, why: str) -> None:
        default, value = type(args).__dataclass_fields__[name].default, getattr(args, name)
        check(value == default, "{}: expected its default {!r}, got {!r}; {}", name, default, value, why)

    for argument in given:
        for name in REPLACED[argument]:
            check_default(name, f"{argument}= replaces it")
    _check_loss(args, "gate" in given)


def _check_loss(args: Any, gate_given: bool) -> None:
    """Raise for fields that together ask for a loss which TRL computes otherwise."""
    check_choice("loss_type", args.loss_type, KNOWN)
    check(
        args.loss_type != "vespo" or gate_given or not (args.use_vllm and args.vllm_importance_sampling_correction),
        "vllm_importance_sampling_correction: with loss_type='vespo' TRL puts this weight into the sequence's ratio, "
        "hpo_core does not; set it to False, and for TRL's ratio pass gate= with Channel.TOTAL",
    )
    check(
        args.beta == 0.0 or not args.use_bias_correction_kl or args.importance_sampling_level == "token",
        "use_bias_correction_kl: expected False with importance_sampling_level='sequence', where TRL multiplies the "
        "penalty by the sequence's ratio and hpo_core by the token's; got True with beta {}",
        args.beta,
    )
