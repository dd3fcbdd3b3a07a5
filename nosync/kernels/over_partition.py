"""Window functions of SQL: a column for each row that depends on its place among the rows of its partition.

A function of `per_key`. Rows are sorted once by partition and order; then everything is arithmetic on places. Rows that
the order does not tell apart stay in the order in which `per_key` gives them, which is that of their contents. So the
answer is the same in each run, where Spark's depends on how rows were shuffled.
"""

from __future__ import annotations

import decimal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nosync.kernels.joins import distinct
from nosync.lsm.columnar.columns import Bools, Indices, as_array
from nosync.lsm.columnar.hashing import hash32

VERSION = "nosync window functions 1"
"""It stands for the code below in fingerprints: another one is for other answers."""
WHOLE, ROWS, PEERS = "whole", "rows", "peers"
"""Frames: the whole partition; its rows up to this one; those up to this one and all that the order puts beside it."""
RANKS = ("row_number", "rank", "dense_rank", "percent_rank", "cume_dist", "ntile")
SHIFTS = ("lag", "lead")
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
    upper: int


@dataclass(frozen=True)
class Within:
    """A frame of rows by the values that they are ordered by: `RANGE BETWEEN 6 PRECEDING AND CURRENT ROW` is from -6 to 0.

    Of times these are microseconds, and of dates days. There is one column to order by.
    """

    lower: float | None
    """None: from the begin of the partition."""
    upper: float


@dataclass(frozen=True)
class OverColumn:
    """A column that is made: one of `RANKS` or `SHIFTS`, or count, sum, avg, min, max, first_value or last_value of a frame."""

    name: str
    function: str
    type: pa.DataType
    column: str | None = None
    """The column that it is of; None: it is of places only, or counts rows."""
    frame: str | Between | Within = WHOLE
    number: int = 1
    """How many rows lag and lead go, and how many parts ntile makes."""
    default: str | None = None
    """The column with what lag and lead give where there is no such row."""
    ignores_nulls: bool = False
    """Says whether first_value and last_value pass over nulls."""


@dataclass(frozen=True)
class OverPartition:
    """A function of rows of whole partitions, which adds columns to them."""

    key: tuple[str, ...]
    order: tuple[Order, ...]
    columns: tuple[OverColumn, ...]
    drops: tuple[str, ...] = ()
    """Columns that are only there for this, and not in the result."""

    def __call__(self, rows: pa.Table) -> pa.Table:
        made = _Partitions.of(rows, self.key, self.order)
        back = np.empty(rows.num_rows, dtype=np.int64)
        back[made.by_place] = np.arange(rows.num_rows)
        for column in self.columns:
            values = made.column(rows, column)
            rows = rows.append_column(column.name, values.take(pa.array(back)).cast(column.type))
        return rows.drop_columns(list(self.drops))


@dataclass(frozen=True)
class _Partitions:
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
    def of(cls, rows: pa.Table, key: Sequence[str], order: Sequence[Order]) -> _Partitions:
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
            return self._shifted(given, column.number if column.function == "lead" else -column.number, default)
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

    def _shifted(self, given: pa.Array, by: int, default: pa.Array | None) -> pa.Array:
        at = np.arange(len(given)) + by
        inside = (at >= self.start) & (at < self.end)
        found = given.take(pa.array(at, mask=~inside))
        return found if default is None else pc.if_else(pa.array(inside), found, default)

    def _frame(self, frame: str | Between) -> _Frame:
        places = np.arange(len(self.by_place))
        if not isinstance(frame, Between):
            return _Frame(self.start, {WHOLE: self.end, ROWS: places + 1, PEERS: self.peer_end}[frame])
        end = np.clip(places + frame.upper + 1, self.start, self.end)
        if frame.lower is None:
            return _Frame(self.start, end)
        widest = int((self.end - self.start).max(initial=0))
        offsets = range(max(frame.lower, -widest), min(frame.upper, widest) + 1)
        return _Frame(np.clip(places + frame.lower, self.start, end), end, offsets)

    def _within(self, rows: pa.Table, frame: Within) -> _Frame:
        """Returns the frame of each row by values: its neighbours are found by one search in all partitions."""
        (order,) = self.order
        column = as_array(rows.column(order.column)).take(pa.array(self.by_place))
        valid = column.is_valid().to_numpy(zero_copy_only=False)
        values = _as_numbers(column)[valid]
        sign, n = 1 if order.ascending else -1, len(values)
        bounds = [values if by is None else _shifted_by(values, sign * by) for by in (frame.lower, frame.upper)]
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
        end = np.maximum(np.searchsorted(places, highest, side="right"), self.start)
        if frame.lower is None:
            return _Frame(self.start, end)
        begin = np.minimum(np.searchsorted(places, lowest, side="left"), end)
        at = np.arange(len(valid))
        return _Frame(begin, end, range(int((begin - at).min(initial=0)), int((end - at).max(initial=0))))

    def _over_frame(self, given: pa.Array | None, column: OverColumn, frame: _Frame) -> pa.Array:
        valid = np.ones(len(self.by_place), dtype=np.bool_)
        if given is not None:
            valid = given.is_valid().to_numpy(zero_copy_only=False)
        if column.function in ("first_value", "last_value"):
            assert given is not None, "they are of a column"
            return given.take(_at_ends(valid, frame, column))
        count = self._sums(valid.astype(np.int64), frame)
        if column.function == "count":
            return pa.array(count)
        assert given is not None, f"{column.function} is of a column"
        nothing = count == 0
        if column.function in ("min", "max"):
            codes = _codes(given, Order("", ascending=column.function == "min", nulls_first=False))
            best = self._first_of_smallest(codes, frame)
            return given.take(pa.array(best, mask=nothing))
        if pa.types.is_decimal(given.type):
            scale = given.type.scale
            whole = [0 if v is None else int(v.scaleb(scale, _DIGITS)) for v in given.to_pylist()]
            sums = self._sums(np.array(whole, dtype=object), frame)
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
        """Returns the sum of each row's frame, added up in the order of the rows and within its partition only."""
        if frame.offsets is not None:
            found = np.zeros(len(values), dtype=values.dtype)
            for at, inside in frame.rows_at():
                found[inside] += values[at]
            return found
        running = np.empty(len(values), dtype=values.dtype)
        starts = np.flatnonzero(self.start == np.arange(len(values)))
        for start, stop in zip(starts, np.append(starts[1:], len(values)), strict=True):
            np.cumsum(values[start:stop], out=running[start:stop])
        return np.where(frame.is_empty, 0, running[frame.end - 1]) if len(values) else running

    def _first_of_smallest(self, codes: Indices, frame: _Frame) -> Indices:
        """Returns the place of the smallest code of each row's frame, the first of several."""
        n = len(codes)
        if frame.offsets is not None:
            chosen = np.minimum(frame.begin, max(n - 1, 0))
            for at, inside in frame.rows_at():
                smaller = codes[at] < codes[chosen[inside]]
                chosen[inside] = np.where(smaller, at, chosen[inside])
            return chosen
        best = np.empty(n, dtype=np.int64)
        starts = np.flatnonzero(self.start == np.arange(n))
        for start, stop in zip(starts, np.append(starts[1:], n), strict=True):
            smallest = np.minimum.accumulate(codes[start:stop])
            is_new = np.ones(stop - start, dtype=np.bool_)
            is_new[1:] = np.diff(smallest) != 0
            best[start:stop] = start + np.maximum.accumulate(np.where(is_new, np.arange(stop - start), 0))
        return best[frame.end - 1] if n else best


