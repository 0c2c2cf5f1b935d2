"""Aggregates over windows of tokens on every backend, held to loops over the tokens of each row."""

import itertools
import math
import pickle
from fractions import Fraction

import pytest
import torch
from breadth import at_length, few, tried  # noqa: F401 (the first is a fixture)
from conftest import NATIVE

import hpo_core as hpo
from hpo_core import testing
from hpo_core.entropy import EntropyWindow, Window, quantiles, segment_aggregate, top_k, window_aggregate, window_mean
from hpo_core.specs import OrderRule
from hpo_core.testing import Layout

AGGREGATES = ("mean", "sum", "max", "min")
WINDOWS = [
    Window(first, last, aggregate, boundary, invalid)
    for (first, last), aggregate, boundary, invalid in zip(
        itertools.cycle([(0, 3), (-3, 0), (1, 4), (-2, 2), (-5, -2), (0, 30), (-40, 40), (0, 6), (0, 0)]),
        *zip(
            *(
                kinds
                for kinds in itertools.product(AGGREGATES, ("full", "shrink", "zero", "carry"), ("skip", "break"))
                if kinds[1] != "zero" or kinds[0] in ("mean", "sum")
            ),
            strict=True,
        ),
        strict=False,
    )
]


def dyadic(layout):
    """Entropies that are multiples of 1/64: their sums are exact in any order."""
    draw = torch.Generator().manual_seed(layout.seed)
    return torch.randint(0, 256, (layout.tokens,), generator=draw) / 64, layout.batch()


def run(backend, values, batch, window):
    device = testing.device_of(backend)
    return window_aggregate(values.to(device), batch.to(device), window, backend=backend).cpu()


def naive(values, batch, window):
    """The definition with a loop over the tokens of each row, in Python's floats. A row spans its valid tokens."""
    values = values.tolist()
    mask = [True] * len(values) if batch.mask is None else batch.mask.tolist()
    width = window.last - window.first + 1
    scores = [-math.inf] * len(values)
    for begin, end in itertools.pairwise(batch.cu_seqlens.tolist()):
        valid = [t for t in range(begin, end) if mask[t]]
        defined = []
        for t in valid:
            if not math.isfinite(values[t]):
                scores[t] = math.nan
                continue
            positions = range(t + window.first, t + window.last + 1)
            inside = [p for p in positions if valid[0] <= p <= valid[-1]]
            terms = [values[p] for p in inside if mask[p] and math.isfinite(values[p])]
            cut = len(inside) < width and window.boundary in ("full", "carry")
            if cut or not terms or (window.invalid == "break" and len(terms) < len(inside)):
                continue
            scores[t] = {
                "mean": sum(terms) / (width if window.boundary == "zero" else len(terms)),
                "sum": sum(terms),
                "max": max(terms),
                "min": min(terms),
            }[window.aggregate]
            defined.append(scores[t])
        finite = [t for t in valid if math.isfinite(values[t])]
        if window.boundary == "carry" and finite:
            carried = sum(defined) / len(defined) if defined else values[finite[0]]
            for t in finite:
                scores[t] = carried if scores[t] == -math.inf else scores[t]
    return torch.tensor(scores)


def test_a_window_is_the_token_itself_unless_it_says_more():
    assert Window() == Window(0, 0) == Window(0, 0, "mean", "full", "skip") and Window(last=2) == Window.forward(3)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_every_aggregate_is_that_of_a_loop(backend, window):
    for seed, masked in few(backend, list(enumerate(("some", "none", "row")))):
        values, batch = dyadic(Layout((5, 0, 1, 9, 3), seed, masked, seed=seed))
        values[7] = math.nan
        expected = naive(values, batch, window)
        torch.testing.assert_close(run(backend, values, batch, window), expected, rtol=3e-7, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("boundary", "invalid"), list(itertools.product(("full", "shrink", "zero", "carry"), ("skip", "break")))
)
def test_padding_on_either_side_changes_no_score(backend, boundary, invalid):
    """Rows of 5, 0, 2 and 8 tokens, of which the last has a hole: packed, and in a rectangle with garbage around."""
    window = Window(-1, 2, "mean", boundary, invalid)
    lengths, hole = (5, 0, 2, 8), torch.arange(15) == 10
    values = torch.rand(15, generator=torch.Generator().manual_seed(0))
    packed = run(backend, values, hpo.PackedBatch.from_lengths(lengths, mask=~hole), window)
    inside = torch.zeros((4, 11), dtype=torch.bool)
    for row, (begin, length) in enumerate(zip((2, 0, 9, 3), lengths, strict=True)):
        inside[row, begin : begin + length] = True
    padded, mask = torch.full((4, 11), math.inf), inside.clone()
    padded[inside], mask[inside] = values, ~hole
    out = run(backend, padded, hpo.PackedBatch.from_padded(mask), window)
    assert torch.equal(out[inside], packed) and (out[~inside] == -math.inf).all()


