"""PackedBatch: accepted and refused arguments, and the selection of rows with their steps, ids and offsets."""

import copy
import pickle

import pytest
import torch

import hpo_core as hpo
from hpo_core import PackedBatch, testing
from hpo_core.batch import row_sums
from hpo_core.batch.structure import check_structure

LONG = torch.int64
INTEGERS = (torch.int32, torch.int64)


def longs(*values):
    return torch.tensor(values, dtype=LONG)


def full():
    """A batch with an empty row, a one-token row, gaps between steps, and tail tokens."""
    return PackedBatch(
        longs(0, 4, 4, 5, 9),
        torch.tensor([1, 1, 0, 1, 1, 0, 1, 1, 1, 1, 1], dtype=torch.bool),
        steps=torch.tensor([[0, 2], [3, 4], [4, 5], [6, 6], [6, 9]]),
        step_ids=longs(20, -1, 30, 20, 30),
        trajectory_ids=longs(7, 7, -3, -3),
        group_ids=longs(5, 5, -1, -1),
        domain_ids=longs(2**40, 2**40, 1, 1),
    )


FIELDS = ("cu_seqlens", "mask", "steps", "step_ids", "trajectory_ids", "group_ids", "domain_ids")


def same(one, other):
    assert one.total_tokens == other.total_tokens and one.padded_shape == other.padded_shape
    for name in (*FIELDS, "cu_steps"):
        a, b = getattr(one, name), getattr(other, name)
        assert (a is None and b is None) or torch.equal(a, b), name


# ---------------------------------------------------------------------------------------------- accepted arguments


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_are_kept_as_int64(dtype):
    batch = PackedBatch(
        longs(0, 2, 3).to(dtype),
        cu_steps=longs(0, 1, 2, 3).to(dtype),
        step_ids=longs(4, 4, -1).to(dtype),
        trajectory_ids=longs(1, 2).to(dtype),
        group_ids=longs(0, -1).to(dtype),
        domain_ids=longs(9, 9).to(dtype),
    )
    for name in ("cu_seqlens", "cu_steps", "step_ids", "trajectory_ids", "group_ids", "domain_ids"):
        assert getattr(batch, name).dtype == LONG and getattr(batch, name).is_contiguous()
    assert PackedBatch(longs(0, 2), steps=torch.tensor([[0, 2]], dtype=dtype)).steps.dtype == LONG


def test_sizes():
    batch = full()
    assert (batch.rows, batch.total_tokens, batch.num_steps) == (4, 11, 5)
    assert batch.device == torch.device("cpu") and batch.padded_shape is None
    assert PackedBatch(longs(0, 2)).num_steps is None
    assert "rows=4, tokens=11, steps=5, mask, step_ids, trajectory_ids, group_ids, domain_ids" in repr(batch)


@pytest.mark.parametrize(
    ("offsets", "total", "counts"),
    [
        ([0], None, []),
        ([0], 3, []),
        ([0, 0], None, [0]),
        ([0, 1], None, [1]),
        ([0, 0, 1, 1, 3, 3], None, [0, 1, 0, 2, 0]),
        ([0, 2], 5, [2]),  # tail tokens
    ],
)
def test_ragged_rows(offsets, total, counts):
    batch = PackedBatch(longs(*offsets), total_tokens=total)
    assert batch.row_counts.tolist() == counts
    assert batch.total_tokens == (offsets[-1] if total is None else total)
    tokens = batch.total_tokens
    rows = [row for row, count in enumerate(counts) for _ in range(count)]
    assert batch.row_of_token().tolist() == rows + [-1] * (tokens - len(rows))
    leaf = torch.zeros(tokens, requires_grad=True)
    hpo.policy_loss(leaf, None, torch.ones(batch.rows), batch, advantage_level="row").loss.backward()
    inside = torch.arange(tokens) < offsets[-1]
    assert torch.equal(leaf.grad != 0, inside)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64])
def test_masks_of_bools_and_integers(dtype):
    batch = PackedBatch(longs(0, 2, 3), torch.tensor([1, 0, 1]).to(dtype))
    assert batch.mask.dtype == torch.bool and batch.mask.tolist() == [True, False, True]
    assert batch.row_counts.tolist() == [1, 1]


