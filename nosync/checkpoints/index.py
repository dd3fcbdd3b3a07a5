"""What files a checkpoint, or what is kept of one, has: an index by what their names say.

The index holds names and sizes, never contents. It is filled name by name, so that whoever follows a query need not
list hundreds of directories for each batch.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

from nosync.checkpoints.names import (
    CRC_SUFFIX,
    METADATA,
    Batch,
    BatchFile,
    OperatorFile,
    OtherFile,
    SourceFile,
    StateFile,
    StoreId,
    parse,
)


class FileIndex:
    """The files of a checkpoint by name, with sizes in bytes. Not safe for several threads."""

    def __init__(self, sizes: Mapping[str, int] | None = None) -> None:
        self._sizes: dict[str, int] = {}
        self._logs: dict[str, list[Batch]] = {"offsets": [], "commits": []}
        self._sources: dict[str, dict[tuple[int, bool], str]] = defaultdict(dict)
        self._operators: dict[int, dict[str, OperatorFile]] = defaultdict(dict)
        self._states: dict[StoreId, dict[int, list[StateFile]]] = {}
        self._others: set[str] = set()
        for path, size_bytes in (sizes or {}).items():
            self.add(path, size_bytes)

    def __contains__(self, path: str) -> bool:
        return path in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def add(self, path: str, size_bytes: int) -> None:
        """Takes in a file. A name that is there already keeps what it says, with the new size."""
        is_known = path in self._sizes
        self._sizes[path] = size_bytes
        if is_known or path.endswith(CRC_SUFFIX):
            return
        match parse(path):
            case BatchFile(_, log, batch):
                bisect.insort(self._logs[log], batch)
            case SourceFile(_, source, number, is_compact):
                self._sources[source][number, is_compact] = path
            case OperatorFile() as file:
                self._operators[file.operator][path] = file
            case StateFile() as file:
                self._states.setdefault(file.store, {}).setdefault(file.version, []).append(file)
            case OtherFile():
                if path != METADATA:
                    self._others.add(path)

    def discard(self, path: str) -> None:
        """Forgets a file that is not there any more."""
        if self._sizes.pop(path, None) is None or path.endswith(CRC_SUFFIX):
            return
        match parse(path):
            case BatchFile(_, log, batch):
                self._logs[log].remove(batch)
            case SourceFile(_, source, number, is_compact):
                del self._sources[source][number, is_compact]
            case OperatorFile() as file:
                del self._operators[file.operator][path]
            case StateFile() as file:
                versions = self._states[file.store]
                versions[file.version].remove(file)
                if not versions[file.version]:
                    del versions[file.version]
            case OtherFile():
                self._others.discard(path)

    def size_bytes(self, path: str) -> int | None:
        """Returns the size of a file; None where it is not there."""
        return self._sizes.get(path)

    def paths(self) -> Collection[str]:
        """Returns the names of all files, in no order."""
        return self._sizes.keys()

    def batches(self, log: str = "commits") -> list[Batch]:
        """Returns the batches that `commits` or `offsets` has, in order."""
        return list(self._logs[log])

    def stores(self) -> Collection[StoreId]:
        """Returns the state stores that have files."""
        return self._states.keys()

    def versions(self, store: StoreId) -> Mapping[int, list[StateFile]]:
        """Returns the files of a state store by version."""
        return self._states.get(store, {})

    def source_log(self, source: str) -> Mapping[tuple[int, bool], str]:
        """Returns the entries of a source's log, by number and whether they stand for all before."""
        return self._sources.get(source, {})

    def sources(self) -> Collection[str]:
        """Returns the sources that have files."""
        return self._sources.keys()

    def operator_files(self) -> Iterable[OperatorFile]:
        """Returns what operators say of themselves."""
        return (file for files in self._operators.values() for file in files.values())

    def others(self) -> Collection[str]:
        """Returns the files whose names say nothing."""
        return self._others
