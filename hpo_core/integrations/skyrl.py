"""SkyRL: ratio gates and advantage estimators of hpo_core that SkyRL's configuration names.

    python -m hpo_core.integrations.skyrl ARGUMENTS  trainer.algorithm.policy_loss_type=hpo_gspo

takes the arguments of ``skyrl.train.entrypoints.main_base``. Importing this module registers the losses
``hpo_ppo_clip``, ``hpo_dual_clip``, ``hpo_gspo``, ``hpo_gspo_token``, ``hpo_cispo`` and ``hpo_sapo``, whose bounds are
the configuration's, those of ``PRESETS`` under ``hpo_`` and their name, and the estimators of ``ESTIMATORS`` under
``trainer.algorithm.advantage_estimator=hpo_<name>``. One import in the driver, before ``ray.init``, is enough: SkyRL
ships the functions registered there to its workers.
Fully asynchronous training is not for them: they compare with a recomputed old policy, as SkyRL's own losses do, which
it refuses there by name.
Shapes: ``B`` responses in a micro-batch, ``L`` tokens each.
"""

from __future__ import annotations

import functools
import importlib
import operator
import re
import runpy
from collections.abc import Callable
from typing import Any

import torch

try:
    from skyrl.backends.skyrl_train.utils.ppo_utils import (  # type: ignore[import-not-found,unused-ignore]
        AdvantageEstimatorRegistry,
        PolicyLossRegistry,
        apply_off_policy_correction,
    )
except ImportError as error:
    raise ImportError("hpo_core.integrations.skyrl needs SkyRL 0.4: pip install skyrl") from error

from .. import advantages, gates
from ..advantages.terms import accepted_keywords, level_of, name_of
from ..checks import check, require_type
from ..gates import RatioGate
from .micro_batch import fractions, lower_epsilon, padded_rows, token_clip, token_loss
from .prompt_advantages import ESTIMATORS, check_prompt_estimator, prompt_advantages, settings_of
from .served import check_gate, check_proportional, check_registered, check_sampler, check_unread

__all__ = ["ESTIMATORS", "PRESETS", "register", "register_advantage"]

# Gates with the bounds of their papers that need no more than SkyRL tells a loss.
PRESETS = (
    *("a_lol", "aspo", "ce_gppo", "dapo", "dppo_kl", "dppo_tv", "fiberpo", "gmpo", "icepop", "luspo", "mis", "opmd"),
    *("rec", "reinforce", "spo", "step_gspo", "tis", "topr", "triplet_clip", "vespo"),
)

# The settings that SkyRL's losses read, and SkyRL's own values; a field that holds them counts as not set.
_CLIPS = {"eps_clip_low": 0.2, "eps_clip_high": 0.2}
_CISPO = {"cispo.cispo_eps_clip_low": 1.0, "cispo.cispo_eps_clip_high": 4.0}
_SAPO = {"sapo.tau_pos": 1.0, "sapo.tau_neg": 1.05}
_UNSET = {
    **_CLIPS, **_CISPO, **_SAPO, "clip_ratio_c": 3.0, "cispo.cispo_anchor": "old", "dppo.dppo_type": "binary_tv",
    "dppo.delta_low": 0.2, "dppo.delta_high": 0.2, "clip_cov.clip_ratio": 2e-4, "clip_cov.clip_cov_lb": 1.0,
    "clip_cov.clip_cov_ub": 5.0, "kl_cov.kl_cov_frac": 0.2, "kl_cov.ppo_kl_coef": 1.0,
}  # fmt: skip


def register(name: str, gate: RatioGate | Callable[[Any], RatioGate], *, backend: str | None = None) -> None:
    """Make a gate a policy loss of SkyRL, under ``trainer.algorithm.policy_loss_type=name``.

    Call it in the driver before ``ray.init``. Registering a name again replaces it.

    Args:
        gate: a RatioGate, or a function that makes one from SkyRL's AlgorithmConfig at each call.
        backend: a name from ``hpo_core.backends()``. Default: by device.

    Raises:
        ValueError: a gate that needs an input that SkyRL does not give its loss, or one with a term that does not grow
            with the advantage: SkyRL's advantages carry the denominator of the loss, and such a term would lack it.
    """
    check_registered(gate, "SkyRL's AlgorithmConfig")
    if isinstance(gate, RatioGate):
        _check(gate)
    PolicyLossRegistry._functions.pop(name, None)
    PolicyLossRegistry.register(name, functools.partial(_policy_loss, gate, backend))


def _check(gate: RatioGate) -> None:
    check_gate(gate, "SkyRL")
    check_proportional(gate, "SkyRL's advantages carry the denominator of the loss")


