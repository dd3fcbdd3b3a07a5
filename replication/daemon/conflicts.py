"""Files of which peers hold other contents than this node: what an operator is told, and what can be discarded."""

from __future__ import annotations

import itertools

from nosync.lsm.errors import ReplicationError
from nosync.replication.daemon.shared_replica import SharedReplica
from nosync.replication.protocol.file_names import FileName

_CONFLICT, _HISTORIES, _MORE = "conflict ", "two histories of ", "more conflicts"
_MOST_TOLD = 1000
"""So many are told one by one: who asks for the status gets all of it in one message."""


class Conflicts:
    """The conflicts of one node. `problems`: where the node tells what is wrong."""

    def __init__(self, shared: SharedReplica, problems: dict[str, str]) -> None:
        self._shared, self._replica, self._problems = shared, shared.replica, problems

    def names(self) -> list[FileName]:
        """Returns the files of which peers hold other contents."""
        with self._shared.lock:
            return sorted(self._replica.copies.conflicts())

    def to_discard(self) -> list[FileName]:
        """Returns the files of which a peer that is up has the other contents. Raises ReplicationError where there are
        only others.
        """
        self._shared.tick()
        with self._shared.lock:
            found = self._replica.copies.conflicts()
            up = {peer.node for peer in self._replica.peers.values() if peer.is_up(self._replica.state.now_s)}
        names = sorted(name for name, (node, _, _) in found.items() if node in up)
        if found and not names:
            nodes = ", ".join(sorted({node for node, _, _ in found.values()}))
            raise ReplicationError(
                f"the other contents are on {nodes}, which is away: discarding what is here would leave nothing. Start "
                "its daemon first; or take it out with nosync peers --remove, if it is gone for good, and what is here "
                "counts"
            )
        return names

    def tell(self) -> None:
        """Says in the node's problems which conflicts there are now."""
        with self._shared.lock:
            conflicts, discarded = self._replica.copies.conflicts(), self._replica.copies.discarded_elsewhere()
            peers = self._replica.peers.values()
            differ = {(peer.node, timeline): t for peer in peers for timeline, t in peer.differs_from.items()}
        told: dict[str, str] = {}
        for name, node in itertools.islice(discarded.items(), _MOST_TOLD):
            told[_CONFLICT + name] = (
                f"was discarded here, and node {node} still holds it: nosync conflicts --take-theirs there as well, or "
                "wait for the node whose contents count"
            )
        for name, (node, ours, theirs) in itertools.islice(conflicts.items(), _MOST_TOLD):
            told[_CONFLICT + name] = (
                f"node {node} has other contents: digest {theirs[:16]} there, {ours[:16]} here; a stage is not "
                "deterministic, or two jobs ran. The safe point waits until one of the two gives way: nosync conflicts"
            )
        for (node, timeline), t in differ.items():
            told[f"{_HISTORIES}{timeline} with {node}"] = (
                f"node {node} sealed other contents from epoch {t} on, and has put them into an archive: nothing of it is "
                "taken here. Decide whose count, export what is wanted of the others, and empty that node's directory"
            )
        if rest := len(conflicts.keys() | discarded.keys()) + len(differ) - len(told):
            told[_MORE] = f"{rest:,} files more: nosync conflicts lists all"
        for what in list(self._problems):  # in one go: other threads change it
            if what.startswith((_CONFLICT, _HISTORIES, _MORE)) and what not in told:
                self._problems.pop(what, None)
        self._problems.update(told)
