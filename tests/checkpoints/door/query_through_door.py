"""The small query without Spark, which writes through a door what it writes into its directory."""

from __future__ import annotations

from pathlib import Path

from tests.checkpoints.door.client import Client
from tests.checkpoints.fake_query import FakeQuery


class QueryThroughDoor(FakeQuery):
    """Renames what Spark renames, and writes what a snapshot names in place."""

    def __init__(self, root: Path, address: str, kind: str, *, partitions: int = 2) -> None:
        self.client = Client(address)
        super().__init__(root, kind, partitions=partitions)

    def write(self, path: str, data: str | bytes) -> None:
        super().write(path, data)
        sent = data.encode() if isinstance(data, str) else data
        if path.endswith((".zip", ".sst")):
            self.client.create(path, sent)
        else:
            self.client.publish(path, sent, overwrite=path.startswith("state/"))

    def remove(self, path: str) -> None:
        super().remove(path)
        assert self.client.delete(path)
