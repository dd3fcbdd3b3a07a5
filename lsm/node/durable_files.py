"""The small files that are durable: the catalog remembers where their logs end, and the listener is told of them.

Invariant
- Files that go together are told of together: `going` is held from before the first one goes until that was told.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import PurePosixPath

from nosync.lsm.manifests.catalog import Catalog
from nosync.lsm.manifests.lost_ends import inferred
from nosync.lsm.manifests.remembered import SAFE_META, Remembered
from nosync.lsm.manifests.timelines import Timelines
from nosync.lsm.model.layer import LayerId
from nosync.lsm.model.timestamp import Epoch
from nosync.lsm.node.announcer import Announcer
from nosync.lsm.node.durable_layers import DurableLayers
from nosync.lsm.node.metadata_sync import MetadataSync
from nosync.lsm.node.ownership import Ownership
from nosync.lsm.platform.layout import PLACE_FILE
from nosync.lsm.trace.directory import LayerDirectory


class DurableFiles:
    """Makes the small files of one directory durable. `remembered`: what the catalog says was durable once."""

    def __init__(
        self,
        directory: LayerDirectory,
        ownership: Ownership,
        small: MetadataSync,
        catalog: Catalog,
        layers: DurableLayers,
        announcer: Announcer,
    ) -> None:
        self._root, self._env, self._ownership = directory.root, directory.env, ownership
        self._small, self._catalog, self._layers, self._announcer = small, catalog, layers, announcer
        self.remembered = Remembered(catalog.metas())
        self.going = threading.Lock()

    def sync(self, paths: Sequence[PurePosixPath]) -> None:
        """Makes these durable, which wait."""
        durable = self._small.sync(paths)
        try:
            self._ownership.check()
        except BaseException:
            self._small.note(paths)  # those that it took for gone
            raise
        self._remember(durable)
        self._announcer.files(durable)

    def published(self, path: PurePosixPath) -> None:
        """Whoever published this one has made it durable."""
        self._small.note_durable(path)
        self._remember([path])
        self._announcer.files([path])

    def tell_gone(self) -> None:
        """Tells the listener of files that were removed because nobody needs them."""
        with self.going:
            self._announcer.peers.dropped_files(self._small.forget_gone())

    def discard(self, first: Mapping[str, Epoch], entry: int | None) -> None:
        """Forgets what is discarded: by timeline the manifests from an epoch on, and the log of branches from an entry
        on.
        """
        with self._layers.lock:
            self._catalog.apply(meta=self.remembered.discard(first, entry))

    def recall_more(self, timelines: Timelines, layers: Collection[LayerId], pins: Collection[Epoch]) -> None:
        """Remembers what else shows that epochs were sealed, where the catalog is new or an earlier version kept it.

        With peers nothing is inferred: what is not here may be there.
        """
        if self._env.exists(self._root / PLACE_FILE):
            return
        announced = {name.removeprefix(SAFE_META): Epoch(int(t)) for name, t in self._catalog.metas(SAFE_META).items()}
        for timeline, kept in inferred(timelines, layers, pins, announced).items():
            self._catalog.remember(self.remembered.note_timeline(timeline, kept))

    def _remember(self, durable: Sequence[PurePosixPath]) -> None:
        """Should the end of these files ever be lost, the catalog shows it."""
        with self._layers.lock:
            changed = self.remembered.note(self._root, durable, self._env)
            if changed:
                self._catalog.remember(changed)
