"""What differs between two states, with values that only their smallest parts tell apart."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from nosync.checkpoints.names import Batch
from nosync.checkpoints.restore import Restored
from nosync.checkpoints.state_diff import state_diff

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


class StatesInParquet:
    """A session whose reader of states reads Parquet files."""

    def __init__(self, spark: SparkSession) -> None:
        self.read, self._spark = self, spark

    def format(self, name: str) -> Any:
        assert name == "statestore"
        return self._spark.read.format("parquet")


def changes(spark: SparkSession, root: Path, *states: str) -> list[tuple[str, str | None, str | None]]:
    views = []
    for t, rows in enumerate(states):
        frame = spark.sql(
            f"SELECT 0 AS partition_id, struct(k) AS key, struct(v) AS value FROM VALUES {rows} AS s(k, v)"
        )
        frame.write.parquet(str(root / str(t)))
        views.append(Restored(root / str(t), Batch(t), 1, repeats_offsets=False))
    found = state_diff(cast("SparkSession", StatesInParquet(spark)), views[0], views[1], {})
    texts = found.selectExpr("change", "CAST(before.v AS string)", "CAST(after.v AS string)").collect()
    return sorted(map(tuple, texts), key=str)


def test_times_differ_by_a_microsecond(spark: SparkSession, tmp_path: Path) -> None:
    for type_ in ("TIMESTAMP", "TIMESTAMP_NTZ"):
        first, second = (f"{type_} '2026-01-01 00:00:00.{digits}'" for digits in ("123456", "123999"))
        of_value = changes(spark, tmp_path / type_ / "v", f"(1, {first})", f"(1, {second})")
        assert [change for change, _, _ in of_value] == ["update"]
        of_key = changes(spark, tmp_path / type_ / "k", f"({first}, 1), ({second}, 1)", f"({first}, 1), ({second}, 2)")
        assert of_key == [("update", "1", "2")]
        assert changes(spark, tmp_path / type_ / "same", f"(1, {first})", f"(1, {first})") == []


def test_a_struct_of_nulls_is_not_a_null(spark: SparkSession, tmp_path: Path) -> None:
    nothing, nulls = "CAST(NULL AS struct<a: int>)", "named_struct('a', CAST(NULL AS int))"
    assert [one[0] for one in changes(spark, tmp_path, f"(1, {nothing})", f"(1, {nulls})")] == ["update"]


def test_several_rows_of_a_key_are_told_one_by_one(spark: SparkSession, tmp_path: Path) -> None:
    before = "(1, 'a'), (1, 'a'), (1, 'b'), (2, 'x'), (3, 'y')"
    assert changes(spark, tmp_path / "same", before, before) == []
    found = changes(spark, tmp_path / "other", before, "(1, 'a'), (1, 'b'), (1, 'b'), (2, 'x'), (2, 'x'), (4, 'z')")
    assert found == sorted(
        [("update", "a", "b"), ("insert", None, "x"), ("delete", "y", None), ("insert", None, "z")], key=str
    )


def test_states_of_lists_and_maps_have_other_columns(spark: SparkSession, tmp_path: Path) -> None:
    views = []
    for t, rows in enumerate(["(1, 'a', 5), (1, 'b', 6)", "(1, 'a', 5), (1, 'b', 7)"]):
        frame = spark.sql(
            f"""SELECT struct(k) AS key, struct(m) AS user_map_key, struct(v) AS user_map_value, 0 AS partition_id
                FROM VALUES {rows} AS s(k, m, v)"""
        )
        frame.write.parquet(str(tmp_path / str(t)))
        views.append(Restored(tmp_path / str(t), Batch(t), 1, repeats_offsets=False))
    found = state_diff(cast("SparkSession", StatesInParquet(spark)), views[0], views[1], {})
    row = "CAST(to_json({0}) AS string)"
    assert [tuple(one) for one in found.selectExpr("change", row.format("before"), row.format("after")).collect()] == [
        (
            "update",
            '{"user_map_key":{"m":"b"},"user_map_value":{"v":6}}',
            '{"user_map_key":{"m":"b"},"user_map_value":{"v":7}}',
        )
    ]
