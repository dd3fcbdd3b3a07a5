"""The operators of sources, stateless stages, aggregates, updates, dedupes and joins.

Each takes a shard's input rows at an epoch, and its state before, to a layer. Input rows of keyed operators carry
`_hash64`, Spark's hash of the key, and `_change_type` where the input changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nosync.flow.bound_stage import BoundStage
from nosync.flow.event_time import INPUT_COLUMN, split_by_input, with_input, without_input
from nosync.flow.internal_columns import HASH64_COLUMN, TOUCHED_COLUMN
from nosync.flow.stage_options import ArrangeOptions, JoinOptions, UnionOptions
from nosync.kernels.aggregate_plan import ALL_ROWS, ALL_ROWS_TYPE
from nosync.kernels.forgetting_joins import join_changes_kept
from nosync.kernels.groups import Groups
from nosync.kernels.joins import NeverThereError, arrange_changing, arrange_growing, join_changes
from nosync.lsm.columnar.columns import CHANGE_TYPE_COLUMN, Indices, as_array, as_batch, key_columns, take, take_batch
from nosync.lsm.columnar.contents import content_hash
from nosync.lsm.columnar.hashing import U32, hash64
from nosync.lsm.columnar.ordering import match_keys, order_by_key, order_of
from nosync.lsm.layers.writer import arrange
from nosync.lsm.model.layer import LayerId
from nosync.lsm.trace.change_feed import DELETE, INSERT, UPDATE_AFTER, UPDATE_BEFORE, Lookup
from nosync.operators.base import (
    TAKEN_BACK,
    OperatorInput,
    OperatorOutput,
    as_changes,
    call,
    changes_of,
    conform,
    hash32_of,
    key_arrays,
    nothing_happened,
    one_row_per_key,
    produce,
    produce_from,
    rows_that_are_there,
    stage_error,
    weights_of,
)
from nosync.operators.canonical import by_content

# --- sources and stateless stages -------------------------------------------------------------------------------------


def source(given: OperatorInput) -> OperatorOutput:
    """Returns the epoch's rows in an order that depends on their contents only: by hash of the whole row."""
    rows = conform(by_content(given.rows), given.stage.schema, given.id)
    return OperatorOutput(arrange(rows, (), whose=str(given.id)))


def keep_rows(given: OperatorInput) -> OperatorOutput:
    """Returns the rows that the JVM computed, as a layer."""
    return _kept(conform(given.rows, given.stage.schema, given.id), given.id)


def apply_map(given: OperatorInput) -> OperatorOutput:
    """Returns the function's result. Where rows say by which input they came, it is called once for each input."""
    stage, id = given.stage, given.id
    if not (stage.origins and given.rows.num_rows):
        mapped = conform(call(stage, id, without_input(given.rows)), stage.rows_schema, id)
        return _kept(with_input(mapped, 0) if stage.origins else mapped, id)
    parts = split_by_input(given.rows, len(stage.origins))
    tables = [with_input(conform(call(stage, id, part), stage.rows_schema, id), i) for i, part in parts]
    return _kept(pa.concat_tables(tables), id)


def apply_filter(given: OperatorInput) -> OperatorOutput:
    """Returns the rows for which the predicate is true."""
    rows, id = given.rows, given.id
    mask = call(given.stage, id, without_input(rows))
    mask = as_array(mask) if isinstance(mask, pa.Array | pa.ChunkedArray) else mask
    if isinstance(mask, np.ndarray):
        mask = pa.array(mask)
    if not isinstance(mask, pa.Array) or mask.type != pa.bool_() or len(mask) != rows.num_rows:
        what = f"{mask.type} of length {len(mask)}" if isinstance(mask, pa.Array) else type(mask).__name__
        raise stage_error(id, f"its predicate returned {what}, expected {rows.num_rows} booleans, one for each row")
    kept = np.flatnonzero(mask.fill_null(False).to_numpy(zero_copy_only=False))
    filtered = lone_updates_named(rows.take(pa.array(kept)), kept)
    return _kept(conform(filtered, given.stage.schema, id), id)


def lone_updates_named(rows: pa.Table, places: Indices) -> pa.Table:
    """Returns the rows, where half of an update whose other half was filtered out is an insertion, or a deletion.

    `places` says where each row was before, in ascending order. There a preimage came right before its postimage.
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


def apply_union(given: OperatorInput) -> OperatorOutput:
    """Returns all inputs' rows one after the other. Rows of an input that only grows are insertions."""
    stage = given.stage
    tables = [as_changes(rows) if stage.changing else rows for rows in given.inputs]
    if stage.origins:
        numbers = stage.options_as(UnionOptions).numbers
        tables = [_numbered(rows, of_input) for rows, of_input in zip(tables, numbers, strict=True)]
    tables = [rows.select(stage.schema.names).cast(stage.schema) for rows in tables]
    return _kept(pa.concat_tables(tables), given.id)


