"""The examples of data parallel training, of many turns, and of verl: they run, and compute what they say."""

import contextlib
import io
import os
import re
import runpy
import shlex
import socket
import subprocess
from pathlib import Path

import pytest
import torch

import hpo_core as hpo
from hpo_core.losses import policy_loss

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


@pytest.fixture
def calls(monkeypatch):
    """The arguments of each loss that a script asks for, and what it got."""
    seen = []

    def written_down(*arguments, **keywords):
        out = policy_loss(*arguments, **keywords)
        seen.append((arguments, keywords, out.loss.item()))
        return out

    monkeypatch.setattr(hpo, "policy_loss", written_down)
    return seen


def script(name, **variables):
    """Its names and what it printed, run in this process."""
    before = {key: os.environ.get(key) for key in variables}
    os.environ.update(variables)
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            return runpy.run_path(str(EXAMPLES / name)), printed.getvalue()
    finally:
        torch.set_default_device(None)
        for key, value in before.items():
            os.environ.pop(key) if value is None else os.environ.update({key: value})


def equal_to_the_reference(call):
    (logp, old_logp, advantages, batch, gate), keywords, loss = call
    keywords = {key: value for key, value in keywords.items() if key != "process_group"}
    exact = policy_loss(
        logp.detach().double(), old_logp.double(), advantages, batch, gate, **keywords, backend="reference"
    )
    assert loss == pytest.approx(exact.loss.item(), rel=1e-5, abs=1e-6)


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


# ---- examples/ddp.py ----


def parameters(rank, ranks, port, folder):
    """The variables that torchrun gives a process, whose parameters are left in the folder."""
    torch.set_num_threads(1)  # a forked process has none of its parent's OpenMP threads, and would wait for them
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    found, _ = script("ddp.py", UPDATES="3", CUDA_VISIBLE_DEVICES="", **{key: str(each) for key, each in told.items()})
    torch.save([parameter.detach() for parameter in found["model"].parameters()], folder / f"{rank} of {ranks}")
    return found


def test_two_processes_train_as_one(tmp_path, calls):
    torch.multiprocessing.start_processes(parameters, (2, free_port(), tmp_path), 2, start_method="fork")
    alone = parameters(0, 1, free_port(), tmp_path)
    for first, second, expected in zip(
        *(torch.load(tmp_path / name) for name in ("0 of 2", "1 of 2", "0 of 1")), strict=True
    ):
        assert torch.equal(first, second)
        torch.testing.assert_close(first, expected, rtol=1e-4, atol=2e-6)
    assert len(calls) == 3 * 4
    assert alone["gate"].levels[-1].unit is hpo.gates.Unit.GROUP
    for call in (calls[0], calls[-1]):
        equal_to_the_reference(call)
    assert calls[-1][1]["process_group"] is not None


# ---- examples/multi_turn.py ----


def test_an_agent_learns_from_its_turns(calls):
    found, printed = script("multi_turn.py")
    lines = re.findall(r"^(\d+) solved (\d\.\d\d) turns (\d\.\d) clipped (\d\.\d\d)$", printed, re.MULTILINE)
    assert [line[0] for line in lines] == ["10", "20", "30", "40"]
    assert float(lines[-1][1]) > 0.9 and float(lines[-1][2]) < float(lines[0][2])
    for call in (calls[1], calls[-1]):
        equal_to_the_reference(call)
    # The last rollout's advantages, by a loop over dictionaries.
    (_, _, advantages, batch, _), keywords, _ = calls[-1]
    assert keywords["advantage_level"] == "step"
    seen, rewards, played = found["seen"], found["rewards"], found["played"]
    episodes = [(row, [at for at in range(found["TURNS"]) if played[row, at]]) for row in range(len(seen))]
    prompt_of = lambda row: row // found["SAMPLES"]  # noqa: E731
    by_prompt, by_sight = {}, {}
    for row, turns in episodes:
        by_prompt.setdefault(prompt_of(row), []).append(rewards[row].sum().item())
        for at in turns:
            rest = sum(0.95 ** (later - at) * rewards[row, later].item() for later in turns if later >= at)
            by_sight.setdefault((prompt_of(row), seen[row, at].item()), []).append(((row, at), rest))

    def normal(values):
        values = torch.tensor(values, dtype=torch.float64)
        return (values - values.mean()) / (values.std() + 1e-6) if len(values) > 1 else values * 0

    of_episode = torch.cat([normal(values) for _, values in sorted(by_prompt.items())])
    of_turn = {}
    for pairs in by_sight.values():
        of_turn |= zip((key for key, _ in pairs), normal([rest for _, rest in pairs]).tolist(), strict=True)
    expected = [of_episode[row].item() + of_turn[row, at] for row, turns in episodes for at in turns]
    assert batch.num_steps == len(expected) and any(expected)
    torch.testing.assert_close(advantages.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-4, atol=1e-4)


# ---- examples/verl.sh, docs/cluster.md ----


def options_of(tmp_path, *more):
    """The arguments with which verl would be called."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nfor each in "$@"; do printf "%s\\n" "$each"; done\n')
    python.chmod(0o755)
    variables = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "DATA": "/data", "GPUS": "2"}
    done = subprocess.run(
        ["sh", EXAMPLES / "verl.sh", *more], env=variables, capture_output=True, text=True, check=True
    )
    module, *options = done.stdout.splitlines()[1:]
    assert module == "verl.trainer.main_ppo"
    return options


def test_options_that_follow_win(tmp_path):
    options = options_of(tmp_path, "data.train_batch_size=8")
    assert options[-1] == "data.train_batch_size=8"
    assert "data.train_files=/data/train.parquet" in options and "trainer.n_gpus_per_node=2" in options


def options_of_the_page(_):
    """The options of the command of docs/cluster.md."""
    page = (ROOT / "docs/cluster.md").read_text().replace("\\\n", "")
    return shlex.split(page.partition("verl.trainer.main_ppo")[2].partition("```")[0])


@pytest.mark.peers
@pytest.mark.parametrize("options", [options_of, options_of_the_page])
def test_verl_takes_the_command(options, tmp_path):
    pytest.importorskip("verl")
    import hydra
    from verl.trainer.ppo import core_algos
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    import hpo_core.integrations.verl as hpo_verl

    assert callable(hpo_verl.register)  # which registers what hpo_core has
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        config = hydra.compose("ppo_trainer", overrides=options(tmp_path))
        with pytest.raises(hydra.errors.ConfigCompositionException):
            hydra.compose("ppo_trainer", overrides=[*options(tmp_path), "algorithm.no_such_option=1"])
    critic, reference = need_critic(config), need_reference_policy(config)
    assert (critic, reference) == (False, False)
    validate_config(config, use_reference_policy=reference, use_critic=critic)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    assert model.use_fused_kernels and model.fused_kernel_options.impl_backend == "hpo_core"
    assert config.algorithm.adv_estimator in core_algos.ADV_ESTIMATOR_REGISTRY
    assert rollout.name == "vllm" and rollout.n > 1  # the estimators compare the answers to a prompt
    assert actor.policy_loss.loss_mode == "hpo_gspo"

    import verl_batches

    batch = verl_batches.Batch(2)
    ours = verl_batches.run(batch, actor)
    exact = verl_batches.run(
        batch,
        verl_batches.actor("gspo", clip_ratio_low=3e-4, clip_ratio_high=4e-4, loss_agg_mode="seq-mean-token-mean"),
    )
    verl_batches.close(ours, exact)
    assert ours[2]["actor/pg_clipfrac"] > 0.05
