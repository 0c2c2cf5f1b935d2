"""Values of a level of the batch, as losses take them: one for each row or for each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..arguments import check_choice
from ..checks import check, check_device, check_floating, check_real, check_shape, check_shape_of_tokens, examined

if TYPE_CHECKING:
    from .packed import PackedBatch

_LEVELS = ("token", "step", "row", "trajectory", "group", "domain")


def at_level(
    batch: PackedBatch, name: str, values: torch.Tensor, level: str | None, tokens: Sequence[int]
) -> tuple[bool, torch.Tensor]:
    """See :meth:`PackedBatch.of_level`."""
    values = examined(name, values, "[S]")
    check_device(name, values, batch.device, "the batch")
    check_real(name, values)
    if level is None or level == "row":
        if values.shape != (batch.rows,):
            among = "" if batch.num_steps is None else f" 'step' ([{batch.num_steps}]),"
            fix = f"or say advantage_level='token' ({list(tokens)}),{among} 'trajectory', 'group' or 'domain'"
            check_shape(name, values, (batch.rows,), "[S] (one per row)", fix)
        return False, values
    check_choice("advantage_level", level, _LEVELS)
    if level == "token":
        check_shape_of_tokens(name, values, batch)
        return True, values.reshape(tuple(tokens))
    if level == "step":
        steps = batch.num_steps
        check(steps is not None, "advantage_level: 'step' needs steps in the batch; pass cu_steps or steps to it")
        check_shape(name, values, (steps or 0,), "(one per step)")
        return True, batch.spread_steps(values).reshape(*tokens)
    ids = {"trajectory": batch.trajectory_ids, "group": batch.group_ids, "domain": batch.domain_ids}[level]
    check(ids is not None, "advantage_level: {!r} needs {}_ids in the batch", level, level)
    assert ids is not None
    check(values.dim() == 1, "{}: expected one per {}, got shape {}", name, level, list(values.shape))
    check_floating(name, values)
    # An id without a value gets NaN: the loss leaves its tokens out and counts them in metrics.bad_advantages.
    known = torch.nn.functional.pad(values, (0, 1), value=torch.nan)
    return False, known[ids.clamp(-1, values.numel())]
