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
from typing import ClassVar

from nosync.replication.protocol.file_names import FileVersion
from nosync.replication.protocol.inventory import Inventory, covers
from nosync.replication.protocol.messages import SessionId
from nosync.replication.protocol.placement import NodeId
from nosync.replication.protocol.replica import Replica
from nosync.testing.simulated_node import (
    EPOCHS,
    FAULTS_UNTIL_S,
    Link,
    SimNode,
    World,
    contents_of,
    digest_of,
    layers_at,
    manifest_at,
    stands,
)
from nosync.testing.simulation_oracle import Oracle

HEALED_AFTER_S = 75.0
TICK_S = 0.2
REDIAL_S = 0.5


class Cluster:
    """The simulation. Subclasses plant bugs by their node and replica classes."""

    replica_class: ClassVar[type[Replica]] = Replica
    node_class: ClassVar[type[SimNode]] = SimNode

    def __init__(self, seed: int) -> None:
        self.world = World(seed, self.replica_class)
        self.trace: list[str] = []
        self.nodes = {id: self.node_class(self.world, id, f"{id}-0") for id in self.world.ids}
        self.leader = self.world.ids[0]
        self._oracle = Oracle(self.world, self.nodes)
        self._next_t = 0
        self._healed = False

    def run(self) -> list[str]:
        """Runs one course of events. Returns what happened; raises SimulationError."""
        for node in self.nodes.values():
            node.start()
            self._every(TICK_S, lambda node=node: self._tick(node))  # type: ignore[misc]
        for a, b in itertools.combinations(self.world.ids, 2):
            self._every(REDIAL_S, lambda a=a, b=b: self._dial(self.nodes[a], self.nodes[b]))  # type: ignore[misc]
        self._every(1.5, self._epoch)
        self._every(0.9, self._fault)
        self._every(1.1, self._merge)
        self._every(1.3, self._archive)
        self._every(7.0, self._scrub)
        self._every(1.0, self._look)
        while self.world.queue and self.world.now_s < HEALED_AFTER_S:
            self.world.now_s, _, do = heapq.heappop(self.world.queue)
            do()
            if self._healed:
                break
        self._oracle.check_acks()
        self._oracle.check_healed()
        return self.trace

    def _every(self, period_s: float, do: Callable[[], object]) -> None:
        def again() -> None:
            do()
            self.world.after(period_s * self.world.random.uniform(0.8, 1.2), again)

        self.world.after(period_s * self.world.random.random(), again)

    def _merge(self) -> None:
        if not self._is_quiet():
            self.nodes[self._some()].merge()

    def _archive(self) -> None:
        if not self._is_quiet():
            self.nodes[self._some()].archive()

    def _is_quiet(self) -> bool:
        """Returns whether nodes stop merging: after the faults they go on with it in half of the courses. In the others
        nothing tells of what was lost last.
        """
        return bool(self.world.seed % 2) and self.world.now_s > FAULTS_UNTIL_S

    def _scrub(self) -> None:
        for node in self.nodes.values():
            node.scrub()

    def _look(self) -> None:
        self._healed = self.world.now_s > FAULTS_UNTIL_S + 1 and self._next_t >= EPOCHS and self._oracle.is_healed()

    def _some(self) -> NodeId:
        return self.world.ids[int(self.world.random.integers(len(self.world.ids)))]

    def note(self, what: str) -> None:
        self.trace.append(f"{self.world.now_s:.3f} {what}")

    # --- what happens -----------------------------------------------------------------------------------------------

    def _tick(self, node: SimNode) -> None:
        if node.replica is not None:
            node.act(node.replica.tick(self.world.now_s))
            self._oracle.check_claim(node)

    def _dial(self, a: SimNode, b: SimNode) -> None:
        together = [link for link in self.world.links.values() if link.is_open and link.ends == (a, b)]
        if together or a.replica is None or b.replica is None or self.world.parted(a, b):
            return
        session = SessionId(next(self.world.numbers))
        self.world.links[session] = Link(self.world, session, (a, b))
        for end in (a, b):
            assert end.replica is not None, "checked above"
            end.act(end.replica.connected(session))

    def _epoch(self) -> None:
        """The job publishes the next epoch's layers and its manifest, on the node where it runs now."""
        node = self.nodes[self.leader]
        if node.replica is None:
            running = [n for n in self.world.ids if self.nodes[n].replica is not None]
            self.leader = running[0] if running else self.leader
            return
        # It goes on after what its node has. What is lost there of earlier epochs it computes again, to the same ones.
        have = {**node.durable, **node.volatile}
        held = Inventory(FileVersion(name, "") for name in have)
        t = next((t for t in range(EPOCHS) if not stands(held, manifest_at(t))), EPOCHS)
        for e in range(min(t + 1, EPOCHS)):
            for name in [*layers_at(e), manifest_at(e)]:
                id = name.layer
                covered = id is not None and covers(node.replica.mine.layers(name.place), id.description)
                if name not in have and not covered and (id is not None or not stands(held, name)):
                    node.publish(name, contents_of(name))
        self.note(f"{node.id} publishes {t}")
        self._next_t = max(self._next_t, t + 1)

    def _fault(self) -> None:
        if self.world.now_s > FAULTS_UNTIL_S:
            return
        node = self.nodes[self._some()]
        kind = ["crash", "wipe", "part", "heal", "rot", "cut", "move", "read"][int(self.world.random.integers(8))]
        self.note(f"{kind} {node.id}")
        if kind in ("crash", "wipe") and node.replica is not None:
            self._crash(node, wipe=kind == "wipe")
        elif kind == "part":
            self.world.apart.add(frozenset((node.id, self._some())))
        elif kind == "heal":
            self.world.apart.clear()
        elif kind == "cut":
            for link in list(self.world.links.values()):
                if node in link.ends:
                    link.close()
        elif kind == "rot" and node.durable and self._may_wipe(node):
            name = sorted(node.durable)[int(self.world.random.integers(len(node.durable)))]
            node.durable[name] += "~"
            node.rotten.add(name)
        elif kind == "move":
            self.leader = node.id
        elif kind == "read" and node.replica is not None:
            node.act(node.replica.want_all())

    def _crash(self, node: SimNode, *, wipe: bool) -> None:
        for link in self.world.links.values():
            if node in link.ends:
                link.close()
        node.replica, node.volatile = None, {}
        if wipe and self.world.chance(0.5, faults=True) and self._may_wipe(node):
            node.durable, node.rotten, node.safe = {}, set(), -1
            node.incarnation = f"{node.id}-{next(self.world.numbers)}"
        self.world.after(self.world.random.uniform(0.2, 3.0), node.start)

    def _may_wipe(self, node: SimNode) -> bool:
        """Returns whether another node has all that this one would lose: otherwise there is nothing to heal from."""
        others = [n for n in self.nodes.values() if n is not node]
        lost = Inventory(FileVersion(n, digest_of(contents_of(n))) for n in node.durable)
        kept = [
            Inventory(FileVersion(n, digest_of(d)) for n, d in o.durable.items() if n not in o.rotten) for o in others
        ]
        return all(any(k.holds(h.name, h.digest) for k in kept) for h in lost)
