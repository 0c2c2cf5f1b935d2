"""TRL's trainers on the processes that torchrun started, under an engine of accelerate's.

``torchrun --nproc-per-node 2 tests/trl_over_ranks.py ENGINE FOLDER`` trains the demo's model with GRPOTrainer and
HPOTrainer, with and without accumulation, and with a gate over groups that have rows on both processes;
``FOLDER/ENGINE-RANK.pt`` has what was sampled, what was logged, and the parameters. ``alone`` is the last of these on
one process.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ACCUMULATED = (1, 4)
# Rewards stand beside the first update of a rollout, and a gate says itself what it clips.
LOGGED = ("loss", "grad_norm", "clip_ratio/region_mean", "entropy", "reward", "hpo_core/group/clip_fraction")


def ddp() -> dict[str, Any]:
    return {}


def fsdp2() -> dict[str, Any]:
    """accelerate takes FSDP for accelerators only; here it is told that gloo is one."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    begin, plugins = AcceleratorState.__init__, []

    def begin_sharded(self: Any, *arguments: Any, **keywords: Any) -> None:
        begin(self, *arguments, **keywords)
        plugins.extend(each for each in [keywords.get("fsdp_plugin")] if each is not None)
        if plugins and self.distributed_type == DistributedType.MULTI_CPU:
            self.__dict__.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugins[-1])
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = begin_sharded  # type: ignore[method-assign]
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    return {
        "fsdp": "full_shard",
        "fsdp_config": {
            "fsdp_version": 2, "reshard_after_forward": True, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"], "cpu_ram_efficient_loading": False,
        },
    }  # fmt: skip


def zero(stage: int) -> dict[str, Any]:
    """accelerate leaves DeepSpeed out where it is told to use the CPU; it is told of a device that is one."""
    os.environ |= {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_TORCH_DEVICE": "cpu", "DS_ACCELERATOR": "cpu"}
    import deepspeed
    from accelerate.state import PartialState

    prepare = PartialState._prepare_backend
    PartialState._prepare_backend = lambda self, cpu, sagemaker, _=None: prepare(self, cpu, sagemaker, "gloo")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = (
        False  # gloo, not what DeepSpeed would compile in its place
    )
    configuration = {
        "zero_optimization": {"stage": stage}, "zero_force_ds_cpu_optimizer": False, "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True, "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto", "train_batch_size": "auto",
    }  # fmt: skip
    return {"deepspeed": configuration, "use_cpu": False}


ENGINES = {"ddp": ddp, "fsdp2": fsdp2, "zero2": lambda: zero(2), "zero3": lambda: zero(3), "alone": ddp}


def is_sharded(engine: str, model: Any) -> bool:
    """Whether the engine has the model, and not another one in silence."""
    if engine == "fsdp2":
        return all(hasattr(each, "full_tensor") for each in model.parameters())
    if engine.startswith("zero"):
        return bool(model.zero_optimization_stage() == int(engine[-1]))
    return type(model).__name__ == "DistributedDataParallel" or engine == "alone"


def parameters_of(engine: str, model: Any) -> torch.Tensor:
    gathered: Any = contextlib.nullcontext()
    if engine == "zero3":
        import deepspeed

        gathered = deepspeed.zero.GatheredParameters(list(model.parameters()))
    with gathered:
        whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in model.parameters()]
        return torch.cat([each.detach().flatten().clone() for each in whole]).double()


def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Completions at random: the same in every row of a step, however many processes have the rows."""
    tokenizer, first = trainer.processing_class, RANK * len(prompts)
    completions = []
    for row in range(first, first + len(prompts)):
        draw = torch.Generator().manual_seed(1000 * trainer.state.global_step + row)
        length = int(torch.randint(3, 13, (), generator=draw))
        completions.append(torch.randint(3, len(tokenizer), (length,), generator=draw).tolist())
    return {"prompt_ids": tokenizer(prompts)["input_ids"], "completion_ids": completions, "logprobs": None}


def run(engine: str, kind: Any, folder: Path, settings: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    from trainers import build

    trainer = build(kind, folder, extra=extra, **settings)
    trainer.train()
    assert trainer.accelerator.num_processes == RANKS
    assert is_sharded(engine, trainer.model_wrapped), type(trainer.model_wrapped)
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(entries) == settings["max_steps"]
    return {
        "tokens": trainer.reward_funcs[0].seen,
        "parameters": parameters_of(engine, trainer.model_wrapped),
        **{
            name: torch.tensor([float(entry[name]) for entry in entries if name in entry], dtype=torch.float64)
            for name in LOGGED
        },
    }


def main(engine: str, folder: Path) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if RANKS > 1:
        torch.distributed.init_process_group("gloo")
    options = ENGINES[engine]()
    from trl import GRPOTrainer

    import hpo_core as hpo
    from hpo_core.integrations.trl import HPOTrainer

    results: dict[Any, Any] = {}
    if RANKS > 1:
        for steps in ACCUMULATED:
            settings = {
                "gradient_accumulation_steps": steps, "per_device_train_batch_size": 4, "steps_per_generation": 4,
                "num_iterations": 2 if steps > 1 else 1, "epsilon": 0.01, "max_steps": 6, **options,
            }  # fmt: skip
            for kind in (GRPOTrainer, HPOTrainer):
                results[kind.__name__, steps] = run(engine, kind, folder, settings, {})
    gates, level = hpo.gates, hpo.gates.Level
    levels = tuple(level(gates.Tanh(0.01), unit=unit) for unit in (gates.Unit.TRAJECTORY, gates.Unit.GROUP))
    settings = {
        "per_device_train_batch_size": 16 // RANKS, "num_generations": 16, "steps_per_generation": 1,
        "num_iterations": 3, "max_steps": 6, **options,
    }  # fmt: skip
    gate = gates.RatioGate("over groups", gates.LogClip((-0.02, -0.02), (0.02, 0.02)), levels)
    extra = {"gate": gate, "rollout_func": rollout}
    results["levels"] = run(engine, HPOTrainer, folder, settings, extra)
    bounds = functools.partial(gates.m2po_bounds, budget=1e-5)  # of the tokens of both processes
    extra = {"gate": gates.m2po_clip(), "gate_inputs": bounds, "rollout_func": rollout}
    results["bounds"] = run(engine, HPOTrainer, folder, settings, extra)
    torch.save(results, folder / f"{engine}-{RANK}.pt")
    if RANKS > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
