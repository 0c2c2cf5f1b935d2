"""Exact order statistics of scopes that ranks share: radix selection on histograms that are summed over the ranks.

Integer histograms add up to the same bits in any order, so no result depends on the distribution of the tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed
from torch.distributed import ProcessGroup

from .. import ops
from ..distributed import common_ids, gather, place_of_own
from ..specs import OrderRule


class _OrderStatistics(NamedTuple):
    """The sought value of each scope, each ``[C]`` int64."""

    key: torch.Tensor
    below: torch.Tensor  # values with a smaller key, on all ranks
    equal: torch.Tensor  # values with this key
    population: torch.Tensor
    errors: torch.Tensor


def quantiles_over_ranks(
    values: torch.Tensor,
    scope: torch.Tensor,
    scopes: int,
    quantile: tuple[int, int],
    rule: OrderRule,
    group: ProcessGroup,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Thresholds ``[C]`` float32 and counts ``[C, 2]`` of ``ops.order_statistics``, over the values of all ranks.

    ``scope``: the scope of each value ``[T]``, below 0 for none. An all-reduce for each of the digits, and one more for
    ``LINEAR``.
    """
    index_rule = OrderRule.FLOOR if rule is OrderRule.LINEAR else rule
    lower = _order_statistics(values, scope, scopes, lambda population: _index(population, quantile, index_rule), group)
    counts = torch.stack((lower.population, lower.errors), 1)
    threshold = torch.where(lower.population > 0, _from_order_key(lower.key), torch.nan)
    if rule is not OrderRule.LINEAR:
        return threshold, counts
    # The ceiling is the same value, or the next larger one.
    keys = torch.where(_counts(values, scope), _order_keys(values), 1 << 32)
    of_token = scope.clamp(min=0)
    keys = torch.where(keys > torch.cat((lower.key, keys.new_zeros(1)))[of_token], keys, 1 << 32)
    following = torch.full((scopes + 1,), 1 << 32, device=values.device)
    following = following.scatter_reduce_(0, of_token, keys, "amin")[:scopes].contiguous()
    torch.distributed.all_reduce(following, torch.distributed.ReduceOp.MIN, group=group)
    ceiling = _index(lower.population, quantile, OrderRule.CEIL)
    high = torch.where(ceiling < lower.below + lower.equal, threshold, _from_order_key(following))
    return ops.interpolated(threshold, high, lower.population, *quantile), counts


def top_k_over_ranks(
    values: torch.Tensor,
    segment: torch.Tensor,
    scope_of_segment: torch.Tensor,
    k: torch.Tensor,
    uid: torch.Tensor,
    group: ProcessGroup,
) -> torch.Tensor:
    """The values of this rank ``[T]`` bool among the ``k[c]`` largest of scope c over all ranks; of equal values those
    with the smallest (uid of the segment, rank, position).

    ``segment``: the segment of each value ``[T]``, below 0 for none; ``scope_of_segment``, ``uid``: ``[N]``. An
    all-reduce for each of the digits, and a gathered table with the number of ties in each segment.
    """
    scopes, segments = k.numel(), scope_of_segment.numel()
    known = (scope_of_segment >= 0) & (scope_of_segment < scopes)
    # The last element stands for no segment and no scope.
    scope_of_segment = torch.cat((torch.where(known, scope_of_segment, -1), k.new_full((1,), -1)))
    scope = scope_of_segment[segment]
    boundary = _order_statistics(values, scope, scopes, lambda population: population - _wanted(k, population), group)
    wanted = _wanted(k, boundary.population)
    needed = wanted - (boundary.population - boundary.below - boundary.equal)

    keys, counts = _order_keys(values), _counts(values, scope)
    least = torch.cat((torch.where(wanted > 0, boundary.key, 1 << 32), k.new_full((1,), 1 << 32)))[scope]
    ties = (counts & (keys == least)).to(torch.int64)
    ties_of_segment = k.new_zeros(segments + 1).scatter_add_(0, segment % (segments + 1), ties)[:segments]
    allowed = _allowed(scope_of_segment[:segments], uid, ties_of_segment, needed, group)
    # Values of a segment follow each other.
    before = ties.cumsum(0) - ties
    first = torch.full((segments + 1,), values.numel(), device=k.device)
    first = first.scatter_reduce_(0, segment % (segments + 1), before, "amin")
    rank = before - first[segment]
    return counts & ((keys > least) | ((ties > 0) & (rank < torch.cat((allowed, k.new_zeros(1)))[segment])))


def common_numbers(ids: torch.Tensor, names_may_be_negative: bool, group: ProcessGroup) -> tuple[torch.Tensor, int]:
    """Ids ``[N]`` as 0, 1, ... in the order of their values, the same on every rank, and how many there are. Unless
    negative names are allowed, a negative id means none and becomes -1. Synchronises."""
    ids = ids if names_may_be_negative else ids.clamp(min=-1)
    number = common_ids(ids[:, None], group)
    none = torch.zeros_like(ids, dtype=torch.bool) if names_may_be_negative else ids < 0
    most = torch.stack((torch.cat((number, number.new_full((1,), -1))).max(), none.any().to(torch.int64)))
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX, group=group)
    greatest, some_have_none = most.tolist()
    return torch.where(none, -1, number - some_have_none), greatest + 1 - some_have_none


