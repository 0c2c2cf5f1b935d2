"""Log-probabilities and entropies from hidden states: forward, and both directions, next to their matrix products."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import peers_logprobs as peers
import torch
from harness import Case, Contestant, Plan, Tensors, at_most_floors, available, slower_by, small_test

import hpo_core as hpo

OURS = 1.1  # in matrix products


def data(dtype: torch.dtype, tokens: int, vocabulary: int, width: int) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=draw).to(dtype)
    weight = (3 * width**-0.5 * torch.randn(vocabulary, width, generator=draw)).to(dtype)
    targets = torch.randint(0, vocabulary, (tokens,), generator=draw)
    return hidden, weight, targets, torch.randn(tokens, generator=draw), torch.randn(tokens, generator=draw)


# name: (its package, its function)
PEERS = {
    "eager": ("torch", peers.eager_of_hidden),
    "TRL's chunked function": ("trl", peers.trl_chunked),
    "verl's fused function": ("verl", peers.verl_fused),
    "Liger's fused linear function": ("liger_kernel", peers.liger_fused),
}


class Products:
    """The matrix products of our blocks, alone, in float32 and in memory that is there."""

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor) -> None:
        self.hidden, self.weight = hidden.float(), weight.float()
        blocks = -(-len(weight) // peers.COLUMNS)
        self.columns = -(-len(weight) // (16 * blocks)) * 16
        self.logits = torch.empty(peers.ROWS * self.columns)
        self.to_hidden, self.to_weight = torch.zeros_like(self.hidden), torch.empty_like(self.weight)

    def run(self, backward: bool) -> None:
        for begin in range(0, len(self.weight), self.columns):
            weight, to_weight = (each[begin : begin + self.columns] for each in (self.weight, self.to_weight))
            for row in range(0, len(self.hidden), peers.ROWS):
                hidden, to_hidden = (each[row : row + peers.ROWS] for each in (self.hidden, self.to_hidden))
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
    # verl's gradient at 151,936 words is off by 1.3e-4; with 16 bits verl and Liger round entropies to the operands'
    # type.
    peer_tolerance = 2e-4 if dtype == torch.float32 else 5e-2

    def forward(function: Callable[..., Any]) -> Tensors:
        with torch.no_grad():
            logp, entropy = function(hidden, weight, targets)
        return {"logp": logp, "entropy": entropy}

    def both(function: Callable[..., Any]) -> Tensors:
        logp, entropy = function(*leaves, targets)
        given = of_logp.to(logp.dtype), of_entropy.to(entropy.dtype)
        of_hidden, of_weight = torch.autograd.grad((logp, entropy), leaves, given)
        return {"logp": logp, "entropy": entropy, "of_hidden": of_hidden, "of_weight": of_weight}

    def logp_alone() -> Tensors:
        if name == "forward":
            with torch.no_grad():
                return {"logp": peers.torch_logp(hidden, weight, targets)}
        logp = peers.torch_logp(*leaves, targets)
        torch.autograd.grad(logp, leaves, of_logp.to(logp.dtype))
        return {"logp": logp}

    run = forward if name == "forward" else both
    ours = functools.partial(hpo.linear_token_logprobs, backend=backend)
    products = Products(hidden, weight)
    theirs = [
        Contestant(label, functools.partial(run, function), slower_by(1.0), tolerance=peer_tolerance)
        for label, (package, function) in PEERS.items()
        if available(package)
    ]
    if hasattr(torch.nn.functional, "linear_cross_entropy"):  # PyTorch 2.13 and newer
        theirs.append(Contestant("F.linear_cross_entropy, no entropy", logp_alone, tolerance=peer_tolerance))
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
        peers=theirs,
        floor=functools.partial(products.run, False) if name == "forward" else products.both,
        truth=None if full else functools.partial(run, exact),
    )


DIRECTIONS = ("forward", "both")
HEADLINE = (torch.float32, 1024, 32_000, 512, DIRECTIONS)
SIZES = (
    HEADLINE,
    (torch.bfloat16, 1024, 32_000, 512, DIRECTIONS),
    (torch.float32, 1024, 151_936, 256, ("forward",)),
    (torch.float32, 64, 128_256, 256, ("forward",)),
)


def plans(quick: bool) -> list[Plan]:
    return [
        Plan(
            f"linear logprobs {name} {str(dtype).removeprefix('torch.')} {tokens} x {vocabulary}",
            functools.partial(case, dtype, name), {"tokens": tokens, "vocabulary": vocabulary, "width": width},
            {"tokens": 7, "vocabulary": 1002, "width": 24},
        )
        for dtype, tokens, vocabulary, width, names in ((HEADLINE,) if quick else SIZES)
        for name in names
    ]  # fmt: skip


test_linear_logprobs = small_test(plans(quick=False))
