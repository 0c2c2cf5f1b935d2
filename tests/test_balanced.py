"""BAPO's bounds: those of the search in its authors' code, on one process and, as M2PO's, over ranks."""

import functools
import math

import pytest
import torch
import torch.distributed

import hpo_core as hpo
from hpo_core import gates

FIVE, TOKENS, ONE = hpo.PackedBatch.from_lengths([5]), torch.tensor([0.1, 0.2, 0.4, 0.8, 1.6]), torch.ones(1)
same_policies = functools.partial(gates.bapo_bounds, TOKENS, TOKENS, ONE, FIVE)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"target": -1}, "target: expected a ratio >= 0, got -1"),
        ({"low": (0.8, 0.6)}, r"low: expected two ascending ratios in \[0, 1\], got \(0.8, 0.6\)"),
        ({"high": (0.2, 1.0)}, r"high: expected two ascending ratios >= 1, got \(0.2, 1.0\)"),
        ({"step": 0}, "step: expected a number > 0, got 0"),
        ({"step": 1e-17}, "step: expected at most 10,000 steps from 1.2"),
    ],
)
def test_wrong_numbers_are_named(given, message):
    with pytest.raises(ValueError, match=message):
        same_policies(**given)


def search(x, advantages, target, low, high, step):
    """The search of the authors' code, which looks at the whole batch after each step of a bound."""

    def share(lower, upper):
        tokens = [(math.exp(difference), a) for difference, a in zip(x, advantages, strict=True)]
        contributions = [(min(ratio, upper) if a >= 0 else max(ratio, lower)) * a for ratio, a in tokens]
        negative = -sum(each for each in contributions if each < 0)
        return sum(each for each in contributions if each > 0) / (negative + 1e-8) if negative > 0 else math.inf

    (lower, low_end), (upper, high_end) = low, high
    while share(lower, upper) < target and lower < low_end:
        lower = min(lower + step, low_end)
    while share(lower, upper) < target and upper < high_end:
        upper = min(upper + step, high_end)
    return lower, upper


NUMBERS = {"target": 1.0, "low": (0.6, 0.8), "high": (1.2, 2.0), "step": 0.05}


def case(shift):
    generator = torch.Generator().manual_seed(0)
    x, advantages = torch.randn(2, 40, generator=generator)
    return 0.6 * x, advantages + shift, torch.rand(40, generator=generator) < 0.8


@pytest.mark.parametrize("number", [{}, {"target": 0.5}, {"low": (0.6, 0.9), "high": (1.2, 3.0)}, {"step": 0.3}])
def test_bounds_are_those_of_a_search(number):
    given, seen = {**NUMBERS, **number}, set()
    for shift in (-1.0, -0.6, -0.3, -0.25, 0.0, 0.5):
        x, advantages, mask = case(shift)
        batch = hpo.PackedBatch(torch.tensor([0, 10, 40]), mask)
        garbage = torch.where(mask, x, torch.nan)
        bounds = gates.bapo_bounds(
            garbage, torch.zeros(40), advantages, batch, advantage_level="token", **number
        ).bounds
        expected = search(x[mask].tolist(), advantages[mask].tolist(), **given)
        for found, one in zip(bounds, expected, strict=True):
            assert found.dtype == torch.float32 and found.tolist() == pytest.approx([one] * 40, rel=1e-6)
        seen.add(expected[1])
    assert len(seen) >= 3, "the upper bound stays, rises to a step and rises to the end"


def test_bounds_without_one_of_the_signs():
    """Nothing to balance leaves the bounds; nothing positive lets both go to their ends."""
    low, high = (each.tolist() for each in same_policies().bounds)
    assert low == pytest.approx([0.6] * 5) and high == pytest.approx([1.2] * 5)
    low, high = (each.tolist() for each in gates.bapo_bounds(TOKENS, TOKENS, -ONE, FIVE).bounds)
    assert low == pytest.approx([0.8] * 5) and high == pytest.approx([2.0] * 5)
    unknown = torch.tensor([math.nan, -1.0])
    bounds = gates.bapo_bounds(
        *torch.zeros(2, 2), unknown.new_tensor([1, math.nan]), hpo.PackedBatch.from_lengths([1, 1])
    )
    assert bounds.bounds[0].tolist() == pytest.approx([0.6] * 2)
    assert gates.bapo_bounds(*torch.zeros(3, 0), hpo.PackedBatch.from_lengths([])).bounds[0].numel() == 0


@pytest.mark.parametrize(
    ("ratios", "advantages", "expected"),
    [
        ([1.5, 0.5], [1.0, -1.8], (0.6, 1.2)),  # balanced as long as the lower bound does not rise
        ([math.exp(30), 1.0], [-1.0, 1e9], (0.6, 1.2)),  # log-ratios end at 20, as in verl
        ([1.0, 1.0], [math.inf, -1.0], (0.8, 2.0)),
        ([math.nan, 1.0, 1.0], [-1.0, 2.0, -1.0], (0.6, 1.2)),
    ],
)
def test_bounds_by_hand(ratios, advantages, expected):
    logp, batch = torch.tensor(ratios).log(), hpo.PackedBatch.from_lengths([1] * len(ratios))
    bounds = gates.bapo_bounds(logp, torch.zeros_like(logp), torch.tensor(advantages), batch).bounds
    assert [each[0].item() for each in bounds] == pytest.approx(expected)


def of_rank(rank):
    x, advantages, mask = case(-0.25)
    rows = slice(10 * rank, 10 * rank + 10) if rank < 2 else slice(20, 40)
    batch = hpo.PackedBatch(torch.tensor([0, len(x[rows])]), mask[rows])
    policies, group = (x[rows], torch.zeros_like(x[rows])), torch.distributed.group.WORLD
    spanning = {"advantage_level": "token", "process_group": group}
    return (
        gates.bapo_bounds(*policies, advantages[rows], batch, **spanning).bounds,
        gates.m2po_bounds(*policies, advantages[rows], batch, **spanning).bounds,
        gates.m2po_mask(*policies, batch, process_group=group).token_mask,
    )


def test_over_ranks(three_ranks):
    x, advantages, mask = case(-0.25)
    expected = search(x[mask].tolist(), advantages[mask].tolist(), **NUMBERS)
    assert 1.2 < expected[1] < 2.0
    whole, old = hpo.PackedBatch(torch.tensor([0, 40]), mask), torch.zeros_like(x)
    bounds = gates.m2po_bounds(x, old, advantages, whole, advantage_level="token").bounds
    kept = gates.m2po_mask(x, old, whole).token_mask
    balanced, moments, masks = zip(*three_ranks(of_rank), strict=True)
    for of_bapo, of_m2po in zip(balanced, moments, strict=True):
        assert [each.unique().item() for each in of_bapo] == pytest.approx(expected, rel=1e-6)
        assert [each.unique() for each in of_m2po] == [each.unique() for each in bounds]
    assert torch.equal(torch.cat(masks), kept) and 0 < kept.sum() < mask.sum()
