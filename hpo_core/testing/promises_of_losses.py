"""The promises of the policy loss and of its penalty."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from ..gates import Clip, FirstOrder, Head, LogClip, Penalty, Unit
from .budget import UNIT, Expected, agrees, assert_within_budget
from .examples import PolicyLossExample
from .expected import Outcome, exact_gradient, expect_policy_loss
from .promises import GRADIENT, PLACEMENTS, UNWRITTEN, Inapplicable, Run, distinct, growing, promise, same, strided

INCOMING = "the incoming gradient scales the outgoing one"
NOTHING_VALID = "nothing valid: loss 0, gradient 0"


def has_tokens(example: PolicyLossExample) -> bool:
    return bool(example.valid().any())


def _same_outcome(got: Outcome, expected: Outcome, why: str) -> None:
    same("the loss", got.loss, expected.loss, why)
    if expected.grad is not None:
        same("the gradient", _grad(got), expected.grad, why)


def _grad(outcome: Outcome) -> torch.Tensor:
    assert outcome.grad is not None, "the kernel returned a gradient before, and now none"
    return outcome.grad


@promise("policy_loss kl", "exact")
def _(run: Run, example: PolicyLossExample) -> float:
    out, expected = run(example), expect_policy_loss(example)
    # The gradient comes first: wrong terms make a wrong loss, and the message should point to the terms.
    share = [
        _within_budget(f"the {meaning}", value, expected[name])
        for name, meaning, value in (("grad", "gradient", out.grad), ("loss", "loss", out.loss))
        if value is not None
    ]
    if out.tokens is not None:
        share.append(assert_within_budget("loss_t", out.tokens, expected["tokens"]))
    if out.metrics is not None:
        share.append(assert_within_budget("the metrics", out.metrics.vector, expected["metrics"]))
    return max(share)


def _within_budget(what: str, got: torch.Tensor, expected: Expected) -> float:
    """assert_within_budget, whose message names the factor of a result that is the expected one times a number."""
    try:
        return assert_within_budget(what, got, expected)
    except AssertionError as error:
        hint = ""
        if got.shape == expected.exact.shape and bool(expected.exact.any()):
            largest = expected.exact.abs().argmax()
            factor = got.double().flatten()[largest] / expected.exact.flatten()[largest]
            exact, eager, magnitude = expected
            scaled = Expected(factor * exact, factor * eager, factor.abs() * magnitude)
            if bool(factor) and agrees(got, scaled):
                hint = f"; every element is {factor:.6g} times the expected one"
        raise AssertionError(f"{error}{hint}") from None


@promise("policy_loss kl", "deterministic")
def _(run: Run, example: PolicyLossExample) -> None:
    first, threads = run(example), torch.get_num_threads()
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            _same_outcome(run(example), first, f"in another run, under set_num_threads({number})")
    finally:
        torch.set_num_threads(threads)


@promise("policy_loss kl", "strides are honoured")
def _(run: Run, example: PolicyLossExample) -> None:
    before = run(example)
    for change, where in PLACEMENTS:
        _same_outcome(run(example.on_tokens(change).on_rows(change)), before, where)


@promise("policy_loss", INCOMING, GRADIENT)
def _(run: Run, example: PolicyLossExample) -> None:
    out = run(example, torch.tensor(4.0, dtype=torch.float32, device="cpu"))
    same("the gradient", _grad(out), 4 * _grad(run(example)), "where 4 arrives at the loss")


@promise("kl", INCOMING, GRADIENT)
def _(run: Run, example: PolicyLossExample) -> None:
    incoming = strided(2.0 ** (torch.arange(example.logp.numel(), device="cpu") % 3))
    out = run(example, incoming)
    same("the gradient", _grad(out), incoming * _grad(run(example)), "where 1, 2, 4, 1 ... arrive, of stride 2")


@promise("policy_loss kl", UNWRITTEN)
def _(run: Run, example: PolicyLossExample) -> None:
    run(example)


def _require_trajectories_alone(example: PolicyLossExample) -> None:
    if example.coarsest is not Unit.TRAJECTORY:
        raise Inapplicable(f"the gate has a level of {example.coarsest.name.lower()}s, whose rows see each other")


@promise("policy_loss", "packed: rows do not see each other", GRADIENT)
def _(run: Run, example: PolicyLossExample) -> None:
    _require_trajectories_alone(example)
    before, valid, trajectory = run(example), example.valid(), example.first_rows(Unit.TRAJECTORY)
    owner = example.spread(trajectory)
    for kept in distinct(owner[valid]):
        changed = example.on_tokens(growing(valid & (owner != kept))).on_rows(growing(trajectory != kept))
        own = owner == kept
        same(
            "the gradient of a row", _grad(run(changed))[own], _grad(before)[own], "after only other rows were changed"
        )


@promise("policy_loss", "masked is never read")
def _(run: Run, example: PolicyLossExample) -> None:
    clean, hole = run(example), ~example.valid()
    for poison in (math.nan, math.inf, 1e30):
        dirty = run(example.poisoned(poison))
        _same_outcome(dirty, clean, f"with {poison} at masked positions")
        if dirty.grad is not None:
            zeros = torch.zeros_like(dirty.grad[hole])
            same("the gradient at masked positions", dirty.grad[hole], zeros, f"with {poison} there")


@promise("policy_loss", NOTHING_VALID)
def _(run: Run, example: PolicyLossExample) -> None:
    nothing = torch.zeros(example.batch.total_tokens, dtype=torch.bool, device="cpu")
    out = run(example._replace(batch=example.batch.replace(mask=nothing)))
    zeros = None if out.grad is None else torch.zeros_like(out.grad)
    _same_outcome(out, Outcome(torch.zeros_like(out.loss), zeros, None, None), "with all masked")


def _on_policy(example: PolicyLossExample) -> tuple[PolicyLossExample, torch.Tensor] | None:
    """The example with ``logp == old_logp``, and -w A where the reference has a gradient, else 0.

    None if the gate promises the mean over a segment and advantages are those of tokens; Inapplicable if the gate
    promises another gradient.
    """
    example = example.without("kl", "ref_logp", "token_weight")
    of_gate = example.gate_inputs
    if of_gate.token_weight is not None:
        of_gate = of_gate._replace(token_weight=torch.ones_like(of_gate.token_weight))
    if example.gate.head is Head.TARGET:  # -w A is promised where the target lies on the advantage's side of 1
        of_gate = of_gate._replace(target=1 + example.advantages.sign() / 2)
    if "gate_inputs" in example.keywords:
        example = example.given(gate_inputs=of_gate)
    if example.gate.first_order in (FirstOrder.SCALED, FirstOrder.SEGMENT_SUM):
        raise Inapplicable(f"the gate promises {example.gate.first_order.value}")
    if example.gate.penalty is Penalty.K1:
        raise Inapplicable("the gate's own penalty has a gradient on-policy")
    if example.gate.first_order is FirstOrder.SEGMENT_MEAN:  # -w A only if w and A are constant on the segment
        if example.per_token:
            return None
        example = example.without("token_mask", "window", "threshold")
        first = example.first_rows(max(Unit.TRAJECTORY, example.gate.levels[0].unit))
        example = example.on_rows(lambda x: x[first])
    if example.old_logp is not None:
        zero = torch.arange(example.logp.numel(), device="cpu") % 3 == 0  # with zeros of either sign on either side
        example = example._replace(
            logp=torch.where(zero, -0.0, example.old_logp), old_logp=torch.where(zero, 0.0, example.old_logp)
        )
    if "rollout_logp" in example.keywords:
        example = example.given(rollout_logp=example.logp if example.old_logp is None else example.old_logp)
    exact = exact_gradient(example)
    weights = example.spread(example.weights())
    advantages = example.advantages if example.per_token else example.spread(example.advantages)
    expected = -(weights * advantages)
    return example, torch.where(exact.abs() > expected.abs() / 2, expected, 0.0)  # cancelling terms leave rounding


def _first_order(run: Run, example: PolicyLossExample, why: str) -> float | None:
    on_policy = _on_policy(example)
    if on_policy is None:
        return None
    example, expected = on_policy
    grad = _grad(run(example))
    if "weights" in example.keywords:
        same("the gradient", grad, expected, f"(-w A) {why}")
        return None
    # A kernel with weights of its own may divide before it multiplies.
    exact = expected.double()
    return assert_within_budget(f"the gradient {why}", grad, Expected(exact, exact, exact.abs()))


@promise("policy_loss", "first-order true: on-policy, the gradient is -w A", GRADIENT)
def _(run: Run, example: PolicyLossExample) -> float | None:
    return _first_order(run, example, "on-policy")


def _tied(part: Any) -> Any:
    """A clip whose bounds are the ratio 1, which is every ratio on-policy; another part of a gate as it is."""
    if isinstance(part, Clip):
        return Clip((1.0, 1.0), (1.0, 1.0))
    return LogClip((0.0, 0.0), (0.0, 0.0)) if isinstance(part, LogClip) else part


@promise("policy_loss", "ties: a ratio exactly at its bound passes the gradient", "gate", GRADIENT)
def _(run: Run, example: PolicyLossExample) -> float | None:
    gate = example.gate
    levels = tuple(dataclasses.replace(level, gate=_tied(level.gate)) for level in gate.levels)
    gate = dataclasses.replace(gate, token=_tied(gate.token), levels=levels, pre=_tied(gate.pre), needs=())
    if gate == dataclasses.replace(example.gate, needs=()):
        raise Inapplicable("the gate has no clip")
    tied, kept = example._replace(gate=gate).without("gate_inputs"), example.gate_inputs._replace(bounds=None)
    if any(each is not None for each in kept):  # bounds per token would replace the tie
        tied = tied.given(gate_inputs=kept)
    return _first_order(run, tied, "where every ratio is exactly at its bound")


@promise(
    "policy_loss",
    "ties: a score equal to the threshold is selected (unless strict)",
    *("window", "threshold", "entropy", GRADIENT),
)
def _(run: Run, example: PolicyLossExample) -> None:
    valid = example.valid()
    if "window" not in example.keywords or not bool(valid.any()):
        return
    window = dataclasses.replace(example.keywords["window"], first=0, last=0)
    middle = example.keywords["entropy"][valid].median().reshape(1)
    example = example.given(window=window, threshold=middle).without("kl", "ref_logp")
    exact, _, magnitude = expect_policy_loss(example)["grad"]
    # Where terms cancel, as in a segment whose gate is nearly straight, rounding decides whether anything is left.
    cancels = (magnitude > 0) & (exact.abs() <= 4 * UNIT * magnitude)
    found = torch.where(cancels, 0.0, _grad(run(example)))
    selected = torch.where(cancels, 0.0, exact)
    same("the set of tokens with a gradient", (found != 0).int(), (selected != 0).int(), "at tied scores")


@promise("policy_loss", "overflow-safe: log-ratios saturate at +-60 and keep their slope")
def _(run: Run, example: PolicyLossExample) -> float:
    sizes = torch.tensor([30.0, 59.0, 61.0, 120.0, 1e4], dtype=torch.float32, device="cpu")
    size = sizes.repeat(example.logp.numel())[: example.logp.numel()]
    up = torch.arange(example.logp.numel(), device="cpu") % 2 == 0
    old = example.logp if example.old_logp is None else example.old_logp
    example = example.without("kl", "ref_logp")._replace(
        logp=torch.where(up, -0.5, -0.5 - size), old_logp=torch.where(up, -0.5 - size, old.new_tensor(-0.5))
    )
    example = example._replace(advantages=example.advantages * 1e9)
    out, expected = run(example), expect_policy_loss(example)
    largest = f"not finite at log-ratios up to {float(size.max()) if size.numel() else 0.0}"
    assert bool(torch.isfinite(out.loss)), f"loss {out.loss.item()} is {largest}"
    if out.grad is None:
        return assert_within_budget("the loss", out.loss, expected["loss"])
    assert bool(torch.isfinite(out.grad).all()), f"gradient {out.grad.tolist()} is {largest}"
    return assert_within_budget("the gradient", out.grad, expected["grad"])


@promise(
    "policy_loss",
    "batch-invariant: a row's gradient does not depend on its place or its neighbours",
    "weights",
    GRADIENT,
)
def _(run: Run, example: PolicyLossExample) -> None:
    _require_trajectories_alone(example)
    whole, rows = run(example), example.batch.rows
    order = torch.randperm(rows, generator=torch.Generator("cpu").manual_seed(rows), device="cpu")
    shuffled, tokens = example.select(order)
    same("the gradient", _grad(run(shuffled)), _grad(whole)[tokens], "in another order of the rows")
    trajectory = example.first_rows(Unit.TRAJECTORY)
    for number in distinct(trajectory):
        alone, tokens = example.select(trajectory == number)
        same("the gradient of a row", _grad(run(alone)), _grad(whole)[tokens], "alone in its batch")


@promise("policy_loss", "micro-batch-invariant: parts add up to the whole", "weights")
def _(run: Run, example: PolicyLossExample) -> float:
    segment, loss = example.first_rows(example.coarsest), torch.zeros((), dtype=torch.float64, device="cpu")
    selected = [example.select(segment % 2 == part) for part in (0, 1)]
    parts = [(run(micro), tokens) for micro, tokens in selected]
    whole = run(example)  # the last call, which a report shows
    for out, tokens in parts:
        loss += out.loss.double()
        if whole.grad is not None:
            same("the gradient", _grad(out), whole.grad[tokens], "in a micro-batch")
    return assert_within_budget("the loss summed over micro-batches", loss, expect_policy_loss(example)["loss"])
