"""One node a directory: an flock on the file LOCK, released by the kernel when its holder dies.

The lock is on an inode, and everything else goes by paths: `check` says whether they still are the same directory.

A forked process inherits the descriptor, and with it the lock, which it must not keep when its parent released it: the
lock is released by name (LOCK_UN, which is for all descriptors of it), and a child closes its copy at once.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import sys
from pathlib import Path

from nosync.lsm.errors import StorageError, StoreLockedError
from nosync.lsm.platform.env import (
    FILE_MODE,
    NotRegularFileError,
    checked_regular,
    give_mode,
    storage_error,
    storage_errors,
)
from nosync.lsm.platform.layout import LOCK

_PACKAGE = __name__.partition(".")[0]
_held: dict[tuple[int, int], DirectoryLock] = {}
"""Those of this process, by device and inode: the number in the file may be that of a process in another container."""


class DirectoryLock:
    """The lock is held from construction to `release`. Raises StoreLockedError naming the holder, StorageError where
    there are no locks.
    """

    def __init__(self, root: Path) -> None:
        self._root, path = root, root / LOCK
        self._where = _caller()
        with storage_errors("lock", path):
            self._root_fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._fd, denied = _open(path, self._root_fd)
        except StorageError:
            os.close(self._root_fd)
            raise
        found = os.fstat(self._fd)
        self._file = found.st_dev, found.st_ino
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = _who_holds(root, self._fd, _held.get(self._file))
            self.drop_copy()
            raise StoreLockedError(message) from None
        except OSError as error:
            self.drop_copy()
            raise storage_error("lock", path, error) from error
        _held[self._file] = self
        try:
            with storage_errors("lock", path):
                if denied is not None:  # nobody has it, and this user may not
                    raise denied
                os.ftruncate(self._fd, 0)
                os.pwrite(self._fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        except BaseException:
            self.release()
            raise

    def check(self) -> None:
        """Raises StorageError where the path is not the locked directory any more."""
        if _held.get(self._file) is not self:
            raise StorageError(f"{self._root} was given back: the store is closed")
        check_same(self._root, os.fstat(self._root_fd))

    @property
    def where(self) -> str:
        """Returns the line of the program that asked for it."""
        return self._where

    def release(self) -> None:
        """Gives the directory back. In a process that was forked since, the parent keeps it; releasing twice is fine."""
        if _held.get(self._file) is self:
            del _held[self._file]
            try:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
            finally:
                self.drop_copy()

    def drop_copy(self) -> None:
        """Closes the descriptors. In a forked child that leaves the lock to the parent."""
        os.close(self._fd)
        os.close(self._root_fd)


def _open(path: Path, root_fd: int) -> tuple[int, OSError | None]:
    """Returns the descriptor, and why it cannot be written to: who may only read the file still learns who holds it."""
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with storage_errors("lock", path):
        try:
            fd = os.open(LOCK, os.O_RDWR | os.O_CREAT | flags, FILE_MODE, dir_fd=root_fd)
            give_mode(checked_regular(fd, path), path)
            return fd, None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):  # a link, a directory, a FIFO or socket
                raise NotRegularFileError(path, os.lstat(path).st_mode) from error
            if error.errno != errno.EACCES:
                raise
            try:
                return checked_regular(os.open(LOCK, os.O_RDONLY | flags, dir_fd=root_fd), path), error
            except OSError:
                raise error from None


def _who_holds(root: Path, fd: int, ours: DirectoryLock | None) -> str:
    if ours is not None:
        return (
            f"{root} is open in process {os.getpid()}, which is this one (at {ours.where}): go on with that store, or close it "
            "first with its close(). A second one can only read: nosync.open(path, read_only=True)"
        )
    holder = os.pread(fd, 200, 0).decode(errors="replace").strip() or "another process"
    return (
        f"{root} is open in {holder}: a directory has one node. Close it there, or read with "
        "nosync.open(path, read_only=True)"
    )


def _caller() -> str:
    """Returns the file and line of the first frame that is not of this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == _PACKAGE:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _drop_copies() -> None:
    for lock in _held.values():
        lock.drop_copy()
    _held.clear()


os.register_at_fork(after_in_child=_drop_copies)


def check_same(root: Path, opened: os.stat_result) -> None:
    """Raises StorageError where a path is not the directory any more that was opened."""
    try:
        found = os.stat(root)
    except OSError as error:
        why = f"cannot be looked at any more ({error.strerror or error})"
    else:
        if os.path.samestat(opened, found):
            return
        why = "is another directory than the one that was opened"
    raise StorageError(
        f"{root} {why}: it was moved or replaced, or its file system was unmounted. Nothing more is acknowledged: put it back, "
        "and it goes on; or close the store, and open it where it is now"
    )
