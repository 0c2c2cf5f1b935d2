"""The outputs that an example should have by the float64 reference, with the error budget of a float32 kernel."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from .. import advantages
from ..batch import PackedBatch
from ..checks import REFERENCE
from ..entropy import window_mean
from ..kl import KLPenalty
from ..losses import PolicyLoss, policy_loss
from ..metrics import SLOTS, Metrics
from ..prepared import prepare
from ..reference import gates as formulas
from ..reference.hierarchy import Channel, combined
from ..reference.segments import flat
from ..reference.terms import MOST, SATURATION, deviation_of, factor_beyond
from ..specs import Head, KLEstimator, KLGradient, LevelKind, Penalty, PolicyLossSpec, Routing
from .budget import Expected
from .examples import PolicyLossExample, RewardsExample, move
from .examples_of_entropy import WindowExample
from .promises import Inapplicable


class Outcome(NamedTuple):
    """The outputs of a policy-loss kernel for an example."""

    loss: torch.Tensor  # 0-dim
    grad: torch.Tensor | None  # [T]; None: the kernel computes none
    tokens: torch.Tensor | None  # [T], loss_t
    metrics: Metrics | None


def accepts(fn: Callable[..., Any], name: str) -> bool:
    """Whether ``fn`` takes a keyword of this name: an adapter's signature says which optional inputs it serves."""
    return name in accepted(fn, (name,))


def accepted(fn: Callable[..., Any], names: Iterable[str]) -> tuple[str, ...]:
    """The names that ``fn`` takes as keywords."""
    parameters = inspect.signature(fn).parameters
    every = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return tuple(name for name in names if every or name in parameters)


def keywords_of(fn: Callable[..., Any], example: PolicyLossExample) -> dict[str, Any]:
    """The optional inputs of an example that ``fn`` takes."""
    given = {**example.keywords, "gate": example.gate}
    return {name: given[name] for name in accepted(fn, given)}


def run_policy_loss(
    fn: Callable[..., Any], example: PolicyLossExample, *, gradient: bool = True, **keywords: Any
) -> Outcome:
    """Call ``fn`` like ``policy_loss`` or ``policy_loss_and_grad``, and differentiate a loss without its gradient.

    ``gradient``: False for a kernel that computes the loss alone.
    """
    return run_with_incoming(fn, example, gradient=gradient, **keywords)


def run_with_incoming(
    fn: Callable[..., Any],
    example: PolicyLossExample,
    incoming: torch.Tensor | None = None,
    *,
    gradient: bool,
    **keywords: Any,
) -> Outcome:
    """:func:`run_policy_loss`, where ``incoming`` arrives at the loss in the backward; default 1."""
    leaf = example.logp.detach().requires_grad_(gradient)
    keywords = keywords_of(fn, example) | keywords
    out = fn(leaf, example.old_logp, example.advantages, example.batch, **keywords)
    return outcome_of(out, leaf, incoming, gradient)


def outcome_of(out: Any, leaf: torch.Tensor, incoming: torch.Tensor | None = None, gradient: bool = True) -> Outcome:
    """The outputs of a kernel; the loss is differentiated by ``leaf`` if they hold no gradient."""
    loss = out if isinstance(out, torch.Tensor) else getattr(out, "loss", None)
    found = f"a loss of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(out).__name__}"
    assert isinstance(loss, torch.Tensor) and loss.ndim == 0, (
        "expected the loss as a tensor of shape [], an object with .loss, or one with .loss and .grad; the kernel "
        f"returned {found}"
    )
    tokens, metrics = getattr(out, "tokens", None), getattr(out, "metrics", None)
    tokens = tokens if tokens is None else _of_tokens("tokens", tokens, leaf)
    if not gradient:
        return Outcome(loss.detach(), None, tokens, metrics)
    if not isinstance(out, torch.Tensor) and hasattr(out, "grad"):
        if incoming is not None:
            raise Inapplicable("the kernel returns its gradient itself")
        return Outcome(loss.detach(), _of_tokens("grad", out.grad, leaf), None, metrics)
    assert loss.requires_grad, "the loss is not connected to logp; gradient=False judges a loss without a gradient"
    return Outcome(loss.detach(), differentiate(loss, leaf, incoming), tokens, metrics)


