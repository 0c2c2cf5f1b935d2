"""The first token at which two kernels disagree, and its way through every level of the definition."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..arguments import examines
from ..backends import backends
from ..batch import PackedBatch
from ..checks import REFERENCE, check, check_shape, require_type
from ..gates import RatioGate
from ..losses import policy_loss
from ..prepared import prepare
from ..reference.gates import gate_tokens, read_tokens
from ..reference.hierarchy import combined
from ..reference.segments import flat
from ..specs import Unit
from .budget import budget
from .examples import PolicyLossExample, device_of, move
from .expected import Outcome, accepted, accepts, expect_policy_loss, run_policy_loss
from .subjects import check_padded, on_packed_batches

Kernel = str | Callable[..., Any]


class ExplainedLevel(NamedTuple):
    """One gate on the token's way to z, by the definition in float64."""

    name: str  # "token", "step", "trajectory", "group" or "domain"; of a split "rising " or "falling " stands before it
    aggregate: float  # a_k; of the token its own log-ratio, as it enters the gates
    residual: float  # a_k - a_{k+1}
    value: float  # the gated residual
    branch: str  # "inside", "below" or "above" its bounds


class Explanation(NamedTuple):
    """The result of :func:`explain`; ``print`` it."""

    token: int | None  # None: no token differs
    row: int
    position: int  # in its row
    differing: int  # tokens
    facts: dict[str, float]  # logp, x, advantage, weight, token_weight, z
    state: str  # "selected", "valid, not selected" or "masked"
    levels: tuple[ExplainedLevel, ...]  # finest first
    results: dict[str, tuple[float, float]]  # by "definition" and the kernels' names: loss_t and gradient; NaN: none

    def __str__(self) -> str:
        if self.token is None:
            return "no token differs"
        lines = [
            f"token {self.token}, number {self.position} of row {self.row}, {self.state}; "
            f"{self.differing} tokens differ",
            "  " + "   ".join(f"{name} {value:.7g}" for name, value in self.facts.items()),
            f"  {'gate':<20}{'aggregate':>14}{'residual':>14}{'gated':>14}  branch",
        ]
        for level in self.levels:
            numbers = "".join(f"{number:>14.7g}" for number in level[1:4])
            lines.append(f"  {level.name:<20}{numbers}  {level.branch}")
        lines.append(f"  {'result':<20}{'loss_t':>16}{'gradient':>16}")
        for name, (loss, grad) in self.results.items():
            lines.append(f"  {name:<20}{loss:>16.9g}{grad:>16.9g}")
        return "\n".join(lines)


@examines
def explain(
    example: PolicyLossExample, a: Kernel, b: Kernel = REFERENCE, *, bitwise: bool = False, padded: bool = False
) -> Explanation:
    """Explain the first token whose loss or gradient differs between two kernels.

    Args:
        example: from :func:`random_policy_loss`, or your own call as a ``PolicyLossExample``, packed: with a padded
            mask, ``PackedBatch.from_padded(mask)`` and flattened tensors.
        a, b: names of backends, or functions that are called as ``policy_loss`` or ``policy_loss_and_grad`` is. Where
            one returns no losses of tokens, gradients alone are compared. With a threshold that ``window.fit`` returned
            the definition and ``"reference"`` take the scores of the backend that fitted it.
        bitwise: whether any difference counts. By default one counts that exceeds the error budget of a float32 kernel,
            see :func:`budget`.
        padded: functions take tensors of tokens as ``[B, L]``, and as batch the mask ``[B, L]``, as in :func:`check`.

    Raises:
        ValueError: a backend is unknown or cannot serve here; the message says why.

    >>> from hpo_core import gates, testing
    >>> example = testing.random_policy_loss(3, gates.fiberpo())
    >>> print(testing.explain(example, "reference"))
    no token differs
    """
    require_type(isinstance(example, PolicyLossExample), "example: expected a PolicyLossExample, got {}", type(example))
    _check_example(example)
    example = example.given(weights=example.weights())
    names = [_name(kernel, side) for kernel, side in ((a, "a"), (b, "b"))]
    names[1] += " (b)" * (names[0] == names[1])
    if padded:
        _check_rectangle(example)
        a, b = (kernel if isinstance(kernel, str) else on_packed_batches(kernel) for kernel in (a, b))
    first, second = (_tokens(kernel, example) for kernel in (a, b))
    expected = expect_policy_loss(example)
    differs = torch.zeros_like(example.valid())
    for at, output in enumerate(("tokens", "grad")):
        mine, theirs = first[at], second[at]
        if mine is None or theirs is None:
            continue
        same = (mine == theirs) | (mine.isnan() & theirs.isnan())
        allowed = torch.zeros_like(mine) if bitwise else budget(expected[output]).reshape(-1)
        differs |= ~same & ~((mine - theirs).abs() <= allowed)
    if not bool(differs.any()):
        return Explanation(None, -1, -1, 0, {}, "", (), {})
    token = int(differs.nonzero()[0])
    row = int(example.row()[token])
    begin = int(example.batch.cu_seqlens[row]) if row >= 0 else 0
    definition = (expected["tokens"].exact.reshape(-1), expected["grad"].exact.reshape(-1))
    outcomes = {"definition": definition, names[0]: first, names[1]: second}
    results = {name: (_at(token, loss), _at(token, grad)) for name, (loss, grad) in outcomes.items()}
    facts, state, levels = _by_definition(example, token)
    return Explanation(token, row, token - begin, int(differs.sum()), facts, state, levels, results)


