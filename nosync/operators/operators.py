"""The operators: from a shard's input rows at an epoch, and its state before, to a layer and its changes.

Pure functions over whole Arrow tables; no Spark, no files but through `Trace`. Input rows of keyed operators carry
`_hash64`, Spark's hash of the key, and `_change_type` where the input changes.
"""

from __future__ import annotations

import dataclasses
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nosync.flow.bound_flow import BoundStage
from nosync.flow.event_time import INPUT_COLUMN, Watermarks, told_apart, with_input, without_input
from nosync.flow.internal_columns import HASH64_COLUMN, TOUCHED_COLUMN
from nosync.kernels.aggregates import ALL_ROWS, ALL_ROWS_TYPE, ROWS
from nosync.kernels.groups import Groups
from nosync.kernels.joins import NeverThereError, arrange_changing, arrange_growing, content_hash, join_changes
from nosync.lsm.columnar.columns import (
    CHANGE_TYPE_COLUMN,
    EPOCH_COLUMN,
    HASH_COLUMN,
    TOMBSTONE_COLUMN,
    Bools,
    Indices,
    as_array,
    as_batch,
    comparable,
    describe,
    key_columns,
    match_keys,
    nullable,
    order_by_key,
    order_of,
    plain,
    rows_equal,
    take,
    take_batch,
)
from nosync.lsm.columnar.hashing import HASH_BITS, U32, hash64, is_quick
from nosync.lsm.errors import NosyncError, StageError
from nosync.lsm.layers.merging import Rows
from nosync.lsm.layers.writer import LayerRows, arrange
from nosync.lsm.model.layer import LayerId
from nosync.lsm.model.timestamp import Time, epoch_of, pack
from nosync.lsm.trace.change_feed import DELETE, INSERT, UPDATE_AFTER, UPDATE_BEFORE, Lookup, change_rows
from nosync.lsm.trace.trace import Trace

"""Spark's hash of a row's key; of a source's rows that of all columns."""
NO_WATERMARKS = Watermarks()
_WENT = pa.array([DELETE, UPDATE_BEFORE])


@dataclass(frozen=True)
class OperatorOutput:
    """What a stage computed: the layer to publish, and for keyed stages the state before of each of its keys."""

    layer: LayerRows
    before: Lookup | None = None


@dataclass(frozen=True)
class OperatorInput:
    """One stage's work on one shard at one epoch: what its operator is given."""

    stage: BoundStage
    id: LayerId
    inputs: tuple[pa.Table, ...]
    """The changes of each input, in canonical order."""
    trace: Callable[[str], Trace]
    """The state of a stage of the same segment and shard before the epoch."""
    newest_us: int | None = None
    """Of a window: the newest event time among the epoch's rows of all shards."""
    newest_of: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """The same by input, where the window goes by the minimum over several."""
    watermarks: Watermarks = NO_WATERMARKS
    """Of a window: those that the epoch before recorded."""
    phase: str = ""
    """Of a loop: the phase of the round."""

    @property
    def rows(self) -> pa.Table:
        return self.inputs[0]

    @property
    def t(self) -> int:
        return epoch_of(self.id.description.lower)

    @property
    def before(self) -> Time:
        return Time(self.id.description.lower - 1)

    @property
    def state(self) -> State:
        return State(self.trace(self.stage.name), self.stage, self.before)


_TAKEN_BACK = (
    "a row of its input is taken back that never came: what this stage is computed from had other code, or began without its "
    "history, or says by _change_type that rows went which it never gave"
)


def stage_error(id: LayerId, what: str) -> StageError:
    t = str(epoch_of(id.description.lower))
    trace = id.trace
    return StageError(
        f"stage {trace.stage} shard {trace.shard} timestamp {t}: {what}", stage=trace.stage, shard=str(trace.shard), t=t
    )


