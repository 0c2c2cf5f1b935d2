"""Log-probabilities and entropies from hidden states: forward, and both directions, next to their matrix products."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import Case, Contestant, Plan, Tensors, at_most_floors, available, check, slower_by

import hpo_core as hpo

IGNORE = -100
ROWS, COLUMNS = 512, 8192  # of a block of logits on the CPU
OURS = 1.1  # in matrix products


def data(dtype: torch.dtype, tokens: int, vocabulary: int, width: int) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=draw).to(dtype)
    weight = (3 * width**-0.5 * torch.randn(vocabulary, width, generator=draw)).to(dtype)
    targets = torch.randint(0, vocabulary, (tokens,), generator=draw)
    return hidden, weight, targets, torch.randn(tokens, generator=draw), torch.randn(tokens, generator=draw)


def eager(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As trainers write it: all logits, and log_softmax of them in float32."""
    logps = torch.log_softmax((hidden @ weight.t()).float(), dim=-1)
    return logps.gather(-1, targets[:, None]).squeeze(-1), -(logps.exp() * logps).sum(-1)


def trl(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    logp, entropy, *_ = ChunkedLogProbFunction.apply(
        hidden, weight, None, targets, 1.0, COLUMNS, None, 1.0, ("entropy",)
    )
    return logp, entropy


def liger(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyFunction

    nll, entropy, *_ = LigerFusedLinearScaledCrossEntropyFunction.apply(hidden, weight, targets, 1.0, IGNORE, 1, True)
    return -nll, entropy


class Products:
    """The matrix products of our blocks, alone, in float32 and in memory that is there."""

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor) -> None:
        self.hidden, self.weight = hidden.float(), weight.float()
        blocks = -(-len(weight) // COLUMNS)
        self.columns = -(-len(weight) // (16 * blocks)) * 16
        self.logits = torch.empty(ROWS * self.columns)
        self.to_hidden, self.to_weight = torch.zeros_like(self.hidden), torch.empty_like(self.weight)

    def run(self, backward: bool) -> None:
        for begin in range(0, len(self.weight), self.columns):
            weight, to_weight = (each[begin : begin + self.columns] for each in (self.weight, self.to_weight))
            for row in range(0, len(self.hidden), ROWS):
                hidden, to_hidden = (each[row : row + ROWS] for each in (self.hidden, self.to_hidden))
                logits = self.logits[: len(hidden) * len(weight)].view(len(hidden), len(weight))
                torch.mm(hidden, weight.t(), out=logits)
                if backward:
                    torch.addmm(to_hidden, logits, weight, out=to_hidden)
                    torch.addmm(to_weight, logits.t(), hidden, beta=float(row > 0), out=to_weight)

    def both(self) -> None:
        self.run(backward=False)
        self.run(backward=True)


def case(
    dtype: torch.dtype, name: str, *, tokens: int, vocabulary: int, width: int, full: bool, backend: str | None
) -> Case:
    """``name``: forward or both."""
    hidden, weight, targets, of_logp, of_entropy = data(dtype, tokens, vocabulary, width)
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2

    def forward(function: Callable[..., Any]) -> Tensors:
        with torch.no_grad():
            logp, entropy = function(hidden, weight, targets)
        return {"logp": logp, "entropy": entropy}

    def both(function: Callable[..., Any]) -> Tensors:
        logp, entropy = function(*leaves, targets)
        of_hidden, of_weight = torch.autograd.grad((logp, entropy), leaves, (of_logp, of_entropy))
        return {"logp": logp, "entropy": entropy, "of_hidden": of_hidden, "of_weight": of_weight}

    run = forward if name == "forward" else both
    ours = functools.partial(hpo.linear_token_logprobs, backend=backend)
    products = Products(hidden, weight)
    peers = [Contestant("eager", functools.partial(run, eager), slower_by(1.0), tolerance=tolerance)]
    if full:
        others = (("TRL's chunked function", "trl", trl), ("Liger's fused linear function", "liger_kernel", liger))
        for label, package, function in others:
            if available(package):
                peers.append(Contestant(label, functools.partial(run, function), slower_by(1.0), tolerance=tolerance))
    exact = functools.partial(hpo.linear_token_logprobs, backend="reference")
    return Case(
        op="linear_token_logprobs",
        name=(
            f"logp and entropy of hidden states, {name}, {str(dtype).removeprefix('torch.')}, "
            f"{tokens:,} x {width} x {vocabulary:,}"
        ),
        unit="logit",
        units=tokens * vocabulary,
        bytes_per_unit=hidden.element_size() * width / tokens * (1 if name == "forward" else 3),  # those of the weight
        flops_per_unit=2.0 * width * (1 if name == "forward" else 4),
        ours=[Contestant("hpo_core", functools.partial(run, ours), at_most_floors(OURS), tolerance=tolerance)],
        peers=peers,
        floor=functools.partial(products.run, False) if name == "forward" else products.both,
        truth=None if full else functools.partial(run, exact),
    )


def plans(quick: bool) -> list[Plan]:
    small = {"tokens": 7, "vocabulary": 1002, "width": 24}
    sizes = [(torch.float32, {"tokens": 1024, "vocabulary": 32_000, "width": 512})]
    if not quick:
        sizes.append((torch.bfloat16, {"tokens": 1024, "vocabulary": 32_000, "width": 512}))
        sizes.append((torch.float32, {"tokens": 1024, "vocabulary": 151_936, "width": 256}))
    return [
        Plan(
            f"linear logprobs {name} {str(dtype).removeprefix('torch.')} {size['vocabulary']}",
            functools.partial(case, dtype, name), size, small,
        )
        for dtype, size in sizes
        for name in ("forward", "both")
    ]  # fmt: skip


@pytest.mark.parametrize("plan", plans(quick=False), ids=lambda plan: plan.name)
def test_linear_logprobs(plan: Plan, benchmark: Any) -> None:
    small = plan.small_case()
    check(small)
    benchmark(small.ours[0].run)
