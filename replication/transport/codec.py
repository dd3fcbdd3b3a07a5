"""The protocol's messages as frames of protobuf, and back. What comes from outside is checked here, before anything
uses it.
"""

from __future__ import annotations

import dataclasses
import errno
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO, TypeVar

import zstandard

from nosync.lsm.errors import ReplicationError
from nosync.lsm.model.timestamp import MAX_EPOCH, is_number
from nosync.lsm.platform.env import MOST_SMALL_BYTES
from nosync.lsm.platform.layout import CHECKPOINTS
from nosync.lsm.platform.opaque import checkpoint_of
from nosync.lsm.status import LayerStatus
from nosync.proto.v1 import replication_pb2 as pb
from nosync.replication.protocol.file_names import FileName, FileVersion, parse_name
from nosync.replication.protocol.messages import (
    Change,
    FileRequest,
    Have,
    Heartbeat,
    Hello,
    InventoryRequest,
    Message,
    NotFound,
    Summary,
    Want,
)
from nosync.replication.protocol.placement import NodeId

T = TypeVar("T")
CHUNK_BYTES = 1 << 20
MAX_FRAME_BYTES = 8 << 20
HELD_PER_FRAME = 1_000
LARGEST_FILE_BYTES = 1 << 40
"""Of a layer, and of a file of a checkpoint; of all else MOST_SMALL_BYTES, because it is read whole."""
MOST_NAMES = 4_000_000
"""Of one inventory, which comes in as many frames as it takes."""
MOST_INVENTORY_BYTES = 256 << 20
"""Of all these frames: more than a million names."""
MOST_GROUPS_ASKED = 4_000
"""In one question: twice as many as nodes of any version ask for at once."""
_LARGEST_SMALL_BYTES = 32 << 10
_SAMPLES = 64
_DICTIONARY_BYTES = 8 << 10
_ZSTD_LEVEL = 1
_TIMES = ("lower", "upper", "since")
"""Of a listed layer, the fields that are an epoch, or the text of a round in one."""
_NODE = re.compile(r"[a-z0-9_-]{1,64}\Z")
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
_INCARNATION = re.compile(r"[0-9a-zA-Z_-]{1,64}\Z")
_LINE = re.compile(r"[a-z0-9_-]{1,64}\Z")
_GROUP = re.compile(r"[a-z0-9_/-]{1,400}\Z")
_ROOT = re.compile(r"[0-9]{1,19}:[0-9a-f]{1,32}\Z")


@dataclass(frozen=True)
class Chunk:
    """Holds a piece of a file."""

    held: FileVersion
    offset: int
    data: bytes


def check_node_id(text: str) -> NodeId:
    """Raises ReplicationError for what cannot be a node's id."""
    if not _NODE.match(text):
        raise ReplicationError(f"{text!r} is not a node id: expected 1 to 64 of a-z, 0-9, _ and -")
    return NodeId(text)


# --- out --------------------------------------------------------------------------------------------------------------


