"""What is listed of one node in a bucket: once for all who ask what is gone, and what is not needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from nosync.replication.remote.bucket import Bucket, ObjectInfo
from nosync.replication.remote.names import NodeNames


@dataclass(frozen=True)
class NodeListing:
    """The objects of one node, by kind. A listing may lag."""

    indexes: Sequence[ObjectInfo]
    packs: Sequence[ObjectInfo]
    objects: Sequence[ObjectInfo]
    """The parts of large files."""

    @classmethod
    def of(cls, bucket: Bucket, names: NodeNames) -> NodeListing:
        """Lists what a node has. Raises RemoteError."""
        return cls(bucket.list(names.indexes), bucket.list(names.packs), bucket.list(names.objects))

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """The size of each object, by its name."""
        return {one.name: one.size_bytes for kind in (self.indexes, self.packs, self.objects) for one in kind}