def call(stage: BoundStage, id: LayerId, *arguments: pa.Table) -> Any:
    """Calls the user's function. Raises StageError naming stage, shard, timestamp and the line that failed."""
    assert stage.function is not None, f"stage {stage.name} has a function"
    try:
        return stage.function(*arguments)
    except NosyncError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(sys.exc_info()[2])[-1]
        where = f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
        raise stage_error(id, f"its function raised {type(error).__name__}: {error} (at {where})") from error


def conform(result: Any, schema: pa.Schema, id: LayerId) -> pa.Table:
    """The function's result with exactly the columns of `schema`, in that order. Raises StageError otherwise.

    Columns may come in any order; all-null columns and timestamps of another unit or zone are cast.
    """
    if not isinstance(result, pa.Table):
        raise stage_error(id, f"its function returned {type(result).__name__}, expected a pyarrow.Table")
    result = plain(result, allow=frozenset({CHANGE_TYPE_COLUMN}))
    if sorted(result.column_names) != sorted(schema.names):
        raise _wrong_schema(id, result.schema, schema)
    columns = []
    for field in schema:
        column = result.column(field.name)
        both_timestamps = pa.types.is_timestamp(column.type) and pa.types.is_timestamp(field.type)
        if column.type != field.type:
            same = both_timestamps or pa.types.is_null(column.type) or column.type.equals(plain_large(field.type))
            if not same and nullable(column.type) != nullable(field.type):  # split() gives an array that holds no null
                raise _wrong_schema(id, result.schema, schema)
            column = column.cast(field.type)
        columns.append(column)
    return pa.Table.from_arrays(columns, schema=schema)


def plain_large(type_: pa.DataType) -> pa.DataType:
    """The large variant of strings and binary, which some Arrow kernels and Spark settings produce."""
    if pa.types.is_string(type_):
        return pa.large_string()
    return pa.large_binary() if pa.types.is_binary(type_) else type_


def _wrong_schema(id: LayerId, found: pa.Schema, expected: pa.Schema) -> StageError:
    return stage_error(id, f"its function returned columns ({describe(found)}), expected ({describe(expected)})")


# --- sources and stateless stages ------------------------------------------------------------------------------------


def source(work: OperatorInput) -> OperatorOutput:
    """The epoch's rows in an order that depends on their contents only: by hash of the whole row."""
    rows = conform(_by_content(work.rows), work.stage.schema, work.id)
    return OperatorOutput(arrange(rows, (), whose=str(work.id)))


def is_hashed_in_tasks(schema: pa.Schema, names: Sequence[str]) -> bool:
    """Whether tasks hash these columns themselves; else the JVM sends the hash along."""
    return is_quick(schema.field(name).type for name in names)


def hashed(rows: pa.Table, names: Sequence[str], *, sent: pa.Table, under: str = HASH64_COLUMN) -> pa.Table:
    """`rows` with `_hash64` of some of their columns. `sent`: as they came, with that hash if tasks do not compute it."""
    if under in sent.column_names and not is_hashed_in_tasks(rows.schema, names):
        return rows.append_column(HASH64_COLUMN, sent.column(under))
    hashes = hash64([as_array(rows.column(name)) for name in names])
    return rows.append_column(HASH64_COLUMN, pa.array(hashes.view(np.int64)))


def _by_content(rows: pa.Table) -> pa.Table:
    order = canonical_order(rows)
    rows = rows.drop_columns([HASH64_COLUMN])
    return rows if (np.diff(order) == 1).all() else rows.take(pa.array(order))


def canonical_order(rows: pa.Table) -> Indices:
    """The order of a source's rows by the hash of each whole row.

    Rows of one hash are the same row, but for collisions, which are put in order of their text.
    """
    hashes = rows.column(HASH64_COLUMN).to_numpy()
    order = order_of(hashes)
    runs = list(_runs(hashes[order]))
    contents = rows.drop_columns([HASH64_COLUMN]).take(pa.array(order)) if runs else rows
    for start, stop in runs:
        texts = _texts(contents.slice(start, stop - start))
        if len(set(texts)) > 1:
            order[start:stop] = order[start:stop][sorted(range(len(texts)), key=texts.__getitem__)]
    return order


