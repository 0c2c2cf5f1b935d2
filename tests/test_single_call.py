"""hierarchical_policy_loss: the three calls in one, its estimators and its errors."""

import functools

import pytest
import torch
from loss_examples import GATE, ROWS, example_of, same

import hpo_core as hpo
from hpo_core import entropy, gates, kl, testing

example = pytest.fixture(example_of)


@pytest.mark.parametrize("advantage", [hpo.advantages.grpo, functools.partial(hpo.advantages.rloo, singleton="raw")])
@pytest.mark.parametrize("gate", [GATE, gates.gspo(0.05, 0.05)], ids=lambda gate: gate.name)
@pytest.mark.parametrize("scope", ["batch", "call"])
def test_the_single_call_is_the_three_calls(example, advantage, gate, scope, backend):
    """Loss, metrics and gradient agree to the bit."""
    rewards = torch.tensor([1.0, 0.0, 2.0, 1.0], device=example.logp.device)
    window = entropy.ares(2, "0.4", scope=scope)
    keywords = {
        "gate": gate, "window": window, "entropy": example.entropy, "kl": kl.k3(0.1), "ref_logp": example.ref_logp,
        "token_weight": example.token_weight, "backend": backend,
    }  # fmt: skip

    def single_call(logp, **more):
        return hpo.hierarchical_policy_loss(
            logp, example.old_logp, rewards, example.batch, advantage=advantage, **keywords, **more
        )

    leaf = example.logp.clone().requires_grad_()
    single = single_call(leaf, report=("tokens",))
    (grad,) = torch.autograd.grad(single.loss, leaf)

    advantages = advantage(rewards, example.batch.group_ids, backend=backend)
    state = window.fit(example.entropy, example.batch, backend=backend)
    keywords["threshold"] = state
    three = example.loss(report=("tokens",), advantages=advantages, **keywords)
    same(single, three)
    assert torch.equal(single.tokens, three.tokens)
    assert torch.equal(grad, example.grad(advantages=advantages, **keywords).grad)
    assert 0 < single.metrics["selected"] < single.metrics["tokens"], "the window selects some"
    same(single_call(example.logp), single)


def test_the_single_call_without_a_window_or_groups(example):
    rewards = torch.tensor([1.0, 0.0, 2.0, 1.0])
    ungrouped = hpo.PackedBatch(example.batch.cu_seqlens, example.mask)
    one_group = functools.partial(hpo.advantages.grpo, group_ids=None)
    result = hpo.hierarchical_policy_loss(example.logp, example.old_logp, rewards, ungrouped, advantage=one_group)
    same(result, example.loss(advantages=hpo.advantages.grpo(rewards, None), batch=ungrouped))


def test_the_single_call_takes_a_padded_mask():
    logp, mask, rewards = torch.randn(2, 3), torch.ones(2, 3).bool(), torch.tensor([1.0, 0.0])
    one_group = functools.partial(hpo.advantages.grpo, group_ids=None)
    result = hpo.hierarchical_policy_loss(logp, None, rewards, mask, advantage=one_group)
    same(result, hpo.policy_loss(logp, None, hpo.advantages.grpo(rewards, None), mask))


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"advantage": "grpo"}, TypeError, "advantage: expected an estimator of hpo_core.advantages, got 'grpo'"),
        ({"rewards": torch.ones(3)}, ValueError, "rewards: expected shape [S] (one per row) = [4], got [3]"),
        (
            {"rewards": torch.ones(12), "advantage": functools.partial(hpo.advantages.rloo, singleton="raw")},
            ValueError,
            "rewards: expected shape [S] (one per row) = [4], got [12]",
        ),
        (
            {"advantage": functools.partial(hpo.advantages.d3s_samples, k=2)},
            ValueError,
            "advantage: d3s_samples chooses rollouts and gives none an advantage; pass its result as mask= of",
        ),
        ({"rewards": [1.0]}, TypeError, "rewards: expected a tensor, got <class 'list'>"),
        ({"window": entropy.ares()}, ValueError, "entropy: a window needs the entropies [T]; pass entropy="),
        ({"batch": "all"}, TypeError, "batch: expected a PackedBatch or a mask [B, L], got <class 'str'>"),
        ({"logp": torch.zeros(12).half()}, TypeError, "logp: expected float32, got float16"),
        ({"kl": kl.k3(0.1)}, ValueError, "kl: expected ref_logp beside it"),
    ],
)
def test_errors_of_the_single_call(example, keywords, error, message):
    given = {"logp": example.logp, "old_logp": None, "rewards": torch.ones(ROWS), "batch": example.batch}
    with pytest.raises(error) as raised:
        hpo.hierarchical_policy_loss(**{**given, **keywords})
    assert message in str(raised.value)


