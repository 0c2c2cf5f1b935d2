"""The closed choices that kernels know, in one place: Python's side of ``csrc/include/hpo/api.h`` (a test compares
them).

A published method is a value of one of these structures; it never adds a kind of its own.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from .checks import check

__all__ = [
    "INDEX_RULES",
    "MOST_TERMS",
    "Action",
    "Aggregate",
    "Boundary",
    "Center",
    "CorrectionSpec",
    "EpsMode",
    "Exchange",
    "GroupInputs",
    "GroupNormalisation",
    "GroupTerm",
    "Head",
    "Invalid",
    "KLEstimator",
    "KLGradient",
    "LevelKind",
    "LevelSpec",
    "LogitRows",
    "LogitType",
    "OrderRule",
    "Part",
    "Penalty",
    "PolicyLossInputs",
    "PolicyLossSpec",
    "Presence",
    "Provenance",
    "Reduction",
    "Routing",
    "Scale",
    "Scopes",
    "SegmentReduce",
    "Share",
    "Stage",
    "Statistic",
    "TermSpec",
    "TokenGate",
    "Unit",
    "WindowAggregate",
]


class Provenance(enum.Enum):
    """Where a preset's formula comes from."""

    VERIFIED = "official code run, or the paper's equations and independent numbers"
    PAPER = "the paper's equations"
    RECONSTRUCTED = "reconstructed from partial sources"


# ---------------------------------------------------------------------------------------------------- ratio gates


class TokenGate(enum.IntEnum):
    """The gate on a token's own log-ratio (or on its residual, below a trajectory level)."""

    IDENTITY = 0
    DROP = 1  # the value 0: the token's own log-ratio does not count
    CLIP = 2


class LevelKind(enum.IntEnum):
    """The gate ``g(u)`` on a level's residual, and what ``low``, ``high`` and ``slope`` of a LevelSpec mean for it."""

    IDENTITY = 0
    CLIP = 1  # clamp(u, low, high)
    ROLLBACK = (
        2  # u up to C = high; beyond, back to 0 with -slope (negative: the segment's size, at most -slope); then 0
    )
    TANH = 3  # C tanh(u / C), C = high
    GAMMA = 4  # high + low u - high e^u: the logarithm of a gamma density in e^u
    EXCESS = 5  # 0 up to n high, n the segment's size; beyond, n high - u


class Unit(enum.IntEnum):
    """Whose aggregate a level gates."""

    STEP = 1
    TRAJECTORY = 2
    GROUP = 3
    DOMAIN = 4


class Aggregate(enum.IntEnum):
    """How the log-ratios of a segment become one."""

    MEAN = 0
    SUM = 1
    LOG_MEAN_EXP = 2  # log((1 / n) sum e^x): the mean of ratios, whose logarithm it is
    BALANCED = 3  # the mean of the aggregates of the next finer level's segments, as far as they have tokens


class Routing(enum.IntEnum):
    """How a level's aggregate carries gradient to its tokens."""

    THROUGH = 0  # the true derivative: 1 / n to every token
    SELF = 1  # each token takes the place of the aggregate (the straight-through "token" form)
    STOPPED = 2


class Head(enum.IntEnum):
    """From the gated log-ratio z, r = e^z, to the objective; p is the head's number for the sign of A."""

    LINEAR = 0  # A r
    SCORE = 1  # A sg[r] logp
    LOG = 2  # A logp - p z^2 / 2
    MIRROR = 3  # A r - p (z r - r + 1)
    SIGMOID = 4  # A (4 / p) sigmoid(p (r - 1))
    SIMPLE = 5  # A r - |A| (r - 1)^2 / (2 p)
    TARGET = 6  # -|A| |r - target|
    NEGATIVE_AWARE = 7  # |A| log max(R, p), straight through; R = r, for A < 0 R = (1 - target r) / (1 - target)
    FLIPPED = 8  # A s, s = r, for A >= 0 s = sg[1 / r^2] r; where s > p: p A logp
    CENSORED = 9  # A (1 + sign(x) max(|e^x - 1| + z, 0)), x the token's own log-ratio; levels aggregate |e^x - 1|


