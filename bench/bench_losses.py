"""The single call over the three pillars: group advantages, an entropy window with its threshold, a gated loss."""

from __future__ import annotations

import functools
from typing import Any

import peers_advantages
import peers_entropy
import peers_gates
import pytest
import torch
from bench_gates import GSPO, SEQUENCE_GATE, STATISTICS, gate_of, log_probabilities
from harness import Case, Contestant, Plan, Tensors, check

import hpo_core as hpo

WIDTH, KEEP = 4, 0.05
GROUP = 8


def case(*, rows: int, length: int, full: bool, backend: str | None) -> Case:
    generator = torch.Generator().manual_seed(0)
    everything = torch.ones(rows, length, dtype=torch.bool)
    logp, old_logp = log_probabilities(GSPO, everything)
    entropy = torch.rand(rows, length, generator=generator)
    rewards = torch.randn(rows, generator=generator)
    ids = torch.arange(rows) // GROUP
    batch = hpo.PackedBatch(torch.arange(rows + 1) * length, group_ids=ids)
    weights = hpo.aggregation.seq_mean_token_mean(batch)

    def single_call(kind: torch.dtype = torch.float32, chosen: str | None = backend) -> Tensors:
        return peers_gates.differentiate(
            logp.flatten().to(kind),
            lambda leaf: hpo.hierarchical_policy_loss(
                leaf, old_logp.flatten().to(kind), rewards.to(kind), batch, gate=gate_of(GSPO),
                window=hpo.entropy.ares(WIDTH), entropy=entropy.flatten().to(kind), weights=weights, backend=chosen,
            ).loss,
        )  # fmt: skip

    formula = peers_gates.padded_formula(GSPO)

    def by_hand(leaf: torch.Tensor) -> torch.Tensor:
        advantages = peers_advantages.scatter(rewards, ids, rows // GROUP)
        score = peers_entropy.average_pool(entropy, WIDTH)["score"].view(rows, length)
        defined = score[:, : length - WIDTH + 1].flatten()
        threshold = defined.kthvalue(peers_entropy.rank(defined.numel(), KEEP)).values
        data = peers_gates.Padded(leaf, old_logp, old_logp, score, everything, advantages, weights)
        return formula(leaf, data, advantages[:, None], threshold)[0]

    def flat(loss_of: Any) -> Tensors:
        result = peers_gates.differentiate(logp, loss_of)
        return {"loss": result["loss"], "grad": result["grad"].flatten()}

    others = [Contestant("eager", lambda: flat(by_hand))]
    if full:
        compiled = torch.compile(by_hand, dynamic=False)
        others.append(Contestant("compile", lambda: flat(compiled)))
    score, inputs = torch.empty_like(entropy), (logp, old_logp)
    out = torch.empty_like(entropy)

    def floor() -> None:
        torch.neg(entropy, out=score)
        score.sum()
        torch.addcmul(*inputs, score, out=out)

    return Case(
        op="hierarchical_policy_loss",
        name=f"grpo + gspo + ares, {rows:,} rows of {length:,}",
        unit="token",
        units=rows * length,
        bytes_per_unit=28,  # entropy to score; the score for the threshold; logp, old_logp and score to the gradient
        flops_per_unit=WIDTH + 2 + SEQUENCE_GATE + STATISTICS,
        ours=[Contestant("hpo_core", single_call, tolerance=2e-6)],
        peers=others,
        floor=floor,
        truth=None if full else functools.partial(single_call, torch.float64, "reference"),
    )


def plans(quick: bool) -> list[Plan]:
    del quick  # the one case everybody wants to see
    return [Plan("single call", case, {"rows": 512, "length": 2048}, {"rows": 16, "length": 30})]


@pytest.mark.parametrize("plan", plans(quick=True), ids=lambda plan: plan.name)
def test_hierarchical_policy_loss(plan: Plan, benchmark: Any) -> None:
    small = plan.small_case()
    check(small)
    benchmark(small.ours[0].run)
