"""Train a small language model with TRL's trainer and hpo_core's loss: minutes on two cores, nothing is downloaded.

The model (138,496 parameters, random weights) learns to write eight letters backwards: "abcdefgh=" -> "hgfedcba". A
short supervised warm start gives it a chance to be right; from there on it only gets 1 or 0 for a whole answer.

    python examples/demo.py --gate dapo --seed 11 --output demo_output

writes ``reward.png`` and ``curve.json`` and prints the cost of the loss next to TRL's own on the same micro-batches.
``--random-reward`` is the control: rewards that know nothing about the answer must not raise the accuracy.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import string
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import datasets
import tokenizers
import torch
from transformers import PreTrainedTokenizerFast, PrinterCallback, Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import hpo_core as hpo
from hpo_core.backends import choice, resolve
from hpo_core.integrations.trl import HPOTrainer

# The gate, and the denominator its paper uses, by TRL's name for it.
GATES = {
    "dapo": (hpo.gates.dapo, "dapo"),
    "ppo_clip": (hpo.gates.ppo_clip, "dapo"),
    "cispo": (hpo.gates.cispo, "cispo"),
    "reinforce": (hpo.gates.reinforce, "dapo"),
    "gspo": (hpo.gates.gspo, "grpo"),
    "gspo_token": (hpo.gates.gspo_token, "grpo"),
    "fiberpo": (hpo.gates.fiberpo, "grpo"),
}
ENTROPIES = ("none", "forking_tokens", "ares", "epo", "adaptive", "random")
ALPHABET = string.ascii_lowercase + string.digits + " +-*/=<>,.;:?!()"
LETTERS, LENGTH, LONGEST = "abcdefghij", 8, 12
COMPARED_EVERY = 8  # micro-batches


class Epo:
    """EPO's corridor around the mean entropies of earlier optimiser steps, as TRL's micro-batches see them."""

    def __init__(self) -> None:
        self.history: list[float] = []
        self.step = -1

    def __call__(self, entropy: torch.Tensor, batch: hpo.PackedBatch, weights: torch.Tensor, seed: int) -> torch.Tensor:
        history = torch.tensor(self.history, device=entropy.device)
        if seed != self.step:  # the first micro-batch of a step stands for it
            self.step = seed
            self.history.append(entropy.detach()[batch.mask].mean().item())
        return hpo.entropy.epo(entropy, batch, weights, history, coefficient=0.01)


def random_fifth(entropy: torch.Tensor, batch: hpo.PackedBatch, seed: int) -> hpo.entropy.Selection:
    """The control: as many tokens as forking_tokens selects, drawn without looking at their entropy."""
    draw = torch.Generator().manual_seed(seed)
    score = torch.rand(entropy.shape, generator=draw).to(entropy.device)
    window = hpo.entropy.forking_tokens("0.2")
    return hpo.entropy.Selection(mask=window.apply(score, batch, window.fit(score, batch)))


def of_entropy(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of HPOTrainer and fields of GRPOConfig for the entropy method of this name."""
    trainer: dict[str, dict[str, Any]] = {
        "forking_tokens": {"window": hpo.entropy.forking_tokens("0.2")},
        "ares": {"window": hpo.entropy.ares(4)},
        "epo": {"entropy_penalty": Epo()},
        "random": {"entropy": random_fifth},
    }
    adaptive = {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 0.2}
    return trainer.get(name, {}), adaptive if name == "adaptive" else {}


# ---------------------------------------------------------------------------------------------- the model and the task


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character."""
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", "<unk>", *ALPHABET])}
    characters = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    characters.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    characters.decoder = tokenizers.decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """A Qwen3 of two layers with random weights."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def make_prompts(count: int, generator: random.Random) -> list[str]:
    return ["".join(generator.choices(LETTERS, k=LENGTH)) + "=" for _ in range(count)]


def is_right(prompt: str, completion: str) -> bool:
    return completion == prompt[:LENGTH][::-1]


def reward_answer(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """1 for the right answer, else 0."""
    return [float(is_right(prompt, completion)) for prompt, completion in zip(prompts, completions, strict=True)]


class RandomReward:
    """The control: 1 or 0 without looking."""

    __name__ = "random_reward"

    def __init__(self, seed: int) -> None:
        self.generator = random.Random(seed)

    def __call__(self, prompts: list[str], **_: Any) -> list[float]:
        return [float(self.generator.random() < 0.5) for _ in prompts]


@torch.no_grad()
def accuracy(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: list[str], sample: bool) -> float:
    """Share of right answers, sampled at temperature 1 or greedy."""
    model.eval()
    encoded = tokenizer(prompts, return_tensors="pt", return_token_type_ids=False).to(model.device)
    choice = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if sample else {"do_sample": False}
    written = model.generate(**encoded, max_new_tokens=LONGEST, **choice)[:, encoded["input_ids"].shape[1] :]
    answers = tokenizer.batch_decode(written, skip_special_tokens=True)
    return statistics.fmean(is_right(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True))


def warm_start(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, target: float, generator: random.Random
) -> int:
    """Supervised steps until the sampled accuracy reaches ``target``; returns how many."""
    probes = make_prompts(256, generator)  # its own prompts: the stopping rule must not select the reported ones
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    step = 0
    while accuracy(model, tokenizer, probes, sample=True) < target and step < 400:
        model.train()
        for _ in range(10):
            step += 1
            optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, step / 30)
            prompts = make_prompts(128, generator)
            answers = [prompt[:LENGTH][::-1] + "<eos>" for prompt in prompts]
            texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
            tokens = tokenizer(texts, return_tensors="pt").input_ids.to(model.device)
            labels = tokens.clone()
            labels[:, : LENGTH + 1] = -100
            optimizer.zero_grad()
            model(input_ids=tokens, labels=labels).loss.backward()
            optimizer.step()
    return step


