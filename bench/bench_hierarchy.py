"""Hierarchical gates: depth 1 to 5 on packed rows, other gates next to verl's own, and the single call with FiberPO."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any, NamedTuple

import peers_advantages
import peers_entropy
import peers_gates
import pytest
import torch
from bench_gates import FIBERPO, STATISTICS, TOKEN_GATE, gate_of, log_probabilities, some_advantages
from harness import Case, Contestant, Plan, Tensors, available, check

import hpo_core as hpo
from hpo_core.gates import Clip, Level, LogClip, RatioGate, Rollback, Unit

STEP, GROUP, DOMAIN = 64, 8, 64  # tokens of a step; rows of a group and of a domain
LEVEL = 6  # FLOP of a token for each level: two sums, the residual, what flows back
# From the finest to the coarsest; the token's own gate is depth 1.
UNITS = {1: (), 2: ("trajectory",), 3: ("step", "trajectory"), 4: ("step", "trajectory", "group")}
UNITS[5] = (*UNITS[4], "domain")
TOKEN_BOUND, BUDGET = 0.05, 0.02


class Tree(NamedTuple):
    """Rows of any length, end to end, and the segment of each token at every level."""

    logp: torch.Tensor  # [T]
    old_logp: torch.Tensor  # [T]
    segment: dict[str, torch.Tensor]  # [T] int64 each
    advantages: torch.Tensor  # [S]
    weights: torch.Tensor  # [S]


def tree(tokens: int, rows: int) -> tuple[Tree, hpo.PackedBatch]:
    draw = torch.Generator().manual_seed(3)
    cuts = torch.randperm(tokens - 1, generator=draw)[: rows - 1].sort().values + 1
    offsets = torch.cat([torch.tensor([0]), cuts, torch.tensor([tokens])])
    row = torch.repeat_interleave(torch.arange(rows), offsets.diff())
    starts = ((torch.arange(tokens) - offsets[row]) % STEP == 0).nonzero().flatten()
    cu_steps = torch.cat([starts, torch.tensor([tokens])])
    step = torch.repeat_interleave(torch.arange(len(starts)), cu_steps.diff())
    ids = torch.arange(rows)
    batch = hpo.PackedBatch(offsets, cu_steps=cu_steps, group_ids=ids // GROUP, domain_ids=ids // DOMAIN)
    logp, old_logp = log_probabilities(FIBERPO, torch.ones(tokens))
    segment = {"step": step, "trajectory": row, "group": row // GROUP, "domain": row // DOMAIN}
    weights = hpo.aggregation.token_mean(batch)
    return Tree(logp, old_logp, segment, some_advantages(rows, draw), weights), batch


def gate_of_depth(depth: int) -> RatioGate:
    levels = tuple(Level(Rollback((BUDGET, BUDGET), 2.0), unit=Unit[name.upper()]) for name in UNITS[depth])
    if not levels:  # the clip of a ratio itself is given in ratios
        return RatioGate("depth 1", Clip((math.exp(-TOKEN_BOUND),) * 2, (math.exp(TOKEN_BOUND),) * 2))
    return RatioGate(f"depth {depth}", LogClip((-TOKEN_BOUND,) * 2, (TOKEN_BOUND,) * 2), levels)


def formula(depth: int, data: Tree, leaf: torch.Tensor) -> torch.Tensor:
    """Means by index_add, each less its parent's, gated, and added up; and what trainers log."""
    log_ratio = leaf - data.old_logp
    row = data.segment["trajectory"]
    means = []
    for name in UNITS[depth]:
        segment = data.segment[name]
        zeros = log_ratio.new_zeros(data.logp.numel() if name == "step" else data.weights.numel())
        count = zeros.index_add(0, segment, torch.ones_like(log_ratio))
        means.append((zeros.index_add(0, segment, log_ratio) / count.clamp(min=1))[segment])
    means.append(torch.zeros_like(log_ratio))
    z = (log_ratio - means[0]).clamp(-TOKEN_BOUND, TOKEN_BOUND)
    for mean, parent in itertools.pairwise(means):
        u = mean - parent
        back = torch.sign(u) * (3 * BUDGET - 2 * u.abs()).clamp(min=0)
        z = z + torch.where(u.abs() <= BUDGET, u, back)
    advantages = data.advantages[row]
    peers_gates.logged(FIBERPO, log_ratio, advantages, None)
    return -(data.weights[row] * z.exp() * advantages).sum()


