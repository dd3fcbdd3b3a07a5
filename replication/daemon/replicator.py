"""The driver of the protocol on one node: its clock, its files, and the node that keeps them.

What comes from another node is written to `tmp/`, verified whole, and published by a link, as a task publishes; then
the node makes it durable like anything else, and what is durable is announced. So an acknowledgement means the same
whoever wrote the file.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from blake3 import blake3

from nosync.lsm.errors import CorruptionError, NosyncError, ReplicationError, described
from nosync.lsm.layers.reader import LayerReader
from nosync.lsm.manifests.branches import MAIN
from nosync.lsm.manifests.manifest import Entry
from nosync.lsm.model.layer import LayerId, Record, TraceId
from nosync.lsm.model.timestamp import END_OF_TIME, Epoch, Time
from nosync.lsm.node.metadata_checks import check_contents
from nosync.lsm.node.node import Node
from nosync.lsm.platform.env import storage_errors
from nosync.lsm.platform.file_pool import new_file
from nosync.lsm.platform.publish import temporary_path
from nosync.proto.v1 import replication_pb2 as pb
from nosync.replication.protocol.file_names import FileName, FileVersion
from nosync.replication.protocol.messages import (
    Close,
    Effect,
    FileRequest,
    Hello,
    Message,
    NotFound,
    Send,
    SessionId,
    bytes_of,
)
from nosync.replication.protocol.peer import Peer
from nosync.replication.protocol.placement import NodeId, replica_set
from nosync.replication.protocol.replica import Replica
from nosync.replication.transport.codec import Chunk, Decoder, Encoder, check_name

log = logging.getLogger("nosync.replication")

TICK_S = 0.6
PART_KEPT_S = 600.0
LOG_AGAIN_S = 60.0
"""After which a reason to refuse a peer is logged again."""
NEVER_HEARD = "was never heard"
NEVER_HEARD_S = 10.0
"""So long after the start a peer is said never to have been heard."""
MOST_WAITING = 100_000
"""Messages and files for one peer. One that merely is slow asks for no more than a window of files, and is silent soon.
"""
MOST_WAITING_BYTES = 64 << 20
"""Of messages for one peer that it does not take, beside the one that goes out first: it asks for more than it reads.
"""
_SENT_KEPT = 1024
_CONFLICT, _UNANNOUNCED, _NOT_KEPT = "conflict ", "announcing ", "files that come from peers"


@dataclass
class _Incoming:
    """A file that is being received."""

    held: FileVersion
    path: Path
    file: BinaryIO
    received_bytes: int = 0
    stopped_s: float = 0.0
    """When its session ended."""


@dataclass
class Session:
    """One stream to another node. `identity`: who its certificate says it is; None without TLS."""

    id: SessionId
    identity: str | None
    decoder: Decoder = field(default_factory=Decoder)
    is_greeted: bool = False
    """The Hello of the other side came."""
    outbox: deque[Message | FileRequest] = field(default_factory=deque)
    waiting_bytes: int = 0
    """Of what is in it."""
    incoming: dict[FileName, _Incoming] = field(default_factory=dict)
    sent: deque[FileName] = field(default_factory=lambda: deque(maxlen=_SENT_KEPT))
    """The files that went over last."""
    suspects: set[FileName] = field(default_factory=set)
    """Those that went over again, for which there may be a reason here."""
    files: threading.Lock = field(default_factory=threading.Lock)
    """FileVersion while a piece of a file is written."""
    closed: threading.Event = field(default_factory=threading.Event)
    more: threading.Condition = field(default_factory=threading.Condition)
    """For the one who sends: with two waiting here, a message would wake either."""

    @property
    def is_open(self) -> bool:
        return not self.closed.is_set()

    def put(self, items: Iterable[Message | FileRequest]) -> None:
        with self.more:
            if not self.is_open:
                return
            for item in items:
                self.outbox.append(item)
                self.waiting_bytes += bytes_of(item)
            is_large = len(self.outbox) > 1 and self.waiting_bytes > MOST_WAITING_BYTES
            if is_large or len(self.outbox) > MOST_WAITING:
                log.warning(
                    "a peer asks for more than it takes: %d messages and files of %d bytes wait for it",
                    len(self.outbox), self.waiting_bytes,
                )  # fmt: skip
                self.outbox.clear()
                self.waiting_bytes = 0
                self.closed.set()
            self.more.notify()

    def take(self) -> Message | FileRequest | None:
        """What goes out next, once there is something. None: the session was closed."""
        with self.more:
            self.more.wait_for(lambda: self.outbox or not self.is_open)
            if not self.outbox:
                return None
            item = self.outbox.popleft()
            self.waiting_bytes -= bytes_of(item)
            return item

    def close(self) -> None:
        with self.more:
            self.closed.set()
            self.more.notify()


@dataclass
class Counters:
    """What went over the wire since the start."""

    sent_bytes: int = 0
    sent_files: int = 0
    received_bytes: int = 0
    received_files: int = 0
    refused_files: int = 0
    """Received, and not what was announced."""


class Replicator:
    """Replicates one node's store. `members`: all nodes, this one included; `start` and `stop` it."""

    def __init__(self, node: Node, me: NodeId, store_id: str, members: Sequence[NodeId], replicas: int) -> None:
        self._node, self._root, self._env = node, node.directory.root, node.directory.env
        self._lock = threading.RLock()
        key_groups = node.directory.key_groups
        self._replica = Replica(me, node.incarnation, store_id, members, replicas, self._env.monotonic_s(), key_groups)
        self._sessions: dict[SessionId, Session] = {}
        self._unannounced: dict[PurePosixPath, str] = {}  # files that could not be read, and why
        self._logged_s: dict[str, float] = {}  # reasons, and when they were logged
        self._parts: dict[FileName, _Incoming] = {}  # of files whose sessions ended in the middle of them
        self._next_session = 0
        self._began_s = self._env.monotonic_s()
        self._closing = threading.Event()
        self._clock = threading.Thread(target=self._run_clock, name="nosync-replication", daemon=True)
        self.counters = Counters()

    def start(self) -> None:
        """Announces what is there, and begins to listen to the node."""
        self._node.listen(self)
        self.versions_discarded(self._node.discarded.digests, END_OF_TIME)
        self.held_files(self._node.small.durable())
        self._clock.start()

    def stop(self) -> None:
        self._closing.set()
        self._node.listener = None
        if self._clock.is_alive():
            self._clock.join()
        with self._lock:
            for session in self._sessions.values():
                session.close()
            parts, self._parts = self._parts, {}
        for part in parts.values():
            self._abandon(part)

    def _held_file(self, path: PurePosixPath) -> FileVersion | None:
        """What a durable manifest, or entry of the log of branches, holds."""
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
            with self._lock:
                self._unannounced[path] = described(error)
            return None
        return FileVersion(name, blake3(text).hexdigest(), len(text))

    def _announce_again(self) -> None:
        """What could not be read when it had become durable: peers would wait for it for ever."""
        with self._lock:
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
        with self._lock:
            if dropped:
                self._replica.unwanted(names)
            self._replica.state.advance(
                self._env.monotonic_s()
            )  # who fell silent since the last tick is sent nothing unasked
            self._act(self._replica.holds(new, names))

    def held_files(self, paths: Sequence[PurePosixPath]) -> None:
        """See nosync.lsm.node.api.DurabilityListener."""
        held = [found for path in paths if (found := self._held_file(path)) is not None]
        with self._lock:
            self._replica.state.advance(self._env.monotonic_s())
            self._act(self._replica.holds(held))

    def dropped_files(self, paths: Sequence[PurePosixPath]) -> None:
        """See nosync.lsm.node.api.DurabilityListener."""
        gone = [FileName(str(path)) for path in paths]
        with self._lock:
            self._replica.unwanted(gone)
            self._act(self._replica.holds([], gone))

    def lost_files(self, paths: Sequence[PurePosixPath], layers: Sequence[LayerId] = ()) -> None:
        """See nosync.lsm.node.api.DurabilityListener."""
        with self._lock:
            self._act(
                self._replica.holds([], [*(FileName(str(path)) for path in paths), *map(FileName.of_layer, layers)])
            )

    def versions_discarded(self, digests: Mapping[str, str], before: Time) -> None:
        """See nosync.lsm.node.api.DurabilityListener."""
        with self._lock:
            self._replica.discard(digests, before)

    def conflicts(self) -> list[FileName]:
        """Files of which peers hold other contents."""
        with self._lock:
            return sorted(self._replica.conflicts())

    def conflicts_to_discard(self) -> list[FileName]:
        """As `conflicts`, where the other contents can be fetched from a peer that is up. Raises ReplicationError where
        there are only others.
        """
        with self._lock:
            self._act(self._replica.tick(self._env.monotonic_s()))
            found = self._replica.conflicts()
            up = {peer.node for peer in self._replica.peers.values() if peer.is_up(self._replica.state.now_s)}
        names = sorted(name for name, (node, _, _) in found.items() if node in up)
        if found and not names:
            nodes = ", ".join(sorted({node for node, _, _ in found.values()}))
            raise ReplicationError(
                f"the other contents are on {nodes}, which is away: giving up what is here would leave nothing. Start its daemon "
                "first; or take it out with nosync peers --remove, if it is gone for good, and what is here counts"
            )
        return names

    def safe_elsewhere(self, timeline: str) -> Epoch:
        """See nosync.lsm.node.api.DurabilityListener."""
        with self._lock:
            return Epoch(self._replica.safe_elsewhere(timeline))

    def inputs_released(self, trace: TraceId, until: Time) -> None:
        """See nosync.lsm.node.api.DurabilityListener."""
        with self._lock:
            self._replica.release(str(trace.directory), until)

    def is_first_replica(self, trace: TraceId) -> bool:
        """See nosync.lsm.node.api.DurabilityListener."""
        with self._lock:
            members = [self._replica.me, *self._replica.peers]
            return replica_set(str(trace.directory), members, 1) == [self._replica.me]

    def has_earlier_replica(self, record: Record) -> bool:
        """See nosync.lsm.node.api.DurabilityListener."""
        name = FileName.of_layer(record.id)
        with self._lock:
            now_s, me = self._env.monotonic_s(), self._replica.me
            holders = [
                p.node for p in self._replica.peers.values() if p.is_up(now_s) and p.holds.holds(name, record.digest)
            ]
            return replica_set(str(record.id.trace.directory), [me, *holders], 1) != [me]

    def copies(self, entry: Entry) -> int:
        """See nosync.lsm.node.api.DurabilityListener."""
        return self.copies_by_name(FileName.of_layer(entry.id), entry.digest)

    def copies_by_name(self, name: FileName, digest: str) -> int:
        """On how many nodes a file is durable, as far as they said so."""
        with self._lock:
            return self._replica.copies(name, digest)

    def digests_of(self, names: Iterable[str]) -> list[str]:
        """Of files, the digests of what is durable here under these names; empty where nothing is."""
        with self._lock:
            return [held.digest if (held := self._replica.mine.get(name)) is not None else "" for name in names]

    def copies_of_file(self, path: PurePosixPath) -> int:
        """See nosync.lsm.node.api.DurabilityListener."""
        with self._lock:
            return self._replica.copies_of_mine(FileName(str(path)))

    def keep_traces(self, traces: Iterable[str]) -> None:
        """A task reads these: what peers have of them is fetched."""
        with self._lock:
            self._act(self._replica.tick(self._env.monotonic_s()))
            self._act(self._replica.keep_traces(traces))

    def keep_all(self, patience_s: float) -> bool:
        """From now on this node keeps everything. Waits until it has what peers have; False: it has not within
        `patience_s`.
        """
        with self._lock:
            self._act(self._replica.tick(self._env.monotonic_s()))
            self._act(self._replica.want_all())
        end = self._env.monotonic_s() + patience_s
        while self._env.monotonic_s() < end:
            with self._lock:
                if self._replica.is_filled():
                    return True
            if self._closing.wait(0.02):
                return False
        return False

    def add_member(self, node: NodeId) -> None:
        """A node joins the store."""
        with self._lock:
            self._replica.add_member(node)

    def remove_member(self, node: NodeId, replicas: int) -> None:
        """A node leaves the store: its copies count no more. Raises ReplicationError where too few are left."""
        with self._lock:
            if node not in self._replica.peers:
                raise ReplicationError(f"node {node} is not a peer; peers: {', '.join(self._replica.peers) or 'none'}")
            if replicas > len(self._replica.peers):
                raise ReplicationError(
                    f"without node {node} there are {len(self._replica.peers)} nodes for replicas={replicas}: add one first"
                )
            self._act(self._replica.remove_member(node))

    # --- sessions ---------------------------------------------------------------------------------------------------

    def open_session(self, identity: str | None = None) -> Session:
        """A stream to another node begins."""
        with self._lock:
            session = Session(SessionId(self._next_session), identity)
            self._next_session += 1
            if self._closing.is_set():
                session.close()
                return session
            self._sessions[session.id] = session
            self._act(self._replica.connected(session.id))
        return session

    def close_session(self, session: Session) -> None:
        """The stream has ended. Closing twice is fine."""
        session.close()
        with self._lock:
            if self._sessions.pop(session.id, None) is not None:
                self._act(self._replica.disconnected(session.id))
        with session.files:
            parts, session.incoming = session.incoming, {}
        with self._lock:
            for name, part in parts.items():
                if part.received_bytes and name not in self._parts and not self._closing.is_set():
                    part.stopped_s = self._env.monotonic_s()
                    self._parts[name] = part
                    self._replica.has_part(part.held, part.received_bytes)
                else:
                    self._abandon(part)

    def is_linked(self, node: NodeId) -> bool:
        """Whether there is a session with a node."""
        with self._lock:
            peer = self._replica.peers.get(node)
            return peer is not None and peer.session is not None

    def received(self, session: Session, frame: pb.Frame) -> None:
        """A frame came. Raises ReplicationError for one that no node sends: the stream is then ended."""
        if not session.is_open:
            return  # of what still comes nothing is kept
        if not session.is_greeted and frame.WhichOneof("kind") != "hello":
            raise ReplicationError(f"a stream that begins with {frame.WhichOneof('kind')}, and not with a Hello")
        session.is_greeted = True
        message = session.decoder.decode(frame)
        if isinstance(message, Chunk):
            with self._lock:
                self._replica.heard_from(session.id, len(message.data))
            with session.files:
                if session.is_open:
                    self._chunk(session, message)
            return
        if message is None:
            with self._lock:
                self._replica.part_came(session.id)
            return
        if isinstance(message, Hello) and session.identity not in (None, message.node):
            raise ReplicationError(f"node {message.node} has the certificate of {session.identity}")
        if isinstance(message, NotFound):
            with session.files:  # it may have gone in the middle
                if (incoming := session.incoming.pop(message.name, None)) is not None:
                    self._abandon(incoming)
        with self._lock:
            self._act(self._replica.received(session.id, message))

    def frames_of(self, session: Session) -> Iterator[pb.Frame]:
        """What goes out on a stream, until it is closed. Files are read as they are sent, so the stream holds them
        back.
        """
        encoder = Encoder()
        while True:
            item = session.take()
            if item is None:
                return
            if isinstance(item, FileRequest):
                yield from self._file_frames(session, item, encoder)
            else:
                yield from encoder.frames(item)

    def _file_frames(self, session: Session, wanted: FileRequest, encoder: Encoder) -> Iterator[pb.Frame]:
        held = wanted.held
        if held.name in session.sent and held.name not in session.suspects and not wanted.offset:
            session.suspects.add(held.name)
            self._doubt(held)  # it was of no use there; or it is lost again, or was not wanted before
        session.sent.append(held.name)
        try:
            with open(self._root / held.name, "rb") as file:
                size_bytes = os.fstat(file.fileno()).st_size
                if size_bytes != held.size_bytes:
                    raise OSError(errno.EIO, f"the file has {size_bytes} bytes, and had {held.size_bytes}")
                yield from encoder.chunks(wanted, file)
        except FileNotFoundError:
            yield from encoder.frames(NotFound(held.name))  # merged since it was asked for
            return
        except OSError as error:
            log.warning("cannot send %s: %s", held.name, error)  # the other side asks again, here or elsewhere
            self._doubt(held)
            yield from encoder.frames(NotFound(held.name))
            return
        self.counters.sent_files += 1
        self.counters.sent_bytes += held.size_bytes - wanted.offset

    def _doubt(self, held: FileVersion) -> None:
        id = held.name.layer
        self._node.suspect([] if id is None else [id], [PurePosixPath(held.name)] if id is None else [])

    def _act(self, effects: list[Effect]) -> None:
        """Called with the lock held; puts into queues, and nothing else."""
        for effect in effects:
            session = self._sessions.get(effect.session)
            if session is None:
                continue
            if isinstance(effect, Send):
                session.put([effect.message])
            elif isinstance(effect, Close):
                self._log_again(effect.reason)
                session.close()
            else:
                session.put(effect.files)

    def _log_again(self, reason: str) -> None:
        """Now and then: who is refused dials again and again."""
        now_s = self._env.monotonic_s()
        if now_s - self._logged_s.get(reason, -LOG_AGAIN_S) >= LOG_AGAIN_S:
            log.warning("%s", reason)
            self._logged_s = {one: at for one, at in self._logged_s.items() if now_s - at < LOG_AGAIN_S} | {
                reason: now_s
            }

    # --- files that come --------------------------------------------------------------------------------------------

    def _chunk(self, session: Session, chunk: Chunk) -> None:
        name = chunk.held.name
        incoming = session.incoming.get(name)
        if incoming is None:
            with self._lock:
                is_taken = self._replica.accepts(session.id, chunk.held)
            if not is_taken:
                return  # given up meanwhile, or not wanted
            incoming = self._begun(chunk.held) if chunk.offset else self._begin(chunk.held)
            if incoming is None:
                if chunk.offset:  # what this is the rest of is gone: all of it is asked for again
                    with self._lock:
                        self._act(self._replica.fetch_failed(name))
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
        except NosyncError as error:
            self._refuse(session, incoming, str(error))
            return
        session.incoming.pop(name, None)
        self._node.problems.pop(_NOT_KEPT, None)
        self.counters.received_files += 1
        self.counters.received_bytes += incoming.held.size_bytes

    def _begin(self, held: FileVersion) -> _Incoming | None:
        """None: it cannot be kept."""
        self._drop_part(held.name)
        path = temporary_path(self._root, self._env)
        try:
            with storage_errors("write", path):
                return _Incoming(held, path, new_file(self._root, path, self._env))
        except NosyncError as error:
            self._not_kept(held.name, str(error))
        return None

    def _begun(self, held: FileVersion) -> _Incoming | None:
        """What came of a file in a session that ended. None: nothing that this is the rest of."""
        with self._lock:
            part = self._parts.get(held.name)
            if part is None or part.held != held:
                return None
            self._replica.has_part(held, 0)
            return self._parts.pop(held.name)

    def _drop_part(self, name: FileName) -> None:
        with self._lock:
            part = self._parts.pop(name, None)
            if part is not None:
                self._replica.has_part(part.held, 0)
                self._abandon(part)

    def _drop_old_parts(self) -> None:
        """Of files that are here now, or that nobody sent the rest of."""
        with self._lock:
            until_s = self._env.monotonic_s() - PART_KEPT_S
            old = [name for name, part in self._parts.items() if part.stopped_s < until_s or name in self._replica.mine]
        for name in old:
            self._drop_part(name)

    def _is_heard(self, session: Session) -> None:
        """While a large file is verified nothing is read from its sender, who is there all the same."""
        with self._lock:
            self._replica.state.advance(max(self._replica.state.now_s, self._env.monotonic_s()))
            self._replica.heard_from(session.id, 0)

    def _keep(self, session: Session, incoming: _Incoming) -> None:
        """Verifies a whole file and publishes it. Raises CorruptionError where it is not what was announced."""
        held, final = incoming.held, self._root / incoming.held.name
        id, record = held.name.layer, None
        try:
            if id is not None:
                reader = LayerReader.open(incoming.path, self._env, id)
                groups = reader.info.key_groups
                if id.trace.shard.count and groups != self._node.directory.key_groups:
                    raise CorruptionError(f"{held.name}: is of {groups} key groups, this store has others")
                reader.verify(lambda: self._is_heard(session))
                found: str = reader.digest
                record = Record(id, reader.digest, reader.info.rows, reader.size_bytes)
            else:
                text = self._env.read(incoming.path)
                check_contents(PurePosixPath(held.name), text)
                found = blake3(text).hexdigest()
            if found != held.digest:
                raise CorruptionError(f"{held.name}: came with digest {found[:16]}, announced was {held.digest[:16]}")
            with storage_errors("publish", final):
                self._env.make_dirs(final.parent)
                try:
                    self._env.link(incoming.path, final)
                except FileExistsError:
                    record = None  # the node checks what stands there, and peers are told of its digest
        finally:
            self._env.unlink(incoming.path)
        if id is not None:
            self._node.note([id], record)
        else:
            self._node.note_files([PurePosixPath(held.name)])

    def _refuse(self, session: Session, incoming: _Incoming, why: str) -> None:
        session.incoming.pop(incoming.held.name, None)
        self._abandon(incoming)
        self._not_kept(incoming.held.name, why)

    def _not_kept(self, name: FileName, why: str) -> None:
        log.warning("not kept: %s: %s", name, why)
        self._node.problems[_NOT_KEPT] = f"not kept, and asked for again: {name}: {why}"
        self.counters.refused_files += 1
        with self._lock:
            self._act(self._replica.fetch_failed(name))

    def _abandon(self, incoming: _Incoming) -> None:
        """Never raises: on a full disk closing fails too, and what is left of the file goes when the node starts again."""
        try:
            incoming.file.close()
        except OSError as error:
            log.debug("%s: %s", incoming.path, error)
        try:
            self._env.unlink(incoming.path)
        except OSError as error:
            log.warning("not removed: %s: %s", incoming.path, error)

    # --- clock and questions ----------------------------------------------------------------------------------------

    def _run_clock(self) -> None:
        name = threading.current_thread().name
        while not self._closing.wait(TICK_S):
            problem = ""
            for step in (self._ask_node, self._tick):  # of a damaged manifest, say, peers must hear all the same
                try:
                    step()
                except Exception as error:  # without this thread peers would take the node for dead
                    problem = described(error)
                    log.error("%s", problem, exc_info=not isinstance(error, NosyncError))
            if problem:
                self._node.problems[name] = problem
            else:
                self._node.problems.pop(name, None)

    def _ask_node(self) -> None:
        announced, optional = self._node.safe_points.announced(), self._node.optional_stages()
        main_timeline = self._node.timelines.timeline(MAIN).id
        with self._lock:
            state = self._replica.state
            state.safe, state.optional, state.main_timeline = dict(announced), optional, main_timeline

    def _tick(self) -> None:
        self._announce_again()
        with self._lock:
            self._act(self._replica.tick(self._env.monotonic_s()))
            conflicts, discarded = self._replica.conflicts(), self._replica.discarded_elsewhere()
            if not self._replica.planner.backlog_bytes:  # of what was refused, nothing is to come any more
                self._node.problems.pop(_NOT_KEPT, None)
        self._drop_old_parts()
        for name in list(self._node.problems):  # in one go: other threads change it
            if name.startswith(_CONFLICT) and name[len(_CONFLICT) :] not in {*conflicts, *discarded}:
                self._node.problems.pop(name, None)
        for name, node in discarded.items():
            self._node.problems[_CONFLICT + name] = (
                f"was given up here, and node {node} still holds it: nosync conflicts --take-theirs there as well, or wait for "
                "the node whose contents count"
            )
        for name, (node, ours, theirs) in conflicts.items():
            self._node.problems[_CONFLICT + name] = (
                f"node {node} has other contents: digest {theirs[:16]} there, {ours[:16]} here; a stage is not "
                "deterministic, or two jobs ran. The safe point waits until one of the two gives way: nosync conflicts"
            )

    def backlog(self) -> tuple[int, bool]:
        """How many bytes peers have that should be here too, and whether so many that recomputable stages wait."""
        with self._lock:
            return self._replica.planner.backlog_bytes, self._replica.planner.is_loaded

    def peers(self, *, lag: bool = True) -> list[pb.PeerStatus]:
        """How the peers are, and how far behind."""
        with self._lock:
            now_s = self._env.monotonic_s()
            behind = self._replica.lag() if lag else {}
            was_time = now_s - self._began_s > NEVER_HEARD_S
            return [
                _peer_status(peer, now_s, *behind.get(peer.node, (0, 0)), was_time=was_time)
                for peer in self._replica.peers.values()
            ]


def _peer_status(peer: Peer, now_s: float, files: int, size: int, *, was_time: bool) -> pb.PeerStatus:
    """`was_time`: this node has been there for long enough to be found."""
    why = peer.refused
    if not why and peer.session is None and peer.heard_s == float("-inf") and was_time:
        why = f"{NEVER_HEARD}: its daemon is away, or names no such peer as this node (there nosync peers DIR --add)"
    if peer.session is not None:
        state = "up" if peer.is_up(now_s) else "suspect"
    else:
        state = "refused" if peer.refused else "silent" if peer.fell_silent else "away"
    silent_s = now_s - peer.heard_s if peer.heard_s > float("-inf") else -1.0
    return pb.PeerStatus(
        node=peer.node,
        state=state,
        incarnation=peer.incarnation or "",
        behind_files=files,
        behind_bytes=size,
        silent_s=silent_s,
        why=why,
    )


def _held_layer(record: Record) -> FileVersion | None:
    """None for the layers of a loop's rounds, which are gone soon."""
    d = record.id.description
    if d.is_of_rounds:
        return None
    return FileVersion(FileName.of_layer(record.id), record.digest, record.size_bytes)
