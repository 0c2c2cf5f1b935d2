"""Learning curves of ``HPOTrainer`` next to those of ``trl.GRPOTrainer``: the demo's task, one configuration, seeds.

    python bench/learning_curves.py [--seeds 3 --steps 400 --output bench/results]

The runs of a seed start from one model after its warm start, with one state of the random numbers. They part where
rounding first changes a sampled token. How far rounding alone takes them apart shows a third run of each seed, that of
``GRPOTrainer`` with weights greater by two units in their last place. Equal within noise means, before anything runs:

* the mean rewards over the last quarter of the rollouts differ by at most two standard errors, which are over seeds;
* rollouts of both trainers differ in their reward by at most 1.5 times as much as those of the third run (root of the
  mean square).

The rewards are kept in learning_curves.json, which bench/curve_pictures.py draws.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import datasets
import demo
import torch
import transformers
import trl

from hpo_core.integrations.trl import HPOTrainer

KINDS = {"GRPOTrainer": trl.GRPOTrainer, "HPOTrainer": HPOTrainer, "GRPO nudged": trl.GRPOTrainer}
STEPS_PER_ROLLOUT = 4
SHOWN = 10  # points of a curve


class Curve(NamedTuple):
    """One run: for each rollout its mean reward and its tokens, and the accuracy on new prompts at the end."""

    rewards: list[float]
    tokens: list[list[list[int]]]
    accuracy: float
    entropies: list[float]  # of optimiser steps


class Answers:
    """The demo's reward, which keeps its results and the answers' tokens."""

    __name__ = "answer"

    def __init__(self) -> None:
        self.rewards: list[float] = []
        self.tokens: list[list[list[int]]] = []

    def __call__(self, prompts: list[str], completions: list[str], completion_ids: Any, **_: Any) -> list[float]:
        found = demo.reward_answer(prompts, completions)
        self.rewards.append(statistics.fmean(found))
        self.tokens.append([list(each) for each in completion_ids])
        return found


def run(
    kind: Any, model: Any, tokenizer: Any, task: tuple[list[str], list[str]], seed: int, steps: int,
    extra: dict[str, Any] | None = None, **fields: Any,
) -> Curve:  # fmt: skip
    """A run of a trainer class, with further arguments and fields of its configuration."""
    (prompts, held_out), answers, progress = task, Answers(), demo.Progress()
    with tempfile.TemporaryDirectory() as folder:
        config = trl.GRPOConfig(
            folder, seed=seed, max_steps=steps, learning_rate=3e-4, max_grad_norm=0.5, loss_type="dapo",
            epsilon=0.2, epsilon_high=0.28, per_device_train_batch_size=128, steps_per_generation=STEPS_PER_ROLLOUT,
            num_generations=16, max_completion_length=demo.LONGEST, top_k=0, bf16=False, gradient_checkpointing=False,
            use_cpu=True, dataloader_pin_memory=False, report_to="none", save_strategy="no", disable_tqdm=True,
            log_level="error", logging_steps=1, **fields,
        )  # fmt: skip
        trainer = kind(
            model=model, args=config, processing_class=tokenizer, reward_funcs=answers,
            train_dataset=datasets.Dataset.from_dict({"prompt": prompts}), callbacks=[progress], **extra or {},
        )  # fmt: skip
        trainer.remove_callback(transformers.PrinterCallback)
        transformers.set_seed(seed)
        trainer.train()
    accuracy = demo.accuracy(model, tokenizer, held_out, sample=False)
    return Curve(answers.rewards, answers.tokens, accuracy, [point["entropy"] for point in progress.curve])


def start(seed: int) -> tuple[Any, Any, tuple[list[str], list[str]]]:
    """The model of a seed after its warm start, its tokenizer, and prompts to train and to test with."""
    tokenizer = demo.build_tokenizer()
    model, generator = demo.build_model(tokenizer, seed), random.Random(seed)
    task = demo.make_prompts(2000, generator), demo.make_prompts(512, generator)
    demo.warm_start(model, tokenizer, 0.25, generator)
    return model, tokenizer, task


def runs_of_seed(seed: int, steps: int) -> dict[str, Curve]:
    model, tokenizer, task = start(seed)
    nudged = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in nudged.parameters():
            parameter.mul_(1 + 2**-22)
    starts = {"GRPO nudged": nudged}
    return {
        kind: run(trainer, starts.get(kind, copy.deepcopy(model)), tokenizer, task, seed, steps)
        for kind, trainer in KINDS.items()
    }


def mean_and_error(values: list[float]) -> tuple[float, float]:
    spread = statistics.stdev(values) if len(values) > 1 else math.nan
    return statistics.fmean(values), spread / math.sqrt(len(values))


def parting(one: Curve, other: Curve) -> str:
    """Where the sampled tokens first differ."""
    pairs = enumerate(zip(one.tokens, other.tokens, strict=True))
    at = next((at for at, (mine, theirs) in pairs if mine != theirs), None)
    return "nowhere" if at is None else f"in rollout {at}, after {at * STEPS_PER_ROLLOUT} optimiser steps"


def root_mean_square(results: list[dict[str, Curve]], one: str, other: str) -> float:
    """The root mean square of the differences between rollouts of the same seed."""
    pairs = [pair for runs in results for pair in zip(runs[one].rewards, runs[other].rewards, strict=True)]
    return math.sqrt(statistics.fmean((mine - theirs) ** 2 for mine, theirs in pairs))


def report(results: list[dict[str, Curve]]) -> None:
    grpo, hpo, nudged = KINDS
    rollouts = len(results[0][hpo].rewards)
    for seed, runs in enumerate(results):
        for kind in (hpo, nudged):
            print(f"seed {seed}: the tokens of {grpo} and {kind} part {parting(runs[grpo], runs[kind])}")

    def line(name: str, of: list[dict[str, float]]) -> bool:
        means = {kind: mean_and_error([values[kind] for values in of]) for kind in KINDS}
        apart, error = means[hpo][0] - means[grpo][0], math.hypot(means[hpo][1], means[grpo][1])
        cells = "".join(f"{mean:9.3f} ± {spread:.3f}" for mean, spread in means.values())
        print(f"{name:<28}{cells}{apart:+11.3f} ± {error:.3f}")
        return abs(apart) <= 2 * error

    def rewards(first: int, last: int) -> list[dict[str, float]]:
        return [{kind: statistics.fmean(runs[kind].rewards[first:last]) for kind in KINDS} for runs in results]

    print(f"\n{len(results)} seeds, mean ± standard error")
    print(f"{'reward of rollouts':<28}" + "".join(f"{kind:>17}" for kind in KINDS) + f"{'HPO - GRPO':>19}")
    edges = sorted({rollouts * at // SHOWN for at in range(SHOWN + 1)})
    for first, last in itertools.pairwise(edges):
        line(f"{first} to {last - 1}", rewards(first, last))
    is_close = line("the last quarter", rewards(rollouts * 3 // 4, rollouts))
    line("greedy accuracy, new prompts", [{kind: runs[kind].accuracy for kind in KINDS} for runs in results])

    apart, noise = root_mean_square(results, grpo, hpo), root_mean_square(results, grpo, nudged)
    print(f"\nrewards of a rollout differ from those of {grpo} by {apart:.4f} ({hpo}) and {noise:.4f} ({nudged})")
    print(f"equal within noise: {'yes' if is_close and apart <= 1.5 * noise else 'no'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="how many, at least 2 (default: 3)")
    parser.add_argument("--steps", type=int, default=400, help="optimiser steps (default: 400)")
    parser.add_argument("--output", type=Path, default=Path("bench/results"))
    options = parser.parse_args()
    if options.seeds < 2:
        parser.error(f"--seeds: expected at least 2, as errors are over seeds, got {options.seeds}")
    torch.set_num_threads(1)  # matrices this small gain nothing from a second thread
    results = [runs_of_seed(seed, options.steps) for seed in range(options.seeds)]
    options.output.mkdir(parents=True, exist_ok=True)
    rewards = {seed: {kind: curve.rewards for kind, curve in runs.items()} for seed, runs in enumerate(results)}
    (options.output / "learning_curves.json").write_text(json.dumps(rewards))
    report(results)


if __name__ == "__main__":
    main()