def _numbered(rows: pa.Table, numbers: Sequence[int]) -> pa.Table:
    """Returns the rows of one input of a union with the numbers that its own inputs have in the union."""
    if INPUT_COLUMN not in rows.column_names:
        return with_input(rows, numbers[0])
    return with_input(without_input(rows), np.take(numbers, rows.column(INPUT_COLUMN).to_numpy()))


def _kept(rows: pa.Table, id: LayerId) -> OperatorOutput:
    """Returns the layer of a log."""
    return OperatorOutput(arrange(rows, (), whose=str(id)))


# --- keyed stages -----------------------------------------------------------------------------------------------------


def apply_aggregate(given: OperatorInput) -> OperatorOutput:
    """Combines partial aggregates of the epoch's rows with those found in the state."""
    stage, id, rows, plan = given.stage, given.id, given.rows, given.stage.plan
    assert plan is not None, f"stage {stage.name} is an aggregate"
    weights = weights_of(rows) if plan.retracts else None
    if plan.is_over_all_rows and not rows.num_rows:
        rows, weights = _one_that_does_not_count(rows), pa.array([0])
        if not given.state.lacks(rows):
            return nothing_happened(stage, id)
    hashes = hash32_of(rows)
    partial, first = plan.partial(rows, hashes, weights)
    hashes = hashes[first]
    found = given.state.find(partial, hashes)
    after = plan.combine(partial, one_row_per_key(found))
    gone = np.zeros(after.num_rows, dtype=np.bool_)
    if plan.retracts and not plan.is_over_all_rows:
        gone = ~rows_that_are_there(after, id)
    return produce(stage, id, plan.finish(after), hashes, found, gone)


def _one_that_does_not_count(rows: pa.Table) -> pa.Table:
    """Returns a row of nulls with the key of all rows."""
    key = pa.array([0], ALL_ROWS_TYPE)
    known = {ALL_ROWS: key, HASH64_COLUMN: pa.array(hash64([key]).view(np.int64))}
    return pa.table([known.get(f.name, pa.nulls(1, f.type)) for f in rows.schema], schema=rows.schema)


def apply_update(given: OperatorInput) -> OperatorOutput:
    """Returns the state that the user's function makes of the epoch's changes and the state of their keys."""
    stage, id, rows = given.stage, given.id, given.rows
    keys, hashes = _distinct_keys(rows, stage, id)
    found = given.state.find(keys, hashes)
    changes = as_changes(rows.drop_columns([HASH64_COLUMN]))
    shown = pa.schema([f for f in stage.schema if f.name != TOUCHED_COLUMN])
    state = pa.Table.from_batches([found.data]).select(shown.names)
    result = shown.empty_table()
    if rows.num_rows:  # else only the time to live has something to do
        result = conform(call(stage, id, changes, state), shown, id)
    if TOUCHED_COLUMN in stage.schema.names:
        result = result.append_column(TOUCHED_COLUMN, pa.repeat(pa.scalar(given.t, pa.int64()), result.num_rows))
    returned = arrange(result, stage.key, whose=f"{id}: the returned state")
    touched = [as_array(column) for column in keys.columns]
    at = match_keys(hashes, touched, returned.hashes, [returned.batch.column(name) for name in stage.key])
    if (at < 0).any():
        stranger = returned.batch.slice(int(np.flatnonzero(at < 0)[0]), 1).select(list(stage.key)).to_pylist()[0]
        raise stage_error(id, f"its function returned state for {stranger}, a key that is not among the changed ones")
    if stage.ttl is not None:
        new = pa.Table.from_batches([returned.batch])
        return _update_with_ttl(given, stage.ttl, new, returned.hashes, found, hashes)
    row_of_key = np.full(len(hashes), -1, dtype=np.int64)
    row_of_key[at] = np.arange(len(at))
    gone = row_of_key < 0  # a key that the function left out loses its state
    after = pa.Table.from_batches([returned.batch]).select(stage.schema.names).take(pa.array(row_of_key, mask=gone))
    for i, name in enumerate(stage.key):
        after = after.set_column(i, after.schema.field(name), keys.column(name))
    return produce(stage, id, after, hashes, found, gone)


