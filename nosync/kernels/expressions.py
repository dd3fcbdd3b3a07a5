"""Expressions over columns that Python evaluates itself, on Arrow: a task that reads a source's files without the JVM
(`runtime.scan`), and the driver, where it runs an epoch by itself (`runtime.local_part`).

They are of the kinds of which Arrow's functions say the same as Spark's. Where a value cannot be computed (an overflow,
say), or the two might differ in it (a NaN), Spark is asked, which fails as Spark does or, where it does not ask for
that row at all, passes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nosync.lsm.columnar.columns import Indices, as_array
from nosync.lsm.columnar.types import cast_exactly

Value: TypeAlias = "pa.ChunkedArray | pa.Scalar"
_MOST_SCALE = 38
"""Of a decimal."""
_MICROS_OF_DAY = 24 * 3600 * 1_000_000
_MICROS_OF_SECOND = 1_000_000
_FIRST_DAY, _LAST_DAY = -719_162, 2_932_896
"""Of the years 1 to 9999: Arrow has 16 bits for a year."""
_FIRST_GREGORIAN_DAY = -141_349
"""The first of 1583: of days before it, old settings of Spark name others."""


@dataclass(frozen=True)
class Expression:
    """A function of expressions; or a column, or a literal, which have none."""

    function: str = ""
    arguments: tuple[Expression, ...] = ()
    column: str = ""
    literal: pa.Scalar | None = None
    type: pa.DataType | None = None
    """The type of a function's value, where Arrow's function may have another one."""


@dataclass(frozen=True)
class Step:
    """Says what a `where` or a `select` does with rows."""

    condition: Expression | None = None
    """Rows pass for which it is true."""
    columns: Mapping[str, Expression] = field(default_factory=dict)
    """The columns that are made, if there is no condition."""


def applied(steps: Sequence[Step], rows: pa.Table) -> tuple[pa.Table, Indices]:
    """Returns what the steps return, one after the other, and by row the number of the one of `rows` that it is of.

    Raises pa.ArrowException where a value cannot be computed.
    """
    numbers: Indices = np.arange(rows.num_rows)
    for step in steps:
        if step.condition is None:
            known: dict[int, Value] = {}
            columns = [_column(evaluated(one, rows, known), rows.num_rows) for one in step.columns.values()]
            rows = pa.Table.from_arrays(columns, list(step.columns))
            continue
        passes = pc.fill_null(_column(evaluated(step.condition, rows), rows.num_rows), fill_value=False)
        numbers = numbers[passes.to_numpy()]
        rows = rows.filter(passes)
    return rows, numbers


def evaluated(expression: Expression, rows: pa.Table, known: dict[int, Value] | None = None) -> Value:
    """Returns the value of each row, or of all. `known`: values over these rows, by the ids of the objects whose they are:
    an expression that stands at several places is one object there, and is evaluated once.
    """
    if expression.column:
        return rows.column(expression.column)
    if expression.literal is not None:
        return expression.literal
    known = {} if known is None else known
    value = known.get(id(expression))
    if value is None:
        value = FUNCTIONS[expression.function](*(evaluated(one, rows, known) for one in expression.arguments))
        value = value if expression.type is None else cast_exactly(value, expression.type)
        known[id(expression)] = value
    return value


def _column(value: Value, rows: int) -> pa.ChunkedArray:
    return value if isinstance(value, pa.ChunkedArray) else pa.chunked_array([pa.repeat(value, rows)])


def _is_any(value: Value) -> bool:
    return bool((value if isinstance(value, pa.Scalar) else pc.any(value)).as_py())


def _without_nan(*values: Value) -> None:
    """Raises pa.ArrowInvalid for a NaN, which is equal to itself, and larger than all else, in Spark alone."""
    for value in values:
        if pa.types.is_floating(value.type) and _is_any(pc.is_nan(value)):
            raise pa.ArrowInvalid("a NaN is left to Spark")


def _compared(compare: Callable[[Value, Value], Value]) -> Callable[[Value, Value], Value]:
    def compared(left: Value, right: Value) -> Value:
        _without_nan(left, right)
        return compare(left, right)

    return compared


def _computed(compute: Callable[..., Value]) -> Callable[..., Value]:
    def computed(*values: Value) -> Value:
        value = compute(*values)
        _without_nan(value)
        return value

    return computed


def _is_in(value: Value, *others: Value) -> Value:
    """Returns null where the value is null, and where it is equal to none of the others and one of them is null."""
    if isinstance(value, pa.ChunkedArray) and all(isinstance(other, pa.Scalar) and other.is_valid for other in others):
        found = pc.is_in(value, value_set=pa.array([other.as_py() for other in others], value.type))
        return pc.if_else(pc.is_valid(value), found, pa.scalar(None, pa.bool_()))
    found = pc.equal(value, others[0])
    for other in others[1:]:
        found = pc.or_kleene(found, pc.equal(value, other))
    return found


def _equal_or_both_null(left: Value, right: Value) -> Value:
    _without_nan(left, right)
    both = pc.and_(pc.is_null(left), pc.is_null(right))
    return pc.or_(both, pc.fill_null(pc.equal(left, right), pa.scalar(value=False)))


def _remainder(value: Value, by: Value) -> Value:
    """Returns the remainder with the sign of `value`, as in Java. `by` is positive."""
    return pc.subtract(value, pc.multiply(pc.divide(value, by), by))


def _quotient(value: Value, by: Value) -> Value:
    """Returns the quotient of two doubles. Raises pa.ArrowInvalid for a division by zero, which is an error in Spark."""
    if _is_any(pc.equal(by, pa.scalar(0, by.type))):
        raise pa.ArrowInvalid("a division by zero is left to Spark")
    return pc.divide(value, by)


def _quotient_of_decimals(value: Value, by: Value, scale: Value) -> Value:
    """Returns the quotient of two decimals, rounded to a scale as Spark rounds: once, whatever digits are cut off before.

    Arrow gives a quotient `s1 + p2 - s2 + 1` digits behind the point, and cuts off the others. So the dividend first gets
    as many zeros as there have to be more, for a digit behind the last that a scale can have.
    """
    of, divisor = value.type, by.type
    zeros = max(0, _MOST_SCALE + 1 - (of.scale + divisor.precision - divisor.scale + 1))
    wide = value.cast(pa.decimal256(of.precision + zeros, of.scale + zeros))
    return _rounded(pc.divide(wide, by.cast(pa.decimal256(divisor.precision, divisor.scale))), scale)


def _rounded(value: Value, scale: Value) -> Value:
    """Returns decimals rounded to the nearest, halves away from zero. Their type has a place for what is rounded up: where
    there is none, Arrow returns 0.
    """
    return pc.round(value.cast(pa.decimal256(76, value.type.scale)), scale.as_py(), "half_towards_infinity")


def _chosen(condition: Value, then: Value, other: Value) -> Value:
    """Returns `other` where the condition is null, too."""
    return pc.if_else(pc.fill_null(condition, pa.scalar(value=False)), then, other)


def _first_case(*parts: Value) -> Value:
    """Returns the value beside the first condition that holds; else the last part, if there is one of its own, or null."""
    pairs = len(parts) // 2
    found = parts[-1] if len(parts) % 2 else pa.scalar(None, parts[1].type)
    for i in reversed(range(pairs)):
        found = _chosen(parts[2 * i], parts[2 * i + 1], found)
    return found


def _text(value: Value) -> Value:
    """Raises pa.ArrowInvalid for bytes that are no text, of which Spark reads the characters in its own way."""
    value.validate(full=True)
    return value


def _date(value: Value) -> Value:
    """Raises pa.ArrowInvalid for a day of a year that has more than four digits."""
    days = value.cast(pa.int32())
    if _is_any(pc.or_(pc.less(days, _FIRST_DAY), pc.greater(days, _LAST_DAY))):
        raise pa.ArrowInvalid("a date after the year 9999, or before the year 1, is left to Spark")
    return value


def _substring(value: Value, start: Value, length: Value) -> Value:
    """Returns some characters. The first one has the number 1."""
    begin = start.as_py() - 1
    return pc.utf8_slice_codeunits(_text(value), begin, begin + length.as_py())


def _without_zone(time: Value) -> Value:
    """Returns times in UTC without a zone: with one Arrow asks for a database of zones, which need not be there."""
    return time.cast(pa.int64()).cast(pa.timestamp("us"))


def _floor_divided(time: Value, by: int) -> Value:
    """Returns a time's microseconds in larger units, rounded down. Arrow cuts off, which rounds up before 1970."""
    micros = time.cast(pa.int64())
    units = pc.divide(micros, by)
    is_before = pc.less(micros, pc.multiply(units, by))
    return pc.subtract(units, is_before.cast(pa.int64()))