class Penalty(enum.IntEnum):
    """A penalty on the token's own log-ratio x, whatever the gate does with it."""

    NONE = 0
    K1 = 1  # -x
    K2 = 2  # x^2 / 2
    K3 = 3  # e^x - 1 - x
    ABSOLUTE = 4  # |x|


class KLEstimator(enum.IntEnum):
    """Estimators of KL(policy || reference) from s = logp - ref_logp."""

    NONE = 0
    K1 = 1  # s
    K2 = 2  # s^2 / 2
    K3 = 3  # e^-s - 1 + s


class KLGradient(enum.IntEnum):
    """Which derivative the KL penalty has."""

    VALUE = 0  # that of the estimator itself
    STRAIGHT_THROUGH = 1  # the value of the estimator, the derivative s of k2
    IMPORTANCE = 2  # r k(s), differentiated through r as well


class LevelSpec(NamedTuple):
    """One level of a hierarchy. ``low`` and ``high`` are in log space, by channel and sign of the advantage:
    (x+ and A >= 0, x+ and A < 0, x- and A >= 0, x- and A < 0); without a split the first two count."""

    unit: Unit
    gate: LevelKind
    routing: Routing = Routing.THROUGH
    aggregate: Aggregate = Aggregate.MEAN
    low: tuple[float, float, float, float] = (-math.inf,) * 4
    high: tuple[float, float, float, float] = (math.inf,) * 4
    slope: float = 0.0


class Statistic(enum.IntEnum):
    """What a correction measures of a token, from u = first - second within +-60, p = e^first and q = e^second."""

    LOG_RATIO = 0  # u
    K2 = 1  # u^2 / 2, at most 1800
    K3 = 2  # e^u - 1 - u of u within +-20, at most 4.9e8
    PROBABILITY = 3  # p - q
    BINARY_KL = 4  # KL(q || p) of "this token or another", with the sign of p - q


class Reduction(enum.IntEnum):
    """How the statistics of a segment's valid tokens become one."""

    MEAN = 0
    SUM = 1
    MIN = 2
    MAX = 3


class Action(enum.IntEnum):
    """From the statistic v to the factor."""

    MASK = 0  # 1 inside the bounds, else 0
    BAND = 1  # e^v inside the bounds, else 0
    CLAMP = 2  # e^v of v within its bounds


class CorrectionSpec(NamedTuple):
    """A factor on tokens that is a constant of the differentiation. Bounds are those of v, (A >= 0, A < 0)."""

    statistic: Statistic
    reduction: Reduction
    action: Action
    of_segments: bool  # the statistic is that of the token's segment
    strict: bool  # what lies on a bound is outside
    low: tuple[float, float]
    high: tuple[float, float]

    @property
    def is_extremum(self) -> bool:
        """Whether segments are reduced to a minimum or a maximum, and not by adding."""
        return self.reduction in (Reduction.MIN, Reduction.MAX)


# Changes what segments of a correction have added up, ``[P, n]`` numbers in place: into the sums over all processes, or
# with True into the maxima. Numbers are integers, floats for the reference.
SegmentReduce = Callable[[torch.Tensor, bool], None]


class TermSpec(NamedTuple):
    """What few gates ask of a token's term; with it kernels take a loop of their own. Pairs are (A >= 0, A < 0)."""

    head_numbers: tuple[float, float] = (0.0, 0.0)
    slope_low: tuple[float, float] = (0.0, 0.0)  # derivative of the token clip beyond its bounds
    slope_high: tuple[float, float] = (0.0, 0.0)
    weight_low: tuple[float, float] = (1.0, 1.0)  # factor on the objective there
    weight_high: tuple[float, float] = (1.0, 1.0)
    pre_low: tuple[float, float] = (-math.inf, -math.inf)  # clip of the log-ratio before any aggregate
    pre_high: tuple[float, float] = (math.inf, math.inf)
    penalty: Penalty = Penalty.NONE
    penalty_coefficient: float = 0.0


