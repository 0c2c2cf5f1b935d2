"""Advantages of tokens that are one number in each row: the CPU takes them for advantages of rows."""

import math

import pytest
import torch
from catalogue import KINDS, bits

import hpo_core as hpo
from hpo_core import gates, testing
from hpo_core.metrics import SLOTS

SIDES = ("high_positive", "low_positive", "high_negative", "low_negative")


@pytest.mark.parametrize("gate", [gates.ppo_clip(), gates.gspo()], ids=["ppo_clip", "gspo"])
def test_advantages_of_tokens_of_rows_beyond_them(gate, backend):
    """The CPU asks which rows have one advantage; nothing outside is read."""
    place = testing.device_of(backend)
    batch = hpo.PackedBatch(torch.tensor([0, 3, 10**12, 2 * 10**12]), total_tokens=4, validate=False).to(place)
    x, given = torch.zeros(4, device=place), {"advantage_level": "token", "backend": backend}
    out = hpo.policy_loss_and_grad(x, x, x + 1, batch, gate, weights=torch.ones(3, device=place), **given)
    assert out.grad.tolist() == [-1.0, -1.0, -1.0, 0.0] and out.metrics["bad_offsets"] > 0


def test_on_policy_a_row_without_one_log_ratio_has_the_gradient_of_any_other(backend):
    """On the CPU such a row goes the long way, where a constant comes back from the mean of its sum to the bit, too."""
    lengths = torch.tensor([999, 30, 1500])
    logp = -torch.rand(int(lengths.sum()), generator=torch.Generator().manual_seed(6))
    logp[[5, 1000, 2000]] = math.nan
    advantages, weights = torch.tensor([0.7, -1.3, 0.1]), torch.tensor([0.3, 0.11, 0.013])
    given = (logp, logp, advantages, hpo.PackedBatch.from_lengths(lengths.tolist()), gates.gspo())
    given = testing.move(given, testing.device_of(backend))
    grad = hpo.policy_loss_and_grad(*given, weights=weights.to(given[0].device), backend=backend).grad.cpu()
    expected = (-weights * advantages).repeat_interleave(lengths).where(~logp.isnan(), 0.0)
    assert bits(grad) == bits(expected)


@pytest.mark.parametrize("gate", [*KINDS.values(), gates.fiberpo()], ids=[*KINDS, "fiberpo"])
def test_one_advantage_in_each_row_is_that_of_the_row(gate, backend="cpu"):
    """The bits are the same, whatever stands at masked tokens and in other rows; the last row has one that differs."""
    lengths = [3000, 1, 0, *[30] * 50, 17_000, 1024, 5]
    draw, tokens = torch.Generator().manual_seed(4), sum(lengths)
    mask = torch.rand(tokens, generator=draw) < 0.9
    mask[:1], mask[3001:3031], mask[-5:] = False, False, True
    old_logp = -torch.rand(tokens, generator=draw)
    logp = old_logp + 0.3 * torch.randn(tokens, generator=draw)
    advantages = torch.randn(len(lengths), generator=draw)
    row = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    own = torch.where(mask, advantages[row], math.nan)
    own[-1] += 1
    batch = hpo.PackedBatch.from_lengths(lengths, mask=mask)
    of_rows = hpo.policy_loss_and_grad(logp, old_logp, advantages, batch, gate, backend=backend)
    of_tokens = hpo.policy_loss_and_grad(logp, old_logp, own, batch, gate, advantage_level="token", backend=backend)
    assert bits(of_rows.grad[:-5]) == bits(of_tokens.grad[:-5])
    alike = torch.where(mask, advantages[row], math.nan)
    of_tokens = hpo.policy_loss_and_grad(logp, old_logp, alike, batch, gate, advantage_level="token", backend=backend)
    assert bits(of_rows.grad) == bits(of_tokens.grad) and bits(of_rows.loss) == bits(of_tokens.loss)
    assert bits(of_rows.metrics.vector) == bits(of_tokens.metrics.vector)
    late = alike.index_put((mask[:20_000].nonzero()[-1:, 0],), torch.tensor(-5.0))  # of the row of 17,000 tokens
    of_tokens = hpo.policy_loss_and_grad(logp, old_logp, late, batch, gate, advantage_level="token", backend=backend)
    assert bits(of_rows.loss) != bits(of_tokens.loss)


