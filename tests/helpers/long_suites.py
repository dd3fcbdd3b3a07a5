"""Which targets of the Makefile run which tests: a test that is left to a long suite must be in it."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

DEFAULT = "make spark"
_ROOT = Path(__file__).parents[2]


@cache
def _commands() -> dict[str, list[list[str]]]:
    """Returns the words of the commands of each target that have NOSYNC_LONG, without which they leave out what is long."""
    text = (_ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    found = {}
    for target, recipe in re.findall(r"^([a-z]+):.*\n((?:\t.*\n)+)", text, re.MULTILINE):
        found[f"make {target}"] = [line.split() for line in recipe.splitlines() if "NOSYNC_LONG=1" in line]
    return found


def _runs(command: list[str], item: pytest.Item) -> bool:
    """Returns whether a command runs a test."""
    path = item.path.relative_to(_ROOT)
    among = [word for word in command if word.startswith("tests/")] or ["tests"]
    ignored = [word.removeprefix("--ignore=") for word in command if word.startswith("--ignore=")]
    if "'spark" in command and item.get_closest_marker("spark") is None:
        return False
    if "-k" in command and command[command.index("-k") + 1] not in item.name:
        return False
    return any(map(path.is_relative_to, among)) and not any(map(path.is_relative_to, ignored))


def target_of(item: pytest.Item) -> str | None:
    """Returns the target that runs a test which is marked `long`; None for any other one.

    Raises UsageError where that target does not run the test.
    """
    marker = item.get_closest_marker("long")
    if marker is None:
        return None
    target = marker.args[0] if marker.args else DEFAULT
    if not any(_runs(command, item) for command in _commands().get(target, [])):
        raise pytest.UsageError(f"{item.nodeid} is left to {target!r}, which does not run it: name another target")
    return target
