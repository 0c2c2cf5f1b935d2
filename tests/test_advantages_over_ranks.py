"""Groups over 2 and 4 processes: every rank gets, to the bit, what one process computes; ranks without units, too."""

import functools
import sys

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks

import hpo_core as hpo
from hpo_core import advantages, entropy
from hpo_core.advantages import over_ranks

UNITS = 29
# world -> how many units each rank has, in turn; one rank has none.
SHARES = {2: (17, 12), 4: (9, 0, 13, 7)}


def units():
    draw = torch.Generator().manual_seed(3)
    rewards = torch.randint(0, 5, (UNITS,), generator=draw) / 4
    rewards[5] = torch.nan
    groups = torch.randint(-1, 5, (UNITS,), generator=draw)
    trajectories = torch.where(groups < 0, -1, groups * 4 + torch.randint(0, 3, (UNITS,), generator=draw))
    # On one rank each, however the units are shared out.
    share = torch.bucketize(torch.arange(UNITS), torch.tensor([9, 17, 22]), right=True)
    local = torch.where(groups < 0, -1, (groups * 4 + share) * 3 + torch.randint(0, 3, (UNITS,), generator=draw))
    own, before = torch.arange(UNITS), torch.tensor([0, 9, 17, 22])[share]
    places = own - 7 * own % 5  # itself, or an earlier one of its rank
    return {
        "rewards": rewards,
        "local": local,
        "several": torch.randn(2, UNITS, generator=draw),
        "groups": groups,
        "trajectories": trajectories,
        "anchors": torch.randint(0, 3, (UNITS,), generator=draw),
        "lengths": torch.randint(1, 9, (UNITS,), generator=draw).float(),
        "flags": torch.rand(UNITS, generator=draw) < 0.6,
        "places": torch.where(own % 11 == 3, 2 * UNITS, torch.where(places < before, -1, places)),
    }


