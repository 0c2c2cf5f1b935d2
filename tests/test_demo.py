"""The demo runs from the command line, writes what it says, and learns when it is given the time."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from trainers import demo

pytest.importorskip("trl")
pytest.importorskip("matplotlib")

pytestmark = pytest.mark.peers

DEMO = Path(__file__).parents[1] / "examples" / "demo.py"


def run_demo(folder, *arguments):
    command = [sys.executable, str(DEMO), "--output", str(folder), *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout, json.loads((folder / "curve.json").read_text())


def test_a_short_run(tmp_path, monkeypatch, capsys):
    demo()  # what it imports, other tests need as well
    monkeypatch.chdir(tmp_path)
    options = ["--output", str(tmp_path), "--steps", "8", "--warm-start", "0", "--gate", "cispo"]
    monkeypatch.setattr(sys, "argv", [str(DEMO), *options])
    runpy.run_path(str(DEMO), run_name="__main__")
    printed, result = capsys.readouterr().out, json.loads((tmp_path / "curve.json").read_text())
    assert [point["step"] for point in result["curve"]] == list(range(1, 9))
    assert [point["step"] for point in result["curve"] if "reward" in point] == [1, 5]  # rollouts
    assert result["loss_calls"] == {"cpu": 8} or "cpu" not in result["loss_calls"]
    assert sum(result["loss_calls"].values()) == 8
    assert all(milliseconds > 0 for milliseconds in result["loss_milliseconds"].values())
    assert set(result["before"]) == set(result["after"]) == {"sampled", "greedy"}
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert "accuracy" in printed
    assert "% of a step" in printed


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--backend", "abacus", "--backend: expected one of"),
        ("--steps", "0", "--steps: expected an integer above 0, got 0"),
        ("--steps", "-3", "--steps: expected an integer above 0, got -3"),
    ],
)
def test_wrong_options_are_refused_at_once(option, value, said, tmp_path, capsys):
    with pytest.raises(SystemExit):
        demo().main(["--output", str(tmp_path / "new"), "--warm-start", "0", option, value])
    assert said in capsys.readouterr().err and not (tmp_path / "new").exists()


def test_a_loss_that_nobody_timed(tmp_path, capsys):
    result = {
        "step_milliseconds": 3.0,
        "training_seconds": 1.0,
        "loss_milliseconds": {"TRL": None, "hpo_core": 2.0},
        "loss_calls": {},
        "before": {"sampled": 0.0, "greedy": 0.0},
        "after": {"sampled": 0.0, "greedy": 0.0},
    }
    demo().report(result, tmp_path, 2.0)
    printed = capsys.readouterr().out
    assert "TRL      not timed" in printed and "2.00 ms" in printed


@pytest.mark.long
def test_learning_needs_the_true_reward(tmp_path):
    for name in ("true", "random"):
        (tmp_path / name).mkdir()
    _, learned = run_demo(tmp_path / "true", "--seed", "21")
    assert learned["after"]["sampled"] >= learned["before"]["sampled"] + 0.3
    assert learned["after"]["greedy"] >= learned["before"]["greedy"] + 0.1
    _, control = run_demo(tmp_path / "random", "--seed", "21", "--random-reward")
    assert control["after"]["sampled"] <= control["before"]["sampled"]
