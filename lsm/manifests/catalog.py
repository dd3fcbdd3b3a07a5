"""The catalog: the node's index of what is durable, in RocksDB. The only module that imports rocksdict.

It holds nothing that cannot be rebuilt from the files, and answers no read: layers are found by listing directories.
What it adds is *durability known*: a record is written only after the layer's file and directory were synced.
A version edit (LevelDB's word) adds and removes records atomically.

An edit that only adds is not synced itself: a power cut may take the last of them, as if it had come a moment earlier;
the next start finds those layers, verifies them and adds them again before it serves anyone. One that removes is
synced, because files are deleted after it.

Facts of the library that this module deals with: `raw_mode` (the default unpickles what it reads); iterators are
checked with `status()`, because they end early and silently on corruption; errors come as bare `Exception` and are
mapped to CatalogError here; `write` keeps the interpreter's lock, so with `sync` no other thread would run until the
disk has answered: `flush_wal` lets them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import re
import shutil
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

from rocksdict import AccessType, Options, Rdict, WriteBatch

from nosync.lsm.errors import CatalogError, StorageError, StoreLockedError
from nosync.lsm.model.layer import Digest, LayerId, Record, parse_path
from nosync.lsm.platform.env import advice
from nosync.lsm.platform.layout import CATALOG

_LAYER = b"layer/"
_META = b"meta/"
_HELD = re.compile(
    r"lock hold by current process|While lock file: .*(Resource temporarily unavailable|Permission denied)"
)
"""What RocksDB says where its lock is another's; whatever else keeps the lock from being had is said otherwise."""
_FULL = "free space, and the node goes on by itself (a MiB is enough for the catalog); what was acknowledged is kept"
_REFUSED = {
    os.strerror(number): number
    for number in (
        errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EROFS, errno.ENOMEM,
        errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS,
    )
}  # fmt: skip
"""What the operating system says, in RocksDB's errors, of files that are whole."""


@contextlib.contextmanager
def _rocksdb_errors(doing: str, path: Path) -> Iterator[None]:
    try:
        yield
    except (CatalogError, StorageError):
        raise
    except Exception as error:
        if doing == "open" and _HELD.search(str(error)):  # it is in use, and not damaged
            raise StoreLockedError(f"the catalog {path} is open already: close the store there ({error})") from error
        refused = next((reason for reason in _REFUSED if reason in str(error)), None)
        if refused is not None:
            raise StorageError(
                f"cannot {doing} the catalog {path}: {refused}; it is not damaged; {_advice(_REFUSED[refused])} ({error})"
            ) from error
        raise CatalogError(
            f"cannot {doing} the catalog {path}: {error}; it can be rebuilt from the layer files"
        ) from error


