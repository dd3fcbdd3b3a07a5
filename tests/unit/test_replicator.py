"""Files that come from another node: kept whole and verified, or refused and asked for again; nothing ends the session."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import nosync
from nosync.lsm.directory import LayerDirectory, create_store, read_marker
from nosync.lsm.node import Node
from nosync.lsm.settings import StoreSettings
from nosync.proto.v1 import replication_pb2 as pb
from nosync.replication.inventory import Held, Inventory, NodeId
from nosync.replication.messages import PROTOCOL_VERSION
from nosync.replication.replicator import Replicator, Session
from nosync.replication.wire import Encoder
from nosync.testing import FaultyEnv

N1, N2 = NodeId("n1"), NodeId("n2")


class Receiver:
    """Node n1, with a session to an n2 whose frames the test makes."""

    def __init__(self, root: Path) -> None:
        self.env, self.root = FaultyEnv(), root
        create_store(root, 128, self.env, store_id="s")
        marker = read_marker(root, self.env)
        self.node = Node(LayerDirectory(root, 128, self.env), marker, StoreSettings(background=False))
        self.replicator = Replicator(self.node, N1, "s", [N1, N2], replicas=2)
        self.node.listener = self.replicator
        self.session: Session = self.replicator.open_session()
        self.receive(
            pb.Frame(hello=pb.Hello(node="n2", incarnation="9", store_id="s", replicas=2, version=PROTOCOL_VERSION))
        )

    def receive(self, frame: pb.Frame) -> None:
        self.replicator.received(self.session, frame)

    def announce(self, held: Held) -> None:
        one = pb.Held(name=held.name, digest=held.digest, size_bytes=held.size_bytes)
        groups = Inventory([held]).groups()
        roots = [pb.Group(name=name, root=root) for name, root in groups.items()]
        self.receive(pb.Frame(summary=pb.Summary(seq=0, groups=roots, last=True)))
        self.receive(pb.Frame(inventory=pb.Inventory(seq=0, held=[one], groups=groups, last=True)))

    def send(self, held: Held, path: Path) -> None:
        with path.open("rb") as file:
            for frame in Encoder().chunks(held, file):
                self.receive(frame)

    @property
    def durable(self) -> list[str]:
        return [f"layers/{record.id.path}" for record in self.node.durable_records()]


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[Receiver]:
    found = Receiver(tmp_path / "n1")
    yield found
    found.node.listener = None
    found.node.abandon()


@pytest.fixture
def theirs(tmp_path: Path) -> tuple[Held, Path]:
    """A layer on n2."""
    with nosync.open(tmp_path / "n2") as store:
        store.append("s", t=0, rows=pa.table({"k": list(range(100)), "v": list(range(100))}), key=["k"])
        layer = store.layers()[0]
    path = Path(layer.path)
    return Held(str(path.relative_to(tmp_path / "n2")), layer.digest, path.stat().st_size), path


def test_a_file_that_comes_is_kept(receiver: Receiver, theirs: tuple[Held, Path]) -> None:
    held, path = theirs
    receiver.announce(held)
    receiver.send(held, path)
    receiver.node.sync()
    assert receiver.durable == [held.name]
    assert (receiver.root / held.name).read_bytes() == path.read_bytes()


def test_what_stands_in_its_place_is_verified_before_it_counts(receiver: Receiver, theirs: tuple[Held, Path]) -> None:
    """A task's file of the same name, that a crash of the machine damaged: that another one came whole says nothing of it."""
    held, path = theirs
    receiver.announce(held)
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 3] ^= 1
    (receiver.root / held.name).parent.mkdir(parents=True)
    (receiver.root / held.name).write_bytes(damaged)
    receiver.send(held, path)
    receiver.node.sync()
    assert receiver.durable == []
    assert len(list((receiver.root / "quarantine").iterdir())) == 1
    receiver.replicator._replica.tick(receiver.env.monotonic_s() + 5)  # it is asked for again
    receiver.send(held, path)
    receiver.node.sync()
    assert receiver.durable == [held.name]


@pytest.mark.parametrize("operation", ["create", "link"])
def test_a_full_disk_refuses_a_file_and_not_the_session(
    receiver: Receiver, theirs: tuple[Held, Path], operation: str
) -> None:
    held, path = theirs
    receiver.announce(held)
    receiver.env.fail(operation, errno.ENOSPC, times=1)
    receiver.send(held, path)
    assert receiver.replicator.counters.refused_files == 1
    assert receiver.session.is_open
    assert not list((receiver.root / "tmp").iterdir())
    receiver.replicator._replica.tick(receiver.env.monotonic_s() + 5)
    receiver.send(held, path)
    receiver.node.sync()
    assert receiver.durable == [held.name]