def _of_tokens(name: str, part: Any, leaf: torch.Tensor) -> torch.Tensor:
    """A part of an outcome in the shape of ``logp``, which may be padded beside a packed one."""
    found = f"one of shape {list(part.shape)}" if isinstance(part, torch.Tensor) else f"a {type(part).__name__}"
    assert isinstance(part, torch.Tensor) and part.numel() == leaf.numel(), (
        f"expected .{name} of shape {list(leaf.shape)}, that of logp; the kernel returned {found}"
    )
    return part.reshape(leaf.shape)


def differentiate(out: torch.Tensor, leaf: torch.Tensor, incoming: torch.Tensor | None) -> torch.Tensor:
    """The gradient of ``leaf``. A backward that writes to ``incoming`` changes other nodes' gradients."""
    arriving = out.new_ones(()).expand_as(out) if incoming is None else incoming
    before = None if incoming is None else incoming.clone()
    (grad,) = torch.autograd.grad(out, leaf, arriving)
    assert before is None or torch.equal(arriving, before), "the backward wrote to the gradient that arrived"
    return grad


def expect_policy_loss(example: PolicyLossExample) -> dict[str, Expected]:
    """The expected ``loss``, ``grad``, ``tokens`` (loss_t) and ``metrics`` (the vector)."""
    example = move(example.with_scores_of_threshold(), "cpu")
    example = example.given(weights=example.weights())
    exact, eager = _reference(example, torch.float64), _reference(example, torch.float32)
    magnitudes = _magnitudes(example, exact)
    assert exact.metrics is not None and eager.metrics is not None
    assert exact.tokens is not None and eager.tokens is not None
    return {
        "loss": Expected(exact.loss, eager.loss.double(), magnitudes["loss"]),
        "grad": Expected(_grad(exact), _grad(eager).double(), magnitudes["grad"]),
        "tokens": Expected(exact.tokens, eager.tokens.double(), magnitudes["tokens"]),
        "metrics": Expected(exact.metrics.vector, eager.metrics.vector, magnitudes["metrics"]),
    }


def exact_gradient(example: PolicyLossExample) -> torch.Tensor:
    """The gradient of the float64 reference, without a budget."""
    return _grad(_reference(move(example.with_scores_of_threshold(), "cpu"), torch.float64))


def _grad(outcome: Outcome) -> torch.Tensor:
    assert outcome.grad is not None
    return outcome.grad


def _reference(example: PolicyLossExample, dtype: torch.dtype) -> Outcome:
    entropy = {name: value.to(dtype) for name, value in example.keywords.items() if name == "entropy"}
    example = example._replace(logp=example.logp.to(dtype)).given(**entropy)
    formula = policy_loss if dtype is torch.float64 else _eager_loss
    return run_policy_loss(formula, example, report=("tokens",), backend=REFERENCE)


def _eager_loss(
    logp: torch.Tensor, old_logp: torch.Tensor | None, advantages: torch.Tensor, batch: PackedBatch, **options: Any
) -> PolicyLoss:
    """The formulas of the definition in the dtype of ``logp``."""
    inputs, spec, exchange, *_ = prepare(logp, old_logp, advantages, batch, options.pop("gate", None), **options)
    loss, vector, tokens = formulas.policy_loss(inputs, spec, exchange)
    return PolicyLoss(loss, Metrics(vector), tokens, None, ())


# Heads that pull the ratio back to 1, each with the head that remains without the pull, where its number is 0.
_WITHOUT_PULL = {Head.SIMPLE: Head.LINEAR, Head.MIRROR: Head.LINEAR, Head.LOG: Head.LOG}


