"""Every entropy preset on one optimiser step, however its rows are packed, shared out and cut: the masks of one process
to the bit, and other numbers, unless they come from sums that ranks round."""

import functools
import inspect
import itertools

import pytest
import torch
import torch.distributed as dist
from entropy_steps import LENGTHS, METHODS, PENALTIES, SHARES, drawn
from ranks import count_collectives, on_ranks
from valid_calls import tensors_of

import hpo_core as hpo

KINDS = ("ties", "broken")
# The square of a mean over rows is of one call, controllers move one number.
OTHERS = {
    "siren", "siren_mean", "skywork_coefficient", "trl_coefficient", "entropic", "target_temperature", "ares_kappa",
    "ares_penalty",
}  # fmt: skip
every_method = pytest.mark.parametrize("name", METHODS)
every_kind = pytest.mark.parametrize("kind", KINDS)


def test_every_preset_is_tried():
    modules = (hpo.entropy, hpo.entropy.reconstructed)
    public = {name: getattr(each, name) for each in modules for name in each.__all__}
    presets = {name for name, each in public.items() if inspect.isfunction(each) and hasattr(each, "provenance")}
    assert presets - OTHERS <= METHODS.keys()


def run(method, step, group=None, cut=True):
    """The result for the step, or this rank's part of it, and that of its rows one by one where there is one."""
    if method.fit is None:
        return tensors_of(method.run(step, group)), None
    state = method.fit(step, group)
    whole = tensors_of(method.apply(step, state))
    if method.level == "step of training" or not cut:
        return whole, None
    rows = [tensors_of(method.apply(step.select([row]), state)) for row in range(step.batch.rows)]
    return whole, [torch.cat(parts) for parts in zip(*rows, strict=True)]


@functools.cache
def alone(name, kind):
    return run(METHODS[name], drawn(kind))


def compute(rank, names=tuple(METHODS), kinds=KINDS, shares=tuple(SHARES)):
    """The results of a rank for each number of processes that share the step, and the collectives of each call."""
    groups = {world: dist.new_group(list(range(world))) for world in shares}
    found, calls = {}, count_collectives()
    for world, kind, name in itertools.product(shares, kinds, names):
        if rank < world:
            step = drawn(kind).select(SHARES[world][rank])
            calls.clear()
            results = run(METHODS[name], step, groups[world], cut=world == max(shares))
            found[world, kind, name] = *results, dict(calls)
    found["at the mean"] = at_the_mean(rank)
    return found


def at_the_mean(rank):
    """The tokens that HICRA takes of each row of this rank. The mean of the five lengths is 4, which the mean of the
    means of ranks misses by its rounding."""
    rows = ([0, 1], [2], [3, 4], [])[rank]
    whole = hpo.PackedBatch.from_lengths([4, 4, 8, 1, 3], group_ids=torch.zeros(5, dtype=torch.int64))
    part, tokens = whole.select(torch.tensor(rows, dtype=torch.int64))
    entropy = torch.arange(20.0)[tokens]
    chosen = hpo.entropy.hicra_tokens(entropy, torch.ones(part.rows), part, process_group=dist.group.WORLD)
    return hpo.entropy.count_of_rows(chosen, part)


@pytest.fixture(scope="module")
def ranks():
    return on_ranks(max(SHARES), compute)


def places(step, rows, level):
    """Where the tokens, steps or rows of these rows are in the whole step."""
    rows = torch.tensor(list(rows), dtype=torch.int64)
    if level == "row":
        return rows
    row_of = step.row if level == "token" else step.batch.row_of_step()
    return torch.cat([(row_of == row).nonzero().flatten() for row in rows] or [rows])


def agree(got, expected, exact):
    """Numbers are those of one process to the bit, or within rounding; masks and integers always to the bit."""
    assert len(got) == len(expected) > 0
    for one, other in zip(got, expected, strict=True):
        tolerance = 0 if exact or not other.is_floating_point() else 2e-6
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)


