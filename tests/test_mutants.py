"""Deliberate bugs in every backend, each killed by a named test. A test that cannot fail proves nothing."""

import functools
import importlib
import math
import sys

import pytest
import torch
from changed import affected
from hierarchies import GATES as HIERARCHIES
from mutants import Mutant, Mutated, assert_killed, killer, triton

import hpo_core as hpo
from hpo_core import gates
from hpo_core.advantages import Share
from hpo_core.specs import OrderRule

backends = sys.modules["hpo_core.backends"]

WINDOW_BORDER = "test_entropy.test_no_window_crosses_a_border"
MUTANTS = {
    "cuda: window crosses the border": Mutant(
        "cuda_emulated", "cuda/windows.cuh",
        "min(token + windows.last, range.end - 1)", "token + windows.last",
        WINDOW_BORDER, {},
    ),
    "cuda: missing barrier between two doublings": Mutant(
        "cuda_emulated", "cuda/entropy.cu",
        "from = to;\n    __syncthreads();", "from = to;",
        "test_entropy.test_constant_is_its_own_mean", {"width": 8},
    ),
    "cuda: a window that sticks out of its row is defined": Mutant(
        "cuda_emulated", "include/hpo/entropy.h",
        "whole | (rule.boundary != Boundary::full)", "true",
        "test_window_aggregates.test_carried_by_hand", {},
    ),
    "cuda: a row carries the value of a masked token": Mutant(
        "cuda_emulated", "cuda/entropy.cu",
        "!windows.usable(token)", "false",
        "test_window_aggregates.test_carried_by_hand", {},
    ),
    "cuda: ties of an exact selection are dropped": Mutant(
        "cuda_emulated", "cuda/scopes.cu",
        "ties.before < needed", "false",
        "test_scopes.test_long_segments", {"kind": "equal"},
    ),
    "cuda: ties of a short scope are all selected": Mutant(
        "cuda_emulated", "cuda/scopes.cu",
        "needed -= __popc(ties);", "",
        "test_scopes.test_short_scopes_beside_long_ones", {"kind": "ties"},
    ),
    "cuda: a short scope forgets how many keys have the lesser bit": Mutant(
        "cuda_emulated", "cuda/scopes.cu",
        "index -= zeros, least |= 1u << bit", "least |= 1u << bit",
        "test_scopes.test_quantiles_are_those_of_a_loop", {"rule": OrderRule.NEAREST},
    ),
    "cuda: a scope of a few tokens too many counts as short": Mutant(
        "cuda_emulated", "cuda/scopes.cu",
        "range.end - range.begin <= kShort", "range.end - range.begin <= 2 * kShort",
        "test_scopes.test_short_scopes_beside_long_ones", {"kind": "distinct"},
    ),
    "cuda: missing barrier before the ties of a block's warps are added up": Mutant(
        "cuda_emulated", "cuda/scopes.cu",
        "if (lane() == 0) of_warp[warp_in_block()] = __popc(flags);\n  __syncthreads();",
        "if (lane() == 0) of_warp[warp_in_block()] = __popc(flags);",
        "test_scopes.test_long_segments", {"kind": "equal"},
    ),
    "cuda: blocks that share a scope do not know of the ties of others": Mutant(
        "cuda_emulated", "cuda/scopes.cu",
        "needed = max(needed - before, int64_t(0));", "",
        "test_scopes.test_long_segments", {"kind": "equal"},
    ),
    "cuda: quantile rounds down": Mutant(
        "cuda_emulated", "cuda/entropy_selection.cu",
        "order_index(args.numerator, args.denominator, args.rule, population)",
        "order_index(args.numerator, args.denominator, OrderRule::floor, population)",
        "test_entropy_selection.test_index_is_exact_where_floats_fail", {},
    ),
    "cuda: masked entropies are selected": Mutant(
        "cuda_emulated", "cuda/windows.cuh",
        "window.exists && (!args.mask || args.mask[token])", "window.exists",
        "test_entropy_selection.test_garbage_under_the_mask_is_never_read", {"bad": 99.0},
    ),
    "cuda: missing barrier before warps are added up": Mutant(
        "cuda_emulated", "cuda/grid.cuh",
        "if (lane() % kLanes == 0) of_warp[lane() / kLanes][warp_in_block()] = sum;\n  __syncthreads();",
        "if (lane() % kLanes == 0) of_warp[lane() / kLanes][warp_in_block()] = sum;",
        "test_advantages.test_many_units", {"units": 1000},
    ),
    "cuda: biased standard deviation": Mutant(
        "cuda_emulated", "include/hpo/advantages.h",
        "squares / (group.weight - ddof)", "squares / group.weight",
        "test_advantages.test_p3_second_moment", {"ddof": 1},
    ),
    "cuda: a ratio at its bound is clipped": Mutant(
        "cuda_emulated", "cuda/gates_ratio.cuh",
        "clipped == ratio && !drop", "clipped == ratio && !drop && ratio < high",
        "test_gates.test_ratio_exactly_at_its_bound_passes_the_gradient", {},
    ),
    "cuda: masked tokens are read": Mutant(
        "cuda_emulated", "cuda/gates_tokens.cuh",
        "inputs.vector.has(i) && (!args.mask || byte_of(inputs.mask, i))", "inputs.vector.has(i)",
        "test_promises.test_masked_is_never_read", {"name": "preset: ppo_clip"},
    ),
    "cuda: a span ends with the first lane that has a valid token": Mutant(
        "cuda_emulated", "cuda/segments.cu",
        "31 - __clz(int(found))", "__ffs(int(found)) - 1",
        "test_segments.test_spans_of_long_rows_with_few_valid_tokens", {},
    ),
    "cuda: a span begins at the end of four tokens": Mutant(
        "cuda_emulated", "cuda/segments.cu",
        "(__ffs(int(four[i])) - 1) / 8", "3",
        "test_segments.test_spans_of_long_rows_with_few_valid_tokens", {},
    ),
    "cpu: a span begins where the row does": Mutant(
        "cpu", "cpu/segments.cpp",
        "while (begin < end && !args.mask[begin]) ++begin;", "",
        "test_segments.test_spans_of_long_rows_with_few_valid_tokens", {},
    ),
    "triton: a span ends with its first tile": Mutant(
        "triton", "segments.py",
        "tile = range_.end - MASKED_TOKENS\n",
        "tile = range_.begin + (begin - range_.begin) // MASKED_TOKENS * MASKED_TOKENS\n",
        "test_segments.test_spans_of_long_rows_with_few_valid_tokens", {},
    ),
    "cuda: rows that overlap count as sound ones": Mutant(
        "cuda_emulated", "cuda/gates.cu",
        "args.metrics[kBadOffsets] > 0.0", "false",
        "test_gates.test_of_rows_that_overlap_the_last_one_owns_a_token", {"offsets": [0, 900, 300, 1900]},
    ),
    "cuda: a token belongs to each row that claims it": Mutant(
        "cuda_emulated", "cuda/gates.cu",
        "BROKEN && is_shared(gate.pack(), unit)", "false",
        "test_gates.test_of_rows_that_overlap_the_last_one_owns_a_token", {"offsets": [0, 900, 300, 1900]},
    ),
    "cuda: a row counts by its first tile": Mutant(
        "cuda_emulated", "cuda/gates.cu",
        "!met && !BROKEN", "false",
        "test_gates.test_a_row_counts_wherever_its_valid_token_is", {"at": 513, "nan": False},
    ),
    "cuda: a ticket is not 0 again": Mutant(
        "cuda_emulated", "cuda/warp.cuh",
        "atomicInc(ticket, gridDim.x - 1)", "atomicAdd(ticket, 1u)",
        "test_gates.test_streams_count_their_blocks_apart", {},
    ),
    "cuda: gradients of tiles are added by place in memory": Mutant(
        "cuda_emulated", "cuda/hierarchy_sweep.cuh",
        "stage_at(kind, column, __ffs(int(lanes)) - 1)",
        "stage_at(kind, (column + __ffs(int(lanes)) / 8) % 4, __ffs(int(lanes)) - 1)",
        "test_promises.test_a_trajectory_does_not_know_where_it_lies", {"name": "bent"},
    ),
    "cuda: a vector with a masked token is sound": Mutant(
        "cuda_emulated", "cuda/gates_tokens.cuh",
        "(!args.mask | all_bytes(inputs.mask))", "true",
        "test_promises.test_masked_is_never_read", {"name": "preset: ppo_clip"},
    ),
    "cuda: a vector with an infinite log-ratio is sound": Mutant(
        "cuda_emulated", "cuda/gates_tokens.cuh",
        "fabsf(inputs.logp[i] - inputs.old_logp[i]) <= kStatisticSaturation",
        "fabsf(inputs.logp[i] - inputs.old_logp[i]) <= INFINITY",
        "test_promises.test_the_largest_products", {"name": "preset: ppo_clip"},
    ),
    "cuda: what a log-ratio has of small steps is not summed": Mutant(
        "cuda_emulated", "include/hpo/gates.h",
        "to_bits(fused(rest, float(kFixedPoint), shifter)) - to_bits(shifter)", "0",
        "test_hierarchy.test_every_backend_is_the_definition", {"gate": HIERARCHIES["step_gspo"]},
    ),
    "cuda: only tokens that saturate carry a gradient": Mutant(
        "cuda_emulated", "cuda/hierarchy_sweep.cuh",
        "gated.falling_step == 0.0f && !work.bends", "gated.falling_step == 0.0f",
        "test_hierarchy.test_every_backend_is_the_definition", {"gate": HIERARCHIES["four levels, through, whole"]},
    ),
    "cuda: the further tiles of a leaf begin where the pack's do": Mutant(
        "cuda_emulated", "cuda/leaves.cuh",
        "begin = token + begin % kTile;", "begin = token;",
        "test_hierarchy.test_a_long_leaf_is_shared_by_many_workers", {"gate": gates.fiberpo(0.05, (0.03, 0.02))},
    ),
    "cuda: sums begin before every block has cleared its share": Mutant(
        "cuda_emulated", "cuda/leaves.cuh",
        "if (threadIdx.x == 0) counted.broken[blockIdx.x] = any;\n  sync_grid();",
        "if (threadIdx.x == 0) counted.broken[blockIdx.x] = any;",
        "test_hierarchy.test_many_short_leaves", {"routing": gates.Routing.THROUGH},
    ),
    "cuda: blocks read the list of leaves that count before it is written": Mutant(
        "cuda_emulated", "cuda/leaves.cuh",
        "if (broken) {\n    if (blockIdx.x == 0 && warp_in_block() == 0) list_leaves(hierarchy, args, counted);\n"
        "    sync_grid();\n  }\n  return broken;",
        "if (broken && blockIdx.x == 0 && warp_in_block() == 0) list_leaves(hierarchy, args, counted); return broken;",
        "test_hierarchy.test_broken_leaves_are_left_out_and_counted", {"gate": HIERARCHIES["fiberpo"]},
    ),
    "cuda: a gradient returns before all its terms are added": Mutant(
        "cuda_emulated", "cuda/hierarchy.cu",
        "if (call.hierarchy.stage == Stage::whole) sync_grid();", "",
        "test_hierarchy.test_many_short_leaves", {"routing": gates.Routing.THROUGH},
    ),
    "cuda: a sweep begins before its own sums are complete": Mutant(
        "cuda_emulated", "cuda/hierarchy_sweep.cuh",
        "if (call.settled) sum_settled<EXTRAS>(call);\n      else sum_segments<kLogRatio, false>(call);\n"
        "      sync_grid();",
        "if (call.settled) sum_settled<EXTRAS>(call);\n      else sum_segments<kLogRatio, false>(call);",
        "test_hierarchy.test_a_long_leaf_is_shared_by_many_workers", {"gate": HIERARCHIES["gspo"]},
    ),
    "cuda: gradients of tiles are added before the largest is known": Mutant(
        "cuda_emulated", "cuda/hierarchy_sweep.cuh",
        "sync_grid();\n      couple_segments(call, leaves);", "couple_segments(call, leaves);",
        "test_hierarchy.test_every_backend_is_the_definition", {"gate": HIERARCHIES["four levels, through, whole"]},
    ),
    "cuda: a sweep delivers before all terms of a gradient are added": Mutant(
        "cuda_emulated", "cuda/hierarchy_sweep.cuh",
        "sync_grid();\n      deliver_leaves<GATE == kTermGate ? kTerm : kLogRatio>(call, leaves);",
        "deliver_leaves<GATE == kTermGate ? kTerm : kLogRatio>(call, leaves);",
        "test_hierarchy.test_every_backend_is_the_definition", {"gate": HIERARCHIES["four levels, through, whole"]},
    ),
    "cuda: coefficients are added before the largest is known": Mutant(
        "cuda_emulated", "cuda/hierarchy_sums.cuh",
        "sync_grid();\n  add_coefficients(call, leaves);", "add_coefficients(call, leaves);",
        "test_hierarchy.test_many_short_leaves", {"routing": gates.Routing.THROUGH},
    ),
    "cuda: what lies in no leaf is not cleared": Mutant(
        "cuda_emulated", "cuda/hierarchy_sweep.cuh",
        "__ballot_sync(kFullWarp, from < to)", "0u",
        "test_hierarchy.test_every_backend_is_the_definition", {"gate": HIERARCHIES["step_gspo"]},
    ),
    "cuda: children are counted before all of them are complete": Mutant(
        "cuda_emulated", "cuda/hierarchy_sums.cuh",
        "sync_grid();\n      add_children(call, k);", "add_children(call, k);",
        "test_hierarchy.test_every_backend_is_the_definition", {"gate": HIERARCHIES["balanced, 3 levels, self"]},
    ),
    "cuda: elements after the last whole vector are not scaled": Mutant(
        "cuda_emulated", "cuda/scale.cu",
        "vectors * kPerVector<Type> + first", "count",
        "test_scale.test_values_are_products", {"factor": 0.3, "offset": 0, "count": 7, "dtype": torch.bfloat16},
    ),
    "cuda: a thread scales one vector": Mutant(
        "cuda_emulated", "cuda/scale.cu",
        "int64_t(gridDim.x) * kThreads", "count",
        "test_scale.test_a_thread_takes_more_than_one_vector", {},
    ),
    "cuda: misaligned values are read as vectors": Mutant(
        "cuda_emulated", "cuda/scale.cu",
        "aligned ? count / kPerVector<Type> : 0", "count / kPerVector<Type>",
        "test_scale.test_values_are_products", {"factor": 0.3, "offset": 1, "count": 8, "dtype": torch.float32},
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
    "triton: a known gradient is a sum, not a mean": Mutant(
        "triton", "gated_levels.py",
        "if SHAPE.divisors[0][0]:", "if SHAPE.divisors[0][0] and SHAPE.drop:",
        "test_hierarchy.test_every_backend_is_the_definition", {"gate": HIERARCHIES["gspo"]},
    ),
    "triton: coefficients do not find their largest exponent": Mutant(
        "triton", "prepare_leaves.py",
        "EXPONENT + sign, sum != 0.0)", "EXPONENT + sign, sum > 0.0)",
        "test_hierarchy.test_every_backend_is_the_definition", {"gate": HIERARCHIES["gspo"]},
    ),
    "triton: leaves in disorder are not repaired": Mutant(
        "triton", "leaves.py",
        "if disorder > 0:", "if disorder > leaves:",
        "test_hierarchy.test_broken_leaves_are_left_out_and_counted", {"gate": HIERARCHIES["score"]},
    ),
    "triton: a child without tokens counts": Mutant(
        "triton", "gated_levels.py",
        "mask=exists, other=0) > 0)", "mask=exists, other=0) >= 0)",
        "test_hierarchy.test_every_backend_is_the_definition", {"gate": HIERARCHIES["balanced, 3 levels, self"]},
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
        "saturated(found.largest)", "found.largest",
        "test_corrections.test_statistics_reach_as_far_as_they_say", {"statistic": hpo.specs.Statistic.LOG_RATIO},
    ),
    "cpu: where its lowest token passes a mask, a whole row does": Mutant(
        "cpu", "cpu/corrections.cpp",
        "factor_of(own, sign, reduced.largest) == 1.0f", "true",
        "test_corrections.test_corrections_in_the_loss_are_those_of_the_op",
        {"gate": "sapo", "joined": "of tokens and two of rows"},
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
        "test_promises.test_the_largest_products", {"name": "hierarchy: score"},
    ),
    "cuda: a correction takes vectors for aligned": Mutant(
        "cuda_emulated", "cuda/corrections.cu",
        "allows_wide(array, 16)", "true",
        "test_corrections.test_no_input_needs_to_begin_on_a_boundary", {"unit": None},
    ),
    "cuda: what a tile has of far tokens is not added": Mutant(
        "cuda_emulated", "cuda/corrections.cu",
        "warp_sum(found.coarse)", "0",
        "test_corrections.test_far_tokens_do_not_cost_near_ones_their_digits", {},
    ),
    "cuda: a statistic saturates, and not its log-ratio": Mutant(
        "cuda_emulated", "include/hpo/correction_rules.h",
        "all<F>(0.5f) * u * u", "clamp(0.5f * u * u, all<F>(-kSaturation), all<F>(kSaturation))",
        "test_corrections.test_statistics_reach_as_far_as_they_say", {"statistic": hpo.specs.Statistic.K2},
    ),
    "cuda: the head that squares the ratio saturates as others do": Mutant(
        "cuda_emulated", "include/hpo/terms.h",
        "head == Head::simple || head == Head::mirror ? kSquareSaturation : kSaturation", "kSaturation",
        "test_terms.test_heads_of_huge_ratios_and_lowest_log_probabilities", {"head": hpo.specs.Head.SIMPLE},
    ),
    "triton: what segments have of far tokens is not read": Mutant(
        "triton", "corrections.py",
        "sum += tl.load(at + MULTIPLES, mask=held, other=0)", "sum += 0 * tl.load(at + MULTIPLES, mask=held, other=0)",
        "test_corrections.test_far_tokens_do_not_cost_near_ones_their_digits", {},
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
        "count += args.mask[first + i] != 0;", "++count;",
        "test_scopes.test_masked_values_are_never_read", {"poison": 99.0},
    ),
    "cpu: masked values of a scope are selected": Mutant(
        "cpu", "cpu/scopes.cpp",
        "mask ? mask[i] != 0 : 1", "1",
        "test_scopes.test_masked_values_are_never_read", {"poison": 99.0},
    ),
    "cpu: a bracket of a scope that missed is not noticed": Mutant(
        "cpu", "cpu/scopes.cpp",
        "index < below || index >= below + inside", "index < below",
        "test_entropy_selection.test_a_sample_of_a_scope_that_misleads", {"planted": -1.0},
    ),
    "cpu: the keys below the bracket of a scope are forgotten": Mutant(
        "cpu", "cpu/scopes.cpp",
        "index -= below;", "",
        "test_scopes.test_long_segments", {"kind": "distinct"},
    ),
    "cpu: keys of later parts of a scope stay behind a gap": Mutant(
        "cpu", "cpu/scopes.cpp",
        "own != keys + n", "false",
        "test_scopes.test_top_k_is_that_of_a_loop", {},
    ),
    "cpu: every part of a scope selects its own ties": Mutant(
        "cpu", "cpu/scopes.cpp",
        "needed -= here;", "",
        "test_scopes.test_long_segments", {"kind": "equal"},
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
        "test_logprobs.test_layouts", {"layout": "slice of the vocabulary", "dtype": torch.bfloat16},
    ),
    "cuda: the greatest logit is summed": Mutant(
        "cuda_emulated", "cuda/logits_rows.cuh",
        "owns && rest[lane] == mine", "false",
        "test_logprobs.test_a_confident_token_keeps_its_gradient_and_its_entropy", {"margin": 20.0, "offset": 40.0},
    ),
    "cuda: sums stay relative to what was the greatest of them": Mutant(
        "cuda_emulated", "cuda/logits_rows.cuh",
        "sums_.others *= factor;", "",
        "test_logprobs.test_error_against_float64", {"name": "ascending", "temperature": 1.0, "dtype": torch.float32},
    ),
    "cuda: NaN is lost": Mutant(
        "cuda_emulated", "cuda/logits.cuh",
        "x < y ? number : word", "y < x ? word : number",
        "test_logprobs.test_an_undefined_row_is_nan_and_alone", {"wrong": "nan"},
    ),
    "cuda: logits below the floor are summed": Mutant(
        "cuda_emulated", "cuda/logits_rows.cuh",
        "kFloored && x < floor_", "false",
        "test_logprobs.test_floors_and_squares_are_those_of_the_definition", {"dtype": torch.bfloat16},
    ),
    "cuda: gradients below the floor are not 0": Mutant(
        "cuda_emulated", "cuda/logits_rows.cuh",
        "!kFloored || x >= found.row.floor", "true",
        "test_logprobs.test_floors_and_squares_are_those_of_the_definition", {"dtype": torch.float16},
    ),
    "cuda: a row of logits has the derivative of the token before its own": Mutant(
        "cuda_emulated", "cuda/loss_from_logits.cu",
        "read_given(call.tokens.gate, token, given)", "read_given(call.tokens.gate, index, given)",
        "test_loss_from_logits.test_every_gate_on_tokens", {"name": "preset: ppo_clip"},
    ),
    "cuda: on-policy, the old log-probability is 0": Mutant(
        "cuda_emulated", "cuda/loss_from_logits.cu",
        "!call.gate.args.old_logp", "false",
        "test_loss_from_logits.test_padded_rows_and_a_temperature_of_each_token", {},
    ),
    "cuda: more rows are read at once than the cache holds": Mutant(
        "cuda_emulated", "cuda/loss_from_logits.cu",
        "device.cache / 4 * 3", "device.cache",
        "test_loss_from_logits.test_rows_at_once_fit_the_cache", {},
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
    "cpu: short rows with advantages of tokens and of rows are taken for one kind": Mutant(
        "cpu", "cpu/hierarchy_blocks.h",
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
    "cuda: a penalty whose coefficient is not finite is infinite": Mutant(
        "cuda_emulated", "cuda/gates_sweep.cuh",
        "pays && pays_penalty(factor)", "pays",
        "test_selection.test_a_coefficient_that_is_not_finite_is_0", {"gate": gates.dapo()},
    ),
    "cuda: a reported loss lacks the coefficient of its penalty": Mutant(
        "cuda_emulated", "cuda/gates_sweep.cuh",
        "penalty.loss *= factor;", "",
        "test_selection.test_a_constant_factor_on_the_penalty_is_its_coefficient",
        {"gate": gates.ppo_clip(), "penalty": hpo.kl.k3(0.125)},
    ),
    "triton: a coefficient of 0 multiplies a penalty that is infinite": Mutant(
        "triton", "sums.py",
        "pays = factor != 0.0", "pays = t.valid",
        "test_selection.test_a_coefficient_that_is_not_finite_is_0", {"gate": gates.dapo()},
    ),
    "cpu: a weight that is infinite stays on the fast path": Mutant(
        "cpu", "cpu/gates_token_inputs.h",
        "coefficients.finite()", "true",
        "test_gate_paths.test_what_is_extraordinary_leaves_the_fast_path", {"name": "token_weight", "value": math.inf},
    ),
    "cpu: an advantage that is infinite stays on the fast path": Mutant(
        "cpu", "cpu/gates_token_inputs.h",
        "kGiven != Given::anything && kGiven != Given::weights", "kGiven == Given::reference",
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
        "test_estimators.test_maxrl_of_a_mean_that_is_not_above_0_is_0", {"options": {"root": True}},
    ),
    "cpu: every row is taken for one whose tokens have one advantage": Mutant(
        "cpu", "cpu/row_advantages.h",
        "return any(present_lanes(differing));", "return false;",
        "test_row_advantages.test_one_advantage_in_each_row_is_that_of_the_row", {"gate": gates.fiberpo()},
    ),
    "cpu: a row's scan goes on into the row before": Mutant(
        "cpu", "cpu/segments.cpp",
        "following = args.values[unit] + args.gains[unit] * following;",
        "static double kept = 0.0; following = kept = args.values[unit] + args.gains[unit] * kept;",
        "test_segments.test_the_scan_of_a_row_does_not_depend_on_its_position", {},
    ),
    "triton: window crosses the border": Mutant(
        "triton", "windows.py",
        "(neighbour >= range_.begin) & (neighbour < range_.end)", "(neighbour >= 0) & (neighbour < tokens)",
        WINDOW_BORDER, {},
    ),
    "triton: a row carries the value of a masked token": Mutant(
        "triton", "windows.py",
        "tl.where(usable, token, range_.end)", "tl.where(token < range_.end, token, range_.end)",
        "test_window_aggregates.test_carried_by_hand", {},
    ),
    "triton: each step of a scope selects all ties that are needed": Mutant(
        "triton", "scopes.py",
        "needed = tl.maximum(needed - tl.sum(ties.to(tl.int64)), 0)", "needed = needed + 0",
        "test_scopes.test_top_k_is_that_of_a_loop", {},
    ),
    "triton: masked tokens are in the population of a scope": Mutant(
        "triton", "scopes.py",
        "valid &= tl.load(mask + token, mask=valid, other=False)", "valid &= token >= 0",
        "test_scopes.test_masked_values_are_never_read", {"poison": 99.0},
    ),
    "triton: wide windows do not see their second half": Mutant(
        "triton", "windows.py",
        "at = low + (length & (span - 1))", "at = low",
        "test_window_aggregates.test_windows_wider_than_rows", {},
    ),
    "triton: off by one at the end of a window": Mutant(
        "triton", "windows.py",
        "tl.minimum(last, ahead) + 1)", "tl.minimum(last, ahead))",
        "test_entropy.test_every_window", {"boundary": "shrink", "invalid": "skip", "first": 0, "last": 3},
    ),
    "triton: ties with the threshold are dropped": Mutant(
        "triton", "entropy.py",
        "score > limit if STRICT else score >= limit", "score > limit",
        "test_entropy.test_worked_forking_tokens", {},
    ),
    "triton: biased standard deviation": Mutant(
        "triton", "advantages.py",
        "group.weight - ddof, 1.0", "group.weight, 1.0",
        "test_advantages.test_worked_numbers",
        {"op": "grpo", "options": {}, "binary": [0.866024, -0.866024, -0.866024, 0.866024], "other": [-1.0, 0.0, 1.0]},
    ),
    "triton: masked rewards enter the statistics": Mutant(
        "triton", "groups.py",
        "counted &= tl.load(given.mask + unit, mask=exists, other=False)", "counted &= exists",
        "test_advantages.test_mask_and_apply_mask_are_independent", {},
    ),
    "triton: the greatest logit is summed": Mutant(
        "triton", "logits_rows.py",
        'tl.argmax(kept, 0), float("-inf"), kept)', "tl.argmax(kept, 0), kept, kept)",
        "test_logprobs.test_a_confident_token_keeps_its_gradient_and_its_entropy", {"margin": 20.0, "offset": 40.0},
    ),
    "triton: sums stay relative to what was the greatest of them": Mutant(
        "triton", "logits_rows.py",
        "return Sums(origin, factor * sums.others,", "return Sums(origin, sums.others,",
        "test_logprobs.test_error_against_float64", {"name": "ascending", "temperature": 1.0, "dtype": torch.float32},
    ),
    "triton: the mean distance is that to the greatest of the others": Mutant(
        "triton", "logits_rows.py",
        "spread = below * row.exponent.inverse * others + factor", "spread = factor",
        "test_logprobs.test_worked_numbers", {},
    ),
    "triton: NaN is lost": Mutant(
        "triton", "logits_rows.py",
        "tl.minimum(kept, x, propagate_nan=tl.PropagateNan.ALL)", "tl.minimum(kept, x)",
        "test_logprobs.test_an_undefined_row_is_nan_and_alone", {"wrong": "nan"},
    ),
    "triton: what lies beyond a row is read": Mutant(
        "triton", "logits_rows.py",
        "tl.where(column < row.columns, x, float(\"-inf\"))", "x",
        "test_logprobs.test_worked_numbers", {},
    ),
    "triton: gradients below the floor are not 0": Mutant(
        "triton", "logits_rows.py",
        "return logit, here & (outside == False)", "return logit, here",
        "test_logprobs.test_floors_and_squares_are_those_of_the_definition", {"dtype": torch.float16},
    ),
    "triton: a factor of 1 writes every value again": Mutant(
        "triton", "scale.py",
        "by != 1.0", "by == by",
        "test_scale.test_a_factor_of_1_touches_nothing", {"offset": 0, "count": 8, "dtype": torch.float32},
    ),
    "triton: a factor of NaN changes nothing": Mutant(
        "triton", "scale.py",
        "by != 1.0", "(by < 1.0) | (by > 1.0)",
        "test_scale.test_values_are_products",
        {"factor": math.nan, "offset": 0, "count": 8, "dtype": torch.float32},
    ),
    "triton: a row of logits has the derivative of the token before its own": Mutant(
        "triton", "loss_from_logits.py",
        "at + 1 + tl.arange(0, 1)", "at + tl.arange(0, 1)",
        "test_loss_from_logits.test_every_gate_on_tokens", {"name": "preset: ppo_clip"},
    ),
}  # fmt: skip

NATIVE = {name: mutant for name, mutant in MUTANTS.items() if mutant.backend != "triton"}
NUMBERS = {name: number for number, name in enumerate(NATIVE, 1)}
KILLERS = {(mutant.backend, mutant.killer, repr(mutant.arguments)): name for name, mutant in NATIVE.items()}
EVERY_RUN = {(NATIVE[name].backend, NATIVE[name].file): name for name in KILLERS.values()}.values()  # one for each file


@functools.cache
def mutated(backend):
    return Mutated(backend, {NUMBERS[name]: mutant for name, mutant in NATIVE.items() if mutant.backend == backend})


@pytest.fixture
def as_backend(monkeypatch):
    """Makes what loads ops a backend, of a name of its own: whatever caches backends does so by name."""

    def add(name, load):
        monkeypatch.setitem(backends._PROBES, name, lambda _: backends.Availability(name))
        monkeypatch.setitem(backends._DEVICES, name, ("cpu",))
        monkeypatch.setitem(backends._LOADERS, name, load)
        backends._resolve.cache_clear()
        return name

    monkeypatch.setenv("HPO_CORE_ISA", "generic")
    yield add
    backends._resolve.cache_clear()


def skip_without(backend):
    if not hpo.backends()[backend]:
        pytest.skip(f"{backend} is not available")


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_killed(name, as_backend, tmp_path):
    mutant = MUTANTS[name]
    skip_without(mutant.backend)
    load = triton(mutant, tmp_path) if name not in NATIVE else mutated(mutant.backend).with_bug(NUMBERS[name])
    backend = as_backend(f"mutant, {name}", load)
    assert_killed(name, mutant.killer, {"backend": backend, **mutant.arguments})


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in EVERY_RUN else pytest.mark.long) for name in KILLERS.values()]
)
def test_killer_passes_where_no_mutant_is_switched_on(name, as_backend):
    """So it is the mutant that fails it, and not the library around all of them."""
    mutant = NATIVE[name]
    skip_without(mutant.backend)
    backend = as_backend(f"no mutant, {name}", mutated(mutant.backend).with_bug(0))
    killer(mutant.killer, {"backend": backend, **mutant.arguments})()


