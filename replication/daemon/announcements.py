"""What this node tells its peers that it holds, and what it asks about theirs: the listener of the node."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from blake3 import blake3

from nosync.lsm.errors import NosyncError, ReplicationError, described
from nosync.lsm.manifests.manifest import Entry
from nosync.lsm.model.layer import LayerId, Record, TraceId
from nosync.lsm.model.timestamp import Epoch, Time
from nosync.lsm.node.metadata_checks import check_contents
from nosync.lsm.node.node import Node
from nosync.lsm.platform.layout import REGISTERS
from nosync.lsm.platform.opaque import OpaqueRecord
from nosync.replication.daemon.shared_replica import SharedReplica
from nosync.replication.protocol.file_names import FileName, FileVersion
from nosync.replication.protocol.placement import replica_set
from nosync.replication.transport.codec import check_name

log = logging.getLogger("nosync.replication")

_UNANNOUNCED = "announcing "


class Announcements:
    """Hears what becomes durable on a node, and announces it. See nosync.lsm.node.api.DurabilityListener."""

    def __init__(self, node: Node, shared: SharedReplica) -> None:
        self._node, self._root, self._env = node, node.directory.root, node.directory.env
        self._shared, self._replica = shared, shared.replica
        self._unannounced: dict[PurePosixPath, str] = {}  # files that could not be read, and why
        self.discards = 0
        """How often safe points were taken back: what was asked before is not to be told."""

    def _held_file(self, path: PurePosixPath) -> FileVersion | None:
        """Returns what a durable manifest, or entry of the log of branches, holds."""
        try:
            name = check_name(str(path))
            text = self._env.read(self._root / name)
        except ReplicationError as error:  # peers would take nothing more from a node that announced it
            log.warning("not announced: %s; move it out of the store's directory", error)
            return None
        except FileNotFoundError:
            return None  # it went with its branch, or into an archive, which is announced
        except OSError as error:
            log.error("not announced, which is tried again: %s: %s", path, error)
            with self._shared.lock:
                self._unannounced[path] = described(error)
            return None
        if path.parts[0] in REGISTERS and self._is_damaged(path, text):
            return None
        return FileVersion(name, blake3(text).hexdigest(), len(text))

    def _is_damaged(self, path: PurePosixPath, text: bytes) -> bool:
        """Puts a small fact that is not what any store writes into quarantine: peers have it, and would take it for another
        one.
        """
        try:
            check_contents(path, text)
        except NosyncError as error:
            log.error("%s; peers are asked for it", error)
            self._node.parts.quarantine.put_file(self._root / path, ".".join(path.parts[:-1]), error)
            return True
        return False

    def announce_again(self) -> None:
        """Announces what could not be read when it had become durable: peers would wait for it for ever."""
        with self._shared.lock:
            tried, self._unannounced = self._unannounced, {}
        if not tried:
            return
        self.held_files(list(tried))
        for path in tried:
            if path in self._unannounced:
                self._node.problems[_UNANNOUNCED + str(path)] = f"not announced to peers: {self._unannounced[path]}"
            else:
                self._node.problems.pop(_UNANNOUNCED + str(path), None)

    # --- the node's listener ----------------------------------------------------------------------------------------

    def held(self, added: Sequence[Record], gone: Sequence[LayerId], *, dropped: bool = False) -> None:
        """See nosync.lsm.node.api.DurabilityListener."""
        new = [held for record in added if (held := _held_layer(record)) is not None]
        names = [FileName.of_layer(id) for id in gone]
        with self._shared.lock:
            if dropped:
                self._replica.unwanted(names)
            self._shared.advance()
            self._shared.act(self._replica.holds(new, names))

    def held_files(self, paths: Sequence[PurePosixPath]) -> None:
        """See nosync.lsm.node.api.DurabilityListener."""
        held = [found for path in paths if (found := self._held_file(path)) is not None]
        with self._shared.lock:
            self._shared.advance()
            self._shared.act(self._replica.holds(held))

    def dropped_files(self, paths: Sequence[PurePosixPath]) -> None:
        """See nosync.lsm.node.api.DurabilityListener."""
        gone = [FileName(str(path)) for path in paths]
        with self._shared.lock:
            self._replica.unwanted(gone)
            self._shared.act(self._replica.holds([], gone))

    def lost_files(self, paths: Sequence[PurePosixPath], layers: Sequence[LayerId] = ()) -> None:
        """See nosync.lsm.node.api.DurabilityListener."""
        with self._shared.lock:
            self._shared.act(
                self._replica.holds([], [*(FileName(str(path)) for path in paths), *map(FileName.of_layer, layers)])
            )

    def held_opaque(self, added: Sequence[OpaqueRecord]) -> None:
        """See nosync.lsm.node.api.DurabilityListener."""
        held = [FileVersion(FileName(str(record.path)), record.digest, record.size_bytes) for record in added]
        with self._shared.lock:
            self._shared.advance()
            self._shared.act(self._replica.holds(held))

    def gone_opaque(self, paths: Sequence[PurePosixPath], *, dropped: bool) -> None:
        """See nosync.lsm.node.api.DurabilityListener."""
        gone = [FileName(str(path)) for path in paths]
        with self._shared.lock:
            if dropped:
                self._replica.unwanted(gone)
            self._shared.act(self._replica.holds([], gone))

    def versions_discarded(self, digests: Mapping[str, str], before: Time) -> None:
        """See nosync.lsm.node.api.DurabilityListener."""
        announced = self._node.safe_points.announced()
        with self._shared.lock:  # before peers hear that files are gone, or they would count what they were told before
            self._replica.state.safe = dict(announced)
            self.discards += 1
            self._replica.discard(digests, before)

    def safe_elsewhere(self, timeline: str) -> Epoch:
        """See nosync.lsm.node.api.DurabilityListener."""
        with self._shared.lock:
            return Epoch(self._replica.copies.safe_elsewhere(timeline))

    def inputs_released(self, trace: TraceId, since: Time, until: Time) -> None:
        """See nosync.lsm.node.api.DurabilityListener."""
        with self._shared.lock:
            self._replica.release(str(trace.directory), since, until)

    def is_first_replica(self, trace: TraceId) -> bool:
        """See nosync.lsm.node.api.DurabilityListener."""
        with self._shared.lock:
            members = [self._replica.me, *self._replica.peers]
            return replica_set(str(trace.directory), members, 1) == [self._replica.me]

    def has_earlier_replica(self, record: Record) -> bool:
        """See nosync.lsm.node.api.DurabilityListener."""
        name = FileName.of_layer(record.id)
        with self._shared.lock:
            now_s, me = self._env.monotonic_s(), self._replica.me
            holders = [
                p.node for p in self._replica.peers.values() if p.is_up(now_s) and p.holds.holds(name, record.digest)
            ]
            return replica_set(str(record.id.trace.directory), [me, *holders], 1) != [me]

    def copies(self, entry: Entry) -> int:
        """See nosync.lsm.node.api.DurabilityListener."""
        return self.copies_by_name(FileName.of_layer(entry.id), entry.digest)

    def copies_by_name(self, name: FileName, digest: str) -> int:
        """Returns on how many nodes a file is durable, as far as they said so."""
        with self._shared.lock:
            return self._replica.copies.of(name, digest)

    def copies_of_file(self, path: PurePosixPath) -> int:
        """See nosync.lsm.node.api.DurabilityListener."""
        with self._shared.lock:
            return self._replica.copies.of_mine(FileName(str(path)))


def _held_layer(record: Record) -> FileVersion | None:
    """Returns what a durable layer holds; None for a layer of a loop's rounds, which is gone soon."""
    d = record.id.description
    if d.is_of_rounds:
        return None
    return FileVersion(FileName.of_layer(record.id), record.digest, record.size_bytes)
