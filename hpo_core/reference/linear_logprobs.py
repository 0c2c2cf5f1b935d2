"""The definition of token log-probabilities and entropies from hidden states and a head."""

from __future__ import annotations

import torch

from ..specs import LogitRows
from .logprobs import token_logprobs


def linear_token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows: LogitRows,
    softcap: float | None,
    kept: int,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """:func:`~hpo_core.reference.logprobs.token_logprobs` of ``x = hidden @ weight.T + bias``, with a
    softcap of ``softcap tanh(x / softcap)``. The logits exist in full, in float64; ``rows`` holds all other arguments.

    Hidden states of ignored rows are not read. Results are float64 if hidden states and weight are, else float32.

    >>> import torch
    >>> hidden, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
    >>> rows = LogitRows(hidden, torch.tensor([1]), None, 1.0, -100, None, 0, 3)
    >>> linear_token_logprobs(hidden, weight, None, rows, None, 3)[:2]
    (tensor([-1.4076]), tensor([0.8324]))
    """
    ignored = rows.targets == rows.ignore_index
    logits = torch.where(ignored[..., None], 0.0, hidden.double()) @ weight.double().t()
    if bias is not None:
        logits = logits + bias.double()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logp, entropy, statistics = token_logprobs(rows._replace(logits=logits), kept)
    if hidden.dtype == weight.dtype == torch.float64:
        return logp, entropy, statistics
    return logp.float(), None if entropy is None else entropy.float(), statistics.float()
