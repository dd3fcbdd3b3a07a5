"""What differs in the state of a query between two batches, by Spark's own reader of states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from nosync.checkpoints.restore import Restored

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


_WHOLE = (
    "map('timestampFormat', 'yyyy-MM-dd HH:mm:ss.SSSSSSXXX', 'timestampNTZFormat', 'yyyy-MM-dd HH:mm:ss.SSSSSS', "
    "'ignoreNullFields', 'false')"
)
"""Options of `to_json` with which different values have different texts: by itself it leaves out what is below a millisecond,
and fields that are null.
"""


_OF_READER = ("partition_id", "key")


def state_diff(spark: SparkSession, before: Restored, after: Restored, options: Mapping[str, str]) -> DataFrame:
    """Returns the keys whose state differs, with the columns partition_id, key, change, before and after.

    `change` is insert, update or delete. `before` and `after`: views of a checkpoint, as `Checkpoint.at` makes them.
    `options`: of Spark's `statestore` reader, such as operatorId, storeName, joinSide and stateVarName. Where a key has
    several rows, as on a side of a join, those that both have are left out, and of the others each is a change.
    """
    states = [spark.read.format("statestore").options(**options).load(str(view.path)) for view in (before, after)]
    gone, come = (
        _only_in(_texts_of(states[0]), _texts_of(states[1])),
        _only_in(_texts_of(states[1]), _texts_of(states[0])),
    )
    places = ["partition_id", "key_text", "place"]
    both = gone.selectExpr(*places, "key AS before_key", "value AS before", "true AS is_gone").join(
        come.selectExpr(*places, "key AS after_key", "value AS after", "true AS has_come"), places, "full_outer"
    )
    return both.selectExpr(
        "partition_id",
        "coalesce(before_key, after_key) AS key",
        "CASE WHEN is_gone IS NULL THEN 'insert' WHEN has_come IS NULL THEN 'delete' ELSE 'update' END AS change",
        "before",
        "after",
    )


def _texts_of(rows: DataFrame) -> DataFrame:
    """Returns the states of keys with a text of each, for keys and values may hold maps, which do not compare."""
    rest = [name for name in rows.columns if name not in _OF_READER]
    value = _fields_of(rows, "value") if rest == ["value"] else _struct_of(rest)
    read = rows.selectExpr("partition_id", f"{_fields_of(rows, 'key')} AS key", f"{value} AS value")
    return read.selectExpr(
        "*",
        f"to_json(named_struct('k', key), {_WHOLE}) AS key_text",
        f"to_json(named_struct('v', value), {_WHOLE}) AS text",
    )


def _fields_of(rows: DataFrame, column: str) -> str:
    """Returns an expression of a column with the fields of its type: rows of a join have one more, which `to_json` meets."""
    type_ = rows.schema[column].dataType
    fields = [f"'{_escaped(name)}', {column}.{_quoted(name)}" for name in getattr(type_, "names", ())]
    return f"CASE WHEN {column} IS NOT NULL THEN named_struct({', '.join(fields)}) END" if fields else column


def _struct_of(names: Sequence[str]) -> str:
    return f"struct({', '.join(map(_quoted, names))})"


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _escaped(name: str) -> str:
    return name.replace("\\", "\\\\").replace("'", "\\'")


def _only_in(rows: DataFrame, others: DataFrame) -> DataFrame:
    """Returns the rows that are not among the others, as often as they are not, with a place among those of their key."""
    from pyspark.sql import functions as F  # noqa: PLC0415 - checkpoints are kept without Spark, too

    same = ["partition_id", "key_text", "text"]
    mine = rows.groupBy(*same).agg(
        F.count("*").alias("n"), F.first("key").alias("key"), F.first("value").alias("value")
    )
    theirs = others.groupBy(*same).agg(F.count("*").alias("theirs"))
    left = mine.join(theirs, same, "left").selectExpr("*", "n - coalesce(theirs, 0) AS more").where("more > 0")
    each = left.selectExpr("partition_id", "key_text", "text", "key", "value", "explode(sequence(1L, more)) AS i")
    return each.selectExpr("*", "row_number() OVER (PARTITION BY partition_id, key_text ORDER BY text, i) AS place")
