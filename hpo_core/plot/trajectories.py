"""The way of log-ratios through a gate."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..arguments import examines
from ..backends import resolve
from ..batch import PackedBatch, as_batch
from ..checks import REFERENCE, check_precise
from ..gates import Channel, RatioGate
from ..prepared import PolicyLossOptions, check_options, prepare
from ..reference.gates import Tokens, gate_tokens, read_tokens
from ..reference.hierarchy import bounds_of_tokens, combined
from ..reference.segments import flat
from ..reference.terms import deviation_of
from ..specs import Head, LevelKind, PolicyLossInputs, PolicyLossSpec, TokenGate, Unit
from .canvas import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SKY, check_labels, check_row, pyplot_for

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from typing_extensions import Unpack


class _Level(NamedTuple):
    """One gate as the tokens of a row see it, ``[n]`` each, in the direction of the log-ratio."""

    name: str
    aggregate: torch.Tensor
    residual: torch.Tensor
    value: torch.Tensor
    low: torch.Tensor  # budgets; infinite where there is none
    high: torch.Tensor
    is_dropped: bool


@examines
def trajectory(
    logp: torch.Tensor,
    old_logp: torch.Tensor | None,
    advantages: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    gate: RatioGate | None = None,
    *,
    row: int = 0,
    labels: Sequence[str] | None = None,
    **options: Unpack[PolicyLossOptions],
) -> Figure:
    """The way of one row's log-ratios through a gate: aggregates, residuals and budgets, before and after gating.

    The first panel has the log-ratios ``x`` of the gate's channel, ``logp - old_logp`` or ``logp - rollout_logp``, and
    the aggregate of each level; then each level, from the coarsest to the tokens, its residual (grey), the gated
    residual (coloured) and its budget (dashed); the last one ``z``, the sum of the gated residuals, beside x. Rising
    and falling log-ratios of a gate with a split are drawn upwards and downwards. Under ``Head.CENSORED``, whose levels
    add up deviations ``|e^x - 1|``, the panels have these instead of x. All is the definition's, in float64. Masked
    tokens are left out. Drawing takes some seconds for a thousand tokens, in proportion to their number: of a long
    answer pass a part, whose aggregates are then those of the part.

    Args:
        logp, old_logp, advantages, batch, gate, options: as in :func:`~hpo_core.policy_loss`; ``report`` and
            ``backend`` change nothing.
        row: of the packed batch (or the padded one). Aggregates are those of whole segments, with all their rows.
        labels: a text for each token of the row, such as the decoded tokens; a ``$`` in it is no formula.

    Returns:
        The Figure, one Axes for each panel.

    Raises:
        ValueError, TypeError: as the loss, and for a row that is not there; ImportError: without matplotlib.

    >>> import hpo_core as hpo
    >>> from hpo_core.gates import Level, LogClip, RatioGate
    >>> gate = RatioGate("budgets", LogClip((-0.2, -0.2), (0.2, 0.2)), (Level(LogClip((-0.1, -0.1), (0.1, 0.1))),))
    >>> logp = torch.tensor([0.3, 0.1, -0.1, 0.5]) - 1
    >>> figure = trajectory(logp, torch.full((4,), -1.0), torch.ones(1), PackedBatch.from_lengths([4]), gate)
    >>> [axes.get_title(loc="left").split(",")[0] for axes in figure.axes]
    ['log-ratios', 'trajectory', 'token', 'gated log-ratio z']
    """
    pyplot = pyplot_for("trajectory")
    check_options(trajectory, options)
    check_precise("logp", logp)
    batch = as_batch(batch)
    check_row(batch, row)
    entering, z, drawn, levels = _through_gates(logp, old_logp, advantages, batch, gate, row, options)
    count = entering.numel()
    words = _words_of(gate, options)
    check_labels(labels, count)
    panels = len(levels) + 2
    size = (min(14.0, 4.5 + 0.16 * count), 0.6 + 1.55 * panels)
    figure, axes = pyplot.subplots(panels, 1, figsize=size, sharex=True, layout="constrained", squeeze=False)
    first, *rest = axes[:, 0]
    at = torch.arange(count)[drawn].tolist()

    def bars(panel: Any, values: torch.Tensor, width: float, colour: str, label: str) -> None:
        panel.bar(at, values[drawn].tolist(), width, color=colour, label=label)

    bars(first, entering, 0.8, GREY, words.entering)
    colours = dict(zip([level.name for level in reversed(levels)], itertools.cycle((BLUE, GREEN, PURPLE, ORANGE))))
    for level in levels[::-1]:
        if not level.name.startswith("token"):
            for begin, end in _runs(level.aggregate.masked_fill(~drawn, math.nan)):
                height = float(level.aggregate[begin])
                label = f"aggregate, {level.name}" if begin == at[0] else None
                first.hlines(height, begin - 0.5, end - 0.5, color=colours[level.name], lw=2.2, label=label)
    first.set_title(words.first, loc="left", fontsize=10)
    for panel, level in zip(rest, levels[::-1], strict=False):
        is_token = level.name.startswith("token")
        bars(panel, level.residual, 0.8 if is_token else 1.0, GREY, "residual")
        bars(panel, level.value, 0.45 if is_token else 1.0, colours[level.name], "gated")
        label = "budget"
        for bound in (level.low, level.high):
            for begin, end in _runs(bound.masked_fill(~drawn | bound.isinf(), math.nan)):
                height = float(bound[begin])
                panel.plot((begin - 0.5, end - 0.5), (height, height), color=RED, lw=1.3, ls="--", label=label)
                label = None
        panel.set_title(f"{level.name}, residual{' (dropped)' * level.is_dropped}", loc="left", fontsize=10)
    bars(rest[-1], entering, 0.8, GREY, words.entering)
    bars(rest[-1], z, 0.45, SKY, "gated z")
    rest[-1].set_title(words.last, loc="left", fontsize=10)
    for panel in (first, *rest):
        panel.axhline(0, color="black", lw=0.6)
        panel.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)
        panel.spines[["top", "right"]].set_visible(False)
    rest[-1].xaxis.get_major_locator().set_params(integer=True)
    if labels is not None:
        rest[-1].set_xticks(range(count), labels, parse_math=False)
    rest[-1].set(xlabel=f"token of row {row}", xlim=(-0.7, count - 0.3))
    figure.supylabel(words.axis, fontsize=10)
    return figure  # type: ignore[no-any-return]


class _Words(NamedTuple):
    """What is drawn, in titles of the first and the last panel, in legends, and at the axis."""

    first: str
    last: str
    entering: str
    axis: str


def _words_of(gate: RatioGate | None, options: PolicyLossOptions) -> _Words:
    # Without rollout_logp the loss has old_logp in its place.
    is_total = gate is not None and gate.channel is Channel.TOTAL and options.get("rollout_logp") is not None
    channel = (Channel.TOTAL if is_total else Channel.STALENESS).value
    if gate is not None and gate.head is Head.CENSORED:
        first = f"deviations |e^x - 1|, x = {channel}"
        return _Words(
            first, "z, the sum of the gated residuals", "deviation |e^x - 1|", "deviation of the ratio from 1"
        )
    last = "gated log-ratio z, the sum of the gated residuals"
    return _Words(f"log-ratios, {channel}", last, "log-ratio x", "log-ratio (nats)")


def _through_gates(
    logp: torch.Tensor,
    old_logp: torch.Tensor | None,
    advantages: torch.Tensor,
    batch: PackedBatch,
    gate: RatioGate | None,
    row: int,
    options: PolicyLossOptions,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[_Level]]:
    """x or what levels aggregate in its place, z, whether each token is valid, and the gates, finest first, of the
    tokens of a row, on the host."""
    logp = logp.detach().double()
    given: dict[str, Any] = {"weights": torch.ones(batch.rows, dtype=logp.dtype, device=logp.device)}
    given |= {name: value for name, value in options.items() if name != "backend"}
    if options.get("backend") is not None:
        resolve("gates", logp, options["backend"])
    inputs, spec, exchange, *_ = prepare(logp, old_logp, advantages, batch, gate, backend=REFERENCE, **given)
    inputs = flat(inputs)
    tokens = read_tokens(inputs, spec)
    channels = gate_tokens(tokens, inputs, spec, exchange)
    begin, end = (int(offset) for offset in batch.cu_seqlens[row : row + 2])

    def of_row(values: torch.Tensor) -> torch.Tensor:
        return values[begin:end].detach().cpu()

    names = ["token", *(Unit(level.unit).name.lower() for level in spec.levels)]
    levels = []
    for k, name in enumerate(names):
        for number, channel in enumerate(channels):
            part = "" if len(channels) == 1 else " (rising)" if channel.sign > 0 else " (falling)"
            aggregate, residual, value = (channel.sign * of_row(each) for each in channel.levels[k][:3])
            low, high = map(of_row, _budgets(k, number, channel.levels[k].size, tokens, inputs, spec))
            if channel.sign < 0:
                low, high = -high, -low
            dropped = k == 0 and spec.token is TokenGate.DROP
            levels.append(_Level(name + part, aggregate, residual, value, low, high, dropped))
    z = combined(channels)[0]
    entering = deviation_of(tokens.x).abs() if spec.head is Head.CENSORED else tokens.x
    return of_row(entering), of_row(z), of_row(tokens.valid), levels


def _budgets(
    k: int, channel: int, count: torch.Tensor | None, tokens: Tokens, inputs: PolicyLossInputs, spec: PolicyLossSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """The bounds of the k-th gate of each token ``[T]``, as the residual has them. ``count``: n of its segment."""
    none = torch.full_like(tokens.x, math.inf)
    if k == 0:
        is_clip = spec.token is TokenGate.CLIP
        return bounds_of_tokens(tokens.negative, tokens.given, inputs, spec) if is_clip else (-none, none)
    level = spec.levels[k - 1]
    low, high = (none.new_tensor(bound)[tokens.negative + 2 * channel] for bound in (level.low, level.high))
    if level.gate is LevelKind.CLIP:
        return low, high
    if level.gate is LevelKind.EXCESS:
        assert count is not None
        return -none, count * high
    return (-high, high) if level.gate in (LevelKind.ROLLBACK, LevelKind.TANH) else (-none, none)


def _runs(values: torch.Tensor) -> Iterator[tuple[int, int]]:
    """The first place and the one behind the last of each run of equal numbers; NaN is in none."""
    begin = 0
    for end in range(1, values.numel() + 1):
        if end == values.numel() or values[end] != values[begin]:
            if not bool(values[begin].isnan()):
                yield begin, end
            begin = end
