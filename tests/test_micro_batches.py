"""Micro-batches split no unit that must stay whole, and have the indices of their rows, steps and tokens."""

import pytest
import torch

import hpo_core as hpo
from hpo_core import PackedBatch
from hpo_core.gates import Action, Correction, Level, LogClip, RatioGate, Reduction, Routing, Tanh, Unit

LENGTHS = [2, 1, 3, 2, 2, 1]
IDS = {
    "trajectory_ids": torch.tensor([0, 0, 1, 2, 3, 4]),
    "group_ids": torch.tensor([5, 5, 5, 7, 7, -1]),
    "domain_ids": torch.tensor([1, 1, 1, 1, 1, 2]),
}


def make(*names, **changed):
    return PackedBatch.from_lengths(LENGTHS, **{f"{name}_ids": IDS[f"{name}_ids"] for name in names}, **changed)


def parts_of(batch, *arguments):
    return [part.rows.tolist() for part in batch.micro_batches(*arguments)]


@pytest.mark.parametrize(
    ("names", "whole", "parts"),
    [
        ((), None, [[0, 1], [2], [3], [4, 5]]),
        (("trajectory",), None, [[0, 1], [2], [3], [4, 5]]),
        (("group",), None, [[0, 1, 2], [3, 4], [5]]),
        (("group",), "trajectory", [[0, 1], [2], [3], [4, 5]]),
        (("trajectory", "group"), None, [[0, 1, 2], [3, 4], [5]]),
        (("trajectory", "group", "domain"), None, [[0, 1, 2, 3, 4], [5]]),
        (("trajectory", "group", "domain"), "group", [[0, 1, 2], [3, 4], [5]]),
        (("trajectory", "group", "domain"), "trajectory", [[0, 1], [2], [3], [4, 5]]),
        (("domain",), None, [[0, 1, 2, 3, 4], [5]]),
    ],
)
def test_the_coarsest_level_with_ids_is_kept_whole(names, whole, parts):
    batch = make(*names)
    assert parts_of(batch, 3, whole) == parts
    assert torch.cat([part.tokens for part in batch.micro_batches(3, whole)]).tolist() == list(range(11))


def test_negative_ids_belong_together_with_no_other_row():
    batch = PackedBatch.from_lengths([1] * 4, group_ids=torch.tensor([-1, -1, 2, -1]))
    assert parts_of(batch, 1) == [[0], [1], [2], [3]]
    of_one = batch.replace(trajectory_ids=torch.tensor([3, 3, 1, 2]))
    assert parts_of(of_one, 1) == [[0, 1], [2], [3]]  # the trajectory of each row stays whole
    assert parts_of(PackedBatch.from_lengths([1] * 2, trajectory_ids=torch.tensor([-4, -4])), 1) == [[0, 1]]