A = advantages
CALLS = {
    "grpo": lambda wrap, u: wrap(A.grpo)(u["rewards"], u["groups"], mask=u["flags"]),
    "grpo by name": lambda wrap, u: wrap(A.grpo)(rewards=u["rewards"], mask=u["flags"], group_ids=u["groups"]),
    "pass_at_k by name": lambda wrap, u: wrap(functools.partial(A.pass_at_k, k=2))(
        group_ids=u["groups"], is_correct=u["flags"]
    ),
    "lite_ppo": lambda wrap, u: wrap(functools.partial(A.lite_ppo, ddof=0))(u["rewards"], u["groups"]),
    "gdpo": lambda wrap, u: wrap(A.gdpo)(
        u["several"], u["groups"], lengths=u["lengths"], weights=torch.tensor([1.0, 2.0])
    ),
    "dvao": lambda wrap, u: wrap(A.dvao)(u["several"], u["groups"], torch.tensor([1.0, 2.0])),
    "gigpo": lambda wrap, u: wrap(functools.partial(A.gigpo, anchor_ids=u["anchors"]))(
        u["rewards"].nan_to_num(), u["groups"], u["trajectories"]
    ),
    "hgpo": lambda wrap, u: wrap(A.hgpo)(u["rewards"].nan_to_num(), u["groups"], u["trajectories"], u["anchors"]),
    "treepo": lambda wrap, u: wrap(A.treepo)(u["rewards"], (u["groups"], u["anchors"])),
    "peco": lambda wrap, u: wrap(A.peco)(u["rewards"], u["groups"], u["flags"]),
    "vpo": lambda wrap, u: wrap(A.vpo)(
        u["several"].T[:, :, None] * torch.tensor([1.0, -2.0, 0.5]), u["groups"], torch.eye(3)
    ),
    # Places that are no units give NaN.
    "mars2": lambda wrap, u: wrap(A.mars2)(u["rewards"], u["places"], u["groups"]).nan_to_num(7.0),
    "mars2 by name": lambda wrap, u: wrap(functools.partial(A.mars2, compat="code"))(
        u["rewards"], group_ids=u["groups"], parents=u["places"].int()
    ).nan_to_num(7.0),
    "poise": lambda wrap, u: wrap(A.poise)(u["rewards"], u["several"][0], u["places"]).nan_to_num(7.0),
    "treepo_segments": lambda wrap, u: wrap(A.treepo_segments)(
        u["rewards"], [u["groups"], u["anchors"]], lengths=u["several"].abs()
    ),
    "rose_length_penalty": lambda wrap, u: wrap(functools.partial(A.rose_length_penalty, starts=u["several"].abs()))(
        u["several"], u["rewards"], (u["groups"], u["anchors"]), u["lengths"]
    ),
    "hc_grpo": lambda wrap, u: wrap(A.reconstructed.hc_grpo)(u["rewards"], u["several"], u["groups"]),
    "equal rewards": lambda wrap, u: wrap(A.grpo)(torch.full_like(u["rewards"], 0.1), u["groups"], eps=0.0),
}
# The estimators for which tables of groups are enough.
TABLES = {
    "grpo": CALLS["grpo"],
    "equal rewards": CALLS["equal rewards"],
    "far from 0": lambda wrap, u: wrap(A.grpo)(u["rewards"] / 64 + 4096, u["groups"]),
    "one group": lambda wrap, u: wrap(A.grpo)(u["rewards"], None),
    "dr_grpo": lambda wrap, u: wrap(A.dr_grpo)(u["rewards"], u["groups"]),
    "maxrl": lambda wrap, u: wrap(A.maxrl)(u["rewards"], u["groups"]),
    "asymre": lambda wrap, u: wrap(A.asymre)(u["rewards"], u["groups"]),
    "a_star": lambda wrap, u: wrap(A.a_star)(u["rewards"], u["groups"]),
    "rloo": lambda wrap, u: wrap(A.rloo)(u["rewards"], u["groups"]),
    "grpo_leave_one_out": lambda wrap, u: wrap(A.grpo_leave_one_out)(u["rewards"], u["groups"]),
    "lite_ppo": CALLS["lite_ppo"],
    "opo": lambda wrap, u: wrap(A.opo)(u["rewards"], u["groups"], u["lengths"]),
    "dgpo": lambda wrap, u: wrap(A.dgpo)(u["rewards"], u["groups"], accuracy=u["several"][0].sigmoid()),
    "bnpo": lambda wrap, u: wrap(A.bnpo)(u["rewards"], u["groups"]),
    "ngrpo": lambda wrap, u: wrap(A.ngrpo)(u["rewards"], u["groups"]),
    "reinforce_pp_baseline": lambda wrap, u: wrap(A.reinforce_pp_baseline)(u["rewards"], u["groups"], u["lengths"]),
    "v05": lambda wrap, u: wrap(A.v05)(u["rewards"], u["groups"], u["several"][0].tanh()),
    "gdpo": CALLS["gdpo"],
    "dvao": CALLS["dvao"],
    "gigpo": lambda wrap, u: wrap(functools.partial(A.gigpo, anchor_ids=u["anchors"]))(
        u["rewards"].nan_to_num(), u["groups"], u["local"]
    ),
    "hgpo": lambda wrap, u: wrap(A.hgpo)(u["rewards"].nan_to_num(), u["groups"], u["local"], u["anchors"]),
    "dr_mas": lambda wrap, u: wrap(A.dr_mas)(u["rewards"], u["groups"], u["anchors"]),
    "peco": CALLS["peco"],
    "m_grpo": lambda wrap, u: wrap(A.m_grpo)(u["rewards"], u["groups"], u["lengths"]),
    "hbpo": lambda wrap, u: wrap(A.hbpo)(
        100 * u["lengths"], u["flags"], 256.0 * (1 + u["anchors"]), u["groups"].clamp(min=0)
    ),
    "stratified": lambda wrap, u: wrap(A.stratified)(u["rewards"], u["groups"], u["anchors"]),
    "tree_grpo": lambda wrap, u: wrap(A.tree_grpo)(u["rewards"], u["groups"], u["anchors"]),
    "treepo": CALLS["treepo"],
    "step_gae": lambda wrap, u: wrap(A.step_gae)(u["rewards"].nan_to_num(), u["several"][0], u["local"]),
    "flow_grpo": lambda wrap, u: wrap(A.flow_grpo)(u["rewards"], u["groups"], u["lengths"]),
    "himac": lambda wrap, u: wrap(A.reconstructed.himac)(u["rewards"], u["groups"], u["flags"], u["anchors"]),
    "aspo_shaping": lambda wrap, u: wrap(A.aspo_shaping)(
        u["rewards"].nan_to_num(), u["groups"], u["lengths"] / 2, u["lengths"], u["flags"]
    ),
    "adora": lambda wrap, u: wrap(A.adora)(u["rewards"], u["groups"], u["lengths"], u["flags"]),
    "salt": lambda wrap, u: wrap(A.reconstructed.salt)(
        u["rewards"].nan_to_num(), u["groups"], u["local"], u["anchors"]
    ),
    "lite_ppo about groups": lambda wrap, u: wrap(functools.partial(A.lite_ppo, about_groups=True))(
        u["rewards"], u["groups"]
    ),
    "dgpo with lengths": lambda wrap, u: wrap(A.dgpo)(u["rewards"], u["groups"], lengths=u["lengths"]),
    "grpo_passk": lambda wrap, u: wrap(A.grpo_passk)(u["rewards"], u["groups"]),
    "sgrpo_reward_sum": lambda wrap, u: wrap(A.sgrpo_reward_sum)(u["rewards"], u["several"][0], u["groups"]),
    "hila": lambda wrap, u: wrap(A.hila)(u["rewards"], u["flags"], u["anchors"] > 0, u["groups"]),
    "tool_star": lambda wrap, u: wrap(A.tool_star)(u["rewards"], u["flags"], u["anchors"] > 0, u["groups"]),
    "unidoc_rl": lambda wrap, u: wrap(A.unidoc_rl)(
        u["rewards"], u["several"][0], u["several"][1], u["lengths"], u["flags"].float() / 2 + 0.25, u["groups"]
    ),
    "copo": lambda wrap, u: wrap(functools.partial(A.copo, variants=2))(
        u["rewards"], u["groups"], u["local"], u["flags"], u["several"][0].sigmoid()
    ),
    "grpo_lead": lambda wrap, u: wrap(A.grpo_lead)(u["rewards"], u["groups"], is_correct=u["flags"]),
    "icpo": lambda wrap, u: wrap(functools.partial(A.icpo, progress=0.5))(u["rewards"], u["groups"], u["flags"]),
    "craft_gui": lambda wrap, u: wrap(functools.partial(A.reconstructed.craft_gui, judge_weight=0.5))(
        u["rewards"], u["several"][0], u["groups"]
    ),
    "datarus": lambda wrap, u: wrap(functools.partial(A.reconstructed.datarus, progress=0.3))(
        u["several"][0], u["rewards"], u["groups"]
    ),
    "thor": lambda wrap, u: wrap(A.thor)(u["rewards"], u["groups"], u["flags"], u["anchors"]),
    "hi_agent": lambda wrap, u: wrap(A.reconstructed.hi_agent)(
        u["rewards"], u["several"][0], u["several"][1], u["groups"]
    ),
    "a2fm_apo": lambda wrap, u: wrap(A.reconstructed.a2fm_apo)(u["rewards"].sigmoid(), u["flags"], u["groups"]),
    "spo_single_stream": lambda wrap, u: wrap(A.spo_single_stream)(
        u["rewards"].nan_to_num(), u["several"][0].sigmoid()
    ),
}


