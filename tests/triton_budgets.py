"""What tests/test_triton_compile.py holds the compiled Triton kernels to, by path and kernel."""

import importlib.metadata

TRITON = importlib.metadata.version("triton")
# Bytes of a thread. The limits of registers are chosen for Triton 3.9, and the assembler of 3.6 keeps fewer values.
NEW = [*map(int, TRITON.split(".")[:2])] >= [3, 9]
MOST_SPILLED = 0 if NEW else 256
STEP = 2 if NEW else 1  # of a search for an order statistic, in loads of 128 bits

# Registers of a thread on sm_90 with Triton 3.9.0: a change that exceeds them fails.
REGISTERS = {
    ("gate: clip", "_sweep"): 106,
    ("gate: clip", "_finalise"): 48,
    ("gate: clip, all inputs", "_sweep"): 145,
    ("gate: clip, corrected", "_sweep"): 108,
    ("hierarchy: two levels, corrected", "_prepare_leaves"): 64,
    ("hierarchy: two levels, corrected", "_sweep_leaves"): 152,
    ("hierarchy: two levels, corrected", "_deliver_gradient"): 84,
    ("gate: score, no ratio", "_sweep"): 108,
    ("hierarchy: sequence", "_prepare_leaves"): 63,
    ("hierarchy: sequence", "_sweep_leaves"): 100,
    ("hierarchy: sequence, all inputs", "_prepare_leaves"): 95,
    ("hierarchy: sequence, all inputs", "_sweep_leaves"): 128,
    ("hierarchy: sequence, self", "_prepare_leaves"): 60,
    ("hierarchy: sequence, self", "_sweep_leaves"): 100,
    ("hierarchy: one level", "_prepare_leaves"): 64,
    ("hierarchy: one level", "_sweep_leaves"): 128,
    ("hierarchy: one level", "_deliver_gradient"): 85,
    ("hierarchy: two levels", "_prepare_leaves"): 64,
    ("hierarchy: two levels", "_sweep_leaves"): 123,
    ("hierarchy: two levels", "_deliver_gradient"): 84,
    ("hierarchy: score", "_prepare_leaves"): 64,
    ("hierarchy: score", "_sweep_leaves"): 116,
    ("hierarchy: four levels, all inputs", "_prepare_leaves"): 72,
    ("hierarchy: four levels, all inputs", "_sweep_leaves"): 193,
    ("hierarchy: four levels, all inputs", "_deliver_gradient"): 102,
    ("term: LINEAR", "_prepare_leaves"): 62,
    ("term: LINEAR", "_sweep_leaves"): 109,
    ("term: SCORE", "_sweep_leaves"): 115,
    ("term: LOG", "_sweep_leaves"): 109,
    ("term: MIRROR", "_sweep_leaves"): 108,
    ("term: SIGMOID", "_sweep_leaves"): 113,
    ("term: SIMPLE", "_sweep_leaves"): 105,
    ("term: TARGET", "_sweep_leaves"): 112,
    ("term: NEGATIVE_AWARE", "_prepare_leaves"): 62,
    ("term: NEGATIVE_AWARE", "_sweep_leaves"): 113,
    ("term: FLIPPED", "_sweep_leaves"): 112,
    ("term: CENSORED", "_prepare_leaves"): 64,
    ("term: CENSORED", "_sweep_leaves"): 116,
    ("term: CENSORED", "_deliver_gradient"): 71,
    ("term: log mean exp", "_prepare_leaves"): 64,
    ("term: log mean exp", "_sweep_leaves"): 133,
    ("term: log mean exp", "_deliver_gradient"): 83,
    ("hierarchy: balanced", "_prepare_leaves"): 76,
    ("hierarchy: balanced", "_sweep_leaves"): 171,
    ("hierarchy: balanced", "_deliver_gradient"): 115,
    ("term: MIRROR, two levels, everything", "_prepare_leaves"): 62,
    ("term: MIRROR, two levels, everything", "_sweep_leaves"): 151,
    ("term: MIRROR, two levels, everything", "_deliver_gradient"): 81,
    ("term: NEGATIVE_AWARE, two levels, everything", "_prepare_leaves"): 62,
    ("term: NEGATIVE_AWARE, two levels, everything", "_sweep_leaves"): 151,
    ("term: NEGATIVE_AWARE, two levels, everything", "_deliver_gradient"): 81,
    ("correction: LOG_RATIO MEAN CLAMP", "_correct_tokens"): 66,
    ("correction: K3 SUM MASK", "_correct_tokens"): 66,
    ("correction: PROBABILITY MIN MASK", "_correct_tokens"): 64,
    ("correction: BINARY_KL MAX MASK", "_correct_tokens"): 94,
    ("correction: K2 TOKEN MASK", "_correct_tokens"): 59,
    ("correction: LOG_RATIO TOKEN BAND", "_correct_tokens"): 59,
    ("correction: LOG_RATIO MEAN MASK, in a loss", "_correct_tokens"): 62,
    ("row_counts", "_begin_counts"): 28,
    ("row_counts", "_count_rows"): 46,
    ("row_spans", "_find_spans"): 30,
    ("window_score", "_score_windows"): 76,
    ("window_score, maximum", "_score_windows"): 74,
    ("window_score, maximum", "_carry_rows"): 40,
    ("window_score, wide", "_begin_wide_windows"): 28,
    ("window_score, wide", "_add_wide_digit"): 40,
    ("window_score, wide", "_finish_wide_windows"): 53,
    ("order_statistic", "_select_top"): 96,
    ("select_top", "_select_top"): 96,
    ("order_statistics", "_scan_scopes"): 72,
    ("select_exact", "_scan_scopes"): 80,
    ("select", "_select"): 40,
    ("group_normalise", "_normalise_few"): 72,
    ("group_normalise, batch", "_normalise_few"): 80,
    ("group_normalise, all terms", "_normalise_few"): 118,
    ("group_normalise, many units", "_sum_tiles"): 32,
    ("group_normalise, many units", "_merge_tiles"): 80,
    ("group_normalise, many units", "_normalise_runs"): 66,
    ("group_normalise, many units, terms", "_sum_tiles"): 38,
    ("group_normalise, many units, terms", "_normalise_runs"): 85,
    ("group_normalise, one group of many", "_sum_tiles"): 32,
    ("group_normalise, one group of many", "_sum_absolute_tiles"): 32,
    ("group_normalise, one group of many", "_normalise_all_members"): 64,
    ("group_statistics, 4 units", "_statistics_of_few"): 101,
    ("group_statistics, 8193 units", "_statistics_of_runs"): 76,
    ("group_statistics, 8193 units, one group", "_sum_tiles"): 40,
    ("group_statistics, 8193 units, one group", "_statistics_of_all_members"): 32,
    ("recurrence", "_scan_rows"): 64,
    ("scale", "_scale"): 40,
    ("logprobs", "_forward"): 95,
    ("logprobs", "_backward"): 45,
    ("logprobs, all inputs", "_forward"): 128,
    ("logprobs, all inputs", "_backward"): 50,
    ("loss_from_logits", "_differentiate_loss"): 128,
    ("loss_from_logits, all inputs", "_differentiate_loss"): 128,
    ("loss_from_logits, term: LINEAR", "_differentiate_loss"): 128,
    ("loss_from_logits, term: NEGATIVE_AWARE", "_differentiate_loss"): 128,
}

