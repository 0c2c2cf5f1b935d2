"""The rows that losses in verl see: selections by entropy, made of all rows of an update, of which micro-batches
take those of their rows; prompts; log-probabilities of the sampler and of the reference."""

import functools
import types

import pytest
import torch
from lazily import Lazy, skip_without
from verl_batches import ROWS, Batch, actor, actors, close, run

import hpo_core as hpo
from hpo_core import entropy, gates

skip_without("verl")
core_algos, tensordict_utils = Lazy("verl.trainer.ppo.core_algos"), Lazy("verl.utils.tensordict_utils")
losses, workers = Lazy("verl.workers.utils.losses"), Lazy("verl.workers.engine_workers")
workers_config, v1 = Lazy("verl.workers.config"), Lazy("verl.trainer.ppo.v1.trainer_base")
hpo_verl, selection = Lazy("hpo_core.integrations.verl"), Lazy("hpo_core.integrations.verl_rows")

pytestmark = pytest.mark.peers

COUNTS = {"dp_size": 1, "batch_num_tokens": 77, "global_batch_size": ROWS}


@pytest.fixture(scope="module", autouse=True)
def registry():
    assert callable(hpo_verl.register)
    before = dict(core_algos.POLICY_LOSS_REGISTRY)
    yield
    core_algos.POLICY_LOSS_REGISTRY.clear()
    core_algos.POLICY_LOSS_REGISTRY.update(before)
    selection.METHODS.clear()


class Rollout(Batch):
    """A batch with the entropies of the policy that sampled, and four answers to each of two prompts."""

    def __init__(self, seed=0):
        super().__init__(seed)
        draw = torch.Generator().manual_seed(seed + 100)
        self.fields["entropy"] = [torch.rand(n, generator=draw) * 3 for n in self.responses]
        self.fields["ref_log_prob"] = [
            old + 0.3 * torch.randn(len(old), generator=draw) for old in self.fields["old_log_probs"]
        ]
        self.uids = [f"prompt {row // 4}" for row in range(ROWS)]

    def data(self, rows=range(ROWS), **counts):
        data = super().data(rows, **counts)
        tensordict_utils.assign_non_tensor_stack(data, "uid", [self.uids[row] for row in rows])
        return data

    def packed(self):
        """The rows as the library takes them."""
        return hpo.PackedBatch.from_lengths(
            self.responses, mask=torch.cat(self.fields["response_mask"]), group_ids=torch.arange(ROWS) // 4
        )


def worker_of(config):
    engine = types.SimpleNamespace(get_data_parallel_group=lambda: None)
    return types.SimpleNamespace(loss_fn=functools.partial(losses.ppo_loss, config=config), engine=engine)


def updated(batch, config, micro_batches, updates=1):
    """The results of a worker in each update, whose rows it splits: the sum of losses and of gradients."""

    def train_mini_batch(self, data):
        parts = []
        for rows in micro_batches:
            part = tensordict_utils.index_select_tensor_dict(data, torch.tensor(rows))
            tensordict_utils.assign_non_tensor(part, **COUNTS)
            loss, _ = self.loss_fn(model_output={"log_probs": batch.log_probs(rows)}, data=part)
            parts.append((loss.detach(), *torch.autograd.grad(loss, batch.logp)))
        return tuple(map(sum, zip(*parts, strict=True)))

    worker, update = worker_of(config), selection.module()._selected(train_mini_batch)
    return [update(worker, batch.data()) for _ in range(updates)]


def expected(batch, gate, chosen, **options):
    rows = batch.packed()
    weights = hpo.aggregation.token_mean(rows, total=COUNTS["batch_num_tokens"])
    found = hpo.policy_loss_and_grad(
        torch.cat(batch.response(batch.logp.detach())), torch.cat(batch.fields["old_log_probs"]),
        torch.cat(batch.fields["advantages"]), rows, gate, weights=weights, selection=chosen, advantage_level="token",
        **options,
    )  # fmt: skip
    grad = torch.zeros_like(batch.logp)
    for mine, given in zip(batch.response(grad), found.grad.split(batch.responses), strict=True):
        mine.copy_(given)
    return found.loss, grad


