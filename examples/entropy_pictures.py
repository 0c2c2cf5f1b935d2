"""Draw the pictures of docs/entropy_explained.md: entropies of answers that the demo's model writes, windows and
thresholds, and the effect of each slot of a selection on the gradient of the loss.

    python examples/entropy_pictures.py --output docs/pictures

trains the model of ``demo.py`` for some seconds, lets it answer, takes some optimiser steps, and writes two PNG files.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib import pyplot
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

import hpo_core as hpo
from hpo_core import entropy as E
from hpo_core.plot.canvas import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SKY

pyplot.switch_backend("agg")

WINDOW = 3


class Answers(NamedTuple):
    """The answers to one prompt, packed; their tokens under the policy that wrote them and the current one."""

    prompt: str
    characters: list[str]
    batch: hpo.PackedBatch
    rewards: torch.Tensor  # [S]
    entropy: torch.Tensor  # [T] nats, of the policy that wrote the answers
    old_logp: torch.Tensor  # [T]
    logp: torch.Tensor  # [T], of the policy some optimiser steps later

    @property
    def advantages(self) -> torch.Tensor:
        return hpo.advantages.grpo(self.rewards, None)


# --------------------------------------------------------------------------------------------------------- the answers


def written_by_the_demo(seed: int, accuracy: float, prompts: int = 24, samples: int = 8, shown: int = 4) -> Answers:
    """Answers of the demo's model after its supervised start, and their log-probabilities after four steps of GRPO."""
    import demo  # beside this file; it imports the trainers

    torch.set_num_threads(1)
    tokenizer = demo.build_tokenizer()
    model = demo.build_model(tokenizer, seed)
    draw = random.Random(seed)
    demo.warm_start(model, tokenizer, accuracy, draw)
    asked = [prompt for prompt in demo.make_prompts(prompts, draw) for _ in range(samples)]
    encoded = tokenizer(asked, return_tensors="pt", return_token_type_ids=False)
    choice = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    with torch.no_grad():
        tokens = model.eval().generate(**encoded, max_new_tokens=demo.LONGEST, **choice)
    begin = encoded["input_ids"].shape[1]
    answer = tokens[:, begin:]
    ended = (answer == tokenizer.eos_token_id).cumsum(1)
    mask = (ended == 0) | ((ended == 1) & (answer == tokenizer.eos_token_id))  # the end of the answer is a token of it
    texts = tokenizer.batch_decode(answer, skip_special_tokens=True)
    rewards = torch.tensor(demo.reward_answer(asked, texts))

    def policy() -> hpo.logprobs.TokenLogprobs:
        logits = model(input_ids=tokens).logits[:, begin - 1 : -1]
        return hpo.token_logprobs(logits, torch.where(mask, answer, -100))

    with torch.no_grad():
        old = policy()
    groups = torch.arange(len(asked)) // samples
    batch = hpo.PackedBatch.from_padded(mask, group_ids=groups)
    advantages = hpo.advantages.grpo(rewards, groups)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    for _ in range(4):
        optimizer.zero_grad()
        hpo.policy_loss(policy().logp, old.logp, advantages, batch).loss.backward()
        optimizer.step()
    with torch.no_grad():
        new = policy()
    rows = shown_rows(texts, rewards.reshape(prompts, samples), shown)
    kept = mask[rows]
    characters = [tokenizer.decode(token) if token != tokenizer.eos_token_id else "." for token in answer[rows][kept]]
    packed = hpo.PackedBatch.from_lengths(kept.sum(1))
    return Answers(
        asked[rows[0]], characters, packed, rewards[rows], old.entropy[rows][kept], old.logp[rows][kept],
        new.logp[rows][kept],
    )  # fmt: skip


def shown_rows(texts: list[str], rewards: torch.Tensor, shown: int) -> list[int]:
    """A right answer to a prompt and different wrong ones, of the first prompt that has enough of them."""
    prompts, samples = rewards.shape
    for prompt in range(prompts):
        different = {texts[row]: row for row in range(prompt * samples, (prompt + 1) * samples)}
        rows = sorted(different.values(), key=lambda row: -rewards.flatten()[row])
        if len(rows) >= shown and rewards.flatten()[rows[0]] == 1:
            return rows[:shown]
    raise SystemExit("no prompt has a right and enough different wrong answers; change --accuracy or --seed")


