"""Exact order statistics on every backend, and which scores and tokens they select."""

import math
from fractions import Fraction

import hypothesis
import pytest
import torch

import hpo_core as hpo
from hpo_core import ops, testing
from hpo_core.entropy import forking_tokens
from hpo_core.reference.entropy import order_statistic as reference_order_statistic
from hpo_core.reference.entropy import select as reference_select
from hpo_core.specs import OrderRule
from hpo_core.testing import Layout, ScoresExample


def select(backend, example):
    """Threshold and counts of an order statistic."""
    score, numerator, denominator, rule = testing.move(example, testing.device_of(backend))
    threshold, counts = ops.order_statistic(score, numerator, denominator, rule, backend)
    return threshold.cpu(), counts.cpu()


def assert_selects(backend, example):
    threshold, counts = select(backend, example)
    expected, population = reference_order_statistic(*example)
    assert counts.tolist() == population.tolist()
    assert threshold.shape == (1,) and threshold.numpy().tobytes() == expected.numpy().tobytes()  # -0 is given as +0


# ---------------------------------------------------------------------------------------------------- order statistics


@hypothesis.settings(max_examples=150)
@hypothesis.given(example=testing.scores(60))
def test_generated_order_statistics(backend, example):
    assert_selects(backend, example)


@pytest.mark.parametrize("kind", ["distinct", "ties", "equal", "signed", "extreme"])
@pytest.mark.parametrize("count", [0, 1, 2, 33, 1025, 20000])
def test_order_statistics_of_every_size(backend, count, kind):
    for seed in range(8):
        assert_selects(backend, testing.random_scores(seed, count, kind))


@pytest.mark.parametrize("planted", [100.0, -100.0, math.inf, -math.inf, math.nan, 0.5])
def test_sample_that_misleads(backend, planted):
    """One value, at every place that the CPU backend looks at before it decides which scores to keep."""
    count = 20000
    values = torch.rand(count, generator=torch.Generator().manual_seed(0))
    values[[(i * 0x9E3779B9 % 2**32) * count >> 32 for i in range(2048)]] = planted
    for numerator in (0, 10, 19, 20):
        assert_selects(backend, ScoresExample(values, numerator, 20, OrderRule.CEIL))


def test_keeps_every_promise_of_order_statistics(backend):
    def fn(score, numerator, denominator, rule):
        return ops.order_statistic(score.contiguous(), numerator, denominator, rule, backend)

    examples = 60 if backend == "cpu" else 10
    report = testing.check(fn, "order_statistic", examples=examples, device=testing.device_of(backend))
    assert report.promises == testing.promises("order_statistic")


def test_index_is_exact_where_floats_fail(backend):
    """Every k / 10 and k / 20; keeping 0.7 of 11 tokens is where floats first miss."""
    assert math.ceil((1 - 0.7) * 10) == 4 and forking_tokens("0.7").quantile * 10 == 3
    for n in (2, 11, 21, 101):
        ascending = torch.arange(n).float()
        for denominator in (10, 20):
            for numerator in range(denominator + 1):
                q = Fraction(numerator, denominator) * (n - 1)
                for rule, index in (
                    (OrderRule.CEIL, math.ceil(q)),
                    (OrderRule.FLOOR, math.floor(q)),
                    (OrderRule.NEAREST, round(q)),  # Fraction rounds half to even
                ):
                    assert rule.index(numerator, denominator, n) == index
                    if backend == "cpu" or (numerator % 7 == 0 and n in (11, 21)):
                        got, _counts = select(backend, ScoresExample(ascending, numerator, denominator, rule))
                        assert got.item() == index, (numerator, denominator, n, rule)


def test_fractions_that_overflow_64_bits(backend):
    ascending = torch.arange(1000).float()
    for numerator, denominator in ((10**9 - 1, 10**9), (2**60 - 1, 2**60), (1, 2**60)):
        for rule in OrderRule:
            got, _counts = select(backend, ScoresExample(ascending, numerator, denominator, rule))
            assert got.item() == rule.index(numerator, denominator, 1000)


@pytest.mark.parametrize(
    "values, population, broken",
    [
        ([], 0, 0),
        ([-math.inf, -math.inf], 0, 0),
        ([math.nan], 0, 1),
        ([math.inf, 2.0], 1, 0),
        ([2.0], 1, 0),
        ([-0.0, 0.0, -0.0], 3, 0),
        ([3.4028235e38, -3.4028235e38, 1e-45], 3, 0),
    ],
)
def test_special_scores(backend, values, population, broken):
    for rule in OrderRule:
        example = ScoresExample(torch.tensor(values, dtype=torch.float32), 1, 2, rule)
        threshold, counts = select(backend, example)
        assert counts.tolist() == [population, broken] and threshold.isnan().item() == (population == 0)
        assert_selects(backend, example)


# --------------------------------------------------------------------------- tokens by themselves, and what is selected


