"""Token log-probabilities and entropies from a model's logits."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup

from . import ops
from .arguments import examines
from .backends import is_reference
from .batch import PackedBatch, as_batch
from .checks import check, check_device, check_dtype, check_shape
from .ops import is_traced, keeps_hooked
from .ops.logprobs import check_last_dimension
from .reference.logprobs import token_logprobs as definition
from .specs import LogitRows
from .support import among_ids, check_logits, check_of_rows, check_targets, checked_temperature, logit_types
from .vocabulary_parallel import Shards, Sizes, all_rows, check_shards, recognises_shards, shards


class TokenLogprobs(NamedTuple):
    """The result, in the shape of the targets: ``logp``, and ``entropy`` in nats (None with ``entropy=False``)."""

    logp: torch.Tensor
    entropy: torch.Tensor | None


class TokenStatistics(NamedTuple):
    """The result, in the shape of the targets: ``logp`` and ``entropy`` as in :class:`TokenLogprobs`. All other fields
    are constants of the differentiation."""

    logp: torch.Tensor
    entropy: torch.Tensor
    probability: torch.Tensor  # p_y of the target y
    log_sum_exp: torch.Tensor  # log sum_j e^{z_j}
    sum_squares: torch.Tensor  # sum_j p_j^2
    is_top: torch.Tensor  # bool: no logit is above the target's


@recognises_shards(logits=-1)
@examines
def token_logprobs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float | torch.Tensor = 1.0,
    ignore_index: int = -100,
    *,
    batch: PackedBatch | torch.Tensor | None = None,
    entropy: bool = True,
    entropy_temperature: float | torch.Tensor | None = None,
    support_floor: torch.Tensor | None = None,
    support_ids: torch.Tensor | None = None,
    inplace_gradient: bool = False,
    process_group: ProcessGroup | None = None,
    vocabulary_sizes: Sizes = None,
    backend: str | None = None,
) -> TokenLogprobs:
    """The log-probability of each target under ``softmax(logits / temperature)``, and the entropy of that distribution.

    ``logp_t = z_y - log sum_j e^{z_j}`` and ``H_t = -sum_j p_j log p_j`` for ``z = logits / temperature``. Both are
    float32 for every dtype of the logits, and differentiable in ``logits``. The logits are read once forward and once
    backward; autograd keeps the logits themselves and three numbers per row. Sums are relative to the greatest logit
    and leave it out, so that a token of probability ``1 - 1e-9`` keeps its gradient and its entropy. A logit of -inf
    marks a token outside the support: it adds nothing, and its gradient is 0, also where it is the target. The results
    of a row depend on that row alone, to the bit.

    With a ``batch``, logits and tokens lie as the model has them: ``targets`` are the tokens themselves, and the
    results of a token are computed from the logits of the token before it in its row. The first token of each row,
    which no logits predict, and tokens outside the batch's mask get 0, and their logits are not read. Without a batch
    ``targets[t]`` is the token that ``logits[t]`` predict: ``token_logprobs(logits[:, :-1], tokens[:, 1:])``, which
    copies nothing.

    Args:
        logits: ``[..., V]`` float32, bfloat16 or float16 (the reference takes float64, too, and returns it), of any
            strides with a contiguous last dimension; with a batch ``[T, V]``, or the padded ``[B, L, V]``.
        targets: ``[...]`` int64 or int32. A target outside ``[0, V)`` that is not ``ignore_index`` gives NaN.
        temperature: a number above 0, or a floating-point tensor ``[...]``, one for each target; a constant of the
            differentiation. The division is in float32 or better, never in the precision of the logits.
        ignore_index: rows with this target are not read; their results and gradients are 0, also those of a token that
            the batch's mask counts.
        batch: a PackedBatch, or a padded mask ``[B, L]``. Its mask must leave out the first token of each row, as a
            completion mask does (or use ``batch.without_first_tokens()``), because losses count every token of it.
        entropy: whether to compute the entropy; False saves its cost.
        entropy_temperature: a temperature for the entropy alone, given as ``temperature`` is. Default: the same.
            Another one reads the logits once more in each direction, and its gradient is a second tensor ``[..., V]``
            until both are added.
        support_floor: floating point ``[...]``, one for each row of logits (also with a batch, where these rows are not
            shifted), rounded to float32: logits below their floor are outside the support, as -inf is.
            :func:`~hpo_core.support_floor` computes the floor of top-k, top-p and min-p. The log-probability of a
            target below its floor is -inf. A constant of the differentiation.
        support_ids: ``[..., K]`` int64 or int32, for each target the ids of its support in any order, such as the ids
            that a sampler returns; -1 stands for no token, and an id that occurs twice counts once. Only these logits
            are read. The log-probability of a target outside its support is -inf.
        inplace_gradient: whether the backward writes the gradient over the logits, so that no second tensor of their
            size exists. Autograd then raises for every other eager operation that has kept the logits; do not read
            them after the backward. Hooks for saved tensors, as of ``torch.utils.checkpoint(use_reentrant=False)``, are
            refused, because autograd notices nothing under them. Leave False where the logits were made under such
            hooks by an operation that keeps them (``tanh``), and where code of ``torch.compile`` returns the logits as
            a view of a tensor that its own backward reads (``tanh(x).view(...)``): nothing raises there, and its
            gradient would be wrong.
        process_group: ranks that each hold consecutive columns of one vocabulary (``logits`` are this rank's) and the
            same targets. The forward makes one all-gather of ``4 T + 1`` floats (``3 T + 1`` without an
            entropy), the backward none: results are the same
            on all ranks, and their upstream gradients must be, too. Eager calls only.
        vocabulary_sizes: the number of columns of every rank. Default: this rank's number on all of them.
        backend: a name from ``hpo_core.backends()``. Default: by device.

    Returns:
        :class:`TokenLogprobs`. A row that holds NaN or +inf, or -inf only, gives NaN, and so does a target outside the
        vocabulary; then the gradient of the row is NaN, too, even where the incoming one is 0 (with ``support_ids`` at
        the ids, of which a row may have none).

    Raises:
        ValueError, TypeError: naming the argument, the expected and given values, and the fix. On a GPU, where reading
        them would synchronise, a temperature that is not allowed, an id of ``support_ids`` outside the vocabulary, and
        the first token of a row inside the mask give NaN instead. A target outside the vocabulary gives NaN everywhere.

    >>> logits = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.0, 0.0, -torch.inf, 0.0]])
    >>> logp, entropy = token_logprobs(logits, torch.tensor([0, 3]))
    >>> logp, entropy
    (tensor([-0.4402, -1.0986]), tensor([0.9475, 1.0986]))
    >>> batch = PackedBatch(torch.tensor([0, 2]), torch.tensor([False, True]))
    >>> token_logprobs(logits, torch.tensor([3, 1]), batch=batch).logp
    tensor([ 0.0000, -1.4402])
    """
    check(
        entropy or entropy_temperature is None,
        "entropy_temperature: expected None without an entropy, got {}; pass entropy=True",
        entropy_temperature,
    )
    check(
        process_group is None or support_ids is None,
        "support_ids: expected None with a process_group, got ids, whose logits are on other ranks; use support_floor",
    )
    check_shards(process_group, vocabulary_sizes)
    call = checked_call(
        logits, targets, temperature, ignore_index, batch, entropy_temperature, support_floor, support_ids,
        inplace_gradient, backend, 1 if process_group is None else 0,
    )  # fmt: skip
    if process_group is not None:
        call = call._replace(group=process_group, shards=shards(logits.shape[-1], process_group, vocabulary_sizes))
    logp, entropies, _ = call.run(3 if entropy and call.entropy_rows is None else 2)
    if call.entropy_rows is not None:
        entropies = call._replace(rows=call.entropy_rows).run(3)[1]
    at_tokens = call.places.at_tokens
    return TokenLogprobs(at_tokens(logp), None if entropies is None else at_tokens(entropies))


@examines
def token_statistics(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float | torch.Tensor = 1.0,
    ignore_index: int = -100,
    *,
    batch: PackedBatch | torch.Tensor | None = None,
    entropy_temperature: float | torch.Tensor | None = None,
    support_floor: torch.Tensor | None = None,
    support_ids: torch.Tensor | None = None,
    inplace_gradient: bool = False,
    backend: str | None = None,
) -> TokenStatistics:
    """:func:`token_logprobs` and further statistics of each row, from the same pass.

    The statistics are ``p_y``, ``log sum_j e^{z_j}`` and ``sum_j p_j^2`` for ``z = logits / temperature``,
    ``p = softmax(z)`` and the target y, and whether y has the greatest logit (also in a tie). Arguments, shapes, dtypes
    and errors are those of :func:`token_logprobs`; ``entropy_temperature`` changes the entropy alone. Rows that are not
    read have zeros and False. :func:`hpo_core.advantages.otb` takes ``probability`` and ``sum_squares``.

    Returns:
        :class:`TokenStatistics`. All but ``logp`` and ``entropy`` are constants of the differentiation.

    >>> logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    >>> found = token_statistics(logits, torch.tensor([1]))
    >>> found.probability, found.log_sum_exp, found.sum_squares, found.is_top
    (tensor([0.2369]), tensor([2.4402]), tensor([0.4794]), tensor([False]))
    """
    call = checked_call(
        logits, targets, temperature, ignore_index, batch, entropy_temperature, support_floor, support_ids,
        inplace_gradient, backend,
    )  # fmt: skip
    rows = call.rows
    logp, entropy, statistics = call.run(4)
    if call.entropy_rows is not None:
        entropy = call._replace(rows=call.entropy_rows).run(3)[1]
    assert entropy is not None
    top, others, _, squares = (each.view(logp.shape) for each in statistics.detach())
    is_read, logits = rows.targets != rows.ignore_index, rows.logits.detach()
    column = torch.where(is_read, rows.targets, 0).clamp(0, rows.vocabulary - 1)[..., None]
    each = rows.temperature if rows.temperatures is None else rows.temperatures.double()
    log_sum_exp = top.double() / each + torch.log1p(others.double())
    constants = (
        torch.where(is_read, logp.detach().exp(), 0.0),
        torch.where(is_read, log_sum_exp, 0.0).to(logp.dtype),
        squares,
        is_read & (logits.gather(-1, column).squeeze(-1) == top),
    )
    return TokenStatistics(*(call.places.at_tokens(each) for each in (logp, entropy, *constants)))


# ------------------------------------------------------------------------------------------------------------- the call


class Places(NamedTuple):
    """Where the results of tokens stand: with a batch at the token before, whose logits predict them."""

    is_shifted: bool
    unpredicted: torch.Tensor | None  # [...] bool: tokens of the mask without logits; None: known to be none

    def at_logits(self, values: torch.Tensor) -> torch.Tensor:
        """Values of tokens at the logits that predict these."""
        return values.roll(-1) if self.is_shifted else values

    def at_tokens(self, result: torch.Tensor) -> torch.Tensor:
        """The result at its tokens. The last row of logits predicts no token: its 0 becomes the first token's."""
        return self.marked(result.roll(1) if self.is_shifted else result)

    def marked(self, result: torch.Tensor) -> torch.Tensor:
        """The result with NaN at tokens that count and have no logits."""
        if self.unpredicted is not None and result.is_floating_point():
            result = torch.where(self.unpredicted, torch.nan, result)
        return result