def _policy_magnitudes(example: PolicyLossExample) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of absolute values of the terms of the policy term and of the gate's own penalty: loss_t and gradient."""
    logp = example.logp.double().requires_grad_()
    keywords = {name: value for name, value in example.keywords.items() if name not in ("report", "backend")}
    keywords |= {name: value.double() for name, value in keywords.items() if name == "entropy"}
    inputs, spec, exchange, *_ = prepare(
        logp, example.old_logp, example.advantages, example.batch, example.gate, backend=REFERENCE, **keywords
    )
    inputs = flat(inputs)
    tokens = formulas.read_tokens(inputs, spec)
    channels = formulas.gate_tokens(tokens, inputs, spec, exchange)
    z, below, above = combined(channels)
    most = MOST.get(spec.head, SATURATION)
    z = z.detach().clamp(-most, most).requires_grad_()
    plain = spec
    if spec.head in _WITHOUT_PULL:
        assert spec.term is not None
        plain = spec._replace(head=_WITHOUT_PULL[spec.head], term=spec.term._replace(head_numbers=(0.0, 0.0)))
    weighted, loss_t = formulas.policy_terms(tokens, plain, z, below, above)
    by_z, direct = (each.abs() for each in _derivatives(weighted, z, inputs.logp))
    value = loss_t.abs()
    if spec.term is not None:
        size = sum(level.value.detach().abs() for _, levels in channels for level in levels)
        assert isinstance(size, torch.Tensor)
        factor = factor_beyond(below, above, tokens.negative, spec.term, logp)
        kept = torch.where(tokens.selected, tokens.token_weight * factor, 0.0).abs().detach()
        value, slope = _value_and_pull(tokens, spec, z.detach(), size.clamp(max=most), kept, value)
        by_z = by_z + tokens.weight.abs() * slope
    grad = direct + _through_gates(channels, spec, by_z, inputs.logp)
    if spec.term is not None and spec.term.penalty is not Penalty.NONE:
        pays = tokens.valid if inputs.penalty_mask is None else tokens.valid & inputs.penalty_mask
        own = _own_penalty_terms(spec.term.penalty, tokens.x.detach())
        paid, slope = (torch.where(pays, abs(spec.term.penalty_coefficient) * term, 0.0) for term in own)
        value, grad = value + paid, grad + tokens.weight.abs() * slope
    return value.reshape(example.logp.shape), grad.reshape(example.logp.shape)


