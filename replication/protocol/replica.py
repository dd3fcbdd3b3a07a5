"""The protocol between the nodes of a store: events in, effects out. No clock, thread, socket or file inside.

Every node tells every other what it durably holds, and fetches what it is missing and should hold. That is all:
fresh layers, catching up after an absence, filling a new node and repairing a damaged one are the same exchange, and
doing any of it twice or in another order changes nothing.

The parts share one record, `state.py`: `sessions.py` knows who is there, `statements.py` says what is held and hears
what peers hold, `todo.py` works out what is missing, `fetch_planner.py` asks for it, `eager_push.py` sends what was
not asked for, and `copies.py` counts. `placement.py` says which nodes keep a trace.

Invariants
- An `Have` or `Change` names, and a `Summary` hashes, only files that are durable, with the digest that was
  verified, under the incarnation of the `Hello` that began its session. So each is an acknowledgement, and nothing
  else is.
- What a peer holds is known per incarnation: a `Hello` with another one voids all that was known.
- Who gave a file is told at once that it is durable here, and everyone of what came from this node, and of what is
  gone; the others with the next heartbeat, because nobody waits for it.
- Statements of a session are numbered, and count in order only. A gap, or a heartbeat whose hash does not fit, asks for
  the inventory again: a summary by groups of files, and then the names in those groups whose hash is neither that of
  what the peer was known to hold nor that of what this node holds. So meeting again costs what changed, not what
  there is.
- A file is fetched from one peer at a time, at most a window of bytes at once, and kept only if its bytes have the
  digest that was announced.
- What is small and was just written here goes unasked to who keeps it, ahead of the statement that it is durable
  here: that saves a question and its answer. Who does not want it throws it away; who is slow to take it is asked
  for no more.
- Where a peer sealed other contents, what it has from that epoch on is another history: it is neither fetched nor
  counted, merged layers that reach into it least of all, until an operator says whose contents count.
- Nobody waits for anybody: no event blocks, and a peer that is away only falls behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from nosync.lsm.model.timestamp import Time
from nosync.replication.protocol.copies import Copies
from nosync.replication.protocol.eager_push import EagerPush
from nosync.replication.protocol.fetch_planner import KEEP_S, FetchPlanner
from nosync.replication.protocol.file_names import FileName, FileVersion
from nosync.replication.protocol.messages import (
    Close,
    Effect,
    FileRequest,
    Hello,
    InventoryRequest,
    Message,
    NotFound,
    Send,
    SendFiles,
    SessionId,
    Want,
)
from nosync.replication.protocol.peer import HEARTBEAT_S, Peer
from nosync.replication.protocol.placement import NodeId, Placement
from nosync.replication.protocol.sessions import Sessions
from nosync.replication.protocol.state import ReplicaState
from nosync.replication.protocol.statements import Statements

MEET_S = 2.0
"""So long after its start a node waits for peers that it has not met before it says that it has what they have."""
UNWANTED_S = 10.0
"""How long what was dropped here is not taken from those who have not dropped it yet, and get it meanwhile."""


class Replica:
    """The protocol on one node. `members`: all nodes of the store, this one included.

    What needs no answer, and questions, go to the part that is asked: `sessions`, `planner`, `copies`, `state`.
    """

    def __init__(
        self,
        me: NodeId,
        incarnation: str,
        store_id: str,
        members: Iterable[NodeId],
        replicas: int,
        now_s: float = 0.0,
        key_groups: int = 0,
        *,
        is_new_store: bool = False,
        is_being_filled: bool = False,
        process: str = "",
    ) -> None:
        """`is_new_store`: where nothing is here, it is not because a disk was lost. `is_being_filled`: nothing was here, and
        what peers have has not all come since. `process`: this run of the daemon.
        """
        self.me = me
        peers = {node: Peer(node) for node in sorted(set(members) - {me})}
        self.state = ReplicaState(Placement(me, replicas), peers, now_s)
        self.mine, self.peers = self.state.mine, self.state.peers
        self.sessions = Sessions(
            self.state, Hello(me, incarnation, store_id, replicas, key_groups=key_groups, process=process)
        )
        self.planner = FetchPlanner(self.state)
        self.copies = Copies(self.state, me, replicas)
        self._push = EagerPush(self.state)
        self._statements = Statements(self.state, self.planner)
        self._began_s = self._heartbeat_s = now_s
        self._is_new_store = is_new_store
        self.is_being_filled = is_being_filled

    # --- events: this node ------------------------------------------------------------------------------------------

    def holds(self, added: Iterable[FileVersion], gone: Iterable[FileName] = ()) -> list[Effect]:
        """These files are durable here now, and those are gone. Says so: at once to who waits for it, else with the
        next heartbeat.
        """
        mine, fetching = self.mine, self.state.fetching
        added, names = tuple(added), tuple(gone)
        gone = tuple(name for name in names if name in mine)
        givers = {h.name: fetching[h.name].session if h.name in fetching else None for h in added}
        for name in names:
            if name in fetching and name not in mine:  # it came, and what stood there in its place was no good
                self.planner.failed(name)
        for held in added:
            mine.add(held)
            self.planner.came(held)
            for peer in self.peers.values():
                peer.unwanted.pop(held.name, None)
        for name in gone:
            mine.discard(name)
        changed = [*(held.name for held in added), *gone]
        self.state.touched(changed)
        for archive in [name for name in changed if name.archive]:
            for peer in self.peers.values():
                peer.dirty.update(peer.holds.manifests_of(archive))
        if not changed:
            return []
        return [*self._tell(added, gone, givers), *self.planner.fetch()]

    def _tell(
        self, added: tuple[FileVersion, ...], gone: tuple[FileName, ...], givers: Mapping[FileName, SessionId | None]
    ) -> list[Effect]:
        """Tells peers what changed here. `givers`: the sessions on which files came; None: a file was written here."""
        fresh = [h for h in added if not gone and givers[h.name] is None and self._push.may_push(h)]
        effects: list[Effect] = []
        for peer in self.state.linked():
            effects += self._push.push(peer, fresh)
            peer.unsaid |= {held.name: held for held in added}
            peer.unsaid |= dict.fromkeys(gone)
            if gone or None in givers.values() or peer.session in givers.values():
                effects += peer.say()
        return effects

    def unwanted(self, names: Iterable[FileName]) -> None:
        """Nobody needs these any more: what belonged to a branch that was deleted is not fetched from those who
        still have it.

        A branch that is made again has layers of the same names. So this holds until a peer has dropped its own.
        """
        for name in names:
            for peer in self.peers.values():
                peer.unwanted[name] = float("inf") if name in peer.holds else self.state.now_s + UNWANTED_S

    def fetch_failed(self, name: FileName) -> list[Effect]:
        """A file did not come whole, or could not be kept. It is tried again later, from anyone."""
        self.planner.failed(name)
        return self.planner.fetch()

    def tick(self, now_s: float) -> list[Effect]:
        """Time passes: heartbeats go out, silent fetches are abandoned."""
        self.state.advance(now_s)
        effects = [*self.planner.give_up_slow(), *self.sessions.end_silent()]
        if now_s - self._heartbeat_s >= HEARTBEAT_S:
            self.planner.heartbeat(now_s - self._heartbeat_s)
            self._heartbeat_s = now_s
            self._push.pause_slow()
            for peer in self.peers.values():
                peer.unwanted = {name: until for name, until in peer.unwanted.items() if until > now_s}
            effects += self._statements.heartbeat()
        return [*effects, *self.planner.fetch()]

    def keep_traces(self, traces: Iterable[str]) -> list[Effect]:
        """A task here reads these (directories of traces): this node keeps them for a while, whoever else does."""
        state = self.state
        state.look_again(state.placement.keep_no_longer(state.now_s))
        state.look_again(state.placement.keep(traces, state.now_s + KEEP_S))
        return self.planner.fetch()

    def keep_checkpoint(self, checkpoint: str) -> list[Effect]:
        """A query is to start here: this node keeps a checkpoint for a while, and asks its peers what they hold by now."""
        return [*self._ask_all(), *self.keep_traces([checkpoint])]

    def want_all(self) -> list[Effect]:
        """A job runs here and wants to read all: this node keeps what others keep as well, and asks them what that
        is by now.

        What they came to hold since their last heartbeat they may not have said yet, and who gave it to them may be
        gone.
        """
        if not self.state.placement.keep_all:
            self.state.placement.keep_all = True
            for peer in self.peers.values():
                peer.dirty.update(peer.holds.traces())
        return [*self._ask_all(), *self.planner.fetch()]

    def _ask_all(self) -> list[Effect]:
        to_ask = [peer for peer in self.state.linked() if peer.asked_s is None]
        return [effect for peer in to_ask for effect in self._statements.ask(peer)]

    def discard(self, digests: Mapping[str, str], before: Time) -> None:
        """These contents count no more, all that were discarded so far; inputs are needed again that end after
        `before`.
        """
        self.state.discarded = dict(digests)
        self.state.look_again(self.state.placement.take_back_release(before))
        for peer in self.peers.values():
            peer.touched([held.name for name in digests if (held := peer.holds.get(name)) is not None])

    def release(self, trace: str, since: Time, until: Time) -> None:
        """Inputs are safe: layers of this trace from `since` to `until` are fetched no more, unless a task asks for
        them.
        """
        if since > self.state.placement.released_since.get(trace, 0):  # more of it is kept than before
            self.state.look_again({trace})
        self.state.placement.release(trace, since, until)
        for peer in self.peers.values():
            if trace in peer.todo:
                peer.dirty.add(trace)

    def add_member(self, node: NodeId) -> None:
        """A node joins. It is filled in the background."""
        if node != self.me:
            self.peers.setdefault(node, Peer(node))

    def remove_member(self, node: NodeId) -> list[Effect]:
        """An operator took a node out: its copies no longer count."""
        peer = self.peers.pop(node, None)
        self.state.look_again(self.state.placement.changed(node, is_up=False))
        if peer is None or peer.session is None:
            return []
        session = peer.session
        self.sessions.end(session)
        return [Close(session, f"node {node} was removed from the store's members")]

    # --- events: sessions -------------------------------------------------------------------------------------------

    def connected(self, session: SessionId) -> list[Effect]:
        """A session begins; who is at its other end is not known yet."""
        return self.sessions.begin(session)

    def disconnected(self, session: SessionId) -> list[Effect]:
        """A session has ended."""
        self.sessions.end(session)
        return self.planner.fetch()

    def received(self, session: SessionId, message: Message) -> list[Effect]:
        """A message came. Of sessions that have ended nothing counts."""
        if isinstance(message, Hello):
            greeted, effects = self.sessions.greeted(session, message)
            return effects if greeted is None else [*effects, *self._statements.ask(greeted)]
        peer, is_back = self.sessions.heard(session)
        if peer is None:
            return []
        effects = self._heard(peer, session, message)
        return [*effects, *self.planner.fetch()] if is_back else effects

    def _heard(self, peer: Peer, session: SessionId, message: Message) -> list[Effect]:
        """A peer says something, and not who it is."""
        if isinstance(message, InventoryRequest):
            return self._statements.answer(peer, message.groups)
        if isinstance(message, Want):
            return self._wanted(session, message)
        if isinstance(message, NotFound):
            fetch = self.state.fetching.get(message.name)
            return [] if fetch is None or fetch.session != session else self.fetch_failed(message.name)
        assert not isinstance(message, Hello), "that is what begins a session"
        return self._statements.received(peer, message)

    def _wanted(self, session: SessionId, want: Want) -> list[Effect]:
        there: list[FileRequest] = []
        effects: list[Effect] = []
        for request in want.files:
            if self.mine.get(request.held.name) == request.held:
                there.append(request)
            else:
                effects.append(Send(session, NotFound(request.held.name)))
        return [*effects, SendFiles(session, tuple(there))] if there else effects

    # --- questions --------------------------------------------------------------------------------------------------

    def is_filled(self) -> bool:
        """Returns whether nothing that should be here and that any peer has is missing.

        What peers have that nobody met yet is not known: so it is not right after the start, while they may be on
        their way. A node that has nothing at all may be one that lost its disk: it waits until it has met them all.
        """
        has_nothing = not len(self.mine) and not self._is_new_store
        if has_nothing and not all(peer.is_known or peer.refused for peer in self.peers.values()):
            return False
        if self.is_being_filled and not self.all_are_up():
            return False  # the one that is away may have what the others lack, or was about to send the rest
        is_filled = self._knows_peers() and self.planner.is_filled()
        self.is_being_filled = self.is_being_filled and not is_filled
        return is_filled

    def has_all_of(self, checkpoint: str) -> bool:
        """Returns whether nothing of a kept checkpoint that any peer is known to hold is missing here."""
        if not self._knows_peers() or any(name.placed == checkpoint for name, _ in self.state.fetching.items()):
            return False
        return not any(held.name.placed == checkpoint for _, held in self.planner.todo.missing())

    def all_are_up(self) -> bool:
        """Returns whether every peer is there, but for those that are not talked to."""
        return all(peer.refused or peer.is_up(self.state.now_s) for peer in self.peers.values())

    def _knows_peers(self) -> bool:
        """Returns whether all peers that are there said what they hold."""
        now_s = self.state.now_s
        for peer in self.peers.values():
            is_to_come = peer.session is None and not peer.refused and now_s - self._began_s < MEET_S
            if is_to_come or (peer.is_up(now_s) and (peer.asked_s is not None or not peer.is_known)):
                return False
        return True
