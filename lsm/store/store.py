"""The node-local store: the Spark-free surface of nosync.

    with nosync.open("state/", retain=1000) as store:
        store.append("counts", shard=0, t=7, rows=table, key=["word"], deletes=keys)
        store.seal(7)
        store.read("counts", as_of=7)

Reading goes to the files only, so a store opened with `read_only=True` (any number of them, beside the one
writer) reads the same way. Timestamps here are epochs; loops inside an epoch are the dataflow's business.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nosync.lsm.columnar.columns import (
    CHANGE_TYPE_COLUMN,
    EPOCH_COLUMN,
    HASH_COLUMN,
    INTERNAL_PREFIX,
    TOMBSTONE_COLUMN,
    Bools,
    describe,
    joined_schema,
    key_columns,
    keys_equal,
    plain,
    unify_schemas,
)
from nosync.lsm.columnar.hashing import Hasher, hash32
from nosync.lsm.columnar.table_diff import compare
from nosync.lsm.errors import (
    CatalogError,
    CorruptionError,
    InvalidInputError,
    NosyncError,
    NotAvailableError,
    OutOfOrderError,
    SchemaError,
    StorageError,
    StoreLockedError,
    UnknownStageError,
)
from nosync.lsm.facts.pins import Pin, Pins
from nosync.lsm.layers.merging import RowFilter
from nosync.lsm.layers.writer import Published, arrange
from nosync.lsm.manifests.archive import Run
from nosync.lsm.manifests.branches import MAIN, Timeline
from nosync.lsm.manifests.catalog import Catalog
from nosync.lsm.manifests.completeness import MissingLayer, is_whole, lost, safe_from
from nosync.lsm.manifests.input_policy import NOTHING
from nosync.lsm.manifests.lost_ends import check_log, check_there, log_problem, lost_begin, lost_manifests
from nosync.lsm.manifests.manifest import Manifest
from nosync.lsm.manifests.remembered import SAFE_META, Remembered, recalled
from nosync.lsm.manifests.timelines import Timelines
from nosync.lsm.model.history import View
from nosync.lsm.model.layer import Description, LayerId, TraceId, check_name
from nosync.lsm.model.timestamp import ZERO, Epoch, Time, end_of, epoch_of, last_of, pack
from nosync.lsm.node.api import StoreBackend
from nosync.lsm.node.node import Node
from nosync.lsm.platform.env import Env, storage_errors
from nosync.lsm.platform.nearest import did_you_mean
from nosync.lsm.platform.paths import local_path
from nosync.lsm.settings import StoreSettings
from nosync.lsm.status import BranchInfo, LayerStatus, StoreStatus, shown, status_of, status_of_bad
from nosync.lsm.store.direct import raw_begin, raw_layers, raw_trace, raw_traces_at
from nosync.lsm.store.opened import close_lost, note_closed, note_opened
from nosync.lsm.store.stage_views import stage_views
from nosync.lsm.store.verify import VerifyReport, verify_directory
from nosync.lsm.trace.directory import (
    CATALOG,
    DEFAULT_KEY_GROUPS,
    MARKER,
    LayerDirectory,
    Marker,
    create_store,
    read_marker,
)
from nosync.lsm.trace.trace import Trace, lost_tail

BEFORE_FIRST_EPOCH = -1
BOOKKEEPING = frozenset({HASH_COLUMN, TOMBSTONE_COLUMN})
"""Columns of a layer that its stage does not have."""


def open_store(
    path: str | Path,
    *,
    retain: int | None = None,
    key_groups: int | None = None,
    read_only: bool = False,
    settings: StoreSettings | None = None,
    env: Env | None = None,
    hasher: Hasher = hash32,
    copies: int = 1,
) -> Store:
    """Opens the store in a directory, making a new one where there is none.

    `retain`: epochs of history to keep readable (None: all). `key_groups` (default 128): the most shards a stage can
    ever have; fixed when the store is made. `read_only`: no node, no lock, no writing; works beside the writer.
    `copies`: how many an epoch asks for of each stage of which nothing is said. Raises NotAStoreError for a directory
    of something else, StoreLockedError where another process is its node, FormatVersionError for a newer store,
    StorageError where the disk refuses.
    """
    root, env = local_path(path), env or Env()
    settings = checked_settings(settings)
    if read_only and retain is not None:
        raise InvalidInputError(
            "retain= is for who writes the store: what is read only is kept as long as its writer says"
        )
    if retain is not None:
        settings = replace(settings, retain=retain)
    with storage_errors("open", root):
        is_new = not (root / MARKER).exists() and not root.is_file()
    if not read_only and is_new:
        create_store(root, DEFAULT_KEY_GROUPS if key_groups is None else key_groups, env)
    marker = checked_marker(root, env, key_groups)
    directory = LayerDirectory(root, marker.key_groups, env, hasher)
    if read_only:
        return Store(directory, settings, None)
    return note_opened(Store(directory, settings, _node(directory, marker, settings, copies)))


def checked_settings(settings: StoreSettings | None) -> StoreSettings:
    """Raises InvalidInputError for what are no settings."""
    settings = settings or StoreSettings()
    if not isinstance(settings, StoreSettings):
        raise InvalidInputError(f"settings is {settings!r}, expected nosync.StoreSettings(...)")
    return settings


def checked_marker(root: Path, env: Env, key_groups: int | None) -> Marker:
    """The marker of a store that is there. Raises InvalidInputError where other key groups are given than it has."""
    marker = read_marker(root, env)
    if key_groups is not None and key_groups != marker.key_groups:
        raise InvalidInputError(
            f"{root} was made with key_groups={marker.key_groups}, which never changes; {key_groups} was given"
        )
    return marker


def _node(directory: LayerDirectory, marker: Marker, settings: StoreSettings, copies: int) -> Node:
    try:
        return Node(directory, marker, settings, copies=copies)
    except StoreLockedError:
        if not close_lost(directory.root):
            raise
    return Node(directory, marker, settings, copies=copies)


class Store:
    """An open store; made by `nosync.open`. Use as a context manager, or call `close`."""

    def __init__(self, directory: LayerDirectory, settings: StoreSettings, node: StoreBackend | None) -> None:
        self.directory = directory
        self.settings = settings
        self._node = node
        self._next: dict[TraceId, int] = {}
        self._schemas: dict[tuple[str, str], tuple[tuple[str, ...], pa.Schema]] = {}  # by timeline and stage
        self._seen: Timelines | None = None  # of a read-only store; read once, and then what is new
        self._pins = Pins(directory.root, directory.env)  # of a read-only store
        self._held = False  # what is new is left for later
        self._closed = False
        self._parent: int | None = None  # of a forked process: the one that has the store

    # --- writing --------------------------------------------------------------------------------------------------

    @property
    def node(self) -> StoreBackend:
        """The node behind this store. Raises StorageError where it was opened read-only or is closed."""
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
        at = timelines.timeline().id, check_name(stage, "stage name")
        trace = raw_trace(timelines, stage, shard, t)
        id = LayerId(trace, Description.of_epoch(t))
        whose = f"stage {stage} shard {shard} timestamp {t}"
        if key is not None and len(set(key)) != len(list(key)):
            raise InvalidInputError(f"{whose}: the key {list(key)} names a column twice")
        known = self._recorded_schema(timelines, stage)
        if key is None:
            if known is None:
                raise InvalidInputError(
                    f"{whose}: the first append of a stage needs key=[...] (an empty list for a log)"
                )
            key = known[0]
        if isinstance(key, str):
            raise InvalidInputError(f"{whose}: key is {key!r}, expected a list of column names: [{key!r}]")
        if known is not None and tuple(key) != known[0]:
            raise SchemaError(f"{whose}: the key is {list(key)}, but the stage was recorded with key {list(known[0])}")
        if rows is None and deletes is not None and known is not None:
            rows = known[1].empty_table()
        self._check_order(timelines, id, whose)
        arranged = arrange(rows, key, whose=whose, deletes=deletes, hasher=self.directory.hasher)
        schema = pa.schema([f for f in arranged.batch.schema if f.name not in BOOKKEEPING])
        if known is not None:
            schema = unify_schemas(known[1], schema, whose)
        published = self.directory.publish(id, arranged)
        self._schemas[at] = (tuple(key), schema)
        self._next[trace] = max(t + 1, self._next.get(trace, 0))
        node.note([id])
        return published

    def _check_order(self, timelines: Timelines, id: LayerId, whose: str) -> None:
        t = epoch_of(id.description.lower)
        if self._next.get(id.trace) != t:
            available = self.directory.descriptions(id.trace)
            begin = raw_begin(timelines, id.trace)
            self._next[id.trace] = max((epoch_of(d.upper) for d in available), default=t if begin is None else begin)
            if any(d.lower <= id.description.lower < d.upper and d != id.description for d in available):
                raise OutOfOrderError(
                    f"{whose}: already recorded, and merged since; the next timestamp is {self._next[id.trace]}"
                )
            listed = self.node.origin(id.trace)  # its first layer may be lost, and is given again
            begins = [*(epoch_of(d.lower) for d in available), *([] if listed is None else [epoch_of(listed)])]
            first = min(begins, default=begin)
            if first is not None and t < first:
                raise OutOfOrderError(
                    f"{whose}: this trace begins with timestamp {first}, and is only ever gone on with; the next one is "
                    f"{self._next[id.trace]}"
                )
        expected = self._next[id.trace]
        if t > expected:
            raise OutOfOrderError(
                f"{whose}: the next timestamp of this trace is {expected}; record it first (empty rows if nothing changed)"
            )
        sealed = timelines.manifest(t)
        if sealed is not None and all(entry.id != id for entry in sealed.entries):
            raise OutOfOrderError(
                f"{whose}: timestamp {t} is sealed without this layer; sealed timestamps never change"
            )

    def _recorded_schema(self, timelines: Timelines, stage: str) -> tuple[tuple[str, ...], pa.Schema] | None:
        """The key and the columns of a stage that is appended to, on the main timeline; None for a new one."""
        at = (timelines.timeline().id, stage)
        if at not in self._schemas:
            for id, end in raw_layers(timelines, self.directory, stage):
                reader = self.directory.reader(id)
                before, schema = self._schemas.get(at), reader.schema_until(end)
                schema = schema if before is None else joined_schema(before[1], schema, str(id.trace))
                self._schemas[at] = (reader.info.key, schema)
        return self._schemas.get(at)

    def seal(self, t: int, *, fill_missing: bool = False) -> Manifest:
        """Declares epoch `t` complete: every stage and shard known so far has recorded its layer at `t`.

        `fill_missing` records empty layers for those that have not. Sealing the same again is a success.
        With peers the epoch is safe once it is on as many nodes as their daemons keep it on (`replicas`).
        Raises NotAvailableError naming what is missing, OutOfOrderError unless `t` is the next one to be sealed.
        """
        pack(t)
        self.node.check_sealable(t)
        ids: list[LayerId] = []
        absent: list[LayerId] = []
        for trace in raw_traces_at(self._timelines(), self.directory, t):
            id = LayerId(trace, Description.of_epoch(t))
            available = self.directory.descriptions(trace)
            if available and min(d.lower for d in available) > id.description.lower:
                continue  # the trace begins later
            covered = any(d.lower <= id.description.lower < d.upper for d in available)
            (ids if covered else absent).append(id)
        if absent and not fill_missing:
            raise NotAvailableError(
                f"cannot seal {t}: {', '.join(f'{id.trace}' for id in absent[:5])} recorded nothing at {t}; "
                "append an empty layer for each, or seal with fill_missing=True"
            )
        if not ids and not absent:
            raise NotAvailableError(f"cannot seal {t}: nothing was recorded yet")
        for id in absent:
            known = self._recorded_schema(self._timelines(), id.trace.stage)
            assert known is not None, "the trace, or the one that it goes on from, has layers"
            self.append(id.trace.stage, shard=id.trace.shard.index, t=t, rows=known[1].empty_table())
        return self.node.seal(t, [*ids, *absent])

    # --- reading --------------------------------------------------------------------------------------------------

    def read(
        self,
        stage: str,
        as_of: int | None = None,
        *,
        shard: int | None = None,
        columns: Sequence[str] | None = None,
        prefix: Mapping[str, Any] | None = None,
        branch: str = MAIN,
    ) -> pa.Table:
        """The state of a stage as of epoch `as_of` (default: the last sealed one): one row per live key.

        Rows come shard by shard in stored order. `columns` selects columns; `prefix` gives values of the first key
        columns. Before the stage's first epoch the state is empty. Raises UnknownStageError, NotAvailableError
        (not recorded yet), CompactedError (below `since`), HoleError, CorruptionError.
        """
        as_of = self._as_of(as_of, branch)
        traces = [self._trace(view, as_of) for view in self._views(stage, as_of, shard, branch)]
        keep = _prefix_filter(prefix, traces[0], stage) if prefix else None
        return self._table(stage, traces, lambda trace: trace.scan(last_of(as_of), keep), columns)

    def lookup(
        self,
        stage: str,
        keys: pa.Table,
        as_of: int | None = None,
        *,
        columns: Sequence[str] | None = None,
        branch: str = MAIN,
    ) -> pa.Table:
        """The rows of the given keys as of `as_of`, in the order of `keys`; keys without a row are left out."""
        as_of = self._as_of(as_of, branch)
        traces = [self._trace(view, as_of) for view in self._views(stage, as_of, None, branch)]
        key = next((trace.key for trace in traces if trace.key), None)
        if key is None:
            raise InvalidInputError(f"stage {stage} is a log: it has no key to look up; use read() or changes()")
        whose = f"lookup in stage {stage}"
        keys = plain(keys)
        key_columns(keys, key, whose)
        schema = self._unified(stage, traces)
        wanted = []
        for name in key:
            column = keys.column(name).combine_chunks()
            try:
                wanted.append(column.cast(schema.field(name).type))
            except pa.ArrowInvalid as error:
                raise SchemaError(
                    f"{whose}: key column {name!r} does not fit {schema.field(name).type}: {error}"
                ) from error
            except pa.ArrowNotImplementedError as error:
                raise SchemaError(
                    f"{whose}: key column {name!r} is {column.type}, expected {schema.field(name).type}"
                ) from error
        hashes = self.directory.hasher(wanted)
        positions, batches = [], []
        for trace in traces:
            answer = trace.lookup(wanted, hashes, last_of(as_of))
            positions.append(pa.array(answer.found.nonzero()[0]))
            batches.append(pa.Table.from_batches([answer.data]))
        if len(batches) == 1:
            return _select(batches[0], columns, stage)
        table = pa.concat_tables(batches, promote_options="default")
        return _select(table.take(pc.sort_indices(pa.concat_arrays(positions))), columns, stage)

    def changes(self, stage: str, after: int, until: int, *, shard: int | None = None, branch: str = MAIN) -> pa.Table:
        """The change feed: what turns the state as of epoch `after` into the state as of epoch `until`.

        Columns: the stage's, `_change_type` (insert, update_preimage, update_postimage, delete) and `_epoch`, in
        order of epoch within a shard. `after=-1` is the empty state before the first epoch.
        """
        check_range(after, until)
        traces = [self._trace(view, until, exact_from=after) for view in self._views(stage, until, shard, branch)]
        begun = [t for t in traces if t.layers] or traces[:1]
        tables = [t.changes(last_of(after), last_of(until)) for t in begun]
        table = pa.concat_tables(tables, promote_options="default")
        last = [
            CHANGE_TYPE_COLUMN,
            EPOCH_COLUMN,
        ]  # a shard that has more columns than the first brings them after these
        names = [name for name in table.column_names if name not in last]
        return _select(table.select([*names, *(name for name in last if name in table.column_names)]), None, stage)

    def diff(self, stage: str, a: str, b: str, as_of: int | None = None) -> pa.Table:
        """The keys of a stage whose rows differ between two branches as of an epoch (default: the newest of both).

        Columns: the key, `_diff` (only_a, only_b, changed), then each value column as `<column>_a` and `<column>_b`.
        """
        if as_of is None:
            as_of = min(self._as_of(None, a), self._as_of(None, b))
        key = self.key(stage, as_of, branch=a)
        schemas = [self.schema(stage, as_of, branch=branch) for branch in (a, b)]
        hidden = [name for name in key if name.startswith(INTERNAL_PREFIX)]  # rows are matched by these, too
        tables = [
            self.read(stage, as_of, columns=[*schema.names, *hidden], branch=branch)
            for schema, branch in zip(schemas, (a, b), strict=True)
        ]
        return compare(tables[0], tables[1], key, f"stage {stage}").drop_columns(hidden)

    def schema(self, stage: str, as_of: int | None = None, *, branch: str = MAIN) -> pa.Schema:
        """The columns of a stage at an epoch (default: the last sealed one), without reading its rows."""
        as_of = self._as_of(as_of, branch)
        traces = [self._trace(view, as_of) for view in self._views(stage, as_of, None, branch)]
        return _select(self._unified(stage, traces).empty_table(), None, stage).schema

    def shards(self, stage: str, t: int, *, branch: str = MAIN) -> list[int]:
        """The numbers of the shards that a stage has at an epoch. Raises UnknownStageError."""
        return sorted({view.id.shard.index for view in self._views(stage, t, None, branch)})

    def _as_of(self, as_of: int | None, branch: str) -> int:
        if as_of is None:
            as_of = self.newest(branch)
            if as_of is None:
                raise NotAvailableError("no timestamp is sealed yet: seal one, or give as_of= to read what is recorded")
        pack(as_of)
        return as_of

    def _views(self, stage: str, t: int, shard: int | None, branch: str) -> list[View]:
        """What the stage's state as of an epoch is made of, by shard."""
        views = stage_views(self.directory, self._timelines(), stage, t, branch)
        chosen = [view for view in views if shard is None or view.id.shard.index == shard]
        if not chosen:
            raise UnknownStageError(
                f"stage {stage} has no shard {shard}; it has {', '.join(str(view.id.shard) for view in views)}"
            )
        return chosen

    def _trace(self, view: View, as_of: int, exact_from: int | None = None) -> Trace:
        exact = last_of(as_of if exact_from is None else exact_from)
        until = end_of(as_of)
        try:
            return self.directory.open_view(view, until=until, as_of=exact)
        except NotAvailableError as error:
            if until > self._timelines().sealed_until(view.id):
                raise
            raise lost_tail(view.id, until, error) from None

    def _unified(self, stage: str, traces: Iterable[Trace]) -> pa.Schema:
        schema: pa.Schema | None = None
        for trace in traces:
            schema = trace.schema if schema is None else joined_schema(schema, trace.schema, f"stage {stage}")
        assert schema is not None, "a stage has at least one trace"
        return schema

    def _table(
        self,
        stage: str,
        traces: Sequence[Trace],
        read: Callable[[Trace], Sequence[pa.RecordBatch]],
        columns: Sequence[str] | None,
    ) -> pa.Table:
        schema = self._unified(stage, traces)
        tables = [pa.Table.from_batches(read(trace), schema=trace.schema) for trace in traces]
        table = tables[0] if len(tables) == 1 else pa.concat_tables(tables, promote_options="default")
        return _select(table.select(schema.names), columns, stage)

    # --- state of the store -------------------------------------------------------------------------------------------

    def _timelines(self) -> Timelines:
        if self._node is not None:
            self._node.notice_changes()
            if (
                self._node.timelines.refs.entries < self._node.timelines.remembered.last_entry
            ):  # with peers it may come yet
                self._check_log(self._node.timelines)
            return self._node.timelines
        if self._seen is None:
            root = self.directory.root
            seen = Timelines(root, self.directory.env, lambda: recalled(root))
            self._check_log(seen)
            self._seen = seen
        elif not self._held:
            self._seen.refresh()
            if self._seen.refs.entries < self._seen.remembered.last_entry:
                self._check_log(self._seen)
        if self._seen.errors:
            error, self._seen = self._seen.errors[0], None  # all is read again, should it be mended
            raise error
        return self._seen

    def _check_log(self, timelines: Timelines) -> None:
        """Raises CorruptionError where an entry of the log of branches is lost."""
        check_log(timelines, self.directory.root, self.directory.env)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """A read-only store sees here what was sealed when it began, and reads manifests once, not for every question."""
        self._timelines()
        self._held = True
        try:
            yield
        finally:
            self._held = False

    def branches(self) -> dict[str, Timeline]:
        """By name, the timeline of each branch: which timeline it comes from, and at which epoch."""
        refs = self._timelines().refs
        return {name: refs.timelines[timeline] for name, timeline in refs.names.items()}

    def begun_anew(self, branch: str = MAIN) -> dict[str, int]:
        """By stage that began anew on the way to a branch, from all rows that were there: the epoch at which it did."""
        refs = self._timelines().refs
        return refs.anew(refs.timeline_of(branch).id)

    def timelines_by_id(self) -> dict[str, Timeline]:
        """Every timeline that a branch is, or comes from."""
        return dict(self._timelines().refs.timelines)

    def delete_branch(self, name: str) -> int:
        """Deletes a branch with the layers that nothing else needs. Returns how many those are."""
        return self.node.delete_branch(name)

    def rewind(self, t: int, keep_as: str | None = None) -> str | None:
        """Lets the main timeline go on from epoch `t`; what it had after that is kept as a branch, whose name is
        returned.

        `keep_as`: that branch's name (default `before-rewind-<n>`); `""` drops it. Where `t` is the last sealed epoch,
        there is nothing to keep: what was recorded of later ones, which failed, is let go of, so that they can be given
        other rows. Where no epoch is sealed yet that is -1. Raises InvalidInputError for a `t` that is not between
        `since` and the last epoch.
        """
        last = self.last_sealed()
        if last is None and t == BEFORE_FIRST_EPOCH:
            self.node.release_first_attempt()
            return None
        pack(t)
        if last is None or not self.since() <= t <= last:
            possible = "there are no epochs yet" if last is None else f"possible are {self.since()} to {last}"
            raise InvalidInputError(f"cannot rewind to {t}: {possible}")
        default = f"before-rewind-{self.node.timelines.refs.entries + 1}" if t < last else None
        kept = default if keep_as is None else keep_as or None
        self.node.rewind(t, kept)
        return kept

    def describe_branch(self, name: str) -> BranchInfo:
        """Where a branch comes from, and what of it is shared with others and what is its own."""
        timelines = self._timelines()
        timeline = timelines.refs.timeline_of(name)
        mine = self._files_of(timelines, name)
        others = set().union(*(self._files_of(timelines, other) for other in timelines.refs.names if other != name))
        sizes = {id: self.directory.path_of(id).stat().st_size for id in mine if self.directory.path_of(id).exists()}
        own = sum(size for id, size in sizes.items() if id not in others)
        # After a rewind a timeline has another name than it began with.
        branch_of = {id: branch for branch, id in timelines.refs.names.items()}
        lineage = tuple(
            f"{branch_of.get(o.parent, '(deleted)')} at {o.at}"
            for o in reversed(timelines.refs.lineage(timeline.id))
            if o.parent is not None
        )
        last = timelines.last_sealed(name)
        return BranchInfo(
            name, timeline.id, lineage, timeline.at, last, timeline.changed, len(mine - others), own, len(mine & others),
            sum(sizes.values()) - own,
        )  # fmt: skip

    def _files_of(self, timelines: Timelines, branch: str) -> set[LayerId]:
        """The layer files that hold what a branch's manifests list."""
        traces: dict[TraceId, list[tuple[Time, Time]]] = {}
        for piece in timelines.manifests(branch).pieces():
            for trace, _ in piece.traces():
                traces.setdefault(trace, []).append((piece.begin, piece.end))
        found = set()
        for trace, listed in traces.items():
            low, high = min(begin for begin, _ in listed), max(end for _, end in listed)
            found |= {LayerId(trace, d) for d in self.directory.descriptions(trace) if d.lower < high and d.upper > low}
        return found

    def last_sealed(self, branch: str = MAIN) -> int | None:
        return self._timelines().last_sealed(branch)

    def newest(self, branch: str = MAIN) -> int | None:
        """As `last_sealed`, for who reads it: raises LostEpochError where later epochs were sealed, and are lost."""
        timelines = self._timelines()
        check_there(timelines, branch, None)
        return timelines.last_sealed(branch)

    def timeline_of(self, t: int, branch: str = MAIN) -> str | None:
        """The timeline that sealed an epoch of a branch; None where it is not sealed. After a rewind it is another one."""
        manifest = self._timelines().manifest(t, branch)
        return None if manifest is None else manifest.timeline

    def manifest(self, t: int, branch: str = MAIN) -> Manifest | None:
        """What an epoch lists; None: it is not sealed."""
        return self._timelines().manifest(t, branch)

    def sums_of(self, stage: str, t: int, branch: str = MAIN) -> list[str]:
        """The columns of a stage whose values may be added up over its rows, as the job said that sealed the epoch."""
        manifest = self._timelines().manifest(t, branch)
        return [] if manifest is None else manifest.sums(stage)

    def first_sealed(self, branch: str = MAIN) -> int | None:
        """The oldest epoch that was sealed; None before the first."""
        return self._timelines().manifests(branch).first

    def safe_point(self, branch: str = MAIN) -> int | None:
        """The largest epoch up to which everything is complete and durable, with peers on as many nodes as it asks for.

        None before the first.
        """
        return self.node.safe_point(branch)

    def since(self) -> int:
        """The oldest epoch whose state is sure to be readable; `retain=` and pins decide."""
        merged = max((id.description.since for id in self.directory.layer_ids()), default=ZERO)
        return epoch_of(max(merged, self._node.since()) if self._node else merged)

    def missing(self) -> list[MissingLayer]:
        """The layers that manifests list and that are lost."""
        return self.node.missing()

    def sync(self) -> None:
        """Returns when everything published so far is durable on this node. Raises StorageError if that cannot be had.

        Peers are not waited for: `safe_point` says up to which epoch there are as many copies as are asked for.
        """
        self.node.sync()

    def pin(self, name: str, t: int) -> None:
        """Keeps the state as of `t` readable until `unpin`, whatever `retain` says (a savepoint, in Flink's words).

        Raises InvalidInputError where `t` is below `since` or not sealed.
        """
        pack(t)
        check_name(name, "pin name")
        last, first = self.last_sealed(), self._timelines().manifests().first
        oldest = max(self.since(), first or 0)
        if last is None or not oldest <= t <= last:
            possible = "there is none yet" if last is None else f"{oldest} to {last} now"
            raise InvalidInputError(f"cannot pin {t}: a pin needs a sealed timestamp whose history is kept, {possible}")
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
        report = verify_directory(self.directory, progress)
        return replace(report, errors=(*report.errors, *self._holes(untrusted=untrusted)))

    def _holes(self, *, untrusted: bool) -> list[str]:
        """What manifests list, or what ought to be a manifest, and no file holds."""
        root, env = self.directory.root, self.directory.env
        try:
            known = None if self._node is None else self._node.timelines.remembered.copy()
            known = Remembered({}) if untrusted else known
            timelines = Timelines(
                root, env, lambda: recalled(root) if known is None else known
            )  # of the files as they are now
        except NosyncError:
            return []  # a file that cannot be read, which has been told of
        problem = log_problem(timelines, root, env)
        if problem is not None:
            return [] if timelines.refs.later else [problem]  # of those after one that is missing it has been told
        safe = None
        with contextlib.suppress(CorruptionError):  # of a manifest that cannot be read, which has been told of
            if not untrusted:
                safe = self.safe_point() if self._node else self._read_only_safe_point()
        found: dict[str, None] = {}
        for name in sorted(timelines.refs.names):
            found |= {f"branch {name}: {text}": None for text in lost_manifests(timelines, name, None).values()}
            for one in lost(timelines, self.directory, safe, name):
                found[f"{one.entry.id}: is gone; recover() computes it again"] = (
                    None  # what branches share is told of once
                )
        return list(found)

    def stages(self) -> list[str]:
        return self.directory.stages()

    def layers(self) -> list[LayerStatus]:
        """Every layer file, by stage, shard and time; not those that a durable merged layer has replaced."""
        durable = self._durable_ids()
        found = []
        for id in self.directory.layer_ids():
            if id not in durable and any(d.trace == id.trace and d.description.covers(id.description) for d in durable):
                continue
            try:
                reader = self.directory.reader(id)
            except FileNotFoundError:
                continue
            except NosyncError as error:
                found.append(status_of_bad(id, self.directory.path_of(id), error))
                continue
            found.append(status_of(reader, durable=id in durable))
        return found

    def branches_of(self, layers: Sequence[LayerStatus]) -> list[tuple[str, ...]]:
        """For each of these layers the branches whose epochs it holds; none for what no sealed epoch lists."""
        timelines = self._timelines()
        holds = {name: {*map(_place, self._files_of(timelines, name))} for name in sorted(timelines.refs.names)}
        places = [(x.stage, x.fingerprint, x.shard, x.shards, x.lower, x.upper) for x in layers]
        return [tuple(name for name, files in holds.items() if place in files) for place in places]

    def key(self, stage: str, as_of: int | None = None, *, branch: str = MAIN) -> tuple[str, ...]:
        """The key columns of a stage at an epoch (default: the last sealed one); none of a log."""
        as_of = self._as_of(as_of, branch)
        return self._trace(self._views(stage, as_of, None, branch)[0], as_of).key

    def _durable_ids(self) -> set[LayerId]:
        if self._node is not None:
            return self._node.durable_ids()
        try:
            catalog = Catalog(self.directory.root / CATALOG, read_only=True)
        except (CatalogError, StorageError):
            return set()  # no node has ever run here, or its catalog is damaged: nothing is known to be durable
        try:
            return {record.id for record in catalog.records()}
        finally:
            catalog.close()

    def status(self) -> StoreStatus:
        stages: dict[str, dict[str, int]] = {}
        shards: dict[str, set[int]] = {}
        for layer in self.layers():
            s = stages.setdefault(
                layer.stage, {"shards": 0, "layers": 0, "rows": 0, "bytes": 0, "upper": 0, "copies": 0}
            )
            shards.setdefault(layer.stage, set()).add(layer.shard)
            s["layers"] += 1
            s["rows"] += layer.rows
            s["bytes"] += layer.bytes
            s["shards"] = len(shards[layer.stage])
            s["upper"] = max(s["upper"], int(str(layer.upper).partition(".")[0]))
        newest = self._timelines().manifest(self.last_sealed() or 0)
        for entry in newest.entries if newest is not None else ():
            if entry.id.trace.stage in stages:
                stages[entry.id.trace.stage]["copies"] = entry.copies
        node = self._node
        safe = self.safe_point() if node else self._read_only_safe_point()
        problems, missing = {}, None
        try:
            missing = len(self.missing() if node else lost(self._timelines(), self.directory, safe))
        except NosyncError as error:
            problems["what is missing"] = f"cannot be said: {error}"
        return StoreStatus(
            str(self.directory.root),
            self.directory.key_groups,
            safe,
            self.last_sealed(),
            self.since(),
            stages,
            self.pins(),
            missing,
            problems | (node.problems if node else self._read_only_problems(safe)),
            {name: self.last_sealed(name) for name in sorted(self._timelines().refs.names)},
            self._sealed_at(),
        )

    def _sealed_at(self) -> str | None:
        """When the last manifest of the main timeline got its file; None where there is none, or an archive has it."""
        last = self.last_sealed()
        manifest = None if last is None else self._timelines().manifest(last)
        if manifest is None:
            return None
        try:
            written_ns = self.directory.env.identity(self.directory.root / manifest.path).written_ns
        except FileNotFoundError:
            return None
        return datetime.fromtimestamp(written_ns // 10**9, UTC).isoformat()

    def _read_only_problems(self, safe: int | None) -> dict[str, str]:
        timelines = self._timelines()
        found: dict[str, str] = {}
        for name in sorted(timelines.refs.names):
            found |= lost_manifests(timelines, name, safe if name == MAIN else None)
        return found

    def _read_only_safe_point(self) -> int | None:
        """As the node computes it, from the catalog as it is on disk now."""
        durable: dict[TraceId, list[Description]] = {}
        for id in self._durable_ids():
            durable.setdefault(id.trace, []).append(id.description)
        sealed = self._timelines().manifests()
        if sealed.first is None:
            return None

        def is_safe(manifest: Manifest) -> bool:
            required = [e for e in manifest.entries if e.copies]
            return all(e.copies <= 1 for e in required) and all(
                any(d.covers(e.id.description) for d in durable.get(e.id.trace, ())) for e in required
            )

        def is_safe_run(run: Run) -> bool:
            is_one_copy_enough = all(one.copies <= 1 for one in run.listed)
            return is_one_copy_enough and is_whole(run.required(), NOTHING, lambda trace: durable.get(trace, ()))

        announced = self._announced_safe()
        if lost_begin(self._timelines()) is not None and (announced is None or announced < sealed.first):
            return None
        begin = sealed.first - 1 if announced is None else min(announced, sealed.last or announced)
        safe = safe_from(sealed, Epoch(begin), is_safe_run, is_safe)
        return safe if safe in sealed else None

    def _announced_safe(self) -> int | None:
        """The safe point that the node told last, where it keeps it."""
        try:
            catalog = Catalog(self.directory.root / CATALOG, read_only=True)
        except (CatalogError, StorageError):
            return None
        try:
            announced = catalog.meta(SAFE_META + self._timelines().timeline().id)
        finally:
            catalog.close()
        return None if announced is None else int(announced)

    # --- end ------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Makes what was published durable and gives the directory back. Closing twice is fine."""
        if not self._closed:
            self._closed = True
            if self._node is not None:
                note_closed(self._node)
                self._node.close()

    def only_read(self, parent: int) -> None:
        """In a process that was forked from the one that has the store: closing this copy leaves it open there."""
        self._parent, self._node = parent, None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open" if self._node else "read-only"
        return f"<nosync.Store {self.directory.root} ({state})>"


def _place(id: LayerId) -> tuple[str, str, int, int, int | str, int | str]:
    """What tells a layer file from others in its `LayerStatus`."""
    trace, d = id.trace, id.description
    return trace.stage, trace.fingerprint, trace.shard.index, trace.shard.count, shown(d.lower), shown(d.upper)


def check_range(after: int, until: int) -> None:
    """Raises InvalidInputError unless both are epochs (or `after` is -1: before the first) and in order."""
    if after != BEFORE_FIRST_EPOCH:
        pack(after)
    pack(until)
    if until < after:
        raise InvalidInputError(f"changes from {after} to {until}: the first timestamp must not be after the second")


def _select(table: pa.Table, columns: Sequence[str] | None, stage: str) -> pa.Table:
    if columns is None:
        return table.select([name for name in table.column_names if not name.startswith(INTERNAL_PREFIX)])
    if isinstance(columns, str):
        raise InvalidInputError(f"columns={columns!r} is one name, expected a list of names: columns=[{columns!r}]")
    for name in columns:
        if name not in table.column_names:
            offered = pa.schema([field for field in table.schema if not field.name.startswith(INTERNAL_PREFIX)])
            raise SchemaError(
                f"stage {stage} has no column {name!r}; it has {describe(offered)}{did_you_mean(name, offered.names)}"
            )
    return table.select(list(columns))


def _prefix_filter(prefix: Mapping[str, Any], trace: Trace, stage: str) -> RowFilter:
    if list(prefix) != list(trace.key[: len(prefix)]) or len(prefix) > len(trace.key):
        raise InvalidInputError(
            f"stage {stage}: prefix columns {list(prefix)} are not the first of the key {list(trace.key)}, in order"
        )
    wanted = {}
    for name, value in prefix.items():
        type_ = trace.schema.field(name).type
        try:
            if pa.types.is_integer(type_) and isinstance(value, float) and not value.is_integer():
                raise pa.ArrowInvalid("it is no whole number")  # Arrow would cut it
            wanted[name] = pa.array([value], type_)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            raise SchemaError(f"stage {stage}: prefix {name}={value!r} does not fit {type_}: {error}") from error

    def keep(batch: pa.RecordBatch) -> Bools:
        columns = [batch.column(name) for name in wanted]
        return keys_equal(columns, np.arange(len(batch)), list(wanted.values()), np.zeros(len(batch), dtype=np.int64))

    return keep