class PolicyLossSpec(NamedTuple):
    """A ratio gate and a KL penalty as kernels see them. Pairs are (advantage >= 0, advantage < 0).

    A mean over the trajectory whose residual is dropped is ``has_level``: its tokens need no ratio of their own, and
    kernels make use of that. Every other hierarchy is ``levels``, finest first, with the token gate below them.
    """

    token: TokenGate = TokenGate.CLIP
    token_low: tuple[float, float] = (0.0, 0.0)  # ratio space; 0 and inf are "no bound"
    token_high: tuple[float, float] = (math.inf, math.inf)
    low_driven: tuple[bool, bool] = (False, False)  # which bounds the per-token tensors replace
    high_driven: tuple[bool, bool] = (False, False)
    has_level: bool = False
    level_clips: bool = False
    level_log_low: tuple[float, float] = (-math.inf, -math.inf)
    level_log_high: tuple[float, float] = (math.inf, math.inf)
    routing: Routing = Routing.THROUGH
    head: Head = Head.LINEAR
    kl: KLEstimator = KLEstimator.NONE
    kl_gradient: KLGradient = KLGradient.VALUE
    kl_beta: float = 0.0
    strict: bool = False  # window selection: score > threshold instead of >=
    levels: tuple[LevelSpec, ...] = ()
    token_log_low: tuple[float, float] = (-math.inf, -math.inf)  # the token gate below levels, on its residual
    token_log_high: tuple[float, float] = (math.inf, math.inf)
    split: bool = False  # positive and negative log-ratios are two channels, each with aggregates of its own
    term: TermSpec | None = None  # then everything is as with levels, even without any

    @property
    def is_hierarchical(self) -> bool:
        """Whether kernels go through the leaves of a hierarchy."""
        return bool(self.levels) or self.term is not None

    @property
    def mean_exp(self) -> bool:
        """Whether the exponentials of log-ratios are what segments add up."""
        return any(level.aggregate is Aggregate.LOG_MEAN_EXP for level in self.levels)

    @property
    def has_aggregate_grad(self) -> bool:
        """Whether gradient goes through the aggregate of some level."""
        return self.head is not Head.SCORE and any(level.routing is Routing.THROUGH for level in self.levels)

    def as_hierarchy(self) -> PolicyLossSpec:
        """The same gate with ``levels`` instead of ``has_level``: they alone know an :class:`Exchange`."""
        if not self.has_level:
            return self
        kind = LevelKind.CLIP if self.level_clips else LevelKind.IDENTITY
        low, high = self.level_log_low, self.level_log_high
        level = LevelSpec(Unit.TRAJECTORY, kind, self.routing, Aggregate.MEAN, low * 2, high * 2)
        plain = PolicyLossSpec()
        return self._replace(
            has_level=False,
            level_clips=False,
            level_log_low=plain.level_log_low,
            level_log_high=plain.level_log_high,
            routing=plain.routing,
            levels=(level,),
        )


class Stage(enum.IntEnum):
    """Of a call under levels: all at once, or one after the other, with an :class:`Exchange` between them."""

    WHOLE = 0
    SUMS = 1
    SWEEP = 2
    REDUCE_GRAD = 3
    BROADCAST_GRAD = 4


class Exchange(Protocol):
    """Changes what the segments of each level have added up: to add what other processes have, or to put something else
    in its place. Segment s of level k stands at ``[k, s]``. The first three change integers in place, the last two of
    them where the spec ``has_aggregate_grad`` and a gradient is wanted: whether they are called depends on nothing
    else.
    """

    def sums(self, table: torch.Tensor) -> None:
        """``[levels, P, 3]``: valid tokens, and by channel the sum of what the level aggregates of them, times 2^32:
        their log-ratios, of which :attr:`Aggregate.LOG_MEAN_EXP` takes ``e^x - 1``."""

    def largest(self, table: torch.Tensor) -> None:
        """``[levels, P, 2]``: by channel how large the largest gradient is that is handed up; grows with it."""

    def aggregate_grad(self, table: torch.Tensor) -> None:
        """``[levels, P, 2]``: by channel all gradient that is handed up, in a unit that ``largest`` fixes."""

    def differentiable_sums(self, table: torch.Tensor) -> torch.Tensor:
        """For the reference: what ``sums`` does, of floating-point numbers that are not multiplied by anything, as a
        function of the table ``[levels, P, 3]`` whose derivative is that of all processes' losses."""


