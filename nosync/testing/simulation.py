"""A store of several nodes in one process: the real protocol, with simulated clocks, network and disks, from one seed.

The network drops, duplicates, delays and reorders messages and parts nodes; disks lose what was not synced, fail to
sync, and flip bits; nodes crash, lose their disk and come back. A job publishes epochs on one node, and goes on on
another one.

What is checked, against what really is on the simulated disks:
- *acked*: what a node believes that a peer holds was durable there, whole, under that incarnation;
- *safe*: up to a safe point that is claimed, everything has that many copies as far as acknowledgements go, the
  manifests too;
- *whole*: no node keeps contents that are not those of the name, other than where this simulation flipped bits;
- *healed*: when the faults end, every node soon holds everything, and knows that the others do.

`Cluster(seed).run()` raises SimulationError with the seed; the same seed takes the same course, whatever PYTHONHASHSEED
is.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from blake3 import blake3

from nosync.lsm.manifests.manifest import MAIN_TIMELINE
from nosync.lsm.model.layer import Description, LayerId, Shard, TraceId
from nosync.lsm.model.timestamp import Epoch, Time, epoch_of
from nosync.replication.protocol.file_names import FileName, FileVersion
from nosync.replication.protocol.inventory import Inventory, covers
from nosync.replication.protocol.messages import Close, Effect, Message, Send, SendFiles, SessionId
from nosync.replication.protocol.placement import NodeId
from nosync.replication.protocol.replica import Replica

SHARDS = 2
EPOCHS = 8
ARCHIVED_EPOCHS = (2, 4)
FAULTS_UNTIL_S, HEALED_AFTER_S = 20.0, 75.0
TICK_S = 0.2
REDIAL_S = 0.5
LATENCY_S = 0.02
STORE = "sim"


class SimulationError(AssertionError):
    """A promise was broken."""


@dataclass(frozen=True)
class Data:
    """A file on the wire."""

    held: FileVersion
    contents: str


def contents_of(name: FileName) -> str:
    """What a file of this name holds: stages are functional, so every node computes the same."""
    return f"contents of {name}"


def digest_of(contents: str) -> str:
    return blake3(contents.encode()).hexdigest()


@dataclass
class SimNode:
    """One node: its disk, and the protocol while it runs."""

    cluster: Cluster
    id: NodeId
    incarnation: str
    durable: dict[FileName, str] = field(default_factory=dict)
    volatile: dict[FileName, str] = field(default_factory=dict)
    rotten: set[FileName] = field(default_factory=set)
    replica: Replica | None = None
    safe: int = -1

    def start(self) -> None:
        c = self.cluster
        self.replica = c.replica_class(self.id, self.incarnation, STORE, c.ids, c.replicas, c.now_s)
        # What the catalog says of each; flipped bits are found by whoever reads them.
        self.act(self.replica.holds(FileVersion(n, digest_of(contents_of(n))) for n in sorted(self.durable)))

    # --- disk -------------------------------------------------------------------------------------------------------

    def publish(self, name: FileName, contents: str) -> None:
        """Visible, and lost in a crash until it is synced."""
        if name not in self.durable:
            self.volatile[name] = contents
        self.cluster.after(self.cluster.random.uniform(0.005, 0.3), lambda: self.sync(name))

    def sync(self, name: FileName) -> None:
        """The node makes a file durable, after reading it back; that may fail, and is then tried again."""
        if self.replica is None or name not in self.volatile:
            return
        if self.cluster.chance(0.05, faults=True):
            self.cluster.after(0.5, lambda: self.sync(name))
            return
        contents = self.volatile.pop(name)
        if contents != contents_of(name):
            self.act(self.replica.fetch_failed(name))
            return
        self.keep(name, contents)

    def keep(self, name: FileName, contents: str) -> None:
        assert self.replica is not None, "only while it runs"
        self.durable[name] = contents
        self.cluster.was_durable.add((self.id, self.incarnation, name, digest_of(contents)))
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
        layers = self.replica.mine.layers(traces[int(self.cluster.random.integers(len(traces)))])
        mine = self.replica.mine
        sealed = [d for d in sorted(layers) if _stands(mine, manifest_at(epoch_of(Time(d.upper - 1))))]
        starts = [i for i, d in enumerate(sealed[1:]) if sealed[i].upper == d.lower]
        if not starts:
            return
        first = starts[int(self.cluster.random.integers(len(starts)))]
        run = [sealed[first]]
        for d in sealed[first + 1 :]:
            if d.lower != run[-1].upper or len(run) > 1 + self.cluster.random.integers(3):
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
        size = ARCHIVED_EPOCHS[int(self.cluster.random.integers(len(ARCHIVED_EPOCHS)))]
        first = size * int(self.cluster.random.integers(EPOCHS // size))
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
            link = self.cluster.links.get(effect.session)
            if link is None or not link.is_open:
                continue
            if isinstance(effect, Send):
                link.send(self, effect.message)
            elif isinstance(effect, SendFiles):
                for held in (wanted.held for wanted in effect.files):
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
        if not self.replica.accepts(session, message.held):
            return
        if self.is_whole(message):
            self.publish(name, message.contents)
        else:
            self.act(self.replica.fetch_failed(name))

    def is_whole(self, data: Data) -> bool:
        return digest_of(data.contents) == data.held.digest

    # --- the safe point ---------------------------------------------------------------------------------------------

    def claim(self) -> int:
        """The largest epoch up to which everything, the manifests too, has enough copies; it is remembered."""
        assert self.replica is not None, "only while it runs"
        while self.is_safe(self.safe + 1):
            self.safe += 1
        if self.safe >= 0:
            self.replica.state.safe = {MAIN_TIMELINE: Epoch(self.safe)}
        return self.safe

    def is_safe(self, t: int) -> bool:
        assert self.replica is not None, "only while it runs"
        names = [manifest_at(t), *layers_at(t)]
        return all(self.replica.copies(n, digest_of(contents_of(n))) >= self.cluster.replicas for n in names)


def manifest_at(t: int) -> FileName:
    """Returns the name of an epoch's manifest."""
    return FileName(f"manifests/main/{t}.json")


