"""verl's fused head with :func:`hpo_core.linear_token_logprobs` in it, or with a model's own logits before it.

Importing :mod:`hpo_core.integrations.verl`, which verl does by itself, gives two more values to
``fused_kernel_options.impl_backend``; ``use_fused_kernels=True`` with one of them selects it. Nothing of verl is
imported with this module: verl would import :mod:`hpo_core.integrations.verl`, and that this half of a module.
"""

from __future__ import annotations

import contextlib
import functools
import io
import types
from collections.abc import Callable
from typing import Any

import torch

from ..checks import check
from ..linear_logprobs import linear_token_logprobs
from ..logprobs import token_logprobs
from .replaced import replaced


def install_loss_head() -> None:
    """Makes ``impl_backend=hpo_core`` and ``impl_backend=hpo_core_logits`` work, in this process.

    verl's FSDP engine asks one function for the forward pass of a model with fused kernels, by that name. Models of
    other names, and the classes of all models, stay as they are.
    """
    from verl.models.transformers import monkey_patch  # type: ignore[import-not-found,unused-ignore]

    verls = monkey_patch.patch_forward_with_backends

    @functools.wraps(verls)
    def patch(model: Any, use_fused_kernels: bool = False, fused_kernels_backend: Any = None) -> None:
        make = {"hpo_core": _from_hidden_states, "hpo_core_logits": _from_logits}.get(fused_kernels_backend)
        if not use_fused_kernels or make is None:
            verls(model, use_fused_kernels=use_fused_kernels, fused_kernels_backend=fused_kernels_backend)
            return
        model.forward = types.MethodType(make(model, verls), model)
        model._verl_fused_kernels_backend = fused_kernels_backend
        print(f"Using {fused_kernels_backend} for log-probabilities and entropies of {type(model).__name__}")

    monkey_patch.patch_forward_with_backends = patch


# ------------------------------------------------------------------------------------------------- from hidden states


def _from_hidden_states(model: Any, verls: Callable[..., None]) -> Callable[..., Any]:
    """verl's forward pass with its own fused kernel, whose place ours takes meanwhile."""
    from verl.utils.experimental import torch_functional  # type: ignore[import-not-found,unused-ignore]

    head, kind = _Head(model), type(model)
    own = kind.forward
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # verl prints which kernel it has chosen
            verls(model, use_fused_kernels=True, fused_kernels_backend="torch")
        fused = kind.forward
    finally:
        kind.forward = own

    @functools.wraps(fused)
    def forward(self: Any, *arguments: Any, **inputs: Any) -> Any:
        with replaced(torch_functional, FusedLinearForPPO=lambda **_: head):
            return fused(self, *arguments, **inputs)

    return forward


class _Head:
    """Stands for verl's ``FusedLinearForPPO``. verl hands over hidden states and a weight; the rest is the model's."""

    def __init__(self, model: Any) -> None:
        self.model = model
        config = model.config.get_text_config()
        self.softcap, self.logit_scale = getattr(config, "final_logit_softcapping", None), _logit_scale(config)
        self.linear()

    def linear(self) -> torch.nn.Linear:
        """The head as it is now: adapters come after this object."""
        linear = getattr(self.model, "lm_head", None)
        check(
            isinstance(linear, torch.nn.Linear),
            "impl_backend: 'hpo_core' is for models whose lm_head is a torch.nn.Linear, got {}; take "
            "adapters off the head, or use impl_backend=hpo_core_logits for a language model",
            type(linear).__name__,
        )
        return linear  # type: ignore[return-value]

    def forward(
        self,
        hidden_states: torch.Tensor,
        vocab_weights: torch.Tensor,
        input_ids: torch.Tensor,
        temperature: float = 1.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logp, entropy = linear_token_logprobs(
            hidden_states, vocab_weights, input_ids, self.linear().bias, temperature, softcap=self.softcap,
            logit_scale=self.logit_scale,
        )  # fmt: skip
        assert entropy is not None
        return logp, entropy


def _logit_scale(config: Any) -> float:
    """The factor of a model's logits, under the names that models give it."""
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if getattr(config, name, None) is not None:
            return float(getattr(config, name))
    scaling = getattr(config, "logits_scaling", None)
    if scaling is None:
        return 1.0
    return float(scaling) if config.model_type == "hyperclovax" else 1.0 / scaling


# --------------------------------------------------------------------------------------------------------- from logits


def _from_logits(model: Any, _: Callable[..., None]) -> Callable[..., Any]:
    """The model's own forward pass, whose logits make room for their gradient."""
    from verl.models.transformers.dense_common import CausalLMOutputForPPO  # type: ignore[import-not-found,unused-ignore]

    own = type(model).forward

    @functools.wraps(own)
    def forward(
        self: Any,
        input_ids: torch.Tensor,
        *,
        temperature: float = 1.0,
        shift_labels: torch.Tensor | None = None,
        **inputs: Any,
    ) -> Any:
        outputs = own(self, input_ids=input_ids, **inputs)
        targets = input_ids.roll(-1, dims=-1) if shift_labels is None else shift_labels
        logp, entropy = token_logprobs(outputs.logits, targets, temperature, inplace_gradient=True)
        return CausalLMOutputForPPO(log_probs=logp, entropy=entropy)  # type: ignore[arg-type,unused-ignore]

    return forward
