"""Tokens by exact order statistics of their own response or of the whole call: two classes, masks, and exact counts.

A response is never cut by micro-batches, so statistics of one response need no ``fit``. A valid token whose entropy is
not finite is in no population and in no mask.
"""

from __future__ import annotations

from fractions import Fraction

import torch
import torch.distributed

from ..arguments import check_compat, check_finite, check_limit, check_pair, examines
from ..batch import PackedBatch, as_batch, row_counts, spread_rows
from ..checks import check, check_rows
from ..distributed import spanning, whole_groups
from ..segments import statistics
from ..specs import OrderRule, Provenance
from .scopes import LARGEST_DENOMINATOR, exact_fraction, quantiles, segment_aggregate, top_k
from .selection import Selection
from .signals import Signal, advantages_of_tokens, preset, read


@preset(Provenance.VERIFIED)
def archer(
    entropy: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    *,
    quantile: str | Fraction | float = "0.8",
    eps_knowledge: float = 0.2,
    eps_reasoning: float = 0.5,
    kl_reasoning: float = 0.0,
    compat: str = "paper",
    backend: str | None = None,
) -> Selection:
    """Archer's two classes: tokens at or above the ``quantile`` of their response's entropies reason, with wide bounds
    and no penalty; the others hold knowledge (arXiv 2507.15778). Returns a :class:`Selection` with bounds and a factor
    on the penalty, for :func:`hpo_core.gates.archer_clip` and ``kl=hpo_core.kl.k3(0.001)``.

    Args:
        entropy: ``[T]`` in nats, of the current policy.
        eps_knowledge, eps_reasoning: 0.2 and 0.5; Archer2.0 takes 0.4 for the latter. inf: no bounds.
        kl_reasoning: the factor on the penalty of tokens that reason, 0; that of the others is 1.
        compat: "code": *above* the quantile, so that a token equal to it, as in a response of one token, is knowledge.

    Traps: per response, because with a batch's threshold few tokens of confident responses would reason. The code
    averages the penalty of each class over its own tokens.

    >>> entropy = torch.tensor([0.05, 0.1, 1.2, 0.9, 0.8])
    >>> archer(entropy, PackedBatch.from_lengths([5])).bounds[1]
    tensor([1.2000, 1.2000, 1.5000, 1.2000, 1.2000])
    """
    batch = as_batch(batch)
    for name, epsilon in (("eps_knowledge", eps_knowledge), ("eps_reasoning", eps_reasoning)):
        check(epsilon >= 0, "{}: expected an epsilon >= 0, got {}", name, epsilon)
        check_limit(name, epsilon)
    check_finite(kl_reasoning=kl_reasoning)
    signal = read(batch, entropy=entropy)
    reasons = _above(entropy, batch, quantile, check_compat(compat), backend)
    width = torch.full_like(signal.values, eps_knowledge).masked_fill(reasons, eps_reasoning)
    bounds = (signal.result((1 - width).clamp(min=0), 1.0), signal.result(1 + width, 1.0))
    factor = torch.ones_like(signal.values).masked_fill(reasons, kl_reasoning)
    return Selection(bounds=bounds, kl_weight=signal.result(factor, 1.0))


@preset(Provenance.VERIFIED)
def siren_tokens(
    entropy: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    *,
    quantile: str | Fraction | float = "0.8",
    backend: str | None = None,
) -> torch.Tensor:
    """SIREN's peak tokens: entropies above the ``quantile`` of their response, ``[T]`` bool (arXiv 2509.25133), for
    :func:`siren`.

    Args:
        entropy: ``[T]`` in nats, in the paper over the nucleus of 0.8: ``hpo_core.support_floor`` has the floor that
            ``token_statistics`` takes.

    Traps: the code does not mask padding.

    >>> siren_tokens(torch.tensor([0.1, 0.9, 0.5]), PackedBatch.from_lengths([3]))
    tensor([False,  True, False])
    """
    batch = as_batch(batch)
    return _above(entropy, batch, quantile, True, backend)


def _above(
    entropy: torch.Tensor, batch: PackedBatch, quantile: str | Fraction | float, strict: bool, backend: str | None
) -> torch.Tensor:
    """Tokens at or above (``strict``: above) the quantile of their row, ``[T]`` bool: one order statistic each."""
    signal = read(batch, entropy=entropy)
    rule = OrderRule.FLOOR if strict else OrderRule.CEIL
    values = torch.where(signal.usable, entropy.detach(), torch.nan)
    threshold = quantiles(values, batch, quantile, scope="row", rule=rule, expand=True, backend=backend)
    values = values.to(threshold.dtype)  # one of them in its precision
    return (values > threshold) if strict else (values >= threshold)


def of_sorted_rows(given: Signal, batch: PackedBatch, index: torch.Tensor, backend: str | None) -> torch.Tensor:
    """The ascending 0-based order statistic ``index`` ``[S]`` of each row, ``[S]``; inf where there is none."""
    kept = row_counts(batch, given.usable) - index  # it is the least of so many of the largest
    values = torch.where(given.usable, given.values, torch.nan).to(given.dtype)
    largest = torch.where(top_k(values, batch, kept, backend=backend), values, torch.nan)
    least = segment_aggregate(largest, batch, "row", aggregate="min", expand=False, backend=backend)
    return torch.where(kept > 0, least, torch.inf)


