"""The loss of a critic: a loop over tokens, verl's own loss, parts of a step, and what is refused."""

import itertools
import math

import hypothesis
import numpy as np
import pytest
import torch

import hpo_core as hpo
from hpo_core import aggregation, testing
from hpo_core.advantages import token_gae


def by_hand(values, returns, old_values, clip, mask, weights, cu_seqlens):
    """Loss and gradient, token by token, in Python numbers."""
    loss, grad = 0.0, [0.0] * len(values)
    for row, (begin, end) in enumerate(itertools.pairwise(cu_seqlens)):
        for t in range(begin, end):
            if not mask[t]:
                continue
            value, target = values[t], returns[t]
            error, largest, moves = value - target, abs(value - target), True
            if clip is not None:
                nearest = min(max(value, old_values[t] - clip), old_values[t] + clip)
                moves = abs(nearest - target) <= largest
                largest = max(largest, abs(nearest - target))
            loss += weights[row] * largest**2 / 2
            grad[t] = weights[row] * error if moves else 0.0
    return loss, grad


def drawn(layout, seed=0):
    draw = torch.Generator().manual_seed(seed)
    old, moved, returns = (torch.randn(layout.batch().total_tokens, generator=draw) for _ in range(3))
    return old + 0.3 * moved, returns, old


@pytest.mark.parametrize("clip", [None, 0.0, 0.2, 1.0])
@hypothesis.given(layout=testing.layouts(rows=6, longest=9))
def test_it_is_its_loop(clip, layout):
    batch = layout.batch()
    values, returns, old = drawn(layout)
    mask = torch.ones(batch.total_tokens, dtype=torch.bool) if batch.mask is None else batch.mask
    weights = aggregation.seq_mean_token_mean(batch)
    given = {} if clip is None else {"old_values": old, "clip": clip}
    broken = [torch.where(mask, each, math.nan) for each in (values, returns)]
    leaf = broken[0].requires_grad_()
    out = hpo.value_loss(leaf, broken[1], batch, weights=weights, **given)
    out.loss.backward()
    lists = [each.double().tolist() for each in (values, returns, old)]
    loss, grad = by_hand(*lists, clip, mask.tolist(), weights.double().tolist(), batch.cu_seqlens.tolist())
    assert out.loss.item() == pytest.approx(loss, rel=1e-7)
    torch.testing.assert_close(leaf.grad.double(), torch.tensor(grad, dtype=torch.float64), rtol=1.2e-7, atol=0)


def test_metrics():
    batch = hpo.PackedBatch.from_lengths([40, 25])
    values, returns, old = drawn(testing.Layout([40, 25]), 3)
    values[7], returns[50] = math.nan, math.inf
    out = hpo.value_loss(values, returns, batch, old_values=old, clip=0.2)
    kept = values.isfinite() & returns.isfinite()
    v, r, o = (each[kept].double().numpy() for each in (values, returns, old))
    clipped = (np.clip(v, o - 0.2, o + 0.2) - r) ** 2 > (v - r) ** 2
    expected = {
        "loss": out.loss.item(), "tokens": 65.0, "clip_fraction": clipped.mean(), "value_mean": v.mean(),
        "return_mean": r.mean(), "mean_squared_error": ((v - r) ** 2).mean(),
        "explained_variance": 1 - np.var(v - r) / np.var(r), "broken_tokens": 2.0,
    }  # fmt: skip
    assert 0 < clipped.mean() < 1
    assert out.metrics.compute() == pytest.approx(expected, rel=1e-7)
    assert hpo.value_loss(values, returns, batch).metrics.compute()["clip_fraction"] == 0
    with pytest.raises(FloatingPointError, match="value_loss: broken_tokens = 2: at a valid token a value"):
        out.metrics.raise_for_flags()


def test_a_weight_that_is_no_number_leaves_its_tokens_out():
    batch = hpo.PackedBatch(torch.tensor([0, 2, 3, 5]), torch.tensor([True, True, True, False, False]))
    leaf = torch.ones(5, requires_grad=True)
    out = hpo.value_loss(leaf, torch.zeros(5), batch, weights=torch.tensor([0.5, math.nan, math.inf]))
    out.loss.backward()
    assert out.loss == 0.5 and leaf.grad.tolist() == [0.5, 0.5, 0.0, 0.0, 0.0]
    assert out.metrics["broken_tokens"] == 1  # the tokens of the last row are masked


