"""What two nodes say to each other: greetings, statements, what goes unasked, and what is told at once."""

from __future__ import annotations

from nosync.lsm.model.layer import Description, LayerId, Shard, TraceId
from nosync.lsm.model.timestamp import Time, pack
from nosync.replication.daemon.peer_status import peer_status
from nosync.replication.protocol.eager_push import PUSH_BYTES, PUSH_PAUSE_S
from nosync.replication.protocol.file_names import FileName, FileVersion
from nosync.replication.protocol.messages import (
    PUSH_FILE_BYTES,
    Change,
    Close,
    Effect,
    Heartbeat,
    Hello,
    InventoryRequest,
    Send,
    SendFiles,
    SessionId,
    Summary,
    Want,
)
from nosync.replication.protocol.peer import HEARTBEAT_S
from nosync.replication.protocol.placement import NodeId, replica_set
from nosync.replication.protocol.replica import MEET_S, Replica
from tests.helpers.replicas import N1, N2, SESSION, Pair, held, manifest


def _told(effects: list[Effect]) -> dict[SessionId, list[str]]:
    """By session, the files that it is told of as durable."""
    sent = [(e.session, e.message) for e in effects if isinstance(e, Send) and isinstance(e.message, Change)]
    return {session: [one.name for one in change.added] for session, change in sent}


def test_who_gave_a_file_is_told_at_once_that_it_is_durable_and_others_with_the_next_beat() -> None:
    ids = [NodeId(name) for name in ("n0", "n1", "n2")]
    nodes = {id: Replica(id, f"life-of-{id}", "store", ids, replicas=3) for id in ids}
    sessions = {ids[0]: SessionId(0), ids[2]: SessionId(1)}
    one = nodes[ids[1]]
    for other, session in sessions.items():
        one.connected(session)
        for effect in nodes[other].connected(session):
            assert isinstance(effect, Send)
            one.received(session, effect.message)
        one.received(session, Summary(0, ()))
    one.received(sessions[ids[0]], Change(1, (held(0),)))
    assert _told(one.holds([held(0)])) == {sessions[ids[0]]: [held(0).name]}
    assert _told(one.holds([held(1)])) == {
        sessions[ids[0]]: [held(1).name],
        sessions[ids[2]]: [held(0).name, held(1).name],  # what came from here is for all, and takes along what waited
    }
    one.received(sessions[ids[0]], Change(2, (held(2),)))
    one.holds([held(2)])
    effects = one.tick(HEARTBEAT_S + 0.1)
    assert _told(effects) == {sessions[ids[2]]: [held(2).name]}
    heartbeats = [effect for effect in effects if isinstance(effect, Send) and isinstance(effect.message, Heartbeat)]
    assert [(e.session, e.message.seq) for e in heartbeats if isinstance(e.message, Heartbeat)] == [
        (sessions[ids[0]], 3),
        (sessions[ids[2]], 2),
    ]
    assert effects.index(heartbeats[1]) > max(i for i, e in enumerate(effects) if _told([e]))


def greeting(process: str, incarnation: str = "life-of-n2") -> Hello:
    return Hello(N2, incarnation, "store", 2, process=process)


def test_of_two_daemons_of_one_name_the_last_that_came_is_talked_to() -> None:
    one = Replica(N1, "life-of-n1", "store", (N1, N2), replicas=2)
    first, second, third, fourth = (SessionId(n) for n in range(4))

    def begins(session: SessionId, hello: Hello) -> list[Effect]:
        one.connected(session)
        return one.received(session, hello)

    begins(first, greeting("run-1"))
    peer = one.peers[N2]
    begins(second, greeting("run-2", "another-life"))  # it was started again, or another one took its name
    assert (peer.session, peer.twin) == (second, "")
    (refused,) = begins(third, greeting("run-1"))
    assert isinstance(refused, Close)
    assert "two daemons run as node n2" in refused.reason
    assert (peer.session, peer.incarnation, peer.twin) == (second, "another-life", refused.reason)
    status = peer_status(peer, one.state.now_s, 0, 0, was_time=True)
    assert (status.state, status.why) == ("up", refused.reason)
    one.tick(40.0)  # nothing came of the other one
    begins(fourth, greeting("run-1"))
    assert (peer.session, peer.incarnation) == (fourth, "life-of-n2")
    assert peer_status(peer, one.state.now_s, 0, 0, was_time=True).why == ""


