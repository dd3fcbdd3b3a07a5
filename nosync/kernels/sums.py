"""Sums that are right whatever their parts are: of whole numbers in 128 bits, of decimals in 75 digits, of floats
beside NaN.

A sum is kept in two forms. While an epoch is computed it is *wide*: no part of it overflows, so the answer does not
depend on how rows are cut into epochs, nor on the order in which they come and go. What is recorded is *narrow*: the
column that the first version recorded, and beside it columns that a layer has only where a row needs them. So layers of
before are read as they are, and what they hold is recorded again byte for byte.

    whole numbers   the sum's low 64 bits, and beside it `high`: the upper 64 bits, where the sum has more than 64
    decimals        38 digits, and beside it `wide`: 75 digits, where the sum has more than 38
    floats          over rows that change: the sum of those that are finite, and beside it how many are NaN, +inf, -inf

Floats over rows that only come need nothing beside them: a NaN never goes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from nosync.kernels.groups import SUM, Groups
from nosync.lsm.columnar.columns import Bools, as_array

Columns = dict[str, pa.Array]
I64 = npt.NDArray[np.int64]

_WORD, _HALF = 64, 32
_LOW_HALF = (1 << _HALF) - 1
_ONE_WORD = 1 << (_WORD - 1)
_DIGITS, _WIDE_DIGITS = 38, 75
"""The digits of a decimal that is recorded, and of one while it is summed. Arrow makes the sum of two one digit longer,
of 76 at most.
"""


class DoesNotFitError(ArithmeticError):
    """A sum is beyond the type of its column. `row`: which one; `cast`: the type that the column should have had."""

    def __init__(self, row: int, value: int | Decimal, beyond: str, cast: str) -> None:
        super().__init__(f"{value} is beyond {beyond}")
        self.row, self.value, self.beyond, self.cast = row, value, beyond, cast


class Sum(Protocol):
    """A way to make, combine and record a sum."""

    @property
    def memory(self) -> tuple[str, ...]:
        """Returns the columns of the wide form."""

    @property
    def beside(self) -> Mapping[str, pa.DataType]:
        """Returns the columns that a layer has only where one of its rows needs them."""

    def of_groups(self, column: pa.Array, weights: pa.Array | None, groups: Groups) -> Columns:
        """Returns the sum of each group's values, less those of weight -1. It is null where there are only nulls."""

    def widened(self, recorded: pa.Table) -> Columns:
        """Returns the wide form of what layers hold."""

    def added(self, a: Columns, b: Columns) -> Columns:
        """Returns the sum of two. One that is null adds nothing; both null stay null, as a SQL sum of no values."""

    def recorded(self, wide: Columns) -> Columns:
        """Returns the narrow form. Raises DoesNotFitError where it is the answer, which has nothing beside it."""

    def doubles(self, wide: Columns) -> pa.Array:
        """Returns the sums as the nearest doubles."""


def sum_of(output: str, name: str, type_: pa.DataType, *, retracts: bool, is_answer: bool) -> Sum:
    """Returns the way to sum into the accumulator `name`, which is recorded in `type_`.

    `retracts` says that rows can go, `is_answer` that the sum is the output itself.
    """
    if pa.types.is_integer(type_):
        return _WholeSum(name, f"__{output}_high", is_answer)
    if pa.types.is_decimal(type_):
        return _DecimalSum(name, f"__{output}_wide", type_.scale, is_answer)
    return _FiniteSum(output, name, is_answer) if retracts else _FloatSum(name)


