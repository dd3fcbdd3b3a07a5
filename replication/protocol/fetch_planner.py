"""Which files a node asks its peers for, in which order, and how much at once.

A file is fetched from one peer at a time, at most a window of bytes at once. First comes what tasks wait for, then what
is not safe yet, then history.
"""

from __future__ import annotations

from collections.abc import Iterator

from nosync.replication.protocol.file_names import FileName, FileVersion
from nosync.replication.protocol.inventory import covers, in_order
from nosync.replication.protocol.messages import PUSH_FILE_BYTES, Effect, FileRequest, Send, SessionId, Want
from nosync.replication.protocol.peer import HEARTBEAT_S, SMALLEST_WINDOW_BYTES, WINDOW_S, Peer
from nosync.replication.protocol.state import ReplicaState
from nosync.replication.protocol.todo import Todo

WINDOW_BYTES = 64 << 20
WINDOW_FILES = 64
FETCH_TIMEOUT_S = 30.0
"""After so long a file is asked for elsewhere, if no piece of any file came from the peer."""
RETRY_AFTER_S = 1.0
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
FEW_FILES, MANY_FILES = 256, 20_000
"""So few are put in order whenever one comes; of so many it takes a heartbeat until they are again, once all were asked
for.
"""


class FetchPlanner:
    """Chooses what to ask for, and remembers what came in part, or failed."""

    def __init__(self, state: ReplicaState) -> None:
        self._state = state
        self.todo = Todo(state)
        self.backlog_bytes = 0
        """What peers have and this node should keep and does not, as it was weighed last."""
        self.is_loaded = False
        """So much of the backlog is of stages that copies are asked for, that the optional ones wait."""
        self._weighed_s = float("-inf")
        self._again_s: dict[FileName, float] = {}  # files that failed, and when they may be asked for again
        self._parts: dict[FileVersion, int] = {}  # files of which a part is here, and its bytes

    def fetch(self) -> list[Effect]:
        """Asks for what is missing, from the peers that hold it, as far as the windows allow."""
        for peer in self._state.peers.values():
            if peer.session is None:  # what it holds is counted, unless it is of another history
                self.todo.refresh(peer)
        return [effect for peer in self._state.linked() for effect in self.fetch_from(peer)]

    def fetch_from(self, peer: Peer) -> list[Effect]:
        """Does what `fetch` does for one peer. What that peer says is no reason to ask others for more."""
        self.todo.refresh(peer)
        wanted = self._choose(peer)
        if not wanted:
            return []
        assert peer.session is not None, "only of a session that lasts"
        self._state.touched(held.name for held in wanted)
        return [Send(peer.session, Want(tuple(FileRequest(held, self._parts.get(held, 0)) for held in wanted)))]

    def accepts(self, session: SessionId, held: FileVersion) -> bool:
        """Returns whether a file that begins to come was asked for, or would be once its sender says that it holds it.
        Then it is.
        """
        state, name = self._state, held.name
        fetch = state.fetching.get(name)
        if fetch is not None:
            return (fetch.session, fetch.held) == (session, held)
        peer = state.by_session.get(session)
        if peer is None or held.size_bytes > PUSH_FILE_BYTES or not state.placement.is_replica(name):
            return False
        if not self._wants(peer, held):
            return False
        if name.layer is not None and covers(state.mine.layers(name.place), name.layer.description):
            return False
        state.fetching.begin(held, session, state.now_s)
        state.touched([name])
        return True

    # --- what becomes of it -----------------------------------------------------------------------------------------

    def came(self, held: FileVersion) -> None:
        """A file is durable here."""
        self._state.fetching.end(held.name)
        self._again_s.pop(held.name, None)
        self._parts.pop(held, None)

    def failed(self, name: FileName) -> None:
        """A file did not come whole, or could not be kept. It is tried again later, from anyone."""
        self._state.fetching.end(name)
        self._again_s[name] = self._state.now_s + RETRY_AFTER_S
        self._state.touched([name])

    def give_up_slow(self) -> list[Effect]:
        """Files are tried elsewhere for which no piece came for long from the peer that was asked."""
        state = self._state
        effects: list[Effect] = []
        for name, fetch in list(state.fetching.items()):
            peer = state.by_session.get(fetch.session)
            last_s = fetch.since_s if peer is None else max(fetch.since_s, peer.piece_s)
            if state.now_s - last_s > FETCH_TIMEOUT_S:
                self.failed(name)
                effects += self.fetch()
        return effects

    def has_part(self, held: FileVersion, received_bytes: int) -> None:
        """So much of a file had come when its session ended, and is kept (0: not any more): the rest is asked for."""
        if received_bytes:
            self._parts[held] = received_bytes
        else:
            self._parts.pop(held, None)

    def heartbeat(self, seconds: float) -> None:
        """Looks at what came in the time since the last heartbeat, and what is still to come."""
        state = self._state
        for peer in state.peers.values():
            peer.measure_rate(seconds)
        self._again_s = {name: at_s for name, at_s in self._again_s.items() if at_s > state.now_s}
        state.look_again(state.placement.keep_no_longer(state.now_s))
        self._weigh_backlog()

    def _weigh_backlog(self) -> None:
        """Many files are not weighed at every heartbeat, which would be late for it."""
        state = self._state
        if (
            state.now_s - self._weighed_s
            < HEARTBEAT_S * sum(peer.todo_files for peer in state.peers.values()) / MANY_FILES
        ):
            return
        self._weighed_s = state.now_s
        wanted = {held.name: held.size_bytes for _, held in self.todo.missing()}
        wanted |= {name: fetch.held.size_bytes for name, fetch in state.fetching.items()}
        self.backlog_bytes = sum(wanted.values())
        required = sum(size for name, size in wanted.items() if not state.is_optional(name))
        self.is_loaded = required > (CAUGHT_UP_BYTES if self.is_loaded else LOADED_BYTES)

    def is_filled(self) -> bool:
        """Returns whether nothing that should be here and that a peer is known to have is missing."""
        missing = (_is_of_ours(peer, held.name) for peer, held in self.todo.missing())
        return not self._state.fetching and not any(missing)

    # --- choosing ---------------------------------------------------------------------------------------------------

    def _choose(self, peer: Peer) -> tuple[FileVersion, ...]:
        """Returns the next files to ask a peer for, and notes that they are asked for."""
        if not peer.todo:
            return ()
        assert peer.session is not None, "only of a session that lasts"
        running = self._state.fetching.of_session(peer.session).values()
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
            self._state.fetching.begin(held, peer.session, self._state.now_s)
            if room <= 0 or room_bytes <= 0:
                break
        return tuple(chosen)

    def _candidates(self, peer: Peer) -> Iterator[FileVersion]:
        """Returns what a peer could be asked for, in order. Many files, as to fill a new node, are ordered once in a
        while.

        First comes what tasks wait for, and of that the traces of which the least is missing: a layer of the last epoch
        does not wait until the history of another shard has come, which is asked for when this node stands in for one
        that was lost. Then comes what is not safe yet: the safe point goes on while history is copied, however much of
        that there is.
        """
        kept = self._state.placement.kept_until_s.items()
        asked = [peer.todo[trace] for trace, until_s in kept if trace in peer.todo and self._is_new(until_s)]
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
            if self._state.now_s - peer.queued_s < HEARTBEAT_S * peer.todo_files / MANY_FILES:
                return
            everything = in_order(held for todo in peer.todo.values() for held in todo)
            peer.queue = [*in_order(not_safe), *everything][::-1]
            peer.queued_s = self._state.now_s
        while peer.queue:
            held = peer.queue.pop()
            if held in peer.todo.get(held.name.place, ()):
                yield held

    def _is_new(self, until_s: float) -> bool:
        """Returns whether a task asked just now for what is kept until then."""
        return until_s - KEEP_S >= self._state.now_s - ASKED_S

    def _wants(self, peer: Peer, held: FileVersion) -> bool:
        """Returns whether a file that this node should keep is to be taken from a peer now, if nothing here stands for
        it.
        """
        state, name = self._state, held.name
        waiting = self._again_s.get(name, state.now_s) > state.now_s
        known = self.todo.is_unwanted(peer, name) or state.has_or_fetches(name) or state.is_discarded(held)
        return not (waiting or known or self._waits(held)) and _is_of_ours(peer, name)

    def _waits(self, held: FileVersion) -> bool:
        """Returns whether a file is left out as long as there is so much else to fetch."""
        state = self._state
        if not state.is_optional(held.name):
            return False
        coming = sum(f.held.size_bytes for name, f in state.fetching.items() if state.is_optional(name))
        return self.is_loaded or (coming > 0 and coming + held.size_bytes > OPTIONAL_WINDOW_BYTES)


def _is_of_ours(peer: Peer, name: FileName) -> bool:
    """Returns whether a file of a peer belongs to the history that this node has. Before all is known that the peer
    has, nothing that stands for more than a layer of one epoch does, and no manifest.
    """
    if not peer.is_known and not (name.is_register or (name.layer is not None and name.layer.is_fresh)):
        return False
    return not peer.is_of_another_history(name)
