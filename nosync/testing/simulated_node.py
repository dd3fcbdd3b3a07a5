"""One node of the simulation: its disk, its links, and the world around it, which may do anything to them."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from blake3 import blake3

from nosync.lsm.manifests.manifest import MAIN_TIMELINE
from nosync.lsm.model.layer import Description, LayerId, Shard, TraceId
from nosync.lsm.model.timestamp import Epoch, Time, epoch_of
from nosync.replication.protocol.file_names import FileName, FileVersion
from nosync.replication.protocol.inventory import Inventory
from nosync.replication.protocol.messages import Close, Effect, Message, Send, SendFiles, SessionId
from nosync.replication.protocol.placement import NodeId
from nosync.replication.protocol.replica import Replica

SHARDS = 2
EPOCHS = 8
ARCHIVED_EPOCHS = (2, 4)
FAULTS_UNTIL_S = 20.0
LATENCY_S = 0.02
STORE = "sim"


@dataclass(frozen=True)
class Data:
    """A file on the wire."""

    held: FileVersion
    contents: str


def contents_of(name: FileName) -> str:
    """Returns what a file of this name holds: stages are functional, so every node computes the same."""
    return f"contents of {name}"


def digest_of(contents: str) -> str:
    return blake3(contents.encode()).hexdigest()


def manifest_at(t: int) -> FileName:
    """Returns the name of an epoch's manifest."""
    return FileName(f"manifests/main/{t}.json")


def layers_at(t: int) -> list[FileName]:
    """Returns the layers that manifest `t` lists."""
    traces = [TraceId("s", "f" * 8, Shard(i, SHARDS)) for i in range(SHARDS)]
    return [FileName.of_layer(LayerId(trace, Description.of_epoch(t))) for trace in traces]


def stands(inventory: Inventory, name: FileName) -> bool:
    """Returns whether every epoch of a layer is in some layer, and a manifest in some archive; another file is there by
    name. This is found out in a slow way of its own.
    """
    id = name.layer
    if id is None or name in inventory:
        directory, _, last = name.rpartition("/")
        spans = [
            held.name.rpartition("/")[2].removesuffix(".json").split("-") for held in inventory if "-" in held.name
        ]
        archived = [span for span in spans if len(span) == 2 and directory == "manifests/main"]
        number = last.removesuffix(".json")
        return name in inventory or any(
            int(low) <= int(number) <= int(high) for low, high in archived if number.isdigit()
        )
    of_trace = inventory.layers(name.place)
    d = id.description
    epochs = range(epoch_of(d.lower), epoch_of(Time(d.upper - 1)) + 1)
    return all(any(epoch_of(o.lower) <= e <= epoch_of(Time(o.upper - 1)) for o in of_trace) for e in epochs)


class World:
    """Holds what all nodes share: the time, the network, what happens next, and the chance of faults, from one seed."""

    def __init__(self, seed: int, replica_class: type[Replica]) -> None:
        self.seed, self.replica_class = seed, replica_class
        self.random = np.random.default_rng(seed)
        self.now_s = 0.0
        self.ids = [NodeId(f"n{i}") for i in range(3)]
        self.replicas = 2 + int(self.random.integers(2))
        self.links: dict[SessionId, Link] = {}
        self.was_durable: set[tuple[str, str, str, str]] = set()
        self.apart: set[frozenset[NodeId]] = set()
        """The nodes that do not reach each other."""
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.numbers = itertools.count()

    def after(self, delay_s: float, do: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (self.now_s + delay_s, next(self.numbers), do))

    def chance(self, share: float, *, faults: bool) -> bool:
        """Returns whether something happens; faults only as long as there are any."""
        return bool(self.random.random() < share) and not (faults and self.now_s > FAULTS_UNTIL_S)

    def parted(self, a: SimNode, b: SimNode) -> bool:
        return frozenset((a.id, b.id)) in self.apart and self.now_s <= FAULTS_UNTIL_S


@dataclass
class Link:
    """One session between two nodes, over a network that may do anything to single messages."""

    world: World
    session: SessionId
    ends: tuple[SimNode, SimNode]
    is_open: bool = True

    def send(self, sender: SimNode, message: Message | Data) -> None:
        world = self.world
        target = self.ends[1] if sender is self.ends[0] else self.ends[0]
        copies = 2 if world.chance(0.03, faults=True) else 1
        for _ in range(copies):
            if world.chance(0.03, faults=True) or world.parted(*self.ends):
                continue
            sent = message
            if isinstance(sent, Data) and world.chance(0.03, faults=True):
                sent = Data(sent.held, sent.contents + "?")
            delay_s = world.random.exponential(LATENCY_S) + (
                world.random.uniform(0, 1) if world.chance(0.05, faults=True) else 0
            )
            world.after(delay_s, lambda sent=sent: self.deliver(target, sent))  # type: ignore[misc]

    def deliver(self, target: SimNode, message: Message | Data) -> None:
        # A message that is under way when a session ends may still come.
        if not self.world.parted(*self.ends):
            target.receive(self.session, message)

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            for end in self.ends:
                if end.replica is not None:
                    end.act(end.replica.disconnected(self.session))