def test_total_tokens_comes_from_the_mask_or_the_offsets():
    assert PackedBatch(longs(0, 2), torch.ones(5).bool()).total_tokens == 5
    assert PackedBatch(longs(0, 2), torch.ones(5).bool(), total_tokens=5, validate=False).total_tokens == 5
    assert PackedBatch(longs(0, 2)).total_tokens == 2


def test_strided_input_is_made_contiguous():
    offsets = torch.tensor([[0, 9], [2, 9], [3, 9]])[:, 0]
    mask = torch.tensor([True, False, False, True, True, False])[::2]
    batch = PackedBatch(offsets, mask)
    assert batch.cu_seqlens.tolist() == [0, 2, 3] and batch.mask.tolist() == [True, False, True]
    assert batch.cu_seqlens.is_contiguous() and batch.mask.is_contiguous()


def test_from_lengths():
    for lengths in ([2, 0, 3], (2, 0, 3), longs(2, 0, 3), longs(2, 0, 3).int()):
        assert PackedBatch.from_lengths(lengths).cu_seqlens.tolist() == [0, 2, 2, 5]
    assert PackedBatch.from_lengths([]).cu_seqlens.tolist() == [0]
    assert PackedBatch.from_lengths([2], total_tokens=4, group_ids=longs(1)).total_tokens == 4


def test_from_padded_copies_nothing():
    mask = torch.tensor([[True, True, False], [False, False, False]])
    batch = PackedBatch.from_padded(mask, group_ids=longs(0, 0))
    assert batch.mask.data_ptr() == mask.data_ptr()
    assert (batch.padded_shape, batch.rows, batch.total_tokens) == ((2, 3), 2, 6)
    assert batch.cu_seqlens.tolist() == [0, 3, 6] and batch.row_counts.tolist() == [2, 0]
    assert batch.group_ids.tolist() == [0, 0]
    assert PackedBatch.from_padded(mask, steps=longs(1, 4).view(1, 2), validate=False).num_steps == 1
    for shape in ((0, 3), (2, 0)):
        assert PackedBatch.from_padded(torch.ones(shape)).total_tokens == 0


def test_from_padded_reads_no_bool_mask():
    """A check of its values would take longer than a loss."""
    mask = torch.ones(64, 512, dtype=torch.bool)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        PackedBatch.from_padded(mask)
    assert max((each.self_cpu_memory_usage for each in profile.events()), default=0) < mask.numel()


def test_padded_tensors_keep_their_storage_and_shape():
    mask = torch.ones(2, 3, dtype=torch.bool)
    logp = torch.randn(2, 3)
    result = hpo.policy_loss_and_grad(logp, logp, torch.ones(2), PackedBatch.from_padded(mask))
    assert result.grad.shape == (2, 3)


# --------------------------------------------------------------------------------------------------- the hierarchy


def test_steps_that_tile():
    batch = PackedBatch(longs(0, 3, 3, 5), cu_steps=longs(0, 1, 1, 3, 3, 4, 5))
    assert batch.num_steps == 6
    assert batch.step_of_token().tolist() == [0, 2, 2, 4, 5]  # the empty steps 1 and 3 hold no token


def test_steps_with_gaps():
    assert full().step_of_token().tolist() == [0, 0, -1, 1, 2, -1, 4, 4, 4, -1, -1]
    assert PackedBatch(longs(0, 2), steps=torch.zeros(0, 2, dtype=LONG)).step_of_token().tolist() == [-1, -1]


def test_step_advantages_reach_their_tokens():
    batch, logp = full(), torch.zeros(11)
    grad = hpo.policy_loss_and_grad(logp, None, torch.tensor([1.0, 2, 3, 4, 5]), batch, advantage_level="step").grad
    # The last range goes on with the step of the third, whose advantage it has.
    expected = torch.tensor([1.0, 1, 0, 2, 3, 0, 3, 3, 3, 0, 0]) * batch.mask
    torch.testing.assert_close(grad * -batch.row_counts.sum(), expected)


