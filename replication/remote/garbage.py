"""Objects of one node that nothing needs any more: they are deleted a grace later, and packs of which little is used
are written anew.

Invariants
- Only who has the claim deletes, and only of its own node.
- A pack stays while a file in it is held, or while it comes after the index before the newest one: readers follow the
  log from an index, and from that one where the newest is damaged.
- An object is deleted after nothing has needed it for the whole grace, as this process saw it, or those before it that
  said so when they ended. So a reader that knows what was held a grace ago finds all of it, if no clock was set forward
  between two processes; and what is needed never goes by a clock.
- No name is ever used for a second object, so a deletion that comes late takes nothing that is needed.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable

from nosync.lsm.errors import CorruptionError
from nosync.lsm.platform.env import Env
from nosync.lsm.platform.parsing import parsed
from nosync.replication.protocol.file_names import FileName
from nosync.replication.remote.bucket import Bucket, MissingObjectError, ObjectInfo
from nosync.replication.remote.log import LogWriter
from nosync.replication.remote.names import LogPosition, NodeNames, position_of
from nosync.replication.remote.node_listing import NodeListing

USED_PART = 5
"""A pack is written anew where less than one so-many-th of it is held."""
_AT_ONCE = 500
_US = 1_000_000


class Collector:
    """Finds and deletes what one node does not need any more."""

    def __init__(self, bucket: Bucket, names: NodeNames, grace_s: float, env: Env) -> None:
        self._bucket, self._names, self._grace_s, self._env = bucket, names, grace_s, env
        self._since_s: dict[str, float] = {}
        self._said: tuple[str, ...] = ()  # where earlier processes said it
        self._has_looked = False

    def collect(self, writer: LogWriter, listing: NodeListing, going: Collection[str], now_s: float) -> None:
        """Deletes what nothing has needed for the grace. Nothing may be pending. `going`: large files that are put, and
        that no pack names yet.
        """
        if not self._has_looked:
            self._since_s, self._has_looked = self._said_before(now_s), True
        in_use = {*writer.contents.in_use(), *going, *writer.objects_begun()}
        indexes = {at: one for one in listing.indexes if (at := position_of(one.name)) is not None}
        since = self._followed_since(indexes, writer)
        old = [one for at, one in indexes.items() if at < since]
        unneeded = [*_packs(listing, since, in_use), *old, *_objects(listing, in_use)]
        self._since_s = {one.name: self._since_s.get(one.name, now_s) for one in unneeded}
        due = [one.name for one in unneeded if self._since_s[one.name] <= now_s - self._grace_s]
        for begin in range(0, len(due), _AT_ONCE):
            writer.check()
            self._bucket.delete(due[begin : begin + _AT_ONCE])
            for name in due[begin : begin + _AT_ONCE]:
                self._since_s.pop(name, None)

    def _said_before(self, now_s: float) -> dict[str, float]:
        """Returns what the last process said since when objects are not needed, by this process's clock."""
        found = [one.name for one in self._bucket.list(self._names.unneeded)]
        self._said = tuple(found)
        if not found:
            return {}
        name = max(found)
        try:
            with parsed("since when objects are not needed", f"{self._bucket.url}/{name}"):
                fields = json.loads(self._bucket.get(name))
                age_s = max(0.0, self._env.utc_us() / _US - float(fields["said_s"]))
                return {str(one): now_s - age_s - float(old_s) for one, old_s in fields["unneeded_s"].items()}
        except (CorruptionError, MissingObjectError):
            return {}

    def say(self, writer: LogWriter, now_s: float) -> None:
        """Says since when what is left is not needed, for the process that comes next. Who is not the writer says nothing."""
        if not self._has_looked or not (self._since_s or self._said):
            return
        writer.check()
        name = self._names.unneeded_at(writer.contents.at)
        if self._since_s and name not in self._said:
            ages = {one: max(0.0, now_s - since_s) for one, since_s in self._since_s.items()}
            self._bucket.put_new(name, json.dumps({"said_s": self._env.utc_us() / _US, "unneeded_s": ages}).encode())
        self._bucket.delete([one for one in self._said if one != name])
        self._said = (name,)

    @staticmethod
    def _followed_since(indexes: Iterable[LogPosition], writer: LogWriter) -> LogPosition:
        """Returns from where on readers may follow the log: from the index before the newest one, should that be damaged."""
        return max((at for at in indexes if at < writer.index_at), default=writer.index_at)

    @staticmethod
    def sparse(writer: LogWriter, listing: NodeListing, most_bytes: int) -> list[FileName]:
        """Returns files, of so many bytes at most, that are all that is held of large packs: put again, they free these."""
        sizes = {one.name: one.size_bytes for one in listing.packs}
        used = writer.contents.in_use()
        few = {name for name, size in sizes.items() if 0 < used.get(name, 0) * USED_PART < size}
        found: list[FileName] = []
        total = 0
        for placed in writer.contents.files():
            if placed.place.object in few and total + placed.version.size_bytes <= most_bytes:
                found.append(placed.version.name)
                total += placed.version.size_bytes
        return found


def _packs(listing: NodeListing, since: LogPosition, in_use: Collection[str]) -> Iterable[ObjectInfo]:
    for one in listing.packs:
        at = position_of(one.name)
        if at is not None and one.name not in in_use and at <= since:
            yield one


def _objects(listing: NodeListing, in_use: Collection[str]) -> Iterable[ObjectInfo]:
    return (one for one in listing.objects if one.name.rpartition("/")[0] not in in_use)
