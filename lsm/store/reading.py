"""Reading the stages of a store as of an epoch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nosync.lsm.columnar.columns import (
    CHANGE_TYPE_COLUMN,
    EPOCH_COLUMN,
    Bools,
    describe,
    is_internal,
    joined_schema,
    key_columns,
    keys_equal,
    plain,
)
from nosync.lsm.columnar.hashing import Hasher
from nosync.lsm.columnar.table_diff import compare, show_key, with_key_of
from nosync.lsm.columnar.types import cast_exactly
from nosync.lsm.errors import InvalidInputError, NotAvailableError, SchemaError, UnknownStageError
from nosync.lsm.facts.seal_times import SealTime, SealTimes
from nosync.lsm.layers.merging import RowFilter
from nosync.lsm.manifests.branches import MAIN, Refs, Timeline
from nosync.lsm.manifests.manifest import Manifest
from nosync.lsm.manifests.timelines import Timelines
from nosync.lsm.model.as_of import AsOf, wall_clock_us
from nosync.lsm.model.history import View, check_not_replaced, replaced_at
from nosync.lsm.model.timestamp import END_OF_TIME, Time, end_of, epoch_of, last_of, pack
from nosync.lsm.platform.nearest import did_you_mean
from nosync.lsm.store.epoch_times import EpochTimes
from nosync.lsm.store.stage_views import stage_views
from nosync.lsm.store.timelines_view import TimelinesView
from nosync.lsm.trace.change_feed import EXPIRE, Lookup, rows_left
from nosync.lsm.trace.cover import lost_tail
from nosync.lsm.trace.directory import LayerDirectory
from nosync.lsm.trace.trace import Trace, hashes_in

BEFORE_FIRST_EPOCH = -1


class StoreReader:
    """The part of a store that reads its stages, from files only."""

    def __init__(self, directory: LayerDirectory, view: TimelinesView, times: SealTimes | None = None) -> None:
        """`times`: those of the node (None: the store is only read)."""
        self.directory, self._view = directory, view
        self._times = EpochTimes(times or SealTimes(directory.root, directory.env))

    def read(
        self,
        stage: str,
        as_of: AsOf | None = None,
        *,
        shard: int | None = None,
        columns: Sequence[str] | None = None,
        prefix: Mapping[str, Any] | None = None,
        branch: str = MAIN,
    ) -> pa.Table:
        """Returns the state of a stage as of epoch `as_of` (default: the last sealed one): one row per live key; of a stage
        without a key the rows that came, less those that were taken back.

        `as_of` may be a time of the wall clock, too: see `epoch_as_of`. So it may wherever a store is read.

        Rows come shard by shard in stored order. `columns` selects columns; `prefix` gives values of the first key
        columns; `shard` reads one of those that `parts` gives. Before the stage's first epoch the state is empty. Raises
        UnknownStageError, NotAvailableError (not recorded yet), CompactedError (below `since`), HoleError, CorruptionError.
        """
        as_of = self._as_of(as_of, branch)
        traces = [self._trace(view, as_of) for view in self._views(stage, as_of, shard, branch)]
        keep = _prefix_filter(prefix, traces[0], stage) if prefix else None
        table = self._table(stage, traces, lambda trace: trace.scan(last_of(as_of), keep))
        if _takes_back(table.schema):
            if shard is not None:
                raise InvalidInputError(
                    f"stage {stage}: a row may be taken back in another shard than it came in, so it is read whole: leave "
                    "shard= out"
                )
            table = rows_left(table)
        return _select(table, columns, stage)

    def lookup(
        self,
        stage: str,
        keys: pa.Table,
        as_of: AsOf | None = None,
        *,
        columns: Sequence[str] | None = None,
        branch: str = MAIN,
    ) -> pa.Table:
        """Returns the rows of the given keys as of `as_of`, in the order of `keys`; keys without a row are left out."""
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
                wanted.append(cast_exactly(column, schema.field(name).type))
            except pa.ArrowInvalid as error:
                raise SchemaError(
                    f"{whose}: key column {name!r} does not fit {schema.field(name).type}: {error}"
                ) from error
            except pa.ArrowNotImplementedError as error:
                raise SchemaError(
                    f"{whose}: key column {name!r} is {column.type}, expected {schema.field(name).type}"
                ) from error
        answers = _looked_up(traces, wanted, self.directory.hasher, last_of(as_of))
        positions = [pa.array(answer.found.nonzero()[0]) for answer in answers]
        batches = [pa.Table.from_batches([answer.data]) for answer in answers]
        if len(batches) == 1:
            return _select(batches[0], columns, stage)
        table = pa.concat_tables(batches, promote_options="default")
        return _select(table.take(pc.sort_indices(pa.concat_arrays(positions))), columns, stage)

    def changes(
        self,
        stage: str,
        after: AsOf,
        until: AsOf,
        *,
        shard: int | None = None,
        branch: str = MAIN,
        include_expired: bool = False,
    ) -> pa.Table:
        """Returns the change feed: what turns the state as of epoch `after` into the state as of epoch `until`.

        Columns: the stage's, `_change_type` (insert, update_preimage, update_postimage, delete) and `_epoch`, in
        order of epoch within a shard. `after=-1`, or a time before the first epoch, is the empty state before it. Rows
        that expired are left out, for what was made of them stays; with `include_expired` they come as `expire`.
        Raises SchemaError where the stage began anew with another key or other columns between.
        """
        after, until = self.range_of(after, until, branch)
        check_not_replaced(self._timelines().history(stage, branch), after, until, f"stage {stage}")
        traces = [self._trace(view, until, exact_from=after) for view in self._views(stage, until, shard, branch)]
        begun = [t for t in traces if t.layers] or traces[:1]
        tables = [t.changes(last_of(after), last_of(until)) for t in begun]
        table = pa.concat_tables(tables, promote_options="default")
        if not include_expired and CHANGE_TYPE_COLUMN in table.column_names:
            table = table.filter(pc.not_equal(table.column(CHANGE_TYPE_COLUMN), EXPIRE))
        # A shard that has more columns than the first brings them after these.
        last = [CHANGE_TYPE_COLUMN, EPOCH_COLUMN]
        names = [name for name in table.column_names if name not in last]
        return _select(table.select([*names, *(name for name in last if name in table.column_names)]), None, stage)

    def diff(self, stage: str, a: str, b: str, as_of: AsOf | None = None) -> pa.Table:
        """Returns the keys of a stage whose rows differ between two branches as of an epoch (default: the newest of both).

        A time of the wall clock is looked up on branch `a`. Columns: the key, `_diff` (only_a, only_b, changed), then
        each value column as `<column>_a` and `<column>_b`. Of a stage without a key: the rows that one side has more
        often, `_diff`, and how often they are there, `n_a` and `n_b`.
        """
        if as_of is None:
            as_of = min(self._as_of(None, a), self._as_of(None, b))
        as_of = self._as_of(as_of, a)
        keys = [self.key(stage, as_of, branch=branch) for branch in (a, b)]
        key = keys[0] or keys[1]
        if keys[0] != keys[1] and all(keys):
            raise SchemaError(
                f"stage {stage} has key ({show_key(keys[0])}) on {a} and ({show_key(keys[1])}) on {b}: rows cannot be matched"
            )
        schemas = [self.schema(stage, as_of, branch=branch) for branch in (a, b)]
        hidden = [name for name in key if is_internal(name)]  # rows are matched by these, too
        tables = [
            self.read(stage, as_of, columns=[*schema.names, *(hidden if own else ())], branch=branch)
            for schema, branch, own in zip(schemas, (a, b), keys, strict=True)
        ]
        if any(keys) and not all(keys):
            at = 1 if keys[0] else 0
            tables[at] = with_key_of(tables[1 - at], key, tables[at], f"stage {stage}")
        return compare(tables[0], tables[1], key, f"stage {stage}").drop_columns(hidden)

    def schema(self, stage: str, as_of: AsOf | None = None, *, branch: str = MAIN) -> pa.Schema:
        """Returns the columns of a stage at an epoch (default: the last sealed one), without reading its rows."""
        as_of = self._as_of(as_of, branch)
        traces = [self._trace(view, as_of) for view in self._views(stage, as_of, None, branch)]
        schema = self._unified(stage, traces)
        if _takes_back(schema):
            schema = schema.remove(schema.get_field_index(CHANGE_TYPE_COLUMN))
        return _select(schema.empty_table(), None, stage).schema

    def key(self, stage: str, as_of: AsOf | None = None, *, branch: str = MAIN) -> tuple[str, ...]:
        """Returns the key columns of a stage at an epoch (default: the last sealed one); none of a log."""
        as_of = self._as_of(as_of, branch)
        return self._trace(self._views(stage, as_of, None, branch)[0], as_of).key

    def epoch_as_of(self, as_of: AsOf, branch: str = MAIN) -> int:
        """Returns the epoch that a point in the past stands for: a number is that epoch, a time of the wall clock the
        last epoch that was sealed at or before it.

        A time is a datetime, a date (its first moment) or a text in ISO 8601; one without a zone is in UTC. Raises
        InvalidInputError for what is none of these, NotAvailableError for a time before the first epoch, or of which it
        is not known which epochs there were.
        """
        if isinstance(as_of, str | date):
            us = wall_clock_us(as_of)
            self._view.newest(branch)
            return self._times.epoch_at(self._view.current(), branch, us)
        pack(as_of)
        return as_of

    def range_of(self, after: AsOf, until: AsOf, branch: str = MAIN) -> tuple[int, int]:
        """Returns the epochs between which changes are asked for. Raises InvalidInputError unless they are in order."""
        if isinstance(after, str | date):
            us = wall_clock_us(after)
            after = self._times.epoch_at(self._view.current(), branch, us, before_first=BEFORE_FIRST_EPOCH)
        until = self.epoch_as_of(until, branch) if isinstance(until, str | date) else until
        check_range(after, until)
        return after, until

    def branches(self) -> dict[str, Timeline]:
        """Returns, by name, the timeline of each branch: which timeline it comes from, and at which epoch."""
        refs = self.refs
        return {name: refs.timelines[timeline] for name, timeline in refs.names.items()}

    def begun_anew(self, branch: str = MAIN) -> dict[str, int]:
        """Returns the epoch at which each stage began anew on the way to a branch, from all rows that were there."""
        refs = self.refs
        return refs.anew(refs.timeline_of(branch).id)

    def replaced_from(self, stage: str, branch: str = MAIN) -> int | None:
        """Returns the epoch at which a stage began anew with another key or other columns, so that nothing that it had
        before counts; None where it never did.
        """
        begin = replaced_at(self._timelines().history(stage, branch), END_OF_TIME)
        return None if begin is None else epoch_of(begin)

    @property
    def refs(self) -> Refs:
        """Returns every timeline that a branch is, or comes from, as they are now."""
        return self._timelines().refs

    def sealed_at(self, t: int, branch: str = MAIN) -> datetime | None:
        """Returns when an epoch was sealed, by the clock of the node that did it, in UTC; None where that is not
        known.
        """
        time = self._times.of(self._view.current(), branch, t)
        return None if time is None else datetime.fromtimestamp(0, UTC) + timedelta(microseconds=time.sealed_us)

    def epoch_times(self, branch: str = MAIN) -> dict[int, SealTime]:
        """Returns, by epoch, when it was sealed and which event times its rows have, as far as that is known."""
        return {int(t): time for t, time in self._times.of_branch(self._view.current(), branch).items()}

    def shards(self, stage: str, t: int, *, branch: str = MAIN) -> list[int]:
        """Returns the numbers of the shards that a stage has at an epoch. Raises UnknownStageError."""
        return sorted({view.id.shard.index for view in self._views(stage, t, None, branch)})

    def parts(self, stage: str, t: int, *, branch: str = MAIN) -> list[int | None]:
        """Returns what to give `read` as `shard`, part by part, for all rows of a stage. [None]: it is read whole."""
        views = self._views(stage, t, None, branch)
        if _takes_back(self._unified(stage, [self._trace(view, t) for view in views])):
            return [None]
        return [*self.shards(stage, t, branch=branch)]

    def timeline_of(self, t: int, branch: str = MAIN) -> str | None:
        """Returns the timeline that sealed an epoch of a branch; None where it is not sealed. After a rewind it is
        another one.
        """
        manifest = self._timelines().manifest(t, branch)
        return None if manifest is None else manifest.timeline

    def manifest(self, t: int, branch: str = MAIN) -> Manifest | None:
        """Returns what an epoch lists; None where it is not sealed."""
        return self._timelines().manifest(t, branch)

    def sums_of(self, stage: str, t: int, branch: str = MAIN) -> list[str]:
        """Returns the columns of a stage whose values may be added up over its rows, as the job said that sealed the
        epoch.
        """
        manifest = self._timelines().manifest(t, branch)
        return [] if manifest is None else manifest.sums(stage)

    def first_sealed(self, branch: str = MAIN) -> int | None:
        """Returns the oldest epoch that was sealed; None before the first."""
        return self._timelines().manifests(branch).first

    def newest(self, branch: str = MAIN) -> int | None:
        """Returns what `last_sealed` does, to who reads it. Raises LostEpochError where later epochs are lost."""
        return self._view.newest(branch)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """A read-only store sees here what was sealed when it began, and reads manifests once, not for every question."""
        with self._view.held():
            yield

    def _timelines(self) -> Timelines:
        return self._view.current()

    def _as_of(self, as_of: AsOf | None, branch: str) -> int:
        if as_of is None:
            as_of = self._view.newest(branch)
            if as_of is None:
                raise NotAvailableError("no timestamp is sealed yet: seal one, or give as_of= to read what is recorded")
        return self.epoch_as_of(as_of, branch)

    def _views(self, stage: str, t: int, shard: int | None, branch: str) -> list[View]:
        """Returns what the stage's state as of an epoch is made of, by shard."""
        views = stage_views(self.directory, self._view.current(), stage, t, branch)
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
            if until > self._view.current().sealed_until(view.id):
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
    ) -> pa.Table:
        schema = self._unified(stage, traces)
        tables = [pa.Table.from_batches(read(trace), schema=trace.schema) for trace in traces]
        table = tables[0] if len(tables) == 1 else pa.concat_tables(tables, promote_options="default")
        return table.select(schema.names)


