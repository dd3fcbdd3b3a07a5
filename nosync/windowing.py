"""The operators of a window stage: its watermark, its late rows, and its aggregates.

All three see the same rows, one for each (row, window), and the same watermark, so they agree on what is late.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from nosync.aggregates import ROWS, Plan
from nosync.lsm.columns import as_array, as_batch, take_batch
from nosync.lsm.hashing import U32
from nosync.lsm.writer import arrange
from nosync.operators import (
    HASH64_COLUMN,
    Produced,
    Work,
    conform,
    hash32_of,
    produce_from,
    weights_of,
)
from nosync.windows import END, NO_WATERMARK, START, Window, closed, sessions, times_us, to_time


def apply_watermark(work: Work) -> Produced:
    """One row a shard and epoch: the watermark in force, the one from the next epoch on, and this shard's late rows."""
    window = _window(work)
    assert window.delay_us is not None, "a stage without a watermark has no such part"
    in_force = work.watermarks[1]
    following = in_force if work.newest_us is None else max(in_force, work.newest_us - window.delay_us)
    late = int(closed(work.rows, in_force).sum())
    type_ = work.stage.schema.field("watermark").type
    stamps = [to_time(np.array([w]), type_) if w != NO_WATERMARK else pa.nulls(1, type_) for w in (in_force, following)]
    row = pa.Table.from_arrays([*stamps, pa.array([late], pa.int64())], schema=work.stage.schema)
    return Produced(arrange(row, (), whose=str(work.id)))


def apply_late(work: Work) -> Produced:
    late = work.rows.filter(pa.array(closed(work.rows, work.watermarks[1]))).drop_columns([HASH64_COLUMN])
    return Produced(arrange(conform(late, work.stage.schema, work.id), (), whose=str(work.id)))


def apply_window(work: Work) -> Produced:
    """The aggregates of open windows; windows that were kept long enough are deleted."""
    in_time = work.rows.filter(pa.array(~closed(work.rows, work.watermarks[1])))
    new, new_hashes, old, old_hashes = (_sessions if _window(work).session else _aligned)(work, in_time)
    expired, expired_hashes = _expired(work)
    if len(expired):
        old = as_batch(pa.Table.from_batches([old, expired]))
        old_hashes = np.concatenate([old_hashes, expired_hashes])
    return produce_from(work.stage, work.id, new, new_hashes, old, old_hashes)


Numbers = npt.NDArray[np.int64]
Rows = tuple[pa.Table, U32, pa.RecordBatch, U32]


def _window(work: Work) -> Window:
    assert work.stage.window is not None, f"stage {work.stage.name} is part of a window"
    return work.stage.window


def _plan(work: Work) -> Plan:
    assert work.stage.plan is not None, f"stage {work.stage.name} aggregates"
    return work.stage.plan


def _aligned(work: Work, rows: pa.Table) -> Rows:
    """Tumbling and sliding windows: an aggregate by key and window."""
    plan, stage = _plan(work), work.stage
    partial, hashes = plan.partial(rows, pa.array(hash32_of(rows)), weights_of(rows) if plan.retracts else None)
    hashes = hashes.to_numpy().astype(np.uint32)
    found = work.state.find(partial, hashes)
    index = pa.array(np.cumsum(found.found) - 1, mask=~found.found)
    after = plan.combine(partial, pa.Table.from_batches([found.data]).take(index))
    new = plan.finish(after)
    if plan.retracts:
        there = after.column(ROWS).to_numpy() != 0
        new, hashes_new = new.filter(pa.array(there)), hashes[there]
    else:
        hashes_new = hashes
    return new.select(stage.schema.names), hashes_new, found.data, hashes[found.found]


