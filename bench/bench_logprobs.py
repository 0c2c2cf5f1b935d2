"""Log-probabilities and entropies from logits: forward, backward, and both."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import peers_logprobs as peers
import torch
from harness import Case, Contestant, Goal, Plan, Tensors, at_most_floors, available, slower_by, small_test

import hpo_core as hpo
from hpo_core.backends import resolve
from hpo_core.reference import logprobs as reference
from hpo_core.specs import LogitRows

IGNORE = -100
# The goals on the CPU, in floors of the same bytes.
FORWARD = {torch.float32: 1.4, torch.bfloat16: 1.8}
BACKWARD = {torch.float32: 1.25, torch.bfloat16: 1.9}

Function = Callable[[torch.Tensor, torch.Tensor], Any]


class Peer(NamedTuple):
    name: str
    package: str
    function: Function
    goals: dict[str, Goal]
    error: dict[torch.dtype, float]  # of the largest element


WIDENED = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
ROUNDED = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # results are in the precision of the logits
PEERS = [
    Peer("eager", "torch", peers.eager, {"forward": slower_by(25), "both": slower_by(25)}, WIDENED),
    Peer("TRL", "trl", peers.trl, {"both": slower_by(20)}, ROUNDED),
    Peer("verl", "verl", peers.verl, {}, ROUNDED),
    Peer("verl, entropy in chunks", "verl", peers.verl_chunked, {}, ROUNDED),
]


def compiled() -> Peer:
    """Made where it runs, because ``torch.compile`` imports Inductor, for which tests that import this file would
    wait."""
    function = torch.compile(peers.eager, dynamic=False)
    return Peer("torch.compile", "torch", function, {"forward": slower_by(3.5), "both": slower_by(5)}, WIDENED)


class Computed(torch.autograd.Function):
    """A tensor as the result of a computation."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        return result.detach()

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[None, None]:
        return None, None


def data(dtype: torch.dtype, tokens: int, vocabulary: int) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(0)
    logits = torch.empty(tokens, vocabulary, dtype=dtype)
    for rows in logits.split(1024):  # all of them in float32 would be twice those in bfloat16
        rows.copy_(3 * torch.randn(rows.shape, generator=draw))
    targets = torch.randint(0, vocabulary, (tokens,), generator=draw)
    return logits, targets, torch.randn(tokens, generator=draw), torch.randn(tokens, generator=draw)


