"""Files of another daemon's directory, fetched into one here: verified, and then linked, as what a task publishes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from blake3 import blake3

from nosync.lsm.errors import CorruptionError
from nosync.lsm.layers.reader import LayerReader
from nosync.lsm.platform.env import MOST_SMALL_BYTES, Env, storage_errors
from nosync.lsm.platform.publish import temporary_path
from nosync.replication.daemon.server import DaemonClient
from nosync.replication.protocol.inventory import Held, layer_of
from nosync.replication.transport.codec import Chunk, Decoder


def fetch_files(client: DaemonClient, root: Path, names: Sequence[str], env: Env) -> None:
    """Fetches files by their names relative to the data directory; those that are not there any more are left out.

    Raises CorruptionError for what is not what the daemon says it is, or was not asked for, ReplicationError, StorageError.
    """
    decoder, asked = Decoder(), set(names)
    temporary = temporary_path(root, env)
    with storage_errors("keep what was fetched", temporary):
        env.make_dir(temporary.parent)  # somebody may have cleaned up
    try:
        for frame in client.fetch_files(names) if names else ():
            chunk = decoder.decode(frame)
            if isinstance(chunk, Chunk):
                if chunk.held.name not in asked:
                    raise CorruptionError(f"{client.address} sent {chunk.held.name!r}, which nobody asked for")
                is_layer = layer_of(chunk.held.name) is not None
                if not is_layer and chunk.offset + len(chunk.data) > MOST_SMALL_BYTES:
                    raise CorruptionError(
                        f"{client.address} sent more of {chunk.held.name} than {MOST_SMALL_BYTES:,} bytes"
                    )
                with storage_errors("keep what was fetched", temporary), env.open_to_append(temporary) as file:
                    file.write(chunk.data)
                if chunk.offset + len(chunk.data) == chunk.held.size_bytes:
                    _keep(chunk.held, root, temporary, env)
    finally:
        env.unlink(temporary)


def _keep(held: Held, root: Path, temporary: Path, env: Env) -> None:
    """A whole file, once it is what the daemon said it is."""
    final, id = root / held.name, layer_of(held.name)
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
