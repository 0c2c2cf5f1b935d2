"""A micro-batch of verl's actor with its loss heads: time to score it and to train on it, and peak memory.

    python bench/verl_step.py [--rows 2 --length 512 --hidden 256 --layers 2 --vocabulary 151936 --steps 3]

verl's FSDP engine runs on the CPU, with the platform that the tests give it, on a small transformer with a real
vocabulary. ``eager`` is its path from logits, ``torch`` its fused kernel for every device; others of its need a GPU.
Each head runs in a process of its own, whose memory is reset after the first micro-batch; runs alternate, and the least
times are printed: processor time of all threads, which other load on the machine changes little.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from trl_step import alternating, megabytes, parser_of, small_model

HEADS = ("eager", "torch", "hpo_core_logits", "hpo_core")
TESTS = Path(__file__).parents[1] / "tests"


def engine_of(options: argparse.Namespace, folder: str) -> Any:
    import torch
    from verl.models.transformers import monkey_patch
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    monkey_patch.is_trl_available = lambda: False  # verl 0.9.1 asks TRL for a class that newer ones lack
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    small_model(options, options.length).save_pretrained(folder)
    model = HFModelConfig(
        path=folder, load_tokenizer=False, enable_gradient_checkpointing=False, use_remove_padding=True,
        use_fused_kernels=options.head != "eager", fused_kernel_options={"impl_backend": options.head},
        override_config={"attn_implementation": "sdpa"},
    )  # fmt: skip
    precision = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")
    settings = FSDPEngineConfig(strategy="fsdp2", mixed_precision=precision, use_torch_compile=False)
    engine = FSDPEngineWithLMHead(model, settings, FSDPOptimizerConfig(lr=1e-4), CheckpointConfig())
    engine.initialize()
    return engine


def measure(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    with tempfile.TemporaryDirectory() as folder:
        engine = engine_of(options, folder)
        import tensordict
        from verl.utils import tensordict_utils as tu

        draw = torch.Generator().manual_seed(1)
        rows = [torch.randint(5, options.vocabulary, (options.length,), generator=draw) for _ in range(options.rows)]
        at = [torch.arange(options.length)] * options.rows
        fields = {"input_ids": rows, "position_ids": at}
        jagged = {name: torch.nested.as_nested_tensor(each, layout=torch.jagged) for name, each in fields.items()}
        data = tensordict.TensorDict(jagged, batch_size=[options.rows])
        tu.assign_non_tensor(
            data, use_remove_padding=True, use_fused_kernels=options.head != "eager", calculate_entropy=True,
            temperature=0.8,
        )  # fmt: skip

        def loss(model_output: Any, data: Any, dp_group: Any) -> tuple[torch.Tensor, dict[str, Any]]:
            logp, entropy = (model_output[name].values() for name in ("log_probs", "entropy"))
            return -logp.mean() - 0.01 * entropy.mean(), {}

        def score() -> None:
            with torch.no_grad():
                engine.forward_step(data, None, forward_only=True)

        def train() -> None:
            engine.forward_step(data, loss, forward_only=False)[0].backward()
            engine.optimizer.zero_grad()

        seconds: dict[str, list[float]] = {"scoring": [], "forward and backward": []}
        peaks = {}
        engine.module.train()
        for name, step in (("scoring", score), ("forward and backward", train)):
            step()
            resident = megabytes("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            for _ in range(options.steps):
                began = time.process_time()
                step()
                seconds[name].append(time.process_time() - began)
            peaks[name] = megabytes("VmHWM") - resident
        torch.distributed.destroy_process_group()
    return {name: (min(seconds[name]), peaks[name]) for name in seconds}


def main() -> None:
    parser = parser_of(__doc__, rows=2)
    parser.add_argument("--head", choices=HEADS, help="run this head in this process")
    options = parser.parse_args()
    if options.head:
        print(json.dumps(measure(options)))
        return
    environment = os.environ | {
        "VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu", "VERL_USE_EXTERNAL_PLUGINS": "hpo_core",
        "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    results = alternating(__file__, "--head", HEADS, options.repeats, environment)
    print(f"{'':36}" + "".join(f"{head:>17}" for head in HEADS))
    for part in results["eager"][0]:
        for at, unit in enumerate(("seconds", "MB beyond what is resident")):
            least = [min(run[part][at] for run in results[head]) for head in HEADS]
            cells = "".join(f"{value:10.{3 if at == 0 else 0}f} ({value / least[0]:4.2f})" for value in least)
            print(f"{f'{part}, {unit}':36}{cells}" if at == 0 else f"{unit:>36}{cells}")


if __name__ == "__main__":
    main()