def above_the_prompt_s_median(entropy, batch, process_group, seed=0):
    """A method of a user's own, which asks for prompts and for the number of the rollout."""
    assert process_group is None
    middle = hpo.entropy.quantiles(entropy, batch, "0.5", scope="group", expand=True)
    return hpo.entropy.Selection(weight=torch.where(entropy > middle, 1.5 + seed, 0.5))


def selected(name, batch):
    """The selection of all rows, by the library alone."""
    given, rows = torch.cat(batch.fields["entropy"]), batch.packed()
    if name == "forking_tokens":
        window = entropy.forking_tokens()
        return entropy.Selection(mask=window.apply(given, rows, window.fit(given, rows)))
    if name == "entropy_advantage":
        return entropy.entropy_advantage(torch.cat(batch.fields["advantages"]), given, rows, advantage_level="token")
    return ARCHER(given, rows)


ARCHER = functools.partial(entropy.archer, kl_reasoning=0.25)
METHODS = {
    "forking_tokens": (gates.ppo_clip(), entropy.forking_tokens(), None),
    "archer": (gates.archer_clip(), ARCHER, hpo.kl.k3(0.1)),
    "entropy_advantage": (gates.ppo_clip(), entropy.entropy_advantage, None),
}
SPLITS = {"whole": [list(range(ROWS))], "any": [[5, 2], [0, 7, 1], [3], [6, 4]]}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", METHODS)
def test_micro_batches_take_the_selection_of_the_update(name, split):
    gate, method, kl = METHODS[name]
    hpo_verl.register(f"hpo_{name}", gate, entropy=method, kl=kl)
    config = actor(f"hpo_{name}", loss_agg_mode="token-mean", use_kl_loss=kl is not None, kl_loss_coef=0.0)
    for seed in range(3):
        batch = Rollout(seed)
        given = {} if kl is None else {"kl": kl, "ref_logp": torch.cat(batch.fields["ref_log_prob"])}
        truth = expected(batch, gate, selected(name, batch), **given)
        close(*updated(batch, config, SPLITS[split]), truth)
        if name != "archer":  # whose gate does nothing without bounds
            assert not torch.allclose(expected(batch, gate, None)[1], truth[1], rtol=1e-3)


def test_methods_know_prompts_and_how_many_rollouts_came_before():
    hpo_verl.register("hpo_own", gates.ppo_clip(), entropy=above_the_prompt_s_median)
    batch, config = Rollout(), actor("hpo_own", loss_agg_mode="token-mean")
    given = torch.cat(batch.fields["entropy"])
    for seed, found in enumerate(updated(batch, config, SPLITS["any"], updates=2)):
        chosen = above_the_prompt_s_median(given, batch.packed(), None, seed)
        close(found, expected(batch, gates.ppo_clip(), chosen))


def of_prompts(advantages, entropy, batch):
    return hpo.entropy.ettrl(advantages[batch.cu_seqlens[:-1]], entropy, batch)[batch.row_of_token()]


def test_what_compares_prompts_has_them_whole(monkeypatch):
    """A method is refused where ranks share a prompt, gate inputs in every micro-batch: verl cuts them anywhere."""

    def method(entropy, advantages, batch):
        return hpo.entropy.Selection(advantage_factor=of_prompts(advantages, entropy, batch))

    def inputs(logp, advantages, batch):
        return gates.GateInputs(token_mask=of_prompts(advantages, -logp, batch) > 0)

    batch = Rollout()
    hpo_verl.register("hpo_compares", gates.ppo_clip(), entropy=method)
    updated(batch, actor("hpo_compares", loss_agg_mode="token-mean"), SPLITS["any"])
    monkeypatch.setattr(selection.module(), "ranks_of_groups", lambda *_: {"prompt 0": [2, 2]})
    with pytest.raises(ValueError, match="whole groups, and rows of a group lie on several ranks"):
        updated(batch, actor("hpo_compares", loss_agg_mode="token-mean"), SPLITS["any"])
    hpo_verl.register("hpo_compares_in_parts", gates.capo(), gate_inputs=inputs)
    with pytest.raises(ValueError, match="whole groups, and another part has rows of a group"):
        updated(batch, actor("hpo_compares_in_parts", loss_agg_mode="token-mean"), SPLITS["any"])


