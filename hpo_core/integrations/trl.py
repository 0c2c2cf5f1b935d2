"""TRL: a drop-in for ``GRPOTrainer`` whose loss, advantages and token selection are computed by hpo_core.

``HPOTrainer(...)`` without further arguments trains as ``GRPOTrainer(...)`` does. ``gate=``, ``advantage=`` and
``window=`` or ``entropy=`` replace one pillar each. A field of ``GRPOConfig`` that would then have no effect, or that
this loss cannot honour, is an error that names it. Shapes: ``B`` completions in a micro-batch, ``L`` tokens each,
padded on the right; ``P`` processes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed

try:
    from trl import GRPOTrainer  # type: ignore[attr-defined,import-not-found,unused-ignore]
except ImportError as error:
    raise ImportError("hpo_core.integrations.trl needs TRL 1.16 or newer: pip install 'trl>=1.16,<2'") from error

from ..advantages.distributed import over_ranks
from ..advantages.terms import accepted_keywords, is_multi_reward
from ..backends import resolve
from ..batch import PackedBatch, mark_torn
from ..checks import check, require_type
from ..entropy import EntropyWindow
from ..gates import RatioGate
from ..losses import PolicyLoss, policy_loss
from ..specs import Unit
from .entropy_methods import (
    PENALISED,
    MakesPenalty,
    MakesSelection,
    check_entropy,
    penalty_of,
    selection_of,
    selection_tensors,
)
from .needs import MakesInputs, check_keywords, check_needs, made_inputs
from .trl_config import check_config, check_unchanged, gate_from_config, loss_fields, settings_of
from .trl_entropy import entropy_bonus
from .trl_head import give_head
from .trl_inputs import (
    AVAILABLE,
    NO_SAMPLER,
    OF_THE_LOSS,
    SPANNING,
    Settings,
    advantages_of,
    check_levels,
    check_pillars,
    domain_ids_of,
    mask_of,
    outcomes_of,
    sampler_of,
)
from .trl_metrics import Bounds, logged_metrics, observed_parts, penalty_sum, reported
from .trl_weights import weights_of
from .turns import Step, steps_of_turns, turns

__all__ = ["HPOMixin", "HPOTrainer", "Step", "gate_from_config"]

_Trainer: Any = object  # for the type checker: the trainer that follows in the order of bases


class HPOMixin(_Trainer):  # type: ignore[misc]
    """Put before ``GRPOTrainer``, or a subclass of it, in the bases of a class, it computes the loss with hpo_core.

    Args:
        gate: a RatioGate. None: the gate of ``args``, see :func:`gate_from_config`. ``args.loss_type`` still names the
            denominator.
        advantage: an estimator of rows of :mod:`hpo_core.advantages`, or ``functools.partial`` of one. It is called on
            the rewards of the whole generation batch of all processes and the group of each; one of several rewards
            (``gdpo``, ``dvao``) on the rewards of each function, with ``args.reward_weights``. With ``steps`` one of
            steps. None: the advantages of ``args.scale_rewards``, computed by TRL.
        steps: for an estimator of steps (``gigpo``, ``hgpo``): called like a reward function, as
            ``steps(prompts=, completions=, environments=, examples=)``, it returns a :class:`Step` for each turn of
            each completion of this process, a turn being a run of tokens that no tool wrote. The completion's own
            reward goes to its last step. Advantages then are those of turns, one per token.
        domain: the dataset's column, of integers or strings, that names the domain of a prompt; for gates with a level
            of domains.
        window: an EntropyWindow: only tokens it selects count in the policy term. ``scope="batch"`` selects once per
            rollout, by the entropies of the policy that sampled it and a threshold over the whole generation batch, at
            the price of one more forward pass; ``scope="call"`` in each micro-batch by the current policy's. Both span
            all processes. None: the window of ``args.top_entropy_quantile``, ``forking_tokens(..., scope="call")``.
        entropy: an entropy method, a function of :mod:`hpo_core.entropy` that returns a Selection (``archer``,
            ``entropy_advantage``, ``aepo_ruc`` ...), or ``functools.partial`` of one, or one of your own. It is called
            once per rollout, on the entropies of the policy that sampled it, with those of ``entropy`` and ``logp``
            (``[T]``, B L of them), ``advantages``, ``advantage_level``, ``batch``, ``process_group``, ``seed`` and
            ``backend`` that it takes, at the price of one more forward pass. Its masks, weights, bounds and the rest
            go with their tokens into every micro-batch, so accumulation changes nothing.
        entropy_penalty: a loss term with a gradient through the entropies, such as ``epo`` or ``entropy_band`` of
            :mod:`hpo_core.entropy` with its numbers fixed by ``functools.partial``, or a function of yours that
            returns a scalar. It is added to the loss of each micro-batch, and called with those of ``entropy``
            (``[T]``, with its graph), ``batch``, ``weights`` (``[S]``: those of ``loss_type``) and ``seed`` it takes.
        gate_inputs: for gates that need more than the batch, a function of :mod:`hpo_core.gates` (``hapo_bounds``,
            ``clip_cov_mask``, ``m2po_mask`` ...), or ``functools.partial`` of one, or one of your own that returns
            :class:`~hpo_core.gates.GateInputs`. It is called in each micro-batch with those of ``logp``, ``old_logp``,
            ``entropy`` (``[T]``, B L of them, without gradient), ``advantages``, ``advantage_level``, ``batch``,
            ``process_group`` and ``seed`` (another one in each micro-batch and process) that it takes.
        backend: a name from ``hpo_core.backends()``. Default: by device.

    Levels above the tokens: a completion is a trajectory; its steps are the runs of tokens that no tool wrote; a group
    is the completions of one prompt in this micro-batch, and a domain those of one value of the column ``domain``, on
    all processes together. TRL shuffles a rollout into ``steps_per_generation`` micro-batches, which tears groups: with
    a gate, or a correction, over groups or domains it has to be 1, and a micro-batch of all processes is a rollout.

    Raises:
        ValueError: naming the field of ``args`` that cannot be honoured, or that an argument above would silence; a
            gate that needs an input that neither ``gate_inputs`` nor the sampler gives (``icepop``, ``tis``, ``mis``
            and others correct by vLLM's log-probabilities).
    """

    def __init__(
        self,
        *args: Any,
        gate: RatioGate | None = None,
        advantage: Callable[..., torch.Tensor] | None = None,
        steps: Callable[..., list[list[Step]]] | None = None,
        domain: str | None = None,
        window: EntropyWindow | None = None,
        entropy: MakesSelection | None = None,
        entropy_penalty: MakesPenalty | None = None,
        gate_inputs: MakesInputs | None = None,
        backend: str | None = None,
        **keywords: Any,
    ) -> None:
        check_pillars(gate, advantage, steps, window)
        require_type(
            isinstance(self, GRPOTrainer),
            "HPOMixin: expected trl.GRPOTrainer or a subclass of it behind it in the bases, got {}",
            type(self).__bases__,
        )
        check(
            gate is not None or super()._compute_loss.__func__ is GRPOTrainer._compute_loss,
            "gate: {} computes a loss of its own, which this one replaces; say by which, such as gate=gates.gmpo()",
            super()._compute_loss.__qualname__.removesuffix("._compute_loss"),
        )
        super().__init__(*args, **keywords)
        check(window is None or entropy is None, "entropy: it takes the place of window=, got both; drop one")
        if entropy_penalty is not None:
            check_keywords("entropy_penalty", entropy_penalty, PENALISED)
        pillars = {"gate": gate, "advantage": advantage, "window": window, "entropy": entropy}
        config, given = self.args, tuple(name for name, value in pillars.items() if value is not None)
        check_config(config, given)
        self._hpo_settings, self._hpo_given = settings_of(self), given
        fields = {"gate": gate, "window": window} | loss_fields(self._hpo_settings, given)
        gate, window, kl = fields["gate"], fields["window"], fields["kl"]
        assert gate is not None
        if entropy is not None:
            check_entropy(entropy, self.accelerator.num_processes, "window", "set beta > 0" if kl is None else "")
        resolve("gates", torch.empty(0, device=self.accelerator.device), backend)  # fail now, not after a rollout
        selected = () if entropy is None else ("bounds",)
        check_needs(gate, gate_inputs, AVAILABLE, "" if self._has_sampler() else NO_SAMPLER, selected)
        self._check_sampler(gate)
        check_levels(gate, domain, self.args.steps_per_generation)
        for model in (self.model, self.ref_model):
            if model is not None:
                whole = self.accelerator.unwrap_model(model)
                give_head(whole.get_base_model() if hasattr(whole, "get_base_model") else whole, backend)
        self._hpo = Settings(
            gate, kl, advantage, steps, domain, window, entropy, entropy_penalty, gate_inputs, backend,
            self.accelerator.num_processes,
        )  # fmt: skip
        self._hpo_drawn = (0, 0)  # an optimiser step, and the micro-batches of it that have drawn

    def _seed(self) -> int:
        """A seed for each micro-batch and process, the same one in a resumed run; evaluation takes none away."""
        step, (last, drawn) = int(self.state.global_step), self._hpo_drawn
        drawn = drawn if step == last else 0
        if self.model.training:
            self._hpo_drawn = (step, drawn + 1)
        rank = int(self.accelerator.process_index)
        return ((step << 16) + drawn) * self._hpo.processes + rank

    def _weighs_samples(self) -> bool:
        """Whether TRL's loss multiplies by its weights of the sampler now: a callback may switch them."""
        return bool(self.use_vllm and self.vllm_importance_sampling_correction)

    def _check_sampler(self, gate: RatioGate) -> None:
        check(
            not (gate.corrects_sampler and self._weighs_samples()),
            "vllm_importance_sampling_correction: expected False, got True; the gate {!r} corrects by vLLM's "
            "log-probabilities, and TRL would do it again",
            gate.name,
        )

    def _has_sampler(self) -> bool:
        """Whether completions come with the log-probabilities of their sampler."""
        return bool(self.args.use_vllm) or getattr(self, "rollout_func", None) is not None

    # ------------------------------------------------------------------------------------------ once per generation

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> torch.Tensor:
        """Rewards ``[P B, functions]`` of all processes, kept for the advantages, and the steps of our completions."""
        rewards: torch.Tensor = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self._hpo_rewards = rewards
        if self._hpo.steps is not None:
            self._hpo_steps = self._hpo.steps(
                prompts=prompts, completions=completions, environments=self.environments, examples=inputs
            )
        return rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's generation batch with our advantages, ids and token mask.

        They are made here, before rows are shuffled into micro-batches, where most prompt groups are no longer whole.
        """
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        _, _, advantage, steps, domain, window, entropy, _, _, backend, _ = self._hpo
        rows = len(output["completion_ids"])
        own = slice(self.accelerator.process_index * rows, (self.accelerator.process_index + 1) * rows)
        places = torch.arange(rows * self._hpo.processes, device=output["completion_ids"].device)
        groups = places // self._generations()
        if steps is not None:
            output["advantages"] = self._advantages_of_steps(mask_of(output), groups[own], own)
        elif advantage is not None:
            output["advantages"] = self._advantages(advantage, groups)[own]
        output["group_ids"] = groups[own]
        if domain is not None:
            output["domain_ids"] = domain_ids_of(domain, inputs, groups.device)
        if entropy is not None:
            logps, entropies = self._scored(output)
            output |= selection_tensors(
                entropy, mask_of(output), output["advantages"], groups[own], rows % self._generations() != 0,
                entropy=entropies, logp=logps, process_group=self._ranks(), seed=self.state.global_step,
                backend=backend,
            )  # fmt: skip
        elif window is not None and window.scope == "batch":
            _, entropies = self._scored(output)
            state = window.fit(entropies, mask_of(output), process_group=self._ranks(), backend=backend)
            output["token_mask"] = window.apply(entropies, mask_of(output), state, backend=backend)
        return output

    @torch.no_grad()
    def _scored(self, output: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies ``[B, L]`` of a rollout under the policy that sampled it."""
        training, config = self.model.training, self.args
        at_once = config.per_device_train_batch_size if training else config.per_device_eval_batch_size
        logps, entropies, _ = self._score(self.model, output, batch_size=at_once)
        return logps, entropies

    def _advantages(self, advantage: Callable[..., torch.Tensor], groups: torch.Tensor) -> torch.Tensor:
        """Advantages ``[P B]`` from the rewards of all processes."""
        scores = self._hpo_rewards
        asked: dict[str, Any] = {} if self._hpo.backend is None else {"backend": self._hpo.backend}
        if is_multi_reward(advantage):
            weights = self.reward_weights.tolist()
            return self._logged(advantage(scores.T.contiguous(), groups, weights=weights, **asked))
        return self._logged(advantage(outcomes_of(self._hpo_rewards, self.reward_weights), groups, **asked))

    def _advantages_of_steps(self, mask: torch.Tensor, groups: torch.Tensor, own: slice) -> torch.Tensor:
        """Advantages of this process's turns at their tokens ``[B, L]``, from the steps of all processes."""
        advantage, asked = self._hpo.advantage, {} if self._hpo.backend is None else {"backend": self._hpo.backend}
        assert advantage is not None
        batch = PackedBatch.from_padded(mask, steps=turns(mask))
        rewards, ids = steps_of_turns(batch, self._hpo_steps, outcomes_of(self._hpo_rewards, self.reward_weights)[own])
        row = ids["trajectory_ids"]
        given = accepted_keywords(
            advantage, rewards, **ids | {"group_ids": groups[row], "trajectory_ids": row + own.start}
        )
        everywhere = advantage if self._ranks() is None else over_ranks(advantage, self._ranks())
        of_tokens = batch.spread_steps(everywhere(rewards, **given, **asked)).view(mask.shape)
        self._logged(self.accelerator.gather(of_tokens.sum(1) / mask.sum(1).clamp(min=1)))  # means over tokens
        return of_tokens

    def _logged(self, advantages: torch.Tensor) -> torch.Tensor:
        """The advantages, which replace TRL's own at the end of its log."""
        logged = self._logs["advantages"]
        for _ in range(min(len(logged), advantages.numel())):
            logged.pop()
        logged.extend(advantages.tolist())
        return advantages

    # ----------------------------------------------------------------------------------------- once per micro-batch

    def _read_config(self) -> None:
        """Follow the changes by callbacks since the last micro-batch, as TRL's own loss does."""
        settings = settings_of(self)
        if settings != self._hpo_settings:
            check_unchanged(settings, self._hpo_settings, self._hpo_given)
            self._hpo, self._hpo_settings = self._hpo._replace(**loss_fields(settings, self._hpo_given)), settings

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        self._read_config()
        logps, entropies, aux_loss = self._score(model, inputs, compute_aux_loss=self.aux_loss_enabled)
        loss = self._policy_loss(logps, entropies.detach(), inputs, aux_loss)
        metrics, accumulated = self._metrics["train" if self.model.training else "eval"], self._accumulated()
        if self._hpo.entropy_penalty is not None:
            batch = PackedBatch.from_padded(mask_of(inputs), group_ids=inputs.get("group_ids"))
            mark_torn(batch, *self._torn_levels(batch.rows))
            weights = weights_of(self, batch, inputs, accumulated)
            taken = {"entropy": entropies.flatten(), "batch": batch, "weights": weights}
            penalty = penalty_of(self._hpo.entropy_penalty, seed=self.state.global_step, **taken)
            metrics["entropy_penalty"].append(self.accelerator.gather(penalty.detach()).nanmean().item())
            loss = loss + penalty
        if self._entropy_bonus_enabled:
            # TRL logs the loss of a micro-batch, but for the loss types whose denominator is the whole step's.
            logged = loss.detach() * (1 if self.loss_type in ("cispo", "dapo", "vespo") else accumulated)
            metrics["policy_loss"].append(self.accelerator.gather(logged).nanmean().item())
            loss = loss - entropy_bonus(self, entropies, self._selected(entropies.detach(), inputs), accumulated)
        if aux_loss is not None:
            loss = loss + self.router_aux_loss_coef * aux_loss / accumulated
        return loss

    def _score(self, model: torch.nn.Module, inputs: dict[str, Any], **options: Any) -> Any:
        """Log-probabilities and entropies of the completions, ``[B, L]`` float32, and the auxiliary loss or None."""
        return self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            inputs["completion_ids"].shape[1],
            compute_entropy=True,
            **self._for_scoring(inputs),
            **options,
        )

    def _for_scoring(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Inputs that the scoring takes by name, or gathers: an override of it may name nothing but ``**kwargs``."""
        taken = inspect.signature(self._get_per_token_logps_and_entropies).parameters
        gathers = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
        return {name: value for name, value in inputs.items() if name in taken or (gathers and name not in OF_THE_LOSS)}

    def _policy_loss(
        self, logps: torch.Tensor, entropies: torch.Tensor, inputs: dict[str, Any], aux_loss: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The loss of a scored micro-batch, scaled for accumulation; its metrics are logged.

        Args:
            logps, entropies: ``[B, L]`` float32; entropies without gradient.
            inputs: TRL's micro-batch: masks, advantages, and the other tensors computed when it was generated.
            aux_loss: 0-dim, the load balancing of a mixture of experts; only logged.
        """
        gate, kl, _, _, _, window, _, _, gate_inputs, backend, _ = self._hpo
        mask = mask_of(inputs)
        batch = PackedBatch.from_padded(
            mask,
            steps=turns(mask) if Unit.STEP in gate.units else None,
            group_ids=inputs.get("group_ids"),
            domain_ids=inputs.get("domain_ids"),
        )
        mark_torn(batch, *self._torn_levels(batch.rows))
        advantages = advantages_of(inputs)
        threshold = None
        if window is not None and window.scope == "batch":
            window = None  # it has left a token mask in the batch
        elif window is not None and self._ranks() is not None:
            threshold = window.fit(entropies, batch, process_group=self._ranks(), backend=backend)
        old_logps, rollout_logps = inputs.get("old_per_token_logps"), sampler_of(gate, logps, inputs)
        check(
            rollout_logps is not None or not gate.needs_rollout,
            "gate: {!r} corrects by the sampler's log-probabilities; {}",
            gate.name,
            NO_SAMPLER,
        )
        given = None
        if gate_inputs is not None:
            given = made_inputs(
                gate_inputs, logps.shape, advantages, logp=logps.detach(), entropy=entropies, batch=batch,
                old_logp=logps.detach() if old_logps is None else old_logps, process_group=self._ranks(),
                seed=self._seed(),
            )  # fmt: skip
        self._check_sampler(gate)
        # Of the trainer's policy to vLLM's: [B, L] or [B, 1].
        token_weight = inputs.get("importance_sampling_ratio") if self._weighs_samples() else None
        selection = selection_of(inputs)
        bounds = next(
            (each.bounds for each in (given, selection) if each is not None and each.bounds is not None), None
        )
        out = policy_loss(
            logps,
            old_logps,
            advantages,
            batch,
            gate,
            weights=weights_of(self, batch, inputs, self._accumulated()),
            rollout_logp=rollout_logps,
            gate_inputs=given,
            ref_logp=None if kl is None else inputs["ref_per_token_logps"],
            kl=kl,
            entropy=entropies,
            window=window,
            threshold=threshold,
            selection=selection,
            token_mask=inputs.get("token_mask"),
            token_weight=None if token_weight is None else token_weight.expand_as(logps),
            advantage_level="token" if advantages.dim() == 2 else "row",
            report=reported(gate),
            process_group=self._ranks() if SPANNING & gate.units else None,
            backend=backend,
        )
        self._log_loss(out, logps.detach(), batch, inputs, bounds, aux_loss)
        return out.loss

    def _selected(self, entropies: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        """Tokens of the policy term, bool ``[B, L]``: valid ones, which the window selects."""
        window, mask = self._hpo.window, mask_of(inputs)
        if window is None or window.scope == "batch":
            return mask & inputs["token_mask"] if "token_mask" in inputs else mask
        state = window.fit(entropies, mask, process_group=self._ranks(), backend=self._hpo.backend)
        return window.apply(entropies, mask, state, backend=self._hpo.backend)

    def _generations(self) -> int:
        return int(self.num_generations if self.model.training else self.num_generations_eval)

    def _torn_levels(self, rows: int) -> tuple[str, ...]:
        """The levels of which ``rows`` of a micro-batch are pieces: TRL deals a rollout out to several in any order."""
        if self.model.training and self.args.steps_per_generation > 1:
            return "group", "domain"
        return ("ranks",) if rows % self._generations() else ()

    def _accumulated(self) -> int:
        """Micro-batches whose losses add up to one optimiser step."""
        return int(self.current_gradient_accumulation_steps) if self.model.training else 1

    def _ranks(self) -> torch.distributed.ProcessGroup | None:
        return torch.distributed.group.WORLD if self._hpo.processes > 1 else None

    # ------------------------------------------------------------------------------------------------------ metrics

    @torch.no_grad()
    def _log_loss(
        self,
        out: PolicyLoss,
        logps: torch.Tensor,
        batch: PackedBatch,
        inputs: dict[str, Any],
        bounds: Bounds | None,
        aux_loss: torch.Tensor | None,
    ) -> None:
        """TRL's own keys with TRL's own definitions, and ours: one gather over processes, one copy to the host."""
        gate, kl, *_, processes = self._hpo
        parts = observed_parts(out, gate, logps, batch, inputs, bounds)
        if kl is not None:
            parts["kl"] = penalty_sum(logps, inputs, self.args.use_bias_correction_kl)
        if aux_loss is not None:
            parts["aux_loss"] = aux_loss.detach().reshape(1)
        local = torch.cat(list(parts.values()))  # float64, as the vector of metrics is
        gathered = (self.accelerator.gather(local) if processes > 1 else local).cpu().reshape(processes, -1)
        sizes = [part.numel() for part in parts.values()]
        seen = dict(zip(parts, gathered.split(sizes, dim=1), strict=True))  # [P, size] each, on the host
        metrics = self._metrics["train" if self.model.training else "eval"]
        for name, value in logged_metrics(seen, out, gate).items():
            metrics[name].append(value)  # TRL leaves NaN, the mean of nothing, out of its averages


class HPOTrainer(HPOMixin, GRPOTrainer):  # type: ignore[misc,unused-ignore]
    """``trl.GRPOTrainer`` with its loss computed by hpo_core. It takes the arguments of both: see :class:`HPOMixin`."""
