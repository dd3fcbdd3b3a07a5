"""Objects of one node that nothing needs any more: they are deleted a grace later, and packs of which little is used
are written anew.

Invariants
- Only who has the claim deletes, and only of its own node.
- A pack stays while a file in it is held, or while it comes after the index before the newest one: readers follow the
  log from an index, and from that one where the newest is damaged.
- An object is deleted after nothing has needed it for the whole grace, as this process saw it: its clock is its own, and
  a new process begins to count anew. So a reader that knows what was held a grace ago finds all of it.
- No name is ever used for a second object, so a deletion that comes late takes nothing that is needed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from nosync.replication.protocol.file_names import FileName
from nosync.replication.remote.bucket import Bucket, ObjectInfo
from nosync.replication.remote.log import LogWriter
from nosync.replication.remote.names import LogPosition, NodeNames, position_of

USED_PART = 5
"""A pack is written anew where less than one so-many-th of it is held."""
_AT_ONCE = 500


class Collector:
    """Finds and deletes what one node does not need any more."""

    def __init__(self, bucket: Bucket, names: NodeNames, grace_s: float) -> None:
        self._bucket, self._names, self._grace_s = bucket, names, grace_s
        self._since_s: dict[str, float] = {}

    def collect(self, writer: LogWriter, going: Collection[str], now_s: float) -> None:
        """Deletes what nothing has needed for the grace. Nothing may be pending. `going`: large files that are put, and
        that no pack names yet.
        """
        in_use = {*writer.contents.in_use(), *going, *writer.objects_begun()}
        indexes = {
            at: one for one in self._bucket.list(self._names.indexes) if (at := position_of(one.name)) is not None
        }
        since = self._followed_since(indexes, writer)
        old = [one for at, one in indexes.items() if at < since]
        unneeded = [*self._packs(since, in_use), *old, *self._objects(in_use)]
        self._since_s = {one.name: self._since_s.get(one.name, now_s) for one in unneeded}
        due = [one.name for one in unneeded if self._since_s[one.name] <= now_s - self._grace_s]
        for begin in range(0, len(due), _AT_ONCE):
            writer.check()
            self._bucket.delete(due[begin : begin + _AT_ONCE])
            for name in due[begin : begin + _AT_ONCE]:
                self._since_s.pop(name, None)

    @staticmethod
    def _followed_since(indexes: Iterable[LogPosition], writer: LogWriter) -> LogPosition:
        """Returns from where on readers may follow the log: from the index before the newest one, should that be damaged."""
        return max((at for at in indexes if at < writer.index_at), default=writer.index_at)

    def _packs(self, since: LogPosition, in_use: Collection[str]) -> Iterable[ObjectInfo]:
        for one in self._bucket.list(self._names.packs):
            at = position_of(one.name)
            if at is not None and one.name not in in_use and at <= since:
                yield one

    def _objects(self, in_use: Collection[str]) -> Iterable[ObjectInfo]:
        return (one for one in self._bucket.list(self._names.objects) if one.name.rpartition("/")[0] not in in_use)

    def sparse(self, writer: LogWriter, most_bytes: int) -> list[FileName]:
        """Returns files, of so many bytes at most, that are all that is held of large packs: put again, they free these."""
        sizes = {one.name: one.size_bytes for one in self._bucket.list(self._names.packs)}
        used = writer.contents.in_use()
        few = {name for name, size in sizes.items() if 0 < used.get(name, 0) * USED_PART < size}
        found: list[FileName] = []
        total = 0
        for placed in writer.contents.files():
            if placed.place.object in few and total + placed.version.size_bytes <= most_bytes:
                found.append(placed.version.name)
                total += placed.version.size_bytes
        return found
