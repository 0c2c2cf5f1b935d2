"""verl's trainer on a machine without an accelerator: ``RayPPOTrainer.fit`` with Ray workers and FSDP2 on gloo.

``python tests/verl_fit_on_cpu.py FOLDER [RUN...]`` trains the tiny model once for each of ``RUNS``; ``FOLDER/fits.pt``
has what verl logs and the parameters. The driver, Ray, the workers, the engine, the advantages and the updates are
verl's; the rollout alone is drawn at random, because it needs an inference engine.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import ray
import torch
import verl_on_cpu
from verl import DataProto
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, ResourcePoolManager, Role
from verl.utils.dataset.rl_dataset import collate_fn
from verl.utils.tracking import Tracking
from verl.workers.engine_workers import ActorRolloutRefWorker

PROMPTS, ANSWERS, UPDATES, EPOCHS = 4, 4, 5, 2
PROMPT, RESPONSE = 6, 12
LOGGED = (
    *("actor/pg_loss", "actor/grad_norm", "actor/pg_clipfrac", "actor/ppo_kl", "actor/entropy"),
    *("critic/advantages/mean", "critic/advantages/max", "critic/score/mean"),
)


class Run(NamedTuple):
    loss_mode: str
    adv_estimator: str
    ranks: int = 2
    low: float = 0.2  # verl's own
    high: float = 0.2
    aggregation: str = "token-mean"


TIGHT, SEQUENCE = (0.02, 0.03), (0.004, 0.006)
RUNS = {
    "vanilla": Run("vanilla", "grpo", 2, *TIGHT),
    "hpo_ppo_clip": Run("hpo_ppo_clip", "hpo_grpo", 2, *TIGHT),
    "gspo": Run("gspo", "grpo", 2, *SEQUENCE, "seq-mean-token-mean"),
    "hpo_gspo": Run("hpo_gspo", "hpo_grpo", 2, *SEQUENCE, "seq-mean-token-mean"),
    "levels": Run("user_levels", "hpo_grpo", 2),
    "levels, alone": Run("user_levels", "hpo_grpo", 1),
    "steps": Run("user_levels", "hpo_gigpo", 2),
    "steps, alone": Run("user_levels", "hpo_gigpo", 1),
}


# ---------------------------------------------------------------------------------------------------------- workers


class Actor(ActorRolloutRefWorker):
    """verl's worker, which begins anew for each run: its imports take longer than a run."""

    def __init__(self, config: Any, role: str) -> None:
        warnings.filterwarnings("ignore")
        torch.set_num_threads(1)
        verl_on_cpu.start_engines()
        super().__init__(config, role)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def begin(self, config: Any) -> None:
        torch.manual_seed(2)
        ActorRolloutRefWorker.__init__(self, config, "actor")
        self.init_model()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def parameters(self) -> torch.Tensor:
        return torch.cat([verl_on_cpu.whole(each.detach()).flatten() for each in self.actor.engine.module.parameters()])


def workers(ranks: int, config: Any) -> RayWorkerGroup:
    pool = RayResourcePool([ranks], use_gpu=False, max_colocate_count=1, name_prefix=f"ranks{ranks}")
    kind = RayClassWithInitArgs(ray.remote(Actor), config=config, role="actor")
    return RayWorkerGroup(pool, kind, device_name="cpu")


# ---------------------------------------------------------------------------------------------------------- trainer


