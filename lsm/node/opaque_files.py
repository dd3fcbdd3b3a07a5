"""Files of kept checkpoints that are durable on this node: which they are, with their digests.

Nothing here knows what is in such a file. Whoever keeps a checkpoint links files into `checkpoints/`; this finds them,
makes them durable and tells the listener, which is replication.

Invariants
- A file is told of only after all its bytes were read for its digest, and it and the directories above it were synced.
- A file never changes. The digest that was found first counts: the catalog has it, and a file with other bytes is set
  aside.
- What nobody needs any more goes by `drop`, and the listener is told so. What is gone otherwise is lost: peers send it
  again.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from pathlib import Path, PurePosixPath

from blake3 import blake3

from nosync.lsm.errors import NosyncError
from nosync.lsm.manifests.catalog import Catalog
from nosync.lsm.node.announcer import Announcer
from nosync.lsm.node.ownership import Ownership
from nosync.lsm.platform.env import Env, opened_regular, storage_error, storage_errors
from nosync.lsm.platform.layout import CHECKPOINTS, QUARANTINE
from nosync.lsm.platform.opaque import OpaqueRecord, checkpoint_of, files_below
from nosync.lsm.platform.publish import write_again

log = logging.getLogger("nosync")

OPAQUE_META = "opaque/"
"""Catalog: by path, the digest and the size of each file."""
LIST_EVERY_S = GARBAGE_EVERY_S = 60.0
FIRST_GARBAGE_S = 5.0
_AT_ONCE = 256
"""So many files are synced, and told of, together."""
_READ_BYTES = 1 << 20

Garbage = Callable[[], Iterable[PurePosixPath]]
"""Says which files nobody needs."""


class OpaqueFiles:
    """The files of one data directory. `catalog_lock`: is held while the catalog is written.

    `problems`: gets an entry for each file that cannot be made durable, or has a name that is not sent to peers.
    """

    def __init__(
        self,
        root: Path,
        env: Env,
        ownership: Ownership,
        catalog: Catalog,
        catalog_lock: threading.RLock,
        announcer: Announcer,
        problems: MutableMapping[str, str],
        wake: Callable[[], None],
    ) -> None:
        self._root, self._env, self._ownership = root, env, ownership
        self._catalog, self._catalog_lock = catalog, catalog_lock
        self._announcer, self._problems, self._wake = announcer, problems, wake
        self._lock = threading.Lock()
        self._records = {record.path: record for record in recorded_in(catalog.metas(OPAQUE_META))}
        self._waiting: dict[PurePosixPath, OpaqueRecord | None] = {}
        self._suspects: dict[PurePosixPath, None] = {}
        self._doubtful: set[PurePosixPath] = set()  # their fsync failed
        self._next_list_s = env.monotonic_s()
        self._garbage: Garbage | None = None
        self._next_garbage_s = env.monotonic_s()

    # --- what there is ------------------------------------------------------------------------------------------------

    def records(self) -> list[OpaqueRecord]:
        """Returns the durable files."""
        with self._lock:
            return list(self._records.values())

    def note(self, paths: Iterable[PurePosixPath], verified: OpaqueRecord | None = None) -> None:
        """These files appeared, and are to be made durable. `verified`: what was found of one whose bytes were just read."""
        with self._lock:
            for path in paths:
                if path not in self._records and checkpoint_of(str(path)) is not None:
                    self._waiting.setdefault(path, verified if verified and verified.path == path else None)
        self._wake()

    def removes(self, garbage: Garbage) -> None:
        """Asks this from now on what nobody needs, the first time when peers have had the time to say what they hold.

        What is dropped before that is known would come again from a peer that has not dropped it yet.
        """
        self._garbage, self._next_garbage_s = garbage, self._env.monotonic_s() + FIRST_GARBAGE_S

    def suspect(self, path: PurePosixPath) -> None:
        """A peer could not use this file: all of it is read soon, and what is bad is set aside."""
        with self._lock:
            self._suspects[path] = None
        self._wake()

    def step(self) -> None:
        """Does what is due: lists the directory, looks at suspects, makes durable what waits, removes garbage."""
        self._ownership.check()
        if self._env.monotonic_s() >= self._next_list_s:
            self._compare()
            self._next_list_s = self._env.monotonic_s() + LIST_EVERY_S
        self._look_at_suspects()
        self._make_all_durable()
        if self._garbage is not None and self._env.monotonic_s() >= self._next_garbage_s:
            self.drop(self._garbage())
            self._next_garbage_s = self._env.monotonic_s() + GARBAGE_EVERY_S

    # --- listing ------------------------------------------------------------------------------------------------------

    def _compare(self) -> None:
        """Compares the directory with what is recorded: new files wait, those that are gone are lost."""
        with self._lock:
            known = dict(self._records)
        listed = {path: size for path, size in self._listed() if self._has_name_of_ours(path)}
        gone = [path for path in known if path not in listed]
        self._lose([path for path in gone if not self._env.exists(self._root / path)], "its file is gone")
        for path, record in known.items():
            if listed.get(path, record.size_bytes) != record.size_bytes:
                self.suspect(path)
        self.note(path for path in listed if path not in known)

    def _listed(self) -> Iterator[tuple[PurePosixPath, int]]:
        """Yields the files below `checkpoints/`, each with its size in bytes."""
        with storage_errors("list", self._root / CHECKPOINTS):
            self._env.list_dir(self._root / CHECKPOINTS)  # which refuses a link
        for path in files_below(self._root, PurePosixPath(CHECKPOINTS), self._env):
            try:
                yield path, self._env.size_bytes(self._root / path)
            except FileNotFoundError:
                continue  # it went just now

    def _has_name_of_ours(self, path: PurePosixPath) -> bool:
        """Returns whether peers take a file of this name. Of one that they do not take, the problems say so."""
        if checkpoint_of(str(path)) is not None:
            return True
        is_own = path.name.startswith(".") or path.name.endswith(".tmp") or path.name == "LOCK"
        if not is_own:
            self._problems[str(path)] = "is on this node only: its name has characters that peers do not take"
        return False

    # --- making durable -----------------------------------------------------------------------------------------------

    def _make_all_durable(self) -> None:
        with self._lock:
            waiting = list(self._waiting)
        for first in range(0, len(waiting), _AT_ONCE):
            self._make_durable(waiting[first : first + _AT_ONCE])

    def _make_durable(self, paths: Collection[PurePosixPath]) -> None:
        found: list[OpaqueRecord] = []
        for path in paths:
            try:
                record = self._synced(path)
            except NosyncError as error:
                log.error("not durable: %s", error)
                self._doubtful.add(path)
                self._problems[str(path)] = str(error)
                continue
            if record is None:
                self._settled(path)
            else:
                found.append(record)
        for directory in sorted({parent for record in found for parent in record.path.parents}):
            with storage_errors("sync", self._root / directory):
                self._env.sync_dir(self._root / directory)
        self._ownership.check()
        if not found:
            return
        with self._catalog_lock:
            self._catalog.remember({OPAQUE_META + str(r.path): f"{r.digest} {r.size_bytes}" for r in found})
        with self._lock:
            self._records |= {record.path: record for record in found}
        for record in found:
            self._settled(record.path)
        self._announcer.peers.held_opaque(found)

    def _settled(self, path: PurePosixPath) -> None:
        with self._lock:
            self._waiting.pop(path, None)
        self._doubtful.discard(path)
        self._problems.pop(str(path), None)

    def _synced(self, path: PurePosixPath) -> OpaqueRecord | None:
        """Reads all of a file and syncs it; None where it is not there any more."""
        final = self._root / path
        with self._lock:
            record = self._waiting.get(path)
        try:
            if record is None:
                record = read_record(self._root, path)
            if path in self._doubtful:
                write_again(self._root, final, self._env)
            else:
                self._env.sync_file(final)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise storage_error("sync", final, error) from error
        return record

    # --- what goes ----------------------------------------------------------------------------------------------------

    def drop(self, paths: Iterable[PurePosixPath]) -> None:
        """Removes files that nobody needs. In the order given, so that what names others can go before them."""
        paths = [path for path in paths if checkpoint_of(str(path)) is not None]
        if not paths:
            return
        self._forget(paths)
        self._announcer.peers.gone_opaque(paths, dropped=True)
        for path in paths:
            with storage_errors("remove", self._root / path):
                self._env.unlink(self._root / path)

    def set_aside(self, paths: Iterable[PurePosixPath], why: str) -> None:
        """Moves files to `quarantine/`. Peers send what they hold in their place."""
        for path in paths:
            target = self._root / QUARANTINE / f"{'.'.join(path.parts)}.{self._env.token()}"
            log.warning("quarantined as %s: %s", target, path)
            with storage_errors("quarantine", self._root / path):
                self._env.make_dirs(target.parent)
                self._env.replace(self._root / path, target)
            self._lose([path], why)

    def _look_at_suspects(self) -> None:
        with self._lock:
            suspects, self._suspects = [self._records[path] for path in self._suspects if path in self._records], {}
        for record in suspects:
            try:
                found = read_record(self._root, record.path)
            except FileNotFoundError:
                self._lose([record.path], "its file is gone")
                continue
            except OSError as error:
                raise storage_error("read", self._root / record.path, error) from error
            if found != record:
                was = f"had {record.digest[:16]} when it became durable"
                self.set_aside([record.path], f"it has digest {found.digest[:16]}, and {was}")

    def _lose(self, paths: Collection[PurePosixPath], why: str) -> None:
        for path in paths:
            log.warning("lost: %s: %s; peers that hold it send it again", path, why)
        if paths:
            self._forget(paths)
            self._announcer.peers.gone_opaque(list(paths), dropped=False)

    def _forget(self, paths: Iterable[PurePosixPath]) -> None:
        with self._lock:
            for path in paths:
                self._records.pop(path, None)
                self._waiting.pop(path, None)
        with self._catalog_lock:
            self._catalog.remember({}, forget=[OPAQUE_META + str(path) for path in paths])


def read_record(root: Path, path: PurePosixPath) -> OpaqueRecord:
    """Reads all of a file. Raises OSError."""
    hashed, size_bytes = blake3(), 0
    with opened_regular(root / path, os.O_RDONLY) as (fd, _):
        while data := os.read(fd, _READ_BYTES):
            hashed.update(data)
            size_bytes += len(data)
    return OpaqueRecord(path, hashed.hexdigest(), size_bytes)


def recorded_in(metas: Mapping[str, str]) -> Iterator[OpaqueRecord]:
    """Yields what a catalog says of the files that were durable."""
    for name, value in metas.items():
        if name.startswith(OPAQUE_META):
            digest, _, size_bytes = value.partition(" ")
            yield OpaqueRecord(PurePosixPath(name.removeprefix(OPAQUE_META)), digest, int(size_bytes))
