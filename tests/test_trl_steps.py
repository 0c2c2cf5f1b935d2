"""Estimators of steps in HPOTrainer: the turns of completions, what they saw and got, on one process and two."""

import functools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from lazily import Lazy, skip_without
from ranks import on_ranks
from trainers import build

import hpo_core as hpo
from hpo_core.integrations.turns import Step

skip_without("trl")
hpo_trl, trl = Lazy("hpo_core.integrations.trl"), Lazy("trl")

pytestmark = pytest.mark.peers

ROWS, LENGTH, GROUP = 8, 9, 4
GIGPO = functools.partial(hpo.advantages.gigpo, gamma=0.9)


def completions(seed=0):
    """Masks ``[B, L]`` of completions, an empty one too, and of tools in them, their steps, and rewards ``[B, 2]``."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, LENGTH + 1, (ROWS,), generator=draw)
    lengths[2] = 0
    completion = (torch.arange(LENGTH) < lengths[:, None]).long()
    tool = (torch.rand(ROWS, LENGTH, generator=draw) > 0.3).long()
    steps = []
    for row in (completion * tool).tolist():
        begins = [at for at in range(LENGTH) if row[at] and (at == 0 or not row[at - 1])]
        steps.append([Step(f"room {at % 2}", 0.25 * (at % 3)) for at in begins])
    rewards = torch.randint(0, 5, (ROWS, 2), generator=draw) / 4
    rewards[5] = torch.nan  # no function scores it
    return {"completion_mask": completion, "tool_mask": tool}, steps, rewards


def expected_of(masks, steps, rewards):
    """``[B, L]`` by a loop over completions and their runs of tokens."""
    valid = (masks["completion_mask"] * masks["tool_mask"]).tolist()
    outcomes = torch.where(rewards.isnan().all(1), torch.nan, (rewards * torch.tensor([1.0, 0.5])).nansum(1)).tolist()
    of_steps = [
        (step.reward + (outcomes[row] if step is own[-1] else 0.0), row // GROUP, row, int(step.observation[-1]))
        for row, own in enumerate(steps)
        for step in own
    ]
    columns = list(zip(*of_steps, strict=True))
    advantages = iter(GIGPO(torch.tensor(columns[0]), *map(torch.tensor, columns[1:])).tolist())
    tokens = torch.zeros(ROWS, LENGTH)
    for row in range(ROWS):
        for at in range(LENGTH):
            if valid[row][at]:
                tokens[row, at] = next(advantages) if at == 0 or not valid[row][at - 1] else tokens[row, at - 1]
    return tokens


@pytest.mark.parametrize("seed", range(5))
def test_turns_get_the_advantages_of_their_steps(seed, tmp_path, monkeypatch):
    masks, steps, rewards = completions(seed)
    told = [own or [Step("room 0", 9.0)] for own in steps]  # of a truncated completion, which TRL masks throughout
    trainer = build(
        hpo_trl.HPOTrainer, tmp_path, extra={"advantage": GIGPO, "steps": lambda **_: told}, num_generations=GROUP
    )
    trainer.reward_weights = torch.tensor([1.0, 0.5])
    monkeypatch.setattr(trl.GRPOTrainer, "_calculate_rewards", lambda *_, **__: rewards.clone())

    def generate(self, inputs):
        self._calculate_rewards(inputs, ["p"] * ROWS, ["c"] * ROWS, None)
        return {**masks, "completion_ids": masks["completion_mask"], "advantages": torch.zeros(ROWS)}

    monkeypatch.setattr(trl.GRPOTrainer, "_generate_and_score_completions", generate)
    output = trainer._generate_and_score_completions([{"prompt": "p"}] * ROWS)
    assert torch.equal(output["advantages"], expected_of(masks, steps, rewards))
    assert output["advantages"].any() and torch.equal(output["group_ids"], torch.arange(ROWS) // GROUP)


def test_one_turn_in_one_place_is_grpo_twice(tmp_path):
    """The episode's advantage and the step's are the same; and the function is told what reward functions are."""
    told = {}

    def steps(**keywords):
        told.update(keywords)
        return [[Step("here")] for _ in keywords["completions"]]

    trainer = build(
        hpo_trl.HPOTrainer, tmp_path, extra={"advantage": hpo.advantages.gigpo, "steps": steps}, max_steps=2
    )
    output = trainer._generate_and_score_completions([{"prompt": "abcdefgh=", "kind": "a"}] * 16)
    grpo = hpo.advantages.grpo(trainer._hpo_rewards[:, 0], torch.arange(16) // 8)
    mask = output["completion_mask"]
    torch.testing.assert_close(output["advantages"], 2 * grpo[:, None] * mask, rtol=1e-5, atol=1e-6)
    assert len(told["prompts"]) == len(told["completions"]) == 16 and told["examples"][0]["kind"] == "a"
    logged = torch.tensor(list(trainer._logs["advantages"]))
    torch.testing.assert_close(logged, 2 * grpo, rtol=1e-5, atol=1e-6)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 2 and all(abs(loss) < 1 for loss in losses)


def test_what_does_not_fit_is_refused(tmp_path):
    for extra, message in (
        (
            {"advantage": hpo.advantages.reinforce_pp},
            "expected an estimator of rows, got reinforce_pp, of tokens; call",
        ),
        ({"advantage": hpo.advantages.gigpo}, "expected an estimator of rows, got gigpo, of steps; steps= says"),
        ({"advantage": hpo.advantages.grpo, "steps": list}, "expected an estimator of steps, got grpo, of rows"),
        ({"steps": list}, "expected an estimator of steps, got the default, of rows"),
    ):
        with pytest.raises(ValueError, match=f"advantage: {message}"):
            build(hpo_trl.HPOTrainer, tmp_path, extra=extra)
    trainer = build(hpo_trl.HPOTrainer, tmp_path, extra={"advantage": GIGPO, "steps": lambda **_: [[Step(1)] * 2] * 8})
    with pytest.raises(ValueError, match=r"steps\[0\]: expected 1 steps, got 2; a turn is"):
        trainer._generate_and_score_completions([{"prompt": "abcdefgh="}] * 8)


# ----------------------------------------------------------------------------------------------------- two processes


def advantages_of(own, processes):
    """The advantages as the trainer of a process with these rows computes them."""
    masks, steps, rewards = completions()
    logged = []
    trainer = SimpleNamespace(
        _hpo=SimpleNamespace(advantage=GIGPO, backend=None),
        _hpo_steps=steps[own],
        _hpo_rewards=rewards,
        reward_weights=torch.tensor([1.0, 0.5]),
        accelerator=SimpleNamespace(gather=lambda tensor: tensor),
        _ranks=lambda: None if processes == 1 else dist.group.WORLD,
        _logged=logged.append,
    )
    mask = (masks["completion_mask"] * masks["tool_mask"] != 0)[own]
    return hpo_trl.HPOMixin._advantages_of_steps(trainer, mask, (torch.arange(ROWS) // GROUP)[own], own)


OWN = (slice(0, 6), slice(6, ROWS))  # a group has rows on both


def test_two_processes_are_one():
    found = torch.cat(on_ranks(2, lambda rank: advantages_of(OWN[rank], 2)))
    assert torch.equal(found, advantages_of(slice(0, ROWS), 1)) and bool(found.any())
