"""Exact order statistics on every backend, and the scores and tokens that they select."""

import importlib
import math
import re
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from breadth import at_length, at_most, few  # noqa: F401 (the first is a fixture)

import hpo_core as hpo
from hpo_core import ops, testing
from hpo_core.entropy import ares, forking_tokens, quantiles, top_k
from hpo_core.reference.entropy import order_statistic as reference_order_statistic
from hpo_core.reference.entropy import select as reference_select
from hpo_core.reference.entropy import window_score
from hpo_core.specs import INDEX_RULES, Boundary, Invalid, OrderRule
from hpo_core.testing import Layout, ScoresExample


def select(backend, example):
    """Threshold and counts of an order statistic."""
    score, numerator, denominator, rule = testing.move(example, testing.device_of(backend))
    threshold, counts = ops.order_statistic(score, numerator, denominator, rule, None, None, backend)
    return threshold.cpu(), counts.cpu()


def assert_selects(backend, example):
    threshold, counts = select(backend, example)
    expected, population = reference_order_statistic(*example)
    assert counts.tolist() == population.tolist()
    assert threshold.shape == (1,) and threshold.numpy().tobytes() == expected.numpy().tobytes()  # -0 becomes +0


CUDA = Path(__file__).parents[1] / "csrc/cuda/bins.cuh"


def test_sizes_for_simulated_backends_exceed_one_step(native_backends):
    if "triton" in native_backends:
        kernels = importlib.import_module("hpo_core._triton.entropy")
        assert at_most("triton", math.inf) > max(kernels.SCORES.value, kernels.TILE.value)
    if CUDA.exists():
        [threads] = re.findall(r"constexpr int kBinThreads = (\d+)", CUDA.read_text())
        assert at_most("cuda_emulated", math.inf) > 4 * int(threads)


# ---------------------------------------------------------------------------------------------------- order statistics


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("kind", ["distinct", "ties", "equal", "signed", "extreme"])
@pytest.mark.parametrize("count", [0, 1, 2, 33, 1025, 20_000])
def test_order_statistics_of_every_size(backend, count, kind):
    for seed in few(backend, range(8), 2):
        assert_selects(backend, testing.random_scores(seed, at_most(backend, count), kind))


def test_keeps_every_promise_of_order_statistics(backend):
    def fn(score, numerator, denominator, rule):
        return ops.order_statistic(score.contiguous(), numerator, denominator, rule, None, None, backend)

    examples = 60 if backend == "cpu" else 10
    report = testing.check(fn, "order_statistic", examples=examples, device=testing.device_of(backend))
    report.raise_for_broken()
    assert report.kept == testing.promises("order_statistic")


def test_index_is_exact_where_floats_fail(backend):
    """Quantiles are every k / 10 and k / 20; floats first fail at 0.7 of 11 tokens."""
    assert math.ceil((1 - 0.7) * 10) == 4 and forking_tokens("0.7").quantile * 10 == 3
    assert forking_tokens(Fraction(1, 2**31)).quantile.denominator == 2**31  # the bound of every share
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
        for rule in INDEX_RULES:
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
    for rule in INDEX_RULES:
        example = ScoresExample(torch.tensor(values, dtype=torch.float32), 1, 2, rule)
        threshold, counts = select(backend, example)
        assert counts.tolist() == [population, broken] and threshold.isnan().item() == (population == 0)
        assert_selects(backend, example)


# ----------------------------------------------------------------------------------------- single tokens and selections


SCORES = {}


def scores_of(values, *packed):
    """Scores of single tokens, computed once for all backends, because the definition loops over tokens."""
    key = tuple(None if tensor is None else tensor.numpy().tobytes() for tensor in (values, *packed))
    if key not in SCORES:
        SCORES[key] = window_score(values, *packed, 0, 0, Boundary.FULL, Invalid.SKIP)
    return SCORES[key]


def assert_selects_tokens(backend, values, batch, numerator=4, rule=OrderRule.CEIL):
    """Threshold, counts and masks of the tokens' own values, without and with ties excluded."""
    device, given = testing.device_of(backend), (batch.mask, batch.cu_seqlens)
    moved, packed = values.to(device), [None if tensor is None else tensor.to(device) for tensor in given]
    scores = scores_of(values, *given)
    expected, population = reference_order_statistic(scores, numerator, 5, rule)
    threshold, counts = ops.order_statistic(moved, numerator, 5, rule, *packed, backend)
    assert counts.tolist() == population.tolist()
    assert threshold.cpu().numpy().tobytes() == expected.numpy().tobytes()
    masks = []
    for strict in (False, True):
        mask = ops.select(moved, threshold, strict, *packed, backend).cpu()
        assert mask.dtype == torch.bool and torch.equal(mask, reference_select(scores, expected, strict))
        masks.append(mask)
    return masks


