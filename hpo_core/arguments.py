"""The arguments of public functions, examined as the annotations of their parameters say."""

from __future__ import annotations

import enum
import functools
import inspect
import math
import numbers
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, fields
from typing import Any, SupportsFloat, TypeVar

import torch
import torch.distributed

from .checks import check, check_precise, examined, is_traced, keeps_doubles, require_type, shown

Function = TypeVar("Function", bound=Callable[..., Any])
Tensor = torch.Tensor
is_compiling = torch.compiler.is_compiling


class Short:
    """A dataclass whose ``repr`` has the fields that differ from the defaults, on one line that makes it again."""

    def __repr__(self) -> str:
        said = []
        for each in fields(self):  # type: ignore[arg-type]
            value = getattr(self, each.name)
            if each.repr and (each.default is MISSING or value != each.default):
                text = f"{type(value).__name__}.{value.name}" if isinstance(value, enum.Enum) else repr(value)
                said.append(text if each.default is MISSING else f"{each.name}={text}")
        return f"{type(self).__name__}({', '.join(said)})"


def examines(function: Function) -> Function:
    """The function with its tensors and numbers :func:`examined`, as the annotations of its parameters say."""

    @functools.wraps(function)
    def run(*arguments: Any, **keywords: Any) -> Any:
        if is_compiling():
            return function(*arguments, **keywords)
        return _run_examined(function, arguments, keywords)

    run.__doc__ = _pointed(function)
    return run  # type: ignore[return-value]


# Their docstrings describe the arguments that many of their functions have.
_WITH_COMMON_ARGUMENTS = ("hpo_core.advantages", "hpo_core.aggregation", "hpo_core.entropy", "hpo_core.gates")


def _pointed(function: Any) -> str | None:
    """The docstring of a function; where it leaves arguments to its package, it says so."""
    package = ".".join(function.__module__.split(".")[:2])
    doc: str | None = inspect.unwrap(function).__doc__
    if package not in _WITH_COMMON_ARGUMENTS or not doc or all(name in doc for name in parameter_names(function)):
        return doc
    return f"{inspect.cleandoc(doc)}\n\nOther arguments: :mod:`{package}`."


def constants(function: Function) -> Function:
    """The function on constants of the differentiation, in the precision of kernels: each floating-point tensor among
    the arguments, or in a list of them, in float32. The reference keeps float64. Log-probabilities in 16 bits, which
    are too coarse for differences, are an error."""
    names = parameter_names(function)

    @functools.wraps(function)
    def run(*arguments: Any, **keywords: Any) -> Any:
        backend = keywords.get("backend")
        given = [_constant_parts(name, value, backend) for name, value in zip(names, arguments, strict=False)]
        given += arguments[len(given) :]  # too many: Python says so
        return function(*given, **{name: _constant_parts(name, value, backend) for name, value in keywords.items()})

    return run  # type: ignore[return-value]


def constant(values: Tensor, backend: str | None) -> Tensor:
    """Contiguous and detached, in the precision of the backend. In 16 bits the numbers of a formula would be rounded,
    too; beside float32 statistics, values in float64 would differ from their own extrema."""
    values = values.detach()
    return (values if keeps_doubles(backend) and values.dtype == torch.float64 else values.float()).contiguous()


def _constant_parts(name: str, value: Any, backend: str | None) -> Any:
    if isinstance(value, Tensor):
        if name.endswith("logp"):
            check_precise(name, value)
        return constant(value, backend) if value.is_floating_point() else value
    if type(value) in (list, tuple):
        return type(value)(_constant_parts(name, each, backend) for each in value)
    return value


# The names of the positional parameters of each function, and the examiner of each parameter. The table is not in a
# closure, which Dynamo would inspect; the first call of a function fills it, so that an import makes few objects.
_EXAMINERS: dict[Any, tuple[tuple[str, ...], dict[str, Callable[[str, Any], Any]]]] = {}