# --- whole numbers ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _WholeSum:
    """Two's complement of 128 bits. `high` is null where it only repeats the sign of the low word."""

    low: str
    high: str
    is_answer: bool

    @property
    def memory(self) -> tuple[str, ...]:
        return (self.low, self.high)

    @property
    def beside(self) -> Mapping[str, pa.DataType]:
        return {} if self.is_answer else {self.high: pa.int64()}

    def of_groups(self, column: pa.Array, weights: pa.Array | None, groups: Groups) -> Columns:
        if not len(groups):
            return self._columns(np.empty(0, np.int64), None, None)
        valid = None
        if column.null_count:
            ordered = np.take(column.is_valid().to_numpy(zero_copy_only=False), groups.order)
            valid = np.logical_or.reduceat(ordered, groups.starts)
            column = column.fill_null(0)
        values = np.take(column.to_numpy(), groups.order)
        signs = None if weights is None else np.take(weights.to_numpy(), groups.order)
        largest = max(int(values.max()), -int(values.min()))
        if largest * int(groups.sizes.max()) < _ONE_WORD:
            values = values.astype(np.int64, copy=False)
            values = values if signs is None else values * signs
            return self._columns(np.add.reduceat(values, groups.starts), None, valid)
        halves = [
            (values >> values.dtype.type(_HALF)).astype(np.int64),
            (values & values.dtype.type(_LOW_HALF)).astype(np.int64),
        ]
        upper, lower = (np.add.reduceat(h if signs is None else h * signs, groups.starts) for h in halves)
        upper += lower >> _HALF
        return self._columns((upper << _HALF) | (lower & _LOW_HALF), upper >> _HALF, valid)

    def widened(self, recorded: pa.Table) -> Columns:
        low = as_array(recorded.column(self.low))
        high = pa.nulls(len(low), pa.int64()) if self.is_answer else as_array(recorded.column(self.high))
        return {self.low: low, self.high: high}

    def added(self, a: Columns, b: Columns) -> Columns:
        (low_a, valid_a), (low_b, valid_b) = (_numbers(side[self.low]) for side in (a, b))
        valid = None if valid_a is None or valid_b is None else valid_a | valid_b
        low = low_a + low_b
        if all(_is_empty(side[self.high]) for side in (a, b)):
            overflows = ((low_a ^ low) & (low_b ^ low)) < 0
            if not overflows.any():
                return self._columns(low, None, valid)
        carry = low.view(np.uint64) < low_a.view(np.uint64)
        high = self._upper(a, low_a) + self._upper(b, low_b) + carry
        return self._columns(low, high, valid)

    def recorded(self, wide: Columns) -> Columns:
        low, high = wide[self.low], wide[self.high]
        if not self.is_answer:
            return {self.low: low, self.high: high}
        if not _is_empty(high):
            row = int(high.is_valid().index(True).as_py())
            value = (high[row].as_py() << _WORD) | (low[row].as_py() & ((1 << _WORD) - 1))
            raise DoesNotFitError(row, value, "the 64 bits of a bigint", f"DECIMAL({_DIGITS}, 0)")
        return {self.low: low}

    def doubles(self, wide: Columns) -> pa.Array:
        low, high = wide[self.low], wide[self.high]
        found = low.cast(pa.float64(), safe=False)
        if _is_empty(high):
            return found
        words = low.fill_null(0).to_numpy().view(np.uint64).astype(np.float64)
        sums = high.fill_null(0).to_numpy().astype(np.float64) * 2.0**_WORD + words
        return pc.if_else(high.is_valid(), pa.array(sums), found)

    def _upper(self, side: Columns, low: I64) -> I64:
        high, is_there = _numbers(side[self.high])
        sign = low >> (_WORD - 1)
        return high if is_there is None else np.where(is_there, high, sign)

    def _columns(self, low: I64, high: I64 | None, valid: Bools | None) -> Columns:
        none = pa.nulls(len(low), pa.int64())
        repeats = None if high is None else high == low >> (_WORD - 1)
        return {
            self.low: pa.array(low, mask=None if valid is None else ~valid),
            self.high: none if high is None else pa.array(high, mask=repeats),
        }


def _numbers(column: pa.Array) -> tuple[I64, Bools | None]:
    """Returns the values, and which rows have one. None: all rows have."""
    if not column.null_count:
        return column.to_numpy(), None
    return column.fill_null(0).to_numpy(), column.is_valid().to_numpy(zero_copy_only=False)


