"""Scopes that two ranks share: thresholds and selections are those of one process, to the bit."""

import math

import pytest
import torch
import torch.distributed as dist
from ranks import count_collectives, on_ranks

import hpo_core as hpo
from hpo_core.entropy import quantiles, top_k
from hpo_core.specs import OrderRule

LENGTHS = [4, 9, 1, 0, 6, 3, 3, 8]
ROWS = ([0, 1, 2, 3, 4], [5, 6, 7])
BUCKETS = torch.tensor([2, 0, 0, 2, -1, 2, 5, 0])
KINDS = {
    "distinct": lambda x: x,
    "tied": lambda x: (2 * x).round() / 2,
    "equal": lambda x: torch.full_like(x, 0.7),
    "errors": lambda x: torch.where(x > 1.2, math.nan, torch.where(x < -1.2, -math.inf, x)),
}
SCOPES = {
    "group": lambda rows: {"scope": "group"},
    "trajectory": lambda rows: {"scope": "trajectory"},
    "call": lambda rows: {"scope": "call"},
    "row": lambda rows: {"scope": "row"},
    "step": lambda rows: {"scope": "step"},
    "bucket": lambda rows: {"scope": BUCKETS[rows], "scopes": 6},
    "ids": lambda rows: {"scope": BUCKETS[rows]},
    "hundreds": lambda rows: {"scope": 60 * BUCKETS[rows], "scopes": 301},
    "thousands": lambda rows: {"scope": 900 * BUCKETS[rows], "scopes": 4501},
}
RULES = [("0.7", OrderRule.CEIL), ("0.95", OrderRule.LINEAR), ("1/3", OrderRule.LINEAR), ("0.95", OrderRule.NEAREST)]
UID = torch.tensor([30, 10, 50, 20, 40, 5, 45, 15])


def whole(kind):
    draw = torch.Generator().manual_seed(1)
    tokens = sum(LENGTHS)
    values, mask = torch.randn(tokens, generator=draw), torch.rand(tokens, generator=draw) > 0.2
    batch = hpo.PackedBatch.from_lengths(
        LENGTHS, mask=mask, group_ids=torch.tensor([3, 3, 1, 1, -1, 3, 1, 8]),
        trajectory_ids=torch.tensor([-4, -4, 2, 2, 6, -4, 2, 9]),
        cu_steps=torch.tensor([0, 4, 8, 13, 14, 20, 23, 26, 34]),
        step_ids=torch.tensor([5, 5, -1, 7, -1, 5, 7, -3]),
    )  # fmt: skip
    return KINDS[kind](values), batch


def compute(rank, kinds=tuple(KINDS), names=tuple(SCOPES)):
    found, calls = {}, count_collectives()
    for kind in kinds:
        values, batch = whole(kind)
        part, tokens = batch.select(ROWS[rank])
        for name in names:
            given = {**SCOPES[name](ROWS[rank]), "process_group": dist.group.WORLD}
            for q, rule in RULES:
                calls.clear()
                out = quantiles(values[tokens], part, q, rule=rule, expand=True, **given)
                found[kind, name, q, rule] = out, dict(calls)
            for uid in (None, UID[ROWS[rank]]):
                calls.clear()
                out = top_k(values[tokens], part, 3, uid=uid, **given)
                found[kind, name, uid is None] = out, dict(calls)
    values, batch = whole("distinct")
    nobody = hpo.PackedBatch.from_lengths([], group_ids=torch.tensor([], dtype=torch.int64))
    for name in ("call", "group"):
        given = {"scope": name, "process_group": dist.group.WORLD}
        for holder in (0, None):
            mine = (values, batch) if rank == holder else (torch.tensor([]), nobody)
            found["empty", name, holder] = quantiles(*mine, "0.7", **given), top_k(*mine, 3, **given)
    return found


@pytest.fixture(scope="module")
def ranks():
    return on_ranks(2, compute)


def joined(ranks, key):
    """The results of both ranks, in the order of the tokens of the whole step."""
    return torch.cat([found[key][0] for found in ranks])


