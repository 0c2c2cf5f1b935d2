"""policy_loss on every backend: worked numbers, ties, and broken structure."""

import functools
import itertools
import math
from unittest import mock

import pytest
import torch
from catalogue import assert_exact, bits, run
from conftest import NATIVE
from devices import garbage_in_new_memory
from gate_examples import example_of

import hpo_core as hpo
from hpo_core import gates, testing
from hpo_core.gates import Clip, Drop, Level, RatioGate
from hpo_core.specs import Head, Routing
from hpo_core.testing import Layout, PolicyLossExample

# ----------------------------------------------------------------------------------------------------- worked numbers
# Section 11 of the methods' notes on gating: two sequences of 3 and 4 tokens.

OLD = [-0.9, -1.2, -0.3, -2.0, -0.7, -1.5, -0.1]
X = [0.30, -0.10, 0.05, -0.40, 0.25, 0.02, -0.05]
WORKED = {
    "PPO": (gates.ppo_clip(0.2, 0.2), "token", -0.161197, [0, -0.129262, -0.150182, 0, 0.091716, 0.072872, 0.067945]),
    "DAPO": (gates.dapo(), "token", -0.172626, [0, -0.129262, -0.150182, 0, 0.091716, 0.072872, 0.067945]),
    "dual clip": (
        gates.ppo_clip(0.2, 0.2, 1.25), "token", -0.163628, [0, -0.129262, -0.150182, 0, 0, 0.072872, 0.067945],
    ),
    "GSPO": (gates.gspo(), "sequence", -0.250275, [0] * 7),
    "GSPO, wide": (gates.gspo(0.2, 0.2), "sequence", -0.304453, [-0.181151] * 3 + [0.059750] * 4),
    "GSPO-token, wide": (gates.gspo_token(0.2, 0.2), "sequence", -0.304453, [-0.181151] * 3 + [0.059750] * 4),
    "CISPO": (
        gates.cispo(ratio_cap=1.2), "token", 0.036919,
        [-0.171429, -0.129262, -0.150182, 0.047880, 0.085714, 0.072872, 0.067945],
    ),
}  # fmt: skip


def worked_example(gate, mode):
    batch = hpo.PackedBatch.from_lengths([3, 4])
    aggregate = {"token": hpo.aggregation.token_mean, "sequence": hpo.aggregation.seq_mean_token_mean}[mode]
    old = torch.tensor(OLD)
    keywords = {"weights": aggregate(batch), "advantage_level": "row"}
    return PolicyLossExample(old + torch.tensor(X), old, torch.tensor([1.0, -0.5]), batch, gate, keywords)


@pytest.mark.parametrize("gate, mode, loss, grad", WORKED.values(), ids=WORKED)
def test_worked_numbers(backend, gate, mode, loss, grad):
    out = run(backend, worked_example(gate, mode))
    assert out.loss.item() == pytest.approx(loss, abs=1e-6)
    assert out.grad.tolist() == pytest.approx(grad, abs=1e-6)


@pytest.mark.parametrize("gate, mode, loss, grad", WORKED.values(), ids=WORKED)
def test_worked_numbers_of_the_reference(gate, mode, loss, grad):
    expected = testing.expect_policy_loss(worked_example(gate, mode))
    assert expected["loss"].exact.item() == pytest.approx(loss, abs=6e-7)  # printed with six digits
    assert expected["grad"].exact.tolist() == pytest.approx(grad, abs=6e-7)


def test_worked_metrics(backend):
    metrics = run(backend, worked_example(gates.ppo_clip(), "token")).metrics.compute()
    assert metrics["kl_old_k1"] == pytest.approx(-0.01, abs=1e-6)
    assert metrics["kl_old_k2"] == pytest.approx(0.023421, abs=1e-6)
    assert metrics["kl_old_k3"] == pytest.approx(0.023106, abs=1e-6)
    assert metrics["clip_fraction"] == pytest.approx(2 / 7)
    assert (metrics["tokens"], metrics["rows"]) == (7, 2)


# --------------------------------------------------------------------------------------------------------------- ties


