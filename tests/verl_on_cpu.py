"""verl's actor on a machine without an accelerator: a platform "cpu", and what its workers compute with a loss head.

``python tests/verl_on_cpu.py FOLDER IMPL_BACKEND...`` is one rank of those that torchrun's variables describe: a tiny
model's actor scores a batch and takes three optimiser steps, once for each head. ``FOLDER/RANK.pt`` has the results.
``eager:LOSS_MODE`` is the model without a head of ours, under another loss.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from pathlib import Path
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def _nothing(*_: Any, **__: Any) -> None:
    pass


@PlatformRegistry.register(platform="cpu")
class CPU(PlatformBase):
    """The platform that verl asks about its device, for a machine without an accelerator."""

    device_name = vendor_name = "cpu"
    device_module = types.SimpleNamespace(
        is_available=lambda: True, current_device=lambda: "cpu", device_count=lambda: 1, mem_get_info=lambda: (1, 1),
        max_memory_allocated=lambda *_: 0, max_memory_reserved=lambda *_: 0, memory_allocated=lambda *_: 0,
        memory_reserved=lambda *_: 0, get_rng_state=torch.get_rng_state, set_rng_state=torch.set_rng_state,
        manual_seed=torch.manual_seed, get_device_properties=lambda *_: types.SimpleNamespace(total_memory=1),
        get_device_name=lambda *_: "cpu", set_device=_nothing, synchronize=_nothing, empty_cache=_nothing,
        reset_peak_memory_stats=_nothing,
    )  # fmt: skip

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> Any:
        return contextlib.nullcontext()

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_cpus": 0}

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    set_device = synchronize = set_allocator_settings = empty_cache = profiler_start = profiler_stop = _nothing
    cudart = _nothing

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed


# ---------------------------------------------------------------------------------------------------------- the actor

LOGGED = ("actor/pg_loss", "actor/entropy_loss", "actor/ppo_kl", "grad_norm")
ROWS, PROMPT, RESPONSE, VOCABULARY, TEMPERATURE = 8, 5, 9, 211, 0.7


def make_model(folder: Path) -> None:
    import tokenizers
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True, initializer_range=0.3,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    words = tokenizers.models.WordLevel({f"w{at}": at for at in range(VOCABULARY)}, unk_token="w3")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), pad_token="w0", bos_token="w1", eos_token="w2"
    ).save_pretrained(folder)


ROOT = "actor_rollout_ref"


def configuration(path: Path, dtype: str, *lines: str, **settings: Any) -> Any:
    """verl's own configuration, with the settings that the CPU and these tests need; ``lines`` come last."""
    import verl
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    settings = {
        "actor.strategy": "fsdp2", "model.path": path, "actor.entropy_coeff": 0.1, "actor.loss_agg_mode": "token-mean",
        "actor.ppo_mini_batch_size": ROWS, "actor.ppo_micro_batch_size_per_gpu": 2, "actor.use_dynamic_bsz": False,
        "actor.use_torch_compile": False, "actor.fsdp_config.use_torch_compile": False, "actor.optim.lr": 1e-3,
        "rollout.log_prob_use_dynamic_bsz": False, "rollout.log_prob_micro_batch_size_per_gpu": 2, "rollout.n": 1,
        "rollout.name": "vllm", "rollout.tensor_model_parallel_size": 1, "model.use_remove_padding": False,
        "model.enable_gradient_checkpointing": False, "actor.fsdp_config.model_dtype": "fp32",
    } | settings  # fmt: skip
    precision = f"{{param_dtype: {dtype}, reduce_dtype: fp32, buffer_dtype: fp32}}"
    added = {"model.override_config.attn_implementation": "eager", "actor.fsdp_config.mixed_precision": precision}
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer/config"), version_base=None):
        own = [f"{ROOT}.{name}={value}" for name, value in settings.items()]
        own += [f"+{ROOT}.{name}={value}" for name, value in added.items()]
        config = compose("ppo_trainer", [*own, *lines])
    OmegaConf.resolve(config)
    return config


def actor(path: Path, impl_backend: str, packed: bool, dtype: str, loss_mode: str) -> Any:
    from verl.workers.engine_workers import ActorRolloutRefWorker

    config = configuration(
        path, dtype, **{
            "model.use_remove_padding": packed, "model.use_fused_kernels": impl_backend != "eager",
            "model.fused_kernel_options.impl_backend": impl_backend, "actor.policy_loss.loss_mode": loss_mode,
        },
    )  # fmt: skip
    worker = ActorRolloutRefWorker(config[ROOT], role="actor")
    worker.init_model()
    return worker


