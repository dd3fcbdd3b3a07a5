"""The small files of a checkpoint that say what others are needed: offsets, commits, metadata of operators, snapshots.

Each reader takes bytes and a name, and raises CorruptionError where the bytes are none that Spark writes. Nothing is
believed beyond what is checked here: a checkpoint may be that of somebody else.
"""

from __future__ import annotations

import io
import json
import re
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from nosync.checkpoints.names import StoreId
from nosync.lsm.errors import CorruptionError
from nosync.lsm.platform.parsing import parsed

_MOST_SNAPSHOT_TEXT_BYTES = 64 << 20
"""The text of a snapshot has a few hundred bytes for each SST file."""
_FILE_LOG = {"logOffset"}
HEAD_BYTES = 1 << 17
"""So much of a changelog is read for its lineage."""
_LINEAGE_BYTES = 1 << 16
"""The longest text that Java writes with its length in two bytes."""
_ZSTD_MAGIC, _LZ4_MAGIC = b"\x28\xb5\x2f\xfd", b"LZ4Block"
_LZ4_HEAD_BYTES, _LZ4_STORED = 21, 0x10
"""Of a block of lz4-java's LZ4BlockOutputStream: magic, token, two sizes and a checksum."""
_MOST_BLOCK_BYTES = 32 << 20


@dataclass(frozen=True)
class Commit:
    """What `commits/<batch>` says. `ids`: by operator and partition, the ids of the files of the batch's states.

    The ids are there with format v2 alone; else the mapping is empty.
    """

    ids: Mapping[tuple[int, int], frozenset[str]]


_SCHEMA_FILE = re.compile(r"/(state/\d+/_stateSchema/[^/]+/[^/]+)$")
"""The name of a file of schemas, at the end of where it was when it was written."""
_OF_SOURCE = re.compile(r"(?P<name>[0-9A-Za-z_]{1,255}):")


@dataclass(frozen=True)
class Offsets:
    """What `offsets/<batch>` says.

    `log_ends`: by the place, or the name, of a file source, the last entry of its log that the batch reads; -1 before the first.
    `partitions`: how many partitions the state has; None where the file does not say.
    """

    log_ends: Mapping[str, int]
    partitions: int | None


@dataclass(frozen=True)
class PartFile:
    """A file that a RocksDB snapshot is made of, relative to the directory of its store."""

    name: str
    size_bytes: int


def read_query(data: bytes, where: str) -> str:
    """Reads `metadata`: JSON with the id of the query."""
    with parsed("the metadata of a query", where):
        return str(json.loads(data)["id"])


def read_commit(data: bytes, where: str) -> Commit:
    """Reads `commits/<batch>`: a line with the version, then JSON."""
    with parsed("a commit", where):
        fields = _json_after_version(data)
        ids: dict[tuple[int, int], frozenset[str]] = {}
        for operator, partitions in (fields.get("stateUniqueIds") or {}).items():
            for partition, stores in enumerate(partitions):
                ids[int(operator), partition] = frozenset(map(str, stores))
        return Commit(ids)


def read_offsets(data: bytes, where: str) -> Offsets:
    """Reads `offsets/<batch>`: a line with the version, a line of JSON on the query, then a line for each source: with its name
    before it since version 2.
    """
    with parsed("offsets", where):
        lines = _lines(data)
        # A query of a continuous trigger leaves the line empty.
        conf = (json.loads(lines[1] or "{}") if len(lines) > 1 else {}).get("conf") or {}
        partitions = conf.get("spark.sql.shuffle.partitions")
        ends: dict[str, int] = {}
        for place, line in enumerate(lines[2:]):
            named = _OF_SOURCE.match(line) if int(lines[0][1:]) > 1 else None
            source, text = (named["name"], line[named.end() :]) if named else (str(place), line)
            offset = _json_or_none(text)
            if isinstance(offset, dict) and set(offset) == _FILE_LOG:
                ends[source] = int(offset["logOffset"])
        return Offsets(ends, None if partitions is None else int(partitions))


@dataclass(frozen=True)
class Operator:
    """What the metadata of an operator says."""

    stores: list[StoreId]
    """Each name in each partition."""
    schemas: list[str]
    """The names of the files that have the schemas of its states. They are there of states with several columns families."""


def read_operator(data: bytes, where: str, operator: int) -> Operator:
    """Reads the metadata of an operator."""
    with parsed("an operator's metadata", where):
        found: list[StoreId] = []
        schemas: list[str] = []
        for info in _json_after_version(data)["stateStoreInfo"]:
            name, partitions = str(info["storeName"]), int(info["numPartitions"])
            if not 0 < partitions <= 1 << 20:
                raise ValueError(f"{partitions} partitions")
            found += [StoreId(operator, part, "" if name == "default" else name) for part in range(partitions)]
            named = (_SCHEMA_FILE.search(str(path)) for path in info.get("stateSchemaFilePaths") or ())
            schemas += [match[1] for match in named if match is not None]
        return Operator(found, schemas)