def test_levels_that_do_not_nest_are_kept_whole_each():
    batch = make("group", total_tokens=11, validate=False, domain_ids=torch.tensor([1, 1, 2, 2, 3, 3]))
    assert parts_of(batch, 1) == [[0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize("level", ["trajectory", "group", "domain"])
def test_a_scattered_unit_is_refused_by_name(level):
    batch = PackedBatch.from_lengths([1, 1, 1], **{f"{level}_ids": torch.tensor([6, 0, 6])})
    fix = rf"sort them first, batch.select\(batch.{level}_ids.argsort\(stable=True\)\)"
    with pytest.raises(ValueError, match=rf"{level}_ids: the rows of {level} 6 are not consecutive, .*; {fix}"):
        parts_of(batch, 1)
    ordered, tokens = batch.select(getattr(batch, f"{level}_ids").argsort(stable=True))
    assert parts_of(ordered, 1) == [[0], [1, 2]] and tokens.tolist() == [1, 0, 2]


def test_a_scattered_group_may_be_split_on_request():
    batch = PackedBatch.from_lengths([1, 1, 1], group_ids=torch.tensor([6, 0, 6]))
    assert parts_of(batch, 1, "trajectory") == [[0], [1], [2]]


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="whole: expected one of trajectory, group, domain, got 'row'"):
        parts_of(make(), 3, "row")
    with pytest.raises(ValueError, match="group_ids: whole='group' needs them in the batch"):
        parts_of(make("trajectory"), 3, "group")


def test_parts_have_the_indices_of_rows_steps_and_tokens():
    batch = make("group", steps=torch.tensor([[0, 1], [2, 3], [3, 3], [3, 4], [4, 6], [8, 10]]))
    first, second, third = batch.micro_batches(3)
    assert (first.steps.tolist(), second.steps.tolist(), third.steps.tolist()) == ([0, 1, 3, 4], [5], [])
    assert first.batch.steps.tolist() == [[0, 1], [2, 3], [3, 4], [4, 6]]
    assert second.batch.steps.tolist() == [[2, 4]] and third.tokens.tolist() == [10]
    assert [part.steps for part in make("group").micro_batches(3)] == [None] * 3


def test_advantages_of_steps_are_sliced():
    steps = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 6], [6, 7], [8, 10], [10, 11]])
    batch = make("group", steps=steps)
    advantages, logp = torch.arange(1.0, 8), torch.zeros(11)
    weights = hpo.aggregation.token_mean(batch)
    whole = hpo.policy_loss_and_grad(logp, None, advantages, batch, weights=weights, advantage_level="step")
    for part, rows, of_steps, tokens in batch.micro_batches(3):
        out = hpo.policy_loss_and_grad(
            logp[tokens], None, advantages[of_steps], part, weights=weights[rows], advantage_level="step"
        )
        assert torch.equal(out.grad, whole.grad[tokens])


def budget_of(unit):
    levels = (Level(Tanh(0.05)), Level(Tanh(0.03), unit=unit))
    return RatioGate("budget", LogClip((-0.2, -0.2), (0.2, 0.2)), levels)


def test_a_gate_on_groups_has_the_gradient_of_the_whole_batch():
    torch.manual_seed(0)
    batch = PackedBatch.from_lengths([4] * 6, group_ids=torch.tensor([0, 0, 0, 1, 1, 1]))
    old = -torch.rand(24)
    logp, advantages = old + 0.3 * torch.randn(24), torch.randn(6)
    weights = hpo.aggregation.token_mean(batch)

    def gradient(part, rows, _, tokens):
        given = (logp[tokens], old[tokens], advantages[rows], part, budget_of(Unit.GROUP))
        return hpo.policy_loss_and_grad(*given, weights=weights[rows]).grad

    whole = gradient(batch, slice(None), None, slice(None))
    assert torch.equal(torch.cat([gradient(*part) for part in batch.micro_batches(8)]), whole)
    first, second, third = batch.micro_batches(8, "trajectory")  # groups are torn
    for part in (first, second, third):
        with pytest.raises(
            ValueError, match=r"batch: the gate 'budget' looks at whole groups, .* whole='group'\), or "
        ):
            gradient(*part)