def made_up(seed: int = 0) -> Answers:
    """Numbers in place of a model's, for a quick look at the drawing."""
    draw = torch.Generator().manual_seed(seed)
    lengths = [9, 9, 8, 10]
    entropy = 2 * torch.rand(sum(lengths), generator=draw) ** 3
    old_logp = -entropy - 0.01
    logp = old_logp + 0.3 * torch.randn(sum(lengths), generator=draw)
    rewards, batch = torch.tensor([1.0, 1.0, 0.0, 0.0]), hpo.PackedBatch.from_lengths(lengths)
    return Answers("abcdefgh=", list("hgfedcba." * 4), batch, rewards, entropy, old_logp, logp)


# -------------------------------------------------------------------------------------------------------- the pictures


def draw_windows(given: Answers, path: Path) -> None:
    """Entropies with the thresholds of two scopes, and window means with theirs; selected ones are filled."""
    batch, H = given.batch, given.entropy
    figure, (tokens, windows) = pyplot.subplots(2, 1, figsize=(10, 5.6), sharex=True)
    at = torch.arange(batch.total_tokens)

    window = E.forking_tokens("0.2")
    state = window.fit(H, batch)
    chosen = window.apply(H, batch, state)
    tokens.bar(at.tolist(), H.tolist(), 0.8, color=[BLUE if each else GREY for each in chosen])
    tokens.axhline(state.threshold.item(), color=BLUE, lw=1.5, ls="--")
    of_rows = E.quantiles(H, batch, "0.8", scope="row")
    begins, ends = batch.cu_seqlens[:-1] - 0.5, batch.cu_seqlens[1:] - 0.5
    tokens.hlines(of_rows.tolist(), begins.tolist(), ends.tolist(), color=RED, lw=1.5)
    tokens.set(ylabel="entropy H (nats)")
    tokens.legend(
        handles=[
            patch(BLUE, f"forking_tokens: {int(chosen.sum())} of {batch.total_tokens} tokens"),
            patch(GREY, "not selected"),
            line(BLUE, "--", "80 % quantile of the call"), line(RED, "-", "80 % quantile of each answer (archer)"),
        ],
        loc="upper center", bbox_to_anchor=(0.5, 1.36), ncols=2, frameon=False,
    )  # fmt: skip

    ares = E.ares(WINDOW, "0.8")
    means, state = ares.score(H, batch), ares.fit(H, batch)
    starts = ares.apply(H, batch, state)
    inside = E.cover(starts, batch, E.Window.forward(WINDOW))
    for token in at[inside].tolist():
        windows.axvspan(token - 0.5, token + 0.5, color=ORANGE, alpha=0.25, lw=0)
    defined = torch.isfinite(means)
    windows.axhline(state.threshold.item(), color=GREEN, lw=1.5, ls="--")
    for selected, face in ((True, GREEN), (False, "white")):
        these = defined & (starts == selected)
        windows.plot(at[these].tolist(), means[these].tolist(), "o", color=GREEN, markerfacecolor=face, ms=6)
    windows.set(ylabel=f"mean over {WINDOW} (nats)", ylim=(0, 1.08 * means[defined].max().item()))
    windows.legend(
        handles=[
            dot(GREEN, GREEN, "window selected (ares)"), dot(GREEN, "white", "window not selected"),
            line(GREEN, "--", "80 % quantile of the windows"),
            patch(ORANGE, "tokens inside selected windows (cover)", 0.25),
        ],
        loc="upper center", bbox_to_anchor=(0.5, 1.32), ncols=2, frameon=False,
    )  # fmt: skip
    finish(figure, (tokens, windows), given, path)


def slots(given: Answers) -> list[tuple[str, str, Sequence[float], Sequence[float]]]:
    """The title of each slot, the quantity drawn, and its numbers without and with the slot, each ``[T]``."""
    batch, H, A = given.batch, given.entropy, given.advantages
    change = E.entropy_change(given.logp, given.old_logp, H, A, batch)
    forking = E.forking_tokens("0.2")
    archer = E.archer(H, batch)
    cases: list[tuple[str, E.Selection, dict[str, Any]]] = [
        (
            "mask: forking_tokens keeps a fifth of the tokens",
            E.checked_mask(forking.apply(H, batch, forking.fit(H, batch)), H, batch), {},
        ),
        ("weight: steer damps tokens that move the entropy (least 0.2)", E.steer(change, batch, least=0.2), {}),
        ("bounds: hapo widens the clip where H is high, and below where it is low", E.hapo(H, batch), {}),
        ("advantage: entropy_advantage adds min(0.4 H, |A| / 2)", E.entropy_advantage(A, H, batch), {}),
        (
            "KL weight: archer has no penalty (here 0.5 k3) on tokens that reason",
            E.Selection(kl_weight=archer.kl_weight), {"kl": hpo.kl.k3(0.5), "ref_logp": given.old_logp},
        ),
    ]  # fmt: skip
    found = []
    for title, selection, options in cases:
        gate = hpo.gates.hapo_clip() if selection.bounds is not None else hpo.gates.ppo_clip()
        plain = hpo.gates.ppo_clip(0.2, 0.28) if selection.bounds is not None else gate
        numbers = [gradient(given, plain, None, options), gradient(given, gate, selection, options)]
        found.append((title, "$-T\\,\\partial L / \\partial \\log p$", *numbers))
    leaf, weights = H.clone().requires_grad_(), hpo.aggregation.token_mean(batch)
    history = H.mean()[None]
    of_penalty = []
    for beta in (0.0, 1.0):
        (penalty,) = torch.autograd.grad(
            E.epo(leaf, batch, weights, history, coefficient=1.0, alpha=2.0, beta=beta), leaf
        )
        of_penalty.append((-penalty * batch.total_tokens).tolist())
    found.append(
        (
            "penalty: epo pulls entropies into a corridor around their mean (alpha 2)",
            "$-T\\,\\partial P / \\partial H$",
            *of_penalty,
        )
    )
    return found