@pytest.mark.parametrize("name", SCOPES)
@pytest.mark.parametrize("kind", KINDS)
def test_thresholds_are_those_of_one_process(ranks, kind, name):
    values, batch = whole(kind)
    for q, rule in RULES:
        expected = quantiles(values, batch, q, rule=rule, expand=True, **SCOPES[name](slice(None)))
        torch.testing.assert_close(
            joined(ranks, (kind, name, q, rule)), expected, rtol=0, atol=0, equal_nan=True
        )  # fmt: skip


@pytest.mark.parametrize("name", SCOPES)
@pytest.mark.parametrize("kind", KINDS)
def test_selections_are_those_of_one_process(ranks, kind, name):
    values, batch = whole(kind)
    for default in (True, False):
        expected = top_k(values, batch, 3, uid=None if default else UID, **SCOPES[name](slice(None)))
        assert torch.equal(joined(ranks, (kind, name, default)), expected)


def collectives(found, *key):
    """The bytes of the largest collective of a call, and how many of each kind it took."""
    calls = found[key][1]
    return calls.get("largest", 0), {kind: calls[kind] for kind in calls if kind.startswith("all_")}


def test_collectives_are_few(ranks):
    """A quantile takes three all-reduces, an interpolation one more; a selection gathers one table, whose sizes come
    first. The numbering of ids that ranks share takes two gathers and an all-reduce."""
    for found in ranks:
        assert collectives(found, "tied", "call", "0.7", OrderRule.CEIL) == (16 * 1024, {"all_reduce": 3})
        assert collectives(found, "tied", "bucket", "0.7", OrderRule.CEIL) == (6 * 16 * 1024, {"all_reduce": 3})
        assert collectives(found, "tied", "bucket", "0.95", OrderRule.LINEAR)[1] == {"all_reduce": 4}
        assert collectives(found, "tied", "call", True)[1] == {"all_reduce": 3, "all_gather": 2}
        assert collectives(found, "tied", "group", False)[1] == {"all_reduce": 4, "all_gather": 4}
        assert collectives(found, "tied", "row", True) == (0, {})


def test_many_scopes_take_small_histograms(ranks):
    """More all-reduces, of 2 KiB or 128 bytes for each scope; the first has the number of errors beside them."""
    for name, scopes, count, largest in (("hundreds", 301, 4, 257), ("thousands", 4501, 8, 17)):
        for found in ranks:
            calls = collectives(found, "tied", name, "0.7", OrderRule.CEIL)
            assert calls == (scopes * largest * 8, {"all_reduce": count})


def test_a_rank_without_rows_keeps_no_other_waiting(ranks):
    values, batch = whole("distinct")
    for name, count in (("call", 1), ("group", 3)):
        expected = quantiles(values, batch, "0.7", scope=name)[:count]
        for found in ranks:
            assert torch.equal(found["empty", name, 0][0], expected)
            assert found["empty", name, None][0].isnan().all()
        assert torch.equal(ranks[0]["empty", name, 0][1], top_k(values, batch, 3, scope=name))
        assert ranks[1]["empty", name, 0][1].shape == (0,)


def steps_without_names(rank, counts, has_gaps):
    steps = counts[rank]
    values, offsets = torch.arange(2.0 * steps) + 100 * rank, 2 * torch.arange(steps + 1)
    ranges = {"steps": torch.stack((offsets[:-1], offsets[1:]), 1)} if has_gaps else {"cu_steps": offsets}
    batch = hpo.PackedBatch.from_lengths([2 * steps], **ranges)
    given = {"scope": "step", "process_group": dist.group.WORLD}
    return quantiles(values, batch, "1", **given).tolist(), top_k(values, batch, 1, **given).tolist()


@pytest.mark.parametrize("has_gaps", [False, True])
@pytest.mark.parametrize("counts", [(2, 2), (2, 1), (2, 0)])
def test_steps_without_ids_stay_with_their_rank(counts, has_gaps):
    for rank, found in enumerate(on_ranks(2, steps_without_names, counts, has_gaps)):
        steps = counts[rank]
        assert found == ([2.0 * step + 1 + 100 * rank for step in range(steps)], [False, True] * steps)