def case(dtype: torch.dtype, name: str, *, tokens: int, vocabulary: int, full: bool, backend: str | None) -> Case:
    """``name``: forward, backward or both."""
    logits, targets, of_logp, of_entropy = data(dtype, tokens, vocabulary)
    leaf, words = logits.detach().requires_grad_(), logits.view(torch.float32)

    def forward(function: Function) -> Tensors:
        with torch.no_grad():
            logp, entropy = function(logits, targets)
        return {"logp": logp, "entropy": entropy}

    def gradient(results: Any, keeps_graph: bool) -> torch.Tensor:
        given = [each.to(result.dtype) for each, result in zip((of_logp, of_entropy), results, strict=True)]
        return torch.autograd.grad(results, leaf, given, retain_graph=keeps_graph)[0]

    def both(function: Function) -> Tensors:
        logp, entropy = function(leaf, targets)
        return {"logp": logp, "entropy": entropy, "grad": gradient((logp, entropy), keeps_graph=False)}

    def in_place() -> Tensors:
        """Logits that a model has computed, as in training: their memory is there, and becomes that of the gradient."""
        if not full:
            spent.copy_(logits)  # at full size gradients of earlier calls take as long as logits, and are not compared
        computed = Computed.apply(anchor, spent)
        logp, entropy = ours(computed, targets, inplace_gradient=True)
        assert entropy is not None
        (grad,) = torch.autograd.grad((logp, entropy), computed, (of_logp, of_entropy))
        return {"logp": logp, "entropy": entropy, "grad": grad}

    def backward(function: Function) -> Callable[[], Tensors]:
        graph = functools.cache(lambda: tuple(function(leaf, targets)))
        return lambda: {"grad": gradient(graph(), keeps_graph=True)}

    ours = functools.partial(hpo.token_logprobs, backend=backend)
    everyone = [*PEERS, compiled()] if full and name != "backward" else PEERS  # a compiled graph is gone after its use
    present = [peer for peer in everyone if available(peer.package)]
    if name == "backward":
        kernels = resolve("logprobs", logits, backend)
        rows = LogitRows(logits, targets, None, 1.0, IGNORE, None, 0, vocabulary)
        given = (rows, kernels.token_logprobs(rows, 3)[2], of_logp, of_entropy, None)
        run = lambda: {"grad": kernels.token_logprobs_backward(*given)}  # noqa: E731
        contestants = [Contestant("hpo_core", run, at_most_floors(BACKWARD[dtype]), tolerance=WIDENED[dtype])]
        kept = torch.empty_like(words)
        theirs = [Contestant("a copy into memory that is there", lambda: {"copy": kept.copy_(words)}, alike=False)]
        theirs += [Contestant(peer.name, backward(peer.function), tolerance=peer.error[dtype]) for peer in present]
        floor: Callable[[], object] = words.clone  # fresh memory, which a gradient is
        moved = 2
    else:
        run_of = forward if name == "forward" else both
        contestants = [Contestant("hpo_core", functools.partial(run_of, ours), tolerance=WIDENED[dtype])]
        theirs = [
            Contestant(
                peer.name, functools.partial(run_of, peer.function), peer.goals.get(name), tolerance=peer.error[dtype]
            )
            for peer in present
        ]
        floor, moved = (lambda: (words.sum(), words.clone())), 3
        if name == "both":
            anchor, spent = torch.ones((), requires_grad=True), logits.clone()
            contestants.append(
                Contestant("hpo_core, gradient in place", in_place, alike=not full, tolerance=WIDENED[dtype])
            )
        if name == "forward":
            contestants = [
                contestants[0]._replace(goal=at_most_floors(FORWARD[dtype])),
                Contestant("hpo_core, no entropy", lambda: {"logp": ours(logits, targets, entropy=False).logp}),
            ]
            floor, moved = words.sum, 1
    return Case(
        op="token_logprobs",
        name=f"logp and entropy, {name}, {str(dtype).removeprefix('torch.')}, {tokens:,} x {vocabulary:,}",
        unit="logit",
        units=tokens * vocabulary,
        bytes_per_unit=moved * logits.element_size(),
        flops_per_unit=20.0 if name != "both" else 40.0,  # an exponential is 14 of them
        ours=contestants,
        peers=theirs,
        floor=floor,
        truth=None if full else functools.partial(_truth, logits, targets, of_logp, of_entropy),
    )


def _truth(logits: torch.Tensor, targets: torch.Tensor, of_logp: torch.Tensor, of_entropy: torch.Tensor) -> Tensors:
    leaf = logits.double().requires_grad_()
    rows = LogitRows(leaf, targets, None, 1.0, IGNORE, None, 0, leaf.shape[-1])
    logp, entropy, _ = reference.token_logprobs(rows, 3)
    assert entropy is not None
    (grad,) = torch.autograd.grad((logp, entropy), leaf, (of_logp.double(), of_entropy.double()))
    return {"logp": logp.detach(), "entropy": entropy.detach(), "grad": grad}


HEADLINE = (torch.float32, 1024, 32_000)
SIZES = (HEADLINE, (torch.bfloat16, 256, 151_936), (torch.float32, 64, 128_256))


def plans(quick: bool) -> list[Plan]:
    return [
        Plan(
            f"logprobs {name} {str(dtype).removeprefix('torch.')} {tokens} x {vocabulary}",
            functools.partial(case, dtype, name), {"tokens": tokens, "vocabulary": vocabulary},
            {"tokens": 7, "vocabulary": 1002},
        )
        for dtype, tokens, vocabulary in ((HEADLINE,) if quick else SIZES)
        for name in ("forward", "backward", "both")
    ]  # fmt: skip


test_logprobs = small_test(plans(quick=False))