class Prompts(torch.utils.data.Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return PROMPTS * UPDATES

    def __getitem__(self, at: int) -> dict[str, Any]:
        return {
            "raw_prompt": [{"role": "user", "content": str(at)}], "index": at, "data_source": "random",
            "reward_model": {"ground_truth": ""}, "dummy_tensor": torch.zeros(1, dtype=torch.uint8),
        }  # fmt: skip


class Rollout:
    """Answers of several turns at random, the same in every run: what an agent loop returns."""

    def __init__(self) -> None:
        self.draw = torch.Generator().manual_seed(7)

    def generate_sequences(self, batch: DataProto) -> DataProto:
        rows = len(batch)
        ids = torch.randint(3, verl_on_cpu.VOCABULARY, (rows, PROMPT + RESPONSE), generator=self.draw)
        lengths = torch.randint(4, RESPONSE + 1, (rows, 1), generator=self.draw)
        present = torch.arange(PROMPT + RESPONSE) < PROMPT + lengths
        valid = present[:, PROMPT:].clone()
        valid[::2, 2] = False  # the answer of a tool parts every other response into two turns
        ids = ids * present
        rewards = torch.zeros(rows, RESPONSE)
        rewards.scatter_(1, lengths - 1, ((ids[:, PROMPT:] % 3 == 0) & valid).float().mean(1, keepdim=True))
        steps = np.empty(rows, dtype=object)
        steps[:] = [[("room", 0.0), ("hall", 0.25)][row % 2 :] for row in range(rows)]
        answers = DataProto.from_dict(
            {
                "prompts": ids[:, :PROMPT], "responses": ids[:, PROMPT:], "input_ids": ids,
                "attention_mask": present.long(), "position_ids": (present.cumsum(1) - 1), "rm_scores": rewards,
                "response_mask": valid.long(),
            },
            non_tensors={
                "multi_modal_inputs": np.array([{} for _ in range(rows)], dtype=object),
                "hpo_steps": steps,
                "__num_turns__": np.full(rows, 2, dtype=np.int32),
            },
        )  # fmt: skip
        answers.meta_info.update(timing={}, reward_extra_keys=[])
        return answers


class Nothing:
    """The inference engine's part: weights go nowhere."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class Trainer(RayPPOTrainer):
    def init_workers(self) -> None:
        self.async_rollout_manager = Rollout()
        self.checkpoint_manager = self.llm_server_manager = self.reward_loop_manager = Nothing()


def configured(folder: Path, run: Run) -> Any:
    lines = [
        f"algorithm.adv_estimator={run.adv_estimator}", "trainer.val_before_train=False", "trainer.test_freq=-1",
        "trainer.save_freq=-1", "trainer.logger=[console]", "trainer.total_epochs=1", "trainer.nnodes=1",
        f"trainer.n_gpus_per_node={run.ranks}", "trainer.balance_batch=False", "trainer.resume_mode=disable",
        "trainer.device=cpu", f"data.train_batch_size={PROMPTS}", "data.val_batch_size=4",
        "data.dataloader_num_workers=0",
    ]  # fmt: skip
    return verl_on_cpu.configuration(
        folder, "fp32", *lines, **{
            "actor.policy_loss.loss_mode": run.loss_mode, "actor.loss_agg_mode": run.aggregation,
            "actor.clip_ratio_low": run.low, "actor.clip_ratio_high": run.high, "actor.entropy_coeff": 0.0,
            "actor.ppo_mini_batch_size": PROMPTS, "actor.ppo_micro_batch_size_per_gpu": ANSWERS,
            "actor.ppo_epochs": EPOCHS, "actor.shuffle": False, "rollout.n": ANSWERS,
            "rollout.log_prob_micro_batch_size_per_gpu": ANSWERS,
        },
    )  # fmt: skip


def fit(folder: Path, run: Run, group: RayWorkerGroup, config: Any) -> dict[str, torch.Tensor]:
    from transformers import AutoTokenizer

    group.begin(config.actor_rollout_ref)
    seen: list[dict[str, float]] = []
    Tracking.log = lambda self, data, step, **_: seen.append(data)
    trainer = Trainer(
        config=config, tokenizer=AutoTokenizer.from_pretrained(folder), role_worker_mapping={Role.ActorRollout: Actor},
        resource_pool_manager=ResourcePoolManager({"global_pool": [run.ranks]}, {}), train_dataset=Prompts(),
        val_dataset=Prompts(), collate_fn=collate_fn,
        train_sampler=torch.utils.data.SequentialSampler(Prompts()),
    )  # fmt: skip
    trainer.actor_rollout_wg = group
    trainer.init_workers()
    trainer.fit()
    parameters = group.parameters()
    assert len(parameters) == run.ranks
    for other in parameters[1:]:
        assert torch.equal(parameters[0], other)
    logged = {name: torch.tensor([float(step[name]) for step in seen], dtype=torch.float64) for name in LOGGED}
    return {"parameters": parameters[0], **logged}


def main(folder: Path, names: list[str]) -> None:
    verl_on_cpu.make_model(folder)
    places = sum({run.ranks for run in RUNS.values()})  # workers stay; Ray asks for no more cores than it is told of
    ray.init(num_cpus=places, include_dashboard=False, object_store_memory=100_000_000, log_to_driver=False)
    groups: dict[int, RayWorkerGroup] = {}
    results = {}
    for name in names or [*RUNS]:
        run = RUNS[name]
        config = configured(folder, run)
        if run.ranks not in groups:
            groups[run.ranks] = workers(run.ranks, config.actor_rollout_ref)
        results[name] = fit(folder, run, groups[run.ranks], config)
    torch.save(results, folder / "fits.pt")
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
