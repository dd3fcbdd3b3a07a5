"""Expressions over columns that a task can evaluate itself, where it reads a source's files without the JVM
(`runtime.scan`).

A few kinds of them, of which Arrow's functions say the same as Spark's: comparisons of integers, texts and the like,
what is null, and, or, not, and sums of integers. Where one fails (an overflow, say) the JVM is asked, which fails as
Spark does or, where it does not ask for that row at all, passes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nosync.lsm.columnar.columns import Indices

Value: TypeAlias = "pa.ChunkedArray | pa.Scalar"


@dataclass(frozen=True)
class Expression:
    """A function of expressions; or a column, or a literal, which have none."""

    function: str = ""
    arguments: tuple[Expression, ...] = ()
    column: str = ""
    literal: pa.Scalar | None = None


@dataclass(frozen=True)
class Step:
    """Says what a `where` or a `select` does with rows."""

    condition: Expression | None = None
    """Rows pass for which it is true."""
    columns: Mapping[str, Expression] = field(default_factory=dict)
    """The columns that are made, if there is no condition."""


def applied(steps: Sequence[Step], rows: pa.Table) -> tuple[pa.Table, Indices]:
    """Returns what the steps return, one after the other, and by row the number of the one of `rows` that it is of.

    Raises pa.ArrowInvalid where a value cannot be computed.
    """
    numbers: Indices = np.arange(rows.num_rows)
    for step in steps:
        if step.condition is None:
            columns = [_column(evaluated(one, rows), rows.num_rows) for one in step.columns.values()]
            rows = pa.Table.from_arrays(columns, list(step.columns))
            continue
        passes = pc.fill_null(_column(evaluated(step.condition, rows), rows.num_rows), fill_value=False)
        numbers = numbers[passes.to_numpy()]
        rows = rows.filter(passes)
    return rows, numbers


def evaluated(expression: Expression, rows: pa.Table) -> Value:
    """Returns the value of each row, or of all."""
    if expression.column:
        return rows.column(expression.column)
    if expression.literal is not None:
        return expression.literal
    return FUNCTIONS[expression.function](*(evaluated(one, rows) for one in expression.arguments))


def _column(value: Value, rows: int) -> pa.ChunkedArray:
    return value if isinstance(value, pa.ChunkedArray) else pa.chunked_array([pa.repeat(value, rows)])


def _is_in(value: Value, *others: Value) -> Value:
    """Returns null where the value is null, and where it is equal to none of the others and one of them is null."""
    if isinstance(value, pa.ChunkedArray) and all(isinstance(other, pa.Scalar) for other in others):  # never null
        found = pc.is_in(value, value_set=pa.array([other.as_py() for other in others], value.type))
        return pc.if_else(pc.is_valid(value), found, pa.scalar(None, pa.bool_()))
    found = pc.equal(value, others[0])
    for other in others[1:]:
        found = pc.or_kleene(found, pc.equal(value, other))
    return found


def _remainder(value: Value, by: Value) -> Value:
    """Returns the remainder with the sign of `value`, as in Java. `by` is positive."""
    return pc.subtract(value, pc.multiply(pc.divide(value, by), by))


FUNCTIONS: Mapping[str, Callable[..., Value]] = {
    "EqualTo": pc.equal,
    "LessThan": pc.less,
    "LessThanOrEqual": pc.less_equal,
    "GreaterThan": pc.greater,
    "GreaterThanOrEqual": pc.greater_equal,
    "In": _is_in,
    "IsNull": pc.is_null,
    "IsNotNull": pc.is_valid,
    "Not": pc.invert,
    "And": pc.and_kleene,
    "Or": pc.or_kleene,
    "Add": pc.add_checked,
    "Subtract": pc.subtract_checked,
    "Multiply": pc.multiply_checked,
    "Remainder": _remainder,
    "to_short": lambda value: value.cast(pa.int16()),
    "to_integer": lambda value: value.cast(pa.int32()),
    "to_long": lambda value: value.cast(pa.int64()),
}
"""The functions, by the name of Spark's class."""
COMPARISONS = frozenset({"EqualTo", "LessThan", "LessThanOrEqual", "GreaterThan", "GreaterThanOrEqual", "In"})
ARITHMETIC = frozenset({"Add", "Subtract", "Multiply", "Remainder"})
