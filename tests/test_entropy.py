"""Windowed means on every backend, and the entropy windows made of them and of order statistics."""

import dataclasses
import functools
import itertools
import math
import pickle
from fractions import Fraction

import hypothesis
import numpy as np
import pytest
import torch
from breadth import at_length, at_most, few, tried  # noqa: F401 (the first is a fixture)
from hypothesis import strategies as st
from naive_entropy import BATCH, SHARED, places

import hpo_core as hpo
from hpo_core import entropy, testing
from hpo_core.entropy import EntropyWindow, ares, forking_tokens, window_mean
from hpo_core.specs import INDEX_RULES, OrderRule
from hpo_core.testing import Layout, WindowExample

POLICIES = list(itertools.product(("full", "shrink", "zero"), ("skip", "break")))
SHAPES = [(0, 0), (0, 3), (-3, 0), (-2, 2), (1, 4), (-5, -2), (0, 30), (-40, 40), (0, 6), (3, 3)]


def score(backend, example):
    values, batch, first, last, rules = testing.move(example, testing.device_of(backend))
    return window_mean(values, batch, first, last, **rules, backend=backend).cpu()


def assert_exact(backends, example):
    expected = testing.expect_window(example)
    for backend in backends:
        testing.assert_within_budget(f"{backend} window {example[2:]}", score(backend, example), expected)


def row(values, first, last, boundary="full", invalid="skip", mask=None):
    values = torch.tensor(values)
    batch = hpo.PackedBatch(torch.tensor([0, len(values)]), mask, total_tokens=len(values))
    return WindowExample(values, batch, first, last, {"boundary": boundary, "invalid": invalid})


# ------------------------------------------------------------------------------------------------------------- windows


@pytest.mark.parametrize("boundary, invalid", POLICIES)
@pytest.mark.parametrize("first, last", SHAPES)
def test_every_window(backend, boundary, invalid, first, last):
    for seed, masked in enumerate(("none", "some", "row")):
        layout = Layout((5, 0, 1, 9, 3), seed, masked, seed=seed)
        example = testing.random_window(layout=layout)
        assert_exact(
            [backend], example._replace(first=first, last=last, keywords={"boundary": boundary, "invalid": invalid})
        )


@hypothesis.settings(max_examples=60)
@hypothesis.given(example=testing.windows())
def test_generated_windows(backend, example):
    assert_exact([backend], example)


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize(
    "first, last", [(0, 0), (0, 3), (-7, 8), (0, 99), (-1500, -1470), (-1500, -3), (-1200, 950)], ids=str
)
def test_windows_over_rows_longer_than_a_tile(native_backends, first, last):
    """The last window is wider than a CUDA block's shared memory; the interpreter reaches as far with fewer terms."""
    backends = [backend for backend in native_backends if last - first < 100 or tried(backend, True, False)]
    for masked, (boundary, invalid) in zip(("none", "some"), (("full", "break"), ("shrink", "skip")), strict=True):
        layout = Layout((3, 2300, 0, 1100, 1), 2, masked, seed=1)
        example = testing.random_window(layout=layout)._replace(first=first, last=last)
        example.keywords.update(boundary=boundary, invalid=invalid)
        assert_exact(backends, example)


def test_keeps_every_promise_of_windows(backend):
    fn = functools.partial(window_mean, backend=backend)
    examples = 40 if backend == "cpu" else 5
    report = testing.check(fn, "window_mean", examples=examples, device=testing.device_of(backend))
    report.raise_for_broken()
    assert report.kept == testing.promises("window_mean")


def test_boundary_and_invalid_policies_by_hand(backend):
    values, mask = [1.0, 2.0, 4.0, 8.0], torch.tensor([True, False, True, True])
    undefined = -math.inf
    for boundary, invalid, expected in (
        ("full", "skip", [1.0, undefined, 6.0, undefined]),
        ("full", "break", [undefined, undefined, 6.0, undefined]),
        ("shrink", "skip", [1.0, undefined, 6.0, 8.0]),
        ("shrink", "break", [undefined, undefined, 6.0, 8.0]),
        ("zero", "skip", [0.5, undefined, 6.0, 4.0]),
        ("zero", "break", [undefined, undefined, 6.0, 4.0]),
    ):
        assert score(backend, row(values, 0, 1, boundary, invalid, mask)).tolist() == expected, (boundary, invalid)


