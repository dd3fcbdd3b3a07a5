"""One node a directory: an flock on the file LOCK, released by the kernel when its holder dies.

The lock is on an inode, and everything else goes by paths: `check` says whether they still are the same directory.
"""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from nosync.lsm.env import storage_errors
from nosync.lsm.errors import StorageError, StoreLockedError

LOCK = "LOCK"


class DirectoryLock:
    """Held from construction to `release`. Raises StoreLockedError naming the holder."""

    def __init__(self, root: Path) -> None:
        self._root, path = root, root / LOCK
        with storage_errors("lock", path):
            self._root_fd: int | None = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                self._fd: int | None = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644, dir_fd=self._root_fd)
            except OSError:
                os.close(self._root_fd)
                raise
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self._fd, 200).decode(errors="replace").strip() or "another process"
            self.release()
            raise StoreLockedError(
                f"{root} is open in {holder}: a directory has one node. Close it there, or read with "
                "nosync.open(path, read_only=True)"
            ) from None
        try:
            with storage_errors("lock", path):
                os.ftruncate(self._fd, 0)
                os.pwrite(self._fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        except StorageError:  # a full disk; there may be room the next time
            self.release()
            raise

    def check(self) -> None:
        """Raises StorageError where the path is not the locked directory any more."""
        if self._root_fd is None:
            raise StorageError(f"{self._root} was given back: the store is closed")
        mine = os.fstat(self._root_fd)
        try:
            found = os.stat(self._root)
        except OSError as error:
            why = f"cannot be looked at any more ({error.strerror or error})"
        else:
            if os.path.samestat(mine, found):
                return
            why = "is another directory than the one that was opened"
        raise StorageError(
            f"{self._root} {why}: it was moved or replaced, or its file system was unmounted. Nothing more is "
            "acknowledged: put it back, and it goes on; or close the store, and open it where it is now"
        )

    def release(self) -> None:
        """Gives the directory back. Doing it twice is fine."""
        fds, self._fd, self._root_fd = (self._fd, self._root_fd), None, None
        for fd in fds:
            if fd is not None:
                os.close(fd)
