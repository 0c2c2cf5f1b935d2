"""A rank without rows keeps no other rank waiting: two processes, of which one has no rows."""

import functools

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks

import hpo_core as hpo
from hpo_core import advantages, aggregation, gates
from hpo_core.gates import Action, Correction, Level, LogClip, RatioGate, Routing, Tanh, Unit

GATE = RatioGate(
    "all",
    LogClip((-0.2, -0.2), (0.2, 0.2)),
    (Level(Tanh(0.01), unit=Unit.STEP), Level(Tanh(0.05)), Level(Tanh(0.03), Routing.THROUGH, Unit.GROUP)),
)
CORRECTED = gates.compose(GATE, Correction(Action.MASK, (-0.1, -0.1), (0.1, 0.1), unit=Unit.GROUP))


def empty():
    """A list without elements as a tensor, whose dtype and shape say nothing of what it would hold."""
    return torch.tensor([])


def given(rank, *holders):
    """Two rows on some ranks; on the others what ``torch.tensor`` makes of empty lists."""
    has = rank in holders
    ids = torch.tensor([7, 7] if has else [])
    steps = torch.tensor([[0, 1], [1, 2], [2, 4]] if has else [])
    batch = hpo.PackedBatch.from_lengths([2, 2] if has else [], steps=steps, trajectory_ids=ids, group_ids=ids)
    tokens = torch.tensor([-0.1, -0.4, -0.2, -0.3] if has else [])
    return batch, tokens, torch.tensor([1.0, -1.0] if has else [])


def loss(rank, holders, gate, requires_grad):
    batch, logp, values = given(rank, *holders)
    leaf = logp.requires_grad_(requires_grad or rank in holders)
    weights = aggregation.token_mean(batch, process_group=dist.group.WORLD, gradient_reduction="sum")
    out = hpo.policy_loss(
        leaf, logp.detach() - 0.3, values, batch, gate, weights=weights, process_group=dist.group.WORLD,
        rollout_logp=logp.detach() - 0.31 if gate.corrections else None, report=("levels",), backend="cpu",
    )  # fmt: skip
    if out.loss.requires_grad:
        out.loss.backward()
    total = out.metrics.all_reduce(dist.group.WORLD)
    return out.loss.item(), total["tokens"].item(), None if leaf.grad is None else leaf.grad.tolist()


@pytest.mark.parametrize("holder", [0, 1])
@pytest.mark.parametrize("gate", [GATE, CORRECTED], ids=["levels", "corrected"])
def test_losses(gate, holder):
    results = on_ranks(2, loss, (holder,), gate, True)
    (own, tokens, grad), (empty_loss, same_tokens, empty_grad) = results[holder], results[1 - holder]
    assert tokens == same_tokens == 4 and empty_loss == 0 and not empty_grad
    batch, logp, values = given(0, 0)
    alone = hpo.policy_loss_and_grad(
        logp, logp - 0.3, values, batch, gate, rollout_logp=logp - 0.31 if gate.corrections else None
    )
    assert own == pytest.approx(alone.loss.item()) and grad == pytest.approx(alone.grad.tolist())


def test_an_empty_rank_whose_logp_requires_no_gradient():
    """The gradient of a segment that two ranks share has collectives in the forward; the third rank makes them, too."""
    assert [tokens for _, tokens, _ in on_ranks(3, loss, (0, 1), GATE, False)] == [8, 8, 8]


def estimated(rank, holder, estimator, keywords):
    _, _, rewards = given(rank, holder)
    own = {name: values if rank == holder else empty() for name, values in keywords.items()}
    return advantages.over_ranks(estimator)(rewards, **own).tolist()


@pytest.mark.parametrize("holder", [0, 1])
def test_estimators(holder):
    keywords = {"group_ids": torch.tensor([7, 7]), "mask": torch.tensor([True, True])}
    results = on_ranks(2, estimated, holder, advantages.grpo, keywords)
    assert results[1 - holder] == []
    assert results[holder] == advantages.grpo(torch.tensor([1.0, -1.0]), **keywords).tolist()


