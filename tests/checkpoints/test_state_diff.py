"""What differs between two states, with values that only their smallest parts tell apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from nosync.checkpoints.names import Batch
from nosync.checkpoints.restore import Restored
from nosync.checkpoints.state_diff import state_diff, variables_in
from nosync.lsm.errors import InvalidInputError
from tests.checkpoints.fake_query import FakeQuery

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


class StatesInParquet:
    """A session whose reader of states reads Parquet files."""

    def __init__(self, spark: SparkSession) -> None:
        self.read, self.conf, self._spark = self, spark.conf, spark

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


def views_of(spark: SparkSession, root: Path, names: str, columns: str, *states: str) -> list[Restored]:
    views = []
    for t, rows in enumerate(states):
        frame = spark.sql(f"SELECT {columns}, 0 AS partition_id FROM VALUES {rows} AS s({names})")
        frame.write.parquet(str(root / str(t)))
        views.append(Restored(root / str(t), Batch(t), 1, repeats_offsets=False))
    return views


def test_an_entry_of_a_map_is_compared_with_that_of_its_key(spark: SparkSession, tmp_path: Path) -> None:
    columns = "struct(k) AS key, struct(m) AS user_map_key, struct(v) AS user_map_value"
    views = views_of(spark, tmp_path, "k, m, v", columns, "(1, 'a', 5), (1, 'b', 6)", "(1, 'b', 7), (1, 'c', 8)")
    found = state_diff(cast("SparkSession", StatesInParquet(spark)), views[0], views[1], {})
    texts = [f"CAST(to_json({name}) AS string)" for name in ("key", "before", "after")]
    key, value = '{{"key":{{"k":1}},"user_map_key":{{"m":"{}"}}}}'.format, '{{"user_map_value":{{"v":{}}}}}'.format
    assert sorted(map(tuple, found.selectExpr("change", *texts).collect())) == [
        ("delete", key("a"), value(5), None),
        ("insert", key("c"), None, value(8)),
        ("update", key("b"), value(6), value(7)),
    ]


def test_a_timer_that_goes_and_one_that_comes_are_two(spark: SparkSession, tmp_path: Path) -> None:
    columns = "struct(k) AS key, at AS expiration_timestamp_ms"
    views = views_of(spark, tmp_path, "k, at", columns, "(1, 10), (2, 10)", "(1, 11), (2, 10)")
    found = state_diff(cast("SparkSession", StatesInParquet(spark)), views[0], views[1], {})
    texts = found.selectExpr("change", "CAST(to_json(key) AS string)").collect()
    timer = '{{"key":{{"k":1}},"expiration_timestamp_ms":{}}}'.format
    assert sorted(map(tuple, texts)) == [("delete", timer(10)), ("insert", timer(11))]


def test_states_of_the_second_format_need_a_session_that_reads_them(spark: SparkSession, tmp_path: Path) -> None:
    query = FakeQuery(tmp_path / "ck", "v2")
    query.run(3)
    views = [Restored(query.root, Batch(t), 1, repeats_offsets=False) for t in (1, 2)]
    with pytest.raises(InvalidInputError, match=r'have format v2.*checkpointFormatVersion", "2"'):
        state_diff(spark, views[0], views[1], {})


def test_the_variables_of_a_query_are_known(tmp_path: Path) -> None:
    said = {"stateVariables": [{"stateName": "clicks"}, {"stateName": "$eventTimers"}, {"stateName": "seen"}]}
    metadata = {"operatorInfo": {}, "stateStoreInfo": [], "operatorPropertiesJson": json.dumps(said)}
    path = tmp_path / "state/0/_metadata/v2/3"
    path.parent.mkdir(parents=True)
    path.write_text("v2\n" + json.dumps(metadata))
    assert variables_in(tmp_path) == ["clicks", "seen"]
