"""The policy loss, forward and backward: common gates, thousands to a million tokens, one row to a hundred thousand."""

from __future__ import annotations

import functools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import peers_gates as peers
import torch
from harness import (
    Case,
    Contestant,
    Goal,
    Plan,
    Tensors,
    at_most_floors,
    at_most_milliseconds,
    available,
    slower_by,
    small_test,
)
from peers_gates import Objective, Packed, Padded

import hpo_core as hpo
from hpo_core.backends import resolve
from hpo_core.specs import PolicyLossInputs

REINFORCE = Objective("reinforce")
PPO = Objective("ppo_clip", 0.2, 0.2)
DAPO = Objective("dapo", 0.2, 0.28)
CISPO = Objective("cispo", 0.0, 0.28)
GSPO = Objective("gspo", 3e-4, 4e-4)
GSPO_TOKEN = Objective("gspo_token", 3e-4, 4e-4)
FIBERPO = Objective("fiberpo", 0.2, 0.2)  # the clip of tokens, the budgets of rows

# Arithmetic of one token. An exponential is a reduction (2 multiply-adds) and a polynomial of degree 6, scaled: 18.
EXP = 18
TOKEN_GATE = 7  # both products, the clip's two bounds, the smaller one, the weight, the gradient
SEQUENCE_GATE = 2  # the mean log-ratio, the gradient
STATISTICS = 1 + EXP + 10  # log-ratio and ratio; sums of x, x^2, r - 1, (r - 1)^2, extrema, counts beyond each bound
PENALTY = EXP + 7


def gate_of(objective: Objective) -> hpo.gates.RatioGate:
    if objective.gate == "reinforce":
        return hpo.gates.reinforce()
    if objective.gate == "cispo":
        return hpo.gates.cispo(ratio_cap=1 + objective.high)
    if objective.gate == "fiberpo":
        return hpo.gates.fiberpo(objective.low, (objective.high, objective.high))
    gate: hpo.gates.RatioGate = getattr(hpo.gates, objective.gate)(objective.low, objective.high)
    return gate


def log_probabilities(objective: Objective, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """logp and old_logp. Log-ratios spread so that either bound catches some of them, and none lies on a bound."""
    generator = torch.Generator().manual_seed(0)
    old_logp = -torch.rand(mask.shape, generator=generator) * 4
    spread = 0.01 if objective.of_sequences else 0.15
    log_ratio = torch.randn(mask.shape, generator=generator) * spread
    return old_logp + log_ratio, old_logp


def some_advantages(rows: int, generator: torch.Generator) -> torch.Tensor:
    """Advantages of both signs, but not around 0: the loss would be the rest of terms that cancel."""
    return torch.randn(rows, generator=generator) + 0.5


def padded_batch(objective: Objective, rows: int, length: int, ragged: bool) -> tuple[Padded, hpo.PackedBatch]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, length + 1, (rows, 1), generator=generator) if ragged else torch.full((rows, 1), length)
    mask = torch.arange(length) < lengths
    logp, old_logp = log_probabilities(objective, mask)
    batch = hpo.PackedBatch.from_padded(mask)
    ref_logp = logp + 0.1 * torch.randn(mask.shape, generator=generator)
    entropy = torch.rand(mask.shape, generator=generator)
    advantages = some_advantages(rows, generator)
    return Padded(logp, old_logp, ref_logp, entropy, mask, advantages, weights(objective, batch)), batch


def packed_batch(objective: Objective, tokens: int, rows: int) -> tuple[Packed, hpo.PackedBatch]:
    """Rows of random lengths that add up to ``tokens``."""
    generator = torch.Generator().manual_seed(2)
    cuts = torch.randperm(tokens - 1, generator=generator)[: rows - 1].sort().values + 1
    offsets = torch.cat([torch.tensor([0]), cuts, torch.tensor([tokens])])
    lengths = offsets.diff()
    batch = hpo.PackedBatch(offsets)
    logp, old_logp = log_probabilities(objective, torch.ones(tokens))
    row = torch.repeat_interleave(torch.arange(rows), lengths)
    advantages = some_advantages(rows, generator)
    return Packed(logp, old_logp, row, lengths, advantages, weights(objective, batch)), batch


