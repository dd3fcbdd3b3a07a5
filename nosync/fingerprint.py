"""Fingerprints: what a stage computes, as a short hash that is the same in every process.

A function's fingerprint covers its bytecode, constants, names, defaults, what it closes over, and, in the same way, the
functions and constants that it refers to by global name. Line numbers, comments and docstrings do not count.
Two versions of Python compile to different bytecode: pass `version=` to a stage to vouch for its code yourself.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from typing import Any

from blake3 import blake3

FINGERPRINT_HEX_DIGITS = 16
_SIMPLE = (str, bytes, int, float, complex, bool, type(None))


def fingerprint(*parts: Any) -> str:
    """A stable hash of nested tuples, lists, mappings, simple values, functions and anything with a stable repr."""
    hasher = blake3()
    _feed(hasher, parts, set())
    digest: str = hasher.hexdigest(length=FINGERPRINT_HEX_DIGITS // 2)
    return digest


def _feed(hasher: Any, value: Any, seen: set[int]) -> None:
    if isinstance(value, _SIMPLE):
        hasher.update(f"{type(value).__name__}:{value!r};".encode())
        return
    if id(value) in seen:  # recursion: the name that led here says enough
        hasher.update(b"again;")
        return
    seen = seen | {id(value)}
    hasher.update(f"{type(value).__name__}(".encode())
    for part in _parts(value):
        _feed(hasher, part, seen)
    hasher.update(b");")


def _parts(value: Any) -> list[Any]:
    if isinstance(value, tuple | list):
        return list(value)
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    if isinstance(value, Mapping):
        return [item for pair in value.items() for item in pair]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, types.FunctionType):
        return _function_parts(value)
    if isinstance(value, types.CodeType):
        return _code_parts(value)
    if isinstance(value, types.ModuleType):
        return [value.__name__]
    if isinstance(value, type) or callable(value):
        name = [getattr(value, "__module__", ""), getattr(value, "__qualname__", type(value).__qualname__)]
        state = getattr(value, "__dict__", None)
        return [*name, dict(sorted(state.items()))] if isinstance(state, dict) else name
    return [repr(value)]


def _function_parts(function: types.FunctionType) -> list[Any]:
    closure = [cell.cell_contents for cell in function.__closure__ or () if _is_set(cell)]
    globals_used = {
        name: function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__
    }
    return [function.__code__, function.__defaults__, function.__kwdefaults__ or {}, closure, globals_used]


def _is_set(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _names(code: types.CodeType) -> list[str]:
    """The global names that a function and the functions inside it refer to."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= set(_names(constant))
    return sorted(names)


def _code_parts(code: types.CodeType) -> list[Any]:
    constants = list(code.co_consts)
    if constants and isinstance(constants[0], str) and constants[0] not in code.co_names:
        constants[0] = None  # where a docstring is kept
    return [code.co_code, constants, code.co_names, code.co_varnames, code.co_argcount, code.co_flags]
