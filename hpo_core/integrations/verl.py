"""verl: ratio gates and advantage estimators of hpo_core that verl's configuration names.

Importing this module registers the losses ``hpo_ppo_clip``, ``hpo_dapo``, ``hpo_cispo``, ``hpo_gspo``,
``hpo_gspo_token``, ``hpo_sapo`` and ``hpo_dro``, whose numbers are the configuration's, those of ``PRESETS`` under
``hpo_`` and their name, with the bounds of their papers, and as advantage estimators those of ``ESTIMATORS`` and, for
agent loops that tell the observations of turns, of ``STEP_ESTIMATORS``. verl imports it by itself wherever hpo_core is
installed (entry point ``verl.plugins``), or through ``VERL_USE_EXTERNAL_MODULES=hpo_core.integrations.verl``; then
``actor_rollout_ref.actor.policy_loss.loss_mode=hpo_gspo`` and ``algorithm.adv_estimator=hpo_lite_ppo`` select one.
Shapes: ``B`` responses in a micro-batch, ``L`` tokens each, padded on the right.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

try:
    from verl.trainer.ppo.core_algos import register_adv_est, register_policy_loss  # type: ignore[import-not-found,unused-ignore]
except ImportError as error:
    raise ImportError(
        "hpo_core.integrations.verl needs verl 0.9.1: pip install 'verl[verl-core]>=0.9.1,<0.10'"
    ) from error

from .. import advantages, aggregation, gates
from ..batch import PackedBatch, mark_torn
from ..checks import check, require_type
from ..entropy import EntropyWindow
from ..gates import RatioGate
from ..kl import KLPenalty
from ..losses import PolicyLoss, policy_loss
from ..metrics import FLAGS, Metrics
from ..specs import Unit
from .entropy_methods import PENALISED, MakesPenalty, MakesSelection, check_entropy, penalty_of
from .micro_batch import fractions, lower_epsilon, padded_rows, pushed_units
from .needs import MakesInputs, check_keywords, check_needs, made_inputs
from .prompt_advantages import ESTIMATORS, check_prompt_estimator
from .served import check_registered, check_unread
from .verl_head import install_loss_head
from .verl_rows import CORRECTING, GROUPED, METHODS, MicroBatch, current, install, selected_by
from .verl_steps import (
    STEP_ESTIMATORS,
    check_step_estimator,
    install_steps,
    is_of_steps,
    row_advantages,
    step_advantages,
)

__all__ = ["ESTIMATORS", "PRESETS", "STEP_ESTIMATORS", "register", "register_advantage"]

# Gates that need no more than verl tells a loss. Those that correct the sampler's log-probabilities read them from the
# rows, and a look at rows is left to calls of register, because it imports verl's workers.
PRESETS = (
    *("a_lol", "aspo", "ce_gppo", "dppo_kl", "dppo_tv", "fiberpo", "gmpo", "kimi", "luspo", "opmd"),
    *("ppo_penalty", "rec", "reinforce", "spo", "step_gspo", "topr", "triplet_clip", "vespo"),
)

# The arguments that a function of gate inputs may take.
_AVAILABLE = ("logp", "old_logp", "entropy", "advantages", "advantage_level", "batch", "seed")

# Fields of the actor's config and of its policy_loss that verl's losses read, and verl's own values. A field that holds
# them is taken as not set.
_CLIPS = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2}
_UNSET = _CLIPS | {
    "clip_ratio_c": 3.0, "tau_pos": 1.0, "tau_neg": 1.05, "dro_beta": None, "ppo_kl_coef": 0.1,
    "kl_cov_ratio": 2e-4, "clip_cov_ratio": 2e-4, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0,
}  # fmt: skip


def register(
    name: str,
    gate: RatioGate | Callable[[Any], RatioGate],
    *,
    gate_inputs: MakesInputs | None = None,
    entropy: MakesSelection | EntropyWindow | None = None,
    entropy_penalty: MakesPenalty | None = None,
    kl: KLPenalty | None = None,
    backend: str | None = None,
) -> None:
    """Make a gate a policy loss of verl, under ``policy_loss.loss_mode=name``, in this process.

    verl looks names up in every worker process, so call it in a module that all of them import: one named in
    ``VERL_USE_EXTERNAL_MODULES``, or in ``actor_rollout_ref.model.external_lib``.

    Args:
        name: registering a name again replaces it, verl's own losses too.
        gate: a RatioGate, or a function that makes one from verl's ActorConfig at each call. A RatioGate carries its
            numbers, so a field of the config for verl's losses that is set besides is an error that names it.
        gate_inputs: for gates that need more than the batch, a function of :mod:`hpo_core.gates` (``dcpo_bounds``,
            ``kl_cov_mask``, ``m2po_mask`` ...), or ``functools.partial`` of one, or one of your own that returns
            :class:`~hpo_core.gates.GateInputs`. It is called in each micro-batch with those of ``logp``, ``old_logp``
            (``[T]``, B L of them, without gradient), ``entropy`` (as these; needs ``actor.calculate_entropy``),
            ``advantages``, ``advantage_level``, ``batch`` and ``seed`` (another in each call and on each
            data-parallel rank, the same in every run) that it takes.
        entropy: a method, that is an EntropyWindow (``forking_tokens``, ``ares`` ...), a function of
            :mod:`hpo_core.entropy` that returns a Selection (``archer``, ``entropy_advantage``, ``aepo_ruc`` ...), or
            ``functools.partial`` of one, or one of your own. The workers of the actor call it once per rollout, on the
            entropies of the policy that sampled it, with those of ``entropy`` and ``logp`` (``[T]``), ``advantages``,
            ``advantage_level``, ``batch`` (with the prompts as groups), ``process_group`` (the data-parallel ranks),
            ``seed`` (rollouts so far) and ``backend`` that it takes. The selection travels with the rows into mini-
            and micro-batches.
        entropy_penalty: a loss term with a gradient through the entropies, such as ``epo`` or ``entropy_band`` with its
            numbers fixed by ``functools.partial``, added to the loss of each micro-batch; called with those of
            ``entropy`` (``[T]``), ``batch``, ``weights`` and ``seed`` (as in ``gate_inputs``) that it takes. Needs
            ``actor.calculate_entropy``.
        kl: a penalty of :mod:`hpo_core.kl` in place of verl's, for entropy methods that weigh it by tokens
            (``archer``). Needs ``actor.use_kl_loss``, with which verl computes the reference, and
            ``actor.kl_loss_coef=0``.
        backend: a name from ``hpo_core.backends()``. Default: by device.

    Levels above the tokens: a response is a trajectory, its steps are the runs of tokens that no tool wrote, and the
    answers to a prompt are a group, which must not be parted by micro-batches. Gates that correct by the sampler's
    log-probabilities (``icepop``, ``tis``, ``decoupled`` ...) take them from the rows, where
    ``rollout.calculate_log_probs=True`` puts them.

    Raises:
        ValueError: a gate with a level of domains, which no micro-batch holds; one that needs inputs which
            ``gate_inputs`` does not make.
    """
    check_registered(gate, "verl's ActorConfig")
    if isinstance(entropy, EntropyWindow):
        check(
            entropy.scope == "batch",
            "entropy: verl fits a window once for each update, so scope={!r} has no meaning; pass scope='batch'",
            entropy.scope,
        )
        entropy = functools.partial(selected_by, entropy)
    if entropy is not None:
        # The number of ranks is not known yet: the check is that for several.
        check_entropy(entropy, processes=2, penalty="pass kl=" if kl is None else "")
    if entropy_penalty is not None:
        check_keywords("entropy_penalty", entropy_penalty, PENALISED)
    require_type(kl is None or isinstance(kl, KLPenalty), "kl: expected a penalty of hpo_core.kl, got {}", type(kl))
    loss = _Loss(name, gate, gate_inputs, entropy, entropy_penalty, kl, backend)
    if isinstance(gate, RatioGate):
        _check_gate(gate, loss)
    METHODS.pop(name, None)
    GROUPED.discard(name)
    CORRECTING.discard(name)
    if entropy is not None:
        METHODS[name] = entropy
    if isinstance(gate, RatioGate) and Unit.GROUP in gate.units:
        GROUPED.add(name)
    if isinstance(gate, RatioGate) and gate.needs_rollout:
        CORRECTING.add(name)
    if loss.reads_rows():
        install()
    register_policy_loss(name)(functools.partial(_policy_loss, loss))


class _Loss(NamedTuple):
    """The loss of a registered name."""

    name: str
    gate: RatioGate | Callable[[Any], RatioGate]
    gate_inputs: MakesInputs | None
    entropy: MakesSelection | None
    entropy_penalty: MakesPenalty | None
    kl: KLPenalty | None
    backend: str | None

    def inputs_take(self, name: str) -> bool:
        return self.gate_inputs is not None and name in inspect.signature(self.gate_inputs).parameters

    def reads_own_entropies(self) -> bool:
        """Whether it reads the entropies of the policy that is trained."""
        return self.inputs_take("entropy") or self.entropy_penalty is not None

    def reads_rows(self) -> bool:
        """More than verl passes its losses. A function of the configuration may make such a gate, too."""
        of_gate = isinstance(self.gate, RatioGate) and (self.gate.reads_rollout or Unit.GROUP in self.gate.units)
        of_inputs = self.reads_own_entropies() or self.inputs_take("seed")
        return of_gate or of_inputs or self.entropy is not None or self.kl is not None


def _policy_loss(
    loss: _Loss,
    /,
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """The function that verl calls, by keyword: tensors ``[B, L]``; the loss is scaled for engines that average over
    ranks."""
    check(config is not None, "config: expected verl's ActorConfig, got None")
    if isinstance(loss.gate, RatioGate):
        gate = _reading(loss.gate, config)
    else:
        gate = loss.gate(config)
        require_type(
            isinstance(gate, RatioGate), "gate: expected a RatioGate from the function of {!r}, got {}", loss.name, gate
        )
        _check_gate(gate, loss)
    micro_batch = current()
    _check_micro_batch(loss, gate, micro_batch, config)
    check(
        rollout_is_weights is None or not gate.corrects_sampler,
        "algorithm.rollout_correction: its weights and the gate {!r} correct the same difference; set it to null",
        gate.name,
    )
    selection, entropy = micro_batch.selection() if loss.entropy is not None else None, micro_batch.entropy
    group_ids = micro_batch.group_ids(loss.name, response_mask.device) if Unit.GROUP in gate.units else None
    batch = padded_rows(response_mask, gate, group_ids)
    if group_ids is None:  # verl parts the answers to a prompt
        mark_torn(batch, "group")
    given = None
    if loss.gate_inputs is not None:
        given = made_inputs(
            loss.gate_inputs, log_prob.shape, advantages, logp=log_prob.detach(), old_logp=old_log_prob, batch=batch,
            entropy=None if entropy is None else entropy.detach(), seed=micro_batch.seed,
        )  # fmt: skip
    weights = _weights(loss_agg_mode, batch, config.global_batch_info)
    result = policy_loss(
        log_prob,
        old_log_prob,
        advantages,
        batch,
        gate,
        weights=weights,
        token_weight=rollout_is_weights,
        rollout_logp=micro_batch.rollout_logp if gate.reads_rollout else None,
        token_mask=pushed_units(gate, advantages, selection),
        gate_inputs=given,
        selection=selection,
        ref_logp=None if loss.kl is None else micro_batch.ref_logp,
        kl=loss.kl,
        advantage_level="token",
        report=["corrections"] if gate.corrections else [],
        backend=loss.backend,
    )
    total = result.loss
    if loss.entropy_penalty is not None and entropy is not None:
        taken = {"entropy": entropy.flatten(), "batch": batch, "weights": weights, "seed": micro_batch.seed}
        total = total + penalty_of(loss.entropy_penalty, **taken)
    return total, _metrics(result, gate)


def _check_micro_batch(loss: _Loss, gate: RatioGate, micro_batch: MicroBatch, config: Any) -> None:
    check(
        micro_batch.rollout_logp is not None or not gate.needs_rollout,
        "gate: {!r} corrects by the sampler's log-probabilities, and {!r} gets none; set "
        "rollout.calculate_log_probs=True, and register the gate itself, not a function of the configuration",
        gate.name,
        loss.name,
    )
    check(
        loss.entropy is None or micro_batch.selection() is not None,
        "loss_mode: {!r} has an entropy method, and no update of verl's TrainingWorker has called it; take "
        "verl.trainer.main_ppo with trainer.use_v1=True",
        loss.name,
    )
    check(
        not loss.reads_own_entropies() or micro_batch.entropy is not None,
        "loss_mode: {!r} reads the entropies of the policy that is trained; set actor.calculate_entropy=True",
        loss.name,
    )
    own = loss.kl is None or (micro_batch.ref_logp is not None and config.kl_loss_coef == 0)
    check(
        own,
        "kl: {!r} takes the place of verl's penalty and needs its reference; set actor.use_kl_loss=True and "
        "actor.kl_loss_coef=0, got {} and {}",
        loss.name,
        config.use_kl_loss,
        config.kl_loss_coef,
    )


def _check_gate(gate: RatioGate, loss: _Loss) -> None:
    selected = () if loss.entropy is None else ("bounds",)
    check_needs(gate, loss.gate_inputs, _AVAILABLE, sampler="", selected=selected)
    check(
        Unit.DOMAIN not in gate.units,
        "gate: {!r} has a level of domains, of which verl's micro-batches hold parts; call hpo_core.policy_loss where "
        "all rows of a domain are",
        gate.name,
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


def _metrics(result: PolicyLoss, gate: RatioGate) -> dict[str, float]:
    """verl's three metrics as it defines them, kept fractions of corrections, error counters; one copy to the host."""
    vectors = torch.stack([each.vector for each in (result.metrics, *result.corrections)]).cpu()
    whole, *corrections = map(Metrics, vectors)
    reported = fractions(whole, gate)
    kept = [float(each["selected"] / each["tokens"]) if each["tokens"] > 0 else 1.0 for each in corrections]
    return {
        "actor/pg_clipfrac": reported["clipped"],
        "actor/ppo_kl": reported["kl"],
        "actor/pg_clipfrac_lower": reported["dual_clipped"],
        **{f"actor/hpo_correction_{at}_selected_fraction": each for at, each in enumerate(kept)},
        **{f"actor/hpo_{name}": reported[name] for name in FLAGS},
    }