def test_trajectories_of_several_rows():
    batch = full()
    row_trajectory, start, rows = batch.trajectories
    assert row_trajectory.tolist() == [1, 1, 0, 0]  # numbered in the order of their ids
    assert start.tolist() == [0, 2, 4, 4, 4] and rows.tolist() == [2, 3, 0, 1]
    assert PackedBatch(longs(0, 2)).trajectories is None
    scattered = PackedBatch.from_lengths([1, 1, 1], trajectory_ids=longs(4, -9, 4))
    assert [part.tolist() for part in scattered.trajectories] == [[1, 0, 1], [0, 1, 3, 3], [1, 0, 2]]
    empty = PackedBatch.from_lengths([], trajectory_ids=longs())
    assert [part.tolist() for part in empty.trajectories] == [[], [0], []]
    extremes = PackedBatch.from_lengths([1, 1], trajectory_ids=longs(2**63 - 1, -(2**63)))
    assert extremes.trajectories[0].tolist() == [1, 0]


def test_counts_are_computed_once():
    batch = full()
    calls = []
    assert batch.once(calls.append) is batch.once(calls.append) is None and len(calls) == 1


# ---------------------------------------------------------------------------------------------- select, micro-batches


def test_select():
    batch = full()
    values = torch.arange(11)
    part, tokens = batch.select([3, 0])
    assert values[tokens].tolist() == [5, 6, 7, 8, 0, 1, 2, 3]
    assert part.cu_seqlens.tolist() == [0, 4, 8] and part.total_tokens == 8
    assert torch.equal(part.mask, batch.mask[tokens])
    assert part.steps.tolist() == [[1, 4], [4, 6], [7, 8]]  # the empty step 3 belongs to no row
    assert part.step_ids.tolist() == [30, 20, -1]
    assert part.group_ids.tolist() == [-1, 5] and part.trajectory_ids.tolist() == [-3, 7]
    assert part.domain_ids.tolist() == [1, 2**40]
    check_structure(part)
    # indices of the batch's steps
    assert batch.step_of_token()[tokens[part.steps[:, 0]]].tolist() == [4, 0, 1]


def test_select_from_tiling_steps():
    batch = PackedBatch(longs(0, 3, 5), cu_steps=longs(0, 1, 3, 4, 5))
    part, _ = batch.select([1, 0, 1])
    assert part.steps.tolist() == [[0, 1], [1, 2], [2, 3], [3, 5], [5, 6], [6, 7]] and part.step_ids is None
    check_structure(part)


def test_ranges_with_equal_ids_are_one_step():
    step, trajectory = full().hierarchy((hpo.gates.Unit.STEP, hpo.gates.Unit.TRAJECTORY)).ancestors.tolist()
    # A segment has the number of its first range; -1 names none, and an empty range is none of the step with its id.
    assert step == [0, 1, 2, 3, 2]
    assert trajectory == [0, 0, 2, 2, 2]


def test_sums_of_rows_are_0_without_tokens():
    batch = PackedBatch(longs(0, 0, 2, 2, 3, 3), total_tokens=4)
    assert row_sums(torch.tensor([1.0, 2.0, 4.0, 8.0]), batch).tolist() == [0, 3, 0, 4, 0]


def test_a_range_without_tokens_is_no_part_of_the_step_with_its_id():
    batch = PackedBatch(longs(0, 3), steps=longs([0, 0], [0, 2], [2, 2], [2, 3]), step_ids=longs(7, 0, 5, 5))
    assert batch.spread_steps(torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist() == [2.0, 2.0, 4.0]


@pytest.mark.parametrize(
    ("rows", "picked"),
    [
        (longs(2, 0), [4, 0, 1, 2, 3]),
        (torch.tensor([2, 0], dtype=torch.int32), [4, 0, 1, 2, 3]),
        (torch.tensor([True, False, True, False]), [0, 1, 2, 3, 4]),
        ([True, False, True, False], [0, 1, 2, 3, 4]),
        ([2, 2, 1], [4, 4]),
        ([], []),
        ([1], []),
    ],
)
def test_select_by_indices_or_mask(rows, picked):
    part, tokens = full().select(rows)
    assert tokens.tolist() == picked and part.total_tokens == len(picked)
    check_structure(part)


def test_select_from_a_padded_batch():
    batch = PackedBatch.from_padded(torch.tensor([[1, 0], [1, 1]]))
    part, tokens = batch.select([1])
    assert tokens.tolist() == [2, 3] and part.padded_shape == (1, 2) and part.mask.tolist() == [True, True]
    logp, advantages, weights = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]]), torch.tensor([1.0, -1.0]), torch.ones(2)
    whole = hpo.policy_loss_and_grad(logp, None, advantages, batch, weights=weights).grad
    for part, rows, _, tokens in batch.micro_batches(2):
        given = (advantages[rows], part)
        padded, packed = (
            hpo.policy_loss_and_grad(each, None, *given, weights=weights[rows]).grad
            for each in (logp[rows], logp.flatten()[tokens])
        )
        assert padded.equal(whole[rows]) and packed.equal(whole[rows].flatten())


