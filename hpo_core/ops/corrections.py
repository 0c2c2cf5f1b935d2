"""Factors on tokens from log-ratios."""

from __future__ import annotations

from typing import Any

import torch

from ..backends import is_reference, resolve
from ..checks import check
from ..reference.segments import doubles
from ..specs import Action, CorrectionSpec, PolicyLossInputs, Reduction, SegmentReduce, Statistic
from .gates import INPUTS, check_inputs
from .library import OPERATORS, is_traced, register


def correction(
    inputs: PolicyLossInputs, spec: CorrectionSpec, backend: str | None, reduce: SegmentReduce | None = None
) -> torch.Tensor:
    """The factor ``[T]`` of ``inputs.logp - inputs.old_logp``, times ``inputs.token_weight``. ``reduce``: only where
    nothing is :func:`is_traced`."""
    result: torch.Tensor
    if is_reference(inputs.logp, backend):  # in float64, and no operator, as in the loss: transforms see each step
        result = resolve("corrections", inputs.logp, backend).correction(doubles(inputs), spec, reduce)
    elif is_traced(inputs.logp):
        kinds = (int(spec.statistic), int(spec.reduction), int(spec.action), spec.of_segments, spec.strict)
        result = OPERATORS.correction(*inputs, *kinds, [*spec.low, *spec.high], backend or "")
    else:
        result = resolve("corrections", inputs.logp, backend).correction(inputs, spec, reduce)
    return result


def _correction(*arguments: Any) -> Any:
    *tensors, statistic, reduction, action, of_segments, strict, bounds, backend = arguments
    inputs = PolicyLossInputs(*tensors)
    low, high = (bounds[0], bounds[1]), (bounds[2], bounds[3])
    spec = CorrectionSpec(Statistic(statistic), Reduction(reduction), Action(action), of_segments, strict, low, high)
    return resolve("corrections", inputs.logp, backend or None).correction(inputs, spec)


def _check_corrected(*arguments: Any) -> None:
    *tensors, _, _, _, of_segments, _, bounds, _ = arguments
    check(len(bounds) == 4, "bounds: expected low and high of both signs, got {} numbers", len(bounds))
    check_inputs(PolicyLossInputs(*tensors), levels=int(of_segments), needs=("old_logp",))


register(
    f"correction({INPUTS}int statistic, int reduction, int action, bool of_segments, bool strict, float[] bounds, "
    "str backend) -> Tensor",
    _correction,
    lambda logp, *_: torch.empty_like(logp),
    _check_corrected,
)
