"""What this node is to fetch of each peer: what the peer holds, and this node should keep and neither has nor fetches.

It is worked out for the traces and files of a peer that changed since it was asked for last, and not for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from nosync.replication.protocol.file_names import FileName, FileVersion
from nosync.replication.protocol.inventory import missing_of_trace
from nosync.replication.protocol.peer import Peer
from nosync.replication.protocol.state import ReplicaState, first_epoch


class Todo:
    """Keeps `todo`, `not_safe` and `conflicts` of all peers as they follow from what changed."""

    def __init__(self, state: ReplicaState) -> None:
        self._state = state

    def refresh(self, peer: Peer) -> None:
        """Works out again what is to be fetched of a peer, where something changed."""
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

    def missing(self) -> Iterator[tuple[Peer, FileVersion]]:
        """Returns what this node should keep and a peer holds, but for what was dropped here."""
        for peer in self._state.linked():
            self.refresh(peer)
            yield from (
                (peer, held) for todo in peer.todo.values() for held in todo if not self.is_unwanted(peer, held.name)
            )

    def is_unwanted(self, peer: Peer, name: FileName) -> bool:
        """Returns whether a file was dropped here, and no task has asked for it since."""
        return name in peer.unwanted and name.place not in self._state.placement.kept_until_s

    def _look_at(self, peer: Peer, place: str) -> None:
        """Works out one trace, or one other file, again; and says where contents differ."""
        state, layers = self._state, peer.holds.layers(place)
        if (
            not layers
            and place in state.placement
            and not any(other.holds.layers(place) for other in state.peers.values())
        ):
            state.placement.forget(place)
        other_file = peer.holds.get(place)
        names = [*layers.values(), *([other_file.name] if other_file is not None else [])]
        may_differ = bool(state.discarded) or state.mine.has_at(place)
        found = {name: self._conflict(peer, name) for name in names} if may_differ else {}
        peer.conflict_at(place, {name: digests for name, digests in found.items() if digests is not None})
        todo = self._lacking(peer, place, names)
        peer.todo_files += len(todo) - len(peer.todo.pop(place, ()))
        peer.not_safe.pop(place, None)
        if todo:
            peer.todo[place] = todo

    def _lacking(self, peer: Peer, place: str, names: Iterable[FileName]) -> list[FileVersion]:
        """Returns what of a trace, or one other file, is to be fetched."""
        state = self._state
        if not peer.holds.layers(place):
            todo = [
                held
                for name in names
                if (held := peer.holds.get(name))
                and not state.has_or_fetches(name)
                and (name.placed is None or state.placement.is_replica(name))
            ]
        elif state.placement.keeps_trace(place):
            ours_and_coming = {**state.mine.layers(place), **state.fetching.layers(place)}
            of_trace = missing_of_trace(ours_and_coming, peer.holds, place)
            todo = [held for held in of_trace if state.placement.is_replica(held.name)]
        else:
            todo = []
        return [held for held in todo if not state.is_discarded(held)]

    def _safe_told(self) -> int:
        """Returns the safe point of the main timeline, -1 where there is none."""
        state = self._state
        told = (state.safe, *(peer.safe for peer in state.linked()))
        return max(of.get(state.main_timeline, -1) for of in told)

    def _is_after(self, safe: int, name: FileName) -> bool:
        """Returns whether a file begins after the safe point of the main timeline, if there is one."""
        first = first_epoch(name, self._state.main_timeline)
        return safe >= 0 and first is not None and first > safe

    def _conflict(self, peer: Peer, name: FileName) -> tuple[str, str] | None:
        """Returns our digest and a peer's, where they differ; ours is empty where the peer holds what was discarded
        here.
        """
        ours, its = self._state.mine.get(name), peer.holds.get(name)
        if its is None or (name.layer is not None and not name.layer.is_fresh):
            return (
                None  # nodes that merge in other steps write other bytes; what it was merged of tells histories apart
            )
        if ours is not None:
            return (ours.digest, its.digest) if ours.digest != its.digest else None
        return ("", its.digest) if self._state.is_discarded(its) else None
