"""Selections of rollouts, each against plain loops."""

import itertools
import math

import numpy as np
import pytest
import torch

from hpo_core import advantages
from hpo_core.advantages import reconstructed


def groups(seed):
    draw = np.random.default_rng(seed)
    n = int(draw.integers(1, 14))
    return draw.integers(0, 5, n) / 4, draw.integers(-1, 3, n), draw.integers(1, 4, n).astype(float)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_d3s_samples(k):
    for seed in range(120):
        values, group, _ = groups(seed)
        got = advantages.d3s_samples(torch.tensor(values), torch.tensor(group), k).numpy()
        assert not got[group < 0].any()
        for key in set(group[group >= 0]):
            own = np.flatnonzero(group == key)
            assert got[own].sum() == min(k, len(own))
            if len(own) > k:
                most = max(values[list(some)].var() for some in itertools.combinations(own, k))
                assert values[own[got[own]]].var() == pytest.approx(most, abs=1e-12)


def test_pf_ppo_and_dynamic_contrastive():
    for seed in range(120):
        values, group, length = groups(seed)
        tensors = torch.tensor(values), torch.tensor(group)
        expected, contrast = np.zeros(len(values), bool), np.zeros(len(values), bool)
        for key in set(group[group >= 0]):
            own = np.flatnonzero(group == key)
            ordered = sorted(own, key=lambda place: values[place])
            expected[ordered[:1]] = expected[ordered[-2:]] = True
            ordered = sorted(own, key=lambda place: (values[place], -length[place]))
            contrast[ordered[:1]] = contrast[ordered[-2:]] = True
        assert (advantages.pf_ppo(*tensors, best=2, worst=1).numpy() == expected).all()
        got = reconstructed.dynamic_contrastive(*tensors, torch.tensor(length), best=2, worst=1)
        assert (got.numpy() == contrast).all()


def test_gfpo_is_grpo_of_the_shortest():
    """Mean and deviation are those of the responses that are kept (arXiv 2508.09726)."""
    rewards, ids = torch.tensor([1.0, 0, 1, 0, 0.5, 3, 1, 2]), torch.tensor([0, 0, 0, 0, 0, 7, 7, 7])
    lengths = torch.tensor([90, 20, 30, 80, 10, 5, 6, 7])
    kept = advantages.pf_ppo(-lengths.float(), ids, best=3, worst=0)
    assert kept.tolist() == [False, True, True, False, True, True, True, True]
    found = advantages.grpo(rewards, ids, eps=1e-4, mask=kept)
    expected = [0, -0.5 / 0.5001, 0.5 / 0.5001, 0, 0, 1 / 1.0001, -1 / 1.0001, 0]
    torch.testing.assert_close(found, torch.tensor(expected))


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e9, 1e30])
def test_d3s_samples_of_one_group_do_not_depend_on_the_numbers_of_another(scale):
    """Those with the fewest low ones win among equal variances, whatever stands before."""
    own, other = torch.tensor([0.0, 1, 5, 9, 8.75, 0.25]), torch.tensor([0.1, 0.2, 0.7]) * scale
    ids = torch.tensor([1] * 3 + [2] * 6)
    for k in (1, 2, 3, 4):
        together = advantages.d3s_samples(torch.cat([other, own]), ids, k)
        assert together[3:].tolist() == advantages.d3s_samples(own, None, k).tolist()
        assert together[:3].tolist() == advantages.d3s_samples(other / scale, None, k).tolist()


def test_d3s_samples_of_a_group_are_the_same_among_many_others():
    rewards = torch.randint(0, 5, (20_000, 10), generator=torch.Generator().manual_seed(7)).float()
    ids = torch.arange(20_000).repeat_interleave(10)
    together = advantages.d3s_samples(rewards.flatten(), ids, 5).view_as(rewards)
    alone = [
        advantages.d3s_samples(some.flatten(), ids[: some.numel()], 5).view_as(some) for some in rewards.split(100)
    ]
    assert torch.equal(together, torch.cat(alone))


def test_a_selection_leaves_masked_and_unscorable_units_out():
    values, keep = torch.tensor([0.0, 1.0, math.nan, 2.0]), torch.tensor([True, True, True, False])
    assert advantages.d3s_samples(values, None, 2, mask=keep).tolist() == [True, True, False, False]
    assert advantages.pf_ppo(values, None, mask=keep).tolist() == [True, True, False, False]
