"""Log-probabilities and entropies from logits: forward, backward, and both."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import Case, Contestant, Plan, Tensors, at_most_floors, check, slower_by

import hpo_core as hpo
from hpo_core.backends import resolve
from hpo_core.reference import logprobs as reference
from hpo_core.specs import LogitRows

IGNORE = -100
# What the notes on the CPU ask for, in floors of the same bytes.
FORWARD = {torch.float32: 1.4, torch.bfloat16: 1.8}
BACKWARD = {torch.float32: 1.25, torch.bfloat16: 1.9}


def eager(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As trainers write it, in float32."""
    logps = torch.log_softmax(logits.float(), dim=-1)
    logp = logps.gather(-1, targets[:, None]).squeeze(-1)
    return logp, -(logps.exp() * logps).sum(-1)


def tolerance(dtype: torch.dtype) -> float:
    return 1e-4 if dtype == torch.float32 else 1e-2


def data(dtype: torch.dtype, tokens: int, vocabulary: int) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(tokens, vocabulary, generator=draw)).to(dtype)
    targets = torch.randint(0, vocabulary, (tokens,), generator=draw)
    return logits, targets, torch.randn(tokens, generator=draw), torch.randn(tokens, generator=draw)


def case(dtype: torch.dtype, name: str, *, tokens: int, vocabulary: int, full: bool, backend: str | None) -> Case:
    """``name``: forward, backward or both."""
    logits, targets, of_logp, of_entropy = data(dtype, tokens, vocabulary)
    leaf = logits.clone().requires_grad_()
    words, tensors = logits.view(torch.float32), ("logp", "entropy")
    compiled: Any = torch.compile(eager, dynamic=False) if full else None

    def forward(function: Callable[..., Any]) -> Callable[[], Tensors]:
        def run() -> Tensors:
            with torch.no_grad():
                return dict(zip(tensors, function(logits, targets), strict=True))

        return run

    def both(function: Callable[..., Any]) -> Callable[[], Tensors]:
        def run() -> Tensors:
            logp, entropy = function(leaf, targets)
            (grad,) = torch.autograd.grad((logp, entropy), leaf, (of_logp, of_entropy))
            return {"logp": logp, "entropy": entropy, "grad": grad}

        return run

    ours = functools.partial(hpo.token_logprobs, backend=backend)
    truth = functools.partial(_truth, logits, targets, of_logp, of_entropy)
    bytes_of_logit = logits.element_size()
    if name == "backward":
        kernels = resolve("logprobs", logits, backend)
        rows = LogitRows(logits, targets, None, 1.0, IGNORE, None, 0, vocabulary)
        given = (rows, kernels.token_logprobs(rows, 3)[2], of_logp, of_entropy, False)
        kept = torch.empty_like(words)
        run = lambda: {"grad": kernels.token_logprobs_backward(*given)}  # noqa: E731
        contestants = [Contestant("hpo_core", run, at_most_floors(BACKWARD[dtype]), tolerance=tolerance(dtype))]
        peers = [Contestant("a copy into memory that is there", lambda: {"copy": kept.copy_(words)}, alike=False)]
        floor: Callable[[], object] = words.clone  # fresh memory, which a gradient is
        moved = 2
    elif name == "forward":
        contestants = [
            Contestant("hpo_core", forward(ours), at_most_floors(FORWARD[dtype])),
            Contestant("hpo_core, no entropy", forward_logp(ours, logits, targets)),
        ]
        peers = [Contestant("eager", forward(eager), slower_by(25))]
        if full:
            peers.append(Contestant("torch.compile", forward(compiled), slower_by(3.5)))
        floor, moved = words.sum, 1
    else:
        contestants = [Contestant("hpo_core", both(ours), tolerance=tolerance(dtype))]
        peers = [Contestant("eager", both(eager), slower_by(25), tolerance=tolerance(dtype))]
        if full:
            peers.append(Contestant("torch.compile", both(compiled), slower_by(5), tolerance=tolerance(dtype)))
        floor, moved = (lambda: (words.sum(), words.clone())), 3
    return Case(
        op="token_logprobs",
        name=f"logp and entropy, {name}, {str(dtype).removeprefix('torch.')}, {tokens:,} x {vocabulary:,}",
        unit="logit",
        units=tokens * vocabulary,
        bytes_per_unit=moved * bytes_of_logit,
        flops_per_unit=20.0 if name != "both" else 40.0,  # an exponential is 14 of them
        ours=contestants,
        peers=peers,
        floor=floor,
        truth=None if full else truth,
    )


def forward_logp(function: Callable[..., Any], logits: torch.Tensor, targets: torch.Tensor) -> Callable[[], Tensors]:
    return lambda: {"logp": function(logits, targets, entropy=False).logp}


def _truth(logits: torch.Tensor, targets: torch.Tensor, of_logp: torch.Tensor, of_entropy: torch.Tensor) -> Tensors:
    leaf = logits.double().requires_grad_()
    rows = LogitRows(leaf, targets, None, 1.0, IGNORE, None, 0, leaf.shape[-1])
    logp, entropy, _ = reference.token_logprobs(rows, 3)
    assert entropy is not None
    (grad,) = torch.autograd.grad((logp, entropy), leaf, (of_logp.double(), of_entropy.double()))
    return {"logp": logp.detach(), "entropy": entropy.detach(), "grad": grad}


def plans(quick: bool) -> list[Plan]:
    small = {"tokens": 7, "vocabulary": 1002}
    sizes = [(torch.float32, {"tokens": 1024, "vocabulary": 32_000})]
    if not quick:
        sizes.append((torch.bfloat16, {"tokens": 256, "vocabulary": 151_936}))
    return [
        Plan(f"logprobs {name} {str(dtype).removeprefix('torch.')}", functools.partial(case, dtype, name), size, small)
        for dtype, size in sizes
        for name in ("forward", "backward", "both")
    ]


@pytest.mark.parametrize("plan", plans(quick=False), ids=lambda plan: plan.name)
def test_logprobs(plan: Plan, benchmark: Any) -> None:
    small = plan.small_case()
    check(small)
    benchmark(small.ours[0].run)