def test_no_window_crosses_a_border(backend):
    """The first token of the next row, the last of the row before, and the tail are a million."""
    values = torch.full((12,), 1.0)
    values[[3, 8, 11]] = 1e6
    batch = hpo.PackedBatch(torch.tensor([0, 4, 8, 11]), total_tokens=12)
    for (first, last), boundary in itertools.product(((0, 3), (-3, 0), (-2, 2)), ("shrink", "zero")):
        out = score(backend, WindowExample(values, batch, first, last, {"boundary": boundary, "invalid": "skip"}))
        assert out[4:8].max() <= 1.0


def test_row_shorter_than_the_window_has_none(backend):
    layout = Layout((3, 4, 2, 5), masked="none", seed=1)
    example = testing.random_window(layout=layout)._replace(first=0, last=3)
    example.keywords.update(boundary="full", invalid="skip")
    assert torch.isfinite(score(backend, example)).nonzero().flatten().tolist() == [3, 9, 10]


@pytest.mark.parametrize("width", [1, 2, 4, 8, 16, 32])
def test_constant_is_its_own_mean(backend, width):
    """The mean is exact for any constant if the width is a power of two."""
    draw = torch.Generator().manual_seed(width)
    for constant in torch.rand(20, generator=draw).tolist():
        out = score(backend, row([constant] * 40, 0, width - 1))
        assert (out[: 41 - width] == torch.tensor(constant)).all() and (out[41 - width :] == -math.inf).all()


@pytest.mark.parametrize("width", [3, 5, 7, 12, 31])
def test_dyadic_constant_is_its_own_mean_at_any_width(backend, width):
    out = score(backend, row([0.625] * 40, 0, width - 1))
    assert (out[: 41 - width] == 0.625).all()


@hypothesis.given(layout=testing.layouts(longest=12))
def test_permuting_rows_permutes_scores(backend, layout):
    example = testing.random_window(layout=layout)
    order = torch.randperm(example.batch.rows, generator=torch.Generator().manual_seed(layout.seed))
    batch, tokens = example.batch.select(order)
    moved = score(backend, example._replace(values=example.values[tokens], batch=batch))
    assert torch.equal(moved, score(backend, example)[tokens])


@hypothesis.given(layout=testing.layouts(longest=12))
def test_reversal(backend, layout):
    """Reversed rows and a reversed window give reversed scores. Entropies are multiples of 1/64, with exact sums."""
    example = testing.random_window(layout=layout)
    hypothesis.assume(example.keywords["boundary"] != "carry")  # which takes the first value of a row
    example = example._replace(values=(example.values * 64).round() / 64)
    order = torch.arange(example.values.numel())
    for begin, end in itertools.pairwise(example.batch.cu_seqlens.tolist()):
        order[begin:end] = order[begin:end].flip(0)
    mask = None if example.batch.mask is None else example.batch.mask[order]
    batch = hpo.PackedBatch(example.batch.cu_seqlens, mask, total_tokens=order.numel())
    mirrored = WindowExample(example.values[order], batch, -example.last, -example.first, example.keywords)
    assert torch.equal(score(backend, mirrored), score(backend, example)[order])


def test_values_that_are_not_finite(backend):
    """The score of such a valid token is NaN, and its neighbours treat it as masked."""
    for bad in (math.nan, math.inf, -math.inf):
        out = score(backend, row([1.0, bad, 3.0, 5.0], 0, 1))
        assert out[0] == 1.0 and out[1].isnan() and out[2] == 4.0 and out[3] == -math.inf
        assert score(backend, row([1.0, bad, 3.0, 5.0], 0, 1, invalid="break"))[0] == -math.inf


