"""New files in directories, as they appear: inotify. What it cannot see, the node finds by listing its directories."""

from __future__ import annotations

import errno
import logging
import os
import select
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from inotify_simple import INotify, flags

from nosync.lsm.errors import described

log = logging.getLogger("nosync.replication")

_NEW = flags.CREATE | flags.MOVED_TO | flags.ONLYDIR


class Watch:
    """Watches directories and all that are below them, those included that are made later."""

    def __init__(self, roots: Iterable[Path]) -> None:
        """Raises OSError where the system has no watch to give."""
        self._roots = list(roots)
        self._inotify = INotify()
        self._directories: dict[int, Path] = {}
        self._is_short = False
        self._stopped, self._stop = os.pipe()

    def changes(self) -> Iterator[list[Path]]:
        """Returns first the files that are there, then those that come, until `stop`. The same one may be told
        twice.
        """
        there = [path for root in self._roots for path in self._add(root)]
        if there:
            yield there
        waiting = select.poll()  # select() knows the first 1024 descriptors only
        waiting.register(self._inotify.fileno(), select.POLLIN)
        waiting.register(self._stopped, select.POLLIN)
        while True:
            ready = waiting.poll()
            if any(fd == self._stopped for fd, _ in ready):
                return
            if found := self._read():
                yield found

    def _read(self) -> list[Path]:
        found: list[Path] = []
        for event in self._inotify.read(timeout=0):
            if event.mask & flags.Q_OVERFLOW:
                return [path for root in self._roots for path in self._add(root)]  # some were not told: all are
            if event.mask & flags.IGNORED:
                self._directories.pop(event.wd, None)
            elif (directory := self._directories.get(event.wd)) is not None:
                path = directory / event.name
                found += self._add(path) if event.mask & flags.ISDIR else [path]
        return found

    def _add(self, directory: Path) -> Iterator[Path]:
        """Watches a directory, and returns the files that are in it by then."""
        try:
            self._directories[self._inotify.add_watch(directory, _NEW)] = directory
        except OSError as error:
            if error.errno == errno.ENOSPC and not self._is_short:
                self._is_short = True
                log.warning(
                    "the system has no more watches: what is published in %s and others is noticed by listing them; "
                    "raise fs.inotify.max_user_watches", directory,
                )  # fmt: skip
            if error.errno == errno.EACCES:  # one directory of another user's ends no watch of the others
                log.warning("what is published in %s is not noticed: %s", directory, error.strerror)
                return
            if error.errno not in (errno.ENOSPC, errno.ENOENT):
                raise
        try:
            entries = list(os.scandir(directory))
        except (FileNotFoundError, PermissionError):
            return  # it is gone again, or another user's
        for entry in entries:
            if entry.is_dir():
                yield from self._add(Path(entry.path))
            else:
                yield Path(entry.path)

    def stop(self) -> None:
        """Ends `changes`, from another thread."""
        os.write(self._stop, b"0")

    def close(self) -> None:
        """Closes the watch. To be called after `changes` has ended."""
        self._inotify.close()
        os.close(self._stopped)
        os.close(self._stop)


class Watcher:
    """A thread that tells of new files until it is stopped. A watch that ends, say for want of descriptors, is begun
    again.
    """

    def __init__(self, begin: Callable[[], Watch], noticed: Callable[[list[Path]], None], again_s: float) -> None:
        """`begin` raises OSError where there is no watch to be had; it is called again every `again_s` then."""
        self._begin, self._noticed, self._again_s = begin, noticed, again_s
        self._lock = threading.Lock()
        self._watch: Watch | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nosync-watch", daemon=True)

    @property
    def is_watching(self) -> bool:
        return self._watch is not None

    def start(self) -> None:
        """What comes after this returns is told of, if there is a watch."""
        self._begin_again(is_first=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        with self._lock:
            if self._watch is not None:
                self._watch.stop()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            watch = self._watch
            if watch is not None:
                self._follow(watch)
                with self._lock:
                    self._watch = None
                    watch.close()
            if not self._stopping.wait(self._again_s):
                self._begin_again(is_first=False)

    def _begin_again(self, *, is_first: bool) -> None:
        try:
            begun = self._begin()
        except OSError as error:
            if is_first:
                log.warning("what is published is noticed every %s s only: %s (fs.inotify.*)", self._again_s, error)
            return
        with self._lock:
            self._watch = begun
            if self._stopping.is_set():
                begun.stop()

    def _follow(self, watch: Watch) -> None:
        try:
            for paths in watch.changes():
                try:
                    self._noticed(paths)
                except Exception as error:  # noqa: BLE001 - of these; the scan finds them
                    log.warning("noticed %s s later: %s: %s", self._again_s, paths[0], described(error))
        except OSError as error:
            log.warning("what is published is noticed every %s s until it is watched again: %s", self._again_s, error)