class PolicyLossInputs(NamedTuple):
    """What the policy-loss op reads. ``[T]`` tokens, ``[S]`` rows; ``None`` means "not given"."""

    logp: torch.Tensor  # [T]
    old_logp: torch.Tensor | None  # [T]; None: on-policy
    advantages: torch.Tensor  # [S], or [T] with advantage_per_token
    weights: torch.Tensor  # [S]
    cu_seqlens: torch.Tensor  # [S + 1] int64
    mask: torch.Tensor | None = None  # [T] bool
    ref_logp: torch.Tensor | None = None  # [T]
    entropy: torch.Tensor | None = None  # [T], metrics only
    score: torch.Tensor | None = None  # [T], with threshold [1]
    threshold: torch.Tensor | None = None
    token_mask: torch.Tensor | None = None  # [T] bool
    token_weight: torch.Tensor | None = None  # [T]
    low: torch.Tensor | None = None  # [T] ratio bounds
    high: torch.Tensor | None = None
    row_trajectory: torch.Tensor | None = None  # [S] int64 in [0, S): trajectories of several rows, all three or none
    trajectory_start: torch.Tensor | None = None  # [S + 1] int64
    trajectory_rows: torch.Tensor | None = None  # [S] int64
    advantage_per_token: bool = False
    # with spec.is_hierarchical: P ranges of tokens that tile the finest level, and the segment of each at every level
    leaf_begin: torch.Tensor | None = None  # [P] int64
    leaf_end: torch.Tensor | None = None
    leaf_row: torch.Tensor | None = None  # [P] int64 in [0, S)
    ancestors: torch.Tensor | None = None  # [levels, P] int64 in [0, P): a segment's number is that of its first leaf
    # with spec.term
    target: torch.Tensor | None = None  # [S], or [T] with target_per_token: what some heads compare the ratio with
    target_per_token: bool = False
    penalty_mask: torch.Tensor | None = None  # [T] bool: who pays the penalty of the term; None: every valid token


# ------------------------------------------------------------------------------------------------- group statistics


class Center(enum.IntEnum):
    """What is subtracted."""

    MEAN = 0
    LEAVE_ONE_OUT = 1  # the mean of the others: n / (n - 1) times the deviation from the mean


class Scale(enum.IntEnum):
    """What the deviation from the centre is divided by."""

    NONE = 0
    GROUP = 1  # the group's standard deviation
    BATCH = 2  # the standard deviation of the term's values over all members of the batch, in whatever group
    ABSOLUTE = 3  # the group's mean absolute deviation
    MEAN = 4  # the group's mean
    ROOT_MEAN = 5  # the square root of the group's mean


class EpsMode(enum.IntEnum):
    """Where eps stands."""

    ADD = 0  # sigma + eps
    SQRT = 1  # sqrt(sigma^2 + eps)
    FLOOR = 2  # max(sigma, eps)
    ADD_SHARE = 3  # sigma + eps / W: eps is added to a sum of W terms, and not to their mean


class Part(enum.IntEnum):
    """The statistics of a group that reach its units."""

    NORMALISED = 0  # (x - center) / scale
    MEAN = 1  # the group's mean


class Presence(enum.IntEnum):
    """Which terms of a unit count where terms share; a group of one never does unless it keeps its raw value."""

    ALWAYS = 0
    SPREAD = 1  # the group's members are not all equal
    NONZERO = 2  # the term is not exactly 0


class Share(enum.IntEnum):
    """How the terms of a unit are put together: ``A = sum_m k_m a_m``."""

    SUM = 0  # k = coefficient
    EQUAL = 1  # k = coefficient s / (sum over present terms of coefficient s + eps), s = 1
    COUNT = 2  # s: the members of the group
    DEVIATION = 3  # s: the group's standard deviation