@pytest.mark.long
def test_two_thousand_batches(backend):
    for seed in range(2000):
        layout = testing.random_layout(seed, longest=14)
        values, batch = dyadic(layout)
        window = WINDOWS[seed % len(WINDOWS)]
        torch.testing.assert_close(
            run(backend, values, batch, window), naive(values, batch, window), rtol=3e-7, atol=0, equal_nan=True
        )


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("aggregate", ["sum", "max", "min"])
@pytest.mark.parametrize("first, last", [(-7, 8), (-1200, 950)], ids=str)
def test_windows_over_rows_longer_than_a_tile(native_backends, first, last, aggregate):
    """The second window is wider than a CUDA block's shared memory."""
    window = Window(first, last, aggregate, "carry")
    values, batch = dyadic(Layout((3, 2300, 0, 1100, 1), 2, "some", seed=1))
    expected = run("cpu", values, batch, Window(first, last, aggregate, "full"))
    defined = expected[3:2303][torch.isfinite(expected[3:2303])]
    for backend in native_backends:
        if last > 100 and not tried(backend, True, False):
            continue
        out = run(backend, values, batch, window)
        assert torch.equal(out[expected > -math.inf], expected[expected > -math.inf])
        valid = torch.ones(2306, dtype=torch.bool) if batch.mask is None else batch.mask[:2306]
        carried = out[3:2303][valid[3:2303] & (expected[3:2303] == -math.inf)]
        torch.testing.assert_close(carried, defined.double().mean().float().expand_as(carried), rtol=2e-7, atol=0)


@pytest.mark.parametrize("backend", [name for name in NATIVE if name != "triton"])
@pytest.mark.parametrize("width", [2048, 2100, 4096])
def test_widths_around_the_shared_memory_of_a_block(width, backend):
    """CUDA folds windows of up to 2048 tokens in the memory of a block, and others in a workspace, digit by digit."""
    values, _ = dyadic(Layout((4100,), seed=5))
    through = torch.nn.functional.pad(values.double().cumsum(0), (1, 0))
    begin = (torch.arange(4100) - width + 1).clamp(min=0)
    window = Window(1 - width, 0, "sum", "shrink")
    scores = run(backend, values, hpo.PackedBatch.from_lengths([4100]), window)
    assert torch.equal(scores, (through[1:] - through[begin]).float())


@pytest.mark.skipif("cpu" not in NATIVE, reason="threads of the CPU")
@pytest.mark.parametrize("aggregate", ["sum", "max"])
def test_threads_share_no_window(aggregate):
    """Each has a scratch of its own; a pack is long enough that all are at work at once."""
    values, batch = dyadic(Layout((400_000, 7, 200_000), seed=6))
    window, before, scores = Window(-40, 40, aggregate, "shrink"), torch.get_num_threads(), []
    for threads in (1, 2, 3, 4):
        torch.set_num_threads(threads)
        scores.append(run("cpu", values, batch, window))
    torch.set_num_threads(before)
    assert all(torch.equal(each.nan_to_num(), scores[0].nan_to_num()) for each in scores)


def test_windows_wider_than_rows(backend):
    """Windows so wide that Triton builds them by doubling, and all cut by their rows."""
    values, batch = dyadic(Layout((150, 0, 5, 201), 3, "some", seed=2))
    values -= 2  # extrema of both signs
    windows = {"sum": (0, 129), "max": (-160, 10), "mean": (-300, 300), "min": (-140, -5)}
    for aggregate, (first, last) in windows.items():
        for boundary, invalid in few(backend, [("shrink", "skip"), ("carry", "skip"), ("full", "break")], 2):
            window = Window(first, last, aggregate, boundary, invalid)
            torch.testing.assert_close(
                run(backend, values, batch, window), naive(values, batch, window), rtol=3e-7, atol=0, equal_nan=True
            )


def test_moved_rows_keep_their_bits(backend):
    """Bits depend on the row alone, whatever lies beside it and wherever it lies."""
    layout = Layout((5, 70, 0, 1, 33), 2, "some", seed=3)
    values, batch = torch.rand(layout.tokens, generator=torch.Generator().manual_seed(0)), layout.batch()
    order = torch.tensor([4, 1, 3, 0, 2])
    moved, tokens = batch.select(order)
    for aggregate in few(backend, AGGREGATES, 2):
        for boundary in ("carry", "shrink"):
            window = Window(-3, 9, aggregate, boundary)
            assert torch.equal(run(backend, values[tokens], moved, window), run(backend, values, batch, window)[tokens])


