"""Aggregates that need all values of a group: functions of `per_key`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nosync.kernels.joins import distinct
from nosync.kernels.own_function import OwnFunction
from nosync.lsm.columnar.columns import Indices, as_array
from nosync.lsm.columnar.hashing import hash32

VERSION = "nosync whole groups 2"
COLLECT_LIST, COLLECT_SET = "collect_list", "collect_set"
PERCENTILE, PERCENTILE_FROM_ABOVE = "percentile", "percentile_from_above"


@dataclass(frozen=True)
class OfGroup:
    """An answer about a group."""

    name: str
    how: str
    column: str
    share: float = 0.0
    """Of a percentile: how much of the values is below it."""


@dataclass(frozen=True)
class WholeGroups(OwnFunction):
    """Makes one row of all rows of each key. Nulls are passed over, and lists are in ascending order where there is one."""

    key: tuple[str, ...]
    made: tuple[OfGroup, ...]

    def __call__(self, rows: pa.Table) -> pa.Table:
        number: Indices = np.zeros(rows.num_rows, dtype=np.int64)
        first = number[:1]
        if self.key:
            keys = [as_array(rows.column(name)) for name in self.key]
            first, number = distinct(keys, hash32(keys))
        groups = rows.select(list(self.key) or rows.column_names[:1]).take(pa.array(first))
        for one in self.made:
            values = as_array(rows.column(one.column))
            there = values.is_valid().to_numpy(zero_copy_only=False)
            order = np.flatnonzero(there)
            order = order[np.lexsort((_in_order(values.take(pa.array(order))), number[order]))]
            counts = np.bincount(number[order], minlength=len(first))
            make: Callable[[pa.Array, Indices, OfGroup], pa.Array] = (
                _lists if one.how in (COLLECT_LIST, COLLECT_SET) else _percentiles
            )
            groups = groups.append_column(one.name, make(values.take(pa.array(order)), counts, one))
        return groups.select([*self.key, *(one.name for one in self.made)])


@dataclass(frozen=True)
class OnlyRow(OwnFunction):
    """Gives the only row that there is, as a scalar subquery does. Raises ValueError where there are several."""

    one: str
    column: str

    def __call__(self, rows: pa.Table) -> pa.Table:
        if rows.num_rows > 1:
            raise ValueError(
                f"a scalar subquery has {rows.num_rows} rows, expected at most one: say max(column), or ORDER BY and LIMIT 1"
            )
        return rows.select([self.one, self.column])


def _in_order(values: pa.Array) -> Indices:
    """Returns the place of each value among the others. Nested ones have no order."""
    ranks: Indices = np.arange(len(values))
    if not pa.types.is_nested(values.type):
        ranks[pc.sort_indices(values).to_numpy()] = np.arange(len(values))
    return ranks


def _lists(values: pa.Array, counts: Indices, one: OfGroup) -> pa.Array:
    offsets = np.concatenate([[0], np.cumsum(counts)])
    if one.how == COLLECT_SET and len(values):
        values = pc.add(values, pa.scalar(0.0, values.type)) if pa.types.is_floating(values.type) else values  # no -0.0
        group = np.repeat(np.arange(len(counts)), counts)
        keys = [pa.array(group), values]
        first, _ = distinct(keys, hash32(keys))
        kept = np.sort(first)
        counts = np.bincount(group[kept], minlength=len(counts))
        values, offsets = values.take(pa.array(kept)), np.concatenate([[0], np.cumsum(counts)])
    type_ = pa.list_(pa.field("element", values.type))
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values, type=type_)


def _percentiles(values: pa.Array, counts: Indices, one: OfGroup) -> pa.Array:
    """Returns the value at a share of each group's sorted values; between two it is in proportion.

    To the last digit it is what Spark 4.3 gives; 4.1 and 4.2 round otherwise, and recorded rows do not depend on that.
    """
    numbers = values.to_numpy(zero_copy_only=False)
    starts = np.cumsum(counts) - counts
    at = one.share * np.maximum(counts - 1, 0)
    low, high = np.floor(at).astype(np.int64), np.ceil(at).astype(np.int64)
    if not len(numbers):
        return pa.nulls(len(counts), pa.float64())
    beyond = at - low
    if one.how == PERCENTILE_FROM_ABOVE:  # the same, with values in their other order
        low, high = (np.maximum(counts - 1, 0) - place for place in (low, high))
    last = len(numbers) - 1
    below, above = numbers[np.minimum(starts + low, last)], numbers[np.minimum(starts + high, last)]
    with np.errstate(invalid="ignore"):  # from -Infinity on it is NaN, as in Spark
        between = np.where(below == above, below, below + (above - below) * beyond)
    return pa.array(between, pa.float64(), mask=counts == 0)
