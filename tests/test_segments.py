"""row_counts on every backend, by the batch and by itself: exact integers on any content of the offsets."""

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

import hpo_core as hpo
from hpo_core import ops, testing
from hpo_core.reference import segments as reference
from hpo_core.testing import Layout

anything = st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 12)


def counts(backend, mask, offsets, tokens):
    device = testing.device_of(backend)
    mask = None if mask is None else mask.to(device)
    return ops.row_counts(mask, offsets.to(device), tokens, backend).cpu()


@hypothesis.given(layout=testing.layouts(rows=8, longest=12))
def test_counts(backend, layout):
    batch = layout.batch()
    expected = reference.row_counts(batch.mask, batch.cu_seqlens, batch.total_tokens)
    assert torch.equal(counts(backend, batch.mask, batch.cu_seqlens, batch.total_tokens), expected)


@pytest.mark.parametrize("masked", ["none", "some", "all"])
def test_long_rows_and_many_rows(backend, masked):
    for lengths in ((0, 5000, 1, 0, 2049), tuple(k % 5 for k in range(2000))):
        batch = Layout(lengths, tail=7, masked=masked, seed=1).batch()
        expected = reference.row_counts(batch.mask, batch.cu_seqlens, batch.total_tokens)
        assert torch.equal(counts(backend, batch.mask, batch.cu_seqlens, batch.total_tokens), expected)


@hypothesis.given(offsets=st.lists(anything, min_size=1, max_size=7), masked=st.booleans())
@hypothesis.example(offsets=[0], masked=False)
@hypothesis.example(offsets=[0, 5, 2, 4, 6], masked=True)
def test_any_offsets(backend, offsets, masked):
    """Of rows that overlap, a token belongs to the last; a row outside the pack, or backwards, has none."""
    mask = torch.tensor([True, True, False, True, False, True, True, True]) if masked else None
    cu_seqlens = torch.tensor(offsets, dtype=torch.int64)
    assert torch.equal(counts(backend, mask, cu_seqlens, 8), reference.row_counts(mask, cu_seqlens, 8))


def test_no_tokens(backend):
    assert counts(backend, None, torch.tensor([0, 0, 0]), 0).tolist() == [0, 0]
    assert counts(backend, torch.zeros(0, dtype=torch.bool), torch.tensor([0]), 0).tolist() == []


def test_mask_that_starts_off_alignment(backend):
    mask = torch.rand(70, generator=torch.Generator().manual_seed(0)) > 0.5
    offsets = torch.tensor([0, 3, 3, 50, 66])
    for shift in range(1, 4):
        view = mask[shift : shift + 66]
        assert torch.equal(counts(backend, view, offsets, 66), reference.row_counts(view, offsets, 66))


def test_the_batch_counts_its_rows():
    batch = hpo.PackedBatch(torch.tensor([0, 3, 3, 5]), torch.tensor([1, 0, 1, 1, 1, 1]))
    assert batch.row_counts.tolist() == [2, 0, 2]


def test_reference_row_of_token():
    assert reference.row_of_token(torch.tensor([1, 3, 3, 4, 9, 4]), 6).tolist() == [-1, 0, 0, 2, -1, -1]
