"""The bytes of a layer file, format versions 1 and 2. Drawn in docs/format.md.

Invariants
- Every byte of a file is covered by its digest: a block's bytes by that block's digest in the description, and
  head, key-group offsets, description and trailer by the digest in the trailer. One flipped bit anywhere raises.
- Equal contents give equal bytes: no clock, host or random number is written.
- Opening reads the two ends of the file. A block's bytes are verified when it is first touched, before
  Arrow parses them, because Arrow may crash on bytes that it did not write.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from blake3 import blake3

from nosync.lsm.columnar.columns import EXPIRED_COLUMN, HASH_COLUMN, TIME_COLUMN, TOMBSTONE_COLUMN
from nosync.lsm.errors import CorruptionError, FormatVersionError
from nosync.lsm.model.layer import Description, Digest, LayerId, Shard, TraceId
from nosync.lsm.model.timestamp import Time
from nosync.lsm.platform.parsing import parsed

FORMAT_VERSION = 2
_WITH_EXPIRIES = 2
"""The version of a layer with rows that expired, which earlier versions would take for deleted ones. Others have 1."""
MAGIC = b"NOSYNCLY"
HEAD_BYTES = 64
_HEAD = struct.Struct("<8sI52x")
# body length, key-group offset count, description length, format version, digest, magic
_TRAILER = struct.Struct("<QIII4x32s8s")
TRAILER_BYTES = _TRAILER.size
_DIGEST_AT = 24
assert (_HEAD.size, TRAILER_BYTES) == (HEAD_BYTES, 64)

KIND_TABLE = "table"
_PIECES_BYTES = 64 << 10
_ARROW_MAGIC_BYTES = 8


@dataclass(frozen=True)
class BlockInfo:
    """One Arrow record batch of a body: where its bytes end, what it holds, and their digest.

    The last block of a body has no rows: it is the Arrow footer.
    """

    end: int
    rows: int
    first_hash: int
    last_hash: int
    digest: str


@dataclass(frozen=True)
class LayerInfo:
    """Holds what a layer file says about itself."""

    id: LayerId
    rows: int
    tombstones: int
    key: tuple[str, ...]
    key_groups: int
    times: tuple[Time, ...]
    blocks: tuple[BlockInfo, ...]
    kind: str = KIND_TABLE
    added: Mapping[str, Time] = field(default_factory=dict, hash=False)
    """Of a merged layer: columns that not all of the layers it is made of have, and from when on they are there."""

    def to_json(self) -> bytes:
        d = self.id.description
        trace = self.id.trace
        fields = {
            "kind": self.kind,
            "stage": trace.stage,
            "fingerprint": trace.fingerprint,
            "shard": trace.shard.index,
            "shards": trace.shard.count,
            "lower": d.lower,
            "upper": d.upper,
            "since": d.since,
            "rows": self.rows,
            "tombstones": self.tombstones,
            "key": list(self.key),
            "key_groups": self.key_groups,
            "times": list(self.times),
            "blocks": [[b.end, b.rows, b.first_hash, b.last_hash, b.digest] for b in self.blocks],
        } | ({"added": dict(self.added)} if self.added else {})
        return json.dumps(fields, separators=(",", ":"), sort_keys=True).encode()

    @classmethod
    def from_json(cls, text: bytes) -> LayerInfo:
        """Raises what `parsed` takes for damage where these are not the fields of a layer."""
        f: dict[str, Any] = json.loads(text)
        trace = TraceId(_text(f["stage"]), _text(f["fingerprint"]), Shard(_count(f["shard"]), _count(f["shards"])))
        lower, upper, since = (Time(_count(f[name])) for name in ("lower", "upper", "since"))
        return cls(
            id=LayerId(trace, Description(lower, upper, since)),
            rows=_count(f["rows"]),
            tombstones=_count(f["tombstones"]),
            key=tuple(map(_text, f["key"])),
            key_groups=_count(f["key_groups"]),
            times=tuple(Time(_count(t)) for t in f["times"]),
            blocks=tuple(_block(*block) for block in f["blocks"]),
            kind=_text(f["kind"]),
            added={_text(name): Time(_count(t)) for name, t in f.get("added", {}).items()},
        )

    def check(self, body_bytes: int, offsets: npt.NDArray[np.uint64]) -> None:
        """Raises ValueError where fields contradict each other, or the sizes of what they describe."""
        ends = [0, *(block.end for block in self.blocks)]
        if len(ends) < 2 or ends != sorted(ends) or ends[-1] != body_bytes:
            raise ValueError(f"its blocks end at {ends[-3:]}, its body at {body_bytes}")
        if self.blocks[-1].rows or sum(block.rows for block in self.blocks) != self.rows or self.tombstones > self.rows:
            raise ValueError(f"it says {self.rows} rows and {self.tombstones} tombstones, and its blocks say otherwise")
        if not self.times or list(self.times) != sorted(set(self.times)):
            raise ValueError("its times are not in order")
        d = self.id.description
        if not d.lower <= self.times[0] or not self.times[-1] < max(d.upper, d.since + 1):
            raise ValueError(f"its times are not in its range {d}")
        if len(set(self.key)) != len(self.key):
            raise ValueError(f"its key {self.key} names a column twice")
        hashes = [h for block in self.blocks[:-1] for h in (block.first_hash, block.last_hash)]
        if self.key and hashes != sorted(hashes):
            raise ValueError("its blocks are not in the order of their hashes")
        if len(offsets) and (len(offsets) != self.key_groups + 1 or offsets[0] or offsets[-1] != self.rows):
            raise ValueError(f"it has {len(offsets)} offsets of {self.key_groups} key groups")
        if len(offsets) and (offsets[1:] < offsets[:-1]).any():
            raise ValueError("its offsets of key groups are not in order")


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r} is no count")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _block(end: object, rows: object, first_hash: object, last_hash: object, digest: object) -> BlockInfo:
    return BlockInfo(_count(end), _count(rows), _count(first_hash), _count(last_hash), _text(digest))


def _digest(head: bytes, offsets: bytes, description: bytes, trailer: bytes) -> bytes:
    """Returns the digest over every byte that is not in the body; the place of the digest itself counts as zeros."""
    blank = trailer[:_DIGEST_AT] + bytes(32) + trailer[_DIGEST_AT + 32 :]
    return blake3(head + offsets + description + blank).digest()


def _head(version: int) -> bytes:
    return _HEAD.pack(MAGIC, version)


class _HashingSink:
    """A write-only file object for Arrow that counts and hashes what passes through."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hasher = blake3()
        self.position = 0
        self.closed = False

    def write(self, data: bytes) -> int:
        self._hasher.update(data)
        self._file.write(data)
        self.position += len(data)
        return len(data)

    def take_digest(self) -> str:
        """Returns the digest of what was written since the last call."""
        digest = self._hasher.hexdigest()
        self._hasher = blake3()
        return digest

    def tell(self) -> int:
        return self.position

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False

    def flush(self) -> None:
        """Does nothing: the sink holds nothing back."""

    def close(self) -> None:
        self.closed = True


