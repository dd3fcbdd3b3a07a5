"""What other nodes of the store hold in a bucket: a daemon does not put it again, and counts it.

What is in the log of another node counts as it stands there. Of two directories that both claim to be one node the newer
claim counts, as soon as its index is listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath

from nosync.lsm.model.layer import Description
from nosync.lsm.model.timestamp import epoch_of
from nosync.replication.protocol.file_names import FileName, FileVersion
from nosync.replication.protocol.inventory import Inventory, covers
from nosync.replication.remote.bucket import Bucket
from nosync.replication.remote.log import follow_log, nodes_of, read_log
from nosync.replication.remote.names import NodeNames
from nosync.replication.remote.pack import Contents, Reached


class OtherNodes:
    """The logs of other nodes, as they were when this looked last."""

    def __init__(self, bucket: Bucket, me: str, store_id: str) -> None:
        self._bucket, self._me, self._store_id = bucket, me, store_id
        self._contents: dict[str, Contents] = {}

    def look(self) -> None:
        """Reads what came since the last time. Raises RemoteError."""
        for node in nodes_of(self._bucket):
            known = self._contents.get(node)
            if node == self._me or (known and follow_log(self._bucket, NodeNames(node), self._store_id, known)):
                continue
            found = read_log(self._bucket, NodeNames(node), self._store_id)
            if found is not None:
                self._contents[node] = found

    @property
    def contents(self) -> Mapping[str, Contents]:
        """Returns what each of them holds, by node."""
        return dict(self._contents)

    @property
    def inventories(self) -> list[Inventory]:
        """Returns what each of them holds."""
        return [contents.inventory for contents in list(self._contents.values())]

    @property
    def reached(self) -> list[Reached]:
        """Returns up to where each of them says that all is whole."""
        return [contents.reached for contents in list(self._contents.values())]


def furthest(found: Iterable[Reached]) -> Reached:
    """Returns up to where anybody says that all is whole."""
    epochs: dict[str, int] = {}
    entries = 0
    for one in found:
        entries = max(entries, one.entries)
        for timeline, t in one.epochs.items():
            epochs[timeline] = max(t, epochs.get(timeline, -1))
    return Reached(epochs, entries)


def has_reached(name: FileName, reached: Reached) -> bool:
    """Returns whether a node that is whole up to there has the epoch, or the entry, that a file is of."""
    if name.entry is not None:
        return name.entry <= reached.entries
    if name.span is not None:
        return name.span.first <= reached.epochs.get(PurePosixPath(name.span.timeline).name, -1)
    if name.layer is not None:  # which timeline it is of its name does not say
        return epoch_of(name.layer.description.lower) <= max(reached.epochs.values(), default=-1)
    return False


class Together:
    """What several nodes hold, asked as one inventory is."""

    def __init__(self, inventories: Sequence[Inventory]) -> None:
        self._all = inventories

    def get(self, name: str) -> FileVersion | None:
        return next((found for one in self._all if (found := one.get(name)) is not None), None)

    def __contains__(self, name: str) -> bool:
        return any(name in one for one in self._all)

    def has_archived(self, name: FileName) -> bool:
        return any(one.has_archived(name) for one in self._all)

    def layers(self, trace: str) -> Mapping[Description, FileName]:
        found: dict[Description, FileName] = {}
        for one in self._all:
            found |= one.layers(trace)
        return found

    def holds(self, name: FileName, digest: str) -> bool:
        """Returns whether this very file is held, or layers of any nodes that together stand for it."""
        if any(one.holds(name, digest) for one in self._all):
            return True
        return name.layer is not None and name not in self and covers(self.layers(name.place), name.layer.description)
