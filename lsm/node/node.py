"""The node: durability, catalog, merging and retention of one data directory. This is its face.

Invariants
- A record is in the catalog only after its layer was read back and matched its digest, and file and directory were
  synced. The safe point counts records only: acked means readable.
- After a failed fsync the same inode is never trusted again: the layer is written to a new one, or stays unacked and
  the safe point stands still.
- Inputs of a merge leave the catalog in the edit that adds its result, and the disk a grace period later.
- Nothing here is on the path of a task's commit; the node may be slow, stopped or dead without anyone waiting.

Start after a crash: empty `tmp/`; open the catalog, or set a damaged one aside and begin a new one; compare it with
the files: what is recorded must exist with its digest, what is not recorded is verified and adopted, or moved to
`quarantine/`; what then is missing of any manifest is reported by `missing()`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Any

from nosync.lsm.errors import DeterminismError, NosyncError, StorageError
from nosync.lsm.facts.pins import Pin
from nosync.lsm.facts.seal_times import EventSpan, SealTimes
from nosync.lsm.manifests.branches import MAIN, SAME_CODE, ChangedStages
from nosync.lsm.manifests.completeness import MissingLayer
from nosync.lsm.manifests.manifest import Content, Manifest
from nosync.lsm.manifests.manifest_log import ManifestLog
from nosync.lsm.model.history import History
from nosync.lsm.model.layer import LayerId, Record, TraceId
from nosync.lsm.model.timestamp import Epoch, Time
from nosync.lsm.node.api import DurabilityListener
from nosync.lsm.node.durable_layers import INCARNATION_META, open_catalog
from nosync.lsm.node.input_release import announced_safe_points
from nosync.lsm.node.ownership import Ownership
from nosync.lsm.node.parts import NodeParts, prepare_directory
from nosync.lsm.node.remotes import Remotes
from nosync.lsm.node.threads import Steps
from nosync.lsm.platform.store_marker import Marker
from nosync.lsm.settings import StoreSettings
from nosync.lsm.trace.directory import LayerDirectory


class Node:
    """Owns one data directory. Make with the directory and settings; `close` when done.

    It is a nosync.lsm.node.api.StoreBackend. That says what the methods promise that have no words here.
    """

    replicas, store_id, node_id = 1, "", ""  # without peers that would matter to a job

    def __init__(
        self,
        directory: LayerDirectory,
        marker: Marker,
        settings: StoreSettings,
        *,
        replicated: bool = False,
        copies: int = 1,
    ) -> None:
        """`replicated`: what is safe depends on peers, so without a listener that knows of them nothing new is.
        `copies`: how many an epoch asks for of each stage of which nothing is said.
        """
        self.directory, self.settings = directory, settings
        self.problems, self.remotes = dict[str, str](), Remotes()
        root, env = directory.root, directory.env
        self._ownership = own = Ownership(root, self.problems)
        try:
            self._catalog, records = open_catalog(root, marker, env, announced_safe_points(root, env))
            try:
                prepare_directory(root, env)
                self.parts = parts = NodeParts(
                    directory, settings, own, self._catalog, records, self.problems, self.remotes,
                    replicated=replicated, copies=copies,
                )  # fmt: skip
                self._incarnation = self._catalog.meta(INCARNATION_META)
                parts.start(directory, replicated=replicated)
            except BaseException:
                self._catalog.close()
                raise
        except BaseException:
            own.release()
            raise
        self.announcer, self.timelines, self.safe_points = parts.announcer, parts.timelines, parts.safe_points
        self.small, self.discarded, self.opaque = parts.small, parts.discards.versions, parts.opaque
        looking = (
            parts.rechecks.validate, parts.discovery.look, parts.checks.note_problems, self.collect_garbage,
            self.archive_manifests,
        )  # fmt: skip
        making_durable = (parts.upkeep.drain, self.release_inputs)
        opaque = self.opaque.step if replicated else None
        steps = Steps(
            looking, making_durable, self.merge_once, parts.merges.idle_at_most_s, self.make_files_ahead,
            parts.inputs.idle_at_most_s, opaque,
        )  # fmt: skip
        parts.threads.start(steps)

    @property
    def incarnation(self) -> str:
        """Returns which life of the data directory this is: another one after a catalog was lost, or the disk replaced."""
        assert self._incarnation is not None, "it is written when a catalog is made"
        return self._incarnation

    @property
    def times(self) -> SealTimes:
        """Returns when epochs were sealed, also those that are not written yet."""
        return self.parts.times

    def lost_hosts(self) -> frozenset[str]:
        return frozenset()

    def listen(self, listener: DurabilityListener) -> None:
        """Tells a listener of all that is durable, and from then on of what changes."""
        with self.parts.layers.lock:
            self.announcer.listen(listener)
            listener.held(self.durable_records(), ())

    # --- what was published -------------------------------------------------------------------------------------------

    def note(self, ids: Iterable[LayerId], verified: Record | None = None) -> None:
        """Tells the node of published layers, which it then makes durable. It would find them by itself, later.

        `verified`: of one of them, what this process found when it checked every byte just now, so that it need not do
        it again.
        """
        ids = list(ids)
        self.parts.garbage.keep(ids)  # one that was about to be removed was published again
        self.parts.queue.note(ids, verified)
        self.parts.threads.wake()

    def note_files(self, paths: Iterable[PurePosixPath]) -> None:
        """Tells the node of manifests and log entries that others published here; it learns from them, too."""
        paths = list(paths)
        self.small.note(paths)
        self.parts.learning.note(paths)
        self.parts.threads.wake()

    def suspect(self, ids: Iterable[LayerId], small: Iterable[PurePosixPath]) -> None:
        """Somebody could not use these durable files: all of them is looked at soon, and what is bad is set aside."""
        self.parts.rechecks.suspect(ids, small)
        self.parts.threads.wake()

    def scan(self) -> None:
        """Compares the directory with the catalog: new layers are queued, vanished ones are lost."""
        self.parts.discovery.scan()

    def learn(self) -> None:
        """Takes notice of epochs that other processes sealed, and of branches that other nodes made or dropped."""
        self.parts.learning.learn()

    def notice_changes(self, timeline: str | None = None) -> None:
        """Does nothing: the node learns of changes as it goes."""

    def make_durable_now(self) -> None:
        self.parts.upkeep.make_durable_now()

    def sync(self) -> None:
        self.parts.upkeep.sync()

    def durable_ids(self) -> set[LayerId]:
        return self.parts.layers.ids()

    def durable_records(self) -> list[Record]:
        """Returns every durable layer, with its digest and size."""
        return self.parts.layers.records()

    def unknown(self, ids: Iterable[LayerId]) -> list[LayerId]:
        """Returns those that are not durable yet, and not about to be removed either."""
        return self.parts.discovery.unknown(list(ids))

    # --- epochs -------------------------------------------------------------------------------------------------------

    def seal(
        self,
        t: int,
        ids: Sequence[LayerId],
        branch: str = MAIN,
        meta: dict[str, Any] | None = None,
        copies: Mapping[str, int] | None = None,
        contents: Mapping[LayerId, Content] | None = None,
        span: EventSpan | None = None,
    ) -> Manifest:
        self._ownership.check()
        manifest = self.parts.epochs.seal(t, ids, branch, meta, copies, contents, span)
        self.note(e.id for e in manifest.entries if not self.safe_points.is_durable(e))
        self.parts.merges.changed()
        return manifest

    def check_sealable(self, t: int, branch: str = MAIN) -> None:
        self._ownership.check()
        self.parts.sealer.check_sealable(t, branch)

    def conflict(self, error: DeterminismError, branch: str = MAIN) -> None:
        self.parts.epochs.conflict(error, branch)

    def lost(self, branch: str = MAIN) -> list[MissingLayer]:
        self.scan()
        return self.parts.epochs.lost(branch)

    def fetch(self, lost: list[MissingLayer]) -> list[MissingLayer]:
        """Returns all of these: where there are peers, the daemon that this node is part of fetches by itself."""
        return lost

    def missing(self, branch: str = MAIN) -> list[MissingLayer]:
        return self.lost(branch)

    def safe_point(self, branch: str = MAIN) -> Epoch | None:
        return self.safe_points.point(branch)

    def optional_stages(self) -> frozenset[str]:
        """Returns the stages that no copies are asked for, in the newest epoch of the main timeline."""
        return self.parts.epochs.optional_stages()

    def origin(self, trace: TraceId) -> Time | None:
        return self.parts.sealer.origin(trace)

    def histories(self, branch: str = MAIN) -> dict[str, History]:
        return self.timelines.histories(branch)

    def manifests(self, branch: str = MAIN) -> ManifestLog:
        return self.timelines.manifests(branch)

    def last_sealed(self, branch: str = MAIN) -> Epoch | None:
        return self.timelines.last_sealed(branch)

    # --- what is kept, and what is checked ----------------------------------------------------------------------------

    def since(self) -> Time:
        return self.parts.retention.since()

    def pins(self) -> dict[str, Pin]:
        return self.parts.retention.pins()

    def pin(self, pin: Pin) -> None:
        self.parts.retention.pin(pin)
        self.parts.merges.touch()

    def unpin(self, name: str) -> None:
        self.parts.retention.unpin(name)
        self.parts.merges.touch()

    def release_inputs(self) -> None:
        """Drops inputs that the safe point has passed, as their sources' policies say."""
        self.parts.inputs.release()

    def archive_manifests(self) -> None:
        """Puts manifests of old, safe epochs together in one file, and removes what that stands for."""
        self.parts.archiving.archive()

    def check(self) -> list[NosyncError]:
        self.scan()
        return self.recheck(self.directory.layer_ids())

    def recheck(self, ids: Sequence[LayerId]) -> list[NosyncError]:
        return self.parts.quarantine.recheck(ids)

    def discard(self, ids: Iterable[LayerId], small: Iterable[PurePosixPath]) -> list[PurePosixPath]:
        """Discards, as an operator decided, contents of which others hold other ones that count. They go to quarantine
        with all that was built upon them, and the others' are fetched as anything lost is. Returns what went.
        """
        return self.parts.discards.set_aside(ids, small, is_decided=True)

    # --- merging ------------------------------------------------------------------------------------------------------

    def merge_once(self) -> bool:
        """Does the next merge that the policy asks for. False: there is none to do, or no directory to do it in."""
        try:
            self._ownership.check()
        except StorageError:  # which is among the problems
            return False
        return self.parts.compactor.merge_once(self.parts.threads.is_closing)

    def compact(self, stage: str | None = None) -> Iterator[int]:
        self.sync()
        done = 0
        while self.parts.compactor.merge_once(self.parts.threads.is_closing, whole=True, stage=stage):
            done += 1
            yield done
        self.parts.garbage.collect(all=True)

    def collect_garbage(self) -> None:
        """Deletes files that were replaced, or that nothing needs, and whose grace period is over."""
        self._ownership.check()
        self.parts.garbage.collect()

    def make_files_ahead(self) -> None:
        """See nosync.lsm.platform.file_pool."""
        self._ownership.check()
        self.parts.file_pool.fill()

    def drop_rounds(self, stage: str, t: int, *, at_once: bool = False) -> None:
        self.parts.garbage.forget_rounds(stage, t, at_once=at_once)

    # --- branches -----------------------------------------------------------------------------------------------------

    def create_branch(self, name: str, parent: str, at: int, stages: ChangedStages = SAME_CODE) -> None:
        self.parts.branching.create(name, parent, at, stages)

    def rewind(self, t: int, keep_as: str | None) -> None:
        self.parts.branching.rewind(t, keep_as)

    def release_first_attempt(self) -> None:
        self.parts.branching.release_first_attempt()

    def delete_branch(self, name: str) -> int:
        return self.parts.branching.delete(name)

    def promote(self, name: str, keep_as: str | None) -> None:
        self.parts.branching.promote(name, keep_as)

    # --- the end ------------------------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Gives the directory back without making anything durable: what the death of the process does."""
        try:
            self._stop()
        finally:
            self._give_back()

    def _stop(self) -> None:
        self.parts.threads.stop()
        self.parts.compactor.close()

    def _give_back(self) -> None:
        """The directory is free for the next one, also where a full disk keeps the catalog from closing."""
        try:
            self.remotes.abandon()
            self._catalog.close()
        finally:
            self._ownership.release()

    def close(self) -> None:
        try:
            self._stop()
            self.sync()
            self.remotes.finish()
            self.parts.garbage.collect(all=True)
        except BaseException:
            with suppress(NosyncError):  # what comes second says less
                self._give_back()
            raise
        self._give_back()