def estimated_of_several(rank):
    rewards = torch.tensor([[1.0, 0.0], [0.5, 2.0]]) if rank == 0 else empty()
    ids = torch.tensor([7, 7]) if rank == 0 else empty()
    return advantages.over_ranks(advantages.gdpo)(rewards, ids).tolist()


def test_estimators_of_several_rewards():
    expected = advantages.gdpo(torch.tensor([[1.0, 0.0], [0.5, 2.0]]), torch.tensor([7, 7])).tolist()
    assert on_ranks(2, estimated_of_several) == [expected, []]


def single_call(rank, holder):
    batch, logp, rewards = given(rank, holder)
    estimator = advantages.over_ranks(functools.partial(advantages.grpo, singleton="raw"))
    weights = aggregation.prompt_mean(batch, process_group=dist.group.WORLD, gradient_reduction="sum")
    window = hpo.entropy.forking_tokens("0.1")
    state = window.fit(logp.abs(), batch, process_group=dist.group.WORLD)
    out = hpo.hierarchical_policy_loss(
        logp, None, rewards, batch, advantage=estimator, weights=weights, window=window, entropy=logp.abs(),
        threshold=state, gate=GATE, process_group=dist.group.WORLD,
    )  # fmt: skip
    return out.loss.item(), state.threshold.item()


@pytest.mark.parametrize("holder", [0, 1])
def test_the_single_call(holder):
    results = on_ranks(2, single_call, holder)
    assert results[0][1] == results[1][1] and results[1 - holder][0] == 0 != results[holder][0]


# The rewards and the ids of both ranks, and the error that both get.
REWARDS, IDS = torch.tensor([1.0, 0.0]), torch.tensor([7, 7])
DISAGREE = "group_ids: expected tensors of one dtype and one shape behind the first size on all ranks, got "
NO_UNITS = "rewards: expected shape [U] (one per unit), got a tensor of "
REFUSED = (
    ([REWARDS, REWARDS], [IDS, IDS.float()], DISAGREE + "torch.float32 [] and torch.int64 []"),
    ([REWARDS, REWARDS], [IDS, IDS.to(torch.uint16)], DISAGREE + "torch.int64 [] and torch.uint16 []"),
    (
        [REWARDS, REWARDS],
        [IDS.to(torch.uint16)] * 2,
        "group_ids: expected dtype int32 or int64, got uint16; use group_ids.to",
    ),
    ([REWARDS.cfloat()] * 2, [IDS, IDS], "rewards: expected floating point, got complex64; use rewards.float()"),
    ([REWARDS, REWARDS[0]], [IDS, IDS], NO_UNITS + "0 dimensions"),
    ([REWARDS, REWARDS.reshape(1, 1, 1, 2)], [IDS, IDS], NO_UNITS + "4 dimensions"),
)


def refused(rank):
    said = []
    for rewards, ids, _ in REFUSED:
        with pytest.raises((TypeError, ValueError)) as raised:
            advantages.over_ranks(advantages.grpo)(rewards[rank], ids[rank])
        said.append(str(raised.value))
    return said


def test_ranks_raise_together():
    first, second = on_ranks(2, refused)
    assert first == second
    for said, (_, _, expected) in zip(first, REFUSED, strict=True):
        assert said.startswith(expected)


def flagged(rank):
    """One rank has a NaN advantage, which HPO_CORE_DEBUG=1 makes an error."""
    hpo.metrics._DEBUG = True
    batch, logp, _ = given(0, 0)
    values = torch.tensor([1.0, torch.nan if rank == 0 else 0.0])
    options, said = {"gate": GATE, "weights": torch.ones(2), "process_group": dist.group.WORLD}, []
    for call in (
        hpo.policy_loss,
        hpo.policy_loss_and_grad,
        functools.partial(hpo.hierarchical_policy_loss, advantage=lambda rewards: rewards),
    ):
        with pytest.raises(FloatingPointError, match="bad_advantages = 2") as raised:
            call(logp, None, values, batch, **options)
        dist.all_reduce(torch.ones(1))  # no rank waits for another
        said.append(str(raised.value))
    return said


