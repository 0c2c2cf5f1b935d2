"""The calls that `make gpu-check` times: each op on cuda and triton, and next to it eager PyTorch, torch.compile and
Liger.

Data are those of the benches of the CPU, moved to the GPU; larger tensors are drawn there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import bench_gates as gates
import bench_presets as presets
import peers_advantages
import peers_gates
import peers_logprobs
import peers_presets
import torch
from bench_logprobs import Computed
from harness import Tensors, available
from peers_gates import Objective, Padded, differentiated
from peers_presets import Rows

import hpo_core as hpo

PENALISED = gates.PPO._replace(beta=0.04)
TIMED = (gates.PPO, gates.GSPO, gates.CISPO, PENALISED)
SHAPES = ((2, 2048), (64, 2048), (512, 2048), (8192, 2048))
LARGE = ("fiberpo", "sapo", "dppo_tv")  # presets that are timed beyond the L2 cache, too
LAUNCHES = {"cuda": 3, "triton": 5}  # the limit of a loss, from the call to the gradient, aten's included
LAUNCHES_OF_SINGLE_CALL = 8


class Run(NamedTuple):
    case: str
    contestant: str
    call: Callable[[], Tensors]
    bytes: int  # each input read once, each output written once
    launches: int | None = None  # the limit


def runs(backend: str) -> Iterator[Run]:
    """``backend``: one of hpo_core, or "peers"."""
    yield from losses(backend)
    yield from every_preset(backend)
    yield from logits(backend)
    yield from hidden_states(backend)
    for tokens in (100_000, 10_000_000):
        yield from peers_of_others(tokens) if backend == "peers" else others(backend, tokens, "cuda")
    if backend != "peers":
        yield from single_calls(backend)


# --------------------------------------------------------------------------------------------------------------- losses


def on(device: str, objective: Objective, rows: int, length: int, ragged: bool) -> tuple[Padded, hpo.PackedBatch]:
    data, batch = gates.padded_batch(objective, rows, length, ragged)
    return Padded(*(tensor.to(device) for tensor in data)), batch.to(device)


def losses(backend: str) -> Iterator[Run]:
    for objective in TIMED:
        for rows, length in SHAPES:
            data, batch = on("cuda", objective, rows, length, ragged=False)
            case = f"{gates.describe(objective)}, {rows} x {length}"
            size = rows * length * (gates.bytes_per_token(objective) + 1)
            if backend == "peers":
                yield Run(case, "eager", peers_gates.eager(objective, data), size)
                yield Run(case, "autograd alone", peers_gates.autograd_alone(data), size)
                if (rows, length) == SHAPES[2]:
                    yield Run(case, "torch.compile", peers_gates.compiled(objective, data, expanded=True), size)
                continue
            gate, options = gates.gate_of(objective), gates.extras(objective, data)
            for name, call, *_ in gates.ours(gate, data, batch, backend, {}, **options):
                yield Run(case, f"{backend}: {name}", call, size, LAUNCHES[backend])


def preset_on(device: str, name: str, rows: int, length: int, ragged: bool) -> tuple[Rows, hpo.PackedBatch]:
    data, batch = presets.batch_of(name, rows, length, ragged)
    return Rows(*(tensor.to(device) for tensor in data)), batch.to(device)


def loss_of_preset(name: str, data: Rows, batch: hpo.PackedBatch, backend: str) -> Callable[[], Tensors]:
    gate = presets.PRESETS[name]
    return gates.with_autograd(gate, data, batch, weights=data.weights, backend=backend, **presets.given(gate, data))


def every_preset(backend: str) -> Iterator[Run]:
    """All at 2^20 tokens, some at 2^24; not held to a number of launches, which the page of the kernels lists."""
    for rows, names in ((512, list(presets.PRESETS)), (8192, LARGE)):
        for name in names:
            data, batch = preset_on("cuda", name, rows, 2048, ragged=False)
            read = [
                tensor
                for tensor in presets.tensors_in(presets.given(presets.PRESETS[name], data))
                if tensor.shape == data.logp.shape
            ]
            size = data.logp.numel() * (13 + sum(tensor.element_size() for tensor in read))
            if backend == "peers":
                yield Run(f"{name}, {rows} x 2048", "eager", peers_presets.eager(name, data), size)
            else:
                yield Run(f"{name}, {rows} x 2048", backend, loss_of_preset(name, data, batch, backend), size)


def single_calls(backend: str) -> Iterator[Run]:
    for rows, length in SHAPES[1:3]:
        data, _ = on("cuda", gates.GSPO, rows, length, ragged=False)
        offsets = torch.arange(rows + 1, device="cuda") * length
        batch = hpo.PackedBatch(offsets, group_ids=torch.arange(rows, device="cuda") // 8)
        call = single_call(data, batch, backend)
        case, size = f"grpo + gspo + ares, {rows} x {length}", 28 * rows * length
        yield Run(case, f"{backend}: hpo_core", call, size, LAUNCHES_OF_SINGLE_CALL)


def single_call(data: Padded, batch: hpo.PackedBatch, backend: str) -> Callable[[], Tensors]:
    def loss_of(leaf: torch.Tensor) -> torch.Tensor:
        return hpo.hierarchical_policy_loss(
            leaf, data.old_logp.view(-1), data.advantages, batch, gate=hpo.gates.gspo(), window=hpo.entropy.ares(),
            entropy=data.entropy.view(-1), weights=data.weights, backend=backend,
        ).loss  # fmt: skip

    return differentiated(data.logp.view(-1), loss_of)


# ------------------------------------------------------------------------------------------------ logits, hidden states


def logits(backend: str) -> Iterator[Run]:
    for dtype, tokens, vocabulary in (
        (torch.bfloat16, 8192, 151_936), (torch.bfloat16, 1024, 151_936), (torch.float32, 8192, 32_000),
    ):  # fmt: skip
        draw = torch.Generator("cuda").manual_seed(0)
        values = torch.randn(tokens, vocabulary, generator=draw, dtype=dtype, device="cuda").mul_(3)
        targets = torch.randint(0, vocabulary, (tokens,), generator=draw, device="cuda")
        upstream = torch.randn(2, tokens, generator=draw, device="cuda").unbind()
        size = f"{str(dtype).removeprefix('torch.')}, {tokens} x {vocabulary}"
        number = values.numel() * values.element_size()
        forward, both = f"logits forward, {size}", f"logits both, {size}"
        if backend == "peers":
            functions: dict[str, Callable[..., Any]] = {"eager": peers_logprobs.eager}
            functions["torch.compile"] = torch.compile(peers_logprobs.eager, dynamic=False)
        else:
            functions = {backend: functools.partial(hpo.token_logprobs, backend=backend)}
        for name, function in functions.items():
            yield Run(forward, name, functools.partial(without_gradient, function, values, targets), number)
            leaf = values.detach().requires_grad_()
            yield Run(both, name, functools.partial(with_gradient, function, (leaf,), targets, upstream), 3 * number)
        if backend != "peers":
            alone = functools.partial(hpo.token_logprobs, backend=backend, entropy=False)
            run = functools.partial(without_gradient, alone, values, targets)
            yield Run(forward, f"{backend}, no entropy", run, number)
            yield Run(both, f"{backend}, in place", in_place(backend, values, targets, upstream), 3 * number)
            yield Run(f"loss from logits, {size}", backend, loss_from_logits(backend, values, targets), 3 * number)


def without_gradient(function: Callable[..., Any], *arguments: torch.Tensor) -> Tensors:
    with torch.no_grad():
        logp, entropy = function(*arguments)
    return {"logp": logp} if entropy is None else {"logp": logp, "entropy": entropy}


def with_gradient(
    function: Callable[..., Any],
    leaves: tuple[torch.Tensor, ...],
    targets: torch.Tensor,
    upstream: tuple[torch.Tensor, ...],
) -> Tensors:
    results = function(*leaves, targets)
    given = [each.to(result.dtype) for each, result in zip(upstream, results, strict=True)]
    found = torch.autograd.grad(tuple(results), leaves, given)
    return {f"grad {place}": gradient for place, gradient in enumerate(found)}


def in_place(
    backend: str, values: torch.Tensor, targets: torch.Tensor, upstream: tuple[torch.Tensor, ...]
) -> Callable[[], Tensors]:
    """Logits as a model computes them; gradients of earlier calls are logits of later ones."""
    anchor, spent = torch.ones((), device="cuda", requires_grad=True), values.clone()

    def run() -> Tensors:
        computed = Computed.apply(anchor, spent)
        results = hpo.token_logprobs(computed, targets, inplace_gradient=True, backend=backend)
        (grad,) = torch.autograd.grad(tuple(results), computed, upstream)
        return {"grad": grad}

    return run


def loss_from_logits(backend: str, values: torch.Tensor, targets: torch.Tensor) -> Callable[[], Tensors]:
    rows = 8
    batch = hpo.PackedBatch(torch.arange(rows + 1, device="cuda") * (len(values) // rows)).without_first_tokens()
    advantages = torch.randn(rows, device="cuda")
    leaf = values.detach().requires_grad_()

    def run() -> Tensors:
        loss = hpo.policy_loss_from_logits(leaf, targets, None, advantages, batch, backend=backend).loss
        return {"grad": torch.autograd.grad(loss, leaf)[0]}

    return run


def hidden_states(backend: str) -> Iterator[Run]:
    """Hidden states beside their matrix products alone: one for logits; in both directions that twice, and two more."""
    tokens, width, vocabulary = 4096, 2048, 151_936
    draw = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(tokens, width, generator=draw, dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(vocabulary, width, generator=draw, dtype=torch.bfloat16, device="cuda").mul_(3 * width**-0.5)
    targets = torch.randint(0, vocabulary, (tokens,), generator=draw, device="cuda")
    upstream = torch.randn(2, tokens, generator=draw, device="cuda").unbind()
    moved = 2 * (hidden.numel() + weight.numel())
    size = f"bfloat16, {tokens} x {width} x {vocabulary}"
    if backend == "peers":
        functions: dict[str, Callable[..., Any]] = {"eager": peers_logprobs.eager_of_hidden}
        if available("liger_kernel"):
            functions["Liger"] = peers_logprobs.liger_fused
        block = torch.empty(tokens, vocabulary, dtype=torch.bfloat16, device="cuda")
        product = functools.partial(products, hidden, weight, block)
        yield Run(f"hidden forward, {size}", "one product", functools.partial(product, backward=False), moved)
        yield Run(f"hidden both, {size}", "four products", functools.partial(product, backward=True), 3 * moved)
    else:
        functions = {backend: functools.partial(hpo.linear_token_logprobs, backend=backend)}
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    for name, function in functions.items():
        forward = functools.partial(without_gradient, function, hidden, weight, targets)
        yield Run(f"hidden forward, {size}", name, forward, moved)
        both = functools.partial(with_gradient, function, leaves, targets, upstream)
        yield Run(f"hidden both, {size}", name, both, 3 * moved)


def products(hidden: torch.Tensor, weight: torch.Tensor, block: torch.Tensor, backward: bool) -> Tensors:
    torch.mm(hidden, weight.t(), out=block)
    if not backward:
        return {"logits": block}
    torch.mm(hidden, weight.t(), out=block)
    return {"hidden": block @ weight, "weight": block.t() @ hidden}


# --------------------------------------------------------------------------------------------------- without a gradient


def others(backend: str, tokens: int, device: str) -> Iterator[Run]:
    """The ops without a gradient."""
    entropy, rewards, ids = values_of(tokens, device, torch.float64 if backend == "reference" else torch.float32)
    batch = hpo.PackedBatch(torch.arange(0, tokens + 1, 100, device=device))
    window = hpo.entropy.forking_tokens(Fraction(1, 5))

    def selected() -> torch.Tensor:
        return hpo.entropy.top_k(entropy, batch, tokens // 5, scope="call", backend=backend)

    calls: dict[str, tuple[Callable[[], Tensors], int]] = {
        "group_normalise": (lambda: {"value": hpo.advantages.grpo(rewards, ids, backend=backend)}, 16),
        "window_score": (lambda: {"value": hpo.entropy.window_mean(entropy, batch, 0, 3, backend=backend)}, 8),
        "order_statistic": (lambda: {"value": window.fit_score(entropy, backend=backend).threshold}, 4),
        "order_statistics": (lambda: {"value": hpo.entropy.quantiles(entropy, batch, "0.8", backend=backend)}, 4),
        "select_exact": (lambda: {"value": selected().to(entropy.dtype)}, 5),
    }
    for name, (call, size) in calls.items():
        yield Run(f"{name}, {tokens:,}", f"{backend}: hpo_core", call, size * tokens)


def values_of(tokens: int, device: str, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    entropy = torch.rand(tokens, generator=draw).to(device, kind)
    rewards = (100 + torch.randn(tokens, generator=draw)).to(device, kind)
    return entropy, rewards, torch.arange(tokens, device=device) // 8


def peers_of_others(tokens: int) -> Iterator[Run]:
    """In rows and groups of one length, as a padded trainer has them."""
    entropy, rewards, ids = values_of(tokens, "cuda", torch.float32)
    kept = tokens // 5
    calls: dict[str, tuple[Callable[[], Tensors], int]] = {
        "group_normalise": (lambda: {"value": peers_advantages.scatter(rewards, ids, tokens // 8)}, 16),
        "order_statistic": (lambda: {"value": entropy.kthvalue(tokens - kept + 1).values}, 4),
        "order_statistics": (lambda: {"value": entropy.view(-1, 100).quantile(0.8, dim=-1)}, 4),
        "select_exact": (lambda: {"value": entropy.topk(kept).indices}, 5),
    }
    for name, (call, size) in calls.items():
        yield Run(f"{name}, {tokens:,}", "eager", call, size * tokens)
