"""Aggregates, exact quantiles and exact top-k of values inside scopes: steps, rows, trajectories, groups, or the call.

No result has a gradient.
"""

from __future__ import annotations

import re
from fractions import Fraction
from numbers import Integral
from typing import NamedTuple

import torch
import torch.distributed

from .. import ops
from ..arguments import check_choice, examines
from ..batch import PackedBatch, alone_without, as_batch, of_row, renumber, row_at
from ..checks import INTEGERS, check, check_device, check_dtype, check_shape, examined, require_type
from ..distributed import whole_groups
from ..specs import OrderRule
from .aggregates import flat_values
from .ranks import common_numbers, quantiles_over_ranks, top_k_over_ranks

_AGGREGATES = ("mean", "sum", "max", "min")
_LEVELS = ("step", "row", "trajectory", "group")
_SCOPES = (*_LEVELS, "call")


@examines
def segment_aggregate(
    values: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    level: str | torch.Tensor,
    *,
    aggregate: str = "mean",
    expand: bool = True,
    backend: str | None = None,
) -> torch.Tensor:
    """The aggregate of ``values`` over the segment of each token: its step, row, trajectory or prompt group.

    Args:
        values: ``[T]`` or the padded ``[B, L]``, floating point (entropies, in nats).
        batch: a PackedBatch, or a padded mask ``[B, L]``.
        level: ``"step"``, ``"row"``, ``"trajectory"``, ``"group"``, or ids ``[T]`` of segments; a negative id means
            none.
        aggregate: ``"mean"``, ``"sum"``, ``"max"`` or ``"min"`` of the valid finite values, in float64 inside.
        expand: one value for each token. ``False``: one for each segment, ``[C]``, numbered as :func:`quantiles`
            numbers scopes (ids: ``C = T``); -inf for a segment without values.

    Returns:
        float32 in the shape of ``values``: -inf where the token is masked or in no segment, whatever its value, else
        NaN where its own value is not finite.

    >>> batch = PackedBatch.from_lengths([2, 1])
    >>> segment_aggregate(torch.tensor([1.0, 3.0, 5.0]), batch, "row")
    tensor([2., 2., 5.])
    """
    batch = as_batch(batch)
    check_choice("aggregate", aggregate, _AGGREGATES)
    flat = flat_values("values", values, batch, backend)
    if isinstance(level, torch.Tensor):
        segment, count = _numbers(_integers("level", level, flat.numel(), "[T] (one per token)", batch), None)
    else:
        check_choice("level", level, _LEVELS, " or ids [T]")
        scoping = _scoping(batch, level, None)
        segment, count = scoping.of_token(flat.numel()), scoping.scopes
    inside = segment >= 0 if batch.mask is None else batch.mask & (segment >= 0)
    number, _, mean, _, least, greatest = ops.group_statistics(flat, segment, None, batch.mask, backend)
    of_segment = {"mean": mean, "sum": mean * number, "max": greatest, "min": least}[aggregate].to(flat.dtype)
    result = torch.where(inside, of_segment, -torch.inf)
    if not expand:
        # All tokens of a segment write the same value; a token without any writes to an extra element.
        slot = torch.where(inside & torch.isfinite(flat), segment, count)
        return flat.new_full((count + 1,), -torch.inf).scatter_(0, slot, result)[:count]
    return torch.where(inside & ~torch.isfinite(flat), torch.nan, result).reshape(values.shape)


