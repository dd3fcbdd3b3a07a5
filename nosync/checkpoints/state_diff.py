"""What differs in the state of a query between two batches, by Spark's own reader of states."""

from __future__ import annotations

from collections.abc import Mapping
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


def state_diff(spark: SparkSession, before: Restored, after: Restored, options: Mapping[str, str]) -> DataFrame:
    """Returns the keys whose state differs, with the columns partition_id, key, change, before and after.

    `change` is insert, update or delete. `before` and `after`: views of a checkpoint, as `Checkpoint.at` makes them.
    `options`: of Spark's `statestore` reader, such as operatorId, storeName, joinSide and stateVarName.
    """

    def read(view: Restored, side: str) -> DataFrame:
        found = spark.read.format("statestore").options(**options).load(str(view.path))
        # As text: keys and values may hold maps, which do not compare.
        return found.selectExpr(
            "partition_id", f"to_json(key, {_WHOLE}) AS text", f"key AS {side}_key", f"value AS {side}"
        )

    both = read(before, "before").join(read(after, "after"), ["partition_id", "text"], "full_outer")
    compared = both.selectExpr(
        "partition_id",
        "coalesce(before_key, after_key) AS key",
        "CASE WHEN before_key IS NULL THEN 'insert' WHEN after_key IS NULL THEN 'delete' ELSE 'update' END AS change",
        "before",
        "after",
    )
    return compared.where(
        f"change <> 'update' OR NOT (to_json(named_struct('v', before), {_WHOLE}) "
        f"<=> to_json(named_struct('v', after), {_WHOLE}))"
    )