class LayerFileWriter:
    """Writes one layer file front to back: head, blocks in hash order, then what describes them.

    Call `write_block` any number of times, then `finish` once.
    """

    def __init__(self, file: BinaryIO, schema: pa.Schema) -> None:
        self._file = file
        self._blocks: list[BlockInfo] = []
        self._has_hashes = HASH_COLUMN in schema.names
        self._tombstone_index = schema.get_field_index(TOMBSTONE_COLUMN)
        self._tombstones = 0
        self._version = _WITH_EXPIRIES if EXPIRED_COLUMN in schema.names else 1
        file.write(_head(self._version))
        self._sink = _HashingSink(file)
        # Arrow writes a dozen pieces of a few bytes for each batch; each would be a call into Python.
        self._pieces = pa.BufferedOutputStream(pa.PythonFile(self._sink, mode="w"), _PIECES_BYTES)
        self._ipc = pa.ipc.new_file(self._pieces, schema)

    @property
    def rows(self) -> int:
        return sum(block.rows for block in self._blocks)

    @property
    def body_bytes(self) -> int:
        """Returns how much of the body was written so far."""
        return self._sink.position

    def write_block(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        self._ipc.write_batch(batch)
        self._pieces.flush()
        first = last = 0
        if self._has_hashes:
            hashes = batch.column(0)
            first, last = hashes[0].as_py(), hashes[-1].as_py()
        if self._tombstone_index >= 0:
            self._tombstones += batch.column(self._tombstone_index).true_count
        self._blocks.append(BlockInfo(self._sink.position, batch.num_rows, first, last, self._sink.take_digest()))

    def finish(
        self,
        id: LayerId,
        *,
        key: Sequence[str],
        key_groups: int,
        times: Sequence[Time],
        group_offsets: npt.NDArray[np.uint64],
        added: Mapping[str, Time] | None = None,
    ) -> tuple[LayerInfo, Digest]:
        self._ipc.close()
        self._pieces.flush()
        self._blocks.append(BlockInfo(self._sink.position, 0, 0, 0, self._sink.take_digest()))
        info = LayerInfo(
            id,
            self.rows,
            self._tombstones,
            tuple(key),
            key_groups,
            tuple(times),
            tuple(self._blocks),
            KIND_TABLE,
            added or {},
        )
        description = info.to_json()
        offsets = group_offsets.astype("<u8").tobytes()
        lengths = (self._sink.position, len(group_offsets), len(description), self._version)
        digest = _digest(_head(self._version), offsets, description, _TRAILER.pack(*lengths, bytes(32), MAGIC))
        self._file.write(offsets)
        self._file.write(description)
        self._file.write(_TRAILER.pack(*lengths, digest, MAGIC))
        self._file.flush()
        return info, Digest(digest.hex())


@dataclass(frozen=True)
class Opened:
    """A layer file whose two ends were verified: its description, digest and the still unverified body."""

    info: LayerInfo
    digest: Digest
    group_offsets: npt.NDArray[np.uint64]
    body: pa.Buffer


def decode(buffer: pa.Buffer, where: str) -> Opened:
    """Reads and verifies everything of a layer file but its body's blocks.

    `where` names the file in errors. Raises CorruptionError for anything that is not a whole layer file, and
    FormatVersionError for one that a newer version wrote.
    """
    size = buffer.size
    if size < HEAD_BYTES + TRAILER_BYTES:
        raise CorruptionError(f"{where}: {size} bytes are too few for a layer file; it is torn, not a layer")
    head = buffer.slice(0, HEAD_BYTES).to_pybytes()
    magic, head_version = _HEAD.unpack(head)
    trailer = buffer.slice(size - TRAILER_BYTES, TRAILER_BYTES).to_pybytes()
    body_bytes, offset_count, description_bytes, version, digest, end_magic = _TRAILER.unpack(trailer)
    if magic != MAGIC or end_magic != MAGIC:
        raise CorruptionError(f"{where}: does not begin and end with {MAGIC!r}; it is torn, or not a layer")
    if version != head_version:
        raise CorruptionError(f"{where}: its head says format {head_version}, its trailer says {version}")
    if version > FORMAT_VERSION:
        raise FormatVersionError(
            f"{where}: written in layer format {version}, this nosync reads up to {FORMAT_VERSION}: upgrade nosync"
        )
    if HEAD_BYTES + body_bytes + 8 * offset_count + description_bytes + TRAILER_BYTES != size:
        raise CorruptionError(f"{where}: {size} bytes, but its trailer describes another length; it is torn")
    offsets_at = HEAD_BYTES + body_bytes
    description_at = offsets_at + 8 * offset_count
    offsets = buffer.slice(offsets_at, 8 * offset_count)
    description = buffer.slice(description_at, description_bytes).to_pybytes()
    if _digest(head, offsets.to_pybytes(), description, trailer) != digest:
        raise CorruptionError(
            f"{where}: its description does not match its digest {digest.hex()[:16]}…; bits were flipped"
        )
    with parsed("a layer, whose description fits it", where):
        info, group_offsets = LayerInfo.from_json(description), np.frombuffer(offsets, dtype="<u8")
        if info.kind != KIND_TABLE:
            raise FormatVersionError(
                f"{where}: is a layer of kind {info.kind!r}, this nosync reads {KIND_TABLE!r}: upgrade nosync"
            )
        info.check(body_bytes, group_offsets)
    opened = Opened(info, Digest(digest.hex()), group_offsets, buffer.slice(HEAD_BYTES, body_bytes))
    # The footer and the schema are parsed as soon as the body is opened, so they are verified now.
    verify_block(opened, len(opened.info.blocks) - 1, where)
    return opened


def opened_from(end: bytes, size: int) -> int:
    """Returns from where on the bytes of a layer file are needed to open it, beside its head; a number below where `end`
    begins where more of it is needed to say so.

    `end`: the last bytes of a file of `size` bytes, the trailer at least. What does not make sense is left to `decode`.
    """
    begin = size - len(end)
    body_bytes, offset_count, description_bytes, *_ = _TRAILER.unpack(end[-TRAILER_BYTES:])
    description_at = HEAD_BYTES + body_bytes + 8 * offset_count
    if not begin <= HEAD_BYTES + body_bytes <= description_at <= size - TRAILER_BYTES:
        return int(min(HEAD_BYTES + body_bytes, begin))
    with contextlib.suppress(ValueError, KeyError, TypeError, IndexError):
        blocks = json.loads(end[description_at - begin : description_at - begin + description_bytes])["blocks"]
        return HEAD_BYTES + (int(blocks[-2][0]) if len(blocks) > 1 else 0)
    return begin


def verify_block(opened: Opened, index: int, where: str) -> None:
    """Raises CorruptionError unless the bytes of block `index` have the digest that the description gives."""
    blocks = opened.info.blocks
    start = blocks[index - 1].end if index else 0
    data = opened.body.slice(start, blocks[index].end - start)
    if blake3(data).hexdigest() != blocks[index].digest:
        what = f"block {index} of {len(blocks) - 1}" if blocks[index].rows else "the Arrow footer"
        raise CorruptionError(
            f"{where}: {what} does not match its digest; bits were flipped in {opened.info.id} (recover() restores it)"
        )


def open_body(opened: Opened, where: str) -> pa.ipc.RecordBatchFileReader:
    """Returns the Arrow file in a layer. Raises CorruptionError where its footer describes another one."""
    with parsed("a layer, whose body is an Arrow file", where):
        file = pa.ipc.open_file(opened.body)
        if file.num_record_batches != len(opened.info.blocks) - 1:
            raise ValueError(f"it has {file.num_record_batches} batches, {len(opened.info.blocks) - 1} were expected")
        for field in file.schema:  # Arrow does not look at the texts in a schema before somebody asks for them
            _ = field.name, str(field.type)
    return file


def read_checked(opened: Opened, file: pa.ipc.RecordBatchFileReader, index: int, where: str) -> pa.RecordBatch:
    """Returns block `index`, whose digest was verified, checked as if a stranger had written it.

    Arrow trusts offsets in a batch, and would read beyond its buffers. So this looks at all of them, at every
    character, and at what the description says of the block. Raises CorruptionError.
    """
    info, block = opened.info, opened.info.blocks[index]
    start = info.blocks[index - 1].end if index else _ARROW_MAGIC_BYTES
    with parsed(f"a layer: its block {index} has its digest and is none", where):
        # Not by the footer, which may say that the batch is elsewhere.
        messages = pa.ipc.MessageReader.open_stream(opened.body.slice(start, block.end - start))
        message = messages.read_next_message()
        if index == 0 and message.type == "schema":
            message = messages.read_next_message()
        if message.type != "record batch":
            raise ValueError(f"it is a message of another type, {message.type}")
        if _is_compressed(message.metadata):
            raise ValueError("it is compressed, as no layer is: what it stands for may not fit into memory")
        batch = pa.ipc.read_record_batch(message, file.schema)
        if batch.num_rows != block.rows:
            raise ValueError(f"it has {batch.num_rows} rows, its description says {block.rows}")
        batch.validate(full=True)
        _check_columns(batch, info, block)
    return batch


def _is_compressed(metadata: pa.Buffer) -> bool:
    """Returns whether an Arrow record batch says that its buffers are compressed, which pyarrow does not tell before it
    unpacks them.

    Field 2 of the flatbuffer table `Message` is its header, field 3 of `RecordBatch` the compression (Arrow's
    Message.fbs).
    """
    data = metadata.to_pybytes()
    message = struct.unpack_from("<I", data, 0)[0]
    header = _field_of(data, message, 2)
    return header is None or _field_of(data, header + struct.unpack_from("<I", data, header)[0], 3) is not None


def _field_of(data: bytes, table: int, index: int) -> int | None:
    """Returns where a field of a flatbuffer table lies; None where it is not set."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    if vtable < 0 or 4 + 2 * index + 2 > struct.unpack_from("<H", data, vtable)[0]:
        return None
    offset = struct.unpack_from("<H", data, vtable + 4 + 2 * index)[0]
    return table + offset if offset else None


def _check_columns(batch: pa.RecordBatch, info: LayerInfo, block: BlockInfo) -> None:
    """Raises ValueError or KeyError where a block's columns are not those that the description promises."""
    names = batch.schema.names
    if len(set(names)) != len(names):
        raise ValueError("two columns have one name")
    for name in (*info.key, *info.added):
        batch.column(name)
    if info.key:
        hashes = _bookkeeping(batch, HASH_COLUMN, pa.uint32())
        if (hashes[1:] < hashes[:-1]).any() or (hashes[0], hashes[-1]) != (block.first_hash, block.last_hash):
            raise ValueError("its hashes are not in order, or are not those of its description")
    if TIME_COLUMN in names:
        times = batch.column(TIME_COLUMN)
        if not pa.types.is_unsigned_integer(times.type) or times.null_count:
            raise ValueError(f"its times are {times.type}")
        if times.to_numpy().max(initial=0) >= len(info.times):
            raise ValueError("it has a time that the description does not have")
    elif len(info.times) > 1:
        raise ValueError("its rows have no times, and the description has several")
    if TOMBSTONE_COLUMN in names and batch.column(TOMBSTONE_COLUMN).type != pa.bool_():
        raise ValueError("its tombstones are no booleans")
    if EXPIRED_COLUMN in names and (TOMBSTONE_COLUMN not in names or batch.column(EXPIRED_COLUMN).type != pa.bool_()):
        raise ValueError("its expiries are no booleans beside tombstones")


def _bookkeeping(batch: pa.RecordBatch, name: str, type_: pa.DataType) -> npt.NDArray[Any]:
    column = batch.column(name)
    if column.type != type_ or column.null_count:
        raise ValueError(f"{name} is {column.type} with {column.null_count} nulls")
    found: npt.NDArray[Any] = column.to_numpy()
    return found
