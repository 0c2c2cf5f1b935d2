"""verl's own trainers, whole, over Ray workers with FSDP2 on gloo: ``RayPPOTrainer.fit`` (verl_fit_on_cpu.py) and the
default of ``trainer.use_v1``, ``PPOTrainerSync.fit`` with its queue (verl_v1_on_cpu.py)."""

import subprocess
import sys

import pytest
import torch
from lazily import skip_without
from verl_batches import PROGRAM, environment

skip_without("verl")

pytestmark = [pytest.mark.peers, pytest.mark.long]  # four minutes on two cores, most of them imports

USER_LOSSES = """
import hpo_core as hpo
from hpo_core.integrations.verl import register

gates = hpo.gates
levels = tuple(gates.Level(gates.Tanh(0.01), unit=unit) for unit in (gates.Unit.TRAJECTORY, gates.Unit.GROUP))
register("user_levels", gates.RatioGate("user_levels", gates.LogClip((-0.02, -0.02), (0.02, 0.02)), levels))
"""

# Relative to the largest of the run. Adam makes the rounding of a gradient greater.
ALLOWED = {"parameters": 1e-5, "actor/grad_norm": 1e-5, "actor/ppo_kl": 1e-5}
TERM = 1e-6  # a loss is a mean of terms as large as advantages are, which cancel in a group


def results_of(program, folder):
    (folder / "user_losses.py").write_text(USER_LOSSES)
    variables = environment("user_losses")
    variables["PYTHONPATH"] += f":{folder}"
    command = [sys.executable, str(PROGRAM.with_name(program)), str(folder)]
    finished = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr[-6000:]
    return torch.load(folder / "fits.pt")


@pytest.fixture(scope="module")
def fits(tmp_path_factory):
    return results_of("verl_fit_on_cpu.py", tmp_path_factory.mktemp("fits"))


@pytest.fixture(scope="module")
def fits_of_v1(tmp_path_factory):
    return results_of("verl_v1_on_cpu.py", tmp_path_factory.mktemp("v1"))


def apart(found, expected, what):
    return ((found[what] - expected[what]).abs().max() / expected[what].abs().max()).item()


def same(found, expected):
    for what, allowed in ALLOWED.items():
        assert apart(found, expected, what) <= allowed, what
    for what in ("actor/pg_loss", "critic/advantages/mean", "critic/advantages/max"):
        assert (found[what] - expected[what]).abs().max() <= TERM, what
    for what in ("actor/pg_clipfrac", "actor/entropy", "critic/score/mean"):
        torch.testing.assert_close(found[what], expected[what], rtol=1e-6, atol=0)
    assert len(found["actor/pg_loss"]) == 5 and (found["actor/pg_clipfrac"] > 0.1).all()


@pytest.mark.parametrize(("ours", "theirs"), [("hpo_ppo_clip", "vanilla"), ("hpo_gspo", "gspo")])
def test_two_workers_train_as_with_verl_s_loss_and_estimator(fits, ours, theirs):
    same(fits[ours], fits[theirs])
    other = fits["levels"]  # of the same rollouts
    assert apart(other, fits[theirs], "parameters") > 100 * ALLOWED["parameters"]


@pytest.mark.parametrize("name", ["levels", "steps"])
def test_a_gate_over_prompts_trains_the_same_on_two_workers_as_on_one(fits, name):
    same(fits[name], fits[f"{name}, alone"])


def test_turns_of_an_agent_have_advantages_of_their_own(fits):
    """gigpo's, of what the rollout tells; the rollouts are those of the other runs."""
    steps, rows = fits["steps"], fits["levels"]
    assert torch.equal(steps["critic/score/mean"], rows["critic/score/mean"])
    assert apart(steps, rows, "critic/advantages/max") > 0.1


def test_the_v1_trainer_trains_as_with_verl_s_loss_and_estimator(fits_of_v1):
    same(fits_of_v1["hpo_ppo_clip"], fits_of_v1["vanilla"])
    assert apart(fits_of_v1["steps"], fits_of_v1["vanilla"], "parameters") > 100 * ALLOWED["parameters"]


def test_a_gate_over_prompts_trains_the_same_in_v1_on_two_workers_as_on_one(fits_of_v1):
    same(fits_of_v1["levels"], fits_of_v1["levels, alone"])
    assert apart(fits_of_v1["levels"], fits_of_v1["vanilla"], "parameters") > 100 * ALLOWED["parameters"]


def test_turns_of_an_agent_reach_the_v1_trainer(fits_of_v1):
    steps, rows = fits_of_v1["steps"], fits_of_v1["vanilla"]
    assert torch.equal(steps["critic/score/mean"], rows["critic/score/mean"])
    assert apart(steps, rows, "critic/advantages/max") > 0.1
