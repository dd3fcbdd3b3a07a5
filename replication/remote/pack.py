"""Packs and indexes: the objects in which a node's files lie in a bucket, and which say what it holds. Pure.

    pack    files, one after the other | index | trailer (64 bytes)
    index   index | trailer

Invariants
- An index is covered by the digest in its trailer, and a file by its own digest, which the index has: nothing that
  comes out of a bucket is used before it was compared.
- A pack says what was added and dropped with it, an index all that was held. So an index, and the packs after it, in
  order, say what is held (`Contents`).
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3

from nosync.lsm.errors import CorruptionError, FormatVersionError
from nosync.lsm.manifests.manifest import checked_digest
from nosync.lsm.platform.json_file import canonical, whole_number
from nosync.lsm.platform.parsing import parsed
from nosync.replication.protocol.file_names import FileName, FileVersion, parse_name
from nosync.replication.protocol.inventory import Inventory
from nosync.replication.remote.names import LogPosition

LOG_FORMAT = 1
_TRAILER = struct.Struct("<8sI4xQ32s8x")
TRAILER_BYTES = _TRAILER.size
_MAGIC = b"NOSYNCRP"
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
_OBJECT = re.compile(r"nodes/[a-z0-9_-]{1,64}/(packs/\d{8}-\d{12}\.pack|objects/\d{8}-\d{12})\Z")
_MOST_INDEX_BYTES = 1 << 30
_Fields = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """Says where the bytes of a file are: in a pack from an offset on, or in objects of their own, in parts."""

    object: str
    offset: int = 0
    part_bytes: int = 0
    """Of each part but the last of a file that has objects of its own; 0: it is in a pack."""


@dataclass(frozen=True)
class Placed:
    """A file that is held in a bucket."""

    version: FileVersion
    place: Place


@dataclass(frozen=True)
class Reached:
    """Up to where a node's files are whole: `epochs` by timeline, under the first `entries` of the log of branches."""

    epochs: Mapping[str, int] = field(default_factory=dict)
    entries: int = 0


@dataclass(frozen=True)
class Step:
    """What a pack says: what came with it, what is dropped since the one before, and up to where all is whole then."""

    at: LogPosition
    added: Sequence[Placed]
    dropped: Sequence[str]
    reached: Reached
    incarnation: str = ""
    """Which life of the data directory wrote it."""


class Contents:
    """What one node holds in a bucket, as its log says."""

    def __init__(
        self, at: LogPosition, files: Iterable[Placed] = (), reached: Reached | None = None, incarnation: str = ""
    ) -> None:
        self.at, self.reached, self.incarnation = at, reached or Reached(), incarnation
        self.damage = ""
        """Why the log was not followed further: a pack is damaged, or none that this writer put."""
        self.places: dict[str, Place] = {}
        self.inventory = Inventory()
        for placed in files:
            self._add(placed)

    def _add(self, placed: Placed) -> None:
        self.places[placed.version.name] = placed.place
        self.inventory.add(placed.version)

    def apply(self, step: Step) -> None:
        """Takes over what a pack says."""
        self.lose(step.dropped)
        for placed in step.added:
            self._add(placed)
        self.at, self.reached, self.incarnation = step.at, step.reached, step.incarnation

    def lose(self, names: Iterable[str]) -> None:
        """These files are not held any more."""
        for name in names:
            if self.places.pop(name, None) is not None:
                self.inventory.discard(name)

    @contextmanager
    def as_if(self, added: Sequence[Placed], dropped: Sequence[str]) -> Iterator[None]:
        """Has the inventory be, meanwhile, what it is once a pack says this."""
        names = [*(str(placed.version.name) for placed in added), *dropped]
        before = {name: self.inventory.get(name) for name in names}
        for name in names:
            self.inventory.discard(name)
        for placed in added:
            self.inventory.add(placed.version)
        try:
            yield
        finally:
            for name, version in before.items():
                self.inventory.discard(name)
                if version is not None:
                    self.inventory.add(version)

    def placed(self, name: str) -> Placed | None:
        """Returns a file that is held; None where it is not."""
        version = self.inventory.get(name)
        return None if version is None else Placed(version, self.places[name])

    def files(self) -> Iterator[Placed]:
        """Yields what is held."""
        return (Placed(version, self.places[version.name]) for version in self.inventory)

    def in_use(self) -> dict[str, int]:
        """Returns by object how many bytes of it are held."""
        found: dict[str, int] = {}
        for placed in self.files():
            found[placed.place.object] = found.get(placed.place.object, 0) + placed.version.size_bytes
        return found