@pytest.mark.parametrize(
    "layout", [Layout(()), Layout((), tail=3), Layout((0, 0)), Layout((1,)), Layout((0, 1, 0), 1)], ids=str
)
def test_degenerate_windows(backend, layout):
    for first, last in SHAPES:
        for boundary, invalid in POLICIES:
            example = testing.random_window(layout=layout)._replace(first=first, last=last)
            assert_exact([backend], example._replace(keywords={"boundary": boundary, "invalid": invalid}))


@pytest.mark.parametrize("masked", ["none", "some"])
@pytest.mark.parametrize("first, last", [(3, 150), (-150, -3)])
def test_wide_windows_beside_their_row(first, last, masked, backend):
    """A wide window that ends before it begins has no position: neither its neighbours nor masked tokens are in it."""
    example = testing.random_window(layout=Layout((2, 5, 160), masked=masked))
    keywords = {"boundary": "shrink", "invalid": "skip"}
    example = example._replace(first=first, last=last, keywords=keywords)
    if masked == "some":
        example.values[~example.batch.mask] = math.nan
    assert_exact([backend], example)


@pytest.mark.parametrize(
    "first, last", [(-(2**40), 2**40), (2**61, 2**62), (-(2**62), -(2**61)), (0, 2**31), (-(2**62), 2**62)]
)
def test_absurd_windows_are_harmless(backend, first, last):
    example = testing.random_window(layout=Layout((4, 2), masked="none"))._replace(first=first, last=last)
    example.keywords.update(boundary="shrink", invalid="skip")
    out = score(backend, example)
    means = torch.repeat_interleave(
        torch.stack((example.values[:4].mean(), example.values[4:].mean())), torch.tensor([4, 2])
    )
    if first < 0 < last:
        torch.testing.assert_close(out, means)
    elif first == 0:
        assert torch.isfinite(out).all()
    else:
        assert (out == -math.inf).all()


@pytest.mark.parametrize(
    "offsets", [[0, 5, 2, 4, 6], [0, -3, 2, 6, 6], [-(2**62), 2**62, 3, -1, 2**63 - 1], [6, 5, 4, 3, 2]], ids=str
)
def test_broken_offsets_are_harmless(backend, offsets):
    batch = hpo.PackedBatch(torch.tensor(offsets), total_tokens=6, validate=False)
    values = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    assert_exact([backend], WindowExample(values, batch, 0, 0, {"boundary": "full", "invalid": "skip"}))
    for first, last in SHAPES:
        score(backend, WindowExample(values, batch, first, last, {"boundary": "shrink", "invalid": "skip"}))