def test_selecting_everything_changes_nothing():
    batch = PackedBatch(longs(0, 2, 2, 5), torch.tensor([1, 0, 1, 1, 1]), steps=longs(0, 1, 2, 5).view(2, 2))
    part, tokens = batch.select(range(3))
    same(part, batch)
    assert tokens.tolist() == list(range(5))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([4], r"rows: expected indices in \[0, 4\), got tensor\(\[4\]\)"),
        ([-1], r"rows: expected indices in \[0, 4\)"),
        ([0.5], "rows: expected dtype int32 or int64, got float32"),
        ([[0]], r"rows: expected indices \[R\] or a bool mask \[S\], got shape \[1, 1\]"),
        ([True], r"rows: expected shape \[S\] for a bool mask = \[4\], got \[1\]"),
    ],
)
def test_select_refuses(rows, message):
    with pytest.raises((ValueError, TypeError), match=message):
        full().select(rows)


def test_micro_batches_cut_between_rows():
    batch = PackedBatch.from_lengths([3, 0, 2, 6, 1, 1])
    parts = list(batch.micro_batches(5))
    assert [part.batch.row_counts.tolist() for part in parts] == [[3, 0, 2], [6], [1, 1]]  # the longer row is a part
    assert torch.cat([part.tokens for part in parts]).tolist() == list(range(13))
    assert list(PackedBatch.from_lengths([]).micro_batches(5)) == []


def test_micro_batches_never_split_a_trajectory():
    batch = PackedBatch.from_lengths([2, 2, 2, 2, 1], trajectory_ids=longs(1, 1, 1, 0, 0))
    assert [part.batch.rows for part in batch.micro_batches(4)] == [3, 2]
    torn = PackedBatch.from_lengths([1, 1, 1], trajectory_ids=longs(1, 0, 1))
    with pytest.raises(ValueError, match="trajectory_ids: the rows of trajectory 1 are not consecutive"):
        list(torn.micro_batches(4))
    with pytest.raises(ValueError, match="max_tokens: expected a count > 0, got 0"):
        list(batch.micro_batches(0))


@pytest.mark.parametrize("gate", [hpo.gates.ppo_clip(), hpo.gates.gspo(0.1, 0.1)], ids=["token", "trajectory"])
def test_micro_batches_have_the_bits_of_the_whole_gradient(gate):
    """The parts take the weights of the whole step."""
    torch.manual_seed(0)
    batch = PackedBatch.from_lengths(
        [5, 1, 0, 4, 7, 2], mask=torch.rand(19) > 0.3, trajectory_ids=longs(0, 0, 1, 2, 3, 3)
    )
    logp, old_logp, advantages = -torch.rand(19), -torch.rand(19), torch.randn(6)
    weights = hpo.aggregation.token_mean(batch)
    whole = hpo.policy_loss_and_grad(logp, old_logp, advantages, batch, gate, weights=weights)
    row, loss, metrics = 0, 0.0, None
    for part, rows, _, tokens in batch.micro_batches(9):
        result = hpo.policy_loss_and_grad(
            logp[tokens], old_logp[tokens], advantages[rows], part, gate, weights=weights[rows]
        )
        assert torch.equal(result.grad, whole.grad[tokens])
        row, loss = row + part.rows, loss + result.loss
        metrics = result.metrics if metrics is None else metrics + result.metrics
    assert row == batch.rows
    torch.testing.assert_close(loss, whole.loss)
    torch.testing.assert_close(metrics.vector, whole.metrics.vector)


