"""Layer files that are on their way out: merged layers stand for them, or nothing needs them any more.

Invariants
- A file is deleted a grace period later, for processes that have listed but not yet opened it.
- What the catalog lists is never deleted, and what a merged layer replaced is deleted only while that one is still
  there: where it was lost, the files that it replaced are taken back.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from nosync.lsm.errors import StorageError
from nosync.lsm.model.layer import LayerId
from nosync.lsm.model.timestamp import end_of, pack
from nosync.lsm.node.announcer import Announcer
from nosync.lsm.node.durable_layers import DurableLayers
from nosync.lsm.node.layer_sync import LayerSyncQueue
from nosync.lsm.node.ownership import Ownership
from nosync.lsm.platform.env import storage_errors
from nosync.lsm.trace.directory import LayerDirectory

log = logging.getLogger("nosync")


@dataclass(frozen=True)
class _Garbage:
    due_s: float
    is_replaced: bool
    """A merged layer stands for it. Else nothing needs it any more."""


class Garbage:
    """The files of one directory that are to go. `wake`: called where one is to be made durable again."""

    def __init__(
        self,
        directory: LayerDirectory,
        grace_s: float,
        ownership: Ownership,
        layers: DurableLayers,
        queue: LayerSyncQueue,
        announcer: Announcer,
        wake: Callable[[], None],
    ) -> None:
        self._directory, self._env, self._grace_s, self._ownership = directory, directory.env, grace_s, ownership
        self._layers, self._queue, self._announcer, self._wake = layers, queue, announcer, wake
        self._lock = threading.Lock()
        self._garbage: dict[LayerId, _Garbage] = {}

    def has(self, id: LayerId) -> bool:
        """Returns whether its file is there only for readers that are about to open it."""
        return id in self._garbage

    def discard(self, ids: Sequence[LayerId], *, is_replaced: bool = False, grace: bool = True) -> None:
        """Removes their files with `collect`, a grace period later or the next time.

        `is_replaced`: a durable merged layer stands for them. Their files go only if it still does by then.
        """
        due_s = self._env.monotonic_s() + (self._grace_s if grace else 0.0)
        with self._lock:
            for id in ids:
                known = self._garbage.get(id)
                due = due_s if known is None else min(due_s, known.due_s)
                self._garbage[id] = _Garbage(due, is_replaced and (known is None or known.is_replaced))

    def forget(self, ids: Sequence[LayerId], *, grace: bool = True) -> None:
        """Forgets layers that nothing lists any more: they leave the catalog now, and the disk a grace period later."""
        self._ownership.check()
        # Before the catalog forgets them, or a scan would take them for new ones.
        self.discard(ids, grace=grace)
        with self._layers.lock:
            self._layers.drop(ids)
            self._queue.forget(ids)
        self._announcer.layers((), ids, dropped=True)

    def forget_rounds(self, stage: str, t: int, *, at_once: bool) -> None:
        """Forgets and deletes a stage's layers of single rounds inside epoch `t`.

        `at_once`: the rounds are about to run again. Those that wait for their grace to end would be taken for this
        run's, and vanish in the middle of it.
        """
        for trace in self._directory.traces(stage):
            inside = [d for d in self._directory.descriptions(trace) if pack(t) <= d.lower and d.upper <= end_of(t)]
            self.forget([LayerId(trace, d) for d in inside if d.is_of_rounds], grace=not at_once)
        if at_once:
            self.collect()

    def take_back(self, lost: LayerId) -> None:
        """A merged layer is lost: what it replaced is no garbage any more."""
        with self._lock:
            back = [
                id
                for id, garbage in self._garbage.items()
                if garbage.is_replaced and id.trace == lost.trace and lost.description.covers(id.description)
            ]
            for id in back:
                del self._garbage[id]
        self._make_durable_again(back)

    def keep(self, ids: Iterable[LayerId]) -> None:
        """These are not to be removed after all."""
        with self._lock:
            for id in ids:
                self._garbage.pop(id, None)

    def collect(self, *, all: bool = False) -> None:
        """Deletes files whose grace period is over. Whoever still maps one keeps its bytes."""
        recorded = self._layers.ids()
        with self._lock:
            now = self._env.monotonic_s()
            due = {id: garbage for id, garbage in self._garbage.items() if all or garbage.due_s <= now}
        # Not only what is recorded: somebody may have deleted the merged file a moment ago.
        back = set(self._not_replaced([id for id, garbage in due.items() if garbage.is_replaced]))
        if back:
            log.warning("%d replaced layers are taken back, for what stood for them is lost", len(back))
            self.keep(sorted(back))
            self._make_durable_again(sorted(back))
        kept: list[StorageError] = []
        for id in due.keys() - back:
            path = self._directory.path_of(id)
            try:
                with self._lock:  # `keep` either comes before, or finds the file gone
                    if id in self._garbage and id not in recorded:
                        with storage_errors("remove", path):
                            self._env.unlink(path)
                    self._garbage.pop(id, None)
            except StorageError as error:  # the others go all the same
                kept.append(error)
                continue
            self._directory.forget(id)
        if kept:
            raise StorageError(f"{len(kept)} files that were replaced cannot be removed: {kept[0]}")

    def _not_replaced(self, ids: Sequence[LayerId]) -> list[LayerId]:
        """Returns those for which no other durable layer stands, or whose file is gone."""
        is_here = functools.cache(self._directory.has_file)
        others = {id: self._layers.covering(id) for id in ids}
        return [id for id, covering in others.items() if not any(is_here(other) for other in covering)]

    def _make_durable_again(self, ids: Iterable[LayerId]) -> None:
        """These are no garbage after all: they are made durable again, where their files are still there."""
        self._queue.note([id for id in ids if self._directory.has_file(id)])
        self._wake()
