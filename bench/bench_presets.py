"""Every gate preset with its default numbers, forward and backward, next to eager PyTorch and to verl's loss of it."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import bench_gates
import peers_presets as peers
import torch
from bench_gates import STATISTICS, TOKEN_GATE, some_advantages
from harness import Case, Contestant, Plan, Tensors, at_most_floors, available, slower_by, small_test
from peers_gates import differentiated
from peers_presets import DOMAIN, GROUP, Rows

import hpo_core as hpo
from hpo_core import gates
from hpo_core.gates import GateInputs, RatioGate

STEP = 64  # tokens of a step
MADE = ", mask made"  # a case whose calls make the preset's input, too
ON_POLICY = ", on policy"  # a case without old_logp
SHORT = ", short rows"  # a case whose inputs come from memory, next to the floor alone

# Rows and not tokens count alike in the methods of sequences; the sum of a row counts in three.
BY_SEQUENCE = {"apc", "fiberpo", "fiberpo_domain", "gmpo", "gspo", "gspo_token", "sapo", "step_gspo", "two_scale"}
BY_SUM = {"a_lol", "luspo", "p3o"}
# How far log-ratios spread: so that the bounds of the preset catch some of them.
SPREAD = {"apc": 0.125} | dict.fromkeys(
    ("a_lol", "gspo", "gspo_token", "luspo", "p3o", "step_gspo", "topr", "vespo"), 0.01
)
GOALS = {"eager": slower_by(10), "verl": slower_by(10)}
SHORT_GOALS = {False: at_most_floors(6), True: at_most_floors(15)}  # by whether the gate has levels


def presets() -> dict[str, RatioGate]:
    """The gate that each constructor makes by default."""
    spaces = (gates, gates.reconstructed)
    found = {name: getattr(space, name) for space in spaces for name in space.__all__ if name != "compose"}
    made = {name: fn for name, fn in found.items() if inspect.isfunction(fn)}
    return {name: fn() for name, fn in made.items() if inspect.signature(fn).return_annotation == "RatioGate"}


PRESETS = presets()


def mode_of(name: str) -> str:
    """verl's name of the aggregation."""
    if name in BY_SEQUENCE:
        return "seq-mean-token-mean"
    return "seq-mean-token-sum" if name in BY_SUM else "token-mean"


def on_grid(values: torch.Tensor, step: int) -> torch.Tensor:
    """The middles of intervals of ``1 / step``, whose sums and differences are exact: no contestant rounds one over a
    bound, and none is 0, where absolute values have a kink."""
    return ((values * step).floor() + 0.5) / step


