"""policy_loss and hierarchical_policy_loss: the only place where the pillars are put together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed

from . import ops
from .advantages import grpo
from .advantages.terms import accepted_keywords, check_keywords, gathers_units, is_published, level_of, name_of
from .backends import is_reference, resolve
from .batch import PackedBatch, as_batch, check_whole, of_row
from .checks import REFERENCE, check, check_shape, require_type
from .distributed import check_is_step
from .entropy import EntropyWindow, Selection, WindowState
from .gates import GateInputs, RatioGate
from .kl import KLPenalty
from .level_metrics import LevelMetrics, observed_levels
from .metrics import Metrics, observed
from .prepared import PolicyLossOptions, Prepared, Report, check_options, prepare
from .reference.segments import doubles
from .segment_exchange import has_ids
from .specs import Exchange, PolicyLossInputs, PolicyLossSpec

if TYPE_CHECKING:
    from typing_extensions import Unpack


class PolicyLoss(NamedTuple):
    """The result: ``loss`` 0-dim, differentiable in logp; ``metrics`` still on the device; where ``report`` asks for
    them ``tokens``, loss_t, ``levels``, the metrics of each level, and ``corrections``, those of each correction."""

    loss: torch.Tensor
    metrics: Metrics
    tokens: torch.Tensor | None
    levels: LevelMetrics | None
    corrections: tuple[Metrics, ...]


class PolicyLossAndGrad(NamedTuple):
    """The result without autograd: ``grad`` is dL/dlogp in the shape of logp; the rest as in :class:`PolicyLoss`."""

    loss: torch.Tensor
    metrics: Metrics
    grad: torch.Tensor
    levels: LevelMetrics | None
    corrections: tuple[Metrics, ...]


def policy_loss(
    logp: torch.Tensor,
    old_logp: torch.Tensor | None,
    advantages: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    gate: RatioGate | None = None,
    *,
    weights: torch.Tensor | None = None,
    rollout_logp: torch.Tensor | None = None,
    ref_logp: torch.Tensor | None = None,
    kl: KLPenalty | None = None,
    entropy: torch.Tensor | None = None,
    window: EntropyWindow | None = None,
    threshold: WindowState | torch.Tensor | None = None,
    selection: Selection | None = None,
    token_mask: torch.Tensor | None = None,
    token_weight: torch.Tensor | None = None,
    gate_inputs: GateInputs | None = None,
    advantage_level: str | None = None,
    report: Report = (),
    process_group: torch.distributed.ProcessGroup | None = None,
    backend: str | None = None,
) -> PolicyLoss:
    """The policy loss of a packed (or padded) batch under a ratio gate: ``loss = sum_t m_t w[s(t)] loss_t``.

    m_t is 1 for valid tokens, else 0, and w[s(t)] the entry of ``weights`` for the row of token t.
    ``loss_t = -M_t W_t Phi(z_t, A_t) + beta k(logp_t - ref_logp_t) + kappa p(x_t)``: z is the gated log-ratio, Phi the
    gate's head, which contains the advantage, M the selection (``token_mask`` and the window), W ``token_weight``, and
    p the gate's own penalty on the log-ratio x; M masks no penalty. Everything but ``logp`` is a constant of the
    differentiation, and refused with a graph; the backward returns dL/dlogp times the incoming gradient. The reference
    alone has second derivatives in ``logp``.

    Args:
        logp: ``[T]`` (or the padded ``[B, L]``) float32, natural log-probabilities of the current policy.
        old_logp: the same shape, of the policy that ratios compare with. None: on-policy, every ratio is 1.
        advantages: ``[S]``, one per row, or one of each ``advantage_level``. An ``[S]`` advantage is never expanded in
            memory.
        batch: a PackedBatch, or a padded mask ``[B, L]``. Values at masked positions are never read.
        gate: a RatioGate. Default: ``gates.ppo_clip(0.2, 0.2)``.
        weights: ``[S]`` float32 from :mod:`hpo_core.aggregation`. Default: ``aggregation.token_mean(batch)`` (of the
            tokens inside steps, where the gate has steps as a level), where the batch is the whole optimiser step: on
            one rank, and no part of ``batch.micro_batches``.
        rollout_logp: the same shape; log-probabilities as the sampler gave them, for gates with corrections or on the
            total ratio. Gates that correct the difference of the sampler from ``old_logp`` need it
            (``gate.needs_rollout``); in a total ratio ``old_logp`` stands for it where it is missing.
        ref_logp, kl: the reference policy and the penalty on it, :mod:`hpo_core.kl`; both or neither.
        entropy: ``[T]`` in nats, for ``window`` and the metrics.
        window, threshold: an EntropyWindow and the result of its ``fit``: only tokens that it selects count in the
            policy term.
        selection: the result of a preset of :mod:`hpo_core.entropy`, a :class:`~hpo_core.entropy.Selection`: masks,
            weights, bounds, and factors on the penalty and the advantages, in the shape of logp; in place of a window.
        token_mask: bool ``[T]``: tokens whose policy term counts. Denominators stay those of ``weights``.
        token_weight: float ``[T]``: factor on the policy term.
        gate_inputs: inputs of some gates beside the batch, a :class:`~hpo_core.gates.GateInputs`: ``bounds``,
            ``target``, ``token_mask``, ``penalty_mask``, ``aggregates``, ``token_weight``. A gate that ``needs`` one
            names the function of :mod:`hpo_core.gates` that makes it.
        advantage_level: the units of advantages: ``"row"``, the default; ``"token"``: ``[T]`` (or ``[B, L]``);
            ``"step"``: ``[N]``, of a step of several ranges that of the first; ``"trajectory"``, ``"group"``,
            ``"domain"``: entry i belongs to id i. It is said, never read off a shape, which may fit several.
        report: the results beside loss and metrics, any of ``"tokens"``: loss_t ``[T]`` (detached; not multiplied by
            ``weights``); ``"levels"``: metrics of each level of the gate, a :class:`~hpo_core.LevelMetrics`, made of
            the sums of its segments, without another sweep over log-probabilities (``gspo`` and others with quick
            kernels use the general ones then, within rounding of the same gradient); ``"corrections"``:
            :class:`~hpo_core.Metrics` of each of the gate's corrections, in their order: log-ratios, KL and effective
            sample size of its channel, and ``selected_fraction``, the part of the tokens whose factor is not 0, for one
            more sweep each. Nothing else of the result changes.
        process_group: ranks over which levels named by ids span: rows with equal ``trajectory_ids``, ``group_ids`` or
            ``domain_ids``, and steps with equal ``step_ids``, form one segment wherever they lie (a trajectory cut over
            ranks is sequence parallelism).
            All ranks make the same calls in the same order, each on a batch of its own that all make anew together:
            the first call with a batch gathers the ids. ``loss`` is the sum over this rank's tokens, the gradient that
            of the sum of all ranks' losses; ``weights`` must count the tokens of all ranks (``process_group=`` or
            ``total=`` of :mod:`hpo_core.aggregation`, with ``gradient_reduction=``). Advantages are those of this rank:
            groups of rewards that several ranks share take :func:`~hpo_core.advantages.over_ranks`.
        backend: a name from ``hpo_core.backends()``. Default: by device.

    Raises:
        ValueError, TypeError: naming the argument, the expected and given values, and the fix.

    >>> import hpo_core as hpo
    >>> batch = hpo.PackedBatch.from_lengths([3, 2])
    >>> logp = torch.full((5,), -1.0, requires_grad=True)
    >>> out = hpo.policy_loss(logp, torch.full((5,), -1.0), torch.tensor([1.0, -1.0]), batch)
    >>> out.loss.backward()
    >>> round(out.loss.item(), 4), logp.grad
    (-0.2, tensor([-0.2000, -0.2000, -0.2000,  0.2000,  0.2000]))
    """
    prepared = prepare(
        logp, old_logp, advantages, batch, gate, weights, rollout_logp, ref_logp, kl, entropy, window, threshold,
        selection, token_mask, token_weight, gate_inputs, advantage_level, report, process_group, backend,
    )  # fmt: skip
    return _run(prepared, process_group, backend)


def policy_loss_and_grad(
    logp: torch.Tensor,
    old_logp: torch.Tensor | None,
    advantages: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    gate: RatioGate | None = None,
    **options: Unpack[PolicyLossOptions],
) -> PolicyLossAndGrad:
    """:func:`policy_loss`, with the same arguments, without autograd: loss, metrics and dL/dlogp (in the shape of logp)
    from one call.

    ``logp.backward(out.grad)`` differentiates the model from there, as ``loss.backward()`` does behind
    :func:`policy_loss`, and takes two launches less on a GPU: the seed of the gradient and the product with it.

    >>> import hpo_core as hpo
    >>> logp = torch.zeros(2, requires_grad=True)
    >>> out = hpo.policy_loss_and_grad(logp, None, torch.ones(1), hpo.PackedBatch.from_lengths([2]))
    >>> logp.backward(out.grad)
    >>> logp.grad
    tensor([-0.5000, -0.5000])
    """
    check_options(policy_loss_and_grad, options)
    prepared = prepare(logp, old_logp, advantages, batch, gate, **options)
    inputs, spec, exchange, corrections, wants_tokens, wants_levels, positive = prepared
    check(
        not wants_tokens,
        "report: expected 'levels' or 'corrections', got 'tokens'; policy_loss returns the losses of tokens",
    )
    backend, process_group = options.get("backend"), options.get("process_group")
    if is_reference(inputs.logp, backend):
        # Tensors of inference mode cannot be saved for a backward; copies of them can.
        with torch.inference_mode(False), torch.enable_grad():
            inputs = PolicyLossInputs(*(_copy_of_inference(each) for each in inputs))
            leaf = inputs.logp.detach().clone().requires_grad_()
            loss, vector, _ = _reference(inputs._replace(logp=leaf), spec, exchange)
            (grad,) = torch.autograd.grad(loss, leaf)
        loss = loss.detach()
    else:
        loss, vector, grad = ops.policy_loss_and_grad(inputs, spec, backend, exchange)
    metrics = observed(vector, process_group, positive)
    levels = observed_levels(inputs, spec, exchange, metrics["tokens"]) if wants_levels else None
    return PolicyLossAndGrad(loss, metrics, grad, levels, corrections)


def hierarchical_policy_loss(
    logp: torch.Tensor,
    old_logp: torch.Tensor | None,
    rewards: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    *,
    advantage: Callable[..., torch.Tensor] = grpo,
    gate: RatioGate | None = None,
    **options: Unpack[PolicyLossOptions],
) -> PolicyLoss:
    """Estimator, window fit and loss in one call; the default gate, :func:`~hpo_core.gates.ppo_clip`, is flat.

    ``advantage``, then ``window.fit``, then :func:`policy_loss`, and nothing else: bitwise equal to the three calls.
    The window's scores are computed once; no ``[T]`` tensor but them and dL/dlogp is made.

    Args:
        logp, old_logp: as in :func:`policy_loss`.
        rewards: ``[S]``, ``[N]`` with an estimator of steps, or of the shape that the estimator takes.
        batch: with ``group_ids``, if the estimator takes them.
        advantage: an estimator, or ``functools.partial`` of one, or a function of your own. It is called with the
            rewards and, by name, those of ``group_ids``, the batch's ``domain_ids`` if it has some, ``batch``,
            ``backend`` and, at the level of steps, ``trajectory_ids`` that it takes; the ids are then ``[N]``. Its
            other arguments, such as ``anchor_ids``, come with the partial; ``partial(grpo, group_ids=None)`` says that
            the whole batch is one group, as equal ids do. ``advantage_level`` is by default the level that
            :func:`~hpo_core.advantages.estimator` marks it with, and ``"row"`` without a mark. It sees the rewards of
            this call alone, also under ``process_group``: ``over_ranks(grpo, process_group)`` is for groups that lie on
            several ranks. Where micro-batches cut groups, or the estimator is over the whole batch, as ``lite_ppo``,
            compute the advantages of the step once and give :func:`policy_loss` ``advantages[part.rows]``.
        gate: as in :func:`policy_loss`.
        options: the keywords of :func:`policy_loss`. ``threshold``: the state that ``window.fit`` returned for the
            whole optimiser step; here by default fitted on this batch, which must be that step: with ``process_group``
            on the batches of its ranks, by collectives of its own (three all-reduces), whether or not a level spans
            ranks; else on one rank.

    >>> import hpo_core as hpo
    >>> batch = hpo.PackedBatch.from_lengths([2, 2], group_ids=torch.tensor([0, 0]))
    >>> out = hpo.hierarchical_policy_loss(torch.zeros(4), None, torch.tensor([1.0, 0.0]), batch)
    >>> round(out.loss.item(), 6)
    0.0
    """
    check_options(hierarchical_policy_loss, options)
    require_type(
        callable(advantage),
        "advantage: expected an estimator of hpo_core.advantages, got {!r}; policy_loss takes advantages themselves",
        advantage,
    )
    batch, backend, group = as_batch(batch), options.get("backend"), options.get("process_group")
    level = options.get("advantage_level")
    if level is None:
        level = level_of(advantage)
    check(
        level_of(advantage) != "selection",
        "advantage: {} chooses rollouts and gives none an advantage; pass its result as mask= of an estimator, "
        "fixed with functools.partial",
        name_of(advantage),
    )
    advantages = _advantages(advantage, level, rewards, batch, backend)
    options["advantage_level"] = level
    window, entropy, score = options.get("window"), options.get("entropy"), None
    if isinstance(window, EntropyWindow) and window.scope == "batch" and options.get("threshold") is None:
        check(entropy is not None, "entropy: a window needs the entropies [T]; pass entropy=")
        assert entropy is not None
        check_is_step(
            "threshold",
            "fit",
            batch,
            "threshold=window.fit(entropy, batch)",
            "threshold=window.fit(entropy, batch, process_group=torch.distributed.group.WORLD)",
            group,
        )
        score = window.score(entropy, batch, backend=backend).flatten()
        options["threshold"] = window.fit_score(score, process_group=group, backend=backend)
        if gate is None or not has_ids(batch, gate.units):
            options["process_group"] = None  # the window alone spans ranks; flags are an error on all of them
    prepared = prepare(logp, old_logp, advantages, batch, gate, _score=score, **options)
    return _run(prepared, group, backend)


# --------------------------------------------------------------------------------------------------- the call


def _advantages(
    estimator: Callable[..., torch.Tensor], level: str, rewards: torch.Tensor, batch: PackedBatch, backend: str | None
) -> torch.Tensor:
    available: dict[str, Any] = {"group_ids": batch.group_ids, "batch": batch}
    domains = batch.domain_ids
    if level == "step":
        available |= batch.ids_of_steps()
        if domains is not None:
            domains = torch.where(available["trajectory_ids"] >= 0, of_row(domains, batch.row_of_step(), -1), -1)
    if domains is not None:  # None would make one domain of all rows
        available["domain_ids"] = domains
    if backend is not None:
        available["backend"] = backend
    given = accepted_keywords(estimator, rewards, **available)
    name = name_of(estimator)
    check(
        "group_ids" not in given or batch.group_ids is not None,
        "group_ids: {} normalises within prompt groups and the batch has no ids, which would make one of all prompts; "
        "pass group_ids [S] to PackedBatch, equal for rollouts of one prompt (zeros if all are)",
        name,
    )
    check(
        "trajectory_ids" not in given or batch.trajectory_ids is not None or not gathers_units(estimator),
        "trajectory_ids: {} gathers the steps of all ranks and the batch has no ids, without which rows are numbered "
        "on each rank alike; pass trajectory_ids [S] to PackedBatch, of other numbers on every rank",
        name,
    )
    for unit in ("group", "domain"):
        if f"{unit}_ids" in given:
            check_whole(
                batch, unit, name, "give policy_loss the entries of the part among the advantages of the whole batch"
            )
    ids, meaning = given.get("group_ids"), {"row": "[S] (one per row)", "step": "[N] (one per step)"}.get(level)
    if ids is not None and meaning and is_published(estimator) and getattr(rewards, "ndim", 0) == 1:
        check_shape("rewards", rewards, ids.shape, meaning)
    try:
        advantages = estimator(rewards, **given)
    except TypeError:  # Python's message does not say which arguments the call has
        check_keywords("advantage", estimator, list(available), f"a call of level {level!r}")
        raise
    require_type(
        isinstance(advantages, torch.Tensor),
        "advantage: expected an estimator of one tensor, got {}; take a stream of it and call policy_loss",
        type(advantages),
    )
    return advantages


def _run(prepared: Prepared, process_group: torch.distributed.ProcessGroup | None, backend: str | None) -> PolicyLoss:
    inputs, spec, exchange, corrections, wants_tokens, wants_levels, positive = prepared
    if is_reference(inputs.logp, backend):
        loss, vector, tokens = _reference(inputs, spec, exchange)
    else:
        loss, vector, tokens = ops.policy_loss(inputs, spec, backend, wants_tokens, exchange)
    metrics = observed(vector, process_group, positive)
    levels = observed_levels(inputs, spec, exchange, metrics["tokens"]) if wants_levels else None
    of_tokens = tokens.reshape(inputs.logp.shape) if wants_tokens and tokens is not None else None
    return PolicyLoss(loss, metrics, of_tokens, levels, corrections)


def _reference(
    inputs: PolicyLossInputs, spec: PolicyLossSpec, exchange: Exchange | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The definition, in float64: loss, metrics vector and losses of tokens, in the dtype of ``logp``."""
    dtype = inputs.logp.dtype
    loss, vector, tokens = resolve("gates", inputs.logp, REFERENCE).policy_loss(doubles(inputs), spec, exchange)
    return loss.to(dtype), vector, tokens.to(dtype)


def _copy_of_inference(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) and value.is_inference() else value
