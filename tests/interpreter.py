"""Triton's interpreter, twice as fast.

The interpreter replaces the functions of ``triton.language`` by its own at every call of a device function, which takes
half of its time, and never undoes the replacement of a nested call. Here each module's view of the language is patched
once per launch and restored when the launch ends. The interpreter also makes its table of types anew at every
operation, here once, and checks integers for overflow, which it reports in debug mode only, here not at all.
"""

import dataclasses
from types import SimpleNamespace

import triton.language as tl
import triton.runtime.interpreter as interpreter


def patch_once_per_launch() -> None:
    patch_language = interpreter._patch_lang
    patched = {}  # id of a module's globals -> the scope that restores them

    def restore():
        for scope in reversed(patched.values()):
            scope.restore()
        patched.clear()

    def patch_once(function):
        outermost = not patched
        if id(function.__globals__) not in patched:
            patched[id(function.__globals__)] = patch_language(function)
        return SimpleNamespace(restore=restore if outermost else lambda: None)

    interpreter._patch_lang = patch_once
    interpreter._get_np_dtype = remembered(interpreter._get_np_dtype)
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def remembered(np_dtype):
    """The function of a type with a cache per scalar."""
    known = {}

    def of(kind):
        scalar = kind.element_ty if isinstance(kind, tl.block_type) else kind
        if isinstance(scalar, tl.pointer_type):
            return np_dtype(scalar)
        if scalar.name not in known:
            known[scalar.name] = np_dtype(scalar)
        return known[scalar.name]

    return of
