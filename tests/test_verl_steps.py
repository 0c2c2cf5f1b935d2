"""Estimators of steps through verl's own calls, on what its agent loops return."""

import functools
import importlib
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lazily import Lazy, skip_without

from hpo_core import advantages, gates
from hpo_core.integrations.replaced import after_import
from hpo_core.integrations.turns import Step

skip_without("verl")
protocol, ray_trainer = Lazy("verl.protocol"), Lazy("verl.trainer.ppo.ray_trainer")
core_algos, hpo_verl = Lazy("verl.trainer.ppo.core_algos"), Lazy("hpo_core.integrations.verl")
agent_loop, v1 = Lazy("verl.experimental.agent_loop.agent_loop"), Lazy("verl.trainer.ppo.v1.trainer_base")
tensordict_utils, tensordict = Lazy("verl.utils.tensordict_utils"), Lazy("tensordict")

pytestmark = pytest.mark.peers

PROMPT, LENGTH = 3, 8
ESTIMATORS = {"hpo_gigpo": advantages.gigpo, "hpo_hgpo": advantages.hgpo}


@pytest.fixture(autouse=True)
def registered():
    assert set(ESTIMATORS) <= set(core_algos.ADV_ESTIMATOR_REGISTRY) and callable(hpo_verl.register_advantage)