def depth_case(depth: int, *, tokens: int, rows: int, full: bool, backend: str | None) -> Case:
    data, batch = tree(tokens, rows)
    gate = gate_of_depth(depth)

    def with_autograd(kind: torch.dtype = torch.float32, chosen: str | None = backend) -> Tensors:
        logp, old_logp, advantages, weights = (
            tensor.to(kind) for tensor in (data.logp, data.old_logp, data.advantages, data.weights)
        )
        return peers_gates.differentiate(
            logp,
            lambda leaf: (
                hpo.policy_loss(
                    leaf, old_logp, advantages, batch, gate, weights=weights, advantage_level="row", backend=chosen
                ).loss
            ),
        )

    def without_autograd() -> Tensors:
        result = hpo.policy_loss_and_grad(
            data.logp, data.old_logp, data.advantages, batch, gate, weights=data.weights, advantage_level="row",
            backend=backend,
        )  # fmt: skip
        return {"loss": result.loss, "grad": result.grad}

    def eager(loss_of: Any = formula) -> Tensors:
        return peers_gates.differentiate(data.logp, lambda leaf: loss_of(depth, data, leaf))

    others = [Contestant("eager", eager)]
    if full:
        others.append(Contestant("compile", functools.partial(eager, torch.compile(formula, dynamic=False))))
    out = torch.empty_like(data.logp)
    return Case(
        op="policy_loss",
        name=f"depth {depth}, {tokens:,} tokens in {rows:,} ragged rows",
        unit="token",
        units=tokens,
        bytes_per_unit=12,
        flops_per_unit=STATISTICS + TOKEN_GATE + LEVEL * (depth - 1),
        ours=[Contestant("hpo_core", with_autograd, tolerance=2e-6), Contestant("no autograd", without_autograd)],
        peers=others,
        floor=lambda: torch.add(data.logp, data.old_logp, out=out),
        truth=None if full else functools.partial(with_autograd, torch.float64, "reference"),
    )


# --------------------------------------------------------------------------------------------------- next to verl's own

# verl's name: (our gate, whether rows count alike, fields of its ActorConfig)
LIKE_VERL: dict[str, tuple[RatioGate, bool, dict[str, float]]] = {
    "sapo": (hpo.gates.sapo(1.0, 1.05), True, {"tau_pos": 1.0, "tau_neg": 1.05}),
    "geo_mean": (hpo.gates.gmpo(0.1, 0.15), True, {"clip_ratio_low": 0.1, "clip_ratio_high": 0.15}),
    "dppo_tv": (
        hpo.gates.dppo_tv(0.04, 0.03, 1.2),
        False,
        {"clip_ratio_low": 0.04, "clip_ratio_high": 0.03, "clip_ratio_c": 1.2},
    ),
    "dppo_kl": (hpo.gates.dppo_kl(0.004, 3.0), False, {"clip_ratio_low": 0.004, "clip_ratio_high": 0.004}),
}


def verl_case(name: str, *, rows: int, length: int, full: bool, backend: str | None) -> Case:
    gate, rows_alike, config = LIKE_VERL[name]
    draw = torch.Generator().manual_seed(4)
    mask = torch.ones(rows, length, dtype=torch.bool)
    logp, old_logp = (values - 1 for values in log_probabilities(FIBERPO, mask))  # no probability above 1
    batch, advantages = hpo.PackedBatch.from_padded(mask), some_advantages(rows, draw)
    weights = (hpo.aggregation.seq_mean_token_mean if rows_alike else hpo.aggregation.token_mean)(batch)

    def ours(kind: torch.dtype = torch.float32, chosen: str | None = backend) -> Tensors:
        return peers_gates.differentiate(
            logp.to(kind),
            lambda leaf: (
                hpo.policy_loss(
                    leaf, old_logp.to(kind), advantages.to(kind), batch, gate, weights=weights, backend=chosen
                ).loss
            ),
        )

    def without_autograd() -> Tensors:
        result = hpo.policy_loss_and_grad(logp, old_logp, advantages, batch, gate, weights=weights, backend=backend)
        return {"loss": result.loss, "grad": result.grad}

    others = []
    if available("verl"):
        from verl.trainer.ppo.core_algos import get_policy_loss_fn
        from verl.workers.config import ActorConfig

        settings = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **config)
        loss_fn, valid = get_policy_loss_fn(name), mask.long()
        mode = "seq-mean-token-mean" if rows_alike else "token-mean"
        expanded = advantages[:, None].expand(rows, length).contiguous()

        def verl() -> Tensors:
            return peers_gates.differentiate(
                logp, lambda leaf: loss_fn(old_logp, leaf, expanded, valid, mode, settings)[0]
            )

        others.append(Contestant("verl", verl))
    out = torch.empty_like(logp)
    return Case(
        op="policy_loss",
        name=f"{gate.name}, {rows:,} rows of {length:,}",
        unit="token",
        units=rows * length,
        bytes_per_unit=12,
        flops_per_unit=STATISTICS + TOKEN_GATE,
        ours=[Contestant("hpo_core", ours, tolerance=2e-6), Contestant("no autograd", without_autograd)],
        peers=others,
        floor=lambda: torch.add(logp, old_logp, out=out),
        truth=None if full else functools.partial(ours, torch.float64, "reference"),
    )


