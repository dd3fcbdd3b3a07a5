"""Files that tasks of this host wrote, for the door of another host that serves their checkpoint.

A task waits for its own disk alone. The other door knows a file by its token, has it when its batch is committed, and
says then that it is not needed here any more.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from nosync.checkpoints.door.elsewhere import Hashed, Reference
from nosync.checkpoints.door.remote_errors import not_found
from nosync.lsm.platform.env import Env, open_regular, storage_errors

KEPT_S = 24 * 3600.0
"""What is older than the newest by so much is removed: who was to have it is gone, or began again."""
_LOOK_S = 3600.0
_TOKEN = re.compile(r"[0-9A-Za-z]{1,64}\Z")


class SpooledFile:
    """A file that is being written, `size_bytes` of it so far."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._hashed, self.size_bytes = file, Hashed(file), 0

    def write(self, data: bytes, /) -> None:
        """Writes a piece."""
        self._hashed.write(data)
        self.size_bytes += len(data)

    def flush(self) -> None:
        """Lets others read what was written."""
        self._file.flush()

    def digest(self) -> str:
        """Returns the BLAKE3 of what was written, in hexadecimal."""
        return self._hashed.digest()


class Spool:
    """The spooled files of one data directory, by checkpoint and token."""

    def __init__(self, root: Path, writing: Path, env: Env) -> None:
        """`writing`: the directory for files that are not whole, on the same file system."""
        self._root, self._writing, self._env = root, writing, env
        self._look_s = env.monotonic_s() + _LOOK_S

    @contextlib.contextmanager
    def create(self) -> Iterator[tuple[Path, SpooledFile]]:
        """Opens a file that is gone at the end of the block, unless `keep` gave it a name."""
        part = self._writing / self._env.token()
        try:
            with storage_errors("write", part), self._env.create(part) as file:
                yield part, SpooledFile(file)
        finally:
            self._env.unlink(part)

    def keep(self, name: str, part: Path, file: SpooledFile, node: str) -> Reference:
        """Keeps a whole file, and now and then removes what is old. Returns what another door has to know of it."""
        if self._env.monotonic_s() >= self._look_s:
            self.remove_old()
        reference = Reference(node, self._env.token(), file.size_bytes, file.digest())
        target = self._root / name / reference.token
        with storage_errors("keep", target):
            self._env.make_dirs(target.parent)
            self._env.link(part, target)
        return reference

    def open(self, name: str, token: str) -> tuple[int, int]:
        """Returns a descriptor of a file, and its size in bytes. Raises OSError, RemoteError where no token is meant."""
        fd, found = open_regular(self._at(name, token), os.O_RDONLY)
        return fd, found.st_size

    def release(self, name: str, token: str) -> None:
        """Removes a file, which may be gone already."""
        path = self._at(name, token)
        with storage_errors("remove", path):
            self._env.unlink(path)

    def remove_old(self) -> None:
        """Removes what nobody asked for in a long time: it is that much older than the newest."""
        self._look_s = self._env.monotonic_s() + _LOOK_S
        found: dict[Path, float] = {}
        for name, is_directory in self._env.entries(self._root):
            for token, _ in self._env.entries(self._root / name) if is_directory else ():
                with contextlib.suppress(FileNotFoundError):
                    found[self._root / name / token] = os.lstat(self._root / name / token).st_mtime
        newest_s = max(found.values(), default=0.0)
        for path, written_s in found.items():
            if newest_s - written_s > KEPT_S:
                with storage_errors("remove", path):
                    self._env.unlink(path)

    def _at(self, name: str, token: str) -> Path:
        if not _TOKEN.match(token):
            raise not_found(f"{name}/{token}")
        return self._root / name / token
