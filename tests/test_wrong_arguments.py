"""Every public function gets each of its tensors in a wrong form: it names the argument, or its result is right.

The walk runs in a process of its own, so that a crash is a result like any other.
"""

import inspect
import json
import math
import os
import re
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensor
from valid_calls import Call, calls, public_functions, takes_tensors, tensors_of

import hpo_core as hpo
from hpo_core.advantages import Term
from hpo_core.batch import PackedBatch
from hpo_core.entropy import AresPenalty, AresTargets, PivotState, WindowState, d3s_schedule, epo_phase

Place = tuple[Any, ...]  # the path of a tensor: an argument, and the keys and indices inside it
Made = tuple[Any, Any]  # a wrong argument, and the right one with the same meaning, or None

_NO_TENSORS = {"hpo_core.advantages.distributed.over_ranks"}  # takes an estimator, which is walked itself


def test_every_public_function_has_a_valid_call():
    known = {call.name for call in calls()} | _NO_TENSORS
    unknown = [name for name, function in public_functions() if takes_tensors(function) and name not in known]
    assert unknown == [], "give them arguments in tests/valid_calls.py, operators in tests/valid_operators.py"


def test_every_tensor_that_a_public_function_takes_is_in_a_valid_call():
    given = {(call.name, name) for call in calls() for name, value in call.arguments.items() if value is not None}
    named = {name for name, _ in given}
    missing = [
        (name, parameter.name)
        for name, function in public_functions()
        if name in named and not name.startswith("torch.ops")
        for parameter in inspect.signature(function).parameters.values()
        if "Tensor" in str(parameter.annotation) and "Callable" not in str(parameter.annotation)
        if parameter.kind is not parameter.VAR_KEYWORD and (name, parameter.name) not in given
    ]
    assert missing == [], "give them in tests/valid_calls.py"


@pytest.mark.parametrize("call", calls(), ids=lambda call: call.name.removeprefix("hpo_core."))
def test_valid_calls_are_valid(call):
    call.run()


WALKS = [
    ("cpu", 4),
    *(pytest.param(name, 1, marks=pytest.mark.long) for name in ("cpu", "cuda_emulated", "reference", "triton")),
]


@pytest.mark.parametrize(("default", "stride"), WALKS)
def test_wrong_arguments_are_named_or_harmless(default, stride):
    """``default``: the backend of calls that name none. In every run an argument meets each kind of what is wrong that
    its function has a check for, and one of ``stride`` of the others: what examines them is the same for all."""
    if not hpo.backends()[default]:
        pytest.skip(f"{default} is not available")
    if "HPO_CORE_WHOLE_WALK" in os.environ:  # under sanitizers
        stride = 1
    outcomes = walk(default, stride)
    assert len(outcomes) > 15_000
    assert [f"{where}: {how}" for where, how in outcomes.items() if not how.startswith(("right", "named"))] == []


@pytest.mark.parametrize(
    ("name", "argument", "kind"),
    [
        ("hpo_core.advantages.flat.grpo", "group_ids", "freed"),
        ("hpo_core.advantages.hierarchical.gigpo", "positions", "meta"),
        ("torch.ops.hpo_core.row_counts", "mask", "shorter"),
        ("EntropyWindow.fit_score", "score", "float64"),
    ],
)
def test_some_steps_of_the_walk_in_this_process(name, argument, kind):
    call = next(call for call in calls() if call.name == name)
    assert _outcome(call, (argument,), kind, _WRONG[kind]).startswith(("right", "named"))


# ------------------------------------------------------------------------------------------- numbers, names, functions

NOT_NUMBERS = ("0.2", "20%", [0.2], torch.tensor([0.2, 0.3]), {"low": 0.2}, torch.add)


def number_parameters():
    """Every parameter of a public function that is a number or a bool, with a valid call of the function."""
    valid = {call.name: call for call in calls() if isinstance(call.function, type(lambda: 0))}
    for name, function in public_functions():
        if not inspect.isfunction(function):
            continue
        parameters = list(inspect.signature(function).parameters.values())
        alone = all(each.default is not each.empty or each.annotation == "float" for each in parameters)
        if name not in valid and not alone:
            continue
        call = valid.get(name) or Call(
            name, function, {each.name: 0.5 for each in parameters if each.default is each.empty}
        )
        for each in parameters:
            kinds = ("float", "int", "float | None", "int | None", "tuple[float, float]", "tuple[int, int]", "bool")
            if each.annotation in kinds:
                yield pytest.param(call, each.name, id=f"{name.removeprefix('hpo_core.')}-{each.name}")