def test_one_daemon_has_a_new_session_whenever_it_dials() -> None:
    one = Replica(N1, "life-of-n1", "store", (N1, N2), replicas=2)
    for n, process in enumerate(["a", "a", "b", "b", "", "", "c"]):  # versions before say no run
        one.connected(SessionId(n))
        one.received(SessionId(n), greeting(process))
        assert one.peers[N2].session == SessionId(n)
        assert not one.peers[N2].twin


def test_what_waits_to_be_told_is_told_before_an_inventory() -> None:
    pair = Pair()
    one = pair.nodes[N1]
    pair.holds(N2, held(0))
    one.peers[N2].unsaid = {held(5).name: held(5)}
    one.mine.add(held(5))
    effects = one.received(SESSION, InventoryRequest())
    kinds = [type(effect.message) for effect in effects if isinstance(effect, Send)]
    assert kinds == [Change, Summary]
    numbers = [e.message.seq for e in effects if isinstance(e, Send) and isinstance(e.message, Change | Summary)]
    assert numbers[0] == numbers[1]


def test_a_node_that_has_nothing_is_not_filled_before_it_has_met_all() -> None:
    """Its disk may be a new one, and the store with a peer that is down."""
    ids = [NodeId(name) for name in ("n1", "n2", "n3")]
    lost = Replica(ids[0], "life", "store", ids, replicas=2)
    new = Replica(ids[0], "life", "store", ids, replicas=2, is_new_store=True)
    for t in range(100):
        lost.tick(t * MEET_S)
        new.tick(t * MEET_S)
    assert not lost.is_filled()
    assert new.is_filled()
    lost.peers[ids[1]].is_known = True
    assert not lost.is_filled()
    lost.peers[ids[2]].is_known = True
    assert lost.is_filled()
    begun = Replica(ids[0], "life", "store", ids, replicas=2)
    begun.holds([held(0)])
    begun.tick(MEET_S)
    assert begun.is_filled(), "what is here is no new disk, and nobody is waited for"


def test_a_node_that_had_nothing_is_not_filled_by_a_part() -> None:
    """The peer that was sending the rest went, or the one that has it is down."""
    ids = [NodeId(name) for name in ("n1", "n2", "n3")]
    one = Replica(ids[0], "life", "store", ids, replicas=2, is_being_filled=True)
    one.holds([held(0)])
    for node in ids[1:]:
        one.peers[node].is_known = True
    for t in range(100):
        one.tick(t * MEET_S)
    assert not one.is_filled(), "n2 and n3 are away"
    for node in ids[1:]:
        one.peers[node].refused = "gone for good"
    assert one.is_filled()
    assert not one.is_being_filled


def test_a_node_that_wants_all_asks_for_what_was_not_said_yet() -> None:
    pair = Pair()
    one, two = pair.nodes[N1], pair.nodes[N2]
    for node in (one, two):
        node.add_member(NodeId("n3"))  # gave it to n2, which did not tell n1 yet
    two.mine.add(held(0))
    two.peers[N1].unsaid = {held(0).name: held(0)}
    one.mine.add(held(7))
    assert not one.is_filled(), "n3 may come yet"
    one.tick(MEET_S)
    one.sessions.piece_came(SESSION, 0)
    assert one.is_filled()
    asked = one.want_all()
    assert not one.is_filled()
    pair.deliver(N1, asked)
    assert held(0).name in one.mine
    assert one.is_filled()


def test_a_greeting_that_comes_twice_does_not_begin_the_statements_anew() -> None:
    pair = Pair()
    for t in range(3):
        pair.holds(N1, held(t))
    one, two = pair.nodes[N1], pair.nodes[N2]
    said = one.peers[N2].said
    pair.deliver(N1, one.received(SESSION, Hello(N2, "life-of-n2", "store", 2)))
    assert one.peers[N2].said == said
    pair.holds(N1, held(3))
    assert two.peers[N1].seq == one.peers[N2].said
    assert two.peers[N1].holds.root == one.mine.root


def _pushed(effects: list[Effect]) -> list[str]:
    return [wanted.held.name for effect in effects if isinstance(effect, SendFiles) for wanted in effect.files]