def _is_empty(column: pa.Array) -> bool:
    return bool(column.null_count == len(column))


# --- decimals --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _DecimalSum:
    name: str
    wide: str
    scale: int
    is_answer: bool

    @property
    def memory(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def beside(self) -> Mapping[str, pa.DataType]:
        return {} if self.is_answer else {self.wide: self._type}

    @property
    def _type(self) -> pa.DataType:
        return pa.decimal256(_WIDE_DIGITS, self.scale)

    @property
    def _narrow(self) -> pa.DataType:
        return pa.decimal128(_DIGITS, self.scale)

    def of_groups(self, column: pa.Array, weights: pa.Array | None, groups: Groups) -> Columns:
        values = column.cast(self._type)
        if weights is not None:
            values = pc.if_else(pc.greater(weights, 0), values, pc.negate(values))
        return {self.name: groups.reduce(values, SUM)}

    def widened(self, recorded: pa.Table) -> Columns:
        found = as_array(recorded.column(self.name)).cast(self._type)
        if not self.is_answer:
            found = pc.coalesce(as_array(recorded.column(self.wide)), found)
        return {self.name: found}

    def added(self, a: Columns, b: Columns) -> Columns:
        left, right = a[self.name], b[self.name]
        return {self.name: pc.coalesce(pc.add(left, right).cast(self._type), left, right)}

    def recorded(self, wide: Columns) -> Columns:
        sums = wide[self.name]
        nothing = {} if self.is_answer else {self.wide: pa.nulls(len(sums), self._type)}
        try:
            return {self.name: sums.cast(self._narrow), **nothing}
        except pa.ArrowInvalid:
            limit = pa.scalar(Decimal(10) ** (_DIGITS - self.scale), self._type)
        fits = pc.less(pc.abs(sums), limit).fill_null(True)
        if self.is_answer:
            row = int(fits.index(False).as_py())
            raise DoesNotFitError(row, sums[row].as_py(), f"the {_DIGITS} digits of a decimal", "DOUBLE")
        none = pa.scalar(None, self._type)
        return {
            self.name: pc.if_else(fits, sums, none).cast(self._narrow),
            self.wide: pc.if_else(fits, none, sums),
        }

    def doubles(self, wide: Columns) -> pa.Array:
        return wide[self.name].cast(pa.float64())


# --- floats ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _FloatSum:
    """Over rows that only come, so that weights do not matter."""

    name: str

    @property
    def memory(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def beside(self) -> Mapping[str, pa.DataType]:
        return {}

    def of_groups(self, column: pa.Array, weights: pa.Array | None, groups: Groups) -> Columns:
        return {self.name: groups.reduce(column.cast(pa.float64()), SUM)}

    def widened(self, recorded: pa.Table) -> Columns:
        return {self.name: as_array(recorded.column(self.name))}

    def added(self, a: Columns, b: Columns) -> Columns:
        return {self.name: _sum_of_floats(a[self.name], b[self.name])}

    def recorded(self, wide: Columns) -> Columns:
        return wide

    def doubles(self, wide: Columns) -> pa.Array:
        return wide[self.name]


def _sum_of_floats(a: pa.Array, b: pa.Array) -> pa.Array:
    return pc.coalesce(pc.add(a, b), a, b)


@dataclass(frozen=True)
class _FiniteSum:
    """Over rows that change. Where the sum is the answer, the sum of what is finite is beside it.

    A sum that a version before made NaN or infinite stays so: how many such values there are was not recorded.
    """

    output: str
    name: str
    is_answer: bool

    @property
    def memory(self) -> tuple[str, ...]:
        return (self.name, *self._counts)

    @property
    def beside(self) -> Mapping[str, pa.DataType]:
        finite = {self._finite: pa.float64()} if self.is_answer else {}
        return finite | dict.fromkeys(self._counts, pa.int64())

    @property
    def _finite(self) -> str:
        return f"__{self.output}_finite"

    @property
    def _counts(self) -> tuple[str, str, str]:
        return (f"__{self.output}_nan", f"__{self.output}_inf", f"__{self.output}_neginf")

    def of_groups(self, column: pa.Array, weights: pa.Array | None, groups: Groups) -> Columns:
        values = column.cast(pa.float64())
        is_finite = pc.is_finite(values)
        counts = [pa.nulls(len(groups), pa.int64())] * 3
        if not pc.all(is_finite).as_py():
            kinds = (pc.is_nan(values), pc.equal(values, np.inf), pc.equal(values, -np.inf))
            counts = [_count(kind, weights, groups) for kind in kinds]
            values = pc.if_else(is_finite, values, pa.scalar(0.0))
        if weights is not None:
            values = pc.if_else(pc.greater(weights, 0), values, pc.negate(values))
        return {self.name: groups.reduce(values, SUM), **dict(zip(self._counts, counts, strict=True))}

    def widened(self, recorded: pa.Table) -> Columns:
        finite = as_array(recorded.column(self.name))
        if self.is_answer:
            finite = pc.coalesce(as_array(recorded.column(self._finite)), finite)
        return {self.name: finite, **{name: as_array(recorded.column(name)) for name in self._counts}}

    def added(self, a: Columns, b: Columns) -> Columns:
        counts = {name: counts_added(a[name], b[name]) for name in self._counts}
        return {self.name: _sum_of_floats(a[self.name], b[self.name]), **counts}

    def recorded(self, wide: Columns) -> Columns:
        if not self.is_answer:
            return wide
        finite = wide[self.name]
        beside = {name: wide[name] for name in self._counts}
        if all(map(_is_empty, beside.values())):
            return {self.name: finite, self._finite: pa.nulls(len(finite), pa.float64()), **beside}
        is_beside = pc.is_valid(pc.coalesce(*beside.values()))
        kept = pc.if_else(is_beside, finite, pa.scalar(None, pa.float64()))
        return {self.name: self.doubles(wide), self._finite: kept, **beside}

    def doubles(self, wide: Columns) -> pa.Array:
        found = wide[self.name]
        if all(_is_empty(wide[name]) for name in self._counts):
            return found
        nan, inf, neginf = (wide[name].fill_null(0).to_numpy() for name in self._counts)
        # Fewer than none: a version before recorded what came, and not that it did.
        is_nan = (nan != 0) | ((inf != 0) & (neginf != 0)) | (inf < 0) | (neginf < 0)
        answers = (np.nan, np.inf, -np.inf)
        for mask, answer in zip((is_nan, ~is_nan & (inf > 0), ~is_nan & (neginf > 0)), answers, strict=True):
            found = pc.if_else(pa.array(mask), pa.scalar(answer), found)
        return found


def _count(kind: pa.Array, weights: pa.Array | None, groups: Groups) -> pa.Array:
    """Returns how many rows of each group are of a kind. It is null for none."""
    ones = kind.fill_null(False).cast(pa.int64())
    return _none_if_zero(groups.reduce(ones if weights is None else pc.multiply(ones, weights), SUM))


def count_not_finite(column: pa.Array, weights: pa.Array | None, groups: Groups) -> pa.Array:
    """Returns how many values of each group are NaN or infinite. It is null for none."""
    return _count(pc.invert(pc.is_finite(column)), weights, groups)


def counts_added(a: pa.Array, b: pa.Array) -> pa.Array:
    """Returns the sum of two counts that are null for none."""
    if _is_empty(a) and _is_empty(b):
        return a
    return _none_if_zero(pc.add(a.fill_null(0), b.fill_null(0)))


def _none_if_zero(counts: pa.Array) -> pa.Array:
    return pc.if_else(pc.equal(counts, 0), pa.scalar(None, pa.int64()), counts)
