"""How each op is called on its examples, whatever form its kernel has."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch

from .. import advantages, gates, kl
from ..advantages.terms import accepted_keywords, is_multi_reward, level_of, name_of
from ..batch import PackedBatch
from ..checks import check as require
from ..checks import require_type
from ..entropy import EntropyWindow, Selection, forking_tokens
from ..gates import RatioGate
from ..kl import KLPenalty
from ..specs import OrderRule, Unit
from . import promises_of_entropy  # noqa: F401 (it makes promises)
from .examples import FEATURES, ON_TOKENS, PolicyLossExample, RewardsExample, check_features, move, random_policy_loss
from .examples_of_entropy import MaskExample, ScoresExample, WindowExample
from .expected import Outcome, accepts, differentiate, run_with_incoming
from .layouts import Layout
from .promises import Run
from .promises_of_advantages import Estimator
from .strategies import masks, policy_losses, reward_groups, scores, steps, windows


class Subject(NamedTuple):
    call: Run  # from an example to the output that promises examine
    examples: Callable[..., Any]  # the strategy of small examples, or with long=True of long ones
    notes: tuple[str, ...] = ()


class Recorded:
    """A function that keeps its signature and remembers its last arguments by name: ``given``, and ``received``, which
    are copies from before the call where these are asked for."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        functools.update_wrapper(self, fn)
        self.fn, self.copies = fn, False
        self.given: dict[Any, Any] = {}
        self.received: dict[Any, Any] = {}
        self.returned: tuple[Any, Any] = (None, None)  # the last outcome, and a copy from when it was new
        try:
            self.__signature__ = inspect.signature(fn)
        except ValueError:  # builtins of PyTorch have no signature
            everything = inspect.Parameter("arguments", inspect.Parameter.VAR_POSITIONAL)
            self.__signature__ = inspect.Signature([everything])

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        try:
            self.given = self.__signature__.bind(*arguments, **keywords).arguments
        except TypeError:  # the call below raises the same error
            self.given = dict(enumerate(arguments)) | keywords
        self.received = move(self.given, "cpu") if self.copies else self.given
        return self.fn(*arguments, **keywords)


# The keywords that a feature takes, where it is not the one of its name.
_NEEDS = {
    "kl": ("kl", "ref_logp"),
    "kl_weight": ("kl", "ref_logp", "selection"),
    "window": ("window", "threshold", "entropy"),
    "token_advantages": ("advantage_level",),
    "bounds": ("gate_inputs",),
}


def withheld(features: Collection[str] | None) -> set[str]:
    """The keywords of a policy loss that a caller's choice of features leaves out; None chooses all."""
    if features is None:
        return set()
    check_features(features)
    return _keywords(FEATURES) - _keywords(features)


def _keywords(features: Collection[str]) -> set[str]:
    return {need for feature in features for need in _NEEDS.get(feature, (feature,))}


def _policy_loss(
    fn: Recorded,
    *,
    gate: RatioGate | None,
    penalty: KLPenalty | None,
    features: Collection[str] | None,
    padded: bool,
    gradient: bool,
    **options: Any,
) -> Subject:
    gate = gates.ppo_clip() if gate is None else gate
    if padded:
        check_padded(gate)
    kernel = on_packed_batches(fn) if padded else fn
    call = functools.partial(run_with_incoming, kernel, gradient=gradient, **options)
    notes: list[str] = []
    if gate.reads_rollout and not accepts(fn, "rollout_logp"):
        notes.append("rollout_logp, which the gate reads and the kernel does not take")
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
        error = _error_on_policy(call, gate, features)
        if error is not None:
            features.remove("on_policy")
            notes.append(f"old_logp=None, on which the kernel raised {type(error).__name__}")
    always = ("weights",) if "weights" in features else ()
    drawn = functools.partial(policy_losses, gate, features, always=always, penalty=penalty, padded=padded)
    return Subject(call, drawn, tuple(notes))


def _error_on_policy(call: Run, gate: RatioGate, features: Collection[str]) -> Exception | None:
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


def check_padded(gate: RatioGate) -> None:
    require(
        gate.units <= {Unit.TRAJECTORY},
        "padded: a mask [B, L] has no steps, groups or domains, which the gate {!r} needs; take a packed kernel",
        gate.name,
    )