# ------------------------------------------------------------------------------------------- devices and processes


def test_moving():
    batch = full()
    counts = batch.row_counts
    moved = batch.to("cpu")
    same(moved, batch)
    assert moved.row_counts is not counts, "what a batch has computed stays on its device"
    away = full().to("meta")
    assert away.device.type == "meta" and "device=meta" in repr(away)
    assert all(getattr(away, name).device.type == "meta" for name in FIELDS)
    assert PackedBatch.from_padded(torch.ones(2, 3).bool()).to("meta").padded_shape == (2, 3)


@pytest.mark.parametrize("wrong", [torch.float32, torch.int32, torch.ones(1), None], ids=str)
def test_moving_changes_no_dtype(wrong):
    """Kernels read offsets as int64: those of another dtype made them write out of bounds."""
    with pytest.raises(TypeError, match=r"device: expected a device such as 'cuda:0', got .*; offsets and ids stay"):
        full().to(wrong)


@pytest.mark.parametrize("copied", [lambda x: pickle.loads(pickle.dumps(x)), copy.copy, copy.deepcopy])
@pytest.mark.parametrize("make", [full, lambda: PackedBatch.from_padded(torch.eye(3).bool())], ids=["packed", "padded"])
def test_copies(make, copied):
    batch = make()
    batch.once(lambda batch: "something that cannot be pickled")
    again = copied(batch)
    same(again, batch)
    assert torch.equal(again.row_counts, batch.row_counts)


