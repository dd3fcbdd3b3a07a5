"""The files of a directory that was restored lazily: those of which only a stub is here are fetched when they are read.

Any process of the host may have one: the store's, and tasks. What they fetch as a whole gets its name in the directory,
and the store's process makes it durable (`hydration`). Of large layers only the ends and the blocks are fetched that are
read, and kept by this process until it ends.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from nosync.lsm.errors import CorruptionError
from nosync.lsm.platform.env import Env, Identity, Stub
from nosync.lsm.platform.layout import LAYERS, STUBS
from nosync.lsm.platform.publish import temporary_path
from nosync.replication.protocol.file_names import FileName
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
    """`root`: the data directory. `bucket` and `local`: for tests (default: the bucket that `stubs.json` names, and this
    host's files).
    """

    sees_stubs = True

    def __init__(self, root: Path, bucket: Bucket | None = None, local: Env | None = None) -> None:
        self._root, self._local, self._given = root, local or Env(), bucket
        self._layers = root / LAYERS
        self._lock = threading.RLock()
        self._fetcher: Fetcher | None = None
        self._partial: dict[Path, PartialFile] = {}

    @property
    def bucket(self) -> Bucket:
        """Returns the bucket that has the bytes. Raises RemoteError where it cannot be asked."""
        return PatientBucket(self._given or open_bucket(read_from(self._root, self._local), to_read=True), self._local)

    @property
    def fetcher(self) -> Fetcher:
        """Returns what fetches from the bucket, and counts."""
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
            renew_stubs(self._root, self.bucket, self._local, damaged=[FileName(self._name(path))])
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
        found, stubs = self._local.list_dir(path), self._stubs_of(path)
        return found if stubs is None else list(dict.fromkeys([*found, *self._local.list_dir(stubs)]))

    def entries(self, path: Path) -> list[tuple[str, bool]]:
        """See Env."""
        found, stubs = self._local.entries(path), self._stubs_of(path)
        return found if stubs is None else list(dict.fromkeys([*found, *self._local.entries(stubs)]))

    def changed_ns(self, path: Path) -> int:
        """See Env."""
        stubs = self._stubs_of(path)
        here_ns = self._local.changed_ns(path)
        return here_ns if stubs is None else max(here_ns, self._local.changed_ns(stubs))

    def exists(self, path: Path) -> bool:
        """See Env."""
        return self._local.exists(path) or self._placed(path) is not None

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
        if self._placed(path) in (None, before) and not self._local.exists(path):
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

    def map_in_parts(self, path: Path) -> pa.Buffer:
        """See Env."""
        with self._lock:
            placed = self._placed(path)
            if placed is None:
                self._partial.pop(path, None)
                return self._local.map(path)
            if not placed.place.part_bytes:
                return self.map(path)
            try:
                return self._partial_of(path, placed).buffer()
            except MissingObjectError as error:
                self._partial.pop(path, None)
                self._renew(path, error)
        return self.map_in_parts(path)

    def _partial_of(self, path: Path, placed: Placed) -> PartialFile:
        partial = self._partial.get(path)
        if partial is None or partial.placed != placed:
            temporary = temporary_path(self._root, self._local)
            partial = self._partial[path] = PartialFile(placed, self.fetcher, temporary)
        return partial

    def have(self, path: Path, begin: int, end: int) -> None:
        """See Env. Who has mapped a part of a file goes on with it, also after all of it came."""
        with self._lock:
            partial = self._partial.get(path)
        if partial is not None:
            partial.have(begin, end)

    # --- writing ------------------------------------------------------------------------------------------------------

    def link(self, source: Path, target: Path) -> None:
        """See Env. Where there is a stub the name is taken."""
        if self._placed(target) is not None:
            raise FileExistsError(target)
        self.fetch_whole(source)
        self._local.link(source, target)

    def replace(self, source: Path, target: Path) -> None:
        """See Env. A stub alone goes: there is nothing in it to be looked at. Beside a file that is moved it stays, and
        stands for the layer again.
        """
        if self._placed(source) is not None:
            self._local.unlink(stub_path(self._root, self._name(source)))
        self._local.replace(source, target)

    def unlink(self, path: Path) -> None:
        """See Env."""
        if self._is_layer(path):
            self._local.unlink(stub_path(self._root, self._name(path)))
            with self._lock:
                self._partial.pop(path, None)
        self._local.unlink(path)
