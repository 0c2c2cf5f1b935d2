"""Several states of rows of logits that are merged at once: what merging them one by one gives, row by row."""

import functools
import io
import math

import pytest
import torch

import hpo_core as hpo
from hpo_core import logprob_states as states
from hpo_core.ops import linear_logprobs as ops
from hpo_core.ops.logprob_states import LogprobState, folded, mapped, merged

PARTS, ROWS = 7, 23
NOTHING = (-math.inf, 0.0, 0.0, -math.inf)

inverses = pytest.mark.parametrize("inverse", [1.0, 1 / 0.7, "each"])
distances = pytest.mark.parametrize("distance", [True, False], ids=["distance", "no distance"])


def drawn(parts=PARTS, rows=ROWS, distance=True):
    """States in float32 as kernels give them, ``[parts, rows]``: the target is in one part, ties of the greatest logit,
    parts and whole rows that are nothing, rows with NaN."""
    draw = torch.Generator().manual_seed(parts + rows)
    top = 3 * torch.randn(parts, rows, generator=draw)
    others, spread = torch.rand(2, parts, rows, generator=draw).mul(4).unbind()
    logit = torch.full_like(top, -math.inf)
    part = torch.randint(0, parts, (rows,), generator=draw)
    logit[part, torch.arange(rows)] = top[part, torch.arange(rows)] - torch.rand(rows, generator=draw)
    fields = [top, others, spread, logit]
    top[[1, 4], 2] = top[:, 2].max() + 1  # tied
    top[:, 3] = 0.5  # tied in every part
    for parts_of, row in ((0, 4), (parts - 1, 5), (slice(1, None), 6), (slice(None), 7)):
        for field, value in zip(fields, NOTHING, strict=True):
            field[parts_of, row] = value
    for field in fields:
        field[2, 8] = math.nan
        field[0, 9] = math.nan
    return LogprobState(top, others, spread if distance else None, logit)


def inverse_of_rows(inverse, rows=ROWS):
    return 1 / torch.linspace(0.5, 2.0, rows, dtype=torch.float64) if inverse == "each" else inverse


def part_of(states, index):
    return mapped(states, lambda field: field[index])


def first_and_others(states):
    return mapped(part_of(states, 0), torch.Tensor.double), part_of(states, slice(1, None))


def relative(got, expected):
    """The largest relative error; -inf, NaN and 0 are where they were."""
    assert got.dtype == expected.dtype == torch.float64
    assert torch.equal(got.isnan(), expected.isnan())
    equal = (got == expected) | expected.isnan()
    assert torch.isfinite(got[~equal]).all() and (expected[~equal] != 0).all()
    if equal.all():
        return 0.0
    return float(((got - expected) / expected)[~equal].abs().max())


@inverses
@distances
@pytest.mark.parametrize("parts", [2, 3, PARTS])
def test_parts_that_are_merged_at_once_are_those_merged_one_by_one(parts, distance, inverse):
    states = drawn(max(parts, 5), distance=distance)
    states, inverse = part_of(states, slice(parts)), inverse_of_rows(inverse)
    got = merged(*first_and_others(states), inverse)
    of_parts = [part_of(states, at) for at in range(parts)]
    expected = functools.reduce(lambda *both: folded(both, inverse), of_parts)
    assert (got.distance is None) == (expected.distance is None) == (not distance)
    for mine, theirs, folds in zip(got, expected, folded(of_parts, inverse), strict=True):
        assert theirs is None or (relative(mine, theirs) < 1e-14 and torch.equal(bits(mine), bits(folds)))
    for field, value in zip(got, NOTHING, strict=True):
        assert field is None or (field[7] == value).all()  # nothing and nothing is nothing
    assert got.others[3] >= parts - 1  # of tied logits all but one count among the others


def test_worked_numbers():
    """Logits 2, 1 | 2, 0 | nothing | 0, whose target is the second of the first part."""
    e = math.e
    top = torch.tensor([[2.0], [2.0], [-math.inf], [0.0]])
    others = torch.tensor([[1 / e], [e**-2], [0.0], [0.0]], dtype=torch.float64)
    spread = torch.tensor([[1 / e / (1 + 1 / e)], [2 * e**-2 / (1 + e**-2)], [0.0], [0.0]], dtype=torch.float64)
    logit = torch.tensor([[1.0], [-math.inf], [-math.inf], [-math.inf]])
    got = merged(*first_and_others(LogprobState(top, others, spread, logit)), 1.0)
    assert got.top == 2 and got.target_logit == 1
    assert math.isclose(got.others, 1 + 1 / e + 2 * e**-2, rel_tol=1e-15)
    assert math.isclose(got.distance, (1 / e + 4 * e**-2) / (2 + 1 / e + 2 * e**-2), rel_tol=1e-15)


