"""Joins of rows whose event times are within an interval, with both sides bounded by the watermark.

A row of the right side matches one of the left side with the same key if

    left time + lower  <=  right time  <=  left time + upper

So once the watermark has passed `left time + upper` (by a millisecond, as in Spark) no row that is in time can match a
left row any more, and once it has passed `right time - lower` none can match a right row. Until then a side keeps the
row. What then had no match is given once, where the type of the join asks for it; nothing is ever taken back. That is
what Spark and Flink do.

Times are int64 microseconds, as in nosync.kernels.windows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from nosync.kernels.join_types import ANTI, SEMI, JoinSpec
from nosync.kernels.joins import ROW_ID, distinct
from nosync.kernels.windows import UNTIL_COLUMN, UNTIL_TYPE, Window, times_us, to_time
from nosync.lsm.columnar.columns import Bools, Indices, as_array
from nosync.lsm.columnar.hashing import U32, hash32
from nosync.lsm.columnar.ordering import match_keys
from nosync.lsm.model.timestamp import Time
from nosync.lsm.trace.trace import Trace

PASSED_US = 1000
"""How far the watermark is beyond the last time at which a row can be matched, when the row goes."""
Times = npt.NDArray[np.int64]
MATCHED_COLUMN = "__matched"
"""Says of a row of a state whether it had a match."""


@dataclass(frozen=True)
class IntervalSide:
    """One side of an interval join."""

    times: Window
    """Which column has the event time."""
    schema: pa.Schema
    """The columns of its state."""
    lasts_us: int
    """For how long after its event time a row can be matched."""
    tracks: bool
    """Says whether it matters if a row had a match."""
    takes_null_keys: bool


@dataclass(frozen=True)
class IntervalSpec:
    """The join's columns and type, and the bounds of right time less left time."""

    join: JoinSpec
    lower_us: int
    upper_us: int

    @property
    def tracks(self) -> tuple[bool, bool]:
        """Returns of each side whether it matters if a row had a match."""
        return self.join.keeps_left or self.join.is_one_sided, self.join.keeps_right


def side_schema(rows: pa.Schema, on: tuple[str, ...], *, tracks: bool) -> tuple[pa.Schema, tuple[str, ...]]:
    """Returns the columns of a side's state, and its key."""
    ids = [pa.field(name, pa.int64()) for name in ROW_ID]
    rest = [f for f in rows if f.name not in on]
    more = [pa.field(UNTIL_COLUMN, UNTIL_TYPE)]
    more += [pa.field(MATCHED_COLUMN, pa.bool_())] if tracks else []
    return pa.schema([*(rows.field(name) for name in on), *ids, *rest, *more]), (*on, *ROW_ID)


def results_schema(left: pa.Schema, right: pa.Schema, spec: JoinSpec) -> pa.Schema:
    """Returns the columns of the joined rows."""
    sides = (left,) if spec.is_one_sided else (left, right)
    rest = [f for side in sides for f in side if f.name not in spec.on]
    return pa.schema([*(left.field(name) for name in spec.on), *rest])


@dataclass(frozen=True)
class IntervalRows:
    """New rows of a side, as its state has them, with their hashes."""

    rows: pa.Table
    hashes: U32

    @classmethod
    def of(cls, rows: pa.Table, hashes: U32, in_time: Bools, side: IntervalSide, time: Time) -> IntervalRows:
        """Takes rows in canonical order: each is told from equal ones by `time` and its place among them."""
        n = rows.num_rows
        times, _ = times_us(rows.column(side.times.time))
        taken = in_time
        if not side.takes_null_keys:
            taken = in_time & ~has_null(rows, _on(side))
        more = {
            ROW_ID[0]: pa.repeat(pa.scalar(int(time), pa.int64()), n),
            ROW_ID[1]: pa.array(np.arange(n)),
            UNTIL_COLUMN: to_time(np.where(taken, times, 0) + side.lasts_us, UNTIL_TYPE),
            MATCHED_COLUMN: pa.repeat(pa.scalar(False), n),
        }
        for name, column in more.items():
            rows = rows.append_column(name, column)
        return cls(rows.select(side.schema.names).filter(pa.array(taken)), hashes[taken])


@dataclass(frozen=True)
class SideRows:
    """What one side has at an epoch: new rows, its state before, and the rows of that which no later row can match."""

    side: IntervalSide
    new: IntervalRows
    state: Trace
    expired: pa.RecordBatch


