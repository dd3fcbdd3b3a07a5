"""What nodes ask each other for: two replicas of the real protocol, and a network that loses nothing."""

from __future__ import annotations

from collections import deque

from nosync.lsm.layer import Description, LayerId, Shard, TraceId
from nosync.replication.inventory import Held, NodeId, name_of
from nosync.replication.protocol import RETRY_AFTER_S, UNWANTED_S, Close, Effect, Replica, Send, SessionId

N1, N2 = NodeId("n1"), NodeId("n2")
SESSION = SessionId(0)


def held(t: int, digest: str = "d") -> Held:
    return Held(name_of(LayerId(TraceId("s", "f", Shard(0)), Description.of_epoch(t))), f"{digest}{t}", 1)


class Pair:
    """Two nodes with one session. Every message arrives at once, and every file that was asked for."""

    def __init__(self) -> None:
        self.nodes = {n: Replica(n, f"life-of-{n}", "store", (N1, N2), replicas=2) for n in (N1, N2)}
        self.closed: list[str] = []
        self.now_s = 0.0
        self.connect()

    def connect(self) -> None:
        self._deliver([(node, hello) for node in (N1, N2) for hello in self.nodes[node].connected(SESSION)])

    def deliver(self, sender: NodeId, effects: list[Effect]) -> None:
        self._deliver([(sender, effect) for effect in effects])

    def _deliver(self, sent: list[tuple[NodeId, Effect]]) -> None:
        """In the order in which they were sent, until all is quiet."""
        waiting = deque(sent)
        while waiting:
            sender, effect = waiting.popleft()
            receiver = N2 if sender == N1 else N1
            if isinstance(effect, Send):
                answers = self.nodes[receiver].received(effect.session, effect.message)
            elif isinstance(effect, Close):
                self.closed.append(effect.reason)
                continue
            else:
                answers = self.nodes[receiver].holds(effect.files)
            waiting.extend((receiver, answer) for answer in answers)

    def holds(self, node: NodeId, *added: Held, gone: tuple[str, ...] = ()) -> None:
        self.deliver(node, self.nodes[node].holds(added, gone))

    def pass_s(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += 0.2
            for node in (N1, N2):
                self.deliver(node, self.nodes[node].tick(self.now_s))

    def drop(self, node: NodeId, *names: str) -> None:
        """A branch was deleted."""
        self.nodes[node].unwanted(names)
        self.holds(node, gone=names)

    def has(self, node: NodeId) -> list[Held]:
        return list(self.nodes[node].mine)


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
    assert n2.expects(SESSION, held(0).name) == held(0)
    n2.holds([], [held(0).name])  # it came, and was not kept: another file stood there, and is in quarantine now
    assert n2.expects(SESSION, held(0).name) is None
    pair.pass_s(2 * RETRY_AFTER_S)
    assert pair.has(N2) == [held(0)]


def test_a_conflict_is_told_of_until_one_of_the_two_is_gone() -> None:
    pair = Pair()
    for node in (N1, N2):  # each computed it for itself, before they met
        pair.nodes[node].disconnected(SESSION)
        pair.nodes[node].holds([held(0, digest=node)])
    pair.connect()
    assert pair.nodes[N1].conflicts() == {held(0).name: (N2, "n10", "n20")}
    assert pair.nodes[N2].conflicts() == {held(0).name: (N1, "n20", "n10")}
    assert pair.nodes[N1].copies(held(0).name, "n10") == 1
    pair.holds(N2, gone=(held(0).name,))
    assert pair.nodes[N1].conflicts() == pair.nodes[N2].conflicts() == {}
    assert pair.has(N2) == [held(0, digest="n1")]


def test_the_conflicts_of_a_node_go_with_it() -> None:
    pair = Pair()
    for node in (N1, N2):
        pair.nodes[node].disconnected(SESSION)
        pair.nodes[node].holds([held(0, digest=node)])
    pair.connect()
    assert pair.nodes[N1].conflicts()
    pair.nodes[N1].remove_member(N2)
    assert pair.nodes[N1].conflicts() == {}


def test_a_copied_directory_is_told_what_to_do() -> None:
    pair = Pair()
    copy = Replica(N2, "life-of-n1", "store", (N1, N2), replicas=2)
    pair.nodes[N1].disconnected(SESSION)
    pair.nodes[N2] = copy
    pair.connect()
    assert any("Empty one of the two directories" in reason for reason in pair.closed)
