"""Reward and entropy of entropy methods on the demo's task, next to none and to a control that selects at random.

    python bench/entropy_curves.py [--seeds 0 1 2 --steps 400 --output bench/results]

All runs of a seed start from one model after its warm start, with one state of the random numbers. The control selects
a fifth of the tokens, as forking_tokens does, without looking at their entropy. The curves are kept in
entropy_curves.json, which bench/curve_pictures.py draws.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from pathlib import Path

import torch
from learning_curves import HPOTrainer, demo, mean_and_error, run, start

QUARTER = 4


def curves_of(seed: int, steps: int) -> dict[str, dict[str, object]]:
    model, tokenizer, task = start(seed)
    curves: dict[str, dict[str, object]] = {}
    for name in demo.ENTROPIES:
        extra, fields = demo.of_entropy(name)
        found = run(HPOTrainer, copy.deepcopy(model), tokenizer, task, seed, steps, extra, **fields)
        last = len(found.rewards) * (QUARTER - 1) // QUARTER
        curves[name] = {
            "rewards": found.rewards,
            "entropies": found.entropies,
            "all rewards": statistics.fmean(found.rewards),
            "last quarter": statistics.fmean(found.rewards[last:]),
            "entropy at the end": statistics.fmean(found.entropies[-len(found.entropies) // 10 :]),
            "accuracy": found.accuracy,
        }
        print(
            f"seed {seed}, {name}: reward {curves[name]['last quarter']:.3f}, accuracy {found.accuracy:.3f}", flush=True
        )
    return curves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="which (default: 0 1 2)")
    parser.add_argument("--steps", type=int, default=400, help="optimiser steps (default: 400)")
    parser.add_argument("--output", type=Path, default=Path("bench/results"))
    options = parser.parse_args()
    torch.set_num_threads(1)  # matrices this small gain nothing from a second thread
    options.output.mkdir(parents=True, exist_ok=True)
    kept = options.output / "entropy_curves.json"
    results: dict[str, dict[str, dict[str, object]]] = json.loads(kept.read_text()) if kept.exists() else {}
    for seed in options.seeds:  # runs of other processes are kept
        found = curves_of(seed, options.steps)
        results = json.loads(kept.read_text()) if kept.exists() else {}
        results[str(seed)] = found
        kept.write_text(json.dumps(results))
    columns = ("all rewards", "last quarter", "accuracy", "entropy at the end")
    print(f"{len(results)} seeds, mean ± standard error\n{'':<16}" + "".join(f"{column:>22}" for column in columns))
    for name in demo.ENTROPIES:
        means = [mean_and_error([curves[name][column] for curves in results.values()]) for column in columns]
        print(f"{name:<16}" + "".join(f"{mean:>14.3f} ± {error:.3f}" for mean, error in means))


if __name__ == "__main__":
    main()
