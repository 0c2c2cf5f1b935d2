"""Valid calls of every operator of torch.ops.hpo_core; the batch of most has S = 3 rows and T = 11 tokens."""

from typing import Any

import torch
from valid_values import LOGITS, TARGETS, TEMPERATURES, WEIGHT, S, T, U, batch, floats, integers

import hpo_core as hpo
from hpo_core import gates
from hpo_core.advantages import GroupTerm
from hpo_core.batch import PackedBatch
from hpo_core.ops.advantages import _numbers_of_groups
from hpo_core.ops.gates import _numbers_of
from hpo_core.specs import GroupNormalisation, PolicyLossInputs, Share

# It reads the optional tensors that gates with bounds or levels leave.
WITH_TERM = gates.RatioGate(
    "with a term", gates.Identity(), head=gates.Head.TARGET, penalty=gates.Penalty.K2, penalty_coefficient=0.5,
    corrections=gates.icepop().corrections,
)  # fmt: skip


def operator_calls() -> list[tuple[str, dict[str, Any], str]]:
    """Names of operators with their arguments, and those of these whose shape depends on no other argument."""
    packed = batch(trajectory_ids=integers(0, 0, 1))
    groups = GroupNormalisation((GroupTerm(), GroupTerm(coefficient=0.5)), Share.SUM)
    rewards, ids = U["rewards"], U["group_ids"]
    tokens = {"mask": packed.mask, "cu_seqlens": packed.cu_seqlens}
    inputs = _loss_inputs(packed, gates.ppo_clip())
    fiber = _loss_inputs(packed, gates.fiberpo())
    sequence = _loss_inputs(packed, gates.gspo())
    with_term = _loss_inputs(packed, WITH_TERM) | {
        "target": S["weights"] / 4, "penalty_mask": T["bools"], "correction_first": T["old_logp"],
        "correction_second": T["old_logp"] - 0.125,
    }  # fmt: skip
    quantile = {"numerator": 1, "denominator": 2, "rule": 0, "backend": ""}
    of_scopes = {"segments": packed.cu_seqlens, "scope_of_segment": integers(1, 0, 1)}
    logprobs = {
        "logits": LOGITS, "targets": TARGETS, "temperatures": TEMPERATURES, "temperature": 1.0,
        "ignore_index": -100, "floors": TEMPERATURES - 1, "first": 0, "vocabulary": 8, "backend": "",
    }  # fmt: skip
    head = {
        "hidden": LOGITS, "weight": WEIGHT, "bias": WEIGHT[:, 0], "targets": TARGETS, "temperatures": TEMPERATURES,
        "temperature": 1.0, "ignore_index": -100, "softcap": 4.0, "first": 0, "vocabulary": 8, "chunk": 2, "columns": 5,
        "backend": "cpu",
    }  # fmt: skip
    settings = {
        "temperatures": None, "temperature": 0.5, "top_ks": integers(1, 2, 3, 4, 0), "top_k": 0,
        "top_ps": floats(0.5, 1, 0.25, 1, 0.75).double(), "top_p": 1.0, "min_ps": None, "min_p": 0.125,
    }  # fmt: skip
    statistics = torch.cat((LOGITS.amax(1)[None], LOGITS[:, :2].t() + 1))
    return [
        ("row_counts", {**tokens, "total_tokens": 11, "backend": ""}, "cu_seqlens"),
        ("row_weights", {**tokens, "total_tokens": 11, "denominator": 2, "factor": 1.0, "backend": ""}, "cu_seqlens"),
        ("row_spans", {**tokens, "total_tokens": 11, "backend": ""}, "cu_seqlens"),
        (
            "group_statistics",
            {"values": rewards, "ids": ids, "weights": U["lengths"], "mask": U["mask"], "backend": ""},
            "",
        ),
        (
            "recurrence",
            {"values": rewards.double(), "gains": U["values"].double(), "cu_seqlens": integers(0, 3, 8), "backend": ""},
            "cu_seqlens",
        ),
        (
            "window_score",
            {
                "values": T["entropy"],
                **tokens,
                "first": 0,
                "last": 1,
                "boundary": 3,
                "invalid": 0,
                "backend": "",
                "aggregate": 2,
            },
            "cu_seqlens",
        ),
        ("order_statistic", {"values": T["entropy"], **tokens, **quantile}, "cu_seqlens"),
        ("order_statistic", {"values": T["entropy"], "mask": None, "cu_seqlens": None, **quantile}, "values"),
        (
            "select",
            {"values": T["entropy"], "threshold": floats(0.75), "strict": False, "backend": "", **tokens},
            "cu_seqlens",
        ),
        ("select_top", {"values": T["entropy"], **tokens, **quantile, "strict": True}, "cu_seqlens"),
        (
            "order_statistics",
            {"values": T["entropy"], **of_scopes, "scopes": 2, **quantile, "rule": 3, "mask": tokens["mask"]},
            "",
        ),
        (
            "select_exact",
            {
                "values": T["entropy"],
                **of_scopes,
                "k": integers(2, 1),
                "uid_of_segment": integers(5, 3, 4),
                "mask": tokens["mask"],
                "backend": "",
            },
            "k",
        ),
        ("covariance", {**_covariance_inputs(packed), "backend": ""}, "advantages logp"),
        (
            "group_normalise",
            {
                "values": [rewards, U["values"]],
                "ids": [ids, None],
                "weights": [U["lengths"], None],
                "mask": U["mask"],
                "apply_mask": U["mask"],
                **dict(zip(("structure", "numbers"), _numbers_of_groups(groups), strict=True)),
                "backend": "",
            },
            "",
        ),
        *(
            ("policy_loss", {**each, "backend": "", "want_grad": True, "want_tokens": True}, "cu_seqlens logp")
            for each in (inputs, fiber, sequence, with_term)
        ),
        ("correction", {**_correction_inputs(packed), "backend": ""}, "cu_seqlens logp"),
        ("support_floor", {"logits": LOGITS, **settings}, ""),
        ("token_logprobs", {**logprobs, "kept": 3}, ""),
        ("linear_token_logprobs", {**head, "kept": 3}, ""),
        (
            "linear_token_logprobs_backward",
            {
                **head,
                "statistics": statistics,
                "logp_gradient": floats(1, 2, 3, 4, 5),
                "entropy_gradient": floats(1, 0, 2, 1, -1),
                "wanted": [True, True, True],
            },
            "",
        ),
        (
            "token_logprobs_backward",
            {
                **logprobs,
                "statistics": statistics,
                "logp_gradient": floats(1, 2, 3, 4, 5),
                "entropy_gradient": floats(1, 0, 2, 1, -1),
            },
            "statistics",  # two to four of each row
        ),
    ]


