"""The definition of token log-probabilities and entropies from logits."""

from __future__ import annotations

import torch

from ..specs import LogitRows


def token_logprobs(rows: LogitRows, kept: int) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """``logp_y = d_y - log1p(s)`` and ``H = log1p(s) + w / (1 + s)``, where ``d_j = z_j - z_k`` for an arg-max k of
    ``z = logits / temperature``, ``s`` is the sum of ``e^d`` without k, and ``w`` is the sum of ``-d e^d``.

    The statistics are the first ``kept`` of the greatest logit, s, w / (1 + s) and the sum of squared probabilities;
    the entropy needs the third. Results are float64 for float64 logits, else float32; the computation is in float64.

    >>> import torch
    >>> logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]], dtype=torch.float64)
    >>> logp, entropy, _ = token_logprobs(LogitRows(logits, torch.tensor([1]), None, 1.0, -100, None, 0, 4), 3)
    >>> logp, entropy
    (tensor([-1.4402], dtype=torch.float64), tensor([0.9475], dtype=torch.float64))
    """
    logits, targets = rows.logits, rows.targets
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    ignored = targets == rows.ignore_index
    temperature = rows.temperature if rows.temperatures is None else rows.temperatures.double()[..., None]
    x = torch.where(ignored[..., None], 0.0, logits.double())
    outside = x == -torch.inf
    if rows.floors is not None:
        outside |= ~((logits >= rows.floors[..., None]) | logits.isnan() | ignored[..., None])
    z = torch.where(outside, -torch.inf, x) / temperature  # a constant outside the support, so that its gradient is 0
    known = (targets >= 0) & (targets < rows.vocabulary) & torch.isfinite(z.amax(-1))

    column = torch.arange(rows.vocabulary, device=z.device)
    top = z.argmax(-1, keepdim=True)
    d = torch.where(column == top, 0.0, z - z.gather(-1, top))
    e = torch.where(column == top, 0.0, torch.exp(d))  # without the arg-max: 1 + 1e-20 would round to 1
    others = e.sum(-1)
    y = torch.where(known & ~ignored, targets, 0)[..., None]
    logp = d.gather(-1, y).squeeze(-1) - torch.log1p(others)
    spread = (torch.where(torch.isinf(d), 0.0, -d) * e).sum(-1)  # a probability of 0 adds 0, not infinity times 0
    distance = spread / (1 + others)
    squares = (1 + e.square().sum(-1)) / (1 + others).square()
    statistics = (x.gather(-1, top).squeeze(-1), others, distance, squares)
    # A sum of every logit, so that their gradients are NaN, too.
    undefined = x.sum(-1) * torch.where(known | ignored, 1.0, torch.nan)

    def result(values: torch.Tensor) -> torch.Tensor:
        return torch.where(ignored, 0.0, torch.where(known, values, undefined)).to(dtype)

    entropy = result(torch.log1p(others) + distance) if kept > 2 else None
    return result(logp), entropy, torch.stack([result(each.detach()).flatten() for each in statistics[:kept]])
