"""The parts that integrations share: modules that are waited for, refusals, and estimators of prompts."""

import dataclasses
import importlib
from types import SimpleNamespace

import pytest
import torch
from ranks import on_ranks
from trainer_batches import Batch, clipped, differ, equal, integration, masked, modules

import hpo_core as hpo
from hpo_core import gates
from hpo_core.batch import mark_torn
from hpo_core.entropy import Selection
from hpo_core.integrations import prompt_advantages
from hpo_core.integrations.entropy_methods import selection_of, selection_tensors
from hpo_core.integrations.micro_batch import clipped_tokens, packed_rows, padded_rows, pushed_units, token_loss
from hpo_core.integrations.replaced import after_import
from hpo_core.integrations.served import check_proportional


def test_an_unknown_module_that_is_waited_for_is_not_found():
    with modules():
        after_import("hpo_core_has_no_such_module", lambda module: None)
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("hpo_core_has_no_such_module")


@pytest.mark.parametrize("name", ["kimi", "dro"])
def test_a_head_whose_penalty_is_0_is_proportional(name):
    gate = getattr(gates, name)()
    check_proportional(dataclasses.replace(gate, head_numbers=(0.0, 0.0)), "a trainer")
    with pytest.raises(ValueError, match="does not grow with the advantage"):
        check_proportional(gate, "a trainer")


