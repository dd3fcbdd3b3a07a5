"""What nodes ask each other for: two replicas of the real protocol, and a network that loses nothing."""

from __future__ import annotations

import pytest

from nosync.lsm.model.layer import Description, LayerId, Shard, TraceId
from nosync.lsm.model.timestamp import Time, pack
from nosync.replication.protocol.fetch_planner import (
    ASKED_S,
    FETCH_TIMEOUT_S,
    FEW_FILES,
    LOADED_BYTES,
    OPTIONAL_WINDOW_BYTES,
    RETRY_AFTER_S,
    WINDOW_BYTES,
)
from nosync.replication.protocol.file_names import FileName, FileVersion
from nosync.replication.protocol.messages import (
    Change,
    Effect,
    Have,
    Heartbeat,
    Hello,
    InventoryRequest,
    Message,
    Send,
    Summary,
    Want,
)
from nosync.replication.protocol.peer import HEARTBEAT_S, SMALLEST_WINDOW_BYTES
from nosync.replication.protocol.replica import UNWANTED_S, Replica
from tests.helpers.replicas import N1, N2, SESSION, Pair, held, manifest


def test_what_one_has_the_other_gets() -> None:
    pair = Pair()
    pair.holds(N1, held(0))
    pair.holds(N2, held(1))
    assert pair.has(N1) == pair.has(N2) == [held(0), held(1)]
    assert pair.closed == []


def test_what_was_dropped_does_not_come_back_and_made_again_it_does() -> None:
    """A branch that is deleted and made again with the same code has layers of the same names."""
    pair = Pair()
    pair.holds(N1, held(0))
    pair.drop(N1, held(0).name)
    pair.pass_s(3 * UNWANTED_S)
    assert pair.has(N1) == [], "n2 still holds it"
    assert pair.has(N2) == [held(0)]
    pair.drop(N2, held(0).name)
    pair.holds(N2, held(0))
    assert pair.has(N1) == [held(0)], "it is another one"


def test_made_again_at_once_it_reaches_who_held_it_too() -> None:
    pair = Pair()
    pair.holds(N1, held(0))
    pair.drop(N1, held(0).name)
    pair.drop(N2, held(0).name)
    pair.holds(N1, held(0))
    pair.pass_s(UNWANTED_S + 1)
    assert pair.has(N2) == [held(0)]


def test_what_stood_in_the_place_of_a_file_that_came_and_was_no_good_is_fetched_again() -> None:
    pair = Pair()
    n2 = pair.nodes[N2]
    [asked] = [e for e in pair.nodes[N1].holds([held(0)]) if isinstance(e, Send)]
    n2.received(SESSION, asked.message)
    assert n2.planner.accepts(SESSION, held(0))
    n2.holds([], [held(0).name])  # it came, and was not kept: another file stood there, and is in quarantine now
    assert not n2.planner.accepts(SESSION, held(0))
    pair.pass_s(2 * RETRY_AFTER_S)
    assert pair.has(N2) == [held(0)]


def test_a_conflict_is_told_of_until_one_of_the_two_is_gone() -> None:
    pair = Pair()
    for node in (N1, N2):  # each computed it for itself, before they met
        pair.nodes[node].disconnected(SESSION)
        pair.nodes[node].holds([held(0, digest=node)])
    pair.connect()
    assert pair.nodes[N1].copies.conflicts() == {held(0).name: (N2, "n10", "n20")}
    assert pair.nodes[N2].copies.conflicts() == {held(0).name: (N1, "n20", "n10")}
    assert pair.nodes[N1].copies.of(held(0).name, "n10") == 1
    pair.holds(N2, gone=(held(0).name,))
    assert pair.nodes[N1].copies.conflicts() == pair.nodes[N2].copies.conflicts() == {}
    assert pair.has(N2) == [held(0, digest="n1")]


def test_the_conflicts_of_a_node_go_with_it() -> None:
    pair = Pair()
    for node in (N1, N2):
        pair.nodes[node].disconnected(SESSION)
        pair.nodes[node].holds([held(0, digest=node)])
    pair.connect()
    assert pair.nodes[N1].copies.conflicts()
    pair.nodes[N1].remove_member(N2)
    assert pair.nodes[N1].copies.conflicts() == {}


def test_a_copied_directory_is_told_what_to_do() -> None:
    pair = Pair()
    copy = Replica(N2, "life-of-n1", "store", (N1, N2), replicas=2)
    pair.nodes[N1].disconnected(SESSION)
    pair.nodes[N2] = copy
    pair.connect()
    assert any("Empty one of the two directories" in reason for reason in pair.closed)


