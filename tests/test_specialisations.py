"""Choices of a kernel's structure that one number or one option alone decides."""

import pytest
import torch
from conftest import NATIVE

import hpo_core as hpo
from hpo_core.backends import resolve
from hpo_core.gates import Clip, RatioGate
from hpo_core.specs import (
    Aggregate,
    Boundary,
    Denominator,
    Invalid,
    LevelKind,
    LevelSpec,
    PolicyLossInputs,
    PolicyLossSpec,
    Routing,
    TermSpec,
    TokenGate,
    Unit,
    WindowAggregate,
)
from hpo_core.testing import device_of, move

LOG_RATIOS = torch.tensor([0.0, 0.5, -0.5, 0.5, -0.5, 1.0, -1.0, 0.05])
ONE_ROW = PolicyLossInputs(
    LOG_RATIOS - 1.5, torch.full((8,), -1.5), torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, 1.0, -1.0, -1.0]), torch.ones(1),
    torch.tensor([0, 8]), advantage_per_token=True, leaf_begin=torch.tensor([0]), leaf_end=torch.tensor([8]),
    leaf_row=torch.tensor([0]), ancestors=torch.zeros(0, 1, dtype=torch.int64),
)  # fmt: skip
NUMBERS = {
    "slope_low": (0.5, 0.25), "slope_high": (0.5, 0.25), "weight_low": (0.5, 0.25), "weight_high": (0.5, 0.25),
    "pre_low": (-0.3, -0.4), "pre_high": (0.3, 0.4),
}  # fmt: skip


def loss_and_grad(inputs, spec, backend):
    if backend != "reference":
        inputs = move(inputs, device_of(backend))
        loss, _, grad, _ = resolve("gates", inputs.logp, backend).policy_loss(inputs, spec, True, False)
        return loss.cpu(), grad.cpu()
    leaf = inputs.logp.clone().requires_grad_()
    loss = resolve("gates", leaf, backend).policy_loss(inputs._replace(logp=leaf), spec)[0]
    return loss.detach(), *torch.autograd.grad(loss, leaf)


@pytest.mark.parametrize("backend", NATIVE)
@pytest.mark.parametrize("sign", [0, 1])
@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_of_a_term_counts_by_itself(name, sign, backend):
    default = getattr(TermSpec(), name)
    pair = tuple(NUMBERS[name][k] if k == sign else default[k] for k in (0, 1))
    bounds = {} if name.startswith("pre") else {"token_log_low": (-0.2, -0.2), "token_log_high": (0.2, 0.2)}
    spec = PolicyLossSpec(term=TermSpec(**{name: pair}), **bounds)
    expected = loss_and_grad(ONE_ROW, spec, "reference")
    without = loss_and_grad(ONE_ROW, spec._replace(term=TermSpec()), "reference")
    assert not all(map(torch.equal, expected, without))
    for ours, theirs in zip(loss_and_grad(ONE_ROW, spec, backend), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", NATIVE)
def test_a_level_under_a_split_carries_its_gradient(backend):
    level = LevelSpec(Unit.TRAJECTORY, LevelKind.CLIP, Routing.THROUGH)
    spec = PolicyLossSpec(token=TokenGate.DROP, levels=(level,), split=True)
    inputs = ONE_ROW._replace(advantages=torch.ones(1), advantage_per_token=False, ancestors=torch.zeros(1, 1).long())
    for ours, theirs in zip(*(loss_and_grad(inputs, spec, each) for each in (backend, "reference")), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", NATIVE)
@pytest.mark.parametrize("routing", [Routing.THROUGH, Routing.STOPPED])
def test_a_balanced_level_over_dropped_tokens_needs_no_gradient(routing, backend):
    """The sums of a call without a gradient may be part of its sweep, but not those of a balanced level."""
    finer = LevelSpec(Unit.TRAJECTORY, LevelKind.CLIP, routing, low=(-0.01,) * 4, high=(0.02,) * 4)
    coarser = LevelSpec(Unit.GROUP, LevelKind.CLIP, routing, Aggregate.BALANCED, (-0.9,) * 4, (0.9,) * 4)
    spec = PolicyLossSpec(token=TokenGate.DROP, levels=(finer, coarser))
    offsets, old_logp = torch.tensor([0, 3, 5, 8]), torch.full((8,), -1.5)
    inputs = PolicyLossInputs(
        old_logp + torch.tensor([0.1, 0.5, 0.3, -0.2, -0.4, 0.05, 0.02, 0.7]), old_logp, torch.tensor([1.0, -1.0, 1.0]),
        torch.ones(3), offsets, leaf_begin=offsets[:-1], leaf_end=offsets[1:], leaf_row=torch.arange(3),
        ancestors=torch.tensor([[0, 1, 2], [0, 0, 0]]),
    )  # fmt: skip
    expected = resolve("gates", inputs.logp, "reference").policy_loss(inputs, spec)[0]
    inputs = move(inputs, device_of(backend))
    loss = resolve("gates", inputs.logp, backend).policy_loss(inputs, spec, False, False)[0]
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("backend", NATIVE)
def test_a_pre_gate_counts_in_a_loss_from_logits(backend):
    gate = RatioGate("pre alone", Clip((0.5, 0.5), (2.0, 2.0)), pre=Clip((0.9, 0.9), (1.1, 1.1)))
    draw = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(8, 8, generator=draw), torch.randint(0, 8, (8,), generator=draw)
    batch, advantages = hpo.PackedBatch.from_lengths([4, 4]).without_first_tokens(), torch.tensor([1.0, -1.0])
    old_logp = hpo.token_logprobs(logits, targets, batch=batch, backend="reference").logp
    old_logp = old_logp + 0.3 * torch.randn(8, generator=draw)
    results = []
    for name in ("reference", backend):
        place = device_of(name)
        tensors = [each.to(place) for each in (targets, old_logp, advantages, batch)]
        leaf = logits.to(place).requires_grad_()
        loss = hpo.policy_loss_from_logits(leaf, *tensors, gate, backend=name).loss
        results.append((loss.detach().cpu(), torch.autograd.grad(loss, leaf)[0].cpu()))
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", NATIVE)
@pytest.mark.parametrize("tokens", [256, 600])
def test_a_window_whose_width_is_a_power_of_two(tokens, backend):
    values, offsets = torch.arange(tokens).float() % 7, torch.tensor([0, tokens])
    for first, last in ((-255, 0), (-128, 127), (0, 511)):
        window = (first, last, Boundary.SHRINK, Invalid.SKIP, WindowAggregate.MEAN)
        scores = []
        for name in ("reference", backend):
            tensors = [each.to(device_of(name)) for each in (values, offsets)]
            score = resolve("entropy", tensors[0], name).window_score
            scores.append(score(tensors[0], None, tensors[1], *window).cpu())
        torch.testing.assert_close(scores[1], scores[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", NATIVE)
@pytest.mark.parametrize("factor", [0.1, 1 / 3, 1.1, 0.7, 1e-3])
def test_row_weights_round_once(factor, backend):
    mask, offsets = (each.to(device_of(backend)) for each in (torch.ones(7, dtype=torch.bool), torch.tensor([0, 7])))
    weights = resolve("segments", mask, backend).row_weights(mask, offsets, 7, Denominator.TOKENS, factor)
    assert weights.item() == torch.tensor(factor / 7, dtype=torch.float64).float().item()
