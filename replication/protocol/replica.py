"""The protocol between the nodes of a store: events in, effects out. No clock, thread, socket or file inside.

Every node tells every other what it durably holds, and fetches what it is missing and should hold. That is all: fresh
layers, catching up after an absence, filling a new node and repairing a damaged one are the same exchange, and doing
any of it twice or in another order changes nothing.

Invariants
- An `Have` or `Change` names, and a `Summary` hashes, only files that are durable, with the digest that was
  verified, under the incarnation of the `Hello` that began its session. So each is an acknowledgement, and nothing else
  is.
- What a peer holds is known per incarnation: a `Hello` with another one voids all that was known.
- Who gave a file is told at once that it is durable here, and everyone of what came from this node, and of what is
  gone; the others with the next beat, because nobody waits for it.
- Statements of a session are numbered, and count in order only. A gap, or a beat whose hash does not fit, asks for the
  inventory again: a summary by groups of files, and then the names in those groups whose hash is neither that of what
  the peer was known to hold nor that of what this node holds. So meeting again costs what changed, not what there is.
- A file is fetched from one peer at a time, at most a window of bytes at once, and kept only if its bytes have the
  digest that was announced.
- What is small and was just written here goes unasked to who keeps it, ahead of the statement that it is durable here:
  that saves a question and its answer. Who does not want it throws it away; who is slow to take it is asked for no
  more.
- Where a peer sealed other contents, what it has from that epoch on is another history: it is neither fetched nor
  counted, merged layers that reach into it least of all, until an operator says whose contents count.
- Nobody waits for anybody: no event blocks, and a peer that is away only falls behind.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from nosync.lsm.manifests.manifest import MAIN_TIMELINE
from nosync.lsm.model.timestamp import Time, epoch_of
from nosync.lsm.trace.directory import MANIFESTS
from nosync.replication.protocol.fetches import Fetches
from nosync.replication.protocol.file_names import FileName, FileVersion
from nosync.replication.protocol.inventory import Inventory, covers, in_order, missing, missing_of_trace
from nosync.replication.protocol.messages import (
    PROTOCOL_VERSION,
    Change,
    Close,
    Effect,
    FileRequest,
    Have,
    Heartbeat,
    Hello,
    InventoryRequest,
    Message,
    NotFound,
    Send,
    SendFiles,
    SessionId,
    Summary,
    Want,
)
from nosync.replication.protocol.peer import SMALLEST_WINDOW_BYTES, SUSPECT_AFTER_S, WINDOW_S, Peer
from nosync.replication.protocol.placement import NodeId, Placement, replica_set

WINDOW_BYTES = 64 << 20
WINDOW_FILES = 64
GROUPS_AT_ONCE = 500
BEAT_S = 0.6
SILENT_S = 5.0
"""A session on which nothing comes is ended, and begun again by whoever began it."""
FETCH_TIMEOUT_S = 30.0
"""Of a peer from which no piece of any file comes."""
RETRY_AFTER_S = 1.0
ASK_AGAIN_S = 3.0
LOADED_BYTES = 4 << 20
"""A node that is so far behind with what copies are asked for leaves out what can be computed again, until it has
caught up.
"""
CAUGHT_UP_BYTES = 1 << 20
OPTIONAL_WINDOW_BYTES = 2 << 20
"""Of what can be computed again no more is on its way at once, so that it holds up little of the rest."""
KEEP_S = 60.0
"""How long a node keeps what a task there has asked for."""
ASKED_S = 1.0
"""A task that waits asks again within this time: what it waits for comes before all else."""
PUSH_FILE_BYTES = 64 << 10
PUSH_BYTES = 1 << 20
"""No more than this is on its way unasked to one peer."""
PUSH_PATIENCE_S = 5.0
"""A peer that does not say for so long that it holds what was pushed is slow, or does not want it."""
PUSH_PAUSE_S = 60.0
FEW_FILES, MANY_FILES = 256, 20_000
"""So few are put in order whenever one comes; of so many it takes a beat until they are again, once all were asked for.
"""
MEET_S = 2.0
"""So long after its start a node waits for peers that it has not met before it says that it has what they have."""
UNWANTED_S = 10.0
"""How long what was dropped here is not taken from those who have not dropped it yet, and get it meanwhile."""


class Replica:
    """The protocol's state on one node. `members`: all nodes of the store, this one included."""

    def __init__(
        self,
        me: NodeId,
        incarnation: str,
        store_id: str,
        members: Iterable[NodeId],
        replicas: int,
        now_s: float = 0.0,
        key_groups: int = 0,
    ) -> None:
        self.me, self.incarnation, self.store_id, self.replicas = me, incarnation, store_id, replicas
        self.key_groups = key_groups
        self.mine = Inventory()
        self.peers: dict[NodeId, Peer] = {node: Peer(node) for node in sorted(set(members) - {me})}
        self._now_s = self._began_s = now_s
        self._placement = Placement(me, replicas)
        self._sessions: dict[SessionId, NodeId | None] = {}
        self._heard_s: dict[SessionId, float] = {}
        self._fetching = Fetches()
        self._again_s: dict[FileName, float] = {}
        self._parts: dict[FileVersion, int] = {}
        self._beat_s = now_s
        self._weighed_s = float("-inf")
        self._lag: tuple[object, Mapping[NodeId, tuple[int, int]]] = (None, {})  # what was compared, and what was found
        self.optional: frozenset[str] = frozenset()
        """Stages that no copies are asked for: they can be computed again."""
        self.backlog_bytes = 0
        """What peers have and this node should keep and does not, as of the last tick."""
        self.is_loaded = False
        """So much of the backlog is of stages that copies are asked for, that the `optional` ones wait."""
        self.safe: dict[str, int] = {}
        """By timeline, this node's safe point, which peers are told."""
        self.main_timeline = MAIN_TIMELINE
        self._released: dict[str, Time] = {}  # by trace, the time up to which its layers are not kept here any more
        self._kept_s: dict[str, float] = {}  # traces that tasks here asked for, and until when
        self.discarded: dict[str, str] = {}
        """By file, the digest of contents that an operator gave up here: no peer's count, nor what is built upon them.
        """
        self.keep_all = False
        """Keep what others keep as well, see `want_all`."""

    @property
    def now_s(self) -> float:
        return self._now_s

    @now_s.setter
    def now_s(self, now_s: float) -> None:
        """A peer that was silent for long by then is not counted on any more."""
        self._now_s = now_s
        for peer in self.peers.values():
            self._note_liveness(peer)

    # --- events: this node ------------------------------------------------------------------------------------------

    def holds(self, added: Iterable[FileVersion], gone: Iterable[FileName] = ()) -> list[Effect]:
        """These files are durable here now, and those are gone. Says so: at once to who waits for it, else with the
        next beat.
        """
        added, names = tuple(added), tuple(gone)
        gone = tuple(name for name in names if name in self.mine)
        gave = {h.name: self._fetching[h.name].session if h.name in self._fetching else None for h in added}
        for name in names:
            if (
                name in self._fetching and name not in self.mine
            ):  # it came, and what stood there in its place was no good
                self._retry_later(name)
        for held in added:
            self.mine.add(held)
            self._fetching.end(held.name)
            self._again_s.pop(held.name, None)
            self._parts.pop(held, None)
            for peer in self.peers.values():
                peer.unwanted.pop(held.name, None)
        for name in gone:
            self.mine.discard(name)
        self._touched([*(held.name for held in added), *gone])
        for archive in [name for name in (*(held.name for held in added), *gone) if name.archive]:
            for peer in self.peers.values():
                peer.dirty.update(peer.holds.manifests_of(archive))
        if not added and not gone:
            return []
        fresh = [held for held in added if not gone and gave[held.name] is None and self._may_push(held)]
        effects: list[Effect] = []
        for peer in self._linked():
            effects += self._push(peer, fresh)
            peer.unsaid |= {held.name: held for held in added}
            peer.unsaid |= dict.fromkeys(gone)
            if gone or None in gave.values() or peer.session in gave.values():
                effects += self._say(peer)
        return [*effects, *self._fetch()]

    def _may_push(self, held: FileVersion) -> bool:
        """What is small, new, and not to be computed again. Nodes merge, and archive manifests, for themselves."""
        id = held.name.layer
        if id is None:
            is_fresh = not held.name.archive
        else:
            is_fresh = epoch_of(id.description.lower) == epoch_of(Time(id.description.upper - 1))
        return is_fresh and held.size_bytes <= PUSH_FILE_BYTES and not self._is_optional(held.name)

    def _push(self, peer: Peer, files: Sequence[FileVersion]) -> list[Effect]:
        """Sends a peer what it would ask for."""
        if not files or not peer.is_up(self.now_s) or self.now_s < peer.push_again_s:
            return []
        coming = sum(size for size, _ in peer.pushed.values())
        chosen = []
        for held in files:
            is_kept = held.name.layer is None or peer.node in self._placement.replica_set(held.name.place)
            if is_kept and held.name not in peer.holds and coming + held.size_bytes <= PUSH_BYTES:
                coming += held.size_bytes
                peer.pushed[held.name] = held.size_bytes, self.now_s
                chosen.append(FileRequest(held, 0))
        assert peer.session is not None, "only of a session that lasts"
        return [SendFiles(peer.session, tuple(chosen))] if chosen else []

    def _linked(self) -> list[Peer]:
        """The peers with which there is a session."""
        return [peer for peer in self.peers.values() if peer.session is not None]

    @staticmethod
    def _say(peer: Peer) -> list[Effect]:
        """Tells a peer what it was not told yet."""
        assert peer.session is not None, "only of a session that lasts"
        if not peer.unsaid:
            return []
        unsaid, peer.unsaid = peer.unsaid, {}
        peer.said += 1
        added = tuple(held for held in unsaid.values() if held is not None)
        return [Send(peer.session, Change(peer.said, added, tuple(n for n, held in unsaid.items() if held is None)))]

    def unwanted(self, names: Iterable[FileName]) -> None:
        """Nobody needs these any more: what belonged to a branch that was deleted is not fetched from those who still
        have it.

        A branch that is made again has layers of the same names. So this holds until a peer has dropped its own.
        """
        for name in names:
            for peer in self.peers.values():
                peer.unwanted[name] = float("inf") if name in peer.holds else self.now_s + UNWANTED_S

    def fetch_failed(self, name: FileName) -> list[Effect]:
        """A file did not come whole, or could not be kept. It is tried again later, from anyone."""
        self._retry_later(name)
        return self._fetch()

    def _retry_later(self, name: FileName) -> None:
        self._fetching.end(name)
        self._again_s[name] = self.now_s + RETRY_AFTER_S
        self._touched([name])

    def has_part(self, held: FileVersion, received_bytes: int) -> None:
        """So much of a file had come when its session ended, and is kept (0: not any more): the rest is asked for."""
        if received_bytes:
            self._parts[held] = received_bytes
        else:
            self._parts.pop(held, None)

    def tick(self, now_s: float) -> list[Effect]:
        """Time passes: beats go out, silent fetches are given up."""
        self.now_s = now_s
        effects: list[Effect] = []
        for name, fetch in list(self._fetching.items()):
            if now_s - max(fetch.since_s, self._last_piece_s(fetch.session)) > FETCH_TIMEOUT_S:
                effects += self.fetch_failed(name)
        for session in [s for s, heard_s in self._heard_s.items() if now_s - heard_s > SILENT_S]:
            self._end(session)
            effects.append(Close(session, f"nothing was heard for {SILENT_S} s"))
        if now_s - self._beat_s >= BEAT_S:
            self._measure_rates(now_s - self._beat_s)
            self._again_s = {name: at_s for name, at_s in self._again_s.items() if at_s > now_s}
            self._beat_s = now_s
            self._keep_no_longer()
            self._weigh_backlog()
            for peer in self.peers.values():
                if any(now_s - since_s > PUSH_PATIENCE_S for _, since_s in peer.pushed.values()):
                    peer.pushed, peer.push_again_s = {}, now_s + PUSH_PAUSE_S
                peer.unwanted = {name: until for name, until in peer.unwanted.items() if until > now_s}
            effects += self._beat()
        return [*effects, *self._fetch()]

    def _beat(self) -> list[Effect]:
        effects: list[Effect] = []
        root, safe = self.mine.root, tuple(sorted(self.safe.items()))
        for peer in self._linked():
            assert peer.session is not None, "that is what linked means"
            effects += self._say(peer)
            effects.append(Send(peer.session, Heartbeat(peer.said, root, safe)))
        return effects

    def _weigh_backlog(self) -> None:
        """Of many files not at every beat, which would be late for it."""
        if self.now_s - self._weighed_s < BEAT_S * sum(peer.todo_files for peer in self.peers.values()) / MANY_FILES:
            return
        self._weighed_s = self.now_s
        wanted = {held.name: held.size_bytes for _, held in self._missing()}
        wanted |= {name: fetch.held.size_bytes for name, fetch in self._fetching.items()}
        self.backlog_bytes = sum(wanted.values())
        required = sum(size for name, size in wanted.items() if not self._is_optional(name))
        self.is_loaded = required > (CAUGHT_UP_BYTES if self.is_loaded else LOADED_BYTES)

    def _is_optional(self, name: FileName) -> bool:
        id = name.layer
        return id is not None and id.trace.stage in self.optional

    def _waits(self, held: FileVersion) -> bool:
        """Whether a file is left out as long as there is so much else to fetch."""
        if not self._is_optional(held.name):
            return False
        coming = sum(f.held.size_bytes for name, f in self._fetching.items() if self._is_optional(name))
        return self.is_loaded or (coming > 0 and coming + held.size_bytes > OPTIONAL_WINDOW_BYTES)

    def keep_traces(self, traces: Iterable[str]) -> list[Effect]:
        """A task here reads these (directories of traces): this node keeps them for a while, whoever else does."""
        self._keep_no_longer()
        until_s = dict.fromkeys(traces, self.now_s + KEEP_S)
        new = until_s.keys() - self._kept_s.keys()
        self._kept_s |= until_s
        self._look_again(new)
        return self._fetch()

    def _keep_no_longer(self) -> None:
        """The traces go that no task asked for since."""
        over = [trace for trace, until_s in self._kept_s.items() if until_s <= self.now_s]
        for trace in over:
            del self._kept_s[trace]
        self._look_again(over)

    def want_all(self) -> list[Effect]:
        """A job runs here and wants to read all: this node keeps what others keep as well, and asks them what that is
        by now.

        What they came to hold since their last beat they may not have said yet, and who gave it to them may be gone.
        """
        if not self.keep_all:
            self.keep_all = True
            for peer in self.peers.values():
                peer.dirty.update(peer.holds.traces())
        ask = [effect for peer in self._linked() if peer.asked_s is None for effect in self._ask(peer)]
        return [*ask, *self._fetch()]

    def discard(self, digests: Mapping[str, str], before: Time) -> None:
        """These contents count no more, all that were given up so far; inputs are needed again that end after `before`."""
        self.discarded = dict(digests)
        self._look_again([trace for trace, until in self._released.items() if until > before])
        self._released = {trace: min(until, before) for trace, until in self._released.items()}
        for peer in self.peers.values():
            self._touched_of(peer, [held.name for name in digests if (held := peer.holds.get(name)) is not None])

    def release(self, trace: str, until: Time) -> None:
        """Inputs that are safe: layers of this trace that end by `until` are fetched no more, unless a task asks for
        them.
        """
        self._released[trace] = max(until, self._released.get(trace, until))
        for peer in self.peers.values():
            if trace in peer.todo:
                peer.dirty.add(trace)

    def add_member(self, node: NodeId) -> None:
        """A node joins. It is filled in the background."""
        if node != self.me:
            self.peers.setdefault(node, Peer(node))

    def remove_member(self, node: NodeId) -> list[Effect]:
        """An operator took a node out: its copies count no more."""
        peer = self.peers.pop(node, None)
        self._look_again(self._placement.changed(node, is_up=False))
        if peer is None or peer.session is None:
            return []
        session = peer.session
        self._end(session)
        return [Close(session, f"node {node} was removed from the store's members")]

    # --- events: sessions -------------------------------------------------------------------------------------------

    def connected(self, session: SessionId) -> list[Effect]:
        """A session begins; who is at its other end is not known yet."""
        self._sessions[session], self._heard_s[session] = None, self.now_s
        return [
            Send(session, Hello(self.me, self.incarnation, self.store_id, self.replicas, key_groups=self.key_groups))
        ]

    def disconnected(self, session: SessionId) -> list[Effect]:
        self._end(session)
        return self._fetch()

    def _end(self, session: SessionId) -> None:
        node = self._sessions.pop(session, None)
        self._heard_s.pop(session, None)
        names = list(self._fetching.of_session(session))
        for name in names:
            self._fetching.end(name)
        self._touched(names)
        peer = self.peers.get(node) if node is not None else None
        if peer is not None and peer.session == session:
            peer.session, peer.asked_s, peer.unknown = None, None, set()
            peer.fell_silent = self.now_s - peer.heard_s > SUSPECT_AFTER_S / 2
            self._note_liveness(peer)

    def _note_liveness(self, peer: Peer) -> bool:
        """Called whenever a peer may be up that was not, or the other way. Whether that is so: then others keep some
        traces.
        """
        is_up = peer.is_up(self.now_s)
        if is_up == self._placement.is_up(peer.node):
            return False
        self._look_again(self._placement.changed(peer.node, is_up=is_up))
        return True

    def part_came(self, session: SessionId) -> None:
        """A part of a message came that needs several frames: the other side is alive, and still answers what was
        asked.
        """
        peer = self._is_alive(session)
        if peer is not None and peer.asked_s is not None:
            peer.asked_s = self.now_s

    def heard_from(self, session: SessionId, size_bytes: int) -> None:
        """A piece of a file came: the other side is alive."""
        peer = self._is_alive(session)
        if peer is not None:
            peer.piece_s = self.now_s
            peer.arrived_bytes += size_bytes

    def _is_alive(self, session: SessionId) -> Peer | None:
        """Notes that something came. Of a session that lasts, and whose peer said who it is, the peer."""
        if session not in self._sessions:
            return None
        self._heard_s[session] = self.now_s
        peer = self._peer_of(session)
        if peer is not None:
            peer.heard_s = self.now_s
            self._note_liveness(peer)
        return peer

    def _peer_of(self, session: SessionId) -> Peer | None:
        node = self._sessions.get(session)
        return self.peers.get(node) if node is not None else None

    def _last_piece_s(self, session: SessionId) -> float:
        peer = self._peer_of(session)
        return float("-inf") if peer is None else peer.piece_s

    def _measure_rates(self, seconds: float) -> None:
        for peer in self.peers.values():
            if peer.arrived_bytes:
                peer.rate_bytes_s = (peer.rate_bytes_s + peer.arrived_bytes / seconds) / 2
                peer.arrived_bytes = 0

    def received(self, session: SessionId, message: Message) -> list[Effect]:
        """A message came. Of sessions that have ended nothing counts."""
        if session not in self._sessions:
            return []
        self._heard_s[session] = self.now_s
        if isinstance(message, Hello):
            return self._hello(session, message)
        node = self._sessions[session]
        peer = self.peers.get(node) if node is not None else None
        if peer is None or peer.session != session:
            return []
        peer.heard_s = self.now_s
        is_back = self._note_liveness(peer)
        effects = self._heard(peer, session, message)
        return [*effects, *self._fetch()] if is_back else effects

    def _heard(self, peer: Peer, session: SessionId, message: Message) -> list[Effect]:
        """Anything but a greeting."""
        if isinstance(message, Heartbeat):
            announced = dict(message.safe)
            if self.main_timeline in announced.keys() - peer.safe.keys():
                peer.dirty |= peer.todo.keys()  # what of it is safe was not known yet
                peer.queue = []
            peer.safe |= announced
        if isinstance(message, Summary | Have | Change | Heartbeat):
            return self._statement(peer, message)
        if isinstance(message, InventoryRequest):
            return [*self._say(peer), Send(session, self._inventory(peer, message.groups))]
        if isinstance(message, Want):
            return self._wanted(session, message)
        assert isinstance(message, NotFound), "there are eight messages"
        fetch = self._fetching.get(message.name)
        if fetch is None or fetch.session != session:
            return []
        return self.fetch_failed(message.name)

    def _hello(self, session: SessionId, hello: Hello) -> list[Effect]:
        problem = self._objection(hello)
        if problem:
            if hello.node in self.peers:
                refused = self.peers[hello.node]
                refused.refused = problem
                # What it was is gone, whether or not it is talked to as it is.
                if hello.incarnation != refused.incarnation:
                    self._void(refused)
            self._end(session)
            return [Close(session, problem)]
        peer = self.peers[hello.node]
        effects: list[Effect] = []
        if peer.session is not None and peer.session != session:
            old = peer.session  # the peer came back before we noticed that it had gone
            self._end(old)
            effects.append(Close(old, f"node {peer.node} began another session"))
        if peer.incarnation != hello.incarnation:
            self._void(peer)
        if peer.session != session:
            peer.pushed = {}
            peer.said, peer.unsaid = 0, {}  # a greeting that comes twice does not begin our statements anew
        peer.incarnation, peer.session, peer.seq = hello.incarnation, session, -1
        peer.heard_s, peer.refused, peer.fell_silent, peer.safe = self.now_s, "", False, {}
        peer.is_known = False
        self._note_liveness(peer)
        self._sessions[session] = peer.node
        return [*effects, *self._ask(peer)]

    def _void(self, peer: Peer) -> None:
        """Nothing counts that a peer said of what it holds."""
        self._touched_of(peer, (held.name for held in peer.holds))
        peer.holds, peer.todo, peer.not_safe, peer.unwanted = Inventory(), {}, {}, {}
        peer.conflicts, peer.found_diverged = {}, None
        peer.todo_files, peer.queue = 0, []

    def _objection(self, hello: Hello) -> str:
        """Why a node cannot be talked to; naming both values."""
        if hello.version != PROTOCOL_VERSION:
            return (
                f"node {hello.node} speaks protocol version {hello.version}, this one {PROTOCOL_VERSION}: upgrade one"
            )
        if hello.node == self.me:
            return (
                f"two nodes are called {self.me}: this one is incarnation {self.incarnation}, the other "
                f"{hello.incarnation}: give one another --node"
            )
        if hello.key_groups and self.key_groups and hello.key_groups != self.key_groups:
            return (
                f"node {hello.node} has key_groups={hello.key_groups}, this one {self.key_groups}: it never changes, so "
                "one of the two directories has to be emptied, and made again with the other's"
            )
        if hello.store_id != self.store_id:
            return f"node {hello.node} belongs to store {hello.store_id}, this one to {self.store_id}"
        if hello.replicas != self.replicas:
            return f"node {hello.node} keeps replicas={hello.replicas}, this one {self.replicas}: make them equal"
        if hello.incarnation == self.incarnation:
            return (
                f"node {hello.node} has this node's incarnation {self.incarnation}: its data directory is a copy of this "
                "one. Empty one of the two directories; it is filled again"
            )
        if hello.node not in self.peers:
            return f"node {hello.node} is not a member of this store; members: {', '.join([self.me, *self.peers])}"
        return ""

    # --- what peers hold --------------------------------------------------------------------------------------------

    def _inventory(self, peer: Peer, groups: tuple[str, ...]) -> Summary | Have:
        if not groups:
            return Summary(peer.said, tuple(self.mine.groups().items()))
        held = itertools.chain.from_iterable(
            map(self.mine.of_group, groups)
        )  # only named here; frames are made as they go out
        return Have(peer.said, groups, tuple(held))

    def _statement(self, peer: Peer, message: Summary | Have | Change | Heartbeat) -> list[Effect]:
        if isinstance(message, Summary):
            if message.seq < peer.seq:
                return []
            effects = self._summarized(peer, message)
        elif isinstance(message, Have):
            if not peer.unknown.intersection(message.groups):
                return []
            if message.seq != peer.seq:
                return self._ask(peer)
            effects = self._learned(peer, message)
        elif peer.asked_s is not None and self.now_s - peer.asked_s > ASK_AGAIN_S:
            return self._ask(peer)
        elif peer.asked_s is not None and not peer.unknown:
            return []  # the summary is on its way, and says it all
        elif isinstance(message, Change):
            if message.seq <= peer.seq:
                return []
            if message.seq != peer.seq + 1:
                return self._ask(peer)
            effects = self._changed(peer, message)
        elif message.seq > peer.seq or (
            message.seq == peer.seq and not peer.unknown and message.root != peer.holds.root
        ):
            return self._ask(peer)
        else:
            return []
        return [*effects, *self._fetch_from(peer)]

    def _summarized(self, peer: Peer, summary: Summary) -> list[Effect]:
        """Groups that hash to what is known stay, or are what this node holds itself; of the others the names are asked
        for.
        """
        assert peer.session is not None, "only of a session that lasts"
        there = dict(summary.groups)
        known, mine = peer.holds.groups(), self.mine.groups()
        for group in [group for group, root in known.items() if there.get(group) != root]:
            self._holds_now(peer, group, ())
        unknown = []
        for group, root in there.items():
            if mine.get(group) == root:
                if known.get(group) != root:
                    self._holds_now(peer, group, self.mine.of_group(group))
            elif known.get(group) != root:
                unknown.append(group)
        peer.seq, peer.unknown = summary.seq, set(unknown)
        peer.has_dropped([n for n in peer.unwanted if n not in peer.holds and n.group not in peer.unknown])
        peer.asked_s = self.now_s if unknown else None
        peer.is_known |= not unknown
        portions = [tuple(unknown[i : i + GROUPS_AT_ONCE]) for i in range(0, len(unknown), GROUPS_AT_ONCE)]
        return [Send(peer.session, InventoryRequest(portion)) for portion in portions]

    def _learned(self, peer: Peer, inventory: Have) -> list[Effect]:
        by_group: dict[str, list[FileVersion]] = {group: [] for group in inventory.groups if group in peer.unknown}
        for held in inventory.held:
            if (group := held.name.group) in by_group:
                by_group[group].append(held)
        for group, members in by_group.items():
            self._holds_now(peer, group, members)
        peer.unknown -= by_group.keys()
        peer.has_dropped([n for n in peer.unwanted if n not in peer.holds and n.group in by_group])
        peer.asked_s = self.now_s if peer.unknown else None
        peer.is_known |= not peer.unknown
        return []

    def _changed(self, peer: Peer, change: Change) -> list[Effect]:
        peer.seq = change.seq
        added = [held for held in change.added if held.name.group not in peer.unknown]  # those are on their way
        for held in added:
            peer.holds.add(held)
        for name in change.gone:
            peer.holds.discard(name)
        self._touched_of(peer, (*(held.name for held in added), *change.gone))
        peer.has_dropped(change.gone)
        return []

    def _holds_now(self, peer: Peer, group: str, held: Iterable[FileVersion]) -> None:
        """All that a peer holds of a group."""
        names = [one.name for one in peer.holds.of_group(group)]
        for name in names:
            peer.holds.discard(name)
        for one in held:
            peer.holds.add(one)
            names.append(one.name)
        self._touched_of(peer, names)

    def _ask(self, peer: Peer) -> list[Effect]:
        assert peer.session is not None, "only of a session that lasts"
        peer.asked_s, peer.unknown = self.now_s, set()
        return [Send(peer.session, InventoryRequest())]

    # --- files ------------------------------------------------------------------------------------------------------

    def _wanted(self, session: SessionId, want: Want) -> list[Effect]:
        there: list[FileRequest] = []
        effects: list[Effect] = []
        for wanted in want.files:
            if self.mine.get(wanted.held.name) == wanted.held:
                there.append(wanted)
            else:
                effects.append(Send(session, NotFound(wanted.held.name)))
        return [*effects, SendFiles(session, tuple(there))] if there else effects

    def is_replica(self, name: FileName) -> bool:
        """Whether this node is one of those that keep a file. While one of them is away the next one stands in for it."""
        id = name.layer
        if id is None:
            return True
        trace = name.place
        is_released = id.description.upper <= self._released.get(trace, 0)
        return self._keeps_trace(trace) and (not is_released or trace in self._kept_s)

    def _keeps_trace(self, trace: str) -> bool:
        """Whether this node keeps the layers of a trace that were not let go of."""
        return self.keep_all or trace in self._kept_s or self._placement.is_mine(trace)

    def is_filled(self) -> bool:
        """Whether nothing that should be here and that any peer has is missing.

        What peers have that nobody met yet is not known: so it is not right after the start, while they may be on their
        way.
        """
        for peer in self.peers.values():
            is_to_come = peer.session is None and not peer.refused and self.now_s - self._began_s < MEET_S
            if is_to_come or (peer.is_up(self.now_s) and (peer.asked_s is not None or not peer.is_known)):
                return False
        return not self._fetching and not any(self._is_of_ours(peer, held.name) for peer, held in self._missing())

    def _missing(self) -> Iterator[tuple[Peer, FileVersion]]:
        """What this node should keep and a peer holds, but for what was dropped here."""
        for peer in self._linked():
            self._look(peer)
            yield from (
                (peer, held) for todo in peer.todo.values() for held in todo if not self._is_unwanted(peer, held.name)
            )

    def _touched(self, names: Iterable[FileName]) -> None:
        self._look_again({name.place for name in names})

    def _look_again(self, places: Collection[str]) -> None:
        """What is to be fetched of these traces and other files may have changed. Of who holds none of them nothing is."""
        for peer in self.peers.values() if places else ():
            peer.dirty.update(place for place in places if peer.holds.has_at(place))

    @staticmethod
    def _touched_of(peer: Peer, names: Iterable[FileName]) -> None:
        for name in names:
            peer.dirty.add(name.place)
            peer.pushed.pop(name, None)

    def _fetch(self) -> list[Effect]:
        """Asks for what is missing, from the peers that hold it, as far as the windows allow."""
        return [effect for peer in self._linked() for effect in self._fetch_from(peer)]

    def _fetch_from(self, peer: Peer) -> list[Effect]:
        """As `_fetch`, of one peer. What that says is no reason to ask others for more."""
        self._look(peer)
        wanted = self._choose(peer)
        if not wanted:
            return []
        assert peer.session is not None, "only of a session that lasts"
        self._touched(held.name for held in wanted)
        return [Send(peer.session, Want(tuple(FileRequest(held, self._parts.get(held, 0)) for held in wanted)))]

    def _look(self, peer: Peer) -> None:
        """Makes `todo` anew where something changed."""
        if not peer.dirty:
            return
        for place in peer.dirty:
            self._look_at(peer, place)
        lacking = {place: todo for place in peer.dirty if (todo := peer.todo.get(place))}
        peer.dirty.clear()
        safe = self._safe_told() if lacking else -1
        for place, todo in lacking.items():
            not_safe = [held for held in todo if self._is_after(safe, held.name)]
            if not_safe:
                peer.not_safe[place] = not_safe

    def _look_at(self, peer: Peer, place: str) -> None:
        """Makes `todo` anew for one trace, or one other file; and says where contents differ."""
        layers = peer.holds.layers(place)
        if (
            not layers
            and place in self._placement
            and not any(other.holds.layers(place) for other in self.peers.values())
        ):
            self._placement.forget(place)
        other = peer.holds.get(place)
        names = [*layers.values(), *([other.name] if other is not None else [])]
        may_differ = bool(self.discarded) or self.mine.has_at(place)
        found = {name: self._conflict(peer, name) for name in names} if may_differ else {}
        peer.conflict_at(place, {name: digests for name, digests in found.items() if digests is not None})
        todo = self._lacking(peer, place, names)
        peer.todo_files += len(todo) - len(peer.todo.pop(place, ()))
        peer.not_safe.pop(place, None)
        if todo:
            peer.todo[place] = todo

    def _lacking(self, peer: Peer, place: str, names: Iterable[FileName]) -> list[FileVersion]:
        """What of a trace, or one other file, a peer holds and this node should keep, and neither has nor fetches."""
        if not peer.holds.layers(place):
            todo = [held for name in names if (held := peer.holds.get(name)) and not self._has_or_fetches(name)]
        elif self._keeps_trace(place):
            ours_and_coming = {**self.mine.layers(place), **self._fetching.layers(place)}
            todo = [held for held in missing_of_trace(ours_and_coming, peer.holds, place) if self.is_replica(held.name)]
        else:
            todo = []
        return [held for held in todo if not self._is_given_up(held)]

    def _safe_told(self) -> int:
        """The safe point of the main timeline, -1 where there is none."""
        return max(of.get(self.main_timeline, -1) for of in (self.safe, *(peer.safe for peer in self._linked())))

    def _is_after(self, safe: int, name: FileName) -> bool:
        """Whether a file begins after the safe point of the main timeline, if there is one."""
        first = _first_epoch(name, self.main_timeline)
        return safe >= 0 and first is not None and first > safe

    def _conflict(self, peer: Peer, name: FileName) -> tuple[str, str] | None:
        """Our digest and a peer's, where they differ; ours is empty where the peer holds what was given up here."""
        ours, its = self.mine.get(name), peer.holds.get(name)
        if its is None:
            return None
        if ours is not None:
            return (ours.digest, its.digest) if ours.digest != its.digest else None
        return ("", its.digest) if self._is_given_up(its) else None

    def _is_given_up(self, held: FileVersion) -> bool:
        return self.discarded.get(held.name) == held.digest

    def _has_or_fetches(self, name: FileName) -> bool:
        return name in self.mine or name in self._fetching or self.mine.has_archived(name)

    def _choose(self, peer: Peer) -> tuple[FileVersion, ...]:
        """The next files to ask a peer for, and notes that they are."""
        if not peer.todo:
            return ()
        assert peer.session is not None, "only of a session that lasts"
        running = self._fetching.of_session(peer.session).values()
        window_bytes = min(WINDOW_BYTES, max(SMALLEST_WINDOW_BYTES, int(WINDOW_S * peer.rate_bytes_s)))
        room, room_bytes = WINDOW_FILES - len(running), window_bytes - sum(running)
        if room <= 0 or (room_bytes <= 0 and running):
            return ()
        chosen: list[FileVersion] = []
        for held in self._candidates(peer):
            if not self._wants(peer, held):
                continue
            chosen.append(held)
            room, room_bytes = room - 1, room_bytes - held.size_bytes
            self._fetching.begin(held, peer.session, self.now_s)
            if room <= 0 or room_bytes <= 0:
                break
        return tuple(chosen)

    def _candidates(self, peer: Peer) -> Iterator[FileVersion]:
        """What a peer could be asked for, in order. Many files, as to fill a new node, are put in order once in a
        while.

        First comes what tasks wait for, and of that the traces of which the least is missing: a layer of the last epoch
        does not wait until the history of another shard has come, which is asked for when this node stands in for one
        that was lost. Then what is not safe yet: the safe point goes on while history is copied, however much of that
        there is.
        """
        asked = [
            peer.todo[trace] for trace, until_s in self._kept_s.items() if trace in peer.todo and self._is_new(until_s)
        ]
        for todo in sorted(asked, key=lambda todo: sum(held.size_bytes for held in todo)):
            yield from in_order(todo)
        not_safe = [held for files in peer.not_safe.values() for held in files]
        if len(not_safe) <= FEW_FILES:
            yield from in_order(not_safe)
        if peer.todo_files <= FEW_FILES:
            peer.queue = []
            yield from in_order(held for todo in peer.todo.values() for held in todo)
            return
        if not peer.queue:
            if self.now_s - peer.queued_s < BEAT_S * peer.todo_files / MANY_FILES:
                return
            everything = in_order(held for todo in peer.todo.values() for held in todo)
            peer.queue = [*in_order(not_safe), *everything][::-1]
            peer.queued_s = self.now_s
        while peer.queue:
            held = peer.queue.pop()
            if held in peer.todo.get(held.name.place, ()):
                yield held

    def _is_new(self, until_s: float) -> bool:
        """Whether a task asked just now for what is kept until then."""
        return until_s - KEEP_S >= self.now_s - ASKED_S

    def _wants(self, peer: Peer, held: FileVersion) -> bool:
        """Whether a file that this node should keep is to be taken from a peer now, if nothing here stands for it."""
        waiting = self._again_s.get(held.name, self.now_s) > self.now_s
        known = self._is_unwanted(peer, held.name) or self._has_or_fetches(held.name) or self._is_given_up(held)
        return not (waiting or known or self._waits(held)) and self._is_of_ours(peer, held.name)

    def _is_unwanted(self, peer: Peer, name: FileName) -> bool:
        """Whether it was dropped here, and no task has asked for it since."""
        return name in peer.unwanted and name.place not in self._kept_s

    @staticmethod
    def _is_of_ours(peer: Peer, name: FileName) -> bool:
        """Whether a file of a peer belongs to the history that this node has. Before all is known that the peer has,
        nothing that stands for more than a layer of one epoch does, and no manifest.
        """
        id = name.layer
        if not peer.is_known and not (name.is_register or (id is not None and id.is_fresh)):
            return False
        return not peer.is_of_another_history(name)

    def _has_copy(self, peer: Peer, name: FileName, digest: str) -> bool:
        """Whether a peer holds these very contents. What it merged of another history does not stand for them."""
        exact = peer.holds.get(name)
        if exact is not None:
            return exact.digest == digest
        return peer.holds.holds(name, digest) and not peer.is_of_another_history(name)

    def accepts(self, session: SessionId, held: FileVersion) -> bool:
        """Whether a file that begins to come was asked for, or would be once its sender says that it holds it: then it
        now is.
        """
        fetch = self._fetching.get(held.name)
        if fetch is not None:
            return (fetch.session, fetch.held) == (session, held)
        peer = self._peer_of(session)
        if peer is None or held.size_bytes > PUSH_FILE_BYTES or not self.is_replica(held.name):
            return False
        if not self._wants(peer, held):
            return False
        id = held.name.layer
        if id is not None and covers(self.mine.layers(held.name.place), id.description):
            return False
        self._fetching.begin(held, session, self.now_s)
        self._touched([held.name])
        return True

    # --- questions --------------------------------------------------------------------------------------------------

    def copies(self, name: FileName, digest: str) -> int:
        """On how many nodes a file is durable, as far as they said so: this one and its peers, whether up or away."""
        return self.mine.holds(name, digest) + sum(self._has_copy(peer, name, digest) for peer in self.peers.values())

    def copies_of_mine(self, name: FileName) -> int:
        """As `copies`, of a file as it is here; 0: it is not. A manifest may be in an archive by now, here or there."""
        mine = self.mine.get(name)
        if mine is not None:
            return self.copies(name, mine.digest)
        if not self.mine.has_archived(name):
            return 0
        return 1 + sum(name in peer.holds or peer.holds.has_archived(name) for peer in self.peers.values())

    def conflicts(self) -> dict[FileName, tuple[NodeId, str, str]]:
        """By file: a peer that holds other contents, our digest and theirs; one that is up where one of them is."""
        peers = sorted(self.peers.values(), key=lambda peer: peer.is_up(self.now_s))
        return {name: (peer.node, *found) for peer in peers for name, found in peer.all_conflicts().items() if found[0]}

    def given_up_elsewhere(self) -> dict[FileName, NodeId]:
        """By file that is not here: a peer that holds what was given up."""
        return {
            name: peer.node
            for peer in self.peers.values()
            for name, (ours, _) in peer.all_conflicts().items()
            if not ours and not self.mine.has_archived(name)
        }

    def safe_elsewhere(self, timeline: str) -> int:
        """The largest safe point that a peer told, -1 where none did: what is safe there is safe here, if it is the
        same.

        So of a peer only counts what it told once it is known what it holds, and up to where that is known to be other
        contents than here: in the manifests of the timeline, or in layers.
        """
        found = -1
        for peer in self.peers.values():
            if peer.session is None or peer.asked_s is not None or peer.unknown or peer.seq < 0:
                continue
            others = [t for name in peer.all_conflicts() if (t := _first_epoch(name, timeline)) is not None]
            found = max(found, min([peer.safe.get(timeline, -1), *(t - 1 for t in others)]))
        return found

    def lag(self) -> Mapping[NodeId, tuple[int, int]]:
        """By peer: how many files, and bytes, of ours it is missing and should hold. Who asks again, and nothing has
        changed, is told the same: names are not compared anew for everybody who looks.
        """
        members = [self.me, *self.peers]
        about = (self.mine.root, *((node, peer.holds.root) for node, peer in self.peers.items()))
        if self._lag[0] != about:
            self._lag = about, self._compared(members)
        return self._lag[1]

    def _compared(self, members: list[NodeId]) -> Mapping[NodeId, tuple[int, int]]:
        found = {}
        replica_set_of = functools.cache(lambda trace: frozenset(replica_set(trace, members, self.replicas)))
        for peer in self.peers.values():
            behind = [
                held
                for held in missing(peer.holds, self.mine)
                if held.name.layer is None or peer.node in replica_set_of(held.name.place)
            ]
            found[peer.node] = (len(behind), sum(held.size_bytes for held in behind))
        return found


def _first_epoch(name: FileName, timeline: str) -> int | None:
    """The first epoch that a file says anything of: a layer, or a manifest of the line. None for another file."""
    id = name.layer
    if id is not None:
        return epoch_of(id.description.lower)
    span = name.span
    return span.first if span is not None and span.timeline == f"{MANIFESTS}/{timeline}" else None