def _date_of(time: Value) -> Value:
    """Returns the day of times in UTC."""
    return _floor_divided(time, _MICROS_OF_DAY).cast(pa.int32()).cast(pa.date32())


def _time_of(number: Value, micros_of_unit: int) -> Value:
    """Returns the time that is a number of units after 1970. Raises pa.ArrowInvalid for one that is too far away."""
    return pc.multiply_checked(number.cast(pa.int64()), micros_of_unit).cast(pa.timestamp("us", "UTC"))


def _formatted(time: Value, pattern: Value) -> Value:
    """Returns times in UTC as texts. `pattern`: as `strftime` has it, down to whole seconds."""
    days = _date_of(time).cast(pa.int32())
    if _is_any(pc.or_(pc.less(days, _FIRST_GREGORIAN_DAY), pc.greater(days, _LAST_DAY))):
        raise pa.ArrowInvalid("a date after the year 9999, or before the year 1583, is left to Spark")
    seconds = _floor_divided(time, _MICROS_OF_SECOND).cast(pa.timestamp("s"))
    return pc.strftime(seconds, pattern.as_py(), "C")


def _in_ascii(map_: Callable[[Value], Value]) -> Callable[[Value], Value]:
    """Returns what maps texts of ASCII. Of other letters Spark may say something else: it goes by ICU, or by Java."""

    def mapped(value: Value) -> Value:
        if _is_any(pc.invert(pc.string_is_ascii(value))):
            raise pa.ArrowInvalid("letters beyond ASCII are left to Spark")
        return map_(value)

    return mapped


