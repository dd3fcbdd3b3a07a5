"""Opening a store: the node of its directory in this process, or the daemon that owns the directory already."""

from __future__ import annotations

from pathlib import Path

from nosync.lsm.directory import LayerDirectory, read_marker
from nosync.lsm.env import Env
from nosync.lsm.errors import InvalidInputError, ReplicationError, StoreLockedError
from nosync.lsm.hashing import Hasher, hash32
from nosync.lsm.settings import StoreSettings
from nosync.lsm.store import Store, open_store


def open(
    path: str | Path,
    *,
    retain: int | None = None,
    key_groups: int | None = None,
    read_only: bool = False,
    settings: StoreSettings | None = None,
    env: Env | None = None,
    hasher: Hasher = hash32,
) -> Store:
    """Opens the store in a directory, making a new one where there is none.

    Where a daemon owns the directory the store works beside it: writing is the same, and the daemon makes durable,
    replicates and merges.

    `retain`: epochs of history to keep readable (None: all). `key_groups` (default 128): the most shards a stage can ever
    have; fixed when the store is made. `read_only`: no node, no lock, no writing; works beside the writer.
    Raises NotAStoreError for a directory of something else, StoreLockedError where another process is its
    node, FormatVersionError for a newer store, StorageError where the disk refuses.
    """
    try:
        return open_store(
            path, retain=retain, key_groups=key_groups, read_only=read_only, settings=settings, env=env, hasher=hasher
        )
    except StoreLockedError as locked:
        store = _beside_daemon(Path(path), env or Env(), hasher, locked)
        if retain is not None or (settings is not None and settings.retain is not None):
            store.close()
            raise InvalidInputError(
                f"{path} belongs to a daemon, which decides how much history is kept: set its retain instead"
            ) from None
        return store


def _beside_daemon(root: Path, env: Env, hasher: Hasher, locked: StoreLockedError) -> Store:
    """The store beside the daemon that owns a directory. Raises StoreLockedError where the owner is no daemon."""
    try:
        from nosync.replication.attached import AttachedNode  # noqa: PLC0415 - needs the extra `daemon`
        from nosync.replication.daemon import client_of  # noqa: PLC0415
    except ImportError:
        raise locked from None
    client = client_of(root)
    if client is None:
        raise locked
    directory = LayerDirectory(root, read_marker(root, env).key_groups, env, hasher)
    try:
        return Store(directory, StoreSettings(), AttachedNode(directory, client))
    except ReplicationError as error:
        client.close()
        raise StoreLockedError(f"{locked}. It may be a daemon: {error}") from None