def test_tokens_without_an_advantage_are_not_clipped_beside_a_method():
    """As without one, and as in verl's own losses."""
    batch, fractions = Rollout(), []
    batch.fields["advantages"] = [each * (row % 2) for row, each in enumerate(batch.fields["advantages"])]
    for name, method in (("hpo_no_method", None), ("hpo_all_selected", entropy.forking_tokens("1.0"))):
        hpo_verl.register(name, gates.ppo_clip(0.02, 0.02), entropy=method)

        def metrics(self, data):
            part = tensordict_utils.index_select_tensor_dict(data, torch.arange(ROWS))
            tensordict_utils.assign_non_tensor(part, **COUNTS)
            return self.loss_fn(model_output={"log_probs": batch.log_probs(range(ROWS))}, data=part)[1]

        worker = worker_of(actor(name, loss_agg_mode="token-mean"))
        fractions.append(selection.module()._selected(metrics)(worker, batch.data())["actor/pg_clipfrac"].aggregate())
    assert fractions[0] == fractions[1] > 0


def test_a_window_of_each_call_is_refused():
    with pytest.raises(ValueError, match="entropy: verl fits a window once for each update"):
        hpo_verl.register("hpo_call", gates.dapo(), entropy=entropy.forking_tokens(scope="call"))


def test_a_critic_is_trained_by_the_same_class_of_workers():
    critic = workers_config.CriticConfig(strategy="fsdp", ppo_micro_batch_size_per_gpu=1)
    for loss in (functools.partial(losses.value_loss, config=critic), losses.value_loss):
        worker = types.SimpleNamespace(loss_fn=loss)
        assert selection.module()._selected(lambda _, data: data)(worker, "rows") == "rows"


def test_rows_may_be_padded():
    """The layout of verl's own response masks differs between its trainers."""
    hpo_verl.register("hpo_padded", gates.ppo_clip(), entropy=entropy.forking_tokens())
    batch, seen = Rollout(), {}
    data = batch.data()
    padded = data.select("response_mask", "entropy", "old_log_probs", "advantages").to_padded_tensor()
    valid = torch.cat(batch.fields["response_mask"])
    chosen = selected("forking_tokens", batch).mask[valid]
    for each in (data, padded):
        selection.module()._selected(lambda _, given: seen.update(given.items()))(worker_of(actor("hpo_padded")), each)
        found = seen["selection_mask"]
        assert found.is_nested == data["response_mask"].is_nested or each is padded
        found = found.values()[valid] if found.is_nested else found[padded["response_mask"] != 0]
        assert torch.equal(found, chosen) and chosen.any() and not chosen.all()


def entropies(batch, requires_grad=False):
    """The entropies of the policy that is trained, for prompts and responses, as verl's model gives them."""
    packed = torch.rand(len(batch.logp), generator=torch.Generator().manual_seed(7)).requires_grad_(requires_grad)
    return packed, torch.nested.nested_tensor_from_jagged(packed, batch.offsets)


