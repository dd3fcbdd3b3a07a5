"""The sessions of a node: who is at the other end, whether it may be talked to, and whether it is still there."""

from __future__ import annotations

from nosync.replication.protocol.messages import PROTOCOL_VERSION, Close, Effect, Hello, Send, SessionId
from nosync.replication.protocol.peer import SUSPECT_AFTER_S, Peer
from nosync.replication.protocol.state import ReplicaState

SILENT_S = 5.0
"""A session on which nothing comes is ended, and begun again by whoever began it."""


class Sessions:
    """All sessions of one node. `hello`: what this node says of itself when one begins."""

    def __init__(self, state: ReplicaState, hello: Hello) -> None:
        self._state, self._hello = state, hello
        self._heard_s: dict[SessionId, float] = {}  # of each session that lasts, when something came last

    def begin(self, session: SessionId) -> list[Effect]:
        """A session begins; who is at its other end is not known yet."""
        self._heard_s[session] = self._state.now_s
        return [Send(session, self._hello)]

    def end(self, session: SessionId) -> None:
        """A session has ended, and what was to come on it does not. Ending twice is fine."""
        self._heard_s.pop(session, None)
        names = list(self._state.fetching.of_session(session))
        for name in names:
            self._state.fetching.end(name)
        self._state.touched(names)
        peer = self._state.by_session.pop(session, None)
        if peer is not None:
            peer.session, peer.asked_s, peer.unknown = None, None, set()
            peer.fell_silent = self._state.now_s - peer.heard_s > SUSPECT_AFTER_S / 2
            self._state.note_liveness(peer)

    def end_silent(self) -> list[Effect]:
        """Ends the sessions on which nothing came for long."""
        silent = [session for session, heard_s in self._heard_s.items() if self._state.now_s - heard_s > SILENT_S]
        for session in silent:
            self.end(session)
        return [Close(session, f"nothing was heard for {SILENT_S} s") for session in silent]

    def heard(self, session: SessionId) -> tuple[Peer | None, bool]:
        """Something came. Returns the peer, and whether it is back; of a session that has ended, or was not greeted,
        none.
        """
        if session not in self._heard_s:
            return None, False
        self._heard_s[session] = self._state.now_s
        peer = self._state.by_session.get(session)
        if peer is None:
            return None, False
        peer.heard_s = self._state.now_s
        return peer, self._state.note_liveness(peer)

    def part_came(self, session: SessionId) -> None:
        """A part of a message came that needs several frames: the other side is alive, and still answers what was
        asked.
        """
        peer, _ = self.heard(session)
        if peer is not None and peer.asked_s is not None:
            peer.asked_s = self._state.now_s

    def piece_came(self, session: SessionId, size_bytes: int) -> None:
        """A piece of a file came: the other side is alive."""
        peer, _ = self.heard(session)
        if peer is not None:
            peer.piece_s = self._state.now_s
            peer.arrived_bytes += size_bytes

    def greeted(self, session: SessionId, hello: Hello) -> tuple[Peer | None, list[Effect]]:
        """The other side says who it is. Returns the peer, unless there is a reason not to talk to it, and effects."""
        if session not in self._heard_s:
            return None, []
        self._heard_s[session] = self._state.now_s
        problem = self._objection(hello)
        if problem:
            return None, self._refuse(session, hello, problem)
        peer = self._state.peers[hello.node]
        if self._is_twin(peer, session, hello):
            self.end(session)
            return None, [Close(session, peer.twin)]
        effects: list[Effect] = []
        if peer.session is not None and peer.session != session:
            old = peer.session  # the peer came back before we noticed that it had gone
            self.end(old)
            effects.append(Close(old, f"node {peer.node} began another session"))
        if peer.incarnation != hello.incarnation:
            peer.void()
        if peer.session != session:
            peer.pushed = {}
            peer.said, peer.unsaid = 0, {}  # a greeting that comes twice does not begin our statements anew
        peer.incarnation, peer.session, peer.seq = hello.incarnation, session, -1
        peer.heard_s, peer.refused, peer.fell_silent, peer.safe = self._state.now_s, "", False, {}
        if hello.process in peer.ended:  # the other one is gone
            peer.twin_s = float("-inf")
        if peer.process and peer.process != hello.process:
            peer.ended.append(peer.process)
        peer.is_known, peer.process = False, hello.process
        self._state.by_session[session] = peer
        self._state.note_liveness(peer)
        return peer, effects

    def _is_twin(self, peer: Peer, session: SessionId, hello: Hello) -> bool:
        """Returns whether this is a run of its daemon after which another one came, that still runs: two daemons call
        themselves the same. What the one has durably, the other has not, so only the last that came is talked to.
        """
        is_another = peer.session is not None and peer.session != session and hello.process != peer.process
        if not is_another or hello.process not in peer.ended or not peer.is_up(self._state.now_s):
            return False
        peer.twin_s = self._state.now_s
        peer.twin = (
            f"two daemons run as node {peer.node}: the one that came last is talked to (incarnation {peer.incarnation}), and the "
            f"one before is not ({hello.incarnation}). Stop the wrong one. A copy of a data directory becomes a node of its own "
            "when it is emptied, and started with another --node"
        )
        return True

    def _refuse(self, session: SessionId, hello: Hello, problem: str) -> list[Effect]:
        peer = self._state.peers.get(hello.node)
        if peer is not None:
            peer.refused = problem
            # What it was is gone, whether or not it is talked to as it is.
            if hello.incarnation != peer.incarnation:
                peer.void()
        self.end(session)
        return [Close(session, problem)]

    def _objection(self, hello: Hello) -> str:
        """Returns why a node cannot be talked to, naming both values; empty where it can."""
        mine = self._hello
        if hello.version != PROTOCOL_VERSION:
            return (
                f"node {hello.node} speaks protocol version {hello.version}, this one {PROTOCOL_VERSION}: upgrade one"
            )
        if hello.node == mine.node:
            return (
                f"two nodes are called {mine.node}: this one is incarnation {mine.incarnation}, the other "
                f"{hello.incarnation}: give one another --node"
            )
        if hello.key_groups and mine.key_groups and hello.key_groups != mine.key_groups:
            return (
                f"node {hello.node} has key_groups={hello.key_groups}, this one {mine.key_groups}: it never changes, "
                "so one of the two directories has to be emptied, and made again with the other's"
            )
        if hello.store_id != mine.store_id:
            return f"node {hello.node} belongs to store {hello.store_id}, this one to {mine.store_id}"
        if hello.replicas != mine.replicas:
            return f"node {hello.node} keeps replicas={hello.replicas}, this one {mine.replicas}: make them equal"
        if hello.incarnation == mine.incarnation:
            return (
                f"node {hello.node} has this node's incarnation {mine.incarnation}: its data directory is a copy of "
                "this one. Empty one of the two directories; it is filled again"
            )
        if hello.node not in self._state.peers:
            members = ", ".join([mine.node, *self._state.peers])
            return f"node {hello.node} is not a member of this store; members: {members}"
        return ""