@preset(Provenance.PAPER)
def hicra_tokens(
    entropy: torch.Tensor,
    advantages: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    *,
    share: str | Fraction | float = "0.3",
    process_group: torch.distributed.ProcessGroup | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """HICRA's planning tokens as a port of the authors' code has them: entropies above the order statistic
    ``floor((1 - share) L)`` of their response, where its advantage is positive and it is longer than its group's mean.
    ``[T]`` bool, for :func:`hpo_core.advantages.hicra` (arXiv 2509.03646).

    Args:
        entropy: ``[T]`` in nats.
        advantages: ``[S]``.
        share: 0.3.
        process_group: groups span these ranks, and the call synchronises.

    The paper itself takes the tokens of strategic phrases, found by their text: pass those as ``is_planning``.

    >>> entropy = torch.tensor([0.1, 0.9, 0.5, 0.7, 0.2])
    >>> hicra_tokens(entropy, torch.tensor([1.0, 1.0]), PackedBatch.from_lengths([4, 1]))
    tensor([False,  True, False, False, False])
    """
    batch = as_batch(batch)
    check_rows(batch, advantages=advantages)
    below = 1 - exact_fraction("share", share)
    signal = read(batch, entropy=entropy)
    length = row_counts(batch, signal.usable)
    border = of_sorted_rows(
        signal, batch, torch.div(length * below.numerator, below.denominator, rounding_mode="floor"), backend
    )
    above = signal.usable & (signal.values.to(border.dtype) > spread_rows(border, batch, torch.inf))
    groups = whole_groups(batch, process_group)
    group = spanning(process_group, statistics, length.float(), groups, mask=length > 0, backend=backend)
    # In integers: a mean that is rounded would decide about a row of exactly that length. No group: no mean.
    is_long = length * group.members > (group.mean * group.members).round()
    is_long = is_long | (group.members == 0)
    return above & spread_rows((advantages > 0) & is_long, batch, False)


@preset(Provenance.PAPER)
def d3s_tokens(
    entropy: torch.Tensor,
    advantages: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    *,
    share: str | Fraction | float = "0.2",
    rows_mask: torch.Tensor | None = None,
    uid: torch.Tensor | None = None,
    keeps_zeros: bool = False,
    advantage_level: str | None = None,
    process_group: torch.distributed.ProcessGroup | None = None,
    backend: str | None = None,
) -> Selection:
    """D3S' tokens: exactly ``ceil(share n)`` of the call's n tokens, those of the largest ``|A| H`` (arXiv 2509.22115).
    Returns a :class:`Selection` with a mask.

    Args:
        entropy: ``[T]`` in nats, over the whole vocabulary.
        share: the paper says "under 20 %"; :func:`d3s_schedule` moves it.
        rows_mask: ``[S]`` bool, the responses that :func:`hpo_core.advantages.d3s_samples` kept; the tokens of others
            are neither counted nor selected.
        uid: ``[S]`` integers by which ties are decided, whatever the order of rows; see :func:`top_k`. Default: the
            order of rows.
        keeps_zeros: False: a token with ``A = 0`` or ``H = 0`` is never selected, so that a batch without advantages
            selects nothing.
        process_group: the tokens of these ranks are compared with one another.

    Assumed: the tokens of the whole optimiser step are compared, so the call has to have them all. The denominator is
    not stated: ``token_mean(batch, selected=selection.mask)`` counts the selected, the default all tokens.

    >>> entropy, advantages = torch.tensor([0.5, 1.0, 2.0]), torch.tensor([1.0, 0.1])
    >>> d3s_tokens(entropy, advantages, PackedBatch.from_lengths([2, 1]), share="0.5").mask
    tensor([ True,  True, False])
    """
    batch = as_batch(batch)
    share = exact_fraction("share", share)
    signal = read(batch, entropy=entropy)
    kept = signal.usable
    if rows_mask is not None:
        check_rows(batch, rows_mask=rows_mask)
        kept = kept & spread_rows(rows_mask, batch, False)
    score = advantages_of_tokens(advantages, batch, advantage_level).abs() * signal.values
    score = torch.where(kept, score, torch.nan).to(signal.dtype)
    count = torch.isfinite(score).sum()
    if process_group is not None:
        torch.distributed.all_reduce(count, group=process_group)
    k = torch.div(count * share.numerator + share.denominator - 1, share.denominator, rounding_mode="floor")
    mask = top_k(score, batch, k.reshape(1), scope="call", uid=uid, process_group=process_group, backend=backend)
    return signal.selected(mask if keeps_zeros else mask & (score > 0))


@examines
def d3s_schedule(
    progress: float, first: tuple[int, Fraction | str], last: tuple[int, Fraction | str]
) -> tuple[int, Fraction]:
    """Responses per prompt and the share of tokens at a point of the training: linear from ``first`` to ``last`` (arXiv
    2509.22115), the share to the nearest fraction that :func:`d3s_tokens` takes. The paper goes from few to many and
    gives no numbers.

    Args:
        progress: in [0, 1].
        first, last: each a count of responses and a share of tokens.

    >>> d3s_schedule(0.25, (4, "0.1"), (8, "0.5"))
    (5, Fraction(1, 5))
    """
    check(0 <= progress <= 1, "progress: expected a number in [0, 1], got {}", progress)
    check_pair("first", first, "(responses, share)")
    check_pair("last", last, "(responses, share)")
    p = Fraction(str(progress))
    shares = [exact_fraction(name, share) for name, (_, share) in (("first", first), ("last", last))]
    share = ((1 - p) * shares[0] + p * shares[1]).limit_denominator(LARGEST_DENOMINATOR)
    return round((1 - p) * first[0] + p * last[0]), share