def part(values, begin, end):
    """The units of one rank, and their places among its own."""
    own = {name: value[..., begin:end] for name, value in values.items()}
    return own | {"places": torch.where(own["places"] < 0, own["places"], own["places"] - begin)}


def compute(world, rank):
    """The results of one rank, for the tests to look at."""
    begin = sum(SHARES[world][:rank])
    own = part(units(), begin, begin + SHARES[world][rank])
    tables = functools.partial(over_ranks, tables=True)
    references = sys.getrefcount(dist.group.WORLD)
    found = {name: call(over_ranks, own) for name, call in CALLS.items()}
    found |= {f"{name}, tables": call(tables, own) for name, call in TABLES.items()}
    # A process group that is still held outlives its destruction, and its threads end the interpreter badly.
    found["held"] = sys.getrefcount(dist.group.WORLD) - references
    return found


@pytest.fixture(scope="module", params=SHARES)
def ranks(request):
    """The results of each rank, and the number of its units."""
    return on_ranks(request.param, functools.partial(compute, request.param)), SHARES[request.param]


@pytest.mark.parametrize("name", CALLS)
def test_ranks_are_one_process(ranks, name):
    found, shares = ranks
    alone = CALLS[name](lambda estimator: estimator, units())
    assert [each[name].shape[-1] for each in found] == list(shares)
    assert torch.equal(torch.cat([each[name] for each in found], dim=-1), alone)
    if name == "equal rewards":
        assert not alone.any()


