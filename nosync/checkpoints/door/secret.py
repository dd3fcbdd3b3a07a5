"""The secret of a door. It is the first part of each address, so whoever has the address may come in."""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from nosync.lsm.errors import CorruptionError
from nosync.lsm.platform.env import Env, storage_errors
from nosync.lsm.platform.json_file import read_if_there
from nosync.lsm.platform.layout import CHECKPOINT_SECRET
from nosync.lsm.platform.publish import temporary_path

log = logging.getLogger("nosync")

OWNER_ONLY = 0o600
_SECRET = re.compile(r"[0-9a-f]{32,128}\Z")
_SECRET_BYTES = 24


def read_or_make_secret(data: Path, env: Env) -> str:
    """Returns the secret of a data directory, which is made once. Only its owner can read the file.

    Raises CorruptionError where the file holds another thing, StorageError.
    """
    path = data / CHECKPOINT_SECRET
    with contextlib.suppress(FileNotFoundError):
        return _read(path, env)
    with written_for_owner(data, secrets.token_hex(_SECRET_BYTES), env) as temporary, storage_errors("make", path):
        with contextlib.suppress(FileExistsError):  # another process was quicker: its secret counts
            env.link(temporary, path)
        env.sync_dir(data)
    return _read(path, env)


def _read(path: Path, env: Env) -> str:
    found = read_if_there(path, env).decode(errors="replace").strip()
    if not _SECRET.match(found):
        raise CorruptionError(
            f"{path}: is not a secret of 32 to 128 hexadecimal digits in lower case; remove it, and another is made"
        )
    _close_to_others(path)
    return found


def _close_to_others(path: Path) -> None:
    """Lets only its owner read the secret, where others could: a copy of a directory may have lost that."""
    mode = path.stat().st_mode
    if stat.S_IMODE(mode) & ~OWNER_ONLY:
        log.warning(
            "%s could be read by others than its owner: who read it may come in; remove it for a new secret", path
        )
        with contextlib.suppress(PermissionError):
            path.chmod(OWNER_ONLY)


@contextlib.contextmanager
def written_for_owner(data: Path, text: str, env: Env) -> Iterator[Path]:
    """Yields a new file with a text, which only its owner can read and which is durable, to be given its name."""
    temporary = temporary_path(data, env)
    try:
        with storage_errors("write", temporary):
            env.make_dirs(temporary.parent)
            with env.create(temporary) as file:
                os.fchmod(file.fileno(), OWNER_ONLY)
                file.write(text.encode() + b"\n")
            env.sync_file(temporary)
        yield temporary
    finally:
        env.unlink(temporary)


def is_same(said: bytes, secret: str) -> bool:
    """Returns whether a caller says the secret. The time that it takes tells nothing about it."""
    return hmac.compare_digest(said, secret.encode())