@examines
def quantiles(
    values: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    quantile: str | Fraction | float,
    *,
    scope: str | torch.Tensor = "row",
    scopes: int | None = None,
    rule: OrderRule = OrderRule.CEIL,
    expand: bool = False,
    process_group: torch.distributed.ProcessGroup | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """The exact quantile of the valid finite values of each scope.

    Args:
        values: ``[T]`` or the padded ``[B, L]``, floating point: entropies or scores of windows.
        batch: a PackedBatch, or a padded mask ``[B, L]``.
        quantile: q in [0, 1]; a decimal (string or float) means the exact fraction that its digits spell.
        scope: ``"row"``, ``"step"``, ``"trajectory"``, ``"group"``, ``"call"``, or ids ``[S]`` of the rows' scopes,
            such as difficulty buckets; a negative id means none.
        scopes: the number C of scopes that ids name, 0 to C - 1, of which some may be empty; a unit of another id is in
            none. Default: as many as rows.
        rule: ``CEIL``, ``FLOOR`` and ``NEAREST`` are one of the values; ``LINEAR`` interpolates as NumPy does.
        expand: the threshold of each token's scope, in the shape of ``values``; NaN in no scope, except that
            ``"call"`` gives its own to every token.
        process_group: the ranks that share the scopes, with equal ids for equal scopes; the values of all of them
            count. C is then the number of different ids; rows, and steps without ids, stay with their rank.

    Returns:
        The thresholds ``[C]``, NaN for an empty scope: ``[S]`` of rows, ``[N]`` of steps, ``[1]`` of the call. Prompt
        groups, trajectories and ids without ``scopes`` are numbered in the order of their ids; the last of their
        ``[S]`` thresholds belong to no scope.

    >>> batch = PackedBatch.from_lengths([3, 2])
    >>> quantiles(torch.tensor([0.1, 0.9, 0.5, 0.7, 0.3]), batch, "0.5")
    tensor([0.5000, 0.7000])
    """
    batch = as_batch(batch)
    require_type(isinstance(rule, OrderRule), "rule: expected an OrderRule, got {!r}", rule)
    flat = flat_values("values", values, batch, backend)
    q = exact_fraction("quantile", quantile).as_integer_ratio()
    if _stays_with_its_rank(batch, scope):
        process_group = None
    if isinstance(scope, str) and scope == "call" and scopes is None and process_group is None:
        thresholds = _quantile_of_call(flat, batch, q, rule, backend)
        return thresholds.expand(values.shape) if expand else thresholds
    scoping = _scoping(batch, scope, scopes, process_group)
    if process_group is None or scoping.scope_of_segment is None:
        thresholds, _ = ops.order_statistics(
            flat, scoping.segments, scoping.scope_of_segment, scoping.scopes, *q, rule, batch.mask, backend
        )
    else:
        given = _unless_masked(scoping.of_token(flat.numel()), batch)
        thresholds, _ = quantiles_over_ranks(flat, given, scoping.scopes, q, rule, process_group)
    if not expand:
        return thresholds
    return of_row(thresholds, scoping.of_token(flat.numel()), torch.nan).reshape(values.shape)


@examines
def top_k(
    values: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    k: int | torch.Tensor,
    *,
    scope: str | torch.Tensor = "row",
    scopes: int | None = None,
    uid: torch.Tensor | None = None,
    process_group: torch.distributed.ProcessGroup | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """The k largest valid finite values of each scope, or all of them where there are fewer, as a bool mask.

    Of equal values those with the smallest (uid of the row, position in the row) are selected: with uids the selection
    does not depend on the order of the rows. Rows of one uid keep their order.

    Args:
        values, batch, scope, scopes: see :func:`quantiles`.
        k: one number for all scopes, or ``[C]`` integers.
        uid: ``[S]`` integers, one per row, that no two rows of a scope share: a response's, not its prompt's. Default:
            the order of the rows, of one rank after the other.
        process_group: see :func:`quantiles`; every rank passes the same k.

    Returns:
        bool in the shape of ``values``.

    >>> top_k(torch.tensor([0.1, 0.9, 0.5, 0.7, 0.3]), PackedBatch.from_lengths([3, 2]), 1)
    tensor([False,  True, False,  True, False])
    """
    batch = as_batch(batch)
    flat = flat_values("values", values, batch, backend)
    if _stays_with_its_rank(batch, scope):
        process_group = None
    scoping = _scoping(batch, scope, scopes, process_group, by_row=uid is not None)
    wanted = _counts(k, scoping.scopes, batch)
    if uid is not None:
        uid = _integers("uid", uid, batch.rows, "[S] (one per row)", batch)
        uid = uid if scoping.row_of_segment is None else uid[scoping.row_of_segment]
    if process_group is None or scoping.scope_of_segment is None:
        selected = ops.select_exact(flat, scoping.segments, scoping.scope_of_segment, wanted, uid, batch.mask, backend)
    else:
        segment = _unless_masked(scoping.segment_of_token(flat.numel()), batch)
        uid = torch.zeros_like(scoping.scope_of_segment) if uid is None else uid
        selected = top_k_over_ranks(flat, segment, scoping.scope_of_segment, wanted, uid, process_group)
    return selected.reshape(values.shape)


# Times a number of tokens, an int64.
LARGEST_DENOMINATOR = 2**31


def exact_fraction(name: str, value: str | Fraction | float) -> Fraction:
    """The exact rational that a decimal spells: 0.95 is 19/20, not the double next to it."""
    try:
        fraction = value if isinstance(value, Fraction) else Fraction(str(value))
    except (ValueError, ZeroDivisionError):
        expected = "a number, a Fraction or a decimal such as '0.2'"
        raise TypeError(f"{name}: expected {expected} in [0, 1], got {value!r}{_fix(value)}") from None
    # The Dynamo of torch 2.10 compares no number with a Fraction.
    check(0 <= fraction.numerator <= fraction.denominator, "{}: expected a fraction in [0, 1], got {}", name, value)
    short = fraction.denominator <= LARGEST_DENOMINATOR
    check(
        short,
        "{}: expected a short decimal or a Fraction, got {}; write it as a string, such as '1/3', or round the value "
        "of a schedule to six digits",
        name,
        value,
    )
    return fraction


def _fix(value: object) -> str:
    """The fix for a percentage or a decimal comma."""
    percent, comma = re.fullmatch(r"([\d.]+) *%", str(value)), re.fullmatch(r"(\d*),(\d+)", str(value))
    if percent:
        return f"; write {float(percent[1]) / 100:g}"
    return f"; write {comma[1]}.{comma[2]}" if comma else ""


class _Scoping(NamedTuple):
    """Scopes as sets of segments, which are in the order of the tokens."""

    segments: torch.Tensor  # [N + 1] int64, offsets
    scope_of_segment: torch.Tensor | None  # [N] int64; None: each segment is a scope
    scopes: int  # C
    row_of_segment: torch.Tensor | None  # [N] int64; None: the segments are the rows

    def of_token(self, tokens: int) -> torch.Tensor:
        """The scope of each token ``[T]`` int64, -1 for none."""
        segment = self.segment_of_token(tokens)
        if self.scope_of_segment is None:
            return segment
        scope = of_row(self.scope_of_segment, segment, -1)
        return torch.where((scope >= 0) & (scope < self.scopes), scope, -1)

    def segment_of_token(self, tokens: int) -> torch.Tensor:
        """The segment of each token ``[T]`` int64, -1 for none."""
        token = torch.arange(tokens, device=self.segments.device)
        segment = torch.searchsorted(self.segments, token, right=True) - 1
        return torch.where(segment < self.segments.numel() - 1, segment, -1)


def _unless_masked(number: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """The number of each token ``[T]``, -1 for masked ones."""
    return number if batch.mask is None else torch.where(batch.mask, number, -1)


def _stays_with_its_rank(batch: PackedBatch, scope: str | torch.Tensor) -> bool:
    """Whether no scope of this name can have tokens of other ranks: nothing names it."""
    ids = {"row": None, "step": batch.step_ids, "trajectory": batch.trajectory_ids}
    return isinstance(scope, str) and scope in ids and ids[scope] is None


def _scoping(
    batch: PackedBatch,
    scope: str | torch.Tensor,
    scopes: int | None,
    group: torch.distributed.ProcessGroup | None = None,
    by_row: bool = False,
) -> _Scoping:
    """The scopes of this name, or those with these ids of rows. Ranks of a group number the same ids alike. The call
    is one segment, unless its rows have to be told apart."""
    if isinstance(scope, torch.Tensor):
        ids = _integers("scope", scope, batch.rows, "[S] (one per row)", batch)
        check(scopes is None or scopes >= 0, "scopes: expected a count >= 0, got {}", scopes)
        number, count = (ids, scopes) if scopes is not None else _numbers(ids, group)
        return _Scoping(batch.cu_seqlens, number, count, None)
    check_choice("scope", scope, _SCOPES, " or ids [S]")
    check(scopes is None, "scopes: it is the number of scopes that ids name, but scope is {!r}; leave it out", scope)
    if scope == "step":
        return _steps(batch, group)
    if scope == "trajectory" and batch.trajectory_ids is not None:
        return _Scoping(batch.cu_seqlens, *_numbers(batch.trajectory_ids, group, names_may_be_negative=True), None)
    if scope == "group":
        groups = whole_groups(batch, group, spans=False)
        check(groups is not None, "scope: 'group' needs group_ids in the batch")
        assert groups is not None
        return _Scoping(batch.cu_seqlens, *_numbers(groups, group), None)
    if scope == "call":
        segments = batch.cu_seqlens if by_row else ops.segments_of_call(batch.cu_seqlens, batch.total_tokens)
        return _Scoping(segments, torch.zeros_like(segments[1:]), 1, None)
    return _Scoping(batch.cu_seqlens, None, batch.rows, None)


def _steps(batch: PackedBatch, group: torch.distributed.ProcessGroup | None) -> _Scoping:
    """Steps as segments. With gaps every second segment is one, in no scope."""
    check(batch.num_steps is not None, "scope: 'step' needs steps in the batch; pass cu_steps or steps to it")
    steps = count = batch.num_steps or 0
    number = torch.arange(steps, device=batch.device)
    if batch.step_ids is not None:
        own = number
        if group is not None:  # ranges without a name stay with their rank
            own = number * torch.distributed.get_world_size(group) + torch.distributed.get_rank(group)
        number, count = _numbers(alone_without(batch.step_ids, own), group, names_may_be_negative=True)
    if batch.cu_steps is not None:
        segments, scope = batch.cu_steps, None if batch.step_ids is None else number
    elif steps == 0:
        segments, scope = batch.cu_seqlens[:1], number
    else:
        assert batch.steps is not None
        segments = batch.steps.reshape(-1)
        scope = torch.stack((number, torch.full_like(number, -1)), 1).reshape(-1)[:-1].contiguous()
    row = row_at(batch, segments[:-1]).clamp(max=max(batch.rows - 1, 0))
    return _Scoping(segments, scope, count, row)


def _numbers(
    ids: torch.Tensor, group: torch.distributed.ProcessGroup | None, names_may_be_negative: bool = False
) -> tuple[torch.Tensor, int]:
    """Ids as 0, 1, ... in the order of their values, and at least as many as there are; -1 where an id means none."""
    if group is not None:
        return common_numbers(ids, names_may_be_negative, group)
    none = torch.zeros_like(ids, dtype=torch.bool) if names_may_be_negative else ids < 0
    number = renumber(torch.where(none, -1, ids))[0]
    return torch.where(none, -1, number - none.any().to(number.dtype)), ids.numel()


def _counts(k: int | torch.Tensor, scopes: int, batch: PackedBatch) -> torch.Tensor:
    """The number of values to select in each scope, ``[C]`` int64."""
    if isinstance(k, torch.Tensor):
        return _integers("k", k, scopes, "[C] (one per scope)", batch)
    is_count = isinstance(k, Integral) and not isinstance(k, bool)
    require_type(is_count, "k: expected an integer or a tensor [C], got {!r}", k)
    check(k >= 0, "k: expected a count >= 0, got {}", k)
    return torch.full((scopes,), min(int(k), 2**63 - 1), dtype=torch.int64, device=batch.device)


def _integers(name: str, given: torch.Tensor, size: int, meaning: str, batch: PackedBatch) -> torch.Tensor:
    """A checked constant of ids or counts, int64."""
    given = examined(name, given)
    check_dtype(name, given, INTEGERS, "ids and counts are integers; hash them to int64 first")
    check_shape(name, given, (size,), meaning)
    check_device(name, given, batch.device, "the batch")
    return given.to(torch.int64).contiguous()


def _quantile_of_call(
    values: torch.Tensor, batch: PackedBatch, quantile: tuple[int, int], rule: OrderRule, backend: str | None
) -> torch.Tensor:
    """The whole call is one scope, for which all threads and blocks work together."""

    def statistic(rule: OrderRule) -> tuple[torch.Tensor, torch.Tensor]:
        return ops.order_statistic(values, *quantile, rule, batch.mask, batch.cu_seqlens, backend)

    if rule is not OrderRule.LINEAR:
        return statistic(rule)[0]
    low, counts = statistic(OrderRule.FLOOR)
    return ops.interpolated(low, statistic(OrderRule.CEIL)[0], counts[:1], *quantile)
