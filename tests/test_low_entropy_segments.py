"""LESS' segments and advantages: numbers by hand, against plain loops, and segments across prompts."""

import math
from fractions import Fraction

import torch
from naive_entropy import close, on_random_batches

import hpo_core as hpo
from hpo_core import entropy as E

LOW, HIGH = 0.1, 0.9


def border(numbers, quantile):
    """The order statistic at the rounded ``quantile n``."""
    return sorted(numbers)[min(math.floor(quantile * len(numbers) + Fraction(1, 2)), len(numbers) - 1)]


@on_random_batches
def test_less_tokens(drawn):
    expected = []
    for row in drawn.rows:
        low = {t for t in row if drawn.entropy[t] < border([drawn.entropy[t] for t in row], Fraction(3, 5))}
        expected += [t for t in row if t in low and {t - 1, t + 1} & low]
    got = E.less_tokens(drawn.tensor(drawn.entropy), drawn.batch, quantile="0.6", length=2, backend=drawn.backend)
    assert got.nonzero().flatten().tolist() == expected


@on_random_batches
def test_less(drawn):
    own, right = drawn.normal(len(drawn.rows)), drawn.draw.random(len(drawn.rows)) < 0.5
    ids = drawn.draw.integers(-1, 3, drawn.tokens)
    expected = [0.0] * drawn.tokens
    for row, places in enumerate(drawn.rows):
        same = [other for other in range(len(drawn.rows)) if drawn.group[other] == drawn.group[row] >= 0]
        same = [other for other in same if drawn.rows[other]]
        alike = max(1, sum(right[other] == right[row] for other in same))
        for t in places:
            low = drawn.entropy[t] <= border([drawn.entropy[u] for u in places], Fraction(3, 5))
            factor = 1 / alike if low else 1.0
            having = [other for other in same if ids[t] >= 0 and ids[t] in {ids[u] for u in drawn.rows[other]}]
            if having:
                pure = all(right[other] == right[row] for other in having)
                factor = max(factor, len(having) / alike) if pure else 0.0
            expected[t] = own[row] * factor
    for t in drawn.broken:
        expected[t] = math.nan
    given = (drawn.tensor(each) for each in (own, right, drawn.entropy, ids))
    drawn.agrees(E.less(*given, drawn.batch, quantile="0.6", backend=drawn.backend), expected)


def test_less_by_hand(backend):
    """Four right responses and a wrong one: 7 is a segment of two right ones, 8 of one of these and the wrong one. Both
    of two tokens are at or below the statistic."""
    lengths = [5, 5, 2, 2, 4]
    entropy = torch.tensor(
        [LOW, LOW, LOW, LOW, HIGH, LOW, LOW, LOW, LOW, HIGH, LOW, HIGH, LOW, HIGH, LOW, LOW, HIGH, LOW]
    )
    segments = torch.tensor([7, 7, 8, 8, -1, 7, 7, -1, -1, -1, -1, -1, -1, -1, 8, 8, -1, -1])
    place = hpo.testing.device_of(backend)
    own, right = torch.tensor([1.0, 1.0, 1.0, 1.0, -4.0]), torch.tensor([True, True, True, True, False])
    batch = hpo.PackedBatch.from_lengths(lengths).to(place)
    given = (each.to(place) for each in (own, right, entropy, segments))
    got = E.less(*given, batch, quantile="0.6", backend=backend)
    close(got[:10], [0.5, 0.5, 0, 0, 1, 0.5, 0.5, 0.25, 0.25, 1])
    close(got[10:], [0.25, 0.25, 0.25, 0.25, 0, 0, -4, -4])


def test_a_segment_of_another_prompt_is_another():
    batch = hpo.PackedBatch.from_lengths([2, 2], group_ids=torch.tensor([3, 5]))
    given = torch.tensor([1.0, -1.0]), torch.tensor([True, False]), torch.tensor([LOW, HIGH, LOW, HIGH])
    got = E.less(*given, torch.tensor([0, -1, 0, -1]), batch, quantile="0.5")
    assert got.tolist() == [1, 1, -1, -1]


def test_a_response_that_repeats_a_segment_counts_once():
    batch = hpo.PackedBatch.from_lengths([4, 1])
    given = torch.ones(2), torch.tensor([True, True]), torch.tensor([LOW, LOW, HIGH, LOW, LOW])
    got = E.less(*given, torch.tensor([0, -1, -1, 0, -1]), batch, quantile="0.5")
    assert got.tolist() == [0.5, 0.5, 1, 0.5, 0.5]