def test_what_is_small_and_written_here_goes_unasked_ahead_of_the_statement() -> None:
    pair = Pair()
    one, two = pair.nodes[N1], pair.nodes[N2]
    effects = one.holds([held(0)])
    assert [type(effect) for effect in effects] == [SendFiles, Send]
    pair.deliver(N1, effects)
    assert pair.has(N2) == [held(0)]
    assert not any(isinstance(message, Want) for message in pair.sent)
    assert one.peers[N2].pushed == {}, "it said that it holds it"
    assert _pushed(one.holds([held(1, size_bytes=PUSH_FILE_BYTES + 1)])) == []
    merged = FileVersion(FileName.of_layer(LayerId(TraceId("s", "f", Shard(0)), Description(pack(2), pack(4)))), "m", 1)
    assert _pushed(one.holds([merged])) == [], "nodes merge for themselves"
    one.state.optional = frozenset({"lazy"})
    assert _pushed(one.holds([held(0, stage="lazy")])) == []
    two.holds([held(9)])
    pair.deliver(N2, two.tick(HEARTBEAT_S + 0.1))
    assert _pushed(one.holds([held(9)])) == [], "it has it already"


def test_what_came_from_a_peer_goes_unasked_to_nobody() -> None:
    pair = Pair()
    one = pair.nodes[N1]
    one.received(SESSION, Change(one.peers[N2].seq + 1, (held(0),)))
    assert _pushed(one.holds([held(0)])) == []


def test_what_is_not_wanted_is_not_taken() -> None:
    pair = Pair()
    two = pair.nodes[N2]
    two.holds([held(0)])
    assert not two.planner.accepts(SESSION, held(0)), "it is here"
    assert not two.planner.accepts(SESSION, held(0, digest="other")), "and is not replaced"
    assert not two.planner.accepts(SESSION, held(1, size_bytes=PUSH_FILE_BYTES + 1))
    assert not two.planner.accepts(SessionId(7), held(1)), "nobody is known there"
    two.unwanted([held(2).name])
    assert not two.planner.accepts(SESSION, held(2))
    merged = FileVersion(FileName.of_layer(LayerId(TraceId("s", "f", Shard(0)), Description(pack(3), pack(6)))), "m", 1)
    two.holds([merged])
    assert not two.planner.accepts(SESSION, held(4)), "a merged layer stands for it"
    assert two.planner.accepts(SESSION, held(6))
    assert two.planner.accepts(SESSION, held(6)), "its next piece"
    assert not two.planner.accepts(SESSION, held(6, digest="other"))
    two.fetch_failed(held(6).name)
    assert not two.planner.accepts(SESSION, held(6)), "it was no good: it is asked for later"
    two.release(held(8).name.place, Time(0), pack(20))
    assert not two.planner.accepts(SESSION, held(8))


def test_a_peer_that_is_slow_to_take_what_it_did_not_ask_for_has_to_ask() -> None:
    pair = Pair()
    one = pair.nodes[N1]
    many = [held(t, size_bytes=PUSH_FILE_BYTES) for t in range(PUSH_BYTES // PUSH_FILE_BYTES + 3)]
    assert len(_pushed(one.holds(many))) == PUSH_BYTES // PUSH_FILE_BYTES
    assert _pushed(one.holds([held(100)])) == []
    one.received(SESSION, Change(one.peers[N2].seq + 1, (many[0],)))
    assert _pushed(one.holds([held(101)])) == [held(101).name]
    now_s = 0.0
    for _ in range(12):  # it lives, and says no more
        now_s += HEARTBEAT_S
        one.tick(now_s)
        one.received(SESSION, Heartbeat(one.peers[N2].seq, one.peers[N2].holds.root, ()))
    assert _pushed(one.holds([held(102)])) == []
    for _ in range(int(PUSH_PAUSE_S / HEARTBEAT_S) + 2):
        now_s += HEARTBEAT_S
        one.tick(now_s)
        one.received(SESSION, Heartbeat(one.peers[N2].seq, one.peers[N2].holds.root, ()))
    assert _pushed(one.holds([held(103)])) == [held(103).name]


def test_files_go_unasked_to_those_who_keep_them() -> None:
    ids = [NodeId(name) for name in ("n0", "n1", "n2", "n3")]
    one = Replica(ids[0], "life", "store", ids, replicas=2)
    for n, other in enumerate(ids[1:]):
        one.connected(SessionId(n))
        one.received(SessionId(n), Hello(other, f"life-of-{other}", "store", 2))
    stages = [f"s{i}" for i in range(20)]
    for stage in stages:
        name = held(0, stage=stage).name
        sent = [
            one.state.by_session[e.session].node for e in one.holds([held(0, stage=stage)]) if isinstance(e, SendFiles)
        ]
        assert sent == [node for node in ids[1:] if node in replica_set(name.place, ids, 2)]
    assert _pushed(one.holds([manifest(0, 9)])) == [], "nodes archive for themselves"
    to_all = [e for e in one.holds([manifest(0)]) if isinstance(e, SendFiles)]
    assert len(to_all) == 3
