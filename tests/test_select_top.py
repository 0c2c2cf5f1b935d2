"""Threshold and mask in one call have the bits of an order statistic and a selection one after the other.

The CPU backend makes both in one pass if a sample's bracket holds few scores; tests reach every exit from that pass, on
every backend.
"""

import itertools
import math
from fractions import Fraction

import hypothesis
import pytest
import torch
from breadth import at_length, at_most, few  # noqa: F401 (the first is a fixture)

import hpo_core as hpo
from hpo_core import ops, testing
from hpo_core.entropy import EntropyWindow, ares, forking_tokens
from hpo_core.reference import entropy as reference
from hpo_core.specs import INDEX_RULES, OrderRule
from hpo_core.testing import Layout

QUANTILES = ((4, 5), (0, 5), (5, 5), (1, 2), (19, 20))


def assert_selects_top(backend, values, batch=None, quantile=(4, 5), rule=OrderRule.CEIL):
    """Checks masks with and without ties of the threshold; returns the one with ties."""
    device = testing.device_of(backend)
    packed = (None, None) if batch is None else (batch.mask, batch.cu_seqlens)
    moved = [None if tensor is None else tensor.to(device) for tensor in (values, *packed)]
    threshold, counts = ops.order_statistic(moved[0], *quantile, rule, *moved[1:], backend)
    if values.numel() <= 5_000 or batch is None:  # the reference loops over tokens
        expected = reference.order_statistic(values, *quantile, rule, *packed)
        assert threshold.shape == (1,) and same(threshold, expected[0]) and same(counts, expected[1])
    masks = []
    for strict, threads in itertools.product((True, False), (1, 2) if backend == "cpu" else (1,)):
        torch.set_num_threads(threads)
        out = ops.select_top(moved[0], *quantile, rule, strict, *moved[1:], backend)
        assert same(out[0], threshold) and same(out[1], counts)
        assert out[2].dtype == torch.bool and out[2].shape == values.shape
        assert same(out[2], ops.select(moved[0], threshold, strict, *moved[1:], backend))
        masks.append(out[2].cpu())
    if batch is None:
        assert same(masks[-1], values >= threshold.cpu()) and same(masks[0], values > threshold.cpu())
    return masks[-1]


def same(a, b):
    return a.cpu().numpy().tobytes() == b.cpu().numpy().tobytes()


def uniform(count):
    return torch.rand(count, generator=torch.Generator().manual_seed(0))


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 5000, 300_000])
def test_every_size(backend, count):
    n = at_most(backend, count)
    for quantile in few(backend, QUANTILES):
        for values, rule in zip((uniform(n), uniform(n) - 0.8, uniform(n).log()), INDEX_RULES, strict=True):
            assert_selects_top(backend, values, None, quantile, rule)


@hypothesis.settings(max_examples=150)
@hypothesis.given(example=testing.scores(60))
def test_generated_scores(backend, example):
    score, numerator, denominator, rule = example
    assert_selects_top(backend, score, None, (numerator, denominator), rule)


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("value", [0.25, 0.0, -0.0, -3.0, math.inf, -math.inf, math.nan])
def test_all_equal(backend, value):
    """The bracket holds more keys than there is room for, or none."""
    for count in sorted({17, at_most(backend, 20_000), at_most(backend, 300_000)}):
        mask = assert_selects_top(backend, torch.full((count,), value))
        assert mask.all() if math.isfinite(value) else not mask.any()


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("levels", [2, 5, 9, 200])
def test_ties(backend, levels):
    count = at_most(backend, 300_000)
    for quantile in few(backend, QUANTILES):
        assert_selects_top(backend, (uniform(count) * levels).floor() - 1, None, quantile)


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("planted", [100.0, -100.0, math.inf, -math.inf, math.nan, 0.5])
def test_bracket_that_misses(backend, planted):
    """Every score in the sample of the CPU backend is the same value."""
    for count in sorted({at_most(backend, 20_000), at_most(backend, 300_000)}):
        values = uniform(count)
        values[[(i * 0x9E3779B9 % 2**32) * count >> 32 for i in range(2048)]] = planted
        for quantile in few(backend, QUANTILES):
            assert_selects_top(backend, values, None, quantile)


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("planted", [2.0, -1.0])
def test_bracket_that_misses_by_one(backend, planted):
    """The threshold is the nearest score to those of the sample, which are all one value."""
    for count in sorted({at_most(backend, 20_000), at_most(backend, 300_000)}):
        values = uniform(count)
        places = {(i * 0x9E3779B9 % 2**32) * count >> 32 for i in range(2048)}
        values[list(places)] = planted
        index = len(places) if planted < 0 else count - len(places) - 1
        assert_selects_top(backend, values, None, (index, count - 1))