@pytest.mark.parametrize("poison", [99.0, math.nan, -math.inf])
def test_masked_values_are_never_read(backend, poison):
    values, batch = dyadic(Layout((9, 12), 3, "some", seed=5))
    for window in few(backend, [Window(-2, 2, aggregate, "carry") for aggregate in reversed(AGGREGATES)], 1):
        poisoned = values.clone()
        poisoned[: batch.mask.numel()][~batch.mask] = poison
        poisoned[21:] = poison
        assert torch.equal(run(backend, poisoned, batch, window), run(backend, values, batch, window))


@pytest.mark.parametrize("planted", [1e6, -1e6])
def test_no_window_crosses_a_border(backend, planted):
    """The first token of the next row, the last of the row before, and the tail are far from 1."""
    values = torch.ones(12)
    values[[3, 8, 11]] = planted
    batch = hpo.PackedBatch(torch.tensor([0, 4, 8, 11]), total_tokens=12)
    spans, aggregates = ((-2, 2), (0, 3), (-3, 0)), ("max", "min", "sum")
    for (first, last), aggregate in few(backend, list(itertools.product(spans, aggregates)), 2):
        for boundary in ("shrink", "carry"):
            out = run(backend, values, batch, Window(first, last, aggregate, boundary))[4:8]
            assert out.abs().max() <= 4, (first, last, aggregate, boundary)


def test_reversal(backend):
    """Reversed rows and a reversed window give reversed aggregates."""
    values, batch = dyadic(Layout((7, 0, 12, 1), 0, "some", seed=7))
    order = torch.tensor([*range(6, -1, -1), *range(18, 6, -1), 19])
    mirrored = hpo.PackedBatch(batch.cu_seqlens, None if batch.mask is None else batch.mask[order], total_tokens=20)
    for aggregate, boundary in few(
        backend, list(itertools.product(("max", "mean", "sum", "min"), ("shrink", "full"))), 2
    ):
        out = run(backend, values[order], mirrored, Window(-1, 3, aggregate, boundary))
        assert torch.equal(out, run(backend, values, batch, Window(-3, 1, aggregate, boundary))[order])


@pytest.mark.parametrize("width", [1, 2, 8, 32])
def test_constants_stay_exact(backend, width):
    batch = hpo.PackedBatch.from_lengths([40, 3])
    constants = torch.rand(5, generator=torch.Generator().manual_seed(width)).tolist()
    for constant, aggregate in few(backend, list(itertools.product(constants, ("sum", "max", "mean", "min"))), 2):
        values = torch.full((43,), constant)
        expected = values * (width if aggregate == "sum" else 1)
        out = run(backend, values, batch, Window.forward(width, aggregate=aggregate, boundary="carry"))
        assert torch.equal(out[:40], expected[:40])
        assert torch.equal(out[40:], expected[40:] if width <= 3 else values[40:])  # the first value is carried


def test_extremes_of_windows_that_overlap(backend):
    """Every pair of a maximum's place and a width: a window that missed its first or last token would not see it."""
    batch = hpo.PackedBatch.from_lengths([24])
    for width in few(backend, [7, 1, 2, 3, 4, 5, 8, 12, 24], 2):
        for place in few(backend, [5, *range(24)], 3):
            values = torch.zeros(24)
            values[place] = 1.0
            out = run(backend, values, batch, Window.forward(width, aggregate="max"))
            assert [t for t in range(24) if out[t] == 1] == [t for t in range(25 - width) if t <= place < t + width]


def test_carried_by_hand(backend):
    """The second row has no full window and begins with an error and a masked token; the third has no valid token."""
    values = torch.tensor([1.0, 2.0, 4.0, 8.0, math.nan, 16.0, 3.0, 5.0, 7.0])
    mask = torch.tensor([True, True, True, True, True, False, True, True, False])
    batch = hpo.PackedBatch(torch.tensor([0, 4, 8, 9]), mask)
    out = run(backend, values, batch, Window.forward_exclusive(2, boundary="carry"))
    expected = torch.tensor([3.0, 6.0, 4.5, 4.5, math.nan, -math.inf, 3.0, 3.0, -math.inf])
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("boundary", ["carry", "full"])
@pytest.mark.parametrize("backend", ["reference", *NATIVE])
def test_errors_stay_with_their_tokens(boundary, backend):
    values = torch.tensor([math.nan, 2.0, 6.0, math.inf])
    out = run(backend, values, hpo.PackedBatch.from_lengths([4]), Window.forward(2, aggregate="max", boundary=boundary))
    assert out[0].isnan() and out[1:3].tolist() == [6.0, 6.0] and out[3].isnan()


