"""New files in directories, as they appear: inotify. What it cannot see, the node finds by listing its directories."""

from __future__ import annotations

import errno
import logging
import os
import select
from collections.abc import Iterable, Iterator
from pathlib import Path

from inotify_simple import INotify, flags

log = logging.getLogger("nosync.replication")

_NEW = flags.CREATE | flags.MOVED_TO | flags.ONLYDIR


class Watch:
    """Of directories and all that are below them, those included that are made later."""

    def __init__(self, roots: Iterable[Path]) -> None:
        """Raises OSError where the system has no watch to give."""
        self._roots = list(roots)
        self._inotify = INotify()
        self._directories: dict[int, Path] = {}
        self._is_short = False
        self._stopped, self._stop = os.pipe()

    def changes(self) -> Iterator[list[Path]]:
        """First the files that are there, then those that come, until `stop`. The same one may be told twice."""
        there = [path for root in self._roots for path in self._add(root)]
        if there:
            yield there
        while True:
            ready, _, _ = select.select([self._inotify, self._stopped], [], [])
            if self._stopped in ready:
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
                    "the system has no more watches: what is published in %s and others is noticed by listing them; raise "
                    "fs.inotify.max_user_watches", directory,
                )  # fmt: skip
            if error.errno not in (errno.ENOSPC, errno.ENOENT):
                raise
        try:
            entries = list(os.scandir(directory))
        except FileNotFoundError:
            return  # it is gone again
        for entry in entries:
            if entry.is_dir():
                yield from self._add(Path(entry.path))
            else:
                yield Path(entry.path)

    def stop(self) -> None:
        """Ends `changes`, from another thread."""
        os.write(self._stop, b"0")

    def close(self) -> None:
        """After `changes` has ended."""
        self._inotify.close()
        os.close(self._stopped)
        os.close(self._stop)