def _sessions(work: Work, rows: pa.Table) -> Rows:
    """Sessions: the rows' own windows grow together with each other and with the open sessions of their keys."""
    plan, stage = _plan(work), work.stage
    key = stage.options["feed_key"]
    hashes = hash32_of(rows)
    if not rows.num_rows:
        empty = stage.schema.empty_table()
        return empty, hashes, as_batch(empty), hashes
    # The group of each row: its key's number, in order of first appearance.
    grouped = rows.select(list(key)).append_column("at", pa.array(np.arange(rows.num_rows)))
    distinct = grouped.group_by(list(key), use_threads=False).aggregate([("at", "min"), ("at", "list")])
    members = as_array(distinct.column("at_list"))
    group = np.empty(rows.num_rows, dtype=np.int64)
    group[members.flatten().to_numpy()] = pc.list_parent_indices(members).to_numpy()
    first = distinct.column("at_min").to_numpy()
    key_hashes = hashes[first]
    key_columns = [as_array(distinct.column(name)) for name in key]
    trace = work.trace(stage.name)
    old = as_batch(stage.schema.empty_table())
    old_group = np.empty(0, dtype=np.int64)
    if trace.layers:
        old = trace.lookup_prefix(key_columns, key_hashes, work.before)
        is_open = ~closed(pa.Table.from_batches([old]), work.watermarks[1])
        old = take_batch(old, np.flatnonzero(is_open))
        old_group = _group_of(old, key, distinct.select(list(key)))
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
    partial, partial_hashes = plan.partial(rows, pa.array(hashes), None)
    number = _numbers(partial, key, distinct.select(list(key)), of_group, begin)
    for batch in _one_each(old, old_session, number):
        partial = plan.combine(partial, batch)
    finished = plan.finish(partial).append_column(END, to_time(end[number], time_type))
    old_hashes = key_hashes[of_group[old_session]]
    new_hashes = partial_hashes.to_numpy().astype(np.uint32)
    return finished.select(stage.schema.names), new_hashes, old, old_hashes


def _group_of(rows: pa.RecordBatch, key: tuple[str, ...], groups: pa.Table) -> Numbers:
    """The number of the group, by its key columns, that each row belongs to."""
    numbered = groups.append_column("group", pa.array(np.arange(groups.num_rows)))
    table = pa.Table.from_batches([rows]).select(list(key))
    both = pa.concat_tables([numbered.select(list(key)), table])
    first = both.append_column("at", pa.array(np.arange(both.num_rows)))
    lists = as_array(first.group_by(list(key), use_threads=False).aggregate([("at", "list")]).column("at_list"))
    # Each group's own row comes first in the list of rows that are equal to it.
    owner = lists.flatten().to_numpy()[lists.offsets.to_numpy()[:-1]]
    of = np.empty(both.num_rows, dtype=np.int64)
    of[lists.flatten().to_numpy()] = owner[pc.list_parent_indices(lists).to_numpy()]
    return of[groups.num_rows :]


def _numbers(
    partial: pa.Table,
    key: tuple[str, ...],
    groups: pa.Table,
    of_group: Numbers,
    begin: Numbers,
) -> Numbers:
    """The number of the session of each row of `partial`; sessions are in order of (group, begin)."""
    group = _group_of(as_batch(partial.select(list(key))), key, groups)
    start = times_us(partial.column(START))[0]
    order = np.lexsort((start, group))
    wanted = np.flatnonzero(np.isin(_pairs(of_group, begin), _pairs(group, start)))
    number = np.empty(len(group), dtype=np.int64)
    number[order] = wanted
    return number


def _pairs(group: Numbers, start: Numbers) -> npt.NDArray[np.void]:
    pairs = np.empty(len(group), dtype=[("group", np.int64), ("start", np.int64)])
    pairs["group"], pairs["start"] = group, start
    return pairs


def _one_each(
    old: pa.RecordBatch,
    session: Numbers,
    number: Numbers,
) -> list[pa.Table]:
    """The old rows as tables with a row for each session number, null where there is none; as many as one has at most."""
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


def _expired(work: Work) -> tuple[pa.RecordBatch, U32]:
    """The windows that were kept for long enough since they closed; those of earlier epochs are gone already."""
    window, trace = _window(work), work.trace(work.stage.name)
    previous, current = work.watermarks
    none = as_batch(work.stage.schema.empty_table()), np.empty(0, dtype=np.uint32)
    if window.keep_us is None or not trace.layers or current in (NO_WATERMARK, previous):
        return none
    low = NO_WATERMARK if previous == NO_WATERMARK else previous - window.keep_us + 1
    return trace.rows_where(END, low, current - window.keep_us, work.before)