def _takes_back(schema: pa.Schema) -> bool:
    """Returns whether these are the columns of a log of changes: of a stage without a key whose input changes."""
    return CHANGE_TYPE_COLUMN in schema.names


def check_range(after: int, until: int) -> None:
    """Raises InvalidInputError unless both are epochs (or `after` is -1: before the first) and in order."""
    if after != BEFORE_FIRST_EPOCH:
        pack(after)
    pack(until)
    if until < after:
        raise InvalidInputError(f"changes from {after} to {until}: the first timestamp must not be after the second")


def _looked_up(traces: Sequence[Trace], keys: Sequence[pa.Array], hasher: Hasher, as_of: Time) -> list[Lookup]:
    """Returns what each trace has of some keys."""
    hashes = hasher(keys)
    answers = [trace.lookup(keys, hashes, as_of) for trace in traces]
    if np.logical_or.reduce([answer.found for answer in answers]).all():
        return answers
    others = [hashes_in(trace, keys, hasher) for trace in traces]
    return [
        answer if hashes is None else trace.lookup(keys, hashes, as_of)
        for answer, trace, hashes in zip(answers, traces, others, strict=True)
    ]


def _select(table: pa.Table, columns: Sequence[str] | None, stage: str) -> pa.Table:
    if columns is None:
        return table.select([name for name in table.column_names if not is_internal(name)])
    if isinstance(columns, str):
        raise InvalidInputError(f"columns={columns!r} is one name, expected a list of names: columns=[{columns!r}]")
    for name in columns:
        if name not in table.column_names:
            offered = pa.schema([field for field in table.schema if not is_internal(field.name)])
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