@pytest.mark.parametrize(("call", "name"), list(number_parameters()))
def test_an_argument_that_is_no_number_is_named(call, name):
    for wrong in NOT_NUMBERS:
        with pytest.raises(TypeError, match=rf"^{name}\b") as caught:
            call.run(call.arguments | {name: wrong})
        message = str(caught.value)
        assert ": expected " in message and ", got " in message and message.count("\n") < 3 and len(message) < 400


def test_there_are_many_numbers():
    assert len(list(number_parameters())) > 150


# ------------------------------------------------------------------------------------------------------------ the walk


def walk(backend: str, stride: int = 1) -> dict[str, str]:
    """The outcome of every wrong argument: ``right``, ``named``, ``silent``, ``unnamed`` or ``crash``."""
    outcomes: dict[str, str] = {}
    environment = os.environ | {"HPO_CORE_BACKEND": backend}
    while True:
        command = [sys.executable, __file__, str(len(outcomes)), str(stride)]
        worker = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        begun = ""
        for line in worker.stdout.splitlines():
            if line.startswith("[Gloo]"):  # of torch 2.10, which prints what ranks it connects
                continue
            where, how = json.loads(line)
            begun = where
            if how != "begun":
                outcomes[where], begun = how, ""
        if worker.returncode == 0:
            return outcomes
        assert begun, worker.stderr
        outcomes[begun] = f"crash: {worker.returncode}"


def _work(skip: int, stride: int) -> None:
    warnings.simplefilter("ignore")
    if os.environ["HPO_CORE_BACKEND"] == "triton":
        from interpreter import patch_interpreter

        patch_interpreter()
    _start_distributed()
    number = places = 0
    for at, call in enumerate(calls()):
        for place in _places(call.arguments):
            places += 1
            for index, (kind, make) in enumerate(_WRONG.items()):
                if kind not in _CHECKED_BY_EACH and (index + places) % stride:
                    continue
                if not _applies(kind, _get(call.arguments, place)) or _is_allowed(call, place, kind):
                    continue
                number += 1
                if number > skip:
                    where = f"{at} {call.name}({'.'.join(map(str, place))}: {kind})"
                    print(json.dumps((where, "begun")), flush=True)
                    print(json.dumps((where, _outcome(call, place, kind, make))), flush=True)


def _outcome(call: Call, place: Place, kind: str, make: Callable[[torch.Tensor], Made]) -> str:
    original = _get(call.arguments, place)
    try:
        wrong, meaning = make(original)
    except (AssertionError, IndexError, RuntimeError, TypeError, ValueError):  # the tensor has no such variant
        return "right: impossible"
    try:
        got = call.run(_with(call.arguments, place, wrong))
    except Exception as error:
        return "named" if _is_named(call, place, error) else f"unnamed: {type(error).__name__}: {error}"
    if kind in ("meta", "fake"):  # a tensor without values allows a comparison of shapes only
        shapes = all(tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in tensors_of(got))
        return "right" if shapes else f"silent: {tensors_of(got)}"
    if meaning is None:
        is_free = place[0] in call.free or (kind == "None" and call.is_optional(place[0]))
        return "right: a shape of its own" if is_free else f"silent: {tensors_of(got)}"
    expected = tensors_of(call.run(_with(call.arguments, place, meaning)))
    try:
        same = [_is_same(one, other) for one, other in zip(tensors_of(got), expected, strict=True)]
    except (RuntimeError, ValueError):  # the results cannot be compared
        same = [False]
    return "right" if all(same) else f"silent: {tensors_of(got)} for {expected}"


def _is_named(call: Call, place: Place, error: Exception) -> bool:
    """Whether the error names the wrong argument; if two shapes or values do not fit together, either name is right."""
    of_distributed = str(error).startswith("Cannot find device mesh")  # of torch 2.10, where it is a ValueError
    if call.name.startswith("torch.ops.") and (isinstance(error, RuntimeError | AssertionError) or of_distributed):
        return call.name.removeprefix("torch.ops.") in str(error).replace("::", ".")  # the dispatcher names operators
    if isinstance(error, AssertionError):
        return call.name.endswith("assert_within_budget")  # the difference is its finding
    names = {step for step in place if isinstance(step, str)} | ({"mask"} if place == ("batch",) else set())
    if isinstance(error, ValueError):
        names |= {*call.arguments, *getattr(_get(call.arguments, place[:-1]), "_fields", ()), *_OF_PARTS}
    return isinstance(error, TypeError | ValueError) and any(re.search(rf"\b{name}\b", str(error)) for name in names)


# Words of errors for a part of an argument: a batch's mask, the device that no backend serves.
_OF_PARTS = ("mask", "backend")


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if isinstance(one, FakeTensor):
        return False
    rounding = torch.finfo(one.dtype).eps if one.dtype in (torch.float16, torch.bfloat16) else 1e-6  # its own
    return one.shape == other.shape and torch.allclose(one.double(), other.double(), rounding, 1e-6, equal_nan=True)


