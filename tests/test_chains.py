"""Chains of units, dense ids, and the rows of steps and tokens."""

import itertools
import math

import numpy as np
import pytest
import torch

from hpo_core import PackedBatch, advantages, segments


def test_dense_ids_are_tuples():
    for seed in range(60):
        draw = np.random.default_rng(seed)
        keys = [draw.integers(-1, 3, 20) * scale for scale in (1, 10**12, 7)]
        got = segments.dense_ids(*(torch.tensor(key) for key in keys)).tolist()
        tuples = [None if min(key) < 0 else key for key in zip(*(k.tolist() for k in keys), strict=True)]
        for i, j in itertools.combinations(range(20), 2):
            if tuples[i] is None:
                assert got[i] == -1
            else:
                assert (got[i] == got[j]) == (tuples[i] == tuples[j])


def test_chains_bring_units_together():
    ids, positions = torch.tensor([7, -1, 7, 2, 7]), torch.tensor([3, 0, 1, 5, 2])
    chains = segments.chains(ids, positions)
    assert chains.order.tolist() == [1, 3, 2, 4, 0]
    assert chains.chain.tolist() == [-1, 0, 1, 1, 1]
    assert chains.cu_seqlens.tolist() == [1, 2, 5, 5, 5, 5]
    values = torch.arange(5.0)
    assert torch.equal(chains.unsorted(chains.sorted(values)), values)
    assert chains.first(chains.sorted(values)).tolist()[1:] == [3.0, 2.0, 2.0, 2.0]
    assert chains.ends().tolist() == [True, True, False, False, True]
    assert chains.following(torch.tensor([1, 2, 3, 2**53 + 1, 2**53 + 3])).tolist() == [0, 0, 2**53 + 1, 2**53 + 3, 0]


def test_a_position_that_is_nan_orders_no_chain():
    """It would stand last in silence; that of a unit in no chain orders nothing."""
    ids, positions = torch.tensor([3, -1, 3]), torch.tensor([1.0, math.nan, 0.0])
    assert segments.chains(ids, positions).order.tolist() == [1, 2, 0]
    with pytest.raises(ValueError, match="positions: expected numbers, got nan for a unit with an id"):
        segments.chains(ids, positions.roll(1))


def test_padded_calls_are_bound_as_others():
    rewards = torch.zeros(2, 3)
    for batch in (PackedBatch.from_padded(torch.ones(2, 3) > 0), PackedBatch.from_lengths([3, 3])):
        with pytest.raises(TypeError, match="multiple values"):
            advantages.reinforce_pp(rewards, batch, token_rewards=rewards)
        with pytest.raises(TypeError, match="positional arguments"):
            advantages.reinforce_pp(rewards, batch, 0.5, False)


def test_a_step_in_no_row():
    batch = PackedBatch.from_padded(torch.ones(2, 3) > 0, steps=torch.tensor([[1, 3], [3, 3], [6, 8]]), validate=False)
    assert batch.row_of_step().tolist() == [0, -1, -1]
    assert batch.ids_of_steps()["trajectory_ids"].tolist() == [0, -1, -1]
    none = torch.tensor([], dtype=torch.int64)
    empty = PackedBatch.from_lengths([], cu_steps=torch.tensor([0, 0]), group_ids=none, trajectory_ids=none)
    assert all(ids.tolist() == [-1] for ids in empty.ids_of_steps().values())


def test_rows_of_tokens():
    batch = PackedBatch.from_lengths([0, 2, 0, 1], total_tokens=5)
    assert batch.row_of_token().tolist() == [1, 1, 3, -1, -1]