# ------------------------------------------------------------------------------------------------------ the single call

WIDTH, KEEP = 4, 0.05


def single_call_case(*, rows: int, length: int, full: bool, backend: str | None) -> Case:
    draw = torch.Generator().manual_seed(5)
    logp, old_logp = log_probabilities(FIBERPO, torch.ones(rows * length))
    entropy, rewards = torch.rand(rows * length, generator=draw), torch.randn(rows, generator=draw)
    ids, row = torch.arange(rows) // GROUP, torch.repeat_interleave(torch.arange(rows), length)
    batch = hpo.PackedBatch(torch.arange(rows + 1) * length, group_ids=ids)
    weights = hpo.aggregation.token_mean(batch)
    window, gate = hpo.entropy.ares(WIDTH), gate_of(FIBERPO)
    options = {"gate": gate, "window": window, "entropy": entropy, "weights": weights}

    def single_call(kind: torch.dtype = torch.float32, chosen: str | None = backend) -> Tensors:
        given = {
            name: value.to(kind) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
            for name, value in options.items()
        }
        return peers_gates.differentiate(
            logp.to(kind),
            lambda leaf: (
                hpo.hierarchical_policy_loss(
                    leaf, old_logp.to(kind), rewards.to(kind), batch, backend=chosen, **given
                ).loss
            ),
        )

    def three_calls() -> Tensors:
        advantages = hpo.advantages.grpo(rewards, ids, backend=backend)
        threshold = window.fit(entropy, batch, backend=backend)
        given = {**options, "threshold": threshold, "backend": backend}
        return peers_gates.differentiate(
            logp, lambda leaf: hpo.policy_loss(leaf, old_logp, advantages, batch, **given).loss
        )

    def by_hand(leaf: torch.Tensor) -> torch.Tensor:
        advantages = peers_advantages.scatter(rewards, ids, rows // GROUP)
        score = peers_entropy.average_pool(entropy.view(rows, length), WIDTH)["score"].view(rows, length)
        defined = score[:, : length - WIDTH + 1].flatten()
        threshold = defined.kthvalue(peers_entropy.rank(defined.numel(), KEEP)).values
        log_ratio = leaf - old_logp
        data = peers_gates.Packed(leaf, old_logp, row, batch.row_counts, advantages, weights)
        z = peers_gates.fiberpo_log_ratio(FIBERPO, log_ratio, data)
        chosen = torch.where(score.flatten() >= threshold, advantages[row], 0.0)
        peers_gates.logged(FIBERPO, log_ratio, advantages[row], None)
        return -(weights[row] * z.exp() * chosen).sum()

    out = torch.empty_like(entropy)

    def floor() -> None:
        torch.neg(entropy, out=out)
        out.sum()
        torch.addcmul(logp, old_logp, out, out=out)

    return Case(
        op="hierarchical_policy_loss",
        name=f"grpo + fiberpo + ares, {rows:,} rows of {length:,}",
        unit="token",
        units=rows * length,
        bytes_per_unit=28,  # entropy to score; the score for the threshold; logp, old_logp and score to the gradient
        flops_per_unit=WIDTH + 2 + LEVEL + TOKEN_GATE + STATISTICS,
        ours=[
            Contestant("hpo_core", single_call, tolerance=2e-6),
            Contestant("hpo_core, three calls", three_calls, tolerance=0.0 if full else 2e-6),
        ],
        peers=[Contestant("eager", lambda: peers_gates.differentiate(logp, by_hand))],
        floor=floor,
        truth=None if full else functools.partial(single_call, torch.float64, "reference"),
    )


def plans(quick: bool) -> list[Plan]:
    def depth(levels: int, tokens: int, rows: int) -> Plan:
        small = {"tokens": 900, "rows": min(rows, 20)}
        name = f"depth {levels} {tokens} tokens in {rows} rows"
        return Plan(name, functools.partial(depth_case, levels), {"tokens": tokens, "rows": rows}, small)

    single = Plan("single call fiberpo", single_call_case, {"rows": 512, "length": 2048}, {"rows": 16, "length": 30})
    if quick:
        return [single, depth(5, 1 << 20, 512)]
    others = [
        Plan(name, functools.partial(verl_case, name), {"rows": 512, "length": 2048}, {"rows": 8, "length": 48})
        for name in LIKE_VERL
    ]
    sizes = ((1 << 20, 512), (1 << 20, 50_000), (1 << 12, 2))
    return [single, *(depth(levels, *size) for size in sizes for levels in UNITS), *others]


@pytest.mark.parametrize("plan", plans(quick=True), ids=lambda plan: plan.name)
def test_hierarchical_gates(plan: Plan, benchmark: Any) -> None:
    small = plan.small_case()
    check(small)
    benchmark(small.ours[0].run)
