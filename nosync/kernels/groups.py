"""Rows of equal keys put side by side, and what becomes of the values of each group.

The hash of a key is there already, so groups come of one sort of (hash, position): where keys are many, as in a batch
over a large state, that takes a fraction of the time of a hash table, and the order is the one that layers are stored
in. Where they are few, Arrow's hash table is the faster one (`python -m bench task_parts`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from nosync.lsm.columnar.columns import Indices, as_array, fixed_view, take
from nosync.lsm.columnar.hashing import U32
from nosync.lsm.columnar.ordering import order_by_key, sort_hashes

_SAMPLE_ROWS = 1024
_FEW_SHARE = 0.85
_STRIDE = 2654435761
"""A prime, so that no pattern of rows follows it."""
_DIGITS = 76
"""The digits of the widest decimal."""
_TOO_LARGE = 2.0**63
SUM, MIN, MAX = "sum", "min", "max"
_BITS: Mapping[pa.DataType, type[np.signedinteger[Any]]] = {pa.float64(): np.int64, pa.float32(): np.int32}
"""The types whose values are compared as integers of their bits."""


@dataclass(frozen=True)
class Groups:
    """The rows of each key, in order of (hash, key)."""

    order: Indices
    """Row numbers; those of one group stand together, in the order that they came in."""
    starts: Indices
    """The place in `order` where each group begins."""

    @classmethod
    def of(cls, keys: Sequence[pa.Array], hashes: U32) -> Groups:
        """`hashes` has a hash for each row, equal where keys are. Any do, but different keys should nearly always have
        different ones.
        """
        if not any(map(_is_beyond_arrow, keys)) and _are_few(hashes):
            return cls._of_few(keys, hashes)
        return cls._of_many(keys, hashes)

    @classmethod
    def of_numbers(cls, numbers: Indices) -> Groups:
        """Returns the groups of rows whose number, of 32 bits, is known, in order of it."""
        order, ordered = sort_hashes(numbers.astype(np.uint32))
        return cls(order, np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1])[: len(order)]))

    @classmethod
    def _of_many(cls, keys: Sequence[pa.Array], hashes: U32) -> Groups:
        order, next_is_same_key = order_by_key(hashes, keys)
        begins = np.ones(len(order), dtype=np.bool_)
        begins[1:] = ~next_is_same_key
        return cls(order, np.flatnonzero(begins))

    @classmethod
    def _of_few(cls, keys: Sequence[pa.Array], hashes: U32) -> Groups:
        columns = {f"key{i}": key for i, key in enumerate(keys)}
        rows = pa.table({**columns, "row": pa.array(np.arange(len(hashes)))})
        listed = rows.group_by(list(columns), use_threads=False).aggregate([("row", "list")])
        members = as_array(listed.column("row_list"))
        first = members.flatten().to_numpy()[members.offsets.to_numpy()[:-1]]
        by_key, _ = order_by_key(np.take(hashes, first), [as_array(listed.column(name)) for name in columns])
        members = members.take(pa.array(by_key))
        return cls(members.flatten().to_numpy(), members.offsets.to_numpy()[:-1].astype(np.int64))

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def first(self) -> Indices:
        """Returns for each group the row that came first."""
        return self.order[self.starts]

    @cached_property
    def sizes(self) -> Indices:
        return np.diff(self.starts, append=len(self.order))

    @cached_property
    def numbers(self) -> Indices:
        """Returns the group of each row of `order`."""
        return np.repeat(np.arange(len(self)), self.sizes)

    def number_of_rows(self) -> Indices:
        """Returns the group of each row as it came."""
        numbers = np.empty(len(self.order), dtype=np.int64)
        numbers[self.order] = self.numbers
        return numbers

    def reduce(self, column: pa.Array, how: str) -> pa.Array:
        """Returns SUM, MIN or MAX of each group's values. Nulls are passed over, and null is what is left of nulls
        alone.

        Sums of floats add one row after the other, in the order they came in, so that equal rows give equal bits.
        """
        if not len(self):
            return column.slice(0, 0)
        if how == SUM and pa.types.is_decimal(column.type):
            return self._sum_of_decimals(column)
        if how == SUM and column.null_count and pa.types.is_integer(column.type):
            # Arrow's own sum of a column with nulls would pass 64 bits without a word.
            counted = self.reduce(column.is_valid().cast(pa.int64()), SUM)
            return pc.if_else(
                pc.greater(counted, 0), self.reduce(column.fill_null(0), SUM), pa.scalar(None, column.type)
            )
        if how != SUM and is_float(column.type):
            return self._extreme_of_floats(column, how)
        if how != SUM and pa.types.is_duration(column.type):  # which Arrow does not compare in groups
            return self.reduce(column.view(pa.int64()), how).view(column.type)
        values = fixed_view(column)
        if values is None:
            return self._reduce_by_arrow(column, how)
        values = np.take(values, self.order)
        if values.dtype.kind == "f":
            return pa.array(np.bincount(self.numbers, values, minlength=len(self)), column.type)
        if how == SUM:
            _check_sums(values, self.starts)
        reduced = {SUM: np.add, MIN: np.minimum, MAX: np.maximum}[how].reduceat(values, self.starts)
        return pa.array(reduced).view(column.type)

    def _extreme_of_floats(self, column: pa.Array, how: str) -> pa.Array:
        ordered = take(ordered_floats(column), self.order)
        is_there = ordered.is_valid().to_numpy(zero_copy_only=False)
        ends = np.iinfo(_BITS[column.type])
        values = ordered.fill_null(ends.max if how == MIN else ends.min).to_numpy()
        reduced = (np.minimum if how == MIN else np.maximum).reduceat(values, self.starts)
        is_null = ~np.logical_or.reduceat(is_there, self.starts)
        return floats_of(pa.array(reduced, mask=is_null), column.type)

    def _sum_of_decimals(self, column: pa.Array) -> pa.Array:
        """Returns the values with room for their sum, which Arrow does not check."""
        type_ = column.type
        total = self._reduce_by_arrow(column.cast(pa.decimal256(_DIGITS, type_.scale)), SUM)
        try:
            return total.cast(type_)
        except pa.ArrowInvalid:
            raise OverflowError(f"a sum has more digits than {type_}: cast the column to double before") from None

    def _reduce_by_arrow(self, column: pa.Array, how: str) -> pa.Array:
        rows = pa.table({"group": pa.array(self.numbers), "value": take(column, self.order)})
        # One thread: the order in which floats are added must not depend on scheduling.
        reduced = rows.group_by("group", use_threads=False).aggregate([("value", how)])
        return as_array(reduced.column(f"value_{how}"))


def ordered_floats(column: pa.Array) -> pa.Array:
    """Returns integers in the order that Spark has floats in: NaN, of whatever bits, is the largest. -0.0 comes before
    0.0, so that of both it is always the same one that is taken.
    """
    values = column.fill_null(0.0).to_numpy()
    bits = np.where(np.isnan(values), np.array(np.nan, values.dtype), values).view(_BITS[column.type])
    return pa.array(_in_order(bits), mask=column.is_null().to_numpy(zero_copy_only=False))


def floats_of(ordered: pa.Array, type_: pa.DataType) -> pa.Array:
    """Returns the floats of which `ordered_floats` made integers."""
    is_null = ordered.is_null().to_numpy(zero_copy_only=False)
    bits = _in_order(ordered.fill_null(0).to_numpy())
    return pa.array(bits.view(type_.to_pandas_dtype()), mask=is_null)


def is_float(type_: pa.DataType) -> bool:
    return type_ in _BITS


def _in_order(bits: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns the bits of floats as integers in the order of the floats; and such integers as the bits."""
    return np.where(bits < 0, bits ^ np.iinfo(bits.dtype).max, bits)


