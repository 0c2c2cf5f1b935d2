"""Token log-probabilities and entropies from hidden states and a head, without storing the logits."""

from __future__ import annotations

import math

import torch
from torch.distributed import ProcessGroup

from . import ops
from .arguments import examines
from .backends import is_reference, untraced
from .batch import PackedBatch
from .checks import check, check_device, check_dtype, check_shape
from .logprobs import TokenLogprobs, counted_targets
from .ops.linear_logprobs import LinearRows
from .reference.linear_logprobs import linear_token_logprobs as definition
from .specs import LogitRows
from .support import check_targets, checked_temperature, is_held, logit_types
from .vocabulary_parallel import Sizes, all_rows, check_shards, recognises_shards, shards

# Rows and columns of a block of logits by device: 16 MiB on the CPU, where the last-level cache holds the block and its
# products lose a few percent; 128 MiB on a GPU, which keep a large one busy.
_BLOCKS = {"cpu": (512, 8192), "cuda": (4096, 8192)}


@recognises_shards(weight=0, bias=0)
@examines
def linear_token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    temperature: float | torch.Tensor = 1.0,
    ignore_index: int = -100,
    *,
    batch: PackedBatch | torch.Tensor | None = None,
    entropy: bool = True,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    block: tuple[int, int] | None = None,
    process_group: ProcessGroup | None = None,
    vocabulary_sizes: Sizes = None,
    backend: str | None = None,
) -> TokenLogprobs:
    """:func:`~hpo_core.token_logprobs` of ``hidden @ weight.T``, of which only one block exists at a time.

    ``logits = logit_scale (hidden @ weight.T + bias)``; with a softcap ``c`` they become ``c tanh(logits / c)``. Matrix
    products in float32 make a block of logits, which is summed up and dropped. The backward makes each block again and
    writes the gradient in its memory. All products have one shape, padded with rows of zeros: the results of a row and
    the gradient of its hidden state depend on that row and the head alone, to the bit. A pass without gradients and one
    with gradients give a ratio of exactly 1.

    Beyond results and gradients, the call allocates one block of logits, on the CPU one block of a 16-bit weight, and
    less than 1 kB per row; the backward also a float32 gradient of the hidden states, with a softcap a second block of
    logits, and for a 16-bit head one block of the weight's gradient.

    Args:
        hidden: ``[..., D]`` float32, bfloat16 or float16 (the reference takes float64, too).
        weight: ``[V, D]`` of these types, in any combination with ``hidden``. Of a head with an adapter it is the sum
            of both: the ``weight`` of PEFT's LoRA layer is that of the base layer alone.
        targets: ``[...]`` int64 or int32. A target outside ``[0, V)`` that is not ``ignore_index`` gives NaN.
        bias: ``[V]``, added to the products.
        temperature: a number above 0, or a floating-point tensor ``[...]``, one for each target; a constant of the
            differentiation.
        ignore_index: rows with this target are not read; their results and gradients are 0. On the CPU these rows, and
            in the backward rows whose upstream gradients are 0 and whose results are not NaN, take part in no product.
            A GPU multiplies them, since counting them would synchronise: where they are many, as under long prompts,
            pass the rows that count alone.
        batch: as in :func:`~hpo_core.token_logprobs`: ``targets`` are the tokens themselves, and the results of a token
            come from the hidden state of the token before it in its row; ``hidden`` is ``[T, D]`` or ``[B, L, D]``.
        entropy: whether to compute the entropy.
        softcap: a number above 0. None: no softcap.
        logit_scale: a number above 0.
        block: rows and columns of a block of logits, which takes ``4 rows columns`` bytes. Default: (512, 8192) on the
            CPU, (4096, 8192) on a GPU. The rows are padded to a multiple of the first number, so that a few tokens cost
            as much as a whole block. Bits depend on it, and with fewer than 16 rows on the CPU on a row's place, too.
        process_group: ranks that each hold consecutive rows of ``weight`` and ``bias``, and the same ``hidden`` and
            ``targets``, as in tensor parallelism. The forward makes one all-gather of ``4 T + 1`` floats; the backward
            one all-reduce of the gradient of ``hidden``, ``[T, D]`` in float32.
        vocabulary_sizes: the rows of ``weight`` on every rank. Default: this rank's number on all of them.
        backend: the backend of :func:`~hpo_core.token_logprobs`. The reference stores all logits in float64.

    Returns:
        :class:`TokenLogprobs`.

    >>> hidden, weight = torch.tensor([[1.0, 2.0], [0.0, 1.0]]), torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
    >>> linear_token_logprobs(hidden, weight, torch.tensor([1, 0]))
    TokenLogprobs(logp=tensor([-1.4076, -0.5514]), entropy=tensor([0.8324, 0.9753]))
    >>> batch = PackedBatch.from_lengths([2]).without_first_tokens()
    >>> linear_token_logprobs(hidden, weight, torch.tensor([2, 1]), batch=batch).logp
    tensor([ 0.0000, -1.4076])
    """
    reference = is_reference(hidden, backend)
    _check_tensors(hidden, weight, targets, bias, logit_types(reference))
    for name, number in (("softcap", softcap), ("logit_scale", logit_scale)):
        check(number is None or 0 < number < math.inf, "{}: expected a finite number above 0, got {}", name, number)
    targets, places = counted_targets(targets, batch, ignore_index)
    temperature = checked_temperature(temperature, targets, ignore_index, reference)
    # softmax(s x / t) = softmax(x / (t / s)), and a cap of c on s x is one of c / s on x: so the scale s costs nothing.
    if logit_scale != 1.0:
        scaled = temperature / logit_scale
        temperature = checked_temperature(scaled, targets, ignore_index, reference, "temperature / logit_scale")
    capped = None if softcap is None else softcap / logit_scale
    check(
        capped is None or is_held(capped),
        "softcap / logit_scale: expected a number above 0 that float32 holds, got {}; None is no cap",
        capped,
    )
    targets = places.at_logits(targets)
    each, number = None, 1.0
    if isinstance(temperature, torch.Tensor):
        each = places.at_logits(temperature)
    else:
        number = temperature
    kept = 3 if entropy else 2
    vocabulary, first, sizes = weight.shape[0], 0, None
    check_shards(process_group, vocabulary_sizes)
    if process_group is None:
        check(vocabulary > 0, "weight: expected a vocabulary of at least one token, got {}", list(weight.shape))
    else:
        sizes, first, vocabulary = shards(vocabulary, process_group, vocabulary_sizes)
        if reference:
            weight = all_rows(weight, process_group)
            bias = None if bias is None else all_rows(bias, process_group)

    if reference:
        rows = LogitRows(hidden, targets, each, number, ignore_index, None, 0, vocabulary)
        logp, entropies = definition(hidden, weight, bias, rows, capped, kept)[:2]
    else:
        given = LinearRows(
            hidden.reshape(targets.numel(), hidden.shape[-1]), weight, bias, targets.flatten(),
            None if each is None else each.flatten(), number, ignore_index, capped, first, vocabulary,
            *_checked_block(block, hidden),
        )  # fmt: skip
        run = ops.linear_token_logprobs if process_group is None else untraced(ops.linear_token_logprobs)
        logp, entropies = run(given, kept, backend, process_group, sizes)
    at_tokens = places.at_tokens
    return TokenLogprobs(
        at_tokens(logp.view(targets.shape)), None if entropies is None else at_tokens(entropies.view(targets.shape))
    )


