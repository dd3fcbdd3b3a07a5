"""The operators of a window stage: its watermark, its late rows, and its aggregates.

All three see the same rows, one for each (row, window), and the same watermark, so they agree on what is late.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from nosync.flow.bound_stage import BoundStage
from nosync.flow.event_time import (
    LATE_UNTIL,
    OF_INPUTS,
    WATERMARK_AFTER,
    InputTime,
    Watermarks,
    in_force_of,
    maximum,
    minimum,
    recorded_inputs,
    stamp,
)
from nosync.flow.internal_columns import HASH64_COLUMN
from nosync.flow.stage_options import FinalOptions, WatermarkOptions
from nosync.kernels.aggregate_plan import Plan
from nosync.kernels.groups import Groups
from nosync.kernels.windows import END, MAX, NO_WATERMARK, START, Window, closed, late_rows, sessions, times_us, to_time
from nosync.lsm.columnar.columns import Bools, as_array, as_batch, key_columns, keys_equal, take, take_batch
from nosync.lsm.columnar.hashing import U32, hash32
from nosync.lsm.columnar.ordering import match_keys
from nosync.lsm.layers.writer import arrange
from nosync.operators.base import (
    OperatorInput,
    OperatorOutput,
    conform,
    hash32_of,
    key_arrays,
    one_row_per_key,
    produce_from,
    rows_that_are_there,
    weights_of,
)
from nosync.operators.operators import lone_updates_named


def apply_watermark(given: OperatorInput) -> OperatorOutput:
    """Returns one row for each shard and epoch: the watermark in force, the one from the next epoch on, and how many of
    this shard's rows are late.
    """
    window = _window(given)
    assert window.delay_us is not None, "a stage without a watermark has no such part"
    in_force, schema = given.watermarks.current_us, given.stage.schema
    options = given.stage.options_as(WatermarkOptions)
    inputs, delays_us = options.inputs, options.delays_us
    if inputs:
        known = given.watermarks.inputs
        times = {
            name: known.get(name, InputTime()).after(given.newest_of.get(name), window, delays_us.get(name))
            for name in inputs
        }
        of_all = maximum if window.policy == MAX else minimum
        following = of_all(times.values(), in_force)
        more = [recorded_inputs(times, schema.field(OF_INPUTS))]
    else:
        newest_us = None if given.newest_us is None else in_force_of(given.newest_us, window)
        following = in_force if newest_us is None else max(in_force, newest_us - window.delay_us)
        more = []
    late = sum(
        int(late_rows(rows, times_of, given.late_us).sum())
        for rows, times_of in _with_their_times(given)
        if not given.was_there  # else it was said before what is late among all rows
    )
    times_us_of = [in_force, following, given.watermarks.previous_us]
    before, after, late_until = (stamp(time, schema.field(WATERMARK_AFTER).type) for time in times_us_of)
    more += [late_until] if LATE_UNTIL in schema.names else []
    row = pa.Table.from_arrays([before, after, pa.array([late], pa.int64()), *more], schema=schema)
    return OperatorOutput(arrange(row, (), whose=str(given.id)))


def apply_late(given: OperatorInput) -> OperatorOutput:
    """Returns the rows that came after their window had closed. Of an update only one half may be late."""
    at = np.flatnonzero(late_rows(given.rows, _window(given), given.late_us))
    late = lone_updates_named(given.rows.take(pa.array(at)), at).drop_columns([HASH64_COLUMN])
    return OperatorOutput(arrange(conform(late, given.stage.schema, given.id), (), whose=str(given.id)))


@dataclass(frozen=True)
class _Changed:
    """What becomes of a shard's windows at an epoch: rows `old` become rows `new`; some of the old ones expire."""

    new: pa.Table
    new_hashes: U32
    old: pa.RecordBatch
    old_hashes: U32
    expired: Bools
    final: pa.Table
    """The rows of the windows that are final now."""


def apply_window(given: OperatorInput) -> OperatorOutput:
    """Returns the aggregates of open windows. Windows that were kept long enough are deleted."""
    stage, made = given.stage, given.once(_changed)
    expired = made.expired if stage.expires else None
    return produce_from(stage, given.id, made.new, made.new_hashes, made.old, made.old_hashes, expired=expired)


def apply_final(given: OperatorInput) -> OperatorOutput:
    """Returns the rows of the windows that the watermark has closed since the epoch before, once for ever."""
    windows = given.stage.options_as(FinalOptions).windows
    final = replace(given, stage=windows).once(_changed).final
    return OperatorOutput(arrange(final.select(given.stage.schema.names), (), whose=str(given.id)))


