"""Puts manifests of old, safe epochs together in one file, a group at a time, and removes what that stands for. So it
does with the times at which they were sealed.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping

from nosync.lsm.errors import NosyncError
from nosync.lsm.facts.seal_times import SealTimes
from nosync.lsm.manifests.timelines import Timelines
from nosync.lsm.node.announcer import Announcer
from nosync.lsm.node.durable_files import DurableFiles
from nosync.lsm.node.metadata_sync import MetadataSync
from nosync.lsm.node.ownership import Ownership
from nosync.lsm.node.quarantine import Quarantine
from nosync.lsm.node.safe_point import SafePoint
from nosync.lsm.platform.env import storage_errors
from nosync.lsm.trace.directory import LayerDirectory

log = logging.getLogger("nosync")

_PROBLEM = "archives of manifests"


class Archiving:
    """The archives of one directory. `size`: how many epochs are put together; None: none are."""

    def __init__(
        self,
        directory: LayerDirectory,
        size: int | None,
        ownership: Ownership,
        timelines: Timelines,
        times: SealTimes,
        safe_points: SafePoint,
        small: MetadataSync,
        files: DurableFiles,
        quarantine: Quarantine,
        announcer: Announcer,
        problems: MutableMapping[str, str],
    ) -> None:
        self._root, self._env, self._size, self._ownership = directory.root, directory.env, size, ownership
        self._timelines, self._times = timelines, times
        self._safe_points, self._small, self._files = safe_points, small, files
        self._quarantine, self._announcer, self._problems = quarantine, announcer, problems
        self._look_beside = True  # for manifests that an archive stands for

    def archives_came(self) -> None:
        """There are archives that others made: manifests may lie beside them."""
        self._look_beside = True

    def archive(self) -> None:
        """Makes the archives that can be made, and removes manifests beside those that are durable."""
        if self._size is None:
            return
        try:
            self._ownership.check()
            for branch in list(self._timelines.refs.names):
                self._archive(branch, self._size)
            if self._look_beside:
                self._look_beside = not self._remove_archived()
            self._problems.pop(_PROBLEM, None)
        except NosyncError as error:
            if self._problems.get(_PROBLEM) != str(error):
                log.error("not archived: %s", error)
            self._problems[_PROBLEM] = str(error)

    def _archive(self, branch: str, size: int) -> None:
        if len(self._timelines.manifests(branch).singles()) <= size:
            return
        safe = self._safe_points.point(branch)
        made = None if safe is None else self._timelines.archive(branch, safe - size, size)
        if made is not None:
            self._files.published(made.path)
            self._look_beside = True
            for path in self._times.roll_up(made.timeline, size, made.last):
                self._files.published(path)

    def _remove_archived(self) -> bool:
        """Removes manifests that an archive stands for. False: some archive is still to be made durable."""
        beside, errors = self._timelines.beside_archives()
        self._quarantine.put_files(errors)
        if not all(self._small.is_durable(archive.path) for archive in self._timelines.archives()):
            return False
        for path in beside:
            with storage_errors("remove", self._root / path):
                self._env.unlink(self._root / path)
        self._small.replaced(beside)
        if beside:
            self._announcer.peers.lost_files(beside)
        return True
