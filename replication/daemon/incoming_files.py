"""Files that come from other nodes: written to `tmp/`, verified whole, and published by a link, as a task publishes.

Then the node makes them durable like anything else. What came of a file when its session ended is kept for a while,
and the rest is asked for.
"""

from __future__ import annotations

import logging
import os
from pathlib import PurePosixPath

from blake3 import blake3

from nosync.lsm.errors import CorruptionError, NosyncError
from nosync.lsm.layers.reader import LayerReader
from nosync.lsm.model.layer import Record
from nosync.lsm.node.metadata_checks import check_contents, first_said_otherwise
from nosync.lsm.node.node import Node
from nosync.lsm.platform.env import opened_regular, storage_errors
from nosync.lsm.platform.file_pool import new_file
from nosync.lsm.platform.opaque import OpaqueRecord
from nosync.lsm.platform.publish import temporary_path
from nosync.replication.daemon.session import Counters, IncomingFile, Session
from nosync.replication.daemon.shared_replica import LOG_AGAIN_S, SharedReplica
from nosync.replication.protocol.file_names import FileName, FileVersion
from nosync.replication.transport.codec import Chunk

log = logging.getLogger("nosync.replication")

PART_KEPT_S = 600.0
_READ_BYTES = 8 << 20
_NOT_KEPT = "files that come from peers"
_MOST_LOGGED = 20
"""So many files that are not kept are logged in a while: with a full disk none is, and each is asked for again."""
_MOST_INCOMING = 64
"""So many files may come in one session at a time. Peers send one after the other; each takes a descriptor."""


