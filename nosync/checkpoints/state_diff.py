"""What differs in the state of a query between two batches, by Spark's own reader of states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from nosync.checkpoints.restore import Restored

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


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
    old, new = map(_texts_of, states)
    gone, come = _only_in(old, new), _only_in(new, old)
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
    from pyspark.sql import functions as F  # noqa: PLC0415 - checkpoints are kept without Spark, too

    rest = [name for name in rows.columns if name not in _OF_READER]
    value = _fields_of(rows, "value") if rest == ["value"] else F.struct(*rest)
    read = rows.select("partition_id", _fields_of(rows, "key").alias("key"), value.alias("value"))
    return read.selectExpr(
        "*",
        f"to_json(named_struct('k', key), {_WHOLE}) AS key_text",
        f"to_json(named_struct('v', value), {_WHOLE}) AS text",
    )


def _fields_of(rows: DataFrame, name: str) -> Column:
    """Returns a column with the fields that its type has: rows of a join have one more, which `to_json` meets."""
    from pyspark.sql import functions as F  # noqa: PLC0415 - checkpoints are kept without Spark, too

    column = F.col(name)
    fields = [column.getField(field).alias(field) for field in getattr(rows.schema[name].dataType, "names", ())]
    return F.when(column.isNotNull(), F.struct(*fields)) if fields else column


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
