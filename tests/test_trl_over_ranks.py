"""TRL's trainers on two gloo processes under accelerate's engines (trl_over_ranks.py)."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lazily import skip_without

skip_without("trl")

pytestmark = [pytest.mark.peers, pytest.mark.long]  # one minute for each engine on two cores

PROGRAM = Path(__file__).with_name("trl_over_ranks.py")
NO_DEEPSPEED = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="`make test-trainers` installs it"
)
ENGINES = ("ddp", "fsdp2", *(pytest.param(name, marks=NO_DEEPSPEED) for name in ("zero2", "zero3")))
VARIABLES = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "CUDA_VISIBLE_DEVICES": ""}

# Relative to the largest of the run. Adam makes the rounding of a gradient greater.
ALLOWED = {"loss": 1e-6, "grad_norm": 1e-6, "parameters": 2e-5}


def ranks_of(engine, folder, processes):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [*launch, str(PROGRAM), engine, str(folder)]
    finished = subprocess.run(
        command, env=os.environ | VARIABLES, capture_output=True, text=True, check=False, timeout=240
    )
    assert finished.returncode == 0, finished.stderr[-6000:]
    return [torch.load(folder / f"{engine}-{rank}.pt") for rank in range(processes)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return ranks_of("alone", tmp_path_factory.mktemp("alone"), 1)[0]


@pytest.fixture(scope="module", params=ENGINES)
def ranks(request, tmp_path_factory):
    return ranks_of(request.param, tmp_path_factory.mktemp(request.param), 2)


def same(found, expected):
    for what, allowed in ALLOWED.items():
        error = (found[what] - expected[what]).abs().max() / expected[what].abs().max()
        assert error <= allowed, (what, error)
    for what in ("entropy", "reward", "clip_ratio/region_mean", "hpo_core/group/clip_fraction"):
        assert found[what].shape == expected[what].shape
        torch.testing.assert_close(found[what], expected[what], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("accumulated", [1, 4])
def test_two_processes_train_as_with_trl_s_loss(ranks, accumulated):
    for rank in ranks:
        ours, theirs = rank["HPOTrainer", accumulated], rank["GRPOTrainer", accumulated]
        assert ours["tokens"] == theirs["tokens"] and len(theirs["loss"]) == 6
        same(ours, theirs)
        assert theirs["clip_ratio/region_mean"].max() > 0.4
    assert torch.equal(ranks[0]["HPOTrainer", accumulated]["parameters"], rank["HPOTrainer", accumulated]["parameters"])
    assert ranks[0]["HPOTrainer", accumulated]["tokens"] != rank["HPOTrainer", accumulated]["tokens"]


def test_a_gate_over_groups_on_two_processes_is_that_of_one(ranks, alone):
    """Each process has half of every group."""
    batches = [[], []]
    for batch, rank in zip(batches, ranks, strict=True):
        same(rank["levels"], alone["levels"])
        tokens = rank["levels"]["tokens"]
        batch.extend(tokens[at : at + 8] for at in range(0, len(tokens), 8))
    together = [row for halves in zip(*batches, strict=True) for half in halves for row in half]
    assert together == alone["levels"]["tokens"]


def test_bounds_measured_on_two_processes_are_those_of_one(ranks, alone):
    """A second moment that each process measured alone would clip other tokens."""
    for rank in ranks:
        same(rank["bounds"], alone["bounds"])
    assert alone["bounds"]["clip_ratio/region_mean"].max() > 0.1
