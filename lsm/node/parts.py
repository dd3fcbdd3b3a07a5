"""The parts of a node: how they are put together, and how they start.

No part holds the node. Each gets the parts that it needs, which were made before it, so calls go one way only.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from nosync.lsm.errors import CorruptionError
from nosync.lsm.facts.seal_times import SealTimes
from nosync.lsm.manifests.branches import missing_entry
from nosync.lsm.manifests.catalog import Catalog
from nosync.lsm.manifests.lost_ends import log_problem
from nosync.lsm.manifests.sealing import Sealer
from nosync.lsm.model.layer import Record
from nosync.lsm.node.announcer import Announcer
from nosync.lsm.node.archiving import Archiving
from nosync.lsm.node.branching import Branching
from nosync.lsm.node.compactor import Compactor
from nosync.lsm.node.discards import Discards
from nosync.lsm.node.discovery import Discovery
from nosync.lsm.node.durability import Durability
from nosync.lsm.node.durable_files import DurableFiles
from nosync.lsm.node.durable_layers import DurableLayers
from nosync.lsm.node.epochs import Epochs
from nosync.lsm.node.garbage import Garbage
from nosync.lsm.node.input_release import InputRelease
from nosync.lsm.node.layer_sync import LayerSyncQueue
from nosync.lsm.node.learning import Learning
from nosync.lsm.node.manifest_checks import ManifestChecks
from nosync.lsm.node.merge_queue import MergeQueue
from nosync.lsm.node.metadata_sync import MetadataSync
from nosync.lsm.node.opaque_files import OpaqueFiles
from nosync.lsm.node.ownership import Ownership
from nosync.lsm.node.quarantine import Quarantine
from nosync.lsm.node.rechecks import Rechecks
from nosync.lsm.node.remotes import Remotes
from nosync.lsm.node.retention import Retention
from nosync.lsm.node.safe_point import SafePoint
from nosync.lsm.node.threads import NodeThreads
from nosync.lsm.node.upkeep import Upkeep
from nosync.lsm.platform.env import Env, storage_errors
from nosync.lsm.platform.file_pool import FilePool
from nosync.lsm.platform.layout import TEMPORARY_DIRECTORY
from nosync.lsm.platform.store_marker import make_subdirectories
from nosync.lsm.settings import ARCHIVE_EPOCHS, StoreSettings
from nosync.lsm.trace.directory import LayerDirectory


class NodeParts:
    """Holds what one node consists of. See each part."""

    def __init__(
        self,
        directory: LayerDirectory,
        settings: StoreSettings,
        ownership: Ownership,
        catalog: Catalog,
        records: Sequence[Record],
        problems: dict[str, str],
        remotes: Remotes,
        *,
        replicated: bool,
        copies: int,
    ) -> None:
        env, own = directory.env, ownership
        self.threads = NodeThreads(env, settings, problems)
        self.announcer = announcer = Announcer(replicated=replicated)
        self.layers = layers = DurableLayers(catalog, records, own, announcer)
        self.queue = queue = LayerSyncQueue(directory, problems, settings.retry_s)
        self.small = small = MetadataSync(directory.root, env, problems)
        self.files = files = DurableFiles(directory, own, small, catalog, layers, announcer)
        self.sealer = Sealer(directory, copies, lambda: files.remembered)
        self.timelines = timelines = self.sealer.timelines
        self.safe_points = safe = SafePoint(
            layers, timelines, small, announcer, catalog, env, problems, replicated=replicated
        )
        self.retention = retention = Retention(directory, settings.retain, layers, timelines, small, problems)
        self.garbage = garbage = Garbage(directory, settings.grace_s, own, layers, queue, announcer, self.threads.wake)
        self.merges = merges = MergeQueue(layers, env, settings.retry_s, problems, self.threads.wake_merger)
        self.quarantine = bad = Quarantine(directory, layers, queue, garbage, self.sealer, safe, announcer)
        self.compactor = compactor = Compactor(
            directory, settings, layers, timelines, retention, merges, queue, garbage, bad, safe
        )
        self.durability = Durability(
            directory, own, layers, queue, small, files, garbage, bad, compactor, merges, announcer
        )
        self.inputs = InputRelease(
            directory, layers, timelines, safe, announcer, garbage, remotes, replicated=replicated
        )
        self.discards = Discards(
            directory, timelines, layers, files, small, bad, compactor, safe, self.inputs, announcer
        )
        self.rechecks = Rechecks(directory, layers, bad, self.discards, announcer, problems)
        self.checks = ManifestChecks(directory, timelines, files.remembered, safe, problems)
        self.times = times = SealTimes(directory.root, env, settings.archive_epochs or ARCHIVE_EPOCHS)
        self.epochs = Epochs(directory, self.sealer, times, layers, queue, small, safe, self.checks, problems)
        self.archiving = archiving = Archiving(
            directory, settings.archive_epochs, own, timelines, times, safe, small, files, bad, announcer, problems
        )
        self.branching = branching = Branching(
            directory, timelines, retention, small, files, safe, compactor, merges, garbage
        )
        self.learning = learning = Learning(
            directory, own, layers, timelines, retention, small, files, safe, archiving, branching, merges, announcer
        )
        self.discovery = Discovery(directory, layers, queue, garbage, bad, compactor, learning, branching, announcer)
        self.upkeep = Upkeep(own, self.discovery, self.rechecks, self.epochs, self.durability, learning)
        self.opaque = OpaqueFiles(
            directory.root, env, own, catalog, layers.lock, announcer, problems, self.threads.wake_opaque
        )
        self.file_pool = FilePool(directory.root, env)

    def start(self, directory: LayerDirectory, *, replicated: bool) -> None:
        """Compares the catalog with the files, and makes durable what is not."""
        if not replicated:  # with peers they may still be on their way
            problem = log_problem(self.timelines, directory.root, directory.env)
            if problem is not None or self.timelines.refs.later:
                raise CorruptionError(problem or missing_entry(directory.root, self.timelines.refs))
        self.quarantine.put_files(self.timelines.errors)
        self.small.note(self.small.listed())
        self.retention.read_pins()
        self.quarantine.check_records()
        self.discovery.scan()
        self.queue.widest_first()
        if not replicated:  # with peers the node of a job has written them, or a peer has
            self.quarantine.put_files(self.epochs.damaged_times(), "times")
            self.epochs.recall_times()
        self.upkeep.drain()
        if not replicated:
            pinned = [pin.t for pin in self.retention.pins().values()]
            self.files.recall_more(self.timelines, self.layers.ids(), pinned)
        else:
            self.safe_points.begin()
        self.checks.note_problems()
        self.compactor.drop_covered()
        self.branching.prune()  # of a branch that was deleted just before a crash
        self.rechecks.begin_validating([*sorted(self.layers.ids()), *sorted(self.queue.waiting())])


def prepare_directory(root: Path, env: Env) -> None:
    """Makes the directories that a store has, and empties the one of files that were being written."""
    with storage_errors("open the store", root):
        make_subdirectories(root, env)
    with storage_errors("clean", root / TEMPORARY_DIRECTORY):
        for name in env.list_dir(root / TEMPORARY_DIRECTORY):
            with suppress(IsADirectoryError):  # nothing of ours
                env.unlink(root / TEMPORARY_DIRECTORY / name)
