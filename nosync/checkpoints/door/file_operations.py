"""The files of one checkpoint as its query sees them: what WebHDFS does, on a directory.

Invariants
- A file has its name when it is whole. What is being written is elsewhere, under a name that nobody knows.
- Without leave to overwrite a name is given by link(2), which one of two drivers can do. Nothing is ever written into
  a file that has a name: the keep has hard links to them.
- No link is followed, and nothing but regular files and directories is touched.
- `published` is called for each file that got its name, in that order.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from nosync.checkpoints.door.live_directory import DOOR
from nosync.checkpoints.door.remote_errors import (
    RemoteError,
    already_exists,
    denied,
    illegal,
    no_directory,
    not_empty,
    not_found,
    refused,
)
from nosync.checkpoints.restore import remove_tree
from nosync.lsm.platform.env import Env, NotRegularFileError, advice, open_regular

BLOCK_BYTES = 128 << 20
"""What a block is said to be. Nothing here has blocks."""
_OWNER = "nosync"


class FileOperations:
    """Reads and changes files below `root`. Paths are relative to it, and were looked at: no part is `..` or empty."""

    def __init__(self, root: Path, writing: Path, env: Env, published: Callable[[str], None]) -> None:
        """`writing`: the directory for files that are not whole, on the same file system."""
        self._root, self._writing, self._env, self._published = root, writing, env, published
        self._is_closed = False

    def close(self) -> None:
        """Gives no name from here on to what requests that are under way write: nobody would take it in."""
        self._is_closed = True

    def _check_open(self) -> None:
        if self._is_closed:
            raise refused(
                f"checkpoint {self._root.name} was closed while this was written, for it goes on from what is kept, or "
                "elsewhere: start the query again"
            )

    def status(self, path: str) -> dict[str, Any]:
        """Returns the status of a file or a directory."""
        with _answered(path):
            return _status(os.lstat(self._at(path)))

    def list(self, path: str) -> list[dict[str, Any]]:
        """Returns the statuses of what is in a directory, or that of a file."""
        with _answered(path):
            target = self._at(path)
            found = os.lstat(target)
            if not stat.S_ISDIR(found.st_mode):
                return [_status(found)]
            statuses = []
            for name, _ in sorted(self._env.entries(target)):
                if not path and name == DOOR:
                    continue
                with contextlib.suppress(FileNotFoundError):  # it went meanwhile
                    statuses.append(_status(os.lstat(target / name), name))
            return statuses

    def make_dirs(self, path: str) -> None:
        """Makes a directory, and those above it."""
        with _answered(path, is_new=True):
            target = self._at(path)
            if os.path.lexists(target) and not target.is_dir():
                raise already_exists(path)
            self._env.make_dirs(target)

    def delete(self, path: str, *, is_recursive: bool) -> bool:
        """Removes a file or a directory. Returns whether it was there."""
        with _answered(path):
            target = self._at(path)
            try:
                mode = os.lstat(target).st_mode
            except (FileNotFoundError, NotADirectoryError):
                return False
            if not stat.S_ISDIR(mode):
                self._env.unlink(target)
            elif not is_recursive and os.listdir(target):
                raise not_empty(path)
            else:
                remove_tree(target, self._env)
            return True

    def rename(self, source: str, target: str, *, may_overwrite: bool) -> None:
        """Gives a file its name. A name that is taken stays, unless it may be overwritten."""
        with _answered(source):
            before, after = self._at(source), self._at(target)
            _check_file(os.lstat(before), source)
            if source == target:
                raise already_exists(target)
            self._check_open()
            with _answered(target):
                if not after.parent.is_dir():
                    raise not_found(os.path.dirname(target))
                if may_overwrite:
                    self._env.replace(before, after)
                else:
                    self._env.link(before, after)
            if not may_overwrite:
                self._env.unlink(before)
        self._published(target)

    def open(self, path: str) -> tuple[int, int]:
        """Returns a descriptor of a file to read, and its size in bytes."""
        with _answered(path):
            fd, found = open_regular(self._at(path), os.O_RDONLY)
            return fd, found.st_size

    @contextlib.contextmanager
    def create(self, path: str, *, may_overwrite: bool) -> Iterator[BinaryIO]:
        """Opens a file for writing. It gets its name at the end of the block, unless that ends with an exception."""
        target = self._check_new(path, may_overwrite=may_overwrite)  # before a long body is read
        part = self._writing / self._env.token()
        try:
            with _answered(path, is_new=True), self._env.create(part) as file:
                yield file
            self._check_open()
            with _answered(path, is_new=True):
                self._env.make_dirs(target.parent)
                if may_overwrite:
                    self._env.replace(part, target)
                else:
                    self._env.link(part, target)
        finally:
            self._env.unlink(part)
        self._published(path)

    def _check_new(self, path: str, *, may_overwrite: bool) -> Path:
        """Returns where a file is to be that gets its name soon. Raises RemoteError where it cannot get it."""
        with _answered(path, is_new=True):
            target = self._at(path)
            if target.is_dir() or (not may_overwrite and self._env.exists(target)):
                raise already_exists(path)
            if self._env.exists(target.parent) and not target.parent.is_dir():
                raise no_directory(path)
        return target

    def _at(self, path: str) -> Path:
        """Returns where a path is. Raises RemoteError where it leads over a link, or to a special file."""
        target = self._root
        for part in path.split("/") if path else ():
            target = target / part
            try:
                mode = os.lstat(target).st_mode
            except (FileNotFoundError, NotADirectoryError):
                break  # nothing of the rest is there
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise denied(f"/{path}: leads over a link or a special file, which the door does not follow")
        return self._root / path if path else self._root


def directory_status(name: str = "") -> dict[str, Any]:
    """Returns the status of a directory that is not on disk as it is: the one of all checkpoints."""
    return _fields("DIRECTORY", 0, 0, 0, name)


def _status(found: os.stat_result, name: str = "") -> dict[str, Any]:
    changed_ms = found.st_mtime_ns // 1_000_000
    if stat.S_ISDIR(found.st_mode):
        return _fields("DIRECTORY", 0, changed_ms, found.st_ino, name)
    return file_status(found.st_size, found, name)


def file_status(size_bytes: int, found: os.stat_result, name: str = "") -> dict[str, Any]:
    """Returns the status of a file of which the rest is said by another one's, where its contents are not here."""
    return _fields("FILE", size_bytes, found.st_mtime_ns // 1_000_000, found.st_ino, name)


def _fields(kind: str, size_bytes: int, changed_ms: int, inode: int, name: str) -> dict[str, Any]:
    """Returns what WebHDFS calls a FileStatus."""
    is_file = kind == "FILE"
    return {
        "pathSuffix": name,
        "type": kind,
        "length": size_bytes,
        "modificationTime": changed_ms,
        "accessTime": changed_ms,
        "fileId": inode,
        "owner": _OWNER,
        "group": _OWNER,
        "permission": "640" if is_file else "750",
        "replication": int(is_file),
        "blockSize": BLOCK_BYTES if is_file else 0,
        "childrenNum": 0,
        "storagePolicy": 0,
    }


def _check_file(found: os.stat_result, path: str) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise illegal(f"/{path}: is a directory; the door renames files")


@contextlib.contextmanager
def _answered(path: str, *, is_new: bool = False) -> Iterator[None]:
    """Turns what the operating system says into what the client is told. `is_new`: the path is to be made."""
    try:
        yield
    except NotADirectoryError as error:
        raise (no_directory(path) if is_new else not_found(path)) from error
    except OSError as error:
        raise _remote_error(error, path) from error


def _remote_error(error: OSError, path: str) -> RemoteError:
    """Returns what the client is told of an error of the operating system."""
    match error:
        case FileNotFoundError():
            return not_found(path)
        case FileExistsError():
            return already_exists(path)
        case NotRegularFileError() | IsADirectoryError():
            return denied(f"/{path}: is no regular file")
        case _ if error.errno == errno.ENAMETOOLONG:
            return illegal(f"/{path[:64]}...: a name has at most 255 bytes")
    return refused(f"/{path}: {error.strerror or error}; {advice(error.errno)}", 500)