# 128-bit loads in a program's step on sm_90: for float tokens, one for each tensor that the path reads.
WIDE_LOADS = {
    ("gate: clip", "_sweep"): 2,
    ("gate: clip, all inputs", "_sweep"): 9,
    ("gate: score, no ratio", "_sweep"): 1,
    ("hierarchy: sequence", "_prepare_leaves"): 2,
    ("hierarchy: sequence", "_sweep_leaves"): 2,
    ("hierarchy: sequence, all inputs", "_sweep_leaves"): 8,
    ("hierarchy: one level", "_prepare_leaves"): 2,
    ("hierarchy: one level", "_deliver_gradient"): 2,
    ("hierarchy: score", "_prepare_leaves"): 2,
    ("hierarchy: score", "_sweep_leaves"): 2,  # where gradient flows, a slot begins where its leaf does
    ("term: LINEAR", "_sweep_leaves"): 2,
    ("term: MIRROR, two levels, everything", "_deliver_gradient"): 2,
    ("correction: LOG_RATIO MEAN CLAMP", "_correct_tokens"): 5,  # of both steps
    ("window_score", "_score_windows"): 1,
    ("order_statistic", "_select_top"): 3 * STEP,  # three passes
    ("select_top", "_select_top"): 4 * STEP,
    ("select", "_select"): 1,
    ("logprobs", "_forward"): 4,  # a step is 32 logits of a thread, 16 in the backward
    ("logprobs", "_backward"): 2,
    ("logprobs, all inputs", "_forward"): 8,
    ("logprobs, all inputs", "_backward"): 4,
    ("loss_from_logits", "_differentiate_loss"): 6,  # of both passes
    ("loss_from_logits, all inputs", "_differentiate_loss"): 12,
}


# Paths of no shipped method, and those that differ in an expression from one with no fewer registers, are assembled
# in `make test-long` alone; every run checks that Triton's front end takes them. It assembles another path of the same
# kernel, which shares the code around what is their own.
AT_LENGTH = {
    "hierarchy: four levels, all inputs", "hierarchy: balanced", "term: log mean exp",
    "term: MIRROR, two levels, everything", "term: NEGATIVE_AWARE, two levels, everything",
    "group_normalise, all terms", "loss_from_logits, term: LINEAR",
    "term: LOG", "term: MIRROR", "term: SIMPLE", "term: TARGET", "term: FLIPPED",
    "correction: K3 SUM MASK", "correction: PROBABILITY MIN MASK", "correction: LOG_RATIO TOKEN BAND",
}  # fmt: skip
