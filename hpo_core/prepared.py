"""The arguments of a policy loss, checked once and made into those of kernels."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Literal, NamedTuple, TypedDict

import torch
import torch.distributed

from . import aggregation, gates, ops
from .batch import ROWS_AS_LEAVES, Hierarchy, LeafTables, PackedBatch, as_batch, check_whole, valid_tokens
from .checks import (
    as_constant,
    check,
    check_device,
    check_precision,
    check_shape_of_tokens,
    checked_constant,
    examined,
    is_compiling,
    is_constant,
    require_type,
)
from .corrections import corrected
from .entropy import EntropyWindow, Selection, WindowState
from .entropy.selection import checked_selection, selected_tokens, shaped_advantages
from .entropy.window import check_state, rounded_as
from .gates import Channel, GateInputs, RatioGate
from .kl import KLPenalty
from .metrics import Metrics, is_debugging
from .segment_exchange import SegmentExchange, exchange_of
from .specs import PolicyLossInputs, PolicyLossSpec

_Reported = Literal["tokens", "levels", "corrections"]
Report = tuple[_Reported, ...] | Collection[_Reported]  # for a Collection alone mypy takes ("levels",) for any strings

_DEFAULT_GATE = gates.ppo_clip(0.2, 0.2)
_NO_INPUTS = GateInputs()
_AS_FITTED = "[1] (as window.fit returned it)"
_LEAST_POSITIVE = 1e-3  # a log-probability above 0 by less may be rounding of float32


class PolicyLossOptions(TypedDict, total=False):
    """The keywords of :func:`policy_loss`, which the other calls take, too."""

    weights: torch.Tensor | None
    rollout_logp: torch.Tensor | None
    ref_logp: torch.Tensor | None
    kl: KLPenalty | None
    entropy: torch.Tensor | None
    window: EntropyWindow | None
    threshold: WindowState | torch.Tensor | None
    selection: Selection | None
    token_mask: torch.Tensor | None
    token_weight: torch.Tensor | None
    gate_inputs: GateInputs | None
    advantage_level: str | None
    report: Report
    process_group: torch.distributed.ProcessGroup | None
    backend: str | None


_OPTIONS = frozenset(PolicyLossOptions.__annotations__)


def check_options(function: Callable[..., object], options: Mapping[str, object]) -> None:
    """Refuse a keyword that this public function does not take; Python would name a function inside it."""
    if options.keys() <= _OPTIONS:
        return
    known = [*list(inspect.signature(function).parameters)[:-1], *PolicyLossOptions.__annotations__]
    name = min(options.keys() - _OPTIONS)
    close = difflib.get_close_matches(name, known, 1)
    fix = f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(known)}"
    raise TypeError(f"{name}: {function.__name__} has no such argument; {fix}")


class Prepared(NamedTuple):
    """The arguments of kernels, and the requests for reports."""

    inputs: PolicyLossInputs
    spec: PolicyLossSpec
    exchange: SegmentExchange | None
    corrections: tuple[Metrics, ...]
    wants_tokens: bool
    wants_levels: bool
    positive: dict[str, torch.Tensor] | None  # in debug mode how many log-probabilities are above 0, by argument


def prepare(
    logp: torch.Tensor,
    old_logp: torch.Tensor | None,
    advantages: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    gate: RatioGate | None,
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
    _score: torch.Tensor | None = None,
    _logp_known: bool = True,
) -> Prepared:
    """Check every argument once and bring it into the form of kernels: contiguous, float32, one device. No caller of a
    public function passes ``_score``, the window's scores, and ``_logp_known``: else only the shape of logp counts."""
    # Below some ten thousand tokens this takes as long as the kernel: a rare argument costs one comparison.
    is_eager = not is_compiling()
    logp = examined("logp", logp, "[T]")
    batch = as_batch(batch)
    gate = _DEFAULT_GATE if gate is None else gate
    require_type(isinstance(gate, RatioGate), "gate: expected a RatioGate such as gates.dapo(), got {!r}", gate)
    wants_tokens = wants_levels = wants_corrections = False
    if report:
        wants_tokens, wants_levels, wants_corrections = _reported(report)
    if selection is not None:
        selection, gate_inputs = checked_selection(selection, window is not None, kl, gate_inputs)
    gate_inputs = _checked_inputs(gate_inputs, gate) if gate_inputs is not None or gate.required else _NO_INPUTS
    bounds, target, gate_mask, penalty_mask, aggregates, gate_weight = gate_inputs
    without_extras = rollout_logp is None and target is None and penalty_mask is None and not wants_corrections
    fast_path = gate.has_fast_path and without_extras
    if not fast_path:
        _check_rollout(gate, rollout_logp, wants_corrections)
    if kl is not None or ref_logp is not None:
        _check_penalty(kl, ref_logp)

    dtype, shape, device = logp.dtype, logp.shape, logp.device
    if dtype is not torch.float32:
        check_precision(dtype, backend)
    check_shape_of_tokens("logp", logp, batch)
    if device != batch.device:
        check_device("logp", logp, batch.device, "the batch")

    def token(name: str, tensor: torch.Tensor, kind: torch.dtype = dtype) -> torch.Tensor:
        if is_eager and is_constant(tensor, shape, kind, device):
            return tensor
        return checked_constant(name, tensor, shape, "[T] (that of logp)", kind, device)

    score, limit, strict = _score, None, False
    if window is not None or threshold is not None or selection is not None:
        score, limit, strict = _compared(window, threshold, selection, score, entropy, batch, backend, token)
        if limit is not None:
            limit = examined("threshold", limit, _AS_FITTED)
            limit = limit.reshape(1) if limit.dim() == 0 else limit
            limit = as_constant("threshold", limit, (1,), _AS_FITTED, dtype, device)
    target_per_token = per_token = False
    of_rows = (batch.rows,)
    is_usual = is_eager and advantage_level is None and selection is None
    if not (is_usual and is_constant(advantages, of_rows, dtype, device)):
        per_token, advantages = batch.of_level("advantages", advantages, advantage_level, shape)
        target_per_token = per_token
        if selection is not None:
            advantages, per_token = shaped_advantages(selection, advantages, per_token, batch, token)
        advantages = as_constant("advantages", advantages, None, "", dtype, device)
    spec = gate.spec(kl, strict)
    leaves, exchange = _leaves(batch, gate, spec, logp, process_group, aggregates, wants_levels)
    if weights is None:
        weights = aggregation.default(batch, gate.of_steps).to(dtype)
    elif not (is_eager and is_constant(weights, of_rows, dtype, device)):
        weights = checked_constant("weights", weights, of_rows, "[S] (one per row)", dtype, device)
    token_mask, token_weight = _mask_and_weight(token_mask, token_weight, gate_mask, gate_weight, selection, token)
    low: torch.Tensor | None = None
    high: torch.Tensor | None = None
    if bounds is not None:
        low, high = (None if each is None else token(f"bounds[{at}]", each) for at, each in enumerate(bounds))
    inputs = PolicyLossInputs(  # by position: fifteen keywords would take a microsecond
        logp,
        None if old_logp is None else token("old_logp", old_logp),
        advantages,
        weights,
        batch.cu_seqlens,
        batch.mask,
        None if ref_logp is None else token("ref_logp", ref_logp),
        None if entropy is None else token("entropy", entropy),
        score,
        limit,
        token_mask,
        token_weight,
        low,
        high,
        per_token,
        *leaves,
    )
    if selection is not None and selection.kl_weight is not None:
        inputs = inputs._replace(kl_weight=token("kl_weight", selection.kl_weight))
    rollout = None if rollout_logp is None else token("rollout_logp", rollout_logp)
    positive: dict[str, torch.Tensor] | None = None
    if is_debugging():
        current = logp if _logp_known else None
        positive = _positive(
            batch, gate, logp=current, old_logp=inputs.old_logp, ref_logp=inputs.ref_logp, rollout_logp=rollout
        )
    if fast_path:
        return Prepared(inputs, spec, exchange, (), wants_tokens, wants_levels, positive)
    inputs = _with_rare_inputs(inputs, gate, target, penalty_mask, batch, advantage_level, target_per_token, token)
    inputs, spec, seen = corrected(
        inputs, spec, gate, batch, rollout, process_group, wants_corrections, _logp_known, backend
    )
    if gate.channel is Channel.TOTAL and rollout is not None:
        inputs = inputs._replace(old_logp=rollout)
    return Prepared(inputs, spec, exchange, seen, wants_tokens, wants_levels, positive)


