"""TRL's fused head with :func:`hpo_core.linear_token_logprobs` in it: no logits, and prompts cost nothing."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from trl.trainer import utils  # type: ignore[import-not-found,unused-ignore]

from ..linear_logprobs import linear_token_logprobs
from .replaced import replaced


class _Head:
    """A function that is called as TRL's own, once for each forward pass of a model with ``fused_lm_head=True``."""

    def __init__(self, backend: str | None) -> None:
        self.backend = backend

    def apply(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None,
        logit_scale: float,
        outputs: tuple[str, ...],
    ) -> tuple[torch.Tensor | None, ...]:
        """Log-probabilities and entropies ``[T]``, and None for the outputs that these trainers never ask for."""
        logp, entropy = linear_token_logprobs(
            hidden, weight, targets, bias, temperature, entropy="entropy" in outputs,
            softcap=final_logit_softcapping, logit_scale=logit_scale, backend=self.backend,
        )  # fmt: skip
        return logp, entropy, None, None, None


def give_head(model: Any, backend: str | None) -> None:
    """Makes ``model(..., labels=, fused_lm_head=True)``, to which TRL has added its fused head, score with ours.

    TRL finds the backbone, the head, its softcap and scale, gathers sharded weights and adds the loss of experts; the
    function that turns hidden states into log-probabilities, and whether it is given labelled positions only, are
    names of one of its modules, which are ours during such a forward pass.
    """
    bound, head = model.forward, _Head(backend)
    if getattr(bound, "__self__", None) is model:
        inner = bound.__func__
    else:  # a function in the model's place, which takes no model

        def inner(_: Any, *arguments: Any, **keywords: Any) -> Any:
            return bound(*arguments, **keywords)

    @functools.wraps(type(model).forward)  # generate() compares its arguments with the signature
    def forward(self: Any, *arguments: Any, fused_lm_head: bool = False, **keywords: Any) -> Any:
        if not fused_lm_head:
            return inner(self, *arguments, **keywords)
        with replaced(utils, _ChunkedLogProbFunction=head, _use_triton=lambda device: True):
            return inner(self, *arguments, fused_lm_head=True, **keywords)

    model.forward = types.MethodType(forward, model)  # a copy of the model scores with its own weights
