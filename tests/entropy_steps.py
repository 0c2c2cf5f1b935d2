"""One optimiser step for every entropy preset, cut in any way: into ranks, packs and micro-batches."""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import hpo_core as hpo
from hpo_core import entropy as E
from hpo_core.advantages import over_ranks

LENGTHS = [5, 9, 1, 0, 6, 12, 4, 7, 3, 8, 6, 5]
GROUPS = [3, 3, 1, 1, -1, 3, 1, 8, 8, 3, 1, 1]
# The rows of each process, by the number of processes; one of four has none.
SHARES = {
    1: (range(12),),
    2: ([7, 0, 3, 10, 4, 8], [1, 2, 5, 6, 9, 11]),
    4: ([7, 0, 3], [], [10, 4, 8, 11, 9], [6, 1, 2, 5]),
}


class Step(NamedTuple):
    batch: hpo.PackedBatch
    of_tokens: dict[str, torch.Tensor]
    of_rows: dict[str, torch.Tensor]

    def __getattr__(self, name):
        return self.of_tokens[name] if name in self.of_tokens else self.of_rows[name]

    def select(self, rows):
        rows = torch.tensor(list(rows), dtype=torch.int64)
        part, tokens = self.batch.select(rows)
        of_rows = {name: values[rows] for name, values in self.of_rows.items()}
        return Step(part, {name: values[tokens] for name, values in self.of_tokens.items()}, of_rows)

    def to(self, device):
        moved = ({name: each.to(device) for name, each in given.items()} for given in (self.of_tokens, self.of_rows))
        return Step(self.batch.to(device), *moved)