def test_a_penalty_has_a_gradient_through_the_entropies():
    penalty = functools.partial(entropy.entropy_band, low=torch.full((ROWS,), 0.3), high=torch.full((ROWS,), 0.4))
    hpo_verl.register("hpo_band", gates.ppo_clip(), entropy_penalty=penalty)
    batch = Rollout()
    packed, nested = entropies(batch, requires_grad=True)
    data, config = batch.data(**COUNTS), actor("hpo_band", loss_agg_mode="token-mean")
    loss, _ = losses.ppo_loss(config, {"log_probs": batch.log_probs(), "entropy": nested}, data)
    (found,) = torch.autograd.grad(loss, packed, retain_graph=True)
    own = torch.cat(batch.response(packed.detach())).requires_grad_()
    rows = batch.packed()
    truth = penalty(own, rows, hpo.aggregation.token_mean(rows, total=COUNTS["batch_num_tokens"]))
    torch.testing.assert_close(torch.cat(batch.response(found)), *torch.autograd.grad(truth, own))
    plain, _ = losses.ppo_loss(actor("hpo_ppo_clip"), {"log_probs": batch.log_probs()}, batch.data(**COUNTS))
    torch.testing.assert_close(loss - plain, truth)
    assert found.any() and truth != 0


def test_gate_inputs_may_take_entropies():
    seen = []

    def bounds(entropy, batch):
        seen.append(entropy)
        return gates.GateInputs(bounds=(torch.full_like(entropy, 0.9), torch.full_like(entropy, 1.1)))

    hpo_verl.register("hpo_bounds", gates.archer_clip(), gate_inputs=bounds)
    batch = Rollout()
    packed, nested = entropies(batch)
    run(batch, actor("hpo_bounds"), entropy=nested)
    valid = torch.cat(batch.fields["response_mask"])
    padded = batch.data()["response_mask"].to_padded_tensor(0) != 0
    assert torch.equal(seen[0].reshape(padded.shape)[padded], torch.cat(batch.response(packed))[valid])


def test_every_loss_of_every_rank_gets_a_seed_of_its_own(monkeypatch):
    seeds = []

    def mask(batch, seed):
        seeds.append(seed)
        return gates.GateInputs(token_mask=torch.ones(batch.total_tokens, dtype=torch.bool))

    hpo_verl.register("hpo_drawn", gates.clip_cov(), gate_inputs=mask)
    batch, config = Rollout(), actor("hpo_drawn", loss_agg_mode="token-mean")
    updated(batch, config, SPLITS["any"], updates=2)
    assert len(set(seeds)) == 2 * len(SPLITS["any"])
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    for rank in range(2):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda group, rank=rank: rank)
        for _ in range(2):
            losses.ppo_loss(config, {"log_probs": batch.log_probs()}, batch.data(**COUNTS), dp_group="ranks")
    assert [seed % 2 for seed in seeds[-4:]] == [0, 0, 1, 1] and seeds[-4] + 2 == seeds[-3]


def test_clip_cov_draws_other_tokens_in_every_rollout():
    given = {"share": 0.2, "low": 0.0, "high": 50.0}
    hpo_verl.register("hpo_clip_cov", gates.clip_cov(), gate_inputs=functools.partial(gates.clip_cov_mask, **given))
    assert core_algos.POLICY_LOSS_REGISTRY["hpo_clip_cov"].args[0].reads_rows()  # then losses are counted
    batch, config = Rollout(), actor("hpo_clip_cov", loss_agg_mode="token-mean")
    first, second = updated(batch, config, SPLITS["whole"], updates=2)
    assert not torch.equal(first[1], second[1])


