"""Fingerprints: what a stage computes, as a short hash that is the same in every process.

A function's fingerprint covers its bytecode, constants, names, defaults, what it closes over, and, in the same way, the
functions, classes and data that it refers to by global name, also by the name of a module of yours (`helpers.clean`), or
that it imports from one when it runs.
Of what is installed (Python's own modules, and those in site-packages) the name counts, and not the code. Line
numbers, comments and docstrings do not count. Two versions of Python compile to different bytecode: pass `version=` to
a stage to vouch for its code yourself.
"""

from __future__ import annotations

import dis
import functools
import logging
import re
import sys
import types
from collections import defaultdict
from collections.abc import Mapping
from enum import Enum
from typing import Any

import numpy as np
import pyarrow as pa
from blake3 import blake3

from nosync.flow.imported_names import imported_by, is_installed
from nosync.flow.module_names import name_in_fingerprints
from nosync.flow.pickled_function import PickledFunction
from nosync.lsm.errors import FlowError

FINGERPRINT_HEX_DIGITS = 16
_SIMPLE = (str, bytes, int, float, complex, bool, type(None))
_ARROW = (pa.Array, pa.ChunkedArray, pa.RecordBatch, pa.Table)
_SAY_ALL = ("pyspark", "typing")
"""Packages whose objects say in their text all that they hold, though they have fields."""
_ADDRESS = re.compile(r"(\bat 0x|=0x|@)[0-9a-f]{3,}")
_HAS_DOCSTRING = 0x4000000
"""The bit in the flags of code that says so, from Python 3.13 on."""
_IS_OPTIMIZED = 0x1
"""The bit in the flags of code that says that it is a function's, and not a class's."""


def fingerprint(*parts: Any) -> str:
    """Returns a stable hash of nested tuples, lists, mappings, simple values, functions, and data of Arrow, NumPy and
    Pandas.

    Raises FlowError for what cannot be told from another one, such as an object that only has an address.
    """
    digest: str = _Hashing(blake3()).of(parts).hexdigest(length=FINGERPRINT_HEX_DIGITS // 2)
    return digest


def hashed_of(function: Any) -> bytes:
    """Returns what `fingerprint` sees of a function, to be given to it later as a PickledFunction. Raises FlowError as
    `fingerprint` does.
    """
    seen = bytearray()
    _Hashing(_Kept(seen)).of(function)
    return bytes(seen)


def uses_modules(function: Any) -> bool:
    """Returns whether a function uses modules of the user's, of which pickling says only the names. Raises FlowError as
    `fingerprint` does.
    """
    hashing = _Hashing(_Kept(bytearray()))
    hashing.of(function)
    return hashing.uses_modules


class _Kept:
    """Stands in the place of a hasher, and keeps what it is given."""

    def __init__(self, seen: bytearray) -> None:
        self.update = seen.extend


class _Hashing:
    """Makes one fingerprint. Functions, classes and objects are hashed once, and then by when they came first."""

    def __init__(self, hasher: Any) -> None:
        self._hasher = hasher
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []  # so that no id is used again
        self._open: set[int] = set()  # containers that are being hashed
        self.uses_modules = False
        """Whether something came that is of a module of the user's, and not of the program itself."""

    def of(self, value: Any) -> Any:
        self._edge(value)
        return self._hasher

    def _edge(self, value: Any) -> None:
        if isinstance(value, _SIMPLE):
            self._hasher.update(f"{type(value).__name__}:{value!r};".encode())
            if type(value).__module__ != "builtins":
                self._behaviour(type(value))
            return
        if isinstance(
            value, PickledFunction
        ):  # the only object of its fingerprint, so that nothing in it can have come before
            assert value.hashed, "a copy that went to a task has no fingerprint"
            self._hasher.update(value.hashed)
            return
        is_container = isinstance(value, tuple | list | set | frozenset | Mapping)
        if id(value) in (self._open if is_container else self._numbers):
            self._hasher.update(f"again {self._numbers.get(id(value), '')};".encode())
            return
        if is_container:
            self._open.add(id(value))
        else:
            self._numbers[id(value)] = len(self._numbers)
            self._kept.append(value)
        if isinstance(value, types.FunctionType | types.ModuleType | type):
            module = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
            self.uses_modules |= module != "__main__" and not is_installed(module)
        self._hasher.update(f"{type(value).__name__}(".encode())
        for part in _parts(value):
            self._kept.append(part)
            self._edge(part)
        self._hasher.update(b");")
        self._open.discard(id(value))
        if is_container:
            self._behaviour(type(value))

    def _behaviour(self, cls: type) -> None:
        """Hashes what the user wrote for a class whose objects are hashed by the values that they hold."""
        if is_installed(cls.__module__):
            return
        own = _written_for(cls)
        if own:  # a plain named tuple has nothing of its own, and is what it was to versions before
            self._kept.append(own)
            self._edge(own)


def _parts(value: Any) -> list[Any]:  # noqa: PLR0912 - one line for each kind
    if isinstance(value, tuple | list):
        return list(value)
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    if isinstance(value, Mapping):
        items = [item for pair in value.items() for item in pair]
        return [*items, value.default_factory] if isinstance(value, defaultdict) else items
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, types.FunctionType):
        return _function_parts(value)
    if isinstance(value, types.CodeType):
        return _code_parts(value)
    if isinstance(value, types.ModuleType):
        return [name_in_fingerprints(value.__name__)]
    if isinstance(value, re.Pattern):
        return [value.pattern, value.flags]
    if isinstance(value, _ARROW):
        return [str(value.schema if hasattr(value, "schema") else value.type), value.to_pylist()]
    if isinstance(value, np.ndarray):
        return [str(value.dtype), value.shape, value.tolist() if value.dtype.hasobject else value.tobytes()]
    if _top_module(value) == "pandas" and hasattr(value, "dtype") and hasattr(value, "to_numpy"):
        return _pandas_parts(value)  # a Timestamp has no type of its own
    if hasattr(type(value), "__arrow_c_stream__"):  # a frame of Pandas, Polars, ...
        return [pa.table(value)]
    if isinstance(value, types.BuiltinFunctionType):
        return [value.__qualname__, None if isinstance(value.__self__, types.ModuleType) else value.__self__]
    if hasattr(value, "__wrapped__"):  # a cache, say, around a function
        return [type(value).__qualname__, value.__wrapped__]
    if isinstance(value, type):
        return _class_parts(value)
    if isinstance(value, logging.Logger):
        return [value.name]
    if type(value).__module__ == "_thread":  # a lock
        return []
    return _object_parts(value)