def flagged_in_the_single_call(rank):
    """One rank has a NaN log-probability; the gate is on tokens, so the window alone spans the ranks."""
    hpo.metrics._DEBUG = True
    batch, logp, rewards = given(0, 0)
    new = logp.clone()
    new[: 1 - rank] = torch.nan
    with pytest.raises(FloatingPointError, match="nan_tokens = 1") as raised:
        hpo.hierarchical_policy_loss(
            new, logp, rewards, batch,
            weights=torch.ones(2), window=hpo.entropy.forking_tokens("0.5"), entropy=logp.abs(),
            process_group=dist.group.WORLD,
        )  # fmt: skip
    dist.all_reduce(torch.ones(1))
    return str(raised.value)


def flagged_as_no_log_probability(rank):
    """One rank has a cross-entropy among its log-probabilities."""
    hpo.metrics._DEBUG = True
    batch, logp, rewards = given(0, 0)
    old_logp = logp.clone()
    old_logp[: 1 - rank] *= -1
    with pytest.raises(ValueError, match=r"^old_logp: .* got 1 valid tokens") as raised:
        hpo.policy_loss(logp, old_logp, rewards, batch, GATE, weights=torch.ones(2), process_group=dist.group.WORLD)
    dist.all_reduce(torch.ones(1))
    return str(raised.value)


@pytest.mark.parametrize("call", [flagged, flagged_in_the_single_call, flagged_as_no_log_probability])
def test_flags_are_an_error_on_all_ranks(call):
    first, second = on_ranks(2, call)
    assert first == second


def with_ids_and_masks(rank):
    """Calls of which each has a collective behind the checks of its arguments."""
    batch, logp, values = given(rank, 0)
    ids, masks = (torch.tensor([7, 7]), torch.tensor([True, True])) if rank == 0 else (empty(), empty())
    tokens, world = logp < 0 if rank == 0 else empty(), dist.group.WORLD
    weights = aggregation.token_mean(batch, process_group=world, gradient_reduction="sum", selected=tokens)
    loss = hpo.policy_loss(logp, None, values, batch, GATE, weights=weights, token_mask=tokens, process_group=world)
    return (
        advantages.over_ranks(advantages.grpo, tables=True)(values, ids, mask=masks).tolist(),
        hpo.entropy.fit_scopes(values, ids, mask=masks, process_group=world).members.sum().item(),
        hpo.entropy.quantiles(-logp, batch, "0.5", scope=ids, process_group=world).nansum().item(),
        hpo.entropy.top_k(-logp, batch, 2, scope="call", uid=ids, process_group=world).sum().item(),
        hpo.entropy.d3s_tokens(-logp, values, batch, rows_mask=masks, process_group=world).mask.sum().item(),
        hpo.entropy.ares_difficulty(masks, ids, process_group=world).tolist(),
        loss.loss.item(),
    )


def test_ids_and_masks_of_no_list():
    holder, other = on_ranks(2, with_ids_and_masks)
    assert holder[1:5] == (4, pytest.approx(0.3), 2, 1) and holder[5] == [0, 0]
    assert other[0] == other[5] == [] and other[1] == other[3] == other[4] == other[6] == 0


def test_what_has_no_elements_has_no_dtype():
    batch = hpo.PackedBatch(torch.tensor([0]), group_ids=empty(), steps=empty(), step_ids=empty(), domain_ids=empty())
    assert batch.group_ids.dtype == batch.step_ids.dtype == torch.int64 and batch.steps.shape == (0, 2)
