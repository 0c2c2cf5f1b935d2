"""gate=, advantage=, window= and entropy= of HPOTrainer, in the trainer and in its log."""

from __future__ import annotations

import functools
import math
import sys

import pytest
import torch
from lazily import Lazy, skip_without
from trainers import LENGTH, ROWS, build, demo, loss_of, micro_batch
from trl_runs import DEEP, run

import hpo_core as hpo
from hpo_core.integrations.entropy_methods import check_entropy
from hpo_core.integrations.trl_inputs import sampler_of

skip_without("trl")
hpo_trl, transformers, trl = Lazy("hpo_core.integrations.trl"), Lazy("transformers"), Lazy("trl")

pytestmark = pytest.mark.peers


FIBER_LEVELS = [level.unit.name.lower() for level in hpo.gates.fiberpo().levels]


def test_a_gate_on_several_levels_trains(tmp_path):
    """On-policy every gate with slope 1 at 0 gives the same gradient, to the bit; off-policy FiberPO has its own."""
    for steps, same in ((1, True), (4, False)):
        results = [
            run(hpo_trl.HPOTrainer, tmp_path, extra={"gate": gate}, loss_type="grpo", max_steps=steps)
            for gate in (hpo.gates.fiberpo(0.001, (0.0005, 0.0005)), hpo.gates.ppo_clip())
        ]
        assert torch.equal(results[0].parameters, results[1].parameters) == same
        assert all(math.isfinite(entry["loss"]) for entry in results[0].logs if "loss" in entry)
        levels = {unit: f"hpo_core/{unit}/clip_fraction" for unit in ("trajectory", "group", "domain")}
        for unit, key in levels.items():
            assert (key in results[0].logs[0]) == (unit in FIBER_LEVELS), unit
            assert key not in results[1].logs[0]


def test_levels_are_logged(tmp_path):
    inputs, scored = micro_batch()
    gate = hpo.gates.fiberpo(0.2, (0.02, 0.01))
    trainer = build(hpo_trl.HPOTrainer, tmp_path, extra={"gate": gate})
    trainer.current_gradient_accumulation_steps = 1
    inputs["group_ids"] = torch.arange(len(scored.valid)) // 2
    loss_of(hpo_trl.HPOTrainer._compute_loss, trainer, inputs, scored)
    batch = hpo.PackedBatch.from_padded(scored.valid, group_ids=inputs["group_ids"])
    given = scored.logps, inputs["old_per_token_logps"], inputs["advantages"], batch, gate
    levels = hpo.policy_loss(*given, report=("levels",)).levels.compute()
    logged = {key: values[-1] for key, values in trainer._metrics["train"].items()}
    assert set(levels) == set(FIBER_LEVELS)
    for unit, values in levels.items():
        inside = sum(
            values[f"segments_{sign}"] * values[f"segment_fraction_pass_{sign}_{channel}"] / 2
            for sign in ("positive", "negative")
            for channel in ("rise", "fall")
            if values[f"segments_{sign}"]
        )
        whole = values["segments_positive"] + values["segments_negative"]
        assert logged[f"hpo_core/{unit}/segments"] == values["segments"]
        assert logged[f"hpo_core/{unit}/ratio_mean"] == pytest.approx(values["ratio_mean"])
        assert logged[f"hpo_core/{unit}/clip_fraction"] == pytest.approx(1 - inside / whole)


