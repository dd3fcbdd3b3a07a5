"""Compares the directory with the catalog: new layers are queued, vanished ones are lost."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from nosync.lsm.model.layer import Description, LayerId, TraceId
from nosync.lsm.node.announcer import Announcer
from nosync.lsm.node.branching import Branching
from nosync.lsm.node.compactor import Compactor
from nosync.lsm.node.durable_layers import DurableLayers
from nosync.lsm.node.garbage import Garbage
from nosync.lsm.node.layer_sync import LayerSyncQueue
from nosync.lsm.node.learning import Learning
from nosync.lsm.node.quarantine import Quarantine
from nosync.lsm.platform.publish import discard_old
from nosync.lsm.trace.directory import LayerDirectory
from nosync.lsm.trace.listing import Listing

_SCAN_ALL_EVERY_S = 60.0


class Discovery:
    """Looks at one directory, now and then at all of it."""

    def __init__(
        self,
        directory: LayerDirectory,
        layers: DurableLayers,
        queue: LayerSyncQueue,
        garbage: Garbage,
        quarantine: Quarantine,
        compactor: Compactor,
        learning: Learning,
        branching: Branching,
        announcer: Announcer,
    ) -> None:
        self._directory, self._env, self._layers, self._queue = directory, directory.env, layers, queue
        self._garbage, self._quarantine, self._compactor = garbage, quarantine, compactor
        self._learning, self._branching, self._announcer = learning, branching, announcer
        self._listing = Listing(directory)
        self._next_scan_s = self._env.monotonic_s() + _SCAN_ALL_EVERY_S

    def scan(self) -> None:
        """Compares all of the directory with the catalog."""
        self._learning.learn_all()
        listed: dict[TraceId, list[Description]] = {trace: [] for trace in self._layers.by_trace()}
        there = {trace: self._directory.descriptions(trace) for trace in self._directory.traces()}
        self._compare(listed | there)

    def look(self) -> None:
        """Does what `scan` does, but only where directories changed; now and then everywhere."""
        if self._env.monotonic_s() >= self._next_scan_s:
            self._next_scan_s = self._env.monotonic_s() + _SCAN_ALL_EVERY_S
            self.scan()
            discard_old(self._directory.root, self._env)
            if not self._announcer.is_alone:
                self._branching.prune_unneeded()
            return
        try:
            self._learning.learn_all()
            self._compare(self._listing.changed())
        except BaseException:
            self._next_scan_s = self._env.monotonic_s()  # what was listed and not compared is listed again
            raise

    def unknown(self, ids: Collection[LayerId]) -> list[LayerId]:
        """Returns those that are not durable yet, and not about to be removed either."""
        with self._layers.lock:
            new = [id for id in ids if not self._layers.holds(id)]
        # What is forgotten is garbage before its record goes.
        return [id for id in new if not self._garbage.has(id)]

    def _compare(self, listed: Mapping[TraceId, Collection[Description]]) -> None:
        """`listed`: what is in the directories of traces."""
        new, gone = set[LayerId](), set[LayerId]()
        with self._layers.lock:
            for trace, there in listed.items():
                known = self._layers.of(trace)
                new.update(LayerId(trace, d) for d in there if d not in known)
                gone.update(LayerId(trace, d) for d in known.keys() - set(there))
            new = {id for id in new if not (self._garbage.has(id) or self._compactor.is_made(id))}
            self._queue.note(sorted(new))
        self._quarantine.lose_vanished(sorted(gone))
