"""What is in a data directory, listed again only where something changed.

A directory's time of change says whether a name came or went since it was listed. File systems keep that time coarsely, so
a directory is listed until it has stood still for a while.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from nosync.lsm.directory import LAYERS, LayerDirectory
from nosync.lsm.env import storage_errors
from nosync.lsm.layer import Description, Shard, TraceId, parse_file_name

_COARSEST_CLOCK_S = 2.0
"""Of a file system: FAT's."""


@dataclass
class _Seen:
    changed_ns: int
    """As the file system said when the directory was first seen as it is."""
    first_s: float
    listed_s: float
    names: list[str]


class Listing:
    """The names in one store's directory. Used by one thread."""

    def __init__(self, directory: LayerDirectory) -> None:
        self._layers = directory.root / LAYERS
        self._env = directory.env
        self._seen: dict[str, _Seen] = {}
        self._traces: dict[str, TraceId] = {}

    def changed(self) -> dict[TraceId, list[Description]]:
        """What the traces hold that may have changed since the last call; the first time all of them. Raises StorageError."""
        found: dict[TraceId, list[Description]] = {}
        there: dict[str, TraceId] = {}
        for stage in self._names(""):
            for fingerprint in self._names(stage):
                for shard in self._names(f"{stage}/{fingerprint}"):
                    path = f"{stage}/{fingerprint}/{shard}"
                    trace = self._traces.get(path) or _parsed(path)
                    if trace is None:
                        continue  # not a name that a store writes: scrub reports it
                    there[path] = trace
                    before = self._seen.get(path)
                    listed_s = None if before is None else before.listed_s
                    names = self._names(path)
                    if self._seen[path].listed_s != listed_s:
                        found[trace] = [d for name in names if (d := parse_file_name(name)) is not None]
                        self._seen[path].names = []  # they may be many
        for path in self._traces.keys() - there.keys():
            found[self._traces[path]] = []
            self._seen.pop(path, None)
        self._traces = there
        return found

    def _names(self, relative: str) -> Sequence[str]:
        path = self._layers / relative
        with storage_errors("list", path):
            now_s, changed_ns = self._env.monotonic_s(), self._env.changed_ns(path)
            seen = self._seen.get(relative)
            if seen is None or seen.changed_ns != changed_ns:
                self._seen[relative] = _Seen(changed_ns, now_s, now_s, self._env.list_dir(path))
            elif seen.listed_s - seen.first_s < _COARSEST_CLOCK_S:
                seen.listed_s, seen.names = now_s, self._env.list_dir(path)
        return self._seen[relative].names


def _parsed(path: str) -> TraceId | None:
    stage, fingerprint, shard = PurePosixPath(path).parts
    try:
        return TraceId(stage, fingerprint, Shard.parse(shard))
    except ValueError:
        return None
