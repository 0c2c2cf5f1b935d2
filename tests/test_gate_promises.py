"""What every gate promises whatever it computes: masks, the on-policy gradient, bits, overflow."""

import math

import pytest
import torch
from test_gates import LONG, PENALTIES, TOKEN_GATES, assert_exact, bits, every_gate, optional_inputs, run, some_gates

import hpo_core as hpo
from hpo_core import gates, testing
from hpo_core.gates import FirstOrder
from hpo_core.specs import Head
from hpo_core.testing import Layout


@every_gate
def test_masked_is_never_read(backend, gate):
    features = {"weights", "kl", "entropy", "window", *optional_inputs(gate)} - {"on_policy"}
    example = testing.random_policy_loss(0, gate, features, layout=Layout((3, 0, 4, 2), 3, "some", True, 11))
    clean, hole = run(backend, example), ~example.valid()
    assert hole.sum() >= 5
    for poison in (math.nan, math.inf, -math.inf):
        dirty = run(backend, example.poisoned(poison))
        assert bits(dirty.loss) == bits(clean.loss)
        assert bits(dirty.grad) == bits(clean.grad)
        assert bits(dirty.metrics.vector) == bits(clean.metrics.vector)
        assert bits(dirty.grad[hole]) == bytes(4 * int(hole.sum()))  # exactly +0


@every_gate
def test_all_masked_batch(backend, gate):
    example = testing.random_policy_loss(0, gate, {"weights", "kl"}, layout=Layout((3, 0, 2), 1, "all", True, 2))
    out = run(backend, example.poisoned(math.nan))  # run() differentiates: the graph is connected
    assert out.loss.item() == 0.0 and bits(out.grad) == bytes(4 * 6)
    assert out.metrics["tokens"].item() == 0 and out.metrics["rows"].item() == 0


@pytest.mark.parametrize(
    "layout", [Layout(()), Layout((), tail=4), Layout((0, 0)), Layout((1,)), Layout((0, 1, 0), 2)], ids=str
)
def test_degenerate_batches(backend, layout):
    for gate in (gates.dapo(), gates.gspo(), gates.cispo()):
        assert_exact(backend, testing.random_policy_loss(0, gate, {"weights", "kl", "token_weight"}, layout=layout))
        assert_exact(backend, testing.random_policy_loss(0, gate, {"trajectories"}, layout=layout))


@every_gate
@pytest.mark.parametrize("given_old", [True, False])
def test_on_policy_gradient(backend, gate, given_old):
    """-(w A) W to the bit, zeros of both signs included; the segment mean where a gate drops the residual."""
    features = {"weights", "trajectories"} | (
        {"token_mask", "token_weight"} if gate.first_order is FirstOrder.EXACT else set()
    )
    example = testing.random_policy_loss(0, gate, features, layout=Layout((4, 1, 0, 5, 3), 2, "some", True, 8))
    if gate.first_order is FirstOrder.SEGMENT_MEAN:  # constant on every trajectory
        example = example.on_rows(lambda x: torch.full_like(x, 0.3711))
    zero = torch.arange(example.logp.numel()) % 2 == 0
    example = example._replace(logp=torch.where(zero, -0.0, example.logp))
    example = example._replace(old_logp=torch.where(zero, 0.0, example.logp) if given_old else None)
    expected = -(example.spread(example.weights()) * example.spread(example.advantages))
    expected = expected * example.keywords.get("token_weight", torch.ones_like(expected))
    selected = example.valid() & example.keywords.get("token_mask", torch.tensor(True))
    out = run(backend, example)
    assert torch.equal(out.grad.cpu()[selected], expected[selected])
    assert bits(out.grad[~selected]) == bytes(4 * int((~selected).sum()))


def test_on_policy_segment_mean(backend):
    """Where w A varies on the trajectory, gspo gives its mean to every token, unselected ones included."""
    features = {"weights", "token_advantages", "token_mask", "trajectories"}
    example = testing.random_policy_loss(0, gates.gspo(), features, layout=Layout((4, 3, 0, 5), 1, "some", True, 21))
    example = example._replace(logp=example.old_logp)
    a = (example.spread(example.weights()).double() * example.advantages.double()) * example.keywords["token_mask"]
    owner, valid = example.trajectory(), example.valid()
    expected = torch.zeros_like(a)
    for trajectory in set(owner[valid].tolist()):
        own = valid & (owner == trajectory)
        expected[own] = -a[own].mean()
    torch.testing.assert_close(run(backend, example).grad.cpu().double(), expected, rtol=4 * 2.0**-24, atol=1e-9)