def test_functions_that_look_at_groups_refuse_a_part_of_one():
    """And take a part beside it that has whole groups, whatever it was asked to keep."""
    batch = make("group")
    split, rest, whole, _ = batch.micro_batches(4, "trajectory")
    assert [part.batch.torn for part in (split, rest, whole)] == [("group",), ("group",), ()]
    old, right = -torch.rand(11), torch.tensor([True, False] * 3)

    def loss(part, rows, _, tokens):
        weights = torch.ones(len(rows))
        return hpo.hierarchical_policy_loss(old[tokens], None, right[rows].float(), part, weights=weights).loss

    readers = [
        lambda part, *_: hpo.aggregation.prompt_mean(part, total=2),
        loss,
        lambda part, rows, _, tokens: hpo.entropy.quantiles(old[tokens], part, "0.5", scope="group"),
        lambda part, rows, _, tokens: hpo.gates.gepo_old_logp(old[tokens], part),
        lambda part, rows, _, tokens: hpo.entropy.hicra_tokens(-old[tokens], right[rows].float(), part),
        lambda part, rows, _, tokens: hpo.entropy.ares_windows(-old[tokens], part, width=1),
        lambda part, rows, _, tokens: hpo.entropy.ettrl(right[rows].float(), -old[tokens], part),
        lambda part, rows, _, tokens: hpo.entropy.gtpo(right[rows], -old[tokens], part),
        lambda part, rows, _, tokens: hpo.entropy.ucas(right[rows].float(), right[rows].float(), old[tokens], part),
        lambda part, rows, _, tokens: hpo.entropy.less(right[rows].float(), right[rows], -old[tokens], tokens, part),
    ]
    for reader in readers:
        reader(*whole)
        for part in (split, rest):
            with pytest.raises(ValueError, match=r"batch: .* looks at whole groups, .*micro_batches\(.*'group'\), or "):
                reader(*part)
    assert split.batch.replace(group_ids=torch.tensor([3, 3])).torn == ()
    assert [part.torn for part, *_ in split.batch.micro_batches(1, "group")] == [("group",)]
    alone = PackedBatch.from_lengths([1, 1], group_ids=torch.tensor([-1, -1]))  # in no group
    assert [part.torn for part, *_ in alone.micro_batches(1)] == [(), ()]
    changed = (split.batch.replace(mask=None), split.batch.select([0, 1])[0], split.batch.to("cpu"))
    assert all(each.torn == ("group",) for each in changed)


def test_a_gate_on_domains_refuses_a_part_of_one():
    batch = make("group", "domain")
    (part, rows, _, tokens), *_ = batch.micro_batches(3, "group")
    assert part.torn == ("domain",)
    given = (torch.zeros(len(tokens)), None, torch.ones(len(rows)), part)
    ones = torch.ones(len(rows))
    hpo.policy_loss_and_grad(*given, budget_of(Unit.GROUP), weights=ones)
    with pytest.raises(ValueError, match="looks at whole domains"):
        hpo.policy_loss_and_grad(*given, budget_of(Unit.DOMAIN), weights=ones)


def test_a_correction_over_groups_looks_at_the_tokens_whatever_aggregates_are_given():
    batch = make("group")
    (part, rows, _, tokens), *_ = batch.micro_batches(3, "trajectory")
    stopped = (Level(Tanh(0.03), Routing.STOPPED, Unit.GROUP),)
    given = (torch.zeros(len(tokens)), torch.zeros(len(tokens)), torch.ones(len(rows)), part)
    more = {"weights": torch.ones(len(rows)), "gate_inputs": hpo.gates.GateInputs(aggregates={"group": torch.zeros(8)})}
    token = LogClip((-0.2, -0.2), (0.2, 0.2))
    hpo.policy_loss_and_grad(*given, RatioGate("stopped", token, stopped), **more)
    mask = Correction(Action.MASK, (-1.0, -1.0), (1.0, 1.0), unit=Unit.GROUP, reduction=Reduction.MEAN)
    gate = RatioGate("corrected", token, stopped, corrections=(mask,))
    with pytest.raises(ValueError, match="the gate 'corrected' looks at whole groups"):
        hpo.policy_loss_and_grad(*given, gate, **more, rollout_logp=torch.zeros(len(tokens)))


def test_a_part_of_a_batch_that_is_one_group_is_a_piece_of_it():
    batch = make()
    for part, rows, _, tokens in batch.micro_batches(3):
        with pytest.raises(ValueError, match="batch: without group_ids the whole batch is one group"):
            hpo.entropy.gtpo(torch.ones(len(rows)).bool(), torch.rand(len(tokens)), part)


def test_a_part_is_not_whitened_by_itself():
    batch, rewards = make("trajectory"), torch.rand(11)
    for part, _, _, tokens in batch.micro_batches(3):
        own = rewards[tokens]
        for estimator, given in ((hpo.advantages.reinforce_pp, (own,)), (hpo.advantages.token_gae, (own, own))):
            with pytest.raises(
                ValueError, match=r"batch: this batch comes from micro_batches, .* or pass whitened=False"
            ):
                estimator(*given, part)
            estimator(*given, part, whitened=False)
