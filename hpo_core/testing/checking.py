"""The search for examples on which a kernel breaks a promise, and the report on all promises."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .. import advantages, gates, kl
from ..advantages.terms import accepted_keywords, level_of
from ..batch import PackedBatch
from ..checks import check as require
from ..checks import require_type
from ..entropy import EntropyWindow, Selection, forking_tokens
from ..gates import RatioGate
from ..kl import KLPenalty
from ..specs import OrderRule
from .examples import (
    FEATURES,
    Layout,
    MaskExample,
    PolicyLossExample,
    RewardsExample,
    ScoresExample,
    WindowExample,
    move,
    random_policy_loss,
)
from .expected import Outcome, accepts, run_policy_loss
from .promises import GRADIENT, NOTHING_VALID, PROMISES, Estimator, Inapplicable, Promise, has_tokens
from .strategies import hypothesis, masks, policy_losses, reward_groups, scores, steps, windows

__all__ = ["Report", "Verdict", "check", "of_rectangles", "promises"]


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
    known = (*PROMISES, *_ESTIMATORS)
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

    Args:
        fn: takes the arguments of the public function of that name; among its keywords, those in the signature of fn.

            * ``"policy_loss"``: ``fn(logp, old_logp, advantages, batch, *, gate, weights, ...)``, see
              :func:`hpo_core.policy_loss`; returns the loss, an object with ``.loss``, or one with ``.loss`` and
              ``.grad``. A kernel without ``weights`` divides by the number of valid tokens.
            * ``"kl"``: ``fn(logp, ref_logp)`` -> the penalty of each token ``[T]``.
            * ``"advantages"``, or the name of an estimator: ``fn(rewards, group_ids, *, mask, apply_mask)``; for steps
              ``fn(step_rewards, group_ids, *, trajectory_ids, anchor_ids)``.
            * ``"window_mean"``: ``fn(values, batch, first, last, *, boundary, invalid)``.
            * ``"window_mask"``: ``fn(entropy, batch)`` -> bool ``[T]``, the tokens that ``window`` selects.
            * ``"order_statistic"``: ``fn(score, numerator, denominator, rule)`` -> threshold ``[1]``, or a tuple that
              begins with it. ``"quantile"``: ``fn(score, quantile)`` -> the order statistic
              ``ceil(quantile (n - 1))`` of finite scores ``[n]``; ``rule=`` names another.
        gate: the gate of a policy loss, passed on if ``fn`` takes it. Default ``gates.ppo_clip()``.
        penalty: the KL penalty. Default ``kl.k3(0.1)``, and ``kl.k3(1.0)`` for the op ``"kl"``.
        estimator: the definition of ``"advantages"``. Default ``advantages.grpo``.
        window: the window of ``"window_mask"``. Default ``entropy.forking_tokens()``.
        padded: ``fn`` takes tensors of tokens as ``[B, L]``, and as batch the mask ``[B, L]``.
        gradient: False for a loss or penalty without one: promises about gradients are then not supported.
        examples: the number of examples per promise. seed: the seed of the search, which decides the fault it finds.
        only: names from :func:`promises`. Default: all.
        features: optional inputs of a policy loss, from ``FEATURES``. Default: the inputs that ``fn`` takes.
        device: the device of the tensors that ``fn`` gets.
        options: passed to ``fn`` and to the reference: ``ddof=0``, ``eps=1e-4``, ...

    >>> import hpo_core as hpo
    >>> report = check(hpo.advantages.grpo, "grpo", examples=3, only=["deterministic"])
    >>> print(report)
    grpo: of 1 promises 1 kept, 0 broken, 0 not supported; 3 examples each
      pass           deterministic
    """
    kind, asked = _kind(op), promises(op) if only is None else tuple(only)
    require(
        not set(asked) - set(promises(op)),
        "only: expected names from promises({!r}), got {}", op, sorted(set(asked) - set(promises(op))),
    )  # fmt: skip
    require_type(callable(fn), "fn: expected a function, got {!r}", fn)
    recorded = _Recorded(fn)
    if kind == "advantages":
        subject = _advantages(recorded, _estimator(op, estimator), options)
    elif kind == "policy_loss":
        gate = gates.ppo_clip() if gate is None else gate
        subject = _policy_loss(recorded, gate, penalty, features, padded, gradient, options)
    else:
        subject = _OTHERS[kind](recorded, padded=padded, gradient=gradient, window=window, penalty=penalty, **options)

    def run(example: Any) -> Any:
        out = subject.call(move(example, device))
        return move(out, "cpu") if isinstance(out, Outcome) else out.cpu()

    def verdict_on(promise: Promise, run: _Run = run) -> Verdict:
        missing = [need for need in promise.needs if not (gradient if need == GRADIENT else accepts(recorded, need))]
        if missing:
            return Verdict(promise.name, None, f"the kernel has no {', '.join(missing)}")
        return _search(promise, run, recorded, subject.strategy, examples, seed)

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


