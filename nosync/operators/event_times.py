"""Operators that go by the event time of rows and have no windows: the first row of each key, interval joins, and as-of
joins.

Each consists of a part that keeps state, which is bounded by the watermark, and of a log to which rows are only ever
added. The parts compute what they need together once (`OperatorInput.shared`).
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from nosync.flow.internal_columns import HASH64_COLUMN
from nosync.flow.stage_options import FirstOptions, IntervalOptions
from nosync.kernels.asof_joins import AsofSpec, asof_matches
from nosync.kernels.interval_joins import PASSED_US, IntervalRows, Matches, SideRows, matches
from nosync.kernels.windows import NO_WATERMARK, UNTIL_COLUMN, UNTIL_TYPE, late_rows, times_us, to_time
from nosync.lsm.columnar.columns import as_array, as_batch
from nosync.lsm.columnar.contents import content_hash
from nosync.lsm.columnar.hashing import U32
from nosync.lsm.columnar.ordering import order_by_key
from nosync.lsm.layers.writer import arrange
from nosync.lsm.trace.trace import Trace
from nosync.operators.base import OperatorInput, OperatorOutput, hash32_of, produce_from


def _expired(given: OperatorInput, trace: Trace, passed_us: int = 0) -> tuple[pa.RecordBatch, U32]:
    """Returns the rows of a state whose time has come since the epoch before. `passed_us`: how long ago it must be."""
    previous, current = given.watermarks.previous_us, given.watermarks.current_us
    if not trace.layers or current in (NO_WATERMARK, previous):
        nothing = pa.RecordBatch.from_arrays([pa.nulls(0, f.type) for f in trace.schema], schema=trace.schema)
        return nothing, np.empty(0, dtype=np.uint32)
    low = NO_WATERMARK if previous == NO_WATERMARK else previous + 1 - passed_us
    return trace.rows_where(UNTIL_COLUMN, low, current - passed_us, given.before)


# --- the first row of each key ----------------------------------------------------------------------------------------


def _firsts(given: OperatorInput) -> tuple[pa.Table, U32]:
    """Returns the rows whose key was not seen within the time, with `__until`, and their hashes.

    Among an epoch's rows of a key that is the earliest, and of equal ones the smallest by the hash of its contents.
    """
    stage = given.stage
    assert stage.window is not None, f"stage {stage.name} goes by event time"
    options = stage.options_as(FirstOptions)
    rows = given.rows.filter(pa.array(~late_rows(given.rows, stage.window, given.late_us)))
    hashes = hash32_of(rows)
    rows = rows.drop_columns([HASH64_COLUMN])
    times, _ = times_us(rows.column(stage.window.time))
    order = np.lexsort((content_hash(rows), times))
    rows, hashes, times = rows.take(pa.array(order)), hashes[order], times[order]
    key = options.key
    by_key, next_is_same_key = order_by_key(hashes, [as_array(rows.column(name)) for name in key])
    first = by_key[np.concatenate([[True], ~next_is_same_key])] if len(by_key) else by_key
    rows, hashes, times = rows.take(pa.array(first)), hashes[first], times[first]
    seen = given.trace(options.seen)
    is_new = np.ones(len(hashes), dtype=np.bool_)
    if seen.layers:
        is_new = ~seen.lookup([as_array(rows.column(name)) for name in key], hashes, given.before).found
    until = to_time(times[is_new] + options.within_us, UNTIL_TYPE)
    return rows.filter(pa.array(is_new)).append_column(UNTIL_COLUMN, until), hashes[is_new]


def apply_seen(given: OperatorInput) -> OperatorOutput:
    """Returns the keys that were seen, with the time until which another row of theirs is a duplicate."""
    stage = given.stage
    rows, hashes = given.once(_firsts)
    over, over_hashes = _expired(given, given.trace(stage.name))
    old = as_batch(pa.Table.from_batches([over]).select(stage.schema.names))
    stays = times_us(rows.column(UNTIL_COLUMN))[0] > given.watermarks.current_us
    new = rows.select(stage.schema.names).filter(pa.array(stays))
    expired = np.ones(len(old), dtype=np.bool_)
    return produce_from(stage, given.id, new, hashes[stays], old, over_hashes, expired=expired)


def apply_first(given: OperatorInput) -> OperatorOutput:
    """Returns the rows whose key was not seen within the time."""
    rows = given.once(_firsts)[0]
    return OperatorOutput(arrange(rows.select(given.stage.schema.names), (), whose=str(given.id)))


# --- interval joins and as-of joins --------------------------------------------------------------------------------------


def _matched(given: OperatorInput) -> Matches:
    options, watermark = given.stage.options_as(IntervalOptions), given.watermarks.current_us
    sides = []
    for i, (rows, side) in enumerate(zip(given.inputs, options.sides, strict=True)):
        hashes = hash32_of(rows)
        in_time = ~late_rows(rows, side.times, given.late_us)
        new = IntervalRows.of(rows.drop_columns([HASH64_COLUMN]), hashes, in_time, side, given.id.description.lower)
        trace = given.trace(options.states[i])
        sides.append(SideRows(side, new, trace, _expired(given, trace, PASSED_US)[0]))
    if isinstance(options.spec, AsofSpec):
        return asof_matches(sides[0], sides[1], options.spec, options.schema, watermark, given.before)
    return matches(sides[0], sides[1], options.spec, options.schema, watermark, given.before)


def apply_interval_side(given: OperatorInput) -> OperatorOutput:
    """Returns the rows of one side that others can still match: new ones, which of them were matched, and without those
    that none can match any more.
    """
    stage = given.stage
    options = stage.options_as(IntervalOptions)
    kept = given.once(_matched).sides[options.states.index(stage.name)]
    names = stage.schema.names
    old, old_hashes = as_batch(kept.old.select(names)), kept.old_hashes
    return produce_from(
        stage, given.id, kept.new.select(names), kept.new_hashes, old, old_hashes, expired=kept.old_expired
    )


def apply_interval_join(given: OperatorInput) -> OperatorOutput:
    """Returns the pairs that are new, and the rows that stayed without a match until none can come."""
    rows = given.once(_matched).results
    return OperatorOutput(arrange(rows.select(given.stage.schema.names), (), whose=str(given.id)))