@dataclass(frozen=True)
class _Frame:
    """The rows that each row is computed from: those at the places from `begin` to before `end`, of its partition."""

    begin: Indices
    end: Indices
    offsets: range | None = None
    """How far the rows of a frame are from its own row, where it does not begin with its partition."""

    @property
    def is_empty(self) -> Bools:
        empty: Bools = self.begin >= self.end
        return empty

    def rows_at(self) -> Iterator[tuple[Indices, Bools]]:
        """Yields, offset by offset, the places of the rows that are so far from others, and which others have one."""
        assert self.offsets is not None, "it does not begin with its partition"
        places = np.arange(len(self.begin))
        for offset in self.offsets:
            inside = (places + offset >= self.begin) & (places + offset < self.end)
            yield places[inside] + offset, inside


def _at_ends(valid: Bools, frame: _Frame, column: OverColumn) -> pa.Array:
    """Returns the first or the last place of each row's frame, or that of a value that is not null."""
    n, places = len(valid), np.arange(len(valid))
    if column.function == "first_value":
        at = np.minimum(frame.begin, max(n - 1, 0))
        if column.ignores_nulls and n:
            following = np.append(np.minimum.accumulate(np.where(valid, places, n)[::-1])[::-1], n)
            at = following[frame.begin]
        return pa.array(np.minimum(at, max(n - 1, 0)), mask=frame.is_empty | (at >= frame.end))
    at = frame.end - 1
    if column.ignores_nulls and n:
        at = np.maximum.accumulate(np.where(valid, places, -1))[at]
    return pa.array(np.maximum(at, 0), mask=frame.is_empty | (at < frame.begin))


def _bounds(begins: Bools) -> tuple[Indices, Indices]:
    """Returns the place where each row's group begins, and the place after its end."""
    n = len(begins)
    number = np.cumsum(begins) - 1
    starts = np.append(np.flatnonzero(begins), n)
    return starts[:-1][number], starts[1:][number]


def _codes(values: pa.Array, order: Order) -> Indices:
    """Returns numbers that are in the order of values; equal ones have the same."""
    valid = values.is_valid().to_numpy(zero_copy_only=False)
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
    """Returns numbers, one for each value: of dates days, of times microseconds. Those of nulls mean nothing."""
    if pa.types.is_floating(values.type):
        return values.to_numpy(zero_copy_only=False).astype(np.float64) + 0.0
    if pa.types.is_date(values.type):
        values = values.cast(pa.int32())
    elif pa.types.is_timestamp(values.type):
        values = values.cast(pa.timestamp("us", values.type.tz)).cast(pa.int64())
    return values.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)


def _shifted_by(values: Any, by: float) -> Any:
    """Returns values and a number, added; a sum beyond 64 bits is the last number there."""
    if values.dtype != np.int64:
        return values + by
    whole = int(by)
    last = np.iinfo(np.int64).max if whole >= 0 else np.iinfo(np.int64).min
    fits = values <= last - whole if whole >= 0 else values >= last - whole
    return np.where(fits, values + np.where(fits, whole, 0), last)


def _decimal(value: int, scale: int) -> decimal.Decimal:
    return decimal.Decimal(value).scaleb(-scale, _DIGITS)
