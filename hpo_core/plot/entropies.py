"""Entropies of a row, windows, thresholds and the selected tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..arguments import examines
from ..batch import PackedBatch, as_batch
from ..checks import require_type
from ..entropy import EntropyWindow, Window, WindowState, cover
from .canvas import BLUE, GREEN, GREY, ORANGE, RED, axes_of, check_labels, check_row, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@examines
def entropy_window(
    entropy: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    window: EntropyWindow,
    state: WindowState | None = None,
    *,
    row: int = 0,
    labels: Sequence[str] | None = None,
    axes: Axes | None = None,
) -> Axes:
    """The entropies of one row, the window means that are compared, the threshold, and the selected tokens.

    Bars are entropies, blue where the token is selected. For a window of several tokens each dot is the mean of the
    window that begins (or lies) at its token, filled where it is selected, and the tokens of selected windows are
    shaded.

    Args:
        entropy: ``[T]`` (or ``[B, L]``) in nats.
        batch: a PackedBatch, or a padded mask ``[B, L]``.
        window: an EntropyWindow: ``forking_tokens``, ``ares`` or your own.
        state: the state that ``window.fit`` returned for the optimiser step. Default: fitted on these entropies.
        row: of the packed (or padded) batch.
        labels: a text for each token of the row, such as the decoded tokens; a ``$`` in it is no formula.
        axes: to draw on. Default: new ones.

    Returns:
        The Axes.

    Raises:
        ValueError, TypeError: naming the argument; ImportError: without matplotlib.

    >>> import hpo_core as hpo
    >>> entropy, batch = torch.tensor([0.1, 0.9, 0.2, 0.0, 0.3]), PackedBatch.from_lengths([5])
    >>> axes = entropy_window(entropy, batch, hpo.entropy.forking_tokens("0.4"))
    >>> [round(float(bar.get_height()), 1) for bar in axes.patches if bar.get_facecolor()[0] < 0.1]
    [0.9, 0.3]
    """
    require_type(isinstance(window, EntropyWindow), "window: expected one of hpo_core.entropy, got {!r}", window)
    entropy, batch = entropy.detach(), as_batch(batch)
    check_row(batch, row)
    state = window.fit_score(window.score(entropy, batch)) if state is None else state
    chosen = window.apply(entropy, batch, state)
    inside = cover(chosen.reshape(-1), batch, Window(window.first, window.last))
    begin, end = (int(offset) for offset in batch.cu_seqlens[row : row + 2])
    drawn_tensors = (entropy, window.score(entropy, batch), chosen, inside)
    values, score, selected, shaded = (each.reshape(-1)[begin:end].cpu() for each in drawn_tensors)
    valid = torch.ones_like(selected) if batch.mask is None else batch.mask.reshape(-1)[begin:end].cpu()
    count = end - begin
    check_labels(labels, count)
    ax = axes_of("entropy_window", axes, (min(14.0, 4.5 + 0.16 * count), 3.4))
    several = window.first != window.last
    if several:
        label: str | None = "in a selected window"
        for at in shaded.nonzero().flatten().tolist():
            ax.axvspan(at - 0.5, at + 0.5, color=ORANGE, alpha=0.25, lw=0, label=label)
            label = None
    for is_selected, colour in ((True, BLUE), (False, GREY)):
        at = (valid & ((selected if not several else torch.zeros_like(selected)) == is_selected)).nonzero().flatten()
        if len(at):
            label = "entropy" if several else f"entropy, {'selected' if is_selected else 'not selected'}"
            ax.bar(at.tolist(), values[at].tolist(), 0.8, color=colour, label=label)
    if several:
        for is_selected, face in ((True, GREEN), (False, "white")):
            at = (torch.isfinite(score) & (selected == is_selected)).nonzero().flatten()
            label = f"window mean, {'selected' if is_selected else 'not selected'}"
            ax.plot(at.tolist(), score[at].tolist(), "o", color=GREEN, markerfacecolor=face, label=label)
    ax.axhline(float(state.threshold), color=RED, lw=1.5, ls="--", label=f"threshold {float(state.threshold):.3g}")
    ax.set(xlabel=f"token of row {row}", ylabel="entropy (nats)")
    title(ax, window.name)
    ax.xaxis.get_major_locator().set_params(integer=True)
    if labels is not None:
        ax.set_xticks(range(count), labels, parse_math=False)
    ax.set_xlim(-0.7, count - 0.3)
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)
    ax.spines[["top", "right"]].set_visible(False)
    return ax  # type: ignore[no-any-return]