def test_short_rows_of_one_and_of_several_advantages(backend):
    """Such rows stand beside each other, where the CPU measures several at once."""
    lengths, draw = [20, 30, 25, 40], torch.Generator().manual_seed(7)
    old_logp = -torch.rand(115, generator=draw)
    logp, advantages = old_logp + 0.1 * torch.randn(115, generator=draw), torch.randn(115, generator=draw)
    advantages[:20], advantages[50:75] = 0.5, -0.25
    batch = hpo.PackedBatch.from_lengths(lengths)
    given = testing.move((logp, old_logp, advantages, batch, gates.gspo(0.02, 0.02)), testing.device_of(backend))
    options = {"weights": torch.ones(4).to(given[0].device), "advantage_level": "token"}
    got, wanted = (hpo.policy_loss_and_grad(*given, **options, backend=each) for each in (backend, "reference"))
    torch.testing.assert_close(got.grad, wanted.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.loss.double(), wanted.loss.double(), rtol=1e-6, atol=1e-6)


def test_tokens_clipped_under_levels_are_counted_by_sign(backend):
    """Worked by hand: the mean is 0, and what is beyond 0.2 of it is clipped."""
    logp = torch.tensor([0.5, -0.5, 0.5, -0.5, 0.0, 0.5, -0.5, 0.0])
    advantages = torch.tensor([1.0, 1.0, -2.0, -2.0, 3.0, -1.0, -1.0, 1.0])
    level = gates.Level(gates.Rollback((0.2, 0.2)), gates.Routing.STOPPED)
    gate = gates.RatioGate("open", gates.LogClip((-0.2, -0.2), (0.2, 0.2)), (level,))
    given = (logp, torch.zeros(8), advantages, hpo.PackedBatch.from_lengths([8]), gate)
    given = testing.move(given, testing.device_of(backend))
    options = {"weights": torch.ones(1).to(given[0].device), "advantage_level": "token", "backend": backend}
    out = hpo.policy_loss_and_grad(*given, **options)
    slots = dict(zip(SLOTS, out.metrics.vector.tolist(), strict=True))
    assert [slots[f"clipped_{side}"] for side in SIDES] == [1, 1, 2, 2] and slots["selected"] == 8
    assert float(out.loss) == pytest.approx(2 * (math.exp(0.2) + math.exp(-0.2)) - 4)
    assert out.grad.tolist() == [0, 0, 0, 0, -3, 0, 0, -1]


@pytest.mark.parametrize("name", ["open", "fiberpo"])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_row_has_its_bits_behind_one_with_a_bad_advantage(name, bad, backend):
    """The CPU gathers weights for rows whose tokens have several advantages, and not for those of one."""
    lengths, draw = ([500, 3000] if backend == "cpu" else [40, 70]), torch.Generator().manual_seed(0)
    tokens = sum(lengths)
    gate = (
        gates.fiberpo()
        if name == "fiberpo"
        else gates.RatioGate(
            "open", gates.LogClip((-0.2, -0.2), (0.2, 0.2)), (gates.Level(gates.LogClip((-0.5, -0.5), (0.5, 0.5))),)
        )
    )
    batch = hpo.PackedBatch.from_lengths(lengths, group_ids=torch.tensor([0, 1]))
    for _ in range(6):
        old_logp = -torch.rand(tokens, generator=draw)
        logp, advantages = old_logp + 0.1 * torch.randn(tokens, generator=draw), torch.randn(tokens, generator=draw)
        advantages[lengths[0] :] = 0.7
        found = []
        for first in (advantages[10].item(), bad):
            advantages[10] = first
            given = testing.move((logp, old_logp, advantages, batch, gate), testing.device_of(backend))
            weights = torch.full((2,), 1 / 7).to(given[0].device)
            out = hpo.policy_loss_and_grad(*given, weights=weights, advantage_level="token", backend=backend)
            found.append(bits(out.grad[lengths[0] :].cpu()))
        assert found[0] == found[1]
