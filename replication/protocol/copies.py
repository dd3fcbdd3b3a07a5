"""On how many nodes a file is, where they hold other contents, and how far behind they are: as far as they said so."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from nosync.replication.protocol.file_names import FileName
from nosync.replication.protocol.inventory import missing
from nosync.replication.protocol.peer import Peer
from nosync.replication.protocol.placement import NodeId, replica_set
from nosync.replication.protocol.state import ReplicaState, first_epoch


class Copies:
    """Answers for one node. `members` of the store are this node and its peers."""

    def __init__(self, state: ReplicaState, me: NodeId, replicas: int) -> None:
        self._state, self._me, self._replicas = state, me, replicas
        self._lag: tuple[object, Mapping[NodeId, tuple[int, int]]] = (None, {})  # what was compared, and what was found

    def of(self, name: FileName, digest: str) -> int:
        """Returns on how many nodes a file is durable: this one and its peers, whether up or away."""
        peers = self._state.peers.values()
        return self._state.mine.holds(name, digest) + sum(_has_copy(peer, name, digest) for peer in peers)

    def of_mine(self, name: FileName) -> int:
        """Counts a file as it is here; 0: it is not. A manifest may be in an archive by now, here or there."""
        mine = self._state.mine.get(name)
        if mine is not None:
            return self.of(name, mine.digest)
        if not self._state.mine.has_archived(name):
            return 0
        peers = self._state.peers.values()
        return 1 + sum(name in peer.holds or peer.holds.has_archived(name) for peer in peers)

    def conflicts(self) -> dict[FileName, tuple[NodeId, str, str]]:
        """Returns by file a peer that holds other contents, our digest and theirs; one that is up where one of them
        is.
        """
        peers = sorted(self._state.peers.values(), key=lambda peer: peer.is_up(self._state.now_s))
        return {name: (peer.node, *found) for peer in peers for name, found in peer.all_conflicts().items() if found[0]}

    def discarded_elsewhere(self) -> dict[FileName, NodeId]:
        """Returns by file that is not here a peer that holds what was discarded."""
        return {
            name: peer.node
            for peer in self._state.peers.values()
            for name, (ours, _) in peer.all_conflicts().items()
            if not ours and not self._state.mine.has_archived(name)
        }

    def safe_elsewhere(self, timeline: str) -> int:
        """Returns the largest safe point that a peer told, -1 where none did: what is safe there is safe here, if it
        is the same.

        So of a peer only counts what it told once it is known what it holds, and up to where that is known to be
        other contents than here: in the manifests of the timeline, or in layers.
        """
        found = -1
        for peer in self._state.peers.values():
            if peer.session is None or peer.asked_s is not None or peer.unknown or peer.seq < 0:
                continue
            others = [t for name in peer.all_conflicts() if (t := first_epoch(name, timeline)) is not None]
            if timeline in peer.differs_from:
                others.append(peer.differs_from[timeline])
            found = max(found, min([peer.safe.get(timeline, -1), *(t - 1 for t in others)]))
        return found

    def lag(self) -> Mapping[NodeId, tuple[int, int]]:
        """Returns by peer how many files, and bytes, of ours it is missing and should hold.

        Who asks again, and nothing has changed, is told the same: names are not compared anew for everybody who
        looks.
        """
        peers = self._state.peers
        about = (self._state.mine.root, *((node, peer.holds.root) for node, peer in peers.items()))
        if self._lag[0] != about:
            self._lag = about, self._compared([self._me, *peers])
        return self._lag[1]

    def _compared(self, members: list[NodeId]) -> Mapping[NodeId, tuple[int, int]]:
        found = {}
        replica_set_of = functools.cache(lambda trace: frozenset(replica_set(trace, members, self._replicas)))
        for peer in self._state.peers.values():
            behind = [
                held
                for held in missing(peer.holds, self._state.mine)
                if held.name.placed is None or peer.node in replica_set_of(held.name.placed)
            ]
            found[peer.node] = (len(behind), sum(held.size_bytes for held in behind))
        return found


def _has_copy(peer: Peer, name: FileName, digest: str) -> bool:
    """Returns whether a peer holds these very contents. What it merged of another history does not stand for them."""
    exact = peer.holds.get(name)
    if exact is not None:
        return exact.digest == digest
    return peer.holds.holds(name, digest) and not peer.is_of_another_history(name)