@dataclass(frozen=True)
class GroupTerm:
    """``a = lambda (x - center) / scale``, statistics over the weighted members of a group.

    ``ddof``: 1 divides the variance by W - 1 (torch.std), 0 by W (numpy.std), W the sum of weights.
    ``keep_singletons``: a group of one member keeps its raw value (centre 0, scale 1, for BATCH that of the batch)
    instead of exactly 0. A unit equal to its group's centre gets exactly 0, whatever eps; so does every unit where the
    scale, eps included, is not above 0, and for MEAN and ROOT_MEAN where the mean is not.
    """

    center: Center = Center.MEAN
    scale: Scale = Scale.GROUP
    ddof: int = 1
    eps: float = 1e-6
    eps_mode: EpsMode = EpsMode.ADD
    keep_singletons: bool = False
    part: Part = Part.NORMALISED
    presence: Presence = Presence.ALWAYS
    coefficient: float = 1.0

    def __post_init__(self) -> None:
        check(self.ddof in (0, 1), "ddof: expected 0 (divide by n) or 1 (divide by n - 1), got {}", self.ddof)
        check(0 <= self.eps < math.inf, "eps: expected a finite number >= 0, got {}", self.eps)
        check(math.isfinite(self.coefficient), "coefficient: expected a finite number, got {}", self.coefficient)


MOST_TERMS = 8


@dataclass(frozen=True)
class GroupNormalisation:
    """How terms, each over values and a grouping of its own, make one advantage per unit.

    ``share_eps``, ``share_least``: where terms share, eps of the denominator, and what the sum of shares must exceed,
    or the advantage is 0.
    """

    terms: tuple[GroupTerm, ...] = (GroupTerm(),)
    share: Share = Share.SUM
    share_eps: float = 0.0
    share_least: float = 0.0

    def __post_init__(self) -> None:
        check(
            1 <= len(self.terms) <= MOST_TERMS, "terms: expected 1 to {} of them, got {}", MOST_TERMS, len(self.terms)
        )
        check(
            self.share is Share.SUM or all(term.coefficient >= 0 for term in self.terms),
            "coefficient: expected numbers >= 0 where terms share, got {}",
            [term.coefficient for term in self.terms],
        )
        for name in ("share_eps", "share_least"):
            number = getattr(self, name)
            check(0 <= number < math.inf, "{}: expected a finite number >= 0, got {}", name, number)


class GroupStatistics(NamedTuple):
    """What the members of its group amount to, for every unit: all ``[U]`` float64, zeros where a unit has no group."""

    members: torch.Tensor  # n, how many they are
    weight: torch.Tensor  # W, the sum of their weights w
    mean: torch.Tensor  # sum of w x / W
    squares: torch.Tensor  # sum of w (x - mean)^2; exactly 0 where all members are equal
    least: torch.Tensor
    greatest: torch.Tensor

    def deviation(self, ddof: int) -> torch.Tensor:
        """The standard deviation ``sqrt(squares / (W - ddof))``; 0 where there are too few members."""
        enough = self.weight > ddof
        return torch.where(enough, self.squares / torch.where(enough, self.weight - ddof, 1.0), 0.0).sqrt()


class GroupInputs(NamedTuple):
    """Tensors of group_normalise: of each term, and common to all of them."""

    values: tuple[torch.Tensor, ...]  # [U] float32
    ids: tuple[torch.Tensor | None, ...]  # [U] int64, negative: in no group; None: one group
    weights: tuple[torch.Tensor | None, ...]  # [U] float32 in the statistics; not above 0: no member; None: 1 each
    mask: torch.Tensor | None = None  # [U] bool, who enters the statistics; None: everybody
    apply_mask: torch.Tensor | None = None  # [U] bool, who receives an advantage; None: the same as mask


# -------------------------------------------------------------------------------------------------- entropy windows


class Boundary(enum.IntEnum):
    """A window that sticks out of its row."""

    FULL = 0  # is undefined
    SHRINK = 1  # aggregates the part inside
    ZERO = 2  # counts 0 outside: a mean divides by the full width anyway
    CARRY = 3  # takes the mean of the row's windows that do not stick out, or the row's first value if all do