def _digits(scopes: int) -> list[tuple[int, int]]:
    """Shift and bits of each digit of a key: three of 11 bits, or where the histograms of so many scopes would be large
    four of 8 or eight of 4. An all-reduce then takes 16 KiB, 2 KiB or 128 bytes for each scope."""
    width = 11 if scopes <= 256 else 8 if scopes <= 4096 else 4
    return [(shift, min(width, 32 - shift)) for shift in reversed(range(0, 32, width))]


def _wanted(k: torch.Tensor, population: torch.Tensor) -> torch.Tensor:
    return torch.minimum(k.clamp(min=0), population)


def _allowed(
    scope: torch.Tensor, uid: torch.Tensor, ties: torch.Tensor, needed: torch.Tensor, group: ProcessGroup
) -> torch.Tensor:
    """The number of ties to select in each segment of this rank ``[N]``: scopes give in the order of uids."""
    parts = gather(torch.stack((scope, uid, ties), 1), group)
    scope, uid, ties = torch.cat([part.reshape(-1, 3) for part in parts]).unbind(1)
    order = torch.sort(uid, stable=True).indices
    order = order[torch.sort(scope[order], stable=True).indices]
    sorted_scope, sorted_ties = scope[order].contiguous(), ties[order]
    before = sorted_ties.cumsum(0) - sorted_ties
    before = before - before[torch.searchsorted(sorted_scope, sorted_scope)]  # those of the scope alone
    left = torch.cat((needed, needed.new_zeros(1)))[sorted_scope] - before
    allowed = torch.empty_like(ties)
    allowed[order] = torch.minimum(left.clamp(min=0), sorted_ties)
    return allowed[place_of_own(parts, group)]


def _order_statistics(
    values: torch.Tensor,
    scope: torch.Tensor,
    scopes: int,
    index_of: Callable[[torch.Tensor], torch.Tensor],
    group: ProcessGroup,
) -> _OrderStatistics:
    """The value at the ascending index ``index_of(population)`` of each scope, by histograms ``[C, 2 ** bits]``."""
    keys, counts = _order_keys(values), _counts(values, scope)
    wrong = (scope >= 0) & (values.isnan() | (values == torch.inf))
    of_token = scope.clamp(min=0)
    prefix = below = index = population = errors = equal = torch.zeros(scopes, dtype=torch.int64, device=values.device)
    digits = _digits(scopes)
    for shift, bits in digits:
        is_first = shift == digits[0][0]
        bins = (1 << bits) + 1  # the last one takes the other tokens, because boolean indexing would synchronise
        matches = counts & ((keys >> (shift + bits)) == torch.cat((prefix, prefix.new_zeros(1)))[of_token])
        digit = torch.where(matches, (keys >> shift) & ((1 << bits) - 1), 1 << bits)
        histogram = torch.zeros((scopes + 1) * bins, dtype=torch.int64, device=values.device)
        histogram.scatter_add_(0, of_token * bins + digit, (matches | wrong).to(torch.int64))
        # The first digit also counts the errors.
        histogram = histogram.reshape(scopes + 1, bins)[:scopes, : bins if is_first else bins - 1].contiguous()
        torch.distributed.all_reduce(histogram, group=group)
        if is_first:
            histogram, errors = histogram[:, :-1], histogram[:, -1]
        cumulative = histogram.cumsum(1)
        if is_first:
            population = cumulative[:, -1]
            index = index_of(population)
        bin_ = torch.searchsorted(cumulative, (index - below)[:, None], right=True).clamp(max=(1 << bits) - 1)
        equal = histogram.gather(1, bin_)[:, 0]
        below = below + cumulative.gather(1, bin_)[:, 0] - equal
        prefix = (prefix << bits) | bin_[:, 0]
    return _OrderStatistics(prefix, below, equal, population, errors)


def _counts(values: torch.Tensor, scope: torch.Tensor) -> torch.Tensor:
    return (scope >= 0) & torch.isfinite(values)


def _index(population: torch.Tensor, quantile: tuple[int, int], rule: OrderRule) -> torch.Tensor:
    """OrderRule.index in tensor arithmetic, without reading the population on the host."""
    numerator, denominator = quantile
    product = numerator * (population - 1).clamp(min=0)
    floor = torch.div(product, denominator, rounding_mode="floor")
    remainder = product - floor * denominator
    if rule is OrderRule.FLOOR:
        return floor
    if rule is OrderRule.CEIL:
        return floor + (remainder > 0)
    twice = 2 * remainder
    return floor + ((twice > denominator) | ((twice == denominator) & (floor % 2 == 1)))


def _order_keys(values: torch.Tensor) -> torch.Tensor:
    """Unsigned 32-bit keys, as int64, in the order of the floats; -0 and +0 are one key."""
    bits = (values.float() + 0.0).contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    return torch.where(bits >= 1 << 31, 0xFFFFFFFF - bits, bits + (1 << 31))


def _from_order_key(keys: torch.Tensor) -> torch.Tensor:
    bits = torch.where(keys >= 1 << 31, keys - (1 << 31), 0xFFFFFFFF - keys)
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)
