"""What is lost or torn: its record goes, its file goes to `quarantine/`, and whoever listens is told.

Invariants
- Nothing is taken for lost while the directory is not at its path.
- Where a merged layer is lost, what it replaced counts again, as far as its files are still there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from nosync.lsm.errors import CorruptionError, NosyncError
from nosync.lsm.layers.reader import LayerReader
from nosync.lsm.manifests.sealing import Sealer
from nosync.lsm.model.layer import LayerId
from nosync.lsm.node.announcer import Announcer
from nosync.lsm.node.durable_layers import DurableLayers
from nosync.lsm.node.garbage import Garbage
from nosync.lsm.node.layer_sync import LayerSyncQueue
from nosync.lsm.node.safe_point import SafePoint
from nosync.lsm.platform.env import storage_errors
from nosync.lsm.platform.layout import QUARANTINE
from nosync.lsm.trace.directory import LayerDirectory

log = logging.getLogger("nosync")


class Quarantine:
    """The layers and files of one directory that turned out to be bad."""

    def __init__(
        self,
        directory: LayerDirectory,
        layers: DurableLayers,
        queue: LayerSyncQueue,
        garbage: Garbage,
        sealer: Sealer,
        safe_points: SafePoint,
        announcer: Announcer,
    ) -> None:
        self._directory, self._env, self._layers, self._queue = directory, directory.env, layers, queue
        self._garbage, self._sealer, self._safe_points, self._announcer = garbage, sealer, safe_points, announcer

    def check_records(self) -> None:
        """Drops records whose file is gone or is not what was acked; the reads of a layer verify the rest of it."""
        for record in self._layers.records():
            try:
                path = self._directory.path_of(record.id)
                stub = self._env.stub(path)
                if stub is not None and stub.digest == record.digest:
                    continue
                if LayerReader.open(path, self._env, record.id).digest != record.digest:
                    raise CorruptionError(f"{record.id}: is not the file that was acknowledged ({record.digest[:16]})")
            except FileNotFoundError:
                self._gone(record.id)
            except CorruptionError as error:
                self.put(record.id, error)

    def recheck(self, ids: Iterable[LayerId]) -> list[NosyncError]:
        """Verifies every byte of these layers, and that they are what sealed epochs list; what is bad goes to
        quarantine.

        Returns an error for each.
        """
        errors: list[NosyncError] = []
        for id in ids:
            try:
                reader = LayerReader.open(self._directory.path_of(id), self._env, id)
                reader.verify()
                self._sealer.check_listed(id, reader.digest)
            except FileNotFoundError:
                continue
            except CorruptionError as error:
                self.put(id, error)
                errors.append(error)
        return errors

    def lose_vanished(self, ids: Iterable[LayerId]) -> None:
        """Takes those of these layers for lost whose files are gone."""
        for id in ids:
            if not self._directory.has_file(id):
                self._gone(id)

    def _gone(self, id: LayerId) -> None:
        if not (self._env.sees_stubs and self._is_replaced(id)):
            self.lose(id, "its file is gone")
            self._announcer.layers((), [id])

    def _is_replaced(self, id: LayerId) -> bool:
        """Returns whether another layer of a bucket has come in the place of one of a directory that is restored lazily, and
        keeps its record then.
        """
        for description in self._directory.descriptions(id.trace):
            other = LayerId(id.trace, description)
            if other == id or not description.covers(id.description):
                continue
            try:
                with self._layers.lock:
                    new = [] if self._layers.holds(other) else [self._queue.make_durable(other)]
                    self._queue.sync_directories(new)
                    self._layers.apply(new, [id])
                    self._garbage.take_back(id)
                    self._safe_points.something_changed()
            except (FileNotFoundError, CorruptionError) as error:
                log.info("%s does not stand for %s: %s", other, id, error)
                continue
            for one in (id, other):
                self._queue.settled(one)
            self._directory.forget(id)
            return True
        return False

    def lose(self, id: LayerId, why: str) -> None:
        """Takes the record of a layer away. The caller tells the listener, for what is lost together is told together."""
        with self._layers.lock:
            self._layers.drop([id])
            log.warning("lost: %s: %s; recover() recomputes it", id, why)
            self._queue.settled(id)
            self._garbage.take_back(id)
            self._safe_points.something_changed()
        self._directory.forget(id)

    def put(self, id: LayerId, error: NosyncError) -> None:
        """Sets a bad layer aside, and tells the listener that it is lost."""
        self.put_layer_file(id, error)
        self.lose(id, "its file was quarantined")
        self._announcer.layers((), [id])

    def put_layer_file(self, id: LayerId, error: NosyncError) -> None:
        """Sets the file of a layer aside."""
        self.put_file(self._directory.path_of(id), ".".join(id.path.parts[:3]), error)

    def put_files(self, errors: Sequence[CorruptionError], prefix: str = "manifest") -> None:
        """Sets the files aside of which these errors tell, under names that begin with `prefix`."""
        for error in errors:
            assert error.path is not None, "of a file that was listed"
            self.put_file(error.path, prefix, error)

    def put_file(self, path: Path, prefix: str, error: NosyncError) -> None:
        """Sets a file aside, under a name that begins with `prefix`."""
        target = self._directory.root / QUARANTINE / f"{prefix}.{path.name}.{self._env.token()}"
        log.warning("quarantined as %s: %s", target, error)
        with storage_errors("quarantine", path), suppress(FileNotFoundError):  # what is gone does no harm either
            self._env.make_dirs(target.parent)
            self._env.replace(path, target)