def test_rank_local_quantile_is_killed(three_ranks, monkeypatch):
    window = importlib.import_module("hpo_core.entropy.window")

    def of_rank(score, scope, scopes, quantile, rule, group):
        threshold, counts = hpo.ops.order_statistic(score, *quantile, rule, None)
        return threshold, counts[None]

    monkeypatch.setattr(window, "quantiles_over_ranks", of_rank)
    assert_killed(
        "python: quantile of the rank alone",
        "test_entropy.test_threshold_over_ranks_is_that_of_the_whole_step",
        {"three_ranks": three_ranks},
    )


def test_ignored_stride_is_killed(monkeypatch):
    prepared = importlib.import_module("hpo_core.prepared")
    honest = prepared.checked_constant

    def constant(name, tensor, *rest):
        return honest(name, tensor.as_strided(tensor.shape, (1,)) if tensor.dim() == 1 else tensor, *rest)

    monkeypatch.setattr(prepared, "checked_constant", constant)
    assert_killed(
        "python: strides of the constants are ignored",
        "test_promises.test_the_public_check_finds_nothing",
        {"backend": "cpu", "gate": gates.dapo()},
    )


def test_what_kills_a_mutant_runs_when_its_file_changes():
    """Of `make test-changed`, whose rules could otherwise leave out a test that would have found a bug."""
    for name, mutant in MUTANTS.items():
        folder = "kernels/hpo_triton" if mutant.backend == "triton" else "csrc"
        modules, on = affected([f"{folder}/{mutant.file}"])
        assert mutant.killer.partition(".")[0].removeprefix("test_") in modules and mutant.backend in on, name


def test_there_are_enough_of_them():
    assert len(MUTANTS) + 2 >= 12 and {mutant.backend for mutant in MUTANTS.values()} == {
        "cpu",
        "cuda_emulated",
        "triton",
    }