class Runs:
    """Agents' runs of several turns in several rows: their masks, what their turns saw and got, and their rewards."""

    def __init__(self, seed, cut=False):
        draw = torch.Generator().manual_seed(seed)
        self.prompts = [f"prompt {at // 4}" for at in range(8)]
        self.rewards = (torch.randint(0, 5, (8,), generator=draw) / 4).tolist()
        self.masks, self.steps = [], []  # of each run a list of rows
        for _ in range(8):
            rows = int(torch.randint(1, 4, (), generator=draw)) if cut else 1
            masks = [(torch.rand(LENGTH, generator=draw) > 0.4).long().tolist() for _ in range(rows)]
            masks = [[*mask[:-1], 1] for mask in masks]
            counts = [sum(b > a for a, b in zip([0, *mask], mask, strict=False)) for mask in masks]
            self.masks.append(masks)
            self.steps.append(
                [[(f"room {torch.randint(0, 3, (), generator=draw)}", 0.25 * at) for at in range(n)] for n in counts]
            )

    def expected(self, estimator):
        """The advantage of each token, by run and row, by a loop over their steps."""
        columns, tokens = [], []
        for run, of_run in enumerate(self.steps):
            flat = [(*step, run) for of_row in of_run for step in of_row]
            for at, (seen, reward, _) in enumerate(flat):
                outcome = self.rewards[run] if at == len(flat) - 1 else 0.0
                columns.append((reward + outcome, run // 4, run, int(seen[-1])))
        values = iter(estimator(*map(torch.tensor, zip(*columns, strict=True))).tolist())
        for of_run in self.masks:
            rows = []
            for mask in of_run:
                row = []
                for at, valid in enumerate(mask):
                    begins = valid and not (at and mask[at - 1])
                    row.append(next(values) if begins else row[-1] if valid else 0.0)
                rows.append(row)
            tokens.append(rows)
        return tokens

    def output(self, run, row, **extra):
        """The result of an agent loop."""
        return agent_loop.AgentLoopOutput(
            prompt_ids=[1] * PROMPT, response_ids=[5] * LENGTH, response_mask=self.masks[run][row],
            reward_score=self.rewards[run], metrics={}, extra_fields=extra,
        )  # fmt: skip


def of_worker(runs, *, key="hpo_steps", sent=lambda steps: steps):
    """The rows as verl's agent loop worker hands them to ``RayPPOTrainer``, with what its driver adds."""
    inputs = []
    for run, (mask,) in enumerate(runs.masks):
        fields = {
            "prompt_ids": torch.ones(1, PROMPT, dtype=torch.int64), "response_ids": torch.ones(1, LENGTH).long(),
            "response_mask": torch.tensor([mask]), "attention_mask": torch.ones(1, PROMPT + LENGTH).long(),
            "input_ids": torch.ones(1, PROMPT + LENGTH).long(), "reward_score": runs.rewards[run],
            "position_ids": torch.arange(PROMPT + LENGTH)[None], "metrics": agent_loop.AgentLoopMetrics(),
            "extra_fields": runs.output(run, 0, **{key: sent(runs.steps[run][0])}).extra_fields,
        }  # fmt: skip
        inputs.append(agent_loop.module()._InternalAgentLoopOutput(**fields))
    worker = SimpleNamespace(reward_loop_worker_handles=None)
    data = agent_loop.AgentLoopWorker._postprocess(worker, inputs)
    data.non_tensor_batch["uid"] = np.array(runs.prompts, dtype=object)
    data.batch["token_level_rewards"] = data.batch["rm_scores"]
    return data


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("seed", range(5))
def test_turns_get_the_advantages_of_their_steps(name, seed):
    runs = Runs(seed)
    data = ray_trainer.compute_advantage(of_worker(runs), adv_estimator=name, config={})
    expected = torch.tensor(runs.expected(ESTIMATORS[name]))[:, 0]
    assert torch.equal(data.batch["advantages"], expected) and torch.equal(data.batch["returns"], expected)
    assert expected.any() and (expected.max(1).values != expected.min(1).values).any()


def test_steps_may_keep_their_class_or_lose_it():
    runs = Runs(1)
    expected = torch.tensor(runs.expected(advantages.gigpo))[:, 0]
    for sent in (lambda steps: [Step(*each) for each in steps], lambda steps: [list(each) for each in steps]):
        data = ray_trainer.compute_advantage(of_worker(runs, sent=sent), adv_estimator="hpo_gigpo", config={})
        assert torch.equal(data.batch["advantages"], expected)


def test_gamma_is_verl_s_where_it_is_set():
    for gamma, expected in ((1.0, advantages.gigpo), (0.5, functools.partial(advantages.gigpo, gamma=0.5))):
        sent = {"adv_estimator": "hpo_gigpo", "config": {"gamma": gamma}}
        found = ray_trainer.compute_advantage(of_worker(Runs(2)), **sent).batch["advantages"]
        assert torch.equal(found, torch.tensor(Runs(2).expected(expected))[:, 0])


def test_a_number_may_be_fixed():
    before, runs = dict(core_algos.ADV_ESTIMATOR_REGISTRY), Runs(2)
    estimator = functools.partial(advantages.gigpo, gamma=0.5, step_weight=2.0)
    try:
        hpo_verl.register_advantage("mine", estimator)
        data = ray_trainer.compute_advantage(of_worker(runs), adv_estimator="mine", config={})
    finally:
        core_algos.ADV_ESTIMATOR_REGISTRY.clear()
        core_algos.ADV_ESTIMATOR_REGISTRY.update(before)
    assert torch.equal(data.batch["advantages"], torch.tensor(runs.expected(estimator))[:, 0])
    assert not torch.equal(data.batch["advantages"], torch.tensor(runs.expected(advantages.gigpo))[:, 0])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"key": "observations"},
            r"^adv_estimator: 'hpo_gigpo' compares steps by .* row 0 reports no hpo_steps; return",
        ),
        ({"sent": lambda steps: None}, r"AgentLoopOutput\(\.\.\., extra_fields=\{'hpo_steps': \[\(observation, rew"),
        ({"sent": lambda steps: steps + steps[:1]}, r"^steps\[0\]: expected \d steps, got \d; a turn is a run of"),
        ({"sent": lambda steps: [each[0] for each in steps]}, r"^steps\[0\]\[0\]: expected Step\(observation, reward"),
    ],
)
def test_refuses_incomplete_reports_of_agent_loops(changed, message):
    with pytest.raises((ValueError, TypeError), match=message):
        ray_trainer.compute_advantage(of_worker(Runs(0), **changed), adv_estimator="hpo_gigpo", config={})


