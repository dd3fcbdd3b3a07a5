"""Where checkpoints are, and where they are kept: directories of this host, one apart from the other."""

from __future__ import annotations

import os
from pathlib import Path

from nosync.lsm.errors import InvalidInputError
from nosync.lsm.platform.layout import CHECKPOINTS
from nosync.lsm.platform.paths import local_path

_MOUNT_INSTEAD = "Give a directory that this host has or mounts"
DATA_VARIABLE = "NOSYNC_DATA"
"""Names the data directory where nobody says one."""


def data_directory(store: str | os.PathLike[str] | None) -> Path:
    """Returns the data directory that is meant. Raises InvalidInputError where none is."""
    found = os.fspath(store) if store is not None else os.environ.get(DATA_VARIABLE, "")
    if not found:
        raise InvalidInputError(f"say the data directory that keeps the checkpoint (store=, or ${DATA_VARIABLE})")
    local_path(found, "what is kept of checkpoints")  # it refuses what is on no file system of this host
    return Path(found)


def local_directory(path: str | os.PathLike[str]) -> Path:
    """Returns the directory that is meant. Raises InvalidInputError for one that is on no file system of this host."""
    return local_path(os.fspath(path), "a checkpoint that is kept", _MOUNT_INSTEAD)


def check_apart(source: Path, data: Path) -> None:
    """Raises InvalidInputError where a data directory is in the checkpoint that it keeps, which would then have itself in it;
    or the checkpoint is one that is kept.
    """
    where, kept = source.resolve(), data.resolve()
    if where == kept or where in kept.parents:
        raise InvalidInputError(f"the data directory {data} is in the checkpoint {source}: keep it elsewhere")
    if kept / CHECKPOINTS in where.parents:
        raise InvalidInputError(f"{source} is among the kept checkpoints of {data}: say the query's checkpointLocation")
