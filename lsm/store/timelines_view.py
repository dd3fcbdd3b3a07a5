"""The timelines of a store as they are now: those of its node, or of a read-only store what files say."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from nosync.lsm.manifests.lost_ends import check_log, check_there
from nosync.lsm.manifests.remembered import recalled
from nosync.lsm.manifests.timelines import Timelines
from nosync.lsm.model.timestamp import Epoch
from nosync.lsm.node.api import StoreBackend
from nosync.lsm.trace.directory import LayerDirectory


class EndChecks:
    """Says whether the ends of a store's logs are there, by its files."""

    def __init__(self, directory: LayerDirectory) -> None:
        self._root, self._env = directory.root, directory.env

    def check_log(self, timelines: Timelines) -> None:
        """Raises CorruptionError where an entry of the log of branches is lost."""
        check_log(timelines, self._root, self._env)

    def check_newest(self, timelines: Timelines, branch: str) -> None:
        """Raises LostEpochError where later epochs of a branch were sealed, and are lost."""
        check_there(timelines, branch, None)


class TimelinesView:
    """Holds what one store sees. `node`: None where it is read only."""

    def __init__(self, directory: LayerDirectory, node: StoreBackend | None, ends: EndChecks) -> None:
        self._directory, self._node, self._ends = directory, node, ends
        self._seen: Timelines | None = None  # of a read-only store; read once, and then what is new
        self._held = False  # what is new is left for later

    def current(self) -> Timelines:
        """Raises CorruptionError for a damaged manifest, and where an entry of the log of branches is lost."""
        if self._node is not None:
            self._node.notice_changes()
            timelines = self._node.timelines
            if timelines.refs.entries < timelines.remembered.last_entry:  # with peers it may come yet
                self._ends.check_log(timelines)
            return timelines
        if self._seen is None:
            root = self._directory.root
            seen = Timelines(root, self._directory.env, lambda: recalled(root))
            self._ends.check_log(seen)
            self._seen = seen
        elif not self._held:
            self._seen.refresh()
            if self._seen.refs.entries < self._seen.remembered.last_entry:
                self._ends.check_log(self._seen)
        if self._seen.errors:
            error, self._seen = self._seen.errors[0], None  # all is read again, should it be mended
            raise error
        return self._seen

    def newest(self, branch: str) -> Epoch | None:
        """Returns the last sealed epoch of a branch, for who reads it. Raises LostEpochError where later ones are lost."""
        timelines = self.current()
        self._ends.check_newest(timelines, branch)
        return timelines.last_sealed(branch)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Looks for nothing new here meanwhile, where the store is read only."""
        self.current()
        self._held = True
        try:
            yield
        finally:
            self._held = False

    def leave_node(self) -> None:
        """Leaves the node to the parent of this forked process: files are read from now on."""
        self._node = None
