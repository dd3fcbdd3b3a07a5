"""Takes notice of what others wrote into the directory: epochs that they sealed, branches, pins, instances of jobs."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath

from nosync.lsm.facts.deliveries import old_deliveries
from nosync.lsm.facts.fencing import old_instances
from nosync.lsm.facts.or_set import register_files
from nosync.lsm.facts.seal_times import replaced_times
from nosync.lsm.manifests.branches import MAIN
from nosync.lsm.manifests.timelines import Timelines
from nosync.lsm.model.timestamp import Epoch
from nosync.lsm.node.announcer import Announcer
from nosync.lsm.node.archiving import Archiving
from nosync.lsm.node.branching import Branching
from nosync.lsm.node.durable_files import DurableFiles
from nosync.lsm.node.durable_layers import DurableLayers
from nosync.lsm.node.merge_queue import MergeQueue
from nosync.lsm.node.metadata_sync import MetadataSync
from nosync.lsm.node.ownership import Ownership
from nosync.lsm.node.retention import Retention
from nosync.lsm.node.safe_point import SafePoint
from nosync.lsm.platform.env import storage_errors
from nosync.lsm.platform.layout import MANIFESTS, TIMES
from nosync.lsm.trace.directory import LayerDirectory

log = logging.getLogger("nosync")


class Learning:
    """Reads the small files of one directory again, where they may be other ones."""

    def __init__(
        self,
        directory: LayerDirectory,
        ownership: Ownership,
        layers: DurableLayers,
        timelines: Timelines,
        retention: Retention,
        small: MetadataSync,
        files: DurableFiles,
        safe_points: SafePoint,
        archiving: Archiving,
        branching: Branching,
        merges: MergeQueue,
        announcer: Announcer,
    ) -> None:
        self._root, self._env, self._ownership, self._layers = directory.root, directory.env, ownership, layers
        self._timelines, self._retention, self._small, self._files = timelines, retention, small, files
        self._safe_points, self._archiving, self._branching = safe_points, archiving, branching
        self._merges, self._announcer = merges, announcer
        self._came: deque[PurePosixPath] = deque()

    def note(self, paths: Iterable[PurePosixPath]) -> None:
        """These files came from elsewhere: `learn_noted` reads them, once they are durable as far as that succeeds."""
        self._came.extend(paths)

    def learn_noted(self) -> None:
        """Learns from the files that were noted."""
        came: list[PurePosixPath] = []
        with contextlib.suppress(IndexError):  # another thread takes some of them at the same time
            for _ in range(len(self._came)):
                came.append(self._came.popleft())
        # Nothing of what the node does goes by the clock, and times come with every epoch.
        if sealed := [path for path in came if path.parts[0] != TIMES]:
            self.learn(sealed)
        if any(path.parts[0] not in (MANIFESTS, TIMES) for path in came):
            self.learn_registers()

    def learn_all(self) -> None:
        """Looks at all small files that others may have changed."""
        if not self._announcer.is_alone:  # alone, nobody else seals epochs here or changes branches
            self.learn()
        self.learn_registers()

    def learn(self, came: Sequence[PurePosixPath] = ()) -> None:
        """Takes notice of epochs that other processes sealed, and of branches that other nodes made or dropped.

        `came`: the files that this is for, if that is known. Manifests of next epochs are read, and nothing else is
        looked at.
        """
        self._ownership.check()
        # `since`, which asks for it, follows what was sealed, so no merge may ask before pins are read.
        with self._layers.lock:
            line, last = self._timelines.timeline(MAIN).id, self._timelines.last_sealed()
            next_ones = self._timelines.follow(came) if came else None
            learned, archives, log_changed = self._timelines.refresh() if next_ones is None else (next_ones, [], False)
            if learned or log_changed:
                self._retention.read_pins()
            self._small.note([*(manifest.path for manifest in learned), *(archive.path for archive in archives)])
            if archives:
                self._archiving.archives_came()
            self._safe_points.learned(learned)
        if log_changed:
            self._tell_if_main_went_back(line, last)
            self._branching.changed_elsewhere()
        if learned or log_changed:
            self._merges.changed()

    def _tell_if_main_went_back(self, line: str, last: Epoch | None) -> None:
        """Logs what another node did that may not have known how far this one had come. `line`, `last`: what main was."""
        now = self._timelines.last_sealed()
        if last is None or self._timelines.timeline(MAIN).id == line or (now is not None and now >= last):
            return
        kept = next((name for name, timeline in self._timelines.refs.names.items() if timeline == line), None)
        log.warning(
            "main was at epoch %d here and is at %s, for another node rewound it or promoted a branch; what it was is %s",
            last,
            now,
            "dropped" if kept is None else f"branch {kept}: nosync promote goes back to it",
        )

    def learn_registers(self) -> None:
        """Reads pins, instances of jobs, marks of sinks and times as they are now; what is long replaced goes."""
        self._ownership.check()
        files = register_files(self._root, self._env)
        old = [*old_instances(files), *old_deliveries(files), *replaced_times(files, self._timelines.refs)]
        for path in old:
            with storage_errors("remove", self._root / path):
                self._env.unlink(self._root / path)
        self._small.note(set(files).difference(old))
        self._retention.read_pins()
        self._merges.touch()
        if old:
            self._files.tell_gone()
