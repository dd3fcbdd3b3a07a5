"""A keep: what a data directory has of one checkpoint. Every file that Spark finished, under the name that Spark gave it.

Invariants
- A file of the keep is never written again and never overwritten. It is a hard link to what Spark wrote, or a copy
  where the two are on different file systems.
- `commits/t` enters last of what belongs to batch `t`, after all of that was synced. So a keep that has it after a crash
  has all of the batch that was there to be kept.
- A state of version `v` enters after `commits/(v - 1)` is there: a batch that runs again may write other states before.
- The files that a snapshot of RocksDB names enter with it, in the sizes that it says: Spark writes them in place.
- A rewind begins another generation of the keep, a directory of its own. See `generations.py`.
- One process at a time takes in and removes files (`writing`). It begins by syncing what is there: of what an earlier
  one linked, it may have died before it synced.

Steps of taking in what a checkpoint has (`take`):
1. Check each new file, all but commits, beside the checksum that Spark wrote, where there is one.
2. Link it; the SST files of a snapshot before the snapshot.
3. Sync the files, then the directories that they are in.
4. The same for the commits, in order.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path, PurePosixPath

from nosync.checkpoints.checksum import check
from nosync.checkpoints.closure import Closures
from nosync.checkpoints.generations import REWOUND, SETTINGS, directory_of, generations_of, keeps_of
from nosync.checkpoints.index import FileIndex
from nosync.checkpoints.names import CRC_SUFFIX, Batch, BatchFile, Form, StateFile, is_kept, never_empty, parse
from nosync.checkpoints.spark_files import HEAD_BYTES, PartFile, read_snapshot
from nosync.lsm.errors import CorruptionError, InvalidInputError, NotAvailableError, StorageError, StoreLockedError
from nosync.lsm.model.layer import check_name
from nosync.lsm.platform.env import Env, opened_regular, storage_errors
from nosync.lsm.platform.json_file import read_if_there, read_small
from nosync.lsm.platform.layout import CHECKPOINTS, LOCK, PINS, PLACE_FILE
from nosync.lsm.platform.lock import DirectoryLock
from nosync.lsm.platform.nearest import did_you_mean
from nosync.lsm.platform.parsing import parsed
from nosync.lsm.platform.publish import temporary_path

_OWN = (PINS, SETTINGS, LOCK, REWOUND)
_CROSS_DEVICE = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP)
"""What link(2) says where there can be no second name: then the file is copied."""


class _OtherContentsError(CorruptionError):
    """A name is taken by other contents than are kept under it."""


class Keep:
    """The keep of one checkpoint. `data`: the data directory that it is in. One thread may change it at a time."""

    def __init__(self, data: Path, name: str, env: Env, generation: int = 0) -> None:
        """`generation`: how often it was rewound. See `open_generation` for the one that counts."""
        self.name = check_name(name, "checkpoint name")
        self.data, self.env, self.generation = data, env, generation
        self.root = data / CHECKPOINTS / directory_of(name, generation)
        self._not_synced: set[str] = set()
        self._held: int | None = None
        """The inode of the directory, while it is held for one writer."""
        self._load()

    def _load(self) -> None:
        with storage_errors("list", self.root):
            self.env.list_dir(self.root)  # which refuses a link: it would lead out of the data directory
        sizes = {path: self._size_bytes(self.root / path) for path in files_below(self.root, self.env)}
        # What has no size any more was removed by a daemon just now.
        self.index = FileIndex({path: size for path, size in sizes.items() if size is not None})
        self.closures = Closures(self.index, self.read, self.head)

    def read(self, path: str) -> bytes:
        """Returns the contents of a small file of the keep. Raises FileNotFoundError and StorageError."""
        return read_if_there(self.root / path, self.env)

    def head(self, path: str) -> bytes:
        """Returns the first bytes of a file of the keep, of any size. Raises FileNotFoundError and StorageError."""
        with opened_regular(self.root / path, os.O_RDONLY) as (fd, _):
            return os.read(fd, HEAD_BYTES)

    def committed(self) -> Batch | None:
        """Returns the newest batch whose commit is kept; None where there is none."""
        return max(self.index.batches(), default=None)

    def safe(self) -> Batch | None:
        """Returns the newest batch that a query can go on from with what is here; None where there is none."""
        found = self.closures.newest()
        return None if found is None else found.batch

    def at(self, t: int | None) -> Batch:
        """Returns batch `t`, by default the newest that can be gone on from.

        Raises NotAvailableError where there is none, or where `t` cannot be gone on from; it names the nearest that can.
        """
        safe = self.safe()
        if safe is None:
            committed = self.committed()
            raise NotAvailableError(
                f"checkpoint {self.name}: no batch can be gone on from yet"
                + ("; none was committed" if committed is None else f": {self.closures.why_not(committed)}")
            )
        if t is None:
            return safe
        why = f"batch {t} was not kept" if t not in self.index.batches() else self.closures.why_not(Batch(t))
        if why is None:
            return Batch(t)
        near = [b for b in self.index.batches() if self.closures.why_not(b) is None]
        best = min(near, key=lambda b: (abs(b - t), b))
        raise NotAvailableError(
            f"checkpoint {self.name}: cannot go on from batch {t}: {why}. The nearest that can be gone on from is {best}"
        )

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Holds the keep for one writer, and makes durable what is in it. Raises StoreLockedError where there is another."""
        with storage_errors("make", self.root):
            self.env.make_dirs(self.root)
        try:
            lock = DirectoryLock(self.root)
        except StoreLockedError as error:
            raise StoreLockedError(
                f"checkpoint {self.name} is followed or changed by another process, or elsewhere in this one ({self.root}): "
                "end that first, or say another name"
            ) from error
        try:
            self._load()
            self._sync(self.index.paths())
            self._held = self.env.identity(self.root).inode
            yield
        finally:
            self._held = None
            lock.release()

    def take(self, source: Path, paths: Iterable[str], damaged: dict[str, str] | None = None) -> list[str]:
        """Takes in files of a checkpoint at `source`. Returns those that are new here; they are durable.

        What Spark removed meanwhile is left out. So are files that are damaged where `damaged` is given, which is told of
        them; batches that need one cannot be gone on from.

        Raises CorruptionError for a damaged file, or one that does not fit its checksum, if `damaged` is None; for other
        contents than are kept under a name; and StorageError where the disk refuses, or what was kept is gone.
        """
        self._check_is_there()
        known = {path for path in paths if is_kept(path) and path not in self.index}
        commits = sorted((path for path in known if path.startswith("commits/")), key=_number)
        taken = self._take_some(source, sorted(known.difference(commits), key=_snapshots_last), damaged)
        for commit in commits:
            taken += self._take_some(source, [commit], damaged)
        return taken

    def _check_is_there(self) -> None:
        """Raises StorageError where the directory of the keep is not the one any more that it was when it was opened."""
        if self._held is None:
            return
        try:
            is_there = self.env.identity(self.root).inode == self._held
        except FileNotFoundError:
            is_there = False
        if not is_there:
            raise StorageError(
                f"what was kept of checkpoint {self.name} is gone: {self.root} was removed or replaced. End this and watch the "
                "checkpoint again: what it still has is taken in anew"
            )

    def _take_some(self, source: Path, paths: Iterable[str], damaged: dict[str, str] | None) -> list[str]:
        """Links files and makes them durable. They count, in the index, only then."""
        linked: dict[str, int] = {}
        for path in paths:
            try:
                linked |= self._link_with_parts(source, path)
            except CorruptionError as error:
                if damaged is None or isinstance(error, _OtherContentsError):
                    raise
                damaged[path] = str(error)
        self._sync(linked)
        for path, size_bytes in linked.items():
            self.index.add(path, size_bytes)
        return list(linked)

    def _sync(self, paths: Collection[str]) -> None:
        """Makes files durable, and then the directories that they are in."""
        for path in paths:
            with storage_errors("sync", self.root / path):
                if path in self._not_synced:
                    self._write_again(self.root / path)
                    self._not_synced.discard(path)
                    continue
                try:
                    self.env.sync_file(self.root / path)
                except OSError:
                    self._not_synced.add(path)
                    raise
        for directory in sorted({parent for path in paths for parent in PurePosixPath(path).parents}):
            with storage_errors("sync", self.root / directory):
                self.env.sync_dir(self.root / directory)

    def _link_with_parts(self, source: Path, path: str) -> dict[str, int]:
        """Links a file, and before it those that it names. Returns sizes by name; none where some are not there yet."""
        linked: dict[str, int] = {}
        file = parse(path)
        if isinstance(file, StateFile) and file.form is Form.ZIP:
            for part in self.parts(source, path):
                name = f"{file.store.directory}/{part.name}"
                if self.index.size_bytes(name) == self._size_bytes(self.root / name) == part.size_bytes:
                    continue  # and a daemon did not remove it since
                # Looked at before it is linked: what has a name here is sent to peers.
                if self._size_bytes(source / name) != part.size_bytes or self._link(source, name) is None:
                    return linked
                linked[name] = part.size_bytes
        self._check(source, path)
        size_bytes = self._link(source, path)
        if size_bytes is not None:
            linked[path] = size_bytes
        return linked

    def _size_bytes(self, path: Path) -> int | None:
        """Returns the size of a file; None where it is not there."""
        try:
            return self.env.size_bytes(path)
        except FileNotFoundError:
            return None

    def parts(self, source: Path, path: str) -> list[PartFile]:
        """Returns the files that a snapshot of a checkpoint at `source` names; none where it is not there."""
        try:
            return read_snapshot(read_if_there(source / path, self.env), str(source / path))
        except FileNotFoundError:
            return []

    def _link(self, source: Path, path: str) -> int | None:
        """Gives a file a name in the keep, and returns its size in bytes; None where it is not there any more."""
        target = self.root / path
        size_bytes = self._size_bytes(source / path)
        if size_bytes is None:  # most names that are asked for: they could be, and are not
            return None
        if not size_bytes and never_empty(path):
            raise CorruptionError(
                f"{source / path}: is empty, as files are that were written just before the power was lost. Let the query go on "
                "from what is kept of it"
            )
        with storage_errors("link", target):
            self.env.make_dirs(target.parent)
            try:
                self.env.link(source / path, target)
            except FileExistsError:
                self._check_same(source / path, target)
            except FileNotFoundError:  # Spark removed it just now
                return None
            except OSError as error:
                if error.errno not in _CROSS_DEVICE:
                    raise
                if not self._copy(source / path, target):
                    return None
            return self.env.size_bytes(target)

    def _copy(self, source: Path, target: Path) -> bool:
        """Copies a file, with the time when it was written, to its name in the keep. Returns whether it was there."""
        try:
            with self._copied(source) as temporary, contextlib.suppress(FileExistsError):
                self.env.link(temporary, target)
        except FileNotFoundError:
            return False
        return True

    def _write_again(self, path: Path) -> None:
        """Gives a file another inode after a failed fsync: the system says it once that contents did not get to the disk."""
        with self._copied(path) as temporary:
            self.env.sync_file(temporary)
            self.env.replace(temporary, path)

    @contextlib.contextmanager
    def _copied(self, source: Path) -> Iterator[Path]:
        """Yields a copy of a file, of the time when that was written, to be given a name."""
        temporary = temporary_path(self.data, self.env)
        self.env.make_dirs(temporary.parent)
        try:
            with self.env.create(temporary) as file:
                written_ns = self.env.identity(source).written_ns
                self.env.copy(source, file)
                file.flush()
                os.utime(file.fileno(), ns=(written_ns, written_ns))
            yield temporary
        finally:
            self.env.unlink(temporary)

    def check_same(self, source: Path, paths: Iterable[str]) -> None:
        """Raises CorruptionError where a checkpoint at `source` has other contents under a name that is kept."""
        for path in paths:
            if path in self.index:
                self._check_same(source / path, self.root / path)

    def _check_same(self, file: Path, kept: Path) -> None:
        """Raises CorruptionError where a name is taken by other contents: two queries write one checkpoint."""
        try:
            is_same = self.env.identity(file) == self.env.identity(kept) or bytes(self.env.map(file)) == bytes(
                self.env.map(kept)
            )
        except FileNotFoundError:
            return  # one of them went just now
        if not is_same:
            raise _OtherContentsError(
                f"{file}: has other contents than {kept}, which is kept: two queries write this checkpoint, or it was set "
                "back by hand. Keep it under another name"
            )

    def _check(self, source: Path, path: str) -> None:
        """Checks a file beside the checksum that Spark wrote. One that does not fit gets no name here."""
        if path.endswith(CRC_SUFFIX):
            return  # it is looked at with its file
        for root in (source, self.root):
            with contextlib.suppress(FileNotFoundError):
                check(read_if_there(root / (path + CRC_SUFFIX), self.env), source / path, self.env)
                return

    def _unlink(self, path: str) -> None:
        with storage_errors("remove", self.root / path):
            self.env.unlink(self.root / path)

    def remove(self, paths: Iterable[str]) -> None:
        """Removes files that nothing needs."""
        for path in sorted(paths, key=removed_before):
            self.index.discard(path)
            self.closures.forget(path)
            self._unlink(path)