class PackBuilder:
    """Collects files for one pack, up to a size."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.versions: list[tuple[FileVersion, int]] = []

    def add(self, version: FileVersion, data: bytes) -> None:
        """Adds a file. Its bytes were compared with its digest."""
        self.versions.append((version, len(self.body)))
        self.body += data

    def placed(self, name: str) -> list[Placed]:
        """Returns the files, as they lie in the pack of this name."""
        return [Placed(version, Place(name, offset)) for version, offset in self.versions]


def encode_pack(body: bytearray, step: Step, store_id: str, node: str) -> bytearray:
    """Returns a pack: `body` is extended by what the step says."""
    fields = _head(store_id, node, step)
    small = [_small(placed) for placed in step.added if not placed.place.part_bytes]
    large = [_large(placed) for placed in step.added if placed.place.part_bytes]
    body += _sealed(fields | {"files": small, "large": large, "dropped": list(step.dropped)})
    return body


def encode_index(contents: Contents, store_id: str, node: str) -> bytes:
    """Returns the index of all that is held."""
    packs: dict[str, list[Any]] = {}
    large = []
    for placed in contents.files():
        if placed.place.part_bytes:
            large.append(_large(placed))
        else:
            packs.setdefault(placed.place.object, []).append(_small(placed))
    return _sealed(_head(store_id, node, contents) | {"packs": packs, "large": large})


def _head(store_id: str, node: str, one: Step | Contents) -> _Fields:
    return {
        "store": store_id, "node": node, "claim": one.at.claim, "number": one.at.number, "incarnation": one.incarnation,
        "epochs": dict(one.reached.epochs), "entries": one.reached.entries,
    }  # fmt: skip


def _small(placed: Placed) -> list[Any]:
    version = placed.version
    return [version.name, version.digest, version.size_bytes, placed.place.offset]


def _large(placed: Placed) -> list[Any]:
    version, place = placed.version, placed.place
    return [version.name, version.digest, version.size_bytes, place.object, place.part_bytes]


def _sealed(fields: _Fields) -> bytes:
    index = zlib.compress(canonical(fields).encode(), 6)
    prefix = _TRAILER.pack(_MAGIC, LOG_FORMAT, len(index), bytes(32))
    return index + _TRAILER.pack(_MAGIC, LOG_FORMAT, len(index), blake3(index + prefix).digest())


def index_bytes(end: bytes, where: str) -> int:
    """Returns how many bytes the index before the trailer has, which is the end of `end`. Raises CorruptionError, or
    FormatVersionError for a newer format.
    """
    with parsed("the end of a pack or an index", where):
        magic, version, size, _ = _TRAILER.unpack(end[-TRAILER_BYTES:])
    if magic != _MAGIC or size > _MOST_INDEX_BYTES:
        raise CorruptionError(f"{where}: does not end with {_MAGIC!r}; it is torn, or was changed by hand")
    if version > LOG_FORMAT:
        raise FormatVersionError(
            f"{where}: is of format {version}, this nosync knows up to {LOG_FORMAT}: upgrade nosync"
        )
    return int(size)


def _unsealed(end: bytes, where: str) -> _Fields:
    size = index_bytes(end, where)
    index = end[-TRAILER_BYTES - size : -TRAILER_BYTES]
    digest = _TRAILER.unpack(end[-TRAILER_BYTES:])[3]
    prefix = _TRAILER.pack(_MAGIC, LOG_FORMAT, size, bytes(32))
    if len(index) != size or blake3(index + prefix).digest() != digest:
        raise CorruptionError(f"{where}: its index does not match its digest; bits were flipped")
    with parsed("a pack or an index", where):
        fields: _Fields = json.loads(zlib.decompress(index))
        whole_number(fields["claim"], "claim")
        whole_number(fields["number"], "number")
    return fields


def decode_step(end: bytes, name: str, store_id: str, where: str) -> Step:
    """Returns what a pack says, given its end, with all of the index in it. Raises CorruptionError."""
    fields = _checked_store(_unsealed(end, where), store_id, where)
    with parsed("a pack", where):
        added = [_placed(path, digest, size, offset, name) for path, digest, size, offset in fields["files"]]
        added += [_placed(path, digest, size, 0, object, part) for path, digest, size, object, part in fields["large"]]
        dropped = [str(name) for name in fields["dropped"]]
        return Step(_position(fields), added, dropped, _reached(fields), str(fields["incarnation"]))


def decode_index(data: bytes, store_id: str, where: str) -> Contents:
    """Returns what an index says. Raises CorruptionError."""
    fields = _checked_store(_unsealed(data, where), store_id, where)
    with parsed("an index", where):
        files = [
            _placed(path, digest, size, offset, pack)
            for pack, listed in fields["packs"].items()
            for path, digest, size, offset in listed
        ]
        files += [_placed(path, digest, size, 0, object, part) for path, digest, size, object, part in fields["large"]]
        return Contents(_position(fields), files, _reached(fields), str(fields["incarnation"]))


def _checked_store(fields: _Fields, store_id: str, where: str) -> _Fields:
    if fields.get("store") != store_id:
        raise CorruptionError(f"{where}: is of store {fields.get('store')!r}, expected {store_id}")
    return fields


def _position(fields: _Fields) -> LogPosition:
    return LogPosition(fields["claim"], fields["number"])


def _reached(fields: _Fields) -> Reached:
    epochs = {str(timeline): whole_number(t, "epoch") for timeline, t in fields["epochs"].items()}
    return Reached(epochs, whole_number(fields["entries"], "entries"))


def _placed(path: str, digest: str, size: int, offset: int, object: str, part: int = 0) -> Placed:
    name: FileName | None = parse_name(path)
    if name is None:
        raise ValueError(f"{path!r} is no name of a store's file")
    if not _DIGEST.match(checked_digest(digest)) or not _OBJECT.match(object):
        raise ValueError(f"{path}: a digest, or an object, that none has")
    version = FileVersion(name, digest, whole_number(size, "size"))
    return Placed(version, Place(object, whole_number(offset, "offset"), whole_number(part, "part")))
