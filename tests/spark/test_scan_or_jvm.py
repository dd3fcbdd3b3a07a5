"""Which files tasks read themselves, and which are left to the JVM."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import nosync
from tests.conftest import OpenStore
from tests.helpers.rows_by_two_ways import (
    ROWS,
    ROWS_NAMES,
    SHARDS,
    by_id,
    job_of,
    rows_of,
)
from tests.helpers.scanning import advanced, written

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
pytestmark = pytest.mark.spark


def plain(spark: SparkSession, path: Path) -> DataFrame:
    return spark.read.schema(ROWS).parquet(str(written(path / "plain.parquet", rows_of(0))))


def csv(spark: SparkSession, path: Path) -> DataFrame:
    plain(spark, path).write.csv(str(path / "csv"))
    return spark.read.schema(ROWS).csv(str(path / "csv"))


def cached(spark: SparkSession, path: Path) -> DataFrame:
    """What was cached stays what it is."""
    frame = plain(spark, path)
    spark.read.schema(ROWS).parquet(str(path / "plain.parquet")).cache().count()
    written(path / "plain.parquet", rows_of(0).slice(0, 7))
    return frame


def filtered(spark: SparkSession, path: Path) -> DataFrame:
    return plain(spark, path).where("id > 3")


def of_partitions(spark: SparkSession, path: Path) -> DataFrame:
    """Where a column is both in the files and in the directory's name, the name counts."""
    written(path / "parts" / "n=7" / "a.parquet", rows_of(0))
    return spark.read.parquet(str(path / "parts")).select("id", "name", "n", "flag")


def of_partitions_alone(spark: SparkSession, path: Path) -> DataFrame:
    written(path / "parts" / "n=7" / "a.parquet", rows_of(0))
    return spark.read.schema(ROWS).parquet(str(path / "parts"))


def widened(spark: SparkSession, path: Path) -> DataFrame:
    rows = rows_of(0)
    narrow = rows.set_column(0, "id", rows.column("id").cast(pa.int32()))
    return spark.read.schema(ROWS).parquet(str(written(path / "narrow.parquet", narrow)))


def without_a_column(spark: SparkSession, path: Path) -> DataFrame:
    return spark.read.schema(ROWS).parquet(str(written(path / "less.parquet", rows_of(0).drop_columns(["n"]))))


def in_another_case(spark: SparkSession, path: Path) -> DataFrame:
    upper = rows_of(0).rename_columns(["ID", "name", "n", "flag"])
    return spark.read.schema(ROWS).parquet(str(written(path / "upper.parquet", upper)))


def one_file_of_two(spark: SparkSession, path: Path) -> DataFrame:
    written(path / "two" / "a.parquet", rows_of(0))
    written(path / "two" / "b.parquet", rows_of(0).drop_columns(["n"]))
    return spark.read.schema(ROWS).parquet(str(path / "two"))


def beside_metadata(spark: SparkSession, path: Path) -> DataFrame:
    """Which Spark lists, and does not read."""
    written(path / "some" / "a.parquet", rows_of(0))
    pq.write_metadata(rows_of(0).schema, path / "some" / "_common_metadata")
    return spark.read.schema(ROWS).parquet(str(path / "some"))


def longer_by_now(spark: SparkSession, path: Path) -> DataFrame:
    """Spark reads as much of a file as it had when the DataFrame was made."""
    frame = plain(spark, path)
    written(path / "plain.parquet", pa.concat_tables([rows_of(t) for t in range(20)]))
    return frame


def many_files(spark: SparkSession, path: Path) -> DataFrame:
    for i in range(17):
        written(path / "many" / f"{i}.parquet", rows_of(i, 3))
    return spark.read.schema(ROWS).parquet(str(path / "many"))