def gradient(
    given: Answers, gate: hpo.RatioGate, selection: E.Selection | None, options: dict[str, Any]
) -> list[float]:
    """``-T dL / d logp``, the direction in which a step moves each log-probability."""
    found = hpo.policy_loss_and_grad(
        given.logp, given.old_logp, given.advantages, given.batch, gate, selection=selection, **options
    )
    return (-found.grad * given.batch.total_tokens).tolist()


def draw_slots(given: Answers, path: Path) -> None:
    """One panel for each slot: the gradient of the loss at each token without it, and with it."""
    panels = slots(given)
    figure, axes = pyplot.subplots(len(panels), 1, figsize=(10, 1.75 * len(panels)), sharex=True)
    for axis, colour, (title, label, without, with_slot) in zip(
        axes, (BLUE, GREEN, RED, PURPLE, SKY, ORANGE), panels, strict=True
    ):
        at = range(given.batch.total_tokens)
        axis.bar(at, without, 0.9, color=GREY, label="without")
        axis.bar(at, with_slot, 0.45, color=colour, label="with")
        axis.axhline(0, color="black", lw=0.6)
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_ylabel(label, fontsize=12)
        axis.legend(loc="lower right", bbox_to_anchor=(1.0, 0.98), ncols=2, frameon=False, fontsize=9, borderpad=0)
    finish(figure, axes, given, path)


def finish(figure: Any, axes: Sequence[Any], given: Answers, path: Path) -> None:
    """The tokens below, lines between the answers, and their rewards."""
    ends = given.batch.cu_seqlens.tolist()
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.01)
        for end in ends[1:-1]:
            axis.axvline(end - 0.5, color="black", lw=0.8, ls=":")
    axes[-1].set_xticks(range(given.batch.total_tokens), given.characters, family="monospace")
    for begin, end, reward, advantage in zip(ends[:-1], ends[1:], given.rewards, given.advantages, strict=True):
        words = f"{'right' if reward else 'wrong'}, A = {advantage:+.2f}"
        axes[-1].annotate(
            words, ((begin + end - 1) / 2, 0), xycoords=("data", "axes fraction"), xytext=(0, -26),
            textcoords="offset points", ha="center",
        )  # fmt: skip
    axes[-1].set_xlabel(f'tokens of four answers to "{given.prompt}" (. ends an answer)', labelpad=18)
    figure.tight_layout()
    figure.savefig(path, dpi=100, metadata={"Software": None})
    pyplot.close(figure)


def patch(colour: str, label: str, alpha: float = 1.0) -> Any:
    return Patch(color=colour, label=label, alpha=alpha)


def line(colour: str, style: str, label: str) -> Any:
    return Line2D([], [], color=colour, ls=style, lw=1.5, label=label)


def dot(edge: str, face: str, label: str) -> Any:
    return Line2D([], [], color=edge, markerfacecolor=face, marker="o", ls="", label=label)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--accuracy", type=float, default=0.1, help="that ends the supervised start (default: 0.1)")
    parser.add_argument("--made-up", action="store_true", help="draw random numbers, without a model")
    parser.add_argument("--output", type=Path, default=Path("docs/pictures"), help="folder (default: docs/pictures)")
    options = parser.parse_args(argv)
    given = made_up(options.seed) if options.made_up else written_by_the_demo(options.seed, options.accuracy)
    options.output.mkdir(parents=True, exist_ok=True)
    for name, draw in (("entropy_windows.png", draw_windows), ("entropy_slots.png", draw_slots)):
        draw(given, options.output / name)
        print(f"written: {options.output / name}")


if __name__ == "__main__":
    main()
