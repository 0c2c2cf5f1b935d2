"""One fixed-length device vector of sums, counts and extrema; every division happens at the end.

The loss writes a float64 vector with one slot per quantity. Vectors of micro-batches and ranks combine slot by slot
(``+``, ``all_reduce``), and only ``compute`` copies anything to the host, once.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.distributed

from .arguments import examines
from .checks import check

if TYPE_CHECKING:
    from typing_extensions import Self

# name -> reduction. The order is that of csrc/include/hpo/metrics.h; a test compares the two.
SLOTS: dict[str, str] = {
    "tokens": "sum",  # valid tokens
    "selected": "sum",  # valid tokens whose policy term counts (window, token mask, finite advantage)
    "rows": "sum",  # rows with at least one valid token
    "loss": "sum",
    "log_ratio_sum": "sum",
    "log_ratio_square": "sum",
    "ratio_deviation": "sum",  # sum of r - 1, log-ratio saturated at +-40
    "ratio_deviation_square": "sum",  # sum of (r - 1)^2
    "log_ratio_min": "min",
    "log_ratio_max": "max",
    "clipped_high_positive": "sum",  # selected tokens beyond the upper bound with advantage >= 0
    "clipped_low_positive": "sum",
    "clipped_low_negative": "sum",
    "clipped_high_negative": "sum",  # the dual clip
    "reference_log_ratio": "sum",  # s = logp - ref_logp
    "reference_log_ratio_square": "sum",
    "reference_k3": "sum",
    "penalty": "sum",  # the share of the loss that penalties have, that on the reference policy and the gate's own
    "entropy": "sum",
    "entropy_tokens": "sum",
    "nan_tokens": "sum",  # error counters: see FLAGS
    "infinite_tokens": "sum",
    "bad_offsets": "sum",
    "bad_advantages": "sum",
}
_INDEX = {name: slot for slot, name in enumerate(SLOTS)}

# error counter -> its meaning
FLAGS: dict[str, str] = {
    "nan_tokens": "a log-ratio, reference log-ratio or window score at a valid token was NaN; the token was left out, "
    "but the gradient of logits that hold NaN, or of a target outside the vocabulary, is NaN all the same",
    "infinite_tokens": "a log-ratio at a valid token was infinite; it was saturated with gradient 0",
    "bad_offsets": "an entry of cu_seqlens or another index was out of range; the row was left out. Where offsets "
    "decrease, rows overlap and the loss means nothing",
    "bad_advantages": "at a valid token an advantage, weight, token weight, target or correction (by rollout_logp) was "
    "not finite, no advantage had the number of its id (with advantage_level= ids count from 0), a success rate "
    "(target) was outside [0, 1), or bounds were no ratios with 0 <= low <= 1 <= high; it was not selected",
}


def slot(name: str) -> int:
    """Index of a slot in the vector."""
    return _INDEX[name]


def empty_metrics(device: torch.device | str) -> torch.Tensor:
    """The neutral element: zeros, +inf for minima, -inf for maxima."""
    start = {"sum": 0.0, "min": math.inf, "max": -math.inf}
    return torch.tensor([start[reduction] for reduction in SLOTS.values()], dtype=torch.float64, device=device)


@dataclass(frozen=True, eq=False, repr=False)
class Observations:
    """A vector with a named slot for each quantity, on the device."""

    SLOTS: ClassVar[dict[str, str]]

    vector: torch.Tensor

    def __repr__(self) -> str:
        """The kind and the device, without the numbers, which would be copied to the host and have no names."""
        return f"{type(self).__name__}(on {self.vector.device}; read it by compute())"

    def __getitem__(self, name: str) -> torch.Tensor:
        """One raw slot as a 0-dim device tensor."""
        known = ", ".join(self.SLOTS)
        check(name in self.SLOTS, "metrics: no slot named {!r}; compute() has means; the slots are {}", name, known)
        return self.vector[list(self.SLOTS).index(name)]

    def __add__(self, other: Self) -> Self:
        if not isinstance(other, type(self)):
            return NotImplemented
        return type(self)(fold(torch.stack((self.vector, other.vector)), self.SLOTS.values()))

    def __radd__(self, other: int) -> Self:
        """``sum`` begins with 0."""
        return self if other == 0 else NotImplemented

    @examines
    def all_reduce(self, group: torch.distributed.ProcessGroup | None = None) -> Self:
        """Combine over the ranks of ``group``: one all-gather and a local fold in rank order, bitwise equal on every
        rank.

        ``loss`` and ``penalty`` are sums with the weights: under ``gradient_reduction="mean"`` they are those of one
        process times the number of ranks.
        """
        return type(self)(fold(gathered(self.vector, group), self.SLOTS.values()))


@dataclass(frozen=True, eq=False, repr=False)
class Metrics(Observations):
    """The observations of one loss call, or the sum of several, still on the device.

    ``vector`` is float64 ``[len(SLOTS)]``. Nothing is copied to the host before :meth:`compute`.

    >>> import torch, hpo_core as hpo
    >>> batch = hpo.PackedBatch.from_lengths([2, 1])
    >>> out = hpo.policy_loss(torch.zeros(3), torch.zeros(3), torch.ones(2), batch)
    >>> out.metrics.compute()["tokens"], sum([out.metrics, out.metrics]).compute()["tokens"]
    (3.0, 6.0)
    """

    SLOTS = SLOTS

    @property
    def flags(self) -> torch.Tensor:
        """Error counters ``[len(FLAGS)]`` in the order of ``FLAGS``: sticky, all 0 when nothing was wrong."""
        return torch.stack([self[name] for name in FLAGS])

    def raise_for_flags(self) -> None:
        """Raise a ``FloatingPointError`` that explains each error counter above 0; a copy to the host.

        Every loss call does this, and refuses log-probabilities above 0.001, if ``HPO_CORE_DEBUG=1`` was set when
        hpo_core was imported.
        """
        raised = [(name, int(count)) for name, count in zip(FLAGS, self.flags.tolist(), strict=True) if count]
        if raised:
            causes = "; ".join(f"{name} = {count}: {FLAGS[name]}" for name, count in raised)
            raise FloatingPointError(f"hpo_core.policy_loss: {causes}")

    def compute(self) -> dict[str, float]:
        """Means, fractions and counts as Python floats: the only copy to the host. Empty denominators give NaN.

        ``selected_fraction`` is the part of the tokens whose policy term counts, ``clip_fraction`` the part of these
        beyond a bound, the sum of the fractions of all sides. Under levels a token below one bound and above another
        counts on both sides. ``kl_reference_k1`` to ``k3`` are means over tokens of ``s``, ``s^2 / 2`` and
        ``e^-s - 1 + s`` with ``s = logp - ref_logp``, and 0 without ``ref_logp``; ``kl_old_k1`` to ``k3`` the same of
        ``-x``, the log-ratio of the old policy; ``penalty`` is the share of the loss that penalties have.
        """
        raw = dict(zip(SLOTS, self.vector.tolist(), strict=True))
        tokens, selected = raw["tokens"], raw["selected"]
        clipped = {side: raw[f"clipped_{side}"] for side in _CLIP_SIDES}
        return {
            "loss": raw["loss"],
            "tokens": tokens,
            "rows": raw["rows"],
            "selected_fraction": ratio(selected, tokens),
            "clip_fraction": ratio(sum(clipped.values()), selected),
            **{f"clip_fraction_{side}": ratio(count, selected) for side, count in clipped.items()},
            **of_log_ratios(
                raw,
                tokens,
                raw["ratio_deviation"] + tokens,
                raw["ratio_deviation_square"] + 2 * raw["ratio_deviation"] + tokens,
                60.0,
                1e-5,  # kernels square r - 1 in float32
            ),
            "kl_reference_k1": ratio(raw["reference_log_ratio"], tokens),
            "kl_reference_k2": ratio(0.5 * raw["reference_log_ratio_square"], tokens),
            "kl_reference_k3": ratio(raw["reference_k3"], tokens),
            "penalty": raw["penalty"],
            "entropy": ratio(raw["entropy"], raw["entropy_tokens"]),
            **{name: raw[name] for name in FLAGS},
        }


_DEBUG = os.environ.get("HPO_CORE_DEBUG") == "1"  # read once: a loss call has no microseconds to spare


def is_debugging() -> bool:
    """Whether a call may read its numbers on the host to look for errors: under ``HPO_CORE_DEBUG=1``, in eager code
    whose tensors have numbers, as fake ones have not."""
    if not _DEBUG or torch.compiler.is_compiling():
        return False
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None


def observed(
    vector: torch.Tensor, group: torch.distributed.ProcessGroup | None, positive: dict[str, torch.Tensor] | None
) -> Metrics:
    """The metrics of one call. ``positive``: in debug mode, where a flag raises an error, how many log-probabilities of
    each argument are above 0, which raise one, too; else None.

    With a group all its ranks raise at once, so that no rank waits for one that has raised. Only this debug mode
    synchronises.
    """
    metrics = Metrics(vector)
    if positive is not None:
        (metrics if group is None else metrics.all_reduce(group)).raise_for_flags()
        if positive:
            _refuse_positive(positive, group)
    return metrics


def _refuse_positive(positive: dict[str, torch.Tensor], group: torch.distributed.ProcessGroup | None) -> None:
    own = torch.stack(tuple(positive.values()))
    counts = (own if group is None else gathered(own, group).sum(0)).tolist()
    refused = {name: count for name, count in zip(positive, counts, strict=True) if count}
    check(
        not refused,
        "{}: expected log-probabilities, which are never above 0, got {} valid tokens above 0; pass the negative of "
        "cross-entropies, the .log() of probabilities, and of (logp, entropy) the first; with log-densities of "
        "continuous actions, which may be above 0, call metrics.raise_for_flags() without HPO_CORE_DEBUG",
        ", ".join(refused),
        ", ".join(map(str, refused.values())),
    )


_CLIP_SIDES = ("high_positive", "low_positive", "low_negative", "high_negative")


def ratio(numerator: float, denominator: float) -> float:
    """The quotient, NaN for a denominator of 0."""
    return numerator / denominator if denominator else math.nan


def of_log_ratios(
    raw: dict[str, float], count: float, ratio_sum: float, ratio_square: float, largest: float, resolved: float = 0.0
) -> dict[str, float]:
    """Statistics of ``count`` log-ratios from their sums and extrema, for tokens and for the segments of a level.
    Extrema of ratios saturate at ``e^largest``. ``resolved``: the least mean square of ratios that has digits."""
    least, most = raw["log_ratio_min"], raw["log_ratio_max"]
    lowest, highest = (math.exp(min(each, largest)) if count else math.nan for each in (least, most))
    # Kantorovich's inequality: ratios that are nearly alike are nearly all effective, however small they are.
    apart = math.exp(least - most) if count else math.nan  # squares of the ratios themselves may be 0
    fewest = 4 * apart / (1 + apart) ** 2
    effective = max(fewest, min(ratio(ratio_sum * ratio_sum, count * ratio_square), 1.0))
    if not count or (ratio_square < resolved * count and fewest < 0.9):
        effective = math.nan
    k2 = 0.5 * raw["log_ratio_square"]
    # e^x - 1 - x = e^y x^2 / 2 for a y between 0 and x. Near 0 these bounds are narrower than the rounding of r - 1.
    bounds = k2 * math.exp(min(least, 0.0)), k2 * math.exp(min(max(most, 0.0), largest))
    k3 = min(max(raw["ratio_deviation"] - raw["log_ratio_sum"], bounds[0]), bounds[1])
    return {
        "ratio_mean": min(max(ratio(ratio_sum, count), lowest), highest),
        "ratio_min": lowest,
        "ratio_max": highest,
        "effective_sample_size": effective,
        "kl_old_k1": ratio(-raw["log_ratio_sum"], count),
        "kl_old_k2": ratio(k2, count),
        "kl_old_k3": ratio(k3, count),
    }


def gathered(slots: torch.Tensor, group: torch.distributed.ProcessGroup | None) -> torch.Tensor:
    """This tensor of every rank ``[R, ...]``, in rank order."""
    check(
        group is not None or (torch.distributed.is_available() and torch.distributed.is_initialized()),
        "group: expected ranks to combine over, but torch.distributed is not initialised; call init_process_group "
        "first, or drop all_reduce in a single process",
    )
    each = [torch.empty_like(slots) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(each, slots, group=group)
    return torch.stack(each)


def fold(rows: torch.Tensor, reductions: Iterable[str]) -> torch.Tensor:
    """Reduce ``[R, ..., slots]`` slot by slot, in row order, so that every rank gets the same bits."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    for index, reduction in enumerate(reductions):
        if reduction != "sum":
            column = rows[..., index]
            total[..., index] = column.amin(0) if reduction == "min" else column.amax(0)
    return total
