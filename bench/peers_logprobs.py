"""Log-probabilities and entropies as others compute them: from logits ``[T, V]``, and from hidden states and a head."""

from __future__ import annotations

import torch
import torch.nn.functional as F

Results = tuple[torch.Tensor, torch.Tensor]

# ---------------------------------------------------------------------------------------------------------- from logits


def eager(logits: torch.Tensor, targets: torch.Tensor) -> Results:
    """Log-probabilities as trainers write them, in float32."""
    logps = torch.log_softmax(logits.float(), dim=-1)
    logp = logps.gather(-1, targets[:, None]).squeeze(-1)
    return logp, -(logps.exp() * logps).sum(-1)


def trl(logits: torch.Tensor, targets: torch.Tensor) -> Results:
    """The function takes ``[B, L, V]`` and loops over B, so T rows by themselves would take many times as long."""
    from trl.trainer.utils import selective_log_softmax_and_entropy

    rows = 4 if len(logits) % 4 == 0 else 1
    logp, entropy = selective_log_softmax_and_entropy(logits.view(rows, -1, logits.shape[-1]), targets.view(rows, -1))
    return logp.flatten(), entropy.flatten()


def verl(logits: torch.Tensor, targets: torch.Tensor) -> Results:
    from verl.utils.torch_functional import entropy_from_logits, logprobs_from_logits

    return logprobs_from_logits(logits, targets), entropy_from_logits(logits)


def verl_chunked(logits: torch.Tensor, targets: torch.Tensor) -> Results:
    from verl.utils.torch_functional import entropy_from_logits_with_chunking, logprobs_from_logits

    return logprobs_from_logits(logits, targets), entropy_from_logits_with_chunking(logits)


# -------------------------------------------------------------------------------------------------- from hidden states

ROWS, COLUMNS = 512, 8192  # of a block of logits, ours and those of peers that let one choose


def eager_of_hidden(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> Results:
    """Log-probabilities as trainers write them: all logits, and log_softmax of them in float32."""
    return eager(hidden @ weight.t(), targets)


def trl_chunked(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> Results:
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    logp, entropy, *_ = ChunkedLogProbFunction.apply(
        hidden, weight, None, targets, 1.0, COLUMNS, None, 1.0, ("entropy",)
    )
    return logp, entropy


def verl_fused(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> Results:
    from verl.utils.experimental.torch_functional import FusedLinearForPPOFunction

    logp, entropy = FusedLinearForPPOFunction.apply(hidden, weight, targets)
    return logp, entropy


def liger_fused(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> Results:
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyFunction

    nll, entropy, *_ = LigerFusedLinearScaledCrossEntropyFunction.apply(hidden, weight, targets, 1.0, -100, 1, True)
    return -nll, entropy


def torch_logp(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Without an entropy. Chunks of its own choice are of 16 to 512 rows, and take up to a hundred times as long."""
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=ROWS)
    return -F.linear_cross_entropy(hidden, weight, targets, reduction="none", options=options)
