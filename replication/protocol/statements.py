"""What nodes say that they hold: this node's statements to its peers, and theirs to it.

Statements of a session are numbered, and count in order only. A gap, or a heartbeat whose hash does not fit, asks for
the inventory again: first a summary by groups of files, then the names in those groups whose hash is not known.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from nosync.replication.protocol.fetch_planner import FetchPlanner
from nosync.replication.protocol.file_names import FileName, FileVersion
from nosync.replication.protocol.messages import (
    Change,
    Effect,
    Have,
    Heartbeat,
    InventoryRequest,
    Send,
    Summary,
)
from nosync.replication.protocol.peer import Peer
from nosync.replication.protocol.state import ReplicaState, first_epoch

Statement = Summary | Have | Change | Heartbeat

GROUPS_AT_ONCE = 500
ASK_AGAIN_S = 3.0


class Statements:
    """The statements of one node. What a peer says that it holds is fetched from it at once, as far as it is missing
    here.
    """

    def __init__(self, state: ReplicaState, planner: FetchPlanner) -> None:
        self._state, self._planner = state, planner

    # --- ours -------------------------------------------------------------------------------------------------------

    def heartbeat(self) -> list[Effect]:
        """Tells all peers that this node is alive, and what they were not told yet."""
        effects: list[Effect] = []
        root, safe = self._state.mine.root, tuple(sorted(self._state.safe.items()))
        for peer in self._state.linked():
            assert peer.session is not None, "that is what linked means"
            effects += peer.say()
            effects.append(Send(peer.session, Heartbeat(peer.said, root, safe)))
        return effects

    def answer(self, peer: Peer, groups: tuple[str, ...]) -> list[Effect]:
        """A peer asks what this node holds of some groups, or for a summary of all."""
        assert peer.session is not None, "only of a session that lasts"
        said, mine = peer.say(), self._state.mine
        if not groups:
            return [*said, Send(peer.session, Summary(peer.said, tuple(mine.groups().items())))]
        held = tuple(itertools.chain.from_iterable(map(mine.of_group, groups)))
        return [*said, Send(peer.session, Have(peer.said, groups, held))]  # frames are made as they go out

    def ask(self, peer: Peer) -> list[Effect]:
        """Asks a peer for a summary of what it holds."""
        assert peer.session is not None, "only of a session that lasts"
        peer.asked_s, peer.unknown = self._state.now_s, set()
        return [Send(peer.session, InventoryRequest())]

    # --- theirs -----------------------------------------------------------------------------------------------------

    def received(self, peer: Peer, message: Statement) -> list[Effect]:
        """A peer says what it holds."""
        if isinstance(message, Heartbeat):
            self._note_safe_points(peer, dict(message.safe))
        if isinstance(message, Summary):
            if message.seq < peer.seq:
                return []
            effects = self._summarized(peer, message)
        elif isinstance(message, Have):
            if not peer.unknown.intersection(message.groups):
                return []
            if message.seq != peer.seq:
                return self.ask(peer)
            effects = self._learned(peer, message)
        elif peer.asked_s is not None and self._state.now_s - peer.asked_s > ASK_AGAIN_S:
            return self.ask(peer)
        elif peer.asked_s is not None and not peer.unknown:
            return []  # the summary is on its way, and says it all
        elif isinstance(message, Change):
            if message.seq <= peer.seq:
                return []
            if message.seq != peer.seq + 1:
                return self.ask(peer)
            effects = self._changed(peer, message)
        else:
            is_behind = message.seq > peer.seq
            differs = message.seq == peer.seq and not peer.unknown and message.root != peer.holds.root
            return self.ask(peer) if is_behind or differs else []
        return [*effects, *self._planner.fetch_from(peer)]

    def _note_safe_points(self, peer: Peer, safe: dict[str, int]) -> None:
        if self._state.main_timeline in safe.keys() - peer.safe.keys():
            peer.dirty |= peer.todo.keys()  # what of it is safe was not known yet
            peer.queue = []
        peer.safe = dict(safe)  # all that it tells: a safe point that it took back is not among them

    def _summarized(self, peer: Peer, summary: Summary) -> list[Effect]:
        """Groups that hash to what is known stay, or are what this node holds itself; the names in the others are asked
        for.
        """
        assert peer.session is not None, "only of a session that lasts"
        there = dict(summary.groups)
        known, mine = peer.holds.groups(), self._state.mine.groups()
        for group in [group for group, root in known.items() if there.get(group) != root]:
            _holds_now(peer, group, ())
        unknown = []
        for group, root in there.items():
            if mine.get(group) == root:
                if known.get(group) != root:
                    _holds_now(peer, group, self._state.mine.of_group(group))
            elif known.get(group) != root:
                unknown.append(group)
        peer.seq, peer.unknown = summary.seq, set(unknown)
        peer.has_dropped([n for n in peer.unwanted if n not in peer.holds and n.group not in peer.unknown])
        peer.asked_s = self._state.now_s if unknown else None
        peer.is_known |= not unknown
        portions = [tuple(unknown[i : i + GROUPS_AT_ONCE]) for i in range(0, len(unknown), GROUPS_AT_ONCE)]
        return [Send(peer.session, InventoryRequest(portion)) for portion in portions]

    def _learned(self, peer: Peer, inventory: Have) -> list[Effect]:
        by_group: dict[str, list[FileVersion]] = {group: [] for group in inventory.groups if group in peer.unknown}
        for held in inventory.held:
            if (group := held.name.group) in by_group:
                by_group[group].append(held)
        for group, members in by_group.items():
            _holds_now(peer, group, members)
        peer.unknown -= by_group.keys()
        peer.has_dropped([n for n in peer.unwanted if n not in peer.holds and n.group in by_group])
        peer.asked_s = self._state.now_s if peer.unknown else None
        peer.is_known |= not peer.unknown
        return []

    def _changed(self, peer: Peer, change: Change) -> list[Effect]:
        peer.seq = change.seq
        added = [held for held in change.added if held.name.group not in peer.unknown]  # those are on their way
        for held in added:
            peer.holds.add(held)
        for name in change.gone:
            peer.holds.discard(name)
            if name.layer is None and not peer.holds.has_archived(name):
                _distrust(peer, name)
        peer.touched((*(held.name for held in added), *change.gone))
        peer.has_dropped(change.gone)
        return []


def _distrust(peer: Peer, name: FileName) -> None:
    """A peer has a file no more. Where that is a manifest, what it told of its epoch, or of later ones, may have been of
    other contents, until it tells its safe points again.
    """
    for timeline, safe in peer.safe.items():
        t = first_epoch(name, timeline)
        if t is not None and t <= safe:
            peer.safe[timeline] = t - 1


def _holds_now(peer: Peer, group: str, held: Iterable[FileVersion]) -> None:
    """This is all that a peer holds of a group."""
    names = [one.name for one in peer.holds.of_group(group)]
    for name in names:
        peer.holds.discard(name)
    for one in held:
        peer.holds.add(one)
        names.append(one.name)
    peer.touched(names)
