"""Which targets of the Makefile run which tests: a test that is left to a long suite must be in it."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

DEFAULT = "make spark"
_ROOT = Path(__file__).parents[2]


@cache
def _recipes() -> dict[str, str]:
    """Returns the commands of each target with NOSYNC_LONG, without which they leave out what is long."""
    text = (_ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    found = {}
    for target, recipe in re.findall(r"^([a-z]+):.*\n((?:\t.*\n)+)", text, re.MULTILINE):
        found[f"make {target}"] = "\n".join(line for line in recipe.splitlines() if "NOSYNC_LONG=1" in line)
    return found


def target_of(item: pytest.Item) -> str | None:
    """Returns the target that runs a test which is marked `long`; None for any other one.

    Raises UsageError where that target does not run the test.
    """
    marker = item.get_closest_marker("long")
    if marker is None:
        return None
    target = marker.args[0] if marker.args else DEFAULT
    recipe, path = _recipes().get(target, ""), str(item.path.relative_to(_ROOT))
    words = recipe.split()
    among = [word for word in words if word.startswith("tests/")] or (["tests/"] if "pytest" in words else [])
    ignored = [word.removeprefix("--ignore=") for word in words if word.startswith("--ignore=")]
    is_left_out = "'spark and long'" in recipe and item.get_closest_marker("spark") is None
    if is_left_out or not path.startswith(tuple(among)) or path.startswith(tuple(ignored)):
        raise pytest.UsageError(f"{item.nodeid} is left to {target!r}, which does not run it: name another target")
    return target