class Encoder:
    """Encodes messages and files of one session as frames."""

    def __init__(self) -> None:
        self._zip = self._zip_small = _compressor()
        self._samples: list[bytes | bytearray | memoryview[int]] | None = []  # None: learned from

    def frames(self, message: Message) -> Iterator[pb.Frame]:
        """Returns a message as one frame, or for a large inventory as several."""
        if isinstance(message, Have):
            for part, last in _parts(message.held):
                groups = message.groups if last else ()
                inventory = pb.Inventory(seq=message.seq, held=map(_held, part), last=last, groups=groups)
                yield pb.Frame(inventory=inventory)
        elif isinstance(message, Summary):
            for some, last in _parts(message.groups):
                roots = [pb.Group(name=name, root=root) for name, root in some]
                yield pb.Frame(summary=pb.Summary(seq=message.seq, groups=roots, last=last))
        else:
            yield _frame(message)

    def chunks(self, request: FileRequest, file: BinaryIO) -> Iterator[pb.Frame]:
        """Returns a file in pieces. Where one does not compress well, the rest is not tried. Raises OSError where it
        ends early.
        """
        held, offset, pays = request.held, request.offset, True
        file.seek(offset)
        is_small = held.size_bytes <= _LARGEST_SMALL_BYTES
        while True:  # an empty file is one empty piece
            data = file.read(min(CHUNK_BYTES, held.size_bytes - offset))
            if not data and offset < held.size_bytes:
                raise OSError(errno.EIO, f"the file ends after {offset} of {held.size_bytes} bytes")
            if is_small:
                yield from self._learned_from(data)
            packed = (self._zip_small if is_small else self._zip).compress(data) if pays else b""
            pays = 0 < len(packed) < len(data) * 3 // 4
            yield pb.Frame(
                chunk=pb.Chunk(
                    name=held.name,
                    digest=held.digest,
                    offset=offset,
                    size_bytes=held.size_bytes,
                    data=packed if pays else data,
                    zstd=pays,
                )
            )
            offset += len(data)
            if offset >= held.size_bytes:
                return

    def _learned_from(self, data: bytes) -> Iterator[pb.Frame]:
        """Yields a dictionary of what small files have in common, once enough of them went over."""
        if self._samples is None:
            return
        self._samples.append(data)
        if len(self._samples) < _SAMPLES:
            return
        samples, self._samples = self._samples, None
        try:
            trained = zstandard.train_dictionary(_DICTIONARY_BYTES, samples)
        except zstandard.ZstdError:
            return  # they have nothing in common
        self._zip_small = _compressor(trained)
        yield pb.Frame(dictionary=pb.Dictionary(data=trained.as_bytes()))


def _compressor(dictionary: zstandard.ZstdCompressionDict | None = None) -> zstandard.ZstdCompressor:
    return zstandard.ZstdCompressor(
        level=_ZSTD_LEVEL, dict_data=dictionary, write_content_size=True, write_checksum=True
    )


def _parts(items: tuple[T, ...]) -> Iterator[tuple[tuple[T, ...], bool]]:
    """Yields pieces that fit into a frame, at least one, and whether it is the last."""
    for first in range(0, max(1, len(items)), HELD_PER_FRAME):
        yield items[first : first + HELD_PER_FRAME], first + HELD_PER_FRAME >= len(items)


def _frame(message: Message) -> pb.Frame:
    if isinstance(message, Change):
        return pb.Frame(change=pb.Change(seq=message.seq, added=map(_held, message.added), gone=message.gone))
    if isinstance(message, Heartbeat):
        return pb.Frame(beat=pb.Beat(seq=message.seq, root=message.root, safe=dict(message.safe)))
    if isinstance(message, Want):
        offsets = [request.offset for request in message.files]
        files = [_held(request.held) for request in message.files]
        return pb.Frame(want=pb.Want(files=files, offsets=offsets if any(offsets) else ()))
    if isinstance(message, NotFound):
        return pb.Frame(not_there=pb.NotThere(name=message.name))
    if isinstance(message, InventoryRequest):
        return pb.Frame(ask_inventory=pb.AskInventory(groups=message.groups))
    assert isinstance(message, Hello), "an inventory and a summary are several frames"
    return pb.Frame(
        hello=pb.Hello(
            node=message.node,
            incarnation=message.incarnation,
            store_id=message.store_id,
            replicas=message.replicas,
            version=message.version,
            key_groups=message.key_groups,
            process=message.process,
        )
    )


def _held(held: FileVersion) -> pb.Held:
    return pb.Held(name=held.name, digest=held.digest, size_bytes=held.size_bytes)


# --- in ---------------------------------------------------------------------------------------------------------------


