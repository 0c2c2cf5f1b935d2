"""Deliberate bugs in the Triton kernels, which run interpreted; test_mutants.py kills them."""

import math

import torch
from hierarchies import GATES as HIERARCHIES
from mutants import Mutant

from hpo_core import gates

MUTANTS = {
    "triton: a span ends with its first tile": Mutant(
        "triton", "segments.py",
        "tile = range_.end - MASKED_TOKENS\n",
        "tile = range_.begin + (begin - range_.begin) // MASKED_TOKENS * MASKED_TOKENS\n",
        "test_segments.test_spans_of_long_rows_with_few_valid_tokens", {},
    ),
    "triton: half of the programs are done before weights are written": Mutant(
        "triton", "segments.py",
        'sem="acq_rel") == programs - 1', 'sem="acq_rel") == programs // 2',
        "test_segments.test_weights_of_rows_in_many_blocks", {},
    ),
    "triton: a settled gradient is a sum, not a mean": Mutant(
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
    "triton: what segments have of far tokens is not read": Mutant(
        "triton", "corrections.py",
        "tl.load(at + MULTIPLES, mask=exists, other=0)", "0 * tl.load(at + MULTIPLES, mask=exists, other=0)",
        "test_corrections.test_far_tokens_do_not_cost_near_ones_their_digits", {},
    ),
    "triton: a coefficient of 0 multiplies a penalty that is infinite": Mutant(
        "triton", "sums.py",
        "pays = factor != 0.0", "pays = t.valid",
        "test_selection.test_a_coefficient_that_is_not_finite_is_0", {"gate": gates.dapo()},
    ),
    "triton: window crosses the border": Mutant(
        "triton", "windows.py",
        "(neighbour >= range_.begin) & (neighbour < range_.end)", "(neighbour >= 0) & (neighbour < tokens)",
        "test_entropy.test_no_window_crosses_a_border", {},
    ),
    "triton: programs that share a scope do not know of the ties of others": Mutant(
        "triton", "scopes.py",
        "tied - rank - tl.sum(before)", "tied - rank",
        "test_scopes.test_programs_share_the_only_scope", {"kind": "equal"},
    ),
    "triton: a row carries the value of a masked token": Mutant(
        "triton", "windows.py",
        "tl.where(usable, token, range_.end)", "tl.where(token < range_.end, token, range_.end)",
        "test_window_aggregates.test_carried_by_hand", {},
    ),
    "triton: a masked token is in a covariance": Mutant(
        "triton", "covariance.py",
        "valid &= load(mask, token, tokens, whole, ALIGNED)", "valid &= token >= 0",
        "test_covariance.test_terms_are_those_of_a_loop", {"rows": None, "masked": True},
    ),
    "triton: a search finds the rows of broken offsets": Mutant(
        "triton", "rows.py",
        "broken |= row_range(", "row_range(",
        "test_covariance.test_of_rows_that_overlap_the_last_one_owns_a_token", {},
    ),
    "triton: a term beyond all floats is infinite": Mutant(
        "triton", "covariance.py",
        "clamp(term, -LARGEST_FLOAT, LARGEST_FLOAT)", "term",
        "test_covariance.test_terms_beyond_all_floats_are_the_largest", {},
    ),
    "triton: a term on a bound is drawn": Mutant(
        "triton", "covariance.py",
        "(term > low)", "(term >= low)",
        "test_covariance.test_bounds_by_hand", {},
    ),
    "triton: each step of a scope selects all ties that are needed": Mutant(
        "triton", "scopes.py",
        "needed -= tl.sum(tied)", "needed -= 0",
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
        "counted &= tl.load(grouping.mask + unit, mask=exists, other=False)", "counted &= exists",
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
        "test_logprobs_layouts.test_floors_and_squares_are_those_of_the_definition", {"dtype": torch.float16},
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