def layers_at(t: int) -> list[FileName]:
    """The layers that manifest `t` lists."""
    traces = [TraceId("s", "f" * 8, Shard(i, SHARDS)) for i in range(SHARDS)]
    return [FileName.of_layer(LayerId(trace, Description.of_epoch(t))) for trace in traces]


@dataclass
class Link:
    """One session between two nodes, over a network that may do anything to single messages."""

    cluster: Cluster
    session: SessionId
    ends: tuple[SimNode, SimNode]
    is_open: bool = True

    def send(self, sender: SimNode, message: Message | Data) -> None:
        c = self.cluster
        target = self.ends[1] if sender is self.ends[0] else self.ends[0]
        copies = 2 if c.chance(0.03, faults=True) else 1
        for _ in range(copies):
            if c.chance(0.03, faults=True) or c.parted(*self.ends):
                continue
            sent = message
            if isinstance(sent, Data) and c.chance(0.03, faults=True):
                sent = Data(sent.held, sent.contents + "?")
            delay_s = c.random.exponential(LATENCY_S) + (c.random.uniform(0, 1) if c.chance(0.05, faults=True) else 0)
            c.after(delay_s, lambda sent=sent: self.deliver(target, sent))  # type: ignore[misc]

    def deliver(self, target: SimNode, message: Message | Data) -> None:
        # A message that is under way when a session ends may still come.
        if not self.cluster.parted(*self.ends):
            target.receive(self.session, message)

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            for end in self.ends:
                if end.replica is not None:
                    end.act(end.replica.disconnected(self.session))