def counted_targets(
    targets: torch.Tensor, batch: PackedBatch | torch.Tensor | None, ignore_index: int
) -> tuple[torch.Tensor, Places]:
    """The targets in int64, with ``ignore_index`` where the batch counts none, and where the results stand."""
    targets = targets.to(torch.int64)
    if batch is None:
        return targets, Places(False, None)
    predicted, unpredicted = _predicted(targets, batch)
    return torch.where(predicted, targets, ignore_index), Places(True, unpredicted)


class _Call(NamedTuple):
    """Checked arguments, as kernels take them."""

    rows: LogitRows
    entropy_rows: LogitRows | None  # the same rows at the temperature of the entropy, where it differs
    places: Places
    in_place: bool
    backend: str | None
    group: ProcessGroup | None = None  # ranks that hold a part of the vocabulary each
    shards: Shards | None = None

    def run(self, kept: int) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        if self.group is not None and self.shards is not None:
            return self._over_ranks(self.group, self.shards, kept)
        if is_reference(self.rows.logits, self.backend):
            return definition(self.rows, kept)
        return ops.token_logprobs(self.rows, kept, self.backend, self.in_place)

    def _over_ranks(
        self, group: ProcessGroup, parts: Shards, kept: int
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        rows = self.rows._replace(vocabulary=parts.vocabulary)
        if is_reference(rows.logits, self.backend):
            whole = all_rows(rows.logits.movedim(-1, 0), group).movedim(0, -1)
            return definition(rows._replace(logits=whole), kept)
        rows = rows._replace(first=parts.first)
        return ops.over_ranks(rows, kept, self.backend, group, parts.sizes, self.in_place)


def checked_call(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: Any,
    ignore_index: int,
    batch: PackedBatch | torch.Tensor | None,
    entropy_temperature: Any,
    floors: torch.Tensor | None,
    ids: torch.Tensor | None,
    in_place: bool,
    backend: str | None,
    least: int = 1,
) -> _Call:
    reference = is_reference(logits, backend)
    check_operands(logits, targets, reference, least)
    targets, places = counted_targets(targets, batch, ignore_index)
    of_targets = (targets, ignore_index, reference)

    def at_temperature(rows: LogitRows, value: Any) -> LogitRows:
        each, number = (places.at_logits(value), 1.0) if isinstance(value, torch.Tensor) else (None, value)
        return rows._replace(temperatures=each, temperature=number)

    is_same = entropy_temperature is None or entropy_temperature is temperature
    temperature = checked_temperature(temperature, *of_targets)
    if not is_same:
        entropy_temperature = checked_temperature(entropy_temperature, *of_targets, "entropy_temperature")
        both = (temperature, entropy_temperature)
        is_same = not any(isinstance(each, torch.Tensor) for each in both) and temperature == entropy_temperature
    if floors is not None:
        check_of_rows("support_floor", floors, logits.shape[:-1], logits.device, "logits")
        floors = floors.to(torch.float64 if reference else torch.float32)
    if ids is not None:
        check(floors is None, "support_floor, support_ids: expected one of them, got both")
        ids = _checked_ids(ids, targets, targets == ignore_index, logits.shape[-1])
    rows = LogitRows(logits, places.at_logits(targets), None, 1.0, ignore_index, floors, 0, logits.shape[-1])
    if in_place:
        _check_in_place(rows, reference, ids, is_same)
    if ids is not None:
        rows = _of_ids(rows, ids if batch is None else ids.roll(-ids.shape[-1]))
    entropy_rows = None if is_same else at_temperature(rows, entropy_temperature)
    return _Call(at_temperature(rows, temperature), entropy_rows, places, in_place, backend)


def check_operands(logits: torch.Tensor, targets: torch.Tensor, reference: bool, least: int = 1) -> None:
    check_logits(logits, logit_types(reference), least)
    check_targets(targets, logits, "logits")
    check_last_dimension(logits)


def _predicted(targets: torch.Tensor, batch: PackedBatch | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The tokens that count and have logits; and those that count and have none, where that is not checked."""
    batch, shape = as_batch(batch), targets.shape
    if shape != batch.padded_shape and shape != (batch.total_tokens,):
        fix = "a batch takes both unshifted; of a model's form [1, T, V] pass logits[0] and targets[0]"
        meaning = "[T] (one per token of the batch)" if batch.padded_shape is None else "[B, L] (that of the batch)"
        check_shape("targets", targets, batch.padded_shape or (batch.total_tokens,), meaning, fix)
    check_device("targets", targets, batch.device, "the batch")
    predicted, unpredicted = batch.once(_predictions)
    return predicted.view(shape), None if unpredicted is None else unpredicted.view(shape)


_FIRST = (
    "batch: its mask counts the first token of row {}, which no logits of the row predict; if logits[t] predict "
    "targets[t] already, as of completions cut out, call token_logprobs without batch; else leave first tokens out, "
    "here and in the loss: batch.without_first_tokens()"
)


def _predictions(batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
    row, first = batch.row_of_token(), batch.is_first_token()
    counts = row >= 0 if batch.mask is None else (row >= 0) & batch.mask
    unpredicted = counts & first
    if not first.is_cpu or is_traced(first):  # reading it would synchronise
        check(batch.mask is not None or batch.rows == 0 or batch.total_tokens == 0, _FIRST, "0, as all others do")
        return counts & ~first, unpredicted
    check(not unpredicted.any(), _FIRST, row[unpredicted][:1].tolist())
    return counts & ~first, None


def _checked_ids(ids: torch.Tensor, targets: torch.Tensor, unread: torch.Tensor, vocabulary: int) -> torch.Tensor:
    check_dtype("support_ids", ids, (torch.int64, torch.int32), "they are ids of tokens")
    check(ids.dim() > 0 and ids.shape[-1] > 0, "support_ids: expected shape [..., K], K > 0, got {}", list(ids.shape))
    check_shape("support_ids", ids, (*targets.shape, ids.shape[-1]), "[..., K] (that of targets, and K)")
    check_device("support_ids", ids, targets.device, "targets")
    if ids.is_cpu and not is_traced(ids):
        wrong = ((ids < -1) | (ids >= vocabulary)) & ~unread[..., None]
        expected = "ids from 0 to {}, or -1 for no token, got {}"
        check(not wrong.any(), f"support_ids: expected {expected}", vocabulary - 1, ids[wrong][:1].tolist())
    return ids.to(torch.int64)


def _of_ids(rows: LogitRows, ids: torch.Tensor) -> LogitRows:
    logits, targets = among_ids(rows.logits, rows.targets, ids)
    targets = torch.where(rows.targets == rows.ignore_index, -100, targets)
    return rows._replace(logits=logits, targets=targets, ignore_index=-100, vocabulary=logits.shape[-1])


def _check_in_place(rows: LogitRows, reference: bool, ids: torch.Tensor | None, is_same: bool) -> None:
    """Check that the logits are memory which the backward may write over, where there is to be one."""
    logits = rows.logits
    if not logits.requires_grad or not torch.is_grad_enabled() or is_traced(logits):  # the operator refuses traces
        return
    fix = "leave inplace_gradient=False"
    check(not reference, f"inplace_gradient: the reference has a graph of its own; {fix}")
    check(
        not keeps_hooked(),
        f"inplace_gradient: expected a graph that keeps the logits themselves, got hooks for saved tensors "
        f"(torch.utils.checkpoint, save_on_cpu), under which autograd tells no other operation that they change; {fix}",
    )
    check(ids is None, f"inplace_gradient: with support_ids the gradient is that of other tensors; {fix}")
    check(is_same, f"inplace_gradient: the gradient of an entropy_temperature of its own needs the logits, too; {fix}")
    base = logits._base if logits._is_view() else logits
    check(
        not logits.is_leaf and not (base is not None and base.is_leaf and base.requires_grad),
        f"inplace_gradient: expected logits that a model has computed, got a leaf, or a view of one, whose values "
        f"would become a gradient; {fix}",
    )
    check(
        not _overlaps(logits),
        f"inplace_gradient: expected rows with memory of their own, got strides {{}}, of an expanded tensor; {fix}",
        logits.stride(),
    )
    check(
        rows.at_two_strides()[0] is logits,
        f"inplace_gradient: expected rows at two strides at most, as those of [T, V] and of a slice of [B, L, V] are, "
        f"got shape {{}} and strides {{}}; {fix}",
        list(logits.shape),
        logits.stride(),
    )


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether two elements may share memory."""
    if tensor.numel() == 0:
        return False
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False
