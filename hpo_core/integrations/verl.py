"""verl: ratio gates and advantage estimators of hpo_core that verl's configuration names.

Importing this module registers the losses ``hpo_ppo_clip``, ``hpo_dapo``, ``hpo_cispo``, ``hpo_gspo`` and
``hpo_gspo_token``, and as advantage estimators those of ``ESTIMATORS`` under ``hpo_`` and their name. verl imports it
by itself wherever hpo_core is installed (entry point ``verl.plugins``), or through
``VERL_USE_EXTERNAL_MODULES=hpo_core.integrations.verl``; then
``actor_rollout_ref.actor.policy_loss.loss_mode=hpo_gspo`` and ``algorithm.adv_estimator=hpo_lite_ppo`` select one.
Shapes: ``B`` responses in a micro-batch, ``L`` tokens each, padded on the right.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

try:
    from verl.trainer.ppo.core_algos import (  # type: ignore[import-not-found,unused-ignore]
        register_adv_est,
        register_policy_loss,
    )
except ImportError as error:
    raise ImportError("hpo_core.integrations.verl needs verl 0.9.1: pip install 'hpo-core[verl]'") from error

from .. import advantages, aggregation, gates
from ..advantages.terms import accepted_keywords, check_estimator, is_multi_reward, level_of
from ..batch import PackedBatch
from ..checks import check, require_type
from ..gates import RatioGate
from ..losses import policy_loss
from ..metrics import FLAGS, SLOTS
from ..specs import Head, Unit
from .needs import MakesInputs, check_needs, made_inputs
from .turns import turns
from .verl_head import install_loss_head

__all__ = ["ESTIMATORS", "register", "register_advantage"]

# Estimators that need no more than verl gives: outcomes or token rewards, the mask, and the prompt of each response.
ESTIMATORS = (
    *("bnpo", "dgpo", "dr_grpo", "g2rpo", "gpg", "grpo", "grpo_passk", "lite_ppo", "maxrl", "mc_grpo", "ngrpo"),
    *("opo", "reinforce_pp", "reinforce_pp_baseline", "rloo"),
)

# What a function of gate inputs may take, and what verl does not tell its losses.
_AVAILABLE = ("logp", "old_logp", "advantages", "advantage_level", "batch")
_NO_SAMPLER = (
    "verl tells its losses of weights only, which multiply this loss, too; set algorithm.rollout_correction and "
    "register the gate without its correction"
)

# verl's own values of the clip fields. A field that holds them is taken as not set.
_UNSET = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}


def register(
    name: str,
    gate: RatioGate | Callable[[Any], RatioGate],
    *,
    gate_inputs: MakesInputs | None = None,
    backend: str | None = None,
) -> None:
    """Make a gate a policy loss of verl, under ``policy_loss.loss_mode=name``, in this process.

    verl looks names up in every worker process, so call it in a module that all of them import: one named in
    ``VERL_USE_EXTERNAL_MODULES``, or in ``actor_rollout_ref.model.external_lib``.

    Args:
        name: registering a name again replaces it, verl's own losses too.
        gate: a RatioGate, or a function that makes one from verl's ActorConfig at each call. A RatioGate carries its
            bounds, so a clip field of the config that is set besides is an error that names it.
        gate_inputs: for gates that need more than the batch, a function of :mod:`hpo_core.gates` (``dcpo_bounds``,
            ``kl_cov_mask``, ``m2po_mask`` ...), or ``functools.partial`` of one, or one of your own that returns
            :class:`~hpo_core.gates.GateInputs`. It is called in each micro-batch with those of ``logp``, ``old_logp``
            (``[T]``, B L of them, without gradient), ``advantages``, ``advantage_level`` and ``batch`` that it takes.
        backend: a name from ``hpo_core.backends()``. Default: by device.

    Levels above the tokens: a response is a trajectory, and its steps are the runs of tokens that no tool wrote.

    Raises:
        ValueError: a gate with a level of groups or domains, of which verl tells its losses nothing; one that needs
            inputs which ``gate_inputs`` does not make, entropies or the sampler's log-probabilities (``icepop``,
            ``tis``), of which it tells nothing either.
    """
    is_constructor = any(gate is getattr(gates, each) for each in gates.__all__)
    require_type(
        isinstance(gate, RatioGate) or (callable(gate) and not is_constructor),
        "gate: expected a RatioGate, or a function of verl's ActorConfig that returns one, got {}",
        gate,
    )
    if isinstance(gate, RatioGate):
        _check_gate(gate, gate_inputs)
    register_policy_loss(name)(functools.partial(_policy_loss, name, gate, gate_inputs, backend))


def _policy_loss(
    name: str,
    gate: RatioGate | Callable[[Any], RatioGate],
    gate_inputs: MakesInputs | None,
    backend: str | None,
    /,
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """What verl calls, by keyword: tensors ``[B, L]``; the loss is scaled for engines that average over ranks."""
    check(config is not None, "config: expected verl's ActorConfig, got None")
    if isinstance(gate, RatioGate):
        _refuse(name, config, *_UNSET)
    else:
        gate = gate(config)
        require_type(
            isinstance(gate, RatioGate), "gate: expected a RatioGate from the function of {!r}, got {}", name, gate
        )
        _check_gate(gate, gate_inputs)
    steps = turns(response_mask != 0) if any(level.unit is Unit.STEP for level in gate.levels) else None
    batch = PackedBatch.from_padded(response_mask != 0, steps=steps)  # verl's masks are of any dtype
    given = None
    if gate_inputs is not None:
        given = made_inputs(
            gate_inputs, log_prob.shape, advantages, logp=log_prob.detach(), old_logp=old_log_prob, batch=batch
        )
    result = policy_loss(
        log_prob,
        old_log_prob,
        advantages,
        batch,
        gate,
        weights=_weights(loss_agg_mode, batch, config.global_batch_info),
        token_weight=rollout_is_weights,
        # for the metrics: verl counts a token with advantage 0 as clipped only in cispo; its term is 0 either way
        token_mask=advantages != 0 if gate.head is Head.LINEAR else None,
        gate_inputs=given,
        advantage_level="token",
        backend=backend,
    )
    return result.loss, _metrics(result.metrics.vector, gate)


def _check_gate(gate: RatioGate, gate_inputs: MakesInputs | None) -> None:
    check_needs(gate, gate_inputs, _AVAILABLE, _NO_SAMPLER)
    for level in gate.levels:
        check(
            level.unit not in (Unit.GROUP, Unit.DOMAIN),
            "gate: {!r} has a level of {}s, and verl tells its losses of none; call hpo_core.policy_loss where they "
            "are known",
            gate.name,
            level.unit.name.lower(),
        )


def _weights(mode: str, batch: PackedBatch, info: Mapping[str, Any]) -> torch.Tensor:
    """``[B]``: the denominator of ``loss_agg_mode`` over the whole step, times the ranks verl averages over."""
    ranks, tokens, rows = (info.get(key) for key in ("dp_size", "batch_num_tokens", "global_batch_size"))
    ranks = 1 if ranks is None else ranks
    per_token, per_row = mode == "token-mean", mode.startswith("seq-mean")
    check(ranks == 1 or tokens is not None or not per_token, "batch_num_tokens: {!r} needs it on {} ranks", mode, ranks)
    check(ranks == 1 or rows is not None or not per_row, "global_batch_size: {!r} needs it on {} ranks", mode, ranks)
    if mode == "token-mean":
        weights = aggregation.token_mean(batch, total=tokens, ranks=ranks)
    elif mode == "token-sum":
        weights = torch.full((batch.rows,), float(ranks), dtype=torch.float32, device=batch.device)
    elif mode == "seq-mean-token-mean":
        weights = aggregation.seq_mean_token_mean(batch, total=rows, ranks=ranks)
    elif mode == "seq-mean-token-sum":
        weights = aggregation.seq_mean_token_sum(batch, total=rows, ranks=ranks)
    elif mode == "seq-mean-token-sum-norm":
        assert batch.padded_shape is not None
        constant = info.get("loss_scale_factor")
        weights = aggregation.seq_mean_token_sum(batch, total=rows, ranks=ranks)
        weights = weights / (batch.padded_shape[1] if constant is None else constant)
    else:
        raise ValueError(f"loss_agg_mode: expected one of verl's five aggregation modes, got {mode!r}")
    return weights


def _metrics(vector: torch.Tensor, gate: RatioGate) -> dict[str, float]:
    """verl's three metrics as it defines them, and the error counters; one copy to the host."""
    count = dict(zip(SLOTS, vector.tolist(), strict=True))
    clipped = sum(count[slot] for slot in SLOTS if slot.startswith("clipped_"))
    dual = count["clipped_high_negative"] if gate.head is Head.LINEAR else 0.0
    tokens = max(count["tokens"], 1.0)
    return {
        "actor/pg_clipfrac": (clipped - dual) / tokens,
        "actor/ppo_kl": -count["log_ratio_sum"] / tokens,
        "actor/pg_clipfrac_lower": dual / tokens,
        **{f"actor/hpo_{name}": count[name] for name in FLAGS},
    }


