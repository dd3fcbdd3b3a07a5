"""Where Spark's tasks find a store: in the directory of the host they run on."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from nosync.lsm.errors import NosyncError, ReplicationError
from nosync.lsm.platform.store_marker import read_marker
from nosync.lsm.trace.directory import LayerDirectory
from nosync.replication.client.fetching_directory import FetchingDirectory
from nosync.replication.remote.stubs import env_of, is_lazy

DATA_VARIABLE = "NOSYNC_DATA"
"""In the environment of Spark's executors: the host's data directory, where it is not at the path that the driver's
has.
"""


@dataclass(frozen=True)
class StoreLocation:
    """A store, as a task finds it. Pickled to Spark's workers."""

    root: str
    key_groups: int
    store_id: str = ""
    """Of a store that daemons keep on several nodes; empty: there is only the one directory, which all tasks see."""
    node: str = ""
    """The node that the driver runs beside."""


_directories: dict[StoreLocation, LayerDirectory] = {}


MOST_DIRECTORIES = 4
"""Of so many stores a process keeps what it has mapped: files that are deleted meanwhile keep their space on the disk.
"""


def open_directory(location: StoreLocation) -> LayerDirectory:
    """This process's view of a store, which lives with the layers it has mapped until others were used more lately."""
    found = _directories.pop(location, None)
    if found is None or (is_lazy(found.root) and not found.env.sees_stubs):  # lost, and restored to the same path
        for other, directory in list(_directories.items()):
            if not directory.root.exists():
                _directories.pop(other, None)
        found = _open(location)
    _directories[location] = found  # the most recently used come last
    for other in list(_directories)[:-MOST_DIRECTORIES]:
        _directories.pop(other, None)
    return found


def _open(location: StoreLocation) -> LayerDirectory:
    if not location.store_id:
        return LayerDirectory(Path(location.root), location.key_groups, env_of(Path(location.root)))
    root = Path(os.environ.get(DATA_VARIABLE) or location.root)  # set to nothing is not set
    try:
        env = env_of(root)
        found = read_marker(root, env).store_id
    except NosyncError as error:
        raise ReplicationError(
            f"a task found no store on its host: {error}. Run a nosync daemon on every host of Spark's, with its data "
            f"at that path, or set spark.executorEnv.{DATA_VARIABLE} to where it is"
        ) from None
    if found != location.store_id:
        raise ReplicationError(f"{root} on a task's host belongs to store {found}, the job's is {location.store_id}")
    return FetchingDirectory(root, location.key_groups, env)
