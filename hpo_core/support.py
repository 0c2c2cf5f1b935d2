"""The support of a sampler: the tokens that temperature, min-p, top-k and top-p leave, or that the sampler returned."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch

from .arguments import as_float, examines
from .batch import PackedBatch
from .checks import (
    INTEGERS,
    check,
    check_device,
    check_dtype,
    check_floating,
    check_shape,
    examined,
    has_tangent,
    require_type,
)
from .ops import is_traced
from .ops.library import OPERATORS, check_operand, register
from .specs import LOGITS

_OF_FLOAT32 = torch.finfo(torch.float32)
_CHUNK = 2**22  # logits that are processed together
_FEW = 1024  # greatest logits of a row that are tried first: most supports lie among them


def is_held(number: Any) -> Any:
    """Whether this is a finite number above 0 that float32 holds with all its digits, which subnormal numbers lack;
    elementwise of a tensor."""
    return (number >= _OF_FLOAT32.tiny) & (number <= _OF_FLOAT32.max)


class Setting(NamedTuple):
    """A setting of a sampler: a number, or a tensor with one number for each row of logits."""

    name: str
    kind: type
    is_allowed: Callable[[Any], Any]  # of a number, or elementwise of a tensor
    allowed: str
    is_off: Callable[[Any], Any] = lambda _: False  # of a number, or elementwise of a tensor

    def of_rows(self, value: Any, shape: Sequence[int], device: torch.device, whose: str, exact: bool) -> Any:
        """The value after checks of its type, shape and device. A tensor gets int64 for counts, else float64 if
        ``exact`` and float32 if not."""
        name, is_count = self.name, self.kind is Integral
        if not isinstance(value, torch.Tensor):
            require_type(
                isinstance(value, self.kind) and not isinstance(value, bool),
                "{}: expected {} or a tensor, one for each of the {}, got {!r}",
                name,
                "an integer" if is_count else "a number",
                whose,
                value,
            )
            return int(value) if is_count else as_float(name, value)
        value = examined(name, value)
        if is_count:
            check_dtype(name, value, INTEGERS, "counts are integers")
        fix = ""
        if value.dim() == 0:
            fix = f"one number for all is {name}.item(), or {name}.expand({list(shape)})"
        elif len(shape) == 2 and value.numel() == shape[0]:
            fix = f"one for each response is {name}.reshape(-1, 1).expand({list(shape)})"
        check_of_rows(name, value, shape, device, whose, is_count, fix)
        return value.to(torch.int64 if is_count else torch.float64 if exact else torch.float32)

    def check_values(self, value: Any, unread: torch.Tensor | None = None) -> None:
        """Check that the values are allowed, except in ``unread`` rows. A tensor on a GPU or in a trace passes, because
        reading it would synchronise."""
        if not isinstance(value, torch.Tensor):
            check(self.is_allowed(value), f"{self.name}: expected {self.allowed}", value)
        elif value.is_cpu and not is_traced(value):
            wrong = ~self.is_allowed(value)
            if unread is not None:
                wrong &= ~unread
            check(not wrong.any(), f"{self.name}: expected {self.allowed}", value[wrong][:1].tolist())


_TEMPERATURE = Setting(
    "temperature",
    Real,
    is_held,
    "finite numbers above 0 that float32 holds, got {}; the limit at 0 is greedy decoding, whose log-probabilities are "
    "0 or -inf, and that at infinity the uniform distribution",
)
_TOP_K = Setting(
    "top_k", Integral, lambda k: k >= -1, "counts of tokens, where 0 and -1 are all of them, got {}", lambda k: k <= 0
)
_TOP_P = Setting(
    "top_p", Real, lambda p: (p > 0) & (p <= 1), "numbers above 0 and up to 1, which is off, got {}", lambda p: p == 1
)
_MIN_P = Setting(
    "min_p", Real, lambda p: (p >= 0) & (p <= 1), "numbers from 0, which is off, to 1, got {}", lambda p: p == 0
)


def checked_temperature(
    value: Any, targets: torch.Tensor, ignore_index: int, exact: bool, name: str = "temperature"
) -> Any:
    """A temperature for the targets with its type, shape, device and values checked."""
    is_batch = isinstance(value, PackedBatch) or (isinstance(value, torch.Tensor) and value.dtype == torch.bool)
    require_type(not is_batch, "{}: expected a number above 0 or a tensor of them, got a batch; pass batch=batch", name)
    setting = _TEMPERATURE._replace(name=name)
    value = setting.of_rows(value, targets.shape, targets.device, "targets", exact)
    setting.check_values(value, targets == ignore_index)
    return value


def logit_types(exact: bool) -> tuple[torch.dtype, ...]:
    """The dtypes of logits; ``exact``: for the reference, which takes float64, too."""
    return (*LOGITS, torch.float64) if exact else LOGITS


def check_logits(logits: torch.Tensor, dtypes: Sequence[torch.dtype], least: int = 1) -> None:
    check(logits.dim() > 0, "logits: expected shape [..., V], got a number; use logits[None]")
    fix = "use logits.float()" if logits.is_floating_point() else "are logits and targets exchanged?"
    check_dtype("logits", logits, dtypes, fix)
    check(logits.shape[-1] >= least, "logits: expected a vocabulary of at least one token, got {}", list(logits.shape))


def check_ids_of_tokens(targets: torch.Tensor) -> None:
    narrow = targets.dtype in (torch.uint8, torch.int8, torch.int16)
    fix = "use targets.to(torch.int64)" if narrow else "targets are ids of tokens"
    check_dtype("targets", targets, (torch.int64, torch.int32), fix)


def check_targets(targets: torch.Tensor, rows: torch.Tensor, whose: str) -> None:
    """Check that there is one id for each row ``[..., D]`` of the logits or hidden states."""
    check_ids_of_tokens(targets)
    check_shape("targets", targets, rows.shape[:-1], f"[...] (that of {whose} without its last dimension)")
    check_device("targets", targets, rows.device, whose)


def check_of_rows(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int],
    device: torch.device,
    whose: str,
    integers: bool = False,
    fix: str = "",
) -> None:
    """Check that the tensor has one number for each row, and is a constant of the differentiation."""
    if not integers:
        check_floating(name, tensor)
    check_shape(name, tensor, shape, f"[...] (that of {whose})", fix)
    check_device(name, tensor, device, whose)
    check(
        not tensor.requires_grad and not has_tangent(tensor),
        "{0}: it is a constant of the differentiation but has a gradient; pass {0}.detach()",
        name,
    )


@examines
def support_floor(
    logits: torch.Tensor,
    temperature: float | torch.Tensor = 1.0,
    *,
    top_k: int | torch.Tensor | None = None,
    top_p: float | torch.Tensor | None = None,
    min_p: float | torch.Tensor | None = None,
) -> torch.Tensor:
    """The least logit of each row that a sampler with these settings can draw: the argument ``support_floor`` of
    :func:`~hpo_core.token_logprobs`.

    The settings act in the order of vLLM. With ``p = softmax(logits / temperature)``, min-p leaves the tokens with
    ``p_j >= min_p max_i p_i``; top-k leaves the k greatest of them; top-p leaves a token of these if the tokens before
    it, in descending order, have less than the share ``top_p`` of their probability. The greatest logit is always left.
    Equal logits are left together: a sampler that breaks ties by position draws from a smaller support.

    Traps: of ranks that share a vocabulary, the columns of one have another floor than whole rows, without an error.

    Args:
        logits: ``[..., V]`` float32, bfloat16, float16 or float64, of any strides.
        temperature: as in :func:`~hpo_core.token_logprobs`, a number or ``[...]``, one for each row of logits.
        top_k: an integer, or ``[...]`` int64 or int32. None, 0 and -1 are off, and so is V or more.
        top_p: a number above 0 and up to 1, or ``[...]`` floating point. None and 1 are off.
        min_p: a number from 0 to 1, or ``[...]`` floating point. None and 0 are off.

    Returns:
        ``[...]`` float32 (float64 for float64 logits), exactly a logit of the row, and a constant of the
        differentiation; -inf if every setting is None or a number that is off, and the least logit where others, such
        as ``top_k=V``, leave every token; NaN where the row holds NaN or +inf, or -inf only, unless all are off. Rows
        are processed 2^22 logits at a time, in no more than 256 MiB (384 for float64), with probabilities in float64.
        ``min_p`` and an integer ``top_k`` need no sort; the CPU sorts only rows with a support beyond their 1024
        greatest logits.

    Raises:
        ValueError: a value is not allowed. A tensor on a GPU is not read: such a value makes its floor NaN.

    Source: ``Sampler`` and ``apply_top_k_top_p`` of vLLM (``vllm/v1/sample``).

    >>> logits = torch.tensor([[3.0, 2.0, 1.0, 0.0], [0.5, 0.5, 0.5, -4.0]])
    >>> support_floor(logits, top_k=2), support_floor(logits, 2.0, top_p=0.7)
    (tensor([2.0000, 0.5000]), tensor([2.0000, 0.5000]))
    """
    check_logits(logits, logit_types(True))
    given: list[Any] = []
    for (setting, off), value in zip(_SETTINGS.items(), (temperature, top_k, top_p, min_p), strict=True):
        if value is None and setting is not _TEMPERATURE:
            value = off
        value = setting.of_rows(value, logits.shape[:-1], logits.device, "rows of logits", exact=True)
        setting.check_values(value)
        given += (value, off) if isinstance(value, torch.Tensor) else (None, value)
    # A graph would have a copy of the loop for each number of chunks.
    run: Any = OPERATORS.support_floor if torch.compiler.is_compiling() else _support_floor
    floors: torch.Tensor = run(logits.detach(), *given)
    return floors


# Each setting, and a value that leaves every token.
_SETTINGS: dict[Setting, float] = {_TEMPERATURE: 1.0, _TOP_K: 0, _TOP_P: 1.0, _MIN_P: 0.0}


def _given(arguments: Sequence[Any]) -> Iterator[tuple[Setting, Any, Any]]:
    """Each setting with its tensor, which may be None, and its number."""
    return zip(_SETTINGS, arguments[::2], arguments[1::2], strict=True)


def _support_floor(logits: torch.Tensor, *arguments: Any) -> torch.Tensor:
    floors = _empty(logits).fill_(-math.inf)
    settings = {
        setting: number if each is None else each
        for setting, each, number in _given(arguments)
        if each is not None or not setting.is_off(number)
    }
    if len(settings) == 1:  # the temperature alone leaves every token
        return floors
    rows, flat, count = logits[None], floors.view(-1), max(1, _CHUNK // logits.shape[-1])
    for begin in range(0, flat.numel(), count):
        at = torch.arange(begin, min(begin + count, flat.numel()), device=logits.device)
        part = {
            setting: value.flatten()[at, None] if isinstance(value, torch.Tensor) else value
            for setting, value in settings.items()
        }
        flat[begin : begin + count] = _floors(rows[_places(at, (1, *floors.shape))], part)
    for setting, value in settings.items():
        if isinstance(value, torch.Tensor):
            floors.masked_fill_(~setting.is_allowed(value), math.nan)
    return floors


def _empty(logits: torch.Tensor, *_: Any) -> torch.Tensor:
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return logits.new_empty(logits.shape[:-1], dtype=dtype)


def _check_operands(logits: torch.Tensor, *arguments: Any) -> None:
    check_logits(logits, logit_types(True))
    for setting, each, number in _given(arguments):
        setting.check_values(number)
        dtype = torch.int64 if setting.kind is Integral else torch.float64
        check_operand(f"{setting.name}s", each, logits.shape[:-1], (dtype,), ("logits", logits), "rows of logits")


register(
    "support_floor(Tensor logits, Tensor? temperatures, float temperature, Tensor? top_ks, SymInt top_k, "
    "Tensor? top_ps, float top_p, Tensor? min_ps, float min_p) -> Tensor",
    _support_floor,
    _empty,
    _check_operands,
    strided=("logits",),
)


def _places(at: torch.Tensor, shape: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """The index in each dimension of these flat indices. (``torch.unravel_index`` imports SymPy, for a second.)"""
    places: list[torch.Tensor] = []
    for size in reversed(shape):
        places, at = [at % size, *places], at // size
    return tuple(places)


def _floors(logits: torch.Tensor, settings: dict[Setting, Any]) -> torch.Tensor:
    """The floors of a few rows ``[R, V]``; settings are numbers or ``[R, 1]``."""
    top_k, vocabulary = settings.get(_TOP_K), logits.shape[-1]
    if isinstance(top_k, int):
        return _floors_among(logits, logits.topk(min(top_k, vocabulary)).values, settings)[0]
    if top_k is None and _TOP_P not in settings:
        return _floors_among(logits, logits, settings)[0]
    if vocabulary <= _FEW or not logits.is_cpu or is_traced(logits):  # reading a result would synchronise
        return _floors_among(logits, logits.sort(descending=True).values, settings)[0]
    floors, is_enough = _floors_among(logits, logits.topk(_FEW).values, settings)
    rest = ~is_enough.flatten()
    if rest.any():
        of_rest = {
            setting: value[rest] if isinstance(value, torch.Tensor) else value for setting, value in settings.items()
        }
        floors[rest] = _floors_among(logits[rest], logits[rest].sort(descending=True).values, of_rest)[0]
    return floors


def _floors_among(
    logits: torch.Tensor, greatest: torch.Tensor, settings: dict[Setting, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The floors ``[R]`` from the greatest logits ``[R, K]``, and whether these hold the whole support ``[R, 1]``.

    The greatest logits are in descending order, except for min-p alone, which needs no order. The second result counts
    only where there are other logits which no integer ``top_k`` rules out.
    """
    temperature, top_k, top_p = settings[_TEMPERATURE], settings.get(_TOP_K), settings.get(_TOP_P)
    top, count = greatest.amax(-1, keepdim=True), greatest.shape[-1]
    last = greatest[:, -1:]
    if isinstance(top_k, torch.Tensor):
        last = torch.where(_TOP_K.is_off(top_k), -math.inf, greatest.gather(-1, (top_k - 1).clamp(0, count - 1)))

    def left_by_top_k(candidates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights = ((candidates.double() - top.double()) / temperature).exp()
        left = weights >= settings.get(_MIN_P, 0.0)
        if top_k is not None:
            left &= candidates >= last
        return left, torch.where(left, weights, 0.0)

    left, weights = left_by_top_k(greatest)
    if top_p is not None:
        total = left_by_top_k(logits)[1].sum(-1, keepdim=True)
        # On a GPU PyTorch adds floats in a fixed order where it scans several rows, but in none that is fixed for one.
        left &= (weights.cumsum(-1) - weights < top_p * total) | _TOP_P.is_off(top_p)
    least = torch.where(left, greatest, math.inf).amin(-1)
    is_enough = ~left[:, -1:] & (True if top_k is None else top_k <= count)
    return torch.where(top.squeeze(-1).isfinite(), least, math.nan), is_enough


def among_ids(logits: torch.Tensor, targets: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits of these ids ``[..., K]``, and the index of the targets among them.

    The logits ``[..., K + 1]`` are in ascending order of ids. A repetition of an id gets -inf, and so does the last
    element, which stands for every other token. An id outside the vocabulary makes NaN, except -1, which is padding.
    The index of a target that is none of the ids is K, that of a target outside the vocabulary -1.
    """
    vocabulary, ids = logits.shape[-1], ids.sort().values
    is_new = torch.nn.functional.pad(ids[..., 1:] != ids[..., :-1], (1, 0), value=True)
    is_known = (ids >= 0) & (ids < vocabulary)
    gathered = logits.gather(-1, torch.where(is_known, ids, 0))
    gathered = gathered.masked_fill(~(is_known & is_new), -math.inf).masked_fill(~is_known & (ids != -1), math.nan)
    place = torch.searchsorted(ids.contiguous(), targets[..., None].contiguous())  # K where all ids are smaller
    is_there = ids.gather(-1, place.clamp(max=ids.shape[-1] - 1)) == targets[..., None]
    place = torch.where(is_there, place, ids.shape[-1]).squeeze(-1)
    is_target = (targets >= 0) & (targets < vocabulary)
    return torch.nn.functional.pad(gathered, (0, 1), value=-math.inf), torch.where(is_target, place, -1)
