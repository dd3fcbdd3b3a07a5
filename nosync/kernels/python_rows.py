"""Rows of Python values as Arrow columns. What would lose a part of a value is refused, as Spark refuses it.

Arrow by itself cuts the fraction off a number that is given for an integer, takes a number for a time, and leaves fields
out that a struct does not have.
"""

from __future__ import annotations

import datetime
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from decimal import Decimal
from types import NoneType
from typing import Any

import numpy as np
import pyarrow as pa

from nosync.lsm.errors import SchemaError

_Check = Callable[[Any], str | None]
"""Returns what is wrong with a value that is not null; None where Arrow may take it."""
_LARGEST_FLOAT = float(np.finfo(np.float32).max)


def table_of(rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> pa.Table:
    """Returns rows as a table; a column that a row does not have is null. Raises SchemaError naming column and value."""
    columns = [column_of([row.get(field.name) for row in rows], field) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)


def column_of(values: Iterable[Any], field: pa.Field) -> pa.Array:
    """Returns values as a column. Raises SchemaError naming the column and the value that does not fit."""
    check = None
    if isinstance(values, list | tuple):  # a column of Arrow, NumPy or pandas has a type, of which Arrow loses nothing
        check = _check_of(field.type)
        if check is not None and set(map(type, values)) <= _FINE.get(check, frozenset()):
            check = None
    for value in values:
        if check is None:
            break
        if value is not None and (wrong := check(value)) is not None:
            raise SchemaError(f"column {field.name!r} is {field.type}, and {value!r} {wrong}")
    try:
        return pa.array(values, field.type)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise SchemaError(f"column {field.name!r} is {field.type}: {error}") from error


def _check_of(type_: pa.DataType) -> _Check | None:
    """Returns what looks at values of a type; None where Arrow refuses by itself what does not fit."""
    if pa.types.is_integer(type_):
        return _is_whole
    if pa.types.is_temporal(type_):
        return _is_time
    if pa.types.is_float32(type_):
        return _is_float
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        below = _check_of(type_.value_type)
        return None if below is None else lambda value: _first(below, value)
    if pa.types.is_map(type_):
        return _map_check(_check_of(type_.key_type), _check_of(type_.item_type))
    if pa.types.is_struct(type_):
        return _struct_check({type_.field(i).name: _check_of(type_.field(i).type) for i in range(type_.num_fields)})
    return None


def _is_whole(value: Any) -> str | None:
    if isinstance(value, int):
        return None
    if not isinstance(value, numbers.Number | Decimal | np.floating):
        return None
    try:
        is_whole = value % 1 == 0  # type: ignore[operator]
    except (ArithmeticError, TypeError):  # infinite, or complex
        is_whole = False
    return None if is_whole else "is no whole number: round it, or declare another type"


def _is_time(value: Any) -> str | None:
    if isinstance(value, numbers.Number | Decimal | np.number) and not isinstance(value, np.timedelta64):
        return "is a number: give a date or a time of Python"
    return None


def _is_float(value: Any) -> str | None:
    if isinstance(value, float | int) and _LARGEST_FLOAT < abs(value) < float("inf"):
        return "is too large: declare double"
    return None


_FINE: Mapping[_Check, Set[type]] = {
    _is_whole: {int, NoneType},
    _is_time: {datetime.datetime, datetime.date, datetime.timedelta, NoneType},
}
"""Of these types nothing is lost, so no value has to be looked at."""


def _first(check: _Check, values: Iterable[Any]) -> str | None:
    """Returns what is wrong with the first of several values with which something is."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        return None
    return next((wrong for value in values if value is not None and (wrong := check(value)) is not None), None)


def _map_check(of_key: _Check | None, of_item: _Check | None) -> _Check:
    def check(value: Any) -> str | None:
        pairs = list(value.items()) if isinstance(value, Mapping) else list(value) if isinstance(value, list) else []
        found = [_first(one, [pair[i] for pair in pairs]) for i, one in enumerate((of_key, of_item)) if one is not None]
        return next((wrong for wrong in found if wrong is not None), None)

    return check


def _struct_check(fields: Mapping[str, _Check | None]) -> _Check:
    def check(value: Any) -> str | None:
        if not isinstance(value, Mapping):
            return None
        unknown = next((name for name in value if name not in fields), None)
        if unknown is not None:
            return f"has a field {unknown!r}, which is not declared"
        for name, one in fields.items():
            of_field = value.get(name)
            if one is not None and of_field is not None and (wrong := one(of_field)) is not None:
                return f"{wrong} (field {name!r})"
        return None

    return check