def test_the_reference_of_tokens_is_that_of_their_scores():
    """The tests below compare with scores."""
    layout = Layout((5, 0, 1, 9, 3), 4, "some")
    values, batch = testing.random_window(layout=layout).values, layout.batch()
    given = (batch.mask, batch.cu_seqlens)
    of_tokens = reference_order_statistic(values, 4, 5, OrderRule.CEIL, *given)
    of_scores = reference_order_statistic(scores_of(values, *given), 4, 5, OrderRule.CEIL)
    assert all(map(torch.equal, of_tokens, of_scores))
    selected = reference_select(values, of_tokens[0], False, *given)
    assert torch.equal(selected, reference_select(scores_of(values, *given), of_tokens[0], False)) and selected.any()


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("masked", ["none", "some", "row"])
@pytest.mark.parametrize(
    "lengths, tail", [((5, 0, 1, 9, 3), 4), ((), 3), ((0, 0), 0), ((300, 1, 0, 1800, 40), 30)], ids=str
)
def test_tokens_are_their_own_scores(backend, lengths, tail, masked):
    """Values are multiples of 1/8, so that many equal the threshold; the last ones are misaligned."""
    for seed in few(backend, range(2)):
        layout = Layout(lengths, tail, masked, seed=seed)
        values = (testing.random_window(layout=layout).values * 8).round() / 8
        for numerator, rule in ((4, OrderRule.CEIL), (0, OrderRule.FLOOR), (5, OrderRule.NEAREST)):
            assert_selects_tokens(backend, values, layout.batch(), numerator, rule)
        assert_selects_tokens(backend, torch.cat((values[:1], values))[1:], layout.batch())


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 99.0, -99.0])
def test_garbage_under_the_mask_is_never_read(backend, bad):
    """Garbage is at masked tokens and after the last row; a valid token with it is an error, and not selected."""
    layout = Layout((40, 1, 0, at_most(backend, 5500)), 9, "some", seed=1)
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


def test_values_before_the_first_row_are_no_scores(backend):
    """Nor are those behind the last: they are the largest here, and unmasked."""
    values = torch.tensor([9.0, 8.0, *range(6), 7.0])
    for offsets, expected in (([2, 8, 9], 5.0), ([2, 5, 8], 4.0), ([0, 8], 8.0)):
        given = [each.to(testing.device_of(backend)) for each in (values, torch.tensor(offsets))]
        first, end = offsets[0], offsets[-1]
        fraction = (end - first - 2, end - first - 1, OrderRule.CEIL)  # all but the largest
        threshold, counts, selected = ops.select_top(given[0], *fraction, False, None, given[1], backend)
        assert threshold.item() == expected and counts.tolist() == [end - first, 0]
        assert selected.nonzero().flatten().tolist() == [
            at for at in range(9) if first <= at < end and values[at] >= expected
        ]


