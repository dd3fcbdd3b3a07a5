"""The world outside: files, the monotonic clock and randomness, behind one object.

Everything in `lsm` that touches the disk goes through an `Env`, so that tests can inject a full disk, a failing
fsync or a power cut (`nosync.testing`), and so that nothing else needs patching. Methods raise plain
`OSError`; `storage_errors` turns it into a `StorageError` with a reason and an advice.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import pyarrow as pa

from nosync.lsm.errors import StorageError

_WRITE_BUFFER_BYTES = 1 << 20
_SMALLEST_MAPPED_BYTES = 32 << 10
_ADVICE = {
    errno.ENOSPC: "the disk is full: free space and try again; what was acknowledged is kept",
    errno.EDQUOT: "the disk quota is used up: free space and try again; what was acknowledged is kept",
    errno.EROFS: "the file system is read-only: remount it writable, or open the store with read_only=True",
    errno.EACCES: "permission denied: check the owner and mode of the data directory, or open it with read_only=True",
    errno.EPERM: "not permitted: the file system must support hard links, and this user must own the directory",
    errno.EIO: "the device reported an I/O error: check the disk; layers on it are verified before they are used",
    errno.EMFILE: "too many open files: raise `ulimit -n`",
}


class Identity(NamedTuple):
    """Of a file. Published files are never written again, so a name that has another one stands for another file."""

    inode: int
    written_ns: int
    size_bytes: int


class Env:
    """The real environment. Subclass and override to inject faults."""

    def create(self, path: Path) -> BinaryIO:
        """Opens a new file for writing; FileExistsError where there is one."""
        return open(path, "xb", buffering=_WRITE_BUFFER_BYTES)

    def may_write(self, path: Path) -> bool:
        """Whether this process's user may write to a file that is there."""
        return os.access(path, os.W_OK)

    def is_unused(self, path: Path) -> bool:
        """Whether a file is empty and has no other name. Raises FileNotFoundError."""
        found = os.stat(path)
        return found.st_size == 0 and found.st_nlink == 1

    def open_to_write(self, path: Path) -> BinaryIO:
        """Opens a file that is there, and leaves in it what it has; FileNotFoundError where there is none."""
        return open(os.open(path, os.O_WRONLY | os.O_CLOEXEC), "wb", buffering=_WRITE_BUFFER_BYTES)

    def map(self, path: Path) -> pa.Buffer:
        """The whole file, memory-mapped and not copied. The mapping lives as long as the buffer.

        Small files are read: it is as fast, and a process may have only so many mappings (`vm.max_map_count`).
        """
        if path.stat().st_size < _SMALLEST_MAPPED_BYTES:
            return pa.py_buffer(path.read_bytes())
        with pa.memory_map(str(path)) as file:
            return file.read_buffer()

    def read(self, path: Path) -> bytes:
        return path.read_bytes()

    def link(self, source: Path, target: Path) -> None:
        """Gives `source` a second name; FileExistsError where `target` exists. Never overwrites."""
        os.link(source, target)

    def replace(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def make_dirs(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def list_dir(self, path: Path) -> list[str]:
        """Names in a directory, in no order; none where it does not exist, or is a file that somebody put there."""
        try:
            return os.listdir(path)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def exists(self, path: Path) -> bool:
        """Whether a name is there."""
        return os.path.exists(path)

    def changed_ns(self, path: Path) -> int:
        """When a name last came into a directory or went; 0 where it does not exist."""
        try:
            return os.stat(path).st_mtime_ns
        except FileNotFoundError:
            return 0

    def identity(self, path: Path) -> Identity:
        """Which file stands under a name. Raises FileNotFoundError."""
        found = os.stat(path)
        return Identity(found.st_ino, found.st_mtime_ns, found.st_size)

    def size_bytes(self, path: Path) -> int:
        return path.stat().st_size

    def sync_file(self, path: Path) -> None:
        """Makes a file's contents durable (fsync)."""
        self._sync(path, os.O_RDONLY)

    def sync_dir(self, path: Path) -> None:
        """Makes a directory's entries durable."""
        self._sync(path, os.O_RDONLY | os.O_DIRECTORY)

    def _sync(self, path: Path, flags: int) -> None:
        fd = os.open(path, flags)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def monotonic_s(self) -> float:
        return time.monotonic()

    def wait_s(self, seconds: float) -> None:
        time.sleep(seconds)

    def token(self) -> str:
        """A random name for a temporary file or an incarnation."""
        return secrets.token_hex(8)


@contextlib.contextmanager
def storage_errors(doing: str, path: Path) -> Iterator[None]:
    """Maps OSError to StorageError, as `storage_error` does."""
    try:
        yield
    except OSError as error:
        raise storage_error(doing, path, error) from error


def storage_error(doing: str, path: Path, error: OSError) -> StorageError:
    """What was being done, to which path, and what to do."""
    advice = _ADVICE.get(error.errno or 0, "check the data directory and its disk")
    return StorageError(f"cannot {doing} {path}: {error.strerror or error}; {advice}")