def _changed(given: OperatorInput) -> _Changed:
    """Returns what becomes of the windows of a stage, which may be the part that has those which are open."""
    in_time = given.rows.filter(pa.array(~closed(given.rows, given.late_us)))
    new, new_hashes, old, old_hashes = (_sessions if _window(given).session else _aligned)(given, in_time)
    expired, expired_hashes = _expired(given)
    at = match_keys(old_hashes, key_arrays(old, given.stage), expired_hashes, key_arrays(expired, given.stage))
    silent = np.flatnonzero(at < 0)  # a window that got rows now is among the old ones already
    touched = len(old)
    old = as_batch(pa.Table.from_batches([old, take_batch(expired, silent)]))
    old_hashes = np.concatenate([old_hashes, expired_hashes[silent]])
    is_expired = np.arange(len(old)) >= touched
    final = new.slice(0, 0)
    if given.is_anew:
        # What was final, or had expired, before it began anew is so for ever.
        gone = closed(new, _expired_until(_window(given), given.watermarks))
        new, new_hashes = new.filter(pa.array(~gone)), new_hashes[~gone]
    if _window(given).is_final:
        over = closed(new, given.watermarks.current_us)
        is_closed = pa.Table.from_batches([old]).filter(pa.array(is_expired))
        final = pa.concat_tables([new.filter(pa.array(over)), is_closed])
        new, new_hashes = new.filter(pa.array(~over)), new_hashes[~over]
        is_expired = np.ones(len(old), dtype=np.bool_)
    return _Changed(new, new_hashes, old, old_hashes, is_expired, final)


Numbers = npt.NDArray[np.int64]
Rows = tuple[pa.Table, U32, pa.RecordBatch, U32]


def _with_their_times(given: OperatorInput) -> list[tuple[pa.Table, Window]]:
    """Returns the rows of each input of a watermark, and what says when they are late."""
    times = given.stage.options_as(WatermarkOptions).times or (_window(given),)
    return list(zip(given.inputs, times, strict=True))


def _window(given: OperatorInput) -> Window:
    assert given.stage.window is not None, f"stage {given.stage.name} is part of a window"
    return given.stage.window


def _plan(given: OperatorInput) -> Plan:
    assert given.stage.plan is not None, f"stage {given.stage.name} aggregates"
    return given.stage.plan


def _aligned(given: OperatorInput, rows: pa.Table) -> Rows:
    """Returns the rows of tumbling and sliding windows, new and old: an aggregate by key and window."""
    plan, stage = _plan(given), given.stage
    weights = weights_of(rows) if plan.retracts else None
    hashes = hash32_of(rows)
    partial, first = plan.partial(rows, _with_starts(hashes, rows), weights)
    hashes = hashes[first]
    found = given.state.find(partial, hashes)
    after = plan.combine(partial, one_row_per_key(found))
    new = plan.finish(after)
    if plan.retracts:
        there = rows_that_are_there(after, given.id)
        new, hashes_new = new.filter(pa.array(there)), hashes[there]
    else:
        hashes_new = hashes
    return new.select(stage.schema.names), hashes_new, found.data, hashes[found.found]


def _with_starts(hashes: U32, rows: pa.Table) -> U32:
    """Returns hashes of keys and windows. Those of the keys alone are the same in all windows of a key."""
    return hashes ^ hash32([as_array(rows.column(START))])


def _sessions(given: OperatorInput, rows: pa.Table) -> Rows:
    """Returns the rows of sessions, new and old: the rows' own windows grow together with each other and with the open
    sessions of their keys.
    """
    plan, stage = _plan(given), given.stage
    key = stage.edge_key
    hashes = hash32_of(rows)
    if not rows.num_rows:
        empty = stage.schema.empty_table()
        return empty, hashes, as_batch(empty), hashes
    row_keys = key_columns(rows, key, str(given.id))
    groups = Groups.of(row_keys, hashes)
    group, key_hashes = groups.number_of_rows(), hashes[groups.first]
    keys = [take(column, groups.first) for column in row_keys]
    trace = given.trace(stage.name)
    old = as_batch(stage.schema.empty_table())
    old_group = np.empty(0, dtype=np.int64)
    if trace.layers:
        old = trace.lookup_prefix_above(keys, key_hashes, END, given.late_us, given.before)
        old_keys = [old.column(name) for name in key]
        old_group = _group_of(old_keys, hash32(old_keys), keys, key_hashes)
    starts = [times_us(table.column(START))[0] for table in (rows, old)]
    ends = [times_us(table.column(END))[0] for table in (rows, old)]
    session_of, of_group, begin, end = sessions(
        np.concatenate([group, old_group]), np.concatenate(starts), np.concatenate(ends)
    )
    # Sessions that no new row touches stay as they are.
    touched = np.zeros(len(begin), dtype=np.bool_)
    touched[session_of[: rows.num_rows]] = True
    old_session = session_of[rows.num_rows :]
    absorbed = np.flatnonzero(touched[old_session])
    old, old_session = take_batch(old, absorbed), old_session[absorbed]
    time_type = stage.schema.field(START).type
    rows = rows.set_column(
        rows.schema.get_field_index(START), START, to_time(begin[session_of[: rows.num_rows]], time_type)
    )
    groups = Groups.of_numbers(session_of[: rows.num_rows])
    first, number = groups.first, session_of[groups.first]
    partial = plan.partial_of(groups, rows, None)
    for batch in _one_each(old, old_session, number):
        partial = plan.combine(partial, batch)
    finished = plan.finish(partial).append_column(END, to_time(end[number], time_type))
    old_hashes = key_hashes[of_group[old_session]]
    return finished.select(stage.schema.names), hashes[first], old, old_hashes


