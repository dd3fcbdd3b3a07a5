"""What counts of a peer that took something back, that has another history, or of which only a part is wanted."""

from __future__ import annotations

from nosync.lsm.model.layer import Description, LayerId, Shard, TraceId
from nosync.lsm.model.timestamp import Time, pack
from nosync.replication.protocol.fetch_planner import LOADED_BYTES
from nosync.replication.protocol.file_names import FileName, FileVersion
from nosync.replication.protocol.messages import Change
from nosync.replication.protocol.peer import HEARTBEAT_S
from tests.helpers.replicas import N1, N2, SESSION, Pair, held, manifest


def test_a_safe_point_that_was_taken_back_counts_no_more() -> None:
    """Of a peer that gave up its epochs: at once, and also where it has none left to tell."""
    pair = Pair()
    n1, n2 = pair.nodes[N1], pair.nodes[N2]
    files = [manifest(t) for t in range(4)]
    pair.holds(N2, *files)
    n2.state.safe = {"main": 3}
    pair.pass_s(2 * HEARTBEAT_S)
    assert n1.copies.safe_elsewhere("main") == 3
    pair.drop(N2, *(file.name for file in files[2:]))
    assert n1.copies.safe_elsewhere("main") == 1, "before it is told again"
    n2.state.safe = {}
    pair.drop(N2, *(file.name for file in files[:2]))
    pair.pass_s(2 * HEARTBEAT_S)
    assert n1.copies.safe_elsewhere("main") == -1


def test_manifests_that_go_into_an_archive_take_nothing_back() -> None:
    pair = Pair()
    pair.holds(N2, *(manifest(t) for t in range(4)))
    pair.nodes[N2].state.safe = {"main": 3}
    pair.pass_s(2 * HEARTBEAT_S)
    pair.holds(N2, manifest(0, 3))
    pair.holds(N2, gone=tuple(manifest(t).name for t in range(4)))
    assert pair.nodes[N1].copies.safe_elsewhere("main") == 3


def test_a_peer_that_is_away_and_has_other_contents_holds_no_copy() -> None:
    pair = Pair()
    n1 = pair.nodes[N1]
    merged = FileVersion(
        FileName.of_layer(LayerId(TraceId("s", "f", Shard(0)), Description(pack(0), pack(4)))), "other", LOADED_BYTES
    )
    theirs = [FileVersion(manifest(t).name, f"other{t}", 1) for t in range(4)]
    n1.received(SESSION, Change(1, (merged, *theirs)))
    n1.disconnected(SESSION)
    for t in range(4):
        n1.holds([held(t), manifest(t)])
    assert n1.copies.conflicts().keys() >= {manifest(t).name for t in range(4)}
    assert [n1.copies.of(held(t).name, f"d{t}") for t in range(4)] == [1, 1, 1, 1]


def test_merged_layers_of_the_same_rows_in_other_bytes_are_no_conflict() -> None:
    """Nodes merge in other steps. What a layer was merged of tells two histories apart."""
    pair = Pair()
    n1 = pair.nodes[N1]
    name = FileName.of_layer(LayerId(TraceId("s", "f", Shard(0)), Description(pack(0), pack(4), Time(pack(3)))))
    for t in range(4):
        pair.holds(N1, held(t))
        pair.holds(N2, held(t))
    pair.holds(N2, FileVersion(name, "in two steps", 1))
    pair.holds(N1, FileVersion(name, "at once", 1))
    pair.pass_s(2 * HEARTBEAT_S)
    assert n1.copies.conflicts() == {}
    assert [n1.copies.of(held(t).name, f"d{t}") for t in range(4)] == [2, 2, 2, 2]
    n1.holds([held(9, "mine")])
    pair.holds(N2, held(9, "theirs"))
    pair.pass_s(2 * HEARTBEAT_S)
    assert [*n1.copies.conflicts()] == [held(9).name]


def test_nothing_is_fetched_of_a_history_that_an_archive_is_of() -> None:
    pair = Pair()
    n1 = pair.nodes[N1]
    n1.peers[N2].differs_from = {"main": 2}
    pair.holds(N2, *(held(t) for t in range(4)), manifest(5), manifest(0, 1), manifest(2, 3), manifest(6, 7))
    pair.nodes[N2].state.safe = {"main": 3}
    pair.pass_s(2 * HEARTBEAT_S)
    assert set(pair.has(N1)) == {held(0), held(1), manifest(0, 1)}
    assert n1.copies.safe_elsewhere("main") == 1
    assert n1.copies.of(held(3).name, "d3") == 1, "not a copy of ours"
    n1.peers[N2].void()  # it is another node now
    assert n1.peers[N2].differs_from == {}


def test_of_a_trace_of_which_only_the_end_was_released_the_beginning_is_kept() -> None:
    """Its source was declared to be kept before."""
    pair = Pair()
    for t in range(4):
        pair.nodes[N2].release(held(t).name.place, pack(2), pack(4))
    pair.holds(N1, *(held(t) for t in range(5)))
    assert pair.has(N2) == [held(0), held(1), held(4)]


def test_what_a_later_release_keeps_is_fetched() -> None:
    pair = Pair()
    n2 = pair.nodes[N2]
    n2.release(held(0).name.place, Time(0), pack(4))
    pair.holds(N1, *(held(t) for t in range(4)))
    assert pair.has(N2) == []
    n2.release(held(0).name.place, pack(2), pack(4))
    pair.pass_s(2 * HEARTBEAT_S)
    assert pair.has(N2) == [held(0), held(1)]