def _check_sums(values: npt.NDArray[Any], starts: Indices) -> None:
    """Raises OverflowError where a sum is beyond 64 bits, and would come out as another number."""
    largest = max(abs(int(values.max())), abs(int(values.min())))
    if largest * len(values) < _TOO_LARGE:
        return
    sums = np.add.reduceat(values.astype(np.float64), starts)
    ends = np.append(starts[1:], len(values))
    for group in np.flatnonzero(np.abs(sums) > 0.999 * _TOO_LARGE):  # doubles are not exact: these are summed once more
        if not -_TOO_LARGE <= sum(values[starts[group] : ends[group]].tolist()) < _TOO_LARGE:
            raise OverflowError("a sum is beyond 64 bits: cast the column to double or decimal before")


def _is_beyond_arrow(key: pa.Array) -> bool:
    """Returns whether Arrow's hash table does not take a key, or tells apart what is equal: 0.0 and -0.0."""
    types = pa.types
    return bool(types.is_floating(key.type) or types.is_nested(key.type) or types.is_duration(key.type))


def _are_few(hashes: U32) -> bool:
    """Returns whether the keys are some thousands, to go by how many different ones are in a sample of the rows."""
    if len(hashes) < _SAMPLE_ROWS:
        return False
    # Here and there: rows that came from another stage stand in order of its key.
    sample = np.take(hashes, np.arange(_SAMPLE_ROWS) * _STRIDE % len(hashes))
    return len(np.unique(sample)) < _FEW_SHARE * _SAMPLE_ROWS
