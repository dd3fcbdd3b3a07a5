"""Updates by event time, with timers, a time to live, and several outputs.

The state, and each output, is a part of the stage. The function is called once for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from nosync.flow.internal_columns import HASH64_COLUMN
from nosync.flow.stage_options import OutputOptions, TimedUpdateOptions
from nosync.kernels.groups import Groups
from nosync.kernels.python_rows import table_of
from nosync.kernels.windows import DUE_COLUMN, NO_WATERMARK, UNTIL_COLUMN, UNTIL_TYPE, late_rows, times_us, to_time
from nosync.lsm.columnar.columns import Bools, as_array, as_batch, describe, key_columns, take, take_batch
from nosync.lsm.columnar.hashing import U32, hash32
from nosync.lsm.columnar.ordering import match_keys
from nosync.lsm.errors import SchemaError
from nosync.lsm.layers.writer import arrange
from nosync.operators.base import (
    OperatorInput,
    OperatorOutput,
    as_changes,
    call,
    conform,
    hash32_of,
    key_arrays,
    produce_from,
    stage_error,
)

FIRED_COLUMN = "_timer_fired"
STATE = "state"


@dataclass(frozen=True)
class _Keys:
    """Rows of the state with the hashes of their keys."""

    rows: pa.RecordBatch
    hashes: U32

    def where(self, wanted: Bools) -> _Keys:
        at = np.flatnonzero(wanted)
        return _Keys(take_batch(self.rows, at), self.hashes[at])

    def without(self, hashes: U32, keys: list[pa.Array], key: tuple[str, ...]) -> _Keys:
        """Returns those whose key is none of these."""
        mine = [self.rows.column(name) for name in key]
        others = np.flatnonzero(match_keys(hashes, keys, self.hashes, mine) < 0)
        return _Keys(take_batch(self.rows, others), self.hashes[others])


@dataclass(frozen=True)
class _Updated:
    """What the function made of an epoch: the state of some keys, from `old` to `new`, and the outputs."""

    new: pa.Table
    new_hashes: U32
    old: pa.RecordBatch
    old_hashes: U32
    expired: Bools
    outputs: Mapping[str, pa.Table]


def apply_timed_update(given: OperatorInput) -> OperatorOutput:
    """Returns the state that the function makes of the epoch's changes, and of the keys whose timer fired."""
    made = given.once(_updated)
    return produce_from(
        given.stage,
        given.id,
        made.new,
        made.new_hashes,
        made.old,
        made.old_hashes,
        nested_too=True,
        expired=made.expired,
    )


def apply_output(given: OperatorInput) -> OperatorOutput:
    """Returns the rows of one output."""
    options = given.stage.options_as(OutputOptions)
    made = replace(given, stage=options.update).once(_updated)
    return OperatorOutput(arrange(made.outputs[options.name], (), whose=str(given.id)))


def _updated(given: OperatorInput) -> _Updated:
    stage, options = given.stage, given.stage.options_as(TimedUpdateOptions)
    rows = given.rows
    if stage.window is not None:
        rows = rows.filter(pa.array(~late_rows(rows, stage.window, given.late_us)))
    columns, row_hashes = key_columns(rows, stage.key, str(given.id)), hash32_of(rows)
    groups = Groups.of(columns, row_hashes)
    keys, hashes = [take(column, groups.first) for column in columns], row_hashes[groups.first]
    found = given.state.find(pa.table(keys, names=list(stage.key)), hashes)
    touched = _Keys(found.data.select(stage.schema.names), hashes[found.found])
    fired, over = _due(given, options, keys, hashes)
    ends = over.where(_fires_before_its_end(over, options))
    state = pa.Table.from_batches([touched.rows, fired.rows, ends.rows])
    result, outputs = _called(given, options, rows, state)
    made = arrange(result, stage.key, whose=f"{given.id}: the returned state")
    new = pa.Table.from_batches([made.batch]).select(options.shown.names)
    _check_keys(given, new, made.hashes, keys, hashes, fired, ends)
    left = match_keys(ends.hashes, key_arrays(ends.rows, stage), made.hashes, key_arrays(as_batch(new), stage)) < 0
    new, new_hashes = new.filter(pa.array(left)), made.hashes[left]
    new = _with_due(given, options, new)
    if options.ttl_us is not None:
        times = _newest(rows, stage.window.time, groups) if stage.window is not None else np.empty(0, dtype=np.int64)
        until = _until(given, new, new_hashes, state, keys, hashes, times)
        new = new.append_column(UNTIL_COLUMN, until)
    new = new.select(stage.schema.names)
    old = as_batch(pa.Table.from_batches([touched.rows, fired.rows, over.rows]))
    old_hashes = np.concatenate([touched.hashes, fired.hashes, over.hashes])
    expired = np.arange(len(old)) >= len(old) - len(over.rows)
    return _Updated(new, new_hashes, old, old_hashes, expired, outputs)


