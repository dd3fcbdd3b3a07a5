"""The operator of `per_key`: what a function makes of all rows that a key has, anew where one of them came or went."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from nosync.flow.stage_options import PerKeyOptions
from nosync.kernels.aggregate_plan import ALL_ROWS, ALL_ROWS_TYPE
from nosync.kernels.joins import ROW_ID, arrange_changing, distinct, number_of_keys
from nosync.kernels.top_rows import TopRows
from nosync.lsm.columnar.columns import CHANGE_TYPE_COLUMN, Indices, as_array
from nosync.lsm.columnar.contents import content_hash
from nosync.lsm.columnar.hashing import U32, hash32
from nosync.lsm.columnar.ordering import match_keys
from nosync.lsm.trace.change_feed import DELETE, INSERT
from nosync.lsm.trace.trace import Trace
from nosync.operators.base import OperatorInput, OperatorOutput, as_changes, call, conform, stage_error, weights_of


def apply_per_key(given: OperatorInput) -> OperatorOutput:
    """Returns what differs between the rows that are recorded of the keys that changed, and those of the function."""
    stage, id, on = given.stage, given.id, given.stage.options_as(PerKeyOptions).on
    changes = as_changes(given.rows)
    columns = [as_array(changes.column(name)) for name in on]
    hashes = hash32(columns)
    first, number = distinct(columns, hashes)
    keys, hashes = [column.take(pa.array(first)) for column in columns], hashes[first]

    recorded = given.trace(stage.name)
    before = _found(recorded, keys, hashes, given)
    result = _called(given, _rows_that_decide(given, changes, number, keys, hashes, before))
    returned = [as_array(result.column(name)) for name in on]
    stranger = np.flatnonzero(match_keys(hashes, keys, hash32(returned), returned) < 0)
    if len(stranger):
        row = result.slice(int(stranger[0]), 1).select(list(on)).to_pylist()[0]
        raise stage_error(id, f"its function returned a row of the key {row}, whose rows it was not given")

    parts = [(DELETE, result.slice(0, 0) if before is None else before.select(result.column_names)), (INSERT, result)]
    differing = pa.concat_tables(
        [part.append_column(CHANGE_TYPE_COLUMN, pa.repeat(pa.scalar(kind), part.num_rows)) for kind, part in parts]
    )
    of_rows = hash32([as_array(differing.column(name)) for name in on])
    found = arrange_changing(differing, stage.schema, stage.key, on, of_rows, recorded, given.before, str(id))
    return OperatorOutput(found.layer, found.before)


def _rows_that_decide(
    given: OperatorInput, changes: pa.Table, number: Indices, keys: list[pa.Array], hashes: U32, before: pa.Table | None
) -> pa.Table:
    """Returns the rows of the keys that changed, without ids; only the first ones where the function asks no more.

    `number`: of which key each change is. `before`: what is recorded of these keys.
    """
    on, kept, function = (
        given.stage.options_as(PerKeyOptions).on,
        given.trace(given.stage.inputs[0]),
        given.stage.function,
    )
    if before is None or not isinstance(function, TopRows) or not function.is_known_by_first_rows:
        return _rows_now(changes, _found(kept, keys, hashes, given), on)
    came = changes.drop_columns([CHANGE_TYPE_COLUMN, *ROW_ID])
    rows = pa.concat_tables([before.select(came.column_names).cast(came.schema), came])
    of_before = number_of_keys([as_array(before.column(name)) for name in on], keys, hashes)
    weights = np.concatenate([np.ones(before.num_rows, dtype=np.int64), weights_of(changes).to_numpy()])
    firsts, is_known = function.first_rows(rows, np.concatenate([of_before, number]), weights, before.num_rows)
    asked = np.flatnonzero(~is_known)
    if not len(asked):
        return firsts
    old = _found(kept, [key.take(pa.array(asked)) for key in keys], hashes[asked], given)
    return pa.concat_tables([firsts, _rows_now(changes.filter(pa.array(~is_known[number])), old, on)])


def _found(trace: Trace, keys: Sequence[pa.Array], hashes: U32, given: OperatorInput) -> pa.Table | None:
    """Returns the rows of keys before the epoch; None: there is no layer yet."""
    return pa.Table.from_batches([trace.lookup_prefix(keys, hashes, given.before)]) if trace.layers else None


def _rows_now(changes: pa.Table, old: pa.Table | None, on: Sequence[str]) -> pa.Table:
    """Returns the rows after the changes: those of a key side by side, in an order that goes by their contents."""
    weights = weights_of(changes)
    rows = changes.drop_columns([CHANGE_TYPE_COLUMN])
    if old is not None:
        rows = pa.concat_tables([old.select(rows.column_names).cast(rows.schema), rows])
        weights = pa.concat_arrays([pa.repeat(pa.scalar(1, pa.int64()), old.num_rows), weights])
    ids = [as_array(rows.column(name)) for name in (*on, *ROW_ID)]
    first, number = distinct(ids, hash32(ids))
    there = np.bincount(number, weights.to_numpy(), minlength=len(first)) > 0
    rows = rows.take(pa.array(first[there])).drop_columns(list(ROW_ID))
    keys = [as_array(rows.column(name)) for name in on]
    _, key_number = distinct(keys, hash32(keys))
    return rows.take(pa.array(np.lexsort((content_hash(rows), key_number))))


def _called(given: OperatorInput, rows: pa.Table) -> pa.Table:
    """Returns what the function makes of the rows, which do not have the key that all of them have."""
    stage = given.stage
    output = stage.output
    if not rows.num_rows:
        return pa.schema([stage.schema.field(name) for name in stage.schema.names if name not in ROW_ID]).empty_table()
    if ALL_ROWS not in rows.column_names:
        return conform(call(stage, given.id, rows), output, given.id)
    made = conform(call(stage, given.id, rows.drop_columns([ALL_ROWS])), output, given.id)
    return made.append_column(ALL_ROWS, pa.repeat(pa.scalar(0, ALL_ROWS_TYPE), made.num_rows))
