"""The world outside: files, the monotonic clock and randomness, behind one object.

Everything in `lsm` that touches the disk goes through an `Env`, so that tests can inject a full disk, a failing
fsync or a power cut (`nosync.testing`), and so that nothing else needs patching. Methods raise plain
`OSError`; `storage_errors` turns it into a `StorageError` with a reason and an advice.

A data directory may come from somebody else, or others may write to it. So no open follows a symbolic link or waits for
a FIFO: what is no regular file is a `NotRegularFileError`. The directory itself may be reached through links: that is
its owner's choice.

What is made in it is for its owner, who writes, and their group, which reads, whatever the umask of who makes it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import pyarrow as pa

from nosync.lsm.errors import StorageError

FILE_MODE, DIRECTORY_MODE = 0o640, 0o750
_WRITE_BUFFER_BYTES = 1 << 20
_SMALLEST_MAPPED_BYTES = 32 << 10
_FREE_SPACE = (
    "free space: what the node does by itself then goes on, a call that failed is to be made again, and what was "
    "acknowledged is kept"
)
_SUCH_A_FILE_SYSTEM = (
    "a store needs a local or mounted file system with hard links and locks (flock), such as ext4, XFS or NFS 4: put the data "
    "directory on one"
)
_ADVICE = {
    errno.ENOSPC: f"the disk is full: {_FREE_SPACE}",
    errno.EDQUOT: f"the disk quota is used up: {_FREE_SPACE}",
    errno.EFBIG: "files may not be so large here: raise `ulimit -f`, or the file system's limit",
    errno.EROFS: "the file system is read-only: remount it writable, or open the store with read_only=True",
    errno.EACCES: "permission denied: check the owner and mode of the data directory, or open it with read_only=True",
    errno.EPERM: "not permitted: the file system must support hard links, and this user must own the directory",
    errno.EOPNOTSUPP: _SUCH_A_FILE_SYSTEM,
    errno.ENOSYS: _SUCH_A_FILE_SYSTEM,
    errno.ENOLCK: f"a network file system has to be mounted with its lock service: {_SUCH_A_FILE_SYSTEM}",
    errno.EMLINK: f"a file gets no second name, or a directory no more entries: {_SUCH_A_FILE_SYSTEM}",
    errno.EXDEV: (
        "all of a data directory is on one file system, and no directory in it is a mount, a symlink to elsewhere or of another "
        "quota project: mount the directory as a whole"
    ),
    errno.EIO: "the device reported an I/O error: check the disk; layers on it are verified before they are used",
    errno.ESTALE: "the network file system lost it: mount it again",
    errno.EMFILE: "too many open files: raise `ulimit -n`",
    errno.ENFILE: "too many open files on this machine: raise fs.file-max",
    errno.ENOMEM: "free memory, or raise vm.max_map_count",
    errno.ENAMETOOLONG: "a name has at most 255 bytes and a path 4095: give the data directory a shorter path",
    errno.ELOOP: "its symlinks lead to each other: give the directory itself",
}
MOST_SMALL_BYTES = 256 << 20
"""A file that is read whole (manifests, archives, entries of logs) may have so many bytes at most."""


class NotRegularFileError(OSError):
    """A name in a data directory stands for a link, a directory, a FIFO, a socket or a device."""

    def __init__(self, path: Path | str, mode: int) -> None:
        kind = next((word for is_it, word in _KINDS if is_it(mode)), "no regular file")
        super().__init__(errno.EBADF, f"it is {kind}, and no regular file: put the file itself there", str(path))


class TooLargeError(OSError):
    """A file that is read whole is larger than any that nosync writes."""


_KINDS = (
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_regular(path: Path | str, flags: int) -> tuple[int, os.stat_result]:
    """Returns the descriptor of a regular file, and what it is. Raises NotRegularFileError for a link or anything else;
    never waits.

    A file that is made (O_CREAT) gets FILE_MODE.
    """
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, FILE_MODE)
    except OSError as error:
        # A link says ELOOP, a directory that is written to EISDIR, a socket or a FIFO without a reader ENXIO.
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise NotRegularFileError(path, os.lstat(path).st_mode) from error
        raise
    checked_regular(fd, path)
    try:
        found = os.fstat(fd)
        if flags & os.O_CREAT:
            _mend_mode(fd, found, _mode_in(os.path.dirname(path), FILE_MODE))
        elif flags & (os.O_WRONLY | os.O_RDWR):
            _mend_mode(fd, found, stat.S_IMODE(found.st_mode) & 0o770)
    except BaseException:
        os.close(fd)
        raise
    return fd, found


@contextlib.contextmanager
def opened_regular(path: Path, flags: int) -> Iterator[tuple[int, os.stat_result]]:
    """Opens as `open_regular` does, and closes the descriptor in the end."""
    fd, found = open_regular(path, flags)
    try:
        yield fd, found
    finally:
        os.close(fd)


def checked_regular(fd: int, path: Path | str) -> int:
    """Returns the descriptor, where it is of a regular file; else it is closed. Raises NotRegularFileError."""
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        raise NotRegularFileError(path, mode)
    return fd


def _mode_in(directory: Path | str, mode: int) -> int:
    """Returns the mode of what is made in a directory: where its group may write, the group may write to that, too."""
    return mode | (mode >> 3 & 0o070) if os.stat(directory or ".").st_mode & stat.S_IWGRP else mode


def _mend_mode(fd: int, found: os.stat_result, mode: int) -> None:
    """Sets the mode of what is written, where a umask or an earlier version made it another one."""
    if found.st_mode & 0o777 != mode:
        with contextlib.suppress(PermissionError):  # a file system that keeps no modes, or the file is another user's
            os.fchmod(fd, stat.S_IMODE(found.st_mode) & ~0o777 | mode)


def give_mode(fd: int, path: Path) -> None:
    """Sets the mode of a file that was made with another umask than it should have."""
    _mend_mode(fd, os.fstat(fd), _mode_in(path.parent, FILE_MODE))


def _make_directory(path: Path) -> None:
    try:
        os.mkdir(path, DIRECTORY_MODE)
    except OSError:
        if not path.is_dir():
            raise
        return
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _mend_mode(fd, os.fstat(fd), _mode_in(path.parent, DIRECTORY_MODE))
    finally:
        os.close(fd)


def _created(path: str, flags: int) -> int:
    return open_regular(path, flags)[0]


def read_regular(path: Path, most_bytes: int = MOST_SMALL_BYTES) -> bytes:
    """Returns the bytes of a regular file. Raises NotRegularFileError for anything else, TooLargeError for a larger
    one.
    """
    with opened_regular(path, os.O_RDONLY) as (fd, found):
        if found.st_size > most_bytes:
            raise TooLargeError(
                errno.EFBIG, f"it has {found.st_size:,} bytes, expected at most {most_bytes:,}", str(path)
            )
        with open(fd, "rb", closefd=False) as file:
            return file.read(found.st_size)


class Identity(NamedTuple):
    """Tells files of one name apart. Published files are never written again, so a name that has another identity
    stands for another file.
    """

    inode: int
    written_ns: int
    size_bytes: int


Have = Callable[[Sequence[tuple[int, int]]], None]


class Stub(NamedTuple):
    """What is known of a layer file whose bytes are still in an object store (`nosync restore --lazy`)."""

    digest: str
    size_bytes: int


class Env:
    """The real environment. Subclass and override to inject faults."""

    sees_stubs = False
    """Whether files of which only a stub is here are seen, and fetched where they are read."""

    def create(self, path: Path) -> BinaryIO:
        """Opens a new file for writing; FileExistsError where there is one."""
        return open(path, "xb", buffering=_WRITE_BUFFER_BYTES, opener=_created)

    def open_to_append(self, path: Path) -> BinaryIO:
        """Opens a file to write at its end, and makes it where there is none."""
        return open(path, "ab", opener=_created)

    def may_write(self, path: Path) -> bool:
        """Returns whether this process's user may write to a file that is there."""
        return os.access(path, os.W_OK)

    def is_unused(self, path: Path) -> bool:
        """Returns whether a name is that of a regular file which is empty and has no other name. Raises
        FileNotFoundError.
        """
        found = os.lstat(path)
        return stat.S_ISREG(found.st_mode) and found.st_size == 0 and found.st_nlink == 1

    def open_to_write(self, path: Path) -> BinaryIO:
        """Opens a file that is there, and leaves in it what it has; FileNotFoundError where there is none."""
        with opened_regular(path, os.O_WRONLY) as (fd, _):
            return open(os.dup(fd), "wb", buffering=_WRITE_BUFFER_BYTES)

    def map(self, path: Path) -> pa.Buffer:
        """Returns the whole file, memory-mapped and not copied. The mapping lives as long as the buffer.

        Small files are read: it is as fast, and a process may have only so many mappings (`vm.max_map_count`).
        """
        with opened_regular(path, os.O_RDONLY) as (fd, found):
            if found.st_size < _SMALLEST_MAPPED_BYTES:
                with open(fd, "rb", closefd=False) as small:
                    return pa.py_buffer(small.read())
            # By its descriptor: the name may stand for something else by now.
            with pa.memory_map(f"/proc/self/fd/{fd}") as file:
                return file.read_buffer()

    def map_in_parts(self, path: Path) -> tuple[pa.Buffer, Have | None]:
        """Returns what `map` does, for who calls the other one with ranges `[begin, end)` before they are read there.
        None: all of it is here.
        """
        return self.map(path), None

    def stub(self, path: Path) -> Stub | None:
        """Returns what is known of a file that is not here, but for a stub."""
        return None

    def forget_stub(self, path: Path) -> None:
        """Removes the stub of a file, which is not to come again."""

    def fetch_whole(self, path: Path) -> None:
        """Makes sure that a file is here, where it is one of which only a stub is."""

    def read(self, path: Path) -> bytes:
        """Reads a whole file. Raises TooLargeError for one of more than MOST_SMALL_BYTES."""
        return read_regular(path)

    def copy(self, path: Path, target: BinaryIO) -> None:
        """Writes a file's bytes into another one."""
        with opened_regular(path, os.O_RDONLY) as (fd, _), open(fd, "rb", closefd=False) as source:
            shutil.copyfileobj(source, target, _WRITE_BUFFER_BYTES)

    def link(self, source: Path, target: Path) -> None:
        """Gives `source` a second name; FileExistsError where `target` exists. Never overwrites."""
        os.link(source, target)

    def replace(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def make_dirs(self, path: Path) -> None:
        """Makes a directory, and those above it. One that is there keeps the mode that its owner gave it."""
        try:
            _make_directory(path)
        except FileNotFoundError:
            self.make_dirs(path.parent)
            _make_directory(path)

    def make_dir(self, path: Path) -> None:
        """Makes a directory. Raises FileNotFoundError where `make_dirs` would make what the directory is in."""
        _make_directory(path)

    def list_dir(self, path: Path) -> list[str]:
        """Returns names in a directory, in no order; none where it does not exist, or is a file that somebody put
        there.
        """
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return []
        except OSError as error:  # a link says ENOTDIR as a file does
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            if os.path.islink(path):
                raise NotRegularFileError(path, os.lstat(path).st_mode) from error
            return []
        try:
            return os.listdir(fd)
        finally:
            os.close(fd)

    def entries(self, path: Path) -> list[tuple[str, bool]]:
        """Returns the regular files and the directories in a directory, each with whether it is a directory.

        There are none where the directory does not exist. Links and special files are left out.
        """
        try:
            with os.scandir(path) as found:
                kinds = [(e.name, e.is_dir(follow_symlinks=False), e.is_file(follow_symlinks=False)) for e in found]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [(name, is_directory) for name, is_directory, is_file in kinds if is_directory or is_file]

    def exists(self, path: Path) -> bool:
        """Returns whether a name is there, be it that of a link to nowhere."""
        return os.path.lexists(path)

    def changed_ns(self, path: Path) -> int:
        """Returns when a name last came into a directory or went; 0 where it does not exist."""
        try:
            return os.lstat(path).st_mtime_ns
        except FileNotFoundError:
            return 0

    def identity(self, path: Path) -> Identity:
        """Returns which file stands under a name. Raises FileNotFoundError."""
        found = os.lstat(path)
        return Identity(found.st_ino, found.st_mtime_ns, found.st_size)

    def size_bytes(self, path: Path) -> int:
        return os.lstat(path).st_size

    def sync_file(self, path: Path) -> None:
        """Makes a file's contents durable (fsync)."""
        self._sync(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)

    def sync_dir(self, path: Path) -> None:
        """Makes a directory's entries durable."""
        self._sync(path, os.O_RDONLY | os.O_DIRECTORY)

    def _sync(self, path: Path, flags: int) -> None:
        fd = os.open(path, flags | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def monotonic_s(self) -> float:
        return time.monotonic()

    def utc_us(self) -> int:
        """Returns the time of the wall clock, in microseconds since 1970. It may jump, so what goes by it does no harm then."""
        return time.time_ns() // 1000

    def wait_s(self, seconds: float) -> None:
        time.sleep(seconds)

    def token(self) -> str:
        """Returns a random name for a temporary file or an incarnation."""
        return secrets.token_hex(8)


def is_foreign(error: OSError) -> bool:
    """Returns whether a file was not opened because it is none that a store writes: a link, a FIFO, a directory, or far
    too large.
    """
    return isinstance(error, NotRegularFileError | TooLargeError)


@contextlib.contextmanager
def storage_errors(doing: str, path: Path) -> Iterator[None]:
    """Maps OSError to StorageError, as `storage_error` does."""
    try:
        yield
    except OSError as error:
        raise storage_error(doing, path, error) from error


def storage_error(doing: str, path: Path, error: OSError) -> StorageError:
    """Returns an error that says what was being done, to which path, and what to do."""
    return StorageError(f"cannot {doing} {path}: {error.strerror or error}; {advice(error.errno)}")


def advice(number: int | None) -> str:
    """Returns what to do about an error of the operating system."""
    return _ADVICE.get(number or 0, "check the data directory and its disk")
