"""How far the copies in object stores are, in a file of the data directory: for processes that only look at it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path

from nosync.lsm.errors import NosyncError, RemoteError
from nosync.lsm.platform.env import Env, storage_errors
from nosync.lsm.platform.json_file import read_small, replace_small, seal_json
from nosync.lsm.platform.layout import COPIED_TO, REMOTE_STATUS
from nosync.lsm.platform.parsing import parsed
from nosync.lsm.platform.publish import temporary_path
from nosync.lsm.status import RemoteStatus

_LOOK_EVERY_S = 0.2


def write_remote_status(root: Path, remotes: Iterable[RemoteStatus], env: Env) -> None:
    """Writes the file in place of the one that is there. It is not synced: after a crash it says what was."""
    temporary = temporary_path(root, env)
    try:
        with env.create(temporary) as file:
            file.write(seal_json({"remotes": [dataclasses.asdict(one) for one in remotes]}))
        env.replace(temporary, root / REMOTE_STATUS)
    finally:
        env.unlink(temporary)


def read_remote_status(root: Path, env: Env) -> tuple[RemoteStatus, ...]:
    """Returns what was written last; nothing where there is no such file, or it is damaged."""
    path = root / REMOTE_STATUS
    if not env.exists(path):
        return ()
    try:
        with parsed("how far copies are", str(path)):
            return tuple(RemoteStatus(**one) for one in read_small(path, env)["remotes"])
    except NosyncError:
        return ()


def forget_remote_status(root: Path, env: Env) -> None:
    """Removes the file: what it says is of a process that ended."""
    with storage_errors("remove", root / REMOTE_STATUS):
        env.unlink(root / REMOTE_STATUS)


def copied_to(root: Path, env: Env) -> list[str]:
    """Returns the URLs that have had copies of a directory; none where that is not known."""
    path = root / COPIED_TO
    if not env.exists(path):
        return []
    try:
        with parsed("which object stores had copies", str(path)):
            return [str(url) for url in read_small(path, env)["urls"]]
    except NosyncError:
        return []


def note_copied_to(root: Path, url: str, env: Env) -> None:
    """Notes that a URL has copies. Durable when this returns."""
    known = copied_to(root, env)
    if url not in known:
        replace_small(root, root / COPIED_TO, {"urls": [*known, url]}, env)


class CopiesOfDaemon:
    """The copies that the daemon of a directory makes, as a process beside it sees them. See RemoteCopies."""

    def __init__(self, root: Path, env: Env, url: str, last_sealed: Callable[[], int | None]) -> None:
        """`last_sealed`: returns the newest epoch of main as this process knows it."""
        self._root, self._env, self._url, self._last_sealed = root, env, url, last_sealed

    def status(self) -> RemoteStatus:
        """See RemoteCopies."""
        found = [one for one in read_remote_status(self._root, self._env) if one.url == self._url]
        if not found:
            raise RemoteError(f"{self._root}: its daemon does not say any more how far the copies at {self._url} are")
        return found[0]

    def push(self, patience_s: float) -> bool:
        """Waits until the daemon says that all is there. See RemoteCopies."""
        end_s = self._env.monotonic_s() + patience_s
        last = self._last_sealed()  # of it the daemon may not know yet, and so not count it among what it lacks
        while not _has_all(self.status(), last):
            if self._env.monotonic_s() >= end_s:
                return False
            self._env.wait_s(_LOOK_EVERY_S)
        return True

    def finish(self) -> None:
        """The daemon goes on."""

    def abandon(self) -> None:
        """The daemon goes on."""


def _has_all(status: RemoteStatus, last: int | None) -> bool:
    """Returns whether nothing waits, as a daemon says, and the newest epoch is among what it copied."""
    is_behind = last is not None and (status.safe_point is None or status.safe_point < last)
    return not (is_behind or status.lag_epochs or status.waiting_bytes or status.problem)