def test_metrics_of_different_losses_do_not_add_up():
    batch, zeros = hpo.PackedBatch.from_lengths([2]), torch.zeros(2)
    of_critic = hpo.value_loss(zeros, zeros, batch).metrics
    of_actor = hpo.policy_loss(zeros, None, torch.ones(1), batch).metrics
    for one, other in ((of_critic, of_actor), (of_actor, of_critic)):
        with pytest.raises(TypeError, match="unsupported operand"):
            one + other


def test_metrics_of_nothing_and_of_equal_returns():
    nothing = hpo.value_loss(torch.zeros(0), torch.zeros(0), hpo.PackedBatch.from_lengths([]))
    assert nothing.loss == 0 and math.isnan(nothing.metrics.compute()["value_mean"])
    equal = hpo.value_loss(torch.rand(3), torch.full((3,), 0.1), hpo.PackedBatch.from_lengths([3]))
    assert math.isnan(equal.metrics.compute()["explained_variance"])
    equal.metrics.raise_for_flags()


@pytest.mark.parametrize("clip", [None, 0.25])
def test_parts_of_a_step_have_the_gradient_of_the_whole(clip):
    layout = testing.Layout([5, 1, 9, 0, 4, 2])
    values, returns, old = drawn(layout, 1)
    batch = hpo.PackedBatch(torch.tensor([0, 5, 6, 15, 15, 19, 21]), values > -1)
    weights = aggregation.token_mean(batch)

    def loss(batch, weights, tokens):
        given = {} if clip is None else {"old_values": old[tokens], "clip": clip}
        leaf = values[tokens].clone().requires_grad_()
        out = hpo.value_loss(leaf, returns[tokens], batch, weights=weights, **given)
        out.loss.backward()
        return leaf.grad, out.metrics

    grad, metrics = loss(batch, weights, slice(None))
    parts = [loss(part.batch, weights[part.rows], part.tokens) for part in batch.micro_batches(9)]
    assert len(parts) > 2 and torch.equal(torch.cat([part for part, _ in parts]), grad)
    torch.testing.assert_close(sum(part for _, part in parts).vector, metrics.vector, rtol=1e-14, atol=1e-15)
    with pytest.raises(ValueError, match="weights: "):
        part = next(batch.micro_batches(9))
        hpo.value_loss(values[part.tokens], returns[part.tokens], part.batch)


def test_a_padded_batch_and_a_packed_one():
    mask = torch.tensor([[True, True, False, True], [False, True, True, False]])
    draw = torch.Generator().manual_seed(2)
    values, returns, old = torch.randn(3, 2, 4, generator=draw)
    leaf = torch.where(mask, values, math.nan).requires_grad_()
    out = hpo.value_loss(leaf, returns, mask, old_values=old, clip=0.5)
    out.loss.backward()
    packed = values[mask].requires_grad_()
    batch = hpo.PackedBatch.from_lengths([3, 2])
    alone = hpo.value_loss(packed, returns[mask], batch, old_values=old[mask], clip=0.5)
    alone.loss.backward()
    assert torch.equal(leaf.grad[mask], packed.grad) and torch.equal(leaf.grad[~mask], torch.zeros(3))
    torch.testing.assert_close(out.metrics.vector, alone.metrics.vector)


def test_derivatives_and_large_numbers():
    batch = hpo.PackedBatch.from_lengths([3, 2])
    values, returns, old = (each.double() for each in drawn(testing.Layout([3, 2]), 5))
    weights = torch.tensor([0.5, 2.0])

    def loss(values):
        return hpo.value_loss(values, returns, batch, old_values=old, clip=0.1, weights=weights).loss

    leaf = values.clone().requires_grad_()
    assert torch.autograd.gradcheck(loss, leaf) and torch.autograd.gradgradcheck(loss, leaf)
    assert torch.equal(torch.func.grad(loss)(values), torch.autograd.grad(loss(leaf), leaf)[0])
    far = torch.full((5,), 1e30, requires_grad=True)
    hpo.value_loss(far, -far.detach(), batch, weights=weights).loss.backward()
    torch.testing.assert_close(far.grad, torch.tensor([1e30, 1e30, 1e30, 4e30, 4e30]))


