"""Where the ops are registered with ``torch.library``, and who must see a call.

In eager mode the dispatcher would cost more than a small kernel, so plain tensors skip it. Under ``torch.compile``, a
dispatch mode or a ``torch.func`` transform, and for fake or other subclassed tensors, the same call goes through
``torch.ops.hpo_core.*``, whose fakes are shape functions. In a compiled graph the numbers of a gate are constants;
sizes are not.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["LIBRARY", "OPERATORS", "define", "register", "watched"]

LIBRARY: Any = torch.library.Library("hpo_core", "DEF")  # type: ignore[no-untyped-call]
OPERATORS = torch.ops.hpo_core
define = LIBRARY.define

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def watched(tensor: torch.Tensor) -> bool:
    """Whether a tracer, a transform, a dispatch mode or the tensor's own class must see the call."""
    return (
        torch.compiler.is_compiling()
        or type(tensor) not in _PLAIN
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
    )


def register(name: str, implementation: Any, fake: Any) -> None:
    for device in ("CPU", "CUDA"):
        LIBRARY.impl(name, implementation, device)
    torch.library.register_fake(f"hpo_core::{name}", fake, lib=LIBRARY)
