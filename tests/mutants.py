"""How mutants are made: all those of a C++ or CUDA backend in one library, each behind a number.

A substitution in the sources becomes a choice at run time, between the text as it is and the text with the bug, by
``hpo_mutant``, which the library exports: the number of one mutant, or 0 for none. Triton's mutants are patched copies
of the package. Those of Python are functions that have other code for a while.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import hashlib
import importlib
import importlib.util
import inspect
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import pytest
from compiled import locked
from lazily import script

import hpo_core
from hpo_core.native import Native

backends = importlib.import_module("hpo_core.backends")  # hpo_core.backends is the function

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "csrc"
TRITON = ROOT / "kernels/hpo_triton"
PACKAGE = Path(hpo_core.__file__).parent
BUILT = ROOT / "build/native" / sysconfig.get_config_var("SOABI")
LIBRARIES = ROOT / "build/mutants"

# The objects that are compiled again; the rest is linked as the build has left it.
UNITS = {
    "cpu": sorted(f"cpu/{path.name}" for path in SOURCES.glob("cpu/*.cpp") if path.name != "dispatch.cpp"),
    "cuda_emulated": sorted(f"cuda/{path.name}" for path in SOURCES.glob("cuda/*.cu")),
}
# Nothing is optimised: the tests that kill take less time than the compiler would.
COMPILER = (*shlex.split(os.environ.get("CXX", "g++")), "-std=c++17", "-fPIC", "-fvisibility=hidden", "-O0", "-w")
INCLUDES = ("-ffp-contract=off", "-include", "switch.h", "-Icsrc/include")
FLAGS = {
    "cpu": ("-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-DHPO_ISA=generic", "-DHPO_QUICK_TO_COMPILE"),
    "cuda_emulated": ("-DHPO_EMULATE", "-Icsrc/emulation", "-x", "c++"),
}
SWITCH = {
    "switch.h": 'extern "C" __attribute__((visibility("default"))) int hpo_mutant;\n',
    "switch.cpp": "int hpo_mutant = 0;\n",
}


class Mutant(NamedTuple):
    backend: str
    file: str  # of csrc, of the Triton package, or of hpo_core
    # In C++ and CUDA an expression, or statements up to their semicolon: they declare nothing and follow no `if (...)`.
    before: str
    after: str
    killer: str  # module.test
    arguments: dict[str, Any]


def place_of(mutant: Mutant, text: str) -> int:
    count = text.count(mutant.before)
    assert count == 1, f"the mutant is out of date: {mutant.before!r} occurs {count} times in {mutant.file}"
    return text.index(mutant.before)


def switched(number: int, before: str, after: str) -> str:
    if before.endswith(";"):
        return f"{{ if (hpo_mutant == {number}) {{ {after} }} else {{ {before} }} }}"
    return f"(hpo_mutant == {number} ? ({after}) : ({before}))"


def with_switches(text: str, mutants: dict[int, Mutant]) -> str:
    """The text of a file with all its mutants, each behind its number."""
    end = len(text)
    for place, number in sorted(((place_of(mutant, text), number) for number, mutant in mutants.items()), reverse=True):
        mutant = mutants[number]
        following = place + len(mutant.before)
        assert following <= end, f"{mutant.before!r} in {mutant.file} overlaps with another mutant"
        text, end = text[:place] + switched(number, mutant.before, mutant.after) + text[following:], place
    return text


def sources_of(mutants: dict[int, Mutant]) -> dict[str, str]:
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in sorted(SOURCES.rglob("*")) if path.is_file()}
    for file in sorted({mutant.file for mutant in mutants.values()}):
        of_file = {number: mutant for number, mutant in mutants.items() if mutant.file == file}
        texts[f"csrc/{file}"] = with_switches(texts[f"csrc/{file}"], of_file)
    return texts | SWITCH


def library(backend: str, mutants: dict[int, Mutant]) -> Path:
    """The extension with these mutants. It is built once for what sources, compiler and flags are now."""
    variant = ".generic" if backend == "cpu" else ""
    again = {f"_{backend}.{Path(unit).stem}{variant}.o" for unit in UNITS[backend]}
    objects = [path for path in sorted(BUILT.glob(f"_{backend}.*.o")) if path.name not in again]
    sources = sources_of(mutants)
    contents = hashlib.sha256(repr((COMPILER, INCLUDES, FLAGS[backend], UNITS[backend], sources)).encode())
    contents.update(subprocess.check_output([*COMPILER, "--version"]))
    for path in objects:
        contents.update(path.read_bytes())
    folder = LIBRARIES / backend / contents.hexdigest()
    with locked(folder.with_name("lock")):
        if not folder.exists():
            for earlier in folder.parent.glob("*/"):
                shutil.rmtree(earlier)
            unfinished = folder.with_suffix(".unfinished")
            build(backend, sources, objects, unfinished)
            unfinished.rename(folder)
    return folder / f"_{backend}.so"


def build(backend: str, sources: dict[str, str], objects: list[Path], folder: Path) -> None:
    for file, text in sources.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)

    def compiled(source: str) -> Path:
        target = folder / f"{Path(source).stem}.o"
        subprocess.run((*COMPILER, *INCLUDES, *FLAGS[backend], "-c", source, "-o", target), cwd=folder, check=True)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        own = list(pool.map(compiled, ["switch.cpp", *(f"csrc/{unit}" for unit in UNITS[backend])]))
    # The linker keeps the first of an inline function's copies in several objects: those with mutants come first.
    subprocess.run((*COMPILER, "-shared", "-fopenmp", *own, *objects, "-o", folder / f"_{backend}.so"), check=True)


class Mutated:
    """A backend whose bugs are thrown by their numbers."""

    def __init__(self, backend: str, mutants: dict[int, Mutant]) -> None:
        path = library(backend, mutants)
        self._switch = ctypes.c_int.in_dll(ctypes.CDLL(str(path)), "hpo_mutant")
        # A name of its own: pybind11 gives a second module of one name the contents of the first.
        spec = importlib.util.spec_from_file_location(f"mutants._{backend}", path)
        self._module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self._module)
        self._module.description()  # the instruction set is chosen now

    def with_bug(self, number: int) -> Callable[[str], Native]:
        """Loads the ops with one bug, or with none for 0; whatever was loaded before has the same bug from now on."""
        self._switch.value = number
        return lambda op: Native(self._module, on_cuda=False)


def triton(mutant: Mutant, folder: Path) -> Callable[[str], Any]:
    """A copy of the Triton package, under another name in hpo_core, so that its imports find what they look for."""
    package = f"hpo_core._{folder.name.replace('-', '_')}"
    shutil.copytree(TRITON, folder / "triton")
    path = folder / "triton" / mutant.file
    text = path.read_text()
    place_of(mutant, text)
    path.write_text(text.replace(mutant.before, mutant.after))
    spec = importlib.util.spec_from_file_location(
        package, folder / "triton/__init__.py", submodule_search_locations=[str(folder / "triton")]
    )
    sys.modules[package] = importlib.util.module_from_spec(spec)
    return lambda op: importlib.import_module(f"{package}.{op}")


@contextlib.contextmanager
def python(mutant: Mutant) -> Iterator[None]:
    """Live functions have the bug: those of classes whose instances exist, and those of processes forked meanwhile."""
    path = PACKAGE / mutant.file
    text = path.read_text()
    place_of(mutant, text)
    with_bug = text.replace(mutant.before, mutant.after)
    pairs = zip(functions_in(text), functions_in(with_bug), strict=True)
    bugs = {sound: bug for sound, bug in pairs if sound != bug}
    modules = sum(name.startswith("hpo_core") for name in sys.modules)
    live = [each for each in functions_of_package(modules) if each.__code__.co_filename == str(path)]
    flawed = [(each, each.__code__) for each in live if each.__code__ in bugs]
    assert flawed, f"no function has the mutant {mutant.before!r} of {mutant.file}"
    forget_backends()
    for function, sound in flawed:
        function.__code__ = bugs[sound]
    try:
        yield
    finally:
        for function, sound in flawed:
            function.__code__ = sound
        forget_backends()


@functools.lru_cache(maxsize=1)
def functions_of_package(modules: int) -> list[FunctionType]:
    """Functions that are alive. A search takes a quarter of a second; with as many modules of the package it would find
    no others."""
    gc.unfreeze()  # see conftest.py
    functions = [each for each in gc.get_objects() if type(each) is FunctionType]
    gc.freeze()
    folder = str(PACKAGE)
    return [each for each in functions if each.__code__.co_filename.startswith(folder)]


def functions_in(source: str | CodeType) -> Iterator[CodeType]:
    code = compile(source, "", "exec", dont_inherit=True) if isinstance(source, str) else source
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield inner
            yield from functions_in(inner)


def forget_backends() -> None:
    """Caches made with a bug do not outlive it, nor the other way round."""
    backends._resolve.cache_clear(), backends._native.cache_clear()


# ------------------------------------------------------------------------------------------------------------- killers


def module_of_tests(name: str) -> ModuleType:
    return script(f"tests/{name}.py")


def killer(test: str, arguments: dict[str, Any]) -> Callable[[], Any]:
    """The call that kills. One that cannot be made would kill everything."""
    file, name = test.split(".")
    function = getattr(module_of_tests(file), name)
    if "native_backends" in inspect.signature(function).parameters:
        arguments = {"native_backends": [arguments["backend"]], **arguments}
        del arguments["backend"]
    inspect.signature(function).bind(**arguments)
    return functools.partial(function, **arguments)


def assert_killed(name: str, test: str, arguments: dict[str, Any]) -> None:
    kill = killer(test, arguments)
    try:
        kill()
    except (Exception, pytest.fail.Exception) as error:
        reason = " ".join(f"{type(error).__name__} {error}".split())
        print(f"{name:48} killed by {test}: {reason[:90]}")
        return
    raise AssertionError(f"the mutant {name!r} survives {test}")
