"""One node a directory: an flock on the file LOCK, released by the kernel when its holder dies."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from nosync.lsm.env import storage_errors
from nosync.lsm.errors import StoreLockedError

LOCK = "LOCK"


class DirectoryLock:
    """Held from construction to `release`. Raises StoreLockedError naming the holder."""

    def __init__(self, root: Path) -> None:
        path = root / LOCK
        with storage_errors("lock", path):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self._fd, 200).decode(errors="replace").strip() or "another process"
            os.close(self._fd)
            raise StoreLockedError(
                f"{root} is open in {holder}: a directory has one node. Close it there, or read with "
                "nosync.open(path, read_only=True)"
            ) from None
        with storage_errors("lock", path):
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def release(self) -> None:
        os.close(self._fd)
