"""Window functions of SQL: a column for each row that depends on its place among the rows of its partition.

A function of `per_key`. Rows are sorted once by partition and order; then everything is arithmetic on places. Rows that
the order does not tell apart stay in the order in which `per_key` gives them, which is that of their contents. So the
answer is the same in each run, where Spark's depends on how rows were shuffled.
"""

from __future__ import annotations

import decimal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nosync.kernels.joins import distinct
from nosync.kernels.own_function import OwnFunction
from nosync.lsm.columnar.columns import Bools, Indices, as_array
from nosync.lsm.columnar.hashing import hash32

VERSION = "nosync window functions 1"
"""It stands for the code below in fingerprints: another one is for other answers."""
WHOLE, ROWS, PEERS = "whole", "rows", "peers"
"""Frames: the whole partition; its rows up to this one; those up to this one and all that the order puts beside it."""
RANKS = ("row_number", "rank", "dense_rank", "percent_rank", "cume_dist", "ntile")
SHIFTS = ("lag", "lead")
PLACES = ("first_value", "last_value", "nth_value")
_MOST = 2**63
_DIGITS = decimal.Context(prec=80)


@dataclass(frozen=True)
class Order:
    """A column by which rows of a partition are ordered."""

    column: str
    ascending: bool = True
    nulls_first: bool = True


@dataclass(frozen=True)
class Between:
    """A frame of rows by their places: `ROWS BETWEEN 6 PRECEDING AND CURRENT ROW` is from -6 to 0."""

    lower: int | None
    """None: from the begin of the partition."""
    upper: int | None
    """None: to its end."""


@dataclass(frozen=True)
class Within:
    """A frame of rows by the values that they are ordered by: `RANGE BETWEEN 6 PRECEDING AND CURRENT ROW` is from -6 to 0.

    Of times these are microseconds, of dates days, and of decimals units of their last digit. 0 is for all rows that the
    order puts beside this one. Where there is another number, there is one column to order by.
    """

    lower: float | None
    """None: from the begin of the partition."""
    upper: float | None
    """None: to its end."""


@dataclass(frozen=True)
class OverColumn:
    """A column that is made: one of `RANKS` or `SHIFTS`, or count, sum, avg, min, max or one of `PLACES` of a frame."""

    name: str
    function: str
    type: pa.DataType
    column: str | None = None
    """The column that it is of; None: it is of places only, or counts rows."""
    frame: str | Between | Within = WHOLE
    number: int = 1
    """How many rows lag and lead go, how many parts ntile makes, and which value of a frame nth_value is, from 1."""
    default: str | None = None
    """The column with what lag and lead give where there is no such row."""
    ignores_nulls: bool = False
    """Says whether `SHIFTS` and `PLACES` pass over nulls."""


@dataclass(frozen=True)
class OverPartition(OwnFunction):
    """A function of rows of whole partitions, which adds columns to them."""

    key: tuple[str, ...]
    order: tuple[Order, ...]
    columns: tuple[OverColumn, ...]
    drops: tuple[str, ...] = ()
    """Columns that are only there for this, and not in the result."""

    def __call__(self, rows: pa.Table) -> pa.Table:
        made = Partitions.of(rows, self.key, self.order)
        back = np.empty(rows.num_rows, dtype=np.int64)
        back[made.by_place] = np.arange(rows.num_rows)
        for column in self.columns:
            values = made.column(rows, column)
            rows = rows.append_column(column.name, values.take(pa.array(back)).cast(column.type))
        return rows.drop_columns(list(self.drops))


