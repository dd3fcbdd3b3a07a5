"""What replication costs a node of many: the real protocol on a simulated network that loses nothing and takes a
millisecond.

Every node writes four layers a second, each of a shard of its own, and keeps what is its to keep of the others'; an
epoch's manifest goes to all. Nodes merge for themselves. Counted are the processor time in the protocol, and the bytes
of all that nodes say to each other, without the files. What is beside each number of nodes is the smallest cluster in
the same run.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from blake3 import blake3

from bench.harness import Result
from nosync.lsm.model.layer import Description, LayerId, Shard, TraceId
from nosync.lsm.model.timestamp import pack
from nosync.replication.protocol.file_names import FileName, FileVersion
from nosync.replication.protocol.messages import Effect, Message, Send, SendFiles, SessionId
from nosync.replication.protocol.placement import NodeId
from nosync.replication.protocol.replica import Replica
from nosync.replication.transport.codec import Encoder

NODES = (3, 6, 12, 24, 48)
REPLICAS = 2
LAYERS_PER_S = 4
LAYER_BYTES = 2 << 10
MERGED = 4
"""So many layers of a size become one."""
LATENCY_S, SYNC_S, TICK_S = 0.001, 0.005, 0.6
WARM_S = MERGED
GOAL = 20


@dataclass
class Spent:
    """Holds what one node took since the count began."""

    cpu_s: float = 0.0
    said_bytes: int = 0


@dataclass
class Node:
    """One node: the protocol, with a disk that takes a while."""

    network: Network
    id: NodeId
    shards: range
    replica: Replica
    spent: Spent = field(default_factory=Spent)
    sessions: dict[SessionId, Node] = field(default_factory=dict)
    """Who is at the other end."""

    def ask(self, event: Callable[[], list[Effect]]) -> None:
        """An event of the protocol, whose time counts. Its effects do not: they are the network's."""
        began_s = time.thread_time()
        effects = event()
        self.spent.cpu_s += time.thread_time() - began_s
        for effect in effects:
            if isinstance(effect, Send):
                self.spent.said_bytes += size_of(effect.message)
                self._send(effect.session, effect.message)
            elif isinstance(effect, SendFiles):
                for request in effect.files:
                    self._send(effect.session, request.held)

    def _send(self, session: SessionId, sent: Message | FileVersion) -> None:
        target = self.sessions[session]
        self.network.after(LATENCY_S, lambda: target.receive(session, sent))

    def receive(self, session: SessionId, sent: Message | FileVersion) -> None:
        if not isinstance(sent, FileVersion):
            self.ask(lambda: self.replica.received(session, sent))
            return
        began_s = time.thread_time()
        self.replica.sessions.piece_came(session, sent.size_bytes)
        is_taken = self.replica.planner.accepts(session, sent)
        self.spent.cpu_s += time.thread_time() - began_s
        if is_taken:
            self.network.after(SYNC_S, lambda: self.keep(sent))

    def keep(self, held: FileVersion) -> None:
        """A file is durable here; layers of a size become one."""
        self.ask(lambda: self.replica.holds([held]))
        id = held.name.layer
        if id is None:
            return
        end, width = int(id.description.upper) // int(pack(1)), MERGED
        while end % width == 0:
            merged = Description(pack(end - width), pack(end))
            layers = self.replica.mine.layers(str(id.trace.directory))
            inputs = [name for d, name in layers.items() if merged.covers(d)]
            self.ask(lambda merged=merged: self.replica.holds([file_of(FileName.of_layer(LayerId(id.trace, merged)))]))  # type: ignore[misc]
            self.ask(lambda inputs=inputs: self.replica.holds([], inputs))  # type: ignore[misc]
            width *= MERGED

    def publish(self, shard: int, epoch: int) -> None:
        trace = TraceId("rows", "f" * 16, Shard(shard, self.network.shards))
        self.keep(file_of(FileName.of_layer(LayerId(trace, Description.of_epoch(epoch)))))


def file_of(name: FileName) -> FileVersion:
    return FileVersion(name, blake3(name.encode()).hexdigest(), LAYER_BYTES)


@functools.lru_cache(maxsize=1 << 12)
def size_of(message: Message) -> int:
    """Returns the size on the wire. Most goes to many peers as it is."""
    return sum(frame.ByteSize() for frame in Encoder().frames(message))