def _applies(kind: str, original: Any) -> bool:
    if not isinstance(original, torch.Tensor):
        return kind in _OF_ANYTHING
    return kind not in _OF_FLOATS or original.is_floating_point()


def _is_allowed(call: Call, place: Place, kind: str) -> bool:
    """Whether None, a number or a list is a valid argument there, or a tensor of no dimension for one of ``[1]``."""
    if kind == "of one dimension less":
        return place[-1] == "threshold" and not call.name.startswith("torch.ops.")
    if kind == "None":
        holder = _get(call.arguments, place[:-1]) if len(place) > 1 else None
        is_operator = call.name.startswith("torch.ops.")
        return isinstance(holder, Term) or (call.is_optional(place[0]) and not is_operator)
    if call.kind_of(place[0]) == "Total":
        return kind in ("None", "number")
    return kind in ("list", "numpy") and "Sequence[int]" in call.kind_of(place[0])


# ------------------------------------------------------------------------------------------- tensors among arguments


def _places(given: Any, place: Place = ()) -> Iterator[Place]:
    if isinstance(given, torch.Tensor) or (isinstance(given, PackedBatch) and place != ("self",)):
        yield place
    elif isinstance(given, WindowState):  # the other fields are not read
        yield (*place, "threshold")
    elif isinstance(given, tuple) and hasattr(given, "_fields"):
        for name in given._fields:
            if isinstance(given, PivotState) and name == "deviation":  # read by one formula only
                continue
            yield from _places(getattr(given, name), (*place, name))
    elif isinstance(given, list | tuple):
        for at, each in enumerate(given):
            yield from _places(each, (*place, at))
    elif isinstance(given, dict):
        for name, each in given.items():
            yield from _places(each, (*place, name))


def _get(given: Any, place: Place) -> Any:
    for step in place:
        given = getattr(given, step) if hasattr(given, "_fields") else given[step]
    return given


def _with(given: Any, place: Place, new: Any) -> Any:
    """The arguments with another value at a place."""
    if not place:
        return new
    step, *rest = place
    changed = _with(_get(given, (step,)), tuple(rest), new)
    if hasattr(given, "_fields"):
        return given._replace(**{step: changed})
    if isinstance(given, dict):
        return {**given, step: changed}
    return type(given)(changed if at == step else each for at, each in enumerate(given))


# ----------------------------------------------------------------------------------------------------- wrong arguments


class PlainSubclass(torch.Tensor):
    """A subclass with memory of its own, and nothing else."""