def test_errors_say_what_to_set():
    batch = Rollout()
    hpo_verl.register("hpo_forking", gates.ppo_clip(), entropy=entropy.forking_tokens())
    with pytest.raises(ValueError, match="'hpo_forking' has an entropy method, and no update"):
        run(batch, actor("hpo_forking"))
    del batch.fields["entropy"]
    with pytest.raises(ValueError, match=r"gives no entropy; set trainer\.use_v1=True"):
        updated(batch, actor("hpo_forking"), SPLITS["whole"])
    hpo_verl.register("hpo_band", gates.ppo_clip(), entropy_penalty=lambda entropy, weights: entropy.sum())
    with pytest.raises(ValueError, match=r"'hpo_band' reads the entropies .* set actor.calculate_entropy=True"):
        run(batch, actor("hpo_band"))
    hpo_verl.register("hpo_kl", gates.ppo_clip(), kl=hpo.kl.k3(0.1))
    for fields in ({"use_kl_loss": True, "kl_loss_coef": 0.1}, {"use_kl_loss": False, "kl_loss_coef": 0.0}):
        if not fields["use_kl_loss"]:
            del batch.fields["ref_log_prob"]
        with pytest.raises(
            ValueError, match=r"kl: 'hpo_kl' takes the place of verl's penalty .*actor.kl_loss_coef=0, got"
        ):
            run(batch, actor("hpo_kl", **fields))
    for wrong, error, message in (
        ({"entropy": "ares"}, TypeError, "entropy: expected an EntropyWindow or a function"),
        ({"entropy": ARCHER}, ValueError, "entropy: archer weighs the KL penalty .*; pass kl="),
        ({"entropy": entropy.hapo}, ValueError, "entropy: hapo fits its state on one process"),
        ({"entropy_penalty": entropy.epo}, ValueError, "entropy_penalty: expected a function of entropy"),
        ({"kl": 0.1}, TypeError, "kl: expected a penalty of hpo_core.kl"),
    ):
        with pytest.raises(error, match=message):
            hpo_verl.register("hpo_wrong", gates.ppo_clip(), **wrong)
    assert "hpo_wrong" not in core_algos.POLICY_LOSS_REGISTRY


# ------------------------------------------------------------------------------------------------ the sampler, prompts


def test_a_gate_of_the_samplers_ratio_takes_no_weights_of_it():
    hpo_verl.register("hpo_total", gates.dppo_tv(channel=gates.Channel.TOTAL))
    batch, config = Rollout(), actor("hpo_total", loss_agg_mode="token-mean")
    sampler = batch.fields["rollout_log_probs"] = [old - 0.1 for old in batch.fields["old_log_probs"]]
    run(batch, config)
    batch.fields["rollout_is_weights"] = sampler
    with pytest.raises(ValueError, match=r"algorithm\.rollout_correction: its weights and the gate 'dppo_tv' correct"):
        run(batch, config)


@pytest.mark.parametrize("name", ["icepop", "tis", "mis", "decoupled", "hispo"])
def test_gates_take_the_sampler_s_log_probabilities_from_the_rows(name):
    gate = getattr(gates, name)()
    hpo_verl.register(f"hpo_{name}", gate)
    batch = Rollout()
    draw = torch.Generator().manual_seed(3)
    sampler = [old + 0.7 * torch.randn(len(old), generator=draw) for old in batch.fields["old_log_probs"]]
    batch.fields["rollout_log_probs"] = sampler
    config = actor(f"hpo_{name}", loss_agg_mode="token-mean")
    truth = expected(batch, gate, None, rollout_logp=torch.cat(sampler))
    close(*updated(batch, config, SPLITS["any"]), truth)
    alone = expected(batch, gate, None, rollout_logp=torch.cat(batch.fields["old_log_probs"]))
    assert not torch.allclose(truth[1], alone[1], rtol=1e-2)
    batch.fields["rollout_is_weights"] = sampler
    with pytest.raises(ValueError, match=rf"algorithm\.rollout_correction: its weights and the gate '{name}' correct"):
        run(batch, config)
    del batch.fields["rollout_log_probs"], batch.fields["rollout_is_weights"]
    with pytest.raises(ValueError, match=rf"gate: '{name}' corrects .* gets none; set rollout\.calculate_log_probs"):
        run(batch, config)


LOG_CLIP, NARROW = gates.LogClip((-0.2, -0.2), (0.2, 0.2)), gates.LogClip((-0.02, -0.02), (0.02, 0.02))
GROUPS = gates.RatioGate("of_groups", LOG_CLIP, levels=(gates.Level(NARROW, unit=gates.Unit.GROUP),))


