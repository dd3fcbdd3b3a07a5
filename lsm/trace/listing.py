"""What is in a data directory, listed again only where something changed.

A directory's time of change says whether a name came or went since it was listed. File systems keep that time coarsely,
so a directory is listed until it has stood still for a while.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath

from nosync.lsm.model.layer import Description, TraceId, parse_file_name
from nosync.lsm.platform.env import storage_errors
from nosync.lsm.platform.layout import LAYERS
from nosync.lsm.trace.directory import LayerDirectory

_COARSEST_CLOCK_S = 2.0
"""Of a file system: FAT's."""


@dataclass
class _Seen:
    changed_ns: int
    """As the file system said when the directory was first seen as it is."""
    first_s: float
    listed_s: float
    names: list[str]


class Listing(LayerDirectory):
    """A store's directory whose listings are remembered. Used by one thread."""

    def __init__(self, directory: LayerDirectory) -> None:
        super().__init__(directory.root, directory.key_groups, directory.env)
        self._seen: dict[PurePosixPath, _Seen] = {}
        self._fresh: set[PurePosixPath] = set()
        self._before: set[TraceId] = set()

    def changed(self) -> dict[TraceId, list[Description]]:
        """Returns what the traces hold that may have changed since the last call; the first time all of them. Raises
        StorageError.
        """
        self._fresh.clear()
        found, there = dict[TraceId, list[Description]](), self.traces()
        for trace in there:
            names = self._list(trace.directory)
            if trace.directory in self._fresh:
                found[trace] = [d for name in names if (d := parse_file_name(name)) is not None]
        for trace in self._before.difference(there):
            found[trace] = []
            self._seen.pop(trace.directory, None)
        self._before = set(there)
        return found

    def _list(self, relative: PurePosixPath) -> list[str]:
        path = self.root / LAYERS / relative
        with storage_errors("list", path):
            now_s, changed_ns = self.env.monotonic_s(), self.env.changed_ns(path)
            seen = self._seen.get(relative)
            if seen is None or seen.changed_ns != changed_ns:
                self._seen[relative] = seen = _Seen(changed_ns, now_s, now_s, self.env.list_dir(path))
                self._fresh.add(relative)
            elif seen.listed_s - seen.first_s < _COARSEST_CLOCK_S:
                seen.listed_s, seen.names = now_s, self.env.list_dir(path)
                self._fresh.add(relative)
        return seen.names
