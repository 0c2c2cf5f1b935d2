"""Row weights: the denominators of every aggregation mode, over parts and ranks."""

import functools
import itertools
import math

import hypothesis
import pytest
import torch
import torch.distributed

import hpo_core as hpo
from hpo_core import aggregation, gates, testing
from hpo_core.testing import Layout

MODES = {
    "token_mean": aggregation.token_mean,
    "seq_mean_token_mean": aggregation.seq_mean_token_mean,
    "seq_mean_token_sum": aggregation.seq_mean_token_sum,
    "fixed_length": functools.partial(aggregation.fixed_length, length=16),
    "vl_norm": functools.partial(aggregation.vl_norm, length=16, alpha=0.75),
    "prompt_mean": aggregation.prompt_mean,
}
every_mode = pytest.mark.parametrize("mode", MODES)


def by_hand(mode, batch, counts):
    """The published formulas, row by row, in Python numbers."""
    n, groups = counts.tolist(), batch.group_ids.tolist()
    filled = sum(count > 0 for count in n)
    total, shares = sum(n), sum(count**-0.75 for count in n if count)
    groups = [group if group >= 0 else -1 - row for row, group in enumerate(groups)]  # outside every group: alone
    of_group = [sum(count for count, other in zip(n, groups, strict=True) if other == group) for group in groups]
    filled_groups = len({group for count, group in zip(n, groups, strict=True) if count > 0})
    return {
        "token_mean": [1 / total if total else 0.0 for _ in n],
        "seq_mean_token_mean": [1 / (filled * count) if count else 0.0 for count in n],
        "seq_mean_token_sum": [1 / filled if filled else 0.0 for _ in n],
        "fixed_length": [1 / (16 * len(n)) for _ in n],
        "vl_norm": [count**-0.75 / (16 * shares) if count else 0.0 for count in n],
        "prompt_mean": [1 / (filled_groups * tokens) if tokens else 0.0 for tokens in of_group],
    }[mode]


def test_a_row_outside_every_group_is_a_prompt_by_itself():
    for ids in ([5, 5, -1, -1], [5, 5, -1, -2]):
        batch = hpo.PackedBatch.from_lengths([3, 1, 2, 2], group_ids=torch.tensor(ids))
        assert aggregation.prompt_mean(batch).tolist() == pytest.approx([1 / 12, 1 / 12, 1 / 6, 1 / 6])


@every_mode
@hypothesis.given(layout=testing.layouts(rows=7, longest=9))
def test_published_formula(mode, layout):
    batch = layout.batch()
    weights = MODES[mode](batch)
    assert weights.dtype == torch.float32 and weights.shape == (batch.rows,) and weights.is_contiguous()
    assert weights.tolist() == pytest.approx(by_hand(mode, batch, batch.row_counts), rel=3e-7)


@hypothesis.given(layout=testing.layouts(rows=7, longest=9))
def test_only_selected_tokens_count(layout):
    batch = layout.batch()
    selected = torch.rand(batch.total_tokens, generator=torch.Generator().manual_seed(1)) > 0.5
    both = selected if batch.mask is None else selected & batch.mask
    counts = hpo.PackedBatch(batch.cu_seqlens, both).row_counts
    for mode in ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "prompt_mean"):
        weights = MODES[mode](batch, selected=selected)
        assert weights.tolist() == pytest.approx(by_hand(mode, batch, counts), rel=3e-7)


def test_selected_tokens_of_a_padded_batch():
    mask = torch.tensor([[True, True, False], [False, True, True]])
    batch, selected = hpo.PackedBatch.from_padded(mask), torch.tensor([[True, False, True], [True, True, True]])
    for given in (selected, selected.flatten()):
        torch.testing.assert_close(aggregation.token_mean(batch, selected=given), torch.full((2,), 1 / 3))
    with pytest.raises(ValueError, match=r"selected: expected shape \[B, L\] .* = \[2, 3\], got \[3, 2\]"):
        aggregation.token_mean(batch, selected=selected.reshape(3, 2))


