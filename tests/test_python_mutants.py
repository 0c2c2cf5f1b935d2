"""Deliberate bugs in the Python around the kernels, each killed by a named test, as those of test_mutants.py are."""

import pytest
import torch
from changed import affected
from mutants import Mutant, assert_killed, killer, module_of_tests, python
from ranks import on_ranks

import hpo_core as hpo


def mutant(file, before, after, killer, **arguments):
    return Mutant("python", file, before, after, killer, arguments)


class Found:
    """The results of ranks for one computation, made when a test looks at it."""

    def __init__(self, computation):
        self.computation = computation

    def __getitem__(self, world):
        return on_ranks(world, getattr(module_of_tests("test_vocabulary_parallel"), self.computation))


class Scoped:
    """The results of two ranks for scopes that they share, computed anew whenever a test looks at them."""

    def __init__(self, kind, name):
        self.arguments = (kind,), (name,)

    def __iter__(self):
        return iter(on_ranks(2, module_of_tests("test_scopes_over_ranks").compute, *self.arguments))


ONE_STEP = "test_wrong_arguments.test_some_steps_of_the_walk_in_this_process"
MUTANTS = {
    "patterns of outputs have torch's default dtype": mutant(
        "native.py",
        'self._loss = torch.empty((), dtype=torch.float32, device="cpu")', "self._loss = torch.empty(())",
        "test_ambient_defaults.test_a_backend_that_is_loaded_under_them", default="float64",
    ),
    "a tensor without memory gets past the door": mutant(
        "checks.py",
        "has_memory = tensor.data_ptr() and", "has_memory = tensor.data_ptr() >= 0 and",
        ONE_STEP, name="hpo_core.advantages.flat.grpo", argument="group_ids", kind="freed",
    ),
    "devices are not compared": mutant(
        "checks.py",
        "    if tensor.device != device:\n        # A batch", "    if False:\n        # A batch",
        ONE_STEP, name="hpo_core.advantages.hierarchical.gigpo", argument="positions", kind="meta",
    ),
    "what a batch has computed outlives its mask": mutant(
        "batch/immutable.py",
        "if kept is not None and kept[0] == state:", "if kept is not None:",
        "test_batch_caches.test_the_denominators_of_a_refilled_mask",
    ),
    "a batch hands out its cache": mutant(
        "batch/packed.py",
        "return self.once(row_counts).clone()", "return self.once(row_counts)",
        "test_batch_caches.test_row_counts_are_a_copy",
    ),
    "an operator takes a mask of any length": mutant(
        "ops/segments.py",
        'check_operand("mask", mask, (total_tokens,)', 'check_operand("mask", mask, () if mask is None else mask.shape',
        ONE_STEP, name="torch.ops.hpo_core.row_counts", argument="mask", kind="shorter",
    ),
    "scores are read as float32 whatever they are": mutant(
        "entropy/window.py",
        "score = score.float().contiguous()", "score = score.contiguous()",
        ONE_STEP, name="EntropyWindow.fit_score", argument="score", kind="float64",
    ),
    "a rank whose empty lists are floats raises alone": mutant(
        "batch/structure.py",
        'if name != "mask" and tensor.numel() > 0:', 'if name != "mask":',
        "test_empty_rank.test_estimators", holder=0,
    ),
    "the dtype of an empty list is held against its rank": mutant(
        "distributed.py",
        "for size, *form, _ in forms.tolist() if size > 0})", "for size, *form, _ in forms.tolist()})",
        "test_empty_rank.test_estimators", holder=1,
    ),
    "every epsilon ever used is kept": mutant(
        "native.py",
        "functools.lru_cache(maxsize=_SPECS)(make)", "functools.lru_cache(maxsize=None)(make)",
        "test_bounded_costs.test_a_schedule_of_epsilons_keeps_a_bounded_number_of_specs",
    ),
    "each of several ranks counts its own tokens": mutant(
        "aggregation.py",
        'world == 1 or (is_global', 'True or (is_global',
        "test_data_parallel.test_a_step_of_several_ranks_needs_its_counts",
        function=lambda batch, *_: hpo.aggregation.prompt_mean(batch), message="gradient_reduction: 2 ranks",
    ),
    "a part counts its own tokens": mutant(
        "aggregation.py",
        "total is not None or not batch.is_part,", "True,",
        "test_data_parallel.test_a_part_does_not_know_the_counts_of_the_step",
    ),
    "weights do not make up for an engine that averages gradients": mutant(
        "aggregation.py",
        'return float(world) if gradient_reduction == "mean" else 1.0', "return 1.0",
        "test_data_parallel.test_two_ranks_have_the_gradient_of_one_process",
        ranks=lambda engine: on_ranks(2, one_case, engine), engine="averaging", mode="token_mean", steps=3,
    ),
    "a gate without its inputs is PPO": mutant(
        "prepared.py",
        "gate_inputs is not None or gate.required else", "gate_inputs is not None else",
        "test_gate_arguments.test_a_gate_without_what_it_needs_is_refused_with_the_call_that_makes_it",
        name="hapo_clip",
    ),
    "a method's token weights take the place of the loss's": mutant(
        "prepared.py",
        "gate_weight if token_weight is None else token_weight * gate_weight", "gate_weight",
        "test_gate_inputs.test_the_weight_of_a_method_and_that_of_the_loss_are_multiplied", backend="cpu",
    ),
    "FIPO counts ratios that the dual clip stops": mutant(
        "gates/future_kl.py",
        "torch.where(beyond, 0.0, x)", "x.clone()",
        "test_presets.test_the_weights_of_fipo_are_its_sums", backend="cpu",
    ),
    "a steered rollout that failed stays in its group": mutant(
        "advantages/shaping.py",
        "    if rejected:\n", "    if not rejected:\n",
        "test_schedules.test_icpo_by_hand", backend="cpu",
    ),
    "a trainer makes PPO of a gate that needs inputs": mutant(
        "integrations/needs.py",
        "            gate_inputs is not None or name in selected,\n", "            True,\n",
        "test_gate_arguments.test_a_trainer_that_would_make_ppo_of_a_gate_refuses_it", name="hapo_clip",
    ),
    "a trainer makes PPO of a gate that needs the sampler": mutant(
        "integrations/needs.py",
        "not gate.needs_rollout or not sampler,", "True,",
        "test_gate_arguments.test_a_trainer_that_would_make_ppo_of_a_gate_refuses_it", name="tis",
    ),
    "micro-batches tear groups": mutant(
        "batch/cuts.py",
        'whole = named[-1] if named else "trajectory"', 'whole = "trajectory"',
        "test_micro_batches.test_a_gate_on_groups_has_the_gradient_of_the_whole_batch",
    ),
    "the single call takes every estimator for one of rows": mutant(
        "losses.py",
        'options["advantage_level"] = level\n', 'options["advantage_level"] = "row"\n',
        "test_losses.test_the_single_call_knows_the_level_of_its_estimator", lengths=[2, 2, 0], cu_steps=[0, 1, 2, 4],
    ),
    "as many advantages as tokens are those of tokens": mutant(
        "prepared.py",
        "if not (is_usual and is_constant(advantages, of_rows, dtype, device)):",
        "if advantage_level is None and advantages.shape == shape:\n        per_token = True\n"
        "    elif not (is_usual and is_constant(advantages, of_rows, dtype, device)):",
        "test_losses.test_levels_of_equal_sizes",
    ),
    "a negated view is read as its memory": mutant(
        "checks.py",
        "and not tensor.is_neg()\n            and forward_ad", "and forward_ad",
        "test_losses.test_a_negated_view_has_its_values_and_not_those_in_memory", name="weights",
    ),
    "forgotten groups are one group": mutant(
        "losses.py",
        '"group_ids" not in given or batch.group_ids is not None,', "True,",
        "test_single_call.test_forgotten_groups_are_no_single_group", estimator=hpo.advantages.grpo,
    ),
    "corrections read between steps": mutant(
        "corrections.py",
        "if gate.of_steps:", "if False:",
        "test_corrections.test_what_lies_between_steps_is_masked_for_every_correction", backend="cpu", end=3, mask=None,
    ),
    "corrections of two channels join the loss": mutant(
        "corrections.py",
        "gate.corrections[index].channel is channels[0]", "True",
        "test_corrections.test_corrections_of_two_channels_read_what_is_theirs", backend="cpu",
    ),
    "one correction of rows becomes weights": mutant(
        "specs/gates.py",
        "for each in spec.row_corrections:", "for each in spec.row_corrections[:1]:",
        "test_corrections.test_one_correction_given_three_times_counts_three_times",
        unit=hpo.gates.Unit.TRAJECTORY, backend="reference",
    ),
    "a selection adds tokens to a mask": mutant(
        "entropy/selection.py",
        "token_mask = mask if token_mask is None else token_mask & mask", "token_mask = mask",
        "test_selection.test_slots_and_arguments_combine", backend="cpu",
    ),
    "the definition multiplies by a coefficient that is not finite": mutant(
        "reference/gates.py",
        "torch.where(valid & torch.isfinite(kl_weight), kl_weight, torch.zeros_like(kl_weight))", "kl_weight",
        "test_selection.test_a_coefficient_that_is_not_finite_is_0", gate=hpo.gates.dapo(), backend="reference",
    ),
    "a token without an entropy counts as usual": mutant(
        "entropy/signals.py",
        "torch.where(self.broken, torch.nan, kept)", "kept",
        "test_entropy_properties.test_a_token_without_an_entropy_is_left_out_and_counted",
    ),
    "Archer compares with the whole batch": mutant(
        "entropy/thresholds.py",
        'scope="row", rule=rule', 'scope="call", rule=rule',
        "test_entropy_thresholds.test_archer_of_the_source",
    ),
    "D3S rounds its count down": mutant(
        "entropy/thresholds.py",
        "count * share.numerator + share.denominator - 1,", "count * share.numerator,",
        "test_entropy_thresholds.test_d3s_of_the_source",
    ),
    "the code of ARES looks at the token's own window": mutant(
        "entropy/high_entropy_windows.py",
        "Window.forward_exclusive(width), backend", "Window.forward(width), backend",
        "test_entropy_thresholds.test_ares_of_the_source",
    ),
    "LESS counts the tokens that have a segment": mutant(
        "entropy/low_entropy_segments.py",
        "statistics(right, segment, weights=of_rows, backend=backend)", "statistics(right, segment, backend=backend)",
        "test_low_entropy_segments.test_a_response_that_repeats_a_segment_counts_once",
    ),
    "low entropies are high ones in HAPO's paper, too": mutant(
        "entropy/pivots.py",
        "below = -1.0 if check_compat(compat) else 1.0", "below = -1.0",
        "test_entropy_presets.test_hapo_of_the_source",
    ),
    "HAPO's temperatures fall below the pivot in the code, too": mutant(
        "entropy/pivots.py",
        "h = _relative(given, state, compat).clamp(-1, 1)", 'h = _relative(given, state, "paper").clamp(-1, 1)',
        "test_entropy_sources.test_hapo",
    ),
    "the error of ARES' penalty is not averaged": mutant(
        "entropy/controllers.py",
        "memory * state.error + (1 - memory) * distance", "distance",
        "test_entropy_sources.test_the_penalty_of_ares",
    ),
    "EntroPIC's integral has the error of this step": mutant(
        "entropy/controllers.py",
        "integral_gain * earlier)", "integral_gain * (earlier + error))",
        "test_entropy_thresholds.test_controllers",
    ),
    "a coefficient of TRL shrinks at its target": mutant(
        "entropy/controllers.py",
        "entropy <= target, delta", "entropy < target, delta",
        "test_entropy_sources.test_coefficients",
    ),
    "micro-batches fit for themselves": mutant(
        "entropy/shaping.py",
        "    if state is not None:\n        return state\n", "",
        "test_entropy_presets.test_a_state_is_that_of_the_step",
    ),
    "rows of different ranks share their mean": mutant(
        "entropy/statistics.py",
        "table = ops.group_statistics(known, ids, None, padded(members, (0, count)), backend)[:, values.numel() :]",
        "table = torch.stack(statistics(known, ids, mask=padded(members, (0, count))))[:, values.numel() :]",
        "test_entropy_shaping.test_means_of_rows_stay_on_their_rank",
    ),
    "the first token of a row counts": mutant(
        "logprobs.py",
        "check(not unpredicted.any(),", "check(True,",
        "test_logprobs_calls.test_first_tokens_must_not_count",
    ),
    "results stand where their logits do": mutant(
        "logprobs.py",
        "result.roll(1) if self.is_shifted else result", "result",
        "test_logprobs_calls.test_a_padded_batch", function=hpo.token_logprobs, backend="cpu",
    ),
    "the values of a leaf become its gradient": mutant(
        "logprobs.py",
        "not logits.is_leaf and not (", "True or (",
        "test_logprobs_calls.test_logits_that_no_gradient_may_be_written_over",
        logits_of=lambda x: x.detach().requires_grad_(), keywords={}, message="expected logits that a model has",
    ),
    "two entropies write over the logits of each other": mutant(
        "logprobs.py",
        "check(is_same,", "check(True,",
        "test_logprobs_calls.test_logits_that_no_gradient_may_be_written_over",
        logits_of=lambda x: x, keywords={"entropy_temperature": 1.0}, message="the gradient of an entropy_temperature",
    ),
    "top-p ends before the token that reaches it": mutant(
        "support.py",
        "weights.cumsum(-1) - weights < top_p", "weights.cumsum(-1) < top_p",
        "test_support.test_the_support_is_that_of_a_naive_loop", rows="no two alike", settings={"top_p": 0.9},
    ),
    "an id that is returned twice counts twice": mutant(
        "support.py",
        "ids[..., 1:] != ids[..., :-1], (1, 0)", "ids[..., 1:] >= ids[..., :-1], (1, 0)",
        "test_support.test_log_probabilities_over_given_ids", backend="cpu",
    ),
    "the last chunk of rows has all of the head's gradient": mutant(
        "ops/linear_logprobs.py",
        "sums, adds=at > 0)", "sums, adds=False)",
        "test_linear_logprobs.test_error_against_float64", variant="plain", dtype=torch.float32, backend="cpu",
    ),
    "a softcap has the slope 1": mutant(
        "ops/linear_logprobs.py",
        "square_(), value=-1.0)", "square_(), value=0.0)",
        "test_linear_logprobs.test_error_against_float64", variant="softcap", dtype=torch.float32, backend="cpu",
    ),
    "ignored rows take part in products": mutant(
        "ops/linear_logprobs.py",
        "counting.nonzero()[:, 0] if _is_readable(hidden) else everywhere", "everywhere",
        "test_linear_logprobs.test_ignored_rows_are_not_read", dtype=torch.float32, backend="cpu",
    ),
    "states that are merged at once count the greatest logit among the others": mutant(
        "ops/logprob_states.py",
        "torch.where(is_greatest, others, mass)", "mass",
        "test_merged_states.test_worked_numbers",
    ),
    "states that are merged at once keep the distance to their own greatest logit": mutant(
        "ops/logprob_states.py",
        "mass * (distance + delta)", "mass * distance",
        "test_merged_states.test_worked_numbers",
    ),
    "what the last blocks of a vocabulary add up to is dropped": mutant(
        "ops/linear_logprobs.py",
        "place == together - 1 or columns.stop == len(given.weight)", "place == together - 1",
        "test_merged_states.test_a_row_of_more_blocks_than_are_merged_at_once", readable=True, backend="cpu",
    ),
    "a gradient that another backward needs is multiplied in place": mutant(
        "ops/gates.py",
        " or _keeps_graph()", "",
        "test_scale.test_a_gradient_does_not_change_in_a_later_backward",
        made="logp", dtype=torch.float32, backend="cpu",
    ),
    "the gradient that the operator returns is multiplied in place": mutant(
        "ops/gates.py",
        "return _scaled(ctx, loss_gradient, grad_gradient), *[None]",
        "return _scaled(ctx, loss_gradient, grad_gradient, True), *[None]",
        "test_scale.test_the_gradient_that_the_operator_returns_is_its_callers",
        gate=hpo.gates.ppo_clip(), backend="cpu",
    ),
    "hidden states have the gradient of one shard": mutant(
        "ops/linear_logprobs.py",
        "torch.distributed.all_reduce(whole, group=group)", "pass",
        "test_vocabulary_parallel.test_a_head_that_ranks_share",
        found=Found("compute_a_head"), world=2, backend="cpu",
    ),
    "shards begin as if all were of one size": mutant(
        "vocabulary_parallel.py",
        "Shards(tuple(given), sum(given[:rank]), sum(given))", "Shards(tuple(given), rank * columns, sum(given))",
        "test_vocabulary_parallel.test_a_head_that_ranks_share",
        found=Found("compute_a_head"), world=2, backend="cpu",
    ),
    "a rank's own logits have no gradient": mutant(
        "vocabulary_parallel.py",
        "    parts[torch.distributed.get_rank(group)] = own\n", "",
        "test_vocabulary_parallel.test_the_reference_over_ranks", found=Found("compute_the_reference"), world=2,
    ),
    "a decimal quantile is the double next to it": mutant(
        "entropy/scopes.py",
        "Fraction(str(value))", "Fraction(int(float(value) * 2**30), 2**30)",
        "test_scopes.test_the_index_is_exact_where_floats_fail", backend="cpu",
    ),
    "ties go by the place in the pack": mutant(
        "ops/scopes.py",
        "order = torch.sort(uid, stable=True).indices", "order = torch.arange(uid.numel(), device=uid.device)",
        "test_scopes.test_the_order_of_rows_does_not_matter", backend="cpu",
    ),
    "thresholds of shared scopes are those of the rank": mutant(
        "entropy/ranks.py",
        "torch.distributed.all_reduce(histogram, group=group)", "pass",
        "test_scopes_over_ranks.test_thresholds_are_those_of_one_process",
        ranks=Scoped("tied", "bucket"), kind="tied", name="bucket",
    ),
    "each rank selects all ties that are needed": mutant(
        "entropy/ranks.py",
        "before = before - before[torch.searchsorted(sorted_scope, sorted_scope)]", "before = torch.zeros_like(before)",
        "test_scopes_over_ranks.test_selections_are_those_of_one_process",
        ranks=Scoped("equal", "call"), kind="equal", name="call",
    ),
}  # fmt: skip


def one_case(rank, engine):
    engines = module_of_tests("test_data_parallel").ENGINES
    return {("token_mean", 3): engines[engine](rank, "token_mean", 3)}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_killed(name):
    """The test that kills it passes without it."""
    mutant = MUTANTS[name]
    kill = killer(mutant.killer, mutant.arguments)
    with python(mutant):
        assert_killed(name, mutant.killer, mutant.arguments)
    kill()


def test_what_kills_a_mutant_runs_when_its_file_changes():
    for name, mutant in MUTANTS.items():
        modules, _ = affected([f"hpo_core/{mutant.file}"])
        assert mutant.killer.partition(".")[0].removeprefix("test_") in modules, name