def _loss_inputs(packed: PackedBatch, gate: gates.RatioGate) -> dict[str, Any]:
    spec = gate.spec(hpo.kl.k3(0.125), False)
    leaves = packed.hierarchy(tuple(level.unit for level in spec.levels)) if spec.levels else (None,) * 4
    inputs = PolicyLossInputs(
        T["logp"], T["old_logp"], S["advantages"], S["weights"], packed.cu_seqlens, packed.mask,
        T["old_logp"] - 0.25, T["entropy"], T["entropy"], floats(0.5), T["bools"], T["weight"], T["weight"] / 4,
        T["weight"] + 1, False, *leaves, kl_weight=T["weight"] / 2,
    )  # fmt: skip
    if not gate.takes_bounds:
        inputs = inputs._replace(low=None, high=None)
    return {**inputs._asdict(), **dict(zip(("structure", "numbers"), _numbers_of(spec), strict=True))}


def _correction_inputs(packed: PackedBatch) -> dict[str, Any]:
    spec = gates.mis().corrections[0].spec()
    leaves = packed.hierarchy((gates.Unit.TRAJECTORY,))
    inputs = PolicyLossInputs(
        T["logp"], T["old_logp"], S["advantages"], S["weights"], packed.cu_seqlens, packed.mask,
        token_weight=T["weight"], leaf_begin=leaves.begin, leaf_end=leaves.end, leaf_row=leaves.row,
        ancestors=leaves.ancestors,
    )  # fmt: skip
    kinds = ("statistic", "reduction", "action", "of_segments", "strict")
    return {**inputs._asdict(), **{kind: getattr(spec, kind) for kind in kinds}, "bounds": [*spec.low, *spec.high]}


def _covariance_inputs(packed: PackedBatch) -> dict[str, Any]:
    return {
        "logp": T["logp"], "advantages": S["advantages"], "cu_seqlens": packed.cu_seqlens,
        "mask": packed.mask, "old_logp": T["old_logp"], "bounds": [-1.0, 1.0, -0.25, 0.25], "factor": 3, "offset": 5,
    }  # fmt: skip