class Decoder:
    """Decodes the frames of one session into messages. Raises ReplicationError for anything that a node would not send."""

    def __init__(self) -> None:
        self._parts: list[FileVersion] = []
        self._groups: list[tuple[str, str]] = []
        self._parts_bytes = 0
        self._unzip = self._unzip_small = zstandard.ZstdDecompressor()

    def decode(self, frame: pb.Frame) -> Message | Chunk | None:
        """Returns what a frame says; None for a part of an inventory whose last part is still to come."""
        kind = frame.WhichOneof("kind")
        if kind == "chunk":
            return self._chunk(frame.chunk)
        if kind in ("inventory", "summary"):
            return self._in_parts(frame)
        if kind == "dictionary":
            self._learn(frame.dictionary.data)
            return None
        if kind == "change":
            gone = tuple(check_name(name) for name in frame.change.gone)
            return Change(frame.change.seq, tuple(_checked(held) for held in frame.change.added), gone)
        if kind == "beat":
            safe = tuple(sorted(frame.beat.safe.items()))
            if not all(_LINE.match(line) and t <= MAX_EPOCH for line, t in safe):
                raise ReplicationError("a Beat with a timeline or an epoch that none can be")
            return Heartbeat(frame.beat.seq, frame.beat.root, safe)
        if kind == "want":
            return _want(frame.want)
        if kind == "not_there":
            return NotFound(check_name(frame.not_there.name))
        if kind == "ask_inventory":
            return InventoryRequest(_groups(frame.ask_inventory.groups))
        if kind == "hello":
            hello = frame.hello
            named = [hello.incarnation, hello.store_id, *([hello.process] if hello.process else [])]
            if not all(map(_INCARNATION.match, named)):
                raise ReplicationError("a Hello with an incarnation, store id or process that none can be")
            return Hello(
                check_node_id(hello.node), hello.incarnation, hello.store_id, hello.replicas, hello.version,
                hello.key_groups, hello.process,
            )  # fmt: skip
        raise ReplicationError("a frame of no kind that this version knows")

    def _learn(self, data: bytes) -> None:
        if len(data) > _DICTIONARY_BYTES:
            raise ReplicationError(f"a dictionary of {len(data)} bytes, at most {_DICTIONARY_BYTES} are sent")
        try:
            self._unzip_small = zstandard.ZstdDecompressor(
                dict_data=zstandard.ZstdCompressionDict(data, dict_type=zstandard.DICT_TYPE_FULLDICT)
            )
        except (zstandard.ZstdError, ValueError) as error:
            raise ReplicationError(f"a dictionary that is none: {error}") from error

    def _in_parts(self, frame: pb.Frame) -> Have | Summary | None:
        if len(self._parts) + len(self._groups) > MOST_NAMES:
            raise ReplicationError(f"an inventory that goes on after {MOST_NAMES:,} names")
        self._parts_bytes += frame.ByteSize()
        if self._parts_bytes > MOST_INVENTORY_BYTES:
            raise ReplicationError(f"an inventory of more than {MOST_INVENTORY_BYTES:,} bytes")
        if frame.WhichOneof("kind") == "inventory":
            self._parts += [_checked(held) for held in frame.inventory.held]
            if not frame.inventory.last:
                return None
            parts, self._parts, self._parts_bytes = self._parts, [], 0
            return Have(frame.inventory.seq, _groups(frame.inventory.groups), tuple(parts))
        self._groups += [(check_group(group.name), _checked_root(group.root)) for group in frame.summary.groups]
        if not frame.summary.last:
            return None
        roots, self._groups, self._parts_bytes = self._groups, [], 0
        return Summary(frame.summary.seq, tuple(roots))

    def _chunk(self, chunk: pb.Chunk) -> Chunk:
        held = _checked(pb.Held(name=chunk.name, digest=chunk.digest, size_bytes=chunk.size_bytes))
        data = chunk.data
        if chunk.zstd:
            try:
                size = zstandard.frame_content_size(data)
                if not 0 <= size <= CHUNK_BYTES:
                    raise ReplicationError(
                        f"{held.name}: a compressed piece of {size} bytes, at most {CHUNK_BYTES} are sent"
                    )
                unzip = self._unzip_small if held.size_bytes <= _LARGEST_SMALL_BYTES else self._unzip
                data = unzip.decompress(data, max_output_size=CHUNK_BYTES)
            except zstandard.ZstdError as error:
                raise ReplicationError(f"{held.name}: a piece that is no frame of zstandard: {error}") from error
        if len(data) > CHUNK_BYTES or chunk.offset + len(data) > held.size_bytes:
            raise ReplicationError(
                f"{held.name}: a piece beyond the end of the file, or larger than {CHUNK_BYTES} bytes"
            )
        return Chunk(held, chunk.offset, data)