def test_a_correction_of_prompts_needs_all_answers_in_one_micro_batch():
    hpo_verl.register("hpo_corrected", gates.mis(unit=gates.Unit.GROUP))
    batch = Rollout()
    batch.fields["rollout_log_probs"] = batch.fields["old_log_probs"]
    with pytest.raises(ValueError, match="a micro-batch has 3 of the 4 answers"):
        updated(batch, actor("hpo_corrected", loss_agg_mode="token-mean"), [[0, 1, 2], [3, 4, 5, 6, 7]])


def test_the_answers_to_a_prompt_are_those_of_all_ranks(monkeypatch):
    def gather(counts, own, group):
        assert len(counts) == 2 and group == "ranks"
        counts[:] = own, type(own)({"prompt 0": 3, "prompt 9": 1})

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    data = Rollout().data()
    selection.module()._count_groups(data, "ranks")
    assert [*data["hpo_group_rows"]] == [7] * 4 + [4] * 4


@pytest.mark.parametrize("padded", [False, True])
def test_rows_without_valid_tokens_may_lie_in_any_micro_batch(padded):
    """verl's V1 trainers fill batches up with them, all under one uid."""
    hpo_verl.register("hpo_groups", GROUPS)
    batch, config = Rollout(), actor("hpo_groups", loss_agg_mode="token-mean")
    for row in (3, 4, 6):
        batch.fields["response_mask"][row][:] = False
    batch.uids[4] = batch.uids[6] = "pad0a1b2c"
    truth = updated(batch, config, [list(range(ROWS))])
    close(*truth, expected(batch, GROUPS, None))
    close(*updated(batch, config, [[4, 0, 1, 2], [7, 5, 3], [6]]), *truth)
    with pytest.raises(ValueError, match="a micro-batch has 2 of the 3 answers to prompt prompt 0"):
        updated(batch, config, [[4, 0, 1, 3], [7, 5, 2], [6]])
    data = batch.data()
    if padded:
        data["response_mask"] = data["response_mask"].to_padded_tensor(0)
    selection.module()._count_groups(data, None)
    assert [*data["hpo_group_rows"]] == [3, 3, 3, 0, 0, 2, 0, 2]


def test_a_level_of_prompts_needs_all_answers_in_one_micro_batch():
    hpo_verl.register("hpo_groups", GROUPS)
    batch, config = Rollout(), actor("hpo_groups", loss_agg_mode="token-mean")
    truth = expected(batch, GROUPS, None)
    for split in ([list(range(ROWS))], [[4, 5, 6, 7], [3, 1, 0, 2]]):
        close(*updated(batch, config, split), truth)
    with pytest.raises(ValueError, match="has a level of prompt groups, and a micro-batch has 3 of the 4 answers"):
        updated(batch, config, [[0, 1, 2], [3, 4, 5, 6, 7]])
    with pytest.raises(ValueError, match="no update of its TrainingWorker has counted them"):
        run(batch, config)
    alone = gates.RatioGate("x", GROUPS.token, levels=(gates.Level(NARROW),))
    assert not torch.allclose(expected(batch, alone, None)[1], truth[1], rtol=1e-2)


# ----------------------------------------------------------------------------------- the ranks that get a prompt's rows


class Queue:
    """The rows of a batch as V1's trainers have them."""

    def __init__(self, sizes, seed=0):
        draw = torch.Generator().manual_seed(seed)
        self.keys = [f"u_{prompt}_{row}_0" for prompt, size in enumerate(sizes) for row in range(size)]
        self.tags = [{"seq_len": int(torch.randint(5, 500, (), generator=draw))} for _ in self.keys]
        self.lengths = {key: tag["seq_len"] for key, tag in zip(self.keys, self.tags, strict=True)}

    def reorder(self, order):
        assert sorted(order) == [*range(len(self.keys))]
        self.keys, self.tags = [self.keys[row] for row in order], [self.tags[row] for row in order]

    def filled_up(self, multiple, _):
        for number in range(-len(self.keys) % multiple):
            self.keys.append(f"pad_{number}_0")
            self.tags.append({"seq_len": 128})
        return self


