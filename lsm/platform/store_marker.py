"""The file NOSYNC, which says that a directory is a store; making a store, and what else may be one."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from nosync.lsm.errors import CorruptionError, FormatVersionError, InvalidInputError, NotAStoreError, StorageError
from nosync.lsm.platform.env import Env, storage_error, storage_errors
from nosync.lsm.platform.json_file import read_small
from nosync.lsm.platform.layout import (
    CHECKPOINT_SECRET,
    LAYERS,
    MANIFESTS,
    MARKER,
    OWN_DIRECTORIES,
    PINS,
    QUARANTINE,
    RESTORING,
    STUBS_FROM,
    TEMPORARY_DIRECTORY,
)
from nosync.lsm.platform.parsing import parsed
from nosync.lsm.platform.publish import discard

STORE_FORMAT, STUBS_FORMAT = 1, 2
"""The format of a store; and for as long as some of its layers are stubs, which an older version would take for lost."""
MAX_KEY_GROUPS = 1 << 15
DEFAULT_KEY_GROUPS = 128
_LOST_FOUND = "lost+found"
"""What mkfs leaves in an empty ext4, which may be mounted as a data directory."""
_TOKEN = re.compile(r"[0-9a-f]{16}\Z")


@dataclass(frozen=True)
class Marker:
    """The contents of the file NOSYNC."""

    store_id: str
    key_groups: int


def check_key_groups(key_groups: int) -> None:
    """Raises InvalidInputError for a number of key groups that no store has."""
    if isinstance(key_groups, bool) or not isinstance(key_groups, int) or not 1 <= key_groups <= MAX_KEY_GROUPS:
        raise InvalidInputError(f"key_groups is {key_groups!r}, expected 1 to {MAX_KEY_GROUPS}")


def create_store(root: Path, key_groups: int, env: Env, *, store_id: str | None = None) -> Marker:
    """Makes an empty store in `root`, which must not exist or be empty. Raises NotAStoreError otherwise.

    `store_id`: that of the store which other nodes have (default: a new one).
    """
    check_key_groups(key_groups)
    with storage_errors("create the store", root):
        new = [path for path in (root, *root.parents) if not path.exists()]
        env.make_dirs(root)
        check_can_be_store(root, env)
        if (root / MARKER).exists():  # another process was quicker
            return read_marker(root, env)
        make_subdirectories(root, env)
        marker = Marker(store_id or env.token(), key_groups)
        marker = write_marker(root, marker, env)
        for path in new:  # or a power cut takes all of the store
            env.sync_dir(path.parent)
    return marker


def write_marker(root: Path, marker: Marker, env: Env, *, has_stubs: bool = False) -> Marker:
    """Writes the file NOSYNC, unless there is one, and returns what it says. Durable when this returns."""
    temporary = _written_marker(root, marker, STUBS_FORMAT if has_stubs else STORE_FORMAT, env)
    try:
        env.link(temporary, root / MARKER)
    except FileExistsError:  # another process was a moment quicker
        marker = read_marker(root, env)
    discard(temporary, env)
    env.sync_dir(root)
    return marker


def replace_marker(root: Path, marker: Marker, env: Env) -> None:
    """Says that all layers of a store are here, which was restored lazily. Durable when this returns."""
    with storage_errors("write", root / MARKER):
        env.replace(_written_marker(root, marker, STORE_FORMAT, env), root / MARKER)
        env.sync_dir(root)


def _written_marker(root: Path, marker: Marker, format_: int, env: Env) -> Path:
    """Writes what is to become the file NOSYNC, durably. Returns its temporary name."""
    fields = {"nosync_store": format_, "store_id": marker.store_id, "key_groups": marker.key_groups}
    text = json.dumps(fields | {"blake3": _digest_of(fields)})
    temporary = root / TEMPORARY_DIRECTORY / env.token()
    with env.create(temporary) as file:
        file.write(text.encode() + b"\n")
    env.sync_file(temporary)
    return temporary


def looks_like_store(root: Path, env: Env) -> bool:
    """Returns whether a directory without a marker was a store: it has layers, or manifests, in the places for them."""
    return any(env.list_dir(root / kind / name) for kind in (LAYERS, MANIFESTS) for name in env.list_dir(root / kind))


def check_can_be_store(root: Path, env: Env) -> None:
    """Raises NotAStoreError where `root` is neither a store nor a place for a new one."""
    if root.is_file():
        raise NotAStoreError(f"{root} is a file, not a store directory")
    if (root / MARKER).exists():
        return
    foreign = [
        name for name in env.list_dir(root.resolve()) if not name.startswith(".") and not _is_begun(root, name, env)
    ]
    check_is_restored(root)
    if foreign and looks_like_store(root, env):
        raise NotAStoreError(f"{root / MARKER} is lost, and {LAYERS}/ and {MANIFESTS}/ are there: {_repair_hint(root)}")
    if foreign:
        raise NotAStoreError(
            f"{root} is not a nosync store (it has no {MARKER} file) and is not empty ({', '.join(sorted(foreign)[:3])}, "
            "...): give an empty or new directory"
        )


def check_is_restored(root: Path) -> None:
    """Raises NotAStoreError where a restore from copies was interrupted: to repair it would leave out what is missing."""
    if (root / RESTORING).exists():
        raise NotAStoreError(
            f"{root} has a restore from copies that was interrupted: say nosync restore again, with what it was said with "
            f"({root / RESTORING} has it); or remove the directory"
        )


def check_own_directories(root: Path) -> None:
    """Raises NotAStoreError where one of a store's own directories is a link, or a file."""
    for name in OWN_DIRECTORIES:
        path = root / name
        with contextlib.suppress(OSError):  # what is not there is made, and what cannot be looked at cannot be opened
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                raise NotAStoreError(
                    f"{path} is {'a symbolic link' if path.is_symlink() else 'no directory'}, and a store's own directories are "
                    "none: what is written or deleted there would be elsewhere. Remove it; to keep a store on another disk, link "
                    "to the whole store"
                )


