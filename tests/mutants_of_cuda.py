"""Deliberate bugs in the CUDA kernels, which run emulated; test_mutants.py kills them."""

import torch
from hierarchies import GATES as HIERARCHIES
from mutants import Mutant

import hpo_core as hpo
from hpo_core import gates
from hpo_core.specs import OrderRule

MUTANTS = {
    "cuda: window crosses the border": Mutant(
        "cuda_emulated", "cuda/windows.cuh",
        "min(token + windows.last, range.end - 1)", "token + windows.last",
        "test_entropy.test_no_window_crosses_a_border", {},
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
    "cuda: a masked token is in a covariance": Mutant(
        "cuda_emulated", "cuda/covariance.cu",
        "(!args.mask || __ldg(args.mask + token))", "true",
        "test_covariance.test_terms_are_those_of_a_loop", {"rows": 7, "masked": True},
    ),
    "cuda: the sums of the first block are those of a covariance": Mutant(
        "cuda_emulated", "cuda/covariance.cu",
        "block < int(gridDim.x)", "block < 1",
        "test_covariance.test_terms_are_those_of_a_loop", {"rows": None, "masked": True},
    ),
    "cuda: a search finds the rows of broken offsets": Mutant(
        "cuda_emulated", "cuda/covariance.cu",
        "if (broken) return find_owner(pack, token);", "",
        "test_covariance.test_of_rows_that_overlap_the_last_one_owns_a_token", {},
    ),
    "cuda: a token behind its row has the advantage of it": Mutant(
        "cuda_emulated", "cuda/covariance.cu",
        "range.begin <= token && token < range.end ? row : -1", "row",
        "test_covariance.test_terms_are_those_of_a_loop", {"rows": 7, "masked": False},
    ),
    "cuda: a log-ratio has the bound of the other sign": Mutant(
        "cuda_emulated", "include/hpo/covariance.h",
        "advantage < zero", "advantage > zero",
        "test_covariance.test_bounds_by_hand", {},
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
        "test_gates_by_hand.test_ratio_exactly_at_its_bound_passes_the_gradient", {},
    ),
    "cuda: masked tokens are read": Mutant(
        "cuda_emulated", "cuda/gates_tokens.cuh",
        "inputs.vector.has(i) && byte_of(inputs.mask, i)", "inputs.vector.has(i)",
        "test_promises.test_masked_is_never_read", {"name": "preset: ppo_clip"},
    ),
    "cuda: half of the rows of a block alone divide": Mutant(
        "cuda_emulated", "cuda/segments.cu",
        "threadIdx.x < kWarps", "threadIdx.x < kWarps / 2",
        "test_segments.test_weights_of_rows_in_many_blocks", {},
    ),
    "cuda: a span ends with the first lane that has a valid token": Mutant(
        "cuda_emulated", "cuda/segments.cu",
        "31 - __clz(int(hits))", "__ffs(int(hits)) - 1",
        "test_segments.test_spans_of_long_rows_with_few_valid_tokens", {},
    ),
    "cuda: a span begins at the end of four tokens": Mutant(
        "cuda_emulated", "cuda/segments.cu",
        "(__ffs(int(four[i])) - 1) / 8", "3",
        "test_segments.test_spans_of_long_rows_with_few_valid_tokens", {},
    ),
    "cuda: rows that overlap count as sound ones": Mutant(
        "cuda_emulated", "cuda/gates.cu",
        "args.metrics[kBadOffsets] > 0.0", "false",
        "test_gates_by_hand.test_of_rows_that_overlap_the_last_one_owns_a_token", {"offsets": [0, 900, 300, 1900]},
    ),
    "cuda: a token belongs to each row that claims it": Mutant(
        "cuda_emulated", "cuda/gates.cu",
        "BROKEN && is_shared(gate.pack(), unit)", "false",
        "test_gates_by_hand.test_of_rows_that_overlap_the_last_one_owns_a_token", {"offsets": [0, 900, 300, 1900]},
    ),
    "cuda: a row counts by its first tile": Mutant(
        "cuda_emulated", "cuda/gates.cu",
        "!has_valid_token && !BROKEN", "false",
        "test_gates_by_hand.test_a_row_counts_wherever_its_valid_token_is", {"at": 513, "nan": False},
    ),
    "cuda: a ticket is not 0 again": Mutant(
        "cuda_emulated", "cuda/warp.cuh",
        "atomicInc(ticket, gridDim.x - 1)", "atomicAdd(ticket, 1u)",
        "test_gates_by_hand.test_streams_count_their_blocks_apart", {},
    ),
    "cuda: gradients of tiles are added by place in memory": Mutant(
        "cuda_emulated", "cuda/hierarchy_sweep.cuh",
        "stage_at(kind, column, __ffs(int(lanes)) - 1)",
        "stage_at(kind, (column + __ffs(int(lanes)) / 8) % 4, __ffs(int(lanes)) - 1)",
        "test_promises.test_a_trajectory_does_not_know_where_it_lies", {"name": "bent"},
    ),
    "cuda: a vector with a masked token is sound": Mutant(
        "cuda_emulated", "cuda/gates_tokens.cuh",
        "all_bytes(inputs.mask)", "true",
        "test_promises.test_masked_is_never_read", {"name": "preset: ppo_clip"},
    ),
    "cuda: a vector that begins before its row is full": Mutant(
        "cuda_emulated", "cuda/tokens.cuh",
        "from <= 0 && to >= WIDTH", "to >= WIDTH",
        "test_promises.test_a_trajectory_does_not_know_where_it_lies", {"name": "bent"},
    ),
    "cuda: tokens before a row belong to it": Mutant(
        "cuda_emulated", "cuda/tokens.cuh",
        "(1u << max(from, 0))", "1u",
        "test_promises.test_a_trajectory_does_not_know_where_it_lies", {"name": "bent"},
    ),
    "cuda: a vector with an infinite log-ratio is sound": Mutant(
        "cuda_emulated", "cuda/gates_tokens.cuh",
        "fabsf(inputs.logp[i] - inputs.old_logp[i]) <= kStatisticSaturation",
        "fabsf(inputs.logp[i] - inputs.old_logp[i]) <= INFINITY",
        "test_overflow.test_the_largest_products", {"name": "preset: ppo_clip"},
    ),
    "cuda: what a log-ratio has of small steps is not summed": Mutant(
        "cuda_emulated", "include/hpo/gates.h",
        "to_bits(fused(rest, float(kFixedPoint), shifter)) - to_bits(shifter)", "0",
        "test_hierarchy.test_every_backend_is_the_definition", {"gate": HIERARCHIES["step_gspo"]},
    ),
    "cuda: only tokens that saturate carry a gradient": Mutant(
        "cuda_emulated", "cuda/hierarchy_sweep.cuh",
        "gated.falling_step == 0.0f && !work.slopes_differ", "gated.falling_step == 0.0f",
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
        "sync_grid();\n      add_aggregate_grads(call, leaves);", "add_aggregate_grads(call, leaves);",
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
    "cuda: an array beside one that is not aligned is taken for aligned": Mutant(
        "cuda_emulated", "cuda/tokens.cuh",
        "allows_wide(array, 4 * sizeof(T))", "true",
        "test_gates.test_where_a_tensor_begins_changes_no_bit", {"gate": gates.dapo()},
    ),
    "cuda: a correction takes vectors for aligned": Mutant(
        "cuda_emulated", "cuda/corrections.cu",
        "allows_wide(array, 16)", "true",
        "test_corrections.test_no_input_needs_to_begin_on_a_boundary", {"unit": None},
    ),
    "cuda: what a tile has of far tokens is not added": Mutant(
        "cuda_emulated", "cuda/corrections.cu",
        "warp_sum(reduced.coarse)", "0",
        "test_corrections.test_far_tokens_do_not_cost_near_ones_their_digits", {},
    ),
    "cuda: an infinite log-ratio has a statistic": Mutant(
        "cuda_emulated", "include/hpo/correction_rules.h",
        "zero_or_nan == F{} ? value : zero_or_nan", "difference == difference ? value : zero_or_nan",
        "test_corrections.test_an_infinite_log_probability_of_the_sampler_takes_its_token_out", {},
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
        "test_logprobs_layouts.test_floors_and_squares_are_those_of_the_definition", {"dtype": torch.bfloat16},
    ),
    "cuda: gradients below the floor are not 0": Mutant(
        "cuda_emulated", "cuda/logits_rows.cuh",
        "!kFloored || x >= gradient_row.row.floor", "true",
        "test_logprobs_layouts.test_floors_and_squares_are_those_of_the_definition", {"dtype": torch.float16},
    ),
    "cuda: a row of logits has the derivative of the token before its own": Mutant(
        "cuda_emulated", "cuda/loss_from_logits.cu",
        "read_predicted(call.tokens.gate, token, predicted)", "read_predicted(call.tokens.gate, index, predicted)",
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
}  # fmt: skip