@every_mode
def test_a_mean_of_ones_is_one(mode):
    """Weights times counts sum to 1 in every mode that is a mean."""
    batch = Layout((4, 0, 2, 7), masked="row", seed=2).batch()
    share = (MODES[mode](batch).double() * batch.row_counts).sum().item()
    expected = {"seq_mean_token_sum": batch.row_counts.sum().item() / int((batch.row_counts > 0).sum())}
    expected["fixed_length"] = batch.row_counts.sum().item() / (16 * 4)
    filled = [count for count in batch.row_counts.tolist() if count]
    expected["vl_norm"] = sum(count**0.25 for count in filled) / (16 * sum(count**-0.75 for count in filled))
    assert share == pytest.approx(expected.get(mode, 1.0), rel=1e-6)


@every_mode
@pytest.mark.parametrize("as_tensor", [False, True])
def test_total_of_the_optimiser_step(mode, as_tensor):
    """With the count of the whole step, parts have the weights of the whole: the cut does not matter."""
    whole = hpo.PackedBatch.from_lengths([4, 1, 3, 2], group_ids=torch.tensor([0, 0, 1, 1]))
    weights = MODES[mode](whole)
    total = {"token_mean": 10, "prompt_mean": 2, "vl_norm": sum(n**-0.75 for n in (4, 1, 3, 2))}.get(mode, 4)
    total = torch.tensor(total, dtype=torch.float64 if mode == "vl_norm" else torch.int64) if as_tensor else total
    for rows in ([0, 1], [2, 3]):
        part, _tokens = whole.select(rows)
        assert torch.equal(MODES[mode](part, total=total), weights[rows])


def test_counts_beyond_float32_are_exact():
    """2^25 + 1 tokens: the count is not rounded before the division."""
    batch = hpo.PackedBatch.from_lengths([1])
    total = 2**25 + 1
    assert (
        aggregation.token_mean(batch, total=total).item() == torch.tensor(1 / total, dtype=torch.float64).float().item()
    )


@every_mode
def test_empty_batches_have_weight_zero(mode):
    for lengths in ([], [0, 0]):
        batch = hpo.PackedBatch.from_lengths(lengths, group_ids=torch.zeros(len(lengths), dtype=torch.int64))
        weights = MODES[mode](batch)
        assert torch.isfinite(weights).all()
        if mode != "fixed_length":
            assert not weights.any()


@every_mode
def test_loss_is_invariant_to_the_cut(mode, backend):
    """Micro-batches with the step's counts add up to the same loss within the budget and have the same gradient."""
    layout = Layout((5, 2, 3, 4), masked="some", seed=9)
    example = testing.random_policy_loss(0, gates.dapo(), layout=layout)
    batch = example.batch
    counts = batch.row_counts
    shares = sum(count**-0.75 for count in counts.tolist() if count)
    totals = {"token_mean": int(counts.sum()), "prompt_mean": len(batch.group_ids.unique()), "vl_norm": shares}
    total = totals.get(mode, 4)
    example = example.given(weights=MODES[mode](batch))
    device = testing.device_of(backend)
    fn = functools.partial(hpo.policy_loss, backend=backend)
    whole = testing.run_policy_loss(fn, testing.move(example, device))
    loss, grads = 0.0, []
    groups = batch.group_ids
    for rows in (groups == groups[0]).nonzero().flatten(), (groups != groups[0]).nonzero().flatten():
        if rows.numel() == 0:
            continue
        part, tokens = example.select(rows)
        part = part.given(weights=MODES[mode](part.batch, total=total))
        out = testing.run_policy_loss(fn, testing.move(part, device))
        loss += out.loss.double().cpu()
        grads.append((tokens, out.grad.cpu()))
    for tokens, grad in grads:
        assert torch.equal(grad, whole.grad.cpu()[tokens])
    testing.assert_within_budget("summed loss", torch.as_tensor(loss), testing.expect_policy_loss(example)["loss"])


