"""Opening a store: `nosync.open` of a directory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from nosync.lsm.columnar.hashing import Hasher, hash32
from nosync.lsm.errors import InvalidInputError, StoreLockedError
from nosync.lsm.node.node import Node
from nosync.lsm.platform.env import Env, storage_errors
from nosync.lsm.platform.layout import MARKER
from nosync.lsm.platform.paths import local_path
from nosync.lsm.platform.store_marker import DEFAULT_KEY_GROUPS, Marker, create_store, read_marker
from nosync.lsm.settings import StoreSettings
from nosync.lsm.store.opened import close_lost, note_opened
from nosync.lsm.store.store import Store
from nosync.lsm.trace.directory import LayerDirectory


def open_store(
    path: str | Path,
    *,
    retain: int | None = None,
    key_groups: int | None = None,
    read_only: bool = False,
    settings: StoreSettings | None = None,
    env: Env | None = None,
    hasher: Hasher = hash32,
    copies: int = 1,
) -> Store:
    """Opens the store in a directory, making a new one where there is none.

    `retain`: epochs of history to keep readable (None: all). `key_groups` (default 128): the most shards a stage can
    ever have; fixed when the store is made. `read_only`: no node, no lock, no writing; works beside the writer.
    `copies`: how many an epoch asks for of each stage of which nothing is said. Raises NotAStoreError for a directory
    of something else, StoreLockedError where another process is its node, FormatVersionError for a newer store,
    StorageError where the disk refuses.
    """
    root, env = local_path(path), env or Env()
    settings = checked_settings(settings)
    if read_only and retain is not None:
        raise InvalidInputError(
            "retain= is for who writes the store: what is read only is kept as long as its writer says"
        )
    if retain is not None:
        settings = replace(settings, retain=retain)
    with storage_errors("open", root):
        is_new = not (root / MARKER).exists() and not root.is_file()
    if not read_only and is_new:
        create_store(root, DEFAULT_KEY_GROUPS if key_groups is None else key_groups, env)
    marker = checked_marker(root, env, key_groups)
    directory = LayerDirectory(root, marker.key_groups, env, hasher)
    if read_only:
        return Store(directory, settings, None)
    return note_opened(Store(directory, settings, _node(directory, marker, settings, copies)))


def checked_settings(settings: StoreSettings | None) -> StoreSettings:
    """Raises InvalidInputError for what are no settings."""
    settings = settings or StoreSettings()
    if not isinstance(settings, StoreSettings):
        raise InvalidInputError(f"settings is {settings!r}, expected nosync.StoreSettings(...)")
    return settings


def checked_marker(root: Path, env: Env, key_groups: int | None) -> Marker:
    """Returns the marker of a store that is there. Raises InvalidInputError where other key groups are given than it has."""
    marker = read_marker(root, env)
    if key_groups is not None and key_groups != marker.key_groups:
        raise InvalidInputError(
            f"{root} was made with key_groups={marker.key_groups}, which never changes; {key_groups} was given"
        )
    return marker


def _node(directory: LayerDirectory, marker: Marker, settings: StoreSettings, copies: int) -> Node:
    try:
        return Node(directory, marker, settings, copies=copies)
    except StoreLockedError:
        if not close_lost(directory.root):
            raise
    return Node(directory, marker, settings, copies=copies)