@pytest.mark.parametrize("layout", [Layout(()), Layout((), tail=3), Layout((0, 0)), Layout((1,)), Layout((0, 1), 1)])
def test_degenerate_batches(backend, layout):
    values, batch = dyadic(layout)
    for window in (Window(0, 3, "max", "carry"), Window(-2, 2, "min", "shrink"), Window(1, 2, "sum")):
        assert torch.equal(run(backend, values, batch, window), naive(values, batch, window))


@pytest.mark.parametrize(
    "offsets", [[0], [0, 5, 2, 4, 6], [0, -3, 2, 6], [0, 2, 9, 4, 6], [-(2**62), 2**62, 3, -1], [6, 5, 4]], ids=str
)
def test_broken_offsets_are_harmless(backend, offsets):
    """Broken rows are in no window, with a mask or without. (Triton may leave out others beside them, too.)"""
    batch = hpo.PackedBatch(torch.tensor(offsets), total_tokens=6, validate=False)
    for window in (Window(0, 3, "max", "carry"), Window(-2, 2, "min", "shrink")):
        out = run(backend, torch.arange(6.0), batch, window)
        assert out.shape == (6,)
        masked = run(
            backend, torch.arange(6.0), batch.replace(mask=torch.ones(6, dtype=torch.bool), validate=False), window
        )
        assert torch.equal(masked, out) or backend == "triton"


@pytest.mark.long
@pytest.mark.parametrize(
    "call",
    [
        lambda values, batch: quantiles(values, batch, "0.7", scope="group", expand=True),
        lambda values, batch: quantiles(values, batch, "0.7", scope="call", rule=OrderRule.LINEAR),
        lambda values, batch: top_k(values, batch, 2),
        lambda values, batch: segment_aggregate(values, batch, "group").nan_to_num(-1),
        lambda values, batch: window_aggregate(values, batch, Window.causal(3, boundary="carry")).nan_to_num(-1),
    ],
)
def test_compiled_calls(call):
    torch.compiler.reset()
    values, batch = dyadic(Layout((7, 0, 5), seed=3))
    batch = batch.replace(group_ids=torch.tensor([1, 0, 1]))
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(values, batch), call(values, batch))


def test_windows_are_values():
    assert Window.forward(4) == Window(0, 3) and Window.forward_exclusive(4) == Window(1, 4)
    assert Window.causal(4) == Window(-3, 0) and Window.centred(5) == Window(-2, 2)
    window = Window.centred(3, aggregate="max", boundary="carry")
    assert len({window, pickle.loads(pickle.dumps(window))}) == 1
    values, batch = dyadic(Layout((5, 4), seed=1))
    assert torch.equal(window_mean(values, batch, 0, 2), window_aggregate(values, batch, Window.forward(3)))
    for rules in itertools.product(("full", "shrink", "zero", "carry"), ("skip", "break")):
        mine = EntropyWindow("mine", Fraction(1, 2), -1, 1, *rules)
        assert torch.equal(mine.score(values, batch), window_aggregate(values, batch, Window(-1, 1, "mean", *rules)))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Window(1, 0), "first: expected first <= last, got 1 and 0"),
        (lambda: Window(aggregate="median"), "aggregate: expected one of mean, sum, max, min, got 'median'"),
        (lambda: Window(boundary="wrap"), "boundary: expected one of full, shrink, zero, carry, got 'wrap'"),
        (lambda: Window(invalid="drop"), "invalid: expected one of skip, break, got 'drop'"),
        (lambda: Window(aggregate="max", boundary="zero"), "boundary: .* is for means and sums"),
        (lambda: Window.causal(0), "width: expected a width >= 1, got 0"),
        (lambda: Window.forward(2.5), "width: expected an integer, got 2.5"),
        (lambda: Window(last="3"), "last: expected an integer, got '3'"),
        (lambda: Window(0, 2**63 - 1), r"last: expected an offset from -2\^62 to 2\^62, got 9223372036854775807"),
        (lambda: EntropyWindow("w", Fraction(1, 2), first=0.0), "first: expected an integer, got 0.0"),
        (lambda: EntropyWindow("w", Fraction(1, 2), last=2**63 - 1), "last: expected an offset"),
        (lambda: EntropyWindow("w", Fraction(1, 2), 1), "first: expected first <= last, got 1 and 0"),
        (lambda: EntropyWindow("w", Fraction(1, 2), boundary="wrap"), "boundary: expected one of full, .*, got 'wrap'"),
        (lambda: EntropyWindow("w", Fraction(1, 2), invalid=1), "invalid: expected one of skip, break, got 1"),
        (lambda: EntropyWindow("w", Fraction(1, 2), rule=0), "rule: expected one of OrderRule .*, got 0"),
        (lambda: EntropyWindow("w", Fraction(1, 2), strict="no"), "strict: expected True or False, got 'no'"),
    ],
)
def test_wrong_windows_are_refused(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()
