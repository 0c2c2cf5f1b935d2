"""Exact order statistics of scopes, and the exact number of their largest values. A scope is a list of segments."""

from __future__ import annotations

import itertools
import math

import torch

from ..specs import OrderRule, Scopes


def order_statistics(
    values: torch.Tensor, scopes: Scopes, numerator: int, denominator: int, rule: OrderRule, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x_(i)`` of the n finite values of each scope in ascending order, ``i = rule(numerator (n - 1) / denominator)``
    in exact integers. A value of -inf is undefined, NaN and +inf are errors.

    Returns the thresholds ``[C]`` (NaN if n = 0) and ``[C, 2]`` int64: n, and the number of errors.
    """
    values = values.detach()
    thresholds = values.new_full((scopes.number,), math.nan)
    counts = torch.zeros((scopes.number, 2), dtype=torch.int64, device=values.device)
    for scope, tokens in enumerate(_tokens_of_scopes(values, scopes, mask)):
        given = values[tokens]
        population = given[torch.isfinite(given)].sort().values
        counts[scope, 0] = population.numel()
        counts[scope, 1] = (given.isnan() | (given == math.inf)).sum()
        if population.numel() > 0:
            index = rule.index(numerator, denominator, population.numel())
            thresholds[scope] = population[index] + 0.0  # + 0.0: -0 becomes +0
    return thresholds, counts


def select_exact(values: torch.Tensor, scopes: Scopes, k: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The ``k[c]`` largest finite values of scope c, or all of them if there are fewer, bool ``[T]``. Of equal values
    the first ones in the order of the list are selected."""
    values = values.detach()
    selected = torch.zeros_like(values, dtype=torch.bool)
    for scope, tokens in enumerate(_tokens_of_scopes(values, scopes, mask)):
        population = tokens[torch.isfinite(values[tokens])]
        order = torch.sort(values[population], descending=True, stable=True).indices
        selected[population[order[: max(0, int(k[scope]))]]] = True
    return selected


def _tokens_of_scopes(values: torch.Tensor, scopes: Scopes, mask: torch.Tensor | None) -> list[torch.Tensor]:
    """The valid tokens of each scope, in the order of its list."""
    offsets, tokens = scopes.offsets.tolist(), values.numel()
    order = list(range(len(offsets) - 1)) if scopes.order is None else scopes.order.tolist()
    begin = list(range(len(offsets))) if scopes.begin is None else scopes.begin.tolist()
    lists = []
    for first, last in itertools.pairwise(begin):
        ranges = [(offsets[segment], offsets[segment + 1]) for segment in order[first:last]]
        positions = [t for low, high in ranges if 0 <= low <= high <= tokens for t in range(low, high)]
        of_scope = torch.tensor(positions, dtype=torch.int64, device=values.device)
        lists.append(of_scope if mask is None else of_scope[mask[of_scope]])
    return lists
