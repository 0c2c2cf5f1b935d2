"""Rows and groups on every backend: counts on any content of the offsets, statistics of groups, scans along rows."""

import functools
import importlib
import itertools
import math
import sys
from difflib import SequenceMatcher

import hypothesis
import numpy
import pytest
import torch
from breadth import at_length, at_most, is_interpreted  # noqa: F401 (the first is a fixture)
from conftest import NATIVE
from hypothesis import strategies as st

import hpo_core as hpo
from hpo_core import ops, testing
from hpo_core.ops.gates import check_inputs
from hpo_core.reference import segments as reference
from hpo_core.segments import recurrence
from hpo_core.specs import Denominator, PolicyLossInputs
from hpo_core.testing import Layout

anything = st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 12)


def counts(backend, mask, offsets, tokens):
    device = testing.device_of(backend)
    mask = None if mask is None else mask.to(device)
    return ops.row_counts(mask, offsets.to(device), tokens, backend).cpu()


def assert_weights(backend, mask, offsets, tokens, factor=3.0):
    """Bitwise: each weight is made of whole numbers by one or two divisions."""
    device = testing.device_of(backend)
    moved = None if mask is None else mask.to(device)
    for denominator in Denominator:
        weights = ops.row_weights(moved, offsets.to(device), tokens, denominator, factor, backend).cpu()
        assert torch.equal(weights, reference.row_weights(mask, offsets, tokens, denominator, factor)), denominator


def assert_spans(backend, mask, offsets):
    device = testing.device_of(backend)
    spans = ops.row_spans(mask.to(device), offsets.to(device), mask.numel(), backend).cpu()
    assert torch.equal(spans, reference.row_spans(mask, offsets, mask.numel()))


@hypothesis.given(layout=testing.layouts(rows=8, longest=12))
def test_counts(backend, layout):
    batch = layout.batch()
    expected = reference.row_counts(batch.mask, batch.cu_seqlens, batch.total_tokens)
    assert torch.equal(counts(backend, batch.mask, batch.cu_seqlens, batch.total_tokens), expected)
    assert_weights(backend, batch.mask, batch.cu_seqlens, batch.total_tokens)


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("masked", ["none", "some", "all"])
def test_long_rows_and_many_rows(backend, masked):
    for lengths in ((0, at_most(backend, 5000), 1, 0, 1025), tuple(k % 3 for k in range(1030))):
        batch = Layout(lengths, tail=7, masked=masked, seed=1).batch()
        expected = reference.row_counts(batch.mask, batch.cu_seqlens, batch.total_tokens)
        assert torch.equal(counts(backend, batch.mask, batch.cu_seqlens, batch.total_tokens), expected)
        assert_weights(backend, batch.mask, batch.cu_seqlens, batch.total_tokens)


def test_reference_row_weights():
    mask, offsets = torch.tensor([True, True, False, True, True, True]), torch.tensor([0, 3, 3, 6])
    by_hand = {"TOKENS": [0.2] * 3, "ROWS": [0.5] * 3, "ROWS_AND_TOKENS": [0.25, 0.0, 1 / 6]}
    for denominator in Denominator:
        weights = reference.row_weights(mask, offsets, 6, denominator, 1.0)
        torch.testing.assert_close(weights, torch.tensor(by_hand[denominator.name]))


def test_weights_of_rows_in_many_blocks(backend):
    """Programs of Triton's take 4 rows and blocks of CUDA's 8: the sum is that of all."""
    batch = Layout(tuple(k % 3 for k in range(40)), tail=7, masked="some", seed=1).batch()
    assert_weights(backend, batch.mask, batch.cu_seqlens, batch.total_tokens)