@pytest.mark.parametrize("name", TABLES)
def test_tables_of_groups_are_enough(ranks, name):
    found, _ = ranks
    got = torch.cat([each[f"{name}, tables"] for each in found], dim=-1)
    alone = TABLES[name](lambda estimator: estimator, units())
    torch.testing.assert_close(got, alone, rtol=2e-6, atol=2e-6)
    assert alone.any() or name == "equal rewards"
    if name == "equal rewards":
        assert not got.any()


def places_beyond(rank):
    """The second unit of each rank names one that stands behind all of its rank."""
    rewards, sources = torch.tensor([1.0, 0.0]) + 2 * rank, torch.tensor([1, 2])
    parents, group = torch.tensor([-1, 2**63 - 1 if rank else 2]), torch.zeros(2).long()
    return over_ranks(A.poise)(rewards, rewards / 4, sources), over_ranks(A.mars2)(rewards, parents, group)


def test_a_place_beyond_the_units_of_its_rank_is_none_of_the_next():
    for predicted, shaped in on_ranks(2, places_beyond):
        assert predicted.isnan().tolist() == shaped.isnan().tolist() == [False, True]


def with_an_empty_rank(rank):
    """A rank without units, which has lists without elements for what has rows, too."""
    rewards, root, places = torch.tensor([1.0, 0.0, 0.5]), torch.zeros(3).long(), torch.tensor([-1, 0, 0])
    lengths = torch.tensor([[4.0, 2.0, 1.0]])
    if rank == 0:
        rewards, root, places, lengths = rewards[:0], root[:0], torch.tensor([]), torch.tensor([])
    calls = [(A.mars2, (rewards, places, root)), (A.treepo_segments, (rewards, [root], lengths))]
    return [over_ranks(call)(*given) for call, given in calls] + [call(*given) for call, given in calls[: 2 * rank]]


def test_a_rank_without_units_has_no_rows_either():
    empty, (*over, shaped, segments) = on_ranks(2, with_an_empty_rank)
    assert all(map(torch.equal, over, (shaped, segments))) and shaped.any() and segments.any()
    assert [each.shape for each in empty] == [(0,), (1, 0)]