def _fires_before_its_end(over: _Keys, options: TimedUpdateOptions) -> Bools:
    """Returns of keys whose time to live is over whether their timer was due before: then it fires, as it does where an epoch
    ends between the two.
    """
    if options.timer is None or options.ttl_us is None:
        return np.zeros(len(over.hashes), dtype=np.bool_)
    (due, has_timer), (until, _) = (times_us(over.rows.column(name)) for name in (DUE_COLUMN, UNTIL_COLUMN))
    fires: Bools = has_timer & (due <= until)
    return fires


def _due(given: OperatorInput, options: TimedUpdateOptions, keys: list[pa.Array], hashes: U32) -> tuple[_Keys, _Keys]:
    """Returns the keys without changes whose timer fired, and those whose time to live is over."""
    stage, times = given.stage, given.watermarks
    trace = given.trace(stage.name)
    nothing = _Keys(as_batch(stage.schema.empty_table()), np.empty(0, dtype=np.uint32))
    if not trace.layers or times.current_us in (NO_WATERMARK, times.previous_us):
        return nothing, nothing
    low = NO_WATERMARK if times.previous_us == NO_WATERMARK else times.previous_us + 1

    def passed(column: str | None) -> _Keys:
        if column is None:
            return nothing
        rows, of = trace.rows_where(column, low, times.current_us, given.before)
        return _Keys(rows.select(stage.schema.names), of).without(hashes, keys, stage.key)

    over = passed(UNTIL_COLUMN if options.ttl_us is not None else None)
    fired = passed(DUE_COLUMN if options.timer is not None else None)
    return fired.without(over.hashes, key_arrays(over.rows, stage), stage.key), over


def _called(
    given: OperatorInput, options: TimedUpdateOptions, rows: pa.Table, state: pa.Table
) -> tuple[pa.Table, dict[str, pa.Table]]:
    """Returns what the function makes of it: the state, and the outputs."""
    empty = {name: schema.empty_table() for name, schema in options.outputs.items()}
    if not (rows.num_rows or state.num_rows):
        return options.shown.empty_table(), empty
    shown = state.select(options.shown.names)
    if options.timer is not None:
        due = times_us(shown.column(options.timer))
        shown = shown.append_column(FIRED_COLUMN, pa.array(due[1] & (due[0] <= given.watermarks.current_us)))
    made = call(given.stage, given.id, as_changes(rows.drop_columns([HASH64_COLUMN])), shown)
    tables: Mapping[str, Any] = made if isinstance(made, Mapping) else {STATE: made}
    unknown = sorted(tables.keys() - {STATE, *options.outputs})
    if unknown or STATE not in tables:
        what = f"an output {unknown[0]!r} that was not declared" if unknown else "no state"
        raise stage_error(
            given.id, f"its function returned {what}: expected 'state' and any of {sorted(options.outputs)}"
        )
    kept = tables[STATE]
    if isinstance(kept, pa.Table) and FIRED_COLUMN in kept.column_names:
        kept = kept.drop_columns([FIRED_COLUMN])
    outputs = {
        name: conform(_as_table(given, name, tables[name], schema), schema, given.id) if name in tables else empty[name]
        for name, schema in options.outputs.items()
    }
    return conform(kept, options.shown, given.id), outputs


