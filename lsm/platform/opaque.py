"""Files that a store keeps for others and does not look into: those of kept checkpoints.

A name is `checkpoints/<checkpoint>/<the name that Spark gave the file>`. A file never changes once it has its name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from nosync.lsm.platform.env import Env
from nosync.lsm.platform.layout import CHECKPOINTS, LOCK

_PART = r"[A-Za-z0-9_][A-Za-z0-9._+=@-]{0,254}"
_NAME = re.compile(rf"{CHECKPOINTS}/(?P<checkpoint>[a-z0-9_-]{{1,64}})(?:\.[1-9][0-9]{{0,8}})?(?:/{_PART}){{1,8}}\Z")
_LONGEST_NAME = 900
_TEMPORARY = ".tmp"


@dataclass(frozen=True)
class OpaqueRecord:
    """A durable file. `path`: relative to the data directory. `digest`: BLAKE3 of its bytes, hexadecimal."""

    path: PurePosixPath
    digest: str
    size_bytes: int


def files_below(root: Path, directory: PurePosixPath, env: Env) -> Iterator[PurePosixPath]:
    """Yields the regular files in a directory and below it, relative to `root`. Links are left out."""
    directories = [directory]
    while directories:
        at = directories.pop()
        for name, is_directory in env.entries(root / at):
            if is_directory:
                directories.append(at / name)
            else:
                yield at / name


def checkpoint_of(path: str) -> str | None:
    """Returns the checkpoint whose file has this name; None where no file of a checkpoint has such a name."""
    found = _NAME.match(path) if len(path) <= _LONGEST_NAME else None
    if found is None or path.endswith(_TEMPORARY) or (path.count("/") == 2 and path.endswith(f"/{LOCK}")):
        return None
    return found["checkpoint"]
