"""Maps as lists of their entries, in order of their keys: Spark compares and groups those rightly.

It groups by maps too, from 4.0 on, but loses which of their values are null (Spark 4.3: null becomes 0).
"""

from __future__ import annotations

from collections.abc import Callable

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, MapType, StructType

from nosync.spark.expressions import quoted

Convert = Callable[[Column], Column]


def without_maps(rows: DataFrame) -> tuple[DataFrame, Callable[[DataFrame], DataFrame]]:
    """Returns rows with lists in the place of maps, at any depth, and a function that makes maps of these again."""
    columns = {field.name: field.dataType for field in rows.schema if _has_map(field.dataType)}
    if not columns:
        return rows, lambda found: found
    changed = rows.withColumns({name: _entries(type_)(F.col(quoted(name))) for name, type_ in columns.items()})

    def back(found: DataFrame) -> DataFrame:
        return found.withColumns({name: _maps(type_)(F.col(quoted(name))) for name, type_ in columns.items()})

    return changed, back


def comparable(column: Column, type_: DataType) -> Column:
    """Returns a value of a type with lists in the place of maps."""
    return _entries(type_)(column) if _has_map(type_) else column


def _has_map(type_: DataType) -> bool:
    if isinstance(type_, StructType):
        return any(_has_map(field.dataType) for field in type_)
    return isinstance(type_, MapType) or (isinstance(type_, ArrayType) and _has_map(type_.elementType))


def _entries(type_: DataType) -> Convert:
    if isinstance(type_, MapType):
        value = _entries(type_.valueType)
        return lambda column: F.sort_array(
            F.transform(
                F.map_entries(column), lambda one: F.struct(one["key"].alias("key"), value(one["value"]).alias("value"))
            )
        )
    return _inside(type_, _entries)


def _maps(type_: DataType) -> Convert:
    if isinstance(type_, MapType):
        value = _maps(type_.valueType)
        return lambda column: F.map_from_entries(
            F.transform(column, lambda one: F.struct(one["key"].alias("key"), value(one["value"]).alias("value")))
        )
    return _inside(type_, _maps)


def _inside(type_: DataType, convert: Callable[[DataType], Convert]) -> Convert:
    """Returns what converts the parts of a list or a struct that has maps in it."""
    if not _has_map(type_):
        return lambda column: column
    if isinstance(type_, ArrayType):
        element = convert(type_.elementType)
        return lambda column: F.transform(column, element)
    assert isinstance(type_, StructType), type_
    fields = [(field.name, convert(field.dataType)) for field in type_]

    def of_struct(column: Column) -> Column:
        made = F.struct(*(of_field(column[name]).alias(name) for name, of_field in fields))
        return F.when(column.isNotNull(), made)

    return of_struct