@pytest.mark.parametrize("backend", [each for each in NATIVE if each in ("triton", "cuda_emulated")])  # launches count
def test_weights_are_one_launch(backend, monkeypatch):
    """Triton's programs count themselves in a number that is 0 again for the next launch."""
    batch = Layout((3, 0, 2, 9, 1, 4), masked="some", seed=1).batch()
    if backend == "cuda_emulated":
        launches = importlib.import_module("hpo_core._cuda_emulated").launches
    else:
        arrived = torch.zeros(1, dtype=torch.int32, device=testing.device_of(backend))
        monkeypatch.setattr(importlib.import_module("hpo_core._triton.segments"), "counter", lambda device: arrived)
        launches = lambda: dict(importlib.import_module("hpo_core._triton.launch").launches)  # noqa: E731
    before = launches()
    for _ in range(2):
        assert_weights(backend, batch.mask, batch.cu_seqlens, batch.total_tokens)
    started = {kernel: number - before.get(kernel, 0) for kernel, number in launches().items()}
    kernel = {"cuda_emulated": "weigh_rows", "triton": "_count_rows"}[backend]
    assert {name: number for name, number in started.items() if number} == {kernel: 2 * len(Denominator)}


@pytest.mark.parametrize("lengths", [(20_000, 3, 17_000), (5, 16_384, 16_385, 0)])
def test_counts_of_rows_for_a_whole_block(backend, lengths):
    """A warp of CUDA's counts up to 16,384 tokens of a masked row alone."""
    batch = Layout(lengths, tail=7, masked="some", seed=1).batch()
    expected = torch.stack([row.sum() for row in batch.mask[: sum(lengths)].split(lengths)])
    assert torch.equal(counts(backend, batch.mask, batch.cu_seqlens, batch.total_tokens), expected)


@hypothesis.given(offsets=st.lists(anything, min_size=1, max_size=7), masked=st.booleans())
@hypothesis.example(offsets=[0], masked=False)
@hypothesis.example(offsets=[0, 5, 2, 4, 6], masked=True)
def test_any_offsets(backend, offsets, masked):
    """A token belongs to the last of overlapping rows; a row outside the pack, or with descending offsets, has none."""
    mask = torch.tensor([True, True, False, True, False, True, True, True]) if masked else None
    cu_seqlens = torch.tensor(offsets, dtype=torch.int64)
    assert torch.equal(counts(backend, mask, cu_seqlens, 8), reference.row_counts(mask, cu_seqlens, 8))
    assert_weights(backend, mask, cu_seqlens, 8)
    if masked:
        assert_spans(backend, mask, cu_seqlens)


def test_no_tokens(backend):
    assert counts(backend, None, torch.tensor([0, 0, 0]), 0).tolist() == [0, 0]
    assert_weights(backend, None, torch.tensor([0, 0, 0]), 0)
    assert_weights(backend, None, torch.tensor([0]), 0)
    assert counts(backend, torch.zeros(0, dtype=torch.bool), torch.tensor([0]), 0).tolist() == []


def test_mask_that_starts_off_alignment(backend):
    mask = torch.rand(70, generator=torch.Generator().manual_seed(0)) > 0.5
    offsets = torch.tensor([0, 3, 3, 50, 66])
    for shift in range(1, 4):
        view = mask[shift : shift + 66]
        assert torch.equal(counts(backend, view, offsets, 66), reference.row_counts(view, offsets, 66))
        assert_spans(backend, view, offsets)


def test_spans_of_long_rows_with_few_valid_tokens(backend):
    """Up to three steps of a warp or a program from either end, and beyond the last token of the row before."""
    offsets, draw = torch.tensor([0, 1700, 1700, 1701, 3900, 4000]), torch.Generator().manual_seed(0)
    for size in (1, 2, 3, 8):
        mask = torch.zeros(4001, dtype=torch.bool)
        mask[torch.randint(0, 3900, (size,), generator=draw)] = True
        assert_spans(backend, mask, offsets)
    assert_spans(backend, torch.ones(4001, dtype=torch.bool), offsets)
    assert_spans(backend, torch.zeros(0, dtype=torch.bool), torch.tensor([0]))


def test_reference_row_spans():
    mask = torch.tensor([False, True, False, True, True, False])
    assert reference.row_spans(mask, torch.tensor([0, 3, 3, 5, 6]), 6).tolist() == [0, 1, 2, 3, 3, 3, 5, 5, 5, 6]