def _check_rollout(gate: RatioGate, rollout_logp: torch.Tensor | None, wants_corrections: bool) -> None:
    check(
        rollout_logp is None or gate.reads_rollout,
        "rollout_logp: the gate {!r} does not read the sampler's log-probabilities; drop it, or pass them as old_logp",
        gate.name,
    )
    check(
        rollout_logp is not None or not gate.needs_rollout,
        "rollout_logp: the gate {!r} corrects by the sampler's log-probabilities, and got none; pass the sampler's "
        "(old_logp, where the sampler is the old policy), or another gate",
        gate.name,
    )
    check(
        not wants_corrections or len(gate.corrections) > 0,
        "report: 'corrections' is for a gate with corrections, got {!r}, which has none; drop it",
        gate.name,
    )


def _check_levels_are_whole(batch: PackedBatch, gate: RatioGate, aggregates: Mapping[str, torch.Tensor]) -> None:
    """``aggregates`` replace those of levels; a correction looks at the tokens of the call all the same."""
    corrected_units = {each.unit for each in gate.corrections}
    for unit in gate.units:
        level = unit.name.lower()
        if unit in corrected_units or level not in aggregates:
            check_whole(
                batch,
                level,
                f"the gate {gate.name!r}",
                "give the aggregates of a level that is STOPPED as gate_inputs=GateInputs(aggregates=...)",
            )