def test_under_load_what_can_be_computed_again_waits() -> None:
    """And comes when the rest has come: nothing is left out for good."""
    pair = Pair()
    slow = pair.nodes[N2]
    slow.state.optional = frozenset({"cheap"})
    part = LOADED_BYTES // 4
    files = [held(t, stage=stage, size_bytes=part) for t in range(8) for stage in ("cheap", "dear")]
    [told] = [e for e in pair.nodes[N1].holds(files) if isinstance(e, Send)]
    slow.received(SESSION, told.message)
    slow.tick(pair.now_s + HEARTBEAT_S)
    assert slow.planner.is_loaded
    assert slow.planner.backlog_bytes == 16 * part
    while slow.state.fetching:  # what it asked for before it knew does not come
        slow.fetch_failed(next(iter(slow.state.fetching)))
    slow.tick(pair.now_s + HEARTBEAT_S + 2 * RETRY_AFTER_S)
    assert {name.layer.trace.stage for name in slow.state.fetching} == {"dear"}
    while slow.state.fetching:
        slow.holds([fetch.held for fetch in slow.state.fetching.values()])
    assert [file for file in pair.has(N2) if "cheap" in file.name] == []
    pair.pass_s(20.0)
    assert len(pair.has(N2)) == 16
    assert not slow.planner.is_loaded