@distances
def test_a_state_goes_to_a_checkpoint_and_to_a_device(distance):
    state, file = drawn(distance=distance), io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    again, elsewhere = torch.load(file, weights_only=True), state.to("meta")
    assert type(again) is type(elsewhere) is LogprobState and (again.distance is None) is (not distance)
    for mine, theirs, moved in zip(state, again, elsewhere, strict=True):
        assert mine is theirs is moved is None or (moved.is_meta and torch.allclose(mine, theirs, 0, 0, equal_nan=True))


def bits(field):
    return field.contiguous().view(torch.int64)


@inverses
@distances
def test_the_bits_of_a_row_depend_on_the_row_alone(distance, inverse):
    states, inverse = drawn(rows=300, distance=distance), inverse_of_rows(inverse, 300)
    expected = merged(*first_and_others(states), inverse)
    draw = torch.Generator().manual_seed(0)
    for shape in ((1,), (2,), (3,), (7,), (64,), (299,), (5, 16), (16, 5)):
        rows = torch.randint(0, 300, shape, generator=draw)
        of_rows = inverse[rows] if isinstance(inverse, torch.Tensor) else inverse
        got = merged(*first_and_others(mapped(states, lambda field, rows=rows: field[:, rows])), of_rows)
        for mine, all_rows in zip(got, expected, strict=True):
            assert all_rows is None or torch.equal(bits(mine), bits(all_rows[rows]))


# ----------------------------------------------------------------------------------------------------- of a vocabulary


BLOCK, VOCABULARY, WIDTH = (4, 2048), 5 * 2048 - 5, 6  # two blocks of the vocabulary are merged at once, the last alone


def test_parts_are_compiled():
    def both(logits, targets, upstream):
        halves = [(logits[:, at : at + 5], at) for at in (0, 5)]
        state = states.merge([states.part(each, targets, first=at, vocabulary=10) for each, at in halves])
        grads = [states.part_gradient(each, targets, state, upstream, first=at, vocabulary=10) for each, at in halves]
        return states.finish(state, targets).logp, *grads

    given = torch.randn(3, 10, generator=torch.Generator().manual_seed(0)), torch.tensor([2, 7, -100]), torch.ones(3)
    found = torch.compile(both, fullgraph=True, backend="aot_eager")(*given)
    assert all(map(torch.equal, found, both(*given)))


@pytest.mark.parametrize("readable", [True, False], ids=["rows are counted", "rows are listed"])
def test_a_row_of_more_blocks_than_are_merged_at_once(readable, backend):
    """Its bits do not depend on the number of rows, and it is that of the definition; an ignored row is not read."""
    draw = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(9, WIDTH, generator=draw), torch.randn(VOCABULARY, WIDTH, generator=draw)
    targets = torch.randint(0, VOCABULARY, (9,), generator=draw)
    targets[:6] = torch.tensor([0, 2047, 2048, 6143, 8192, VOCABULARY - 1])  # at the ends of blocks
    targets[7], hidden[7] = -100, math.nan
    everything, together = torch.arange(9), []

    def counted(state, parts, inverse):
        together.append(len(parts.top))
        return merged(state, parts, inverse)

    def call(rows):
        return hpo.linear_token_logprobs(hidden[rows], weight, targets[rows], None, 0.7, backend=backend, block=BLOCK)

    exact = hpo.linear_token_logprobs(hidden.double(), weight.double(), targets, temperature=0.7, backend="reference")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ops, "merged", counted)
        patched.setattr(ops, "_is_readable", lambda tensor: readable)  # not on a GPU
        expected = call(everything)
        assert together == [2, 2, 1]
        for mine, true in zip(expected, exact, strict=True):
            assert torch.allclose(mine.double(), true, 2e-6, 2e-6) and mine[7] == 0
        for rows in (everything[:1], everything[4:5], everything[-3:].flip(0), everything[1:6]):
            for mine, all_rows in zip(call(rows), expected, strict=True):
                assert torch.equal(mine.view(torch.int32), all_rows[rows].view(torch.int32))


def test_states_that_cannot_be_merged():
    own = states.part(torch.tensor([[2.0, 1.0]]), torch.tensor([1]), first=0, vocabulary=4)
    with pytest.raises(TypeError, match=r"^states: expected a list of at least one LogprobState, got an empty list$"):
        states.merge([])
    with pytest.raises(ValueError, match=r"^states\[1\]: expected device cpu \(that of the first\), got meta"):
        states.merge([own, mapped(own, lambda each: each.to("meta"))])
