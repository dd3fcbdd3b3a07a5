"""What a node is to fetch from each peer, after any course of events, against its definition: all nodes ranked for each
file.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from nosync.lsm.model.layer import Description, LayerId, Shard, TraceId
from nosync.lsm.model.timestamp import pack
from nosync.replication.protocol.fetch_planner import KEEP_S
from nosync.replication.protocol.file_names import FileName, FileVersion
from nosync.replication.protocol.inventory import Inventory, missing
from nosync.replication.protocol.messages import Change, Effect, Have, Hello, Send, SessionId, Summary, Want
from nosync.replication.protocol.peer import SMALLEST_WINDOW_BYTES
from nosync.replication.protocol.placement import NodeId, replica_set
from nosync.replication.protocol.replica import Replica

ME, *OTHERS = (NodeId(f"n{i}") for i in range(5))
REPLICAS = 2
TRACES = [TraceId(stage, "f", Shard(0)) for stage in "abcdef"]
DIRECTORIES = [str(trace.directory) for trace in TRACES]


def layer(trace: TraceId, first: int, epochs: int) -> FileName:
    lower, end = pack(first), pack(first + epochs)
    d = Description.of_epoch(first) if epochs == 1 else Description(lower, end, lower)
    return FileName.of_layer(LayerId(trace, d))


class OneNode:
    """One node of the real protocol. What its peers say is made up here, and so is all that happens to it, from a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.one = Replica(ME, "life", "s", [ME, *OTHERS], REPLICAS)
        self.theirs: dict[NodeId, Inventory] = {node: Inventory() for node in OTHERS}
        self.lives = dict.fromkeys(OTHERS, 0)
        self.sessions = 0
        for node in OTHERS:
            self.comes(node)
            self.has_more(node)

    def some_files(self) -> list[FileVersion]:
        found = {}
        for _ in range(self.random.randint(1, 6)):
            first, epochs = self.random.randint(0, 6), self.random.randint(1, 3)
            is_layer = self.random.random() < 0.85
            manifest = FileName(f"manifests/main/{first}.json")
            name = layer(self.random.choice(TRACES), first, epochs) if is_layer else manifest
            found[name] = FileVersion(name, f"{self.random.choice('dddddx')} {name}", SMALLEST_WINDOW_BYTES)
        return list(found.values())

    def some_of(self, inventory: Inventory) -> list[FileName]:
        there = [held.name for held in inventory]
        return self.random.sample(there, min(len(there), self.random.randint(0, 3)))

    def tell(self, node: NodeId, added: tuple[FileVersion, ...], gone: tuple[str, ...]) -> None:
        """The next statement of a peer, if it is linked and its inventory is known."""
        peer = self.one.peers.get(node)
        if peer is not None and peer.session is not None and peer.asked_s is None:
            self.one.received(peer.session, Change(peer.seq + 1, added, gone))

    # --- what peers do ----------------------------------------------------------------------------------------------

    def greets(self, node: NodeId) -> SessionId:
        self.sessions += 1
        session = SessionId(self.sessions)
        self.one.connected(session)
        self.one.received(session, Hello(node, f"life-{self.lives[node]} of {node}", "s", REPLICAS))
        return session

    def comes(self, node: NodeId) -> None:
        session, theirs = self.greets(node), self.theirs[node]
        self.one.received(session, Summary(0, tuple(theirs.groups().items())))
        peer = self.one.peers.get(node)
        if peer is not None and peer.session == session and peer.unknown:
            groups = tuple(sorted(peer.unknown))
            files = tuple(held for group in groups for held in theirs.of_group(group))
            self.one.received(session, Have(0, groups, files))

    def comes_empty(self, node: NodeId) -> None:
        self.lives[node] += 1
        self.theirs[node] = Inventory()
        self.comes(node)

    def goes(self, node: NodeId) -> None:
        peer = self.one.peers.get(node)
        if peer is not None and peer.session is not None:
            self.one.disconnected(peer.session)

    def has_more(self, node: NodeId) -> None:
        files = self.some_files()
        for held in files:
            self.theirs[node].add(held)
        self.tell(node, tuple(files), ())

    def has_less(self, node: NodeId) -> None:
        gone = self.some_of(self.theirs[node])
        for name in gone:
            self.theirs[node].discard(name)
        self.tell(node, (), tuple(gone))

    def is_heard(self, node: NodeId) -> None:
        peer = self.one.peers.get(node)
        if peer is not None and peer.session is not None:
            self.one.sessions.piece_came(peer.session, 0)

    def joins(self, node: NodeId) -> None:
        self.one.add_member(node)

    def is_taken_out(self, node: NodeId) -> None:
        self.one.remove_member(node)

    def sends_a_file_unasked(self, node: NodeId) -> None:
        peer = self.one.peers.get(node)
        if peer is not None and peer.session is not None:
            self.one.planner.accepts(peer.session, replace(self.some_files()[0], size_bytes=1))

    # --- what this node does ----------------------------------------------------------------------------------------

    def time_passes(self) -> None:
        self.one.tick(self.one.state.now_s + self.random.choice([0.2, 0.7, 1.0]))

    def all_wait_for_long(self) -> None:
        self.one.tick(self.one.state.now_s + self.random.choice([2.0, KEEP_S + 1]))

    def a_while_passes_in_which_all_are_heard(self) -> None:
        """What tasks asked for is not kept any more after it."""
        for _ in range(int(KEEP_S) + 2):
            self.one.tick(self.one.state.now_s + 1.0)
            for node in OTHERS:
                self.is_heard(node)

    def an_event_finds_that_time_has_passed(self) -> None:
        self.one.state.advance(self.one.state.now_s + self.random.choice([0.2, 1.0, 2.0]))

    def files_are_written(self) -> None:
        self.one.holds(self.some_files()[:2])

    def files_go(self) -> None:
        self.one.holds([], self.some_of(self.one.mine))

    def a_file_comes(self) -> None:
        if fetching := sorted(self.one.state.fetching):
            self.one.holds([self.one.state.fetching[self.random.choice(fetching)].held])

    def a_file_is_no_good(self) -> None:
        if fetching := sorted(self.one.state.fetching):
            self.one.fetch_failed(self.random.choice(fetching))

    def a_task_reads(self) -> None:
        self.one.keep_traces([self.random.choice(DIRECTORIES)])

    def inputs_are_released(self) -> None:
        since = pack(self.random.choice([0, 0, 3]))
        self.one.release(self.random.choice(DIRECTORIES), since, pack(self.random.randint(0, 8)))

    def an_operator_takes_files_back(self) -> None:
        conflicts = sorted(self.one.copies.conflicts().items())[:2]
        discarded = {name: ours for name, (_, ours, _) in conflicts}
        self.one.discard({**self.one.state.discarded, **discarded}, pack(self.random.randint(0, 8)))
        self.one.holds([], list(discarded))

    def a_job_wants_all(self) -> None:
        self.one.want_all()

    # --- what has to hold -------------------------------------------------------------------------------------------

    def step(self) -> str:
        """Something happens. Says what."""
        of_peers = [
            self.greets, self.comes, self.comes_empty, self.goes, self.has_more, self.has_more, self.has_less,
            self.is_heard, self.is_heard, self.joins, self.is_taken_out, self.sends_a_file_unasked,
        ]  # fmt: skip
        of_ours = [
            self.time_passes, self.time_passes, self.all_wait_for_long,
            self.a_while_passes_in_which_all_are_heard, self.an_event_finds_that_time_has_passed,
            self.files_are_written, self.files_go, self.a_file_comes, self.a_file_comes, self.a_file_is_no_good,
            self.a_task_reads, self.inputs_are_released, self.an_operator_takes_files_back,
        ]  # fmt: skip
        if self.random.random() < 0.02:
            self.a_job_wants_all()
            return "a job wants all"
        if self.random.random() < 0.5:
            do, node = self.random.choice(of_peers), self.random.choice(OTHERS)
            do(node)
            return f"{do.__name__} {node}"
        ours = self.random.choice(of_ours)
        ours()
        return ours.__name__

    def is_replica(self, name: FileName, up: list[NodeId]) -> bool:
        id = name.layer
        if id is None or name.place in self.one.state.placement.kept_until_s:
            return True
        placement = self.one.state.placement
        since, until = placement.released_since.get(name.place, 0), placement.released_until.get(name.place, 0)
        is_released = since <= id.description.lower and id.description.upper <= until
        return not is_released and (placement.keep_all or ME in replica_set(name.place, up, REPLICAS))

    def check(self) -> None:
        """What is to be fetched of each peer, by its definition."""
        one = self.one
        up = [ME, *(peer.node for peer in one.peers.values() if peer.is_up(one.state.now_s))]
        for directory, trace in zip(DIRECTORIES, TRACES, strict=True):
            assert one.state.placement.is_replica(layer(trace, 99, 1)) == self.is_replica(layer(trace, 99, 1), up), (
                directory
            )
        while _asks(one.planner.fetch()):
            pass
        have = Inventory([*one.mine, *(fetch.held for fetch in one.state.fetching.values())])
        for peer in one.peers.values():
            if peer.session is None:
                continue
            wanted = [
                held
                for held in missing(have, peer.holds)
                if self.is_replica(held.name, up) and one.state.discarded.get(held.name) != held.digest
            ]
            assert sorted(held for todo in peer.todo.values() for held in todo) == sorted(wanted), peer.node
            assert peer.todo_files == len(wanted)


@pytest.mark.parametrize("first", range(0, 150, 30))
def test_what_is_to_be_fetched_is_what_it_is_by_definition(first: int) -> None:
    for seed in range(first, first + 30):
        node, course = OneNode(seed), []
        for _ in range(60):
            course.append(node.step())
            try:
                node.check()
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, after {'; '.join(course[-8:])}") from error


def _asks(effects: list[Effect]) -> bool:
    return any(isinstance(effect, Send) and isinstance(effect.message, Want) for effect in effects)
