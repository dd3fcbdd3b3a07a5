"""The rest of a lazily restored store: what nobody asked for yet is fetched in the background, the newest first.

Invariants
- A stub goes after the file of its layer is durable. So a crash at any time leaves one of both.
- Nobody waits for this. Where the bucket does not answer it is asked again, and `problems` says so.
- When no stub is left the directory is as any other, and its marker says so.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from nosync.lsm.errors import CorruptionError, NosyncError, described
from nosync.lsm.layers.reader import LayerReader
from nosync.lsm.model.layer import Record
from nosync.lsm.node.node import Node
from nosync.lsm.platform.env import Env, storage_error, storage_errors
from nosync.lsm.platform.lock import DirectoryLock
from nosync.lsm.platform.store_marker import read_marker, replace_marker
from nosync.replication.protocol.file_names import FileName
from nosync.replication.remote.bucket import Bucket, MissingObjectError
from nosync.replication.remote.fetch import Fetcher, Piece, pieces_of
from nosync.replication.remote.files import digest_of
from nosync.replication.remote.keeping import Keeper
from nosync.replication.remote.pack import Placed
from nosync.replication.remote.renewal import renew_stubs
from nosync.replication.remote.stub_env import StubEnv
from nosync.replication.remote.stubs import forget_from, read_stub, remove_directories, stub_names, stub_path

log = logging.getLogger("nosync.remote")

_THREADS = 4
_FIRST_RETRY_S, _LAST_RETRY_S = 1.0, 60.0
_NICENESS = 10
_PATIENCE_S = 10.0
_PROBLEM = "lazy restore"


class _StoppedError(Exception):
    """The store is closed."""


class Stubs:
    """The stubs of one directory, and fetching what they stand for. `came`: called with what is durable here."""

    def __init__(
        self, root: Path, bucket: Bucket, env: Env, came: Callable[[FileName], object] = lambda name: None
    ) -> None:
        self._root, self._bucket, self._env, self._came = root, bucket, env, came
        self.fetcher = Fetcher(bucket)
        self._is_stopped = threading.Event()

    def stop(self) -> None:
        """Ends `fetch_all` as soon as may be."""
        self._is_stopped.set()

    def left(self) -> list[Placed]:
        """Returns what is still to be fetched, the newest first. Stubs whose files came are removed."""
        found = []
        for name in list(stub_names(self._root)):
            placed = self._read(name)
            if placed is not None and not self._came_whole(placed):
                found.append(placed)
        return sorted(found, key=lambda placed: -placed.version.name.order)

    def _read(self, name: FileName) -> Placed | None:
        try:
            return read_stub(self._root, name, self._env)
        except CorruptionError:
            renew_stubs(self._root, self._bucket, self._env)
            return read_stub(self._root, name, self._env)

    def _came_whole(self, placed: Placed) -> bool:
        """Settles a file that is beside its stub. Nobody synced it, so a power cut may have torn it: then it goes."""
        name, path = placed.version.name, self._root / placed.version.name
        try:
            if digest_of(name, self._env.map(path), str(path)) == placed.version.digest:
                self._settle(name)
                return True
        except FileNotFoundError:
            return False
        except OSError as error:
            raise storage_error("read", path, error) from error
        except CorruptionError as error:
            log.warning("fetched again: %s", error)
        self._remove(path)
        return False

    def _remove(self, path: Path) -> None:
        with storage_errors("remove", path):
            self._env.unlink(path)

    def fetch_all(self, progress: Callable[[int, int], None] = lambda done, of: None) -> bool:
        """Fetches what is left. False: it was stopped. Raises RemoteError, CorruptionError, StorageError."""
        while left := self.left():
            done, total = 0, sum(placed.version.size_bytes for placed in left)
            progress(done, total)
            errors = []
            for piece, error in self._fetched(left):
                errors += [] if error is None else [error]
                done += piece.size_bytes
                progress(done, total)
            if self._is_stopped.is_set():
                return False
            for error in errors:  # all others were fetched
                if not isinstance(error, MissingObjectError):
                    raise error
            if errors:
                log.info("looked for anew: %s", errors[0])
                renew_stubs(self._root, self._bucket, self._env)
                if set(self.left()) >= set(left):  # nothing came, and nothing was found elsewhere
                    raise errors[0]
        return True

    def _fetched(self, left: list[Placed]) -> Iterator[tuple[Piece, NosyncError | None]]:
        """Yields pieces in order, each when its files are durable, or with what kept them from being fetched."""
        pieces = sorted(pieces_of(left), key=lambda piece: -max(placed.version.name.order for placed in piece.files))
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="nosync-restore", initializer=_out_of_the_way) as pool:
            yield from pool.map(self._fetch_or_error, pieces)

    def _fetch_or_error(self, piece: Piece) -> tuple[Piece, NosyncError | None]:
        try:
            self._fetch(piece)
        except _StoppedError:
            return piece, None
        except CorruptionError as error:
            if len(piece.files) == 1:
                return piece, error
            alone = [self._fetch_or_error(Piece((placed,)))[1] for placed in piece.files]  # the others are whole
            return piece, next((one for one in alone if one is not None), None)
        except NosyncError as error:
            return piece, error
        return piece, None

    def _fetch(self, piece: Piece) -> None:
        self._check_running()
        # Others need it no more; or a task fetched it meanwhile.
        files = tuple(one for one in piece.files if self._has_stub(one.version.name) and not self._came_whole(one))
        if not files:
            return
        made: set[Path] = set()
        keeper = Keeper(self._root, self._bucket.url, self._env, made.add)

        def keep(placed: Placed, data: pa.Buffer) -> None:
            self._check_running()
            keeper.keep(placed, data)

        self.fetcher.fetch(Piece(files), keep, lambda placed, parts: keeper.keep_large(placed, self._running(parts)))
        for placed in files:
            name = placed.version.name
            if self._has_stub(name):
                self._settle(name)
            elif self._root / name in made:  # it was dropped while it was fetched, and must not come back
                self._remove(self._root / name)

    def _has_stub(self, name: FileName) -> bool:
        return self._env.exists(stub_path(self._root, name))

    def _running(self, parts: Iterator[bytes]) -> Iterator[bytes]:
        for part in parts:
            self._check_running()
            yield part

    def _check_running(self) -> None:
        if self._is_stopped.is_set():
            raise _StoppedError

    def _settle(self, name: FileName) -> None:
        """Makes a file durable that came, and removes its stub."""
        path, stub = self._root / name, stub_path(self._root, name)
        try:
            self._env.sync_file(path)
            self._env.sync_dir(path.parent)
        except FileNotFoundError:  # set aside meanwhile: the stub stands for it again
            return
        except OSError as error:
            self._remove(path)  # after a failed fsync this inode is never trusted again
            raise storage_error("sync", path, error) from error
        self._came(name)
        with storage_errors("remove", stub):
            self._env.unlink(stub)

    def finish(self) -> bool:
        """The directory is as any other from now on. False: there is a stub that came meanwhile."""
        if not remove_directories(self._root, self._env):
            return False
        marker = read_marker(self._root, StubEnv(self._root))
        replace_marker(self._root, marker, self._env)
        forget_from(self._root, self._env)
        log.info("restored: all layers of %s are here", self._root)
        return True


def _out_of_the_way() -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


class Hydration:
    """Fetches the rest for as long as a store is open."""

    def __init__(self, node: Node) -> None:
        directory = node.directory
        env = directory.env
        assert isinstance(env, StubEnv), "the directory is restored lazily"
        self._node, self._env = node, env
        self._stubs: Stubs | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nosync-restore", daemon=True)

    def start(self) -> None:
        """Begins; it ends with the node."""
        self._node.parts.threads.end_too(self.stop)
        self._thread.start()

    def stop(self) -> None:
        """Ends it, and waits for that, but not for a bucket that does not answer: nothing is written after this."""
        self._closing.set()
        if self._stubs is not None:
            self._stubs.stop()
        self._thread.join(_PATIENCE_S)

    def _came(self, name: FileName) -> None:
        id = name.layer
        if id is not None:  # every byte of it was compared as it came
            reader = LayerReader.open(self._node.directory.path_of(id), Env(), id)
            self._node.note([id], Record(id, reader.digest, reader.info.rows, reader.size_bytes))

    def _run(self) -> None:
        pause_s = _FIRST_RETRY_S
        while not self._closing.is_set():
            try:
                self._step()
                return
            except Exception as error:  # noqa: BLE001 - it is logged; without this thread nothing more would be fetched
                self._node.problems[_PROBLEM] = described(error)
                log.warning("fetched again in %.0f s: %s", pause_s, described(error))
                self._closing.wait(pause_s)
                pause_s = min(_LAST_RETRY_S, 2 * pause_s)

    def _step(self) -> None:
        """Fetches what is left. Asked again after an error, so without the patience of who is asked once."""
        root = self._node.directory.root
        self._stubs = stubs = Stubs(root, self._env.open_bucket(), Env(), self._came)
        if self._closing.is_set():
            return
        while stubs.fetch_all() and not stubs.finish():
            log.info("layers were found in other objects meanwhile")
        self._node.problems.pop(_PROBLEM, None)


@dataclass(frozen=True)
class FetchReport:
    """Says what was fetched of a store that is restored lazily."""

    layers: int
    bytes: int
    requests: int


def fetch_rest(root: Path, bucket: Bucket, progress: Callable[[int, int], None]) -> FetchReport:
    """Fetches what a lazily restored directory lacks. Raises StoreLockedError where a process has it open, which fetches
    it by itself, RemoteError, CorruptionError, StorageError.
    """
    lock = DirectoryLock(root)
    try:
        came: list[FileName] = []
        stubs = Stubs(root, bucket, Env(), came.append)
        stubs.fetch_all(progress)
        while not stubs.finish():
            stubs.fetch_all(progress)
        return FetchReport(len(came), stubs.fetcher.bytes, stubs.fetcher.requests)
    finally:
        lock.release()
