"""The search for examples on which a kernel breaks a promise, and the report on all promises."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NamedTuple

import torch

from ..batch import PackedBatch
from ..checks import check as require
from ..checks import require_type
from ..entropy import EntropyWindow
from ..gates import RatioGate
from ..kl import KLPenalty
from . import promises_of_entropy  # noqa: F401 (it makes promises)
from .examples import PolicyLossExample, check_names, move
from .expected import Outcome, accepts
from .promises import GRADIENT, PROMISES, SHOWN, UNWRITTEN, Inapplicable, Promise, Run, Undefined
from .promises_of_losses import NOTHING_VALID, has_tokens
from .strategies import hypothesis
from .subjects import ESTIMATORS, SUBJECTS, Recorded, estimator_of, withheld

EXACT = "exact"  # promises whose names begin so are also held to long examples
SMALL_FOR_A_LONG, MOST_LONG = 20, 3  # a long example for so many small ones, and the most of them


class Verdict(NamedTuple):
    """One line of a report."""

    promise: str
    kept: bool | None  # None: not supported
    detail: str = ""  # the difference, or the reason for no support
    received: str = ""  # the arguments of the smallest call found that breaks the promise, as the kernel received them
    worst: float = 0.0  # the largest error, as a share of its budget


@dataclass(frozen=True)
class Report:
    """The result of :func:`check`: a verdict on every promise. ``str`` is the table."""

    op: str
    verdicts: tuple[Verdict, ...]
    examples: int  # per promise
    notes: tuple[str, ...] = ()  # inputs that the kernel does not take

    @property
    def ok(self) -> bool:
        """Whether some promise is kept and none is broken."""
        return bool(self.kept) and not self.broken

    @property
    def kept(self) -> tuple[str, ...]:
        return tuple(verdict.promise for verdict in self.verdicts if verdict.kept)

    @property
    def broken(self) -> tuple[str, ...]:
        return tuple(verdict.promise for verdict in self.verdicts if verdict.kept is False)

    @property
    def worst(self) -> float:
        """The largest error, as a share of its budget."""
        return max((verdict.worst for verdict in self.verdicts), default=0.0)

    def raise_for_broken(self) -> None:
        """Raise an ``AssertionError`` with this report unless it is :attr:`ok`."""
        if not self.ok:
            raise AssertionError(str(self))

    def __str__(self) -> str:
        word = {True: "pass", False: "FAIL", None: "not supported"}
        skipped = len(self.verdicts) - len(self.kept) - len(self.broken)
        counts = f"{len(self.kept)} kept, {len(self.broken)} broken, {skipped} not supported"
        lines = [f"{self.op}: of {len(self.verdicts)} promises {counts}; {self.examples} examples each"]
        for promise, kept, detail, _received, worst in self.verdicts:
            about = f"largest error {worst:.2f} of its budget" if kept and worst else detail
            lines.append(f"  {word[kept]:13}  {promise}" + (f"  ({about})" if about and kept is not False else ""))
        lines += [f"  not given: {note}" for note in self.notes]
        for verdict in self.verdicts:
            if verdict.kept is False:
                lines += [f"FAIL {verdict.promise}: {verdict.detail}", f"  smallest call found: {verdict.received}"]
        return "\n".join(lines)


def promises(op: str = "policy_loss") -> tuple[str, ...]:
    """The names of the promises of an op, in the order of a report."""
    kind = _kind(op)
    return tuple(promise.name for promise in PROMISES[kind])


def _kind(op: str) -> str:
    known = (*PROMISES, *ESTIMATORS)
    require(isinstance(op, str) and op in known, "op: expected one of {}, got {!r}", ", ".join(known), op)
    return op if op in PROMISES else "advantages"


def check(
    fn: Callable[..., Any],
    op: str = "policy_loss",
    *,
    gate: RatioGate | None = None,
    penalty: KLPenalty | None = None,
    estimator: Callable[..., Any] | None = None,
    window: EntropyWindow | None = None,
    padded: bool = False,
    gradient: bool = True,
    examples: int = 200,
    seed: int = 0,
    only: Collection[str] | None = None,
    features: Collection[str] | None = None,
    device: str = "cpu",
    **options: Any,
) -> Report:
    """Test your own kernel against every promise of an op, on generated batches: correctness first.

    A broken promise raises nothing, because the other verdicts help to find the fault: print the report, test
    ``report.ok``, or call ``report.raise_for_broken()``. A promise is "not supported" if it needs an input that the
    kernel does not take.

    Examples are small, so that the one shown is. Correctness is also held to long ones, of thousands of tokens or
    rewards, which no usual block of a kernel holds: one for every 20 small ones, at most 3.

    Args:
        fn: takes the arguments of the public function of that name; among its keywords, those in the signature of fn.

            * ``"policy_loss"``: ``fn(logp, old_logp, advantages, batch, *, gate, weights, ...)``, see
              :func:`hpo_core.policy_loss`; returns the loss, an object with ``.loss``, or one with ``.loss`` and
              ``.grad``. A kernel without ``weights`` divides by the number of valid tokens.
            * ``"kl"``: ``fn(logp, ref_logp)`` -> the penalty of each token ``[T]``.
            * ``"advantages"``, or the name of an estimator:
              ``fn(rewards, group_ids, *, mask=None, apply_mask=None)``; for steps
              ``fn(step_rewards, group_ids, *, trajectory_ids, anchor_ids)``.
            * ``"window_mean"``: ``fn(values, batch, first, last, *, boundary, invalid)``.
            * ``"window_mask"``: ``fn(entropy, batch)`` -> bool ``[T]``, the tokens that ``window`` selects.
            * ``"order_statistic"``: ``fn(score, numerator, denominator, rule)`` -> threshold ``[1]``, or a tuple that
              begins with it. ``"quantile"``: ``fn(score, quantile)`` -> the order statistic
              ``ceil(quantile (n - 1))`` of finite scores ``[n]``; ``rule=`` names another.
        gate: the gate of a policy loss, passed on if ``fn`` takes it. Default ``gates.ppo_clip()``.
        penalty: the KL penalty. Default ``kl.k3(0.1)``, and ``kl.k3(1.0)`` for the op ``"kl"``.
        estimator: the definition of ``"advantages"``, called with ``backend="reference"`` if it takes a backend.
            Default ``advantages.grpo``.
        window: the window of ``"window_mask"``. Default ``entropy.forking_tokens()``.
        padded: ``fn`` takes tensors of tokens as ``[B, L]``, and as batch the mask ``[B, L]``.
        gradient: False for a loss or penalty without one: promises about gradients are then not supported.
        examples: the number of examples per promise.
        seed: the seed of the search, which decides the fault it finds.
        only: names from :func:`promises`. Default: all.
        features: optional inputs of a policy loss, from ``FEATURES``. Default: the inputs that ``fn`` takes. A promise
            that needs another one is not supported.
        device: the device of the tensors that ``fn`` gets.
        options: passed to ``fn`` and to the reference: ``ddof=0``, ``eps=1e-4``, ...

    >>> import hpo_core as hpo
    >>> report = check(hpo.advantages.grpo, "grpo", examples=3, only=["deterministic"])
    >>> print(report)
    grpo: of 1 promises 1 kept, 0 broken, 0 not supported; 3 examples each
      pass           deterministic
    """
    check_names("only", only)
    kind, asked = _kind(op), promises(op) if only is None else tuple(only)
    require(
        not set(asked) - set(promises(op)),
        "only: expected names from promises({!r}), got {}", op, sorted(set(asked) - set(promises(op))),
    )  # fmt: skip
    require_type(callable(fn), "fn: expected a function, got {!r}", fn)
    for name, given, made, such in (
        ("gate", gate, RatioGate, "gates.dapo()"),
        ("penalty", penalty, KLPenalty, "kl.k3(0.1)"),
        ("window", window, EntropyWindow, "entropy.forking_tokens()"),
    ):
        require_type(
            given is None or isinstance(given, made), "{}: expected one such as {}, got {!r}", name, such, given
        )
    require(_is_integer(examples) and examples >= 1, "examples: expected an integer >= 1, got {!r}", examples)
    require(_is_integer(seed), "seed: expected an integer, got {!r}", seed)
    _check_device(device)
    arguments = {
        "gate": gate, "penalty": penalty, "estimator": estimator, "window": window, "padded": padded,
        "gradient": gradient, "features": features,
    }  # fmt: skip
    unset = {"padded": False, "gradient": True}
    subject_of = SUBJECTS[kind]
    read = set(inspect.getfullargspec(subject_of).kwonlyargs) & set(arguments)
    unread = [name for name, value in arguments.items() if name not in read and value != unset.get(name)]
    require(not unread, "{}: op={!r} does not read it; drop it", ", ".join(unread), op)
    left_out = withheld(features)
    if kind == "advantages":
        arguments["estimator"] = estimator_of(op, estimator)
    recorded = Recorded(fn)
    subject = subject_of(recorded, **{name: arguments[name] for name in read}, **options)

    def run(example: Any, *incoming: torch.Tensor) -> Any:
        outcome = subject.call(move(example, device), *move(incoming, device))
        copy = move(outcome, "cpu")
        recorded.returned = (outcome, copy)
        return copy

    search = functools.partial(_search, subject.examples(), examples, seed)
    small: list[Any] = []
    search(small.append)
    long: list[Any] = []
    long_ones = min(examples // SMALL_FOR_A_LONG, MOST_LONG)
    if long_ones and any(name.startswith(EXACT) for name in asked):
        _search(subject.examples(long=True), long_ones, seed, long.append)

    def verdict_on(promise: Promise, run: Run = run) -> Verdict:
        missing = [need for need in promise.needs if not (gradient if need == GRADIENT else accepts(recorded, need))]
        if missing:
            return Verdict(promise.name, None, f"the kernel has no {', '.join(missing)}")
        missing = [need for need in promise.needs if need in left_out]
        if missing:
            return Verdict(promise.name, None, f"features= leaves out {', '.join(missing)}")
        return _judge(promise, run, recorded, small, long, search)

    if kind != "policy_loss":
        verdicts = [verdict_on(promise) for promise in PROMISES[kind] if promise.name in asked]
        return Report(op, tuple(verdicts), examples, subject.notes)
    # A batch without valid tokens has a promise of its own. A kernel that breaks it would break all others, too.
    (on_nothing_valid,) = (verdict_on(promise) for promise in PROMISES[kind] if promise.name == NOTHING_VALID)
    run_with_tokens = run if on_nothing_valid.kept else functools.partial(_run_with_tokens, run, gradient)
    verdicts = [
        on_nothing_valid if promise.name == NOTHING_VALID else verdict_on(promise, run_with_tokens)
        for promise in PROMISES[kind]
        if promise.name in asked
    ]
    return Report(op, tuple(verdicts), examples, subject.notes)


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as error:  # torch without CUDA asserts
        reason = str(error).partition("\n")[0]
        raise ValueError(f"device: expected one that torch can use here, got {device!r}: {reason}") from error


def _run_with_tokens(run: Run, gradient: bool, example: PolicyLossExample, *incoming: torch.Tensor) -> Outcome:
    """The outcome of the kernel, except for a batch without valid tokens: zeros, without a call."""
    if has_tokens(example):
        return run(example, *incoming)  # type: ignore[no-any-return]
    zeros = torch.zeros_like(example.logp, memory_format=torch.contiguous_format)
    return Outcome(zeros.new_zeros(()), zeros if gradient else None, None, None)


# ---------------------------------------------------------------------------------------------------- the search


def _search(strategy: Any, count: int, seed: int, test: Callable[[Any], object], *, shrink: bool = False) -> None:
    """``test`` on the examples of a seed, which are the same for every test until one raises."""
    h = hypothesis()
    settings = h.settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=False,  # True in a caller's profile would override the seed
        print_blob=False,
        report_multiple_bugs=False,
        phases=(h.Phase.generate, h.Phase.shrink)[: 1 + shrink],
        suppress_health_check=list(h.HealthCheck),
        verbosity=h.Verbosity.quiet,
    )

    def run(example: Any) -> None:
        test(example)

    h.seed(seed)(settings(h.given(strategy)(run)))()


def _judge(
    promise: Promise, run: Run, recorded: Recorded, small: list[Any], long: list[Any], search: Callable[..., None]
) -> Verdict:
    recorded.copies = promise.name == UNWRITTEN
    failures: list[tuple[str, str]] = []

    def holds(example: Any) -> float:
        recorded.received = {}
        earlier = recorded.returned
        try:
            share = promise.holds(run, example) or 0.0
            if promise.name == UNWRITTEN:
                written = _written(recorded)
                assert not written, f"the kernel wrote to the argument {written}"
                assert _show(earlier[0]) == _show(earlier[1]), "the kernel wrote over a result an earlier call returned"
        except (Inapplicable, Undefined):
            raise
        except Exception as error:
            what = str(error) if isinstance(error, AssertionError) else f"raised {type(error).__name__}: {error}"
            failures.append((what, _show(recorded.received)))
            raise
        return share

    def still_holds(example: Any) -> None:
        with contextlib.suppress(Inapplicable, Undefined):
            holds(example)

    on_long = ""
    try:
        worst = max(map(holds, small))
        if promise.name.startswith(EXACT):
            on_long = "on a long example alone: "
            worst = max([worst, *map(holds, long)])
    except Inapplicable as reason:
        return Verdict(promise.name, None, str(reason))
    except Exception:
        if not failures:
            raise
        if not on_long:
            with contextlib.suppress(Exception):
                search(still_holds, shrink=True)  # the last failure is the smallest: hypothesis replays it
        detail, received = failures[-1]
        return Verdict(promise.name, False, on_long + detail, received)
    return Verdict(promise.name, True, worst=worst)


def _written(recorded: Recorded) -> str:
    """The names of the arguments that the call has changed."""
    return ", ".join(name for name, value in recorded.received.items() if _show(recorded.given[name]) != _show(value))


def _show(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        more = f" ... of shape {list(value.shape)}" if value.numel() > SHOWN else ""
        return f"{value.flatten()[:8].tolist()}{more}" if more else str(value.tolist())
    if isinstance(value, PackedBatch):
        mask = "" if value.mask is None else f", mask={_show(value.mask.int())}"
        ids = "" if value.trajectory_ids is None else f", trajectory_ids={_show(value.trajectory_ids)}"
        return f"PackedBatch(lengths={_show(value.cu_seqlens.diff())}, tokens={value.total_tokens}{mask}{ids})"
    if isinstance(value, dict):
        return "".join(f"\n    {name} = {_show(item)}" for name, item in value.items())
    if isinstance(value, tuple):
        return "(" + ", ".join(_show(item) for item in value) + ")"
    return str(value)