def _concatenated(*values: Value) -> Value:
    """Returns null where one of the texts is."""
    return pc.binary_join_element_wise(*values, pa.scalar(""), null_handling="emit_null")


def _struct(*parts: Value) -> Value:
    """Returns names and values, by turns, as a struct; of scalars alone a scalar."""
    names, values = [part.as_py() for part in parts[::2]], parts[1::2]
    size = next((len(value) for value in values if isinstance(value, pa.ChunkedArray)), None)
    if size is None:
        return pa.scalar(
            {name: value.as_py() for name, value in zip(names, values, strict=True)},
            pa.struct([pa.field(name, value.type) for name, value in zip(names, values, strict=True)]),
        )
    arrays = [as_array(_column(value, size)) for value in values]
    return pa.chunked_array([pa.StructArray.from_arrays(arrays, names=names)])


def _date_after(day: Value, days: Value) -> Value:
    return pc.add_checked(day.cast(pa.int32()), days.cast(pa.int32())).cast(pa.date32())


FUNCTIONS: Mapping[str, Callable[..., Value]] = {
    "EqualTo": _compared(pc.equal),
    "EqualNullSafe": _equal_or_both_null,
    "LessThan": _compared(pc.less),
    "LessThanOrEqual": _compared(pc.less_equal),
    "GreaterThan": _compared(pc.greater),
    "GreaterThanOrEqual": _compared(pc.greater_equal),
    "In": _is_in,
    "IsNull": pc.is_null,
    "IsNotNull": pc.is_valid,
    "Not": pc.invert,
    "And": pc.and_kleene,
    "Or": pc.or_kleene,
    "Add": _computed(pc.add_checked),
    "Subtract": _computed(pc.subtract_checked),
    "Multiply": _computed(pc.multiply_checked),
    "Divide": _computed(_quotient),
    "QuotientOfDecimals": _quotient_of_decimals,
    "Remainder": _remainder,
    "Round": _rounded,
    "UnaryMinus": pc.negate_checked,
    "Abs": _computed(pc.abs_checked),
    "If": _chosen,
    "CaseWhen": _first_case,
    "Coalesce": pc.coalesce,
    "Like": lambda value, pattern: pc.match_like(_text(value), pattern.as_py()),
    "Substring": _substring,
    "Lower": _in_ascii(pc.ascii_lower),
    "Upper": _in_ascii(pc.ascii_upper),
    "Concat": _concatenated,
    "StringReplace": lambda value, old, new: pc.replace_substring(value, old.as_py(), new.as_py()),
    "Length": lambda value: pc.utf8_length(_text(value)).cast(pa.int32()),
    "Year": lambda value: pc.year(_date(value)).cast(pa.int32()),
    "Month": lambda value: pc.month(_date(value)).cast(pa.int32()),
    "DayOfMonth": lambda value: pc.day(_date(value)).cast(pa.int32()),
    "DateAdd": _date_after,
    "DateOfTime": _date_of,
    "DateFormatClass": _formatted,
    "SecondsToTimestamp": lambda number: _time_of(number, _MICROS_OF_SECOND),
    "MillisToTimestamp": lambda number: _time_of(number, 1000),
    "MicrosToTimestamp": lambda number: _time_of(number, 1),
    "UnixSeconds": lambda time: _floor_divided(time, _MICROS_OF_SECOND),
    "UnixMillis": lambda time: _floor_divided(time, 1000),
    "UnixMicros": lambda time: time.cast(pa.int64()),
    "Hour": lambda value: pc.hour(_without_zone(value)).cast(pa.int32()),
    "Minute": lambda value: pc.minute(_without_zone(value)).cast(pa.int32()),
    "Second": lambda value: pc.second(_without_zone(value)).cast(pa.int32()),
    "CreateNamedStruct": _struct,
    "GetStructField": lambda value, ordinal: pc.struct_field(value, [ordinal.as_py()]),
    "DateDiff": lambda end, begin: pc.subtract_checked(end.cast(pa.int32()), begin.cast(pa.int32())),
    "to": lambda value: value,
}
"""The functions, by the name of Spark's class. `to` is a cast to the expression's type."""
COMPARISONS = frozenset(
    {"EqualTo", "EqualNullSafe", "LessThan", "LessThanOrEqual", "GreaterThan", "GreaterThanOrEqual"}
)
ARITHMETIC = frozenset({"Add", "Subtract", "Multiply"})