def weights(objective: Objective, batch: hpo.PackedBatch) -> torch.Tensor:
    mode = hpo.aggregation.seq_mean_token_mean if objective.of_sequences else hpo.aggregation.token_mean
    return mode(batch)


# ----------------------------------------------------------------------------------------------------------------- ours


def ours(
    gate: hpo.gates.RatioGate,
    data: Padded | Packed,
    batch: hpo.PackedBatch,
    backend: str | None,
    goals: dict[str, Goal],
    **options: Any,
) -> list[Contestant]:
    """The loss with autograd, the same without, and the kernel alone with everything checked and prepared."""
    options |= {"weights": data.weights, "backend": backend}

    def without_autograd() -> Tensors:
        result = hpo.policy_loss_and_grad(data.logp, data.old_logp, data.advantages, batch, gate, **options)
        return {"loss": result.loss, "grad": result.grad}

    found = [("hpo_core", with_autograd(gate, data, batch, **options)), ("hpo_core, no autograd", without_autograd)]
    if gate.has_fast_path and not {"window", "kl"} & options.keys() and not gate.spec().is_hierarchical:
        found.append(("hpo_core, kernel alone", kernel_alone(gate, data, batch, backend)))
    return [Contestant(name, run, goals.get(name), tolerance=2e-6) for name, run in found]


def with_autograd(gate: hpo.gates.RatioGate, data: Any, batch: hpo.PackedBatch, **options: Any) -> peers.Run:
    """The loss and its backward. ``data``: the tensors of a batch, in the shape of its tokens."""
    return peers.differentiated(
        data.logp, lambda leaf: hpo.policy_loss(leaf, data.old_logp, data.advantages, batch, gate, **options).loss
    )


def extras(objective: Objective, data: Padded | Packed) -> dict[str, Any]:
    """The penalty and the window, as policy_loss takes them; only padded batches have their inputs."""
    found: dict[str, Any] = {}
    if isinstance(data, Padded) and objective.beta:
        found |= {"ref_logp": data.ref_logp, "kl": hpo.kl.k3(objective.beta)}
    if isinstance(data, Padded) and objective.keep < 1:
        window = hpo.entropy.forking_tokens(Fraction(str(objective.keep)), scope="call")
        found |= {"entropy": data.entropy, "window": window}
    return found


def kernel_alone(
    gate: hpo.gates.RatioGate, data: Padded | Packed, batch: hpo.PackedBatch, backend: str | None
) -> peers.Run:
    op, spec = resolve("gates", data.logp, backend), gate.spec()
    inputs = PolicyLossInputs(data.logp, data.old_logp, data.advantages, data.weights, batch.cu_seqlens, batch.mask)

    def run() -> Tensors:
        loss, _, grad, _ = op.policy_loss(inputs, spec, True, False)
        return {"loss": loss, "grad": grad}

    return run


def exact(value: Any) -> Any:
    """In float64, whatever holds the tensors."""
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {name: exact(each) for name, each in value.items()}
    if isinstance(value, tuple):
        return type(value)(*map(exact, value)) if hasattr(value, "_fields") else tuple(map(exact, value))
    return value


def truth(gate: hpo.gates.RatioGate, data: Any, batch: hpo.PackedBatch, **options: Any) -> Tensors:
    """The float64 definition. Weights are rounded to float32 by everybody, and exact from there."""
    data, options = exact(data), exact(options)
    result = hpo.policy_loss_and_grad(
        data.logp, data.old_logp, data.advantages, batch, gate, weights=data.weights, backend="reference", **options
    )
    return {"loss": result.loss, "grad": result.grad}


# ---------------------------------------------------------------------------------------------------------------- cases


