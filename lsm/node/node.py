"""The node: durability, catalog, merging and retention of one data directory.

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

import functools
import itertools
import logging
import threading
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from blake3 import blake3

from nosync.lsm.compaction.compactor import Compactor
from nosync.lsm.compaction.policy import Chain
from nosync.lsm.errors import (
    CatalogError,
    CompactedError,
    CorruptionError,
    DeterminismError,
    InvalidInputError,
    NosyncError,
    StorageError,
)
from nosync.lsm.facts.deliveries import old_deliveries
from nosync.lsm.facts.fencing import old_instances
from nosync.lsm.facts.or_set import register_files
from nosync.lsm.facts.pins import Pin, Pins
from nosync.lsm.layers.reader import LayerReader
from nosync.lsm.manifests.branches import BRANCHES, MAIN, missing_entry
from nosync.lsm.manifests.catalog import Catalog, set_aside
from nosync.lsm.manifests.completeness import MissingLayer, to_look_at
from nosync.lsm.manifests.input_policy import POLICIES, is_released, policies, releasable_until
from nosync.lsm.manifests.lost_ends import LOST_END, LOST_MANIFEST, check_there, inferred, log_problem, lost_manifests
from nosync.lsm.manifests.manifest import (
    Content,
    Manifest,
)
from nosync.lsm.manifests.remembered import KEY_GROUPS_META, SAFE_META, Remembered
from nosync.lsm.manifests.sealing import HasSealer, Sealer
from nosync.lsm.model.layer import Description, Digest, LayerId, Record, TraceId
from nosync.lsm.model.timestamp import END_OF_TIME, ZERO, Epoch, Time, end_of, epoch_of, is_number, pack
from nosync.lsm.node.api import DurabilityListener
from nosync.lsm.node.discards import DiscardedVersions, dependents_of, first_discarded
from nosync.lsm.node.input_release import InputRelease, announced_safe_points
from nosync.lsm.node.layer_sync import LayerSyncQueue
from nosync.lsm.node.metadata_sync import MetadataSync
from nosync.lsm.node.safe_point import SafePoint
from nosync.lsm.node.threads import NodeThreads
from nosync.lsm.platform.env import storage_errors
from nosync.lsm.platform.file_pool import FilePool
from nosync.lsm.platform.json_file import read_if_there, unseal_json
from nosync.lsm.platform.lock import DirectoryLock
from nosync.lsm.platform.publish import TEMPORARY_DIRECTORY
from nosync.lsm.platform.verified import is_verified_here, mark_verified
from nosync.lsm.settings import StoreSettings
from nosync.lsm.trace.directory import (
    CATALOG,
    LAYERS,
    MANIFESTS,
    PLACE_FILE,
    QUARANTINE,
    LayerDirectory,
    Marker,
    make_subdirectories,
)
from nosync.lsm.trace.listing import Listing
from nosync.lsm.trace.presence import live
from nosync.lsm.trace.trace import choose_cover, overlaps

log = logging.getLogger("nosync")

_LOOK_FOR_SAFE_S = 0.5
_SCAN_ALL_EVERY_S = 60.0
_RECORDED_AT_ONCE = 256
_VALIDATED_AT_ONCE_BYTES = 64 << 20
_PINS = "pins"
_PLACE = "the data directory"
_ARCHIVES = "archives of manifests"
_POLICIES = "policies of inputs"


class Node(HasSealer):
    """Owns one data directory. Make with the directory and settings; `close` when done."""

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
        self.directory = directory
        self.is_replicated = replicated
        self.settings = settings
        self._copies = copies
        self._env = directory.env
        self._lock = threading.RLock()  # the fields below, and the catalog
        self._records: dict[TraceId, dict[Description, Record]] = {}
        self._pin_files = Pins(directory.root, directory.env)
        self._pins: dict[str, Pin] = {}
        self._pins_known = True
        self._to_learn: deque[PurePosixPath] = deque()  # small files that came from elsewhere
        self._inputs = InputRelease(self)
        self._listing = Listing(directory)
        self._next_scan_s = self._env.monotonic_s() + _SCAN_ALL_EVERY_S
        self._look_beside = True  # for manifests that an archive stands for
        self._doubted: dict[LayerId | PurePosixPath, None] = {}
        self._unvalidated: deque[LayerId] | None = None  # of a directory that came from elsewhere
        self.listener: DurabilityListener | None = None
        """Replication, where this node has peers."""
        self.problems: dict[str, str] = {}
        """What keeps layers from being durable, by path; empty when all is well."""
        self.new = LayerSyncQueue(directory, self.problems, settings.retry_s)
        self.small = MetadataSync(directory.root, self._env, self.problems)
        self.discarded = DiscardedVersions(directory.root, self._env)
        self._telling_gone = threading.Lock()  # what goes together is told together
        self._durability = threading.Lock()  # one thread makes layers durable at a time
        self._forgotten: set[LayerId] = set()  # since it began to
        self._compactor = Compactor(self, self.problems)
        self._ready_files = FilePool(directory.root, self._env)
        self._background = NodeThreads(
            self._env,
            settings,
            self.problems,
            looking=(self._validate, self._look, self._note_problems, self.collect_garbage, self.archive_manifests),
            making_durable=(self._drain, self.release_inputs),
            merge_once=self.merge_once,
            make_ahead=self.make_files_ahead,
            idle_at_most_s=self._idle_at_most_s,
        )
        self._directory_lock = DirectoryLock(directory.root)
        try:
            self._catalog = self._open_catalog(marker)
            try:
                self._incarnation = self._catalog.meta("incarnation")
                self.safe_points = SafePoint(self, self._catalog, self._lock, self._env, replicated=replicated)
                self._start()
            except BaseException:
                self._catalog.close()
                raise
        except BaseException:
            self._directory_lock.release()
            raise
        self._background.start()

    # --- start --------------------------------------------------------------------------------------------------------

    def _open_catalog(self, marker: Marker) -> Catalog:
        path = self.directory.root / CATALOG
        try:
            catalog = self._catalog_in(path)
            try:
                owner = catalog.meta("store_id")
                if owner == marker.store_id:
                    for record in catalog.records():
                        self._records.setdefault(record.id.trace, {})[record.id.description] = record
                    return catalog
            except (CatalogError, StorageError):
                catalog.close()
                raise
            if owner is None and not catalog.records():
                return self._begun(catalog, marker)
            catalog.close()
            raise CatalogError(f"{path} belongs to store {owner}, not to {marker.store_id}")
        except CatalogError as error:
            self._records = {}
            aside = set_aside(path, self._env.token())
            log.warning("the catalog is rebuilt from the layer files: %s (the old one is kept as %s)", error, aside)
        return self._begun(self._catalog_in(path), marker)

    def _catalog_in(self, path: Path) -> Catalog:
        """The directory is made first: RocksDB gives what it makes to everybody, which there matters to nobody."""
        with storage_errors("make", path):
            self._env.make_dirs(path)
        return Catalog(path)

    def _begun(self, catalog: Catalog, marker: Marker) -> Catalog:
        """A catalog that is new: another incarnation of the directory, which may have let go of inputs before."""
        announced = announced_safe_points(self.directory.root, self._env)
        fields = {"store_id": marker.store_id, KEY_GROUPS_META: str(marker.key_groups)}
        catalog.apply(meta={**fields, "incarnation": self._env.token(), **announced})
        return catalog

    def _start(self) -> None:
        root = self.directory.root
        with storage_errors("open the store", root):
            make_subdirectories(root, self._env)
        with storage_errors("clean", root / TEMPORARY_DIRECTORY):
            for name in self._env.list_dir(root / TEMPORARY_DIRECTORY):
                with suppress(IsADirectoryError):  # nothing of ours
                    self._env.unlink(root / TEMPORARY_DIRECTORY / name)
        metas = self._catalog.metas()
        self._remembered = Remembered(metas)
        if KEY_GROUPS_META not in metas:  # an earlier version wrote it
            self._catalog.remember({KEY_GROUPS_META: str(self.directory.key_groups)})
        self.sealer = Sealer(self.directory, self._copies, lambda: self._remembered)
        if not self.is_replicated:  # with peers they may still be on their way
            problem = log_problem(self.timelines, root, self._env)
            if problem is not None or self.timelines.refs.later:
                raise CorruptionError(problem or missing_entry(root, self.timelines.refs))
        for error in self.timelines.errors:
            assert error.path is not None, "of a file that was listed"
            self._quarantine_file(error.path, "manifest", error)
        self.small.note(self.small.listed())
        self._read_pins()
        self._check_records()
        self.scan()
        self.new.widest_first()
        self._drain()
        self._recall_more(metas)
        self._note_problems()
        self._drop_covered()
        self._prune()  # of a branch that was deleted just before a crash
        if not is_verified_here(root):
            self._unvalidated = deque([*sorted(self.durable_ids()), *sorted(self.new.waiting())])
            self._validate()

    def _validate(self) -> None:
        """Looks at layers that a catalog lists which came along with them, a part of them each time."""
        if self._unvalidated is None:
            return
        size_bytes = 0
        while self._unvalidated and size_bytes < _VALIDATED_AT_ONCE_BYTES:
            id = self._unvalidated.popleft()
            with suppress(FileNotFoundError):
                size_bytes += self._env.size_bytes(self.directory.path_of(id))
            self.recheck([id])
        if not self._unvalidated:
            mark_verified(self.directory.root, self._env)
            self._unvalidated = None

    def _recall_more(self, metas: Mapping[str, str]) -> None:
        """What else shows that epochs were sealed, where the catalog is new or an earlier version kept it."""
        if self.is_replicated or self._env.exists(self.directory.root / PLACE_FILE):
            return
        announced = {
            name.removeprefix(SAFE_META): Epoch(int(t)) for name, t in metas.items() if name.startswith(SAFE_META)
        }
        found = inferred(self.timelines, self.durable_ids(), [pin.t for pin in self._pins.values()], announced)
        for timeline, kept in found.items():
            self._catalog.remember(self._remembered.note_timeline(timeline, kept))

    def _drop_covered(self, traces: Iterable[TraceId] | None = None) -> None:
        """What a merged layer stands for, where a crash, or an edit of the catalog that failed, came between its
        publishing and the edit that replaces its inputs. `traces`: None: all.
        """
        frontier = self.since()
        with self._lock:
            wanted = list(self._records) if traces is None else [trace for trace in traces if trace in self._records]
            known = {trace: list(self._records[trace]) for trace in wanted}
        for trace, there in known.items():
            remaining = set(live(there, frontier))
            ids = [LayerId(trace, d) for d in there if d not in remaining]
            if ids:
                with self._lock:
                    self._edit((), ids)
                    self._tell((), ids)
                self.safe_points.something_changed()
                self._compactor.discard(ids, is_replaced=True)

    def _read_pins(self) -> None:
        """A pin that cannot be read may hold any epoch: then nothing of history is let go of."""
        try:
            self._pins = self._pin_files.by_name()
            self._pins_known = True
            self.problems.pop(_PINS, None)
        except CorruptionError as error:
            self._pins_known = False
            self.problems[_PINS] = f"{error}; all history is kept until it is removed, or put back from a backup"

    def _check_records(self) -> None:
        """Drops records whose file is gone or is not what was acked; the reads of a layer verify the rest of it."""
        for record in [r for records in self._records.values() for r in records.values()]:
            try:
                if LayerReader.open(self.directory.path_of(record.id), self._env, record.id).digest != record.digest:
                    raise CorruptionError(f"{record.id}: is not the file that was acknowledged ({record.digest[:16]})")
            except FileNotFoundError:
                self._lose(record.id, "its file is gone")
                self._tell((), [record.id])
            except CorruptionError as error:
                self._quarantine(record.id, error)

    @property
    def replicas(self) -> int:
        """On how many nodes layers can be kept: without peers on this one."""
        return 1

    @property
    def store_id(self) -> str:
        """Of a store whose tasks find it on several nodes; empty: this directory is the one."""
        return ""

    @property
    def node_id(self) -> str:
        """Which of these nodes this is: it has no peers that would matter to a job."""
        return ""

    def lost_hosts(self) -> frozenset[str]:
        """Of peers that a job's tasks run beside: an embedded node has none."""
        return frozenset()

    @property
    def incarnation(self) -> str:
        """Which life of the data directory this is: another one after a catalog was lost, or the disk replaced."""
        assert self._incarnation is not None, "it is written when a catalog is made"
        return self._incarnation

    def check_place(self) -> None:
        """Raises StorageError where the directory was moved away.

        It comes before whatever takes a file that is not at its path for lost, and whatever writes or deletes by path.
        """
        try:
            self._directory_lock.check()
        except StorageError as error:
            self.problems[_PLACE] = str(error)
            raise
        self.problems.pop(_PLACE, None)

    # --- durability ---------------------------------------------------------------------------------------------------

    def listen(self, listener: DurabilityListener) -> None:
        """Tells a listener of all that is durable, and from then on of what changes.

        The node's lock comes first and the listener's inside it, here as where the safe point asks for copies.
        """
        with self._lock:
            self.listener = listener
            listener.held(self.durable_records(), ())

    def note(self, ids: Iterable[LayerId], verified: Record | None = None) -> None:
        """Tells the node of published layers, which it then makes durable. It would find them by itself, later.

        `verified`: of one of them, what this process found when it checked every byte just now, so that it need not do
        it again.
        """
        ids = list(ids)
        self._compactor.keep(ids)  # one that was about to be removed was published again
        self.new.note(ids, verified)
        self._background.wake()

    def note_files(self, paths: Iterable[PurePosixPath]) -> None:
        """Tells the node of manifests and log entries that others published here; it makes them durable and learns from
        them.
        """
        paths = list(paths)
        self.small.note(paths)
        self._to_learn.extend(paths)
        self._background.wake()

    def suspect(self, ids: Iterable[LayerId], small: Iterable[PurePosixPath]) -> None:
        """Somebody could not use these durable files: soon all of them is looked at, and what is bad goes to
        quarantine.
        """
        with self._lock:
            self._doubted |= dict.fromkeys([*ids, *small])
        self._background.wake()

    def _look_at_doubted(self) -> None:
        with self._lock:
            suspects, self._doubted = self._doubted, {}
        self.recheck([one for one in suspects if isinstance(one, LayerId)])
        for path in [one for one in suspects if isinstance(one, PurePosixPath)]:
            final = self.directory.root / path
            try:
                unseal_json(read_if_there(final, self._env), str(final))
            except FileNotFoundError:
                continue
            except CorruptionError as error:
                self.problems[str(path)] = (
                    f"{error}; stop the daemon, and put a copy from a backup there, if there is one"
                )
                if self.listener is not None and self.listener.copies_of_file(path) > 1:
                    self._set_aside([], [path])
                    self.problems.pop(str(path), None)

    def scan(self) -> None:
        """Compares the directory with the catalog: new layers are queued, vanished ones are lost."""
        self._learn_all()
        with self._lock:
            known = list(self._records)
        listed: dict[TraceId, list[Description]] = {trace: [] for trace in known}
        self._compare(listed | {trace: self.directory.descriptions(trace) for trace in self.directory.traces()})

    def _look(self) -> None:
        """As `scan`, but only where directories changed; now and then everywhere."""
        if self._env.monotonic_s() >= self._next_scan_s:
            self._next_scan_s = self._env.monotonic_s() + _SCAN_ALL_EVERY_S
            self.scan()
            if self.listener is not None and self.timelines.has_unneeded():
                self._prune()  # of branches that were deleted here, which a peer gave back before it had heard of that
            return
        try:
            self._learn_all()
            self._compare(self._listing.changed())
        except BaseException:
            self._next_scan_s = self._env.monotonic_s()  # what was listed and not compared is listed again
            raise

    def _note_problems(self) -> None:
        self._note_gaps()
        self._note_unknown_policies()

    def _note_gaps(self) -> None:
        """A manifest that is lost stops the safe point, and no layer is missing for it. Nor is one for an entry of the
        log.
        """
        found: dict[str, str] = {}
        for name in list(self.timelines.refs.names):
            with suppress(InvalidInputError):  # the branch was deleted meanwhile
                found |= lost_manifests(self.timelines, name, self.safe_point(name))
        problem = None
        if self.timelines.refs.entries < self._remembered.last_entry:
            problem = log_problem(self.timelines, self.directory.root, self._env)
        found |= {} if problem is None else {BRANCHES: problem}
        for at in [at for at in self.problems if at.startswith((LOST_MANIFEST, LOST_END)) or at == BRANCHES]:
            if at not in found:
                self.problems.pop(at, None)
        self.problems |= found

    def _note_unknown_policies(self) -> None:
        """A newer version, or a stranger, says what this one does not know: inputs are kept then, and somebody is told."""
        last = self.last_sealed()
        manifest = None if last is None else self.timelines.manifest(last)
        unknown = manifest.unknown_policies if manifest is not None else {}
        if unknown:
            said = ", ".join(f"{stage}: {policy!r}" for stage, policy in unknown.items())
            self.problems[_POLICIES] = (
                f"manifests say at_safe_point= of sources what this nosync does not know ({said}; it knows "
                f"{', '.join(POLICIES)}): their layers are kept. Upgrade nosync, or see who wrote it"
            )
        else:
            self.problems.pop(_POLICIES, None)

    def _learn_all(self) -> None:
        if self.listener is not None:  # alone, nobody else seals epochs here or changes branches
            self.learn()
        self._learn_registers()

    def _compare(self, listed: Mapping[TraceId, Collection[Description]]) -> None:
        """`listed`: what is in the directories of traces."""
        new, gone = set[LayerId](), set[LayerId]()
        with self._lock:
            for trace, there in listed.items():
                known = self._records.get(trace, {})
                new.update(LayerId(trace, d) for d in there if d not in known)
                gone.update(LayerId(trace, d) for d in known.keys() - set(there))
            new = {id for id in new if not (self._compactor.is_garbage(id) or self._compactor.is_made(id))}
            self.new.note(sorted(new))
        for id in sorted(gone):
            if not self.sealer.exists(id):
                self._lose(id, "its file is gone")
                self._tell((), [id])

    def learn(self, came: Sequence[PurePosixPath] = ()) -> None:
        """Takes notice of epochs that other processes sealed, and of branches that other nodes made or dropped.

        `came`: the files that this is for, if that is known. Manifests of next epochs are read, and nothing else is
        looked at.
        """
        self.check_place()
        # `since`, which asks for it, follows what was sealed, so no merge may ask before pins are read.
        with self._lock:
            next_ones = self.timelines.follow(came) if came else None
            learned, archives, log_changed = self.timelines.refresh() if next_ones is None else (next_ones, [], False)
            if learned or log_changed:
                self._read_pins()
            self.small.note([*(manifest.path for manifest in learned), *(archive.path for archive in archives)])
            self._look_beside = self._look_beside or bool(archives)
            self.safe_points.learned(learned)
        if log_changed:
            with self._lock:
                self.safe_points.something_changed()
            self._prune()
        if learned or log_changed:
            self._may_merge()

    def _learn_registers(self) -> None:
        """Pins, instances of jobs and marks of sinks, as they are now; what is long replaced goes."""
        self.check_place()
        files = register_files(self.directory.root, self._env)
        old = [*old_instances(files), *old_deliveries(files)]
        for path in old:
            with storage_errors("remove", self.directory.root / path):
                self._env.unlink(self.directory.root / path)
        self.small.note(set(files).difference(old))
        self._read_pins()
        self._compactor.touch()
        if old:
            self._tell_gone_files()

    def sync(self) -> None:
        """Makes everything durable that was published before the call. Raises StorageError when that fails."""
        self.scan()
        layers, files = self.new.waiting(), set(self.small.waiting())
        self._drain(again=True)
        with self._lock:  # others publish meanwhile, and tell again of what is durable by now
            left = sorted((layers & self.new.waiting()) - self._forgotten)
            waiting: list[object] = [id for id in left if not self._is_recorded(id)]
        waiting += files.intersection(self.small.waiting())
        self.check_place()  # it may have gone meanwhile
        if waiting:
            reasons = "; ".join(dict.fromkeys(self.problems.values())) or "they are still being written"
            raise StorageError(f"{len(waiting)} files are published but not durable ({waiting[0]}, ...): {reasons}")

    def _is_recorded(self, id: LayerId) -> bool:
        return not self.new.is_doubtful(id) and id.description in self._records.get(id.trace, {})

    def _drain(self, *, again: bool = False) -> None:
        """`again`: also what failed just now, and would be tried again later."""
        with self._durability:
            self.check_place()
            with self._lock:
                self._forgotten = set()
            self._look_at_doubted()
            # An epoch that is sealed meanwhile waits for the next time, or peers had its manifest before its layers.
            small = self.small.waiting()
            durable = []
            for id in self.new.due(again=again):
                try:
                    record = self._make_file_durable(id)
                except NosyncError as error:  # of the system, or a layer of a newer version
                    self.new.failed([id], error)
                    continue
                if record is not None:
                    durable.append(record)
                else:
                    self._record_gone([id])
                if len(durable) >= _RECORDED_AT_ONCE:  # a start that is interrupted goes on from there
                    self._record_durable(durable)
                    durable = []
            self._record_durable(durable)
            self._sync_small(small)

    def _record_durable(self, durable: list[Record]) -> None:
        if not durable:
            return
        try:
            self.new.sync_directories(durable)
        except StorageError as error:
            self.new.failed([record.id for record in durable], error)
            return
        with self._lock:
            mine = [record for record in durable if record.id not in self._forgotten]
            there = [record for record in mine if self.sealer.exists(record.id)]
            self._record(there, ())
            self._record_gone([record.id for record in mine if record not in there])

    def _record_gone(self, ids: Sequence[LayerId]) -> None:
        """Whoever fetched them waits for nothing more. What was forgotten meanwhile is told of, and may be there again."""
        self.check_place()
        with self._lock:
            gone = [id for id in ids if id not in self._forgotten]
            for id in gone:
                self.new.settled(id)
            self._tell((), gone)

    def _sync_small(self, paths: Sequence[PurePosixPath]) -> None:
        durable = self.small.sync(paths)
        try:
            self.check_place()
        except StorageError:
            self.small.note(paths)  # those that it took for gone
            raise
        self._remember(durable)
        if self.listener is not None and durable:
            self.listener.held_files(durable)
        came = [self._to_learn.popleft() for _ in range(len(self._to_learn))]
        if came:
            self.learn(came)
        if any(path.parts[0] != MANIFESTS for path in came):
            self._learn_registers()

    def _remember(self, durable: Iterable[PurePosixPath]) -> None:
        """These small files are durable: should the end of them ever be lost, the catalog shows it."""
        with self._lock:
            changed = self._remembered.note(self.directory.root, durable, self._env)
            if changed:
                self._catalog.remember(changed)

    def _record(self, add: Sequence[Record], remove: Sequence[LayerId]) -> None:
        with self._lock:  # listeners are told in the order of the edits, or one that came late would be of what is gone
            self._edit(add, remove)
            self._tell(add, remove)
        self._drop_covered({record.id.trace for record in add if not record.id.is_fresh})
        self._may_merge({record.id.trace for record in add})

    def _may_merge(self, traces: Iterable[TraceId] | None = None) -> None:
        """These traces changed; None: what is sealed, or how long history is kept, did, which is about all of them."""
        self._compactor.touch(traces)
        self._background.wake_merger()

    def _edit(self, add: Sequence[Record], remove: Sequence[LayerId]) -> None:
        self.check_place()
        with self._lock:
            self._catalog.apply(add, remove)
            for id in remove:
                self._records[id.trace].pop(id.description, None)
            for record in add:
                self._records.setdefault(record.id.trace, {})[record.id.description] = record
                self.new.settled(record.id)

    def _tell(self, added: Sequence[Record], gone: Sequence[LayerId], *, dropped: bool = False) -> None:
        if self.listener is not None and (added or gone):
            self.listener.held(added, gone, dropped=dropped)

    def _make_file_durable(self, id: LayerId) -> Record | None:
        """None: it is gone, obsolete, or torn (now in quarantine). Raises StorageError."""
        with self._lock:  # a merge that is about to record it comes before or after this
            if self._superseded(id):
                self._compactor.discard([id], is_replaced=True)
                return None
        try:
            return self.new.make_durable(id)
        except FileNotFoundError:
            return None
        except CorruptionError as error:
            self._quarantine(id, error)
            return None

    # --- what is lost, torn or obsolete --------------------------------------------------------------------------

    def _superseded(self, id: LayerId) -> bool:
        """Whether a durable layer of another name covers this one."""
        with self._lock:
            others = [d for d in self._records.get(id.trace, {}) if d != id.description]
        return any(d.covers(id.description) for d in others)

    def not_replaced(self, ids: Sequence[LayerId]) -> list[LayerId]:
        """Those for which no other durable layer stands, or whose file is gone."""
        is_here = functools.cache(self.sealer.exists)
        with self._lock:
            others = {id: [d for d in self._records.get(id.trace, {}) if d != id.description] for id in ids}
        return [
            id
            for id, records in others.items()
            if not any(d.covers(id.description) and is_here(LayerId(id.trace, d)) for d in records)
        ]

    def _lose(self, id: LayerId, why: str) -> None:
        self.check_place()
        log.warning("lost: %s: %s; recover() recomputes it", id, why)
        with self._lock:
            self._catalog.apply(remove=[id])
            self._records.get(id.trace, {}).pop(id.description, None)
            self.new.settled(id)
            self.taken_back(self._compactor.take_back(id))
            self.safe_points.something_changed()
        self.directory.forget(id)

    def taken_back(self, ids: Iterable[LayerId]) -> None:
        """These are no garbage after all: they are made durable again, where their files are still there."""
        self.new.note([id for id in ids if self.sealer.exists(id)])
        self._background.wake()

    def _quarantine(self, id: LayerId, error: NosyncError) -> None:
        self._quarantine_layer(id, error)
        self._lose(id, "its file was quarantined")
        self._tell((), [id])

    def _quarantine_layer(self, id: LayerId, error: NosyncError) -> None:
        self._quarantine_file(self.directory.path_of(id), ".".join(id.path.parts[:3]), error)

    def _quarantine_file(self, path: Path, prefix: str, error: NosyncError) -> None:
        target = self.directory.root / QUARANTINE / f"{prefix}.{path.name}.{self._env.token()}"
        log.warning("quarantined as %s: %s", target, error)
        with storage_errors("quarantine", path), suppress(FileNotFoundError):  # what is gone does no harm either
            self._env.make_dirs(target.parent)
            self._env.replace(path, target)

    def discard(self, ids: Iterable[LayerId], small: Iterable[PurePosixPath]) -> list[PurePosixPath]:
        """What others hold other contents of, which count, as an operator decided: ours go to quarantine with all that
        was built upon them, and theirs are fetched as anything lost is. Returns what went.

        What a third node holds of ours does not come back, and what was safe of them is not for that.
        """
        return self._set_aside(ids, small, is_decided=True)

    def _set_aside(
        self, ids: Iterable[LayerId], small: Iterable[PurePosixPath], *, is_decided: bool = False
    ) -> list[PurePosixPath]:
        # Or a merge of ours that ends later would cover theirs.
        with self._compactor.paused(), self._telling_gone:
            layers, files = dependents_of(small := list(small), self.directory, self.timelines)
            layers, files = {*ids, *layers}, {*small, *files}
            if is_decided:
                self._count_no_more(layers, files)
            # Manifests first: what an interruption leaves is layers that nothing lists, and no epochs without theirs.
            for path in sorted(files):
                error = NosyncError(f"{path}: another node's contents count")
                self._quarantine_file(self.directory.root / path, ".".join(path.parts[:-1]), error)
            for id in sorted(layers):
                self._quarantine_layer(id, NosyncError(f"{id}: another node's contents count"))
                self._lose(id, "another node's contents count")
            gone = self.small.forget_gone()
            self.timelines.reload()
            self.safe_points.something_changed()
            if self.listener is not None:
                self.listener.lost_files(gone, sorted(layers))
        return sorted([*files, *(PurePosixPath(LAYERS, id.path) for id in layers)])

    def _count_no_more(self, layers: Iterable[LayerId], files: Iterable[PurePosixPath]) -> None:
        """Remembers what is given up, and takes back what was said of its safety."""
        digests: dict[str, str] = {}
        for path in files:
            with suppress(FileNotFoundError):
                digests[str(path)] = blake3(read_if_there(self.directory.root / path, self._env)).hexdigest()
        for id in layers:
            record = self.records_of(id.trace).get(id.description)
            if record is not None:
                digests[str(PurePosixPath(LAYERS, id.path))] = record.digest
        self.discarded.remember(digests)
        first = first_discarded(files)
        entries = [int(path.stem) for path in files if path.parts[0] == BRANCHES and is_number(path.stem)]
        with self._lock:
            self._catalog.apply(meta=self._remembered.discard(first, min(entries, default=None)))
        for timeline, t in first.items():
            self.safe_points.take_back(timeline, Epoch(t - 1))
        main = self.timelines.timeline(MAIN).id
        if main in first:
            self._inputs.take_back(Epoch(first[main] - 1))
        if self.listener is not None:
            self.listener.versions_discarded(
                self.discarded.digests, pack(min(first.values())) if first else END_OF_TIME
            )

    def check(self) -> list[NosyncError]:
        """Verifies every byte of every layer; what is bad goes to quarantine. Returns an error for each."""
        self.scan()
        return self.recheck(self.directory.layer_ids())

    # --- manifests, safe point, retention -------------------------------------------------------------------------

    def seal(
        self,
        t: int,
        ids: Sequence[LayerId],
        branch: str = MAIN,
        meta: dict[str, Any] | None = None,
        copies: Mapping[str, int] | None = None,
        contents: Mapping[LayerId, Content] | None = None,
    ) -> Manifest:
        """Writes the manifest of epoch `t` with these layers, which must exist. The same again is a success.

        `copies`: by stage, how many durable copies the safe point waits for (default: the number that the node was made
        with; 0: it does not wait).
        `contents`: what the writers of layers said of them; of the others the files are looked into.
        Raises OutOfOrderError unless `t` is the next one to be sealed or sealed already, DeterminismError when it was
        sealed with other layers.
        """
        self.check_place()
        manifest, new = self.sealer.seal(t, ids, branch, meta, copies, contents, lambda found: self._conflict(t, found))
        if new:
            self.small.note([manifest.path])
            self.safe_points.learned([manifest])
        if any(at.startswith((LOST_MANIFEST, LOST_END)) for at in self.problems):
            self._note_gaps()  # it may be one that was lost
        self.note(e.id for e in manifest.entries if not self.safe_points.is_durable(e))
        self._may_merge()
        return manifest

    def check_sealable(self, t: int, branch: str = MAIN) -> None:
        """See nosync.lsm.manifests.sealing.HasSealer; raises StorageError where the directory was moved away."""
        self.check_place()
        super().check_sealable(t, branch)

    def conflict(self, error: DeterminismError, branch: str = MAIN) -> None:
        """A layer of a sealed epoch was computed again with other rows: the safe point does not pass over it."""
        t = int(error.t) if error.t.isdecimal() else None
        manifest = None if t is None else self.timelines.manifest(t, branch)
        at = error.stage, error.shard
        ids = [e.id for e in manifest.entries if (e.id.trace.stage, str(e.id.trace.shard)) == at] if manifest else []
        if ids and t is not None:
            self._conflict(t, ids)

    def _conflict(self, t: int, ids: Sequence[LayerId]) -> None:
        with self._lock:
            self.problems[f"timestamp {t}"] = (
                f"{ids[0] if ids else t} was computed again with other rows than were sealed"
            )
        self.safe_points.conflict(ids)

    def make_durable_now(self) -> None:
        """Looks at what is on disk and makes it durable where that succeeds; what is torn goes to quarantine."""
        self.scan()
        self._drain()

    def fetch(self, lost: list[MissingLayer]) -> list[MissingLayer]:
        """All of these: where there are peers, the daemon that this node is part of fetches by itself."""
        return lost

    def lost(self, branch: str = MAIN) -> list[MissingLayer]:
        """The layers that manifests of the branch list and no file holds, by epoch."""
        self.scan()
        found = []
        until = releasable_until(self.timelines, self.safe_point())
        with self._lock:
            held = {trace: list(records) for trace, records in self._records.items()}
        for manifest in to_look_at(self.manifests(branch), until, lambda trace: held.get(trace, ())):
            with self._lock:
                waiting = self.new.waiting()
            found += [
                MissingLayer(e, manifest.t, manifest.timeline)
                for e in manifest.entries
                if not self.safe_points.is_durable(e) and e.id not in waiting and not is_released(manifest, e, until)
            ]
        return found

    def safe_point(self, branch: str = MAIN) -> Epoch | None:
        """The largest epoch up to which every manifest exists and every layer in it is durable; None if there is none.

        With peers: has as many copies as its stage asks for. Then it never goes back, a restart included: inputs may
        have been let go of. What peers lost since is filled again, and until then shown as what they are behind.
        """
        return self.safe_points.point(branch)

    def records_of(self, trace: TraceId) -> Mapping[Description, Record]:
        """The durable layers of a trace. To be looked at with the node's lock held."""
        return self._records.get(trace, {})

    def optional_stages(self) -> frozenset[str]:
        """The stages that no copies are asked for, in the newest epoch of the main timeline."""
        last = self.last_sealed()
        manifest = self.timelines.manifest(last) if last is not None else None
        entries = manifest.entries if manifest is not None else ()
        return frozenset(e.id.trace.stage for e in entries if not e.copies)

    def release_inputs(self) -> None:
        """Drops inputs that the safe point has passed, as their sources' policies say."""
        self._inputs.release()

    def archive_manifests(self) -> None:
        """Puts manifests of old, safe epochs together in one file, a group at a time, and removes what that stands for."""
        size = self.settings.archive_epochs
        if size is None:
            return
        try:
            self.check_place()
            for branch in list(self.timelines.refs.names):
                if len(self.timelines.manifests(branch).singles()) > size:
                    safe = self.safe_point(branch)
                    made = None if safe is None else self.timelines.archive(branch, safe - size, size)
                    if made is not None:
                        self.small.note_durable(made.path)
                        if self.listener is not None:
                            self.listener.held_files([made.path])
                        self._look_beside = True
            if self._look_beside:
                self._look_beside = not self._remove_archived()
            self.problems.pop(_ARCHIVES, None)
        except NosyncError as error:
            if self.problems.get(_ARCHIVES) != str(error):
                log.error("not archived: %s", error)
            self.problems[_ARCHIVES] = str(error)

    def _remove_archived(self) -> bool:
        """Removes manifests that an archive stands for. False: some archive is still to be made durable."""
        beside, errors = self.timelines.beside_archives()
        for error in errors:
            assert error.path is not None, "of a file that was listed"
            self._quarantine_file(error.path, "manifest", error)
        if not all(self.small.is_durable(archive.path) for archive in self.timelines.archives()):
            return False
        for path in beside:
            with storage_errors("remove", self.directory.root / path):
                self._env.unlink(self.directory.root / path)
        self.small.replaced(beside)
        if self.listener is not None and beside:
            self.listener.lost_files(beside)
        return True

    def since(self) -> Time:
        """The compaction frontier: reads as of this time and later are exact."""
        with self._lock:
            newest = self.timelines.newest()
            if self.settings.retain is None or not newest or not self._pins_known:
                return ZERO
            held = [min(newest) - self.settings.retain, *(pin.t for pin in self._pins.values())]
            return pack(max(0, min(held)))

    def pins(self) -> dict[str, Pin]:
        with self._lock:
            return dict(self._pins)

    def pin(self, pin: Pin) -> None:
        with self._lock:
            self._learn_pins(self._pin_files.publish(pin))

    def unpin(self, name: str) -> None:
        with self._lock:
            self._learn_pins(self._pin_files.delete(name))

    def _learn_pins(self, came: Sequence[PurePosixPath]) -> None:
        self.small.note(came)
        self._read_pins()
        self._compactor.touch()

    # --- what merging needs ---------------------------------------------------------------------------------------

    def durable_ids(self) -> set[LayerId]:
        with self._lock:
            return {record.id for records in self._records.values() for record in records.values()}

    def durable_traces(self) -> list[TraceId]:
        """The traces of which there are durable layers."""
        with self._lock:
            return [trace for trace, records in self._records.items() if records]

    def unknown(self, ids: Iterable[LayerId]) -> list[LayerId]:
        """Those that are not durable yet, and not about to be removed either."""
        with self._lock:
            new = [id for id in ids if id.description not in self._records.get(id.trace, {})]
        # What is forgotten is garbage before its record goes.
        return [id for id in new if not self._compactor.is_garbage(id)]

    def durable_records(self) -> list[Record]:
        """Every durable layer, with its digest and size."""
        with self._lock:
            return [record for records in self._records.values() for record in records.values()]

    def sealed_chains(self, trace: TraceId) -> list[Chain]:
        """The stretches of a trace that may be merged: durable, sealed, contiguous from where they begin.

        Unsealed layers are never merged: the manifest still has to name them by their digest.
        """
        with self._lock:
            available = list(self._records.get(trace, {}))
        origins, first = self.timelines.origins(trace), self.timelines.first_origin(trace)
        until, frontier = self.timelines.sealed_until(trace), self.since()
        # Rounds of a loop are about to be dropped: the layer of their epoch stands for all of them.
        sealed = [d for d in available if d.upper <= until and not d.is_of_rounds]
        is_input = trace.stage in policies(self.timelines.manifest(self.last_sealed() or 0))
        chains = []
        for i, origin in enumerate(origins):
            end = origins[i + 1] if i + 1 < len(origins) else END_OF_TIME
            within = sorted(d for d in sealed if origin <= d.lower and d.upper <= end)
            begin = max(origin, within[0].lower) if is_input and within else origin  # what came before was released
            reached = begin
            for d in within:
                if d.lower <= reached < d.upper:
                    reached = d.upper
            cover = choose_cover(trace, within, reached, END_OF_TIME, begin) if reached > begin else []
            # Where another layout, or another timeline, came first, older values of these keys lie in its layers.
            bottom = origin == first
            left_at = self.timelines.left_at(trace, origin, reached)
            since = frontier if left_at is None else min(frontier, pack(epoch_of(Time(left_at - 1))))
            ids = [LayerId(trace, d) for d in cover]
            torn = overlaps(ids)
            # What begins inside the layer before is not merged with it.
            starts = [0, *(n for n, id in enumerate(ids) if id in torn), len(ids)]
            for low, high in itertools.pairwise(starts):
                chains.append(Chain(ids[low:high], bottom and low == 0, since))
        return chains

    def replace(self, merged: Record, inputs: Mapping[LayerId, Digest]) -> bool:
        """One version edit: the merged layer, whose file is durable, stands for its inputs from now on. False: it is
        gone, or what was merged was let go of, or given up, meanwhile; then it goes as well.

        A scan that saw its file before this may take it for obsolete: a layer that is rewritten alone, because `since`
        moved on, covers what the merged one covers.
        """
        self.new.sync_directories([merged])
        with self._lock:
            self._compactor.keep([merged.id])
            if not self.sealer.exists(merged.id):
                return False
            there = self._records.get(merged.id.trace, {})
            already = there.get(merged.id.description)  # a peer that merged the same may have sent it
            if already is None or already.digest != merged.digest:
                found = {id: there.get(id.description) for id in inputs}
                if any(record is None or record.digest != inputs[id] for id, record in found.items()):
                    self._compactor.discard([merged.id], grace=False)
                    return False
            left = [id for id in inputs if id.description in there]
            self._edit([merged], left)
            self._tell([merged], left)
        self._may_merge([merged.id.trace])
        return True

    def recheck(self, ids: Sequence[LayerId]) -> list[NosyncError]:
        """Verifies every byte of these layers, and that they are what sealed epochs list; what is bad goes to
        quarantine.

        Returns an error for each.
        """
        errors: list[NosyncError] = []
        for id in ids:
            try:
                reader = LayerReader.open(self.directory.path_of(id), self._env, id)
                reader.verify()
                self.sealer.check_listed(id, reader.digest)
            except FileNotFoundError:
                continue
            except CorruptionError as error:
                self._quarantine(id, error)
                errors.append(error)
        return errors

    def merge_once(self) -> bool:
        """Does the next merge that the policy asks for. False: there is none to do, or no directory to do it in."""
        try:
            self.check_place()
        except StorageError:  # which is among the problems
            return False
        return self._compactor.merge_once(self._background.is_closing)

    def make_files_ahead(self) -> None:
        """See nosync.lsm.platform.file_pool."""
        self.check_place()
        self._ready_files.fill()

    def collect_garbage(self) -> None:
        self.check_place()
        self._compactor.collect_garbage()

    def compact(self, stage: str | None = None) -> Iterator[int]:
        """Merges each trace into one layer and removes what that replaced. Yields the number of merges done so far."""
        self.sync()
        done = 0
        while self._compactor.merge_once(self._background.is_closing, whole=True, stage=stage):
            done += 1
            yield done
        self._compactor.collect_garbage(all=True)

    def drop_rounds(self, stage: str, t: int, *, at_once: bool = False) -> None:
        """Forgets and deletes a stage's layers of single rounds inside epoch `t`.

        `at_once`: the rounds are about to run again. Those that wait for their grace to end would be taken for this
        run's, and vanish in the middle of it.
        """
        for trace in self.directory.traces(stage):
            inside = [d for d in self.directory.descriptions(trace) if pack(t) <= d.lower and d.upper <= end_of(t)]
            self.forget([LayerId(trace, d) for d in inside if d.is_of_rounds], grace=not at_once)
        if at_once:
            self._compactor.collect_garbage()

    # --- branches -----------------------------------------------------------------------------------------------------

    def create_branch(self, name: str, parent: str, at: int, changed: Iterable[str], anew: Iterable[str] = ()) -> None:
        """A branch of `parent` at a sealed epoch. Durable when this returns."""
        self._check_kept(at)
        self.timelines.create(name, parent, at, changed, anew)
        self._tell_log()

    def rewind(self, t: int, keep_as: str | None) -> None:
        """Lets `main` be a new timeline that begins at a sealed epoch; the old timeline is kept as a branch, or
        dropped.
        """
        self._check_kept(t)
        self.timelines.rewind(t, keep_as)
        self._main_changed()

    def release_first_attempt(self) -> None:
        """Forgets all layers of a store that has no sealed epochs, so that its first one can be given other rows.

        Raises LostEpochError where it had some, and their manifests are lost.
        """
        check_there(self.timelines, MAIN, None)
        with self._compactor.paused():
            self.forget(self.directory.layer_ids(), grace=False)
        self._compactor.collect_garbage()

    def _check_kept(self, t: int) -> None:
        merged = max((id.description.since for id in self.durable_ids()), default=ZERO)
        since = max(self.since(), merged)  # a branch moves the frontier back, and brings nothing back
        if pack(t) < since:
            raise CompactedError(
                f"the history before {epoch_of(since)} was merged away, and {t} lies before it: nothing can begin there"
            )

    def _tell_log(self) -> None:
        entry = PurePosixPath(BRANCHES, f"{self.timelines.refs.entries}.json")
        self.small.note_durable(entry)
        self._remember([entry])
        self._may_merge()
        if self.listener is not None:
            self.listener.held_files([entry])

    def delete_branch(self, name: str) -> int:
        """Deletes a branch with what nothing else needs: its own manifests, and layers that only they list. Returns the
        number of layers.
        """
        self.timelines.delete(name)
        self._tell_log()
        return self._prune()

    def promote(self, name: str, keep_as: str | None) -> None:
        """Lets `main` be the timeline of a branch; the old timeline is kept as another branch, or dropped."""
        self.timelines.promote(name, keep_as)
        self._main_changed()

    def _main_changed(self) -> None:
        self._tell_log()
        with self._lock:
            self.safe_points.something_changed()
        self._prune()

    def _prune(self) -> int:
        dropped: list[LayerId] = []
        with self._compactor.paused():
            for trace, until in self.timelines.prune().items():
                dropped += [LayerId(trace, d) for d in self.directory.descriptions(trace) if d.lower >= until]
            # No branch reads them, and the next epochs may have layers of these names.
            self.forget(dropped, grace=False)
        self._compactor.collect_garbage()
        self.small.note(self.small.listed())  # what is left of an archive has files of its own again
        self._tell_gone_files()
        return len(dropped)

    def _tell_gone_files(self) -> None:
        with self._telling_gone:
            gone = self.small.forget_gone()
            if self.listener is not None:
                self.listener.dropped_files(gone)

    def forget(self, ids: Sequence[LayerId], *, grace: bool = True) -> None:
        """Layers that nothing lists any more: out of the catalog now, off the disk a grace period later."""
        self.check_place()
        # Before the catalog forgets them, or a scan would take them for new ones.
        self._compactor.discard(ids, grace=grace)
        with self._lock:
            known = [id for id in ids if id.description in self._records.get(id.trace, {})]
            self._catalog.apply(remove=known)
            for id in ids:
                self._records.get(id.trace, {}).pop(id.description, None)
                self.new.settled(id)
            self._forgotten.update(ids)
        self._tell((), ids, dropped=True)

    # --- the end ----------------------------------------------------------------------------------------------------

    def _idle_at_most_s(self, idle_s: float) -> float:
        # Nothing here wakes when peers have their copies.
        return min(idle_s, _LOOK_FOR_SAFE_S) if self.is_replicated and self._inputs.wait() else idle_s

    def abandon(self) -> None:
        """Gives the directory back without making anything durable: what the death of the process does."""
        try:
            self._stop()
        finally:
            self._give_back()

    def _stop(self) -> None:
        self._background.stop()
        self._compactor.close()

    def _give_back(self) -> None:
        """The directory is free for the next one, also where a full disk keeps the catalog from closing."""
        try:
            self._catalog.close()
        finally:
            self._directory_lock.release()

    def close(self) -> None:
        """Makes everything published durable and gives the directory back. Raises StorageError if something is not
        durable.
        """
        try:
            self._stop()
            self.sync()
            self._compactor.collect_garbage(all=True)
        except BaseException:
            with suppress(NosyncError):  # what comes second says less
                self._give_back()
            raise
        self._give_back()
