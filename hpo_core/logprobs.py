"""From a model's logits to what losses read: the log-probability of each token and the entropy it was drawn with."""

from __future__ import annotations

import math
from numbers import Real
from typing import NamedTuple

import torch

from . import ops
from .backends import is_reference
from .checks import check, check_device, check_dtype, check_shape, check_type, examined, examines, has_tangent
from .ops import watched
from .reference.logprobs import token_logprobs as definition
from .specs import LogitRows
from .vocabulary_parallel import Group, Sizes, all_rows, recognises_shards, shards

__all__ = ["TokenLogprobs", "token_logprobs"]

_LOGITS = (torch.float32, torch.bfloat16, torch.float16)
_LEAST = torch.finfo(torch.float32).tiny
_ABOVE_0 = (
    "expected finite numbers above 0, got {}; the limit at 0 is greedy decoding, whose log-probabilities are 0 or -inf"
)


class TokenLogprobs(NamedTuple):
    """The result, in the shape of the targets: ``logp``, and ``entropy`` in nats, or None where it is not wanted."""

    logp: torch.Tensor
    entropy: torch.Tensor | None


@recognises_shards(logits=-1)
@examines
def token_logprobs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float | torch.Tensor = 1.0,
    ignore_index: int = -100,
    *,
    entropy: bool = True,
    process_group: Group | None = None,
    vocabulary_sizes: Sizes = None,
    backend: str | None = None,
) -> TokenLogprobs:
    """The log-probability of each target under ``softmax(logits / temperature)``, and the entropy of that distribution.

    ``logp_t = z_y - log sum_j e^{z_j}`` and ``H_t = -sum_j p_j log p_j`` for ``z = logits / temperature``: float32
    whatever the logits are, both differentiable in ``logits``. The logits are read once forward and once backward;
    between the two, the logits themselves and three numbers a row are kept. Sums are relative to the greatest logit
    and leave it out, so that a token of probability ``1 - 1e-9`` keeps its gradient and its entropy. A logit of -inf
    is a token outside the support: it counts nothing, and its gradient is 0. The results of a row depend on nothing
    but that row, to the bit.

    ``entropy[t]`` and ``logp[t]`` belong to the distribution that ``targets[t]`` is drawn from, which is what a model
    returns one position earlier: ``token_logprobs(logits[:, :-1], tokens[:, 1:])``, of which nothing is copied.

    Args:
        logits: ``[..., V]`` float32, bfloat16 or float16 (the reference takes float64, too, and returns it), of any
            strides with a contiguous last dimension.
        targets: ``[...]`` int64 or int32. A target outside ``[0, V)`` that is not ``ignore_index`` gives NaN.
        temperature: a number above 0, or ``[...]`` floating point, one for each target, which is a constant of the
            differentiation. It divides in float32 or better, never in the precision of the logits.
        ignore_index: rows with this target are not read; their results and gradients are 0.
        entropy: whether the entropy is wanted; without it nothing is spent on it.
        process_group: ranks that hold the columns of one vocabulary one after the other, ``logits`` being this rank's,
            and the same targets. One all-gather of ``4 T`` floats forward, none backward: results are the same on all
            ranks, and so must be their upstream gradients. Only eagerly.
        vocabulary_sizes: the columns of every rank; default: as many as on this one.
        backend: ``"reference"`` or ``"cpu"``; default: what serves the device. The other backends have no
            implementation yet and say so.

    Returns:
        :class:`TokenLogprobs`. A row that holds NaN or +inf, or -inf only, gives NaN.

    >>> logits = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.0, 0.0, -torch.inf, 0.0]])
    >>> logp, entropy = token_logprobs(logits, torch.tensor([0, 3]))
    >>> logp, entropy
    (tensor([-0.4402, -1.0986]), tensor([0.9475, 1.0986]))
    """
    reference = is_reference(logits, backend)
    check(logits.dim() > 0, "logits: expected shape [..., V], got a number; use logits[None]")
    check_dtype("logits", logits, (*_LOGITS, torch.float64) if reference else _LOGITS, "use logits.float()")
    check_dtype("targets", targets, (torch.int64, torch.int32), "targets are ids of tokens")
    check_shape("targets", targets, logits.shape[:-1], "[...] (that of logits without its last dimension)")
    check_device("targets", targets, logits.device, "logits")
    check(
        process_group is not None or logits.shape[-1] > 0,
        "logits: expected a vocabulary of at least one token, got {}",
        list(logits.shape),
    )
    check(
        logits.stride(-1) == 1 or logits.shape[-1] == 1,
        "logits: expected a contiguous last dimension, got a stride of {}; use logits.contiguous()",
        logits.stride(-1),
    )
    check_type(
        isinstance(ignore_index, int) and not isinstance(ignore_index, bool),
        "ignore_index: expected an integer, got {!r}",
        ignore_index,
    )
    temperature = _checked_temperature(temperature, targets, ignore_index, exact=reference)
    each, number = (temperature, 1.0) if isinstance(temperature, torch.Tensor) else (None, temperature)
    vocabulary = logits.shape[-1]
    rows = LogitRows(logits, targets.to(torch.int64), each, number, ignore_index, None, 0, vocabulary)
    kept = 3 if entropy else 2
    if process_group is not None:
        sizes, first, vocabulary = shards(logits.shape[-1], process_group, vocabulary_sizes)
        if not reference:
            rows = rows._replace(first=first, vocabulary=vocabulary)
            return TokenLogprobs(*ops.over_ranks(rows, kept, backend, process_group, sizes))
        rows = rows._replace(
            logits=all_rows(logits.movedim(-1, 0), process_group).movedim(0, -1), vocabulary=vocabulary
        )
    results = definition(rows, kept) if reference else ops.token_logprobs(rows, kept, backend)
    return TokenLogprobs(*results[:2])


def _checked_temperature(
    temperature: float | torch.Tensor, targets: torch.Tensor, ignore_index: int, exact: bool
) -> float | torch.Tensor:
    if not isinstance(temperature, torch.Tensor):
        check_type(
            isinstance(temperature, Real) and not isinstance(temperature, bool),
            "temperature: expected a number or a tensor, one number for each target, got {}",
            type(temperature),
        )
        check(_LEAST <= temperature < math.inf, f"temperature: {_ABOVE_0}", temperature)
        return float(temperature)
    temperature = examined("temperature", temperature)
    check_type(
        temperature.is_floating_point(), "temperature: expected floating point, got {}; use .float()", temperature.dtype
    )
    check_shape("temperature", temperature, targets.shape, "[...] (that of targets)")
    check_device("temperature", temperature, targets.device, "targets")
    check(
        not temperature.requires_grad and not has_tangent(temperature),
        "temperature: it is a constant of the differentiation but has a gradient; pass temperature.detach()",
    )
    temperature = temperature.to(torch.float64 if exact else torch.float32)
    if temperature.is_cpu and not watched(temperature):  # elsewhere reading it would synchronise, and the row gives NaN
        wrong = ~((temperature >= _LEAST) & (temperature < math.inf)) & (targets != ignore_index)
        check(not wrong.any(), f"temperature: {_ABOVE_0}", temperature[wrong][:1].tolist())
    return temperature
