"""The names of the files of a Structured Streaming checkpoint, and what each says.

Layout, as Spark 2.3 to 4.3 write it, relative to the checkpoint's directory:

    metadata                                                  the id of the query
    offsets/<batch>                                           what the batch reads, written before it runs
    commits/<batch>                                           written when the batch is done
    sources/<source>/<n>                                      the log of a file source, or where a source began
    sources/<source>/<n>.compact                              stands for the entries of that log up to n
    state/<op>/_metadata/metadata                             how many partitions and stores an operator has
    state/<op>/_metadata/v2/<batch>                           the same for transformWithState
    state/<op>/_stateSchema/<store>/<batch>_<id>              its schemas
    state/<op>/<part>/[<store>/]_metadata/schema              the schema of a state store
    state/<op>/<part>/[<store>/]<version>[_<id>].<form>       the state of a store, or what a batch changed in it
    state/<op>/<part>/[<store>/]SSTs/<file>, logs/<file>      what a RocksDB snapshot is made of

A source is called by its place in the query, or by the name that the query gives it (Spark 4.2 and later). The state
after batch `t` has version `t + 1`. Forms are `delta` and `snapshot` (HDFS-backed), `changelog` and `zip`
(RocksDB). With format v2 the name has the id of the attempt that wrote the file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import NewType

Batch = NewType("Batch", int)
"""The number of a micro-batch, from 0."""

METADATA = "metadata"
CRC_SUFFIX = ".crc"
_STATE = re.compile(r"(?P<version>\d{1,18})(?:_(?P<id>[0-9A-Za-z-]{1,64}))?\.(?P<form>delta|snapshot|changelog|zip)\Z")
_NUMBER = re.compile(r"(?:0|[1-9]\d{0,17})\Z")
_SOURCE = re.compile(r"[0-9A-Za-z_]{1,255}\Z")
_LOG_ENTRY = re.compile(r"(?P<number>\d{1,18})(?P<compact>\.compact)?\Z")
_MOST_NAME = 1024


class Form(Enum):
    """What a file of a state store holds."""

    DELTA = "delta"
    SNAPSHOT = "snapshot"
    CHANGELOG = "changelog"
    ZIP = "zip"

    @property
    def is_base(self) -> bool:
        """Returns whether the file holds the whole state, so that no earlier version is needed."""
        return self in (Form.SNAPSHOT, Form.ZIP)


@dataclass(frozen=True, order=True)
class StoreId:
    """One state store: an operator, a partition, and the name that a store beside others of the operator has."""

    operator: int
    partition: int
    name: str = ""

    @property
    def directory(self) -> str:
        """The directory of the store, relative to the checkpoint."""
        return f"state/{self.operator}/{self.partition}" + (f"/{self.name}" if self.name else "")


@dataclass(frozen=True)
class StateFile:
    """A file of a state store. `id` is that of the attempt that wrote it; None where names have none."""

    path: str
    store: StoreId
    version: int
    id: str | None
    form: Form


@dataclass(frozen=True)
class StorePart:
    """A file that a RocksDB snapshot names: an SST file, or a log of RocksDB."""

    path: str
    store: StoreId


@dataclass(frozen=True)
class BatchFile:
    """An entry of `offsets` or of `commits`."""

    path: str
    log: str
    batch: Batch


@dataclass(frozen=True)
class SourceFile:
    """An entry of the log of a source. `is_compact`: it stands for all entries up to `number`."""

    path: str
    source: str
    number: int
    is_compact: bool


@dataclass(frozen=True)
class OperatorFile:
    """What an operator says of itself: metadata and schemas. `batch`: since when it holds; None: always."""

    path: str
    operator: int
    batch: int | None


@dataclass(frozen=True)
class OtherFile:
    """A file of another name. A query is given it whatever the batch."""

    path: str


CheckpointFile = StateFile | StorePart | BatchFile | SourceFile | OperatorFile | OtherFile


def is_kept(path: str) -> bool:
    """Returns whether a file of a checkpoint is kept: not if it is hidden, temporary, or no name that Spark gives.

    Hadoop's side files (`.x.crc`) are hidden. They are renamed apart from their files, so a kill in between leaves two
    that do not fit, and Spark does without them.
    """
    parts = path.split("/")
    return (
        len(path) <= _MOST_NAME
        and all(part not in ("", ".", "..") and not part.startswith(".") for part in parts)
        and not parts[-1].endswith(".tmp")
        and path.isprintable()
    )


def never_empty(path: str) -> bool:
    """Returns whether Spark writes something into a file of this name at all times."""
    return path == METADATA or isinstance(parse(path), BatchFile | SourceFile | StateFile | OperatorFile)


def parse(path: str) -> CheckpointFile:
    """Returns what a name says. `path` is relative to the checkpoint, and without `.crc` at its end."""
    parts = path.split("/")
    match parts:
        case ["offsets" | "commits", number] if _NUMBER.match(number):
            return BatchFile(path, parts[0], Batch(int(number)))
        case ["sources", source, entry] if _SOURCE.match(source) and (found := _LOG_ENTRY.match(entry)):
            return SourceFile(path, source, int(found["number"]), found["compact"] is not None)
        case ["state", operator, "_metadata" | "_stateSchema", *rest] if _NUMBER.match(operator) and rest:
            return OperatorFile(path, int(operator), _batch_of(rest, is_metadata=parts[2] == "_metadata"))
        case ["state", operator, partition, *rest] if _NUMBER.match(operator) and _NUMBER.match(partition) and rest:
            return _in_store(path, int(operator), int(partition), rest)
    return OtherFile(path)


def _batch_of(rest: list[str], *, is_metadata: bool) -> int | None:
    """Returns the batch in the name of an operator's file: `v2/<batch>`, or `<store>/<batch>_<id>`."""
    if is_metadata and rest[0] != "v2":
        return None
    number = rest[-1].partition("_")[0]
    return int(number) if _NUMBER.match(number) else None


def _in_store(path: str, operator: int, partition: int, rest: list[str]) -> CheckpointFile:
    """Returns what a name in the directory of a partition says."""
    if rest[-2:-1] == ["_metadata"]:
        return OperatorFile(path, operator, None)
    is_part = len(rest) > 1 and rest[-2] in ("SSTs", "logs")
    within = rest[:-2] if is_part else rest[:-1]
    if len(within) > 1:
        return OtherFile(path)
    store = StoreId(operator, partition, "".join(within))
    if is_part:
        return StorePart(path, store)
    found = _STATE.match(rest[-1])
    if found is None:
        return OtherFile(path)
    return StateFile(path, store, int(found["version"]), found["id"], Form(found["form"]))