# ------------------------------------------------------------------------------------------- estimators in the call


def of_rows(rewards, group_ids):
    return rewards


@pytest.mark.parametrize(
    "estimator",
    [
        hpo.advantages.grpo,
        functools.partial(hpo.advantages.rloo, singleton="raw"),
        functools.partial(hpo.advantages.gigpo, anchor_ids=torch.zeros(2, dtype=torch.int64)),
        hpo.advantages.over_ranks(hpo.advantages.grpo),
        functools.partial(hpo.advantages.otb, chosen_probability=torch.ones(4), moment=torch.ones(4)),
        of_rows,
    ],
)
def test_forgotten_groups_are_no_single_group(estimator):
    """Two prompts of two answers each, with rewards around 0 and around 10."""
    batch = hpo.PackedBatch.from_lengths([2, 2], cu_steps=torch.tensor([0, 2, 4]))
    message = r"group_ids: \w+ normalises within prompt groups and the batch has no ids, .*; pass group_ids \[S\] to"
    with pytest.raises(ValueError, match=message):
        hpo.hierarchical_policy_loss(torch.zeros(4), None, torch.ones(2), batch, advantage=estimator)


def test_one_group_is_said():
    batch = hpo.PackedBatch.from_lengths([1, 1, 1, 1])
    rewards, logp = torch.tensor([1.0, 0.0, 11.0, 10.0]), torch.zeros(4)
    grouped = batch.replace(group_ids=torch.tensor([0, 0, 1, 1]))
    one = functools.partial(hpo.advantages.dr_grpo, group_ids=None)
    run = functools.partial(hpo.hierarchical_policy_loss, logp, None, rewards, report=("tokens",))
    assert run(batch, advantage=one).tokens.tolist() == [4.5, 5.5, -5.5, -4.5]
    assert run(grouped, advantage=one).tokens.tolist() == [4.5, 5.5, -5.5, -4.5]
    assert run(grouped, advantage=hpo.advantages.dr_grpo).tokens.tolist() == [-0.5, 0.5, -0.5, 0.5]


def test_estimators_without_groups_need_none():
    """Their arguments beside rewards are no ids."""
    batch, rewards, logp = hpo.PackedBatch.from_lengths([2, 2]), torch.tensor([1.0, 0.0]), torch.zeros(4)
    run = functools.partial(hpo.hierarchical_policy_loss, logp, None, report=("tokens",), backend="cpu")
    for each in (batch, batch.replace(group_ids=torch.tensor([0, 0]))):
        out = run(rewards > 0, each, advantage=hpo.advantages.negative_sample)
        assert out.tokens.tolist() == [0, 0, 1, 1]
        assert run(rewards, each, advantage=lambda rewards: rewards).tokens.tolist() == [-1, -1, 0, 0]