@dataclass
class SimNode:
    """One node: its disk, and the protocol while it runs."""

    world: World
    id: NodeId
    incarnation: str
    durable: dict[FileName, str] = field(default_factory=dict)
    volatile: dict[FileName, str] = field(default_factory=dict)
    rotten: set[FileName] = field(default_factory=set)
    replica: Replica | None = None
    safe: int = -1

    def start(self) -> None:
        world = self.world
        self.replica = world.replica_class(self.id, self.incarnation, STORE, world.ids, world.replicas, world.now_s)
        # What the catalog says of each; flipped bits are found by whoever reads them.
        self.act(self.replica.holds(FileVersion(n, digest_of(contents_of(n))) for n in sorted(self.durable)))

    # --- disk -------------------------------------------------------------------------------------------------------

    def publish(self, name: FileName, contents: str) -> None:
        """Makes a file visible. A crash loses it until it is synced."""
        if name not in self.durable:
            self.volatile[name] = contents
        self.world.after(self.world.random.uniform(0.005, 0.3), lambda: self.sync(name))

    def sync(self, name: FileName) -> None:
        """The node makes a file durable, after reading it back; that may fail, and is then tried again."""
        if self.replica is None or name not in self.volatile:
            return
        if self.world.chance(0.05, faults=True):
            self.world.after(0.5, lambda: self.sync(name))
            return
        contents = self.volatile.pop(name)
        if contents != contents_of(name):
            self.act(self.replica.fetch_failed(name))
            return
        self.keep(name, contents)

    def keep(self, name: FileName, contents: str) -> None:
        assert self.replica is not None, "only while it runs"
        self.durable[name] = contents
        self.world.was_durable.add((self.id, self.incarnation, name, digest_of(contents)))
        self.act(self.replica.holds([FileVersion(name, digest_of(contents))]))

    def drop(self, names: list[FileName]) -> None:
        assert self.replica is not None, "only while it runs"
        for name in names:
            self.durable.pop(name, None)
            self.rotten.discard(name)
        self.act(self.replica.holds([], names))

    def merge(self) -> None:
        """Merges a random run of durable, sealed layers that meet."""
        if self.replica is None:
            return
        traces = self.replica.mine.traces()
        if not traces:
            return
        layers = self.replica.mine.layers(traces[int(self.world.random.integers(len(traces)))])
        mine = self.replica.mine
        sealed = [d for d in sorted(layers) if stands(mine, manifest_at(epoch_of(Time(d.upper - 1))))]
        starts = [i for i, d in enumerate(sealed[1:]) if sealed[i].upper == d.lower]
        if not starts:
            return
        first = starts[int(self.world.random.integers(len(starts)))]
        run = [sealed[first]]
        for d in sealed[first + 1 :]:
            if d.lower != run[-1].upper or len(run) > 1 + self.world.random.integers(3):
                break
            run.append(d)
        inputs = [layers[d] for d in run]
        if any(name in self.rotten for name in inputs):
            self.drop([name for name in inputs if name in self.rotten])  # a merge verifies what it reads
            return
        id = inputs[0].layer
        assert id is not None, "they are layers"
        merged = FileName.of_layer(LayerId(id.trace, Description(run[0].lower, run[-1].upper)))
        if merged not in inputs:
            self.keep(merged, contents_of(merged))
            self.drop(inputs)

    def archive(self) -> None:
        """Puts manifests of a random group of safe epochs into one file."""
        size = ARCHIVED_EPOCHS[int(self.world.random.integers(len(ARCHIVED_EPOCHS)))]
        first = size * int(self.world.random.integers(EPOCHS // size))
        group = [manifest_at(t) for t in range(first, first + size)]
        if self.replica is None or first + size - 1 > self.safe or any(n not in self.durable for n in group):
            return
        if any(name in self.rotten for name in group):
            self.drop([name for name in group if name in self.rotten])  # who reads them notices
            return
        name = FileName(f"manifests/main/{first}-{first + size - 1}.json")
        self.keep(name, contents_of(name))
        self.drop(group)

    def scrub(self) -> None:
        if self.replica is not None:
            self.drop(sorted(self.rotten))

    # --- protocol ---------------------------------------------------------------------------------------------------

    def act(self, effects: list[Effect]) -> None:
        for effect in effects:
            link = self.world.links.get(effect.session)
            if link is None or not link.is_open:
                continue
            if isinstance(effect, Send):
                link.send(self, effect.message)
            elif isinstance(effect, SendFiles):
                for held in (request.held for request in effect.files):
                    if held.name in self.durable:
                        link.send(self, Data(held, self.durable[held.name]))
            else:
                assert isinstance(effect, Close), "there are three effects"
                link.close()

    def receive(self, session: SessionId, message: Message | Data) -> None:
        if self.replica is None:
            return
        if not isinstance(message, Data):
            self.act(self.replica.received(session, message))
            return
        name = message.held.name
        if not self.replica.planner.accepts(session, message.held):
            return
        if self.is_whole(message):
            self.publish(name, message.contents)
        else:
            self.act(self.replica.fetch_failed(name))

    def is_whole(self, data: Data) -> bool:
        return digest_of(data.contents) == data.held.digest

    # --- the safe point ---------------------------------------------------------------------------------------------

    def claim(self) -> int:
        """Returns the largest epoch up to which everything, the manifests too, has enough copies; it is remembered."""
        assert self.replica is not None, "only while it runs"
        while self.is_safe(self.safe + 1):
            self.safe += 1
        if self.safe >= 0:
            self.replica.state.safe = {MAIN_TIMELINE: Epoch(self.safe)}
        return self.safe

    def is_safe(self, t: int) -> bool:
        assert self.replica is not None, "only while it runs"
        names = [manifest_at(t), *layers_at(t)]
        return all(self.replica.copies.of(n, digest_of(contents_of(n))) >= self.world.replicas for n in names)