@every_kind
@every_method
def test_ranks_and_micro_batches_are_one_process(ranks, kind, name):
    method, (expected, _) = METHODS[name], alone(name, kind)
    for world in SHARES:
        parts = [each[world, kind, name][0] for each in ranks[:world]]
        for rank, rows in enumerate(SHARES[world]):
            own = expected
            if method.level != "step of training":
                own = [each[places(drawn(kind), rows, method.level)] for each in expected]
            agree(parts[rank], own, method.exact)
            one_by_one = ranks[rank][world, kind, name][1]
            if one_by_one:
                agree(one_by_one, parts[rank], exact=True)


# An int64 histogram for each digit of a key, of 10, 11 and 11 bits, and the number of errors.
HISTOGRAMS, DIGIT = {"all_reduce": 3, "bytes": (1025 + 2048 + 2048) * 8}, 16 * 1024
COLLECTIVES = {
    "forking_tokens": HISTOGRAMS, "ares": HISTOGRAMS,
    "fit_pivot": {"all_reduce": 3, "all_gather": 4}, "hapo": {"all_reduce": 3, "all_gather": 4},
    "ares_windows": {"all_gather": 4}, "ares_next_windows": {"all_gather": 2}, "aepo_ruc": {"all_gather": 2},
    "steer": {"all_gather": 2}, "covariance": {"all_gather": 4}, "hicra_tokens": {"all_gather": 2},
    "d3s_tokens": {"all_reduce": 4, "all_gather": 2}, "ares_difficulty": {"all_gather": 2}, "archer": {},
    "siren_tokens": {}, "less_tokens": {}, "ulorl": {}, "erc": {}, "gtpo": {"all_gather": 10},
    "empg": {"all_gather": 8},
}  # fmt: skip


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_are_counted(ranks, name):
    """The traffic that docs/entropy_ranks.md states; no more for four ranks than for two, and never more than 16
    KiB."""
    for world, found in itertools.product((2, 4), ranks):
        calls = found.get((world, "ties", name), (None, None, COLLECTIVES[name]))[2]
        assert {kind: calls[kind] for kind in COLLECTIVES[name]} == COLLECTIVES[name]
        assert set(calls) <= {*COLLECTIVES[name], "bytes", "largest"}
        assert calls.get("largest", 0) <= DIGIT


def test_a_row_of_the_mean_length_is_not_longer_than_it(ranks):
    assert torch.cat([found["at the mean"] for found in ranks]).tolist() == [0, 0, 2, 0, 0]


@every_kind
@every_method
def test_packing_and_micro_batches_do_not_matter(kind, name):
    method, step = METHODS[name], drawn(kind)
    expected, one_by_one = alone(name, kind)
    if one_by_one:
        agree(one_by_one, expected, exact=True)
    for seed in range(3):
        order = torch.randperm(len(LENGTHS), generator=torch.Generator().manual_seed(seed)).tolist()
        got, _ = run(method, step.select(order))
        if method.level != "step of training":
            at = places(step, order, method.level)
            agree(got, [each[at] for each in expected], method.exact)
        else:
            agree(got, expected, method.exact)


@every_kind
@pytest.mark.parametrize("shares", SHARES.values(), ids=SHARES)
@pytest.mark.parametrize("penalty", PENALTIES.values(), ids=PENALTIES)
def test_a_penalty_is_the_sum_of_those_of_its_parts(penalty, shares, kind):
    step = drawn(kind)
    parts = [step.select(rows) for rows in shares]
    got = sum(penalty(part, part.entropy) for part in parts)
    torch.testing.assert_close(got, penalty(step, step.entropy), rtol=1e-6, atol=0)


@every_method
def test_masks_are_neither_empty_nor_full(name):
    """In the steps of the other tests, where numbers are not all the same, either."""
    for each in alone(name, "broken")[0]:
        assert each.unique().numel() > 1 or each.numel() == 1


@pytest.fixture(scope="module")
def large():
    lengths = torch.randint(0, 400, (500,), generator=torch.Generator().manual_seed(1)).tolist()
    return drawn("ties", lengths, [row // 8 for row in range(500)])


@every_method
def test_the_number_of_threads_does_not_matter(large, name):
    method, before, found = METHODS[name], torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(
                tensors_of(
                    method.run(large, None) if method.fit is None else method.apply(large, method.fit(large, None))
                )
            )
    finally:
        torch.set_num_threads(before)
    agree(*found, exact=True)
