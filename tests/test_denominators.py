"""Denominators that take the place of ``old_logp``: those of GEPO and of OneRec's GBPO."""

import math

import pytest
import torch

import hpo_core as hpo
from hpo_core import gates, testing


@pytest.mark.parametrize("seed", range(12))
def test_gepo_expects_what_a_loop_over_responses_does(seed):
    """Trajectories of several rows, rows without tokens, prompts that are none, NaN where masked and where not."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 5, (9,), generator=draw)
    mask = torch.rand(int(lengths.sum()), generator=draw) < 0.8
    trajectory = torch.tensor([3, 3, 1, 0, 7, 7, 2, 9, 4]) if seed % 2 else torch.arange(9)
    group = torch.tensor([5, 5, 5, -1, 2, 2, 2, -1, 5])
    old_logp = -3 * torch.rand(mask.numel(), generator=draw)
    lost = torch.rand(mask.numel(), generator=draw) < 0.1
    old_logp[lost] = -math.inf
    old_logp[~mask] = math.nan
    batch = hpo.PackedBatch.from_lengths(lengths, mask=mask, group_ids=group, trajectory_ids=trajectory)
    row = torch.arange(9).repeat_interleave(lengths)
    q, prompt = {}, {}
    for one in trajectory.unique().tolist():
        own = old_logp[mask & ~lost & (trajectory[row] == one)].double()
        prompt[one] = int(group[trajectory == one][0])
        if own.numel():
            q[one] = float(own.mean().exp())
    expected = torch.where(mask, old_logp, 0.0)
    for at in (mask & ~lost).nonzero()[:, 0].tolist():
        one = int(trajectory[row[at]])
        together = [q[other] for other in q if other == one or prompt[other] == prompt[one] >= 0]
        expected[at] = math.log(sum(x * x for x in together) / sum(together))
    torch.testing.assert_close(gates.gepo_old_logp(old_logp, batch), expected, rtol=1e-6, atol=1e-6)


def test_gepo_is_the_authors_and_keeps_the_shape_of_a_padded_batch():
    """Their loss of online_rl.py with loss_type "gepo", epsilons of 0.2 and 0.4, on a device with one prompt."""
    mask = torch.tensor([[True, True, True], [True, True, False], [True, False, False]])
    old = torch.tensor([[-0.5, -1.0, -0.25], [-2.0, -1.5, math.nan], [-0.75, math.nan, math.nan]])
    x = torch.tensor([[0.25, -0.5, 0.5], [-0.25, 0.5, 0.0], [0.125, 0.0, 0.0]])
    logp = (torch.where(mask, old, -1.0) + x).requires_grad_()
    batch = hpo.PackedBatch.from_padded(mask, group_ids=torch.zeros(3, dtype=torch.int64))
    denominator = gates.gepo_old_logp(old, batch)
    assert denominator.shape == mask.shape and not denominator[~mask].any()
    weights = hpo.aggregation.seq_mean_token_mean(batch)
    given = (torch.tensor([1.0, -0.5, 2.0]), batch, gates.gspo(0.2, 0.4))
    out = hpo.policy_loss(logp, denominator, *given, weights=weights)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(-1.058661, abs=1e-6)
    assert logp.grad[mask].tolist() == pytest.approx([-0.143701, -0.143701, -0.143701, 0.0, 0.0, -0.760892], abs=1e-6)
    with pytest.raises(ValueError, match=r"^batch: GEPO .* pass group_ids \[S\] to PackedBatch"):
        gates.gepo_old_logp(old, hpo.PackedBatch.from_padded(mask))


@pytest.mark.parametrize("seed", range(6))
def test_gbpo_of_onerec_is_its_formula(native_backends, seed):
    """Its equation and the two denominators by autograd in float64; NaN where masked, and at one token that is not, an
    old probability of 0."""
    draw = torch.Generator().manual_seed(seed)
    mask = torch.rand(24, generator=draw) < 0.8
    old, logp = (-4 * torch.rand(24, generator=draw) ** 3 - 1e-4 for _ in range(2))
    advantages = torch.randn(24, generator=draw).round(decimals=1)
    advantages[1], mask[:3], weights = 0.0, True, torch.tensor([0.5, 0.25, 1.0, 0.125])
    old[~mask] = logp[~mask] = math.nan
    old[0], old[2] = math.nan, -math.inf
    counted = mask & ~old.isnan()
    p = torch.where(counted, logp, -1.0).double().requires_grad_()
    q, now = torch.where(counted, old, -1.0).double().exp(), p.exp()
    denominator = torch.where(advantages >= 0, now.detach(), 1 - now.detach()).maximum(q)
    terms = -weights.double().repeat_interleave(6) * advantages.double() * now / denominator
    expected = torch.where(counted, terms, 0.0).sum()
    (gradient,) = torch.autograd.grad(expected, p)
    for backend in ("reference", *native_backends):
        device = testing.device_of(backend)
        batch = hpo.PackedBatch.from_lengths([6] * 4, mask=mask).to(device)
        new, given = logp.to(device, copy=True).requires_grad_(), advantages.to(device)
        bounded = gates.gbpo_onerec_old_logp(new, old.to(device), given, batch, advantage_level="token")
        assert not bounded.requires_grad and not bounded[~mask].any()
        out = hpo.policy_loss(
            new, bounded, given, batch, gates.ppo_clip(1.0, math.inf), weights=weights.to(device),
            advantage_level="token", backend=backend,
        )  # fmt: skip
        out.loss.backward()
        torch.testing.assert_close(out.loss.double().cpu(), expected.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(new.grad.double().cpu(), gradient, rtol=1e-5, atol=1e-6)
        assert out.metrics.compute()["nan_tokens"] == 1, backend


def test_gbpo_of_onerec_by_hand():
    """A >= 0: the ratio min(r, 1). A < 0: p / max(q, 1 - p), that of an unlikely token p / (1 - p) on-policy. The rest
    of a probability of 1, or above by rounding, is 0."""
    p, q = (
        torch.tensor([0.9, 0.3, 0.9, 0.2, 0.2, 1.0, 1.0, 0.3]),
        torch.tensor([0.6, 0.6, 0.6, 0.6, 0.2, 0.5, 0.5, 0.2]),
    )
    logp, advantages = p.log(), torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0, -1.0, -1.0, 0.0])
    logp[6] = 1e-7
    batch = hpo.PackedBatch.from_lengths([1] * 8)
    found = (logp - gates.gbpo_onerec_old_logp(logp, q.log(), advantages, batch)).exp()
    assert found.tolist() == pytest.approx([1.0, 0.5, 1.5, 0.25, 0.25, 2.0, 2.0, 1.0], rel=1e-6)
    gone = torch.full((8,), -math.inf)  # a log-probability without a number says nothing
    assert torch.equal(gates.gbpo_onerec_old_logp(gone, q.log(), advantages, batch), q.log())
    padded = hpo.PackedBatch.from_padded(torch.ones(8, 1, dtype=torch.bool))
    again = gates.gbpo_onerec_old_logp(logp[:, None], q.log()[:, None], advantages, padded)
    assert torch.equal((logp[:, None] - again).exp(), found[:, None])
