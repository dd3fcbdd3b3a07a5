"""What operators have in common: their input and output, the state of a shard, calls of users' functions, and layers.

Pure functions over whole Arrow tables, without files but through `Trace`. Below `operators`, `windows`, `loops` and
`bootstrap`.
"""

from __future__ import annotations

import dataclasses
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nosync.flow.bound_stage import BoundStage
from nosync.flow.event_time import Watermarks
from nosync.flow.internal_columns import HASH64_COLUMN
from nosync.kernels.aggregate_plan import ROWS
from nosync.kernels.windows import NO_WATERMARK
from nosync.lsm.columnar.columns import (
    CHANGE_TYPE_COLUMN,
    EPOCH_COLUMN,
    EXPIRED_COLUMN,
    HASH_COLUMN,
    TOMBSTONE_COLUMN,
    Bools,
    as_array,
    as_batch,
    comparable,
    describe,
    nullable,
    plain,
    rows_equal,
    take_batch,
)
from nosync.lsm.columnar.hashing import HASH_BITS, U32
from nosync.lsm.columnar.ordering import match_keys, order_by_key
from nosync.lsm.errors import FlowError, NosyncError, SchemaError, StageError
from nosync.lsm.layers.merging import Rows
from nosync.lsm.layers.writer import LayerRows, arrange
from nosync.lsm.model.layer import LayerId
from nosync.lsm.model.timestamp import Time, epoch_of, pack
from nosync.lsm.trace.change_feed import DELETE, EXPIRE, INSERT, UPDATE_BEFORE, Lookup, change_rows
from nosync.lsm.trace.trace import Trace

NO_WATERMARKS = Watermarks()
Found = TypeVar("Found")
_WENT = pa.array([DELETE, UPDATE_BEFORE, EXPIRE])
TAKEN_BACK = (
    "a row of its input is taken back that never came: what this stage is computed from had other code, or began "
    "without its "
    "history, or says by _change_type that rows went which it never gave"
)
"""The error where more rows of a key went than came."""


@dataclass(frozen=True)
class State:
    """The state of a keyed stage's shard before the epoch."""

    trace: Trace
    stage: BoundStage
    as_of: Time

    def find(self, keys: pa.Table, hashes: U32) -> Lookup:
        """Returns the rows of these keys, and which of the keys have one."""
        if not self.trace.layers:
            return Lookup(np.zeros(len(hashes), dtype=np.bool_), as_batch(self.stage.schema.empty_table()))
        found = self.trace.lookup([as_array(keys.column(name)) for name in self.stage.key], hashes, self.as_of)
        # Code before may have recorded columns of its own, such as when a key lives until.
        return Lookup(found.found, found.data.select(self.stage.schema.names))

    def lacks(self, keys: pa.Table) -> bool:
        """Returns whether a key, the only row of `keys`, belongs to this shard and has no row there."""
        hashes = hash32_of(keys)
        return self.trace.has_hash(int(hashes[0])) and not self.find(keys, hashes).found.any()


@dataclass(frozen=True)
class OperatorInput:
    """Holds what the operator of a stage is given for one shard and epoch."""

    stage: BoundStage
    id: LayerId
    inputs: tuple[pa.Table, ...]
    """The changes of each input, in canonical order."""
    trace: Callable[[str], Trace]
    """The state of a stage of the same segment and shard before the epoch."""
    newest_us: int | None = None
    """A window has the newest event time here, among the epoch's rows of all shards."""
    newest_of: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """A window that goes by the minimum over several inputs has the same here, by input."""
    watermarks: Watermarks = NO_WATERMARKS
    """A window has the watermarks here that the epoch before recorded."""
    phase: str = ""
    """A loop has the phase of the round here."""
    shared: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The parts of one operator keep here what all of them need, so that it is computed once."""
    is_anew: bool = False
    """Says whether the stage begins anew with this epoch: its inputs are all rows that are there."""
    was_there: bool = False
    """Says whether epochs before this one, with which it begins anew, have the stage."""

    @property
    def late_us(self) -> int:
        """Returns the watermark by which rows are late. None is where a stage begins anew: nobody knows when it came."""
        window = self.stage.window
        assert window is not None, f"stage {self.stage.name} goes by event time"
        if self.is_anew:
            return NO_WATERMARK
        return self.watermarks.previous_us if window.is_lenient else self.watermarks.current_us

    @property
    def rows(self) -> pa.Table:
        """Returns the changes of the only input."""
        return self.inputs[0]

    @property
    def t(self) -> int:
        return epoch_of(self.id.description.lower)

    @property
    def before(self) -> Time:
        """Returns the newest time before the epoch, or before the round of a loop."""
        return Time(self.id.description.lower - 1)

    def once(self, compute: Callable[[OperatorInput], Found]) -> Found:
        """Returns what the parts of an operator compute together."""
        name = compute.__name__
        if name not in self.shared:
            self.shared[name] = compute(self)
        return cast("Found", self.shared[name])

    @property
    def state(self) -> State:
        return State(self.trace(self.stage.name), self.stage, self.before)


@dataclass(frozen=True)
class OperatorOutput:
    """Holds what a stage computed."""

    layer: LayerRows
    """The layer to publish."""
    before: Lookup | None = None
    """Keyed stages have the state here that each of the layer's keys had before."""


# --- users' functions -------------------------------------------------------------------------------------------------


def stage_error(id: LayerId, what: str) -> StageError:
    """Returns an error that names stage, shard and timestamp."""
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
    except (FlowError, SchemaError) as error:  # of what wraps the user's function
        raise stage_error(id, str(error)) from error
    except NosyncError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(sys.exc_info()[2])[-1]
        where = f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
        raise stage_error(id, f"its function raised {type(error).__name__}: {error} (at {where})") from error