# -------------------------------------------------------------------------------------------------------- measurements


class MeasuredTrainer(HPOTrainer):
    """HPOTrainer that counts its loss calls and times some of them, and TRL's own loss on the same tensors."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.served: Counter[str] = Counter()
        self.seconds: dict[str, list[float]] = {"hpo_core": [], "TRL": []}
        self._comparing = False

    def _policy_loss(self, logps: torch.Tensor, entropies: torch.Tensor, inputs: dict, *rest: Any) -> torch.Tensor:
        if not self._comparing:
            backend = self._hpo.backend or choice("gates", logps.device.type)
            self.served[backend] += 1
            if self.served.total() % COMPARED_EVERY == 0:
                self._compare(logps, entropies, inputs)
        return super()._policy_loss(logps, entropies, inputs, *rest)

    def _compare(self, logps: torch.Tensor, entropies: torch.Tensor, inputs: dict) -> None:
        """Time both losses, metrics and backward included, from given log-probabilities to their gradient."""
        kept, self._comparing = self._metrics, True
        losses = [("hpo_core", HPOTrainer._compute_loss), ("TRL", GRPOTrainer._compute_loss)]
        if len(self.seconds["TRL"]) % 2:  # the first meets colder caches: take turns
            losses.reverse()
        for name, compute_loss in losses:
            leaf = logps.detach().requires_grad_()
            self._metrics = {mode: type(values)(list) for mode, values in kept.items()}
            self._get_per_token_logps_and_entropies = lambda *_, leaf=leaf, **__: (leaf, entropies, None)
            before = now(leaf.device)
            compute_loss(self, None, inputs).backward()
            self.seconds[name].append(now(leaf.device) - before)
            del self._get_per_token_logps_and_entropies  # the method of the class again
        self._metrics, self._comparing = kept, False


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Progress(TrainerCallback):
    """A bar with the last reward, and the curve."""

    def __init__(self) -> None:
        self.curve: list[dict[str, float]] = []
        self.reward = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.started = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "entropy" not in logs:  # the trainer's last line
            return
        names = {"reward": "reward", "entropy": "entropy", "loss": "loss", "grad_norm": "grad_norm"}
        names |= {"hpo_core/clip_fraction": "clip_fraction", "step_time": "seconds"}
        self.curve.append({"step": state.global_step} | {names[key]: logs[key] for key in names if key in logs})
        self.reward = logs.get("reward", self.reward)  # logged on the steps that generate
        done, total = state.global_step, state.max_steps
        left = (time.perf_counter() - self.started) / done * (total - done)
        bar = ("#" * (30 * done // total)).ljust(30, ".")
        seen = f"reward {self.reward:.2f}  entropy {logs['entropy']:.2f}"
        line = f"[{bar}] step {done}/{total}  {seen}  {left:3.0f} s left"
        if sys.stderr.isatty():
            print(f"\r{line} ", end="" if done < total else "\n", file=sys.stderr, flush=True)
        elif done % max(1, total // 10) == 0:
            print(line, file=sys.stderr, flush=True)


def draw(result: dict[str, Any], path: Path) -> None:
    """Reward, entropy, and accuracy before and after."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (reward, entropy, right) = pyplot.subplots(1, 3, figsize=(12, 3.5), width_ratios=(2, 2, 1))
    for axis, name, colour in ((reward, "reward", "tab:blue"), (entropy, "entropy", "tab:orange")):
        points = [point for point in result["curve"] if name in point]  # rewards: only on steps that generate
        axis.plot([point["step"] for point in points], [point[name] for point in points], colour)
    reward.set(title="reward of the sampled answers", xlabel="optimiser step", ylim=(0, 1))
    entropy.set(title="entropy per token (nats)", xlabel="optimiser step", ylim=(0, None))
    for offset, when in ((-0.2, "before"), (0.2, "after")):
        bars = right.bar([offset, 1 + offset], [result[when]["sampled"], result[when]["greedy"]], 0.4, label=when)
        right.bar_label(bars, fmt="%.2f")
    right.set(title="accuracy, 512 new prompts", xticks=[0, 1], xticklabels=["sampled", "greedy"], ylim=(0, 1.3))
    right.legend(loc="upper center", ncols=2)
    by = f"gate {result['gate']}, entropy {result['entropy']}, seed {result['seed']}, reward {result['reward']}"
    figure.suptitle(by)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


