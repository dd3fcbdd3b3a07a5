"""A process that is killed: from some change of the disk on, nothing it does has an effect."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import BinaryIO

from nosync.lsm.platform.env import Env


class Dies(BaseException):
    """The process is killed."""


class KilledAt(Env):
    """Lets every change of the disk fail from the n-th on, whichever thread makes it."""

    def __init__(self, n: int) -> None:
        self.left, self.lock = n, threading.Lock()

    def step(self) -> None:
        with self.lock:
            self.left -= 1
            if self.left < 0:
                raise Dies

    def create(self, path: Path) -> BinaryIO:
        self.step()
        return super().create(path)

    def link(self, source: Path, target: Path) -> None:
        self.step()
        super().link(source, target)

    def replace(self, source: Path, target: Path) -> None:
        self.step()
        super().replace(source, target)

    def unlink(self, path: Path) -> None:
        self.step()
        super().unlink(path)

    def sync_file(self, path: Path) -> None:
        self.step()
        super().sync_file(path)

    def sync_dir(self, path: Path) -> None:
        self.step()
        super().sync_dir(path)
