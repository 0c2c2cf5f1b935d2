"""Signals: one number per token, which presets compare and map, and the way presets read and return them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from ..arguments import constants, examines, parameter_names
from ..batch import PackedBatch, takes_padded, valid_tokens
from ..checks import check_precise, check_tokens
from ..gates.inputs import per_token
from ..specs import Provenance
from .selection import Selection

Preset = TypeVar("Preset", bound=Callable[..., Any])


class Signal(NamedTuple):
    """One number per token, never read where the token is masked, in float64."""

    values: torch.Tensor  # [T] float64, 0 where a token has none
    usable: torch.Tensor  # [T] bool, valid tokens whose number is finite
    broken: torch.Tensor  # [T] bool, valid tokens whose number is NaN or infinite
    dtype: torch.dtype  # of the given tensor, and of results

    def also(self, other: torch.Tensor) -> torch.Tensor:
        """Another of the tensors that were read, ``[T]`` float64, 0 where a token has none."""
        return torch.where(self.usable, other.detach().double(), 0.0)

    def result(self, values: torch.Tensor, neutral: float) -> torch.Tensor:
        """Values ``[T]`` at usable tokens, ``neutral`` at masked ones, NaN at broken ones: the loss leaves a token
        without a finite factor out and counts it."""
        kept = torch.where(self.usable, values, neutral)
        return torch.where(self.broken, torch.nan, kept).to(self.dtype)

    def selected(self, mask: torch.Tensor) -> Selection:
        """The usable tokens of a mask, and the weight NaN at broken ones, which the loss counts."""
        return Selection(mask=mask & self.usable, weight=self.result(torch.ones_like(self.values), 1.0))


def read(batch: PackedBatch, **named: torch.Tensor) -> Signal:
    """The first of these ``[T]`` tensors; a token is usable where all of them are finite."""
    for name, tensor in named.items():
        check_precise(name, tensor)
    check_tokens(batch, **named)
    valid = valid_tokens(batch)
    first, *_ = named.values()
    finite = torch.stack([torch.isfinite(tensor.detach()) for tensor in named.values()]).all(dim=0)
    usable = valid & finite
    return Signal(torch.where(usable, first.detach().double(), 0.0), usable, valid & ~finite, first.dtype)


def advantages_of_tokens(advantages: torch.Tensor, batch: PackedBatch, level: str | None) -> torch.Tensor:
    """Advantages of a level at their tokens, ``[T]`` float64."""
    return per_token(advantages, batch, level).detach().double()


def preset(
    provenance: Provenance, level: str | None = None, *, differentiable: bool = False, per_token: bool = True
) -> Callable[[Preset], Preset]:
    """Marks a published method of this family, with the origin of its formula. ``level``: the function returns
    advantages of this level, as the estimators of :mod:`hpo_core.advantages` do, from tables of its groups.
    ``differentiable``: its result has a gradient; that of others is a constant.

    A marked function takes padded ``[B, L]`` tensors with a padded batch, too, and then returns padded tensors.
    ``per_token=False``: its result is not of tokens and keeps its shape, as that of rows and steps does, whose number
    may be that of tokens.
    """

    per_token = per_token and level in (None, "token")

    def mark(function: Preset) -> Preset:
        inner = examines(function if level is None else constants(function))
        names = parameter_names(function)

        @functools.wraps(function)
        def run(*arguments: Any, **keywords: Any) -> Any:
            with torch.set_grad_enabled(differentiable and torch.is_grad_enabled()):
                return inner(*arguments, **keywords)

        marked: Any = takes_padded(run, names) if per_token else takes_padded(run, names, lambda result, _: result)
        marked.provenance = provenance
        if level is not None:
            marked.level, marked.multi_reward, marked.tables, marked.parameters = level, False, True, names
        return marked  # type: ignore[no-any-return]

    return mark