def test_reports_count_for_one_call():
    ray_trainer.compute_advantage(of_worker(Runs(0)), adv_estimator="hpo_gigpo", config={})
    with pytest.raises(ValueError, match="reports no hpo_steps"):
        ray_trainer.compute_advantage(of_worker(Runs(0), key="x"), adv_estimator="hpo_gigpo", config={})


def test_an_estimator_that_needs_more_is_refused():
    with pytest.raises(ValueError, match=r"^estimator: step_gae needs .*values.*, of which verl says nothing"):
        hpo_verl.register_advantage("needs_more", advantages.step_gae)
    assert "needs_more" not in core_algos.ADV_ESTIMATOR_REGISTRY


# ----------------------------------------------------------------------------------------- trainers with a queue (V1)


class Queue:
    """The store between verl's workers and its driver."""

    def __init__(self, fields):
        self.fields, self.asked = fields, []

    def kv_batch_get(self, keys, partition_id, select_fields):
        self.asked += select_fields
        names = [name for name in select_fields if name in self.fields]
        return self.fields.select(*names)

    def kv_batch_put(self, keys, partition_id, fields):
        self.written = fields


def through_queue(runs, name, monkeypatch, order=None):
    """``_compute_advantage`` of verl's V1 trainers, on rows as its agent loop workers put them into the queue."""
    rows = [(run, row) for run in range(8) for row in range(len(runs.masks[run]))]
    rows = rows if order is None else [rows[at] for at in torch.randperm(len(rows), generator=order).tolist()]
    fields = []
    for run, row in rows:
        field = runs.output(run, row, hpo_steps=runs.steps[run][row]).as_dict()
        fields.append(field | {"uid": runs.prompts[run]})
    empty = runs.output(0, 0, hpo_steps=runs.steps[0][0]).as_dict() | {"uid": "pad"}  # verl fills batches up
    fields.append(empty | {"response_mask": torch.zeros(LENGTH, dtype=torch.int64), "rm_scores": torch.zeros(LENGTH)})
    names = [name for name in fields[0] if name != "metrics"]
    queue = Queue(
        tensordict_utils.list_of_dict_to_tensordict([{name: each[name] for name in names} for each in fields])
    )
    for name_, field in {"response_mask": torch.int64, "rm_scores": torch.float32}.items():
        nested = torch.nested.as_nested_tensor([each[name_].to(field) for each in fields], layout=torch.jagged)
        queue.fields[name_] = nested  # as rows of several lengths are
    monkeypatch.setattr(v1.module(), "tq", queue)
    algorithm = SimpleNamespace(
        use_kl_in_reward=False, adv_estimator=name, gamma=1.0, lam=1.0, get=lambda _, default=None: default
    )
    config = SimpleNamespace(algorithm=algorithm, actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(n=4)))
    keys = [f"{runs.prompts[run]}_{run}_{row}" for run, row in rows] + ["pad_0_0"]
    batch = type("Batch", (), {"keys": keys, "partition_id": "train", "__len__": lambda self: len(keys)})()
    v1.PPOTrainer._compute_advantage(SimpleNamespace(config=config), batch, {})
    return queue, dict(zip(rows, queue.written["advantages"].unbind(), strict=False))


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("cut", [False, True])
def test_a_run_in_several_rows_is_one_trajectory(name, cut, monkeypatch):
    """Whatever their order in the batch; each row has the reward of the run, which counts once."""
    for seed in range(4):
        runs = Runs(seed, cut)
        expected = runs.expected(ESTIMATORS[name])
        for order in (None, torch.Generator().manual_seed(seed)):
            _, found = through_queue(runs, name, monkeypatch, order)
            assert len(found) == sum(map(len, runs.masks))
            for (run, row), of_tokens in found.items():
                torch.testing.assert_close(of_tokens, torch.tensor(expected[run][row]), rtol=1e-5, atol=1e-6)