# -------------------------------------------------------------------------------------------------- advantages


def register_advantage(name: str, estimator: Callable[..., torch.Tensor], *, backend: str | None = None) -> None:
    """Make an estimator one of verl's, under ``algorithm.adv_estimator=name``, in this process.

    It is called on the rewards of responses ``[B]`` (of tokens ``[B L]`` where it says so), with those of ``group_ids``
    (verl's ``uid``), ``lengths`` and ``batch`` that it takes; fix the rest with ``functools.partial``. verl asks for
    advantages in its driver, so this must run there. An agent's run that verl's V1 trainers have in several rows counts
    once for an estimator of rows, with the reward of its last row and the tokens of all.

    An estimator of steps (``gigpo``, ``hgpo``) is called on the rewards of all turns ``[N]``, with those of
    ``group_ids``, ``trajectory_ids``, ``anchor_ids`` and ``positions`` that it takes. The agent loop tells the
    observations and rewards: ``AgentLoopOutput(..., extra_fields={"hpo_steps": [(observation, reward), ...]})``, a pair
    for each run of tokens with ``response_mask`` 1. The response's own reward goes to its last turn. An agent's run
    that verl's V1 trainers have in several rows is one trajectory, whose reward counts once.

    Raises:
        ValueError: a name of another estimator of verl's; an estimator that needs an argument that verl does not give.
    """
    if is_of_steps(estimator):
        check_step_estimator(estimator)
        install_steps()
        register_adv_est(name)(functools.partial(step_advantages, name, estimator, backend))
        return
    check_prompt_estimator(estimator, "verl")
    register_adv_est(name)(functools.partial(row_advantages, estimator, backend))


