"""The node-local store: the Spark-free surface of nosync.

    with nosync.open("state/", retain=1000) as store:
        store.append("counts", shard=0, t=7, rows=table, key=["word"], deletes=keys)
        store.seal(7)
        store.read("counts", as_of=7)

Reading goes to the files only, so a store opened with `read_only=True` (any number of them, beside the one
writer) reads the same way. Timestamps here are epochs; loops inside an epoch are the dataflow's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

import pyarrow as pa

from nosync.lsm.columnar.columns import unify_schemas
from nosync.lsm.errors import InvalidInputError, NosyncError, NotAvailableError, StorageError
from nosync.lsm.facts.pins import Pin, Pins, check_pinnable
from nosync.lsm.facts.seal_times import SealTimes
from nosync.lsm.layers.writer import Published, arrange
from nosync.lsm.manifests.branches import MAIN, name_of_kept, not_as_far
from nosync.lsm.manifests.catalog import recorded_layers
from nosync.lsm.manifests.completeness import MissingLayer
from nosync.lsm.manifests.manifest import Manifest, digest_listed
from nosync.lsm.manifests.remembered import Remembered
from nosync.lsm.model.layer import Description, LayerId, check_name
from nosync.lsm.model.timestamp import ZERO, Epoch, epoch_of, pack
from nosync.lsm.node.api import StoreBackend
from nosync.lsm.node.remote_status import read_remote_status
from nosync.lsm.node.remotes import push_all
from nosync.lsm.node.safe_point import safe_point_on_disk
from nosync.lsm.settings import StoreSettings
from nosync.lsm.status import BranchInfo, LayerStatus, RemoteStatus, StoreStatus
from nosync.lsm.store import inspection
from nosync.lsm.store.appended import BOOKKEEPING, Appended, check_given, key_to_record
from nosync.lsm.store.direct import raw_trace
from nosync.lsm.store.opened import note_closed
from nosync.lsm.store.reading import BEFORE_FIRST_EPOCH, StoreReader
from nosync.lsm.store.timelines_view import EndChecks, TimelinesView
from nosync.lsm.store.verify import VerifyReport, verify_directory
from nosync.lsm.trace.directory import LayerDirectory


class Store(StoreReader):
    """An open store; made by `nosync.open`. Use as a context manager, or call `close`."""

    def __init__(
        self,
        directory: LayerDirectory,
        settings: StoreSettings,
        node: StoreBackend | None,
        ends: EndChecks | None = None,
    ) -> None:
        """`node`: None where it is read only. `ends`: says whether the ends of logs are there (default: files do)."""
        view = TimelinesView(directory, node, ends or EndChecks(directory))
        super().__init__(directory, view, None if node is None else node.times)
        self.settings, self._node = settings, node
        self._appended = Appended(directory)
        self._pins = Pins(directory.root, directory.env)  # of a read-only store
        self._closed = False
        self._parent: int | None = None  # of a forked process: the one that has the store

    # --- writing --------------------------------------------------------------------------------------------------

    @property
    def node(self) -> StoreBackend:
        """Returns the node behind this store. Raises StorageError where it was opened read-only or is closed."""
        if self._closed:
            raise StorageError(f"the store {self.directory.root} is closed")
        if self._parent is not None:
            raise StorageError(
                f"the store {self.directory.root} is open in process {self._parent}, of which this one is a fork: here it can "
                "only be read. Write there, or close it there and write in a process that is spawned, not forked"
            )
        if self._node is None:
            raise StorageError(f"the store {self.directory.root} was opened read_only=True: open it for writing")
        return self._node

    def append(
        self,
        stage: str,
        *,
        t: int,
        shard: int = 0,
        rows: pa.Table | None = None,
        key: Sequence[str] | None = None,
        deletes: pa.Table | None = None,
    ) -> Published:
        """Records what changed in one shard of a stage at epoch `t`, as one immutable layer.

        `rows` are upserts (each key once; key columns and any value columns), `deletes` the keys that went (key
        columns). Empty tables record that nothing changed. `key` is needed the first time; `[]` makes a log, whose rows
        are only ever added. A key must always go to the same shard. Returns when the layer is visible to readers; it is
        durable shortly after (`sync` waits for that).

        Raises OutOfOrderError unless `t` is the next epoch of this trace (the same layer again is a success),
        DeterminismError when `t` was recorded with other rows, SchemaError, InvalidInputError, StorageError.
        """
        node, timelines = self.node, self._timelines()
        timeline = timelines.timeline().id
        check_name(stage, "stage name")
        id = LayerId(raw_trace(timelines, stage, shard, t), Description.of_epoch(t))
        whose = f"stage {stage} shard {shard} timestamp {t}"
        known = self._appended.shape(timelines, stage)
        check_given(rows, whose)
        if known is None and key:  # of a log they may have been released
            self._appended.check_not_lost(timelines, id, whose)
        key = key_to_record(key, known, whose)
        if rows is None and deletes is not None and known is not None:
            rows = known[1].empty_table()
        self._appended.check_order(timelines, id, whose)
        arranged = arrange(rows, key, whose=whose, deletes=deletes, hasher=self.directory.hasher)
        schema = pa.schema([f for f in arranged.batch.schema if f.name not in BOOKKEEPING])
        if known is not None:
            schema = unify_schemas(known[1], schema, whose)
        published = self.directory.publish(id, arranged, digest_listed(timelines.manifest(t), id))
        self._appended.published(timeline, id, (key, schema))
        node.note([id])
        return published

    def seal(self, t: int, *, fill_missing: bool = False) -> Manifest:
        """Declares epoch `t` complete: every stage and shard known so far has recorded its layer at `t`.

        `fill_missing` records empty layers for those that have not. Sealing the same again is a success.
        With peers the epoch is safe once it is on as many nodes as their daemons keep it on (`replicas`).
        Raises NotAvailableError naming what is missing, OutOfOrderError unless `t` is the next one to be sealed.
        """
        pack(t)
        self.node.check_sealable(t)
        ids, absent = self._appended.layers_at(self._timelines(), t)
        if absent and not fill_missing:
            raise NotAvailableError(
                f"cannot seal {t}: {', '.join(f'{id.trace}' for id in absent[:5])} recorded nothing at {t}; "
                "append an empty layer for each, or seal with fill_missing=True"
            )
        if not ids and not absent:
            raise NotAvailableError(f"cannot seal {t}: nothing was recorded yet")
        for id in absent:
            schema = self._appended.schema_of_known(self._timelines(), id)
            self.append(id.trace.stage, shard=id.trace.shard.index, t=t, rows=schema.empty_table())
        return self.node.seal(t, [*ids, *absent])

    # --- timelines ----------------------------------------------------------------------------------------------------

    def delete_branch(self, name: str) -> int:
        """Deletes a branch with the layers that nothing else needs. Returns how many those are."""
        return self.node.delete_branch(name)

    def rewind(self, t: int, keep_as: str | None = None) -> str | None:
        """Lets the main timeline go on from epoch `t`; what it had after that is kept as a branch, whose name is
        returned.

        `keep_as`: that branch's name (default `before-rewind-<n>`); `""` drops it. Where `t` is the last sealed epoch,
        there is nothing to keep: what was recorded of later ones, which failed, is released, so that they can be given
        other rows. Where no epoch is sealed yet that is -1. Raises InvalidInputError for a `t` that is not between
        `since` and the last epoch.
        """
        last = self.last_sealed()
        if last is None and t == BEFORE_FIRST_EPOCH:
            self._times.check_none(self._timelines(), MAIN)
            self.node.release_first_attempt()
            self._appended = Appended(self.directory)  # the next attempt may have other columns
            return None
        pack(t)
        if last is None or not self.since() <= t <= last:
            possible = "there are no epochs yet" if last is None else f"possible are {self.since()} to {last}"
            raise InvalidInputError(f"cannot rewind to {t}: {possible}")
        kept = name_of_kept(self.node.timelines.refs, "rewind", keep_as) if t < last or keep_as is not None else None
        self.node.rewind(t, kept)
        return kept

    def promote(self, branch: str, keep_as: str | None = None) -> str | None:
        """Lets the main timeline be that of a branch; what main was is kept as a branch, whose name is returned.

        `keep_as`: that branch's name (default `before-promote-<n>`); `""` drops it. A job must be started again, with the
        branch's code; its sinks take back what they were given after the fork. Raises InvalidInputError for a branch that
        has not come as far as main: its job's replay() comes first.
        """
        timelines = self.node.timelines
        timelines.timeline(branch)
        mine, theirs = self.last_sealed(), self.last_sealed(branch)
        if branch != MAIN and mine is not None and (theirs is None or theirs < mine):
            raise InvalidInputError(not_as_far(timelines.refs, branch, theirs, mine))
        kept = name_of_kept(timelines.refs, "promote", keep_as)
        self.node.promote(branch, kept)
        return kept

    def describe_branch(self, name: str) -> BranchInfo:
        """Returns where a branch comes from, and what of it is shared with others and what is its own."""
        return inspection.describe_branch(self.directory, self._timelines(), name)

    def last_sealed(self, branch: str = MAIN) -> int | None:
        return self._timelines().last_sealed(branch)

    @property
    def source_path(self) -> str:
        """Returns what other programs open to read this store: its directory, or the address of its daemon."""
        return str(self.directory.root)

    # --- state of the store -------------------------------------------------------------------------------------------

    def safe_point(self, branch: str = MAIN) -> int | None:
        """Returns the largest epoch up to which everything is complete and durable, with peers on as many nodes as it
        asks for.

        None before the first.
        """
        return self.node.safe_point(branch)

    def since(self) -> int:
        """Returns the oldest epoch whose state is sure to be readable; `retain=` and pins decide."""
        merged = max((id.description.since for id in self.directory.layer_ids()), default=ZERO)
        return epoch_of(max(merged, self._node.since()) if self._node else merged)

    def missing(self) -> list[MissingLayer]:
        """Returns the layers that manifests list and that are lost."""
        return self.node.missing()

    def sync(self) -> None:
        """Returns when everything published so far is durable on this node. Raises StorageError if that cannot be had.

        Peers are not waited for: `safe_point` says up to which epoch there are as many copies as are asked for.
        """
        self.node.sync()

    def sync_remote(self, timeout_s: float = 60.0) -> None:
        """Returns when everything that is durable on this node is in the object stores of `remote=`. No job needs this:
        copies are made in the background. Raises RemoteError where there are none, or it takes longer.
        """
        self.node.sync()
        push_all(list(self.node.remotes), self.directory.root, timeout_s)

    def pin(self, name: str, t: int) -> None:
        """Keeps the state as of `t` readable until `unpin`, whatever `retain` says (a savepoint, in Flink's words).

        Raises InvalidInputError where `t` is below `since` or not sealed.
        """
        check_name(name, "pin name")
        check_pinnable(t, max(self.since(), self._timelines().manifests().first or 0), self.last_sealed())
        self.node.pin(Pin(Epoch(t), name))

    def unpin(self, name: str) -> None:
        if name not in self.pins():
            raise InvalidInputError(f"no pin {name!r}; pins: {', '.join(sorted(self.pins())) or 'none'}")
        self.node.unpin(name)

    def pins(self) -> dict[str, int]:
        pins = self._node.pins() if self._node else self._pins.by_name()
        return {name: pin.t for name, pin in sorted(pins.items())}

    def compact(self, stage: str | None = None, progress: Callable[[int], None] | None = None) -> int:
        """Merges every trace (of one stage, or of all) into a single layer now. Returns the number of merges."""
        if stage is not None:
            self.directory.check_stage(stage)
        done = 0
        for done in self.node.compact(stage):
            if progress:
                progress(done)
        return done

    def verify(self, progress: Callable[[int, int], None] | None = None, *, untrusted: bool = False) -> VerifyReport:
        """Reads and checks every byte of every file; changes nothing.

        `untrusted`: it is a store of somebody else. Its catalog, which RocksDB would read, is left alone, so what is
        missing at the end of a log is not noticed.
        """
        report = verify_directory(self.directory, progress, {} if untrusted else None)
        node, safe = self._node, (lambda: None) if untrusted else self._safe_point_now
        remembered = Remembered() if untrusted else None if node is None else node.timelines.remembered.copy()
        return replace(report, errors=(*report.errors, *inspection.holes(self.directory, remembered, safe)))

    def stages(self) -> list[str]:
        return self.directory.stages()

    def layers(self) -> list[LayerStatus]:
        """Returns every layer file, by stage, shard and time; not those that a durable merged layer has replaced."""
        node = self._node
        durable = {r.id for r in recorded_layers(self.directory.root)} if node is None else node.durable_ids()
        return inspection.layers(self.directory, durable)

    def branches_of(self, layers: Sequence[LayerStatus]) -> list[tuple[str, ...]]:
        """Returns for each of these layers the branches whose epochs it holds; none for what no sealed epoch lists."""
        return inspection.branches_of(self.directory, self._timelines(), layers)

    def status(self) -> StoreStatus:
        node, layers, safe = self._node, self.layers(), self._safe_point_now()
        problems, missing = {}, None
        try:
            missing = len(self.missing() if node else inspection.lost_on(MAIN, self.directory, self._timelines(), safe))
        except NosyncError as error:
            problems["what is missing"] = f"cannot be said: {error}"
        timelines = self._timelines()
        problems |= node.problems if node else inspection.lost_manifests_of(timelines, safe)
        return StoreStatus(
            str(self.directory.root), self.directory.key_groups, safe, self.last_sealed(), self.since(),
            inspection.stages(layers, timelines), inspection.known_pins(self.pins, problems), missing, problems,
            {name: self.last_sealed(name) for name in sorted(timelines.refs.names)},
            inspection.sealed_at(self.directory, timelines, self._times),
            inspection.branches_sealed_at(timelines, self._times), inspection.recorded_time(timelines, self._times, safe),
            remotes=self._remotes_now(), lazy_layers=sum(layer.level == "remote" for layer in layers),
            lazy_bytes=sum(layer.bytes for layer in layers if layer.level == "remote"),
        )  # fmt: skip

    def _remotes_now(self) -> tuple[RemoteStatus, ...]:
        """Returns how far copies in object stores are, as the process that makes them says or said last."""
        mine = tuple(copies.status() for copies in self._node.remotes) if self._node else ()
        return mine or read_remote_status(self.directory.root, self.directory.env)

    def _safe_point_now(self) -> int | None:
        """Returns the safe point; that of a read-only store from the catalog as it is on disk now."""
        return self.safe_point() if self._node else safe_point_on_disk(self._timelines(), self.directory.root)

    # --- end ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Makes what was published durable and gives the directory back. Closing twice is fine."""
        if not self._closed:
            self._closed = True
            if self._node is not None:
                note_closed(self._node)
                self._node.close()

    def only_read(self, parent: int) -> None:
        """Makes this a copy in a process that was forked from the one that has the store: closing it leaves the store
        open there.
        """
        self._parent, self._node = parent, None
        self._view.leave_node()
        # The parent's may be locked.
        self._times = self._times.read_anew(SealTimes(self.directory.root, self.directory.env))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open" if self._node else "read-only"
        return f"<nosync.Store {self.directory.root} ({state})>"
