"""Inputs that epochs may have to be computed from again: those that the safe point has not passed yet.

Where one directory is the store, what it holds is what there is, and nothing is kept. Where daemons keep the store, a
host may be lost together with layers that nobody else has yet.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from nosync.job.position import Position
from nosync.lsm.errors import ReplicationError
from nosync.lsm.node.api import StoreBackend

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

MOST_EPOCHS = 100
"""The inputs of so many epochs are kept, should the safe point stay behind."""


class KeptInputs(Mapping[int, "Mapping[str, DataFrame]"]):
    """The rows of each source, by epoch."""

    def __init__(self, node: StoreBackend, position: Position) -> None:
        """`position`: says whose safe point counts."""
        self._node, self._position = node, position
        self._kept: dict[int, Mapping[str, DataFrame]] = {}
        self._asking: threading.Thread | None = None

    def __getitem__(self, t: int) -> Mapping[str, DataFrame]:
        return self._kept[t]

    def __iter__(self) -> Iterator[int]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, t: int, inputs: Callable[[], Mapping[str, DataFrame]]) -> None:
        """Keeps the rows of an epoch. `inputs()` is called only where they are kept: to make a DataFrame takes its
        time.
        """
        if self._node.store_id:
            self._kept[t] = inputs()

    def release(self) -> None:
        """Releases what is safe by now, and the oldest where there are too many. It waits for nobody."""
        if not self._node.store_id:
            return
        for t in sorted(self._kept)[:-MOST_EPOCHS]:
            self._kept.pop(t, None)
        if self._asking is None or not self._asking.is_alive():  # the daemon may take its time; an epoch does not
            self._asking = threading.Thread(target=self._forget_what_is_safe, name="nosync-inputs", daemon=True)
            self._asking.start()

    def _forget_what_is_safe(self) -> None:
        with contextlib.suppress(ReplicationError):
            safe = self._node.safe_point(self._position.branch)
            for t in [t for t in list(self._kept) if safe is not None and t <= safe]:
                self._kept.pop(t, None)
