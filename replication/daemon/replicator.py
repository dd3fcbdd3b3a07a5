"""The driver of the protocol on one node: its clock, its files, and the node that keeps them.

What comes from another node is written to `tmp/`, verified whole, and published by a link, as a task publishes; then
the node makes it durable like anything else, and what is durable is announced. So an acknowledgement means the same
whoever wrote the file.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

from nosync.lsm.errors import NosyncError, ReplicationError, described
from nosync.lsm.manifests.branches import MAIN
from nosync.lsm.model.timestamp import END_OF_TIME
from nosync.lsm.node.node import Node
from nosync.proto.v1 import replication_pb2 as pb
from nosync.replication.daemon.announcements import Announcements
from nosync.replication.daemon.conflicts import Conflicts
from nosync.replication.daemon.incoming_files import IncomingFiles
from nosync.replication.daemon.outgoing_files import OutgoingFiles
from nosync.replication.daemon.peer_status import NEVER_HEARD_S, peer_status
from nosync.replication.daemon.session import Counters, Session
from nosync.replication.daemon.shared_replica import SharedReplica
from nosync.replication.protocol.file_names import FileName
from nosync.replication.protocol.messages import Hello, NotFound
from nosync.replication.protocol.placement import NodeId
from nosync.replication.protocol.replica import Replica
from nosync.replication.transport.codec import Chunk

log = logging.getLogger("nosync.replication")

TICK_S = 0.6
FILL_LOOK_S = 0.02
BACK_S = 3.0
"""How long a checkpoint that is fetched waits for peers of which nothing is heard."""


class Replicator:
    """Replicates one node's store. `members`: all nodes, this one included; `start` and `stop` it."""

    def __init__(
        self,
        node: Node,
        me: NodeId,
        store_id: str,
        members: Sequence[NodeId],
        replicas: int,
        *,
        is_new_store: bool = False,
        is_being_filled: bool = False,
        filled: Callable[[], None] = lambda: None,
    ) -> None:
        """`filled`: is called when what peers have is here, where `is_being_filled`."""
        self._node, self._env = node, node.directory.env
        key_groups, now_s = node.directory.key_groups, self._env.monotonic_s()
        replica = Replica(
            me, node.incarnation, store_id, members, replicas, now_s, key_groups, is_new_store=is_new_store,
            is_being_filled=is_being_filled, process=self._env.token(),
        )  # fmt: skip
        self._filled = filled if is_being_filled else None
        self._replica, self._shared = replica, SharedReplica(replica, self._env)
        self.counters = Counters()
        self.announcements = Announcements(node, self._shared)
        """The listener of the node."""
        self.conflicts = Conflicts(self._shared, node.problems)
        self._incoming = IncomingFiles(node, self._shared, self.counters)
        self._outgoing = OutgoingFiles(node, self.counters)
        self._began_s = now_s
        self._closing = threading.Event()
        self._clock = threading.Thread(target=self._run_clock, name="nosync-replication", daemon=True)

    def start(self) -> None:
        """Announces what is there, and begins to listen to the node."""
        self._node.listen(self.announcements)
        self.announcements.versions_discarded(self._node.discarded.digests, END_OF_TIME)
        self.announcements.held_files(self._node.small.durable())
        self.announcements.held_opaque(self._node.opaque.records())
        self._clock.start()

    def stop(self) -> None:
        """Ends all sessions, and listens to the node no more."""
        self._closing.set()
        self._node.announcer.listen(None)
        if self._clock.is_alive():
            self._clock.join()
        self._shared.stop()
        self._incoming.stop()

    # --- sessions ---------------------------------------------------------------------------------------------------

    def open_session(self, identity: str | None = None) -> Session:
        """A stream to another node begins."""
        return self._shared.open_session(identity)

    def close_session(self, session: Session) -> None:
        """The stream has ended. Closing twice is fine."""
        self._shared.close_session(session)
        self._incoming.session_ended(session)

    def is_linked(self, node: NodeId) -> bool:
        """Returns whether there is a session with a node."""
        with self._shared.lock:
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
            self._incoming.came(session, message)
            return
        if isinstance(message, Hello) and session.identity not in (None, message.node):
            raise ReplicationError(f"node {message.node} has the certificate of {session.identity}")
        if isinstance(message, NotFound):
            self._incoming.gone(session, message.name)
        with self._shared.lock:
            if message is None:
                self._replica.sessions.part_came(session.id)
            else:
                self._shared.act(self._replica.received(session.id, message))

    def frames_of(self, session: Session) -> Iterator[pb.Frame]:
        """Returns what goes out on a stream, until it is closed."""
        return self._outgoing.frames_of(session)

    # --- what others ask for ----------------------------------------------------------------------------------------

    def keep_traces(self, traces: Iterable[str]) -> None:
        """A task reads these: what peers have of them is fetched."""
        self._shared.tick()
        with self._shared.lock:
            self._shared.act(self._replica.keep_traces(traces))

    def keep_all(self, patience_s: float) -> bool:
        """Lets this node keep everything from now on, and waits until it has what peers have. Returns False where it
        has not within `patience_s`.
        """
        self._shared.tick()
        with self._shared.lock:
            self._shared.act(self._replica.want_all())
        end_s = self._env.monotonic_s() + patience_s
        while self._env.monotonic_s() < end_s:
            with self._shared.lock:
                if self._replica.is_filled():
                    return True
            if self._closing.wait(FILL_LOOK_S):
                return False
        return False

    def away(self) -> list[str]:
        """Returns the peers that are not there, but for those that are not talked to."""
        with self._shared.lock:
            state = self._replica.state
            return sorted(n for n, peer in state.peers.items() if not peer.refused and not peer.is_up(state.now_s))

    def count_copies(self, names: Sequence[FileName]) -> list[int]:
        """Returns on how many nodes each file is durable, as far as they said so; 0: it is not durable here."""
        with self._shared.lock:
            return [self._replica.copies.of_mine(name) for name in names]

    def fetch_checkpoint(self, checkpoint: str, patience_s: float) -> tuple[bool, int]:
        """Keeps the files of a checkpoint here for a while: `checkpoints/<name>`. Waits until it has what peers have.

        That is all that was durable, when the call came, on a peer that is there, or is there again within a few seconds:
        where a host was lost, others may be too busy to answer at once.

        Returns whether it has that within `patience_s`, and how many files of it are durable here.
        """
        self._shared.tick()
        with self._shared.lock:
            self._shared.act(self._replica.keep_checkpoint(checkpoint))
        end_s = self._env.monotonic_s() + patience_s
        back_s, is_asked_again = self._env.monotonic_s() + BACK_S, False
        while True:
            with self._shared.lock:
                filled = self._replica.has_all_of(checkpoint)
                if not self._replica.all_are_up() and self._env.monotonic_s() < back_s:
                    filled = False
                elif filled and not is_asked_again:  # the answer may have been on its way when this call came
                    self._shared.act(self._replica.keep_checkpoint(checkpoint))
                    filled, is_asked_again = self._replica.has_all_of(checkpoint), True
                files = sum(1 for _ in self._replica.mine.of_checkpoint(checkpoint))
            if filled or self._env.monotonic_s() >= end_s or self._closing.wait(FILL_LOOK_S):
                return filled, files

    def add_member(self, node: NodeId) -> None:
        """A node joins the store."""
        with self._shared.lock:
            self._replica.add_member(node)

    def remove_member(self, node: NodeId, replicas: int) -> None:
        """A node leaves the store: its copies no longer count. Raises ReplicationError where too few are left."""
        with self._shared.lock:
            peers = self._replica.peers
            if node not in peers:
                raise ReplicationError(f"node {node} is not a peer; peers: {', '.join(peers) or 'none'}")
            if replicas > len(peers):
                raise ReplicationError(
                    f"without node {node} there are {len(peers)} nodes for replicas={replicas}: add one first"
                )
            self._shared.act(self._replica.remove_member(node))

    def digests_of(self, names: Iterable[str]) -> list[str]:
        """Returns the digests of what is durable here under these names; empty where nothing is."""
        with self._shared.lock:
            return [held.digest if (held := self._replica.mine.get(name)) is not None else "" for name in names]

    def backlog(self) -> tuple[int, bool]:
        """Returns how many bytes peers have that should be here too, and whether so many that recomputable stages
        wait.
        """
        with self._shared.lock:
            return self._replica.planner.backlog_bytes, self._replica.planner.is_loaded

    def peers(self, *, lag: bool = True) -> list[pb.PeerStatus]:
        """Returns how the peers are, and how far behind."""
        with self._shared.lock:
            now_s = self._env.monotonic_s()
            behind = self._replica.copies.lag() if lag else {}
            was_time = now_s - self._began_s > NEVER_HEARD_S
            return [
                peer_status(peer, now_s, *behind.get(peer.node, (0, 0)), was_time=was_time)
                for peer in self._replica.peers.values()
            ]

    # --- the clock --------------------------------------------------------------------------------------------------

    def _run_clock(self) -> None:
        name = threading.current_thread().name
        while not self._closing.wait(TICK_S):
            problem = ""
            for step in (
                self._ask_node,
                self._tick,
                self._look_if_filled,
            ):  # of a damaged manifest, say, peers must hear all the same
                try:
                    step()
                except Exception as error:  # without this thread peers would take the node for dead
                    problem = described(error)
                    log.error("%s", problem, exc_info=not isinstance(error, NosyncError))
            if problem:
                self._node.problems[name] = problem
            else:
                self._node.problems.pop(name, None)

    def _look_if_filled(self) -> None:
        if self._filled is None:
            return
        with self._shared.lock:
            is_filled = self._replica.is_filled()
        if is_filled:
            self._filled()
            self._filled = None

    def _ask_node(self) -> None:
        discards = self.announcements.discards
        announced, optional = self._node.safe_points.announced(), self._node.optional_stages()
        main_timeline = self._node.timelines.timeline(MAIN).id
        with self._shared.lock:
            state = self._replica.state
            state.optional, state.main_timeline = optional, main_timeline
            if discards == self.announcements.discards:
                state.safe = dict(announced)

    def _tick(self) -> None:
        self.announcements.announce_again()
        self._shared.tick()
        if not self._replica.planner.backlog_bytes:
            self._incoming.all_came()
        self._incoming.drop_old_parts()
        self.conflicts.tell()
