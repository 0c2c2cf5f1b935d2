"""policy_loss and hierarchical_policy_loss: the only place where the pillars are put together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed

from . import aggregation, gates, ops
from .advantages import grpo
from .advantages.terms import given_to, level_of
from .backends import resolve
from .batch import PackedBatch
from .checks import (
    as_constant,
    check,
    check_precision,
    check_shape,
    check_type,
    checked_constant,
    examined,
)
from .corrections import corrected
from .entropy import EntropyWindow, WindowState
from .entropy.window import check_scorer
from .gates import Channel, RatioGate
from .kl import KLPenalty
from .level_metrics import LevelMetrics, observed_levels
from .metrics import Metrics, observed
from .spanning import Beyond, exchange_of
from .specs import PolicyLossInputs, PolicyLossSpec

__all__ = ["PolicyLoss", "PolicyLossAndGrad", "hierarchical_policy_loss", "policy_loss", "policy_loss_and_grad"]

Bounds = tuple[torch.Tensor | None, torch.Tensor | None]
Aggregates = Mapping[str, torch.Tensor]  # by level

_DEFAULT_GATE = gates.ppo_clip(0.2, 0.2)


class PolicyLoss(NamedTuple):
    """The result: ``loss`` 0-dim, differentiable in logp; ``metrics`` still on the device; where asked for ``tokens``
    loss_t, ``levels`` the metrics of each level, and ``corrections`` those of each correction."""

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
    token_mask: torch.Tensor | None = None,
    token_weight: torch.Tensor | None = None,
    bounds: Bounds | None = None,
    target: torch.Tensor | None = None,
    penalty_mask: torch.Tensor | None = None,
    advantage_level: str | None = None,
    return_tokens: bool = False,
    aggregates: Aggregates | None = None,
    process_group: torch.distributed.ProcessGroup | None = None,
    level_metrics: bool = False,
    correction_metrics: bool = False,
    backend: str | None = None,
) -> PolicyLoss:
    """The policy loss of a packed (or padded) batch under a ratio gate: ``loss = sum_t m_t w[s(t)] loss_t``.

    ``loss_t = -M_t W_t A_t Phi(z_t) + beta k(logp_t - ref_logp_t)``: z is the gated log-ratio, Phi the gate's head, M
    the selection (``token_mask`` and the window), W ``token_weight``, and the penalty is not masked by M. Everything
    but ``logp`` is a constant of the differentiation; the backward returns dL/dlogp times the incoming gradient, and
    only once.

    Args:
        logp: ``[T]`` (or the padded ``[B, L]``) float32, natural log-probabilities of the current policy.
        old_logp: the same shape; those of the policy the ratios are taken to. None: on-policy, every ratio is 1.
        advantages: ``[S]``, one per row, or one of each ``advantage_level``. An ``[S]`` advantage is never expanded in
            memory.
        batch: a PackedBatch, or a padded mask ``[B, L]``. Values at masked positions are never read.
        gate: a RatioGate. Default: ``gates.ppo_clip(0.2, 0.2)``.
        weights: ``[S]`` float32 from :mod:`hpo_core.aggregation`. Default: ``aggregation.token_mean(batch)`` (of the
            tokens inside steps, where the gate has steps as a level), where the batch is the whole optimiser step: on
            one rank, and no part of ``batch.micro_batches``.
        rollout_logp: the same shape; log-probabilities as the sampler gave them, for gates with corrections or on the
            total ratio. Without it the sampler is taken to be the policy of ``old_logp``: no correction of their
            discrepancy.
        ref_logp, kl: the reference policy and the penalty on it, :mod:`hpo_core.kl`; both or neither.
        entropy: ``[T]`` in nats, for ``window`` and the metrics.
        window, threshold: an EntropyWindow and what its ``fit`` returned: only tokens it selects count in the policy
            term.
        token_mask: bool ``[T]``: tokens whose policy term counts. Denominators stay those of ``weights``.
        token_weight: float ``[T]``: factor on the policy term.
        bounds: ``(low, high)`` each ``[T]`` or None: ratio bounds per token, in place of the gate's where it has them,
            for both signs of A. A dual clip (``dual=``, what bounds ``A < 0`` above and not ``A >= 0`` below) stays.
        target: one for each advantage, at their level: what the heads TARGET and NEGATIVE_AWARE compare the ratio with;
            only those take it.
        penalty_mask: bool ``[T]``: the tokens that pay the gate's own penalty. Default: every valid token.
        advantage_level: what advantages belong to: ``"row"``, the default; ``"token"``: ``[T]`` (or ``[B, L]``);
            ``"step"``: ``[N]``; ``"trajectory"``, ``"group"``, ``"domain"``: entry i belongs to id i. It is said, never
            read off a shape, which may fit several.
        return_tokens: also return loss_t ``[T]`` (detached; not multiplied by ``weights``).
        aggregates: by level (``"step"``, ``"trajectory"``, ``"group"``, ``"domain"``), what stands in the place of the
            aggregates of this call's tokens, for a level routed STOPPED whose segments other micro-batches have, too:
            float ``[G]``, entry i the log-ratio (a mean or sum, as the level says) of the segment with id i; with a
            split ``[2, G]``, of x+ and x-. An id without an entry, or with NaN, keeps its own.
        process_group: ranks over which levels named by ids span: rows with equal ``trajectory_ids``, ``group_ids`` or
            ``domain_ids``, and steps with equal ``step_ids``, form one segment wherever they lie (a trajectory cut over
            ranks is sequence parallelism).
            All ranks make the same calls in the same order, each on a batch of its own that all make anew together:
            the first call with a batch gathers the ids. ``loss`` is the sum over this rank's tokens, the gradient that
            of the sum of all ranks' losses; ``weights`` must count the tokens of all ranks (``process_group=`` or
            ``total=`` of :mod:`hpo_core.aggregation`, with ``gradient_reduction=``).
        level_metrics: also return what each level of the gate observed, a :class:`~hpo_core.LevelMetrics`: made of the
            sums of its segments, without another sweep over log-probabilities; nothing else changes. ``gspo`` and
            others with quick kernels take the way of all levels for it, within rounding of the same gradient.
        correction_metrics: also return what each of the gate's corrections saw, :class:`~hpo_core.Metrics` in their
            order: log-ratios, KL and effective sample size of its channel, and ``selected_fraction``, the part of the
            tokens whose factor is not 0. One more sweep for each of them; empty where ``rollout_logp`` is missing.
        backend: a name from ``hpo_core.backends()``. Default: by device.

    Raises:
        ValueError, TypeError: naming the argument, what was expected, what came, and the fix.

    >>> import hpo_core as hpo
    >>> batch = hpo.PackedBatch.from_lengths([3, 2])
    >>> logp = torch.full((5,), -1.0, requires_grad=True)
    >>> out = hpo.policy_loss(logp, torch.full((5,), -1.0), torch.tensor([1.0, -1.0]), batch)
    >>> out.loss.backward()
    >>> round(out.loss.item(), 4), logp.grad
    (-0.2, tensor([-0.2000, -0.2000, -0.2000,  0.2000,  0.2000]))
    """
    inputs, spec, exchange, corrections = _prepare(
        logp, old_logp, advantages, batch, gate, weights, rollout_logp, ref_logp, kl, entropy, window, threshold, None,
        token_mask, token_weight, bounds, target, penalty_mask, advantage_level, aggregates,
        process_group, level_metrics, correction_metrics, backend,
    )  # fmt: skip
    return _run(inputs, spec, return_tokens, level_metrics, process_group, backend, exchange, corrections)


def policy_loss_and_grad(
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
    token_mask: torch.Tensor | None = None,
    token_weight: torch.Tensor | None = None,
    bounds: Bounds | None = None,
    target: torch.Tensor | None = None,
    penalty_mask: torch.Tensor | None = None,
    advantage_level: str | None = None,
    aggregates: Aggregates | None = None,
    process_group: torch.distributed.ProcessGroup | None = None,
    level_metrics: bool = False,
    correction_metrics: bool = False,
    backend: str | None = None,
) -> PolicyLossAndGrad:
    """:func:`policy_loss` without autograd: loss, metrics and dL/dlogp (in the shape of logp) from one call.

    >>> import hpo_core as hpo
    >>> out = hpo.policy_loss_and_grad(torch.zeros(2), None, torch.ones(1), hpo.PackedBatch.from_lengths([2]))
    >>> out.grad
    tensor([-0.5000, -0.5000])
    """
    inputs, spec, exchange, corrections = _prepare(
        logp, old_logp, advantages, batch, gate, weights, rollout_logp, ref_logp, kl, entropy, window, threshold, None,
        token_mask, token_weight, bounds, target, penalty_mask, advantage_level, aggregates,
        process_group, level_metrics, correction_metrics, backend,
    )  # fmt: skip
    if backend == "reference":
        with torch.enable_grad():
            leaf = inputs.logp.detach().clone().requires_grad_()
            op = resolve("gates", leaf, backend)
            loss, vector, _ = op.policy_loss(inputs._replace(logp=leaf), spec, exchange)
            (grad,) = torch.autograd.grad(loss, leaf)
        loss = loss.detach()
    else:
        loss, vector, grad = ops.policy_loss_and_grad(inputs, spec, backend, exchange)
    metrics = observed(vector, process_group)
    levels = _levels(inputs, spec, metrics, exchange) if level_metrics else None
    return PolicyLossAndGrad(loss, metrics, grad, levels, corrections)


def hierarchical_policy_loss(
    logp: torch.Tensor,
    old_logp: torch.Tensor | None,
    rewards: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    *,
    advantage: Callable[..., torch.Tensor] = grpo,
    gate: RatioGate = _DEFAULT_GATE,
    window: EntropyWindow | None = None,
    entropy: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    rollout_logp: torch.Tensor | None = None,
    ref_logp: torch.Tensor | None = None,
    kl: KLPenalty | None = None,
    threshold: WindowState | torch.Tensor | None = None,
    token_mask: torch.Tensor | None = None,
    token_weight: torch.Tensor | None = None,
    bounds: Bounds | None = None,
    target: torch.Tensor | None = None,
    penalty_mask: torch.Tensor | None = None,
    advantage_level: str | None = None,
    return_tokens: bool = False,
    aggregates: Aggregates | None = None,
    process_group: torch.distributed.ProcessGroup | None = None,
    level_metrics: bool = False,
    correction_metrics: bool = False,
    backend: str | None = None,
) -> PolicyLoss:
    """The single call over the three pillars: ``advantage``, then ``window.fit``, then :func:`policy_loss`, and nothing
    else.

    Bitwise equal to the three calls. The window's scores are computed once; no ``[T]`` tensor but them and dL/dlogp is
    made.

    Args:
        rewards: ``[S]``, ``[N]`` with an estimator of steps, or what the estimator takes.
        batch: with ``group_ids``, if the estimator takes them.
        advantage: an estimator, or ``functools.partial`` of one, or a function of your own. It is called with the
            rewards and, by name, those of ``group_ids``, ``trajectory_ids`` (of steps ``[N]``), ``batch`` (of tokens)
            and ``backend`` that it takes. What else it needs, such as ``anchor_ids``, comes with the partial;
            ``partial(grpo, group_ids=None)`` says that the whole batch is one group, as equal ids do.
        advantage_level: Default: what the estimator says of itself; ``"row"`` for functions that say nothing.
        threshold: what ``window.fit`` returned for the whole optimiser step. Default: fitted on this batch.
        everything else: as in :func:`policy_loss`.

    >>> import hpo_core as hpo
    >>> batch = hpo.PackedBatch.from_lengths([2, 2], group_ids=torch.tensor([0, 0]))
    >>> out = hpo.hierarchical_policy_loss(torch.zeros(4), None, torch.tensor([1.0, 0.0]), batch)
    >>> round(out.loss.item(), 6)
    0.0
    """
    check_type(callable(advantage), "advantage: expected an estimator of hpo_core.advantages, got {!r}", advantage)
    batch = _as_batch(batch)
    level = level_of(advantage)
    advantages = _advantages(advantage, level, rewards, batch, backend)
    if advantage_level is None:
        advantage_level = level
    score = None
    if window is not None and threshold is None:
        check(entropy is not None, "entropy: a window needs the entropies [T]; pass entropy=")
        assert entropy is not None
        score = window.score(entropy, batch, backend=backend)
        threshold = window.fit_score(score, backend=backend)
    inputs, spec, exchange, corrections = _prepare(
        logp, old_logp, advantages, batch, gate, weights, rollout_logp, ref_logp, kl, entropy, window, threshold, score,
        token_mask, token_weight, bounds, target, penalty_mask, advantage_level, aggregates,
        process_group, level_metrics, correction_metrics, backend,
    )  # fmt: skip
    return _run(inputs, spec, return_tokens, level_metrics, process_group, backend, exchange, corrections)


# --------------------------------------------------------------------------------------------------- the call


def _advantages(
    estimator: Callable[..., torch.Tensor], level: str, rewards: torch.Tensor, batch: PackedBatch, backend: str | None
) -> torch.Tensor:
    given: dict[str, Any] = {"group_ids": batch.group_ids}
    if level == "token":
        given["batch"] = batch
    elif level == "step":
        given |= batch.ids_of_steps()
    if backend is not None:
        given["backend"] = backend
    given = given_to(estimator, **given)
    name = getattr(getattr(estimator, "func", estimator), "__name__", "estimator")
    check(
        "group_ids" not in given or batch.group_ids is not None,
        "group_ids: {} normalises within prompt groups and the batch has no ids, which would make one of all prompts; "
        "pass group_ids [S] to PackedBatch, equal for rollouts of one prompt (zeros if all are)",
        name,
    )
    advantages = estimator(rewards, **given)
    check_type(
        isinstance(advantages, torch.Tensor),
        "advantage: expected an estimator of one tensor, got {}; take a stream of it and call policy_loss",
        type(advantages),
    )
    return advantages


def _run(
    inputs: PolicyLossInputs,
    spec: PolicyLossSpec,
    return_tokens: bool,
    level_metrics: bool,
    process_group: torch.distributed.ProcessGroup | None,
    backend: str | None,
    exchange: Beyond | None,
    corrections: tuple[Metrics, ...],
) -> PolicyLoss:
    if backend == "reference":
        loss, vector, tokens = resolve("gates", inputs.logp, backend).policy_loss(inputs, spec, exchange)
    else:
        loss, vector, tokens = ops.policy_loss(inputs, spec, backend, return_tokens, exchange)
    metrics = observed(vector, process_group)
    levels = _levels(inputs, spec, metrics, exchange) if level_metrics else None
    if tokens is None or not return_tokens:
        return PolicyLoss(loss, metrics, None, levels, corrections)
    return PolicyLoss(loss, metrics, tokens.reshape(inputs.logp.shape), levels, corrections)


def _levels(inputs: PolicyLossInputs, spec: PolicyLossSpec, metrics: Metrics, exchange: Beyond | None) -> LevelMetrics:
    assert exchange is not None  # who asks for metrics of levels has one
    return observed_levels(inputs, spec, exchange, metrics["tokens"])


def _prepare(
    logp: torch.Tensor,
    old_logp: torch.Tensor | None,
    advantages: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    gate: RatioGate | None,
    weights: torch.Tensor | None,
    rollout_logp: torch.Tensor | None,
    ref_logp: torch.Tensor | None,
    kl: KLPenalty | None,
    entropy: torch.Tensor | None,
    window: EntropyWindow | None,
    threshold: WindowState | torch.Tensor | None,
    score: torch.Tensor | None,
    token_mask: torch.Tensor | None,
    token_weight: torch.Tensor | None,
    bounds: Bounds | None,
    target: torch.Tensor | None,
    penalty_mask: torch.Tensor | None,
    advantage_level: str | None,
    aggregates: Aggregates | None,
    process_group: torch.distributed.ProcessGroup | None,
    level_metrics: bool,
    correction_metrics: bool,
    backend: str | None,
) -> tuple[PolicyLossInputs, PolicyLossSpec, Beyond | None, tuple[Metrics, ...]]:
    """Check every argument once and bring it to what kernels take: contiguous, float32, one device."""
    # Below some ten thousand tokens this takes as long as the kernel: what is rarely given costs one comparison.
    logp = examined("logp", logp, "[T]")
    batch = _as_batch(batch)
    gate = _DEFAULT_GATE if gate is None else gate
    check_type(isinstance(gate, RatioGate), "gate: expected a RatioGate from hpo_core.gates, got {}", gate)
    plain = gate.plain and rollout_logp is None and target is None and penalty_mask is None and not correction_metrics
    if not plain:
        _check_given(gate, rollout_logp, target, penalty_mask, correction_metrics)
    if kl is not None or ref_logp is not None:
        _check_penalty(kl, ref_logp)

    dtype, shape, device = logp.dtype, logp.shape, logp.device
    if dtype is not torch.float32:
        check_precision(dtype, backend)
    if shape != (batch.total_tokens,) and shape != batch.padded_shape:
        check_shape("logp", logp, batch.padded_shape or (batch.total_tokens,), "[T] (or the padded [B, L])")
    check(device == batch.device, "logp: expected device {} (that of the batch), got {}", batch.device, device)

    def token(name: str, tensor: torch.Tensor, kind: torch.dtype = dtype) -> torch.Tensor:
        return checked_constant(name, tensor, shape, "[T] (that of logp)", kind, device)

    low, high = (None, None) if bounds is None else _bounds(bounds, gate)
    limit: torch.Tensor | None = None
    if window is None:
        check(threshold is None, "threshold: given without a window; pass window= too")
    else:
        check_type(isinstance(window, EntropyWindow), "window: expected one of hpo_core.entropy, got {!r}", window)
        score, value = _selection(window, threshold, score, entropy, batch, backend)
        limit = checked_constant("threshold", value, (1,), "[1] (what window.fit returned)", dtype, device)
    per_token, level_advantages = batch.of_level("advantages", advantages, advantage_level, shape)
    spec = gate.spec(kl, window is not None and window.strict)
    beyond = process_group is not None or aggregates is not None or level_metrics
    if beyond:
        asked = {"process_group": process_group, "aggregates": aggregates, "level_metrics": level_metrics or None}
        check(
            not ops.watched(logp),
            "{}: only eager calls know it; call the loss outside torch.compile, dispatch modes and torch.func",
            next(name for name, value in asked.items() if value is not None),
        )
        spec = spec.with_levels()
        check(
            bool(spec.levels) or not level_metrics,
            "level_metrics: expected a gate with levels, got {!r}, which has none; drop it (metrics has the tokens)",
            gate.name,
        )
    trajectories = batch.trajectories if spec.has_level else None
    row_trajectory, start, rows = trajectories if trajectories is not None else (None, None, None)
    hierarchy = batch.hierarchy(tuple(level.unit for level in spec.levels)) if spec.of_pieces else ()
    exchange: Beyond | None = None
    if beyond:
        units = tuple(correction.unit for correction in gate.corrections if correction.unit is not None)
        exchange = exchange_of(batch, spec, gate.name, units, process_group, aggregates)
    if weights is None:
        weights = aggregation.default(batch, gate.of_steps)
    inputs = PolicyLossInputs(  # by position: eighteen keywords would take a microsecond
        logp,
        None if old_logp is None else token("old_logp", old_logp),
        as_constant("advantages", level_advantages, None, "", dtype, device),
        checked_constant("weights", weights, (batch.rows,), "[S] (one per row)", dtype, device),
        batch.cu_seqlens,
        batch.mask,
        None if ref_logp is None else token("ref_logp", ref_logp),
        None if entropy is None else token("entropy", examined("entropy", entropy, "[T]").detach()),
        score,
        limit,
        None if token_mask is None else token("token_mask", token_mask, torch.bool),
        None if token_weight is None else token("token_weight", token_weight),
        None if low is None else token("bounds[0]", low),
        None if high is None else token("bounds[1]", high),
        row_trajectory,
        start,
        rows,
        per_token,
        *hierarchy,
    )
    if plain:
        return inputs, spec, exchange, ()
    if target is not None:
        _, target = batch.of_level("target", target, advantage_level, shape)
        target = as_constant("target", target, None, "", dtype, device)
        inputs = inputs._replace(target=target, target_per_token=per_token)
    if penalty_mask is not None:
        inputs = inputs._replace(penalty_mask=token("penalty_mask", penalty_mask, torch.bool))
    if gate.advantage_weights != (1.0, 1.0):
        positive, negative = gate.advantage_weights
        signed = inputs.advantages
        inputs = inputs._replace(advantages=torch.where(signed < 0, signed * negative, signed * positive))
    rollout = None if rollout_logp is None else token("rollout_logp", rollout_logp)
    inputs, seen = corrected(inputs, gate, batch, rollout, process_group, correction_metrics, backend)
    if gate.channel is Channel.TOTAL and rollout is not None:
        inputs = inputs._replace(old_logp=rollout)
    return inputs, spec, exchange, seen


def _check_given(
    gate: RatioGate,
    rollout_logp: torch.Tensor | None,
    target: torch.Tensor | None,
    penalty_mask: torch.Tensor | None,
    correction_metrics: bool,
) -> None:
    """That the gate takes what was given and was given what it takes."""
    check(
        rollout_logp is None or gate.reads_rollout,
        "rollout_logp: the gate {!r} does not read the sampler's log-probabilities; drop it, or pass them as old_logp",
        gate.name,
    )
    check(
        not correction_metrics or bool(gate.corrections),
        "correction_metrics: expected a gate with corrections, got {!r}, which has none; drop it",
        gate.name,
    )
    check(
        (target is not None) == gate.takes_target,
        "target: the gate {!r} needs one, got None" if target is None else "target: the gate {!r} takes none; drop it",
        gate.name,
    )
    check(
        penalty_mask is None or gate.penalty_coefficient > 0,
        "penalty_mask: the gate {!r} has no penalty of its own; drop it",
        gate.name,
    )


def _check_penalty(kl: KLPenalty | None, ref_logp: torch.Tensor | None) -> None:
    check_type(
        kl is None or isinstance(kl, KLPenalty), "kl: expected a penalty such as hpo_core.kl.k3(beta), got {!r}", kl
    )
    check(
        (kl is None) == (ref_logp is None), "kl: ref_logp and kl go together, got only {}", "kl" if kl else "ref_logp"
    )


def _bounds(bounds: Bounds, gate: RatioGate) -> Bounds:
    check_type(
        isinstance(bounds, tuple) and len(bounds) == 2,
        "bounds: expected a pair (low, high) of tensors [T] or None, got {}",
        type(bounds),
    )
    check(
        gate.takes_bounds or all(bound is None for bound in bounds),
        "bounds: the gate {!r} has no token clip for them to replace; use ppo_clip, dapo or cispo",
        gate.name,
    )
    return bounds


def _as_batch(batch: PackedBatch | torch.Tensor) -> PackedBatch:
    if isinstance(batch, PackedBatch):
        return batch
    check_type(isinstance(batch, torch.Tensor), "batch: expected a PackedBatch or a mask [B, L], got {}", type(batch))
    return PackedBatch.from_padded(examined("batch", batch))


def _selection(
    window: EntropyWindow,
    threshold: WindowState | torch.Tensor | None,
    score: torch.Tensor | None,
    entropy: torch.Tensor | None,
    batch: PackedBatch,
    backend: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The window's scores ``[T]`` and its threshold."""
    check(entropy is not None, "entropy: a window needs the entropies [T]; pass entropy=")
    assert entropy is not None
    if score is None:
        score = window.score(entropy, batch, backend=backend)
    if threshold is None:
        check(
            window.scope == "call",
            "threshold: the window {!r} selects over the whole batch; pass threshold=window.fit(entropy, batch), "
            "fitted on the optimiser step, or build the window with scope='call'",
            window.name,
        )
        threshold = window.fit_score(score, backend=backend)
    if not isinstance(threshold, WindowState):
        return score, threshold
    check_scorer(window, threshold, score, backend)
    return score, threshold.threshold