# ------------------------------------------------------------------------------------------------------------- the run


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gate", choices=GATES, default="dapo", help="the ratio gate (default: dapo)")
    parser.add_argument("--entropy", choices=ENTROPIES, default="none", help="the entropy method (default: none)")
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--steps", type=int, default=400, help="optimiser steps (default: 400)")
    parser.add_argument("--random-reward", action="store_true", help="the control: rewards that know nothing")
    parser.add_argument("--backend", help="a name from hpo_core.backends() (default: by device)")
    parser.add_argument("--warm-start", type=float, default=0.25, help="accuracy that ends it (default: 0.25)")
    parser.add_argument("--output", type=Path, default=Path("demo_output"), help="folder (default: demo_output)")
    options = parser.parse_args(argv)
    if options.steps < 1:
        parser.error(f"--steps: expected an integer above 0, got {options.steps}")
    try:
        resolve("gates", torch.empty(0, device="cuda" if torch.cuda.is_available() else "cpu"), options.backend)
    except (ValueError, RuntimeError) as error:
        parser.error(f"--{error}")
    return options


def main(argv: list[str] | None = None) -> dict[str, Any]:
    options = parse_arguments(argv)
    started = time.perf_counter()
    torch.set_num_threads(1)  # matrices this small gain nothing from a second thread
    options.output.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, options.seed)
    make_gate, loss_type = GATES[options.gate]
    method, fields = of_entropy(options.entropy)
    print(f"model: {sum(parameter.numel() for parameter in model.parameters()):,} parameters, built here")
    for availability in hpo.backends().values():
        print(f"  backend {availability!r}")

    config = GRPOConfig(
        output_dir=str(options.output),
        loss_type=loss_type,
        seed=options.seed,
        max_steps=options.steps,
        learning_rate=3e-4,
        lr_scheduler_type="linear",
        max_grad_norm=0.5,
        per_device_train_batch_size=128,
        steps_per_generation=4,  # four optimiser steps per rollout: from the second on ratios leave 1
        num_generations=16,
        max_completion_length=LONGEST,
        top_k=0,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=False,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        log_level="error",
        **fields,
    )
    generator = random.Random(options.seed)
    training, held_out = make_prompts(2000, generator), make_prompts(512, generator)
    model.to(config.device)
    supervised = warm_start(model, tokenizer, options.warm_start, generator)
    warm = time.perf_counter()
    print(f"warm start: {supervised} supervised steps in {warm - started:.0f} s")

    progress = Progress()
    trainer = MeasuredTrainer(
        model=model,
        args=config,
        processing_class=tokenizer,
        reward_funcs=RandomReward(options.seed) if options.random_reward else reward_answer,
        train_dataset=datasets.Dataset.from_dict({"prompt": training}),
        callbacks=[progress],
        gate=make_gate(),
        backend=options.backend,
        **method,
    )
    trainer.remove_callback(PrinterCallback)

    def measure() -> dict[str, float]:
        return {kind: accuracy(model, tokenizer, held_out, kind == "sampled") for kind in ("sampled", "greedy")}

    before = measure()
    began = time.perf_counter()
    trainer.train()
    trained = time.perf_counter() - began
    result = {
        "gate": options.gate,
        "entropy": options.entropy,
        "seed": options.seed,
        "reward": "random" if options.random_reward else "the answer",
        "before": before,
        "after": measure(),
        "training_seconds": trained,
        "step_milliseconds": 1e3 * trained / options.steps,
        "loss_milliseconds": {
            name: 1e3 * statistics.median(seen) if seen else None for name, seen in trainer.seconds.items()
        },
        "loss_calls": dict(trainer.served),
        "curve": progress.curve,
    }
    (options.output / "curve.json").write_text(json.dumps(result, indent=1))
    draw(result, options.output / "reward.png")
    report(result, options.output, time.perf_counter() - started)
    return result


def report(result: dict[str, Any], output: Path, seconds: float) -> None:
    step = result["step_milliseconds"]
    print(f"\n{'accuracy':<12}{'before':>8}{'after':>8}")
    for kind in ("sampled", "greedy"):
        print(f"{kind:<12}{result['before'][kind]:>8.3f}{result['after'][kind]:>8.3f}")
    print(f"\ntraining: {result['training_seconds']:.0f} s, {step:.0f} ms a step; everything: {seconds:.0f} s")
    print("loss with metrics and backward, median on the same micro-batches:")
    for name, milliseconds in result["loss_milliseconds"].items():
        if milliseconds is None:
            print(f"  {name:<9}not timed: each {COMPARED_EVERY}th micro-batch is")
        else:
            print(f"  {name:<9}{milliseconds:>7.2f} ms, {100 * milliseconds / step:.1f} % of a step")
    for name, calls in result["loss_calls"].items():
        print(f"loss computed by backend {name!r}: {calls} times")
    print(f"written: {output / 'reward.png'}, {output / 'curve.json'}")


if __name__ == "__main__":
    main()
