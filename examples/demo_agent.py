"""Credit for the turns of an agent: GRPO, GiGPO and HGPO side by side, minutes on two cores, nothing is downloaded.

An agent on a small grid reads six words, "a 1 c 3 e 5": where it stands, where the key lies, where the door is. It
writes one or two: "go up", "go down", "go left", "go right", "take" or "open". "take" next to the key gives
"a 1 held held e 5". "open" next to the door, with the key, is worth 1 and ends the episode; all else is worth 0.

A layout is a prompt. Its rollouts meet the same observations again and again: GRPO gives all turns of an episode the
same advantage, GiGPO and HGPO compare each turn with the others that start from the same observation.

    python examples/demo_agent.py --seeds 0 1 2 3 4 --updates 125 --output demo_output

writes ``agent.png`` and ``agent.json``. Everything but the estimator is the same: layouts, first weights, settings,
episodes per update.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import hpo_core as hpo

ESTIMATORS = ("grpo", "gigpo", "hgpo")
# GiGPO and HGPO also discount: a success in fewer turns is worth more. The control is GRPO on rewards discounted alike.
CONTROL = "grpo_discounted"
DISCOUNT = 0.95  # the estimators' default

SIDE = 5
VOCABULARY = [*"abcde", *"12345", "held", "go", "take", "open", "up", "down", "left", "right"]
ROW, COLUMN, HELD, GO, TAKE, OPEN, UP = map(VOCABULARY.index, ("a", "1", "held", "go", "take", "open", "up"))
STEPS = torch.tensor([(-1, 0), (1, 0), (0, -1), (0, 1)])
VERBS, DIRECTIONS = slice(GO, UP), slice(UP, len(VOCABULARY))

LAYOUTS, ROLLOUTS, TURNS = 8, 16, 20  # ROLLOUTS of each layout per update
EPOCHS = 2  # optimiser steps per rollout: in the second ratios have left 1
LEARNING_RATE = 2e-3
WIDTH = 64
WINDOW = 10  # updates over which success is averaged for the table
LEVELS = (0.5, 0.8)


# ------------------------------------------------------------------------------------------------ the world, the policy


def make_layouts(generator: torch.Generator) -> torch.Tensor:
    """``[LAYOUTS, 3, 2]``: row and column of the agent, the key and the door, all on different cells."""
    cells = torch.rand(LAYOUTS, SIDE * SIDE, generator=generator).argsort(1)[:, :3]
    return torch.stack([cells // SIDE, cells % SIDE], 2)


def observe(places: torch.Tensor, holding: torch.Tensor) -> torch.Tensor:
    """The words for three places ``[B, 3, 2]``, ``[B, 6]``; a key in the hand is in no place."""
    words = places + torch.tensor([ROW, COLUMN])
    words[:, 1] = torch.where(holding[:, None], HELD, words[:, 1])
    return words.flatten(1)


def near(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """On the same cell or next to it."""
    return (one - other).abs().sum(1) <= 1


class Policy(torch.nn.Module):
    """Reads the six words of an observation, then writes two words, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(len(VOCABULARY), WIDTH)
        self.read = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(6 * WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH)
        )
        self.write = torch.nn.Linear(WIDTH, WIDTH)
        self.head = torch.nn.Linear(WIDTH, len(VOCABULARY))

    def forward(
        self, observations: torch.Tensor, texts: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Two words for every observation, sampled unless given, and their log-probabilities, both ``[N, 2]``."""
        memory = self.read(self.words(observations))
        words, logps = [], []
        for position, choices in enumerate((VERBS, DIRECTIONS)):  # the grammar: no other word is possible here
            state = memory.tanh()
            logp = self.head(state)[:, choices].log_softmax(1)
            chosen = torch.multinomial(logp.exp(), 1) if texts is None else texts[:, position, None] - choices.start
            logps.append(logp.gather(1, chosen))
            words.append(chosen + choices.start)
            memory = self.write(state) + self.words(words[-1][:, 0])
        return torch.cat(words, 1), torch.cat(logps, 1)


class Rollouts(NamedTuple):
    """``N`` turns of ``S`` episodes, episode after episode; the words that were written are the tokens of the batch."""

    observations: torch.Tensor  # [N, 6]
    texts: torch.Tensor  # [N, 2]
    written: torch.Tensor  # [N, 2]: only "go" has a second word
    old_logp: torch.Tensor  # [T]
    rewards: torch.Tensor  # [N]
    success: torch.Tensor  # [S]
    batch: hpo.PackedBatch

    @property
    def anchor_ids(self) -> torch.Tensor:
        """Equal for equal observations and only for them: the number whose digits are the words ``[N]``."""
        return (self.observations * len(VOCABULARY) ** torch.arange(self.observations.shape[1])).sum(1)


@torch.no_grad()
def roll_out(policy: Policy, layouts: torch.Tensor) -> Rollouts:
    agent, key, door = layouts.repeat_interleave(ROLLOUTS, 0).unbind(1)
    holding = torch.zeros(len(agent), dtype=torch.bool)
    playing = torch.ones_like(holding)
    turns = []
    for _ in range(TURNS):
        observation = observe(torch.stack([agent, key, door], 1), holding)
        text, logp = policy(observation)
        verb, direction = text.unbind(1)
        opened = playing & holding & near(agent, door) & (verb == OPEN)
        turns.append((observation, text, logp, opened, playing))
        holding = holding | (near(agent, key) & (verb == TAKE))
        moved = (agent + STEPS[direction - UP]).clamp(0, SIDE - 1)
        agent = torch.where((verb == GO)[:, None], moved, agent)
        playing = playing & ~opened
    observations, texts, logps, opened, played = (torch.stack(kind, 1) for kind in zip(*turns, strict=True))
    written = played[:, :, None] & torch.stack([torch.ones_like(played), texts[:, :, 0] == GO], 2)
    words = written.sum(2)
    batch = hpo.PackedBatch.from_lengths(
        words.sum(1),
        cu_steps=torch.nn.functional.pad(words[played].cumsum(0), (1, 0)),
        group_ids=torch.arange(len(layouts)).repeat_interleave(ROLLOUTS),
    )
    return Rollouts(
        observations=observations[played],
        texts=texts[played],
        written=written[played],
        old_logp=logps[written],
        rewards=opened[played].float(),
        success=opened.any(1).float(),
        batch=batch,
    )


# --------------------------------------------------------------------------------------------------------- the training


def credit(estimator: str, rollouts: Rollouts) -> tuple[torch.Tensor, Callable[..., torch.Tensor]]:
    """The rewards that an estimator takes, and the estimator itself."""
    if estimator == "grpo":
        return rollouts.success, hpo.advantages.grpo
    if estimator == CONTROL:
        turns = rollouts.batch.row_of_step().bincount()
        return rollouts.success * DISCOUNT ** (turns - 1), hpo.advantages.grpo
    of_turns = getattr(hpo.advantages, estimator)
    return rollouts.rewards, functools.partial(of_turns, anchor_ids=rollouts.anchor_ids)


def train(run: tuple[str, int, int]) -> dict[str, Any]:
    """One curve: the success of the sampled rollouts before each update."""
    estimator, seed, updates = run
    torch.set_num_threads(1)  # matrices this small gain nothing from a second thread
    started = time.perf_counter()
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)  # of layouts: every estimator meets the same
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=LEARNING_RATE)
    success, turns = [], 0
    for _ in range(updates):
        rollouts = roll_out(policy, make_layouts(generator))
        success.append(rollouts.success.mean().item())
        turns += len(rollouts.rewards)
        rewards, advantage = credit(estimator, rollouts)
        for _ in range(EPOCHS):
            _, logps = policy(rollouts.observations, rollouts.texts)
            out = hpo.hierarchical_policy_loss(
                logps[rollouts.written],
                rollouts.old_logp,
                rewards,
                rollouts.batch,
                advantage=advantage,
                gate=hpo.gates.ppo_clip(0.2, 0.2),
            )
            optimizer.zero_grad()
            out.loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()
    seconds = time.perf_counter() - started
    print(
        f"{estimator:<15} seed {seed}: success {statistics.fmean(success[-WINDOW:]):.3f}, {seconds:.0f} s", flush=True
    )
    return {"estimator": estimator, "seed": seed, "success": success, "turns": turns, "seconds": seconds}


# ---------------------------------------------------------------------------------------------------------- the results


def first_update(success: list[float], level: float) -> int | None:
    """The update by which the mean over the last ``WINDOW`` updates has reached ``level``."""
    for update in range(WINDOW, len(success) + 1):
        if statistics.fmean(success[update - WINDOW : update]) >= level:
            return update
    return None


def summarise(runs: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """A list over the seeds of one estimator's runs under each heading of the table."""
    curves = [run["success"] for run in runs]
    return {
        "success in the end": [statistics.fmean(curve[-WINDOW:]) for curve in curves],
        "over all updates": [statistics.fmean(curve) for curve in curves],
        **{f"updates to {level:.0%}": [first_update(curve, level) for curve in curves] for level in LEVELS},
        "thousand turns": [run["turns"] / 1000 for run in runs],
    }


def draw(runs: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """The mean over seeds, and from the worst to the best seed."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4.5))
    for estimator, of_seeds in runs.items():
        at_update = list(zip(*(run["success"] for run in of_seeds), strict=True))
        updates = range(1, len(at_update) + 1)
        axis.plot(updates, [statistics.fmean(values) for values in at_update], label=estimator)
        axis.fill_between(updates, [*map(min, at_update)], [*map(max, at_update)], alpha=0.15)
    seeds = ", ".join(str(run["seed"]) for run in of_seeds)
    axis.set(title=f"mean of seeds {seeds}; bands: from the lowest to the highest", ylim=(0, 1))
    axis.set(xlabel=f"update ({LAYOUTS} layouts, {ROLLOUTS} rollouts each)", ylabel="success of the sampled rollouts")
    axis.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def spread(values: list[Any]) -> str:
    """Mean, lowest and highest; where some never came so far, of how many."""
    known = [value for value in values if value is not None]
    if not known:
        return "never"
    mean, lowest, highest = (
        f"{value:.{0 if value > 1 else 3}f}" for value in (statistics.fmean(known), min(known), max(known))
    )
    of_how_many = f", {len(known)} of {len(values)}" if len(known) < len(values) else ""
    return f"{mean} ({lowest} to {highest}{of_how_many})"


def report(summary: dict[str, dict[str, list[Any]]]) -> None:
    print("\nmean over seeds (lowest to highest)\n" + " " * 21 + "".join(f"{name:<27}" for name in summary))
    for heading in summary["grpo"]:
        print(f"{heading:<21}" + "".join(f"{spread(of_seeds[heading]):<27}" for of_seeds in summary.values()))


# -------------------------------------------------------------------------------------------------------------- the run


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="(default: 0 1 2 3 4)")
    parser.add_argument("--updates", type=int, default=125, help="rollouts to learn from (default: 125)")
    parser.add_argument("--control", action="store_true", help="GRPO with discounted rewards, too")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time (default: 2)")
    parser.add_argument("--output", type=Path, default=Path("demo_output"), help="folder (default: demo_output)")
    options = parser.parse_args(argv)
    for name in ("updates", "processes"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: expected an integer above 0, got {getattr(options, name)}")
    return options


def main(argv: list[str] | None = None) -> dict[str, Any]:
    options = parse_arguments(argv)
    started = time.perf_counter()
    options.output.mkdir(parents=True, exist_ok=True)
    names = [*ESTIMATORS, CONTROL] if options.control else ESTIMATORS
    jobs = [(name, seed, options.updates) for seed in options.seeds for name in names]
    if options.processes == 1:
        finished = [*map(train, jobs)]
    else:
        with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
            finished = pool.map(train, jobs, chunksize=1)
    runs = {name: [run for run in finished if run["estimator"] == name] for name in names}
    summary = {name: summarise(runs[name]) for name in names}
    settings = {"layouts": LAYOUTS, "rollouts": ROLLOUTS, "turns": TURNS, "side": SIDE, "epochs": EPOCHS}
    settings |= {"learning_rate": LEARNING_RATE, "width": WIDTH, "window": WINDOW}
    result = {"settings": settings, "runs": finished, "summary": summary}
    (options.output / "agent.json").write_text(json.dumps(result, indent=1))
    draw(runs, options.output / "agent.png")
    report(summary)
    print(f"everything: {time.perf_counter() - started:.0f} s")
    print(f"written: {options.output / 'agent.png'}, {options.output / 'agent.json'}")
    return result


if __name__ == "__main__":
    main()
