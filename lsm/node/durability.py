"""Makes durable what was published: layers first, then the small files that tell of them.

Invariants
- A record gets into the catalog only after its layer was read back and matched its digest, and file and directory were
  synced.
- One thread makes layers durable at a time.
- An epoch that is sealed meanwhile waits for the next time, or peers had its manifest before its layers.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import PurePosixPath

from nosync.lsm.errors import CorruptionError, NosyncError, StorageError
from nosync.lsm.model.layer import LayerId, Record
from nosync.lsm.node.announcer import Announcer
from nosync.lsm.node.compactor import Compactor
from nosync.lsm.node.durable_files import DurableFiles
from nosync.lsm.node.durable_layers import DurableLayers
from nosync.lsm.node.garbage import Garbage
from nosync.lsm.node.layer_sync import LayerSyncQueue
from nosync.lsm.node.merge_queue import MergeQueue
from nosync.lsm.node.metadata_sync import MetadataSync
from nosync.lsm.node.ownership import Ownership
from nosync.lsm.node.quarantine import Quarantine
from nosync.lsm.trace.directory import LayerDirectory

_RECORDED_AT_ONCE = 256

Waiting = tuple[set[LayerId], set[PurePosixPath]]


class Durability:
    """Works off the queues of layers and of small files of one directory."""

    def __init__(
        self,
        directory: LayerDirectory,
        ownership: Ownership,
        layers: DurableLayers,
        queue: LayerSyncQueue,
        small: MetadataSync,
        files: DurableFiles,
        garbage: Garbage,
        quarantine: Quarantine,
        compactor: Compactor,
        merges: MergeQueue,
        announcer: Announcer,
    ) -> None:
        self._directory, self._ownership, self._layers, self._queue = directory, ownership, layers, queue
        self._small, self._files, self._garbage, self._quarantine = small, files, garbage, quarantine
        self._compactor, self._merges, self._announcer = compactor, merges, announcer
        self._one_thread = threading.Lock()

    def drain(self, *, again: bool = False) -> None:
        """Makes durable what waits. `again`: also what failed just now, and would be tried again later."""
        with self._one_thread:
            self._ownership.check()
            self._queue.begin()
            small = self._small.waiting()
            durable = []
            for id in self._queue.due(again=again):
                try:
                    record = self._make_durable(id)
                except NosyncError as error:  # of the system, or a layer of a newer version
                    self._queue.failed([id], error)
                    continue
                if record is not None:
                    durable.append(record)
                else:
                    self._gone([id])
                if len(durable) >= _RECORDED_AT_ONCE:  # a start that is interrupted goes on from there
                    self._record(durable)
                    durable = []
            self._record(durable)
            self._files.sync(small)

    def _make_durable(self, id: LayerId) -> Record | None:
        """Makes a layer durable. Returns None where it is gone, obsolete, or torn (now in quarantine). Raises
        StorageError.
        """
        with self._layers.lock:  # a merge that is about to record it comes before or after this
            if self._layers.covering(id):
                self._garbage.discard([id], is_replaced=True)
                return None
        try:
            return self._queue.make_durable(id)
        except FileNotFoundError:
            return None
        except CorruptionError as error:
            self._quarantine.put(id, error)
            return None

    def _record(self, durable: Sequence[Record]) -> None:
        if not durable:
            return
        try:
            self._queue.sync_directories(durable)
        except StorageError as error:
            self._queue.failed([record.id for record in durable], error)
            return
        with self._layers.lock:
            mine = [record for record in durable if not self._queue.is_forgotten(record.id)]
            there = [record for record in mine if self._directory.has_file(record.id)]
            self._layers.apply(there, ())
            for record in there:
                self._queue.settled(record.id)
            self._compactor.drop_covered({record.id.trace for record in there if not record.id.is_fresh})
            self._gone([record.id for record in mine if record not in there])
        self._merges.changed({record.id.trace for record in there})

    def _gone(self, ids: Sequence[LayerId]) -> None:
        """Whoever fetched them waits for nothing more. What was forgotten meanwhile is told of, and may be there again."""
        self._ownership.check()
        with self._layers.lock:
            gone = [id for id in ids if not self._queue.is_forgotten(id)]
            for id in gone:
                self._queue.settled(id)
            self._announcer.layers((), gone)

    def waiting(self) -> Waiting:
        """Returns what is not durable yet: layers and small files."""
        return self._queue.waiting(), set(self._small.waiting())

    def check_durable(self, before: Waiting) -> None:
        """Raises StorageError where anything that waited before still does, and was not made durable meanwhile."""
        layers, files = before
        with self._layers.lock:  # others publish meanwhile, and tell again of what is durable by now
            left = sorted(id for id in layers & self._queue.waiting() if not self._queue.is_forgotten(id))
            waiting: list[object] = [id for id in left if not self.is_recorded(id)]
        waiting += files.intersection(self._small.waiting())
        self._ownership.check()  # it may have gone meanwhile
        if waiting:
            reasons = "; ".join(dict.fromkeys(self._queue.problems.values())) or "they are still being written"
            raise StorageError(f"{len(waiting)} files are published but not durable ({waiting[0]}, ...): {reasons}")

    def is_recorded(self, id: LayerId) -> bool:
        """Returns whether a layer is durable, and no fsync of it failed since."""
        return not self._queue.is_doubtful(id) and self._layers.holds(id)
