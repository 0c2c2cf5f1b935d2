"""The limits of compiled Triton kernels in tests/test_triton_compile.py, by path and kernel."""

import importlib.metadata

TRITON = importlib.metadata.version("triton")
# Bytes of a thread. The limits of registers are chosen for Triton 3.9, and the assembler of 3.6 keeps fewer values.
NEW = [*map(int, TRITON.split(".")[:2])] >= [3, 9]
MOST_SPILLED = 0 if NEW else 256
STEP = 2 if NEW else 1  # of a search for an order statistic, in loads of 128 bits

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