class Network:
    """Holds so many nodes, each linked with each."""

    def __init__(self, nodes: int) -> None:
        self.now_s, self.shards = 0.0, nodes * LAYERS_PER_S
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        ids = [NodeId(f"n{i:02}") for i in range(nodes)]
        self.nodes = [
            Node(self, id, range(i * LAYERS_PER_S, (i + 1) * LAYERS_PER_S), Replica(id, f"life-of-{id}", "s", ids, REPLICAS))
            for i, id in enumerate(ids)
        ]  # fmt: skip
        for number, (a, b) in enumerate(itertools.combinations(self.nodes, 2)):
            session = SessionId(number)
            a.sessions[session], b.sessions[session] = b, a
            for end in (a, b):
                end.ask(lambda end=end, session=session: end.replica.connected(session))  # type: ignore[misc]
        for i, node in enumerate(self.nodes):
            self.after(TICK_S * (1 + i / nodes), lambda node=node: self._tick(node))  # type: ignore[misc]

    def after(self, delay_s: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now_s + delay_s, next(self._numbers), do))

    def _tick(self, node: Node) -> None:
        node.ask(lambda: node.replica.tick(self.now_s))
        self.after(TICK_S, lambda: self._tick(node))

    def run(self, seconds: int, first: int = 0) -> None:
        """Runs so many epochs, one a second, from `first` on: in each a layer of every shard, and the manifest."""
        for epoch in range(first, first + seconds):
            for i, node in enumerate(self.nodes):
                for j, shard in enumerate(node.shards):
                    at_s = epoch - first + (j + i / len(self.nodes)) / LAYERS_PER_S
                    self.after(at_s, lambda node=node, shard=shard, epoch=epoch: node.publish(shard, epoch))  # type: ignore[misc]
            manifest = file_of(FileName(f"manifests/main/{epoch}.json"))
            self.after(epoch - first + 0.99, lambda manifest=manifest: self.nodes[0].keep(manifest))  # type: ignore[misc]
        end_s = self.now_s + seconds
        while self._queue[0][0] < end_s:
            self.now_s, _, do = heapq.heappop(self._queue)
            do()
        self.now_s = end_s

    def check(self, epochs: int) -> None:
        """All that was written until two seconds ago has its copies, as far as their nodes said so."""
        for node in self.nodes:
            for shard in node.shards:
                trace = TraceId("rows", "f" * 16, Shard(shard, self.shards))
                name = FileName.of_layer(LayerId(trace, Description.of_epoch(epochs - 3)))
                copies = sum(peer.holds.holds(name, file_of(name).digest) for peer in node.replica.peers.values())
                assert copies >= REPLICAS - 1, f"{name} has {copies} copies besides that of {node.id}, which wrote it"


def measured(nodes: int, seconds: int) -> Spent:
    """Returns what a node takes in a second, the median of all."""
    network = Network(nodes)
    network.run(WARM_S)
    for node in network.nodes:
        node.spent = Spent()
    network.run(seconds, WARM_S)
    network.check(WARM_S + seconds)
    cpu_s = statistics.median(node.spent.cpu_s for node in network.nodes)
    said_bytes = statistics.median(node.spent.said_bytes for node in network.nodes)
    return Spent(cpu_s / seconds, round(said_bytes / seconds))


def run(scale: str) -> Iterator[Result]:
    seconds = {"short": MERGED, "normal": 3 * MERGED, "full": 4 * MERGED**2}[scale]
    found = {nodes: measured(nodes, seconds) for nodes in NODES}
    least = found[NODES[0]]
    for nodes, spent in found.items():
        ratio = spent.cpu_s / least.cpu_s
        is_goal = nodes == NODES[-1]
        yield Result(
            f"{nodes} nodes of {LAYERS_PER_S} layers/s, copies={REPLICAS}, the protocol's CPU", "nosync, a node",
            spent.cpu_s * 1000, "ms/s", f"{NODES[0]} nodes", least.cpu_s * 1000, ratio,
            f"<= {GOAL}" if is_goal else "", ratio <= GOAL if is_goal else None, repeats=seconds,
        )  # fmt: skip
    for nodes, spent in found.items():
        yield Result(
            f"{nodes} nodes of {LAYERS_PER_S} layers/s, copies={REPLICAS}, said to peers", "nosync, a node",
            spent.said_bytes / 1000, "kB/s", f"{NODES[0]} nodes", least.said_bytes / 1000,
            spent.said_bytes / least.said_bytes, repeats=seconds,
        )  # fmt: skip