def batch() -> dict[str, torch.Tensor]:
    """Ragged prompts, padded on the left, and responses, padded on the right; each rank has its rows."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (ROWS, PROMPT + RESPONSE), generator=draw)
    prompts = torch.randint(1, PROMPT + 1, (ROWS, 1), generator=draw)
    responses = torch.randint(2, RESPONSE + 1, (ROWS, 1), generator=draw)
    at = torch.arange(PROMPT + RESPONSE)
    mask = (at >= PROMPT - prompts) & (at < PROMPT + responses)
    ids, response_mask = ids * mask, mask[:, PROMPT:]
    noise = torch.randn(ROWS, RESPONSE + 1, generator=draw)
    whole = {
        "input_ids": ids, "prompts": ids[:, :PROMPT], "responses": ids[:, PROMPT:], "attention_mask": mask.long(),
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0), "response_mask": response_mask.long(),
        "old_log_probs": 0.5 * noise[:, 1:], "advantages": noise[:, :1] * response_mask,
    }  # fmt: skip
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return {name: each[rank * ROWS // ranks : (rank + 1) * ROWS // ranks] for name, each in whole.items()}


def computed(path: Path, impl_backend: str, packed: bool, dtype: str, loss_mode: str = "vanilla") -> dict[str, Any]:
    """Scores of the responses, the gradients of a step, and what three optimiser steps log and leave."""
    from verl import DataProto
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

    torch.manual_seed(2)
    fields, worker = batch(), actor(path, impl_backend, packed, dtype, loss_mode)

    def given(**settings: Any) -> Any:
        data = DataProto.from_single_dict(fields)
        data.meta_info.update(multi_turn=False, temperature=TEMPERATURE)
        found = left_right_2_no_padding(data.to_tensordict())
        tu.assign_non_tensor(found, calculate_entropy=True, **settings)
        return found

    scored = given(compute_loss=False)
    outputs = worker.compute_log_prob(scored)
    scores = {name: no_padding_2_padding(tu.get(outputs, name), scored).float() for name in ("log_probs", "entropy")}
    valid = fields["response_mask"] != 0
    fields["old_log_probs"] = (scores["log_probs"] + fields["old_log_probs"]) * valid
    fields["entropy"] = scores["entropy"]  # as verl's trainer leaves it beside the log-probabilities

    engine, gradients = worker.actor.engine, []
    engine.optimizer_step = functools.partial(noted_step, engine, engine.optimizer_step, gradients)
    step = given(
        compute_loss=True, distillation_use_topk=False, distillation_only=False, global_batch_size=ROWS,
        mini_batch_size=ROWS, epochs=3, seed=1, dataloader_kwargs={"shuffle": False},
    )  # fmt: skip
    metrics = tu.get(worker.update_actor(step), "metrics")
    return {
        **{name: score[valid] for name, score in scores.items()},
        "gradient": gradients[0],
        "parameters": torch.cat([whole(each.detach()).flatten() for each in engine.module.parameters()]),
        "logged": torch.tensor([float(each) for name in LOGGED for each in metrics[name]]),
    }


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def noted_step(engine: Any, step: Any, gradients: list[torch.Tensor]) -> Any:
    gradients.append(torch.cat([whole(each.grad).flatten().clone() for each in engine.module.parameters()]))
    return step()


def start_engines() -> None:
    """The process group of this rank, and verl's FSDP2 engine on it."""
    from verl.models.transformers import monkey_patch
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    monkey_patch.is_trl_available = lambda: False  # verl 0.9.1 asks TRL for a class that left it with 1.0
    EngineRegistry._engines["language_model"]["fsdp2"]["cpu"] = FSDPEngineWithLMHead
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")


def main(folder: Path, impl_backends: list[str]) -> None:
    import transformers

    start_engines()
    rank = torch.distributed.get_rank()
    if rank == 0:
        make_model(folder)
    torch.distributed.barrier()
    forward, results = transformers.Qwen2ForCausalLM.forward, {}
    modes = [name.partition(":")[2] for name in impl_backends if ":" in name]
    for name in modes:
        results[name] = computed(folder, "eager", False, "fp32", name)
    impl_backends = [name for name in impl_backends if ":" not in name]
    for dtype in ("fp32", "bf16"):
        for packed in (False, True):
            for impl_backend in impl_backends:
                transformers.Qwen2ForCausalLM.forward = forward  # verl's own heads stay in the class
                results[impl_backend, packed, dtype] = computed(folder, impl_backend, packed, dtype)
                assert transformers.Qwen2ForCausalLM.forward is forward or impl_backend == "torch"
    torch.save(results, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