def test_bypass_mode_leaves_a_correction_nothing(monkeypatch):
    """There V1 trainers take the sampler for the old policy, and keep the loss."""
    monkeypatch.setattr(core_algos.module(), "POLICY_LOSS_REGISTRY", {})
    hpo_verl.register("corrects", gates.icepop())
    hpo_verl.register("clips", gates.dapo())

    def trainer(mode, **correction):
        actor = SimpleNamespace(policy_loss={"loss_mode": mode})
        return SimpleNamespace(
            config=SimpleNamespace(
                algorithm={"rollout_correction": correction}, actor_rollout_ref=SimpleNamespace(actor=actor)
            )
        )

    for each in (trainer("clips", bypass_mode=True), trainer("corrects"), trainer("corrects", bypass_mode=False)):
        with pytest.raises(AttributeError, match="keys"):  # of a batch that is None
            v1.PPOTrainer._compute_advantage(each, None, {})
    with pytest.raises(ValueError, match=r"^algorithm\.rollout_correction\.bypass_mode: .*'corrects'"):
        v1.PPOTrainer._compute_advantage(trainer("corrects", bypass_mode=True), None, {})


@pytest.mark.parametrize("name", ["grpo", "reinforce_pp_baseline"])
def test_a_run_in_several_rows_counts_once(name, monkeypatch):
    for seed in range(3):
        runs, order = Runs(seed, cut=True), torch.Generator().manual_seed(seed)
        rewards, groups = torch.tensor(runs.rewards), torch.arange(8) // 4
        lengths = torch.tensor([float(sum(map(sum, of_run))) for of_run in runs.masks])
        estimator, more = getattr(advantages, name), () if name == "grpo" else (lengths,)
        of_runs = estimator(rewards, groups, *more)
        _, found = through_queue(runs, f"hpo_{name}", monkeypatch, order)
        for (run, row), of_tokens in found.items():
            torch.testing.assert_close(of_tokens, of_runs[run] * torch.tensor(runs.masks[run][row]))
        if name == "grpo":
            _, theirs = through_queue(runs, "grpo", monkeypatch, order.manual_seed(seed))
            assert all(torch.allclose(found[each], theirs[each], rtol=1e-4, atol=1e-4) for each in theirs)


def test_other_estimators_fetch_nothing_more(monkeypatch):
    queue, _ = through_queue(Runs(0), "hpo_grpo", monkeypatch)
    assert "extra_fields" not in queue.asked
    queue, _ = through_queue(Runs(0), "hpo_gigpo", monkeypatch)
    assert queue.asked.count("extra_fields") == 1


# -------------------------------------------------------------------------------------------------------------- hooks


def test_a_module_is_seen_when_it_is_imported(tmp_path, monkeypatch):
    (tmp_path / "seen_later.py").write_text("NUMBER = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    finders, seen = list(sys.meta_path), []
    after_import("seen_later", lambda module: seen.append("replaced"))
    after_import("seen_later", lambda module: seen.append(module.NUMBER))
    assert not seen and len(sys.meta_path) == len(finders) + 1
    assert importlib.util.find_spec("seen_later").name == "seen_later"  # imports nothing
    (tmp_path / "seen_later.py").write_text("raise ImportError('not yet')\n")
    with pytest.raises(ImportError, match="not yet"):
        importlib.import_module("seen_later")
    (tmp_path / "seen_later.py").write_text("NUMBER = 1\n")
    importlib.invalidate_caches()
    module = importlib.import_module("seen_later")
    assert seen == [1] and sys.meta_path == finders
    module.NUMBER = 2
    after_import("seen_later", lambda module: seen.append(module.NUMBER))
    assert seen == [1, 2]
    monkeypatch.delitem(sys.modules, "seen_later")


def test_steps_need_prompts():
    given = {"token_level_rewards": torch.zeros(1, 2), "response_mask": torch.ones(1, 2), "config": None}
    with pytest.raises(ValueError, match="uid: 'hpo_gigpo' compares the trajectories of a prompt"):
        core_algos.ADV_ESTIMATOR_REGISTRY["hpo_gigpo"](index=None, **given)
