"""Log-probability of a target and entropy of its distribution, from logits: the definition."""

from __future__ import annotations

import torch

__all__ = ["token_logprobs"]


def token_logprobs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float | torch.Tensor,
    ignore_index: int,
    want_entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``logp_y = d_y - log1p(s)`` and ``H = log1p(s) + w / (1 + s)``, where ``d_j = z_j - z_k`` for an arg-max k of
    ``z = logits / temperature``, ``s`` is the sum of ``e^d`` without k, and ``w`` that of ``-d e^d``.

    Float64 for float64 logits, else float32; the computation is in float64.

    >>> import torch
    >>> logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]], dtype=torch.float64)
    >>> token_logprobs(logits, torch.tensor([1]), 1.0, -100, True)
    (tensor([-1.4402], dtype=torch.float64), tensor([0.9475], dtype=torch.float64))
    """
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    vocabulary, ignored = logits.shape[-1], targets == ignore_index
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.double()[..., None]
    z = torch.where(ignored[..., None], 0.0, logits.double()) / temperature
    known = (targets >= 0) & (targets < vocabulary) & torch.isfinite(z.amax(-1))

    column = torch.arange(vocabulary, device=z.device)
    top = z.argmax(-1, keepdim=True)
    d = torch.where(column == top, 0.0, z - z.gather(-1, top))
    e = torch.where(column == top, 0.0, torch.exp(d))  # without the arg-max: 1 + 1e-20 would be 1
    others = e.sum(-1)
    y = torch.where(known & ~ignored, targets, 0)[..., None]
    logp = d.gather(-1, y).squeeze(-1) - torch.log1p(others)
    results = [logp]
    if want_entropy:
        spread = (torch.where(torch.isinf(d), 0.0, -d) * e).sum(-1)  # a probability of 0 counts 0
        results.append(torch.log1p(others) + spread / (1 + others))
    undefined = torch.where(known, 1.0, torch.nan)  # a factor, so that gradients are undefined, too
    results = [torch.where(ignored, 0.0, result * undefined).to(dtype) for result in results]
    return results[0], results[1] if want_entropy else None