# Two groups of two rows, of which each rank has one row, and rewards of another spread in each.
ROWS = {"group_ids": torch.tensor([3, 5, 3, 5]), "trajectory_ids": torch.arange(4), "domain_ids": torch.zeros(4).long()}
REWARDS, OLD = torch.tensor([1.0, 0.0, 0.0, 5.0]), torch.full((8,), -1.0)
NEW = OLD + torch.tensor([0.3, -0.1, 0.2, 0.0, -0.3, 0.1, 0.05, 0.4])
OF_GROUPS = hpo.gates.reconstructed.fiberpo_domain()


def batch_of(begin, end):
    return hpo.PackedBatch.from_lengths([2] * (end - begin), **{name: ids[begin:end] for name, ids in ROWS.items()})


def recipes(rank):
    """The gradients, by estimator, of the single call, of micro-batches, and of the single call on own rewards."""
    world, tokens, rows = dist.group.WORLD, slice(4 * rank, 4 * rank + 4), slice(2 * rank, 2 * rank + 2)
    batch = batch_of(2 * rank, 2 * rank + 2)
    weights = hpo.aggregation.token_mean(batch, process_group=world, gradient_reduction="sum")
    found = {}
    for name in ("grpo", "lite_ppo"):
        estimator = getattr(A, name)
        for called, advantage in (("single", over_ranks(estimator, world)), ("own", estimator)):
            logp = NEW[tokens].clone().requires_grad_()
            hpo.hierarchical_policy_loss(
                logp, OLD[tokens], REWARDS[rows], batch, advantage=advantage, gate=OF_GROUPS, weights=weights,
                process_group=world,
            ).loss.backward()  # fmt: skip
            found[name, called] = logp.grad
        advantages = over_ranks(estimator, world)(REWARDS[rows], batch.group_ids)
        leaf = NEW[tokens].clone().requires_grad_()
        for part in batch.micro_batches(2):
            given = (leaf[part.tokens], OLD[tokens][part.tokens], advantages[part.rows], part.batch)
            hpo.policy_loss(*given, weights=weights[part.rows]).loss.backward()
        found[name, "parts"] = leaf.grad
    return found


def test_the_recipes_of_the_single_call_are_one_process():
    """Over ranks, and over ranks and micro-batches: as docs/distributed.md has them."""
    ranks, whole = on_ranks(2, recipes), batch_of(0, 4)
    for name in ("grpo", "lite_ppo"):
        advantages = getattr(A, name)(REWARDS, whole.group_ids)
        for called, gate in (("single", OF_GROUPS), ("parts", hpo.gates.ppo_clip()), ("own", OF_GROUPS)):
            expected = hpo.policy_loss_and_grad(NEW, OLD, advantages, whole, gate).grad
            got = torch.cat([each[name, called] for each in ranks])
            assert torch.allclose(got, expected, atol=1e-6) == (called != "own"), (name, called)


def test_every_estimator_that_takes_tables_is_tried():
    estimators = vars(A) | vars(A.reconstructed)
    assert {name for name, each in estimators.items() if getattr(each, "tables", False)} <= TABLES.keys()


def eager_and_compiled(rank):
    """The results of functions whose groups span ranks, of calls that Dynamo does not see and of those that it does."""
    rewards, ids, world = torch.tensor([[1.0, 0.0], [3.0, 8.0]])[rank], torch.tensor([0, 0]), dist.group.WORLD
    batch = hpo.PackedBatch.from_lengths([2], group_ids=torch.tensor([0]))
    calls = (
        lambda: over_ranks(advantages.grpo, tables=True)(rewards, ids),
        lambda: over_ranks(advantages.grpo)(rewards, ids),
        lambda: over_ranks(advantages.rloo, tables=True)(rewards, ids),
        lambda: entropy.fit_scopes(rewards, process_group=world).mean,
        lambda: torch.cat(entropy.fit_pivot(rewards + 0.1, batch, process_group=world)),
        lambda: entropy.covariance(-rewards, rewards[:1], batch, process_group=world),
        lambda: entropy.ares_difficulty(rewards > 0.5, ids, process_group=world),
        lambda: entropy.hicra_tokens(rewards, rewards[:1], batch, process_group=world),
    )
    return [(call(), torch.compile(call, backend="eager")()) for call in calls]


