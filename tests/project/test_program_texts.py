"""Programs that are texts, for processes that tests and benchmarks start: what they import is there."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
IMPORT = re.compile(r"from (nosync[\w.]*) import (\w+)")


def imports_in_texts() -> Iterator[tuple[str, str, str]]:
    """Yields the file, the module and the name of each import in a string."""
    for directory in ("nosync/testing", "tests", "bench", "tools"):
        for path in sorted((ROOT / directory).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield from ((str(path.relative_to(ROOT)), *found) for found in IMPORT.findall(node.value))


def test_what_program_texts_import_is_there() -> None:
    found = list(imports_in_texts())
    assert len(found) > 3
    assert [one for one in found if not is_there(one[1], one[2])] == []


def is_there(module: str, name: str) -> bool:
    """Returns whether a module has a name, or a submodule of it."""
    if hasattr(importlib.import_module(module), name):
        return True
    return importlib.util.find_spec(f"{module}.{name}") is not None
