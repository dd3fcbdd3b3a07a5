"""The position of a job in its store. Promoting and rewinding change it, so all that works for a job shares one."""

from __future__ import annotations

import contextlib
from datetime import datetime
from pathlib import Path

from nosync.lsm.errors import FencedError, NosyncError
from nosync.lsm.facts.fencing import Instance, check_fence, take_over
from nosync.lsm.manifests.manifest import Manifest
from nosync.lsm.manifests.manifest_log import ManifestLog
from nosync.lsm.model.timestamp import Epoch
from nosync.lsm.store.store import Store
from nosync.replication.client.location import StoreLocation


class Position:
    """A branch, the timeline that the job took over there, and which instance of the job it is on that timeline."""

    def __init__(self, store: Store, branch: str) -> None:
        self._store, self._node, self._directory = store, store.node, store.directory
        self.branch = branch
        self.timeline = ""
        """The id of the timeline that was taken over; empty where none was, for whoever only looks."""
        self.instance: Instance | None = None
        """A newer instance on the timeline stops this one from writing."""

    @property
    def root(self) -> Path:
        """Returns the directory of the store."""
        return self._directory.root

    def take_over(self, timeline: str) -> None:
        """Takes a timeline over from whoever ran it before."""
        self.timeline = timeline
        self.instance = take_over(self._directory.root, timeline, self._directory.env)

    def leave(self) -> None:
        """Leaves the timeline. What was a job there writes nothing more."""
        self.timeline = ""

    def check_open(self) -> None:
        """Raises StorageError where the store was closed, for nothing would make durable what is published.

        Raises FencedError where the branch is on another timeline now, whose code and instances are not this job's.
        """
        _ = self._store.node
        self._node.notice_changes(self.timeline)
        timelines = self._node.timelines
        if self.branch not in timelines.refs.names or timelines.timeline(self.branch).id != self.timeline:
            raise FencedError(
                f"branch {self.branch} was rewound, promoted or deleted since this job was made: it publishes nothing more. "
                "Make a new Job on the store"
            )

    def check_fence(self) -> None:
        """Raises FencedError where a newer instance of the job has taken over."""
        check_fence(self._directory.root, self.timeline, self.instance, self._directory.env)

    def last_sealed(self) -> Epoch | None:
        """Returns the newest epoch of the branch."""
        return self._node.last_sealed(self.branch)

    def sealed_at(self, t: int) -> datetime | None:
        """Returns when the branch sealed an epoch; None where that is not known."""
        with contextlib.suppress(
            NosyncError
        ):  # a damaged file, of which `verify` tells: it keeps no epoch from running
            return self._store.sealed_at(t, self.branch)
        return None

    def manifests(self) -> ManifestLog:
        """Returns what the branch sealed, by epoch."""
        return self._node.manifests(self.branch)

    def manifest(self, t: int) -> Manifest | None:
        """Returns what the branch sealed at an epoch."""
        return self._node.timelines.manifest(t, self.branch)


def location_of(store: Store) -> StoreLocation:
    """Returns where tasks find a store."""
    directory, node = store.directory, store.node
    return StoreLocation(str(directory.root.absolute()), directory.key_groups, node.store_id, node.node_id)
