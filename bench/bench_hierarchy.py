"""Hierarchical gates, depth 1 to 5, on packed rows."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import peers_gates
import torch
from bench_gates import FIBERPO, STATISTICS, TOKEN_GATE, floor, ours, packed_batch, truth
from harness import Case, Contestant, Plan, small_test
from peers_gates import Packed, Run

import hpo_core as hpo
from hpo_core.gates import Clip, Level, LogClip, RatioGate, Rollback, Unit

STEP, GROUP, DOMAIN = 64, 8, 64  # tokens of a step; rows of a group and of a domain
LEVEL = 6  # FLOP of a token for each level: two sums, the residual, the gradient in the aggregate
# The units of each depth, from the finest to the coarsest; the token's own gate is depth 1.
UNITS = {1: (), 2: ("trajectory",), 3: ("step", "trajectory"), 4: ("step", "trajectory", "group")}
UNITS[5] = (*UNITS[4], "domain")
TOKEN_BOUND, BUDGET = 0.05, 0.02


Segments = dict[str, torch.Tensor]  # [T] int64 each: the segment of every token at a level


def tree(tokens: int, rows: int) -> tuple[Packed, hpo.PackedBatch, Segments]:
    data, rows_alone = packed_batch(FIBERPO, tokens, rows)
    offsets, row = rows_alone.cu_seqlens, data.row
    starts = ((torch.arange(tokens) - offsets[row]) % STEP == 0).nonzero().flatten()
    cu_steps = torch.cat([starts, torch.tensor([tokens])])
    step = torch.repeat_interleave(torch.arange(len(starts)), cu_steps.diff())
    ids = torch.arange(rows)
    batch = hpo.PackedBatch(offsets, cu_steps=cu_steps, group_ids=ids // GROUP, domain_ids=ids // DOMAIN)
    return data, batch, {"step": step, "trajectory": row, "group": row // GROUP, "domain": row // DOMAIN}


def gate_of_depth(depth: int) -> RatioGate:
    levels = tuple(Level(Rollback((BUDGET, BUDGET), 2.0), unit=Unit[name.upper()]) for name in UNITS[depth])
    if not levels:  # the clip of a ratio itself is given in ratios
        return RatioGate("depth 1", Clip((math.exp(-TOKEN_BOUND),) * 2, (math.exp(TOKEN_BOUND),) * 2))
    return RatioGate(f"depth {depth}", LogClip((-TOKEN_BOUND,) * 2, (TOKEN_BOUND,) * 2), levels)


def formula(depth: int, data: Packed, segments: Segments, leaf: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Means by index_add, each less its parent's, gated, and added up; and the metrics that trainers log."""
    log_ratio, means = leaf - data.old_logp, []
    for name in UNITS[depth]:
        segment = segments[name]
        zeros = log_ratio.new_zeros(data.logp.numel() if name == "step" else data.weights.numel())
        count = zeros.index_add(0, segment, torch.ones_like(log_ratio))
        means.append((zeros.index_add(0, segment, log_ratio) / count.clamp(min=1))[segment])
    means.append(torch.zeros_like(log_ratio))
    z = (log_ratio - means[0]).clamp(-TOKEN_BOUND, TOKEN_BOUND)
    for mean, parent in itertools.pairwise(means):
        u = mean - parent
        back = torch.sign(u) * (3 * BUDGET - 2 * u.abs()).clamp(min=0)
        z = z + torch.where(u.abs() <= BUDGET, u, back)
    advantages = data.advantages[data.row]
    loss = -(data.weights[data.row] * z.exp() * advantages).sum()
    return loss, peers_gates.logged(FIBERPO, log_ratio, advantages, None)


def depth_case(depth: int, *, tokens: int, rows: int, full: bool, backend: str | None) -> Case:
    data, batch, segments = tree(tokens, rows)
    gate, options = gate_of_depth(depth), {"advantage_level": "row"}

    def peer(loss_of: Any) -> Run:
        return peers_gates.differentiated(data.logp, lambda leaf: loss_of(depth, data, segments, leaf)[0])

    others = [Contestant("eager", peer(formula))]
    if full:
        others.append(Contestant("compile", peer(torch.compile(formula, dynamic=False))))
    return Case(
        op="policy_loss",
        name=f"depth {depth}, {tokens:,} tokens in {rows:,} ragged rows",
        unit="token",
        units=tokens,
        bytes_per_unit=12,
        flops_per_unit=STATISTICS + TOKEN_GATE + LEVEL * (depth - 1),
        ours=ours(gate, data, batch, backend, {}, **options),
        peers=others,
        floor=floor(FIBERPO, data),
        truth=None if full else functools.partial(truth, gate, data, batch, **options),
    )


def plans(quick: bool) -> list[Plan]:
    def depth(levels: int, tokens: int, rows: int) -> Plan:
        small = {"tokens": 900, "rows": min(rows, 20)}
        name = f"depth {levels} {tokens} tokens in {rows} rows"
        return Plan(name, functools.partial(depth_case, levels), {"tokens": tokens, "rows": rows}, small)

    if quick:
        return [depth(5, 1 << 20, 512)]
    sizes = ((1 << 20, 512), (1 << 20, 50_000), (1 << 12, 2))
    return [depth(levels, *size) for size in sizes for levels in UNITS]


test_hierarchical_gates = small_test(plans(quick=True))
