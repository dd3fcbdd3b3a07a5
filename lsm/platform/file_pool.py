"""Empty files made ahead, so that who publishes does not wait until the file system has made one.

An ext4 without a journal looks past every inode that was freed lately, and merges free some all the time: making one
then takes longer than writing it and giving it its name (`python -m bench lsm_publish`). So the node keeps a few that
are empty.

Invariants
- A file in `ready/made` is empty and has no other name. Who wants one renames it, which one process can, and then
  looks: one that is not empty, or has another name (in a copy of the store made of hard links; after a power cut that
  brought a name back), is not written to.
- Nobody waits for the node: where nothing is ready the file is made there and then.
- Files are made in a directory where nobody else makes, renames or removes any, for all of that waits for the
  directory.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from nosync.lsm.errors import StorageError
from nosync.lsm.platform.env import Env, storage_errors
from nosync.lsm.platform.layout import MADE, MAKING, READY

FEWEST, _MOST = 16, 512


def new_file(root: Path, path: Path, env: Env) -> BinaryIO:
    """Opens a new file for writing, which is empty: one that is ready, or one that is made now. Raises OSError."""
    made = root / READY / MADE
    try:
        names = env.list_dir(made)
        first = int(env.token(), 16) % max(len(names), 1)  # others look for one at the same time
        for name in names[first:] + names[:first]:
            if _is_taken(made / name, path, env):
                return env.open_to_write(path)
    except OSError:  # what is wrong here is wrong with making one, too, which tells
        with suppress(OSError):
            env.unlink(path)
    try:
        return env.create(path)
    except (
        FileNotFoundError
    ):  # somebody cleaned up: the directory is made again, but never the store's own, which may be away
        env.make_dir(path.parent)
        return env.create(path)


def _is_taken(ready: Path, path: Path, env: Env) -> bool:
    """Returns whether a file has its new name, and is nothing else."""
    if not env.may_write(ready):  # another process was quicker, or it is another user's
        return False
    try:
        env.replace(ready, path)
    except FileNotFoundError:
        return False
    if env.is_unused(path):
        return True
    env.unlink(path)
    return False


class FilePool:
    """Keeps the ready files of the data directory `root`, for the one node that owns it."""

    def __init__(self, root: Path, env: Env) -> None:
        self._made, self._making, self._env = root / READY / MADE, root / READY / MAKING, env
        self._wanted = 0

    def fill(self) -> None:
        """Makes files until there are enough: twice as many as before whenever all were taken. Raises StorageError."""
        try:
            with storage_errors("make files in", self._making):
                self._fill()
        except StorageError:
            self._wanted = 0  # the directories may be gone
            raise

    def _fill(self) -> None:
        there = len(self._env.list_dir(self._made))
        if not self._wanted:
            self._begin()
        elif not there:
            self._wanted = min(2 * self._wanted, _MOST)
        for _ in range(self._wanted - there):
            name = self._env.token()
            self._env.create(self._making / name).close()
            self._env.replace(self._making / name, self._made / name)

    def _begin(self) -> None:
        # Each by itself: were the store's own directory made with them, one that was moved away would be there again.
        for directory in (self._made.parent, self._made, self._making):
            self._env.make_dir(directory)
        for name in self._env.list_dir(self._making):  # a node ended while it made one
            self._env.unlink(self._making / name)
        self._wanted = FEWEST