def _rectangle(tensor: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """The tokens of rows of equal length as ``[B, L]``."""
    return tensor.view(batch.rows, tensor.numel() // max(batch.rows, 1))


def _rectangle_of_mask(batch: PackedBatch) -> torch.Tensor:
    everything = torch.ones(batch.total_tokens, dtype=torch.bool, device=batch.device)
    return _rectangle(everything if batch.mask is None else batch.mask, batch)


# The fields of a selection that are ``[T]``, besides the pair of bounds.
_OF_TOKENS = ("mask", "weight", "kl_weight", "advantage_factor", "advantage_addend", "score")


def on_packed_batches(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A padded kernel as a function of a packed batch."""

    @functools.wraps(fn)
    def run(
        logp: torch.Tensor, old_logp: torch.Tensor | None, advantages: torch.Tensor, batch: PackedBatch, **given: Any
    ) -> Any:
        def of(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else _rectangle(tensor, batch)

        given = {name: of(value) if name in ON_TOKENS else value for name, value in given.items()}
        per_token = given.get("advantage_level") == "token"
        if "gate_inputs" in given:
            given["gate_inputs"] = given["gate_inputs"].on_tokens(of, per_token)
        if "selection" in given:
            selection: Selection = given["selection"]
            changed: dict[str, Any] = {name: of(getattr(selection, name)) for name in _OF_TOKENS}
            changed["bounds"] = selection.bounds and tuple(map(of, selection.bounds))
            given["selection"] = selection._replace(**changed)
        return fn(
            of(logp), of(old_logp), of(advantages) if per_token else advantages, _rectangle_of_mask(batch), **given
        )

    return run


def _tensor(out: Any) -> torch.Tensor:
    assert isinstance(out, torch.Tensor), f"expected a tensor; the kernel returned a {type(out).__name__}"
    return out


def _kl(fn: Recorded, *, gradient: bool, penalty: KLPenalty | None, **options: Any) -> Subject:
    """The penalty alone as a policy loss: advantages are 0, weights are 1, and every token is valid."""
    penalty = kl.k3(1.0) if penalty is None else penalty

    def call(example: PolicyLossExample, incoming: torch.Tensor | None = None) -> Outcome:
        logp = example.logp.detach().requires_grad_(gradient)
        tokens = _tensor(fn(logp, example.keywords["ref_logp"], **options))
        total = tokens.detach().sum()
        if not gradient:
            return Outcome(total, None, tokens.detach(), None)
        assert tokens.requires_grad or not tokens.numel(), "the penalty is not connected to logp; see gradient="
        grad = differentiate(tokens, logp, incoming) if tokens.numel() else torch.zeros_like(logp)
        return Outcome(total, grad, tokens.detach(), None)

    def alone(example: PolicyLossExample) -> PolicyLossExample:
        ones = torch.ones(example.batch.rows, dtype=torch.float32, device="cpu")
        batch = PackedBatch(example.batch.cu_seqlens, total_tokens=int(example.batch.cu_seqlens[-1]))
        example = example.on_tokens(lambda x: x[: batch.total_tokens])
        return example._replace(advantages=0 * ones, batch=batch).given(weights=ones)

    drawn = functools.partial(
        policy_losses, gates.reinforce(), (), always=("weights", "kl", "on_policy"), penalty=penalty
    )
    return Subject(call, lambda **size: drawn(**size).map(alone))


ESTIMATORS = tuple(
    name for name in advantages.__all__ if hasattr(getattr(advantages, name), "provenance") and name != "estimator"
)


def estimator_of(op: str, given: Callable[..., torch.Tensor] | None) -> Callable[..., torch.Tensor]:
    require(
        op == "advantages" or given is None, "estimator: op={!r} names it already; drop one, or say op='advantages'", op
    )
    if op != "advantages":
        return getattr(advantages, op)  # type: ignore[no-any-return]
    require_type(given is None or callable(given), "estimator: expected one of hpo_core.advantages, got {!r}", given)
    return advantages.grpo if given is None else given


def _advantages(fn: Recorded, *, estimator: Callable[..., torch.Tensor], **options: Any) -> Subject:
    """Examples have every input that the estimator needs, and its optional inputs if the kernel takes them."""
    parameters = list(inspect.signature(estimator).parameters.items())
    required = [
        name
        for name, parameter in parameters[2:]
        if parameter.default is inspect.Parameter.empty and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    drawn = ("trajectory_ids", "anchor_ids", "lengths")
    require(
        [name for name, _ in parameters[1:2]] == ["group_ids"]
        and set(required) <= set(drawn)
        and level_of(estimator) in ("row", "step")
        and not is_multi_reward(estimator),
        "estimator: expected one of rewards [S], group_ids and {}, with an advantage of each reward, got {}({}); bind "
        "its other inputs with functools.partial, or wrap it in a function of these",
        ", ".join(drawn),
        name_of(estimator),
        ", ".join(name for name, _ in parameters),
    )

    def call(example: RewardsExample) -> torch.Tensor:
        return _tensor(fn(example.rewards, example.group_ids, **example.keywords, **options))

    def taken(example: RewardsExample) -> RewardsExample:
        given = accepted_keywords(estimator, **example.keywords)
        return example._replace(
            keywords={name: value for name, value in given.items() if name in required or accepts(fn, name)}
        )

    notes = []
    try:
        call(RewardsExample(torch.tensor([0.0, 1.0], device="cpu"), None, {}))
    except Exception as error:
        if not required:
            notes.append(f"group_ids=None, on which the kernel raised {type(error).__name__}")

    def examples(**size: bool) -> Any:
        drawn = (steps if required else reward_groups)(**size).map(taken)
        drawn = drawn.filter(lambda example: example.group_ids is not None) if notes else drawn
        return drawn.map(lambda example: (example, Estimator(estimator, options)))

    return Subject(call, examples, tuple(notes))


def _window_mean(fn: Recorded, *, padded: bool, **options: Any) -> Subject:
    def call(example: WindowExample) -> torch.Tensor:
        values, batch, first, last, rules = example
        if not padded:
            return fn(values, batch, first, last, **rules, **options)  # type: ignore[no-any-return]
        mask = _rectangle_of_mask(batch)
        return fn(_rectangle(values, batch), mask, first, last, **rules, **options).flatten()  # type: ignore[no-any-return]

    return Subject(call, functools.partial(windows, padded))


def _window_mask(fn: Recorded, *, padded: bool, window: EntropyWindow | None, **options: Any) -> Subject:
    window = forking_tokens() if window is None else window
    given = {"window": window} if accepts(fn, "window") else {}

    def call(example: MaskExample) -> torch.Tensor:
        entropy, batch, _window = example
        if not padded:
            return fn(entropy, batch, **given, **options)  # type: ignore[no-any-return]
        return fn(_rectangle(entropy, batch), _rectangle_of_mask(batch), **given, **options).flatten()  # type: ignore[no-any-return]

    return Subject(call, functools.partial(masks, window, padded))


def _first(out: Any) -> torch.Tensor:
    return out if isinstance(out, torch.Tensor) else out[0]


def _order_statistic(fn: Recorded, **options: Any) -> Subject:
    return Subject(lambda example: _first(fn(*example, **options)), scores)


def _quantile(fn: Recorded, *, rule: OrderRule = OrderRule.CEIL, **options: Any) -> Subject:
    def call(example: ScoresExample) -> torch.Tensor:
        return _first(fn(example.score, example.numerator / example.denominator, **options)).reshape(1)

    def finite(example: ScoresExample) -> ScoresExample:
        return example._replace(score=example.score[torch.isfinite(example.score)], rule=rule)

    def examples(**size: bool) -> Any:
        return scores(**size).map(finite).filter(lambda example: example.score.numel() > 0)

    return Subject(call, examples)


# The functions that make the subject of a kernel, by op, from the arguments of check() that it has among its keywords,
# and options.
SUBJECTS: dict[str, Callable[..., Subject]] = {
    "policy_loss": _policy_loss,
    "kl": _kl,
    "advantages": _advantages,
    "window_mean": _window_mean,
    "window_mask": _window_mask,
    "order_statistic": _order_statistic,
    "quantile": _quantile,
}