def test_compiled_code_leaves_calls_over_ranks_their_ranks():
    found = on_ranks(2, eager_and_compiled)
    for results in found:
        for eager, compiled in results:
            assert torch.equal(eager, compiled)
    (grpo, _), _, _, (mean, _), *_ = found[0]
    assert mean == 3 and grpo.max() < 0  # of all four rewards


def differently_masked(rank):
    """The errors where one rank has no mask, where the masks of two have different names, and where one has no ids."""
    rewards, groups, mask, said = torch.tensor([1.0, 100.0]), torch.tensor([0, 0]), torch.tensor([True, False]), []
    for keywords in ({"mask": mask if rank == 0 else None}, {"mask" if rank == 0 else "apply_mask": mask}):
        try:
            over_ranks(advantages.grpo)(rewards, groups, **keywords)
        except ValueError as error:
            said.append(str(error))
    try:
        over_ranks(advantages.grpo, tables=True)(rewards, groups if rank == 0 else None)
    except ValueError as error:
        said.append(str(error))
    return said


def test_tensors_that_ranks_do_not_share_are_refused_on_all():
    """The rank that has one would wait for the other, whose result would count the units that it masks."""
    start = "rewards: expected every rank to give the same tensors beside it, got others"
    for rank, found in enumerate(on_ranks(2, differently_masked)):
        own = ("group_ids, mask", "group_ids, mask") if rank == 0 else ("group_ids", "group_ids, apply_mask")
        assert len(found) == 3 and found[2].startswith("ids: expected them on all ranks or on none")
        for message, names in zip(found, own, strict=False):
            assert message.startswith(start) and f"on this one {names}; give" in message


def test_tables_say_the_same_on_every_rank(ranks):
    found, _ = ranks
    got = torch.cat([each["far from 0, tables"] for each in found])
    rewards, groups = units()["rewards"], units()["groups"]
    alike = (rewards[:, None] == rewards) & (groups[:, None] == groups) & (groups >= 0)
    assert alike.sum() > UNITS + 10
    assert torch.equal(got[:, None].expand(UNITS, UNITS)[alike], got.expand(UNITS, UNITS)[alike])


def test_nothing_holds_the_process_group(ranks):
    assert [each["held"] for each in ranks[0]] == [0] * len(ranks[0])


def test_estimators_that_need_the_units_are_refused():
    with pytest.raises(ValueError, match="tables: g2rpo needs the units themselves; gather them with tables=False"):
        over_ranks(advantages.g2rpo, tables=True)


def test_a_call_without_rewards_is_refused():
    """The error has the estimator's own name of them."""
    for estimator, name in ((advantages.grpo, "rewards"), (functools.partial(advantages.pass_at_k, k=2), "is_correct")):
        with pytest.raises(TypeError, match=f"^{name}: expected a tensor, got <class 'NoneType'>$"):
            over_ranks(estimator)(group_ids=torch.tensor([7, 7]))


def test_what_cannot_be_gathered_is_refused():
    with pytest.raises(ValueError, match="estimator: expected one of rows or steps, got one of tokens"):
        over_ranks(advantages.reinforce_pp)
    with pytest.raises(ValueError, match="estimator: edge_grpo takes the batch, which holds the rows of this process"):
        over_ranks(functools.partial(entropy.edge_grpo, entropy=torch.zeros(2)))
    with pytest.raises(TypeError, match="estimator: expected one of hpo_core"):
        over_ranks("grpo")


@pytest.mark.parametrize("tables", [False, True])
def test_one_process_has_no_ranks_to_gather_from(tables):
    with pytest.raises(ValueError, match=r"^process_group: .* not initialised; call init_process_group first"):
        over_ranks(advantages.grpo, tables=tables)(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]))