def test_the_batch_counts_its_rows():
    batch = hpo.PackedBatch(torch.tensor([0, 3, 3, 5]), torch.tensor([1, 0, 1, 1, 1, 1]))
    assert batch.row_counts.tolist() == [2, 0, 2]


def test_reference_row_of_token():
    assert reference.row_of_token(torch.tensor([1, 3, 3, 4, 9, 4]), 6).tolist() == [-1, 0, 0, 2, -1, -1]


# ----------------------------------------------------------------------------------------------------------- groups


def random_units(seed, units):
    draw = torch.Generator().manual_seed(seed)
    values = 100 + torch.randn(units, generator=draw)
    values[torch.randint(0, 9, (units,), generator=draw) == 0] = math.nan
    ids = torch.randint(-1, units // 5 + 1, (units,), generator=draw)
    weights = torch.randint(0, 4, (units,), generator=draw) / 2.0
    return values, ids, weights, torch.randint(0, 4, (units,), generator=draw) > 0


def is_costly(backend, units, left_out):
    """Whether the kernel is slow, and its inputs are neither all nor none."""
    return is_interpreted(backend) and units == 9000 and left_out in LEFT_OUT[1:-1]


LEFT_OUT = [(), (1,), (2,), (3,), (1, 2, 3)]


@pytest.mark.parametrize(
    ("backend", "units", "left_out"),
    [
        pytest.param(*case, id="-".join(map(str, case)), marks=[pytest.mark.long] if is_costly(*case) else [])
        for case in itertools.product(NATIVE, (0, 1, 40, 9000), LEFT_OUT)
    ],
)
def test_group_statistics(backend, units, left_out):
    given = [None if i in left_out else tensor for i, tensor in enumerate(random_units(units, units))]
    if units == 9000:  # groups as large as sizes of the grid, and few of them: the reference is a loop
        given[1] = None if given[1] is None else given[1] % 7 * (1 << 40)
    expected = ops.group_statistics(*given, "reference")
    moved = [None if tensor is None else tensor.to(testing.device_of(backend)) for tensor in given]
    got = ops.group_statistics(*moved, backend).cpu()
    assert got.dtype == torch.float64 and got.shape == (6, units)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[4:], expected[4:])
    assert torch.allclose(got, expected, rtol=1e-12, atol=1e-9)


def test_units_of_one_group_meet_in_the_table_in_any_order(monkeypatch):
    """Threads of CUDA find the entry of their group at once where there are more units than a block takes."""
    if not hpo.backends()["cuda_emulated"]:
        pytest.skip("cuda_emulated is not built")
    values, ids = torch.linspace(-1.0, 1.0, 4_100), torch.arange(4_100) % 3
    found = set()
    for order in ("forward", "random:1", "random:2"):
        monkeypatch.setenv("HPO_EMULATION_ORDER", order)
        found.add(ops.group_statistics(values, ids, None, None, "cuda_emulated").numpy().tobytes())
    assert len(found) == 1


def test_statistics_are_those_of_values_and_weights_in_float32():
    values = torch.tensor([16777217.0, 16777217.0, 1e39, 5.0], dtype=torch.float64)
    weights = torch.tensor([1.0, 1.0, 1.0, 1e-50], dtype=torch.float64)
    ids = torch.tensor([0, 0, 1, 2])
    rounded, exact = (hpo.segments.statistics(values, ids, weights=weights, backend=b) for b in (None, "reference"))
    assert rounded.members.tolist() == [2, 2, 0, 0] and exact.members.tolist() == [2, 2, 1, 1]
    assert rounded.mean[0] == 16777216 and exact.mean[0] == 16777217


def test_equal_values_have_no_deviation(backend):
    values, ids = torch.full((999,), 0.1), torch.arange(999) % 4
    table = ops.group_statistics(*(each.to(testing.device_of(backend)) for each in (values, ids)), None, None, backend)
    assert not table[3].any() and torch.equal(table[2].cpu(), values.double())


# ------------------------------------------------------------------------------------------------------------ scans


