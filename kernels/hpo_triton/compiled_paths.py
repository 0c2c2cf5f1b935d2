"""The calls that compilation goes through: the light and the heavy end of every sweep, and every structure."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..specs import (
    INDEX_RULES,
    MOST_TERMS,
    Action,
    Aggregate,
    Boundary,
    Center,
    CorrectionSpec,
    Denominator,
    EpsMode,
    GroupInputs,
    GroupNormalisation,
    GroupTerm,
    Head,
    Invalid,
    KLEstimator,
    KLGradient,
    LevelKind,
    LevelSpec,
    LogitRows,
    OrderRule,
    Part,
    Penalty,
    PolicyLossInputs,
    PolicyLossSpec,
    Presence,
    Reduction,
    Routing,
    Scale,
    Scopes,
    Share,
    Statistic,
    TermSpec,
    TokenDraw,
    TokenGate,
    Unit,
    WindowAggregate,
)
from . import (
    advantages,
    corrections,
    covariance,
    entropy,
    gates,
    groups,
    logprobs,
    loss_from_logits,
    scale,
    scopes,
    segments,
)

TOKENS, ROWS = 2048, 4


def _floats(count: int) -> torch.Tensor:
    return torch.ones(count, dtype=torch.float32, device="cpu")


def _bools(count: int) -> torch.Tensor:
    return torch.ones(count, dtype=torch.bool, device="cpu")


def _integers(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int64, device="cpu")


def _inputs(**fields: Any) -> PolicyLossInputs:
    offsets = torch.linspace(0, TOKENS, ROWS + 1, dtype=torch.float64, device="cpu").long()
    required = PolicyLossInputs(_floats(TOKENS), _floats(TOKENS), _floats(ROWS), _floats(ROWS), offsets)
    return required._replace(**fields)


def _masked() -> PolicyLossInputs:
    """The inputs that most trainers pass."""
    return _inputs(mask=_bools(TOKENS))


def _unaligned() -> PolicyLossInputs:
    return _masked()._replace(logp=_floats(TOKENS + 1)[1:])


def _everything(advantage_per_token: bool) -> PolicyLossInputs:
    bools, floats = _bools(TOKENS), _floats(TOKENS)
    return _inputs(
        advantages=_floats(TOKENS if advantage_per_token else ROWS), mask=bools, ref_logp=floats, entropy=floats,
        score=floats, threshold=_floats(1), token_mask=bools, token_weight=floats, low=floats, high=floats,
        kl_weight=floats, advantage_per_token=advantage_per_token,
    )  # fmt: skip


# The published hierarchies, a step level alone and one below a trajectory level; and the one with the most levels.
SEQUENCE = (LevelSpec(Unit.TRAJECTORY, LevelKind.CLIP),)
SEQUENCE_SELF = (LevelSpec(Unit.TRAJECTORY, LevelKind.CLIP, Routing.SELF),)
ONE = (LevelSpec(Unit.STEP, LevelKind.CLIP),)
TWO = (
    LevelSpec(Unit.STEP, LevelKind.CLIP, Routing.SELF),
    LevelSpec(Unit.TRAJECTORY, LevelKind.ROLLBACK, slope=-math.inf),
)
FOUR = (
    LevelSpec(Unit.STEP, LevelKind.TANH, high=(0.1,) * 4), LevelSpec(Unit.TRAJECTORY, LevelKind.ROLLBACK),
    LevelSpec(Unit.GROUP, LevelKind.TANH, high=(0.1,) * 4, aggregate=Aggregate.SUM),
    LevelSpec(Unit.DOMAIN, LevelKind.ROLLBACK),
)  # fmt: skip
MEAN_EXP = tuple(level._replace(aggregate=Aggregate.LOG_MEAN_EXP) for level in TWO)
BALANCED = (FOUR[0], *(level._replace(aggregate=Aggregate.BALANCED) for level in FOUR[1:]))
EXCESS = (LevelSpec(Unit.TRAJECTORY, LevelKind.EXCESS, aggregate=Aggregate.SUM, high=(0.1,) * 4),)
BATCH = GroupTerm(Center.LEAVE_ONE_OUT, Scale.BATCH, eps_mode=EpsMode.SQRT, presence=Presence.NONZERO)
DEVIATED = GroupTerm(Center.LEAVE_ONE_OUT, Scale.ABSOLUTE, eps_mode=EpsMode.ADD_SHARE, presence=Presence.SPREAD)
ALL_TERMS = (BATCH, DEVIATED) * (MOST_TERMS // 2)
MANY = groups.SCANNED + 1
# A term with every number that specialises a kernel.
FULL_TERM = TermSpec(
    head_numbers=(1.0, 1.0), slope_low=(0.5, 0.5), weight_high=(0.5, 0.5), pre_high=(0.1, 0.1), penalty=Penalty.K3,
    penalty_coefficient=0.1,
)  # fmt: skip
HEAVIEST_PENALTY = {"kl": KLEstimator.K3, "kl_gradient": KLGradient.IMPORTANCE, "kl_beta": 0.1}
NamedCall = tuple[str, Callable[[], object]]


def _gate(name: str, inputs: PolicyLossInputs, spec: PolicyLossSpec) -> NamedCall:
    return name, lambda: gates.policy_loss(inputs, spec, want_grad=True, want_tokens=inputs.entropy is not None)


def _leaves(inputs: PolicyLossInputs, levels: tuple[LevelSpec, ...]) -> PolicyLossInputs:
    begin, end = inputs.cu_seqlens[:-1].contiguous(), inputs.cu_seqlens[1:].contiguous()
    rows = _integers(ROWS)
    return inputs._replace(leaf_begin=begin, leaf_end=end, leaf_row=rows, ancestors=rows.repeat(len(levels), 1))


def _levels(name: str, inputs: PolicyLossInputs, levels: tuple[LevelSpec, ...], **spec: Any) -> NamedCall:
    return _gate(name, _leaves(inputs, levels), PolicyLossSpec(levels=levels, **spec))


def _light_term(head: Head) -> NamedCall:
    target = _floats(ROWS) if head in (Head.TARGET, Head.NEGATIVE_AWARE) else None
    term, levels = TermSpec(head_numbers=(1.0, 1.0)), EXCESS if head is Head.CENSORED else ()
    token = TokenGate.DROP if levels else TokenGate.CLIP
    return _levels(f"term: {head.name}", _masked()._replace(target=target), levels, token=token, term=term, head=head)


def _heavy_term(head: Head) -> NamedCall:
    floats, bools = _floats(TOKENS), _bools(TOKENS)
    inputs = _masked()._replace(token_weight=floats, target=floats, target_per_token=True, penalty_mask=bools)
    return _levels(f"term: {head.name}, two levels, everything", inputs, TWO, term=FULL_TERM, head=head)


def _correction(
    statistic: Statistic, reduction: Reduction, action: Action, of_segments: bool, in_loss: bool = False
) -> NamedCall:
    spec = CorrectionSpec(statistic, reduction, action, of_segments, False, (-0.1, -0.1), (0.1, 0.1))
    inputs = _leaves(_masked(), TWO[: int(of_segments)])._replace(token_weight=_floats(TOKENS))
    name = f"correction: {statistic.name} {reduction.name if of_segments else 'TOKEN'} {action.name}"
    if in_loss:  # the log-ratios of the loss decide which tokens count
        inputs = inputs._replace(correction_second=_floats(TOKENS), ref_logp=_floats(TOKENS))
        name = f"{name}, in a loss"
    return name, lambda: corrections.correction(inputs, spec)


def _corrected(name: str, inputs: PolicyLossInputs, statistic: Statistic, action: Action) -> NamedCall:
    """A correction of tokens that the sweep makes itself."""
    rule = CorrectionSpec(statistic, Reduction.MEAN, action, False, False, (-0.1, -0.1), (0.1, 0.1))
    levels = () if inputs.leaf_begin is None else TWO
    spec = PolicyLossSpec(levels=levels, correction=rule)
    return _gate(name, inputs._replace(correction_second=_floats(TOKENS)), spec)


def paths() -> Iterator[NamedCall]:
    """A name and a call for each path through the kernels: the light and the heavy end of every sweep."""
    yield _gate("gate: clip", _masked(), PolicyLossSpec())
    yield _gate("gate: clip, unaligned", _unaligned(), PolicyLossSpec())
    yield _gate("gate: clip, all inputs", _everything(False), PolicyLossSpec(**HEAVIEST_PENALTY))
    yield _gate("gate: score, no ratio", _inputs(old_logp=None), PolicyLossSpec(token=TokenGate.DROP, head=Head.SCORE))
    yield _levels("hierarchy: sequence", _masked(), SEQUENCE, token=TokenGate.DROP)
    all_inputs = _everything(True)
    yield _levels("hierarchy: sequence, all inputs", all_inputs, SEQUENCE, token=TokenGate.DROP, **HEAVIEST_PENALTY)
    yield _levels("hierarchy: sequence, self", _masked(), SEQUENCE_SELF, token=TokenGate.DROP)
    yield _levels("hierarchy: one level", _masked(), ONE)
    yield _levels("hierarchy: two levels", _masked(), TWO)
    yield _corrected("gate: clip, corrected", _masked(), Statistic.LOG_RATIO, Action.BAND)
    yield _corrected("hierarchy: two levels, corrected", _leaves(_masked(), TWO), Statistic.BINARY_KL, Action.MASK)
    yield _levels("hierarchy: score", _masked(), TWO, head=Head.SCORE, split=True)
    yield _levels("hierarchy: four levels, all inputs", _everything(True), FOUR, split=True, **HEAVIEST_PENALTY)
    for head in Head:
        yield _light_term(head)
    yield _levels("term: log mean exp", _masked(), MEAN_EXP, term=TermSpec())
    yield _levels("hierarchy: balanced", _masked(), BALANCED, split=True)
    yield _heavy_term(Head.MIRROR)
    yield _heavy_term(Head.NEGATIVE_AWARE)
    yield _correction(Statistic.LOG_RATIO, Reduction.MEAN, Action.CLAMP, True)
    yield _correction(Statistic.K3, Reduction.SUM, Action.MASK, True)
    yield _correction(Statistic.PROBABILITY, Reduction.MIN, Action.MASK, True)
    yield _correction(Statistic.BINARY_KL, Reduction.MAX, Action.MASK, True)
    yield _correction(Statistic.K2, Reduction.MEAN, Action.MASK, False)
    yield _correction(Statistic.LOG_RATIO, Reduction.MEAN, Action.BAND, False)
    yield _correction(Statistic.LOG_RATIO, Reduction.MEAN, Action.MASK, True, in_loss=True)
    yield "row_counts", lambda: segments.row_counts(_masked().mask, _masked().cu_seqlens, TOKENS)
    counted = (_masked().mask, _masked().cu_seqlens, TOKENS)
    yield "row_weights", lambda: segments.row_weights(*counted, Denominator.ROWS_AND_TOKENS, 1.0)
    yield "row_spans", lambda: segments.row_spans(_masked().mask, _masked().cu_seqlens, TOKENS)
    yield "window_score", lambda: _window(Boundary.FULL, Invalid.SKIP, masked=True)
    yield "window_score, maximum", lambda: _window(Boundary.CARRY, Invalid.SKIP, True, WindowAggregate.MAX)
    yield "window_score, wide", lambda: _window(Boundary.SHRINK, Invalid.SKIP, True, WindowAggregate.MEAN, last=256)
    yield "order_statistic", lambda: entropy.order_statistic(_floats(TOKENS), 4, 5, OrderRule.NEAREST)
    yield "select_top", lambda: entropy.select_top(_floats(TOKENS), 4, 5, OrderRule.CEIL, False)
    yield "order_statistics", lambda: _scopes(exact=False)
    yield "select_exact", lambda: _scopes(exact=True)
    yield "order_statistics, one scope", lambda: _scopes(exact=False, number=1)
    yield "select_exact, one scope", lambda: _scopes(exact=True, number=1)
    yield "select", lambda: _select(strict=False, tokens=True)
    yield "covariance", lambda: _covariance(draws=False)
    yield "covariance, draw", lambda: _covariance(draws=True)
    yield "group_normalise", lambda: _groups(ROWS, (GroupTerm(),))
    yield "group_normalise, batch", lambda: _groups(ROWS, (BATCH,), masked=True)
    yield "group_normalise, all terms", lambda: _groups(ROWS, ALL_TERMS, Share.DEVIATION, masked=True, weighted=True)
    yield "group_normalise, many units", lambda: _groups(MANY, (BATCH,), masked=True)
    yield (
        "group_normalise, many units, terms",
        lambda: _groups(MANY, (BATCH, DEVIATED), Share.DEVIATION, masked=True, weighted=True),
    )
    yield "group_normalise, one group of many", lambda: _groups(MANY, (DEVIATED,), masked=True, grouped=False)
    for units, grouped in ((ROWS, True), (MANY, True), (MANY, False)):
        name = f"group_statistics, {units} units{'' if grouped else ', one group'}"
        yield name, lambda a=(units, grouped): _statistics(*a)
    yield (
        "recurrence",
        lambda: segments.recurrence(_floats(TOKENS).double(), _floats(TOKENS).double(), _masked().cu_seqlens),
    )
    yield "scale", lambda: scale.scale(_floats(TOKENS), _floats(1))
    yield "logprobs", lambda: _logprobs(torch.bfloat16, kept=3)
    yield "logprobs, all inputs", lambda: _logprobs(torch.float32, kept=4, every_input=True)
    yield "loss_from_logits", lambda: _from_logits(torch.bfloat16, _masked(), PolicyLossSpec())
    everything, importance = _everything(False), PolicyLossSpec(**HEAVIEST_PENALTY)
    yield "loss_from_logits, all inputs", lambda: _from_logits(torch.float32, everything, importance)
    for head in (Head.LINEAR, Head.NEGATIVE_AWARE):
        term = PolicyLossSpec(term=FULL_TERM, head=head, **HEAVIEST_PENALTY)
        yield f"loss_from_logits, term: {head.name}", lambda term=term: _from_logits(torch.bfloat16, everything, term)


def every_path() -> Iterator[NamedCall]:
    """Every structure a gate, a window, an index rule and a normalisation can have, with few and with all inputs."""
    shapes = [PolicyLossSpec(token=TokenGate.CLIP), PolicyLossSpec(token=TokenGate.DROP)]
    penalties = [{"kl": k, "kl_gradient": g} for k in KLEstimator if k for g in KLGradient]
    for shape, head in itertools.product(shapes, (Head.LINEAR, Head.SCORE)):
        spec = shape._replace(head=head)
        name = f"gate: {spec.token.name} {head.name}"
        yield _gate(name, _masked(), spec)
        yield _gate(f"{name}, on-policy", _inputs(old_logp=None), spec)
        yield _gate(f"{name}, unaligned", _unaligned(), spec)
        for per_token in (False, True):
            yield _gate(f"{name}, all inputs {per_token}", _everything(per_token), spec._replace(strict=per_token))
        for penalty in penalties:
            yield _gate(f"{name}, {penalty}", _everything(False), spec._replace(**penalty))
    for structure in itertools.product(Boundary, Invalid, (False, True), WindowAggregate):
        yield "window {} {} {} {}".format(*structure), lambda structure=structure: _window(*structure)
        yield "wide window {} {} {} {}".format(*structure), lambda structure=structure: _window(*structure, last=256)
    for structure in itertools.product((False, True), INDEX_RULES, (False, True), (False, True)):
        yield "scopes {} {} {} {}".format(*structure), lambda structure=structure: _scopes(*structure)
        yield "only scope {} {} {} {}".format(*structure), lambda structure=structure: _scopes(*structure, number=1)
    for rule in INDEX_RULES:
        for strict in (False, True):
            yield f"order {rule.name} {strict}", lambda a=(rule, strict): entropy.select_top(_floats(TOKENS), 4, 5, *a)
    for strict, tokens in itertools.product((False, True), repeat=2):
        yield f"select {strict} {tokens}", lambda a=(strict, tokens): _select(*a)
    yield "covariance, unaligned", lambda: _covariance(draws=True, aligned=False)
    yield "covariance, advantages of tokens", lambda: _covariance(draws=True, of_tokens=True)
    yield "row_counts", lambda: segments.row_counts(None, _masked().cu_seqlens, TOKENS)
    for denominator in Denominator:
        counted = (None, _masked().cu_seqlens, TOKENS, denominator, 1.0)
        yield f"row_weights {denominator.name}", lambda counted=counted: segments.row_weights(*counted)
    rules = itertools.product(Center, Scale, EpsMode)
    terms = [GroupTerm(center, scale, eps_mode=mode) for center, scale, mode in rules] + [GroupTerm(part=Part.MEAN)]
    for term, masked, units, grouped in itertools.product(terms, (False, True), (ROWS, MANY), (False, True)):
        name = f"groups {term} {masked} {units} {grouped}"
        yield name, lambda a=(units, (term,), Share.SUM, masked, grouped): _groups(*a)
    for term, units, grouped in itertools.product(terms, (ROWS, MANY), (False, True)):
        shared = (dataclasses.replace(term, presence=Presence.SPREAD),) * 3
        name = f"groups {term} {units} {grouped}, three times"
        yield name, lambda a=(units, shared, Share.DEVIATION, True, grouped, True): _groups(*a)
    types = (torch.float32, torch.bfloat16, torch.float16)
    for dtype in types:
        yield f"scale {dtype}", lambda dtype=dtype: scale.scale(_floats(TOKENS).to(dtype), _floats(1))
    for structure in itertools.product(types, (2, 3, 4), (False, True), (False, True)):
        yield "logprobs {} {} {} {}".format(*structure), lambda structure=structure: _logprobs(*structure)
    yield from paths()


def _window(
    boundary: Boundary, invalid: Invalid, masked: bool, aggregate: WindowAggregate = WindowAggregate.MEAN, last: int = 3
) -> torch.Tensor:
    batch = _masked()
    window = (0, last, boundary, invalid, aggregate)
    return entropy.window_score(batch.logp, batch.mask if masked else None, batch.cu_seqlens, *window)


def _scopes(
    exact: bool, rule: OrderRule = OrderRule.NEAREST, one_per_row: bool = False, masked: bool = True, number: int = 0
) -> None:
    batch, scopes_of_rows = _masked(), (None, None)
    lists = (_integers(ROWS), _integers((number or ROWS) + 1))
    listed = Scopes(batch.cu_seqlens, *(scopes_of_rows if one_per_row else lists))
    mask = batch.mask if masked else None
    if exact:
        scopes.select_exact(batch.logp, listed, _integers(listed.number), mask)
    else:
        scopes.order_statistics(batch.logp, listed, 4, 5, rule, mask)


def _select(strict: bool, tokens: bool) -> torch.Tensor:
    batch = _masked()
    packed = (batch.mask, batch.cu_seqlens) if tokens else (None, None)
    return entropy.select(batch.logp, _floats(1), strict, *packed)


def _covariance(draws: bool, aligned: bool = True, of_tokens: bool = False) -> None:
    logp = _floats(TOKENS) if aligned else _floats(TOKENS + 1)[1:]
    draw = TokenDraw(logp if draws else None, (-1.0, 1.0, -1.0, 1.0))
    advantages, offsets = (_floats(TOKENS), None) if of_tokens else (_floats(ROWS), _masked().cu_seqlens)
    covariance.covariance(logp, advantages, offsets, _bools(TOKENS), draw)


def _groups(
    units: int,
    terms: tuple[GroupTerm, ...],
    share: Share = Share.SUM,
    masked: bool = False,
    grouped: bool = True,
    weighted: bool = False,
) -> torch.Tensor:
    bools = _bools(units) if masked else None
    ids, weights = _integers(units) if grouped else None, _floats(units) if weighted else None
    count = len(terms)
    inputs = GroupInputs((_floats(units),) * count, (ids,) * count, (weights,) * count, bools, bools)
    return advantages.group_normalise(inputs, GroupNormalisation(terms, share))


def _statistics(units: int, grouped: bool) -> torch.Tensor:
    ids = _integers(units) if grouped else None
    return segments.group_statistics(_floats(units), ids, _floats(units), _bools(units))


def _logprobs(dtype: torch.dtype, kept: int, every_input: bool = False, aligned: bool = True) -> None:
    vocabulary = TOKENS if aligned else TOKENS + 1
    logits = torch.ones((ROWS, vocabulary), dtype=dtype, device="cpu")
    each, floors = (_floats(ROWS), _floats(ROWS)) if every_input else (None, None)
    rows = LogitRows(logits, _integers(ROWS), each, 1.0, -100, floors, 0, vocabulary)
    statistics = logprobs.token_logprobs(rows, kept)[2]
    gradients = (_floats(ROWS), _floats(ROWS) if kept > 2 else None)
    logprobs.token_logprobs_backward(rows, statistics, *gradients, into=None)


def _from_logits(dtype: torch.dtype, inputs: PolicyLossInputs, spec: PolicyLossSpec) -> None:
    logits = torch.empty((TOKENS, TOKENS), dtype=dtype, device="cpu")
    rows = LogitRows(logits, _integers(TOKENS), None, 1.0, -100, None, 0, TOKENS)
    if spec.term is not None:
        floats = _floats(TOKENS)
        inputs = _leaves(inputs, ())._replace(target=floats, target_per_token=True, penalty_mask=_bools(TOKENS))
    loss_from_logits.loss_from_logits(rows, inputs, spec, torch.empty_like(logits))
