"""verl's V1 trainer on a machine without an accelerator: ``PPOTrainerSync.fit`` with Ray workers, FSDP2 and its queue.

``python tests/verl_v1_on_cpu.py FOLDER [RUN...]`` trains the tiny model once for each of ``RUNS``; ``FOLDER/fits.pt``
has what verl logs and the parameters. The driver, Ray, TransferQueue, the replay buffer, the workers, the engine, the
advantages and the updates are verl's; the agent loops alone are drawn at random, because they need an inference engine.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch
import transfer_queue
import verl_on_cpu
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils
from verl.utils.dataset.rl_dataset import collate_fn
from verl.utils.tracking import Tracking
from verl_fit_on_cpu import ANSWERS, LOGGED, PROMPT, PROMPTS, RESPONSE, Nothing, Prompts, Run, configured, workers

TIGHT = (0.02, 0.03)
RUNS = {
    "vanilla": Run("vanilla", "grpo", 2, *TIGHT),
    "hpo_ppo_clip": Run("hpo_ppo_clip", "hpo_grpo", 2, *TIGHT),
    "steps": Run("hpo_step_gspo", "hpo_gigpo", 2),
    "levels": Run("user_levels", "hpo_grpo", 2),
    "levels, alone": Run("user_levels", "hpo_grpo", 1),
}


class AgentLoops:
    """Answers of several turns at random, the same in every run, put into the queue as verl's agent loops do."""

    def __init__(self) -> None:
        self.draw = torch.Generator().manual_seed(7)

    def answer(self, number: int) -> dict[str, Any]:
        length = int(torch.randint(4, RESPONSE + 1, (), generator=self.draw))
        ids = torch.randint(3, verl_on_cpu.VOCABULARY, (PROMPT + length,), generator=self.draw)
        valid = torch.ones(length, dtype=torch.int64)
        if number % 2:
            valid[2] = 0  # the answer of a tool parts every other response into two turns
        rewards = torch.zeros(length)
        rewards[-1] = ((ids[PROMPT:] % 3 == 0) & (valid != 0)).float().mean()
        steps = [("room", 0.0), ("hall", 0.25)][1 - number % 2 :]
        return {
            "prompts": ids[:PROMPT], "responses": ids[PROMPT:], "input_ids": ids,
            "position_ids": torch.arange(len(ids)), "num_turns": 2,
            "response_mask": valid, "loss_mask": valid, "rm_scores": rewards,
            "multi_modal_inputs": {}, "extra_fields": {"hpo_steps": steps},
        }  # fmt: skip

    def generate_sequences(self, batch: Any) -> None:
        for uid in list(batch["uid"]):
            answers = [self.answer(number) | {"uid": uid} for number in range(ANSWERS)]
            sizes = [{"prompt_len": PROMPT, "response_len": len(each["responses"])} for each in answers]
            tags = [
                {"status": "success", "seq_len": sum(size.values()), "global_steps": batch["global_steps"],
                 "min_global_steps": 0, "max_global_steps": 0, **size}
                for size in sizes
            ]  # fmt: skip
            transfer_queue.kv_batch_put(
                keys=[f"{uid}_{number}_0" for number in range(ANSWERS)], partition_id="train", tags=tags,
                fields=tensordict_utils.list_of_dict_to_tensordict(answers),
            )  # fmt: skip
            transfer_queue.kv_put(key=uid, partition_id="train", tag={"status": "finished"})


class Trainer(PPOTrainerSync):
    def _setup(self) -> None:
        self._init_dump_executor()
        self.train_dataloader = torch.utils.data.DataLoader(Prompts(), PROMPTS, collate_fn=collate_fn)
        self.train_dataloader_it, self.steps_per_epoch = None, len(self.train_dataloader)
        self.total_training_steps, self.global_steps = self.steps_per_epoch, 0
        self.ref_in_actor, self.tokenizer = False, SimpleNamespace(eos_token_id=2)
        self.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: 1)
        self.checkpoint_manager = self.llm_server_manager = Nothing()
        self.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[])


def fit(run: Run, group: Any, config: Any) -> dict[str, torch.Tensor]:
    group.begin(config.actor_rollout_ref)
    seen: list[dict[str, float]] = []
    Tracking.log = lambda self, data, step, **_: seen.append(data)
    trainer = Trainer(config)
    trainer.actor_rollout_wg = group
    trainer.init()
    trainer.fit(AgentLoops())
    parameters = group.parameters()
    for other in parameters[1:]:
        assert torch.equal(parameters[0], other)
    logged = {name: torch.tensor([float(step[name]) for step in seen], dtype=torch.float64) for name in LOGGED}
    return {"parameters": parameters[0], **logged}


def main(folder: Path, names: list[str]) -> None:
    verl_on_cpu.make_model(folder)
    ray.init(num_cpus=8, include_dashboard=False, object_store_memory=100_000_000, log_to_driver=False)
    results: dict[str, dict[str, torch.Tensor]] = {}
    groups: dict[int, Any] = {}
    for name in names or [*RUNS]:
        config = configured(folder, RUNS[name])
        config.actor_rollout_ref.rollout.calculate_log_probs = False
        config.transfer_queue.enable = True
        config.transfer_queue.backend.SimpleStorage.num_data_storage_units = 1
        if not groups:
            transfer_queue.init(config.transfer_queue)
        ranks = RUNS[name].ranks
        if ranks not in groups:
            groups[ranks] = workers(ranks, config.actor_rollout_ref)
        results[name] = fit(RUNS[name], groups[ranks], config)
    torch.save(results, folder / "fits.pt")
    transfer_queue.close()
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