def parameter_names(function: Any) -> tuple[str, ...]:
    """The names of the parameters of a function, or of the one that its decorators hide, without those that take any
    number. ``inspect.signature``, which builds an object for each, would be a twentieth of an import."""
    code = inspect.unwrap(function).__code__
    return tuple(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])


def _examiners_of(function: Any) -> tuple[tuple[str, ...], dict[str, Callable[[str, Any], Any]]]:
    inner = inspect.unwrap(function)
    annotations, names = inner.__annotations__, parameter_names(inner)
    examiners = {name: _examiner_of(name, str(annotations.get(name, "")), inner) for name in names}
    positional = names[: inner.__code__.co_argcount]
    _EXAMINERS[function] = positional, {name: examiner for name, examiner in examiners.items() if examiner is not None}
    return _EXAMINERS[function]


def _run_examined(function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    order, examiners = _EXAMINERS.get(function) or _examiners_of(function)
    given = [
        examiners[name](name, value) if name in examiners else value
        for name, value in zip(order, arguments, strict=False)
    ]
    named = {name: examiners[name](name, value) if name in examiners else value for name, value in keywords.items()}
    try:
        return function(*given, *arguments[len(given) :], **named)
    except ValueError as error:
        if type(error) is ValueError:  # others, of the caller's own functions, may have other arguments than a message
            as_written = dict(zip(order, arguments, strict=False)) | keywords
            error.args = (_with_numbers(function, as_written, str(error)),)
        raise


def _with_numbers(function: Any, given: dict[str, Any], message: str) -> str:
    """The message of an error. A message that names no argument of the function, but a part of its result,
    gets the numbers of the call in front: ``nft(floor=-1.0): head_numbers: expected ...``."""
    numbers = ", ".join(f"{name}={shown(value)!r}" for name, value in given.items() if _are_numbers(value))
    named = re.findall(r"\w+", message.partition(": ")[0])
    if not numbers or not (inspect.signature(function).parameters.keys() | given.keys()).isdisjoint(named):
        return message
    return f"{function.__name__}({numbers}): {message}"


def _are_numbers(value: Any) -> bool:
    each = value if isinstance(value, (tuple, list)) else (value,)
    return len(each) > 0 and all(_is_number("float", one) for one in each)


def _examiner_of(name: str, annotation: str, function: Callable[..., Any]) -> Callable[[str, Any], Any] | None:
    """The function that examines an argument with this annotation; None if nothing does."""
    if name == "self":
        return _examined_self
    kind = annotation.removesuffix(" | None")
    is_optional = kind != annotation
    if kind in _NUMBERS:
        return functools.partial(_examined_number, kind, is_optional)
    if kind in _PAIRS:
        examiner: Callable[[str, Any], Any] | None = functools.partial(_examined_pair, _PAIRS[kind])
    elif kind in _INSTANCES:
        examiner = functools.partial(_examined_instance, function, kind)
    else:
        examiner = _OF_ANNOTATION.get(kind)
    return functools.partial(_examined_if_given, examiner) if is_optional and examiner is not None else examiner


def _examined_if_given(examiner: Callable[[str, Any], Any], name: str, value: Any) -> Any:
    return None if value is None else examiner(name, value)


def _examined_by(rule: Callable[[str, Any], None], name: str, value: Any) -> Any:
    rule(name, value)
    return value


# Classes of arguments, named tuples with their tensors among them.
_INSTANCES = (
    *("GroupHistory", "WindowState", "ScopeStatistics", "PivotState", "AresTargets", "AresPenalty"),
    *("Expected", "RatioGate", "Window"),
)

_LARGEST = torch.finfo(torch.float32).max

# A bool is a number in Python, but not an argument here.
_NUMBERS: dict[str, type] = {"float": numbers.Real, "int": numbers.Integral}
_NAMES = {"float": "a number", "int": "an integer"}
_PAIRS = {"tuple[float, float]": "float", "Pair": "float", "tuple[int, int]": "int"}


def _is_number(kind: str, value: Any) -> bool:
    return isinstance(value, _NUMBERS[kind]) and not isinstance(value, bool)


def _examined_number(kind: str, is_optional: bool, name: str, value: Any) -> Any:
    if is_optional and value is None:
        return value
    if _is_number(kind, value):
        is_held = kind != "int" or -(2**63) <= value < 2**63
        check(is_held, "{}: expected an integer that 64 bits hold, as tensors have them, got {}", name, value)
        check(value == value, "{}: expected a number, got nan", name)
        return as_float(name, value) if kind == "float" else value if type(value) is int else int(value)
    one = "; pass one number"
    fixes = {str: "; write it without quotes", Tensor: "; use .item()", list: one, tuple: one}
    fix = next((fix for made, fix in fixes.items() if isinstance(value, made)), "")
    expected = _NAMES[kind] + " or None" * is_optional
    require_type(False, "{}: expected {}, got {!r}{}", name, expected, value, fix)


def as_float(name: str, number: SupportsFloat) -> float:
    """The number as a float: kernels know no number of NumPy and no fraction."""
    try:
        return float(number)
    except OverflowError:
        raise ValueError(f"{name}: expected a number that a float holds, got one beyond 1.8e308") from None


def check_number(name: str, value: Any) -> None:
    _examined_number("float", False, name, value)


def check_numbers(name: str, values: Any) -> None:
    require_type(all(_is_number("float", each) for each in values), "{}: expected numbers, got {!r}", name, values)
    for each in values:
        as_float(name, each)


def is_finite(number: float) -> bool:
    """Whether kernels, which have it in float32, hold the number."""
    return abs(number) <= _LARGEST


def check_finite(**given: float) -> None:
    """Check numbers that are factors or summands of results: others make these infinite, or NaN."""
    for name, number in given.items():
        check(is_finite(number), "{}: expected a finite number that float32 holds, got {}", name, number)


def check_all_finite(name: str, numbers: Iterable[float]) -> None:
    check_finite(**{f"{name}[{at}]": number for at, number in enumerate(numbers)})


def check_limit(name: str, limit: float, none: float = math.inf) -> None:
    """Check a number that results do not pass; ``none``: the infinite one, which is no limit."""
    is_limit = is_finite(limit) or limit == none
    check(is_limit, "{}: expected a number that float32 holds, or {} for no limit, got {}", name, none, limit)


def check_member(name: str, value: Any, kind: type[enum.Enum], or_none: bool = False) -> None:
    """Check that the value is of this enumeration: two of integers have equal values."""
    if isinstance(value, kind) or (or_none and value is None):
        return
    members = ", ".join(each.name for each in kind) + " or None" * or_none
    require_type(False, "{}: expected one of {} ({}), got {!r}", name, kind.__name__, members, value)


def check_choice(name: str, value: Any, known: Iterable[str], others: str = "") -> None:
    """Check that the value is one of these names. ``others``: other forms of the argument, for the message."""
    if not isinstance(value, str) or value not in known:
        check(False, "{}: expected one of {}{}, got {!r}", name, ", ".join(known), others, value)


def check_compat(compat: str) -> bool:
    """Whether the code of the authors is meant, where it differs from their paper."""
    check_choice("compat", compat, ("paper", "code"))
    return compat == "code"


def check_flag(name: str, value: Any) -> None:
    """Check that the value is a bool: ``"False"``, as a command line gives it, is true."""
    if isinstance(value, bool):
        return
    fix = "" if value is None else "; write it without quotes" if isinstance(value, str) else f"; use bool({name})"
    require_type(False, "{}: expected True or False, got {!r}{}", name, value, fix)


def check_pair(name: str, value: Any, meaning: str) -> None:
    is_pair = isinstance(value, tuple | list) and len(value) == 2
    require_type(is_pair, "{}: expected a pair {}, got {!r}", name, meaning, value)


def check_group(name: str, group: Any) -> None:
    """Check that this is a process group. In place of one without this process torch makes another object, which its
    collectives skip without an error."""
    if isinstance(group, torch.distributed.ProcessGroup):
        return
    fix = "pass its .get_group()" if hasattr(group, "get_group") else "call only on the ranks of the group"
    expected = "a torch.distributed.ProcessGroup that this process is in, such as torch.distributed.group.WORLD"
    require_type(False, "{}: expected {}, got {}; {}", name, expected, type(group), fix)


def _examined_pair(kind: str, name: str, value: Any) -> Any:
    check_pair(name, value, f"of {_NAMES[kind].split()[-1]}s")
    return tuple(_examined_number(kind, False, f"{name}[{at}]", each) for at, each in enumerate(value))


def _examined_tensors(name: str, value: Any) -> Any:
    check_pair(name, value, "of tensors")
    return tuple(examined(f"{name}[{at}]", each) for at, each in enumerate(value))


def _examined_parts(name: str, value: Any) -> Any:
    """An examined tensor, or a named tuple with its tensors examined; any other value is returned unchanged."""
    if isinstance(value, Tensor):
        return examined(name, value)
    if not isinstance(value, tuple) or not hasattr(value, "_fields"):
        return value
    fields = zip(value._fields, value, strict=True)
    return type(value)(*(_examined_parts(f"{name}.{field}", each) for field, each in fields))


def _examined_fields(name: str, value: Any) -> Any:
    """A named tuple with its tensors examined; a field with a default is no tensor."""
    fields, others = zip(value._fields, value, strict=True), value._field_defaults
    return type(value)(*(each if field in others else examined(f"{name}.{field}", each) for field, each in fields))


def _examined_self(name: str, value: Any) -> Any:
    return _examined_fields(name, value) if isinstance(value, tuple) else value


def _examined_integers(name: str, value: Any) -> Any:
    is_sequence = isinstance(value, Sequence) and not isinstance(value, str)
    if is_sequence or not isinstance(value, Tensor):
        fix = "pass a range" if isinstance(value, slice) else "convert it with torch.as_tensor"
        require_type(is_sequence, "{}: expected a tensor or a sequence of integers, got {}; {}", name, type(value), fix)
        return value
    value = examined(name, value)
    check(not value.is_meta or is_traced(), "{}: expected integers that can be read, got a tensor on meta", name)
    return value


def _examined_sequence(name: str, value: Any) -> Any:
    is_sequence = isinstance(value, Sequence) and not isinstance(value, str)
    require_type(is_sequence, "{}: expected a sequence, got {}", name, type(value))
    return [
        _examined_parts(f"{name}[{at}]", each) if isinstance(each, tuple) else examined(f"{name}[{at}]", each)
        for at, each in enumerate(value)
    ]


def _examined_terms(name: str, value: Any) -> Any:
    is_one = isinstance(value, tuple) and hasattr(value, "_fields")
    require_type(not is_one, "{}: expected a sequence of Term, got one; pass it in a list, [Term(...)]", name)
    return _examined_sequence(name, value)


def _examined_instance(function: Any, kind: str, name: str, value: Any) -> Any:
    expected = function.__globals__[kind]  # looked up at each call: this module cannot import the class
    got = value if inspect.isroutine(value) else type(value)
    fix = ""
    if kind == "RatioGate" and isinstance(value, str):
        fix = "; the functions of hpo_core.gates make one"
    require_type(isinstance(value, expected), "{}: expected a {}, got {}{}", name, kind, got, fix)
    return _examined_fields(name, value) if isinstance(value, tuple) else value


_OF_ANNOTATION: dict[str, Callable[[str, Any], Any]] = {
    "torch.Tensor": examined,
    "tuple[torch.Tensor, torch.Tensor]": _examined_tensors,
    "Sequence[torch.Tensor]": _examined_sequence,
    "Sequence[Term]": _examined_terms,
    "Total": _examined_parts,
    "bool": functools.partial(_examined_by, check_flag),
    "ProcessGroup": functools.partial(_examined_by, check_group),
    "torch.distributed.ProcessGroup": functools.partial(_examined_by, check_group),
    "torch.Tensor | Sequence[int]": _examined_integers,
}
