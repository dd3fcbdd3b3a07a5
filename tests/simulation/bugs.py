"""Bugs planted into the protocol and its surroundings, each of which the simulation must find."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from unittest import mock

from nosync.lsm.model.layer import Description
from nosync.replication.protocol import fetch_planner, inventory
from nosync.replication.protocol import replica as protocol
from nosync.replication.protocol.copies import Copies
from nosync.replication.protocol.fetch_planner import FetchPlanner
from nosync.replication.protocol.file_names import FileName, FileVersion
from nosync.replication.protocol.inventory import Inventory
from nosync.replication.protocol.messages import Change, Effect, Have, Heartbeat, Hello, Message, SessionId, Summary
from nosync.replication.protocol.peer import Peer
from nosync.replication.protocol.replica import Replica
from nosync.replication.protocol.sessions import Sessions
from nosync.replication.protocol.state import ReplicaState
from nosync.replication.protocol.statements import Statement, Statements
from nosync.testing.simulated_node import Data, SimNode, digest_of, layers_at
from nosync.testing.simulation import Cluster


class _AckBeforeDurable(SimNode):
    def publish(self, name: FileName, contents: str) -> None:
        super().publish(name, contents)
        if self.replica is not None:
            self.act(self.replica.holds([FileVersion(name, digest_of(contents))]))


class _AckOnReceipt(SimNode):
    def receive(self, session: SessionId, message: Message | Data) -> None:
        super().receive(session, message)
        if isinstance(message, Data) and self.replica is not None and self.is_whole(message):
            self.act(self.replica.holds([message.held]))


class _AckAfterFailedSync(SimNode):
    def sync(self, name: FileName) -> None:
        if self.replica is not None and name in self.volatile and self.world.chance(0.1, faults=True):
            self.act(self.replica.holds([FileVersion(name, digest_of(self.volatile[name]))]))
            return
        super().sync(name)


class _DigestNotChecked(SimNode):
    def is_whole(self, data: Data) -> bool:
        return True

    def sync(self, name: FileName) -> None:
        if self.replica is not None and name in self.volatile:
            self.keep(name, self.volatile.pop(name))


class _ManifestIgnored(SimNode):
    def is_safe(self, t: int) -> bool:
        assert self.replica is not None
        names = [*layers_at(t)]
        return t < 8 and all(
            self.replica.copies.of(n, digest_of(f"contents of {n}")) >= self.world.replicas for n in names
        )


class _GoneNotSaid(Replica):
    def holds(self, added: object, gone: object = ()) -> list[Effect]:
        return super().holds(added)  # type: ignore[arg-type]


class _IncarnationNotChecked(Sessions):
    def greeted(self, session: SessionId, hello: Hello) -> tuple[Peer | None, list[Effect]]:
        peer = self._state.peers.get(hello.node)
        known = peer.holds if peer is not None else None
        found = super().greeted(session, hello)
        if peer is not None and known is not None:
            peer.holds = known
        return found


class _OrderNotChecked(Statements):
    def received(self, peer: Peer, message: Statement) -> list[Effect]:
        if isinstance(message, Change) and peer.asked_s is None:
            message = replace(message, seq=peer.seq + 1)
        elif isinstance(message, Heartbeat):
            return []
        return super().received(peer, message)


class _HeartbeatsIgnored(Statements):
    def received(self, peer: Peer, message: Statement) -> list[Effect]:
        return [] if isinstance(message, Heartbeat) else super().received(peer, message)


class _NeverAgain(FetchPlanner):
    def failed(self, name: FileName) -> None:
        super().failed(name)
        self._again_s[name] = float("inf")


class _NoTimeout(Replica):
    def tick(self, now_s: float) -> list[Effect]:
        with mock.patch.object(fetch_planner, "FETCH_TIMEOUT_S", float("inf")):
            return super().tick(now_s)


class _CountsItselfTwice(Copies):
    def of(self, name: FileName, digest: str) -> int:
        return super().of(name, digest) + self._state.mine.holds(name, digest)


class _HolesIgnored(Cluster):
    def run(self) -> list[str]:
        def whole(layers: Iterable[Description]) -> inventory.Stretches:
            found = sorted(layers)
            return ([found[0].lower], [max(d.upper for d in found)]) if found else ([], [])

        with mock.patch.object(inventory, "_stretches", whole):
            return super().run()


class _ArchiveStandsForTheLine(Cluster):
    def run(self) -> list[str]:
        def has_archived(self: Inventory, name: FileName) -> bool:
            spans = [span for held in self if (span := held.name.span) is not None]
            return name.span is not None and any(first < last for _, first, last in spans)

        with mock.patch.object(Inventory, "has_archived", has_archived):
            return super().run()


class _ForgetsPeersChanges(ReplicaState):
    def touched(self, names: object) -> None:
        """What is lost here is not looked for."""


class _RootsNotCompared(Statements):
    def _summarized(self, peer: Peer, summary: Summary) -> list[Effect]:
        mine = self._state.mine.groups()
        groups = tuple((group, mine.get(group, root)) for group, root in summary.groups)
        return super()._summarized(peer, replace(summary, groups=groups))


class _ChangesBesideASummaryForgotten(Statements):
    def _changed(self, peer: Peer, change: Change) -> list[Effect]:
        return super()._changed(peer, replace(change, added=(), gone=()) if peer.unknown else change)

    def received(self, peer: Peer, message: Statement) -> list[Effect]:
        return [] if isinstance(message, Heartbeat) else super().received(peer, message)


class _InventoriesOfAnyTime(Statements):
    def received(self, peer: Peer, message: Statement) -> list[Effect]:
        if isinstance(message, Have):
            message = replace(message, seq=peer.seq)
        elif isinstance(message, Heartbeat) and message.seq == peer.seq:
            return []  # the hash would tell; that something was lost is still noticed
        return super().received(peer, message)


def _with_node(node: type[SimNode]) -> type[Cluster]:
    return type(node.__name__, (Cluster,), {"node_class": node})


def _with_replica(replica: type[Replica]) -> type[Cluster]:
    return type(replica.__name__, (Cluster,), {"replica_class": replica})


def _with_part(part: type) -> type[Cluster]:
    """The part takes the place of the one that it is made from, in all replicas."""
    (name,) = (base.__name__ for base in part.__bases__)

    class WithPart(Cluster):
        def run(self) -> list[str]:
            with mock.patch.object(protocol, name, part):
                return super().run()

    return WithPart


BUGS: dict[str, type[Cluster]] = {
    "acks before a file is durable": _with_node(_AckBeforeDurable),
    "acks what it received": _with_node(_AckOnReceipt),
    "acks after a failed fsync": _with_node(_AckAfterFailedSync),
    "does not check digests": _with_node(_DigestNotChecked),
    "safe point without manifests": _with_node(_ManifestIgnored),
    "does not say what is gone": _with_replica(_GoneNotSaid),
    "does not check incarnations": _with_part(_IncarnationNotChecked),
    "takes statements in any order": _with_part(_OrderNotChecked),
    "ignores heartbeats": _with_part(_HeartbeatsIgnored),
    "takes its own files for the peer's": _with_part(_RootsNotCompared),
    "forgets what changes beside a summary": _with_part(_ChangesBesideASummaryForgotten),
    "takes inventories of any time": _with_part(_InventoriesOfAnyTime),
    "never tries again": _with_part(_NeverAgain),
    "waits for ever for a file": _with_replica(_NoTimeout),
    "counts itself twice": _with_part(_CountsItselfTwice),
    "takes a merged layer for more than it covers": _HolesIgnored,
    "takes an archive for one of the whole line": _ArchiveStandsForTheLine,
    "does not notice what it lost": _with_part(_ForgetsPeersChanges),
}
