"""Values of every kind of argument: of tokens T, rows S, units U and logits. All are short in binary."""

from typing import Any

import torch

from hpo_core.batch import PackedBatch


def floats(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32, device="cpu")


def integers(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def bools(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.bool, device="cpu")


def batch(**more: Any) -> PackedBatch:
    """S = 3 rows, T = 11 tokens, the fifth of them masked, N = 5 steps."""
    given = {"group_ids": integers(0, 0, 1), "cu_steps": integers(0, 2, 4, 7, 9, 11), **more}
    return PackedBatch(integers(0, 4, 7, 11), bools(1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1), **given)


T = {
    "logp": floats(-1, -0.5, -2, -0.25, -1, -1.5, -0.75, -1, -0.5, -2, -1.25),
    "old_logp": floats(-1.25, -0.5, -1.5, -0.5, -1, -1, -1, -0.75, -0.5, -1, -1.5),
    "entropy": floats(0.5, 1, 2, 0.25, 0.75, 1.25, 1.75, 0.125, 1.5, 0.625, 0.875),
    "bools": bools(1, 1, 0, 1, 1, 1, 0, 1, 1, 0, 1),
    "weight": floats(1, 0.5, 2, 1, 1, 1.5, 1, 0.5, 1, 2, 1),
    "reward": floats(0, 0, 0, 1, 0, 0, 0.5, 0, 0, 0, -1),
}
S = {"advantages": floats(1, -0.5, 0.25), "weights": floats(0.125, 0.25, 0.125), "bools": bools(1, 0, 1)}

# Tensors of units, U = 8, by the name of the argument.
U: dict[str, torch.Tensor] = {
    "rewards": floats(1, 0, 0.5, 2, 0.25, 1.5, 0.75, -1),
    "values": floats(0.5, 0.25, 1, 0, 0.75, 0.5, 1, 0.125),
    "lengths": floats(5, 9, 3, 4, 12, 7, 2, 6),
    "group_ids": integers(0, 0, 1, 1, 0, 1, 0, 1),
    "trajectory_ids": integers(0, 1, 2, 2, 0, 3, 1, 3),
    "anchor_ids": integers(5, 7, 5, 7, 7, 5, 5, 7),
    "positions": floats(0, 1, 2, 0, 3, 1, 4, 2),
    "mask": bools(1, 1, 1, 1, 1, 1, 0, 1),
    "is_correct": bools(1, 0, 1, 1, 0, 0, 1, 0),
}
_ALIKE = {
    "rewards": (
        "rewards step_rewards action_rewards outcomes success group_rewards control_rewards ranks advantages accuracy "
        "prior value scores first_critic format_rewards execution_rewards structure_rewards answer"
    ),
    "values": (
        "values predictions second_critic low_values high_values switch_values parent_values answer_values "
        "root_values deviations drift reference weights gains second_values credits future_values "
        "model_rewards rule_rewards judged_rewards search selection perception form "
        "likelihoods confidences sequence_logp old_sequence_logp"
    ),
    "lengths": "lengths turns budgets multiplicity",
    "group_ids": "group_ids supergroup_ids ids stratum_ids agent_ids blueprint_ids graph_ids tree_ids prefix_ids",
    "trajectory_ids": "trajectory_ids variant_ids",
    "anchor_ids": "anchor_ids edge_ids",
    "positions": "positions",
    "mask": "mask apply_mask",
    "is_correct": "is_correct is_planner is_macro is_shaped switches is_step is_instant is_deferred is_created "
    "is_formatted is_multi_tool is_changed is_steered is_local is_original",
}
BY_NAME = {name: U[like] for like, names in _ALIKE.items() for name in names.split()}

LOGITS = (integers(*range(40)) * 7 % 11).float().reshape(5, 8) / 4
TARGETS = integers(3, 0, 7, -100, 2)
WEIGHT = (integers(*range(64)) * 5 % 13).float().reshape(8, 8) / 8
TEMPERATURES = floats(1, 0.5, 2, 1, 0.25)
