"""Terms of group-normalised advantages, as kernels know them."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..arguments import check_flag, check_member, check_number
from ..checks import check


class Center(enum.IntEnum):
    """The centre that is subtracted."""

    MEAN = 0
    LEAVE_ONE_OUT = 1  # the mean of the others: n / (n - 1) times the deviation from the mean


class Scale(enum.IntEnum):
    """The divisor of the deviation from the centre."""

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
    """The terms of a unit that count where terms share. A group of one counts only with its mean (:class:`Part`) or if
    it keeps its raw value."""

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

    lambda is 1, or W / (W - w) for LEAVE_ONE_OUT: w is the weight of the unit, W the sum of weights.
    ``ddof``: 1 divides the variance by W - 1 (torch.std), 0 by W (numpy.std).
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
        check_member("center", self.center, Center)
        check_member("scale", self.scale, Scale)
        check_member("eps_mode", self.eps_mode, EpsMode)
        check_member("part", self.part, Part)
        check_member("presence", self.presence, Presence)
        check_flag("keep_singletons", self.keep_singletons)
        check_number("eps", self.eps)
        check_number("coefficient", self.coefficient)
        check(self.ddof in (0, 1), "ddof: expected 0 (divide by n) or 1 (divide by n - 1), got {}", self.ddof)
        check(0 <= self.eps < math.inf, "eps: expected a finite number >= 0, got {}", self.eps)
        check(
            -math.inf < self.coefficient < math.inf, "coefficient: expected a finite number, got {}", self.coefficient
        )


MOST_TERMS = 8


@dataclass(frozen=True)
class GroupNormalisation:
    """How terms, each over values and a grouping of its own, make one advantage per unit.

    ``share_eps``, ``share_least``: where terms share, eps of the denominator, and the bound that the sum of shares must
    exceed, or the advantage is 0.
    """

    terms: tuple[GroupTerm, ...]
    share: Share = Share.SUM
    share_eps: float = 0.0
    share_least: float = 0.0

    def __post_init__(self) -> None:
        check_member("share", self.share, Share)
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
    """The statistics of the members of its group, for every unit: all ``[U]`` float64, zeros where a unit has no
    group."""

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
    mask: torch.Tensor | None = None  # [U] bool, the units that enter the statistics; None: all
    apply_mask: torch.Tensor | None = None  # [U] bool, the units that receive an advantage; None: the same as mask
