"""What an entropy method does to a loss, as one value: ``selection=`` of :func:`~hpo_core.policy_loss`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..checks import check, require_type

__all__ = ["Selection"]


class Selection(NamedTuple):
    """Which tokens count, how much, and under which bounds: ``[T]`` (or ``[B, L]``) tensors, each of them or None.

    All are constants of the differentiation, made by the presets of :mod:`hpo_core.entropy` or by the caller.

    Attributes:
        mask: bool, tokens whose policy term counts.
        weight: factor on the policy term.
        bounds: ``(low, high)`` ratios, in place of the gate's, as in :class:`~hpo_core.gates.GateInputs`.
        kl_weight: factor on the penalty ``kl=`` of the loss, at every valid token.
        advantage_factor, advantage_addend: the advantage of a token is ``A factor + addend``.

    A token with a NaN among weight, bounds, factor and addend is left out and counted (``bad_advantages``).

    >>> Selection(mask=torch.tensor([True, False])).merged(Selection(weight=torch.ones(2))).weight
    tensor([1., 1.])
    """

    mask: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    bounds: tuple[torch.Tensor, torch.Tensor] | None = None
    kl_weight: torch.Tensor | None = None
    advantage_factor: torch.Tensor | None = None
    advantage_addend: torch.Tensor | None = None

    def merged(self, other: Selection) -> Selection:
        """Both: masks intersect, weights and factors multiply; ``other`` comes after, so its factor applies to this
        addend, too. Bounds and weights of the penalty come from one of the two."""
        require_type(isinstance(other, Selection), "other: expected a Selection, got {}", type(other))
        for name in ("bounds", "kl_weight"):
            given = (getattr(self, name), getattr(other, name))
            check(any(each is None for each in given), "{}: both selections have some; drop those of one", name)
        addend, factor = self.advantage_addend, other.advantage_factor
        if addend is not None and factor is not None:
            addend = addend * factor
        return Selection(
            _both(self.mask, other.mask, torch.logical_and),
            _both(self.weight, other.weight, torch.mul),
            self.bounds if other.bounds is None else other.bounds,
            self.kl_weight if other.kl_weight is None else other.kl_weight,
            _both(self.advantage_factor, factor, torch.mul),
            _both(addend, other.advantage_addend, torch.add),
        )


torch.serialization.add_safe_globals([Selection])


def _both(
    one: torch.Tensor | None, other: torch.Tensor | None, join: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> torch.Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return join(one, other)
