"""The loss module of TorchRL's integration against TorchRL's own; `make test-trainers` installs it."""

from types import SimpleNamespace

import pytest
import torch
from lazily import Lazy, skip_without
from trainer_batches import Batch, close, integration, two_ranks

import hpo_core as hpo

skip_without("torchrl")
pytestmark = pytest.mark.peers

grpo, tensordict = Lazy("torchrl.objectives.llm.grpo"), Lazy("tensordict")


@pytest.fixture(scope="module")
def ours():
    return integration("torchrl").HPOLoss


def run(loss, batch):
    """Loss, its gradient and the rest, where scores take the place of a network's."""
    leaf = batch.logp.clone().requires_grad_()
    loss._get_cur_log_prob = lambda _: (leaf, SimpleNamespace(mask=batch.mask), False)
    rows = {"advantage": batch.advantages[..., None], ("log_probs", "full"): batch.rollout}
    rows |= {("tokens", "full"): torch.zeros_like(batch.mask), ("next", "ref_log_probs", "full"): batch.ref}
    found = loss(tensordict.TensorDict(rows, batch_size=[len(batch.mask)]))
    (grad,) = torch.autograd.grad(found.loss_objective.sum(), leaf)
    return (found.loss_objective.detach().squeeze(), grad), found


@pytest.mark.parametrize("aggregation", ["token_mean", "prompt_mean"])
@pytest.mark.parametrize("more", [{}, {"kl_mask_threshold": 0.05}], ids=["all", "masked"])
def test_equals_torchrl(aggregation, more, ours):
    keywords = {"clip_epsilon": (0.2, 0.28), "entropy_bonus": False, "aggregation": aggregation, **more}
    stopped = 0.0
    for seed in range(3):
        batch = Batch(seed, empty_row=seed == 1, per_token=seed == 2)
        expected, theirs = run(grpo.GRPOLoss(None, **keywords), batch)
        found, own = run(ours(None, **keywords), batch)
        close(found, expected)
        stopped += (expected[1][batch.mask] == 0).float().mean()
        assert 0 <= own.clip_fraction <= 1 and torch.equal(own.kl_approx, theirs.kl_approx)
    assert stopped > 0.1, "nothing was clipped: the comparison says little"


def test_bounds_that_a_scheduler_or_a_checkpoint_changes(ours):
    batch, keywords = Batch(), {"entropy_bonus": False}
    peer, own, loaded = grpo.GRPOLoss(None, **keywords), ours(None, **keywords), ours(None, **keywords)
    before, _ = run(own, batch)
    for each in (peer, own):
        each.clip_epsilon_low = each.clip_epsilon_high = 0.05
    expected, _ = run(peer, batch)
    close(run(own, batch)[0], expected)
    assert not torch.allclose(before[1], expected[1])
    loaded.load_state_dict(own.state_dict())
    close(run(loaded, batch)[0], expected)
    another = ours(None, gate="gspo", **keywords)
    another.load_state_dict(ours(None, **keywords).state_dict())  # changes no bound
    run(another, batch)
    another.clip_epsilon_low = 0.05
    with pytest.raises(ValueError, match="clip_epsilon: the gate 'gspo' does not read it"):
        run(another, batch)


def test_a_token_that_is_left_out_is_seen(ours):
    batch = Batch()
    loss = ours(None, entropy_bonus=False)
    assert run(loss, batch)[1].clip_fraction.isfinite()
    batch.logp = torch.where(batch.mask & (batch.mask.cumsum(-1) == 1), torch.nan, batch.logp)
    (value, _), found = run(loss, batch)
    assert value.isfinite() and found.clip_fraction.isnan()


@pytest.mark.parametrize("aggregation", ["token_mean", "prompt_mean"])
def test_each_rank_counts_its_own_as_in_torchrl(aggregation, ours):
    keywords, batch = {"entropy_bonus": False, "aggregation": aggregation}, Batch()
    expected, _ = run(grpo.GRPOLoss(None, **keywords), batch)
    with two_ranks():
        close(run(ours(None, **keywords), batch)[0], expected)


def test_a_threshold_of_the_kl_does_not_part_a_turn(ours):
    """Its token is masked, as TorchRL's, and the others stay one step."""
    batch, gate, threshold = Batch(), hpo.gates.step_gspo(0.02, 0.03), 0.02
    kept = batch.mask & (0.5 * (batch.logp - batch.rollout).square() <= threshold)
    rows = integration("micro_batch").padded_rows(kept, gate, generated=batch.mask)
    leaf = batch.logp.clone().requires_grad_()
    out = hpo.policy_loss(leaf, batch.rollout, batch.advantages, rows, gate, advantage_level="token")
    more = {"entropy_bonus": False, "kl_mask_threshold": threshold}
    found, _ = run(ours(None, gate="step_gspo(0.02, 0.03)", **more), batch)
    close(found, (out.loss.detach(), torch.autograd.grad(out.loss, leaf)[0]))
    torn = integration("micro_batch").padded_rows(kept, gate)
    assert torn.num_steps != rows.num_steps


def test_another_gate(ours):
    batch, gate = Batch(), hpo.gates.step_gspo(0.02, 0.03)
    rows = integration("micro_batch").padded_rows(batch.mask, gate)
    leaf = batch.logp.clone().requires_grad_()
    out = hpo.policy_loss(leaf, batch.rollout, batch.advantages, rows, gate, advantage_level="token")
    found, _ = run(ours(None, gate="step_gspo(0.02, 0.03)", entropy_bonus=False), batch)
    close(found, (out.loss.detach(), torch.autograd.grad(out.loss, leaf)[0]))


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"gate": "icepop"}, "old policy is the sampler"),
        ({"gate": "gspo", "clip_epsilon": 0.1}, "clip_epsilon"),
        ({"aggregation": "none"}, "aggregation"),
        ({"gate": "reconstructed.p3o"}, "level of groups"),
    ],
)
def test_refusals(keywords, said, ours):
    with pytest.raises(ValueError, match=said):
        ours(None, **keywords)