# -------------------------------------------------------------------------------------------------- advantages


def register_advantage(name: str, estimator: Callable[..., torch.Tensor], *, backend: str | None = None) -> None:
    """Make an estimator of rows or tokens one of verl's, under ``algorithm.adv_estimator=name``, in this process.

    It is called on the rewards of responses ``[B]`` (of tokens ``[B L]`` where it says so), with those of ``group_ids``
    (verl's ``uid``), ``lengths`` and ``batch`` that it takes; fix the rest with ``functools.partial``. verl asks for
    advantages in its driver, so this must run there.

    Raises:
        ValueError: a name that verl has for another estimator; an estimator that needs what verl does not tell.
    """
    require_type(callable(estimator), "estimator: expected one of hpo_core.advantages, got {!r}", estimator)
    level = level_of(estimator)
    check(
        level in ("row", "token"),
        "estimator: expected one of rows or tokens, got one of {}s, whose observations verl does not tell; call it in "
        "your own loop",
        level,
    )
    check(not is_multi_reward(estimator), "estimator: expected one of a single reward, which is what verl has; wrap it")
    check_estimator("estimator", estimator, ("group_ids", "lengths", "batch"), "verl")
    register_adv_est(name)(functools.partial(_advantage, estimator, level, backend))


def _advantage(
    estimator: Callable[..., torch.Tensor],
    level: str,
    backend: str | None,
    /,
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Any = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What verl calls, by keyword: tensors ``[B, L]``; advantages and returns of the same shape."""
    mask = response_mask != 0
    groups = torch.arange(mask.shape[0], device="cpu")
    if index is not None:  # ids of any kind, by the order in which they come
        numbers: dict[Any, int] = {}
        groups = torch.tensor([numbers.setdefault(uid, len(numbers)) for uid in index], dtype=torch.int64, device="cpu")
    groups = groups.to(mask.device)
    asked = {} if backend is None else {"backend": backend}
    given = accepted_keywords(
        estimator, group_ids=groups, lengths=mask.sum(-1).float(), batch=PackedBatch.from_padded(mask), **asked
    )
    if level == "token":
        found = estimator(token_level_rewards.reshape(-1), **given).reshape(mask.shape)
        return found, token_level_rewards
    found = estimator(token_level_rewards.sum(-1), **given)[:, None] * mask
    return found, found


# --------------------------------------------------------------------------------- gates from verl's configuration


def _ppo_clip(config: Any) -> RatioGate:
    low, high = _epsilons(config)
    dual = config.get("clip_ratio_c", 3.0)
    check(dual is None or dual > 1, "clip_ratio_c: expected a ratio > 1, got {}", dual)
    return gates.ppo_clip(low, high, ratio_dual=dual)


def _dapo(config: Any) -> RatioGate:
    _refuse("hpo_dapo", config, "clip_ratio_c")
    low, high = _epsilons(config)
    check(
        high > low,
        "clip_ratio_high: hpo_dapo clips higher, expected clip_ratio_high > clip_ratio_low, got {} and {} (verl starts "
        "with 0.2 and 0.2, DAPO has 0.28 and 0.2); for a symmetric clip use hpo_ppo_clip",
        high,
        low,
    )
    return gates.dapo(low, high)


def _cispo(config: Any) -> RatioGate:
    _refuse("hpo_cispo", config, "clip_ratio_c")
    low, high = _epsilons(config)
    return gates.cispo(ratio_cap=1 + high, ratio_low=1 - low)


def _gspo(config: Any) -> RatioGate:
    _refuse("hpo_gspo", config, "clip_ratio_c")
    return gates.gspo(*_epsilons(config))


def _gspo_token(config: Any) -> RatioGate:
    _refuse("hpo_gspo_token", config, "clip_ratio_c")
    return gates.gspo_token(*_epsilons(config))


def _epsilons(config: Any) -> tuple[float, float]:
    """``clip_ratio_low`` and ``clip_ratio_high``, each ``clip_ratio`` where it is None."""
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    check(low >= 0, "clip_ratio_low: expected an epsilon >= 0, got {}", low)
    check(high >= 0, "clip_ratio_high: expected an epsilon >= 0, got {}", high)
    return min(low, 1.0), high  # ratios are positive: 1 - low below 0 is no bound


def _refuse(name: str, config: Any, *fields: str) -> None:
    """A clip field that is set and would have no effect."""
    for field in fields:
        value = config.get(field, None)
        check(
            value is None or value == _UNSET[field],
            "{}: {!r} does not read it; got {}, leave it at verl's {} or choose another loss_mode",
            field,
            name,
            value,
            _UNSET[field],
        )


for _name, _gate in {
    "hpo_ppo_clip": _ppo_clip,
    "hpo_dapo": _dapo,
    "hpo_cispo": _cispo,
    "hpo_gspo": _gspo,
    "hpo_gspo_token": _gspo_token,
}.items():
    register(_name, _gate)
for _name in ESTIMATORS:
    register_advantage(f"hpo_{_name}", getattr(advantages, _name))
install_loss_head()