def make_subdirectories(root: Path, env: Env) -> None:
    """Makes those that every store has and this one has not, such as a copy that left out `tmp/`."""
    for name in (LAYERS, MANIFESTS, PINS, QUARANTINE, TEMPORARY_DIRECTORY):
        if not (root / name).is_dir():
            env.make_dirs(root / name)


def _is_begun(root: Path, name: str, env: Env) -> bool:
    """Returns whether a directory is one that making a store left, which was interrupted or is going on in another
    process; or the file is the secret of a door, which all hosts have before they have a store.
    """
    if name == CHECKPOINT_SECRET:
        return True
    if name == TEMPORARY_DIRECTORY:
        return all(_TOKEN.match(one) for one in env.list_dir(root / name))
    return name in (LAYERS, MANIFESTS, PINS, QUARANTINE, _LOST_FOUND) and not env.list_dir(root / name)


def read_marker(root: Path, env: Env) -> Marker:
    """Raises NotAStoreError where `root` is no store, or one whose own directories are links, and FormatVersionError
    where it is a newer one.
    """
    check_own_directories(root)
    try:
        text = env.read(root / MARKER)
    except FileNotFoundError:
        if looks_like_store(root, env):
            check_can_be_store(root, env)
        there = "is not a nosync store" if root.exists() else "does not exist"
        raise NotAStoreError(
            f"{root} {there}: expected a directory that nosync.open() made (with a {MARKER} file)"
        ) from None
    except NotADirectoryError:
        raise NotAStoreError(f"{root} is a file, not a store directory") from None
    except OSError as error:
        raise storage_error("read", root / MARKER, error) from error
    try:
        with parsed("the marker of a store", str(root / MARKER)):
            fields = json.loads(text)
            digest = fields.pop("blake3", None)  # None: of an earlier version
            version, marker = int(fields["nosync_store"]), Marker(str(fields["store_id"]), int(fields["key_groups"]))
            check_key_groups(marker.key_groups)
    except CorruptionError as error:
        raise NotAStoreError(f"{root / MARKER} is damaged ({error}); {_repair_hint(root)}") from error
    if version > STUBS_FORMAT and digest in (None, _digest_of(fields)):
        raise FormatVersionError(
            f"{root} is a store of format {version}, this nosync knows up to {STUBS_FORMAT}: upgrade nosync"
        )
    if digest not in (None, _digest_of(fields)):
        raise NotAStoreError(f"{root / MARKER} is damaged (its digest is another one); {_repair_hint(root)}")
    if not env.sees_stubs and (root / STUBS_FROM).exists():
        url = read_small(root / STUBS_FROM, env)["url"]
        raise StorageError(
            f"{root} was restored with --lazy, and some of its layers are still at {url}: `nosync restore {url} {root}` fetches "
            "them, and so does whoever has it open with nosync.open()"
        )
    return marker


def _repair_hint(root: Path) -> str:
    return f"say `nosync verify --repair {root}`, which first says what it will do"


def _digest_of(fields: Mapping[str, Any]) -> str:
    return str(blake3(json.dumps(fields, sort_keys=True).encode()).hexdigest())
