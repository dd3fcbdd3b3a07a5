"""What must hold in the simulation, checked against what really is on the simulated disks."""

from __future__ import annotations

from collections.abc import Mapping

from nosync.replication.protocol.file_names import FileVersion
from nosync.replication.protocol.inventory import Inventory
from nosync.replication.protocol.placement import NodeId
from nosync.replication.protocol.replica import Replica
from nosync.testing.simulated_node import (
    EPOCHS,
    SimNode,
    World,
    contents_of,
    digest_of,
    layers_at,
    manifest_at,
    stands,
)


class SimulationError(AssertionError):
    """A promise was broken."""


class Oracle:
    """Checks the nodes of one simulation. Raises SimulationError."""

    def __init__(self, world: World, nodes: Mapping[NodeId, SimNode]) -> None:
        self._world, self._nodes = world, nodes

    def _fail(self, what: str) -> None:
        raise SimulationError(f"seed {self._world.seed}, at {self._world.now_s:.3f} s: {what}")

    def check_acks(self) -> None:
        for node in self._nodes.values():
            for peer in node.replica.peers.values() if node.replica is not None else ():
                for held in peer.holds:
                    if (peer.node, peer.incarnation, held.name, held.digest) not in self._world.was_durable:
                        self._fail(
                            f"acked: {node.id} believes that {peer.node} {peer.incarnation} holds {held.name}, which "
                            "never was durable there"
                        )

    def check_claim(self, node: SimNode) -> None:
        before = node.safe
        if node.claim() == before:
            return
        self.check_acks()
        assert node.replica is not None, "it made a claim"
        views = [(peer.node, peer.incarnation, peer.holds) for peer in node.replica.peers.values()]
        for t in range(before + 1, node.safe + 1):
            for name in [manifest_at(t), *layers_at(t)]:
                copies = int(stands(Inventory(FileVersion(n, "") for n in node.durable), name))
                copies += sum(stands(holds, name) for _, _, holds in views)
                if copies < self._world.replicas:
                    self._fail(f"safe: {node.id} claims {t} with {copies} copies of {name}, not {self._world.replicas}")

    def is_healed(self) -> bool:
        try:
            self.check_healed()
        except SimulationError:
            return False
        return True

    def check_healed(self) -> None:
        for node in self._nodes.values():
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
                if replica.state.placement.is_replica(name) and not stands(held, name):
                    self._fail(f"healed: {node.id} still misses {name}")
        for peer in replica.peers.values():
            other = self._nodes[peer.node].replica
            if other is None or peer.holds.root != other.mine.root:
                self._fail(f"healed: {node.id} does not know what {peer.node} holds")
        if node.claim() != EPOCHS - 1:
            self._fail(f"healed: the safe point of {node.id} stays at {node.safe}")
