"""The files of a store in a bucket as if they were in a directory, where those that were read are kept.

Invariants
- What is listed is what is seen of the bucket: up to the remotely safe epochs. It is looked for again every few seconds.
- Small files, and layers that lie in packs, are fetched whole and compared with their digests before they get a name.
- Of a large layer only its ends are fetched, and each block when it is first read. Its reader compares all of these with
  digests. Such files are gone when the store is closed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from nosync.lsm.errors import CorruptionError, StorageError
from nosync.lsm.manifests.timelines import Timelines
from nosync.lsm.platform.env import Env, Have, Identity, storage_errors
from nosync.lsm.platform.layout import LAYERS, MANIFESTS
from nosync.lsm.platform.publish import give_name, temporary_path
from nosync.replication.protocol.file_names import FileName, FileVersion
from nosync.replication.remote.bucket import Bucket, MissingObjectError
from nosync.replication.remote.fetch import Fetcher, fetch_all
from nosync.replication.remote.files import digest_of
from nosync.replication.remote.listed import ListedLayers
from nosync.replication.remote.pack import Placed
from nosync.replication.remote.partial_file import PartialFile
from nosync.replication.remote.patient import PatientBucket
from nosync.replication.remote.view import RemoteView, read_view, read_view_again, seen_manifests

log = logging.getLogger("nosync.remote")

LOOK_EVERY_S = 2.0


class BucketEnv(Env):
    """`root`: where files are kept. Raises RemoteError where the bucket does not answer."""

    def __init__(self, root: Path, bucket: Bucket) -> None:
        self._root, self._local = root, Env()
        self._bucket = PatientBucket(bucket, self._local)
        self.fetcher = Fetcher(self._bucket)
        self._lock = threading.RLock()
        self._partial: dict[Path, PartialFile] = {}
        self._sound: dict[Path, FileVersion] = {}  # files that were compared with these digests
        self._show(read_view(self._bucket))

    # --- what there is ------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        view = read_view_again(self._bucket, self.view)
        if view is not self.view:
            self._show(view)
        self._looked_s = self._local.monotonic_s()

    def _show(self, view: RemoteView) -> None:
        directories: dict[str, dict[str, FileName | None]] = {}
        for name in view.files:
            for path in _paths_of(name, view):
                _enter(directories, path, name)
        self.view, self._directories, self._looked_s = view, directories, self._local.monotonic_s()
        if any(name.layer is not None for name in view.others):  # rarely: it reads all manifests
            ListedLayers(Timelines(self._root, self)).choose(view)
        self._partial = {path: partial for path, partial in self._partial.items() if self._placed(path) is not None}

    def _refreshed(self) -> None:
        with self._lock:
            if self._local.monotonic_s() >= self._looked_s + LOOK_EVERY_S:
                self._look()

    def _relative(self, path: Path) -> str:
        return path.relative_to(self._root).as_posix()

    def _placed(self, path: Path) -> Placed | None:
        directory, _, last = self._relative(path).rpartition("/")
        name = self._directories.get(directory, {}).get(last)
        return None if name is None else self.view.files.get(name)

    def list_dir(self, path: Path) -> list[str]:
        """See Env."""
        directory = self._relative(path)
        if not directory.startswith(LAYERS):
            self._refreshed()
        with self._lock:
            found = dict(self._directories.get("" if directory == "." else directory, {}))
            if directory.startswith(MANIFESTS):  # all of them are read: at once, and not one by one
                self._fetch([path / name for name, file in found.items() if file is not None])
        return list(found)

    def entries(self, path: Path) -> list[tuple[str, bool]]:
        """See Env."""
        return [(name, self._placed(path / name) is None) for name in self.list_dir(path)]

    def exists(self, path: Path) -> bool:
        """See Env."""
        directory, _, last = self._relative(path).rpartition("/")
        return last in self._directories.get(directory, {}) or self._local.exists(path)

    # --- what is in it ------------------------------------------------------------------------------------------------

    def read(self, path: Path) -> bytes:
        """See Env."""
        self._fetch([path])
        return super().read(path)

    def map(self, path: Path) -> pa.Buffer:
        """See Env."""
        self._fetch([path])
        return super().map(path)

    def map_in_parts(self, path: Path) -> tuple[pa.Buffer, Have | None]:
        """See Env."""
        with self._lock:
            placed = self._placed(path)
            if placed is not None and placed.place.part_bytes and placed.version.name.layer is not None:
                partial = self._partial_of(path, placed)
                return partial.buffer(), partial.have
        return self.map(path), None

    def identity(self, path: Path) -> Identity:
        """See Env."""
        placed = self._placed(path)
        if placed is None:
            return super().identity(path)
        version = placed.version
        return Identity(int(version.digest[:15], 16), 0, version.size_bytes)

    def size_bytes(self, path: Path) -> int:
        """See Env."""
        placed = self._placed(path)
        return super().size_bytes(path) if placed is None else placed.version.size_bytes

    def _fetch(self, paths: list[Path]) -> None:
        """Fetches what is seen and not here. What is not there any more is left out: whoever opens it notices."""
        with self._lock:
            wanted = {path: placed for path in paths if (placed := self._placed(path)) is not None}
            missing = {path: placed for path, placed in wanted.items() if not self._is_here(path, placed)}
            by_name = {placed.version.name: path for path, placed in missing.items()}

            def keep(placed: Placed, data: pa.Buffer) -> None:
                if self.view.is_cut(placed.version.name):
                    self._keep_singly(placed, data)
                else:
                    self._keep(by_name[placed.version.name], data, placed.version)

            try:
                fetch_all(self.fetcher, {placed.version.name: placed for placed in missing.values()}.values(), keep)
            except MissingObjectError:
                self._look()  # it was collected, so another stands for it by now

    def _is_here(self, path: Path, placed: Placed) -> bool:
        """Returns whether a file is kept, and the one that is seen: an earlier session may have left another one."""
        if not self._local.exists(path):
            return False
        if self._sound.get(path) == placed.version:
            return True
        try:
            if digest_of(placed.version.name, self._local.map(path), str(path)) == placed.version.digest:
                self._sound[path] = placed.version
                return True
        except (CorruptionError, OSError) as error:
            log.info("fetched again: %s", error)
        self._local.unlink(path)
        return False

    def _keep(self, path: Path, data: pa.Buffer | bytes, version: FileVersion) -> None:
        temporary = temporary_path(self._root, self._local)
        with storage_errors("keep", path):
            try:
                with self._local.create(temporary) as file:
                    file.write(data)
                give_name(temporary, path, self._local)
            except FileExistsError:
                return
            finally:
                self._local.unlink(temporary)
        self._sound[path] = version

    def _keep_singly(self, placed: Placed, data: pa.Buffer) -> None:
        """Keeps the epochs of an archive that are seen as single manifests."""
        for manifest in seen_manifests(self.view, placed, data.to_pybytes()):
            self._keep(self._root / manifest.path, manifest.to_json(), placed.version)

    def _partial_of(self, path: Path, placed: Placed) -> PartialFile:
        partial = self._partial.get(path)
        if partial is None or partial.placed != placed:
            partial = self._partial[path] = PartialFile(placed, self.fetcher, temporary_path(self._root, self._local))
        return partial

    # --- what is not done ---------------------------------------------------------------------------------------------

    def create(self, path: Path) -> BinaryIO:
        """Raises StorageError: nothing is written through this."""
        raise not_written(self._bucket.url)

    def unlink(self, path: Path) -> None:
        """Raises StorageError: nothing is removed through this."""
        raise not_written(self._bucket.url)


def not_written(url: str) -> StorageError:
    """Returns the error of who wants to change a store that is read from a bucket."""
    return StorageError(
        f"the store at {url} is read from its copies, and cannot be written there: open its directory, or restore it "
        f"(nosync restore {url} DIR)"
    )


def _paths_of(name: FileName, view: RemoteView) -> Iterator[str]:
    """Yields under which paths a file is seen."""
    if view.is_seen(name):
        yield str(name)
    elif view.is_cut(name):
        assert name.span is not None, "it is an archive"
        yield from (f"{name.span.timeline}/{t}.json" for t in range(name.span.first, view.cut(name) + 1))


def _enter(directories: dict[str, dict[str, FileName | None]], path: str, name: FileName) -> None:
    directory, _, last = path.rpartition("/")
    directories.setdefault(directory, {})[last] = name
    while directory:
        parent, _, last = directory.rpartition("/")
        if last in directories.setdefault(parent, {}):
            break
        directories[parent][last] = None
        directory = parent