def shared_out(monkeypatch, queue, ranks, mode="hpo_groups", **fields):
    """The prompts of the micro-batches of each rank, and what the trainer logs."""
    micro_batch, metrics = fields.get("ppo_micro_batch_size_per_gpu", 4), {}
    warmup = fields.pop("critic_warmup", 0)
    sizes = {"ppo_mini_batch_size": 4, "ppo_micro_batch_size_per_gpu": 4, "use_dynamic_bsz": False}
    actor_config = types.SimpleNamespace(policy_loss={"loss_mode": mode}, **{**sizes, **fields})
    of_actor = types.SimpleNamespace(actor=actor_config, rollout=types.SimpleNamespace(n=4))
    trainer = types.SimpleNamespace(
        config=types.SimpleNamespace(actor_rollout_ref=of_actor, trainer=types.SimpleNamespace(critic_warmup=warmup)),
        actor_rollout_wg=types.SimpleNamespace(_dispatch_info={"actor": [*range(ranks)]}),
        tokenizer=types.SimpleNamespace(eos_token_id=2), global_steps=1, use_critic=False,
    )  # fmt: skip
    trainer._get_required_batch_multiple = functools.partial(v1.PPOTrainer._get_required_batch_multiple, trainer)
    monkeypatch.setattr(v1.module(), "upsample_batch_to_divisible_size", Queue.filled_up)
    rows = [key.rsplit("_", 2)[0] for key in v1.PPOTrainer._balance_batch(trainer, queue, metrics).keys]
    parts = [rows[start : start + micro_batch] for start in range(0, len(rows), micro_batch)]
    assert len(rows) % (ranks * micro_batch) == 0
    return parts, metrics


def parted(parts):
    return [
        prompt for prompt in {each for part in parts for each in part}
        if prompt != "pad" and sum(prompt in part for part in parts) > 1
    ]  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_v1_gives_ranks_whole_prompts_where_the_gate_has_a_level_of_them(ranks, monkeypatch):
    hpo_verl.register("hpo_groups", GROUPS)
    for sizes in ([4] * 8, [4, 3, 4, 4, 2, 4, 4, 4], [4, 4, 1, 4, 4, 4]):
        for seed in range(3):
            parts, metrics = shared_out(monkeypatch, Queue(sizes, seed), ranks)
            assert not parted(parts)
            spread = metrics["global_seqlen/balanced_max"] - metrics["global_seqlen/balanced_min"]
            assert spread <= 4 * 500  # a prompt's, of 4,000 tokens and more that a rank has
    for changed in ({"mode": "hpo_ppo_clip"}, {"critic_warmup": 5}):  # a critic has no groups
        other, _ = shared_out(monkeypatch, Queue([4] * 8), 2, **changed)
        assert parted(other)


def test_prompts_of_different_numbers_of_rows_are_packed_by_room_where_work_leaves_none(monkeypatch):
    hpo_verl.register("hpo_groups", GROUPS)
    sizes = {"ppo_mini_batch_size": 3, "ppo_micro_batch_size_per_gpu": 6}
    parts, _ = shared_out(monkeypatch, Queue([3, 3, 2, 2, 2]), 2, **sizes)
    assert not parted(parts) and len(parts) == 2
    # Micro-batches of four have no room for them; those of varying size are cut from a rank's eight.
    of_rank, _ = shared_out(monkeypatch, Queue([3, 3, 3, 3, 2, 2]), 2, use_dynamic_bsz=True)
    assert not {*of_rank[0], *of_rank[1]} & {*of_rank[2], *of_rank[3]}