def test_ids_follow_their_rows_through_the_shuffle(tmp_path):
    whole = {"per_device_train_batch_size": 64, "steps_per_generation": 1, "max_steps": 1}
    trainer, seen = build(hpo_trl.HPOTrainer, tmp_path, extra={"gate": DEEP, "domain": "kind"}, **whole), []
    honest = trainer._policy_loss

    def watch(logps, entropies, inputs, aux_loss=None):
        texts = trainer.processing_class.batch_decode(inputs["prompt_ids"], skip_special_tokens=True)
        seen.extend(zip(texts, inputs["group_ids"].tolist(), inputs["domain_ids"].tolist(), strict=True))
        return honest(logps, entropies, inputs, aux_loss)

    trainer._policy_loss = watch
    trainer.train()
    assert len(seen) == 64 and sorted(group for _, group, _ in seen) == [row // 8 for row in range(64)]
    assert [group for _, group, _ in seen] != sorted(group for _, group, _ in seen)
    assert len({(text, group) for text, group, _ in seen}) == 8
    kinds = {text.strip()[0] for text, *_ in seen}
    assert len({(text.strip()[0], domain) for text, _, domain in seen}) == len(kinds) > 1


def test_steps_are_what_no_tool_wrote(monkeypatch, tmp_path):
    module = sys.modules["hpo_core.integrations.trl"]
    deep = {"gate": DEEP, "domain": "kind"}
    trainer, batches = build(hpo_trl.HPOTrainer, tmp_path, extra=deep, steps_per_generation=1), []
    trainer.current_gradient_accumulation_steps = 4
    honest = module.policy_loss

    def watch(logps, old, advantages, batch, *rest, **keywords):
        batches.append(batch)
        return honest(logps, old, advantages, batch, *rest, **keywords)

    monkeypatch.setattr(module, "policy_loss", watch)
    inputs, scored = micro_batch()
    inputs |= {"group_ids": torch.arange(ROWS) // 3, "domain_ids": torch.zeros(ROWS, dtype=torch.long)}
    loss_of(hpo_trl.HPOTrainer._compute_loss, trainer, inputs, scored)
    steps, valid = [], scored.valid.flatten().tolist()
    for row in range(ROWS):
        for at in range(row * LENGTH, (row + 1) * LENGTH):
            if valid[at] and (at % LENGTH == 0 or not valid[at - 1]):
                steps.append([at, at])
            if valid[at]:
                steps[-1][1] = at + 1
    assert len(steps) == 6 and batches[0].steps.tolist() == steps


@pytest.mark.parametrize("per_token", [False, True])
def test_a_gate_gets_the_inputs_it_needs(per_token, tmp_path):
    """Bounds by entropy and masks by covariance, made of the trainer's micro-batch."""
    gates, masks = hpo.gates, functools.partial(hpo.gates.clip_cov_mask, share=0.2, low=0.0, high=50.0)
    inputs, scored = micro_batch(per_token_advantages=per_token)
    logp, old = scored.logps, inputs["old_per_token_logps"]
    batch, advantages = hpo.PackedBatch.from_padded(scored.valid), inputs["advantages"]
    level, flat = "token" if per_token else "row", [each.reshape(-1) for each in (logp, old, advantages)]
    for gate, make, given in (
        (gates.hapo_clip(), gates.hapo_bounds, gates.hapo_bounds(scored.entropies.reshape(-1), batch)),
        (gates.clip_cov(), masks, masks(*flat, batch, seed=0, advantage_level=level)),
        (gates.bpo(), gates.bpo_target, gates.bpo_target(flat[2])),
        (gates.fipo(), gates.fipo_weight, gates.fipo_weight(*flat, batch, advantage_level=level)),
    ):
        trainer = build(hpo_trl.HPOTrainer, tmp_path, extra={"gate": gate, "gate_inputs": make}, loss_type="bnpo")
        trainer.current_gradient_accumulation_steps = 1
        _, grad, _ = loss_of(hpo_trl.HPOTrainer._compute_loss, trainer, inputs, scored)
        keywords = {"advantage_level": level, "weights": hpo.aggregation.token_mean(batch)}
        expected = hpo.policy_loss_and_grad(*flat, batch, gate, gate_inputs=given, **keywords)
        torch.testing.assert_close(grad, expected.grad.view_as(grad), msg=gate.name)
        bare = hpo.policy_loss_and_grad(*flat, batch, **keywords)
        assert not torch.allclose(grad, bare.grad.view_as(grad)), gate.name


def test_each_micro_batch_draws_anew(tmp_path):
    """The seeds of a step begin with its number, so that a run that is resumed has them, too; evaluation takes none."""
    seeds = []

    def inputs(batch, seed):
        seeds.append(seed)
        return hpo.gates.GateInputs(token_mask=batch.mask)

    extra = {"gate": hpo.gates.m2po(), "gate_inputs": inputs}
    trainer = build(hpo_trl.HPOTrainer, tmp_path, extra=extra, loss_type="bnpo")
    trainer.current_gradient_accumulation_steps = 1
    for step, training in ((0, True), (0, False), (0, True), (7, True), (7, True)):
        trainer.state.global_step = step
        trainer.model.train(training)
        loss_of(hpo_trl.HPOTrainer._compute_loss, trainer, *micro_batch())
    assert seeds == [0, 1, 1, 7 << 16, (7 << 16) + 1]


def test_an_unscored_token_drops_no_row_where_corrections_compare_with_both_policies():
    gate = hpo.gates.compose(hpo.gates.icepop(), *hpo.gates.opsm(0.1).corrections)
    logps, old = torch.tensor([[-3.0, 0.0, 0.0]]), torch.zeros(1, 3)
    given = {"sampling_per_token_logps": torch.tensor([[math.nan, 0.0, 0.0]]), "old_per_token_logps": old}
    assert torch.equal(sampler_of(gate, logps, given), logps)
    assert torch.equal(sampler_of(hpo.gates.icepop(), logps, given), old)


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
def test_corrections_read_what_the_sampler_says(tmp_path):
    inputs, scored = micro_batch()
    trainer = build(hpo_trl.HPOTrainer, tmp_path, extra={"gate": hpo.gates.icepop(), "rollout_func": lambda *_: {}})
    trainer.current_gradient_accumulation_steps = 1
    with pytest.raises(ValueError, match=r"^gate: 'icepop' corrects by the sampler's log-probabilities"):
        loss_of(hpo_trl.HPOTrainer._compute_loss, trainer, inputs, scored)
    rollout = inputs["old_per_token_logps"] + torch.where(torch.arange(LENGTH) == 2, 3.0, 0.0)  # e^-3 is below 0.5
    unscored = torch.arange(LENGTH) == 3  # by vLLM: the ratio there is 1
    inputs["sampling_per_token_logps"] = torch.where(unscored, math.nan, rollout)
    _, grad, _ = loss_of(hpo_trl.HPOTrainer._compute_loss, trainer, inputs, scored)
    expected = hpo.policy_loss_and_grad(
        scored.logps, inputs["old_per_token_logps"], inputs["advantages"], scored.valid, hpo.gates.icepop(),
        rollout_logp=rollout,
    )  # fmt: skip
    assert not grad[:, 2].any() and grad[:, 3].any()
    torch.testing.assert_close(grad * expected.grad.sum(), expected.grad * grad.sum())
    kept = scored.valid & (torch.arange(LENGTH) != 2)
    logged = {key: values[-1] for key, values in trainer._metrics["train"].items() if "correction_0" in key}
    assert logged["hpo_core/correction_0/selected_fraction"] == pytest.approx(float(kept.sum() / scored.valid.sum()))
    ratio = torch.where(kept, 1.0, math.exp(-3))[scored.valid].mean()
    assert logged["hpo_core/correction_0/ratio_mean"] == pytest.approx(float(ratio), rel=1e-5)


def test_a_correction_of_groups_asks_all_processes(tmp_path):
    (inputs, scored), gate = micro_batch(), hpo.gates.mis(unit=hpo.gates.Unit.GROUP)
    extra = {"gate": gate, "rollout_func": lambda *_: {}}
    trainer = build(hpo_trl.HPOTrainer, tmp_path, extra=extra, steps_per_generation=1)
    trainer.current_gradient_accumulation_steps, trainer._ranks = 1, lambda: "all processes"
    inputs |= {"sampling_per_token_logps": scored.logps, "group_ids": torch.zeros(len(scored.valid), dtype=torch.long)}
    with pytest.raises(TypeError, match="process_group"):
        loss_of(hpo_trl.HPOTrainer._compute_loss, trainer, inputs, scored)


def test_domains_need_a_column_and_the_other_way_round(tmp_path):
    with pytest.raises(ValueError, match="domain: the gate 'deep' has a level of domains; name the dataset's column"):
        build(hpo_trl.HPOTrainer, tmp_path, extra={"gate": DEEP})
    with pytest.raises(ValueError, match="domain: no level of the gate 'trl_dapo' is one of domains; drop it"):
        build(hpo_trl.HPOTrainer, tmp_path, extra={"domain": "kind"})
    trainer = build(hpo_trl.HPOTrainer, tmp_path, extra={"gate": DEEP, "domain": "genus"}, steps_per_generation=1)
    with pytest.raises(ValueError, match="domain: expected a column of the dataset, got 'genus'; it has kind, prompt"):
        trainer._generate_and_score_completions([{"prompt": "abcdefgh=", "kind": "a"}] * 8)


@pytest.mark.parametrize(
    "extra", [{"gate": DEEP, "domain": "kind"}, {"gate": hpo.gates.mis(unit=hpo.gates.Unit.GROUP)}]
)
def test_segments_of_several_completions_are_not_torn(extra, tmp_path):
    extra |= {"rollout_func": lambda *_: {}}
    with pytest.raises(
        ValueError, match=r"steps_per_generation: expected 1, got 4 .*; the gate .* compares completions"
    ):
        build(hpo_trl.HPOTrainer, tmp_path, extra=extra)


def test_a_level_of_domains_alone_is_not_torn(tmp_path):
    gate = hpo.gates.RatioGate(
        "of domains", hpo.gates.Identity(), (hpo.gates.Level(hpo.gates.Tanh(0.1), unit=hpo.gates.Unit.DOMAIN),)
    )
    with pytest.raises(ValueError, match="steps_per_generation: expected 1, got 4"):
        build(hpo_trl.HPOTrainer, tmp_path, extra={"gate": gate, "domain": "kind"})


def test_pieces_of_groups_are_known_in_training_and_evaluation(tmp_path):
    """A rollout of 64 completions, 8 of a prompt, in four micro-batches; evaluation has 2 of a prompt, in order."""
    trainer = build(hpo_trl.HPOTrainer, tmp_path, num_generations_eval=2)
    assert trainer._torn_levels(16) == ("group", "domain")
    trainer.model.eval()
    assert trainer._torn_levels(6) == () and trainer._torn_levels(5) == ("ranks",)
    whole = build(hpo_trl.HPOTrainer, tmp_path, steps_per_generation=1)
    assert whole._torn_levels(16) == () and whole._torn_levels(6) == ("ranks",)


def test_methods_that_compare_completions_ask_whether_processes_share_prompts(tmp_path):
    def method(entropy, advantages, batch):
        return hpo.entropy.Selection(
            advantage_factor=hpo.entropy.ettrl(advantages, entropy, batch)[batch.row_of_token()]
        )

    trainer = build(hpo_trl.HPOTrainer, tmp_path, extra={"entropy": method})
    prompts = [{"prompt": "abcdefgh="}] * 8 + [{"prompt": "aaaaaaaa="}] * 8
    output = trainer._generate_and_score_completions(prompts)
    assert torch.equal(output["group_ids"], torch.arange(16) // 8) and "selection_advantage_factor" in output
    trainer._generations = lambda: 32
    with pytest.raises(ValueError, match="rows of a group lie on several ranks"):
        trainer._generate_and_score_completions(prompts)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_gate_inputs_do_not_compare_pieces_of_groups(micro_batches, tmp_path):
    """A function that compares a prompt's completions is refused where a micro-batch has some of them."""

    def weights(entropy, advantages, batch):
        of_rows = hpo.entropy.ettrl(advantages, entropy, batch)
        return hpo.gates.GateInputs(token_mask=of_rows[batch.row_of_token()] > 0)

    (inputs, scored), extra = micro_batch(), {"gate": hpo.gates.capo(), "gate_inputs": weights}
    trainer = build(hpo_trl.HPOTrainer, tmp_path, extra=extra, steps_per_generation=micro_batches, num_generations=2)
    trainer.current_gradient_accumulation_steps = 1
    inputs["group_ids"] = torch.arange(ROWS) // 2
    if micro_batches == 1:
        return loss_of(hpo_trl.HPOTrainer._compute_loss, trainer, inputs, scored)
    with pytest.raises(ValueError, match="batch: this function looks at whole groups"):
        loss_of(hpo_trl.HPOTrainer._compute_loss, trainer, inputs, scored)


def test_group_ids_reach_the_loss_and_the_log_holds_our_advantages(tmp_path):
    estimator = functools.partial(hpo.advantages.rloo)
    trainer = build(hpo_trl.HPOTrainer, tmp_path, extra={"advantage": estimator}, scale_rewards="group")
    output = trainer._generate_and_score_completions([{"prompt": "abcdefgh="}] * 8 + [{"prompt": "aaaaaaaa="}] * 8)
    rewards = trainer._hpo_rewards[:, 0]
    assert torch.equal(output["group_ids"], torch.arange(16) // 8)
    assert torch.equal(output["advantages"], hpo.advantages.rloo(rewards, output["group_ids"]))
    assert list(trainer._logs["advantages"]) == output["advantages"].tolist()


def test_an_estimator_of_several_rewards_gets_what_each_function_says(tmp_path):
    """TRL's own normalize_then_sum is GDPO over samples: the same numbers from the same rewards."""
    extra = {"advantage": hpo.advantages.gdpo}
    trainer = build(hpo_trl.HPOTrainer, tmp_path, extra=extra)
    trainer.reward_weights = torch.tensor([1.0, 0.5])
    draw = torch.Generator().manual_seed(0)
    trainer._hpo_rewards = torch.randint(0, 4, (16, 2), generator=draw).float()
    groups = torch.arange(16) // 8
    got = trainer._advantages(hpo.advantages.gdpo, groups)
    each = trainer._hpo_rewards.view(2, 8, 2)
    normal = (each - each.mean(1, keepdim=True)) / (each.std(1, keepdim=True) + 1e-4)
    together = (normal * trainer.reward_weights).sum(-1).view(-1)
    torch.testing.assert_close(got, (together - together.mean()) / (together.std() + 1e-4), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scaling", ["group", "batch", "none", "normalize_then_sum"])
def test_trl_s_own_advantages_agree(scaling, tmp_path, monkeypatch):
    """Its trainer computes them from the rewards of two functions, one completion scored by nobody."""
    draw = torch.Generator().manual_seed(3)
    scores = torch.randint(0, 9, (32, 2), generator=draw) / 4
    scores[5] = math.nan
    monkeypatch.setattr(trl.GRPOTrainer, "_calculate_rewards", lambda *_, **__: scores.clone())
    way = "scale_rewards" if scaling != "normalize_then_sum" else "multi_objective_aggregation"
    trainer = build(trl.GRPOTrainer, tmp_path, **{way: scaling})
    trainer.reward_funcs, trainer.reward_func_names = trainer.reward_funcs * 2, ["first", "second"]
    trainer.reward_weights = weights = torch.tensor([1.0, 0.5])
    theirs = trainer._generate_and_score_completions([{"prompt": "abcdefgh="}] * 32)["advantages"]
    ids, rewards = torch.arange(32) // 8, (scores * weights).sum(1)
    ours = {
        "group": lambda: hpo.advantages.grpo(rewards, ids, eps=1e-4),
        "batch": lambda: hpo.advantages.lite_ppo(rewards, ids, eps=1e-4),
        "none": lambda: hpo.advantages.dr_grpo(rewards, ids),
        "normalize_then_sum": lambda: hpo.advantages.gdpo(scores.T.contiguous(), ids, weights.tolist()),
    }[scaling]()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert bool(ours.any()) and ours[5] == 0


def test_a_completion_nobody_scored_has_no_advantage(tmp_path):
    trainer = build(hpo_trl.HPOTrainer, tmp_path, extra={"advantage": hpo.advantages.dr_grpo})
    trainer._hpo_rewards = torch.tensor([[1.0], [math.nan], [0.0], *[[0.0]] * 5])
    advantages = trainer._advantages(hpo.advantages.dr_grpo, torch.zeros(8, dtype=torch.int64))
    assert advantages[1] == 0
    assert advantages[0] == pytest.approx(1 - 1 / 7)


@pytest.mark.parametrize("scope", ["batch", "call"])
def test_a_window_selects_its_share_of_every_rollout(scope, tmp_path):
    """Also where the policy has moved on since: at scope="batch" the mask is that of the policy that sampled."""
    window = hpo.entropy.ares(2, "0.5", scope=scope)
    result = run(hpo_trl.HPOTrainer, tmp_path, extra={"window": window}, max_steps=8)
    selected = [entry["hpo_core/selected_fraction"] for entry in result.logs if "hpo_core/selected_fraction" in entry]
    assert len(selected) == 8
    for rollout in (selected[:4], selected[4:]):
        assert sum(rollout) / 4 == pytest.approx(0.46, abs=0.03)  # half of the windows that fit: 11 of 12 tokens


def test_a_batch_window_is_fitted_on_the_whole_generation_batch(tmp_path):
    trainer = build(hpo_trl.HPOTrainer, tmp_path, extra={"window": hpo.entropy.forking_tokens("0.2")})
    output = trainer._generate_and_score_completions([{"prompt": "abcdefgh="}] * 32)
    _, entropies, _ = trainer._score(trainer.model, output)
    valid = output["completion_mask"] != 0
    tokens = int(valid.sum())
    assert output["token_mask"].sum() == 1 + math.floor(0.2 * (tokens - 1))
    assert entropies[output["token_mask"]].min() >= entropies[valid & ~output["token_mask"]].max()


def test_an_entropy_method_reaches_every_micro_batch(tmp_path):
    """Its fields go with their rows through TRL's shuffling, and the loss is that of the whole rollout at once."""
    seen = []

    def method(entropy, batch, advantages, seed):
        chosen = hpo.entropy.archer(entropy, batch)
        chosen = chosen._replace(kl_weight=None).merged(hpo.entropy.entropy_advantage(advantages, entropy, batch))
        seen.append((entropy.view(batch.padded_shape), chosen))
        return chosen

    trainer = build(hpo_trl.HPOTrainer, tmp_path, extra={"entropy": method, "gate": hpo.gates.archer_clip()})
    trainer.current_gradient_accumulation_steps = 1
    output = trainer._generate_and_score_completions([{"prompt": "abcdefgh="}] * 32)
    (entropies, chosen), valid = seen[0], output["completion_mask"] != 0
    shape = valid.shape
    for key, field in (("low", chosen.bounds[0]), ("high", chosen.bounds[1]), ("advantage_addend", chosen[5])):
        assert torch.equal(output[f"selection_{key}"], field.view(shape)), key
    order = torch.randperm(32, generator=torch.Generator().manual_seed(0))

    def rows_of(batch, rows):
        return {name: each[rows] if torch.is_tensor(each) and each.dim() else each for name, each in batch.items()}

    shuffled = rows_of(output, order)
    logps, _, _ = trainer._score(trainer.model, output)
    logps = logps.detach() + 0.1 * torch.randn(shape, generator=torch.Generator().manual_seed(1))
    together = logps.clone().requires_grad_()
    trainer._policy_loss(together, entropies, output).backward()
    for rows in (slice(0, 8), slice(8, 32)):
        leaf = logps[order][rows].clone().requires_grad_()
        trainer._policy_loss(leaf, entropies[order][rows], rows_of(shuffled, rows)).backward()
        ratio = leaf.grad / together.grad[order][rows]
        ratio = ratio[torch.isfinite(ratio)]
        assert ratio.numel() > 0 and torch.allclose(ratio, ratio[0], rtol=1e-5)  # the denominator alone differs


def test_fractions_of_clipped_tokens_are_counted_on_bounds_of_tokens(tmp_path):
    def method(entropy):
        return hpo.entropy.Selection(bounds=(None, torch.full_like(entropy, 1e3)))

    def logged(**extra):
        trainer = build(hpo_trl.HPOTrainer, tmp_path, extra={"gate": hpo.gates.ppo_clip(0.001, 0.001), **extra})
        trainer.current_gradient_accumulation_steps = 1
        output = trainer._generate_and_score_completions([{"prompt": "abcdefgh="}] * 32)
        logps, entropies, _ = trainer._score(trainer.model, output)
        noise = 0.1 * torch.randn(logps.shape, generator=torch.Generator().manual_seed(1))
        trainer._policy_loss(logps.detach() + noise, entropies.detach(), output)
        return {side: trainer._metrics["train"][f"clip_ratio/{side}_mean"][-1] for side in ("low", "high")}

    plain, bounded = logged(), logged(entropy=method)
    assert plain["low"] == bounded["low"] > 0 and plain["high"] > bounded["high"] == 0


def test_a_window_as_an_entropy_method_is_that_window(tmp_path):
    window = hpo.entropy.forking_tokens("0.3")

    def method(entropy, batch, process_group):
        state = window.fit(entropy, batch, process_group=process_group)
        return hpo.entropy.Selection(mask=window.apply(entropy, batch, state))

    ours = run(hpo_trl.HPOTrainer, tmp_path, extra={"entropy": method}, max_steps=4)
    theirs = run(hpo_trl.HPOTrainer, tmp_path, extra={"window": window}, max_steps=4)
    assert ours.tokens == theirs.tokens and torch.equal(ours.parameters, theirs.parameters)


def test_an_entropy_penalty_is_trl_s_bonus(tmp_path):
    """The mean entropy over the tokens of the micro-batch, times a coefficient: TRL's bonus by another way."""

    def bonus(entropy, batch, weights):
        assert entropy.requires_grad and weights.shape == (batch.rows,)
        return -0.01 * hpo.entropy.mean_entropy(entropy, batch, hpo.aggregation.token_mean(batch))

    ours = run(hpo_trl.HPOTrainer, tmp_path, extra={"entropy_penalty": bonus}, max_steps=4)
    theirs = run(hpo_trl.HPOTrainer, tmp_path, entropy_coef=0.01, max_steps=4)
    plain = run(hpo_trl.HPOTrainer, tmp_path, max_steps=4)
    assert (ours.parameters - theirs.parameters).abs().max() <= 1e-6 < (ours.parameters - plain.parameters).abs().max()
    logged = [(entry["entropy_penalty"], -0.01 * entry["entropy"]) for entry in ours.logs if "entropy" in entry]
    assert logged and all(penalty == pytest.approx(expected, rel=1e-3) for penalty, expected in logged)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"entropy": hpo.entropy.ares()}, "entropy: expected a function that returns a Selection.* goes to window="),
        (
            {"entropy": hpo.entropy.edge_grpo},
            "entropy: expected a function that returns a Selection, got edge_grpo, which returns torch.Tensor",
        ),
        ({"entropy": hpo.entropy.steer}, "entropy: .* needs change too; fix it with functools.partial"),
        ({"entropy_penalty": hpo.entropy.epo}, "entropy_penalty: .* needs history too"),
        ({"entropy": hpo.entropy.archer}, "entropy: archer weighs the KL penalty .*; set beta > 0"),
        ({"entropy": hpo.entropy.archer, "window": hpo.entropy.ares()}, "entropy: it takes the place of window="),
    ],
)
def test_what_is_no_entropy_method_is_refused(extra, message, tmp_path):
    with pytest.raises((ValueError, TypeError), match=message):
        build(hpo_trl.HPOTrainer, tmp_path, extra=extra)


@pytest.mark.parametrize("kind", ["hpo.entropy.Selection", "Any", "Selection | None", hpo.entropy.Selection, None])
def test_the_annotation_of_a_users_function_is_not_judged(kind):
    def own(entropy, batch):
        return hpo.entropy.aepo_ruc(entropy, batch)

    own.__annotations__ = {} if kind is None else {"return": kind}
    check_entropy(own, 1, "window")


def test_an_entropy_method_that_measures_one_process_is_refused_on_two():
    check_entropy(hpo.entropy.aepo_ruc, 1, "window")
    check_entropy(hpo.entropy.archer, 2, "window")
    with pytest.raises(ValueError, match="entropy: aepo_ruc fits its state on one process, and here are 2"):
        check_entropy(hpo.entropy.aepo_ruc, 2, "window")


def test_a_gate_of_the_samplers_ratio_is_not_weighed_again(tmp_path):
    gate = hpo.gates.dppo_tv(channel=hpo.gates.Channel.TOTAL)
    trainer, (inputs, scored) = build(hpo_trl.HPOTrainer, tmp_path, extra={"gate": gate}), micro_batch()
    trainer.current_gradient_accumulation_steps = 1
    given = inputs | {"sampling_per_token_logps": inputs["old_per_token_logps"], "importance_sampling_ratio": 2.0}
    _, expected, _ = loss_of(hpo_trl.HPOTrainer._compute_loss, trainer, given, scored)
    assert expected.any()  # without vLLM no weight is TRL's
    trainer.use_vllm = True
    with pytest.raises(ValueError, match=r"vllm_importance_sampling_correction: expected False, .* the gate 'dppo_tv'"):
        loss_of(hpo_trl.HPOTrainer._compute_loss, trainer, given, scored)


def test_every_gate_of_the_demo_trains(tmp_path):
    for name, (gate, loss_type) in demo().GATES.items():
        result = run(hpo_trl.HPOTrainer, tmp_path, extra={"gate": gate()}, loss_type=loss_type, max_steps=2)
        assert all(math.isfinite(entry["grad_norm"]) and entry["grad_norm"] > 0 for entry in result.logs[:2]), name


def test_a_rollout_is_scored_in_micro_batches_for_a_window(tmp_path):
    trainer = build(hpo_trl.HPOTrainer, tmp_path, extra={"window": hpo.entropy.ares(scope="batch")}, max_steps=1)
    inner, sizes = trainer._get_per_token_logps_and_entropies, []

    def scored(*given, batch_size=None, **keywords):
        sizes.append((len(given[1]), batch_size))
        return inner(*given, batch_size=batch_size, **keywords)

    trainer._get_per_token_logps_and_entropies = scored
    trainer.train()
    assert (64, 16) in sizes and all(size == 16 for rows, size in sizes if rows == 64)


def test_an_estimator_runs_on_the_backend_of_the_trainer(tmp_path):
    seen = []

    def estimator(rewards, group_ids, *, backend=None):
        seen.append(backend)
        return hpo.advantages.rloo(rewards, group_ids, backend=backend)

    build(hpo_trl.HPOTrainer, tmp_path, extra={"advantage": estimator, "backend": "reference"}, max_steps=1).train()
    assert set(seen) == {"reference"}