def drawn(kind="ties", lengths=LENGTHS, groups=GROUPS, seed=5):
    """Rows of a step with masked tokens, which hold NaN; "broken" gives valid tokens no finite entropy, either."""
    draw = torch.Generator().manual_seed(seed)
    tokens, rows = sum(lengths), len(lengths)
    mask = torch.rand(tokens, generator=draw) > 0.15
    random = functools.partial(torch.rand, generator=draw)
    entropy = 3 * random(tokens)
    if kind == "ties":
        entropy = (4 * entropy).round() / 4
    if kind == "broken":
        draws = random(tokens)
        entropy = torch.where(draws < 0.05, torch.nan, torch.where(draws > 0.95, torch.inf, entropy))
    logp, old_logp = -2 * random(tokens) - 0.01, -2 * random(tokens) - 0.01
    of_tokens = {
        "entropy": entropy, "old_entropy": (entropy + 0.1 * random(tokens) - 0.05).clamp(min=0), "logp": logp,
        "old_logp": old_logp, "logits": 5 * random(tokens),
    }  # fmt: skip
    of_tokens = {name: torch.where(mask, values, torch.nan) for name, values in of_tokens.items()}
    of_tokens |= {
        "chosen": random(tokens) > 0.5, "segment_ids": torch.randint(-1, 4, (tokens,), generator=draw),
        "row": torch.repeat_interleave(torch.arange(rows), torch.tensor(lengths)),
    }  # fmt: skip
    of_rows = {
        "advantages": torch.randn(rows, generator=draw), "is_correct": random(rows) > 0.5,
        "uid": torch.randperm(rows, generator=draw), "kept": random(rows) > 0.2, "confidence": random(rows),
        "difficulty": torch.randint(-1, 3, (rows,), generator=draw), "group_ids": torch.tensor(groups),
        "counts": torch.randint(0, 9, (rows,), generator=draw).float(), "clusters": torch.arange(rows) % 2,
        "lengths": torch.tensor(lengths).float(), "weights": random(rows), "low": random(rows),
        "high": 1 + random(rows),
    }  # fmt: skip
    sizes = [size for length in lengths for size in (*[3] * (length // 3), length % 3) if size]  # of steps
    ends = [0, *itertools.accumulate(sizes)]
    batch = hpo.PackedBatch.from_lengths(
        lengths, mask=mask, group_ids=torch.tensor(groups), cu_steps=torch.tensor(ends)
    )
    return Step(batch, of_tokens, of_rows)


class Method(NamedTuple):
    """``fit(step, group)`` is of the whole optimiser step, over the ranks of a group; ``apply(step, state)`` of any
    part of it. ``exact``: bits do not depend on the cut, as masks never do; other numbers are rounded sums."""

    apply: Callable[[Step, Any], Any]
    fit: Callable[[Step, Any], Any] = lambda step, group: None
    level: str = "token"
    exact: bool = True


class Whole(NamedTuple):
    """``run(step, group)`` takes the whole optimiser step and the ranks of a group at once."""

    run: Callable[[Step, Any], Any]
    level: str = "token"
    exact: bool = True
    fit = None


def windowed(window):
    return Method(
        lambda step, state: window.apply(step.entropy, step.batch, state),
        lambda step, group: window.fit(step.entropy, step.batch, process_group=group),
    )


def of_scopes(signal, apply, exact=False):
    """The statistics of a signal over the step."""

    def fit(step, group):
        values = signal(step)
        usable = step.batch.mask & torch.isfinite(values)
        return E.fit_scopes(values, mask=usable, process_group=group)

    return Method(apply, fit, exact=exact)


def pivoted(apply, exact=True):
    return Method(apply, lambda step, group: E.fit_pivot(step.entropy, step.batch, process_group=group), exact=exact)


def change(step):
    return E.entropy_change(step.logp, step.old_logp, step.entropy, step.advantages, step.batch)


def tables(preset, *names, level="token", **options):
    """An advantage edit of whole groups, whose tables span the ranks."""

    def run(step, group):
        given = [step.batch if name == "batch" else getattr(step, name) for name in names]
        call = functools.partial(preset, **options)
        return call(*given) if group is None else over_ranks(call, group, tables=True)(*given)

    return Whole(run, level, exact=False)


def targets(step, group):
    last = E.AresTargets(torch.tensor([2.0, 3.0, 4.0]), torch.tensor([0.5, 0.25, 1.0]))
    return E.ares_targets(step.counts, step.difficulty, last, process_group=group)


def penalty_of(preset, *names, **options):
    """The loss term that a preset makes of a step, a sum over its tokens."""
    return lambda step, entropy: preset(
        entropy, step.batch, step.weights, **{name: getattr(step, name) for name in names}, **options
    )


PENALTIES = {
    "mean_entropy": penalty_of(E.mean_entropy),
    "entropy_band": penalty_of(E.entropy_band, "low", "high"),
    "epo": penalty_of(E.epo, history=torch.tensor([1.5, 1.25])),
    "openvl_band": penalty_of(E.reconstructed.openvl_band, "low", "high", coefficient=0.5),
}


def gradient_of(penalty):
    def apply(step, _):
        entropy = step.entropy.clone().requires_grad_()
        return torch.autograd.grad(penalty(step, entropy), entropy)[0]

    return Method(apply)


def paid(gate, selection):
    """Gradient and loss of each token where a selection has factors on the penalty."""

    def apply(step, _):
        logp = step.logp.clone().requires_grad_()
        given = {"weights": step.weights, "kl": hpo.kl.k3(0.5), "ref_logp": step.old_logp - 0.25}
        given |= {"selection": selection(step), "report": ("tokens",)}
        out = hpo.policy_loss(logp, step.old_logp, step.advantages, step.batch, gate, **given)
        return torch.autograd.grad(out.loss, logp)[0], out.tokens

    return Method(apply)


def ares_penalty_weights(step):
    beta = torch.tensor([0.1, 0.2, 0.4])
    return E.ares_penalty_weights(step.chosen, step.difficulty, beta, step.batch, relief=0.5)


R, EDIT = E.reconstructed, ("advantages", "entropy", "batch")
METHODS = {
    "forking_tokens": windowed(E.forking_tokens("0.3")),
    "ares": windowed(E.ares(2, "0.7")),
    "ares_windows": Whole(
        lambda step, group: E.ares_windows(
            step.entropy, step.batch, width=2, quantile="0.7", of_windows=True, process_group=group
        )
    ),
    "ares_threshold": Method(
        lambda step, state: state,
        lambda step, group: E.ares_threshold(step.entropy, step.batch, width=2, quantile="0.7", process_group=group),
        level="step of training",
    ),
    "ares_next_windows": Method(
        lambda step, state: E.ares_next_windows(step.entropy, step.chosen, step.batch, state, width=2),
        lambda step, group: E.ares_threshold(step.entropy, step.batch, width=2, quantile="0.7", process_group=group),
    ),
    "ares_penalty_weights": Method(lambda step, _: ares_penalty_weights(step)),
    "ares_penalty_weights, in the loss": paid(hpo.gates.dapo(), ares_penalty_weights),
    "ares_difficulty": Whole(
        lambda step, group: E.ares_difficulty(step.is_correct, step.group_ids, process_group=group), "row"
    ),
    "ares_targets": Method(lambda step, state: state, targets, "step of training", exact=False),
    "ares_scales": Method(
        lambda step, state: state,
        lambda step, group: E.ares_scales(
            step.counts, step.difficulty, torch.tensor([2.0, 1.0, 3.0]), process_group=group
        ),
        "step of training", exact=False,
    ),
    "ares_rewards": Method(
        lambda step, state: E.ares_rewards(step.is_correct, step.counts, step.difficulty, state.target, state.alpha),
        targets, "row", exact=False,
    ),
    "ares_entropy_reward": Method(
        lambda step, state: E.ares_entropy_reward(step.is_correct, step.counts, step.difficulty, state),
        targets, "row", exact=False,
    ),
    "count_of_rows": Method(lambda step, _: E.count_of_rows(step.chosen, step.batch), level="row"),
    "cover": Method(lambda step, _: E.cover(step.chosen, step.batch, E.Window.forward(3))),
    "checked_mask": Method(lambda step, _: E.checked_mask(step.chosen, step.entropy, step.batch)),
    "opened": Method(lambda step, _: E.opened(step.chosen, step.batch, 2)),
    "group_confidence": Method(lambda step, _: E.group_confidence(step.entropy, step.batch, 3)),
    "ulorl": Method(
        lambda step, _: E.ulorl(step.logp, step.entropy, step.is_correct, step.batch, probability=0.6, sigma=1.6)
    ),
    "archer": Method(lambda step, _: E.archer(step.entropy, step.batch)),
    "archer, in the loss": paid(
        hpo.gates.archer_clip(), lambda step: E.archer(step.entropy, step.batch, kl_reasoning=0.25)
    ),
    **{name: gradient_of(penalty) for name, penalty in PENALTIES.items()},
    "siren_tokens": Method(lambda step, _: E.siren_tokens(step.entropy, step.batch, quantile="0.5")),
    "hicra_tokens": Whole(
        lambda step, group: E.hicra_tokens(step.entropy, step.advantages, step.batch, process_group=group)
    ),
    "d3s_tokens": Whole(
        lambda step, group: E.d3s_tokens(
            step.entropy, step.advantages.abs().round() / 2, step.batch, share="0.3", rows_mask=step.kept,
            uid=step.uid, process_group=group,
        )
    ),
    "fit_pivot": pivoted(lambda step, state: state, exact=False)._replace(level="step of training"),
    "hapo": pivoted(lambda step, state: E.hapo(step.entropy, step.batch, state=state)),
    "hapo_redistribution": pivoted(
        lambda step, state: E.hapo_redistribution(step.entropy, step.logp, step.old_logp, step.batch, state=state)
    ),
    "hapo_temperature": pivoted(
        lambda step, state: E.hapo_temperature(step.entropy, step.batch, state, compat="code")
    ),
    "entropy_advantage": Method(lambda step, _: E.entropy_advantage(step.advantages, step.entropy, step.batch)),
    "entropy_change": Method(lambda step, _: change(step)),
    "aepo_ruc": of_scopes(
        lambda step: step.entropy, lambda step, state: E.aepo_ruc(step.entropy, step.batch, state=state)
    ),
    "steer": of_scopes(
        lambda step: change(step).abs(), lambda step, state: E.steer(change(step), step.batch, state=state), exact=True
    ),
    "steer_linear": of_scopes(
        lambda step: change(step).abs(), lambda step, state: E.steer_linear(change(step), step.batch, state=state),
        exact=True,
    ),
    "covariance": Whole(
        lambda step, group: E.covariance(step.logp, step.advantages, step.batch, process_group=group), exact=False
    ),
    "gtpo": tables(E.gtpo, "is_correct", "entropy", "batch"),
    "grpo_s": tables(E.grpo_s, "is_correct", "entropy", "batch", level="row"),
    "edge_grpo": tables(E.edge_grpo, *EDIT, level="row"),
    "ettrl": tables(E.ettrl, *EDIT, level="row"),
    "empg": tables(E.empg, *EDIT, level="step"),
    "ucas": tables(E.ucas, "advantages", "confidence", "logits", "batch"),
    "hapo_advantages": tables(E.hapo_advantages, "advantages", "group_ids", "lengths", level="row"),
    "funrl": tables(R.funrl, "advantages", "entropy", "chosen", "batch", level="row", alpha=0.5),
    "less": tables(E.less, "advantages", "is_correct", "entropy", "segment_ids", "batch"),
    "semantic_entropy": tables(R.semantic_entropy, "clusters", "group_ids", level="row"),
    "seed_grpo": tables(R.seed_grpo, "advantages", "clusters", "group_ids", level="row"),
    "rlsp_rewards": Method(lambda step, _: R.rlsp_rewards(step.is_correct, step.confidence, share=0.25), level="row"),
    "dcpo_regulariser": Method(lambda step, _: R.dcpo_regulariser(step.logp, step.old_logp, step.batch)),
    "erc": Method(lambda step, _: E.erc(step.entropy, step.old_entropy, step.batch)),
    "less_tokens": Method(lambda step, _: E.less_tokens(step.entropy, step.batch, quantile="0.6", length=2)),
}  # fmt: skip
