"""The files of a directory that was restored lazily: those of which only a stub is here are fetched when they are read.

Any process of the host may have one: the store's, and tasks. What they fetch as a whole gets its name in the directory,
and the store's process makes it durable (`hydration`). Of large layers only the ends and the blocks are fetched that are
read, and kept by this process until it ends.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from nosync.lsm.errors import CorruptionError, RemoteError
from nosync.lsm.platform.env import Env, Have, Identity, Stub, storage_errors
from nosync.lsm.platform.layout import LAYERS, STUBS
from nosync.lsm.platform.publish import temporary_path
from nosync.replication.remote.bucket import Bucket, MissingObjectError
from nosync.replication.remote.cloud import open_bucket
from nosync.replication.remote.fetch import Fetcher
from nosync.replication.remote.keeping import fetch_layers
from nosync.replication.remote.pack import Placed
from nosync.replication.remote.partial_file import PartialFile
from nosync.replication.remote.patient import PatientBucket
from nosync.replication.remote.renewal import renew_stubs
from nosync.replication.remote.stubs import read_from, read_stub, stub_path

log = logging.getLogger("nosync.remote")


class StubEnv(Env):
    """A file that is moved leaves its stub behind, which stands for the layer again: nothing else says where its bytes are.

    `root`: the data directory. `bucket` and `local`: for tests (default: the bucket that `stubs.json` names, and this
    host's files).
    """

    sees_stubs = True

    def __init__(self, root: Path, bucket: Bucket | None = None, local: Env | None = None) -> None:
        self._root, self._local, self._given = root, local or Env(), bucket
        self._layers, self._pid = root / LAYERS, os.getpid()
        self._lock = threading.RLock()
        self._fetcher: Fetcher | None = None
        self._partial: dict[Path, PartialFile] = {}

    @property
    def bucket(self) -> Bucket:
        """Returns the bucket that has the bytes. Raises RemoteError where it cannot be asked."""
        return PatientBucket(self.open_bucket(), self._local)

    def open_bucket(self) -> Bucket:
        """Returns the same for who asks again by itself."""
        return self._given or open_bucket(read_from(self._root, self._local), to_read=True)

    @property
    def fetcher(self) -> Fetcher:
        """Returns what fetches from the bucket, and counts. Raises RemoteError in a process that was forked meanwhile."""
        if os.getpid() != self._pid:  # its connections are its parent's, and answer nobody
            raise RemoteError(
                f"{self._root}: its layers are in a bucket, which a forked process cannot ask: open it there"
            )
        with self._lock:
            if self._fetcher is None:
                self._fetcher = Fetcher(self.bucket)
            return self._fetcher

    # --- what there is ------------------------------------------------------------------------------------------------

    def _is_layer(self, path: Path) -> bool:
        return self._layers in path.parents

    def _name(self, path: Path) -> str:
        return path.relative_to(self._root).as_posix()

    def _placed(self, path: Path) -> Placed | None:
        """Returns where the bytes of a file are that is not here; None for any other."""
        if not self._is_layer(path) or self._local.exists(path):
            return None
        try:
            return read_stub(self._root, self._name(path), self._local)
        except CorruptionError as error:
            log.warning("looked for anew: %s", error)
            renew_stubs(self._root, self.bucket, self._local)
            return read_stub(self._root, self._name(path), self._local)

    def _stubs_of(self, directory: Path) -> Path | None:
        if directory != self._layers and not self._is_layer(directory):
            return None
        return self._root / STUBS / directory.relative_to(self._layers)

    def stub(self, path: Path) -> Stub | None:
        """See Env."""
        placed = self._placed(path)
        return None if placed is None else Stub(placed.version.digest, placed.version.size_bytes)

    def list_dir(self, path: Path) -> list[str]:
        """See Env."""
        stubs = self._stubs_of(path)
        waiting = [] if stubs is None else self._local.list_dir(stubs)  # first: what came meanwhile is among the files
        return list(dict.fromkeys([*self._local.list_dir(path), *waiting]))

    def entries(self, path: Path) -> list[tuple[str, bool]]:
        """See Env."""
        stubs = self._stubs_of(path)
        waiting = [] if stubs is None else self._local.entries(stubs)
        return list(dict.fromkeys([*self._local.entries(path), *waiting]))

    def changed_ns(self, path: Path) -> int:
        """See Env."""
        stubs = self._stubs_of(path)
        here_ns = self._local.changed_ns(path)
        return here_ns if stubs is None else max(here_ns, self._local.changed_ns(stubs))

    def exists(self, path: Path) -> bool:
        """See Env."""
        return self._placed(path) is not None or self._local.exists(path)  # it may come between the two

    def identity(self, path: Path) -> Identity:
        """See Env."""
        try:
            return self._local.identity(path)
        except FileNotFoundError:
            placed = self._placed(path)
            if placed is None:
                return self._local.identity(path)  # it may have come meanwhile
            return Identity(int(placed.version.digest[:15], 16), 0, placed.version.size_bytes)

    def size_bytes(self, path: Path) -> int:
        """See Env."""
        return self.identity(path).size_bytes

    # --- reading ------------------------------------------------------------------------------------------------------

    def fetch_whole(self, path: Path) -> None:
        """See Env. Raises RemoteError, CorruptionError."""
        placed = self._placed(path)
        if placed is None:
            return
        try:
            fetch_layers(self._root, [placed], self.fetcher, self._local)
        except MissingObjectError as error:
            self._renew(path, error)
            self.fetch_whole(path)

    def _renew(self, path: Path, error: MissingObjectError) -> None:
        """The object was collected: another layer stands for it by now. Raises FileNotFoundError where its name went."""
        log.info("looked for anew: %s", error)
        before = self._placed(path)
        renew_stubs(self._root, self.bucket, self._local)
        now = self._placed(path)
        if now is not None and now == before:  # nothing stands for it
            raise RemoteError(
                f"{error}. Nothing in the bucket stands for it: restore another directory, or remove "
                f"{stub_path(self._root, self._name(path))}, and recover() computes the layer again"
            ) from error
        if now is None and not self._local.exists(path):
            raise FileNotFoundError(path)

    def read(self, path: Path) -> bytes:
        """See Env."""
        self.fetch_whole(path)
        return self._local.read(path)

    def map(self, path: Path) -> pa.Buffer:
        """See Env."""
        self.fetch_whole(path)
        return self._local.map(path)

    def copy(self, path: Path, target: BinaryIO) -> None:
        """See Env."""
        self.fetch_whole(path)
        self._local.copy(path, target)

    def map_in_parts(self, path: Path) -> tuple[pa.Buffer, Have | None]:
        """See Env. Who has mapped parts goes on with them, also after all of the file came, or nothing needs it."""
        with self._lock:
            placed = self._placed(path)
            if placed is None:
                self._partial.pop(path, None)
                return self._local.map(path), None
            partial = self._partial_of(path, placed) if placed.place.part_bytes else None
        if partial is None:  # it is small
            return self.map(path), None
        try:
            return partial.buffer(), partial.have
        except MissingObjectError as error:
            with self._lock:
                self._partial.pop(path, None)
            self._renew(path, error)
        return self.map_in_parts(path)

    def _partial_of(self, path: Path, placed: Placed) -> PartialFile:
        partial = self._partial.get(path)
        if partial is None or partial.placed.version != placed.version:
            temporary = temporary_path(self._root, self._local)
            partial = PartialFile(placed, self.fetcher, temporary, path, lambda error: self._moved(path, error))
            self._partial[path] = partial
        return partial

    def _moved(self, path: Path, error: MissingObjectError) -> Placed | None:
        log.info("looked for anew: %s", error)
        renew_stubs(self._root, self.bucket, self._local)
        return self._placed(path)

    # --- writing ------------------------------------------------------------------------------------------------------

    def link(self, source: Path, target: Path) -> None:
        """See Env. Where there is a stub the name is taken."""
        if self._placed(target) is not None:
            raise FileExistsError(target)
        self.fetch_whole(source)
        self._local.link(source, target)

    def unlink(self, path: Path) -> None:
        """See Env."""
        self.forget_stub(path)
        self._local.unlink(path)

    def forget_stub(self, path: Path) -> None:
        """See Env."""
        if self._is_layer(path):
            stub = stub_path(self._root, self._name(path))
            with storage_errors("remove", stub):
                self._local.unlink(stub)
            with self._lock:
                self._partial.pop(path, None)