class Invalid(enum.IntEnum):
    """Masked tokens inside a window."""

    SKIP = 0  # are left out (at least one valid token must remain)
    BREAK = 1  # make the window undefined


class WindowAggregate(enum.IntEnum):
    """The aggregate of the values of a window."""

    MEAN = 0
    SUM = 1
    MAX = 2
    MIN = 3


class Scopes(NamedTuple):
    """Scopes of tokens for order statistics: a scope is a list of segments, which are ranges of tokens."""

    offsets: torch.Tensor  # [N + 1] int64: segment n holds the tokens offsets[n] .. offsets[n + 1] - 1
    order: torch.Tensor | None = None  # [N] int64: segments, one scope after the other; None: scope n is segment n
    begin: torch.Tensor | None = None  # [C + 1] int64: scope c has the segments order[begin[c] : begin[c + 1]]

    @property
    def number(self) -> int:
        """C, the number of scopes."""
        return (self.offsets if self.begin is None else self.begin).shape[0] - 1


class LogitType(enum.IntEnum):
    """What logits are stored as."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2

    @staticmethod
    def of(logits: torch.Tensor) -> LogitType:
        return LogitType[str(logits.dtype).removeprefix("torch.").upper()]


class LogitRows(NamedTuple):
    """Rows of logits over a vocabulary or a part of it, with what both directions of ``token_logprobs`` read."""

    logits: torch.Tensor  # [..., columns]; columns first to first + columns - 1 of the vocabulary
    targets: torch.Tensor  # [...] int64 ids in the whole vocabulary
    temperatures: torch.Tensor | None  # [...] float32, instead of `temperature`
    temperature: float
    ignore_index: int
    floors: torch.Tensor | None  # [...] float32: logits below are outside the support, as -inf is
    first: int
    vocabulary: int

    @property
    def is_whole(self) -> bool:
        return self.logits.shape[-1] == self.vocabulary

    def at_two_strides(self) -> tuple[torch.Tensor, tuple[int, int, int]]:
        """The logits, copied unless their rows lie at two strides, which is how a slice of ``[B, L, V]`` lies in memory
        and all that kernels know; and ``(inner, outer stride, inner stride)``: row r begins at element
        ``(r // inner) * outer stride + (r % inner) * inner stride``."""
        logits = self.logits if len(_leading(self.logits)) <= 2 else self.logits.contiguous()
        (_, outer_stride), (inner, inner_stride) = [(1, 0), (1, 0), *_leading(logits)][-2:]
        return logits, (inner, outer_stride, inner_stride)


def _leading(logits: torch.Tensor) -> list[tuple[int, int]]:
    """Sizes and strides of all dimensions but the last, joined where they lie one after the other."""
    joined: list[tuple[int, int]] = []
    for size, stride in zip(logits.shape[:-1], logits.stride()[:-1], strict=True):
        if size == 1:
            continue
        if joined and joined[-1][1] == size * stride:
            joined[-1] = (joined[-1][0] * size, stride)
        else:
            joined.append((size, stride))
    return joined


class OrderRule(enum.IntEnum):
    """Which ascending 0-based order statistic of n values stands for the quantile q."""

    CEIL = 0  # ceil(q (n - 1)): with `>=`, the mask of the linearly interpolated quantile
    FLOOR = 1  # floor(q (n - 1)): with `>`, the same
    NEAREST = 2  # round(q (n - 1)), half to even
    LINEAR = 3  # none: the interpolation between the floor and the ceiling

    def index(self, numerator: int, denominator: int, n: int) -> int:
        """The index for q = numerator / denominator, in exact integers: floats get it wrong for q = .7 and n = 11."""
        check(self is not OrderRule.LINEAR, "rule: expected one of an index, got {!r}", self)
        floor, remainder = divmod(numerator * (n - 1), denominator)
        if self is OrderRule.FLOOR or remainder == 0:
            return floor
        if self is OrderRule.CEIL:
            return floor + 1
        return floor + (2 * remainder > denominator or (2 * remainder == denominator and floor % 2 == 1))


INDEX_RULES = (OrderRule.CEIL, OrderRule.FLOOR, OrderRule.NEAREST)  # those that pick one of the values
