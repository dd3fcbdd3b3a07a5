"""What a node of many does for each statement does not grow with their number: counted in calls, not in seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from nosync.lsm.model.layer import Description, LayerId, Shard, TraceId
from nosync.replication.protocol import placement
from nosync.replication.protocol.fetch_planner import FetchPlanner
from nosync.replication.protocol.file_names import FileName, FileVersion
from nosync.replication.protocol.inventory import Inventory
from nosync.replication.protocol.messages import Change, Effect, Heartbeat, Hello, Send, SessionId, Summary, Want
from nosync.replication.protocol.peer import HEARTBEAT_S
from nosync.replication.protocol.placement import NodeId, Placement, replica_set
from nosync.replication.protocol.replica import Replica
from nosync.replication.protocol.todo import Todo

IDS = [NodeId(f"n{i:02}") for i in range(12)]
ME, *OTHERS = IDS
TRACES = 30


def held(trace: int, t: int) -> FileVersion:
    return FileVersion(
        FileName.of_layer(LayerId(TraceId(f"s{trace}", "f", Shard(0)), Description.of_epoch(t))), f"{trace} {t}", 1
    )


class Linked:
    """One node that all others of twelve are linked with. They hold nothing yet."""

    def __init__(self) -> None:
        self.one = Replica(ME, "life", "s", IDS, replicas=2)
        for node in OTHERS:
            self.comes(node)

    def comes(self, node: NodeId) -> None:
        session = SessionId(OTHERS.index(node))
        self.one.connected(session)
        self.one.received(session, Hello(node, f"life-of-{node}", "s", 2))
        self.one.received(session, Summary(0, tuple(self.one.peers[node].holds.groups().items())))

    def tells(self, node: NodeId, *files: FileVersion) -> list[Effect]:
        peer = self.one.peers[node]
        return self.one.received(SessionId(OTHERS.index(node)), Change(peer.seq + 1, files))

    def all_tell(self, t: int) -> None:
        """Each layer of an epoch is on three nodes."""
        for trace in range(TRACES):
            for i in range(3):
                self.tells(OTHERS[(trace + i) % len(OTHERS)], held(trace, t))


def counted(monkeypatch: pytest.MonkeyPatch, of: Any, name: str) -> Callable[[], int]:
    """Calls of a function since it was asked last."""
    calls, real = [0], getattr(of, name)

    def count(*arguments: Any) -> Any:
        calls[0] += 1
        return real(*arguments)

    def since() -> int:
        found, calls[0] = calls[0], 0
        return found

    monkeypatch.setattr(of, name, count)
    return since


def test_each_trace_is_ranked_once_however_much_is_said_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Linked()
    ranked = counted(monkeypatch, placement, "rank")
    cluster.all_tell(0)
    assert ranked() == TRACES * len(IDS), "each node for each trace"
    for t in range(1, 6):
        cluster.all_tell(t)
        cluster.one.tick(t * HEARTBEAT_S)
        for node in OTHERS:
            cluster.one.sessions.piece_came(SessionId(OTHERS.index(node)), 0)
    assert ranked() == 0
    assert cluster.one.peers.keys() == set(OTHERS)
    cluster.one.disconnected(SessionId(0))
    assert ranked() == 2 * TRACES, "the one that went, against this one"
    cluster.comes(OTHERS[0])
    assert ranked() == 2 * TRACES
    for t in range(10):
        cluster.one.holds([held(99, t)])
    assert ranked() == len(IDS), "who is sent what is written here, too"


def test_a_statement_has_its_sender_looked_at_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Linked()
    cluster.all_tell(0)
    cluster.one.tick(0.0)
    looked = counted(monkeypatch, Todo, "_look_at")
    chosen = counted(monkeypatch, FetchPlanner, "_choose")
    kept = [trace for trace in range(TRACES) if cluster.one.state.placement.is_replica(held(trace, 1).name)]
    assert 0 < len(kept) < TRACES
    other = next(trace for trace in range(TRACES) if trace not in kept)
    assert cluster.tells(OTHERS[0], held(other, 1)) == []
    assert (looked(), chosen()) == (1, 1)
    [effect] = cluster.tells(OTHERS[0], held(kept[0], 1))
    assert isinstance(effect, Send)
    assert isinstance(effect.message, Want)
    assert (looked(), chosen()) == (1, 1)


def test_what_others_are_to_keep_is_not_weighed_and_not_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Linked()
    cluster.all_tell(0)
    missing = {held.name for peer in cluster.one.peers.values() for todo in peer.todo.values() for held in todo}
    assert all(cluster.one.state.placement.is_replica(name) for name in missing)
    cluster.one.holds([fetch.held for fetch in cluster.one.state.fetching.values()])
    wants = counted(monkeypatch, FetchPlanner, "_wants")
    cluster.one.tick(HEARTBEAT_S)
    cluster.all_tell(1)
    fetched = sum(cluster.one.state.placement.is_replica(held(trace, 0).name) for trace in range(TRACES))
    assert 0 < wants() <= 3 * fetched, "each layer that is to be kept, for each peer that holds it"


def test_a_beat_hashes_the_inventory_once_for_all_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Linked()
    asked: list[int] = []
    root = Inventory.root.fget
    assert root is not None
    monkeypatch.setattr(Inventory, "root", property(lambda self: asked.append(1) or root(self)))
    effects = cluster.one.tick(HEARTBEAT_S + 0.01)
    assert sum(isinstance(e, Send) and isinstance(e.message, Heartbeat) for e in effects) == len(OTHERS)
    assert len(asked) == 1


def test_who_keeps_a_trace_is_as_if_all_were_ranked_again() -> None:
    for me in IDS[:4]:
        others = [node for node in IDS if node != me]
        found = Placement(me, 3)
        up = [me]
        directories = [f"s{i}/f/0" for i in range(40)]
        before: dict[str, bool] = {}
        for node, is_up in [*((n, True) for n in others), *((n, False) for n in others[::2]), (others[0], True)]:
            up = [*up, node] if is_up else [n for n in up if n != node]
            changed = found.changed(node, is_up=is_up)
            expected = {d: me in replica_set(d, up, 3) for d in directories}
            assert {d: found.is_mine(d) for d in directories} == expected
            assert {d: found.replica_set(d) for d in directories} == {
                d: frozenset(replica_set(d, up, 3)) for d in directories
            }
            if before:
                assert sorted(changed) == sorted(d for d in directories if before[d] != expected[d])
            assert found.changed(node, is_up=is_up) == []
            before = expected


def test_a_trace_that_nobody_holds_any_more_is_forgotten() -> None:
    cluster = Linked()
    cluster.all_tell(0)
    assert len(cluster.one.state.placement._before_me) == TRACES
    for trace in range(TRACES):
        for i in range(3):
            node = OTHERS[(trace + i) % len(OTHERS)]
            peer = cluster.one.peers[node]
            cluster.one.received(SessionId(OTHERS.index(node)), Change(peer.seq + 1, (), (held(trace, 0).name,)))
    assert cluster.one.state.placement._before_me == {}