class Cluster:
    """The simulation. Subclasses plant bugs by their node and replica classes."""

    replica_class: ClassVar[type[Replica]] = Replica
    node_class: ClassVar[type[SimNode]] = SimNode

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = np.random.default_rng(seed)
        self.now_s = 0.0
        self.ids = [NodeId(f"n{i}") for i in range(3)]
        self.replicas = 2 + int(self.random.integers(2))
        self.links: dict[SessionId, Link] = {}
        self.was_durable: set[tuple[str, str, str, str]] = set()
        self.trace: list[str] = []
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._parted: set[frozenset[NodeId]] = set()
        self.nodes = {id: self.node_class(self, id, f"{id}-0") for id in self.ids}
        self.leader = self.ids[0]
        self._next_t = 0
        self._healed = False

    # --- the world --------------------------------------------------------------------------------------------------

    def after(self, delay_s: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now_s + delay_s, next(self._numbers), do))

    def chance(self, share: float, *, faults: bool) -> bool:
        """Whether something happens; faults only as long as there are any."""
        return bool(self.random.random() < share) and not (faults and self.now_s > FAULTS_UNTIL_S)

    def parted(self, a: SimNode, b: SimNode) -> bool:
        return frozenset((a.id, b.id)) in self._parted and self.now_s <= FAULTS_UNTIL_S

    def run(self) -> list[str]:
        """One course of events. Returns what happened; raises SimulationError."""
        for node in self.nodes.values():
            node.start()
            self._every(TICK_S, lambda node=node: self._tick(node))  # type: ignore[misc]
        for a, b in itertools.combinations(self.ids, 2):
            self._every(REDIAL_S, lambda a=a, b=b: self._dial(self.nodes[a], self.nodes[b]))  # type: ignore[misc]
        self._every(1.5, self._epoch)
        self._every(0.9, self._fault)
        self._every(1.1, self._merge)
        self._every(1.3, self._archive)
        self._every(7.0, self._scrub)
        self._every(1.0, self._look)
        while self._queue and self.now_s < HEALED_AFTER_S:
            self.now_s, _, do = heapq.heappop(self._queue)
            do()
            if self._healed:
                break
        self._check_acks()
        self._check_healed()
        return self.trace

    def _every(self, period_s: float, do: Callable[[], object]) -> None:
        def again() -> None:
            do()
            self.after(period_s * self.random.uniform(0.8, 1.2), again)

        self.after(period_s * self.random.random(), again)

    def _merge(self) -> None:
        if not self._is_quiet():
            self.nodes[self._some()].merge()

    def _archive(self) -> None:
        if not self._is_quiet():
            self.nodes[self._some()].archive()

    def _is_quiet(self) -> bool:
        """After the faults nodes go on merging in half of the courses. In the others nothing tells of what was lost
        last.
        """
        return bool(self.seed % 2) and self.now_s > FAULTS_UNTIL_S

    def _scrub(self) -> None:
        for node in self.nodes.values():
            node.scrub()

    def _look(self) -> None:
        self._healed = self.now_s > FAULTS_UNTIL_S + 1 and self._next_t >= EPOCHS and self._is_healed()

    def _some(self) -> NodeId:
        return self.ids[int(self.random.integers(len(self.ids)))]

    def note(self, what: str) -> None:
        self.trace.append(f"{self.now_s:.3f} {what}")

    # --- what happens -----------------------------------------------------------------------------------------------

    def _tick(self, node: SimNode) -> None:
        if node.replica is not None:
            node.act(node.replica.tick(self.now_s))
            self._check_claim(node)

    def _dial(self, a: SimNode, b: SimNode) -> None:
        together = [link for link in self.links.values() if link.is_open and link.ends == (a, b)]
        if together or a.replica is None or b.replica is None or self.parted(a, b):
            return
        session = SessionId(next(self._numbers))
        self.links[session] = Link(self, session, (a, b))
        for end in (a, b):
            assert end.replica is not None, "checked above"
            end.act(end.replica.connected(session))

    def _epoch(self) -> None:
        """The job publishes the next epoch's layers and its manifest, on the node where it runs now."""
        node = self.nodes[self.leader]
        if node.replica is None:
            running = [n for n in self.ids if self.nodes[n].replica is not None]
            self.leader = running[0] if running else self.leader
            return
        # It goes on after what its node has. What is lost there of earlier epochs it computes again, to the same layers.
        have = {**node.durable, **node.volatile}
        held = Inventory(FileVersion(name, "") for name in have)
        t = next((t for t in range(EPOCHS) if not _stands(held, manifest_at(t))), EPOCHS)
        for e in range(min(t + 1, EPOCHS)):
            for name in [*layers_at(e), manifest_at(e)]:
                id = name.layer
                covered = id is not None and covers(node.replica.mine.layers(name.place), id.description)
                if name not in have and not covered and (id is not None or not _stands(held, name)):
                    node.publish(name, contents_of(name))
        self.note(f"{node.id} publishes {t}")
        self._next_t = max(self._next_t, t + 1)

    def _fault(self) -> None:
        if self.now_s > FAULTS_UNTIL_S:
            return
        node = self.nodes[self._some()]
        kind = ["crash", "wipe", "part", "heal", "rot", "cut", "move", "read"][int(self.random.integers(8))]
        self.note(f"{kind} {node.id}")
        if kind in ("crash", "wipe") and node.replica is not None:
            self._crash(node, wipe=kind == "wipe")
        elif kind == "part":
            self._parted.add(frozenset((node.id, self._some())))
        elif kind == "heal":
            self._parted.clear()
        elif kind == "cut":
            for link in list(self.links.values()):
                if node in link.ends:
                    link.close()
        elif kind == "rot" and node.durable and self._may_wipe(node):
            name = sorted(node.durable)[int(self.random.integers(len(node.durable)))]
            node.durable[name] += "~"
            node.rotten.add(name)
        elif kind == "move":
            self.leader = node.id
        elif kind == "read" and node.replica is not None:
            node.act(node.replica.want_all())

    def _crash(self, node: SimNode, *, wipe: bool) -> None:
        for link in self.links.values():
            if node in link.ends:
                link.close()
        node.replica, node.volatile = None, {}
        if wipe and self.chance(0.5, faults=True) and self._may_wipe(node):
            node.durable, node.rotten, node.safe = {}, set(), -1
            node.incarnation = f"{node.id}-{next(self._numbers)}"
        self.after(self.random.uniform(0.2, 3.0), node.start)

    def _may_wipe(self, node: SimNode) -> bool:
        """Only what another node has may be lost: otherwise there is nothing to heal from."""
        others = [n for n in self.nodes.values() if n is not node]
        lost = Inventory(FileVersion(n, digest_of(contents_of(n))) for n in node.durable)
        kept = [
            Inventory(FileVersion(n, digest_of(d)) for n, d in o.durable.items() if n not in o.rotten) for o in others
        ]
        return all(any(k.holds(h.name, h.digest) for k in kept) for h in lost)

    # --- the oracle -------------------------------------------------------------------------------------------------

    def _fail(self, what: str) -> None:
        raise SimulationError(f"seed {self.seed}, at {self.now_s:.3f} s: {what}")

    def _check_acks(self) -> None:
        for node in self.nodes.values():
            for peer in node.replica.peers.values() if node.replica is not None else ():
                for held in peer.holds:
                    if (peer.node, peer.incarnation, held.name, held.digest) not in self.was_durable:
                        self._fail(
                            f"acked: {node.id} believes that {peer.node} {peer.incarnation} holds {held.name}, which never "
                            "was durable there"
                        )

    def _check_claim(self, node: SimNode) -> None:
        before = node.safe
        if node.claim() == before:
            return
        self._check_acks()
        assert node.replica is not None, "it made a claim"
        views = [(peer.node, peer.incarnation, peer.holds) for peer in node.replica.peers.values()]
        for t in range(before + 1, node.safe + 1):
            for name in [manifest_at(t), *layers_at(t)]:
                copies = int(_stands(Inventory(FileVersion(n, "") for n in node.durable), name))
                copies += sum(_stands(holds, name) for _, _, holds in views)
                if copies < self.replicas:
                    self._fail(f"safe: {node.id} claims {t} with {copies} copies of {name}, not {self.replicas}")

    def _is_healed(self) -> bool:
        try:
            self._check_healed()
        except SimulationError:
            return False
        return True

    def _check_healed(self) -> None:
        for node in self.nodes.values():
            if node.replica is None:
                self._fail(f"healed: {node.id} is down")
            else:
                self._check_node(node, node.replica)

    def _check_node(self, node: SimNode, replica: Replica) -> None:
        held = Inventory(FileVersion(n, digest_of(d)) for n, d in node.durable.items())
        if held.root != replica.mine.root and not node.rotten:
            self._fail(f"healed: {node.id} announces other files than it has")
        for name, contents in node.durable.items():
            if name not in node.rotten and contents != contents_of(name):
                self._fail(f"whole: {node.id} keeps wrong contents under {name}")
        for t in range(EPOCHS):
            for name in [manifest_at(t), *layers_at(t)]:
                if replica.is_replica(name) and not _stands(held, name):
                    self._fail(f"healed: {node.id} still misses {name}")
        for peer in replica.peers.values():
            other = self.nodes[peer.node].replica
            if other is None or peer.holds.root != other.mine.root:
                self._fail(f"healed: {node.id} does not know what {peer.node} holds")
        if node.claim() != EPOCHS - 1:
            self._fail(f"healed: the safe point of {node.id} stays at {node.safe}")


def _stands(inventory: Inventory, name: FileName) -> bool:
    """By a slow way of its own: whether every epoch of a layer is in some layer, and a manifest in some archive;
    another file is there by name.
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