def hold_going_on(keep: Keep, going_on: Callable[[Keep], Keep]) -> tuple[Keep, contextlib.ExitStack]:
    """Holds for one writer the generation that a checkpoint goes on into. Returns it, and what lets it go when it is closed.

    `going_on`: is called while `keep` is held, and returns it, or the generation that is to be held in its place.
    """
    with contextlib.ExitStack() as held:
        held.enter_context(keep.writing())
        found = going_on(keep)
        if found is not keep:
            held.close()
            held.enter_context(found.writing())
        return found, held.pop_all()


def open_generation(data: Path, name: str, env: Env) -> Keep:
    """Opens the generation of a keep that counts: the newest one that is whole. There may be none yet: then it is begun.

    A generation that a rewind was making when it died, or that has not come from a peer in full, does not count. Raises
    CorruptionError where there are no peers, and one that was whole is not any more: what was before the rewind is no answer.
    """
    for generation in sorted(generations_of(data, check_name(name, "checkpoint name"), env), reverse=True):
        keep = Keep(data, name, env, generation)
        if generation == 0 or _is_whole(keep):
            return keep
    return Keep(data, name, env)


def _is_whole(keep: Keep) -> bool:
    """Returns whether a generation has the batch that it was rewound to, or a later one, and all that it needs."""
    mark = keep.root / REWOUND
    if not keep.env.exists(mark):
        return False
    may_come = keep.env.exists(keep.data / PLACE_FILE)  # a daemon keeps the directory
    try:
        fields = read_small(mark, keep.env)
        with parsed("what a rewind says", str(mark)):
            at = int(fields["at"])
    except (CorruptionError, StorageError):
        if may_come:
            return False
        raise
    safe = keep.safe()
    if safe is not None and safe >= at:
        return True
    if may_come:
        return False
    why = keep.closures.why_not(Batch(at)) if at in keep.index.batches() else "its commit is gone"
    raise CorruptionError(
        f"checkpoint {keep.name} was rewound to batch {at}, and files of it are gone since, or damaged: {why}. "
        f"Bring {keep.root} back from a copy; or remove it, and what was before the rewind counts"
    )


