"""An invalid mask or count is refused, or makes the loss NaN: it never silently counts other tokens."""

import math

import pytest
import torch

import hpo_core as hpo
from hpo_core import PackedBatch, aggregation

INF, NAN = math.inf, math.nan
OFFSETS = torch.tensor([0, 3])
NO_MASKS = {"additive": [0.0, 0.0, -INF], "NaN": [1.0, NAN, 1.0], "half": [1.0, 0.5, 1.0], "floats": [1.0, 0.0, 1.0]}
WAYS = {
    "packed": lambda mask: PackedBatch(OFFSETS, mask),
    "packed, values unseen": lambda mask: PackedBatch(OFFSETS, mask, validate=False),
    "padded": lambda mask: PackedBatch.from_padded(mask[None]),
    "the loss": lambda mask: hpo.policy_loss(torch.zeros(1, 3), None, torch.ones(1), mask[None]),
    "replaced": lambda mask: PackedBatch(OFFSETS).replace(mask=mask),
    "a window": lambda mask: hpo.entropy.forking_tokens().fit(torch.ones(1, 3), mask[None]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("values", NO_MASKS.values(), ids=NO_MASKS)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_masks_of_floats_are_refused(way, values, dtype):
    name = str(dtype).removeprefix("torch.")
    message = rf"mask: expected bool or integers 0 and 1, got {name}; use mask.bool\(\) .*, mask == 0 if it is additive"
    with pytest.raises(TypeError, match=message):
        way(torch.tensor(values).to(dtype))


def test_integers_of_other_values():
    """Values are sequence numbers, or -1 and -100 for ignored tokens."""
    for other in (2, -1, -100):
        mask = torch.tensor([1, 0, other])
        with pytest.raises(ValueError, match=f"mask: expected 0 and 1, got {other} at token 2"):
            PackedBatch(OFFSETS, mask)
        assert PackedBatch(OFFSETS, mask, validate=False).row_counts.tolist() == [2]  # values are not read


def test_padded_integers_of_other_values():
    """Ids of tokens, or labels with -100, in place of a mask: each of them would count."""

    def loss(mask):
        return hpo.policy_loss(torch.zeros(1, 3), None, torch.ones(1), mask)

    for values, got, token in ([5, 0, 7], 5, 0), ([1, 0, -100], -100, 2):
        mask = torch.tensor([values])
        for way in PackedBatch.from_padded, loss:
            with pytest.raises(ValueError, match=f"mask: expected 0 and 1, got {got} at token {token}; compare first"):
                way(mask)
        assert PackedBatch.from_padded(mask, validate=False).row_counts.tolist() == [2]


TOTALS = (NAN, -5, -1.0, INF, -INF)
MODES = {
    "token_mean": aggregation.token_mean,
    "seq_mean_token_mean": aggregation.seq_mean_token_mean,
    "seq_mean_token_sum": aggregation.seq_mean_token_sum,
    "fixed_length": lambda batch, **keywords: aggregation.fixed_length(batch, 9, **keywords),
    "prompt_mean": aggregation.prompt_mean,
}


@pytest.fixture
def batch():
    return PackedBatch.from_lengths([3, 1], group_ids=torch.tensor([0, 0]))


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_totals_that_are_no_counts(mode, batch):
    for total in TOTALS:
        with pytest.raises(ValueError, match=f"total: expected a count >= 0, got {total}"):
            mode(batch, total=total)
        if total != INF:  # a tensor is not read, but the loss shows it
            assert mode(batch, total=torch.tensor(total)).isnan().all()
    assert not mode(batch, total=0).any() and not mode(batch, total=torch.tensor(0)).any()  # an empty step


def test_totals_of_another_kind(batch):
    for total in ("3", [3], None.__class__):
        with pytest.raises(TypeError, match="total: expected a number or a 0-dim tensor, got"):
            aggregation.token_mean(batch, total=total)
    for total in (torch.tensor([1, 2]), torch.tensor([8])):
        with pytest.raises(ValueError, match=r"total: expected a number or a 0-dim tensor, got shape \[[12]\]"):
            aggregation.token_mean(batch, total=total)
    assert aggregation.token_mean(batch, total=torch.tensor(8)).tolist() == [0.125, 0.125]


def test_lengths_and_ranks_that_are_no_counts(batch):
    for number in (INF, 0, -1):
        with pytest.raises(ValueError, match="length: expected a constant > 0"):
            aggregation.fixed_length(batch, number)
        with pytest.raises(ValueError, match="ranks: expected a number of ranks > 0"):
            aggregation.token_mean(batch, ranks=number)
