"""What a function takes of modules that it imports when it runs, which its globals do not have."""

from __future__ import annotations

import dis
import importlib
import importlib.util
import sys
import sysconfig
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_INSTALLED = tuple(
    {
        str(Path(found).resolve())
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
        if (found := sysconfig.get_path(name))
    }
)
_BY_NAME = (*sys.builtin_module_names, "nosync")
"""Packages that count as installed wherever they are."""


def is_installed(module: str | None) -> bool:
    """Returns whether a module is Python's, or in site-packages: its name says what it is. What is in `__main__` is the
    user's, also where a tool that is installed runs it.
    """
    if module == "__main__":
        return False
    if module is None or module.partition(".")[0] in _BY_NAME:
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return module in sys.modules
    return _is_of_python(file)


def _is_of_python(file: str) -> bool:
    return str(Path(file).resolve()).startswith(_INSTALLED)


def imported_by(function: types.FunctionType) -> dict[str, Any]:
    """Returns the modules of the user's that a function imports in its body, and what it takes of them, by name.

    They are imported, as the function would do it; nothing that is installed is. What cannot be found is left out.
    """
    package = function.__globals__.get("__package__") or str(function.__globals__.get("__name__")).rpartition(".")[0]
    found: dict[str, Any] = {}
    for level, name, taken in _imports(function.__code__):
        try:
            module = importlib.util.resolve_name("." * level + name, package)
        except ImportError:  # beyond the package: it will fail where it runs
            continue
        if _is_of_installed(module):
            continue
        for one in (module, *(f"{module}.{part}" for part in taken), *_above(module)):
            loaded = _of_user(one)
            if loaded is not None:
                found[one] = loaded
        if module in found:
            found |= {f"{module}.{part}": vars(found[module])[part] for part in taken if part in vars(found[module])}
    return dict(sorted(found.items()))


def _is_of_installed(module: str) -> bool:
    """Returns whether the package that a module is in, at the top, is installed. To look for a module in it would import it,
    and a function may import a large one in its body just because that takes long.
    """
    top = module.partition(".")[0]
    if top in _BY_NAME:
        return True
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # it was made by hand
        return is_installed(top)
    if spec is None or spec.origin == "frozen":
        return True
    return all(map(_is_of_python, [spec.origin] if spec.origin else spec.submodule_search_locations or ()))


def _above(module: str) -> list[str]:
    """Returns the packages that a module is in: `import a.b` gives `a`."""
    parts = module.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def _of_user(module: str) -> types.ModuleType | None:
    """Returns a module of the user's; None for what is installed, or not there."""
    if module in sys.modules:
        return None if is_installed(module) else sys.modules[module]
    try:
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None or _is_of_python(spec.origin):
            return None
        return importlib.import_module(module)
    except Exception:  # noqa: BLE001 - whatever its code raises, it raises where the function runs
        return None


def _imports(code: types.CodeType) -> Iterator[tuple[int, str, tuple[str, ...]]]:
    """Yields level, name and what is taken for each import in code, and in the code inside of it."""
    before: list[Any] = [None, None]
    for one in dis.get_instructions(code):
        if one.opname == "IMPORT_NAME":
            level, taken = before
            yield level if isinstance(level, int) else 0, str(one.argval), taken if isinstance(taken, tuple) else ()
        if one.opname.startswith("LOAD_"):
            before = [before[1], one.argval]
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _imports(constant)