def test_the_single_call_takes_estimators_of_steps(backend):
    """Bitwise the three calls, ids of steps read off the batch; trajectories of several rows and of several steps."""
    device = testing.device_of(backend)
    draw = torch.Generator().manual_seed(5)
    batch = hpo.PackedBatch(
        torch.tensor([0, 5, 9, 14, 16]), cu_steps=torch.tensor([0, 2, 5, 7, 9, 14, 14, 16]),
        trajectory_ids=torch.tensor([3, 3, 8, 9]), group_ids=torch.tensor([1, 1, 1, 2]),
    ).to(device)  # fmt: skip
    logp, old, entropy = (torch.randn(16, generator=draw).to(device) for _ in range(3))
    window, gate = hpo.entropy.ares(2, "0.6"), hpo.gates.fiberpo()
    rewards, anchors = torch.rand(7, generator=draw).to(device), torch.tensor([0, 1, 1, 2, 0, 0, 1], device=device)
    ids = batch.ids_of_steps()
    assert ids["trajectory_ids"].tolist() == [3, 3, 3, 3, 8, -1, 9]
    assert ids["group_ids"].tolist() == [1, 1, 1, 1, 1, -1, 2]
    for estimator in (hpo.advantages.gigpo, hpo.advantages.hgpo):
        leaves = [logp.clone().requires_grad_() for _ in range(2)]
        whole = hpo.hierarchical_policy_loss(
            leaves[0], old, rewards, batch, advantage=functools.partial(estimator, anchor_ids=anchors), gate=gate,
            window=window, entropy=entropy, backend=backend,
        )  # fmt: skip
        advantages = estimator(rewards, anchor_ids=anchors, **ids, backend=backend)
        threshold = window.fit(entropy, batch, backend=backend)
        parts = hpo.policy_loss(
            leaves[1], old, advantages, batch, gate, advantage_level="step", window=window, entropy=entropy,
            threshold=threshold, backend=backend,
        )  # fmt: skip
        assert torch.equal(whole.loss, parts.loss) and float(whole.loss.detach()) != 0.0
        whole.loss.backward()
        parts.loss.backward()
        assert torch.equal(leaves[0].grad, leaves[1].grad) and bool(leaves[0].grad.any())


def test_estimators_of_steps_count_a_step_of_several_ranges_once():
    """A step with a gap and one that goes on in the next row have one reward, one return and one advantage."""
    named = {"step_ids": torch.tensor([7, 7, -1, 8, 9, 9, 9])}  # the last step begins with a range without tokens
    ranges = torch.tensor([[0, 2], [3, 5], [5, 7], [7, 9], [9, 9], [9, 10], [10, 12]])
    offsets, ids = torch.tensor([0, 5, 9, 10, 12]), torch.tensor([4, 6, 6, 6])
    batch = hpo.PackedBatch(offsets, steps=ranges, trajectory_ids=ids, group_ids=torch.zeros_like(ids), **named)
    whole = torch.tensor([[0, 5], [5, 7], [7, 9], [9, 10]])
    plain = hpo.PackedBatch(
        offsets[:4], mask=torch.arange(12) != 2, steps=whole, trajectory_ids=ids[:3], group_ids=ids[:3] * 0
    )
    rewards, anchors = torch.tensor([1.0, 0.5, 0.0, 2.0]), torch.tensor([0, 0, 0, 1])
    of_range = torch.tensor([0, 0, 1, 2, 3, 3, 3])
    for estimator in (hpo.advantages.gigpo, hpo.advantages.hgpo):
        once = estimator(rewards, anchor_ids=anchors, **plain.ids_of_steps())
        given = torch.where(torch.tensor([1, 0, 1, 1, 1, 1, 0]) > 0, rewards[of_range], torch.nan)
        found = estimator(given, anchor_ids=anchors[of_range], **batch.ids_of_steps())
        assert torch.equal(found[[0, 2, 3, 5]], once) and once.any()
        expected = once[torch.tensor([0, 0, -1, 0, 0, 1, 1, 2, 2, 3, 3, 3])]
        expected[2] = 0.0
        assert torch.equal(batch.spread_steps(found), expected)