@hypothesis.given(layout=testing.layouts(rows=6, longest=70), seed=st.integers(0, 999))
def test_recurrence(backend, layout, seed):
    batch = layout.batch()
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(batch.total_tokens, generator=draw)
    gains = torch.rand(batch.total_tokens, generator=draw) * 1.1
    gains[gains < 0.2] = 0.0
    arguments = (values.double(), gains.double(), batch.cu_seqlens)
    expected = ops.recurrence(*arguments, "reference")
    size = ops.recurrence(arguments[0].abs(), *arguments[1:], "reference")
    got = ops.recurrence(*(each.to(testing.device_of(backend)) for each in arguments), backend).cpu()
    assert bool(((got - expected).abs() <= 1e-14 * size).all())
    rounded = recurrence(
        *(each.to(testing.device_of(backend)) for each in (values, gains, batch.cu_seqlens)), backend=backend
    )
    assert rounded.dtype == torch.float32 and torch.equal(rounded.cpu(), got.float())


def test_a_long_recurrence(backend):
    units = 5000
    ones, cu_seqlens = torch.ones(units, dtype=torch.float64), torch.tensor([0, 3, units])
    given = (each.to(testing.device_of(backend)) for each in (ones, ones, cu_seqlens))
    got = ops.recurrence(*given, backend).cpu()
    assert torch.equal(got, torch.cat([torch.arange(3, 0, -1.0), torch.arange(units - 3, 0, -1.0)]).double())


def test_a_gain_is_not_rounded(backend):
    """Over 20,000 units the gain 0.9999 in float32 is off by 3e-4."""
    units, where = 20_000, testing.device_of(backend)
    last, batch = torch.zeros(units), hpo.PackedBatch.from_lengths([units]).to(where)
    last[-1] = 1.0
    gains = torch.full((units,), 0.9999, dtype=torch.float64)
    found = recurrence(last.to(where), gains.to(where), batch.cu_seqlens, backend=backend)
    for same in (gains[:1].to(where).expand(units), torch.stack((gains, gains + 9), 1).to(where)[:, 0]):
        assert torch.equal(recurrence(last.to(where), same, batch.cu_seqlens, backend=backend), found)
    returns = hpo.advantages.reinforce_pp(last.to(where), batch, gamma=0.9999, whitened=False, backend=backend)
    for each in (found, returns):
        assert each.dtype == torch.float32 and each[0].item() == pytest.approx(0.9999 ** (units - 1), rel=1e-6)


def test_a_recurrence_is_never_minus_0(backend):
    def op(*given):
        return ops.recurrence(*given, backend)

    public = functools.partial(recurrence, backend=backend)
    for scan, dtype, size in ((op, torch.float64, 1e-300), (public, torch.float32, 1e-30)):
        values, gains = torch.tensor([0.0, -size], dtype=dtype), torch.full((2,), size, dtype=dtype)
        given = (each.to(testing.device_of(backend)) for each in (values, gains, torch.tensor([0, 2])))
        got = scan(*given)  # no number of this size holds their product
        assert got[0] == 0 and not torch.signbit(got[0])


def test_nothing_times_huge_gains_is_nothing(backend):
    """Their product overflows where a scan composes maps as a tree."""
    given = torch.zeros(64).double(), torch.full((64,), 1e10).double(), torch.tensor([0, 64])
    got = ops.recurrence(*(each.to(testing.device_of(backend)) for each in given), backend)
    assert not got.any()


@pytest.mark.skipif(not hpo.backends()["triton"], reason="Triton is not available")
def test_composed_gains_stay_finite():
    """The interpreter scans one by one: here the maps of 64 equal units are composed as on a GPU."""
    import triton
    import triton.language as tl
    from hpo_core._triton.segments import _compose

    @triton.jit
    def kernel(maps, COMPOSE: tl.constexpr):
        gain, value = tl.load(maps), tl.load(maps + 1)
        for _ in range(6):
            gain, value = COMPOSE(gain, value, gain, value)
        tl.store(maps, gain)
        tl.store(maps + 1, value)

    maps = torch.tensor([1e10, 0.0], dtype=torch.float64, device=testing.device_of("triton"))
    kernel[(1,)](maps, _compose)
    assert maps.tolist() == [sys.float_info.max, 0.0]