@pytest.mark.usefixtures("at_length")
def test_sorted_scores(backend):
    """All keys in the bracket are in one worker's part."""
    values = uniform(at_most(backend, 300_000)).sort().values
    assert_selects_top(backend, values)
    assert_selects_top(backend, values.flip(0))


@pytest.mark.usefixtures("at_length")
def test_misaligned_scores(backend):
    values = uniform(at_most(backend, 40_000))
    assert all(assert_selects_top(backend, values[first:]).sum() > 0 for first in range(1, 4))


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_scores_that_are_not_finite(backend, broken):
    """Few and many of them: infinity is above every threshold, NaN above none."""
    values = uniform(at_most(backend, 60_000))
    for step in (7, 9001):
        values[::step] = broken
        mask = assert_selects_top(backend, values)
        assert (mask[::step] == (broken == math.inf)).all()


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("masked", ["none", "some", "row"])
@pytest.mark.parametrize("tokens", [18, 21_000])
def test_tokens(backend, tokens, masked):
    """Rows are longer and shorter than a part of the pass; tokens follow the last row, and some values are broken."""
    many = at_most(backend, tokens) // 7
    layout = Layout((3, 3 * many, 0, 4 * many, 1, many * 2 // 3), 5, masked, seed=3)
    values, batch = testing.random_window(layout=layout).values, layout.batch()
    for bad in few(backend, (1.0, math.nan, math.inf, -math.inf), 2):
        values[2::3001] = bad
        assert_selects_top(backend, values, batch)


@pytest.mark.usefixtures("at_length")
def test_garbage_under_the_mask_is_never_read(backend):
    layout = Layout((40, 1, 0, at_most(backend, 16_500)), 9, "some", seed=1)
    values, batch = testing.random_window(layout=layout).values, layout.batch()
    valid = batch.mask & (torch.arange(values.numel()) < batch.cu_seqlens[-1])
    clean = assert_selects_top(backend, values, batch)
    for bad in (math.nan, math.inf, 99.0):
        assert torch.equal(clean, assert_selects_top(backend, torch.where(valid, values, bad), batch))


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("percents", [[0, 2, 1, 45, 40, 95], [6, 5, 4, 3, 2], [0, 0]], ids=str)
def test_broken_offsets(backend, percents):
    tokens = at_most(backend, 20_000)
    batch = hpo.PackedBatch(torch.tensor(percents) * tokens // 100, total_tokens=tokens, validate=False)
    assert_selects_top(backend, uniform(tokens), batch)


@pytest.mark.usefixtures("at_length")
def test_many_rows_and_many_tokens(backend):
    """The comparison is with fit and apply only, because the reference would take minutes."""
    rows = at_most(backend, 300_000) // 1000
    batch = hpo.PackedBatch(torch.arange(rows + 1) * 1000)
    assert int(assert_selects_top(backend, uniform(rows * 1000), batch).sum()) == 1 + (rows * 1000 - 1) // 5


def test_one_call_of_a_window_is_fit_and_apply(backend):
    device = testing.device_of(backend)
    for window, seed in itertools.product(
        (forking_tokens(), ares(3, "0.6"), EntropyWindow("strict", Fraction(1, 2), rule=OrderRule.FLOOR, strict=True)),
        range(3),
    ):
        layout = Layout((5, 3, 0, 8, 200, 6), 4, "some", seed=seed)
        values, batch = testing.random_window(layout=layout).values.to(device), layout.batch().to(device)
        state, mask = window.fit_apply(values, batch, backend=backend)
        expected = window.fit(values, batch, backend=backend)
        assert all(map(same, state[:3], expected[:3])) and state.scored_by == expected.scored_by
        assert same(mask, window.apply(values, batch, expected, backend=backend))


def test_one_call_of_a_window_takes_padded_entropies(backend):
    mask = (torch.arange(40).reshape(4, 10) % 10 < torch.tensor([[10], [3], [0], [7]])).to(testing.device_of(backend))
    values = uniform(40).reshape(4, 10).to(mask.device)
    state, selected = forking_tokens("0.3").fit_apply(values, mask, backend=backend)
    assert selected.shape == (4, 10) and int(selected.sum()) == 6 and not (selected & ~mask).any()
    assert state.population.item() == 20
