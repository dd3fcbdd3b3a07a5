"""Files get their names whole: written under `tmp/`, then linked. Never overwritten, but after a failed fsync."""

from __future__ import annotations

import logging
import stat
from contextlib import suppress
from pathlib import Path

from nosync.lsm.platform.env import Env, Identity, storage_errors
from nosync.lsm.platform.file_pool import new_file
from nosync.lsm.platform.layout import TEMPORARY_DIRECTORY

log = logging.getLogger("nosync")

_OLD_US = 24 * 3600 * 1_000_000


def give_name(temporary: Path, final: Path, env: Env) -> Identity:
    """Links a finished file to its name, and says which file it is. The directory is made if need be. Raises FileExistsError."""
    identity = env.identity(temporary)
    try:
        env.link(temporary, final)
    except FileNotFoundError:
        env.make_dirs(final.parent)
        env.link(temporary, final)
    return identity


def temporary_path(root: Path, env: Env) -> Path:
    return root / TEMPORARY_DIRECTORY / env.token()


def discard(temporary: Path, env: Env) -> None:
    """Removes a temporary file. Where that fails it stays for a day, or until a node starts, which empties `tmp/`: what was
    published under its name is published all the same.
    """
    try:
        env.unlink(temporary)
    except OSError as error:
        log.warning("%s stays for now: %s", temporary, error)


def discard_old(root: Path, env: Env) -> None:
    """Removes temporary files to which nobody wrote for a day: tasks that were killed left them. Raises StorageError."""
    directory, changed_after_ns = root / TEMPORARY_DIRECTORY, (env.utc_us() - _OLD_US) * 1000
    with storage_errors("clean", directory):
        for name in env.list_dir(directory):
            with suppress(FileNotFoundError):  # it has its name now
                found = (directory / name).lstat()  # a ready file that was taken now was written long ago
                if stat.S_ISREG(found.st_mode) and found.st_ctime_ns < changed_after_ns:
                    discard(directory / name, env)


def write_again(root: Path, path: Path, env: Env) -> None:
    """Writes again after a failed fsync: what was published goes to a new inode, which takes the name once it is
    durable.
    """
    temporary = temporary_path(root, env)
    try:
        with new_file(root, temporary, env) as file:
            env.copy(path, file)
        env.sync_file(temporary)
        env.replace(temporary, path)
    finally:
        discard(temporary, env)
