"""The log of one node in a bucket: reading it, and writing it as the one who has its claim.

Invariants
- Packs are numbered without gaps, and the next one is put only when the one before was acknowledged.
- A pack, or a part, is acknowledged when its conditional PUT answered that it is new, or when what is there under the
  name is these very bytes: a PUT that was not answered may have had its effect. Then it must still be this writer's log.
- Who takes the log over begins with an index of all that is held. Whatever an earlier writer puts after that is ignored.
- A listing may lag, but that and the time to read what it names are together less than the grace after which objects are
  deleted.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from nosync.lsm.errors import CorruptionError, RemoteError
from nosync.lsm.platform.store_marker import Marker
from nosync.replication.protocol.file_names import FileVersion
from nosync.replication.remote.bucket import Bucket, MissingObjectError, UnavailableError
from nosync.replication.remote.fence import Claim, check_claim
from nosync.replication.remote.names import NODES, LogPosition, NodeNames, part_name, position_of
from nosync.replication.remote.pack import (
    TRAILER_BYTES,
    Contents,
    PackBuilder,
    Place,
    Placed,
    Reached,
    Step,
    decode_index,
    decode_step,
    encode_index,
    encode_pack,
    index_bytes,
)

log = logging.getLogger("nosync.remote")

_READ_AT_ONCE = 64 << 10
_RELISTS = 5


def nodes_of(bucket: Bucket) -> list[str]:
    """Returns the nodes that have logs in a bucket."""
    return bucket.directories(f"{NODES}/")


def read_log(bucket: Bucket, names: NodeNames, store_id: str, until_claim: int | None = None) -> Contents | None:
    """Returns what a node holds; None where its log was not begun. `until_claim`: of writers up to this claim only.

    Where a pack or an index is damaged, it is what was held before (`damage` says so). Raises RemoteError, and
    CorruptionError where no index is whole.
    """
    for attempt in range(_RELISTS):
        try:
            contents = _newest_index(bucket, names, store_id, until_claim)
        except MissingObjectError:  # it was deleted since it was listed, for there is a later one
            if attempt + 1 == _RELISTS:
                raise
            continue
        if contents is not None:
            _follow(bucket, names, store_id, contents)
            _check_end(bucket, names, store_id, contents)
        return contents
    raise AssertionError("the last attempt returns or raises")


def follow_log(bucket: Bucket, names: NodeNames, store_id: str, contents: Contents) -> bool:
    """Takes over what came since `contents` was read. Returns False where another writer has begun, or more came than
    packs say: then all is to be read again.
    """
    listed = [at for one in bucket.list(names.indexes) if (at := position_of(one.name)) is not None]
    if contents.damage or (listed and max(listed).claim > contents.at.claim):
        return False
    _follow(bucket, names, store_id, contents)
    return not listed or max(listed) <= contents.at


def _newest_index(bucket: Bucket, names: NodeNames, store_id: str, until_claim: int | None) -> Contents | None:
    listed = {at for one in bucket.list(names.indexes) if (at := position_of(one.name)) is not None}
    known = set(listed)
    if until_claim is not None:  # the listing may not show those yet
        first = {LogPosition(claim, 0) for claim in range(1, until_claim + 1)}
        known = {at for at in listed | first if at.claim <= until_claim}
    damage: CorruptionError | None = None
    for at in sorted(known, reverse=True):
        try:
            contents = _index(bucket, names, store_id, at)
        except MissingObjectError:
            if at in listed and damage is None:
                raise
            continue  # it was claimed, and nothing was written; or it was deleted as a later one is there
        except CorruptionError as error:
            log.warning("%s; what the index before it says is taken", error)
            damage = damage or error
            continue
        contents.damage = "" if damage is None else str(damage)
        return contents
    if damage is not None:
        raise damage
    return None


def _index(bucket: Bucket, names: NodeNames, store_id: str, at: LogPosition) -> Contents:
    name = names.index(at)
    return decode_index(bucket.get(name), store_id, f"{bucket.url}/{name}")


def _follow(bucket: Bucket, names: NodeNames, store_id: str, contents: Contents) -> None:
    """Applies the packs that came since, up to one that is damaged: what was held before it still is."""
    try:
        while (step := read_step(bucket, names, store_id, contents.at.next)) is not None:
            contents.apply(step)
    except CorruptionError as error:
        log.warning("%s; what was put after it is not seen", error)
        contents.damage = contents.damage or str(error)


def _check_end(bucket: Bucket, names: NodeNames, store_id: str, contents: Contents) -> None:
    """Notes where a pack is gone: the packs after it are there, and what they say is not seen."""
    for _ in range(2):
        following = contents.at.next
        packs = (at for one in bucket.list(names.packs) if (at := position_of(one.name)) is not None)
        if contents.damage or not any(at.claim == following.claim and at.number > following.number for at in packs):
            return
        _follow(bucket, names, store_id, contents)  # it was put since it was looked for
        if contents.at.next == following and not contents.damage:
            contents.damage = f"{bucket.url}/{names.pack(following)} is gone"
            log.warning("%s; what was put after it is not seen", contents.damage)


def read_step(bucket: Bucket, names: NodeNames, store_id: str, at: LogPosition) -> Step | None:
    """Returns what the pack at a position says; None where there is none yet."""
    name = names.pack(at)
    where = f"{bucket.url}/{name}"
    try:
        end = bucket.get_end(name, _READ_AT_ONCE)
        size = index_bytes(end, where) + TRAILER_BYTES
        if size > len(end):
            end = bucket.get_end(name, size)
    except MissingObjectError:
        return None
    return decode_step(end, name, store_id, where)


@dataclass
class _Pending:
    name: str
    data: bytes | bytearray
    step: Step


class LogWriter:
    """Writes the log of a node. `contents` is what it holds once the pack that is pending is acknowledged."""

    def __init__(self, bucket: Bucket, names: NodeNames, marker: Marker, claim: Claim, before: Contents | None) -> None:
        """`before`: what earlier writers left. Nothing is written yet."""
        self._bucket, self._names, self._marker, self.claim = bucket, names, marker, claim
        at = LogPosition(claim.number, 0)
        files, reached = ((), Reached()) if before is None else (before.files(), before.reached)
        self.contents = Contents(at, files, reached, claim.incarnation)
        self.acknowledged = reached
        """Up to where everything is held for sure."""
        self._pending: _Pending | None = None
        self._parts: dict[FileVersion, tuple[str, int]] = {}
        self._objects = 0
        self.packs, self.sent_bytes, self.index_at = 0, 0, at
        self.log_sizes: dict[str, int] = {}
        """How large the newest index is, and each pack that came after it."""

    @property
    def bucket_url(self) -> str:
        return self._bucket.url

    @property
    def is_pending(self) -> bool:
        """Returns whether a pack was not acknowledged yet."""
        return self._pending is not None

    def check(self) -> None:
        """Raises RemoteTakenError where this is not the writer any more."""
        check_claim(self._bucket, self._names, self.claim)

    def write_index(self) -> None:
        """Puts the index of all that is held. Nothing may be pending."""
        data = encode_index(self.contents, self._marker.store_id, self._names.node)
        name = self._names.index(self.contents.at)
        self._put(name, data)
        self.check()
        self.index_at = self.contents.at
        self.log_sizes = {name: len(data)}

    def next_pack(self) -> str:
        """Returns the name of the pack that comes next."""
        return self._names.pack(self.contents.at.next)

    def write(self, builder: PackBuilder, step: Step) -> None:
        """Puts a pack. Raises UnavailableError where it was not acknowledged: then it is pending, and `settle` puts it
        again. The body of the builder is used up.
        """
        data = encode_pack(builder.body, step, self._marker.store_id, self._names.node)
        self._pending = _Pending(self._names.pack(step.at), data, step)
        self.contents.apply(step)
        self.settle()

    def settle(self) -> None:
        """Puts the pack that is pending, the same bytes again, until it is acknowledged."""
        pending = self._pending
        if pending is None:
            return
        self._put(pending.name, pending.data)
        self.check()
        self._pending = None
        self.log_sizes[pending.name] = len(pending.data)
        self.acknowledged = pending.step.reached
        self.packs += 1

    def has_begun(self, version: FileVersion) -> bool:
        """Returns whether parts of a large file were put, and not all of them."""
        return version in self._parts

    def put_large(self, version: FileVersion, data: memoryview, part_bytes: int, most_bytes: int) -> Placed | None:
        """Puts a large file as objects of its own, and no part is begun after so many bytes. The next call goes on after
        the last part that was acknowledged. Returns where it is; None while it is not whole.
        """
        end_bytes = self.sent_bytes + most_bytes
        if version not in self._parts:
            self._objects += 1
            self._parts[version] = self._names.object(self.claim.number, self._objects), 0
        name, done = self._parts[version]
        for part in range(done, -(-len(data) // part_bytes)):
            if self.sent_bytes >= end_bytes:
                return None
            self._put(part_name(name, part), data[part * part_bytes : (part + 1) * part_bytes])
            self._parts[version] = name, part + 1
        del self._parts[version]
        return Placed(version, Place(name, part_bytes=part_bytes))

    def objects_begun(self) -> set[str]:
        """Returns the objects of large files that are not put whole yet."""
        return {name for name, _ in self._parts.values()}

    def give_up_parts(self) -> None:
        """Forgets large files that were begun: they are not wanted any more."""
        self._parts.clear()

    def _put(self, name: str, data: bytes | bytearray | memoryview) -> None:
        if not self._bucket.put_new(name, data):
            self._check_same(name, data)
        self.sent_bytes += len(data)

    def _check_same(self, name: str, data: bytes | bytearray | memoryview) -> None:
        try:
            found = self._bucket.get(name)
        except MissingObjectError:  # another PUT of it was going on
            raise UnavailableError(
                f"{self._bucket.url}: {name} is being written by somebody; it is looked at again"
            ) from None
        if found != data:
            raise RemoteError(
                f"{self._bucket.url}: {name} is there with other bytes than this writer's: something else writes to this "
                "prefix, or the object was changed by hand. Nothing more is copied there; give another prefix"
            )
