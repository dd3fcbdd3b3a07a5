"""A table to join with has the rows that it had when the job was made, whatever becomes of where they came from."""

from __future__ import annotations

import gc
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import nosync
from nosync.spark import static_tables
from tests.conftest import OpenStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

GIVEN = "k string, n bigint"


def labels(spark: SparkSession, path: Path, **of: str) -> DataFrame:
    """Writes labels in the place of those that were there, and returns them."""
    shutil.rmtree(path, ignore_errors=True)
    rows = spark.createDataFrame(list(of.items()), "k string, label string")
    rows.coalesce(1).write.parquet(str(path))
    return spark.read.parquet(str(path))


def flow_with(table: DataFrame) -> nosync.Dataflow:
    flow = nosync.Dataflow("labelled")
    named = flow.source("events", GIVEN).join_static("named", table, on=["k"], how="left")
    named.aggregate("sums", key=["label"], n=nosync.sum("n"))
    return flow


def state(job: nosync.Job, stage: str = "named", as_of: int | None = None) -> list[tuple[object, ...]]:
    return sorted((tuple(row) for row in job.read(stage, as_of=as_of).collect()), key=repr)


@pytest.mark.parametrize("few_rows", [0, 10_000], ids=["large", "small"])
@pytest.mark.parametrize("then", ["replaced", "removed"])
def test_what_becomes_of_the_files_changes_nothing(
    spark: SparkSession,
    open_store: OpenStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    few_rows: int,
    then: str,
) -> None:
    monkeypatch.setattr(static_tables, "FEW_ROWS", few_rows)
    path, store = tmp_path / "labels", open_store()
    events = spark.createDataFrame([("a", 1), ("b", 2)], GIVEN)
    job = nosync.Job(flow_with(labels(spark, path, a="one")), store, spark=spark, shards=2)
    job.advance(0, {"events": events})
    before = [("a", 1, "one"), ("b", 2, None)]
    assert state(job) == before
    if then == "replaced":
        other = labels(spark, path, a="uno", b="due")
    else:
        shutil.rmtree(path)
    if few_rows == 0 and then == "replaced":  # Spark forgets what it kept of files that a session writes to
        with pytest.raises(nosync.FlowError, match=r"stage named: the table that it joins with has other rows"):
            job.advance(1, {"events": events})
        assert store.last_sealed() == 0
        return
    job.advance(1, {"events": events})
    assert state(job, as_of=0) == before
    assert state(job) == sorted(2 * before, key=repr)
    assert state(job, "sums") == [("one", 2), (None, 4)]
    shutil.rmtree(store.directory.root / "layers" / "sums")
    job.recover()
    assert state(job, "sums") == [("one", 2), (None, 4)]
    if then == "replaced":  # what reads the files now has the new rows
        plan = job.plan_upgrade(flow_with(other))
        assert "sums" in str(plan)
        assert sorted(map(tuple, other.collect())) == [("a", "uno"), ("b", "due")]


def test_rows_that_spark_loses_are_not_joined_with_others(
    spark: SparkSession, open_store: OpenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(static_tables, "FEW_ROWS", 0)
    path, events = tmp_path / "labels", spark.createDataFrame([("a", 1), ("b", 2)], GIVEN)
    store = open_store()
    job = nosync.Job(flow_with(labels(spark, path, a="one")), store, spark=spark, shards=2)
    job.advance(0, {"events": events})
    (file,) = path.glob("*.parquet")
    labels(spark, tmp_path / "new", a="uno")
    (new,) = (tmp_path / "new").glob("*.parquet")
    shutil.copy(new, file)
    (path / f".{file.name}.crc").unlink()
    *_, taken = (table for table, known in static_tables._taken.items() if known.rows)
    taken._jdf.queryExecution().withCachedData().collectLeaves().head().cacheBuilder().clearCache(True)
    with pytest.raises(
        nosync.FlowError, match=r"stage named: the table that it joins with has other rows.*job\.upgrade"
    ):
        job.advance(1, {"events": events})
    assert store.last_sealed() == 0


def test_what_spark_kept_is_let_go(
    spark: SparkSession, open_store: OpenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(static_tables, "FEW_ROWS", 0)
    before = {one.id() for one in spark.sparkContext._jsc.sc().getRDDStorageInfo()}
    job = nosync.Job(flow_with(labels(spark, tmp_path / "labels", a="one")), open_store(), spark=spark, shards=2)

    def kept() -> set[int]:
        return {one.id() for one in spark.sparkContext._jsc.sc().getRDDStorageInfo()} - before

    assert kept()
    del job
    gc.collect()
    assert not kept()


def test_tables_that_cannot_be_taken_are_refused(spark: SparkSession, open_store: OpenStore, tmp_path: Path) -> None:
    store, table = open_store(), labels(spark, tmp_path / "labels", a="one")
    with pytest.raises(nosync.FlowError, match="stage named: the table is computed with random functions"):
        nosync.Job(flow_with(table.selectExpr("k", "concat(label, rand()) AS label")), store, spark=spark)
    shutil.rmtree(tmp_path / "labels")
    with pytest.raises(nosync.FlowError, match="stage named: the table that it joins with cannot be read"):
        nosync.Job(flow_with(table), store, spark=spark)


def test_dates_and_times_of_any_year_stay_what_they_are(spark: SparkSession, open_store: OpenStore) -> None:
    """Java's older dates go by another calendar before 1582, and by the time zone of the JVM."""
    texts = ("0001-01-01", "1582-10-07", "1582-10-15", "2011-12-30", "9999-12-31")
    rows = ", ".join(f"('{text}', DATE '{text}', TIMESTAMP '{text} 01:30:00 UTC')" for text in texts)
    table = spark.sql(f"SELECT * FROM VALUES {rows} AS t(k, label, at)")
    flow = nosync.Dataflow("dated")
    flow.source("events", GIVEN).join_static("named", table, on=["k"])
    job = nosync.Job(flow, open_store(), spark=spark, shards=1)
    job.advance(0, {"events": spark.createDataFrame([(text, 1) for text in texts], GIVEN)})
    found = job.read("named").selectExpr("k", "CAST(label AS string)", "unix_micros(at)").collect()
    expected = table.selectExpr("k", "CAST(label AS string)", "unix_micros(at)").collect()
    assert sorted(map(tuple, found)) == sorted(map(tuple, expected))