def test_of_what_can_be_computed_again_little_is_on_its_way() -> None:
    pair = Pair()
    pair.nodes[N2].state.optional = frozenset({"cheap"})
    files = [held(t, stage="cheap", size_bytes=OPTIONAL_WINDOW_BYTES // 4) for t in range(20)]
    [told] = [e for e in pair.nodes[N1].holds(files) if isinstance(e, Send)]
    pair.nodes[N2].received(SESSION, told.message)
    assert len(pair.nodes[N2].state.fetching) == 4
    huge = held(0, stage="cheap", size_bytes=10 * OPTIONAL_WINDOW_BYTES)
    other = Pair()
    other.nodes[N2].state.optional = frozenset({"cheap"})
    other.holds(N1, huge)
    assert other.has(N2) == [huge], "one that is larger than the window comes alone"


def test_a_small_backlog_leaves_nothing_out() -> None:
    pair = Pair()
    pair.nodes[N2].state.optional = frozenset({"cheap"})
    pair.holds(N1, held(0, stage="cheap"), held(0))
    pair.pass_s(1.0)
    assert len(pair.has(N2)) == 2


def test_a_slow_file_is_waited_for_as_long_as_pieces_come() -> None:
    pair = Pair()
    slow = pair.nodes[N2]
    [told] = [e for e in pair.nodes[N1].holds([held(0, size_bytes=WINDOW_BYTES)]) if isinstance(e, Send)]
    slow.received(SESSION, told.message)
    assert isinstance(told.message, Change)

    def wanted_again(until_s: float, *, pieces: bool) -> int:
        found = 0
        while pair.now_s < until_s:
            pair.now_s += 1.0
            if pieces:
                slow.sessions.piece_came(SESSION, 1000)
            slow.received(SESSION, Heartbeat(told.message.seq, pair.nodes[N1].mine.root))
            found += sum(isinstance(e, Send) and isinstance(e.message, Want) for e in slow.tick(pair.now_s))
        return found

    assert wanted_again(3 * FETCH_TIMEOUT_S, pieces=True) == 0
    assert wanted_again(4 * FETCH_TIMEOUT_S + 5, pieces=False) == 1


def test_more_is_asked_for_where_more_comes() -> None:
    pair = Pair()
    receiver = pair.nodes[N2]
    part = SMALLEST_WINDOW_BYTES // 4
    files = [held(t, size_bytes=part) for t in range(60)]
    [told] = [e for e in pair.nodes[N1].holds(files) if isinstance(e, Send)]
    receiver.received(SESSION, told.message)
    assert len(receiver.state.fetching) == 4
    for i in range(1, 8):
        receiver.sessions.piece_came(SESSION, WINDOW_BYTES)
        receiver.tick(i * HEARTBEAT_S)
    assert len(receiver.state.fetching) == 60


def epoch(t: int) -> FileVersion:
    return FileVersion(FileName(f"manifests/main/{t}.json"), f"e{t}")


def test_meeting_again_costs_what_changed_and_not_what_there_is() -> None:
    pair = Pair()
    pair.holds(N1, *(epoch(t) for t in range(10_000)), *(held(t) for t in range(3)))
    assert pair.nodes[N2].mine.root == pair.nodes[N1].mine.root
    for node in (N1, N2):
        pair.nodes[node].disconnected(SESSION)
    pair.holds(N1, epoch(10_000), gone=(epoch(7).name,))
    pair.sent.clear()
    pair.connect()
    named = [one for message in pair.sent if isinstance(message, Have) for one in message.held]
    groups = [message.groups for message in pair.sent if isinstance(message, Summary)]
    assert [len(of) for of in groups] == [12, 11], "ten thousand epochs, one more, and a trace"
    assert len(named) <= 1 + 999 + 1000, "the one that came, and on either side the thousand from which one went"
    assert pair.nodes[N1].peers[N2].holds.root == pair.nodes[N2].mine.root
    assert pair.nodes[N2].peers[N1].holds.root == pair.nodes[N1].mine.root
    assert epoch(10_000).name in pair.nodes[N2].mine

    for node in (N1, N2):  # what both know stays known
        pair.nodes[node].disconnected(SESSION)
    pair.sent.clear()
    pair.connect()
    assert not [message for message in pair.sent if isinstance(message, Have)]


def test_what_changes_while_groups_are_asked_for_is_not_lost() -> None:
    """The names of a group come after changes to it and to others."""
    one = Replica(N1, "a", "store", (N1, N2), replicas=2)
    other = Replica(N2, "b", "store", (N1, N2), replicas=2)
    other.holds([epoch(0), held(0)])
    of_one, of_other = _message(one.connected(SESSION)), _message(other.connected(SESSION))
    assert one.received(SESSION, of_other) == [Send(SESSION, InventoryRequest())]
    other.received(SESSION, of_one)
    asked = _message(one.received(SESSION, _message(other.received(SESSION, InventoryRequest()))))
    assert isinstance(asked, InventoryRequest)
    assert set(asked.groups) == {"manifests/main/0", "layers/s/f/0"}
    for change in (other.holds([epoch(1)]), other.holds([epoch(1_000)]), other.holds([], [epoch(0).name])):
        one.received(SESSION, _message(change))
    one.received(SESSION, _message(other.received(SESSION, asked)))
    assert one.peers[N2].holds.root == other.mine.root
    assert [held.name for held in one.peers[N2].holds] == [held(0).name, epoch(1).name, epoch(1_000).name]


def _message(effects: list[Effect]) -> Message:
    return next(effect.message for effect in effects if isinstance(effect, Send))


def test_an_archive_stands_for_its_manifests() -> None:
    pair = Pair()
    one, two = pair.nodes[N1], pair.nodes[N2]
    pair.deliver(N1, one.holds([manifest(t) for t in range(6)]))
    pair.sent.clear()
    pair.deliver(N1, one.holds([manifest(0, 3)], [manifest(t).name for t in range(4)]))
    assert manifest(0, 3).name in two.mine, "a peer fetches it, or makes it by itself"
    pair.deliver(N2, two.holds([], [manifest(t).name for t in range(4)]))
    assert {held.name for held in two.mine} == {held.name for held in one.mine}
    assert [one.copies.of_mine(manifest(t).name) for t in (0, 3, 4, 5, 6)] == [2, 2, 2, 2, 0]
    asked = [message for message in pair.sent if isinstance(message, Want)]
    assert [wanted.held for want in asked for wanted in want.files] == [manifest(0, 3)]


def test_manifests_that_an_archive_stands_for_are_not_fetched_and_not_waited_for() -> None:
    pair = Pair()
    one, two = pair.nodes[N1], pair.nodes[N2]
    pair.deliver(N1, one.holds([manifest(0, 3)]))
    pair.sent.clear()
    pair.deliver(N2, two.holds([manifest(t) for t in range(6)]))
    assert manifest(4).name in one.mine
    assert manifest(2).name not in one.mine
    assert one.is_filled()
    assert one.copies.lag()[N2] == (0, 0)
    assert [one.copies.of_mine(manifest(t).name) for t in (2, 4)] == [2, 2]


def test_what_comes_first_of_an_archive_and_its_manifests_is_enough() -> None:
    """What was being fetched one by one is not waited for any more when an archive of it is there."""
    pair = Pair()
    one = pair.nodes[N1]
    pair.nodes[N2].mine.add(manifest(0, 3))
    one.received(SESSION, Change(one.peers[N2].seq + 1, tuple(manifest(t) for t in range(4)), ()))
    assert not one.is_filled()
    for t in range(4):
        one.fetch_failed(manifest(t).name)
    one.holds([manifest(0, 3)])
    assert one.is_filled()


def test_when_an_archive_is_lost_its_manifests_are_looked_for_again() -> None:
    pair = Pair()
    one, two = pair.nodes[N1], pair.nodes[N2]
    pair.deliver(N1, one.holds([manifest(0, 3)]))
    pair.deliver(N2, two.holds([manifest(t) for t in range(4)], [manifest(0, 3).name]))
    assert manifest(2).name not in one.mine
    one.unwanted([manifest(0, 3).name])
    pair.deliver(N1, one.holds([], [manifest(0, 3).name]))
    assert [manifest(t).name in one.mine for t in range(4)] == [True] * 4


def layer(first: int, end: int, digest: str = "d", stage: str = "s") -> FileVersion:
    """Epochs `first` to `end - 1`, merged where these are several."""
    d = Description(pack(first), pack(end), pack(first) if end > first + 1 else Time(0))
    return FileVersion(FileName.of_layer(LayerId(TraceId(stage, "f", Shard(0)), d)), f"{digest}{first}-{end}", 1)


def sealed(t: int, digest: str) -> FileVersion:
    return FileVersion(FileName(f"manifests/main/{t}.json"), f"{digest}{t}", 1)


def test_nothing_of_another_history_is_fetched_or_counted() -> None:
    """Each went on alone from epoch 2; the second merged what it had."""
    pair = Pair()
    for t in range(2):
        pair.holds(N1, layer(t, t + 1), sealed(t, "d"))
    for node in (N1, N2):
        pair.deliver(node, pair.nodes[node].disconnected(SESSION))
    pair.nodes[N1].holds([layer(2, 3), sealed(2, "d"), FileVersion(FileName("branches/1.json"), "d", 1)])
    theirs = [
        sealed(2, "x"),
        sealed(3, "x"),
        FileVersion(FileName("branches/1.json"), "x", 1),
        FileVersion(FileName("branches/2.json"), "x", 1),
    ]
    pair.nodes[N2].holds([layer(0, 5, "x"), layer(5, 6, "x"), *theirs], [layer(t, t + 1).name for t in range(2)])
    before = {node: pair.has(node) for node in (N1, N2)}
    pair.connect()
    pair.pass_s(5.0)
    assert {node: pair.has(node) for node in (N1, N2)} == before
    assert sorted(pair.nodes[N1].copies.conflicts()) == ["branches/1.json", "manifests/main/2.json"]
    assert pair.nodes[N1].copies.of(layer(2, 3).name, layer(2, 3).digest) == 1
    assert pair.nodes[N2].copies.of(layer(5, 6, "x").name, "x5-6") == 1
    pin = FileVersion(FileName("pins/p-1.json"), "p", 1)
    pair.holds(N2, pin)
    assert pin in pair.has(N1), "what is of no history goes on"
    pair.holds(
        N2, gone=tuple(held.name for held in before[N2] if held.name not in (sealed(0, "d").name, sealed(1, "d").name))
    )
    assert pair.has(N1) == pair.has(N2), "once it discarded its own, it gets what counts"


def test_what_a_task_asks_for_comes_also_where_it_was_released() -> None:
    pair = Pair()
    one, two = pair.nodes[N1], pair.nodes[N2]
    pair.holds(N1, held(0))
    two.release(held(0).name.place, Time(0), pack(5))
    pair.drop(N2, held(0).name)
    pair.pass_s(UNWANTED_S + 5)
    assert held(0).name not in two.mine
    pair.deliver(N2, two.keep_traces([held(0).name.place]))
    assert held(0).name in two.mine
    assert held(0).name in one.mine


def test_after_a_partition_what_differs_is_put_together_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not once for each of thousands of epochs that two nodes sealed otherwise."""
    from nosync.replication.protocol import peer

    made: list[int] = []
    real = peer.Divergence
    monkeypatch.setattr(peer, "Divergence", lambda names: made.append(1) or real(names))  # type: ignore[func-returns-value]

    class Apart(Pair):
        def connect(self) -> None:
            for node, digest, epochs in ((N1, "a", 300), (N2, "b", 310)):
                self.nodes[node].holds([held(t, digest) for t in range(epochs)])
            super().connect()

    pair = Apart()
    assert len(pair.nodes[N1].copies.conflicts()) == 300
    assert 0 < len(made) < 30


def test_what_failed_once_is_not_remembered_for_ever() -> None:
    replica = Replica(N1, "life", "store", (N1, N2), replicas=2)
    for t in range(50):
        replica.fetch_failed(held(t).name)
    assert replica.planner._again_s
    replica.tick(RETRY_AFTER_S + 1)
    assert not replica.planner._again_s


def asked_for(effects: list[Effect]) -> list[FileVersion]:
    wants = [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, Want)]
    return [wanted.held for want in wants for wanted in want.files]


def arriving(replica: Replica, waiting: list[FileVersion]) -> list[FileVersion]:
    """What comes, one file after the other, in which order, when these were asked for."""
    coming = []
    while waiting:
        one = waiting.pop(0)
        coming.append(one)
        waiting += asked_for(replica.holds([one]))
    return coming


@pytest.mark.parametrize("files", [10, FEW_FILES + 10])
@pytest.mark.parametrize("asked_s", [0.0, ASKED_S + 0.1, None])
def test_what_a_task_waits_for_comes_before_what_is_copied_for_safety(files: int, asked_s: float | None) -> None:
    """A node that stands in for one that was lost copies the history of its shards meanwhile."""
    pair = Pair()
    n2 = pair.nodes[N2]
    history = [held(t, stage="history", size_bytes=SMALLEST_WINDOW_BYTES) for t in range(files)]
    larger = [held(t, stage="larger", size_bytes=2) for t in range(2)]
    newest = held(files, stage="asked")
    told = [e.message for e in pair.nodes[N1].holds([*history, *larger, newest]) if isinstance(e, Send)]
    [first, *_] = asked_for([effect for message in told for effect in n2.received(SESSION, message)])
    waiting = [first]
    n2.tick(HEARTBEAT_S)  # of many files the order stands for a while
    if asked_s is not None:
        waiting += asked_for(n2.keep_traces([larger[0].name.place, newest.name.place]))
        waiting += asked_for(n2.tick(HEARTBEAT_S + asked_s))  # a task that still waits would have asked again
    is_waited_for = asked_s == 0.0
    coming = arriving(n2, waiting)
    assert sorted(coming, key=lambda h: h.name) == sorted([*history, *larger, newest], key=lambda h: h.name)
    assert (coming.index(newest) < 5) == is_waited_for
    if is_waited_for:
        assert coming.index(newest) < coming.index(larger[1]), "the least comes first"


@pytest.mark.parametrize("files", [10, FEW_FILES + 10])
@pytest.mark.parametrize("new", [1, FEW_FILES + 1])
@pytest.mark.parametrize("knows", ["at first", "by a heartbeat", "of another timeline", "never"])
def test_what_is_not_safe_yet_comes_before_history(knows: str, files: int, new: int) -> None:
    """Else the safe point would stand still for as long as a node is filled."""
    n2 = Replica(N2, "life-of-n2", "store", (N1, N2), replicas=2)
    n2.connected(SESSION)
    n2.received(SESSION, Hello(N1, "life-of-n1", "store", 2))
    history = [held(t, stage="history", size_bytes=SMALLEST_WINDOW_BYTES) for t in range(files)]
    late = [held(t, stage="late") for t in range(files, files + new)]
    manifests = [FileVersion(FileName(f"manifests/main/{t}.json"), "m", 1) for t in (0, files)]
    everything = [*history, *late, *manifests]
    if knows == "at first":
        n2.state.safe = {"main": files - 1}
    n1 = Replica(N1, "life-of-n1", "store", (N1, N2), replicas=2)
    n1.holds(everything)
    summary = Summary(0, tuple(n1.mine.groups().items()))
    n2.received(SESSION, summary)
    first = asked_for(n2.received(SESSION, Have(0, tuple(n1.mine.groups()), tuple(everything))))
    if knows in ("by a heartbeat", "of another timeline"):
        line = "main" if knows == "by a heartbeat" else "what-if"
        n2.received(SESSION, Heartbeat(0, n1.mine.root, ((line, files - 1),)))
        n2.tick(2 * HEARTBEAT_S)
    coming = arriving(n2, list(first))
    assert sorted(coming, key=lambda h: h.name) == sorted(everything, key=lambda h: h.name)
    before = coming[: max(coming.index(one) for one in (*late, manifests[1]))]
    comes_after_history = any(one in history and one not in first for one in before)
    assert comes_after_history == (knows not in ("at first", "by a heartbeat"))
