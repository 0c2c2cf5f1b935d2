"""The single call over the three pillars: group advantages, an entropy window with its threshold, a gated loss."""

from __future__ import annotations

import functools
from typing import Any

import peers_advantages
import peers_entropy
import peers_gates
import torch
from bench_gates import FIBERPO, GSPO, SEQUENCE_GATE, STATISTICS, TOKEN_GATE, gate_of, padded_batch
from harness import Case, Contestant, Plan, small_test
from peers_gates import Objective, Packed, Padded, Run

import hpo_core as hpo

WIDTH, KEEP = 4, 0.05
GROUP = 8
STEPS = 6  # of a row, for estimators of steps


def formula(objective: Objective, data: Padded, advantages: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    """Score, threshold and loss by hand on ``[B, L]``."""
    score = peers_entropy.average_pool(data.entropy, WIDTH)["score"].view(data.entropy.shape)
    defined = score[:, : score.shape[1] - WIDTH + 1].flatten()
    threshold = defined.kthvalue(peers_entropy.rank(defined.numel(), KEEP)).values
    if objective.gate == "fiberpo":
        rows, length = data.mask.shape
        row = torch.repeat_interleave(torch.arange(rows), length)
        packed = Packed(
            leaf.flatten(), data.old_logp.flatten(), row, torch.full((rows,), length), advantages, data.weights
        )
        log_ratio = packed.logp - packed.old_logp
        peers_gates.logged(objective, log_ratio, advantages[row], None)
        z = peers_gates.fiberpo_log_ratio(objective, log_ratio, packed)
        loss = -(z.exp().view(leaf.shape) * advantages[:, None] * (score >= threshold))
        return (data.weights * loss.sum(-1)).sum()
    of_windows = data._replace(logp=leaf, entropy=score)
    return peers_gates.padded_formula(objective)(leaf, of_windows, advantages[:, None], threshold)[0]


def case(objective: Objective, of_steps: bool, *, rows: int, length: int, full: bool, backend: str | None) -> Case:
    """``of_steps``: gigpo over steps of the rows' tokens instead of grpo."""
    draw = torch.Generator().manual_seed(0)
    ids, gate, window = torch.arange(rows) // GROUP, gate_of(objective), hpo.entropy.ares(WIDTH)
    data, _ = padded_batch(objective, rows, length, ragged=False)
    steps = torch.arange(STEPS * rows + 1) * length // STEPS if of_steps else None
    batch = hpo.PackedBatch(torch.arange(rows + 1) * length, cu_steps=steps, group_ids=ids)
    entropy, old_logp = data.entropy.flatten(), data.old_logp.flatten()
    rewards = torch.randn(STEPS * rows if of_steps else rows, generator=draw)
    anchors = torch.randint(0, 6, rewards.shape, generator=draw)
    estimator = functools.partial(hpo.advantages.gigpo, anchor_ids=anchors) if of_steps else hpo.advantages.grpo

    def single_call(kind: torch.dtype = torch.float32, chosen: str | None = backend) -> Run:
        old, scores, given = (tensor.to(kind) for tensor in (old_logp, entropy, rewards))
        return peers_gates.differentiated(
            data.logp.flatten().to(kind),
            lambda leaf: hpo.hierarchical_policy_loss(
                leaf, old, given, batch, advantage=estimator, gate=gate, window=window, entropy=scores,
                weights=data.weights, backend=chosen,
            ).loss,
        )  # fmt: skip

    def three_calls(leaf: torch.Tensor) -> torch.Tensor:
        given = batch.ids_of_steps() if of_steps else {"group_ids": ids}
        advantages = estimator(rewards, **given, backend=backend)
        threshold = window.fit(entropy, batch, backend=backend)
        return hpo.policy_loss(
            leaf, old_logp, advantages, batch, gate, advantage_level="step" if of_steps else "row", window=window,
            entropy=entropy, threshold=threshold, weights=data.weights, backend=backend,
        ).loss  # fmt: skip

    def by_hand(loss_of: Any) -> Run:
        def loss(leaf: torch.Tensor) -> torch.Tensor:
            advantages = peers_advantages.scatter(rewards, ids, rows // GROUP)
            return loss_of(objective, data, advantages, leaf.view(data.logp.shape))

        return peers_gates.differentiated(data.logp.flatten(), loss)

    others = [] if of_steps else [Contestant("eager", by_hand(formula))]
    if full and not of_steps:
        others.append(Contestant("compile", by_hand(torch.compile(formula, dynamic=False))))
    score, out = torch.empty_like(entropy), torch.empty_like(entropy)

    def floor() -> None:
        torch.neg(entropy, out=score)
        score.sum()
        torch.addcmul(data.logp.flatten(), old_logp, score, out=out)

    return Case(
        op="hierarchical_policy_loss",
        name=f"{'gigpo' if of_steps else 'grpo'} + {objective.gate} + ares, {rows:,} rows of {length:,}",
        unit="token",
        units=rows * length,
        bytes_per_unit=28,  # entropy to score; the score for the threshold; logp, old_logp and score to the gradient
        flops_per_unit=WIDTH + 2 + STATISTICS + (SEQUENCE_GATE if objective.of_sequences else TOKEN_GATE),
        ours=[
            Contestant("hpo_core", single_call(), tolerance=2e-6),
            # to the bit: the single call is these three
            Contestant(
                "hpo_core, three calls",
                peers_gates.differentiated(data.logp.flatten(), three_calls),
                tolerance=0.0 if full else 2e-6,
            ),
        ],
        peers=others,
        floor=floor,
        truth=None if full else single_call(torch.float64, "reference"),
    )


def plans(quick: bool) -> list[Plan]:
    sizes = {"rows": 512, "length": 2048}, {"rows": 16, "length": 30}
    pillars = [(GSPO, False)] if quick else [(GSPO, False), (FIBERPO, False), (FIBERPO, True)]
    return [
        Plan(
            f"single call {objective.gate}{', steps' * of_steps}", functools.partial(case, objective, of_steps), *sizes
        )
        for objective, of_steps in pillars
    ]


test_hierarchical_policy_loss = small_test(plans(quick=True))
