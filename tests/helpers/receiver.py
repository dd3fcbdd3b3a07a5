"""A node that is sent files, without a network."""

from __future__ import annotations

from pathlib import Path

from nosync.lsm.node.node import Node
from nosync.lsm.platform.store_marker import create_store, read_marker
from nosync.lsm.settings import StoreSettings
from nosync.lsm.trace.directory import LayerDirectory
from nosync.proto.v1 import replication_pb2 as pb
from nosync.replication.daemon.replicator import Replicator
from nosync.replication.daemon.session import Session
from nosync.replication.protocol.file_names import FileVersion
from nosync.replication.protocol.inventory import Inventory
from nosync.replication.protocol.messages import PROTOCOL_VERSION, FileRequest, Want
from nosync.replication.protocol.placement import NodeId
from nosync.replication.transport.codec import Encoder
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
        self.node.announcer.listen(self.replicator.announcements)
        self.connect()

    def connect(self) -> None:
        self.session: Session = self.replicator.open_session()
        self.receive(
            pb.Frame(hello=pb.Hello(node="n2", incarnation="9", store_id="s", replicas=2, version=PROTOCOL_VERSION))
        )

    def receive(self, frame: pb.Frame) -> None:
        self.replicator.received(self.session, frame)

    def announce(self, *held: FileVersion) -> None:
        """n2 answers that it holds these, and nothing else."""
        names = [pb.Held(name=one.name, digest=one.digest, size_bytes=one.size_bytes) for one in held]
        groups = Inventory(held).groups()
        roots = [pb.Group(name=name, root=root) for name, root in groups.items()]
        self.receive(pb.Frame(summary=pb.Summary(seq=0, groups=roots, last=True)))
        self.receive(pb.Frame(inventory=pb.Inventory(seq=0, held=names, groups=groups, last=True)))

    def send(self, held: FileVersion, path: Path, offset: int = 0, most: int | None = None) -> None:
        """Pieces of a file from a byte on, at most so many."""
        with path.open("rb") as file:
            for frame in list(Encoder().chunks(FileRequest(held, offset), file))[:most]:
                self.receive(frame)

    def wanted(self) -> list[FileRequest]:
        """What was asked for on this session."""
        return [wanted for sent in self.session.outbox if isinstance(sent, Want) for wanted in sent.files]

    def root_of(self, group: str) -> str:
        return self.replicator._replica.mine.groups()[group]

    @property
    def durable(self) -> list[str]:
        return [f"layers/{record.id.path}" for record in self.node.durable_records()]
