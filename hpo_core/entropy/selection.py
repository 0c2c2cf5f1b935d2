"""The effect of an entropy method on a loss, as one value: ``selection=`` of :func:`~hpo_core.policy_loss`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..arguments import check_flag
from ..batch import PackedBatch, spread_rows
from ..checks import check, require_type
from ..gates import GateInputs
from ..kl import KLPenalty


class Selection(NamedTuple):
    """The tokens that count, their weights and their bounds: ``[T]`` (or ``[B, L]``) tensors, each of them or None.

    All are constants of the differentiation, made by the presets of :mod:`hpo_core.entropy` or by the caller.

    Attributes:
        mask: bool, tokens whose policy term counts.
        weight: factor on the policy term.
        bounds: ``(low, high)`` ratios, in place of the gate's, as in :class:`~hpo_core.gates.GateInputs`.
        kl_weight: factor on the penalty ``kl=`` of the loss, at every valid token; one that is not finite counts as 0.
        advantage_factor, advantage_addend: the advantage of a token is ``A factor + addend``.
        score, threshold: as :meth:`EntropyWindow.selection` makes them, ``[T]`` and ``[1]``: the policy term counts at
            ``score >= threshold`` only. The loss compares them where it reads the token, and no mask exists.
        strict: whether the comparison is ``score > threshold``.

    A NaN among weight, bounds, factor and addend takes the policy term of its token out and is counted
    (``bad_advantages``), a NaN score likewise (``nan_tokens``). The penalty ``kl=`` of the token stays.

    >>> Selection(mask=torch.tensor([True, False])).merged(Selection(weight=torch.ones(2))).weight
    tensor([1., 1.])
    """

    mask: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    bounds: tuple[torch.Tensor | None, torch.Tensor | None] | None = None
    kl_weight: torch.Tensor | None = None
    advantage_factor: torch.Tensor | None = None
    advantage_addend: torch.Tensor | None = None
    score: torch.Tensor | None = None
    threshold: torch.Tensor | None = None
    strict: bool = False

    def merged(self, other: Selection) -> Selection:
        """Both: masks intersect, weights and factors multiply; ``other`` comes after, so its factor applies to this
        addend, too. Bounds and weights of the penalty come from one of the two. Of two scores the second becomes a
        mask."""
        require_type(isinstance(other, Selection), "other: expected a Selection, got {}", type(other))
        for name in ("bounds", "kl_weight"):
            given = (getattr(self, name), getattr(other, name))
            check(any(each is None for each in given), "{}: both selections have some; drop those of one", name)
        (mine, _), (theirs, _) = self.compared(), other.compared()
        if mine is not None and theirs is not None:
            other = other.as_mask()
        comparing = self if other.score is None else other
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
            comparing.score,
            comparing.threshold,
            comparing.strict,
        )

    def as_mask(self) -> Selection:
        """The same selection, with the comparison of score and threshold in its mask.

        >>> Selection(score=torch.tensor([0.1, 0.9]), threshold=torch.tensor([0.5])).as_mask().mask
        tensor([False,  True])
        """
        score, threshold = self.compared()
        if score is None or threshold is None:
            return self
        passes = score > threshold if self.strict else score >= threshold
        mask = _both(self.mask, passes, torch.logical_and)
        return self._replace(mask=mask, score=None, threshold=None, strict=False)

    def compared(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Score and threshold, which go together, or neither."""
        score, threshold = self.score, self.threshold
        check(
            (score is None) == (threshold is None),
            "selection: its score and its threshold go together, got only {}; take window.selection(entropy, batch, "
            "state)",
            "score" if threshold is None else "threshold",
        )
        return score, threshold


torch.serialization.add_safe_globals([Selection])


def checked_selection(
    selection: Selection, has_window: bool, kl: KLPenalty | None, gate_inputs: GateInputs | None
) -> tuple[Selection, GateInputs | None]:
    """The selection, and the inputs of the gate with its bounds."""
    require_type(
        isinstance(selection, Selection),
        "selection: expected a Selection, which the presets of hpo_core.entropy return, got {}; wrap a mask as "
        "entropy.Selection(mask=...)",
        type(selection),
    )
    check_flag("strict", selection.strict)
    check(
        not has_window,
        "selection: it replaces window=, got both; merge them, "
        "selection.merged(window.selection(entropy, batch, state))",
    )
    check(
        selection.kl_weight is None or kl is not None,
        "selection: its kl_weight is a factor on the penalty of the loss, got none; pass kl= and ref_logp=, "
        "or drop the factor with selection._replace(kl_weight=None)",
    )
    if selection.bounds is None:
        return selection, gate_inputs
    given = GateInputs() if gate_inputs is None else gate_inputs
    check(
        isinstance(given, GateInputs) and given.bounds is None,
        "selection: it has bounds and so has gate_inputs; drop one of them",
    )
    return selection, given._replace(bounds=selection.bounds)


def shaped_advantages(
    selection: Selection,
    advantages: torch.Tensor,
    per_token: bool,
    batch: PackedBatch,
    token: Callable[..., torch.Tensor],
) -> tuple[torch.Tensor, bool]:
    """``A factor + addend`` of every token, and whether there is one for every token."""
    factor, addend = selection.advantage_factor, selection.advantage_addend
    if factor is None and addend is None:
        return advantages, per_token
    if not per_token:
        advantages = spread_rows(advantages, batch, 0.0)
    if factor is not None:
        factor = token("advantage_factor", factor)
        advantages = advantages.reshape(factor.shape) * factor
    if addend is not None:
        addend = token("advantage_addend", addend)
        advantages = advantages.reshape(addend.shape) + addend
    return advantages, True


def selected_tokens(
    selection: Selection,
    token_mask: torch.Tensor | None,
    token_weight: torch.Tensor | None,
    token: Callable[..., torch.Tensor],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Mask and weight of tokens, those of the selection among them."""
    mask, weight = selection.mask, selection.weight
    if mask is not None:
        mask = token("mask", mask, torch.bool)
        token_mask = mask if token_mask is None else token_mask & mask
    if weight is not None:
        weight = token("weight", weight)
        token_weight = weight if token_weight is None else token_weight * weight
    return token_mask, token_weight


def _both(
    one: torch.Tensor | None, other: torch.Tensor | None, join: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> torch.Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return join(one, other)