# --------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        # cu_seqlens
        ({"cu_seqlens": [0, 2]}, TypeError, "cu_seqlens: expected a tensor, got <class 'list'>"),
        ({"cu_seqlens": None}, TypeError, "cu_seqlens: expected a tensor"),
        (
            {"cu_seqlens": torch.tensor([0.0, 2])},
            TypeError,
            r"cu_seqlens: expected dtype int32 or int64, got float32; .*to\(",
        ),
        ({"cu_seqlens": longs()}, ValueError, r"cu_seqlens: expected shape \[S \+ 1\] with a leading 0, got \[0\]"),
        ({"cu_seqlens": longs(0, 2).view(1, 2)}, ValueError, r"cu_seqlens: expected shape \[S \+ 1\]"),
        (
            {"cu_seqlens": longs(1, 2)},
            ValueError,
            "cu_seqlens: expected a first offset of 0, got 1; lengths of rows are for",
        ),
        ({"cu_seqlens": longs(0, 2, 1)}, ValueError, r"cu_seqlens: .* never decrease, got \[2, 1\] at row 1"),
        ({"total_tokens": 1}, ValueError, "cu_seqlens: expected a last offset <= 1 tokens, got 2; pass a mask"),
        # total_tokens
        ({"total_tokens": -1}, ValueError, "total_tokens: expected a count >= 0, got -1"),
        ({"total_tokens": 2.0}, TypeError, "total_tokens: expected an integer or None, got 2.0"),
        ({"validate": False}, ValueError, "total_tokens: with validate=False and no mask .* pass total_tokens"),
        # mask
        ({"mask": [1, 1]}, TypeError, "mask: expected a tensor, got <class 'list'>"),
        ({"mask": torch.ones(1, 2)}, ValueError, r"mask: expected shape \[T\] = \[2\], got \[1, 2\]; .*from_padded"),
        ({"mask": torch.ones(2), "total_tokens": 3}, ValueError, r"mask: expected shape \[T\] = \[3\], got \[2\]"),
        ({"mask": torch.ones(2, device="meta")}, ValueError, "mask: expected device cpu .*, got meta; .*batch.to"),
        # steps
        (
            {"cu_steps": longs(0, 2), "steps": longs(0, 2).view(1, 2)},
            ValueError,
            "steps: give cu_steps or steps, not both",
        ),
        ({"cu_steps": torch.ones(2)}, TypeError, "cu_steps: expected dtype int32 or int64, got float32"),
        ({"cu_steps": longs(0, 2).view(1, 2)}, ValueError, r"cu_steps: expected shape \[N \+ 1\], got \[1, 2\]"),
        ({"cu_steps": longs(0, 1)}, ValueError, r"cu_steps: expected offsets from 0 to 2, .*, got 0 to 1; use steps="),
        ({"cu_steps": longs(1, 2)}, ValueError, "cu_steps: expected offsets from 0 to 2, .*, got 1 to 2"),
        (
            {"cu_seqlens": longs(0, 2, 4), "cu_steps": longs(0, 3, 4)},
            ValueError,
            "cu_steps: expected steps that tile every row .* not so from row 1 on; use steps=",
        ),
        (
            {"cu_steps": longs(0, 2, 1, 2)},
            ValueError,
            r"cu_steps: expected begin <= end .*, got \[2, 1\] at step 1; a range ends one token behind its last",
        ),
        ({"step_ids": longs(0)}, ValueError, "step_ids: there are no steps to name; pass cu_steps or steps, too"),
        (
            {"cu_steps": longs(0, 1, 2), "step_ids": longs(3)},
            ValueError,
            r"step_ids: expected shape \[N\] \(one per range\) = \[2\], got \[1\]",
        ),
        ({"steps": longs(0, 2)}, ValueError, r"steps: expected shape \[N, 2\] of half-open token ranges, got \[2\]"),
        ({"steps": torch.tensor([[1, 0]])}, ValueError, r"steps: expected begin <= end .*, got \[1, 0\] at step 0"),
        ({"steps": torch.tensor([[0, 2], [1, 2]])}, ValueError, r"steps: .* without overlap, got \[1, 2\] at step 1"),
        ({"steps": torch.tensor([[1, 2], [0, 1]])}, ValueError, "steps: expected steps in order"),
        ({"steps": torch.tensor([[0, 3]])}, ValueError, r"steps: .* inside one row, got \[0, 3\] at step 0; cut it"),
        ({"steps": torch.tensor([[-1, 1]])}, ValueError, "steps: expected each step inside one row"),
        (
            {"cu_seqlens": longs(0, 2, 4), "steps": torch.tensor([[0, 1], [1, 3]])},
            ValueError,
            r"steps: expected each step inside one row, got \[1, 3\] at step 1; cut it where a row ends",
        ),
        # ids
        ({"group_ids": ["a"]}, TypeError, "group_ids: expected a tensor, got <class 'list'>"),
        ({"group_ids": torch.ones(1)}, TypeError, "group_ids: expected dtype int32 or int64, got float32"),
        ({"group_ids": longs(0, 0)}, ValueError, r"group_ids: expected shape \[S\] \(one per row\) = \[1\], got \[2\]"),
        ({"trajectory_ids": longs(0, 0)}, ValueError, "trajectory_ids: expected shape"),
        ({"domain_ids": longs(0).view(1, 1)}, ValueError, "domain_ids: expected shape"),
        ({"group_ids": longs(0).to("meta")}, ValueError, "group_ids: expected device cpu .*, got meta"),
    ],
)
def test_errors_name_argument_expectation_value_and_fix(arguments, error, message):
    with pytest.raises(error, match=message):
        PackedBatch(**{"cu_seqlens": longs(0, 2), **arguments})


def test_offsets_that_descend_give_each_token_a_row_or_none():
    """Nothing has validated them; a row never has a negative number of tokens."""
    batch = hpo.PackedBatch(torch.tensor([0, 4, 2, 6, 9]), total_tokens=7, validate=False)
    assert batch.row_of_token().tolist() == [0, 0, 0, 0, 2, 2, 3]