# --------------------------------------------------------------------------------- gates from verl's configuration


def _ppo_clip(config: Any) -> RatioGate:
    low, high = _epsilons(config)
    dual = config.get("clip_ratio_c", 3.0)
    check(dual is None or dual > 1, "clip_ratio_c: expected a ratio > 1, got {}", dual)
    return _reading(gates.ppo_clip(low, high, ratio_dual=dual), config, *_CLIPS, "clip_ratio_c")


def _dapo(config: Any) -> RatioGate:
    low, high = _epsilons(config)
    check(
        high > low,
        "clip_ratio_high: hpo_dapo clips higher, expected clip_ratio_high > clip_ratio_low, got {} and {} (verl starts "
        "with 0.2 and 0.2, DAPO has 0.28 and 0.2); for a symmetric clip use hpo_ppo_clip",
        high,
        low,
    )
    return _reading(gates.dapo(low, high), config, *_CLIPS)


def _cispo(config: Any) -> RatioGate:
    low, high = _epsilons(config)
    return _reading(gates.cispo(ratio_cap=1 + high, ratio_low=1 - low), config, *_CLIPS)


def _gspo(config: Any) -> RatioGate:
    return _reading(gates.gspo(*_epsilons(config)), config, *_CLIPS)


def _gspo_token(config: Any) -> RatioGate:
    return _reading(gates.gspo_token(*_epsilons(config)), config, *_CLIPS)