def _policy_loss(
    gate: RatioGate | Callable[[Any], RatioGate],
    backend: str | None,
    /,
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    config: Any,
    loss_mask: torch.Tensor | None = None,
    rollout_logprobs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """The loss that SkyRL calls: all ``[B, L]``. The advantages carry the denominator already, so the loss is a sum."""
    if isinstance(gate, RatioGate):
        _reading(gate, config)
    else:
        gate = gate(config)
        require_type(
            isinstance(gate, RatioGate), "gate: expected a RatioGate from the registered function, got {}", gate
        )
        _check(gate)
    corrected = config.off_policy_correction
    check_sampler(gate, rollout_logprobs, "generator.sampling_params.logprobs")
    check(
        not gate.corrects_sampler or corrected.tis_ratio_type is None,
        "off_policy_correction.tis_ratio_type: {!r} and the gate {!r} correct the same difference; set it to null",
        corrected.tis_ratio_type,
        gate.name,
    )
    with torch.autocast(log_probs.device.type, enabled=False):
        mask = torch.ones_like(log_probs) if loss_mask is None else loss_mask
        # SkyRL's own correction, applied to ones, is the factor on each token; it reads masked positions.
        valid = mask != 0
        old = torch.where(valid, old_log_probs, 0.0).float()
        sampler = None if rollout_logprobs is None else torch.where(valid, rollout_logprobs, 0.0).float()
        weight, kept, seen = apply_off_policy_correction(torch.ones_like(old), old, sampler, mask, corrected)
        batch = padded_rows(mask, gate)
        out = token_loss(
            log_probs, old, advantages, batch, gate, torch.ones(batch.rows, device=old.device), rollout_logp=sampler,
            token_mask=(kept != 0).expand(valid.shape),  # levels aggregate the tokens that SkyRL's masks drop, too
            token_weight=weight.float() if corrected.tis_ratio_type is not None else None, backend=backend,
        )  # fmt: skip
    found = fractions(out.metrics, gate)  # every rank has all names, because SkyRL reduces them one by one
    clipped = found.pop("clipped")
    return out.loss, {"clip_ratio": clipped, **{f"hpo/{name}": value for name, value in found.items()}, **seen}


def register_advantage(name: str, estimator: Callable[..., torch.Tensor], *, backend: str | None = None) -> None:
    """Make an estimator of rows or tokens one of SkyRL's, under ``trainer.algorithm.advantage_estimator=name``.

    It is called on the rewards of responses ``[B]`` (of tokens ``[B L]`` where it says so), with those of ``group_ids``
    (SkyRL's ``index``), ``lengths`` and ``batch`` that it takes; fix the rest with ``functools.partial``.

    Raises:
        ValueError: an estimator that needs an argument that SkyRL does not give.
    """
    check_prompt_estimator(estimator, "SkyRL")
    AdvantageEstimatorRegistry._functions.pop(name, None)
    AdvantageEstimatorRegistry.register(name, functools.partial(_advantage, estimator, backend))


def _advantage(
    estimator: Callable[..., torch.Tensor],
    backend: str | None,
    /,
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Any = None,
    grpo_norm_by_std: bool = True,
    gamma: float = 1.0,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    settings = settings_of(estimator, gamma, grpo_norm_by_std, "grpo_norm_by_std")
    # Step by step SkyRL hands over ones in place of masks, as floats; its own estimators of tokens are refused there.
    check(
        not (response_mask.is_floating_point() and response_mask.all()) or not _reads_masks(estimator),
        "advantage_estimator: {} reads tokens or lengths, which SkyRL does not give under step_wise_trajectories; take "
        "one of rewards and prompts, such as hpo_grpo or hpo_rloo",
        name_of(estimator),
    )
    mask = response_mask
    if index is not None:  # SkyRL fills batches up with copies of a row, whose prompts have these ids
        fills = [re.fullmatch(r"pad\d+", str(each)) is not None for each in index]
        mask = mask * ~torch.tensor(fills, device="cpu").to(mask.device)[:, None]
    return prompt_advantages(estimator, backend, token_level_rewards.float(), mask, index, settings=settings)


def _reads_masks(estimator: Callable[..., torch.Tensor]) -> bool:
    return level_of(estimator) == "token" or bool(accepted_keywords(estimator, None, lengths=None, batch=None))


# -------------------------------------------------------------------------------- gates from SkyRL's configuration


def _reading(gate: RatioGate, config: Any, *fields: str) -> RatioGate:
    """The gate, which reads no fields but these."""
    given = {field: operator.attrgetter(field)(config) for field in _UNSET if field not in fields}
    check_unread(gate, "SkyRL", given, _UNSET, " or choose another policy_loss_type")
    return gate


def _ppo_clip(config: Any) -> RatioGate:
    return _reading(token_clip(config.eps_clip_low, config.eps_clip_high), config, *_CLIPS)


def _dual_clip(config: Any) -> RatioGate:
    gate = token_clip(config.eps_clip_low, config.eps_clip_high, config.clip_ratio_c)
    return _reading(gate, config, *_CLIPS, "clip_ratio_c")


def _gspo(config: Any) -> RatioGate:
    return _reading(gates.gspo(lower_epsilon(config.eps_clip_low), config.eps_clip_high), config, *_CLIPS)


def _gspo_token(config: Any) -> RatioGate:
    return _reading(gates.gspo_token(lower_epsilon(config.eps_clip_low), config.eps_clip_high), config, *_CLIPS)


def _cispo(config: Any) -> RatioGate:
    fields = config.cispo
    gate = gates.cispo(ratio_cap=1 + fields.cispo_eps_clip_high, ratio_low=1 - lower_epsilon(fields.cispo_eps_clip_low))
    return _reading(gate, config, *_CISPO)


def _sapo(config: Any) -> RatioGate:
    return _reading(gates.sapo(config.sapo.tau_pos, config.sapo.tau_neg), config, *_SAPO)


def _register_all() -> None:
    for make in (_ppo_clip, _dual_clip, _gspo, _gspo_token, _cispo, _sapo):
        register(f"hpo{make.__name__}", make)
    for preset in PRESETS:
        register(f"hpo_{preset}", getattr(gates, preset)())
    for estimator in ESTIMATORS:
        register_advantage(f"hpo_{estimator}", getattr(advantages, estimator))


if __name__ == "__main__":
    importlib.import_module("hpo_core.integrations.skyrl")  # not as __main__, which workers could not import
    runpy.run_module("skyrl.train.entrypoints.main_base", run_name="__main__", alter_sys=True)
else:
    _register_all()