def test_a_negative_trajectory_id_of_a_batch_names_a_trajectory():
    """An estimator would take it to mean that a step is in none."""
    rewards, anchors = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0, 0, 1])
    gradients = []
    for trajectories in ([7, 4, 4], [-1, -(2**63), -(2**63)], [-1, 4, 4]):
        batch = hpo.PackedBatch(
            torch.tensor([0, 2, 4, 6]), cu_steps=torch.tensor([0, 2, 4, 6]),
            trajectory_ids=torch.tensor(trajectories), group_ids=torch.tensor([0, 0, 0]),
        )  # fmt: skip
        logp = torch.zeros(6, requires_grad=True)
        estimator = functools.partial(hpo.advantages.gigpo, anchor_ids=anchors)
        hpo.hierarchical_policy_loss(logp, None, rewards, batch, advantage=estimator).loss.backward()
        gradients.append(logp.grad)
    assert gradients[0].any() and all(torch.equal(gradient, gradients[0]) for gradient in gradients)


def test_rows_of_several_ranks_are_no_trajectories_without_names():
    """Row 0 of one rank would be a trajectory with row 0 of another."""
    batch = hpo.PackedBatch(torch.tensor([0, 2, 4]), cu_steps=torch.tensor([0, 2, 4]), group_ids=torch.tensor([0, 0]))
    everywhere = hpo.advantages.over_ranks(hpo.advantages.gigpo)
    for estimator in (functools.partial(everywhere, anchor_ids=torch.tensor([0, 0])), everywhere):
        with pytest.raises(ValueError, match=r"trajectory_ids: gigpo gathers the steps of all ranks .* has no ids"):
            hpo.hierarchical_policy_loss(torch.zeros(4), None, torch.ones(2), batch, advantage=estimator)


def test_what_a_partial_has_fixed_stays():
    """The batch's ids are for what the caller left open."""
    batch = hpo.PackedBatch(torch.tensor([0, 2, 4]), cu_steps=torch.tensor([0, 2, 4]), group_ids=torch.tensor([0, 0]))
    rewards, alone, anchors = torch.tensor([1.0, 0.0]), torch.tensor([0, 1]), torch.tensor([0, 0])
    for fixed, zero in (({}, False), ({"group_ids": alone}, True)):
        estimator = functools.partial(hpo.advantages.gigpo, anchor_ids=anchors, **fixed)
        logp = torch.zeros(4, requires_grad=True)
        hpo.hierarchical_policy_loss(logp, None, rewards, batch, advantage=estimator).loss.backward()
        assert bool(logp.grad.any()) is not zero


def test_the_single_call_takes_estimators_of_tokens(backend):
    device = testing.device_of(backend)
    batch = hpo.PackedBatch.from_lengths([3, 4]).to(device)
    logp, rewards = torch.zeros(7, device=device), torch.arange(7.0, device=device)
    whole = hpo.hierarchical_policy_loss(
        logp, None, rewards, batch, advantage=hpo.advantages.reinforce_pp, backend=backend
    )
    advantages = hpo.advantages.reinforce_pp(rewards, batch, backend=backend)
    alone = hpo.policy_loss(logp, None, advantages, batch, advantage_level="token", backend=backend)
    assert torch.equal(whole.loss, alone.loss)
    rewards = torch.cat((rewards[:3], rewards.new_full((1,), torch.nan), rewards[3:])).view(2, 4)
    padded = hpo.PackedBatch.from_padded(rewards.isfinite())
    for given in (rewards, rewards.flatten()):
        found = hpo.hierarchical_policy_loss(
            torch.zeros_like(rewards), None, given, padded, advantage=hpo.advantages.reinforce_pp, backend=backend
        )
        torch.testing.assert_close(found.loss, whole.loss, rtol=1e-5, atol=1e-6)


def test_an_estimator_of_several_streams_is_refused_by_the_single_call():
    batch = hpo.PackedBatch(torch.tensor([0, 2]), cu_steps=torch.tensor([0, 1, 2]))
    ones = torch.ones(2)
    estimator = functools.partial(hpo.advantages.hiper, switches=ones > 0, low_values=ones, high_values=ones)
    with pytest.raises(TypeError, match="advantage: expected an estimator of one tensor"):
        hpo.hierarchical_policy_loss(ones, None, ones, batch, advantage=estimator)
