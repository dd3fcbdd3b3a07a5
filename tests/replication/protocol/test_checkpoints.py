"""Files of kept checkpoints between nodes: on as many as are asked for, together, and where they are asked for."""

from __future__ import annotations

import random
from collections import deque

import pytest

from nosync.lsm.errors import ReplicationError
from nosync.replication.protocol.file_names import FileName, FileVersion
from nosync.replication.protocol.messages import Close, Effect, Send, SessionId
from nosync.replication.protocol.placement import NodeId, replica_set
from nosync.replication.protocol.replica import Replica
from nosync.replication.transport.codec import check_group, check_name

NODES = [NodeId(f"n{i}") for i in range(5)]


def kept(checkpoint: str, path: str, digest: str = "d", size_bytes: int = 100_000) -> FileVersion:
    return FileVersion(FileName(f"checkpoints/{checkpoint}/{path}"), digest, size_bytes)


class Network:
    """Five nodes. What is said arrives at once; what is asked for comes, and is durable then."""

    def __init__(self, replicas: int) -> None:
        self.now_s = 0.0
        self.nodes = {n: Replica(n, f"life-of-{n}", "store", NODES, replicas) for n in NODES}
        self.sessions = {
            (a, b): SessionId(min(i, j) * 10 + max(i, j)) for i, a in enumerate(NODES) for j, b in enumerate(NODES)
        }
        self.away: set[NodeId] = set()
        self.sent: deque[tuple[NodeId, Effect]] = deque()
        for a in NODES:
            for b in NODES:
                if a < b:
                    self.link(a, b)

    def link(self, a: NodeId, b: NodeId) -> None:
        session = self.sessions[a, b]
        greetings = [(a, self.nodes[a].connected(session)), (b, self.nodes[b].connected(session))]
        for node, effects in greetings:
            self.sent += [(node, effect) for effect in effects]
        self.deliver()

    def act(self, node: NodeId, effects: list[Effect]) -> None:
        self.sent += [(node, effect) for effect in effects]
        self.deliver()

    def deliver(self) -> None:
        while self.sent:
            node, effect = self.sent.popleft()
            other = next(b for b in NODES if b != node and self.sessions[node, b] == effect.session)
            if {node, other} & self.away:
                continue
            assert not isinstance(effect, Close), effect
            if isinstance(effect, Send):
                found = self.nodes[other].received(effect.session, effect.message)
                self.sent += [(other, one) for one in found]
            else:
                for request in effect.files:
                    if self.nodes[other].planner.accepts(effect.session, request.held):
                        self.sent += [(other, one) for one in self.nodes[other].holds([request.held])]

    def pass_s(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += 0.3
            for node, replica in self.nodes.items():
                if node not in self.away:
                    self.act(node, replica.tick(self.now_s))

    def holders(self, held: FileVersion) -> set[NodeId]:
        return {node for node, replica in self.nodes.items() if replica.mine.holds(held.name, held.digest)}


def test_a_checkpoint_is_together_on_as_many_nodes_as_are_asked_for() -> None:
    network = Network(replicas=2)
    files = {c: [kept(c, f"state/0/{i % 3}/{i}.delta") for i in range(9)] for c in ("words", "clicks", "words-2")}
    for n, (checkpoint, held) in enumerate(files.items()):
        writer = NODES[n]
        network.act(writer, network.nodes[writer].holds(held))
        network.pass_s(3)
        expected = {writer, *replica_set(f"checkpoints/{checkpoint}", NODES, 2)}
        assert all(network.holders(one) == expected for one in held)
        assert network.nodes[writer].copies.of_mine(held[0].name) == len(expected)
    # A later generation is where the first one is.
    later = kept("words.3", "commits/7")
    network.act(NODES[0], network.nodes[NODES[0]].holds([later]))
    network.pass_s(3)
    assert network.holders(later) == network.holders(files["words"][0])


def test_when_a_node_falls_silent_the_next_one_keeps_its_checkpoints() -> None:
    network = Network(replicas=2)
    held = [kept("words", f"commits/{i}") for i in range(20)]
    one, other = replica_set("checkpoints/words", NODES, 2)
    network.act(one, network.nodes[one].holds(held))
    network.pass_s(3)
    assert network.holders(held[0]) == {one, other}
    network.away.add(other)
    network.pass_s(5)
    assert len(network.holders(held[0]) - {other}) == 2, "the next in rank stands in"


def test_a_node_that_asks_gets_all_and_a_job_that_reads_all_does_not() -> None:
    network = Network(replicas=1)
    (keeper,) = replica_set("checkpoints/words", NODES, 1)
    asking, reading = [n for n in NODES if n != keeper][:2]
    held = [kept("words", f"state/0/0/{i}.delta") for i in range(5)]
    network.act(keeper, network.nodes[keeper].holds(held))
    network.pass_s(3)
    network.act(reading, network.nodes[reading].want_all())
    network.pass_s(3)
    assert network.holders(held[0]) == {keeper}
    assert network.nodes[asking].has_all_of("checkpoints/other")
    network.act(asking, network.nodes[asking].keep_checkpoint("checkpoints/words"))
    network.pass_s(3)
    assert all(network.holders(one) == {keeper, asking} for one in held)
    assert network.nodes[asking].has_all_of("checkpoints/words")


def test_what_is_dropped_everywhere_goes_everywhere() -> None:
    network = Network(replicas=3)
    held = [kept("words", f"commits/{i}") for i in range(10)]
    network.act(NODES[0], network.nodes[NODES[0]].holds(held))
    network.pass_s(3)
    gone = [one.name for one in held[:6]]
    nodes = list(network.holders(held[0]))
    random.Random(1).shuffle(nodes)
    for node in nodes:  # each for itself, at its own time
        network.nodes[node].unwanted(gone)
        network.act(node, network.nodes[node].holds([], gone))
        network.pass_s(2)
    assert all(not network.holders(one) for one in held[:6])
    assert all(len(network.holders(one)) >= 3 for one in held[6:])


def test_two_queries_under_one_name_are_a_conflict_that_harms_no_layer() -> None:
    network = Network(replicas=5)
    network.act(NODES[0], network.nodes[NODES[0]].holds([kept("words", "offsets/3", "a")]))
    network.away.add(NODES[1])
    network.act(NODES[1], network.nodes[NODES[1]].holds([kept("words", "offsets/3", "b")]))
    network.away.clear()
    network.pass_s(8)
    assert "checkpoints/words/offsets/3" in network.nodes[NODES[1]].copies.conflicts()
    other = FileVersion(FileName("pins/a-1.json"), "d", 10)
    network.act(NODES[0], network.nodes[NODES[0]].holds([other]))
    network.pass_s(3)
    assert network.holders(other) == set(NODES)


@pytest.mark.parametrize(
    "name",
    [
        "checkpoints/words/../../etc", "checkpoints/words/.hidden", "checkpoints/words/LOCK", "checkpoints/words",
        "checkpoints/../x/y", "checkpoints/W/x", "checkpoints/words/a\0b",
    ],
)  # fmt: skip
def test_no_other_name_becomes_a_path(name: str) -> None:
    with pytest.raises(ReplicationError, match="is not the name of a layer"):
        check_name(name)
    assert check_name("checkpoints/words.2/state/0/1/5_a-b.zip").is_opaque
    assert check_group("checkpoints/words/state/0/1/left-keyToNumValues/SSTs")
    for group in ("checkpoints/words/..", "checkpoints/words/.x", "checkpoints/words/a b"):
        with pytest.raises(ReplicationError):
            check_group(group)
