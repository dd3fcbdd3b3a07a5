"""Branches as the node makes them: what is durable before anybody is told, and what goes with a branch that is deleted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath

from nosync.lsm.errors import InvalidInputError, NosyncError
from nosync.lsm.manifests.branches import MAIN, ChangedStages
from nosync.lsm.manifests.lost_ends import check_there
from nosync.lsm.manifests.timelines import Timelines
from nosync.lsm.model.layer import LayerId
from nosync.lsm.node.compactor import Compactor
from nosync.lsm.node.durable_files import DurableFiles
from nosync.lsm.node.garbage import Garbage
from nosync.lsm.node.merge_queue import MergeQueue
from nosync.lsm.node.metadata_sync import MetadataSync
from nosync.lsm.node.retention import Retention
from nosync.lsm.node.safe_point import SafePoint
from nosync.lsm.platform.env import storage_errors
from nosync.lsm.platform.layout import BRANCHES
from nosync.lsm.trace.directory import LayerDirectory


class Branching:
    """Makes, promotes and deletes the branches of one directory."""

    def __init__(
        self,
        directory: LayerDirectory,
        timelines: Timelines,
        retention: Retention,
        small: MetadataSync,
        files: DurableFiles,
        safe_points: SafePoint,
        compactor: Compactor,
        merges: MergeQueue,
        garbage: Garbage,
    ) -> None:
        self._directory, self._timelines, self._retention, self._small = directory, timelines, retention, small
        self._files, self._safe_points, self._compactor = files, safe_points, compactor
        self._merges, self._garbage = merges, garbage

    def create(self, name: str, parent: str, at: int, stages: ChangedStages) -> None:
        """Makes a branch of `parent` at a sealed epoch. Durable when this returns."""
        self._retention.check_kept(at)
        with self._told_if_it_counts():
            self._timelines.create(name, parent, at, stages)
        self._log_changed()

    def rewind(self, t: int, keep_as: str | None) -> None:
        """Lets `main` be a new timeline that begins at a sealed epoch; the old timeline is kept as a branch, or
        dropped.
        """
        self._retention.check_kept(t)
        self._check_not_pinned(t, f"rewind to {t}")
        with self._told_if_it_counts():
            self._timelines.rewind(t, keep_as)
        self._main_changed()

    def promote(self, name: str, keep_as: str | None) -> None:
        """Lets `main` be the timeline of a branch; the old timeline is kept as another branch, or dropped."""
        refs = self._timelines.refs
        if name in refs.names and name != MAIN:
            common = refs.shared_until(refs.names[MAIN], refs.names[name])
            if common is not None:
                self._check_not_pinned(common, f"promote {name}")
        with self._told_if_it_counts():
            self._timelines.promote(name, keep_as)
        self._main_changed()

    def _check_not_pinned(self, common: int, what: str) -> None:
        """Raises InvalidInputError where a pin holds an epoch of main after `common`, which is about to be another one."""
        pinned = min((pin for pin in self._retention.pins().values() if pin.t > common), default=None)
        if pinned is not None:
            raise InvalidInputError(
                f"cannot {what}: pin {pinned.name!r} holds epoch {pinned.t} of {MAIN!r}, which would be another one. Take the "
                f"pin back first: unpin({pinned.name!r}), or nosync pin STORE {pinned.name} --remove"
            )

    def delete(self, name: str) -> int:
        """Deletes a branch with what nothing else needs: its own manifests, and layers that only they list. Returns the
        number of layers.
        """
        with self._told_if_it_counts():
            self._timelines.delete(name)
        self._log_changed()
        return self.prune()

    def release_first_attempt(self) -> None:
        """Forgets all layers of a store that has no sealed epochs, so that its first one can be given other rows.

        Raises LostEpochError where it had some, and their manifests are lost.
        """
        check_there(self._timelines, MAIN, None)
        with self._compactor.paused():
            self._garbage.forget(self._directory.layer_ids(), grace=False)
        self._garbage.collect()

    def changed_elsewhere(self) -> None:
        """Other nodes made branches, or dropped some."""
        self._safe_points.something_changed()
        self.prune()

    def prune_unneeded(self) -> None:
        """Removes what branches had that were deleted here, and a peer gave back before it had heard of that."""
        if self._timelines.has_unneeded():
            self.prune()

    def prune(self) -> int:
        """Removes what no branch needs. Returns the number of layers. Raises StorageError; the next start goes on with it."""
        with storage_errors("remove what no branch needs in", self._directory.root):
            return self._pruned()

    def _pruned(self) -> int:
        dropped: list[LayerId] = []
        with self._compactor.paused():
            for trace, until in self._timelines.prune().items():
                dropped += [LayerId(trace, d) for d in self._directory.descriptions(trace) if d.lower >= until]
            # No branch reads them, and the next epochs may have layers of these names.
            self._garbage.forget(dropped, grace=False)
        self._garbage.collect()
        self._small.note(self._small.listed())  # what is left of an archive has files of its own again
        self._files.tell_gone()
        return len(dropped)

    @contextmanager
    def _told_if_it_counts(self) -> Iterator[None]:
        """Makes an entry of the log durable, and tells of it, that failed and is in the log all the same."""
        before = self._timelines.refs.entries
        try:
            yield
        except NosyncError:
            if self._timelines.refs.entries > before:
                self._log_changed()
                self._safe_points.something_changed()
            raise

    def _main_changed(self) -> None:
        self._log_changed()
        self._safe_points.something_changed()
        self.prune()

    def _log_changed(self) -> None:
        self._files.published(PurePosixPath(BRANCHES, f"{self._timelines.refs.entries}.json"))
        self._merges.changed()
