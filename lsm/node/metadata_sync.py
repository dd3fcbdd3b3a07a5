"""The small files of a data directory: manifests, the log of branches, registers. Making them durable, and knowing
which are.

Invariants
- A file is told of as durable only after it and the directories above it were synced.
- After a failed fsync the same inode is never trusted again: what is in the file is checked and goes to a new one.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

from nosync.lsm.errors import NosyncError
from nosync.lsm.facts.or_set import register_files
from nosync.lsm.platform.env import Env, storage_error, storage_errors
from nosync.lsm.platform.json_file import read_if_there, unseal_json
from nosync.lsm.platform.layout import BRANCHES, MANIFESTS
from nosync.lsm.platform.publish import write_again

log = logging.getLogger("nosync")


class MetadataSync:
    """Paths are relative to the data directory. `problems`: gets an entry for each file that cannot be made durable."""

    def __init__(self, root: Path, env: Env, problems: dict[str, str]) -> None:
        self._root, self._env, self._problems = root, env, problems
        self._lock = threading.Lock()
        self._waiting: dict[PurePosixPath, None] = {}
        self._durable: set[PurePosixPath] = set()
        self._doubtful: set[PurePosixPath] = set()  # their fsync failed

    def listed(self) -> list[PurePosixPath]:
        """Returns the small files that are there."""
        found = [PurePosixPath(BRANCHES, name) for name in self._env.list_dir(self._root / BRANCHES)]
        for timeline in self._env.list_dir(self._root / MANIFESTS):
            names = self._env.list_dir(self._root / MANIFESTS / timeline)
            found += [PurePosixPath(MANIFESTS, timeline, name) for name in names]
        return [path for path in found if path.name.endswith(".json")] + register_files(self._root, self._env)

    def note(self, paths: Iterable[PurePosixPath]) -> None:
        """These were published, and are to be made durable."""
        with self._lock:
            self._waiting |= dict.fromkeys(path for path in paths if path not in self._durable)

    def note_durable(self, path: PurePosixPath) -> None:
        """This one was made durable by who published it."""
        with self._lock:
            self._waiting.pop(path, None)
            self._durable.add(path)

    def waiting(self) -> list[PurePosixPath]:
        with self._lock:
            return list(self._waiting)

    def is_durable(self, path: PurePosixPath) -> bool:
        """Returns whether a file was made durable. One that nobody noted yet is not, though it does not wait either."""
        with self._lock:
            return path in self._durable

    def durable(self) -> list[PurePosixPath]:
        with self._lock:
            return sorted(self._durable)

    def replaced(self, paths: Iterable[PurePosixPath]) -> None:
        """Other files, which are durable, stand for these."""
        with self._lock:
            self._durable.difference_update(paths)
            for path in paths:
                self._waiting.pop(path, None)

    def forget_gone(self) -> list[PurePosixPath]:
        """Forgets what is not there any more, and returns which were durable."""
        with self._lock:
            known = {*self._durable, *self._waiting}
        gone = known.difference(self.listed())  # what is published from now on was not known before the listing
        with self._lock:
            durable = sorted(self._durable & gone)
            self._durable -= gone
            self._doubtful -= gone
            for path in gone:  # nothing is wrong with it any more
                self._problems.pop(str(path), None)
            self._waiting = {path: None for path in self._waiting if path not in gone}
        return durable

    def sync(self, paths: Sequence[PurePosixPath]) -> list[PurePosixPath]:
        """Makes these durable, which wait, and returns what is durable since. What cannot be is tried again next time."""
        synced: list[PurePosixPath] = []
        failed: dict[PurePosixPath, NosyncError] = {}
        for path in paths:
            try:
                if self._sync_file(path):
                    synced.append(path)
            except NosyncError as error:
                failed[path] = error
        # The data directory too: `branches`, `jobs` and the like are made when there is something to put into them.
        for directory in sorted({parent for path in synced for parent in path.parents}):
            try:
                with storage_errors("sync", self._root / directory):
                    self._sync_directory(directory)
            except NosyncError as error:
                failed |= {path: error for path in synced if directory in path.parents}
        for reason in dict.fromkeys(failed.values()):
            log.error("not durable: %s", reason)
        self._doubtful = self._doubtful - set(paths) | failed.keys()
        self._problems |= {str(path): str(reason) for path, reason in failed.items()}
        durable = [path for path in synced if path not in failed and (self._root / path).exists()]
        with self._lock:
            for path in [path for path in paths if path not in failed]:
                self._waiting.pop(path, None)
                self._problems.pop(str(path), None)
            self._durable.update(durable)
        return durable

    def _sync_directory(self, directory: PurePosixPath) -> None:
        with contextlib.suppress(FileNotFoundError):  # it went with its branch
            self._env.sync_dir(self._root / directory)

    def _sync_file(self, path: PurePosixPath) -> bool:
        """Makes a small file durable. Returns False where it is gone, with its branch."""
        final = self._root / path
        try:
            if path in self._doubtful:
                unseal_json(read_if_there(final, self._env), str(final))
                write_again(self._root, final, self._env)
            else:
                self._env.sync_file(final)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not final.exists():
                return False
            raise storage_error("sync", final, error) from error
        return True
