"""What a node knows at a moment, and all parts of the protocol share: its files, its peers, what is on its way, and the
time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from nosync.lsm.manifests.manifest import MAIN_TIMELINE
from nosync.lsm.model.timestamp import epoch_of
from nosync.lsm.platform.layout import CHECKPOINTS, MANIFESTS
from nosync.replication.protocol.fetches import Fetches
from nosync.replication.protocol.file_names import FileName, FileVersion
from nosync.replication.protocol.inventory import Inventory
from nosync.replication.protocol.messages import SessionId
from nosync.replication.protocol.peer import Peer
from nosync.replication.protocol.placement import NodeId, Placement


@dataclass
class ReplicaState:
    """One node's record. What changed is marked here; what follows from it is worked out when files are asked for."""

    placement: Placement
    peers: dict[NodeId, Peer]
    """All other nodes of the store."""
    now_s: float
    mine: Inventory = field(default_factory=Inventory)
    """What is durable here."""
    fetching: Fetches = field(default_factory=Fetches)
    by_session: dict[SessionId, Peer] = field(default_factory=dict)
    """The peers with which there is a session."""
    optional: frozenset[str] = frozenset()
    """The node says which stages no copies are asked for: they can be computed again."""
    safe: dict[str, int] = field(default_factory=dict)
    """The node says its safe point, by timeline; peers are told."""
    main_timeline: str = MAIN_TIMELINE
    """The node says which timeline its main branch has."""
    discarded: dict[str, str] = field(default_factory=dict)
    """By file, the digest of contents that an operator discarded here: no peer's count, nor what is built upon them."""

    def advance(self, now_s: float) -> None:
        """Time passes. A peer that was silent for long by then is not counted on any more."""
        self.now_s = now_s
        for peer in self.peers.values():
            self.note_liveness(peer)

    def note_liveness(self, peer: Peer) -> bool:
        """Is called whenever a peer may have come or gone. Returns whether it did: then others keep some traces."""
        is_up = peer.is_up(self.now_s)
        if is_up == self.placement.is_up(peer.node):
            return False
        self.look_again(self.placement.changed(peer.node, is_up=is_up))
        return True

    def linked(self) -> list[Peer]:
        """Returns the peers with which there is a session."""
        return [peer for peer in self.peers.values() if peer.session is not None]

    def touched(self, names: Iterable[FileName]) -> None:
        """Files changed here, or begin or cease to come."""
        self.look_again({name.place for name in names})

    def look_again(self, places: Collection[str]) -> None:
        """Notes that what is to be fetched may have changed of these traces, checkpoints and other files, where a peer holds
        something of them.
        """
        checkpoints = [place for place in places if place.startswith(f"{CHECKPOINTS}/") and place.count("/") == 1]
        for peer in self.peers.values() if places else ():
            peer.dirty.update(place for place in places if peer.holds.has_at(place))
            for checkpoint in checkpoints:
                peer.dirty.update(peer.holds.of_checkpoint(checkpoint))

    def has_or_fetches(self, name: FileName) -> bool:
        return name in self.mine or name in self.fetching or self.mine.has_archived(name)

    def is_optional(self, name: FileName) -> bool:
        """Returns whether a file is a layer that can be computed again."""
        return name.layer is not None and name.layer.trace.stage in self.optional

    def is_discarded(self, held: FileVersion) -> bool:
        """Returns whether an operator discarded these very contents here."""
        return self.discarded.get(held.name) == held.digest


def first_epoch(name: FileName, timeline: str) -> int | None:
    """Returns the first epoch that a layer, or a manifest of the timeline, says anything of. None for another file."""
    if name.layer is not None:
        return epoch_of(name.layer.description.lower)
    span = name.span
    return span.first if span is not None and span.timeline == f"{MANIFESTS}/{timeline}" else None