def _leaves(
    batch: PackedBatch,
    gate: RatioGate,
    spec: PolicyLossSpec,
    logp: torch.Tensor,
    process_group: torch.distributed.ProcessGroup | None,
    aggregates: Mapping[str, torch.Tensor] | None,
    wants_levels: bool,
) -> tuple[Hierarchy | LeafTables, SegmentExchange | None]:
    """The leaves of the gate's levels, and the exchange of their segments where a call looks beyond its own tokens."""
    if batch.torn:
        _check_levels_are_whole(batch, gate, aggregates or {})
    if process_group is None and aggregates is None and not wants_levels:
        return batch.leaf_tables(gate.level_units) if spec.levels else ROWS_AS_LEAVES, None
    asked = {"process_group": process_group, "gate_inputs.aggregates": aggregates, "report": wants_levels or None}
    check(
        not ops.is_traced(logp),
        "{}: only eager calls know it; call the loss outside torch.compile, dispatch modes and torch.func",
        next(name for name, value in asked.items() if value is not None),
    )
    check(
        bool(spec.levels) or not wants_levels,
        "report: 'levels' is for a gate with levels, got {!r}, which has none; drop it (metrics has the tokens)",
        gate.name,
    )
    leaves = batch.hierarchy(gate.level_units) if spec.levels else ROWS_AS_LEAVES
    return leaves, exchange_of(batch, spec, gate.name, gate.units, process_group, aggregates)


