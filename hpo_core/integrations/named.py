"""Gates, windows and estimators by the text with which a trainer's configuration names them:
``"gspo(eps_low=3e-4, eps_high=4e-4)"``.

Trainers read yaml, toml, command lines and environment variables, which hold text and no Python objects. The text is
one call of a function of :mod:`hpo_core.gates`, :mod:`hpo_core.entropy` or :mod:`hpo_core.advantages`, with numbers,
strings, None, inf and further calls as arguments. Nothing else is evaluated.
"""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import math
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from .. import advantages, entropy, gates
from ..checks import check, require_type
from ..entropy import EntropyWindow
from ..gates import RatioGate

# The environment variable of trainers whose configuration has no place for a gate.
VARIABLE = "HPO_GATE"


def named_gate(text: str | RatioGate, argument: str = "gate") -> RatioGate:
    """The gate that a text names; a gate is returned as it is. Errors name ``argument``.

    >>> named_gate("icepop(0.5, 5.0, gate=dapo)").token.high[0]
    1.28
    >>> named_gate("gpso(eps_low=3e-4)")
    Traceback (most recent call last):
    ValueError: gate: no function 'gpso' in hpo_core.gates, did you mean 'gspo'? got 'gpso(eps_low=3e-4)'
    """
    gate = _made(argument, text, gates) if isinstance(text, str) else text
    expected = "{}: expected a RatioGate, or a text such as 'dapo()', got {!r}"
    require_type(isinstance(gate, RatioGate), expected, argument, text)
    return gate


def named_window(text: str | EntropyWindow) -> EntropyWindow:
    """The entropy window that a text names.

    >>> named_window("forking_tokens('0.1')").quantile
    Fraction(9, 10)
    """
    window = _made("window", text, entropy) if isinstance(text, str) else text
    require_type(isinstance(window, EntropyWindow), "window: expected a text such as 'ares()', got {!r}", text)
    return window


def named_estimator(text: str) -> Callable[..., torch.Tensor]:
    """The estimator that a text names, with the arguments of the text fixed.

    >>> rewards, groups = torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 0, 0])
    >>> named_estimator("rloo")(rewards, groups)
    tensor([ 0.5000, -1.0000,  0.5000])
    """
    function, arguments, keywords = _parts("advantage", text, _tree("advantage", text), advantages)
    check(not arguments, "advantage: expected arguments by name, as in 'grpo(eps=1e-4)', got {!r}", text)
    _check_taken("advantage", text, function, inspect.Signature.bind_partial, [], keywords)
    return functools.partial(function, **keywords) if keywords else function


def environment_gate() -> RatioGate | None:
    """The gate of the environment variable ``HPO_GATE``, or None."""
    text = os.environ.get(VARIABLE)
    return named_gate(text, VARIABLE) if text else None


def _tree(argument: str, text: str) -> ast.expr:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        raise ValueError(f"{argument}: expected one call, such as 'name(argument=1.0)', got {text!r}") from None


def _made(argument: str, text: str, package: ModuleType) -> Any:
    return _value(argument, text, _tree(argument, text), package)


def _value(argument: str, text: str, node: ast.expr, package: ModuleType) -> Any:
    if isinstance(node, ast.Name) and node.id == "inf":
        return math.inf
    if isinstance(node, ast.Call | ast.Name | ast.Attribute):
        function, arguments, keywords = _parts(argument, text, node, package)
        _check_taken(argument, text, function, inspect.Signature.bind, arguments, keywords)
        return function(*arguments, **keywords)
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ValueError(
            f"{argument}: expected numbers, strings, None, inf or calls, got {ast.unparse(node)!r} in {text!r}"
        ) from None


def _check_taken(
    argument: str,
    text: str,
    function: Callable[..., Any],
    bind: Callable[..., object],
    arguments: list[Any],
    keywords: dict[str, Any],
) -> None:
    """Check that the function takes the arguments, before it is called: an estimator is after the first rollout."""
    signature = inspect.signature(function)
    try:
        bind(signature, *arguments, **keywords)
    except TypeError as error:
        raise ValueError(
            f"{argument}: {function.__name__}: {error}; it takes {', '.join(signature.parameters)}, got {text!r}"
        ) from None


def _parts(
    argument: str, text: str, node: ast.expr, package: ModuleType
) -> tuple[Callable[..., Any], list[Any], dict[str, Any]]:
    """The function that a call or a bare name means, and its arguments."""
    name = node.func if isinstance(node, ast.Call) else node
    called = ast.unparse(name)
    if called.startswith("reconstructed.") and hasattr(package, "reconstructed"):
        package, called = package.reconstructed, called.removeprefix("reconstructed.")
    known = [each for each in package.__all__ if each.islower() and callable(getattr(package, each))]
    if called not in known:
        close = difflib.get_close_matches(called.rpartition(".")[2].lower().removeprefix("hpo_"), known, 1)
        hint = f", did you mean {close[0]!r}?" if close else ";"
        raise ValueError(f"{argument}: no function {called!r} in {package.__name__}{hint} got {text!r}")
    function: Callable[..., Any] = getattr(package, called)
    if not isinstance(node, ast.Call):
        return function, [], {}
    check(
        all(keyword.arg for keyword in node.keywords) and not any(isinstance(each, ast.Starred) for each in node.args),
        "{}: expected arguments without * and **, got {!r}",
        argument,
        text,
    )
    names = [keyword.arg for keyword in node.keywords]
    twice = next((name for name in names if names.count(name) > 1), None)
    check(twice is None, "{}: expected each argument once, got {!r} twice in {!r}", argument, twice, text)
    arguments = [_value(argument, text, each, package) for each in node.args]
    keywords = {str(keyword.arg): _value(argument, text, keyword.value, package) for keyword in node.keywords}
    return function, arguments, keywords