def _want(want: pb.Want) -> Want:
    offsets = list(want.offsets) or [0] * len(want.files)
    files = [_checked(held) for held in want.files]
    if len(offsets) != len(files) or any(o and o >= held.size_bytes for o, held in zip(offsets, files, strict=False)):
        raise ReplicationError("files that are wanted from beyond their ends")
    return Want(tuple(map(FileRequest, files, offsets)))


def check_group(name: str) -> str:
    """Raises ReplicationError for what is not the name of a directory that files are in."""
    # The directory of a checkpoint has the names of what could be in it.
    if not _GROUP.match(name) and (not name.startswith(f"{CHECKPOINTS}/") or checkpoint_of(f"{name}/0") is None):
        raise ReplicationError(f"{name[:200]!r} is not the name of a group of files")
    return name


def _groups(names: Sequence[str]) -> tuple[str, ...]:
    """Checks the groups that one message asks for or tells of: each is named once, or one could be answered any number
    of times.
    """
    if len(names) > MOST_GROUPS_ASKED:
        raise ReplicationError(f"{len(names):,} groups of files at once, at most {MOST_GROUPS_ASKED:,} are asked for")
    if len(set(names)) < len(names):
        raise ReplicationError("a group of files that is named twice in one message")
    return tuple(check_group(name) for name in names)


def _checked_root(root: str) -> str:
    if not _ROOT.match(root):
        raise ReplicationError(f"{root[:200]!r} is not the hash of a group of files")
    return root


def _checked(held: pb.Held) -> FileVersion:
    name = check_name(held.name)
    most_bytes = LARGEST_FILE_BYTES if name.layer is not None or name.is_opaque else MOST_SMALL_BYTES
    if not _DIGEST.match(held.digest) or held.size_bytes > most_bytes:
        raise ReplicationError(f"{name!r}: a digest or a size that no file has")
    return FileVersion(name, held.digest, held.size_bytes)


def is_name(text: str) -> bool:
    """Returns whether a store writes files of this name."""
    return parse_name(text) is not None


def check_name(text: str) -> FileName:
    """Parses a name that a store writes; nothing else ever becomes a path. Raises ReplicationError for another text."""
    name = parse_name(text)
    if name is None:
        raise ReplicationError(
            f"{text[:200]!r} is not the name of a layer, a manifest or an archive of them, a register's fact, an entry "
            "of the log of branches, or a file of a checkpoint"
        )
    return name


# --- layers as they are listed ----------------------------------------------------------------------------------------


def layer_message(layer: LayerStatus) -> pb.Layer:
    """Returns the message that tells of a layer."""
    fields = dataclasses.asdict(layer)
    return pb.Layer(**fields | {name: str(fields[name]) for name in _TIMES})


def layer_status_of(layer: pb.Layer) -> LayerStatus:
    """Returns the layer that `layer_message` made a message of."""
    fields = {field.name: getattr(layer, field.name) for field in dataclasses.fields(LayerStatus)}
    return LayerStatus(**fields | {name: int(t) if is_number(t := fields[name]) else t for name in _TIMES})
