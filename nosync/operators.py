"""The operators: from a shard's input rows at an epoch, and its state before, to a layer and its changes.

Pure functions over whole Arrow tables; no Spark, no files but through `Trace`. Input rows of keyed operators carry
`_hash64`, Spark's hash of the key, and `_change_type` where the input changes.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nosync.aggregates import ROWS
from nosync.lsm.columns import (
    CHANGE_TYPE_COLUMN,
    EPOCH_COLUMN,
    Bools,
    Indices,
    as_array,
    as_batch,
    describe,
    match_keys,
    plain,
    rows_equal,
    take_batch,
)
from nosync.lsm.errors import NosyncError, StageError
from nosync.lsm.format import HASH_COLUMN, TOMBSTONE_COLUMN
from nosync.lsm.hashing import HASH_BITS, U32
from nosync.lsm.layer import LayerId
from nosync.lsm.merge import Rows
from nosync.lsm.timestamp import Time, epoch_of, pack
from nosync.lsm.trace import DELETE, INSERT, UPDATE_BEFORE, Lookup, Trace, change_rows
from nosync.lsm.writer import LayerRows, arrange
from nosync.plan import BoundStage

HASH64_COLUMN = "_hash64"
_WENT = pa.array([DELETE, UPDATE_BEFORE])


@dataclass(frozen=True)
class Produced:
    """What a stage computed: the layer to publish, and for keyed stages the state before of each of its keys."""

    layer: LayerRows
    before: Lookup | None = None


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
            if not (both_timestamps or pa.types.is_null(column.type) or column.type.equals(plain_large(field.type))):
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


def source(stage: BoundStage, id: LayerId, rows: pa.Table) -> Produced:
    """The epoch's rows in an order that depends on their contents only: by hash of the whole row."""
    return Produced(arrange(conform(_by_content(rows), stage.schema, id), (), whose=str(id)))


def _by_content(rows: pa.Table) -> pa.Table:
    """Rows of one hash are the same row, but for collisions, which are put in order of their text."""
    hashes = rows.column(HASH64_COLUMN).to_numpy()
    order = np.argsort(hashes, kind="stable")
    rows = rows.drop_columns([HASH64_COLUMN]).take(pa.array(order))
    for start, stop in _runs(hashes[order]):
        run = rows.slice(start, stop - start)
        texts = [repr(row) for row in run.to_pylist()]
        if len(set(texts)) > 1:
            inner = sorted(range(len(texts)), key=texts.__getitem__)
            rows = pa.concat_tables([rows.slice(0, start), run.take(pa.array(inner)), rows.slice(stop)])
    return rows


def _runs(ordered: Indices) -> Iterator[tuple[int, int]]:
    """The (start, stop) of each run of more than one equal value."""
    same = np.concatenate([[False], ordered[1:] == ordered[:-1], [False]])
    edges = np.flatnonzero(same[1:] != same[:-1])
    for start, stop in zip(edges[::2], edges[1::2], strict=True):
        yield int(start), int(stop) + 1


def apply_map(stage: BoundStage, id: LayerId, rows: pa.Table) -> Produced:
    return Produced(arrange(conform(call(stage, id, rows), stage.schema, id), (), whose=str(id)))


def apply_filter(stage: BoundStage, id: LayerId, rows: pa.Table) -> Produced:
    mask = call(stage, id, rows)
    mask = as_array(mask) if isinstance(mask, pa.Array | pa.ChunkedArray) else mask
    if isinstance(mask, np.ndarray):
        mask = pa.array(mask)
    if not isinstance(mask, pa.Array) or mask.type != pa.bool_() or len(mask) != rows.num_rows:
        what = f"{mask.type} of length {len(mask)}" if isinstance(mask, pa.Array) else type(mask).__name__
        raise stage_error(id, f"its predicate returned {what}, expected {rows.num_rows} booleans, one for each row")
    return Produced(arrange(conform(rows.filter(mask), stage.schema, id), (), whose=str(id)))


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


def apply_aggregate(stage: BoundStage, id: LayerId, rows: pa.Table, state: State) -> Produced:
    """Partial aggregates of the epoch's rows, combined with those found in the state."""
    plan = stage.plan
    assert plan is not None, f"stage {stage.name} is an aggregate"
    weights = None
    if plan.retracts:
        went = pc.is_in(rows.column(CHANGE_TYPE_COLUMN), value_set=_WENT)
        weights = as_array(pc.if_else(went, pa.scalar(-1, pa.int64()), pa.scalar(1, pa.int64())))
    partial, group_hashes = plan.partial(rows, pa.array(_hash32_of(rows)), weights)
    ordered = arrange(partial, stage.key, whose=str(id), hashes=group_hashes.to_numpy())
    partial = pa.Table.from_batches([ordered.batch]).select(partial.column_names)
    found = state.find(partial, ordered.hashes)
    after = plan.combine(partial, _one_row_per_key(found))
    gone = np.zeros(after.num_rows, dtype=np.bool_)
    if plan.retracts:
        gone = after.column(ROWS).to_numpy() == 0
    return _produce(stage, id, plan.finish(after), ordered.hashes, found, gone)