class Catalog:
    """Opened by one process at a time; RocksDB's own lock refuses a second one, which is a StoreLockedError."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path = path
        self._has_failed = False
        with _rocksdb_errors("open", path):
            _check_files(path)
            self._db = _opened(path, read_only=read_only, create=not read_only)
            self._identity = _identity(path)
        _catalogs.add(self)

    def records(self) -> list[Record]:
        """Returns every durable layer. Raises CatalogError where RocksDB finds its files damaged."""
        found = []
        with _rocksdb_errors("read", self.path):
            iterator = self._db.iter()
            iterator.seek(_LAYER)
            while iterator.valid() and iterator.key().startswith(_LAYER):
                found.append(_decode(iterator.key(), iterator.value(), self.path))
                iterator.next()
            iterator.status()
        return found

    def meta(self, name: str) -> str | None:
        with _rocksdb_errors("read", self.path):
            value = self._db.get(_META + name.encode())
        return None if value is None else value.decode()

    def metas(self, prefix: str = "") -> dict[str, str]:
        """Returns all facts whose names begin with `prefix`."""
        found, begin = {}, _META + prefix.encode()
        with _rocksdb_errors("read", self.path):
            iterator = self._db.iter()
            iterator.seek(begin)
            while iterator.valid() and iterator.key().startswith(begin):
                found[iterator.key()[len(_META) :].decode()] = iterator.value().decode()
                iterator.next()
            iterator.status()
        return found

    def remember(self, meta: Mapping[str, str], forget: Iterable[str] = ()) -> None:
        """Writes what may be lost by a power cut, which files that are durable say again. Nothing waits for the disk.

        `forget`: the names of facts that are removed.
        """
        with _rocksdb_errors("write", self.path):
            self._open_after_failure()
            batch = WriteBatch(raw_mode=True)
            for name, value in meta.items():
                batch.put(_META + name.encode(), value.encode())
            for name in forget:
                batch.delete(_META + name.encode())
            self._has_failed = True
            self._db.write(batch)
            self._has_failed = False

    def apply(
        self, add: Iterable[Record] = (), remove: Iterable[LayerId] = (), meta: dict[str, str] | None = None
    ) -> None:
        """Makes one version edit: all of it or none. What removes anything, or has `meta`, is durable when this
        returns.
        """
        with _rocksdb_errors("write", self.path):
            self._open_after_failure()
            batch = WriteBatch(raw_mode=True)
            removed = [_LAYER + str(id.path).encode() for id in remove]
            for key in removed:
                batch.delete(key)
            for record in add:
                fields = {"digest": record.digest, "rows": record.rows, "bytes": record.size_bytes}
                batch.put(_LAYER + str(record.id.path).encode(), json.dumps(fields).encode())
            for name, value in (meta or {}).items():
                batch.put(_META + name.encode(), value.encode())
            self._has_failed = True
            self._db.write(batch)
            if removed or meta:
                self._db.flush_wal(True)
            self._has_failed = False

    def _open_after_failure(self) -> None:
        """Opens it anew where a write failed: RocksDB refuses all others, until there is room for all its buffers.

        What was written is in its log. Opening it needs some KiB.
        """
        if not self._has_failed:
            return
        if _identity(self.path) != self._identity:  # there would be a new one, or another store's
            raise StorageError(
                f"cannot write the catalog {self.path}: it was moved away, or another one took its place"
            )
        self.close()
        self._db = _opened(self.path, read_only=False, create=False)
        _catalogs.add(self)
        self._has_failed = False

    def close(self) -> None:
        """Raises CatalogError where RocksDB does; nothing is lost by that, for all that was written is in its log."""
        _catalogs.discard(self)
        with contextlib.suppress(Exception) if self._has_failed else _rocksdb_errors("close", self.path):
            self._db.close()

    def leave_to_parent(self) -> None:
        """Leaks the database in a forked child: RocksDB's threads are not here, and closing it would wait for them."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._db))


_catalogs: weakref.WeakSet[Catalog] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for catalog in list(_catalogs):
        catalog.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)


def _advice(number: int) -> str:
    return f"the disk is full: {_FULL}" if number in (errno.ENOSPC, errno.EDQUOT) else advice(number)


def _check_files(path: Path) -> None:
    """Raises CatalogError where something in it is no file of its own: RocksDB would follow a link, and write there."""
    if not path.exists():
        return
    with os.scandir(path) as entries:
        for entry in entries:
            if not entry.is_file(follow_symlinks=False):
                raise CatalogError(f"{entry.path} is no regular file; RocksDB did not write it")


def _opened(path: Path, *, read_only: bool, create: bool) -> Rdict:
    options = Options(raw_mode=True)
    options.create_if_missing(create)
    options.set_max_total_wal_size(4 << 20)
    options.set_write_buffer_size(4 << 20)
    options.set_keep_log_file_num(2)
    options.set_max_open_files(64)
    access = AccessType.read_only(error_if_log_file_exist=False) if read_only else AccessType.read_write()
    return Rdict(str(path), options=options, access_type=access)


def _identity(path: Path) -> tuple[int, int] | None:
    """Returns which directory stands under a name; None where none does."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _decode(key: bytes, value: bytes, path: Path) -> Record:
    try:
        id = parse_path(PurePosixPath(key[len(_LAYER) :].decode()))
        fields = json.loads(value)
        if id is None:
            raise ValueError("not a layer's path")
        return Record(id, Digest(fields["digest"]), int(fields["rows"]), int(fields["bytes"]))
    except (ValueError, KeyError, TypeError) as error:
        raise CatalogError(f"catalog {path}: record {key!r} is damaged ({error}); it can be rebuilt") from error


def recorded_layers(root: Path) -> list[Record]:
    """Returns the durable layers of a directory, as its catalog on disk says now.

    Where no node has ever run, or the catalog is damaged, nothing is known to be durable.
    """
    try:
        catalog = Catalog(root / CATALOG, read_only=True)
    except (CatalogError, StorageError):
        return []
    try:
        return catalog.records()
    finally:
        catalog.close()


def set_aside(path: Path, token: str) -> Path | None:
    """Moves a damaged catalog out of the way. Returns where it is now; None where there was none."""
    if not path.exists():
        return None
    target = path.with_name(f"{path.name}.damaged-{token}")
    try:
        shutil.move(path, target)
    except OSError as error:
        raise CatalogError(f"cannot move the damaged catalog {path} aside: {error}") from error
    return target