def batch_of(name: str, rows: int, length: int, ragged: bool) -> tuple[Rows, hpo.PackedBatch]:
    draw = torch.Generator().manual_seed(7)
    size = (rows, length)
    lengths = torch.randint(1, length + 1, (rows, 1), generator=draw) if ragged else torch.full((rows, 1), length)
    mask = torch.arange(length) < lengths
    old_logp = on_grid(-1 - 4 * torch.rand(size, generator=draw), 256)
    logp = old_logp + on_grid(SPREAD.get(name, 0.15) * torch.randn(size, generator=draw), 1024)
    rollout_logp = old_logp + on_grid(0.05 * torch.randn(size, generator=draw), 1024)

    starts = torch.arange(0, length, STEP)
    begin = (torch.arange(rows)[:, None] * length + starts).flatten()
    cu_steps = torch.cat([begin, torch.tensor([rows * length])])
    row_of_step = torch.arange(rows).repeat_interleave(len(starts))
    step = torch.arange(len(begin)).repeat_interleave(cu_steps.diff())

    row, pairs = torch.arange(rows), name == "p3o"
    ids = {"group_ids": row // (2 if pairs else GROUP), "domain_ids": row // DOMAIN}
    batch = hpo.PackedBatch.from_padded(mask, cu_steps=cu_steps, **ids)
    data = Rows(
        logp, old_logp, rollout_logp, mask, some_advantages(rows, draw), weights_of(name, batch),
        low=0.7 + 0.25 * torch.rand(size, generator=draw), high=1.05 + 0.25 * torch.rand(size, generator=draw),
        token_mask=torch.rand(size, generator=draw) < 0.9, penalty_mask=torch.rand(size, generator=draw) < 0.1,
        token_weight=0.5 + torch.rand(size, generator=draw), target=0.2 + 0.6 * torch.rand(rows, generator=draw),
        step=step, row_of_step=row_of_step,
    )  # fmt: skip
    return data, batch


def weights_of(name: str, batch: hpo.PackedBatch) -> torch.Tensor:
    mode = mode_of(name)
    weigh = {
        "token-mean": hpo.aggregation.token_mean, "seq-mean-token-mean": hpo.aggregation.seq_mean_token_mean,
        "seq-mean-token-sum": hpo.aggregation.seq_mean_token_sum,
    }  # fmt: skip
    return weigh[mode](batch)


def given(gate: RatioGate, data: Rows) -> dict[str, Any]:
    """The inputs of the preset beside the batch, as policy_loss takes them."""
    inputs = {
        "bounds": (data.low, data.high), "token_mask": data.token_mask, "penalty_mask": data.penalty_mask,
        "token_weight": data.token_weight, "target": data.target,
    }  # fmt: skip
    # Two inputs of one function: fipo_weight makes a mask besides.
    wanted = {*gate.required} | ({"token_mask"} if gate.name == "fipo" else set())
    found: dict[str, Any] = {name: values for name, values in inputs.items() if name in wanted}
    options: dict[str, Any] = {"gate_inputs": GateInputs(**found)} if found else {}
    return options | ({"rollout_logp": data.rollout_logp} if gate.reads_rollout else {})


def making(name: str, batch: hpo.PackedBatch, data: Rows) -> Any:
    """The mask of a preset from the log-probabilities of the call, in the shape of these."""
    packed = hpo.PackedBatch(batch.cu_seqlens, batch.mask)
    shape, old_logp = data.logp.shape, data.old_logp.flatten()

    def made(logp: torch.Tensor) -> dict[str, Any]:
        flat = logp.detach().flatten()
        if name == "kl_cov":
            inputs = gates.kl_cov_mask(flat, data.advantages, packed)
        else:
            inputs = gates.clip_cov_mask(flat, old_logp, data.advantages, packed, seed=1)
        return {"gate_inputs": inputs.on_tokens(lambda values: values.view(shape), per_token=False)}

    return made


def truth(gate: RatioGate, data: Rows, batch: hpo.PackedBatch, options: dict[str, Any] | None = None) -> Tensors:
    """The float64 definition."""
    return bench_gates.truth(gate, data, batch, **(given(gate, data) if options is None else options))


def tensors_in(options: dict[str, Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in options.values():
        each = [*value, *(value.bounds or ())] if isinstance(value, GateInputs) else [value]
        found += [tensor for tensor in each if isinstance(tensor, torch.Tensor)]
    return found


def case(name: str, kind: str, *, rows: int, length: int, full: bool, backend: str | None) -> Case:
    data, batch = batch_of(name, rows, length, ragged=not full)
    gate, title, makes, on_policy = PRESETS[name], name + kind, kind == MADE, kind == ON_POLICY
    if on_policy:
        data = data._replace(old_logp=data.logp)
    old_logp, width = (None, 8) if on_policy else (data.old_logp, 12)
    options = given(gate, data)
    made = making(name, batch, data) if makes else lambda logp: options

    def call(leaf: torch.Tensor) -> torch.Tensor:
        return hpo.policy_loss(
            leaf, old_logp, data.advantages, batch, gate, weights=data.weights, backend=backend, **made(leaf)
        ).loss

    def without_autograd() -> Tensors:
        result = hpo.policy_loss_and_grad(
            data.logp, old_logp, data.advantages, batch, gate, weights=data.weights, backend=backend,
            **made(data.logp),
        )  # fmt: skip
        return {"loss": result.loss, "grad": result.grad}

    makers = {"kl_cov": peers.with_penalty_mask, "clip_cov": peers.with_token_mask}
    eager = peers.eager(name, data, makers[name] if makes else None)
    # The eager formula of clip_cov draws other tokens; there is none without an old policy, whose statistics it logs.
    alone = on_policy or kind == SHORT
    others = [] if alone else [Contestant("eager", eager, GOALS["eager"], alike=title != "clip_cov" + MADE)]
    if title in peers.VERL and available("verl"):
        peer = peers.VERL[title]
        others.append(Contestant("verl", peers.verl(peer, data, mode_of(name)), GOALS["verl"], peer.alike))

    out = torch.empty_like(data.logp)
    read = [tensor for tensor in tensors_in(options) if tensor.shape == data.logp.shape]
    summed = [
        tensor.flatten().view(torch.float32) if tensor.dtype is torch.bool else tensor for tensor in (data.mask, *read)
    ]

    def floor() -> None:
        torch.add(data.logp, 1.0, out=out) if on_policy else torch.add(data.logp, data.old_logp, out=out)
        for tensor in summed:
            tensor.sum()

    return Case(
        op="preset",
        name=f"{title}, {rows:,} rows of {length:,}",
        unit="token",
        units=rows * length,
        bytes_per_unit=width + 1 + sum(tensor.element_size() for tensor in read),  # the mask of the batch, too
        flops_per_unit=STATISTICS + TOKEN_GATE,
        ours=[
            Contestant("hpo_core", differentiated(data.logp, call), tolerance=2e-6),
            Contestant(
                "hpo_core, no autograd",
                without_autograd,
                SHORT_GOALS[bool(gate.levels)] if kind == SHORT else None,
                tolerance=2e-6,
            ),
        ],
        peers=others,
        floor=floor,
        truth=None if full else lambda: truth(gate, data, batch, made(data.logp)),
        cold=kind == SHORT,
    )


def plans(quick: bool) -> list[Plan]:
    long = {"rows": 512, "length": 2048}, {"rows": 64, "length": 132}
    short = {"rows": 50_000, "length": 21}, {"rows": 64, "length": 21}
    every = [(name, "") for name in PRESETS]
    every += [("clip_cov", MADE), ("kl_cov", MADE), ("reinforce", ON_POLICY)]
    every += [(name, SHORT) for name in PRESETS]
    return [
        Plan(
            f"presets: {name}{kind}",
            functools.partial(case, name, kind),
            *(short if kind == SHORT else long),
            seconds=2.0,
        )
        for name, kind in ([("dppo_kl", "")] if quick else every)
    ]


test_presets = small_test(plans(quick=True))