def test_levels_nest():
    rows = [1, 1, 1]
    for ids, message in (
        ({"trajectory_ids": longs(4, 9, 4), "group_ids": longs(0, 0, 1)}, "group_ids: .* trajectory 4, got 0 and 1; l"),
        ({"trajectory_ids": longs(4, 9, 4), "group_ids": longs(0, 0, -1)}, "group_ids: .* trajectory 4, got 0 and -1"),
        ({"trajectory_ids": longs(4, 9, 4), "domain_ids": longs(0, 0, 1)}, "domain_ids: .* trajectory 4, got 0 and 1"),
        ({"group_ids": longs(4, 9, 4), "domain_ids": longs(0, 0, 1)}, "domain_ids: .* group 4, got 0 and 1"),
        ({"group_ids": longs(4, 9, 4), "domain_ids": longs(0, 0, -7)}, "domain_ids: .* group 4, got 0 and -1"),
    ):
        with pytest.raises(ValueError, match=message):
            PackedBatch.from_lengths(rows, **ids)
        PackedBatch.from_lengths(rows, total_tokens=3, validate=False, **ids)
    tiles = {"cu_steps": longs(0, 1, 2, 3), "step_ids": longs(5, 6, 5)}
    with pytest.raises(ValueError, match="trajectory_ids: expected one trajectory for all of step 5, got 0 and 2"):
        PackedBatch.from_lengths(rows, **tiles)
    PackedBatch.from_lengths(rows, **tiles, trajectory_ids=longs(4, 9, 4))
    PackedBatch.from_lengths(rows, group_ids=longs(-1, 9, -1), domain_ids=longs(0, 0, 1))  # -1 names no group
    PackedBatch.from_lengths(rows, trajectory_ids=longs(4, 9, 4), group_ids=longs(-1, 0, -7))  # nor does -7
    PackedBatch.from_lengths(rows, trajectory_ids=longs(4, 9, 4), domain_ids=longs(-2, 0, -1))
    PackedBatch.from_lengths(rows, group_ids=longs(4, 9, 4), domain_ids=longs(-2, 0, -1))
    with pytest.raises(ValueError, match="trajectory_ids: expected one trajectory for all of step 5, got -1 and -2"):
        PackedBatch.from_lengths(rows, **tiles, trajectory_ids=longs(-1, 9, -2))  # a negative trajectory id is a name


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: PackedBatch.from_padded([[1]]), TypeError, r"mask: expected a tensor"),
        (
            lambda: PackedBatch.from_padded(torch.ones(3)),
            ValueError,
            r"mask: expected a padded mask \[B, L\], got shape \[3\]",
        ),
        (
            lambda: PackedBatch.from_padded(torch.ones(2, 3).bool(), group_ids=longs(0)),
            ValueError,
            "group_ids: expected shape",
        ),
        (
            lambda: PackedBatch.from_padded(torch.ones(2, 3).bool(), steps=longs(0, 2, 1, 3).view(2, 2)),
            ValueError,
            "steps: expected steps in order without overlap",
        ),
        (
            lambda: PackedBatch.from_padded(torch.ones(2, 3).bool(), cu_steps=longs(0, 6)),
            ValueError,
            "cu_steps: expected steps that tile every row",
        ),
        *(
            (
                lambda kind=kind: PackedBatch.from_padded(torch.full((2, 3), 2, dtype=kind)),
                ValueError,
                "mask: expected 0 a",
            )
            for kind in (torch.int64, torch.uint8, torch.int16)
        ),
        (
            lambda: PackedBatch.from_padded(torch.full((2, 3), 2), validate=True),
            ValueError,
            "mask: expected 0 and 1, got 2",
        ),
        (lambda: PackedBatch.from_lengths([1.5]), TypeError, "lengths: expected dtype int32 or int64, got float32"),
        (lambda: PackedBatch.from_lengths([[1]]), ValueError, r"lengths: expected shape \[S\], got \[1, 1\]"),
        (lambda: PackedBatch.from_lengths([2, -1]), ValueError, "lengths: expected numbers of tokens >= 0"),
        (
            lambda: PackedBatch(longs(0, 2)).step_of_token(),
            ValueError,
            "steps: this batch has none; pass cu_steps or steps",
        ),
    ],
)
def test_errors_of_the_other_constructors(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("offsets", [[5, 0], [0, 100], [-4, 2], [2, 1, 3], [0, 2**62]])
def test_without_validation_broken_offsets_are_counted_and_harmless(offsets, backend):
    batch = PackedBatch(longs(*offsets), total_tokens=4, validate=False).to(testing.device_of(backend))
    logp = torch.zeros(4, device=batch.device)
    advantages = logp.new_ones(batch.rows)
    result = hpo.policy_loss_and_grad(logp, logp, advantages, batch, advantage_level="row", backend=backend)
    assert result.metrics["bad_offsets"] > 0 and result.grad.isfinite().all()
    row = batch.row_of_token()
    assert row.shape == (4,) and ((row >= -1) & (row < batch.rows)).all()