def _run_with_tokens(run: _Run, gradient: bool, example: PolicyLossExample) -> Outcome:
    """The outcome of the kernel, except for a batch without valid tokens: zeros, without a call."""
    if has_tokens(example):
        return run(example)  # type: ignore[no-any-return]
    zeros = torch.zeros_like(example.logp, memory_format=torch.contiguous_format)
    return Outcome(zeros.new_zeros(()), zeros if gradient else None, None, None)


# -------------------------------------------------------------------------------------------- the calls of each op

_Run = Callable[[Any], Any]


class _Subject(NamedTuple):
    call: _Run  # from an example to the output that promises examine
    strategy: Any
    notes: tuple[str, ...] = ()


class _Recorded:
    """A function that keeps its signature and remembers its last arguments by name."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        functools.update_wrapper(self, fn)
        self.fn, self.received = fn, {}  # type: ignore[var-annotated]
        try:
            self.__signature__ = inspect.signature(fn)
        except ValueError:  # builtins of PyTorch have no signature
            everything = inspect.Parameter("arguments", inspect.Parameter.VAR_POSITIONAL)
            self.__signature__ = inspect.Signature([everything])

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        try:
            self.received = self.__signature__.bind(*arguments, **keywords).arguments
        except TypeError:  # the call below raises the same error
            self.received = dict(enumerate(arguments)) | keywords
        return self.fn(*arguments, **keywords)


_NEEDS = {
    "kl": ("kl", "ref_logp"),
    "kl_weight": ("kl", "ref_logp", "selection"),
    "window": ("window", "threshold", "entropy"),
    "token_advantages": ("advantage_level",),
    "bounds": ("gate_inputs",),
}
_ON_TOKENS = ("ref_logp", "entropy", "token_mask", "token_weight", "rollout_logp")


def _policy_loss(
    fn: _Recorded,
    gate: RatioGate,
    penalty: KLPenalty | None,
    features: Collection[str] | None,
    padded: bool,
    gradient: bool,
    options: dict[str, Any],
) -> _Subject:
    kernel = of_rectangles(fn) if padded else fn
    call = functools.partial(run_policy_loss, kernel, gradient=gradient, **options)
    notes: list[str] = []
    if features is None:
        of_batch = {"trajectories": gate.level is not None and not padded, "bounds": gate.takes_bounds}
        taken = [
            name
            for name in FEATURES
            if name in ("trajectories", "on_policy") or all(accepts(fn, need) for need in _NEEDS.get(name, (name,)))
        ]
        others = [name for name in FEATURES if name not in taken]
        notes += [f"{', '.join(others)}, which the kernel does not take"] if others else []
        features = [name for name in taken if of_batch.get(name, True)]
        found = _error_on_policy(call, gate, features)
        if found is not None:
            features.remove("on_policy")
            notes.append(f"old_logp=None, on which the kernel raised {type(found).__name__}")
    always = ("weights",) if "weights" in features else ()
    return _Subject(call, policy_losses(gate, features, always=always, penalty=penalty, padded=padded), tuple(notes))


def _error_on_policy(call: _Run, gate: RatioGate, features: Collection[str]) -> Exception | None:
    """The error of a kernel without ``old_logp`` if it raises none with it."""
    given, layout = {"weights"} & set(features), Layout((2, 2), masked="none")
    try:
        call(random_policy_loss(0, gate, given, layout=layout))
    except Exception:
        return None
    try:
        call(random_policy_loss(0, gate, given | {"on_policy"}, layout=layout))
    except Exception as error:
        return error
    return None


def _rectangle(tensor: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """The tokens of rows of equal length as ``[B, L]``."""
    return tensor.view(batch.rows, tensor.numel() // max(batch.rows, 1))


def _rectangle_of_mask(batch: PackedBatch) -> torch.Tensor:
    everything = torch.ones(batch.total_tokens, dtype=torch.bool, device=batch.device)
    return _rectangle(everything if batch.mask is None else batch.mask, batch)


def of_rectangles(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A padded kernel as a function of a packed batch."""

    @functools.wraps(fn)
    def run(
        logp: torch.Tensor, old_logp: torch.Tensor | None, advantages: torch.Tensor, batch: PackedBatch, **given: Any
    ) -> Any:
        def of(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else _rectangle(tensor, batch)

        given = {name: of(value) if name in _ON_TOKENS else value for name, value in given.items()}
        per_token = given.get("advantage_level") == "token"
        if "gate_inputs" in given:
            given["gate_inputs"] = given["gate_inputs"].on_tokens(of, per_token)
        if "selection" in given:
            given["selection"] = Selection(kl_weight=of(given["selection"].kl_weight))
        return fn(
            of(logp), of(old_logp), of(advantages) if per_token else advantages, _rectangle_of_mask(batch), **given
        )

    return run


def _kl(
    fn: _Recorded, *, gradient: bool, penalty: KLPenalty | None, padded: bool, window: None, **options: Any
) -> _Subject:
    """The penalty alone as a policy loss: advantages are 0, weights are 1, and every token is valid."""
    penalty = kl.k3(1.0) if penalty is None else penalty

    def loss(logp: torch.Tensor, old_logp: None, advantages: torch.Tensor, batch: PackedBatch, **given: Any) -> Outcome:
        tokens = fn(logp, given["ref_logp"], **options)
        total = tokens.sum()
        if not gradient:
            return Outcome(total, None, tokens.detach(), None)
        assert tokens.requires_grad or not tokens.numel(), "the penalty is not connected to logp; see gradient="
        grad = torch.autograd.grad(total, logp)[0] if tokens.numel() else torch.zeros_like(logp)
        return Outcome(total.detach(), grad, tokens.detach(), None)

    def alone(example: PolicyLossExample) -> PolicyLossExample:
        ones = torch.ones(example.batch.rows, dtype=torch.float32, device="cpu")
        batch = PackedBatch(example.batch.cu_seqlens, total_tokens=int(example.batch.cu_seqlens[-1]))
        example = example.on_tokens(lambda x: x[: batch.total_tokens])
        return example._replace(advantages=0 * ones, batch=batch).given(weights=ones)

    def call(example: PolicyLossExample) -> Outcome:
        leaf = example.logp.detach().requires_grad_(gradient)
        return loss(leaf, None, example.advantages, example.batch, **example.keywords)

    drawn = policy_losses(gates.reinforce(), (), always=("weights", "kl", "on_policy"), penalty=penalty)
    return _Subject(call, drawn.map(alone))


_ESTIMATORS = tuple(
    name for name in advantages.__all__ if hasattr(getattr(advantages, name), "provenance") and name != "estimator"
)


def _estimator(op: str, given: Callable[..., torch.Tensor] | None) -> Callable[..., torch.Tensor]:
    require(
        op == "advantages" or given is None, "estimator: op={!r} names it already; drop one, or say op='advantages'", op
    )
    if op != "advantages":
        return getattr(advantages, op)  # type: ignore[no-any-return]
    require_type(given is None or callable(given), "estimator: expected one of hpo_core.advantages, got {!r}", given)
    return advantages.grpo if given is None else given


def _advantages(fn: _Recorded, like: Callable[..., torch.Tensor], options: dict[str, Any]) -> _Subject:
    """Examples have every input that the estimator needs, and its optional inputs if the kernel takes them."""
    required = [
        name
        for name, parameter in list(inspect.signature(like).parameters.items())[2:]
        if parameter.default is inspect.Parameter.empty and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    drawn = ("trajectory_ids", "anchor_ids", "lengths")
    require(
        level_of(like) != "token" and set(required) <= set(drawn),
        "estimator: expected one of rewards, group_ids and {}, got {}; bind its other inputs with functools.partial",
        ", ".join(drawn),
        getattr(like, "__name__", like),
    )

    def call(example: RewardsExample) -> torch.Tensor:
        return fn(example.rewards, example.group_ids, **example.keywords, **options)  # type: ignore[no-any-return]

    def taken(example: RewardsExample) -> RewardsExample:
        given = accepted_keywords(like, **example.keywords)
        return example._replace(
            keywords={name: value for name, value in given.items() if name in required or accepts(fn, name)}
        )

    estimator, notes = Estimator(like, options), []
    examples = (steps() if required else reward_groups()).map(taken)
    try:
        call(RewardsExample(torch.tensor([0.0, 1.0], device="cpu"), None, {}))
    except Exception as error:
        if not required:
            notes.append(f"group_ids=None, on which the kernel raised {type(error).__name__}")
            examples = examples.filter(lambda example: example.group_ids is not None)
    return _Subject(call, examples.map(lambda example: (example, estimator)), tuple(notes))


def _window_mean(
    fn: _Recorded, *, padded: bool, gradient: bool, window: None, penalty: None, **options: Any
) -> _Subject:
    def call(example: WindowExample) -> torch.Tensor:
        values, batch, first, last, rules = example
        if not padded:
            return fn(values, batch, first, last, **rules, **options)  # type: ignore[no-any-return]
        mask = _rectangle_of_mask(batch)
        return fn(_rectangle(values, batch), mask, first, last, **rules, **options).flatten()  # type: ignore[no-any-return]

    return _Subject(call, windows(padded))


def _window_mask(
    fn: _Recorded, *, padded: bool, gradient: bool, window: EntropyWindow | None, penalty: None, **options: Any
) -> _Subject:
    window = forking_tokens() if window is None else window
    given = {"window": window} if accepts(fn, "window") else {}

    def call(example: MaskExample) -> torch.Tensor:
        entropy, batch, _window = example
        if not padded:
            return fn(entropy, batch, **given, **options)  # type: ignore[no-any-return]
        return fn(_rectangle(entropy, batch), _rectangle_of_mask(batch), **given, **options).flatten()  # type: ignore[no-any-return]

    return _Subject(call, masks(window, padded))


def _first(out: Any) -> torch.Tensor:
    return out if isinstance(out, torch.Tensor) else out[0]


def _order_statistic(
    fn: _Recorded, *, padded: bool, gradient: bool, window: None, penalty: None, **options: Any
) -> _Subject:
    return _Subject(lambda example: _first(fn(*example, **options)), scores())


def _quantile(
    fn: _Recorded,
    *,
    padded: bool,
    gradient: bool,
    window: None,
    penalty: None,
    rule: OrderRule = OrderRule.CEIL,
    **options: Any,
) -> _Subject:
    def call(example: ScoresExample) -> torch.Tensor:
        return _first(fn(example.score, example.numerator / example.denominator, **options)).reshape(1)

    def finite(example: ScoresExample) -> ScoresExample:
        return example._replace(score=example.score[torch.isfinite(example.score)], rule=rule)

    return _Subject(call, scores().map(finite).filter(lambda example: example.score.numel() > 0))


_OTHERS: dict[str, Callable[..., _Subject]] = {
    "kl": _kl,
    "window_mean": _window_mean,
    "window_mask": _window_mask,
    "order_statistic": _order_statistic,
    "quantile": _quantile,
}


# ---------------------------------------------------------------------------------------------------- the search


def _search(promise: Promise, run: _Run, recorded: _Recorded, strategy: Any, examples: int, seed: int) -> Verdict:
    h = hypothesis()
    failures: list[tuple[str, str]] = []
    inapplicable: list[str] = []
    worst = [0.0]

    def holds(example: Any) -> None:
        if inapplicable:
            return
        recorded.received = {}
        try:
            worst.append(promise.holds(run, example) or 0.0)
        except Inapplicable as reason:
            inapplicable.append(str(reason))
        except Exception as error:
            what = str(error) if isinstance(error, AssertionError) else f"raised {type(error).__name__}: {error}"
            failures.append((what, _show(recorded.received)))
            raise

    settings = h.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=False,  # True in a caller's profile would override the seed
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
        return Verdict(promise.name, False, *failures[-1])
    if inapplicable:
        return Verdict(promise.name, None, inapplicable[0])
    return Verdict(promise.name, True, worst=max(worst))


def _show(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return str(value.tolist())
    if isinstance(value, PackedBatch):
        lengths = (value.cu_seqlens[1:] - value.cu_seqlens[:-1]).tolist()
        mask = "" if value.mask is None else f", mask={value.mask.int().tolist()}"
        ids = "" if value.trajectory_ids is None else f", trajectory_ids={value.trajectory_ids.tolist()}"
        return f"PackedBatch(lengths={lengths}, tokens={value.total_tokens}{mask}{ids})"
    if isinstance(value, dict):
        return "".join(f"\n    {name} = {_show(item)}" for name, item in value.items())
    if isinstance(value, tuple):
        return "(" + ", ".join(_show(item) for item in value) + ")"
    return str(value)
