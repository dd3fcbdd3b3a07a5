"""Layers that were published and are not durable yet: which they are, and making their files durable.

Invariants
- What is given out as a record was read back and matched its digest, and its file was synced; it counts once its
  directory was synced too.
- After a failed fsync the same inode is never trusted again: the layer is written to a new one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from nosync.lsm.errors import NosyncError
from nosync.lsm.layers.reader import LayerReader
from nosync.lsm.model.layer import Digest, LayerId, Record
from nosync.lsm.platform.env import storage_error, storage_errors
from nosync.lsm.platform.layout import LAYERS
from nosync.lsm.platform.publish import write_again
from nosync.lsm.trace.directory import LayerDirectory

log = logging.getLogger("nosync")


class LayerSyncQueue:
    """`problems`: gets an entry for each layer that cannot be made durable, which is tried again after `retry_s`."""

    def __init__(self, directory: LayerDirectory, problems: dict[str, str], retry_s: float) -> None:
        self._directory, self._env, self.problems, self._retry_s = directory, directory.env, problems, retry_s
        self._lock = threading.Lock()
        self._waiting: dict[LayerId, None] = {}
        self._retry_at: dict[LayerId, float] = {}
        self._verified: dict[LayerId, Record] = {}  # of those, whose bytes were checked as they came
        self._synced: set[Path] = set()
        self._forgotten: set[LayerId] = set()

    # --- which there are ----------------------------------------------------------------------------------------------

    def note(self, ids: Iterable[LayerId], verified: Record | None = None) -> None:
        """`verified`: of one of them, what was found when every byte of it was checked just now."""
        with self._lock:
            self._waiting |= dict.fromkeys(ids)
            if verified is not None:
                self._verified[verified.id] = verified

    def waiting(self) -> set[LayerId]:
        """Returns the layers that are not durable yet."""
        with self._lock:
            return set(self._waiting)

    def begin(self) -> None:
        """Somebody begins to make layers durable: what is forgotten from now on does not become durable."""
        with self._lock:
            self._forgotten = set()

    def due(self, *, again: bool = False) -> list[LayerId]:
        """Returns those to be made durable now, in the order in which they came. `again`: also those that failed just
        now.
        """
        now_s = self._env.monotonic_s()
        with self._lock:
            return [id for id in self._waiting if again or self._retry_at.get(id, now_s) <= now_s]

    def widest_first(self) -> None:
        """Puts merged layers first: so what they replaced is recognised, and dropped rather than made durable."""
        with self._lock:
            ids = sorted(self._waiting, key=lambda id: id.description.upper - id.description.lower, reverse=True)
            self._waiting = dict.fromkeys(ids)

    def is_doubtful(self, id: LayerId) -> bool:
        """Returns whether its fsync failed, and has not succeeded since."""
        with self._lock:
            return id in self._retry_at

    def settled(self, id: LayerId) -> None:
        """It is durable, or needs not be any more."""
        with self._lock:
            self._waiting.pop(id, None)
            self._retry_at.pop(id, None)
            self._verified.pop(id, None)
            self.problems.pop(str(id.path), None)

    def forget(self, ids: Iterable[LayerId]) -> None:
        """Nothing needs these, also where they are being made durable just now."""
        for id in ids:
            self.settled(id)
            with self._lock:
                self._forgotten.add(id)

    def is_forgotten(self, id: LayerId) -> bool:
        """Returns whether a layer was forgotten since `begin`."""
        with self._lock:
            return id in self._forgotten

    def failed(self, ids: Sequence[LayerId], error: NosyncError) -> None:
        """These cannot be made durable now, and are tried again."""
        log.error("not durable: %s", error)
        with self._lock:
            for id in ids:
                self.problems[str(id.path)] = str(error)
                self._retry_at[id] = self._env.monotonic_s() + self._retry_s

    # --- making durable ---------------------------------------------------------------------------------------------

    def make_durable(self, id: LayerId) -> Record:
        """Verifies and syncs the file. Raises FileNotFoundError, CorruptionError, StorageError."""
        path = self._directory.path_of(id)
        with self._lock:
            record = self._verified.pop(id, None)
        stub = self._env.stub(path)
        if stub is not None:  # it is durable where its bytes are, and how many rows it has is not known
            return Record(id, Digest(stub.digest), 0, stub.size_bytes)
        if record is None:
            reader = LayerReader.open(path, self._env, id)
            reader.verify()
            record = Record(id, reader.digest, reader.info.rows, reader.size_bytes)
        try:
            if self.is_doubtful(id):
                write_again(self._directory.root, path, self._env)
            else:
                self._env.sync_file(path)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not path.exists():
                raise  # its branch was dropped meanwhile; else it is another file that is not there
            raise storage_error("sync", path, error) from error
        return record

    def sync_directories(self, records: Iterable[Record]) -> None:
        """Syncs each layer's directory, and once the directories above it, whose entries never change again."""
        layers = self._directory.root / LAYERS
        for directory in sorted({self._directory.path_of(record.id).parent for record in records}):
            chain = [directory]
            if directory not in self._synced:
                chain += [p for p in directory.parents if p == layers or layers in p.parents]
            for path in chain:
                with storage_errors("sync", path):
                    self._env.sync_dir(path)
            self._synced.add(directory)
