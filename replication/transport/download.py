"""Files of another daemon's directory, fetched into one here: verified, and then linked, as what a task publishes."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

from blake3 import blake3

from nosync.lsm.errors import CorruptionError, StorageError
from nosync.lsm.layers.reader import LayerReader
from nosync.lsm.platform.env import Env, storage_errors
from nosync.lsm.platform.publish import temporary_path
from nosync.replication.protocol.file_names import FileVersion
from nosync.replication.transport.client import DaemonClient
from nosync.replication.transport.codec import Chunk, Decoder

_KEPT_FREE_BYTES = 64 << 20
"""What is left of the disk, whatever a daemon sends."""


def fetch_files(client: DaemonClient, root: Path, names: Sequence[str], env: Env) -> None:
    """Fetches files by their names relative to the data directory; those that are not there any more are left out.

    Raises CorruptionError for what is not what the daemon says it is, or was not asked for, ReplicationError,
    StorageError.
    """
    decoder, to_come = Decoder(), set(names)
    temporary, coming, received_bytes = temporary_path(root, env), None, 0
    with storage_errors("keep what was fetched", temporary):
        env.make_dir(temporary.parent)  # somebody may have cleaned up
    try:
        for frame in client.fetch_files(names) if names else ():
            chunk = decoder.decode(frame)
            if not isinstance(chunk, Chunk):
                continue
            if coming is None:
                _check_begun(client, chunk.held, to_come, root)
                coming, received_bytes = chunk.held, 0
                to_come.discard(coming.name)
            if chunk.held != coming or chunk.offset != received_bytes:
                raise CorruptionError(f"{client.address} sent pieces of {coming.name} that do not follow each other")
            with storage_errors("keep what was fetched", temporary), env.open_to_append(temporary) as file:
                file.write(chunk.data)
            received_bytes += len(chunk.data)
            if received_bytes == coming.size_bytes:
                _keep(coming, root, temporary, env)
                coming = None
    finally:
        env.unlink(temporary)


def _check_begun(client: DaemonClient, held: FileVersion, to_come: Collection[str], root: Path) -> None:
    """Raises CorruptionError for a file that was not asked for, or came already; StorageError where the disk has no
    room.
    """
    if held.name not in to_come:
        raise CorruptionError(f"{client.address} sent {held.name!r}, which nobody asked for")
    with storage_errors("look for room in", root):
        free_bytes = shutil.disk_usage(root).free
    if held.size_bytes > free_bytes - _KEPT_FREE_BYTES:
        raise StorageError(
            f"cannot keep {held.name} of {client.address} in {root}: it has {held.size_bytes:,} bytes, and "
            f"{free_bytes:,} are free: give a cache= elsewhere, or free space"
        )


def _keep(held: FileVersion, root: Path, temporary: Path, env: Env) -> None:
    """Keeps a whole file, once it is what the daemon said it is."""
    final, id = root / held.name, held.name.layer
    with storage_errors("keep what was fetched", final):
        if id is None:
            found: str = blake3(env.read(temporary)).hexdigest()
        else:
            reader = LayerReader.open(temporary, env, id)
            reader.verify()
            found = reader.digest
        if found != held.digest:
            raise CorruptionError(f"{held.name}: came with digest {found[:16]}, not {held.digest[:16]}")
        env.make_dirs(final.parent)
        with contextlib.suppress(FileExistsError):  # what stands is never overwritten
            env.link(temporary, final)
        env.unlink(temporary)