def conform(result: Any, schema: pa.Schema, id: LayerId) -> pa.Table:
    """Returns the function's result with exactly the columns of `schema`, in that order. Raises StageError otherwise.

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
    """Returns the large variant of strings and binary, which some Arrow kernels and Spark settings produce."""
    if pa.types.is_string(type_):
        return pa.large_string()
    return pa.large_binary() if pa.types.is_binary(type_) else type_


def _wrong_schema(id: LayerId, found: pa.Schema, expected: pa.Schema) -> StageError:
    return stage_error(id, f"its function returned columns ({describe(found)}), expected ({describe(expected)})")


# --- changes ----------------------------------------------------------------------------------------------------------


def as_changes(rows: pa.Table) -> pa.Table:
    """Returns the rows with a change type. Rows of an input that only grows are insertions."""
    if CHANGE_TYPE_COLUMN in rows.column_names:
        return rows
    return rows.append_column(CHANGE_TYPE_COLUMN, pa.repeat(INSERT, rows.num_rows))


def weights_of(rows: pa.Table) -> pa.Array:
    """Returns a column with +1 for rows that came and -1 for rows that went."""
    went = pc.is_in(rows.column(CHANGE_TYPE_COLUMN), value_set=_WENT)
    return as_array(pc.if_else(went, pa.scalar(-1, pa.int64()), pa.scalar(1, pa.int64())))


def without_expired(rows: pa.Table) -> pa.Table:
    """Returns the changes of which results are made: where a row expired, what was computed from it stays."""
    if CHANGE_TYPE_COLUMN not in rows.column_names:
        return rows
    expired = pc.equal(rows.column(CHANGE_TYPE_COLUMN), EXPIRE)
    return rows.filter(pc.invert(expired)) if pc.any(expired).as_py() else rows


def hash32_of(rows: pa.Table) -> U32:
    """Returns the hashes that the JVM computed for the shuffle."""
    hashes: U32 = (rows.column(HASH64_COLUMN).to_numpy().view(np.uint64) >> np.uint64(HASH_BITS)).astype(np.uint32)
    return hashes


def rows_that_are_there(after: pa.Table, id: LayerId) -> Bools:
    """Returns which keys of an aggregate over an input that changes have rows left. Raises StageError where more went
    than came.
    """
    rows = after.column(ROWS).to_numpy()
    if (rows < 0).any():
        raise stage_error(id, TAKEN_BACK)
    there: Bools = rows != 0
    return there


def key_arrays(rows: pa.RecordBatch, stage: BoundStage) -> list[pa.Array]:
    """Returns the key columns of a stage's rows."""
    return [rows.column(name) for name in stage.key]


def one_row_per_key(found: Lookup) -> pa.Table:
    """Returns a row for each key that was asked for. It is null where the key was not found."""
    index = pa.array(np.cumsum(found.found) - 1, mask=~found.found)
    return pa.Table.from_batches([found.data]).take(index)


# --- layers -----------------------------------------------------------------------------------------------------------


def nothing_happened(stage: BoundStage, id: LayerId) -> OperatorOutput:
    """Returns the empty layer of a stage at an epoch that brought it no rows."""
    empty = stage.schema.empty_table()
    if not stage.keyed:
        return OperatorOutput(arrange(empty, (), whose=str(id)))
    return OperatorOutput(
        arrange(empty, stage.key, whose=str(id)), Lookup(np.zeros(0, dtype=np.bool_), as_batch(empty))
    )


def produce(stage: BoundStage, id: LayerId, after: pa.Table, hashes: U32, found: Lookup, gone: Bools) -> OperatorOutput:
    """Returns the layer that takes the keys' state from `found` to `after`. Keys whose state stays the same are left
    out.

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
    expired: Bools | None = None,
) -> OperatorOutput:
    """Returns the layer that turns the rows `old` into the rows `new`. It does what `produce` does, for keys in any
    order.

    A key that is only in `old` is deleted, one that is only in `new` is added. With `nested_too` rows with equal nested
    values are left out as well, which takes longer. `expired` says which of the old rows, if they go, expired.
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
        expired=None if expired is None else expired[dead],
    )
    old_row = np.concatenate([at[upserts], dead])[order]
    return OperatorOutput(layer, Lookup(old_row >= 0, take_batch(old, old_row[old_row >= 0])))


def rows_of_layer(layer: LayerRows, time: Time) -> Rows:
    """Returns a layer's entries as the reader gives them."""
    batch = layer.batch
    names = batch.schema.names
    dead = np.zeros(len(batch), dtype=np.bool_)
    if TOMBSTONE_COLUMN in names:
        dead = batch.column(TOMBSTONE_COLUMN).to_numpy(zero_copy_only=False)
    expired = batch.column(EXPIRED_COLUMN).to_numpy(zero_copy_only=False) if EXPIRED_COLUMN in names else None
    data = batch.select([name for name in names if name not in (HASH_COLUMN, TOMBSTONE_COLUMN, EXPIRED_COLUMN)])
    return Rows(data, layer.hashes, np.full(len(batch), time, dtype=np.int64), dead, expired)


def changes_of(output: OperatorOutput, stage: BoundStage, t: int) -> pa.Table:
    """Returns the rows that a stage's consumers get: its output, and `_change_type` where rows can change."""
    batch = output.layer.batch
    names = stage.carried.names
    if output.before is None:
        return pa.Table.from_batches([batch]).select(names)
    rows = rows_of_layer(output.layer, pack(t))
    first = np.ones(len(rows.hashes), dtype=np.bool_)
    return change_rows(rows, first, output.before).drop_columns([EPOCH_COLUMN]).select(names)
