"""Deliberate bugs in the C++ kernels; test_mutants.py kills them."""

import math

import torch
from hierarchies import GATES as HIERARCHIES
from mutants import Mutant

import hpo_core as hpo
from hpo_core import gates
from hpo_core.advantages import Share

MUTANTS = {
    "cpu: a span begins where the row does": Mutant(
        "cpu", "cpu/segments.cpp",
        "while (begin < end && !args.mask[begin]) ++begin;", "",
        "test_segments.test_spans_of_long_rows_with_few_valid_tokens", {},
    ),
    "cpu: a constant does not come back to the bit from the mean of its sum": Mutant(
        "cpu", "cpu/hierarchy_tokens.h",
        "plan.term.drop ? add_terms(each, n, sums) : add_runs(each, n, sums)", "add_runs(each, n, sums)",
        "test_row_advantages.test_on_policy_a_row_without_one_log_ratio_has_the_gradient_of_any_other", {},
    ),
    "cpu: the penalty of a masked token is paid": Mutant(
        "cpu", "cpu/hierarchy_reference.h",
        "keep_if(present, value)", "value",
        "test_gates.test_a_penalty_beside_the_fast_path_of_levels", {"gate": gates.gspo(0.1, 0.2)},
    ),
    "cpu: a token without a policy term has one under levels": Mutant(
        "cpu", "cpu/hierarchy_weights.h",
        "blend(has_term, weight, all<Floats>(NAN))", "weight",
        "test_hierarchy.test_every_backend_is_the_definition", {"gate": HIERARCHIES["fiberpo"]},
    ),
    "cpu: weights without a meaning are taken for numbers under levels": Mutant(
        "cpu", "cpu/hierarchy_weights.h",
        "!any(exceptions) && finite.finite() && finite_lanes(lanes)", "true",
        "test_hierarchy.test_every_backend_is_the_definition", {"gate": HIERARCHIES["gspo"]},
    ),
    "cpu: tokens that are clipped lose their weights": Mutant(
        "cpu", "cpu/hierarchy_fast_path.h",
        "counts.above_weight * double(above)", "double(counts.above) * double(above)",
        "test_hierarchy.test_what_else_is_asked_for_changes_no_bit", {"gate": gates.fiberpo(), "masked": True},
    ),
    "cpu: the entropy of a masked token counts under levels": Mutant(
        "cpu", "cpu/hierarchy_weights.h",
        "both(present, at_least(all<Floats>(FLT_MAX), size_of(entropy)))",
        "at_least(all<Floats>(FLT_MAX), size_of(entropy))",
        "test_hierarchy.test_every_backend_is_the_definition", {"gate": HIERARCHIES["gspo"]},
    ),
    "cpu: what arrives at a balanced level is not divided by its children": Mutant(
        "cpu", "include/hpo/hierarchy.h",
        "children *= shares_of_segment(hierarchy.levels[k], segment(k), channel);", "",
        "test_hierarchy.test_every_backend_is_the_definition", {"gate": HIERARCHIES["balanced, 2 levels, through"]},
    ),
    "cpu: what arrives at a log mean exp goes to all tokens alike": Mutant(
        "cpu", "cpu/hierarchy_terms.h",
        "return flow * mean_exp_slope(split, x);", "return flow;",
        "test_hierarchy.test_every_backend_is_the_definition", {"gate": HIERARCHIES["mean exp, 1 levels, through"]},
    ),
    "cpu: sums of a correction lose what is far": Mutant(
        "cpu", "include/hpo/corrections.h",
        "from_fixed(fixed) + double(coarse) * double(kCoarse)", "from_fixed(fixed)",
        "test_corrections.test_far_tokens_do_not_cost_near_ones_their_digits", {},
    ),
    "cpu: an upper bound on a difference of probabilities is half as large": Mutant(
        "cpu", "cpu/gates_sure_masks.h",
        "at_least(under, m * (u > zero ? u : -u))", "at_least(under, 0.5f * m * (u > zero ? u : -u))",
        "test_corrections.test_a_mask_of_the_sweep_is_that_of_the_op",
        {"delta": 0.05, "statistic": gates.Statistic.PROBABILITY, "above": -math.inf},
    ),
    "cpu: an upper bound on a binary KL is half as large": Mutant(
        "cpu", "cpu/gates_sure_masks.h",
        "-2.0f * larger * under", "-4.0f * larger * under",
        "test_corrections.test_a_mask_of_the_sweep_is_that_of_the_op",
        {"delta": 0.05, "statistic": gates.Statistic.BINARY_KL, "above": -math.inf},
    ),
    "cpu: a mask is decided around 0 where 0 is not kept": Mutant(
        "cpu", "cpu/gates_sure_masks.h",
        "rule.low[sign] < 0.0f && 0.0f < rule.high[sign]", "true",
        "test_corrections.test_a_mask_of_the_sweep_is_that_of_the_op",
        {"delta": 0.05, "statistic": gates.Statistic.PROBABILITY, "above": 0.5},
    ),
    "cpu: a clip passes everything": Mutant(
        "cpu", "cpu/hierarchy_terms.h",
        "low[sign] == -INFINITY && high[sign] == INFINITY", "true",
        "test_presets.test_every_backend_is_the_papers_formula", {"name": "ce_gppo"},
    ),
    "cpu: tokens outside all steps lose their weight": Mutant(
        "cpu", "cpu/corrections.cpp",
        "args.token_weight ? args.token_weight[t] : 1.0f", "1.0f",
        "test_corrections.test_tokens_outside_all_leaves_get_their_weight_whatever_it_is", {},
    ),
    "cpu: a row's factor reaches into the row before": Mutant(
        "cpu", "cpu/gates_weights.h",
        "store_own<kWhole>(own, local.token_weight ? weight * load(local.token_weight) : weight, weights + i)",
        "store_lanes(local.token_weight ? weight * load(local.token_weight) : weight, weights + i)",
        "test_corrections.test_corrections_in_the_loss_are_those_of_the_op",
        {"gate": "ppo_clip", "joined": "sum"},
    ),
    "cpu: a token without a statistic has the factor of its row": Mutant(
        "cpu", "cpu/corrections.cpp",
        "reduced.valid == tokens", "true",
        "test_corrections.test_corrections_in_the_loss_are_those_of_the_op",
        {"gate": "fiberpo", "joined": "mean"},
    ),
    "cpu: the factor of a token takes the place of its row's": Mutant(
        "cpu", "cpu/gates_weights.h",
        "weight *= local.factor(own, negative, load(local.first), load(local.second));",
        "weight = local.factor(own, negative, load(local.first), load(local.second));",
        "test_corrections.test_corrections_in_the_loss_are_those_of_the_op",
        {"gate": "ppo_clip", "joined": "of tokens and rows"},
    ),
    "cpu: the largest log-ratio of a row does not saturate": Mutant(
        "cpu", "cpu/corrections.cpp",
        "saturated(reduced.largest)", "reduced.largest",
        "test_corrections.test_statistics_reach_as_far_as_they_say", {"statistic": hpo.specs.Statistic.LOG_RATIO},
    ),
    "cpu: where its lowest token passes a mask, a whole row does": Mutant(
        "cpu", "cpu/corrections.cpp",
        "factor_of(own, sign, reduced.largest) == 1.0f", "true",
        "test_corrections.test_corrections_in_the_loss_are_those_of_the_op",
        {"gate": "sapo", "joined": "of tokens and two of rows"},
    ),
    "cpu: an infinite log-ratio has a truncated weight": Mutant(
        "cpu", "cpu/gates_weights.h",
        "return exp(exponent) + zero_or_nan;", "return exp(exponent);",
        "test_corrections.test_an_infinite_log_probability_of_the_sampler_takes_its_token_out", {},
    ),
    "cpu: an infinite log-ratio saturates in a segment": Mutant(
        "cpu", "cpu/corrections.cpp",
        "is_nan(v - v)", "is_nan(v)",
        "test_corrections.test_an_infinite_log_probability_of_the_sampler_takes_its_token_out", {},
    ),
    "cpu: the second correction of a row takes the place of the first": Mutant(
        "cpu", "cpu/corrections.cpp",
        "factor.by_sign[sign] *= factor_of(each->rule, sign, v);",
        "factor.by_sign[sign] = factor_of(each->rule, sign, v);",
        "test_corrections.test_corrections_in_the_loss_are_those_of_the_op",
        {"gate": "gspo", "joined": "two of one statistic"},
    ),
    "cpu: corrections of two statistics share the first": Mutant(
        "cpu", "cpu/corrections.cpp",
        "end->rule.statistic == begin->rule.statistic", "true",
        "test_corrections.test_corrections_in_the_loss_are_those_of_the_op",
        {"gate": "fiberpo", "joined": "two statistics"},
    ),
    "cpu: a row in two chunks is reduced in neither": Mutant(
        "cpu", "cpu/corrections.cpp",
        "return !is_in_chunk(rows, row);", "return is_in_chunk(rows, row);",
        "test_corrections.test_corrections_in_the_loss_are_those_of_the_op",
        {"gate": "sapo", "joined": "mean"},
    ),
    "cpu: the loss of a score head does not saturate": Mutant(
        "cpu", "cpu/hierarchy_tokens.h",
        "scored(value * logp)", "value * logp",
        "test_overflow.test_the_largest_products", {"name": "hierarchy: score"},
    ),
    "cpu: window crosses the border": Mutant(
        "cpu", "cpu/entropy.cpp",
        "args.cu_seqlens[row + 1] - rule.last", "args.cu_seqlens[row + 1]",
        "test_entropy.test_every_window", {"boundary": "full", "invalid": "skip", "first": 0, "last": 3},
    ),
    "cpu: off by one at the head of a row": Mutant(
        "cpu", "cpu/entropy.cpp",
        "smaller(t + rule.last + 1, row_end)", "smaller(t + rule.last, row_end)",
        "test_entropy.test_every_window", {"boundary": "shrink", "invalid": "skip", "first": -3, "last": 0},
    ),
    "cpu: a maximum does not see the rest of its window": Mutant(
        "cpu", "cpu/entropy.cpp",
        "fold(part[j], further[j + distance])", "part[j]",
        "test_window_aggregates.test_extremes_of_windows_that_overlap", {},
    ),
    "cpu: a row carries the value of a masked token": Mutant(
        "cpu", "cpu/entropy.cpp",
        "!is_valid(t) || !is_finite(args.values[t])", "!is_finite(args.values[t])",
        "test_window_aggregates.test_carried_by_hand", {},
    ),
    "cpu: the quantile of a scope rounds down": Mutant(
        "cpu", "cpu/scopes.cpp",
        "order_index(args.numerator, args.denominator, args.rule, population)",
        "order_index(args.numerator, args.denominator, OrderRule::floor, population)",
        "test_scopes.test_the_index_is_exact_where_floats_fail", {},
    ),
    "cpu: masked tokens are in the population of a scope": Mutant(
        "cpu", "cpu/scopes.cpp",
        "finite_range.holds(key) & valid", "finite_range.holds(key)",
        "test_scopes.test_masked_values_are_never_read", {"poison": 99.0},
    ),
    "cpu: masked values of a scope are selected": Mutant(
        "cpu", "cpu/scopes.cpp",
        "mask ? mask[i] != 0 : 1", "1",
        "test_scopes.test_masked_values_are_never_read", {"poison": 99.0},
    ),
    "cpu: a bracket of a scope that missed is not noticed": Mutant(
        "cpu", "cpu/scopes.cpp",
        "index < all.below || index >= all.below + all.kept", "index < all.below",
        "test_entropy_selection.test_a_sample_of_a_scope_that_misleads", {"planted": -1.0},
    ),
    "cpu: the keys below the bracket of a scope are forgotten": Mutant(
        "cpu", "cpu/scopes.cpp",
        "index - all.below", "index",
        "test_scopes.test_long_segments", {"kind": "distinct"},
    ),
    "cpu: keys of later parts of a scope are not searched": Mutant(
        "cpu", "cpu/scopes.cpp",
        "searches[p] = {keys, keys, parts[p].kept};", "searches[p] = {keys, keys, p == 0 ? parts[p].kept : 0};",
        "test_scopes.test_top_k_is_that_of_a_loop", {},
    ),
    "cpu: every part of a scope selects its own ties": Mutant(
        "cpu", "cpu/scopes.cpp",
        "needed -= here;", "",
        "test_scopes.test_long_segments", {"kind": "equal"},
    ),
    "cpu: a masked token is in a covariance": Mutant(
        "cpu", "cpu/covariance.cpp",
        "valid ? present_own<kWhole>(own, valid + i) : own", "own",
        "test_covariance.test_terms_are_those_of_a_loop", {"rows": 7, "masked": True},
    ),
    "cpu: tokens before the first row have its advantage": Mutant(
        "cpu", "cpu/covariance.cpp",
        "i < segment.begin", "false",
        "test_covariance.test_terms_are_those_of_a_loop", {"rows": 7, "masked": False},
    ),
    "cpu: the sums of the last chunk are those of a covariance": Mutant(
        "cpu", "cpu/covariance.cpp",
        "sums = {sums.members + own.members, sums.logp + own.logp, sums.advantages + own.advantages};", "sums = own;",
        "test_covariance.test_terms_are_those_of_a_loop", {"rows": None, "masked": True},
    ),
    "cpu: a place has the number of its tile": Mutant(
        "cpu", "cpu/covariance.cpp",
        "place + uint32_t(i)", "uint32_t(i)",
        "test_covariance.test_draws_are_of_tokens_in_the_bands", {"rows": None},
    ),
    "cpu: masked entropies are averaged": Mutant(
        "cpu", "cpu/entropy.cpp",
        "args.mask[start + j] ? -1 : 0", "-1",
        "test_entropy.test_boundary_and_invalid_policies_by_hand", {},
    ),
    "cpu: masked entropies are in the population": Mutant(
        "cpu", "cpu/entropy_scores.h",
        "masked |= mask_[t] == 0;", "masked |= false;",
        "test_entropy_selection.test_garbage_under_the_mask_is_never_read", {"bad": 99.0},
    ),
    "cpu: infinite entropies are selected": Mutant(
        "cpu", "cpu/entropy_selection.cpp",
        "compare_with(scores.values + first, n, threshold, selected) || scores.given",
        "compare_with(scores.values + first, n, threshold, selected) || true",
        "test_entropy_selection.test_many_tokens", {"masked": "none"},
    ),
    "cpu: a bracket that missed goes unnoticed": Mutant(
        "cpu", "cpu/entropy_selection.cpp",
        "index < below || index >= below + kept", "false",
        "test_select_top.test_bracket_that_misses", {"planted": 0.5},
    ),
    "cpu: what was marked before the threshold was known stays": Mutant(
        "cpu", "cpu/entropy_selection.cpp",
        "if (least == range.low) return;", "return;",
        "test_select_top.test_ties", {"levels": 200},
    ),
    "cpu: marks beyond the room for them are taken for all": Mutant(
        "cpu", "cpu/entropy_selection.cpp",
        "return !full;", "return true;",
        "test_select_top.test_all_equal", {"value": 0.25},
    ),
    "cpu: infinite scores are selected where no threshold is": Mutant(
        "cpu", "cpu/entropy_selection.cpp",
        "marked &= population > 0;", "",
        "test_select_top.test_all_equal", {"value": math.inf},
    ),
    "cpu: the greatest logit is summed": Mutant(
        "cpu", "cpu/logprobs.cpp",
        "lane = -kInfinity;", "",
        "test_logprobs.test_a_confident_token_keeps_its_gradient_and_its_entropy", {"margin": 20.0, "offset": 40.0},
    ),
    "cpu: 1 - p of a confident target": Mutant(
        "cpu", "include/hpo/logprobs.h",
        "delta == 0.0 ? others * p : 1.0 - own", "double(float(1.0 - own))",
        "test_logprobs.test_a_confident_token_keeps_its_gradient_and_its_entropy", {"margin": 80.0, "offset": 0.0},
    ),
    "cpu: a block that is read again counts twice": Mutant(
        "cpu", "cpu/logprobs.cpp",
        "kept_ = before;", "",
        "test_logprobs.test_error_against_float64", {"name": "ascending", "temperature": 1.0, "dtype": torch.float32},
    ),
    "cpu: an ignored row is read": Mutant(
        "cpu", "include/hpo/logprobs.h",
        "args.targets[row] == args.ignore_index", "false",
        "test_logprobs.test_an_ignored_row_is_not_read_and_gives_0", {"dtype": torch.float32},
    ),
    "cpu: rows of logits lie one after the other": Mutant(
        "cpu", "include/hpo/logprobs.h",
        "row % args.inner * args.inner_stride", "row % args.inner * args.columns",
        "test_logprobs_layouts.test_layouts", {"layout": "slice of the vocabulary", "dtype": torch.bfloat16},
    ),
    "cpu: poison of a row that is masked throughout changes the order of sums": Mutant(
        "cpu", "cpu/gates_tile.h",
        "if (all_finite) return true;", "return all_finite;",
        "test_promises.test_rows_without_tokens_are_never_read", {"name": "preset: spo"},
    ),
    "cpu: plain tiles ignore the mask": Mutant(
        "cpu", "cpu/gates_fast_path.h",
        "kind = keep_if(present_own<kWhole>(own, mask + i), kind);", "",
        "test_gates.test_loss_and_gradient_and_nothing_per_token", {"gate": gates.dapo(), "masked": "some"},
    ),
    "cpu: past the caches a vector goes where its tile begins": Mutant(
        "cpu", "cpu/gates_fast_path.h",
        "store_past_caches(gradient, to + i)", "store_past_caches(gradient, to)",
        "test_gates.test_a_gradient_larger_than_the_caches_has_the_bits_of_any_other", {"gate": gates.dapo()},
    ),
    "cpu: plain tiles of few rows ignore the mask": Mutant(
        "cpu", "cpu/gates_fast_path.h",
        "kMasked ? present_own<kWhole>(own, mask + i) : own", "own",
        "test_gates.test_tiles_of_few_rows_have_the_gradient_of_any_other", {"gate": gates.dapo(), "masked": True},
    ),
    "cpu: the end of a row in an open tile runs on": Mutant(
        "cpu", "cpu/hierarchy_fast_path.h",
        "kMasked ? present_own<kWhole>(own, mask + i) : own", "all_lanes()",
        "test_hierarchy.test_what_else_is_asked_for_changes_no_bit", {"gate": gates.fiberpo(), "masked": True},
    ),
    "cpu: a lower bound counts as an upper one": Mutant(
        "cpu", "cpu/gates_tokens.h",
        "!kHigh ? outside : (kLow ? present - not_below_count.total() : 0)",
        "!kHigh ? 0 : (kLow ? present - not_below_count.total() : 0)",
        "test_gates.test_tiles_of_few_rows_have_the_gradient_of_any_other", {"gate": gates.dapo(), "masked": True},
    ),
    "cpu: a row writes to tokens of the one before": Mutant(
        "cpu", "cpu/lanes.h",
        "store_where(own, vector, to);", "store_lanes(vector, to);",
        "test_gates.test_tiles_of_few_rows_have_the_gradient_of_any_other", {"gate": gates.dapo(), "masked": False},
    ),
    "cpu: a row that is clipped loses nothing": Mutant(
        "cpu", "cpu/gates_tokens.h",
        "loss[0] += gate.count(count, sign ? kNegative : kPositive, counts);",
        "gate.count(count, sign ? kNegative : kPositive, counts);",
        "test_gates.test_tiles_of_few_rows_have_the_gradient_of_any_other", {"gate": gates.dapo(), "masked": False},
    ),
    "cpu: tokens of no row are left as they were": Mutant(
        "cpu", "cpu/rows.h",
        "return covered == n;", "return true;",
        "test_gates.test_tiles_of_few_rows_have_the_gradient_of_any_other", {"gate": gates.dapo(), "masked": False},
    ),
    "cpu: a row without valid tokens is counted": Mutant(
        "cpu", "cpu/gates_fast_path.h",
        "of_row[index] > 0", "true",
        "test_gates.test_tiles_of_few_rows_have_the_gradient_of_any_other", {"gate": gates.dapo(), "masked": True},
    ),
    "cpu: what a sum near 0 lost stays lost": Mutant(
        "cpu", "cpu/gates_fast_path.h",
        "return rest + int64_t(lost) * (int64_t(1) << 32);", "return rest;",
        "test_gates.test_log_ratios_near_0_have_the_bits_of_any_other", {"gate": gates.fiberpo()},
    ),
    "cpu: the exponential near 0 is used too far from it": Mutant(
        "cpu", "cpu/gates_fast_path.h",
        "sums.within(kNear)", "sums.within(0.45f)",
        "test_gates.test_log_ratios_near_0_have_the_bits_of_any_other", {"gate": gates.dapo()},
    ),
    "cpu: a falling token meets the mean of those that rise": Mutant(
        "cpu", "cpu/hierarchy_fast_path.h",
        "kSplit ? all<Floats>(-levels.mean[1]) : rising_mean", "rising_mean",
        "test_hierarchy.test_what_else_is_asked_for_changes_no_bit", {"gate": gates.fiberpo(), "masked": True},
    ),
    "cpu: tokens under levels are gated as those of the first sign": Mutant(
        "cpu", "cpu/hierarchy_terms.h",
        "Ints(advantage < 0.0f)", "Ints{}",
        "test_gate_paths.test_the_fast_path_has_the_gradient_of_any_other_way",
        {"gate": gates.vespo(), "lengths": (700, 348, 1000, 345, 7)},
    ),
    "cpu: tokens that are clipped under open levels are counted as those of the first sign": Mutant(
        "cpu", "cpu/hierarchy_fast_path.h",
        "kind = advantage < 0.0f ? Ints{} + kNegative : kind;", "",
        "test_row_advantages.test_tokens_clipped_under_levels_are_counted_by_sign", {},
    ),
    "cpu: a clip before all levels takes tokens for those of the first sign": Mutant(
        "cpu", "cpu/gates_fast_path.h",
        "signs.at<Vector::whole>(vector.i, vector.own)", "Ints{}",
        "test_gate_paths.test_the_fast_path_has_the_gradient_of_any_other_way",
        {"gate": gates.gmpo(0.2, 0.2), "lengths": (700, 348, 1000, 345, 7)},
    ),
    "cpu: nobody looks at the advantages of tokens under levels": Mutant(
        "cpu", "cpu/hierarchy_blocks.h",
        "!has_finite_advantages(args, row, first, begin, end)", "false",
        "test_gate_paths.test_an_advantage_of_a_token_that_is_not_finite_is_counted_once_under_levels",
        {"gate": gates.gspo(0.02, 0.02), "value": math.inf},
    ),
    "cpu: a long leaf is overlooked among shares of rows": Mutant(
        "cpu", "cpu/hierarchy_leaves.h",
        "longest = std::max(longest, share.longest)", "longest = shares[0].longest",
        "test_hierarchy.test_a_long_leaf_behind_thousands_of_short_ones", {"name": "gspo"},
    ),
    "cpu: the gates of short leaves are those of the first": Mutant(
        "cpu", "cpu/hierarchy_settle.h",
        "sweeps.token_alike(blocks[i], leaves[i].gate)", "sweeps.token_alike(blocks[i], leaves[0].gate)",
        "test_hierarchy.test_a_short_leaf_has_the_bits_that_it_has_alone", {"name": "gspo", "masked": False},
    ),
    "cpu: leaves that are settled later have the masks of those measured last": Mutant(
        "cpu", "cpu/hierarchy_settle.h",
        "plan.fills ? of_waiting : scratch.masked", "scratch.masked",
        "test_hierarchy.test_a_short_leaf_has_the_bits_that_it_has_alone", {"name": "gspo", "masked": True},
    ),
    "cpu: leaves measured together have the masks of those before": Mutant(
        "cpu", "cpu/hierarchy_blocks.h",
        "std::fill_n(scratch.masked, 2, masked);", "",
        "test_hierarchy.test_a_short_leaf_has_the_bits_that_it_has_alone", {"name": "gspo", "masked": True},
    ),
    "cpu: short rows with advantages of tokens and of rows are taken for one kind": Mutant(
        "cpu", "cpu/hierarchy_settle.h",
        "&sweeps != &sweeps_of.at(blocks[0].row)", "false",
        "test_row_advantages.test_short_rows_of_one_and_of_several_advantages", {},
    ),
    "cpu: levels that saturate are taken for open": Mutant(
        "cpu", "cpu/hierarchy_fast_path.h",
        "if (leaf.bent[sign] || !passes(0)) return;", "",
        "test_hierarchy.test_what_else_is_asked_for_changes_no_bit",
        {"gate": gates.fiberpo(0.2, (0.05, 0.2)), "masked": True},
    ),
    "cpu: what is clipped from above is lost twice": Mutant(
        "cpu", "cpu/hierarchy_fast_path.h",
        "not_above - sum_lanes(inside_sum)", "present - sum_lanes(inside_sum)",
        "test_hierarchy.test_what_else_is_asked_for_changes_no_bit", {"gate": gates.fiberpo(), "masked": True},
    ),
    "cpu: falling tokens receive what rising ones do": Mutant(
        "cpu", "cpu/hierarchy_fast_path.h",
        "blend(falls, fall, rise)", "rise",
        "test_hierarchy.test_what_else_is_asked_for_changes_no_bit", {"gate": gates.fiberpo(), "masked": False},
    ),
    "cpu: a stretch goes on in tiles that are masked otherwise": Mutant(
        "cpu", "cpu/hierarchy_leaves.h",
        "next * kTile < end && masked[next] == kind", "next * kTile < end",
        "test_hierarchy.test_stretches_of_a_long_leaf_are_masked_alike", {"gate": gates.fiberpo(), "several": False},
    ),
    "cpu: flows of two tiles reach tokens of the row before": Mutant(
        "cpu", "cpu/hierarchy_blocks.h",
        "add_to_fast(plan.term, calls.of(masked).args, at, block.row, begin, n, aggregate_grad)",
        "add_to_fast(plan.term, calls.of(masked).args, at, block.row, 0, n, aggregate_grad)",
        "test_hierarchy.test_what_else_is_asked_for_changes_no_bit", {"gate": gates.fiberpo(), "masked": False},
    ),
    "cpu: the coefficient of a token's ratio has its weight, that of its penalty has not": Mutant(
        "cpu", "cpu/gates_token_inputs.h",
        "own_inputs.coefficient *= own, own_inputs.kept *= own;", "own_inputs.coefficient *= own;",
        "test_gate_paths.test_the_fast_path_has_the_gradient_of_any_other_way",
        {"gate": gates.kimi(), "lengths": (700, 348, 1000, 345, 7)},
    ),
    "cpu: tokens with inputs of their own are taken for those of the first sign": Mutant(
        "cpu", "cpu/gates_token_inputs.h",
        "advantage < 0.0f ? Ints{} + kNegative : Ints{} + kPositive", "Ints{} + kPositive",
        "test_gate_paths.test_the_fast_path_has_the_gradient_of_any_other_way",
        {"gate": gates.dapo(), "lengths": (700, 348, 1000, 345, 7)},
    ),
    "cpu: masked tokens pay for their distance from the reference policy": Mutant(
        "cpu", "cpu/gates_token_inputs.h",
        "gradient = keep_if(present, gradient + of_reference.grad);", "gradient += of_reference.grad;",
        "test_gate_paths.test_the_fast_path_has_the_gradient_of_any_other_way",
        {"gate": gates.dapo(), "lengths": (21,) * 114 + (6,)},
    ),
    "cpu: the coefficient of a penalty counts on the fast path alone": Mutant(
        "cpu", "cpu/gates_penalty.h",
        "penalty_share<Floats>(load(weight), factor)", "load(weight)",
        "test_gate_paths.test_the_fast_path_has_the_gradient_of_any_other_way",
        {"gate": gates.dapo(), "lengths": (700, 348, 1000, 345, 7)},
    ),
    "cpu: a penalty whose coefficient is not finite is infinite": Mutant(
        "cpu", "include/hpo/gates.h",
        "(kl_weight != F{}) & (kl_weight - kl_weight == F{})", "kl_weight == kl_weight || true",
        "test_selection.test_a_coefficient_that_is_not_finite_is_0", {"gate": gates.dapo()},
    ),
    "cpu: a weight that is infinite stays on the fast path": Mutant(
        "cpu", "cpu/gates_token_inputs.h",
        "coefficients.finite()", "true",
        "test_gate_paths.test_what_is_extraordinary_leaves_the_fast_path", {"name": "token_weight", "value": math.inf},
    ),
    "cpu: an infinite weight stays on the fast path of weights alone": Mutant(
        "cpu", "cpu/gates_tokens.h",
        "coefficients.finite()", "true",
        "test_gate_paths.test_an_extraordinary_weight_leaves_the_fast_path_of_weights_alone",
        {"value": math.inf, "gate": gates.cispo()},
    ),
    "cpu: the sum of weighted losses is infinite": Mutant(
        "cpu", "cpu/gates_tokens.h",
        "finite_lanes(loss)", "true",
        "test_gate_paths.test_an_extraordinary_weight_leaves_the_fast_path_of_weights_alone",
        {"value": 3.2e38, "gate": gates.dapo()},
    ),
    "cpu: a truncated weight is as small as its exponent": Mutant(
        "cpu", "cpu/gates_weights.h",
        "exponent_of(0, -INFINITY)", "-60.0f",
        "test_corrections.test_corrections_in_the_loss_are_those_of_the_op",
        {"gate": "ppo_clip", "joined": "of tokens and rows"},
    ),
    "cpu: an advantage that is infinite stays on the fast path": Mutant(
        "cpu", "cpu/gates_token_inputs.h",
        "kOptional != OptionalInputs::anything && kOptional != OptionalInputs::weights",
        "kOptional == OptionalInputs::reference",
        "test_gate_paths.test_what_is_extraordinary_of_a_row_leaves_the_fast_path",
        {"name": "advantages", "value": math.inf, "gate": gates.kimi(), "lengths": (700, 348, 1000, 345, 7)},
    ),
    "cpu: nobody looks at the targets of rows": Mutant(
        "cpu", "cpu/gates_token_inputs.h",
        "return gate.defined(own_inputs);", "return all_lanes();",
        "test_gate_paths.test_what_is_extraordinary_of_a_row_leaves_the_fast_path",
        {"name": "target", "value": 1.5, "gate": gates.nft(), "lengths": (700, 348, 1000, 345, 7)},
    ),
    "cpu: a policy far from its reference stays on the fast path": Mutant(
        "cpu", "cpu/gates_token_inputs.h",
        "at_least(all<Floats>(kMostSquares), each)", "all_lanes()",
        "test_gate_paths.test_what_is_extraordinary_leaves_the_fast_path", {"name": "ref_logp", "value": -65.0},
    ),
    "cpu: tokens that a clip holds before all gates have a gradient": Mutant(
        "cpu", "cpu/hierarchy_fast_path.h",
        "both(present, both(at_least(x, low), at_least(high, x)))", "present",
        "test_gate_paths.test_the_fast_path_has_the_gradient_of_any_other_way",
        {"gate": gates.gmpo(0.2, 0.2), "lengths": (21,) * 114 + (6,)},
    ),
    "cpu: what a clip takes before all gates is added up": Mutant(
        "cpu", "cpu/gates_fast_path.h",
        "keep_if(vector.present, clamp(x, low, high))", "x",
        "test_gate_paths.test_the_fast_path_has_the_gradient_of_any_other_way",
        {"gate": gates.gmpo(0.2, 0.2), "lengths": (700, 348, 1000, 345, 7)},
    ),
    "cpu: leave-one-out is the plain mean": Mutant(
        "cpu", "include/hpo/advantages.h",
        "others > 0.0 ? map.weight / others : 1.0", "1.0",
        "test_advantages.test_p7_reductions", {},
    ),
    "cpu: shares are not divided by their sum": Mutant(
        "cpu", "include/hpo/advantages.h",
        "total / (shares + args.share_eps)", "total",
        "test_group_terms.test_many_units", {"units": 700, "share": Share.COUNT},
    ),
    "cpu: a mean below 0 scales by what eps makes of it": Mutant(
        "cpu", "include/hpo/advantages.h",
        "!by_mean || mean > 0.0", "true",
        "test_estimators_of_authors.test_maxrl_of_a_mean_that_is_not_above_0_is_0", {"options": {"root": True}},
    ),
    "cpu: every row is taken for one whose tokens have one advantage": Mutant(
        "cpu", "cpu/row_advantages.h",
        "return any(present_lanes(differing));", "return false;",
        "test_row_advantages.test_one_advantage_in_each_row_is_that_of_the_row", {"gate": gates.fiberpo()},
    ),
    "cpu: a row without tokens counts among rows": Mutant(
        "cpu", "include/hpo/segments.h",
        "int64_t(count > 0)", "int64_t(count >= 0)",
        "test_segments.test_weights_of_rows_in_many_blocks", {},
    ),
    "cpu: a row's scan goes on into the row before": Mutant(
        "cpu", "cpu/segments.cpp",
        "following = args.values[unit] + args.gains[unit] * following;",
        "static double kept = 0.0; following = kept = args.values[unit] + args.gains[unit] * kept;",
        "test_segments.test_the_scan_of_a_row_does_not_depend_on_its_position", {},
    ),
    "cpu: the weight of a row without tokens takes its neighbours off the fast path": Mutant(
        "cpu", "cpu/hierarchy_reference.h",
        "!small && masked_tokens(call.args.mask, first + begin, end - begin) != Masked::all", "!small",
        "test_gate_paths.test_the_weight_of_a_row_without_tokens_chooses_no_way",
        {"gate": gates.fiberpo(), "value": math.inf},
    ),
}  # fmt: skip
