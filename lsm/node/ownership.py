"""A node owns its data directory, for as long as the directory stays at its path."""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path

from nosync.lsm.errors import StorageError
from nosync.lsm.platform.lock import DirectoryLock

_PROBLEM = "the data directory"


class Ownership:
    """The lock of one directory. Raises StoreLockedError where another node has it."""

    def __init__(self, root: Path, problems: MutableMapping[str, str]) -> None:
        self._lock, self._problems = DirectoryLock(root), problems

    def check(self) -> None:
        """Raises StorageError where the directory was moved away.

        It comes before whatever takes a file that is not at its path for lost, and whatever writes or deletes by path.
        """
        try:
            self._lock.check()
        except StorageError as error:
            self._problems[_PROBLEM] = str(error)
            raise
        self._problems.pop(_PROBLEM, None)

    def release(self) -> None:
        """The directory is free for the next node."""
        self._lock.release()