@dataclass(frozen=True)
class Partitions:
    """Rows in order of partition and place. All arrays but the first are by that order."""

    by_place: Indices
    """The row at each place."""
    start: Indices
    """The place where each row's partition begins."""
    end: Indices
    """The place after the last row of each row's partition."""
    peer_start: Indices
    peer_end: Indices
    """The places where the rows begin and end that the order puts beside each row."""
    order: tuple[Order, ...] = ()

    @classmethod
    def of(cls, rows: pa.Table, key: Sequence[str], order: Sequence[Order]) -> Partitions:
        n = rows.num_rows
        partition: Indices = np.zeros(n, dtype=np.int64)
        if key:
            keys = [as_array(rows.column(name)) for name in key]
            _, partition = distinct(keys, hash32(keys))
        codes = [_codes(as_array(rows.column(one.column)), one) for one in order]
        by_place = np.lexsort((*reversed(codes), partition))  # which is stable
        new_partition, new_peer = np.ones(n, dtype=np.bool_), np.ones(n, dtype=np.bool_)
        new_partition[1:] = np.diff(partition[by_place]) != 0
        new_peer[1:] = new_partition[1:]
        for code in codes:
            new_peer[1:] |= np.diff(code[by_place]) != 0
        return cls(by_place, *_bounds(new_partition), *_bounds(new_peer), tuple(order))

    def column(self, rows: pa.Table, column: OverColumn) -> pa.Array:
        """Returns the values of a column that is made, by place."""
        if column.function in RANKS:
            return pa.array(self._rank(column.function, column.number))
        given = None if column.column is None else as_array(rows.column(column.column)).take(pa.array(self.by_place))
        if column.function in SHIFTS:
            assert given is not None, "lag and lead are of a column"
            default = None
            if column.default is not None:
                default = as_array(rows.column(column.default)).take(pa.array(self.by_place))
            by = column.number if column.function == "lead" else -column.number
            return self._shifted(given, by, default, ignores_nulls=column.ignores_nulls)
        frame = self._within(rows, column.frame) if isinstance(column.frame, Within) else self._frame(column.frame)
        return self._over_frame(given, column, frame)

    def _rank(self, function: str, number: int) -> Any:
        place = np.arange(len(self.by_place))
        rows = self.end - self.start
        if function == "row_number":
            return place - self.start + 1
        if function == "rank":
            return self.peer_start - self.start + 1
        if function == "dense_rank":
            groups = np.cumsum(self.peer_start == place)
            return groups - np.take(groups, self.start) + 1 if len(place) else groups
        if function == "percent_rank":
            return (self.peer_start - self.start) / np.maximum(rows - 1, 1)
        if function == "cume_dist":
            return (self.peer_end - self.start) / rows
        assert function == "ntile", function
        size, larger = rows // number, rows % number
        at = place - self.start
        in_larger = at < larger * (size + 1)
        return np.where(in_larger, at // (size + 1), larger + (at - larger * (size + 1)) // np.maximum(size, 1)) + 1

    def _shifted(self, given: pa.Array, by: int, default: pa.Array | None, *, ignores_nulls: bool) -> pa.Array:
        at = np.arange(len(given)) + by
        if ignores_nulls and by:
            valid = _valid(given)
            at = _Counted(valid).place(at - by + (by > 0), by if by < 0 else by - 1)
        inside = (at >= self.start) & (at < self.end)
        found = given.take(pa.array(at, mask=~inside))
        return found if default is None else pc.if_else(pa.array(inside), found, default.cast(found.type))

    def _frame(self, frame: str | Between) -> _Frame:
        places = np.arange(len(self.by_place))
        if not isinstance(frame, Between):
            return _Frame(self.start, {WHOLE: self.end, ROWS: places + 1, PEERS: self.peer_end}[frame])
        end = self.end if frame.upper is None else np.clip(places + frame.upper + 1, self.start, self.end)
        return _Frame(self.start if frame.lower is None else np.clip(places + frame.lower, self.start, end), end)

    def _within(self, rows: pa.Table, frame: Within) -> _Frame:
        """Returns the frame of each row by values."""
        begin = self.start if frame.lower is None else self.peer_start
        end = self.end if frame.upper is None else self.peer_end
        if frame.lower or frame.upper:
            lowest, highest = self._searched(rows, frame.lower or 0, frame.upper or 0)
            begin, end = lowest if frame.lower else begin, highest if frame.upper else end
        end = np.maximum(end, self.start)
        return _Frame(np.minimum(begin, end), end)

    def _searched(self, rows: pa.Table, lower: float, upper: float) -> tuple[Indices, Indices]:
        """Returns where the neighbours of each row begin and end by values, found by one search in all partitions."""
        (order,) = self.order
        column = as_array(rows.column(order.column)).take(pa.array(self.by_place))
        valid = _valid(column)
        values = _as_numbers(column)[valid]
        sign, n = 1 if order.ascending else -1, len(values)
        bounds = [_shifted_by(values, sign * by) for by in (lower, upper)]
        # Numbers in the order of values and bounds; those of nulls are before or after all others.
        codes = np.unique(np.concatenate([values, *bounds]), return_inverse=True)[1] + 1
        most = int(codes.max(initial=0)) + 1
        codes = codes if order.ascending else most - codes
        searched: list[Indices] = []
        for found in (codes[:n], codes[n : 2 * n], codes[2 * n :]):
            of_all = np.full(len(valid), 0 if order.nulls_first else most, dtype=np.int64)
            of_all[valid] = found
            searched.append(self.start * (most + 1) + of_all)
        places, lowest, highest = searched
        return np.searchsorted(places, lowest, side="left"), np.searchsorted(places, highest, side="right")

    def _over_frame(self, given: pa.Array | None, column: OverColumn, frame: _Frame) -> pa.Array:
        valid = np.ones(len(self.by_place), dtype=np.bool_) if given is None else _valid(given)
        if column.function in PLACES:
            assert given is not None, "they are of a column"
            return given.take(_at_place(valid, frame, column))
        count = self._sums(valid.astype(np.int64), frame)
        if column.function == "count":
            return pa.array(count)
        assert given is not None, f"{column.function} is of a column"
        nothing = count == 0
        if column.function in ("min", "max"):
            codes = _codes(given, Order("", ascending=column.function == "min", nulls_first=False))
            return given.take(pa.array(_first_of_smallest(codes, frame), mask=nothing))
        if pa.types.is_decimal(given.type):
            scale = given.type.scale
            sums = self._sums(np.array(_units(given), dtype=object), frame)
            shown = [None if none else _decimal(int(v), scale) for v, none in zip(sums, nothing, strict=True)]
            return pa.array(shown, column.type)
        numbers = pc.fill_null(given, pa.scalar(0, given.type)).to_numpy(zero_copy_only=False)
        if column.function == "sum" and pa.types.is_integer(given.type):
            return pa.array(self._whole_sums(numbers.astype(np.int64), frame), pa.int64(), mask=nothing)
        sums = self._sums(numbers.astype(np.float64), frame)
        if column.function == "sum":
            return pa.array(sums, mask=nothing)
        return pa.array(sums / np.maximum(count, 1), mask=nothing)

    def _whole_sums(self, values: Any, frame: _Frame) -> Any:
        """Returns sums of integers. Raises OverflowError for one that 64 bits do not have."""
        if float(np.abs(values.astype(np.float64)).sum()) < _MOST / 2:  # half of it: doubles are rounded
            return self._sums(values, frame)
        sums = self._sums(values.astype(object), frame)
        beyond = next((value for value in sums if not -_MOST <= value < _MOST), None)
        if beyond is not None:
            raise OverflowError(
                f"a sum is {beyond}, which is beyond 64 bits: cast what is summed to double or a decimal"
            )
        return sums.astype(np.int64)

    def _sums(self, values: Any, frame: _Frame) -> Any:
        """Returns the sum of each row's frame. Floats are added up in the order of its rows, as Spark does."""
        if values.dtype != np.float64:
            running = np.zeros(len(values) + 1, dtype=values.dtype)
            np.cumsum(values, out=running[1:])  # where it wraps around 64 bits, so does the difference
            return running[frame.end] - running[frame.begin]
        if not np.array_equal(frame.begin, self.start):
            return _sums_in_order(values, frame)
        running = np.empty(len(values), dtype=values.dtype)
        starts = np.flatnonzero(self.start == np.arange(len(values)))
        for start, stop in zip(starts, np.append(starts[1:], len(values)), strict=True):
            np.cumsum(values[start:stop], out=running[start:stop])
        running += 0.0  # as sums begin with it: there is no -0.0
        return np.where(frame.is_empty, 0, running[frame.end - 1]) if len(values) else running


@dataclass(frozen=True)
class _Frame:
    """The rows that each row is computed from: those at the places from `begin` to before `end`, of its partition."""

    begin: Indices
    end: Indices

    @property
    def is_empty(self) -> Bools:
        empty: Bools = self.begin >= self.end
        return empty


class _Counted:
    """Finds the places of values that count, such as those that are not null."""

    def __init__(self, counts: Bools) -> None:
        self._before = np.concatenate([[0], np.cumsum(counts)])
        self._places = np.concatenate([[-1], np.flatnonzero(counts), [len(self._before)]])

    def place(self, begin: Indices, number: int) -> Indices:
        """Returns the place of the value with a number, counted from a place on, where 0 is the first there and -1 the
        last before it; -1 or a place beyond all where there is none.
        """
        found: Indices = self._places[np.clip(self._before[begin] + number + 1, 0, len(self._places) - 1)]
        return found


def _sums_in_order(values: Any, frame: _Frame) -> Any:
    """Returns sums, added up in the order of the rows: a row of each frame at a time, for the frames that have one left."""
    found = np.zeros(len(values), dtype=values.dtype)
    frames = np.flatnonzero(~frame.is_empty)
    at, end = frame.begin[frames], frame.end[frames]
    while len(frames):
        found[frames] += values[at]
        at += 1
        is_left = at < end
        if not is_left.all():
            frames, at, end = frames[is_left], at[is_left], end[is_left]
    return found


def _first_of_smallest(codes: Indices, frame: _Frame) -> Indices:
    """Returns the place of the smallest code of each row's frame, the first of several.

    Two blocks of places, as long as a power of two, cover a frame. The smallest of a block is that of its halves.
    """
    n = len(codes)
    best: Indices = np.minimum(frame.begin, max(n - 1, 0))
    smallest, size = np.arange(n), 1
    left = np.flatnonzero(~frame.is_empty)
    while len(left):
        begin, end = frame.begin[left], frame.end[left]
        covered = end - begin <= 2 * size
        here = left[covered]
        best[here] = _smaller(codes, smallest[begin[covered]], smallest[end[covered] - size])
        left, halves = left[~covered], smallest[size:]
        smallest = _smaller(codes, smallest[: len(halves)], halves)
        size *= 2
    return best


def _smaller(codes: Indices, left: Indices, right: Indices) -> Indices:
    chosen: Indices = np.where(codes[right] < codes[left], right, left)
    return chosen


def _at_place(valid: Bools, frame: _Frame, column: OverColumn) -> pa.Array:
    """Returns the place of the value that one of `PLACES` is, in each row's frame."""
    last = column.function == "last_value"
    number = column.number - 1 if column.function == "nth_value" else 0
    at = frame.end - 1 if last else frame.begin + number
    if column.ignores_nulls:
        counted = _Counted(valid)
        at = counted.place(frame.end, -1) if last else counted.place(frame.begin, number)
    outside = frame.is_empty | (at < frame.begin) | (at >= frame.end)
    return pa.array(np.where(outside, 0, at), mask=outside)


def _valid(values: pa.Array) -> Bools:
    valid: Bools = values.is_valid().to_numpy(zero_copy_only=False)
    return valid


def _bounds(begins: Bools) -> tuple[Indices, Indices]:
    """Returns the place where each row's group begins, and the place after its end."""
    n = len(begins)
    number = np.cumsum(begins) - 1
    starts = np.append(np.flatnonzero(begins), n)
    return starts[:-1][number], starts[1:][number]


def _codes(values: pa.Array, order: Order) -> Indices:
    """Returns numbers that are in the order of values; equal ones have the same."""
    valid = _valid(values)
    codes: Indices = np.zeros(len(values), dtype=np.int64)
    if pa.types.is_floating(values.type):  # NaN is the largest, and equal to itself; -0.0 is 0.0
        numbers = values.to_numpy(zero_copy_only=False)[valid] + 0.0
        codes[valid] = np.unique(numbers, return_inverse=True)[1]
    else:
        values = values.cast(pa.int8()) if pa.types.is_boolean(values.type) else values
        there = values.filter(pa.array(valid))
        different = pc.unique(there)
        ranked = np.empty(len(different), dtype=np.int64)
        ranked[pc.sort_indices(different).to_numpy()] = np.arange(len(different))
        codes[valid] = ranked[pc.index_in(there, different).to_numpy()]
    if not order.ascending:
        codes = -codes
    codes[~valid] = np.iinfo(np.int64).min if order.nulls_first else np.iinfo(np.int64).max
    return codes


def _as_numbers(values: pa.Array) -> Any:
    """Returns numbers, one for each value: of dates days, of times microseconds, of decimals units of their last digit.
    Those of nulls mean nothing.
    """
    if pa.types.is_floating(values.type):  # a float stays one: 0.1 beside it is no double
        return values.fill_null(0.0).to_numpy(zero_copy_only=False) + values.type.to_pandas_dtype()(0)
    if pa.types.is_decimal(values.type):
        return np.array(_units(values), dtype=object)
    if pa.types.is_date(values.type):
        values = values.cast(pa.int32())
    elif pa.types.is_timestamp(values.type):
        values = values.cast(pa.timestamp("us", values.type.tz)).cast(pa.int64())
    return values.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)


def _shifted_by(values: Any, by: float) -> Any:
    """Returns values and a number, added; a sum beyond 64 bits is the last number there."""
    if values.dtype != np.int64:
        return values + (values.dtype.type(by) if values.dtype != object else int(by))
    whole = int(by)
    last = np.iinfo(np.int64).max if whole >= 0 else np.iinfo(np.int64).min
    fits = values <= last - whole if whole >= 0 else values >= last - whole
    return np.where(fits, values + np.where(fits, whole, 0), last)


def _decimal(value: int, scale: int) -> decimal.Decimal:
    return decimal.Decimal(value).scaleb(-scale, _DIGITS)


def _units(values: pa.Array) -> list[int]:
    """Returns decimals in units of their last digit. Those of nulls are 0."""
    scale = values.type.scale
    return [0 if v is None else int(v.scaleb(scale, _DIGITS)) for v in values.to_pylist()]