def _top_module(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


def _function_parts(function: types.FunctionType) -> list[Any]:
    closure = [cell.cell_contents for cell in function.__closure__ or () if _is_set(cell)]
    defaults = [function.__defaults__, function.__kwdefaults__ or {}]
    if is_installed(
        function.__globals__.get("__name__")
    ):  # a decorator's, say, which closes over a function of the user's
        own = [one for one in closure if callable(one)]
        chosen = [
            [cls.__qualname__, one] for cls, one in getattr(function, "registry", {}).items()
        ]  # of singledispatch
        wrapped = getattr(function, "__wrapped__", None)
        return [
            name_in_fingerprints(function.__globals__.get("__name__")),
            function.__code__.co_qualname,
            own,
            wrapped,
            chosen,
        ]
    names = _names(function.__code__)
    used = {name: function.__globals__[name] for name in names if name in function.__globals__}
    of_its_own, imported = _attributes(function), imported_by(function)
    found = [_code_parts(function.__code__, function.__doc__), *defaults, closure, used, _of_modules(used, names)]
    found += [of_its_own] if of_its_own else []
    return [*found, imported, _of_modules(imported, names)] if imported else found


def _attributes(function: types.FunctionType) -> dict[str, Any]:
    """Returns the values and functions that a function has as attributes, but for what it sets itself: a count of calls, say.
    Caches and the like differ from process to process.
    """
    kinds = (*_SIMPLE, types.FunctionType)
    found = {name: v for name, v in vars(function).items() if isinstance(v, kinds) and name != "__wrapped__"}
    if not found:
        return found
    stored = {one.argval for one in dis.get_instructions(function.__code__) if one.opname == "STORE_ATTR"}
    return {name: found[name] for name in sorted(found.keys() - stored)}


def _pandas_parts(value: Any) -> list[Any]:
    """Returns the parts of a Series or an Index, whose text leaves out what is in the middle, and digits."""
    index = getattr(value, "index", None)
    return [
        type(value).__name__,
        str(value.dtype),
        getattr(value, "name", None),
        value.to_numpy(),
        *([] if index is None else [index]),
    ]


def _of_modules(used: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """Returns what a function may take of the user's own modules that it names: `helpers.clean`, `settings.LIMIT`."""
    found: dict[str, Any] = {}
    waiting = [value for value in used.values() if isinstance(value, types.ModuleType)]
    seen: set[str] = set()
    while waiting:
        module = waiting.pop()
        if module.__name__ in seen or is_installed(module.__name__):
            continue
        seen.add(module.__name__)
        for name in names:
            if name in vars(module):
                found[f"{module.__name__}.{name}"] = vars(module)[name]
        waiting += [value for value in found.values() if isinstance(value, types.ModuleType)]
    return dict(sorted(found.items()))


def _class_parts(cls: type) -> list[Any]:
    name = [name_in_fingerprints(cls.__module__), cls.__qualname__]
    if is_installed(cls.__module__):
        return name
    members = {key: _member(value) for key, value in vars(cls).items() if not _is_bookkeeping(key, value)}
    return [*name, list(cls.__bases__), dict(sorted(members.items()))]


def _written_for(cls: type) -> dict[str, Any]:
    """Returns the functions, and the constants, that users' classes among a class and its bases define, by name."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if is_installed(base.__module__):
            continue
        for name, value in vars(base).items():
            member = _member(value)
            function = next((one for one in member if one), None) if isinstance(member, list) else member
            if isinstance(function, types.FunctionType):
                if function.__module__ == base.__module__:  # others were made by a library, as those of a named tuple
                    found[name] = member
            elif not (name.startswith("_") or callable(value) or hasattr(value, "__get__") or issubclass(cls, Enum)):
                found[name] = value
    return dict(sorted(found.items()))


def _is_bookkeeping(name: str, value: Any) -> bool:
    """Returns what Python keeps in a class, and adds to it when it is used: nothing that its author wrote."""
    is_special = name.startswith("__") and name.endswith("__")
    is_slot = isinstance(value, types.MemberDescriptorType | types.GetSetDescriptorType)
    return is_slot or name == "_abc_impl" or (is_special and not callable(_member(value)))


def _member(value: Any) -> Any:
    """Returns the functions that are behind a member of a class."""
    if isinstance(value, property):
        return [value.fget, value.fset, value.fdel]
    if isinstance(value, staticmethod | classmethod):
        return value.__func__
    if isinstance(value, functools.cached_property):
        return value.func
    return value


def _object_parts(value: Any) -> list[Any]:
    cls = type(value)
    if not is_installed(cls.__module__):
        state = {name: getattr(value, name) for base in cls.__mro__ for name in _slots(base) if hasattr(value, name)}
        own = {**state, **getattr(value, "__dict__", {})}
        return [cls, dict(sorted(own.items()))] if own else [cls, *([] if callable(value) else [_text(value)])]
    text = repr(value)
    is_partial = bool(_ADDRESS.search(text)) or "..." in text
    says_all = _top_module(value) in _SAY_ALL or isinstance(value, Enum) or not getattr(value, "__dict__", None)
    if says_all and not is_partial:
        return [cls, text]
    try:  # what a copy would be made of
        _, arguments, *rest = value.__reduce_ex__(2)
    except Exception as error:
        if is_partial:
            raise FlowError(_unknown(value)) from error
        return [cls, text]
    return [cls, arguments, rest[:1]]


def _slots(cls: type) -> list[str]:
    slots = cls.__dict__.get("__slots__", ())
    return [slots] if isinstance(slots, str) else [name for name in slots if not name.startswith("__")]


def _text(value: Any) -> str:
    """Returns what an object without fields says of itself, where its class has it say anything."""
    # By names, or mypy compares their types.
    if getattr(type(value), "__repr__") == getattr(object, "__repr__"):  # noqa: B009
        return ""
    text = repr(value)
    if _ADDRESS.search(text):
        raise FlowError(_unknown(value))
    return text


def _unknown(value: Any) -> str:
    return (
        f"what its function uses has {repr(value)[:80]} in it, which cannot be told from another one of its kind: give "
        "the "
        "stage a version=, and another one whenever what it computes changes"
    )


def _is_set(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _names(code: types.CodeType) -> list[str]:
    """Returns the global names that a function and the functions inside it refer to."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= set(_names(constant))
    return sorted(names)


def _code_parts(code: types.CodeType, doc: str | None = None) -> list[Any]:
    constants = list(code.co_consts)
    if constants and isinstance(constants[0], str) and _is_docstring(code, constants[0], doc):
        constants[0] = None
    return [
        code.co_code, constants, code.co_names, code.co_varnames, code.co_argcount, code.co_flags & ~_HAS_DOCSTRING,
        code.co_exceptiontable,
    ]  # fmt: skip


def _is_docstring(code: types.CodeType, constant: str, doc: str | None) -> bool:
    """Returns whether the first constant of code is its docstring. It never is in lambdas, comprehensions, classes."""
    if code.co_name.startswith("<") or not code.co_flags & _IS_OPTIMIZED:
        return False
    if sys.version_info >= (3, 13):
        return bool(code.co_flags & _HAS_DOCSTRING)
    return doc is None or constant == doc