CLIPS = {
    "areal": lambda low, level: integration("areal")._described(
        {
            "importance_sampling_level": level, "eps_clip": low, "eps_clip_higher": None, "c_clip": None,
            "use_sapo_loss": False,
        },
        1.0, 1.05, False,
    ),
    "open_instruct": lambda low, _: integration("open_instruct")._described(
        SimpleNamespace(loss_fn="dapo", clip_lower=low, clip_higher=2.0)
    ),
    "openrlhf": lambda low, level: integration("openrlhf").HPOPolicyLoss(
        low, 2.0, policy_loss_type="gspo" if level == "sequence" else "ppo"
    ).used,
    "roll": lambda low, level: integration("roll")._described(
        SimpleNamespace(
            use_pg_clip_range=True, pg_clip_low=low, pg_clip_high=2.0, dual_clip_loss=False,
            importance_sampling="seq" if level == "sequence" else "token",
        )
    ),
    "slime": lambda low, level: integration("slime")._described(
        SimpleNamespace(
            eps_clip=low, eps_clip_high=2.0, eps_clip_c=None,
            advantage_estimator="gspo" if level == "sequence" else "grpo",
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "level"),
    [
        (name, level)
        for name in CLIPS
        for level in ("token", "sequence")
        if (name, level) != ("open_instruct", "sequence")
    ],
)
def test_a_lower_epsilon_above_1_is_no_clip(name, level):
    """In the trainers' own losses a ratio is never below 1 - 2. AReaL's epsilon is that of both sides."""
    with modules(
        roll__pipeline__rlvr__actor_worker={"ActorWorker": object},
        roll__utils__train_infer_corrections={"compute_train_infer_correction": None},
    ):
        gate = CLIPS[name](2.0, level)
    batch = Batch(width=1.5, per_token=True)
    counts = batch.mask.sum(1, keepdim=True)

    def ours(logp):
        weights = torch.ones(len(counts), device="cpu")
        rows = padded_rows(batch.mask, gate)
        return token_loss(logp, batch.old, batch.advantages, rows, gate, weights).loss

    def theirs(logp, low=2.0):
        ratio = logp - batch.old
        if level == "sequence":
            ratio = (masked(ratio, batch.mask).sum(1, keepdim=True) / counts).expand_as(logp)
        return masked(clipped(ratio, 0.0, batch.advantages, low, 2.0), batch.mask).sum()

    equal(ours, theirs, batch.logp)
    differ(ours, lambda logp: theirs(logp, 0.2), batch.logp)


@pytest.mark.parametrize("level", ["row", "token"])
@pytest.mark.parametrize(("gate", "count"), [(gates.ppo_clip(), 7), (gates.cispo(1.5), 11)], ids=["ppo_clip", "cispo"])
def test_tokens_that_are_counted_as_clipped(gate, count, level):
    """Under a surrogate those with an advantage, of those that the trainer's own mask leaves."""
    mask, others = torch.ones(3, 4).bool(), torch.ones(3, 4).bool()
    others[0, 0] = False
    batch, rows = hpo.PackedBatch.from_padded(mask), torch.tensor([1.0, 0.0, 2.0])
    advantages = rows if level == "row" else rows[:, None].expand(3, 4)
    given = (torch.ones(3, 4), torch.zeros(3, 4), advantages, batch, gate, torch.ones(3))
    out = token_loss(*given, advantage_level=level, token_mask=others)
    assert clipped_tokens(out.metrics, gate) == count


def test_tokens_with_an_advantage_after_a_selection():
    advantages = torch.tensor([[0.0, 1.0, -2.0, 0.0]])
    factor, addend = torch.tensor([[2.0, 0.0, 1.0, 1.0]]), torch.tensor([[0.0, 0.0, 2.0, -1.0]])
    for selection, expected in (
        (None, [False, True, True, False]),
        (Selection(torch.ones(1, 4).bool()), [False, True, True, False]),
        (Selection(advantage_factor=factor), [False, False, True, False]),
        (Selection(advantage_factor=factor, advantage_addend=addend), [False, False, False, True]),
    ):
        assert pushed_units(gates.ppo_clip(), advantages, selection).tolist() == [expected]


@pytest.mark.parametrize("side", [0, 1], ids=["low", "high"])
def test_a_selection_may_have_one_bound_alone(side):
    mask, bound = torch.ones(2, 2).bool(), torch.tensor([[0.5, 1.5], [0.9, 1.1]])
    bounds = (bound, None) if side == 0 else (None, bound)
    found = selection_of(selection_tensors(lambda: Selection(bounds=bounds), mask, torch.ones(2), None, False))
    assert found.bounds[1 - side] is None and torch.equal(found.bounds[side], bound)


def test_a_method_that_compares_groups_spans_the_ranks_that_they_span(monkeypatch):
    """By itself it would compare the answers of its own rank; ``over_ranks`` with tables speaks of all."""

    def method(entropy, advantages, batch):
        return Selection(advantage_factor=hpo.entropy.ettrl(advantages, entropy, batch)[batch.row_of_token()])

    mask, groups = torch.ones(2, 2).bool(), torch.tensor([3, 3])
    given = (method, mask, torch.ones(2), groups)
    whole = selection_tensors(*given, False, entropy=torch.ones(2, 2))
    with pytest.raises(
        ValueError, match=r"rows of a group lie on several ranks; wrap this function, .* advantages.over_ranks\("
    ):
        selection_tensors(*given, True, entropy=torch.ones(2, 2))
    monkeypatch.setattr("hpo_core.distributed.ranks", lambda: "all ranks")
    monkeypatch.setattr("hpo_core.distributed.gather", lambda own, *_: [own])
    spanned = selection_tensors(*given, True, entropy=torch.ones(2, 2))
    assert torch.equal(spanned["selection_advantage_factor"], whole["selection_advantage_factor"])


def spanning_methods(rank):
    """The masks of methods that take the process group, of groups that a batch is told to share with other ranks."""
    group, advantages = torch.distributed.group.WORLD, torch.ones(2)

    def of_group(entropy, batch, process_group):
        asked = {"scope": "group", "expand": True, "process_group": process_group}
        return Selection(entropy > hpo.entropy.quantiles(entropy, batch, "0.5", **asked))

    def windows(entropy, batch, process_group):
        return Selection(hpo.entropy.ares_windows(entropy, batch, width=1, process_group=process_group))

    def hicra(entropy, advantages, batch, process_group):
        return Selection(hpo.entropy.hicra_tokens(entropy, advantages, batch, process_group=process_group))

    mask, groups, entropy = torch.ones(2, 2).bool(), torch.tensor([3, 3]), torch.tensor([[0.1, 0.2], [0.3, 0.4]])
    found = []
    for method in (of_group, windows, hicra):
        given = (method, mask, advantages, groups)
        spanned, own = (selection_tensors(*given, each, entropy=entropy, process_group=group) for each in (True, False))
        found.append(torch.equal(spanned["token_mask"], own["token_mask"]))
    return found


def test_methods_with_a_process_group_span_groups():
    assert on_ranks(1, spanning_methods) == [[True, True, True]]


def test_new_groups_are_those_of_one_rank():
    batch = hpo.PackedBatch.from_lengths([1, 1], group_ids=torch.tensor([3, 3]))
    mark_torn(batch, "ranks")
    assert batch.torn == ("ranks",) and batch.replace(group_ids=torch.tensor([0, 1])).torn == ()


def test_a_filter_of_single_tokens_does_not_part_a_turn():
    gate, generated = gates.step_gspo(), torch.tensor([[1, 1, 1, 0, 1], [1, 1, 0, 0, 0]])
    kept = generated.clone()
    kept[0, 1] = 0
    packed = packed_rows(torch.tensor([0, 5, 10]), kept.flatten(), gate, generated=generated.flatten())
    for batch in (padded_rows(kept, gate, generated=generated), packed):
        assert torch.stack(batch.step_ranges()).tolist() == [[0, 4, 5], [3, 5, 7]]
        assert torch.equal(batch.mask.flatten(), kept.flatten().bool())
    assert padded_rows(kept, gate).num_steps == 4


def test_the_returns_of_a_discount_that_float32_rounds():
    tokens, gamma = 20_000, 0.9999
    rewards, mask = torch.zeros(1, tokens), torch.ones(1, tokens)
    rewards[0, -1] = 1.0
    settings = {"gamma": gamma, "whitened": False}
    advantages, returns = prompt_advantages.prompt_advantages(
        hpo.advantages.reinforce_pp, "cpu", token_level_rewards=rewards, response_mask=mask, settings=settings
    )
    for each in (advantages, returns):
        assert each[0, 0].item() == pytest.approx(gamma ** (tokens - 1), rel=1e-6)
