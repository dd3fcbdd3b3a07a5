"""What differs in the state of a query between two batches, by Spark's own reader of states."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from nosync.checkpoints.names import StateFile, parse
from nosync.checkpoints.restore import Restored
from nosync.checkpoints.spark_files import read_variables
from nosync.lsm.errors import InvalidInputError

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


FORMAT_OF_STATES = "spark.sql.streaming.stateStore.checkpointFormatVersion"
_WHOLE = (
    "map('timestampFormat', 'yyyy-MM-dd HH:mm:ss.SSSSSSXXX', 'timestampNTZFormat', 'yyyy-MM-dd HH:mm:ss.SSSSSS', "
    "'ignoreNullFields', 'false')"
)
"""Options of `to_json` with which different values have different texts: by itself it leaves out what is below a millisecond,
and fields that are null.
"""
_OF_READER = ("partition_id", "key")
_OF_ENTRY = ("user_map_key", "expiration_timestamp_ms")
"""Columns that, with the key, say which entry of a map's state, or which timer, a row is."""


def state_diff(spark: SparkSession, before: Restored, after: Restored, options: Mapping[str, str]) -> DataFrame:
    """Returns the keys whose state differs, with the columns partition_id, key, change, before and after.

    `change` is insert, update or delete. `before` and `after`: views of a checkpoint, as `Checkpoint.at` makes them.
    `options`: of Spark's `statestore` reader, such as operatorId, storeName, joinSide and stateVarName. Where a key has
    several rows, as on a side of a join, those that both have are left out, and of the others each is a change. Raises
    InvalidInputError where the states have format v2, and the session does not read it.
    """
    if str(spark.conf.get(FORMAT_OF_STATES, "1")) != "2" and any(map(_is_of_format_2, (before.path, after.path))):
        raise InvalidInputError(
            "the states have format v2, which Spark reads where the session says so: "
            f'spark.conf.set("{FORMAT_OF_STATES}", "2")'
        )
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


def _is_of_format_2(view: Path) -> bool:
    paths = (path.relative_to(view).as_posix() for path in view.glob("state/*/*/**/*.*"))
    return any(isinstance(file, StateFile) and file.id is not None for file in map(parse, paths))


def variables_in(view: Path) -> list[str]:
    """Returns the state variables of transformWithState that a view of a checkpoint has: what `stateVarName` may be."""
    found: dict[str, None] = {}
    for path in sorted(view.glob("state/*/_metadata/v2/*")):
        found |= dict.fromkeys(read_variables(path.read_bytes(), str(path)))
    return list(found)


def _texts_of(rows: DataFrame) -> DataFrame:
    """Returns the states of keys with a text of each, for keys and values may hold maps, which do not compare."""
    from pyspark.sql import functions as F  # noqa: PLC0415 - checkpoints are kept without Spark, too

    of_entry = [name for name in _OF_ENTRY if name in rows.columns]
    rest = [name for name in rows.columns if name not in (*_OF_READER, *of_entry)]
    value = _fields_of(rows, "value") if rest == ["value"] else F.struct(*rest)
    key = _fields_of(rows, "key")
    if of_entry:
        key = F.struct(key.alias("key"), *(_fields_of(rows, name).alias(name) for name in of_entry))
    read = rows.select("partition_id", key.alias("key"), (value if rest else F.lit(None)).alias("value"))
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