def _value_and_pull(
    tokens: formulas.Tokens,
    spec: PolicyLossSpec,
    z: torch.Tensor,
    size: torch.Tensor,
    kept: torch.Tensor,
    value: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The terms of the objective of a token, of which ``value`` are those without a pull, and those of the pull's
    derivative by z. ``size``: the sum of the absolute gated residuals, which may cancel in z."""
    assert spec.term is not None
    number, scale = z.new_tensor(spec.term.head_numbers)[tokens.negative], kept * tokens.advantage.abs().nan_to_num(0.0)
    ratio, none = torch.exp(z), torch.zeros_like(z)
    if spec.head is Head.MIRROR:  # p (z r - r + 1)
        pull = kept * number
        return value + pull * (size * ratio + ratio + 1), pull * size * ratio
    if spec.head is Head.LOG:  # p z^2 / 2
        pull = kept * number
        return value + pull * size.square() / 2, pull * size
    if spec.head is Head.SIMPLE:  # |A| (r - 1)^2 / (2 p)
        pull = scale / number
        return value + pull / 2 * (ratio - 1).abs() * (ratio + 1), pull * ratio * (ratio + 1)
    if spec.head is Head.TARGET:  # |A| |r - target|
        return torch.where(tokens.selected, scale * (ratio + tokens.target.abs()), 0.0), none
    if spec.head is Head.CENSORED:  # A (1 + d +- z)
        deviation = deviation_of(tokens.x.detach()).abs()
        left = torch.where(deviation + z >= 0, deviation + z.abs(), 0.0)
        return scale * (1 + left), none
    return value, none


def _through_gates(
    channels: tuple[Channel, ...], spec: PolicyLossSpec, by_z: torch.Tensor, logp: torch.Tensor
) -> torch.Tensor:
    """The terms of the gradient that arrive through z, of which ``by_z`` are the absolute derivatives. The residual of
    each level is a term of z, and each of the two aggregates that it is a difference of has a path of its own to the
    tokens: a sum over its segment where it carries gradient."""
    total = torch.zeros_like(by_z)
    # The token itself and an aggregate that is routed SELF have the same path, so their difference has none.
    own = [True, *(level.routing is Routing.SELF for level in spec.levels), False]
    for _, levels in channels:
        aggregates = [level.aggregate for level in levels] + [torch.zeros_like(by_z)]
        for k, level in enumerate(levels):
            if own[k] and own[k + 1]:
                continue
            (slope,) = _derivatives(level.value, level.residual)
            if k > 0 and spec.levels[k - 1].gate is LevelKind.TANH:  # 1 - tanh^2
                slope = 2 - slope
            for aggregate in aggregates[k : k + 2]:
                if aggregate.requires_grad:
                    (arrived,) = torch.autograd.grad(aggregate, logp, by_z * slope.abs(), retain_graph=True)
                    total = total + arrived.abs()
    return total


def _derivatives(out: torch.Tensor, *by: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The derivatives of the sum of ``out``, 0 where it does not depend on one."""
    if not out.requires_grad or not all(each.requires_grad for each in by):
        return tuple(torch.zeros_like(each) for each in by)
    return torch.autograd.grad(out.sum(), by, retain_graph=True, allow_unused=True, materialize_grads=True)


def _own_penalty_terms(penalty: Penalty, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Absolute values of the terms of the gate's own penalty and of its derivative."""
    one, size, e = torch.ones_like(x), x.abs(), torch.exp(x)
    return {
        Penalty.K1: (size, one),
        Penalty.K2: (x.square() / 2, size),
        Penalty.K3: (e + 1 + size, e + 1),
        Penalty.ABSOLUTE: (size, one),
    }[penalty]


def _magnitudes(example: PolicyLossExample, exact: Outcome) -> dict[str, torch.Tensor]:
    """Sums of absolute values of the terms that make the outputs. The terms of the gradient or of loss_t at a token are
    those of the policy term, of the gate's own penalty and of the penalty ``kl``."""
    valid, x = example.valid(), example.log_ratio()
    x = torch.where(torch.isfinite(x), x, 0.0).clamp(-60, 60)
    penalty = example.keywords.get("kl")
    tokens, grad = _policy_magnitudes(example)

    weights = example.spread(example.weights().double())
    weights = torch.where(valid & torch.isfinite(weights), weights, 0.0).abs()
    saturated = x.clamp(-40, 40)
    r, rounding = torch.exp(saturated), _rounding(saturated)
    terms = {
        "log_ratio_sum": x.abs(),
        "log_ratio_square": x.square(),
        "ratio_deviation": r + 1 + r * rounding,
        "ratio_deviation_square": (r - 1).abs() * (r + 1 + 2 * r * rounding),
    }
    if penalty is not None:
        s = example.logp.double() - example.keywords["ref_logp"].double()
        s = torch.where(valid & torch.isfinite(s), s, 0.0).clamp(-60, 60)
        coefficient = torch.ones_like(s) if example.kl_weight is None else example.kl_weight.double()
        pays, factor = valid & torch.isfinite(coefficient), abs(penalty.beta) * coefficient.abs()
        value, slope = (torch.where(pays, factor * term, 0.0) for term in _penalty_terms(penalty, s, x))
        tokens, grad = tokens + value, grad + weights * slope
        terms["reference_log_ratio"], terms["reference_log_ratio_square"] = s.abs(), s.square()
        terms["reference_k3"], terms["penalty"] = torch.exp(-s) * (1 + _rounding(s)) + 1 + s.abs(), weights * value
    if "entropy" in example.keywords:
        terms["entropy"] = example.keywords["entropy"].double().nan_to_num(0.0, 0.0, 0.0).abs()
    terms["loss"] = weights * tokens

    totals = {name: torch.where(valid, term, 0.0).sum() for name, term in terms.items()}
    metrics = exact.loss.new_zeros(len(SLOTS))  # 0 for counts: they are exact
    for slot, name in enumerate(SLOTS):
        metrics[slot] = totals.get(name, 0.0)
        if name in ("log_ratio_min", "log_ratio_max") and bool(valid.any()):
            assert exact.metrics is not None
            metrics[slot] = exact.metrics[name].abs()
    return {"loss": totals["loss"], "grad": grad, "tokens": tokens, "metrics": metrics}


def _rounding(difference: torch.Tensor) -> torch.Tensor:
    """The growth of the magnitude of ``e^x``, relative to it, because ``x`` is a difference that float32 rounds.

    The rounding moves a term ``f(x)`` by up to ``2^-24 |x f'(x)|``, which a quarter of ``|x f'(x)|`` in ``m`` pays, as
    the budget is ``4 * 2^-24 m``. A power of ``x`` pays it by itself; beside an exponential ``x f'(x)`` has no bound.
    """
    return difference.abs() / 4


def _penalty_terms(penalty: KLPenalty, s: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Absolute values of the terms of the KL penalty and of its derivative."""
    e, a = torch.exp(-s) * (1 + _rounding(s)), s.abs()
    value, slope = {
        KLEstimator.K1: (a, torch.ones_like(s)),
        KLEstimator.K2: (a * a / 2, a),
        KLEstimator.K3: (e + 1 + a, 1 + e),
    }[penalty.estimator]
    if penalty.gradient is KLGradient.STRAIGHT_THROUGH:
        return value, a
    if penalty.gradient is KLGradient.VALUE:
        return value, slope
    r = torch.exp(x) * (1 + _rounding(x))
    if penalty.estimator is KLEstimator.K3:
        both = torch.exp((x - s).clamp(-60, 60)) * (1 + _rounding(x) + _rounding(s))
        return both + r + r * a, r * a
    return r * value, r * (value + slope)


def expect_rewards(example: RewardsExample, op: str | Callable[..., Any] = "grpo", **keywords: Any) -> Expected:
    """The expected output of an estimator, or of the one named ``op``, with its options (ddof, eps, ...).

    An estimator of one's own is called with ``backend="reference"`` if it takes a backend.
    """
    example = move(example, "cpu")
    function = getattr(advantages, op) if isinstance(op, str) else op
    backend = {"backend": REFERENCE} if accepts(function, "backend") else {}
    estimator = functools.partial(function, **backend, **keywords)
    exact = estimator(example.rewards.double(), example.group_ids, **example.keywords)
    eager = estimator(example.rewards.float(), example.group_ids, **example.keywords).double()
    # An advantage is a difference of two terms, both relative to the first member K of its group:
    # (x - K) / scale = A - A_K, and (mean - K) / scale = -A_K.
    statistics = {name: value for name, value in example.keywords.items() if name != "apply_mask"}
    of_members = estimator(example.rewards.double(), example.group_ids, **statistics)
    enters = torch.isfinite(example.rewards) & statistics.get("mask", torch.tensor(True, device="cpu"))
    ids = torch.zeros_like(exact, dtype=torch.int64) if example.group_ids is None else example.group_ids
    group, unit = torch.unique(ids, return_inverse=True)[1], torch.arange(ids.numel(), device="cpu")
    pivot = torch.full_like(unit, ids.numel()).scatter_reduce(0, group[enters], unit[enters], "amin")[group]
    first = torch.where(pivot < ids.numel(), of_members[pivot.clamp(max=ids.numel() - 1)], exact)
    return Expected(exact, eager, (exact - first).abs() + first.abs())


def expect_window(example: WindowExample) -> Expected:
    """The expected output of ``window_mean``."""
    values, batch, first, last, rules = move(example, "cpu")

    def run(values: torch.Tensor) -> torch.Tensor:
        return window_mean(values, batch, first, last, **rules, backend=REFERENCE)

    absolute = run(values.double().abs()).nan_to_num(0.0, 0.0, 0.0)
    return Expected(run(values.double()), run(values.float()).double(), absolute)