def open_keep(data: Path, name: str, env: Env) -> Keep:
    """Opens a keep that is there. Raises InvalidInputError where there is none of this name, and names the nearest."""
    names = keeps_of(data, env)
    if check_name(name, "checkpoint name") not in names:
        known = ", ".join(names) or "none"
        raise InvalidInputError(f"no checkpoint {name!r} is kept in {data} (kept: {known}){did_you_mean(name, names)}")
    return open_generation(data, name, env)


def files_below(root: Path, env: Env, directory: str = "") -> Iterator[str]:
    """Yields the names of all files of a checkpoint that are kept, relative to `root`. Links are no files of Spark."""
    for name, is_directory in env.entries(root / directory):
        path = f"{directory}/{name}" if directory else name
        if not is_kept(path) or (not directory and name in _OWN):
            continue
        if is_directory:
            yield from files_below(root, env, path)
        else:
            yield path


def removed_before(path: str) -> tuple[bool, bool, str]:
    """Sorts files as they are removed: commits first, so that none stands without what it needs, and snapshots after the
    files that they name, which would not be known as garbage without them.
    """
    return not path.startswith("commits/"), path.endswith(".zip"), path


def _number(path: str) -> int:
    file = parse(path)
    return file.batch if isinstance(file, BatchFile) else -1


def _snapshots_last(path: str) -> tuple[bool, bool, str]:
    """Sorts checksums before their files, and snapshots after what they are made of."""
    return path.endswith(".zip"), not path.endswith(CRC_SUFFIX), path