def test_ratio_exactly_at_its_bound_passes_the_gradient(backend):
    tie = Clip((1.0, 1.0), (1.0, 1.0))
    for gate in (
        RatioGate("t", tie),
        RatioGate("t", tie, head=Head.SCORE),
        RatioGate("t", Drop(), (Level(tie, Routing.SELF),)),
    ):
        example = testing.random_policy_loss(
            0, gates.reinforce(), {"weights"}, layout=Layout((3, 2), 0, "none", False, 5)
        )
        example = example._replace(gate=gate, logp=example.old_logp)
        expected = -(example.spread(example.weights()) * example.spread(example.advantages))
        out = run(backend, example)
        assert torch.equal(out.grad.cpu(), expected)
        assert sum(out.metrics[f"clipped_{side}"].item() for side in ("high_positive", "low_negative")) == 0


def test_bounds_per_token_are_inclusive_and_exact(backend):
    """x = 0 with a bound at 1, just above and just below: inclusive, and no rounding of the comparison."""
    above, below = torch.nextafter(torch.ones(2), torch.tensor([2.0, 0.0])).tolist()
    low = torch.tensor([1.0, above, below, 0.5, 0.5, 0.5])
    high = torch.tensor([2.0, 2.0, 2.0, 1.0, below, above])
    for advantage, passes in ((1.0, [1, 1, 1, 1, 0, 1]), (-1.0, [1, 0, 1, 1, 1, 1])):
        example = testing.random_policy_loss(0, gates.dapo(), {"weights"}, layout=Layout((6,), 0, "none"))
        example = example._replace(logp=example.old_logp, advantages=torch.tensor([advantage])).given(
            gate_inputs=gates.GateInputs(bounds=(low, high)), weights=torch.ones(1)
        )
        assert (run(backend, example).grad != 0).int().tolist() == passes


def test_score_equal_to_the_threshold(backend):
    """Selected by >=, not by >; the two zeros are equal."""
    tie = torch.tensor(0.1)
    entropy = torch.stack(
        (torch.tensor(0.5), tie, torch.nextafter(tie, torch.tensor(0.0)), torch.tensor(0.0), torch.tensor(-0.0))
    )
    example = testing.random_policy_loss(0, gates.dapo(), {"weights"}, layout=Layout((5,), 0, "none"))
    example = example._replace(logp=example.old_logp, advantages=torch.ones(1))
    for threshold, strict, expected in (
        (0.1, False, [1, 1, 0, 0, 0]),
        (0.1, True, [1, 0, 0, 0, 0]),
        (0.0, False, [1, 1, 1, 1, 1]),
        (-0.0, True, [1, 1, 1, 0, 0]),
    ):
        window = hpo.entropy.EntropyWindow("tie", hpo.entropy.forking_tokens().quantile, strict=strict)
        given = {"entropy": entropy, "window": window, "threshold": torch.tensor([threshold])}
        out = run(backend, example.given(weights=torch.ones(1), **given))
        assert (out.grad != 0).int().tolist() == expected


def test_nothing_is_selected_by_an_unfitted_threshold(backend):
    example = example_of(1, gates.dapo(), {"window"}, None).given(threshold=torch.tensor([math.nan]))
    out = assert_exact(backend, example)
    assert out.loss.item() == 0 and out.metrics["selected"].item() == 0


# --------------------------------------------------------------------------------------------------- broken structure


BROKEN_OFFSETS = [
    [0, 5, 2, 4, 6],
    [0, -3, 2, 6, 6],
    [0, 2, 99, 4, 6],
    [-5, 0, 3, 3, 10**15],
    [-(2**62), 2**62, 3, -1, 2**63 - 1],
    [6, 5, 4, 3, 2],
    [3, 3, 3, 3, 3],
]


@pytest.mark.parametrize("offsets", BROKEN_OFFSETS, ids=str)
def test_broken_offsets_are_counted_and_harmless(backend, offsets):
    bad = sum(begin < 0 or end < begin or end > 6 for begin, end in itertools.pairwise(offsets))
    batch = hpo.PackedBatch(torch.tensor(offsets), total_tokens=6, validate=False)
    for gate in (gates.dapo(), gates.gspo(0.1, 0.2)):
        logp = torch.linspace(-2, -1, 6)
        keywords = {"weights": torch.full((4,), 0.5), "advantage_level": "row"}
        example = PolicyLossExample(logp, logp - 0.05, torch.tensor([1.0, -1.0, 2.0, 0.5]), batch, gate, keywords)
        out = run(backend, example)
        assert out.metrics["bad_offsets"].item() == bad
        assert torch.isfinite(out.loss) and torch.isfinite(out.grad).all()
        claimed = torch.zeros(6, dtype=torch.bool)  # by a row that is not broken; a search may still pass it over
        for begin, end in itertools.pairwise(offsets):
            claimed[max(begin, 0) : end] |= 0 <= begin <= end <= 6
        assert bits(out.grad[~claimed]) == bits(torch.zeros_like(out.grad[~claimed]))