def _sapo(config: Any) -> RatioGate:
    return _reading(gates.sapo(config.tau_pos, config.tau_neg), config, "tau_pos", "tau_neg")


def _dro(config: Any) -> RatioGate:
    beta = config.policy_loss.get("dro_beta", None)
    check(beta is None or beta > 0, "dro_beta: expected a number > 0, got {}", beta)
    return _reading(gates.dro() if beta is None else gates.dro(beta), config, "dro_beta")


def _epsilons(config: Any) -> tuple[float, float]:
    """``clip_ratio_low`` and ``clip_ratio_high``, each ``clip_ratio`` where it is None."""
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    check(low >= 0, "clip_ratio_low: expected an epsilon >= 0, got {}", low)
    check(high >= 0, "clip_ratio_high: expected an epsilon >= 0, got {}", high)
    return lower_epsilon(low), high


def _reading(gate: RatioGate, config: Any, *fields: str) -> RatioGate:
    """The gate, which reads no fields but these."""
    further = config.get("policy_loss", None) or {}
    settings = {field: config.get(field, further.get(field)) for field in _UNSET if field not in fields}
    given = {field: value for field, value in settings.items() if value is not None}
    check_unread(gate, "verl", given, _UNSET, " or choose another loss_mode")
    return gate


for _make in (_ppo_clip, _dapo, _cispo, _gspo, _gspo_token, _sapo, _dro):
    register(f"hpo{_make.__name__}", _make)
for _name in PRESETS:
    register(f"hpo_{_name}", getattr(gates, _name)())
for _name in (*ESTIMATORS, *STEP_ESTIMATORS):
    register_advantage(f"hpo_{_name}", getattr(advantages, _name))
install_loss_head()