@every_gate
def test_gradient_does_not_depend_on_packing(backend, gate):
    """Bitwise, whatever the order of rows, the neighbours, the place in the pack and the alignment in memory."""
    example = testing.random_policy_loss(
        0,
        gate,
        {"weights", *optional_inputs(gate), "kl"} - {"window", "on_policy"},
        layout=Layout((3, 7, 1, 0, 6), 0, "some", True, 17),
    )
    whole = run(backend, example)
    for order in ([4, 3, 2, 1, 0], [1, 0, 4, 2, 3]):
        shuffled, tokens = example.select(torch.tensor(order))
        out = run(backend, shuffled)
        assert bits(out.grad) == bits(whole.grad[tokens]) and bits(out.tokens) == bits(whole.tokens[tokens])
    trajectory = torch.arange(5) if example.batch.trajectories is None else example.batch.trajectories[0]
    for number in range(5):
        alone, tokens = example.select(trajectory == number)
        assert bits(run(backend, alone).grad) == bits(whole.grad[tokens])


def test_gradient_of_a_long_row_does_not_depend_on_its_place(backend):
    """A row of several tiles, moved by 1 to 3 tokens: no tile boundary may be aligned to the pack."""
    for gate in (gates.gspo(0.2, 0.2), gates.dapo()):
        example = testing.random_policy_loss(
            0, gate, {"weights", "token_advantages"}, layout=Layout((1, 2, 2600, 3), seed=2, masked="some")
        )
        row, tokens = example.select(torch.tensor([2]))
        alone = run(backend, row).grad
        for order in ([2, 0, 1, 3], [0, 2, 1, 3], [0, 1, 2, 3]):
            moved, index = example.select(torch.tensor(order))
            inside = torch.isin(index, tokens)
            assert bits(run(backend, moved).grad[inside]) == bits(alone)


@some_gates
def test_same_bits_in_every_run_and_on_any_number_of_threads(backend, gate):
    example = testing.random_policy_loss(0, gate, {"weights", "trajectories", "kl", "token_advantages"}, layout=LONG)
    torch.set_num_threads(1)
    first = run(backend, example)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        again = run(backend, example)
        for name in ("loss", "grad", "tokens"):
            assert bits(getattr(again, name)) == bits(getattr(first, name)), (threads, name)
        assert bits(again.metrics.vector) == bits(first.metrics.vector)


@some_gates
def test_order_of_blocks_and_threads_does_not_matter(gate, monkeypatch):
    """A data race in the CUDA kernels shows as a difference between these orders."""
    if not hpo.backends()["cuda_emulated"]:
        pytest.skip("cuda_emulated is not built")
    features = {"weights", "trajectories", "kl", "token_advantages", "window"}
    for layout in (Layout((3, 0, 70, 1, 33), 3, "some", True, 4), LONG):
        example = testing.random_policy_loss(0, gate, features, layout=layout)
        seen = set()
        for order in ("forward", "reverse", "random:7"):
            monkeypatch.setenv("HPO_EMULATION_ORDER", order)
            out = run("cuda_emulated", example)
            seen.add((bits(out.loss), bits(out.grad), bits(out.tokens), bits(out.metrics.vector)))
        assert len(seen) == 1


@some_gates
def test_micro_batches_give_the_same_gradient(backend, gate):
    layout = Layout((5, 2, 0, 7, 1, 4), 0, "some", False, 6)
    example = testing.random_policy_loss(0, gate, {"weights", "kl", "token_weight"}, layout=layout)
    whole, metrics, loss, grad = run(backend, example), None, 0.0, torch.empty(0)
    begin = 0
    for part, rows, _, tokens in example.batch.micro_batches(8):
        micro, index = example.select(rows)
        assert torch.equal(index, tokens)
        out, begin = run(backend, micro), begin + part.rows
        loss, grad = loss + out.loss.double().cpu(), torch.cat((grad, out.grad.cpu()))
        metrics = out.metrics if metrics is None else metrics + out.metrics
    assert begin == example.batch.rows
    assert bits(grad) == bits(whole.grad)
    expected = testing.expect_policy_loss(example)
    testing.assert_within_budget("summed loss", loss, expected["loss"])
    testing.assert_within_budget("added metrics", metrics.vector, expected["metrics"])


@every_gate
def test_overflow(backend, gate):
    """Log-ratios far beyond +-60 and |w A| = 1e12: nothing is NaN or infinite, and slopes stay those of e^60."""
    example = testing.random_policy_loss(0, gate, {"weights"}, layout=Layout((6, 4), 0, "none", False, 1))
    x = torch.tensor([120.0, -120.0, 59.0, -61.0, 0.1, 1e30, 88.0, 300.0, 61.0, 120.0])
    size = 1e9 if gate.head is Head.SCORE else 1e12  # under the score head the loss has a factor logp as well
    old = torch.where(x > 0, -x, 0.0) - 0.5
    example = example._replace(
        logp=torch.where(x > 0, -0.5, x - 0.5), old_logp=old, advantages=torch.tensor([size, -size])
    )
    example = example.given(weights=torch.ones(2))
    out = assert_exact(backend, example)
    assert torch.isfinite(out.loss) and torch.isfinite(out.grad).all()


