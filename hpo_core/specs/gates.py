"""The ratio gate, its levels and its corrections, as kernels know them."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch


class TokenGate(enum.IntEnum):
    """The gate on a token's own log-ratio, or on its residual below levels."""

    IDENTITY = 0
    DROP = 1  # the value 0: the token's own log-ratio does not count
    CLIP = 2


class LevelKind(enum.IntEnum):
    """The gate ``g(u)`` on a level's residual, with ``low``, ``high`` and ``slope`` those of its LevelSpec."""

    IDENTITY = 0
    CLIP = 1  # clamp(u, low, high)
    ROLLBACK = 2  # u up to C = high, then back to 0 at rate slope (negative: the segment's size, at most -slope)
    TANH = 3  # C tanh(u / C), C = high
    GAMMA = 4  # high + low u - high e^u: the logarithm of a gamma density in e^u
    EXCESS = 5  # 0 up to n high, n the segment's size; beyond, n high - u


class Unit(enum.IntEnum):
    """The segment whose aggregate a level gates."""

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
    """The objective as a function of the gated log-ratio z, r = e^z; p is the head's number for the sign of A."""

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
    """The derivative of the KL penalty."""

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
    """The statistic that a correction compares: u = first - second within +-60, p = e^first and q = e^second."""

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
    """How the statistic v becomes a factor."""

    MASK = 0  # 1 inside the bounds, else 0
    BAND = 1  # e^v inside the bounds, else 0
    CLAMP = 2  # e^v of v within its bounds


class CorrectionSpec(NamedTuple):
    """A factor on tokens that is a constant of the differentiation. Bounds are those of v, (A >= 0, A < 0)."""

    statistic: Statistic
    reduction: Reduction
    action: Action
    of_segments: bool  # the statistic is that of the token's segment
    strict: bool  # a value on a bound is outside
    low: tuple[float, float]
    high: tuple[float, float]

    @property
    def is_extremum(self) -> bool:
        """Whether segments are reduced to a minimum or a maximum, and not by adding."""
        return self.reduction in (Reduction.MIN, Reduction.MAX)


MOST_ROW_CORRECTIONS = 2  # of a loss


# Changes ``[P, n]`` numbers of the segments of a correction in place: into the sums over all processes, or with True
# into the maxima. Numbers are integers, floats for the reference.
SegmentReduce = Callable[[torch.Tensor, bool], None]


class TermSpec(NamedTuple):
    """The rare parts of a token's term; with it kernels take a loop of their own. Pairs are (A >= 0, A < 0)."""

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

    ``levels`` are finest first, with the token gate below them. Kernels make use of a token gate that drops: its tokens
    need no ratio of their own.
    """

    token: TokenGate = TokenGate.CLIP
    token_low: tuple[float, float] = (0.0, 0.0)  # ratio space; 0 and inf are "no bound"
    token_high: tuple[float, float] = (math.inf, math.inf)
    low_driven: tuple[bool, bool] = (False, False)  # which bounds the per-token tensors replace
    high_driven: tuple[bool, bool] = (False, False)
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
    correction: CorrectionSpec | None = None  # of tokens: a factor on their weights
    row_corrections: tuple[CorrectionSpec, ...] = ()  # more of these factors, by the statistics of rows

    @property
    def is_hierarchical(self) -> bool:
        """Whether kernels go through the leaves of a hierarchy."""
        return len(self.levels) > 0 or self.term is not None

    @property
    def mean_exp(self) -> bool:
        """Whether segments add up the exponentials of log-ratios."""
        return any(level.aggregate is Aggregate.LOG_MEAN_EXP for level in self.levels)

    @property
    def has_aggregate_grad(self) -> bool:
        """Whether gradient goes through the aggregate of some level."""
        return self.head is not Head.SCORE and any(level.routing is Routing.THROUGH for level in self.levels)


class Stage(enum.IntEnum):
    """A call under levels: all stages at once, or one after the other, with an :class:`Exchange` between them."""

    WHOLE = 0
    SUMS = 1
    SWEEP = 2
    REDUCE_GRAD = 3
    BROADCAST_GRAD = 4


class Exchange(Protocol):
    """Changes the sums of the segments of each level: to add those of other processes, or to put others in their
    place. Segment s of level k stands at ``[k, s]``. The first three change integers in place, the last two of
    them where the spec ``has_aggregate_grad`` and a gradient is wanted: whether they are called depends on nothing
    else.
    """

    def sums(self, table: torch.Tensor) -> None:
        """``[levels, P, 3]``: the number of valid tokens, and by channel the sum of their log-ratios x, times 2^32;
        under :attr:`Aggregate.LOG_MEAN_EXP` that of ``e^x - 1``."""

    def largest(self, table: torch.Tensor) -> None:
        """``[levels, P, 2]``: by channel a key that is monotone in the largest gradient of a leaf in the aggregate."""

    def aggregate_grad(self, table: torch.Tensor) -> None:
        """``[levels, P, 2]``: by channel the gradient in the aggregate, in a unit that ``largest`` fixes."""

    def differentiable_sums(self, table: torch.Tensor) -> torch.Tensor:
        """The same as ``sums`` for the reference: of floating-point numbers that are not multiplied by anything, as a
        function of the table ``[levels, P, 3]`` whose derivative is that of all processes' losses."""


