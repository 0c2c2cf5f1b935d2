"""Random arguments of every op, adversarial ones among them, drawn from a seed; strategies.py draws them by hypothesis.

An example is a NamedTuple of the arguments of one public function.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple, TypeVar

import torch

from .. import gates
from ..arguments import examines
from ..batch import PackedBatch
from ..checks import REFERENCE, check, examined, require_type
from ..entropy import EntropyWindow, Selection, WindowState
from ..gates import Channel, GateInputs, RatioGate
from ..kl import KLPenalty, k3
from ..prepared import prepare
from ..reference.gates import gate_tokens, read_tokens
from ..reference.hierarchy import bounds_of_tokens
from ..reference.segments import flat
from ..specs import LevelKind, TokenGate, Unit
from .budget import MARGIN
from .layouts import Layout, below, random_layout, row_of_tokens, valid_tokens, wide_ids

SAME = 1e-12  # the size of a residual that is 0 but for the rounding of float64
Change = Callable[[torch.Tensor], torch.Tensor]

# ------------------------------------------------------------------------------------------------------ policy losses

# The optional inputs of a policy loss. "trajectories": some trajectories have several rows; "on_policy": no old_logp;
# "kl_weight": a selection with factors on the penalty, which only a call with "kl" and without "window" takes;
# "bounds": bounds per token, where the gate has bounds for them to replace.
FEATURES = (
    "trajectories",
    "weights",
    "kl",
    "kl_weight",
    "entropy",
    "window",
    "token_mask",
    "token_weight",
    "bounds",
    "on_policy",
    "token_advantages",
)
# The keywords that are tensors of tokens.
ON_TOKENS = ("ref_logp", "entropy", "token_mask", "token_weight", "rollout_logp")


class PolicyLossExample(NamedTuple):
    """The arguments of one call of ``policy_loss``; ``keywords`` holds its optional inputs."""

    logp: torch.Tensor
    old_logp: torch.Tensor | None
    advantages: torch.Tensor
    batch: PackedBatch
    gate: RatioGate
    keywords: dict[str, Any]

    @property
    def per_token(self) -> bool:
        return self.keywords.get("advantage_level") == "token"

    @property
    def gate_inputs(self) -> GateInputs:
        given: GateInputs = self.keywords.get("gate_inputs", GateInputs())
        return given

    def valid(self) -> torch.Tensor:
        """Whether a token is in a row and not masked ``[T]``."""
        return valid_tokens(self.batch)

    def row(self) -> torch.Tensor:
        """The row of every token ``[T]``, -1 outside all rows."""
        return row_of_tokens(self.batch)

    def trajectory(self) -> torch.Tensor:
        """The trajectory of every token ``[T]``, numbered from 0; -1 outside all rows."""
        row = self.row()
        if self.batch.trajectories is None or self.batch.rows == 0:
            return row
        return torch.where(row >= 0, self.batch.trajectories[0][row.clamp(min=0)], -1)

    @property
    def coarsest(self) -> Unit:
        """The coarsest unit of the gate, at least the trajectory: rows of one segment see each other."""
        return max({Unit.TRAJECTORY} | self.gate.units)

    def first_rows(self, unit: Unit) -> torch.Tensor:
        """The first row of the segment of each row ``[S]``, of a unit of rows."""
        return self.batch.hierarchy((unit,)).ancestors[0]

    @property
    def kl_weight(self) -> torch.Tensor | None:
        """The factors on the penalty ``[T]``: all that the selection of an example holds."""
        given: Selection = self.keywords.get("selection", Selection())
        return given.kl_weight

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """``values`` ``[S]`` at the tokens of each row ``[T]``; 0 outside all rows."""
        row = self.row()
        out = values.new_zeros(row.shape)
        out[row >= 0] = values[row[row >= 0]]
        return out

    def weights(self) -> torch.Tensor:
        """The row weights ``[S]``: the given ones, or the default, 1 / the number of valid tokens (under a gate of
        steps: of those in a step)."""
        counted = self.valid()
        if self.gate.of_steps:
            counted = counted & (self.batch.step_of_token() >= 0)
        default = self.logp.new_full((self.batch.rows,), 1.0 / max(int(counted.sum()), 1), dtype=torch.float32)
        given: torch.Tensor = self.keywords.get("weights", default)
        return given

    def log_ratio(self) -> torch.Tensor:
        """``logp - old_logp`` in float64 ``[T]``, 0 at tokens that must not be read; a gate of the channel TOTAL has
        ``rollout_logp`` in its place."""
        old = self.logp if self.old_logp is None else self.old_logp
        if self.gate.channel is Channel.TOTAL:
            old = self.keywords.get("rollout_logp", old)
        return torch.where(self.valid(), self.logp.double() - old.double(), 0.0)

    def on_tokens(self, change: Change) -> PolicyLossExample:
        """``change`` applied to every ``[T]`` tensor."""
        keywords: dict[str, Any] = {
            name: change(value) if name in ON_TOKENS else value for name, value in self.keywords.items()
        }
        if "gate_inputs" in keywords:
            keywords["gate_inputs"] = self.gate_inputs.on_tokens(change, self.per_token)
        if self.kl_weight is not None:
            keywords["selection"] = Selection(kl_weight=change(self.kl_weight))
        return self._replace(
            logp=change(self.logp),
            old_logp=None if self.old_logp is None else change(self.old_logp),
            advantages=change(self.advantages) if self.per_token else self.advantages,
            keywords=keywords,
        )

    def on_rows(self, change: Change) -> PolicyLossExample:
        """``change`` applied to every ``[S]`` tensor."""
        advantages = self.advantages if self.per_token else change(self.advantages)
        changed: dict[str, Any] = {name: change(value) for name, value in self.keywords.items() if name == "weights"}
        inputs = self.gate_inputs
        if inputs.target is not None and not self.per_token:
            changed["gate_inputs"] = inputs._replace(target=change(inputs.target))
        return self._replace(advantages=advantages).given(**changed)

    def poisoned(self, value: float) -> PolicyLossExample:
        """The example with ``value`` at all tokens that must not be read: masked tokens and tokens of no row."""
        hole = ~self.valid()
        return self.on_tokens(lambda x: torch.where(hole, value, x) if x.is_floating_point() else x)

    def select(self, rows: torch.Tensor) -> tuple[PolicyLossExample, torch.Tensor]:
        """The example of these rows in this order, and the indices of its tokens."""
        batch, tokens = self.batch.select(rows)
        return self.on_tokens(lambda x: x[tokens]).on_rows(lambda x: x[rows])._replace(batch=batch), tokens

    def given(self, **keywords: Any) -> PolicyLossExample:
        """The example with these keywords added."""
        return self._replace(keywords=self.keywords | keywords)

    def without(self, *names: str) -> PolicyLossExample:
        """The example without these keywords, and without factors on a penalty that goes."""
        kept = {name: value for name, value in self.keywords.items() if name not in names}
        selection = kept.get("selection")
        if "kl" in names and isinstance(selection, Selection):
            kept["selection"] = selection = selection._replace(kl_weight=None)
            if all(each is None for each in selection[:-1]):
                del kept["selection"]
        return self._replace(keywords=kept)

    def with_scores_of_threshold(self) -> PolicyLossExample:
        """The example for any backend, with the scores that its threshold was fitted on in place of the window.

        Sums of scores differ in the last bit between backends and precisions, and the token at the threshold with them.
        """
        given = self.keywords
        window, state, entropy = (given.get(name) for name in ("window", "threshold", "entropy"))
        if not isinstance(window, EntropyWindow) or not isinstance(state, WindowState) or not state.scored_by:
            return self
        if entropy is None or given.get("selection") is not None:  # the loss says what is wrong
            return self
        backend = self.batch.device.type if state.scored_by == "cpu or cuda" else state.scored_by
        selection = window.selection(entropy, self.batch, state, backend=backend)
        return self.without("window", "threshold").given(selection=selection)


def check_names(argument: str, names: Any) -> None:
    """A str is a collection of strings, too: its letters."""
    require_type(
        not isinstance(names, str), "{}: expected a tuple of names, got {!r}; pass ({!r},)", argument, names, names
    )


def check_features(features: Collection[str]) -> None:
    check_names("features", features)
    unknown = sorted(set(features) - set(FEATURES))
    check(not unknown, "features: expected names from {}, got {}", ", ".join(FEATURES), unknown)


@examines
def random_policy_loss(
    seed: int = 0,
    gate: RatioGate | None = None,
    features: Collection[str] = ("weights",),
    *,
    penalty: KLPenalty | None = None,
    layout: Layout | None = None,
) -> PolicyLossExample:
    """An example for ``policy_loss``, with ``rollout_logp`` if the gate reads it. Its log-ratios and their residuals
    keep ``MARGIN`` to the bounds of clips, of tokens and of levels, and to the budgets of rollbacks. They keep none to
    the end of a rollback's zone, to the budget of ``Excess`` and to the bounds of corrections.

    Args:
        gate: default ``gates.ppo_clip()``.
        features: names from ``FEATURES``, the optional inputs. Without "weights" the loss uses its own default.
        penalty: the penalty of the feature "kl"; default ``kl.k3(0.1)``.
        layout: the rows; default: random. Trajectories of several rows need both ``layout.shared`` and the feature.
    """
    check_features(features)
    gate = gates.ppo_clip() if gate is None else gate
    layout = random_layout(seed) if layout is None else layout
    layout = replace(layout, shared=layout.shared and "trajectories" in features)
    batch, draw, tokens, rows = layout.batch(), layout.generator(1), layout.tokens, len(layout.lengths)

    def uniform(count: int, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
        return torch.rand(count, generator=draw, dtype=torch.float32, device="cpu") * (high - low) + low

    def normal(count: int) -> torch.Tensor:
        return torch.randn(count, generator=draw, dtype=torch.float32, device="cpu")

    def choice(*values: float) -> float:
        return values[int(torch.randint(0, len(values), (), generator=draw, device="cpu"))]

    units = tokens if "token_advantages" in features else rows
    advantages = torch.where(uniform(units) < 0.1, 0.0, normal(units))
    keywords: dict[str, Any] = {"advantage_level": "token" if "token_advantages" in features else "row"}
    if "weights" in features:
        keywords["weights"] = torch.where(uniform(rows) < 0.1, 0.0, uniform(rows, 0.02, 0.3))
    if "window" in features or "entropy" in features:
        # Multiples of 1/64 and windows of 1, 2 or 4 tokens have exact means: a tie is a tie in every precision.
        keywords["entropy"] = torch.randint(0, 128, (tokens,), generator=draw, device="cpu").float() / 64
    if "window" in features:
        width, strict = int(choice(1, 2, 4)), choice(0, 1) == 1
        keywords["window"] = EntropyWindow("random", Fraction(1, 2), 0, width - 1, strict=strict)
        keywords["threshold"] = torch.randint(32, 96, (1,), generator=draw, device="cpu").float() / 64
    if "token_mask" in features:
        keywords["token_mask"] = uniform(tokens) > 0.3
    if "token_weight" in features:
        keywords["token_weight"] = uniform(tokens, 0.2, 2.0)
    inputs = GateInputs()
    if ("bounds" in features and gate.takes_bounds) or "bounds" in gate.required:
        inputs = inputs._replace(bounds=(uniform(tokens, 0.6, 0.95), uniform(tokens, 1.05, 1.5)))
    if "target" in gate.required:
        inputs = inputs._replace(target=uniform(units, 0.2, 0.8))
    if "token_mask" in gate.required:
        inputs = inputs._replace(token_mask=uniform(tokens) > 0.3)
    if "penalty_mask" in gate.required:
        inputs = inputs._replace(penalty_mask=uniform(tokens) > 0.5)
    if "token_weight" in gate.required:
        inputs = inputs._replace(token_weight=uniform(tokens, 0.8, 1.2))
    if any(each is not None for each in inputs):
        keywords["gate_inputs"] = inputs

    logp = old = -uniform(tokens, 0.01, 4.0)
    spread = choice(0.005, 0.1, 0.4, 2.0)
    near = torch.ones(tokens, dtype=torch.bool, device="cpu")
    for _ in range(100):
        logp = torch.where(near, torch.where(uniform(tokens) < 0.05, old, old + spread * normal(tokens)), logp)
        if gate.reads_rollout:
            rollout = old + spread * normal(tokens)
            keywords["rollout_logp"] = torch.where(near, rollout, keywords.get("rollout_logp", rollout))
        example = PolicyLossExample(logp, old, advantages, batch, gate, keywords)
        near = _near_branches(example)
        if not bool(near.any()):
            break
    else:
        raise AssertionError(f"no log-ratios found that keep {MARGIN} to every bound of {gate}")
    if "kl" in features:
        keywords["kl"] = k3(0.1) if penalty is None else penalty
        keywords["ref_logp"] = logp + choice(0.02, 0.3, 2.0) * normal(tokens)
        if "kl_weight" in features and "window" not in features:
            factor = torch.where(uniform(tokens) < 0.2, 0.0, uniform(tokens, -0.5, 2.0))
            keywords["selection"] = Selection(kl_weight=factor)
    return example._replace(old_logp=None) if "on_policy" in features else example


def _near_branches(example: PolicyLossExample) -> torch.Tensor:
    """Whether a log-ratio or a residual of a token is nearer than ``MARGIN`` to a bound, for either sign of A."""
    read = ("advantage_level", "gate_inputs", "rollout_logp")
    keywords = {name: value for name, value in example.keywords.items() if name in read}
    inputs, spec, exchange, *_ = prepare(
        example.logp.double(), example.old_logp, example.advantages, example.batch, example.gate,
        backend=REFERENCE, **keywords,
    )  # fmt: skip
    inputs = flat(inputs)
    tokens = read_tokens(inputs, spec)
    near = torch.zeros_like(tokens.valid)

    def mark(u: torch.Tensor, *bounds: torch.Tensor | float) -> None:
        # The residual of a segment that is all of the coarser one is 0, whatever is drawn.
        free = tokens.valid & ((u.abs() > SAME) if spec.is_hierarchical else tokens.valid)
        for bound in bounds:
            near.logical_or_(free & ((u - bound).abs() < MARGIN))

    if spec.term is not None:
        mark(tokens.x, *spec.term.pre_low, *spec.term.pre_high)
    for _, (of_token, *levels) in gate_tokens(tokens, inputs, spec, exchange):
        for sign in (0, 1) if spec.token is TokenGate.CLIP else ():
            negative = torch.full_like(tokens.negative, sign)
            mark(of_token.residual, *bounds_of_tokens(negative, tokens.given, inputs, spec))
        for gated, level in zip(levels, spec.levels, strict=True):
            if level.gate is LevelKind.CLIP:
                mark(gated.residual, *level.low, *level.high)
            elif level.gate is LevelKind.ROLLBACK:
                mark(gated.residual.abs(), *level.high)
    return near


# ---------------------------------------------------------------------------------------------------- rewards in groups


class RewardsExample(NamedTuple):
    """The arguments of one call of an estimator of :mod:`hpo_core.advantages`."""

    rewards: torch.Tensor
    group_ids: torch.Tensor | None
    keywords: dict[str, Any]  # mask, apply_mask; trajectory_ids, anchor_ids and lengths of steps


@examines
def random_rewards(seed: int = 0, units: int = 12, kind: str | None = None, masks: bool = True) -> RewardsExample:
    """Rewards of unsorted groups, some of one unit. Some ids are negative and mean no group.

    Args:
        kind: "normal", "binary", "equal" (one constant per group), "offset" (spread 1 around 10 to 10,000). Default: a
            random kind.
        masks: whether some units may leave the statistics (``mask``) or get no advantage (``apply_mask``).
    """
    draw = torch.Generator("cpu").manual_seed(seed)

    kind = ("normal", "binary", "equal", "offset")[below(draw, 4)] if kind is None else kind
    groups = torch.randint(-1, max(1, units // 2), (units,), generator=draw, device="cpu")
    rewards = {
        "normal": torch.randn(units, generator=draw, dtype=torch.float32, device="cpu"),
        "binary": torch.randint(0, 2, (units,), generator=draw, device="cpu").float(),
        "equal": torch.rand(max(1, units), generator=draw, dtype=torch.float32, device="cpu")[groups],
        "offset": 10.0 ** (1 + below(draw, 4)) + torch.randn(units, generator=draw, dtype=torch.float32, device="cpu"),
    }[kind]
    keywords = {}
    if masks and below(draw, 2):
        keywords["mask"] = torch.rand(units, generator=draw, dtype=torch.float32, device="cpu") > 0.2
        if below(draw, 2):
            keywords["apply_mask"] = torch.rand(units, generator=draw, dtype=torch.float32, device="cpu") > 0.2
    return RewardsExample(rewards, None if below(draw, 8) == 0 else wide_ids(groups), keywords)


@examines
def random_steps(seed: int = 0, units: int = 12) -> RewardsExample:
    """Rewards of unsorted steps with the inputs of their estimators: ids of trajectories, each in one group, ids of
    anchors, and lengths."""
    draw = torch.Generator("cpu").manual_seed(seed)

    def integers(low: int, high: int, count: int) -> torch.Tensor:
        return torch.randint(low, high, (count,), generator=draw, device="cpu")

    kind = int(integers(0, 3, 1))
    normal = torch.randn(units, generator=draw, dtype=torch.float32, device="cpu")
    rewards = (normal, integers(0, 2, units).float(), torch.full_like(normal, 0.3))[kind]
    groups, trajectory = integers(0, 3, units + 1), integers(0, units // 2 + 1, units)
    keywords = {
        "trajectory_ids": wide_ids(trajectory),
        "anchor_ids": integers(0, 3, units),
        "lengths": integers(1, 9, units).float(),
    }
    return RewardsExample(rewards, wide_ids(groups[trajectory]), keywords)


# --------------------------------------------------------------------------------------------------------- devices

Example = TypeVar("Example")


def device_of(backend: str) -> str:
    """The device whose tensors a backend serves in this process."""
    compiled = backend == "triton" and os.environ.get("TRITON_INTERPRET") != "1"
    return "cuda" if backend == "cuda" or compiled else "cpu"


def move(example: Example, device: str | torch.device) -> Example:
    """A copy of the example on a device, with its strides and alignment; writes to it stay there."""
    moved: Any = example
    if isinstance(example, torch.Tensor):
        x = examined("example", example).detach()
        memory = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())
        moved = memory.to(device, copy=True).as_strided(x.size(), x.stride(), x.storage_offset())
    elif isinstance(example, PackedBatch):
        moved = PackedBatch.__new__(PackedBatch)
        moved.__setstate__(move(example.__getstate__(), device))
    elif isinstance(example, dict):
        moved = {name: move(value, device) for name, value in example.items()}
    elif isinstance(example, tuple):
        values = [move(value, device) for value in example]
        moved = type(example)(*values) if hasattr(example, "_fields") else tuple(values)
    return moved  # type: ignore[no-any-return]