def _as_table(given: OperatorInput, name: str, rows: Any, schema: pa.Schema) -> Any:
    """Returns rows of an output, which may be a list of dictionaries."""
    if not isinstance(rows, list):
        return rows
    wrong = next((row for row in rows if not isinstance(row, Mapping) or row.keys() - {*schema.names}), None)
    if wrong is not None:
        raise stage_error(
            given.id, f"its function returned {wrong!r} for output {name}, expected a mapping of ({describe(schema)})"
        )
    try:
        return table_of(rows, schema)
    except SchemaError as error:
        raise stage_error(given.id, f"what its function returned for output {name}: {error}") from error


def _with_due(given: OperatorInput, options: TimedUpdateOptions, new: pa.Table) -> pa.Table:
    """Returns the state with the time at which each key is to be looked at. A timer that the watermark has passed already
    fires when it moves on, for the function cannot know how far it has come.
    """
    if options.timer is None:
        return new
    due, valid = times_us(new.column(options.timer))
    due = np.maximum(due, given.watermarks.current_us + 1)
    return new.append_column(DUE_COLUMN, pa.array(due, mask=~valid).cast(UNTIL_TYPE))


def _check_keys(
    given: OperatorInput, new: pa.Table, new_hashes: U32, keys: list[pa.Array], hashes: U32, *others: _Keys
) -> None:
    """Raises StageError where the function returned a key that is neither of the epoch nor one of the others."""
    stage = given.stage
    mine = [as_array(new.column(name)) for name in stage.key]
    of_others = [key_arrays(one.rows, stage) for one in others]
    known = [pa.concat_arrays(several) for several in zip(keys, *of_others, strict=True)]
    at = match_keys(np.concatenate([hashes, *(one.hashes for one in others)]), known, new_hashes, mine)
    if (at < 0).any():
        stranger = new.slice(int(np.flatnonzero(at < 0)[0]), 1).select(list(stage.key)).to_pylist()[0]
        raise stage_error(
            given.id, f"its function returned state for {stranger}, a key that neither changed nor has a timer now"
        )


def _newest(rows: pa.Table, time: str, groups: Groups) -> pa.Array:
    """Returns the newest event time of each key's rows."""
    if not len(groups):
        return np.empty(0, dtype=np.int64)
    times, _ = times_us(rows.column(time))
    return np.maximum.reduceat(times[groups.order], groups.starts)


def _until(
    given: OperatorInput, new: pa.Table, new_hashes: U32, state: pa.Table, keys: list[pa.Array], hashes: U32, times: Any
) -> pa.Array:
    """Returns until when each key lives: as long after its newest row as the time to live says."""
    stage = given.stage
    ttl_us = stage.options_as(TimedUpdateOptions).ttl_us or 0
    mine = [as_array(new.column(name)) for name in stage.key]
    until = np.full(new.num_rows, NO_WATERMARK, dtype=np.int64)
    at = match_keys(hashes, keys, new_hashes, mine)
    # What came with rows that were nearly late is there for this epoch, so that what follows sees it.
    until[at >= 0] = np.maximum(times[at[at >= 0]] + ttl_us, given.watermarks.current_us + 1)
    if state.num_rows:
        before = [as_array(state.column(name)) for name in stage.key]
        old = match_keys(hash32(before), before, new_hashes, mine)
        has_one = state.column(UNTIL_COLUMN).is_valid().to_numpy()  # not so where code before had no time to live
        was = np.where(has_one, times_us(state.column(UNTIL_COLUMN))[0], NO_WATERMARK)
        until[old >= 0] = np.maximum(until[old >= 0], was[old[old >= 0]])
    return to_time(until, UNTIL_TYPE)
