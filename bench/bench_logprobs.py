"""Log-probabilities and entropies from logits: forward, backward, and both."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import peers_logprobs as peers
import torch
from harness import Case, Contestant, Goal, Plan, Tensors, at_most_floors, available, slower_by, small_test

import hpo_core as hpo
from hpo_core.backends import resolve
from hpo_core.reference import logprobs as reference
from hpo_core.specs import LogitRows

IGNORE = -100
LIMIT = 6 << 30  # bytes that a call may hold beyond the logits
# What the notes on the CPU ask for, in floors of the same bytes.
FORWARD = {torch.float32: 1.4, torch.bfloat16: 1.8}
BACKWARD = {torch.float32: 1.25, torch.bfloat16: 1.9}

Function = Callable[[torch.Tensor, torch.Tensor], Any]


class Peer(NamedTuple):
    """``held``: bytes a logit that a call holds beyond the logits, as B/unit says, forward and in both directions;
    ``rows``: how many rows they are of in the forward, which some go through in chunks."""

    name: str
    package: str
    function: Function
    goals: dict[str, Goal]
    held: dict[torch.dtype, tuple[float, float]]
    error: dict[torch.dtype, float]  # of the largest element
    rows: int = 1 << 62

    def bytes_held(self, dtype: torch.dtype, name: str, tokens: int, vocabulary: int) -> float:
        forward, both = self.held[dtype]
        return vocabulary * (forward * min(tokens, self.rows) if name == "forward" else both * tokens)


WIDENED = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
ROUNDED = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # results are in the precision of the logits
PEERS = [
    Peer("eager", "torch", peers.eager, {"forward": slower_by(25), "both": slower_by(25)},
         {torch.float32: (12, 20), torch.bfloat16: (12, 20)}, WIDENED),
    Peer("TRL", "trl", peers.trl, {"both": slower_by(20)},
         {torch.float32: (12, 12), torch.bfloat16: (6, 9)}, ROUNDED, rows=128),
    Peer("verl", "verl", peers.verl, {},
         {torch.float32: (8, 24), torch.bfloat16: (4, 14)}, ROUNDED),
    Peer("verl, entropy in chunks", "verl", peers.verl_chunked, {},
         {torch.float32: (8, 24), torch.bfloat16: (12, 30)}, ROUNDED, rows=2048),
]  # fmt: skip


def compiled() -> Peer:
    """Made where it runs, because ``torch.compile`` imports Inductor, for which tests that import this file would
    wait."""
    return Peer(
        "torch.compile", "torch", torch.compile(peers.eager, dynamic=False),
        {"forward": slower_by(3.5), "both": slower_by(5)},
        {torch.float32: (0, 8), torch.bfloat16: (0, 14)}, WIDENED,
    )  # fmt: skip


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
    fitting, left_out = [], []
    for peer in everyone:
        held = peer.bytes_held(dtype, name, tokens, vocabulary)
        if held > LIMIT:
            left_out.append(f"{peer.name}, which would hold {held / 2**30:.0f} GiB")
        elif available(peer.package):
            fitting.append(peer)
    if name == "backward":
        kernels = resolve("logprobs", logits, backend)
        rows = LogitRows(logits, targets, None, 1.0, IGNORE, None, 0, vocabulary)
        given = (rows, kernels.token_logprobs(rows, 3)[2], of_logp, of_entropy, None)
        run = lambda: {"grad": kernels.token_logprobs_backward(*given)}  # noqa: E731
        contestants = [Contestant("hpo_core", run, at_most_floors(BACKWARD[dtype]), tolerance=WIDENED[dtype])]
        kept = torch.empty_like(words)
        theirs = [Contestant("a copy into memory that is there", lambda: {"copy": kept.copy_(words)}, alike=False)]
        theirs += [Contestant(peer.name, backward(peer.function), tolerance=peer.error[dtype]) for peer in fitting]
        floor: Callable[[], object] = words.clone  # fresh memory, which a gradient is
        moved = 2
    else:
        run_of = forward if name == "forward" else both
        contestants = [Contestant("hpo_core", functools.partial(run_of, ours), tolerance=WIDENED[dtype])]
        theirs = [
            Contestant(
                peer.name, functools.partial(run_of, peer.function), peer.goals.get(name), tolerance=peer.error[dtype]
            )
            for peer in fitting
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
        left_out=left_out,
    )


def _truth(logits: torch.Tensor, targets: torch.Tensor, of_logp: torch.Tensor, of_entropy: torch.Tensor) -> Tensors:
    leaf = logits.double().requires_grad_()
    rows = LogitRows(leaf, targets, None, 1.0, IGNORE, None, 0, leaf.shape[-1])
    logp, entropy, _ = reference.token_logprobs(rows, 3)
    assert entropy is not None
    (grad,) = torch.autograd.grad((logp, entropy), leaf, (of_logp.double(), of_entropy.double()))
    return {"logp": logp.detach(), "entropy": entropy.detach(), "grad": grad}


DIRECTIONS = ("forward", "backward", "both")
HEADLINE = (torch.float32, 1024, 32_000, DIRECTIONS)
SIZES = (HEADLINE, (torch.bfloat16, 256, 151_936, DIRECTIONS), (torch.float32, 64, 128_256, DIRECTIONS))
# Minutes each: a call of a peer takes many seconds.
LARGE = (
    (torch.bfloat16, 1024, 151_936, ("both",)),
    (torch.float32, 4096, 32_000, ("both",)),
    (torch.float32, 8192, 32_000, ("forward",)),
    (torch.bfloat16, 65_536, 32_000, ("forward",)),
)


def plans_of(sizes: Sequence[Any]) -> list[Plan]:
    return [
        Plan(
            f"logprobs {name} {str(dtype).removeprefix('torch.')} {tokens} x {vocabulary}",
            functools.partial(case, dtype, name), {"tokens": tokens, "vocabulary": vocabulary},
            {"tokens": 7, "vocabulary": 1002},
        )
        for dtype, tokens, vocabulary, names in sizes
        for name in names
    ]  # fmt: skip


def plans(quick: bool) -> list[Plan]:
    return plans_of([HEADLINE] if quick else SIZES)


def large() -> list[Plan]:
    return plans_of(LARGE)


test_logprobs = small_test(plans(quick=False))
