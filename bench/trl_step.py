"""A training step of ``HPOTrainer`` next to one of ``trl.GRPOTrainer``: where its time goes, and peak memory.

    python bench/trl_step.py [--completions 2 --length 512 --hidden 256 --layers 2 --vocabulary 151936 --steps 3]

The model is a small transformer with a real vocabulary. Both trainers sample the same tokens. Each runs in a process of
its own, whose memory is reset after the first step; runs alternate, and medians are printed. Parts are processor time
of all threads, which other load on the machine changes little; a part does not count those inside it.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

KINDS = ("GRPOTrainer", "HPOTrainer")


def parser_of(description: str, **sizes: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes |= {"length": 512, "hidden": 256, "layers": 2, "vocabulary": 151_936, "steps": 3, "repeats": 3}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser


def alternating(
    script: str, option: str, kinds: Sequence[str], repeats: int, environment: Mapping[str, str] | None = None
) -> dict[str, list[dict[str, Any]]]:
    """The last lines of the script's output, of each kind in turn and each in a process of its own."""
    results: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for _ in range(repeats):
        for kind in kinds:
            command = [sys.executable, script, option, kind, *sys.argv[1:]]
            run = subprocess.run(command, capture_output=True, text=True, env=environment)
            if run.returncode:
                raise SystemExit(run.stderr[-4000:])
            results[kind].append(json.loads(run.stdout.splitlines()[-1]))
    return results


def small_model(options: argparse.Namespace, positions: int) -> Any:
    """A small transformer with a real vocabulary."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=options.vocabulary, hidden_size=options.hidden, intermediate_size=2 * options.hidden,
        num_hidden_layers=options.layers, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
        max_position_embeddings=positions, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def megabytes(field: str) -> float:
    """VmRSS or VmHWM of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise KeyError(field)


class Clock:
    """Processor time of methods of a trainer since the start, each without those inside it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.began = self.wall = 0.0
        self.open: list[list[Any]] = []  # the parts that run, the outermost first, and the time of those inside them

    def start(self) -> None:
        self.seconds.clear()
        self.began, self.wall = time.process_time(), time.perf_counter()

    def watch(self, target: Any, name: str, part_of: Callable[..., str]) -> None:
        """``part_of`` gives the part its name, from the arguments of the call."""
        inner = getattr(target, name)

        @functools.wraps(inner)
        def timed(*given: Any, **keywords: Any) -> Any:
            part, began = part_of(*given, **keywords), time.process_time()
            self.open.append([part, 0.0])
            try:
                return inner(*given, **keywords)
            finally:
                spent, (_, inside) = time.process_time() - began, self.open.pop()
                self.seconds[part] = self.seconds.get(part, 0.0) + spent - inside
                if self.open:
                    self.open[-1][1] += spent

        setattr(target, name, timed)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    import datasets
    import torch
    import transformers
    import trl
    from tokenizers import Tokenizer, models, pre_tokenizers

    model = small_model(options, options.prompt + options.length)
    words = {f"w{at}": at for at in range(options.vocabulary)}
    vocabulary = Tokenizer(models.WordLevel(words, unk_token="w3"))
    vocabulary.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=vocabulary, pad_token="w0", bos_token="w1", eos_token="w2", unk_token="w3"
    )
    prompts = [" ".join(f"w{5 + at + row}" for at in range(options.prompt)) for row in range(16)]
    kind: Any = trl.GRPOTrainer
    if options.kind == "HPOTrainer":
        from hpo_core.integrations.trl import HPOTrainer as kind
    draw = torch.Generator().manual_seed(1)

    def rewards(completions: Any, **_: Any) -> list[float]:
        return [float(at % 2) for at in range(len(completions))]

    folder = tempfile.mkdtemp()
    if options.beta:  # TRL loads the reference policy from where the model says it came from
        model.save_pretrained(folder)
        model.config._name_or_path = folder
    trainer = kind(
        model=model,
        args=trl.GRPOConfig(
            folder, per_device_train_batch_size=options.completions, num_generations=options.completions,
            max_completion_length=options.length, num_iterations=options.iterations, beta=options.beta,
            max_steps=(options.steps + 1) * options.iterations, bf16=False, use_cpu=True, gradient_checkpointing=False,
            dataloader_pin_memory=False, report_to="none", save_strategy="no", disable_tqdm=True, log_level="error",
            logging_steps=1000, learning_rate=1e-4,
        ),
        processing_class=tokenizer, reward_funcs=rewards,
        train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
    )  # fmt: skip

    def sampled(prompt_ids: list[list[int]], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        """Random tokens: sampling takes the same time in both."""
        tokens = torch.randint(5, options.vocabulary, (len(prompt_ids), options.length), generator=draw)
        return tokens.tolist(), None

    trainer._generate_single_turn = sampled
    clock = Clock()

    def scored(model: Any, *_: Any, **__: Any) -> str:
        if clock.open and clock.open[-1][0] == "loss":
            return "forward"
        return "scoring, reference policy" if model is trainer.ref_model else "scoring, old policy"

    clock.watch(trainer, "_generate_and_score_completions", lambda *_, **__: "rewards, advantages")
    clock.watch(trainer, "_get_per_token_logps_and_entropies", scored)
    clock.watch(trainer, "_compute_loss", lambda *_, **__: "loss")
    clock.watch(trainer.accelerator, "backward", lambda *_, **__: "backward")
    clock.watch(trainer.accelerator, "clip_grad_norm_", lambda *_, **__: "norm of the gradient")
    resident: list[float] = []

    class Steps(transformers.TrainerCallback):  # type: ignore[misc,unused-ignore]
        def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any, **_: Any) -> None:
            clock.watch(optimizer, "step", lambda *_, **__: "optimiser")

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == options.iterations:
                resident.append(megabytes("VmRSS"))
                Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
                clock.start()

    trainer.add_callback(Steps())
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    whole, wall = time.process_time() - clock.began, time.perf_counter() - clock.wall
    clock.seconds["rest"] = whole - sum(clock.seconds.values())
    parts = {**clock.seconds, "whole": whole, "whole, wall clock": wall}
    return {
        "seconds": {name: seconds / options.steps for name, seconds in parts.items()},
        "megabytes": megabytes("VmHWM") - resident[0],
    }


def main() -> None:
    parser = parser_of(__doc__, completions=2, prompt=16, iterations=2)
    parser.add_argument("--beta", type=float, default=0.04, help="of the penalty that needs the reference policy")
    parser.add_argument("--kind", choices=KINDS, help="run this trainer in this process")
    options = parser.parse_args()
    if options.kind:
        print(json.dumps(measure(options)))
        return
    results = alternating(__file__, "--kind", KINDS, options.repeats)
    parts = list(results[KINDS[0]][0]["seconds"])
    print(f"{'':26}" + "".join(f"{kind:>14}" for kind in KINDS) + f"{'ratio':>8}")
    for part in [*parts, "peak memory, MB"]:
        values = [
            statistics.median(run["megabytes"] if part not in run["seconds"] else run["seconds"][part] for run in runs)
            for runs in results.values()
        ]
        print(f"{part:26}" + "".join(f"{value:14.3f}" for value in values) + f"{values[1] / values[0]:8.2f}")


if __name__ == "__main__":
    main()
