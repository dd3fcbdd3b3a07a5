"""An observed-remove set of small facts that any node may add or take back at any time, without agreement: pins, marks
of sinks.

An element is a file with a name that nobody else takes, `<what>-<token>.json`; it is taken back by another one,
`<what>-<token>.gone.json`. Files are only ever added, so nodes exchange them in any order and agree as soon as they
have the same ones (an observed-remove set: Shapiro et al., Conflict-free replicated data types, 2011): what is taken
back is what was known where it was taken back, and the same thing said again is a new element.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from nosync.lsm.model.timestamp import is_number
from nosync.lsm.platform.env import Env, storage_errors
from nosync.lsm.platform.json_file import publish_small, read_small, sync_published
from nosync.lsm.platform.layout import REGISTERS

_SUFFIX, _GONE = ".json", ".gone.json"


@dataclass(frozen=True)
class Element:
    """`path`: its file, relative to the data directory."""

    path: PurePosixPath

    @property
    def what(self) -> str:
        return self.path.name.removesuffix(_SUFFIX).rpartition("-")[0]


def is_taken_back(path: PurePosixPath) -> bool:
    """Returns whether a file takes an element back, rather than being one."""
    return path.name.endswith(_GONE)


def taken_back_by(path: PurePosixPath) -> PurePosixPath:
    """Returns the file that takes an element back, given that of the element."""
    return path.with_name(path.name.removesuffix(_SUFFIX) + _GONE)


def elements(root: Path, directory: PurePosixPath, env: Env) -> list[Element]:
    """Returns what stands in a register, and was not taken back, in order."""
    with storage_errors("list", root / directory):
        names = set(env.list_dir(root / directory))
    return [
        Element(directory / name)
        for name in sorted(names)
        if name.endswith(_SUFFIX) and not name.endswith(_GONE) and name.removesuffix(_SUFFIX) + _GONE not in names
    ]


def add_element(root: Path, directory: PurePosixPath, what: str, fields: Mapping[str, Any], env: Env) -> Element:
    """Adds an element, which is durable when this returns. Raises StorageError where it cannot be, and then it does not
    stand.
    """
    element = Element(directory / f"{what}-{env.token()}{_SUFFIX}")
    publish_small(root, root / element.path, fields, env)
    sync_published(root, root / element.path, env)
    return element


def read_element(root: Path, element: Element, env: Env) -> dict[str, Any]:
    """Raises CorruptionError where its file is damaged."""
    return read_small(root / element.path, env)


def remove(root: Path, element: Element, env: Env) -> PurePosixPath:
    """Takes an element back, and returns the file that says so, which is durable then. Taking back twice is fine."""
    path = taken_back_by(element.path)
    if publish_small(root, root / path, {"gone": element.path.name}, env):
        sync_published(root, root / path, env)
    return path


def register_files(root: Path, env: Env) -> list[PurePosixPath]:
    """Returns every file of every register."""
    found: list[PurePosixPath] = []
    directories = [PurePosixPath(name) for name in REGISTERS]
    while directories:
        directory = directories.pop()
        with storage_errors("list", root / directory):
            names = env.list_dir(root / directory)
        found += [directory / name for name in names if name.endswith(_SUFFIX) and "-" in name]
        # Files of earlier versions are numbers; no directory here is.
        directories += [directory / name for name in names if "." not in name and not is_number(name)]
    return sorted(found)
