"""Group-normalised values of units."""

from __future__ import annotations

from typing import Any

import torch

from ..backends import resolve
from ..checks import check
from ..specs import Center, EpsMode, GroupInputs, GroupNormalisation, GroupTerm, Part, Presence, Scale, Share
from .library import OPERATORS, check_operand, is_traced, numbers_of, register


def group_normalise(inputs: GroupInputs, spec: GroupNormalisation, backend: str | None) -> torch.Tensor:
    result: torch.Tensor
    if any(is_traced(values) for values in inputs.values):
        kinds, numbers = _numbers_of_groups(spec)
        result = OPERATORS.group_normalise(*inputs, kinds, numbers, backend or "")
    else:
        result = resolve("advantages", inputs.values[0], backend).group_normalise(inputs, spec)
    return result


def _numbers_of_groups(spec: GroupNormalisation) -> tuple[list[int], list[float]]:
    """A spec as operator arguments: its structure, and its numbers."""
    kinds, numbers = [int(spec.share)], [spec.share_eps, spec.share_least]
    for term in spec.terms:
        kinds += [term.center, term.scale, term.ddof, term.eps_mode, term.keep_singletons, term.part, term.presence]
        numbers += [term.eps, term.coefficient]
    return [int(kind) for kind in kinds], numbers


def _groups_of(structure: list[int], numbers: list[float]) -> GroupNormalisation:
    kinds, number = iter(structure[1:]), iter(numbers[2:])
    terms = tuple(
        GroupTerm(
            Center(center), Scale(scale), ddof, next(number), EpsMode(mode), bool(keep), Part(part), Presence(presence),
            next(number),
        )
        for center, scale, ddof, mode, keep, part, presence in zip(*[kinds] * 7, strict=True)
    )  # fmt: skip
    return GroupNormalisation(terms, Share(structure[0]), *numbers[:2])


def _group_normalise(*arguments: Any) -> Any:
    values, ids, weights, mask, apply_mask, structure, numbers, backend = arguments
    inputs = GroupInputs(tuple(values), tuple(ids), tuple(weights), mask, apply_mask)
    run = resolve("advantages", values[0], backend or None).group_normalise
    return run(inputs, _groups_of(structure, numbers))


def _check_terms(*arguments: Any) -> None:
    values, ids, weights, mask, apply_mask, structure, numbers, backend = arguments
    check(len(values) > 0, "values: expected at least one tensor, got none")
    first = values[0]
    check(first.dim() == 1, "values: expected shape [U] (one per unit), got {}", list(first.shape))
    for name, tensors in (("ids", ids), ("weights", weights)):
        check(len(tensors) == len(values), "{}: expected {} of them, got {}", name, len(values), len(tensors))
    for name, tensors, dtypes in (
        ("values", values, numbers_of(backend)),
        ("ids", ids, (torch.int64,)),
        ("weights", weights, numbers_of(backend)),
    ):
        for at, tensor in enumerate(tensors):
            check_operand(f"{name}[{at}]", tensor, first.shape, dtypes, ("values", first))
    check_operand("mask", mask, first.shape, (torch.bool,), ("values", first))
    check_operand("apply_mask", apply_mask, first.shape, (torch.bool,), ("values", first))
    check(
        (len(structure), len(numbers)) == (1 + 7 * len(values), 2 + 2 * len(values)),
        "structure: expected the kinds and numbers of {} terms, got {} kinds and {} numbers",
        len(values),
        len(structure),
        len(numbers),
    )


register(
    "group_normalise(Tensor[] values, Tensor?[] ids, Tensor?[] weights, Tensor? mask, Tensor? apply_mask, "
    "int[] structure, float[] numbers, str backend) -> Tensor",
    _group_normalise,
    lambda values, *_: torch.empty_like(values[0]),
    _check_terms,
)
