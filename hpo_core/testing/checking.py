"""The search for an example that breaks a promise, for anybody's kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch

from .. import gates
from ..batch import PackedBatch
from ..checks import check as require
from ..gates import RatioGate
from .examples import (
    FEATURES,
    RewardsExample,
    ScoresExample,
    hypothesis,
    move,
    policy_losses,
    reward_groups,
    scores,
    windows,
)
from .expected import Outcome, accepts, run_policy_loss
from .promises import PROMISES, Estimator, Promise

__all__ = ["Report", "check", "promises"]

Run = Callable[[Any], Any]


@dataclass(frozen=True)
class Report:
    """What :func:`check` found to hold."""

    op: str
    promises: tuple[str, ...]
    examples: int  # per promise
    worst: float  # the largest error, as a share of its budget

    def __str__(self) -> str:
        names = "".join(f"\n  {name}" for name in self.promises)
        many = f"{len(self.promises)} promise{'s' * (len(self.promises) != 1)} on {self.examples} examples each"
        return f"{self.op} keeps {many}; largest error {self.worst:.2f} of its budget{names}"


_ESTIMATORS = ("grpo", "dr_grpo", "rloo", "lite_ppo")


def promises(op: str = "policy_loss") -> tuple[str, ...]:
    """The names of the promises of an op, in the order they are tried."""
    kind = "advantages" if op in _ESTIMATORS else op
    require(kind in PROMISES, "op: expected one of {}, got {!r}", ", ".join((*PROMISES, *_ESTIMATORS)), op)
    return tuple(promise.name for promise in PROMISES[kind])


def check(
    fn: Callable[..., Any],
    op: str = "policy_loss",
    *,
    gate: RatioGate | None = None,
    examples: int = 200,
    seed: int = 0,
    only: Collection[str] | None = None,
    features: Collection[str] | None = None,
    device: str = "cpu",
    **options: Any,
) -> Report:
    """Run anybody's kernel against the promises of an op, on generated batches; raise at the first that is broken.

    Args:
        fn: takes what the public function of that name takes; of its keywords, those that it names.

            * ``"policy_loss"``: ``fn(logp, old_logp, advantages, batch, *, gate, weights, ...)``, see
              :func:`hpo_core.policy_loss`; returns the loss, something with ``.loss``, or with ``.loss`` and ``.grad``.
            * ``"grpo"``, ``"dr_grpo"``, ``"rloo"``, ``"lite_ppo"``: ``fn(rewards, group_ids, *, mask, apply_mask)``.
            * ``"window_mean"``: ``fn(values, batch, first, last, *, boundary, invalid)``.
            * ``"order_statistic"``: ``fn(score, numerator, denominator, rule)`` -> threshold ``[1]``, or a tuple that
              begins with it.
        gate: the gate of a policy loss, passed on if ``fn`` takes it. Default ``gates.ppo_clip()``.
        examples: tried per promise. seed: of the search; the same seed finds the same fault.
        only: names from :func:`promises`. Default: all that make sense for the keywords ``fn`` takes.
        features: optional inputs of a policy loss, from ``FEATURES``. Default: those ``fn`` takes.
        device: where ``fn`` wants its tensors.
        options: passed to ``fn`` and to the reference: ``ddof=0``, ``eps=1e-4``, ...

    Raises:
        AssertionError: the broken promise, what differed, and the smallest example found.

    >>> import hpo_core as hpo
    >>> check(hpo.advantages.grpo, "grpo", examples=3, only=["deterministic"]).promises
    ('deterministic',)
    """
    gate = gates.ppo_clip() if gate is None else gate
    names = promises(op) if only is None else tuple(only)
    unknown = set(names) - set(promises(op))
    require(not unknown, "only: expected names from promises({!r}), got {}", op, sorted(unknown))
    call, strategy, kind = _subject(fn, op, gate, features, options)

    def run(example: Any) -> Any:
        out = call(move(example, device))
        return move(out, "cpu") if isinstance(out, Outcome) else out.cpu()

    held, worst = [], 0.0
    for promise in PROMISES[kind]:
        if promise.name in names and all(accepts(fn, need) for need in promise.needs):
            worst = max(worst, _search(op, promise, run, strategy, examples, seed))
            held.append(promise.name)
    return Report(op, tuple(held), examples, worst)


def _subject(
    fn: Callable[..., Any], op: str, gate: RatioGate, features: Collection[str] | None, options: dict[str, Any]
) -> tuple[Run, Any, str]:
    """How an example is run, where examples come from, and whose promises are tried."""
    if op == "policy_loss":
        wanted = [name for name in FEATURES if _serves(fn, gate, name)] if features is None else list(features)
        always = ("weights",) if "weights" in wanted else ()
        return functools.partial(run_policy_loss, fn, **options), policy_losses(gate, wanted, always=always), op
    if op == "window_mean":
        return lambda example: fn(*example[:-1], **example.keywords, **options), windows(), op
    if op == "order_statistic":

        def threshold(example: ScoresExample) -> torch.Tensor:
            out = fn(*example, **options)
            return out if isinstance(out, torch.Tensor) else out[0]

        return threshold, scores(), op
    estimator = Estimator(op, options)

    def advantages(example: RewardsExample) -> torch.Tensor:
        return fn(example.rewards, example.group_ids, **example.keywords, **options)  # type: ignore[no-any-return]

    masks = accepts(fn, "mask") and accepts(fn, "apply_mask")
    return advantages, reward_groups(masks=masks).map(lambda example: (example, estimator)), "advantages"


def _serves(fn: Callable[..., Any], gate: RatioGate, feature: str) -> bool:
    needs = {
        "kl": ("kl", "ref_logp"),
        "window": ("window", "threshold", "entropy"),
        "token_advantages": ("advantage_level",),
        "bounds": ("gate_inputs",),
    }
    if feature == "trajectories":
        return gate.level is not None
    if feature == "bounds" and not gate.takes_bounds:
        return False
    return feature == "on_policy" or all(accepts(fn, name) for name in needs.get(feature, (feature,)))


def _search(op: str, promise: Promise, run: Run, strategy: Any, examples: int, seed: int) -> float:
    h = hypothesis()
    failures: list[tuple[Any, Exception]] = []
    worst = [0.0]

    def holds(example: Any) -> None:
        try:
            worst.append(promise.holds(run, example) or 0.0)
        except Exception as error:
            failures.append((example, error))
            raise

    settings = h.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=False,  # a caller's profile that sets it would take the place of the seed
        print_blob=False,
        report_multiple_bugs=False,
        phases=(h.Phase.generate, h.Phase.shrink),
        suppress_health_check=list(h.HealthCheck),
        verbosity=h.Verbosity.quiet,
    )
    try:
        h.seed(seed)(settings(h.given(strategy)(holds)))()
    except Exception:
        if not failures:
            raise
    if failures:  # the last one is the smallest: hypothesis replays it
        example, error = failures[-1]
        what = str(error) if isinstance(error, AssertionError) else f"raised {type(error).__name__}: {error}"
        raise AssertionError(
            f"{op} breaks the promise {promise.name!r}: {what}\nSmallest example found: {_show(example)}"
        )
    return max(worst)


def _show(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return str(value.tolist())
    if isinstance(value, PackedBatch):
        lengths = (value.cu_seqlens[1:] - value.cu_seqlens[:-1]).tolist()
        mask = "" if value.mask is None else f", mask={value.mask.int().tolist()}"
        ids = "" if value.trajectory_ids is None else f", trajectory_ids={value.trajectory_ids.tolist()}"
        return f"PackedBatch(lengths={lengths}, tokens={value.total_tokens}{mask}{ids})"
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return "".join(f"\n  {name} = {_show(item)}" for name, item in zip(value._fields, value, strict=True))
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_show(item)}" for name, item in value.items()) + "}"
    if isinstance(value, tuple):
        return ", ".join(_show(item) for item in value)
    return str(value)