@pytest.mark.parametrize("reduction", ["", "avg", 2])
def test_unknown_reduction(reduction):
    with pytest.raises(ValueError, match="gradient_reduction"):
        aggregation.token_mean(hpo.PackedBatch.from_lengths([1]), gradient_reduction=reduction)


def test_mean_needs_a_process_group():
    with pytest.raises(ValueError, match="initialised"):
        aggregation.token_mean(hpo.PackedBatch.from_lengths([1]), gradient_reduction="mean")


def test_a_total_is_a_number():
    for total in (True, "3"):
        with pytest.raises(TypeError, match="total: expected a number or a 0-dim tensor, got"):
            aggregation.token_mean(hpo.PackedBatch.from_lengths([1]), total=total)


def test_vl_norm_of_equal_rows_or_without_an_exponent_is_a_fixed_length():
    equal, others = (hpo.PackedBatch.from_lengths(lengths) for lengths in ([3, 3, 3], [5, 1, 2]))
    for batch, alpha in ((equal, 1.0), (others, 0.0)):
        assert torch.equal(aggregation.vl_norm(batch, 7, alpha), aggregation.fixed_length(batch, 7))
    assert aggregation.vl_norm(others, 2).tolist() == pytest.approx([0.1 / 1.7, 0.5 / 1.7, 0.25 / 1.7])


@pytest.mark.parametrize("given", [{"alpha": -1.0}, {"alpha": math.nan}, {"length": 0}, {"length": math.inf}])
def test_numbers_that_vl_norm_refuses(given):
    with pytest.raises(ValueError, match=f"{next(iter(given))}: expected"):
        aggregation.vl_norm(hpo.PackedBatch.from_lengths([1]), **{"length": 1, **given})


def test_prompt_mean_needs_groups():
    with pytest.raises(ValueError, match="group_ids"):
        aggregation.prompt_mean(hpo.PackedBatch.from_lengths([1]))


LENGTHS = ([4, 1], [3], [])  # for each of three ranks
RESPONSES = ([0, 1], [1], [])  # of which the rows may be pieces


def weights_of_pieces(batch, numbers):
    """The weights of docs/levels_over_ranks.md."""
    numbers = torch.tensor(numbers, dtype=torch.int64)
    tokens = torch.zeros(2, dtype=torch.int64).scatter_add(0, numbers, batch.row_counts)
    torch.distributed.all_reduce(tokens)
    responses = hpo.PackedBatch.from_lengths(tokens, group_ids=torch.tensor([0, 0]))
    return {name: mode(responses, ranks=1)[numbers].tolist() for name, mode in MODES.items()}


def weights_of(rank):
    batch, group = hpo.PackedBatch.from_lengths(LENGTHS[rank]), torch.distributed.group.WORLD
    return {"pieces": weights_of_pieces(batch, RESPONSES[rank])} | {
        (name, reduction): MODES[name](batch, process_group=group, gradient_reduction=reduction).tolist()
        for name in ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum")
        for reduction in ("sum", "mean")
    }


def test_denominators_over_ranks(three_ranks):
    """Ranks get the weights of one batch with all rows; for engines that average gradients, three times these."""
    found = three_ranks(weights_of)
    whole = hpo.PackedBatch.from_lengths(list(itertools.chain(*LENGTHS)))
    for name in ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum"):
        added, averaged = (
            torch.tensor(list(itertools.chain(*(of_rank[name, reduction] for of_rank in found))))
            for reduction in ("sum", "mean")
        )
        expected = MODES[name](whole)
        assert torch.equal(added, expected)
        torch.testing.assert_close(averaged, 3 * expected, rtol=2e-7, atol=0)
    uncut = hpo.PackedBatch.from_lengths([4, 1 + 3], group_ids=torch.tensor([0, 0]))
    for name in MODES:
        pieces = itertools.chain(*(of_rank["pieces"][name] for of_rank in found))
        assert list(pieces) == MODES[name](uncut)[[0, 1, 1]].tolist()