@pytest.mark.usefixtures("at_length")
def test_same_bits_on_any_number_of_threads(backend):
    tokens = at_most(backend, 18_000)
    example = testing.random_window(layout=Layout((tokens // 6, 1, 0, 5 * tokens // 6, 40), 3, "some", seed=2))
    outs = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        outs.append([score(backend, example._replace(first=first, last=last)) for first, last in ((-3, 7), (0, 0))])
    assert all(torch.equal(a, b) for out in outs for a, b in zip(out, outs[0], strict=True))


def test_order_of_blocks_and_threads_does_not_matter(monkeypatch):
    """A data race in the CUDA kernels shows as a difference between these orders."""
    if not hpo.backends()["cuda_emulated"]:
        pytest.skip("cuda_emulated is not built")
    example = testing.random_window(layout=Layout((700, 1, 0, 90), 3, "some", seed=2))._replace(first=-3, last=7)
    seen = set()
    for order in ("forward", "reverse", "random:3"):
        monkeypatch.setenv("HPO_EMULATION_ORDER", order)
        seen.add(score("cuda_emulated", example).numpy().tobytes())
    assert len(seen) == 1


# ------------------------------------------------------------------------------------------------------ entropy windows


def worked(backend):
    device = testing.device_of(backend)
    return SHARED.to(device), BATCH.to(device)


def test_worked_forking_tokens(backend):
    values, batch = worked(backend)
    window = forking_tokens("0.2")
    state = window.fit(values, batch, backend=backend)
    assert state.threshold.item() == torch.tensor(0.9).item() and state.population.item() == 19
    mask = window.apply(values, batch, state, backend=backend)
    assert places(mask) == [2, 3, 13, 18]
    # The loss at ratio 1, divided by the selected tokens as in the paper, and by all valid ones as in TRL.
    advantages = torch.tensor([1.2, -0.8, 0.0], device=values.device)
    for weights, loss in (
        (hpo.aggregation.token_mean(batch, total=mask.sum()), -0.4),
        (hpo.aggregation.token_mean(batch, total=19), -0.0842105),
    ):
        out = hpo.policy_loss(
            values - 2, None, advantages, batch, gate=hpo.gates.dapo(), weights=weights, entropy=values, window=window,
            threshold=state, backend=backend,
        )  # fmt: skip
        assert out.loss.item() == pytest.approx(loss, abs=1e-6)


def test_worked_window_means(backend):
    values, batch = worked(backend)
    none = -math.inf
    forward = window_mean(values, batch, 0, 3, backend=backend).tolist()
    assert forward == pytest.approx(
        [0.5625, 0.75, 0.9, 0.605, 0.3875, 0.19, 0.025, none, none, none, 0.4825, 0.39, 0.39, none, none, none]
        + [none] * 3,
        abs=1e-6,
    )
    following = window_mean(values, batch, 1, 4, backend=backend).tolist()
    assert following == pytest.approx(
        [0.75, 0.9, 0.605, 0.3875, 0.19, 0.025, none, none, none, none, 0.39, 0.39, none, none, none, none]
        + [none] * 3,
        abs=1e-6,
    )


def test_worked_ares(backend):
    values, batch = worked(backend)
    tokens = EntropyWindow("token quantile", Fraction(19, 20))  # appendix H: 95 % of all tokens, the order statistic
    state = tokens.fit(values, batch, backend=backend)
    assert places(tokens.apply(values, batch, state, backend=backend)) == [13]
    half = ares(4, "0.5")  # ten full windows; index ceil(.5 * 9) = 5
    state = half.fit(values, batch, backend=backend)
    assert state.population.item() == 10 and state.threshold.item() == pytest.approx(0.4825, abs=1e-6)
    assert places(half.apply(values, batch, state, backend=backend)) == [0, 1, 2, 3, 10]


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("share", ["0", "0.2", "0.3", "0.7", "0.05", "0.5", "1"])
def test_count_law(backend, share):
    """A mask has 1 + floor(share (n - 1)) tokens without ties, and all tokens if all are equal."""
    window = forking_tokens(share)
    for n in few(backend, (11, 1, 2, 10, 101), 2):
        batch = hpo.PackedBatch.from_lengths([n]).to(testing.device_of(backend))
        values = torch.randperm(n, generator=torch.Generator().manual_seed(n)).float().to(batch.device)
        mask = window.apply(values, batch, window.fit(values, batch, backend=backend), backend=backend)
        assert int(mask.sum()) == 1 + math.floor(Fraction(share) * (n - 1))
        flat = torch.full_like(values, 0.7)
        assert window.apply(flat, batch, window.fit(flat, batch, backend=backend), backend=backend).all()


@hypothesis.given(layout=testing.layouts(longest=10), share=st.sampled_from(("0.2", "0.3", "0.5")))
def test_increasing_transform_keeps_the_mask(backend, layout, share):
    values, batch = testing.random_window(layout=layout).values.to(testing.device_of(backend)), layout.batch()
    batch = batch.to(values.device)
    window = forking_tokens(share)

    def mask(entropy):
        return window.apply(entropy, batch, window.fit(entropy, batch, backend=backend), backend=backend)

    kept = mask(values)
    assert torch.equal(mask(4 * values), kept) and torch.equal(mask(values / 1024), kept)


STRICT = EntropyWindow("strict", Fraction(1, 2), 0, 1, rule=OrderRule.FLOOR, strict=True)


@hypothesis.settings(max_examples=200)
@hypothesis.given(layout=testing.layouts(longest=10), window=st.sampled_from((ares(4, "0.7"), STRICT)))
def test_affine_entropies_keep_the_mask_of_windows(backend, layout, window):
    """Dyadic numbers, so that the transformed entropies and their sums are exact."""
    values = (testing.random_window(layout=layout).values * 64).round() / 64
    batch = layout.batch().to(testing.device_of(backend))
    masks = []
    for entropy_ in (values.to(batch.device), (2 * values + 0.5).to(batch.device)):
        state = window.fit(entropy_, batch, backend=backend)
        masks.append(window.apply(entropy_, batch, state, backend=backend))
    assert torch.equal(*masks)


def test_width_one_is_the_token_rule(backend):
    values, batch = worked(backend)
    one, tokens = ares(width=1), forking_tokens("0.05")
    states = [window.fit(values, batch, backend=backend) for window in (one, tokens)]
    assert torch.equal(states[0].threshold, states[1].threshold)
    assert torch.equal(score(backend, row(SHARED.tolist(), 0, 0)), SHARED)


@hypothesis.given(layout=testing.layouts(longest=10))
def test_complementary_rules_split_the_tokens(backend, layout):
    """high: score >= tau; low: not high. Together every valid token once."""
    values, batch = testing.random_window(layout=layout).values, layout.batch()
    values, batch = values.to(testing.device_of(backend)), batch.to(testing.device_of(backend))
    window = forking_tokens("0.4")
    state = window.fit(values, batch, backend=backend)
    high = window.apply(values, batch, state, backend=backend)
    scores = window.score(values, batch, backend=backend)
    low = (scores > -math.inf) & (scores < state.threshold)
    assert torch.equal(high | low, torch.isfinite(scores)) and not (high & low).any()


def test_micro_batches_share_the_threshold_of_the_step(backend):
    """A threshold fitted once gives any part the mask of the whole; thresholds of calls on parts do not, and a window
    over the batch refuses to fit one."""
    values, batch = worked(backend)
    for window in (forking_tokens("0.2"), ares(4, "0.5")):
        state = window.fit(values, batch, backend=backend)
        whole = window.apply(values, batch, state, backend=backend)
        own = []
        for part, _, _, tokens in batch.micro_batches(7):
            assert torch.equal(window.apply(values[tokens], part, state, backend=backend), whole[tokens])
            for fit in (window.fit, window.fit_apply):
                with pytest.raises(ValueError, match=r"^batch: .* a part .*; pass a window with scope='call', or"):
                    fit(values[tokens], part, backend=backend)
            own.append(dataclasses.replace(window, scope="call").fit_apply(values[tokens], part, backend=backend)[1])
        assert not torch.equal(torch.cat(own), whole)


WINDOWS = [
    forking_tokens("0.2"),
    ares(2, "0.7"),
    *(EntropyWindow(rule.name, Fraction(1, 3), rule=rule) for rule in INDEX_RULES),
]


def step(seed):
    """One optimiser step, with many ties at odd seeds, cut into three ranks; the last has no rows at even seeds."""
    layout = Layout((5, 3, 0, 8, 2, 6), 0, "some", seed=seed)
    values = testing.random_window(layout=layout).values - 1.0
    values = (values * 4).round() / 4 if seed % 2 else values
    values[0] = math.nan if seed == 3 else -0.0
    cuts = ([0, 1], [2, 3, 4], [5]) if seed % 2 else ([0], [1, 2, 3, 4, 5], [])
    return values, layout.batch(), cuts


def fitted(rank):
    states = {}
    for seed in range(6):
        values, batch, cuts = step(seed)
        part, tokens = batch.select(cuts[rank])
        for window in WINDOWS:
            state = window.fit(values[tokens], part, process_group=torch.distributed.group.WORLD)
            states[seed, window.name] = [tensor.item() for tensor in state[:3]]
    return states


def test_threshold_over_ranks_is_that_of_the_whole_step(three_ranks):
    for states in three_ranks(fitted):
        for (seed, name), got in states.items():
            values, batch, _cuts = step(seed)
            [window] = [window for window in WINDOWS if window.name == name]
            expected = [tensor.item() for tensor in window.fit(values, batch)[:3]]
            assert got == expected and math.copysign(1, got[0]) == math.copysign(1, expected[0])


def test_masked_entropies_are_not_in_the_population(backend):
    values, _batch = worked(backend)
    mask = torch.rand(19, generator=torch.Generator().manual_seed(3)) > 0.3
    batch = hpo.PackedBatch(torch.tensor([0, 10, 16, 19]), mask).to(values.device)
    for window in (forking_tokens("0.3"), ares(2, "0.6")):
        states = []
        for poison in (99.0, math.nan, math.inf):
            dirty = torch.where(batch.mask, values, poison)
            state = window.fit(dirty, batch, backend=backend)
            states.append((state.threshold.item(), state.population.item(), state.errors.item()))
            assert not window.apply(dirty, batch, state, backend=backend)[~batch.mask].any()
        assert len(set(states)) == 1 and states[0][2] == 0


def test_nothing_to_fit(backend):
    device = testing.device_of(backend)
    batch = hpo.PackedBatch(torch.tensor([0, 2, 2]), torch.zeros(3, dtype=torch.bool)).to(device)
    for window in (forking_tokens(), ares()):
        state = window.fit(torch.zeros(3, device=device), batch, backend=backend)
        assert state.threshold.isnan() and state.population.item() == 0
        assert not window.apply(torch.zeros(3, device=device), batch, state, backend=backend).any()


def test_one_token(backend):
    """The comparison >= keeps it, > drops it."""
    batch = hpo.PackedBatch.from_lengths([1]).to(testing.device_of(backend))
    values = torch.tensor([0.3], device=batch.device)
    for strict in (False, True):
        window = EntropyWindow("one", Fraction(4, 5), strict=strict)
        assert (
            window.apply(values, batch, window.fit(values, batch, backend=backend), backend=backend).item()
            is not strict
        )


def test_broken_entropies_are_counted(backend):
    batch = hpo.PackedBatch.from_lengths([4]).to(testing.device_of(backend))
    values = torch.tensor([0.1, math.nan, 0.3, math.inf], device=batch.device)
    state = entropy.forking_tokens("0.5").fit(values, batch, backend=backend)
    assert state.errors.item() == 2 and state.population.item() == 2


# ----------------------------------------------------------------------------------------- the backend of a threshold


def scored():
    """Entropies with inexact sums, and a batch with masked tokens and some rows shorter than windows."""
    draw = torch.Generator().manual_seed(0)
    lengths = [90, 1, 3, 60, 0, 46]
    mask = torch.rand(200, generator=draw) < 0.9
    offsets = hpo.PackedBatch.from_lengths(lengths).cu_seqlens
    return torch.rand(200, generator=draw) * 3, hpo.PackedBatch(offsets, mask)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 7, 8, 33])
def test_whole_windows_have_the_same_bits_on_the_cpu_and_in_cuda(width):
    """A threshold fitted on one of them is therefore valid on the other."""
    if not hpo.backends()["cuda_emulated"]:
        pytest.skip("cuda_emulated is not available")
    values, batch = scored()
    window = entropy.ares(width, "0.8")
    scores = [window.score(values, batch, backend=backend) for backend in ("cpu", "cuda_emulated")]
    assert torch.equal(*scores)
    state = window.fit(values, batch, backend="cpu")
    masks = [window.apply(values, batch, state, backend=backend) for backend in ("cpu", "cuda_emulated")]
    assert torch.equal(*masks) and masks[0].sum() == (scores[0] >= state.threshold).sum() > 0


def fits(window, values, batch, backend):
    yield window.fit(values, batch, backend=backend)
    yield window.fit_score(window.score(values, batch, backend=backend), backend=backend)
    yield window.fit_apply(values, batch, backend=backend)[0]


def test_a_threshold_of_scores_with_other_bits_is_refused(native_backends):
    """The window and the loss refuse it between any two backends with different sums."""
    values, batch = scored()
    backends = ["reference", *native_backends]
    loss = functools.partial(hpo.policy_loss, torch.zeros(200), None, torch.ones(6), batch, entropy=values)
    refused = 0
    for boundary in ("full", "shrink", "zero", "carry"):
        window = dataclasses.replace(entropy.ares(4), boundary=boundary)
        for ours in backends:
            for state, theirs in itertools.product(fits(window, values, batch, ours), backends):
                same = {"cpu": "cuda_emulated"}.get(ours, ours) == {"cpu": "cuda_emulated"}.get(theirs, theirs)
                if ours == theirs or (same and boundary == "full"):
                    window.apply(values, batch, state, backend=theirs)
                    continue
                refused += 1
                with pytest.raises(
                    ValueError, match=r"state: expected one fitted on scores of .*; fit and apply on one"
                ):
                    window.apply(values, batch, state, backend=theirs)
                with pytest.raises(ValueError, match="state: expected one fitted"):
                    loss(window=window, threshold=state, backend=theirs)
    assert refused or len(native_backends) == 0


def test_thresholds_of_one_token_windows_serve_every_backend(native_backends):
    values, batch = scored()
    window = entropy.forking_tokens()
    state = window.fit(values, batch)
    for backend in native_backends:
        assert torch.equal(window.apply(values, batch, state, backend=backend), window.apply(values, batch, state))


def test_values_are_compared_in_the_precision_of_their_threshold():
    """A threshold that is rounded up to float32, as it is over ranks, loses no token of the float64 reference."""
    values, batch = torch.tensor([0.6040545404352367, 0.1], dtype=torch.float64), hpo.PackedBatch.from_lengths([2])
    window = forking_tokens("0.5")
    state = window.fit(values, batch)
    assert state.threshold.double() > values[0]
    given = {"batch": batch, "backend": "reference"}
    assert window.apply(values, state=state, **given).tolist() == [True, False]
    selection = window.selection(values, state=state, **given)
    for how in ({"window": window, "entropy": values, "threshold": state}, {"selection": selection}):
        out = hpo.policy_loss(values.new_zeros(2), None, values.new_ones(1), **given, **how)
        assert out.metrics["selected"] == 1


def test_offsets_of_numpy(backend):
    values, batch = worked(backend)
    window = EntropyWindow("numpy", Fraction(1, 2), np.int64(0), np.int32(3))
    assert window == EntropyWindow("numpy", Fraction(1, 2), 0, 3) and type(window.last) is int
    given = {"batch": batch, "backend": backend}
    assert torch.equal(window.score(values, **given), ares(4).score(values, **given))


def test_a_state_remembers_its_scorer_wherever_it_goes(tmp_path):
    values, batch = scored()
    state = entropy.ares(3).fit(values, batch, backend="cpu")
    torch.save(state, tmp_path / "state.pt")
    for again in (
        state.to("cpu"),
        torch.load(tmp_path / "state.pt", weights_only=True),
        pickle.loads(pickle.dumps(state)),
    ):
        assert again.scored_by == state.scored_by == "cpu or cuda" and torch.equal(again.threshold, state.threshold)


def test_scores_keep_the_shape_of_a_padded_batch(native_backends):
    entropy = torch.tensor([[0.1, 0.9, 0.5], [0.7, 0.2, 0.4]])
    window = hpo.entropy.ares()
    for backend in ("reference", *native_backends):
        place = testing.device_of(backend)
        mask, batch = torch.ones(2, 3, dtype=torch.bool, device=place), hpo.PackedBatch.from_lengths([3, 3]).to(place)
        padded = window.score(entropy.to(place), mask, backend=backend)
        packed = window.score(entropy.flatten().to(place), batch, backend=backend)
        assert torch.equal(padded, packed.view(2, 3))


def test_states_of_controllers_move():
    state = hpo.entropy.skywork_coefficient(torch.tensor(0.0), torch.tensor(0.1))
    assert all(each.device.type == "meta" for each in state.to("meta"))
