"""An environment whose disk fails as told, and whose power can be cut."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from nosync.lsm.node.node import Node
from nosync.lsm.platform.env import Env
from nosync.lsm.platform.layout import MADE
from nosync.lsm.store.opened import abandon
from nosync.lsm.store.store import Store


@dataclass
class Fault:
    """The next `times` calls of `operation` on paths for which `matches` holds raise OSError(errno)."""

    operation: str
    errno: int
    times: int
    matches: Callable[[Path], bool]


class FaultyEnv(Env):
    """Real files with injected faults, a clock that stands still, and a memory of what a power cut would lose.

    A file's contents survive a power cut once `sync_file` returned, its name once `sync_dir` of its directory did.
    """

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.calls: list[tuple[str, Path]] = []
        self.now_s = 0.0
        self._unsynced_contents: set[int] = set()  # inodes
        self._unsynced_names: set[Path] = set()
        self._first_names: dict[Path, Path] = {}  # of files that were made ahead, by their names since
        self._tokens = 0

    def fail(
        self, operation: str, errno: int, *, times: int = 1, matches: Callable[[Path], bool] = lambda path: True
    ) -> None:
        self.faults.append(Fault(operation, errno, times, matches))

    def _enter(self, operation: str, path: Path) -> None:
        self.calls.append((operation, path))
        self._fail(operation, path)

    def _fail(self, operation: str, path: Path) -> None:
        for fault in self.faults:
            if fault.operation == operation and fault.times > 0 and fault.matches(path):
                fault.times -= 1
                raise OSError(fault.errno, os.strerror(fault.errno), str(path))

    def create(self, path: Path) -> BinaryIO:
        self._enter("create", path)
        file = super().create(path)
        self._unsynced_contents.add(path.stat().st_ino)
        return file

    def open_to_write(self, path: Path) -> BinaryIO:
        self._enter("open_to_write", path)
        file = super().open_to_write(path)
        self._unsynced_contents.add(path.stat().st_ino)
        return file

    def map(self, path: Path) -> pa.Buffer:
        self._enter("map", path)
        return super().map(path)

    def list_dir(self, path: Path) -> list[str]:
        self._fail("list_dir", path)
        return super().list_dir(path)

    def link(self, source: Path, target: Path) -> None:
        self._enter("link", target)
        super().link(source, target)
        if source in self._first_names:
            self._first_names[target] = self._first_names[source]
        self._unsynced_names.add(target)

    def replace(self, source: Path, target: Path) -> None:
        self._enter("replace", target)
        super().replace(source, target)
        first = source if source.parent.name == MADE else self._first_names.pop(source, None)
        self._first_names.pop(target, None)
        if first is not None:
            self._first_names[target] = first

    def unlink(self, path: Path) -> None:
        self._enter("unlink", path)
        super().unlink(path)
        self._first_names.pop(path, None)
        self._unsynced_names.discard(path)

    def sync_file(self, path: Path) -> None:
        self._enter("sync_file", path)
        super().sync_file(path)
        self._unsynced_contents.discard(path.stat().st_ino)

    def sync_dir(self, path: Path) -> None:
        self._enter("sync_dir", path)
        super().sync_dir(path)
        self._unsynced_names = {name for name in self._unsynced_names if name.parent != path}

    def monotonic_s(self) -> float:
        return self.now_s

    def token(self) -> str:
        self._tokens += 1
        return f"{os.getpid():08x}{self._tokens:08x}"

    def lose_power(self, root: Path, choose: Callable[[int], int]) -> list[Path]:
        """Does to the files what a power cut may: `choose(n)` picks one of n outcomes. Returns what was harmed.

        Files whose name was not synced may vanish; those whose contents were not synced may be empty, cut short, zeroed
        or whole; and files that were made ahead may have their first name again beside the one they are published
        under. The catalog is left alone: RocksDB syncs its own writes.
        """
        harmed = []
        for path in sorted(p for d in ("layers", "manifests", "tmp") for p in (root / d).rglob("*") if p.is_file()):
            if path in self._unsynced_names and choose(2):
                path.unlink()
                harmed.append(path)
            elif path.stat().st_ino in self._unsynced_contents and (outcome := choose(4)):
                size = path.stat().st_size
                with path.open("r+b") as file:
                    if outcome == 1:
                        file.truncate(0)
                    elif outcome == 2:
                        file.truncate(size // 2)
                    else:
                        file.write(bytes(size))
                harmed.append(path)
        for path, first in sorted(self._first_names.items()):
            if path.exists() and not first.exists() and choose(2):
                os.link(path, first)
                harmed.append(first)
        self._first_names.clear()
        self._unsynced_names.clear()
        self._unsynced_contents.clear()
        return harmed


def crash(store: Store) -> None:
    """Ends a store as if its process had died: nothing is synced, merged or cleaned up."""
    assert isinstance(store.node, Node), "only a node in this process can be ended so"
    abandon(store.node)
