"""Taking what the door published into the keep, in the order in which it was published. The query does not wait for it.

Invariants
- What a batch changed enters after its commit was published: a batch that runs again may write it otherwise before.
  Offsets and the logs of sources enter at once, so that a batch which runs again reads what it read before.
- `commits/t` enters last of its batch.
- What a task of another host wrote comes here before it enters. So what is kept has all come through this directory.
- What could not be taken is tried again. Nothing later enters before it.
- A name that is kept stands for what is kept. Where the query, or somebody else, gave it to other contents, nothing more
  enters, and strict mode waits for it in vain.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from nosync.checkpoints.keep import Keep, files_below
from nosync.checkpoints.names import (
    CRC_SUFFIX,
    METADATA,
    Batch,
    BatchFile,
    Form,
    SourceFile,
    StateFile,
    StorePart,
    is_kept,
    parse,
)
from nosync.checkpoints.peers import is_kept_by_daemon
from nosync.checkpoints.retention import clean
from nosync.lsm.errors import NosyncError, ReplicationError, described
from nosync.lsm.platform.env import storage_errors

log = logging.getLogger("nosync")

IDLE_S = 1.0
"""What belongs to a batch that was committed before is taken after so long, where no batch comes."""
_LOGS = ("commits/", "offsets/")
"""What is ready is taken when one of these is: each taking syncs directories."""


def _is_written_once(path: str) -> bool:
    """Returns whether no batch that runs again writes a file of this name with other contents."""
    return path == METADATA or isinstance(parse(path), BatchFile | SourceFile)


class Elsewhere(Protocol):
    """Files of the checkpoint that are on other hosts."""

    def all_elsewhere(self) -> Iterator[str]:
        """Yields the names of all files that are elsewhere."""

    def bring(self, path: str) -> None:
        """Has a file come here, if it is elsewhere. Raises NosyncError."""

    def is_needed(self, path: str) -> bool:
        """Returns whether a query cannot do without a file that is elsewhere."""

    def drop(self, path: str) -> None:
        """Removes the name of a file that is elsewhere."""

    def release_all(self) -> None:
        """Tells other hosts what is not needed there any more."""


class Intake:
    """Takes the files of one checkpoint. `published` is called by the door; everything else by one thread."""

    def __init__(
        self,
        source: Path,
        keep: Keep,
        keep_batches: int,
        taken: Callable[[], None],
        elsewhere: Elsewhere | None = None,
    ) -> None:
        """`taken`: is called when files have become durable."""
        self._source, self._keep, self._batches, self._taken = source, keep, keep_batches, taken
        self._elsewhere = elsewhere
        self._has_daemon = is_kept_by_daemon(keep.data)
        self._arrived: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._published: set[str] = set()
        """What got its name again, or for the first time, and was not taken since."""
        self._ready: dict[str, None] = {}
        self._waiting: dict[str, None] = {}
        self._committed: Batch | None = None
        self._taking = threading.Lock()
        self.problem: str | None = None
        """What keeps files from being kept; None when all is well."""
        self.lacks: str | None = None
        """What does not come from another host, as far as it was tried last."""

    def published(self, path: str) -> None:
        """Says that a file got its name."""
        if _is_written_once(path):
            self._published.add(path)
        self._arrived.put(path)

    def is_behind(self) -> bool:
        """Returns whether the beginning of a query, or an entry of its logs, was published and is not taken yet."""
        return bool(self._published)

    def copies(self, paths: Sequence[str]) -> int:
        """Returns 1 if all of some files are durable here as they are now, and 0 otherwise."""
        return int(all(path in self._keep.index and path not in self._published for path in paths))

    def all_of(self, paths: Sequence[str]) -> Collection[str]:
        """Returns all files that are needed so that batches of which these are offsets and commits are not lost.

        These are what a query needs to go on after the commit, and to read again what the offsets say.
        """
        found = {METADATA, *paths}
        with self._taking:
            for path in paths:
                file = parse(path)
                if isinstance(file, BatchFile) and file.log == "commits":
                    found |= self._keep.closures.of(file.batch).paths
                elif isinstance(file, BatchFile):
                    found |= self._entries_of(file.batch)
        return found

    def _entries_of(self, t: Batch) -> set[str]:
        """Returns the entries of sources' logs that batch `t` reads. Those of batches before belong to their commits."""
        offsets = self._keep.closures.offsets
        before = offsets(Batch(t - 1)).log_ends if f"offsets/{t - 1}" in self._keep.index else {}
        found = set[str]()
        for source, end in offsets(t).log_ends.items():
            entries = self._keep.index.source_log(source)
            found |= {path for (n, _), path in entries.items() if before.get(source, -1) < n <= end}
        return found

    def take_all(self) -> None:
        """Takes what the directory has already: of what an earlier process published, it may have died before it took it.

        What cannot be taken is a problem, and does not keep the query from going on. Raises StorageError where the directory
        cannot be listed.
        """
        with storage_errors("list", self._source):
            paths = list(files_below(self._source, self._keep.env))
        if self._elsewhere is not None:
            paths += self._elsewhere.all_elsewhere()
        for path in sorted(paths, key=lambda path: path.startswith("commits/")):
            self._sort_in(path)
        self._try_to_take()

    def run(self, stopped: threading.Event) -> None:
        """Takes what arrives until `stopped`, and then the rest."""
        while not stopped.is_set():
            self.step(IDLE_S)
        self.step(0.0)

    def step(self, wait_s: float) -> None:
        """Waits for files so long at most, and takes what has arrived."""
        is_idle = wait_s == 0.0
        try:
            path = self._arrived.get(timeout=wait_s) if wait_s else self._arrived.get_nowait()
        except queue.Empty:
            is_idle = True
        else:
            self._sort_in(path)
            with contextlib.suppress(queue.Empty):
                while True:
                    self._sort_in(self._arrived.get_nowait())
        if self._ready and (is_idle or any(path.startswith(_LOGS) for path in self._ready)):
            self._try_to_take()

    def wake(self) -> None:
        """Lets `step` return at once."""
        self._arrived.put(None)

    def _sort_in(self, path: str | None) -> None:
        """Says of a file whether it may be taken. A commit lets those wait no longer that belong to it."""
        if path is None or not is_kept(path):
            return
        file = parse(path.removesuffix(CRC_SUFFIX))
        match file:
            case StorePart():
                return  # it comes with the snapshot that names it
            case BatchFile(_, "commits", batch) if not path.endswith(CRC_SUFFIX):
                self._committed = max(batch, self._committed or batch)
                for waiting in [one for one in self._waiting if self._is_finished(one)]:
                    del self._waiting[waiting]
                    self._ready[waiting] = None
            case BatchFile() | SourceFile():
                pass
            case StateFile() if self._is_finished(path):
                pass
            case _ if path.removesuffix(CRC_SUFFIX) != METADATA:
                self._waiting[path] = None
                return
        self._ready[path] = None

    def _is_finished(self, path: str) -> bool:
        """Returns whether no batch that runs can write a file again."""
        file = parse(path.removesuffix(CRC_SUFFIX))
        last = self._committed
        return not isinstance(file, StateFile) or (last is not None and file.version <= last + 1)

    def _try_to_take(self) -> None:
        """Takes what is ready. An error is logged once, and what is ready stays so."""
        try:
            self._take()
            self.problem = None
        except Exception as error:  # a defect of ours as well: whoever looks is told, and what can be kept is
            problem = described(error)
            if self.problem != problem:
                log.error("checkpoint %s: %s", self._keep.name, problem, exc_info=not isinstance(error, NosyncError))
            self.problem = problem

    def _take(self) -> None:
        self._bring_ready()
        ready = list(self._ready)
        with self._taking:
            self._keep.check_same(self._source, filter(_is_written_once, ready))
            taken = self._keep.take(self._source, ready)
        for path in ready:
            del self._ready[path]
            self._published.discard(path)
        self._taken()
        has_commit = any(path.startswith("commits/") for path in taken)
        if has_commit and not self._has_daemon and len(self._keep.index.batches()) > 2 * self._batches:
            with self._taking:
                clean(self._keep)
        if self._elsewhere is not None:
            self._elsewhere.release_all()

    def _bring_ready(self) -> None:
        """Has come here what is ready and elsewhere. What is lost and no batch needs is not waited for."""
        if self._elsewhere is None:
            return
        for path in list(self._ready):
            try:
                self._bring(self._elsewhere, path)
            except NosyncError as error:
                if self._elsewhere.is_needed(path):
                    self.lacks = f"{path} does not come from the host where it was written: {error}"
                    raise ReplicationError(self.lacks) from error
                log.info("checkpoint %s: %s does not come, and is not needed: %s", self._keep.name, path, error)
                self._elsewhere.drop(path)
                del self._ready[path]
        self.lacks = None

    def _bring(self, elsewhere: Elsewhere, path: str) -> None:
        """Has a file come here, and those that it names if it is a snapshot."""
        elsewhere.bring(path)
        file = parse(path)
        if isinstance(file, StateFile) and file.form is Form.ZIP:
            for part in self._keep.parts(self._source, path):
                elsewhere.bring(f"{file.store.directory}/{part.name}")