@pytest.mark.parametrize(
    "given",
    [csv, cached, filtered, of_partitions, of_partitions_alone, widened, without_a_column, in_another_case, one_file_of_two,
     many_files, beside_metadata, longer_by_now],
)  # fmt: skip
@pytest.mark.long
def test_the_jvm_reads_what_is_not_just_such_files(
    given: Callable[[SparkSession, Path], DataFrame],
    spark: SparkSession,
    open_store: OpenStore,
    scans: list[bool],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    """The log says why."""
    caplog.set_level("DEBUG", "nosync")
    frame = given(spark, tmp_path)
    expected = sorted(map(repr, frame.toArrow().select(ROWS_NAMES).to_pylist()))
    store = open_store()
    try:
        job_of(by_id, spark, store).advance(0, {"rows": frame})
    finally:
        spark.catalog.clearCache()
    assert scans == [False]
    assert "flow f: its input is read by the JVM: " in caplog.text
    assert sorted(map(repr, store.read("rows").to_pylist())) == expected


@pytest.mark.parametrize("what", ["_INDEX", "_FORMAT"])
def test_tables_whose_files_are_parquet_are_read_by_the_jvm(
    what: str,
    spark: SparkSession,
    open_store: OpenStore,
    scans: list[bool],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Those of Delta show as Parquet in a plan, and know which rows of their files count. Here Spark's own stand for them."""
    from nosync.spark import parquet_inputs as files

    monkeypatch.setattr(files, what, "another")
    advanced(job_of(by_id, spark, open_store()), spark, tmp_path, ["rows"], 0, by_jvm=False)
    assert scans == [False]


@pytest.mark.parametrize(
    ("limit", "value", "reason"),
    [("MOST_READERS", SHARDS - 1, "each of 3 shards would read all"), ("MOST_BYTES", 1000, "bytes")],
)
def test_what_would_be_too_much_for_each_task_is_read_by_the_jvm(
    limit: str,
    value: int,
    reason: str,
    spark: SparkSession,
    open_store: OpenStore,
    scans: list[bool],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    from nosync.spark import parquet_inputs as files

    caplog.set_level("DEBUG", "nosync")
    monkeypatch.setattr(files, limit, value)
    advanced(job_of(by_id, spark, open_store()), spark, tmp_path, ["rows"], 0, by_jvm=False)
    assert scans == [False]
    assert reason in caplog.text


@pytest.mark.parametrize("type_", ["array<bigint>", "struct<a: bigint>"])
def test_columns_that_tasks_do_not_hash_are_read_by_the_jvm(
    type_: str, spark: SparkSession, open_store: OpenStore, scans: list[bool], tmp_path: Path
) -> None:
    columns = f"id bigint, more {type_}"
    spark.range(9).selectExpr("id", f"CAST(NULL AS {type_}) AS more").write.parquet(str(tmp_path / "files"))
    flow = nosync.Dataflow("f")
    flow.source("rows", columns)
    store = open_store()
    job = nosync.Job(flow, store, spark=spark, shards=SHARDS)
    job.advance(0, {"rows": spark.read.schema(columns).parquet(str(tmp_path / "files"))})
    assert scans == [False]
    assert store.read("rows").num_rows == 9


def test_files_with_dates_of_another_calendar_are_read_by_the_jvm(
    spark: SparkSession, open_store: OpenStore, scans: list[bool], tmp_path: Path
) -> None:
    """Which they have by what is written in them, or by what Spark is told of those in which nothing is written."""
    columns, default = "id bigint, day date", "spark.sql.parquet.datetimeRebaseModeInRead"
    rows = pa.table({"id": [1, 2], "day": [dt.date(1500, 3, 1), dt.date(2026, 1, 1)]})
    written_by = {
        "rebased": {b"org.apache.spark.version": b"4.1.0", b"org.apache.spark.legacyDateTime": b""},
        "before": {b"org.apache.spark.version": b"2.4.8"},
        "unclear": {b"org.apache.spark.version": b"4.x"},
        "now": {b"org.apache.spark.version": b"4.1.0"},
        "others": {},
    }
    paths = [
        str(written(tmp_path / f"{name}.parquet", rows.replace_schema_metadata(m))) for name, m in written_by.items()
    ]
    reader = spark.read.schema(columns)
    flow = nosync.Dataflow("f")
    flow.source("rows", columns)
    store = open_store()
    job = nosync.Job(flow, store, spark=spark, shards=SHARDS)
    days = []

    def advance(frame: DataFrame) -> None:
        t = len(days)
        expected = sorted(row["day"] for row in frame.toArrow().to_pylist())
        job.advance(t, {"rows": frame})
        days.append(sorted(store.changes("rows", t - 1, t).column("day").to_pylist()))
        assert days[-1] == expected

    for path in paths:
        advance(reader.parquet(path))
    spark.conf.set(default, "LEGACY")
    try:
        advance(reader.parquet(paths[-1]))
    finally:
        spark.conf.unset(default)
    advance(spark.read.schema(columns).option("datetimeRebaseMode", "LEGACY").parquet(paths[-1]))
    assert scans == [False, False, False, True, True, False, False]
    as_written = sorted(rows.column("day").to_pylist())
    assert [day == as_written for day in days[:2]] == [False, False]
    assert days[3:5] == [as_written] * 2