@pytest.mark.parametrize("levels", [(), (gates.Level(gates.Identity()),)], ids=["token", "trajectory"])
def test_huge_losses_of_both_signs_cancel(levels, backend):
    """Three of these would overflow a float32: what is added up in it knows when to stop."""
    gate = gates.RatioGate("identity", gates.Identity(), levels)
    batch = hpo.PackedBatch.from_lengths([48, 47]).to(testing.device_of(backend))
    logp, one = torch.full((95,), -0.5, device=batch.device), torch.ones(2, device=batch.device)
    advantages = torch.tensor([1e12, -1e12], device=batch.device)
    out = hpo.policy_loss_and_grad(logp, logp - 61, advantages, batch, gate, weights=one, backend=backend)
    assert out.loss.item() == pytest.approx(-1e12 * math.exp(60), rel=2e-6)


def test_saturation_keeps_the_slope(backend):
    example = testing.random_policy_loss(0, TOKEN_GATES["identity"], {"weights"}, layout=Layout((4,), 0, "none"))
    example = example._replace(logp=torch.full((4,), -0.5), old_logp=torch.tensor([-60.5, -61.5, -100.5, -1e20]))
    grad = run(backend, example).grad.cpu()
    assert (grad == grad[0]).all() and grad[0] != 0


@every_gate
def test_infinite_and_nan_log_ratios(backend, gate):
    """NaN leaves, infinity saturates without a derivative, both are counted; an infinite reference log-ratio too."""
    example = testing.random_policy_loss(0, gate, {"weights", "kl"}, layout=Layout((7, 5), 1, "none", False, 9))
    logp, reference = example.logp.clone(), example.keywords["ref_logp"].clone()
    logp[1], logp[3], logp[8] = -math.inf, math.nan, -math.inf
    reference[4], reference[9] = -math.inf, math.nan
    example = example._replace(logp=logp).given(ref_logp=reference)
    out = assert_exact(backend, example)
    assert torch.isfinite(out.loss) and torch.isfinite(out.grad).all()
    assert out.grad[[1, 3, 8, 9]].tolist() == [0.0] * 4
    assert out.metrics["nan_tokens"].item() == 2 and out.metrics["infinite_tokens"].item() == 3


def test_every_nan_leaves(backend):
    """Whatever its lower bits say, also where whole vectors of a row go through one pass."""
    for gate in (gates.dapo(), gates.gspo(0.1, 0.2), gates.fiberpo()):
        batch = hpo.PackedBatch.from_lengths([48, 33]).to(testing.device_of(backend))
        found = []
        for nan in (0x7FC00000, 0x7FC00001, 0x7FC000FF, 0x7FD55555, -0x3FFFFF):
            logp = torch.full((81,), -0.5)
            logp.view(torch.int32)[[5, 40, 60]] = nan
            logp = logp.to(batch.device)
            advantages = torch.tensor([1.0, -2.0], device=batch.device)
            old_logp = torch.full_like(logp, -0.6)
            out = hpo.policy_loss_and_grad(logp, old_logp, advantages, batch, gate, backend=backend)
            assert out.metrics["nan_tokens"].item() == 3 and out.grad[[5, 40, 60]].tolist() == [0.0] * 3
            found.append((bits(out.grad), bits(out.loss)))
        assert len(set(found)) == 1


def test_penalties_at_infinite_log_ratios(backend):
    for penalty in PENALTIES[1:]:
        example = testing.random_policy_loss(
            0, gates.dapo(), {"weights", "kl"}, penalty=penalty, layout=Layout((6,), 0, "none", False, 9)
        )
        old, reference = example.old_logp.clone(), example.keywords["ref_logp"].clone()
        old[1], old[2], reference[3], reference[4] = -math.inf, math.inf, -math.inf, math.inf
        assert_exact(backend, example._replace(old_logp=old).given(ref_logp=reference))


def test_advantages_and_weights_that_are_not_finite(backend):
    for gate in (gates.dapo(), gates.gspo(0.1, 0.2), gates.reinforce()):
        example = testing.random_policy_loss(
            0, gate, {"weights", "kl"}, layout=Layout((3, 2, 4, 2), 0, "none", False, 3)
        )
        advantages, weights = example.advantages.clone(), example.keywords["weights"].clone()
        advantages[0], advantages[1], weights[2] = math.nan, math.inf, math.inf
        weights[0] = weights[1] = weights[3] = 0.25
        out = assert_exact(backend, example._replace(advantages=advantages).given(weights=weights))
        assert out.metrics["bad_advantages"].item() == 9 and torch.isfinite(out.grad).all()