def test_a_rank_trains_on_prompts_in_the_order_of_the_batch(monkeypatch):
    """Sorted by length they would make updates of long answers first."""
    hpo_verl.register("hpo_groups", GROUPS)
    parts, _ = shared_out(monkeypatch, Queue([4] * 16), 2)
    first = [int(part[0].removeprefix("u_")) for part in parts]
    assert first[:8] == sorted(first[:8]) and first[8:] == sorted(first[8:]) and first != sorted(first)


def test_prompts_without_room_in_a_micro_batch_are_named(monkeypatch):
    hpo_verl.register("hpo_groups", GROUPS)
    wide, _ = shared_out(monkeypatch, Queue([6, 2, 4, 4]), 1, ppo_micro_batch_size_per_gpu=8)
    assert not parted(wide)
    for sizes, fields in (([4, 6, 4, 2], {}), ([4] * 4, {"ppo_mini_batch_size": 1})):
        with pytest.raises(ValueError, match=r"'hpo_groups' has .* rows has no room for the [46] rows of prompt u_"):
            shared_out(monkeypatch, Queue(sizes), 2, **fields)
    shared_out(monkeypatch, Queue([3, 3, 3, 3, 3, 1]), 2)  # which no order keeps whole: the worker refuses them


# ------------------------------------------------------------------------------------------------- verl's whole actor

LOSSES = """
import hpo_core as hpo
from hpo_core.integrations.verl import register

register("hpo_forking", hpo.gates.ppo_clip(), entropy=hpo.entropy.forking_tokens("0.4"))
"""


@pytest.mark.long  # half a minute on two cores
def test_two_ranks_of_verl_s_actor_select_as_one_does(tmp_path, monkeypatch):
    (tmp_path / "user_losses.py").write_text(LOSSES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    results = []
    for ranks in (1, 2):
        (tmp_path / str(ranks)).mkdir()
        names = ("eager:hpo_forking", "eager:hpo_ppo_clip")
        results.append(actors(ranks, tmp_path / str(ranks), *names, modules=("user_losses",)))
    (alone,), two = results
    for what in ("gradient", "parameters"):
        for mode in ("hpo_forking", "hpo_ppo_clip"):
            whole = alone[mode][what]
            for rank in two:
                error = (rank[mode][what] - whole).abs().max() / whole.abs().max()
                assert error <= (1e-6 if what == "gradient" else 1e-5), (mode, what, error)
        apart = alone["hpo_forking"][what] - alone["hpo_ppo_clip"][what]
        assert apart.abs().max() > 1e-3 * alone["hpo_forking"][what].abs().max()


def masked_and_weighed(entropy, batch):
    return hpo.entropy.Selection(mask=entropy > 1, weight=1 + entropy)


def test_a_mask_travels_with_the_weights_beside_it():
    hpo_verl.register("hpo_both", gates.ppo_clip(), entropy=masked_and_weighed)
    batch, config = Rollout(), actor("hpo_both", loss_agg_mode="token-mean")
    chosen = masked_and_weighed(torch.cat(batch.fields["entropy"]), batch.packed())
    close(*updated(batch, config, SPLITS["any"]), expected(batch, gates.ppo_clip(), chosen))


def test_a_window_runs_on_the_backend_that_is_asked_for():
    batch, window = Rollout(), entropy.forking_tokens()
    given, rows = torch.cat(batch.fields["entropy"]), batch.packed()
    found = selection.module().selected_by(window, given, rows, backend="reference")
    assert torch.equal(found.mask, selected("forking_tokens", batch).mask)


def test_groups_that_ranks_share_are_counted(monkeypatch):
    def gather(counts, own, group):
        counts[:] = [own, {"a": 1, "c": 2}]

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    found = selection.ranks_of_groups(["a", "b", "b", "pad"], [True, True, True, False], "ranks")
    assert found == {"a": [1, 1], "b": [2], "c": [2]}