def _update_with_ttl(
    given: OperatorInput, ttl: int, new: pa.Table, new_hashes: U32, found: Lookup, hashes: U32
) -> OperatorOutput:
    """Returns the layer of an update that also deletes the keys whose last change was `ttl` epochs ago."""
    stage = given.stage
    old, old_hashes = found.data, hashes[found.found]
    touched = len(old)
    trace = given.trace(stage.name)
    due = given.t - ttl
    if trace.layers and due >= 0:
        # Those of epochs before went with epochs before; not so where the time to live was another one then.
        low = due if trace.goes_on_as(stage.fingerprint) else 0
        expired, expired_hashes = trace.rows_where(TOUCHED_COLUMN, low, due, given.before)
        at = match_keys(old_hashes, key_arrays(old, stage), expired_hashes, key_arrays(expired, stage))
        silent = np.flatnonzero(at < 0)  # not among this epoch's changes
        # An upgrade may have taken a column away that is ours: until when a row lives, by event time.
        columns = stage.schema.names
        old = as_batch(pa.Table.from_batches([old.select(columns), take_batch(expired, silent).select(columns)]))
        old_hashes = np.concatenate([old_hashes, expired_hashes[silent]])
    expired = np.arange(len(old)) >= touched if stage.expires else None
    new = new.select(stage.schema.names)
    return produce_from(stage, given.id, new, new_hashes, old, old_hashes, expired=expired)


def _distinct_keys(rows: pa.Table, stage: BoundStage, id: LayerId) -> tuple[pa.Table, U32]:
    """Returns the keys that occur, once each, in stored order, and their hashes."""
    keys, hashes = key_columns(rows, stage.key, str(id)), hash32_of(rows)
    first = Groups.of(keys, hashes).first
    return pa.table([take(key, first) for key in keys], names=list(stage.key)), hashes[first]


def apply_distinct(given: OperatorInput) -> OperatorOutput:
    """Returns the first row of each key over an input that only grows. Among an epoch's rows that is the smallest by
    the hash of its contents.
    """
    stage, rows = given.stage, given.rows
    hashes = hash32_of(rows)
    rows = rows.select(stage.schema.names)
    order = order_of(content_hash(without_input(rows)))
    rows, hashes = rows.take(pa.array(order)), hashes[order]
    by_key, next_is_same_key = order_by_key(hashes, [as_array(rows.column(name)) for name in stage.key])
    first = by_key[np.concatenate([[True], ~next_is_same_key])] if len(by_key) else by_key
    rows, hashes = rows.take(pa.array(first)), hashes[first]
    known = given.state.find(rows, hashes).found
    new = rows.filter(pa.array(~known))
    layer = arrange(new, stage.key, whose=str(given.id), hashes=hashes[~known])
    return OperatorOutput(layer, Lookup(np.zeros(new.num_rows, dtype=np.bool_), as_batch(stage.schema.empty_table())))


def apply_arrange(given: OperatorInput) -> OperatorOutput:
    """Returns the rows of one side of a join, by the join's key."""
    stage, rows, on = given.stage, given.rows, given.stage.edge_key
    if stage.options_as(ArrangeOptions).drops_nulls:
        for name in on:
            rows = rows.filter(rows.column(name).is_valid())
    hashes, rows = hash32_of(rows), rows.drop_columns([HASH64_COLUMN])
    if stage.changing:
        try:
            found = arrange_changing(
                rows, stage.schema, stage.key, on, hashes, given.trace(stage.name), given.before, str(given.id),
                expires=stage.expires,
            )  # fmt: skip
        except NeverThereError:
            raise stage_error(given.id, TAKEN_BACK) from None
    else:
        found = arrange_growing(rows, stage.schema, stage.key, hashes, given.id.description.lower, str(given.id))
    return OperatorOutput(found.layer, found.before)


def apply_join(given: OperatorInput) -> OperatorOutput:
    """Returns the join's changes, from those of its two arranged sides."""
    left, right = given.stage.inputs
    options = given.stage.options_as(JoinOptions)
    changes = (as_changes(given.inputs[0]), as_changes(given.inputs[1]))
    states, what = (given.trace(left), given.trace(right)), (options.spec, options.schema, options.key)
    if options.sides_expire:
        results = given.trace(given.stage.name)
        joined = join_changes_kept(changes, states, results, *what, given.before, str(given.id))
    else:
        joined = join_changes(changes, states, *what, given.before, str(given.id))
    output = OperatorOutput(joined.layer, joined.before)
    if given.stage.keyed:
        return output
    # Inside a loop nobody needs the joined rows as a state: they are a log of changes.
    rows = changes_of(output, given.stage, given.t)
    return OperatorOutput(arrange(rows, (), whose=str(given.id)))