@dataclass(frozen=True)
class SideChanges:
    """What becomes of a side's state: rows `old` become rows `new`, in any order."""

    new: pa.Table
    new_hashes: U32
    old: pa.Table
    old_hashes: U32
    old_expired: Bools


@dataclass(frozen=True)
class Matches:
    """What a join makes of an epoch."""

    sides: tuple[SideChanges, SideChanges]
    results: pa.Table


def matches(
    left: SideRows, right: SideRows, spec: IntervalSpec, schema: pa.Schema, watermark_us: int, before: Time
) -> Matches:
    """Returns the results of an epoch, and what becomes of the states of both sides. `schema` is of the results.

    The rows of the epoch are matched first; then those are over which the watermark has passed.
    """
    on = spec.join.on
    candidates = [
        pa.concat_tables([side.new.rows, of_keys(side, other.new.rows, on, before)])
        for side, other in ((left, right), (right, left))
    ]
    first, second = _pairs(
        candidates[0], candidates[1], left.new.rows.num_rows, right.new.rows.num_rows, left, right, spec
    )
    changes, parts = [], []
    if not spec.join.is_one_sided:
        parts.append(
            beside(candidates[0].take(pa.array(first)), candidates[1].take(pa.array(second)), spec.join, schema)
        )
    for side, found, at, is_left in ((left, candidates[0], first, True), (right, candidates[1], second, False)):
        has_now = np.zeros(found.num_rows, dtype=np.bool_)
        has_now[at] = True
        rows = pa.concat_tables([found, _not_among(side, found, on)])
        has_now = np.concatenate([has_now, np.zeros(rows.num_rows - found.num_rows, dtype=np.bool_)])
        had = np.zeros_like(has_now)
        if side.side.tracks:
            # Where the type of the join was another one, nothing says it of earlier rows: none is falsely called unmatched.
            had = rows.column(MATCHED_COLUMN).fill_null(True).to_numpy()
        has, is_over = had | has_now, until_us(rows) <= watermark_us - PASSED_US
        changes.append(_changes(side, rows, had, has, is_over))
        if is_left and spec.join.how == SEMI:
            parts.append(beside(rows.filter(pa.array(has & ~had)), None, spec.join, schema))
        keeps = spec.join.keeps_left or spec.join.how == ANTI if is_left else spec.join.keeps_right
        if keeps:
            lone = rows.filter(pa.array(is_over & ~has))
            alone = (lone, None) if is_left else (None, lone)
            parts.append(beside(alone[0], alone[1], spec.join, schema))
    return Matches((changes[0], changes[1]), pa.concat_tables(parts))


def _on(side: IntervalSide) -> list[str]:
    names: list[str] = side.schema.names
    return names[: names.index(ROW_ID[0])]


def has_null(rows: pa.Table, names: list[str] | tuple[str, ...]) -> Bools:
    """Returns of each row whether one of these columns is null."""
    found: Bools = np.zeros(rows.num_rows, dtype=np.bool_)
    for name in names:
        found |= rows.column(name).is_null().to_numpy()
    return found


def of_keys(side: SideRows, wanted: pa.Table, on: tuple[str, ...], before: Time) -> pa.Table:
    """Returns the rows of a side's state that have a key of some rows. A null key is that of none."""
    nothing = side.side.schema.empty_table()
    wanted = wanted.filter(pa.array(~has_null(wanted, on)))
    if not (wanted.num_rows and side.state.layers):
        return nothing
    keys = [as_array(wanted.column(name)) for name in on]
    hashes = hash32(keys)
    once, _ = distinct(keys, hashes)
    found = side.state.lookup_prefix([key.take(pa.array(once)) for key in keys], hashes[once], before)
    return pa.Table.from_batches([found]).select(side.side.schema.names)


def _not_among(side: SideRows, found: pa.Table, on: tuple[str, ...]) -> pa.Table:
    """Returns the rows of a side's state that are over now, and are not among those which were found."""
    names = (*on, *ROW_ID)
    expired = pa.Table.from_batches([side.expired]).select(found.column_names)
    keys, hashes = _keys(found, names, len(on))
    wanted, wanted_hashes = _keys(expired, names, len(on))
    return expired.filter(pa.array(match_keys(hashes, keys, wanted_hashes, wanted) < 0))


