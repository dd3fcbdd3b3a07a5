"""Stages as tables and streams of any Spark program."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import nosync
from tests.conftest import OpenStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark


@pytest.fixture
def store(open_store: OpenStore, spark: SparkSession) -> nosync.Store:
    nosync.register(spark)
    store = open_store()
    for t in range(4):
        _append(store, t)
    return store


def _append(store: nosync.Store, t: int) -> None:
    for shard in range(2):
        rows = pa.table({"k": [shard, shard + 10 * (t + 2)], "v": [t, -t], "__hidden": [0, 0]})
        gone = pa.table({"k": pa.array([shard + 10 * (t + 1)] if t else [], pa.int64())})
        store.append("kv", t=t, shard=shard, rows=rows, key=["k"], deletes=gone)
    store.seal(t)


def _load(spark: SparkSession, store: nosync.Store, **options: Any) -> DataFrame:
    reader = spark.read.format("nosync").option("stage", "kv")
    for name, value in options.items():
        reader = reader.option(name, value)
    return reader.load(str(store.directory.root))


def _rows(frame: DataFrame) -> list[tuple[Any, ...]]:
    return sorted(tuple(row) for row in frame.collect())


def test_states(spark: SparkSession, store: nosync.Store) -> None:
    assert _load(spark, store).columns == ["k", "v"]
    for t in range(4):
        expected = sorted(tuple(row.values()) for row in store.read("kv", as_of=t).to_pylist())
        assert _rows(_load(spark, store, asOf=t)) == expected
    assert _rows(_load(spark, store)) == _rows(_load(spark, store, asOf=3))
    assert _load(spark, store).rdd.getNumPartitions() == 2


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "condition", ["k = 1", "v >= 3 AND k < 5", "v = -3", "k IN (0, 50)", "k > 0 OR v < 0", "k IS NULL"]
)
def test_filters_in_the_task_and_in_spark_agree(spark: SparkSession, store: nosync.Store, condition: str) -> None:
    expected = _rows(spark.createDataFrame(store.read("kv")).where(condition))
    assert _rows(_load(spark, store).where(condition).select("k", "v")) == expected


@pytest.mark.few(1)
@pytest.mark.parametrize("condition", ["x > 1", "x >= 1.5", "x <= 1", "x = double('NaN')", "x <> 2"])
def test_nan_is_what_it_is_to_spark(spark: SparkSession, open_store: OpenStore, condition: str) -> None:
    nosync.register(spark)
    with open_store() as store:
        rows = pa.table({"k": [1, 2, 3, 4], "x": [1.0, 2.0, float("nan"), None]})
        store.append("xs", t=0, rows=rows, key=["k"])
        store.seal(0)
        expected = _rows(spark.createDataFrame(rows).where(condition).select("k"))
        found = spark.read.format("nosync").option("stage", "xs").load(str(store.directory.root))
        assert _rows(found.where(condition).select("k")) == expected


def test_change_feed(spark: SparkSession, store: nosync.Store) -> None:
    feed = _load(spark, store, readChangeFeed="true", startingEpoch=2, endingEpoch=3)
    assert feed.columns == ["k", "v", "_change_type", "_epoch"]
    assert _rows(feed) == sorted(tuple(row.values()) for row in store.changes("kv", 1, 3).to_pylist())
    everything = _load(spark, store, readChangeFeed="true")
    assert _rows(everything) == sorted(tuple(row.values()) for row in store.changes("kv", -1, 3).to_pylist())


def test_the_change_feed_as_a_stream(spark: SparkSession, store: nosync.Store, tmp_path: Path) -> None:
    def read_on() -> list[tuple[Any, ...]]:
        stream = (
            spark.readStream.format("nosync").option("stage", "kv").option("readChangeFeed", "true")
            .load(str(store.directory.root))
        )  # fmt: skip
        out, checkpoint = str(tmp_path / "out"), str(tmp_path / "cp")
        query = stream.writeStream.format("parquet").option("checkpointLocation", checkpoint).start(out)
        query.processAllAvailable()
        query.stop()
        return _rows(spark.read.parquet(out))

    assert read_on() == sorted(tuple(row.values()) for row in store.changes("kv", -1, 3).to_pylist())
    _append(store, 4)
    assert read_on() == sorted(tuple(row.values()) for row in store.changes("kv", -1, 4).to_pylist())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"asof": "x"}, "neither the number of an epoch nor a time"),
        ({"stage": "nope"}, "recorded stages: kv"),
        ({"asOf": 77}, "recorded up to 3"),
        ({"colour": "red"}, "has no option 'colour'"),
    ],
)
def test_mistakes(spark: SparkSession, store: nosync.Store, options: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):  # Spark wraps what a data source raises
        _load(spark, store, **options).collect()


@pytest.mark.parametrize("unit", ["s", "ms", "us"])
def test_filters_are_of_times_as_spark_has_them(spark: SparkSession, open_store: OpenStore, unit: str) -> None:
    store = open_store()
    at = pa.array([3, 4], pa.int64()).cast(pa.timestamp("s", "UTC")).cast(pa.timestamp(unit, "UTC"))
    store.append("s", t=0, rows=pa.table({"id": [1, 2], "at": at}), key=["id"])
    store.seal(0)
    rows = _load(spark, store, stage="s")
    cached = rows.cache()
    for comparison in ("=", ">", ">=", "<", "<="):
        for fraction in ("", ".0005", ".5"):
            condition = f"at {comparison} timestamp_seconds(3) + INTERVAL 0{fraction} SECOND"
            literal = f"at {comparison} TIMESTAMP '1970-01-01 00:00:03{fraction}Z'"
            expected = sorted(row.id for row in cached.where(condition).collect())
            assert sorted(row.id for row in _load(spark, store, stage="s").where(literal).collect()) == expected, (
                literal
            )
    cached.unpersist()


def test_a_column_that_spark_has_no_type_for(
    spark: SparkSession, open_store: OpenStore, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store()
    for stage, type_ in (("odd", pa.uint8()), ("plain", pa.int16())):
        store.append(stage, t=0, rows=pa.table({"id": [1], "n": pa.array([7], type_)}), key=["id"])
    store.seal(0)
    assert nosync.views(spark, store, prefix="typed_") == {"plain": "typed_plain"}
    assert "stage odd: column 'n' is uint8, and Spark does not read that" in caplog.text
    assert spark.sql("SELECT n FROM typed_plain").collect()[0].n == 7
    spark.catalog.dropTempView("typed_plain")
    with pytest.raises(Exception, match="stage odd: column 'n' is uint8, and Spark does not read that"):
        _load(spark, store, stage="odd")


def test_the_feed_of_epochs_before_other_columns_came(spark: SparkSession, open_store: OpenStore) -> None:
    store = open_store(retain=10)
    store.append("s", t=0, rows=pa.table({"id": [1], "n": [1]}), key=["id"])
    store.seal(0)
    before = _load(spark, store, stage="s")
    store.append("s", t=1, rows=pa.table({"id": [2], "n": [2], "more": [3]}), key=["id"])
    store.seal(1)
    feed = _load(spark, store, stage="s", readChangeFeed="true", endingEpoch=0)
    assert "more" not in feed.columns
    assert [row.id for row in feed.collect()] == [1]
    assert sorted(row.id for row in before.collect()) == [1, 2], "of the columns that it was made with"
    with pytest.raises(Exception, match="stage s has no column 'other' there; it has id, n, more"):
        spark.read.format("nosync").schema("id bigint, other bigint").option("stage", "s").load(
            store.source_path
        ).collect()
    with pytest.raises(
        Exception, match="startingEpoch=9 is after the last epoch that is asked for: the newest epoch is 1"
    ):
        _load(spark, store, stage="s", readChangeFeed="true", startingEpoch=9).collect()