def padded_case(
    objective: Objective,
    goals: dict[str, Goal],
    compiled: bool,
    *,
    rows: int,
    length: int,
    full: bool,
    backend: str | None,
) -> Case:
    """``[B, L]`` with a mask, as trainers hold it."""
    data, batch = padded_batch(objective, rows, length, ragged=not full)
    others = [Contestant("eager", peers.eager(objective, data), goals.get("eager"))]
    if full and compiled:
        name = "compile, advantages expanded"
        others.append(Contestant(name, peers.compiled(objective, data, expanded=True), goals.get(name)))
        others.append(Contestant("compile, advantages per row", peers.compiled(objective, data, expanded=False)))
    if "hpo_core" in goals:  # the goal is on the cost of autograd, so the least such cost is worth knowing
        others.append(Contestant("autograd alone", peers.autograd_alone(data), alike=False))
    others += [
        Contestant(package, contestant(objective, data), goals.get(package))
        for package, contestant in (("verl", peers.verl), ("trl", peers.trl), ("liger_kernel", peers.liger))
        if available(package) and knows(package, objective)
    ]
    return Case(
        op="policy_loss",
        name=f"{describe(objective)}, {rows:,} rows of {length:,}",
        unit="token",
        units=rows * length,
        bytes_per_unit=bytes_per_token(objective) + 1,  # the mask
        flops_per_unit=flops_per_token(objective),
        ours=ours(gate_of(objective), data, batch, backend, goals, **extras(objective, data)),
        peers=others,
        floor=floor(objective, data, data.mask.flatten()),
        truth=None if full else functools.partial(truth, gate_of(objective), data, batch, **extras(objective, data)),
    )


def knows(package: str, objective: Objective) -> bool:
    """Whether a trainer's loss has this gate, and this selection."""
    if objective.gate == "reinforce":
        return package == "verl"
    return objective.keep == 1 or package == "trl"


def packed_case(
    objective: Objective,
    goals: dict[str, Goal],
    compiled: bool,
    cold: bool,
    masked: bool,
    *,
    tokens: int,
    rows: int,
    full: bool,
    backend: str | None,
) -> Case:
    """Rows of any length. ``cold``: from memory, next to the floor alone. ``masked``: with a mask of ones."""
    data, batch = packed_batch(objective, tokens, rows)
    if masked:
        batch = hpo.PackedBatch(batch.cu_seqlens, mask=torch.ones(tokens, dtype=torch.bool))
    size = f"{tokens:,} tokens in {'one row' if rows == 1 else f'{rows:,} ragged rows'}"
    others = [] if cold else [Contestant("eager", peers.eager_packed(objective, data), goals.get("eager"))]
    if full and compiled:
        name = "compile, advantages gathered"
        others.append(Contestant(name, peers.compiled_packed(objective, data), goals.get(name)))
    return Case(
        op="policy_loss",
        name=f"{describe(objective)}, {size}{', masked' * masked}{', cold' * cold}",
        unit="token",
        units=tokens,
        bytes_per_unit=bytes_per_token(objective) + masked,
        flops_per_unit=flops_per_token(objective),
        ours=ours(gate_of(objective), data, batch, backend, goals, **extras(objective, data)),
        peers=others,
        floor=floor(objective, data, batch.mask),
        truth=None if full else functools.partial(truth, gate_of(objective), data, batch, **extras(objective, data)),
        cold=cold,
    )


def describe(objective: Objective) -> str:
    penalty = " + k3" if objective.beta else ""
    window = f" + top {objective.keep:.0%} by entropy" if objective.keep < 1 else ""
    return objective.gate + penalty + window


def bytes_per_token(objective: Objective) -> int:
    """Read logp and old_logp, write the gradient; ref_logp; the entropy, for the threshold and again for the loss."""
    return 12 + (4 if objective.beta else 0) + (8 if objective.keep < 1 else 0)


def flops_per_token(objective: Objective) -> int:
    gate = SEQUENCE_GATE if objective.of_sequences else TOKEN_GATE
    return gate + STATISTICS + (PENALTY if objective.beta else 0)


def floor(objective: Objective, data: Padded | Packed, mask: torch.Tensor | None = None) -> Callable[[], None]:
    """The same bytes through torch's own loops: inputs added into the gradient's place, the rest summed."""
    out = torch.empty_like(data.logp)
    summed = [] if mask is None else [mask.view(torch.float32)]
    if isinstance(data, Padded):
        summed += [data.entropy, data.entropy] if objective.keep < 1 else []
        summed += [data.ref_logp] if objective.beta else []

    def run() -> None:
        torch.add(data.logp, data.old_logp, out=out)
        for tensor in summed:
            tensor.sum()

    return run