def _check_example(example: PolicyLossExample) -> None:
    batch, gate = example.batch, example.gate
    require_type(
        isinstance(batch, PackedBatch),
        "example.batch: expected a PackedBatch, got {}; take PackedBatch.from_padded(mask)",
        type(batch),
    )
    require_type(
        isinstance(gate, RatioGate),
        "example.gate: expected a RatioGate, got {}; that of policy_loss by default is gates.ppo_clip()",
        type(gate),
    )
    check_shape("example.logp", example.logp, (batch.total_tokens,), "[T] (packed)", "flatten a padded tensor")
    unknown = sorted(set(example.keywords) - set(accepted(policy_loss, example.keywords)))
    check(not unknown, "example.keywords: expected arguments of policy_loss, got {}", ", ".join(unknown))


def _check_rectangle(example: PolicyLossExample) -> None:
    check_padded(example.gate)
    batch, lengths = example.batch, example.batch.cu_seqlens.diff().tolist()
    check(
        batch.trajectory_ids is None and len(set(lengths)) <= 1 and sum(lengths) == batch.total_tokens,
        "padded: expected rows of equal length, each a trajectory, and no token outside, got lengths {} of {} tokens; "
        "take PackedBatch.from_padded(mask), or draw with layout=Layout((5, 5))",
        lengths,
        batch.total_tokens,
    )


def _at(token: int, part: torch.Tensor | None) -> float:
    return math.nan if part is None else float(part[token])


def _name(kernel: Kernel, side: str) -> str:
    if isinstance(kernel, str):
        known = backends()
        check(kernel in known, "{}: expected a function or one of {}, got {!r}", side, ", ".join(known), kernel)
        check(bool(known[kernel]), "{}: {!r} is not available: {}", side, kernel, known[kernel].reason)
        return kernel
    check(callable(kernel), "{}: expected the name of a backend or a function, got {!r}", side, kernel)
    return getattr(kernel, "__name__", side)


def _tokens(kernel: Kernel, example: PolicyLossExample) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """loss_t and gradient ``[T]`` in float64 on the CPU, as far as the kernel gives them."""
    if isinstance(kernel, str):
        moved = move(example.with_scores_of_threshold() if kernel == REFERENCE else example, device_of(kernel))
        outcome: Outcome = run_policy_loss(policy_loss, moved, report=("tokens",), backend=kernel)
    else:
        outcome = _called(kernel, example)
    tokens, grad = (
        None if part is None else part.detach().to("cpu", torch.float64).reshape(-1)
        for part in (outcome.tokens, outcome.grad)
    )
    return tokens, grad


def _called(kernel: Callable[..., Any], example: PolicyLossExample) -> Outcome:
    """The outcome with loss_t, if the kernel reports it: policy_loss_and_grad takes ``report`` and refuses this one."""
    if accepts(kernel, "report"):
        try:
            return run_policy_loss(kernel, move(example, "cpu"), report=("tokens",))
        except ValueError as error:
            if not str(error).startswith("report: "):
                raise
    return run_policy_loss(kernel, move(example, "cpu"))


def _by_definition(example: PolicyLossExample, token: int) -> tuple[dict[str, float], str, tuple[ExplainedLevel, ...]]:
    """The facts, the state and the levels of a token, as the reference computes them in float64."""
    example = move(example.with_scores_of_threshold(), "cpu")
    entropy = {name: value.double() for name, value in example.keywords.items() if name == "entropy"}
    example = example._replace(logp=example.logp.detach().double()).given(**entropy)
    keywords = {name: value for name, value in example.keywords.items() if name not in ("report", "backend")}
    inputs, spec, exchange, *_ = prepare(
        example.logp, example.old_logp, example.advantages, example.batch, example.gate, backend=REFERENCE, **keywords
    )
    inputs = flat(inputs)
    tokens = read_tokens(inputs, spec)
    channels = gate_tokens(tokens, inputs, spec, exchange)
    names = ["token", *(Unit(level.unit).name.lower() for level in spec.levels)]
    levels = []
    for channel in channels:
        part = "" if len(channels) == 1 else "rising " if channel.sign > 0 else "falling "
        for name, level in zip(names, channel.levels, strict=True):
            below, above = bool(level.below[token]), bool(level.above[token])
            branch = "below" if below else "above" if above else "inside"
            aggregate, residual, value = (float(of_level[token]) for of_level in level[:3])
            levels.append(ExplainedLevel(part + name, aggregate, residual, value, branch))
    named = {
        "logp": tokens.logp, "x": tokens.x, "advantage": tokens.advantage, "weight": tokens.weight,
        "token_weight": tokens.token_weight, "z": combined(channels)[0],
    }  # fmt: skip
    valid, selected = bool(tokens.valid[token]), bool(tokens.selected[token])
    state = "selected" if selected else "valid, not selected" if valid else "masked"
    return {name: float(value[token]) for name, value in named.items()}, state, tuple(levels)
