"""Group statistics: 100,000 rewards in 12,500 groups, around an offset of 100 that costs float32 sums their digits."""

from __future__ import annotations

import functools
from collections.abc import Callable

import peers_advantages as peers
import torch
from harness import Case, Contestant, Goal, Plan, Tensors, available, slower_by, small_test

import hpo_core as hpo

OFFSET = 100.0
NEAR_EXACT = 1e-7  # relative to the largest advantage
LEAST = 4  # of a group
LOSSY = 1e-3  # the error of sums in float32 at this offset


def rewards_and_ids(groups: int, per_group: int, dense: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Rewards ``[S]`` of ragged groups, and ids that count 0, 1, ... in group order, or are any integers in any
    order."""
    generator = torch.Generator().manual_seed(0)
    rewards = OFFSET + torch.randn(groups * per_group, generator=generator)
    more = torch.randint(groups, (groups * (per_group - LEAST),), generator=generator)
    ids = torch.cat((torch.arange(groups).repeat_interleave(LEAST), more)).sort().values
    if not dense:
        ids = torch.randint(1 << 62, (groups,), generator=generator)[ids]
        ids = ids[torch.randperm(ids.numel(), generator=generator)]
    return rewards, ids


def exact(rewards: torch.Tensor, ids: torch.Tensor) -> Tensors:
    """Two passes in float64."""
    _, dense = ids.unique(return_inverse=True)
    return {"advantages": peers.normalised(rewards.double(), dense)}


def case(dense: bool, loop: bool, *, groups: int, per_group: int, full: bool, backend: str | None) -> Case:
    rewards, ids = rewards_and_ids(groups, per_group, dense)

    def ours() -> Tensors:
        return {"advantages": hpo.advantages.grpo(rewards, ids, backend=backend)}

    found: dict[str, tuple[Callable[[], torch.Tensor], Goal | None]] = {}
    if dense:
        found["scatter"] = (lambda: peers.scatter(rewards, ids, groups), slower_by(1.5))
        if full:
            compiled = torch.compile(peers.scatter, dynamic=False)
            found["compile"] = (lambda: compiled(rewards, ids, groups), None)
        if available("verl"):
            found["verl, vectorised"] = (peers.verl_vectorised(rewards, ids.numpy()), slower_by(1.5))
        if available("verl") and loop:
            found["verl, loop over a dictionary"] = (peers.verl_loop(rewards, ids.numpy()), slower_by(1000))
    else:  # verl's vectorised form allocates as many groups as the largest id
        found["unique and scatter"] = (lambda: peers.scatter_any_ids(rewards, ids), slower_by(1.5))
    others = [
        Contestant(name, functools.partial(_named, run), goal, tolerance=LOSSY) for name, (run, goal) in found.items()
    ]
    out, id_words = torch.empty_like(rewards), ids.view(torch.float64)

    def floor() -> None:
        torch.neg(rewards, out=out)
        id_words.sum()

    return Case(
        op="group_normalise",
        name=f"grpo, {rewards.numel():,} rewards in {groups:,} groups, {'dense ids' if dense else 'any ids'}",
        unit="reward",
        units=rewards.numel(),
        bytes_per_unit=16,  # read the reward and its id, write the advantage
        flops_per_unit=6,  # relative to a member, twice: sum; square and sum; scale
        ours=[Contestant("hpo_core", ours, tolerance=NEAR_EXACT)],
        peers=others,
        floor=floor,
        truth=functools.partial(exact, rewards, ids),
    )


def steps_case(*, groups: int, per_group: int, full: bool, backend: str | None) -> Case:
    """GiGPO: trajectories of 10 steps, 8 of a prompt, which meet in the same observations."""
    generator = torch.Generator().manual_seed(0)
    length, steps = 10, groups * per_group * 10
    trajectories = torch.arange(groups * per_group).repeat_interleave(length)
    prompts = trajectories // per_group
    rewards = torch.zeros(steps)
    rewards[length - 1 :: length] = torch.randint(0, 2, (groups * per_group,), generator=generator).float()
    anchors = torch.randint(0, 6, (steps,), generator=generator)
    given = (rewards, prompts, trajectories, anchors)

    def ours() -> Tensors:
        return {"advantages": hpo.advantages.gigpo(*given, backend=backend)}

    others = [Contestant("scatter", lambda: _named(lambda: peers.gigpo_scatter(*given)), slower_by(1.5))]
    if not full:
        others.append(Contestant("loop over a dictionary", lambda: _named(lambda: peers.gigpo_loop(*given))))
    out = torch.empty_like(rewards)

    def floor() -> None:
        torch.neg(rewards, out=out)
        for ids in given[1:]:
            ids.view(torch.float64).sum()

    return Case(
        op="group_normalise",
        name=f"gigpo, {steps:,} steps of {groups * per_group:,} trajectories",
        unit="step",
        units=steps,
        bytes_per_unit=32,  # read the reward and three ids, write the advantage
        flops_per_unit=20,
        ours=[Contestant("hpo_core", ours, tolerance=LOSSY)],
        peers=others,
        floor=floor,
        truth=lambda: {"advantages": peers.gigpo_scatter(rewards.double(), *given[1:])},
    )


def _named(run: Callable[[], torch.Tensor]) -> Tensors:
    return {"advantages": run()}


def plans(quick: bool) -> list[Plan]:
    size, small = {"groups": 12_500, "per_group": 8}, {"groups": 50, "per_group": 8}
    found = [Plan("grpo dense ids", functools.partial(case, True, not quick), size, small)]
    if not quick:
        found.append(Plan("grpo any ids", functools.partial(case, False, False), size, small))
        found.append(
            Plan(
                "grpo 10^7 dense ids",
                functools.partial(case, True, False),
                {"groups": 1_250_000, "per_group": 8},
                small,
            )
        )
        found.append(Plan("gigpo", steps_case, {"groups": 1_250, "per_group": 8}, {"groups": 6, "per_group": 4}))
    return found


test_group_normalise = small_test(plans(quick=False))
