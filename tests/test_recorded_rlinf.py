"""RLinf, which no package index has, on tensors as it hands them over, against formulas of its own losses."""

import pytest
import torch
from trainer_batches import ROWS, Batch, clipped, equal, gradient, integration, masked, modules

import hpo_core as hpo
from hpo_core import gates

# policy_loss and preprocess_loss_inputs of rlinf/algorithms, masked_mean, masked_mean_ratio and the two seq_mean of
# rlinf/utils/utils.py, compute_ppo_actor_loss at a3816b5.

RLINF_MODES = ("masked_mean", "seq_mean_token_sum", "seq_mean_token_mean")


def of_rlinf(logp, old, advantages, *, name="hpo_actor", mode=None, **settings):
    registered, functions = {}, {each: object() for each in RLINF_MODES}
    registry = {"register_policy_loss": lambda name: lambda loss: registered.update({name: loss})}
    critic = {"compute_ppo_critic_loss": lambda **settings: (settings["values"].sum(), {"critic/value_loss": 7.0})}
    settings = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "task_type": "reasoning", **settings}
    settings |= {} if mode is None else {"loss_agg_func": functions[mode]}
    with modules(rlinf__algorithms__registry=registry, rlinf__algorithms__losses=critic, rlinf__utils__utils=functions):
        integration("rlinf").register()
        return registered[name](
            logprobs=logp,
            old_logprobs=old,
            advantages=advantages,
            loss_type=name,
            fast_path_zero_loss_mask=True,
            **settings,
        )


@pytest.mark.parametrize("mode", RLINF_MODES)
def test_rlinf(mode, monkeypatch):
    monkeypatch.setenv("HPO_GATE", "ppo_clip(0.2, 0.28, 1.5)")
    batch = Batch(empty_row=True, per_token=True)
    counts = batch.mask.sum(1, keepdim=True)
    shares = {
        "masked_mean": 1 / counts.sum(), "seq_mean_token_sum": 1 / ROWS,
        "seq_mean_token_mean": 1 / (ROWS * counts.clamp(min=1)),
    }[mode]  # fmt: skip

    def ours(logp):
        return of_rlinf(logp, batch.poisoned(batch.old), batch.advantages, mode=mode, loss_mask=batch.mask.long())

    def theirs(logp):
        return (shares * masked(clipped(logp, batch.old, batch.advantages, 0.2, 0.28, 1.5), batch.mask)).sum()

    equal(ours, theirs, batch.logp)
    loss, logged = ours(batch.logp)
    log_ratio = (batch.logp - batch.old)[batch.mask]
    ratio, advantages = log_ratio.exp(), batch.advantages[batch.mask]
    torch.testing.assert_close(logged["actor/policy_loss"], loss)
    torch.testing.assert_close(logged["actor/ratio"], ratio.mean())
    torch.testing.assert_close(logged["actor/approx_kl"], -log_ratio.mean())
    fraction = (-advantages * ratio < -advantages * ratio.clamp(0.8, 1.28)).float().mean()
    torch.testing.assert_close(logged["actor/clip_fraction"], fraction)


@pytest.mark.parametrize("episode", [None, 10])
@pytest.mark.parametrize("shape", [(6, 4, 7), (6, 4), (6,)])
def test_rlinfs_chunks_of_actions(shape, episode, monkeypatch):
    """A mask of chunks counts each of them once, however many actions it has."""
    monkeypatch.setenv("HPO_GATE", "ppo_clip")
    draw = torch.Generator().manual_seed(3)
    of_chunks = (*shape[:2], 1) if len(shape) == 3 else shape
    old = -torch.rand(shape, generator=draw)
    logp = old + 0.4 * torch.randn(shape, generator=draw)
    advantages, mask = torch.randn(of_chunks, generator=draw), torch.rand(of_chunks, generator=draw) < 0.8
    sums = torch.randint(1, 9, of_chunks, generator=draw)
    settings = {"loss_mask": mask, "loss_mask_sum": sums, "max_episode_steps": episode, "task_type": "embodied"}

    def theirs(logp):
        terms = masked(clipped(logp, old, advantages), mask)
        return terms.sum() / mask.sum() if episode is None else (terms / (sums / episode)).mean()

    equal(lambda logp: of_rlinf(logp, old, advantages, **settings), theirs, logp)


def test_rlinfs_micro_batch_without_valid_tokens_adds_nothing(monkeypatch):
    monkeypatch.setenv("HPO_GATE", "ppo_clip")
    batch = Batch()
    nothing = {"mode": "masked_mean", "loss_mask": torch.zeros_like(batch.mask)}
    loss, grad = gradient(lambda logp: of_rlinf(logp, batch.old, batch.advantages, **nothing)[0], batch.logp)
    assert loss == 0 and (grad == 0).all()
    assert not any(of_rlinf(batch.logp, batch.old, batch.advantages, **nothing)[1].values())


def test_rlinfs_episodes_without_a_mask_have_the_mean_over_tokens(monkeypatch):
    monkeypatch.setenv("HPO_GATE", "ppo_clip")
    batch = Batch(per_token=True)
    settings = {"loss_mask_sum": batch.mask.sum(1, keepdim=True), "max_episode_steps": 10}
    equal(
        lambda logp: of_rlinf(logp, batch.old, batch.advantages, **settings)[0],
        lambda logp: clipped(logp, batch.old, batch.advantages).mean(),
        batch.logp,
    )


def test_rlinfs_critic_and_its_warm_up(monkeypatch):
    monkeypatch.setenv("HPO_GATE", "gspo(0.05, 0.06)")
    batch, values = Batch(), torch.tensor([2.0, 3.0])
    arguments = (batch.logp, batch.old, batch.advantages)
    expected = hpo.policy_loss(*arguments, batch.mask, gates.gspo(0.05, 0.06), advantage_level="token").loss
    settings = {"name": "hpo_actor_critic", "loss_mask": batch.mask, "values": values}
    loss, logged = of_rlinf(*arguments, **settings)
    torch.testing.assert_close(loss, expected + 5)
    assert logged["critic/value_loss"] == 7 and logged["actor/policy_loss"] == expected
    loss, logged = of_rlinf(*arguments, loss_mask=batch.mask)
    loss /= 4
    assert logged["actor/policy_loss"] == expected
    assert of_rlinf(*arguments, critic_warmup=True, **settings)[0] == 5


@pytest.mark.parametrize(
    ("gate", "settings", "message"),
    [
        ("", {}, "HPO_GATE: expected a gate, .* export it before ray start"),
        ("icepop", {}, "RLinf passes its loss one old policy"),
        ("gspo", {"clip_ratio_high": 0.28}, "clip_ratio_high: the gate 'gspo' does not read it; got 0.28"),
        ("dapo", {"clip_ratio_c": 2.0}, "clip_ratio_c: the gate 'dapo' does not read it; got 2.0"),
        ("dapo", {"clip_log_ratio_max": 5.0}, "clip_log_ratio_max: the gate 'dapo' does not read it"),
        (
            "dapo",
            {"proximal_logprobs": torch.zeros(1)},
            "proximal_logprobs: expected None, because hpo_actor has one old policy",
        ),
        ("gspo", {"task_type": "embodied"}, "'gspo' has a level above tokens"),
        ("dapo", {"loss_agg_func": sum}, "loss_agg_func: expected one of RLinf's three"),
    ],
)
def test_rlinf_refuses_by_name(gate, settings, message, monkeypatch):
    monkeypatch.setenv("HPO_GATE", gate)
    batch = Batch()
    with pytest.raises(ValueError, match=message):
        of_rlinf(batch.logp, batch.old, batch.advantages, **settings)