@pytest.mark.parametrize("cu_seqlens", [[0, 9], [-3, 2], [3, 1], [0, 2, 5, 4], [5, 5]])
def test_broken_offsets_are_no_rows(backend, cu_seqlens):
    """With any offsets nothing outside is read or written, and valid rows keep their results."""
    given = (torch.arange(4.0).double(), torch.ones(4).double(), torch.tensor(cu_seqlens))
    expected = ops.recurrence(*given, "reference")
    got = ops.recurrence(*(each.to(testing.device_of(backend)) for each in given), backend)
    assert torch.equal(got.cpu(), expected)


def test_the_scan_of_a_row_does_not_depend_on_its_position(backend):
    """The bits of a row are the same at any position in the pack."""
    draw = torch.Generator().manual_seed(0)
    values, gains = (torch.rand(100, generator=draw).double() for _ in range(2))
    device = testing.device_of(backend)
    alone = ops.recurrence(values[30:].to(device), gains[30:].to(device), torch.tensor([0, 70]).to(device), backend)
    cu_seqlens = torch.tensor([0, 30, 100]).to(device)
    assert torch.equal(ops.recurrence(values.to(device), gains.to(device), cu_seqlens, backend)[30:], alone)


FEW, MANY, ONE = (torch.empty(size, dtype=torch.int64, device="meta") for size in (2, 2**30 + 2, 1))
LEAVES = PolicyLossInputs(
    ONE.float(), None, ONE.float(), ONE.float(), FEW, **dict.fromkeys(("leaf_begin", "leaf_end", "leaf_row"), MANY[1:])
)
TOO_MANY = (
    ("cu_seqlens", lambda: hpo.PackedBatch(MANY, total_tokens=4, validate=False)),
    ("cu_seqlens", lambda: torch.ops.hpo_core.row_counts(None, MANY, 4, "")),
    ("cu_steps", lambda: hpo.PackedBatch(FEW, total_tokens=4, validate=False, cu_steps=MANY)),
    ("steps", lambda: hpo.PackedBatch(FEW, total_tokens=4, validate=False, steps=MANY[1:, None].expand(-1, 2))),
    ("leaf_begin", lambda: check_inputs(LEAVES, 1, ())),
)


@pytest.mark.parametrize(("name", "call"), TOO_MANY)
def test_more_rows_or_segments_than_kernels_can_number_are_refused(name, call):
    """A batch refuses them, and so do operators, which users may call themselves."""
    error = rf"^{name}: expected at most 2\^30 rows or segments, .* got 1073741825; make"
    with pytest.raises(ValueError, match=error):
        call()


def test_units_of_no_chain_are_in_none_whatever_their_negative_ids():
    ids = torch.tensor([3, -1, -7, 3, -(2**63), 5])
    for positions in (None, torch.arange(6)):
        order, cu_seqlens, chain = hpo.segments.chains(ids, positions)
        assert chain.tolist() == [-1, -1, -1, 0, 0, 1] and ids[order[3:]].tolist() == [3, 3, 5]
        assert cu_seqlens.tolist() == [3, 5, 6, 6, 6, 6, 6]


def test_ids_of_no_units_may_be_the_floats_that_torch_makes_of_an_empty_list():
    nothing = torch.tensor([])
    for keys in ([nothing], [nothing, nothing.to(torch.int32)]):
        found = hpo.segments.dense_ids(*keys)
        assert (found.dtype, found.shape) == (torch.int64, (0,))
    assert hpo.segments.chains(nothing).order.shape == (0,)
    assert hpo.segments.statistics(nothing, nothing).mean.shape == (0,)