def _positive(batch: PackedBatch, gate: RatioGate, **given: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """How many valid tokens have a log-probability above 0, which says that it is something else."""
    valid = valid_tokens(batch)
    if gate.of_steps:
        valid &= batch.step_of_token() >= 0
    return {
        name: ((each.reshape(-1) > _LEAST_POSITIVE) & valid).sum() for name, each in given.items() if each is not None
    }


def _reported(report: Collection[str]) -> tuple[bool, bool, bool]:
    known = ("tokens", "levels", "corrections")
    is_several = hasattr(report, "__iter__") and not isinstance(report, str)
    names = tuple(report) if is_several else ()  # a generator has its names only once
    check(
        is_several and all(each in known for each in names),
        "report: expected some of {}, as in report=('tokens',), got {!r}",
        known,
        names if is_several else report,
    )
    return "tokens" in names, "levels" in names, "corrections" in names


def _checked_inputs(gate_inputs: GateInputs | None, gate: RatioGate) -> GateInputs:
    """The inputs of the gate beside the batch: it takes all of them, and gets all that it needs."""
    given = _NO_INPUTS if gate_inputs is None else gate_inputs
    require_type(
        isinstance(given, GateInputs),
        "gate_inputs: expected a GateInputs, which the functions of hpo_core.gates return, got {}; wrap a tensor as "
        "gates.GateInputs(bounds=...)",
        given if callable(given) else type(given),
    )
    for name, call in gate.required.items():
        check(
            getattr(given, name) is not None,
            "gate_inputs: the gate {!r} needs {}, got none; pass gate_inputs={}",
            gate.name,
            name,
            call,
        )
    bounds, target, penalty_mask = given.bounds, given.target, given.penalty_mask
    if bounds is not None:
        require_type(
            isinstance(bounds, tuple) and len(bounds) == 2,
            "bounds: expected a pair (low, high) of tensors [T] or None, got {}",
            type(bounds),
        )
        check(
            gate.takes_bounds or all(bound is None for bound in bounds),
            "bounds: the gate {!r} has no token clip with bounds for them to replace; use ppo_clip, dapo or cispo",
            gate.name,
        )
    check(target is None or gate.takes_target, "target: the gate {!r} takes none; drop it", gate.name)
    check(
        penalty_mask is None or gate.penalty_coefficient > 0,
        "penalty_mask: the gate {!r} has no penalty of its own; drop it",
        gate.name,
    )
    return given


def _check_penalty(kl: KLPenalty | None, ref_logp: torch.Tensor | None) -> None:
    require_type(
        kl is None or isinstance(kl, KLPenalty), "kl: expected a penalty such as hpo_core.kl.k3(beta), got {!r}", kl
    )
    check(kl is None or ref_logp is not None, "kl: expected ref_logp beside it, got none; pass ref_logp=, or drop kl")
    alone = "ref_logp: expected a penalty beside it, got none; pass kl=, such as hpo_core.kl.k3(beta), or drop ref_logp"
    check(ref_logp is None or kl is not None, alone)


def _compared(
    window: EntropyWindow | None,
    threshold: WindowState | torch.Tensor | None,
    selection: Selection | None,
    score: torch.Tensor | None,
    entropy: torch.Tensor | None,
    batch: PackedBatch,
    backend: str | None,
    token: Callable[..., torch.Tensor],
) -> tuple[torch.Tensor | None, torch.Tensor | None, bool]:
    """The scores ``[T]`` of the window or the selection, the threshold they are compared with, whether strictly."""
    if window is None:
        check(threshold is None, "threshold: given without a window; pass window= too")
        if selection is None:
            return None, None, False
        score, threshold = selection.compared()
        if score is None:
            return None, None, False
        return token("score", score), threshold, selection.strict
    require_type(isinstance(window, EntropyWindow), "window: expected one of hpo_core.entropy, got {!r}", window)
    check(entropy is not None, "entropy: a window needs the entropies [T]; pass entropy=")
    assert entropy is not None
    if score is None:
        score = window.score(entropy, batch, backend=backend).flatten()
    if threshold is None:
        check(
            window.scope == "call",
            "threshold: the window {!r} selects over the whole batch; pass threshold=window.fit(entropy, batch), "
            "fitted on the optimiser step, or build the window with scope='call'",
            window.name,
        )
        threshold = window.fit_score(score, backend=backend)
    if isinstance(threshold, WindowState):
        check_state(window, threshold, score, backend)
        threshold = examined("threshold", threshold.threshold, _AS_FITTED)
        score = rounded_as(score, threshold).to(score.dtype)
    return score, threshold, window.strict


def _mask_and_weight(
    token_mask: torch.Tensor | None,
    token_weight: torch.Tensor | None,
    gate_mask: torch.Tensor | None,
    gate_weight: torch.Tensor | None,
    selection: Selection | None,
    token: Callable[..., torch.Tensor],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The mask and the weight of the policy term of tokens: the caller's, the gate's and the selection's together."""
    if token_mask is not None:
        token_mask = token("token_mask", token_mask, torch.bool)
    if gate_mask is not None:
        gate_mask = token("token_mask", gate_mask, torch.bool)
        token_mask = gate_mask if token_mask is None else token_mask & gate_mask
    if token_weight is not None:
        token_weight = token("token_weight", token_weight)
    if gate_weight is not None:
        gate_weight = token("token_weight", gate_weight)
        token_weight = gate_weight if token_weight is None else token_weight * gate_weight
    if selection is not None:
        return selected_tokens(selection, token_mask, token_weight, token)
    return token_mask, token_weight


def _with_rare_inputs(
    inputs: PolicyLossInputs,
    gate: RatioGate,
    target: torch.Tensor | None,
    penalty_mask: torch.Tensor | None,
    batch: PackedBatch,
    advantage_level: str | None,
    target_per_token: bool,
    token: Callable[..., torch.Tensor],
) -> PolicyLossInputs:
    """The inputs with the target, the mask of the penalty, and advantages weighted by their sign."""
    logp = inputs.logp
    if target is not None:
        _, target = batch.of_level("target", target, advantage_level, logp.shape)
        target = as_constant("target", target, None, "", logp.dtype, logp.device)
        inputs = inputs._replace(target=target, target_per_token=target_per_token)
    if penalty_mask is not None:
        inputs = inputs._replace(penalty_mask=token("penalty_mask", penalty_mask, torch.bool))
    if gate.advantage_weights != (1.0, 1.0):
        positive, negative = (float(each) for each in gate.advantage_weights)  # no tensor is multiplied by a fraction
        signed = inputs.advantages
        if positive == negative:
            weighted = signed * positive
        elif positive == 1.0:  # one pass, too: four over advantages of tokens take longer than the loss
            weighted = torch.nn.functional.leaky_relu(signed, negative)
        else:
            weighted = torch.where(signed < 0, signed * negative, signed * positive)
        inputs = inputs._replace(advantages=weighted)
    return inputs