def assert_selects_tokens(backend, values, batch, numerator=4, rule=OrderRule.CEIL):
    """Threshold, counts and masks of the tokens' own values, without and with ties excluded."""
    device, given = testing.device_of(backend), (batch.mask, batch.cu_seqlens)
    moved, packed = values.to(device), [None if tensor is None else tensor.to(device) for tensor in given]
    expected, population = reference_order_statistic(values, numerator, 5, rule, *given)
    threshold, counts = ops.order_statistic(moved, numerator, 5, rule, backend, *packed)
    assert counts.tolist() == population.tolist()
    assert threshold.cpu().numpy().tobytes() == expected.numpy().tobytes()
    masks = []
    for strict in (False, True):
        mask = ops.select(moved, threshold, strict, backend, *packed).cpu()
        assert mask.dtype == torch.bool and torch.equal(mask, reference_select(values, expected, strict, *given))
        masks.append(mask)
    return masks


@pytest.mark.parametrize("masked", ["none", "some", "row"])
@pytest.mark.parametrize(
    "lengths, tail", [((5, 0, 1, 9, 3), 4), ((), 3), ((0, 0), 0), ((700, 1, 0, 2400, 40), 30)], ids=str
)
def test_tokens_are_their_own_scores(backend, lengths, tail, masked):
    """Values in eighths, so that many are equal to the threshold; from an address that is not aligned, too."""
    for seed in range(2):
        layout = Layout(lengths, tail, masked, seed=seed)
        values = (testing.random_window(layout=layout).values * 8).round() / 8
        for numerator, rule in ((4, OrderRule.CEIL), (0, OrderRule.FLOOR), (5, OrderRule.NEAREST)):
            assert_selects_tokens(backend, values, layout.batch(), numerator, rule)
        assert_selects_tokens(backend, torch.cat((values[:1], values))[1:], layout.batch())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 99.0, -99.0])
def test_garbage_under_the_mask_is_never_read(backend, bad):
    """At masked tokens and behind the last row; at a valid token it is an error, and not selected."""
    layout = Layout((40, 1, 0, 5500), 9, "some", seed=1)
    values, batch = testing.random_window(layout=layout).values, layout.batch()
    valid = batch.mask & (torch.arange(values.numel()) < batch.cu_seqlens[-1])
    clean = assert_selects_tokens(backend, values, batch)
    assert all(map(torch.equal, clean, assert_selects_tokens(backend, torch.where(valid, values, bad), batch)))
    assert not (clean[0] & ~valid).any()
    broken = values.clone()
    broken[valid.nonzero()[[3, 7, 500]]] = bad
    if not math.isfinite(bad):
        assert not any(mask[broken != values].any() for mask in assert_selects_tokens(backend, broken, batch))


@pytest.mark.parametrize(
    "offsets",
    [[0, 5, 2, 4, 6], [0, -3, 2, 6, 6], [-(2**62), 2**62, 3, -1, 2**63 - 1], [6, 5, 4, 3, 2], [2, 2, 4]],
    ids=str,
)
def test_broken_offsets_select_like_the_reference(backend, offsets):
    values = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    for mask in (None, torch.tensor([True, False, True, True, True, True])):
        batch = hpo.PackedBatch(torch.tensor(offsets), mask, total_tokens=6, validate=False)
        assert_selects_tokens(backend, values, batch)


def test_broken_offsets_of_many_tokens(backend):
    """Enough that the CPU backend would take a sample."""
    values = torch.rand(20000, generator=torch.Generator().manual_seed(0))
    batch = hpo.PackedBatch(torch.tensor([0, 300, 200, 9000, 8000, 19000]), total_tokens=20000, validate=False)
    assert_selects_tokens(backend, values, batch)


@pytest.mark.parametrize("masked", ["none", "some"])
def test_many_tokens(backend, masked):
    """Enough for a sample and several threads; rows longer and shorter than what the CPU backend looks at together."""
    layout = Layout((3, 9000, 0, 12000, 1, 2000), 5, masked, seed=3)
    values = testing.random_window(layout=layout).values
    values[[2, 9500, 9501, 15000]] = torch.tensor([math.nan, math.inf, -math.inf, math.inf])
    assert_selects_tokens(backend, values, layout.batch())


@pytest.mark.parametrize("threshold", [0.5, math.nan, -math.inf, math.inf, -0.0])
def test_scores_are_compared_as_they_are(backend, threshold):
    values = torch.tensor([0.5, -math.inf, math.nan, math.inf, 0.0, -0.0, 1.0, 0.25] * 300)[: 8 * 300 - 3]
    device, limit = testing.device_of(backend), torch.tensor([threshold])
    for strict in (False, True):
        mask = ops.select(values.to(device), limit.to(device), strict, backend).cpu()
        assert torch.equal(mask, values > limit if strict else values >= limit)
        assert torch.equal(mask, reference_select(values, limit, strict))


def test_threshold_of_the_wrong_shape_is_refused():
    batch, window = hpo.PackedBatch.from_lengths([3]), forking_tokens()
    state = window.fit(torch.rand(3), batch)
    with pytest.raises(ValueError, match=r"state\.threshold: expected shape \[1\] \(what fit returned\)"):
        window.apply(torch.rand(3), batch, state._replace(threshold=torch.rand(3)))