TOKEN_GOALS = {
    "hpo_core, no autograd": at_most_floors(2.5),
    "eager": slower_by(30),
    "verl": slower_by(30),
    "liger_kernel": slower_by(20),  # TRL's formula, without its logging
    "trl": slower_by(20),
    "compile, advantages expanded": slower_by(4),
}
SEQUENCE_GOALS = {"hpo_core, no autograd": at_most_floors(2.5), "verl": slower_by(30)}
TWO_LEVEL_GOALS = {
    "hpo_core, no autograd": at_most_floors(4),
    "eager": slower_by(30),
    "compile, advantages gathered": slower_by(20),
}
TWO_LEVEL_COLD_GOALS = {"hpo_core, no autograd": at_most_floors(6)}
COLD_GOALS = {"hpo_core, no autograd": at_most_floors(2)}
TINY_GOALS = {"hpo_core": at_most_milliseconds(0.060), "hpo_core, kernel alone": at_most_milliseconds(0.010)}


def padded(
    objective: Objective, rows: int, length: int, goals: dict[str, Goal] | None = None, compiled: bool = False
) -> Plan:
    name = f"{describe(objective)} {rows} x {length}"
    build = functools.partial(padded_case, objective, goals or {}, compiled)
    return Plan(name, build, {"rows": rows, "length": length}, {"rows": 8, "length": 48})


def packed(
    objective: Objective,
    tokens: int,
    rows: int,
    goals: dict[str, Goal] | None = None,
    compiled: bool = False,
    cold: bool = False,
    masked: bool = False,
) -> Plan:
    name = f"{describe(objective)} {tokens} tokens in {rows} rows{' masked' * masked}{' cold' * cold}"
    build = functools.partial(packed_case, objective, goals or {}, compiled, cold, masked)
    return Plan(name, build, {"tokens": tokens, "rows": rows}, {"tokens": 600, "rows": min(rows, 40)})


def plans(quick: bool) -> list[Plan]:
    million = 1 << 20
    headline = [
        padded(PPO, 512, 2048, TOKEN_GOALS, compiled=True),
        padded(GSPO, 512, 2048, SEQUENCE_GOALS, compiled=not quick),
        padded(PPO, 2, 2048, TINY_GOALS),
    ]
    if quick:
        return headline
    return [
        *headline,
        packed(PPO, million, 512, COLD_GOALS, cold=True),
        packed(GSPO, million, 512, COLD_GOALS, cold=True),
        packed(FIBERPO, million, 512, TWO_LEVEL_COLD_GOALS, cold=True),
        packed(FIBERPO, million, 512, TWO_LEVEL_GOALS, compiled=True, masked=True),
        packed(FIBERPO, million, 512),
        packed(FIBERPO, million, 50_000),
        packed(PPO, million, 512, compiled=True),
        packed(GSPO, million, 512, compiled=True),
        padded(PPO, 50_000, 21, TOKEN_GOALS, compiled=True),
        padded(GSPO, 50_000, 21, SEQUENCE_GOALS, compiled=True),
        padded(GSPO_TOKEN, 512, 2048, SEQUENCE_GOALS),
        padded(REINFORCE, 512, 2048),
        padded(DAPO, 512, 2048, TOKEN_GOALS),
        padded(CISPO, 512, 2048),
        padded(PPO._replace(beta=0.04), 512, 2048, compiled=True),
        padded(PPO._replace(keep=0.2), 512, 2048),
        padded(PPO, 32, 2048, compiled=True),
        padded(GSPO, 32, 2048),
        padded(GSPO, 2, 2048, TINY_GOALS, compiled=True),
        packed(PPO, 1_000_000, 1),
        packed(GSPO, 1_000_000, 1),
        packed(PPO, 1_000_000, 100_000),
        packed(GSPO, 1_000_000, 100_000),
    ]


test_policy_loss = small_test(plans(quick=True))