class IncomingFiles:
    """The files that one node receives."""

    def __init__(self, node: Node, shared: SharedReplica, counters: Counters) -> None:
        self._node, self._root, self._env = node, node.directory.root, node.directory.env
        self._shared, self._replica, self._counters = shared, shared.replica, counters
        self._parts: dict[FileName, IncomingFile] = {}  # of files whose sessions ended in the middle of them
        self._is_stopped = False
        self._logged_s: list[float] = []

    def came(self, session: Session, chunk: Chunk) -> None:
        """A piece of a file came."""
        with self._shared.lock:
            self._replica.sessions.piece_came(session.id, len(chunk.data))
        with session.files:
            if session.is_open:
                self._chunk(session, chunk)

    def gone(self, session: Session, name: FileName) -> None:
        """A file is not there any more, perhaps since some of it came."""
        with session.files:
            if (incoming := session.incoming.pop(name, None)) is not None:
                self._abandon(incoming)

    def session_ended(self, session: Session) -> None:
        """What came in part is kept."""
        with session.files:
            parts, session.incoming = session.incoming, {}
        with self._shared.lock:
            for name, part in parts.items():
                is_part = 0 < part.received_bytes < part.held.size_bytes
                if is_part and name not in self._parts and not self._is_stopped:
                    part.stopped_s = self._env.monotonic_s()
                    self._parts[name] = part
                    self._replica.planner.has_part(part.held, part.received_bytes)
                else:
                    self._abandon(part)

    def stop(self) -> None:
        """What came in part is not kept any more."""
        with self._shared.lock:
            self._is_stopped = True
            parts, self._parts = self._parts, {}
        for part in parts.values():
            self._abandon(part)

    def all_came(self) -> None:
        """Peers have nothing that should be here too: so nothing is to come any more of what was refused."""
        self._node.problems.pop(_NOT_KEPT, None)

    def _chunk(self, session: Session, chunk: Chunk) -> None:
        name = chunk.held.name
        incoming = session.incoming.get(name)
        if incoming is None:
            with self._shared.lock:
                is_taken = self._replica.planner.accepts(session.id, chunk.held)
            if not is_taken:
                return  # discarded meanwhile, or not wanted
            if len(session.incoming) >= _MOST_INCOMING:
                oldest = next(iter(session.incoming.values()))
                self._refuse(session, oldest, f"{_MOST_INCOMING} others began before it was whole")
            incoming = self._begun(chunk.held) if chunk.offset else self._begin(chunk.held)
            if incoming is None:
                if chunk.offset:  # what this is the rest of is gone: all of it is asked for again
                    with self._shared.lock:
                        self._shared.act(self._replica.fetch_failed(name))
                return
            session.incoming[name] = incoming
        if chunk.held != incoming.held or chunk.offset != incoming.received_bytes:
            self._refuse(session, incoming, "its pieces do not follow each other")
            return
        try:
            with storage_errors("write", incoming.path):
                incoming.file.write(chunk.data)
                incoming.received_bytes += len(chunk.data)
                if incoming.received_bytes < incoming.held.size_bytes:
                    return
                incoming.file.close()
            self._keep(session, incoming)
        except (NosyncError, OSError) as error:  # whatever the disk says of one file, the link goes on
            self._refuse(session, incoming, str(error))
            return
        session.incoming.pop(name, None)
        self._node.problems.pop(_NOT_KEPT, None)
        self._counters.received_files += 1
        self._counters.received_bytes += incoming.held.size_bytes

    def _begin(self, held: FileVersion) -> IncomingFile | None:
        """Begins to receive a file. Returns None where it cannot be kept."""
        self._drop_part(held.name)
        path = temporary_path(self._root, self._env)
        try:
            with storage_errors("write", path):
                return IncomingFile(held, path, new_file(self._root, path, self._env))
        except NosyncError as error:
            self._not_kept(held.name, str(error))
        return None

    def _begun(self, held: FileVersion) -> IncomingFile | None:
        """Returns what came of a file in a session that ended. None: there is nothing that this is the rest of."""
        with self._shared.lock:
            part = self._parts.get(held.name)
            if part is None or part.held != held:
                return None
            self._replica.planner.has_part(held, 0)
            return self._parts.pop(held.name)

    def _drop_part(self, name: FileName) -> None:
        with self._shared.lock:
            part = self._parts.pop(name, None)
            if part is not None:
                self._replica.planner.has_part(part.held, 0)
                self._abandon(part)

    def drop_old_parts(self) -> None:
        """Drops parts of files that are here now, or that nobody sent the rest of."""
        with self._shared.lock:
            until_s = self._env.monotonic_s() - PART_KEPT_S
            old = [name for name, part in self._parts.items() if part.stopped_s < until_s or name in self._replica.mine]
        for name in old:
            self._drop_part(name)

    def _is_heard(self, session: Session) -> None:
        """While a large file is verified nothing is read from its sender, who is there all the same."""
        with self._shared.lock:
            self._shared.advance()
            self._replica.sessions.piece_came(session.id, 0)

    def _keep(self, session: Session, incoming: IncomingFile) -> None:
        """Verifies a whole file and publishes it. Raises CorruptionError where it is not what was announced."""
        held, final = incoming.held, self._root / incoming.held.name
        id, record, is_ours = held.name.layer, None, True
        try:
            if held.name.is_opaque:
                found = self._digest_of(session, incoming)
            elif id is not None:
                reader = LayerReader.open(incoming.path, self._env, id)
                groups = reader.info.key_groups
                if id.trace.shard.count and groups != self._node.directory.key_groups:
                    raise CorruptionError(f"{held.name}: is of {groups} key groups, this store has others")
                reader.verify(lambda: self._is_heard(session))
                found = reader.digest
                record = Record(id, reader.digest, reader.info.rows, reader.size_bytes)
            else:
                with storage_errors("read", incoming.path):
                    text = self._env.read(incoming.path)
                check_contents(PurePosixPath(held.name), text)
                self._check_same_history(session, PurePosixPath(held.name), text)
                found = blake3(text).hexdigest()
            if found != held.digest:
                raise CorruptionError(f"{held.name}: came with digest {found[:16]}, announced was {held.digest[:16]}")
            with storage_errors("publish", final):
                self._env.make_dirs(final.parent)
                try:
                    self._env.link(incoming.path, final)
                except FileExistsError:
                    record, is_ours = None, False  # the node checks what stands there, and peers are told of its digest
        finally:
            self._env.unlink(incoming.path)
        if held.name.is_opaque:  # read once more when it becomes durable, if another file took its name meanwhile
            path = PurePosixPath(held.name)
            self._node.opaque.note([path], OpaqueRecord(path, held.digest, held.size_bytes) if is_ours else None)
        elif id is not None:
            self._node.note([id], record)
        else:
            self._node.note_files([PurePosixPath(held.name)])

    def _check_same_history(self, session: Session, path: PurePosixPath, text: bytes) -> None:
        """Raises CorruptionError for an archive that says otherwise than the manifests here. Nothing that its sender has of
        these epochs is taken from then on, as long as it is the sender that it is.
        """
        t = first_said_otherwise(self._root, path, text, self._env)
        if t is None:
            return
        with self._shared.lock:
            peer = self._replica.state.by_session.get(session.id)
            if peer is not None:
                timeline = path.parent.name
                peer.differs_from[timeline] = min(t, peer.differs_from.get(timeline, t))
        raise CorruptionError(f"{path}: says of epoch {t} what the manifest here does not")

    def _digest_of(self, session: Session, incoming: IncomingFile) -> str:
        """Returns the digest of a file that came, whose contents nobody here understands."""
        hashed = blake3()
        with storage_errors("read", incoming.path), opened_regular(incoming.path, os.O_RDONLY) as (fd, _):
            while data := os.read(fd, _READ_BYTES):
                hashed.update(data)
                self._is_heard(session)
        return hashed.hexdigest()

    def _refuse(self, session: Session, incoming: IncomingFile, why: str) -> None:
        session.incoming.pop(incoming.held.name, None)
        self._abandon(incoming)
        self._not_kept(incoming.held.name, why)

    def _not_kept(self, name: FileName, why: str) -> None:
        now_s = self._env.monotonic_s()
        self._logged_s = [at_s for at_s in self._logged_s if now_s - at_s < LOG_AGAIN_S]
        if len(self._logged_s) < _MOST_LOGGED:
            self._logged_s.append(now_s)
            log.warning("not kept: %s: %s", name, why)
        self._node.problems[_NOT_KEPT] = f"not kept, and asked for again: {name}: {why}"
        self._counters.refused_files += 1
        with self._shared.lock:
            self._shared.act(self._replica.fetch_failed(name))

    def _abandon(self, incoming: IncomingFile) -> None:
        """Never raises: on a full disk closing fails too, and what is left of the file goes when the node starts
        again.
        """
        try:
            incoming.file.close()
        except OSError as error:
            log.debug("%s: %s", incoming.path, error)
        try:
            self._env.unlink(incoming.path)
        except OSError as error:
            log.warning("not removed: %s: %s", incoming.path, error)