def _keys(rows: pa.Table, names: tuple[str, ...], hashed: int) -> tuple[list[pa.Array], U32]:
    keys = [as_array(rows.column(name)) for name in names]
    return keys, hash32(keys[:hashed])


def until_us(rows: pa.Table) -> Times:
    """Returns until when each row of a side can be matched."""
    return times_us(rows.column(UNTIL_COLUMN))[0]


def numbered_keys(left: pa.Table, right: pa.Table, on: tuple[str, ...]) -> tuple[Indices, Indices]:
    """Returns, for the rows of two tables, the numbers of their keys: the same for equal keys, and -1 for a null one."""
    columns = [pa.concat_arrays([as_array(side.column(name)) for side in (left, right)]) for name in on]
    _, number = distinct(columns, hash32(columns))
    number = np.where(np.concatenate([has_null(left, on), has_null(right, on)]), -1, number)
    return number[: left.num_rows], number[left.num_rows :]


def _pairs(
    left: pa.Table, right: pa.Table, new_left: int, new_right: int, of_left: SideRows, of_right: SideRows,
    spec: IntervalSpec,
) -> tuple[Indices, Indices]:  # fmt: skip
    """Returns the rows of both sides that match, of which one is new at least. New rows come first."""
    key_left, key_right = numbered_keys(left, right, spec.join.on)
    time_left, time_right = (
        times_us(rows.column(side.side.times.time))[0] for rows, side in ((left, of_left), (right, of_right))
    )
    found_left, found_right = [], []
    for a, b in ((slice(0, new_left), slice(0, None)), (slice(new_left, None), slice(0, new_right))):
        low, high = time_left[a] + spec.lower_us, time_left[a] + spec.upper_us
        at_left, at_right = _within(key_left[a], low, high, key_right[b], time_right[b])
        found_left.append(at_left + (a.start or 0))
        found_right.append(at_right)
    return np.concatenate(found_left), np.concatenate(found_right)


def _within(keys: Indices, low: Times, high: Times, other_keys: Indices, times: Times) -> tuple[Indices, Indices]:
    """Returns the pairs of rows with one key, of which the second has a time from `low` to `high` of the first."""
    ranks = np.unique(times)
    width = len(ranks) + 1
    place = other_keys * width + np.searchsorted(ranks, times)
    order = np.argsort(place, kind="stable")
    place = place[order]
    first = np.searchsorted(place, keys * width + np.searchsorted(ranks, low, "left"))
    end = np.searchsorted(place, keys * width + np.searchsorted(ranks, high, "right"))
    counts = np.where(keys >= 0, np.maximum(end - first, 0), 0)
    starts = np.repeat(first - np.cumsum(counts) + counts, counts)
    return np.repeat(np.arange(len(keys)), counts), order[starts + np.arange(counts.sum())]


def _changes(side: SideRows, rows: pa.Table, had: Bools, has: Bools, is_over: Bools) -> SideChanges:
    """`rows` are the new ones of the side, and then those of its state that were looked at."""
    is_old = np.arange(rows.num_rows) >= side.new.rows.num_rows
    marked = rows
    if side.side.tracks:
        at = rows.schema.get_field_index(MATCHED_COLUMN)
        marked = rows.set_column(at, rows.schema.field(at), pa.array(has))
    # Rows of the state that are not over, and got no match now, stay as they are.
    changed = is_old & (is_over | (has & ~had if side.side.tracks else False))
    stays = ~is_over & (~is_old | changed)
    _, hashes = _keys(rows, tuple(_on(side.side)), len(_on(side.side)))
    return SideChanges(
        marked.filter(pa.array(stays)), hashes[stays], rows.filter(pa.array(changed)), hashes[changed],
        is_over[changed],
    )  # fmt: skip


def beside(left: pa.Table | None, right: pa.Table | None, spec: JoinSpec, schema: pa.Schema) -> pa.Table:
    """Returns rows of the two sides beside each other, with nulls for a side that is missing."""
    present = left if left is not None else right
    assert present is not None, "one side is there"
    columns = []
    for field in schema:
        if field.name in spec.on:
            source: pa.Table | None = present
        else:
            source = next((s for s in (left, right) if s is not None and field.name in s.column_names), None)
        column = pa.nulls(present.num_rows, field.type) if source is None else source.column(field.name)
        columns.append(as_array(column))
    return pa.Table.from_arrays(columns, schema=schema)