def _group_of(keys: Sequence[pa.Array], hashes: U32, wanted: Sequence[pa.Array], wanted_hashes: U32) -> Numbers:
    """Returns for each row of `keys` the number of the row of `wanted` that it equals. There always is one. Those of
    `wanted` are in order of (hash, key).
    """
    at = np.searchsorted(wanted_hashes, hashes)
    if keys_equal(wanted, at, keys, np.arange(len(at))).all():
        return at
    both = [pa.concat_arrays(pair) for pair in zip(wanted, keys, strict=True)]
    groups = Groups.of(both, np.concatenate([wanted_hashes, hashes]))
    # Rows of a group stand in the order they came in, so that of `wanted` is its first.
    return groups.first[groups.number_of_rows()[len(wanted_hashes) :]]


def _one_each(
    old: pa.RecordBatch,
    session: Numbers,
    number: Numbers,
) -> list[pa.Table]:
    """Returns the old rows as tables with a row for each session number, which is null where the session has no more
    rows.
    """
    order = np.argsort(session, kind="stable")
    ordered = session[order]
    first = np.searchsorted(ordered, number)
    count = np.searchsorted(ordered, number, "right") - first
    table = pa.Table.from_batches([old])
    found = []
    for i in range(max(1, int(count.max(initial=0)))):  # once at least: it also brings accumulators into stored form
        has = count > i
        at = np.where(has, first + i, 0)
        found.append(table.take(pa.array(order[at] if len(order) else at, mask=~has)))
    return found


def expired_before(stage: BoundStage, old: pa.Table, times: Watermarks) -> Bools | None:
    """Returns which rows that a stage held expire with the epoch in which it begins anew. None: those that go are taken
    back.
    """
    if not stage.expires:
        return None
    assert stage.window is not None, f"stage {stage.name} is a window"
    return closed(old, _expired_until(stage.window, times))


def _expired_until(window: Window, times: Watermarks) -> int:
    """Returns the time up to which windows are gone, when their stage begins anew: final ones were given before the
    epoch, others are kept no longer.
    """
    if window.is_final:
        return times.previous_us
    now = _in_force(window, times)[1]
    return NO_WATERMARK if window.keep_us is None or now == NO_WATERMARK else now - window.keep_us


def _in_force(window: Window, times: Watermarks) -> tuple[int, int]:
    """Returns the watermarks by which windows go, of the epoch before and of this one.

    A window is final as soon as the watermark passes it. Others are kept until no row can be in time for them, so that
    what follows sees each of their changes before they go.
    """
    if window.is_lenient and not window.is_final:
        return times.before_previous_us, times.previous_us
    return times.previous_us, times.current_us


def _expired(given: OperatorInput) -> tuple[pa.RecordBatch, U32]:
    """Returns the windows that were kept long enough since they closed. Those of earlier epochs are gone already."""
    window, trace = _window(given), given.trace(given.stage.name)
    before, now = _in_force(window, given.watermarks)
    # The epochs before had what is below; not so where they had other code, and another keep=.
    is_first = before == NO_WATERMARK or not (trace.layers and trace.goes_on_as(given.stage.fingerprint))
    if window.keep_us is None or not trace.layers or now == NO_WATERMARK or (now == before and not is_first):
        return as_batch(given.stage.schema.empty_table()), np.empty(0, dtype=np.uint32)
    low = NO_WATERMARK if is_first else before - window.keep_us + 1
    found, hashes = trace.rows_where(END, low, now - window.keep_us, given.before)
    return found.select(given.stage.schema.names), hashes