_LARGEST = torch.finfo(torch.float32).max


def in_floats(spec: Any) -> Any:
    """A spec with each of its numbers as a float: Triton types a number in a tuple by its class, so that an integer
    would be another kernel, and NumPy's numbers and fractions none. A number beyond float32, such as a bound, is
    infinite."""
    if isinstance(spec, tuple):
        parts = [in_floats(each) for each in spec]
        return type(spec)(*parts) if hasattr(spec, "_fields") else tuple(parts)
    if spec is None or isinstance(spec, (bool, enum.Enum)):
        return spec
    number = float(spec)
    return math.copysign(math.inf, number) if abs(number) > _LARGEST else number


class PolicyLossInputs(NamedTuple):
    """The tensors of the policy-loss op. ``[T]`` tokens, ``[S]`` rows; ``None`` means "not given"."""

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
    advantage_per_token: bool = False
    # with spec.is_hierarchical: P ranges of tokens that tile the finest level, and the segment of each at every level
    leaf_begin: torch.Tensor | None = None  # [P] int64; None, and so are the next two: the rows, P = S
    leaf_end: torch.Tensor | None = None
    leaf_row: torch.Tensor | None = None  # [P] int64 in [0, S)
    # [levels, P] int64 in [0, P): a segment's number is that of its first leaf. None: each leaf is one at every level
    ancestors: torch.Tensor | None = None
    # with spec.term
    target: torch.Tensor | None = None  # [S], or [T] with target_per_token; some heads compare the ratio with it
    target_per_token: bool = False
    penalty_mask: torch.Tensor | None = None  # [T] bool: tokens that pay the term's penalty; None: all valid ones
    kl_weight: torch.Tensor | None = None  # [T] factor on the penalty of kl, with ref_logp; not finite: 0
    # The pair that the corrections of a spec, and the correction op, compare. Without a pair the op compares logp with
    # old_logp; with one, only tokens count whose log-ratios to old_logp and ref_logp are numbers.
    correction_first: torch.Tensor | None = None  # [T]; None: logp
    correction_second: torch.Tensor | None = None  # [T]

    @property
    def leaves(self) -> int:
        """The number P of leaves."""
        return self.cu_seqlens.numel() - 1 if self.leaf_begin is None else self.leaf_begin.numel()


# The tensors [T] by dtype. Advantages and targets, which may be [S], stand in neither list.
FLOATS_OF_TOKENS = (
    *("logp", "old_logp", "ref_logp", "entropy", "score", "token_weight", "low", "high", "kl_weight"),
    *("correction_first", "correction_second"),
)
BOOLS_OF_TOKENS = ("mask", "token_mask", "penalty_mask")


def rows_as_weights(
    inputs: PolicyLossInputs,
    spec: PolicyLossSpec,
    correction: Callable[[PolicyLossInputs, CorrectionSpec], torch.Tensor],
) -> tuple[PolicyLossInputs, PolicyLossSpec]:
    """Corrections of rows as the weights of tokens, for sweeps that know only corrections of tokens."""
    if not spec.row_corrections:
        return inputs, spec
    logp = inputs.logp.detach()
    rows = inputs._replace(
        logp=logp, old_logp=logp if inputs.old_logp is None else inputs.old_logp, leaf_begin=None, leaf_end=None,
        leaf_row=None, ancestors=None,
    )  # fmt: skip
    for each in spec.row_corrections:
        rows = rows._replace(token_weight=correction(rows, each))
    inputs = inputs._replace(token_weight=rows.token_weight)
    if spec.correction is None:
        inputs = inputs._replace(correction_first=None, correction_second=None)
    return inputs, spec._replace(row_corrections=())