def read_variables(data: bytes, where: str) -> list[str]:
    """Reads the metadata of an operator, and returns the state variables of users that it has; none of other operators."""
    with parsed("an operator's metadata", where):
        said = json.loads(_json_after_version(data).get("operatorPropertiesJson") or "{}")
        names = [str(variable["stateName"]) for variable in said.get("stateVariables") or ()]
        return [name for name in names if not name.startswith("$")]


def read_snapshot(data: bytes, where: str) -> list[PartFile]:
    """Reads the zip file of a RocksDB snapshot, and returns the files beside it that it needs.

    The zip file has an entry `metadata`: a line with the version, then JSON that names SST files and logs with sizes.
    """
    with parsed("a RocksDB snapshot", where):
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                entry = archive.getinfo("metadata")
                if entry.file_size > _MOST_SNAPSHOT_TEXT_BYTES:
                    raise ValueError(f"its metadata has {entry.file_size:,} bytes")
                text = archive.read(entry)
        except (zipfile.BadZipFile, NotImplementedError, EOFError) as error:
            raise CorruptionError(f"{where}: is not a whole zip file: {error}") from error
        fields = _json_after_version(text)
        found = [_part("SSTs", file["dfsSstFileName"], file["sizeBytes"]) for file in fields.get("sstFiles") or ()]
        return found + [
            _part("logs", file["dfsLogFileName"], file["sizeBytes"]) for file in fields.get("logFiles") or ()
        ]


def read_lineage(head: bytes, where: str) -> dict[int, str] | None:
    """Reads the first bytes of a changelog of format v2: which files of the versions before it goes on from, by version.

    The first of them is a snapshot, unless it is version 1. Returns None for a changelog that says nothing of it, or that
    is compressed by a codec which cannot be read here. The text comes first in the file: `v3` and JSON, each after its
    length in two bytes.
    """
    with parsed("a changelog", where):
        data = _first_bytes(head)
        if data is None or data[:2] != b"\x00\x02" or data[2:3] != b"v" or data[3:4] in (b"1", b"2"):
            return None
        length = int.from_bytes(data[4:6], "big")
        items = json.loads(data[6 : 6 + length])
        return {int(item["version"]): str(item["checkpointUniqueId"]) for item in items}


def _first_bytes(head: bytes) -> bytes | None:
    """Returns what the first bytes of a compressed file stand for; None where the codec is none that is known here."""
    if head.startswith(_ZSTD_MAGIC):
        with pa.CompressedInputStream(pa.BufferReader(head), "zstd") as stream:
            return bytes(stream.read(_LINEAGE_BYTES))
    if not head.startswith(_LZ4_MAGIC):
        return None
    found = b""
    while len(found) < _LINEAGE_BYTES and head.startswith(_LZ4_MAGIC):
        token, packed, size = struct.unpack_from("<BII", head, len(_LZ4_MAGIC))
        body = head[_LZ4_HEAD_BYTES : _LZ4_HEAD_BYTES + packed]
        if size > _MOST_BLOCK_BYTES or len(body) < packed:
            break
        found += body if token & 0xF0 == _LZ4_STORED else pa.decompress(body, size, codec="lz4_raw", asbytes=True)
        head = head[_LZ4_HEAD_BYTES + packed :]
    return found


def _part(directory: str, name: str, size_bytes: int) -> PartFile:
    if "/" in name or name in ("", ".", ".."):
        raise ValueError(f"a file called {name!r}")
    return PartFile(f"{directory}/{name}", int(size_bytes))


def _lines(data: bytes) -> list[str]:
    lines = data.decode().split("\n")
    if not lines[0].startswith("v") or not lines[0][1:].isascii() or not lines[0][1:].isdecimal():
        raise ValueError(f"its first line is {lines[0][:20]!r}, and not a version such as 'v1'")
    return lines


def _json_after_version(data: bytes) -> dict[str, Any]:
    lines = _lines(data)
    text = "\n".join(lines[1:]).strip()
    found = json.loads(text) if text and text != "{}" else {}
    if not isinstance(found, dict):
        raise TypeError("it has no JSON object after the version")
    return found


def _json_or_none(line: str) -> object:
    """Returns what a line says as JSON; None for another text: sources write what they like."""
    try:
        found: object = json.loads(line)
    except ValueError:
        return None
    return found