@pytest.mark.usefixtures("at_length")
def test_broken_offsets_of_many_tokens(backend):
    """There are enough tokens for a sample of the CPU backend."""
    tokens = at_most(backend, 20_000)
    values = torch.rand(tokens, generator=torch.Generator().manual_seed(0))
    offsets = torch.tensor([0, 2, 1, 45, 40, 95]) * tokens // 100
    assert_selects_tokens(backend, values, hpo.PackedBatch(offsets, total_tokens=tokens, validate=False))


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("masked", ["none", "some"])
def test_many_tokens(backend, masked):
    """There are enough tokens for a sample and several threads, and rows longer and shorter than a part of the pass."""
    many = at_most(backend, 21_000) // 7
    layout = Layout((3, 3 * many, 0, 4 * many, 1, many * 2 // 3), 5, masked, seed=3)
    values = testing.random_window(layout=layout).values
    values[[2, 3 * many + 500, 3 * many + 501, 5 * many]] = torch.tensor([math.nan, math.inf, -math.inf, math.inf])
    assert_selects_tokens(backend, values, layout.batch())


@pytest.mark.parametrize("threshold", [0.5, math.nan, -math.inf, math.inf, -0.0])
def test_scores_are_compared_as_they_are(backend, threshold):
    values = torch.tensor([0.5, -math.inf, math.nan, math.inf, 0.0, -0.0, 1.0, 0.25] * 300)[: 8 * 300 - 3]
    device, limit = testing.device_of(backend), torch.tensor([threshold])
    for strict in (False, True):
        mask = ops.select(values.to(device), limit.to(device), strict, None, None, backend).cpu()
        assert torch.equal(mask, values > limit if strict else values >= limit)
        assert torch.equal(mask, reference_select(values, limit, strict))


def test_threshold_of_the_wrong_shape_is_refused():
    batch, window = hpo.PackedBatch.from_lengths([3]), forking_tokens()
    state = window.fit(torch.rand(3), batch)
    with pytest.raises(ValueError, match=r"state\.threshold: expected shape \[1\] \(as fit returned it\)"):
        window.apply(torch.rand(3), batch, state._replace(threshold=torch.rand(3)))


# --------------------------------------------------------------------------------------------------- threads and blocks


@pytest.mark.usefixtures("at_length")
def test_same_bits_on_any_number_of_threads(backend):
    scores = testing.random_scores(0, at_most(backend, 20_000), "signed")
    tokens = at_most(backend, 18_000)
    layout = Layout((tokens // 6, 1, 0, 5 * tokens // 6, 40), 3, "some", seed=2)
    values, batch = testing.move(testing.random_window(layout=layout), testing.device_of(backend))[:2]
    given = (batch.mask, batch.cu_seqlens)
    outs = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        threshold, counts = ops.order_statistic(values, 4, 5, OrderRule.CEIL, *given, backend)
        mask = ops.select(values, threshold, False, *given, backend)
        outs.append((*select(backend, scores), threshold, counts, mask))
    assert all(torch.equal(a, b) for out in outs for a, b in zip(out, outs[0], strict=True))


def test_order_of_blocks_and_threads_does_not_matter(monkeypatch):
    """A data race in the CUDA kernels shows as a difference between these orders."""
    if not hpo.backends()["cuda_emulated"]:
        pytest.skip("cuda_emulated is not built")
    scores = testing.random_scores(0, 3000, "ties")
    seen = set()
    for order in ("forward", "reverse", "random:3"):
        monkeypatch.setenv("HPO_EMULATION_ORDER", order)
        threshold, counts = select("cuda_emulated", scores)
        seen.add((threshold.item(), *counts.tolist()))
    assert len(seen) == 1


@pytest.mark.parametrize("planted", [9.0, -1.0])
def test_a_sample_of_a_scope_that_misleads(backend, planted):
    """Where the CPU looks for the place of the quantile of a long row, all values are on one side of it, and once the
    quantile is the nearest of the others."""
    rows, length = 3, 4096
    values = torch.rand(rows, length, generator=torch.Generator().manual_seed(1))
    looked_at = {(i * 0x9E3779B9 % 2**32) * length >> 32 for i in range(256)}
    values[:, list(looked_at)] = planted
    nearest = length - len(looked_at) - 1 if planted > 1 else len(looked_at)
    batch = hpo.PackedBatch.from_lengths([length] * rows).to(testing.device_of(backend))
    given = values.flatten().to(batch.device)
    expected = values.sort().values
    for index in (nearest, 1000, 2000, 3000):
        q = Fraction(index, length - 1)
        assert torch.equal(quantiles(given, batch, q, backend=backend).cpu(), expected[:, index])
        chosen = top_k(given, batch, length - index, backend=backend).cpu().reshape(rows, length)
        assert torch.equal(chosen, values >= expected[:, index, None])


def test_triton_selects_in_one_launch(monkeypatch):
    """The launch has one program, because the interpreter runs programs one after another."""
    triton = pytest.importorskip("hpo_core._triton.entropy")
    monkeypatch.setattr(triton, "programs_together", lambda *_: (1, True))
    launched = []
    monkeypatch.setattr(triton, "launch", lambda *a, run=triton.launch, **k: (launched.append(a[0]), run(*a, **k)))
    values = torch.rand(3 * triton.SCORES.value - 5).mul(8).round()
    values[7] = torch.nan
    for strict in (False, True):
        there = values.to(testing.device_of("triton"))
        threshold, counts, selected = (each.cpu() for each in triton.select_top(there, 4, 5, OrderRule.CEIL, strict))
        expected, population = reference_order_statistic(values, 4, 5, OrderRule.CEIL)
        assert torch.equal(threshold, expected) and torch.equal(counts, population)
        assert torch.equal(selected, reference_select(values, expected, strict)) and len(set(launched)) == 1
    assert len(launched) == 2


@pytest.mark.parametrize("window", [forking_tokens(), ares()], ids=lambda window: window.name)
def test_window_threshold_and_mask_are_two_launches_on_cuda(window):
    module = pytest.importorskip("hpo_core._cuda_emulated")
    values, batch = torch.rand(300), hpo.PackedBatch.from_lengths([100] * 3)
    before = module.launches()
    window.fit_apply(values, batch, backend="cuda_emulated")
    after = module.launches()
    launched = {kernel: number - before.get(kernel, 0) for kernel, number in after.items()}
    assert {kernel: number for kernel, number in launched.items() if number} == {"score_windows": 1, "select_top": 1}