class Wrapper(torch.Tensor):
    """A subclass without memory: another tensor holds the numbers."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        unwrapped = torch.utils._pytree.tree_map_only(cls, lambda wrapper: wrapper.inner, (args, kwargs or {}))
        return function(*unwrapped[0], **unwrapped[1])


def _as(dtype: torch.dtype) -> Callable[[torch.Tensor], Made]:
    return lambda tensor: (tensor.to(dtype), tensor.to(dtype).to(tensor.dtype))


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    """The values with stride 2."""
    wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1]), 77, device="cpu").to(tensor.dtype)
    wide[..., ::2] = tensor
    return wide[..., ::2]


def _negated(tensor: torch.Tensor) -> torch.Tensor:
    return torch.complex(torch.zeros_like(tensor), -tensor).conj().imag


def _freed(tensor: torch.Tensor) -> torch.Tensor:
    freed = tensor.clone()
    freed.untyped_storage().resize_(0)
    return freed


def _start_distributed() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)


def _distributed(tensor: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    return DTensor.from_local(tensor, init_device_mesh("cpu", (1,)), [Replicate()])


def _asynchronous(tensor: torch.Tensor) -> torch.Tensor:
    from torch.distributed import _functional_collectives as collectives

    return collectives.all_gather_tensor(tensor, 0, torch.distributed.group.WORLD)


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    from torch._subclasses import FakeTensorMode

    return FakeTensorMode().from_tensor(tensor)


_DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool", "complex64")
_WRONG: dict[str, Callable[[torch.Tensor], Made]] = {
    **{dtype: _as(getattr(torch, dtype)) for dtype in _DTYPES},
    "meta": lambda tensor: (tensor.to("meta"), tensor),
    "longer": lambda tensor: (torch.cat((tensor, tensor[-1:])), None),
    "shorter": lambda tensor: (tensor[:-1], None),
    "empty": lambda tensor: (tensor[:0], None),
    "of one more dimension": lambda tensor: (tensor[None], None),
    "of one dimension less": lambda tensor: (tensor[0], None),
    "strided": lambda tensor: (_strided(tensor), tensor),
    "expanded": lambda tensor: (tensor[:1].expand(tensor.shape), tensor[:1].expand(tensor.shape).contiguous()),
    "negated": lambda tensor: (_negated(tensor), tensor),
    "zeros without memory": lambda tensor: (
        torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype, device="cpu"),
        torch.zeros_like(tensor),
    ),
    "freed": lambda tensor: (_freed(tensor), tensor),
    "sparse": lambda tensor: (tensor.to_sparse(), tensor),
    "nested": lambda tensor: (torch.nested.nested_tensor([tensor]), tensor),
    "jagged": lambda tensor: (torch.nested.nested_tensor([tensor], layout=torch.jagged), tensor),
    "quantised": lambda tensor: (torch.quantize_per_tensor(tensor, 0.125, 0, torch.qint8), tensor),
    "of another library": lambda tensor: (tensor.to_mkldnn(), tensor),
    "a plain subclass": lambda tensor: (tensor.as_subclass(PlainSubclass), tensor),
    "a parameter": lambda tensor: (torch.nn.Parameter(tensor), tensor),
    "of a graph": lambda tensor: (tensor.clone().requires_grad_() * 1, tensor),
    "a wrapper": lambda tensor: (Wrapper(tensor), tensor),
    "distributed": lambda tensor: (_distributed(tensor), tensor),
    "asynchronous": lambda tensor: (_asynchronous(tensor), tensor),
    "fake": lambda tensor: (_fake(tensor), tensor),
    "list": lambda tensor: (tensor.tolist(), tensor),
    "numpy": lambda tensor: (tensor.numpy(), tensor),
    "None": lambda _: (None, None),
    "string": lambda _: ("0.5", None),
    "number": lambda _: (0.5, None),
    "function": lambda _: (len, None),
}  # fmt: skip
_CHECKED_BY_EACH = (*_DTYPES, "meta", "longer", "shorter", "empty", "of one more dimension", "of one dimension less")
_OF_ANYTHING = ("string", "number", "function", "None")
_OF_FLOATS = ("negated", "quantised", "of another library", "a parameter", "of a graph")


WITHOUT_TENSORS = [
    Call("epo_phase", epo_phase, {"step": 1.0, "steps": 120.0}),
    Call("d3s_schedule", d3s_schedule, {"progress": 0.5, "first": (4, "0.1"), "last": (8, "0.5")}),
    Call("AresPenalty.start", AresPenalty.start, {"buckets": 2}),
    Call("AresTargets.start", AresTargets.start, {}),
]


def floats() -> Iterator[tuple[Call, str, int | None]]:
    """The float arguments of methods, and the places in their pairs of floats."""
    methods = ("hpo_core.advantages", "hpo_core.entropy", "hpo_core.gates")
    for call in (*WITHOUT_TENSORS, *(each for each in calls() if each.name.startswith(methods))):
        for name, each in inspect.signature(call.function).parameters.items():
            if each.annotation == "tuple[float, float]":
                yield from ((call, name, at) for at in (0, 1))
            elif "float" in each.annotation.split(" | "):
                yield call, name, None


FLOATS = list(floats())


@pytest.mark.parametrize(
    ("call", "name", "at"), FLOATS, ids=[f"{call.function.__name__}-{name}-{at}" for call, name, at in FLOATS]
)
def test_a_number_beyond_float32_is_refused_by_name_or_changes_no_number_to_infinity(call, name, at):
    usual = inspect.signature(call.function).parameters[name].default
    valid = tensors_of(call.run())
    for number in (math.inf, -math.inf, 1e39, -1e39, 1e300, -1e300):
        given = number
        if at is not None:
            given = list(call.arguments.get(name, usual))
            given[at] = number
        try:
            found = tensors_of(call.run(call.arguments | {name: given}))
        except (TypeError, ValueError) as error:
            message = rf"(\w+, )?{name}(\[{at}\])?(, \w+)?: expected .*, got .*{re.escape(str(number))}"
            assert re.match(message, str(error)), error
        else:  # an epsilon of inf is no bound
            judge = torch.isnan if number == math.inf and name.startswith("eps_") else lambda x: ~x.isfinite()
            assert all(torch.equal(judge(one), judge(other)) for one, other in zip(found, valid, strict=True)), given


def test_there_are_many_floats():
    assert len(FLOATS) > 250


if __name__ == "__main__" and sys.argv[1] == "report":
    found = walk(sys.argv[2])
    print(Counter(how.split(":")[0] for how in found.values()), "functions:", len({call.name for call in calls()}))
    Path("walk.json").write_text(json.dumps(found, indent=1))
elif __name__ == "__main__":
    _work(*map(int, sys.argv[1:]))