def apply_update(stage: BoundStage, id: LayerId, rows: pa.Table, state: State) -> Produced:
    """The user's function over the epoch's changes and the state of their keys."""
    keys, hashes = _distinct_keys(rows, stage, id)
    found = state.find(keys, hashes)
    changes = rows.drop_columns([HASH64_COLUMN])
    if CHANGE_TYPE_COLUMN not in changes.column_names:
        changes = changes.append_column(CHANGE_TYPE_COLUMN, pa.repeat(INSERT, changes.num_rows))
    result = conform(call(stage, id, changes, pa.Table.from_batches([found.data])), stage.schema, id)
    returned = arrange(result, stage.key, whose=f"{id}: the returned state")
    touched = [as_array(column) for column in keys.columns]
    at = match_keys(hashes, touched, returned.hashes, [returned.batch.column(name) for name in stage.key])
    if (at < 0).any():
        stranger = returned.batch.slice(int(np.flatnonzero(at < 0)[0]), 1).select(list(stage.key)).to_pylist()[0]
        raise stage_error(id, f"its function returned state for {stranger}, a key that is not among the changed ones")
    row_of_key = np.full(len(hashes), -1, dtype=np.int64)
    row_of_key[at] = np.arange(len(at))
    gone = row_of_key < 0  # a key that the function left out loses its state
    after = pa.Table.from_batches([returned.batch]).select(stage.schema.names).take(pa.array(row_of_key, mask=gone))
    for i, name in enumerate(stage.key):
        after = after.set_column(i, after.schema.field(name), keys.column(name))
    return _produce(stage, id, after, hashes, found, gone)


def nothing_happened(stage: BoundStage, id: LayerId) -> Produced:
    """The empty layer of a keyed stage at an epoch that brought it no rows."""
    empty = stage.schema.empty_table()
    return Produced(arrange(empty, stage.key, whose=str(id)), Lookup(np.zeros(0, dtype=np.bool_), as_batch(empty)))


def _one_row_per_key(found: Lookup) -> pa.Table:
    """A row for each key asked for; null where it was not found."""
    index = pa.array(np.cumsum(found.found) - 1, mask=~found.found)
    return pa.Table.from_batches([found.data]).take(index)


def _produce(stage: BoundStage, id: LayerId, after: pa.Table, hashes: U32, found: Lookup, gone: Bools) -> Produced:
    """The layer that takes the keys' state from `found` to `after`; keys whose state stays the same are left out.

    `after`, `hashes` and `gone` have a row for each touched key, in the same order.
    """
    batch = as_batch(after)
    existing = np.flatnonzero(found.found)
    upsert = ~gone
    try:
        same = rows_equal(batch.columns, existing, found.data.columns, np.arange(len(existing)))
        upsert[existing[same]] = False
    except pa.ArrowNotImplementedError:
        pass  # nested values cannot be compared: every returned row counts as changed
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
    return Produced(layer, Lookup(found.found[recorded], before))


def changes_of(produced: Produced, stage: BoundStage, t: int) -> pa.Table:
    """The rows that a stage's consumers get: its output columns, and `_change_type` where its rows can change."""
    batch = produced.layer.batch
    names = [*stage.output.names, *([CHANGE_TYPE_COLUMN] if stage.changing else [])]
    if produced.before is None:
        return pa.Table.from_batches([batch]).select(names)
    n = len(batch)
    dead = np.zeros(n, dtype=np.bool_)
    if TOMBSTONE_COLUMN in batch.schema.names:
        dead = batch.column(TOMBSTONE_COLUMN).to_numpy(zero_copy_only=False)
    data = batch.select([name for name in batch.schema.names if name not in (HASH_COLUMN, TOMBSTONE_COLUMN)])
    rows = Rows(data, produced.layer.hashes, np.full(n, pack(t), dtype=np.int64), dead)
    return change_rows(rows, np.ones(n, dtype=np.bool_), produced.before).drop_columns([EPOCH_COLUMN]).select(names)


def _distinct_keys(rows: pa.Table, stage: BoundStage, id: LayerId) -> tuple[pa.Table, U32]:
    """The keys that occur, once each, in stored order, and their hashes."""
    names = list(stage.key)
    table = rows.select(names).append_column(HASH64_COLUMN, pa.array(_hash32_of(rows)))
    distinct = table.group_by(names, use_threads=False).aggregate([(HASH64_COLUMN, "min")])
    hashes = distinct.column(f"{HASH64_COLUMN}_min").to_numpy()
    ordered = arrange(distinct.select(names), stage.key, whose=str(id), hashes=hashes)
    return pa.Table.from_batches([ordered.batch]).select(names), ordered.hashes


def _hash32_of(rows: pa.Table) -> U32:
    """The hashes that the JVM computed for the shuffle."""
    hashes: U32 = (rows.column(HASH64_COLUMN).to_numpy().view(np.uint64) >> np.uint64(HASH_BITS)).astype(np.uint32)
    return hashes
