"""The files of a data directory for who reads them from elsewhere (nosync.replication.client.remote_store)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from blake3 import blake3

from nosync.lsm.errors import ReplicationError
from nosync.lsm.layers.reader import LayerReader
from nosync.lsm.node.node import Node
from nosync.lsm.platform.env import Env, open_regular, storage_error, storage_errors
from nosync.lsm.platform.layout import BRANCHES, LAYERS, MANIFESTS, PINS, TIMES
from nosync.lsm.store.store import Store
from nosync.lsm.trace.directory import LayerDirectory
from nosync.proto.v1 import replication_pb2 as pb
from nosync.replication.protocol.file_names import FileName, FileVersion
from nosync.replication.protocol.messages import FileRequest, NotFound
from nosync.replication.transport.codec import Encoder, check_group, check_name, layer_message

NAMES_PER_REPLY = 10_000
_READABLE = (LAYERS, MANIFESTS, BRANCHES, PINS, TIMES)


def names_in(directory: LayerDirectory, relative: str) -> Iterator[dict[str, int]]:
    """Returns the names in a directory, in pieces, with the time at which the file of each was written: what was
    discarded and fetched again has the same name. Raises ReplicationError for a directory that is not there to be read.
    """
    if check_group(relative).partition("/")[0] not in _READABLE:
        raise ReplicationError(f"{relative!r} is not one of {', '.join(_READABLE)}, or in it")
    path = directory.root / relative
    with storage_errors("list", path):
        names = sorted(directory.env.list_dir(path))
    for first in range(0, len(names), NAMES_PER_REPLY):
        with storage_errors("list", path):
            yield {name: _written_ns(path / name, directory.env) for name in names[first : first + NAMES_PER_REPLY]}


def _written_ns(path: Path, env: Env) -> int:
    """Returns when a file was written; zero where it is gone."""
    try:
        return env.identity(path).written_ns
    except FileNotFoundError:
        return 0


def contents_of(directory: LayerDirectory, names: Iterable[str]) -> Iterator[pb.Frame]:
    """Returns files in pieces, one after the other, as they go between nodes; a NotFound for each that is not."""
    encoder = Encoder()
    for name in map(check_name, names):
        path = directory.root / name
        if name.partition("/")[0] not in _READABLE:
            raise ReplicationError(f"{name!r} is not one of {', '.join(_READABLE)}, or in it")
        try:
            directory.env.fetch_whole(path)
            held, (fd, _) = _held(directory, name, path), open_regular(path, os.O_RDONLY)
        except FileNotFoundError:
            yield from encoder.frames(NotFound(name))
            continue
        except OSError as error:
            raise storage_error("read", path, error) from error
        with os.fdopen(fd, "rb") as file, storage_errors("read", path):
            yield from encoder.chunks(FileRequest(held), file)


def _held(directory: LayerDirectory, name: FileName, path: Path) -> FileVersion:
    id = name.layer
    if id is None:
        contents = directory.env.read(path)
        return FileVersion(name, blake3(contents).hexdigest(), len(contents))
    reader = LayerReader.open(path, directory.env, id)
    return FileVersion(name, reader.digest, reader.size_bytes)


def layers_of(node: Node) -> Iterator[pb.Layer]:
    """Yields every layer file of a node."""
    return map(layer_message, Store(node.directory, node.settings, node).layers())
