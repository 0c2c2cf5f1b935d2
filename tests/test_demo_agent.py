"""The agent's demo runs and writes what it says, and its rollouts are what estimators of turns are made for."""

from __future__ import annotations

import json

import pytest
import torch
from lazily import script

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def demo():
    return script("examples/demo_agent.py")


@pytest.fixture
def rollouts(demo):
    torch.manual_seed(0)
    return demo.roll_out(demo.Policy(), demo.make_layouts(torch.Generator().manual_seed(0)))


def test_a_short_run(demo, tmp_path, capsys):
    result = demo.main(["--seeds", "3", "--updates", "2", "--control", "--processes", "1", "--output", str(tmp_path)])
    assert json.loads((tmp_path / "agent.json").read_text()) == result
    assert (tmp_path / "agent.png").read_bytes().startswith(b"\x89PNG")
    assert [(run["estimator"], run["seed"]) for run in result["runs"]] == [
        (name, 3) for name in (*demo.ESTIMATORS, demo.CONTROL)
    ]
    assert all(len(run["success"]) == 2 for run in result["runs"])
    assert len({run["success"][0] for run in result["runs"]}) == 1  # the same layouts, weights and samples so far
    assert "updates to 80%" in capsys.readouterr().out


def test_updates_are_counted_from_one(demo, capsys):
    with pytest.raises(SystemExit):
        demo.main(["--updates", "0"])
    assert "--updates: expected an integer above 0, got 0" in capsys.readouterr().err


def test_tokens_turns_and_episodes(demo, rollouts):
    batch = rollouts.batch
    assert batch.rows == demo.LAYOUTS * demo.ROLLOUTS
    assert batch.total_tokens == len(rollouts.old_logp) == rollouts.written.sum()
    assert batch.num_steps == len(rollouts.rewards) == len(rollouts.anchor_ids)
    assert torch.equal(torch.zeros(batch.rows).index_add(0, batch.row_of_step(), rollouts.rewards), rollouts.success)
    assert 0 < rollouts.success.sum() < batch.rows
    anchors, observations = rollouts.anchor_ids.unique(), rollouts.observations.unique(dim=0)
    assert len(anchors) == len(observations) < len(rollouts.observations)  # as many, and they repeat


def test_estimators_disagree_on_turns(demo, rollouts):
    row = rollouts.batch.row_of_step()
    of_turns = {}
    for name in demo.ESTIMATORS:
        rewards, advantage = demo.credit(name, rollouts)
        if name == "grpo":
            of_turns[name] = advantage(rewards, rollouts.batch.group_ids)[row]
        else:
            of_turns[name] = advantage(rewards, **rollouts.batch.ids_of_steps())
        assert of_turns[name].abs().max() > 0
    assert not torch.allclose(of_turns["gigpo"], of_turns["grpo"])
    assert not torch.allclose(of_turns["hgpo"], of_turns["grpo"])
    assert not torch.allclose(of_turns["gigpo"], of_turns["hgpo"])