def _check_tensors(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None,
    types: tuple[torch.dtype, ...],
) -> None:
    check(hidden.dim() > 0, "hidden: expected shape [..., D], got a number; use hidden[None]")
    check_dtype("hidden", hidden, types, "use hidden.float()")
    check(
        weight.dim() == 2,
        "weight: expected shape [V, D], got {}; if FSDP or ZeRO holds the head in parts, call it inside the head's own "
        "forward",
        list(weight.shape),
    )
    is_plain = weight.dtype == torch.float64  # others are the codes of a quantised weight
    check_dtype("weight", weight, types, "use weight.float()" if is_plain else "dequantise a quantised weight first")
    check(
        weight.shape[1] == hidden.shape[-1],
        "weight: expected shape [V, D] with the {} columns of hidden, got {}; {}",
        hidden.shape[-1],
        list(weight.shape),
        "use weight.T" if weight.shape[0] == hidden.shape[-1] else "hidden is the head's input",
    )
    check_device("weight", weight, hidden.device, "hidden")
    check_targets(targets, hidden, "hidden")
    if bias is not None:
        check_dtype("bias", bias, types, "use bias.float()")
        check_shape("bias", bias, weight.shape[:1], "[V] (one number for each row of weight)")
        check_device("bias", bias, hidden.device, "hidden")


def _checked_block(block: tuple[int, int] | None, hidden: torch.Tensor) -> tuple[int, int]:
    if block is None:
        return _BLOCKS["cpu" if hidden.is_cpu else "cuda"]
    check(
        isinstance(block, tuple | list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block),
        "block: expected two integers above 0, rows and columns of a block of logits, got {!r}",
        block,
    )
    return block[0], block[1]