def test_compiled_without_a_break():
    batch = hpo.PackedBatch.from_lengths([3, 2])
    values, returns, old = drawn(testing.Layout([3, 2]), 5)
    weights = torch.tensor([0.5, 2.0])

    def loss(values):
        return hpo.value_loss(values, returns, batch, old_values=old, clip=0.1, weights=weights).loss

    grads = []
    for call in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        leaf = values.clone().requires_grad_()
        call(leaf).backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_it_is_verls(mode):
    algos = pytest.importorskip("verl.trainer.ppo.core_algos", exc_type=ImportError)
    draw = torch.Generator().manual_seed(4)
    mask = torch.arange(11) < torch.tensor([[11], [3], [7], [1]])
    values, old, returns = torch.randn(3, 4, 11, generator=draw)
    weigh = getattr(aggregation, mode.replace("-", "_"))
    grads = []
    for ours in (True, False):
        leaf = values.clone().requires_grad_()
        if ours:
            batch = hpo.PackedBatch.from_padded(mask)
            out = hpo.value_loss(leaf, returns, batch, old_values=old, clip=0.5, weights=weigh(batch))
            loss, clipped = out.loss, out.metrics.compute()["clip_fraction"]
        else:
            loss, clipped = algos.compute_value_loss(leaf, returns, old, mask, 0.5, mode)
        loss.backward()
        grads.append((loss.detach(), leaf.grad, torch.as_tensor(clipped, dtype=torch.float32)))
    torch.testing.assert_close(*grads, rtol=1e-6, atol=1e-8)


def test_returns_of_a_critic():
    """With lambda 1 the returns of a critic are sums of rewards, whatever its values."""
    batch = hpo.PackedBatch.from_lengths([3, 2])
    rewards, old = torch.tensor([0.0, 0.0, 1.0, 0.0, -1.0]), torch.randn(5, generator=torch.Generator().manual_seed(6))
    returns = token_gae(rewards, old, batch, whitened=False) + old
    torch.testing.assert_close(returns, torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0]))
    exact = hpo.value_loss(torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0]), returns, batch)
    assert exact.loss.item() < 1e-13 and exact.metrics.compute()["explained_variance"] > 1 - 1e-12


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"values": torch.zeros(5).bfloat16()}, TypeError, "values: expected dtype float32 or float64, got bfloat16"),
        ({"values": torch.zeros(4)}, ValueError, r"values: expected shape \[T\]"),
        ({"returns": torch.zeros(4)}, ValueError, r"returns: expected shape \[T\] \(that of values\)"),
        ({"returns": torch.zeros(5, requires_grad=True)}, ValueError, "returns: it is a constant of the loss"),
        ({"old_values": None}, ValueError, "old_values, clip: expected both or neither, got clip alone"),
        ({"clip": None}, ValueError, "old_values, clip: expected both or neither, got old_values alone"),
        ({"clip": -0.1}, ValueError, "clip: expected a finite distance >= 0, got -0.1"),
        ({"clip": math.inf}, ValueError, "clip: expected a finite distance >= 0, got inf"),
        ({"weights": torch.ones(5)}, ValueError, r"weights: expected shape \[S\] \(one per row\)"),
        ({"returns": torch.zeros(5, device="meta")}, ValueError, r"returns: expected device cpu \(that of values\)"),
    ],
)
def test_what_is_refused(changed, error, message):
    given = {
        "values": torch.zeros(5, requires_grad=True), "returns": torch.ones(5), "old_values": torch.zeros(5),
        "batch": hpo.PackedBatch.from_lengths([3, 2]), "clip": 0.2,
    }  # fmt: skip
    with pytest.raises(error, match=message):
        hpo.value_loss(**(given | changed))