def test_ids_of_names():
    """Ids of texts are fixed numbers, the same in every process; integers stay."""
    names = ["door closed", b"door closed", 7, numpy.int32(-1), numpy.zeros(2).tobytes()]
    first, same, seven, none, other = hpo.segments.ids_of(names).tolist()
    assert (first, same, seven, none) == (8425330602167090695, 8425330602167090695, 7, -1)
    assert other >= 0 and other != first
    assert (
        hpo.segments.ids_of(["a\ud800"]).tolist() != hpo.segments.ids_of(["a"]).tolist()
    )  # a torn character of UTF-16
    with pytest.raises(TypeError, match=r"names: expected several names, got 3; pass a list"):
        hpo.segments.ids_of(3)
    with pytest.raises(TypeError, match=r"group_ids: expected a tensor, got .*ndarray.*hpo_core\.segments\.ids_of"):
        hpo.advantages.grpo(torch.ones(1), numpy.array(["red"], dtype=object))
    with pytest.raises(TypeError, match=r"names: expected strings, bytes or integers, got 1\.5"):
        hpo.segments.ids_of([1.5])
    with pytest.raises(ValueError, match=r"names: expected integers of 64 bits with a sign, got 18446744073709551615"):
        hpo.segments.ids_of([2**64 - 1])
    with pytest.raises(TypeError, match="names: expected several names, got 'red'; pass a list"):
        hpo.segments.ids_of("red")


def clusters_of(texts, prompts, threshold):
    """The place of the first text of each text's cluster, as a loop that compares all."""
    firsts, found = [], []
    for place, text in enumerate(texts):
        for first in firsts:
            same = prompts is None or prompts[place] == prompts[first]
            if same and SequenceMatcher(None, text, texts[first]).ratio() >= threshold:
                found.append(first)
                break
        else:
            firsts.append(place)
            found.append(place)
    return found


@hypothesis.given(st.data())
def test_similar_texts_have_the_ids_of_the_first_that_they_resemble(data):
    often = "ab " * 80  # in long texts frequent characters match nothing by themselves
    named = ["the door is open", "the door is shut", often, f"b{often}", f"{often}b"]
    observations = st.text("ab ", min_size=0, max_size=8) | st.sampled_from(named)
    texts = data.draw(st.lists(observations, max_size=12))
    prompts = data.draw(st.none() | st.lists(st.sampled_from("pq"), min_size=len(texts), max_size=len(texts)))
    threshold = data.draw(st.sampled_from([0.3, 0.5, 0.75, 1.0]))
    found = hpo.segments.similar_ids_of(texts, threshold, prompts=prompts)
    firsts = [texts[first] for first in clusters_of(texts, prompts, threshold)]
    assert torch.equal(found, hpo.segments.ids_of(firsts)) and found.dtype == torch.int64


def test_similar_texts_by_hand():
    """Two times nine matching characters of twenty are .9. The first two of three differ by two characters, each from
    the third by one: the one that comes first decides."""
    several = ["abcdefghij", "abcdefghXY", "abcdefghiY"]
    ids = [hpo.segments.ids_of([text]).item() for text in several]
    similar = hpo.segments.similar_ids_of
    assert similar(several, 0.9).tolist() == [ids[0], ids[1], ids[0]]
    assert similar(several[::-1], 0.9).tolist() == [ids[2]] * 3
    assert similar(several).tolist() == ids  # .95
    assert similar([several[0], several[2]], 0.9, prompts=["p", "q"]).tolist() == [ids[0], ids[2]]
    assert similar(iter(several), 0.9, prompts=(each for each in (7, 7, 7))).tolist() == [ids[0], ids[1], ids[0]]
    assert similar([]).shape == (0,)
    for call, message in (
        (lambda: similar("red"), "texts: expected several strings, got 'red'; pass a list"),
        (lambda: similar([b"red"]), "texts: expected strings, got b'red'; ids_of takes other names"),
        (
            lambda: similar(["red"], prompts=torch.zeros(1).long()),
            r"prompts: expected names, got a tensor; use prompts\.tolist\(\)",
        ),
        (lambda: similar(["red"], "0.9"), "threshold: expected a number, got '0.9'; write it without quotes"),
    ):
        with pytest.raises(TypeError, match=message):
            call()
    for threshold in (0.0, 1.5, math.nan):
        with pytest.raises(ValueError, match=r"^threshold: expected a (ratio|number)"):
            similar(several, threshold)
    with pytest.raises(ValueError, match=r"^prompts: expected 3 names \(one per text\), got 1"):
        similar(several, prompts=["p"])
