"""Files that go to peers unasked: what is small and was just written here, ahead of the statement that it is durable
here.

That saves a question and its answer. Who does not want a file throws it away; who is slow to take it gets no more for a
while.
"""

from __future__ import annotations

from collections.abc import Sequence

from nosync.lsm.model.timestamp import Time, epoch_of
from nosync.replication.protocol.file_names import FileVersion
from nosync.replication.protocol.messages import PUSH_FILE_BYTES, Effect, FileRequest, SendFiles
from nosync.replication.protocol.peer import Peer
from nosync.replication.protocol.state import ReplicaState

PUSH_BYTES = 1 << 20
"""No more than this is on its way unasked to one peer."""
PUSH_PATIENCE_S = 5.0
"""A peer that does not say for so long that it holds what was pushed is slow, or does not want it."""
PUSH_PAUSE_S = 60.0


class EagerPush:
    """Chooses the files that go unasked, and notices who is slow to take them."""

    def __init__(self, state: ReplicaState) -> None:
        self._state = state

    def may_push(self, held: FileVersion) -> bool:
        """Returns whether a file is small, new, and not to be computed again. Nodes merge, and archive manifests, for
        themselves.
        """
        layer = held.name.layer
        if layer is None:
            is_fresh = held.name.archive is None
        else:
            is_fresh = epoch_of(layer.description.lower) == epoch_of(Time(layer.description.upper - 1))
        return is_fresh and held.size_bytes <= PUSH_FILE_BYTES and not self._state.is_optional(held.name)

    def push(self, peer: Peer, files: Sequence[FileVersion]) -> list[Effect]:
        """Sends a peer what it would ask for."""
        now_s = self._state.now_s
        if not files or not peer.is_up(now_s) or now_s < peer.push_again_s:
            return []
        coming = sum(size for size, _ in peer.pushed.values())
        chosen = []
        for held in files:
            name = held.name
            is_kept = name.placed is None or peer.node in self._state.placement.replica_set(name.placed)
            if is_kept and name not in peer.holds and coming + held.size_bytes <= PUSH_BYTES:
                coming += held.size_bytes
                peer.pushed[name] = held.size_bytes, now_s
                chosen.append(FileRequest(held, 0))
        assert peer.session is not None, "only of a session that lasts"
        return [SendFiles(peer.session, tuple(chosen))] if chosen else []

    def pause_slow(self) -> None:
        """Peers that do not say that they hold what was pushed get no more for a while."""
        now_s = self._state.now_s
        for peer in self._state.peers.values():
            if any(now_s - since_s > PUSH_PATIENCE_S for _, since_s in peer.pushed.values()):
                peer.pushed, peer.push_again_s = {}, now_s + PUSH_PAUSE_S