def _texts(rows: pa.Table) -> list[str]:
    """A text of each row that others of equal contents have, too."""
    try:
        return [repr(row) for row in rows.to_pylist()]
    except (OverflowError, ValueError):  # a date after the year 9999, which Python does not have
        numbers = [
            column.cast(pa.int32() if pa.types.is_date32(column.type) else pa.int64())
            if pa.types.is_temporal(column.type)
            else column
            for column in rows.columns
        ]
        return [repr(row) for row in pa.table(numbers, names=rows.column_names).to_pylist()]


def one_nan(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """NaN in one form only: equal rows are to make equal layers, and processors make NaN of several forms (`sqrt(-1)`)."""
    if not pa.types.is_floating(column.type):
        return column
    is_nan = pc.is_nan(column)
    return pc.if_else(is_nan, pa.scalar(float("nan"), column.type), column) if pc.any(is_nan).as_py() else column


def _runs(ordered: Indices) -> Iterator[tuple[int, int]]:
    """The (start, stop) of each run of more than one equal value."""
    same = np.concatenate([[False], ordered[1:] == ordered[:-1], [False]])
    edges = np.flatnonzero(same[1:] != same[:-1])
    for start, stop in zip(edges[::2], edges[1::2], strict=True):
        yield int(start), int(stop) + 1


def apply_map(work: OperatorInput) -> OperatorOutput:
    """The function's result; where rows say by which input they came, it is called once for each input."""
    stage, id = work.stage, work.id
    if not (stage.origins and work.rows.num_rows):
        mapped = conform(call(stage, id, without_input(work.rows)), stage.rows_schema, id)
        return _kept(with_input(mapped, 0) if stage.origins else mapped, id)
    parts = told_apart(work.rows, len(stage.origins))
    tables = [with_input(conform(call(stage, id, part), stage.rows_schema, id), i) for i, part in parts]
    return _kept(pa.concat_tables(tables), id)


def _kept(rows: pa.Table, id: LayerId) -> OperatorOutput:
    """The layer of a log."""
    return OperatorOutput(arrange(rows, (), whose=str(id)))


def apply_filter(work: OperatorInput) -> OperatorOutput:
    rows, id = work.rows, work.id
    mask = call(work.stage, id, without_input(rows))
    mask = as_array(mask) if isinstance(mask, pa.Array | pa.ChunkedArray) else mask
    if isinstance(mask, np.ndarray):
        mask = pa.array(mask)
    if not isinstance(mask, pa.Array) or mask.type != pa.bool_() or len(mask) != rows.num_rows:
        what = f"{mask.type} of length {len(mask)}" if isinstance(mask, pa.Array) else type(mask).__name__
        raise stage_error(id, f"its predicate returned {what}, expected {rows.num_rows} booleans, one for each row")
    kept = np.flatnonzero(mask.fill_null(False).to_numpy(zero_copy_only=False))
    filtered = lone_updates_named(rows.take(pa.array(kept)), kept)
    return _kept(conform(filtered, work.stage.schema, id), id)


def lone_updates_named(rows: pa.Table, places: Indices) -> pa.Table:
    """Half of an update whose other half was filtered out is an insertion, or a deletion.

    `places`: where each row was before, in ascending order; there a preimage came right before its postimage.
    """
    if CHANGE_TYPE_COLUMN not in rows.column_names or not rows.num_rows:
        return rows
    kinds = rows.column(CHANGE_TYPE_COLUMN)
    is_pre, is_post = (pc.equal(kinds, kind).to_numpy() for kind in (UPDATE_BEFORE, UPDATE_AFTER))
    next_is_other_half = np.zeros(len(places), dtype=np.bool_)
    next_is_other_half[:-1] = is_pre[:-1] & is_post[1:] & (np.diff(places) == 1)
    lone_pre = is_pre & ~next_is_other_half
    lone_post = is_post & ~np.concatenate([[False], next_is_other_half[:-1]])
    named = pc.if_else(pa.array(lone_pre), DELETE, pc.if_else(pa.array(lone_post), INSERT, as_array(kinds)))
    return rows.set_column(rows.schema.get_field_index(CHANGE_TYPE_COLUMN), CHANGE_TYPE_COLUMN, named)


def keep_rows(work: OperatorInput) -> OperatorOutput:
    """What the JVM computed, recorded."""
    return _kept(conform(work.rows, work.stage.schema, work.id), work.id)


def apply_union(work: OperatorInput) -> OperatorOutput:
    """All inputs' rows one after the other; rows of an input that only grows are insertions."""
    stage = work.stage
    tables = [as_changes(rows) if stage.changing else rows for rows in work.inputs]
    if stage.origins:
        tables = [_numbered(rows, numbers) for rows, numbers in zip(tables, stage.options["numbers"], strict=True)]
    tables = [rows.select(stage.schema.names).cast(stage.schema) for rows in tables]
    return _kept(pa.concat_tables(tables), work.id)


def _numbered(rows: pa.Table, numbers: Sequence[int]) -> pa.Table:
    """The rows of one input of a union with the numbers that its own inputs have in the union."""
    if INPUT_COLUMN not in rows.column_names:
        return with_input(rows, numbers[0])
    return with_input(without_input(rows), np.take(numbers, rows.column(INPUT_COLUMN).to_numpy()))


# --- keyed stages ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """The state of a keyed stage's shard before the epoch."""

    trace: Trace
    stage: BoundStage
    as_of: Time

    def find(self, keys: pa.Table, hashes: U32) -> Lookup:
        if not self.trace.layers:
            return Lookup(np.zeros(len(hashes), dtype=np.bool_), as_batch(self.stage.schema.empty_table()))
        return self.trace.lookup([as_array(keys.column(name)) for name in self.stage.key], hashes, self.as_of)

    def lacks(self, keys: pa.Table) -> bool:
        """Whether a key, the only row of `keys`, belongs to this shard and has no row there."""
        hashes = hash32_of(keys)
        return self.trace.has_hash(int(hashes[0])) and not self.find(keys, hashes).found.any()


def as_changes(rows: pa.Table) -> pa.Table:
    """Rows of an input that only grows are insertions."""
    if CHANGE_TYPE_COLUMN in rows.column_names:
        return rows
    return rows.append_column(CHANGE_TYPE_COLUMN, pa.repeat(INSERT, rows.num_rows))


def weights_of(rows: pa.Table) -> pa.Array:
    """+1 for rows that came, -1 for rows that went."""
    went = pc.is_in(rows.column(CHANGE_TYPE_COLUMN), value_set=_WENT)
    return as_array(pc.if_else(went, pa.scalar(-1, pa.int64()), pa.scalar(1, pa.int64())))


def apply_aggregate(work: OperatorInput) -> OperatorOutput:
    """Partial aggregates of the epoch's rows, combined with those found in the state."""
    stage, id, rows, plan = work.stage, work.id, work.rows, work.stage.plan
    assert plan is not None, f"stage {stage.name} is an aggregate"
    weights = weights_of(rows) if plan.retracts else None
    if plan.is_over_all_rows and not rows.num_rows:
        rows, weights = _one_that_does_not_count(rows), pa.array([0])
        if not work.state.lacks(rows):
            return nothing_happened(stage, id)
    hashes = hash32_of(rows)
    partial, first = plan.partial(rows, hashes, weights)
    hashes = hashes[first]
    found = work.state.find(partial, hashes)
    after = plan.combine(partial, one_row_per_key(found))
    gone = np.zeros(after.num_rows, dtype=np.bool_)
    if plan.retracts and not plan.is_over_all_rows:
        gone = ~rows_that_are_there(after, id)
    return produce(stage, id, plan.finish(after), hashes, found, gone)


def _one_that_does_not_count(rows: pa.Table) -> pa.Table:
    """A row of nulls with the key of all rows."""
    key = pa.array([0], ALL_ROWS_TYPE)
    known = {ALL_ROWS: key, HASH64_COLUMN: pa.array(hash64([key]).view(np.int64))}
    return pa.table([known.get(f.name, pa.nulls(1, f.type)) for f in rows.schema], schema=rows.schema)


def rows_that_are_there(after: pa.Table, id: LayerId) -> Bools:
    """Of an aggregate over an input that changes, which keys have rows left. Raises StageError where more went than
    came.
    """
    rows = after.column(ROWS).to_numpy()
    if (rows < 0).any():
        raise stage_error(id, _TAKEN_BACK)
    there: Bools = rows != 0
    return there


def apply_update(work: OperatorInput) -> OperatorOutput:
    """The user's function over the epoch's changes and the state of their keys."""
    stage, id, rows = work.stage, work.id, work.rows
    keys, hashes = _distinct_keys(rows, stage, id)
    found = work.state.find(keys, hashes)
    changes = as_changes(rows.drop_columns([HASH64_COLUMN]))
    shown = pa.schema([f for f in stage.schema if f.name != TOUCHED_COLUMN])
    state = pa.Table.from_batches([found.data]).select(shown.names)
    result = shown.empty_table()
    if rows.num_rows:  # else only the time to live has something to do
        result = conform(call(stage, id, changes, state), shown, id)
    if TOUCHED_COLUMN in stage.schema.names:
        result = result.append_column(TOUCHED_COLUMN, pa.repeat(pa.scalar(work.t, pa.int64()), result.num_rows))
    returned = arrange(result, stage.key, whose=f"{id}: the returned state")
    touched = [as_array(column) for column in keys.columns]
    at = match_keys(hashes, touched, returned.hashes, [returned.batch.column(name) for name in stage.key])
    if (at < 0).any():
        stranger = returned.batch.slice(int(np.flatnonzero(at < 0)[0]), 1).select(list(stage.key)).to_pylist()[0]
        raise stage_error(id, f"its function returned state for {stranger}, a key that is not among the changed ones")
    if stage.options.get("ttl") is not None:
        return _update_with_ttl(work, pa.Table.from_batches([returned.batch]), returned.hashes, found, hashes)
    row_of_key = np.full(len(hashes), -1, dtype=np.int64)
    row_of_key[at] = np.arange(len(at))
    gone = row_of_key < 0  # a key that the function left out loses its state
    after = pa.Table.from_batches([returned.batch]).select(stage.schema.names).take(pa.array(row_of_key, mask=gone))
    for i, name in enumerate(stage.key):
        after = after.set_column(i, after.schema.field(name), keys.column(name))
    return produce(stage, id, after, hashes, found, gone)


def _update_with_ttl(work: OperatorInput, new: pa.Table, new_hashes: U32, found: Lookup, hashes: U32) -> OperatorOutput:
    """Also deletes the keys whose last change was `ttl` epochs ago."""
    stage = work.stage
    old, old_hashes = found.data, hashes[found.found]
    trace = work.trace(stage.name)
    due = work.t - int(stage.options["ttl"])
    if trace.layers and due >= 0:
        expired, expired_hashes = trace.rows_where(TOUCHED_COLUMN, 0, due, work.before)
        at = match_keys(old_hashes, key_arrays(old, stage), expired_hashes, key_arrays(expired, stage))
        silent = np.flatnonzero(at < 0)  # not among this epoch's changes
        old = as_batch(pa.Table.from_batches([old, take_batch(expired, silent)]))
        old_hashes = np.concatenate([old_hashes, expired_hashes[silent]])
    return produce_from(stage, work.id, new.select(stage.schema.names), new_hashes, old, old_hashes)


def apply_distinct(work: OperatorInput) -> OperatorOutput:
    """The first row of each key over an input that only grows; of an epoch's rows, the smallest by hash of its
    contents.
    """
    stage, rows = work.stage, work.rows
    hashes = hash32_of(rows)
    rows = rows.select(stage.schema.names)
    order = order_of(content_hash(without_input(rows)))
    rows, hashes = rows.take(pa.array(order)), hashes[order]
    by_key, next_is_same_key = order_by_key(hashes, [as_array(rows.column(name)) for name in stage.key])
    first = by_key[np.concatenate([[True], ~next_is_same_key])] if len(by_key) else by_key
    rows, hashes = rows.take(pa.array(first)), hashes[first]
    known = work.state.find(rows, hashes).found
    new = rows.filter(pa.array(~known))
    layer = arrange(new, stage.key, whose=str(work.id), hashes=hashes[~known])
    return OperatorOutput(layer, Lookup(np.zeros(new.num_rows, dtype=np.bool_), as_batch(stage.schema.empty_table())))


def apply_arrange(work: OperatorInput) -> OperatorOutput:
    """One side of a join."""
    stage, rows, on = work.stage, work.rows, work.stage.options["edge_key"]
    if stage.options["drop_nulls"]:
        for name in on:
            rows = rows.filter(rows.column(name).is_valid())
    hashes, rows = hash32_of(rows), rows.drop_columns([HASH64_COLUMN])
    if stage.changing:
        try:
            found = arrange_changing(
                rows, stage.schema, stage.key, on, hashes, work.trace(stage.name), work.before, str(work.id)
            )
        except NeverThereError:
            raise stage_error(work.id, _TAKEN_BACK) from None
    else:
        found = arrange_growing(rows, stage.schema, stage.key, hashes, work.id.description.lower, str(work.id))
    return OperatorOutput(found.layer, found.before)


def apply_join(work: OperatorInput) -> OperatorOutput:
    """The join's changes, from those of its two arranged sides."""
    left, right = work.stage.inputs
    joined = join_changes(
        (as_changes(work.inputs[0]), as_changes(work.inputs[1])),
        (work.trace(left), work.trace(right)),
        work.stage.options["join"],
        work.stage.options["joined"][0],
        work.stage.options["joined"][1],
        work.before,
        str(work.id),
    )
    produced = OperatorOutput(joined.layer, joined.before)
    if work.stage.keyed:
        return produced
    # Inside a loop nobody needs the joined rows as a state: they are a log of changes.
    changes = changes_of(produced, work.stage, work.t)
    return OperatorOutput(arrange(changes, (), whose=str(work.id)))


def nothing_happened(stage: BoundStage, id: LayerId) -> OperatorOutput:
    """The empty layer of a stage at an epoch that brought it no rows."""
    empty = stage.schema.empty_table()
    if not stage.keyed:
        return OperatorOutput(arrange(empty, (), whose=str(id)))
    return OperatorOutput(
        arrange(empty, stage.key, whose=str(id)), Lookup(np.zeros(0, dtype=np.bool_), as_batch(empty))
    )


def key_arrays(rows: pa.RecordBatch, stage: BoundStage) -> list[pa.Array]:
    return [rows.column(name) for name in stage.key]


def one_row_per_key(found: Lookup) -> pa.Table:
    """A row for each key asked for; null where it was not found."""
    index = pa.array(np.cumsum(found.found) - 1, mask=~found.found)
    return pa.Table.from_batches([found.data]).take(index)


def produce(stage: BoundStage, id: LayerId, after: pa.Table, hashes: U32, found: Lookup, gone: Bools) -> OperatorOutput:
    """The layer that takes the keys' state from `found` to `after`; keys whose state stays the same are left out.

    `after`, `hashes` and `gone` have a row for each touched key, in the same order.
    """
    batch = as_batch(after)
    existing = np.flatnonzero(found.found)
    upsert = ~gone
    values, old = (rows.columns[len(stage.key) :] for rows in (batch, found.data))  # their keys are the same
    same = rows_equal(values, existing, old, np.arange(len(existing)))
    upsert[existing[same]] = False
    removed = gone & found.found
    live, dead = np.flatnonzero(upsert), np.flatnonzero(removed)
    layer = arrange(
        pa.Table.from_batches([take_batch(batch, live)]),
        stage.key,
        whose=str(id),
        deletes=pa.Table.from_batches([take_batch(batch.select(list(stage.key)), dead)]),
        hashes=np.concatenate([hashes[live], hashes[dead]]),
    )
    recorded = upsert | removed
    before = take_batch(found.data, np.flatnonzero(recorded[existing]))
    return OperatorOutput(layer, Lookup(found.found[recorded], before))


def produce_from(
    stage: BoundStage,
    id: LayerId,
    new: pa.Table,
    new_hashes: U32,
    old: pa.RecordBatch,
    old_hashes: U32,
    *,
    nested_too: bool = False,
) -> OperatorOutput:
    """The layer that turns the rows `old` into the rows `new`: as `produce`, for keys in any order.

    A key that is only in `old` is deleted, one that is only in `new` is added. `nested_too`: rows with equal nested
    values are left out as well, which takes longer.
    """
    batch = as_batch(new)
    values = (rows.columns[len(stage.key) :] for rows in (batch, old))
    compared = [[comparable(c) if nested_too else c for c in columns] for columns in values]
    at = match_keys(old_hashes, key_arrays(old, stage), new_hashes, key_arrays(batch, stage))
    both = np.flatnonzero(at >= 0)
    changed = np.ones(len(batch), dtype=np.bool_)
    changed[both[rows_equal(compared[0], both, compared[1], at[both])]] = False
    upserts = np.flatnonzero(changed)
    is_dead = np.ones(len(old), dtype=np.bool_)
    is_dead[at[both]] = False
    dead = np.flatnonzero(is_dead)
    live_rows, dead_rows = take_batch(batch, upserts), take_batch(old, dead)
    hashes = np.concatenate([new_hashes[upserts], old_hashes[dead]])
    order, _ = order_by_key(
        hashes,
        [
            pa.concat_arrays(pair)
            for pair in zip(key_arrays(live_rows, stage), key_arrays(dead_rows, stage), strict=True)
        ],
    )
    layer = arrange(
        pa.Table.from_batches([live_rows]),
        stage.key,
        whose=str(id),
        deletes=pa.Table.from_batches([dead_rows.select(list(stage.key))]),
        hashes=hashes,
    )
    old_row = np.concatenate([at[upserts], dead])[order]
    return OperatorOutput(layer, Lookup(old_row >= 0, take_batch(old, old_row[old_row >= 0])))


def changes_of(produced: OperatorOutput, stage: BoundStage, t: int) -> pa.Table:
    """The rows that a stage's consumers get: its output columns, and `_change_type` where its rows can change."""
    batch = produced.layer.batch
    names = stage.carried.names
    if produced.before is None:
        return pa.Table.from_batches([batch]).select(names)
    rows = rows_of_layer(produced.layer, pack(t))
    first = np.ones(len(rows.hashes), dtype=np.bool_)
    return change_rows(rows, first, produced.before).drop_columns([EPOCH_COLUMN]).select(names)


def rows_of_layer(layer: LayerRows, time: Time) -> Rows:
    """A layer's entries as the reader gives them."""
    batch = layer.batch
    dead = np.zeros(len(batch), dtype=np.bool_)
    if TOMBSTONE_COLUMN in batch.schema.names:
        dead = batch.column(TOMBSTONE_COLUMN).to_numpy(zero_copy_only=False)
    data = batch.select([name for name in batch.schema.names if name not in (HASH_COLUMN, TOMBSTONE_COLUMN)])
    return Rows(data, layer.hashes, np.full(len(batch), time, dtype=np.int64), dead)


def _distinct_keys(rows: pa.Table, stage: BoundStage, id: LayerId) -> tuple[pa.Table, U32]:
    """The keys that occur, once each, in stored order, and their hashes."""
    keys, hashes = key_columns(rows, stage.key, str(id)), hash32_of(rows)
    first = Groups.of(keys, hashes).first
    return pa.table([take(key, first) for key in keys], names=list(stage.key)), hashes[first]


def hash32_of(rows: pa.Table) -> U32:
    """The hashes that the JVM computed for the shuffle."""
    hashes: U32 = (rows.column(HASH64_COLUMN).to_numpy().view(np.uint64) >> np.uint64(HASH_BITS)).astype(np.uint32)
    return hashes