@pytest.mark.parametrize("offsets", [[0, 900, 300, 1900], [0, 1300, 400, 450, 2000], [700, 2000, 100, 800]], ids=str)
def test_of_rows_that_overlap_the_last_one_owns_a_token(backend, offsets):
    """In several tiles; the call after it is as sound as any other. Triton's search finds any of the rows."""
    batch = hpo.PackedBatch(torch.tensor(offsets), total_tokens=2000, validate=False)
    logp = torch.linspace(-2, -1, 2000)
    keywords = {"weights": torch.full((batch.rows,), 0.5), "advantage_level": "row"}
    advantages = torch.tensor([1.0, -1.0, 2.0, 0.5])[: batch.rows]
    example = PolicyLossExample(logp, logp - 0.05, advantages, batch, gates.dapo(), keywords)
    owner = torch.full((2000,), -1)
    for row, (begin, end) in enumerate(itertools.pairwise(offsets)):
        owner[begin : max(begin, end)] = row
    out = run(backend, example)
    assert out.metrics["bad_offsets"].item() == 1
    expected = torch.where(owner < 0, 0.0, -0.5 * advantages[owner] * math.exp(0.05))
    if backend != "triton":
        assert out.metrics["tokens"].item() == (owner >= 0).sum()
        assert out.metrics["rows"].item() == len(set(owner.tolist()) - {-1})
        torch.testing.assert_close(out.grad, expected, rtol=1e-5, atol=0)
    assert_exact(backend, example_of(1, gates.dapo(), set(), None))


STREAMS = itertools.count(5000)  # a bug leaves a counter behind


def test_more_threads_than_portions_of_the_work():
    """A loop of the CPU hands out at most 64; with more threads some begin at another's."""
    logp, batch = torch.linspace(-3.0, -0.1, 400_000), hpo.PackedBatch.from_lengths([400] * 1000)
    given = (logp, logp.flip(0), torch.linspace(-1.0, 1.0, 1000), batch)
    found = []
    for threads in (1, 130):
        torch.set_num_threads(threads)
        out = hpo.policy_loss_and_grad(*given, gates.ppo_clip(), backend="cpu")
        found.append(bits(out.loss, out.grad, out.metrics.vector))
    assert found[0] == found[1]


@pytest.mark.parametrize("backend", [backend for backend in NATIVE if backend == "cuda_emulated"])
def test_streams_count_their_blocks_apart(backend):
    """The number of threads stands for a stream in the emulation. Each of a thousand has a counter, which is 0 again
    after a call; later ones clear one before."""
    batch, logp = hpo.PackedBatch.from_lengths([3, 2]), torch.linspace(-2, -1, 5)
    keywords = {"weights": torch.ones(2)}
    example = PolicyLossExample(logp, logp - 0.05, torch.tensor([1.0, -1.0]), batch, gates.dapo(), keywords)
    first, outs = next(STREAMS), []
    for stream in (first, first, *itertools.islice(STREAMS, 1100), first):
        with mock.patch.object(torch, "get_num_threads", functools.partial(int, stream)), garbage_in_new_memory():
            outs.append(run(backend, example))
    assert len({(*bits(out.loss), *bits(out.grad)) for out in outs}) == 1
    # Where no counter is 0 any more, no block is the last, and all losses are the same garbage.
    torch.testing.assert_close(outs[0].loss.double(), run("reference", example).loss.double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("nan", [False, True])
@pytest.mark.parametrize("at", [0, 511, 512, 513, 1023, 1024, 1536, 1999, None])
def test_a_row_counts_wherever_its_valid_token_is(backend, at, nan):
    """The first of three rows has none, the second one at most."""
    place = torch.arange(4500)
    mask = place >= 3500
    if at is not None:
        mask |= place == 1500 + at
    logp = torch.where(mask, -1.0, math.nan) if nan else torch.full((4500,), -1.0)
    batch = hpo.PackedBatch.from_lengths([1500, 2000, 1000], mask=None if nan else mask)
    for old_logp in (logp, None):
        out = hpo.policy_loss_and_grad(
            logp, old_logp, torch.ones(3), batch, advantage_level="row", weights=torch.ones(3), backend=backend
        )
        assert out.metrics["rows"] == 1 + (at is not None)
